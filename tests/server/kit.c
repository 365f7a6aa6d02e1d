#include "kit.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "server/clock.h"
#include "server/loop.h"
#include "server/rpc.h"

bool kit_wait(sem_t *sem)
{
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += KIT_PATIENCE_S;
    while (sem_timedwait(sem, &until) != 0)
        if (errno != EINTR)
            return false;
    return true;
}

/* ---- files and descriptors ------------------------------------------------------------------- */

static char dir[64];

const char *kit_dir_make(void)
{
    strcpy(dir, "/tmp/dsad-test-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(dir));
    return dir;
}

void kit_dir_remove(void)
{
    DIR *listing = opendir(dir);
    struct dirent *entry;

    ck_assert_ptr_nonnull(listing);
    while ((entry = readdir(listing)) != NULL)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            ck_assert_int_eq(
                unlinkat(dirfd(listing), entry->d_name, entry->d_type == DT_DIR ? AT_REMOVEDIR : 0), 0);
    closedir(listing);
    ck_assert_int_eq(rmdir(dir), 0);
}

char *kit_path(const char *name)
{
    char *path = NULL;

    ck_assert_int_gt(asprintf(&path, "%s/%s", dir, name), 0);
    return path;
}

int kit_n_fds(void)
{
    DIR *listing = opendir("/proc/self/fd");
    int n = 0;

    ck_assert_ptr_nonnull(listing);
    while (readdir(listing))
        n++;
    closedir(listing);
    return n - 3; /* ".", ".." and the listing itself */
}

int kit_connect(const char *path, int type)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);

    ck_assert_int_ge(fd, 0);
    ck_assert_uint_lt(strlen(path), sizeof(addr.sun_path));
    strcpy(addr.sun_path, path);
    if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0)
        return fd;
    close(fd);
    return -1;
}

/* ---- log lines --------------------------------------------------------------------------------- */

static int log_pipe[2], log_stderr;
static char log_text[16384];
static size_t log_n;

void kit_log_begin(void)
{
    ck_assert_int_eq(pipe(log_pipe), 0);
    fflush(stderr);
    log_stderr = dup(STDERR_FILENO);
    ck_assert_int_ge(log_stderr, 0);
    ck_assert_int_ge(dup2(log_pipe[1], STDERR_FILENO), 0);
    log_n = 0;
    log_text[0] = '\0';
}

void kit_log_expect(const char *text)
{
    struct pollfd ready = {.fd = log_pipe[0], .events = POLLIN};

    while (!strstr(log_text, text)) {
        ssize_t n;

        ck_assert_msg(poll(&ready, 1, KIT_PATIENCE_S * 1000) == 1, "no log line with \"%s\" came", text);
        ck_assert_uint_lt(log_n, sizeof(log_text) - 1);
        n = read(log_pipe[0], log_text + log_n, sizeof(log_text) - 1 - log_n);
        ck_assert_int_gt(n, 0);
        log_n += (size_t)n;
        log_text[log_n] = '\0';
    }
}

void kit_log_end(void)
{
    ck_assert_int_ge(dup2(log_stderr, STDERR_FILENO), 0);
    close(log_stderr);
    close(log_pipe[0]);
    close(log_pipe[1]);
}

/* ---- a service thread --------------------------------------------------------------------------- */

static bool settle(void *arg, bool is_busy)
{
    struct kit_loop *k = arg;
    bool worked = k->settle && k->settle(k->settle_arg);

    (void)is_busy; /* no worker here */

    if (atomic_exchange(&k->has_call, false)) {
        k->call(k->call_arg);
        sem_post(&k->called);
        worked = true;
    }
    if (atomic_load(&k->must_stop)) {
        srv_loop_stop(k->loop);
        worked = true;
    }
    return worked;
}

static void set_sleeping(void *arg, bool is_sleeping)
{
    struct kit_loop *k = arg;

    atomic_fetch_add(&k->n_sleeps, is_sleeping); /* the tests ring every time, so this is only counted */
}

void kit_loop_open(struct kit_loop *k, uint64_t spin_us)
{
    struct rpc_config config = {.max_message_bytes = 1 << 20, .max_streams = 16, .stall_timeout_us = 1000000};
    struct srv_loop_hooks hooks = {k, settle, set_sleeping};
    struct srv_err err = {0};

    memset(k, 0, sizeof(*k));
    ck_assert_int_eq(sem_init(&k->called, 0, 0), 0);
    rpc_init();
    KIT_OK(rpc_create(&config, &k->rpc, &err), &err);
    KIT_OK(rpc_bell_create(k->rpc, &k->bell), &err);
    KIT_OK(srv_loop_create(k->rpc, spin_us, &hooks, &k->loop, &err), &err);
}

static void *loop_main(void *arg)
{
    struct kit_loop *k = arg;

    srv_loop_run(k->loop);
    return NULL;
}

void kit_loop_start(struct kit_loop *k)
{
    ck_assert_int_eq(pthread_create(&k->thread, NULL, loop_main, k), 0);
    k->is_running = true;
}

void kit_loop_call(struct kit_loop *k, void (*fn)(void *arg), void *arg)
{
    if (!k->is_running) {
        fn(arg);
        return;
    }
    k->call = fn;
    k->call_arg = arg;
    atomic_store(&k->has_call, true);
    rpc_bell_ring(k->bell);
    ck_assert_msg(kit_wait(&k->called), "the service thread does not answer");
}

void kit_loop_stop(struct kit_loop *k)
{
    atomic_store(&k->must_stop, true);
    rpc_bell_ring(k->bell);
    ck_assert_int_eq(pthread_join(k->thread, NULL), 0);
    k->is_running = false;
}

void kit_loop_close(struct kit_loop *k)
{
    uint64_t late = srv_now_us() + KIT_PATIENCE_S * 1000000u;

    srv_loop_destroy(k->loop);
    rpc_shutdown(k->rpc);
    while (!rpc_is_down(k->rpc)) {
        rpc_step(k->rpc, 100000);
        ck_assert_msg(srv_now_us() < late, "gRPC does not shut down");
    }
    rpc_bell_destroy(k->bell);
    rpc_destroy(k->rpc);
    rpc_fini();
    sem_destroy(&k->called);
}
