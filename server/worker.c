/* worker.c - the worker's thread: takes jobs, batches, launches, answers, sleeps.
 *
 * The right to run is the word `holder`:
 *   PARKED ──kick (L), or W finds the ring not empty──► HELD ──nothing left──► PARKED
 *      └─────try_step (L)──► BORROWED ──nothing left──► PARKED
 * Whoever moves it away from PARKED may touch everything; the release and acquire on it order the rest. */
#include "server/worker.h"

#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/clock.h"
#include "server/core/ring.h"
#include "server/fence.h"
#include "server/log.h"
#include "server/status.h"
#include "server/worker_impl.h"

#if defined(DSA_SANITIZE_thread)
atomic_int srv_fence_word;
#endif

#define MEMORY_PERIOD_US 1000000

enum holder { HOLDER_PARKED, HOLDER_HELD, HOLDER_BORROWED };

struct srv_worker {
    struct worker_state state;
    struct srv_ring *in;  /* jobs, L to W */
    struct srv_ring *out; /* pieces, W to L */
    pthread_t thread;
    sem_t kicked;
    atomic_int holder;
    atomic_bool l_sleeps; /* L wants a wake for the next piece */
    atomic_bool
        cancel_hint; /* some held job has `cancelled` set. Relaxed but for the exchange: the flags are hints */
    atomic_bool is_stopping;
    atomic_bool is_lost; /* written by W, read by anyone; one way */
    bool is_joined;
};

/* ---- answers --------------------------------------------------------------------------------- */

static void send_piece(struct srv_worker *worker, struct srv_piece *piece)
{
    /* L admits no more work than the ring holds, so it cannot be full. */
    SRV_ASSERT(srv_ring_push(worker->out, piece));
    /* Pairs with the fence in srv_worker_set_sleeping: either L sees the piece or we see that it sleeps. */
    srv_fence();
    if (atomic_load_explicit(&worker->l_sleeps, memory_order_relaxed)
        && atomic_exchange(&worker->l_sleeps, false))
        worker->state.config.wake(worker->state.config.wake_arg);
}

static struct srv_piece *next_piece(struct srv_job *job)
{
    struct srv_piece *piece;

    SRV_ASSERT(job->i_piece < job->n_pieces);
    piece = &job->pieces[job->i_piece++];
    memset(piece, 0, sizeof(*piece));
    piece->job = job;
    return piece;
}

static void hold_job(struct worker_state *w, struct srv_job *job)
{
    job->w_prev = NULL;
    job->w_next = w->jobs;
    if (w->jobs)
        w->jobs->w_prev = job;
    w->jobs = job;
}

static void drop_job(struct worker_state *w, struct srv_job *job)
{
    if (job->w_prev)
        job->w_prev->w_next = job->w_next;
    else
        w->jobs = job->w_next;
    if (job->w_next)
        job->w_next->w_prev = job->w_prev;
}

/* The last answer of a job: after this it is L's again. */
static void finish_job(struct srv_worker *worker, struct srv_job *job, struct srv_piece *piece)
{
    drop_job(&worker->state, job);
    piece->is_last = true;
    piece->done_us = job->stamps.done_us = srv_now_us();
    send_piece(worker, piece);
}

static void fail_job(struct srv_worker *worker, struct srv_job *job, dsa_status code, const char *field)
{
    struct srv_piece *piece = next_piece(job);

    srv_fail(&piece->err, code, field, "%s", "", "%s", srv_status_text(code));
    finish_job(worker, job, piece);
}

/* ---- one round ------------------------------------------------------------------------------- */

static bool take_jobs(struct srv_worker *worker)
{
    struct worker_state *w = &worker->state;
    bool took = false;
    struct srv_job *job;

    while ((job = srv_ring_pop(worker->in)) != NULL) {
        struct srv_err err = {0};

        took = true;
        hold_job(w, job);
        if (srv_batcher_push(w->batcher, &job->node, &err) != DSA_OK) {
            struct srv_piece *piece = next_piece(job);

            piece->err = err;
            finish_job(worker, job, piece);
        }
    }
    return took;
}

