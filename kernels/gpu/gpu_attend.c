/* gpu_attend.c - an attend call as launches: rows with their addresses worked out, a plan for their number, the
 * argument block on its way, then the graph of the shape.
 *
 * Rows are padded to a bucket, so that few shapes cover all row counts; a padded row writes nothing. The plan is made
 * for the bucket also where graphs are off, so both ways run the same kernels on the same splits: same bits. */
#include <string.h>

#include "gpu.h"

/* What is left to launch: seg's rows from i_row on, then the segments after it. */
struct cursor {
    const struct dsk_attend_args *args;
    int32_t i_seg;
    int32_t i_row;
};

static int32_t bucket_of(int32_t n_rows)
{
    int32_t step = 1;

    while (n_rows > 8 * step) /* eight buckets to each doubling: at most an eighth of padding */
        step *= 2;
    return (n_rows + step - 1) / step * step;
}

/* 0 where every address and pitch of the launch is a multiple of 16. */
static uint64_t misalignment(const struct dsk_attend_row *row)
{
    return (row->q | row->out | (uint64_t)row->q_head_bytes | (uint64_t)row->out_head_bytes) & 15u;
}

static struct dsk_attend_row make_row(const struct dsk_attend_seg *seg, int32_t i)
{
    const struct dsk_attend_row row = {
        .q = seg->q + (uint64_t)(i * seg->q_row_bytes),
        .out = seg->out + (uint64_t)(i * seg->out_row_bytes),
        .lse = seg->lse == 0 ? 0 : seg->lse + (uint64_t)(i * seg->lse_row_bytes),
        .indices = seg->indices + (uint64_t)(i * seg->indices_row_bytes),
        .length = seg->lengths == 0 ? 0 : seg->lengths + 4 * (uint64_t)i,
        .sink = seg->sink,
        .table = seg->space == DSK_SPACE_LOGICAL ? seg->table : 0,
        .n_bad = seg->n_bad == 0 ? 0 : seg->n_bad + 4 * (uint64_t)i,
        .q_head_bytes = seg->q_head_bytes,
        .out_head_bytes = seg->out_head_bytes,
        .topk = seg->topk,
        .space = seg->space,
        .n_table = seg->n_table,
        .seq_len = seg->seq_len,
        .softmax_scale = seg->softmax_scale};

    return row;
}

/* Rows left from here on, and the longest list among the first n_max of them. */
static int64_t look_ahead(const struct cursor *at, int64_t n_max, int32_t *topk_p)
{
    int64_t n = 0;

    *topk_p = 0;
    for (int32_t i = at->i_seg; i < at->args->n_segs && n < n_max; i++) {
        const struct dsk_attend_seg *seg = &at->args->segs[i];
        int32_t n_rows = seg->n_rows - (i == at->i_seg ? at->i_row : 0);

        n += n_rows;
        if (n_rows > 0 && seg->topk > *topk_p)
            *topk_p = seg->topk;
    }
    return n < n_max ? n : n_max;
}

/* Writes n rows and moves on; returns the or of their misalignments. */
static uint64_t take_rows(struct cursor *at, struct dsk_attend_row *rows, int32_t n)
{
    uint64_t odd = 0;

    for (int32_t i = 0; i < n; i++) {
        while (at->i_row >= at->args->segs[at->i_seg].n_rows) {
            at->i_seg++;
            at->i_row = 0;
        }
        rows[i] = make_row(&at->args->segs[at->i_seg], at->i_row++);
        odd |= misalignment(&rows[i]);
    }
    return odd;
}

/* The shape of n rows. Two lists are of one shape if they take the same number of tiles. */
static void fill_shape(struct gpu_attend_shape *shape, const struct dsk_attend_args *args, int32_t n_rows,
                       int32_t topk, bool is_aligned)
{
    const int32_t most = INT32_MAX / 64 * 64;

    memset(shape, 0, sizeof(*shape)); /* it is compared as bytes */
    shape->layout = args->kv.layout;
    shape->n_rows = bucket_of(n_rows);
    shape->h_q = args->h_q;
    shape->topk = topk > most ? INT32_MAX : (topk + 63) / 64 * 64;
    shape->out_dtype = args->out_dtype;
    shape->flags = args->flags;
    shape->is_aligned = is_aligned;
}

static bool is_plane_aligned(const struct dsk_kv_view *kv)
{
    return ((kv->base | (uint64_t)kv->page_pitch_bytes) & 15u) == 0;
}

static bool fits(const struct gpu_attend_plan *plan)
{
    return dsk_gpu_round_up(plan->part_out_bytes, 256) + dsk_gpu_round_up(plan->part_lse_bytes, 256)
               + dsk_gpu_round_up(plan->part_ref_bytes, 256)
           <= GPU_PART_BYTES;
}

