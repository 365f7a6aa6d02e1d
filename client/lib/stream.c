/* stream.c - Attend streams and the life of the requests on them: pending, answered in pieces, done,
 * freed. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "client/lib/stream.h"

/* ---- request bookkeeping --------------------------------------------------------------------- */

static void unlink_request(struct dsa_request *request)
{
    struct dsa_client *client = request->client;

    if (request->prev)
        request->prev->next = request->next;
    else
        client->requests = request->next;
    if (request->next)
        request->next->prev = request->prev;
}

static void link_request(struct dsa_request *request)
{
    request->next = request->client->requests;
    if (request->next)
        request->next->prev = request;
    request->client->requests = request;
}

static void remove_due(struct dsa_request *request)
{
    struct dsa_request **at = &request->client->due_head;

    while (*at != request)
        at = &(*at)->due_next;
    *at = request->due_next;
    if (!*at)
        request->client->due_tail = at;
    request->is_due = false;
}

static void add_due(struct dsa_request *request)
{
    request->due_next = NULL;
    request->is_due = true;
    *request->client->due_tail = request;
    request->client->due_tail = &request->due_next;
}

void dsa__request_use(struct dsa_request *request, const struct dsa_memory *memory)
{
    struct dsa_memory *mine = (struct dsa_memory *)(uintptr_t)memory; /* only the count changes */

    if (!memory)
        return;
    mine->n_users++;
    request->uses[request->n_uses++] = mine;
}

static void complete(struct dsa_request *request)
{
    struct dsa_stream *stream = request->stream;
    uint32_t slot = (uint32_t)(request->id & DSA__SLOT_MASK) - 1;

    stream->slots[slot] = NULL;
    stream->free_slots[stream->n_free++] = slot;
    request->stream = NULL;
    request->is_done = true;
    request->result.elapsed_us = dsa__now_us() - request->submit_us;
    for (unsigned i = 0; i < request->n_uses; i++)
        request->uses[i]->n_users--;
    request->n_uses = 0;
    request->client->n_pending--;
    if (request->is_detached) {
        unlink_request(request);
        free(request);
        return;
    }
    request->client->n_completed++;
    if (request->callback.fn)
        add_due(request);
}

void dsa__run_callbacks(struct dsa_client *client)
{
    if (client->session.is_lost_due) {
        struct dsa_error why = client->session.closing;

        client->session.is_lost_due = false;
        if (client->on_lost) {
            pthread_mutex_unlock(&client->lock);
            client->on_lost(client, &why, client->on_lost_arg);
            pthread_mutex_lock(&client->lock);
        }
    }
    while (client->due_head) {
        struct dsa_request *request = client->due_head;

        remove_due(request); /* before the callback, which may free it */
        pthread_mutex_unlock(&client->lock);
        request->callback.fn(request, &request->result, request->callback.arg);
        pthread_mutex_lock(&client->lock);
    }
}

/* ---- replies --------------------------------------------------------------------------------- */

/* Copies one piece; false when the server's piece does not fit what was asked for. */
static bool store(const struct sink *sink, uint32_t n_rows, const Dsa__V1__AttendReply *reply,
                  const ProtobufCBinaryData *bytes)
{
    if (!sink->data)
        return true; /* in a region, not wanted, or the caller has gone */
    if (reply->n_rows == 0)
        return bytes->len == 0;
    if (reply->row_begin > n_rows || reply->n_rows > n_rows - reply->row_begin
        || bytes->len != (size_t)reply->n_rows * sink->row_bytes)
        return false;
    memcpy(sink->data + (size_t)reply->row_begin * sink->row_bytes, bytes->data, bytes->len);
    return true;
}

static void take_piece(struct dsa_request *request, const Dsa__V1__AttendReply *reply)
{
    struct dsa_result *result = &request->result;

    if (dsa__error_from_wire(reply->status, &result->error) == DSA_OK && result->error.code == DSA_OK) {
        if (store(&request->out, request->n_rows, reply, &reply->out)
            && store(&request->lse, request->n_rows, reply, &reply->lse))
            result->n_rows += reply->n_rows;
        else
            dsa__fail(&result->error, DSA_E_PROTOCOL, NULL, "rows %u + %u of a reply do not fit the request",
                      reply->row_begin, reply->n_rows);
    }
    result->n_invalid += reply->n_invalid;
    result->n_nonfinite += reply->n_nonfinite;
    if (reply->n_tokens != 0)
        result->n_tokens = reply->n_tokens;
    if (reply->timings) {
        result->timings.queue_us = reply->timings->queue_us;
        result->timings.device_us = reply->timings->device_us;
        result->timings.total_us = reply->timings->total_us;
        result->timings.batch_rows = reply->timings->batch_rows;
    }
    if (!reply->last)
        return;
    if (result->error.code == DSA_OK && result->n_rows != request->n_rows)
        dsa__fail(&result->error, DSA_E_PROTOCOL, NULL, "%u of %u rows were answered", result->n_rows,
                  request->n_rows);
    complete(request);
}