static void drop_cancelled(struct srv_worker *worker)
{
    struct srv_job *job, *next;

    if (!atomic_load_explicit(&worker->cancel_hint, memory_order_relaxed)
        || !atomic_exchange(&worker->cancel_hint, false))
        return;
    for (job = worker->state.jobs; job; job = next) {
        next = job->w_next;
        if (atomic_load_explicit(&job->cancelled, memory_order_relaxed)
            && srv_batcher_remove(worker->state.batcher, &job->node))
            fail_job(worker, job, DSA_E_CANCELLED, "");
    }
}

static void drop_late(struct srv_worker *worker)
{
    struct srv_batch_node *node;
    uint64_t now;

    if (srv_batcher_next_deadline(worker->state.batcher) == UINT64_MAX)
        return;
    now = srv_now_us();
    while ((node = srv_batcher_next_expired(worker->state.batcher, now)) != NULL)
        fail_job(worker, worker_job(node), DSA_E_DEADLINE, "deadline_us");
}

/* Settles one item after its launch. */
static void finish_item(struct srv_worker *worker, const struct srv_batch_item *item, struct srv_piece *piece)
{
    struct srv_job *job = worker_job(item->node);
    bool is_failed = piece->err.code != DSA_OK;

    piece->row_begin = item->row_begin;
    piece->n_rows = item->n_rows;
    srv_batcher_done(worker->state.batcher, item, is_failed);
    if (is_failed || item->is_last) {
        finish_job(worker, job, piece);
    } else {
        piece->done_us = srv_now_us();
        send_piece(worker, piece);
    }
}

/* The value of a lost device's error is the driver's code. */
static void note_lost(struct srv_worker *worker, const struct srv_err *err)
{
    struct srv_worker_meter *meter = &worker->state.meter;

    srv_counter_set(&meter->device_error_code, strtoull(err->value, NULL, 10));
    srv_counter_add(&meter->n_device_errors, 1);
    if (!atomic_exchange(&worker->is_lost, true))
        srv_log(SRV_LOG_ERROR, "device lost, its jobs fail from now on device=%s",
                dsk_device_get_info(worker->state.device)->uuid);
}

/* Asks the driver, so not often. A device that does not say keeps what it said. */
static void publish_memory(struct worker_state *w, uint64_t now_us)
{
    uint64_t used, n_free;

    if (w->memory_asked_us != 0 && now_us - w->memory_asked_us < MEMORY_PERIOD_US)
        return;
    w->memory_asked_us = now_us;
    if (dsk_mem_get_usage(w->device, &used, &n_free) != DSK_OK)
        return;
    srv_counter_set(&w->meter.memory_used, used);
    srv_counter_set(&w->meter.memory_free, n_free);
}

/* What the meter says of the pool and the graphs. After everything that can change it. */
static void publish(struct worker_state *w)
{
    struct srv_kvpool_stats pool;
    uint64_t n_hits, n_misses;

    srv_kvpool_stats(w->pool, &pool);
    srv_counter_set(&w->meter.pages_free, pool.n_free);
    srv_counter_set(&w->meter.pages_shared, pool.n_shared);
    srv_counter_set(&w->meter.sequences, srv_seqset_count(w->sequences));
    dsk_stream_get_graph_counts(w->stream, &n_hits, &n_misses);
    srv_counter_set(&w->meter.graph_hits, n_hits);
    srv_counter_set(&w->meter.graph_misses, n_misses);
}

static void observe_launch(struct worker_state *w, uint64_t begun_us, uint64_t ended_us)
{
    struct srv_histogram *stages = w->meter.stage_us;

    srv_histogram_add(&stages[SRV_STAGE_LAUNCH], srv_bounds_us, w->launched_us - begun_us);
    srv_histogram_add(&stages[SRV_STAGE_DEVICE], srv_bounds_us, w->landed_us - w->launched_us);
    if (!w->stage.is_direct)
        srv_histogram_add(&stages[SRV_STAGE_COPY], srv_bounds_us, ended_us - w->landed_us);
}

