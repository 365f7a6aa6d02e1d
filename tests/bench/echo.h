/* echo.h - the two yardsticks of dsa-rtt: a bidi echo on bare gRPC core, and an epoll ping-pong on a bare unix socket.
 * The servers run in a process of their own (the program started again with another argv). */
#ifndef BENCH_ECHO_H
#define BENCH_ECHO_H

#include <stdint.h>
#include <time.h>

/* What the attend of dsa-rtt and its reply have. */
#define BENCH_REQUEST_BYTES 147
#define BENCH_REPLY_BYTES   22

/* Serve on a unix path until killed. spin: poll without sleeping. work_ns: kept busy so long before each reply. */
int bench_grpc_server(const char *path, int spin, uint64_t work_ns);
int bench_raw_server(const char *path, int spin);

/* Connects, waiting for a server's process that may still be starting; -1 after 5 s. */
int bench_connect(const char *path);

/* n_requests round trips with n_inflight outstanding; each one's time in ns into times (NULL: not wanted).
 * Returns the elapsed ns, 0 on failure. */
uint64_t bench_grpc_client(const char *path, int spin, int n_requests, int n_inflight, uint64_t *times);
uint64_t bench_raw_client(const char *path, int spin, int n_requests, uint64_t *times);

static inline uint64_t bench_now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

#endif /* BENCH_ECHO_H */
