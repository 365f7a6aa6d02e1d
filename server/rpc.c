#include "server/rpc.h"

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/grpc_posix.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#if __has_include(<grpc/credentials.h>)
#include <grpc/credentials.h> /* newer cores; grpc_security.h had it all before */
#endif

#include "server/clock.h"
#include "server/inode.h"
#include "server/log.h"
#include "server/rpc_impl.h"

#define TRACEPARENT "traceparent"

/* Calls armed at a time. Debian's core searches its list of outstanding tags for every completion, so a few are
 * faster than many; arms are refilled before a call is handled. */
#define N_ARMED 24

/* A message that others wait behind need not go out by itself: gRPC may gather small ones into one write. Not too many, so that
 * the peer gets to work meanwhile. */
#define MAX_GATHERED       15
#define MAX_GATHERED_BYTES 1024

static void call_unref(struct rpc_call *call);
static void start_send(struct rpc_call *call);

static bool start_batch(struct rpc_call *call, const grpc_op *ops, size_t n_ops, struct tag *tag)
{
    grpc_call_error rc;

    __tsan_release(tag);
    call->n_tags++;
    rc = grpc_call_start_batch(call->call, ops, n_ops, tag, NULL);
    if (rc == GRPC_CALL_OK)
        return true;
    call->n_tags--;
    srv_log(SRV_LOG_ERROR, "gRPC refused a batch error=%d method=%s", (int)rc, rpc_call_path(call));
    return false;
}

/* ---- reading -------------------------------------------------------------------------------- */

void rpc_read_next(struct rpc_call *call)
{
    if (call->is_reading || call->wants_read || call->is_over || call->is_finishing)
        return;
    call->wants_read = true;
    call->n_tags++; /* the list holds the call like a batch does */
    call->next_reader = call->rpc->readers;
    call->rpc->readers = call;
}

static void start_read(struct rpc_call *call)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};

    if (call->is_over || call->is_finishing)
        return;
    op.data.recv_message.recv_message = &call->read_buffer;
    call->is_reading = start_batch(call, &op, 1, &call->read_tag);
}

bool rpc_flush(struct rpc *rpc)
{
    struct rpc_call *call = rpc->readers, *next;
    bool any = call != NULL;

    rpc->readers = NULL;
    for (; call; call = next) {
        next = call->next_reader;
        call->wants_read = false;
        start_read(call);
        call_unref(call);
    }
    return any;
}

static void deliver(struct rpc_call *call, grpc_byte_buffer *buffer)
{
    grpc_byte_buffer_reader reader;
    grpc_slice *peeked, all;

    if (!grpc_byte_buffer_reader_init(&reader, buffer)) {
        rpc_finish(call, GRPC_STATUS_INTERNAL, "the message cannot be decompressed", NULL, 0);
        return;
    }
    /* One slice is the common case and needs no copy. An empty message has no slice at all. */
    if (grpc_byte_buffer_length(buffer) == 0) {
        call->method->message(call, (const uint8_t *)"", 0);
    } else if (grpc_byte_buffer_reader_peek(&reader, &peeked)
               && GRPC_SLICE_LENGTH(*peeked) == grpc_byte_buffer_length(buffer)) {
        call->method->message(call, GRPC_SLICE_START_PTR(*peeked), GRPC_SLICE_LENGTH(*peeked));
    } else {
        grpc_byte_buffer_reader_destroy(&reader);
        if (!grpc_byte_buffer_reader_init(&reader, buffer))
            return;
        all = grpc_byte_buffer_reader_readall(&reader);
        call->method->message(call, GRPC_SLICE_START_PTR(all), GRPC_SLICE_LENGTH(all));
        grpc_slice_unref(all);
    }
    grpc_byte_buffer_reader_destroy(&reader);
}

