/* The HIP kernels for rows and lists, in the emulator, against the CPU backend: bit for bit, on both chips, whichever order
 * waves run in. gfx942's own e4m3 is another encoding; the pool's bytes are OCP's all the same. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_kit.h"
#include "hipemu_run.h"
#include "kernels/gpu/gpu_args.h"

#define ROW_BLOCK   256 /* threads; eight rows of 32 lanes */
#define ROWS        8
#define MAP_BLOCK   512
#define MERGE_BLOCK 128

static const char *const targets[] = {"gfx942", "gfx950"};

/* Loop tests run over chips and layouts. */
#define N_LOOPS     (2 * (DSK_LAYOUT_COUNT - 1))
#define LOOP_TARGET targets[_i % 2]
#define LOOP_LAYOUT ((uint32_t)(1 + _i / 2))

/* Waves run in one order on one chip and in the other on the other: a result that depends on it differs from the CPU's. */
static void launch(const char *target, const char *kernel, uint32_t grid_x, uint32_t grid_y, uint32_t block,
                   const void *param)
{
    hipemu_set(strcmp(target, "gfx950") == 0 ? 2 : 1, -1);
    hipemu_run(target, kernel, grid_x, grid_y, block, param);
}

static uint32_t blocks_of(int64_t n, int64_t per_block)
{
    return (uint32_t)((n + per_block - 1) / per_block);
}

/* ---- append ----------------------------------------------------------------------------------- */

/* Rows of all sizes; NaN, infinities and groups of zeros of either sign among them. */
static uint16_t *wild_rows(struct kit *k, int64_t n_rows, int d_qk)
{
    uint16_t *rows = kit_bf16_normal(k, n_rows * d_qk, 1);

    for (int64_t i = 0; i < n_rows; i++) {
        float size = (i % 4 == 1 ? 1e-30f : 1) * (float)(1 << (i % 20));

        for (int d = 0; d < d_qk; d++)
            rows[i * d_qk + d] = dsk_bf16_from_f32(dsk_bf16_to_f32(rows[i * d_qk + d]) * size);
        if (i % 7 == 3)
            rows[i * d_qk + ref64_rng_below(&k->rng, d_qk)] =
                (uint16_t[]){0x7fc0, 0x7f80, 0xff80, 0xffff}[i % 4];
        if (i % 11 == 5)
            memset(rows + i * d_qk, i % 2 ? 0x80 : 0, 2 * (size_t)d_qk);
    }
    return rows;
}

struct batch {
    struct kit_pool pool;
    struct dsk_append_args args; /* the CPU's */
    uint16_t *rows;
    int32_t *slots;
    uint32_t *n_odd;
    uint8_t *copy; /* of the pool, for the emulated kernel */
    uint32_t *copy_odd;
};

/* Slots are all different, but for holes: which of equal ones wins is the host's business. */
static void make_batch(struct kit *k, struct batch *b, uint32_t layout_id, uint32_t rule, int32_t n_rows)
{
    const struct dsk_layout *layout = dsk_layout_get(layout_id);

    kit_pool_fill(k, &b->pool, layout_id, n_rows + 40, 0x11, 1);
    b->rows = wild_rows(k, n_rows, layout->d_qk);
    b->slots = kit_alloc(k, 4 * (int64_t)n_rows);
    b->n_odd = kit_alloc(k, 4 * (int64_t)n_rows);
    b->copy_odd = kit_alloc(k, 4 * (int64_t)n_rows);
    b->copy = kit_alloc(k, gpu_pool_bytes(&b->pool));
    memcpy(b->copy, b->pool.bytes, (size_t)gpu_pool_bytes(&b->pool));
    for (int32_t i = 0; i < n_rows; i++)
        b->slots[i] = i % 9 == 4 ? -1 : (i * 17 + 5) % (n_rows % 17 == 0 ? n_rows + 1 : n_rows);
    b->args = (struct dsk_append_args){.kv = b->pool.kv,
                                       .rows = kit_addr(b->rows),
                                       .row_bytes = 2 * layout->d_qk,
                                       .slots = b->slots,
                                       .n_nonfinite = kit_addr(b->n_odd),
                                       .n_rows = n_rows,
                                       .rule = rule};
    b->args.kv.raw_scale = 0.037f;
    ck_assert_int_eq(dsk_append(k->s, &b->args, &k->err), DSK_OK);
}

