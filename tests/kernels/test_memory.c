/* Memory: strides, pools larger than 32-bit offsets, repeatability, and memory that a client changes. */
#include "kit.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- pools past 2^31 and 2^32 bytes --------------------------------------------------------- */

/* A pool of which only the touched pages exist. */
static void *map_sparse(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return p == MAP_FAILED ? NULL : p;
}

/* First slots whose row lies past 2^31 and 2^32 bytes, the ones before and after, and the rows that a
 * 32-bit offset would hit instead. */
static int far_slots(int row_bytes, int64_t *slots)
{
    int64_t past31 = ((INT64_C(1) << 31) + row_bytes - 1) / row_bytes;
    int64_t past32 = ((INT64_C(1) << 32) + row_bytes - 1) / row_bytes;
    const int64_t wanted[] = {0, 1, past31 - 1, past31, past31 + 1, past32 - 1, past32, past32 + 3};

    memcpy(slots, wanted, sizeof(wanted));
    return 8;
}

static void far_attend(struct kit *k, struct kit_pool *pool, const int64_t *slots, int n)
{
    int h_q = 5;
    int32_t *list = kit_alloc(k, 4 * n);
    struct kit_attend a = {.pool = pool,
                           .n_rows = 1,
                           .topk = n,
                           .h_q = h_q,
                           .q = kit_bf16_normal(k, h_q * pool->layout->d_qk, 0.3),
                           .indices = list,
                           .scale = 0.06f,
                           .out_dtype = DSK_DTYPE_F32};
    int64_t n_pages = (pool->kv.n_slots + 63) / 64;
    int32_t *table;

    for (int i = 0; i < n; i++)
        list[i] = (int32_t)slots[i];
    kit_attend_check(k, &a);
    table = kit_alloc(k, 4 * n_pages); /* the same again through a page table in reverse order */
    for (int64_t i = 0; i < n_pages; i++)
        table[i] = (int32_t)(n_pages - 1 - i);
    for (int i = 0; i < n; i++)
        list[i] = (int32_t)((n_pages - 1 - slots[i] / 64) * 64 + slots[i] % 64);
    a.table = table;
    a.n_table = (int)n_pages;
    a.seq_len = (int)(n_pages * 64);
    kit_attend_check(k, &a);
}

static void far_reads(struct kit *k, const struct kit_pool *pool, const int64_t *slots, int n)
{
    int d_qk = pool->layout->d_qk;
    uint16_t *out = kit_alloc(k, 2 * (int64_t)n * d_qk), values[DSK_MAX_D_QK];
    int32_t list[8], page;
    struct dsk_read_args args = {.kv = pool->kv,
                                 .list = kit_addr(list),
                                 .out = kit_addr(out),
                                 .n_rows = n,
                                 .n_list = n,
                                 .mode = DSK_READ_SELECTED};

    for (int i = 0; i < n; i++)
        list[i] = (int32_t)slots[i];
    ck_assert_int_eq(dsk_read(k->s, &args, &k->err), DSK_OK);
    for (int i = 0; i < n; i++) {
        ref64_dequant_row_bf16(pool->layout, pool->kv.raw_scale, kit_pool_row(pool, slots[i]), values);
        KIT_EXPECT(memcmp(values, out + i * d_qk, 2 * (size_t)d_qk) == 0, "selected %lld",
                   (long long)slots[i]);
    }
    args.mode = DSK_READ_PAGED;
    args.list = kit_addr(&page);
    args.n_rows = args.n_list = 1;
    for (int i = 0; i < n; i++) {
        page = (int32_t)(slots[i] / 64);
        args.first = slots[i] % 64;
        ck_assert_int_eq(dsk_read(k->s, &args, &k->err), DSK_OK);
        ref64_dequant_row_bf16(pool->layout, pool->kv.raw_scale, kit_pool_row(pool, slots[i]), values);
        KIT_EXPECT(memcmp(values, out, 2 * (size_t)d_qk) == 0, "paged %lld", (long long)slots[i]);
    }
}

