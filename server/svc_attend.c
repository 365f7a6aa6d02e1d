/* svc_attend.c - the Attend stream: many requests in flight, each answered on its own. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "server/clock.h"
#include "server/core/rules.h"
#include "server/log.h"
#include "server/status.h"
#include "server/svc.h"

#define REPLY_BYTES      (1u << 20) /* inline results in one message, about */
#define REPLY_OVERHEAD   4096       /* more than a reply has beside its results */
#define REQUEST_ID_FIELD 2          /* of AttendRequest */
#define N_BUCKETS        64         /* of the requests in flight, by request id */

struct stream {
    struct svc *svc;
    struct rpc_call *call; /* NULL once the call is over */
    uint64_t session;      /* number; 0 until the first good message */
    uint8_t token[SRV_TOKEN_BYTES];
    struct svc_request *buckets[N_BUCKETS];
    uint32_t n_inflight;
    uint64_t inflight_bytes; /* messages and inline results of requests in flight */
    uint64_t call_id;        /* these two outlive the call */
    struct srv_trace trace;  /* of the call; a request can have one of its own */
    bool is_half_closed;
};

/* ---- what is in flight --------------------------------------------------------------------------- */

static struct svc_request **bucket_of(struct stream *stream, uint64_t request_id)
{
    return &stream->buckets[(request_id * UINT64_C(0x9E3779B97F4A7C15)) >> 58];
}

static struct svc_request *find_request(struct stream *stream, uint64_t request_id)
{
    struct svc_request *request = *bucket_of(stream, request_id);

    while (request && request->request_id != request_id)
        request = request->stream_next;
    return request;
}

static void add_request(struct stream *stream, struct svc_request *request)
{
    struct svc_request **bucket = bucket_of(stream, request->request_id);

    request->owner = stream;
    request->stream_next = *bucket;
    if (*bucket)
        (*bucket)->stream_prev = request;
    *bucket = request;
    stream->n_inflight++;
    stream->inflight_bytes += request->bytes;
}

static void remove_request(struct stream *stream, struct svc_request *request)
{
    if (request->stream_prev)
        request->stream_prev->stream_next = request->stream_next;
    else
        *bucket_of(stream, request->request_id) = request->stream_next;
    if (request->stream_next)
        request->stream_next->stream_prev = request->stream_prev;
    stream->n_inflight--;
    stream->inflight_bytes -= request->bytes;
}

/* A client that does not read its answers is not read either: what it can have outstanding is bounded. */
static void read_on(struct stream *stream)
{
    const struct srv_config *config = stream->svc->config;

    if (!stream->call || stream->is_half_closed || stream->n_inflight >= config->max_inflight
        || stream->inflight_bytes + rpc_queued_bytes(stream->call) >= config->max_stream_bytes)
        return;
    rpc_read_next(stream->call);
}

static void end_if_done(struct stream *stream)
{
    if (stream->n_inflight > 0)
        return;
    if (!stream->call)
        free(stream);
    else if (stream->is_half_closed)
        rpc_finish(stream->call, 0, "", NULL, 0);
}

/* ---- answers -------------------------------------------------------------------------------------- */

/* trace: the request's own. */
static struct svc_about about(const struct stream *stream, uint64_t request_id, const struct srv_trace *trace)
{
    bool is_own = srv_trace_id(trace) != NULL;

    return (struct svc_about){stream->call_id, request_id, is_own ? trace : &stream->trace};
}

static char *parent_of(const struct srv_trace *trace)
{
    return (char *)(uintptr_t)trace->parent; /* protobuf-c's strings are not const; packing does not write */
}

static void send_reply(struct stream *stream, const Dsa__V1__AttendReply *reply)
{
    if (!wire_send(stream->call, &reply->base)) {
        srv_log(SRV_LOG_ERROR, "cannot send a reply, the stream ends call_id=%" PRIu64 " request_id=%" PRIu64,
                stream->call_id, reply->request_id);
        rpc_finish(stream->call, srv_status_grpc_code(DSA_E_NO_MEMORY), "NO_MEMORY: no memory for a reply",
                   NULL, 0);
    }
}

/* trace: the request's own. took_us: since the request came. */
static void refuse(struct stream *stream, uint64_t request_id, const struct srv_trace *trace,
                   const struct srv_err *err, uint64_t took_us)
{
    struct svc_about whom = about(stream, request_id, trace);
    Dsa__V1__AttendReply reply = DSA__V1__ATTEND_REPLY__INIT;
    Dsa__V1__Status status;

    stream->svc->counters.n_rejected++;
    svc_count_attend(stream->svc, err->code, took_us);
    srv_log(SRV_LOG_DEBUG,
            "attend refused reason=%s field=%s value=%s text=\"%s\" call_id=%" PRIu64 " request_id=%" PRIu64
            " trace_id=%s",
            srv_status_reason(err->code), err->field, err->value, err->text, whom.call_id, whom.request_id,
            srv_trace_id(whom.trace));
    wire_status(err, &status);
    reply.request_id = request_id;
    reply.traceparent = parent_of(trace);
    reply.status = &status;
    reply.last = true;
    if (stream->call)
        send_reply(stream, &reply);
}