static struct gpu_append_args emulated(const struct batch *b)
{
    struct gpu_append_args args = {.kv = b->args.kv,
                                   .rows = b->args.rows,
                                   .row_bytes = b->args.row_bytes,
                                   .slots = kit_addr(b->slots),
                                   .n_nonfinite = kit_addr(b->copy_odd),
                                   .n_rows = b->args.n_rows,
                                   .rule = b->args.rule};

    args.kv.base = kit_addr(b->copy);
    return args;
}

static void compare_batch(const struct batch *b, const char *target, const char *kernel)
{
    char what[128];

    snprintf(what, sizeof(what), "%s %s %s rule %u rows %d", target, kernel, b->pool.layout->name,
             b->args.rule, b->args.n_rows);
    gpu_expect_bytes(b->copy, b->pool.bytes, gpu_pool_bytes(&b->pool), what);
    gpu_expect_bytes(b->copy_odd, b->n_odd, 4 * (int64_t)b->args.n_rows, what);
}

START_TEST(append_writes_the_bytes_of_the_cpu)
{
    static const int32_t n_rows[] = {1, 9, 57};
    struct kit k;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    for (uint32_t rule = DSK_RULE_PLAIN; rule <= DSK_RULE_POW2; rule++)
        for (int i = 0; i < 3; i++) {
            struct gpu_append_few few;
            struct batch b;

            make_batch(&k, &b, LOOP_LAYOUT, rule, n_rows[i]);
            few.args = emulated(&b);
            launch(LOOP_TARGET, "gpu_append", blocks_of(n_rows[i], ROWS), 1, ROW_BLOCK, &few.args);
            compare_batch(&b, LOOP_TARGET, "gpu_append");

            make_batch(&k, &b, LOOP_LAYOUT, rule, n_rows[i]);
            few.args = emulated(&b);
            few.args.slots = 0;
            memcpy(few.slots, b.slots, 4 * (size_t)n_rows[i]);
            launch(LOOP_TARGET, "gpu_append_few_64", blocks_of(n_rows[i], ROWS), 1, ROW_BLOCK, &few);
            compare_batch(&b, LOOP_TARGET, "gpu_append_few_64");
        }
    kit_close(&k);
}
END_TEST

/* Runs of neighbours, one of them skipped. */
START_TEST(append_of_runs_writes_the_bytes_of_the_cpu)
{
    static const struct gpu_run runs[] = {{0, 64}, {10, 7}, {11, -1}, {20, 100}, {41, 0}};
    static const char *const kernels[] = {"gpu_append_runs_24", "gpu_append_runs_150", "gpu_append_runs_500"};
    const int32_t n_rows = 47;
    struct kit k;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    for (int i = 0; i < 3; i++) {
        struct gpu_append_runs args = {.n_runs = 5};
        struct batch b;

        make_batch(&k, &b, LOOP_LAYOUT, DSK_RULE_POW2, 100); /* for its buffers */
        memset(b.pool.bytes, 0x11, (size_t)gpu_pool_bytes(&b.pool));
        memset(b.copy, 0x11, (size_t)gpu_pool_bytes(&b.pool));
        for (int32_t row = 0, run = 0; row < n_rows; row++) {
            run += run < 4 && runs[run + 1].row == row;
            b.slots[row] = runs[run].slot < 0 ? -1 : runs[run].slot + row - runs[run].row;
        }
        b.args.n_rows = n_rows;
        ck_assert_int_eq(dsk_append(k.s, &b.args, &k.err), DSK_OK);
        args.args = emulated(&b);
        args.args.slots = 0;
        memcpy(args.runs, runs, sizeof(runs));
        launch(LOOP_TARGET, kernels[i], blocks_of(n_rows, ROWS), 1, ROW_BLOCK, &args);
        compare_batch(&b, LOOP_TARGET, kernels[i]);
    }
    kit_close(&k);
}
END_TEST

