/* The GPU backends' rows, lists, merge, memory and faults against the CPU's, bit for bit where the
 * contract says so. Attend and graphs: test_gpu_attend.c. Without a device each test is skipped and says
 * why. */
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu_kit.h"

/* ---- without a device ----------------------------------------------------------------------- */

START_TEST(machine_without_a_device_says_why)
{
    const struct dsk_device_config config = {.kind = gpu_kit_kind()};
    struct dsk_device *dev = NULL;
    struct dsk_err err = {.status = DSK_OK};
    dsk_status status = dsk_device_open(&config, &dev, &err);

    if (status == DSK_OK) {
        dsk_device_close(dev);
        TEST_SKIP("this machine has a device");
    }
    ck_assert(status == DSK_E_NO_DEVICE || status == DSK_E_UNSUPPORTED);
    ck_assert_int_eq(err.status, status);
    ck_assert_str_eq(err.field, "kind");
    ck_assert_uint_gt(strlen(err.text), 10);
    ck_assert_ptr_null(dev);
}
END_TEST

START_TEST(device_says_what_it_is)
{
    struct gpu g;
    const struct dsk_device_info *info;
    const struct dsk_device_config beyond = {.kind = gpu_kit_kind(), .ordinal = 1000};
    struct dsk_device *dev;
    uint64_t used, n_free;

    GPU_OPEN(&g, 0);
    info = dsk_device_get_info(g.dev);
    ck_assert_int_eq(info->kind, gpu_kit_kind());
    ck_assert_uint_eq(strlen(info->uuid), strlen("GPU-00000000-0000-0000-0000-000000000000"));
    ck_assert_int_eq(strncmp(info->uuid, "GPU-", 4), 0);
    ck_assert_int_eq(strncmp(info->arch, info->kind == DSK_DEVICE_HIP ? "gfx" : "sm_", 3), 0);
    ck_assert_uint_gt(info->memory_bytes, (uint64_t)1 << 30);
    ck_assert_int_eq(dsk_device_open(&beyond, &dev, &g.err), DSK_E_NO_DEVICE);
    ck_assert_str_eq(g.err.field, "ordinal");
    /* Others may use the device, so only the sum is sure. */
    ck_assert_int_eq(dsk_mem_get_usage(g.dev, &used, &n_free), DSK_OK);
    ck_assert_uint_gt(used, 0);
    ck_assert_uint_gt(n_free, 0);
    ck_assert_uint_le(used + n_free, info->memory_bytes);
    ck_assert_int_eq(dsk_mem_get_usage(g.dev, NULL, &n_free), DSK_E_BAD_ARGUMENT);
    gpu_close(&g);
}
END_TEST

/* ---- append --------------------------------------------------------------------------------- */

/* Rows of all sizes, a few of them with NaN and infinities. */
static uint16_t *wild_rows(struct gpu *g, int64_t n_rows, int d_qk)
{
    uint16_t *rows = kit_bf16_normal(&g->kit, n_rows * d_qk, 1);

    for (int64_t i = 0; i < n_rows; i++) {
        float size = (float)(ref64_rng_below(&g->kit.rng, 4) == 0 ? 1e-30 : 1) * (float)(1 << (i % 20));

        for (int d = 0; d < d_qk; d++)
            rows[i * d_qk + d] = dsk_bf16_from_f32(dsk_bf16_to_f32(rows[i * d_qk + d]) * size);
        if (i % 7 == 3)
            rows[i * d_qk + ref64_rng_below(&g->kit.rng, d_qk)] =
                (uint16_t[]){0x7fc0, 0x7f80, 0xff80, 0xffff}[i % 4];
        if (i % 11 == 5)
            memset(rows + i * d_qk, i % 2 ? 0x80 : 0, 2 * (size_t)d_qk); /* zero groups, of odd bits */
    }
    return rows;
}

