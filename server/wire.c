#include "server/wire.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "google/protobuf/any.pb-c.h"
#include "google/rpc/status.pb-c.h"
#include "server/rpc.h"
#include "server/status.h"

/* ---- unpacking ------------------------------------------------------------------------------ */

#define BLOCK_BYTES 4096

struct block {
    struct block *next;
    size_t used, size;
    max_align_t bytes[];
};

struct wire_arena {
    struct block *blocks;
    size_t budget; /* bytes that unpacking may still take */
    bool is_out_of_memory;
};

static struct block *spare_blocks; /* of BLOCK_BYTES each */
static unsigned n_spare_blocks, max_spare_blocks;

void wire_keep_blocks(unsigned max_blocks)
{
    struct block *block;

    max_spare_blocks = max_blocks;
    while (n_spare_blocks > max_blocks) {
        block = spare_blocks;
        spare_blocks = block->next;
        n_spare_blocks--;
        free(block);
    }
}

static struct block *block_get(size_t n)
{
    size_t size = n > BLOCK_BYTES ? n : BLOCK_BYTES;
    struct block *block = size == BLOCK_BYTES ? spare_blocks : NULL;

    if (block) {
        spare_blocks = block->next;
        n_spare_blocks--;
    } else if ((block = malloc(sizeof(*block) + size)) == NULL) {
        return NULL;
    }
    block->used = 0;
    block->size = size;
    return block;
}

static void block_put(struct block *block)
{
    if (block->size != BLOCK_BYTES || n_spare_blocks >= max_spare_blocks) {
        free(block);
        return;
    }
    block->next = spare_blocks;
    spare_blocks = block;
    n_spare_blocks++;
}

static void *arena_take(struct wire_arena *arena, size_t n)
{
    struct block *block = arena->blocks;
    size_t need = (n + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
    void *at;

    if (!block || block->size - block->used < need) {
        block = block_get(need);
        if (!block)
            return NULL;
        block->next = arena->blocks;
        arena->blocks = block;
    }
    at = (char *)block->bytes + block->used;
    block->used += need;
    return at;
}

static void *budget_alloc(void *data, size_t n)
{
    struct wire_arena *arena = data;
    void *at;

    if (n > arena->budget)
        return NULL;
    arena->budget -= n;
    at = arena_take(arena, n);
    arena->is_out_of_memory |= !at;
    return at;
}

static void budget_free(void *data, void *at)
{
    (void)data; /* everything goes with the arena */
    (void)at;
}

dsa_status wire_unpack(const ProtobufCMessageDescriptor *type, const uint8_t *bytes, size_t n,
                       struct wire_arena **arena_p, ProtobufCMessage **message_p, struct srv_err *err)
{
    struct wire_arena *arena = wire_arena_create();
    ProtobufCAllocator allocator = {budget_alloc, budget_free, arena};
    ProtobufCMessage *message;

    if (!arena)
        return srv_fail(err, DSA_E_NO_MEMORY, type->name, "%zu", n, "no memory for the message");
    /* A message in memory is a few times its size on the wire. A short submessage costs many times its bytes, so small messages
     * get a larger factor; a large message made of nothing else is not a request. */
    arena->budget = 65536 + n * 8 + (n < 65536 ? n : 65536) * 24;
    message = protobuf_c_message_unpack(type, &allocator, n, bytes);
    if (!message) {
        bool is_out_of_memory = arena->is_out_of_memory;

        wire_arena_free(arena);
        if (is_out_of_memory)
            return srv_fail(err, DSA_E_NO_MEMORY, type->name, "%zu bytes", n, "no memory for the message");
        return srv_fail(err, DSA_E_BAD_REQUEST, type->name, "%zu bytes", n,
                        "not a valid message of this type, or too many parts for its size");
    }
    *arena_p = arena;
    *message_p = message;
    return DSA_OK;
}

struct wire_arena *wire_arena_create(void)
{
    struct wire_arena *arena = malloc(sizeof(*arena)); /* not calloc, which goes past glibc's cache */

    if (arena)
        *arena = (struct wire_arena){0};
    return arena;
}

void wire_arena_free(struct wire_arena *arena)
{
    struct block *block, *next;

    if (!arena)
        return;
    for (block = arena->blocks; block; block = next) {
        next = block->next;
        block_put(block);
    }
    free(arena);
}

void *wire_arena_get(struct wire_arena *arena, size_t n)
{
    void *at = arena ? arena_take(arena, n > 0 ? n : 1) : NULL;

    if (at)
        memset(at, 0, n);
    return at;
}

bool wire_varint(const uint8_t **at, const uint8_t *end, uint64_t *value_p)
{
    uint64_t value = 0;

    for (unsigned shift = 0; shift < 64 && *at < end; shift += 7) {
        uint8_t byte = *(*at)++;

        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) {
            *value_p = value;
            return true;
        }
    }
    return false;
}

