/* loop.h - the service thread's loop: gRPC's completion queue and a libuv loop in one thread.
 *
 * The thread sleeps in the completion queue, with uv's next timer as deadline. A small watcher thread polls uv's
 * backend descriptor and rings a doorbell when uv has something, which is rare: accepts, descriptors, signals. So no
 * message crosses a thread before it reaches a worker. All functions [L] unless they say otherwise. */
#ifndef SERVER_LOOP_H
#define SERVER_LOOP_H

#include <stdbool.h>
#include <stdint.h>

#include "server/core/err.h"

struct srv_loop;
struct rpc;

struct srv_loop_hooks {
    void *arg;
    /* Pass on what the last events produced and take what workers have answered. True if there was something. is_busy:
     * more is coming in than is going out, so leave the work to the workers; otherwise a small job may be done here. */
    bool (*settle)(void *arg, bool is_busy);
    /* The thread is about to sleep, or is awake again. */
    void (*set_sleeping)(void *arg, bool is_sleeping);
};

SRV_MUST_CHECK dsa_status srv_loop_create(struct rpc *rpc, uint64_t spin_us,
                                          const struct srv_loop_hooks *hooks, struct srv_loop **loop_p,
                                          struct srv_err *err);
void srv_loop_destroy(struct srv_loop *loop); /* every handle on it has been closed */

struct uv_loop_s *srv_loop_uv(struct srv_loop *loop);
/* A uv handle was added or changed outside a uv callback: look at uv before sleeping. */
void srv_loop_touch(struct srv_loop *loop);

/* Runs until srv_loop_stop. */
void srv_loop_run(struct srv_loop *loop);
void srv_loop_stop(struct srv_loop *loop);

/* Calls fn every period_us, or once when period_us is 0, first after first_us. The timer belongs to the loop and ends with
 * it, or with srv_timer_close. */
struct srv_timer;
SRV_MUST_CHECK dsa_status srv_timer_start(struct srv_loop *loop, uint64_t first_us, uint64_t period_us,
                                          void (*fn)(void *arg), void *arg, struct srv_timer **timer_p);
void srv_timer_close(struct srv_timer *timer); /* NULL is fine */

/* Calls fn on L for each signal of the kind. */
SRV_MUST_CHECK dsa_status srv_loop_on_signal(struct srv_loop *loop, int signum,
                                             void (*fn)(void *arg, int signum), void *arg);

#endif /* SERVER_LOOP_H */
