/* The worker: what each job does to sequences and pages. Results are compared with the kernels called
 * directly and with float64. Order, cancels and who runs: test_worker_queue.c. */
#include <stdlib.h>
#include <string.h>

#include "mirror.h"
#include "ref64.h"

static struct wk wk;

static void start(void)
{
    struct srv_worker_config config = wk_config();

    wk_start(&wk, &config);
}

static void end(void)
{
    wk_end(&wk);
}

static size_t row_bytes(void)
{
    return (size_t)wk.layout->row_bytes;
}

/* ---- one job at a time ----------------------------------------------------------------------- */

START_TEST(results_equal_the_kernels_and_float64)
{
    uint16_t *rows = wk_rows(&wk, 150);
    uint64_t id = wk_create(&wk);
    struct wk_query query;
    struct mirror m;
    struct wk_job j;

    wk_append(&wk, id, rows, 150);
    wk_query_make(&wk, &query, 5, 16, 96, 150);
    wk_attend_job(&j, &wk, id, 1, &query);
    KIT_OK(wk_run(&wk, &j), &j.err);
    ck_assert_uint_eq(j.rows_got, 5);
    mirror_open(&m, &wk, rows, 150);
    mirror_compare(&m, &query);
    mirror_oracle(&wk, rows, 150, &query);
    mirror_close(&m);
    wk_query_free(&query);
    free(rows);
}
END_TEST

START_TEST(appends_add_up_in_every_layer)
{
    uint16_t *rows = wk_rows(&wk, 200);
    size_t d = (size_t)wk.layout->d_qk;
    uint64_t id = wk_create(&wk);
    struct wk_job j;

    wk_append_job(&wk, &j, id, 0, 1, rows, 100);
    KIT_OK(wk_run(&wk, &j), &j.err);
    ck_assert_uint_eq(j.pieces[0].n_tokens, 100);
    ck_assert_uint_eq(wk_n_tokens(&wk, id), 0); /* layer 1 has none yet */
    wk_append_job(&wk, &j, id, 1, 1, rows, 70);
    KIT_OK(wk_run(&wk, &j), &j.err);
    ck_assert_uint_eq(wk_n_tokens(&wk, id), 70);
    wk_append_job(&wk, &j, id, 1, 1, rows + 70 * d, 130);
    KIT_OK(wk_run(&wk, &j), &j.err);
    wk_append_job(&wk, &j, id, 0, 1, rows + 100 * d, 100);
    KIT_OK(wk_run(&wk, &j), &j.err);
    mirror_rows(&wk, id, 0, rows, 200);
    mirror_rows(&wk, id, 1, rows, 200);
    free(rows);
}
END_TEST

START_TEST(several_layers_in_one_append)
{
    uint16_t *rows = wk_rows(&wk, 2 * 65);
    uint64_t id = wk_create(&wk);
    struct wk_job j;

    wk_append_job(&wk, &j, id, 0, 2, rows, 65);
    KIT_OK(wk_run(&wk, &j), &j.err);
    mirror_rows(&wk, id, 0, rows, 65);
    mirror_rows(&wk, id, 1, rows + 65 * (size_t)wk.layout->d_qk, 65);
    free(rows);
}
END_TEST

START_TEST(forks_share_pages_and_part_when_written)
{
    uint16_t *rows = wk_rows(&wk, 100), *more = wk_rows(&wk, 60), *both = wk_rows(&wk, 160);
    size_t d = (size_t)wk.layout->d_qk;
    uint64_t a = wk_create(&wk), b, c;
    struct srv_job_stats stats;

    wk_append(&wk, a, rows, 100);
    b = wk_fork(&wk, a, 0);
    stats = wk_stats(&wk);
    ck_assert_uint_eq(stats.pool.n_pages - stats.pool.n_free,
                      3); /* page 0 shared, a partly used last page each */
    ck_assert_uint_eq(stats.pool.n_shared, 1);
    c = wk_fork(&wk, a, 64); /* a whole page: nothing to copy */
    stats = wk_stats(&wk);
    ck_assert_uint_eq(stats.pool.n_pages - stats.pool.n_free, 3);
    wk_append(&wk, b, more, 60);
    mirror_rows(&wk, a, 0, rows, 100);
    memcpy(both, rows, 100 * d * 2);
    memcpy(both + 100 * d, more, 60 * d * 2);
    mirror_rows(&wk, b, 0, both, 160);
    mirror_rows(&wk, b, 1, both, 160);
    mirror_rows(&wk, c, 1, rows, 64);
    wk_release(&wk, a);
    mirror_rows(&wk, b, 0, both, 160);
    mirror_rows(&wk, c, 0, rows, 64);
    free(rows);
    free(more);
    free(both);
}
END_TEST

