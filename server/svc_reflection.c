/* svc_reflection.c - grpc.reflection v1 and v1alpha. Both have the same messages on the wire, so v1's serve both. */
#include <inttypes.h>

#include "grpc/reflection/v1/reflection.pb-c.h"
#include "server/descriptors.h"
#include "server/status.h"
#include "server/svc.h"

typedef Grpc__Reflection__V1__ServerReflectionRequest reflect_request;
typedef Grpc__Reflection__V1__ServerReflectionResponse reflect_response;

#define NOT_FOUND     5
#define UNIMPLEMENTED 12
#define MAX_QUEUED    (256 * 1024)

static void send_response(struct rpc_call *call, const reflect_response *response)
{
    if (!wire_send(call, &response->base))
        rpc_finish(call, srv_status_grpc_code(DSA_E_NO_MEMORY), "NO_MEMORY: no memory for a reply", NULL, 0);
}

static void reply_error(struct rpc_call *call, reflect_response *response, int code, const char *text)
{
    Grpc__Reflection__V1__ErrorResponse error = GRPC__REFLECTION__V1__ERROR_RESPONSE__INIT;

    error.error_code = code;
    error.error_message = (char *)(uintptr_t)text;
    response->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE;
    response->error_response = &error;
    send_response(call, response);
}

static void reply_services(struct rpc_call *call, reflect_response *response)
{
    Grpc__Reflection__V1__ListServiceResponse list = GRPC__REFLECTION__V1__LIST_SERVICE_RESPONSE__INIT;
    Grpc__Reflection__V1__ServiceResponse services[SRV_MAX_FILES], *pointers[SRV_MAX_FILES];
    const char *names[SRV_MAX_FILES];
    size_t n = srv_descriptors_services(names, SRV_MAX_FILES);

    for (size_t i = 0; i < n; i++) {
        grpc__reflection__v1__service_response__init(&services[i]);
        services[i].name = (char *)(uintptr_t)names[i];
        pointers[i] = &services[i];
    }
    list.n_service = n;
    list.service = pointers;
    response->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE;
    response->list_services_response = &list;
    send_response(call, response);
}

static void reply_files(struct rpc_call *call, reflect_response *response, const struct srv_proto_file *files,
                        size_t n)
{
    Grpc__Reflection__V1__FileDescriptorResponse list = GRPC__REFLECTION__V1__FILE_DESCRIPTOR_RESPONSE__INIT;
    ProtobufCBinaryData bytes[SRV_MAX_FILES];

    if (n == 0) {
        reply_error(call, response, NOT_FOUND, "no such file or symbol here");
        return;
    }
    for (size_t i = 0; i < n; i++)
        bytes[i] = (ProtobufCBinaryData){files[i].n, (uint8_t *)(uintptr_t)files[i].bytes};
    list.n_file_descriptor_proto = n;
    list.file_descriptor_proto = bytes;
    response->message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE;
    response->file_descriptor_response = &list;
    send_response(call, response);
}

static void answer(struct rpc_call *call, reflect_request *request)
{
    reflect_response response = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;
    struct srv_proto_file files[SRV_MAX_FILES];

    response.valid_host = request->host;
    response.original_request = request;
    switch (request->message_request_case) {
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES:
        reply_services(call, &response);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME:
        reply_files(call, &response, files,
                    srv_descriptors_by_name(request->file_by_filename, files, SRV_MAX_FILES));
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL:
        reply_files(call, &response, files,
                    srv_descriptors_by_symbol(request->file_containing_symbol, files, SRV_MAX_FILES));
        break;
    default:
        reply_error(call, &response, UNIMPLEMENTED, "proto3 has no extensions; ask by file or by symbol");
    }
}

void svc_reflect(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    struct wire_arena *arena;
    ProtobufCMessage *message;
    struct srv_err err = {0};

    if (wire_unpack(&grpc__reflection__v1__server_reflection_request__descriptor, bytes, n, &arena, &message,
                    &err)
        != DSA_OK) {
        svc_refuse(call, &err);
        return;
    }
    answer(call, (reflect_request *)message);
    wire_arena_free(arena);
    svc_reflect_drained(call);
}

/* A client that asks without reading is not read until it does. */
void svc_reflect_drained(struct rpc_call *call)
{
    if (rpc_queued_bytes(call) < MAX_QUEUED)
        rpc_read_next(call);
}

void svc_reflect_half_close(struct rpc_call *call)
{
    rpc_finish(call, 0, "", NULL, 0);
}
