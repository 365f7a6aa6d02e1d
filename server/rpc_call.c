/* rpc_call.c - what a call tells of itself. */
#include "server/rpc_impl.h"

void *rpc_call_service(const struct rpc_call *call)
{
    return call->rpc->config.service;
}

const char *rpc_call_path(const struct rpc_call *call)
{
    return call->refused ? call->refused->path : call->method->path;
}

size_t rpc_call_method(const struct rpc_call *call)
{
    const struct rpc_config *config = &call->rpc->config;
    const struct rpc_method *method = call->refused ? call->refused : call->method;

    return method == &rpc_unknown_method ? config->n_methods : (size_t)(method - config->methods);
}

uint32_t rpc_call_count(const struct rpc *rpc)
{
    return rpc->n_calls;
}

uint64_t rpc_call_number(const struct rpc_call *call)
{
    return call->number;
}

const struct srv_trace *rpc_call_trace(const struct rpc_call *call)
{
    return &call->trace;
}

bool rpc_call_is_stream(const struct rpc_call *call)
{
    return call->method->shape == RPC_STREAM || call->method->shape == RPC_SUBSCRIPTION;
}

uint64_t *rpc_call_notes(struct rpc_call *call)
{
    return call->notes;
}

enum rpc_origin rpc_call_origin(const struct rpc_call *call)
{
    return call->origin;
}

const char *rpc_call_header(const struct rpc_call *call, const char *name, size_t *n_p)
{
    for (size_t i = 0; i < call->headers.count; i++) {
        const grpc_metadata *header = &call->headers.metadata[i];

        if (grpc_slice_str_cmp(header->key, name) != 0)
            continue;
        *n_p = GRPC_SLICE_LENGTH(header->value);
        return (const char *)GRPC_SLICE_START_PTR(header->value);
    }
    return NULL;
}

void rpc_call_set_data(struct rpc_call *call, void *data)
{
    call->data = data;
}

void *rpc_call_data(const struct rpc_call *call)
{
    return call->data;
}

struct rpc *rpc_call_rpc(const struct rpc_call *call)
{
    return call->rpc;
}