/* Adds what the round's launch took to the meter, and to each job that was part of the round. */
static void stamp_launch(struct worker_state *w, uint32_t n, struct srv_piece **pieces, uint64_t begun_us)
{
    uint64_t ended_us = srv_now_us(), launched_us = w->launched_us > 0 ? w->launched_us : begun_us;
    uint64_t copy_us =
        w->stage.is_direct || w->launched_us == 0 ? 0 : launched_us - begun_us + (ended_us - w->landed_us);

    if (w->launched_us > 0)
        observe_launch(w, begun_us, ended_us);
    for (uint32_t i = 0; i < n; i++) {
        struct srv_job_stamps *stamps = &worker_job(w->items[i].node)->stamps;

        if (pieces[i]->err.code == DSA_E_CANCELLED)
            continue;
        if (stamps->launched_us == 0)
            stamps->launched_us = launched_us;
        stamps->device_us += ended_us - launched_us;
        stamps->copy_us += copy_us;
        stamps->n_launches += w->launched_us > 0;
    }
}

static void run_items(struct srv_worker *worker, uint32_t n)
{
    struct worker_state *w = &worker->state;
    struct srv_piece *pieces[WORKER_MAX_ITEMS];
    uint64_t launch_us = srv_now_us();
    dsa_status rc = DSA_OK;

    srv_counter_set(&w->meter.busy_since_us, launch_us);
    w->launched_us = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct srv_job *job = worker_job(w->items[i].node);

        if (w->items[i].row_begin == 0 && launch_us >= job->arrival_us)
            srv_histogram_add(&w->meter.stage_us[SRV_STAGE_QUEUE], srv_bounds_us,
                              launch_us - job->arrival_us);

        pieces[i] = next_piece(job);
        if (job->stamps.begun_us == 0)
            job->stamps.begun_us = launch_us;
        pieces[i]->launch_us = launch_us;
        if (atomic_load_explicit(&worker->is_lost, memory_order_relaxed) && job->op != SRV_OP_STATS
            && job->op != SRV_OP_END_SESSION && job->op != SRV_OP_RELEASE)
            srv_fail(&pieces[i]->err, DSA_E_DEVICE_LOST, "", "%s", "", "%s",
                     srv_status_text(DSA_E_DEVICE_LOST));
        else if (atomic_load_explicit(&job->cancelled, memory_order_relaxed))
            srv_fail(&pieces[i]->err, DSA_E_CANCELLED, "", "%s", "", "%s", srv_status_text(DSA_E_CANCELLED));
    }
    if (worker_job(w->items[0].node)->op == SRV_OP_ATTEND)
        rc = worker_run_attend(w, w->items, n, pieces);
    else if (pieces[0]->err.code == DSA_OK)
        rc = worker_run_op(w, worker_job(w->items[0].node), pieces[0]);
    if (rc == DSA_E_DEVICE_LOST)
        note_lost(worker, &pieces[0]->err);
    publish(w);
    srv_counter_set(&w->meter.busy_since_us,
                    0); /* before the answers: who has one sees a worker that is free */
    stamp_launch(w, n, pieces, launch_us);
    for (uint32_t i = 0; i < n; i++)
        finish_item(worker, &w->items[i], pieces[i]);
    publish_memory(w, launch_us); /* after the answers: it can take a while */
}

/* True if there was something to do. */
static bool step(struct srv_worker *worker)
{
    bool took = take_jobs(worker);
    uint32_t n;

    drop_cancelled(worker);
    drop_late(worker);
    n = srv_batcher_next(worker->state.batcher, worker->state.items);
    if (n > 0)
        run_items(worker, n);
    return took || n > 0;
}

/* ---- sleeping and waking ----------------------------------------------------------------------- */

