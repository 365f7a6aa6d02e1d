/* svc.c - the frame of the service: leases, requests, and the table of methods. */
#include "server/svc.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/clock.h"
#include "server/log.h"
#include "server/status.h"

#define UNSENT_PATIENCE_US 1000000

/* Client memory mapped at a time, all sessions together: what a 47-bit address space has room for. One region has a limit of its
 * own (max-region-bytes). */
#define MAX_MAPPED_BYTES (UINT64_C(1) << 46)

/* ---- the methods -------------------------------------------------------------------------------- */

/* While messages keep coming L runs only what costs less than waking the worker would: this share of inline-flops. */
#define WAKE_SHARE 16

#define SA "/dsa.v1.SparseAttention/"
#define UNARY(method, handler)                                                                               \
    {                                                                                                        \
        .path = method, .shape = RPC_UNARY, .message = handler                                               \
    }
#define UNARY_ON_WORKER(method, handler)                                                                     \
    {                                                                                                        \
        .path = method, .shape = RPC_UNARY, .message = handler, .closed = svc_request_call_closed            \
    }
#define REFLECTION(version)                                                                                  \
    {                                                                                                        \
        .path = "/grpc.reflection." version ".ServerReflection/ServerReflectionInfo", .shape = RPC_STREAM,   \
        .message = svc_reflect, .half_close = svc_reflect_half_close, .drained = svc_reflect_drained         \
    }

#define METHOD_ATTEND 0

static const struct rpc_method methods[] = {
    {.path = SA "Attend",
     .shape = RPC_STREAM,
     .open = svc_attend_open,
     .message = svc_attend_message,
     .half_close = svc_attend_half_close,
     .drained = svc_attend_drained,
     .closed = svc_attend_closed},
    UNARY_ON_WORKER(SA "Append", svc_append),
    UNARY_ON_WORKER(SA "CreateSequence", svc_create_sequence),
    UNARY_ON_WORKER(SA "ForkSequence", svc_fork_sequence),
    UNARY_ON_WORKER(SA "TruncateSequence", svc_truncate_sequence),
    UNARY_ON_WORKER(SA "ReleaseSequence", svc_release_sequence),
    UNARY_ON_WORKER(SA "GetSequence", svc_get_sequence),
    UNARY_ON_WORKER(SA "ImportRows", svc_import_rows),
    {.path = SA "ExportRows",
     .shape = RPC_SERVER_STREAM,
     .message = svc_export_rows,
     .drained = svc_export_drained,
     .closed = svc_export_closed},
    {.path = SA "OpenSession",
     .shape = RPC_STREAM,
     .open = svc_session_open,
     .message = svc_session_message,
     .half_close = svc_session_half_close,
     .closed = svc_session_closed},
    UNARY(SA "RegisterRegion", svc_register_region),
    UNARY(SA "UnregisterRegion", svc_unregister_region),
    UNARY(SA "GetCapabilities", svc_get_capabilities),
    UNARY_ON_WORKER(SA "GetStats", svc_get_stats),
    UNARY(SA "Drain", svc_drain),
    UNARY("/grpc.health.v1.Health/Check", svc_health_check),
    {.path = "/grpc.health.v1.Health/Watch",
     .shape = RPC_SUBSCRIPTION,
     .message = svc_health_watch,
     .closed = svc_health_watch_closed},
    REFLECTION("v1"),
    REFLECTION("v1alpha"),
};

const struct rpc_method *svc_methods(size_t *n_methods_p)
{
    *n_methods_p = sizeof(methods) / sizeof(methods[0]);
    return methods;
}

/* ---- leases -------------------------------------------------------------------------------------- */

dsa_status svc_lease_find(struct svc *svc, const ProtobufCBinaryData *token, struct svc_lease **lease_p,
                          struct srv_err *err)
{
    struct srv_session *session;
    dsa_status rc = srv_session_find(svc->sessions, token->data, token->len, &session, err);

