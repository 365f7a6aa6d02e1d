/* Append: bytes identical to the format page on every instruction set. */
#include "kit.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static struct dsk_append_args append_args(const struct kit_pool *pool, const uint16_t *rows,
                                          const int32_t *slots, int n_rows)
{
    return (struct dsk_append_args){.kv = pool->kv,
                                    .rows = kit_addr(rows),
                                    .row_bytes = 2 * pool->layout->d_qk,
                                    .slots = slots,
                                    .n_rows = n_rows,
                                    .rule = DSK_RULE_POW2};
}

static void expect_row(const struct kit_pool *pool, int64_t slot, const uint8_t *row, const char *what)
{
    const uint8_t *got = kit_pool_row(pool, slot);

    for (int i = 0; i < pool->layout->row_bytes; i++)
        KIT_EXPECT(got[i] == row[i], "%s: %s slot %lld byte %d is %02x, not %02x", what, pool->layout->name,
                   (long long)slot, i, got[i], row[i]);
}

static void run_vector(struct kit *k, const struct vectors_case *c)
{
    const struct ref64_layout *layout = ref64_layout_by_name(vectors_key(c, "layout"));
    const struct vectors_array *input = vectors_find(c, "input", VECTORS_U16, 2);
    const struct vectors_array *rows = vectors_find(c, "rows", VECTORS_U8, 2);
    int n_rows = (int)rows->shape[0];
    int32_t slots[256];
    struct kit_pool pool;
    struct dsk_append_args args;

    kit_pool_fill(k, &pool, layout->id, n_rows + 1, 0xcc, 7);
    for (int i = 0; i < n_rows; i++)
        slots[i] = n_rows - 1 - i; /* reversed, so that a writer which ignores slots is seen */
    args = append_args(&pool, input->data, slots, n_rows);
    args.rule = strcmp(vectors_key(c, "rule"), "plain") == 0 ? DSK_RULE_PLAIN : DSK_RULE_POW2;
    ck_assert_int_eq(dsk_append(k->s, &args, &k->err), DSK_OK);
    for (int i = 0; i < n_rows; i++)
        expect_row(&pool, slots[i], (const uint8_t *)rows->data + i * layout->row_bytes, c->name);
}

START_TEST(stored_vectors_are_reproduced_byte_for_byte)
{
    char **names, text[200], path[4096];
    struct vectors_case c;
    int n, n_run = 0;
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    KIT_EXPECT(vectors_list(DSA_TEST_VECTORS, &names, &n, text, sizeof(text)) == 0, "%s", text);
    for (int i = 0; i < n; i++) {
        if (strncmp(names[i], "quantize_", 9) != 0)
            continue;
        snprintf(path, sizeof(path), "%s/%s", DSA_TEST_VECTORS, names[i]);
        KIT_EXPECT(vectors_open(path, &c, text, sizeof(text)) == 0, "%s", text);
        run_vector(&k, &c);
        vectors_close(&c);
        n_run++;
    }
    vectors_free_list(names, n);
    ck_assert_int_ge(n_run, 6);
    kit_close(&k);
}
END_TEST

