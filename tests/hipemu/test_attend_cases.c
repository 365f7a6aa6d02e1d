/* Faults that bit others, for the emulated attend kernels: small cases whose answers are known. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "attend_kit.h"
#include "hipemu_run.h"

static float out_at(const struct attend_results *r, int64_t i)
{
    return ((const float *)(const void *)r->out)[i];
}

static struct attend_results run_of(struct kit *k, struct kit_attend *a, int n_splits, const char *target)
{
    const struct attend_results r = attend_results_make(k, a);

    attend_emulate(k, &(struct attend_run){a, n_splits, 0, 0, false}, target, 0, &r);
    return r;
}

static void must_be(double got, double want, double tolerance, const char *what)
{
    KIT_EXPECT(fabs(got - want) <= tolerance, "%s is %.9g, not %.9g", what, got, want);
}

/* One head that asks for dim 0 alone. */
static struct kit_attend one_head(struct kit *k, struct kit_pool *pool, int topk, float scale)
{
    struct kit_attend a = attend_shape(k, pool, 1, 1, topk);

    memset(a.q, 0, 2 * (size_t)pool->layout->d_qk);
    a.q[0] = dsk_bf16_from_f32(1);
    a.scale = scale;
    a.out_dtype = DSK_DTYPE_F32;
    pool->kv.raw_scale = 1;
    return a;
}

/* Tiles and runs without a valid entry before, between and after: the same as the list without holes. */
START_TEST(holes_anywhere)
{
    enum { WIDTH = 128 };
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, ATTEND_LOOP_LAYOUT, 130, 1);
    struct kit_attend a = attend_shape(&k, &pool, 1, 16, WIDTH);
    for (int kind = 0; kind < 5; kind++) {
        for (int j = 0; j < WIDTH; j++) {
            bool is_valid = kind == 0   ? j >= 64
                            : kind == 1 ? j == WIDTH - 1
                            : kind == 2 ? j / 16 % 2 == 1
                            : kind == 3 ? false
                                        : (j + 24) / 16 % 2 == 1;

            a.indices[j] = is_valid ? j : -1;
        }
        attend_check_at(&k, &(struct attend_run){&a, 1 << kind % 3, 0, 0, false}, ATTEND_LOOP_TARGET, 0,
                        false);
    }
    kit_close(&k);
}
END_TEST

/* Slot 0 is poison; 64 holes and one entry of 4 give 4, exactly, wherever it stands. */
START_TEST(one_entry_among_holes)
{
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    kit_pool_fill(&k, &pool, ATTEND_LOOP_LAYOUT, 8, 0x48, 1);
    if (pool.layout->encoding == REF64_BF16) {
        for (int i = 0; i < pool.layout->d_qk; i++)
            ((uint16_t *)(void *)kit_pool_row(&pool, 5))[i] = dsk_bf16_from_f32(4);
    }
    kit_poison_row(&pool, 0);
    struct kit_attend a = one_head(&k, &pool, 65, 0.25f);
    static const int places[] = {64, 0, 31, -1};
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 65; j++)
            a.indices[j] = j == places[i] ? 5 : j % 9 == 8 ? 8 : -1; /* 8: past the pool */
        const struct attend_results r = run_of(&k, &a, 1 + i % 2, ATTEND_LOOP_TARGET);
        for (int d = 0; d < pool.layout->d_v; d++)
            must_be((double)out_at(&r, d), places[i] < 0 ? 0 : 4, 0, "out");
        if (places[i] < 0)
            ck_assert(isinf(r.lse[0]) && r.lse[0] < 0);
        else
            must_be((double)r.lse[0], 1, 1e-6, "lse");
        ck_assert_int_eq((int)r.n_bad[0], 7 - (places[i] >= 0 && places[i] % 9 == 8));
    }
    kit_close(&k);
}
END_TEST

/* Slots that no list names change no bit, whatever they hold. */
START_TEST(poison_changes_no_bit)
{
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, ATTEND_LOOP_LAYOUT, 130, 2);
    struct kit_attend a = attend_shape(&k, &pool, 2, 8, 100);
    for (int i = 0; i < 200; i++)
        a.indices[i] = a.indices[i] < 0 ? -1 : 1 + a.indices[i] % 64;
    for (int64_t slot = 0; slot < 130; slot = slot == 0 ? 65 : slot + 1)
        memset(kit_pool_row(&pool, slot), 0, (size_t)pool.layout->row_bytes);
    const struct attend_results clean = run_of(&k, &a, 1, ATTEND_LOOP_TARGET);
    for (int64_t slot = 0; slot < 130; slot = slot == 0 ? 65 : slot + 1)
        kit_poison_row(&pool, slot);
    const struct attend_results spoiled = run_of(&k, &a, 1, ATTEND_LOOP_TARGET);
    gpu_expect_bytes(spoiled.out, clean.out, clean.out_bytes, "out beside poison");
    gpu_expect_bytes(spoiled.lse, clean.lse, clean.lse_bytes, "lse beside poison");
    kit_close(&k);
}
END_TEST

