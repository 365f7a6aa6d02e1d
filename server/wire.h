/* wire.h - protobuf messages in and out: bounded unpacking, tensors, statuses. All functions [L]. */
#ifndef SERVER_WIRE_H
#define SERVER_WIRE_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dsa/v1/dsa.pb-c.h"
#include "server/core/err.h"
#include "server/core/handle.h"

struct rpc_call;

/* ---- unpacking ------------------------------------------------------------------------------ */

/* Memory of one unpacked message: a few blocks, freed together. The budget keeps a small hostile message from becoming a
 * large one in memory. */
struct wire_arena;

/* DSA_E_BAD_REQUEST: not a message of this type, or it would need more than its fair memory. DSA_E_NO_MEMORY. *message_p belongs to
 * *arena_p; free it with wire_arena_free. Every path of the unpacked message may be read without further checks,
 * but strings are any bytes without NUL. */
SRV_MUST_CHECK dsa_status wire_unpack(const ProtobufCMessageDescriptor *type, const uint8_t *bytes, size_t n,
                                      struct wire_arena **arena_p, ProtobufCMessage **message_p,
                                      struct srv_err *err);
struct wire_arena *
wire_arena_create(void); /* an empty one, for requests without a message; NULL: no memory */
void wire_arena_free(struct wire_arena *arena); /* NULL is fine */
/* Keep up to so many blocks (4 KiB each) of freed arenas for the next ones: malloc hands out so large ones slowly, and every
 * message takes one. 0, as at the start, keeps none and frees those that are kept. */
void wire_keep_blocks(unsigned max_blocks);

/* Reads a varint at *at and moves past it. False: it does not end before `end`, or has more than 64 bits. */
bool wire_varint(const uint8_t **at, const uint8_t *end, uint64_t *value_p);

/* The value of a varint field at the top of a packed message that will not be unpacked; 0 if it is not there. */
uint64_t wire_peek(const uint8_t *bytes, size_t n, uint32_t field);

/* Memory that lives as long as the message, zeroed; outside the message's budget. NULL when there is none, or no arena. */
void *wire_arena_get(struct wire_arena *arena, size_t n);

/* ---- tensors ---------------------------------------------------------------------------------- */

#define WIRE_MAX_RANK 4

/* What a field asks of its tensor. An extent of 0 takes any (>= 1) and is reported in the view. */
struct wire_tensor_rule {
    const char *field; /* path for errors */
    Dsa__V1__DType dtype;
    uint32_t rank;
    uint64_t shape[WIRE_MAX_RANK];
};

/* A tensor, resolved: where it is and how to walk it. region is NULL for inline data; otherwise it holds a use. */
struct wire_tensor {
    uint8_t *data;
    uint64_t shape[WIRE_MAX_RANK];
    int64_t strides[WIRE_MAX_RANK]; /* bytes */
    struct srv_region *region;
};

struct wire_regions {
    struct srv_regions *regions;
    uint64_t session;
    uint64_t max_inline_bytes;
};

/* Checks dtype, rank, shape, strides (inner = element size; no zero, negative or overlapping ones), that the bytes
 * lie inside the region or equal the inline size, and takes a use of the region.
 * DSA_E_BAD_SHAPE, DSA_E_BAD_RANGE, DSA_E_NOT_FOUND, DSA_E_ACCESS, DSA_E_TOO_LARGE. */
SRV_MUST_CHECK dsa_status wire_tensor_get(const struct wire_regions *in, const Dsa__V1__Tensor *tensor,
                                          const struct wire_tensor_rule *rule, struct wire_tensor *out_p,
                                          struct srv_err *err);

/* The same for an output that goes to a region: shape is the rule's. */
SRV_MUST_CHECK dsa_status wire_output_get(const struct wire_regions *in, const Dsa__V1__Output *output,
                                          const struct wire_tensor_rule *rule, struct wire_tensor *out_p,
                                          struct srv_err *err);

uint32_t wire_dtype_bytes(Dsa__V1__DType dtype); /* 0 if unknown */

/* A client's string fit for an error or a log: at most n - 1 bytes, anything but printable ASCII as '?'. Returns out. */
const char *wire_text(char *out, size_t n, const char *text);

/* ---- answers ---------------------------------------------------------------------------------- */

/* err as a message; borrows err's strings. */
void wire_status(const struct srv_err *err, Dsa__V1__Status *status_p);

/* Packs and queues a message. False: no memory, or larger than a message may be; nothing was queued. */
SRV_MUST_CHECK bool wire_send(struct rpc_call *call, const ProtobufCMessage *message);

/* Answer a unary call, or fail a call, with its rich details. */
void wire_reply(struct rpc_call *call, const ProtobufCMessage *message);
void wire_fail(struct rpc_call *call, const struct srv_err *err);

#endif /* SERVER_WIRE_H */
