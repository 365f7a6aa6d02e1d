/* The worker's queue: the order in which jobs take effect, which of them share a launch, what becomes of
 * jobs that are cancelled, late or left over, which thread runs, and a device that is lost. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "mirror.h"
#include "server/clock.h"

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

/* ---- order and batches ----------------------------------------------------------------------- */

/* append, attend, append, attend, all sent at once: each attend sees what was sent before it and no more. */
START_TEST(jobs_of_a_sequence_take_effect_in_the_order_sent)
{
    uint16_t *rows = wk_rows(&wk, 120);
    size_t d = (size_t)wk.layout->d_qk;
    uint64_t id = wk_create(&wk);
    struct wk_job appends[3], attends[3];
    struct wk_query queries[3];

    wk_park(&wk);
    for (uint32_t i = 0; i < 3; i++) {
        wk_append_job(&wk, &appends[i], id, 0, 1, rows + i * 40 * d, 40);
        wk_submit(&wk, &appends[i]);
        wk_query_make(&wk, &queries[i], 2, 8, 200, 120); /* indices reach past what is there */
        wk_attend_job(&attends[i], &wk, id, 0, &queries[i]);
        attends[i].job.node.priority = 50; /* priority does not overtake within a sequence */
        wk_submit(&wk, &attends[i]);
    }
    srv_worker_kick(wk.worker);
    for (uint32_t i = 0; i < 3; i++) {
        struct mirror m;

        wk_finish(&wk, &attends[i]);
        KIT_OK(appends[i].err.code, &appends[i].err);
        KIT_OK(attends[i].err.code, &attends[i].err);
        ck_assert_uint_eq(appends[i].pieces[0].n_tokens, (i + 1) * 40);
        ck_assert(i == 2 ? attends[i].pieces[0].n_invalid == 0 : attends[i].pieces[0].n_invalid > 0);
        mirror_open(&m, &wk, rows, (i + 1) * 40);
        mirror_compare(&m, &queries[i]);
        mirror_close(&m);
        wk_query_free(&queries[i]);
    }
    free(rows);
}
END_TEST

START_TEST(compatible_jobs_share_a_launch)
{
    enum { N = 6 };
    uint16_t *rows = wk_rows(&wk, 80);
    uint64_t ids[N], n_batches;
    struct wk_job jobs[N], odd;
    struct wk_query queries[N], odd_query;
    struct mirror m;

    for (int i = 0; i < N; i++) {
        ids[i] = wk_create(&wk);
        wk_append(&wk, ids[i], rows, 80);
        wk_query_make(&wk, &queries[i], 3, 8, 40 + (unsigned)i, 80);
        wk_attend_job(&jobs[i], &wk, ids[i], 0, &queries[i]);
    }
    wk_query_make(&wk, &odd_query, 3, 16, 40, 80);
    wk_attend_job(&odd, &wk, ids[0], 0, &odd_query);
    n_batches = wk_stats(&wk).n_batches;
    wk_park(&wk);
    for (int i = 0; i < N; i++)
        wk_submit(&wk, &jobs[i]);
    wk_submit(&wk, &odd);
    srv_worker_kick(wk.worker);
    wk_finish(&wk, &odd);
    mirror_open(&m, &wk, rows, 80);
    for (int i = 0; i < N; i++) {
        KIT_OK(jobs[i].err.code, &jobs[i].err);
        ck_assert_uint_eq(jobs[i].pieces[0].batch_rows, 3 * N);
        mirror_compare(&m, &queries[i]);
        wk_query_free(&queries[i]);
    }
    ck_assert_uint_eq(odd.pieces[0].batch_rows, 3); /* other heads: a launch of its own */
    mirror_compare(&m, &odd_query);
    ck_assert_uint_eq(wk_stats(&wk).n_batches, n_batches + 2);
    mirror_close(&m);
    wk_query_free(&odd_query);
    free(rows);
}
END_TEST

