/* submit.c - turns dsa_attend and dsa_append into messages and sends them as requests of an Attend stream. */
#include <stdlib.h>
#include <string.h>

#include "client/lib/stream.h"

#define N_SEGMENTS_ON_STACK 16

struct wire_output {
    Dsa__V1__Output output;
    Dsa__V1__RegionSlice slice;
    int64_t strides[3];
};

/* Fills the wire's Output and the place for inline rows. row_elems: elements of one query row. */
static dsa_status wire_output(struct wire_output *wire, const struct dsa_output *output,
                              enum dsa_dtype fallback, uint32_t rank, size_t row_elems, const char *field,
                              struct sink *sink, struct dsa_error *err)
{
    enum dsa_dtype dtype = output->dtype ? output->dtype : fallback;
    bool has_strides = false;

    if (!output->data == !output->memory)
        return dsa__fail(err, DSA_E_BAD_SHAPE, field, "needs either data or memory");
    for (uint32_t i = 0; i < rank; i++)
        has_strides |= output->strides_bytes[i] != 0;
    if (output->data && has_strides)
        return dsa__fail(err, DSA_E_BAD_SHAPE, field, "data is dense: strides go with memory");
    dsa__v1__output__init(&wire->output);
    wire->output.dtype = (Dsa__V1__DType)dtype;
    if (output->data) {
        sink->data = output->data;
        sink->row_bytes = row_elems * dsa_dtype_bytes(dtype);
        return DSA_OK;
    }
    dsa__v1__region_slice__init(&wire->slice);
    wire->slice.region_id.len = sizeof(output->memory->id);
    wire->slice.region_id.data = (uint8_t *)(uintptr_t)output->memory->id;
    wire->slice.offset = output->offset;
    wire->output.region = &wire->slice;
    if (has_strides) {
        for (uint32_t i = 0; i < rank; i++)
            wire->strides[i] = output->strides_bytes[i];
        wire->output.n_strides_bytes = rank;
        wire->output.strides_bytes = wire->strides;
    }
    return DSA_OK;
}

/* Everything of one AttendOp that lives on the stack while it is packed. */
struct wire_attend {
    Dsa__V1__AttendOp op;
    Dsa__V1__Segment segment_buffer[N_SEGMENTS_ON_STACK];
    Dsa__V1__Segment *pointer_buffer[N_SEGMENTS_ON_STACK];
    Dsa__V1__Segment *segments; /* the buffers above, or the heap */
    Dsa__V1__Segment **pointers;
    struct wire_tensor q, indices, lengths, sink;
    struct wire_output out, lse;
    struct wire_append append;
};

static dsa_status wire_segments(struct wire_attend *wire, const struct dsa_attend *args,
                                struct dsa_error *err)
{
    wire->segments = wire->segment_buffer;
    wire->pointers = wire->pointer_buffer;
    if (args->n_segments > N_SEGMENTS_ON_STACK) {
        wire->segments = malloc(args->n_segments * sizeof(*wire->segments));
        wire->pointers = malloc(args->n_segments * sizeof(*wire->pointers));
        if (!wire->segments || !wire->pointers)
            return dsa__fail(err, DSA_E_NO_MEMORY, NULL, "no memory for %u segments", args->n_segments);
    }
    for (uint32_t i = 0; i < args->n_segments; i++) {
        dsa__v1__segment__init(&wire->segments[i]);
        wire->segments[i].sequence_id = args->segments[i].sequence;
        wire->segments[i].n_rows = args->segments[i].n_rows;
        wire->pointers[i] = &wire->segments[i];
    }
    wire->op.n_segments = args->n_segments;
    wire->op.segments = wire->pointers;
    return DSA_OK;
}

static void wire_attend_fini(struct wire_attend *wire)
{
    if (wire->segments != wire->segment_buffer)
        free(wire->segments);
    if (wire->pointers != wire->pointer_buffer)
        free(wire->pointers);
}

