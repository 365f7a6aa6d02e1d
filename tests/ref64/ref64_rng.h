/* ref64_rng.h - small deterministic random numbers (splitmix64) for tests and checkers: same seed, same
 * sequence on every machine. State is the caller's; any thread, one state per thread. */
#ifndef REF64_RNG_H
#define REF64_RNG_H

#include <math.h>
#include <stdint.h>

struct ref64_rng {
    uint64_t state;
};

static inline struct ref64_rng ref64_rng_init(uint64_t seed)
{
    struct ref64_rng rng = {seed * UINT64_C(0x9e3779b97f4a7c15) + UINT64_C(0x1234567)};

    return rng;
}

static inline uint64_t ref64_rng_u64(struct ref64_rng *rng)
{
    uint64_t z = (rng->state += UINT64_C(0x9e3779b97f4a7c15));

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Uniform in [0, n); n >= 1. The bias of the plain remainder is below 2^-32 for the n used here. */
static inline int64_t ref64_rng_below(struct ref64_rng *rng, int64_t n)
{
    return (int64_t)(ref64_rng_u64(rng) % (uint64_t)n);
}

static inline double ref64_rng_unit(struct ref64_rng *rng) /* [0, 1) */
{
    return (double)(ref64_rng_u64(rng) >> 11) * 0x1p-53;
}

static inline double ref64_rng_normal(struct ref64_rng *rng)
{
    double u = 1.0 - ref64_rng_unit(rng); /* (0, 1]: the logarithm is finite */
    double v = ref64_rng_unit(rng);

    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

#endif /* REF64_RNG_H */