/* Several segments of one job read sequences of their own. */
START_TEST(segments_read_their_sequences)
{
    uint16_t *first = wk_rows(&wk, 50), *second = wk_rows(&wk, 50);
    uint64_t a = wk_create(&wk), b = wk_create(&wk);
    size_t n_out = 8 * (size_t)wk.layout->d_v;
    struct wk_query query, part;
    struct wk_job j;
    struct mirror m;

    wk_append(&wk, a, first, 50);
    wk_append(&wk, b, second, 50);
    wk_query_make(&wk, &query, 5, 8, 30, 50);
    wk_attend_job(&j, &wk, a, 0, &query);
    wk_access(&j, b, false);
    j.segments[0] = (struct srv_job_segment){a, 2, 0};
    j.segments[1] = (struct srv_job_segment){b, 3, 2};
    j.job.u.attend.n_segments = 2;
    KIT_OK(wk_run(&wk, &j), &j.err);
    part = query;
    part.n_rows = 2;
    mirror_open(&m, &wk, first, 50);
    mirror_compare(&m, &part);
    mirror_close(&m);
    part.n_rows = 3;
    part.q += 2 * 8 * wk.layout->d_qk;
    part.indices += 2 * 30;
    part.out += 2 * n_out;
    part.lse += 2 * 8;
    mirror_open(&m, &wk, second, 50);
    mirror_compare(&m, &part);
    mirror_close(&m);
    wk_query_free(&query);
    free(first);
    free(second);
}
END_TEST

START_TEST(long_jobs_come_in_pieces)
{
    uint16_t *rows = wk_rows(&wk, 100);
    uint64_t id = wk_create(&wk);
    struct wk_query query;
    struct wk_job j;
    struct mirror m;

    wk_append(&wk, id, rows, 100);
    wk_query_make(&wk, &query, 200, 4, 20, 100);
    wk_attend_job(&j, &wk, id, 0, &query);
    KIT_OK(wk_run(&wk, &j), &j.err);
    ck_assert_uint_eq(j.n_got, 4);
    for (uint32_t i = 0; i < 4; i++) {
        ck_assert_uint_eq(j.pieces[i].row_begin, i * 64);
        ck_assert_uint_eq(j.pieces[i].n_rows, i < 3 ? 64 : 8);
        ck_assert_int_eq(j.pieces[i].is_last, i == 3);
        ck_assert_uint_le(j.pieces[i].launch_us, j.pieces[i].done_us);
    }
    mirror_open(&m, &wk, rows, 100);
    mirror_compare(&m, &query);
    mirror_close(&m);
    wk_query_free(&query);
    free(rows);
}
END_TEST

START_TEST(short_jobs_pass_long_ones_and_priority_counts)
{
    uint16_t *rows = wk_rows(&wk, 64);
    uint64_t id = wk_create(&wk);
    struct wk_query long_query, short_query, urgent_query;
    struct wk_job long_job, short_job, urgent_job;

    wk_append(&wk, id, rows, 64);
    wk_query_make(&wk, &long_query, 640, 4, 8, 64);
    wk_query_make(&wk, &short_query, 1, 8, 8, 64); /* other heads, so that no launch is shared */
    wk_query_make(&wk, &urgent_query, 1, 16, 8, 64);
    wk_attend_job(&long_job, &wk, id, 0, &long_query);
    wk_attend_job(&short_job, &wk, id, 0, &short_query);
    wk_attend_job(&urgent_job, &wk, id, 0, &urgent_query);
    urgent_job.job.node.priority = 1;
    wk_park(&wk);
    wk_submit(&wk, &long_job);
    wk_submit(&wk, &short_job);
    wk_submit(&wk, &urgent_job);
    srv_worker_kick(wk.worker);
    wk_finish(&wk, &long_job);
    KIT_OK(long_job.err.code, &long_job.err);
    ck_assert_uint_eq(long_job.n_got, 10);
    ck_assert_uint_lt(urgent_job.order, short_job.order);
    ck_assert_uint_lt(short_job.order, long_job.order);
    wk_query_free(&long_query);
    wk_query_free(&short_query);
    wk_query_free(&urgent_query);
    free(rows);
}
END_TEST

START_TEST(append_of_an_attend_comes_first)
{
    uint16_t *rows = wk_rows(&wk, 51);
    uint64_t id = wk_create(&wk);
    struct wk_query query;
    struct wk_job j, append;
    struct mirror m;

    rows[50 * (size_t)wk.layout->d_qk] = 0x7fc0; /* NaN in the last row: counted with the first piece */
    wk_append(&wk, id, rows, 50);
    wk_query_make(&wk, &query, 130, 4, 60, 51);
    wk_attend_job(&j, &wk, id, 0, &query);
    j.accesses[0].is_write = true;
    wk_append_job(&wk, &append, id, 0, 1, rows + 50 * (size_t)wk.layout->d_qk, 1);
    j.job.u.attend.append = append.job.u.append;
    KIT_OK(wk_run(&wk, &j), &j.err);
    ck_assert_uint_eq(j.n_got, 3);
    ck_assert_uint_eq(j.pieces[0].n_nonfinite, 1);
    ck_assert_uint_eq(j.pieces[1].n_nonfinite, 0);
    ck_assert_uint_eq(j.pieces[2].n_tokens, 51);
    mirror_open(&m, &wk, rows, 51);
    mirror_compare(&m, &query);
    mirror_close(&m);
    wk_query_free(&query);
    free(rows);
}
END_TEST