uint64_t wire_peek(const uint8_t *bytes, size_t n, uint32_t field)
{
    const uint8_t *at = bytes, *end = bytes + n;
    uint64_t tag, value;

    while (at < end && wire_varint(&at, end, &tag)) {
        switch (tag & 7) {
        case 0:
            if (!wire_varint(&at, end, &value))
                return 0;
            if (tag >> 3 == field)
                return value;
            break;
        case 1:
        case 5:
            value = tag & 4 ? 4 : 8;
            if (value > (uint64_t)(end - at))
                return 0;
            at += value;
            break;
        case 2:
            if (!wire_varint(&at, end, &value) || value > (uint64_t)(end - at))
                return 0;
            at += value;
            break;
        default:
            return 0;
        }
    }
    return 0;
}

/* ---- tensors ---------------------------------------------------------------------------------- */

uint32_t wire_dtype_bytes(Dsa__V1__DType dtype)
{
    switch (dtype) {
    case DSA__V1__DTYPE__DTYPE_BF16:
        return 2;
    case DSA__V1__DTYPE__DTYPE_F32:
    case DSA__V1__DTYPE__DTYPE_I32:
        return 4;
    case DSA__V1__DTYPE__DTYPE_U8:
        return 1;
    default:
        return 0;
    }
}

static const char *dtype_name(Dsa__V1__DType dtype)
{
    const ProtobufCEnumValue *value =
        protobuf_c_enum_descriptor_get_value(&dsa__v1__dtype__descriptor, (int)dtype);

    return value ? value->name : "unknown";
}

/* "field.part" or "field.part[i]"; the result lives until the next call. */
static const char *path(const char *field, const char *part, int i)
{
    static _Thread_local char text[96];

    if (i < 0)
        snprintf(text, sizeof(text), "%s.%s", field, part);
    else
        snprintf(text, sizeof(text), "%s.%s[%d]", field, part, i);
    return text;
}

static dsa_status check_shape(const Dsa__V1__Tensor *tensor, const struct wire_tensor_rule *rule,
                              struct wire_tensor *out_p, struct srv_err *err)
{
    if (tensor->dtype != rule->dtype)
        return srv_fail(err, DSA_E_BAD_SHAPE, path(rule->field, "dtype", -1), "%s", dtype_name(tensor->dtype),
                        "must be %s", dtype_name(rule->dtype));
    if (tensor->n_shape != rule->rank)
        return srv_fail(err, DSA_E_BAD_SHAPE, path(rule->field, "shape", -1), "rank %zu", tensor->n_shape,
                        "must have rank %" PRIu32, rule->rank);
    for (uint32_t i = 0; i < rule->rank; i++) {
        if (tensor->shape[i] == 0)
            return srv_fail(err, DSA_E_BAD_SHAPE, path(rule->field, "shape", (int)i), "%d", 0,
                            "an extent is at least 1");
        if (rule->shape[i] != 0 && tensor->shape[i] != rule->shape[i])
            return srv_fail(err, DSA_E_BAD_SHAPE, path(rule->field, "shape", (int)i), "%" PRIu64,
                            tensor->shape[i], "must be %" PRIu64, rule->shape[i]);
        out_p->shape[i] = tensor->shape[i];
    }
    return DSA_OK;
}

/* Strides given or dense, and the bytes from the first element to past the last. Every product is checked. */
static dsa_status check_strides(const char *field, uint32_t elem, uint32_t rank, size_t n_strides,
                                const int64_t *strides, struct wire_tensor *out_p, uint64_t *span_p,
                                struct srv_err *err)
{
    uint64_t dense = elem, span = elem;

    if (n_strides != 0 && n_strides != rank)
        return srv_fail(err, DSA_E_BAD_SHAPE, path(field, "strides_bytes", -1), "%zu", n_strides,
                        "none, or one for each of the %" PRIu32 " axes", rank);
    for (int i = (int)rank - 1; i >= 0; i--) {
        uint64_t extent = out_p->shape[i], stride = dense, reach;

        if (n_strides != 0) {
            if (strides[i] <= 0 || strides[i] % elem != 0)
                return srv_fail(err, DSA_E_BAD_SHAPE, path(field, "strides_bytes", i), "%" PRId64, strides[i],
                                "a stride is positive and a multiple of the element's %" PRIu32 " bytes",
                                elem);
            if ((uint32_t)i == rank - 1 && strides[i] != (int64_t)elem)
                return srv_fail(err, DSA_E_BAD_SHAPE, path(field, "strides_bytes", i), "%" PRId64, strides[i],
                                "the last axis must be dense (%" PRIu32 ")", elem);
            /* Nothing is stepped over on an axis of one: whatever was given, what follows sees a dense stride. */
            stride = extent == 1 ? dense : (uint64_t)strides[i];
        }
        if (__builtin_mul_overflow(extent - 1, stride, &reach) || __builtin_add_overflow(span, reach, &span)
            || __builtin_mul_overflow(stride, extent, &dense) || span > INT64_MAX || dense > INT64_MAX)
            return srv_fail(err, DSA_E_BAD_SHAPE, path(field, "shape", i), "%" PRIu64, extent,
                            "the tensor is larger than an address space");
        out_p->strides[i] = (int64_t)stride;
    }
    *span_p = span;
    return DSA_OK;
}

