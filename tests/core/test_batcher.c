/* batcher: who runs next, with whom, and who must wait. */
#include "server/core/batcher.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "kit.h"
#include "test_main.h"

#define NEVER UINT64_MAX

static const struct srv_batcher_config config = {
    .max_jobs = 100, .max_rows = 64, .max_items = 8, .chunk_rows = 16};

static struct srv_batcher *new_batcher(void)
{
    struct srv_batcher *batcher;

    ck_assert_int_eq(srv_batcher_create(&config, &batcher), DSA_OK);
    return batcher;
}

static struct srv_batch_node attend(uint32_t layer, uint32_t n_rows)
{
    return (struct srv_batch_node){
        .is_attend = true, .key = {.layer = layer, .h_q = 64}, .n_rows = n_rows, .deadline_us = NEVER};
}

static struct srv_batch_node work(void)
{
    return (struct srv_batch_node){.deadline_us = NEVER};
}

static void with(struct srv_batch_node *node, const struct srv_batch_access *accesses, uint32_t n)
{
    node->accesses = accesses;
    node->n_accesses = n;
}

static void push(struct srv_batcher *batcher, struct srv_batch_node *node)
{
    ck_assert_int_eq(srv_batcher_push(batcher, node, NULL), DSA_OK);
}

/* The next launch must be exactly this one job; gives its item back. */
static struct srv_batch_item next_is(struct srv_batcher *batcher, const struct srv_batch_node *node)
{
    struct srv_batch_item items[8];

    ck_assert_uint_eq(srv_batcher_next(batcher, items), 1);
    ck_assert_ptr_eq(items[0].node, node);
    return items[0];
}

static void nothing_is_ready(struct srv_batcher *batcher)
{
    struct srv_batch_item items[8];

    ck_assert_uint_eq(srv_batcher_next(batcher, items), 0);
}

static void finish(struct srv_batcher *batcher, struct srv_batch_item item)
{
    srv_batcher_done(batcher, &item, false);
}

static void end(struct srv_batcher *batcher)
{
    nothing_is_ready(batcher);
    ck_assert_uint_eq(srv_batcher_count(batcher), 0);
    ck_assert_uint_eq(srv_batcher_next_deadline(batcher), NEVER);
    srv_batcher_destroy(batcher);
}

START_TEST(bad_limits_are_refused)
{
    struct srv_batcher *batcher = NULL;

    for (int i = 0; i < 5; i++) {
        struct srv_batcher_config bad = config;

        bad.max_jobs = i == 0 ? 0 : i == 4 ? UINT32_MAX : bad.max_jobs;
        bad.max_rows = i == 1 ? 0 : bad.max_rows;
        bad.max_items = i == 2 ? 0 : bad.max_items;
        bad.chunk_rows = i == 3 ? 0 : bad.chunk_rows;
        ck_assert_int_eq(srv_batcher_create(&bad, &batcher), DSA_E_BAD_REQUEST);
    }
    ck_assert_ptr_null(batcher);
    srv_batcher_destroy(NULL);
}
END_TEST

/* ---- order
 * -------------------------------------------------------------------------------------------------- */

START_TEST(first_come_first_served)
{
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node jobs[3] = {work(), work(), work()};

    for (int i = 0; i < 3; i++)
        push(batcher, &jobs[i]);
    ck_assert_uint_eq(srv_batcher_count(batcher), 3);
    for (int i = 0; i < 3; i++) {
        struct srv_batch_item item = next_is(batcher, &jobs[i]);

        ck_assert(item.is_last && item.row_begin == 0 && item.n_rows == 0);
        ck_assert_uint_eq(srv_batcher_count(batcher), 2 - (uint32_t)i);
        finish(batcher, item);
    }
    end(batcher);
}
END_TEST