static uint64_t out_row_bytes(const struct srv_job_attend *attend, const struct dsk_layout *layout)
{
    return (uint64_t)attend->h_q * (uint64_t)layout->d_v * (attend->out_dtype == DSK_DTYPE_F32 ? 4 : 2);
}

/* The inline results lie in one buffer: out, then lse. Either may be elsewhere or unwanted. */
static bool out_is_inline(const struct svc_request *request)
{
    return request->buffer && request->job.u.attend.out == request->buffer;
}

static bool lse_is_inline(const struct svc_request *request)
{
    const struct srv_job_attend *attend = &request->job.u.attend;
    const uint8_t *lse = attend->lse, *buffer = request->buffer;

    return buffer && lse
           && lse
                  == buffer
                         + (out_is_inline(request)
                                ? attend->n_rows * out_row_bytes(attend, request->svc->layout)
                                : 0);
}

static void fill_timings(const struct svc_request *request, const struct srv_piece *piece,
                         Dsa__V1__Timings *timings)
{
    uint64_t arrival = request->job.arrival_us;

    dsa__v1__timings__init(timings);
    timings->queue_us = piece->launch_us > arrival ? piece->launch_us - arrival : 0;
    timings->device_us = piece->done_us - piece->launch_us;
    timings->total_us = srv_now_us() - arrival;
    timings->batch_rows = piece->batch_rows;
}

/* Into one message: of moderate size, since most clients take no more than 4 MiB unless told to; but at least a row, which take_buffer
 * has checked against the limit. */
static uint32_t rows_that_fit(const struct stream *stream, uint64_t row_bytes, uint32_t n_rows)
{
    uint64_t room = stream->svc->config->max_message_bytes - REPLY_OVERHEAD;

    room = room < REPLY_BYTES ? room : REPLY_BYTES;
    if (row_bytes * n_rows <= room)
        return n_rows;
    return row_bytes <= room ? (uint32_t)(room / row_bytes) : 1;
}

/* A piece goes out in as many messages as its inline results need. */
static void send_piece(struct stream *stream, struct svc_request *request, const struct srv_piece *piece)
{
    const struct srv_job_attend *attend = &request->job.u.attend;
    uint64_t out_bytes = out_is_inline(request) ? out_row_bytes(attend, stream->svc->layout) : 0;
    uint64_t lse_bytes = lse_is_inline(request) ? attend->h_q * sizeof(float) : 0;
    uint32_t n_fit = rows_that_fit(stream, out_bytes + lse_bytes, piece->n_rows);
    uint8_t *out = request->buffer, *lse = (uint8_t *)attend->lse;
    Dsa__V1__Timings timings;

    fill_timings(request, piece, &timings);
    for (uint32_t at = 0, n; at < piece->n_rows && stream->call; at += n) {
        Dsa__V1__AttendReply reply = DSA__V1__ATTEND_REPLY__INIT;
        uint64_t row = piece->row_begin + at;

        n = piece->n_rows - at < n_fit ? piece->n_rows - at : n_fit;
        reply.request_id = request->request_id;
        reply.row_begin = piece->row_begin + at;
        reply.n_rows = n;
        reply.last = piece->is_last && at + n == piece->n_rows;
        if (out_bytes > 0)
            reply.out = (ProtobufCBinaryData){n * out_bytes, out + row * out_bytes};
        if (lse_bytes > 0)
            reply.lse = (ProtobufCBinaryData){n * lse_bytes, lse + row * lse_bytes};
        reply.n_invalid = at == 0 ? piece->n_invalid : 0;
        reply.n_nonfinite = at == 0 ? piece->n_nonfinite : 0;
        reply.n_tokens = piece->n_tokens;
        if (reply.last) {
            reply.timings = &timings;
            reply.traceparent = parent_of(&request->trace);
        }
        send_reply(stream, &reply);
    }
}

/* The answer to an append of the stream: no rows, only counts. */
static void send_appended(struct stream *stream, struct svc_request *request, const struct srv_piece *piece)
{
    Dsa__V1__AttendReply reply = DSA__V1__ATTEND_REPLY__INIT;
    Dsa__V1__Timings timings;

    fill_timings(request, piece, &timings);
    reply.request_id = request->request_id;
    reply.last = true;
    reply.n_nonfinite = piece->n_nonfinite;
    reply.n_tokens = piece->n_tokens;
    reply.timings = &timings;
    reply.traceparent = parent_of(&request->trace);
    send_reply(stream, &reply);
}

