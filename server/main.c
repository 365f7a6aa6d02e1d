/* main.c - puts the pieces together, runs the loop, drains.
 *
 *   start:  configuration -> rules -> worker (device, pool) -> gRPC -> loop -> sockets
 *   drain:  readiness off, nothing new -> running work ends or its grace does -> sessions end -> GOAWAY
 *           -> calls end or are cancelled -> worker joined -> queue drained -> loop closed -> exit 0
 * A second signal ends the grace at once. */
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/address.h"
#include "server/clock.h"
#include "server/config.h"
#include "server/config_file.h"
#include "server/core/rules.h"
#include "server/descriptors.h"
#include "server/fdsock.h"
#include "server/health.h"
#include "server/http.h"
#include "server/listener.h"
#include "server/log.h"
#include "server/loop.h"
#include "server/metrics.h"
#include "server/reload.h"
#include "server/rpc.h"
#include "server/security.h"
#include "server/status.h"
#include "server/svc.h"
#include "server/tls.h"
#include "server/wire.h"
#include "server/worker.h"

#define TICK_US         250000
#define TICKS_PER_COUNT 4         /* counting connections takes a system call for each */
#define MAX_PIECES      (1 << 19) /* of one answer: half of what a ring can hold */
#define DRAIN_TICK_US   10000
#if defined(DSA_SANITIZE_address) || defined(DSA_SANITIZE_thread)
#define SPARE_BLOCKS 0 /* so that they see memory that is used after its end */
#else
#define SPARE_BLOCKS 256
#endif
#define GOAWAY_US 200000 /* what clients get to answer the goodbye before their calls are cancelled */

enum phase { SERVING, DRAINING, SAYING_GOODBYE, CANCELLING, CUTTING };

struct server {
    struct srv_config config;
    struct srv_config started; /* config as it was at the start */
    int argc;
    char **argv;
    char unix_path[108];
    char fd_path[108];
    uint32_t n_pages;
    uint32_t layout;
    uint32_t write_rule;
    struct srv_security security;
    struct svc *svc;
    struct rpc *rpc;
    struct rpc_bell *worker_bell;
    struct srv_loop *loop;
    struct srv_listener *unix_listener;
    struct srv_listener *tcp_listener;
    struct srv_listener *health_listener;
    struct srv_http *http;
    struct srv_metrics metrics;
    struct srv_health health;
    struct srv_fdsock *fdsock;
    struct srv_timer *tick;
    struct srv_timer *drain_tick;
    enum phase phase;
    uint64_t phase_ends_us;
    unsigned n_stop_signals;
    unsigned n_ticks;
};

/* ---- configuration ---------------------------------------------------------------------------------- */

static uint32_t host_tiers(const struct srv_config *config)
{
    return strcmp(config->host_tier, "memfd") == 0 ? SRV_TIER_NONE | SRV_TIER_MEMFD : SRV_TIER_NONE;
}

/* The rules have refused kinds that are not served. */
static int32_t device_kind(const struct srv_config *config)
{
    return strcmp(config->device, "cuda") == 0  ? DSK_DEVICE_CUDA
           : strcmp(config->device, "hip") == 0 ? DSK_DEVICE_HIP
                                                : DSK_DEVICE_CPU;
}

static dsa_status find_layout(const char *flag, const char *name, uint32_t *id_p, struct srv_err *err)
{
    const struct dsk_layout *layout = dsk_layout_by_name(name);

    if (!layout)
        return srv_fail(err, DSA_E_BAD_LAYOUT, flag, "%s", name, "unknown layout; see --help");
    *id_p = layout->id;
    return DSA_OK;
}

static dsa_status check_rules(struct server *server, struct srv_err *err)
{
    const struct srv_config *config = &server->config;
    struct srv_rule_config rule = {
        .device_kind = config->device,
        .context_parallel = (uint32_t)config->context_parallel,
        .host_tiers = host_tiers(config),
    };
    const char *decode = config->decode_layout[0] != '\0' ? config->decode_layout : config->layout;
    dsa_status rc;

    if ((rc = find_layout("layout", config->layout, &rule.prefill_layout, err)) != DSA_OK
        || (rc = find_layout("decode-layout", decode, &rule.decode_layout, err)) != DSA_OK)
        return rc;
    server->layout = rule.prefill_layout;
    return srv_rules_check_config(&rule, err);
}