static struct dsa_request *find_request(struct dsa_stream *stream, uint64_t id)
{
    uint64_t slot = (id & DSA__SLOT_MASK) - 1; /* 0 wraps and is beyond any n_slots */
    struct dsa_request *request = slot < stream->n_slots ? stream->slots[slot] : NULL;

    return request && request->id == id ? request : NULL;
}

/* Memory of an unpacked reply: most fit a buffer on the stack, and what does not comes from malloc. */
struct scratch {
    size_t used;
    max_align_t bytes[512 / sizeof(max_align_t)];
};

static void *scratch_alloc(void *data, size_t n)
{
    struct scratch *scratch = data;
    size_t need = (n + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
    void *at;

    if (n > sizeof(scratch->bytes) || need > sizeof(scratch->bytes) - scratch->used)
        return malloc(n);
    at = (char *)scratch->bytes + scratch->used;
    scratch->used += need;
    return at;
}

static void scratch_free(void *data, void *at)
{
    struct scratch *scratch = data;
    uintptr_t offset = (uintptr_t)at - (uintptr_t)scratch->bytes;

    if (offset >= sizeof(scratch->bytes))
        free(at);
}

static void stream_message(struct bidi *bidi, const uint8_t *data, size_t n)
{
    struct dsa_stream *stream = (struct dsa_stream *)bidi;
    struct scratch scratch;
    ProtobufCAllocator allocator = {scratch_alloc, scratch_free, &scratch};
    Dsa__V1__AttendReply *reply;
    struct dsa_request *request;

    scratch.used = 0; /* the bytes are not looked at before they are written */
    reply = dsa__v1__attend_reply__unpack(&allocator, n, data);
    if (!reply) {
        dsa__bidi_cancel(bidi); /* which request it answered is unknown: none of them can be trusted to end */
        return;
    }
    request = find_request(stream, reply->request_id);
    if (request)
        take_piece(request, reply);
    bidi->is_quiet = stream->n_free == stream->n_slots;
    dsa__v1__attend_reply__free_unpacked(reply, &allocator);
}

static void stream_free(struct dsa_stream *stream)
{
    struct dsa_stream **at = &stream->client->streams;

    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    if (stream->client->stream == stream)
        stream->client->stream = NULL;
    dsa__bidi_fini(&stream->bidi);
    free(stream->slots);
    free(stream->free_slots);
    free(stream);
}

static void stream_over(struct bidi *bidi)
{
    struct dsa_stream *stream = (struct dsa_stream *)bidi;
    struct dsa_error why;

    if (stream->is_closed)
        dsa__fail(&why, DSA_E_CANCELLED, NULL, "the stream was closed");
    else if (dsa__bidi_status(bidi, &why) == DSA_OK)
        dsa__fail(&why, DSA_E_CONNECT, NULL, "the server ended the stream");
    for (uint32_t i = 0; i < stream->n_slots; i++) {
        if (!stream->slots[i])
            continue;
        stream->slots[i]->result.error = why;
        complete(stream->slots[i]);
    }
    if (stream->free_when_over)
        stream_free(stream);
}

/* ---- streams --------------------------------------------------------------------------------- */

static dsa_status stream_open(struct dsa_client *client, struct dsa_stream **stream_p, struct dsa_error *err)
{
    struct dsa_stream *stream = calloc(1, sizeof(*stream));
    dsa_status status;

    if (!stream)
        return dsa__fail(err, DSA_E_NO_MEMORY, NULL, "no memory for a stream");
    status =
        dsa__bidi_open(&stream->bidi, client, DSA__SERVICE "Attend", 0, stream_message, stream_over, err);
    if (status != DSA_OK) {
        free(stream);
        return status;
    }
    stream->client = client;
    stream->next = client->streams;
    client->streams = stream;
    *stream_p = stream;
    return DSA_OK;
}

dsa_status dsa_stream_open(struct dsa_client *client, struct dsa_stream **stream_p, struct dsa_error *err)
{
    dsa_status status;

    pthread_mutex_lock(&client->lock);
    status = stream_open(client, stream_p, err);
    pthread_mutex_unlock(&client->lock);
    return status;
}

static void let_go(struct dsa_stream *stream)
{
    stream->free_when_over = true;
    if (stream->bidi.is_over)
        stream_free(stream);
}

static void close_stream(struct dsa_stream *stream)
{
    stream->is_closed = true;
    dsa__bidi_cancel(&stream->bidi);
    let_go(stream);
}

void dsa_stream_close(struct dsa_stream *stream)
{
    struct dsa_client *client;

    if (!stream)
        return;
    client = stream->client;
    pthread_mutex_lock(&client->lock);
    close_stream(stream);
    pthread_mutex_unlock(&client->lock);
}

void dsa__streams_end(struct dsa_client *client)
{
    struct dsa_stream *next;

    for (struct dsa_stream *stream = client->streams; stream; stream = next) {
        next = stream->next;
        close_stream(stream);
    }
    while (client->streams) /* cancelled calls complete at once */
        dsa__pump(client, UINT64_MAX);
    while (client->requests) {
        struct dsa_request *request = client->requests;

        unlink_request(request);
        free(request);
    }
}

dsa_status dsa__stream_pick(struct dsa_client *client, struct dsa_stream **stream_p, struct dsa_error *err)
{
    if (*stream_p)
        return DSA_OK;
    if (client->stream && client->stream->bidi.has_status) {
        struct dsa_stream *old = client->stream;

        client->stream = NULL;
        let_go(old); /* what is pending on it completes with its own error */
    }
    if (!client->stream) {
        dsa_status status = stream_open(client, &client->stream, err);

        if (status != DSA_OK)
            return status;
    }
    *stream_p = client->stream;
    return DSA_OK;
}

/* ---- requests -------------------------------------------------------------------------------- */

static bool grow_slots(struct dsa_stream *stream)
{
    uint32_t n = stream->n_slots ? stream->n_slots * 2 : 64;
    struct dsa_request **slots;
    uint32_t *free_slots;

    if (n > DSA__SLOT_MASK)
        return false;
    slots = realloc(stream->slots, n * sizeof(*slots));
    if (!slots)
        return false;
    stream->slots = slots;
    free_slots = realloc(stream->free_slots, n * sizeof(*free_slots));
    if (!free_slots)
        return false;
    stream->free_slots = free_slots;
    for (uint32_t i = stream->n_slots; i < n; i++) {
        slots[i] = NULL;
        free_slots[stream->n_free++] = n - 1 - (i - stream->n_slots);
    }
    stream->n_slots = n;
    return true;
}

dsa_status dsa__request_alloc(struct dsa_stream *stream, struct callback callback,
                              struct dsa_request **request_p, struct dsa_error *err)
{
    struct dsa_client *client = stream->client;
    uint32_t n_inflight = stream->n_slots - stream->n_free;
    uint32_t limit = client->caps.limits.max_inflight_per_stream;
    struct dsa_request *request;

    if (limit != 0 && n_inflight >= limit)
        return dsa__fail(err, DSA_E_QUEUE_FULL, NULL, "%u requests of this stream are unanswered",
                         n_inflight);
    request = malloc(sizeof(*request)); /* not calloc, which goes past glibc's cache */
    if (!request || (stream->n_free == 0 && !grow_slots(stream))) {
        free(request);
        return dsa__fail(err, DSA_E_NO_MEMORY, NULL, "no memory for a request");
    }
    memset(request, 0, sizeof(*request));
    request->client = client;
    request->stream = stream;
    request->callback = callback;
    request->id = ++stream->serial << DSA__SLOT_BITS | (stream->free_slots[stream->n_free - 1] + 1);
    *request_p = request;
    return DSA_OK;
}

dsa_status dsa__request_send(struct dsa_request *request, Dsa__V1__AttendRequest *message, bool is_small,
                             struct dsa_error *err)
{
    struct dsa_stream *stream = request->stream;
    struct dsa_client *client = request->client;
    dsa_status status;

    message->request_id = request->id;
    if (!stream->is_named)
        message->session = dsa__token(client);
    request->submit_us = dsa__now_us();
    status = dsa__bidi_send(&stream->bidi, &message->base, is_small, err);
    if (status != DSA_OK) {
        for (unsigned i = 0; i < request->n_uses; i++)
            request->uses[i]->n_users--;
        free(request);
        return status;
    }
    stream->is_named = true;
    stream->slots[stream->free_slots[--stream->n_free]] = request;
    link_request(request);
    client->n_pending++;
    dsa__heartbeat_if_due(client, request->submit_us);
    return DSA_OK;
}

/* Asks the server to drop it. The message's own id names no slot, so that no reply can be taken for one. */
static void send_cancel(struct dsa_request *request)
{
    struct dsa_stream *stream = request->stream;
    Dsa__V1__CancelOp cancel = DSA__V1__CANCEL_OP__INIT;
    Dsa__V1__AttendRequest message = DSA__V1__ATTEND_REQUEST__INIT;

    cancel.target_request_id = request->id;
    message.request_id = ++stream->serial << DSA__SLOT_BITS;
    message.op_case = DSA__V1__ATTEND_REQUEST__OP_CANCEL;
    message.cancel = &cancel;
    /* A failure means that the stream is over, which completes the request anyway. */
    (void)dsa__bidi_send(&stream->bidi, &message.base, true, NULL);
}

void dsa_request_cancel(struct dsa_request *request)
{
    struct dsa_client *client = request->client;

    pthread_mutex_lock(&client->lock);
    if (!request->is_done)
        send_cancel(request);
    pthread_mutex_unlock(&client->lock);
}

void dsa__request_free(struct dsa_request *request)
{
    if (request->is_done) {
        if (request->is_due)
            remove_due(request);
        unlink_request(request);
        free(request);
    } else {
        send_cancel(request);
        request->is_detached = true;
        request->out.data = NULL;
        request->lse.data = NULL;
    }
}

void dsa_request_free(struct dsa_request *request)
{
    struct dsa_client *client;

    if (!request)
        return;
    client = request->client;
    pthread_mutex_lock(&client->lock);
    dsa__request_free(request);
    pthread_mutex_unlock(&client->lock);
}

bool dsa_request_is_done(const struct dsa_request *request)
{
    struct dsa_client *client = request->client;
    bool is_done;

    pthread_mutex_lock(&client->lock); /* the keeper may be completing it */
    is_done = request->is_done;
    pthread_mutex_unlock(&client->lock);
    return is_done;
}

const struct dsa_result *dsa_request_result(const struct dsa_request *request)
{
    return &request->result;
}

void dsa__settle_completed(struct dsa_client *client)
{
    client->n_reported = client->n_completed;
    dsa__run_callbacks(client);
}

dsa_status dsa_wait(struct dsa_request *request, uint64_t timeout_us, struct dsa_error *err)
{
    struct dsa_client *client = request->client;
    uint64_t now = timeout_us ? dsa__now_us() : 0;
    uint64_t until_us = timeout_us == 0 || timeout_us > UINT64_MAX - now ? UINT64_MAX : now + timeout_us;
    dsa_status status;

    pthread_mutex_lock(&client->lock);
    while (!request->is_done && (until_us == UINT64_MAX || dsa__now_us() < until_us))
        dsa__pump(client, until_us);
    if (request->is_done) {
        status = request->result.error.code;
        if (status != DSA_OK && err)
            *err = request->result.error;
    } else {
        status = dsa__fail(err, DSA_E_TIMEOUT, NULL, "the request is still pending");
    }
    dsa__settle_completed(client); /* its callback may free the request */
    pthread_mutex_unlock(&client->lock);
    return status;
}

dsa_status dsa_wait_all(struct dsa_client *client, uint64_t timeout_us, struct dsa_error *err)
{
    uint64_t now = dsa__now_us();
    uint64_t until_us = timeout_us == 0 || timeout_us > UINT64_MAX - now ? UINT64_MAX : now + timeout_us;
    dsa_status status = DSA_OK;

    pthread_mutex_lock(&client->lock);
    dsa__settle_completed(client);
    while (client->n_pending > 0 && status == DSA_OK) { /* callbacks may submit more */
        if (dsa__now_us() >= until_us)
            status = dsa__fail(err, DSA_E_TIMEOUT, NULL, "%llu requests are still pending",
                               (unsigned long long)client->n_pending);
        else
            dsa__pump(client, until_us);
        dsa__settle_completed(client);
    }
    pthread_mutex_unlock(&client->lock);
    return status;
}