START_TEST(higher_priority_first)
{
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node jobs[5] = {work(), work(), work(), work(), work()};
    static const int32_t priorities[5] = {0, INT32_MIN, 7, INT32_MAX, 7};
    static const int order[5] = {3, 2, 4, 0, 1};

    for (int i = 0; i < 5; i++) {
        jobs[i].priority = priorities[i];
        push(batcher, &jobs[i]);
    }
    for (int i = 0; i < 5; i++)
        finish(batcher, next_is(batcher, &jobs[order[i]]));
    end(batcher);
}
END_TEST

START_TEST(writers_of_a_sequence_run_one_after_the_other)
{
    static const struct srv_batch_access writes[] = {{5, true}};
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node a = work(), b = work(), other = work();
    struct srv_batch_item item;

    with(&a, writes, 1);
    with(&b, writes, 1);
    b.priority = 100; /* does not help: a is before it on the sequence */
    push(batcher, &a);
    push(batcher, &b);
    push(batcher, &other);
    item = next_is(batcher, &a);
    finish(batcher, next_is(batcher, &other));
    nothing_is_ready(batcher);
    finish(batcher, item);
    finish(batcher, next_is(batcher, &b));
    end(batcher);
}
END_TEST

START_TEST(readers_share_and_may_pass_readers_but_no_writer)
{
    static const struct srv_batch_access reads[] = {{5, false}}, writes[] = {{5, true}};
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node r1 = work(), r2 = work(), w = work(), r3 = work();
    struct srv_batch_item one, two;

    with(&r1, reads, 1);
    with(&r2, reads, 1);
    with(&w, writes, 1);
    with(&r3, reads, 1);
    r2.priority = 1;
    r3.priority = 2;
    push(batcher, &r1);
    push(batcher, &r2);
    push(batcher, &w);
    push(batcher, &r3);
    two = next_is(batcher, &r2);
    one = next_is(batcher, &r1);
    nothing_is_ready(batcher);
    finish(batcher, two);
    nothing_is_ready(batcher); /* r1 still reads what w would write */
    finish(batcher, one);
    one = next_is(batcher, &w);
    nothing_is_ready(batcher); /* r3 came after w */
    finish(batcher, one);
    finish(batcher, next_is(batcher, &r3));
    end(batcher);
}
END_TEST

START_TEST(a_job_waits_for_all_its_sequences)
{
    static const struct srv_batch_access one[] = {{1, true}}, two[] = {{2, true}},
                                         both[] = {{1, false}, {2, true}};
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node a = work(), b = work(), c = work();
    struct srv_batch_item ia, ib;

    with(&a, one, 1);
    with(&b, two, 1);
    with(&c, both, 2);
    push(batcher, &a);
    push(batcher, &b);
    push(batcher, &c);
    ia = next_is(batcher, &a);
    ib = next_is(batcher, &b);
    finish(batcher, ib);
    nothing_is_ready(batcher);
    finish(batcher, ia);
    finish(batcher, next_is(batcher, &c));
    end(batcher);
}
END_TEST

/* A burst of readers, then a writer, then readers without end: the writer gets its turn. */
START_TEST(a_writer_is_not_starved_by_readers)
{
    static const struct srv_batch_access reads[] = {{5, false}}, writes[] = {{5, true}};
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node readers[20], w = work();
    struct srv_batch_item item;

    with(&w, writes, 1);
    for (int i = 0; i < 20; i++) {
        readers[i] = work();
        with(&readers[i], reads, 1);
    }
    push(batcher, &readers[0]);
    push(batcher, &w);
    item = next_is(batcher, &readers[0]);
    for (int i = 1; i < 20; i++)
        push(batcher, &readers[i]);
    finish(batcher, item);
    item = next_is(batcher, &w);
    finish(batcher, item);
    for (int i = 1; i < 20; i++)
        finish(batcher, next_is(batcher, &readers[i]));
    end(batcher);
}
END_TEST

/* ---- sharing and pieces
 * ------------------------------------------------------------------------------------- */

