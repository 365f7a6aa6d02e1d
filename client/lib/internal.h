/* internal.h - what the parts of libdsa share: the client object, the completion queue pump, unary calls and
 * bidirectional calls. Nothing here is public.
 *
 * Locking: client->lock is held by every public call while it works, released around user callbacks, and only
 * tried, never waited for, by the keeper thread. All functions below expect it held unless they say
 * otherwise. */
#ifndef DSA_CLIENT_LIB_INTERNAL_H
#define DSA_CLIENT_LIB_INTERNAL_H

#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <pthread.h>
#include <protobuf-c/protobuf-c.h>

#include "client/dsa.h"
#include "dsa/v1/dsa.pb-c.h"

/* ---- errors (error.c; any thread) ------------------------------------------------------------ */

/* Fills *err (may be NULL) from the table row of `code` and the printed message; returns code. */
__attribute__((format(printf, 4, 5))) dsa_status dsa__fail(struct dsa_error *err, dsa_status code,
                                                           const char *field, const char *format, ...);
/* From a status of the wire. Returns its code; DSA_OK (err untouched) when it is one. */
dsa_status dsa__error_from_wire(const Dsa__V1__Status *wire, struct dsa_error *err);
/* From the end of a call: details is the value of grpc-status-details-bin (n_details 0 = none), text the gRPC
 * message. Returns the code, never DSA_OK. */
dsa_status dsa__error_from_grpc(int grpc_code, const char *text, size_t n_text, const uint8_t *details,
                                size_t n_details, struct dsa_error *err);

/* ---- pump (pump.c) --------------------------------------------------------------------------- */

/* Each batch has one of these; its address is the tag. */
struct op {
    void (*fn)(struct op *op, bool ok);
};

struct dsa_client;
struct bidi;

uint64_t dsa__now_us(void); /* monotonic. Any thread. */

/* Handles events until none is waiting, at most a few hundred. Returns how many. */
unsigned dsa__pump_ready(struct dsa_client *client);
/* Handles at least one event unless `until_us` passes first (false). Sends heartbeats that fall due
 * meanwhile. Spins client->spin_us before it sleeps. May return false early: callers loop over their own
 * condition. */
bool dsa__pump(struct dsa_client *client, uint64_t until_us);

#define DSA__TRACEPARENT_BYTES 55
bool dsa__is_traceparent(const char *text); /* call.c */

/* ---- calls (call.c) -------------------------------------------------------------------------- */

/* Sends one request, waits for the reply. *reply_p is the caller's (protobuf_c_message_free_unpacked). */
dsa_status dsa__unary(struct dsa_client *client, const char *method, const ProtobufCMessage *request,
                      const ProtobufCMessageDescriptor *reply_type, void *reply_p, struct dsa_error *err);
/* The same on a channel that may still be connecting, until the deadline. */
dsa_status dsa__unary_wait_ready(struct dsa_client *client, const char *method,
                                 const ProtobufCMessage *request,
                                 const ProtobufCMessageDescriptor *reply_type, uint64_t timeout_us,
                                 void *reply_p, struct dsa_error *err);

/* On a channel that has failed to connect: answers at once, with the reason. */
dsa_status dsa__unary_fail_fast(struct dsa_client *client, const char *method,
                                const ProtobufCMessage *request, const ProtobufCMessageDescriptor *reply_type,
                                uint64_t timeout_us, void *reply_p, struct dsa_error *err);

struct outgoing {
    struct outgoing *next;
    grpc_byte_buffer *message;
};

/* A call with a stream in at least one direction. At most one SEND and one RECV are in flight (gRPC's rule),
 * so messages queue here. on_over is called once, after the last message, when no batch is in flight any
 * more.
 *
 * Starting a receive makes gRPC write a window update: a system call and a packet of its own, unless a message
 * goes out before. So on_message may set is_quiet, saying that it expects nothing until the next message is sent;
 * the next receive then waits in client->quiet, and starts when the client pumps next. */
struct bidi {
    struct dsa_client *client;
    grpc_call *call;
    struct op start_op, recv_op, send_op, close_op, status_op;
    unsigned n_ops;
    unsigned n_gathered; /* messages given to gRPC since it was last told to write */
    bool is_sending, is_close_wanted, is_close_sent, has_status, is_over;
    bool is_quiet;           /* see above */
    struct bidi *next_quiet; /* in client->quiet; only while is_quiet */
    struct outgoing *head, **tail;
    grpc_byte_buffer *received;
    grpc_metadata_array initial, trailing;
    grpc_status_code code;
    grpc_slice details;
    void (*on_message)(struct bidi *bidi, const uint8_t *data, size_t n);
    void (*on_over)(struct bidi *bidi);
};

/* Starts the call. deadline_us 0 = none. Failure leaves nothing to undo. */
dsa_status dsa__bidi_open(struct bidi *bidi, struct dsa_client *client, const char *method,
                          uint64_t deadline_us, void (*on_message)(struct bidi *, const uint8_t *, size_t),
                          void (*on_over)(struct bidi *), struct dsa_error *err);
/* is_small: the message packs into DSA__SMALL_BYTES or less, whatever its numbers are. */
#define DSA__SMALL_BYTES 2048
dsa_status dsa__bidi_send(struct bidi *bidi, const ProtobufCMessage *message, bool is_small,
                          struct dsa_error *err);
