/* batcher.h - which waiting job runs next, and which others share its launch. All functions [W]. Pure.
 *
 * Jobs are the caller's; they embed struct srv_batch_node, which belongs to the batcher from push until done of
 * the job's last piece, or until remove or next_expired hands it back.
 *
 * Order: jobs on one sequence take effect in the order pushed, except that readers may pass readers. A job is
 * ready when no earlier job that conflicts with it on any of its sequences is unfinished; a job counts as
 * finished once srv_batcher_done was called for it (launched in stream order is enough). Jobs that touch no
 * sequence never wait. Among ready jobs: higher priority first, then first come. Attend jobs with equal keys
 * that are ready share a launch up to max_rows; every other kind runs alone.
 * Rows: a job with more than chunk_rows rows is handed out in pieces of chunk_rows, and goes behind its
 * equals between pieces, so that a long prefill does not hold up short decodes of the same priority.
 * A launch takes its jobs strictly in that order and ends before the first piece that does not fit.
 * All operations are O(1) or O(log n) amortised in the jobs waiting, plus O(sequences of the job). */
#ifndef SERVER_CORE_BATCHER_H
#define SERVER_CORE_BATCHER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/core/err.h"

struct srv_batcher;

/* Everything that must agree for two attend jobs to share a launch. Compared as bytes: zero it first. */
struct srv_batch_key {
    uint32_t layer;
    uint32_t h_q;
    uint32_t out_dtype;
    uint32_t flags;
};

struct srv_batch_access {
    uint64_t sequence; /* id, not 0 */
    bool is_write;
};

struct srv_batch_node {
    /* set by the caller before push */
    bool is_attend;           /* may share a launch and be cut in pieces */
    struct srv_batch_key key; /* is_attend only */
    uint32_t n_rows;          /* is_attend: >= 1; others: ignored */
    int32_t priority;
    uint64_t deadline_us; /* absolute; UINT64_MAX = none */
    /* [n_accesses], each sequence once; read by push only */
    const struct srv_batch_access *accesses;
    uint32_t n_accesses;
    /* the batcher's */
    uint32_t rows_done; /* rows handed out so far */
    void *priv[12];
};

struct srv_batch_item {
    struct srv_batch_node *node;
    uint32_t row_begin; /* rows of this piece; 0, 0 for a job that is not attend */
    uint32_t n_rows;
    bool is_last; /* the job has no more rows after this piece: it left the queue */
};

struct srv_batcher_config {
    uint32_t max_jobs;   /* waiting jobs; push beyond it is DSA_E_QUEUE_FULL */
    uint32_t max_rows;   /* of one launch */
    uint32_t max_items;  /* jobs in one launch */
    uint32_t chunk_rows; /* above max_rows counts as max_rows */
};

/* DSA_E_NO_MEMORY; DSA_E_BAD_REQUEST if a limit is 0 or max_jobs above 2^20. */
SRV_MUST_CHECK dsa_status srv_batcher_create(const struct srv_batcher_config *config,
                                             struct srv_batcher **batcher_p);
void srv_batcher_destroy(
    struct srv_batcher *batcher); /* NULL is fine; asserts that it is empty and no piece is out */

/* DSA_E_QUEUE_FULL (err->retry_after_us says when to come back), DSA_E_NO_MEMORY, DSA_E_BAD_REQUEST (an
 * attend of 0 rows, which the caller answers itself; sequence 0; a sequence named twice): the node is not
 * queued. */
SRV_MUST_CHECK dsa_status srv_batcher_push(struct srv_batcher *batcher, struct srv_batch_node *node,
                                           struct srv_err *err);

/* The next launch: fills items_p[0..max_items), returns how many; 0 = nothing is ready. The items of one call
 * share a key, or there is one item. A job whose piece was handed out is not handed out again until
 * srv_batcher_done. */
uint32_t srv_batcher_next(struct srv_batcher *batcher, struct srv_batch_item *items_p);

/* A piece handed out by next has been launched (or has failed: is_failed drops the job's remaining rows).
 * After this, a job that has rows left is ready again; one that has none is finished and its node is the
 * caller's again. */
void srv_batcher_done(struct srv_batcher *batcher, const struct srv_batch_item *item, bool is_failed);

/* Take a waiting job out (cancel). False if a piece of it is handed out just now; the caller then cancels it
 * after done by passing is_failed. False, too, if the batcher gave the node back already. */
bool srv_batcher_remove(struct srv_batcher *batcher, struct srv_batch_node *node);

/* The next waiting job whose deadline has passed, taken out; NULL if none. Jobs of which a piece is handed
 * out are left alone. */
struct srv_batch_node *srv_batcher_next_expired(struct srv_batcher *batcher, uint64_t now_us);
uint64_t srv_batcher_next_deadline(const struct srv_batcher *batcher); /* UINT64_MAX if none */
uint32_t srv_batcher_count(const struct srv_batcher *batcher);         /* jobs with rows not handed out */

#endif /* SERVER_CORE_BATCHER_H */