static void on_piece(struct svc_request *request, const struct srv_piece *piece)
{
    struct stream *stream = request->owner;
    struct svc_about whom = about(stream, request->request_id, &request->trace);
    uint64_t took_us = srv_now_us() - request->job.arrival_us;

    if (piece->err.code != DSA_OK) {
        refuse(stream, request->request_id, &request->trace, &piece->err, took_us);
    } else if (stream->call && request->job.op == SRV_OP_APPEND) {
        send_appended(stream, request, piece);
    } else {
        stream->svc->counters.n_rows += piece->n_rows;
        if (stream->call)
            send_piece(stream, request, piece);
    }
    if (!piece->is_last)
        return;
    stream->svc->counters.n_requests++;
    if (piece->err.code == DSA_OK)
        svc_count_attend(stream->svc, DSA_OK, took_us);
    svc_log_slow_request(request, &whom, piece->err.code, took_us);
    remove_request(stream, request);
    read_on(stream);
    end_if_done(stream);
}

/* ---- reading a request ------------------------------------------------------------------------------ */

/* Only for errors; the result lives until the next call. */
static const char *segment_field(size_t i, const char *name)
{
    static char field[64];

    snprintf(field, sizeof(field), "attend.segments[%zu].%s", i, name);
    return field;
}

static dsa_status parse_segments(struct svc_request *request, const Dsa__V1__AttendOp *op,
                                 struct srv_err *err)
{
    struct srv_job_attend *attend = &request->job.u.attend;
    const struct srv_config *config = request->svc->config;
    uint64_t n_rows = 0;

    if (op->n_segments > config->max_segments)
        return srv_fail(err, DSA_E_TOO_LARGE, "attend.segments", "%zu", op->n_segments,
                        "at most %" PRIu64 " segments", config->max_segments);
    attend->segments = wire_arena_get(request->arena, sizeof(*attend->segments) * op->n_segments);
    if (!attend->segments)
        return srv_fail(err, DSA_E_NO_MEMORY, "attend.segments", "%zu", op->n_segments, "no memory");
    for (size_t i = 0; i < op->n_segments; i++) {
        if (op->segments[i]->n_rows == 0)
            continue;
        if (op->segments[i]->sequence_id == 0 && op->space != DSA__V1__INDEX_SPACE__INDEX_SPACE_PHYSICAL)
            return srv_fail(err, DSA_E_NOT_FOUND, segment_field(i, "sequence_id"), "%d", 0,
                            "no such sequence in this session");
        attend->segments[attend->n_segments++] =
            (struct srv_job_segment){op->segments[i]->sequence_id, op->segments[i]->n_rows, (uint32_t)n_rows};
        n_rows += op->segments[i]->n_rows;
        if (n_rows > config->max_rows)
            return srv_fail(err, DSA_E_TOO_LARGE, "attend.segments", "%" PRIu64 " rows", n_rows,
                            "at most %" PRIu64 " query rows in one request", config->max_rows);
    }
    attend->n_rows = (uint32_t)n_rows;
    return DSA_OK;
}

static dsa_status parse_space(struct svc_request *request, const Dsa__V1__AttendOp *op, struct srv_err *err)
{
    switch (op->space) {
    case DSA__V1__INDEX_SPACE__INDEX_SPACE_LOGICAL:
        request->job.u.attend.space = DSK_SPACE_LOGICAL;
        return DSA_OK;
    case DSA__V1__INDEX_SPACE__INDEX_SPACE_PHYSICAL:
        request->job.u.attend.space = DSK_SPACE_PHYSICAL;
        if (request->svc->config->physical_indices)
            return DSA_OK;
        return srv_fail(err, DSA_E_ACCESS, "attend.space", "%s", "PHYSICAL",
                        "this server was started without physical-indices");
    default:
        return srv_fail(err, DSA_E_BAD_REQUEST, "attend.space", "%d", (int)op->space,
                        "give LOGICAL or PHYSICAL");
    }
}

static dsa_status parse_scalars(struct svc_request *request, const Dsa__V1__AttendOp *op, struct srv_err *err)
{
    struct srv_job_attend *attend = &request->job.u.attend;

    if (op->layer >= request->svc->config->layers)
        return srv_fail(err, DSA_E_BAD_RANGE, "attend.layer", "%" PRIu32, op->layer,
                        "the pool has %" PRIu64 " layers", request->svc->config->layers);
    if (op->softmax_scale_value_case != DSA__V1__ATTEND_OP__SOFTMAX_SCALE_VALUE_SOFTMAX_SCALE)
        return srv_fail(err, DSA_E_BAD_REQUEST, "attend.softmax_scale", "%s", "absent",
                        "always given by the caller; it is never derived from a width");
    if (!isfinite(op->softmax_scale))
        return srv_fail(err, DSA_E_BAD_REQUEST, "attend.softmax_scale", "%g", (double)op->softmax_scale,
                        "must be finite");
    attend->layer = op->layer;
    attend->softmax_scale = op->softmax_scale;
    attend->flags = op->batch_invariant ? DSK_ATTEND_BATCH_INVARIANT : 0;
    return parse_space(request, op, err);
}

