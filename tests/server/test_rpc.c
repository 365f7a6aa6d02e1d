/* The gRPC surface against a client written on gRPC core, both in this thread: what each kind of call
 * does, and that a call that ends in whatever way is closed exactly once. */
#include <fcntl.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#if __has_include(<grpc/credentials.h>)
#include <grpc/credentials.h> /* newer cores; grpc_security.h had it all before */
#endif

#include "kit.h"
#include "server/clock.h"
#include "server/rpc.h"

#define MAX_MESSAGE (512 * 1024)
#define MAX_STREAMS 8
#define STALL_US    5000000

/* ---- the service under test -------------------------------------------------------------------------- */

static struct {
    int n_open, n_messages, n_half_closes, n_drained, n_closed, n_cancelled;
    int n_unbegun; /* closed without a message; a call that is closed twice would look like this, too */
    size_t n_bytes;
    struct rpc_call *call; /* the last one that said something */
    bool is_holding;       /* answer nothing until the test says so */
    int n_to_send;         /* Many: messages */
    size_t size_to_send;
    bool is_closed_door; /* calls without the header "key: open" are refused */
    int n_ended, last_code;
    char last_path[64];
    enum rpc_origin last_origin;
} seen;

static struct rpc *rpc;

static void send_copy(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    uint8_t *room;
    struct rpc_message *message = rpc_message_create(rpc_call_rpc(call), n, &room);

    ck_assert_ptr_nonnull(message);
    if (bytes)
        memcpy(room, bytes, n);
    else
        memset(room, 0x5a, n);
    rpc_send(call, message);
}

static bool admit(struct rpc_call *call)
{
    size_t n = 0;
    const char *key = rpc_call_header(call, "key", &n);

    ck_assert_ptr_null(rpc_call_header(call, "other", &n));
    seen.last_origin = rpc_call_origin(call);
    if (!seen.is_closed_door || (key && n == 4 && memcmp(key, "open", 4) == 0))
        return true;
    rpc_finish(call, 7, "the door is closed", NULL, 0);
    return false;
}

static void ended(struct rpc_call *call, int code, uint64_t took_us)
{
    ck_assert_uint_lt(took_us, KIT_PATIENCE_S * 1000000u);
    seen.n_ended++;
    seen.last_code = code;
    snprintf(seen.last_path, sizeof(seen.last_path), "%s", rpc_call_path(call));
}

static void on_open(struct rpc_call *call)
{
    seen.n_open++;
    seen.call = call;
    ck_assert_ptr_null(rpc_call_data(call));
    ck_assert_ptr_eq(rpc_call_service(call), &seen);
    rpc_call_set_data(call, &seen);
}

static void on_unary(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    on_open(call);
    seen.n_messages++;
    seen.n_bytes += n;
    if (seen.is_holding)
        return;
    send_copy(call, bytes, n);
    rpc_finish(call, 0, "", NULL, 0);
}

static void on_refusal(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    (void)bytes;
    (void)n;
    on_open(call);
    rpc_finish(call, 3, "the field is wrong", "\x01\x00\xff", 3);
    rpc_finish(call, 5, "a second finish is ignored", NULL, 0);
    ck_assert(rpc_is_finished(call));
    send_copy(call, (const uint8_t *)"dropped", 7);
}

static void on_many(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    (void)bytes;
    (void)n;
    on_open(call);
    seen.n_messages++;
    for (int i = 0; i < seen.n_to_send; i++)
        send_copy(call, NULL, seen.size_to_send);
    if (!seen.is_holding)
        rpc_finish(call, 0, "", NULL, 0);
}

static void on_stream_message(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    seen.n_messages++;
    seen.n_bytes += n;
    seen.call = call;
    if (!seen.is_holding)
        send_copy(call, bytes, n);
    rpc_read_next(call);
    rpc_read_next(call); /* harmless */
}

static void on_half_close(struct rpc_call *call)
{
    seen.n_half_closes++;
    if (!seen.is_holding)
        rpc_finish(call, 0, "", NULL, 0);
}

static void on_drained(struct rpc_call *call)
{
    seen.n_drained++;
    ck_assert_uint_eq(rpc_queued_bytes(call), 0);
}

