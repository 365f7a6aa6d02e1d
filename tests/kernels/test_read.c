/* Readers: exact bits, every code and scale, and the selected reader with its rewritten index list. */
#include "kit.h"

#include <math.h>
#include <string.h>

static void read_ok(struct kit *k, const struct dsk_read_args *args)
{
    dsk_status status = dsk_read(k->s, args, &k->err);

    KIT_EXPECT(status == DSK_OK, "read: %s %s: %s", dsk_status_name(status), k->err.field, k->err.text);
}

static void expect_bits(const struct kit_pool *pool, int64_t slot, const uint16_t *got, const char *what)
{
    uint16_t values[DSK_MAX_D_QK];

    ref64_dequant_row_bf16(pool->layout, pool->kv.raw_scale, kit_pool_row(pool, slot), values);
    for (int i = 0; i < pool->layout->d_qk; i++) {
        bool both_nan = (values[i] & 0x7fff) > 0x7f80 && (got[i] & 0x7fff) > 0x7f80;

        KIT_EXPECT(got[i] == values[i] || both_nan, "%s: %s slot %lld value %d is %04x, not %04x", what,
                   pool->layout->name, (long long)slot, i, got[i], values[i]);
    }
}

/* E3: code x scale in fp32, then one rounding. */
START_TEST(known_products_round_once)
{
    static const struct {
        uint8_t code;
        float scale;
        double value;
    } cases[] = {{0x38, 1.00390625f, 1.0},      {0x38, 1.005859375f, 1.0078125},
                 {0x38, 1.01171875f, 1.015625}, {0x3b, 0.1f, 0.1376953125},
                 {0x7e, 0.1f, 44.75},           {0x39, 3, 3.375},
                 {0x3f, 1.00390625f, 1.8828125}};
    struct kit k;

    KIT_OPEN(&k, _i, 1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (uint32_t id = DSK_LAYOUT_SCALED_512_64; id <= DSK_LAYOUT_SCALED_256_0; id++) {
            struct kit_pool pool;
            uint16_t *out = kit_alloc(&k, 2 * 2 * DSK_MAX_D_QK);
            struct dsk_read_args args = {.out = kit_addr(out), .n_rows = 2, .mode = DSK_READ_FULL};

            kit_pool_fill(&k, &pool, id, 2, cases[i].code, cases[i].scale);
            args.kv = pool.kv;
            read_ok(&k, &args);
            for (int v = 0; v < pool.layout->latent; v++)
                KIT_EXPECT(ref64_bf16_decode(out[pool.layout->d_qk + v]) == cases[i].value,
                           "case %zu value %d", i, v);
        }
    }
    kit_close(&k);
}
END_TEST

/* FP8-01, FP8-03: all 256 codes at all scales with all 24 bits, in all three readers; 0x80 is -0. */
START_TEST(every_code_and_scale_is_exact_in_every_reader)
{
    static const float scales[] = {1,         1.00390625f,     3.1415927f, 0x1p-13f,
                                   0x1p-130f, 0x1.fffffep100f, 0x1p-126f,  0.1f};
    enum { n_scales = 8 };
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        const struct ref64_layout *layout = ref64_layout_at(l);
        int32_t slots[n_scales], table[1] = {0};
        struct kit_pool pool;
        uint16_t *out = kit_alloc(&k, n_scales * 2 * layout->d_qk);
        struct dsk_read_args args = {.out = kit_addr(out), .n_rows = n_scales};

        kit_pool_fill(&k, &pool, layout->id, n_scales, 0, 1);
        for (int s = 0; s < n_scales; s++) {
            uint8_t *row = kit_pool_row(&pool, s);

            for (int i = 0; i < layout->row_bytes; i++)
                row[i] = (uint8_t)(i + 31 * s);
            for (int g = 0; g < layout->n_groups; g++)
                memcpy(row + layout->latent + 4 * g, &scales[(s + g) % n_scales], 4);
            slots[s] = n_scales - 1 - s;
        }
        args.kv = pool.kv;
        args.mode = DSK_READ_FULL;
        read_ok(&k, &args);
        for (int s = 0; s < n_scales; s++)
            expect_bits(&pool, s, out + s * layout->d_qk, "full");
        args.mode = DSK_READ_PAGED;
        args.list = kit_addr(table);
        args.n_list = 1;
        memset(out, 0xee, n_scales * 2 * (size_t)layout->d_qk);
        read_ok(&k, &args);
        for (int s = 0; s < n_scales; s++)
            expect_bits(&pool, s, out + s * layout->d_qk, "paged");
        args.mode = DSK_READ_SELECTED;
        args.list = kit_addr(slots);
        args.n_list = n_scales;
        read_ok(&k, &args);
        for (int s = 0; s < n_scales; s++)
            expect_bits(&pool, slots[s], out + s * layout->d_qk, "selected");
    }
    kit_close(&k);
}
END_TEST

