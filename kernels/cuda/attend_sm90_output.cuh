/* attend_sm90_output.cuh - warpgroups 0 and 1: O^T = V^T P^T, half of d_v each, and its way out. */
#ifndef KERNELS_CUDA_ATTEND_SM90_OUTPUT_CUH
#define KERNELS_CUDA_ATTEND_SM90_OUTPUT_CUH

#include "attend_sm90_shape.cuh"

namespace attend_sm90 {

/* O^T of one thread: values d0 + [0, 4) (m-tiles 0, 1) and, with 512 values, d0 + 32 + [0, 4) (2, 3); m-tile m of a half
 * holds value 2 m in entries 4 n + e and 2 m + 1 in 4 n + 2 + e, for head 8 n + 2 q + e. */
template <class S> using Output = float[S::M_TILES][S::HEADS / 2];

template <class S> __device__ __forceinline__ void rescale_output(Output<S> &o, attend_sm90_control *ctl, int buffer, int group, int q)
{
    const float of_group = ctl->group_rescale[buffer][group];
#pragma unroll
    for (int i = 0; i < S::THREAD_HEADS; i++) {
        const float factor = of_group * ctl->rescale[buffer][head_of(i, q)];
#pragma unroll
        for (int m = 0; m < S::M_TILES; m++) {
            o[m][4 * (i >> 1) + (i & 1)] *= factor;
            o[m][4 * (i >> 1) + (i & 1) + 2] *= factor;
        }
    }
}

/* Bytes of four values of tokens 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of a quarter. */
template <class S> __device__ __forceinline__ void load_values(uint32_t (&bytes)[4], uint32_t at)
{
    bytes[0] = load_shared_4(at);
    bytes[1] = load_shared_4(at + S::PITCH);
    bytes[2] = load_shared_4(at + 8 * S::PITCH);
    bytes[3] = load_shared_4(at + 9 * S::PITCH);
}

/* scale / ref as f16 of the tokens of a fragment: pairs 2 q, 2 q + 1 and 2 q + 8, 2 q + 9 of each quarter. */
struct ScalePairs {
    uint32_t low, high;
};

/* Of the quarter whose token 2 q has its scale at `at`. Returns the union of the bits of the scales. */
template <class S> __device__ __forceinline__ uint32_t load_pairs(ScalePairs &pairs, uint32_t at, float inverse_ref)
{
    const float s0 = load_shared_f32(at), s1 = load_shared_f32(at + S::PITCH);
    const float s8 = load_shared_f32(at + 8 * S::PITCH), s9 = load_shared_f32(at + 9 * S::PITCH);
    pairs.low = pack_f16(s0 * inverse_ref, s1 * inverse_ref);
    pairs.high = pack_f16(s8 * inverse_ref, s9 * inverse_ref);
    return __float_as_uint(s0) | __float_as_uint(s1) | __float_as_uint(s8) | __float_as_uint(s9);
}

/* What f16 leaves of two ratios, as f16. */
__device__ __forceinline__ uint32_t rest_of(float ratio0, float ratio1, uint32_t rounded)
{
    const float2 f = __half22float2(*(const __half2 *)&rounded);
    return pack_f16(ratio0 - f.x, ratio1 - f.y);
}

template <class S>
__device__ __forceinline__ ScalePairs load_rests(const ScalePairs &pairs, uint32_t at, float inverse_ref)
{
    return {rest_of(load_shared_f32(at) * inverse_ref, load_shared_f32(at + S::PITCH) * inverse_ref, pairs.low),
            rest_of(load_shared_f32(at + 8 * S::PITCH) * inverse_ref, load_shared_f32(at + 9 * S::PITCH) * inverse_ref,
                    pairs.high)};
}

template <class S>
__device__ __forceinline__ uint32_t load_tile_pairs(ScalePairs (&pairs)[4], uint32_t at, float inverse_ref)
{
    uint32_t bits = 0;
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++)
        bits |= load_pairs<S>(pairs[quarter], at + QUARTER * quarter * S::PITCH, inverse_ref);
    return bits;
}