static void on_closed(struct rpc_call *call, bool is_cancelled)
{
    ck_assert(rpc_is_finished(call));
    if (!rpc_call_data(call)) {
        seen.n_unbegun++;
        return;
    }
    seen.n_closed++;
    seen.n_cancelled += is_cancelled;
    rpc_finish(call, 0, "", NULL, 0); /* late, harmless */
    send_copy(call, (const uint8_t *)"late", 4);
    rpc_read_next(call);
    seen.call = NULL;
}

static const struct rpc_method methods[] = {
    {.path = "/t.S/Unary", .shape = RPC_UNARY, .message = on_unary, .closed = on_closed},
    {.path = "/t.S/Refuse", .shape = RPC_UNARY, .message = on_refusal, .closed = on_closed},
    {.path = "/t.S/Many",
     .shape = RPC_SERVER_STREAM,
     .message = on_many,
     .drained = on_drained,
     .closed = on_closed},
    {.path = "/t.S/Bidi",
     .shape = RPC_STREAM,
     .open = on_open,
     .message = on_stream_message,
     .half_close = on_half_close,
     .drained = on_drained,
     .closed = on_closed},
};

/* ---- a client --------------------------------------------------------------------------------------- */

struct tag {
    bool is_done, is_ok;
};

struct client_call {
    grpc_call *call;
    struct tag send, receive, half_close, status_tag;
    grpc_metadata_array initial, trailing;
    grpc_byte_buffer *received;
    grpc_status_code status;
    grpc_slice details;
};

static grpc_channel *channel;
static grpc_completion_queue *cq;

/* Both sides' events. Sleeps only after many rounds in which there were none. */
static void step(void)
{
    static int n_idle;
    bool worked = rpc_step(rpc, 0);
    grpc_event event;

    worked |= rpc_flush(rpc);
    event = grpc_completion_queue_next(cq, gpr_time_0(GPR_CLOCK_MONOTONIC), NULL);
    if (event.type == GRPC_OP_COMPLETE) {
        struct tag *tag = event.tag;

        tag->is_done = true;
        tag->is_ok = event.success != 0;
        worked = true;
    }
    n_idle = worked ? 0 : n_idle + 1;
    if (n_idle > 200)
        rpc_step(rpc, 1000);
}

#define STEP_UNTIL(cond)                                                                                     \
    do {                                                                                                     \
        uint64_t late_ = srv_now_us() + KIT_PATIENCE_S * 1000000u;                                           \
        while (!(cond)) {                                                                                    \
            step();                                                                                          \
            KIT_EXPECT(srv_now_us() < late_, "never came: %s", #cond);                                       \
        }                                                                                                    \
    } while (0)

static void start_batch(struct client_call *c, const grpc_op *ops, size_t n, struct tag *tag)
{
    *tag = (struct tag){false, false};
    ck_assert_int_eq(grpc_call_start_batch(c->call, ops, n, tag, NULL), GRPC_CALL_OK);
}

/* Begins a call: initial metadata out with up to one header, status awaited. */
static void begin_with(struct client_call *c, const char *path, const char *key, const char *value)
{
    grpc_metadata header = {.key = grpc_slice_from_copied_string(key),
                            .value = grpc_slice_from_copied_string(value)};
    grpc_op ops[2] = {{.op = GRPC_OP_SEND_INITIAL_METADATA}, {.op = GRPC_OP_RECV_INITIAL_METADATA}};
    grpc_op status = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT};

    memset(c, 0, sizeof(*c));
    c->call = grpc_channel_create_call(channel, NULL, GRPC_PROPAGATE_DEFAULTS, cq,
                                       grpc_slice_from_copied_string(path), NULL,
                                       gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    ck_assert_ptr_nonnull(c->call);
    grpc_metadata_array_init(&c->initial);
    grpc_metadata_array_init(&c->trailing);
    ops[0].data.send_initial_metadata.metadata = &header;
    ops[0].data.send_initial_metadata.count = key[0] != '\0';
    ops[1].data.recv_initial_metadata.recv_initial_metadata = &c->initial;
    start_batch(c, ops, 2, &c->send);
    grpc_slice_unref(header.key);
    grpc_slice_unref(header.value);
    status.data.recv_status_on_client.trailing_metadata = &c->trailing;
    status.data.recv_status_on_client.status = &c->status;
    status.data.recv_status_on_client.status_details = &c->details;
    start_batch(c, &status, 1, &c->status_tag);
}

static void begin(struct client_call *c, const char *path)
{
    begin_with(c, path, "", "");
}

static void send_bytes(struct client_call *c, size_t n)
{
    grpc_slice slice = grpc_slice_malloc(n);
    grpc_byte_buffer *buffer;
    grpc_op op = {.op = GRPC_OP_SEND_MESSAGE};
    struct tag *tag = calloc(1, sizeof(*tag));

    for (size_t i = 0; i < n; i++)
        GRPC_SLICE_START_PTR(slice)[i] = (uint8_t)(i * 7 + n);
    buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    op.data.send_message.send_message = buffer;
    start_batch(c, &op, 1, tag);
    grpc_byte_buffer_destroy(buffer);
    STEP_UNTIL(tag->is_done);
    free(tag);
}

static void half_close(struct client_call *c)
{
    grpc_op op = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};

    start_batch(c, &op, 1, &c->half_close);
    STEP_UNTIL(c->half_close.is_done);
}

