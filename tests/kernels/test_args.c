/* Every argument rule of dsk.h: each wrong value is refused, the field is named, and no output byte
 * changes. */
#include "kit.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* A valid call of every operation over one small pool; each case below spoils one thing of it. */
struct calls {
    struct dsk_append_args append;
    struct dsk_read_args read;
    struct dsk_gather_args gather;
    struct dsk_map_args map;
    struct dsk_attend_seg seg;
    struct dsk_attend_args attend;
    struct dsk_merge_args merge;
    struct dsk_copy_rows_args copy;
    struct dsk_attend_shape shape;
    int32_t slots[2];
    uint8_t *mem; /* everything lies in here, so that one hash sees any write */
};

enum { pool_at = 0, q_at = 65536, out_at = 131072, list_at = 200000, more_at = 204096, mem_bytes = 262144 };

static void calls_init(struct calls *c, uint8_t *mem)
{
    uint64_t base = kit_addr(mem);
    struct dsk_kv_view kv = {
        .base = base + pool_at, .page_pitch_bytes = 64 * 656, .n_slots = 64, .layout = 1};

    memset(c, 0, sizeof(*c));
    c->mem = mem;
    c->slots[1] = 1;
    c->append = (struct dsk_append_args){.kv = kv,
                                         .rows = base + q_at,
                                         .row_bytes = 1152,
                                         .slots = c->slots,
                                         .n_rows = 2,
                                         .rule = DSK_RULE_POW2};
    c->read = (struct dsk_read_args){.kv = kv,
                                     .list = base + list_at,
                                     .out = base + out_at,
                                     .n_rows = 2,
                                     .n_list = 2,
                                     .mode = DSK_READ_SELECTED};
    c->gather = (struct dsk_gather_args){.kv = kv,
                                         .indices = base + list_at,
                                         .new_indices = base + more_at,
                                         .workspace = base + out_at,
                                         .workspace_bytes = 4 * 1152,
                                         .indices_row_bytes = 8,
                                         .n_rows = 2,
                                         .topk = 2};
    c->map = (struct dsk_map_args){.logical = base + list_at,
                                   .physical = base + more_at,
                                   .tables = base + q_at,
                                   .seq_lens = base + q_at + 256,
                                   .logical_row_bytes = 8,
                                   .physical_row_bytes = 8,
                                   .table_row_bytes = 4,
                                   .n_pages = 1,
                                   .n_rows = 2,
                                   .topk = 2,
                                   .n_table = 1};
    c->seg = (struct dsk_attend_seg){.q = base + q_at,
                                     .out = base + out_at,
                                     .lse = base + more_at,
                                     .indices = base + list_at,
                                     .q_row_bytes = 2 * 1152,
                                     .q_head_bytes = 1152,
                                     .out_row_bytes = 2 * 1024,
                                     .out_head_bytes = 1024,
                                     .lse_row_bytes = 8,
                                     .indices_row_bytes = 8,
                                     .n_rows = 2,
                                     .topk = 2,
                                     .space = DSK_SPACE_PHYSICAL,
                                     .softmax_scale = 1};
    c->attend = (struct dsk_attend_args){
        .kv = kv, .segs = &c->seg, .n_segs = 1, .h_q = 2, .out_dtype = DSK_DTYPE_BF16};
    c->merge = (struct dsk_merge_args){.out_parts = base + q_at,
                                       .lse_parts = base + list_at,
                                       .out = base + out_at,
                                       .lse = base + more_at,
                                       .n_parts = 2,
                                       .n_rows = 2,
                                       .h_q = 2,
                                       .d_v = 16,
                                       .part_dtype = DSK_DTYPE_F32,
                                       .out_dtype = DSK_DTYPE_BF16};
    c->copy = (struct dsk_copy_rows_args){.kv = kv, .src_slot = 0, .dst_slot = 10, .n_rows = 2};
    c->shape = (struct dsk_attend_shape){.layout = 1, .h_q = 8, .topk = 64, .out_dtype = DSK_DTYPE_BF16};
}