static dsa_status wire_tensors(struct wire_attend *wire, const struct dsa_attend *args, struct dsa_error *err)
{
    dsa_status status = dsa__wire_tensor(&wire->q, &args->q, "attend.q", err);

    if (status == DSA_OK)
        status = dsa__wire_tensor(&wire->indices, &args->indices, "attend.indices", err);
    if (status == DSA_OK && args->lengths) {
        status = dsa__wire_tensor(&wire->lengths, args->lengths, "attend.lengths", err);
        wire->op.lengths = &wire->lengths.tensor;
    }
    if (status == DSA_OK && args->sink) {
        status = dsa__wire_tensor(&wire->sink, args->sink, "attend.sink", err);
        wire->op.sink = &wire->sink.tensor;
    }
    if (status == DSA_OK && args->append) {
        status = dsa__wire_append(&wire->append, args->append, "attend.append.rows", err);
        wire->op.append = &wire->append.op;
    }
    wire->op.q = &wire->q.tensor;
    wire->op.indices = &wire->indices.tensor;
    return status;
}

static dsa_status wire_attend(struct wire_attend *wire, const struct dsa_attend *args,
                              struct dsa_request *request, uint32_t d_v, struct dsa_error *err)
{
    size_t heads = args->q.rank == 3 ? (size_t)args->q.shape[1] : 0;
    dsa_status status;

    dsa__v1__attend_op__init(&wire->op);
    status = wire_segments(wire, args, err);
    if (status == DSA_OK)
        status = wire_tensors(wire, args, err);
    if (status == DSA_OK)
        status = wire_output(&wire->out, &args->out, DSA_DTYPE_BF16, 3, heads * d_v, "attend.out",
                             &request->out, err);
    if (status == DSA_OK && args->want_lse) {
        status =
            wire_output(&wire->lse, &args->lse, DSA_DTYPE_F32, 2, heads, "attend.lse", &request->lse, err);
        wire->op.lse = &wire->lse.output;
    }
    wire->op.layer = args->layer;
    wire->op.space = (Dsa__V1__IndexSpace)args->space;
    wire->op.softmax_scale_value_case = DSA__V1__ATTEND_OP__SOFTMAX_SCALE_VALUE_SOFTMAX_SCALE;
    wire->op.softmax_scale = args->softmax_scale;
    wire->op.out = &wire->out.output;
    wire->op.want_lse = args->want_lse;
    wire->op.batch_invariant = args->batch_invariant;
    if (args->phase)
        wire->op.phase = (char *)(uintptr_t)args->phase;
    wire->op.context_parallel = args->context_parallel;
    return status;
}

/* Its parts have bounds: a tensor in memory packs into 132 bytes, an output into 79, a segment into 19, the rest of an
 * attend and its envelope into 260 and the phase. With 5 tensors, 2 outputs and the segments below that is less than 1500. */
static bool is_small(const struct dsa_attend *args)
{
    return args->q.memory && args->indices.memory && (!args->lengths || args->lengths->memory)
           && (!args->sink || args->sink->memory) && (!args->append || args->append->rows.memory)
           && args->n_segments <= N_SEGMENTS_ON_STACK && (!args->phase || strlen(args->phase) <= 64);
}

static dsa_status attend_locked(struct dsa_client *client, struct dsa_stream *stream,
                                const struct dsa_attend *args, struct callback callback,
                                struct dsa_request **request_p, struct dsa_error *err)
{
    Dsa__V1__AttendRequest message = DSA__V1__ATTEND_REQUEST__INIT;
    struct wire_attend wire;
    struct dsa_request *request;
    dsa_status status = dsa__stream_pick(client, &stream, err);

    if (status != DSA_OK)
        return status;
    status = dsa__request_alloc(stream, callback, &request, err);
    if (status != DSA_OK)
        return status;
    request->n_rows = (uint32_t)args->q.shape[0];
    status = wire_attend(&wire, args, request, client->caps.n_pools ? client->caps.pools[0].d_v : 0, err);
    if (status == DSA_OK) {
        dsa__request_use(request, args->q.memory);
        dsa__request_use(request, args->indices.memory);
        dsa__request_use(request, args->lengths ? args->lengths->memory : NULL);
        dsa__request_use(request, args->sink ? args->sink->memory : NULL);
        dsa__request_use(request, args->append ? args->append->rows.memory : NULL);
        dsa__request_use(request, args->out.memory);
        dsa__request_use(request, args->want_lse ? args->lse.memory : NULL);
        message.op_case = DSA__V1__ATTEND_REQUEST__OP_ATTEND;
        message.attend = &wire.op;
        message.traceparent =
            (char *)(uintptr_t)(args->traceparent ? args->traceparent : client->traceparent);
        message.deadline_us = args->deadline_us;
        message.priority = args->priority;
        status = dsa__request_send(request, &message, is_small(args), err);
    } else {
        free(request);
    }
    wire_attend_fini(&wire);
    if (status == DSA_OK)
        *request_p = request;
    return status;
}