/* Words that are none have no effect here; derive_config refuses them. */
static void apply_log_settings(const struct srv_config *config)
{
    int level = srv_log_level_by_name(config->log_level), format = srv_log_format_by_name(config->log_format);

    if (level >= 0)
        srv_log_set_level((enum srv_log_level)level);
    if (format >= 0)
        srv_log_set_format((enum srv_log_format)format);
}

static dsa_status derive_config(struct server *server, struct srv_err *err)
{
    struct srv_config *config = &server->config;
    uint64_t page_bytes, n_pages;
    dsa_status rc = check_rules(server, err);

    if (rc != DSA_OK)
        return rc;
    if (strcmp(config->host_tier, "memfd") != 0 && strcmp(config->host_tier, "none") != 0)
        return srv_fail(err, DSA_E_BAD_REQUEST, "host-tier", "%s", config->host_tier, "give memfd or none");
    if (strcmp(config->write_rule, "pow2") != 0 && strcmp(config->write_rule, "plain") != 0)
        return srv_fail(err, DSA_E_BAD_REQUEST, "write-rule", "%s", config->write_rule, "give pow2 or plain");
    server->write_rule = strcmp(config->write_rule, "plain") == 0 ? DSK_RULE_PLAIN : DSK_RULE_POW2;
    page_bytes = (uint64_t)dsk_layout_get(server->layout)->row_bytes * DSK_PAGE_TOKENS * config->layers;
    n_pages = config->pool_pages > 0 ? config->pool_pages : config->pool_bytes / page_bytes;
    if (n_pages == 0 || n_pages > (1u << 25) - 1)
        return srv_fail(err, DSA_E_BAD_REQUEST, "pool-bytes", "%" PRIu64, config->pool_bytes,
                        "a page of %" PRIu64 " layers has %" PRIu64 " bytes; the pool holds 1 to %u pages",
                        config->layers, page_bytes, (1u << 25) - 1);
    if (config->batch_rows == 0)
        config->batch_rows = device_kind(config) == DSK_DEVICE_CPU ? 64 : 256;
    if (config->chunk_rows == 0)
        config->chunk_rows = device_kind(config) == DSK_DEVICE_CPU ? 16 : 64;
    if (config->chunk_rows > config->batch_rows)
        config->chunk_rows = config->batch_rows; /* a piece is part of one launch; GetCapabilities says so */
    if (config->max_rows / config->chunk_rows > MAX_PIECES)
        return srv_fail(err, DSA_E_BAD_REQUEST, "chunk-rows", "%" PRIu64, config->chunk_rows,
                        "max-rows / chunk-rows may be at most %d", MAX_PIECES);
    if (config->lease_us > config->max_lease_us)
        return srv_fail(err, DSA_E_BAD_REQUEST, "lease", "%" PRIu64, config->lease_us,
                        "at most max-lease (%" PRIu64 ")", config->max_lease_us);
    server->n_pages = (uint32_t)n_pages;
    if (srv_log_level_by_name(config->log_level) < 0)
        return srv_fail(err, DSA_E_BAD_REQUEST, "log-level", "%s", config->log_level,
                        "give error, warn, info, debug or trace");
    if (srv_log_format_by_name(config->log_format) < 0)
        return srv_fail(err, DSA_E_BAD_REQUEST, "log-format", "%s", config->log_format, "give text or json");
    return DSA_OK;
}

/* Clients get the path of the fd socket, and have another working directory. */
static dsa_status absolute_path(const char *flag, const char *path, char *out, size_t size,
                                struct srv_err *err)
{
    char here[PATH_MAX] = "";

    if (path[0] != '/' && !getcwd(here, sizeof(here) - 1))
        return srv_fail(err, DSA_E_SYSTEM, flag, "%s", path, "cannot tell the working directory");
    if (here[0] != '\0')
        strcat(here, "/");
    if (strlen(here) + strlen(path) >= size)
        return srv_fail(err, DSA_E_BAD_REQUEST, flag, "%s", path, "a socket path has at most 107 bytes");
    strcpy(out, here);
    strcat(out, path);
    return DSA_OK;
}

static dsa_status check_addresses(const struct srv_config *config, struct srv_err *err)
{
    const char *const settings[][2] = {
        {"tcp", config->tcp}, {"http", config->http}, {"health", config->health}};
    struct sockaddr_storage address;
    socklen_t n;
    dsa_status rc = DSA_OK;

    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]) && rc == DSA_OK; i++)
        if (settings[i][1][0] != '\0')
            rc = srv_address_parse(settings[i][0], settings[i][1], &address, &n, err);
    return rc;
}

