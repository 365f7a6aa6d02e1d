/* Attend on the GPU backends against float64, and recorded launches against direct ones, bit for bit.
 * Without a device each test is skipped and says why. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_kit.h"

/* ---- attend ---------------------------------------------------------------------------------- */

static const uint32_t flag_sets[] = {0, DSK_DEVICE_NO_GRAPHS, DSK_DEVICE_PORTABLE,
                                     DSK_DEVICE_PORTABLE | DSK_DEVICE_NO_GRAPHS};

/* Every kernel of HIP is for one architecture: there is nothing portable to tell apart. */
#define N_FLAG_SETS     GPU_SIZE(4, KIT_SIZE(2, 1))
#define N_PORTABLE      GPU_SIZE(2, 1)
#define PORTABLE_IF(is) ((is) != 0 ? DSK_DEVICE_PORTABLE : 0)

START_TEST(attend_matches_float64)
{
    static const struct {
        int n_rows, h_q, topk, offset;
    } shapes[] = {{1, 1, 1, 0},   {3, 8, 65, 0},    {2, 64, 300, 0},  {1, 128, 257, 0}, {5, 16, 64, 0},
                  {9, 24, 63, 0}, {3, 127, 129, 0}, {2, 64, 1000, 2}, {1, 7, 2051, 0},  {17, 33, 100, 0}};
    struct gpu g;
    struct kit_pool pool;

    GPU_OPEN_ATTEND(&g, flag_sets[_i % N_FLAG_SETS]);
    kit_pool_make(&g.kit, &pool, (uint32_t)(1 + _i / N_FLAG_SETS), 700, 2);
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct gpu_case r = {.a = gpu_shape(&g, &pool, shapes[i].n_rows, shapes[i].h_q, shapes[i].topk)};
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
        gpu_case_init(&g, &r, shapes[i].offset);
        gpu_case_launch(&g, &r);
        gpu_case_fetch(&g, &r);
        gpu_case_compare(&g, &r, "");
    }
    gpu_close(&g);
}
END_TEST

START_TEST(rows_that_nothing_names_do_no_harm)
{
    struct gpu g;
    struct kit_pool pool;

    GPU_OPEN_ATTEND(&g, PORTABLE_IF(_i % N_PORTABLE));
    kit_pool_make(&g.kit, &pool, (uint32_t)(1 + _i / N_PORTABLE), 640, 1);
    kit_poison_row(&pool, 0);
    for (int64_t slot = 600; slot < 640; slot++)
        kit_poison_row(&pool, slot);
    pool.kv.n_slots = 600;
    struct gpu_case r = {.a = gpu_shape(&g, &pool, 6, 64, 300)};
    for (int i = 0; i < 6 * 300; i++) {
        if (r.a.indices[i] == 0)
            r.a.indices[i] = -1;
        if (i % 13 == 0)
            r.a.indices[i] = 600 + i % 40;
        if (i / 300 == 2)
            r.a.indices[i] = -1; /* an empty row */
    }
    gpu_case_init(&g, &r, 0);
    gpu_case_launch(&g, &r);
    gpu_case_fetch(&g, &r);
    gpu_case_compare(&g, &r, "poison");
    gpu_close(&g);
}
END_TEST

START_TEST(scales_of_wildly_different_size)
{
    struct gpu g;
    struct kit_pool pool;

    GPU_OPEN_ATTEND(&g, PORTABLE_IF(_i % N_PORTABLE));
    kit_pool_make(&g.kit, &pool, (uint32_t)(1 + _i / N_PORTABLE), 512, 1);
    for (int64_t slot = 0; slot < 512; slot++) {
        for (int i = 0; i < pool.layout->n_groups; i++) {
            float scale = ldexpf(1, (int)(6 * ref64_rng_normal(&g.kit.rng)) - 8);

            memcpy(kit_pool_row(&pool, slot) + pool.layout->latent + 4 * i, &scale, 4);
        }
    }
    struct gpu_case r = {.a = gpu_shape(&g, &pool, 3, 64, 256)};
    r.a.scale = 1e-4f;
    r.a.out_dtype = DSK_DTYPE_F32;
    gpu_case_init(&g, &r, 0);
    gpu_case_launch(&g, &r);
    gpu_case_fetch(&g, &r);
    gpu_case_compare(&g, &r, "wild scales");
    gpu_close(&g);
}
END_TEST

