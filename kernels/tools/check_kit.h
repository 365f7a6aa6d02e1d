/* check_kit.h - what dsk-check's parts share: device buffers with guard bytes, counting of checks, and one attend
 * launch that is compared with float64. One thread.
 *
 * Works through device memory and copies alone, so that it serves every backend. Running out of memory or losing
 * the device ends the program with a message and status 2. */
#ifndef DSK_TOOLS_CHECK_KIT_H
#define DSK_TOOLS_CHECK_KIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/dsk.h"
#include "ref64.h"
#include "ref64_rng.h"

struct check {
    struct dsk_device *dev;
    struct dsk_stream *s;
    uint64_t seed;
    int n_passed, n_failed;
};

/* Counts one check; on failure prints one line that starts with the case's name. */
__attribute__((format(printf, 4, 5))) bool check_expect(struct check *c, bool is_ok, const char *name,
                                                        const char *format, ...);

/* A device buffer with guard bytes on both sides. Input is copied in (NULL: filled with 0xee). */
struct check_buf {
    uint64_t addr; /* of the payload */
    uint64_t raw;
    int64_t bytes;
};
void check_buf_init(struct check *c, struct check_buf *buf, const void *data, int64_t bytes);
void check_buf_read(struct check *c, const struct check_buf *buf, void *data);

/* Checks the guards and frees; a damaged guard is a failed check of that name. */
void check_buf_fini(struct check *c, struct check_buf *buf, const char *name, const char *what);

void *check_malloc(size_t bytes); /* never NULL; not cleared */

/* One launch and what it must give. Host memory throughout; strides in bytes, 0 means dense. */
struct check_attend {
    const struct ref64_layout *layout;
    const uint8_t *pool;
    int64_t pool_bytes;
    int64_t page_pitch_bytes;
    int64_t n_slots;
    float raw_scale;
    const uint16_t *q;      /* dense */
    const int32_t *indices; /* dense */
    const int32_t *lengths;
    const float *sink;
    const int32_t *table;
    int n_table, seq_len;
    int n_rows, topk, h_q;
    float softmax_scale;
    int out_dtype;
    uint32_t flags;
    int q_pad, out_pad, lse_pad, index_pad; /* extra elements per row, and per head for q and out */
    int n_segs;                             /* rows are dealt to this many segments; 0 means 1 */
    int n_repeats;                          /* further launches that must give the same bits */
    const double *ref_out, *ref_lse;        /* expected; NULL: computed here */
};
void check_attend_run(struct check *c, const struct check_attend *a, const char *name);

#endif /* DSK_TOOLS_CHECK_KIT_H */
