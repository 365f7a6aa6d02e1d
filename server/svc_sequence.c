/* svc_sequence.c - CreateSequence, ForkSequence, TruncateSequence, ReleaseSequence, GetSequence. The worker owns
 * sequences; here requests become jobs and answers become messages. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "server/status.h"
#include "server/svc.h"

/* The five requests have the same fields where they have them, so one function serves all: fields are found by
 * name in the message's descriptor. */
static const void *field_of(const ProtobufCMessage *message, const char *name)
{
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field_by_name(message->descriptor, name);

    return field ? (const char *)message + field->offset : NULL;
}

static const ProtobufCBinaryData *session_of(const ProtobufCMessage *message)
{
    return field_of(message, "session");
}

static uint64_t number_of(const ProtobufCMessage *message, const char *name)
{
    const uint64_t *number = field_of(message, name);

    return number ? *number : 0;
}

static void reply_sequence(struct svc_request *request)
{
    const struct srv_job_sequence *sequence = &request->job.u.sequence;
    Dsa__V1__Sequence reply = DSA__V1__SEQUENCE__INIT;

    reply.id = sequence->id;
    reply.device_uuid = (char *)(uintptr_t)srv_worker_device(request->svc->worker)->uuid;
    reply.n_tokens = sequence->n_tokens;
    reply.n_pages = sequence->n_pages;
    reply.n_pages_shared = sequence->n_shared;
    if (sequence->layer_tokens) {
        reply.n_layer_tokens = request->svc->config->layers;
        reply.layer_tokens = sequence->layer_tokens;
    }
    if (sequence->pages) {
        reply.n_page_ids = sequence->n_pages < sequence->max_pages ? sequence->n_pages : sequence->max_pages;
        reply.page_ids = sequence->pages;
    }
    wire_reply(request->call, &reply.base);
}

static void on_piece(struct svc_request *request, const struct srv_piece *piece)
{
    Dsa__V1__ReleaseSequenceReply released = DSA__V1__RELEASE_SEQUENCE_REPLY__INIT;

    if (!request->call)
        return;
    rpc_call_set_data(request->call, NULL);
    if (piece->err.code != DSA_OK)
        svc_refuse(request->call, &piece->err);
    else if (request->job.op == SRV_OP_RELEASE)
        wire_reply(request->call, &released.base);
    else
        reply_sequence(request);
}

/* Room for what GetSequence shows beyond the counts. */
static dsa_status make_get_room(struct svc_request *request, struct srv_err *err)
{
    struct srv_job_sequence *sequence = &request->job.u.sequence;
    const struct svc *svc = request->svc;

    sequence->layer_tokens = wire_arena_get(request->arena, sizeof(uint64_t) * svc->config->layers);
    if (svc->config->physical_indices) {
        sequence->max_pages = svc->n_pages;
        request->buffer = malloc(sizeof(int32_t) * svc->n_pages);
        sequence->pages = request->buffer;
    }
    if (!sequence->layer_tokens || (svc->config->physical_indices && !sequence->pages))
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for the answer");
    return DSA_OK;
}

static dsa_status submit(struct svc_request *request, const ProtobufCMessage *message, bool is_write,
                         struct srv_err *err)
{
    struct srv_job *job = &request->job;
    dsa_status rc = DSA_OK;

    job->u.sequence.id = number_of(message, "sequence_id");
    job->u.sequence.n_tokens = number_of(message, "n_tokens");
    job->accesses = wire_arena_get(request->arena, sizeof(*job->accesses));
    if (!job->accesses)
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for the request");
    if (job->op != SRV_OP_CREATE && job->u.sequence.id == 0)
        return srv_fail(err, DSA_E_NOT_FOUND, "sequence_id", "%d", 0, "no such sequence in this session");
    if (job->op == SRV_OP_GET && (rc = make_get_room(request, err)) != DSA_OK)
        return rc;
    *job->accesses = (struct srv_batch_access){job->u.sequence.id, is_write};
    return svc_request_submit(request, job->op == SRV_OP_CREATE ? 0 : 1, 1, err);
}

static void serve(struct rpc_call *call, const uint8_t *bytes, size_t n,
                  const ProtobufCMessageDescriptor *type, enum srv_op op, bool is_write)
{
    struct svc_request *request;
    struct wire_arena *arena;
    ProtobufCMessage *message;
    struct svc_lease *lease;
    struct srv_err err = {0};

    if (!svc_begin_in_session(call, type, bytes, n, session_of, &arena, &message, &lease))
        return;
    request = svc_request_create(lease, arena, call, op);
    if (!request) {
        srv_fail(&err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for the request");
        svc_refuse(call, &err);
        return;
    }
    request->on_piece = on_piece;
    if (submit(request, message, is_write, &err) == DSA_OK) {
        rpc_call_set_data(call, request);
        return;
    }
    svc_refuse(call, &err);
    svc_request_free(request);
}

static dsa_status check_device(const struct svc *svc, const char *uuid, struct srv_err *err)
{
    char text[40];

    if (uuid[0] == '\0' || strcmp(uuid, srv_worker_device(svc->worker)->uuid) == 0)
        return DSA_OK;
    return srv_fail(err, DSA_E_NOT_FOUND, "device_uuid", "%s", wire_text(text, sizeof(text), uuid),
                    "no such device here; see GetCapabilities");
}

void svc_create_sequence(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    struct wire_arena *arena;
    ProtobufCMessage *message;
    struct srv_err err = {0};
    dsa_status rc;

    if (!svc_begin(call, &dsa__v1__create_sequence_request__descriptor, bytes, n, &arena, &message))
        return;
    rc = check_device(rpc_call_service(call), ((const Dsa__V1__CreateSequenceRequest *)message)->device_uuid,
                      &err);
    wire_arena_free(arena);
    if (rc == DSA_OK)
        serve(call, bytes, n, &dsa__v1__create_sequence_request__descriptor, SRV_OP_CREATE, true);
    else
        svc_refuse(call, &err);
}

void svc_fork_sequence(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    serve(call, bytes, n, &dsa__v1__fork_sequence_request__descriptor, SRV_OP_FORK, false);
}

void svc_truncate_sequence(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    serve(call, bytes, n, &dsa__v1__truncate_sequence_request__descriptor, SRV_OP_TRUNCATE, true);
}

void svc_release_sequence(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    serve(call, bytes, n, &dsa__v1__release_sequence_request__descriptor, SRV_OP_RELEASE, true);
}

void svc_get_sequence(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    serve(call, bytes, n, &dsa__v1__get_sequence_request__descriptor, SRV_OP_GET, false);
}
