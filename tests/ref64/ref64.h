/* ref64.h - the number formats, cache rows and operations once more, in float64 and straight from their
 * definition: the oracle that kernels, server and client are tested against.
 *
 * Shares no code and no header with kernels/, so that a mistake there cannot cancel here. Plain loops, no
 * tricks; results are exact or correct to double rounding. Everything is pure; any thread. Strides are in
 * elements and 0 means dense. Functions that need scratch memory return -1 when there is none, else 0. */
#ifndef REF64_H
#define REF64_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- numbers ------------------------------------------------------------------------------- */

double ref64_e4m3_decode(uint8_t byte); /* OCP e4m3fn: NaN for 0x7f and 0xff */
uint8_t ref64_e4m3_encode(double x);    /* nearest even, saturates at +-448; NaN gives 0x7f */
double ref64_bf16_decode(uint16_t bits);
uint16_t ref64_bf16_encode(float x); /* nearest even; NaN stays a quiet NaN */

/* ---- cache rows ---------------------------------------------------------------------------- */

enum ref64_encoding { REF64_SCALED, REF64_BF16, REF64_RAW };

struct ref64_layout {
    const char *name;
    uint32_t id; /* same numbers as the wire and the kernels use */
    enum ref64_encoding encoding;
    int row_bytes;
    int latent;
    int rope;
    int n_groups;
    int d_qk;
    int d_v;
};

#define REF64_N_LAYOUTS 7
const struct ref64_layout *ref64_layout_at(int i);                 /* i in [0, REF64_N_LAYOUTS) */
const struct ref64_layout *ref64_layout_get(uint32_t id);          /* NULL if unknown */
const struct ref64_layout *ref64_layout_by_name(const char *name); /* NULL if unknown */

#define REF64_RULE_PLAIN 1
#define REF64_RULE_POW2  2
int ref64_rule_by_name(const char *name); /* 0 if unknown */

/* The scale a group with this amax gets. */
float ref64_scale(float amax, int rule);

/* Quantises one bf16 row (d_qk values) into row_bytes bytes; returns how many values were not finite
 * (0 for bf16 layouts, which copy bits). raw_scale serves raw layouts alone. */
uint32_t ref64_quantise_row(const struct ref64_layout *layout, int rule, float raw_scale,
                            const uint16_t *values, uint8_t *row);

/* One row to d_qk doubles (exact products), or to bf16 bits (fp32 product, then one rounding). */
void ref64_dequant_row(const struct ref64_layout *layout, float raw_scale, const uint8_t *row,
                       double *values);
void ref64_dequant_row_bf16(const struct ref64_layout *layout, float raw_scale, const uint8_t *row,
                            uint16_t *values);

/* ---- operations ---------------------------------------------------------------------------- */

/* Logical position to slot, or -1. n_pages: pages in the pool; pass INT64_MAX when unknown. */
int64_t ref64_map(int32_t logical, int64_t seq_len, const int32_t *table, int64_t n_table, int64_t n_pages);

struct ref64_attend {
    const struct ref64_layout *layout;
    const uint8_t *pool;
    int64_t page_pitch_bytes; /* 0: 64 * row_bytes */
    int64_t n_slots;
    float raw_scale;   /* raw layouts */
    const uint16_t *q; /* bf16 [n_rows, h_q, d_qk] */
    int64_t q_row_elems, q_head_elems;
    const int32_t *indices; /* [n_rows, topk] */
    int64_t indices_row_elems;
    const int32_t *lengths; /* [n_rows] or NULL */
    const float *sink;      /* [h_q] or NULL */
    const int32_t *table;   /* not NULL: indices are positions of one sequence */
    int64_t n_table;
    int64_t seq_len;
    int n_rows, topk, h_q;
    double softmax_scale;
};

/* out [n_rows, h_q, d_v] and lse [n_rows, h_q], dense; n_bad [n_rows] counts live lanes that are invalid
 * and not -1. Each of the three may be NULL. */
int ref64_attend(const struct ref64_attend *args, double *out, double *lse, uint32_t *n_bad);

/* Combines out_parts [n_parts, n, d_v] and lse_parts [n_parts, n] (n = rows * heads). */
void ref64_merge(const float *out_parts, const float *lse_parts, int n_parts, int64_t n, int d_v, double *out,
                 double *lse);

/* ---- comparison ---------------------------------------------------------------------------- */

struct ref64_diff {
    bool ok;
    const char *rule;  /* which rule said no: "anomaly", "element", "cosine"; "" when ok */
    int64_t n_bad;     /* elements outside the rule */
    int64_t first_bad; /* position, or -1 */
    double got, ref;   /* at first_bad */
    double worst_err;  /* largest |err| over finite elements */
    double worst_part; /* largest |err| / allowed; above 1 is a failure */
    double cosine;     /* 1 - 2 <x,y> / (<x,x> + <y,y>), which also sees a wrong length */
};

/* NaN and infinities at exactly the same positions; then |err| <= abs_tol + rel_tol * |ref|; then the
 * cosine distance (a negative limit leaves it out). */
struct ref64_diff ref64_compare(const float *got, const double *ref, int64_t n, double abs_tol,
                                double rel_tol, double cosine_limit);
struct ref64_diff ref64_compare_out(const float *got, const double *ref,
                                    int64_t n); /* 1e-3, 2.01/128, 5e-6 */
struct ref64_diff ref64_compare_lse(const float *got, const double *ref, int64_t n); /* 1e-6, 8.01/65536 */

/* "element at 12 of 4096: got 1.5, expected 1.25 (3 bad, worst error 0.25)". */
void ref64_diff_text(const struct ref64_diff *diff, int64_t n, char *text, size_t size);

/* n bf16 values to floats. */
void ref64_bf16_to_f32(const uint16_t *bits, float *values, int64_t n);

#endif /* REF64_H */