    if (rc == DSA_OK)
        *lease_p = session->stream;
    else if (
        svc->is_draining) /* it may have been ended for that, which is nothing that the client did wrong */
        return srv_fail(err, DSA_E_DRAINING, "session", "%s", "", "the server is going down");
    return rc;
}

static void lease_free(struct svc_lease *lease)
{
    if (lease->prev)
        lease->prev->next = lease->next;
    else
        lease->svc->leases = lease->next;
    if (lease->next)
        lease->next->prev = lease->prev;
    free(lease);
}

/* The worker gives everything back once no request of the session is in flight. */
static void lease_end_if_quiet(struct svc_lease *lease)
{
    struct svc *svc = lease->svc;

    if (!lease->is_closing || lease->requests)
        return;
    lease->end_job.op = SRV_OP_END_SESSION;
    lease->end_job.session = lease->number;
    lease->end_job.arrival_us = srv_now_us();
    lease->end_job.node.deadline_us = UINT64_MAX;
    lease->end_job.pieces = &lease->end_piece;
    lease->end_job.n_pieces = 1;
    lease->end_job.owner = lease;
    if (srv_worker_submit(svc->worker, &lease->end_job)) {
        svc->n_ends_waiting -= lease->end_waits;
        lease->end_waits = false;
        svc->n_unkicked++;
    } else if (!lease->end_waits) {
        lease->end_waits = true;
        svc->n_ends_waiting++;
    }
}

static void close_tickets(struct svc_lease *lease)
{
    struct svc_ticket *ticket;

    while ((ticket = lease->tickets) != NULL) {
        lease->tickets = ticket->next;
        close(ticket->fd);
        free(ticket);
    }
    lease->n_tickets = 0;
}

static void tell_closing(struct svc_lease *lease, const struct srv_err *reason)
{
    Dsa__V1__SessionEvent event = DSA__V1__SESSION_EVENT__INIT;
    Dsa__V1__SessionClosing closing = DSA__V1__SESSION_CLOSING__INIT;
    Dsa__V1__Status status;

    if (!reason) {
        rpc_finish(lease->call, 0, "", NULL, 0);
        return;
    }
    wire_status(reason, &status);
    closing.status = &status;
    event.kind_case = DSA__V1__SESSION_EVENT__KIND_CLOSING;
    event.closing = &closing;
    if (!wire_send(lease->call, &event.base))
        srv_log(SRV_LOG_WARN, "cannot tell a client why its session ends session=%" PRIu64, lease->number);
    wire_fail(lease->call, reason);
}

void svc_lease_close(struct svc_lease *lease, const struct srv_err *reason)
{
    struct svc *svc = lease->svc;
    struct svc_request *request;

    if (lease->is_closing)
        return;
    lease->is_closing = true;
    srv_log(SRV_LOG_INFO, "session ends session=%" PRIu64 " client=\"%s\" reason=\"%s\"", lease->number,
            lease->session->name, reason ? reason->text : "client closed it");
    svc->counters.n_reclaimed += reason != NULL;
    for (request = lease->requests; request; request = request->next)
        svc_request_cancel(request);
    srv_regions_drop_session(svc->regions, lease->number);
    close_tickets(lease);
    srv_session_close(svc->sessions, lease->session);
    lease->session = NULL;
    if (lease->call) {
        tell_closing(lease, reason);
        rpc_call_set_data(lease->call, NULL); /* the call may outlive the lease */
        lease->call = NULL;
    }
    lease_end_if_quiet(lease);
}

/* ---- requests ------------------------------------------------------------------------------------ */

struct svc_request *svc_request_create(struct svc_lease *lease, struct wire_arena *arena,
                                       struct rpc_call *call, enum srv_op op)
{
    struct svc_request *request = wire_arena_get(arena, sizeof(*request));

    if (!request) {
        wire_arena_free(arena);
        return NULL;
    }
    request->svc = lease->svc;
    request->lease = lease;
    request->arena = arena;
    request->call = call;
    request->job.op = op;
    request->job.session = lease->number;
    request->job.arrival_us = srv_now_us();
    request->job.node.deadline_us = UINT64_MAX;
    request->job.owner = request;
    atomic_init(&request->job.cancelled, false);
    return request;
}

