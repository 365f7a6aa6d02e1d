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

static bool is_row_aligned(const struct dsk_attend_row *row)
{
    return ((row->q | row->out | (uint64_t)row->q_head_bytes | (uint64_t)row->out_head_bytes) & 15u) == 0;
}

static struct dsk_attend_row make_row(const struct dsk_attend_seg *seg, int32_t i)
{
    const struct dsk_attend_row row = {.q = seg->q + (uint64_t)(i * seg->q_row_bytes),
                                       .out = seg->out + (uint64_t)(i * seg->out_row_bytes),
                                       .lse =
                                           seg->lse == 0 ? 0 : seg->lse + (uint64_t)(i * seg->lse_row_bytes),
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

/* Rows left from here on, at most n_max. */
static int32_t count_rows(const struct cursor *at, int32_t n_max)
{
    int64_t n = -(int64_t)at->i_row;

    for (int32_t i = at->i_seg; i < at->args->n_segs && n < n_max; i++)
        n += at->args->segs[i].n_rows;
    return (int32_t)(n < n_max ? n : n_max);
}

/* The segment of the next row. */
static const struct dsk_attend_seg *next_seg(struct cursor *at)
{
    while (at->i_row >= at->args->segs[at->i_seg].n_rows) {
        at->i_seg++;
        at->i_row = 0;
    }
    return &at->args->segs[at->i_seg];
}

static void advance(struct cursor *at, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        (void)next_seg(at);
        at->i_row++;
    }
}

/* What the rows of a launch have in common. */
struct traits {
    int32_t topk;
    bool is_aligned;
};

/* Writes up to n rows from *at on, which stays where it is, and returns how many. Where a row's bits may not depend on
 * its company, only rows alike share a launch: the plan must be the one that each would have alone. */
static int32_t write_rows(const struct cursor *at, struct dsk_attend_row *rows, int32_t n,
                          struct traits *traits)
{
    const bool is_invariant = (at->args->flags & DSK_ATTEND_BATCH_INVARIANT) != 0;
    struct cursor next = *at;

    for (int32_t i = 0; i < n; i++) {
        const struct dsk_attend_seg *seg = next_seg(&next);
        bool is_aligned;

        rows[i] = make_row(seg, next.i_row++);
        is_aligned = is_row_aligned(&rows[i]);
        if (i == 0)
            *traits = (struct traits){seg->topk, is_aligned};
        if (is_invariant && (seg->topk != traits->topk || is_aligned != traits->is_aligned))
            return i;
        traits->topk = seg->topk > traits->topk ? seg->topk : traits->topk;
        traits->is_aligned = traits->is_aligned && is_aligned;
    }
    return n;
}

/* The shape of n rows. Lists are of one shape if they take the same number of tiles. */
static void fill_shape(struct gpu_attend_shape *shape, const struct dsk_attend_args *args, int32_t n,
                       const struct traits *traits)
{
    memset(shape, 0, sizeof(*shape)); /* it is compared as bytes */
    shape->layout = args->kv.layout;
    shape->n_rows = bucket_of(n);
    shape->h_q = args->h_q;
    shape->topk = ((int64_t)traits->topk + 63) / 64 * 64;
    shape->out_dtype = args->out_dtype;
    shape->flags = args->flags;
    shape->is_aligned = traits->is_aligned;
}

static bool fits(const struct gpu_attend_plan *plan)
{
    return dsk_gpu_round_up(plan->part_out_bytes, 256) + dsk_gpu_round_up(plan->part_lse_bytes, 256)
               + dsk_gpu_round_up(plan->part_ref_bytes, 256)
           <= GPU_PART_BYTES;
}

static dsk_status plan_of(const struct gpu_device *gpu, const struct gpu_attend_shape *shape,
                          struct gpu_attend_plan *plan, struct dsk_err *err)
{
    return gpu->code->plan_attend(&gpu->props, shape, gpu->flags, plan, err);
}

/* Fewer of the *n_p rows, until their partial results fit the scratch. One row's always do. */
static dsk_status choose(const struct gpu_device *gpu, const struct dsk_attend_args *args,
                         const struct traits *traits, int32_t *n_p, struct gpu_attend_shape *shape,
                         struct gpu_attend_plan *plan, struct dsk_err *err)
{
    for (;; *n_p = (*n_p + 1) / 2) {
        dsk_status status;

        fill_shape(shape, args, *n_p, traits);
        status = plan_of(gpu, shape, plan, err);
        if (status != DSK_OK)
            return status;
        if (fits(plan))
            return DSK_OK;
        if (*n_p == 1)
            return dsk_fail(err, DSK_E_UNSUPPORTED, "topk", traits->topk,
                            "the partial results of one row are more than the scratch holds");
    }
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

/* Rows as they are launched, and what they are launched as. */
struct batch {
    struct dsk_attend_block *block;
    struct dsk_attend_row *rows;
    struct gpu_attend_shape shape;
    struct gpu_attend_plan plan;
    int32_t n;
};

/* Up to batch->n rows from *at on, planned, written and padded. */
static dsk_status make_batch(struct gpu_stream *stream, struct cursor *at, struct batch *batch,
                             struct dsk_err *err)
{
    struct gpu_device *gpu = dsk_gpu_device(&stream->base);
    struct traits traits = {0, false};
    dsk_status status;

