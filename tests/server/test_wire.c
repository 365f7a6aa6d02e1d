/* Messages from clients: unpacking within a budget, tensors, and what goes back. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "google/rpc/status.pb-c.h"
#include "kit.h"
#include "server/status.h"
#include "server/wire.h"

/* ---- unpacking ---------------------------------------------------------------------------------- */

/* A request with something of everything: nested messages, packed numbers, bytes, oneofs. */
static size_t pack_request(uint8_t *out, size_t room)
{
    static uint8_t token[16] = "0123456789abcdef", data[96];
    static uint64_t shape[] = {1, 2, 24}, index_shape[] = {1, 300};
    static int64_t strides[] = {1 << 20, 48, 2};
    Dsa__V1__Segment segment = DSA__V1__SEGMENT__INIT, *segments[] = {&segment};
    Dsa__V1__Tensor q = DSA__V1__TENSOR__INIT, indices = DSA__V1__TENSOR__INIT;
    Dsa__V1__RegionSlice slice = DSA__V1__REGION_SLICE__INIT;
    Dsa__V1__AttendOp attend = DSA__V1__ATTEND_OP__INIT;
    Dsa__V1__AttendRequest request = DSA__V1__ATTEND_REQUEST__INIT;
    size_t n;

    segment.sequence_id = UINT64_C(0x100000002);
    segment.n_rows = 1;
    q.dtype = DSA__V1__DTYPE__DTYPE_BF16;
    q.n_shape = 3;
    q.shape = shape;
    q.n_strides_bytes = 3;
    q.strides_bytes = strides;
    q.data_case = DSA__V1__TENSOR__DATA_INLINE;
    q.inline_.data = data;
    q.inline_.len = sizeof(data);
    indices.dtype = DSA__V1__DTYPE__DTYPE_I32;
    indices.n_shape = 2;
    indices.shape = index_shape;
    indices.data_case = DSA__V1__TENSOR__DATA_REGION;
    indices.region = &slice;
    slice.region_id.data = token;
    slice.region_id.len = 16;
    slice.offset = 4096;
    attend.n_segments = 1;
    attend.segments = segments;
    attend.q = &q;
    attend.indices = &indices;
    attend.softmax_scale_value_case = DSA__V1__ATTEND_OP__SOFTMAX_SCALE_VALUE_SOFTMAX_SCALE;
    attend.softmax_scale = 0.125f;
    attend.phase = (char *)(uintptr_t) "decode";
    request.session.data = token;
    request.session.len = 16;
    request.request_id = 77;
    request.op_case = DSA__V1__ATTEND_REQUEST__OP_ATTEND;
    request.attend = &attend;
    request.priority = -3;
    n = dsa__v1__attend_request__get_packed_size(&request);
    ck_assert_uint_le(n, room);
    return dsa__v1__attend_request__pack(&request, out);
}

static dsa_status unpack(const uint8_t *bytes, size_t n, struct wire_arena **arena_p,
                         Dsa__V1__AttendRequest **request_p)
{
    ProtobufCMessage *message = NULL;
    struct srv_err err = {0};
    dsa_status rc = wire_unpack(&dsa__v1__attend_request__descriptor, bytes, n, arena_p, &message, &err);

    *request_p = (Dsa__V1__AttendRequest *)message;
    KIT_EXPECT(err.code == rc, "status %d, error says %d", rc, err.code);
    return rc;
}

START_TEST(a_request_survives_the_wire)
{
    uint8_t bytes[1024];
    size_t n = pack_request(bytes, sizeof(bytes));
    struct wire_arena *arena;
    Dsa__V1__AttendRequest *request;

    ck_assert_int_eq(unpack(bytes, n, &arena, &request), DSA_OK);
    ck_assert_uint_eq(request->request_id, 77);
    ck_assert_int_eq(request->priority, -3);
    ck_assert_int_eq(request->op_case, DSA__V1__ATTEND_REQUEST__OP_ATTEND);
    ck_assert_uint_eq(request->attend->segments[0]->sequence_id, UINT64_C(0x100000002));
    ck_assert_uint_eq(request->attend->q->inline_.len, 96);
    ck_assert_int_eq(request->attend->q->strides_bytes[1], 48);
    ck_assert_uint_eq(request->attend->indices->region->offset, 4096);
    wire_arena_free(arena);
}
END_TEST

