/* call.c - the two shapes of call: unary (request, wait, reply) and bidi (messages both ways, one send and
 * one receive in flight). Both end with a gRPC status, whose rich details become a dsa_error. */
#include <grpc/byte_buffer_reader.h>
#include <grpc/support/alloc.h>
#include <stdlib.h>
#include <string.h>

#include "client/lib/internal.h"

#define DETAILS_KEY "grpc-status-details-bin"

/* A message that others wait behind need not go out by itself: gRPC may gather small ones into one write. Not too many, so that
 * the server gets to work meanwhile. */
#define MAX_GATHERED       15
#define MAX_GATHERED_BYTES 1024

/* ---- messages -------------------------------------------------------------------------------- */

static grpc_byte_buffer *pack(const ProtobufCMessage *message, size_t size)
{
    grpc_slice slice = grpc_slice_malloc(size);
    grpc_byte_buffer *buffer;

    protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));
    buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return buffer;
}

/* A small message is packed aside, which spares walking through it for its size first. */
static grpc_byte_buffer *pack_small(const ProtobufCMessage *message)
{
    uint8_t bytes[DSA__SMALL_BYTES];
    size_t size = protobuf_c_message_pack(message, bytes);
    grpc_slice slice = grpc_slice_from_copied_buffer((const char *)bytes, size);
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);

    grpc_slice_unref(slice);
    return buffer;
}

static dsa_status pack_checked(struct dsa_client *client, const ProtobufCMessage *message, bool is_small,
                               grpc_byte_buffer **buffer_p, struct dsa_error *err)
{
    uint64_t limit = client->max_send_bytes;
    size_t size;

    if (is_small && (limit == 0 || limit >= DSA__SMALL_BYTES)) {
        *buffer_p = pack_small(message);
        return DSA_OK;
    }
    size = protobuf_c_message_get_packed_size(message);
    if (limit != 0 && size > limit)
        return dsa__fail(err, DSA_E_TOO_LARGE, NULL,
                         "the message has %zu bytes, the server takes %llu; use memory", size,
                         (unsigned long long)limit);
    *buffer_p = pack(message, size);
    return DSA_OK;
}

/* Calls fn with the message's bytes in one piece: without a copy when it came in one slice. */
static void with_bytes(grpc_byte_buffer *buffer, void (*fn)(const uint8_t *, size_t, void *), void *arg)
{
    grpc_byte_buffer_reader reader;
    size_t length = grpc_byte_buffer_length(buffer);
    grpc_slice *first, all;

    if (!grpc_byte_buffer_reader_init(&reader, buffer)) {
        fn(NULL, 0, arg);
        return;
    }
    if (grpc_byte_buffer_reader_peek(&reader, &first) && GRPC_SLICE_LENGTH(*first) == length) {
        fn(GRPC_SLICE_START_PTR(*first), length, arg);
    } else {
        grpc_byte_buffer_reader_destroy(&reader);
        if (!grpc_byte_buffer_reader_init(&reader, buffer)) {
            fn(NULL, 0, arg);
            return;
        }
        all = grpc_byte_buffer_reader_readall(&reader);
        fn(GRPC_SLICE_START_PTR(all), GRPC_SLICE_LENGTH(all), arg);
        grpc_slice_unref(all);
    }
    grpc_byte_buffer_reader_destroy(&reader);
}

static dsa_status end_error(grpc_status_code code, grpc_slice text, const grpc_metadata_array *trailing,
                            struct dsa_error *err)
{
    const uint8_t *details = NULL;
    size_t n_details = 0;

    for (size_t i = 0; i < trailing->count; i++) {
        if (grpc_slice_str_cmp(trailing->metadata[i].key, DETAILS_KEY) == 0) {
            details = GRPC_SLICE_START_PTR(trailing->metadata[i].value);
            n_details = GRPC_SLICE_LENGTH(trailing->metadata[i].value);
        }
    }
    return dsa__error_from_grpc((int)code, (const char *)GRPC_SLICE_START_PTR(text), GRPC_SLICE_LENGTH(text),
                                details, n_details, err);
}