START_TEST(equal_keys_share_a_launch_and_others_do_not)
{
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node jobs[6] = {attend(1, 4), attend(2, 4), attend(1, 5),
                                     work(),       attend(1, 6), attend(1, 1)};
    struct srv_batch_item items[8];

    jobs[5].key.flags = 1;
    for (int i = 0; i < 6; i++)
        push(batcher, &jobs[i]);
    ck_assert_uint_eq(srv_batcher_next(batcher, items), 3);
    ck_assert_ptr_eq(items[0].node, &jobs[0]);
    ck_assert_ptr_eq(items[1].node, &jobs[2]);
    ck_assert_ptr_eq(items[2].node, &jobs[4]);
    ck_assert_uint_eq(items[1].n_rows, 5);
    for (int i = 0; i < 3; i++)
        finish(batcher, items[i]);
    finish(batcher, next_is(batcher, &jobs[1]));
    finish(batcher, next_is(batcher, &jobs[3]));
    finish(batcher, next_is(batcher, &jobs[5]));
    end(batcher);
}
END_TEST

START_TEST(keys_differ_in_every_field)
{
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node jobs[7] = {attend(1, 1), attend(2, 1), attend(1, 1), attend(1, 1),
                                     attend(1, 1), attend(1, 1), attend(1, 1)};

    jobs[2].key.h_q = 65;
    jobs[3].key.out_dtype = 1;
    jobs[4].key.flags = 1;
    jobs[5].key.h_q = 256; /* these two have one hash */
    jobs[6].key.h_q = 0;
    jobs[6].key.flags = 1;
    for (int i = 0; i < 7; i++)
        push(batcher, &jobs[i]);
    for (int i = 0; i < 7; i++)
        finish(batcher, next_is(batcher, &jobs[i]));
    end(batcher);
}
END_TEST

START_TEST(a_launch_is_bounded_in_rows_and_jobs)
{
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node jobs[20];
    struct srv_batch_item items[8];

    for (int i = 0; i < 20; i++) {
        jobs[i] = attend(1, i < 10 ? 15 : 1);
        push(batcher, &jobs[i]);
    }
    ck_assert_uint_eq(srv_batcher_next(batcher, items), 4); /* 60 of 64 rows; the next 15 do not fit */
    for (int i = 0; i < 4; i++)
        finish(batcher, items[i]);
    ck_assert_uint_eq(srv_batcher_next(batcher, items), 4);
    for (int i = 0; i < 4; i++)
        finish(batcher, items[i]);
    ck_assert_uint_eq(srv_batcher_next(batcher, items), 8); /* 2 x 15 and 6 x 1: eight jobs */
    ck_assert_ptr_eq(items[7].node, &jobs[15]);
    for (int i = 0; i < 8; i++)
        finish(batcher, items[i]);
    ck_assert_uint_eq(srv_batcher_next(batcher, items), 4);
    for (int i = 0; i < 4; i++)
        finish(batcher, items[i]);
    end(batcher);
}
END_TEST

START_TEST(a_long_job_goes_out_in_pieces_behind_its_equals)
{
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node long_job = attend(1, 40), short_job = attend(2, 3);
    struct srv_batch_item item;

    push(batcher, &long_job);
    item = next_is(batcher, &long_job);
    ck_assert(item.row_begin == 0 && item.n_rows == 16 && !item.is_last);
    push(batcher, &short_job);
    ck_assert_uint_eq(srv_batcher_count(batcher), 2);
    finish(batcher, item);
    finish(batcher, next_is(batcher, &short_job));
    item = next_is(batcher, &long_job);
    ck_assert(item.row_begin == 16 && item.n_rows == 16 && !item.is_last);
    nothing_is_ready(batcher); /* one piece at a time */
    finish(batcher, item);
    item = next_is(batcher, &long_job);
    ck_assert(item.row_begin == 32 && item.n_rows == 8 && item.is_last);
    ck_assert_uint_eq(srv_batcher_count(batcher), 0);
    finish(batcher, item);
    end(batcher);
}
END_TEST