static void check_append(struct gpu *g, uint32_t layout_id, uint32_t rule, int32_t n_rows, int offset)
{
    const struct dsk_layout *layout = dsk_layout_get(layout_id);
    const int64_t n_slots = n_rows + 200, bytes = (n_slots + 63) / 64 * 64 * layout->row_bytes;
    struct kit_pool pool;
    uint16_t *rows = wild_rows(g, n_rows, layout->d_qk);
    int32_t *slots = kit_alloc(&g->kit, 4 * (int64_t)n_rows);
    uint32_t *n_odd = kit_alloc(&g->kit, 4 * (int64_t)n_rows),
             *got_odd = kit_alloc(&g->kit, 4 * (int64_t)n_rows);
    uint8_t *got = kit_alloc(&g->kit, bytes);
    struct dsk_append_args args;
    char what[96];

    kit_pool_fill(&g->kit, &pool, layout_id, n_slots, 0x11, 1);
    for (int32_t i = 0; i < n_rows; i++) /* duplicates and holes */
        slots[i] =
            ref64_rng_below(&g->kit.rng, 10) == 0 ? -1 : (int32_t)ref64_rng_below(&g->kit.rng, n_slots);
    args = (struct dsk_append_args){.kv = pool.kv,
                                    .rows = kit_addr(rows),
                                    .row_bytes = 2 * layout->d_qk,
                                    .slots = slots,
                                    .n_nonfinite = kit_addr(n_odd),
                                    .n_rows = n_rows,
                                    .rule = rule};
    args.kv.raw_scale = 0.037f;
    struct dsk_append_args on_gpu = args;
    on_gpu.kv.base = gpu_upload(g, pool.bytes, gpu_pool_bytes(&pool));
    on_gpu.rows = gpu_upload_at(g, rows, 2 * (int64_t)n_rows * layout->d_qk, offset);
    on_gpu.n_nonfinite = gpu_alloc(g, 4 * (int64_t)n_rows);
    gpu_must(g, dsk_append(g->kit.s, &args, &g->err));
    gpu_must(g, dsk_append(g->s, &on_gpu, &g->err));
    gpu_download(g, got, on_gpu.kv.base, gpu_pool_bytes(&pool));
    gpu_download(g, got_odd, on_gpu.n_nonfinite, 4 * (int64_t)n_rows);
    snprintf(what, sizeof(what), "append %s rule %u rows %d offset %d", layout->name, rule, n_rows, offset);
    gpu_expect_bytes(got, pool.bytes, gpu_pool_bytes(&pool), what);
    gpu_expect_bytes(got_odd, n_odd, 4 * (int64_t)n_rows, what);
}

START_TEST(append_writes_the_bytes_of_the_cpu)
{
    static const int32_t n_rows[] = {1, 33, 960, 961, 3000};
    struct gpu g;

    GPU_OPEN(&g, 0);
    for (uint32_t rule = DSK_RULE_PLAIN; rule <= DSK_RULE_POW2; rule++)
        for (int i = 0; i < 5; i++)
            check_append(&g, (uint32_t)_i, rule, n_rows[i], i == 2 ? 6 : 0);
    gpu_close(&g);
}
END_TEST

/* Large batches of neighbours, as sequences give them: pages in any order, some met twice. */
START_TEST(append_of_runs_writes_the_bytes_of_the_cpu)
{
    static const struct {
        int n_runs, length;
        bool has_twice;
    } cases[] = {{20, 64, false}, {20, 64, true},  {1200, 64, true}, {130, 64, false},
                 {3, 700, false}, {700, 3, false}, {40, 50, true}};
    struct gpu g;

    GPU_OPEN(&g, 0);
    const struct dsk_layout *layout = dsk_layout_get(DSK_LAYOUT_SCALED_256_0);
    const int n_rows = cases[_i].n_runs * cases[_i].length;
    struct kit_pool pool;
    int32_t *slots = kit_alloc(&g.kit, 4 * n_rows);
    uint16_t *rows = kit_bf16_normal(&g.kit, (int64_t)n_rows * layout->d_qk, 1);
    kit_pool_fill(&g.kit, &pool, layout->id, n_rows + 10, 0x11, 1);
    uint8_t *got = kit_alloc(&g.kit, gpu_pool_bytes(&pool));
    for (int i = 0; i < n_rows; i++) { /* runs in an odd order */
        int run = i / cases[_i].length * 7 % cases[_i].n_runs;

        slots[i] = run * cases[_i].length + i % cases[_i].length;
        if (cases[_i].has_twice && i >= n_rows - cases[_i].length)
            slots[i] = 5 + i % cases[_i].length; /* across two of the others */
        if (i % 997 > 960)
            slots[i] = -1; /* and stretches to skip */
    }
    struct dsk_append_args args = {.kv = pool.kv,
                                   .rows = kit_addr(rows),
                                   .row_bytes = 2 * layout->d_qk,
                                   .slots = slots,
                                   .n_rows = n_rows,
                                   .rule = DSK_RULE_PLAIN},
                           on_gpu = args;
    on_gpu.kv.base = gpu_upload(&g, pool.bytes, gpu_pool_bytes(&pool));
    on_gpu.rows = gpu_upload(&g, rows, 2 * (int64_t)n_rows * layout->d_qk);
    gpu_must(&g, dsk_append(g.kit.s, &args, &g.err));
    gpu_must(&g, dsk_append(g.s, &on_gpu, &g.err));
    gpu_download(&g, got, on_gpu.kv.base, gpu_pool_bytes(&pool));
    gpu_expect_bytes(got, pool.bytes, gpu_pool_bytes(&pool), "append of runs");
    gpu_close(&g);
}
END_TEST

