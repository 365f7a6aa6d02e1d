/* attend_args.h - what an attend launch reads on the device: plain C that nvcc takes too. The host writes these into a
 * device-side argument block before the launch; kernels get the block's address as their only parameter, so a captured
 * graph replays with whatever the block says then. */
#ifndef KERNELS_CUDA_ATTEND_ARGS_H
#define KERNELS_CUDA_ATTEND_ARGS_H

#include "../dsk_format.h"

/* One query row: a row of a dsk_attend_seg with its addresses worked out. A row beyond the real ones has topk 0 and is an empty
 * row whose results go nowhere (out 0). */
struct dsk_attend_row {
    uint64_t q;       /* bf16 [h_q, d_qk] */
    uint64_t out;     /* out_dtype [h_q, d_v]; 0 = padding row */
    uint64_t lse;     /* fp32 [h_q] or 0 */
    uint64_t indices; /* int32 [topk] */
    uint64_t length;  /* address of one int32, clamped to [0, topk]; or 0 */
    uint64_t sink;    /* fp32 [h_q] or 0 */
    uint64_t table;   /* logical: int32 [n_table] page ids; physical: 0 */
    uint64_t n_bad;   /* one uint32, written; or 0 */
    int64_t q_head_bytes;
    int64_t out_head_bytes;
    int32_t topk;
    int32_t space; /* DSK_SPACE_* */
    int32_t n_table;
    int32_t seq_len;
    float softmax_scale;
    int32_t reserved;
};
DSK_STATIC_ASSERT(sizeof(struct dsk_attend_row) == 104, "attend row");

/* The argument block of one launch. Split s of n_splits takes entries [s * split_entries, (s + 1) * split_entries) of each
 * row's list: boundaries depend on the shape alone, never on what else is in the launch. */
struct dsk_attend_block {
    struct dsk_kv_view kv;
    uint64_t rows; /* struct dsk_attend_row [n_rows] */
    uint64_t
        part_out; /* scratch of split launches: [n_rows, n_splits, h_q, d_v], the kernel's own element type; else 0 */
    uint64_t part_lse; /* fp32 [n_rows, n_splits, h_q] */
    uint64_t part_ref; /* the kernel's own per-split side data; or 0 */
    int32_t n_rows;
    int32_t h_q;
    int32_t out_dtype;
    uint32_t flags;
    int32_t n_splits;
    int32_t split_entries; /* multiple of 64 */
};
DSK_STATIC_ASSERT(sizeof(struct dsk_attend_block) == 88, "attend block");

#endif /* KERNELS_CUDA_ATTEND_ARGS_H */
