/* sequence.c - sequences and the unary operations on their rows. */
#include <stdlib.h>
#include <string.h>

#include "client/lib/internal.h"

#define CALL(client, method, request, reply_type, reply_p, err)                                              \
    dsa__unary((client), DSA__SERVICE method, &(request).base, &dsa__v1__##reply_type##__descriptor,         \
               (reply_p), (err))

/* The id of a reply that is a Sequence. The reply comes by address: the call that fills it is an argument
 * beside it. */
static dsa_status take_id(dsa_status status, Dsa__V1__Sequence *const *reply_p, uint64_t *id_p)
{
    Dsa__V1__Sequence *reply;

    if (status != DSA_OK)
        return status;
    reply = *reply_p;
    *id_p = reply->id;
    dsa__v1__sequence__free_unpacked(reply, NULL);
    return DSA_OK;
}

dsa_status dsa_sequence_create(struct dsa_client *client, const char *device_uuid, uint64_t *id_p,
                               struct dsa_error *err)
{
    Dsa__V1__CreateSequenceRequest request = DSA__V1__CREATE_SEQUENCE_REQUEST__INIT;
    Dsa__V1__Sequence *reply;
    dsa_status status;

    pthread_mutex_lock(&client->lock);
    request.session = dsa__token(client);
    if (device_uuid)
        request.device_uuid = (char *)(uintptr_t)device_uuid; /* packing only reads it */
    status = take_id(CALL(client, "CreateSequence", request, sequence, &reply, err), &reply, id_p);
    pthread_mutex_unlock(&client->lock);
    return status;
}

dsa_status dsa_sequence_fork(struct dsa_client *client, uint64_t source, uint64_t n_tokens, uint64_t *id_p,
                             struct dsa_error *err)
{
    Dsa__V1__ForkSequenceRequest request = DSA__V1__FORK_SEQUENCE_REQUEST__INIT;
    Dsa__V1__Sequence *reply;
    dsa_status status;

    pthread_mutex_lock(&client->lock);
    request.session = dsa__token(client);
    request.sequence_id = source;
    request.n_tokens = n_tokens;
    status = take_id(CALL(client, "ForkSequence", request, sequence, &reply, err), &reply, id_p);
    pthread_mutex_unlock(&client->lock);
    return status;
}

dsa_status dsa_sequence_truncate(struct dsa_client *client, uint64_t id, uint64_t n_tokens,
                                 struct dsa_error *err)
{
    Dsa__V1__TruncateSequenceRequest request = DSA__V1__TRUNCATE_SEQUENCE_REQUEST__INIT;
    Dsa__V1__Sequence *reply;
    uint64_t same;
    dsa_status status;

    pthread_mutex_lock(&client->lock);
    request.session = dsa__token(client);
    request.sequence_id = id;
    request.n_tokens = n_tokens;
    status = take_id(CALL(client, "TruncateSequence", request, sequence, &reply, err), &reply, &same);
    pthread_mutex_unlock(&client->lock);
    return status;
}

dsa_status dsa_sequence_release(struct dsa_client *client, uint64_t id, struct dsa_error *err)
{
    Dsa__V1__ReleaseSequenceRequest request = DSA__V1__RELEASE_SEQUENCE_REQUEST__INIT;
    Dsa__V1__ReleaseSequenceReply *reply;
    dsa_status status;

    pthread_mutex_lock(&client->lock);
    request.session = dsa__token(client);
    request.sequence_id = id;
    status = CALL(client, "ReleaseSequence", request, release_sequence_reply, &reply, err);
    if (status == DSA_OK)
        dsa__v1__release_sequence_reply__free_unpacked(reply, NULL);
    pthread_mutex_unlock(&client->lock);
    return status;
}

/* Moves the lists over instead of copying them. */
static void take_sequence(Dsa__V1__Sequence *reply, struct dsa_sequence *sequence)
{
    memset(sequence, 0, sizeof(*sequence));
    sequence->id = reply->id;
    sequence->n_tokens = reply->n_tokens;
    sequence->n_pages = reply->n_pages;
    sequence->n_pages_shared = reply->n_pages_shared;
    sequence->n_layer_tokens = (uint32_t)reply->n_layer_tokens;
    sequence->layer_tokens = reply->layer_tokens;
    sequence->n_page_ids = (uint32_t)reply->n_page_ids;
    sequence->page_ids = reply->page_ids;
    reply->n_layer_tokens = 0;
    reply->layer_tokens = NULL;
    reply->n_page_ids = 0;
    reply->page_ids = NULL;
}

dsa_status dsa_sequence_get(struct dsa_client *client, uint64_t id, struct dsa_sequence *sequence_p,
                            struct dsa_error *err)
{
    Dsa__V1__GetSequenceRequest request = DSA__V1__GET_SEQUENCE_REQUEST__INIT;
    Dsa__V1__Sequence *reply;
    dsa_status status;

    pthread_mutex_lock(&client->lock);
    request.session = dsa__token(client);
    request.sequence_id = id;
    status = CALL(client, "GetSequence", request, sequence, &reply, err);
    if (status == DSA_OK) {
        take_sequence(reply, sequence_p);
        dsa__v1__sequence__free_unpacked(reply, NULL);
    }
    pthread_mutex_unlock(&client->lock);
    return status;
}

void dsa_sequence_fini(struct dsa_sequence *sequence)
{
    free(sequence->layer_tokens);
    free(sequence->page_ids);
    memset(sequence, 0, sizeof(*sequence));
}

