/* cpu_read.c - cache rows out as bf16 (whole plane, by page table, by list), and rows copied between slots.
 * value = e4m3 * scale in fp32, one rounding to nearest even; bf16 parts keep their bits. */
#include <string.h>

#include "cpu.h"

#define ROWS_PER_TASK 32
#define ROW_COST_NS   130

struct read_job {
    const struct dsk_read_args *args;
    const struct dsk_layout *layout;
    const struct cpu_isa *isa;
};

void dsk_cpu_row_to_bf16(const struct cpu_isa *isa, const struct dsk_layout *layout, float raw_scale,
                         const uint8_t *row, uint16_t *dst)
{
    float values[DSK_MAX_D_QK];
    uint16_t rounded[DSK_MAX_D_QK];
    int n_rounded = layout->id == DSK_LAYOUT_RAW_512_64 ? layout->d_qk : layout->latent;

    if (layout->row_bytes == 2 * layout->d_qk) {
        memcpy(dst, row, (size_t)layout->row_bytes);
        return;
    }
    isa->dequant(layout, raw_scale, row, values);
    isa->round_bf16(values, n_rounded, rounded);
    memcpy(dst, rounded, sizeof(*dst) * (size_t)n_rounded);
    /* RoPE bits as they are: a NaN keeps its payload. They close the row. */
    size_t rope_bytes = sizeof(*dst) * (size_t)(layout->d_qk - n_rounded);
    memcpy(dst + n_rounded, row + (size_t)layout->row_bytes - rope_bytes, rope_bytes);
}

/* Slot of output row i, or -1. */
static int64_t source_slot(const struct dsk_read_args *args, int64_t i)
{
    if (args->mode == DSK_READ_FULL)
        return i;
    if (args->mode == DSK_READ_PAGED)
        return dsk_cpu_map_position(args->first + i, INT64_MAX, args->list, args->n_list, args->kv.n_slots);
    int64_t slot = dsk_cpu_load_i32(args->list, i);
    return slot >= 0 && slot < args->kv.n_slots ? slot : -1;
}

static void read_task(void *user, int worker, int64_t i_task)
{
    const struct read_job *job = user;
    const struct dsk_read_args *args = job->args;
    const int64_t first = i_task * ROWS_PER_TASK;
    const int64_t n_rest = args->n_rows - first;
    const int n_rows = n_rest < ROWS_PER_TASK ? (int)n_rest : ROWS_PER_TASK;
    const uint8_t *rows[ROWS_PER_TASK];

    (void)worker;
    for (int i = 0; i < n_rows; i++) {
        int64_t slot = source_slot(args, first + i);

        rows[i] = slot < 0 ? NULL : dsk_cpu_ptr(dsk_row_address(&args->kv, job->layout->row_bytes, slot));
        if (rows[i] != NULL)
            dsk_cpu_fetch(rows[i], job->layout->row_bytes);
    }
    for (int i = 0; i < n_rows; i++) {
        if (rows[i] != NULL)
            dsk_cpu_row_to_bf16(job->isa, job->layout, args->kv.raw_scale, rows[i],
                                (uint16_t *)dsk_cpu_ptr(args->out) + (first + i) * job->layout->d_qk);
    }
}

dsk_status dsk_cpu_read(struct dsk_stream *s, const struct dsk_read_args *args, struct dsk_err *err)
{
    struct cpu_device *cpu = dsk_cpu_device(s);
    struct read_job job = {args, dsk_layout_get(args->kv.layout), cpu->isa};

    (void)err;
    dsk_cpu_team_run(cpu->team, (args->n_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK,
                     args->n_rows * ROW_COST_NS, read_task, &job);
    return DSK_OK;
}

/* Both ranges lie within a page, so each is one piece of memory. */
dsk_status dsk_cpu_copy_rows(struct dsk_stream *s, const struct dsk_copy_rows_args *args, struct dsk_err *err)
{
    int32_t row_bytes = dsk_layout_get(args->kv.layout)->row_bytes;

    (void)s;
    (void)err;
    memcpy(dsk_cpu_ptr(dsk_row_address(&args->kv, row_bytes, args->dst_slot)),
           dsk_cpu_ptr(dsk_row_address(&args->kv, row_bytes, args->src_slot)),
           (size_t)args->n_rows * (size_t)row_bytes);
    return DSK_OK;
}