START_TEST(check_finds_the_first_row_that_is_not_finite)
{
    const struct dsk_layout *layout = dsk_layout_get(LOOP_LAYOUT);
    const int n_rows = 40;
    int32_t first_bad = INT32_MAX;
    struct gpu_append_args args;
    struct batch b;
    struct kit k;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    make_batch(&k, &b, LOOP_LAYOUT, DSK_RULE_POW2, n_rows);
    memcpy(b.copy, b.pool.bytes, (size_t)gpu_pool_bytes(&b.pool));
    for (int i = 0; i < n_rows * layout->d_qk; i++)
        b.rows[i] = 0x3f80;
    args = emulated(&b);
    args.first_bad = kit_addr(&first_bad);
    launch(LOOP_TARGET, "gpu_append_check", blocks_of(n_rows, ROWS), 1, ROW_BLOCK, &args);
    ck_assert_int_eq(first_bad, INT32_MAX);
    b.rows[4 * layout->d_qk] = 0x7fc0; /* its slot is -1: not looked at */
    b.rows[21 * layout->d_qk + layout->d_qk - 1] = 0xff80;
    b.rows[33 * layout->d_qk] = 0x7f80;
    launch(LOOP_TARGET, "gpu_append_check", blocks_of(n_rows, ROWS), 1, ROW_BLOCK, &args);
    ck_assert_int_eq(first_bad, 21);
    gpu_expect_bytes(b.copy, b.pool.bytes, gpu_pool_bytes(&b.pool), "a check writes nothing");
    kit_close(&k);
}
END_TEST

static void run_vector(struct kit *k, const struct vectors_case *c, const char *target)
{
    const struct ref64_layout *layout = ref64_layout_by_name(vectors_key(c, "layout"));
    const struct vectors_array *input = vectors_find(c, "input", VECTORS_U16, 2);
    const struct vectors_array *rows = vectors_find(c, "rows", VECTORS_U8, 2);
    const int n_rows = (int)rows->shape[0];
    struct gpu_append_few few = {.args = {.rows = kit_addr(input->data), .row_bytes = 2 * layout->d_qk}};
    struct kit_pool pool;

    kit_pool_fill(k, &pool, layout->id, n_rows + 1, 0xcc, 7);
    for (int i = 0; i < n_rows; i++)
        few.slots[i] = n_rows - 1 - i;
    few.args.kv = pool.kv;
    few.args.n_rows = n_rows;
    few.args.rule = strcmp(vectors_key(c, "rule"), "plain") == 0 ? DSK_RULE_PLAIN : DSK_RULE_POW2;
    launch(target, "gpu_append_few_960", blocks_of(n_rows, ROWS), 1, ROW_BLOCK, &few);
    for (int i = 0; i < n_rows; i++)
        gpu_expect_bytes(kit_pool_row(&pool, few.slots[i]),
                         (const uint8_t *)rows->data + i * layout->row_bytes, layout->row_bytes, c->name);
}

START_TEST(stored_vectors_are_reproduced_byte_for_byte)
{
    char **names, text[200], path[4096];
    int n, n_run = 0;
    struct kit k;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    KIT_EXPECT(vectors_list(DSA_TEST_VECTORS, &names, &n, text, sizeof(text)) == 0, "%s", text);
    for (int i = 0; i < n; i++) {
        struct vectors_case c;

        if (strncmp(names[i], "quantize_", 9) != 0)
            continue;
        snprintf(path, sizeof(path), "%s/%s", DSA_TEST_VECTORS, names[i]);
        KIT_EXPECT(vectors_open(path, &c, text, sizeof(text)) == 0, "%s", text);
        run_vector(&k, &c, targets[_i]);
        vectors_close(&c);
        n_run++;
    }
    vectors_free_list(names, n);
    ck_assert_int_ge(n_run, 6);
    kit_close(&k);
}
END_TEST

/* ---- readers ---------------------------------------------------------------------------------- */

/* Rows of random bytes: every code, NaN among them, and scales of any finite size. */
static void random_rows(struct kit *k, struct kit_pool *pool, uint32_t layout, int64_t n_slots)
{
    kit_pool_fill(k, pool, layout, n_slots, 0, 1);
    for (int64_t slot = 0; slot < n_slots; slot++) {
        uint8_t *row = kit_pool_row(pool, slot);

        for (int i = 0; i < pool->layout->row_bytes; i++)
            row[i] = (uint8_t)ref64_rng_below(&k->rng, 256);
        for (int i = 0; i < pool->layout->n_groups; i++) {
            float scale =
                ldexpf(1 + (float)ref64_rng_unit(&k->rng), (int)ref64_rng_below(&k->rng, 200) - 110);

            memcpy(row + pool->layout->latent + 4 * i, &scale, 4);
        }
    }
    pool->kv.raw_scale = 0.0371f;
}

