/* The oracle itself: it must reproduce the stored vectors, and it must say no when it should. */
#include "kit.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int n_run;

static void check_quantize(const struct vectors_case *c)
{
    const struct ref64_layout *layout = ref64_layout_by_name(vectors_key(c, "layout"));
    const struct vectors_array *input = vectors_find(c, "input", VECTORS_U16, 2);
    const struct vectors_array *rows = vectors_find(c, "rows", VECTORS_U8, 2);
    uint8_t row[1152];

    ck_assert(layout && input && rows);
    for (int64_t i = 0; i < rows->shape[0]; i++) {
        ref64_quantise_row(layout, ref64_rule_by_name(vectors_key(c, "rule")), 1,
                           (const uint16_t *)input->data + i * layout->d_qk, row);
        KIT_EXPECT(memcmp(row, (const uint8_t *)rows->data + i * layout->row_bytes, (size_t)layout->row_bytes)
                       == 0,
                   "%s row %lld differs", c->name, (long long)i);
    }
}

static void check_attend(const struct vectors_case *c)
{
    const struct ref64_layout *layout = ref64_layout_by_name(vectors_key(c, "layout"));
    const struct vectors_array *q = vectors_find(c, "q", VECTORS_U16, 3);
    const struct vectors_array *indices = vectors_find(c, "indices", VECTORS_I32, 2);
    const struct vectors_array *out = vectors_find(c, "out", VECTORS_F32, 3);
    const struct vectors_array *lse = vectors_find(c, "lse", VECTORS_F32, 2);
    const struct vectors_array *lengths = vectors_find(c, "lengths", VECTORS_I32, 1);
    const struct vectors_array *sink = vectors_find(c, "sink", VECTORS_F32, 1);
    const struct vectors_array *kv =
        vectors_find(c, "kv", layout->encoding == REF64_BF16 ? VECTORS_U16 : VECTORS_U8, 2);
    struct ref64_attend args = {.layout = layout,
                                .pool = kv->data,
                                .n_slots = kv->shape[0],
                                .raw_scale = 1,
                                .q = q->data,
                                .indices = indices->data,
                                .lengths = lengths ? lengths->data : NULL,
                                .sink = sink ? sink->data : NULL,
                                .n_rows = (int)q->shape[0],
                                .topk = (int)indices->shape[1],
                                .h_q = (int)q->shape[1],
                                .softmax_scale = strtod(vectors_key(c, "softmax_scale"), NULL)};
    double *ref_out = malloc((size_t)out->n_elems * sizeof(double));
    double *ref_lse = malloc((size_t)lse->n_elems * sizeof(double));
    struct ref64_diff diff;

    ck_assert(ref_out && ref_lse && ref64_attend(&args, ref_out, ref_lse, NULL) == 0);
    diff = ref64_compare(out->data, ref_out, out->n_elems, 1e-6, 1e-6, 1e-9);
    KIT_EXPECT(diff.ok, "%s: out %s at %lld", c->name, diff.rule, (long long)diff.first_bad);
    diff = ref64_compare(lse->data, ref_lse, lse->n_elems, 1e-6, 1e-6, -1);
    KIT_EXPECT(diff.ok, "%s: lse %s at %lld", c->name, diff.rule, (long long)diff.first_bad);
    free(ref_out);
    free(ref_lse);
}

static void check_pagetable(const struct vectors_case *c)
{
    const struct vectors_array *logical = vectors_find(c, "logical", VECTORS_I32, 2);
    const struct vectors_array *physical = vectors_find(c, "physical", VECTORS_I32, 2);
    const struct vectors_array *table = vectors_find(c, "table", VECTORS_I32, 2);
    const struct vectors_array *lengths = vectors_find(c, "lengths", VECTORS_I32, 1);

    ck_assert(logical && physical && table && lengths);
    for (int64_t i = 0; i < logical->n_elems; i++) {
        int64_t t = i / logical->shape[1], n_table = table->shape[1];
        int64_t slot = ref64_map(((int32_t *)logical->data)[i], ((int32_t *)lengths->data)[t],
                                 (int32_t *)table->data + t * n_table, n_table, INT64_MAX);

        ck_assert_int_eq(slot, ((int32_t *)physical->data)[i]);
    }
}

static void check_merge(const struct vectors_case *c)
{
    const struct vectors_array *out_parts = vectors_find(c, "out_parts", VECTORS_F32, 4);
    const struct vectors_array *lse_parts = vectors_find(c, "lse_parts", VECTORS_F32, 3);
    const struct vectors_array *out = vectors_find(c, "out", VECTORS_F32, 3);
    const struct vectors_array *lse = vectors_find(c, "lse", VECTORS_F32, 2);
    double *ref_out = malloc((size_t)out->n_elems * sizeof(double));
    double *ref_lse = malloc((size_t)lse->n_elems * sizeof(double));

    ck_assert(ref_out && ref_lse);
    ref64_merge(out_parts->data, lse_parts->data, (int)out_parts->shape[0], lse->n_elems, (int)out->shape[2],
                ref_out, ref_lse);
    ck_assert(ref64_compare(out->data, ref_out, out->n_elems, 1e-6, 1e-6, 1e-9).ok);
    ck_assert(ref64_compare(lse->data, ref_lse, lse->n_elems, 1e-6, 1e-6, -1).ok);
    free(ref_out);
    free(ref_lse);
}