static dsa_status derive_paths(struct server *server, struct srv_err *err)
{
    const struct srv_config *config = &server->config;
    dsa_status rc = check_addresses(config, err);

    if (rc != DSA_OK)
        return rc;

    if (strcmp(config->listen, "none") == 0) {
        if (config->tcp[0] == '\0')
            return srv_fail(err, DSA_E_BAD_REQUEST, "listen", "%s", "none",
                            "nothing to listen on; give --tcp");
        return DSA_OK;
    }
    if (strncmp(config->listen, "unix:", 5) != 0 || config->listen[5] == '\0')
        return srv_fail(err, DSA_E_BAD_REQUEST, "listen", "%s", config->listen, "write unix:/path or none");
    rc = absolute_path("listen", config->listen + 5, server->unix_path, sizeof(server->unix_path), err);
    if (rc != DSA_OK)
        return rc;
    if (config->fd_socket[0] != '\0')
        return absolute_path("fd-socket",
                             config->fd_socket + (strncmp(config->fd_socket, "unix:", 5) == 0 ? 5 : 0),
                             server->fd_path, sizeof(server->fd_path), err);
    if (snprintf(server->fd_path, sizeof(server->fd_path), "%s.fd", server->unix_path)
        >= (int)sizeof(server->fd_path))
        return srv_fail(err, DSA_E_BAD_REQUEST, "listen", "%s", config->listen,
                        "too long for the fd socket's \".fd\"");
    return DSA_OK;
}

static dsa_status parse_isa(const char *name, int32_t *isa_p, struct srv_err *err)
{
    static const struct {
        const char *name;
        int32_t isa;
    } table[] = {{"auto", DSK_ISA_AUTO},
                 {"generic", DSK_ISA_GENERIC},
                 {"avx2", DSK_ISA_AVX2},
                 {"avx512", DSK_ISA_AVX512},
                 {"avx512bf16", DSK_ISA_AVX512_BF16}};

    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        if (strcmp(table[i].name, name) == 0) {
            *isa_p = table[i].isa;
            return DSA_OK;
        }
    }
    return srv_fail(err, DSA_E_BAD_REQUEST, "cpu-isa", "%s", name,
                    "give auto, generic, avx2, avx512 or avx512bf16");
}

/* ---- the worker and its bell -------------------------------------------------------------------------- */

static void wake_loop(void *arg)
{
    struct server *server = arg;

    rpc_bell_ring(server->worker_bell);
}

/* Answers that can be on their way at a time: the longest request must fit, and the queue sixteen pieces deep. */
static uint32_t count_pieces(const struct srv_config *config)
{
    uint64_t longest = (config->max_rows + config->chunk_rows - 1) / config->chunk_rows;

    return (uint32_t)(config->max_queue * 16 > longest ? config->max_queue * 16 : longest);
}

static dsa_status start_worker(struct server *server, struct srv_err *err)
{
    const struct srv_config *config = &server->config;
    uint32_t max_pieces = count_pieces(config);
    struct srv_worker_config worker = {
        .device = {.kind = device_kind(config),
                   .ordinal = (int32_t)config->device_ordinal,
                   .n_threads = (int32_t)config->cpu_threads},
        .layout = server->layout,
        .raw_scale = (float)config->raw_scale,
        .n_layers = (uint32_t)config->layers,
        .n_pages = server->n_pages,
        .max_sequences = (uint32_t)config->max_sequences
                         * (config->max_sessions < 16 ? (uint32_t)config->max_sessions : 16),
        .max_sequences_per_session = (uint32_t)config->max_sequences,
        .max_sequence_tokens = config->max_sequence_tokens,
        .max_queue = (uint32_t)config->max_queue,
        .max_pieces = max_pieces + (uint32_t)config->max_queue * 2, /* and the ends of sessions */
        .max_segments = (uint32_t)config->max_segments,
        .max_topk = (uint32_t)config->max_topk,
        .max_append_tokens = (uint32_t)config->max_append_rows,
        .batch_rows = (uint32_t)config->batch_rows,
        .chunk_rows = (uint32_t)config->chunk_rows,
        .spin_us = config->worker_spin_us,
        .wake = wake_loop,
        .wake_arg = server,
    };
    dsa_status rc = parse_isa(config->cpu_isa, &worker.device.isa, err);

    if (rc != DSA_OK)
        return rc;
    server->svc->max_pieces = max_pieces;
    return srv_worker_start(&worker, &server->svc->worker, err);
}