static void on_read(struct tag *tag, bool ok)
{
    struct rpc_call *call = (struct rpc_call *)((char *)tag - offsetof(struct rpc_call, read_tag));
    grpc_byte_buffer *buffer = call->read_buffer;

    (void)ok; /* says nothing reliable at the end of a stream; the pointer does */
    call->is_reading = false;
    call->read_buffer = NULL;
    if (buffer && !call->is_over && !call->finish_wanted) {
        call->rpc->n_messages++;
        deliver(call, buffer);
    } else if (!buffer && !call->is_over && !call->finish_wanted
               && !grpc_call_failed_before_recv_message(call->call)) {
        if (call->method->shape != RPC_STREAM)
            rpc_finish(call, GRPC_STATUS_INVALID_ARGUMENT, "the call carries no request message", NULL, 0);
        else if (call->method->half_close)
            call->method->half_close(call);
    }
    if (buffer)
        grpc_byte_buffer_destroy(buffer);
    call_unref(call);
}

/* ---- sending -------------------------------------------------------------------------------- */

struct rpc_message *rpc_message_create(struct rpc *rpc, size_t n, uint8_t **bytes_p)
{
    struct rpc_message *message;

    if (n > rpc->config.max_message_bytes)
        return NULL;
    message = malloc(sizeof(*message));
    if (!message)
        return NULL;
    message->next = NULL;
    message->slice = grpc_slice_malloc(n);
    *bytes_p = GRPC_SLICE_START_PTR(message->slice);
    return message;
}

static void message_free(struct rpc_message *message)
{
    grpc_slice_unref(message->slice);
    free(message);
}

static void uncount(struct rpc_call *call, size_t n)
{
    call->queued_bytes -= n;
    call->rpc->queued_bytes -= n;
}

static void drop_queue(struct rpc_call *call)
{
    struct rpc_message *message;

    while ((message = call->first) != NULL) {
        call->first = message->next;
        uncount(call, GRPC_SLICE_LENGTH(message->slice));
        message_free(message);
    }
    call->last = NULL;
}

void rpc_send(struct rpc_call *call, struct rpc_message *message)
{
    if (call->is_over || call->finish_wanted || call->send_failed) {
        message_free(message);
        return;
    }
    if (call->last)
        call->last->next = message;
    else
        call->first = message;
    call->last = message;
    call->queued_bytes += GRPC_SLICE_LENGTH(message->slice);
    call->rpc->queued_bytes += GRPC_SLICE_LENGTH(message->slice);
    /* A unary answer waits for rpc_finish, which sends it in one batch with the status. */
    if (call->method->shape != RPC_UNARY)
        start_send(call);
}

static size_t add_metadata_op(struct rpc_call *call, grpc_op *ops, size_t n)
{
    if (call->metadata_sent)
        return n;
    call->metadata_sent = true;
    memset(&ops[n], 0, sizeof(ops[n]));
    ops[n].op = GRPC_OP_SEND_INITIAL_METADATA;
    if (call->trace.parent[0] != '\0') {
        call->initial.key = grpc_slice_from_static_string(TRACEPARENT);
        call->initial.value = grpc_slice_from_static_buffer(call->trace.parent, SRV_TRACEPARENT_BYTES);
        ops[n].data.send_initial_metadata.metadata = &call->initial;
        ops[n].data.send_initial_metadata.count = 1;
    }
    return n + 1;
}

static grpc_byte_buffer *add_message_op(struct rpc_call *call, grpc_op *ops, size_t *n)
{
    struct rpc_message *message = call->first;
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&message->slice, 1);

    call->first = message->next;
    if (!call->first)
        call->last = NULL;
    call->sending_bytes = GRPC_SLICE_LENGTH(message->slice);
    message_free(message);
    memset(&ops[*n], 0, sizeof(ops[*n]));
    ops[*n].op = GRPC_OP_SEND_MESSAGE;
    if (call->first && call->sending_bytes <= MAX_GATHERED_BYTES && call->n_gathered < MAX_GATHERED) {
        ops[*n].flags = GRPC_WRITE_BUFFER_HINT;
        call->n_gathered++;
    } else {
        call->n_gathered = 0;
    }
    ops[*n].data.send_message.send_message = buffer;
    (*n)++;
    return buffer;
}

