/* The multiply-add peak of one core: twelve independent chains of the widest vector that this file is compiled for,
 * enough to cover the latency of two units. Compiled once per instruction set; without FMA each step is a multiply
 * and an add, which is then the peak of that instruction set. */
#include <stdint.h>
#include <string.h>

#include "bench_machine.h"

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

typedef float vector __attribute__((vector_size(VECTOR_BYTES)));

#define JOIN2(a, b) a##b
#define JOIN(a, b)  JOIN2(a, b)

#define CHAINS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define N_CHAINS  12

/* values: two factors near 1 and 0 that the compiler cannot see, so that no step is folded away. */
double JOIN(bench_peak_, BENCH_PEAK_ISA)(uint64_t n_steps, const float *values, float *sink)
{
    vector m, c, sum;
    float parts[VECTOR_BYTES / sizeof(float)];

    memset(&m, 0, sizeof(m));
    m += values[0];
    c = m * 0 + values[1];
#define DECLARE(i) vector a##i = c * (float)(i + 1);
    CHAINS(DECLARE)
    for (uint64_t step = 0; step < n_steps; step++) {
#define STEP(i) a##i = a##i * m + c;
        CHAINS(STEP)
    }
    sum = c;
#define ADD(i) sum += a##i;
    CHAINS(ADD)
    memcpy(parts, &sum, sizeof(parts));
    *sink = parts[0];
    return (double)n_steps * N_CHAINS * (VECTOR_BYTES / sizeof(float)) * 2;
}