/* Cut anywhere, a message is refused or means something; its memory is never read past its end. */
START_TEST(truncated_at_every_byte)
{
    uint8_t whole[1024];
    size_t n = pack_request(whole, sizeof(whole));
    unsigned n_refused = 0;

    for (size_t cut = 0; cut < n; cut++) {
        uint8_t *bytes = malloc(cut > 0 ? cut : 1); /* of its own, so that a sanitizer sees its end */
        struct wire_arena *arena = NULL;
        Dsa__V1__AttendRequest *request;
        dsa_status rc;

        ck_assert_ptr_nonnull(bytes);
        memcpy(bytes, whole, cut);
        rc = unpack(bytes, cut, &arena, &request);
        KIT_EXPECT(rc == DSA_OK || rc == DSA_E_BAD_REQUEST, "cut at %zu: %d", cut, rc);
        n_refused += rc != DSA_OK;
        if (rc == DSA_OK)
            wire_arena_free(arena);
        free(bytes);
    }
    ck_assert_uint_gt(n_refused, n / 2);
}
END_TEST

START_TEST(damaged_in_every_byte)
{
    uint8_t whole[1024], bytes[1024];
    size_t n = pack_request(whole, sizeof(whole));

    for (size_t at = 0; at < n; at++) {
        for (unsigned flip = 1; flip < 256; flip <<= 1) {
            struct wire_arena *arena = NULL;
            Dsa__V1__AttendRequest *request;

            memcpy(bytes, whole, n);
            bytes[at] ^= (uint8_t)flip;
            if (unpack(bytes, n, &arena, &request) == DSA_OK)
                wire_arena_free(arena);
        }
    }
}
END_TEST

/* An AttendRequest whose attend holds n times the same few bytes. */
static uint8_t *repeat_in_attend(const uint8_t *part, size_t n_part, size_t n, size_t *n_bytes_p)
{
    size_t n_inner = n_part * n, at = 0;
    uint8_t *bytes = malloc(n_inner + 16);

    ck_assert_ptr_nonnull(bytes);
    bytes[at++] = 3 << 3 | 2; /* AttendRequest.attend */
    for (size_t rest = n_inner;; rest >>= 7) {
        bytes[at++] = (uint8_t)((rest & 0x7f) | (rest > 0x7f ? 0x80 : 0));
        if (rest <= 0x7f)
            break;
    }
    for (size_t i = 0; i < n; i++, at += n_part)
        memcpy(bytes + at, part, n_part);
    *n_bytes_p = at;
    return bytes;
}

static const struct {
    const char *what;
    uint8_t part[8];
    size_t n_part;
} floods[] = {
    {"empty segments", {2 << 3 | 2, 0}, 2},
    {"empty tensors", {3 << 3 | 2, 0}, 2},
    {"unknown numbers", {0xf8, 0x01, 1}, 3},
    {"unknown strings", {0xfa, 0x01, 0}, 3},
    {"tensors of an empty region", {3 << 3 | 2, 2, 5 << 3 | 2, 0}, 4},
};

/* A small message must not become a large one in memory. */
START_TEST(amplification_is_bounded)
{
    size_t n, n_taken;
    uint8_t *bytes = repeat_in_attend(floods[_i].part, floods[_i].n_part, 200000, &n);
    struct wire_arena *arena = NULL;
    Dsa__V1__AttendRequest *request;
    long n_live;
    dsa_status rc;

    kit_alloc_begin(0);
    rc = unpack(bytes, n, &arena, &request);
    if (rc == DSA_OK)
        wire_arena_free(arena);
    n_taken = kit_alloc_bytes();
    kit_alloc_end(&n_live);
    ck_assert_msg(n_taken <= 20 * n + 200000, "%s: %zu bytes took %zu", floods[_i].what, n, n_taken);
    ck_assert_int_eq(n_live, 0);
    if (_i == 0)
        ck_assert_int_eq(rc, DSA_E_BAD_REQUEST);
    free(bytes);
}
END_TEST

START_TEST(a_fair_message_fits_its_budget)
{
    static const uint8_t segment[] = {2 << 3 | 2, 4, 1 << 3, 1, 2 << 3, 1};
    size_t n;
    uint8_t *bytes = repeat_in_attend(segment, sizeof(segment), 4096, &n);
    struct wire_arena *arena;
    Dsa__V1__AttendRequest *request;

    ck_assert_int_eq(unpack(bytes, n, &arena, &request), DSA_OK);
    ck_assert_uint_eq(request->attend->n_segments, 4096);
    wire_arena_free(arena);
    free(bytes);
}
END_TEST

