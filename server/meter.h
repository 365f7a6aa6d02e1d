/* meter.h - counters and histograms with one writer each and any number of readers. A writer is a thread, or whoever holds
 * the worker at the moment; readers may be a few events behind, and never see a torn number. */
#ifndef SERVER_METER_H
#define SERVER_METER_H

#include <stdatomic.h>
#include <stdint.h>

/* Relaxed throughout: numbers are read for themselves, nothing is concluded from their order. */
typedef _Atomic(uint64_t) srv_counter;

#define SRV_HISTOGRAM_BUCKETS 19

struct srv_histogram {
    srv_counter counts[SRV_HISTOGRAM_BUCKETS + 1]; /* each bucket alone; the last has no bound */
    srv_counter sum;
};

extern const uint64_t srv_bounds_us[SRV_HISTOGRAM_BUCKETS];   /* 10 us to 10 s */
extern const uint64_t srv_bounds_rows[SRV_HISTOGRAM_BUCKETS]; /* 1 to 2^18, powers of two */

static inline uint64_t srv_counter_get(const srv_counter *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static inline void srv_counter_set(srv_counter *counter, uint64_t value)
{
    atomic_store_explicit(counter, value, memory_order_relaxed);
}

static inline void srv_counter_add(srv_counter *counter, uint64_t n)
{
    srv_counter_set(counter, srv_counter_get(counter) + n); /* one writer: no read-modify-write needed */
}

static inline void srv_histogram_add(struct srv_histogram *histogram, const uint64_t *bounds, uint64_t value)
{
    unsigned i = 0;

    while (i < SRV_HISTOGRAM_BUCKETS && value > bounds[i])
        i++;
    srv_counter_add(&histogram->counts[i], 1);
    srv_counter_add(&histogram->sum, value);
}

#endif /* SERVER_METER_H */
