/* batcher: a long random life against a model.
 *
 * The model is the header's text and nothing else: an array of jobs, looked through from end to end. It
 * predicts each launch exactly: which jobs, in which order, which rows. */
#include "server/core/batcher.h"

#include <string.h>

#include "kit.h"
#include "test_main.h"

enum { MAX_JOBS = 24, N_NODES = 48, N_SEQS = 6, MAX_ITEMS = 5, MAX_ROWS = 40, CHUNK = 12, STEPS = 40000 };

enum model_state { IDLE, WAITS, IS_OUT };

struct model_job {
    struct srv_batch_node node; /* first: nodes are found again by their address */
    struct srv_batch_access accesses[N_SEQS];
    enum model_state state;
    bool is_last_out;
    uint64_t n_pushed; /* order on the sequences */
    uint64_t arrival;  /* order among equals; new after each piece */
    uint32_t rows_done;
    struct srv_batch_item item;
};

struct model {
    struct kit_rng rng;
    struct srv_batcher *batcher;
    struct model_job jobs[N_NODES];
    uint64_t n_arrivals;
    uint64_t now_us;
    uint64_t n_shared_launches, n_pieces, n_refused, n_expired, n_removed;
};

static bool conflicts(const struct model_job *a, const struct model_job *b)
{
    for (uint32_t i = 0; i < a->node.n_accesses; i++)
        for (uint32_t k = 0; k < b->node.n_accesses; k++)
            if (a->accesses[i].sequence == b->accesses[k].sequence
                && (a->accesses[i].is_write || b->accesses[k].is_write))
                return true;
    return false;
}

static bool is_ready(const struct model *model, const struct model_job *job)
{
    if (job->state != WAITS)
        return false;
    for (int i = 0; i < N_NODES; i++) {
        const struct model_job *other = &model->jobs[i];

        if (other->state != IDLE && other->n_pushed < job->n_pushed && conflicts(other, job))
            return false;
    }
    return true;
}

static bool is_first(const struct model_job *a, const struct model_job *b)
{
    return a->node.priority != b->node.priority ? a->node.priority > b->node.priority
                                                : a->arrival < b->arrival;
}

static bool has_equal_key(const struct model_job *a, const struct model_job *b)
{
    return a->node.is_attend && b->node.is_attend
           && memcmp(&a->node.key, &b->node.key, sizeof(a->node.key)) == 0;
}

/* The best ready job that is not taken yet; with `like`, only of its key. */
static struct model_job *best_ready(struct model *model, const struct model_job *like, const bool *taken)
{
    struct model_job *best = NULL;

    for (int i = 0; i < N_NODES; i++) {
        struct model_job *job = &model->jobs[i];

        if (taken[i] || !is_ready(model, job) || (like && !has_equal_key(like, job)))
            continue;
        if (!best || is_first(job, best))
            best = job;
    }
    return best;
}

static uint32_t piece_of(const struct model_job *job)
{
    uint32_t n_left = job->node.n_rows - job->rows_done;

    return !job->node.is_attend ? 0 : n_left < CHUNK ? n_left : CHUNK;
}

static uint32_t predict(struct model *model, struct model_job **launch_p)
{
    bool taken[N_NODES] = {false};
    uint32_t n = 0, n_rows = 0;
    struct model_job *job = best_ready(model, NULL, taken);

    while (job && n < MAX_ITEMS && n_rows + piece_of(job) <= MAX_ROWS) {
        taken[job - model->jobs] = true;
        launch_p[n++] = job;
        n_rows += piece_of(job);
        job = job->node.is_attend ? best_ready(model, launch_p[0], taken) : NULL;
    }
    return n;
}

static uint32_t n_queued(const struct model *model)
{
    uint32_t n = 0;

    for (int i = 0; i < N_NODES; i++)
        n += model->jobs[i].state == WAITS || (model->jobs[i].state == IS_OUT && !model->jobs[i].is_last_out);
    return n;
}

static struct model_job *pick(struct model *model, enum model_state state)
{
    uint32_t first = kit_below(&model->rng, N_NODES);

    for (uint32_t i = 0; i < N_NODES; i++)
        if (model->jobs[(first + i) % N_NODES].state == state)
            return &model->jobs[(first + i) % N_NODES];
    return NULL;
}

static void fill_job(struct model *model, struct model_job *job)
{
    struct kit_rng *rng = &model->rng;

    memset(job, 0, sizeof(*job));
    job->node.is_attend = kit_chance(rng, 700);
    job->node.key.layer = kit_below(rng, 2);
    job->node.key.flags = kit_below(rng, 2);
    job->node.n_rows = 1 + kit_below(rng, kit_chance(rng, 800) ? 8 : 60);
    job->node.priority = (int32_t)kit_below(rng, 3) - 1;
    job->node.deadline_us = kit_chance(rng, 500) ? UINT64_MAX : model->now_us + kit_below(rng, 300);
    job->node.accesses = job->accesses;
    for (uint64_t s = 1; s <= N_SEQS; s++)
        if (kit_chance(rng, 200))
            job->accesses[job->node.n_accesses++] = (struct srv_batch_access){s * 1000, kit_chance(rng, 300)};
}

