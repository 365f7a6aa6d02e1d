/* rpc_impl.h - what the files of rpc share. Private to server/rpc*.c. */
#ifndef SERVER_RPC_IMPL_H
#define SERVER_RPC_IMPL_H

#include <grpc/grpc.h>
#include <grpc/slice.h>

#include "server/rpc.h"
#include "server/trace.h"

/* Connections on higher descriptors count as plain TCP, which may do least. */
#define MAX_TRACKED_FDS 65536

/* Every batch has a struct of its own, whose address is the tag. */
struct tag {
    void (*fn)(struct tag *tag, bool ok);
    struct rpc *rpc;
};

struct rpc_message {
    struct rpc_message *next;
    grpc_slice slice;
};

/* An armed slot: waits for the next call. */
struct arm {
    struct tag tag;
    struct arm *next;
    grpc_call *call;
    grpc_call_details details;
    grpc_metadata_array metadata;
};

struct rpc_call {
    struct rpc *rpc;
    grpc_call *call;
    const struct rpc_method *method;
    const struct rpc_method *refused; /* the method that was asked for, when `admit` refused it */
    void *data;
    struct tag close_tag, read_tag, send_tag, finish_tag;
    int cancelled; /* written by RECV_CLOSE_ON_SERVER */
    grpc_byte_buffer *read_buffer;
    struct rpc_message *first, *last; /* queued */
    size_t queued_bytes;              /* the one in flight included */
    size_t sending_bytes;
    uint64_t send_since_us;       /* when the message in flight was given to gRPC */
    struct rpc_call *prev, *next; /* all calls */
    unsigned n_gathered;          /* messages given to gRPC since it was last told to write */
    unsigned n_tags;              /* batches in flight; the call is freed at 0 */
    struct rpc_call *next_reader; /* of those that want their next message */
    enum rpc_origin origin;
    uint64_t number;
    uint64_t begin_us;
    uint64_t notes[RPC_N_NOTES]; /* the service's */
    struct srv_trace trace;
    grpc_metadata_array headers; /* from the client; gRPC's memory, until the call is freed */
    bool is_reading, wants_read, is_sending, metadata_sent, is_finishing, finish_wanted, is_closed, is_over;
    bool send_failed;
    int code;
    grpc_slice text;
    uint8_t *details;
    size_t n_details;
    grpc_metadata initial; /* points into trace, which lives as long */
    grpc_metadata trailing;
};

/* What was given to gRPC under a descriptor, which may be another's by now: the inode tells. */
struct connection {
    uint64_t inode;
    enum rpc_origin origin;
};

struct rpc {
    struct rpc_config config;
    grpc_server *server;
    grpc_completion_queue *cq;
    grpc_server_credentials *credentials;
    grpc_channel *lame; /* doorbells are calls on it */
    struct arm *arms;   /* armed slots */
    struct rpc_call *calls;
    uint32_t n_calls;    /* not over */
    uint64_t n_begun;    /* calls since start */
    size_t queued_bytes; /* of all calls */
    struct rpc_call *readers;
    struct tag shutdown_tag;
    struct tag ring_tag; /* of every bell: a ring may be taken after its bell is gone */
    bool is_shutting_down, is_stopped;
    struct connection connections[MAX_TRACKED_FDS]; /* by descriptor */
    unsigned n_armed;
    uint64_t n_messages; /* received since start */
};

struct rpc_bell {
    struct rpc *rpc;
    grpc_call *call;
};

/* In place of the method of a call for a path that is not in the table, or that was refused at the door. */
extern const struct rpc_method rpc_unknown_method;

/* ThreadSanitizer cannot see inside gRPC: tell it that what happened before a batch was started happened before
 * its tag came back. */
#if defined(DSA_SANITIZE_thread)
void __tsan_acquire(void *addr);
void __tsan_release(void *addr);
#else
#define __tsan_acquire(addr) ((void)(addr))
#define __tsan_release(addr) ((void)(addr))
#endif

#endif /* SERVER_RPC_IMPL_H */
