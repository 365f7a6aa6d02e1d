/* worker.h - the thread that owns one device: its KV pool, its sequences and its launches. Nothing else touches them.
 *
 * L submits jobs through a bounded ring and takes pieces back through another. W takes what has arrived, puts it in the
 * batcher, launches what comes out, and sleeps when there is nothing; it wakes L through `wake` only when L said
 * that it sleeps. Program order per sequence holds from submit.
 *
 * While W sleeps, L may take its place for one small job (srv_worker_try_step): the right to run is one atomic
 * word that changes hands, so there is still exactly one thread in here at any time. It saves two thread wake-ups, which
 * cost more than a small job itself. */
#ifndef SERVER_WORKER_H
#define SERVER_WORKER_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/dsk.h"
#include "server/core/err.h"
#include "server/job.h"
#include "server/meter.h"

struct srv_worker;

/* What the worker knows about itself. Whoever holds the worker writes, anyone reads. */
enum srv_stage {
    SRV_STAGE_QUEUE,  /* of each request: from its arrival to its (first) launch */
    SRV_STAGE_LAUNCH, /* of each launch: putting it together, inputs copied to staging included */
    SRV_STAGE_DEVICE, /* from the launch until its results are on the host */
    SRV_STAGE_COPY,   /* results from staging to client memory; none where tensors are used in place */
};
#define SRV_N_STAGES 4

struct srv_worker_meter {
    srv_counter busy_since_us; /* 0: at nothing */
    srv_counter pages_free, pages_shared, sequences;
    srv_counter graph_hits, graph_misses;
    srv_counter memory_used, memory_free;
    srv_counter n_device_errors, device_error_code; /* the driver's */
    struct srv_histogram stage_us[SRV_N_STAGES];
    struct srv_histogram batch_rows;
};

struct srv_worker_config {
    struct dsk_device_config device;
    uint32_t layout;
    float raw_scale;
    uint32_t n_layers;
    uint32_t n_pages;
    uint32_t max_sequences; /* in all */
    uint32_t max_sequences_per_session;
    uint64_t max_sequence_tokens;
    uint32_t max_queue;         /* jobs waiting */
    uint32_t max_pieces;        /* pieces on their way to L at a time; L keeps to it */
    uint32_t max_segments;      /* of one job */
    uint32_t max_topk;          /* index width of one job */
    bool is_staged;             /* copy tensors even where the device could read them in place (tests) */
    uint32_t max_append_tokens; /* of one job */
    uint32_t batch_rows;
    uint32_t chunk_rows;
    uint64_t spin_us;        /* polls this long before it sleeps */
    void (*wake)(void *arg); /* wakes L; called on W */
    void *wake_arg;
};

/* Opens the device, takes the pool and starts the thread. [L] DSA_E_BAD_REQUEST, DSA_E_NO_MEMORY (a pool that does not fit is
 * named with its size), DSA_E_UNSUPPORTED. */
SRV_MUST_CHECK dsa_status srv_worker_start(const struct srv_worker_config *config,
                                           struct srv_worker **worker_p, struct srv_err *err);

/* Fails what waits with DSA_E_DRAINING, joins the thread, closes the device. Pieces not yet taken stay readable
 * through srv_worker_pop until srv_worker_free. [L] */
void srv_worker_stop(struct srv_worker *worker);
void srv_worker_free(struct srv_worker *worker); /* [L]; NULL is fine */

const struct dsk_device_info *srv_worker_device(const struct srv_worker *worker); /* [any] */
bool srv_worker_is_lost(const struct srv_worker *worker); /* [any] the device failed */
const struct srv_worker_meter *srv_worker_get_meter(const struct srv_worker *worker); /* [any] */

/* Hands a job over. [L] False when the ring is full: the job stays L's. */
SRV_MUST_CHECK bool srv_worker_submit(struct srv_worker *worker, struct srv_job *job);
/* Lets W know that jobs were submitted; one call for many. [L] */
void srv_worker_kick(struct srv_worker *worker);
/* Runs what was submitted on this thread if W sleeps and all of it is small. False: not done, kick instead. [L] */
bool srv_worker_try_step(struct srv_worker *worker);

/* Some job's `cancelled` was set: drop waiting jobs that have it. [L] */
void srv_worker_note_cancel(struct srv_worker *worker);

struct srv_piece *srv_worker_pop(struct srv_worker *worker); /* [L] NULL when there is none */

/* L is about to sleep (true) or is awake (false). After `true`, L looks once more for pieces before it
 * sleeps; W calls wake for pieces that come later. [L] */
void srv_worker_set_sleeping(struct srv_worker *worker, bool is_sleeping);

#endif /* SERVER_WORKER_H */