static void step_push(struct model *model)
{
    struct model_job *job = pick(model, IDLE);
    bool is_full = n_queued(model) == MAX_JOBS;
    dsa_status status;

    if (!job)
        return;
    fill_job(model, job);
    status = srv_batcher_push(model->batcher, &job->node, NULL);
    ck_assert_int_eq(status, is_full ? DSA_E_QUEUE_FULL : DSA_OK);
    if (is_full) {
        model->n_refused++;
        return;
    }
    job->state = WAITS;
    job->arrival = job->n_pushed = ++model->n_arrivals;
}

static void step_next(struct model *model, int step)
{
    struct model_job *launch[MAX_ITEMS];
    struct srv_batch_item items[MAX_ITEMS];
    uint32_t n = predict(model, launch);

    if (srv_batcher_next(model->batcher, items) != n)
        ck_abort_msg("step %d: the launch has not %u jobs", step, n);
    for (uint32_t i = 0; i < n; i++) {
        struct model_job *job = launch[i];
        uint32_t n_rows = piece_of(job);

        if (items[i].node != &job->node || items[i].row_begin != job->rows_done || items[i].n_rows != n_rows)
            ck_abort_msg("step %d: item %u of the launch is not the model's", step, i);
        job->rows_done += n_rows;
        job->state = IS_OUT;
        job->is_last_out = !job->node.is_attend || job->rows_done == job->node.n_rows;
        ck_assert(items[i].is_last == job->is_last_out);
        job->item = items[i];
        model->n_pieces += !job->is_last_out;
    }
    model->n_shared_launches += n > 1;
}

static void step_done(struct model *model)
{
    struct model_job *job = pick(model, IS_OUT);
    bool is_failed = kit_chance(&model->rng, 100);

    if (!job)
        return;
    srv_batcher_done(model->batcher, &job->item, is_failed);
    job->state = job->is_last_out || is_failed ? IDLE : WAITS;
    if (job->state == WAITS)
        job->arrival = ++model->n_arrivals;
}

static void step_remove(struct model *model)
{
    struct model_job *job = &model->jobs[kit_below(&model->rng, N_NODES)];

    ck_assert(srv_batcher_remove(model->batcher, &job->node) == (job->state == WAITS));
    model->n_removed += job->state == WAITS;
    if (job->state == WAITS)
        job->state = IDLE;
}

static uint64_t first_deadline(const struct model *model)
{
    uint64_t first = UINT64_MAX;

    for (int i = 0; i < N_NODES; i++)
        if (model->jobs[i].state == WAITS && model->jobs[i].node.deadline_us < first)
            first = model->jobs[i].node.deadline_us;
    return first;
}

static void step_expire(struct model *model)
{
    struct srv_batch_node *node;

    model->now_us += kit_below(&model->rng, 60);
    while ((node = srv_batcher_next_expired(model->batcher, model->now_us)) != NULL) {
        struct model_job *job = (struct model_job *)node;

        ck_assert_int_eq(job->state, WAITS);
        ck_assert_uint_eq(node->deadline_us, first_deadline(model));
        job->state = IDLE;
        model->n_expired++;
    }
    ck_assert_uint_gt(first_deadline(model), model->now_us);
}

static void drain(struct model *model)
{
    for (int round = 0; n_queued(model) > 0 || pick(model, IS_OUT); round++) {
        ck_assert_msg(round < 10000, "a job is never handed out");
        step_next(model, STEPS + round);
        step_done(model);
    }
    srv_batcher_destroy(model->batcher);
}

START_TEST(random_life_matches_the_model)
{
    static struct model model;
    struct srv_batcher_config config = {
        .max_jobs = MAX_JOBS, .max_rows = MAX_ROWS, .max_items = MAX_ITEMS, .chunk_rows = CHUNK};

    memset(&model, 0, sizeof(model));
    model.rng.state = test_seed() + (unsigned)_i;
    ck_assert_int_eq(srv_batcher_create(&config, &model.batcher), DSA_OK);
    for (int step = 0; step < STEPS; step++) {
        uint32_t dice = kit_below(&model.rng, 1000);

        if (dice < 420)
            step_push(&model);
        else if (dice < 650)
            step_next(&model, step);
        else if (dice < 950)
            step_done(&model);
        else if (dice < 980)
            step_remove(&model);
        else
            step_expire(&model);
        if (srv_batcher_count(model.batcher) != n_queued(&model)
            || srv_batcher_next_deadline(model.batcher) != first_deadline(&model))
            ck_abort_msg("step %d: count or deadline is not the model's", step);
    }
    drain(&model);
    /* The run met what it is for. */
    ck_assert_uint_gt(model.n_shared_launches, 500);
    ck_assert_uint_gt(model.n_pieces, 500);
    ck_assert_uint_gt(model.n_refused, 500);
    ck_assert_uint_gt(model.n_expired, 200);
    ck_assert_uint_gt(model.n_removed, 200);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("batcher_life");
    TCase *tc = tcase_create("life");

    (void)max;
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, random_life_matches_the_model, 0, 3);
    suite_add_tcase(suite, tc);
    suites_p[0] = suite;
    return 1;
}
