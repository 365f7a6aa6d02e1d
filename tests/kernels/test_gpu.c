/* The GPU backends against the CPU's: bit for bit where the contract says so, against float64 for attend and merge.
 * Without a device each test is skipped and says why. Nothing forks: a driver does not survive that. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/gpu/gpu.h"
#include "kit.h"

/* ---- a GPU beside the kit's CPU ------------------------------------------------------------- */

#define MAX_BLOCKS 512

struct gpu {
    struct kit kit;
    struct dsk_device *dev;
    struct dsk_stream *s;
    struct dsk_err err;
    int n_blocks;
    uint64_t blocks[MAX_BLOCKS];
};

static bool gpu_open(struct gpu *g, uint32_t flags)
{
    const struct dsk_device_config config = {.kind = DSK_DEVICE_CUDA, .flags = flags};
    dsk_status status;

    memset(g, 0, sizeof(*g));
    status = dsk_device_open(&config, &g->dev, &g->err);
    if (status != DSK_OK)
        return false;
    ck_assert_int_eq(dsk_stream_create(g->dev, &g->s), DSK_OK);
    ck_assert(kit_open(&g->kit, DSK_ISA_AUTO, 0));
    return true;
}

static void gpu_close(struct gpu *g)
{
    for (int i = 0; i < g->n_blocks; i++)
        dsk_mem_free(g->dev, g->blocks[i]);
    dsk_stream_destroy(g->s);
    dsk_device_close(g->dev);
    kit_close(&g->kit);
}

#define GPU_OPEN(g, flags)                                                                                   \
    do {                                                                                                     \
        if (!gpu_open(g, flags))                                                                             \
            TEST_SKIP("%s", (g)->err.text);                                                                  \
    } while (0)

static void must(struct gpu *g, dsk_status status)
{
    KIT_EXPECT(status == DSK_OK, "%s: %s = %s: %s", dsk_status_name(status), g->err.field, g->err.value,
               g->err.text);
}

static uint64_t device_alloc(struct gpu *g, int64_t bytes)
{
    ck_assert_int_lt(g->n_blocks, MAX_BLOCKS);
    must(g, dsk_mem_alloc(g->dev, (uint64_t)bytes + 64, &g->blocks[g->n_blocks]));
    return g->blocks[g->n_blocks++];
}

/* offset: bytes past an aligned address. */
static uint64_t upload_at(struct gpu *g, const void *host, int64_t bytes, int offset)
{
    uint64_t addr = device_alloc(g, bytes) + (uint64_t)offset;

    must(g, dsk_copy_in(g->s, addr, host, (uint64_t)bytes));
    must(g, dsk_stream_sync(g->s));
    return addr;
}

static uint64_t upload(struct gpu *g, const void *host, int64_t bytes)
{
    return host == NULL ? 0 : upload_at(g, host, bytes, 0);
}

static void download(struct gpu *g, void *host, uint64_t addr, int64_t bytes)
{
    must(g, dsk_copy_out(g->s, host, addr, (uint64_t)bytes));
    must(g, dsk_stream_sync(g->s));
}

static int64_t pool_bytes(const struct kit_pool *pool)
{
    if (pool->kv.page_pitch_bytes == 64 * (int64_t)pool->layout->row_bytes)
        return pool->kv.n_slots * pool->layout->row_bytes;
    return (pool->kv.n_slots + 63) / 64 * pool->kv.page_pitch_bytes;
}

static void expect_bytes(const void *got, const void *want, int64_t n, const char *what)
{
    for (int64_t i = 0; i < n; i++)
        KIT_EXPECT(((const uint8_t *)got)[i] == ((const uint8_t *)want)[i],
                   "%s: byte %lld of %lld is %02x, not %02x", what, (long long)i, (long long)n,
                   ((const uint8_t *)got)[i], ((const uint8_t *)want)[i]);
}

/* ---- without a device ----------------------------------------------------------------------- */