/* Reads one message and checks what send_bytes wrote; returns its length, or -1 at the end. */
static long receive(struct client_call *c, bool is_echo)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
    grpc_byte_buffer_reader reader;
    grpc_slice all;
    long n;

    op.data.recv_message.recv_message = &c->received;
    start_batch(c, &op, 1, &c->receive);
    STEP_UNTIL(c->receive.is_done);
    if (!c->received)
        return -1;
    ck_assert(grpc_byte_buffer_reader_init(&reader, c->received));
    all = grpc_byte_buffer_reader_readall(&reader);
    n = (long)GRPC_SLICE_LENGTH(all);
    for (long i = 0; i < n; i++)
        KIT_EXPECT(GRPC_SLICE_START_PTR(all)[i] == (is_echo ? (uint8_t)(i * 7 + n) : 0x5a), "byte %ld of %ld",
                   i, n);
    grpc_slice_unref(all);
    grpc_byte_buffer_reader_destroy(&reader);
    grpc_byte_buffer_destroy(c->received);
    c->received = NULL;
    return n;
}

/* Waits for the status and gives up the call. */
static int end(struct client_call *c)
{
    STEP_UNTIL(c->status_tag.is_done && c->send.is_done);
    grpc_metadata_array_destroy(&c->initial);
    grpc_metadata_array_destroy(&c->trailing);
    grpc_slice_unref(c->details);
    grpc_call_unref(c->call);
    return (int)c->status;
}

static void cancel(struct client_call *c)
{
    ck_assert_int_eq(grpc_call_cancel(c->call, NULL), GRPC_CALL_OK);
}

static bool has_text(const struct client_call *c, const char *text)
{
    char whole[256] = "";
    size_t n = GRPC_SLICE_LENGTH(c->details);

    memcpy(whole, GRPC_SLICE_START_PTR(c->details), n < 255 ? n : 255);
    return strstr(whole, text) != NULL;
}

/* ---- fixture ------------------------------------------------------------------------------------------ */

static void connect_client(void)
{
    grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
    grpc_arg args[2] = {
        {.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH},
        {.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)GRPC_ARG_MAX_SEND_MESSAGE_LENGTH}};
    grpc_channel_args channel_args = {2, args};
    int fds[2];

    args[0].value.integer = args[1].value.integer = -1;
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
    rpc_add_fd(rpc, fds[0], RPC_ORIGIN_UNIX);
    channel = grpc_channel_create_from_fd("test", fds[1], credentials, &channel_args);
    ck_assert_ptr_nonnull(channel);
    grpc_channel_credentials_release(credentials);
}

static void open_all(void)
{
    struct rpc_config config = {
        .methods = methods,
        .n_methods = sizeof(methods) / sizeof(methods[0]),
        .service = &seen,
        .admit = admit,
        .ended = ended,
        .max_message_bytes = MAX_MESSAGE,
        .max_streams = MAX_STREAMS,
        .stall_timeout_us = STALL_US,
    };
    struct srv_err err = {0};

    memset(&seen, 0, sizeof(seen));
    rpc_init();
    KIT_OK(rpc_create(&config, &rpc, &err), &err);
    cq = grpc_completion_queue_create_for_next(NULL);
    connect_client();
}

