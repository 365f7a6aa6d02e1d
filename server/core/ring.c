#include "server/core/ring.h"

#include <stdatomic.h>
#include <stdlib.h>

#define CACHE_LINE   64
#define MAX_CAPACITY (1u << 20)

/* head and tail count up and wrap; tail - head items are in the ring. Each side has its index, and what it
 * last saw of the other's, in a cache line of its own. Padding instead of alignment, so that calloc will do.
 * */
struct srv_ring {
    uint32_t capacity;
    char pad_shared[CACHE_LINE];
    _Atomic uint32_t head; /* written by the consumer */
    uint32_t tail_seen;    /* consumer's */
    char pad_consumer[CACHE_LINE];
    _Atomic uint32_t tail; /* written by the producer */
    uint32_t head_seen;    /* producer's */
    char pad_producer[CACHE_LINE];
    void *items[];
};

dsa_status srv_ring_create(uint32_t capacity, struct srv_ring **ring_p)
{
    struct srv_ring *ring;

    if (capacity < 2 || capacity > MAX_CAPACITY || (capacity & (capacity - 1)) != 0)
        return DSA_E_BAD_REQUEST;
    ring = calloc(1, sizeof(*ring) + capacity * sizeof(ring->items[0]));
    if (!ring)
        return DSA_E_NO_MEMORY;
    ring->capacity = capacity;
    *ring_p = ring;
    return DSA_OK;
}

void srv_ring_destroy(struct srv_ring *ring)
{
    free(ring);
}

bool srv_ring_push(struct srv_ring *ring, void *item)
{
    /* Only this thread writes tail. */
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);

    SRV_ASSERT(item != NULL);
    if (tail - ring->head_seen == ring->capacity) {
        /* Acquire: the consumer has read the slot before it let it go, so it may be written again. */
        ring->head_seen = atomic_load_explicit(&ring->head, memory_order_acquire);
        if (tail - ring->head_seen == ring->capacity)
            return false;
    }
    ring->items[tail & (ring->capacity - 1)] = item;
    /* Release: the slot, and what the item points to, are seen by whoever sees the new tail. */
    atomic_store_explicit(&ring->tail, tail + 1, memory_order_release);
    return true;
}

void *srv_ring_pop(struct srv_ring *ring)
{
    /* Only this thread writes head. */
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    void *item;

    if (head == ring->tail_seen) {
        /* Acquire: pairs with the release in push. */
        ring->tail_seen = atomic_load_explicit(&ring->tail, memory_order_acquire);
        if (head == ring->tail_seen)
            return NULL;
    }
    item = ring->items[head & (ring->capacity - 1)];
    /* Release: the read above is over before the producer sees the slot free. */
    atomic_store_explicit(&ring->head, head + 1, memory_order_release);
    return item;
}

bool srv_ring_is_empty(const struct srv_ring *ring)
{
    /* Acquire: a consumer that polls this and sees an item may go on to read it. */
    return atomic_load_explicit(&ring->head, memory_order_acquire)
           == atomic_load_explicit(&ring->tail, memory_order_acquire);
}
