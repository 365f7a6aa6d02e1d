/* rpc.h - gRPC core behind a small surface: methods, calls, messages, doorbells. With wire.c the only place that
 * includes grpc headers. All functions [L] unless they say otherwise; callbacks run on L, inside rpc_step.
 *
 * A call lives from its first callback to `closed`, which comes exactly once and last. Messages to the client are queued without limit by
 * this module: whoever sends keeps count through rpc_queued_bytes. A call reads one message at a time, and the
 * next one only after rpc_read_next.
 *
 *   open (bidi) / message ... half_close ... closed
 *                └── rpc_send * ── rpc_finish ──┘ */
#ifndef SERVER_RPC_H
#define SERVER_RPC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/core/err.h"
#include "server/trace.h"

struct rpc;
struct rpc_call;
struct rpc_bell;

enum rpc_shape {
    RPC_UNARY, /* one message in; one out through rpc_send, then rpc_finish: both leave in one batch */
    RPC_SERVER_STREAM, /* one in, many out, then it ends */
    RPC_SUBSCRIPTION,  /* one in, then out whenever there is something, until the client goes */
    RPC_STREAM,        /* many in, many out */
};

struct rpc_method {
    const char *path; /* "/pkg.Service/Method" */
    enum rpc_shape shape;
    /* STREAM: the call began; may be NULL. */
    void (*open)(struct rpc_call *call);
    /* One message, of up to twice max_message_bytes: the method refuses what is above the limit. bytes are valid during
     * the callback. */
    void (*message)(struct rpc_call *call, const uint8_t *bytes, size_t n);
    /* STREAM: the client will send no more. */
    void (*half_close)(struct rpc_call *call);
    /* Everything queued has left; may be NULL. */
    void (*drained)(struct rpc_call *call);
    /* The call is over: free what belongs to it. is_cancelled: the client went away or cancelled. May be NULL. */
    void (*closed)(struct rpc_call *call, bool is_cancelled);
};

/* Where a connection came in. */
enum rpc_origin {
    RPC_ORIGIN_TCP,    /* plain, unknown peer */
    RPC_ORIGIN_UNIX,   /* the unix socket, whose file mode says who may */
    RPC_ORIGIN_TLS,    /* TLS has been terminated before the bytes came here */
    RPC_ORIGIN_HEALTH, /* the port for probes */
};

struct rpc_config {
    const struct rpc_method *methods;
    size_t n_methods;
    void *service; /* rpc_call_service */
    /* A call of a known method came; its headers can be read. False: it has been answered (rpc_finish) and none of its
     * method's callbacks comes. May be NULL. */
    bool (*admit)(struct rpc_call *call);
    /* A call is over, before its `closed`: a google.rpc.Code, and how long it lasted. May be NULL. */
    void (*ended)(struct rpc_call *call, int code, uint64_t took_us);
    uint64_t max_message_bytes; /* both directions; a message of more than about twice this ends its call */
    uint32_t max_streams;       /* concurrent calls of one connection */
    uint64_t stall_timeout_us;  /* a message that the client does not take for this long ends its call */
};

SRV_MUST_CHECK dsa_status rpc_create(const struct rpc_config *config, struct rpc **rpc_p,
                                     struct srv_err *err);
/* After rpc_shutdown was carried through (rpc_is_down). */
void rpc_destroy(struct rpc *rpc);

/* Serve an accepted, non-blocking socket. Takes the fd, also on failure. */
void rpc_add_fd(struct rpc *rpc, int fd, enum rpc_origin origin);

/* Handle one event, waiting for it up to wait_us (0 = only look; UINT64_MAX = for ever). False: none came. */
bool rpc_step(struct rpc *rpc, uint64_t wait_us);

/* Starts the reads that were asked for. After the answers to what has been read were sent: gRPC then puts its window updates
 * into the answers' writes instead of making writes of their own. True if there were any. */
bool rpc_flush(struct rpc *rpc);

uint64_t rpc_message_count(const struct rpc *rpc); /* messages received since start */
uint32_t rpc_call_count(const struct rpc *rpc);    /* calls that are not over */