START_TEST(machine_without_a_device_says_why)
{
    const struct dsk_device_config config = {.kind = DSK_DEVICE_CUDA};
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
    const struct dsk_device_config beyond = {.kind = DSK_DEVICE_CUDA, .ordinal = 1000};
    struct dsk_device *dev;

    GPU_OPEN(&g, 0);
    info = dsk_device_get_info(g.dev);
    ck_assert_int_eq(info->kind, DSK_DEVICE_CUDA);
    ck_assert_uint_eq(strlen(info->uuid), strlen("GPU-00000000-0000-0000-0000-000000000000"));
    ck_assert_int_eq(strncmp(info->uuid, "GPU-", 4), 0);
    ck_assert_int_eq(strncmp(info->arch, "sm_", 3), 0);
    ck_assert_uint_gt(info->memory_bytes, (uint64_t)1 << 30);
    ck_assert_int_eq(dsk_device_open(&beyond, &dev, &g.err), DSK_E_NO_DEVICE);
    ck_assert_str_eq(g.err.field, "ordinal");
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
    on_gpu.kv.base = upload(g, pool.bytes, pool_bytes(&pool));
    on_gpu.rows = upload_at(g, rows, 2 * (int64_t)n_rows * layout->d_qk, offset);
    on_gpu.n_nonfinite = device_alloc(g, 4 * (int64_t)n_rows);
    must(g, dsk_append(g->kit.s, &args, &g->err));
    must(g, dsk_append(g->s, &on_gpu, &g->err));
    download(g, got, on_gpu.kv.base, pool_bytes(&pool));
    download(g, got_odd, on_gpu.n_nonfinite, 4 * (int64_t)n_rows);
    snprintf(what, sizeof(what), "append %s rule %u rows %d offset %d", layout->name, rule, n_rows, offset);
    expect_bytes(got, pool.bytes, pool_bytes(&pool), what);
    expect_bytes(got_odd, n_odd, 4 * (int64_t)n_rows, what);
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
    uint8_t *got = kit_alloc(&g.kit, pool_bytes(&pool));
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
    on_gpu.kv.base = upload(&g, pool.bytes, pool_bytes(&pool));
    on_gpu.rows = upload(&g, rows, 2 * (int64_t)n_rows * layout->d_qk);
    must(&g, dsk_append(g.kit.s, &args, &g.err));
    must(&g, dsk_append(g.s, &on_gpu, &g.err));
    download(&g, got, on_gpu.kv.base, pool_bytes(&pool));
    expect_bytes(got, pool.bytes, pool_bytes(&pool), "append of runs");
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
    got = kit_alloc(&g.kit, pool_bytes(&pool));
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
    args.kv.base = upload(&g, pool.bytes, pool_bytes(&pool));
    args.kv.raw_scale = 1;
    rows[1234 * layout->d_qk + layout->d_qk - 1] = 0xff80;
    rows[1400 * layout->d_qk] = 0xff80;
    args.rows = upload(&g, rows, 2 * (int64_t)n_rows * layout->d_qk);
    ck_assert_int_eq(dsk_append(g.s, &args, &g.err), DSK_E_NONFINITE);
    ck_assert_str_eq(g.err.value, "1234");
    download(&g, got, args.kv.base, pool_bytes(&pool));
    expect_bytes(got, pool.bytes, pool_bytes(&pool), "refused append");
    args.n_rows = 1234;
    must(&g, dsk_append(g.s, &args, &g.err));
    download(&g, got, args.kv.base, pool_bytes(&pool));
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
    on_gpu.kv.base = upload(g, pool->bytes, pool_bytes(pool));
    on_gpu.list = upload(g, list, 4 * (int64_t)args.n_list);
    on_gpu.out = upload_at(g, want, bytes, offset);
    must(g, dsk_read(g->kit.s, &args, &g->err));
    must(g, dsk_read(g->s, &on_gpu, &g->err));
    download(g, got, on_gpu.out, bytes);
    snprintf(what, sizeof(what), "read %s mode %d offset %d", pool->layout->name, args.mode, offset);
    expect_bytes(got, want, bytes, what);
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
    on_gpu.kv.base = upload(g, pool->bytes, pool_bytes(pool));
    on_gpu.indices = upload(g, list, 4 * n_rows * pitch);
    on_gpu.new_indices = pad == 0 ? on_gpu.indices : device_alloc(g, 4 * n); /* in place where that may be */
    on_gpu.workspace = upload(g, want, bytes);
    on_gpu.n_workspace_p = &n_got;
    must(g, dsk_gather(g->kit.s, &args, &g->err));
    must(g, dsk_gather(g->s, &on_gpu, &g->err));
    ck_assert_int_eq(n_got, n_want);
    download(g, got_list, on_gpu.new_indices, 4 * n);
    download(g, got, on_gpu.workspace, bytes);
    expect_bytes(got_list, want_list, 4 * n, "gather's list");
    expect_bytes(got, want, bytes, "gather's workspace");
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
    uint8_t *got = kit_alloc(&g.kit, pool_bytes(&pool));
    args.kv = pool.kv;
    args.kv.base = upload(&g, pool.bytes, pool_bytes(&pool));
    must(&g, dsk_copy_rows(g.s, &args, &g.err));
    download(&g, got, args.kv.base, pool_bytes(&pool));
    args.kv.base = pool.kv.base;
    must(&g, dsk_copy_rows(g.kit.s, &args, &g.err));
    expect_bytes(got, pool.bytes, pool_bytes(&pool), "copied rows");
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
    on_gpu.logical = upload(&g, logical, 4 * n_rows * pitch);
    on_gpu.physical = upload(&g, want, 4 * n_rows * pitch);
    on_gpu.tables = upload(&g, tables, 4 * n_rows * n_table);
    on_gpu.seq_lens = upload(&g, seq_lens, sizeof(seq_lens));
    on_gpu.n_bad = device_alloc(&g, sizeof(got_bad));
    must(&g, dsk_map(g.kit.s, &args, &g.err));
    must(&g, dsk_map(g.s, &on_gpu, &g.err));
    download(&g, got, on_gpu.physical, 4 * n_rows * pitch);
    download(&g, got_bad, on_gpu.n_bad, sizeof(got_bad));
    expect_bytes(got, want, 4 * n_rows * pitch, "map");
    expect_bytes(got_bad, want_bad, sizeof(got_bad), "map's counts");
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
    args.out_parts = upload(g, parts, 4 * n_parts * n_out);
    args.lse_parts = upload(g, lse, 4 * n_parts * n);
    args.out = device_alloc(g, 4 * n_out);
    args.lse = device_alloc(g, 4 * n);
    must(g, dsk_merge(g->s, &args, &g->err));
    download(g, got, args.out, (is_bf16 ? 2 : 4) * n_out);
    if (is_bf16) {
        float *wide = kit_alloc(&g->kit, 4 * n_out);

        ref64_bf16_to_f32((uint16_t *)(void *)got, wide, n_out);
        got = wide;
    }
    download(g, got_lse, args.lse, 4 * n);
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
    args.out_parts = upload(&g, parts, sizeof(parts));
    args.lse_parts = upload(&g, lse, sizeof(lse));
    args.out = device_alloc(&g, sizeof(got));
    args.lse = device_alloc(&g, sizeof(got_lse));
    must(&g, dsk_merge(g.s, &args, &g.err));
    download(&g, got, args.out, sizeof(got));
    download(&g, got_lse, args.lse, sizeof(got_lse));
    for (int i = 0; i < n; i++) {
        int part = i % 2 == 0 ? 0 : 1;

        expect_bytes(got + i * d_v, parts + (part * n + i) * d_v, 4 * d_v, "the only part");
        expect_bytes(&got_lse[i], &lse[part * n + i], 4, "its lse");
    }
    gpu_close(&g);
}
END_TEST

