/* Merge of partial results: split KV, context parallel. */
#include "kit.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void merge_run(struct kit *k, const void *out_parts, const float *lse_parts, void *out, float *lse,
                      int n_parts, int n_rows, int h_q, int d_v, int part_dtype, int out_dtype)
{
    struct dsk_merge_args args = {.out_parts = kit_addr(out_parts),
                                  .lse_parts = kit_addr(lse_parts),
                                  .out = kit_addr(out),
                                  .lse = kit_addr(lse),
                                  .n_parts = n_parts,
                                  .n_rows = n_rows,
                                  .h_q = h_q,
                                  .d_v = d_v,
                                  .part_dtype = part_dtype,
                                  .out_dtype = out_dtype};
    dsk_status status = dsk_merge(k->s, &args, &k->err);

    KIT_EXPECT(status == DSK_OK, "merge: %s %s: %s", dsk_status_name(status), k->err.field, k->err.text);
}

/* One row, one head, one value. */
static void merge_scalars(struct kit *k, const float *out_parts, const float *lse_parts, int n_parts,
                          float *out_p, float *lse_p)
{
    merge_run(k, out_parts, lse_parts, out_p, lse_p, n_parts, 1, 1, 1, DSK_DTYPE_F32, DSK_DTYPE_F32);
}

/* E10 */
START_TEST(known_parts_merge_to_known_values)
{
    float out, lse, parts[64], lses[64];
    struct kit k;

    KIT_OPEN(&k, _i, 1);
    merge_scalars(&k, (float[]){2, 10}, (float[]){0.69314718f, 2.07944154f}, 2, &out, &lse);
    ck_assert_float_eq_tol(out, 8.4f, 1e-5f);
    ck_assert_float_eq_tol(lse, 2.302585093f, 1e-5f);
    merge_scalars(&k, (float[]){1, 5}, (float[]){1e4f, 1e4f + 1.09861229f}, 2, &out, &lse);
    ck_assert_float_eq_tol(out, 4, 1e-3f);
    ck_assert_float_eq_tol(lse, 10001.386f, 2e-3f);
    merge_scalars(&k, (float[]){7, -3}, (float[]){0, -200}, 2, &out, &lse);
    ck_assert_float_eq(out, 7);
    ck_assert_float_eq(lse, 0);
    merge_scalars(&k, (float[]){0, 0}, (float[]){-INFINITY, -INFINITY}, 2, &out, &lse);
    ck_assert(out == 0 && !signbit(out) && lse == -INFINITY);
    for (int i = 0; i < 64; i++) {
        parts[i] = (float)i;
        lses[i] = 0;
    }
    merge_scalars(&k, parts, lses, 64, &out, &lse);
    ck_assert_float_eq_tol(out, 31.5f, 1e-4f);
    ck_assert_float_eq_tol(lse, 4.158883083f, 1e-5f);
    kit_close(&k);
}
END_TEST

enum { rows = 3, heads = 5, d_v = 72, n = rows * heads };

static bool has_same_bits(const void *a, const void *b, size_t bytes)
{
    return memcmp(a, b, bytes) == 0;
}

static void check_one_full_part(struct kit *k, int n_parts, int full, int dtype)
{
    size_t elem = dtype == DSK_DTYPE_F32 ? 4 : 2, part_bytes = n * d_v * elem;
    uint8_t *out_parts = kit_alloc(k, n_parts * (int64_t)part_bytes);
    float *lse_parts = kit_alloc(k, n_parts * n * 4), *lse = kit_alloc(k, n * 4);
    uint8_t *out = kit_alloc(k, (int64_t)part_bytes), *values = out_parts + (size_t)full * part_bytes;

    memset(out_parts, 0xff, (size_t)n_parts * part_bytes); /* NaN in either type */
    for (int i = 0; i < n_parts * n; i++)
        lse_parts[i] = -INFINITY;
    for (int i = 0; i < n * d_v; i++) {
        float x = (float)(ref64_rng_normal(&k->rng) * 1e-3);
        uint16_t bits = ref64_bf16_encode(x);

        memcpy(values + (size_t)i * elem, dtype == DSK_DTYPE_F32 ? (const void *)&x : (const void *)&bits,
               elem);
    }
    for (int i = 0; i < n; i++)
        lse_parts[full * n + i] = (float)(30 * ref64_rng_normal(&k->rng));
    merge_run(k, out_parts, lse_parts, out, lse, n_parts, rows, heads, d_v, dtype, dtype);
    KIT_EXPECT(has_same_bits(out, values, part_bytes), "part %d of %d did not pass through", full, n_parts);
    ck_assert(has_same_bits(lse, lse_parts + full * n, n * 4));
}