void svc_request_hold(struct svc_request *request, struct srv_region *region)
{
    if (!region)
        return;
    SRV_ASSERT(request->n_regions < SVC_MAX_REGIONS);
    request->regions[request->n_regions++] = region;
}

struct wire_regions svc_request_regions(const struct svc_request *request)
{
    struct wire_regions regions = {
        .regions = request->svc->regions,
        .session = request->lease->number,
        .max_inline_bytes = request->svc->config->max_inline_bytes,
    };

    return regions;
}

/* A look at the server is always answered, and an export that was begun may end: both have room in the rings beside the limits. */
static dsa_status admit(const struct svc_request *request, uint32_t n_pieces, struct srv_err *err)
{
    struct svc *svc = request->svc;
    enum srv_op op = request->job.op;
    uint64_t held = svc->waiting_bytes;

    if (op == SRV_OP_STATS)
        return DSA_OK;
    if (svc->is_draining && !request->is_begun)
        return srv_fail(err, DSA_E_DRAINING, "", "%s", "", "the server is going down");
    if (srv_worker_is_lost(svc->worker))
        return srv_fail(err, DSA_E_DEVICE_LOST, "", "%s", "", "the device failed; restart the server");
    /* What clients have not read is memory too. It holds back only who would add to it: results by region go on. */
    if (request->buffer && !request->is_begun)
        held += rpc_all_queued_bytes(svc->rpc);
    if (held > 0 && held + request->bytes > svc->config->max_queue_bytes) {
        srv_fail(err, DSA_E_QUEUE_FULL, "", "%" PRIu64 " bytes", held,
                 "messages and inline results that wait or are not yet read may take %" PRIu64
                 " bytes; use regions",
                 svc->config->max_queue_bytes);
        err->retry_after_us = 1000;
        return DSA_E_QUEUE_FULL;
    }
    if (svc->n_jobs < svc->config->max_queue && svc->n_pieces + n_pieces <= svc->max_pieces)
        return DSA_OK;
    srv_fail(err, DSA_E_QUEUE_FULL, "", "%" PRIu32, svc->n_jobs, "%" PRIu64 " jobs may wait for a device",
             svc->config->max_queue);
    err->retry_after_us = 1000;
    return DSA_E_QUEUE_FULL;
}

dsa_status svc_request_submit(struct svc_request *request, uint32_t n_accesses, uint32_t n_pieces,
                              struct srv_err *err)
{
    struct svc *svc = request->svc;
    struct srv_job *job = &request->job;
    dsa_status rc = admit(request, n_pieces, err);

    if (rc != DSA_OK)
        return rc;
    job->node.accesses = job->accesses;
    job->node.n_accesses = n_accesses;
    job->n_pieces = n_pieces;
    job->pieces = wire_arena_get(request->arena, sizeof(*job->pieces) * n_pieces);
    if (!job->pieces)
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for the request");
    if (!srv_worker_submit(svc->worker, job)) {
        srv_fail(err, DSA_E_QUEUE_FULL, "", "%" PRIu32, svc->n_jobs, "the worker's ring is full");
        err->retry_after_us = 1000;
        return DSA_E_QUEUE_FULL;
    }
    request->next = request->lease->requests;
    if (request->next)
        request->next->prev = request;
    request->lease->requests = request;
    svc->n_jobs++;
    svc->n_pieces += n_pieces;
    svc->waiting_bytes += request->bytes;
    svc->waiting_rows += job->node.n_rows;
    svc->n_unkicked++;
    svc->unkicked_cost += request->cost;
    return DSA_OK;
}

void svc_request_cancel(struct svc_request *request)
{
    atomic_store_explicit(&request->job.cancelled, true, memory_order_relaxed);
    srv_worker_note_cancel(request->svc->worker);
}

