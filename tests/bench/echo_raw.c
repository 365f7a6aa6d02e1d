/* echo_raw.c - ping-pong over a unix stream socket, epoll or spinning: what the kernel alone costs. */
#include "echo.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int make_socket(const char *path, struct sockaddr_un *addr)
{
    addr->sun_family = AF_UNIX;
    snprintf(addr->sun_path, sizeof(addr->sun_path), "%s", path);
    return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

/* All of n bytes. Waits in epoll, or spins. */
static int read_all(int fd, int epoll, int spin, char *bytes, size_t n)
{
    size_t have = 0;

    while (have < n) {
        ssize_t got = recv(fd, bytes + have, n - have, MSG_DONTWAIT);

        if (got > 0) {
            have += (size_t)got;
        } else if (got == 0) {
            return -1;
        } else if (errno == EAGAIN && !spin) {
            struct epoll_event event;

            epoll_wait(epoll, &event, 1, -1);
        } else if (errno == EAGAIN) {
            sched_yield();
        } else {
            return -1;
        }
    }
    return 0;
}

static int watch(int fd)
{
    struct epoll_event event = {.events = EPOLLIN};
    int epoll = epoll_create1(EPOLL_CLOEXEC);

    if (epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0)
        return -1;
    return epoll;
}

int bench_raw_server(const char *path, int spin)
{
    char request[BENCH_REQUEST_BYTES], reply[BENCH_REPLY_BYTES] = {0};
    struct sockaddr_un addr = {0};
    int listener = make_socket(path, &addr);

    unlink(path);
    if (listener < 0 || bind(listener, (struct sockaddr *)&addr, sizeof(addr)) != 0
        || listen(listener, 4) != 0)
        return 1;
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC), epoll = watch(fd);

        while (read_all(fd, epoll, spin, request, sizeof(request)) == 0)
            if (send(fd, reply, sizeof(reply), MSG_NOSIGNAL) != (ssize_t)sizeof(reply))
                break;
        close(epoll);
        close(fd);
    }
}

int bench_connect(const char *path)
{
    struct sockaddr_un addr = {0};
    int fd = make_socket(path, &addr);
    uint64_t start = bench_now_ns();

    while (fd >= 0 && connect(fd, (struct sockaddr *)&addr, sizeof(addr)) != 0) {
        if (bench_now_ns() - start > UINT64_C(5000000000)) {
            close(fd);
            return -1;
        }
        sched_yield();
    }
    return fd;
}

uint64_t bench_raw_client(const char *path, int spin, int n_requests, uint64_t *times)
{
    char request[BENCH_REQUEST_BYTES] = {0}, reply[BENCH_REPLY_BYTES];
    int fd = bench_connect(path), epoll;
    uint64_t start, sent;

    if (fd < 0)
        return 0;
    epoll = watch(fd);
    start = bench_now_ns();
    for (int i = 0; i < n_requests; i++) {
        sent = bench_now_ns();
        if (send(fd, request, sizeof(request), MSG_NOSIGNAL) != (ssize_t)sizeof(request)
            || read_all(fd, epoll, spin, reply, sizeof(reply)) != 0)
            return 0;
        if (times)
            times[i] = bench_now_ns() - sent;
    }
    start = bench_now_ns() - start;
    close(epoll);
    close(fd);
    return start;
}