/* E2: four groups with known scales and codes. */
START_TEST(known_groups_pack_to_known_bytes)
{
    static const float groups[4][4] = {
        {448, -224, 1, 0}, {896, -448, 2, 0}, {3, -1.5f, 0.69921875f, 0.00099945068359375f}, {0, 0, 0, 0}};
    static const uint8_t codes[3][4] = {
        {0x7e, 0xf6, 0x38, 0}, {0x7e, 0xf6, 0x38, 0}, {0x7e, 0xf6, 0x6d, 0x22}};
    static const uint8_t words[3][4] = {{0, 0, 0x80, 0x3f}, {0, 0, 0, 0x40}, {0xb7, 0x6d, 0xdb, 0x3b}};
    static const uint32_t ids[] = {DSK_LAYOUT_SCALED_512_64, DSK_LAYOUT_SCALED_512_0};
    uint16_t values[576] = {0};
    struct kit k;

    KIT_OPEN(&k, _i, 1);
    for (int i = 0; i < 16; i++)
        values[i / 4 * 128 + i % 4] = dsk_bf16_from_f32(groups[i / 4][i % 4]);
    values[3 * 128 + 5] = 0x8000; /* -0 stays -0 */
    values[512] = 0x7fc1;
    values[513] = 0x8000;
    values[514] = 0x0001;
    for (size_t l = 0; l < 2; l++) {
        int32_t slot = 0;
        struct kit_pool pool;
        struct dsk_append_args args;
        uint16_t back[576];
        const uint8_t *row;
        float scale;

        kit_pool_fill(&k, &pool, ids[l], 2, 0xcc, 7);
        args = append_args(&pool, values, &slot, 1);
        args.rule = DSK_RULE_PLAIN;
        ck_assert_int_eq(dsk_append(k.s, &args, &k.err), DSK_OK);
        row = kit_pool_row(&pool, 0);
        for (int g = 0; g < 3; g++) {
            ck_assert_mem_eq(row + g * 128, codes[g], 4);
            ck_assert_mem_eq(row + 512 + g * 4, words[g], 4);
            for (int i = 4; i < 128; i++)
                ck_assert_uint_eq(row[g * 128 + i], 0);
        }
        for (int i = 0; i < 128; i++)
            ck_assert_uint_eq(row[384 + i], i == 5 ? 0x80 : 0);
        memcpy(&scale, row + 524, 4);
        ck_assert(isfinite(scale) && scale > 0);
        if (l == 0)
            ck_assert_mem_eq(row + 528, values + 512, 128);
        ck_assert_uint_eq(kit_pool_row(&pool, 1)[0], 0xcc);
        ref64_dequant_row_bf16(pool.layout, 1, row, back);
        ck_assert_double_eq(ref64_bf16_decode(back[256]), 3);
        ck_assert_double_eq(ref64_bf16_decode(back[258]), 0.6953125);
        ck_assert_double_eq(ref64_bf16_decode(back[259]), 0.00104522705078125);
    }
    kit_close(&k);
}
END_TEST

/* FP8-02: one non-zero value anywhere in a group decides its scale, whatever its sign; zero groups stay 0. */
START_TEST(amax_sees_every_lane_and_the_absolute_value)
{
    static const int lanes[] = {0, 1, 7, 8, 15, 16, 31, 32, 63, 64, 126, 127};
    struct kit k;

    KIT_OPEN(&k, _i, 1);
    for (uint32_t id = DSK_LAYOUT_SCALED_512_64; id <= DSK_LAYOUT_SCALED_256_0; id++) {
        const struct ref64_layout *layout = ref64_layout_get(id);
        uint16_t *values = kit_alloc(&k, 2 * layout->d_qk);
        struct kit_pool pool;
        int32_t slot = 1;

        kit_pool_fill(&k, &pool, id, 3, 0xcc, 7);
        for (int g = 0; g < layout->n_groups; g++) {
            for (size_t i = 0; i < sizeof(lanes) / sizeof(lanes[0]); i++) {
                for (uint32_t rule = DSK_RULE_PLAIN; rule <= DSK_RULE_POW2; rule++) {
                    struct dsk_append_args args = append_args(&pool, values, &slot, 1);
                    float scales[4], wanted = rule == DSK_RULE_PLAIN ? 3 / 448.0f : 0x1p-7f;

                    memset(values, 0, 2 * (size_t)layout->d_qk);
                    values[g * 128 + lanes[i]] = dsk_bf16_from_f32(-3);
                    args.rule = rule;
                    ck_assert_int_eq(dsk_append(k.s, &args, &k.err), DSK_OK);
                    memcpy(scales, kit_pool_row(&pool, 1) + layout->latent, 4 * (size_t)layout->n_groups);
                    for (int o = 0; o < layout->n_groups; o++)
                        ck_assert_float_eq(scales[o], o == g                   ? wanted
                                                      : rule == DSK_RULE_PLAIN ? 0x1p-126f
                                                                               : 0x1p-13f);
                    for (int c = 0; c < layout->latent; c++)
                        KIT_EXPECT((kit_pool_row(&pool, 1)[c] != 0) == (c == g * 128 + lanes[i]),
                                   "lane %d: code %d", lanes[i], c);
                }
            }
        }
    }
    kit_close(&k);
}
END_TEST

