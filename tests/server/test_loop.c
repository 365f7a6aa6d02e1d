/* The service thread's loop: doorbells, timers, signals, and that it sleeps and wakes when it should. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kit.h"
#include "server/clock.h"
#include "server/loop.h"
#include "server/rpc.h"

static struct kit_loop k;
static bool is_spinning;

static void open_loop(void)
{
    kit_loop_open(&k, 0);
}

static void open_spinning_loop(void)
{
    is_spinning = true;
    kit_loop_open(&k, 300);
}

static void close_loop(void)
{
    kit_loop_close(&k);
}

static void stop_loop(void *arg)
{
    (void)arg;
    srv_loop_stop(k.loop);
}

/* ---- doorbells ------------------------------------------------------------------------------------- */

#define N_RINGERS 4

struct ringer {
    pthread_t thread;
    struct rpc_bell *bell;
    atomic_int n_posted;
    int n_seen; /* L's */
    sem_t seen; /* L took the last post */
    int n_rings;
    bool is_patient; /* rings again only when the last one was seen */
    bool is_ok;
};

static struct ringer ringers[N_RINGERS];

static bool take_posts(void *arg)
{
    bool took = false;

    (void)arg;
    for (int i = 0; i < N_RINGERS; i++) {
        int n = atomic_load(&ringers[i].n_posted);

        if (n == ringers[i].n_seen)
            continue;
        took = true;
        ringers[i].n_seen = n;
        if (ringers[i].is_patient)
            sem_post(&ringers[i].seen);
    }
    return took;
}

static void *ringer_main(void *arg)
{
    struct ringer *ringer = arg;

    ringer->is_ok = true;
    for (int i = 0; i < ringer->n_rings && ringer->is_ok; i++) {
        atomic_fetch_add(&ringer->n_posted, 1);
        rpc_bell_ring(ringer->bell);
        if (ringer->is_patient)
            ringer->is_ok = kit_wait(&ringer->seen);
    }
    return NULL;
}

static void run_ringers(int n_rings, bool is_patient)
{
    k.settle = take_posts;
    for (int i = 0; i < N_RINGERS; i++) {
        memset(&ringers[i], 0, sizeof(ringers[i]));
        sem_init(&ringers[i].seen, 0, 0);
        ringers[i].n_rings = n_rings;
        ringers[i].is_patient = is_patient;
        ck_assert_int_eq(rpc_bell_create(k.rpc, &ringers[i].bell), DSA_OK);
    }
    kit_loop_start(&k);
    for (int i = 0; i < N_RINGERS; i++)
        ck_assert_int_eq(pthread_create(&ringers[i].thread, NULL, ringer_main, &ringers[i]), 0);
    for (int i = 0; i < N_RINGERS; i++)
        ck_assert_int_eq(pthread_join(ringers[i].thread, NULL), 0);
    kit_loop_stop(&k);
    take_posts(NULL);
    for (int i = 0; i < N_RINGERS; i++) {
        ck_assert_msg(ringers[i].is_ok, "a ring of thread %d was lost", i);
        ck_assert_int_eq(ringers[i].n_seen, n_rings);
        rpc_bell_destroy(ringers[i].bell);
        sem_destroy(&ringers[i].seen);
    }
}

/* Each thread goes on only when L has seen its post: one lost ring and it waits for ever, since nothing
 * else wakes L. */
START_TEST(no_ring_is_lost)
{
    struct srv_timer *timer; /* a handle, as a server has some */

    ck_assert_int_eq(srv_timer_start(k.loop, UINT64_C(3600000000), 0, stop_loop, NULL, &timer), DSA_OK);
    run_ringers(KIT_TIMES(2000, 300), true);
    ck_assert(is_spinning || atomic_load(&k.n_sleeps) > 0);
}
END_TEST

START_TEST(bursts_of_rings)
{
    run_ringers(KIT_TIMES(4000, 500), false);
}
END_TEST

/* A loop without a handle of its own sleeps and serves like any other. */
START_TEST(a_loop_without_handles)
{
    run_ringers(50, true);
    ck_assert(is_spinning || atomic_load(&k.n_sleeps) > 0);
}
END_TEST

START_TEST(calls_reach_the_service_thread)
{
    kit_loop_start(&k);
    kit_loop_call(&k, stop_loop, NULL);
    ck_assert_int_eq(pthread_join(k.thread, NULL), 0);
    k.is_running = false;
}
END_TEST

/* ---- timers ------------------------------------------------------------------------------------------ */

