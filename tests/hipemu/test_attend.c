/* The HIP attend kernels, in the emulator, against float64 over the dequantised rows, on both chips. Sizes are what the emulator
 * does in reasonable time: the README says which. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attend_kit.h"
#include "hipemu_run.h"
#include "kernels/hip/attend.h"

/* Mean distance of the values of row t, head h from their mean, by dim: what rounded weights can move out by. */
static void spread(const struct kit_attend *a, int t, int h, const double *out, double lse, double *to)
{
    const struct ref64_layout *layout = a->pool->layout;
    double row[DSK_MAX_D_QK];

    memset(to, 0, (size_t)layout->d_v * sizeof(*to));
    for (int j = 0; j < a->topk; j++) {
        const int32_t slot = a->indices[t * a->topk + j];
        double s = 0;

        if (slot < 0)
            continue;
        ref64_dequant_row(layout, a->pool->kv.raw_scale, kit_pool_row(a->pool, slot), row);
        for (int d = 0; d < layout->d_qk; d++)
            s += ref64_bf16_decode(a->q[(t * a->h_q + h) * layout->d_qk + d]) * row[d];
        for (int d = 0; d < layout->d_v; d++)
            to[d] += exp(s * (double)a->scale - lse) * fabs(row[d] - out[d]);
    }
}

/* ---- tests ------------------------------------------------------------------------------------- */

/* Every layout and number of heads, with splits, lengths, sinks, page tables, both output types and padding in turn. */
START_TEST(attend_matches_float64)
{
    static const struct {
        int n_rows, h_q, topk, n_splits, heads, offset;
    } shapes[] = {{1, 64, 100, 1, 0, 0}, {2, 16, 300, 3, 0, 0}, {3, 8, 65, 1, 0, 2},  {1, 1, 1, 1, 0, 0},
                  {1, 72, 130, 2, 0, 0}, {8, 8, 40, 1, 0, 0},   {17, 1, 33, 1, 0, 0}, {1, 24, 90, 1, 64, 0}};
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, ATTEND_LOOP_LAYOUT, 700, 2);
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct kit_attend a = attend_shape(&k, &pool, shapes[i].n_rows, shapes[i].h_q, shapes[i].topk);
        int32_t lengths[17], table[12];
        float sink[128];

        for (int t = 0; t < 17; t++)
            lengths[t] = (int32_t)ref64_rng_below(&k.rng, a.topk + 10) - 5;
        for (int h = 0; h < 128; h++)
            sink[h] = h % 5 == 0 ? -INFINITY : h % 7 == 0 ? INFINITY : (float)ref64_rng_normal(&k.rng);
        for (int p = 0; p < 12; p++)
            table[p] = p == 4 ? -1 : p == 7 ? 11 : (int32_t)((p * 7 + 3) % 11);
        a.lengths = i % 2 ? lengths : NULL;
        a.sink = i % 3 == 1 ? sink : NULL;
        if (i % 4 == 2) {
            a.table = table;
            a.n_table = 12;
            a.seq_len = 690;
        }
        a.out_dtype = i % 2 ? DSK_DTYPE_F32 : DSK_DTYPE_BF16;
        if (a.topk > 1)
            a.indices[0] = INT32_MAX; /* counted, unless it is not live */
        attend_check_at(&k, &(struct attend_run){&a, shapes[i].n_splits, shapes[i].heads, (int)i % 2, false},
                        ATTEND_LOOP_TARGET, shapes[i].offset, i % 2 == 0);
    }
    kit_close(&k);
}
END_TEST