/* FP8-01: the value stored is the value divided by; amax just above 448 is where a rounded scale shows. */
START_TEST(read_back_is_within_a_sixteenth)
{
    struct kit k;

    KIT_OPEN(&k, _i, 1);
    for (uint32_t id = DSK_LAYOUT_SCALED_512_64; id <= DSK_LAYOUT_SCALED_256_0; id++) {
        const struct ref64_layout *layout = ref64_layout_get(id);
        uint16_t *values = kit_bf16_normal(&k, layout->d_qk, 60);
        uint16_t *back = kit_alloc(&k, 2 * layout->d_qk);
        int32_t slot = 0;
        struct kit_pool pool;

        kit_pool_fill(&k, &pool, id, 1, 0xcc, 7);
        for (int g = 0; g < layout->n_groups; g++)
            values[g * 128 + 17] = dsk_bf16_from_f32(450);
        for (uint32_t rule = DSK_RULE_PLAIN; rule <= DSK_RULE_POW2; rule++) {
            struct dsk_append_args args = append_args(&pool, values, &slot, 1);
            struct dsk_read_args read = {
                .kv = pool.kv, .out = kit_addr(back), .n_rows = 1, .mode = DSK_READ_FULL};

            args.rule = rule;
            ck_assert_int_eq(dsk_append(k.s, &args, &k.err), DSK_OK);
            ck_assert_int_eq(dsk_read(k.s, &read, &k.err), DSK_OK);
            for (int i = 0; i < layout->latent; i++) {
                double x = ref64_bf16_decode(values[i]), y = ref64_bf16_decode(back[i]);

                if (fabs(x) > 1)
                    KIT_EXPECT(fabs(x - y) <= fabs(x) / 16, "value %d: %g came back as %g", i, x, y);
            }
        }
    }
    kit_close(&k);
}
END_TEST

static uint32_t fill_values(struct kit *k, const struct ref64_layout *layout, uint16_t *values, int i_row)
{
    static const double sigmas[] = {1, 1e-3, 1e-30, 1e-39, 1e3, 1e36};
    uint32_t n_nonfinite = 0;

    for (int i = 0; i < layout->d_qk; i++) {
        double sigma = sigmas[(i_row + i / 128) % 6];

        values[i] = ref64_bf16_encode((float)(sigma * ref64_rng_normal(&k->rng)));
        if (i_row % 3 == 2 && ref64_rng_below(&k->rng, 40) == 0)
            values[i] = (uint16_t)(0x7f80 | (ref64_rng_u64(&k->rng) & 0x8041)); /* NaN or infinity */
        n_nonfinite += (values[i] & 0x7f80) == 0x7f80;
    }
    return n_nonfinite;
}

/* All layouts and rules, scattered slots, skipped rows, padded pitches, non-finite values (C5). */
START_TEST(random_batches_match_the_format_page)
{
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        const struct ref64_layout *layout = ref64_layout_at(l);
        int n_rows = KIT_SIZE(150, 70), n_slots = n_rows + 37;
        int64_t pitch = layout->d_qk + 3; /* rows at odd element offsets */
        uint16_t *values = (uint16_t *)kit_alloc(&k, 2 * (n_rows * pitch + 1)) + 1;
        uint32_t *n_nonfinite = kit_alloc(&k, 4 * n_rows);
        int32_t *slots = kit_alloc(&k, 4 * n_rows);
        uint32_t wanted[256];
        uint8_t row[1152];

        for (int pitch_factor = 1; pitch_factor <= 2; pitch_factor++) {
            uint32_t rule = pitch_factor == 1 ? DSK_RULE_PLAIN : DSK_RULE_POW2;
            struct kit_pool pool;
            struct dsk_append_args args;

            kit_pool_make(&k, &pool, layout->id, n_slots, pitch_factor);
            for (int i = 0; i < n_rows; i++) {
                slots[i] = i % 7 == 3 ? -1 : (i * 31 + 5) % n_slots;
                wanted[i] = fill_values(&k, layout, values + i * pitch, i);
            }
            args = append_args(&pool, values, slots, n_rows);
            args.row_bytes = 2 * pitch;
            args.rule = rule;
            args.n_nonfinite = kit_addr(n_nonfinite);
            ck_assert_int_eq(dsk_append(k.s, &args, &k.err), DSK_OK);
            for (int i = 0; i < n_rows; i++) {
                if (slots[i] < 0)
                    continue;
                ref64_quantise_row(layout, (int)rule, pool.kv.raw_scale, values + i * pitch, row);
                expect_row(&pool, slots[i], row, "random");
                ck_assert_uint_eq(n_nonfinite[i], wanted[i]);
            }
            for (int64_t page = 0; pitch_factor == 2 && page < (n_slots + 63) / 64; page++) { /* MEM-02 */
                const uint8_t *gap = kit_pool_row(&pool, page * 64) + 64 * layout->row_bytes;

                for (int i = 0; i < 64 * layout->row_bytes; i++)
                    KIT_EXPECT(gap[i] == 0x7f, "gap byte %d was written", i);
            }
        }
    }
    kit_close(&k);
}
END_TEST

