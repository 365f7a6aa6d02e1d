#include "server/loop.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <uv.h>

#include "server/clock.h"
#include "server/rpc.h"

/* Events handled before results are passed on: enough to batch, few enough to stay prompt. */
#define MAX_EVENTS 64

/* Messages without a pause after which the loop counts as busy. */
#define BUSY_MESSAGES 2

/* While spinning: looks at gRPC for each look at the clock and at uv, whose events are rare and may wait some microseconds. */
#define LOOKS_PER_UV 16

struct signal_watch {
    uv_signal_t handle;
    void (*fn)(void *arg, int signum);
    void *arg;
};

struct srv_timer {
    uv_timer_t handle;
    void (*fn)(void *arg);
    void *arg;
};

struct srv_loop {
    uv_loop_t uv;
    struct rpc *rpc;
    struct srv_loop_hooks hooks;
    uint64_t spin_us;
    bool is_touched;
    bool is_stopping;
    /* the watcher */
    pthread_t watcher;
    struct rpc_bell *bell;
    sem_t looked;         /* L has served uv: watch on */
    atomic_bool uv_ready; /* watcher to L; the bell orders nothing, so release/acquire here */
    atomic_bool watcher_ends;
    int wake_fd; /* ends the watcher's poll */
};

static void *watcher_main(void *arg)
{
    struct srv_loop *loop = arg;
    struct pollfd fds[2] = {{.fd = uv_backend_fd(&loop->uv), .events = POLLIN},
                            {.fd = loop->wake_fd, .events = POLLIN}};

    for (;;) {
        if (poll(fds, 2, -1) < 0 && errno != EINTR)
            break;
        if (atomic_load(&loop->watcher_ends))
            break;
        if (!(fds[0].revents & POLLIN))
            continue;
        atomic_store_explicit(&loop->uv_ready, true, memory_order_release);
        rpc_bell_ring(loop->bell);
        while (sem_wait(&loop->looked) != 0)
            ;
    }
    return NULL;
}

dsa_status srv_loop_create(struct rpc *rpc, uint64_t spin_us, const struct srv_loop_hooks *hooks,
                           struct srv_loop **loop_p, struct srv_err *err)
{
    struct srv_loop *loop = calloc(1, sizeof(*loop));

    if (!loop)
        return srv_fail(err, DSA_E_NO_MEMORY, "loop", "%s", "", "no memory for the loop");
    loop->rpc = rpc;
    loop->spin_us = spin_us;
    loop->hooks = *hooks;
    loop->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (loop->wake_fd < 0 || uv_loop_init(&loop->uv) != 0 || sem_init(&loop->looked, 0, 0) != 0
        || rpc_bell_create(rpc, &loop->bell) != DSA_OK
        || pthread_create(&loop->watcher, NULL, watcher_main, loop) != 0)
        return srv_fail(err, DSA_E_SYSTEM, "loop", "%s", "",
                        "cannot start the service loop"); /* process ends */
    *loop_p = loop;
    return DSA_OK;
}

static void end_watcher(struct srv_loop *loop)
{
    atomic_store(&loop->watcher_ends, true);
    if (eventfd_write(loop->wake_fd, 1) != 0)
        SRV_ASSERT(errno == EAGAIN);
    sem_post(&loop->looked);
    pthread_join(loop->watcher, NULL);
}

static void free_handle(uv_handle_t *handle)
{
    free(handle->data);
}

static void close_own_handle(uv_handle_t *handle, void *arg)
{
    (void)arg;
    if (!uv_is_closing(handle) && (handle->type == UV_TIMER || handle->type == UV_SIGNAL))
        uv_close(handle, free_handle);
}

void srv_loop_destroy(struct srv_loop *loop)
{
    if (!loop)
        return;
    end_watcher(loop);
    uv_walk(&loop->uv, close_own_handle, NULL);
    uv_run(&loop->uv, UV_RUN_DEFAULT);
    SRV_ASSERT(uv_loop_close(&loop->uv) == 0);
    rpc_bell_destroy(loop->bell);
    sem_destroy(&loop->looked);
    close(loop->wake_fd);
    free(loop);
}

struct uv_loop_s *srv_loop_uv(struct srv_loop *loop)
{
    return &loop->uv;
}

void srv_loop_touch(struct srv_loop *loop)
{
    loop->is_touched = true;
}

void srv_loop_stop(struct srv_loop *loop)
{
    loop->is_stopping = true;
}

/* Serve uv if it has something; returns how long the thread may sleep. */
static uint64_t serve_uv(struct srv_loop *loop)
{
    bool is_ready = atomic_exchange_explicit(&loop->uv_ready, false, memory_order_acquire);
    int timeout_ms;

    if (!is_ready && !loop->is_touched)
        uv_update_time(&loop->uv);
    timeout_ms = is_ready || loop->is_touched ? 0 : uv_backend_timeout(&loop->uv);
    if (timeout_ms == 0 && !is_ready && !loop->is_touched && !uv_loop_alive(&loop->uv))
        return UINT64_MAX; /* uv calls an empty loop due at once, but has nothing to do */
    if (timeout_ms == 0) {
        loop->is_touched = false;
        uv_run(&loop->uv, UV_RUN_NOWAIT);
        if (is_ready)
            sem_post(&loop->looked);
        return 0;
    }
    return timeout_ms < 0 ? UINT64_MAX : (uint64_t)timeout_ms * 1000;
}

