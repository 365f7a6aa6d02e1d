/* svc.h - the service behind the gRPC methods: sessions' belongings, requests on their way to a worker and back.
 * Private to server/svc_*.c and main.c. Everything here is [L]. */
#ifndef SERVER_SVC_H
#define SERVER_SVC_H

#include <stdbool.h>
#include <stdint.h>

#include "server/config.h"
#include "server/core/handle.h"
#include "server/core/rules.h"
#include "server/core/session.h"
#include "server/health.h"
#include "server/job.h"
#include "server/metrics.h"
#include "server/rpc.h"
#include "server/wire.h"
#include "server/worker.h"

struct srv_loop;
struct srv_security;
struct svc_watch; /* a health watcher */

#define SVC_MAX_REGIONS 8 /* tensors of one request */

/* A descriptor that came over the fd socket and that no RegisterRegion has claimed yet. */
struct svc_ticket {
    struct svc_ticket *next;
    uint64_t number;
    int fd;
};

/* What L holds for a session, beyond the session table's row. Lives until the worker has let go of everything. */
struct svc_lease {
    struct svc *svc;
    struct svc_lease *prev, *next;
    struct srv_session *session; /* NULL once closed */
    uint64_t number;
    struct rpc_call *call; /* the OpenSession stream; NULL in grace */
    struct svc_request *requests;
    struct svc_ticket *tickets;
    uint32_t n_tickets;
    bool is_closing;
    bool end_waits; /* the end_job found the ring full */
    struct srv_job end_job;
    struct srv_piece end_piece;
};

/* One request that a worker serves. Allocated in its message's arena, so everything goes together. */
struct svc_request {
    struct srv_job job; /* first: pieces lead back here */
    struct svc *svc;
    struct svc_lease *lease;
    struct svc_request *prev, *next; /* of the lease */
    struct rpc_call *call;           /* NULL once the call is over */
    struct wire_arena *arena;
    struct srv_region *regions[SVC_MAX_REGIONS];
    uint32_t n_regions;
    uint64_t bytes;         /* of the message and of inline results; what waiting costs in memory */
    uint64_t cost;          /* flops, about */
    void *buffer;           /* inline results; freed with the request */
    void *owner;            /* of the method's code */
    bool is_begun;          /* part of something that was admitted before */
    uint64_t request_id;    /* Attend streams: the client's */
    struct srv_trace trace; /* Attend streams: the request's own */
    struct svc_request *stream_prev, *stream_next;
    /* One answer came. Called for each piece; after the last one the request is freed. */
    void (*on_piece)(struct svc_request *request, const struct srv_piece *piece);
};

struct svc_counters {
    uint64_t n_requests, n_rows, n_invalid, n_nonfinite, n_rejected, n_reclaimed;
};

struct svc {
    const struct srv_config *config;
    struct srv_loop *loop;
    struct rpc *rpc;
    struct srv_security *security; /* main's: the door, for the figures that it counts */
    struct srv_worker *worker;
    const struct dsk_layout *layout;
    uint32_t n_pages;
    uint32_t write_rule;
    struct srv_rule_query
        last_served;       /* what the rules accepted last: models ask the same thing again and again */
    uint64_t inline_flops; /* largest job run on L; 0 for devices whose launches L would have to wait for */
    const char *fd_socket; /* path or "" */
    const char *version;
    struct srv_sessions *sessions;
    struct srv_regions *regions;
    struct svc_lease *leases;
    struct svc_lease own; /* what the server itself asks of a worker; number 0, not in the list */
    struct svc_watch *watches;
    struct svc_counters counters;
    struct srv_metrics *metrics;
    struct srv_health *health;
    uint64_t waiting_rows;  /* of the jobs that are not yet back */
    uint64_t waiting_bytes; /* messages and inline results of the jobs that are not yet back */
    uint32_t n_jobs;        /* submitted and not yet back */
    uint32_t n_pieces;      /* pieces they may still send */
    uint32_t max_pieces;
    uint32_t n_ends_waiting;
    uint32_t n_unkicked;
    uint64_t unkicked_cost;
    uint64_t start_us;
    bool is_draining;
    void (*on_drain)(void *arg, uint64_t grace_us); /* the Drain method */
    void *on_drain_arg;
};

