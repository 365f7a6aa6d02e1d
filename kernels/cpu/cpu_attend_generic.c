/* cpu_attend_generic.c - the portable instruction set: vectors of 4 floats in the compilers' own vector
 * notation, which becomes SSE2, NEON or plain code. Its dequant also serves the others for rows that their
 * fast way cannot take. Contract: struct cpu_isa in cpu.h. */
#include <string.h>

#include "../dsk_number_inline.h"
#include "cpu.h"

#define VL 4
typedef float vec __attribute__((vector_size(16)));
typedef int32_t veci __attribute__((vector_size(16)));
typedef uint32_t vecu __attribute__((vector_size(16)));

#define SCORE_TOKENS_2 4
#define SCORE_TOKENS_1 4
#define ACC_VECS_4     2
#define ACC_VECS_3     2
#define ACC_VECS_2     4
#define ACC_VECS_1     4
#define DOT_TOKENS_4   2
#define DOT_TOKENS_3   2
#define DOT_TOKENS_2   4
#define DOT_TOKENS_1   4

#define v_set1(x)      ((vec){(x), (x), (x), (x)})
#define v_zero()       ((vec){0, 0, 0, 0})
#define v_add(a, b)    ((a) + (b))
#define v_sub(a, b)    ((a) - (b))
#define v_mul(a, b)    ((a) * (b))
#define v_fma(a, b, c) ((a) * (b) + (c))

static inline vec v_load(const float *p)
{
    vec x;

    memcpy(&x, p, sizeof(x));
    return x;
}

static inline void v_store(float *p, vec x)
{
    memcpy(p, &x, sizeof(x));
}

static inline vec v_max(vec a, vec b)
{
    veci is_a = a > b;

    return (vec)((is_a & (veci)a) | (~is_a & (veci)b));
}

static inline vec v_keep_ge(vec x, vec lim, vec y)
{
    return (vec)(~(x < lim) & (veci)y);
}

/* 1.5 * 2^23: floats of this size are whole numbers, so adding it rounds, to even, and leaves the integer in
 * the low bits. For |x| < 2^22. */
#define WHOLE 12582912.0f

static inline vec v_round(vec x)
{
    return (x + v_set1(WHOLE)) - v_set1(WHOLE);
}

/* The bits of WHOLE end in 22 zeros, so the shift leaves n + 127 as the exponent. */
static inline vec v_pow2(vec n)
{
    return (vec)(((vecu)(n + v_set1(WHOLE)) + 127u) << 23);
}

static inline float v_sum(vec x)
{
    return (x[0] + x[2]) + (x[1] + x[3]);
}

#include "cpu_attend_simd.h"
#include "cpu_convert.h"

static void decode_scaled(float *dst, const uint8_t *src, int n, float scale)
{
    for (int i = 0; i < n; i++)
        dst[i] = num_e4m3_to_f32(src[i]) * scale;
}

static void decode_bf16(float *dst, const uint8_t *src, int n)
{
    for (int i = 0; i < n; i++) {
        uint16_t bits;

        memcpy(&bits, src + 2 * i, sizeof(bits));
        dst[i] = num_bf16_to_f32(bits);
    }
}

static void dequant(const struct dsk_layout *layout, float raw_scale, const uint8_t *row, float *dst)
{
    const uint8_t *scales = row + layout->latent;

    if (layout->id == DSK_LAYOUT_RAW_512_64) {
        decode_scaled(dst, row, layout->d_qk, raw_scale);
        return;
    }
    if (layout->n_groups == 0) {
        decode_bf16(dst, row, layout->d_qk);
        return;
    }
    for (int g = 0; g < layout->n_groups; g++) {
        float scale;

        memcpy(&scale, scales + sizeof(scale) * (size_t)g, sizeof(scale));
        decode_scaled(dst + g * DSK_GROUP_VALUES, row + g * DSK_GROUP_VALUES, DSK_GROUP_VALUES, scale);
    }
    decode_bf16(dst + layout->latent, scales + sizeof(float) * (size_t)layout->n_groups, layout->rope);
}

const struct cpu_isa dsk_cpu_isa_generic = {
    .name = "generic",
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
