/* attend_sm90_scores.cuh - warpgroup 2: S^T = K Q^T and the softmax over it. */
#ifndef KERNELS_CUDA_ATTEND_SM90_SCORES_CUH
#define KERNELS_CUDA_ATTEND_SM90_SCORES_CUH

#include "attend_sm90_shape.cuh"

namespace attend_sm90 {

/* ---- scores ------------------------------------------------------------------------------------------ */

/* V and K scale of a group in one of the thread's rows; never 0, so that ratios stay finite. */
template <class S> __device__ __forceinline__ float load_scale(uint32_t row_at, int group)
{
    return fmaxf(load_shared_f32(row_at + S::SCALES_AT + 4 * group), SCALE_FLOOR);
}

/* 16 bytes of each of the thread's rows: values of chunk c. */
struct KeyBytes {
    uint4 low;
    uint4 high; /* row + 8 */
};

template <class S> __device__ __forceinline__ void load_keys(KeyBytes &bytes, uint32_t row_at, int q, int chunk)
{
    const uint32_t at = row_at + 128 * (chunk >> 1) + 16 * (chunk & 1) + 32 * q;
    bytes.low = load_shared_16(at);
    bytes.high = load_shared_16(at + 8 * S::PITCH);
}

__device__ __forceinline__ void convert_keys(const KeyBytes &bytes, uint32_t (&a)[4][4])
{
    e4m3x4_to_f16(bytes.low.x, a[0][0], a[0][2]);
    e4m3x4_to_f16(bytes.high.x, a[0][1], a[0][3]);
    e4m3x4_to_f16(bytes.low.y, a[1][0], a[1][2]);
    e4m3x4_to_f16(bytes.high.y, a[1][1], a[1][3]);
    e4m3x4_to_f16(bytes.low.z, a[2][0], a[2][2]);
    e4m3x4_to_f16(bytes.high.z, a[2][1], a[2][3]);
    e4m3x4_to_f16(bytes.low.w, a[3][0], a[3][2]);
    e4m3x4_to_f16(bytes.high.w, a[3][1], a[3][3]);
}

template <class S>
__device__ __forceinline__ void issue_chunk(float (&scores)[S::HEADS / 2], const uint32_t (&a)[4][4], uint32_t chunk_desc,
                                            int is_sum)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_f16(scores, a[k], chunk_desc + 2 * k, k > 0 ? 1 : is_sum);
    wgmma_commit();
}

/* RoPE of both rows, bf16 as stored: 16 values a thread, in the order of convert_keys. */
template <class S> __device__ __forceinline__ void load_rope(uint32_t (&a)[4][4], uint32_t row_at, int q)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t at = row_at + S::ROPE_AT + 32 * q + 16 * half;
        const uint4 low = load_shared_16(at), high = load_shared_16(at + 8 * S::PITCH);
        a[2 * half][0] = low.x;
        a[2 * half][1] = high.x;
        a[2 * half][2] = low.y;
        a[2 * half][3] = high.y;
        a[2 * half + 1][0] = low.z;
        a[2 * half + 1][1] = high.z;
        a[2 * half + 1][2] = low.w;
        a[2 * half + 1][3] = high.w;
    }
}

template <class S>
__device__ __forceinline__ void issue_rope(float (&scores)[S::HEADS / 2], const uint32_t (&a)[4][4], uint32_t query_desc)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_bf16(scores, a[k], query_desc + S::CHUNKS * (S::CHUNK_BYTES >> 4) + 2 * k, 1);
    wgmma_commit();
}

__device__ __forceinline__ void release_output(attend_sm90_control *ctl, int lane)
{
    __syncwarp();
    if (lane == 0)
        mbar_arrive(&ctl->go);
}

template <int N> __device__ __forceinline__ void multiply_rows(float (&scores)[N], float low, float high)
{
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        scores[i] *= low;
        scores[i + 1] *= low;
        scores[i + 2] *= high;
        scores[i + 3] *= high;
    }
}