/* E5: odd slots alone and beside even ones; MEM-02: page pitch larger than a page; a partly used last
 * page. */
START_TEST(readers_find_rows_across_pages_and_gaps)
{
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        const struct ref64_layout *layout = ref64_layout_at(l);
        int32_t table[] = {2, 0, 3, 1}, slots[] = {1, 3, 3, -1, 199, 64, 63, 200, 127, INT32_MIN, 1};
        uint16_t *out = kit_alloc(&k, 200 * 2 * layout->d_qk);

        for (int pitch_factor = 1; pitch_factor <= 2; pitch_factor++) {
            struct kit_pool pool;
            struct dsk_read_args args = {.out = kit_addr(out), .n_rows = 200, .mode = DSK_READ_FULL};

            kit_pool_make(&k, &pool, layout->id, 200, pitch_factor);
            args.kv = pool.kv;
            read_ok(&k, &args);
            for (int i = 0; i < 200; i++)
                expect_bits(&pool, i, out + i * layout->d_qk, "full");
            args.mode = DSK_READ_PAGED;
            args.list = kit_addr(table);
            args.n_list = 4;
            args.first = 5;
            args.n_rows =
                130; /* positions 5..134: pages 2, 0 and 8 rows of page 3, of which the pool has 8 */
            read_ok(&k, &args);
            for (int i = 0; i < 130; i++) {
                int at = i + 5;

                if (table[at / 64] * 64 + at % 64 < 200)
                    expect_bits(&pool, table[at / 64] * 64 + at % 64, out + i * layout->d_qk, "paged");
            }
            args.mode = DSK_READ_SELECTED;
            args.list = kit_addr(slots);
            args.n_list = 11;
            args.n_rows = 11;
            args.first = 0;
            memset(out, 0xee, 11 * 2 * (size_t)layout->d_qk);
            read_ok(&k, &args);
            for (int i = 0; i < 11; i++) {
                if (slots[i] >= 0 && slots[i] < 200)
                    expect_bits(&pool, slots[i], out + i * layout->d_qk, "selected");
                else
                    ck_assert_uint_eq(out[i * layout->d_qk + layout->d_qk - 1], 0xeeee);
            }
        }
    }
    kit_close(&k);
}
END_TEST

/* A page id outside the pool in a table is a hole, never a read. */
START_TEST(pages_outside_the_pool_leave_the_output_as_it_was)
{
    int32_t table[] = {-1, 1, 2, INT32_MAX, INT32_MIN};
    struct kit k;
    struct kit_pool pool;
    uint16_t *out;
    struct dsk_read_args args;

    KIT_OPEN(&k, _i, 2);
    kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_256_0, 100, 1);
    out = kit_alloc(&k, 320 * 2 * 256);
    args = (struct dsk_read_args){.kv = pool.kv,
                                  .list = kit_addr(table),
                                  .out = kit_addr(out),
                                  .n_rows = 320,
                                  .n_list = 5,
                                  .mode = DSK_READ_PAGED};
    read_ok(&k, &args);
    for (int i = 0; i < 320; i++) {
        if (i >= 64 && i < 100)
            expect_bits(&pool, i, out + i * 256, "paged");
        else
            for (int d = 0; d < 256; d++)
                KIT_EXPECT(out[i * 256 + d] == 0xeeee, "position %d was written", i);
    }
    kit_close(&k);
}
END_TEST

/* ---- selected reader with index rewriting --------------------------------------------------- */

struct gather {
    int32_t *new_indices;
    uint16_t *workspace;
    int64_t n_workspace;
    uint64_t bytes;
};

static struct gather gather_run(struct kit *k, const struct kit_pool *pool, const int32_t *indices,
                                int n_rows, int topk, int64_t indices_pitch, int branch)
{
    struct gather g = {.bytes = dsk_gather_bytes(&pool->kv, n_rows, topk)};
    uint64_t plane_bytes = (uint64_t)pool->kv.n_slots * 2 * (uint64_t)pool->layout->d_qk;
    uint64_t list_bytes = (uint64_t)n_rows * (uint64_t)topk * 2 * (uint64_t)pool->layout->d_qk;
    struct dsk_gather_args args;
    dsk_status status;

    if (branch)
        g.bytes = branch == 1 ? list_bytes : plane_bytes;
    g.new_indices = kit_alloc(k, 4 * (int64_t)n_rows * topk);
    g.workspace = kit_alloc(k, (int64_t)g.bytes);
    args = (struct dsk_gather_args){.kv = pool->kv,
                                    .indices = kit_addr(indices),
                                    .new_indices = kit_addr(g.new_indices),
                                    .workspace = kit_addr(g.workspace),
                                    .workspace_bytes = g.bytes,
                                    .indices_row_bytes = 4 * indices_pitch,
                                    .n_rows = n_rows,
                                    .topk = topk,
                                    .branch = branch,
                                    .n_workspace_p = &g.n_workspace};
    status = dsk_gather(k->s, &args, &k->err);
    KIT_EXPECT(status == DSK_OK, "gather: %s %s: %s", dsk_status_name(status), k->err.field, k->err.text);
    return g;
}