/* ---- attend ---------------------------------------------------------------------------------- */

/* A kit_attend on the GPU. Addresses of what was uploaded stay in seg, so that a test can change one. */
struct run {
    struct kit_attend a;
    struct dsk_attend_seg seg;
    struct dsk_attend_args args;
    int64_t out_bytes, lse_bytes;
    uint8_t *out;
    float *lse;
    uint32_t *n_bad;
};

static void run_init(struct gpu *g, struct run *r, int offset)
{
    struct kit_attend *a = &r->a;
    const struct ref64_layout *layout = a->pool->layout;
    const int elem = a->out_dtype == DSK_DTYPE_F32 ? 4 : 2;
    const int64_t n = (int64_t)a->n_rows * a->h_q;

    r->out_bytes = n * layout->d_v * elem;
    r->lse_bytes = 4 * n;
    r->out = kit_alloc(&g->kit, r->out_bytes);
    r->lse = kit_alloc(&g->kit, r->lse_bytes);
    r->n_bad = kit_alloc(&g->kit, 4 * a->n_rows);
    r->seg = kit_attend_seg(&g->kit, a);
    r->seg.q = upload_at(g, a->q, 2 * n * layout->d_qk, offset);
    r->seg.indices = upload(g, a->indices, 4 * (int64_t)a->n_rows * a->topk);
    r->seg.lengths = upload(g, a->lengths, 4 * (int64_t)a->n_rows);
    r->seg.sink = upload(g, a->sink, 4 * (int64_t)a->h_q);
    r->seg.table = upload(g, a->table, 4 * (int64_t)a->n_table);
    r->seg.out = device_alloc(g, r->out_bytes) + (uint64_t)(offset == 0 ? 0 : elem);
    r->seg.lse = device_alloc(g, r->lse_bytes);
    r->seg.n_bad = device_alloc(g, 4 * (int64_t)a->n_rows);
    r->args = (struct dsk_attend_args){.kv = a->pool->kv,
                                       .segs = &r->seg,
                                       .n_segs = 1,
                                       .h_q = a->h_q,
                                       .out_dtype = a->out_dtype,
                                       .flags = a->flags};
    r->args.kv.base = upload(g, a->pool->bytes, pool_bytes(a->pool));
}

