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

__device__ __forceinline__ Merged weigh(const float *part_lse, int stride, int n_splits, int lane)
{
    float largest = -INFINITY, total = 0.f;

    for (int s = lane; s < n_splits; s += WARP)
        largest = fmaxf(largest, part_lse[(int64_t)s * stride]);
    for (int mask = WARP / 2; mask > 0; mask >>= 1)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    for (int s = lane; s < n_splits && largest != -INFINITY; s += WARP)
        total += exp2f(part_lse[(int64_t)s * stride] - largest);
    for (int mask = WARP / 2; mask > 0; mask >>= 1)
        total += __shfl_xor_sync(~0u, total, mask);
    return {largest, total};
}

/* Adds the lane's values of splits first, first + step, ... */
template <int N>
__device__ __forceinline__ void add_parts(float (&sum)[N], const dsk_attend_block *block, int64_t i_row, int head, int d_v,
                                          int lane, float largest, int first, int step)
{
    const int n_splits = block->n_splits, h_q = block->h_q;
    const int n_head_blocks = (h_q + ATTEND_SM90_MAX_HEADS - 1) / ATTEND_SM90_MAX_HEADS;
    const float *part_lse = (const float *)block->part_lse + i_row * n_splits * h_q + head;
    const uint64_t parts = block->part_out + 2 * ((uint64_t)(i_row * n_splits * h_q + head) * d_v + lane * N);
    const attend_sm90_side *side = (const attend_sm90_side *)block->part_ref + i_row * n_splits * n_head_blocks
                                   + head / ATTEND_SM90_MAX_HEADS;
    const int group = lane * N / DSK_GROUP_VALUES;

#pragma unroll 4
    for (int s = first; s < n_splits; s += step) {
        const float lse = part_lse[(int64_t)s * h_q];
        if (lse == -INFINITY)
            continue;
        const float weight = exp2f(lse - largest) * side[(int64_t)s * n_head_blocks].ref[group];
        const uint4 *src = (const uint4 *)(parts + 2 * (uint64_t)s * h_q * d_v);
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            const uint4 v = src[i];
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
    float sum[N];

    wait_for_prerequisites();
    if (i_row >= block->n_rows)
        return;
    const dsk_attend_row *row = (const dsk_attend_row *)block->rows + i_row;
    if (row->out == 0)
        return;

    /* 1. weights; then this warp's splits */
    const Merged merged = weigh((const float *)block->part_lse + i_row * block->n_splits * block->h_q + head, block->h_q,
                                block->n_splits, lane);
#pragma unroll
    for (int i = 0; i < N; i++)
        sum[i] = 0.f;
    add_parts<N>(sum, block, i_row, head, D_V, lane, merged.largest, warp % WARPS, WARPS);

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
        store_values(out, out_dtype, (WARPS > 1 ? 0 : lane * N) + 4 * i, v);
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