/* ---- rows ------------------------------------------------------------------------------------ */

static dsa_status take_append(dsa_status status, Dsa__V1__AppendReply *const *reply_p,
                              struct dsa_append_result *result_p)
{
    Dsa__V1__AppendReply *reply;

    if (status != DSA_OK)
        return status;
    reply = *reply_p;
    if (result_p) {
        result_p->n_tokens = reply->n_tokens;
        result_p->n_nonfinite = reply->n_nonfinite;
    }
    dsa__v1__append_reply__free_unpacked(reply, NULL);
    return DSA_OK;
}

dsa_status dsa_append(struct dsa_client *client, const struct dsa_append *append,
                      struct dsa_append_result *result_p, struct dsa_error *err)
{
    Dsa__V1__AppendRequest request = DSA__V1__APPEND_REQUEST__INIT;
    Dsa__V1__AppendReply *reply;
    struct wire_append wire;
    dsa_status status = dsa__wire_append(&wire, append, "append.rows", err);

    if (status != DSA_OK)
        return status;
    pthread_mutex_lock(&client->lock);
    request.session = dsa__token(client);
    request.append = &wire.op;
    status = take_append(CALL(client, "Append", request, append_reply, &reply, err), &reply, result_p);
    pthread_mutex_unlock(&client->lock);
    return status;
}

dsa_status dsa_import(struct dsa_client *client, uint64_t sequence, uint32_t layer, uint32_t n_layers,
                      enum dsa_layout layout, const struct dsa_tensor *rows,
                      struct dsa_append_result *result_p, struct dsa_error *err)
{
    Dsa__V1__ImportRowsRequest request = DSA__V1__IMPORT_ROWS_REQUEST__INIT;
    Dsa__V1__AppendReply *reply;
    struct wire_tensor wire;
    dsa_status status = dsa__wire_tensor(&wire, rows, "rows", err);

    if (status != DSA_OK)
        return status;
    pthread_mutex_lock(&client->lock);
    request.session = dsa__token(client);
    request.sequence_id = sequence;
    request.layer = layer;
    request.n_layers = n_layers;
    request.layout = (Dsa__V1__Layout)layout;
    request.rows = &wire.tensor;
    status = take_append(CALL(client, "ImportRows", request, append_reply, &reply, err), &reply, result_p);
    pthread_mutex_unlock(&client->lock);
    return status;
}

/* ---- export ---------------------------------------------------------------------------------- */

struct export
{
    struct bidi bidi; /* first */
    dsa_rows_fn fn;
    void *arg;
    dsa_status status; /* of fn, or of the decoding */
    struct dsa_error err;
};

static void export_message(struct bidi *bidi, const uint8_t *data, size_t n)
{
    struct export *export = (struct export *)bidi;
    Dsa__V1__RowChunk *chunk;

    if (export->status != DSA_OK)
        return; /* cancelled; what still arrives is not wanted */
    chunk = dsa__v1__row_chunk__unpack(NULL, n, data);
    if (!chunk) {
        export->status = dsa__fail(&export->err, DSA_E_PROTOCOL, NULL, "a chunk of rows cannot be decoded");
    } else {
        export->status =
            export->fn(chunk->first, chunk->n_tokens, chunk->rows.data, chunk->rows.len, export->arg);
        if (export->status != DSA_OK)
            dsa__fail(&export->err, export->status, NULL, "the export was stopped by its receiver");
        dsa__v1__row_chunk__free_unpacked(chunk, NULL);
    }
    if (export->status != DSA_OK)
        dsa__bidi_cancel(bidi);
}

static void export_over(struct bidi *bidi)
{
    (void)bidi; /* dsa_export looks at is_over */
}

dsa_status dsa_export(struct dsa_client *client, uint64_t sequence, uint32_t layer, uint64_t first,
                      uint64_t n_tokens, enum dsa_dtype dtype, dsa_rows_fn fn, void *arg,
                      struct dsa_error *err)
{
    Dsa__V1__ExportRowsRequest request = DSA__V1__EXPORT_ROWS_REQUEST__INIT;
    struct export export = {.fn = fn, .arg = arg};
    dsa_status status;

    pthread_mutex_lock(&client->lock);
    request.session = dsa__token(client);
    request.sequence_id = sequence;
    request.layer = layer;
    request.first = first;
    request.n_tokens = n_tokens;
    request.dtype = (Dsa__V1__DType)dtype;
    status = dsa__bidi_open(&export.bidi, client, DSA__SERVICE "ExportRows", client->rpc_timeout_us,
                            export_message, export_over, err);
    if (status != DSA_OK) {
        pthread_mutex_unlock(&client->lock);
        return status;
    }
    status = dsa__bidi_send(&export.bidi, &request.base, false, err);
    if (status == DSA_OK)
        dsa__bidi_half_close(&export.bidi);
    else
        dsa__bidi_cancel(&export.bidi);
    while (!export.bidi.is_over) /* the call's deadline ends it */
        dsa__pump(client, UINT64_MAX);
    if (export.status != DSA_OK) {
        status = export.status;
        if (err)
            *err = export.err;
    } else if (status == DSA_OK) {
        status = dsa__bidi_status(&export.bidi, err);
    }
    dsa__bidi_fini(&export.bidi);
    pthread_mutex_unlock(&client->lock);
    return status;
}
