/* kvpool: pages are handed out once, and come back once. */
#include "server/core/kvpool.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "kit.h"
#include "test_main.h"

static struct srv_kvpool *new_pool(uint32_t n_pages)
{
    struct srv_kvpool *pool;

    ck_assert_int_eq(srv_kvpool_create(n_pages, &pool), DSA_OK);
    return pool;
}

static struct srv_kvpool_stats stats_of(const struct srv_kvpool *pool)
{
    struct srv_kvpool_stats stats;

    srv_kvpool_stats(pool, &stats);
    return stats;
}

START_TEST(sizes_out_of_range_are_refused)
{
    struct srv_kvpool *pool = (void *)&pool;

    ck_assert_int_eq(srv_kvpool_create(0, &pool), DSA_E_BAD_REQUEST);
    ck_assert_int_eq(srv_kvpool_create((1u << 25) + 1, &pool), DSA_E_BAD_REQUEST);
    ck_assert_ptr_eq(pool, &pool);
    srv_kvpool_destroy(NULL);
}
END_TEST

START_TEST(every_page_is_handed_out_once)
{
    struct srv_kvpool *pool = new_pool(100);
    bool seen[100] = {false};
    int32_t ids[100];

    ck_assert_int_eq(srv_kvpool_get(pool, 37, ids, NULL), DSA_OK);
    ck_assert_int_eq(srv_kvpool_get(pool, 63, ids + 37, NULL), DSA_OK);
    for (int i = 0; i < 100; i++) {
        ck_assert(ids[i] >= 0 && ids[i] < 100 && !seen[ids[i]]);
        seen[ids[i]] = true;
    }
    ck_assert_uint_eq(stats_of(pool).n_free, 0);
    srv_kvpool_destroy(pool);
}
END_TEST

START_TEST(get_takes_all_or_nothing)
{
    struct srv_kvpool *pool = new_pool(4);
    int32_t ids[5] = {-7, -7, -7, -7, -7};
    struct srv_err err;

    ck_assert_int_eq(srv_kvpool_get(pool, 5, ids, &err), DSA_E_NO_PAGES);
    for (int i = 0; i < 5; i++)
        ck_assert_int_eq(ids[i], -7);
    ck_assert_uint_eq(stats_of(pool).n_free, 4);
    ck_assert_str_eq(err.value, "5");
    ck_assert_uint_gt(err.retry_after_us, 0); /* OPS-03: refused with a hint, not dropped */
    ck_assert_int_eq(srv_kvpool_get(pool, 4, ids, &err), DSA_OK);
    ck_assert_int_eq(srv_kvpool_get(pool, 0, NULL, &err), DSA_OK);
    ck_assert_int_eq(srv_kvpool_get(pool, 1, ids, &err), DSA_E_NO_PAGES);
    srv_kvpool_destroy(pool);
}
END_TEST

START_TEST(last_page_back_is_first_out)
{
    struct srv_kvpool *pool = new_pool(8);
    int32_t ids[3], again[2];

    ck_assert_int_eq(srv_kvpool_get(pool, 3, ids, NULL), DSA_OK);
    srv_kvpool_put(pool, ids[0]);
    srv_kvpool_put(pool, ids[2]);
    ck_assert_int_eq(srv_kvpool_get(pool, 2, again, NULL), DSA_OK);
    ck_assert_int_eq(again[0], ids[2]);
    ck_assert_int_eq(again[1], ids[0]);
    srv_kvpool_destroy(pool);
}
END_TEST

START_TEST(a_shared_page_is_free_after_its_last_holder)
{
    struct srv_kvpool *pool = new_pool(2);
    int32_t page;

    ck_assert_int_eq(srv_kvpool_get(pool, 1, &page, NULL), DSA_OK);
    srv_kvpool_ref(pool, page);
    srv_kvpool_ref(pool, page);
    ck_assert_uint_eq(srv_kvpool_refs(pool, page), 3);
    ck_assert_uint_eq(stats_of(pool).n_shared, 1);
    ck_assert_uint_eq(stats_of(pool).n_refs, 3);
    srv_kvpool_put(pool, page);
    ck_assert_uint_eq(stats_of(pool).n_shared, 1);
    srv_kvpool_put(pool, page);
    ck_assert_uint_eq(stats_of(pool).n_shared, 0);
    ck_assert_uint_eq(stats_of(pool).n_free, 1);
    srv_kvpool_put(pool, page);
    ck_assert_uint_eq(srv_kvpool_refs(pool, page), 0);
    ck_assert_uint_eq(stats_of(pool).n_free, 2);
    ck_assert_uint_eq(stats_of(pool).n_refs, 0);
    srv_kvpool_destroy(pool);
}
END_TEST

