/* attend_sm90_merge.cuh - the second launch of a split attend: partial results of a row's splits to its output.
 *
 *   m = max_s lse[s];  w[s] = 2^(lse[s] - m);  out = sum_s w[s] part[s] / sum_s w[s];  lse = ln 2 (m + log2 sum_s w[s])
 *   part f16 [n_rows, n_splits, h_q, D_V] in units of the side data's ref; lse f32, log2 units
 *   a sink multiplies out by 1 / (1 + exp(sink - lse)); splits with lse = -inf are not read
 *
 * WARPS warps share one (row, head): warp i takes splits i, i + WARPS, ...; their sums are then added in order of i. */
#ifndef KERNELS_CUDA_ATTEND_SM90_MERGE_CUH
#define KERNELS_CUDA_ATTEND_SM90_MERGE_CUH

#include "attend_sm90.cuh"

namespace attend_sm90 {

constexpr int MERGE_WARPS = ATTEND_SM90_MERGE_THREADS / WARP;

/* What all lanes of a warp agree on about one (row, head). */
struct Merged {
    float largest; /* log2 units */
    float total;   /* sum of weights; 0: nothing in any split */
};

/* `lse` is the lane's own split's, that of split `lane`. */
__device__ __forceinline__ Merged weigh(const float *part_lse, int64_t step, int n_splits, int lane, float lse)
{
    float largest = lse, total = 0.f;

    for (int s = lane + WARP; s < n_splits; s += WARP)
        largest = fmaxf(largest, part_lse[s * step]);
    for (int mask = WARP / 2; mask > 0; mask >>= 1)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    if (largest != -INFINITY) {
        total = exp2f(lse - largest);
        for (int s = lane + WARP; s < n_splits; s += WARP)
            total += exp2f(part_lse[s * step] - largest);
    }
    for (int mask = WARP / 2; mask > 0; mask >>= 1)
        total += __shfl_xor_sync(~0u, total, mask);
    return {largest, total};
}

/* Where the partial results of one (row, head) lie; steps from split to split. */
struct Parts {
    const uint8_t *values; /* this lane's */
    const float *lse;
    const float *ref; /* of this lane's group */
    int64_t values_step, lse_step, ref_step; /* bytes, elements, elements */
    int n_splits;
};

template <int N>
__device__ __forceinline__ Parts find_parts(const dsk_attend_block *block, int64_t i_row, int head, int d_v, int lane)
{
    const int n_splits = block->n_splits, h_q = block->h_q;
    const int n_head_blocks = (h_q + ATTEND_SM90_MAX_HEADS - 1) / ATTEND_SM90_MAX_HEADS;
    const attend_sm90_side *side = (const attend_sm90_side *)block->part_ref + i_row * n_splits * n_head_blocks
                                   + head / ATTEND_SM90_MAX_HEADS;
    Parts parts;

    parts.values = (const uint8_t *)block->part_out + 2 * ((i_row * n_splits * h_q + head) * d_v + lane * N);
    parts.lse = (const float *)block->part_lse + i_row * n_splits * h_q + head;
    parts.ref = side->ref + lane * N / DSK_GROUP_VALUES;
    parts.values_step = (int64_t)2 * h_q * d_v;
    parts.lse_step = h_q;
    parts.ref_step = n_head_blocks * (int64_t)(sizeof(attend_sm90_side) / sizeof(float));
    parts.n_splits = n_splits;
    return parts;
}

/* Two splits of a warp's share: all loads under way before the first is used. */
constexpr int BATCH = 2;
template <int N> struct PartBatch {
    uint4 values[BATCH][N / 8];
    float lse[BATCH], ref[BATCH];
};

template <int N>
__device__ __forceinline__ void load_batch(PartBatch<N> &batch, const Parts &parts, int first, int step)
{
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
        const int s = first + j * step;
        batch.lse[j] = s < parts.n_splits ? parts.lse[s * parts.lse_step] : -INFINITY;
        batch.ref[j] = s < parts.n_splits ? parts.ref[s * parts.ref_step] : 0.f;
        if (s < parts.n_splits)
#pragma unroll
            for (int i = 0; i < N / 8; i++)
                batch.values[j][i] = ((const uint4 *)(parts.values + s * parts.values_step))[i];
    }
}

template <int N>
__device__ __forceinline__ void add_batch(float (&sum)[N], const PartBatch<N> &batch, float largest)
{
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
        if (batch.lse[j] == -INFINITY) /* its values were never written */
            continue;
        const float weight = exp2f(batch.lse[j] - largest) * batch.ref[j];
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            const uint4 v = batch.values[j][i];
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 f = __half22float2(*(const __half2 *)&words[k]);
                sum[8 * i + 2 * k] = fmaf(weight, f.x, sum[8 * i + 2 * k]);
                sum[8 * i + 2 * k + 1] = fmaf(weight, f.y, sum[8 * i + 2 * k + 1]);
            }
        }
    }
}