enum op { OP_APPEND, OP_READ, OP_GATHER, OP_MAP, OP_ATTEND, OP_MERGE, OP_COPY, OP_SHAPE, N_OPS };

static dsk_status call(struct kit *k, struct calls *c, enum op op)
{
    memset(&k->err, 0, sizeof(k->err));
    switch (op) {
    case OP_APPEND:
        return dsk_append(k->s, &c->append, &k->err);
    case OP_READ:
        return dsk_read(k->s, &c->read, &k->err);
    case OP_GATHER:
        return dsk_gather(k->s, &c->gather, &k->err);
    case OP_MAP:
        return dsk_map(k->s, &c->map, &k->err);
    case OP_ATTEND:
        return dsk_attend(k->s, &c->attend, &k->err);
    case OP_MERGE:
        return dsk_merge(k->s, &c->merge, &k->err);
    case OP_COPY:
        return dsk_copy_rows(k->s, &c->copy, &k->err);
    case OP_SHAPE:
        return dsk_supports(k->dev, &c->shape, &k->err) ? DSK_OK : DSK_E_BAD_ARGUMENT;
    case N_OPS:
        break;
    }
    return DSK_E_INTERNAL;
}

START_TEST(the_calls_that_the_cases_spoil_are_valid)
{
    struct kit k;
    struct calls c;
    uint8_t *mem;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    mem = kit_alloc(&k, mem_bytes);
    memset(mem, 0, mem_bytes);
    for (int op = 0; op < N_OPS; op++) {
        calls_init(&c, mem);
        KIT_EXPECT(call(&k, &c, (enum op)op) == DSK_OK, "operation %d: %s: %s", op, k.err.field, k.err.text);
    }
    kit_close(&k);
}
END_TEST

/* One spoiled member: offset and size in struct calls, and the value. */
struct bad_case {
    enum op op;
    size_t offset;
    size_t size;
    int64_t value;
    const char *field; /* must be in err.field */
};

#define BAD(op, path, value, field)                                                                          \
    {                                                                                                        \
        op, offsetof(struct calls, path), sizeof(((struct calls *)0)->path), value, field                    \
    }

#define BAD_KV(op, args)                                                                                     \
    BAD(op, args.kv.layout, 0, "kv.layout"), BAD(op, args.kv.layout, 8, "kv.layout"),                        \
        BAD(op, args.kv.layout, -1, "kv.layout"), BAD(op, args.kv.base, 0, "kv.base"),                       \
        BAD(op, args.kv.base, 0x1004, "kv.base"), BAD(op, args.kv.base, -8, "kv."),                          \
        BAD(op, args.kv.n_slots, -1, "kv.n_slots"), BAD(op, args.kv.n_slots, INT64_MAX, "kv."),              \
        BAD(op, args.kv.page_pitch_bytes, 64 * 656 - 8, "kv.page_pitch_bytes"),                              \
        BAD(op, args.kv.page_pitch_bytes, 64 * 656 + 4, "kv.page_pitch_bytes"),                              \
        BAD(op, args.kv.page_pitch_bytes, 0, "kv.page_pitch_bytes"),                                         \
        BAD(op, args.kv.page_pitch_bytes, -64 * 656, "kv.page_pitch_bytes")