/* The fragment of m-tile m % 2: pairs of tokens by byte permutation, which is the transpose, then e4m3 -> f16, then scales.
 * With HAS_REST the scales are sums of two f16, and the products are rounded once, not twice. */
template <bool HAS_REST>
__device__ __forceinline__ void convert_values(uint32_t (&a)[4], const uint32_t (&bytes)[4], int odd, const ScalePairs &scale,
                                               const ScalePairs &rest)
{
    const uint32_t select = odd ? 0x7362u : 0x5140u;
    uint32_t v0, v1, v2, v3;
    e4m3x4_to_f16(__byte_perm(bytes[0], bytes[1], select), v0, v1);
    e4m3x4_to_f16(__byte_perm(bytes[2], bytes[3], select), v2, v3);
    if (HAS_REST) {
        a[0] = fma_f16x2(v0, scale.low, mul_f16x2(v0, rest.low));
        a[1] = fma_f16x2(v1, scale.low, mul_f16x2(v1, rest.low));
        a[2] = fma_f16x2(v2, scale.high, mul_f16x2(v2, rest.high));
        a[3] = fma_f16x2(v3, scale.high, mul_f16x2(v3, rest.high));
    } else {
        a[0] = mul_f16x2(v0, scale.low);
        a[1] = mul_f16x2(v1, scale.low);
        a[2] = mul_f16x2(v2, scale.high);
        a[3] = mul_f16x2(v3, scale.high);
    }
}

/* O += V^T P^T of a tile. Each quarter of the stage is handed back when its bytes are in registers. `bytes` holds the first. */
template <class S, bool HAS_REST>
__device__ __forceinline__ void multiply_tile(Output<S> &o, uint32_t (&bytes)[4], uint32_t values_at, uint32_t p_at,
                                              const ScalePairs (&scales)[4], uint32_t scales_at, float inverse_ref,
                                              uint64_t *empty, int lane)
{
    constexpr int IN_FLIGHT = 4;
    constexpr int STEPS = 4 * S::M_TILES;
    const uint32_t p_desc = wgmma_desc(p_at);
    uint32_t a[IN_FLIGHT][4];
    ScalePairs rest = {0, 0};

#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int quarter = step / S::M_TILES, m = step % S::M_TILES;
        if (HAS_REST && m == 0)
            rest = load_rests<S>(scales[quarter], scales_at + QUARTER * quarter * S::PITCH, inverse_ref);
        convert_values<HAS_REST>(a[step % IN_FLIGHT], bytes, m & 1, scales[quarter], rest);
        if ((m & 1) == 1 && step + 1 < STEPS) {
            const int next_quarter = (step + 1) / S::M_TILES, next_m = (step + 1) % S::M_TILES;
            load_values<S>(bytes, values_at + QUARTER * next_quarter * S::PITCH + 32 * (next_m / 2));
        }
        if (m == S::M_TILES - 1) {
            __syncwarp();
            if (lane == 0)
                mbar_arrive(&empty[quarter]);
        }
        wgmma_fence();
        wgmma_f16(o[m], a[step % IN_FLIGHT], p_desc + 2 * quarter, 1);
        wgmma_commit();
        if (step + 1 == STEPS)
            wgmma_wait<0>();
        else
            wgmma_wait<IN_FLIGHT - 1>();
    }
#pragma unroll
    for (int m = 0; m < S::M_TILES; m++)
        wgmma_landed(o[m]);
}