/* 2051 entries padded to 2112 by -1, and 2048; 64 heads and many rows where there is time. */
START_TEST(full_widths)
{
    static const struct {
        uint32_t layout;
        int n_rows, h_q, topk, n_live, n_splits;
    } shapes[] = {
        {DSK_LAYOUT_SCALED_512_64, 1, 64, 2112, 2051, 1},  {DSK_LAYOUT_SCALED_512_0, 1, 64, 2112, 2051, 4},
        {DSK_LAYOUT_SCALED_256_0, 1, 64, 2112, 2051, 1},   {DSK_LAYOUT_BF16_576, 1, 64, 2048, 2048, 2},
        {DSK_LAYOUT_SCALED_512_64, 17, 16, 2112, 2051, 1}, {DSK_LAYOUT_SCALED_512_0, 8, 8, 2112, 2051, 1},
        {DSK_LAYOUT_SCALED_256_0, 17, 8, 2112, 2051, 2},   {DSK_LAYOUT_BF16_512, 8, 16, 2112, 2051, 1},
        {DSK_LAYOUT_BF16_256, 17, 1, 2048, 2048, 1},       {DSK_LAYOUT_RAW_512_64, 8, 16, 2112, 2051, 1},
        {DSK_LAYOUT_SCALED_512_64, 8, 64, 256, 200, 1},    {DSK_LAYOUT_SCALED_256_0, 17, 64, 128, 97, 1}};
    const int i = _i / 2;
    const int n_rows = KIT_SIZE(shapes[i].n_rows, 1), h_q = KIT_SIZE(shapes[i].h_q, 8);
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, shapes[i].layout, 4000, 1);
    struct kit_attend a = attend_shape(&k, &pool, n_rows, h_q, shapes[i].topk);
    for (int t = 0; t < n_rows; t++) {
        for (int j = 0; j < a.topk; j++)
            a.indices[t * a.topk + j] = j < shapes[i].n_live ? (int32_t)ref64_rng_below(&k.rng, 4000) : -1;
    }
    attend_check_at(&k, &(struct attend_run){&a, shapes[i].n_splits, 0, 0, false}, ATTEND_LOOP_TARGET, 0,
                    false);
    kit_close(&k);
}
END_TEST

/* As the host plans it: the kernel by the number of heads, splits that fill the chip. */
START_TEST(planned_launches_match_float64)
{
    static const struct {
        int n_rows, h_q, topk;
    } shapes[] = {{1, 64, 700}, {8, 16, 300},  {17, 8, 130}, {2, 33, 257},
                  {1, 128, 64}, {3, 32, 1100}, {1, 1, 2112}};
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, DSK_LAYOUT_SCALED_256_0, 900, 1);
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct kit_attend a = attend_shape(&k, &pool, shapes[i].n_rows, shapes[i].h_q, shapes[i].topk);

        attend_check_at(&k, &(struct attend_run){&a, 0, 0, (int)i % 3, false}, attend_targets[_i], 0, false);
    }
    kit_close(&k);
}
END_TEST

/* With the flag a row's bits are those that it has alone. */
START_TEST(bits_do_not_depend_on_company)
{
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, DSK_LAYOUT_SCALED_256_0, 900, 1);
    struct kit_attend a = attend_shape(&k, &pool, 9, 16, 600), alone;
    a.flags = DSK_ATTEND_BATCH_INVARIANT;
    const struct attend_results all = attend_results_make(&k, &a);
    attend_emulate(&k, &(struct attend_run){&a, 0, 0, 1, false}, attend_targets[_i], 0, &all);
    for (int t = 0; t < 9; t += 4) {
        alone = a;
        alone.out = NULL;
        alone.n_rows = 1;
        alone.q += (int64_t)t * 16 * pool.layout->d_qk;
        alone.indices += (int64_t)t * 600;
        const struct attend_results one = attend_results_make(&k, &alone);
        attend_emulate(&k, &(struct attend_run){&alone, 0, 0, 0, false}, attend_targets[_i], 0, &one);
        gpu_expect_bytes(one.out, all.out + t * one.out_bytes, one.out_bytes, "a row alone");
        gpu_expect_bytes(one.lse, all.lse + t * 16, one.lse_bytes, "lse of a row alone");
    }
    kit_close(&k);
}
END_TEST

