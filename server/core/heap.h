/* heap.h - intrusive pairing heap: smallest (major, minor) first. For the pure core only; same thread as the
 * structure it is part of. Chosen over an array heap because adding cannot fail: nothing is allocated, so a
 * job that becomes ready, or a lease that is renewed, never meets DSA_E_NO_MEMORY.
 * add is O(1), remove O(log n) amortised. */
#ifndef SERVER_CORE_HEAP_H
#define SERVER_CORE_HEAP_H

#include <stdbool.h>
#include <stdint.h>

struct srv_heap_node {
    struct srv_heap_node *child; /* first child */
    struct srv_heap_node *next;  /* right sibling */
    struct srv_heap_node *prev;  /* left sibling, or the parent of a first child; NULL in the root */
    uint64_t major, minor;
};

struct srv_heap {
    struct srv_heap_node *root; /* the smallest; NULL when empty. Zeroed = empty. */
};

void srv_heap_add(struct srv_heap *heap, struct srv_heap_node *node, uint64_t major, uint64_t minor);
void srv_heap_remove(struct srv_heap *heap, struct srv_heap_node *node); /* node must be in this heap */

#endif /* SERVER_CORE_HEAP_H */