/* Issues the raw scores of a tile; the last instructions are still under way on return. Between groups the f32 sums pass
 * from the unit of one group's scale to the next. `bytes` holds chunk 0. (Unrolled: with a
 * rolled loop ptxas waits between the instructions, 115 us for 78.) */
template <class S>
__device__ __forceinline__ void issue_scores(float (&scores)[S::HEADS / 2], KeyBytes &bytes, attend_sm90_control *ctl,
                                             uint32_t row_at, uint32_t query_desc, const Lane &me, bool is_go)
{
    uint32_t even[4][4], odd[4][4];
    uint32_t chunk_desc = query_desc;
    float low = load_scale<S>(row_at, 0), high = load_scale<S>(row_at + 8 * S::PITCH, 0);

    convert_keys(bytes, even);
    load_keys<S>(bytes, row_at, me.q, 1);
#pragma unroll UNROLL_GROUPS
    for (int group = 0; group < S::GROUPS; group++, chunk_desc += 2 * (S::CHUNK_BYTES >> 4)) {
        const bool is_last = group + 1 == S::GROUPS;
        issue_chunk<S>(scores, even, chunk_desc, group > 0);
        convert_keys(bytes, odd);
        if (!is_last)
            load_keys<S>(bytes, row_at, me.q, 2 * group + 2);
        else if (is_go)
            release_output(ctl, me.lane);
        issue_chunk<S>(scores, odd, chunk_desc + (S::CHUNK_BYTES >> 4), 1);
        wgmma_wait<1>();
        float factor_low = low, factor_high = high; /* after the last group: out of its unit */
        if (!is_last) {
            convert_keys(bytes, even);
            load_keys<S>(bytes, row_at, me.q, 2 * group + 3);
            low = load_scale<S>(row_at, group + 1);
            high = load_scale<S>(row_at + 8 * S::PITCH, group + 1);
            factor_low = __fdividef(factor_low, low);
            factor_high = __fdividef(factor_high, high);
        } else if constexpr (S::ROPE > 0) {
            load_rope<S>(even, row_at, me.q);
        }
        if (!is_last || S::ROPE > 0) {
            wgmma_wait<0>();
            wgmma_landed(scores);
            multiply_rows(scores, factor_low, factor_high);
        }
    }
    if constexpr (S::ROPE > 0)
        issue_rope<S>(scores, even, query_desc);
}

/* ---- softmax ----------------------------------------------------------------------------------------- */

/* Running state of the score warpgroup; the bases of the heads are in shared memory, for want of registers. */
template <class S> struct Softmax {
    float sum[S::THREAD_HEADS]; /* over this thread's tokens only */
    float inverse_ref;          /* of group q */
    float largest_fit;          /* V scales of group q up to here go on as they are; < 0: no valid entry so far ... */
    float smallest_fit;         /* ... and down to here */
    bool is_first;
};

/* Where a lane's row of the transposing store goes in a P tile: matrices 0 and 1 are 8 tokens each of one block of heads, 2
 * and 3 of the next. */
template <class S> __device__ __forceinline__ uint32_t store_lane(const Lane &me)
{
    const int matrix = me.lane >> 3, block = S::N_BLOCKS > 1 ? matrix >> 1 : 0;
    return swizzled(8 * block + (me.lane & 7), 2 * me.warp + (matrix & 1), 0);
}

/* P = 2^scores as f16 into its tile; adds up the thread's part of the row sums. Returns whether f16 overflowed: then what
 * was stored is of no use. */