/* Nesting is bounded by the type; unknown groups and endless varints are not swallowed. */
START_TEST(hostile_encodings_are_refused)
{
    static const struct {
        uint8_t bytes[24];
        size_t n;
    } rows[] = {
        {{3 << 3 | 2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}, 10}, /* length past the end */
        {{3 << 3 | 2, 0xff, 0xff, 0xff, 0xff, 0x0f}, 6},                          /* 4 GiB */
        {{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, 12}, /* tag without end */
        {{2 << 3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1},
         14},                                /* number without end */
        {{0, 0}, 2},                         /* field 0 */
        {{9 << 3 | 3, 9 << 3 | 4}, 2},       /* a group */
        {{3 << 3 | 6, 1}, 2},                /* wire type 6 */
        {{1 << 3 | 2}, 1},                   /* no length */
        {{3 << 3 | 2, 2, 2 << 3 | 2, 5}, 4}, /* inner length past the outer */
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct wire_arena *arena = NULL;
        Dsa__V1__AttendRequest *request;

        ck_assert_msg(unpack(rows[i].bytes, rows[i].n, &arena, &request) == DSA_E_BAD_REQUEST, "row %zu", i);
    }
}
END_TEST

START_TEST(each_failing_allocation_is_an_answer)
{
    uint8_t bytes[1024];
    size_t n = pack_request(bytes, sizeof(bytes));
    struct wire_arena *arena;
    Dsa__V1__AttendRequest *request;
    long n_allocs, n_live;

    kit_alloc_begin(0);
    KIT_EXPECT(unpack(bytes, n, &arena, &request) == DSA_OK, "the request is refused");
    wire_arena_free(arena);
    n_allocs = kit_alloc_end(&n_live);
    ck_assert_int_eq(n_live, 0);
    ck_assert_int_ge(n_allocs, 2);
    for (long i = 1; i <= n_allocs; i++) {
        struct srv_err err = {0};
        ProtobufCMessage *message;
        dsa_status rc;

        kit_alloc_begin(i);
        rc = wire_unpack(&dsa__v1__attend_request__descriptor, bytes, n, &arena, &message, &err);
        kit_alloc_end(&n_live);
        ck_assert_int_eq(rc, DSA_E_NO_MEMORY);
        ck_assert_int_eq(err.code, rc);
        ck_assert_int_eq(n_live, 0);
    }
}
END_TEST

START_TEST(arena_memory_is_zeroed_and_freed_together)
{
    struct wire_arena *arena = wire_arena_create();
    long n_live;

    wire_arena_free(arena);
    kit_alloc_begin(0);
    arena = wire_arena_create();
    for (size_t size = 0; size < 20000; size += 977) {
        uint8_t *at = wire_arena_get(arena, size);

        KIT_EXPECT(at != NULL && (uintptr_t)at % _Alignof(max_align_t) == 0, "%zu bytes at %p", size,
                   (void *)at);
        for (size_t i = 0; i < size; i++)
            KIT_EXPECT(at[i] == 0, "byte %zu of %zu", i, size);
        memset(at, 0xff, size);
    }
    wire_arena_free(arena);
    wire_arena_free(NULL);
    kit_alloc_end(&n_live);
    ck_assert_int_eq(n_live, 0);
    ck_assert_ptr_null(wire_arena_get(NULL, 8));
}
END_TEST

/* ---- tensors ------------------------------------------------------------------------------------ */

#define REGION_BYTES 4096

static struct srv_regions *regions;
static uint8_t memory[REGION_BYTES];
static uint8_t id_rw[16] = "region read-writ", id_ro[16] = "region read-only";
static struct wire_regions in;

static void open_regions(void)
{
    struct srv_region desc = {.session = 5, .base = memory, .size = REGION_BYTES, .writable = true};
    struct srv_region *region;
    struct srv_err err = {0};

    ck_assert_int_eq(srv_regions_create(8, 1 << 20, NULL, NULL, &regions), DSA_OK);
    memcpy(desc.id, id_rw, 16);
    KIT_OK(srv_region_add(regions, &desc, &region, &err), &err);
    memcpy(desc.id, id_ro, 16);
    desc.writable = false;
    KIT_OK(srv_region_add(regions, &desc, &region, &err), &err);
    in = (struct wire_regions){regions, 5, 1024};
}

static void close_regions(void)
{
    srv_regions_destroy(regions); /* asserts that every use was given back */
}

/* One tensor as a client may send it, and what is asked for: f32 [n, 4, 8] unless the row says otherwise. */
struct tensor_row {
    const char *what;
    dsa_status rc;
    const char *field; /* of the error */
    uint32_t dtype;
    uint32_t rank;
    uint64_t shape[6];
    uint32_t n_strides;
    int64_t strides[6];
    uint64_t offset;
    int64_t n_inline; /* -1: in a region; -2: nowhere */
};

#define F32    DSA__V1__DTYPE__DTYPE_F32
#define REGION (-1)
#define NONE   (-2)
#define MAX64  UINT64_MAX
#define MAXI   INT64_MAX

/* clang-format off: one row a line */
static const struct tensor_row tensor_rows[] = {
    {"dense in a region", DSA_OK, "", F32, 3, {2, 4, 8}, 0, {0}, 0, REGION},
    {"dense, strides given", DSA_OK, "", F32, 3, {2, 4, 8}, 3, {128, 32, 4}, 0, REGION},
    {"ends where the region ends", DSA_OK, "", F32, 3, {2, 4, 8}, 0, {0}, REGION_BYTES - 256, REGION},
    {"one element past it",
     DSA_E_BAD_RANGE,
     "t.region",
     F32,
     3,
     {2, 4, 8},
     0,
     {0},
     REGION_BYTES - 252,
     REGION},
    {"starts past it", DSA_E_BAD_RANGE, "t.region", F32, 3, {1, 4, 8}, 0, {0}, REGION_BYTES + 4, REGION},
    {"offset that wraps", DSA_E_BAD_RANGE, "t.region", F32, 3, {1, 4, 8}, 0, {0}, MAX64 - 3, REGION},
    {"padded rows", DSA_OK, "", F32, 3, {2, 4, 8}, 3, {2048, 256, 4}, 0, REGION},
    {"padded rows past the end",
     DSA_E_BAD_RANGE,
     "t.region",
     F32,
     3,
     {3, 4, 8},
     3,
     {2048, 256, 4},
     0,
     REGION},
    {"transposed outer axes", DSA_OK, "", F32, 3, {2, 4, 8}, 3, {32, 64, 4}, 0, REGION},
    {"misaligned offset", DSA_E_BAD_RANGE, "t.region.offset", F32, 3, {1, 4, 8}, 0, {0}, 2, REGION},
    {"wrong dtype", DSA_E_BAD_SHAPE, "t.dtype", DSA__V1__DTYPE__DTYPE_BF16, 3, {1, 4, 8}, 0, {0}, 0, REGION},
    {"no dtype", DSA_E_BAD_SHAPE, "t.dtype", 0, 3, {1, 4, 8}, 0, {0}, 0, REGION},
    {"unknown dtype", DSA_E_BAD_SHAPE, "t.dtype", 77, 3, {1, 4, 8}, 0, {0}, 0, REGION},
    {"rank 0", DSA_E_BAD_SHAPE, "t.shape", F32, 0, {0}, 0, {0}, 0, REGION},
    {"rank 2", DSA_E_BAD_SHAPE, "t.shape", F32, 2, {4, 8}, 0, {0}, 0, REGION},
    {"rank 6", DSA_E_BAD_SHAPE, "t.shape", F32, 6, {1, 1, 1, 1, 4, 8}, 0, {0}, 0, REGION},
    {"zero extent", DSA_E_BAD_SHAPE, "t.shape[0]", F32, 3, {0, 4, 8}, 0, {0}, 0, REGION},
    {"zero inner extent", DSA_E_BAD_SHAPE, "t.shape[2]", F32, 3, {1, 4, 0}, 0, {0}, 0, REGION},
    {"wrong extent", DSA_E_BAD_SHAPE, "t.shape[1]", F32, 3, {1, 5, 8}, 0, {0}, 0, REGION},
    {"product that wraps", DSA_E_BAD_SHAPE, "t.shape[0]", F32, 3, {MAX64 / 128 + 2, 4, 8}, 0, {0}, 0, REGION},
    {"product beyond 63 bits",
     DSA_E_BAD_SHAPE,
     "t.shape[0]",
     F32,
     3,
     {UINT64_C(1) << 56, 4, 8},
     0,
     {0},
     0,
     REGION},
    {"largest extent", DSA_E_BAD_SHAPE, "t.shape[0]", F32, 3, {MAX64, 4, 8}, 0, {0}, 0, REGION},
    {"stride that wraps", DSA_E_BAD_SHAPE, "t.shape[0]", F32, 3, {5, 4, 8}, 3, {MAXI - 3, 32, 4}, 0, REGION},
    {"inner stride that wraps",
     DSA_E_BAD_SHAPE,
     "t.shape[1]",
     F32,
     3,
     {1, 4, 8},
     3,
     {128, MAXI - 3, 4},
     0,
     REGION},
    {"huge stride of one row", DSA_OK, "", F32, 3, {1, 4, 8}, 3, {MAXI - 3, 32, 4}, 0, REGION},
    {"zero stride", DSA_E_BAD_SHAPE, "t.strides_bytes[0]", F32, 3, {2, 4, 8}, 3, {0, 32, 4}, 0, REGION},
    {"zero stride of one row",
     DSA_E_BAD_SHAPE,
     "t.strides_bytes[0]",
     F32,
     3,
     {1, 4, 8},
     3,
     {0, 32, 4},
     0,
     REGION},
    {"negative stride",
     DSA_E_BAD_SHAPE,
     "t.strides_bytes[1]",
     F32,
     3,
     {2, 4, 8},
     3,
     {128, -32, 4},
     0,
     REGION},
    {"smallest stride",
     DSA_E_BAD_SHAPE,
     "t.strides_bytes[0]",
     F32,
     3,
     {2, 4, 8},
     3,
     {INT64_MIN, 32, 4},
     0,
     REGION},
    {"stride off the element",
     DSA_E_BAD_SHAPE,
     "t.strides_bytes[0]",
     F32,
     3,
     {2, 4, 8},
     3,
     {130, 32, 4},
     0,
     REGION},
    {"inner stride not dense",
     DSA_E_BAD_SHAPE,
     "t.strides_bytes[2]",
     F32,
     3,
     {2, 4, 8},
     3,
     {256, 64, 8},
     0,
     REGION},
    {"inner two not dense", DSA_OK, "", F32, 3, {1, 4, 8}, 3, {256, 64, 4}, 0, REGION},
    {"rows overlap", DSA_E_BAD_SHAPE, "t.strides_bytes[0]", F32, 3, {2, 4, 8}, 3, {124, 32, 4}, 0, REGION},
    {"heads overlap", DSA_E_BAD_SHAPE, "t.strides_bytes[1]", F32, 3, {1, 4, 8}, 3, {256, 28, 4}, 0, REGION},
    {"equal strides", DSA_E_BAD_SHAPE, "t.strides_bytes[1]", F32, 3, {2, 4, 8}, 3, {32, 32, 4}, 0, REGION},
    {"too few strides", DSA_E_BAD_SHAPE, "t.strides_bytes", F32, 3, {2, 4, 8}, 2, {32, 4}, 0, REGION},
    {"too many strides",
     DSA_E_BAD_SHAPE,
     "t.strides_bytes",
     F32,
     3,
     {2, 4, 8},
     4,
     {512, 128, 32, 4},
     0,
     REGION},
    {"inline", DSA_OK, "", F32, 3, {2, 4, 8}, 0, {0}, 0, 256},
    {"inline, as large as may be", DSA_OK, "", F32, 3, {8, 4, 8}, 0, {0}, 0, 1024},
    {"inline too large", DSA_E_TOO_LARGE, "t.inline", F32, 3, {9, 4, 8}, 0, {0}, 0, 1152},
    {"inline too short", DSA_E_BAD_SHAPE, "t.inline", F32, 3, {2, 4, 8}, 0, {0}, 0, 255},
    {"inline too long", DSA_E_BAD_SHAPE, "t.inline", F32, 3, {2, 4, 8}, 0, {0}, 0, 257},
    {"inline and empty", DSA_E_BAD_SHAPE, "t.inline", F32, 3, {2, 4, 8}, 0, {0}, 0, 0},
    {"inline with strides", DSA_E_BAD_SHAPE, "t.strides_bytes", F32, 3, {2, 4, 8}, 3, {128, 32, 4}, 0, 256},
    {"no data", DSA_E_BAD_REQUEST, "t.data", F32, 3, {2, 4, 8}, 0, {0}, 0, NONE},
};
/* clang-format on */

static const struct wire_tensor_rule f32_rule = {"t", F32, 3, {0, 4, 8}};

#define N_TENSOR_ROWS ((int)(sizeof(tensor_rows) / sizeof(tensor_rows[0])))

START_TEST(tensor_is_checked)
{
    const struct tensor_row *row = &tensor_rows[_i];
    static uint8_t inline_bytes[2048];
    Dsa__V1__Tensor tensor = DSA__V1__TENSOR__INIT;
    Dsa__V1__RegionSlice slice = DSA__V1__REGION_SLICE__INIT;
    struct wire_tensor_rule rule = f32_rule;
    struct wire_tensor out = {.data = memory + 1};
    struct srv_err err = {0};
    dsa_status rc;

    tensor.dtype = (Dsa__V1__DType)row->dtype;
    tensor.n_shape = row->rank;
    tensor.shape = (uint64_t *)(uintptr_t)row->shape;
    tensor.n_strides_bytes = row->n_strides;
    tensor.strides_bytes = (int64_t *)(uintptr_t)row->strides;
    slice.region_id.data = id_ro;
    slice.region_id.len = 16;
    slice.offset = row->offset;
    if (row->n_inline == REGION) {
        tensor.data_case = DSA__V1__TENSOR__DATA_REGION;
        tensor.region = &slice;
    } else if (row->n_inline != NONE) {
        tensor.data_case = DSA__V1__TENSOR__DATA_INLINE;
        tensor.inline_.data = inline_bytes;
        tensor.inline_.len = (size_t)row->n_inline;
    }
    rc = wire_tensor_get(&in, &tensor, &rule, &out, &err);
    ck_assert_msg(rc == row->rc, "%s: %d, %s: %s", row->what, rc, err.field, err.text);
    if (rc != DSA_OK) {
        ck_assert_msg(strcmp(err.field, row->field) == 0, "%s: field %s", row->what, err.field);
        ck_assert_ptr_eq(out.data, memory + 1); /* written on success only */
        return;
    }
    ck_assert_ptr_eq(out.data, row->n_inline == REGION ? memory + row->offset : inline_bytes);
    ck_assert_ptr_eq(out.region == NULL ? NULL : out.region->base, row->n_inline == REGION ? memory : NULL);
    for (uint32_t i = 0; i < 3; i++)
        ck_assert_uint_eq(out.shape[i], row->shape[i]);
    if (out.region) {
        ck_assert_uint_eq(out.region->n_users, 1);
        srv_region_put(regions, out.region);
    }
}
END_TEST

START_TEST(absent_tensor_is_named)
{
    struct wire_tensor out;
    struct srv_err err = {0};

    ck_assert_int_eq(wire_tensor_get(&in, NULL, &f32_rule, &out, &err), DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.field, "t");
}
END_TEST

START_TEST(region_must_be_the_sessions_own)
{
    static const struct {
        const char *what;
        uint64_t session;
        uint8_t id[16];
        size_t n_id;
    } rows[] = {
        {"another session", 6, "region read-only", 16},
        {"unknown id", 5, "region read-onlx", 16},
        {"short id", 5, "region read-only", 15},
        {"empty id", 5, "", 0},
    };
    uint64_t shape[] = {1, 4, 8};
    Dsa__V1__Tensor tensor = DSA__V1__TENSOR__INIT;
    Dsa__V1__RegionSlice slice = DSA__V1__REGION_SLICE__INIT;

    tensor.dtype = F32;
    tensor.n_shape = 3;
    tensor.shape = shape;
    tensor.data_case = DSA__V1__TENSOR__DATA_REGION;
    tensor.region = &slice;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct wire_tensor out;
        struct srv_err err = {0};

        in.session = rows[i].session;
        slice.region_id.data = (uint8_t *)(uintptr_t)rows[i].id;
        slice.region_id.len = rows[i].n_id;
        ck_assert_msg(wire_tensor_get(&in, &tensor, &f32_rule, &out, &err) == DSA_E_NOT_FOUND, "%s",
                      rows[i].what);
        ck_assert_int_eq(strncmp(err.field, "t.region", 8), 0);
    }
}
END_TEST