/* ---- drain ------------------------------------------------------------------------------------------------ */

static void enter_phase(struct server *server, enum phase phase, uint64_t length_us)
{
    server->phase = phase;
    server->phase_ends_us = srv_now_us() + length_us;
}

static void close_sockets(struct server *server)
{
    srv_security_drain(&server->security);
    srv_listener_close(server->unix_listener);
    srv_listener_close(server->tcp_listener);
    srv_listener_close(server->health_listener);
    srv_fdsock_close(server->fdsock);
    server->unix_listener = server->tcp_listener = server->health_listener = NULL;
    server->fdsock = NULL;
}

/* Runs every few milliseconds while draining. Each phase ends when its work is done or its time is up. */
static void on_drain_tick(void *arg)
{
    struct server *server = arg;
    bool is_late = srv_now_us() >= server->phase_ends_us;

    if (server->phase == DRAINING && (svc_is_idle(server->svc) || is_late)) {
        if (is_late && !svc_is_idle(server->svc))
            srv_log(SRV_LOG_WARN, "grace is over, work is cut off jobs=%" PRIu32, server->svc->n_jobs);
        svc_close_sessions(server->svc);
        close_sockets(server);
        rpc_shutdown(server->rpc);
        enter_phase(server, SAYING_GOODBYE, GOAWAY_US);
    } else if (server->phase == SAYING_GOODBYE && !rpc_is_down(server->rpc) && is_late) {
        rpc_cancel_all(server->rpc);
        enter_phase(server, CANCELLING, GOAWAY_US);
    } else if (server->phase == CANCELLING && !rpc_is_down(server->rpc) && is_late) {
        rpc_cut(server->rpc);
        enter_phase(server, CUTTING, GOAWAY_US);
    }
    if (server->phase >= SAYING_GOODBYE && rpc_is_down(server->rpc) && svc_is_idle(server->svc)
        && !server->svc->leases)
        srv_loop_stop(server->loop);
}

/* A Drain and the SIGTERM that follows it (preStop) are one wish: the earlier end of the two graces holds. */
static void begin_drain(void *arg, uint64_t grace_us)
{
    struct server *server = arg;
    uint64_t ends_us = srv_now_us() + grace_us;

    if (server->phase != SERVING) {
        if (server->phase == DRAINING && ends_us < server->phase_ends_us)
            server->phase_ends_us = ends_us;
        srv_log(SRV_LOG_INFO, "draining already jobs=%" PRIu32, server->svc->n_jobs);
        return;
    }
    srv_log(SRV_LOG_INFO, "draining jobs=%" PRIu32 " grace_us=%" PRIu64, server->svc->n_jobs, grace_us);
    svc_begin_drain(server->svc);
    enter_phase(server, DRAINING, grace_us);
    if (srv_timer_start(server->loop, 0, DRAIN_TICK_US, on_drain_tick, server, &server->drain_tick) != DSA_OK)
        srv_loop_stop(server->loop);
}

/* ---- reload ----------------------------------------------------------------------------------------------- */

/* What does not read the configuration where it lies. */
static void pass_on_settings(struct server *server)
{
    const struct srv_config *config = &server->config;

    apply_log_settings(config);
    server->svc->inline_flops = device_kind(config) == DSK_DEVICE_CPU ? config->inline_flops : 0;
    srv_counter_set(&server->health.watchdog_us, config->watchdog_us);
    svc_config_changed(server->svc);
}

/* Everything is read again and checked as at the start, aside: a mistake changes nothing. */
static void reload_settings(struct server *server)
{
    static struct server next;
    enum srv_config_action action;
    struct srv_err err = {0};

    memset(&next, 0, sizeof(next));
    if (srv_config_read(&next.config, server->argc, server->argv, environ, &action, &err) != DSA_OK
        || derive_config(&next, &err) != DSA_OK || derive_paths(&next, &err) != DSA_OK) {
        srv_reload_refuse(&err);
        return;
    }
    srv_reload_apply(&server->config, &server->started, &next.config);
    pass_on_settings(server);
}