/* Neither starves the other: equals that keep coming, and a job of many pieces. */
START_TEST(a_long_job_and_its_equals_take_turns)
{
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node long_job = attend(1, 16 * 50), decode[2] = {attend(2, 1), attend(2, 1)};
    int n_long = 0, n_short = 0;

    push(batcher, &long_job);
    push(batcher, &decode[0]);
    while (n_long < 50) {
        struct srv_batch_item item;

        item = next_is(batcher, &long_job);
        n_long++;
        finish(batcher, item);
        item = next_is(batcher, &decode[n_short % 2]);
        push(batcher, &decode[++n_short % 2]);
        finish(batcher, item);
    }
    ck_assert_int_eq(n_short, 50);
    finish(batcher, next_is(batcher, &decode[n_short % 2]));
    end(batcher);
}
END_TEST

START_TEST(pieces_hold_the_sequence_until_the_last)
{
    static const struct srv_batch_access reads[] = {{5, false}}, writes[] = {{5, true}};
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node long_job = attend(1, 32), append = work();
    struct srv_batch_item item;

    with(&long_job, reads, 1);
    with(&append, writes, 1);
    append.priority = 9;
    push(batcher, &long_job);
    push(batcher, &append);
    finish(batcher, next_is(batcher, &long_job));
    item = next_is(batcher, &long_job);
    nothing_is_ready(batcher);
    finish(batcher, item);
    finish(batcher, next_is(batcher, &append));
    end(batcher);
}
END_TEST

START_TEST(a_chunk_above_the_launch_limit_is_cut_to_it)
{
    struct srv_batcher_config wide = {.max_jobs = 4, .max_rows = 10, .max_items = 8, .chunk_rows = 1000};
    struct srv_batch_node job = attend(1, 25);
    struct srv_batcher *batcher;
    uint32_t n_rows = 0;

    ck_assert_int_eq(srv_batcher_create(&wide, &batcher), DSA_OK);
    push(batcher, &job);
    for (int i = 0; i < 3; i++) {
        struct srv_batch_item item = next_is(batcher, &job);

        ck_assert_uint_eq(item.row_begin, n_rows);
        ck_assert_uint_eq(item.n_rows, i < 2 ? 10 : 5);
        n_rows += item.n_rows;
        finish(batcher, item);
    }
    end(batcher);
}
END_TEST

START_TEST(a_failed_piece_drops_the_rest)
{
    static const struct srv_batch_access writes[] = {{5, true}};
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node long_job = attend(1, 100), behind = work();
    struct srv_batch_item item;

    with(&long_job, writes, 1);
    with(&behind, writes, 1);
    push(batcher, &long_job);
    push(batcher, &behind);
    item = next_is(batcher, &long_job);
    ck_assert_uint_eq(srv_batcher_count(batcher), 2);
    srv_batcher_done(batcher, &item, true);
    ck_assert_uint_eq(srv_batcher_count(batcher), 1);
    finish(batcher, next_is(batcher, &behind));
    end(batcher);
}
END_TEST

/* ---- limits and bad input
 * ----------------------------------------------------------------------------------- */

/* OPS-03: bounded, with a hint when to come back. */
START_TEST(a_full_queue_refuses)
{
    struct srv_batcher *batcher = new_batcher();
    static struct srv_batch_node jobs[101];
    struct srv_batch_item items[8];
    struct srv_err err;

    for (int i = 0; i < 101; i++)
        jobs[i] = attend(1, 1);
    for (int i = 0; i < 100; i++)
        push(batcher, &jobs[i]);
    ck_assert_int_eq(srv_batcher_push(batcher, &jobs[100], &err), DSA_E_QUEUE_FULL);
    ck_assert_uint_gt(err.retry_after_us, 0);
    ck_assert_uint_eq(srv_batcher_count(batcher), 100);
    ck_assert_uint_eq(srv_batcher_next(batcher, items), 8);
    push(batcher, &jobs[100]); /* what is handed out does not wait any more */
    for (uint32_t n = 8; n > 0; n = srv_batcher_next(batcher, items))
        for (uint32_t i = 0; i < n; i++)
            finish(batcher, items[i]);
    end(batcher);
}
END_TEST