START_TEST(outputs_need_a_writable_region)
{
    Dsa__V1__Output output = DSA__V1__OUTPUT__INIT;
    Dsa__V1__RegionSlice slice = DSA__V1__REGION_SLICE__INIT;
    struct wire_tensor_rule rule = {"out", F32, 3, {2, 4, 8}};
    int64_t strides[] = {1024, 32, 4}, overlapping[] = {64, 32, 4};
    struct wire_tensor out;
    struct srv_err err = {0};

    output.region = &slice;
    slice.region_id.data = id_ro;
    slice.region_id.len = 16;
    ck_assert_int_eq(wire_output_get(&in, &output, &rule, &out, &err), DSA_E_ACCESS);
    slice.region_id.data = id_rw;
    KIT_OK(wire_output_get(&in, &output, &rule, &out, &err), &err);
    ck_assert_ptr_eq(out.data, memory);
    ck_assert_int_eq(out.strides[0], 128);
    srv_region_put(regions, out.region);
    output.n_strides_bytes = 3;
    output.strides_bytes = strides;
    slice.offset = 2048;
    KIT_OK(wire_output_get(&in, &output, &rule, &out, &err), &err);
    ck_assert_int_eq(out.strides[0], 1024);
    srv_region_put(regions, out.region);
    slice.offset = 3072;
    ck_assert_int_eq(wire_output_get(&in, &output, &rule, &out, &err), DSA_E_BAD_RANGE);
    slice.offset = 6;
    ck_assert_int_eq(wire_output_get(&in, &output, &rule, &out, &err), DSA_E_BAD_RANGE);
    slice.offset = 0;
    output.strides_bytes = overlapping;
    ck_assert_int_eq(wire_output_get(&in, &output, &rule, &out, &err), DSA_E_BAD_SHAPE);
}
END_TEST