/* A job whose append fails attends nothing, and the others of its launch do not notice. */
START_TEST(one_bad_job_does_not_hold_up_its_launch)
{
    uint16_t *rows = wk_rows(&wk, 50);
    uint64_t a = wk_create(&wk), b = wk_create(&wk), gone = wk_create(&wk);
    struct wk_query good_query, bad_query, gone_query;
    struct wk_job good, bad, missing, append;
    struct mirror m;

    wk_append(&wk, a, rows, 50);
    wk_append(&wk, b, rows, 50);
    wk_release(&wk, gone);
    wk_query_make(&wk, &bad_query, 2, 8, 10, 50);
    wk_query_make(&wk, &gone_query, 2, 8, 10, 50);
    wk_query_make(&wk, &good_query, 2, 8, 10, 50);
    wk_attend_job(&bad, &wk, a, 0, &bad_query);
    bad.accesses[0].is_write = true;
    wk_append_job(&wk, &append, a, 0, 1, rows, 1);
    bad.job.u.attend.append = append.job.u.append;
    bad.job.u.attend.append.position = 49; /* it has 50 */
    wk_attend_job(&missing, &wk, gone, 0, &gone_query);
    wk_attend_job(&good, &wk, b, 0, &good_query);
    wk_park(&wk);
    wk_submit(&wk, &bad);
    wk_submit(&wk, &missing);
    wk_submit(&wk, &good);
    srv_worker_kick(wk.worker);
    wk_finish(&wk, &bad);
    wk_finish(&wk, &missing);
    wk_finish(&wk, &good);
    ck_assert_int_eq(bad.err.code, DSA_E_PRECONDITION);
    ck_assert_int_eq(missing.err.code, DSA_E_NOT_FOUND);
    ck_assert_str_eq(missing.err.field, "attend.segments[0].sequence_id");
    KIT_OK(good.err.code, &good.err);
    ck_assert_uint_eq(good.pieces[0].batch_rows, 2);
    mirror_open(&m, &wk, rows, 50);
    mirror_compare(&m, &good_query);
    mirror_close(&m);
    for (int i = 0; i < 16; i++)
        ck_assert_uint_eq(((unsigned char *)bad_query.out)[i], 0xee); /* untouched */
    mirror_rows(&wk, a, 0, rows, 50);
    wk_query_free(&good_query);
    wk_query_free(&bad_query);
    wk_query_free(&gone_query);
    free(rows);
}
END_TEST

/* ---- jobs that do not run -------------------------------------------------------------------- */

START_TEST(cancelled_while_waiting)
{
    uint64_t id = wk_create(&wk);
    uint16_t *rows = wk_rows(&wk, 4);
    struct wk_job jobs[3];

    wk_park(&wk);
    for (int i = 0; i < 3; i++) {
        wk_append_job(&wk, &jobs[i], id, 0, 2, rows, 2);
        wk_submit(&wk, &jobs[i]);
    }
    atomic_store_explicit(&jobs[1].job.cancelled, true, memory_order_relaxed);
    srv_worker_note_cancel(wk.worker);
    for (int i = 0; i < 3; i++)
        wk_finish(&wk, &jobs[i]);
    ck_assert_int_eq(jobs[0].err.code, DSA_OK);
    ck_assert_int_eq(jobs[1].err.code, DSA_E_CANCELLED);
    ck_assert_uint_lt(jobs[1].order, jobs[0].order); /* at once, not when its turn comes */
    ck_assert_int_eq(jobs[2].err.code, DSA_OK);
    ck_assert_uint_eq(wk_n_tokens(&wk, id), 4);
    free(rows);
}
END_TEST