/* The mode that rounds to e4m3 is taken where it was asked for and there is one, and nowhere else: raw rows come out near, with other
 * bits; every other layout gives the bits that it always gives. */
START_TEST(e4m3_products_are_for_raw_rows_alone)
{
    const uint32_t layout = (uint32_t)(1 + _i);
    struct gpu g, rounding;
    struct kit_pool pool;

    if (gpu_kit_kind() != DSK_DEVICE_HIP)
        TEST_SKIP("only HIP has attend kernels in e4m3");
    GPU_OPEN_ATTEND(&g, 0);
    GPU_OPEN_ATTEND(&rounding, DSK_DEVICE_FP8);
    kit_pool_make(&g.kit, &pool, layout, 300, 1);
    for (int many = 0; many < 2; many++) {
        struct gpu_case r = {.a = gpu_shape(&g, &pool, 3, many ? 40 : 8, 400)}, f;

        r.a.out_dtype = DSK_DTYPE_F32;
        f = r;
        gpu_case_init(&g, &r, 0);
        gpu_case_init(&rounding, &f, 0);
        gpu_case_launch(&g, &r);
        gpu_case_launch(&rounding, &f);
        gpu_case_fetch(&g, &r);
        gpu_case_fetch(&rounding, &f);
        gpu_case_compare(&g, &r, "without rounding");
        if (layout != DSK_LAYOUT_RAW_512_64) {
            gpu_expect_bytes(f.out, r.out, r.out_bytes, "a layout without such kernels");
            continue;
        }
        const int64_t n = r.out_bytes / 4;
        double *want = kit_alloc(&g.kit, 8 * n);
        for (int64_t i = 0; i < n; i++)
            want[i] = (double)((float *)(void *)r.out)[i];
        const struct ref64_diff diff = ref64_compare((float *)(void *)f.out, want, n, INFINITY, 0, -1);
        KIT_EXPECT(diff.cosine > 1e-9 && diff.cosine < 2e-3, "cosine distance %g", diff.cosine);
    }
    gpu_close(&g);
    gpu_close(&rounding);
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

/* Replays after changing each thing that the argument block carries, against direct launches of another
 * device. */
START_TEST(replay_sees_every_change)
{
    enum { n_changes = 10 };
    struct gpu g, direct;
    struct kit_pool pool, other;
    uint64_t n_hits, n_misses;

    GPU_OPEN_ATTEND(&g, PORTABLE_IF(_i));
    GPU_OPEN_ATTEND(&direct, DSK_DEVICE_NO_GRAPHS | PORTABLE_IF(_i));
    kit_pool_make(&g.kit, &pool, DSK_LAYOUT_SCALED_512_64, 512, 1);
    kit_pool_make(&g.kit, &other, DSK_LAYOUT_SCALED_512_64, 512, 1);
    struct kit_attend base = gpu_shape(&g, &pool, 5, 64, 192);
    int32_t lengths[5] = {192, 0, 7, 64, 100}, table[8] = {7, 6, 5, 4, 3, 2, 1, 0};
    float sink[64];
    for (int h = 0; h < 64; h++)
        sink[h] = (float)h / 10;
    for (int change = 0; change < n_changes; change++) {
        struct gpu_case r = {.a = base}, d;

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
        gpu_case_init(&g, &r, 0);
        gpu_case_init(&direct, &d, 0);
        gpu_case_launch(&g, &r);
        gpu_case_launch(&direct, &d);
        gpu_case_fetch(&g, &r);
        gpu_case_fetch(&direct, &d);
        gpu_case_compare(&g, &r, "replay");
        gpu_expect_bytes(r.out, d.out, r.out_bytes, "replay against direct launch");
        gpu_expect_bytes(r.lse, d.lse, r.lse_bytes, "lse of replay against direct launch");
    }
    ck_assert_uint_eq(replays(&g), n_changes);
    ck_assert_uint_le(captures(&g), 2); /* four rows are a bucket of their own */
    ck_assert_uint_eq(captures(&direct), 0);
    dsk_stream_get_graph_counts(g.s, &n_hits, &n_misses);
    ck_assert_uint_eq(n_misses, captures(&g));
    ck_assert_uint_eq(n_hits + n_misses, n_changes);
    gpu_close(&g);
    gpu_close(&direct);
}
END_TEST

START_TEST(keys_that_look_alike_do_not_mix)
{
    struct gpu g;
    struct kit_pool pools[3];
    static const uint32_t layouts[3] = {DSK_LAYOUT_SCALED_512_64, DSK_LAYOUT_BF16_576, DSK_LAYOUT_RAW_512_64};
    const int n_rounds = GPU_SIZE(3, KIT_SIZE(3, 1));
    struct gpu_case runs[12];

    GPU_OPEN_ATTEND(&g, PORTABLE_IF(_i));
    for (int i = 0; i < 3; i++)
        kit_pool_make(&g.kit, &pools[i], layouts[i], 512, 1);
    for (int i = 0; i < 12; i++) {
        runs[i] = (struct gpu_case){
            .a = gpu_shape(&g, &pools[i % 3], 3 + i / 6, i % 2 ? 64 : 63, i % 4 < 2 ? 256 : 320)};
        runs[i].a.out_dtype = i / 3 % 2 ? DSK_DTYPE_F32 : DSK_DTYPE_BF16;
        runs[i].a.flags = i / 4 % 2 ? DSK_ATTEND_BATCH_INVARIANT : 0;
        gpu_case_init(&g, &runs[i], 0);
    }
    for (int round = 0; round < n_rounds; round++) {
        for (int i = 0; i < 12; i++)
            gpu_case_launch(&g, &runs[(i * 5 + round) % 12]); /* all in flight together */
        for (int i = 0; i < 12; i++) {
            gpu_case_fetch(&g, &runs[i]);
            gpu_case_compare(&g, &runs[i], "look-alike");
        }
    }
    ck_assert_uint_eq(captures(&g), 12);
    ck_assert_uint_eq(replays(&g), (uint64_t)(12 * n_rounds));
    gpu_close(&g);
}
END_TEST

/* What another thread does on a device of its own, on the same card. */
struct neighbour {
    atomic_bool is_over;
    int n_rounds;
    dsk_status status; /* the first that was not DSK_OK */
};

static dsk_status disturb(struct dsk_device *dev, struct dsk_stream *s, struct dsk_event *event)
{
    uint64_t addr = 0, word = 0;
    bool is_done;
    dsk_status status = dsk_mem_alloc(dev, 1 << 20, &addr);

    if (status != DSK_OK)
        return status;
    status = dsk_copy_in(s, addr, &word, sizeof(word));
    if (status == DSK_OK)
        status = dsk_event_record(event, s);
    if (status == DSK_OK)
        status = dsk_event_is_done(event, &is_done);
    if (status == DSK_OK)
        status = dsk_copy_out(s, &word, addr, sizeof(word));
    if (status == DSK_OK)
        status = dsk_stream_sync(s);
    dsk_mem_free(dev, addr);
    return status;
}

static void *live_next_door(void *user)
{
    const struct dsk_device_config config = {.kind = gpu_kit_kind()};
    struct neighbour *n = user;
    struct dsk_device *dev = NULL;
    struct dsk_stream *s = NULL;
    struct dsk_event *event = NULL;

    n->status = dsk_device_open(&config, &dev, NULL);
    if (n->status == DSK_OK)
        n->status = dsk_stream_create(dev, &s);
    if (n->status == DSK_OK)
        n->status = dsk_event_create(dev, &event);
    while (n->status == DSK_OK && (!atomic_load(&n->is_over) || n->n_rounds < 10)) {
        n->status = disturb(dev, s, event);
        n->n_rounds++;
    }
    dsk_event_destroy(event);
    dsk_stream_destroy(s);
    dsk_device_close(dev);
    return NULL;
}

/* Recording is of one thread: allocations, copies and events of another neither spoil it nor fail. */
START_TEST(recordings_go_on_beside_another_thread)
{
    enum { n_recordings = GPU_SIZE(500, 100) };
    struct neighbour neighbour = {.status = DSK_OK};
    struct gpu g;
    struct kit_pool pool;
    pthread_t thread;

    GPU_OPEN_ATTEND(&g, 0);
    kit_pool_make(&g.kit, &pool, DSK_LAYOUT_SCALED_256_0, 64, 1);
    struct gpu_case r = {.a = gpu_shape(&g, &pool, 1, 1, 8)};
    gpu_case_init(&g, &r, 0);
    ck_assert_int_eq(pthread_create(&thread, NULL, live_next_door, &neighbour), 0);
    for (int i = 0; i < n_recordings; i++) {
        gpu_must(&g, dsk_stream_sync(g.s));
        dsk_gpu_graph_drop(dsk_gpu_stream(g.s));
        gpu_case_launch(&g, &r);
    }
    gpu_case_fetch(&g, &r);
    gpu_case_compare(&g, &r, "beside another thread");
    atomic_store(&neighbour.is_over, true);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ck_assert_int_eq(neighbour.status, DSK_OK);
    ck_assert_uint_eq(captures(&g), n_recordings);
    gpu_close(&g);
}
END_TEST

START_TEST(old_graphs_give_way_to_new_ones)
{
    struct gpu g;
    struct kit_pool pool;
    enum { n_shapes = GPU_N_GRAPHS + 10 };

    GPU_OPEN_ATTEND(&g, 0);
    kit_pool_make(&g.kit, &pool, DSK_LAYOUT_SCALED_256_0, 512, 1);
    struct gpu_case r = {.a = gpu_shape(&g, &pool, 1, n_shapes, 64)};
    gpu_case_init(&g, &r, 0);
    for (int round = 0; round < 2; round++) {
        for (int h = 1; h <= n_shapes; h++) {
            r.args.h_q = h;
            gpu_must(&g, dsk_attend(g.s, &r.args, &g.err));
        }
    }
    ck_assert_uint_eq(captures(&g), 2 * n_shapes); /* each was the oldest when its turn came */
    r.args.h_q = n_shapes;
    gpu_case_launch(&g, &r);
    ck_assert_uint_eq(captures(&g), 2 * n_shapes);
    gpu_case_fetch(&g, &r);
    gpu_case_compare(&g, &r, "after eviction");
    gpu_close(&g);
}
END_TEST

START_TEST(bits_do_not_depend_on_company)
{
    static const int counts[] = {1, 2, 5, GPU_SIZE(40, 9), GPU_SIZE(150, 38)};
    struct gpu g;
    struct kit_pool pool;
    const int n_rows = GPU_SIZE(150, 38), h_q = 16, topk = GPU_SIZE(1100, 570);

    GPU_OPEN_ATTEND(&g, PORTABLE_IF(_i));
    kit_pool_make(&g.kit, &pool, DSK_LAYOUT_SCALED_512_64, 2000, 1);
    struct gpu_case r = {.a = gpu_shape(&g, &pool, n_rows, h_q, topk)};
    r.a.flags = DSK_ATTEND_BATCH_INVARIANT;
    gpu_case_init(&g, &r, 0);
    gpu_case_launch(&g, &r);
    gpu_case_fetch(&g, &r);
    for (int i = 0; i < 5; i++) {
        uint8_t *out = kit_alloc(&g.kit, r.out_bytes);
        int64_t bytes = (int64_t)counts[i] * h_q * 512 * 2;

        gpu_must(&g, dsk_mem_set(g.s, r.seg.out, 0xee, (uint64_t)r.out_bytes));
        r.seg.n_rows = counts[i];
        gpu_must(&g, dsk_attend(g.s, &r.args, &g.err));
        gpu_download(&g, out, r.seg.out, r.out_bytes);
        gpu_expect_bytes(out, r.out, bytes, "rows in smaller company");
        for (int64_t at = bytes; at < r.out_bytes; at++)
            KIT_EXPECT(out[at] == 0xee, "byte %lld past the rows was written", (long long)at);
    }
    gpu_close(&g);
}
END_TEST

/* More calls than the ring holds, none waited for, each with a segment list of its own. */
START_TEST(many_launches_in_flight)
{
    enum { n_calls = GPU_SIZE(200, 6) };
    struct gpu g;
    struct kit_pool pool;
    const int h_q = 4, n_rows = 300;

    GPU_OPEN_ATTEND(&g, 0);
    kit_pool_make(&g.kit, &pool, DSK_LAYOUT_SCALED_256_0, 256, 1);
    struct gpu_case r = {.a = gpu_shape(&g, &pool, n_rows, h_q, 8)};
    r.a.out_dtype = DSK_DTYPE_F32;
    gpu_case_init(&g, &r, 0);
    uint64_t outs = gpu_alloc(&g, n_calls * 16384LL);
    for (int i = 0; i < n_calls; i++) {
        struct dsk_attend_seg segs[2] = {r.seg, r.seg};

        segs[0].n_rows = n_rows - 1;
        segs[1].n_rows = 1; /* the call's own row */
        segs[1].q += (uint64_t)(i * r.seg.q_row_bytes);
        segs[1].indices += (uint64_t)(i * r.seg.indices_row_bytes);
        segs[1].out = outs + (uint64_t)i * 16384;
        r.args.segs = segs;
        r.args.n_segs = 2;
        gpu_must(&g, dsk_attend(g.s, &r.args, &g.err));
    }
    r.args.segs = &r.seg;
    r.args.n_segs = 1;
    gpu_case_launch(&g, &r);
    gpu_case_fetch(&g, &r);
    gpu_case_compare(&g, &r, "after a flood");
    uint8_t *got = kit_alloc(&g.kit, n_calls * 16384LL);
    gpu_download(&g, got, outs, n_calls * 16384LL);
    for (int i = 0; i < n_calls; i++)
        gpu_expect_bytes(got + i * 16384, r.out + i * (int64_t)h_q * 256 * 4, (int64_t)h_q * 256 * 4,
                         "a call's own row");
    gpu_close(&g);
}
END_TEST

/* ---- all --------------------------------------------------------------------------------------- */

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("gpu attend");
    TCase *c = tcase_create("gpu attend");

    (void)max;
    setenv("CK_FORK", "no", 1);
#ifdef GPU_KIT_FAKE_HIP
    gpu_kit_use_fake_hip();
#endif
    tcase_set_timeout(c, 120);
    tcase_add_loop_test(c, attend_matches_float64, 0, N_FLAG_SETS * (DSK_LAYOUT_COUNT - 1));
    tcase_add_loop_test(c, rows_that_nothing_names_do_no_harm, 0, N_PORTABLE * (DSK_LAYOUT_COUNT - 1));
    tcase_add_loop_test(c, scales_of_wildly_different_size, 0, N_PORTABLE * 3);
    tcase_add_loop_test(c, e4m3_products_are_for_raw_rows_alone, 0, DSK_LAYOUT_COUNT - 1);
    tcase_add_loop_test(c, replay_sees_every_change, 0, N_PORTABLE);
    tcase_add_loop_test(c, keys_that_look_alike_do_not_mix, 0, N_PORTABLE);
    tcase_add_test(c, recordings_go_on_beside_another_thread);
    tcase_add_test(c, old_graphs_give_way_to_new_ones);
    tcase_add_loop_test(c, bits_do_not_depend_on_company, 0, N_PORTABLE);
    tcase_add_test(c, many_launches_in_flight);
    suite_add_tcase(suite, c);
    suites_p[0] = suite;
    return 1;
}
