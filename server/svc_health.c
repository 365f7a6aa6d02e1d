/* svc_health.c - grpc.health.v1: whether to send work here. Probes are answered on L and never wait for a worker. */
#include <stdlib.h>
#include <string.h>

#include "grpc/health/v1/health.pb-c.h"
#include "server/status.h"
#include "server/svc.h"

typedef Grpc__Health__V1__HealthCheckResponse__ServingStatus serving_status;
#define SERVING     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
#define NOT_SERVING GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING
#define UNKNOWN     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN

struct svc_watch {
    struct svc_watch *prev, *next;
    struct rpc_call *call;
    struct svc *svc;
};

static bool is_known(const char *service)
{
    return service[0] == '\0' || strcmp(service, "dsa.v1.SparseAttention") == 0
           || strcmp(service, "grpc.health.v1.Health") == 0;
}

static serving_status status_now(const struct svc *svc)
{
    return svc_is_healthy(svc) ? SERVING : NOT_SERVING;
}

void svc_health_check(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    struct svc *svc = rpc_call_service(call);
    Grpc__Health__V1__HealthCheckResponse reply = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    const char *service;
    struct wire_arena *arena;
    ProtobufCMessage *message;
    struct srv_err err = {0};
    char shown[40];

    if (!svc_begin(call, &grpc__health__v1__health_check_request__descriptor, bytes, n, &arena, &message))
        return;
    service = ((const Grpc__Health__V1__HealthCheckRequest *)message)->service;
    if (is_known(service)) {
        reply.status = status_now(svc);
        wire_reply(call, &reply.base);
    } else {
        srv_fail(&err, DSA_E_NOT_FOUND, "service", "%s", wire_text(shown, sizeof(shown), service),
                 "no such service here");
        svc_refuse(call, &err);
    }
    wire_arena_free(arena);
}

static void send_status(struct rpc_call *call, serving_status status)
{
    Grpc__Health__V1__HealthCheckResponse reply = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

    reply.status = status;
    if (!wire_send(call, &reply.base))
        rpc_finish(call, srv_status_grpc_code(DSA_E_NO_MEMORY), "NO_MEMORY: no memory for a reply", NULL, 0);
}

void svc_health_watch(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    struct svc *svc = rpc_call_service(call);
    struct svc_watch *watch;
    struct wire_arena *arena;
    ProtobufCMessage *message;
    bool known;

    if (!svc_begin(call, &grpc__health__v1__health_check_request__descriptor, bytes, n, &arena, &message))
        return;
    known = is_known(((const Grpc__Health__V1__HealthCheckRequest *)message)->service);
    wire_arena_free(arena);
    send_status(call, known ? status_now(svc) : UNKNOWN);
    if (!known)
        return; /* by the protocol the stream stays open: the service might appear. Here none will. */
    watch = calloc(1, sizeof(*watch));
    if (!watch) {
        rpc_finish(call, srv_status_grpc_code(DSA_E_NO_MEMORY), "NO_MEMORY: no memory for a watch", NULL, 0);
        return;
    }
    watch->call = call;
    watch->svc = svc;
    watch->next = svc->watches;
    if (watch->next)
        watch->next->prev = watch;
    svc->watches = watch;
    rpc_call_set_data(call, watch);
}

void svc_health_watch_closed(struct rpc_call *call, bool is_cancelled)
{
    struct svc_watch *watch = rpc_call_data(call);

    (void)is_cancelled;
    if (!watch)
        return;
    if (watch->prev)
        watch->prev->next = watch->next;
    else
        watch->svc->watches = watch->next;
    if (watch->next)
        watch->next->prev = watch->prev;
    free(watch);
}

void svc_health_changed(struct svc *svc)
{
    for (struct svc_watch *watch = svc->watches; watch; watch = watch->next)
        send_status(watch->call, status_now(svc));
}