/* MEM-01, E5: append, the readers, map, copy and attend on rows past 2^31 and 2^32 bytes. */
START_TEST(rows_past_two_and_four_gigabytes_are_the_right_ones)
{
    struct kit k;

    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        const struct ref64_layout *layout = ref64_layout_at(l);
        int64_t slots[8], n_slots;
        int n = far_slots(layout->row_bytes, slots);
        int32_t list[8];
        struct kit_pool pool = {.layout = layout};
        uint64_t bytes;
        uint16_t *values;
        uint8_t row[1152];

        n_slots = slots[n - 1] + 62;
        bytes = (uint64_t)n_slots * (uint64_t)layout->row_bytes;
        pool.bytes = map_sparse(bytes);
        if (!pool.bytes)
            TEST_SKIP("no %llu bytes of address space", (unsigned long long)bytes);
        KIT_OPEN(&k, _i, 2);
        pool.kv = (struct dsk_kv_view){.base = kit_addr(pool.bytes),
                                       .page_pitch_bytes = 64 * (int64_t)layout->row_bytes,
                                       .n_slots = n_slots,
                                       .layout = layout->id,
                                       .raw_scale = 0.03f};
        values = kit_bf16_normal(&k, n * layout->d_qk, 1);
        for (int i = 0; i < n; i++)
            list[i] = (int32_t)slots[i];
        {
            struct dsk_append_args args = {.kv = pool.kv,
                                           .rows = kit_addr(values),
                                           .row_bytes = 2 * layout->d_qk,
                                           .slots = list,
                                           .n_rows = n,
                                           .rule = DSK_RULE_POW2};

            ck_assert_int_eq(dsk_append(k.s, &args, &k.err), DSK_OK);
        }
        for (int i = 0; i < n; i++) {
            ref64_quantise_row(layout, REF64_RULE_POW2, 0.03f, values + i * layout->d_qk, row);
            KIT_EXPECT(memcmp(row, kit_pool_row(&pool, slots[i]), (size_t)layout->row_bytes) == 0,
                       "%s slot %lld", layout->name, (long long)slots[i]);
        }
        far_reads(&k, &pool, slots, n);
        far_attend(&k, &pool, slots, n);
        {
            struct dsk_copy_rows_args args = {
                .kv = pool.kv, .src_slot = slots[0], .dst_slot = slots[7], .n_rows = 1};

            ck_assert_int_eq(dsk_copy_rows(k.s, &args, &k.err), DSK_OK);
            ck_assert_mem_eq(kit_pool_row(&pool, slots[0]), kit_pool_row(&pool, slots[7]),
                             (size_t)layout->row_bytes);
        }
        kit_close(&k);
        munmap(pool.bytes, bytes);
    }
}
END_TEST

/* MEM-01: outputs of more than 2^31 elements. Holes leave their output row alone, so that a list of mostly
 * holes reaches the far rows without the memory. */
START_TEST(outputs_past_two_billion_elements_go_to_the_right_row)
{
    struct kit k;
    struct kit_pool pool;
    int64_t n = 8388608 + 70; /* rows of 256 values: 2^31 elements, 4 GiB */
    uint16_t *out, values[256];
    int32_t *list;
    const int64_t at[] = {0, 8388607, 8388608, 8388608 + 69};

    KIT_OPEN(&k, _i, 2);
    kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_256_0, 8, 1);
    out = map_sparse((uint64_t)n * 512);
    list = map_sparse((uint64_t)n * 4);
    if (!out || !list)
        TEST_SKIP("no 4 GiB of address space");
    memset(list, 0xff, (size_t)n * 4);
    for (int i = 0; i < 4; i++)
        list[at[i]] = i + 1;
    {
        struct dsk_read_args args = {.kv = pool.kv,
                                     .list = kit_addr(list),
                                     .out = kit_addr(out),
                                     .n_rows = n,
                                     .n_list = (int32_t)n,
                                     .mode = DSK_READ_SELECTED};

        ck_assert_int_eq(dsk_read(k.s, &args, &k.err), DSK_OK);
    }
    for (int i = 0; i < 4; i++) {
        ref64_dequant_row_bf16(pool.layout, 1, kit_pool_row(&pool, i + 1), values);
        KIT_EXPECT(memcmp(values, out + at[i] * 256, 512) == 0, "row %lld", (long long)at[i]);
    }
    munmap(out, (size_t)n * 512);
    munmap(list, (size_t)n * 4);
    kit_close(&k);
}
END_TEST