START_TEST(bad_jobs_are_refused_and_leave_nothing)
{
    static const struct srv_batch_access zero[] = {{7, true}, {0, false}},
                                         twice[] = {{7, false}, {8, true}, {7, true}};
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node no_rows = attend(1, 0), a = work(), b = work(), good = work();
    struct srv_err err;

    ck_assert_int_eq(srv_batcher_push(batcher, &no_rows, &err), DSA_E_BAD_REQUEST); /* GRAPH-02 */
    ck_assert_str_eq(err.field, "n_rows");
    with(&a, zero, 2);
    with(&b, twice, 3);
    ck_assert_int_eq(srv_batcher_push(batcher, &a, &err), DSA_E_BAD_REQUEST);
    ck_assert_int_eq(srv_batcher_push(batcher, &b, &err), DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.field, "sequence");
    ck_assert_str_eq(err.value, "7");
    ck_assert_uint_eq(srv_batcher_count(batcher), 0);
    with(&good, twice + 1, 2); /* sequences 8 and 7: free, as nothing was queued */
    push(batcher, &good);
    finish(batcher, next_is(batcher, &good));
    end(batcher);
}
END_TEST

START_TEST(destroying_a_full_batcher_ends_the_process)
{
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node job = work();

    push(batcher, &job);
    srv_batcher_destroy(batcher);
}
END_TEST

/* ---- leaving early
 * ------------------------------------------------------------------------------------------ */

START_TEST(removing_a_waiting_job_frees_those_behind_it)
{
    static const struct srv_batch_access reads[] = {{5, false}}, writes[] = {{5, true}};
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node r1 = work(), w = work(), r2 = work();
    struct srv_batch_item one, two;

    with(&r1, reads, 1);
    with(&w, writes, 1);
    with(&r2, reads, 1);
    push(batcher, &r1);
    push(batcher, &w);
    push(batcher, &r2);
    one = next_is(batcher, &r1);
    nothing_is_ready(batcher);
    ck_assert(srv_batcher_remove(batcher, &w));
    ck_assert(!srv_batcher_remove(batcher, &w));
    ck_assert_uint_eq(srv_batcher_count(batcher), 1);
    two = next_is(batcher, &r2);
    finish(batcher, one);
    finish(batcher, two);
    push(batcher, &w); /* the node is the caller's again */
    finish(batcher, next_is(batcher, &w));
    end(batcher);
}
END_TEST

START_TEST(a_job_with_a_piece_out_is_not_removed)
{
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node long_job = attend(1, 40), job = work();
    struct srv_batch_item item;

    push(batcher, &long_job);
    item = next_is(batcher, &long_job);
    ck_assert(!srv_batcher_remove(batcher, &long_job));
    finish(batcher, item);
    ck_assert(srv_batcher_remove(batcher, &long_job));
    push(batcher, &job);
    item = next_is(batcher, &job);
    ck_assert(!srv_batcher_remove(batcher, &job));
    finish(batcher, item);
    ck_assert(!srv_batcher_remove(batcher, &job));
    end(batcher);
}
END_TEST

START_TEST(jobs_past_their_deadline_come_out_in_order_of_deadline)
{
    static const struct srv_batch_access writes[] = {{5, true}};
    struct srv_batcher *batcher = new_batcher();
    struct srv_batch_node a = work(), b = work(), c = work(), d = attend(1, 40);
    struct srv_batch_item item;

    with(&a, writes, 1);
    with(&b, writes, 1); /* blocked behind a: expires all the same */
    a.deadline_us = 300;
    b.deadline_us = 100;
    d.deadline_us = 200;
    d.priority = 5;
    push(batcher, &a);
    push(batcher, &b);
    push(batcher, &c);
    push(batcher, &d);
    ck_assert_uint_eq(srv_batcher_next_deadline(batcher), 100);
    ck_assert_ptr_null(srv_batcher_next_expired(batcher, 99));
    ck_assert_ptr_eq(srv_batcher_next_expired(batcher, 100), &b);
    ck_assert_uint_eq(srv_batcher_next_deadline(batcher), 200);
    item = next_is(batcher, &d);
    ck_assert_uint_eq(srv_batcher_next_deadline(batcher), 300); /* d has a piece out */
    ck_assert_ptr_null(srv_batcher_next_expired(batcher, 250));
    finish(batcher, item);
    ck_assert_ptr_eq(srv_batcher_next_expired(batcher, 250), &d);
    ck_assert_ptr_eq(srv_batcher_next_expired(batcher, 1000), &a);
    ck_assert_ptr_null(srv_batcher_next_expired(batcher, UINT64_MAX - 1));
    finish(batcher, next_is(batcher, &c));
    end(batcher);
}
END_TEST

