/* pump.c - moves the completion queue on the calling thread. Each event's tag is a struct op that knows what
 * to do. */
#include <sched.h>
#include <time.h>

#include "client/lib/internal.h"

#define MAX_READY 256

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

bool dsa__pump(struct dsa_client *client, uint64_t until_us)
{
    uint64_t now = dsa__now_us(), spin_end = now + client->spin_us, wake = until_us;
    gpr_timespec deadline;

    dsa__heartbeat_if_due(client, now);
    do {
        if (handle_one(client, gpr_inf_past(GPR_CLOCK_MONOTONIC)))
            return true;
        if (client->spin_us > 0)
            sched_yield(); /* on a machine with fewer cores than spinners the others must get on */
        now = dsa__now_us();
    } while (now < spin_end && now < until_us);
    if (client->session.is_open && client->session.heartbeat_due_us < wake)
        wake = client->session.heartbeat_due_us;
    if (wake <= now)
        return false;
    if (wake - now > UINT64_C(3600000000)) /* far beyond any wait; keeps the sum below in range */
        wake = now + UINT64_C(3600000000);
    deadline =
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_micros((int64_t)(wake - now), GPR_TIMESPAN));
    return handle_one(client, deadline);
}