template <class S>
__device__ __forceinline__ bool store_weights(const float (&scores)[S::HEADS / 2], float (&tile_sum)[S::THREAD_HEADS],
                                              uint32_t lane_at)
{
    uint32_t check = 0, m[4];

#pragma unroll
    for (int n = 0; n < S::N_BLOCKS; n++) {
        const float a = exp2_fast(scores[4 * n]), b = exp2_fast(scores[4 * n + 1]);
        const float c = exp2_fast(scores[4 * n + 2]), d = exp2_fast(scores[4 * n + 3]);
        tile_sum[2 * n] = a + c;
        tile_sum[2 * n + 1] = b + d;
        m[2 * (n & 1)] = pack_f16(a, b);
        m[2 * (n & 1) + 1] = pack_f16(c, d);
        check = add_f16x2(check, add_f16x2(m[2 * (n & 1)], m[2 * (n & 1) + 1]));
        if (n & 1)
            store_matrix_4t(lane_at + (n - 1) * 8 * 128, m[0], m[1], m[2], m[3]);
    }
    if (S::N_BLOCKS == 1)
        store_matrix_2t(lane_at, m[0], m[1]);
    return (check & 0x7c00u) == 0x7c00u || (check & 0x7c000000u) == 0x7c000000u;
}

/* The same in f32, [token][head], over both tiles. */
template <class S>
__device__ __forceinline__ void store_weights_f32(const float (&scores)[S::HEADS / 2], float (&tile_sum)[S::THREAD_HEADS],
                                                  uint32_t p_at, const Lane &me)
{
#pragma unroll
    for (int n = 0; n < S::N_BLOCKS; n++) {
        const float a = exp2_fast(scores[4 * n]), b = exp2_fast(scores[4 * n + 1]);
        const float c = exp2_fast(scores[4 * n + 2]), d = exp2_fast(scores[4 * n + 3]);
        const uint32_t at = p_at + ((16 * me.warp + me.g) * S::HEADS + 8 * n + 2 * me.q) * 4;
        tile_sum[2 * n] = a + c;
        tile_sum[2 * n + 1] = b + d;
        store_shared_f32x2(at, a, b);
        store_shared_f32x2(at + 8 * S::HEADS * 4, c, d);
    }
}

/* A V scale that its f16 ratio would misstate by more than the output can bear. */
template <class S> __device__ __forceinline__ bool is_too_small(const Softmax<S> &state, float scale)
{
    return scale < state.smallest_fit && scale > V_SCALE_NOTHING;
}

/* A tile that did not pass: moves base and ref where they must, rescales what was summed so far and shifts the tile's
 * scores. Returns whether the tile must be exact. `scale` are the V scales of the thread's two rows in group q. */