    batch->n = write_rows(at, batch->rows, batch->n, &traits);
    if (((at->args->kv.base | (uint64_t)at->args->kv.page_pitch_bytes) & 15u) != 0)
        traits.is_aligned = false;
    status = choose(gpu, at->args, &traits, &batch->n, &batch->shape, &batch->plan, err);
    if (status != DSK_OK)
        return status;
    advance(at, batch->n);
    memset(batch->rows + batch->n, 0, (size_t)(batch->shape.n_rows - batch->n) * sizeof(*batch->rows));
    fill_block(batch->block, stream, at->args, &batch->shape, &batch->plan);
    return DSK_OK;
}

/* Few rows travel as parameters of a launch. */
static dsk_status launch_few(struct gpu_stream *stream, struct cursor *at, int32_t n, struct dsk_err *err)
{
    struct gpu_upload_args upload; /* large, and filled as far as it is used */
    struct batch batch = {.block = &upload.head, .rows = upload.rows, .n = n};
    dsk_status status = make_batch(stream, at, &batch, err);

    upload.block = stream->block;
    upload.n_rows = batch.shape.n_rows;
    return status != DSK_OK ? status : dsk_gpu_graph_run(stream, &batch.shape, &batch.plan, &upload, err);
}

/* More are copied. */
static dsk_status launch_many(struct gpu_stream *stream, struct cursor *at, int32_t n, struct dsk_err *err)
{
    struct gpu_device *gpu = dsk_gpu_device(&stream->base);
    struct batch batch = {.n = n};
    void *host;
    dsk_status status =
        dsk_gpu_ring_take(stream, GPU_BLOCK_BYTES + (uint64_t)bucket_of(n) * sizeof(*batch.rows), &host);

    if (status != DSK_OK)
        return dsk_fail(err, status, "segs", n, "%s", dsk_status_text(status));
    batch.block = host;
    batch.rows = (struct dsk_attend_row *)(void *)((uint8_t *)host + GPU_BLOCK_BYTES);
    status = make_batch(stream, at, &batch, err);
    if (status == DSK_OK)
        status = dsk_gpu_work(
            gpu,
            gpu->driver.copy_in(&gpu->driver, stream->block, host,
                                GPU_BLOCK_BYTES + (uint64_t)batch.shape.n_rows * sizeof(*batch.rows),
                                stream->handle),
            "copy_in", err);
    return status != DSK_OK ? status : dsk_gpu_graph_run(stream, &batch.shape, &batch.plan, NULL, err);
}

dsk_status dsk_gpu_attend(struct dsk_stream *s, const struct dsk_attend_args *args, struct dsk_err *err)
{
    struct cursor at = {args, 0, 0};
    int32_t n;
    dsk_status status = dsk_gpu_enter(dsk_gpu_device(s));

    while (status == DSK_OK && (n = count_rows(&at, GPU_LAUNCH_ROWS)) > 0)
        status = bucket_of(n) <= dsk_gpu_device(s)->code->upload_rows
                     ? launch_few(dsk_gpu_stream(s), &at, n, err)
                     : launch_many(dsk_gpu_stream(s), &at, n, err);
    return status;
}

bool dsk_gpu_supports(const struct dsk_device *dev, const struct dsk_attend_shape *shape, struct dsk_err *err)
{
    const struct dsk_attend_args args = {
        .kv = {.layout = shape->layout}, .h_q = shape->h_q, .out_dtype = shape->out_dtype};
    const struct traits traits = {shape->topk, false};
    struct gpu_attend_shape one;
    struct gpu_attend_plan plan;

    fill_shape(&one, &args, 1, &traits);
    return plan_of((const struct gpu_device *)dev, &one, &plan, err) == DSK_OK;
}
