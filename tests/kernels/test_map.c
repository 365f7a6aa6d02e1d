/* Index mapping: positions of a sequence to slots of the pool. */
#include "kit.h"

#include <stdio.h>
#include <string.h>

static void map_ok(struct kit *k, const struct dsk_map_args *args)
{
    dsk_status status = dsk_map(k->s, args, &k->err);

    KIT_EXPECT(status == DSK_OK, "map: %s %s: %s", dsk_status_name(status), k->err.field, k->err.text);
}

/* One row through one table, dense. */
static void map_row(struct kit *k, const int32_t *logical, int32_t *physical, int topk, const int32_t *table,
                    int n_table, int32_t seq_len, int64_t n_pages)
{
    struct dsk_map_args args = {.logical = kit_addr(logical),
                                .physical = kit_addr(physical),
                                .tables = kit_addr(table),
                                .seq_lens = kit_addr(&seq_len),
                                .logical_row_bytes = 4 * topk,
                                .physical_row_bytes = 4 * topk,
                                .table_row_bytes = 4 * n_table,
                                .n_pages = n_pages,
                                .n_rows = 1,
                                .topk = topk,
                                .n_table = n_table};

    map_ok(k, &args);
}

/* E4 */
START_TEST(known_positions_map_to_known_slots)
{
    static const int32_t pages[] = {7, 3, 9};
    static const int32_t at[] = {0, 63, 64, 127, 128, 129, 191, 192, -1, -7, 2147483647};
    static const int32_t slots[] = {448, 511, 192, 255, 576, -1, -1, -1, -1, -1, -1};
    static const int32_t flat[] = {0, 4, -1, 5, 2, 2, -7, 2147483647};
    static const int32_t flat_page[] = {100}, flat_slots[] = {6400, 6404, -1, -1, 6402, 6402, -1, -1};
    int32_t physical[16];
    struct kit k;

    KIT_OPEN(&k, _i, 1);
    map_row(&k, at, physical, 11, pages, 3, 129, 10);
    ck_assert_mem_eq(physical, slots, sizeof(slots));
    map_row(&k, at, physical, 11, pages, 3, 128,
            10); /* a third page is there, but the length ends before it */
    ck_assert_int_eq(physical[3], 255);
    ck_assert_int_eq(physical[4], -1);
    map_row(&k, at, physical, 11, pages, 3, 0, 10);
    for (int i = 0; i < 11; i++)
        ck_assert_int_eq(physical[i], -1);
    map_row(&k, flat, physical, 8, flat_page, 1, 5, 101);
    ck_assert_mem_eq(physical, flat_slots, sizeof(flat_slots));
    kit_close(&k);
}
END_TEST

/* E4 (e) */
START_TEST(no_rows_is_no_work)
{
    struct dsk_map_args args = {.n_rows = 0, .topk = 4, .n_table = 1, .n_pages = 1};
    int32_t x[4] = {1, 2, 3, 4};
    struct kit k;

    KIT_OPEN(&k, _i, 1);
    args.logical = args.physical = args.tables = args.seq_lens = kit_addr(x);
    args.logical_row_bytes = args.physical_row_bytes = 16;
    map_ok(&k, &args);
    ck_assert_int_eq(x[3], 4);
    kit_close(&k);
}
END_TEST

static void run_vector(struct kit *k, const struct vectors_case *c)
{
    const struct vectors_array *logical = vectors_find(c, "logical", VECTORS_I32, 2);
    const struct vectors_array *physical = vectors_find(c, "physical", VECTORS_I32, 2);
    const struct vectors_array *table = vectors_find(c, "table", VECTORS_I32, 2);
    const struct vectors_array *lengths = vectors_find(c, "lengths", VECTORS_I32, 1);
    int32_t *out = kit_alloc(k, physical->n_elems * 4);
    struct dsk_map_args args = {.logical = kit_addr(logical->data),
                                .physical = kit_addr(out),
                                .tables = kit_addr(table->data),
                                .seq_lens = kit_addr(lengths->data),
                                .logical_row_bytes = 4 * logical->shape[1],
                                .physical_row_bytes = 4 * logical->shape[1],
                                .table_row_bytes = 4 * table->shape[1],
                                .n_pages = 512,
                                .n_rows = (int)logical->shape[0],
                                .topk = (int)logical->shape[1],
                                .n_table = (int)table->shape[1]};

    map_ok(k, &args);
    for (int64_t i = 0; i < physical->n_elems; i++)
        KIT_EXPECT(out[i] == ((int32_t *)physical->data)[i], "%s: %lld", c->name, (long long)i);
}

START_TEST(stored_vectors_are_reproduced)
{
    char **names, text[200], path[4096];
    struct vectors_case c;
    int n, n_run = 0;
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    KIT_EXPECT(vectors_list(DSA_TEST_VECTORS, &names, &n, text, sizeof(text)) == 0, "%s", text);
    for (int i = 0; i < n; i++) {
        if (strncmp(names[i], "pagetable_", 10) != 0)
            continue;
        snprintf(path, sizeof(path), "%s/%s", DSA_TEST_VECTORS, names[i]);
        KIT_EXPECT(vectors_open(path, &c, text, sizeof(text)) == 0, "%s", text);
        run_vector(&k, &c);
        vectors_close(&c);
        n_run++;
    }
    vectors_free_list(names, n);
    ck_assert_int_ge(n_run, 5);
    kit_close(&k);
}
END_TEST