START_TEST(strict_append_refuses_and_writes_nothing)
{
    struct gpu g;
    const struct dsk_layout *layout = dsk_layout_get((uint32_t)_i);
    const int n_rows = 1500;
    struct kit_pool pool;
    struct dsk_append_args args;
    int32_t slots[1500];
    uint8_t *got;

    GPU_OPEN(&g, 0);
    uint16_t *rows = kit_bf16_normal(&g.kit, (int64_t)n_rows * layout->d_qk, 1);
    kit_pool_fill(&g.kit, &pool, layout->id, 2000, 0x11, 1);
    got = kit_alloc(&g.kit, gpu_pool_bytes(&pool));
    for (int i = 0; i < n_rows; i++)
        slots[i] = i;
    slots[100] = -1;
    rows[100 * layout->d_qk] = 0x7fc0; /* not written, so not looked at */
    args = (struct dsk_append_args){.kv = pool.kv,
                                    .row_bytes = 2 * layout->d_qk,
                                    .slots = slots,
                                    .n_rows = n_rows,
                                    .rule = DSK_RULE_POW2,
                                    .flags = DSK_APPEND_STRICT};
    args.kv.base = gpu_upload(&g, pool.bytes, gpu_pool_bytes(&pool));
    args.kv.raw_scale = 1;
    rows[1234 * layout->d_qk + layout->d_qk - 1] = 0xff80;
    rows[1400 * layout->d_qk] = 0xff80;
    args.rows = gpu_upload(&g, rows, 2 * (int64_t)n_rows * layout->d_qk);
    ck_assert_int_eq(dsk_append(g.s, &args, &g.err), DSK_E_NONFINITE);
    ck_assert_str_eq(g.err.value, "1234");
    gpu_download(&g, got, args.kv.base, gpu_pool_bytes(&pool));
    gpu_expect_bytes(got, pool.bytes, gpu_pool_bytes(&pool), "refused append");
    args.n_rows = 1234;
    gpu_must(&g, dsk_append(g.s, &args, &g.err));
    gpu_download(&g, got, args.kv.base, gpu_pool_bytes(&pool));
    ck_assert_int_ne(memcmp(got, pool.bytes, (size_t)layout->row_bytes), 0);
    gpu_close(&g);
}
END_TEST

/* ---- readers -------------------------------------------------------------------------------- */

/* Rows of random bytes: every code, NaN among them, and scales of any finite size. */
static void random_rows(struct gpu *g, struct kit_pool *pool, uint32_t layout, int64_t n_slots)
{
    kit_pool_fill(&g->kit, pool, layout, n_slots, 0, 1);
    for (int64_t slot = 0; slot < n_slots; slot++) {
        uint8_t *row = kit_pool_row(pool, slot);

        for (int i = 0; i < pool->layout->row_bytes; i++)
            row[i] = (uint8_t)ref64_rng_below(&g->kit.rng, 256);
        for (int i = 0; i < pool->layout->n_groups; i++) {
            float scale =
                ldexpf(1 + (float)ref64_rng_unit(&g->kit.rng), (int)ref64_rng_below(&g->kit.rng, 200) - 110);

            memcpy(row + pool->layout->latent + 4 * i, &scale, 4);
        }
    }
    pool->kv.raw_scale = 0.0371f;
}