/* The same in f32 by FFMA, from P [token][head]: no range is too wide for it. */
template <class S>
__device__ __forceinline__ void multiply_tile_exact(Output<S> &o, const uint16_t *valid, uint32_t rows_at, int d0,
                                                    uint32_t p_at, int group, float inverse_ref, int q)
{
#pragma unroll 1
    for (int token = 0; token < TILE; token++) {
        if ((valid[token / QUARTER] >> (token % QUARTER) & 1) == 0)
            continue;
        const uint32_t row_at = rows_at + token * S::PITCH;
        const float scale = load_shared_f32(row_at + S::SCALES_AT + 4 * group) * inverse_ref;
#pragma unroll
        for (int half = 0; half < S::M_TILES / 2; half++) {
            uint32_t pair[2];
            float v[4];
            e4m3x4_to_f16(load_shared_4(row_at + d0 + 32 * half), pair[0], pair[1]);
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i] = __half2float(__ushort_as_half((unsigned short)(pair[i >> 1] >> (16 * (i & 1))))) * scale;
#pragma unroll
            for (int i = 0; i < S::THREAD_HEADS; i++) {
                const float p = load_shared_f32(p_at + (token * S::HEADS + head_of(i, q)) * 4);
                float *low = &o[2 * half][4 * (i >> 1) + (i & 1)], *high = &o[2 * half + 1][4 * (i >> 1) + (i & 1)];
                low[0] = fmaf(p, v[0], low[0]);
                low[2] = fmaf(p, v[1], low[2]);
                high[0] = fmaf(p, v[2], high[0]);
                high[2] = fmaf(p, v[3], high[2]);
            }
        }
    }
}

constexpr int DTYPE_PART = 0; /* f16 in units of ref */

/* Where a CTA's results go. In registers: the stores below might change the argument block for all the compiler knows. */
struct Destination {
    uint64_t at; /* of the CTA's first head */
    int64_t head_bytes;
    int dtype; /* DSK_DTYPE_* or DTYPE_PART */
};

template <class S> __device__ __forceinline__ Destination destination(const dsk_attend_block *block, const Work &work)
{
    if (work.is_split)
        return {block->part_out + 2 * (((uint64_t)work.i_part * block->h_q + work.head0) * S::LATENT), 2 * S::LATENT, DTYPE_PART};
    return {work.row->out + (uint64_t)(work.head0 * work.row->out_head_bytes), work.row->out_head_bytes, block->out_dtype};
}

/* Four values in a row, at the element type's width. */
__device__ __forceinline__ void store_values(uint64_t at, int dtype, const float (&v)[4])
{
    if (dtype == DSK_DTYPE_F32)
        *(float4 *)at = make_float4(v[0], v[1], v[2], v[3]);
    else
        *(uint2 *)at = dtype == DSK_DTYPE_BF16 ? make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]))
                                               : make_uint2(pack_f16(v[0], v[1]), pack_f16(v[2], v[3]));
}

__device__ __forceinline__ int value_bytes(int dtype)
{
    return dtype == DSK_DTYPE_F32 ? 4 : 2;
}

/* One copy of the code per element type: it runs once and comes cold, so its length is its time. */
template <class S, int DTYPE>
__device__ __forceinline__ void store_output(const Output<S> &o, const attend_sm90_control *ctl, const Destination &to,
                                             int n_heads, int d0, int group, int q)
{
    const float ref = DTYPE == DTYPE_PART ? 1.f : ctl->ref[group];
    const int64_t head_bytes = DTYPE == DTYPE_PART ? 2 * S::LATENT : to.head_bytes;
    uint64_t at = to.at + (uint64_t)(2 * q * head_bytes) + (uint64_t)(d0 * value_bytes(DTYPE));

#pragma unroll
    for (int i = 0; i < S::THREAD_HEADS; i++) {
        const int entry = 4 * (i >> 1) + (i & 1);
        const float factor = ctl->inv_sum[head_of(i, q)] * ref;
        if (head_of(i, q) < n_heads) {
#pragma unroll
            for (int half = 0; half < S::M_TILES / 2; half++) {
                /* + 0 makes +0 of -0: a row without an entry is +0, whatever the sign of what was summed */
                const float v[4] = {fmaf(o[2 * half][entry], factor, 0.f), fmaf(o[2 * half][entry + 2], factor, 0.f),
                                    fmaf(o[2 * half + 1][entry], factor, 0.f),
                                    fmaf(o[2 * half + 1][entry + 2], factor, 0.f)};
                store_values(at + (uint64_t)(32 * half * value_bytes(DTYPE)), DTYPE, v);
            }
        }
        at += (uint64_t)((i & 1 ? 7 : 1) * head_bytes);
    }
}