/* MEM-01: page tables of 4096 rows of 1,048,576 entries, 2^32 in all. */
START_TEST(page_tables_past_four_billion_entries_are_read_in_the_right_place)
{
    enum { n_rows = 4096, n_table = 1048576, last = (n_table - 1) * 64 + 5 };
    int64_t row_bytes = 4 * (int64_t)n_table;
    uint64_t bytes = (uint64_t)(n_rows * row_bytes);
    int32_t *tables = map_sparse(bytes), *lists, *slots;
    struct dsk_map_args args = {.logical_row_bytes = 8,
                                .physical_row_bytes = 8,
                                .table_row_bytes = row_bytes,
                                .n_pages = n_rows,
                                .n_rows = n_rows,
                                .topk = 1,
                                .n_table = n_table};
    struct kit k;

    if (!tables)
        TEST_SKIP("no 16 GiB of address space");
    KIT_OPEN(&k, _i, 2);
    lists = kit_alloc(&k, 8 * n_rows);
    slots = kit_alloc(&k, 8 * n_rows);
    for (int64_t t = 0; t < n_rows; t++) {
        lists[2 * t] = last;
        lists[2 * t + 1] = INT32_MAX; /* a length, beside the one position */
        tables[t * n_table + n_table - 1] = (int32_t)(n_rows - 1 - t);
    }
    args.logical = kit_addr(lists);
    args.physical = kit_addr(slots);
    args.tables = kit_addr(tables);
    args.seq_lens =
        kit_addr(lists); /* all at least `last`: the even ones are equal to it, and so too short */
    ck_assert_int_eq(dsk_map(k.s, &args, &k.err), DSK_OK);
    for (int t = 0; t < n_rows; t++)
        KIT_EXPECT(slots[2 * t] == (t % 2 ? (n_rows - 1 - t) * 64 + 5 : -1), "row %d gives %d", t,
                   slots[2 * t]);
    munmap(tables, bytes);
    kit_close(&k);
}
END_TEST

/* ---- strides -------------------------------------------------------------------------------- */

/* MEM-02: pool pages two pages apart with a gap of 0x7f; the gap stays as it is. */
START_TEST(interleaved_pools_equal_dense_ones)
{
    struct kit k;

    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        struct kit_pool pool, dense;
        struct kit_attend a, b;
        uint64_t before;
        size_t bytes;

        KIT_OPEN(&k, _i, 2);
        kit_pool_make(&k, &pool, ref64_layout_at(l)->id, 200, 2);
        kit_pool_fill(&k, &dense, ref64_layout_at(l)->id, 200, 0, 1);
        for (int64_t i = 0; i < 200; i++)
            memcpy(kit_pool_row(&dense, i), kit_pool_row(&pool, i), (size_t)pool.layout->row_bytes);
        a = (struct kit_attend){.pool = &pool,
                                .n_rows = 2,
                                .topk = 100,
                                .h_q = 7,
                                .q = kit_bf16_normal(&k, 2 * 7 * pool.layout->d_qk, 0.3),
                                .indices = kit_indices(&k, 200, 200, 5),
                                .scale = 0.06f,
                                .out_dtype = DSK_DTYPE_F32};
        b = a;
        b.pool = &dense;
        bytes = 4 * 128 * (size_t)pool.layout->row_bytes;
        before = kit_hash(pool.bytes, bytes);
        kit_attend_check(&k, &a);
        kit_attend_run(&k, &b);
        ck_assert_mem_eq(a.out, b.out, 2 * 7 * 4 * (size_t)pool.layout->d_v);
        ck_assert_uint_eq(kit_hash(pool.bytes, bytes), before);
        kit_close(&k);
    }
}
END_TEST

struct strided {
    int q_head, q_row, out_head, out_row, lse_row, index_row; /* elements */
    int q_offset;
    const char *what;
};

