#include "worker_kit.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* ---- the worker ----------------------------------------------------------------------------------- */

struct srv_worker_config wk_config(void)
{
    struct srv_worker_config config = {
        .device = {.kind = DSK_DEVICE_CPU, .n_threads = 1},
        .layout = DSK_LAYOUT_SCALED_512_64,
        .raw_scale = 1.0f,
        .n_layers = 2,
        .n_pages = 64,
        .max_sequences = 128,
        .max_sequences_per_session = 64,
        .max_sequence_tokens = 4096,
        .max_queue = 64,
        .max_pieces = 1024,
        .max_segments = 8,
        .max_topk = 4096,
        .is_staged = getenv("DSA_TEST_STAGED") != NULL, /* the way tensors go to a GPU, on the CPU */
        .max_append_tokens = 4096,
        .batch_rows = 256,
        .chunk_rows = 64,
    };

    return config;
}

static void on_wake(void *arg)
{
    struct wk *wk = arg;

    wk->last_waker = pthread_self();
    atomic_fetch_add(&wk->n_wakes, 1);
    sem_post(&wk->woken);
    if (atomic_load(&wk->is_gated))
        while (sem_wait(&wk->gate) != 0)
            ;
}

void wk_start(struct wk *wk, const struct srv_worker_config *config)
{
    struct srv_err err = {0};

    memset(wk, 0, sizeof(*wk));
    wk->config = *config;
    wk->config.wake = on_wake;
    wk->config.wake_arg = wk;
    wk->layout = dsk_layout_get(config->layout);
    ck_assert_int_eq(sem_init(&wk->woken, 0, 0), 0);
    ck_assert_int_eq(sem_init(&wk->gate, 0, 0), 0);
    KIT_OK(srv_worker_start(&wk->config, &wk->worker, &err), &err);
}

void wk_end(struct wk *wk)
{
    srv_worker_stop(wk->worker);
    ck_assert_ptr_null(srv_worker_pop(wk->worker));
    srv_worker_free(wk->worker);
    sem_destroy(&wk->woken);
    sem_destroy(&wk->gate);
}

/* True while W is in sem_wait. A worker says first that it is parked and looks for jobs once more before
 * it waits: one that is preempted between the two lends its place and still takes a job that came without
 * a kick. */
static atomic_bool is_waiting;

int __real_sem_wait(sem_t *sem);
int __wrap_sem_wait(sem_t *sem);

int __wrap_sem_wait(sem_t *sem)
{
    int rc;

    atomic_store(&is_waiting, true);
    rc = __real_sem_wait(sem);
    atomic_store(&is_waiting, false);
    return rc;
}

void wk_park(struct wk *wk)
{
    /* Only a parked worker lends its place, and with nothing submitted that does nothing else. In this
     * order: one that was kicked and has not come out of sem_wait yet does not lend it. */
    while (!srv_worker_try_step(wk->worker) || !atomic_load(&is_waiting))
        sched_yield();
}

/* ---- jobs ------------------------------------------------------------------------------------------- */

void wk_job(struct wk_job *j, enum srv_op op)
{
    memset(j, 0, sizeof(*j));
    j->job.op = op;
    j->job.session = WK_SESSION;
    j->job.node.deadline_us = UINT64_MAX;
    j->job.accesses = j->accesses;
    j->job.node.accesses = j->accesses;
    j->job.pieces = j->pieces;
    j->job.n_pieces = 1;
    atomic_init(&j->job.cancelled, false);
}

void wk_access(struct wk_job *j, uint64_t sequence, bool is_write)
{
    ck_assert_uint_lt(j->job.node.n_accesses, 8);
    j->accesses[j->job.node.n_accesses++] = (struct srv_batch_access){sequence, is_write};
}

void wk_submit(struct wk *wk, struct wk_job *j)
{
    KIT_EXPECT(srv_worker_submit(wk->worker, &j->job), "the ring is full");
}

static unsigned n_done;

static void note_piece(struct srv_piece *piece)
{
    struct wk_job *j = (struct wk_job *)piece->job; /* the job is the first member */

    KIT_EXPECT(!j->is_done, "a piece came after the last one");
    KIT_EXPECT(piece == &j->pieces[j->n_got], "pieces came out of order");
    j->n_got++;
    j->err = piece->err;
    if (piece->err.code == DSA_OK)
        j->rows_got += piece->n_rows;
    KIT_EXPECT(piece->err.code == DSA_OK || piece->is_last, "a failed piece is not the last");
    if (piece->is_last) {
        j->is_done = true;
        j->order = n_done++;
    }
}