START_TEST(stamps_follow_one_another)
{
    uint16_t *rows = wk_rows(&wk, 80);
    uint64_t id = wk_create(&wk), before = srv_now_us();
    struct wk_query query;
    struct wk_job j, dropped;
    const struct srv_job_stamps *at = &j.job.stamps;

    wk_append(&wk, id, rows, 80);
    wk_query_make(&wk, &query, wk.config.batch_rows + 40, 2, 8, 80);
    wk_attend_job(&j, &wk, id, 0, &query);
    wk_attend_job(&dropped, &wk, id, 0, &query);
    atomic_store(&dropped.job.cancelled, true);
    memset(&dropped.job.stamps, 0xff, sizeof(dropped.job.stamps)); /* of an earlier use: start anew */
    wk_park(&wk);
    wk_submit(&wk, &j);
    wk_submit(&wk, &dropped);
    srv_worker_note_cancel(wk.worker);
    wk_finish(&wk, &j);
    wk_finish(&wk, &dropped);
    ck_assert_uint_ge(at->submitted_us, before);
    ck_assert_uint_ge(at->begun_us, at->submitted_us);
    ck_assert_uint_ge(at->launched_us, at->begun_us);
    ck_assert_uint_ge(at->done_us, at->launched_us);
    ck_assert_uint_ge(srv_now_us(), at->done_us);
    ck_assert_uint_ge(at->n_launches, 2);
    ck_assert_uint_gt(at->device_us, 0);
    ck_assert_uint_le(at->device_us, at->done_us - at->launched_us);
    if (!wk.config.is_staged)
        ck_assert_uint_eq(at->copy_us, 0);
    ck_assert_uint_le(at->copy_us, at->done_us - at->begun_us);
    ck_assert_uint_ge(dropped.job.stamps.submitted_us, at->submitted_us);
    ck_assert_uint_ge(dropped.job.stamps.done_us, dropped.job.stamps.submitted_us);
    ck_assert_uint_eq(dropped.job.stamps.begun_us, 0);
    ck_assert_uint_eq(dropped.job.stamps.launched_us, 0);
    ck_assert_uint_eq(dropped.job.stamps.n_launches, 0);
    wk_query_free(&query);
    free(rows);
}
END_TEST

/* The worker is held inside wake after the first piece, so the cancel comes between two pieces for sure. */
START_TEST(cancelled_between_pieces)
{
    uint16_t *rows = wk_rows(&wk, 64);
    uint64_t id = wk_create(&wk);
    struct wk_query query;
    struct wk_job j;

    wk_append(&wk, id, rows, 64);
    wk_query_make(&wk, &query, 256, 4, 8, 64);
    wk_attend_job(&j, &wk, id, 0, &query);
    wk_park(&wk);
    while (sem_trywait(&wk.woken) == 0)
        ;
    atomic_store(&wk.is_gated, true);
    srv_worker_set_sleeping(wk.worker, true);
    wk_submit(&wk, &j);
    srv_worker_kick(wk.worker);
    ck_assert(kit_wait(&wk.woken));
    atomic_store_explicit(&j.job.cancelled, true, memory_order_relaxed);
    srv_worker_note_cancel(wk.worker);
    atomic_store(&wk.is_gated, false);
    sem_post(&wk.gate);
    wk_finish(&wk, &j);
    ck_assert_int_eq(j.err.code, DSA_E_CANCELLED);
    ck_assert_uint_eq(j.n_got, 2);
    ck_assert_uint_eq(j.rows_got, 64);
    wk_query_free(&query);
    free(rows);
}
END_TEST

START_TEST(late_jobs_are_dropped_before_their_launch)
{
    uint64_t id = wk_create(&wk);
    uint16_t *rows = wk_rows(&wk, 6);
    struct wk_job late, fine;

    wk_append_job(&wk, &late, id, 0, 2, rows, 2);
    late.job.node.deadline_us = 1; /* the clock is far past that */
    wk_append_job(&wk, &fine, id, 0, 2, rows, 3);
    fine.job.node.deadline_us = UINT64_MAX - 1;
    wk_submit(&wk, &late);
    wk_submit(&wk, &fine);
    srv_worker_kick(wk.worker);
    wk_finish(&wk, &late);
    wk_finish(&wk, &fine);
    ck_assert_int_eq(late.err.code, DSA_E_DEADLINE);
    ck_assert_str_eq(late.err.field, "deadline_us");
    KIT_OK(fine.err.code, &fine.err);
    ck_assert_uint_eq(wk_n_tokens(&wk, id), 3);
    free(rows);
}
END_TEST

