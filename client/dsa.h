/* dsa.h - client library of dsad: sparse attention over a paged, quantised latent KV cache, by handle.
 *
 * A client is one connection and one session. Everything made through it (memory, sequences, requests)
 * belongs to the session and is given back by the server when the client closes or dies.
 *
 * Threads    One client is used by one thread at a time; different clients are independent. There is no
 *            thread between you and the socket: a call pumps the connection on the caller's thread. A small
 *            keeper thread of the library only sends heartbeats while you compute; it never runs your
 *            callbacks.
 * Callbacks  Run inside dsa_poll, dsa_wait, dsa_wait_all and dsa_attend, on the caller's thread and with no
 *            lock held: they may call any function of this header except dsa_close and dsa_abandon.
 * Errors     Functions return DSA_OK (0) or a negative dsa_status. `err` may be NULL; otherwise it is filled
 *            on failure and untouched on success. Out-arguments (suffix _p) are written only on success.
 *            Every call that talks to the server can also return, beside the codes named at the function:
 *              DSA_E_CONNECT    the connection or the server is gone
 *              DSA_E_TIMEOUT    no answer within options.rpc_timeout_us
 *              DSA_E_PROTOCOL   an answer that cannot be understood
 *              DSA_E_TOO_LARGE  the message is beyond Limits.max_message_bytes (checked before it is sent)
 *              DSA_E_NO_SESSION, DSA_E_SESSION_EXPIRED   the lease is over; close the client
 *              DSA_E_DRAINING, DSA_E_NO_MEMORY, DSA_E_INTERNAL
 * Units      Sizes and strides in bytes, times in microseconds, tensors row-major and little endian. Axes:
 *            s_q query rows, h_q heads, d_qk key width, d_v value width, topk index width. bf16 travels as
 *            uint16_t. */
#ifndef DSA_H
#define DSA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dsa_status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DSA_MUST_CHECK __attribute__((warn_unused_result))
#define DSA_API        __attribute__((visibility("default")))

#define DSA_TOKEN_BYTES 16
#define DSA_MAX_RANK    4

struct dsa_client;
struct dsa_stream;
struct dsa_memory;
struct dsa_request;

/* ---- errors ---------------------------------------------------------------------------------- */

/* Largest thing that an error ruins. */
enum dsa_scope {
    DSA_SCOPE_NONE = 0,
    DSA_SCOPE_REQUEST = 1,
    DSA_SCOPE_SESSION = 2,
    DSA_SCOPE_DEVICE = 3,
    DSA_SCOPE_PROCESS = 4,
};

struct dsa_error {
    dsa_status code;
    int32_t grpc_code; /* google.rpc.Code */
    enum dsa_scope scope;
    uint64_t retry_after_us; /* > 0: the same request may succeed after this long */
    char reason[32];         /* stable word, e.g. "NO_PAGES" */
    char message[224];       /* one sentence */
    char field[96];          /* offending field, e.g. "attend.q.shape[1]"; may be empty */
    char value[64];          /* offending value; may be empty */
    char rule[48];           /* support rule that said no; may be empty */
};

DSA_API const char *dsa_status_reason(dsa_status status); /* "NO_PAGES"; "" for DSA_OK. Any thread. */
DSA_API const char *dsa_status_text(dsa_status status);   /* one phrase. Any thread. */

/* "NO_PAGES: the pool has 3 free pages (append.rows = 400)" into text, always terminated. Any thread. */
DSA_API void dsa_error_text(const struct dsa_error *err, char *text, size_t size);

/* ---- connection and session ------------------------------------------------------------------ */

/* Called once, from dsa_poll or dsa_wait, when the session ended without dsa_close. */
typedef void (*dsa_lost_fn)(struct dsa_client *client, const struct dsa_error *why, void *arg);

/* TLS to a host:port. Files are PEM and read by dsa_connect alone. */
struct dsa_tls {
    const char *ca_file;     /* who signs the server's certificate; NULL = the authorities of the system */
    const char *cert_file;   /* this client's certificate, when the server wants one; NULL = none */
    const char *key_file;    /* its key, without a password; goes with cert_file */
    const char *server_name; /* the name in the server's certificate; NULL = the host of the target */
};