/* C5 */
START_TEST(nonfinite_values_are_clamped_and_counted)
{
    struct kit k;
    uint16_t values[512] = {0};
    int32_t slot = 0;
    uint32_t n_nonfinite = 99;
    struct kit_pool pool;
    struct dsk_append_args args;
    const uint8_t *row;
    float scale;

    KIT_OPEN(&k, _i, 1);
    kit_pool_fill(&k, &pool, DSK_LAYOUT_SCALED_512_0, 1, 0xcc, 7);
    values[0] = 0x7fc0; /* NaN */
    values[1] = 0x7f80; /* +inf */
    values[2] = 0xff80; /* -inf */
    values[3] = dsk_bf16_from_f32(448);
    args = append_args(&pool, values, &slot, 1);
    args.n_nonfinite = kit_addr(&n_nonfinite);
    ck_assert_int_eq(dsk_append(k.s, &args, &k.err), DSK_OK);
    row = kit_pool_row(&pool, 0);
    ck_assert_uint_eq(row[0], 0x00);
    ck_assert_uint_eq(row[1], 0x7e);
    ck_assert_uint_eq(row[2], 0xfe);
    ck_assert_uint_eq(row[3], 0x7e);
    memcpy(&scale, row + 512, 4);
    ck_assert_float_eq(scale, 1); /* amax is 448: the infinities are left out */
    ck_assert_uint_eq(n_nonfinite, 3);
    kit_close(&k);
}
END_TEST

/* C5, strict: refused as a whole, nothing written; a skipped row does not count. */
START_TEST(strict_append_refuses_before_the_first_byte)
{
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        const struct ref64_layout *layout = ref64_layout_at(l);
        uint16_t *values = kit_bf16_normal(&k, 3 * layout->d_qk, 1);
        int32_t slots[3] = {0, 1, 2};
        struct kit_pool pool;
        struct dsk_append_args args;
        uint64_t before;
        size_t bytes = 4 * (size_t)layout->row_bytes;

        kit_pool_make(&k, &pool, layout->id, 4, 1);
        args = append_args(&pool, values, slots, 3);
        args.flags = DSK_APPEND_STRICT;
        values[3 * layout->d_qk - 1] = 0x7f80; /* the last value: RoPE where the layout has one */
        before = kit_hash(pool.bytes, bytes);
        ck_assert_int_eq(dsk_append(k.s, &args, &k.err), DSK_E_NONFINITE);
        ck_assert_uint_eq(kit_hash(pool.bytes, bytes), before);
        slots[2] = -1;
        ck_assert_int_eq(dsk_append(k.s, &args, &k.err), DSK_OK);
        ck_assert_uint_ne(kit_hash(pool.bytes, bytes), before);
    }
    kit_close(&k);
}
END_TEST

/* DSA-03 (d): padding rows full of NaN leave slot 0 and everything else alone. */
START_TEST(skipped_rows_write_nothing)
{
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        const struct ref64_layout *layout = ref64_layout_at(l);
        uint16_t *values = kit_alloc(&k, 64 * 2 * layout->d_qk);
        int32_t slots[64];
        struct kit_pool pool;
        struct dsk_append_args args;
        uint64_t before;

        kit_pool_make(&k, &pool, layout->id, 70, 1);
        for (int i = 0; i < 64; i++)
            slots[i] = -1;
        for (int i = 0; i < 64 * layout->d_qk; i++)
            values[i] = 0x7fc0;
        before = kit_hash(pool.bytes, 70 * (size_t)layout->row_bytes);
        args = append_args(&pool, values, slots, 64);
        ck_assert_int_eq(dsk_append(k.s, &args, &k.err), DSK_OK);
        args.n_rows = 0;
        args.slots = NULL;
        ck_assert_int_eq(dsk_append(k.s, &args, &k.err), DSK_OK);
        ck_assert_uint_eq(kit_hash(pool.bytes, 70 * (size_t)layout->row_bytes), before);
    }
    kit_close(&k);
}
END_TEST

