/* svc_health.c - grpc.health.v1: whether to send work here. Probes are answered on L and never wait for a worker. */
#include <stdlib.h>
#include <string.h>

#include "grpc/health/v1/health.pb-c.h"
#include "server/clock.h"
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
    enum srv_probe probe;
    serving_status told; /* last */
};

/* The whole and each service it is made of are ready or not; what kubelet's three probes ask has names of its own. */
static bool find_probe(const char *service, enum srv_probe *probe_p)
{
    static const struct {
        const char *service;
        enum srv_probe probe;
    } table[] = {{"", SRV_PROBE_READY},
                 {"dsa.v1.SparseAttention", SRV_PROBE_READY},
                 {"grpc.health.v1.Health", SRV_PROBE_READY},
                 {"startup", SRV_PROBE_STARTUP},
                 {"ready", SRV_PROBE_READY},
                 {"live", SRV_PROBE_LIVE}};

    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        if (strcmp(service, table[i].service) == 0) {
            *probe_p = table[i].probe;
            return true;
        }
    }
    return false;
}

static serving_status status_now(const struct svc *svc, enum srv_probe probe)
{
    return srv_health_ask(svc->health, probe, srv_now_us(), NULL) ? SERVING : NOT_SERVING;
}

void svc_health_check(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    struct svc *svc = rpc_call_service(call);
    Grpc__Health__V1__HealthCheckResponse reply = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    const char *service;
    enum srv_probe probe;
    struct wire_arena *arena;
    ProtobufCMessage *message;
    struct srv_err err = {0};
    char shown[40];

    if (!svc_begin(call, &grpc__health__v1__health_check_request__descriptor, bytes, n, &arena, &message))
        return;
    service = ((const Grpc__Health__V1__HealthCheckRequest *)message)->service;
    if (find_probe(service, &probe)) {
        reply.status = status_now(svc, probe);
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
    enum srv_probe probe;
    bool known;

    if (!svc_begin(call, &grpc__health__v1__health_check_request__descriptor, bytes, n, &arena, &message))
        return;
    known = find_probe(((const Grpc__Health__V1__HealthCheckRequest *)message)->service, &probe);
    wire_arena_free(arena);
    send_status(call, known ? status_now(svc, probe) : UNKNOWN);
    if (!known)
        return; /* by the protocol the stream stays open: the service might appear. Here none will. */
    watch = calloc(1, sizeof(*watch));
    if (!watch) {
        rpc_finish(call, srv_status_grpc_code(DSA_E_NO_MEMORY), "NO_MEMORY: no memory for a watch", NULL, 0);
        return;
    }
    watch->call = call;
    watch->svc = svc;
    watch->probe = probe;
    watch->told = status_now(svc, probe);
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
    for (struct svc_watch *watch = svc->watches; watch; watch = watch->next) {
        serving_status now = status_now(svc, watch->probe);

        if (now == watch->told)
            continue;
        watch->told = now;
        send_status(watch->call, now);
    }
}
