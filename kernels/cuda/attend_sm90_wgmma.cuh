/* attend_sm90_wgmma.cuh - one wgmma: acc[64 x N] (+)= A[64 x 16] B[16 x N], A in registers, B in shared memory, f32 sums.
 *
 * N is 2 * (registers of acc). B is K-major in 128-byte rows with the 128-byte swizzle, groups of 8 rows 1024 bytes apart:
 * only the low descriptor word differs between calls (desc_low = wgmma_desc(address); 16 values further on = + 2).
 * One function per N and type because the instruction names each register. All four warps of a warpgroup call together. */
#ifndef KERNELS_CUDA_ATTEND_SM90_WGMMA_CUH
#define KERNELS_CUDA_ATTEND_SM90_WGMMA_CUH

#include <stdint.h>

__device__ __forceinline__ uint32_t wgmma_desc(uint32_t shared_address)
{
    return ((shared_address & 0x3ffffu) >> 4) | (1u << 16);
}

__device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until at most N_PENDING groups are in flight. */
template <int N_PENDING> __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N_PENDING) : "memory");
}

/* After a wait: tells the compiler that the accumulator has changed behind its back. */
template <int N> __device__ __forceinline__ void wgmma_landed(float (&acc)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(acc[i])::"memory");
}

__device__ __forceinline__ void wgmma_f16(float (&acc)[4], const uint32_t (&a)[4], uint32_t desc_low, int is_sum)
{
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 desc;\nmov.b64 desc, {%8, 0x40000040};\nsetp.ne.b32 p, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
        "{%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, desc, p, 1, 1, 0;\n}\n"
        :
          "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(desc_low), "r"(is_sum));
}

__device__ __forceinline__ void wgmma_bf16(float (&acc)[4], const uint32_t (&a)[4], uint32_t desc_low, int is_sum)
{
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 desc;\nmov.b64 desc, {%8, 0x40000040};\nsetp.ne.b32 p, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, desc, p, 1, 1, 0;\n}\n"
        :
          "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(desc_low), "r"(is_sum));
}

__device__ __forceinline__ void wgmma_f16(float (&acc)[8], const uint32_t (&a)[4], uint32_t desc_low, int is_sum)
{
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 desc;\nmov.b64 desc, {%12, 0x40000040};\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, desc, p, 1, 1, 0;\n}\n"
        :
          "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]),
          "+f"(acc[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(desc_low), "r"(is_sum));
}

__device__ __forceinline__ void wgmma_bf16(float (&acc)[8], const uint32_t (&a)[4], uint32_t desc_low, int is_sum)
{
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 desc;\nmov.b64 desc, {%12, 0x40000040};\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, desc, p, 1, 1, 0;\n}\n"
        :
          "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]),
          "+f"(acc[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(desc_low), "r"(is_sum));
}

__device__ __forceinline__ void wgmma_f16(float (&acc)[16], const uint32_t (&a)[4], uint32_t desc_low, int is_sum)
{
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 desc;\nmov.b64 desc, {%20, 0x40000040};\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, desc, p, 1, 1, 0;\n}\n"
        :
          "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]),
          "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]),
          "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(desc_low), "r"(is_sum));
}

__device__ __forceinline__ void wgmma_bf16(float (&acc)[16], const uint32_t (&a)[4], uint32_t desc_low, int is_sum)
{
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 desc;\nmov.b64 desc, {%20, 0x40000040};\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, desc, p, 1, 1, 0;\n}\n"
        :
          "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]),
          "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]),
          "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(desc_low), "r"(is_sum));
}

__device__ __forceinline__ void wgmma_f16(float (&acc)[32], const uint32_t (&a)[4], uint32_t desc_low, int is_sum)
{
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 desc;\nmov.b64 desc, {%36, 0x40000040};\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, desc, p, 1, 1, 0;\n}\n"
        :
          "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]),
          "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]),
          "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]),
          "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]),
          "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]),
          "+f"(acc[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(desc_low), "r"(is_sum));
}

__device__ __forceinline__ void wgmma_bf16(float (&acc)[32], const uint32_t (&a)[4], uint32_t desc_low, int is_sum)
{
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 desc;\nmov.b64 desc, {%36, 0x40000040};\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, desc, p, 1, 1, 0;\n}\n"
        :
          "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]),
          "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]),
          "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]),
          "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]),
          "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]),
          "+f"(acc[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(desc_low), "r"(is_sum));
}

#endif /* KERNELS_CUDA_ATTEND_SM90_WGMMA_CUH */