static void run_launch(struct gpu *g, struct run *r)
{
    must(g, dsk_mem_set(g->s, r->seg.out, 0xee, (uint64_t)r->out_bytes));
    must(g, dsk_mem_set(g->s, r->seg.lse, 0xee, (uint64_t)r->lse_bytes));
    must(g, dsk_attend(g->s, &r->args, &g->err));
}

static void run_fetch(struct gpu *g, struct run *r)
{
    download(g, r->out, r->seg.out, r->out_bytes);
    download(g, r->lse, r->seg.lse, r->lse_bytes);
    download(g, r->n_bad, r->seg.n_bad, 4 * (int64_t)r->a.n_rows);
}

/* The fetched results against float64 over what a says. */
static void run_compare(struct gpu *g, struct run *r, const char *extra)
{
    const struct kit_attend *a = &r->a;
    const struct ref64_attend ref = {.layout = a->pool->layout,
                                     .pool = a->pool->bytes,
                                     .page_pitch_bytes = a->pool->kv.page_pitch_bytes,
                                     .n_slots = a->pool->kv.n_slots,
                                     .raw_scale = a->pool->kv.raw_scale,
                                     .q = a->q,
                                     .indices = a->indices,
                                     .lengths = a->lengths,
                                     .sink = a->sink,
                                     .table = a->table,
                                     .n_table = a->n_table,
                                     .seq_len = a->seq_len,
                                     .n_rows = a->n_rows,
                                     .topk = a->topk,
                                     .h_q = a->h_q,
                                     .softmax_scale = (double)a->scale};
    const int64_t n = (int64_t)a->n_rows * a->h_q, n_out = n * a->pool->layout->d_v;
    double *out = malloc((size_t)n_out * sizeof(*out)), *lse = malloc((size_t)n * sizeof(*lse));
    uint32_t *n_bad = malloc((size_t)a->n_rows * sizeof(*n_bad));
    float *got = malloc((size_t)n_out * sizeof(*got));
    char what[160];

    (void)g;
    ck_assert(out && lse && n_bad && got && ref64_attend(&ref, out, lse, n_bad) == 0);
    if (a->out_dtype == DSK_DTYPE_F32)
        memcpy(got, r->out, (size_t)n_out * 4);
    else
        ref64_bf16_to_f32((uint16_t *)(void *)r->out, got, n_out);
    snprintf(what, sizeof(what), "%s heads %d rows %d width %d %s", a->pool->layout->name, a->h_q, a->n_rows,
             a->topk, extra);
    kit_expect_out(got, out, n_out, what);
    kit_expect_lse(r->lse, lse, n, what);
    for (int t = 0; t < a->n_rows; t++)
        KIT_EXPECT(r->n_bad[t] == n_bad[t], "%s: n_bad[%d] is %u, not %u", what, t, r->n_bad[t], n_bad[t]);
    free(out);
    free(lse);
    free(n_bad);
    free(got);
}

static struct kit_attend shape_of(struct gpu *g, struct kit_pool *pool, int n_rows, int h_q, int topk)
{
    return (struct kit_attend){.pool = pool,
                               .n_rows = n_rows,
                               .topk = topk,
                               .h_q = h_q,
                               .q = kit_bf16_normal(&g->kit, (int64_t)n_rows * h_q * pool->layout->d_qk, 0.5),
                               .indices = kit_indices(&g->kit, (int64_t)n_rows * topk, pool->kv.n_slots, 20),
                               .scale = 0.05f,
                               .out_dtype = DSK_DTYPE_BF16};
}

static const uint32_t flag_sets[] = {0, DSK_DEVICE_PORTABLE, DSK_DEVICE_NO_GRAPHS,
                                     DSK_DEVICE_PORTABLE | DSK_DEVICE_NO_GRAPHS};