struct dsa_options {
    const char *client_name;       /* for the server's logs, at most 64 bytes; NULL = "libdsa" */
    uint64_t connect_timeout_us;   /* 0 = 5 s */
    uint64_t rpc_timeout_us;       /* unary calls; 0 = 30 s */
    uint64_t lease_us;             /* 0 = the server's default */
    uint64_t grace_us;             /* how long the session outlives a broken connection; 0 = not at all */
    const uint8_t *reattach_token; /* DSA_TOKEN_BYTES of a session in its grace time; NULL = a new session */
    const char *fd_socket; /* path where this process finds the fd socket; NULL = as the server says */
    uint32_t spin_us;      /* how long a waiting call polls before it sleeps: latency for CPU time */
    bool no_session;       /* only capabilities, stats, health and drain will be called */
    dsa_lost_fn on_lost;   /* may be NULL */
    void *on_lost_arg;
    const struct dsa_tls *tls; /* NULL = plain text */
    const char *token_file;    /* its first line goes with every call as a bearer token; NULL = none */
};

/* Connects to "unix:/path" or "host:port", reads the capabilities and opens the session. `options` may be
 * NULL and is not kept. The client is the caller's until dsa_close.
 * DSA_E_CONNECT (nobody answers within the timeout; with TLS the text says what was last wrong with the handshake),
 * DSA_E_BAD_REQUEST (target, options, a file that will not do), DSA_E_UNAUTHENTICATED (no or wrong token), DSA_E_BAD_RANGE
 * (lease or grace beyond the server's limit), DSA_E_LIMIT (too many sessions), DSA_E_NO_SESSION or
 * DSA_E_PRECONDITION (reattach), DSA_E_SYSTEM (the keeper thread cannot start). */
DSA_API DSA_MUST_CHECK dsa_status dsa_connect(const char *target, const struct dsa_options *options,
                                              struct dsa_client **client_p, struct dsa_error *err);

/* Ends the session (the server takes everything back) and frees the client with all its streams, memories and
 * requests; pointers to those are dead afterwards. Pending callbacks are not run. NULL is allowed. */
DSA_API void dsa_close(struct dsa_client *client);

/* Drops the connection without ending the session, which lives on for its grace time; frees the client like
 * dsa_close. For handing a session over: another dsa_connect passes the token as reattach_token. */
DSA_API void dsa_abandon(struct dsa_client *client);

struct dsa_session_info {
    uint8_t token[DSA_TOKEN_BYTES];
    uint64_t lease_us; /* as granted */
    uint64_t grace_us;
    bool reattached;
    bool is_alive;         /* false once the session stream has ended */
    uint64_t n_heartbeats; /* answered by the server */
};

DSA_API void dsa_session_info(struct dsa_client *client, struct dsa_session_info *info_p);

/* Who asks, for the server's logs: a W3C traceparent of version 00 ("00-<32 hex>-<16 hex>-<2 hex>", lower case, ids not zero) that
 * goes with every call and request from now on; NULL = none. The text is copied. DSA_E_BAD_REQUEST. */
DSA_API DSA_MUST_CHECK dsa_status dsa_set_traceparent(struct dsa_client *client, const char *traceparent,
                                                      struct dsa_error *err);

/* Handles what has arrived and runs due callbacks. timeout_us 0 returns at once; otherwise waits until at
 * least one request has completed or the time is over. Returns how many requests completed.
 * Never fails: a lost connection completes every pending request with DSA_E_CONNECT. */
DSA_API uint32_t dsa_poll(struct dsa_client *client, uint64_t timeout_us);

/* ---- what the server is ---------------------------------------------------------------------- */

enum dsa_layout {
    DSA_LAYOUT_NONE = 0,
    DSA_LAYOUT_SCALED_512_64 = 1,
    DSA_LAYOUT_SCALED_512_0 = 2,
    DSA_LAYOUT_SCALED_256_0 = 3,
    DSA_LAYOUT_BF16_576 = 4,
    DSA_LAYOUT_BF16_512 = 5,
    DSA_LAYOUT_BF16_256 = 6,
    DSA_LAYOUT_RAW_512_64 = 7,
};

enum dsa_dtype {
    DSA_DTYPE_NONE = 0,
    DSA_DTYPE_BF16 = 1,
    DSA_DTYPE_F32 = 2,
    DSA_DTYPE_I32 = 3,
    DSA_DTYPE_U8 = 4
};