static dsa_status parse_phase(const Dsa__V1__AttendOp *op, uint32_t *phase_p, struct srv_err *err)
{
    char text[24];

    if (op->phase[0] == '\0')
        *phase_p = 0;
    else if (strcmp(op->phase, "prefill") == 0)
        *phase_p = SRV_PHASE_PREFILL;
    else if (strcmp(op->phase, "decode") == 0)
        *phase_p = SRV_PHASE_DECODE;
    else
        return srv_fail(err, DSA_E_BAD_REQUEST, "attend.phase", "%s",
                        wire_text(text, sizeof(text), op->phase), "give prefill, decode or nothing");
    return DSA_OK;
}

static bool uses_region(const Dsa__V1__Tensor *tensor)
{
    return tensor && tensor->data_case == DSA__V1__TENSOR__DATA_REGION;
}

/* The rules speak of axes; the client of its request's fields. */
static void name_field(struct srv_err *err)
{
    static const struct {
        const char *axis, *field;
    } names[] = {{"heads", "attend.q.shape[1]"},
                 {"d_qk", "attend.q.shape[2]"},
                 {"q.dtype", "attend.q.dtype"},
                 {"phase", "attend.phase"},
                 {"context_parallel", "attend.context_parallel"},
                 {"host_tier", "attend.q.region"}};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (strcmp(err->field, names[i].axis) == 0) {
            strcpy(err->field, names[i].field);
            return;
        }
}

/* The device and the layout are the pool's, the same for all. */
static bool is_same_query(const struct srv_rule_query *a, const struct srv_rule_query *b)
{
    return a->q_dtype == b->q_dtype && a->d_qk == b->d_qk && a->h_q == b->h_q && a->phase == b->phase
           && a->context_parallel == b->context_parallel && a->host_tier == b->host_tier;
}

/* The table of support rules has the last word on what is served. */
static dsa_status check_rules(const struct svc_request *request, const Dsa__V1__AttendOp *op,
                              struct srv_err *err)
{
    struct srv_rule_query query = {
        .device_kind = request->svc->config->device,
        .layout = request->svc->layout->id,
        .context_parallel = op->context_parallel > 0 ? op->context_parallel : 1,
        .host_tier = SRV_TIER_NONE,
    };
    dsa_status rc = parse_phase(op, &query.phase, err);

    if (rc != DSA_OK)
        return rc;
    if (!op->q)
        return srv_fail(err, DSA_E_BAD_REQUEST, "attend.q", "%s", "absent", "this tensor is needed");
    if (op->q->n_shape != 3)
        return srv_fail(err, DSA_E_BAD_SHAPE, "attend.q.shape", "rank %zu", op->q->n_shape,
                        "q has the shape [s_q, h_q, d_qk]");
    query.q_dtype = (uint32_t)op->q->dtype;
    query.h_q = op->q->shape[1] <= UINT32_MAX ? (uint32_t)op->q->shape[1] : UINT32_MAX;
    query.d_qk = op->q->shape[2] <= UINT32_MAX ? (uint32_t)op->q->shape[2] : UINT32_MAX;
    if (uses_region(op->q) || uses_region(op->indices) || (op->out && op->out->region))
        query.host_tier = SRV_TIER_MEMFD;
    if (is_same_query(&query, &request->svc->last_served))
        return DSA_OK;
    rc = srv_rules_check_attend(&query, err);
    if (rc == DSA_OK)
        request->svc->last_served = query;
    else if (err)
        name_field(err);
    return rc;
}

static dsa_status parse_inputs(struct svc_request *request, const Dsa__V1__AttendOp *op, struct srv_err *err)
{
    struct srv_job_attend *attend = &request->job.u.attend;
    struct wire_regions regions = svc_request_regions(request);
    struct wire_tensor_rule q_rule = {
        "attend.q", DSA__V1__DTYPE__DTYPE_BF16, 3, {attend->n_rows, 0, (uint64_t)request->svc->layout->d_qk}};
    struct wire_tensor_rule index_rule = {"attend.indices", DSA__V1__DTYPE__DTYPE_I32, 2, {attend->n_rows}};
    struct wire_tensor_rule length_rule = {"attend.lengths", DSA__V1__DTYPE__DTYPE_I32, 1, {attend->n_rows}};
    struct wire_tensor_rule sink_rule = {"attend.sink", DSA__V1__DTYPE__DTYPE_F32, 1, {0}};
    struct wire_tensor q, indices, lengths = {0}, sink = {0};
    dsa_status rc;

    if ((rc = wire_tensor_get(&regions, op->q, &q_rule, &q, err)) != DSA_OK)
        return rc;
    svc_request_hold(request, q.region);
    if ((rc = wire_tensor_get(&regions, op->indices, &index_rule, &indices, err)) != DSA_OK)
        return rc;
    svc_request_hold(request, indices.region);
    if (op->lengths && (rc = wire_tensor_get(&regions, op->lengths, &length_rule, &lengths, err)) != DSA_OK)
        return rc;
    svc_request_hold(request, lengths.region);
    sink_rule.shape[0] = q.shape[1];
    if (op->sink && (rc = wire_tensor_get(&regions, op->sink, &sink_rule, &sink, err)) != DSA_OK)
        return rc;
    svc_request_hold(request, sink.region);
    if (indices.shape[1] > request->svc->config->max_topk)
        return srv_fail(err, DSA_E_TOO_LARGE, "attend.indices.shape[1]", "%" PRIu64, indices.shape[1],
                        "at most %" PRIu64 " entries a row", request->svc->config->max_topk);
    attend->h_q = (uint32_t)q.shape[1];
    attend->topk = (uint32_t)indices.shape[1];
    attend->q = q.data;
    attend->q_row_bytes = q.strides[0];
    attend->q_head_bytes = q.strides[1];
    attend->indices = indices.data;
    attend->indices_row_bytes = indices.strides[0];
    attend->lengths = lengths.data;
    attend->sink = sink.data;
    return DSA_OK;
}

