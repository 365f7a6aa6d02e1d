/* echo_grpc.c - a bidi echo on bare gRPC core: one completion queue, one thread, handlers on it. What any service on this
 * library must pay. */
#include "echo.h"

#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/time.h>
#include <stdbool.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if __has_include(<grpc/credentials.h>)
#include <grpc/credentials.h> /* newer cores; grpc_security.h had it all before */
#endif

enum kind { TAG_CALL, TAG_CLOSE, TAG_RECV, TAG_SEND };

struct echo_call {
    enum kind tags[4]; /* addresses of these are the batch tags */
    grpc_call *call;
    grpc_metadata_array metadata;
    grpc_call_details details;
    grpc_byte_buffer *received;
    int cancelled;
    int n_owed; /* replies still to send */
    bool is_sending, metadata_sent, is_over;
};

static grpc_event next_event(grpc_completion_queue *cq, int spin)
{
    grpc_event event;

    if (!spin)
        return grpc_completion_queue_next(cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    do {
        event = grpc_completion_queue_next(cq, gpr_time_0(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_QUEUE_TIMEOUT)
            sched_yield();
    } while (event.type == GRPC_QUEUE_TIMEOUT);
    return event;
}

static grpc_byte_buffer *make_message(size_t n)
{
    grpc_slice slice = grpc_slice_malloc(n);
    grpc_byte_buffer *buffer;

    memset(GRPC_SLICE_START_PTR(slice), 'x', n);
    buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return buffer;
}

static void start(struct echo_call *call, grpc_op *ops, size_t n, enum kind kind)
{
    call->tags[kind] = kind;
    if (grpc_call_start_batch(call->call, ops, n, &call->tags[kind], NULL) != GRPC_CALL_OK)
        abort();
}

static struct echo_call *call_of(enum kind *tag)
{
    return (struct echo_call *)((char *)tag - sizeof(enum kind) * (size_t)*tag);
}

/* ---- server ------------------------------------------------------------------------------------ */

static void arm(grpc_server *server, grpc_completion_queue *cq)
{
    struct echo_call *call = calloc(1, sizeof(*call));

    if (!call)
        abort();
    call->tags[TAG_CALL] = TAG_CALL;
    grpc_metadata_array_init(&call->metadata);
    grpc_call_details_init(&call->details);
    if (grpc_server_request_call(server, &call->call, &call->details, &call->metadata, cq, cq,
                                 &call->tags[TAG_CALL])
        != GRPC_CALL_OK)
        abort();
}

static void receive(struct echo_call *call)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};

    op.data.recv_message.recv_message = &call->received;
    start(call, &op, 1, TAG_RECV);
}

static void send_reply(struct echo_call *call)
{
    grpc_byte_buffer *message;
    grpc_op ops[2] = {{.op = GRPC_OP_SEND_INITIAL_METADATA}};
    size_t n = call->metadata_sent ? 0 : 1;

    if (call->is_sending || call->n_owed == 0)
        return;
    call->n_owed--;
    call->metadata_sent = true;
    message = make_message(BENCH_REPLY_BYTES);
    memset(&ops[n], 0, sizeof(ops[n]));
    ops[n].op = GRPC_OP_SEND_MESSAGE;
    ops[n].data.send_message.send_message = message;
    call->is_sending = true;
    start(call, ops, n + 1, TAG_SEND);
    grpc_byte_buffer_destroy(message);
}

static void work(uint64_t ns)
{
    uint64_t begin = bench_now_ns();

    while (bench_now_ns() - begin < ns)
        ;
}

static void serve_event(grpc_server *server, grpc_completion_queue *cq, grpc_event event, uint64_t work_ns)
{
    enum kind *tag = event.tag;
    struct echo_call *call = call_of(tag);
    grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};

    switch (*tag) {
    case TAG_CALL:
        arm(server, cq);
        op.data.recv_close_on_server.cancelled = &call->cancelled;
        start(call, &op, 1, TAG_CLOSE);
        receive(call);
        break;
    case TAG_RECV:
        if (!call->received)
            break; /* the bench ends its stream by leaving */
        grpc_byte_buffer_destroy(call->received);
        work(work_ns);
        call->n_owed++;
        send_reply(call);
        receive(call);
        break;
    case TAG_SEND:
        call->is_sending = false;
        if (!call->is_over)
            send_reply(call);
        break;
    case TAG_CLOSE:
        call->is_over = true;
        break;
    }
}

