/* check.h - compares attend results with float64 over rows that the checker holds itself. Pure; any
 * thread. */
#ifndef DSACTL_CHECK_H
#define DSACTL_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/dsa.h"
#include "ref64.h"

/* Query rows of one sequence and what the server said about them. */
struct check_rows {
    const struct ref64_layout *layout;
    float raw_scale;
    const uint8_t *rows; /* packed rows of the sequence in one layer, [n_tokens, row_bytes] */
    int64_t n_tokens;
    uint32_t n_rows, heads, topk;
    const uint16_t *q;      /* bf16 [n_rows, heads, d_qk] */
    const int32_t *indices; /* positions [n_rows, topk] */
    const int32_t *lengths; /* [n_rows] or NULL */
    const float *sink;      /* [heads] or NULL */
    float softmax_scale;
    const void *out;          /* [n_rows, heads, d_v] of out_dtype */
    enum dsa_dtype out_dtype; /* BF16 or F32 */
    const float *lse;         /* [n_rows, heads] or NULL */
};

/* 1: agrees; 0: does not, with one sentence in text; -1: no memory. Adds the invalid entries it met to
 * *n_invalid_p. */
int check_attend(const struct check_rows *check, uint64_t *n_invalid_p, char *text, size_t size);

/* The same against given results instead of computed ones: n values each. */
int check_values(const void *out, enum dsa_dtype dtype, const double *ref, int64_t n, const float *lse,
                 const double *lse_ref, int64_t n_lse, char *text, size_t size);

#endif /* DSACTL_CHECK_H */