static bool plan_of(const struct gpu_device *gpu, const struct gpu_attend_shape *shape, struct gpu_attend_plan *plan,
                    struct dsk_err *err)
{
    return gpu->code->plan_attend(&gpu->props, shape, (gpu->flags & DSK_DEVICE_PORTABLE) != 0, plan, err);
}

/* Fewer rows until the partial results fit the scratch. A launch of one row always does. */
static bool choose(const struct gpu_device *gpu, const struct cursor *at, int32_t *n_p,
                   struct gpu_attend_shape *shape, struct gpu_attend_plan *plan, struct dsk_err *err)
{
    int32_t topk, n = (int32_t)look_ahead(at, GPU_LAUNCH_ROWS, &topk);

    for (;; n = (n + 1) / 2) {
        fill_shape(shape, at->args, n, topk, is_plane_aligned(&at->args->kv));
        if (!plan_of(gpu, shape, plan, err))
            return false;
        if (fits(plan) || n == 1)
            break;
    }
    *n_p = n;
    return true;
}

static void fill_block(struct dsk_attend_block *block, const struct gpu_stream *stream,
                       const struct dsk_attend_args *args, const struct gpu_attend_shape *shape,
                       const struct gpu_attend_plan *plan)
{
    const uint64_t lse = stream->parts + dsk_gpu_round_up(plan->part_out_bytes, 256);
    const uint64_t ref = lse + dsk_gpu_round_up(plan->part_lse_bytes, 256);

    memset(block, 0, sizeof(*block));
    block->kv = args->kv;
    block->rows = stream->block + GPU_BLOCK_BYTES;
    block->part_out = plan->part_out_bytes == 0 ? 0 : stream->parts;
    block->part_lse = plan->part_lse_bytes == 0 ? 0 : lse;
    block->part_ref = plan->part_ref_bytes == 0 ? 0 : ref;
    block->n_rows = shape->n_rows;
    block->h_q = args->h_q;
    block->out_dtype = args->out_dtype;
    block->flags = args->flags;
    block->n_splits = plan->n_splits;
    block->split_entries = plan->split_entries;
}

/* One launch of as many rows as fit it. */
static dsk_status launch_some(struct gpu_stream *stream, struct cursor *at, struct dsk_err *err)
{
    struct gpu_device *gpu = dsk_gpu_device(&stream->base);
    struct gpu_attend_shape shape;
    struct gpu_attend_plan plan;
    struct dsk_attend_row *rows;
    uint8_t *host;
    void *taken;
    uint64_t bytes;
    int32_t n;
    dsk_status status;

    if (!choose(gpu, at, &n, &shape, &plan, err))
        return DSK_E_UNSUPPORTED;
    bytes = GPU_BLOCK_BYTES + (uint64_t)shape.n_rows * sizeof(*rows);
    status = dsk_gpu_ring_take(stream, bytes, &taken);
    if (status != DSK_OK)
        return dsk_fail(err, status, "segs", n, "%s", dsk_status_text(status));
    host = taken;
    rows = (struct dsk_attend_row *)(void *)(host + GPU_BLOCK_BYTES);
    if (take_rows(at, rows, n) != 0 && shape.is_aligned) { /* rare: plan once more, for rows that are not */
        shape.is_aligned = false;
        if (!plan_of(gpu, &shape, &plan, err))
            return DSK_E_UNSUPPORTED;
    }
    memset(rows + n, 0, (size_t)(shape.n_rows - n) * sizeof(*rows));
    fill_block((struct dsk_attend_block *)(void *)host, stream, at->args, &shape, &plan);
    status = dsk_gpu_work(gpu, gpu->driver.copy_in(&gpu->driver, stream->block, host, bytes, stream->handle),
                          "copy_in", err);
    return status != DSK_OK ? status : dsk_gpu_graph_run(stream, &shape, &plan, err);
}

dsk_status dsk_gpu_attend(struct dsk_stream *s, const struct dsk_attend_args *args, struct dsk_err *err)
{
    struct cursor at = {args, 0, 0};
    int32_t topk;
    dsk_status status = dsk_gpu_enter(dsk_gpu_device(s));

    while (status == DSK_OK && look_ahead(&at, 1, &topk) > 0)
        status = launch_some(dsk_gpu_stream(s), &at, err);
    return status;
}

bool dsk_gpu_supports(const struct dsk_device *dev, const struct dsk_attend_shape *shape, struct dsk_err *err)
{
    const struct dsk_attend_args args = {
        .kv = {.layout = shape->layout}, .h_q = shape->h_q, .out_dtype = shape->out_dtype};
    struct gpu_attend_shape one;
    struct gpu_attend_plan plan;

    fill_shape(&one, &args, 1, shape->topk, false);
    return plan_of((const struct gpu_device *)dev, &one, &plan, err);
}