static const struct bad_case bad_cases[] = {
    BAD_KV(OP_APPEND, append),
    BAD(OP_APPEND, append.n_rows, -1, "n_rows"),
    BAD(OP_APPEND, append.rows, 0, "rows"),
    BAD(OP_APPEND, append.rows, 0x1001, "rows"),
    BAD(OP_APPEND, append.row_bytes, 1150, "row_bytes"),
    BAD(OP_APPEND, append.row_bytes, 1153, "row_bytes"),
    BAD(OP_APPEND, append.row_bytes, -1152, "row_bytes"),
    BAD(OP_APPEND, append.row_bytes, INT64_MAX - 1, "row_bytes"),
    BAD(OP_APPEND, append.slots, 0, "slots"),
    BAD(OP_APPEND, append.rule, 0, "rule"),
    BAD(OP_APPEND, append.rule, 3, "rule"),
    BAD(OP_APPEND, append.flags, 2, "flags"),
    BAD(OP_APPEND, append.n_nonfinite, 0x1002, "n_nonfinite"),

    BAD_KV(OP_READ, read),
    BAD(OP_READ, read.mode, 0, "mode"),
    BAD(OP_READ, read.mode, 4, "mode"),
    BAD(OP_READ, read.list, 0, "list"),
    BAD(OP_READ, read.list, 0x1002, "list"),
    BAD(OP_READ, read.out, 0, "out"),
    BAD(OP_READ, read.out, 0x1001, "out"),
    BAD(OP_READ, read.n_rows, -1, "n_rows"),
    BAD(OP_READ, read.n_rows, 3, "n_rows"),
    BAD(OP_READ, read.n_rows, INT64_MAX, "n_rows"),
    BAD(OP_READ, read.n_list, -1, "n_list"),
    BAD(OP_READ, read.first, -1, "first"),
    BAD(OP_READ, read.first, 1, "first"),

    BAD_KV(OP_GATHER, gather),
    BAD(OP_GATHER, gather.indices, 0, "indices"),
    BAD(OP_GATHER, gather.indices, 0x1002, "indices"),
    BAD(OP_GATHER, gather.new_indices, 0, "new_indices"),
    BAD(OP_GATHER, gather.workspace, 0, "workspace"),
    BAD(OP_GATHER, gather.workspace_bytes, 4 * 1152 - 1, "workspace_bytes"),
    BAD(OP_GATHER, gather.indices_row_bytes, 4, "indices_row_bytes"),
    BAD(OP_GATHER, gather.indices_row_bytes, -8, "indices_row_bytes"),
    BAD(OP_GATHER, gather.indices_row_bytes, 9, "indices_row_bytes"),
    BAD(OP_GATHER, gather.n_rows, -1, "n_rows"),
    BAD(OP_GATHER, gather.topk, 0, "topk"),
    BAD(OP_GATHER, gather.topk, -1, "topk"),
    BAD(OP_GATHER, gather.branch, 3, "branch"),
    BAD(OP_GATHER, gather.branch, -1, "branch"),

    BAD(OP_MAP, map.logical, 0, "logical"),
    BAD(OP_MAP, map.logical, 0x1002, "logical"),
    BAD(OP_MAP, map.physical, 0, "physical"),
    BAD(OP_MAP, map.tables, 0, "tables"),
    BAD(OP_MAP, map.seq_lens, 0, "seq_lens"),
    BAD(OP_MAP, map.n_bad, 0x1001, "n_bad"),
    BAD(OP_MAP, map.logical_row_bytes, 4, "logical_row_bytes"),
    BAD(OP_MAP, map.physical_row_bytes, 4, "physical_row_bytes"),
    BAD(OP_MAP, map.physical_row_bytes, -8, "physical_row_bytes"),
    BAD(OP_MAP, map.table_row_bytes, -4, "table_row_bytes"),
    BAD(OP_MAP, map.table_row_bytes, 2, "table_row_bytes"),
    BAD(OP_MAP, map.n_pages, -1, "n_pages"),
    BAD(OP_MAP, map.n_rows, -1, "n_rows"),
    BAD(OP_MAP, map.topk, 0, "topk"),
    BAD(OP_MAP, map.n_table, -1, "n_table"),

    BAD_KV(OP_ATTEND, attend),
    BAD(OP_ATTEND, attend.segs, 0, "segs"),
    BAD(OP_ATTEND, attend.n_segs, -1, "n_segs"),
    BAD(OP_ATTEND, attend.h_q, 0, "h_q"),
    BAD(OP_ATTEND, attend.h_q, 129, "h_q"),
    BAD(OP_ATTEND, attend.h_q, -1, "h_q"),
    BAD(OP_ATTEND, attend.out_dtype, 0, "out_dtype"),
    BAD(OP_ATTEND, attend.out_dtype, 3, "out_dtype"),
    BAD(OP_ATTEND, attend.flags, 2, "flags"),
    BAD(OP_ATTEND, seg.q, 0, "segs[0].q"),
    BAD(OP_ATTEND, seg.q, 0x1001, "segs[0].q"),
    BAD(OP_ATTEND, seg.out, 0, "segs[0].out"),
    BAD(OP_ATTEND, seg.out, 0x1001, "segs[0].out"),
    BAD(OP_ATTEND, seg.lse, 0x1002, "segs[0].lse"),
    BAD(OP_ATTEND, seg.indices, 0, "segs[0].indices"),
    BAD(OP_ATTEND, seg.indices, 0x1002, "segs[0].indices"),
    BAD(OP_ATTEND, seg.lengths, 0x1002, "segs[0].lengths"),
    BAD(OP_ATTEND, seg.sink, 0x1002, "segs[0].sink"),
    BAD(OP_ATTEND, seg.n_bad, 0x1002, "segs[0].n_bad"),
    BAD(OP_ATTEND, seg.table, 0x1000, "segs[0].table"),
    BAD(OP_ATTEND, seg.q_row_bytes, -2304, "segs[0].q_row_bytes"),
    BAD(OP_ATTEND, seg.q_row_bytes, 2303, "segs[0].q_row_bytes"),
    BAD(OP_ATTEND, seg.q_row_bytes, INT64_MAX - 1, "segs[0].q_row_bytes"),
    BAD(OP_ATTEND, seg.q_head_bytes, 1150, "segs[0].q_head_bytes"),
    BAD(OP_ATTEND, seg.q_head_bytes, -1152, "segs[0].q_head_bytes"),
    BAD(OP_ATTEND, seg.q_head_bytes, 0, "segs[0].q_head_bytes"),
    BAD(OP_ATTEND, seg.out_row_bytes, 2046, "segs[0].out_"),
    BAD(OP_ATTEND, seg.out_row_bytes, 0, "segs[0].out_row_bytes"),
    BAD(OP_ATTEND, seg.out_row_bytes, -2048, "segs[0].out_row_bytes"),
    BAD(OP_ATTEND, seg.out_head_bytes, 1022, "segs[0].out_head_bytes"),
    BAD(OP_ATTEND, seg.out_head_bytes, 1025, "segs[0].out_head_bytes"),
    BAD(OP_ATTEND, seg.out_head_bytes, INT64_MAX - 1, "segs[0].out_"),
    BAD(OP_ATTEND, seg.lse_row_bytes, 4, "segs[0].lse_row_bytes"),
    BAD(OP_ATTEND, seg.lse_row_bytes, -8, "segs[0].lse_row_bytes"),
    BAD(OP_ATTEND, seg.indices_row_bytes, 4, "segs[0].indices_row_bytes"),
    BAD(OP_ATTEND, seg.indices_row_bytes, 10, "segs[0].indices_row_bytes"),
    BAD(OP_ATTEND, seg.n_rows, -1, "segs[0].n_rows"),
    BAD(OP_ATTEND, seg.topk, 0, "segs[0].topk"),
    BAD(OP_ATTEND, seg.topk, -1, "segs[0].topk"),
    BAD(OP_ATTEND, seg.topk, INT32_MAX, "segs[0].indices_row_bytes"),
    BAD(OP_ATTEND, seg.space, 0, "segs[0].space"),
    BAD(OP_ATTEND, seg.space, 3, "segs[0].space"),

    BAD(OP_MERGE, merge.out_parts, 0, "out_parts"),
    BAD(OP_MERGE, merge.out_parts, 0x1002, "out_parts"),
    BAD(OP_MERGE, merge.lse_parts, 0, "lse_parts"),
    BAD(OP_MERGE, merge.out, 0, "out"),
    BAD(OP_MERGE, merge.lse, 0x1002, "lse"),
    BAD(OP_MERGE, merge.n_parts, 0, "n_parts"),
    BAD(OP_MERGE, merge.n_parts, -1, "n_parts"),
    BAD(OP_MERGE, merge.n_rows, -1, "n_rows"),
    BAD(OP_MERGE, merge.h_q, 0, "h_q"),
    BAD(OP_MERGE, merge.h_q, 129, "h_q"),
    BAD(OP_MERGE, merge.d_v, 0, "d_v"),
    BAD(OP_MERGE, merge.d_v, 513, "d_v"),
    BAD(OP_MERGE, merge.part_dtype, 0, "part_dtype"),
    BAD(OP_MERGE, merge.out_dtype, 9, "out_dtype"),

    BAD_KV(OP_COPY, copy),
    BAD(OP_COPY, copy.src_slot, -1, "src_slot"),
    BAD(OP_COPY, copy.src_slot, 63, "src_slot"),
    BAD(OP_COPY, copy.src_slot, INT64_MAX, "src_slot"),
    BAD(OP_COPY, copy.dst_slot, 64, "dst_slot"),
    BAD(OP_COPY, copy.dst_slot, 1, "dst_slot"),
    BAD(OP_COPY, copy.dst_slot, 0, "dst_slot"),
    BAD(OP_COPY, copy.n_rows, -1, "n_rows"),
    BAD(OP_COPY, copy.n_rows, 65, "n_rows"),
    BAD(OP_COPY, copy.n_rows, 11, "dst_slot"),

    BAD(OP_SHAPE, shape.layout, 0, "layout"),
    BAD(OP_SHAPE, shape.layout, 99, "layout"),
    BAD(OP_SHAPE, shape.h_q, 0, "h_q"),
    BAD(OP_SHAPE, shape.h_q, 129, "h_q"),
    BAD(OP_SHAPE, shape.topk, 0, "topk"),
    BAD(OP_SHAPE, shape.out_dtype, 0, "out_dtype"),
};