template <class S>
__device__ __forceinline__ bool settle_tile(float (&scores)[S::HEADS / 2], Softmax<S> &state, attend_sm90_control *ctl,
                                            const Lane &me, float scale0, float scale1, int buffer, bool *is_rescaled_p)
{
    const int i_thread = (int)threadIdx.x % WARPGROUP;
    float list[S::THREAD_HEADS];

    /* 1. over the warp: largest score of every head, largest and smallest V scale of every group */
#pragma unroll
    for (int n = 0; n < S::N_BLOCKS; n++) {
        list[2 * n] = fmaxf(scores[4 * n], scores[4 * n + 2]);
        list[2 * n + 1] = fmaxf(scores[4 * n + 1], scores[4 * n + 3]);
    }
    publish_heads<Maximum, S>(ctl, me, list);
    float largest = fmaxf(scale0, scale1);
    float smallest = fminf(scale0 > V_SCALE_NOTHING ? scale0 : INFINITY, scale1 > V_SCALE_NOTHING ? scale1 : INFINITY);
#pragma unroll
    for (int mask = 4; mask < WARP; mask <<= 1) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
        smallest = fminf(smallest, __shfl_xor_sync(~0u, smallest, mask));
    }
    if (me.g == 0) {
        ctl->group_largest[me.warp][me.q] = largest;
        ctl->group_smallest[me.warp][me.q] = smallest;
    }
    bar_sync(BARRIER_SCORE, WARPGROUP);

    /* 2. ref: the largest scale is 8 to 16 times it after a raise, which leaves a factor of 8 before the next */
    largest = fmaxf(fmaxf(ctl->group_largest[0][me.q], ctl->group_largest[1][me.q]),
                    fmaxf(ctl->group_largest[2][me.q], ctl->group_largest[3][me.q]));
    const float before = state.inverse_ref;
    if (largest > 0.f && (state.is_first || largest * before > V_RATIO_MAX)) {
        const int exponent = (int)(__float_as_uint(largest) >> 23);
        state.inverse_ref = __uint_as_float((uint32_t)min(max(257 - exponent, 1), 253) << 23);
    }
    if (i_thread < 4) {
        ctl->group_rescale[buffer][me.q] = state.inverse_ref / before;
        ctl->inv_ref[buffer][me.q] = state.inverse_ref;
        ctl->ref[me.q] = 1.f / state.inverse_ref;
    }

    /* 3. base of every head. Every head sees the same entries: one tells whether there are any. */
    const bool is_any = fmaxf(fmaxf(ctl->head_part[0][0], ctl->head_part[1][0]),
                              fmaxf(ctl->head_part[2][0], ctl->head_part[3][0])) > -INFINITY;
    if (i_thread < S::HEADS) {
        float delta = fmaxf(fmaxf(ctl->head_part[0][i_thread], ctl->head_part[1][i_thread]),
                            fmaxf(ctl->head_part[2][i_thread], ctl->head_part[3][i_thread]))
                      - P_TOP_LOG2;
        delta = !is_any ? 0.f : state.is_first ? delta : fmaxf(delta, 0.f);
        ctl->head_delta[i_thread] = delta;
        ctl->head_base[i_thread] += delta;
        ctl->rescale[buffer][i_thread] = state.is_first ? 0.f : exp2_fast(-delta);
    }
    bar_sync(BARRIER_SCORE, WARPGROUP);
#pragma unroll
    for (int i = 0; i < S::THREAD_HEADS; i++) {
        const float delta = ctl->head_delta[head_of(i, me.q)];
        state.sum[i] *= ctl->rescale[buffer][head_of(i, me.q)];
        scores[4 * (i >> 1) + (i & 1)] -= delta;
        scores[4 * (i >> 1) + (i & 1) + 2] -= delta;
    }
    *is_rescaled_p = !state.is_first;
    state.is_first = state.is_first && !is_any;
    state.largest_fit = state.is_first ? -1.f : fminf(V_RATIO_MAX / state.inverse_ref, EXACT_SCALE);
    state.smallest_fit = V_RATIO_MIN / state.inverse_ref;

    /* 4. does f16 hold what is left? */
    bool is_exact = false;
    for (int i = me.lane; i < 4 * S::GROUPS; i += WARP)
        is_exact = ctl->group_smallest[i / S::GROUPS][i % S::GROUPS] * ctl->inv_ref[buffer][i % S::GROUPS] < V_RATIO_MIN
                   || ctl->group_largest[i / S::GROUPS][i % S::GROUPS] > EXACT_SCALE;
    return __any_sync(~0u, is_exact);
}

