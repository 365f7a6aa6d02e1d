/* idmap.h - intrusive hash map from 64-bit keys, for the pure core only; same thread as the structure it is
 * part of. Nodes are the caller's and adding cannot fail: the first buckets are inside the map, and when
 * more cannot be allocated the chains get longer instead. Several nodes may have one key (the caller then
 * compares the rest). All operations are O(1) expected, add amortised. */
#ifndef SERVER_CORE_IDMAP_H
#define SERVER_CORE_IDMAP_H

#include <stdint.h>

#define SRV_IDMAP_FIRST_BUCKETS 16

struct srv_idmap_node {
    struct srv_idmap_node *next;
    uint64_t key;
};

struct srv_idmap {
    struct srv_idmap_node **buckets;
    uint64_t n_buckets; /* a power of two */
    uint64_t n_nodes;
    struct srv_idmap_node *first_buckets[SRV_IDMAP_FIRST_BUCKETS];
};

void srv_idmap_init(struct srv_idmap *map); /* the map must not be moved after this */
void srv_idmap_fini(struct srv_idmap *map); /* leaves the nodes alone */
void srv_idmap_add(struct srv_idmap *map, struct srv_idmap_node *node, uint64_t key);
void srv_idmap_remove(struct srv_idmap *map, struct srv_idmap_node *node); /* node must be in this map */

/* The nodes with this key, one after the other; NULL at the end. */
struct srv_idmap_node *srv_idmap_first(const struct srv_idmap *map, uint64_t key);
struct srv_idmap_node *srv_idmap_next(const struct srv_idmap_node *node);

/* Any node, or NULL: for clearing the map. */
struct srv_idmap_node *srv_idmap_any(const struct srv_idmap *map);

#endif /* SERVER_CORE_IDMAP_H */
