/* clock.h - the monotonic clock in microseconds. Any thread. The pure core never calls it; it is told the time. */
#ifndef SERVER_CLOCK_H
#define SERVER_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t srv_now_us(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

#endif /* SERVER_CLOCK_H */
