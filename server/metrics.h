/* metrics.h - what /metrics says. L writes (and the worker its own meter), the HTTP thread renders. Every name, label and the
 * decision it serves: METRICS.md. Labels take values from fixed sets only, so the number of series is bounded. */
#ifndef SERVER_METRICS_H
#define SERVER_METRICS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "server/health.h"
#include "server/meter.h"

struct rpc_method;
struct srv_worker;

#define SRV_MAX_METHODS 24
#define SRV_N_CODES     17 /* google.rpc.Code */
#define SRV_N_REASONS   84 /* -dsa_status */

/* Numbers that L has in its tables; taken over whenever L goes to sleep, and a few times a second. */
struct srv_gauges {
    srv_counter queue_requests, queue_rows, queue_bytes;
    srv_counter sessions, sessions_reclaimed;
    srv_counter regions_live, regions_draining, region_bytes;
    srv_counter connections, streams;
    srv_counter rows, invalid_indices, nonfinite_inputs;
    srv_counter tls_expiry_s, tls_reload_failures; /* expiry 0: no TLS */
};

struct srv_metrics {
    /* set once before the first reader */
    const struct rpc_method *methods;
    size_t n_methods;
    uint64_t n_pages;
    char layout[32];
    char device[16];                           /* kind */
    _Atomic(const struct srv_worker *) worker; /* NULL until it runs */
    /* [L]; the methods' array has one more entry, for unknown ones */
    srv_counter requests[SRV_MAX_METHODS + 1][SRV_N_CODES];
    struct srv_histogram request_us[SRV_MAX_METHODS + 1];
    srv_counter refused[SRV_N_REASONS];
    struct srv_gauges gauges;
};

/* [L] One request has its answer. method: its place in the table; n_methods for one that is not there. */
void srv_metrics_request(struct srv_metrics *metrics, size_t method, int code, uint64_t took_us);
/* [L] One request was refused, or failed: dsa_status. */
void srv_metrics_refused(struct srv_metrics *metrics, int status);

const char *srv_metrics_code_name(int code); /* [any] google.rpc.Code; "UNKNOWN" for another number */

/* [any] Everything as Prometheus text. */
void srv_metrics_write(const struct srv_metrics *metrics, const struct srv_health *health, FILE *out);
#define SRV_METRICS_TYPE "text/plain; version=0.0.4; charset=utf-8"

#endif /* SERVER_METRICS_H */
