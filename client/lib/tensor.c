/* tensor.c - tensors and appends as the wire wants them. Pure: any thread. */
#include <stdio.h>
#include <string.h>

#include "client/lib/internal.h"

size_t dsa_dtype_bytes(enum dsa_dtype dtype)
{
    switch (dtype) {
    case DSA_DTYPE_NONE:
        return 0;
    case DSA_DTYPE_BF16:
        return 2;
    case DSA_DTYPE_F32:
    case DSA_DTYPE_I32:
        return 4;
    case DSA_DTYPE_U8:
        return 1;
    }
    return 0;
}

const char *dsa_dtype_name(enum dsa_dtype dtype)
{
    static const char *const names[] = {"none", "bf16", "f32", "i32", "u8"};

    return (unsigned)dtype < sizeof(names) / sizeof(names[0]) ? names[dtype] : "unknown";
}

const char *dsa_layout_name(enum dsa_layout layout)
{
    static const char *const names[] = {"none",     "scaled_512_64", "scaled_512_0", "scaled_256_0",
                                        "bf16_576", "bf16_512",      "bf16_256",     "raw_512_64"};

    return (unsigned)layout < sizeof(names) / sizeof(names[0]) ? names[layout] : "unknown";
}

/* Bytes of the dense tensor; false when the product does not fit 63 bits. */
static bool dense_bytes(const struct dsa_tensor *tensor, uint64_t *bytes_p)
{
    uint64_t bytes = dsa_dtype_bytes(tensor->dtype);

    for (uint32_t i = 0; i < tensor->rank; i++) {
        if (__builtin_mul_overflow(bytes, tensor->shape[i], &bytes) || bytes > INT64_MAX)
            return false;
    }
    *bytes_p = bytes;
    return true;
}

dsa_status dsa__wire_tensor(struct wire_tensor *wire, const struct dsa_tensor *tensor, const char *field,
                            struct dsa_error *err)
{
    uint64_t bytes;
    bool is_strided = false;

    if (tensor->rank < 1 || tensor->rank > DSA_MAX_RANK || dsa_dtype_bytes(tensor->dtype) == 0)
        return dsa__fail(err, DSA_E_BAD_SHAPE, field, "dtype %d or rank %u is not a tensor's",
                         (int)tensor->dtype, tensor->rank);
    if (!tensor->data == !tensor->memory)
        return dsa__fail(err, DSA_E_BAD_SHAPE, field, "needs either data or memory");
    if (!dense_bytes(tensor, &bytes))
        return dsa__fail(err, DSA_E_BAD_SHAPE, field, "the shape's product overflows");
    for (uint32_t i = 0; i < tensor->rank; i++) {
        wire->shape[i] = tensor->shape[i];
        wire->strides[i] = tensor->strides_bytes[i];
        is_strided = is_strided || tensor->strides_bytes[i] != 0;
    }
    dsa__v1__tensor__init(&wire->tensor);
    wire->tensor.dtype = (Dsa__V1__DType)tensor->dtype;
    wire->tensor.n_shape = tensor->rank;
    wire->tensor.shape = wire->shape;
    if (is_strided) {
        wire->tensor.n_strides_bytes = tensor->rank;
        wire->tensor.strides_bytes = wire->strides;
    }
    if (tensor->data) {
        wire->tensor.data_case = DSA__V1__TENSOR__DATA_INLINE;
        wire->tensor.inline_.len = bytes;
        wire->tensor.inline_.data = (uint8_t *)(uintptr_t)tensor->data; /* packing only reads it */
    } else {
        dsa__v1__region_slice__init(&wire->slice);
        wire->slice.region_id.len = sizeof(tensor->memory->id);
        wire->slice.region_id.data = (uint8_t *)(uintptr_t)tensor->memory->id;
        wire->slice.offset = tensor->offset;
        wire->tensor.data_case = DSA__V1__TENSOR__DATA_REGION;
        wire->tensor.region = &wire->slice;
    }
    return DSA_OK;
}

dsa_status dsa__wire_append(struct wire_append *wire, const struct dsa_append *append, const char *field,
                            struct dsa_error *err)
{
    dsa_status status = dsa__wire_tensor(&wire->rows, &append->rows, field, err);

    if (status != DSA_OK)
        return status;
    dsa__v1__append_op__init(&wire->op);
    wire->op.sequence_id = append->sequence;
    wire->op.layer = append->layer;
    wire->op.n_layers = append->n_layers;
    wire->op.rows = &wire->rows.tensor;
    wire->op.rule = (Dsa__V1__WriteRule)append->rule;
    wire->op.strict = append->strict;
    if (append->has_position) {
        wire->op.position_value_case = DSA__V1__APPEND_OP__POSITION_VALUE_POSITION;
        wire->op.position = append->position;
    }
    return DSA_OK;
}