void svc_request_free(struct svc_request *request)
{
    for (uint32_t i = 0; i < request->n_regions; i++)
        srv_region_put(request->svc->regions, request->regions[i]);
    free(request->buffer);
    wire_arena_free(request->arena); /* the request itself lies in it */
}

static void finish_request(struct svc_request *request)
{
    struct svc_lease *lease = request->lease;
    struct svc *svc = request->svc;

    if (request->prev)
        request->prev->next = request->next;
    else
        lease->requests = request->next;
    if (request->next)
        request->next->prev = request->prev;
    svc->n_jobs--;
    svc->n_pieces -= request->job.n_pieces;
    svc->waiting_bytes -= request->bytes;
    svc->waiting_rows -= request->job.node.n_rows;
    svc_request_free(request);
    lease_end_if_quiet(lease);
}

/* An end that found no place in the queue is sent again: a session's pages are never given up. */
static void end_session_done(struct svc_lease *lease, const struct srv_piece *piece)
{
    if (piece->err.code != DSA_E_QUEUE_FULL && piece->err.code != DSA_E_NO_MEMORY) {
        lease_free(lease);
        return;
    }
    lease->end_job.i_piece = 0;
    if (!lease->end_waits) {
        lease->end_waits = true;
        lease->svc->n_ends_waiting++;
    }
}

static void take_piece(struct svc *svc, struct srv_piece *piece)
{
    struct srv_job *job = piece->job;
    struct svc_request *request = job->owner;
    bool is_last = piece->is_last;

    if (job->op == SRV_OP_END_SESSION) {
        end_session_done(job->owner, piece);
        return;
    }
    svc->counters.n_invalid += piece->n_invalid;
    svc->counters.n_nonfinite += piece->n_nonfinite;
    if (is_last && request->call)
        svc_note_job(request->call, job);
    request->on_piece(request, piece);
    if (is_last)
        finish_request(request);
}

/* ---- hooks of the loop --------------------------------------------------------------------------- */

static void retry_ends(struct svc *svc)
{
    for (struct svc_lease *lease = svc->leases; lease && svc->n_ends_waiting > 0; lease = lease->next)
        if (lease->end_waits)
            lease_end_if_quiet(lease);
}

bool svc_settle(struct svc *svc, bool is_busy)
{
    struct srv_piece *piece;
    bool worked = false;

    if (svc->n_ends_waiting > 0)
        retry_ends(svc);
    if (svc->n_unkicked > 0) {
        uint64_t limit = is_busy ? svc->inline_flops / WAKE_SHARE : svc->inline_flops;
        bool is_small = svc->unkicked_cost < limit;

        svc->n_unkicked = 0;
        svc->unkicked_cost = 0;
        if (!is_small || !srv_worker_try_step(svc->worker))
            srv_worker_kick(svc->worker);
    }
    while ((piece = srv_worker_pop(svc->worker)) != NULL) {
        take_piece(svc, piece);
        worked = true;
    }
    if (srv_worker_is_lost(svc->worker)
        && !atomic_load_explicit(&svc->health->is_lost, memory_order_relaxed)) {
        atomic_store(&svc->health->is_lost, true);
        svc_health_changed(svc);
    }
    /* Answers may have led to new jobs; they are passed on in the next round. */
    return worked || svc->n_unkicked > 0;
}

/* Plain stores: nothing beside the system call that follows. */
static void publish(const struct svc *svc)
{
    struct srv_gauges *gauges = &svc->metrics->gauges;
    uint32_t n_pending = srv_regions_pending(svc->regions);

    srv_counter_set(&gauges->queue_requests, svc->n_jobs);
    srv_counter_set(&gauges->queue_rows, svc->waiting_rows);
    srv_counter_set(&gauges->queue_bytes, svc->waiting_bytes);
    srv_counter_set(&gauges->sessions, srv_sessions_count(svc->sessions));
    srv_counter_set(&gauges->sessions_reclaimed, svc->counters.n_reclaimed);
    srv_counter_set(&gauges->regions_live, srv_regions_count(svc->regions) - n_pending);
    srv_counter_set(&gauges->regions_draining, n_pending);
    srv_counter_set(&gauges->region_bytes, srv_regions_bytes(svc->regions));
    srv_counter_set(&gauges->streams, rpc_call_count(svc->rpc));
    srv_counter_set(&gauges->rows, svc->counters.n_rows);
    srv_counter_set(&gauges->invalid_indices, svc->counters.n_invalid);
    srv_counter_set(&gauges->nonfinite_inputs, svc->counters.n_nonfinite);
}