struct ticks {
    struct srv_timer *timer;
    int n, stop_at;
    uint64_t first_us, last_us;
};

static void on_tick(void *arg)
{
    struct ticks *ticks = arg;

    ticks->last_us = srv_now_us();
    if (ticks->n++ == 0)
        ticks->first_us = ticks->last_us;
    if (ticks->n == ticks->stop_at)
        srv_loop_stop(k.loop);
}

static void start_timer(struct ticks *ticks, uint64_t first_us, uint64_t period_us, int stop_at)
{
    memset(ticks, 0, sizeof(*ticks));
    ticks->stop_at = stop_at;
    ck_assert_int_eq(srv_timer_start(k.loop, first_us, period_us, on_tick, ticks, &ticks->timer), DSA_OK);
}

START_TEST(a_timer_wakes_a_sleeping_loop)
{
    uint64_t begin = srv_now_us();
    struct ticks once;

    start_timer(&once, 30000, 0, 1);
    srv_loop_run(k.loop);
    ck_assert_int_eq(once.n, 1);
    ck_assert_uint_ge(once.first_us - begin, 29000); /* uv counts in milliseconds */
    srv_timer_close(once.timer);
    srv_timer_close(NULL);
}
END_TEST

START_TEST(periodic_timers_go_on_and_single_ones_do_not)
{
    uint64_t begin = srv_now_us();
    struct ticks often, once, slow;

    start_timer(&once, 1000, 0, 0);
    start_timer(&slow, 600000000, 0, 0);
    start_timer(&often, 0, 4000, 6);
    srv_loop_run(k.loop);
    ck_assert_int_eq(often.n, 6);
    ck_assert_int_eq(once.n, 1);
    ck_assert_int_eq(slow.n, 0);
    ck_assert_uint_ge(often.last_us - begin, 5 * 4000 - 2000);
    srv_timer_close(often.timer);
    /* the two others are left to srv_loop_destroy */
}
END_TEST

static bool ring_when_asked(void *arg)
{
    atomic_int *n_asked = arg;
    int n = atomic_load(n_asked);

    while (atomic_load(n_asked) > 0) {
        atomic_fetch_sub(n_asked, 1);
        sem_post(&ringers[0].seen);
    }
    return n > 0;
}

static void keep_busy(void *arg)
{
    uint64_t until = srv_now_us() + 3000;

    (void)arg;
    while (srv_now_us() < until)
        ;
}

/* A timer that is always due takes its turns, not all of them. */
START_TEST(a_greedy_timer_leaves_time_for_calls)
{
    struct srv_timer *timer;
    atomic_int n_asked;

    atomic_init(&n_asked, 0);
    sem_init(&ringers[0].seen, 0, 0);
    k.settle = ring_when_asked;
    k.settle_arg = &n_asked;
    ck_assert_int_eq(srv_timer_start(k.loop, 0, 1000, keep_busy, NULL, &timer), DSA_OK);
    kit_loop_start(&k);
    for (int i = 0; i < 20; i++) {
        atomic_fetch_add(&n_asked, 1);
        rpc_bell_ring(k.bell);
        ck_assert_msg(kit_wait(&ringers[0].seen), "call %d is not served", i);
    }
    kit_loop_stop(&k);
    sem_destroy(&ringers[0].seen);
}
END_TEST

static struct ticks closed_one;

static void close_the_other(void *arg)
{
    (void)arg;
    srv_timer_close(closed_one.timer);
}

START_TEST(a_closed_timer_is_silent)
{
    struct srv_timer *closer;
    struct ticks last;

    /* In this order: however late the thread comes to run them, the closer is due first. */
    ck_assert_int_eq(srv_timer_start(k.loop, 0, 0, close_the_other, NULL, &closer), DSA_OK);
    start_timer(&closed_one, 20000, 1000, 0);
    start_timer(&last, 60000, 0, 1);
    srv_loop_run(k.loop);
    ck_assert_int_eq(closed_one.n, 0);
}
END_TEST

/* Microseconds are rounded up: a timer never comes early, and one of 0 comes at once. */
START_TEST(short_timers_are_rounded_up)
{
    uint64_t begin = srv_now_us();
    struct ticks ticks;

    start_timer(&ticks, 1001, 0, 1);
    srv_loop_run(k.loop);
    ck_assert_uint_ge(srv_now_us() - begin, 1000);
}
END_TEST

static struct ticks added;

static uint64_t added_us;

static void add_timer(void *arg)
{
    (void)arg;
    added_us = srv_now_us();
    start_timer(&added, 50000, 0, 1);
}

