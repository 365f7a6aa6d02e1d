/* svc_rows.c - rows in and out of sequences: Append, ImportRows, ExportRows. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "server/log.h"
#include "server/status.h"
#include "server/svc.h"

#define EXPORT_CHUNK_BYTES (1u << 20)

/* ---- checks ------------------------------------------------------------------------------------- */

static dsa_status check_layers(const struct svc *svc, uint32_t layer, uint32_t n_layers, struct srv_err *err)
{
    if (layer >= svc->config->layers)
        return srv_fail(err, DSA_E_BAD_RANGE, "layer", "%" PRIu32, layer, "the pool has %" PRIu64 " layers",
                        svc->config->layers);
    if (n_layers > svc->config->layers - layer)
        return srv_fail(err, DSA_E_BAD_RANGE, "n_layers", "%" PRIu32, n_layers,
                        "the pool has %" PRIu64 " layers", svc->config->layers);
    return DSA_OK;
}

/* rows [n, width] or [n_layers, n, width]: where they are, how many, and how to step. */
static dsa_status parse_rows(struct svc_request *request, const Dsa__V1__Tensor *tensor, Dsa__V1__DType dtype,
                             uint32_t width, uint32_t n_layers, struct srv_job_append *append,
                             struct srv_err *err)
{
    const struct svc *svc = request->svc;
    bool has_layers = tensor && tensor->n_shape == 3;
    struct wire_tensor_rule rule = {.field = "rows", .dtype = dtype, .rank = has_layers ? 3 : 2};
    struct wire_regions regions = svc_request_regions(request);
    struct wire_tensor rows;
    uint64_t n_rows;
    dsa_status rc;

    if (n_layers > 1 && tensor && !has_layers)
        return srv_fail(err, DSA_E_BAD_SHAPE, "rows.shape", "rank %zu", tensor->n_shape,
                        "rows for several layers have the shape [n_layers, n, %" PRIu32 "]", width);
    rule.shape[0] = has_layers ? n_layers : 0;
    rule.shape[rule.rank - 1] = width;
    if ((rc = wire_tensor_get(&regions, tensor, &rule, &rows, err)) != DSA_OK)
        return rc;
    svc_request_hold(request, rows.region);
    n_rows = rows.shape[rule.rank - 2];
    if (n_rows > svc->config->max_append_rows || n_rows * n_layers > svc->config->max_append_rows)
        return srv_fail(err, DSA_E_TOO_LARGE, "rows", "%" PRIu64, n_rows,
                        "at most %" PRIu64 " tokens times layers in one append",
                        svc->config->max_append_rows);
    append->n_tokens = (uint32_t)n_rows;
    append->rows = rows.data;
    append->row_bytes = rows.strides[rule.rank - 2];
    append->layer_bytes = has_layers ? rows.strides[0] : 0;
    return DSA_OK;
}

static dsa_status parse_rule(const struct svc *svc, Dsa__V1__WriteRule rule, uint32_t *rule_p,
                             struct srv_err *err)
{
    switch (rule) {
    case DSA__V1__WRITE_RULE__WRITE_RULE_UNSPECIFIED:
        *rule_p = svc->write_rule;
        return DSA_OK;
    case DSA__V1__WRITE_RULE__WRITE_RULE_PLAIN:
        *rule_p = DSK_RULE_PLAIN;
        return DSA_OK;
    case DSA__V1__WRITE_RULE__WRITE_RULE_POW2:
        *rule_p = DSK_RULE_POW2;
        return DSA_OK;
    default:
        return srv_fail(err, DSA_E_BAD_REQUEST, "rule", "%d", (int)rule, "no such write rule");
    }
}

static dsa_status parse_append(struct svc_request *request, const Dsa__V1__AppendOp *op,
                               struct srv_job_append *append, struct srv_err *err)
{
    const struct svc *svc = request->svc;
    dsa_status rc;