static void on_signal(void *arg, int signum)
{
    struct server *server = arg;

    if (signum == SIGHUP) {
        reload_settings(server);
        srv_security_reload(&server->security,
                            NULL); /* certificates and tokens, whatever the settings are worth */
    } else if (server->n_stop_signals++ == 0) {
        begin_drain(server, server->config.drain_grace_us);
    } else {
        srv_log(SRV_LOG_INFO, "signalled again, the grace ends now");
        server->phase_ends_us = 0;
    }
}

static void on_tick(void *arg)
{
    struct server *server = arg;
    struct srv_gauges *gauges = &server->metrics.gauges;

    svc_tick(server->svc);
    if (server->security.tls) {
        int64_t expiry_s = srv_tls_expiry_s(server->security.tls);

        srv_counter_set(&gauges->tls_expiry_s, expiry_s > 0 ? (uint64_t)expiry_s : 0);
        srv_counter_set(&gauges->tls_reload_failures, srv_tls_reload_failures(server->security.tls));
    }
    srv_log_flush(false);
    if (server->n_ticks++ % TICKS_PER_COUNT == 0)
        srv_counter_set(&gauges->connections, srv_listener_count(server->unix_listener)
                                                  + srv_listener_count(server->tcp_listener)
                                                  + srv_listener_count(server->health_listener));
}

/* ---- start ------------------------------------------------------------------------------------------------- */

static bool settle(void *arg, bool is_busy)
{
    return svc_settle(((struct server *)arg)->svc, is_busy);
}

static void set_sleeping(void *arg, bool is_sleeping)
{
    svc_set_sleeping(((struct server *)arg)->svc, is_sleeping);
}

static bool admit(struct rpc_call *call)
{
    struct svc *svc = rpc_call_service(call);
    dsa_status rc = srv_security_admit(svc->security, call);

    srv_metrics_refused(svc->metrics, rc);
    return rc == DSA_OK;
}

static dsa_status start_rpc(struct server *server, struct srv_err *err)
{
    const struct srv_config *config = &server->config;
    struct rpc_config rpc = {
        .service = server->svc,
        .admit = admit,
        .ended = svc_call_ended,
        .max_message_bytes = config->max_message_bytes,
        .max_streams = (uint32_t)config->max_streams,
        .stall_timeout_us = config->stall_timeout_us,
    };
    struct srv_loop_hooks hooks = {server, settle, set_sleeping};
    dsa_status rc;

    rpc.methods = svc_methods(&rpc.n_methods);
    if ((rc = rpc_create(&rpc, &server->rpc, err)) != DSA_OK)
        return rc;
    server->svc->rpc = server->rpc;
    if (rpc_bell_create(server->rpc, &server->worker_bell) != DSA_OK)
        return srv_fail(err, DSA_E_NO_MEMORY, "worker", "%s", "", "no memory for a doorbell");
    rc = srv_loop_create(server->rpc, config->spin_us, &hooks, &server->loop, err);
    server->svc->loop = server->loop;
    if (rc == DSA_OK)
        rc = srv_security_start(&server->security, config, server->loop, server->rpc, err);
    return rc;
}

static void add_local(void *arg, int fd)
{
    rpc_add_fd(((struct server *)arg)->rpc, fd, RPC_ORIGIN_UNIX);
}

static void add_health(void *arg, int fd)
{
    rpc_add_fd(((struct server *)arg)->rpc, fd, RPC_ORIGIN_HEALTH);
}

static dsa_status open_sockets(struct server *server, struct srv_err *err)
{
    const struct srv_config *config = &server->config;
    struct srv_listener_config listener = {
        .flag = "listen",
        .socket_type = SOCK_STREAM,
        .mode = (unsigned)config->socket_mode,
        .owner = &server->security.owner,
        .max_connections = (uint32_t)config->max_connections,
        .accept = add_local,
        .arg = server,
    };
    struct srv_fdsock_config fdsock = {
        server->fd_path, (unsigned)config->socket_mode, (uint32_t)config->max_connections, svc_session_offer,
        server->svc,     &server->security.owner};
    dsa_status rc = DSA_OK;

    listener.unix_path = server->unix_path;
    if (server->unix_path[0] != '\0')
        rc = srv_listener_open(server->loop, &listener, &server->unix_listener, err);
    if (rc == DSA_OK && server->fd_path[0] != '\0')
        rc = srv_fdsock_open(server->loop, &fdsock, &server->fdsock, err);
    listener.unix_path = NULL;
    listener.flag = "tcp";
    listener.tcp = config->tcp;
    listener.is_encrypted = server->security.tls != NULL;
    listener.accept = srv_security_accept;
    listener.arg = &server->security;
    if (rc == DSA_OK && config->tcp[0] != '\0')
        rc = srv_listener_open(server->loop, &listener, &server->tcp_listener, err);
    listener.flag = "health";
    listener.tcp = config->health;
    listener.accept = add_health;
    listener.arg = server;
    listener.is_public = true;
    listener.is_encrypted = false;
    if (rc == DSA_OK && config->health[0] != '\0')
        rc = srv_listener_open(server->loop, &listener, &server->health_listener, err);
    return rc;
}