static dsa_status check_shape(const struct dsa_attend *args, struct dsa_error *err)
{
    if (args->q.rank != 3 || args->q.shape[0] > UINT32_MAX)
        return dsa__fail(err, DSA_E_BAD_SHAPE, "attend.q", "must be [s_q, h_q, d_qk]");
    if (args->traceparent && !dsa__is_traceparent(args->traceparent))
        return dsa__fail(err, DSA_E_BAD_REQUEST, "traceparent", "must be 00-<32 hex>-<16 hex>-<2 hex>");
    return DSA_OK;
}

dsa_status dsa_attend_submit(struct dsa_client *client, struct dsa_stream *stream,
                             const struct dsa_attend *args, dsa_done_fn done, void *arg,
                             struct dsa_request **request_p, struct dsa_error *err)
{
    struct callback callback = {done, arg};
    dsa_status status = check_shape(args, err);

    if (status != DSA_OK)
        return status;
    pthread_mutex_lock(&client->lock);
    status = attend_locked(client, stream, args, callback, request_p, err);
    pthread_mutex_unlock(&client->lock);
    return status;
}

static dsa_status append_locked(struct dsa_client *client, struct dsa_stream *stream,
                                struct wire_append *wire, const struct dsa_append *args,
                                struct callback callback, struct dsa_request **request_p,
                                struct dsa_error *err)
{
    Dsa__V1__AttendRequest message = DSA__V1__ATTEND_REQUEST__INIT;
    struct dsa_request *request;
    dsa_status status = dsa__stream_pick(client, &stream, err);

    if (status == DSA_OK)
        status = dsa__request_alloc(stream, callback, &request, err);
    if (status != DSA_OK)
        return status;
    dsa__request_use(request, args->rows.memory);
    message.op_case = DSA__V1__ATTEND_REQUEST__OP_APPEND;
    message.append = &wire->op;
    message.traceparent = client->traceparent;
    status = dsa__request_send(request, &message, false, err);
    if (status == DSA_OK)
        *request_p = request;
    return status;
}

dsa_status dsa_append_submit(struct dsa_client *client, struct dsa_stream *stream,
                             const struct dsa_append *args, dsa_done_fn done, void *arg,
                             struct dsa_request **request_p, struct dsa_error *err)
{
    struct callback callback = {done, arg};
    struct wire_append wire;
    dsa_status status = dsa__wire_append(&wire, args, "append.rows", err);

    if (status != DSA_OK)
        return status;
    pthread_mutex_lock(&client->lock);
    status = append_locked(client, stream, &wire, args, callback, request_p, err);
    pthread_mutex_unlock(&client->lock);
    return status;
}

/* Submit, wait and free, with the lock taken once. */
dsa_status dsa_attend(struct dsa_client *client, const struct dsa_attend *args, struct dsa_result *result_p,
                      struct dsa_error *err)
{
    struct callback none = {NULL, NULL};
    struct dsa_request *request = NULL;
    dsa_status status = check_shape(args, err);

    if (status != DSA_OK)
        return status;
    pthread_mutex_lock(&client->lock);
    status = attend_locked(client, NULL, args, none, &request, err);
    if (status == DSA_OK) {
        while (!request->is_done)
            dsa__pump(client, UINT64_MAX);
        status = request->result.error.code;
        if (status != DSA_OK && err)
            *err = request->result.error;
        if (status == DSA_OK && result_p)
            *result_p = request->result;
        dsa__settle_completed(client); /* other requests' callbacks: none of them knows this one */
        dsa__request_free(request);
    }
    pthread_mutex_unlock(&client->lock);
    return status;
}
