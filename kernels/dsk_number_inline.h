/* dsk_number_inline.h - e4m3fn and bf16 as branch-free code that a compiler can vectorise. Private to
 * kernels/; dsk_number.c exports the same functions under their public names. Pure, any thread.
 * All rounding is to nearest even, in the default rounding mode. */
#ifndef DSK_NUMBER_INLINE_H
#define DSK_NUMBER_INLINE_H

#include <stdint.h>
#include <string.h>

static inline uint32_t num_bits_from_f32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static inline float num_f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* Finite or infinite x; infinities saturate like everything past 448. NaN is the caller's business.
 * A float 2^20 times the size of x's exponent has fp32 spacing 2^-3 of it: adding it rounds x to 3 bits of
 * mantissa, and counts them in its own low bits. Below 2^-6 the spacing stays that of 2^-6, which is how
 * subnormals are spaced. */
static inline uint8_t num_e4m3_from_number(float x)
{
    const uint32_t max_bits = 0x43e00000u;    /* 448 */
    const uint32_t normal_bits = 0x3c800000u; /* 2^-6, the smallest normal */
    uint32_t bits = num_bits_from_f32(x);
    uint32_t sign = (bits >> 24) & 0x80u;
    uint32_t mag = bits & 0x7fffffffu;

    mag = mag > max_bits ? max_bits : mag;
    uint32_t exponent = mag & 0x7f800000u;
    exponent = exponent > normal_bits ? exponent : normal_bits;
    uint32_t big = exponent + (20u << 23);
    uint32_t count = num_bits_from_f32(num_f32_from_bits(mag) + num_f32_from_bits(big)) - big;
    /* exponent rebiased from 127 to 7; the leading one is in count, 0 in a subnormal */
    uint32_t code = (exponent >> 20) - (120u << 3) + count - 8u;
    return (uint8_t)(sign | code);
}

/* Sign and magnitude moved to their fp32 places are the value times 2^-120, subnormals included. */
static inline float num_e4m3_to_f32(uint8_t byte)
{
    uint32_t mag = byte & 0x7fu;
    uint32_t sign = (uint32_t)(byte & 0x80u) << 24;
    float value = num_f32_from_bits(sign | (mag << 20)) * 0x1p120f;

    return mag == 0x7fu ? num_f32_from_bits(sign | 0x7fc00000u) : value;
}

static inline uint16_t num_bf16_from_f32(float x)
{
    uint32_t bits = num_bits_from_f32(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40u;

    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

static inline float num_bf16_to_f32(uint16_t bits)
{
    return num_f32_from_bits((uint32_t)bits << 16);
}

#endif /* DSK_NUMBER_INLINE_H */