static void close_all(void)
{
    grpc_event event;

    if (channel)
        grpc_channel_destroy(channel);
    channel = NULL;
    rpc_shutdown(rpc);
    rpc_shutdown(rpc); /* again: nothing happens */
    rpc_cancel_all(rpc);
    STEP_UNTIL(rpc_is_down(rpc));
    grpc_completion_queue_shutdown(cq);
    do
        event = grpc_completion_queue_next(cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    while (event.type != GRPC_QUEUE_SHUTDOWN);
    grpc_completion_queue_destroy(cq);
    rpc_destroy(rpc);
    rpc_destroy(NULL);
    rpc_fini();
    ck_assert_int_eq(seen.n_closed, seen.n_open); /* exactly once each */
    ck_assert_int_eq(seen.n_unbegun, 0);
}

/* A whole unary call; returns its status. */
static int call_unary(const char *path, size_t n, long *n_reply_p)
{
    struct client_call c;

    begin(&c, path);
    send_bytes(&c, n);
    half_close(&c);
    *n_reply_p = receive(&c, true);
    return end(&c);
}

static void expect_serving(void)
{
    long n;

    ck_assert_int_eq(call_unary("/t.S/Unary", 10, &n), 0);
    ck_assert_int_eq(n, 10);
}

/* ---- calls ----------------------------------------------------------------------------------- */

START_TEST(unary_of_every_size)
{
    static const size_t sizes[] = {0, 1, 2, 100, 16384, 70000, 300000, MAX_MESSAGE};

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        long n;

        ck_assert_int_eq(call_unary("/t.S/Unary", sizes[i], &n), 0);
        ck_assert_int_eq(n, (long)sizes[i]);
    }
    ck_assert_int_eq(seen.n_messages, 8);
    STEP_UNTIL(seen.n_closed == 8);
    ck_assert_int_eq(seen.n_cancelled, 0);
}
END_TEST

START_TEST(unknown_methods_are_unimplemented)
{
    static const char *const paths[] = {"/t.S/Nothing", "/t.S/unary", "/t.S/Unary/", "/other.S/Unary", "/"};

    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        struct client_call c;

        begin(&c, paths[i]);
        STEP_UNTIL(c.status_tag.is_done);
        ck_assert_msg(has_text(&c, "reflection"), "%s", paths[i]);
        ck_assert_int_eq(end(&c), 12);
    }
    ck_assert_int_eq(seen.n_open, 0);
    expect_serving();
}
END_TEST

START_TEST(a_closed_door_refuses_before_the_method)
{
    static const char *const paths[] = {"/t.S/Unary", "/t.S/Many", "/t.S/Bidi"};
    struct client_call c;

    seen.is_closed_door = true;
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        begin_with(&c, paths[i], "key", "shut");
        STEP_UNTIL(c.status_tag.is_done);
        ck_assert(has_text(&c, "the door is closed"));
        ck_assert_int_eq(end(&c), 7);
        STEP_UNTIL(seen.n_ended == (int)i + 1);
        ck_assert_int_eq(seen.last_code, 7);
        ck_assert_str_eq(seen.last_path, paths[i]);
    }
    ck_assert_int_eq(seen.n_open, 0);
    begin_with(&c, "/t.S/Unary", "key", "open");
    send_bytes(&c, 10);
    half_close(&c);
    ck_assert_int_eq(receive(&c, true), 10);
    ck_assert_int_eq(end(&c), 0);
    STEP_UNTIL(seen.n_ended == 4);
    ck_assert_int_eq(seen.last_code, 0);
    ck_assert_int_eq(seen.last_origin, RPC_ORIGIN_UNIX);
}
END_TEST

START_TEST(unary_without_a_message)
{
    struct client_call c;

    begin(&c, "/t.S/Unary");
    half_close(&c);
    ck_assert_int_eq(end(&c), 3);
    ck_assert_int_eq(seen.n_messages, 0);
    STEP_UNTIL(seen.n_unbegun == 1); /* `closed` alone came */
    expect_serving();
    ck_assert_int_eq(seen.n_unbegun, 1);
    seen.n_unbegun = 0;
}
END_TEST

/* Somewhat too large: the method is told and can refuse that message alone. Far too large: gRPC ends the
 * call. */
