/* pump.c - moves the completion queue on the calling thread. Each event's tag is a struct op that knows what
 * to do. */
#include <sched.h>
#include <time.h>

#include "client/lib/internal.h"

#define MAX_READY      256
#define PUMPS_PER_BEAT 64
#define MAX_SLEEP_US   UINT64_C(3600000000) /* far beyond any wait; keeps sums of times in range */

uint64_t dsa__now_us(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000 + (uint64_t)ts.tv_nsec / 1000;
}

static bool handle_one(struct dsa_client *client, gpr_timespec deadline)
{
    grpc_event event = grpc_completion_queue_next(client->cq, deadline, NULL);
    struct op *op;

    if (event.type != GRPC_OP_COMPLETE)
        return false;
    op = event.tag;
    op->fn(op, event.success != 0);
    return true;
}

unsigned dsa__pump_ready(struct dsa_client *client)
{
    unsigned n = 0, n_empty = 0;

    dsa__bidi_listen(client);
    /* A deadline in the past returns at once; "now" would be rounded up to the next millisecond. Such a call
     * takes one thing from the poller, and that may be a mere wake-up: only two empty ones in a row mean that
     * nothing is there. */
    while (n < MAX_READY && n_empty < 2) {
        if (handle_one(client, gpr_inf_past(GPR_CLOCK_MONOTONIC))) {
            n++;
            n_empty = 0;
        } else {
            n_empty++;
        }
    }
    return n;
}

/* Looks at the queue without sleeping for as long as the client spins. *now_p: when it last looked. */
static bool spin(struct dsa_client *client, uint64_t until_us, uint64_t *now_p)
{
    uint64_t end_us = *now_p + client->spin_us;

    if (end_us > until_us)
        end_us = until_us;
    while (*now_p < end_us) {
        sched_yield(); /* on a machine with fewer cores than spinners the others must get on */
        if (handle_one(client, gpr_inf_past(GPR_CLOCK_MONOTONIC)))
            return true;
        *now_p = dsa__now_us();
    }
    return false;
}

bool dsa__pump(struct dsa_client *client, uint64_t until_us)
{
    uint64_t now, wake = until_us;

    dsa__bidi_listen(client);
    /* What is there already needs no clock, except now and then for the heartbeat. */
    if (++client->n_pumps % PUMPS_PER_BEAT != 0 && handle_one(client, gpr_inf_past(GPR_CLOCK_MONOTONIC)))
        return true;
    now = dsa__now_us();
    dsa__heartbeat_if_due(client, now);
    if (spin(client, until_us, &now))
        return true;
    if (client->session.is_open && client->session.heartbeat_due_us < wake)
        wake = client->session.heartbeat_due_us;
    if (wake <= now)
        return false;
    if (wake - now > MAX_SLEEP_US)
        wake = now + MAX_SLEEP_US;
    return handle_one(client, gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                           gpr_time_from_micros((int64_t)(wake - now), GPR_TIMESPAN)));
}