static void add_status_op(struct rpc_call *call, grpc_op *op)
{
    memset(op, 0, sizeof(*op));
    op->op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    op->data.send_status_from_server.status = (grpc_status_code)call->code;
    op->data.send_status_from_server.status_details = &call->text;
    if (call->n_details > 0) {
        call->trailing.key = grpc_slice_from_static_string("grpc-status-details-bin");
        call->trailing.value = grpc_slice_from_copied_buffer((const char *)call->details, call->n_details);
        op->data.send_status_from_server.trailing_metadata = &call->trailing;
        op->data.send_status_from_server.trailing_metadata_count = 1;
    }
}

/* The next batch out: a message, or the last message with the status, or the status alone. */
static void start_send(struct rpc_call *call)
{
    grpc_byte_buffer *buffer = NULL;
    grpc_op ops[3];
    size_t n = 0;
    bool is_final;

    if (call->is_sending || call->is_finishing || call->is_over || (!call->first && !call->finish_wanted))
        return;
    is_final = call->finish_wanted && (!call->first || !call->first->next);
    n = add_metadata_op(call, ops, n);
    if (call->first)
        buffer = add_message_op(call, ops, &n);
    if (is_final)
        add_status_op(call, &ops[n++]);
    if (is_final)
        call->is_finishing = start_batch(call, ops, n, &call->finish_tag);
    else
        call->is_sending = start_batch(call, ops, n, &call->send_tag);
    call->send_since_us = srv_now_us(); /* now that the message is on its way */
    if (buffer)
        grpc_byte_buffer_destroy(buffer); /* start_batch took its slices */
}

static void on_sent(struct tag *tag, bool ok)
{
    struct rpc_call *call = (struct rpc_call *)((char *)tag - offsetof(struct rpc_call, send_tag));

    call->is_sending = false;
    uncount(call, call->sending_bytes);
    call->sending_bytes = 0;
    if (!ok) {
        call->send_failed = true;
        drop_queue(call);
    }
    start_send(call);
    if (!call->first && !call->is_sending && !call->is_over && !call->finish_wanted && call->method->drained)
        call->method->drained(call);
    call_unref(call);
}

static void on_finished(struct tag *tag, bool ok)
{
    struct rpc_call *call = (struct rpc_call *)((char *)tag - offsetof(struct rpc_call, finish_tag));

    (void)ok;
    uncount(call, call->sending_bytes);
    call->sending_bytes = 0;
    call->send_since_us = 0;
    call_unref(call);
}

void rpc_finish(struct rpc_call *call, int code, const char *text, const void *details, size_t n_details)
{
    if (call->finish_wanted || call->is_over)
        return;
    call->finish_wanted = true;
    call->code = code;
    call->text = grpc_slice_from_copied_string(text);
    if (n_details > 0 && (call->details = malloc(n_details)) != NULL) {
        memcpy(call->details, details, n_details);
        call->n_details = n_details;
    }
    start_send(call);
}

bool rpc_is_finished(const struct rpc_call *call)
{
    return call->finish_wanted || call->is_over;
}

size_t rpc_queued_bytes(const struct rpc_call *call)
{
    return call->queued_bytes;
}

size_t rpc_all_queued_bytes(const struct rpc *rpc)
{
    return rpc->queued_bytes;
}

/* ---- beginning and end of a call ---------------------------------------------------------------- */

static void call_free(struct rpc_call *call)
{
    if (call->prev)
        call->prev->next = call->next;
    else
        call->rpc->calls = call->next;
    if (call->next)
        call->next->prev = call->prev;
    drop_queue(call);
    grpc_slice_unref(call->text);
    if (call->n_details > 0 && call->is_finishing)
        grpc_slice_unref(call->trailing.value);
    free(call->details);
    grpc_metadata_array_destroy(&call->headers);
    grpc_call_unref(call->call);
    free(call);
}

/* A batch has come back. */
static void call_unref(struct rpc_call *call)
{
    SRV_ASSERT(call->n_tags > 0);
    if (--call->n_tags == 0 && call->is_closed)
        call_free(call);
}