/* Runs `a` with other strides; asserts equal results and untouched padding. */
static void check_strides(struct kit *k, struct kit_attend *a, const struct strided *st)
{
    int d_qk = a->pool->layout->d_qk, d_v = a->pool->layout->d_v;
    int64_t n_q =
        (int64_t)st->q_row * (a->n_rows - 1) + (int64_t)st->q_head * (a->h_q - 1) + d_qk + st->q_offset;
    int64_t n_out = (int64_t)st->out_row * (a->n_rows - 1) + (int64_t)st->out_head * (a->h_q - 1) + d_v;
    int64_t n_lse = (int64_t)st->lse_row * (a->n_rows - 1) + a->h_q;
    uint16_t *q = kit_alloc(k, 2 * n_q);
    float *out = kit_alloc(k, 4 * n_out), *lse = kit_alloc(k, 4 * n_lse), hole;
    int32_t *list = kit_alloc(k, 4 * ((int64_t)st->index_row * (a->n_rows - 1) + a->topk));
    struct dsk_attend_seg seg = kit_attend_seg(k, a);
    struct dsk_attend_args args = {
        .kv = a->pool->kv, .segs = &seg, .n_segs = 1, .h_q = a->h_q, .out_dtype = DSK_DTYPE_F32};
    int64_t n_untouched = 0;

    memset(&hole, 0xee, 4);
    memset(q, 0xff, 2 * (size_t)n_q); /* NaN between the heads */
    memset(list, 0, 4 * ((size_t)st->index_row * (size_t)(a->n_rows - 1) + (size_t)a->topk));
    for (int t = 0; t < a->n_rows; t++) {
        memcpy(list + t * st->index_row, a->indices + t * a->topk, 4 * (size_t)a->topk);
        for (int h = 0; h < a->h_q; h++)
            memcpy(q + st->q_offset + t * st->q_row + h * st->q_head, a->q + (t * a->h_q + h) * d_qk,
                   2 * (size_t)d_qk);
    }
    seg.q = kit_addr(q + st->q_offset);
    seg.out = kit_addr(out);
    seg.lse = kit_addr(lse);
    seg.indices = kit_addr(list);
    seg.q_row_bytes = 2 * st->q_row;
    seg.q_head_bytes = 2 * st->q_head;
    seg.out_row_bytes = 4 * st->out_row;
    seg.out_head_bytes = 4 * st->out_head;
    seg.lse_row_bytes = 4 * st->lse_row;
    seg.indices_row_bytes = 4 * st->index_row;
    KIT_EXPECT(dsk_attend(k->s, &args, &k->err) == DSK_OK, "%s: %s: %s", st->what, k->err.field, k->err.text);
    for (int t = 0; t < a->n_rows; t++) {
        for (int h = 0; h < a->h_q; h++) {
            int64_t dense = (int64_t)t * a->h_q + h;

            KIT_EXPECT(lse[t * st->lse_row + h] == a->lse[dense], "%s: lse of row %d head %d", st->what, t,
                       h);
            KIT_EXPECT(
                memcmp(out + t * st->out_row + h * st->out_head, a->out_f32 + dense * d_v, 4 * (size_t)d_v)
                    == 0,
                "%s: out of row %d head %d", st->what, t, h);
        }
    }
    for (int64_t i = 0; i < n_out; i++)
        n_untouched += memcmp(&out[i], &hole, 4) == 0;
    KIT_EXPECT(n_untouched == n_out - (int64_t)a->n_rows * a->h_q * d_v, "%s: padding was written", st->what);
}