static void gather_check(struct kit *k, const struct kit_pool *pool, const int32_t *indices, int n_rows,
                         int topk, int64_t pitch, const struct gather *g)
{
    (void)k;
    ck_assert_uint_le((uint64_t)g->n_workspace * 2 * (uint64_t)pool->layout->d_qk, g->bytes);
    for (int i = 0; i < n_rows * topk; i++) {
        int32_t slot = indices[i / topk * pitch + i % topk], at = g->new_indices[i];

        if (slot < 0 || slot >= pool->kv.n_slots) {
            ck_assert_int_eq(at, -1);
            continue;
        }
        ck_assert_int_ge(at, 0);
        ck_assert_int_lt(at, g->n_workspace);
        expect_bits(pool, slot, g->workspace + (int64_t)at * pool->layout->d_qk, "workspace");
    }
}

/* The bf16 attention that the workspace is for. */
static void attend_workspace(struct kit *k, const struct kit_pool *pool, const struct gather *g, int n_rows,
                             int topk, const uint16_t *q, float *out, float *lse)
{
    static const uint32_t bf16_of[] = {
        [576] = DSK_LAYOUT_BF16_576, [512] = DSK_LAYOUT_BF16_512, [256] = DSK_LAYOUT_BF16_256};
    int d_qk = pool->layout->d_qk, d_v = pool->layout->d_v;
    struct dsk_attend_seg seg = {.q = kit_addr(q),
                                 .out = kit_addr(out),
                                 .lse = kit_addr(lse),
                                 .indices = kit_addr(g->new_indices),
                                 .q_row_bytes = 2 * d_qk,
                                 .q_head_bytes = 2 * d_qk,
                                 .out_row_bytes = 4 * d_v,
                                 .out_head_bytes = 4 * d_v,
                                 .lse_row_bytes = 4,
                                 .indices_row_bytes = 4 * topk,
                                 .n_rows = n_rows,
                                 .topk = topk,
                                 .space = DSK_SPACE_PHYSICAL,
                                 .softmax_scale = 1};
    struct dsk_attend_args args = {.kv = {.base = kit_addr(g->workspace),
                                          .page_pitch_bytes = 64 * 2 * (int64_t)d_qk,
                                          .n_slots = g->n_workspace,
                                          .layout = bf16_of[d_qk]},
                                   .segs = &seg,
                                   .n_segs = 1,
                                   .h_q = 1,
                                   .out_dtype = DSK_DTYPE_F32};

    KIT_EXPECT(dsk_attend(k->s, &args, &k->err) == DSK_OK, "%s: %s", k->err.field, k->err.text);
}

/* E8 */
START_TEST(both_gather_branches_give_the_listed_rows)
{
    static const int32_t few[] = {5, -1, 5, 2}, many[] = {5, -1, 2, 2, 0, 7, 1, 3};
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (uint32_t id = DSK_LAYOUT_SCALED_512_64; id <= DSK_LAYOUT_SCALED_256_0; id++) {
        struct kit_pool pool;
        uint16_t *q = kit_alloc(&k, 2 * 2 * DSK_MAX_D_QK);
        float *out = kit_alloc(&k, 3 * 2 * 512 * 4), lse[3][2];
        struct gather g;

        kit_pool_fill(&k, &pool, id, 8, 0x38, 1);
        for (int r = 0; r < 8; r++) {
            float scale = (float)r;

            for (int i = 0; i < pool.layout->n_groups; i++)
                memcpy(kit_pool_row(&pool, r) + pool.layout->latent + 4 * i, &scale, 4);
        }
        memset(q, 0, 2 * 2 * DSK_MAX_D_QK);
        ck_assert_uint_eq(dsk_gather_bytes(&pool.kv, 2, 2), 4 * 2 * (uint64_t)pool.layout->d_qk);
        ck_assert_uint_eq(dsk_gather_bytes(&pool.kv, 1, 8), 8 * 2 * (uint64_t)pool.layout->d_qk);
        ck_assert_uint_eq(dsk_gather_bytes(&pool.kv, 3, 8), 8 * 2 * (uint64_t)pool.layout->d_qk);
        for (int branch = 0; branch < 3; branch++) {
            g = gather_run(&k, &pool, few, 2, 2, 2, branch);
            gather_check(&k, &pool, few, 2, 2, 2, &g);
            ck_assert_int_eq(g.n_workspace, branch == 2 ? 8 : 4);
            attend_workspace(&k, &pool, &g, 2, 2, q, out + branch * 2 * 512, lse[branch]);
            ck_assert_float_eq_tol(out[branch * 2 * 512], 5, 1e-6f);
            ck_assert_float_eq_tol(out[branch * 2 * 512 + pool.layout->d_v], 3.5, 1e-6f);
            ck_assert_float_eq_tol(lse[branch][0], 0, 1e-6f);
            ck_assert_float_eq_tol(lse[branch][1], 0.69314718f, 1e-6f);
        }
        ck_assert_mem_eq(out, out + 2 * 2 * 512, 2 * 4 * (size_t)pool.layout->d_v);
        for (int branch = 0; branch < 3; branch++) {
            g = gather_run(&k, &pool, many, 1, 8, 8, branch);
            gather_check(&k, &pool, many, 1, 8, 8, &g);
            attend_workspace(&k, &pool, &g, 1, 8, q, out + branch * 512, lse[branch]);
            ck_assert_float_eq_tol(out[branch * 512], 20.0f / 7, 1e-6f);
            ck_assert_float_eq_tol(lse[branch][0], 1.94591015f, 1e-6f);
        }
        ck_assert_mem_eq(out + 512, out + 2 * 512, 4 * (size_t)pool.layout->d_v);
    }
    kit_close(&k);
}
END_TEST