static void park(struct srv_worker *worker)
{
    int expected = HOLDER_PARKED;

    atomic_store(&worker->holder, HOLDER_PARKED);
    srv_fence(); /* pairs with srv_worker_kick: one of us sees the other */
    /* A job pushed before the store was visible had no one to kick: look again, and take the word back if L has not.
     * If L has (kick or try_step), it serves the ring or posts. */
    if ((!srv_ring_is_empty(worker->in) || atomic_load(&worker->is_stopping)
         || atomic_load_explicit(&worker->cancel_hint, memory_order_relaxed))
        && atomic_compare_exchange_strong(&worker->holder, &expected, HOLDER_HELD))
        return;
    while (sem_wait(&worker->kicked) != 0)
        ;
}

static void *worker_main(void *arg)
{
    struct srv_worker *worker = arg;
    uint64_t idle_since = 0;
    struct srv_job *job, *next;

    while (!atomic_load(&worker->is_stopping)) {
        if (step(worker)) {
            idle_since = 0;
            continue;
        }
        if (worker->state.config.spin_us > 0) {
            uint64_t now = srv_now_us();

            idle_since = idle_since ? idle_since : now;
            if (now - idle_since < worker->state.config.spin_us) {
                sched_yield(); /* with fewer cores than spinners the others must get on */
                continue;
            }
        }
        idle_since = 0;
        park(worker);
    }
    take_jobs(worker);
    for (job = worker->state.jobs; job; job = next) {
        next = job->w_next;
        SRV_ASSERT(srv_batcher_remove(worker->state.batcher, &job->node));
        fail_job(worker, job, DSA_E_DRAINING, "");
    }
    return NULL;
}

void srv_worker_kick(struct srv_worker *worker)
{
    int expected = HOLDER_PARKED;

    srv_fence(); /* the job is in the ring before we look whether W sleeps */
    if (atomic_compare_exchange_strong(&worker->holder, &expected, HOLDER_HELD))
        sem_post(&worker->kicked);
}

bool srv_worker_try_step(struct srv_worker *worker)
{
    int expected = HOLDER_PARKED;

    if (!atomic_compare_exchange_strong(&worker->holder, &expected, HOLDER_BORROWED))
        return false;
    while (step(worker))
        ;
    atomic_store(&worker->holder, HOLDER_PARKED);
    return true;
}

bool srv_worker_submit(struct srv_worker *worker, struct srv_job *job)
{
    job->stamps = (struct srv_job_stamps){.submitted_us = srv_now_us()};
    return srv_ring_push(worker->in, job);
}

void srv_worker_note_cancel(struct srv_worker *worker)
{
    atomic_store(&worker->cancel_hint, true);
    srv_worker_kick(worker);
}

struct srv_piece *srv_worker_pop(struct srv_worker *worker)
{
    return srv_ring_pop(worker->out);
}

void srv_worker_set_sleeping(struct srv_worker *worker, bool is_sleeping)
{
    atomic_store_explicit(&worker->l_sleeps, is_sleeping, memory_order_relaxed);
    if (is_sleeping)
        srv_fence(); /* pairs with send_piece */
}

const struct dsk_device_info *srv_worker_device(const struct srv_worker *worker)
{
    return dsk_device_get_info(worker->state.device);
}

const struct srv_worker_meter *srv_worker_get_meter(const struct srv_worker *worker)
{
    return &worker->state.meter;
}

bool srv_worker_is_lost(const struct srv_worker *worker)
{
    return atomic_load(&worker->is_lost);
}

/* ---- life ------------------------------------------------------------------------------------ */