/* POOL-01: a page put twice must never reach the free list twice. */
START_TEST(a_page_put_twice_ends_the_process)
{
    struct srv_kvpool *pool = new_pool(2);
    int32_t page;

    ck_assert_int_eq(srv_kvpool_get(pool, 1, &page, NULL), DSA_OK);
    srv_kvpool_put(pool, page);
    srv_kvpool_put(pool, page);
}
END_TEST

START_TEST(a_page_outside_the_pool_ends_the_process)
{
    srv_kvpool_ref(new_pool(2), -1);
}
END_TEST

/* POOL-01, POOL-03: sums hold at each step of a long random life. */
START_TEST(random_life_keeps_the_sums)
{
    enum { N = 50, STEPS = 20000 };
    struct kit_rng rng = {test_seed()};
    struct srv_kvpool *pool = new_pool(N);
    uint32_t refs[N] = {0};
    uint32_t n_used = 0;

    for (int step = 0; step < STEPS; step++) {
        uint32_t want = kit_below(&rng, 6);
        int32_t page = (int32_t)kit_below(&rng, N), ids[6];
        struct srv_kvpool_stats stats;
        uint64_t sum = 0, shared = 0;

        if (refs[page] > 0 && kit_chance(&rng, 700)) {
            srv_kvpool_put(pool, page);
            n_used -= --refs[page] == 0;
        } else if (refs[page] > 0) {
            srv_kvpool_ref(pool, page);
            refs[page]++;
        } else if (srv_kvpool_get(pool, want, ids, NULL) == DSA_OK) {
            ck_assert_uint_le(want, N - n_used);
            for (uint32_t i = 0; i < want; i++) {
                ck_assert_uint_eq(refs[ids[i]], 0);
                refs[ids[i]] = 1;
            }
            n_used += want;
        } else {
            ck_assert_uint_gt(want, N - n_used);
        }
        for (int i = 0; i < N; i++) {
            if (srv_kvpool_refs(pool, i) != refs[i])
                ck_abort_msg("step %d page %d: %u refs, expected %u", step, i, srv_kvpool_refs(pool, i),
                             refs[i]);
            sum += refs[i];
            shared += refs[i] > 1;
        }
        stats = stats_of(pool);
        if (stats.n_free + n_used != N || stats.n_refs != sum || stats.n_shared != shared)
            ck_abort_msg("step %d: the sums are wrong", step);
    }
    srv_kvpool_destroy(pool);
}
END_TEST

static const char *scenario(void)
{
    struct srv_kvpool *pool = NULL;
    int32_t ids[10];

    TRY(srv_kvpool_create(10, &pool), pool == NULL);
    NEED(srv_kvpool_get(pool, 10, ids, NULL) == DSA_OK);
    srv_kvpool_destroy(pool);
    return NULL;
}

START_TEST(any_allocation_may_fail)
{
    kit_sweep(scenario);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("kvpool");
    TCase *tc = tcase_create("kvpool");

    (void)max;
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, sizes_out_of_range_are_refused);
    tcase_add_test(tc, every_page_is_handed_out_once);
    tcase_add_test(tc, get_takes_all_or_nothing);
    tcase_add_test(tc, last_page_back_is_first_out);
    tcase_add_test(tc, a_shared_page_is_free_after_its_last_holder);
    tcase_add_test_raise_signal(tc, a_page_put_twice_ends_the_process, SIGABRT);
    tcase_add_test_raise_signal(tc, a_page_outside_the_pool_ends_the_process, SIGABRT);
    tcase_add_test(tc, random_life_keeps_the_sums);
    tcase_add_test(tc, any_allocation_may_fail);
    suite_add_tcase(suite, tc);
    suites_p[0] = suite;
    return 1;
}
