/* mirror.h - what a worker should have stored and answered, by other ways: a device and a pool filled
 * through dsk alone, and float64. A difference aborts the test. */
#ifndef TESTS_SERVER_MIRROR_H
#define TESTS_SERVER_MIRROR_H

#include "worker_kit.h"

struct mirror {
    const struct wk *wk;
    struct dsk_device *dev;
    struct dsk_stream *stream;
    struct dsk_kv_view kv;
    uint64_t pool;
};

/* rows: bf16 [n][d_qk], appended in order from slot 0. */
void mirror_open(struct mirror *m, const struct wk *wk, const uint16_t *rows, uint32_t n);
void mirror_close(struct mirror *m);

/* The mirror's answer to the query must equal what the worker wrote, bit for bit. */
void mirror_compare(struct mirror *m, const struct wk_query *query);

/* And float64's, over rows quantised by the oracle, within the stated tolerances. */
void mirror_oracle(const struct wk *wk, const uint16_t *rows, uint32_t n, const struct wk_query *query);

/* The stored rows of a sequence's layer are these n, and no more. */
void mirror_rows(struct wk *wk, uint64_t id, uint32_t layer, const uint16_t *rows, uint32_t n);

#endif /* TESTS_SERVER_MIRROR_H */
