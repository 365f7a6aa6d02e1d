/* attend_sm90_shared.h - the shared-memory plan of the attend_sm90 kernels, as plain C that the planner and nvcc read.
 *
 *   0          q_bytes       + p_bytes      + n_stages * stage_bytes
 *   | Q chunks | P, 2 tiles  | KV stages ...             | control |
 *
 * Q: one chunk per 64 values of d_qk, [heads][64] 16-bit, 128-byte rows swizzled for wgmma (B operand, K-major).
 * P: two tiles [heads][64 tokens] f16, the same form; an exact tile takes both as f32 [64 tokens][heads].
 * KV stage: 64 raw cache rows. Their pitch is 4 banks modulo 32, so that the fragment loads of a warp (8 rows, 4 columns of
 * 16 bytes 32 apart) meet no bank conflict. 264-byte rows are padded to 272 for the same reason and for 16-byte loads. */
#ifndef KERNELS_CUDA_ATTEND_SM90_SHARED_H
#define KERNELS_CUDA_ATTEND_SM90_SHARED_H

#include "attend_sm90.h"

#if defined(__cplusplus)
#define ATTEND_SM90_INLINE constexpr
#else
#define ATTEND_SM90_INLINE static inline
#endif

#define ATTEND_SM90_MAX_STAGES 8

/* Everything small that the warps of a CTA tell each other. head arrays are indexed by the head within the CTA. */
struct attend_sm90_control {
    uint64_t full[ATTEND_SM90_MAX_STAGES];     /* mbarriers: stage has its rows */
    uint64_t empty[ATTEND_SM90_MAX_STAGES][4]; /* quarter (16 rows) of a stage is free again */
    uint64_t p_full[2];                        /* P tile, V scales and flags written */
    uint64_t p_empty[2];                       /* P tile read */
    uint64_t go;                             /* PV of a tile may start (QK of the next has issued its work) */
    uint64_t sums;                           /* inv_sum written */
    float head_base[ATTEND_SM90_MAX_HEADS];  /* log2 units: P = 2^(score - head_base) */
    float head_delta[ATTEND_SM90_MAX_HEADS]; /* by how much a raise moved head_base */
    float rescale[2][ATTEND_SM90_MAX_HEADS]; /* what O of a head is multiplied by before this P tile */
    float head_part[4][ATTEND_SM90_MAX_HEADS];      /* per-warp maxima or sums on their way to one value */
    float inv_sum[ATTEND_SM90_MAX_HEADS];           /* final factor of O, 0 for an empty row */
    float group_largest[4][ATTEND_SM90_MAX_GROUPS]; /* per-warp extremes of the V scales */
    float group_smallest[4][ATTEND_SM90_MAX_GROUPS];
    float group_rescale[2][ATTEND_SM90_MAX_GROUPS];
    float inv_ref[2][ATTEND_SM90_MAX_GROUPS];  /* 1 / ref from this P tile on */
    float ref[ATTEND_SM90_MAX_GROUPS];         /* unit of O in each group */
    uint32_t q_max[16];                        /* per-warp largest |q|, bf16 bits */
    uint32_t p_flags[2];                       /* ATTEND_SM90_P_* */
    uint16_t valid[ATTEND_SM90_MAX_STAGES][4]; /* which of a quarter's 16 rows are real */
    uint32_t n_bad[4];
    int32_t n_live; /* entries of the row that count */
    int32_t pad[3];
};

#define ATTEND_SM90_P_SETTLED 1u /* inv_ref is new */
#define ATTEND_SM90_P_RESCALE 2u /* O must be multiplied by rescale and group_rescale first */
#define ATTEND_SM90_P_EXACT   4u /* P is f32 and the products are done in f32 */

ATTEND_SM90_INLINE uint32_t attend_sm90_row_bytes(int32_t latent, int32_t rope)
{
    return (uint32_t)(latent + latent / DSK_GROUP_VALUES * 4 + rope * 2);
}

ATTEND_SM90_INLINE uint32_t attend_sm90_pitch(int32_t latent, int32_t rope)
{
    return (attend_sm90_row_bytes(latent, rope) + 15u) / 16u * 16u;
}

ATTEND_SM90_INLINE uint32_t attend_sm90_q_bytes(int32_t latent, int32_t rope, int32_t heads)
{
    return (uint32_t)((latent + rope) * heads * 2);
}

ATTEND_SM90_INLINE uint32_t attend_sm90_p_bytes(int32_t heads)
{
    return (uint32_t)(heads * ATTEND_SM90_TILE * 2); /* one of the two */
}

ATTEND_SM90_INLINE uint32_t attend_sm90_stage_bytes(int32_t latent, int32_t rope)
{
    return attend_sm90_pitch(latent, rope) * ATTEND_SM90_TILE;
}

ATTEND_SM90_INLINE uint32_t attend_sm90_stages_at(int32_t latent, int32_t rope, int32_t heads)
{
    return attend_sm90_q_bytes(latent, rope, heads) + 2u * attend_sm90_p_bytes(heads);
}

ATTEND_SM90_INLINE uint32_t attend_sm90_stages_fit(int32_t latent, int32_t rope, int32_t heads)
{
    return (uint32_t)((ATTEND_SM90_MAX_SHARED - sizeof(struct attend_sm90_control)
                       - attend_sm90_stages_at(latent, rope, heads))
                      / attend_sm90_stage_bytes(latent, rope));
}

ATTEND_SM90_INLINE uint32_t attend_sm90_n_stages(int32_t latent, int32_t rope, int32_t heads)
{
    return attend_sm90_stages_fit(latent, rope, heads) < ATTEND_SM90_MAX_STAGES
               ? attend_sm90_stages_fit(latent, rope, heads)
               : ATTEND_SM90_MAX_STAGES;
}

ATTEND_SM90_INLINE uint32_t attend_sm90_control_at(int32_t latent, int32_t rope, int32_t heads)
{
    return attend_sm90_stages_at(latent, rope, heads)
           + attend_sm90_n_stages(latent, rope, heads) * attend_sm90_stage_bytes(latent, rope);
}

ATTEND_SM90_INLINE uint32_t attend_sm90_shared_bytes(int32_t latent, int32_t rope, int32_t heads)
{
    return (uint32_t)(attend_sm90_control_at(latent, rope, heads) + sizeof(struct attend_sm90_control));
}

#endif /* KERNELS_CUDA_ATTEND_SM90_SHARED_H */