START_TEST(reproduces_every_stored_vector)
{
    static const struct {
        const char *prefix;
        void (*check)(const struct vectors_case *c);
    } kinds[] = {{"quantize_", check_quantize},
                 {"attend_", check_attend},
                 {"pagetable_", check_pagetable},
                 {"merge_", check_merge}};
    char **names, text[200], path[4096];
    struct vectors_case c;
    int n;

    KIT_EXPECT(vectors_list(DSA_TEST_VECTORS, &names, &n, text, sizeof(text)) == 0, "%s", text);
    for (int i = 0; i < n; i++) {
        snprintf(path, sizeof(path), "%s/%s", DSA_TEST_VECTORS, names[i]);
        KIT_EXPECT(vectors_open(path, &c, text, sizeof(text)) == 0, "%s", text);
        for (size_t j = 0; j < sizeof(kinds) / sizeof(kinds[0]); j++) {
            if (strncmp(names[i], kinds[j].prefix, strlen(kinds[j].prefix)) == 0) {
                kinds[j].check(&c);
                n_run++;
            }
        }
        vectors_close(&c);
    }
    vectors_free_list(names, n);
    ck_assert_int_eq(n_run, n);
    ck_assert_int_ge(n_run, 28);
}
END_TEST

START_TEST(comparison_sees_anomalies_errors_and_direction)
{
    const double ref[4] = {1, -INFINITY, 2, 0};
    const float same[4] = {1, -INFINITY, 2, 0}, inf[4] = {1, INFINITY, 2, 0}, nan[4] = {1, -INFINITY, NAN, 0};
    const float near[4] = {1.01f, -INFINITY, 2, 0}, far[4] = {1.02f, -INFINITY, 2, 0};
    struct ref64_diff diff;

    ck_assert(ref64_compare_out(same, ref, 4).ok);
    diff = ref64_compare_out(inf, ref, 4);
    ck_assert(!diff.ok && diff.first_bad == 1 && strcmp(diff.rule, "anomaly") == 0);
    diff = ref64_compare_out(nan, ref, 4);
    ck_assert(!diff.ok && diff.first_bad == 2 && strcmp(diff.rule, "anomaly") == 0);
    diff = ref64_compare_out(near, ref, 4); /* each element passes, their direction does not */
    ck_assert(!diff.ok && strcmp(diff.rule, "cosine") == 0);
    diff = ref64_compare_out(far, ref, 4);
    ck_assert(!diff.ok && diff.first_bad == 0 && strcmp(diff.rule, "element") == 0);
    ck_assert(ref64_compare_lse(same, ref, 4).ok && !ref64_compare_lse(near, ref, 4).ok);
}
END_TEST

static void write_file(const char *dir, const char *name, const char *content, size_t size)
{
    char path[4096];
    FILE *f;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(content, 1, size, f), size);
    fclose(f);
}

START_TEST(damaged_vector_folders_are_refused_by_name)
{
    static const struct {
        const char *meta;
        size_t bin_bytes;
        const char *must_name;
    } cases[] = {
        {"array x uint8 4\n", 3, "shorter"},   {"array x uint8 4\n", 5, "longer"},
        {"array x uint9 4\n", 4, "line 1"},    {"layout a\narray x uint8 -4\n", 4, "line 2"},
        {"array y uint8 4\n", 4, "y.bin"},     {"array x uint8 9999999999 9999999999\n", 4, "line 1"},
        {"array ../x uint8 4\n", 4, "line 1"}, {"lonely\n", 4, "line 1"},
        {"array x uint8\n", 4, "line 1"},      {"array x uint8 4x\n", 4, "line 1"}};
    char dir[] = "/tmp/dsa-vectors-XXXXXX", text[4300], path[4096];
    struct vectors_case c;

    ck_assert_ptr_nonnull(mkdtemp(dir));
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        write_file(dir, "meta.txt", cases[i].meta, strlen(cases[i].meta));
        write_file(dir, "x.bin", "abcdefgh", cases[i].bin_bytes);
        ck_assert_int_eq(vectors_open(dir, &c, text, sizeof(text)), -1);
        KIT_EXPECT(strstr(text, cases[i].must_name) != NULL, "case %zu: %s", i, text);
    }
    write_file(dir, "meta.txt", "array x uint8 2 2\nkey a b\n", 26);
    write_file(dir, "x.bin", "abcd", 4);
    ck_assert_int_eq(vectors_open(dir, &c, text, sizeof(text)), 0);
    ck_assert_str_eq(vectors_key(&c, "key"), "a b");
    ck_assert_ptr_nonnull(vectors_find(&c, "x", VECTORS_U8, 2));
    ck_assert_ptr_null(vectors_find(&c, "x", VECTORS_U8, 1));
    ck_assert_ptr_null(vectors_find(&c, "x", VECTORS_I32, 2));
    vectors_close(&c);
    snprintf(path, sizeof(path), "%s/x.bin", dir);
    remove(path);
    snprintf(path, sizeof(path), "%s/meta.txt", dir);
    remove(path);
    remove(dir);
    ck_assert_int_eq(vectors_open(dir, &c, text, sizeof(text)), -1);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("ref64");
    TCase *tcase = tcase_create("oracle");

    (void)max;
    tcase_set_timeout(tcase, 120);
    tcase_add_test(tcase, reproduces_every_stored_vector);
    tcase_add_test(tcase, comparison_sees_anomalies_errors_and_direction);
    tcase_add_test(tcase, damaged_vector_folders_are_refused_by_name);
    suite_add_tcase(suite, tcase);
    suites_p[0] = suite;
    return 1;
}