START_TEST(attend_matches_float64)
{
    static const struct {
        int n_rows, h_q, topk, offset;
    } shapes[] = {{1, 1, 1, 0},   {3, 8, 65, 0},    {2, 64, 300, 0},  {1, 128, 257, 0}, {5, 16, 64, 0},
                  {9, 24, 63, 0}, {3, 127, 129, 0}, {2, 64, 1000, 2}, {1, 7, 2051, 0},  {17, 33, 100, 0}};
    struct gpu g;
    struct kit_pool pool;

    GPU_OPEN(&g, flag_sets[_i % 4]);
    kit_pool_make(&g.kit, &pool, (uint32_t)(1 + _i / 4), 700, 2);
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct run r = {.a = shape_of(&g, &pool, shapes[i].n_rows, shapes[i].h_q, shapes[i].topk)};
        int32_t lengths[17], table[12];
        float sink[128];

        for (int t = 0; t < 17; t++)
            lengths[t] = (int32_t)ref64_rng_below(&g.kit.rng, r.a.topk + 10) - 5;
        for (int h = 0; h < 128; h++)
            sink[h] = h % 5 == 0 ? -INFINITY : (float)ref64_rng_normal(&g.kit.rng);
        for (int p = 0; p < 12; p++)
            table[p] = p == 4 ? -1 : (int32_t)((p * 7 + 3) % 11);
        r.a.lengths = i % 2 ? lengths : NULL;
        r.a.sink = i % 3 == 1 ? sink : NULL;
        if (i % 4 == 2) {
            r.a.table = table;
            r.a.n_table = 12;
            r.a.seq_len = 690;
        }
        r.a.out_dtype = i % 2 ? DSK_DTYPE_F32 : DSK_DTYPE_BF16;
        r.a.flags = i % 3 == 2 ? DSK_ATTEND_BATCH_INVARIANT : 0;
        r.a.indices[0] = INT32_MAX; /* counted, unless it is not live */
        run_init(&g, &r, shapes[i].offset);
        run_launch(&g, &r);
        run_fetch(&g, &r);
        run_compare(&g, &r, "");
    }
    gpu_close(&g);
}
END_TEST

START_TEST(rows_that_nothing_names_do_no_harm)
{
    struct gpu g;
    struct kit_pool pool;

    GPU_OPEN(&g, flag_sets[_i % 2]);
    kit_pool_make(&g.kit, &pool, (uint32_t)(1 + _i / 2), 640, 1);
    kit_poison_row(&pool, 0);
    for (int64_t slot = 600; slot < 640; slot++)
        kit_poison_row(&pool, slot);
    pool.kv.n_slots = 600;
    struct run r = {.a = shape_of(&g, &pool, 6, 64, 300)};
    for (int i = 0; i < 6 * 300; i++) {
        if (r.a.indices[i] == 0)
            r.a.indices[i] = -1;
        if (i % 13 == 0)
            r.a.indices[i] = 600 + i % 40;
        if (i / 300 == 2)
            r.a.indices[i] = -1; /* an empty row */
    }
    run_init(&g, &r, 0);
    run_launch(&g, &r);
    run_fetch(&g, &r);
    run_compare(&g, &r, "poison");
    gpu_close(&g);
}
END_TEST

START_TEST(scales_of_wildly_different_size)
{
    struct gpu g;
    struct kit_pool pool;

    GPU_OPEN(&g, flag_sets[_i % 2]);
    kit_pool_make(&g.kit, &pool, (uint32_t)(1 + _i / 2), 512, 1);
    for (int64_t slot = 0; slot < 512; slot++) {
        for (int i = 0; i < pool.layout->n_groups; i++) {
            float scale = ldexpf(1, (int)(6 * ref64_rng_normal(&g.kit.rng)) - 8);

            memcpy(kit_pool_row(&pool, slot) + pool.layout->latent + 4 * i, &scale, 4);
        }
    }
    struct run r = {.a = shape_of(&g, &pool, 3, 64, 256)};
    r.a.scale = 1e-4f;
    r.a.out_dtype = DSK_DTYPE_F32;
    run_init(&g, &r, 0);
    run_launch(&g, &r);
    run_fetch(&g, &r);
    run_compare(&g, &r, "wild scales");
    gpu_close(&g);
}
END_TEST

/* ---- graphs ----------------------------------------------------------------------------------- */

static uint64_t replays(struct gpu *g)
{
    return dsk_gpu_stream(g->s)->n_replays;
}

static uint64_t captures(struct gpu *g)
{
    return dsk_gpu_stream(g->s)->n_captures;
}