/* Room for the largest launch: every row with the most heads, the widest list and the longest table. */
static dsa_status open_stages(struct worker_state *w, uint32_t launch_rows, struct srv_err *err)
{
    const struct srv_worker_config *config = &w->config;
    uint64_t d_qk = (uint64_t)w->layout->d_qk, d_v = (uint64_t)w->layout->d_v;
    uint64_t table_bytes = (config->max_sequence_tokens / DSK_PAGE_TOKENS + 1) * sizeof(int32_t);
    uint64_t slack = UINT64_C(1) << 20;
    bool is_direct = config->device.kind == DSK_DEVICE_CPU && !config->is_staged;
    uint64_t row_in =
        DSK_MAX_HEADS * (d_qk * 2 + sizeof(float)) + config->max_topk * sizeof(int32_t) + table_bytes + 2048;
    uint64_t row_out = DSK_MAX_HEADS * (d_v * 4 + sizeof(float)) + 1024;
    dsa_status rc = stage_open(&w->stage, w->device, w->stream, is_direct, launch_rows * row_in + slack,
                               launch_rows * row_out + slack, launch_rows * 3, err);

    if (rc != DSA_OK)
        return rc;
    return stage_open(&w->row_stage, w->device, w->stream, is_direct,
                      WORKER_STAGE_ROWS * d_qk * 2 + table_bytes + slack,
                      WORKER_STAGE_ROWS * (d_qk * 2 + sizeof(uint32_t)) + slack, 4, err);
}

static dsa_status take_device_memory(struct worker_state *w, struct srv_err *err)
{
    const struct srv_worker_config *config = &w->config;
    uint32_t launch_rows = config->batch_rows > config->chunk_rows ? config->batch_rows : config->chunk_rows;
    uint64_t pool_bytes;

    w->layer_bytes = (int64_t)config->n_pages * DSK_PAGE_TOKENS * w->layout->row_bytes;
    pool_bytes = (uint64_t)w->layer_bytes * config->n_layers;
    if (dsk_mem_alloc(w->device, pool_bytes, &w->pool_addr) != DSK_OK)
        return srv_fail(err, DSA_E_NO_MEMORY, "pool-bytes", "%" PRIu64, pool_bytes,
                        "the pool needs %" PRIu64 " bytes, which the device does not have", pool_bytes);
    return open_stages(w, launch_rows, err);
}

/* A device that has no attend kernel for the pool's layout is refused now rather than at the first request. */
static dsa_status open_device(struct worker_state *w, struct srv_err *err)
{
    const struct dsk_attend_shape least = {
        .layout = w->config.layout, .h_q = 1, .topk = 1, .out_dtype = DSK_DTYPE_BF16};
    struct dsk_err cause;

    w->layout = dsk_layout_get(w->config.layout);
    if (!w->layout)
        return srv_fail(err, DSA_E_BAD_LAYOUT, "layout", "%" PRIu32, w->config.layout, "unknown layout id");
    if (dsk_device_open(&w->config.device, &w->device, &cause) != DSK_OK)
        return srv_fail_dsk(err, &cause, "device.");
    if (!dsk_supports(w->device, &least, &cause))
        return srv_fail_dsk(err, &cause, "device.");
    if (dsk_stream_create(w->device, &w->stream) != DSK_OK)
        return srv_fail(err, DSA_E_NO_MEMORY, "device", "%s", "", "cannot create a stream");
    return take_device_memory(w, err);
}

static uint32_t power_of_two(uint32_t n)
{
    uint32_t p = 2;

    while (p < n)
        p *= 2;
    return p;
}