START_TEST(an_empty_attend_is_answered)
{
    uint64_t id = wk_create(&wk);
    struct wk_query query;
    struct wk_job j;

    wk_query_make(&wk, &query, 1, 4, 4, 1);
    wk_attend_job(&j, &wk, id, 0, &query);
    j.job.node.n_rows = 0;
    ck_assert_int_eq(wk_run(&wk, &j), DSA_E_BAD_REQUEST);
    wk_query_free(&query);
}
END_TEST

START_TEST(stop_answers_what_waits)
{
    enum { N = 40 };
    uint64_t id = wk_create(&wk);
    uint16_t *rows = wk_rows(&wk, 2);
    static struct wk_job jobs[N];

    wk_park(&wk);
    for (int i = 0; i < N; i++) {
        wk_append_job(&wk, &jobs[i], id, 0, 2, rows, 1);
        wk_submit(&wk, &jobs[i]);
    }
    srv_worker_stop(wk.worker); /* joined: every answer is there */
    for (int i = 0; i < N; i++) {
        wk_next(&wk);
        srv_worker_stop(wk.worker); /* again: nothing happens */
    }
    for (int i = 0; i < N; i++) {
        ck_assert(jobs[i].is_done);
        ck_assert_int_eq(jobs[i].err.code, DSA_E_DRAINING);
    }
    free(rows);
}
END_TEST

/* Ends of sessions come beside the jobs that may wait. */
START_TEST(ends_of_sessions_fit_a_full_queue)
{
    static struct wk_job jobs[64], ends[8];
    uint64_t id = wk_create(&wk);
    uint16_t *rows = wk_rows(&wk, 2);

    ck_assert_uint_eq(wk.config.max_queue, 64);
    wk_park(&wk);
    for (int i = 0; i < 64; i++) {
        wk_append_job(&wk, &jobs[i], id, 0, 2, rows, 1);
        wk_submit(&wk, &jobs[i]);
    }
    for (int i = 0; i < 8; i++) {
        wk_job(&ends[i], SRV_OP_END_SESSION);
        ends[i].job.session = 1000 + (uint64_t)i;
        wk_submit(&wk, &ends[i]);
    }
    srv_worker_kick(wk.worker);
    for (int i = 0; i < 64; i++) {
        wk_finish(&wk, &jobs[i]);
        KIT_OK(jobs[i].err.code, &jobs[i].err);
    }
    for (int i = 0; i < 8; i++) {
        wk_finish(&wk, &ends[i]);
        KIT_OK(ends[i].err.code, &ends[i].err);
    }
    ck_assert_uint_eq(wk_n_tokens(&wk, id), 64);
    free(rows);
}
END_TEST

/* ---- who runs -------------------------------------------------------------------------------- */

START_TEST(a_parked_worker_lends_its_place)
{
    struct wk_job j;
    int n_wakes;

    wk_park(&wk);
    while (sem_trywait(&wk.woken) == 0)
        ;
    n_wakes = atomic_load(&wk.n_wakes);
    wk_job(&j, SRV_OP_CREATE);
    wk_submit(&wk, &j);
    srv_worker_set_sleeping(wk.worker, true); /* so that wake tells on which thread the job ran */
    ck_assert(srv_worker_try_step(wk.worker));
    srv_worker_set_sleeping(wk.worker, false);
    ck_assert_int_eq(atomic_load(&wk.n_wakes), n_wakes + 1);
    ck_assert(pthread_equal(wk.last_waker, pthread_self()));
    wk_next(&wk);
    ck_assert(j.is_done);
    wk_job(&j, SRV_OP_CREATE); /* and takes it back when kicked */
    wk_submit(&wk, &j);
    srv_worker_set_sleeping(wk.worker, true);
    srv_worker_kick(wk.worker);
    while (sem_trywait(&wk.woken) == 0)
        ;
    srv_worker_set_sleeping(wk.worker, false);
    wk_finish(&wk, &j);
    ck_assert_int_eq(j.err.code, DSA_OK);
}
END_TEST

