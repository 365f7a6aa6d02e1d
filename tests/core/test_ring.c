/* ring: one thread pushes, one pops, nothing is lost or seen half. */
#include "server/core/ring.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>

#include "kit.h"
#include "test_main.h"

static struct srv_ring *new_ring(uint32_t capacity)
{
    struct srv_ring *ring;

    ck_assert_int_eq(srv_ring_create(capacity, &ring), DSA_OK);
    return ring;
}

START_TEST(capacity_must_be_a_power_of_two)
{
    static const uint32_t bad[] = {0, 1, 3, 6, 1000, (1u << 20) + 1, 1u << 21, UINT32_MAX};
    struct srv_ring *ring = NULL;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        ck_assert_int_eq(srv_ring_create(bad[i], &ring), DSA_E_BAD_REQUEST);
    ck_assert_ptr_null(ring);
    srv_ring_destroy(new_ring(2));
    srv_ring_destroy(new_ring(1u << 20));
    srv_ring_destroy(NULL);
}
END_TEST

START_TEST(full_and_empty_are_answers)
{
    struct srv_ring *ring = new_ring(4);
    int items[5];

    for (int round = 0; round < 10; round++) {
        ck_assert(srv_ring_is_empty(ring));
        ck_assert_ptr_null(srv_ring_pop(ring));
        for (int i = 0; i < 4; i++)
            ck_assert(srv_ring_push(ring, &items[i]));
        ck_assert(!srv_ring_push(ring, &items[4]));
        ck_assert(!srv_ring_is_empty(ring));
        for (int i = 0; i < 4; i++)
            ck_assert_ptr_eq(srv_ring_pop(ring), &items[i]);
    }
    ck_assert_ptr_null(srv_ring_pop(ring));
    srv_ring_destroy(ring);
}
END_TEST

/* Never at the same fill twice: each index meets each position. */
START_TEST(order_holds_around_the_edge)
{
    struct srv_ring *ring = new_ring(8);
    static char items[1000];
    int n_in = 0, n_out = 0;

    while (n_out < 1000) {
        for (int i = 0; i < 3 && n_in < 1000; i++)
            n_in += srv_ring_push(ring, &items[n_in]) ? 1 : 0;
        for (int i = 0; i < 2 && n_out < n_in; i++)
            ck_assert_ptr_eq(srv_ring_pop(ring), &items[n_out++]);
    }
    ck_assert(srv_ring_is_empty(ring));
    srv_ring_destroy(ring);
}
END_TEST

START_TEST(null_is_no_item)
{
    (void)srv_ring_push(new_ring(2), NULL);
}
END_TEST

enum { N_MESSAGES = 100000 };

struct message {
    uint64_t number;
    uint64_t check;
};

static void *produce(void *arg)
{
    struct srv_ring *ring = arg;

    for (uint64_t i = 0; i < N_MESSAGES; i++) {
        struct message *message = malloc(sizeof(*message));

        if (!message)
            abort();
        message->number = i;
        message->check = ~i;
        while (!srv_ring_push(ring, message))
            sched_yield();
    }
    return NULL;
}

/* What the pointer leads to must be there with it: each message is filled just before it is pushed, and
 * freed by the other side. A small ring, so that full and empty happen all the time. */
START_TEST(two_threads_see_every_message_whole_and_in_order)
{
    struct srv_ring *ring = new_ring(16);
    uint64_t n_wrong = 0;
    pthread_t producer;

    ck_assert_int_eq(pthread_create(&producer, NULL, produce, ring), 0);
    for (uint64_t i = 0; i < N_MESSAGES;) {
        struct message *message = srv_ring_pop(ring);

        if (!message) {
            sched_yield();
            continue;
        }
        n_wrong += message->number != i || message->check != ~i;
        free(message);
        i++;
    }
    ck_assert_int_eq(pthread_join(producer, NULL), 0);
    ck_assert_uint_eq(n_wrong, 0);
    ck_assert(srv_ring_is_empty(ring));
    srv_ring_destroy(ring);
}
END_TEST

static const char *scenario(void)
{
    struct srv_ring *ring = NULL;

    TRY(srv_ring_create(8, &ring), ring == NULL);
    srv_ring_destroy(ring);
    return NULL;
}

START_TEST(any_allocation_may_fail)
{
    kit_sweep(scenario);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("ring");
    TCase *tc = tcase_create("ring");

    (void)max;
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, capacity_must_be_a_power_of_two);
    tcase_add_test(tc, full_and_empty_are_answers);
    tcase_add_test(tc, order_holds_around_the_edge);
    tcase_add_test_raise_signal(tc, null_is_no_item, SIGABRT);
    tcase_add_test(tc, two_threads_see_every_message_whole_and_in_order);
    tcase_add_test(tc, any_allocation_may_fail);
    suite_add_tcase(suite, tc);
    suites_p[0] = suite;
    return 1;
}