START_TEST(truncate_then_append_leaves_the_fork_alone)
{
    uint16_t *rows = wk_rows(&wk, 128), *more = wk_rows(&wk, 10), *both = wk_rows(&wk, 30);
    size_t d = (size_t)wk.layout->d_qk;
    uint64_t a = wk_create(&wk), b;
    struct wk_job j;

    wk_append(&wk, a, rows, 128);
    b = wk_fork(&wk, a, 128);
    wk_job(&j, SRV_OP_TRUNCATE);
    wk_access(&j, a, true);
    j.job.u.sequence.id = a;
    j.job.u.sequence.n_tokens = 20;
    KIT_OK(wk_run(&wk, &j), &j.err);
    ck_assert_uint_eq(j.job.u.sequence.n_tokens, 20);
    wk_append(&wk, a, more, 10); /* into a page that b reads: it must be copied first */
    memcpy(both, rows, 20 * d * 2);
    memcpy(both + 20 * d, more, 10 * d * 2);
    mirror_rows(&wk, a, 0, both, 30);
    mirror_rows(&wk, b, 0, rows, 128);
    mirror_rows(&wk, b, 1, rows, 128);
    free(rows);
    free(more);
    free(both);
}
END_TEST

START_TEST(exported_rows_can_be_imported)
{
    uint16_t *rows = wk_rows(&wk, 90);
    uint8_t *stored = malloc(90 * row_bytes()), *again = malloc(90 * row_bytes());
    uint16_t *wide = malloc(90 * (size_t)wk.layout->d_qk * 2);
    uint64_t a = wk_create(&wk), b = wk_create(&wk);
    struct wk_job j;

    ck_assert(stored && again && wide);
    wk_append(&wk, a, rows, 90);
    ck_assert_uint_eq(wk_export(&wk, a, 0, stored, 90), 90);
    wk_append_job(&wk, &j, b, 0, 1, NULL, 90);
    j.job.op = SRV_OP_IMPORT;
    j.job.u.append.rows = stored;
    j.job.u.append.row_bytes = (int64_t)row_bytes();
    KIT_OK(wk_run(&wk, &j), &j.err);
    ck_assert_uint_eq(wk_export(&wk, b, 0, again, 90), 90);
    ck_assert_int_eq(memcmp(stored, again, 90 * row_bytes()), 0);
    wk_job(&j, SRV_OP_EXPORT);
    wk_access(&j, b, false);
    j.job.u.export = (struct srv_job_export){
        .sequence = b, .as_bf16 = true, .first = 63, .n_tokens = 5, .out = (uint8_t *)wide};
    KIT_OK(wk_run(&wk, &j), &j.err);
    ck_assert_uint_eq(j.job.u.export.n_tokens, 5);
    ck_assert_uint_eq(j.job.u.export.layer_tokens, 90);
    for (int i = 0; i < 5; i++) {
        uint16_t expected[DSK_MAX_D_QK];

        ref64_dequant_row_bf16(ref64_layout_get(wk.layout->id), 1.0f, stored + (size_t)(63 + i) * row_bytes(),
                               expected);
        ck_assert_int_eq(memcmp(wide + i * wk.layout->d_qk, expected, (size_t)wk.layout->d_qk * 2), 0);
    }
    free(rows);
    free(stored);
    free(again);
    free(wide);
}
END_TEST

START_TEST(export_past_the_end)
{
    uint16_t *rows = wk_rows(&wk, 10);
    uint8_t *stored = malloc(20 * row_bytes());
    uint64_t id = wk_create(&wk);
    struct wk_job j;

    ck_assert_ptr_nonnull(stored);
    wk_append(&wk, id, rows, 10);
    for (uint64_t first = 9; first <= 11; first++) {
        wk_job(&j, SRV_OP_EXPORT);
        wk_access(&j, id, false);
        j.job.u.export =
            (struct srv_job_export){.sequence = id, .first = first, .n_tokens = 20, .out = stored};
        ck_assert_int_eq(wk_run(&wk, &j), first <= 10 ? DSA_OK : DSA_E_BAD_RANGE);
        if (first <= 10)
            ck_assert_uint_eq(j.job.u.export.n_tokens, 10 - first);
    }
    free(rows);
    free(stored);
}
END_TEST