START_TEST(a_running_worker_does_not)
{
    struct wk_job first, second;

    wk_park(&wk);
    while (sem_trywait(&wk.woken) == 0)
        ;
    atomic_store(&wk.is_gated, true);
    srv_worker_set_sleeping(wk.worker, true);
    wk_job(&first, SRV_OP_CREATE);
    wk_submit(&wk, &first);
    srv_worker_kick(wk.worker);
    ck_assert(kit_wait(&wk.woken)); /* it stands in wake now */
    ck_assert(!pthread_equal(wk.last_waker, pthread_self()));
    wk_job(&second, SRV_OP_CREATE);
    wk_submit(&wk, &second);
    ck_assert(!srv_worker_try_step(wk.worker));
    atomic_store(&wk.is_gated, false);
    sem_post(&wk.gate);
    wk_finish(&wk, &second); /* nobody kicked for it: the worker looks before it parks */
    ck_assert(first.is_done);
}
END_TEST

/* Where the worker has looked for work and found none, and is about to park: it can be held there once. */
uint32_t __real_srv_batcher_next(struct srv_batcher *batcher, struct srv_batch_item *items);
uint32_t __wrap_srv_batcher_next(struct srv_batcher *batcher, struct srv_batch_item *items);
static atomic_bool hold_when_idle;
static sem_t is_idle, go_on;

uint32_t __wrap_srv_batcher_next(struct srv_batcher *batcher, struct srv_batch_item *items)
{
    uint32_t n = __real_srv_batcher_next(batcher, items);

    if (n == 0 && atomic_exchange(&hold_when_idle, false)) {
        sem_post(&is_idle);
        while (sem_wait(&go_on) != 0)
            ;
    }
    return n;
}

/* The kick finds the worker still running, so it does nothing; the job must be seen all the same. */
START_TEST(a_job_that_comes_just_before_the_worker_parks)
{
    struct wk_job first, second;

    sem_init(&is_idle, 0, 0);
    sem_init(&go_on, 0, 0);
    wk_park(&wk);
    atomic_store(&hold_when_idle, true);
    wk_job(&first, SRV_OP_STATS);
    wk_submit(&wk, &first);
    srv_worker_kick(wk.worker);
    ck_assert(kit_wait(&is_idle));
    wk_job(&second, SRV_OP_STATS);
    wk_submit(&wk, &second);
    ck_assert(!srv_worker_try_step(wk.worker));
    srv_worker_kick(wk.worker);
    sem_post(&go_on);
    wk_finish(&wk, &second);
    ck_assert(first.is_done);
    sem_destroy(&is_idle);
    sem_destroy(&go_on);
}
END_TEST

START_TEST(a_cancel_that_comes_just_before_the_worker_parks)
{
    struct wk_job first, second;

    sem_init(&is_idle, 0, 0);
    sem_init(&go_on, 0, 0);
    wk_park(&wk);
    atomic_store(&hold_when_idle, true);
    wk_job(&first, SRV_OP_STATS);
    wk_submit(&wk, &first);
    srv_worker_kick(wk.worker);
    ck_assert(kit_wait(&is_idle));
    wk_job(&second, SRV_OP_STATS);
    atomic_store_explicit(&second.job.cancelled, true, memory_order_relaxed);
    wk_submit(&wk, &second);
    srv_worker_note_cancel(wk.worker);
    sem_post(&go_on);
    wk_finish(&wk, &second);
    ck_assert_int_eq(second.err.code, DSA_E_CANCELLED);
    sem_destroy(&is_idle);
    sem_destroy(&go_on);
}
END_TEST

/* Kicks and borrowed steps meet a worker that is just about to park, thousands of times; a lost one hangs. */
START_TEST(no_kick_is_lost)
{
    int n_times = KIT_TIMES(6000, 1200);

    for (int i = 0; i < n_times; i++) {
        struct wk_job jobs[3];
        unsigned n = 1 + wk_random(3), spin = wk_random(300);

        for (unsigned k = 0; k < n; k++) {
            wk_job(&jobs[k], SRV_OP_STATS);
            wk_submit(&wk, &jobs[k]);
            if (wk_random(4) == 0)
                srv_worker_kick(wk.worker);
        }
        for (unsigned k = 0; k < spin; k++)
            atomic_signal_fence(memory_order_seq_cst);
        if (wk_random(3) > 0 || !srv_worker_try_step(wk.worker))
            srv_worker_kick(wk.worker);
        for (unsigned k = 0; i % 2 == 0 && k < 20000 && !jobs[n - 1].is_done; k++)
            wk_poll(&wk); /* awake, so that the next kick comes while the worker is on its way to bed */
        if (wk_random(8) == 0)
            srv_worker_note_cancel(wk.worker); /* nothing is cancelled: only a reason to look */
        for (unsigned k = 0; k < n; k++)
            wk_finish(&wk, &jobs[k]);
    }
}
END_TEST