/* RECV_CLOSE_ON_SERVER: comes once per call, after our status or when the client is gone. */
static void on_close(struct tag *tag, bool ok)
{
    struct rpc_call *call = (struct rpc_call *)((char *)tag - offsetof(struct rpc_call, close_tag));

    (void)ok; /* always true */
    call->is_over = true;
    call->is_closed = true;
    call->rpc->n_calls--;
    drop_queue(call);
    if (call->rpc->config.ended)
        call->rpc->config.ended(call, call->cancelled != 0 ? GRPC_STATUS_CANCELLED : call->code,
                                srv_now_us() - call->begin_us);
    if (call->method->closed)
        call->method->closed(call, call->cancelled != 0);
    call->data = NULL;
    call_unref(call);
}

/* Core names the peer of a socket that it was handed by its descriptor: "fd:20". Asked when the call begins, while the
 * number is still the connection's. */
static enum rpc_origin origin_of(const struct rpc *rpc, grpc_call *handle)
{
    char *peer = grpc_call_get_peer(handle);
    enum rpc_origin origin = RPC_ORIGIN_TCP;
    int fd;

    if (sscanf(peer, "fd:%d", &fd) == 1 && fd >= 0 && fd < MAX_TRACKED_FDS)
        origin = rpc->connections[fd].origin;
    gpr_free(peer);
    return origin;
}

static const struct rpc_method *find_method(const struct rpc *rpc, grpc_slice path)
{
    for (size_t i = 0; i < rpc->config.n_methods; i++)
        if (grpc_slice_str_cmp(path, rpc->config.methods[i].path) == 0)
            return &rpc->config.methods[i];
    return NULL;
}

static void ignore_message(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    (void)call;
    (void)bytes;
    (void)n;
}

const struct rpc_method rpc_unknown_method = {
    .path = "(unknown)", .shape = RPC_STREAM, .message = ignore_message};

static void read_trace(struct rpc_call *call)
{
    size_t n = 0;
    const char *value = rpc_call_header(call, TRACEPARENT, &n);

    if (value)
        srv_trace_parse(&call->trace, value, n);
}

/* Takes the handle, and the headers out of the array. */
static void begin_call(struct rpc *rpc, grpc_call *handle, grpc_slice path, grpc_metadata_array *headers)
{
    const struct rpc_method *method = find_method(rpc, path);
    struct rpc_call *call = calloc(1, sizeof(*call));
    grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};

    if (!call) {
        grpc_call_cancel_with_status(handle, GRPC_STATUS_RESOURCE_EXHAUSTED, "out of memory", NULL);
        grpc_call_unref(handle);
        return;
    }
    call->rpc = rpc;
    call->call = handle;
    call->method = method ? method : &rpc_unknown_method;
    call->origin = origin_of(rpc, handle);
    call->begin_us = srv_now_us();
    call->number = ++rpc->n_begun;
    call->headers = *headers;
    grpc_metadata_array_init(headers);
    read_trace(call);
    call->text = grpc_empty_slice();
    call->close_tag = (struct tag){on_close, rpc};
    call->read_tag = (struct tag){on_read, rpc};
    call->send_tag = (struct tag){on_sent, rpc};
    call->finish_tag = (struct tag){on_finished, rpc};
    call->next = rpc->calls;
    if (rpc->calls)
        rpc->calls->prev = call;
    rpc->calls = call;
    rpc->n_calls++;
    op.data.recv_close_on_server.cancelled = &call->cancelled;
    SRV_ASSERT(start_batch(call, &op, 1, &call->close_tag));
    if (!method) {
        rpc_finish(call, GRPC_STATUS_UNIMPLEMENTED, "no such method; see reflection", NULL, 0);
        return;
    }
    if (rpc->config.admit && !rpc->config.admit(call)) {
        call->method = &rpc_unknown_method; /* so that no callback of the method's comes */
        call->refused = method;
        return;
    }
    if (method->open)
        method->open(call);
    rpc_read_next(call);
}

static void arm_free(struct arm *arm)
{
    grpc_call_details_destroy(&arm->details);
    grpc_metadata_array_destroy(&arm->metadata);
    free(arm);
}

static void on_call(struct tag *tag, bool ok);

