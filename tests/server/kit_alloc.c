/* kit_alloc.c - the failing allocations of kit.h, for programs linked with --wrap. Any thread may
 * allocate. */
#include <stdlib.h>

#include "kit.h"

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *ptr, size_t size);
void __real_free(void *ptr);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *ptr, size_t size);
void __wrap_free(void *ptr);

static atomic_bool is_on;
static atomic_long fail_at, n_allocs, n_live;
static atomic_size_t n_bytes;

static bool must_fail(size_t size)
{
    if (!atomic_load(&is_on))
        return false;
    atomic_fetch_add(&n_bytes, size);
    return atomic_fetch_add(&n_allocs, 1) + 1 == atomic_load(&fail_at);
}

static void *counted(void *ptr)
{
    if (ptr && atomic_load(&is_on))
        atomic_fetch_add(&n_live, 1);
    return ptr;
}

void *__wrap_malloc(size_t size)
{
    return must_fail(size) ? NULL : counted(__real_malloc(size));
}

void *__wrap_calloc(size_t n, size_t size)
{
    return must_fail(n * size) ? NULL : counted(__real_calloc(n, size));
}

void *__wrap_realloc(void *ptr, size_t size)
{
    if (must_fail(size))
        return NULL;
    return ptr ? __real_realloc(ptr, size) : counted(__real_realloc(ptr, size));
}

void __wrap_free(void *ptr)
{
    if (ptr && atomic_load(&is_on))
        atomic_fetch_sub(&n_live, 1);
    __real_free(ptr);
}

void kit_alloc_begin(long n)
{
    atomic_store(&fail_at, n);
    atomic_store(&n_allocs, 0);
    atomic_store(&n_live, 0);
    atomic_store(&n_bytes, 0);
    atomic_store(&is_on, true);
}

long kit_alloc_end(long *n_live_p)
{
    atomic_store(&is_on, false);
    if (n_live_p)
        *n_live_p = atomic_load(&n_live);
    return atomic_load(&n_allocs);
}

size_t kit_alloc_bytes(void)
{
    return atomic_load(&n_bytes);
}