/* ---- a lost device --------------------------------------------------------------------------- */

dsk_status __real_dsk_attend(struct dsk_stream *s, const struct dsk_attend_args *args, struct dsk_err *err);
dsk_status __wrap_dsk_attend(struct dsk_stream *s, const struct dsk_attend_args *args, struct dsk_err *err);
static atomic_bool attend_fails;

dsk_status __wrap_dsk_attend(struct dsk_stream *s, const struct dsk_attend_args *args, struct dsk_err *err)
{
    if (!atomic_load(&attend_fails))
        return __real_dsk_attend(s, args, err);
    memset(err, 0, sizeof(*err));
    err->status = DSK_E_DEVICE;
    return DSK_E_DEVICE;
}

START_TEST(a_lost_device_fails_its_jobs_and_gives_pages_back)
{
    uint16_t *rows = wk_rows(&wk, 64);
    uint64_t id = wk_create(&wk);
    struct wk_query query;
    struct wk_job j;

    wk_append(&wk, id, rows, 64);
    wk_query_make(&wk, &query, 200, 4, 8, 64);
    wk_attend_job(&j, &wk, id, 0, &query);
    ck_assert(!srv_worker_is_lost(wk.worker));
    kit_log_begin();
    atomic_store(&attend_fails, true);
    ck_assert_int_eq(wk_run(&wk, &j), DSA_E_DEVICE_LOST);
    ck_assert_uint_eq(j.n_got, 1); /* what it had left goes with it */
    kit_log_expect("device lost");
    kit_log_end();
    atomic_store(&attend_fails, false);
    ck_assert(srv_worker_is_lost(wk.worker)); /* sticky */
    wk_attend_job(&j, &wk, id, 0, &query);
    ck_assert_int_eq(wk_run(&wk, &j), DSA_E_DEVICE_LOST);
    wk_append_job(&wk, &j, id, 0, 2, rows, 1);
    ck_assert_int_eq(wk_run(&wk, &j), DSA_E_DEVICE_LOST);
    ck_assert_uint_eq(wk_stats(&wk).n_sequences, 1);
    wk_end_session(&wk, WK_SESSION);
    ck_assert_uint_eq(wk_stats(&wk).pool.n_free, wk.config.n_pages);
    wk_query_free(&query);
    free(rows);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *many = tcase_create("order"), *none = tcase_create("not run"), *turns = tcase_create("turns");
    TCase *all[] = {many, none, turns};

    (void)max;
    suites_p[0] = suite_create("worker queue");
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        tcase_add_checked_fixture(all[i], start, end);
        tcase_set_timeout(all[i], 60);
        suite_add_tcase(suites_p[0], all[i]);
    }
    tcase_add_test(many, jobs_of_a_sequence_take_effect_in_the_order_sent);
    tcase_add_test(many, compatible_jobs_share_a_launch);
    tcase_add_test(many, segments_read_their_sequences);
    tcase_add_test(many, long_jobs_come_in_pieces);
    tcase_add_test(many, short_jobs_pass_long_ones_and_priority_counts);
    tcase_add_test(many, append_of_an_attend_comes_first);
    tcase_add_test(many, one_bad_job_does_not_hold_up_its_launch);
    tcase_add_test(none, cancelled_while_waiting);
    tcase_add_test(none, stamps_follow_one_another);
    tcase_add_test(none, cancelled_between_pieces);
    tcase_add_test(none, late_jobs_are_dropped_before_their_launch);
    tcase_add_test(none, an_empty_attend_is_answered);
    tcase_add_test(none, stop_answers_what_waits);
    tcase_add_test(none, ends_of_sessions_fit_a_full_queue);
    tcase_add_test(turns, a_parked_worker_lends_its_place);
    tcase_add_test(turns, a_running_worker_does_not);
    tcase_add_test(turns, a_job_that_comes_just_before_the_worker_parks);
    tcase_add_test(turns, a_cancel_that_comes_just_before_the_worker_parks);
    tcase_add_test(turns, no_kick_is_lost);
    tcase_add_test(turns, a_lost_device_fails_its_jobs_and_gives_pages_back);
    return 1;
}
