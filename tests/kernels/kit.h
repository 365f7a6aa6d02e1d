/* kit.h - what the kernel tests share: a CPU device per instruction set, buffers with guard bytes, random
 * pools and queries, and a run of attend that is compared with float64.
 *
 * Everything a test allocates through its kit is checked for damaged guard bytes and freed by kit_close. The
 * functions fail the running Check test themselves. One thread. */
#ifndef TESTS_KERNELS_KIT_H
#define TESTS_KERNELS_KIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/dsk.h"
#include "ref64.h"
#include "ref64_rng.h"
#include "test_main.h"
#include "vectors.h"

/* Sanitized builds run the same cases at smaller sizes, to stay within their time. */
#if defined(DSA_SANITIZE_thread) || defined(DSA_SANITIZE_address) || defined(DSA_SANITIZE_undefined)
#define KIT_IS_SLOW 1
#else
#define KIT_IS_SLOW 0
#endif
#define KIT_SIZE(normal, slow) (KIT_IS_SLOW ? (slow) : (normal))

#define KIT_FIRST_ISA DSK_ISA_GENERIC
#define KIT_END_ISA   (DSK_ISA_AVX512_BF16 + 1)

#define KIT_MAX_BUFS 256

struct kit {
    struct dsk_device *dev;
    struct dsk_stream *s;
    struct ref64_rng rng;
    struct dsk_err err;
    int n_bufs;
    struct {
        uint8_t *mem;
        size_t bytes;
    } bufs[KIT_MAX_BUFS];
};

/* Opens a device; false if this processor lacks the instruction set. Use KIT_OPEN. */
bool kit_open(struct kit *k, int isa, int n_threads);
void kit_close(struct kit *k);
const char *kit_isa_name(int isa);

#define KIT_OPEN(k, isa, n_threads)                                                                          \
    do {                                                                                                     \
        if (!kit_open(k, isa, n_threads))                                                                    \
            TEST_SKIP("this processor has no %s", kit_isa_name(isa));                                        \
    } while (0)

/* ck_assert_msg writes to a pipe each time it is passed; this one is for loops over elements. */
#define KIT_EXPECT(cond, ...)                                                                                \
    do {                                                                                                     \
        if (!(cond))                                                                                         \
            ck_abort_msg(__VA_ARGS__);                                                                       \
    } while (0)

/* bytes of memory filled with 0xee, aligned to 64, with guard bytes on both sides. */
void *kit_alloc(struct kit *k, int64_t bytes);
static inline uint64_t kit_addr(const void *p)
{
    return (uint64_t)(uintptr_t)p;
}

/* ---- data ---------------------------------------------------------------------------------- */

struct kit_pool {
    const struct ref64_layout *layout;
    uint8_t *bytes;
    struct dsk_kv_view kv;
};

/* A pool of normal rows, quantised by the oracle; groups differ in size by powers of ten. pitch_factor 1 is
 * dense; with 2, every second page's worth of bytes is a gap of 0x7f. */
void kit_pool_make(struct kit *k, struct kit_pool *pool, uint32_t layout, int64_t n_slots, int pitch_factor);

/* A pool in which each byte of each row is `code` and each scale `scale` (bf16 rows: the same bytes). */
void kit_pool_fill(struct kit *k, struct kit_pool *pool, uint32_t layout, int64_t n_slots, uint8_t code,
                   float scale);

uint8_t *kit_pool_row(const struct kit_pool *pool, int64_t slot);

/* A row that spoils whatever reads it: 0x7f bytes and NaN scales. */
void kit_poison_row(const struct kit_pool *pool, int64_t slot);

/* Writes one row from floats (d_qk values, first n given, the rest 0) with scale 1 for every group. */
void kit_set_row(const struct kit_pool *pool, int64_t slot, const float *values, int n);

uint16_t *kit_bf16_normal(struct kit *k, int64_t n, double sigma);
int32_t *kit_indices(struct kit *k, int64_t n, int64_t n_slots, int hole_percent);

/* ---- attend -------------------------------------------------------------------------------- */

struct kit_attend {
    struct kit_pool *pool;
    int n_rows, topk, h_q;
    uint16_t *q;      /* dense */
    int32_t *indices; /* dense */
    int32_t *lengths; /* or NULL */
    float *sink;      /* or NULL */
    int32_t *table;   /* or NULL: physical */
    int n_table;
    int seq_len;
    float scale;
    int out_dtype;
    uint32_t flags;
    void *out; /* the four below are made by the first run */
    float *out_f32;
    float *lse;
    uint32_t *n_bad;
};

/* Runs it as one segment and asserts DSK_OK. out_f32 is the output as floats. */
void kit_attend_run(struct kit *k, struct kit_attend *a);

/* What float64 is asked for the same. */
struct ref64_attend kit_ref64(const struct kit_attend *a);

/* Runs it and compares out, lse and n_bad with float64. */
void kit_attend_check(struct kit *k, struct kit_attend *a);

/* The segment that kit_attend_run launches, for tests that change one thing of it. */
struct dsk_attend_seg kit_attend_seg(struct kit *k, struct kit_attend *a);

/* Fails the test unless within FORMATS' tolerance. */
void kit_expect_out(const float *got, const double *ref, int64_t n, const char *what);
void kit_expect_lse(const float *got, const double *ref, int64_t n, const char *what);

uint64_t kit_hash(const void *data, size_t bytes);

#endif /* TESTS_KERNELS_KIT_H */
