/* attend_sm90.cu - the kernels that attend_sm90_plan names. One parameter each: the launch's argument block in device
 * memory. Build: nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a; ptxas warning C7512 (wgmma run one at a time for
 * want of registers) is an error here. */
#include "attend_sm90.cuh"
#include "attend_sm90_merge.cuh"

/* 1: only the 64-head kernel of the 656-byte rows and its merge (quick builds while tuning). */
#ifndef ATTEND_SM90_ONLY_MAIN
#define ATTEND_SM90_ONLY_MAIN 0
#endif

#define ATTEND_KERNEL(latent, rope, heads)                                                                   \
    extern "C" __global__ void __launch_bounds__(ATTEND_SM90_THREADS, 1)                                     \
        attend_sm90_##latent##_##rope##_h##heads(const struct dsk_attend_block *block)                       \
    {                                                                                                        \
        attend_sm90::attend<attend_sm90::Shape<latent, rope, heads>>(block);                                 \
    }

#define MERGE_KERNEL(d_v, warps)                                                                             \
    extern "C" __global__ void __launch_bounds__(ATTEND_SM90_MERGE_THREADS, 4)                               \
        attend_sm90_merge_##d_v##_w##warps(const struct dsk_attend_block *block)                             \
    {                                                                                                        \
        attend_sm90::merge<d_v, warps>(block);                                                               \
    }

ATTEND_KERNEL(512, 64, 64)
MERGE_KERNEL(512, 1)
MERGE_KERNEL(512, 8)
#if !ATTEND_SM90_ONLY_MAIN
ATTEND_KERNEL(512, 64, 8)
ATTEND_KERNEL(512, 64, 16)
ATTEND_KERNEL(512, 64, 32)
ATTEND_KERNEL(512, 0, 8)
ATTEND_KERNEL(512, 0, 16)
ATTEND_KERNEL(512, 0, 32)
ATTEND_KERNEL(512, 0, 64)
ATTEND_KERNEL(256, 0, 8)
ATTEND_KERNEL(256, 0, 16)
ATTEND_KERNEL(256, 0, 32)
ATTEND_KERNEL(256, 0, 64)
MERGE_KERNEL(256, 1)
MERGE_KERNEL(256, 8)
#endif