/* Replays after changing each thing that the argument block carries, against direct launches of another device. */
START_TEST(replay_sees_every_change)
{
    enum { n_changes = 10 };
    struct gpu g, direct;
    struct kit_pool pool, other;

    GPU_OPEN(&g, _i ? DSK_DEVICE_PORTABLE : 0);
    GPU_OPEN(&direct, DSK_DEVICE_NO_GRAPHS | (_i ? DSK_DEVICE_PORTABLE : 0));
    kit_pool_make(&g.kit, &pool, DSK_LAYOUT_SCALED_512_64, 512, 1);
    kit_pool_make(&g.kit, &other, DSK_LAYOUT_SCALED_512_64, 512, 1);
    struct kit_attend base = shape_of(&g, &pool, 5, 64, 192);
    int32_t lengths[5] = {192, 0, 7, 64, 100}, table[8] = {7, 6, 5, 4, 3, 2, 1, 0};
    float sink[64];
    for (int h = 0; h < 64; h++)
        sink[h] = (float)h / 10;
    for (int change = 0; change < n_changes; change++) {
        struct run r = {.a = base}, d;

        r.a.out = NULL;
        switch (change) {
        case 1:
            r.a.q = kit_bf16_normal(&g.kit, 5LL * 64 * 576, 0.5);
            break;
        case 2:
            r.a.indices = kit_indices(&g.kit, 5 * 192, 512, 30);
            break;
        case 3:
            r.a.lengths = lengths;
            break;
        case 4:
            r.a.sink = sink;
            break;
        case 5:
            r.a.scale = 0.02f;
            break;
        case 6:
            r.a.pool = &other; /* another layer */
            break;
        case 7:
            r.a.table = table;
            r.a.n_table = 8;
            r.a.seq_len = 500;
            break;
        case 8: /* fewer rows of the same bucket: 5 -> 5, other addresses */
            r.a.indices = base.indices + 192;
            r.a.q = base.q + 64 * 576;
            r.a.n_rows = 4;
            break;
        case 9:
            r.a.topk = 150; /* same number of tiles */
            break;
        default:
            break;
        }
        d = r;
        run_init(&g, &r, 0);
        run_init(&direct, &d, 0);
        run_launch(&g, &r);
        run_launch(&direct, &d);
        run_fetch(&g, &r);
        run_fetch(&direct, &d);
        run_compare(&g, &r, "replay");
        expect_bytes(r.out, d.out, r.out_bytes, "replay against direct launch");
        expect_bytes(r.lse, d.lse, r.lse_bytes, "lse of replay against direct launch");
    }
    ck_assert_uint_eq(replays(&g), n_changes);
    ck_assert_uint_le(captures(&g), 2); /* four rows are a bucket of their own */
    ck_assert_uint_eq(captures(&direct), 0);
    gpu_close(&g);
    gpu_close(&direct);
}
END_TEST

START_TEST(keys_that_look_alike_do_not_mix)
{
    struct gpu g;
    struct kit_pool pools[3];
    static const uint32_t layouts[3] = {DSK_LAYOUT_SCALED_512_64, DSK_LAYOUT_BF16_576, DSK_LAYOUT_RAW_512_64};
    struct run runs[12];

    GPU_OPEN(&g, _i ? DSK_DEVICE_PORTABLE : 0);
    for (int i = 0; i < 3; i++)
        kit_pool_make(&g.kit, &pools[i], layouts[i], 512, 1);
    for (int i = 0; i < 12; i++) {
        runs[i] =
            (struct run){.a = shape_of(&g, &pools[i % 3], 3 + i / 6, i % 2 ? 64 : 63, i % 4 < 2 ? 256 : 320)};
        runs[i].a.out_dtype = i / 3 % 2 ? DSK_DTYPE_F32 : DSK_DTYPE_BF16;
        runs[i].a.flags = i / 4 % 2 ? DSK_ATTEND_BATCH_INVARIANT : 0;
        run_init(&g, &runs[i], 0);
    }
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 12; i++)
            run_launch(&g, &runs[(i * 5 + round) % 12]); /* all in flight together */
        for (int i = 0; i < 12; i++) {
            run_fetch(&g, &runs[i]);
            run_compare(&g, &runs[i], "look-alike");
        }
    }
    ck_assert_uint_eq(captures(&g), 12);
    ck_assert_uint_eq(replays(&g), 36);
    gpu_close(&g);
}
END_TEST

