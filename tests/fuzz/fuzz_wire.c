/* fuzz_wire.c - any bytes as any request: they are refused, or become a message that can be walked, resolved and packed again.
 * The first byte chooses the type. */
#include <stdlib.h>
#include <string.h>

#include "grpc/health/v1/health.pb-c.h"
#include "server/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

static const ProtobufCMessageDescriptor *const types[] = {
    &dsa__v1__attend_request__descriptor,
    &dsa__v1__append_request__descriptor,
    &dsa__v1__create_sequence_request__descriptor,
    &dsa__v1__fork_sequence_request__descriptor,
    &dsa__v1__truncate_sequence_request__descriptor,
    &dsa__v1__release_sequence_request__descriptor,
    &dsa__v1__get_sequence_request__descriptor,
    &dsa__v1__import_rows_request__descriptor,
    &dsa__v1__export_rows_request__descriptor,
    &dsa__v1__session_request__descriptor,
    &dsa__v1__register_region_request__descriptor,
    &dsa__v1__unregister_region_request__descriptor,
    &dsa__v1__get_capabilities_request__descriptor,
    &dsa__v1__get_stats_request__descriptor,
    &dsa__v1__drain_request__descriptor,
    &grpc__health__v1__health_check_request__descriptor,
};

#define REGION_BYTES 65536
#define SESSION      7

static struct srv_regions *regions;
static uint8_t *memory;

/* One region, whose id a message may hit: sixteen bytes of 'r'. Its memory is exactly as long as it says, so that
 * AddressSanitizer sees one byte too far. */
static void make_region(void)
{
    struct srv_region desc = {.session = SESSION, .size = REGION_BYTES, .writable = true}, *region;

    memory = malloc(REGION_BYTES);
    desc.base = memory;
    memset(desc.id, 'r', sizeof(desc.id));
    if (!memory || srv_regions_create(4, 1 << 20, NULL, NULL, &regions) != DSA_OK
        || srv_region_add(regions, &desc, &region, NULL) != DSA_OK)
        abort();
}

/* A tensor that is accepted lies where it says: both ends of it can be read. */
static void resolve(const Dsa__V1__Tensor *tensor)
{
    struct wire_regions in = {regions, SESSION, 4 << 20};
    struct wire_tensor_rule rule = {.field = "t"};
    struct wire_tensor view;
    volatile uint8_t byte;
    int64_t last = 0;

    if (!tensor)
        return;
    rule.dtype = tensor->dtype;
    rule.rank = (uint32_t)(tensor->n_shape <= WIRE_MAX_RANK ? tensor->n_shape : WIRE_MAX_RANK);
    if (rule.rank == 0 || wire_dtype_bytes(rule.dtype) == 0) /* rules are the server's own */
        return;
    if (wire_tensor_get(&in, tensor, &rule, &view, NULL) != DSA_OK)
        return;
    for (uint32_t i = 0; i < rule.rank; i++) {
        if (view.shape[i] == 0 || view.strides[i] <= 0)
            abort();
        last += (int64_t)(view.shape[i] - 1) * view.strides[i];
    }
    last += wire_dtype_bytes(tensor->dtype) - 1;
    byte = view.data[0];
    byte = view.data[last];
    (void)byte;
    if (view.region)
        srv_region_put(regions, view.region);
}

static void resolve_attend(const Dsa__V1__AttendRequest *request)
{
    const Dsa__V1__AttendOp *op;

    if (request->op_case == DSA__V1__ATTEND_REQUEST__OP_APPEND) {
        resolve(request->append->rows);
    } else if (request->op_case == DSA__V1__ATTEND_REQUEST__OP_ATTEND) {
        op = request->attend;
        resolve(op->q);
        resolve(op->indices);
        resolve(op->lengths);
        resolve(op->sink);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    const ProtobufCMessageDescriptor *type;
    struct wire_arena *arena;
    ProtobufCMessage *message;
    size_t size;
    uint8_t *packed;

    if (!regions)
        make_region();
    if (n == 0)
        return 0;
    type = types[bytes[0] % (sizeof(types) / sizeof(types[0]))];
    (void)wire_peek(bytes + 1, n - 1, 2);
    if (wire_unpack(type, bytes + 1, n - 1, &arena, &message, NULL) != DSA_OK)
        return 0;
    if (message->descriptor != type || !protobuf_c_message_check(message))
        abort();
    if (type == &dsa__v1__attend_request__descriptor)
        resolve_attend((const Dsa__V1__AttendRequest *)message);
    size = protobuf_c_message_get_packed_size(message);
    packed = malloc(size > 0 ? size : 1);
    if (!packed || protobuf_c_message_pack(message, packed) != size)
        abort();
    free(packed);
    wire_arena_free(arena);
    return 0;
}