/* Any width has splits of whole tiles that cover it and scratch that holds them. */
START_TEST(plans_cover_any_list)
{
    static const int64_t widths[] = {1, 63, 64, 65, 2048, 2051, 2112, 16384, 1 << 20, INT32_MAX};
    struct attend_hip_plan plan;

    for (int i = 0; i < 10; i++)
        for (int n_rows = 1; n_rows <= 4096; n_rows *= 8)
            for (int h_q = 1; h_q <= 128; h_q += 21)
                for (uint32_t flags = 0; flags <= DSK_ATTEND_BATCH_INVARIANT; flags++) {
                    attend_hip_plan(DSK_LAYOUT_SCALED_512_0, n_rows, h_q, widths[i], flags, 304, &plan);
                    const int64_t covered = (int64_t)plan.n_splits * plan.split_entries;
                    const int64_t heads = strcmp(plan.main.name, "attend_scaled_512_0_h16") == 0 ? 16 : 64;

                    KIT_EXPECT(plan.split_entries % 64 == 0 && plan.n_splits >= 1
                                   && plan.n_splits <= ATTEND_HIP_MAX_SPLITS + 1 && covered >= widths[i]
                                   && covered - plan.split_entries < widths[i],
                               "%d splits of %d for %lld entries", plan.n_splits, plan.split_entries,
                               (long long)widths[i]);
                    KIT_EXPECT(
                        (int64_t)plan.main.grid[1] * heads >= h_q && plan.main.grid[0] == (uint32_t)n_rows
                            && (plan.n_splits == 1) == (plan.combine.name[0] == 0)
                            && (int64_t)plan.part_out_bytes
                                   == (plan.n_splits == 1 ? 0
                                                          : (int64_t)4 * 512 * n_rows * plan.n_splits * h_q),
                        "rows %d heads %d: %s", n_rows, h_q, plan.main.name);
                }
}
END_TEST

/* Slots that no list names, slots past the pool, and an empty row. */
START_TEST(rows_that_nothing_names_do_no_harm)
{
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, ATTEND_LOOP_LAYOUT, 320, 1);
    kit_poison_row(&pool, 0);
    for (int64_t slot = 300; slot < 320; slot++)
        kit_poison_row(&pool, slot);
    pool.kv.n_slots = 300;
    struct kit_attend a = attend_shape(&k, &pool, 4, 16, 150);
    for (int i = 0; i < 4 * 150; i++) {
        if (a.indices[i] == 0)
            a.indices[i] = -1;
        if (i % 13 == 0)
            a.indices[i] = 300 + i % 20;
        if (i / 150 == 2)
            a.indices[i] = -1;
    }
    attend_check(&k, &(struct attend_run){&a, 1 + _i % 2, _i % 4 < 2 ? 16 : 64, 0, false},
                 ATTEND_LOOP_TARGET);
    kit_close(&k);
}
END_TEST

/* Rows of -1 alone, a length of 0, and scratch full of NaN: +0 and -inf, to the bit. */
START_TEST(empty_rows_give_zero)
{
    int32_t lengths[3] = {100, 0, -7};
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, ATTEND_LOOP_LAYOUT, 64, 1);
    struct kit_attend a = attend_shape(&k, &pool, 3, 8, 200);
    a.out_dtype = DSK_DTYPE_F32;
    a.lengths = lengths;
    for (int i = 0; i < 200; i++)
        a.indices[i] = -1;
    for (int n_splits = 1; n_splits <= 2; n_splits++) {
        const struct attend_results r = attend_results_make(&k, &a);

        attend_emulate(&k, &(struct attend_run){&a, n_splits, 0, 0, false}, ATTEND_LOOP_TARGET, 0, &r);
        for (int64_t i = 0; i < r.out_bytes; i++)
            KIT_EXPECT(r.out[i] == 0, "byte %lld of an empty row is %02x", (long long)i, r.out[i]);
        for (int i = 0; i < 3 * 8; i++)
            KIT_EXPECT(isinf(r.lse[i]) && r.lse[i] < 0, "lse of an empty row is %g", (double)r.lse[i]);
    }
    kit_close(&k);
}
END_TEST

/* Each entry counts as often as it appears. */
START_TEST(duplicates_count)
{
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, ATTEND_LOOP_LAYOUT, 64, 1);
    struct kit_attend a = attend_shape(&k, &pool, 2, 16, 120);
    for (int i = 0; i < 2 * 120; i++)
        a.indices[i] = i % 3 == 0 ? 5 : i % 7;
    attend_check(&k, &(struct attend_run){&a, 1, 0, 0, false}, ATTEND_LOOP_TARGET);
    kit_close(&k);
}
END_TEST

