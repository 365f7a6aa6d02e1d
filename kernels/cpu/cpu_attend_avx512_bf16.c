/* cpu_attend_avx512_bf16.c - AVX-512 with BF16 and VBMI: a tile is attended straight from its cache rows.
 * Contract: struct cpu_isa in cpu.h; what is not here is AVX-512's.
 *
 *   scores:  k = bf16(row), exactly: a table takes an e4m3 byte to its bf16, rope is bf16 already
 *            s[t][h] = sum over groups g of scale[t][g] * sum of q[h][d] k[t][d], d in g
 *   output:  o[h][d] = alpha[h] o[h][d] + sum over t of (p[t][h] scale[t][g]) v[t][d]
 *
 * The query is bf16 and so is every unscaled cache value: their products by the bf16 units lose nothing that
 * fp32 would keep, at twice the rate. Weights stay fp32, so the output is fp32 multiply-adds. A tile of decoded
 * values in memory (tried: bf16) costs more than decoding again for each 8 heads.
 * NaN: a NaN code in a row is NaN in the scores' table, so its weight is NaN, and that the output's decoding has no
 * NaN does not matter.
 * The bf16 units take subnormals as 0 and sums of unscaled products can overflow where scaled ones would not;
 * LIMIT_Q and LIMIT_SCALE keep both out of sight, and what is beyond them is left to the other way.
 * Eight sums at a time: 8 heads of one token, 4 heads of two, .. 1 head of eight. Whatever the block, a sum's
 * order is the same. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "cpu.h"

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < (n); i++)
#else
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)
#endif

#define LIMIT_Q     0x6780 /* bf16 of 2^80 */
#define LIMIT_SCALE 0x1p6f /* either way; times 2^120 it is still finite */
#define N_SUMS      8      /* of a block, and heads of the largest */
#define LEAD_ROWS   16     /* rows asked for ahead of the one whose scales are read */

/* bf16 bits of an e4m3 magnitude. From 8 on both are normal numbers and three bits of mantissa just move;
 * below, the value is the code * 2^-9. */
#define BITS_SMALL(c)                                                                                        \
    ((c) >= 4 ? 0x3c00 + ((c)-4) * 32 : (c) >= 2 ? 0x3b80 + ((c)-2) * 64 : (c) == 1 ? 0x3b00 : 0)
#define BITS(c)     ((c) == 127 ? 0x7fc0 : (c) >= 8 ? 0x3c00 + ((c) << 4) : BITS_SMALL(c))
#define LOW(c)      (uint8_t)(BITS(c) & 0xff)
#define HIGH(c)     (uint8_t)(BITS(c) >> 8)
#define ROW4(f, c)  f(c), f((c) + 1), f((c) + 2), f((c) + 3)
#define ROW16(f, c) ROW4(f, c), ROW4(f, (c) + 4), ROW4(f, (c) + 8), ROW4(f, (c) + 12)
#define ROW64(f, c) ROW16(f, c), ROW16(f, (c) + 16), ROW16(f, (c) + 32), ROW16(f, (c) + 48)

static const uint8_t table_low[128] = {ROW64(LOW, 0), ROW64(LOW, 64)};
static const uint8_t table_high[128] = {ROW64(HIGH, 0), ROW64(HIGH, 64)};

/* Dword i of 32 bytes' places: its highest byte is value i, its second one value 16 + i. */
#define PLACE(i)  16 + (i), 16 + (i), (i), (i)
#define PLACE4(i) PLACE(i), PLACE((i) + 1), PLACE((i) + 2), PLACE((i) + 3)

static const uint8_t v_places[64] = {PLACE4(0), PLACE4(4), PLACE4(8), PLACE4(12)};

/* What is the same for a whole tile. weights: p, or p times the scales of one group of columns. */
struct tile {
    const struct cpu_direct *job;
    int n_e4m3;                             /* values of a row that are e4m3; bf16 ones follow */
    int bf16_at;                            /* bytes */
    int n_passes;                           /* over the rows for scores, each for N_SUMS heads */
    _Alignas(64) float scales[CPU_TILE][8]; /* [t][g] */
    _Alignas(64) float weights[CPU_TILE][CPU_LANES];
};

static int count_e4m3(const struct dsk_layout *layout)
{
    if (layout->id == DSK_LAYOUT_RAW_512_64)
        return layout->d_qk;
    return layout->n_groups > 0 ? layout->latent : 0;
}

