#include "attend_kit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hipemu_run.h"
#include "kernels/hip/attend.h"

#define N_UNITS 24

const char *const attend_targets[2] = {"gfx942", "gfx950"};

struct attend_results attend_results_make(struct kit *k, const struct kit_attend *a)
{
    const int64_t n = (int64_t)a->n_rows * a->h_q;
    struct attend_results r = {
        .out_bytes = n * a->pool->layout->d_v * (a->out_dtype == DSK_DTYPE_F32 ? 4 : 2), .lse_bytes = 4 * n};

    r.out = kit_alloc(k, r.out_bytes + 4);
    r.lse = kit_alloc(k, r.lse_bytes);
    r.n_bad = kit_alloc(k, 4 * (int64_t)a->n_rows);
    return r;
}

static void fill_rows(const struct dsk_attend_seg *seg, struct dsk_attend_row *rows)
{
    for (int i = 0; i < seg->n_rows; i++)
        rows[i] = (struct dsk_attend_row){.q = seg->q + (uint64_t)(i * seg->q_row_bytes),
                                          .out = seg->out + (uint64_t)(i * seg->out_row_bytes),
                                          .lse = seg->lse + (uint64_t)(i * seg->lse_row_bytes),
                                          .indices = seg->indices + (uint64_t)(i * seg->indices_row_bytes),
                                          .length = seg->lengths == 0 ? 0 : seg->lengths + 4 * (uint64_t)i,
                                          .sink = seg->sink,
                                          .table = seg->space == DSK_SPACE_LOGICAL ? seg->table : 0,
                                          .n_bad = seg->n_bad + 4 * (uint64_t)i,
                                          .q_head_bytes = seg->q_head_bytes,
                                          .out_head_bytes = seg->out_head_bytes,
                                          .topk = seg->topk,
                                          .space = seg->space,
                                          .n_table = seg->n_table,
                                          .seq_len = seg->seq_len,
                                          .softmax_scale = seg->softmax_scale};
}

static int heads_of(int h_q, int heads)
{
    return heads != 0                        ? heads
           : h_q <= 2 * ATTEND_HIP_FEW_HEADS ? ATTEND_HIP_FEW_HEADS
                                             : ATTEND_HIP_MANY_HEADS;
}

static void *scratch(size_t bytes)
{
    void *p = malloc(bytes + 1);

    ck_assert_ptr_nonnull(p);
    memset(p, 0xff, bytes);
    return p;
}

/* The host's plan, or the one that the test asks for. */
static struct attend_hip_plan plan_of(const struct attend_launch *launch)
{
    const struct dsk_layout *layout = dsk_layout_get(launch->kv.layout);
    const int n_rows = launch->seg.n_rows + launch->padding, heads = heads_of(launch->h_q, launch->heads);
    struct attend_hip_plan plan;

    attend_hip_plan(launch->kv.layout, n_rows, launch->h_q, launch->seg.topk, launch->flags, N_UNITS, &plan);
    if (launch->n_splits == 0)
        return plan;
    plan.n_splits = launch->n_splits;
    plan.split_entries = ((launch->seg.topk + launch->n_splits - 1) / launch->n_splits + 63) / 64 * 64;
    snprintf(plan.main.name, sizeof(plan.main.name), "attend_%s%s_h%d", launch->is_fp8 ? "fp8_" : "",
             layout->name, heads);
    plan.main.grid[1] = (uint32_t)((launch->h_q + heads - 1) / heads);
    plan.main.grid[2] = (uint32_t)launch->n_splits;
    plan.part_ref_bytes = 4 * (uint64_t)(n_rows * launch->n_splits);
    plan.part_lse_bytes = plan.part_ref_bytes * (uint64_t)launch->h_q;
    plan.part_out_bytes = plan.part_lse_bytes * (uint64_t)layout->d_v;
    snprintf(plan.combine.name, sizeof(plan.combine.name), "%s",
             launch->n_splits > 1 ? "attend_combine" : "");
    memcpy(plan.combine.grid, (const uint32_t[]){(uint32_t)n_rows, (uint32_t)launch->h_q, 1},
           sizeof(plan.combine.grid));
    plan.combine.block = ATTEND_HIP_COMBINE_THREADS;
    return plan;
}

void attend_launch(const struct attend_launch *launch, const char *target)
{
    const struct dsk_attend_seg *seg = &launch->seg;
    const struct attend_hip_plan plan = plan_of(launch);
    const int n_rows = seg->n_rows + launch->padding;
    struct dsk_attend_row *rows = calloc((size_t)n_rows, sizeof(*rows));
    float *part_out = scratch(plan.part_out_bytes), *part_lse = scratch(plan.part_lse_bytes);
    uint32_t *part_ref = scratch(plan.part_ref_bytes);
    const struct dsk_attend_block block = {.kv = launch->kv,
                                           .rows = kit_addr(rows),
                                           .part_out = kit_addr(part_out),
                                           .part_lse = kit_addr(part_lse),
                                           .part_ref = kit_addr(part_ref),
                                           .n_rows = n_rows,
                                           .h_q = launch->h_q,
                                           .out_dtype = launch->out_dtype,
                                           .flags = launch->flags,
                                           .n_splits = plan.n_splits,
                                           .split_entries = plan.split_entries};
    const uint64_t param = kit_addr(&block);

    ck_assert_ptr_nonnull(rows);
    fill_rows(seg, rows);
    hipemu_run_grid(target, plan.main.name, plan.main.grid, plan.main.block, &param);
    if (plan.combine.name[0] != 0)
        hipemu_run_grid(target, plan.combine.name, plan.combine.grid, plan.combine.block, &param);
    free(rows);
    free(part_out);
    free(part_lse);
    free(part_ref);
}