/* Values of 1e5 and more that cancel: what the two bf16 of a weight lose of them, 1 part in 2^16 at most, may come on top of the
 * tolerance. */
START_TEST(scales_of_wildly_different_size)
{
    struct kit k;
    struct kit_pool pool;
    double off[DSK_MAX_D_V];

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, ATTEND_LOOP_LAYOUT, 512, 1);
    for (int64_t slot = 0; slot < 512; slot++) {
        for (int i = 0; i < pool.layout->n_groups; i++) {
            float scale = ldexpf(1, (int)(6 * ref64_rng_normal(&k.rng)) - 8);

            memcpy(kit_pool_row(&pool, slot) + pool.layout->latent + 4 * i, &scale, 4);
        }
    }
    struct kit_attend a = attend_shape(&k, &pool, 2, KIT_SIZE(64, 16), 256);
    a.scale = 1e-4f;
    a.out_dtype = DSK_DTYPE_F32;
    const int n = a.n_rows * a.h_q, d_v = pool.layout->d_v;
    const struct attend_results r = attend_results_make(&k, &a);
    double *out = malloc((size_t)(n * d_v) * sizeof(*out)), *lse = malloc((size_t)n * sizeof(*lse));
    ck_assert(out && lse);
    hipemu_set(0, -1);
    attend_emulate(&k, &(struct attend_run){&a, 1, 0, 0, false}, ATTEND_LOOP_TARGET, 0, &r);
    attend_reference(&a, out, lse, NULL);
    kit_expect_lse(r.lse, lse, n, "lse of wild scales");
    for (int i = 0; i < n; i++) {
        spread(&a, i / a.h_q, i % a.h_q, out + i * d_v, lse[i], off);
        for (int d = 0; d < d_v; d++) {
            const double got = (double)((float *)(void *)r.out)[i * d_v + d], want = out[i * d_v + d];

            KIT_EXPECT(fabs(got - want) <= 1e-3 + 2.01 / 128 * fabs(want) + off[d] / 65536,
                       "%s %s: head %d dim %d is %g, not %g", ATTEND_LOOP_TARGET, pool.layout->name, i, d,
                       got, want);
        }
    }
    ck_assert(ref64_compare((float *)(void *)r.out, out, (int64_t)n * d_v, INFINITY, 0, -1).cosine < 5e-6);
    free(out);
    free(lse);
    kit_close(&k);
}
END_TEST

/* Scores that rise from tile to tile by hundreds, fall, and are all alike: the maximum that is only followed at a distance. */
START_TEST(scores_that_rise_and_fall)
{
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, ATTEND_LOOP_LAYOUT, 256, 1);
    for (int kind = 0; kind < 3; kind++) {
        struct kit_attend a = attend_shape(&k, &pool, 1, 16, 224);

        a.scale = 0;
        for (int slot = 0; slot < 256; slot++) {
            float values[8];

            for (int d = 0; d < 8; d++)
                values[d] =
                    d == 0 ? (float)(kind == 0 ? slot / 8 : 31 - slot / 8) : (float)((slot * 7 + d) % 5 - 2);
            kit_set_row(&pool, slot, values, 8);
        }
        for (int j = 0; j < 224; j++)
            a.indices[j] = j;
        for (int h = 0; h < 16; h++)
            for (int d = 0; d < pool.layout->d_qk; d++)
                a.q[h * pool.layout->d_qk + d] = dsk_bf16_from_f32(d == 0 ? (float)(h - 4) : 0);
        pool.kv.raw_scale = 1;
        a.scale = kind == 2 ? 0 : 1;
        attend_check(&k, &(struct attend_run){&a, 1 + kind % 2, 0, 0, false}, ATTEND_LOOP_TARGET);
    }
    kit_close(&k);
}
END_TEST

/* ---- e4m3 ---------------------------------------------------------------------------------------- */

