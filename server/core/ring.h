/* ring.h - bounded single-producer single-consumer queue of pointers, the only thing that two threads share.
 * One thread pushes, one pops; no locks. Own code rather than a library's because ThreadSanitizer must see
 * the atomics, and because it is forty lines. */
#ifndef SERVER_CORE_RING_H
#define SERVER_CORE_RING_H

#include <stdbool.h>
#include <stdint.h>

#include "server/core/err.h"

struct srv_ring;

/* capacity: a power of two, 2..2^20. DSA_E_BAD_REQUEST, DSA_E_NO_MEMORY. */
SRV_MUST_CHECK dsa_status srv_ring_create(uint32_t capacity, struct srv_ring **ring_p);
void srv_ring_destroy(struct srv_ring *ring);

bool srv_ring_push(struct srv_ring *ring, void *item); /* producer only; false when full; item not NULL */
void *srv_ring_pop(struct srv_ring *ring);             /* consumer only; NULL when empty */
bool srv_ring_is_empty(const struct srv_ring *ring);   /* either side; a hint to the other's progress */

#endif /* SERVER_CORE_RING_H */
