/* gpu_args.h - what the small kernels are given, by value: plain C that device compilers take too. Shared by the host
 * code and every vendor's device code. Attend has its own argument block, attend_args.h. */
#ifndef KERNELS_GPU_ARGS_H
#define KERNELS_GPU_ARGS_H

#include "../cuda/attend_args.h"
#include "../dsk_format.h"

/* Slots as the host hands them to an append, after it has looked for equal ones. */
#define GPU_SLOT_SKIP       (-1) /* the row is padding */
#define GPU_SLOT_SUPERSEDED (-2) /* a later row of the batch has the same slot: count, do not write */

struct gpu_append_args {
    struct dsk_kv_view kv;
    uint64_t rows; /* bf16 [n_rows, d_qk] */
    int64_t row_bytes;
    uint64_t slots;       /* int32 [n_rows]; 0: they are in gpu_append_few.slots */
    uint64_t n_nonfinite; /* uint32 [n_rows] or 0 */
    uint64_t first_bad;   /* int32, lowered to the first row that is not finite (checking pass) */
    int32_t n_rows;
    uint32_t rule;
};
DSK_STATIC_ASSERT(sizeof(struct gpu_append_args) == 80, "append arguments");

/* The same with the slots inside, within the 4 KiB that every launch may carry. Kernels for fewer slots take the front
 * alone: parameters cost the host time. */
#define GPU_FEW_SLOTS 960
struct gpu_append_few {
    struct gpu_append_args args;
    int32_t slots[GPU_FEW_SLOTS];
};
DSK_STATIC_ASSERT(sizeof(struct gpu_append_few) <= 4096, "parameters of one launch");

/* The same where slots come in few runs of neighbours: run k is rows [runs[k].row, runs[k + 1].row) at slot and on. */
struct gpu_run {
    int32_t row;
    int32_t slot;
};
#define GPU_MAX_RUNS 500
struct gpu_append_runs {
    struct gpu_append_args args;
    int32_t n_runs;
    int32_t reserved;
    struct gpu_run runs[GPU_MAX_RUNS]; /* a kernel for fewer takes the front alone */
};
DSK_STATIC_ASSERT(sizeof(struct gpu_append_runs) <= 4096, "parameters of one launch");

/* Readers and gather. mode: as DSK_READ_*, or GPU_READ_ENTRIES, which takes list as rows of topk entries and writes
 * new_indices. */
#define GPU_ROWS_PER_WAVE(row_bytes) ((row_bytes) < 512 ? 2 : 1)
#define GPU_READ_FULL                1
#define GPU_READ_PAGED               2
#define GPU_READ_SELECTED            3
#define GPU_READ_ENTRIES             4
struct gpu_read_args {
    struct dsk_kv_view kv;
    uint64_t list;
    uint64_t out;
    uint64_t new_indices;
    int64_t n_rows;
    int64_t first;
    int64_t list_row_bytes;
    int32_t n_list;
    int32_t mode;
    int32_t topk;
    int32_t reserved;
};
DSK_STATIC_ASSERT(sizeof(struct gpu_read_args) == 96, "read arguments");

/* Every entry that is no slot of the plane becomes -1. */
struct gpu_clean_args {
    uint64_t indices;
    uint64_t new_indices;
    int64_t indices_row_bytes;
    int64_t n_entries;
    int64_t n_slots;
    int32_t topk;
    int32_t reserved;
};
DSK_STATIC_ASSERT(sizeof(struct gpu_clean_args) == 48, "clean arguments");

struct gpu_map_args {
    uint64_t logical;
    uint64_t physical;
    uint64_t tables;
    uint64_t seq_lens;
    uint64_t n_bad;
    int64_t logical_row_bytes;
    int64_t physical_row_bytes;
    int64_t table_row_bytes;
    int64_t n_slots; /* what page ids may name */
    int32_t topk;
    int32_t n_table;
};
DSK_STATIC_ASSERT(sizeof(struct gpu_map_args) == 80, "map arguments");

struct gpu_merge_args {
    uint64_t out_parts;
    uint64_t lse_parts;
    uint64_t out;
    uint64_t lse;
    int64_t n_columns; /* rows * heads */
    int32_t n_parts;
    int32_t d_v;
    int32_t part_dtype;
    int32_t out_dtype;
};
DSK_STATIC_ASSERT(sizeof(struct gpu_merge_args) == 56, "merge arguments");

/* The argument block of an attend launch, on its way to the device inside a launch. */
#define GPU_BLOCK_BYTES  256 /* room for struct dsk_attend_block; its rows follow */
#define GPU_UPLOAD_ROWS  288
#define GPU_UPLOAD_BLOCK 256
struct gpu_upload_args {
    uint64_t block; /* where it goes */
    int32_t n_rows;
    int32_t reserved;
    struct dsk_attend_block head;
    struct dsk_attend_row rows[GPU_UPLOAD_ROWS]; /* a kernel for fewer takes the front alone */
};
DSK_STATIC_ASSERT(sizeof(struct gpu_upload_args) <= 32764, "parameters of one launch");

/* What the benchmark's peak kernel runs. */
#define GPU_PEAK_BLOCK  256
#define GPU_PEAK_FLOP   (2.0 * 128 * 256 * 64) /* of a block and step */
#define GPU_PEAK_SHARED (4 * (2 * 64 + 256) * 128 + 1024)
struct gpu_peak_args {
    uint64_t sink; /* fp32 [blocks * GPU_PEAK_BLOCK] */
    int32_t n_steps;
    int32_t reserved;
};
DSK_STATIC_ASSERT(sizeof(struct gpu_peak_args) == 16, "peak arguments");

#endif /* KERNELS_GPU_ARGS_H */
