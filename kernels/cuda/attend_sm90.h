/* attend_sm90.h - which attend_sm90 kernel a launch takes, and its geometry. Plain C11 and C++, no CUDA header, no state:
 * any thread. The constants here are the ones the kernels are built from (attend_sm90_shape.cuh asserts them).
 *
 * Kernels (one parameter each: const struct dsk_attend_block *, a device address):
 *   attend_sm90_<latent>_<rope>_h<heads>     512_64, 512_0, 256_0; heads per CTA 8, 16, 32, 64
 *   attend_sm90_merge_<d_v>_w<warps>         512, 256; warps per (row, head): 1, 8
 * Main grid: x = split * n_head_blocks + head_block, y = row. Merge grid: x = row * h_q + head in blocks of 8 / warps.
 * One CTA takes 512 threads and nearly all shared memory of an SM.
 *
 * Scratch of a split launch, each array 256-byte aligned, contents irrelevant before the launch:
 *   part_out  f16 [n_rows, n_splits, h_q, d_v], in units of part_ref
 *   part_lse  f32 [n_rows, n_splits, h_q], log2 units
 *   part_ref  struct attend_sm90_side [n_rows, n_splits, n_head_blocks]
 * n_bad, lse and out are written by whichever kernel comes last. */
#ifndef KERNELS_CUDA_ATTEND_SM90_H
#define KERNELS_CUDA_ATTEND_SM90_H

#include <stdbool.h>
#include <stdint.h>

#include "attend_args.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ATTEND_SM90_THREADS         512
#define ATTEND_SM90_MERGE_THREADS   256
#define ATTEND_SM90_TILE            64 /* tokens a tile; split boundaries are multiples of it */
#define ATTEND_SM90_MAX_HEADS       64 /* heads a CTA */
#define ATTEND_SM90_MAX_SPLITS      64
#define ATTEND_SM90_MAX_GROUPS      4
#define ATTEND_SM90_MAX_SHARED      232448u /* what one block may have on sm_90 */
#define ATTEND_SM90_BATCH_INVARIANT 1u      /* value of DSK_ATTEND_BATCH_INVARIANT */

/* What a split says about its partial output besides the log-sum: 32 bytes. */
struct attend_sm90_side {
    float ref[ATTEND_SM90_MAX_GROUPS]; /* unit of part_out in each group of 128 values */
    uint32_t n_bad;
    uint32_t reserved[3];
};
DSK_STATIC_ASSERT(sizeof(struct attend_sm90_side) == 32, "side data of a split");

struct attend_sm90_launch {
    const char *name; /* extern "C" kernel symbol; NULL = nothing to launch */
    uint32_t grid_x, grid_y, grid_z;
    uint32_t block;
    uint32_t shared_bytes; /* dynamic; above 48 KiB the function attribute must allow it */
    uint32_t cluster;      /* 0: none */
    uint32_t
        is_dependent; /* launch with programmatic stream serialization (it waits by itself); correct without too */
};

struct attend_sm90_plan {
    struct attend_sm90_launch main;
    struct attend_sm90_launch combine;
    int32_t n_splits;
    int32_t split_entries;
    uint64_t part_out_bytes; /* 0 when nothing is split */
    uint64_t part_lse_bytes;
    uint64_t part_ref_bytes;
    /* The kernels take 16-byte steps: q, out, q_head_bytes, out_head_bytes must be multiples of 16 ... */
    uint32_t needs_aligned;
    /* ... and kv.base and page_pitch_bytes multiples of this (16, or 8 for 264-byte rows). */
    uint32_t kv_align;
};

/* false: not served here (another layout, more than 65535 rows, a bad count); *plan_p is then untouched.
 * n_rows may be a padded count and topk the largest of the rows. Deterministic in its arguments; with
 * DSK_ATTEND_BATCH_INVARIANT split boundaries depend on nothing but their constant. */
bool attend_sm90_plan(uint32_t layout, int32_t n_rows, int32_t h_q, int32_t topk, int32_t out_dtype,
                      uint32_t flags, int32_t n_sms, struct attend_sm90_plan *plan_p);

#ifdef __cplusplus
}
#endif

#endif /* KERNELS_CUDA_ATTEND_SM90_H */