/* Outputs in regions; those that are inline get their place in take_buffer. */
static dsa_status parse_outputs(struct svc_request *request, const Dsa__V1__AttendOp *op, struct srv_err *err)
{
    struct srv_job_attend *attend = &request->job.u.attend;
    struct wire_regions regions = svc_request_regions(request);
    Dsa__V1__DType dtype = op->out && op->out->dtype != DSA__V1__DTYPE__DTYPE_UNSPECIFIED
                               ? op->out->dtype
                               : DSA__V1__DTYPE__DTYPE_BF16;
    struct wire_tensor_rule out_rule = {
        "attend.out", dtype, 3, {attend->n_rows, attend->h_q, (uint64_t)request->svc->layout->d_v}};
    struct wire_tensor_rule lse_rule = {
        "attend.lse", DSA__V1__DTYPE__DTYPE_F32, 2, {attend->n_rows, attend->h_q}};
    struct wire_tensor out = {0}, lse = {0};
    dsa_status rc;

    if (dtype != DSA__V1__DTYPE__DTYPE_BF16 && dtype != DSA__V1__DTYPE__DTYPE_F32)
        return srv_fail(err, DSA_E_BAD_REQUEST, "attend.out.dtype", "%d", (int)dtype, "give BF16 or F32");
    attend->out_dtype = dtype == DSA__V1__DTYPE__DTYPE_F32 ? DSK_DTYPE_F32 : DSK_DTYPE_BF16;
    if (op->lse && !op->want_lse)
        return srv_fail(err, DSA_E_BAD_REQUEST, "attend.lse", "%s", "given", "only together with want_lse");
    if (op->lse && op->lse->dtype != DSA__V1__DTYPE__DTYPE_UNSPECIFIED
        && op->lse->dtype != DSA__V1__DTYPE__DTYPE_F32)
        return srv_fail(err, DSA_E_BAD_REQUEST, "attend.lse.dtype", "%d", (int)op->lse->dtype, "lse is F32");
    if (op->out && !op->out->region && op->out->n_strides_bytes > 0)
        return srv_fail(err, DSA_E_BAD_SHAPE, "attend.out.strides_bytes", "%zu", op->out->n_strides_bytes,
                        "inline results are dense; give no strides");
    if (op->lse && !op->lse->region && op->lse->n_strides_bytes > 0)
        return srv_fail(err, DSA_E_BAD_SHAPE, "attend.lse.strides_bytes", "%zu", op->lse->n_strides_bytes,
                        "inline results are dense; give no strides");
    if (op->out && op->out->region
        && (rc = wire_output_get(&regions, op->out, &out_rule, &out, err)) != DSA_OK)
        return rc;
    svc_request_hold(request, out.region);
    if (op->lse && op->lse->region
        && (rc = wire_output_get(&regions, op->lse, &lse_rule, &lse, err)) != DSA_OK)
        return rc;
    svc_request_hold(request, lse.region);
    attend->out = out.data;
    attend->out_row_bytes = out.strides[0];
    attend->out_head_bytes = out.strides[1];
    attend->lse = lse.data;
    attend->lse_row_bytes = lse.strides[0];
    return DSA_OK;
}