static grpc_call *create_call(struct dsa_client *client, const char *method, uint64_t timeout_us)
{
    gpr_timespec deadline = gpr_inf_future(GPR_CLOCK_MONOTONIC);

    if (timeout_us != 0)
        deadline = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                gpr_time_from_micros((int64_t)timeout_us, GPR_TIMESPAN));
    return grpc_channel_create_call(client->channel, NULL, GRPC_PROPAGATE_DEFAULTS, client->cq,
                                    grpc_slice_from_static_string(method), NULL, deadline, NULL);
}

/* ---- traceparent ----------------------------------------------------------------------------- */

static bool is_id(const char *text, size_t n, bool may_be_zero)
{
    bool is_zero = true;

    for (size_t i = 0; i < n; i++) {
        if (!(text[i] >= '0' && text[i] <= '9') && !(text[i] >= 'a' && text[i] <= 'f'))
            return false;
        is_zero = is_zero && text[i] == '0';
    }
    return may_be_zero || !is_zero;
}

bool dsa__is_traceparent(const char *text)
{
    return strlen(text) == DSA__TRACEPARENT_BYTES && strncmp(text, "00-", 3) == 0
           && is_id(text + 3, 32, false) && text[35] == '-' && is_id(text + 36, 16, false) && text[52] == '-'
           && is_id(text + 53, 2, true);
}

dsa_status dsa_set_traceparent(struct dsa_client *client, const char *traceparent, struct dsa_error *err)
{
    if (traceparent && !dsa__is_traceparent(traceparent))
        return dsa__fail(err, DSA_E_BAD_REQUEST, "traceparent", "must be 00-<32 hex>-<16 hex>-<2 hex>");
    pthread_mutex_lock(&client->lock);
    strcpy(client->traceparent, traceparent ? traceparent : "");
    pthread_mutex_unlock(&client->lock);
    return DSA_OK;
}

/* ---- unary ----------------------------------------------------------------------------------- */

struct unary {
    struct op op; /* first: the tag */
    bool is_done;
    grpc_byte_buffer *request, *reply;
    grpc_slice traceparent;
    grpc_metadata headers[2]; /* authorization, traceparent; gRPC may look at them until the batch is done */
    grpc_metadata_array initial, trailing;
    grpc_status_code code;
    grpc_slice text;
};

static void unary_done(struct op *op, bool ok)
{
    (void)ok; /* a batch with RECV_STATUS succeeds always; `code` tells */
    ((struct unary *)op)->is_done = true;
}

struct unpack_args {
    const ProtobufCMessageDescriptor *type;
    ProtobufCMessage *message;
};

static void unpack(const uint8_t *data, size_t n, void *arg)
{
    struct unpack_args *args = arg;

    args->message = protobuf_c_message_unpack(args->type, NULL, n, data);
}

static grpc_op initial_metadata_op(struct dsa_client *client, uint32_t flags)
{
    grpc_op op;

    memset(&op, 0, sizeof(op));
    op.op = GRPC_OP_SEND_INITIAL_METADATA;
    op.flags = flags;
    op.data.send_initial_metadata.metadata = &client->authorization;
    op.data.send_initial_metadata.count = client->n_authorization;
    return op;
}

