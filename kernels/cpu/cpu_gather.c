/* cpu_gather.c - index lists: logical positions to slots, and the selected reader that fills a workspace of
 * bf16 rows and rewrites the list to it. Every index is read once, checked, and used as read. */
#include <string.h>

#include "../dsk_check.h"
#include "cpu.h"

#define ENTRIES_PER_TASK 32
#define ENTRY_COST_NS    130
#define MAP_COST_NS      2

/* ---- map --------------------------------------------------------------------------------- */

static void map_task(void *user, int worker, int64_t i_row)
{
    const struct dsk_map_args *args = user;
    const uint64_t logical = args->logical + (uint64_t)(i_row * args->logical_row_bytes);
    const uint64_t table = args->tables + (uint64_t)(i_row * args->table_row_bytes);
    int32_t *physical = dsk_cpu_ptr(args->physical + (uint64_t)(i_row * args->physical_row_bytes));
    const int64_t seq_len = dsk_cpu_load_i32(args->seq_lens, i_row);
    const int64_t n_slots = args->n_pages * DSK_PAGE_TOKENS;
    uint32_t n_bad = 0;

    (void)worker;
    for (int32_t i = 0; i < args->topk; i++) {
        int32_t pos = dsk_cpu_load_i32(logical, i);
        int64_t slot = dsk_cpu_map_position(pos, seq_len, table, args->n_table, n_slots);

        n_bad += slot < 0 && pos != -1;
        physical[i] = (int32_t)slot;
    }
    if (args->n_bad != 0)
        ((uint32_t *)dsk_cpu_ptr(args->n_bad))[i_row] = n_bad;
}

dsk_status dsk_cpu_map(struct dsk_stream *s, const struct dsk_map_args *args, struct dsk_err *err)
{
    struct cpu_device *cpu = dsk_cpu_device(s);

    (void)err;
    dsk_cpu_team_run(cpu->team, args->n_rows, (int64_t)args->n_rows * args->topk * MAP_COST_NS, map_task,
                     (void *)(uintptr_t)args);
    return DSK_OK;
}

/* ---- gather ------------------------------------------------------------------------------ */

struct gather_job {
    const struct dsk_gather_args *args;
    const struct dsk_layout *layout;
    const struct cpu_isa *isa;
    int64_t n_entries; /* of the list, or rows of the plane */
    bool by_entry;
};

/* Entry i of the flattened list, as a slot or -1. Its place in new_indices may be the very word just read. */
static int64_t take_entry(const struct dsk_gather_args *args, int64_t i)
{
    int64_t i_row = i / args->topk;
    uint64_t row = args->indices + (uint64_t)(i_row * args->indices_row_bytes);
    int64_t slot = dsk_cpu_load_i32(row, i - i_row * args->topk);

    return slot >= 0 && slot < args->kv.n_slots ? slot : -1;
}

/* Row i of the workspace comes from this slot, or -1; a list entry is rewritten on the way. */
static int64_t workspace_slot(const struct gather_job *job, int64_t i)
{
    if (!job->by_entry)
        return i;
    int64_t slot = take_entry(job->args, i);
    ((int32_t *)dsk_cpu_ptr(job->args->new_indices))[i] = slot < 0 ? -1 : (int32_t)i;
    return slot;
}

static void gather_task(void *user, int worker, int64_t i_task)
{
    const struct gather_job *job = user;
    const struct dsk_kv_view *kv = &job->args->kv;
    const int64_t first = i_task * ENTRIES_PER_TASK;
    const int64_t n_rest = job->n_entries - first;
    const int n_rows = n_rest < ENTRIES_PER_TASK ? (int)n_rest : ENTRIES_PER_TASK;
    const uint8_t *rows[ENTRIES_PER_TASK];

    (void)worker;
    for (int i = 0; i < n_rows; i++) {
        int64_t slot = workspace_slot(job, first + i);

        rows[i] = slot < 0 ? NULL : dsk_cpu_ptr(dsk_row_address(kv, job->layout->row_bytes, slot));
        if (rows[i] != NULL)
            dsk_cpu_fetch(rows[i], job->layout->row_bytes);
    }
    for (int i = 0; i < n_rows; i++) {
        uint16_t *dst = (uint16_t *)dsk_cpu_ptr(job->args->workspace) + (first + i) * job->layout->d_qk;

        if (rows[i] != NULL)
            dsk_cpu_row_to_bf16(job->isa, job->layout, kv->raw_scale, rows[i], dst);
    }
}

dsk_status dsk_cpu_gather(struct dsk_stream *s, const struct dsk_gather_args *args, struct dsk_err *err)
{
    struct cpu_device *cpu = dsk_cpu_device(s);
    const int64_t n_list = (int64_t)args->n_rows * args->topk;
    struct gather_job job = {args, dsk_layout_get(args->kv.layout), cpu->isa, n_list,
                             dsk_gather_is_by_entry(args)};

    (void)err;
    if (args->n_rows == 0) { /* no list, no workspace, in either branch */
        job.n_entries = 0;
    } else if (!job.by_entry) {
        int32_t *new_indices = dsk_cpu_ptr(args->new_indices);

        for (int64_t i = 0; i < n_list; i++)
            new_indices[i] = (int32_t)take_entry(args, i);
        job.n_entries = args->kv.n_slots;
    }
    dsk_cpu_team_run(cpu->team, (job.n_entries + ENTRIES_PER_TASK - 1) / ENTRIES_PER_TASK,
                     job.n_entries * ENTRY_COST_NS, gather_task, &job);
    if (args->n_workspace_p != NULL)
        *args->n_workspace_p = job.n_entries;
    return DSK_OK;
}