/* MEM-02, DSA-06: padded, transposed and offset tensors; every (row, head) has a different lse. */
START_TEST(padded_transposed_and_offset_tensors_equal_dense_ones)
{
    struct kit k;

    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        struct kit_pool pool;
        struct kit_attend a;
        int d, v;

        KIT_OPEN(&k, _i, 2);
        kit_pool_make(&k, &pool, ref64_layout_at(l)->id, 80, 1);
        d = pool.layout->d_qk;
        v = pool.layout->d_v;
        a = (struct kit_attend){.pool = &pool,
                                .n_rows = 3,
                                .topk = 41,
                                .h_q = 5,
                                .q = kit_bf16_normal(&k, 3 * 5 * d, 0.3),
                                .indices = kit_indices(&k, 3 * 41, 80, 5),
                                .scale = 0.06f,
                                .out_dtype = DSK_DTYPE_F32};
        kit_attend_check(&k, &a);
        for (int i = 0; i < 15; i++) {
            for (int j = 0; j < i; j++)
                ck_assert(a.lse[i] != a.lse[j]);
        }
        {
            const struct strided variants[] = {
                {d, 5 * d, v, 5 * v, 5, 41, 0, "dense"},
                {d + 3, 5 * (d + 3) + 1, v, 5 * v, 5, 41, 0, "padded q"},
                {d, 5 * d, v + 5, 5 * (v + 5) + 3, 9, 44, 0, "padded out, lse and indices"},
                {3 * d, d, v, 5 * v, 5, 41, 0, "transposed q"},
                {d, 5 * d, 3 * v, v, 5, 41, 0, "transposed out"},
                {d, 5 * d, v, 5 * v, 5, 41, 1, "q at an odd element"},
            };

            for (size_t i = 0; i < sizeof(variants) / sizeof(variants[0]); i++)
                check_strides(&k, &a, &variants[i]);
        }
        kit_close(&k);
    }
}
END_TEST

/* ---- repeatability -------------------------------------------------------------------------- */

enum input { INPUT_RANDOM, INPUT_EQUAL, INPUT_ZERO, INPUT_ONE, INPUT_NONE, N_INPUTS };

/* RACE-01's inputs: random, all equal, all zero, one value that is not zero, no valid entry. */
static void shape_input(struct kit *k, struct kit_pool *pool, struct kit_attend *a, enum input input)
{
    int64_t n_q = (int64_t)a->n_rows * a->h_q * pool->layout->d_qk;

    for (int64_t i = 0; input == INPUT_ZERO && i < n_q; i++)
        a->q[i] = 0;
    for (int64_t i = 0; input == INPUT_EQUAL && i < n_q; i++)
        a->q[i] = ref64_bf16_encode(0.1f);
    for (int64_t i = 0;
         (input == INPUT_ZERO || input == INPUT_EQUAL || input == INPUT_ONE) && i < pool->kv.n_slots; i++)
        kit_set_row(pool, i, (float[]){input == INPUT_EQUAL ? 1.0f : 0.0f}, 1);
    if (input == INPUT_ONE)
        kit_set_row(pool, 17, (float[]){0, 3}, 2);
    for (int i = 0; input == INPUT_NONE && i < a->n_rows * a->topk; i++)
        a->indices[i] = -1;
    (void)k;
}

static uint64_t launch_all(struct kit *k, struct kit_pool *pool, struct kit_attend *a, const uint16_t *values,
                           uint8_t *rows, uint16_t *plain, float *merged)
{
    int d_qk = pool->layout->d_qk;
    int64_t n_out = (int64_t)a->n_rows * a->h_q * pool->layout->d_v;
    int32_t slots[16];
    struct kit_pool target = *pool;
    struct dsk_append_args append = {
        .rows = kit_addr(values), .row_bytes = 2 * d_qk, .slots = slots, .n_rows = 16, .rule = DSK_RULE_POW2};
    struct dsk_read_args read = {.kv = pool->kv,
                                 .list = kit_addr(a->indices),
                                 .out = kit_addr(plain),
                                 .n_rows = 64,
                                 .n_list = 64,
                                 .mode = DSK_READ_SELECTED};
    struct dsk_merge_args merge = {.out_parts = kit_addr(a->out),
                                   .lse_parts = kit_addr(a->lse),
                                   .out = kit_addr(merged),
                                   .n_parts = 2,
                                   .n_rows = a->n_rows / 2,
                                   .h_q = a->h_q,
                                   .d_v = pool->layout->d_v,
                                   .part_dtype = DSK_DTYPE_F32,
                                   .out_dtype = DSK_DTYPE_F32};
    uint64_t hash;

    target.kv.base = kit_addr(rows);
    target.kv.n_slots = 16;
    append.kv = target.kv;
    for (int i = 0; i < 16; i++)
        slots[i] = 15 - i;
    kit_attend_run(k, a);
    ck_assert_int_eq(dsk_append(k->s, &append, &k->err), DSK_OK);
    ck_assert_int_eq(dsk_read(k->s, &read, &k->err), DSK_OK);
    ck_assert_int_eq(dsk_merge(k->s, &merge, &k->err), DSK_OK);
    hash = kit_hash(a->out, (size_t)n_out * 4);
    hash = hash * 31 + kit_hash(a->lse, (size_t)(a->n_rows * a->h_q) * 4);
    hash = hash * 31 + kit_hash(rows, 16 * (size_t)pool->layout->row_bytes);
    hash = hash * 31 + kit_hash(plain, 64 * 2 * (size_t)d_qk);
    return hash * 31 + kit_hash(merged, (size_t)(n_out / 2) * 4);
}