void attend_emulate(struct kit *k, const struct attend_run *run, const char *target, int offset,
                    const struct attend_results *to)
{
    struct kit_attend *a = run->a;
    struct attend_launch launch = {.seg = kit_attend_seg(k, a),
                                   .kv = a->pool->kv,
                                   .h_q = a->h_q,
                                   .out_dtype = a->out_dtype,
                                   .flags = a->flags,
                                   .n_splits = run->n_splits,
                                   .heads = run->heads,
                                   .padding = run->padding,
                                   .is_fp8 = run->is_fp8};

    launch.seg.out = kit_addr(to->out) + (uint64_t)offset;
    launch.seg.lse = kit_addr(to->lse);
    launch.seg.n_bad = kit_addr(to->n_bad);
    attend_launch(&launch, target);
}

void attend_reference(const struct kit_attend *a, double *out, double *lse, uint32_t *n_bad)
{
    const struct ref64_attend ref = kit_ref64(a);

    ck_assert_int_eq(ref64_attend(&ref, out, lse, n_bad), 0);
}

void attend_compare(const struct attend_run *run, const char *target, int offset,
                    const struct attend_results *got)
{
    const struct kit_attend *a = run->a;
    const int64_t n = (int64_t)a->n_rows * a->h_q, n_out = n * a->pool->layout->d_v;
    double *out = malloc((size_t)n_out * sizeof(*out)), *lse = malloc((size_t)n * sizeof(*lse));
    float *values = malloc((size_t)n_out * sizeof(*values));
    uint16_t *bits = malloc((size_t)n_out * sizeof(*bits));
    uint32_t *n_bad = malloc((size_t)a->n_rows * sizeof(*n_bad));
    char what[160];

    ck_assert(out && lse && values && bits && n_bad);
    attend_reference(a, out, lse, n_bad);
    if (a->out_dtype == DSK_DTYPE_F32) {
        memcpy(values, got->out + offset, (size_t)n_out * 4);
    } else {
        memcpy(bits, got->out + offset, (size_t)n_out * 2);
        ref64_bf16_to_f32(bits, values, n_out);
    }
    snprintf(what, sizeof(what), "%s %s heads %d by %d rows %d width %d splits %d", target,
             a->pool->layout->name, a->h_q, heads_of(a->h_q, run->heads), a->n_rows, a->topk, run->n_splits);
    kit_expect_out(values, out, n_out, what);
    kit_expect_lse(got->lse, lse, n, what);
    for (int t = 0; t < a->n_rows; t++)
        KIT_EXPECT(got->n_bad[t] == n_bad[t], "%s: n_bad[%d] is %u, not %u", what, t, got->n_bad[t],
                   n_bad[t]);
    free(out);
    free(lse);
    free(values);
    free(bits);
    free(n_bad);
}

void attend_check_at(struct kit *k, const struct attend_run *run, const char *target, int offset,
                     bool is_repeated)
{
    const struct attend_results first = attend_results_make(k, run->a),
                                second = attend_results_make(k, run->a);

    hipemu_set(1, 0xff);
    attend_emulate(k, run, target, offset, &first);
    attend_compare(run, target, offset, &first);
    if (!is_repeated)
        return;
    hipemu_set(2, 0x3c);
    attend_emulate(k, run, target, offset, &second);
    gpu_expect_bytes(second.out + offset, first.out + offset, first.out_bytes, "out of the repeat");
    gpu_expect_bytes(second.lse, first.lse, first.lse_bytes, "lse of the repeat");
}

void attend_check(struct kit *k, const struct attend_run *run, const char *target)
{
    attend_check_at(k, run, target, 0, true);
}

struct kit_attend attend_shape(struct kit *k, struct kit_pool *pool, int n_rows, int h_q, int topk)
{
    return (struct kit_attend){.pool = pool,
                               .n_rows = n_rows,
                               .topk = topk,
                               .h_q = h_q,
                               .q = kit_bf16_normal(k, (int64_t)n_rows * h_q * pool->layout->d_qk, 0.5),
                               .indices = kit_indices(k, (int64_t)n_rows * topk, pool->kv.n_slots, 20),
                               .scale = 0.05f,
                               .out_dtype = DSK_DTYPE_BF16};
}

void attend_pool(struct kit *k, struct kit_pool *pool, uint32_t layout, int64_t n_slots, int pitch_factor)
{
    kit_pool_make(k, pool, layout, n_slots, pitch_factor);
    for (int64_t slot = 0; slot < n_slots && pool->layout->encoding != REF64_BF16; slot++) {
        for (int i = (int)(slot % 37); i < pool->layout->latent; i += 37)
            kit_pool_row(pool, slot)[i] = 0x80;
    }
}
