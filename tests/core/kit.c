#include "kit.h"

#include <stdio.h>
#include <stdlib.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *ptr, size_t size);
void __real_free(void *ptr);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *ptr, size_t size);
void __wrap_free(void *ptr);

static struct {
    bool is_on;
    long fail_at; /* number of the allocation that fails, from 1; 0 = none */
    long n_allocs;
    long n_live;
    bool has_failed;
} alloc;

static bool must_fail(void)
{
    if (!alloc.is_on || ++alloc.n_allocs != alloc.fail_at)
        return false;
    alloc.has_failed = true;
    return true;
}

static void *counted(void *ptr)
{
    if (alloc.is_on && ptr)
        alloc.n_live++;
    return ptr;
}

void *__wrap_malloc(size_t size)
{
    return must_fail() ? NULL : counted(__real_malloc(size));
}

void *__wrap_calloc(size_t n, size_t size)
{
    return must_fail() ? NULL : counted(__real_calloc(n, size));
}

void *__wrap_realloc(void *ptr, size_t size)
{
    if (must_fail())
        return NULL;
    return ptr ? __real_realloc(ptr, size) : counted(__real_realloc(ptr, size));
}

void __wrap_free(void *ptr)
{
    if (alloc.is_on && ptr)
        alloc.n_live--;
    __real_free(ptr);
}

bool kit_alloc_has_failed(void)
{
    return alloc.has_failed;
}

static long run(kit_scenario scenario, long fail_at)
{
    const char *wrong;

    alloc.fail_at = fail_at;
    alloc.n_allocs = alloc.n_live = 0;
    alloc.has_failed = false;
    alloc.is_on = true;
    wrong = scenario();
    alloc.is_on = false;
    ck_assert_msg(wrong == NULL, "with allocation %ld failing: %s", fail_at, wrong ? wrong : "");
    ck_assert_msg(alloc.n_live == 0, "with allocation %ld failing: %ld blocks left", fail_at, alloc.n_live);
    return alloc.n_allocs;
}

void kit_sweep(kit_scenario scenario)
{
    long n_allocs = run(scenario, 0);

    ck_assert_int_gt(n_allocs, 0);
    for (long i = 1; i <= n_allocs; i++) {
        run(scenario, i);
        ck_assert_msg(alloc.has_failed, "allocation %ld was never made", i);
    }
}

uint64_t kit_random(struct kit_rng *rng)
{
    uint64_t x = (rng->state += 0x9e3779b97f4a7c15u);

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

uint32_t kit_below(struct kit_rng *rng, uint32_t n)
{
    return (uint32_t)(kit_random(rng) % n);
}

bool kit_chance(struct kit_rng *rng, uint32_t n_in_thousand)
{
    return kit_below(rng, 1000) < n_in_thousand;
}