enum { n_bad_cases = sizeof(bad_cases) / sizeof(bad_cases[0]) };

/* C10, MEM-02: unsupported strides are refused; every refusal names its field and writes nothing. */
START_TEST(a_bad_argument_is_refused_by_name)
{
    struct kit k;
    struct calls c;
    uint8_t *mem;
    uint64_t before;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    mem = kit_alloc(&k, mem_bytes);
    memset(mem, 0, mem_bytes);
    before = kit_hash(mem, mem_bytes);
    for (int i = 0; i < n_bad_cases; i++) {
        const struct bad_case *bad = &bad_cases[i];
        dsk_status status;

        calls_init(&c, mem);
        memcpy((uint8_t *)&c + bad->offset, &bad->value, bad->size);
        status = call(&k, &c, bad->op);
        KIT_EXPECT(status == DSK_E_BAD_ARGUMENT, "case %d (operation %d, %s = %lld): %s", i, bad->op,
                   bad->field, (long long)bad->value, dsk_status_name(status));
        KIT_EXPECT(strstr(k.err.field, bad->field) != NULL, "case %d (operation %d, %s = %lld) names '%s'", i,
                   bad->op, bad->field, (long long)bad->value, k.err.field);
        KIT_EXPECT(k.err.status == status || bad->op == OP_SHAPE, "case %d: err.status", i);
        KIT_EXPECT(k.err.text[0] != '\0' && k.err.value[0] != '\0', "case %d says nothing", i);
        KIT_EXPECT(bad->op == OP_SHAPE || call(&k, &c, bad->op) == status, "case %d", i);
    }
    ck_assert_uint_eq(kit_hash(mem, mem_bytes), before);
    kit_close(&k);
}
END_TEST