/* Whatever is accepted: no two elements share a byte and none lies outside; counted out element by
 * element. */
static bool is_sound(const struct wire_tensor *t)
{
    static uint8_t touched[REGION_BYTES];

    memset(touched, 0, sizeof(touched));
    for (uint64_t a = 0; a < t->shape[0]; a++)
        for (uint64_t b = 0; b < t->shape[1]; b++)
            for (uint64_t c = 0; c < t->shape[2]; c++) {
                int64_t at = t->data - memory + (int64_t)a * t->strides[0] + (int64_t)b * t->strides[1]
                             + (int64_t)c * t->strides[2];

                for (int64_t byte = at; byte < at + 4; byte++)
                    if (byte < 0 || byte >= REGION_BYTES || touched[byte]++)
                        return false;
            }
    return true;
}

START_TEST(random_strides_never_overlap_or_leave)
{
    unsigned seed = test_seed(), n_accepted = 0, n_refused = 0;

    for (int i = 0; i < KIT_TIMES(60000, 6000); i++) {
        uint64_t shape[3];
        int64_t strides[3];
        Dsa__V1__Tensor tensor = DSA__V1__TENSOR__INIT;
        Dsa__V1__RegionSlice slice = DSA__V1__REGION_SLICE__INIT;
        struct wire_tensor_rule rule = {"t", F32, 3, {0, 0, 0}};
        struct wire_tensor out;
        struct srv_err err;

        for (int axis = 0; axis < 3; axis++) {
            shape[axis] = 1 + (unsigned)rand_r(&seed) % 5;
            strides[axis] = (rand_r(&seed) % 60) * 4 + (rand_r(&seed) % 50 == 0) - 8;
        }
        if (rand_r(&seed) % 8 != 0)
            strides[2] = 4;
        tensor.dtype = F32;
        tensor.n_shape = 3;
        tensor.shape = shape;
        tensor.n_strides_bytes = 3;
        tensor.strides_bytes = strides;
        tensor.data_case = DSA__V1__TENSOR__DATA_REGION;
        tensor.region = &slice;
        slice.region_id.data = id_ro;
        slice.region_id.len = 16;
        slice.offset = (uint64_t)(rand_r(&seed) % 1100) * 4;
        if (wire_tensor_get(&in, &tensor, &rule, &out, &err) != DSA_OK) {
            n_refused++;
            continue;
        }
        n_accepted++;
        KIT_EXPECT(is_sound(&out), "accepted: [%d %d %d] strides %d %d %d at %d", (int)shape[0],
                   (int)shape[1], (int)shape[2], (int)strides[0], (int)strides[1], (int)strides[2],
                   (int)slice.offset);
        srv_region_put(regions, out.region);
    }
    ck_assert_uint_gt(n_accepted, 100);
    ck_assert_uint_gt(n_refused, 100);
}
END_TEST

