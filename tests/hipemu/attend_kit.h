/* attend_kit.h - the emulated attend kernels for tests: launches as the host makes them, and float64 beside them. One thread. */
#ifndef TESTS_HIPEMU_ATTEND_KIT_H
#define TESTS_HIPEMU_ATTEND_KIT_H

#include "gpu_kit.h"

extern const char *const attend_targets[2];

/* Loop tests run over chips and layouts. */
#define ATTEND_LOOPS       (2 * (DSK_LAYOUT_COUNT - 1))
#define ATTEND_LOOP_TARGET attend_targets[_i % 2]
#define ATTEND_LOOP_LAYOUT ((uint32_t)(1 + _i / 2))

/* One launch, and the combine where there are splits. Scratch holds NaN at first. */
struct attend_launch {
    struct dsk_attend_seg seg;
    struct dsk_kv_view kv;
    int h_q, out_dtype;
    uint32_t flags;
    int n_splits; /* 0: as the host plans, for a chip of 24 units */
    int heads;    /* of a block; 0: as the host chooses */
    int padding;  /* rows beyond the real ones */
    bool is_fp8;  /* the kernels that round q and weights to e4m3 */
};
void attend_launch(const struct attend_launch *launch, const char *target);

/* The same for a kit_attend. */
struct attend_run {
    struct kit_attend *a;
    int n_splits;
    int heads;
    int padding;
    bool is_fp8;
};

struct attend_results {
    uint8_t *out;
    float *lse;
    uint32_t *n_bad;
    int64_t out_bytes, lse_bytes;
};

struct attend_results attend_results_make(struct kit *k, const struct kit_attend *a);

/* offset: bytes by which out misses its alignment. */
void attend_emulate(struct kit *k, const struct attend_run *run, const char *target, int offset,
                    const struct attend_results *to);

/* float64; n_bad may be NULL. */
void attend_reference(const struct kit_attend *a, double *out, double *lse, uint32_t *n_bad);
void attend_compare(const struct attend_run *run, const char *target, int offset,
                    const struct attend_results *got);

/* Against float64; then, if is_repeated, once more with the waves in the other order and other junk in LDS, bit for bit. */
void attend_check_at(struct kit *k, const struct attend_run *run, const char *target, int offset,
                     bool is_repeated);
void attend_check(struct kit *k, const struct attend_run *run, const char *target); /* aligned, repeated */

/* Random queries and indices (a fifth of them -1). */
struct kit_attend attend_shape(struct kit *k, struct kit_pool *pool, int n_rows, int h_q, int topk);

/* kit_pool_make with negative zeros, which gfx942 would take for NaN. */
void attend_pool(struct kit *k, struct kit_pool *pool, uint32_t layout, int64_t n_slots, int pitch_factor);

TCase *attend_cases(void); /* of test_attend_cases.c */

#endif /* TESTS_HIPEMU_ATTEND_KIT_H */