/* Two keys and duplicates, by hand. */
START_TEST(two_keys)
{
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    kit_pool_fill(&k, &pool, ATTEND_LOOP_LAYOUT, 4, 0, 1);
    struct kit_attend a = one_head(&k, &pool, 2, logf(3));
    kit_set_row(&pool, 1, (const float[]){0, 4}, 2);
    kit_set_row(&pool, 2, (const float[]){1, 8}, 2);
    for (int i = 0; i < 2; i++) {
        a.indices[0] = 1 + i;
        a.indices[1] = 2 - i;
        const struct attend_results r = run_of(&k, &a, 1, ATTEND_LOOP_TARGET);
        must_be((double)out_at(&r, 0), 0.75, 1e-5, "out[0]");
        must_be((double)out_at(&r, 1), 7, 1e-4, "out[1]");
        must_be((double)r.lse[0], 1.38629436, 1e-6, "lse");
    }
    kit_set_row(&pool, 1, (const float[]){0, 3}, 2);
    kit_set_row(&pool, 2, (const float[]){0, 6}, 2);
    struct kit_attend b = one_head(&k, &pool, 3, 1);
    b.q[0] = 0;
    memcpy(b.indices, (const int32_t[]){1, 2, 2}, 12);
    const struct attend_results r = run_of(&k, &b, 1, ATTEND_LOOP_TARGET);
    must_be((double)out_at(&r, 1), 5, 1e-4, "mean with a duplicate");
    must_be((double)r.lse[0], 1.09861229, 1e-6, "lse with a duplicate");
    kit_close(&k);
}
END_TEST

/* The RoPE tail takes part in the score and not in the output. */
START_TEST(rope_tail)
{
    static const uint32_t layouts[] = {DSK_LAYOUT_SCALED_512_64, DSK_LAYOUT_BF16_576, DSK_LAYOUT_RAW_512_64};
    float row[513] = {1};
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    for (int at = 0; at < 64; at += 21) { /* in each quarter of the tail */
        kit_pool_fill(&k, &pool, layouts[_i / 2], 4, 0, 1);
        struct kit_attend a = one_head(&k, &pool, 2, 0.5f);
        a.q[0] = 0;
        a.q[512 + at] = dsk_bf16_from_f32(1);
        kit_set_row(&pool, 1, row, 1);
        if (pool.layout->encoding == REF64_RAW)
            kit_pool_row(&pool, 1)[512 + at] = 0x40;
        else
            ((uint16_t *)(void *)(kit_pool_row(&pool, 1)
                                  + (pool.layout->encoding == REF64_BF16 ? 1024 : 528)))[at] =
                dsk_bf16_from_f32(2);
        kit_set_row(&pool, 2, row + 1, 1);
        memcpy(a.indices, (const int32_t[]){1, 2}, 8);
        const struct attend_results r = run_of(&k, &a, 1, ATTEND_LOOP_TARGET);
        must_be((double)out_at(&r, 0), 0.7310585786, 2e-5, "out[0]");
        must_be((double)r.lse[0], 1.3132616875, 1e-6, "lse");
    }
    kit_close(&k);
}
END_TEST

/* Every code of a byte at scales with all 24 bits, as K and as V: the value of one entry is the answer. */
START_TEST(codes_and_scales)
{
    static const float scales[] = {1, 1.00390625f, 3.1415927f, 0x1p-13f, 0x1.921fb6p-130f, 448};
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    for (int i = 0; i < 6; i++) {
        kit_pool_fill(&k, &pool, (uint32_t)(DSK_LAYOUT_SCALED_512_64 + _i / 2), 2, 0, scales[i]);
        struct kit_attend a = one_head(&k, &pool, 1, 1);
        a.indices[0] = 1;
        for (int d = 0; d < pool.layout->d_v; d++) {
            const int code = d % 256;

            kit_pool_row(&pool, 1)[d] = (uint8_t)((code & 0x7f) == 0x7f ? 0 : code);
        }
        kit_pool_row(&pool, 1)[0] = 0x3f; /* 1.875, which is the score then */
        const struct attend_results r = run_of(&k, &a, 1, attend_targets[_i % 2]);
        for (int d = 1; d < pool.layout->d_v; d++) {
            const double want = ref64_e4m3_decode(kit_pool_row(&pool, 1)[d]) * (double)scales[i];

            must_be((double)out_at(&r, d), want, fabs(want) * 0x1p-15 + 1e-37, "a value");
        }
        must_be((double)r.lse[0], 1.875 * (double)scales[i], 1e-6 * (1 + (double)scales[i]), "lse");
    }
    kit_close(&k);
}
END_TEST

