/* cpu_attend_avx2.c - AVX2 + FMA + F16C: vectors of 8 floats, 16 registers. Contract: struct cpu_isa in
 * cpu.h. */
#include <immintrin.h>
#include <string.h>

#include "../dsk_number_inline.h"
#include "cpu.h"

#define VL 8
typedef __m256 vec;

/* Sums, shared operands and a broadcast must fit 16 registers; 12 + 3 + 1 does, but clang then spills. */
#define SCORE_TOKENS_2 6
#define SCORE_TOKENS_1 12
#define ACC_VECS_4     2
#define ACC_VECS_3     3
#define ACC_VECS_2     4
#define ACC_VECS_1     8
#define DOT_TOKENS_4   2
#define DOT_TOKENS_3   2
#define DOT_TOKENS_2   4
#define DOT_TOKENS_1   8

#define v_load(p)      _mm256_loadu_ps(p)
#define v_store(p, x)  _mm256_storeu_ps(p, x)
#define v_set1(x)      _mm256_set1_ps(x)
#define v_zero()       _mm256_setzero_ps()
#define v_add(a, b)    _mm256_add_ps(a, b)
#define v_sub(a, b)    _mm256_sub_ps(a, b)
#define v_mul(a, b)    _mm256_mul_ps(a, b)
#define v_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define v_max(a, b)    _mm256_max_ps(a, b)
#define v_round(x)     _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

static inline vec v_pow2(vec n)
{
    __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));

    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}

static inline vec v_keep_ge(vec x, vec lim, vec y)
{
    return _mm256_and_ps(_mm256_cmp_ps(x, lim, _CMP_NLT_UQ), y);
}

static inline float v_sum(vec x)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));

    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    s = _mm_add_ss(s, _mm_movehdup_ps(s));
    return _mm_cvtss_f32(s);
}

#include "cpu_attend_simd.h"

/* ---- dequantisation ---------------------------------------------------------------------- */

/* e4m3 with its sign and magnitude at the right places of an fp16 is the value times 2^-8, subnormals
 * included; the hardware's fp16 conversion does the rest and 2^8 goes into the scale. Exact, and the product
 * is rounded once, as long as scale * 2^8 is finite. fp16 has no NaN where e4m3 has one: *nan_p collects
 * those bytes. */
INLINE void decode_16(float *dst, const uint8_t *src, vec scale, __m128i *nan_p)
{
    const __m128i nan_code = _mm_set1_epi8(0x7f);
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)src);
    __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
    __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbf80));

    *nan_p = _mm_or_si128(*nan_p, _mm_cmpeq_epi8(_mm_and_si128(bytes, nan_code), nan_code));
    v_store(dst, v_mul(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), scale));
    v_store(dst + 8, v_mul(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), scale));
}

/* false: the bytes hold NaN or the scale is beyond what this way gets right; dst is to be computed
 * otherwise. */
INLINE bool decode_scaled(float *dst, const uint8_t *src, int n, float scale)
{
    __m128i nan = _mm_setzero_si128();

    if (!(fabsf(scale) <= 0x1p119f))
        return false;
    for (int i = 0; i < n; i += 16)
        decode_16(dst + i, src + i, v_set1(scale * 256.0f), &nan);
    return _mm_testz_si128(nan, nan) != 0;
}

INLINE void decode_bf16(float *dst, const uint8_t *src, int n)
{
    for (int i = 0; i < n; i += 8) {
        __m128i bits = _mm_loadu_si128((const __m128i *)(const void *)(src + 2 * i));

        v_store(dst + i, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
    }
}

#include "cpu_dequant.h"
#include "cpu_convert.h"

const struct cpu_isa dsk_cpu_isa_avx2 = {
    .name = "avx2",
    .tile_small = CPU_TILE_SMALL,
    .direct = cannot_direct,
    .dequant = dequant,
    .scores = scores,
    .scores_few = scores_few,
    .softmax = softmax,
    .accumulate = accumulate,
    .fold = fold,
    .quantise = quantise,
    .round_bf16 = round_bf16,
    .max_bits = max_bits,
    .store_f32 = store_f32,
    .store_bf16 = store_bf16,
};
