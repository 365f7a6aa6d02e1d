/* content.h - made-up tensor contents as pure functions, so that whoever checks a reply can make the same
 * rows again instead of keeping them. A token's row depends on the chain of prefix blocks that leads to it,
 * its position and its layer: equal prefixes have equal rows, and forks share what is truly equal. Pure; any
 * thread. */
#ifndef DSACTL_CONTENT_H
#define DSACTL_CONTENT_H

#include <stddef.h>
#include <stdint.h>

#include "ref64_rng.h"

/* The chain up to and including a block, from the chain before it (the seed for the first one). */
uint64_t content_chain(uint64_t parent, uint64_t block_id);

/* A random state for one (chain, a, b). */
struct ref64_rng content_rng(uint64_t chain, uint64_t a, uint64_t b);

/* n bf16 values of magnitude 1/8 to 2, either sign. */
void content_fill(struct ref64_rng *rng, uint16_t *values, size_t n);

/* The row of one token in one layer. */
void content_row(uint64_t chain, uint64_t position, uint32_t layer, uint16_t *row, size_t d_qk);

/* What a decode step selects: up to topk distinct positions of [0, n_tokens): the latest quarter, a quarter
 * of heavy hitters (fixed for the chain, the first few tokens among them), the rest spread at random. All of
 * them when n_tokens <= topk. Lanes behind the selected ones are -1. `marks` is scratch of n_tokens bits, all
 * zero before and after. Returns how many were selected. */
uint32_t content_select(uint64_t chain, uint64_t n_tokens, uint32_t topk, uint32_t layer, uint64_t *marks,
                        int32_t *indices);

#endif /* DSACTL_CONTENT_H */