static dsa_status create_core(struct worker_state *w, struct srv_err *err)
{
    const struct srv_worker_config *config = &w->config;
    struct srv_seqset_config seqset = {
        .n_layers = config->n_layers,
        .max_sequences = config->max_sequences,
        .max_per_session = config->max_sequences_per_session,
        .max_tokens = config->max_sequence_tokens,
    };
    struct srv_batcher_config batcher = {
        .max_jobs =
            power_of_two(config->max_queue * 2), /* L admits max_queue; ends of sessions come beside them */
        .max_rows = config->batch_rows,
        .max_items = WORKER_MAX_ITEMS,
        .chunk_rows = config->chunk_rows,
    };
    dsa_status rc = srv_kvpool_create(config->n_pages, &w->pool);

    if (rc == DSA_OK)
        rc = srv_seqset_create(&seqset, w->pool, &w->sequences);
    if (rc == DSA_OK)
        rc = srv_batcher_create(&batcher, &w->batcher);
    if (rc != DSA_OK)
        return srv_fail(err, rc, "worker", "%s", "", "%s", srv_status_text(rc));
    /* A launch holds at most max_items jobs, each with its segments, and no more segments than rows. */
    w->max_segs = config->max_segments * WORKER_MAX_ITEMS;
    w->slots = malloc(sizeof(*w->slots) * config->max_append_tokens);
    w->segs = malloc(sizeof(*w->segs) * w->max_segs);
    w->append_counts = malloc(sizeof(*w->append_counts) * config->max_append_tokens);
    w->bad_counts =
        malloc(sizeof(*w->bad_counts)
               * (config->batch_rows > config->chunk_rows ? config->batch_rows : config->chunk_rows));
    if (!w->slots || !w->segs || !w->append_counts || !w->bad_counts)
        return srv_fail(err, DSA_E_NO_MEMORY, "worker", "%s", "", "no memory for the launch arrays");
    return DSA_OK;
}

dsa_status srv_worker_start(const struct srv_worker_config *config, struct srv_worker **worker_p,
                            struct srv_err *err)
{
    struct srv_worker *worker = calloc(1, sizeof(*worker));
    dsa_status rc;

    if (!worker)
        return srv_fail(err, DSA_E_NO_MEMORY, "worker", "%s", "", "no memory for the worker");
    worker->state.config = *config;
    worker->is_joined = true;
    atomic_init(&worker->holder, HOLDER_HELD);
    rc = open_device(&worker->state, err);
    if (rc == DSA_OK)
        rc = create_core(&worker->state, err);
    /* Every waiting job and, beside the limit, each session's release must fit. */
    if (rc == DSA_OK)
        rc = srv_ring_create(power_of_two(config->max_queue * 2), &worker->in);
    if (rc == DSA_OK)
        rc = srv_ring_create(power_of_two(config->max_pieces), &worker->out);
    if (rc == DSA_OK && sem_init(&worker->kicked, 0, 0) != 0)
        rc = DSA_E_NO_MEMORY;
    if (rc == DSA_OK && pthread_create(&worker->thread, NULL, worker_main, worker) != 0)
        rc = srv_fail(err, DSA_E_NO_MEMORY, "worker", "%s", "", "cannot start the worker's thread");
    if (rc != DSA_OK) {
        if (err && err->code == DSA_OK)
            srv_fail(err, rc, "worker", "%s", "", "%s", srv_status_text(rc));
        srv_worker_free(worker);
        return rc;
    }
    publish(&worker->state);
    publish_memory(&worker->state, srv_now_us());
    worker->is_joined = false;
    *worker_p = worker;
    return DSA_OK;
}

void srv_worker_stop(struct srv_worker *worker)
{
    if (worker->is_joined)
        return;
    atomic_store(&worker->is_stopping, true);
    srv_worker_kick(worker);
    pthread_join(worker->thread, NULL);
    worker->is_joined = true;
}

void srv_worker_free(struct srv_worker *worker)
{
    struct worker_state *w;

    if (!worker)
        return;
    srv_worker_stop(worker);
    w = &worker->state;
    if (w->batcher)
        srv_batcher_destroy(w->batcher);
    if (w->sequences)
        srv_seqset_destroy(w->sequences);
    srv_kvpool_destroy(w->pool);
    if (w->device) {
        stage_close(&w->stage);
        stage_close(&w->row_stage);
        dsk_mem_free(w->device, w->pool_addr);
        if (w->stream)
            dsk_stream_destroy(w->stream);
        dsk_device_close(w->device);
    }
    free(w->slots);
    free(w->segs);
    free(w->append_counts);
    free(w->bad_counts);
    if (worker->in)
        srv_ring_destroy(worker->in);
    if (worker->out)
        srv_ring_destroy(worker->out);
    free(worker);
}