/* DSA-02, E10: one non-empty part passes bit for bit, whatever the others hold. */
START_TEST(a_single_full_part_passes_bit_for_bit)
{
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int full = 0; full < 8; full++)
        check_one_full_part(&k, 8, full, full % 2 ? DSK_DTYPE_F32 : DSK_DTYPE_BF16);
    check_one_full_part(&k, 1, 0, DSK_DTYPE_F32);
    check_one_full_part(&k, 1, 0, DSK_DTYPE_BF16);
    kit_close(&k);
}
END_TEST

/* DSA-02 */
START_TEST(all_parts_empty_gives_zero_and_minus_infinity)
{
    struct kit k;
    float *out_parts, *lse_parts, *out, *lse;

    KIT_OPEN(&k, _i, 2);
    out_parts = kit_alloc(&k, 8 * n * d_v * 4);
    lse_parts = kit_alloc(&k, 8 * n * 4);
    out = kit_alloc(&k, n * d_v * 4);
    lse = kit_alloc(&k, n * 4);
    memset(out_parts, 0xff, 8 * n * d_v * 4);
    for (int i = 0; i < 8 * n; i++)
        lse_parts[i] = -INFINITY;
    merge_run(&k, out_parts, lse_parts, out, lse, 8, rows, heads, d_v, DSK_DTYPE_F32, DSK_DTYPE_F32);
    for (int i = 0; i < n * d_v; i++)
        KIT_EXPECT(out[i] == 0 && !signbit(out[i]), "value %d", i);
    for (int i = 0; i < n; i++)
        ck_assert(lse[i] == -INFINITY);
    kit_close(&k);
}
END_TEST

/* DSA-02: any pattern of empty parts, with NaN in their outputs, against float64. */
START_TEST(random_parts_match_float64)
{
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int round = 0; round < 12; round++) {
        int n_parts = 1 + (int)ref64_rng_below(&k.rng, 9), is_bf16 = round % 2;
        int64_t total = (int64_t)n_parts * n * d_v;
        float *out_parts = kit_alloc(&k, total * 4), *lse_parts = kit_alloc(&k, n_parts * n * 4);
        uint16_t *bits = kit_alloc(&k, total * 2);
        float *out = kit_alloc(&k, n * d_v * 4), *lse = kit_alloc(&k, n * 4);
        double ref_out[n * d_v], ref_lse[n];

        for (int64_t i = 0; i < total; i++) {
            bits[i] = ref64_bf16_encode((float)ref64_rng_normal(&k.rng));
            out_parts[i] = (float)ref64_bf16_decode(bits[i]);
        }
        for (int i = 0; i < n_parts * n; i++) {
            lse_parts[i] = (float)(3 * ref64_rng_normal(&k.rng));
            if (ref64_rng_below(&k.rng, 3) != 0)
                continue;
            lse_parts[i] = -INFINITY;
            memset(out_parts + (int64_t)i * d_v, 0xff, d_v * 4);
            memset(bits + (int64_t)i * d_v, 0xff, d_v * 2);
        }
        ref64_merge(out_parts, lse_parts, n_parts, n, d_v, ref_out, ref_lse);
        merge_run(&k, is_bf16 ? (const void *)bits : out_parts, lse_parts, out, round % 3 ? lse : NULL,
                  n_parts, rows, heads, d_v, is_bf16 ? DSK_DTYPE_BF16 : DSK_DTYPE_F32, DSK_DTYPE_F32);
        kit_expect_out(out, ref_out, n * d_v, "merge");
        if (round % 3)
            kit_expect_lse(lse, ref_lse, n, "merge");
        merge_run(&k, out_parts, lse_parts, bits, lse, n_parts, rows, heads, d_v, DSK_DTYPE_F32,
                  DSK_DTYPE_BF16);
        ref64_bf16_to_f32(bits, out, n * d_v);
        kit_expect_out(out, ref_out, n * d_v, "merge to bf16");
    }
    kit_close(&k);
}
END_TEST