/* q as the kernels round it: by one power of two for each head. e4m3 times a power of two is a bf16. */
static uint16_t *rounded_q(struct kit *k, const struct kit_attend *a)
{
    const int d_qk = a->pool->layout->d_qk;
    uint16_t *q = kit_alloc(k, 2 * (int64_t)a->n_rows * a->h_q * d_qk);

    for (int i = 0; i < a->n_rows * a->h_q; i++) {
        double amax = 0, scale = ldexp(1, -126);

        for (int d = 0; d < d_qk; d++)
            amax = fmax(amax, fabs(ref64_bf16_decode(a->q[i * d_qk + d])));
        while (amax > 448 * scale)
            scale *= 2;
        for (int d = 0; d < d_qk; d++) {
            const double x = ref64_bf16_decode(a->q[i * d_qk + d]) / scale;

            q[i * d_qk + d] = ref64_bf16_encode((float)(ref64_e4m3_decode(ref64_e4m3_encode(x)) * scale));
        }
    }
    return q;
}

/* With q rounded likewise lse is exact and out is off by what e4m3 rounds of the weights, 1 part in 16 at most, so by that of the
 * spread of the values. With q as it was, cosine distance says how far the whole is off. Returns that. */
static double check_fp8(struct kit *k, struct attend_run run, const char *target)
{
    struct kit_attend a = *run.a;
    const struct attend_results r = attend_results_make(k, &a);
    const int64_t n = (int64_t)a.n_rows * a.h_q, n_out = n * a.pool->layout->d_v;
    double *out = malloc((size_t)n_out * sizeof(*out)), *lse = malloc((size_t)n * sizeof(*lse));
    double off[DSK_MAX_D_V], distance;
    const float *got = (float *)(void *)r.out;

    ck_assert(out && lse && a.out_dtype == DSK_DTYPE_F32);
    run.is_fp8 = true;
    hipemu_set(0, -1);
    attend_emulate(k, &run, target, 0, &r);
    attend_reference(&a, out, lse, NULL);
    distance = ref64_compare(got, out, n_out, INFINITY, 0, -1).cosine;
    a.q = rounded_q(k, &a);
    attend_reference(&a, out, lse, NULL);
    kit_expect_lse(r.lse, lse, n, "lse of rounded q");
    for (int i = 0; i < n; i++) {
        const int d_v = a.pool->layout->d_v;

        spread(&a, i / a.h_q, i % a.h_q, out + (int64_t)i * d_v, lse[i], off);
        for (int d = 0; d < d_v; d++)
            KIT_EXPECT(fabs((double)got[(int64_t)i * d_v + d] - out[(int64_t)i * d_v + d])
                           <= 1e-3 + off[d] / 15,
                       "%s: head %d dim %d is %g, not %g; %g allowed", target, i, d,
                       (double)got[(int64_t)i * d_v + d], out[(int64_t)i * d_v + d], 1e-3 + off[d] / 15);
    }
    free(out);
    free(lse);
    return distance;
}

START_TEST(fp8_products_are_near)
{
    static const struct {
        int n_rows, h_q, topk, n_splits;
    } shapes[] = {{1, 64, 200, 1}, {3, 16, 300, 2}, {8, 8, 65, 1},
                  {2, 1, 40, 1},   {1, 72, 64, 1},  {1, 16, 2112, 1}};
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, DSK_LAYOUT_RAW_512_64, 700, 2);
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct kit_attend a =
            attend_shape(&k, &pool, shapes[i].n_rows, shapes[i].h_q, KIT_SIZE(shapes[i].topk, 70));
        double distance;

        a.out_dtype = DSK_DTYPE_F32;
        for (int j = 2051; j < a.topk; j++)
            a.indices[j] = -1;
        for (int d = 0; d < a.pool->layout->d_qk; d++)
            a.q[d] = d == 5 ? 0x8000 : i % 2 ? 0 : a.q[d]; /* a head of zeros; a negative zero */
        distance = check_fp8(&k, (struct attend_run){&a, shapes[i].n_splits, 0, (int)i % 2, true},
                             attend_targets[_i]);
        KIT_EXPECT(distance < 1e-3, "cosine distance %g", distance);
    }
    kit_close(&k);
}
END_TEST