/* The scale is the caller's: 0 is the plain mean, negative ones are served, and it may as well be in q. */
START_TEST(softmax_scales)
{
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, DSK_LAYOUT_SCALED_512_64, 100, 1);
    struct kit_attend a = attend_shape(&k, &pool, 1, 16, 90);
    for (int i = 0; i < 3; i++) {
        a.scale = (const float[]){0, -0.05f, 3}[i];
        attend_check_at(&k, &(struct attend_run){&a, 1, 0, 0, false}, attend_targets[_i], 0, false);
    }
    a.scale = 0.05f;
    const struct attend_results first = run_of(&k, &a, 1, attend_targets[_i]);
    a.scale = 0.1f;
    for (int i = 0; i < 16 * 576; i++)
        a.q[i] = dsk_bf16_from_f32(dsk_bf16_to_f32(a.q[i]) / 2);
    const struct attend_results second = run_of(&k, &a, 1, attend_targets[_i]);
    gpu_expect_bytes(second.out, first.out, first.out_bytes, "half q at twice the scale");
    kit_close(&k);
}
END_TEST

/* Splits of any number give the same within the tolerance, and each row and head its own lse. */
START_TEST(splits_agree)
{
    static const int n_splits[] = {1, 2, 3, 7};
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, DSK_LAYOUT_SCALED_256_0, 500, 1);
    struct kit_attend a = attend_shape(&k, &pool, 3, 5, 440);
    for (int i = 0; i < 4; i++)
        attend_check_at(&k, &(struct attend_run){&a, n_splits[i], i % 2 ? 64 : 16, 0, false},
                        attend_targets[_i], 0, false);
    kit_close(&k);
}
END_TEST

/* Padded and transposed tensors: q [heads, rows, d], out with a pitch, lse too. */
START_TEST(strides_are_the_callers)
{
    enum { N_ROWS = 3, H_Q = 5, TOPK = 50, PAD = 24 };
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, ATTEND_LOOP_LAYOUT, 100, 2);
    const int d_qk = pool.layout->d_qk, d_v = pool.layout->d_v, q_pitch = d_qk + PAD, out_pitch = d_v + PAD;
    struct kit_attend a = attend_shape(&k, &pool, N_ROWS, H_Q, TOPK);
    a.out_dtype = DSK_DTYPE_F32;
    const struct attend_results dense = run_of(&k, &a, 1, ATTEND_LOOP_TARGET);
    uint16_t *q = kit_alloc(&k, 2 * N_ROWS * H_Q * q_pitch);
    float *out = kit_alloc(&k, 4 * N_ROWS * H_Q * out_pitch), *lse = kit_alloc(&k, 4 * N_ROWS * (H_Q + 2));
    uint32_t *n_bad = kit_alloc(&k, 4 * N_ROWS);
    struct attend_launch launch = {
        .seg = kit_attend_seg(&k, &a), .kv = pool.kv, .h_q = H_Q, .out_dtype = DSK_DTYPE_F32};
    for (int t = 0; t < N_ROWS; t++)
        for (int h = 0; h < H_Q; h++)
            memcpy(q + (h * N_ROWS + t) * q_pitch, a.q + (t * H_Q + h) * d_qk, 2 * (size_t)d_qk);
    launch.seg.q = kit_addr(q);
    launch.seg.q_row_bytes = 2 * q_pitch;
    launch.seg.q_head_bytes = 2 * (int64_t)N_ROWS * q_pitch;
    launch.seg.out = kit_addr(out);
    launch.seg.out_head_bytes = 4 * out_pitch;
    launch.seg.out_row_bytes = 4 * (int64_t)H_Q * out_pitch;
    launch.seg.lse = kit_addr(lse);
    launch.seg.lse_row_bytes = 4 * (H_Q + 2);
    launch.seg.n_bad = kit_addr(n_bad);
    launch.n_splits = 1;
    attend_launch(&launch, ATTEND_LOOP_TARGET);
    for (int i = 0; i < N_ROWS * H_Q; i++) {
        gpu_expect_bytes(out + i * out_pitch, dense.out + 4 * (int64_t)i * d_v, 4 * d_v, "out by strides");
        gpu_expect_bytes(lse + i / H_Q * (H_Q + 2) + i % H_Q, dense.lse + i, 4, "lse by strides");
        for (int d = 4 * d_v; d < 4 * out_pitch; d++)
            KIT_EXPECT(((uint8_t *)(out + i * out_pitch))[d] == 0xee, "padding of out was written");
    }
    kit_close(&k);
}
END_TEST