static void check_read(struct kit *k, const struct kit_pool *pool, struct dsk_read_args args,
                       const int32_t *list, const char *target, int offset)
{
    const int64_t bytes = args.n_rows * 2 * pool->layout->d_qk;
    uint8_t *want = kit_alloc(k, bytes), *got = kit_alloc(k, bytes + offset);
    struct gpu_read_args emulated_args = {.kv = pool->kv,
                                          .list = kit_addr(list),
                                          .out = kit_addr(got) + (uint64_t)offset,
                                          .n_rows = args.n_rows,
                                          .first = args.first,
                                          .n_list = args.n_list,
                                          .mode = args.mode};
    const int64_t per_block = ROWS * GPU_ROWS_PER_WAVE(pool->layout->row_bytes);
    char what[96];

    args.kv = pool->kv;
    args.list = kit_addr(list);
    args.out = kit_addr(want);
    ck_assert_int_eq(dsk_read(k->s, &args, &k->err), DSK_OK);
    launch(target, "gpu_read", blocks_of(args.n_rows, per_block), 1, ROW_BLOCK, &emulated_args);
    snprintf(what, sizeof(what), "%s read %s mode %d offset %d", target, pool->layout->name, args.mode,
             offset);
    gpu_expect_bytes(got + offset, want, bytes, what);
}

START_TEST(readers_give_the_bits_of_the_cpu)
{
    struct kit k;
    struct kit_pool pool;
    int32_t list[77], table[12] = {3, 0, 1, -1, 2, 100, 1, 2, 3, 0, 2, 1};

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    random_rows(&k, &pool, LOOP_LAYOUT, 200);
    for (int i = 0; i < 77; i++)
        list[i] = (int32_t)ref64_rng_below(&k.rng, 220) - 10;
    for (int offset = 0; offset <= 2; offset += 2) {
        check_read(&k, &pool, (struct dsk_read_args){.n_rows = 199, .mode = DSK_READ_FULL}, NULL, LOOP_TARGET,
                   offset);
        check_read(&k, &pool,
                   (struct dsk_read_args){.n_rows = 150, .first = 37, .n_list = 12, .mode = DSK_READ_PAGED},
                   table, LOOP_TARGET, offset);
        check_read(&k, &pool, (struct dsk_read_args){.n_rows = 77, .n_list = 77, .mode = DSK_READ_SELECTED},
                   list, LOOP_TARGET, offset);
    }
    kit_close(&k);
}
END_TEST

/* Each entry brings its row, and the list becomes places in the workspace; in place, as the host does it. Pages are met
 * again and again. */
START_TEST(gather_rewrites_its_list)
{
    const int32_t n_rows = 3, topk = 21, n = n_rows * topk;
    struct kit k;
    struct kit_pool pool;
    int64_t n_want;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    random_rows(&k, &pool, LOOP_LAYOUT, 40);
    const int64_t bytes = (int64_t)n * 2 * pool.layout->d_qk,
                  per_block = ROWS * GPU_ROWS_PER_WAVE(pool.layout->row_bytes);
    int32_t *list = kit_alloc(&k, 4 * n), *want_list = kit_alloc(&k, 4 * n);
    uint8_t *want = kit_alloc(&k, bytes), *got = kit_alloc(&k, bytes);
    for (int i = 0; i < n; i++)
        list[i] = (int32_t)ref64_rng_below(&k.rng, 50) - 5;
    ck_assert_int_eq(dsk_gather(k.s,
                                &(struct dsk_gather_args){.kv = pool.kv,
                                                          .indices = kit_addr(list),
                                                          .new_indices = kit_addr(want_list),
                                                          .workspace = kit_addr(want),
                                                          .workspace_bytes = (uint64_t)bytes,
                                                          .indices_row_bytes = 4 * topk,
                                                          .n_rows = n_rows,
                                                          .topk = topk,
                                                          .branch = 1,
                                                          .n_workspace_p = &n_want},
                                &k.err),
                     DSK_OK);
    launch(LOOP_TARGET, "gpu_read", blocks_of(n, per_block), 1, ROW_BLOCK,
           &(struct gpu_read_args){.kv = pool.kv,
                                   .list = kit_addr(list),
                                   .out = kit_addr(got),
                                   .new_indices = kit_addr(list),
                                   .n_rows = n,
                                   .list_row_bytes = 4 * topk,
                                   .mode = GPU_READ_ENTRIES,
                                   .topk = topk});
    gpu_expect_bytes(list, want_list, 4 * n, "gather's list");
    gpu_expect_bytes(got, want, bytes, "gather's workspace");
    kit_close(&k);
}
END_TEST

