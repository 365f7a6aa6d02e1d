/* http.h - the plain HTTP side for kubelet and Prometheus: GET /startupz /readyz /livez /metrics. It has a thread of its own and
 * reads only what any thread may read, so an answer never waits for the service thread or a worker. */
#ifndef SERVER_HTTP_H
#define SERVER_HTTP_H

#include "server/core/err.h"
#include "server/health.h"
#include "server/metrics.h"

struct srv_http;

struct srv_http_config {
    const char *address; /* "host:port"; port 0: any */
    const struct srv_health *health;
    const struct srv_metrics *metrics;
};

/* [main] DSA_E_BAD_REQUEST: the address is malformed; DSA_E_SYSTEM: it cannot be bound. Both must outlive it. */
SRV_MUST_CHECK dsa_status srv_http_start(const struct srv_http_config *config, struct srv_http **http_p,
                                         struct srv_err *err);
void srv_http_stop(struct srv_http *http); /* [main] joins the thread; NULL is fine */
int srv_http_port(const struct srv_http *http);

#endif /* SERVER_HTTP_H */
