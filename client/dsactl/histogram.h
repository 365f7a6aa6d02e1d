/* histogram.h - counts values by size, to read percentiles off: 128 buckets per power of two, so that a
 * percentile is at most 0.8 % above the true one. Constant memory. Not synchronised. */
#ifndef DSACTL_HISTOGRAM_H
#define DSACTL_HISTOGRAM_H

#include <stdint.h>

#define HISTOGRAM_SUB_BITS 7
#define HISTOGRAM_BUCKETS  ((64 - HISTOGRAM_SUB_BITS + 1) << HISTOGRAM_SUB_BITS)

/* All zero = empty. */
struct histogram {
    uint64_t n, sum, max;
    uint64_t counts[HISTOGRAM_BUCKETS];
};

void histogram_add(struct histogram *h, uint64_t value);

/* Smallest bucket top that at least percent of the values do not exceed; never above max. 0 when empty. */
uint64_t histogram_at(const struct histogram *h, double percent);

double histogram_mean(const struct histogram *h); /* exact; 0 when empty */

#endif /* DSACTL_HISTOGRAM_H */