START_TEST(clean_keeps_slots_alone)
{
    const int32_t n_rows = 5, topk = 301, pitch = topk + 3;
    static int32_t list[5 * 304], got[5 * 301];
    struct gpu_clean_args args = {.indices = kit_addr(list),
                                  .new_indices = kit_addr(got),
                                  .indices_row_bytes = 4 * pitch,
                                  .n_entries = (int64_t)n_rows * topk,
                                  .n_slots = 100,
                                  .topk = topk};

    for (int i = 0; i < n_rows * pitch; i++)
        list[i] = i % 131 - 16;
    list[7] = INT32_MIN;
    list[8] = INT32_MAX;
    launch(targets[_i], "gpu_clean", blocks_of(args.n_entries, ROW_BLOCK), 1, ROW_BLOCK, &args);
    for (int i = 0; i < n_rows * topk; i++) {
        int32_t was = list[i / topk * pitch + i % topk];

        ck_assert_int_eq(got[i], was >= 0 && was < 100 ? was : -1);
    }
}
END_TEST

/* ---- lists ------------------------------------------------------------------------------------ */

START_TEST(map_gives_the_slots_of_the_cpu)
{
    static const int widths[] = {1, 63, 513, 2051};
    const int n_rows = 5, n_table = 40, topk = widths[_i / 2], pitch = topk + 3;
    const char *target = targets[_i % 2];
    int32_t seq_lens[5] = {2560, 0, 100, -5, 5000};
    uint32_t want_bad[5], got_bad[5];
    struct dsk_map_args args;
    struct kit k;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    int32_t *logical = kit_alloc(&k, 4 * n_rows * pitch), *tables = kit_alloc(&k, 4 * n_rows * n_table);
    int32_t *want = kit_alloc(&k, 4 * n_rows * pitch), *got = kit_alloc(&k, 4 * n_rows * pitch);
    for (int i = 0; i < n_rows * pitch; i++)
        logical[i] = (int32_t)ref64_rng_below(&k.rng, 2800) - 40;
    for (int i = 0; i < n_rows * n_table; i++)
        tables[i] = (int32_t)ref64_rng_below(&k.rng, 54) - 2;
    logical[0] = INT32_MAX;
    args = (struct dsk_map_args){.logical = kit_addr(logical),
                                 .physical = kit_addr(want),
                                 .tables = kit_addr(tables),
                                 .seq_lens = kit_addr(seq_lens),
                                 .n_bad = kit_addr(want_bad),
                                 .logical_row_bytes = 4 * pitch,
                                 .physical_row_bytes = 4 * pitch,
                                 .table_row_bytes = 4 * n_table,
                                 .n_pages = 50,
                                 .n_rows = n_rows,
                                 .topk = topk,
                                 .n_table = n_table};
    ck_assert_int_eq(dsk_map(k.s, &args, &k.err), DSK_OK);
    launch(target, "gpu_map", (uint32_t)n_rows, 1, MAP_BLOCK,
           &(struct gpu_map_args){.logical = args.logical,
                                  .physical = kit_addr(got),
                                  .tables = args.tables,
                                  .seq_lens = args.seq_lens,
                                  .n_bad = kit_addr(got_bad),
                                  .logical_row_bytes = args.logical_row_bytes,
                                  .physical_row_bytes = args.physical_row_bytes,
                                  .table_row_bytes = args.table_row_bytes,
                                  .n_slots = args.n_pages * DSK_PAGE_TOKENS,
                                  .topk = topk,
                                  .n_table = n_table});
    gpu_expect_bytes(got, want, 4 * n_rows * pitch,
                     "map"); /* lanes past the width keep what kit_alloc put there */
    gpu_expect_bytes(got_bad, want_bad, sizeof(got_bad), "map's counts");
    kit_close(&k);
}
END_TEST