static dsa_status take_buffer(struct svc_request *request, bool want_lse, struct srv_err *err)
{
    struct srv_job_attend *attend = &request->job.u.attend;
    const struct svc *svc = request->svc;
    uint64_t row_bytes = out_row_bytes(attend, svc->layout), out_bytes, lse_bytes;
    uint8_t *buffer;

    out_bytes = attend->out ? 0 : attend->n_rows * row_bytes;
    lse_bytes = attend->lse || !want_lse ? 0 : (uint64_t)attend->n_rows * attend->h_q * sizeof(float);
    if (out_bytes + lse_bytes == 0)
        return DSA_OK;
    if ((out_bytes + lse_bytes) / attend->n_rows > svc->config->max_message_bytes - REPLY_OVERHEAD)
        return srv_fail(err, DSA_E_TOO_LARGE, "attend.out", "%" PRIu64 " bytes a row",
                        (out_bytes + lse_bytes) / attend->n_rows,
                        "a message has at most %" PRIu64 " bytes; use a region",
                        svc->config->max_message_bytes);
    if (out_bytes + lse_bytes > svc->config->max_stream_bytes)
        return srv_fail(err, DSA_E_TOO_LARGE, "attend.out", "%" PRIu64 " bytes", out_bytes + lse_bytes,
                        "at most %" PRIu64 " bytes of inline results in flight; use a region",
                        svc->config->max_stream_bytes);
    buffer = malloc(out_bytes + lse_bytes);
    if (!buffer)
        return srv_fail(err, DSA_E_NO_MEMORY, "attend.out", "%" PRIu64 " bytes", out_bytes + lse_bytes,
                        "no memory for inline results");
    request->buffer = buffer;
    request->bytes += out_bytes + lse_bytes;
    if (out_bytes > 0) {
        attend->out = buffer;
        attend->out_row_bytes = (int64_t)row_bytes;
        attend->out_head_bytes = (int64_t)(row_bytes / attend->h_q);
    }
    if (lse_bytes > 0) {
        attend->lse = buffer + out_bytes;
        attend->lse_row_bytes = (int64_t)(attend->h_q * sizeof(float));
    }
    return DSA_OK;
}

static int compare_ids(const void *a, const void *b)
{
    const struct srv_batch_access *x = a, *y = b;

    return (x->sequence > y->sequence) - (x->sequence < y->sequence);
}

/* Each sequence once; written if the request appends to it. */
static dsa_status list_accesses(struct svc_request *request, uint32_t *n_accesses_p, struct srv_err *err)
{
    struct srv_job_attend *attend = &request->job.u.attend;
    struct srv_batch_access *list = wire_arena_get(request->arena, sizeof(*list) * (attend->n_segments + 1));
    uint32_t n = 0, n_unique = 0;

    if (!list)
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for the request");
    for (uint32_t i = 0; i < attend->n_segments; i++)
        if (attend->segments[i].sequence != 0)
            list[n++].sequence = attend->segments[i].sequence;
    if (attend->append.sequence != 0)
        list[n++].sequence = attend->append.sequence;
    if (n > 1)
        qsort(list, n, sizeof(*list), compare_ids);
    for (uint32_t i = 0; i < n; i++)
        if (n_unique == 0 || list[n_unique - 1].sequence != list[i].sequence)
            list[n_unique++] =
                (struct srv_batch_access){list[i].sequence, list[i].sequence == attend->append.sequence};
    request->job.accesses = list;
    *n_accesses_p = n_unique;
    return DSA_OK;
}

/* Index entries that the launch will look at. The lengths lie in client memory: what is read here only tells who runs the
 * launch. */
static uint64_t count_lanes(const struct srv_job_attend *attend)
{
    uint64_t n = 0;
    int32_t length;

    if (!attend->lengths)
        return (uint64_t)attend->n_rows * attend->topk;
    for (uint32_t i = 0; i < attend->n_rows; i++) {
        memcpy(&length, (const int32_t *)attend->lengths + i, sizeof(length));
        n += length < 0 ? 0 : (uint32_t)length < attend->topk ? (uint32_t)length : attend->topk;
    }
    return n;
}

static dsa_status submit_attend(struct svc_request *request, const Dsa__V1__AttendOp *op, struct srv_err *err)
{
    struct srv_job_attend *attend = &request->job.u.attend;
    struct srv_batch_node *node = &request->job.node;
    const struct srv_config *config = request->svc->config;
    uint32_t n_accesses;
    dsa_status rc;

    if ((rc = parse_scalars(request, op, err)) != DSA_OK || (rc = parse_segments(request, op, err)) != DSA_OK
        || (rc = check_rules(request, op, err)) != DSA_OK || (rc = parse_inputs(request, op, err)) != DSA_OK
        || (rc = parse_outputs(request, op, err)) != DSA_OK)
        return rc;
    if (op->append
        && (rc = svc_parse_append(request, op->append, "attend.append.", &attend->append, err)) != DSA_OK)
        return rc;
    if ((rc = take_buffer(request, op->want_lse, err)) != DSA_OK
        || (rc = list_accesses(request, &n_accesses, err)) != DSA_OK)
        return rc;
    node->is_attend = true;
    node->n_rows = attend->n_rows;
    node->key = (struct srv_batch_key){attend->layer, attend->h_q, attend->out_dtype, attend->flags};
    request->cost += 2 * count_lanes(attend) * attend->h_q
                     * (uint64_t)(request->svc->layout->d_qk + request->svc->layout->d_v);
    return svc_request_submit(
        request, n_accesses,
        (attend->n_rows + (uint32_t)config->chunk_rows - 1) / (uint32_t)config->chunk_rows, err);
}