static void check_read(struct gpu *g, const struct kit_pool *pool, struct dsk_read_args args,
                       const int32_t *list, int offset)
{
    const int64_t bytes = args.n_rows * 2 * pool->layout->d_qk;
    uint8_t *want = kit_alloc(&g->kit, bytes), *got = kit_alloc(&g->kit, bytes);
    struct dsk_read_args on_gpu = args;
    char what[96];

    args.kv = pool->kv;
    args.list = kit_addr(list);
    args.out = kit_addr(want);
    on_gpu.kv = pool->kv;
    on_gpu.kv.base = gpu_upload(g, pool->bytes, gpu_pool_bytes(pool));
    on_gpu.list = gpu_upload(g, list, 4 * (int64_t)args.n_list);
    on_gpu.out = gpu_upload_at(g, want, bytes, offset);
    gpu_must(g, dsk_read(g->kit.s, &args, &g->err));
    gpu_must(g, dsk_read(g->s, &on_gpu, &g->err));
    gpu_download(g, got, on_gpu.out, bytes);
    snprintf(what, sizeof(what), "read %s mode %d offset %d", pool->layout->name, args.mode, offset);
    gpu_expect_bytes(got, want, bytes, what);
}

START_TEST(readers_give_the_bits_of_the_cpu)
{
    struct gpu g;
    struct kit_pool pool;
    int32_t list[777], table[12] = {3, 0, 9, 1, -1, 2, 100, 5, 7, 4, 8, 6};

    GPU_OPEN(&g, 0);
    random_rows(&g, &pool, (uint32_t)_i, 600);
    for (int i = 0; i < 777; i++)
        list[i] = (int32_t)ref64_rng_below(&g.kit.rng, 620) - 10;
    for (int offset = 0; offset <= 2; offset += 2) {
        check_read(&g, &pool, (struct dsk_read_args){.n_rows = 599, .mode = DSK_READ_FULL}, NULL, offset);
        check_read(&g, &pool,
                   (struct dsk_read_args){.n_rows = 700, .first = 37, .n_list = 12, .mode = DSK_READ_PAGED},
                   table, offset);
        check_read(&g, &pool, (struct dsk_read_args){.n_rows = 777, .n_list = 777, .mode = DSK_READ_SELECTED},
                   list, offset);
    }
    gpu_close(&g);
}
END_TEST

static void check_gather(struct gpu *g, const struct kit_pool *pool, int32_t n_rows, int32_t topk, int pad,
                         int branch)
{
    const int64_t n = (int64_t)n_rows * topk, pitch = topk + pad, d_qk = pool->layout->d_qk;
    const int64_t bytes = (n > pool->kv.n_slots ? n : pool->kv.n_slots) * 2 * d_qk;
    int32_t *list = kit_alloc(&g->kit, 4 * n_rows * pitch), *want_list = kit_alloc(&g->kit, 4 * n);
    int32_t *got_list = kit_alloc(&g->kit, 4 * n);
    uint8_t *want = kit_alloc(&g->kit, bytes), *got = kit_alloc(&g->kit, bytes);
    int64_t n_want = -1, n_got = -1;
    struct dsk_gather_args args, on_gpu;

    for (int64_t i = 0; i < n_rows * pitch; i++)
        list[i] = (int32_t)ref64_rng_below(&g->kit.rng, pool->kv.n_slots + 20) - 10;
    args = (struct dsk_gather_args){.kv = pool->kv,
                                    .indices = kit_addr(list),
                                    .new_indices = kit_addr(want_list),
                                    .workspace = kit_addr(want),
                                    .workspace_bytes = (uint64_t)bytes,
                                    .indices_row_bytes = 4 * pitch,
                                    .n_rows = n_rows,
                                    .topk = topk,
                                    .branch = branch,
                                    .n_workspace_p = &n_want};
    on_gpu = args;
    on_gpu.kv.base = gpu_upload(g, pool->bytes, gpu_pool_bytes(pool));
    on_gpu.indices = gpu_upload(g, list, 4 * n_rows * pitch);
    on_gpu.new_indices = pad == 0 ? on_gpu.indices : gpu_alloc(g, 4 * n); /* in place where that may be */
    on_gpu.workspace = gpu_upload(g, want, bytes);
    on_gpu.n_workspace_p = &n_got;
    gpu_must(g, dsk_gather(g->kit.s, &args, &g->err));
    gpu_must(g, dsk_gather(g->s, &on_gpu, &g->err));
    ck_assert_int_eq(n_got, n_want);
    gpu_download(g, got_list, on_gpu.new_indices, 4 * n);
    gpu_download(g, got, on_gpu.workspace, bytes);
    gpu_expect_bytes(got_list, want_list, 4 * n, "gather's list");
    gpu_expect_bytes(got, want, bytes, "gather's workspace");
}

START_TEST(gather_gives_the_bits_of_the_cpu)
{
    struct gpu g;
    struct kit_pool pool;

    GPU_OPEN(&g, 0);
    random_rows(&g, &pool, (uint32_t)_i, 500);
    for (int branch = 0; branch <= 2; branch++) {
        check_gather(&g, &pool, 3, 65, 0, branch);
        check_gather(&g, &pool, 4, 200, 5, branch);
    }
    gpu_close(&g);
}
END_TEST

