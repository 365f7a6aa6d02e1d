/* replay.h - what the parts of `dsactl replay` share: the run with its slots, and the checker thread.
 *
 *   trace --> START --> PREFILL --> DECODE --> slot free
 *   START    forks the retained sequence with the longest common prefix, or makes an empty one
 *   PREFILL  appends the prompt in chunks over all layers, then retains a fork of its full blocks
 *   DECODE   per output token and layer: appends a row and attends
 *
 * Everything here belongs to the main thread, except what the checker's own lock guards. */
#ifndef DSACTL_REPLAY_H
#define DSACTL_REPLAY_H

#include "client/dsactl/dsactl.h"
#include "client/dsactl/histogram.h"
#include "client/dsactl/prefix.h"
#include "client/dsactl/trace.h"

struct replay_config {
    const char *trace_path; /* NULL = the slice inside the program */
    uint64_t n_requests, scale_tokens, layers, heads, topk, concurrency, check_every, chunk_tokens, seed;
    double scale_time; /* 0 = arrivals are ignored */
    const char *transport;
    bool is_shared, want_json, is_quiet;
};

/* ---- checker (replay_check.c) ---------------------------------------------------------------- */

/* One sampled reply. Rows are named by (chain, position): the checker makes them again. */
struct check_job {
    struct check_job *next;
    uint64_t request, token;
    uint32_t layer, n; /* selected positions */
    uint64_t *chains;
    uint64_t *positions;
    uint16_t *q, *out;
    float *lse;
};

struct checker;

/* Checks on a thread of its own, so that float64 does not stand in the way of the replies that are timed.
 * NULL: no memory or no thread. */
struct checker *checker_create(const struct dsa_pool *pool, const struct ref64_layout *layout, uint32_t heads,
                               uint32_t topk, float softmax_scale);
/* A job with room for everything, or NULL while too many wait (take a later sample then). */
struct check_job *checker_job(struct checker *checker);
void checker_give(struct checker *checker, struct check_job *job); /* takes ownership */
/* Waits for all jobs and frees the checker. */
void checker_finish(struct checker *checker, uint64_t *n_checked_p, uint64_t *n_mismatches_p);
void checker_counts(struct checker *checker, uint64_t *n_checked_p, uint64_t *n_mismatches_p);

/* ---- run (replay_run.c) ---------------------------------------------------------------------- */

struct replay;

enum slot_state { SLOT_FREE, SLOT_START, SLOT_PREFILL, SLOT_DECODE };

struct replay_slot {
    struct replay *replay;
    enum slot_state state;
    bool is_flying, has_result;
    bool is_blocked; /* no pages until another sequence is released */
    bool is_parked;  /* gave its pages up; waits for another request to finish */
    uint64_t retry_at_us;
    const struct trace_request *request;
    uint64_t number; /* of the request in the trace */
    uint64_t sequence;
    uint64_t n_prompt, n_output;
    uint64_t *chains;  /* one per prompt block, the last may be partial */
    uint32_t n_full;   /* full blocks */
    uint32_t n_reused; /* blocks that came by a fork */
    uint64_t output_chain;
    uint64_t n_done; /* prompt tokens present */
    uint64_t n_sent; /* of them in flight */
    uint64_t n_generated;
    uint32_t layer;
    uint64_t token_begin_us;
    struct dsa_request *handle;
    struct dsa_result result;
    struct dsa_error last_error;
    uint16_t *rows, *q, *out; /* in replay->block */
    int32_t *indices, *n_valid;
    float *lse;
};

struct replay {
    struct replay_config config;
    struct dsa_client *client;
    const struct dsa_pool *pool;
    const struct ref64_layout *layout;
    struct trace trace;
    uint64_t block_tokens; /* prompt block after scaling */
    size_t next;           /* request of the trace that starts next */
    struct block block;    /* every slot's tensors */
    struct replay_slot *slots;
    struct prefix_cache *prefixes;
    struct checker *checker;
    uint64_t *marks; /* scratch of content_select */
    float softmax_scale;
    bool is_check_due;
    unsigned n_parked;
    /* what came of it */
    uint64_t begin_us, end_us, next_stats_us, next_progress_us;
    uint64_t n_finished, n_failed, n_too_long, n_evicted, n_preempted;
    uint64_t n_appended, n_reused, n_output, n_attends, n_retries;
    uint64_t pages_peak, shared_peak, saved_peak, pages_start;
    struct histogram attend_us, append_us, token_us, batch_rows;
    struct dsa_error first_error;
};

/* Runs the trace to its end. Returns an exit code; the counts above are valid either way. */
int replay_run(struct replay *replay);

#endif /* DSACTL_REPLAY_H */
