/* attend_sm90_shape.cuh - what every part of the sm_90a attend kernels shares: constants, shapes, a CTA's work, reductions. */
#ifndef KERNELS_CUDA_ATTEND_SM90_SHAPE_CUH
#define KERNELS_CUDA_ATTEND_SM90_SHAPE_CUH

#include <cuda_fp16.h>

#include "attend_sm90_ptx.cuh"
#include "attend_sm90_shared.h"
#include "attend_sm90_wgmma.cuh"

namespace attend_sm90 {

static_assert(ATTEND_SM90_TILE == 64 && DSK_GROUP_VALUES == 128, "fragment layout below");

constexpr int WARP = 32; /* lanes; every shuffle below counts on it */
constexpr int WARPGROUP = 128;
constexpr int TILE = ATTEND_SM90_TILE;
constexpr int QUARTER = TILE / 4; /* rows a loader warp brings, and a k-step of O^T uses */


enum barrier_id {
    BARRIER_QUERY = 1,  /* Q is in shared memory: warpgroups 0-2 */
    BARRIER_SCORE,      /* within warpgroup 2 */
    BARRIER_ISSUED,     /* loads of Q are under way: everyone */
    BARRIER_LOADER,     /* within warpgroup 3 */
    BARRIER_OUTPUT,     /* within warpgroup 0, and the next within warpgroup 1 */
};

constexpr int UNROLL_GROUPS = 4;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float P_TOP_LOG2 = 7.f;            /* log2 of the largest P after a raise */
constexpr float P_TOP_INVERSE = 1.f / 128.f; /* 2^-P_TOP_LOG2 */
constexpr float QUERY_FACTOR = 64.f;          /* of Q, if the largest |q| is in [2^-9, 2^9) ... */
constexpr uint32_t QUERY_TOO_LARGE = 0x4400u; /* ... in bf16 bits */
constexpr uint32_t QUERY_TOO_SMALL = 0x3b00u;
constexpr float SCALE_FLOOR = 0x1p-60f;      /* keeps scale ratios finite; a group this small adds nothing to a score */
constexpr float V_RATIO_MAX = 128.f;         /* 448 * 128 < 65504 */
constexpr float V_RATIO_MIN = 0x1p-14f;      /* normal f16 */
constexpr float V_SCALE_NOTHING = 0x1p-26f;  /* 448 times this is below 1e-5: may round to zero */
constexpr float EXACT_SCALE = 1.f;           /* values beyond 448 show the rounding of P wherever they cancel */
/* Few entries that cancel show every rounding: with scales that f16 rounds, a tile of up to so many, or a short row, is
 * exact. */
constexpr int SPARSE_ENTRIES = 8;
constexpr int NARROW_ENTRIES = 2 * TILE;

template <int LATENT_, int ROPE_, int HEADS_> struct Shape {
    static constexpr int LATENT = LATENT_;
    static constexpr int ROPE = ROPE_;
    static constexpr int HEADS = HEADS_;
    static constexpr int D_QK = LATENT + ROPE;
    static constexpr int GROUPS = LATENT / DSK_GROUP_VALUES;
    static constexpr int ROW_BYTES = attend_sm90_row_bytes(LATENT, ROPE);
    static constexpr int PITCH = attend_sm90_pitch(LATENT, ROPE);
    static constexpr int SCALES_AT = LATENT;
    static constexpr int ROPE_AT = LATENT + 4 * GROUPS;
    static constexpr bool IS_BULK = ROW_BYTES % 16 == 0; /* else rows are only 8-byte aligned */

    static constexpr int CHUNKS = LATENT / 64; /* of 64 values; RoPE is one more */
    static constexpr int CHUNK_BYTES = HEADS * 128;
    static constexpr int P_AT = attend_sm90_q_bytes(LATENT, ROPE, HEADS);
    static constexpr int P_BYTES = attend_sm90_p_bytes(HEADS);
    static constexpr int STAGES_AT = attend_sm90_stages_at(LATENT, ROPE, HEADS);
    static constexpr int STAGE_BYTES = attend_sm90_stage_bytes(LATENT, ROPE);
    static constexpr int STAGES = attend_sm90_n_stages(LATENT, ROPE, HEADS);
    static constexpr int CONTROL_AT = attend_sm90_control_at(LATENT, ROPE, HEADS);

    static constexpr int N_BLOCKS = HEADS / 8;     /* blocks of 8 heads in a fragment */
    static constexpr int THREAD_HEADS = HEADS / 4; /* heads of one thread in a fragment */
    static constexpr int WARP_VALUES = LATENT / 8; /* output values of one O^T warp */
    static constexpr int M_TILES = LATENT / 128;   /* 64-row tiles of an O^T warpgroup */
    /* Registers per thread after the roles part: twice output, score and loader are the 4 * 128 of the launch. Where O^T
     * takes 128 a thread there is no other choice that ptxas does not answer with serialised wgmmas. */
    static constexpr bool IS_LARGE = M_TILES * HEADS / 2 > 64;
    static constexpr int OUTPUT_REGISTERS = IS_LARGE ? 176 : 136;
    static constexpr int SCORE_REGISTERS = 136;
    static constexpr int LOADER_REGISTERS = IS_LARGE ? 24 : 104;

    static constexpr int QUERY_WARPS = 12;
    static constexpr int WARP_QUERIES = (HEADS + QUERY_WARPS - 1) / QUERY_WARPS;

    static_assert(2 * OUTPUT_REGISTERS + SCORE_REGISTERS + LOADER_REGISTERS == 4 * 128, "the launch's registers");
    static_assert(PITCH / 4 % 32 == 4, "bank shift of 4 a row");
    static_assert(STAGES >= 2, "a tile must load while another is used");
    static_assert(ROPE == 0 || ROPE == 64, "one chunk");
    static_assert(CONTROL_AT % 16 == 0 && P_AT % 1024 == 0 && P_BYTES % 1024 == 0, "alignment");
};

/* What one CTA does. Uniform over its threads. */
struct Work {
    const dsk_attend_row *row;
    int head_block;
    int head0;
    int n_heads;   /* real ones among HEADS */
    int first;     /* entries [first, end) of the list */
    int end;
    int n_tiles;
    bool is_narrow; /* a short row */
    int i_part;    /* row * n_splits + split */
    bool is_split;
};

/* This thread's place in a fragment: rows g and g + 8 of its warp's 16, columns 2 q and 2 q + 1 of each 8. */
struct Lane {
    int warp; /* within its warpgroup */
    int lane;
    int g;
    int q;
};

__device__ __forceinline__ Lane my_lane()
{
    const int lane = (int)threadIdx.x % WARP;
    return {(int)threadIdx.x / WARP % 4, lane, lane / 4, lane % 4};
}

/* ---- reductions over the tokens of a fragment -------------------------------------------------------- */

struct Maximum {
    __device__ static float apply(float a, float b) { return fmaxf(a, b); }
};
struct Sum {
    __device__ static float apply(float a, float b) { return a + b; }
};

/* One step: lanes that differ in bit MASK exchange halves of their 2 * HALF values, or share one value. Returns where the
 * half kept here starts. */
template <class Op, int HALF, int MASK, int N> __device__ __forceinline__ int reduce_step(float (&v)[N], int lane)
{
    if constexpr (HALF == 0) {
        v[0] = Op::apply(v[0], __shfl_xor_sync(~0u, v[0], MASK));
        return 0;
    } else {
        const bool is_upper = (lane & MASK) != 0;
#pragma unroll
        for (int i = 0; i < HALF; i++) {
            const float give = is_upper ? v[i] : v[i + HALF];
            const float keep = is_upper ? v[i + HALF] : v[i];
            v[i] = Op::apply(keep, __shfl_xor_sync(~0u, give, MASK));
        }
        return is_upper ? HALF : 0;
    }
}

/* Reduces every v[i] over the 8 lanes that share q, halving the list at each step while it can: 14 shuffles for 16 values,
 * not 48. Afterwards v[0 .. max(N / 8, 1)) belong to entries first + ... of the list; returns first. */
template <class Op, int N> __device__ __forceinline__ int reduce_tokens(float (&v)[N], int lane)
{
    int first = reduce_step<Op, N / 2, 16>(v, lane);
    first += reduce_step<Op, N / 4, 8>(v, lane);
    return first + reduce_step<Op, N / 8, 4>(v, lane);
}

/* Entry i of a thread's head list is head 8 * (i / 2) + 2 q + i % 2. */
__device__ __forceinline__ int head_of(int i, int q)
{
    return 8 * (i >> 1) + 2 * q + (i & 1);
}

/* Reduces over the warp's tokens and leaves the result of every head in ctl->head_part[warp]. */
template <class Op, class S>
__device__ __forceinline__ void publish_heads(attend_sm90_control *ctl, const Lane &me, float (&v)[S::THREAD_HEADS])
{
    const int first = reduce_tokens<Op>(v, me.lane);
#pragma unroll
    for (int i = 0; i < (S::THREAD_HEADS > 8 ? S::THREAD_HEADS / 8 : 1); i++)
        ctl->head_part[me.warp][head_of(first + i, me.q)] = v[i];
}

} /* namespace attend_sm90 */

#endif /* KERNELS_CUDA_ATTEND_SM90_SHAPE_CUH */