/* FORMATS 2: any slot outside the pool but -1 refuses the batch before the first byte. */
START_TEST(a_slot_outside_the_pool_refuses_the_batch)
{
    static const int32_t bad[] = {-2, INT32_MIN, 70, 71, INT32_MAX};
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        int32_t slots[3] = {0, 1, bad[i]};
        struct kit_pool pool;
        uint16_t *values = kit_bf16_normal(&k, 3 * 576, 1);
        struct dsk_append_args args;
        uint64_t before;

        kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 70, 1);
        before = kit_hash(pool.bytes, 70 * 656);
        args = append_args(&pool, values, slots, 3);
        ck_assert_int_eq(dsk_append(k.s, &args, &k.err), DSK_E_SLOT_RANGE);
        ck_assert_int_eq(k.err.status, DSK_E_SLOT_RANGE);
        ck_assert_ptr_nonnull(strstr(k.err.field, "slots[2]"));
        ck_assert_uint_eq(kit_hash(pool.bytes, 70 * 656), before);
    }
    kit_close(&k);
}
END_TEST

START_TEST(the_later_of_two_rows_for_one_slot_wins)
{
    enum { n_rows = 300 };
    struct kit k;
    int32_t slots[n_rows];
    struct kit_pool pool;
    uint16_t *values;
    uint8_t row[656];

    KIT_OPEN(&k, _i, 2);
    values = kit_bf16_normal(&k, n_rows * 576, 1);
    kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 8, 1);
    for (int i = 0; i < n_rows; i++)
        slots[i] = i % 5;
    for (int repeat = 0; repeat < 10; repeat++) {
        struct dsk_append_args args = append_args(&pool, values, slots, n_rows);

        memset(pool.bytes, 0, 5 * 656);
        ck_assert_int_eq(dsk_append(k.s, &args, &k.err), DSK_OK);
        for (int slot = 0; slot < 5; slot++) {
            ref64_quantise_row(pool.layout, DSK_RULE_POW2, 1, values + (n_rows - 5 + slot) * 576, row);
            expect_row(&pool, slot, row, "duplicate");
        }
    }
    kit_close(&k);
}
END_TEST

START_TEST(copied_rows_are_the_rows)
{
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        struct kit_pool pool, before;
        struct dsk_copy_rows_args args;
        size_t bytes;

        kit_pool_make(&k, &pool, ref64_layout_at(l)->id, 200, 2);
        bytes = 4 * 2 * 64 * (size_t)pool.layout->row_bytes;
        before = pool;
        before.bytes = kit_alloc(&k, (int64_t)bytes);
        memcpy(before.bytes, pool.bytes, bytes);
        args = (struct dsk_copy_rows_args){.kv = pool.kv, .src_slot = 3, .dst_slot = 128, .n_rows = 61};
        ck_assert_int_eq(dsk_copy_rows(k.s, &args, &k.err), DSK_OK);
        for (int64_t i = 0; i < 200; i++)
            expect_row(&pool, i, kit_pool_row(&before, i >= 128 && i < 128 + 61 ? i - 125 : i), "copy");
        args.n_rows = 0;
        ck_assert_int_eq(dsk_copy_rows(k.s, &args, &k.err), DSK_OK);
    }
    kit_close(&k);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("append");
    TCase *tcase = tcase_create("append");

    (void)max;
    tcase_set_timeout(tcase, 120);
    tcase_add_loop_test(tcase, stored_vectors_are_reproduced_byte_for_byte, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, known_groups_pack_to_known_bytes, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, amax_sees_every_lane_and_the_absolute_value, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, read_back_is_within_a_sixteenth, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, random_batches_match_the_format_page, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, nonfinite_values_are_clamped_and_counted, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, strict_append_refuses_before_the_first_byte, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, skipped_rows_write_nothing, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, a_slot_outside_the_pool_refuses_the_batch, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, the_later_of_two_rows_for_one_slot_wins, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, copied_rows_are_the_rows, KIT_FIRST_ISA, KIT_END_ISA);
    suite_add_tcase(suite, tcase);
    suites_p[0] = suite;
    return 1;
}
