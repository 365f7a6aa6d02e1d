/* gpu_ops.c - append, readers, gather, map, merge and row copies on a GPU: the arguments as the kernels take them.
 * Arguments come checked; what lies in device memory is checked where the kernels use it. */
#include <stdlib.h>
#include <string.h>

#include "../dsk_check.h"
#include "gpu.h"

DSK_STATIC_ASSERT(GPU_READ_FULL == DSK_READ_FULL && GPU_READ_PAGED == DSK_READ_PAGED
                      && GPU_READ_SELECTED == DSK_READ_SELECTED,
                  "the kernels know the modes by the same numbers");

#define ROWS_PER_BLOCK 8 /* 32 of GPU_BLOCK threads take a row: a wave of 32, or half of one of 64 */

static struct gpu_launch_dims dims_of(const struct gpu_stream *stream, int64_t n, int64_t per_block,
                                      uint32_t block)
{
    const struct gpu_device *gpu = (const struct gpu_device *)stream->base.dev;
    const struct gpu_launch_dims dims = {.grid = {(uint32_t)((n + per_block - 1) / per_block), 1, 1},
                                         .block = block,
                                         .is_dependent = gpu->props.arch_major == gpu->code->dependent_arch};

    return dims;
}

/* ---- append ------------------------------------------------------------------------------ */

/* Slots that rise are all different, as those of one sequence on rising pages are. No branches: it vectorises. */
static bool is_rising(const int32_t *slots, int32_t n)
{
    uint32_t is_odd = slots[0] < 0;

    for (int32_t i = 1; i < n; i++)
        is_odd |= slots[i] <= slots[i - 1];
    return is_odd == 0;
}

/* Rows of one launch run in no order, so of equal slots only the last may be written. The table holds slot + 1, open
 * addressing, and is cleared for as many places as it uses. */
static void supersede(uint64_t *table, int32_t *slots, int32_t n)
{
    uint32_t n_places = 64;

    if (is_rising(slots, n))
        return;
    while (n_places < 2 * (uint32_t)n)
        n_places *= 2;
    memset(table, 0, n_places * sizeof(*table));
    for (int32_t i = n - 1; i >= 0; i--) {
        if (slots[i] < 0)
            continue;
        uint64_t slot = (uint64_t)slots[i] + 1;
        uint64_t at = (slot * UINT64_C(0x9e3779b97f4a7c15)) >> 40 & (n_places - 1);
        while (table[at] != 0 && table[at] != slot)
            at = (at + 1) & (n_places - 1);
        if (table[at] == slot)
            slots[i] = GPU_SLOT_SUPERSEDED;
        table[at] = slot;
    }
}

/* Rows [first, first + n) of the batch. */
static struct gpu_append_args append_args(const struct dsk_append_args *args, int32_t first, int32_t n)
{
    const struct gpu_append_args out = {
        .kv = args->kv,
        .rows = args->rows + (uint64_t)(first * args->row_bytes),
        .row_bytes = args->row_bytes,
        .n_nonfinite = args->n_nonfinite == 0 ? 0 : args->n_nonfinite + 4 * (uint64_t)first,
        .n_rows = n,
        .rule = args->rule};

    return out;
}

/* Slots of a part into the ring, as the caller has them, and on to the device. */
static dsk_status stage_slots(struct gpu_stream *stream, const int32_t *slots, int32_t n, bool is_write,
                              struct dsk_err *err)
{
    struct gpu_device *gpu = dsk_gpu_device(&stream->base);
    void *host;
    dsk_status status = dsk_gpu_ring_take(stream, 4 * (uint64_t)n, &host);

    if (status != DSK_OK)
        return dsk_fail(err, status, "slots", n, "%s", dsk_status_text(status));
    memcpy(host, slots, 4 * (size_t)n);
    if (is_write)
        supersede(stream->slot_table, host, n);
    return dsk_gpu_work(
        gpu, gpu->driver.copy_in(&gpu->driver, stream->slots, host, 4 * (uint64_t)n, stream->handle),
        "copy_in", err);
}

static dsk_status append_few(struct gpu_stream *stream, const struct dsk_append_args *args,
                             struct dsk_err *err)
{
    const struct gpu_launch_dims dims = dims_of(stream, args->n_rows, ROWS_PER_BLOCK, GPU_BLOCK);
    struct gpu_append_few few;

    few.args = append_args(args, 0, args->n_rows);
    memcpy(few.slots, args->slots, 4 * (size_t)args->n_rows);
    supersede(stream->slot_table, few.slots, args->n_rows);
    return dsk_gpu_launch(stream, args->n_rows <= 64 ? GPU_FN_APPEND_FEW_64 : GPU_FN_APPEND_FEW_960, &dims,
                          &few, err);
}

