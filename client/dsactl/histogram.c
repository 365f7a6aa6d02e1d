#include "client/dsactl/histogram.h"

#include <math.h>

#define SUB (1u << HISTOGRAM_SUB_BITS)

/* Values below 128 have a bucket each; above, the top 8 bits choose. */
static unsigned bucket_of(uint64_t value)
{
    unsigned shift;

    if (value < SUB)
        return (unsigned)value;
    shift = 63 - (unsigned)__builtin_clzll(value) - HISTOGRAM_SUB_BITS;
    return (shift + 1) * SUB + (unsigned)(value >> shift) - SUB;
}

static uint64_t top_of(unsigned bucket)
{
    unsigned shift;

    if (bucket < SUB)
        return bucket;
    shift = bucket / SUB - 1;
    return (((uint64_t)(bucket % SUB) + SUB) << shift) + ((UINT64_C(1) << shift) - 1);
}

void histogram_add(struct histogram *h, uint64_t value)
{
    h->counts[bucket_of(value)]++;
    h->n++;
    h->sum += value;
    if (value > h->max)
        h->max = value;
}

uint64_t histogram_at(const struct histogram *h, double percent)
{
    double wanted = ceil((double)h->n * percent / 100);
    uint64_t target = wanted < 1 ? 1 : (uint64_t)wanted, seen = 0;

    for (unsigned i = 0; i < HISTOGRAM_BUCKETS && h->n > 0; i++) {
        seen += h->counts[i];
        if (seen >= target)
            return top_of(i) < h->max ? top_of(i) : h->max;
    }
    return h->max;
}

double histogram_mean(const struct histogram *h)
{
    return h->n ? (double)h->sum / (double)h->n : 0;
}