/* Distinct elements must not share bytes: sorted by stride, each axis must step over all of the smaller ones. */
static dsa_status check_overlap(const char *field, uint32_t elem, uint32_t rank,
                                const struct wire_tensor *tensor, struct srv_err *err)
{
    uint32_t order[WIRE_MAX_RANK];
    uint64_t extent = elem;

    for (uint32_t i = 0; i < rank; i++) {
        uint32_t j = i;

        for (; j > 0 && tensor->strides[order[j - 1]] > tensor->strides[i]; j--)
            order[j] = order[j - 1];
        order[j] = i;
    }
    for (uint32_t i = 0; i < rank; i++) {
        uint32_t axis = order[i];

        if (tensor->shape[axis] == 1)
            continue;
        if ((uint64_t)tensor->strides[axis] < extent)
            return srv_fail(err, DSA_E_BAD_SHAPE, path(field, "strides_bytes", (int)axis), "%" PRId64,
                            tensor->strides[axis], "elements would overlap");
        extent += (tensor->shape[axis] - 1) * (uint64_t)tensor->strides[axis];
    }
    return DSA_OK;
}

static dsa_status resolve_region(const struct wire_regions *in, const Dsa__V1__RegionSlice *slice,
                                 const char *field, uint32_t elem, uint64_t span, bool want_write,
                                 struct wire_tensor *out_p, struct srv_err *err)
{
    void *at;
    dsa_status rc;

    if (slice->offset % elem != 0)
        return srv_fail(err, DSA_E_BAD_RANGE, path(field, "region.offset", -1), "%" PRIu64, slice->offset,
                        "must be a multiple of the element's %" PRIu32 " bytes", elem);
    rc = srv_region_get(in->regions, in->session, slice->region_id.data, slice->region_id.len, slice->offset,
                        span, want_write, "region", &out_p->region, &at, err);

    if (rc == DSA_OK)
        out_p->data = at;
    else
        srv_err_prefix(
            err, path(field, "", -1)); /* only now: a path costs more than all the checks of a good tensor */
    return rc;
}

dsa_status wire_tensor_get(const struct wire_regions *in, const Dsa__V1__Tensor *tensor,
                           const struct wire_tensor_rule *rule, struct wire_tensor *out_p,
                           struct srv_err *err)
{
    uint32_t elem = wire_dtype_bytes(rule->dtype);
    struct wire_tensor out = {0};
    uint64_t span;
    dsa_status rc;

    if (!tensor)
        return srv_fail(err, DSA_E_BAD_REQUEST, rule->field, "%s", "absent", "this tensor is needed");
    if ((rc = check_shape(tensor, rule, &out, err)) != DSA_OK
        || (rc = check_strides(rule->field, elem, rule->rank, tensor->n_strides_bytes, tensor->strides_bytes,
                               &out, &span, err))
               != DSA_OK
        || (rc = check_overlap(rule->field, elem, rule->rank, &out, err)) != DSA_OK)
        return rc;
    switch (tensor->data_case) {
    case DSA__V1__TENSOR__DATA_REGION:
        rc = resolve_region(in, tensor->region, rule->field, elem, span, false, &out, err);
        break;
    case DSA__V1__TENSOR__DATA_INLINE:
        if (tensor->n_strides_bytes != 0)
            rc = srv_fail(err, DSA_E_BAD_SHAPE, path(rule->field, "strides_bytes", -1), "%zu",
                          tensor->n_strides_bytes, "inline tensors are dense; give no strides");
        else if (tensor->inline_.len > in->max_inline_bytes)
            rc = srv_fail(err, DSA_E_TOO_LARGE, path(rule->field, "inline", -1), "%zu", tensor->inline_.len,
                          "at most %" PRIu64 " bytes inline; use a region", in->max_inline_bytes);
        else if (tensor->inline_.len != span)
            rc = srv_fail(err, DSA_E_BAD_SHAPE, path(rule->field, "inline", -1), "%zu", tensor->inline_.len,
                          "the shape needs exactly %" PRIu64 " bytes", span);
        out.data = tensor->inline_.data;
        break;
    default:
        rc = srv_fail(err, DSA_E_BAD_REQUEST, path(rule->field, "data", -1), "%s", "absent",
                      "give the data inline or as a region");
    }
    if (rc == DSA_OK)
        *out_p = out;
    return rc;
}