/* Ends calls that stalled. Cheap; every second or so. */
void rpc_check_stalls(struct rpc *rpc, uint64_t now_us);

void rpc_set_stall_timeout(struct rpc *rpc, uint64_t timeout_us);

/* Stop taking calls and tell the clients (GOAWAY). Running calls go on. */
void rpc_shutdown(struct rpc *rpc);
void rpc_cancel_all(struct rpc *rpc); /* end what still runs */
/* The last resort: shuts down the connections of clients that neither read nor go, for which gRPC would wait for ever. */
void rpc_cut(struct rpc *rpc);
/* Some client has still to take what was sent, and took something less than patience_us ago. */
bool rpc_has_unsent(const struct rpc *rpc, uint64_t patience_us);
bool rpc_is_down(const struct rpc *rpc); /* no call is left and the server has stopped */

/* A doorbell makes a sleeping rpc_step return true. Ring it from any thread; one thread per bell at a time. */
SRV_MUST_CHECK dsa_status rpc_bell_create(struct rpc *rpc, struct rpc_bell **bell_p);
void rpc_bell_destroy(struct rpc_bell *bell); /* [L] before rpc_destroy; nobody may ring any more */
void rpc_bell_ring(struct rpc_bell *bell);    /* [any] */

/* ---- a call ------------------------------------------------------------------------------------ */

void *rpc_call_service(const struct rpc_call *call);
const char *rpc_call_path(const struct rpc_call *call); /* of the table; "(unknown)" */
size_t rpc_call_method(const struct rpc_call *call);    /* its place in the table; n_methods: not there */
enum rpc_origin rpc_call_origin(const struct rpc_call *call);
/* A header of the client's, by its lower-case name: the first of that name, *n_p bytes, not terminated, valid while the call
 * lives. NULL: there is none. */
const char *rpc_call_header(const struct rpc_call *call, const char *name, size_t *n_p);
uint64_t rpc_call_number(const struct rpc_call *call); /* from 1, since start: names the call in log lines */
/* The client's traceparent, which goes back in the reply's initial metadata. Never NULL; empty when there is none. */
const struct srv_trace *rpc_call_trace(const struct rpc_call *call);
bool rpc_call_is_stream(const struct rpc_call *call); /* it lasts as long as its client likes */
/* Numbers that the service keeps with the call, 0 when it begins; there until `closed`. */
#define RPC_N_NOTES 8
uint64_t *rpc_call_notes(struct rpc_call *call);
void rpc_call_set_data(struct rpc_call *call, void *data);
void *rpc_call_data(const struct rpc_call *call); /* NULL until set */

/* A message to send: room for n bytes, filled by the caller, then given to rpc_send. NULL when there is no memory or n is larger than the
 * limit of a message. */
struct rpc_message;
struct rpc_message *rpc_message_create(struct rpc *rpc, size_t n, uint8_t **bytes_p);
struct rpc *rpc_call_rpc(const struct rpc_call *call);
void rpc_send(struct rpc_call *call,
              struct rpc_message *message); /* takes the message; dropped if the call has failed */

/* The call's answer, after everything queued. code is a google.rpc.Code. details (may be NULL) goes out as
 * grpc-status-details-bin. A second finish is ignored. */
void rpc_finish(struct rpc_call *call, int code, const char *text, const void *details, size_t n_details);
bool rpc_is_finished(const struct rpc_call *call); /* finish was called, or the client is gone */

/* STREAM: ask for the next message; harmless when one is asked for. Takes effect with the next rpc_flush. */
void rpc_read_next(struct rpc_call *call);
size_t rpc_queued_bytes(const struct rpc_call *call);
size_t rpc_all_queued_bytes(const struct rpc *rpc); /* of all calls */

/* gRPC's own log lines go to the server's log, and its lock-order detector is set as production wants. Once, before
 * rpc_create and before any thread is started. [main] */
void rpc_init(void);
/* Waits for gRPC's own threads, one of which may sit in a wait of ten seconds when a write to a client has blocked. [main] */
void rpc_fini(void);

#endif /* SERVER_RPC_H */