void wk_poll(struct wk *wk)
{
    struct srv_piece *piece;

    while ((piece = srv_worker_pop(wk->worker)) != NULL)
        note_piece(piece);
}

struct srv_piece *wk_next(struct wk *wk)
{
    struct srv_piece *piece;

    while ((piece = srv_worker_pop(wk->worker)) == NULL) {
        srv_worker_set_sleeping(wk->worker, true);
        if ((piece = srv_worker_pop(wk->worker)) == NULL)
            KIT_EXPECT(kit_wait(&wk->woken), "the worker does not answer");
        srv_worker_set_sleeping(wk->worker, false);
        if (piece)
            break;
    }
    note_piece(piece);
    return piece;
}

void wk_finish(struct wk *wk, struct wk_job *j)
{
    while (!j->is_done)
        wk_next(wk);
}

dsa_status wk_run(struct wk *wk, struct wk_job *j)
{
    wk_submit(wk, j);
    srv_worker_kick(wk->worker);
    wk_finish(wk, j);
    return j->err.code;
}

/* ---- the common ones ----------------------------------------------------------------------------------- */

#define RUN_OK(wk, j) KIT_OK(wk_run(wk, j), &(j)->err)

uint64_t wk_create(struct wk *wk)
{
    struct wk_job j;

    wk_job(&j, SRV_OP_CREATE);
    RUN_OK(wk, &j);
    ck_assert_uint_ne(j.job.u.sequence.id, 0);
    return j.job.u.sequence.id;
}

uint64_t wk_fork(struct wk *wk, uint64_t id, uint64_t n_tokens)
{
    struct wk_job j;

    wk_job(&j, SRV_OP_FORK);
    wk_access(&j, id, true);
    j.job.u.sequence.id = id;
    j.job.u.sequence.n_tokens = n_tokens;
    RUN_OK(wk, &j);
    ck_assert_uint_ne(j.job.u.sequence.id, id);
    return j.job.u.sequence.id;
}

void wk_release(struct wk *wk, uint64_t id)
{
    struct wk_job j;

    wk_job(&j, SRV_OP_RELEASE);
    wk_access(&j, id, true);
    j.job.u.sequence.id = id;
    RUN_OK(wk, &j);
}

void wk_end_session(struct wk *wk, uint64_t session)
{
    struct wk_job j;

    wk_job(&j, SRV_OP_END_SESSION);
    j.job.session = session;
    RUN_OK(wk, &j);
}

uint64_t wk_n_tokens(struct wk *wk, uint64_t id)
{
    struct wk_job j;

    wk_job(&j, SRV_OP_GET);
    wk_access(&j, id, false);
    j.job.u.sequence.id = id;
    RUN_OK(wk, &j);
    return j.job.u.sequence.n_tokens;
}

struct srv_job_stats wk_stats(struct wk *wk)
{
    struct wk_job j;

    wk_job(&j, SRV_OP_STATS);
    RUN_OK(wk, &j);
    return j.job.u.stats;
}

void wk_append_job(struct wk *wk, struct wk_job *j, uint64_t id, uint32_t layer, uint32_t n_layers,
                   const uint16_t *rows, uint32_t n)
{
    int64_t row_bytes = (int64_t)wk->layout->d_qk * 2;

    wk_job(j, SRV_OP_APPEND);
    wk_access(j, id, true);
    j->job.u.append = (struct srv_job_append){
        .sequence = id,
        .layer = layer,
        .n_layers = n_layers,
        .n_tokens = n,
        .rule = DSK_RULE_POW2,
        .position = UINT64_MAX,
        .rows = rows,
        .row_bytes = row_bytes,
        .layer_bytes = row_bytes * n,
    };
}

void wk_append(struct wk *wk, uint64_t id, const uint16_t *rows, uint32_t n)
{
    struct wk_job j;

    wk_append_job(wk, &j, id, 0, wk->config.n_layers, rows, n);
    j.job.u.append.layer_bytes = 0; /* every layer reads the same rows */
    RUN_OK(wk, &j);
}

