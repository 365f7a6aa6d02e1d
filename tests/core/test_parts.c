/* heap, idmap: the small parts that the modules are made of. */
#include <string.h>

#include "server/core/err.h"
#include "server/core/heap.h"
#include "server/core/idmap.h"
#include "server/core/list.h"

#include "kit.h"
#include "test_main.h"

/* ---- heap
 * ------------------------------------------------------------------------------------------------- */

struct item {
    struct srv_heap_node node;
    bool is_in;
};

static bool is_smaller(const struct srv_heap_node *a, const struct srv_heap_node *b)
{
    return a->major < b->major || (a->major == b->major && a->minor < b->minor);
}

/* Against the plainest model: the smallest of all that are in. */
START_TEST(heap_root_is_the_smallest)
{
    enum { N = 64, STEPS = 30000 };
    struct kit_rng rng = {test_seed()};
    struct srv_heap heap = {NULL};
    static struct item items[N];

    for (int step = 0; step < STEPS; step++) {
        struct item *item = &items[kit_below(&rng, N)];
        struct srv_heap_node *smallest = NULL;

        if (!item->is_in)
            srv_heap_add(&heap, &item->node, kit_below(&rng, 10), (uint64_t)step);
        else
            srv_heap_remove(&heap, &item->node);
        item->is_in = !item->is_in;
        for (int i = 0; i < N; i++)
            if (items[i].is_in && (!smallest || is_smaller(&items[i].node, smallest)))
                smallest = &items[i].node;
        if (heap.root != smallest)
            ck_abort_msg("step %d: the root is not the smallest", step);
    }
}
END_TEST

/* Ascending input makes one long row of children: nothing may recurse over it. */
START_TEST(heap_of_a_million_in_order_is_emptied_in_order)
{
    enum { N = 1000000 };
    static struct srv_heap_node nodes[N];
    struct srv_heap heap = {NULL};

    for (uint64_t i = 0; i < N; i++)
        srv_heap_add(&heap, &nodes[i], i, 0);
    for (uint64_t i = 0; i < N; i++) {
        if (heap.root != &nodes[i])
            ck_abort_msg("%llu is out of order", (unsigned long long)i);
        srv_heap_remove(&heap, heap.root);
    }
    ck_assert_ptr_null(heap.root);
}
END_TEST

/* ---- idmap
 * ------------------------------------------------------------------------------------------------ */

START_TEST(idmap_finds_what_is_in_and_nothing_else)
{
    enum { N = 1000 };
    static struct srv_idmap_node nodes[N];
    struct srv_idmap map;

    srv_idmap_init(&map);
    for (uint64_t i = 0; i < N; i++)
        srv_idmap_add(&map, &nodes[i], i << 32);
    for (uint64_t i = 0; i < N; i += 2)
        srv_idmap_remove(&map, &nodes[i]);
    for (uint64_t i = 0; i < N; i++) {
        ck_assert_ptr_eq(srv_idmap_first(&map, i << 32), i % 2 ? &nodes[i] : NULL);
        ck_assert_ptr_null(srv_idmap_first(&map, (i << 32) + 1));
    }
    ck_assert_uint_ge(map.n_buckets, N / 2); /* it grew: look-ups stay short */
    srv_idmap_fini(&map);
}
END_TEST

START_TEST(idmap_walks_nodes_of_one_key)
{
    struct srv_idmap_node nodes[5], *node;
    struct srv_idmap map;
    int n = 0;

    srv_idmap_init(&map);
    for (int i = 0; i < 5; i++)
        srv_idmap_add(&map, &nodes[i], i == 2 ? 8 : 7);
    for (node = srv_idmap_first(&map, 7); node; node = srv_idmap_next(node), n++)
        ck_assert_ptr_ne(node, &nodes[2]);
    ck_assert_int_eq(n, 4);
    for (n = 0; (node = srv_idmap_any(&map)) != NULL; n++)
        srv_idmap_remove(&map, node);
    ck_assert_int_eq(n, 5);
    srv_idmap_fini(&map);
}
END_TEST

/* Without memory for more buckets everything is still found. */
static const char *idmap_scenario(void)
{
    static struct srv_idmap_node nodes[200];
    struct srv_idmap map;

    srv_idmap_init(&map);
    for (uint64_t i = 0; i < 200; i++)
        srv_idmap_add(&map, &nodes[i], i);
    for (uint64_t i = 0; i < 200; i++)
        NEED(srv_idmap_first(&map, i) == &nodes[i]);
    for (uint64_t i = 0; i < 200; i++)
        srv_idmap_remove(&map, &nodes[i]);
    NEED(map.n_nodes == 0);
    srv_idmap_fini(&map);
    return NULL;
}

START_TEST(idmap_needs_no_memory_to_work)
{
    kit_sweep(idmap_scenario);
}
END_TEST

START_TEST(list_nodes_may_be_removed_twice)
{
    struct srv_list list, a, b;

    srv_list_init(&list);
    ck_assert(srv_list_is_empty(&list));
    srv_list_add_tail(&list, &a);
    srv_list_add_tail(&list, &b);
    ck_assert_ptr_eq(list.next, &a);
    srv_list_remove(&a);
    srv_list_remove(&a);
    ck_assert_ptr_eq(list.next, &b);
    ck_assert_ptr_eq(list.prev, &b);
    srv_list_remove(&b);
    ck_assert(srv_list_is_empty(&list));
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("parts");
    TCase *tc = tcase_create("parts");

    (void)max;
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, heap_root_is_the_smallest);
    tcase_add_test(tc, heap_of_a_million_in_order_is_emptied_in_order);
    tcase_add_test(tc, idmap_finds_what_is_in_and_nothing_else);
    tcase_add_test(tc, idmap_walks_nodes_of_one_key);
    tcase_add_test(tc, idmap_needs_no_memory_to_work);
    tcase_add_test(tc, list_nodes_may_be_removed_twice);
    suite_add_tcase(suite, tc);
    suites_p[0] = suite;
    return 1;
}