    memset(append, 0, sizeof(*append));
    append->sequence = op->sequence_id;
    append->layer = op->layer;
    append->n_layers = op->n_layers > 0 ? op->n_layers : 1;
    append->strict = op->strict;
    append->position = UINT64_MAX;
    if (op->position_value_case == DSA__V1__APPEND_OP__POSITION_VALUE_POSITION) {
        append->position = op->position;
        if (op->position > svc->config->max_sequence_tokens)
            return srv_fail(err, DSA_E_BAD_RANGE, "position", "%" PRIu64, op->position,
                            "a sequence has at most %" PRIu64 " tokens", svc->config->max_sequence_tokens);
    }
    if (op->sequence_id == 0)
        return srv_fail(err, DSA_E_NOT_FOUND, "sequence_id", "%d", 0, "no such sequence in this session");
    if ((rc = check_layers(svc, append->layer, append->n_layers, err)) != DSA_OK
        || (rc = parse_rule(svc, op->rule, &append->rule, err)) != DSA_OK)
        return rc;
    rc = parse_rows(request, op->rows, DSA__V1__DTYPE__DTYPE_BF16, (uint32_t)svc->layout->d_qk,
                    append->n_layers, append, err);
    request->cost += (uint64_t)append->n_tokens * append->n_layers * (uint64_t)svc->layout->d_qk * 32;
    return rc;
}

dsa_status svc_parse_append(struct svc_request *request, const Dsa__V1__AppendOp *op, const char *prefix,
                            struct srv_job_append *append, struct srv_err *err)
{
    dsa_status rc = parse_append(request, op, append, err);

    if (rc != DSA_OK)
        srv_err_prefix(err, prefix);
    return rc;
}

/* ---- Append and ImportRows ------------------------------------------------------------------------ */

static void on_appended(struct svc_request *request, const struct srv_piece *piece)
{
    Dsa__V1__AppendReply reply = DSA__V1__APPEND_REPLY__INIT;

    if (!request->call)
        return;
    rpc_call_set_data(request->call, NULL);
    if (piece->err.code != DSA_OK) {
        svc_refuse(request->call, &piece->err);
        return;
    }
    reply.n_tokens = piece->n_tokens;
    reply.n_nonfinite = piece->n_nonfinite;
    wire_reply(request->call, &reply.base);
}

/* The job is filled: queue it as the one writer of its sequence. */
static dsa_status submit_append(struct svc_request *request, struct srv_err *err)
{
    request->on_piece = on_appended;
    request->job.accesses = wire_arena_get(request->arena, sizeof(*request->job.accesses));
    if (!request->job.accesses)
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for the request");
    *request->job.accesses = (struct srv_batch_access){request->job.u.append.sequence, true};
    return svc_request_submit(request, 1, 1, err);
}

static void settle_unary(struct rpc_call *call, struct svc_request *request, dsa_status rc,
                         const struct srv_err *err)
{
    if (rc == DSA_OK) {
        rpc_call_set_data(call, request);
        return;
    }
    svc_refuse(call, err);
    svc_request_free(request);
}

