/* Numbers, layouts and addresses: the pure part of dsk.h. */
#include "kit.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* E1 */
START_TEST(e4m3_encoding_rounds_to_even_and_saturates)
{
    static const struct {
        double x;
        uint8_t code;
    } cases[] = {{0, 0x00},
                 {-0.0, 0x80},
                 {1, 0x38},
                 {-1, 0xb8},
                 {17, 0x58},
                 {19, 0x5a},
                 {18, 0x59},
                 {240, 0x77},
                 {248, 0x78},
                 {448, 0x7e},
                 {449, 0x7e},
                 {464, 0x7e},
                 {480, 0x7e},
                 {1e30, 0x7e},
                 {-1e30, 0xfe},
                 {0x1p-6, 0x08},
                 {7.5 * 0x1p-9, 0x08},
                 {0x1p-9, 0x01},
                 {0x1p-10, 0x00},
                 {0x1p-10 * 1.0001, 0x01},
                 {3 * 0x1p-10, 0x02},
                 {0.3, 0x2a},
                 {(double)FLT_MAX, 0x7e},
                 {-(double)FLT_MAX, 0xfe},
                 {0x1p-149, 0x00},
                 {-0x1p-149, 0x80}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        KIT_EXPECT(dsk_e4m3_from_f32((float)cases[i].x) == cases[i].code, "%g gives %02x, not %02x",
                   cases[i].x, dsk_e4m3_from_f32((float)cases[i].x), cases[i].code);
    ck_assert_uint_eq(dsk_e4m3_from_f32(INFINITY), 0x7e);
    ck_assert_uint_eq(dsk_e4m3_from_f32(-INFINITY), 0xfe);
    ck_assert_uint_eq(dsk_e4m3_from_f32(NAN), 0x7f);
}
END_TEST

static float float_of(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof(x));
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

/* E1: no finite input gives 7f or ff; all inputs agree with the definition. */
START_TEST(e4m3_encoding_agrees_with_the_definition_everywhere)
{
    struct ref64_rng rng = ref64_rng_init(test_seed());

    for (uint32_t i = 0; i < 65536; i++) { /* every bf16, and the floats one bit to its sides */
        for (uint32_t low = 0; low < 3; low++) {
            float x = float_of((i << 16) + (low == 2 ? 0xffff : low));
            uint8_t code = dsk_e4m3_from_f32(x);

            if (isnan(x))
                continue;
            KIT_EXPECT(code == ref64_e4m3_encode((double)x), "%a gives %02x", (double)x, code);
            KIT_EXPECT((code & 0x7f) != 0x7f, "%a gives NaN", (double)x);
        }
    }
    for (int i = 0; i < KIT_SIZE(400000, 40000); i++) { /* exponents around the range of the format */
        uint32_t exponent = 127 - 12 + (uint32_t)ref64_rng_below(&rng, 22);
        float x = float_of(exponent << 23 | (uint32_t)(ref64_rng_u64(&rng) & 0x807fffff));

        KIT_EXPECT(dsk_e4m3_from_f32(x) == ref64_e4m3_encode((double)x), "%a", (double)x);
    }
}
END_TEST

/* E3, FP8-03: OCP e4m3fn, never fnuz. */
START_TEST(e4m3_decoding_is_e4m3fn)
{
    static const struct {
        uint8_t code;
        float value;
    } cases[] = {{0x01, 0x1p-9f}, {0x08, 0x1p-6f}, {0x38, 1}, {0x7e, 448},
                 {0xfe, -448},    {0x48, 4},       {0x51, 9}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        ck_assert_float_eq(dsk_e4m3_to_f32(cases[i].code), cases[i].value);
    ck_assert(dsk_e4m3_to_f32(0x80) == 0 && signbit(dsk_e4m3_to_f32(0x80)));
    ck_assert(isnan(dsk_e4m3_to_f32(0x7f)) && isnan(dsk_e4m3_to_f32(0xff)));
    for (unsigned code = 0; code < 256; code++) {
        if ((code & 0x7f) == 0x7f)
            continue;
        ck_assert_double_eq((double)dsk_e4m3_to_f32((uint8_t)code), ref64_e4m3_decode((uint8_t)code));
        ck_assert_uint_eq(dsk_e4m3_from_f32(dsk_e4m3_to_f32((uint8_t)code)), code);
    }
}
END_TEST

/* E3 */
START_TEST(bf16_rounds_to_even_and_keeps_nan)
{
    struct ref64_rng rng = ref64_rng_init(test_seed());

    ck_assert_float_eq(dsk_bf16_to_f32(dsk_bf16_from_f32(1.00390625f)), 1.0f);
    ck_assert_float_eq(dsk_bf16_to_f32(dsk_bf16_from_f32(1.005859375f)), 1.0078125f);
    ck_assert_float_eq(dsk_bf16_to_f32(dsk_bf16_from_f32(1.01171875f)), 1.015625f);
    ck_assert_uint_eq(dsk_bf16_from_f32(FLT_MAX), 0x7f80);
    ck_assert_uint_eq(dsk_bf16_from_f32(-0.0f), 0x8000);
    ck_assert_uint_eq(dsk_bf16_from_f32(INFINITY), 0x7f80);
    for (uint32_t low = 1; low < 0x10000; low += 0x1fff) { /* NaNs whose payload lies in the cut half */
        uint16_t bits = dsk_bf16_from_f32(float_of(0x7f800000 | low));

        KIT_EXPECT((bits & 0x7fc0) == 0x7fc0, "a NaN became %04x", bits);
    }
    for (uint32_t i = 0; i < 65536; i++)
        KIT_EXPECT(bits_of(dsk_bf16_to_f32((uint16_t)i)) == i << 16, "%04x", i);
    for (int i = 0; i < KIT_SIZE(400000, 40000); i++) {
        float x = float_of((uint32_t)ref64_rng_u64(&rng));

        if (!isnan(x))
            KIT_EXPECT(dsk_bf16_from_f32(x) == ref64_bf16_encode(x), "%a", (double)x);
    }
}
END_TEST

START_TEST(layouts_carry_the_format_page_and_stable_ids)
{
    for (int i = 0; i < REF64_N_LAYOUTS; i++) {
        const struct ref64_layout *ref = ref64_layout_at(i);
        const struct dsk_layout *layout = dsk_layout_get(ref->id);

        ck_assert_ptr_nonnull(layout);
        ck_assert_str_eq(layout->name, ref->name);
        ck_assert_ptr_eq(layout, dsk_layout_by_name(ref->name));
        ck_assert_uint_eq(layout->id, ref->id);
        ck_assert_int_eq(layout->row_bytes, ref->row_bytes);
        ck_assert_int_eq(layout->latent, ref->latent);
        ck_assert_int_eq(layout->rope, ref->rope);
        ck_assert_int_eq(layout->n_groups, ref->n_groups);
        ck_assert_int_eq(layout->d_qk, ref->d_qk);
        ck_assert_int_eq(layout->d_v, ref->d_v);
    }
    ck_assert_ptr_null(dsk_layout_get(DSK_LAYOUT_NONE));
    ck_assert_ptr_null(dsk_layout_get(DSK_LAYOUT_COUNT));
    ck_assert_ptr_null(dsk_layout_get(UINT32_MAX));
    ck_assert_ptr_null(dsk_layout_by_name("scaled_512"));
    ck_assert_ptr_null(dsk_layout_by_name("SCALED_512_64"));
    ck_assert_ptr_null(dsk_layout_by_name(""));
}
END_TEST

/* E5, MEM-01 */
START_TEST(row_addresses_do_not_wrap)
{
    static const struct {
        int32_t row_bytes;
        int64_t slot, offset;
    } cases[] = {{656, 3273603, 2147483568}, {656, 3273604, 2147484224}, {656, 6547207, 4294967792},
                 {528, 4067203, 2147483184}, {528, 4067204, 2147483712}, {528, 8134408, 4294967424},
                 {264, 8134407, 2147483448}, {264, 8134408, 2147483712}, {264, 16268816, 4294967424}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct dsk_kv_view kv = {.page_pitch_bytes = 64 * (int64_t)cases[i].row_bytes};
        uint64_t high = UINT64_C(0x7fff00000000);

        ck_assert_uint_eq(dsk_row_address(&kv, cases[i].row_bytes, cases[i].slot), (uint64_t)cases[i].offset);
        kv.base = high; /* base + offset must not wrap either */
        ck_assert_uint_eq(dsk_row_address(&kv, cases[i].row_bytes, cases[i].slot),
                          high + (uint64_t)cases[i].offset);
    }
}
END_TEST

/* E5: the 264-byte row is a multiple of 8 only. */
START_TEST(row_alignment_is_what_the_format_says)
{
    struct dsk_kv_view kv = {.page_pitch_bytes = 64 * 264};

    ck_assert_uint_eq(dsk_row_address(&kv, 264, 1), 264);
    ck_assert_uint_eq(dsk_row_address(&kv, 264, 3), 792);
    ck_assert_uint_eq(dsk_row_address(&kv, 264, 1) % 16, 8);
    kv.page_pitch_bytes = 2 * 64 * 264;
    ck_assert_uint_eq(dsk_row_address(&kv, 264, 64), 2 * 64 * 264);
    ck_assert_uint_eq(dsk_row_address(&kv, 264, 65), 2 * 64 * 264 + 264);
}
END_TEST

START_TEST(every_status_has_a_name_and_a_text)
{
    for (int status = 0; status >= -8; status--) {
        ck_assert_ptr_nonnull(strstr(dsk_status_name((dsk_status)status), "DSK_"));
        ck_assert_uint_gt(strlen(dsk_status_text((dsk_status)status)), 1);
        for (int other = 0; other > status; other--)
            ck_assert_str_ne(dsk_status_name((dsk_status)status), dsk_status_name((dsk_status)other));
    }
    ck_assert_ptr_nonnull(dsk_status_name((dsk_status)-999));
    ck_assert_ptr_nonnull(dsk_status_text((dsk_status)7));
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("number");
    TCase *tcase = tcase_create("number");

    (void)max;
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, e4m3_encoding_rounds_to_even_and_saturates);
    tcase_add_test(tcase, e4m3_encoding_agrees_with_the_definition_everywhere);
    tcase_add_test(tcase, e4m3_decoding_is_e4m3fn);
    tcase_add_test(tcase, bf16_rounds_to_even_and_keeps_nan);
    tcase_add_test(tcase, layouts_carry_the_format_page_and_stable_ids);
    tcase_add_test(tcase, row_addresses_do_not_wrap);
    tcase_add_test(tcase, row_alignment_is_what_the_format_says);
    tcase_add_test(tcase, every_status_has_a_name_and_a_text);
    suite_add_tcase(suite, tcase);
    suites_p[0] = suite;
    return 1;
}
