/* attend.h - geometry of the attend kernels for AMD, shared by attend.hip and the host code that plans their launches.
 * Plain C11 and C++.
 *
 * Kernels (one parameter each, the address of a struct dsk_attend_block):
 *   attend_<layout>_h<heads>   every layout; heads of a block 16 or 64
 *   attend_fp8_raw_512_64_h<heads>   the same with q and the weights rounded to e4m3: less exact, see README.md
 *   attend_combine             merges the splits of a row and head
 * Main grid: x = row, y = block of heads, z = split. Combine grid: x = row, y = head. Their LDS is their own: launches ask
 * for none. Scratch of split launches: part_out fp32, part_lse fp32, part_ref one uint32 for each row and split. */
#ifndef KERNELS_HIP_ATTEND_H
#define KERNELS_HIP_ATTEND_H

#include "../cuda/attend_args.h"

#define ATTEND_HIP_THREADS         256
#define ATTEND_HIP_COMBINE_THREADS 128
#define ATTEND_HIP_FEW_HEADS       16
#define ATTEND_HIP_MANY_HEADS      64
#define ATTEND_HIP_MAX_SPLITS      64
#define ATTEND_HIP_INVARIANT_SPLIT 512 /* entries of a split where the bits may not depend on the batch */

/* Tokens of a tile. gfx942's matrices are 16 tokens deep: with few heads and long rows tiles are no larger, so that more than
 * one block fits the 64 KiB of LDS. arch_minor: 0x42, 0x50. */
#define ATTEND_HIP_TILE(arch_minor, latent, heads)                                                           \
    ((arch_minor) == 0x42 && (latent) == 512 && (heads) == ATTEND_HIP_FEW_HEADS ? 16 : 32)

/* Bytes between two rows of K in LDS: 16 more than the values take, so that eight rows fall into different banks. */
#define ATTEND_HIP_PITCH(d_qk) (2 * (d_qk) + 16)

/* LDS of a block: K [tile][pitch]; partial scores of four waves where they share the heads; scales [4][tile]; flags [tile];
 * a counter. */
#define ATTEND_HIP_LDS_BYTES(tile, latent, rope, heads)                                                      \
    ((tile)*ATTEND_HIP_PITCH((latent) + (rope)) + ((heads) == ATTEND_HIP_FEW_HEADS ? 256 * (tile) : 0)       \
     + 20 * (tile) + 16)

/* Products in e4m3: rows of 576 bytes as they are. */
#define ATTEND_HIP_FP8_TILE  32
#define ATTEND_HIP_FP8_PITCH (576 + 16)

/* ---- plans: host only ------------------------------------------------------------------------- */

#if !defined(__HIP__) && !defined(HIPEMU)

/* A kernel by name, "" for none; both take the address of the block and no LDS of the launch's. */
struct attend_hip_launch {
    char name[40];
    uint32_t grid[3];
    uint32_t block;
};

struct attend_hip_plan {
    struct attend_hip_launch main;
    struct attend_hip_launch combine;
    int32_t n_splits;
    int32_t split_entries;
    uint64_t part_out_bytes; /* scratch; 0 where there is one split */
    uint64_t part_lse_bytes;
    uint64_t part_ref_bytes;
};

/* [any] How n_rows rows of h_q heads over lists of topk entries are launched on a device of n_units compute units. flags:
 * DSK_ATTEND_*; with BATCH_INVARIANT the splits depend on topk alone. layout: any that there is. Every shape that dsk_attend
 * takes has a plan. */
void attend_hip_plan(uint32_t layout, int32_t n_rows, int32_t h_q, int64_t topk, uint32_t flags,
                     int32_t n_units, struct attend_hip_plan *plan_p);

#endif

#endif /* KERNELS_HIP_ATTEND_H */