/* Pass results on, then start the reads that were asked for: a client that waits is answered before its next message is
 * read, and gRPC puts its window updates into that answer's write. */
static bool settle(struct srv_loop *loop, bool is_busy)
{
    bool worked = loop->hooks.settle(loop->hooks.arg, is_busy);

    return rpc_flush(loop->rpc) || worked;
}

/* Clients send faster than they wait: take in what there is first, so that workers get batches and this thread only
 * feeds them. */
static void take_in(struct srv_loop *loop)
{
    for (int i = 0; i < MAX_EVENTS && rpc_flush(loop->rpc); i++)
        for (int j = 0; j < MAX_EVENTS && rpc_step(loop->rpc, 0); j++)
            ;
}

/* An event has been handled; handle those that follow without sleeping. */
static void serve_rpc(struct srv_loop *loop, uint64_t n_messages_before)
{
    int n = 0;

    do {
        bool is_busy = rpc_message_count(loop->rpc) - n_messages_before >= BUSY_MESSAGES;

        if (is_busy)
            take_in(loop);
        settle(loop, is_busy);
    } while (++n < MAX_EVENTS && rpc_step(loop->rpc, 0));
}

static void sleep_and_serve(struct srv_loop *loop, uint64_t wait_us)
{
    uint64_t n_messages = rpc_message_count(loop->rpc);
    bool got = true;

    loop->hooks.set_sleeping(loop->hooks.arg, true);
    /* A piece that came before the worker could see that we sleep rang no bell. */
    if (!settle(loop, false))
        got = rpc_step(loop->rpc, wait_us);
    loop->hooks.set_sleeping(loop->hooks.arg, false);
    if (got)
        serve_rpc(loop, n_messages);
}

/* True if there was something to do. */
static bool look_and_serve(struct srv_loop *loop)
{
    uint64_t n_messages = rpc_message_count(loop->rpc);
    bool got = rpc_step(loop->rpc, 0);

    if (got)
        serve_rpc(loop, n_messages);
    return settle(loop, false) || got;
}

/* Polls until nothing has come for spin_us, or a little longer. */
static void spin(struct srv_loop *loop)
{
    uint64_t now = srv_now_us(), idle_since = now;
    bool worked = false;

    for (unsigned n = 1; !loop->is_stopping && now - idle_since < loop->spin_us; n++) {
        if (look_and_serve(loop))
            worked = true;
        else
            sched_yield(); /* on a machine with fewer cores than spinners the others must get on */
        if (n % LOOKS_PER_UV != 0)
            continue;
        serve_uv(loop);
        now = srv_now_us();
        if (worked)
            idle_since = now;
        worked = false;
    }
}

void srv_loop_run(struct srv_loop *loop)
{
    while (!loop->is_stopping) {
        uint64_t wait_us = serve_uv(loop);

        if (wait_us > 0)
            sleep_and_serve(loop, wait_us);
        else
            look_and_serve(loop); /* whatever uv does, calls are served */
        if (loop->spin_us > 0)
            spin(loop);
    }
}

static void on_timer(uv_timer_t *handle)
{
    struct srv_timer *timer = handle->data;

    timer->fn(timer->arg);
}

dsa_status srv_timer_start(struct srv_loop *loop, uint64_t first_us, uint64_t period_us,
                           void (*fn)(void *arg), void *arg, struct srv_timer **timer_p)
{
    struct srv_timer *timer = calloc(1, sizeof(*timer));

    if (!timer)
        return DSA_E_NO_MEMORY;
    timer->fn = fn;
    timer->arg = arg;
    uv_update_time(&loop->uv); /* uv counts from its cached time, which is old outside its callbacks */
    uv_timer_init(&loop->uv, &timer->handle);
    timer->handle.data = timer;
    uv_timer_start(&timer->handle, on_timer, (first_us + 999) / 1000, (period_us + 999) / 1000);
    srv_loop_touch(loop);
    *timer_p = timer;
    return DSA_OK;
}

void srv_timer_close(struct srv_timer *timer)
{
    if (timer)
        uv_close((uv_handle_t *)&timer->handle, free_handle);
}

static void on_signal(uv_signal_t *handle, int signum)
{
    struct signal_watch *watch = handle->data;

    watch->fn(watch->arg, signum);
}

dsa_status srv_loop_on_signal(struct srv_loop *loop, int signum, void (*fn)(void *arg, int signum), void *arg)
{
    struct signal_watch *watch = calloc(1, sizeof(*watch));

    if (!watch)
        return DSA_E_NO_MEMORY;
    watch->fn = fn;
    watch->arg = arg;
    uv_signal_init(&loop->uv, &watch->handle);
    watch->handle.data = watch;
    if (uv_signal_start(&watch->handle, on_signal, signum) != 0) {
        uv_close((uv_handle_t *)&watch->handle, free_handle);
        return DSA_E_SYSTEM;
    }
    srv_loop_touch(loop);
    return DSA_OK;
}
