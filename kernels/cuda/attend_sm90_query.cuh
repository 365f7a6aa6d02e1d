/* attend_sm90_query.cuh - brings Q into shared memory as f16, scaled by one power of two. Warpgroups 0 to 2. */
#ifndef KERNELS_CUDA_ATTEND_SM90_QUERY_CUH
#define KERNELS_CUDA_ATTEND_SM90_QUERY_CUH

#include "attend_sm90_shape.cuh"

namespace attend_sm90 {

/* One head's query, spread over a warp: 8 values a lane and step; RoPE in the first 8 lanes. */
template <class S> struct QueryRow {
    uint4 latent[S::LATENT / 256];
    uint4 rope;
};

template <class S>
__device__ __forceinline__ void load_query(QueryRow<S> &row, const Work &work, int head, int lane)
{
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const bool is_real = head < work.n_heads;
    const uint4 *src = (const uint4 *)(work.row->q + (uint64_t)((work.head0 + head) * work.row->q_head_bytes));
#pragma unroll
    for (int i = 0; i < S::LATENT / 256; i++)
        row.latent[i] = is_real ? __ldg(src + WARP * i + lane) : zero;
    if (S::ROPE > 0)
        row.rope = is_real && lane < S::ROPE / 8 ? __ldg(src + S::LATENT / 8 + lane) : zero;
}

__device__ __forceinline__ uint32_t max_magnitude(uint32_t sofar, const uint4 &v)
{
    const uint32_t mask = 0x7fff7fffu;
    sofar = __vmaxu2(sofar, v.x & mask);
    sofar = __vmaxu2(sofar, v.y & mask);
    sofar = __vmaxu2(sofar, v.z & mask);
    return __vmaxu2(sofar, v.w & mask);
}

/* Bits of the head's largest |q|; 0 if that is an infinity or a NaN: the head's results are lost anyway and must not take
 * the other heads' precision. */
template <class S> __device__ __forceinline__ uint32_t query_magnitude(const QueryRow<S> &row)
{
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < S::LATENT / 256; i++)
        m = max_magnitude(m, row.latent[i]);
    if (S::ROPE > 0)
        m = max_magnitude(m, row.rope);
    m = __reduce_max_sync(~0u, max(m & 0xffffu, m >> 16));
    return m < 0x7f80u ? m : 0;
}

/* Where 16-bit pair `pair` of head `head` goes in its 128-byte row of a chunk: 16-byte units swizzled by the row. */
__device__ __forceinline__ uint32_t swizzled(int head, int unit, int byte)
{
    return (uint32_t)(head * 128 + ((unit ^ (head & 7)) << 4) + byte);
}

/* Writes the row as f16 (latent) and bf16 (RoPE), multiplied by the power of two `factor`. The order of k within a chunk
 * is free as long as K's fragments use the same: a thread of the score warpgroup reads 16 contiguous bytes of a row, values
 * 32 q + 16 (chunk % 2) + [0, 16) of a group, and takes four of them per instruction: pairs 2 q (k = 2q) and 2 q + 8. */
template <class S>
__device__ __forceinline__ void store_query(const QueryRow<S> &row, uint32_t query_at, int head, int lane, float factor)
{
    /* Lanes of different chunks would meet in one bank: each takes its four pairs in another order. */
    const int turn = ((lane >> 1) & 1) | ((lane >> 4) << 1);
#pragma unroll
    for (int i = 0; i < S::LATENT / 256; i++) {
        const int eight = WARP * i + lane; /* which 8 values */
        const int chunk = (eight >> 4) * 2 + ((eight >> 1) & 1);
        const int column = 4 * ((eight >> 2) & 3);
        const uint32_t at = query_at + chunk * S::CHUNK_BYTES;
        const uint4 v = row.latent[i];
        const uint32_t a0 = turn & 1 ? v.y : v.x, a1 = turn & 1 ? v.x : v.y;
        const uint32_t a2 = turn & 1 ? v.w : v.z, a3 = turn & 1 ? v.z : v.w;
        const uint32_t pairs[4] = {turn & 2 ? a2 : a0, turn & 2 ? a3 : a1, turn & 2 ? a0 : a2, turn & 2 ? a1 : a3};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float low = __uint_as_float(pairs[k] << 16), high = __uint_as_float(pairs[k] & 0xffff0000u);
            store_shared_4(at + swizzled(head, 4 * (eight & 1) + (k ^ turn), column), pack_f16(low * factor, high * factor));
        }
    }
    if (S::ROPE > 0 && lane < S::ROPE / 8) {
        const uint32_t at = query_at + S::CHUNKS * S::CHUNK_BYTES;
        const uint32_t pairs[4] = {row.rope.x, row.rope.y, row.rope.z, row.rope.w};
        const uint32_t factors = pack_bf16(factor, factor);
#pragma unroll
        for (int k = 0; k < 4; k++)
            store_shared_4(at + swizzled(head, 4 * (lane & 1) + k, 4 * (lane >> 1)), mul_bf16x2(pairs[k], factors));
    }
}

/* The power of two that brings a magnitude (bf16 bits) to [2^14, 2^15), as far as a factor's exponent allows. */
__device__ __forceinline__ float query_factor(uint32_t magnitude)
{
    return __uint_as_float((uint32_t)min(max(268 - (int)(magnitude >> 7), 1), 253) << 23);
}

/* Phase of warpgroups 0-2: Q into shared memory. Returns what turns a raw score into log2 units. Almost any query fits f16
 * with one fixed factor, which spares a round of reading before writing; the largest |q| decides afterwards whether it did:
 * f16 must neither overflow nor lose bits of all but the smallest values. */
template <class S>
__device__ __forceinline__ float bring_query(attend_sm90_control *ctl, uint32_t query_at, const Work &work)
{
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    const int n_threads = S::QUERY_WARPS * WARP;
    const float unit = work.row->softmax_scale * LOG2_E;
    float factor = QUERY_FACTOR;
    QueryRow<S> rows[S::WARP_QUERIES]; /* heads warp, warp + 12, ... */
    uint32_t largest = 0;

#pragma unroll
    for (int u = 0; u < S::WARP_QUERIES; u++)
        load_query<S>(rows[u], work, warp + S::QUERY_WARPS * u, lane);
    bar_arrive(BARRIER_ISSUED, ATTEND_SM90_THREADS);
#pragma unroll
    for (int u = 0; u < S::WARP_QUERIES; u++) {
        largest = max(largest, query_magnitude<S>(rows[u]));
        if (warp + S::QUERY_WARPS * u < S::HEADS)
            store_query<S>(rows[u], query_at, warp + S::QUERY_WARPS * u, lane, factor);
    }
    if (lane == 0)
        ctl->q_max[warp] = largest;
    fence_async_proxy();
    bar_sync(BARRIER_QUERY, n_threads);

    for (int i = 0; i < S::QUERY_WARPS; i++)
        largest = max(largest, ctl->q_max[i]);
    if (largest >= QUERY_TOO_LARGE || (largest < QUERY_TOO_SMALL && largest > 0)) {
        factor = query_factor(largest);
#pragma unroll 1
        for (int head = warp; head < S::HEADS; head += S::QUERY_WARPS) {
            load_query<S>(rows[0], work, head, lane);
            store_query<S>(rows[0], query_at, head, lane, factor);
        }
        fence_async_proxy();
        bar_sync(BARRIER_QUERY, n_threads);
    }
    return unit / factor;
}

} /* namespace attend_sm90 */

#endif /* KERNELS_CUDA_ATTEND_SM90_QUERY_CUH */