enum dsa_rule { DSA_RULE_DEFAULT = 0, DSA_RULE_PLAIN = 1, DSA_RULE_POW2 = 2 };

DSA_API const char *dsa_layout_name(enum dsa_layout layout); /* "scaled_512_64"; "unknown" */
DSA_API const char *dsa_dtype_name(enum dsa_dtype dtype);
DSA_API size_t dsa_dtype_bytes(enum dsa_dtype dtype); /* 0 for NONE */

struct dsa_device {
    char *uuid, *kind, *name, *arch;
    uint64_t memory_bytes;
    bool is_healthy;
};

struct dsa_pool {
    char *device_uuid;
    enum dsa_layout layout;
    uint32_t row_bytes, page_tokens, n_layers, d_qk, d_v;
    uint64_t n_pages;
    float raw_scale;
    enum dsa_rule write_rule;
};

/* See Limits in dsa.proto. */
struct dsa_limits {
    uint64_t max_message_bytes, max_inline_bytes, max_region_bytes, max_sequence_tokens;
    uint64_t max_lease_us, max_grace_us, stall_timeout_us;
    uint32_t max_rows, max_segments, max_heads, max_topk, max_append_rows, max_sessions,
        max_regions_per_session;
    uint32_t max_sequences_per_session, max_inflight_per_stream, max_queue, chunk_rows, max_streams;
};

struct dsa_rule_row {
    char *name, *device_kind, *reason;
    uint32_t n_layouts, n_q_dtypes, n_phases, n_host_tiers;
    enum dsa_layout *layouts;
    enum dsa_dtype *q_dtypes;
    char **phases, **host_tiers;
    uint32_t d_qk, min_heads, max_heads, min_context_parallel, max_context_parallel;
    bool accepts;             /* false: what the row matches is refused */
    bool when_layouts_differ; /* matches only a start-up whose prefill and decode layouts differ */
};

struct dsa_capabilities {
    char *version, *build, *fd_socket;
    uint32_t n_devices, n_pools, n_rules, n_features;
    struct dsa_device *devices;
    struct dsa_pool *pools;
    struct dsa_limits limits;
    struct dsa_rule_row *rules;
    char **features;
    bool physical_indices;
};

/* What the server said when the client connected. Borrowed: valid until dsa_close. Never NULL. */
DSA_API const struct dsa_capabilities *dsa_capabilities(const struct dsa_client *client);

struct dsa_pool_stats {
    char device_uuid[64];
    uint64_t n_pages, n_pages_free, n_pages_used, n_pages_shared, n_sequences, page_refs;
    uint32_t queue_depth;
};

struct dsa_stats {
    uint32_t n_pools; /* entries in pools; further pools are left out */
    struct dsa_pool_stats pools[8];
    uint32_t n_sessions, n_regions;
    uint64_t region_bytes, n_requests, n_rows, n_invalid_indices, n_nonfinite, n_rejected, n_batches,
        uptime_us;
    uint64_t n_sessions_reclaimed;
};

/* Counts now. */
DSA_API DSA_MUST_CHECK dsa_status dsa_stats(struct dsa_client *client, struct dsa_stats *stats_p,
                                            struct dsa_error *err);

/* grpc.health.v1: *is_serving_p for `service` ("" = the whole server). DSA_E_NOT_FOUND for an unknown
 * service. */
DSA_API DSA_MUST_CHECK dsa_status dsa_health(struct dsa_client *client, const char *service,
                                             bool *is_serving_p, struct dsa_error *err);

/* Asks the server to finish what runs and to end. grace_us 0 = the server's. DSA_E_ACCESS,
 * DSA_E_UNIMPLEMENTED. */
DSA_API DSA_MUST_CHECK dsa_status dsa_drain(struct dsa_client *client, uint64_t grace_us,
                                            struct dsa_error *err);

/* ---- shared memory --------------------------------------------------------------------------- */

enum dsa_access {
    DSA_ACCESS_READ = 1,
    DSA_ACCESS_READ_WRITE = 2
}; /* what the server may do; outputs need WRITE */

/* Makes a sealed memfd of `bytes`, maps it and registers it with the server. Zero-filled. The memory is the
 * caller's until dsa_memory_destroy or dsa_close.
 * DSA_E_SYSTEM (memfd, mmap or socket call), DSA_E_BAD_FD, DSA_E_LIMIT, DSA_E_TOO_LARGE, DSA_E_UNSUPPORTED
 * (the server takes no file descriptors). */