static bool unary_start(struct dsa_client *client, struct unary *unary, grpc_call *call, uint32_t flags)
{
    grpc_op ops[6];

    memset(ops, 0, sizeof(ops));
    ops[0] = initial_metadata_op(client, flags);
    if (client->traceparent[0] != '\0') {
        grpc_metadata *header = &unary->headers[client->n_authorization];

        unary->traceparent = grpc_slice_from_copied_string(client->traceparent);
        unary->headers[0] = client->authorization;
        header->key = grpc_slice_from_static_string("traceparent");
        header->value = unary->traceparent;
        ops[0].data.send_initial_metadata.metadata = unary->headers;
        ops[0].data.send_initial_metadata.count = client->n_authorization + 1;
    }
    ops[1].op = GRPC_OP_SEND_MESSAGE;
    ops[1].data.send_message.send_message = unary->request;
    ops[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &unary->initial;
    ops[4].op = GRPC_OP_RECV_MESSAGE;
    ops[4].data.recv_message.recv_message = &unary->reply;
    ops[5].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[5].data.recv_status_on_client.trailing_metadata = &unary->trailing;
    ops[5].data.recv_status_on_client.status = &unary->code;
    ops[5].data.recv_status_on_client.status_details = &unary->text;
    unary->op.fn = unary_done;
    return grpc_call_start_batch(call, ops, 6, &unary->op, NULL) == GRPC_CALL_OK;
}

static dsa_status unary_result(struct unary *unary, const char *method,
                               const ProtobufCMessageDescriptor *reply_type, void *reply_p,
                               struct dsa_error *err)
{
    struct unpack_args args = {reply_type, NULL};

    if (unary->code != GRPC_STATUS_OK)
        return end_error(unary->code, unary->text, &unary->trailing, err);
    if (unary->reply)
        with_bytes(unary->reply, unpack, &args);
    if (!args.message)
        return dsa__fail(err, DSA_E_PROTOCOL, NULL, "%s answered bytes that are not its reply", method);
    memcpy(reply_p, &args.message, sizeof(args.message));
    return DSA_OK;
}

static dsa_status unary_call(struct dsa_client *client, const char *method, const ProtobufCMessage *request,
                             const ProtobufCMessageDescriptor *reply_type, uint64_t timeout_us,
                             uint32_t flags, void *reply_p, struct dsa_error *err)
{
    struct unary unary = {.text = grpc_empty_slice(), .traceparent = grpc_empty_slice()};
    grpc_call *call;
    dsa_status status = pack_checked(client, request, false, &unary.request, err);

    if (status != DSA_OK)
        return status;
    grpc_metadata_array_init(&unary.initial);
    grpc_metadata_array_init(&unary.trailing);
    call = create_call(client, method, timeout_us);
    if (unary_start(client, &unary, call, flags)) {
        /* The call's own deadline ends the wait, so the batch is never left behind on this stack. */
        while (!unary.is_done)
            dsa__pump(client, UINT64_MAX);
        status = unary_result(&unary, method, reply_type, reply_p, err);
    } else {
        status = dsa__fail(err, DSA_E_INTERNAL, NULL, "%s could not be started", method);
    }
    grpc_byte_buffer_destroy(unary.request);
    if (unary.reply)
        grpc_byte_buffer_destroy(unary.reply);
    grpc_slice_unref(unary.text);
    grpc_slice_unref(unary.traceparent);
    grpc_metadata_array_destroy(&unary.initial);
    grpc_metadata_array_destroy(&unary.trailing);
    grpc_call_unref(call);
    return status;
}

dsa_status dsa__unary(struct dsa_client *client, const char *method, const ProtobufCMessage *request,
                      const ProtobufCMessageDescriptor *reply_type, void *reply_p, struct dsa_error *err)
{
    return unary_call(client, method, request, reply_type, client->rpc_timeout_us, 0, reply_p, err);
}

dsa_status dsa__unary_wait_ready(struct dsa_client *client, const char *method,
                                 const ProtobufCMessage *request,
                                 const ProtobufCMessageDescriptor *reply_type, uint64_t timeout_us,
                                 void *reply_p, struct dsa_error *err)
{
    return unary_call(client, method, request, reply_type, timeout_us, GRPC_INITIAL_METADATA_WAIT_FOR_READY,
                      reply_p, err);
}

dsa_status dsa__unary_fail_fast(struct dsa_client *client, const char *method,
                                const ProtobufCMessage *request, const ProtobufCMessageDescriptor *reply_type,
                                uint64_t timeout_us, void *reply_p, struct dsa_error *err)
{
    return unary_call(client, method, request, reply_type, timeout_us, 0, reply_p, err);
}

/* ---- bidi ------------------------------------------------------------------------------------ */

#define BIDI_OF(op_p, member) ((struct bidi *)(void *)((char *)(op_p)-offsetof(struct bidi, member)))

static void drop_queue(struct bidi *bidi)
{
    while (bidi->head) {
        struct outgoing *next = bidi->head->next;

        grpc_byte_buffer_destroy(bidi->head->message);
        free(bidi->head);
        bidi->head = next;
    }
    bidi->tail = &bidi->head;
}

static bool start(struct bidi *bidi, const grpc_op *ops, size_t n_ops, struct op *op)
{
    if (grpc_call_start_batch(bidi->call, ops, n_ops, op, NULL) != GRPC_CALL_OK)
        return false;
    bidi->n_ops++;
    return true;
}

/* Every completion ends here: over when the status is known and nothing is in flight. */
static void settle(struct bidi *bidi)
{
    bidi->n_ops--;
    if (bidi->n_ops != 0 || !bidi->has_status || bidi->is_over)
        return;
    bidi->is_over = true;
    drop_queue(bidi);
    bidi->on_over(bidi); /* may free the bidi */
}

static void recv_next(struct bidi *bidi)
{
    grpc_op op;

    memset(&op, 0, sizeof(op));
    op.op = GRPC_OP_RECV_MESSAGE;
    op.data.recv_message.recv_message = &bidi->received;
    bidi->received = NULL;
    start(bidi, &op, 1, &bidi->recv_op);
}

/* Takes the message. */
static void start_send(struct bidi *bidi, grpc_byte_buffer *message)
{
    grpc_op op;

    memset(&op, 0, sizeof(op));
    op.op = GRPC_OP_SEND_MESSAGE;
    op.data.send_message.send_message = message;
    if (bidi->head && grpc_byte_buffer_length(message) <= MAX_GATHERED_BYTES
        && bidi->n_gathered < MAX_GATHERED) {
        op.flags = GRPC_WRITE_BUFFER_HINT;
        bidi->n_gathered++;
    } else {
        bidi->n_gathered = 0;
    }
    bidi->is_sending = start(bidi, &op, 1, &bidi->send_op);
    grpc_byte_buffer_destroy(message); /* start_batch took the slices */
}

static void send_next(struct bidi *bidi)
{
    struct outgoing *out = bidi->head;
    grpc_op op;

    if (bidi->is_sending || bidi->has_status)
        return;
    if (out) {
        bidi->head = out->next;
        if (!bidi->head)
            bidi->tail = &bidi->head;
        start_send(bidi, out->message);
        free(out);
    } else if (bidi->is_close_wanted && !bidi->is_close_sent) {
        memset(&op, 0, sizeof(op));
        op.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
        bidi->is_close_sent = true;
        start(bidi, &op, 1, &bidi->close_op);
    }
}

/* The list holds the call like a batch does. */
static void receive_next(struct bidi *bidi)
{
    if (!bidi->is_quiet) {
        recv_next(bidi);
        return;
    }
    bidi->n_ops++;
    bidi->next_quiet = bidi->client->quiet;
    bidi->client->quiet = bidi;
}

void dsa__bidi_listen(struct dsa_client *client)
{
    struct bidi *bidi;

    while ((bidi = client->quiet) != NULL) {
        client->quiet = bidi->next_quiet;
        bidi->is_quiet = false;
        recv_next(bidi);
        settle(bidi); /* may free it */
    }
}

static void deliver(const uint8_t *data, size_t n, void *arg)
{
    struct bidi *bidi = arg;

    bidi->on_message(bidi, data, n);
}

static void on_recv(struct op *op, bool ok)
{
    struct bidi *bidi = BIDI_OF(op, recv_op);
    grpc_byte_buffer *message = bidi->received;

    (void)ok; /* the pointer tells: NULL is the end, whatever ok says */
    bidi->received = NULL;
    if (message) {
        with_bytes(message, deliver, bidi);
        grpc_byte_buffer_destroy(message);
        receive_next(bidi);
    }
    settle(bidi);
}

static void on_send(struct op *op, bool ok)
{
    struct bidi *bidi = BIDI_OF(op, send_op);

    bidi->is_sending = false;
    if (ok)
        send_next(bidi);
    settle(bidi);
}

static void on_start(struct op *op, bool ok)
{
    (void)ok; /* a failed start shows in the status */
    settle(BIDI_OF(op, start_op));
}

static void on_close(struct op *op, bool ok)
{
    (void)ok;
    settle(BIDI_OF(op, close_op));
}

static void on_status(struct op *op, bool ok)
{
    struct bidi *bidi = BIDI_OF(op, status_op);

    (void)ok;
    bidi->has_status = true;
    settle(bidi);
}

dsa_status dsa__bidi_open(struct bidi *bidi, struct dsa_client *client, const char *method,
                          uint64_t deadline_us, void (*on_message)(struct bidi *, const uint8_t *, size_t),
                          void (*on_over)(struct bidi *), struct dsa_error *err)
{
    grpc_op ops[2];

    memset(bidi, 0, sizeof(*bidi));
    bidi->client = client;
    bidi->tail = &bidi->head;
    bidi->details = grpc_empty_slice();
    bidi->on_message = on_message;
    bidi->on_over = on_over;
    bidi->start_op.fn = on_start;
    bidi->recv_op.fn = on_recv;
    bidi->send_op.fn = on_send;
    bidi->close_op.fn = on_close;
    bidi->status_op.fn = on_status;
    grpc_metadata_array_init(&bidi->initial);
    grpc_metadata_array_init(&bidi->trailing);
    bidi->call = create_call(client, method, deadline_us);

    memset(ops, 0, sizeof(ops));
    ops[0].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[0].data.recv_status_on_client.trailing_metadata = &bidi->trailing;
    ops[0].data.recv_status_on_client.status = &bidi->code;
    ops[0].data.recv_status_on_client.status_details = &bidi->details;
    if (!start(bidi, ops, 1, &bidi->status_op)) {
        dsa__bidi_fini(bidi);
        return dsa__fail(err, DSA_E_INTERNAL, NULL, "%s could not be started", method);
    }
    ops[0] = initial_metadata_op(client, 0);
    start(bidi, ops, 1, &bidi->start_op);
    memset(ops, 0, sizeof(ops));
    ops[0].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[0].data.recv_initial_metadata.recv_initial_metadata = &bidi->initial;
    ops[1].op = GRPC_OP_RECV_MESSAGE;
    ops[1].data.recv_message.recv_message = &bidi->received;
    start(bidi, ops, 2, &bidi->recv_op);
    return DSA_OK;
}

static bool enqueue(struct bidi *bidi, grpc_byte_buffer *message)
{
    struct outgoing *out = malloc(sizeof(*out));

    if (!out)
        return false;
    out->next = NULL;
    out->message = message;
    *bidi->tail = out;
    bidi->tail = &out->next;
    return true;
}

dsa_status dsa__bidi_send(struct bidi *bidi, const ProtobufCMessage *message, bool is_small,
                          struct dsa_error *err)
{
    grpc_byte_buffer *buffer = NULL;
    dsa_status status;

    if (bidi->has_status || bidi->is_close_wanted)
        return dsa__fail(err, DSA_E_CONNECT, NULL, "the stream has ended");
    status = pack_checked(bidi->client, message, is_small, &buffer, err);
    if (status != DSA_OK)
        return status;
    if (!bidi->is_sending && !bidi->head) {
        start_send(bidi, buffer);
    } else if (!enqueue(bidi, buffer)) {
        grpc_byte_buffer_destroy(buffer);
        return dsa__fail(err, DSA_E_NO_MEMORY, NULL, "no memory for a message");
    }
    return DSA_OK;
}

void dsa__bidi_half_close(struct bidi *bidi)
{
    bidi->is_close_wanted = true;
    send_next(bidi);
}

void dsa__bidi_cancel(struct bidi *bidi)
{
    if (!bidi->is_over)
        grpc_call_cancel(bidi->call, NULL);
}

dsa_status dsa__bidi_status(const struct bidi *bidi, struct dsa_error *err)
{
    if (bidi->code == GRPC_STATUS_OK)
        return DSA_OK;
    return end_error(bidi->code, bidi->details, &bidi->trailing, err);
}

void dsa__bidi_fini(struct bidi *bidi)
{
    drop_queue(bidi);
    grpc_metadata_array_destroy(&bidi->initial);
    grpc_metadata_array_destroy(&bidi->trailing);
    grpc_slice_unref(bidi->details);
    grpc_call_unref(bidi->call);
}