/* Is slots[i + j] == slots[i] + j for all j < n? No branches: it vectorises. */
static bool is_run(const int32_t *slots, int32_t n)
{
    uint32_t is_odd = 0;

    for (int32_t j = 0; j < n; j++)
        is_odd |= (uint32_t)slots[j] - (uint32_t)slots[0] - (uint32_t)j;
    return is_odd == 0;
}

/* How many of n rows, at least 1, make one run from *slots on: of neighbours, or of rows to skip. */
static int32_t run_length(const int32_t *slots, int32_t n)
{
    int32_t most = n < DSK_PAGE_TOKENS ? n : DSK_PAGE_TOKENS, length = 1;

    if (slots[0] >= 0 && is_run(slots, most)) /* a page's length in one go */
        return most;
    while (length < most && slots[length] == (slots[0] < 0 ? slots[0] : (int64_t)slots[0] + length))
        length++;
    return length;
}

/* Rows as runs, as many as there is room for; returns how many rows those are. */
static int32_t find_runs(struct gpu_append_runs *runs, const int32_t *slots, int32_t n)
{
    int64_t next = INT64_MIN; /* the slot that continues the last run */
    int32_t i = 0;

    runs->n_runs = 0;
    while (i < n) {
        int32_t length = run_length(slots + i, n - i);

        if (slots[i] != next) {
            if (runs->n_runs == GPU_MAX_RUNS)
                break;
            runs->runs[runs->n_runs++] = (struct gpu_run){i, slots[i]};
        }
        next = slots[i] < 0 ? slots[i] : (int64_t)slots[i] + length;
        i += length;
    }
    return i;
}

