/* prefix.h - which retained sequence holds which prefix. Keys are content chains (content.h), one per prompt
 * block; an entry is a sequence with the blocks of one prompt, found again by the longest chain it shares
 * with a new prompt. Pure bookkeeping: it makes and releases no sequences. Not synchronised. */
#ifndef DSACTL_PREFIX_H
#define DSACTL_PREFIX_H

#include <stdbool.h>
#include <stdint.h>

struct prefix_cache;

struct prefix_cache *prefix_create(void); /* NULL: no memory */
void prefix_destroy(struct prefix_cache *cache);

/* The sequence that holds the most leading blocks of chains[0..n); *n_blocks_p of them (>= 1). Makes it the
 * most recently used. False when there is none. */
bool prefix_find(struct prefix_cache *cache, const uint64_t *chains, uint32_t n, uint64_t *sequence_p,
                 uint32_t *n_blocks_p);

/* Adds a sequence that holds the blocks chains[0..n), n >= 1, as the most recently used. Blocks that older
 * entries hold too are found through this one from now on. False: no memory, nothing changed. */
bool prefix_insert(struct prefix_cache *cache, const uint64_t *chains, uint32_t n, uint64_t sequence);

/* Removes the least recently used entry; the caller releases its sequence. False when the cache is empty. */
bool prefix_evict(struct prefix_cache *cache, uint64_t *sequence_p);

uint32_t prefix_count(const struct prefix_cache *cache); /* entries */

#endif /* DSACTL_PREFIX_H */
