/* rpc_bell.c - doorbells: how another thread makes a sleeping rpc_step return. */
#include <grpc/support/time.h>
#include <stdlib.h>

#include "server/rpc_impl.h"

dsa_status rpc_bell_create(struct rpc *rpc, struct rpc_bell **bell_p)
{
    struct rpc_bell *bell = calloc(1, sizeof(*bell));

    if (!bell)
        return DSA_E_NO_MEMORY;
    bell->rpc = rpc;
    bell->call = grpc_channel_create_call(rpc->lame, NULL, GRPC_PROPAGATE_DEFAULTS, rpc->cq,
                                          grpc_slice_from_static_string("/doorbell"), NULL,
                                          gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    *bell_p = bell;
    return DSA_OK;
}

void rpc_bell_destroy(struct rpc_bell *bell)
{
    if (!bell)
        return;
    grpc_call_unref(bell->call);
    free(bell);
}

void rpc_bell_ring(struct rpc_bell *bell)
{
    /* An empty batch completes at once: the one public way to wake a completion queue from another thread. */
    __tsan_release(&bell->rpc->ring_tag);
    SRV_ASSERT(grpc_call_start_batch(bell->call, NULL, 0, &bell->rpc->ring_tag, NULL) == GRPC_CALL_OK);
}