/* Final sums and log-sums; scores' warpgroup. */
template <class S>
__device__ __forceinline__ void finish_sums(Softmax<S> &state, attend_sm90_control *ctl, const dsk_attend_block *block,
                                            const Work &work, const Lane &me)
{
    const int head = (int)threadIdx.x % WARPGROUP;

    bar_sync(BARRIER_SCORE, WARPGROUP);
    publish_heads<Sum, S>(ctl, me, state.sum);
    bar_sync(BARRIER_SCORE, WARPGROUP);
    if (head < S::HEADS) {
        const float sum = ctl->head_part[0][head] + ctl->head_part[1][head] + ctl->head_part[2][head] + ctl->head_part[3][head];
        /* Back from P's units first: near lse = 0 the roundings of base and of log2(sum) would show. */
        const float lse2 = sum == 0.f ? -INFINITY : ctl->head_base[head] + P_TOP_LOG2 + log2f(sum * P_TOP_INVERSE);
        float factor = sum == 0.f ? 0.f : 1.f / sum;

        if (head < work.n_heads) {
            const int i_head = work.head0 + head;
            if (work.is_split) {
                ((float *)block->part_lse)[(int64_t)work.i_part * block->h_q + i_head] = lse2;
            } else {
                if (work.row->lse != 0)
                    ((float *)work.row->lse)[i_head] = lse2 * LN_2;
                if (work.row->sink != 0 && sum != 0.f)
                    factor /= 1.f + exp2f(((const float *)work.row->sink)[i_head] * LOG2_E - lse2);
            }
        }
        ctl->inv_sum[head] = factor;
    }
    __syncwarp();
    if (me.lane == 0)
        mbar_arrive(&ctl->sums);
}

/* Whether f16 cannot hold a V scale: bits below its mantissa. (ref is a power of two.) */
__device__ __forceinline__ bool has_rest(float scale)
{
    return (__float_as_uint(scale) & 0x1fffu) != 0;
}