/* prefix: of the op's fields in the request, for errors. */
static dsa_status submit_append(struct svc_request *request, const Dsa__V1__AppendOp *op, const char *prefix,
                                struct srv_err *err)
{
    dsa_status rc = svc_parse_append(request, op, prefix, &request->job.u.append, err);

    if (rc != DSA_OK)
        return rc;
    request->job.accesses = wire_arena_get(request->arena, sizeof(*request->job.accesses));
    if (!request->job.accesses)
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for the request");
    *request->job.accesses = (struct srv_batch_access){op->sequence_id, true};
    return svc_request_submit(request, 1, 1, err);
}

/* ---- requests without rows -------------------------------------------------------------------------- */

static bool has_rows(const Dsa__V1__AttendOp *op)
{
    for (size_t i = 0; i < op->n_segments; i++)
        if (op->segments[i]->n_rows > 0)
            return true;
    return false;
}

/* Tensors may be left out, but none may bring rows that nobody asked for. */
static dsa_status check_no_rows(const Dsa__V1__AttendOp *op, struct srv_err *err)
{
    const struct {
        const Dsa__V1__Tensor *tensor;
        const char *field;
    } inputs[] = {{op->q, "attend.q.shape[0]"},
                  {op->indices, "attend.indices.shape[0]"},
                  {op->lengths, "attend.lengths.shape[0]"}};

    for (size_t i = 0; i < sizeof(inputs) / sizeof(inputs[0]); i++)
        if (inputs[i].tensor && inputs[i].tensor->n_shape > 0 && inputs[i].tensor->shape[0] != 0)
            return srv_fail(err, DSA_E_BAD_SHAPE, inputs[i].field, "%" PRIu64,
                            (uint64_t)inputs[i].tensor->shape[0], "the segments have no rows");
    return DSA_OK;
}

/* What an attend without rows has left to do is its append, if it has one: then the request is one. */
static dsa_status submit_no_rows(struct svc_request *request, const Dsa__V1__AttendOp *op,
                                 struct srv_err *err)
{
    dsa_status rc;

    if ((rc = parse_scalars(request, op, err)) != DSA_OK || (rc = parse_segments(request, op, err)) != DSA_OK
        || (rc = check_no_rows(op, err)) != DSA_OK || !op->append)
        return rc;
    request->job.op = SRV_OP_APPEND;
    memset(&request->job.u, 0, sizeof(request->job.u));
    return submit_append(request, op->append, "attend.append.", err);
}

/* A step in which no sequence has a row is no error. There is nothing to launch, so it is answered at once. */
static void answer_no_rows(struct stream *stream, uint64_t request_id, const struct srv_trace *trace)
{
    Dsa__V1__AttendReply reply = DSA__V1__ATTEND_REPLY__INIT;

    stream->svc->counters.n_requests++;
    svc_count_attend(stream->svc, DSA_OK, 0);
    reply.request_id = request_id;
    reply.last = true;
    reply.traceparent = parent_of(trace);
    send_reply(stream, &reply);
}

/* ---- the stream ------------------------------------------------------------------------------------ */

static dsa_status find_session(struct stream *stream, const ProtobufCBinaryData *token,
                               struct svc_lease **lease_p, struct srv_err *err)
{
    ProtobufCBinaryData own = {SRV_TOKEN_BYTES, stream->token};
    dsa_status rc;

    if (stream->session == 0) {
        rc = svc_lease_find(stream->svc, token, lease_p, err);
        if (rc == DSA_OK) {
            stream->session = (*lease_p)->number;
            memcpy(stream->token, token->data, SRV_TOKEN_BYTES);
        }
        return rc;
    }
    if (token->len > 0
        && (token->len != SRV_TOKEN_BYTES || memcmp(token->data, stream->token, SRV_TOKEN_BYTES) != 0))
        return srv_fail(err, DSA_E_PRECONDITION, "session", "%zu bytes", token->len,
                        "a stream belongs to the session of its first message");
    return svc_lease_find(stream->svc, &own, lease_p, err);
}

static dsa_status check_envelope(struct stream *stream, const Dsa__V1__AttendRequest *message,
                                 struct srv_err *err)
{
    if (message->request_id == 0)
        return srv_fail(err, DSA_E_BAD_REQUEST, "request_id", "%d", 0, "a request id is not 0");
    if (message->op_case == DSA__V1__ATTEND_REQUEST__OP__NOT_SET)
        return srv_fail(err, DSA_E_BAD_REQUEST, "op", "%s", "absent", "give attend, append or cancel");
    if (message->priority < -100 || message->priority > 100)
        return srv_fail(err, DSA_E_BAD_RANGE, "priority", "%" PRId32, message->priority,
                        "must be -100 to 100");
    if (message->op_case != DSA__V1__ATTEND_REQUEST__OP_CANCEL && find_request(stream, message->request_id))
        return srv_fail(err, DSA_E_EXISTS, "request_id", "%" PRIu64, message->request_id,
                        "a request with this id is in flight");
    return DSA_OK;
}