dsa_status wire_output_get(const struct wire_regions *in, const Dsa__V1__Output *output,
                           const struct wire_tensor_rule *rule, struct wire_tensor *out_p,
                           struct srv_err *err)
{
    uint32_t elem = wire_dtype_bytes(rule->dtype);
    struct wire_tensor out = {0};
    uint64_t span;
    dsa_status rc;

    memcpy(out.shape, rule->shape, sizeof(out.shape));
    if ((rc = check_strides(rule->field, elem, rule->rank, output->n_strides_bytes, output->strides_bytes,
                            &out, &span, err))
            != DSA_OK
        || (rc = check_overlap(rule->field, elem, rule->rank, &out, err)) != DSA_OK
        || (rc = resolve_region(in, output->region, rule->field, elem, span, true, &out, err)) != DSA_OK)
        return rc;
    *out_p = out;
    return DSA_OK;
}

const char *wire_text(char *out, size_t n, const char *text)
{
    size_t i;

    for (i = 0; i + 1 < n && text[i] != '\0'; i++)
        out[i] = (char)(text[i] >= 0x20 && text[i] < 0x7f ? text[i] : '?');
    out[i] = '\0';
    return out;
}

/* ---- answers ---------------------------------------------------------------------------------- */

void wire_status(const struct srv_err *err, Dsa__V1__Status *status_p)
{
    dsa__v1__status__init(status_p);
    status_p->code = srv_status_grpc_code(err->code);
    status_p->reason = (char *)(uintptr_t)srv_status_reason(err->code);
    status_p->scope = (Dsa__V1__Scope)srv_status_scope(err->code);
    status_p->message = (char *)(uintptr_t)err->text;
    status_p->field = (char *)(uintptr_t)err->field;
    status_p->value = (char *)(uintptr_t)err->value;
    status_p->rule = (char *)(uintptr_t)err->rule;
    status_p->retry_after_us = err->retry_after_us;
}

bool wire_send(struct rpc_call *call, const ProtobufCMessage *message)
{
    size_t n = protobuf_c_message_get_packed_size(message);
    uint8_t *bytes;
    struct rpc_message *out = rpc_message_create(rpc_call_rpc(call), n, &bytes);

    if (!out)
        return false;
    protobuf_c_message_pack(message, bytes);
    rpc_send(call, out);
    return true;
}

void wire_reply(struct rpc_call *call, const ProtobufCMessage *message)
{
    if (wire_send(call, message)) {
        rpc_finish(call, 0, "", NULL, 0);
    } else {
        struct srv_err err = {0};

        srv_fail(&err, DSA_E_TOO_LARGE, "reply", "%zu", protobuf_c_message_get_packed_size(message),
                 "the reply is larger than a message may be");
        wire_fail(call, &err);
    }
}

void wire_fail(struct rpc_call *call, const struct srv_err *err)
{
    static char type_url[] = "type.googleapis.com/dsa.v1.Status";
    Dsa__V1__Status detail;
    Google__Protobuf__Any any = GOOGLE__PROTOBUF__ANY__INIT, *details[1] = {&any};
    Google__Rpc__Status envelope = GOOGLE__RPC__STATUS__INIT;
    uint8_t detail_bytes[512], envelope_bytes[1024]; /* srv_err's strings are bounded */
    char text[400];

    snprintf(text, sizeof(text), "%s: %s%s%s%s%s%s%s%s", srv_status_reason(err->code), err->field,
             err->value[0] != '\0' ? "=" : "", err->value,
             err->field[0] != '\0' || err->value[0] != '\0' ? ": " : "", err->text,
             err->rule[0] != '\0' ? " (rule " : "", err->rule, err->rule[0] != '\0' ? ")" : "");
    wire_status(err, &detail);
    SRV_ASSERT(dsa__v1__status__get_packed_size(&detail) <= sizeof(detail_bytes));
    any.type_url = type_url;
    any.value.len = dsa__v1__status__pack(&detail, detail_bytes);
    any.value.data = detail_bytes;
    envelope.code = detail.code;
    envelope.message = text;
    envelope.n_details = 1;
    envelope.details = details;
    SRV_ASSERT(google__rpc__status__get_packed_size(&envelope) <= sizeof(envelope_bytes));
    rpc_finish(call, detail.code, text, envelope_bytes, google__rpc__status__pack(&envelope, envelope_bytes));
}