/* ---- the tile's scales ------------------------------------------------------------------- */

/* Also asks for the rows of the tile. false: one is NaN or beyond the limit. */
static bool load_scales(struct tile *tile)
{
    const struct cpu_direct *job = tile->job;
    const struct dsk_layout *layout = job->layout;
    const __mmask8 groups = (__mmask8)((1u << layout->n_groups) - 1);
    const __m256 raw =
        _mm256_set1_ps(tile->n_e4m3 > layout->latent ? job->raw_scale : 0); /* raw rows use it */
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __mmask8 bad = 0;

    for (int t = 0; t < job->n_tokens && t < LEAD_ROWS; t++)
        dsk_cpu_fetch(job->rows[t], layout->row_bytes);
    for (int t = 0; t < job->n_tokens; t++) {
        __m256 scales = _mm256_mask_loadu_ps(raw, groups, job->rows[t] + layout->latent);

        if (t + LEAD_ROWS < job->n_tokens)
            dsk_cpu_fetch(job->rows[t + LEAD_ROWS], layout->row_bytes);
        _mm256_store_ps(tile->scales[t], scales);
        bad |= _mm256_cmp_ps_mask(_mm256_andnot_ps(sign, scales), _mm256_set1_ps(LIMIT_SCALE), _CMP_NLE_UQ);
    }
    return bad == 0;
}

/* ---- scores ------------------------------------------------------------------------------ */

struct table {
    __m512i low[2];
    __m512i high[2];
};

INLINE struct table load_table(void)
{
    return (struct table){{_mm512_loadu_si512(table_low), _mm512_loadu_si512(table_low + 64)},
                          {_mm512_loadu_si512(table_high), _mm512_loadu_si512(table_high + 64)}};
}

/* 64 e4m3 bytes as bf16, in order. Interleaving works within quarters of a vector, so eights of bytes change places
 * first. */
INLINE void decode_k(const struct table *table, const uint8_t *src, __m512i *k)
{
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i bytes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(src));
    __m512i low = _mm512_permutex2var_epi8(table->low[0], bytes, table->low[1]);
    __m512i high = _mm512_permutex2var_epi8(table->high[0], bytes, table->high[1]);

    /* high | (bytes & 0x80) */
    high = _mm512_ternarylogic_epi64(high, bytes, _mm512_set1_epi8((char)0x80), 0xf8);
    k[0] = _mm512_unpacklo_epi8(low, high);
    k[1] = _mm512_unpackhi_epi8(low, high);
}

INLINE __m512 dot(__m512 sum, const uint16_t *q, __m512i k)
{
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(q), (__m512bh)k);
}

/* Sums of the lanes of eight vectors. */
INLINE __m256 sum_8(const __m512 *x)
{
    __m512 pairs[4], fours[2];

    EACH (i, 4)
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]),
                                 _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    EACH (i, 2) {
        __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);

        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    /* Each quarter of fours[i] has a part of the sums 4 i .. 4 i + 3. */
    __m512 half = _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88),
                                _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
    half = _mm512_add_ps(_mm512_shuffle_f32x4(half, half, 0x08), _mm512_shuffle_f32x4(half, half, 0x0d));
    return _mm512_castps512_ps256(half);
}