START_TEST(the_error_struct_is_optional)
{
    struct kit k;
    struct calls c;
    uint8_t *mem;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    mem = kit_alloc(&k, mem_bytes);
    calls_init(&c, mem);
    c.attend.h_q = 0;
    c.append.rule = 0;
    c.read.mode = 0;
    c.gather.topk = c.map.topk = 0;
    c.merge.n_parts = 0;
    c.copy.n_rows = -1;
    c.shape.h_q = 0;
    ck_assert_int_eq(dsk_attend(k.s, &c.attend, NULL), DSK_E_BAD_ARGUMENT);
    ck_assert_int_eq(dsk_append(k.s, &c.append, NULL), DSK_E_BAD_ARGUMENT);
    ck_assert_int_eq(dsk_read(k.s, &c.read, NULL), DSK_E_BAD_ARGUMENT);
    ck_assert_int_eq(dsk_gather(k.s, &c.gather, NULL), DSK_E_BAD_ARGUMENT);
    ck_assert_int_eq(dsk_map(k.s, &c.map, NULL), DSK_E_BAD_ARGUMENT);
    ck_assert_int_eq(dsk_merge(k.s, &c.merge, NULL), DSK_E_BAD_ARGUMENT);
    ck_assert_int_eq(dsk_copy_rows(k.s, &c.copy, NULL), DSK_E_BAD_ARGUMENT);
    ck_assert(!dsk_supports(k.dev, &c.shape, NULL));
    kit_close(&k);
}
END_TEST