DSA_API DSA_MUST_CHECK dsa_status dsa_memory_create(struct dsa_client *client, uint64_t bytes,
                                                    enum dsa_access access, struct dsa_memory **memory_p,
                                                    struct dsa_error *err);

/* The same over the caller's own memfd, which must carry F_SEAL_SHRINK: `bytes` from base_offset (a multiple
 * of 4096). `fd` stays the caller's and may be closed at once. Also DSA_E_BAD_RANGE. */
DSA_API DSA_MUST_CHECK dsa_status dsa_memory_import(struct dsa_client *client, int fd, uint64_t base_offset,
                                                    uint64_t bytes, enum dsa_access access,
                                                    struct dsa_memory **memory_p, struct dsa_error *err);

DSA_API void *dsa_memory_data(const struct dsa_memory *memory); /* first byte, page aligned */
DSA_API uint64_t dsa_memory_bytes(const struct dsa_memory *memory);

/* Waits until no request of this client uses the memory (their callbacks run later, in dsa_poll), unregisters
 * and unmaps it. The memory is freed whatever is returned. NULL is allowed. */
DSA_API dsa_status dsa_memory_destroy(struct dsa_memory *memory, struct dsa_error *err);

/* ---- tensors --------------------------------------------------------------------------------- */

/* By value (data) or by place (memory + offset); exactly one of the two. All strides 0 = dense; with data the
 * tensor must be dense. `data` is read before the submitting function returns. */
struct dsa_tensor {
    enum dsa_dtype dtype;
    uint32_t rank; /* 1..DSA_MAX_RANK */
    uint64_t shape[DSA_MAX_RANK];
    int64_t strides_bytes[DSA_MAX_RANK];
    const void *data;
    const struct dsa_memory *memory;
    uint64_t offset;
};

/* ---- sequences ------------------------------------------------------------------------------- */

struct dsa_sequence {
    uint64_t id;       /* never 0 */
    uint64_t n_tokens; /* present in every layer */
    uint64_t n_pages, n_pages_shared;
    uint32_t n_layer_tokens; /* dsa_sequence_get only */
    uint64_t *layer_tokens;
    uint32_t n_page_ids; /* dsa_sequence_get only, where the server allows physical indices */
    int32_t *page_ids;
};

/* A new, empty sequence; device_uuid NULL = the server chooses. DSA_E_LIMIT, DSA_E_NOT_FOUND (device). */
DSA_API DSA_MUST_CHECK dsa_status dsa_sequence_create(struct dsa_client *client, const char *device_uuid,
                                                      uint64_t *id_p, struct dsa_error *err);

/* A new sequence with the first n_tokens of `source` (0 = all), sharing its pages. DSA_E_NOT_FOUND,
 * DSA_E_BAD_RANGE, DSA_E_NO_PAGES, DSA_E_LIMIT. */
DSA_API DSA_MUST_CHECK dsa_status dsa_sequence_fork(struct dsa_client *client, uint64_t source,
                                                    uint64_t n_tokens, uint64_t *id_p, struct dsa_error *err);

/* Keeps the first n_tokens, in every layer. DSA_E_NOT_FOUND, DSA_E_BAD_RANGE. */
DSA_API DSA_MUST_CHECK dsa_status dsa_sequence_truncate(struct dsa_client *client, uint64_t id,
                                                        uint64_t n_tokens, struct dsa_error *err);

/* Gives the sequence and its pages back. DSA_E_NOT_FOUND. */
DSA_API DSA_MUST_CHECK dsa_status dsa_sequence_release(struct dsa_client *client, uint64_t id,
                                                       struct dsa_error *err);

/* Its state; free the lists with dsa_sequence_fini. DSA_E_NOT_FOUND. */
DSA_API DSA_MUST_CHECK dsa_status dsa_sequence_get(struct dsa_client *client, uint64_t id,
                                                   struct dsa_sequence *sequence_p, struct dsa_error *err);
DSA_API void dsa_sequence_fini(struct dsa_sequence *sequence);