template <class S>
__device__ __forceinline__ void run_scores(const dsk_attend_block *block, attend_sm90_control *ctl, uint32_t shared_at,
                                           const Work &work, float score_unit)
{
    const Lane me = my_lane();
    const int my_row = 16 * me.warp + me.g;
    const int v_group = me.q % S::GROUPS;
    const uint32_t query_desc = wgmma_desc(shared_at);
    const uint32_t bases_at = shared_address(&ctl->head_base[2 * me.q]);
    const uint32_t rows_at = shared_at + S::STAGES_AT + my_row * S::PITCH;
    const uint32_t lane_at = shared_at + S::P_AT + store_lane<S>(me);
    float scores[S::HEADS / 2];
    KeyBytes bytes;
    Softmax<S> state;
    bool was_exact = false;

#pragma unroll
    for (int i = 0; i < S::THREAD_HEADS; i++)
        state.sum[i] = 0.f;
    state.inverse_ref = 1.f;
    state.largest_fit = -1.f;
    state.smallest_fit = 0.f;
    state.is_first = true;
    mbar_wait(&ctl->full[0], 0);
    load_keys<S>(bytes, rows_at, me.q, 0);

    int stage = 0, phase = 0; /* of this tile; phase flips when the stages have been gone through */
    for (int tile = 0; tile < work.n_tiles; tile++) {
        const int buffer = tile & 1;
        const uint32_t row_at = rows_at + stage * S::STAGE_BYTES;
        const uint32_t p_at = lane_at + buffer * S::P_BYTES;
        bool is_rescaled = false, is_exact = false;

        /* 1. raw scores; what the next steps need is fetched while the last of them are computed */
        issue_scores<S>(scores, bytes, ctl, row_at, query_desc, me, tile > 0);
        float2 base[S::N_BLOCKS];
#pragma unroll
        for (int n = 0; n < S::N_BLOCKS; n++)
            base[n] = load_shared_f32x2(bases_at + 32 * n);
        const float scale0 = load_shared_f32(row_at + S::SCALES_AT + 4 * v_group);
        const float scale1 = load_shared_f32(row_at + 8 * S::PITCH + S::SCALES_AT + 4 * v_group);
        const uint2 masks = load_shared_8(shared_address(ctl->valid[stage]));
        mbar_wait(&ctl->p_empty[buffer], ((tile >> 1) & 1) ^ 1);
        if (was_exact) /* the tile before lies in both buffers */
            mbar_wait(&ctl->p_empty[buffer ^ 1], ((tile - 1) >> 1) & 1);
        bool is_unfit = fmaxf(scale0, scale1) > state.largest_fit || is_too_small(state, scale0) || is_too_small(state, scale1);
        bool is_sparse = work.is_narrow;
        if (threadIdx.x % WARPGROUP == 0)
            ctl->p_flags[buffer] = 0;
        float unit0 = score_unit, unit1 = score_unit;
        if (S::ROPE == 0) { /* the sums are still in the unit of the last group */
            unit0 *= load_scale<S>(row_at, S::GROUPS - 1);
            unit1 *= load_scale<S>(row_at + 8 * S::PITCH, S::GROUPS - 1);
        }
        wgmma_wait<0>();
        wgmma_landed(scores);

        /* 2. in log2 units above base; nothing where there is no entry */
#pragma unroll
        for (int n = 0; n < S::N_BLOCKS; n++) {
            scores[4 * n] = fmaf(scores[4 * n], unit0, -base[n].x);
            scores[4 * n + 1] = fmaf(scores[4 * n + 1], unit0, -base[n].y);
            scores[4 * n + 2] = fmaf(scores[4 * n + 2], unit1, -base[n].x);
            scores[4 * n + 3] = fmaf(scores[4 * n + 3], unit1, -base[n].y);
        }
        if ((masks.x & masks.y) != ~0u) {
            const uint32_t valid = ((me.warp & 2) != 0 ? masks.y : masks.x) >> (16 * (me.warp & 1) + me.g);
#pragma unroll
            for (int i = 0; i < S::HEADS / 2; i++)
                scores[i] = (valid >> (i & 2 ? 8 : 0) & 1) != 0 ? scores[i] : -INFINITY;
            is_sparse |= __popc(masks.x) + __popc(masks.y) <= SPARSE_ENTRIES;
        }
        if (is_sparse)
            is_unfit |= has_rest(scale0) || has_rest(scale1);

        /* 3. weights, as if nothing had to move; then the vote on whether that held */
        float tile_sum[S::THREAD_HEADS];
        is_unfit |= store_weights<S>(scores, tile_sum, p_at);
        if (bar_any(BARRIER_SCORE, WARPGROUP, is_unfit)) {
            is_exact = settle_tile<S>(scores, state, ctl, me, scale0, scale1, buffer, &is_rescaled);
            if (is_sparse)
                is_exact |= bar_any(BARRIER_SCORE, WARPGROUP, has_rest(scale0) || has_rest(scale1));
            if (threadIdx.x % WARPGROUP == 0)
                ctl->p_flags[buffer] = ATTEND_SM90_P_SETTLED | (is_rescaled ? ATTEND_SM90_P_RESCALE : 0u)
                                       | (is_exact ? ATTEND_SM90_P_EXACT : 0u);
            if (is_exact) {
                if (tile > 0)
                    mbar_wait(&ctl->p_empty[buffer ^ 1], ((tile - 1) >> 1) & 1);
                store_weights_f32<S>(scores, tile_sum, shared_at + S::P_AT, me);
            } else {
                store_weights<S>(scores, tile_sum, p_at);
            }
        }
        fence_async_proxy();
        __syncwarp();
        if (me.lane == 0)
            mbar_arrive(&ctl->p_full[buffer]);
        was_exact = is_exact;

        /* 4. the next tile's first bytes */
#pragma unroll
        for (int i = 0; i < S::THREAD_HEADS; i++)
            state.sum[i] += tile_sum[i];
        if (++stage == S::STAGES) {
            stage = 0;
            phase ^= 1;
        }
        if (tile + 1 < work.n_tiles) {
            mbar_wait(&ctl->full[stage], phase);
            load_keys<S>(bytes, rows_at + stage * S::STAGE_BYTES, me.q, 0);
        } else {
            release_output(ctl, me.lane);
        }
    }
    finish_sums<S>(state, ctl, block, work, me);
}

} /* namespace attend_sm90 */

#endif /* KERNELS_CUDA_ATTEND_SM90_SCORES_CUH */