static void arm_one(struct rpc *rpc)
{
    struct arm *arm = calloc(1, sizeof(*arm));

    if (!arm) {
        srv_log(SRV_LOG_ERROR, "out of memory while waiting for calls armed=%u", rpc->n_armed);
        return;
    }
    arm->tag = (struct tag){on_call, rpc};
    grpc_call_details_init(&arm->details);
    grpc_metadata_array_init(&arm->metadata);
    __tsan_release(&arm->tag);
    if (grpc_server_request_call(rpc->server, &arm->call, &arm->details, &arm->metadata, rpc->cq, rpc->cq,
                                 &arm->tag)
        != GRPC_CALL_OK) {
        arm_free(arm);
        return;
    }
    rpc->n_armed++;
}

/* As many as there should be: one that failed for want of memory is made up for at the next occasion. */
static void arm_all(struct rpc *rpc)
{
    unsigned n = rpc->n_armed;

    while (!rpc->is_shutting_down && n++ < N_ARMED)
        arm_one(rpc);
}

static void on_call(struct tag *tag, bool ok)
{
    struct arm *arm = (struct arm *)tag; /* tag is the first member */
    struct rpc *rpc = tag->rpc;

    rpc->n_armed--;
    arm_all(rpc);
    if (ok && arm->call)
        begin_call(rpc, arm->call, arm->details.method, &arm->metadata);
    arm_free(arm);
}

void rpc_check_stalls(struct rpc *rpc, uint64_t now_us)
{
    arm_all(rpc);
    for (struct rpc_call *call = rpc->calls; call; call = call->next) {
        bool is_waiting = (call->is_sending || call->is_finishing) && call->send_since_us != 0;

        if (call->is_over || !is_waiting || now_us < call->send_since_us + rpc->config.stall_timeout_us)
            continue;
        srv_log(SRV_LOG_INFO,
                "stream ended, its client does not read method=%s queued_bytes=%zu call_id=%" PRIu64
                " trace_id=%s",
                rpc_call_path(call), call->queued_bytes, call->number, srv_trace_id(&call->trace));
        call->send_since_us = 0;
        grpc_call_cancel_with_status(call->call, GRPC_STATUS_RESOURCE_EXHAUSTED,
                                     "STALLED: the client did not read its replies in time", NULL);
    }
}

void rpc_set_stall_timeout(struct rpc *rpc, uint64_t timeout_us)
{
    rpc->config.stall_timeout_us = timeout_us;
}

uint64_t rpc_message_count(const struct rpc *rpc)
{
    return rpc->n_messages;
}

/* ---- the server ----------------------------------------------------------------------------------- */

static void on_ring(struct tag *tag, bool ok)
{
    (void)tag;
    (void)ok; /* waking up was the point */
}

static void on_shutdown(struct tag *tag, bool ok)
{
    (void)ok;
    tag->rpc->is_stopped = true;
}

static grpc_arg int_arg(const char *key, int value)
{
    grpc_arg arg = {.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)key};

    arg.value.integer = value;
    return arg;
}

/* gRPC ends the whole call over a message beyond its limit, with everything else that is in flight on it. So its limit is
 * twice ours, and what lies between is refused by the method, for that message alone. */
static int receive_limit(const struct rpc_config *config)
{
    uint64_t limit = config->max_message_bytes * 2 + 65536;

    return limit < INT32_MAX ? (int)limit : INT32_MAX;
}

static grpc_server *create_server(const struct rpc_config *config)
{
    grpc_arg args[] = {
        int_arg(GRPC_ARG_ALLOW_REUSEPORT, 0),
        int_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, (int)config->max_streams),
        int_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, receive_limit(config)),
        int_arg(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, (int)config->max_message_bytes),
        /* Clients may ping every 5 s, with calls or without: a lease is idle most of its life. */
        int_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        int_arg(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000),
    };
    grpc_channel_args channel_args = {sizeof(args) / sizeof(args[0]), args};

    return grpc_server_create(&channel_args, NULL);
}

