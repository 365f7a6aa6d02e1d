/* sequence.h - the sequences of one device: whose they are, how long each layer is, which pages they hold.
 * Pure bookkeeping over a kvpool: no device calls, no clock, no locks. All functions [W].
 *
 * A page holds 64 tokens of every layer; a sequence's table maps page number to page id. Layers have lengths
 * of their own, as a model fills them one after the other. Sharing: full pages are shared by forks and
 * read-only while refs > 1; a partly used last page is copied when the fork is made, so that a fork never
 * takes from its source the room it had; a shared page that would be written (after a truncate) is copied
 * first.
 *
 * Ids: generation in the high half, index in the low half; never 0, never reused. A foreign session's id is
 * NOT_FOUND, exactly as one that never was.
 *
 * Changes that need device work go in two steps, so that a refused or failed launch loses nothing:
 *   srv_sequence_append_begin  -> takes pages, lists page copies and slots
 *   (caller runs the copies, then the append)
 *   srv_sequence_append_commit -> lengths grow     or  srv_sequence_append_abort -> pages return */
#ifndef SERVER_CORE_SEQUENCE_H
#define SERVER_CORE_SEQUENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "server/core/err.h"
#include "server/core/kvpool.h"

struct srv_seqset;

struct srv_seqset_config {
    uint32_t n_layers;
    uint32_t max_sequences; /* in all sessions */
    uint32_t max_per_session;
    uint64_t max_tokens; /* of one sequence; up to 2^31 */
};

/* One page to copy before the write: rows [0, n_rows[layer]) of src to dst, in each layer. n_rows is
 * [n_layers], owned by the set, valid until its next call. */
struct srv_page_copy {
    int32_t src;
    int32_t dst;
    const uint8_t *n_rows; /* per layer, 0..64 */
};

struct srv_seq_view {
    uint64_t id;
    uint64_t session;
    const int32_t *table; /* page ids; the set's, valid until the next non-const call on this sequence */
    uint32_t n_table;
    const uint32_t *layer_tokens; /* [n_layers], likewise */
    uint64_t n_tokens;            /* smallest of layer_tokens */
    uint32_t n_shared;            /* pages with more than one holder; O(n_table), filled by describe only */
};

/* DSA_E_NO_MEMORY; DSA_E_BAD_REQUEST if a limit is 0, or above 4096 layers, 2^24 sequences, 2^31 tokens. */
SRV_MUST_CHECK dsa_status srv_seqset_create(const struct srv_seqset_config *config, struct srv_kvpool *pool,
                                            struct srv_seqset **set_p);
void srv_seqset_destroy(struct srv_seqset *set); /* releases every sequence into the pool */
uint32_t srv_seqset_count(const struct srv_seqset *set);

/* session is L's session number (not its token). DSA_E_LIMIT, DSA_E_NO_MEMORY. */
SRV_MUST_CHECK dsa_status srv_sequence_create(struct srv_seqset *set, uint64_t session, uint64_t *id_p,
                                              struct srv_err *err);

/* DSA_E_NOT_FOUND. find is O(1) and does not fill n_shared. */
SRV_MUST_CHECK dsa_status srv_sequence_find(const struct srv_seqset *set, uint64_t session, uint64_t id,
                                            struct srv_seq_view *view_p, struct srv_err *err);
SRV_MUST_CHECK dsa_status srv_sequence_describe(const struct srv_seqset *set, uint64_t session, uint64_t id,
                                                struct srv_seq_view *view_p, struct srv_err *err);

/* An append of n tokens to layers [layer, layer + n_layers), which must all have the same length.
 * On success: *copy_p is a page copy to run first if *n_copies_p is 1 (not 0), and slots_p[0..n) where token
 * i goes (the same slots in every layer). expected_position: the length the caller believes in, or
 * UINT64_MAX. Until commit or abort the table already shows the new pages and the lengths are still the old
 * ones. DSA_E_NOT_FOUND, DSA_E_BAD_REQUEST (no tokens), DSA_E_BAD_RANGE (layer, length limit),
 * DSA_E_PRECONDITION (position, unequal lengths, or an append of this sequence already begun),
 * DSA_E_NO_PAGES, DSA_E_NO_MEMORY: nothing changed. */
struct srv_append {
    uint64_t session;
    uint64_t id;
    uint32_t layer;
    uint32_t n_layers;
    uint32_t n_tokens;
    uint64_t expected_position;
};
SRV_MUST_CHECK dsa_status srv_sequence_append_begin(struct srv_seqset *set, const struct srv_append *append,
                                                    int32_t *slots_p, struct srv_page_copy *copy_p,
                                                    uint32_t *n_copies_p, struct srv_err *err);
/* After begin, exactly one of these, with the same *append. commit writes the layer's new length (n_tokens_p
 * may be NULL). If the sequence was released in between, its pages went with it: both do nothing, commit
 * writes 0. */
void srv_sequence_append_commit(struct srv_seqset *set, const struct srv_append *append,
                                uint64_t *n_tokens_p);
void srv_sequence_append_abort(struct srv_seqset *set, const struct srv_append *append);

/* A new sequence with the first n_tokens of every layer (0 = all that every layer has). *n_copies_p is 1
 * when the last page is partly used: run the copy before anything else touches the new sequence.
 * DSA_E_NOT_FOUND, DSA_E_BAD_RANGE, DSA_E_PRECONDITION (an append of the source is begun), DSA_E_LIMIT,
 * DSA_E_NO_PAGES, DSA_E_NO_MEMORY: nothing changed. */
SRV_MUST_CHECK dsa_status srv_sequence_fork(struct srv_seqset *set, uint64_t session, uint64_t id,
                                            uint64_t n_tokens, uint64_t *new_id_p,
                                            struct srv_page_copy *copy_p, uint32_t *n_copies_p,
                                            struct srv_err *err);

/* Keep the first n_tokens of every layer (layers that have fewer keep what they have).
 * DSA_E_NOT_FOUND, DSA_E_BAD_RANGE (more than the longest layer has), DSA_E_PRECONDITION (an append is
 * begun). */
SRV_MUST_CHECK dsa_status srv_sequence_truncate(struct srv_seqset *set, uint64_t session, uint64_t id,
                                                uint64_t n_tokens, struct srv_err *err);

SRV_MUST_CHECK dsa_status srv_sequence_release(struct srv_seqset *set, uint64_t session, uint64_t id,
                                               struct srv_err *err);

/* Releases what a session owns, in time proportional to that. Returns how many sequences. */
uint32_t srv_seqset_release_session(struct srv_seqset *set, uint64_t session);

#endif /* SERVER_CORE_SEQUENCE_H */