/* First of all, so that a start that takes long can be watched. */
static dsa_status start_http(struct server *server, struct srv_err *err)
{
    struct srv_http_config http = {server->config.http, &server->health, &server->metrics};
    struct srv_metrics *metrics = &server->metrics;

    metrics->methods = svc_methods(&metrics->n_methods);
    metrics->n_pages = server->n_pages;
    strcpy(metrics->layout, server->config.layout);
    strcpy(metrics->device, server->config.device);
    srv_counter_set(&server->health.watchdog_us, server->config.watchdog_us);
    return server->config.http[0] != '\0' ? srv_http_start(&http, &server->http, err) : DSA_OK;
}

static dsa_status start_timers(struct server *server, struct srv_err *err)
{
    static const int signals[] = {SIGTERM, SIGINT, SIGHUP};

    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++)
        if (srv_loop_on_signal(server->loop, signals[i], on_signal, server) != DSA_OK)
            return srv_fail(err, DSA_E_SYSTEM, "signal", "%d", signals[i], "cannot watch the signal");
    if (srv_timer_start(server->loop, TICK_US, TICK_US, on_tick, server, &server->tick) != DSA_OK)
        return srv_fail(err, DSA_E_NO_MEMORY, "timer", "%s", "", "no memory for a timer");
    return DSA_OK;
}

static void block_signals(int how)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    pthread_sigmask(how, &set, NULL);
}

static dsa_status start(struct server *server, struct srv_err *err)
{
    dsa_status rc;

    if ((rc = derive_config(server, err)) != DSA_OK || (rc = derive_paths(server, err)) != DSA_OK
        || (rc = srv_security_init(&server->security, &server->config, err)) != DSA_OK
        || (rc = start_http(server, err)) != DSA_OK
        || (rc = svc_create(&server->config, &server->metrics, &server->health, &server->svc, err)) != DSA_OK)
        return rc;
    server->svc->security = &server->security;
    wire_keep_blocks(SPARE_BLOCKS);
    server->svc->layout = dsk_layout_get(server->layout);
    server->svc->n_pages = server->n_pages;
    server->svc->write_rule = server->write_rule;
    server->svc->inline_flops =
        device_kind(&server->config) == DSK_DEVICE_CPU ? server->config.inline_flops : 0;
    server->svc->fd_socket = server->fd_path;
    server->svc->version = DSA_VERSION_STRING;
    server->svc->on_drain = begin_drain;
    server->svc->on_drain_arg = server;
    if (!srv_descriptors_load())
        return srv_fail(err, DSA_E_INTERNAL, "descriptors", "%s", "",
                        "the embedded descriptor set is damaged");
    if ((rc = start_worker(server, err)) != DSA_OK || (rc = start_rpc(server, err)) != DSA_OK
        || (rc = start_timers(server, err)) != DSA_OK)
        return rc;
    atomic_store(&server->metrics.worker, server->svc->worker);
    if ((rc = open_sockets(server, err)) != DSA_OK)
        return rc;
    server->started = server->config;
    on_tick(server); /* so that the first who asks gets numbers */
    atomic_store(&server->health.is_started, true);
    return DSA_OK;
}

/* After the loop: every call is gone, the worker has nothing left. */
static void stop(struct server *server)
{
    srv_timer_close(server->drain_tick);
    srv_http_stop(server->http);
    srv_worker_stop(server->svc->worker);
    svc_settle(server->svc, true);
    srv_security_stop(&server->security);
    srv_loop_destroy(server->loop);
    rpc_bell_destroy(server->worker_bell);
    rpc_destroy(server->rpc);
    srv_worker_free(server->svc->worker);
    svc_destroy(server->svc);
    wire_keep_blocks(0);
    srv_descriptors_unload();
    srv_security_fini(&server->security);
}