START_TEST(messages_beyond_the_limit)
{
    struct client_call c;
    uint8_t *bytes;

    seen.is_holding = true;
    begin(&c, "/t.S/Bidi");
    send_bytes(&c, MAX_MESSAGE + 1);
    STEP_UNTIL(seen.n_messages == 1);
    ck_assert_uint_eq(seen.n_bytes, MAX_MESSAGE + 1);
    ck_assert_ptr_null(rpc_message_create(rpc, MAX_MESSAGE + 1, &bytes));
    ck_assert_ptr_null(rpc_message_create(rpc, SIZE_MAX, &bytes));
    send_bytes(&c, 2 * MAX_MESSAGE + 65537);
    ck_assert_int_eq(end(&c), 8);
    STEP_UNTIL(seen.n_closed == 1);
    ck_assert_int_eq(seen.n_messages, 1);
    seen.is_holding = false;
    expect_serving();
}
END_TEST

START_TEST(errors_carry_their_details)
{
    struct client_call c;
    bool has_details = false;

    begin(&c, "/t.S/Refuse");
    send_bytes(&c, 5);
    half_close(&c);
    ck_assert_int_eq(receive(&c, true), -1); /* what was sent after the finish is dropped */
    STEP_UNTIL(c.status_tag.is_done);
    ck_assert(has_text(&c, "the field is wrong"));
    for (size_t i = 0; i < c.trailing.count; i++)
        has_details |= grpc_slice_str_cmp(c.trailing.metadata[i].key, "grpc-status-details-bin") == 0
                       && GRPC_SLICE_LENGTH(c.trailing.metadata[i].value) == 3
                       && memcmp(GRPC_SLICE_START_PTR(c.trailing.metadata[i].value), "\x01\x00\xff", 3) == 0;
    ck_assert(has_details);
    ck_assert_int_eq(end(&c), 3);
}
END_TEST

START_TEST(server_stream_sends_many)
{
    struct client_call c;

    seen.n_to_send = 50;
    seen.size_to_send = 20000; /* more than the socket holds */
    begin(&c, "/t.S/Many");
    send_bytes(&c, 1);
    half_close(&c);
    for (int i = 0; i < 50; i++)
        ck_assert_int_eq(receive(&c, false), 20000);
    ck_assert_int_eq(receive(&c, false), -1);
    ck_assert_int_eq(end(&c), 0);
}
END_TEST

START_TEST(queued_bytes_are_counted_until_they_left)
{
    struct client_call c;

    seen.n_to_send = 10;
    seen.size_to_send = 1000;
    seen.is_holding = true;
    begin(&c, "/t.S/Many");
    send_bytes(&c, 1);
    STEP_UNTIL(seen.n_messages == 1);
    ck_assert_uint_le(rpc_queued_bytes(seen.call), 10000);
    for (int i = 0; i < 10; i++)
        ck_assert_int_eq(receive(&c, false), 1000);
    STEP_UNTIL(seen.n_drained > 0 && rpc_queued_bytes(seen.call) == 0);
    rpc_finish(seen.call, 0, "", NULL, 0);
    ck_assert_int_eq(end(&c), 0);
}
END_TEST

START_TEST(bidi_ping_pong)
{
    struct client_call c;

    begin(&c, "/t.S/Bidi");
    for (size_t i = 0; i < 200; i++) {
        send_bytes(&c, i * 13);
        ck_assert_int_eq(receive(&c, true), (long)(i * 13));
    }
    ck_assert_int_eq(seen.n_half_closes, 0);
    half_close(&c);
    ck_assert_int_eq(receive(&c, true), -1);
    ck_assert_int_eq(end(&c), 0);
    STEP_UNTIL(seen.n_closed == 1);
    ck_assert_int_eq(seen.n_half_closes, 1);
    ck_assert_int_eq(seen.n_cancelled, 0);
    ck_assert_int_eq(seen.n_open, 1);
}
END_TEST

/* ---- ends ------------------------------------------------------------------------------------ */

enum {
    AT_ONCE,
    AFTER_OPEN,
    WHILE_HELD,
    WHILE_QUEUED,
    AFTER_HALF_CLOSE,
    WITH_FINISH,
    BY_CONNECTION,
    UNARY_HELD,
    N_POINTS
};