START_TEST(copied_rows_arrive)
{
    struct gpu g;
    struct kit_pool pool;
    struct dsk_copy_rows_args args = {.src_slot = 65, .dst_slot = 130, .n_rows = 61};

    GPU_OPEN(&g, 0);
    random_rows(&g, &pool, (uint32_t)_i, 200);
    uint8_t *got = kit_alloc(&g.kit, gpu_pool_bytes(&pool));
    args.kv = pool.kv;
    args.kv.base = gpu_upload(&g, pool.bytes, gpu_pool_bytes(&pool));
    gpu_must(&g, dsk_copy_rows(g.s, &args, &g.err));
    gpu_download(&g, got, args.kv.base, gpu_pool_bytes(&pool));
    args.kv.base = pool.kv.base;
    gpu_must(&g, dsk_copy_rows(g.kit.s, &args, &g.err));
    gpu_expect_bytes(got, pool.bytes, gpu_pool_bytes(&pool), "copied rows");
    gpu_close(&g);
}
END_TEST

/* ---- map and merge --------------------------------------------------------------------------- */

START_TEST(map_gives_the_slots_of_the_cpu)
{
    static const int widths[] = {1, 63, 513, 2051};
    const int n_rows = 5, n_table = 40, topk = widths[_i], pitch = topk + 3;
    struct gpu g;
    struct dsk_map_args args, on_gpu;

    GPU_OPEN(&g, 0);
    int32_t *logical = kit_alloc(&g.kit, 4 * n_rows * pitch),
            *tables = kit_alloc(&g.kit, 4 * n_rows * n_table);
    int32_t *want = kit_alloc(&g.kit, 4 * n_rows * pitch), *got = kit_alloc(&g.kit, 4 * n_rows * pitch);
    int32_t seq_lens[5] = {2560, 0, 100, -5, 5000};
    uint32_t want_bad[5], got_bad[5];
    for (int i = 0; i < n_rows * pitch; i++)
        logical[i] = (int32_t)ref64_rng_below(&g.kit.rng, 2800) - 40;
    for (int i = 0; i < n_rows * n_table; i++)
        tables[i] = (int32_t)ref64_rng_below(&g.kit.rng, 54) - 2;
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
    on_gpu = args;
    on_gpu.logical = gpu_upload(&g, logical, 4 * n_rows * pitch);
    on_gpu.physical = gpu_upload(&g, want, 4 * n_rows * pitch);
    on_gpu.tables = gpu_upload(&g, tables, 4 * n_rows * n_table);
    on_gpu.seq_lens = gpu_upload(&g, seq_lens, sizeof(seq_lens));
    on_gpu.n_bad = gpu_alloc(&g, sizeof(got_bad));
    gpu_must(&g, dsk_map(g.kit.s, &args, &g.err));
    gpu_must(&g, dsk_map(g.s, &on_gpu, &g.err));
    gpu_download(&g, got, on_gpu.physical, 4 * n_rows * pitch);
    gpu_download(&g, got_bad, on_gpu.n_bad, sizeof(got_bad));
    gpu_expect_bytes(got, want, 4 * n_rows * pitch, "map");
    gpu_expect_bytes(got_bad, want_bad, sizeof(got_bad), "map's counts");
    gpu_close(&g);
}
END_TEST