/* Empty parts hold NaN, which must not come through; one full part comes through bit for bit. */
START_TEST(merge_combines_parts)
{
    enum { N_PARTS = 4, N_ROWS = 3, H_Q = 5, D_V = 256, N = N_ROWS * H_Q };
    static float parts[N_PARTS * N * D_V], lse[N_PARTS * N], got[N * D_V], got_lse[N];

    for (int p = 0; p < N_PARTS; p++)
        for (int c = 0; c < N; c++) {
            bool is_empty = c == 0 || (c == 1 && p != 2) || (c == 2 && p % 2 == 0);

            lse[p * N + c] = is_empty ? -INFINITY : (float)(c * 3 - p * 5);
            for (int d = 0; d < D_V; d++)
                parts[(p * N + c) * D_V + d] = is_empty ? NAN : (float)(d - 100 + 17 * p) / 8;
        }
    launch(targets[_i], "gpu_merge", N_ROWS, H_Q, MERGE_BLOCK,
           &(struct gpu_merge_args){.out_parts = kit_addr(parts),
                                    .lse_parts = kit_addr(lse),
                                    .out = kit_addr(got),
                                    .lse = kit_addr(got_lse),
                                    .n_columns = N,
                                    .n_parts = N_PARTS,
                                    .d_v = D_V,
                                    .part_dtype = DSK_DTYPE_F32,
                                    .out_dtype = DSK_DTYPE_F32});
    for (int c = 0; c < N; c++) {
        double sum = 0;

        for (int p = 0; p < N_PARTS; p++)
            sum += exp((double)lse[p * N + c]);
        if (c == 0)
            ck_assert(isinf(got_lse[c]) && got_lse[c] < 0);
        else
            ck_assert_double_eq_tol((double)got_lse[c], log(sum), 1e-5);
        for (int d = 0; d < D_V; d++) {
            double want = 0;

            for (int p = 0; p < N_PARTS; p++)
                if (!isinf(lse[p * N + c]))
                    want += exp((double)lse[p * N + c]) / sum * (double)parts[(p * N + c) * D_V + d];
            KIT_EXPECT(c == 1 ? (double)got[c * D_V + d] == want
                              : fabs((double)got[c * D_V + d] - want) < 1e-4,
                       "column %d value %d is %g, not %g", c, d, (double)got[c * D_V + d], want);
        }
    }
}
END_TEST

START_TEST(argument_blocks_arrive)
{
    static struct gpu_upload_args args;
    static uint64_t block[(GPU_BLOCK_BYTES + sizeof(args.rows)) / 8];
    const struct {
        const char *kernel;
        int32_t n_rows;
    } cases[] = {{"gpu_upload_36", 36}, {"gpu_upload_144", 100}, {"gpu_upload_288", 288}};

    for (size_t i = 0; i < sizeof(args) / 8; i++)
        ((uint64_t *)(void *)&args)[i] = i * 0x9e3779b97f4a7c15u;
    for (int i = 0; i < 3; i++) {
        memset(block, 0xee, sizeof(block));
        args.block = kit_addr(block);
        args.n_rows = cases[i].n_rows;
        launch(targets[_i], cases[i].kernel, 1, 1, GPU_UPLOAD_BLOCK, &args);
        gpu_expect_bytes(block, &args.head, sizeof(args.head), cases[i].kernel);
        gpu_expect_bytes((uint8_t *)block + GPU_BLOCK_BYTES, args.rows,
                         (int64_t)(sizeof(args.rows[0]) * (size_t)cases[i].n_rows), cases[i].kernel);
        if (cases[i].n_rows < GPU_UPLOAD_ROWS)
            ck_assert_uint_eq(
                *((uint8_t *)block + GPU_BLOCK_BYTES + sizeof(args.rows[0]) * (size_t)cases[i].n_rows), 0xee);
    }
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("hip rows");
    TCase *c = tcase_create("rows"), *lists = tcase_create("lists");

    (void)max;
    tcase_set_timeout(c, 120);
    tcase_add_loop_test(c, append_writes_the_bytes_of_the_cpu, 0, N_LOOPS);
    tcase_add_loop_test(c, append_of_runs_writes_the_bytes_of_the_cpu, 0, N_LOOPS);
    tcase_add_loop_test(c, check_finds_the_first_row_that_is_not_finite, 0, N_LOOPS);
    tcase_add_loop_test(c, stored_vectors_are_reproduced_byte_for_byte, 0, 2);
    tcase_add_loop_test(c, readers_give_the_bits_of_the_cpu, 0, N_LOOPS);
    tcase_add_loop_test(c, gather_rewrites_its_list, 0, N_LOOPS);
    tcase_add_loop_test(c, clean_keeps_slots_alone, 0, 2);
    tcase_set_timeout(lists, 60);
    tcase_add_loop_test(lists, map_gives_the_slots_of_the_cpu, 0, 8);
    tcase_add_loop_test(lists, merge_combines_parts, 0, 2);
    tcase_add_loop_test(lists, argument_blocks_arrive, 0, 2);
    suite_add_tcase(suite, c);
    suite_add_tcase(suite, lists);
    suites_p[0] = suite;
    return 1;
}