START_TEST(cancelled_at_each_point)
{
    struct client_call c;
    bool is_unary = _i == UNARY_HELD;

    seen.is_holding = true;
    begin(&c, is_unary ? "/t.S/Unary" : "/t.S/Bidi");
    if (_i != AT_ONCE && !is_unary)
        STEP_UNTIL(seen.n_open == 1);
    if (_i == WHILE_HELD || _i == WHILE_QUEUED || is_unary) {
        send_bytes(&c, 1000);
        STEP_UNTIL(seen.n_messages == 1);
    }
    if (_i == WHILE_QUEUED)
        for (int i = 0; i < 100; i++)
            send_copy(seen.call, NULL, 100000); /* nobody reads */
    if (_i == AFTER_HALF_CLOSE) {
        half_close(&c);
        STEP_UNTIL(seen.n_half_closes == 1);
    }
    if (_i == WITH_FINISH)
        rpc_finish(seen.call, 0, "", NULL, 0);
    if (_i == BY_CONNECTION) {
        cancel(&c); /* the channel goes with its last call */
        grpc_channel_destroy(channel);
        channel = NULL;
    } else {
        cancel(&c);
    }
    end(&c);
    STEP_UNTIL(seen.n_closed == seen.n_open);
    if (_i != WITH_FINISH && _i != AT_ONCE) {
        ck_assert_int_eq(seen.n_open, 1);
        ck_assert_int_eq(seen.n_cancelled, 1);
    }
    if (!channel)
        connect_client();
    seen.is_holding = false;
    expect_serving();
    STEP_UNTIL(seen.n_closed == seen.n_open);
}
END_TEST

/* Steps of a whole exchange are cut short after 0, 1, 2, ... of them. */
START_TEST(cancelled_after_any_number_of_steps)
{
    for (int n_steps = 0; n_steps < KIT_TIMES(60, 25); n_steps++) {
        struct client_call c;
        int i = 0;

        begin(&c, "/t.S/Bidi");
        while (i++ < n_steps)
            step();
        if (n_steps % 3 == 1)
            send_bytes(&c, 3000);
        if (n_steps % 3 == 2)
            half_close(&c);
        for (i = 0; i < n_steps % 7; i++)
            step();
        cancel(&c);
        end(&c);
        STEP_UNTIL(seen.n_closed == seen.n_open);
    }
    expect_serving();
}
END_TEST

START_TEST(a_client_that_does_not_read_is_ended)
{
    uint64_t before_us = srv_now_us(); /* nothing has waited longer */
    struct client_call c;

    seen.is_holding = true;
    seen.n_to_send = 200;
    seen.size_to_send = 100000;
    begin(&c, "/t.S/Many");
    send_bytes(&c, 1);
    STEP_UNTIL(seen.n_messages == 1);
    for (int i = 0; i < 200; i++)
        step();
    ck_assert_uint_gt(rpc_queued_bytes(seen.call), 0);
    ck_assert(rpc_has_unsent(rpc, UINT64_C(60000000)));
    ck_assert(!rpc_has_unsent(rpc, 0));
    rpc_check_stalls(rpc, before_us + STALL_US - 1); /* not long enough yet */
    for (int i = 0; i < 20; i++)
        step();
    ck_assert_int_eq(seen.n_closed, 0);
    rpc_check_stalls(rpc, srv_now_us() + STALL_US);
    STEP_UNTIL(seen.n_closed == 1);
    while (receive(&c, false) >= 0)
        ;
    STEP_UNTIL(c.status_tag.is_done);
    ck_assert_int_eq(end(&c), 8);
    ck_assert(!rpc_has_unsent(rpc, UINT64_C(60000000)));
    seen.is_holding = false;
    expect_serving();
}
END_TEST

START_TEST(streams_beyond_the_limit_wait)
{
    struct client_call calls[MAX_STREAMS + 1];

    for (int i = 0; i < MAX_STREAMS; i++) {
        begin(&calls[i], "/t.S/Bidi");
        STEP_UNTIL(seen.n_open == i + 1);
    }
    begin(&calls[MAX_STREAMS], "/t.S/Bidi");
    for (int i = 0; i < 50; i++)
        step();
    ck_assert_int_eq(seen.n_open, MAX_STREAMS);
    half_close(&calls[0]);
    ck_assert_int_eq(end(&calls[0]), 0);
    STEP_UNTIL(seen.n_open == MAX_STREAMS + 1);
    for (int i = 1; i <= MAX_STREAMS; i++) {
        half_close(&calls[i]);
        ck_assert_int_eq(end(&calls[i]), 0);
    }
}
END_TEST