/* One entry, and 2000 of a weight of 2^-12 each that come to half as much: e4m3 as it is ends at 2^-9. */
START_TEST(fp8_keeps_small_weights)
{
    struct kit k;
    struct kit_pool pool;
    float got, want;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    kit_pool_make(&k, &pool, DSK_LAYOUT_RAW_512_64, 64, 1);
    pool.kv.raw_scale = 1;
    struct kit_attend a = attend_shape(&k, &pool, 1, 8, 2001);
    a.out_dtype = DSK_DTYPE_F32;
    a.scale = 1;
    for (int slot = 0; slot < 64; slot++)
        kit_set_row(&pool, slot, (const float[]){slot == 0 ? 8 : 0, slot == 0 ? 0 : 1}, 2);
    for (int j = 0; j < 2001; j++)
        a.indices[j] = j == 700 ? 0 : 1 + j % 63;
    for (int i = 0; i < 8 * pool.layout->d_qk; i++)
        a.q[i] = i % pool.layout->d_qk == 0 ? dsk_bf16_from_f32(1.0390625f) : 0; /* 12 ln 2 = 8.3178 */
    (void)check_fp8(&k, (struct attend_run){&a, 1, 0, 0, true}, attend_targets[_i]);
    const struct attend_results r = attend_results_make(&k, &a);
    attend_emulate(&k, &(struct attend_run){&a, 1, 0, 0, true}, attend_targets[_i], 0, &r);
    got = ((float *)(void *)r.out)[1];
    want = (float)(2000 / (2000 + exp(8)));
    KIT_EXPECT(fabsf(got - want) < 0.02f, "small weights came to %g, not %g", (double)got, (double)want);
    kit_close(&k);
}
END_TEST

START_TEST(fp8_repeats_and_empties)
{
    int32_t lengths[3] = {90, 0, 55};
    struct kit k;
    struct kit_pool pool;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    attend_pool(&k, &pool, DSK_LAYOUT_RAW_512_64, 100, 1);
    kit_poison_row(&pool, 0);
    struct kit_attend a = attend_shape(&k, &pool, 3, 16, 90);
    a.lengths = lengths;
    for (int i = 0; i < 3 * 90; i++)
        a.indices[i] = a.indices[i] == 0 || i >= 180 ? -1 : a.indices[i];
    const struct attend_results first = attend_results_make(&k, &a), second = attend_results_make(&k, &a);
    hipemu_set(1, 0xff);
    attend_emulate(&k, &(struct attend_run){&a, 1, 0, 0, true}, attend_targets[_i], 0, &first);
    hipemu_set(2, 0x3c);
    attend_emulate(&k, &(struct attend_run){&a, 1, 0, 0, true}, attend_targets[_i], 0, &second);
    gpu_expect_bytes(second.out, first.out, first.out_bytes, "out of the repeat");
    gpu_expect_bytes(second.lse, first.lse, first.lse_bytes, "lse of the repeat");
    for (int64_t i = 0; i < first.out_bytes; i++)
        KIT_EXPECT(i < first.out_bytes / 3 || first.out[i] == 0, "byte %lld of an empty row is %02x",
                   (long long)i, first.out[i]);
    for (int i = 0; i < 3 * 16; i++)
        KIT_EXPECT(i < 16 ? isfinite(first.lse[i]) : isinf(first.lse[i]) && first.lse[i] < 0, "lse[%d] is %g",
                   i, (double)first.lse[i]);
    kit_close(&k);
}
END_TEST

/* ---- stored vectors ---------------------------------------------------------------------------- */