/* DSA-07: the scale is the caller's; NaN and infinities are refused, 0 and negative values are served. The
 * bytes of a raw pool need a scale, too. */
START_TEST(scales_must_be_finite)
{
    static const float values[] = {NAN, INFINITY, -INFINITY};
    struct kit k;
    struct calls c;
    uint8_t *mem;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    mem = kit_alloc(&k, mem_bytes);
    memset(mem, 0, mem_bytes);
    for (int i = 0; i < 3; i++) {
        calls_init(&c, mem);
        c.seg.softmax_scale = values[i];
        ck_assert_int_eq(call(&k, &c, OP_ATTEND), DSK_E_BAD_ARGUMENT);
        ck_assert_str_eq(k.err.field, "segs[0].softmax_scale");
    }
    c.seg.softmax_scale = 0;
    ck_assert_int_eq(call(&k, &c, OP_ATTEND), DSK_OK);
    c.seg.softmax_scale = -1;
    ck_assert_int_eq(call(&k, &c, OP_ATTEND), DSK_OK);
    c.attend.kv.layout = DSK_LAYOUT_RAW_512_64;
    for (int i = 0; i < 5; i++) {
        c.attend.kv.raw_scale = i < 3 ? values[i] : (float)(3 - i); /* ..., 0, -1 */
        ck_assert_int_eq(call(&k, &c, OP_ATTEND), DSK_E_BAD_ARGUMENT);
        ck_assert_str_eq(k.err.field, "kv.raw_scale");
    }
    c.attend.kv.raw_scale = 0.5f;
    ck_assert_int_eq(call(&k, &c, OP_ATTEND), DSK_OK);
    kit_close(&k);
}
END_TEST

/* E9, MEM-02: a q of one width against a pool of another is seen by its strides; the later segment is
 * named. */
START_TEST(the_segment_that_is_wrong_is_named)
{
    struct kit k;
    struct calls c;
    uint8_t *mem;
    struct dsk_attend_seg segs[4];
    uint64_t before;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    mem = kit_alloc(&k, mem_bytes);
    memset(mem, 0, mem_bytes);
    calls_init(&c, mem);
    for (int i = 0; i < 4; i++)
        segs[i] = c.seg;
    segs[3].topk = 0;
    c.attend.segs = segs;
    c.attend.n_segs = 4;
    before = kit_hash(mem, mem_bytes);
    ck_assert_int_eq(call(&k, &c, OP_ATTEND), DSK_E_BAD_ARGUMENT);
    ck_assert_str_eq(k.err.field, "segs[3].topk");
    ck_assert_str_eq(k.err.value, "0");
    ck_assert_uint_eq(kit_hash(mem, mem_bytes), before); /* nothing of segments 0..2 was launched */
    segs[3] = c.seg;
    segs[3].space = DSK_SPACE_LOGICAL;
    segs[3].n_table = 1;
    ck_assert_int_eq(call(&k, &c, OP_ATTEND), DSK_E_BAD_ARGUMENT);
    ck_assert_str_eq(k.err.field, "segs[3].table");
    segs[3].table = c.map.tables;
    segs[3].n_table = -1;
    ck_assert_int_eq(call(&k, &c, OP_ATTEND), DSK_E_BAD_ARGUMENT);
    ck_assert_str_eq(k.err.field, "segs[3].n_table");
    segs[3].n_table = 1;
    segs[3].seq_len = -1;
    ck_assert_int_eq(call(&k, &c, OP_ATTEND), DSK_E_BAD_ARGUMENT);
    ck_assert_str_eq(k.err.field, "segs[3].seq_len");
    kit_close(&k);
}
END_TEST