START_TEST(shutdown_lets_running_calls_end)
{
    struct client_call running, late;

    begin(&running, "/t.S/Bidi");
    send_bytes(&running, 100);
    ck_assert_int_eq(receive(&running, true), 100);
    rpc_shutdown(rpc);
    send_bytes(&running, 200);
    ck_assert_int_eq(receive(&running, true), 200);
    begin(&late, "/t.S/Bidi");
    STEP_UNTIL(late.status_tag.is_done);
    ck_assert_int_eq(end(&late), 14);
    ck_assert(!rpc_is_down(rpc));
    half_close(&running);
    ck_assert_int_eq(end(&running), 0);
    STEP_UNTIL(seen.n_closed == 1);
    ck_assert_int_eq(seen.n_cancelled, 0);
}
END_TEST

START_TEST(cancel_all_ends_what_still_runs)
{
    struct client_call c;

    seen.is_holding = true;
    begin(&c, "/t.S/Bidi");
    STEP_UNTIL(seen.n_open == 1);
    rpc_shutdown(rpc);
    rpc_cancel_all(rpc);
    ck_assert_int_ne(end(&c), 0);
    STEP_UNTIL(rpc_is_down(rpc));
    ck_assert_int_eq(seen.n_closed, 1);
}
END_TEST

/* What is not HTTP/2 costs the sender its connection and nobody else anything. */
START_TEST(other_protocols_are_shown_out)
{
    static const char *const lines[] = {"GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01\x02",
                                        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff", ""};

    kit_log_begin();
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        int fds[2];
        char bytes[512];
        ssize_t n = -1;

        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
        rpc_add_fd(rpc, fds[0], RPC_ORIGIN_UNIX);
        ck_assert_int_eq(write(fds[1], lines[i], strlen(lines[i])), (ssize_t)strlen(lines[i]));
        ck_assert_int_eq(shutdown(fds[1], SHUT_WR), 0);
        STEP_UNTIL((n = read(fds[1], bytes, sizeof(bytes)))
                   == 0); /* first what it has to say, then the end */
        close(fds[1]);
    }
    kit_log_end();
    expect_serving();
}
END_TEST

/* A ring that nobody has taken yet when its bell goes. */
START_TEST(a_ring_may_outlive_its_bell)
{
    struct rpc_bell *bell;

    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(rpc_bell_create(rpc, &bell), DSA_OK);
        rpc_bell_ring(bell);
        rpc_bell_destroy(bell);
    }
    rpc_bell_destroy(NULL);
    expect_serving();
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *calls = tcase_create("calls"), *ends = tcase_create("ends");
    TCase *both[] = {calls, ends};

    (void)max;
    suites_p[0] = suite_create("rpc");
    for (int i = 0; i < 2; i++) {
        tcase_add_checked_fixture(both[i], open_all, close_all);
        tcase_set_timeout(both[i], 60);
        suite_add_tcase(suites_p[0], both[i]);
    }
    tcase_add_test(calls, unary_of_every_size);
    tcase_add_test(calls, unknown_methods_are_unimplemented);
    tcase_add_test(calls, unary_without_a_message);
    tcase_add_test(calls, a_closed_door_refuses_before_the_method);
    tcase_add_test(calls, messages_beyond_the_limit);
    tcase_add_test(calls, errors_carry_their_details);
    tcase_add_test(calls, server_stream_sends_many);
    tcase_add_test(calls, queued_bytes_are_counted_until_they_left);
    tcase_add_test(calls, bidi_ping_pong);
    tcase_add_loop_test(ends, cancelled_at_each_point, 0, N_POINTS);
    tcase_add_test(ends, cancelled_after_any_number_of_steps);
    tcase_add_test(ends, a_client_that_does_not_read_is_ended);
    tcase_add_test(ends, streams_beyond_the_limit_wait);
    tcase_add_test(ends, shutdown_lets_running_calls_end);
    tcase_add_test(ends, cancel_all_ends_what_still_runs);
    tcase_add_test(ends, other_protocols_are_shown_out);
    tcase_add_test(ends, a_ring_may_outlive_its_bell);
    return 1;
}
