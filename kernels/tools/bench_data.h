/* bench_data.h - the memory that dsk-bench's operations work on: a pool larger than the last-level cache, fresh random
 * index lists, queries, outputs. Host memory (the CPU device takes it as it is). One thread. */
#ifndef DSK_TOOLS_BENCH_DATA_H
#define DSK_TOOLS_BENCH_DATA_H

#include <stdint.h>

#include "kernels/dsk.h"

#define BENCH_WIDTH       2048
#define BENCH_WIDTH_SMALL 64 /* what a service gets from a client that waits for each answer */
#define BENCH_MAX_ROWS    8
#define BENCH_N_ROWS      16384 /* rows of one append or read */
#define BENCH_N_LISTS     8     /* index lists that take turns, so that no run finds its rows cached */

struct bench_data {
    const struct dsk_layout *layout;
    struct dsk_kv_view kv;
    uint64_t pool_bytes;
    uint16_t *q;   /* [BENCH_MAX_ROWS, DSK_MAX_HEADS, d_qk] */
    uint16_t *out; /* [BENCH_MAX_ROWS, DSK_MAX_HEADS, d_v], and the parts of merge */
    float *lse;
    int32_t *lists; /* [BENCH_N_LISTS, BENCH_N_ROWS] slots, each list all different pages mostly */
    int32_t *pages; /* page table: every page of the pool once, shuffled */
    int32_t n_pages;
    uint16_t *values; /* [BENCH_N_ROWS, d_qk]: rows to append, and the output of readers */
    float *parts;     /* merge: [8, BENCH_MAX_ROWS, 64, 512] */
    float *lse_parts;
};

/* 0, or -1 when there is no memory. Undo with bench_data_fini, which is fine on a cleared struct. */
int bench_data_init(struct bench_data *d, const struct dsk_layout *layout, uint64_t pool_bytes);
void bench_data_fini(struct bench_data *d);

#endif /* DSK_TOOLS_BENCH_DATA_H */