START_TEST(element_sizes)
{
    ck_assert_uint_eq(wire_dtype_bytes(DSA__V1__DTYPE__DTYPE_BF16), 2);
    ck_assert_uint_eq(wire_dtype_bytes(DSA__V1__DTYPE__DTYPE_F32), 4);
    ck_assert_uint_eq(wire_dtype_bytes(DSA__V1__DTYPE__DTYPE_I32), 4);
    ck_assert_uint_eq(wire_dtype_bytes(DSA__V1__DTYPE__DTYPE_U8), 1);
    ck_assert_uint_eq(wire_dtype_bytes(DSA__V1__DTYPE__DTYPE_UNSPECIFIED), 0);
    ck_assert_uint_eq(wire_dtype_bytes((Dsa__V1__DType)99), 0);
}
END_TEST

/* ---- answers ------------------------------------------------------------------------------------ */

START_TEST(text_from_clients_is_made_harmless)
{
    char out[8];

    ck_assert_str_eq(wire_text(out, sizeof(out), "plain"), "plain");
    ck_assert_str_eq(wire_text(out, sizeof(out), "a\nb\x1b[\x80\xff"), "a?b?[??");
    ck_assert_str_eq(wire_text(out, sizeof(out), "cut after seven"), "cut aft");
    ck_assert_str_eq(wire_text(out, sizeof(out), ""), "");
    ck_assert_str_eq(wire_text(out, 1, "x"), "");
    ck_assert_str_eq(wire_text(out, sizeof(out), "\x7f \x1f~"), "? ?~");
}
END_TEST