enum { n_rows = 3, n_table = 40, n_pages = 50 };

/* Values at every border: of the sign, the length, the table and the pool. */
static void border_values(struct kit *k, int32_t *row, int topk, int32_t seq_len)
{
    const int32_t borders[] = {-1,        INT32_MIN, seq_len - 1, seq_len, n_table * 64 - 1, n_table * 64,
                               INT32_MAX, 0};

    for (int i = 0; i < topk; i++) {
        row[i] = (int32_t)ref64_rng_below(&k->rng, seq_len + 10);
        if (ref64_rng_below(&k->rng, 4) == 0 || topk < 8)
            row[i] = borders[ref64_rng_below(&k->rng, 8)];
    }
}

/* DSA-04: any width, row pitch larger than the width, every border; DSA-05: sequences longer than the
 * table. */
START_TEST(any_width_and_pitch_maps_or_gives_minus_one)
{
    static const int widths[] = {1, 63, 64, 65, 2047, 2048, 2051, 2112};
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (size_t w = 0; w < sizeof(widths) / sizeof(widths[0]); w++) {
        for (int pad = 0; pad <= 5; pad += 5) {
            int topk = widths[w], pitch = topk + pad;
            int32_t seq_lens[n_rows] = {n_table * 64, 130, n_table * 64 + 100}, tables[n_rows * n_table];
            int32_t *logical = kit_alloc(&k, 4 * n_rows * pitch),
                    *physical = kit_alloc(&k, 4 * n_rows * pitch);
            uint32_t *n_bad = kit_alloc(&k, 4 * n_rows);
            struct dsk_map_args args = {.logical = kit_addr(logical),
                                        .physical = kit_addr(physical),
                                        .tables = kit_addr(tables),
                                        .seq_lens = kit_addr(seq_lens),
                                        .n_bad = kit_addr(n_bad),
                                        .logical_row_bytes = 4 * pitch,
                                        .physical_row_bytes = 4 * pitch,
                                        .table_row_bytes = pad ? 0 : 4 * n_table,
                                        .n_pages = n_pages,
                                        .n_rows = n_rows,
                                        .topk = topk,
                                        .n_table = n_table};

            for (int i = 0; i < n_rows * n_table; i++)
                tables[i] = (int32_t)ref64_rng_below(&k.rng, n_pages + 4) - 2; /* some outside the pool */
            for (int t = 0; t < n_rows; t++)
                border_values(&k, logical + t * pitch, topk, seq_lens[t]);
            map_ok(&k, &args);
            for (int t = 0; t < n_rows; t++) {
                const int32_t *table = tables + (pad ? 0 : t * n_table);
                uint32_t bad = 0;

                for (int i = 0; i < topk; i++) {
                    int32_t at = logical[t * pitch + i];
                    int64_t slot = ref64_map(at, seq_lens[t], table, n_table, n_pages);

                    bad += slot < 0 && at != -1;
                    KIT_EXPECT(physical[t * pitch + i] == slot,
                               "width %d row %d lane %d: %d gives %d, not %lld", topk, t, i, at,
                               physical[t * pitch + i], (long long)slot);
                }
                for (int i = topk; i < pitch; i++)
                    ck_assert_int_eq(physical[t * pitch + i], (int32_t)0xeeeeeeee);
                ck_assert_uint_eq(n_bad[t], bad);
            }
        }
    }
    kit_close(&k);
}
END_TEST

/* DSA-05: several query rows near the limit of a table sized for one. */
START_TEST(positions_past_the_table_are_invalid)
{
    static const int32_t pages[] = {3, 2, 1, 0};
    int32_t logical[8], physical[8];
    struct kit k;

    KIT_OPEN(&k, _i, 1);
    for (int i = 0; i < 8; i++)
        logical[i] = 252 + i;
    for (int32_t seq_len = 252; seq_len <= 260; seq_len++) {
        map_row(&k, logical, physical, 8, pages, 4, seq_len, 4);
        for (int i = 0; i < 8; i++)
            ck_assert_int_eq(physical[i], logical[i] < seq_len && logical[i] < 256 ? logical[i] - 192 : -1);
    }
    kit_close(&k);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("map");
    TCase *tcase = tcase_create("map");

    (void)max;
    tcase_set_timeout(tcase, 60);
    tcase_add_loop_test(tcase, known_positions_map_to_known_slots, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, no_rows_is_no_work, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, stored_vectors_are_reproduced, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, any_width_and_pitch_maps_or_gives_minus_one, KIT_FIRST_ISA, KIT_END_ISA);
    tcase_add_loop_test(tcase, positions_past_the_table_are_invalid, KIT_FIRST_ISA, KIT_END_ISA);
    suite_add_tcase(suite, tcase);
    suites_p[0] = suite;
    return 1;
}