static void cancel(struct stream *stream, const Dsa__V1__CancelOp *op)
{
    struct svc_request *target = find_request(stream, op->target_request_id);

    if (target)
        svc_request_cancel(target);
}

/* Takes the arena. */
static dsa_status begin_request(struct stream *stream, struct svc_lease *lease,
                                const Dsa__V1__AttendRequest *message, const struct srv_trace *trace,
                                struct wire_arena *arena, uint64_t message_bytes, struct srv_err *err)
{
    bool is_attend = message->op_case == DSA__V1__ATTEND_REQUEST__OP_ATTEND;
    bool is_empty = is_attend && !has_rows(message->attend);
    bool has_work = !is_empty || message->attend->append;
    struct svc_request *request =
        svc_request_create(lease, arena, NULL, is_attend ? SRV_OP_ATTEND : SRV_OP_APPEND);
    struct srv_job *job;
    dsa_status rc;

    if (!request)
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for the request");
    job = &request->job;
    request->request_id = message->request_id;
    request->trace = *trace;
    request->bytes = message_bytes;
    request->on_piece = on_piece;
    job->node.priority = message->priority;
    if (message->deadline_us > 0
        && __builtin_add_overflow(job->arrival_us, message->deadline_us, &job->node.deadline_us))
        job->node.deadline_us = UINT64_MAX;
    if (!is_attend)
        rc = submit_append(request, message->append, "append.", err);
    else if (is_empty)
        rc = submit_no_rows(request, message->attend, err);
    else
        rc = submit_attend(request, message->attend, err);
    if (rc == DSA_OK && has_work) {
        add_request(stream, request);
        return rc;
    }
    if (rc == DSA_OK)
        answer_no_rows(stream, message->request_id, trace);
    svc_request_free(request); /* and the message, which lies in its arena */
    return rc;
}

void svc_attend_open(struct rpc_call *call)
{
    struct stream *stream = calloc(1, sizeof(*stream));

    if (!stream) {
        rpc_finish(call, srv_status_grpc_code(DSA_E_NO_MEMORY), "NO_MEMORY: no memory for a stream", NULL, 0);
        return;
    }
    stream->svc = rpc_call_service(call);
    stream->call = call;
    stream->call_id = rpc_call_number(call);
    stream->trace = *rpc_call_trace(call);
    rpc_call_set_data(call, stream);
}

void svc_attend_message(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    struct stream *stream = rpc_call_data(call);
    struct wire_arena *arena = NULL;
    ProtobufCMessage *base;
    const Dsa__V1__AttendRequest *message = NULL;
    struct svc_lease *lease;
    struct srv_trace trace = {0};
    struct srv_err err = {0};
    uint64_t request_id =
        wire_peek(bytes, n, REQUEST_ID_FIELD); /* known even if the rest is refused unread */
    dsa_status rc = svc_check_size(stream->svc, n, &err);

    if (rc == DSA_OK)
        rc = wire_unpack(&dsa__v1__attend_request__descriptor, bytes, n, &arena, &base, &err);
    if (rc == DSA_OK) {
        message = (const Dsa__V1__AttendRequest *)base;
        request_id = message->request_id;
        if (message->traceparent[0] != '\0')
            srv_trace_parse(&trace, message->traceparent, strlen(message->traceparent));
        rc = find_session(stream, &message->session, &lease, &err);
    }
    if (rc == DSA_OK)
        rc = check_envelope(stream, message, &err);
    if (rc == DSA_OK && message->op_case == DSA__V1__ATTEND_REQUEST__OP_CANCEL) {
        cancel(stream, message->cancel);
    } else if (rc == DSA_OK) {
        rc = begin_request(stream, lease, message, &trace, arena, n, &err);
        arena = NULL;
    }
    if (rc != DSA_OK)
        refuse(stream, request_id, &trace, &err, 0);
    wire_arena_free(arena);
    read_on(stream);
}

void svc_attend_half_close(struct rpc_call *call)
{
    struct stream *stream = rpc_call_data(call);

    stream->is_half_closed = true;
    end_if_done(stream);
}

void svc_attend_drained(struct rpc_call *call)
{
    read_on(rpc_call_data(call));
}

void svc_attend_closed(struct rpc_call *call, bool is_cancelled)
{
    struct stream *stream = rpc_call_data(call);

    (void)is_cancelled;
    if (!stream)
        return;
    stream->call = NULL;
    for (int i = 0; i < N_BUCKETS; i++)
        for (struct svc_request *request = stream->buckets[i]; request; request = request->stream_next)
            svc_request_cancel(request);
    end_if_done(stream);
}