static void check_merge(struct gpu *g, int n_parts, int d_v, bool is_bf16)
{
    const int n_rows = 3, h_q = 5;
    const int64_t n = n_rows * h_q, n_out = n * d_v;
    float *parts = kit_alloc(&g->kit, 4 * n_parts * n_out), *lse = kit_alloc(&g->kit, 4 * n_parts * n);
    float *got = kit_alloc(&g->kit, 4 * n_out), *got_lse = kit_alloc(&g->kit, 4 * n);
    double *want = kit_alloc(&g->kit, 8 * n_out), *want_lse = kit_alloc(&g->kit, 8 * n);
    struct dsk_merge_args args = {.n_parts = n_parts,
                                  .n_rows = n_rows,
                                  .h_q = h_q,
                                  .d_v = d_v,
                                  .part_dtype = DSK_DTYPE_F32,
                                  .out_dtype = is_bf16 ? DSK_DTYPE_BF16 : DSK_DTYPE_F32};

    for (int64_t i = 0; i < n_parts * n_out; i++)
        parts[i] = (float)ref64_rng_normal(&g->kit.rng);
    for (int64_t i = 0; i < n_parts * n; i++) {
        lse[i] = (float)(5 * ref64_rng_normal(&g->kit.rng));
        if (i % n == 2 || ref64_rng_below(&g->kit.rng, 3) == 0) { /* column 2 is empty throughout */
            lse[i] = -INFINITY;
            memset(parts + i * d_v, 0xff, 4 * (size_t)d_v);
        }
    }
    ref64_merge(parts, lse, n_parts, n, d_v, want, want_lse);
    args.out_parts = gpu_upload(g, parts, 4 * n_parts * n_out);
    args.lse_parts = gpu_upload(g, lse, 4 * n_parts * n);
    args.out = gpu_alloc(g, 4 * n_out);
    args.lse = gpu_alloc(g, 4 * n);
    gpu_must(g, dsk_merge(g->s, &args, &g->err));
    gpu_download(g, got, args.out, (is_bf16 ? 2 : 4) * n_out);
    if (is_bf16) {
        float *wide = kit_alloc(&g->kit, 4 * n_out);

        ref64_bf16_to_f32((uint16_t *)(void *)got, wide, n_out);
        got = wide;
    }
    gpu_download(g, got_lse, args.lse, 4 * n);
    kit_expect_out(got, want, n_out, "merge");
    kit_expect_lse(got_lse, want_lse, n, "merge");
}

START_TEST(merge_combines_parts)
{
    struct gpu g;

    GPU_OPEN(&g, 0);
    for (int n_parts = 1; n_parts < 40; n_parts += 6)
        check_merge(&g, n_parts, n_parts % 2 ? 512 : 37, n_parts % 4 == 1);
    gpu_close(&g);
}
END_TEST

START_TEST(single_part_passes_bit_for_bit)
{
    const int d_v = 100, n = 7;
    struct gpu g;
    uint32_t parts[2 * 7 * 100], got[7 * 100];
    float lse[14], got_lse[7];
    struct dsk_merge_args args = {.n_parts = 2,
                                  .n_rows = 1,
                                  .h_q = n,
                                  .d_v = d_v,
                                  .part_dtype = DSK_DTYPE_F32,
                                  .out_dtype = DSK_DTYPE_F32};

    GPU_OPEN(&g, 0);
    for (int i = 0; i < 2 * n * d_v; i++)
        parts[i] = (uint32_t)ref64_rng_u64(&g.kit.rng); /* NaN payloads as well */
    for (int i = 0; i < 2 * n; i++)
        lse[i] = (i < n) == (i % n % 2 == 0) ? (float)i - 3 : -INFINITY;
    args.out_parts = gpu_upload(&g, parts, sizeof(parts));
    args.lse_parts = gpu_upload(&g, lse, sizeof(lse));
    args.out = gpu_alloc(&g, sizeof(got));
    args.lse = gpu_alloc(&g, sizeof(got_lse));
    gpu_must(&g, dsk_merge(g.s, &args, &g.err));
    gpu_download(&g, got, args.out, sizeof(got));
    gpu_download(&g, got_lse, args.lse, sizeof(got_lse));
    for (int i = 0; i < n; i++) {
        int part = i % 2 == 0 ? 0 : 1;

        gpu_expect_bytes(got + i * d_v, parts + (part * n + i) * d_v, 4 * d_v, "the only part");
        gpu_expect_bytes(&got_lse[i], &lse[part * n + i], 4, "its lse");
    }
    gpu_close(&g);
}
END_TEST

/* ---- memory ----------------------------------------------------------------------------------- */

