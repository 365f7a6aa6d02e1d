#include "server/core/kvpool.h"

#include <inttypes.h>
#include <stdlib.h>

#define MAX_PAGES (1u << 25)
#define RETRY_AFTER_US                                                                                       \
    10000u /* pages come back when sequences end: later than a queue drains, sooner than a lease */

struct srv_kvpool {
    uint32_t n_pages;
    uint32_t n_fresh; /* pages [n_fresh, n_pages) were never handed out; start-up thus touches no big array */
    uint32_t n_stack;
    uint32_t n_shared;
    uint64_t n_refs;
    uint32_t *refs; /* [n_pages]; 0 = free */
    int32_t *stack; /* [n_pages], of which n_stack are used: pages given back, last one on top */
};

dsa_status srv_kvpool_create(uint32_t n_pages, struct srv_kvpool **pool_p)
{
    struct srv_kvpool *pool;

    if (n_pages == 0 || n_pages > MAX_PAGES)
        return DSA_E_BAD_REQUEST;
    pool = calloc(1, sizeof(*pool));
    if (!pool)
        return DSA_E_NO_MEMORY;
    pool->n_pages = n_pages;
    pool->refs = calloc(n_pages, sizeof(*pool->refs));
    pool->stack = calloc(n_pages, sizeof(*pool->stack));
    if (!pool->refs || !pool->stack) {
        srv_kvpool_destroy(pool);
        return DSA_E_NO_MEMORY;
    }
    *pool_p = pool;
    return DSA_OK;
}

void srv_kvpool_destroy(struct srv_kvpool *pool)
{
    if (!pool)
        return;
    free(pool->stack);
    free(pool->refs);
    free(pool);
}

static uint32_t n_free(const struct srv_kvpool *pool)
{
    return pool->n_stack + (pool->n_pages - pool->n_fresh);
}

dsa_status srv_kvpool_get(struct srv_kvpool *pool, uint32_t n_pages, int32_t *ids_p, struct srv_err *err)
{
    if (n_pages > n_free(pool)) {
        dsa_status status = srv_fail(err, DSA_E_NO_PAGES, "", "%" PRIu32, n_pages,
                                     "%" PRIu32 " pages are needed, %" PRIu32 " of %" PRIu32 " are free",
                                     n_pages, n_free(pool), pool->n_pages);

        if (err)
            err->retry_after_us = RETRY_AFTER_US;
        return status;
    }
    for (uint32_t i = 0; i < n_pages; i++) {
        int32_t page = pool->n_stack > 0 ? pool->stack[--pool->n_stack] : (int32_t)pool->n_fresh++;

        SRV_ASSERT(pool->refs[page] == 0);
        pool->refs[page] = 1;
        ids_p[i] = page;
    }
    pool->n_refs += n_pages;
    return DSA_OK;
}

static uint32_t *used_refs(struct srv_kvpool *pool, int32_t page)
{
    SRV_ASSERT(page >= 0 && (uint32_t)page < pool->n_pages && pool->refs[page] > 0);
    return &pool->refs[page];
}

void srv_kvpool_ref(struct srv_kvpool *pool, int32_t page)
{
    uint32_t *refs = used_refs(pool, page);

    SRV_ASSERT(*refs < UINT32_MAX);
    if (++*refs == 2)
        pool->n_shared++;
    pool->n_refs++;
}

void srv_kvpool_put(struct srv_kvpool *pool, int32_t page)
{
    uint32_t *refs = used_refs(pool, page);

    if (--*refs == 1)
        pool->n_shared--;
    if (*refs == 0)
        pool->stack[pool->n_stack++] = page;
    pool->n_refs--;
}

uint32_t srv_kvpool_refs(const struct srv_kvpool *pool, int32_t page)
{
    SRV_ASSERT(page >= 0 && (uint32_t)page < pool->n_pages);
    return pool->refs[page];
}

void srv_kvpool_stats(const struct srv_kvpool *pool, struct srv_kvpool_stats *stats_p)
{
    *stats_p = (struct srv_kvpool_stats){
        .n_pages = pool->n_pages,
        .n_free = n_free(pool),
        .n_shared = pool->n_shared,
        .n_refs = pool->n_refs,
    };
}