/* MEM-02: a plane whose pitch is that of another layout is refused. */
START_TEST(a_plane_opened_as_a_wider_layout_is_refused)
{
    struct kit k;
    struct calls c;
    uint8_t *mem;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    mem = kit_alloc(&k, mem_bytes);
    calls_init(&c, mem);
    c.attend.kv.page_pitch_bytes = 64 * 528;
    ck_assert_int_eq(call(&k, &c, OP_ATTEND), DSK_E_BAD_ARGUMENT);
    ck_assert_str_eq(k.err.field, "kv.page_pitch_bytes");
    kit_close(&k);
}
END_TEST

START_TEST(devices_that_are_not_there_are_refused)
{
    static const struct {
        struct dsk_device_config config;
        const char *field;
    } cases[] = {{{.kind = 0}, "kind"},
                 {{.kind = 99}, "kind"},
                 {{.kind = DSK_DEVICE_CPU, .ordinal = 1}, "ordinal"},
                 {{.kind = DSK_DEVICE_CPU, .ordinal = -1}, "ordinal"},
                 {{.kind = DSK_DEVICE_CPU, .n_threads = -1}, "n_threads"},
                 {{.kind = DSK_DEVICE_CPU, .n_threads = INT32_MAX}, "n_threads"},
                 {{.kind = DSK_DEVICE_CPU, .isa = 5}, "isa"},
                 {{.kind = DSK_DEVICE_CPU, .isa = -1}, "isa"},
                 {{.kind = DSK_DEVICE_CUDA, .flags = 8}, "flags"},
                 {{.kind = DSK_DEVICE_CPU, .flags = DSK_DEVICE_FP8}, "flags"},
                 {{.kind = DSK_DEVICE_CUDA, .flags = DSK_DEVICE_FP8}, "flags"}};
    struct dsk_device *const untouched = (struct dsk_device *)(uintptr_t)0x10;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct dsk_device *dev = untouched;
        struct dsk_err err = {0};
        dsk_status status = dsk_device_open(&cases[i].config, &dev, &err);

        KIT_EXPECT(status != DSK_OK, "case %zu was opened", i);
        KIT_EXPECT(strcmp(err.field, cases[i].field) == 0, "case %zu names '%s'", i, err.field);
        ck_assert_ptr_eq(dev, untouched);
    }
    for (int kind = DSK_DEVICE_CUDA; kind <= DSK_DEVICE_HIP; kind++) {
        struct dsk_device_config config = {.kind = kind};
        struct dsk_device *dev = untouched;

        if (dsk_device_open(&config, &dev, NULL) == DSK_OK) /* a machine with that card */
            dsk_device_close(dev);
        else
            ck_assert_ptr_eq(dev, untouched);
    }
}
END_TEST

START_TEST(device_says_what_it_is)
{
    struct kit k;
    const struct dsk_device_info *info;

    KIT_OPEN(&k, _i, 2);
    info = dsk_device_get_info(k.dev);
    ck_assert_int_eq(info->kind, DSK_DEVICE_CPU);
    ck_assert_int_eq(info->n_threads, 2);
    ck_assert_ptr_nonnull(strstr(info->name, kit_isa_name(_i)));
    ck_assert_str_eq(info->arch, kit_isa_name(_i));
    ck_assert_str_eq(info->uuid, "CPU-0");
    ck_assert_uint_gt(info->memory_bytes, 1 << 20);
    kit_close(&k);
}
END_TEST

