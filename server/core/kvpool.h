/* kvpool.h - the fixed set of KV pages of one device; hands out page ids, never addresses.
 * Pure bookkeeping: no device calls, no clock, no locks. All functions [W].
 * Invariant: n_free + n_used == n_pages; a used page has refs >= 1; a page with refs > 1 is read-only.
 * get and put are O(1) a page. Freed pages are handed out again last in, first out. */
#ifndef SERVER_CORE_KVPOOL_H
#define SERVER_CORE_KVPOOL_H

#include <stdint.h>

#include "server/core/err.h"

struct srv_kvpool;

struct srv_kvpool_stats {
    uint64_t n_pages;
    uint64_t n_free;
    uint64_t n_shared; /* used pages with refs > 1 */
    uint64_t n_refs;   /* sum of refs */
};

/* DSA_E_NO_MEMORY; DSA_E_BAD_REQUEST if n_pages is 0 or above 2^25 (slots must fit int32). */
SRV_MUST_CHECK dsa_status srv_kvpool_create(uint32_t n_pages, struct srv_kvpool **pool_p);
void srv_kvpool_destroy(struct srv_kvpool *pool); /* NULL is fine; pages need not be back */

/* Take n_pages pages with refs 1, all or nothing; writes ids_p[0..n_pages) on success only.
 * DSA_E_NO_PAGES (pool unchanged; err->retry_after_us says when to come back). n_pages 0 is fine. */
SRV_MUST_CHECK dsa_status srv_kvpool_get(struct srv_kvpool *pool, uint32_t n_pages, int32_t *ids_p,
                                         struct srv_err *err);
void srv_kvpool_ref(struct srv_kvpool *pool, int32_t page); /* page must be used */
void srv_kvpool_put(struct srv_kvpool *pool, int32_t page); /* page must be used; asserts otherwise */
uint32_t srv_kvpool_refs(const struct srv_kvpool *pool, int32_t page); /* 0 = free */
void srv_kvpool_stats(const struct srv_kvpool *pool, struct srv_kvpool_stats *stats_p);

#endif /* SERVER_CORE_KVPOOL_H */