/* n_t tokens from t0 on, n_h heads, n_t * n_h == N_SUMS. Past the last token the last one is repeated. */
INLINE void score_block(const struct tile *tile, float *s, const uint16_t *q, int t0, const int n_t,
                        const int n_h)
{
    const struct cpu_direct *job = tile->job;
    const struct table table = load_table();
    const int d_qk = job->layout->d_qk;
    const uint8_t *rows[N_SUMS];
    const float *scales[N_SUMS];
    __m512 total[N_SUMS];

    EACH (t, n_t) {
        int at = t0 + t < job->n_tokens ? t0 + t : job->n_tokens - 1;

        rows[t] = job->rows[at];
        scales[t] = tile->scales[at];
        EACH (h, n_h)
            total[t * n_h + h] = _mm512_setzero_ps();
    }
    for (int d = 0; d < tile->n_e4m3; d += DSK_GROUP_VALUES) {
        __m512 part[N_SUMS];
        int end = d + DSK_GROUP_VALUES < tile->n_e4m3 ? d + DSK_GROUP_VALUES : tile->n_e4m3;

        EACH (i, N_SUMS)
            part[i] = _mm512_setzero_ps();
        for (int c = d; c < end; c += 64) {
            EACH (t, n_t) {
                __m512i k[2];

                decode_k(&table, rows[t] + c, k);
                EACH (h, n_h) {
                    part[t * n_h + h] = dot(part[t * n_h + h], q + h * d_qk + c, k[0]);
                    part[t * n_h + h] = dot(part[t * n_h + h], q + h * d_qk + c + 32, k[1]);
                }
            }
        }
        EACH (t, n_t) {
            __m512 scale = _mm512_set1_ps(scales[t][d / DSK_GROUP_VALUES]);

            EACH (h, n_h)
                total[t * n_h + h] = _mm512_fmadd_ps(part[t * n_h + h], scale, total[t * n_h + h]);
        }
    }
    for (int d = tile->n_e4m3; d < d_qk; d += 32) {
        EACH (t, n_t) {
            __m512i k = _mm512_loadu_si512(rows[t] + tile->bf16_at + 2 * (d - tile->n_e4m3));

            EACH (h, n_h)
                total[t * n_h + h] = dot(total[t * n_h + h], q + h * d_qk + d, k);
        }
    }
    float sums[N_SUMS];
    _mm256_storeu_ps(sums, sum_8(total));
    for (int t = 0; t < n_t && t0 + t < job->n_tokens; t++)
        memcpy(s + (t0 + t) * CPU_LANES, sums + t * n_h, sizeof(*s) * (size_t)n_h);
}

/* Each pass asks for its share of the rows after this tile: memory is then read all the time. */
INLINE void score_heads(const struct tile *tile, float *s, const uint16_t *q, int i_pass, const int n_h)
{
    const struct cpu_direct *job = tile->job;
    const int n_t = N_SUMS / n_h;

    for (int t = 0; t < job->n_tokens; t += n_t) {
        for (int i = t; i < t + n_t && i < job->n_ahead; i++) {
            if (i % tile->n_passes == i_pass)
                dsk_cpu_fetch(job->rows[job->n_tokens + i], job->layout->row_bytes);
        }
        score_block(tile, s, q, t, n_t, n_h);
    }
}

static void direct_scores(const struct tile *tile, int head, int n_heads)
{
    float *s = tile->job->scores + head / CPU_LANES * CPU_TILE * CPU_LANES + head % CPU_LANES;
    const uint16_t *q = tile->job->q + head * tile->job->layout->d_qk;

    if (n_heads > 4)
        score_heads(tile, s, q, head / N_SUMS, 8);
    else if (n_heads > 2)
        score_heads(tile, s, q, head / N_SUMS, 4);
    else if (n_heads == 2)
        score_heads(tile, s, q, head / N_SUMS, 2);
    else
        score_heads(tile, s, q, head / N_SUMS, 1);
}

/* ---- output ------------------------------------------------------------------------------ */

/* 32 values of a row as fp32, in order; e4m3 times 2^-120: sign and magnitude at their fp32 places. */
INLINE void load_v(const uint8_t *src, const bool is_e4m3, __m512 *v)
{
    if (is_e4m3) {
        const __m512i mask = _mm512_set1_epi32((int)0x87f00000u);
        __m512i bytes = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)src));
        __m512i x = _mm512_srai_epi16(_mm512_permutexvar_epi8(_mm512_loadu_si512(v_places), bytes), 4);

        v[0] = _mm512_castsi512_ps(_mm512_and_si512(x, mask));
        v[1] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(x, 16), mask));
        return;
    }
    EACH (j, 2) {
        __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)(src + 32 * j));

        v[j] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
}

/* Columns [d, d + 16 n_j) of n_h heads. */
INLINE void acc_block(const struct tile *tile, const float *p, float *o, const float *alpha, int d,
                      const bool is_e4m3, const int n_h, const int n_j)
{
    const struct cpu_direct *job = tile->job;
    const int d_v = job->layout->d_v;
    __m512 sum[8][8];

    EACH (h, n_h) {
        EACH (j, n_j)
            sum[h][j] = job->is_first ? _mm512_setzero_ps()
                                      : _mm512_mul_ps(_mm512_set1_ps(alpha[h]),
                                                      _mm512_loadu_ps(o + h * d_v + d + 16 * j));
    }
    for (int t = 0; t < job->n_tokens; t++) {
        const uint8_t *row = job->rows[t] + (is_e4m3 ? d : 2 * d);
        __m512 v[8];

        EACH (j, n_j / 2)
            load_v(row + (is_e4m3 ? 32 : 64) * j, is_e4m3, v + 2 * j);
        EACH (h, n_h) {
            __m512 x = _mm512_set1_ps(p[t * CPU_LANES + h]);

            EACH (j, n_j)
                sum[h][j] = _mm512_fmadd_ps(x, v[j], sum[h][j]);
        }
    }
    EACH (h, n_h) {
        EACH (j, n_j)
            _mm512_storeu_ps(o + h * d_v + d + 16 * j, sum[h][j]);
    }
}

