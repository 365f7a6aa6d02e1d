#include "server/core/idmap.h"

#include <stdlib.h>
#include <string.h>

#include "server/core/err.h"

/* splitmix64's finaliser: ids count upwards, so that their low bits alone would do, but keys made of other
 * keys differ only in high ones. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static struct srv_idmap_node **bucket_of(const struct srv_idmap *map, uint64_t key)
{
    return &map->buckets[mix(key) & (map->n_buckets - 1)];
}

void srv_idmap_init(struct srv_idmap *map)
{
    memset(map, 0, sizeof(*map));
    map->buckets = map->first_buckets;
    map->n_buckets = SRV_IDMAP_FIRST_BUCKETS;
}

void srv_idmap_fini(struct srv_idmap *map)
{
    if (map->buckets != map->first_buckets)
        free(map->buckets);
    srv_idmap_init(map);
}

static void grow(struct srv_idmap *map)
{
    struct srv_idmap_node **old = map->buckets, **buckets = calloc(map->n_buckets * 2, sizeof(*buckets));
    uint64_t n_old = map->n_buckets;

    if (!buckets)
        return; /* longer chains, still right */
    map->buckets = buckets;
    map->n_buckets = n_old * 2;
    for (uint64_t i = 0; i < n_old; i++) {
        struct srv_idmap_node *node = old[i];

        while (node) {
            struct srv_idmap_node *next = node->next, **bucket = bucket_of(map, node->key);

            node->next = *bucket;
            *bucket = node;
            node = next;
        }
    }
    if (old != map->first_buckets)
        free(old);
}

void srv_idmap_add(struct srv_idmap *map, struct srv_idmap_node *node, uint64_t key)
{
    struct srv_idmap_node **bucket;

    if (map->n_nodes >= map->n_buckets)
        grow(map);
    bucket = bucket_of(map, key);
    node->key = key;
    node->next = *bucket;
    *bucket = node;
    map->n_nodes++;
}

void srv_idmap_remove(struct srv_idmap *map, struct srv_idmap_node *node)
{
    struct srv_idmap_node **link = bucket_of(map, node->key);

    while (*link && *link != node)
        link = &(*link)->next;
    SRV_ASSERT(*link == node);
    *link = node->next;
    node->next = NULL;
    map->n_nodes--;
}

static struct srv_idmap_node *find_from(struct srv_idmap_node *node, uint64_t key)
{
    while (node && node->key != key)
        node = node->next;
    return node;
}

struct srv_idmap_node *srv_idmap_first(const struct srv_idmap *map, uint64_t key)
{
    return find_from(*bucket_of(map, key), key);
}

struct srv_idmap_node *srv_idmap_next(const struct srv_idmap_node *node)
{
    return find_from(node->next, node->key);
}

struct srv_idmap_node *srv_idmap_any(const struct srv_idmap *map)
{
    for (uint64_t i = 0; map->n_nodes > 0 && i < map->n_buckets; i++)
        if (map->buckets[i])
            return map->buckets[i];
    return NULL;
}
