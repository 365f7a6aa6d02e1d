/* cpu_attend_simd.h - the attention kernels in terms of one vector type. An instruction set's file defines
 * the type and its operations, then includes this and fills its struct cpu_isa with what is here.
 *
 *   vec, VL                       vector of VL floats; VL divides CPU_LANES
 *   v_load v_store v_set1 v_zero v_add v_sub v_mul v_fma(a, b, c) = a * b + c
 *   v_max(a, b)                   b where either is NaN
 *   v_round, v_pow2(n)            nearest integer; 2^n for integral n in [-126, 0]
 *   v_keep_ge(x, lim, y)          y where !(x < lim), else 0 (so NaN keeps y)
 *   v_sum                         sum of the lanes
 *   SCORE_TOKENS_2, ..._1         tokens per block for 2 and 1 vectors of heads: registers are for their
 *   product ACC_VECS_4 .. ACC_VECS_1      column vectors per block for 4..1 heads
 *   DOT_TOKENS_4 .. DOT_TOKENS_1  tokens per block for 4..1 heads
 *
 * Blocks are always_inline functions with constant bounds: the compiler unrolls them and keeps `sum` in
 * registers. Block sizes change which sums are computed together, never the order of a sum. */
#include <math.h>
#include <stddef.h>

#include "cpu.h"

#define INLINE static inline __attribute__((always_inline))
/* Loop i over a constant count, unrolled. */
#if defined(__clang__)
#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < (n); i++)
#else
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)
#endif

/* Vector j of the heads: where it lies in a packed query and in the scores. */
INLINE size_t q_offset(int j, int d_qk)
{
    return (size_t)(j * VL / CPU_LANES) * (size_t)d_qk * CPU_LANES + (size_t)(j * VL % CPU_LANES);
}

INLINE size_t s_offset(int j)
{
    return (size_t)(j * VL / CPU_LANES) * CPU_TILE * CPU_LANES + (size_t)(j * VL % CPU_LANES);
}

/* ---- scores: tokens x heads, along d ----------------------------------------------------- */

struct score_block {
    float *s;       /* first token, first vector */
    const float *q; /* first d, first vector */
    const float *k; /* first token, first d */
    size_t s_step;  /* between vectors */
    size_t q_step;
    int pitch;
    int n_d;
    bool is_first; /* of the d blocks: scores are written, not added to */
};

INLINE void score_tokens(const struct score_block *b, int t0, const int n_t, const int n_j)
{
    const float *k = b->k + (ptrdiff_t)t0 * b->pitch;
    float *s = b->s + (ptrdiff_t)t0 * CPU_LANES;
    vec sum[12][2];

    EACH (t, n_t) {
        EACH (j, n_j)
            sum[t][j] = v_zero();
    }
    for (int d = 0; d < b->n_d; d++) {
        vec q[2];

        EACH (j, n_j)
            q[j] = v_load(b->q + (size_t)j * b->q_step + (size_t)d * CPU_LANES);
        EACH (t, n_t) {
            vec x = v_set1(k[(ptrdiff_t)t * b->pitch + d]);

            EACH (j, n_j)
                sum[t][j] = v_fma(x, q[j], sum[t][j]);
        }
    }
    EACH (t, n_t) {
        EACH (j, n_j) {
            float *at = s + t * CPU_LANES + (size_t)j * b->s_step;

            v_store(at, b->is_first ? sum[t][j] : v_add(v_load(at), sum[t][j]));
        }
    }
}

INLINE void score_tile(const struct score_block *b, int n_tokens, const int n_t, const int n_j)
{
    int t = 0;

    for (; t + n_t <= n_tokens; t += n_t)
        score_tokens(b, t, n_t, n_j);
    for (; t + 4 <= n_tokens; t += 4)
        score_tokens(b, t, 4, n_j);
    for (; t < n_tokens; t++)
        score_tokens(b, t, 1, n_j);
}

/* Along d in blocks of 128: the query's block stays in the first-level cache for all tokens, and the sums
 * are short, which keeps their rounding error down. */