/* Rows to add at the end of a sequence. */
struct dsa_append {
    uint64_t sequence;
    uint32_t layer;         /* first layer */
    uint32_t n_layers;      /* 0 = 1 */
    struct dsa_tensor rows; /* BF16 [n, d_qk], or [n_layers, n, d_qk] */
    enum dsa_rule rule;
    bool strict;       /* refuse NaN and infinities instead of counting them */
    bool has_position; /* refuse when the rows would not land at `position` */
    uint64_t position;
};

struct dsa_append_result {
    uint64_t n_tokens; /* the first layer's length after the append */
    uint64_t n_nonfinite;
};

/* Appends and waits. result_p may be NULL. DSA_E_NOT_FOUND, DSA_E_BAD_SHAPE, DSA_E_BAD_RANGE, DSA_E_NO_PAGES,
 * DSA_E_NONFINITE, DSA_E_LIMIT, DSA_E_QUEUE_FULL. Nothing is written on failure. */
DSA_API DSA_MUST_CHECK dsa_status dsa_append(struct dsa_client *client, const struct dsa_append *append,
                                             struct dsa_append_result *result_p, struct dsa_error *err);

/* Adds rows that are already in the pool's layout: U8 [n, row_bytes] or [n_layers, n, row_bytes]. Errors as
 * dsa_append, and DSA_E_BAD_LAYOUT. */
DSA_API DSA_MUST_CHECK dsa_status dsa_import(struct dsa_client *client, uint64_t sequence, uint32_t layer,
                                             uint32_t n_layers, enum dsa_layout layout,
                                             const struct dsa_tensor *rows,
                                             struct dsa_append_result *result_p, struct dsa_error *err);

/* One chunk of an export; `rows` is valid during the call. Not DSA_OK ends the export, which returns that
 * value. Must not call the library. */
typedef dsa_status (*dsa_rows_fn)(uint64_t first, uint32_t n_tokens, const void *rows, size_t n_bytes,
                                  void *arg);

/* Reads tokens [first, first + n_tokens) of one layer back (n_tokens 0 = to the end), as stored bytes (U8) or
 * dequantised (BF16), in order, chunk by chunk. DSA_E_NOT_FOUND, DSA_E_BAD_RANGE, DSA_E_BAD_SHAPE (dtype). */
DSA_API DSA_MUST_CHECK dsa_status dsa_export(struct dsa_client *client, uint64_t sequence, uint32_t layer,
                                             uint64_t first, uint64_t n_tokens, enum dsa_dtype dtype,
                                             dsa_rows_fn fn, void *arg, struct dsa_error *err);

/* ---- attend ---------------------------------------------------------------------------------- */

enum dsa_space { DSA_SPACE_LOGICAL = 1, DSA_SPACE_PHYSICAL = 2 };

/* Consecutive query rows that read one sequence. */
struct dsa_segment {
    uint64_t sequence; /* 0 only with DSA_SPACE_PHYSICAL: the whole pool */
    uint32_t n_rows;
};

/* Where a result goes: into `data` of this process, dense, filled as replies arrive and complete when the
 * request is; or into registered memory, written by the server. */
struct dsa_output {
    enum dsa_dtype dtype;            /* out: BF16 (also NONE) or F32; lse: F32 (also NONE) */
    void *data;                      /* dense size; must stay valid until the request is done or freed */
    const struct dsa_memory *memory; /* READ_WRITE */
    uint64_t offset;
    int64_t strides_bytes[3]; /* memory only; all 0 = dense */
};

struct dsa_attend {
    uint32_t layer;
    uint32_t n_segments;
    const struct dsa_segment *segments;
    struct dsa_tensor q;       /* BF16 [s_q, h_q, d_qk] */
    struct dsa_tensor indices; /* I32 [s_q, topk] */
    enum dsa_space space;
    const struct dsa_tensor *lengths; /* I32 [s_q], or NULL */
    const struct dsa_tensor *sink;    /* F32 [h_q], or NULL */
    float softmax_scale;
    struct dsa_output out; /* [s_q, h_q, d_v] */
    bool want_lse;
    struct dsa_output lse;           /* [s_q, h_q] */
    const struct dsa_append *append; /* done first, or NULL */
    bool batch_invariant;
    const char *phase;         /* "prefill", "decode" or NULL */
    uint32_t context_parallel; /* 0 = 1 */
    uint64_t deadline_us;      /* from arrival at the server; 0 = none */
    int32_t priority;          /* -100..100; higher goes first */
    const char *traceparent;   /* as in dsa_set_traceparent, for this request; NULL = the client's */
};