/* RACE-01: 200 launches of every kernel on each input give one hash. */
START_TEST(repeated_launches_give_the_same_bits)
{
    struct kit k;

    for (int input = INPUT_RANDOM; input < N_INPUTS; input++) {
        struct kit_pool pool;
        struct kit_attend a;
        uint64_t first = 0;
        uint16_t *values, *plain;
        uint8_t *rows;
        float *merged;

        KIT_OPEN(&k, _i, 3); /* more threads than cores, so that they interleave differently each time */
        kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 150, 1);
        a = (struct kit_attend){.pool = &pool,
                                .n_rows = 2,
                                .topk = 130,
                                .h_q = 16,
                                .q = kit_bf16_normal(&k, 2 * 16 * 576, 0.3),
                                .indices = kit_indices(&k, 2 * 130, 150, 5),
                                .scale = 0.06f,
                                .out_dtype = DSK_DTYPE_F32};
        values = kit_bf16_normal(&k, 16 * 576, 1);
        plain = kit_alloc(&k, 64 * 2 * 576);
        rows = kit_alloc(&k, 16 * 656);
        merged = kit_alloc(&k, 16 * 512 * 4);
        shape_input(&k, &pool, &a, (enum input)input);
        kit_attend_run(&k, &a); /* makes the outputs that launch_all names */
        for (int i = 0; i < KIT_SIZE(200, 30); i++) {
            uint64_t hash = launch_all(&k, &pool, &a, values, rows, plain, merged);

            if (i == 0)
                first = hash;
            KIT_EXPECT(hash == first, "input %d: launch %d differs", input, i);
        }
        kit_close(&k);
    }
}
END_TEST

/* Two devices on two threads share nothing. */
struct side {
    pthread_t thread;
    int isa;
    uint64_t hash;
};

static void *side_main(void *arg)
{
    struct side *side = arg;
    struct kit k;
    struct kit_pool pool;
    struct kit_attend a;

    ck_assert(kit_open(&k, side->isa, 2));
    kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 60, 1);
    a = (struct kit_attend){.pool = &pool,
                            .n_rows = 1,
                            .topk = 90,
                            .h_q = 8,
                            .q = kit_bf16_normal(&k, 8 * 576, 0.3),
                            .indices = kit_indices(&k, 90, 60, 5),
                            .scale = 0.06f,
                            .out_dtype = DSK_DTYPE_F32};
    for (int i = 0; i < 20; i++)
        kit_attend_run(&k, &a);
    side->hash = kit_hash(a.out, 8 * 512 * 4);
    kit_close(&k);
    return NULL;
}