static void run_vector(struct kit *k, const struct vectors_case *c, const char *target)
{
    const struct ref64_layout *layout = ref64_layout_by_name(vectors_key(c, "layout"));
    const struct vectors_array *q = vectors_find(c, "q", VECTORS_U16, 3),
                               *bytes = vectors_find(c, "kv", VECTORS_U8, 2);
    const struct vectors_array *kv = bytes ? bytes : vectors_find(c, "kv", VECTORS_U16, 2);
    const struct vectors_array *indices = vectors_find(c, "indices", VECTORS_I32, 2);
    const struct vectors_array *lengths = vectors_find(c, "lengths", VECTORS_I32, 1);
    const struct vectors_array *sink = vectors_find(c, "sink", VECTORS_F32, 1);
    const struct vectors_array *out = vectors_find(c, "out", VECTORS_F32, 3),
                               *lse = vectors_find(c, "lse", VECTORS_F32, 2);
    struct kit_pool pool;
    double *want;
    char what[128];

    KIT_EXPECT(layout && q && kv && indices && out && lse, "%s: an array is missing", c->name);
    kit_pool_fill(k, &pool, layout->id, kv->shape[0], 0, 1);
    memcpy(pool.bytes, kv->data, (size_t)(kv->n_elems * (bytes ? 1 : 2)));
    struct kit_attend a = {.pool = &pool,
                           .n_rows = (int)q->shape[0],
                           .h_q = (int)q->shape[1],
                           .topk = (int)indices->shape[1],
                           .q = q->data,
                           .indices = indices->data,
                           .lengths = lengths ? lengths->data : NULL,
                           .sink = sink ? sink->data : NULL,
                           .scale = strtof(vectors_key(c, "softmax_scale"), NULL),
                           .out_dtype = DSK_DTYPE_F32};
    const struct attend_results r = attend_results_make(k, &a);
    hipemu_set(0, -1);
    attend_emulate(k, &(struct attend_run){&a, 1, 0, 0, false}, target, 0, &r);
    want = malloc((size_t)out->n_elems * sizeof(*want));
    ck_assert_ptr_nonnull(want);
    for (int64_t i = 0; i < out->n_elems; i++)
        want[i] = (double)((float *)out->data)[i];
    snprintf(what, sizeof(what), "%s %s", target, c->name);
    kit_expect_out((float *)(void *)r.out, want, out->n_elems, what);
    for (int64_t i = 0; i < lse->n_elems; i++)
        want[i] = (double)((float *)lse->data)[i];
    kit_expect_lse(r.lse, want, lse->n_elems, what);
    free(want);
}

START_TEST(stored_vectors_are_reproduced)
{
    char **names, text[200], path[4096];
    int n, n_run = 0;
    struct kit k;

    KIT_OPEN(&k, DSK_ISA_AUTO, 1);
    KIT_EXPECT(vectors_list(DSA_TEST_VECTORS, &names, &n, text, sizeof(text)) == 0, "%s", text);
    for (int i = 0; i < n; i++) {
        struct vectors_case c;

        if (strncmp(names[i], "attend_", 7) != 0)
            continue;
        snprintf(path, sizeof(path), "%s/%s", DSA_TEST_VECTORS, names[i]);
        KIT_EXPECT(vectors_open(path, &c, text, sizeof(text)) == 0, "%s", text);
        run_vector(&k, &c, attend_targets[_i]);
        vectors_close(&c);
        n_run++;
    }
    vectors_free_list(names, n);
    ck_assert_int_ge(n_run, 16);
    kit_close(&k);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("hip attend");
    TCase *c = tcase_create("attend");

    (void)max;
    tcase_set_timeout(c, 300);
    tcase_add_loop_test(c, attend_matches_float64, 0, ATTEND_LOOPS);
    tcase_add_loop_test(c, full_widths, 0, 24);
    tcase_add_loop_test(c, planned_launches_match_float64, 0, 2);
    tcase_add_loop_test(c, bits_do_not_depend_on_company, 0, 2);
    tcase_add_test(c, plans_cover_any_list);
    tcase_add_loop_test(c, rows_that_nothing_names_do_no_harm, 0, ATTEND_LOOPS);
    tcase_add_loop_test(c, empty_rows_give_zero, 0, ATTEND_LOOPS);
    tcase_add_loop_test(c, duplicates_count, 0, ATTEND_LOOPS);
    tcase_add_loop_test(c, scales_of_wildly_different_size, 0, 6);
    tcase_add_loop_test(c, scores_that_rise_and_fall, 0, ATTEND_LOOPS);
    tcase_add_loop_test(c, stored_vectors_are_reproduced, 0, 2);
    tcase_add_loop_test(c, fp8_products_are_near, 0, 2);
    tcase_add_loop_test(c, fp8_keeps_small_weights, 0, 2);
    tcase_add_loop_test(c, fp8_repeats_and_empties, 0, 2);
    suite_add_tcase(suite, c);
    suite_add_tcase(suite, attend_cases());
    suites_p[0] = suite;
    return 1;
}