#define STATUS_VALUE(name, value, reason, grpc_code, scope, text) name,
START_TEST(each_status_crosses_the_wire)
{
    static const dsa_status all[] = {DSA_STATUS_MAP(STATUS_VALUE)};

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        struct srv_err err = {0};
        Dsa__V1__Status status, *back;
        uint8_t bytes[512];
        size_t n;

        srv_fail(&err, all[i], "attend.q.shape[1]", "%d", 7, "said %d", 42);
        snprintf(err.rule, sizeof(err.rule), "cpu_rule");
        err.retry_after_us = 1000;
        wire_status(&err, &status);
        n = dsa__v1__status__get_packed_size(&status);
        ck_assert_uint_le(n, sizeof(bytes));
        dsa__v1__status__pack(&status, bytes);
        back = dsa__v1__status__unpack(NULL, n, bytes);
        ck_assert_ptr_nonnull(back);
        ck_assert_int_eq(back->code, srv_status_grpc_code(all[i]));
        ck_assert_str_eq(back->reason, srv_status_reason(all[i]));
        ck_assert_int_eq((int)back->scope, srv_status_scope(all[i]));
        ck_assert_str_eq(back->field, "attend.q.shape[1]");
        ck_assert_str_eq(back->value, "7");
        ck_assert_str_eq(back->message, "said 42");
        ck_assert_str_eq(back->rule, "cpu_rule");
        ck_assert_uint_eq(back->retry_after_us, 1000);
        dsa__v1__status__free_unpacked(back, NULL);
    }
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *unpacking = tcase_create("unpacking"), *tensors = tcase_create("tensors"),
          *answers = tcase_create("answers");

    (void)max;
    tcase_set_timeout(unpacking, 30);
    tcase_add_test(unpacking, a_request_survives_the_wire);
    tcase_add_test(unpacking, truncated_at_every_byte);
    tcase_add_test(unpacking, damaged_in_every_byte);
    tcase_add_loop_test(unpacking, amplification_is_bounded, 0, (int)(sizeof(floods) / sizeof(floods[0])));
    tcase_add_test(unpacking, a_fair_message_fits_its_budget);
    tcase_add_test(unpacking, hostile_encodings_are_refused);
    tcase_add_test(unpacking, each_failing_allocation_is_an_answer);
    tcase_add_test(unpacking, arena_memory_is_zeroed_and_freed_together);
    tcase_add_checked_fixture(tensors, open_regions, close_regions);
    tcase_set_timeout(tensors, 30);
    tcase_add_loop_test(tensors, tensor_is_checked, 0, N_TENSOR_ROWS);
    tcase_add_test(tensors, absent_tensor_is_named);
    tcase_add_test(tensors, region_must_be_the_sessions_own);
    tcase_add_test(tensors, outputs_need_a_writable_region);
    tcase_add_test(tensors, random_strides_never_overlap_or_leave);
    tcase_add_test(tensors, element_sizes);
    tcase_add_test(answers, text_from_clients_is_made_harmless);
    tcase_add_test(answers, each_status_crosses_the_wire);
    suites_p[0] = suite_create("wire");
    suite_add_tcase(suites_p[0], unpacking);
    suite_add_tcase(suites_p[0], tensors);
    suite_add_tcase(suites_p[0], answers);
    return 1;
}