static void scores(float *scores, const float *q, const float *k, int n_tokens, int d_qk, int n_heads)
{
    const int n_vecs = (n_heads + VL - 1) / VL;

    for (int j = 0; j < n_vecs; j += 2) {
        for (int d = 0; d < d_qk; d += DSK_GROUP_VALUES) {
            struct score_block b = {
                .s = scores + s_offset(j),
                .q = q + q_offset(j, d_qk) + (size_t)d * CPU_LANES,
                .k = k + d,
                .s_step = s_offset(j + 1) - s_offset(j),
                .q_step = q_offset(j + 1, d_qk) - q_offset(j, d_qk),
                .pitch = dsk_cpu_k_pitch(d_qk),
                .n_d = d + DSK_GROUP_VALUES < d_qk ? DSK_GROUP_VALUES : d_qk - d,
                .is_first = d == 0,
            };

            if (j + 1 < n_vecs)
                score_tile(&b, n_tokens, SCORE_TOKENS_2, 2);
            else
                score_tile(&b, n_tokens, SCORE_TOKENS_1, 1);
        }
    }
}

/* ---- scores for few heads: dot products along the row ------------------------------------ */

INLINE void dot_tokens(float *s, const float *q, const float *k, int d_qk, const int n_t, const int n_h)
{
    const int pitch = dsk_cpu_k_pitch(d_qk);
    vec sum[8][4];

    EACH (t, n_t) {
        EACH (h, n_h)
            sum[t][h] = v_zero();
    }
    for (int d = 0; d < d_qk; d += VL) {
        vec x[4];

        EACH (h, n_h)
            x[h] = v_load(q + h * d_qk + d);
        EACH (t, n_t) {
            vec y = v_load(k + t * pitch + d);

            EACH (h, n_h)
                sum[t][h] = v_fma(x[h], y, sum[t][h]);
        }
    }
    EACH (t, n_t) {
        EACH (h, n_h)
            s[t * CPU_LANES + h] = v_sum(sum[t][h]);
    }
}

INLINE void dot_tile(float *s, const float *q, const float *k, int n_tokens, int d_qk, const int n_t,
                     const int n_h)
{
    const int pitch = dsk_cpu_k_pitch(d_qk);
    int t = 0;

    for (; t + n_t <= n_tokens; t += n_t)
        dot_tokens(s + t * CPU_LANES, q, k + t * pitch, d_qk, n_t, n_h);
    for (; t < n_tokens; t++)
        dot_tokens(s + t * CPU_LANES, q, k + t * pitch, d_qk, 1, n_h);
}

static void scores_few(float *scores, const float *q, const float *k, int n_tokens, int d_qk, int n_heads)
{
    int h = 0;

    for (; h + 4 <= n_heads; h += 4)
        dot_tile(scores + h, q + h * d_qk, k, n_tokens, d_qk, DOT_TOKENS_4, 4);
    if (n_heads - h == 3)
        dot_tile(scores + h, q + h * d_qk, k, n_tokens, d_qk, DOT_TOKENS_3, 3);
    else if (n_heads - h == 2)
        dot_tile(scores + h, q + h * d_qk, k, n_tokens, d_qk, DOT_TOKENS_2, 2);
    else if (n_heads - h == 1)
        dot_tile(scores + h, q + h * d_qk, k, n_tokens, d_qk, DOT_TOKENS_1, 1);
}

/* ---- softmax ----------------------------------------------------------------------------- */

/* e^x for x <= 0, within 2 units in the last place; 0 below 2^-126; NaN stays NaN. */
INLINE vec v_exp(vec x)
{
    const float lowest = -87.33654f; /* ln 2^-126 */
    vec y = v_max(v_set1(lowest), x);
    vec n = v_round(v_mul(y, v_set1(1.44269504f)));
    /* ln 2 in two parts, so that n ln 2 loses nothing */
    vec r = v_fma(n, v_set1(-0.693359375f), y);
    vec p = v_set1(1.9875691500e-4f);

    r = v_fma(n, v_set1(2.12194440e-4f), r);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_fma(v_mul(p, r), r, r);
    p = v_add(p, v_set1(1.0f));
    return v_keep_ge(x, v_set1(lowest), v_mul(p, v_pow2(n)));
}

/* One vector of heads. A NaN score makes its own head's weights NaN and leaves the maximum alone. */
INLINE void softmax_vec(float *s, float *m, float *l, float *alpha, float scale, int n_tokens)
{
    vec old = v_load(m);
    vec max = old;
    vec sum = v_zero();

    for (int t = 0; t < n_tokens; t++) {
        vec x = v_mul(v_load(s + t * CPU_LANES), v_set1(scale));

        v_store(s + t * CPU_LANES, x);
        max = v_max(x, max);
    }
    /* All scores so far -inf: measured against 0 their weights are 0, against -inf they would be NaN. */
    vec base = v_keep_ge(max, v_set1(-__FLT_MAX__), max);
    for (int t = 0; t < n_tokens; t++) {
        vec p = v_exp(v_sub(v_load(s + t * CPU_LANES), base));

        v_store(s + t * CPU_LANES, p);
        sum = v_add(sum, p);
    }
    vec a = v_exp(v_sub(old, base));
    v_store(alpha, a);
    v_store(l, v_fma(a, v_load(l), sum));
    v_store(m, max);
}