int bench_grpc_server(const char *path, int spin, uint64_t work_ns)
{
    grpc_completion_queue *cq;
    grpc_server_credentials *credentials;
    grpc_server *server;
    char address[160];

    snprintf(address, sizeof(address), "unix:%s", path);
    grpc_init();
    cq = grpc_completion_queue_create_for_next(NULL);
    server = grpc_server_create(NULL, NULL);
    credentials = grpc_insecure_server_credentials_create();
    grpc_server_register_completion_queue(server, cq, NULL);
    if (!grpc_server_add_http2_port(server, address, credentials))
        return 1;
    grpc_server_start(server);
    for (int i = 0; i < 8; i++)
        arm(server, cq);
    for (;;)
        serve_event(server, cq, next_event(cq, spin), work_ns);
}

/* ---- client ------------------------------------------------------------------------------------ */

struct pump {
    struct echo_call call;
    int n_requests, n_inflight, n_sent, n_received;
    uint64_t *times, *sent_at;
};

static void send_request(struct pump *pump)
{
    grpc_byte_buffer *message;
    grpc_op op = {.op = GRPC_OP_SEND_MESSAGE};

    if (pump->call.is_sending || pump->n_sent == pump->n_requests
        || pump->n_sent - pump->n_received >= pump->n_inflight)
        return;
    message = make_message(BENCH_REQUEST_BYTES);
    op.data.send_message.send_message = message;
    pump->sent_at[pump->n_sent++] = bench_now_ns();
    pump->call.is_sending = true;
    start(&pump->call, &op, 1, TAG_SEND);
    grpc_byte_buffer_destroy(message);
}

static uint64_t pump_all(struct pump *pump, grpc_completion_queue *cq, int spin)
{
    uint64_t begin = bench_now_ns();

    receive(&pump->call);
    send_request(pump);
    while (pump->n_received < pump->n_requests) {
        grpc_event event = next_event(cq, spin);
        enum kind *tag = event.tag;

        if (*tag == TAG_SEND) {
            pump->call.is_sending = false;
        } else if (*tag == TAG_RECV) {
            if (!pump->call.received)
                return 0;
            grpc_byte_buffer_destroy(pump->call.received);
            if (pump->times)
                pump->times[pump->n_received] = bench_now_ns() - pump->sent_at[pump->n_received];
            pump->n_received++;
            if (pump->n_received < pump->n_requests)
                receive(&pump->call);
        }
        send_request(pump);
    }
    return bench_now_ns() - begin;
}

uint64_t bench_grpc_client(const char *path, int spin, int n_requests, int n_inflight, uint64_t *times)
{
    struct pump pump = {.n_requests = n_requests, .n_inflight = n_inflight, .times = times};
    grpc_completion_queue *cq;
    grpc_channel_credentials *credentials;
    grpc_channel *channel;
    grpc_metadata_array metadata;
    grpc_op ops[2] = {{.op = GRPC_OP_SEND_INITIAL_METADATA}, {.op = GRPC_OP_RECV_INITIAL_METADATA}};
    char address[160];
    uint64_t elapsed;

    snprintf(address, sizeof(address), "unix:%s", path);
    grpc_init();
    cq = grpc_completion_queue_create_for_next(NULL);
    credentials = grpc_insecure_credentials_create();
    channel = grpc_channel_create(address, credentials, NULL);
    pump.sent_at = calloc((size_t)n_requests, sizeof(*pump.sent_at));
    pump.call.call = grpc_channel_create_call(channel, NULL, GRPC_PROPAGATE_DEFAULTS, cq,
                                              grpc_slice_from_static_string("/bench.Echo/Echo"), NULL,
                                              gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    grpc_metadata_array_init(&metadata);
    start(&pump.call, ops, 1, TAG_CALL);
    ops[1].data.recv_initial_metadata.recv_initial_metadata = &metadata;
    start(&pump.call, &ops[1], 1, TAG_CLOSE);
    elapsed = pump.sent_at ? pump_all(&pump, cq, spin) : 0;
    grpc_call_cancel(pump.call.call, NULL);
    grpc_completion_queue_shutdown(cq);
    while (grpc_completion_queue_next(cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).type
           != GRPC_QUEUE_SHUTDOWN)
        ;
    grpc_call_unref(pump.call.call);
    grpc_metadata_array_destroy(&metadata);
    grpc_channel_destroy(channel);
    grpc_channel_credentials_release(credentials);
    grpc_completion_queue_destroy(cq);
    free(pump.sent_at);
    grpc_shutdown_blocking();
    return elapsed;
}