START_TEST(pool_beyond_four_gigabytes)
{
    const struct dsk_layout *layout = dsk_layout_get((uint32_t)_i);
    const int64_t n_slots = ((int64_t)9 << 29) / layout->row_bytes / 64 * 64; /* 4.5 GiB */
    struct gpu g;
    struct kit_pool pool;
    struct gpu_case near, far;
    int32_t slots[64];

    GPU_OPEN_ATTEND(&g, 0);
    kit_pool_make(&g.kit, &pool, layout->id, 64, 1);
    near = (struct gpu_case){.a = gpu_shape(&g, &pool, 2, 16, 64)};
    gpu_case_init(&g, &near, 0);
    far = near;
    far.args.segs = &far.seg;
    far.args.kv.n_slots = n_slots;
    far.args.kv.base = gpu_alloc(&g, n_slots * layout->row_bytes);
    for (int i = 0; i < 64; i++) /* the last page, and every slot of it through an append of bf16 rows */
        slots[i] = (int32_t)(n_slots - 64 + i);
    uint16_t *rows = kit_bf16_normal(&g.kit, 64LL * layout->d_qk, 1);
    struct dsk_append_args append = {.kv = far.args.kv,
                                     .rows = gpu_upload(&g, rows, 128LL * layout->d_qk),
                                     .row_bytes = 2 * layout->d_qk,
                                     .slots = slots,
                                     .n_rows = 64,
                                     .rule = DSK_RULE_POW2};
    gpu_must(&g, dsk_append(g.s, &append, &g.err));
    append.kv = near.args.kv;
    for (int i = 0; i < 64; i++)
        slots[i] = i;
    gpu_must(&g, dsk_append(g.s, &append, &g.err));
    gpu_case_launch(&g, &near);
    gpu_case_fetch(&g, &near);
    int32_t *moved = kit_alloc(&g.kit, 4 * 128);
    for (int i = 0; i < 128; i++)
        moved[i] = near.a.indices[i] < 0 ? -1 : (int32_t)(n_slots - 64) + near.a.indices[i];
    far.out = kit_alloc(&g.kit, far.out_bytes);
    far.seg.indices = gpu_upload(&g, moved, 4 * 128);
    gpu_case_launch(&g, &far);
    gpu_case_fetch(&g, &far);
    gpu_expect_bytes(far.out, near.out, near.out_bytes, "rows at the end of a large pool");
    gpu_close(&g);
}
END_TEST

START_TEST(registered_host_memory_is_read_and_written)
{
    struct gpu g;
    struct kit_pool pool;
    uint64_t q, out;

    GPU_OPEN_ATTEND(&g, 0);
    kit_pool_make(&g.kit, &pool, DSK_LAYOUT_SCALED_512_64, 256, 1);
    struct gpu_case r = {.a = gpu_shape(&g, &pool, 3, 8, 100)};
    gpu_case_init(&g, &r, 0);
    gpu_must(&g, dsk_host_register(g.dev, r.a.q, (uint64_t)3 * 8 * 576 * 2, &q));
    uint8_t *host = aligned_alloc(4096, 1 << 16);
    ck_assert_ptr_nonnull(host);
    gpu_must(&g, dsk_host_register(g.dev, host, 1 << 16, &out));
    memset(host, 0xee, 1 << 16);
    r.seg.q = q;
    r.seg.out = out;
    gpu_must(&g, dsk_attend(g.s, &r.args, &g.err));
    gpu_must(&g, dsk_stream_sync(g.s));
    memcpy(r.out, host, (size_t)r.out_bytes);
    gpu_download(&g, r.lse, r.seg.lse, r.lse_bytes);
    gpu_download(&g, r.n_bad, r.seg.n_bad, 12);
    gpu_case_compare(&g, &r, "registered memory");
    ck_assert_int_eq(host[r.out_bytes], 0xee);
    dsk_host_unregister(g.dev, r.a.q);
    dsk_host_unregister(g.dev, host);
    free(host);
    gpu_close(&g);
}
END_TEST

/* What is written through one mapping is read through another, also after the first is gone; strangers' descriptors are
 * refused and the device lives on. */
START_TEST(memory_is_shared_by_descriptor)
{
    struct gpu g;
    struct gpu_share mine, theirs, none;
    uint32_t words[2] = {0x12345678, 0};
    int fd, null = open("/dev/null", O_RDWR);

    GPU_OPEN(&g, 0);
    gpu_must(&g, dsk_gpu_share_alloc(g.dev, 100000, &mine, &g.err));
    ck_assert_uint_ge(mine.bytes, 100000);
    gpu_must(&g, dsk_gpu_share_export(g.dev, &mine, &fd, &g.err));
    ck_assert_int_ge(fd, 0);
    gpu_must(&g, dsk_gpu_share_import(g.dev, fd, mine.bytes, &theirs, &g.err));
    ck_assert_int_eq(dsk_gpu_share_import(g.dev, fd, 1000 * mine.bytes, &none, &g.err), DSK_E_UNSUPPORTED);
    ck_assert_int_eq(dsk_gpu_share_import(g.dev, null, 4096, &none, &g.err), DSK_E_UNSUPPORTED);
    ck_assert_str_eq(g.err.field, "fd");
    close(fd);
    close(null);
    ck_assert_uint_ne(mine.addr, theirs.addr);
    gpu_must(&g, dsk_copy_in(g.s, mine.addr + 99996, &words[0], 4));
    gpu_must(&g, dsk_stream_sync(g.s));
    dsk_gpu_share_free(g.dev, &mine);
    gpu_download(&g, &words[1], theirs.addr + 99996, 4);
    ck_assert_uint_eq(words[0], words[1]);
    dsk_gpu_share_free(g.dev, &theirs);
    gpu_close(&g);
}
END_TEST

