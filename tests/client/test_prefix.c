/* test_prefix.c - the cache of retained prefixes, and a random run against a plain list. */
#include <string.h>

#include "client/dsactl/prefix.h"
#include "ref64_rng.h"
#include "suites.h"

START_TEST(longest_prefix_wins)
{
    struct prefix_cache *cache = prefix_create();
    const uint64_t abc[] = {10, 11, 12}, abx[] = {10, 11, 99}, y[] = {50};
    uint64_t sequence = 0;
    uint32_t n = 0;

    ck_assert(!prefix_find(cache, abc, 3, &sequence, &n));
    ck_assert(prefix_insert(cache, abc, 3, 1));
    ck_assert(prefix_find(cache, abc, 3, &sequence, &n));
    ck_assert_uint_eq(n, 3);
    ck_assert(prefix_find(cache, abx, 3, &sequence, &n));
    ck_assert_uint_eq(sequence, 1);
    ck_assert_uint_eq(n, 2);
    ck_assert(!prefix_find(cache, y, 1, &sequence, &n));
    ck_assert(!prefix_find(cache, abc, 0, &sequence, &n));
    prefix_destroy(cache);
}
END_TEST

START_TEST(eviction_takes_the_least_recently_used)
{
    struct prefix_cache *cache = prefix_create();
    const uint64_t a[] = {1}, b[] = {2}, c[] = {3};
    uint64_t sequence;
    uint32_t n;

    ck_assert(prefix_insert(cache, a, 1, 100) && prefix_insert(cache, b, 1, 200)
              && prefix_insert(cache, c, 1, 300));
    ck_assert(prefix_find(cache, a, 1, &sequence, &n)); /* now b is the oldest */
    ck_assert(prefix_evict(cache, &sequence));
    ck_assert_uint_eq(sequence, 200);
    ck_assert(!prefix_find(cache, b, 1, &sequence, &n));
    ck_assert(prefix_evict(cache, &sequence));
    ck_assert_uint_eq(sequence, 300);
    ck_assert(prefix_evict(cache, &sequence));
    ck_assert_uint_eq(sequence, 100);
    ck_assert(!prefix_evict(cache, &sequence));
    prefix_destroy(cache);
}
END_TEST

START_TEST(a_later_entry_keeps_shared_blocks)
{
    struct prefix_cache *cache = prefix_create();
    const uint64_t abc[] = {10, 11, 12}, abd[] = {10, 11, 13};
    uint64_t sequence;
    uint32_t n;

    ck_assert(prefix_insert(cache, abc, 3, 1) && prefix_insert(cache, abd, 3, 2));
    ck_assert(prefix_evict(cache, &sequence));
    ck_assert_uint_eq(sequence, 1);
    ck_assert(prefix_find(cache, abc, 3, &sequence, &n)); /* blocks a and b live on in the second */
    ck_assert_uint_eq(sequence, 2);
    ck_assert_uint_eq(n, 2);
    prefix_destroy(cache);
}
END_TEST

enum { MAX_LIVE = 400, DEPTH = 4 };

struct live {
    uint64_t sequence, chains[DEPTH];
    uint32_t n;
};

/* Whatever is found must be a live entry with exactly those leading blocks. */
START_TEST(what_is_found_is_there)
{
    static struct live live[MAX_LIVE];
    struct prefix_cache *cache = prefix_create();
    struct ref64_rng rng = ref64_rng_init(5);
    uint64_t sequence, next = 1;
    uint32_t n_live = 0, n;

    for (int step = 0; step < 20000; step++) {
        struct live entry = {.sequence = next++, .n = 1 + (uint32_t)ref64_rng_below(&rng, DEPTH)};

        for (uint32_t i = 0; i < entry.n; i++)
            entry.chains[i] = (i ? entry.chains[i - 1] : 17) * 31 + (uint64_t)ref64_rng_below(&rng, 7);
        if (prefix_find(cache, entry.chains, entry.n, &sequence, &n)) {
            uint32_t at = 0;

            while (at < n_live && live[at].sequence != sequence)
                at++;
            ck_assert_msg(at < n_live, "found %llu, which was evicted", (unsigned long long)sequence);
            ck_assert_uint_le(n, live[at].n);
            ck_assert_mem_eq(live[at].chains, entry.chains, n * sizeof(entry.chains[0]));
        }
        if (n_live == MAX_LIVE || (n_live > 0 && ref64_rng_below(&rng, 3) == 0)) {
            uint32_t at = 0;

            ck_assert(prefix_evict(cache, &sequence));
            while (at < n_live && live[at].sequence != sequence)
                at++;
            ck_assert_uint_lt(at, n_live);
            live[at] = live[--n_live];
        } else {
            ck_assert(prefix_insert(cache, entry.chains, entry.n, entry.sequence));
            live[n_live++] = entry;
        }
        ck_assert_uint_eq(prefix_count(cache), n_live);
    }
    prefix_destroy(cache);
}
END_TEST

TCase *case_prefix(void)
{
    TCase *tc = tcase_create("prefix");

    tcase_add_test(tc, longest_prefix_wins);
    tcase_add_test(tc, eviction_takes_the_least_recently_used);
    tcase_add_test(tc, a_later_entry_keeps_shared_blocks);
    tcase_add_test(tc, what_is_found_is_there);
    return tc;
}
