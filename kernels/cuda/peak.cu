// peak.cu - what the matrix units give at most: bf16 products of random operands that lie in shared memory, nothing
// else. A benchmark's roof, measured in the run that is judged by it.
//   n_steps rounds of PEAK_FLOP floating-point operations a block; sink takes one value a thread
#include "../gpu/gpu_args.h"
#include "number.cuh"

static constexpr int THREADS = 256;

DEV uint32_t random_word(uint32_t x) // two bf16 of magnitude 1 to 4
{
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return (x & 0x80ff80ffu) | 0x3f803f80u;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Two warpgroups, each m64n256k16 on its own 64 x 64 of A and a common 256 x 64 of B, four of each in turn.
static constexpr int A_BYTES = 64 * 128, B_BYTES = 256 * 128, STAGES = 4;

DEV uint64_t descriptor(uint32_t address) // K-major, 128-byte swizzle
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

#define R10(i)  "%" #i "0,%" #i "1,%" #i "2,%" #i "3,%" #i "4,%" #i "5,%" #i "6,%" #i "7,%" #i "8,%" #i "9,"
#define D10(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),              \
               "+f"(d[i + 6]), "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9])

DEV void multiply(float (&d)[128], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," R10(1) R10(2) R10(3) R10(4) R10(5) R10(6) R10(7) R10(8) R10(9) R10(10) R10(11)
                 "%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, 1, 1, 1, 0, 0;"
                 : D10(0), D10(10), D10(20), D10(30), D10(40), D10(50), D10(60), D10(70), D10(80), D10(90), D10(100),
                   D10(110), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]),
                   "+f"(d[126]), "+f"(d[127])
                 : "l"(a), "l"(b));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gpu_peak(const gpu_peak_args args)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = ((uint32_t)__cvta_generic_to_shared(shared) + 1023u) & ~1023u;
    const int group = threadIdx.x / 128;
    float d[128];

    for (int i = threadIdx.x; i < STAGES * (2 * A_BYTES + B_BYTES) / 4; i += THREADS)
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + 4 * i), "r"(random_word(i + 1)) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 128; i++)
        d[i] = 0;
    for (int step = 0; step < args.n_steps; step++) {
        const uint32_t a = base + (step % STAGES) * 2 * A_BYTES + group * A_BYTES;
        const uint32_t b = base + STAGES * 2 * A_BYTES + (step % STAGES) * B_BYTES;

        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++)
            multiply(d, descriptor(a + 32 * k), descriptor(b + 32 * k));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 128; i++)
        sum += d[i];
    ((float *)args.sink)[blockIdx.x * THREADS + threadIdx.x] = sum;
}

#else

// The same count of operations by mma.sync from registers: a warp's share of a round is products of m16n8k16.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gpu_peak(const gpu_peak_args args)
{
    uint32_t a[4][4], b[4][2];
    float d[16][4] = {};

    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++)
            a[i][j] = random_word(threadIdx.x * 64 + 4 * i + j);
        for (int j = 0; j < 2; j++)
            b[i][j] = random_word(threadIdx.x * 64 + 32 + 2 * i + j);
    }
    for (int step = 0; step < args.n_steps; step++) {
#pragma unroll
        for (int k = 0; k < 8; k++) {
#pragma unroll
            for (int t = 0; t < 16; t++)
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                             "{%8,%9}, {%0,%1,%2,%3};"
                             : "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
                             : "r"(a[t / 4][0]), "r"(a[t / 4][1]), "r"(a[t / 4][2]), "r"(a[t / 4][3]), "r"(b[t % 4][0]),
                               "r"(b[t % 4][1]));
        }
    }
    float sum = 0;
    for (int t = 0; t < 16; t++)
        sum += d[t][0] + d[t][1] + d[t][2] + d[t][3];
    ((float *)args.sink)[blockIdx.x * THREADS + threadIdx.x] = sum;
}

#endif