START_TEST(nonfinite_values_are_counted_or_refused)
{
    uint16_t *rows = wk_rows(&wk, 8);
    uint64_t id = wk_create(&wk);
    struct wk_job j;

    rows[3] = 0x7fc0;                                 /* NaN */
    rows[2 * (size_t)wk.layout->d_qk + 100] = 0x7f80; /* infinity */
    wk_append_job(&wk, &j, id, 0, 1, rows, 8);
    j.job.u.append.strict = true;
    ck_assert_int_eq(wk_run(&wk, &j), DSA_E_NONFINITE);
    ck_assert_uint_eq(wk_stats(&wk).pool.n_free, wk.config.n_pages); /* nothing kept */
    wk_append_job(&wk, &j, id, 0, 1, rows, 8);
    KIT_OK(wk_run(&wk, &j), &j.err);
    ck_assert_uint_eq(j.pieces[0].n_nonfinite, 2);
    free(rows);
}
END_TEST

START_TEST(foreign_sequences_do_not_exist)
{
    static const enum srv_op ops[] = {SRV_OP_GET,     SRV_OP_FORK,   SRV_OP_TRUNCATE,
                                      SRV_OP_RELEASE, SRV_OP_APPEND, SRV_OP_EXPORT};
    uint16_t *rows = wk_rows(&wk, 4);
    uint64_t id = wk_create(&wk);
    uint8_t byte[8];

    wk_append(&wk, id, rows, 4);
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        struct wk_job j;

        wk_append_job(&wk, &j, id, 0, 1, rows, 1);
        j.job.op = ops[i];
        j.job.session = WK_SESSION + 1;
        if (ops[i] == SRV_OP_EXPORT)
            j.job.u.export = (struct srv_job_export){.sequence = id, .n_tokens = 1, .out = byte};
        else if (ops[i] != SRV_OP_APPEND)
            j.job.u.sequence = (struct srv_job_sequence){.id = id};
        ck_assert_msg(wk_run(&wk, &j) == DSA_E_NOT_FOUND, "op %d", ops[i]);
    }
    mirror_rows(&wk, id, 0, rows, 4);
    free(rows);
}
END_TEST

START_TEST(get_lists_layers_and_pages)
{
    uint16_t *rows = wk_rows(&wk, 100);
    uint64_t id = wk_create(&wk), layer_tokens[2] = {0};
    int32_t pages[4] = {-7, -7, -7, -7};
    struct wk_job j;

    wk_append_job(&wk, &j, id, 0, 1, rows, 100);
    KIT_OK(wk_run(&wk, &j), &j.err);
    wk_job(&j, SRV_OP_GET);
    wk_access(&j, id, false);
    j.job.u.sequence =
        (struct srv_job_sequence){.id = id, .layer_tokens = layer_tokens, .pages = pages, .max_pages = 1};
    KIT_OK(wk_run(&wk, &j), &j.err);
    ck_assert_uint_eq(layer_tokens[0], 100);
    ck_assert_uint_eq(layer_tokens[1], 0);
    ck_assert_uint_eq(j.job.u.sequence.n_pages, 2);
    ck_assert_int_ge(pages[0], 0);
    ck_assert_int_eq(pages[1], -7); /* never past max_pages */
    free(rows);
}
END_TEST

/* ---- pages ----------------------------------------------------------------------------------- */

START_TEST(end_of_session_returns_every_page)
{
    uint16_t *rows = wk_rows(&wk, 130);
    struct srv_job_stats stats;
    uint64_t mine = wk_create(&wk), other;
    struct wk_job j;

    wk_append(&wk, mine, rows, 130);
    for (int i = 0; i < 5; i++)
        wk_fork(&wk, mine, 100);
    wk_job(&j, SRV_OP_CREATE);
    j.job.session = 99;
    KIT_OK(wk_run(&wk, &j), &j.err);
    other = j.job.u.sequence.id;
    wk_append_job(&wk, &j, other, 0, 1, rows, 10);
    j.job.session = 99;
    KIT_OK(wk_run(&wk, &j), &j.err);
    ck_assert_uint_eq(wk_stats(&wk).n_sequences, 7);
    wk_end_session(&wk, WK_SESSION);
    stats = wk_stats(&wk);
    ck_assert_uint_eq(stats.n_sequences, 1);
    ck_assert_uint_eq(stats.pool.n_pages - stats.pool.n_free, 1);
    wk_end_session(&wk, WK_SESSION); /* it owns nothing now */
    wk_end_session(&wk, 99);
    stats = wk_stats(&wk);
    ck_assert_uint_eq(stats.pool.n_free, stats.pool.n_pages);
    ck_assert_uint_eq(stats.pool.n_refs, 0);
    free(rows);
}
END_TEST