/* Memory, copies, registration, events: the parts of a device that are not kernels. */
START_TEST(device_memory_and_events_do_what_they_say)
{
    struct kit k;
    uint64_t addr = 0, host_addr = 0;
    uint8_t host[1000], back[1000];
    struct dsk_event *event;
    bool is_done = false;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    ck_assert_int_eq(dsk_mem_alloc(k.dev, 1000, &addr), DSK_OK);
    ck_assert_uint_eq(addr % 256, 0);
    for (int i = 0; i < 1000; i++)
        host[i] = (uint8_t)(i * 7);
    ck_assert_int_eq(dsk_mem_set(k.s, addr, 0x5a, 1000), DSK_OK);
    ck_assert_int_eq(dsk_copy_in(k.s, addr + 1, host, 998), DSK_OK);
    ck_assert_int_eq(dsk_copy_out(k.s, back, addr, 1000), DSK_OK);
    ck_assert_int_eq(dsk_event_create(k.dev, &event), DSK_OK);
    ck_assert_int_eq(dsk_event_record(event, k.s), DSK_OK);
    ck_assert_int_eq(dsk_stream_sync(k.s), DSK_OK);
    ck_assert_int_eq(dsk_event_is_done(event, &is_done), DSK_OK);
    ck_assert(is_done);
    dsk_event_destroy(event);
    ck_assert_uint_eq(back[0], 0x5a);
    ck_assert_uint_eq(back[999], 0x5a);
    ck_assert_mem_eq(back + 1, host, 998);
    dsk_mem_free(k.dev, addr);
    dsk_mem_free(k.dev, 0);
    ck_assert_int_eq(dsk_host_register(k.dev, host, sizeof(host), &host_addr), DSK_OK);
    ck_assert_int_eq(dsk_copy_out(k.s, back, host_addr, 1000), DSK_OK);
    ck_assert_mem_eq(back, host, 1000);
    dsk_host_unregister(k.dev, host);
    addr = 77;
    ck_assert_int_eq(dsk_mem_alloc(k.dev, UINT64_MAX - 100, &addr), DSK_E_NO_MEMORY);
    ck_assert_uint_eq(addr, 77);
    dsk_device_close(NULL);
    kit_close(&k);
}
END_TEST

START_TEST(supports_says_yes_to_every_layout_and_head_count)
{
    struct kit k;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    for (uint32_t id = 1; id < DSK_LAYOUT_COUNT; id++) {
        for (int h_q = 1; h_q <= DSK_MAX_HEADS; h_q++) {
            struct dsk_attend_shape shape = {
                .layout = id, .h_q = h_q, .topk = 2051, .out_dtype = DSK_DTYPE_F32};

            KIT_EXPECT(dsk_supports(k.dev, &shape, &k.err), "layout %u, %d heads: %s", id, h_q, k.err.text);
        }
    }
    kit_close(&k);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("args");
    TCase *tcase = tcase_create("args");

    (void)max;
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, the_calls_that_the_cases_spoil_are_valid);
    tcase_add_test(tcase, a_bad_argument_is_refused_by_name);
    tcase_add_test(tcase, the_error_struct_is_optional);
    tcase_add_test(tcase, scales_must_be_finite);
    tcase_add_test(tcase, the_segment_that_is_wrong_is_named);
    tcase_add_test(tcase, a_plane_opened_as_a_wider_layout_is_refused);
    tcase_add_test(tcase, devices_that_are_not_there_are_refused);
    tcase_add_loop_test(tcase, device_says_what_it_is, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_test(tcase, device_memory_and_events_do_what_they_say);
    tcase_add_test(tcase, supports_says_yes_to_every_layout_and_head_count);
    suite_add_tcase(suite, tcase);
    suites_p[0] = suite;
    return 1;
}