START_TEST(old_graphs_give_way_to_new_ones)
{
    struct gpu g;
    struct kit_pool pool;
    enum { n_shapes = GPU_N_GRAPHS + 10 };

    GPU_OPEN(&g, 0);
    kit_pool_make(&g.kit, &pool, DSK_LAYOUT_SCALED_256_0, 512, 1);
    struct run r = {.a = shape_of(&g, &pool, 1, n_shapes, 64)};
    run_init(&g, &r, 0);
    for (int round = 0; round < 2; round++) {
        for (int h = 1; h <= n_shapes; h++) {
            r.args.h_q = h;
            must(&g, dsk_attend(g.s, &r.args, &g.err));
        }
    }
    ck_assert_uint_eq(captures(&g), 2 * n_shapes); /* each was the oldest when its turn came */
    r.args.h_q = n_shapes;
    run_launch(&g, &r);
    ck_assert_uint_eq(captures(&g), 2 * n_shapes);
    run_fetch(&g, &r);
    run_compare(&g, &r, "after eviction");
    gpu_close(&g);
}
END_TEST

START_TEST(bits_do_not_depend_on_company)
{
    static const int counts[] = {1, 2, 5, 40, 150};
    struct gpu g;
    struct kit_pool pool;
    const int n_rows = 150, h_q = 16, topk = 1100;

    GPU_OPEN(&g, _i ? DSK_DEVICE_PORTABLE : 0);
    kit_pool_make(&g.kit, &pool, DSK_LAYOUT_SCALED_512_64, 2000, 1);
    struct run r = {.a = shape_of(&g, &pool, n_rows, h_q, topk)};
    r.a.flags = DSK_ATTEND_BATCH_INVARIANT;
    run_init(&g, &r, 0);
    run_launch(&g, &r);
    run_fetch(&g, &r);
    for (int i = 0; i < 5; i++) {
        uint8_t *out = kit_alloc(&g.kit, r.out_bytes);
        int64_t bytes = (int64_t)counts[i] * h_q * 512 * 2;

        must(&g, dsk_mem_set(g.s, r.seg.out, 0xee, (uint64_t)r.out_bytes));
        r.seg.n_rows = counts[i];
        must(&g, dsk_attend(g.s, &r.args, &g.err));
        download(&g, out, r.seg.out, r.out_bytes);
        expect_bytes(out, r.out, bytes, "rows in smaller company");
        for (int64_t at = bytes; at < r.out_bytes; at++)
            KIT_EXPECT(out[at] == 0xee, "byte %lld past the rows was written", (long long)at);
    }
    gpu_close(&g);
}
END_TEST

/* More calls than the ring holds, none waited for, each with a segment list of its own. */
START_TEST(many_launches_in_flight)
{
    enum { n_calls = 200 };
    struct gpu g;
    struct kit_pool pool;
    const int h_q = 4, n_rows = 300;

    GPU_OPEN(&g, 0);
    kit_pool_make(&g.kit, &pool, DSK_LAYOUT_SCALED_256_0, 256, 1);
    struct run r = {.a = shape_of(&g, &pool, n_rows, h_q, 8)};
    r.a.out_dtype = DSK_DTYPE_F32;
    run_init(&g, &r, 0);
    uint64_t outs = device_alloc(&g, n_calls * 16384LL);
    for (int i = 0; i < n_calls; i++) {
        struct dsk_attend_seg segs[2] = {r.seg, r.seg};

        segs[0].n_rows = n_rows - 1;
        segs[1].n_rows = 1; /* the call's own row */
        segs[1].q += (uint64_t)(i * r.seg.q_row_bytes);
        segs[1].indices += (uint64_t)(i * r.seg.indices_row_bytes);
        segs[1].out = outs + (uint64_t)i * 16384;
        r.args.segs = segs;
        r.args.n_segs = 2;
        must(&g, dsk_attend(g.s, &r.args, &g.err));
    }
    r.args.segs = &r.seg;
    r.args.n_segs = 1;
    run_launch(&g, &r);
    run_fetch(&g, &r);
    run_compare(&g, &r, "after a flood");
    uint8_t *got = kit_alloc(&g.kit, n_calls * 16384LL);
    download(&g, got, outs, n_calls * 16384LL);
    for (int i = 0; i < n_calls; i++)
        expect_bytes(got + i * 16384, r.out + i * (int64_t)h_q * 256 * 4, (int64_t)h_q * 256 * 4,
                     "a call's own row");
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
    struct run near, far;
    int32_t slots[64];

    GPU_OPEN(&g, 0);
    kit_pool_make(&g.kit, &pool, layout->id, 64, 1);
    near = (struct run){.a = shape_of(&g, &pool, 2, 16, 64)};
    run_init(&g, &near, 0);
    far = near;
    far.args.segs = &far.seg;
    far.args.kv.n_slots = n_slots;
    far.args.kv.base = device_alloc(&g, n_slots * layout->row_bytes);
    for (int i = 0; i < 64; i++) /* the last page, and every slot of it through an append of bf16 rows */
        slots[i] = (int32_t)(n_slots - 64 + i);
    uint16_t *rows = kit_bf16_normal(&g.kit, 64LL * layout->d_qk, 1);
    struct dsk_append_args append = {.kv = far.args.kv,
                                     .rows = upload(&g, rows, 128LL * layout->d_qk),
                                     .row_bytes = 2 * layout->d_qk,
                                     .slots = slots,
                                     .n_rows = 64,
                                     .rule = DSK_RULE_POW2};
    must(&g, dsk_append(g.s, &append, &g.err));
    append.kv = near.args.kv;
    for (int i = 0; i < 64; i++)
        slots[i] = i;
    must(&g, dsk_append(g.s, &append, &g.err));
    run_launch(&g, &near);
    run_fetch(&g, &near);
    int32_t *moved = kit_alloc(&g.kit, 4 * 128);
    for (int i = 0; i < 128; i++)
        moved[i] = near.a.indices[i] < 0 ? -1 : (int32_t)(n_slots - 64) + near.a.indices[i];
    far.out = kit_alloc(&g.kit, far.out_bytes);
    far.seg.indices = upload(&g, moved, 4 * 128);
    run_launch(&g, &far);
    run_fetch(&g, &far);
    expect_bytes(far.out, near.out, near.out_bytes, "rows at the end of a large pool");
    gpu_close(&g);
}
END_TEST