static void softmax(float *scores, float *m, float *l, float *alpha, float scale, int n_tokens, int n_heads)
{
    for (int j = 0; j * VL < n_heads; j++)
        softmax_vec(scores + s_offset(j), m + j * VL, l + j * VL, alpha + j * VL, scale, n_tokens);
}

/* ---- output: heads x columns, along the tokens ------------------------------------------- */

struct acc_block {
    float *o;           /* first head */
    const float *p;     /* first token, first head */
    const float *v;     /* first token */
    const float *alpha; /* first head, or NULL */
    int n_tokens;
    int pitch;
    int d_v;
};

INLINE void acc_columns(const struct acc_block *b, int d, const int n_h, const int n_j)
{
    vec sum[4][8];

    EACH (h, n_h) {
        EACH (j, n_j) {
            const float *o = b->o + h * b->d_v + d + j * VL;

            sum[h][j] = b->alpha == NULL ? v_zero() : v_mul(v_set1(b->alpha[h]), v_load(o));
        }
    }
    for (int t = 0; t < b->n_tokens; t++) {
        const float *v = b->v + (ptrdiff_t)t * b->pitch + d;
        vec y[8];

        EACH (j, n_j)
            y[j] = v_load(v + j * VL);
        EACH (h, n_h) {
            vec x = v_set1(b->p[t * CPU_LANES + h]);

            EACH (j, n_j)
                sum[h][j] = v_fma(x, y[j], sum[h][j]);
        }
    }
    EACH (h, n_h) {
        EACH (j, n_j)
            v_store(b->o + h * b->d_v + d + j * VL, sum[h][j]);
    }
}

/* Heads h..h+n_h of one block, all columns of [d, d + n_j * VL). */
INLINE struct acc_block acc_heads(const struct acc_block *all, int h)
{
    struct acc_block b = *all;

    b.o += h * b.d_v;
    b.p += (h / CPU_LANES) * CPU_LANES * CPU_TILE + h % CPU_LANES;
    b.alpha = b.alpha == NULL ? NULL : b.alpha + h;
    return b;
}

/* All columns for n_h heads from h on, n_h <= 3. */
INLINE void acc_rest(const struct acc_block *all, int h, const int n_h, const int n_j)
{
    struct acc_block b = acc_heads(all, h);
    int d = 0;

    for (; d + n_j * VL <= b.d_v; d += n_j * VL)
        acc_columns(&b, d, n_h, n_j);
    for (; d < b.d_v; d += VL)
        acc_columns(&b, d, n_h, 1);
}

/* Columns outside, heads inside: a column block of V is read from the second-level cache once and serves all
 * heads. */
INLINE void acc_fours(const struct acc_block *all, int n_heads, int d, const int n_j)
{
    for (int h = 0; h + 4 <= n_heads; h += 4) {
        struct acc_block b = acc_heads(all, h);

        acc_columns(&b, d, 4, n_j);
    }
}

static void accumulate(float *o, const float *scores, const float *v, const float *alpha, int n_tokens,
                       int pitch, int d_v, int n_heads)
{
    const struct acc_block all = {o, scores, v, alpha, n_tokens, pitch, d_v};
    const int n_fours = n_heads / 4 * 4;
    int d = 0;

    for (; d + ACC_VECS_4 * VL <= d_v; d += ACC_VECS_4 * VL)
        acc_fours(&all, n_heads, d, ACC_VECS_4);
    for (; d < d_v; d += VL)
        acc_fours(&all, n_heads, d, 1);
    if (n_heads - n_fours == 3)
        acc_rest(&all, n_fours, 3, ACC_VECS_3);
    else if (n_heads - n_fours == 2)
        acc_rest(&all, n_fours, 2, ACC_VECS_2);
    else if (n_heads - n_fours == 1)
        acc_rest(&all, n_fours, 1, ACC_VECS_1);
}

static void fold(float *o, const float *part, float a, float b, int n)
{
    for (int i = 0; i < n; i += VL)
        v_store(o + i, v_fma(v_set1(a), v_load(o + i), v_mul(v_set1(b), v_load(part + i))));
}

static uint32_t cannot_direct(const struct cpu_direct *job)
{
    (void)job;
    return 0;
}