void dsa__bidi_half_close(struct bidi *bidi);
void dsa__bidi_cancel(struct bidi *bidi);
/* How it ended; only once over. DSA_OK or the error. */
dsa_status dsa__bidi_status(const struct bidi *bidi, struct dsa_error *err);
/* Starts the receives that wait. Before any wait for events. */
void dsa__bidi_listen(struct dsa_client *client);
/* Frees what an over call holds. */
void dsa__bidi_fini(struct bidi *bidi);

/* ---- the client ------------------------------------------------------------------------------ */

struct session {
    struct bidi bidi;
    bool is_started; /* bidi needs fini */
    bool is_open;
    bool is_closing; /* by us */
    struct dsa_session_info info;
    char *fd_socket;
    uint64_t heartbeat_every_us, heartbeat_due_us, heartbeat_seq;
    struct dsa_error closing; /* what the server said before it ended the stream */
    struct dsa_error opening; /* why it did not open */
    bool is_lost_due;         /* on_lost is still to be called */
};

/* Wakes every third of a lease and sends the heartbeat when nobody else pumps. */
struct keeper {
    pthread_t thread;
    pthread_mutex_t mutex; /* guards stop */
    pthread_cond_t wake;
    bool stop;
    bool is_running;
};

struct dsa_client {
    pthread_mutex_t lock;
    grpc_channel *channel;
    grpc_completion_queue *cq;
    struct dsa_capabilities caps;
    uint64_t rpc_timeout_us;
    uint64_t max_send_bytes; /* 0 = not known yet */
    uint32_t spin_us;
    char traceparent[DSA__TRACEPARENT_BYTES + 1]; /* "" = none */
    uint32_t n_pumps;                             /* wraps */
    grpc_channel_credentials *credentials;
    bool has_tls;
    char *server_name;           /* expected of the server's certificate; NULL = the target's host */
    grpc_metadata authorization; /* goes with every call */
    size_t n_authorization;      /* 0 or 1 */
    dsa_lost_fn on_lost;
    void *on_lost_arg;
    struct session session;
    struct keeper keeper;
    char *fd_socket; /* the caller's idea of the path */
    int fd_conn;     /* -1 until a descriptor is sent */
    uint64_t next_ticket;
    struct dsa_stream *stream;  /* the client's own, or NULL */
    struct dsa_stream *streams; /* all, linked */
    struct bidi *quiet;         /* calls whose next receive has not been started */
    struct dsa_memory *memories;
    struct dsa_request *requests;             /* every request object, for dsa_close */
    struct dsa_request *due_head, **due_tail; /* completed, callback not yet run */
    uint64_t n_pending, n_completed, n_reported;
};

#define DSA__SERVICE "/dsa.v1.SparseAttention/"

/* secure.c: credentials and token from the options. What was made before a failure dsa__secure_fini frees. */
dsa_status dsa__secure_init(struct dsa_client *client, const char *target, const struct dsa_options *options,
                            struct dsa_error *err);
void dsa__secure_fini(struct dsa_client *client);

/* session.c */
dsa_status dsa__session_open(struct dsa_client *client, const struct dsa_options *options, uint64_t until_us,
                             struct dsa_error *err);
void dsa__session_end(struct dsa_client *client, bool is_abandoned);
void dsa__heartbeat_if_due(struct dsa_client *client, uint64_t now_us);
dsa_status dsa__keeper_start(struct dsa_client *client, struct dsa_error *err);
void dsa__keeper_stop(struct dsa_client *client); /* lock not held */
ProtobufCBinaryData dsa__token(struct dsa_client *client);

/* memory.c */
struct dsa_memory {
    struct dsa_client *client;
    struct dsa_memory *next;
    uint8_t id[16];
    uint8_t *map;
    uint64_t bytes;
    unsigned n_users; /* requests in flight */
};
void dsa__memory_free(struct dsa_memory *memory); /* unmaps; says nothing to the server */

/* tensor.c: a tensor as the wire wants it. Borrows the tensor's memory. */
struct wire_tensor {
    Dsa__V1__Tensor tensor;
    Dsa__V1__RegionSlice slice;
    uint64_t shape[DSA_MAX_RANK];
    int64_t strides[DSA_MAX_RANK];
};
dsa_status dsa__wire_tensor(struct wire_tensor *wire, const struct dsa_tensor *tensor, const char *field,
                            struct dsa_error *err);
struct wire_append {
    Dsa__V1__AppendOp op;
    struct wire_tensor rows;
};
dsa_status dsa__wire_append(struct wire_append *wire, const struct dsa_append *append, const char *field,
                            struct dsa_error *err);

/* stream.c */
void dsa__run_callbacks(struct dsa_client *client); /* releases the lock around each */
void dsa__streams_end(struct dsa_client *client);   /* cancels, waits, frees streams and requests */

/* info.c */
dsa_status dsa__capabilities_from_wire(const Dsa__V1__Capabilities *wire, struct dsa_capabilities *caps_p,
                                       struct dsa_error *err);
void dsa__capabilities_fini(struct dsa_capabilities *caps);

#endif /* DSA_CLIENT_LIB_INTERNAL_H */