dsa_status rpc_create(const struct rpc_config *config, struct rpc **rpc_p, struct srv_err *err)
{
    struct rpc *rpc = calloc(1, sizeof(*rpc));

    if (!rpc)
        return srv_fail(err, DSA_E_NO_MEMORY, "rpc", "%s", "", "no memory for the gRPC server");
    rpc->config = *config;
    rpc->shutdown_tag = (struct tag){on_shutdown, rpc};
    rpc->ring_tag = (struct tag){on_ring, rpc};
    rpc->cq = grpc_completion_queue_create_for_next(NULL);
    rpc->server = create_server(config);
    rpc->credentials = grpc_insecure_server_credentials_create();
    rpc->lame = grpc_lame_client_channel_create("doorbell", GRPC_STATUS_UNAVAILABLE, "doorbell");
    grpc_server_register_completion_queue(rpc->server, rpc->cq, NULL);
    grpc_server_start(rpc->server);
    arm_all(rpc);
    *rpc_p = rpc;
    return DSA_OK;
}

void rpc_add_fd(struct rpc *rpc, int fd, enum rpc_origin origin)
{
    if (fd < MAX_TRACKED_FDS)
        rpc->connections[fd] = (struct connection){srv_socket_inode(fd), origin};
    grpc_server_add_channel_from_fd(rpc->server, fd, rpc->credentials);
}

static gpr_timespec wait_deadline(uint64_t wait_us)
{
    if (wait_us == 0)
        return gpr_time_0(
            GPR_CLOCK_MONOTONIC); /* never gpr_now: core rounds that up to the next millisecond */
    if (wait_us == UINT64_MAX)
        return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_micros((int64_t)wait_us, GPR_TIMESPAN));
}

bool rpc_step(struct rpc *rpc, uint64_t wait_us)
{
    grpc_event event = grpc_completion_queue_next(rpc->cq, wait_deadline(wait_us), NULL);
    struct tag *tag = event.tag;

    if (event.type != GRPC_OP_COMPLETE)
        return false;
    __tsan_acquire(tag);
    tag->fn(tag, event.success != 0);
    return true;
}

bool rpc_has_unsent(const struct rpc *rpc, uint64_t patience_us)
{
    uint64_t now = srv_now_us();

    for (const struct rpc_call *call = rpc->calls; call; call = call->next)
        if (!call->is_over && call->queued_bytes > 0 && now < call->send_since_us + patience_us)
            return true;
    return false;
}

void rpc_shutdown(struct rpc *rpc)
{
    if (rpc->is_shutting_down)
        return;
    rpc->is_shutting_down = true;
    __tsan_release(&rpc->shutdown_tag);
    grpc_server_shutdown_and_notify(rpc->server, rpc->cq, &rpc->shutdown_tag);
}

void rpc_cancel_all(struct rpc *rpc)
{
    grpc_server_cancel_all_calls(rpc->server);
}

void rpc_cut(struct rpc *rpc)
{
    for (int fd = 0; fd < MAX_TRACKED_FDS; fd++)
        if (rpc->connections[fd].inode != 0 && rpc->connections[fd].inode == srv_socket_inode(fd))
            shutdown(fd, SHUT_RDWR);
}

bool rpc_is_down(const struct rpc *rpc)
{
    return rpc->is_stopped && !rpc->calls && rpc->n_armed == 0;
}

void rpc_destroy(struct rpc *rpc)
{
    grpc_event event;

    if (!rpc)
        return;
    SRV_ASSERT(rpc_is_down(rpc) && !rpc->readers);
    grpc_channel_destroy(rpc->lame);
    grpc_completion_queue_shutdown(rpc->cq);
    do {
        event = grpc_completion_queue_next(rpc->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_OP_COMPLETE) {
            struct tag *tag = event.tag;

            __tsan_acquire(tag);
            tag->fn(tag, event.success != 0);
        }
    } while (event.type != GRPC_QUEUE_SHUTDOWN);
    grpc_server_destroy(rpc->server);
    grpc_server_credentials_release(rpc->credentials);
    grpc_completion_queue_destroy(rpc->cq);
    free(rpc);
}
