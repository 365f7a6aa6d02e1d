#include "client/dsactl/prefix.h"

#include <stdlib.h>
#include <string.h>

struct entry {
    struct entry *newer, *older;
    uint64_t sequence;
    uint32_t n;
    uint64_t chains[];
};

struct node {
    struct node *next; /* same bucket */
    uint64_t chain;
    struct entry *entry;
    uint32_t n_blocks; /* that the chain covers */
};

struct prefix_cache {
    struct node *
        *buckets; /* n_buckets is a power of two; chains are random already, so their low bits choose */
    uint32_t n_buckets, n_nodes, n_entries;
    struct entry *newest, *oldest;
};

struct prefix_cache *prefix_create(void)
{
    struct prefix_cache *cache = calloc(1, sizeof(*cache));

    if (!cache)
        return NULL;
    cache->n_buckets = 1024;
    cache->buckets = calloc(cache->n_buckets, sizeof(struct node *));
    if (!cache->buckets) {
        free(cache);
        return NULL;
    }
    return cache;
}

void prefix_destroy(struct prefix_cache *cache)
{
    uint64_t sequence;

    if (!cache)
        return;
    while (prefix_evict(cache, &sequence))
        ;
    free(cache->buckets);
    free(cache);
}

static struct node **slot_of(struct prefix_cache *cache, uint64_t chain)
{
    struct node **at = &cache->buckets[chain & (cache->n_buckets - 1)];

    while (*at && (*at)->chain != chain)
        at = &(*at)->next;
    return at;
}

static void unlink_entry(struct prefix_cache *cache, struct entry *entry)
{
    *(entry->newer ? &entry->newer->older : &cache->newest) = entry->older;
    *(entry->older ? &entry->older->newer : &cache->oldest) = entry->newer;
}

static void link_newest(struct prefix_cache *cache, struct entry *entry)
{
    entry->newer = NULL;
    entry->older = cache->newest;
    *(entry->older ? &entry->older->newer : &cache->oldest) = entry;
    cache->newest = entry;
}

bool prefix_find(struct prefix_cache *cache, const uint64_t *chains, uint32_t n, uint64_t *sequence_p,
                 uint32_t *n_blocks_p)
{
    while (n > 0) {
        struct node *node = *slot_of(cache, chains[--n]);

        if (!node)
            continue;
        unlink_entry(cache, node->entry);
        link_newest(cache, node->entry);
        *sequence_p = node->entry->sequence;
        *n_blocks_p = node->n_blocks;
        return true;
    }
    return false;
}

/* Doubling keeps lists short; without memory for it they only grow longer. */
static void maybe_grow(struct prefix_cache *cache)
{
    uint32_t n = cache->n_buckets * 2;
    struct node **old = cache->buckets, **buckets;

    if (cache->n_nodes < cache->n_buckets)
        return;
    buckets = calloc(n, sizeof(*buckets));
    if (!buckets)
        return;
    for (uint32_t i = 0; i < cache->n_buckets; i++) {
        while (old[i]) {
            struct node *node = old[i];

            old[i] = node->next;
            node->next = buckets[node->chain & (n - 1)];
            buckets[node->chain & (n - 1)] = node;
        }
    }
    free(old);
    cache->buckets = buckets;
    cache->n_buckets = n;
}

/* Without memory for a node the block is merely not found through this entry. */
static void add_node(struct prefix_cache *cache, uint64_t chain, struct entry *entry, uint32_t n_blocks)
{
    struct node **at = slot_of(cache, chain);

    if (!*at) {
        *at = calloc(1, sizeof(**at));
        if (!*at)
            return;
        (*at)->chain = chain;
        cache->n_nodes++;
    }
    (*at)->entry = entry;
    (*at)->n_blocks = n_blocks;
}

bool prefix_insert(struct prefix_cache *cache, const uint64_t *chains, uint32_t n, uint64_t sequence)
{
    struct entry *entry = malloc(sizeof(*entry) + n * sizeof(entry->chains[0]));

    if (!entry)
        return false;
    entry->sequence = sequence;
    entry->n = n;
    memcpy(entry->chains, chains, n * sizeof(entry->chains[0]));
    maybe_grow(cache);
    for (uint32_t i = 0; i < n; i++)
        add_node(cache, chains[i], entry, i + 1);
    link_newest(cache, entry);
    cache->n_entries++;
    return true;
}

bool prefix_evict(struct prefix_cache *cache, uint64_t *sequence_p)
{
    struct entry *entry = cache->oldest;

    if (!entry)
        return false;
    for (uint32_t i = 0; i < entry->n; i++) {
        struct node **at = slot_of(cache, entry->chains[i]);
        struct node *node = *at;

        if (!node || node->entry != entry)
            continue; /* a later entry took it over */
        *at = node->next;
        free(node);
        cache->n_nodes--;
    }
    unlink_entry(cache, entry);
    cache->n_entries--;
    *sequence_p = entry->sequence;
    free(entry);
    return true;
}

uint32_t prefix_count(const struct prefix_cache *cache)
{
    return cache->n_entries;
}