START_TEST(a_full_pool_leaves_sequences_intact)
{
    uint16_t *rows = wk_rows(&wk, 64 * 64);
    uint64_t a = wk_create(&wk), b = wk_create(&wk), fork;
    struct wk_query query;
    struct wk_job j, append;

    wk_append(&wk, a, rows, 62 * 64 + 10); /* 63 of 64 pages */
    wk_append(&wk, b, rows, 20);           /* the last one */
    ck_assert_uint_eq(wk_stats(&wk).pool.n_free, 0);
    wk_append_job(&wk, &j, b, 0, 1, rows, 45);
    ck_assert_int_eq(wk_run(&wk, &j), DSA_E_NO_PAGES);
    wk_job(&j, SRV_OP_FORK);
    wk_access(&j, b, true);
    j.job.u.sequence.id = b; /* a partly used page would be copied */
    ck_assert_int_eq(wk_run(&wk, &j), DSA_E_NO_PAGES);
    wk_query_make(&wk, &query, 2, 4, 8, 20);
    wk_attend_job(&j, &wk, b, 0, &query);
    j.accesses[0].is_write = true;
    wk_append_job(&wk, &append, b, 0, 1, rows, 45);
    j.job.u.attend.append = append.job.u.append;
    ck_assert_int_eq(wk_run(&wk, &j), DSA_E_NO_PAGES);
    mirror_rows(&wk, b, 0, rows, 20);
    wk_append(&wk, b, rows + 20 * (size_t)wk.layout->d_qk, 44); /* what fits, fits */
    mirror_rows(&wk, b, 1, rows, 64);
    mirror_rows(&wk, a, 0, rows, 62 * 64 + 10);
    fork = wk_fork(&wk, a, 64 * 3); /* whole pages are only shared */
    mirror_rows(&wk, fork, 0, rows, 192);
    wk_release(&wk, a);
    wk_append(&wk, b, rows, 64);
    wk_query_free(&query);
    free(rows);
}
END_TEST

/* ---- every layout ---------------------------------------------------------------------------- */

START_TEST(each_layout_round_trips)
{
    struct srv_worker_config config = wk_config();
    uint16_t *rows;
    uint64_t id;
    struct wk_query query;
    struct wk_job j;
    struct mirror m;

    config.layout = (uint32_t)_i;
    config.n_pages = 4;
    config.n_layers = 1;
    config.spin_us = _i % 2 ? 200 : 0;
    wk_start(&wk, &config);
    rows = wk_rows(&wk, 100);
    id = wk_create(&wk);
    wk_append(&wk, id, rows, 100);
    mirror_rows(&wk, id, 0, rows, 100);
    wk_query_make(&wk, &query, 3, 8, 50, 100);
    wk_attend_job(&j, &wk, id, 0, &query);
    KIT_OK(wk_run(&wk, &j), &j.err);
    mirror_open(&m, &wk, rows, 100);
    mirror_compare(&m, &query);
    mirror_close(&m);
    mirror_oracle(&wk, rows, 100, &query);
    wk_query_free(&query);
    free(rows);
    wk_end(&wk);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *one = tcase_create("one job"), *pages = tcase_create("pages"), *layouts = tcase_create("layouts");
    TCase *all[] = {one, pages};

    (void)max;
    suites_p[0] = suite_create("worker");
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        tcase_add_checked_fixture(all[i], start, end);
        tcase_set_timeout(all[i], 60);
        suite_add_tcase(suites_p[0], all[i]);
    }
    tcase_add_test(one, results_equal_the_kernels_and_float64);
    tcase_add_test(one, appends_add_up_in_every_layer);
    tcase_add_test(one, several_layers_in_one_append);
    tcase_add_test(one, forks_share_pages_and_part_when_written);
    tcase_add_test(one, truncate_then_append_leaves_the_fork_alone);
    tcase_add_test(one, exported_rows_can_be_imported);
    tcase_add_test(one, export_past_the_end);
    tcase_add_test(one, nonfinite_values_are_counted_or_refused);
    tcase_add_test(one, foreign_sequences_do_not_exist);
    tcase_add_test(one, get_lists_layers_and_pages);
    tcase_add_test(pages, end_of_session_returns_every_page);
    tcase_add_test(pages, a_full_pool_leaves_sequences_intact);
    tcase_set_timeout(layouts, 60);
    tcase_add_loop_test(layouts, each_layout_round_trips, DSK_LAYOUT_SCALED_512_64, DSK_LAYOUT_COUNT);
    suite_add_tcase(suites_p[0], layouts);
    return 1;
}