static int compare_ranges(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

#define PAGE_PLACES 2048 /* more than twice GPU_MAX_RUNS */

/* Does each run keep to a page of its own? That is the usual case, and sorting costs more than a launch. */
static bool have_own_pages(const int64_t *ranges, int32_t n)
{
    uint32_t pages[PAGE_PLACES] = {0}; /* page + 1 */

    for (int32_t k = 0; k < n; k++) {
        uint32_t first = (uint32_t)(ranges[k] >> 32), last = first + (uint32_t)(ranges[k] & INT32_MAX) - 1;
        uint32_t page = first / DSK_PAGE_TOKENS, at = page * 2654435761u >> 21;

        if (last / DSK_PAGE_TOKENS != page)
            return false;
        while (pages[at] != 0 && pages[at] != page + 1)
            at = (at + 1) % PAGE_PLACES;
        if (pages[at] != 0)
            return false;
        pages[at] = page + 1;
    }
    return true;
}

/* Do no two runs of these n_rows rows share a slot? */
static bool are_disjoint(const struct gpu_append_runs *runs, int32_t n_rows)
{
    int64_t ranges[GPU_MAX_RUNS]; /* first slot, then length: they sort as numbers */
    bool is_sorted = true;
    int32_t n = 0;

    for (int32_t k = 0; k < runs->n_runs; k++) {
        int32_t end = k + 1 < runs->n_runs ? runs->runs[k + 1].row : n_rows;

        if (runs->runs[k].slot < 0)
            continue;
        ranges[n] = (int64_t)runs->runs[k].slot << 32 | (int64_t)(end - runs->runs[k].row);
        is_sorted = is_sorted && (n == 0 || ranges[n] > ranges[n - 1]);
        n++;
    }
    if (!is_sorted && have_own_pages(ranges, n))
        return true;
    if (!is_sorted)
        qsort(ranges, (size_t)n, sizeof(ranges[0]), compare_ranges);
    for (int32_t k = 1; k < n; k++) {
        if ((ranges[k - 1] >> 32) + (ranges[k - 1] & INT32_MAX) > ranges[k] >> 32)
            return false;
    }
    return true;
}

/* The kernel with the least parameters that hold n runs. */
static int32_t runs_of(int32_t n)
{
    return n <= 24 ? GPU_FN_APPEND_RUNS_24 : n <= 150 ? GPU_FN_APPEND_RUNS_150 : GPU_FN_APPEND_RUNS_500;
}

#define ROWS_PER_RUN 8 /* on average at least, or a copy of the slots is cheaper */

/* Sequences fill pages in order, so even large batches are few runs, which fit a launch's parameters: no copy. Returns
 * how many rows it launched; the rest are no such runs. */
static dsk_status append_runs(struct gpu_stream *stream, const struct dsk_append_args *args,
                              int32_t *n_done_p, struct dsk_err *err)
{
    struct gpu_append_runs runs;

    for (*n_done_p = 0; *n_done_p < args->n_rows;) {
        const int32_t n_left = args->n_rows - *n_done_p,
                      n = find_runs(&runs, args->slots + *n_done_p, n_left);
        const struct gpu_launch_dims dims = dims_of(stream, n, ROWS_PER_BLOCK, GPU_BLOCK);
        dsk_status status;

        if ((n < n_left && n < ROWS_PER_RUN * GPU_MAX_RUNS) || !are_disjoint(&runs, n))
            return DSK_OK;
        runs.args = append_args(args, *n_done_p, n);
        status = dsk_gpu_launch(stream, runs_of(runs.n_runs), &dims, &runs, err);
        if (status != DSK_OK)
            return status;
        *n_done_p += n;
    }
    return DSK_OK;
}

/* One pass over the batch from a row on: the writing one, or the checking one that lowers stream->flag. */
static dsk_status append_pass(struct gpu_stream *stream, const struct dsk_append_args *args, int32_t from,
                              bool is_write, struct dsk_err *err)
{
    dsk_status status = DSK_OK;

    for (int64_t first = from; first < args->n_rows && status == DSK_OK; first += GPU_LAUNCH_SLOTS) {
        int64_t n_left = args->n_rows - first;
        int32_t n = (int32_t)(n_left < GPU_LAUNCH_SLOTS ? n_left : GPU_LAUNCH_SLOTS);
        const struct gpu_launch_dims dims = dims_of(stream, n, ROWS_PER_BLOCK, GPU_BLOCK);
        struct gpu_append_args part = append_args(args, (int32_t)first, n);

        part.slots = stream->slots;
        part.first_bad = stream->flag;
        status = stage_slots(stream, args->slots + first, n, is_write, err);
        if (status == DSK_OK)
            status =
                dsk_gpu_launch(stream, is_write ? GPU_FN_APPEND : GPU_FN_APPEND_CHECK, &dims, &part, err);
    }
    return status;
}

/* A strict append has to know before it writes, so it waits for its first pass. The flag counts within a part of the
 * batch; strict batches beyond one part name a row of it. */
static dsk_status check_finite(struct gpu_stream *stream, const struct dsk_append_args *args,
                               struct dsk_err *err)
{
    struct gpu_device *gpu = dsk_gpu_device(&stream->base);
    const struct gpu_driver *driver = &gpu->driver;
    const int32_t none = 0x7f7f7f7f;
    void *host;
    int32_t first_bad;
    dsk_status status =
        dsk_gpu_work(gpu, driver->set(driver, stream->flag, 0x7f, 4, stream->handle), "mem_set", err);

    if (status != DSK_OK || (status = append_pass(stream, args, 0, false, err)) != DSK_OK
        || (status = dsk_gpu_ring_take(stream, 4, &host)) != DSK_OK
        || (status = dsk_gpu_work(gpu, driver->copy_out(driver, host, stream->flag, 4, stream->handle),
                                  "copy_out", err))
               != DSK_OK
        || (status = dsk_gpu_stream_sync(&stream->base)) != DSK_OK)
        return status;
    memcpy(&first_bad, host, sizeof(first_bad));
    if (first_bad != none)
        return dsk_fail(err, DSK_E_NONFINITE, "rows", first_bad,
                        "this row holds NaN or infinity; nothing was written");
    return DSK_OK;
}

dsk_status dsk_gpu_append(struct dsk_stream *s, const struct dsk_append_args *args, struct dsk_err *err)
{
    struct gpu_stream *stream = dsk_gpu_stream(s);
    int32_t n_done = 0;
    dsk_status status = dsk_gpu_enter(dsk_gpu_device(s));

    if (status == DSK_OK && (args->flags & DSK_APPEND_STRICT) != 0)
        status = check_finite(stream, args, err);
    if (status != DSK_OK)
        return status;
    if (args->n_rows <= GPU_FEW_SLOTS)
        return append_few(stream, args, err);
    status = append_runs(stream, args, &n_done, err);
    return status != DSK_OK ? status : append_pass(stream, args, n_done, true, err);
}

/* ---- readers ----------------------------------------------------------------------------- */

static dsk_status launch_read(struct gpu_stream *stream, struct gpu_read_args *args, struct dsk_err *err)
{
    const int32_t per_wave = GPU_ROWS_PER_WAVE(dsk_layout_get(args->kv.layout)->row_bytes);
    const struct gpu_launch_dims dims = dims_of(stream, args->n_rows, ROWS_PER_BLOCK * per_wave, GPU_BLOCK);

    return args->n_rows == 0 ? DSK_OK : dsk_gpu_launch(stream, GPU_FN_READ, &dims, args, err);
}

dsk_status dsk_gpu_read(struct dsk_stream *s, const struct dsk_read_args *args, struct dsk_err *err)
{
    struct gpu_read_args read = {.kv = args->kv,
                                 .list = args->list,
                                 .out = args->out,
                                 .n_rows = args->n_rows,
                                 .first = args->first,
                                 .n_list = args->n_list,
                                 .mode = args->mode};
    dsk_status status = dsk_gpu_enter(dsk_gpu_device(s));

    return status != DSK_OK ? status : launch_read(dsk_gpu_stream(s), &read, err);
}

dsk_status dsk_gpu_gather(struct dsk_stream *s, const struct dsk_gather_args *args, struct dsk_err *err)
{
    const int64_t n_entries = (int64_t)args->n_rows * args->topk;
    const bool by_entry = dsk_gather_is_by_entry(args);
    struct gpu_stream *stream = dsk_gpu_stream(s);
    struct gpu_read_args read = {.kv = args->kv,
                                 .list = by_entry ? args->indices : 0,
                                 .out = args->workspace,
                                 .new_indices = args->new_indices,
                                 .n_rows = args->n_rows == 0 ? 0
                                           : by_entry        ? n_entries
                                                             : args->kv.n_slots,
                                 .list_row_bytes = args->indices_row_bytes,
                                 .mode = by_entry ? GPU_READ_ENTRIES : GPU_READ_FULL,
                                 .topk = args->topk};
    struct gpu_clean_args clean = {.indices = args->indices,
                                   .new_indices = args->new_indices,
                                   .indices_row_bytes = args->indices_row_bytes,
                                   .n_entries = n_entries,
                                   .n_slots = args->kv.n_slots,
                                   .topk = args->topk};
    dsk_status status = dsk_gpu_enter(dsk_gpu_device(s));

    if (status == DSK_OK && !by_entry && n_entries > 0) {
        const struct gpu_launch_dims dims = dims_of(stream, n_entries, GPU_BLOCK, GPU_BLOCK);

        status = dsk_gpu_launch(stream, GPU_FN_CLEAN, &dims, &clean, err);
    }
    if (status == DSK_OK)
        status = launch_read(stream, &read, err);
    if (status == DSK_OK && args->n_workspace_p != NULL)
        *args->n_workspace_p = read.n_rows;
    return status;
}

/* ---- map, merge, copy -------------------------------------------------------------------- */

dsk_status dsk_gpu_map(struct dsk_stream *s, const struct dsk_map_args *args, struct dsk_err *err)
{
    const struct gpu_launch_dims dims = dims_of(dsk_gpu_stream(s), args->n_rows, 1, GPU_MAP_BLOCK);
    struct gpu_map_args map = {.logical = args->logical,
                               .physical = args->physical,
                               .tables = args->tables,
                               .seq_lens = args->seq_lens,
                               .n_bad = args->n_bad,
                               .logical_row_bytes = args->logical_row_bytes,
                               .physical_row_bytes = args->physical_row_bytes,
                               .table_row_bytes = args->table_row_bytes,
                               .n_slots = args->n_pages * DSK_PAGE_TOKENS,
                               .topk = args->topk,
                               .n_table = args->n_table};
    dsk_status status = dsk_gpu_enter(dsk_gpu_device(s));

    return status != DSK_OK ? status : dsk_gpu_launch(dsk_gpu_stream(s), GPU_FN_MAP, &dims, &map, err);
}

dsk_status dsk_gpu_merge(struct dsk_stream *s, const struct dsk_merge_args *args, struct dsk_err *err)
{
    const int64_t n_columns = (int64_t)args->n_rows * args->h_q;
    struct gpu_launch_dims dims = dims_of(dsk_gpu_stream(s), args->n_rows, 1, GPU_MERGE_BLOCK);
    struct gpu_merge_args merge = {.out_parts = args->out_parts,
                                   .lse_parts = args->lse_parts,
                                   .out = args->out,
                                   .lse = args->lse,
                                   .n_columns = n_columns,
                                   .n_parts = args->n_parts,
                                   .d_v = args->d_v,
                                   .part_dtype = args->part_dtype,
                                   .out_dtype = args->out_dtype};
    dsk_status status = dsk_gpu_enter(dsk_gpu_device(s));

    dims.grid[1] = (uint32_t)args->h_q;
    return status != DSK_OK ? status : dsk_gpu_launch(dsk_gpu_stream(s), GPU_FN_MERGE, &dims, &merge, err);
}

/* Both ranges lie within a page, so each is one piece of memory. */
dsk_status dsk_gpu_copy_rows(struct dsk_stream *s, const struct dsk_copy_rows_args *args, struct dsk_err *err)
{
    struct gpu_device *gpu = dsk_gpu_device(s);
    int32_t row_bytes = dsk_layout_get(args->kv.layout)->row_bytes;
    dsk_status status = dsk_gpu_enter(gpu);

    if (status != DSK_OK)
        return status;
    return dsk_gpu_work(
        gpu,
        gpu->driver.copy_device(&gpu->driver, dsk_row_address(&args->kv, row_bytes, args->dst_slot),
                                dsk_row_address(&args->kv, row_bytes, args->src_slot),
                                (uint64_t)args->n_rows * (uint64_t)row_bytes, dsk_gpu_stream(s)->handle),
        "copy_device", err);
}
