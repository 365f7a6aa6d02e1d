// number.cuh - e4m3fn and bf16 on the device, bit for bit what dsk_number_inline.h computes. Hardware conversions
// from sm_89 on, the same integer steps before.
#ifndef KERNELS_CUDA_NUMBER_CUH
#define KERNELS_CUDA_NUMBER_CUH

#include <stdint.h>

#define DEV static __device__ __forceinline__

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define HAS_E4M3 1
#else
#define HAS_E4M3 0
#endif

DEV float bf16_to_f32(uint32_t bits)
{
    return __uint_as_float(bits << 16);
}

// Two bf16 in a word, low half first; NaN becomes the canonical one.
DEV uint32_t pack_bf16(float lo, float hi)
{
    uint32_t word;

    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(hi), "f"(lo));
    return word;
}

// Finite or infinite x, as num_e4m3_from_number.
DEV uint32_t e4m3_from_number(float x)
{
    uint32_t bits = __float_as_uint(x), sign = (bits >> 24) & 0x80u;
    uint32_t mag = min(bits & 0x7fffffffu, 0x43e00000u); // 448
    uint32_t exponent = max(mag & 0x7f800000u, 0x3c800000u); // at least that of 2^-6, the smallest normal
    uint32_t big = exponent + (20u << 23);
    uint32_t count = __float_as_uint(__fadd_rn(__uint_as_float(mag), __uint_as_float(big))) - big;

    return sign | ((exponent >> 20) - (120u << 3) + count - 8u);
}

// Four values to four bytes, lowest first.
DEV uint32_t pack_e4m3(float a, float b, float c, float d)
{
#if HAS_E4M3
    uint32_t word;

    asm("{.reg .b16 x, y;\n"
        "cvt.rn.satfinite.e4m3x2.f32 x, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 y, %4, %3;\n"
        "mov.b32 %0, {x, y};}"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
#else
    return e4m3_from_number(a) | e4m3_from_number(b) << 8 | e4m3_from_number(c) << 16 | e4m3_from_number(d) << 24;
#endif
}

DEV float e4m3_to_f32(uint32_t byte)
{
    uint32_t sign = (byte & 0x80u) << 24, mag = byte & 0x7fu;

    return mag == 0x7fu ? __uint_as_float(sign | 0x7fc00000u) : __uint_as_float(sign | mag << 20) * 0x1p120f;
}

// Four bytes to four floats. e4m3 is exact in f16.
DEV void unpack_e4m3(uint32_t word, float v[4])
{
#if HAS_E4M3
    asm("{.reg .b16 x, y, a, b;\n.reg .b32 p, q;\n"
        "mov.b32 {x, y}, %4;\n"
        "cvt.rn.f16x2.e4m3x2 p, x;\n"
        "cvt.rn.f16x2.e4m3x2 q, y;\n"
        "mov.b32 {a, b}, p;\n cvt.f32.f16 %0, a;\n cvt.f32.f16 %1, b;\n"
        "mov.b32 {a, b}, q;\n cvt.f32.f16 %2, a;\n cvt.f32.f16 %3, b;}"
        : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
        : "r"(word));
#else
    for (int i = 0; i < 4; i++)
        v[i] = e4m3_to_f32(word >> (8 * i) & 0xffu);
#endif
}

// First thing in a kernel that is launched as dependent: it may have started while the one before it still drains. The
// next one may then do the same.
DEV void wait_for_stream()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}

#endif // KERNELS_CUDA_NUMBER_CUH