START_TEST(stored_vector_is_reproduced)
{
    char text[200];
    struct vectors_case c;
    struct kit k;
    const struct vectors_array *out, *lse;
    double *ref;
    float *got, *got_lse;

    KIT_OPEN(&k, _i, 2);
    KIT_EXPECT(vectors_open(DSA_TEST_VECTORS "/merge_splits", &c, text, sizeof(text)) == 0, "%s", text);
    out = vectors_find(&c, "out", VECTORS_F32, 3);
    lse = vectors_find(&c, "lse", VECTORS_F32, 2);
    got = kit_alloc(&k, out->n_elems * 4);
    got_lse = kit_alloc(&k, lse->n_elems * 4);
    ref = calloc((size_t)(out->n_elems + lse->n_elems), sizeof(double));
    ck_assert_ptr_nonnull(ref);
    for (int64_t i = 0; i < out->n_elems; i++)
        ref[i] = (double)((float *)out->data)[i];
    for (int64_t i = 0; i < lse->n_elems; i++)
        ref[out->n_elems + i] = (double)((float *)lse->data)[i];
    merge_run(&k, vectors_find(&c, "out_parts", VECTORS_F32, 4)->data,
              vectors_find(&c, "lse_parts", VECTORS_F32, 3)->data, got, got_lse, 8, (int)out->shape[0],
              (int)out->shape[1], (int)out->shape[2], DSK_DTYPE_F32, DSK_DTYPE_F32);
    kit_expect_out(got, ref, out->n_elems, "vector");
    kit_expect_lse(got_lse, ref + out->n_elems, lse->n_elems, "vector");
    free(ref);
    vectors_close(&c);
    kit_close(&k);
}
END_TEST

/* DSA-06: attend over 1, 2, 3 and 7 parts of the list, merged, is attend over the whole list. */
START_TEST(split_lists_merge_to_the_whole)
{
    static const int splits[] = {1, 2, 3, 7};
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (size_t s = 0; s < sizeof(splits) / sizeof(splits[0]); s++) {
        int n_parts = splits[s], h_q = 5, n_rows = 3, width = 20, total = n_parts * width;
        struct kit_pool pool;
        int32_t *indices = kit_indices(&k, n_rows * total, 90, 15);
        uint16_t *q = kit_bf16_normal(&k, n_rows * h_q * 576, 0.3);
        int64_t n_out = (int64_t)n_rows * h_q * 512;
        float *out_parts = kit_alloc(&k, n_parts * n_out * 4),
              *lse_parts = kit_alloc(&k, n_parts * n_rows * h_q * 4);
        float *out = kit_alloc(&k, n_out * 4), *lse = kit_alloc(&k, n_rows * h_q * 4);
        struct kit_attend whole = {.pool = &pool,
                                   .n_rows = n_rows,
                                   .topk = total,
                                   .h_q = h_q,
                                   .q = q,
                                   .indices = indices,
                                   .scale = 0.05f,
                                   .out_dtype = DSK_DTYPE_F32};

        kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 90, 1);
        kit_attend_check(&k, &whole);
        for (int p = 0; p < n_parts; p++) {
            struct dsk_attend_seg seg = kit_attend_seg(&k, &whole);
            struct dsk_attend_args args = {
                .kv = pool.kv, .segs = &seg, .n_segs = 1, .h_q = h_q, .out_dtype = DSK_DTYPE_F32};

            seg.indices += (uint64_t)(4 * p * width);
            seg.topk = width;
            seg.n_bad = 0;
            seg.out = kit_addr(out_parts + p * n_out);
            seg.lse = kit_addr(lse_parts + p * n_rows * h_q);
            ck_assert_int_eq(dsk_attend(k.s, &args, &k.err), DSK_OK);
        }
        merge_run(&k, out_parts, lse_parts, out, lse, n_parts, n_rows, h_q, 512, DSK_DTYPE_F32,
                  DSK_DTYPE_F32);
        for (int64_t i = 0; i < n_out; i++)
            KIT_EXPECT(fabsf(out[i] - whole.out_f32[i]) <= 1e-4f, "%d parts: value %lld", n_parts,
                       (long long)i);
        for (int i = 0; i < n_rows * h_q; i++)
            ck_assert_float_eq_tol(lse[i], whole.lse[i], 1e-4f);
    }
    kit_close(&k);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("merge");
    TCase *tcase = tcase_create("merge");

    (void)max;
    tcase_set_timeout(tcase, 60);
    tcase_add_loop_test(tcase, known_parts_merge_to_known_values, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, a_single_full_part_passes_bit_for_bit, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, all_parts_empty_gives_zero_and_minus_infinity, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, random_parts_match_float64, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, stored_vector_is_reproduced, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, split_lists_merge_to_the_whole, KIT_FIRST_ISA, KIT_END_ISA);
    suite_add_tcase(suite, tcase);
    suites_p[0] = suite;
    return 1;
}