static void report(const struct server *server)
{
    const struct dsk_device_info *info = srv_worker_device(server->svc->worker);

    srv_log(SRV_LOG_INFO,
            "serving version=%s device=%s name=\"%s\" threads=%d layout=%s layers=%" PRIu64 " pages=%" PRIu32
            " listen=%s fd_socket=%s tcp=%s",
            DSA_VERSION_STRING, info->uuid, info->name, (int)info->n_threads, server->svc->layout->name,
            server->config.layers, server->n_pages, server->config.listen,
            server->fd_path[0] != '\0' ? server->fd_path : "none",
            server->config.tcp[0] != '\0' ? server->config.tcp : "none");
    if (server->tcp_listener)
        srv_log(SRV_LOG_INFO, "tcp port=%d tls=%s", srv_listener_port(server->tcp_listener),
                server->security.tls ? "on" : "off");
    if (server->health_listener)
        srv_log(SRV_LOG_INFO, "health port=%d", srv_listener_port(server->health_listener));
    if (server->http)
        srv_log(SRV_LOG_INFO, "http port=%d", srv_http_port(server->http));
}

static int fail(const struct srv_err *err)
{
    if (srv_log_get_format() == SRV_LOG_JSON) /* a collector reads, no one who typed a command */
        srv_log(SRV_LOG_ERROR, "cannot start reason=%s field=%s value=%s text=\"%s\" rule=%s",
                srv_status_reason(err->code), err->field, err->value, err->text,
                err->rule[0] != '\0' ? err->rule : NULL);
    else
        fprintf(stderr, "dsad: %s: %s%s%s%s%s\n", srv_status_reason(err->code), err->field,
                err->value[0] ? "=" : "", err->value, err->field[0] ? ": " : "", err->text);
    if (err->rule[0] != '\0' && srv_log_get_format() != SRV_LOG_JSON)
        fprintf(stderr, "dsad: refused by support rule %s\n", err->rule);
    return err->code == DSA_E_BAD_REQUEST || err->code == DSA_E_BAD_LAYOUT || err->code == DSA_E_UNSUPPORTED
               ? 2
               : 1;
}

static int serve(struct server *server)
{
    struct srv_err err = {0};
    dsa_status rc;

    apply_log_settings(&server->config);
    signal(SIGPIPE, SIG_IGN); /* a log reader or a client that is gone is no reason to end */
    block_signals(SIG_BLOCK); /* the loop's thread alone takes them */
    rpc_init();
    rc = start(server, &err);
    if (rc != DSA_OK) {
        int code = fail(&err);

        close_sockets(server);
        fflush(NULL);
        _exit(code); /* threads that were started end with the process */
    }
    block_signals(SIG_UNBLOCK);
    report(server);
    srv_loop_run(server->loop);
    stop(server);
    srv_log(SRV_LOG_INFO, "stopped");
    srv_log_flush(true);
#if defined(DSA_SANITIZE_address) || defined(DSA_SANITIZE_thread)
    rpc_fini(); /* leaves nothing behind for a sanitizer to find */
    return 0;
#else
    fflush(NULL);
    _exit(
        0); /* not rpc_fini, which can take seconds; and no destructors under gRPC's threads that still run */
#endif
}

/* Everything that can be said without opening a device or a socket. */
static int check(struct server *server)
{
    struct srv_err err = {0};

    if (derive_config(server, &err) != DSA_OK || derive_paths(server, &err) != DSA_OK
        || srv_security_init(&server->security, &server->config, &err) != DSA_OK)
        return fail(&err);
    srv_security_fini(&server->security);
    printf("the configuration is sound\n");
    return 0;
}

int main(int argc, char **argv)
{
    static struct server server;
    enum srv_config_action action;
    struct srv_err err = {0};

    server.argc = argc;
    server.argv = argv;
    if (srv_config_read(&server.config, argc, argv, environ, &action, &err) != DSA_OK)
        return fail(&err);
    switch (action) {
    case SRV_CONFIG_HELP:
        srv_config_help(stdout);
        return 0;
    case SRV_CONFIG_VERSION:
        printf("dsad %s\n", DSA_VERSION_STRING);
        return 0;
    case SRV_CONFIG_PRINT:
        srv_config_print(&server.config, stdout);
        return 0;
    case SRV_CONFIG_CHECK:
        return check(&server);
    case SRV_CONFIG_RUN:
        break;
    }
    return serve(&server);
}