static void refuse_no_memory(struct rpc_call *call)
{
    struct srv_err err = {0};

    srv_fail(&err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for the request");
    svc_refuse(call, &err);
}

static const ProtobufCBinaryData *session_of_append(const ProtobufCMessage *message)
{
    return &((const Dsa__V1__AppendRequest *)message)->session;
}

void svc_append(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    const Dsa__V1__AppendRequest *message;
    struct svc_request *request;
    struct wire_arena *arena;
    ProtobufCMessage *base;
    struct svc_lease *lease;
    struct srv_err err = {0};
    dsa_status rc;

    if (!svc_begin_in_session(call, &dsa__v1__append_request__descriptor, bytes, n, session_of_append, &arena,
                              &base, &lease))
        return;
    message = (const Dsa__V1__AppendRequest *)base;
    request = svc_request_create(lease, arena, call, SRV_OP_APPEND);
    if (!request) {
        refuse_no_memory(call);
        return;
    }
    request->bytes = n;
    if (!message->append)
        rc = srv_fail(&err, DSA_E_BAD_REQUEST, "append", "%s", "absent", "this message is needed");
    else
        rc = svc_parse_append(request, message->append, "append.", &request->job.u.append, &err);
    if (rc == DSA_OK)
        rc = submit_append(request, &err);
    settle_unary(call, request, rc, &err);
}

static dsa_status parse_import(struct svc_request *request, const Dsa__V1__ImportRowsRequest *message,
                               struct srv_err *err)
{
    const struct svc *svc = request->svc;
    struct srv_job_append *append = &request->job.u.append;
    const struct dsk_layout *layout = dsk_layout_get((uint32_t)message->layout);
    dsa_status rc;

    append->sequence = message->sequence_id;
    append->layer = message->layer;
    append->n_layers = message->n_layers > 0 ? message->n_layers : 1;
    append->position = UINT64_MAX;
    if (!layout)
        return srv_fail(err, DSA_E_BAD_LAYOUT, "layout", "%d", (int)message->layout, "unknown layout id");
    if (layout != svc->layout)
        return srv_fail(err, DSA_E_BAD_LAYOUT, "layout", "%s", layout->name, "the pool's layout is %s",
                        svc->layout->name);
    if (message->sequence_id == 0)
        return srv_fail(err, DSA_E_NOT_FOUND, "sequence_id", "%d", 0, "no such sequence in this session");
    if ((rc = check_layers(svc, append->layer, append->n_layers, err)) != DSA_OK)
        return rc;
    return parse_rows(request, message->rows, DSA__V1__DTYPE__DTYPE_U8, (uint32_t)svc->layout->row_bytes,
                      append->n_layers, append, err);
}

static const ProtobufCBinaryData *session_of_import(const ProtobufCMessage *message)
{
    return &((const Dsa__V1__ImportRowsRequest *)message)->session;
}

void svc_import_rows(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    struct svc_request *request;
    struct wire_arena *arena;
    ProtobufCMessage *message;
    struct svc_lease *lease;
    struct srv_err err = {0};
    dsa_status rc;

    if (!svc_begin_in_session(call, &dsa__v1__import_rows_request__descriptor, bytes, n, session_of_import,
                              &arena, &message, &lease))
        return;
    request = svc_request_create(lease, arena, call, SRV_OP_IMPORT);
    if (!request) {
        refuse_no_memory(call);
        return;
    }
    request->bytes = n;
    rc = parse_import(request, (const Dsa__V1__ImportRowsRequest *)message, &err);
    if (rc == DSA_OK)
        rc = submit_append(request, &err);
    settle_unary(call, request, rc, &err);
}

/* ---- ExportRows ---------------------------------------------------------------------------------- */

/* One export: a job per chunk, the next one only when the last has left, so a client that does not read holds one
 * chunk and no more. */
struct export
{
    struct rpc_call *call; /* NULL once the call is over */
    struct svc *svc;
    uint8_t session[SRV_TOKEN_BYTES];
    struct svc_request *running;  /* the chunk at the worker */
    uint64_t sequence, next, end; /* end UINT64_MAX: to the end of the sequence */
    uint32_t layer;
    uint32_t row_bytes, chunk_tokens;
    bool as_bf16, is_begun, is_done;
};

static void fail_export(struct export *export, const struct srv_err *err)
{
    export->is_done = true;
    svc_refuse(export->call, err);
}

static void free_if_over(struct export *export)
{
    if (!export->call && !export->running)
        free(export);
}

static void on_exported(struct svc_request *request, const struct srv_piece *piece)
{
    struct export *export = request->owner;
    const struct srv_job_export *job = &request->job.u.export;
    Dsa__V1__RowChunk chunk = DSA__V1__ROW_CHUNK__INIT;

    export->running = NULL;
    if (!export->call) {
        free_if_over(export);
        return;
    }
    if (piece->err.code != DSA_OK) {
        svc_refuse(export->call, &piece->err);
        export->is_done = true;
        return;
    }
    chunk.layout = (Dsa__V1__Layout) export->svc->layout->id;
    chunk.first = job->first;
    chunk.n_tokens = job->n_tokens;
    chunk.rows.data = job->out;
    chunk.rows.len = (size_t)job->n_tokens * export->row_bytes;
    export->next = job->first + job->n_tokens;
    if (job->n_tokens > 0 && !wire_send(export->call, &chunk.base)) {
        struct srv_err err = {0};

        srv_fail(&err, DSA_E_NO_MEMORY, "rows", "%zu bytes", chunk.rows.len, "no memory for a chunk");
        fail_export(export, &err);
        return;
    }
    if (job->n_tokens == 0 || export->next >= export->end || export->next >= job->layer_tokens) {
        export->is_done = true;
        rpc_finish(export->call, 0, "", NULL, 0);
    }
}

static dsa_status make_chunk(struct export *export, struct svc_request *request, struct srv_err *err)
{
    struct srv_job *job = &request->job;
    uint64_t left = export->end - export->next;
    uint32_t n_max = export->chunk_tokens;

    job->u.export.sequence = export->sequence;
    job->u.export.layer = export->layer;
    job->u.export.as_bf16 = export->as_bf16;
    job->u.export.first = export->next;
    job->u.export.end = export->end;
    job->u.export.n_tokens = left < n_max ? (uint32_t)left : n_max;
    job->u.export.out = request->buffer = malloc((size_t)job->u.export.n_tokens * export->row_bytes);
    job->accesses = wire_arena_get(request->arena, sizeof(*job->accesses));
    if (!job->u.export.out || !job->accesses)
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for a chunk");
    *job->accesses = (struct srv_batch_access){export->sequence, false};
    request->owner = export;
    request->is_begun = export->is_begun;
    export->is_begun = true;
    request->on_piece = on_exported;
    return svc_request_submit(request, 1, 1, err);
}

static void submit_chunk(struct export *export)
{
    ProtobufCBinaryData token = {SRV_TOKEN_BYTES, export->session};
    struct svc_lease *lease;
    struct svc_request *request;
    struct srv_err err = {0};

    if (svc_lease_find(export->svc, &token, &lease, &err) != DSA_OK) {
        fail_export(export, &err);
        return;
    }
    request = svc_request_create(lease, wire_arena_create(), export->call, SRV_OP_EXPORT);
    if (!request) {
        srv_fail(&err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for a chunk");
        fail_export(export, &err);
        return;
    }
    if (make_chunk(export, request, &err) == DSA_OK) {
        export->running = request;
        return;
    }
    fail_export(export, &err);
    svc_request_free(request);
}

void svc_export_drained(struct rpc_call *call)
{
    struct export *export = rpc_call_data(call);

    if (export && !export->is_done && !export->running)
        submit_chunk(export);
}

void svc_export_closed(struct rpc_call *call, bool is_cancelled)
{
    struct export *export = rpc_call_data(call);

    (void)is_cancelled;
    if (!export)
        return;
    export->call = NULL;
    if (export->running) {
        export->running->call = NULL;
        svc_request_cancel(export->running);
    }
    free_if_over(export);
}

static const ProtobufCBinaryData *session_of_export(const ProtobufCMessage *message)
{
    return &((const Dsa__V1__ExportRowsRequest *)message)->session;
}

static dsa_status make_export(struct rpc_call *call, const Dsa__V1__ExportRowsRequest *message,
                              struct export **export_p, struct srv_err *err)
{
    struct svc *svc = rpc_call_service(call);
    bool as_bf16 = message->dtype == DSA__V1__DTYPE__DTYPE_BF16;
    uint64_t room = svc->config->max_message_bytes - 4096; /* a chunk's other fields take less */
    struct export *export;
    dsa_status rc;

    if (!as_bf16 && message->dtype != DSA__V1__DTYPE__DTYPE_UNSPECIFIED
        && message->dtype != DSA__V1__DTYPE__DTYPE_U8)
        return srv_fail(err, DSA_E_BAD_REQUEST, "dtype", "%d", (int)message->dtype, "give U8 or BF16");
    if (message->sequence_id == 0)
        return srv_fail(err, DSA_E_NOT_FOUND, "sequence_id", "%d", 0, "no such sequence in this session");
    if (message->n_tokens >= UINT64_MAX - message->first)
        return srv_fail(err, DSA_E_BAD_RANGE, "n_tokens", "%" PRIu64, message->n_tokens,
                        "first + n_tokens wraps");
    if ((rc = check_layers(svc, message->layer, 1, err)) != DSA_OK)
        return rc;
    export = calloc(1, sizeof(*export));
    if (!export)
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for the export");
    export->call = call;
    export->svc = svc;
    memcpy(export->session, message->session.data, SRV_TOKEN_BYTES); /* found, so it has this length */
    export->sequence = message->sequence_id;
    export->layer = message->layer;
    export->as_bf16 = as_bf16;
    export->row_bytes = (uint32_t)(as_bf16 ? svc->layout->d_qk * 2 : svc->layout->row_bytes);
    export->next = message->first;
    export->end = message->n_tokens == 0 ? UINT64_MAX : message->first + message->n_tokens;
    /* At least a row: the smallest message that can be configured holds many. */
    export->chunk_tokens =
        (uint32_t)(room < EXPORT_CHUNK_BYTES ? room : EXPORT_CHUNK_BYTES) / export->row_bytes;
    *export_p = export;
    return DSA_OK;
}

void svc_export_rows(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    struct wire_arena *arena;
    ProtobufCMessage *message;
    struct svc_lease *lease;
    struct export *export;
    struct srv_err err = {0};

    if (!svc_begin_in_session(call, &dsa__v1__export_rows_request__descriptor, bytes, n, session_of_export,
                              &arena, &message, &lease))
        return;
    if (make_export(call, (const Dsa__V1__ExportRowsRequest *)message, &export, &err) == DSA_OK) {
        rpc_call_set_data(call, export);
        submit_chunk(export);
    } else {
        svc_refuse(call, &err);
    }
    wire_arena_free(arena);
}