/* The loop sleeps without a deadline when a timer is added outside a uv callback; it counts from then, not
 * from when uv last looked at the clock. */
START_TEST(a_timer_added_from_settle_counts)
{
    struct timespec span = {.tv_nsec = 60000000};

    kit_loop_start(&k);
    nanosleep(&span, NULL); /* so that uv's clock is behind by more than the timer's length */
    kit_loop_call(&k, add_timer, NULL);
    ck_assert_int_eq(pthread_join(k.thread, NULL), 0);
    k.is_running = false;
    ck_assert_int_eq(added.n, 1);
    ck_assert_uint_ge(added.first_us - added_us, 49000);
}
END_TEST

/* ---- signals ------------------------------------------------------------------------------------------- */

static int n_signals; /* L's until it stops */
/* Main reads it between two signals, and nothing orders that with L's next write. */
static atomic_int last_signal;
static pthread_t signal_thread;
static sem_t got_signal;

static void on_signal(void *arg, int signum)
{
    ck_assert_ptr_eq(arg, &last_signal);
    atomic_store(&last_signal, signum);
    n_signals++;
    signal_thread = pthread_self();
    sem_post(&got_signal);
}

START_TEST(signals_come_to_the_service_thread)
{
    sem_init(&got_signal, 0, 0);
    ck_assert_int_eq(srv_loop_on_signal(k.loop, SIGUSR1, on_signal, &last_signal), DSA_OK);
    ck_assert_int_eq(srv_loop_on_signal(k.loop, SIGUSR2, on_signal, &last_signal), DSA_OK);
    kit_loop_start(&k);
    ck_assert_int_eq(kill(getpid(), SIGUSR1), 0);
    ck_assert(kit_wait(&got_signal));
    ck_assert_int_eq(atomic_load(&last_signal), SIGUSR1);
    ck_assert_int_eq(kill(getpid(), SIGUSR2), 0);
    ck_assert(kit_wait(&got_signal));
    ck_assert_int_eq(atomic_load(&last_signal), SIGUSR2);
    ck_assert(pthread_equal(signal_thread, k.thread));
    kit_loop_stop(&k);
    ck_assert_int_eq(n_signals, 2);
    sem_destroy(&got_signal);
}
END_TEST

START_TEST(a_signal_that_cannot_be_caught_is_refused)
{
    ck_assert_int_eq(srv_loop_on_signal(k.loop, SIGKILL, on_signal, NULL), DSA_E_SYSTEM);
}
END_TEST

START_TEST(open_and_close_leave_nothing_behind)
{
    int before = 0;

    for (int i = 0; i < 4; i++) {
        struct kit_loop again;

        kit_loop_open(&again, 0);
        kit_loop_start(&again);
        kit_loop_stop(&again);
        kit_loop_close(&again);
        if (i == 0)
            before = kit_n_fds(); /* libraries keep a few from their first use */
        ck_assert_int_eq(kit_n_fds(), before);
    }
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *sleeping = tcase_create("sleeping"), *spinning = tcase_create("spinning");
    TCase *both[] = {sleeping, spinning};

    (void)max;
    suites_p[0] = suite_create("loop");
    tcase_add_checked_fixture(sleeping, open_loop, close_loop);
    tcase_add_checked_fixture(spinning, open_spinning_loop, close_loop);
    for (int i = 0; i < 2; i++) {
        tcase_set_timeout(both[i], 60);
        tcase_add_test(both[i], no_ring_is_lost);
        tcase_add_test(both[i], bursts_of_rings);
        tcase_add_test(both[i], a_loop_without_handles);
        tcase_add_test(both[i], a_greedy_timer_leaves_time_for_calls);
        tcase_add_test(both[i], calls_reach_the_service_thread);
        tcase_add_test(both[i], a_timer_wakes_a_sleeping_loop);
        tcase_add_test(both[i], periodic_timers_go_on_and_single_ones_do_not);
        tcase_add_test(both[i], a_closed_timer_is_silent);
        tcase_add_test(both[i], short_timers_are_rounded_up);
        tcase_add_test(both[i], a_timer_added_from_settle_counts);
        tcase_add_test(both[i], signals_come_to_the_service_thread);
        suite_add_tcase(suites_p[0], both[i]);
    }
    tcase_add_test(sleeping, a_signal_that_cannot_be_caught_is_refused);
    tcase_add_test(sleeping, open_and_close_leave_nothing_behind);
    return 1;
}