/* ---- faults ------------------------------------------------------------------------------------ */

START_TEST(fault_retires_the_device_alone)
{
    struct gpu g;
    struct dsk_event *event;
    struct kit_pool pool;
    uint64_t addr = 0;
    bool is_done = false;

    GPU_OPEN(&g, 0);
    kit_pool_make(&g.kit, &pool, DSK_LAYOUT_SCALED_256_0, 64, 1);
    struct gpu_case r = {.a = gpu_shape(&g, &pool, 1, 1, 8)};
    gpu_case_init(&g, &r, 0);
    gpu_must(&g, dsk_event_create(g.dev, &event));
    gpu_must(&g, dsk_gpu_inject_fault(g.s));
    (void)!dsk_event_record(event, g.s); /* may know already */
    ck_assert_int_eq(dsk_stream_sync(g.s), DSK_E_DEVICE);
    ck_assert_int_eq(dsk_event_is_done(event, &is_done), DSK_E_DEVICE);
    ck_assert(is_done);
    ck_assert_int_eq(dsk_attend(g.s, &r.args, &g.err), DSK_E_DEVICE);
    ck_assert_int_eq(dsk_mem_alloc(g.dev, 64, &addr), DSK_E_DEVICE);
    ck_assert_int_eq(dsk_mem_set(g.s, r.seg.out, 0, 4), DSK_E_DEVICE);
    dsk_event_destroy(event);
    gpu_close(&g);
    /* The driver may refuse this process another context; that, too, is an answer, and the CPU serves on. */
    const struct dsk_device_config config = {.kind = gpu_kit_kind()};
    dsk_status status = dsk_device_open(&config, &g.dev, &g.err);
    ck_assert(status == DSK_OK || status == DSK_E_NO_DEVICE);
    if (status == DSK_OK)
        dsk_device_close(g.dev);
    else
        ck_assert_str_eq(g.err.field, gpu_kit_kind() == DSK_DEVICE_HIP ? "kind" : "ordinal");
    ck_assert(kit_open(&g.kit, DSK_ISA_AUTO, 1));
    kit_close(&g.kit);
}
END_TEST

/* ---- all --------------------------------------------------------------------------------------- */

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("gpu");
    TCase *c = tcase_create("gpu");

    (void)max;
    setenv("CK_FORK", "no", 1);
#ifdef GPU_KIT_FAKE_HIP
    gpu_kit_use_fake_hip();
#endif
    tcase_set_timeout(c, 120);
    tcase_add_test(c, machine_without_a_device_says_why);
    tcase_add_test(c, device_says_what_it_is);
    tcase_add_loop_test(c, append_writes_the_bytes_of_the_cpu, 1, DSK_LAYOUT_COUNT);
    tcase_add_loop_test(c, append_of_runs_writes_the_bytes_of_the_cpu, 0, 7);
    tcase_add_loop_test(c, strict_append_refuses_and_writes_nothing, 1, DSK_LAYOUT_COUNT);
    tcase_add_loop_test(c, readers_give_the_bits_of_the_cpu, 1, DSK_LAYOUT_COUNT);
    tcase_add_loop_test(c, gather_gives_the_bits_of_the_cpu, 1, DSK_LAYOUT_COUNT);
    tcase_add_loop_test(c, copied_rows_arrive, 1, DSK_LAYOUT_COUNT);
    tcase_add_loop_test(c, map_gives_the_slots_of_the_cpu, 0, 4);
    tcase_add_test(c, merge_combines_parts);
    tcase_add_test(c, single_part_passes_bit_for_bit);
    tcase_add_loop_test(c, pool_beyond_four_gigabytes, 1, DSK_LAYOUT_COUNT);
    tcase_add_test(c, registered_host_memory_is_read_and_written);
    tcase_add_test(c, memory_is_shared_by_descriptor);
    tcase_add_test(c, fault_retires_the_device_alone);
    suite_add_tcase(suite, c);
    suites_p[0] = suite;
    return 1;
}
