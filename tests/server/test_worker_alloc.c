/* A worker that starts, works and ends while each of its allocations, mappings and threads fails in turn. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "worker_kit.h"

void *__real_aligned_alloc(size_t alignment, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);
int __real_sem_init(sem_t *sem, int is_shared, unsigned value);
int __wrap_sem_init(sem_t *sem, int is_shared, unsigned value);

/* Beside the heap (kit_alloc.c): the n-th of these calls fails, from 1. Any thread may make them. */
static atomic_bool is_on;
static atomic_long fail_at, n_calls;

static bool must_fail(void)
{
    return atomic_load(&is_on) && atomic_fetch_add(&n_calls, 1) + 1 == atomic_load(&fail_at);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return must_fail() ? NULL : __real_aligned_alloc(alignment, size);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    return must_fail() ? 11 : __real_pthread_create(thread, attr, fn, arg);
}

int __wrap_sem_init(sem_t *sem, int is_shared, unsigned value)
{
    return must_fail() ? -1 : __real_sem_init(sem, is_shared, value);
}

static dsa_status start_and_free(struct srv_err *err)
{
    struct srv_worker_config config = wk_config();
    struct srv_worker *worker = NULL;
    dsa_status rc;

    config.device.n_threads = 2;
    rc = srv_worker_start(&config, &worker, err);
    if (rc == DSA_OK)
        srv_worker_free(worker);
    else
        KIT_EXPECT(worker == NULL, "*worker_p is written on failure");
    return rc;
}

START_TEST(each_failing_allocation_is_an_answer)
{
    long n_allocs;
    struct srv_err err = {0};

    kit_alloc_begin(0);
    KIT_EXPECT(start_and_free(&err) == DSA_OK, "the worker does not start");
    n_allocs = kit_alloc_end(NULL);
    ck_assert_int_ge(n_allocs, 8);
    for (long i = 1; i <= n_allocs; i++) {
        dsa_status rc;

        srv_err_clear(&err);
        kit_alloc_begin(i);
        rc = start_and_free(&err);
        kit_alloc_end(NULL);
        ck_assert_msg(rc == DSA_E_NO_MEMORY, "allocation %ld: status %d", i, rc);
        ck_assert_int_eq(err.code, rc);
        ck_assert_uint_gt(strlen(err.text), 0);
    }
    KIT_OK(start_and_free(&err), &err);
}
END_TEST

START_TEST(each_failing_system_call_is_an_answer)
{
    struct srv_err err = {0};
    long n;

    atomic_store(&fail_at, 0);
    atomic_store(&n_calls, 0);
    atomic_store(&is_on, true);
    KIT_OK(start_and_free(&err), &err);
    n = atomic_load(&n_calls);
    ck_assert_int_ge(n, 5);
    for (long i = 1; i <= n; i++) {
        dsa_status rc;

        srv_err_clear(&err);
        atomic_store(&fail_at, i);
        atomic_store(&n_calls, 0);
        rc = start_and_free(&err);
        ck_assert_msg(rc == DSA_E_NO_MEMORY, "call %ld: status %d", i, rc);
        ck_assert_int_eq(err.code, rc);
        ck_assert_uint_gt(strlen(err.text), 0);
    }
    atomic_store(&is_on, false);
}
END_TEST

START_TEST(a_pool_that_does_not_fit_is_named_with_its_size)
{
    struct srv_worker_config config = wk_config();
    struct srv_worker *worker;
    struct srv_err err = {0};

    config.n_pages = 33554431;
    config.n_layers = 1024; /* 1.3 PiB */
    ck_assert_int_eq(srv_worker_start(&config, &worker, &err), DSA_E_NO_MEMORY);
    ck_assert_str_eq(err.field, "pool-bytes");
    ck_assert_ptr_nonnull(strstr(err.text, "bytes"));
}
END_TEST

START_TEST(what_cannot_be_served_is_refused)
{
    struct srv_worker_config config = wk_config();
    struct srv_worker *worker;
    struct srv_err err = {0};

    config.layout = 99;
    ck_assert_int_eq(srv_worker_start(&config, &worker, &err), DSA_E_BAD_LAYOUT);
    config = wk_config();
    config.device.kind = DSK_DEVICE_CUDA;
    ck_assert_int_ne(srv_worker_start(&config, &worker, &err), DSA_OK);
    config = wk_config();
    config.device.isa = 99;
    ck_assert_int_ne(srv_worker_start(&config, &worker, &err), DSA_OK);
    config = wk_config();
    config.device.ordinal = 1;
    ck_assert_int_ne(srv_worker_start(&config, &worker, &err), DSA_OK);
}
END_TEST

/* An allocation that fails in mid-work is the answer of that one job; the sequences stay whole. */
START_TEST(work_goes_on_after_a_failing_allocation)
{
    struct srv_worker_config config = wk_config();
    struct wk wk;
    uint16_t *rows;
    uint64_t id;
    long n_failed = 0;

    wk_start(&wk, &config);
    rows = wk_rows(&wk, 600);
    id = wk_create(&wk);
    for (uint32_t i = 0; i < 60; i++) {
        struct wk_job j;
        uint64_t before = wk_n_tokens(&wk, id);
        dsa_status rc;

        wk_append_job(&wk, &j, id, 0, 2, rows, 30);
        kit_alloc_begin(1 + (long)wk_random(3));
        wk_submit(&wk, &j);
        srv_worker_kick(wk.worker);
        wk_finish(&wk, &j);
        kit_alloc_end(NULL);
        rc = j.err.code;
        KIT_EXPECT(rc == DSA_OK || rc == DSA_E_NO_MEMORY, "status %d", rc);
        n_failed += rc != DSA_OK;
        ck_assert_uint_eq(wk_n_tokens(&wk, id), before + (rc == DSA_OK ? 30 : 0));
        if (wk_n_tokens(&wk, id) >= 600) {
            wk_release(&wk, id);
            id = wk_create(&wk);
        }
    }
    ck_assert_int_gt(n_failed, 0);
    wk_end_session(&wk, WK_SESSION);
    ck_assert_uint_eq(wk_stats(&wk).pool.n_free, config.n_pages);
    free(rows);
    wk_end(&wk);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *tc = tcase_create("worker alloc");

    (void)max;
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, each_failing_allocation_is_an_answer);
    tcase_add_test(tc, each_failing_system_call_is_an_answer);
    tcase_add_test(tc, a_pool_that_does_not_fit_is_named_with_its_size);
    tcase_add_test(tc, what_cannot_be_served_is_refused);
    tcase_add_test(tc, work_goes_on_after_a_failing_allocation);
    suites_p[0] = suite_create("worker alloc");
    suite_add_tcase(suites_p[0], tc);
    return 1;
}