__device__ __forceinline__ void merge_n_bad(const dsk_attend_block *block, const dsk_attend_row *row, int64_t i_row, int lane)
{
    const int n_head_blocks = (block->h_q + ATTEND_SM90_MAX_HEADS - 1) / ATTEND_SM90_MAX_HEADS;
    const attend_sm90_side *side = (const attend_sm90_side *)block->part_ref + i_row * block->n_splits * n_head_blocks;
    uint32_t n_bad = 0;

    for (int s = lane; s < block->n_splits; s += WARP)
        n_bad += side[(int64_t)s * n_head_blocks].n_bad;
    n_bad = __reduce_add_sync(~0u, n_bad);
    if (lane == 0)
        *(uint32_t *)row->n_bad = n_bad;
}

/* 1 / total, the sink's share included; 0 for a row without an entry. */
__device__ __forceinline__ float merge_factor(const dsk_attend_row *row, const Merged &merged, int head)
{
    if (merged.total == 0.f)
        return 0.f;
    const float lse2 = merged.largest + log2f(merged.total);
    const float share = row->sink != 0 ? 1.f + exp2f(((const float *)row->sink)[head] * LOG2_E - lse2) : 1.f;
    return 1.f / (merged.total * share);
}

template <int D_V, int WARPS> __device__ __forceinline__ void merge(const dsk_attend_block *block)
{
    constexpr int N = D_V / WARP;
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    const int64_t item = (int64_t)blockIdx.x * (MERGE_WARPS / WARPS) + warp / WARPS;
    const int64_t i_row = item / block->h_q;
    const int head = (int)(item - i_row * block->h_q);
    __shared__ float partial[WARPS > 1 ? WARPS : 1][WARPS > 1 ? D_V : 1];
    const int share = warp % WARPS;
    float sum[N];
    PartBatch<N> batch;

    if (i_row >= block->n_rows)
        return;
    const dsk_attend_row *row = (const dsk_attend_row *)block->rows + i_row;
    const Parts parts = find_parts<N>(block, i_row, head, D_V, lane);
    if (row->out == 0)
        return;
    wait_for_prerequisites();

    /* 1. this warp's splits, by their weights */
    const float lse = lane < parts.n_splits ? parts.lse[lane * parts.lse_step] : -INFINITY;
    load_batch<N>(batch, parts, share, WARPS);
    const Merged merged = weigh(parts.lse, parts.lse_step, parts.n_splits, lane, lse);
#pragma unroll
    for (int i = 0; i < N; i++)
        sum[i] = 0.f;
    add_batch<N>(sum, batch, merged.largest);
    for (int s = share + BATCH * WARPS; s < parts.n_splits; s += BATCH * WARPS) {
        load_batch<N>(batch, parts, s, WARPS);
        add_batch<N>(sum, batch, merged.largest);
    }

    /* 2. warps of one item together */
    if (WARPS > 1) {
#pragma unroll
        for (int i = 0; i < N; i += 4)
            *(float4 *)&partial[warp % WARPS][lane * N + i] = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
        __syncthreads();
    }

    /* 3. out; four values a thread, or the lane's own */
    const float factor = merge_factor(row, merged, head);
    const uint64_t out = row->out + (uint64_t)(head * row->out_head_bytes);
    const int out_dtype = block->out_dtype;
    const int n_quads = WARPS > 1 ? D_V / 4 : N / 4;
    for (int i = WARPS > 1 ? (int)threadIdx.x : 0; i < n_quads; i += WARPS > 1 ? ATTEND_SM90_MERGE_THREADS : 1) {
        float v[4] = {0.f, 0.f, 0.f, 0.f};
        if (factor != 0.f) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (WARPS > 1) {
                    for (int w = 0; w < WARPS; w++)
                        v[k] += partial[w][4 * i + k];
                } else {
                    v[k] = sum[4 * i + k];
                }
                v[k] *= factor;
            }
        }
        store_values(out + (uint64_t)(((WARPS > 1 ? 0 : lane * N) + 4 * i) * value_bytes(out_dtype)), out_dtype, v);
    }

    /* 4. lse and the count of bad entries */
    if (warp % WARPS == 0) {
        if (lane == 0 && row->lse != 0)
            ((float *)row->lse)[head] = merged.total == 0.f ? -INFINITY : (merged.largest + log2f(merged.total)) * LN_2;
        if (head == 0 && row->n_bad != 0)
            merge_n_bad(block, row, i_row, lane);
    }
}

} /* namespace attend_sm90 */

#endif /* KERNELS_CUDA_ATTEND_SM90_MERGE_CUH */