START_TEST(two_devices_on_two_threads_do_not_disturb_each_other)
{
    struct side sides[2] = {{.isa = _i}, {.isa = _i}};
    struct kit k;

    KIT_OPEN(&k, _i, 1);
    kit_close(&k);
    for (int i = 0; i < 2; i++)
        ck_assert_int_eq(pthread_create(&sides[i].thread, NULL, side_main, &sides[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(sides[i].thread, NULL);
    ck_assert_uint_eq(sides[0].hash, sides[1].hash);
}
END_TEST

/* ---- memory that changes under the kernel ---------------------------------------------------- */

struct changer {
    int32_t *indices;
    int32_t *lengths;
    int n, n_rows;
    atomic_bool stop;
    atomic_int n_rounds;
};

static void *changer_main(void *arg)
{
    struct changer *c = arg;
    struct ref64_rng rng = ref64_rng_init(7);

    while (!atomic_load(&c->stop)) {
        for (int i = 0; i < c->n; i++) {
            int32_t bits = (int32_t)ref64_rng_u64(&rng); /* volatile: each store happens */

            *(volatile int32_t *)&c->indices[i] = i % 3 ? bits & 63 : bits;
        }
        for (int t = 0; t < c->n_rows; t++)
            *(volatile int32_t *)&c->lengths[t] = (int32_t)ref64_rng_u64(&rng);
        atomic_fetch_add(&c->n_rounds, 1);
    }
    return NULL;
}

/* A client may write its index list while attend reads it: any result will do, no access outside the pool.
 * The pool lies between pages that fault. */
START_TEST(an_index_list_that_changes_cannot_reach_outside_the_pool)
{
    enum { width = 512, n_rows = 4, h_q = 4, page = 4096 };
    struct changer c = {.n = n_rows * width, .n_rows = n_rows};
    int32_t table[1] = {0};
    pthread_t thread;
    struct kit k;
    struct kit_pool pool;
    struct kit_attend a;
    size_t bytes = 64 * 656; /* a page of rows; its end lies at a border of faulting memory */
    uint8_t *mem;

#if defined(DSA_SANITIZE_thread)
    TEST_SKIP("the race is the point of this test");
#endif
    KIT_OPEN(&k, _i, 2);
    mem = mmap(NULL, 13 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ck_assert(mem != MAP_FAILED);
    ck_assert_int_eq(mprotect(mem + page, 11 * page, PROT_READ | PROT_WRITE), 0);
    kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 64, 1);
    memcpy(mem + 12 * page - bytes, pool.bytes, bytes);
    pool.kv.base = kit_addr(mem + 12 * page - bytes);
    c.indices = kit_indices(&k, c.n, 64, 0);
    c.lengths = kit_alloc(&k, 4 * n_rows);
    a = (struct kit_attend){.pool = &pool,
                            .n_rows = n_rows,
                            .topk = width,
                            .h_q = h_q,
                            .q = kit_bf16_normal(&k, n_rows * h_q * 576, 0.1),
                            .indices = c.indices,
                            .lengths = c.lengths,
                            .scale = 0.06f,
                            .out_dtype = DSK_DTYPE_F32};
    ck_assert_int_eq(pthread_create(&thread, NULL, changer_main, &c), 0);
    for (int i = 0; i < KIT_SIZE(200, 40) || atomic_load(&c.n_rounds) < 20; i++) {
        a.table = i % 2 ? table : NULL;
        a.n_table = i % 2;
        a.seq_len = i % 2 ? 64 : 0;
        kit_attend_run(&k, &a);
        for (int j = 0; j < n_rows * h_q * 512; j++)
            KIT_EXPECT(isfinite(a.out_f32[j]), "value %d of launch %d", j, i);
    }
    atomic_store(&c.stop, true);
    pthread_join(thread, NULL);
    munmap(mem, 13 * page);
    kit_close(&k);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("memory");
    TCase *tcase = tcase_create("memory");

    (void)max;
    tcase_set_timeout(tcase, 180);
    tcase_add_loop_test(tcase, rows_past_two_and_four_gigabytes_are_the_right_ones, KIT_FIRST_ISA,
                        KIT_END_ISA);
    tcase_add_loop_test(tcase, outputs_past_two_billion_elements_go_to_the_right_row, KIT_FIRST_ISA,
                        KIT_FIRST_ISA + 1);
    tcase_add_loop_test(tcase, page_tables_past_four_billion_entries_are_read_in_the_right_place,
                        KIT_FIRST_ISA, KIT_FIRST_ISA + 1);
    tcase_add_loop_test(tcase, interleaved_pools_equal_dense_ones, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, padded_transposed_and_offset_tensors_equal_dense_ones, KIT_FIRST_ISA,
                        KIT_END_ISA);
    tcase_add_loop_test(tcase, repeated_launches_give_the_same_bits, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, two_devices_on_two_threads_do_not_disturb_each_other, KIT_FIRST_ISA,
                        KIT_END_ISA);
    tcase_add_loop_test(tcase, an_index_list_that_changes_cannot_reach_outside_the_pool, KIT_FIRST_ISA,
                        KIT_END_ISA);
    suite_add_tcase(suite, tcase);
    suites_p[0] = suite;
    return 1;
}