struct dsa_timings {
    uint64_t queue_us, device_us, total_us; /* in the server */
    uint32_t batch_rows;
};

struct dsa_result {
    struct dsa_error error; /* code DSA_OK on success */
    uint32_t n_rows;        /* query rows answered */
    uint64_t n_invalid;     /* index entries out of range, other than -1 */
    uint64_t n_nonfinite;
    uint64_t n_tokens; /* after the append of this request, if it had one */
    struct dsa_timings timings;
    uint64_t elapsed_us; /* submit to completion, here */
};

/* Called once per request that was submitted with it. The request may be freed inside. */
typedef void (*dsa_done_fn)(struct dsa_request *request, const struct dsa_result *result, void *arg);

/* An Attend stream. Operations of one stream on one sequence take effect in the order sent. Every client has
 * one by itself (pass NULL for `stream` below); a further one is an independent order. DSA_E_LIMIT. */
DSA_API DSA_MUST_CHECK dsa_status dsa_stream_open(struct dsa_client *client, struct dsa_stream **stream_p,
                                                  struct dsa_error *err);
/* Cancels what is pending (their callbacks run in the next dsa_poll with DSA_E_CANCELLED) and frees the
 * stream. */
DSA_API void dsa_stream_close(struct dsa_stream *stream);

/* Sends the request and returns at once. `args` and everything it points to except output buffers may be
 * reused afterwards; registered memory must stay untouched until completion. With `done`, it is called from
 * dsa_poll or dsa_wait; without, use dsa_wait. The request stays the caller's until dsa_request_free.
 * On failure nothing was sent and `done` is never called: DSA_E_BAD_REQUEST, DSA_E_BAD_SHAPE (a tensor or
 * output that is neither by value nor by place), DSA_E_QUEUE_FULL (Limits.max_inflight_per_stream are
 * unanswered: dsa_poll, then try again), DSA_E_NO_MEMORY, DSA_E_CONNECT. The server's refusals come in the
 * result. */
DSA_API DSA_MUST_CHECK dsa_status dsa_attend_submit(struct dsa_client *client, struct dsa_stream *stream,
                                                    const struct dsa_attend *args, dsa_done_fn done,
                                                    void *arg, struct dsa_request **request_p,
                                                    struct dsa_error *err);

/* The same for an append alone; result.n_tokens is the length afterwards. */
DSA_API DSA_MUST_CHECK dsa_status dsa_append_submit(struct dsa_client *client, struct dsa_stream *stream,
                                                    const struct dsa_append *args, dsa_done_fn done,
                                                    void *arg, struct dsa_request **request_p,
                                                    struct dsa_error *err);

/* Waits for one request (timeout_us 0 = without limit) and returns its status; callbacks of others that
 * complete meanwhile run too. DSA_E_TIMEOUT leaves it pending. */
DSA_API dsa_status dsa_wait(struct dsa_request *request, uint64_t timeout_us, struct dsa_error *err);

/* Waits until nothing is pending on the client. DSA_E_TIMEOUT. */
DSA_API DSA_MUST_CHECK dsa_status dsa_wait_all(struct dsa_client *client, uint64_t timeout_us,
                                               struct dsa_error *err);

/* Whether it has completed (its callback may still be due). */
DSA_API bool dsa_request_is_done(const struct dsa_request *request);

/* Valid once done, until the request is freed. */
DSA_API const struct dsa_result *dsa_request_result(const struct dsa_request *request);

/* Asks the server to drop the request. It still completes: with DSA_E_CANCELLED, or as it would have. */
DSA_API void dsa_request_cancel(struct dsa_request *request);

/* Frees it. One that is still pending is cancelled and its buffers are no longer written by this process; a
 * region output may be until dsa_memory_destroy. Its callback is not called any more. NULL is allowed. */
DSA_API void dsa_request_free(struct dsa_request *request);

/* One call: submit and wait, on the client's own stream. result_p may be NULL. */
DSA_API DSA_MUST_CHECK dsa_status dsa_attend(struct dsa_client *client, const struct dsa_attend *args,
                                             struct dsa_result *result_p, struct dsa_error *err);

#ifdef __cplusplus
}
#endif

#endif /* DSA_H */
