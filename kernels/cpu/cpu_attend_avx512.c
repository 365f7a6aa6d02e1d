/* cpu_attend_avx512.c - AVX-512 F, BW, DQ, VL: vectors of 16 floats, 32 registers. Contract: struct cpu_isa
 * in cpu.h. */
#include <immintrin.h>
#include <string.h>

#include "../dsk_number_inline.h"
#include "cpu.h"

#define VL 16
typedef __m512 vec;

/* 24 and 16 sums: more than latency needs, and few loads for each multiply-add. */
#define SCORE_TOKENS_2 12
#define SCORE_TOKENS_1 12
#define ACC_VECS_4     4
#define ACC_VECS_3     4
#define ACC_VECS_2     8
#define ACC_VECS_1     8
#define DOT_TOKENS_4   4
#define DOT_TOKENS_3   4
#define DOT_TOKENS_2   8
#define DOT_TOKENS_1   8

#define v_load(p)      _mm512_loadu_ps(p)
#define v_store(p, x)  _mm512_storeu_ps(p, x)
#define v_set1(x)      _mm512_set1_ps(x)
#define v_zero()       _mm512_setzero_ps()
#define v_add(a, b)    _mm512_add_ps(a, b)
#define v_sub(a, b)    _mm512_sub_ps(a, b)
#define v_mul(a, b)    _mm512_mul_ps(a, b)
#define v_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define v_max(a, b)    _mm512_max_ps(a, b)
#define v_round(x)     _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define v_sum(x)       _mm512_reduce_add_ps(x)

static inline vec v_pow2(vec n)
{
    __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));

    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}

static inline vec v_keep_ge(vec x, vec lim, vec y)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, lim, _CMP_NLT_UQ), y);
}

#include "cpu_attend_simd.h"

/* Half a vector of heads would waste the other half, so it goes to the narrower vectors: same sums, same
 * bits. */
static void scores_512(float *s, const float *q, const float *k, int n_tokens, int d_qk, int n_heads)
{
    if (n_heads <= CPU_LANES / 2)
        dsk_cpu_isa_avx2.scores(s, q, k, n_tokens, d_qk, n_heads);
    else
        scores(s, q, k, n_tokens, d_qk, n_heads);
}

/* ---- dequantisation ---------------------------------------------------------------------- */

/* e4m3 with its sign and magnitude at the right places of an fp16 is the value times 2^-8, subnormals
 * included; the hardware's fp16 conversion does the rest and 2^8 goes into the scale. Exact, and the product
 * is rounded once, as long as scale * 2^8 is finite. fp16 has no NaN where e4m3 has one: *nan_p collects
 * those bytes. */
INLINE void decode_32(float *dst, const uint8_t *src, vec scale, __mmask32 *nan_p)
{
    __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)src);
    __m512i high = _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8);
    __m512i half = _mm512_and_si512(_mm512_srai_epi16(high, 1), _mm512_set1_epi16((short)0xbf80));

    /* 0x3f80 is the magnitude of the NaN code at its fp16 place */
    *nan_p |=
        _mm512_cmpeq_epi16_mask(_mm512_and_si512(half, _mm512_set1_epi16(0x3f80)), _mm512_set1_epi16(0x3f80));
    v_store(dst, v_mul(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), scale));
    v_store(dst + 16, v_mul(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)), scale));
}

/* false: the bytes hold NaN or the scale is beyond what this way gets right; dst is to be computed
 * otherwise. */
INLINE bool decode_scaled(float *dst, const uint8_t *src, int n, float scale)
{
    __mmask32 nan = 0;

    if (!(fabsf(scale) <= 0x1p119f))
        return false;
    for (int i = 0; i < n; i += 32)
        decode_32(dst + i, src + i, v_set1(scale * 256.0f), &nan);
    return nan == 0;
}

INLINE void decode_bf16(float *dst, const uint8_t *src, int n)
{
    for (int i = 0; i < n; i += 16) {
        __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)(src + 2 * i));

        v_store(dst + i, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
    }
}

#include "cpu_dequant.h"
#include "cpu_convert.h"

/* What both sets share. */
#define AVX512_ENTRIES                                                                                       \
    .dequant = dequant, .scores = scores_512, .scores_few = scores_few, .softmax = softmax,                  \
    .accumulate = accumulate, .fold = fold, .quantise = quantise, .round_bf16 = round_bf16,                  \
    .max_bits = max_bits, .store_f32 = store_f32, .store_bf16 = store_bf16

const struct cpu_isa dsk_cpu_isa_avx512 = {
    .name = "avx512",
    .tile_small = CPU_TILE_SMALL,
    .direct = cannot_direct,
    AVX512_ENTRIES,
};

const struct cpu_isa dsk_cpu_isa_avx512_bf16 = {
    .name = "avx512bf16",
    .tile_small = CPU_TILE,
    .direct = dsk_cpu_direct_avx512_bf16,
    AVX512_ENTRIES,
};
