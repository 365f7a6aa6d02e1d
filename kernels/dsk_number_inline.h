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

/* Finite or infinite x; infinities saturate like everything past 448. NaN is the caller's business. */
static inline uint8_t num_e4m3_from_number(float x)
{
    const uint32_t max_bits = 0x43e00000u;    /* 448 */
    const uint32_t normal_bits = 0x3c800000u; /* 2^-6, the smallest normal */
    uint32_t bits = num_bits_from_f32(x);
    uint32_t sign = (bits >> 24) & 0x80u;
    uint32_t mag = bits & 0x7fffffffu;

    mag = mag > max_bits ? max_bits : mag;
    /* Subnormals are multiples of 2^-9, which is the spacing of fp32 at 2^14: the addition rounds. */
    uint32_t low = num_bits_from_f32(num_f32_from_bits(mag) + 16384.0f) - 0x46800000u;
    /* Normals: round the mantissa from 23 to 3 bits, then rebias the exponent from 127 to 7. */
    uint32_t high = ((mag + 0x7ffffu + ((mag >> 20) & 1u)) >> 20) - (120u << 3);
    /* A mask, not a choice: compilers do not vectorise a floating-point addition that they may skip. */
    uint32_t is_low = 0u - (uint32_t)(mag < normal_bits);
    return (uint8_t)(sign | (low & is_low) | (high & ~is_low));
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