template <class S>
__device__ __forceinline__ void run_output(const dsk_attend_block *block, attend_sm90_control *ctl, uint32_t shared_at,
                                           const Work &work)
{
    const Lane me = my_lane();
    const int warp = (int)threadIdx.x / WARP; /* 0..7 */
    const int d0 = warp * S::WARP_VALUES + 4 * me.g;
    const int group = warp * S::WARP_VALUES / DSK_GROUP_VALUES;
    const uint32_t stages_at = shared_at + S::STAGES_AT;
    float inverse_ref = 1.f;
    Output<S> o;

#pragma unroll
    for (int m = 0; m < S::M_TILES; m++)
#pragma unroll
        for (int i = 0; i < S::HEADS / 2; i++)
            o[m][i] = 0.f;

    int stage = 0, phase = 0;
    for (int tile = 0; tile < work.n_tiles; tile++) {
        const int buffer = tile & 1;
        const uint32_t rows_at = stages_at + stage * S::STAGE_BYTES;
        const uint32_t values_at = rows_at + 2 * me.q * S::PITCH + d0;
        const uint32_t scales_at = rows_at + 2 * me.q * S::PITCH + S::SCALES_AT + 4 * group;
        const uint32_t p_at = shared_at + S::P_AT + buffer * S::P_BYTES;
        uint32_t bytes[4];
        ScalePairs scales[4];

        /* 1. ahead of P: first bytes and, unless ref moves, scales */
        mbar_wait(&ctl->full[stage], phase);
        load_values<S>(bytes, values_at);
        const uint32_t bits = load_tile_pairs<S>(scales, scales_at, inverse_ref);
        const bool is_rounded = bar_any(BARRIER_OUTPUT + warp / 4, WARPGROUP, (bits & 0x1fffu) != 0);

        /* 2. P is there, and its turn has come */
        mbar_wait(&ctl->p_full[buffer], (tile >> 1) & 1);
        mbar_wait(&ctl->go, tile & 1);
        const uint32_t flags = ctl->p_flags[buffer];
        if (flags & ATTEND_SM90_P_SETTLED) {
            inverse_ref = ctl->inv_ref[buffer][group];
            load_tile_pairs<S>(scales, scales_at, inverse_ref);
            if (flags & ATTEND_SM90_P_RESCALE)
                rescale_output<S>(o, ctl, buffer, group, me.q);
        }
        if (flags & ATTEND_SM90_P_EXACT) {
            multiply_tile_exact<S>(o, ctl->valid[stage], rows_at, d0, shared_at + S::P_AT, group, inverse_ref, me.q);
            __syncwarp();
            if (me.lane < 4)
                mbar_arrive(&ctl->empty[stage][me.lane]);
        } else if (is_rounded) {
            multiply_tile<S, true>(o, bytes, values_at, p_at, scales, scales_at, inverse_ref, ctl->empty[stage], me.lane);
        } else {
            multiply_tile<S, false>(o, bytes, values_at, p_at, scales, scales_at, inverse_ref, ctl->empty[stage], me.lane);
        }
        __syncwarp();
        if (me.lane == 0)
            mbar_arrive(&ctl->p_empty[buffer]);
        if (++stage == S::STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    const Destination to = destination<S>(block, work);
    mbar_wait(&ctl->sums, 0);
    if (to.dtype == DTYPE_PART)
        store_output<S, DTYPE_PART>(o, ctl, to, work.n_heads, d0, group, me.q);
    else if (to.dtype == DSK_DTYPE_BF16)
        store_output<S, DSK_DTYPE_BF16>(o, ctl, to, work.n_heads, d0, group, me.q);
    else
        store_output<S, DSK_DTYPE_F32>(o, ctl, to, work.n_heads, d0, group, me.q);
}

} /* namespace attend_sm90 */

#endif /* KERNELS_CUDA_ATTEND_SM90_OUTPUT_CUH */