/* Rows past 2^31 and 2^32 bytes, in a plane of which only these are touched. */
START_TEST(rows_of_large_pools)
{
    static const struct {
        uint32_t layout;
        int32_t slots[3];
    } cases[] = {{DSK_LAYOUT_SCALED_512_64, {3273604, 6547207, 3273603}},
                 {DSK_LAYOUT_SCALED_512_0, {4067204, 8134408, 4067203}},
                 {DSK_LAYOUT_SCALED_256_0, {8134408, 16268816, 8134407}}};
    const struct ref64_layout *layout = ref64_layout_get(cases[_i / 2].layout);
    const int64_t n_slots = cases[_i / 2].slots[1] + 1, bytes = (n_slots + 63) / 64 * 64 * layout->row_bytes;
    uint8_t *plane =
        mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct kit k;
    struct kit_pool pool = {.layout = layout, .bytes = plane};

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    ck_assert(plane != MAP_FAILED);
    pool.kv = (struct dsk_kv_view){.base = kit_addr(plane),
                                   .page_pitch_bytes = 64 * (int64_t)layout->row_bytes,
                                   .n_slots = n_slots,
                                   .layout = layout->id};
    struct kit_attend a = one_head(&k, &pool, 1, 1);
    for (int i = 0; i < 3; i++)
        kit_set_row(&pool, cases[_i / 2].slots[i], (const float[]){(float)(i + 1), (float)(2 * i + 3)}, 2);
    for (int i = 0; i < 3; i++) {
        a.indices[0] = cases[_i / 2].slots[i];
        const struct attend_results r = run_of(&k, &a, 1, attend_targets[_i % 2]);
        must_be((double)out_at(&r, 1), 2 * i + 3, 0, "a far row");
        must_be((double)r.lse[0], i + 1, 1e-6, "score of a far row");
    }
    munmap(plane, (size_t)bytes);
    kit_close(&k);
}
END_TEST

/* Positions through a table: the last of the sequence, past it, a page that is no page. */
START_TEST(positions_at_the_end_of_a_sequence)
{
    int32_t table[4] = {2, -1, 0, 3};
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, ATTEND_LOOP_LAYOUT, 200, 1); /* the last page holds 8 */
    struct kit_attend a = attend_shape(&k, &pool, 2, 8, 90);
    a.table = table;
    a.n_table = 4;
    a.seq_len = 256;
    for (int j = 0; j < 180; j++)
        a.indices[j] = j < 90 ? 170 + j : (j - 90) * 3;
    a.indices[3] = INT32_MIN;
    attend_check(&k, &(struct attend_run){&a, 1, 0, 0, false}, ATTEND_LOOP_TARGET);
    kit_close(&k);
}
END_TEST

TCase *attend_cases(void)
{
    TCase *c = tcase_create("cases");

    tcase_set_timeout(c, 120);
    tcase_add_loop_test(c, holes_anywhere, 0, ATTEND_LOOPS);
    tcase_add_loop_test(c, one_entry_among_holes, 0, ATTEND_LOOPS);
    tcase_add_loop_test(c, poison_changes_no_bit, 0, ATTEND_LOOPS);
    tcase_add_loop_test(c, two_keys, 0, ATTEND_LOOPS);
    tcase_add_loop_test(c, rope_tail, 0, 6);
    tcase_add_loop_test(c, codes_and_scales, 0, 6);
    tcase_add_loop_test(c, softmax_scales, 0, 2);
    tcase_add_loop_test(c, splits_agree, 0, 2);
    tcase_add_loop_test(c, strides_are_the_callers, 0, ATTEND_LOOPS);
    tcase_add_loop_test(c, rows_of_large_pools, 0, 6);
    tcase_add_loop_test(c, positions_at_the_end_of_a_sequence, 0, ATTEND_LOOPS);
    return c;
}