/* ---- failing allocations
 * ------------------------------------------------------------------------------------ */

enum { MANY = 40 };

static const char *scenario(void)
{
    struct srv_batcher *batcher = NULL;
    static struct srv_batch_access accesses[MANY];
    static struct srv_batch_node jobs[MANY];
    struct srv_batch_item items[8];
    uint32_t n, n_done = 0;

    for (uint64_t i = 0; i < MANY; i++)
        accesses[i] = (struct srv_batch_access){i + 1, i % 3 == 0};
    TRY(srv_batcher_create(&config, &batcher), batcher == NULL);
    for (uint32_t i = 0; i < MANY; i++) {
        jobs[i] = i % 2 ? attend(i, 20) : work();
        with(&jobs[i], accesses, i % 5 ? i % 5 : i);
        TRY(srv_batcher_push(batcher, &jobs[i], NULL), srv_batcher_count(batcher) == i);
    }
    while ((n = srv_batcher_next(batcher, items)) > 0)
        for (uint32_t i = 0; i < n; i++) {
            n_done += items[i].is_last;
            srv_batcher_done(batcher, &items[i], false);
        }
    NEED(n_done == MANY && srv_batcher_count(batcher) == 0);
    srv_batcher_destroy(batcher);
    return NULL;
}

START_TEST(any_allocation_may_fail)
{
    kit_sweep(scenario);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("batcher");
    TCase *order = tcase_create("order"), *pieces = tcase_create("pieces"), *limits = tcase_create("limits");
    TCase *early = tcase_create("early");

    (void)max;
    tcase_add_test(order, first_come_first_served);
    tcase_add_test(order, higher_priority_first);
    tcase_add_test(order, writers_of_a_sequence_run_one_after_the_other);
    tcase_add_test(order, readers_share_and_may_pass_readers_but_no_writer);
    tcase_add_test(order, a_job_waits_for_all_its_sequences);
    tcase_add_test(order, a_writer_is_not_starved_by_readers);
    tcase_add_test(pieces, equal_keys_share_a_launch_and_others_do_not);
    tcase_add_test(pieces, keys_differ_in_every_field);
    tcase_add_test(pieces, a_launch_is_bounded_in_rows_and_jobs);
    tcase_add_test(pieces, a_long_job_goes_out_in_pieces_behind_its_equals);
    tcase_add_test(pieces, a_long_job_and_its_equals_take_turns);
    tcase_add_test(pieces, pieces_hold_the_sequence_until_the_last);
    tcase_add_test(pieces, a_chunk_above_the_launch_limit_is_cut_to_it);
    tcase_add_test(pieces, a_failed_piece_drops_the_rest);
    tcase_add_test(limits, bad_limits_are_refused);
    tcase_add_test(limits, a_full_queue_refuses);
    tcase_add_test(limits, bad_jobs_are_refused_and_leave_nothing);
    tcase_add_test_raise_signal(limits, destroying_a_full_batcher_ends_the_process, SIGABRT);
    tcase_add_test(limits, any_allocation_may_fail);
    tcase_add_test(early, removing_a_waiting_job_frees_those_behind_it);
    tcase_add_test(early, a_job_with_a_piece_out_is_not_removed);
    tcase_add_test(early, jobs_past_their_deadline_come_out_in_order_of_deadline);
    suite_add_tcase(suite, order);
    suite_add_tcase(suite, pieces);
    suite_add_tcase(suite, limits);
    suite_add_tcase(suite, early);
    suites_p[0] = suite;
    return 1;
}
