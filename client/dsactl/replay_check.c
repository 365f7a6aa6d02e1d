/* replay_check.c - the checker thread: makes the selected rows of a sampled reply again, quantises them as
 * the pool does, attends in float64 and compares. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/dsactl/check.h"
#include "client/dsactl/content.h"
#include "client/dsactl/replay.h"

#define MAX_WAITING 8
#define MAX_PRINTED 5

struct checker {
    const struct dsa_pool *pool;
    const struct ref64_layout *layout;
    uint32_t heads, topk;
    float softmax_scale;
    uint16_t *values; /* the thread's scratch: one row, then all packed ones */
    uint8_t *packed;
    int32_t *indices;
    pthread_t thread;
    pthread_mutex_t mutex; /* guards everything below */
    pthread_cond_t wake;
    struct check_job *head, **tail;
    unsigned n_waiting;
    bool is_ending;
    uint64_t n_checked, n_mismatches;
};

static void job_free(struct check_job *job)
{
    free(job->chains);
    free(job->positions);
    free(job->q);
    free(job->out);
    free(job->lse);
    free(job);
}

static bool check_job(struct checker *checker, const struct check_job *job, char *text, size_t size)
{
    size_t row_bytes = checker->pool->row_bytes;
    struct check_rows check = {
        .layout = checker->layout,
        .raw_scale = checker->pool->raw_scale,
        .rows = checker->packed,
        .n_tokens = job->n,
        .n_rows = 1,
        .heads = checker->heads,
        .topk = job->n,
        .q = job->q,
        .indices = checker->indices,
        .softmax_scale = checker->softmax_scale,
        .out = job->out,
        .out_dtype = DSA_DTYPE_BF16,
        .lse = job->lse,
    };
    uint64_t n_invalid = 0;

    for (uint32_t i = 0; i < job->n; i++) {
        content_row(job->chains[i], job->positions[i], job->layer, checker->values, checker->pool->d_qk);
        ref64_quantise_row(checker->layout, pool_rule(checker->pool), checker->pool->raw_scale,
                           checker->values, checker->packed + i * row_bytes);
    }
    return check_attend(&check, &n_invalid, text, size) == 1;
}

static void *checker_main(void *arg)
{
    struct checker *checker = arg;
    char text[256];

    pthread_mutex_lock(&checker->mutex);
    for (;;) {
        struct check_job *job = checker->head;
        bool agrees;

        if (!job) {
            if (checker->is_ending)
                break;
            pthread_cond_wait(&checker->wake, &checker->mutex);
            continue;
        }
        checker->head = job->next;
        if (!checker->head)
            checker->tail = &checker->head;
        pthread_mutex_unlock(&checker->mutex);
        snprintf(text, sizeof(text), "no memory");
        agrees = check_job(checker, job, text, sizeof(text));
        pthread_mutex_lock(&checker->mutex);
        checker->n_waiting--;
        checker->n_checked++;
        checker->n_mismatches += !agrees;
        if (!agrees && checker->n_mismatches <= MAX_PRINTED)
            fprintf(stderr, "dsactl: mismatch: request %llu token %llu layer %u, %u positions: %s\n",
                    (unsigned long long)job->request, (unsigned long long)job->token, job->layer, job->n,
                    text);
        job_free(job);
    }
    pthread_mutex_unlock(&checker->mutex);
    return NULL;
}

static void checker_free(struct checker *checker)
{
    free(checker->values);
    free(checker->packed);
    free(checker->indices);
    pthread_cond_destroy(&checker->wake);
    pthread_mutex_destroy(&checker->mutex);
    free(checker);
}

struct checker *checker_create(const struct dsa_pool *pool, const struct ref64_layout *layout, uint32_t heads,
                               uint32_t topk, float softmax_scale)
{
    struct checker *checker = calloc(1, sizeof(*checker));

    if (!checker)
        return NULL;
    checker->pool = pool;
    checker->layout = layout;
    checker->heads = heads;
    checker->topk = topk;
    checker->softmax_scale = softmax_scale;
    checker->tail = &checker->head;
    checker->values = malloc(pool->d_qk * sizeof(*checker->values));
    checker->packed = malloc((size_t)topk * pool->row_bytes);
    checker->indices = malloc(topk * sizeof(*checker->indices));
    pthread_mutex_init(&checker->mutex, NULL);
    pthread_cond_init(&checker->wake, NULL);
    for (uint32_t i = 0; checker->indices && i < topk; i++)
        checker->indices[i] = (int32_t)i; /* rows are packed in the order of the list */
    if (!checker->values || !checker->packed || !checker->indices
        || pthread_create(&checker->thread, NULL, checker_main, checker) != 0) {
        checker_free(checker);
        return NULL;
    }
    return checker;
}

struct check_job *checker_job(struct checker *checker)
{
    struct check_job *job;
    bool is_full;

    pthread_mutex_lock(&checker->mutex);
    is_full = checker->n_waiting >= MAX_WAITING;
    pthread_mutex_unlock(&checker->mutex);
    if (is_full)
        return NULL;
    job = calloc(1, sizeof(*job));
    if (!job)
        return NULL;
    job->chains = malloc(checker->topk * sizeof(*job->chains));
    job->positions = malloc(checker->topk * sizeof(*job->positions));
    job->q = malloc((size_t)checker->heads * checker->pool->d_qk * sizeof(*job->q));
    job->out = malloc((size_t)checker->heads * checker->pool->d_v * sizeof(*job->out));
    job->lse = malloc(checker->heads * sizeof(*job->lse));
    if (!job->chains || !job->positions || !job->q || !job->out || !job->lse) {
        job_free(job);
        return NULL;
    }
    return job;
}

void checker_give(struct checker *checker, struct check_job *job)
{
    pthread_mutex_lock(&checker->mutex);
    job->next = NULL;
    *checker->tail = job;
    checker->tail = &job->next;
    checker->n_waiting++;
    pthread_cond_signal(&checker->wake);
    pthread_mutex_unlock(&checker->mutex);
}

void checker_counts(struct checker *checker, uint64_t *n_checked_p, uint64_t *n_mismatches_p)
{
    pthread_mutex_lock(&checker->mutex);
    *n_checked_p = checker->n_checked;
    *n_mismatches_p = checker->n_mismatches;
    pthread_mutex_unlock(&checker->mutex);
}

void checker_finish(struct checker *checker, uint64_t *n_checked_p, uint64_t *n_mismatches_p)
{
    pthread_mutex_lock(&checker->mutex);
    checker->is_ending = true;
    pthread_cond_signal(&checker->wake);
    pthread_mutex_unlock(&checker->mutex);
    pthread_join(checker->thread, NULL);
    checker_counts(checker, n_checked_p, n_mismatches_p);
    checker_free(checker);
}