uint32_t wk_export(struct wk *wk, uint64_t id, uint32_t layer, uint8_t *rows, uint32_t max)
{
    struct wk_job j;

    wk_job(&j, SRV_OP_EXPORT);
    wk_access(&j, id, false);
    j.job.u.export = (struct srv_job_export){.sequence = id, .layer = layer, .n_tokens = max, .out = rows};
    RUN_OK(wk, &j);
    return j.job.u.export.n_tokens;
}

/* ---- queries --------------------------------------------------------------------------------- */

static unsigned seed;

unsigned wk_random(unsigned below)
{
    if (seed == 0)
        seed = test_seed();
    return (unsigned)rand_r(&seed) % below;
}

static uint16_t *random_bf16(size_t n)
{
    uint16_t *values = malloc(n * sizeof(*values));

    ck_assert_ptr_nonnull(values);
    for (size_t i = 0; i < n; i++)
        values[i] = dsk_bf16_from_f32((float)((int)wk_random(2001) - 1000) / 500.0f);
    return values;
}

uint16_t *wk_rows(struct wk *wk, uint32_t n)
{
    return random_bf16((size_t)n * (size_t)wk->layout->d_qk);
}

void wk_query_make(struct wk *wk, struct wk_query *query, uint32_t n_rows, uint32_t h_q, uint32_t topk,
                   uint32_t n_tokens)
{
    size_t n_out = (size_t)n_rows * h_q * (size_t)wk->layout->d_v;

    query->n_rows = n_rows;
    query->h_q = h_q;
    query->topk = topk;
    query->q = random_bf16((size_t)n_rows * h_q * (size_t)wk->layout->d_qk);
    query->indices = malloc((size_t)n_rows * topk * sizeof(int32_t));
    query->out = malloc(n_out * sizeof(float));
    query->lse = malloc((size_t)n_rows * h_q * sizeof(float));
    ck_assert(query->indices && query->out && query->lse);
    for (uint32_t i = 0; i < n_rows * topk; i++)
        query->indices[i] = wk_random(10) == 0 ? -1 : (int32_t)wk_random(n_tokens);
    memset(query->out, 0xee, n_out * sizeof(float));
    memset(query->lse, 0xee, (size_t)n_rows * h_q * sizeof(float));
}

void wk_query_free(struct wk_query *query)
{
    free(query->q);
    free(query->indices);
    free(query->out);
    free(query->lse);
}

void wk_attend_job(struct wk_job *j, struct wk *wk, uint64_t id, uint32_t layer, struct wk_query *query)
{
    int64_t d_qk = wk->layout->d_qk, d_v = wk->layout->d_v;
    struct srv_job_attend *attend = &j->job.u.attend;

    wk_job(j, SRV_OP_ATTEND);
    if (id != 0)
        wk_access(j, id, false);
    j->segments[0] = (struct srv_job_segment){id, query->n_rows, 0};
    *attend = (struct srv_job_attend){
        .layer = layer,
        .h_q = query->h_q,
        .topk = query->topk,
        .space = id != 0 ? DSK_SPACE_LOGICAL : DSK_SPACE_PHYSICAL,
        .out_dtype = DSK_DTYPE_F32,
        .flags = DSK_ATTEND_BATCH_INVARIANT,
        .softmax_scale = 0.05f,
        .n_rows = query->n_rows,
        .n_segments = 1,
        .segments = j->segments,
        .q = query->q,
        .indices = query->indices,
        .out = query->out,
        .lse = query->lse,
        .q_row_bytes = query->h_q * d_qk * 2,
        .q_head_bytes = d_qk * 2,
        .indices_row_bytes = (int64_t)query->topk * 4,
        .out_row_bytes = query->h_q * d_v * 4,
        .out_head_bytes = d_v * 4,
        .lse_row_bytes = (int64_t)query->h_q * 4,
    };
    j->job.node.is_attend = true;
    j->job.node.n_rows = query->n_rows;
    j->job.node.key = (struct srv_batch_key){layer, query->h_q, DSK_DTYPE_F32, DSK_ATTEND_BATCH_INVARIANT};
    j->job.n_pieces = (query->n_rows + wk->config.chunk_rows - 1) / wk->config.chunk_rows;
    KIT_EXPECT(j->job.n_pieces <= sizeof(j->pieces) / sizeof(j->pieces[0]),
               "too many pieces for a test's job");
}