void svc_set_sleeping(struct svc *svc, bool is_sleeping)
{
    if (is_sleeping)
        publish(svc);
    srv_worker_set_sleeping(svc->worker, is_sleeping);
}

void svc_tick(struct svc *svc)
{
    uint64_t now = srv_now_us();
    struct srv_session *session;

    while ((session = srv_session_next_expired(svc->sessions, now)) != NULL) {
        struct srv_err reason = {0};

        srv_fail(&reason, DSA_E_SESSION_EXPIRED, "", "%s", "",
                 session->in_grace ? "the grace time after a lost stream is over"
                                   : "no heartbeat came within the lease");
        svc_lease_close(session->stream, &reason);
    }
    rpc_check_stalls(svc->rpc, now);
    srv_health_beat(svc->health, now, srv_counter_get(&srv_worker_get_meter(svc->worker)->busy_since_us));
    svc_health_changed(svc);
    publish(svc); /* a thread that is always busy never sleeps */
}

void svc_call_ended(struct rpc_call *call, int code, uint64_t took_us)
{
    struct svc *svc = rpc_call_service(call);
    size_t method = rpc_call_method(call);

    if (method != METHOD_ATTEND)
        srv_metrics_request(svc->metrics, method, code, took_us);
    svc_call_ended_log(call, code, took_us);
}

void svc_count_attend(struct svc *svc, dsa_status status, uint64_t took_us)
{
    srv_metrics_request(svc->metrics, METHOD_ATTEND, srv_status_grpc_code(status), took_us);
    if (status != DSA_OK)
        srv_metrics_refused(svc->metrics, status);
}

/* ---- life ---------------------------------------------------------------------------------------- */

static struct srv_session_config session_limits(const struct srv_config *config)
{
    struct srv_session_config limits = {
        .max_sessions = (uint32_t)config->max_sessions,
        .default_lease_us = config->lease_us,
        .max_lease_us = config->max_lease_us,
        .max_grace_us = config->max_grace_us,
    };

    return limits;
}

void svc_config_changed(struct svc *svc)
{
    struct srv_session_config sessions = session_limits(svc->config);

    SRV_ASSERT(srv_sessions_set_limits(svc->sessions, &sessions)
               == DSA_OK); /* bounds and lease were checked */
    srv_regions_set_max(svc->regions, (uint32_t)svc->config->max_regions);
    rpc_set_stall_timeout(svc->rpc, svc->config->stall_timeout_us);
}

static dsa_status create_tables(struct svc *svc, struct srv_err *err)
{
    const struct srv_config *config = svc->config;
    struct srv_session_config sessions = session_limits(config);
    dsa_status rc = srv_sessions_create(&sessions, &svc->sessions);

    if (rc == DSA_OK)
        rc = srv_regions_create((uint32_t)config->max_regions, MAX_MAPPED_BYTES, svc_region_release, svc,
                                &svc->regions);
    return rc == DSA_OK ? DSA_OK : srv_fail(err, rc, "service", "%s", "", "%s", srv_status_text(rc));
}

dsa_status svc_create(const struct srv_config *config, struct srv_metrics *metrics, struct srv_health *health,
                      struct svc **svc_p, struct srv_err *err)
{
    struct svc *svc = calloc(1, sizeof(*svc));
    dsa_status rc;

