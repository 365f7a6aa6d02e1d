// probes.cpp - small kernels that show what the emulator does, and broken ones that it must catch.
#include "kernels/hip/device.hiph"
#include "probes.h"

typedef uint16_t u16x4 __attribute__((vector_size(8)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef float f32x16 __attribute__((vector_size(64)));

static uint32_t *at(uint64_t address)
{
    return (uint32_t *)address;
}

// out[9][64]: one exchange each
KERNEL(64, 1, probe_exchanges, probe_args, args)
{
    const uint32_t x = at(args.in)[thread_x()];
    uint32_t *out = at(args.out) + thread_x();

    out[0 * 64] = from_lane(x, (thread_x() * 7 + 3) & 63);
    out[1 * 64] = from_xor<1>(x);
    out[2 * 64] = from_xor<16>(x);
    out[3 * 64] = bits_of(from_other_half(float_of(x)));
    out[4 * 64] = sum_of_half(x);
    out[5 * 64] = max_of_row(x);
    out[6 * 64] = (uint32_t)broadcast64(x, 9);
    out[7 * 64] = (uint32_t)__builtin_amdgcn_ballot_w64((x & 1) != 0);
    out[8 * 64] = (uint32_t)__builtin_amdgcn_update_dpp(77, (int)x, 0x111, 0xf, 0xf, false); // row_shr:1
}

// Each thread's word by way of LDS, from the thread across the block.
KERNEL(256, 1, probe_shared, probe_args, args)
{
    SHARED_BYTES(place, 1024);
    uint32_t *words = (uint32_t *)place;

    words[thread_x()] = at(args.in)[block_x() * 256 + thread_x()];
    block_sync();
    at(args.out)[block_x() * 256 + thread_x()] = words[255 - thread_x()];
}

// The same without the barrier: what it reads depends on the order of waves.
KERNEL(256, 1, probe_race, probe_args, args)
{
    SHARED_BYTES(place, 1024);
    uint32_t *words = (uint32_t *)place;

    words[thread_x()] = at(args.in)[thread_x()];
    at(args.out)[thread_x()] = words[255 - thread_x()];
}

KERNEL(64, 1, probe_unwritten, probe_args, args)
{
    SHARED(uint32_t, word);

    at(args.out)[thread_x()] = word;
}

KERNEL(64, 1, probe_divergent, probe_args, args)
{
    const uint32_t x = at(args.in)[thread_x()];

    at(args.out)[thread_x()] = thread_x() < 32 ? from_xor<1>(x) : from_xor<2>(x);
}

KERNEL(64, 1, probe_one_more, probe_args, args)
{
    uint32_t x = at(args.in)[thread_x()];

    for (int i = 0; i < 3 + (thread_x() == 5); i++)
        x = from_xor<1>(x);
    at(args.out)[thread_x()] = x;
}

KERNEL(64, 1, probe_reads_a_lane_that_left, probe_args, args)
{
    if (thread_x() == 63)
        return;
    at(args.out)[thread_x()] = from_lane(1, 63);
}

KERNEL(128, 1, probe_lonely_barrier, probe_args, args)
{
    if (thread_x() < 64)
        block_sync();
    at(args.out)[thread_x()] = 1;
}

KERNEL(64, 1, probe_too_much_lds, probe_args, args)
{
    SHARED_BYTES(place, 64 * 1024 + 16);

    at(args.out)[thread_x()] = place[thread_x()];
}

KERNEL(64, 1, probe_half_a_matrix, probe_args, args)
{
    const u16x4 a = {0, 0, 0, 0};
    f32x4 c = {0, 0, 0, 0};

    if (thread_x() < 32)
        c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, a, c, 0, 0, 0);
    at(args.out)[thread_x()] = bits_of(c[0]);
}

// Operands as they come: in A, b B, c C and out D, a lane's elements next to one another.
KERNEL(64, 1, probe_mfma_16x16x16_bf16, probe_args, args)
{
    const u16x4 a = ((const u16x4 *)args.in)[thread_x()], b = ((const u16x4 *)args.b)[thread_x()];

    ((f32x4 *)args.out)[thread_x()] =
        __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, ((const f32x4 *)args.c)[thread_x()], 0, 0, 0);
}

KERNEL(64, 1, probe_mfma_32x32x8_bf16, probe_args, args)
{
    const u16x4 a = ((const u16x4 *)args.in)[thread_x()], b = ((const u16x4 *)args.b)[thread_x()];

    ((f32x16 *)args.out)[thread_x()] =
        __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, b, ((const f32x16 *)args.c)[thread_x()], 0, 0, 0);
}

KERNEL(64, 1, probe_mfma_16x16x32_fp8, probe_args, args)
{
    const uint64_t a = ((const uint64_t *)args.in)[thread_x()], b = ((const uint64_t *)args.b)[thread_x()];

    ((f32x4 *)args.out)[thread_x()] =
        __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(a, b, ((const f32x4 *)args.c)[thread_x()], 0, 0, 0);
}

KERNEL(64, 1, probe_mfma_16x16x32_bf16, probe_args, args)
{
    const u16x8 a = ((const u16x8 *)args.in)[thread_x()], b = ((const u16x8 *)args.b)[thread_x()];

    ((f32x4 *)args.out)[thread_x()] =
        __builtin_amdgcn_mfma_f32_16x16x32_bf16(a, b, ((const f32x4 *)args.c)[thread_x()], 0, 0, 0);
}

KERNEL(64, 1, probe_mfma_16x16x128_f8f6f4, probe_args, args)
{
    const u32x8 a = ((const u32x8 *)args.in)[thread_x()], b = ((const u32x8 *)args.b)[thread_x()];

    ((f32x4 *)args.out)[thread_x()] =
        __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, ((const f32x4 *)args.c)[thread_x()], 0, 0, 0, 0, 0, 0);
}