/* svc.c */
SRV_MUST_CHECK dsa_status svc_create(const struct srv_config *config, struct srv_metrics *metrics,
                                     struct srv_health *health, struct svc **svc_p, struct srv_err *err);
/* Settings have changed in place (SIGHUP): passes on those that were handed out. All others are read where they are used. */
void svc_config_changed(struct svc *svc);
void svc_destroy(struct svc *svc); /* nothing is in flight any more */
const struct rpc_method *svc_methods(size_t *n_methods_p);
bool svc_settle(struct svc *svc, bool is_busy);           /* loop hook */
void svc_set_sleeping(struct svc *svc, bool is_sleeping); /* loop hook */
void svc_tick(struct svc *svc);                           /* a few times a second: leases, stalls */
void svc_begin_drain(struct svc *svc);                    /* refuse what is new, turn readiness off */
void svc_close_sessions(struct svc *svc);                 /* end every session: what they own goes back */
bool svc_is_idle(const struct svc *svc); /* no request is left, no answer unsent, no export half way */
/* rpc hook: counts the call. Requests of Attend streams are counted one by one instead (svc_count_request). */
void svc_call_ended(struct rpc_call *call, int code, uint64_t took_us);
void svc_count_attend(struct svc *svc, dsa_status status, uint64_t took_us);

/* svc_slow.c: a line for what took longer than slow-request. */
/* Whom a line is about. trace: the request's, else the call's; may be NULL or empty. */
struct svc_about {
    uint64_t call_id, request_id;
    const struct srv_trace *trace;
};
void svc_log_slow_request(const struct svc_request *request, const struct svc_about *about, dsa_status status,
                          uint64_t took_us);
enum svc_note {
    SVC_NOTE_SESSION,
    SVC_NOTE_SEQUENCES,
    SVC_NOTE_ROWS,
    SVC_NOTE_QUEUE_US,
    SVC_NOTE_LAUNCH_US,
    SVC_NOTE_DEVICE_US,
    SVC_NOTE_COPY_US
};
/* A job of the call is back: keeps what the line will say. An export has several jobs. */
void svc_note_job(struct rpc_call *call, const struct srv_job *job);
void svc_call_ended_log(struct rpc_call *call, int code,
                        uint64_t took_us); /* any call; streams are passed over */

/* Finds the lease of a session token. Errors fill err (field "session"). */
SRV_MUST_CHECK dsa_status svc_lease_find(struct svc *svc, const ProtobufCBinaryData *token,
                                         struct svc_lease **lease_p, struct srv_err *err);
/* Ends a session. reason may be NULL (the client asked). */
void svc_lease_close(struct svc_lease *lease, const struct srv_err *reason);

/* A request in the arena of its message. Takes the arena, also on failure (NULL: no memory; arena freed). */
struct svc_request *svc_request_create(struct svc_lease *lease, struct wire_arena *arena,
                                       struct rpc_call *call, enum srv_op op);
/* Notes a region that the request uses; region may be NULL. */
void svc_request_hold(struct svc_request *request, struct srv_region *region);
struct wire_regions svc_request_regions(const struct svc_request *request);
/* Accesses: [n] of job.accesses are filled. n_pieces: how many answers there can be. Queues the job, or refuses:
 * DSA_E_QUEUE_FULL, DSA_E_DRAINING, DSA_E_DEVICE_LOST, DSA_E_NO_MEMORY; the request is still the caller's then. */
SRV_MUST_CHECK dsa_status svc_request_submit(struct svc_request *request, uint32_t n_accesses,
                                             uint32_t n_pieces, struct srv_err *err);