START_TEST(gathering_nothing_is_fine)
{
    static const int32_t none[] = {-1, -1, 8, -5};
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, _i, 1);
    kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 8, 1);
    for (int branch = 0; branch < 3; branch++) {
        struct gather g = gather_run(&k, &pool, none, 2, 2, 2, branch);

        gather_check(&k, &pool, none, 2, 2, 2, &g);
    }
    kit_close(&k);
}
END_TEST

START_TEST(random_gathers_match_for_every_layout_and_pitch)
{
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        struct kit_pool pool;
        int32_t *indices = kit_indices(&k, 5 * 70, 130, 20);
        struct gather g;

        kit_pool_make(&k, &pool, ref64_layout_at(l)->id, 130, 2);
        indices[3] = 130;
        indices[4] = INT32_MIN;
        indices[5] = INT32_MAX;
        for (int n = 1; n <= 5; n += 2) { /* 67 < 130 rows: gathered; 201 and 335: whole plane */
            g = gather_run(&k, &pool, indices, n, 67, 70, 0);
            gather_check(&k, &pool, indices, n, 67, 70, &g);
            ck_assert_int_eq(g.n_workspace, n == 1 ? 67 : 130);
        }
    }
    kit_close(&k);
}
END_TEST

/* The list may be rewritten where it lies. */
START_TEST(gather_rewrites_a_list_in_place)
{
    struct kit k;
    struct kit_pool pool;
    int32_t *indices, *copy;
    struct gather g = {0};
    struct dsk_gather_args args;

    KIT_OPEN(&k, _i, 2);
    kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_0, 900, 1);
    indices = kit_indices(&k, 8 * 100, 900, 10);
    copy = kit_alloc(&k, 8 * 100 * 4);
    memcpy(copy, indices, 8 * 100 * 4);
    g.bytes = dsk_gather_bytes(&pool.kv, 8, 100);
    g.new_indices = indices;
    g.workspace = kit_alloc(&k, (int64_t)g.bytes);
    args = (struct dsk_gather_args){.kv = pool.kv,
                                    .indices = kit_addr(indices),
                                    .new_indices = kit_addr(indices),
                                    .workspace = kit_addr(g.workspace),
                                    .workspace_bytes = g.bytes,
                                    .indices_row_bytes = 400,
                                    .n_rows = 8,
                                    .topk = 100,
                                    .n_workspace_p = &g.n_workspace};
    ck_assert_int_eq(dsk_gather(k.s, &args, &k.err), DSK_OK);
    gather_check(&k, &pool, copy, 8, 100, 100, &g);
    kit_close(&k);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("read");
    TCase *tcase = tcase_create("read");

    (void)max;
    tcase_set_timeout(tcase, 120);
    tcase_add_loop_test(tcase, known_products_round_once, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, every_code_and_scale_is_exact_in_every_reader, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, readers_find_rows_across_pages_and_gaps, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, pages_outside_the_pool_leave_the_output_as_it_was, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, both_gather_branches_give_the_listed_rows, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, gathering_nothing_is_fine, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, random_gathers_match_for_every_layout_and_pitch, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, gather_rewrites_a_list_in_place, KIT_FIRST_ISA, KIT_END_ISA);
    suite_add_tcase(suite, tcase);
    suites_p[0] = suite;
    return 1;
}