/* 128 columns from d0 on. */
INLINE void acc_heads(const struct tile *tile, const float *p, float *o, const float *alpha, int d0,
                      const bool is_e4m3, const int n_h, const int n_j)
{
    for (int d = d0; d < d0 + DSK_GROUP_VALUES; d += 16 * n_j)
        acc_block(tile, p, o, alpha, d, is_e4m3, n_h, n_j);
}

INLINE void acc_group(const struct tile *tile, const float *p, int head, int n_heads, int d0,
                      const bool is_e4m3)
{
    float *o = tile->job->o + head * tile->job->layout->d_v;
    const float *alpha = tile->job->alpha + head;

    if (n_heads > 4)
        acc_heads(tile, p, o, alpha, d0, is_e4m3, 8, 2);
    else if (n_heads > 2)
        acc_heads(tile, p, o, alpha, d0, is_e4m3, 4, 4);
    else if (n_heads == 2)
        acc_heads(tile, p, o, alpha, d0, is_e4m3, 2, 4);
    else
        acc_heads(tile, p, o, alpha, d0, is_e4m3, 1, 8);
}

/* All columns of a block of 16 heads. */
static void direct_output(struct tile *tile, int head0, int n_heads)
{
    const struct cpu_direct *job = tile->job;
    const float *p = job->scores + head0 * CPU_TILE;
    const bool is_e4m3 = tile->n_e4m3 > 0;

    for (int d0 = 0; d0 < job->layout->d_v; d0 += DSK_GROUP_VALUES) {
        for (int t = 0; is_e4m3 && t < job->n_tokens; t++) {
            __m512 scale = _mm512_set1_ps(tile->scales[t][d0 / DSK_GROUP_VALUES] * 0x1p120f);

            _mm512_store_ps(tile->weights[t], _mm512_mul_ps(_mm512_loadu_ps(p + t * CPU_LANES), scale));
        }
        for (int h = 0; h < n_heads; h += N_SUMS) {
            if (is_e4m3)
                acc_group(tile, &tile->weights[0][h], head0 + h, n_heads - h, d0, true);
            else
                acc_group(tile, p + h, head0 + h, n_heads - h, d0, false);
        }
    }
}

/* ---- the tile ---------------------------------------------------------------------------- */

/* All heads of the block from head0 on, at most 16. */
static void direct_block(struct tile *tile, int head0, int n_heads)
{
    const struct cpu_direct *job = tile->job;

    for (int h = 0; h < n_heads; h += N_SUMS)
        direct_scores(tile, head0 + h, n_heads - h);
    dsk_cpu_isa_avx512.softmax(job->scores + head0 * CPU_TILE, job->m + head0, job->l + head0,
                               job->alpha + head0, job->softmax_scale, job->n_tokens, n_heads);
    direct_output(tile, head0, n_heads);
}

uint32_t dsk_cpu_direct_avx512_bf16(const struct cpu_direct *job)
{
    const struct dsk_layout *layout = job->layout;
    struct tile tile; /* what is read of it is written first */
    uint32_t done = 0;

    tile.job = job;
    tile.n_passes = (job->n_heads + N_SUMS - 1) / N_SUMS;
    tile.n_e4m3 = count_e4m3(layout);
    tile.bf16_at = tile.n_e4m3 + (int)sizeof(float) * layout->n_groups;
    if (!load_scales(&tile))
        return 0;
    for (int head0 = 0; head0 < job->n_heads; head0 += CPU_LANES) {
        if (job->q_max[head0 / CPU_LANES] > LIMIT_Q)
            continue;
        direct_block(&tile, head0, job->n_heads - head0 < CPU_LANES ? job->n_heads - head0 : CPU_LANES);
        done |= 1u << (head0 / CPU_LANES);
    }
    return done;
}