    if (!svc)
        return srv_fail(err, DSA_E_NO_MEMORY, "service", "%s", "", "no memory for the service");
    svc->config = config;
    svc->metrics = metrics;
    svc->health = health;
    svc->start_us = srv_now_us();
    svc->own.svc = svc;
    rc = create_tables(svc, err);
    if (rc != DSA_OK) {
        svc_destroy(svc);
        return rc;
    }
    *svc_p = svc;
    return DSA_OK;
}

void svc_destroy(struct svc *svc)
{
    if (!svc)
        return;
    while (svc->leases)
        lease_free(svc->leases);
    if (svc->sessions)
        srv_sessions_destroy(svc->sessions);
    if (svc->regions)
        srv_regions_destroy(svc->regions);
    free(svc);
}

void svc_begin_drain(struct svc *svc)
{
    if (svc->is_draining)
        return;
    svc->is_draining = true;
    atomic_store(&svc->health->is_draining, true);
    svc_health_changed(svc);
}

void svc_close_sessions(struct svc *svc)
{
    struct srv_err reason = {0};
    struct svc_lease *lease, *next;

    srv_fail(&reason, DSA_E_DRAINING, "", "%s", "", "the server is going down");
    for (lease = svc->leases; lease; lease = next) {
        next = lease->next;
        svc_lease_close(lease, &reason);
    }
}

bool svc_is_idle(const struct svc *svc)
{
    /* An export half way has a chunk at the worker or unsent. A client that does not read must not hold up the end. */
    return svc->n_jobs == 0 && !rpc_has_unsent(svc->rpc, UNSENT_PATIENCE_US);
}

/* ---- the beginning of a unary request ------------------------------------------------------------- */

void svc_refuse(struct rpc_call *call, const struct srv_err *err)
{
    struct svc *svc = rpc_call_service(call);

    svc->counters.n_rejected++;
    srv_metrics_refused(svc->metrics, err->code);
    srv_log(SRV_LOG_DEBUG,
            "request refused method=%s reason=%s field=%s value=%s text=\"%s\" call_id=%" PRIu64
            " trace_id=%s",
            rpc_call_path(call), srv_status_reason(err->code), err->field, err->value, err->text,
            rpc_call_number(call), srv_trace_id(rpc_call_trace(call)));
    wire_fail(call, err);
}

dsa_status svc_check_size(const struct svc *svc, size_t n, struct srv_err *err)
{
    if (n <= svc->config->max_message_bytes)
        return DSA_OK;
    return srv_fail(err, DSA_E_TOO_LARGE, "message", "%zu bytes", n,
                    "at most %" PRIu64 " bytes in one message; put large tensors into a region",
                    svc->config->max_message_bytes);
}

bool svc_begin(struct rpc_call *call, const ProtobufCMessageDescriptor *type, const uint8_t *bytes, size_t n,
               struct wire_arena **arena_p, ProtobufCMessage **message_p)
{
    struct srv_err err = {0};

    if (svc_check_size(rpc_call_service(call), n, &err) == DSA_OK
        && wire_unpack(type, bytes, n, arena_p, message_p, &err) == DSA_OK)
        return true;
    svc_refuse(call, &err);
    return false;
}

bool svc_begin_in_session(struct rpc_call *call, const ProtobufCMessageDescriptor *type, const uint8_t *bytes,
                          size_t n, const ProtobufCBinaryData *(*session_of)(const ProtobufCMessage *),
                          struct wire_arena **arena_p, ProtobufCMessage **message_p,
                          struct svc_lease **lease_p)
{
    struct srv_err err = {0};

    if (!svc_begin(call, type, bytes, n, arena_p, message_p))
        return false;
    if (svc_lease_find(rpc_call_service(call), session_of(*message_p), lease_p, &err) == DSA_OK)
        return true;
    svc_refuse(call, &err);
    wire_arena_free(*arena_p);
    return false;
}

void svc_request_call_closed(struct rpc_call *call, bool is_cancelled)
{
    struct svc_request *request = rpc_call_data(call);

    if (!request)
        return;
    request->call = NULL;
    if (is_cancelled)
        svc_request_cancel(request);
}
