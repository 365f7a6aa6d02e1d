/* worker_impl.h - what the worker's files share. Private to server/worker*.c. Everything here is [W]: it is
 * touched only by the thread that holds the right to run (see worker.c). */
#ifndef SERVER_WORKER_IMPL_H
#define SERVER_WORKER_IMPL_H

#include "server/core/batcher.h"
#include "server/core/kvpool.h"
#include "server/core/sequence.h"
#include "server/worker.h"
#include "server/worker_stage.h"

#define WORKER_MAX_ITEMS  64   /* jobs that share a launch */
#define WORKER_STAGE_ROWS 4096 /* rows that go over at a time when they are staged */

struct worker_state {
    struct srv_worker_config config;
    const struct dsk_layout *layout;
    struct dsk_device *device;
    struct dsk_stream *stream;
    uint64_t pool_addr;
    int64_t layer_bytes;
    struct srv_kvpool *pool;
    struct srv_seqset *sequences;
    struct srv_batcher *batcher;
    struct srv_job *jobs;      /* list of the jobs held */
    int32_t *slots;            /* [max_append_tokens] host */
    uint32_t *append_counts;   /* [max_append_tokens] host */
    uint32_t *bad_counts;      /* [max rows of a launch] host */
    struct worker_stage stage; /* tensors of an attend launch */
    struct worker_stage
        row_stage; /* rows of appends and exports, which can come while a launch is put together */
    struct dsk_attend_seg *segs; /* [max_segs] host */
    uint32_t max_segs;
    uint64_t n_batches;
    struct srv_worker_meter meter;
    uint64_t memory_asked_us;
    uint64_t launched_us; /* clock at the last launch; 0: there was none since run_items began */
    uint64_t landed_us;   /* its results were on the host, still packed */
    struct srv_batch_item items[WORKER_MAX_ITEMS];
};

/* The plane of one layer. */
struct dsk_kv_view worker_plane(const struct worker_state *w, uint32_t layer);

/* Every operation but attend: does the job and fills the piece's results. Returns piece->err.code. */
dsa_status worker_run_op(struct worker_state *w, struct srv_job *job, struct srv_piece *piece);

/* Appends (or imports stored rows), all or nothing. Reports the layer's length and the non-finite values met. */
dsa_status worker_run_append(struct worker_state *w, uint64_t session, const struct srv_job_append *append,
                             bool is_import, uint64_t *n_tokens_p, uint64_t *n_nonfinite_p,
                             struct srv_err *err);

/* One launch over items [0, n), all attend jobs with one key. Fills pieces[i] of each; a failed item has its error
 * there and does not hold up the others. Returns DSA_E_DEVICE_LOST when the device is gone. */
dsa_status worker_run_attend(struct worker_state *w, const struct srv_batch_item *items, uint32_t n,
                             struct srv_piece **pieces);

static inline struct srv_job *worker_job(struct srv_batch_node *node)
{
    return (struct srv_job *)node; /* node is the job's first member */
}

#endif /* SERVER_WORKER_IMPL_H */
