/* attend_mma.h - geometry of the portable attend kernels, shared by attend_mma.cu and the host code that plans their
 * launches. Plain C11 and C++.
 *
 * Kernels (one parameter each, the address of a struct dsk_attend_block):
 *   attend_mma_<latent>_<rope>_h<heads>   512_64, 512_0, 256_0; heads per block 16 or 64
 *   attend_mma_combine                    merges the splits of a row and head
 * Main grid: x = row, y = block of heads, z = split. Combine grid: x = row, y = head. */
#ifndef KERNELS_CUDA_ATTEND_MMA_H
#define KERNELS_CUDA_ATTEND_MMA_H

#include "attend_args.h"

#define ATTEND_MMA_THREADS(heads)  ((heads) == ATTEND_MMA_FEW_HEADS ? 256u : 512u)
#define ATTEND_MMA_COMBINE_THREADS 128
#define ATTEND_MMA_TILE            32 /* tokens */
#define ATTEND_MMA_FEW_HEADS       16
#define ATTEND_MMA_MANY_HEADS      64
#define ATTEND_MMA_MAX_SPLITS      64
#define ATTEND_MMA_INVARIANT_SPLIT 512 /* entries of a split where the bits may not depend on the batch */
#define ATTEND_MMA_SCALES          5   /* groups of a token: four of the latent, one of the RoPE */

/* Bytes between two rows of Q or K in shared memory: an odd multiple of 16, so that eight rows of 16 bytes fall into
 * different banks. */
#define ATTEND_MMA_PITCH(d_qk)      (2u * (uint32_t)(d_qk) + 16u)
#define ATTEND_MMA_SCORE_PITCH      (ATTEND_MMA_TILE + 4) /* floats */
#define ATTEND_MMA_RAW_PITCH(bytes) (((uint32_t)(bytes) + 15u) / 16u * 16u)
/* Warps that share the products of 16 tokens with 16 heads, by dims: there are more warps than such tiles. */
#define ATTEND_MMA_K_WARPS(heads) ((heads) == ATTEND_MMA_FEW_HEADS ? 4u : 2u)
#define ATTEND_MMA_SCORE_BYTES(heads)                                                                        \
    (ATTEND_MMA_K_WARPS(heads) * (uint32_t)(heads)*ATTEND_MMA_SCORE_PITCH * 4u)

/* Shared memory of a block, without the stages of raw rows: Q, K, scores, scales, factors. */
#define ATTEND_MMA_FIXED_BYTES(d_qk, heads)                                                                  \
    (((uint32_t)(heads) + ATTEND_MMA_TILE) * ATTEND_MMA_PITCH(d_qk) + ATTEND_MMA_SCORE_BYTES(heads)          \
     + ATTEND_MMA_SCALES * ATTEND_MMA_TILE * 4u + (uint32_t)(heads)*8u + ATTEND_MMA_TILE * 4u + 64u)
#define ATTEND_MMA_STAGE_BYTES(row_bytes) (ATTEND_MMA_TILE * ATTEND_MMA_RAW_PITCH(row_bytes))

#endif /* KERNELS_CUDA_ATTEND_MMA_H */