void svc_request_cancel(struct svc_request *request);
void svc_request_free(
    struct svc_request *request); /* one that was not submitted, or whose last piece is back */

/* DSA_E_TOO_LARGE for a message beyond max-message-bytes. */
SRV_MUST_CHECK dsa_status svc_check_size(const struct svc *svc, size_t n, struct srv_err *err);

/* Unpacks a unary request of a session and finds its lease: on failure the call has been answered, and false is returned. */
bool svc_begin(struct rpc_call *call, const ProtobufCMessageDescriptor *type, const uint8_t *bytes, size_t n,
               struct wire_arena **arena_p, ProtobufCMessage **message_p);
bool svc_begin_in_session(struct rpc_call *call, const ProtobufCMessageDescriptor *type, const uint8_t *bytes,
                          size_t n, const ProtobufCBinaryData *(*session_of)(const ProtobufCMessage *),
                          struct wire_arena **arena_p, ProtobufCMessage **message_p,
                          struct svc_lease **lease_p);
/* Counts and answers a refusal. */
void svc_refuse(struct rpc_call *call, const struct srv_err *err);
/* `closed` of unary methods that wait for a worker: the answer is not wanted any more. */
void svc_request_call_closed(struct rpc_call *call, bool is_cancelled);

/* svc_rows.c, shared with svc_attend.c: checks an AppendOp and fills job_append. `prefix` is the path of the
 * AppendOp with its dot ("append."), for errors. */
SRV_MUST_CHECK dsa_status svc_parse_append(struct svc_request *request, const Dsa__V1__AppendOp *op,
                                           const char *prefix, struct srv_job_append *append,
                                           struct srv_err *err);

/* svc_health.c */
void svc_health_changed(
    struct svc *svc); /* tells the watchers, where it differs from what they were told last */

/* the methods; one file per group: svc_info.c svc_session.c svc_region.c svc_sequence.c svc_rows.c svc_attend.c svc_health.c svc_reflection.c */
#define SVC_MESSAGE(name) void name(struct rpc_call *call, const uint8_t *bytes, size_t n)
SVC_MESSAGE(svc_get_capabilities);
SVC_MESSAGE(svc_get_stats);
SVC_MESSAGE(svc_drain);
void svc_session_open(struct rpc_call *call);
SVC_MESSAGE(svc_session_message);
void svc_session_half_close(struct rpc_call *call);
void svc_session_closed(struct rpc_call *call, bool is_cancelled);
dsa_status svc_session_offer(void *svc, const uint8_t *token, uint64_t ticket, int fd, struct srv_err *err);
SVC_MESSAGE(svc_register_region);
SVC_MESSAGE(svc_unregister_region);
void svc_region_release(struct srv_region *region, void *arg);
SVC_MESSAGE(svc_create_sequence);
SVC_MESSAGE(svc_fork_sequence);
SVC_MESSAGE(svc_truncate_sequence);
SVC_MESSAGE(svc_release_sequence);
SVC_MESSAGE(svc_get_sequence);
SVC_MESSAGE(svc_append);
SVC_MESSAGE(svc_import_rows);
SVC_MESSAGE(svc_export_rows);
void svc_export_drained(struct rpc_call *call);
void svc_export_closed(struct rpc_call *call, bool is_cancelled);
void svc_attend_open(struct rpc_call *call);
SVC_MESSAGE(svc_attend_message);
void svc_attend_half_close(struct rpc_call *call);
void svc_attend_drained(struct rpc_call *call);
void svc_attend_closed(struct rpc_call *call, bool is_cancelled);
SVC_MESSAGE(svc_health_check);
SVC_MESSAGE(svc_health_watch);
void svc_health_watch_closed(struct rpc_call *call, bool is_cancelled);
SVC_MESSAGE(svc_reflect);
void svc_reflect_half_close(struct rpc_call *call);
void svc_reflect_drained(struct rpc_call *call);

#endif /* SERVER_SVC_H */