START_TEST(registered_host_memory_is_read_and_written)
{
    struct gpu g;
    struct kit_pool pool;
    uint64_t q, out;

    GPU_OPEN(&g, 0);
    kit_pool_make(&g.kit, &pool, DSK_LAYOUT_SCALED_512_64, 256, 1);
    struct run r = {.a = shape_of(&g, &pool, 3, 8, 100)};
    run_init(&g, &r, 0);
    must(&g, dsk_host_register(g.dev, r.a.q, (uint64_t)3 * 8 * 576 * 2, &q));
    uint8_t *host = aligned_alloc(4096, 1 << 16);
    ck_assert_ptr_nonnull(host);
    must(&g, dsk_host_register(g.dev, host, 1 << 16, &out));
    memset(host, 0xee, 1 << 16);
    r.seg.q = q;
    r.seg.out = out;
    must(&g, dsk_attend(g.s, &r.args, &g.err));
    must(&g, dsk_stream_sync(g.s));
    memcpy(r.out, host, (size_t)r.out_bytes);
    download(&g, r.lse, r.seg.lse, r.lse_bytes);
    download(&g, r.n_bad, r.seg.n_bad, 12);
    run_compare(&g, &r, "registered memory");
    ck_assert_int_eq(host[r.out_bytes], 0xee);
    dsk_host_unregister(g.dev, r.a.q);
    dsk_host_unregister(g.dev, host);
    free(host);
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
    struct run r = {.a = shape_of(&g, &pool, 1, 1, 8)};
    run_init(&g, &r, 0);
    must(&g, dsk_event_create(g.dev, &event));
    must(&g, dsk_gpu_inject_fault(g.s));
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
    const struct dsk_device_config config = {.kind = DSK_DEVICE_CUDA};
    dsk_status status = dsk_device_open(&config, &g.dev, &g.err);
    ck_assert(status == DSK_OK || status == DSK_E_NO_DEVICE);
    if (status == DSK_OK)
        dsk_device_close(g.dev);
    else
        ck_assert_str_eq(g.err.field, "ordinal");
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
    tcase_add_loop_test(c, attend_matches_float64, 0, 4 * (DSK_LAYOUT_COUNT - 1));
    tcase_add_loop_test(c, rows_that_nothing_names_do_no_harm, 0, 2 * (DSK_LAYOUT_COUNT - 1));
    tcase_add_loop_test(c, scales_of_wildly_different_size, 0, 6);
    tcase_add_loop_test(c, replay_sees_every_change, 0, 2);
    tcase_add_loop_test(c, keys_that_look_alike_do_not_mix, 0, 2);
    tcase_add_test(c, old_graphs_give_way_to_new_ones);
    tcase_add_loop_test(c, bits_do_not_depend_on_company, 0, 2);
    tcase_add_test(c, many_launches_in_flight);
    tcase_add_loop_test(c, pool_beyond_four_gigabytes, 1, DSK_LAYOUT_COUNT);
    tcase_add_test(c, registered_host_memory_is_read_and_written);
    tcase_add_test(c, fault_retires_the_device_alone);
    suite_add_tcase(suite, c);
    suites_p[0] = suite;
    return 1;
}
