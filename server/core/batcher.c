#include "server/core/batcher.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "server/core/heap.h"
#include "server/core/idmap.h"
#include "server/core/list.h"

/* How a job moves:
 *
 *   push ──► WAITING ──last access granted──► READY ──next──► OUT ──done, rows left──► READY
 *               │                               │              └──done, last or failed──► gone
 *               └────────────remove, expire─────┴──► gone
 *
 * Every sequence that waiting or running jobs touch has a line of accesses in the order pushed. Granted are
 * the one writer at its head, or the readers before the first writer; a job is ready when all its accesses
 * are granted. Ready jobs stand in the group of their key (jobs that may not share: all in one group, handed
 * out one by one); the groups stand in a heap by their best job. */

#define MAX_JOBS         (1u << 20)
#define INLINE_ACCESSES  4u
#define MAX_SPARE_LINES  4096u
#define MAX_SPARE_GROUPS 64u
#define RETRY_AFTER_US   2000u /* a few launches */

/* One sequence with its accesses; made with the first one, gone with the last. */
struct line {
    struct srv_idmap_node by_sequence;
    struct srv_list accesses;     /* struct access.in_line, in the order pushed */
    struct access *first_waiting; /* the first that is not granted; all before it are */
    uint32_t n_granted;
    bool is_writer_granted;
    struct line *next_spare;
};

struct access {
    struct srv_list in_line;
    struct line *line;
    struct job *job;
    bool is_write;
    bool is_granted;
};

struct group {
    struct srv_idmap_node by_key;
    struct srv_batch_key key;
    bool is_shared;               /* its jobs may share a launch */
    uint32_t n_jobs;              /* waiting, ready and out */
    struct srv_heap ready;        /* struct job.by_rank */
    struct srv_heap_node by_best; /* in batcher.groups while ready is not empty, with the rank of its first */
    bool is_ranked;
    struct group *next_spare;
};

enum state { STATE_WAITING, STATE_READY, STATE_OUT };

struct job {
    struct srv_batch_node *node;
    struct group *group;
    enum state state;
    bool is_last_out;  /* OUT, and no rows are left */
    bool has_deadline; /* in batcher.deadlines while not OUT */
    uint64_t arrival;
    struct srv_heap_node by_rank;
    struct srv_heap_node by_deadline;
    uint32_t n_ungranted;
    uint32_t n_accesses;
    struct access *accesses; /* inline_accesses, or allocated when there are more */
    struct access inline_accesses[INLINE_ACCESSES];
    struct job *next_spare;
};

struct srv_batcher {
    struct srv_batcher_config config;
    struct srv_idmap lines;
    struct srv_idmap keys;
    struct srv_heap groups;
    struct srv_heap deadlines;
    struct group alone; /* jobs that are not attend */
    uint64_t n_arrivals;
    uint32_t n_queued;
    uint32_t n_out; /* pieces handed out and not done */
    /* Records to use again, so that a steady load allocates nothing. */
    struct job *spare_jobs;
    struct line *spare_lines;
    struct group *spare_groups;
    uint32_t n_spare_lines;
    uint32_t n_spare_groups;
};

dsa_status srv_batcher_create(const struct srv_batcher_config *config, struct srv_batcher **batcher_p)
{
    struct srv_batcher *batcher;

    if (config->max_jobs == 0 || config->max_jobs > MAX_JOBS || config->max_rows == 0
        || config->max_items == 0 || config->chunk_rows == 0)
        return DSA_E_BAD_REQUEST;
    batcher = calloc(1, sizeof(*batcher));
    if (!batcher)
        return DSA_E_NO_MEMORY;
    batcher->config = *config;
    /* A piece must fit into a launch. */
    if (batcher->config.chunk_rows > config->max_rows)
        batcher->config.chunk_rows = config->max_rows;
    srv_idmap_init(&batcher->lines);
    srv_idmap_init(&batcher->keys);
    *batcher_p = batcher;
    return DSA_OK;
}

void srv_batcher_destroy(struct srv_batcher *batcher)
{
    if (!batcher)
        return;
    SRV_ASSERT(batcher->n_queued == 0 && batcher->n_out == 0);
    while (batcher->spare_jobs) {
        struct job *job = batcher->spare_jobs;

        batcher->spare_jobs = job->next_spare;
        free(job);
    }
    while (batcher->spare_lines) {
        struct line *line = batcher->spare_lines;

        batcher->spare_lines = line->next_spare;
        free(line);
    }
    while (batcher->spare_groups) {
        struct group *group = batcher->spare_groups;

        batcher->spare_groups = group->next_spare;
        free(group);
    }
    srv_idmap_fini(&batcher->keys);
    srv_idmap_fini(&batcher->lines);
    free(batcher);
}

/* ---- ready jobs
 * --------------------------------------------------------------------------------------------- */

static struct job *best_of(const struct group *group)
{
    return SRV_CONTAINER_OF(group->ready.root, struct job, by_rank);
}

/* After any change of group->ready. */
static void rank_group(struct srv_batcher *batcher, struct group *group)
{
    const struct srv_heap_node *best = group->ready.root;

    if (group->is_ranked && best && best->major == group->by_best.major
        && best->minor == group->by_best.minor)
        return;
    if (group->is_ranked)
        srv_heap_remove(&batcher->groups, &group->by_best);
    group->is_ranked = best != NULL;
    if (best)
        srv_heap_add(&batcher->groups, &group->by_best, best->major, best->minor);
}

/* Higher priority first, then first come. */
static void add_ready(struct srv_batcher *batcher, struct job *job)
{
    uint64_t rank = (uint64_t)((int64_t)INT32_MAX - job->node->priority);

    job->state = STATE_READY;
    srv_heap_add(&job->group->ready, &job->by_rank, rank, job->arrival);
    rank_group(batcher, job->group);
}

static void add_deadline(struct srv_batcher *batcher, struct job *job)
{
    if (job->has_deadline)
        srv_heap_add(&batcher->deadlines, &job->by_deadline, job->node->deadline_us, job->arrival);
}

static void remove_deadline(struct srv_batcher *batcher, struct job *job)
{
    if (job->has_deadline)
        srv_heap_remove(&batcher->deadlines, &job->by_deadline);
}

/* ---- lines of accesses
 * -------------------------------------------------------------------------------------- */

static struct line *get_line(struct srv_batcher *batcher, uint64_t sequence)
{
    struct srv_idmap_node *node = srv_idmap_first(&batcher->lines, sequence);
    struct line *line = batcher->spare_lines;

    if (node)
        return SRV_CONTAINER_OF(node, struct line, by_sequence);
    if (line) {
        batcher->spare_lines = line->next_spare;
        batcher->n_spare_lines--;
    } else {
        line = malloc(sizeof(*line));
        if (!line)
            return NULL;
    }
    memset(line, 0, sizeof(*line));
    srv_list_init(&line->accesses);
    srv_idmap_add(&batcher->lines, &line->by_sequence, sequence);
    return line;
}

static void drop_line(struct srv_batcher *batcher, struct line *line)
{
    srv_idmap_remove(&batcher->lines, &line->by_sequence);
    if (batcher->n_spare_lines >= MAX_SPARE_LINES) {
        free(line);
        return;
    }
    line->next_spare = batcher->spare_lines;
    batcher->spare_lines = line;
    batcher->n_spare_lines++;
}

static bool can_grant(const struct line *line, const struct access *access)
{
    return access->is_write ? line->n_granted == 0 : !line->is_writer_granted;
}

static void grant(struct line *line, struct access *access)
{
    access->is_granted = true;
    access->job->n_ungranted--;
    line->n_granted++;
    line->is_writer_granted = access->is_write;
}

static struct access *access_after(const struct line *line, struct access *access)
{
    struct srv_list *next = access->in_line.next;

    return next == &line->accesses ? NULL : SRV_CONTAINER_OF(next, struct access, in_line);
}

/* Each access is granted once, so that this costs O(1) per access over its life. */
static void grant_waiting(struct srv_batcher *batcher, struct line *line)
{
    while (line->first_waiting && can_grant(line, line->first_waiting)) {
        struct access *access = line->first_waiting;

        grant(line, access);
        line->first_waiting = access_after(line, access);
        if (access->job->n_ungranted == 0)
            add_ready(batcher, access->job);
    }
}

static void leave_line(struct srv_batcher *batcher, struct access *access)
{
    struct line *line = access->line;

    if (line->first_waiting == access)
        line->first_waiting = access_after(line, access);
    if (access->is_granted) {
        line->n_granted--;
        if (access->is_write)
            line->is_writer_granted = false;
    }
    srv_list_remove(&access->in_line);
    if (srv_list_is_empty(&line->accesses))
        drop_line(batcher, line);
    else
        grant_waiting(batcher, line);
}

/* The job's own access stands last in a line only if it named the sequence before. */
static bool is_last_in_line(const struct line *line, const struct job *job)
{
    return !srv_list_is_empty(&line->accesses)
           && SRV_CONTAINER_OF(line->accesses.prev, struct access, in_line)->job == job;
}

static dsa_status join_line(struct srv_batcher *batcher, struct job *job,
                            const struct srv_batch_access *wanted, struct srv_err *err)
{
    struct access *access = &job->accesses[job->n_accesses];
    struct line *line;

    if (wanted->sequence == 0)
        return srv_fail(err, DSA_E_BAD_REQUEST, "sequence", "%s", "0", "0 is never a sequence");
    line = get_line(batcher, wanted->sequence);
    if (!line)
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory to queue the job");
    if (is_last_in_line(line, job))
        return srv_fail(err, DSA_E_BAD_REQUEST, "sequence", "%" PRIu64, wanted->sequence,
                        "a job names each sequence once");
    *access = (struct access){.line = line, .job = job, .is_write = wanted->is_write};
    srv_list_add_tail(&line->accesses, &access->in_line);
    job->n_accesses++;
    job->n_ungranted++;
    if (!line->first_waiting && can_grant(line, access))
        grant(line, access);
    else if (!line->first_waiting)
        line->first_waiting = access;
    return DSA_OK;
}

static void leave_lines(struct srv_batcher *batcher, struct job *job)
{
    while (job->n_accesses > 0)
        leave_line(batcher, &job->accesses[--job->n_accesses]);
}

/* ---- groups and jobs
 * ---------------------------------------------------------------------------------------- */

static uint64_t hash_key(const struct srv_batch_key *key)
{
    return (key->layer | (uint64_t)key->h_q << 32) ^ (key->out_dtype << 20 | (uint64_t)key->flags << 40);
}

static struct group *get_group(struct srv_batcher *batcher, const struct srv_batch_node *node)
{
    uint64_t hash = hash_key(&node->key);
    struct group *group;

    if (!node->is_attend)
        return &batcher->alone;
    for (struct srv_idmap_node *i = srv_idmap_first(&batcher->keys, hash); i; i = srv_idmap_next(i)) {
        group = SRV_CONTAINER_OF(i, struct group, by_key);
        if (memcmp(&group->key, &node->key, sizeof(node->key)) == 0)
            return group;
    }
    group = batcher->spare_groups;
    if (group) {
        batcher->spare_groups = group->next_spare;
        batcher->n_spare_groups--;
    } else {
        group = malloc(sizeof(*group));
        if (!group)
            return NULL;
    }
    memset(group, 0, sizeof(*group));
    group->key = node->key;
    group->is_shared = true;
    srv_idmap_add(&batcher->keys, &group->by_key, hash);
    return group;
}

static void drop_group_if_empty(struct srv_batcher *batcher, struct group *group)
{
    if (group->n_jobs > 0 || !group->is_shared)
        return;
    srv_idmap_remove(&batcher->keys, &group->by_key);
    if (batcher->n_spare_groups >= MAX_SPARE_GROUPS) {
        free(group);
        return;
    }
    group->next_spare = batcher->spare_groups;
    batcher->spare_groups = group;
    batcher->n_spare_groups++;
}

static void free_job(struct srv_batcher *batcher, struct job *job)
{
    if (job->accesses != job->inline_accesses)
        free(job->accesses);
    job->next_spare = batcher->spare_jobs;
    batcher->spare_jobs = job;
}

static struct job *new_job(struct srv_batcher *batcher, struct srv_batch_node *node)
{
    struct job *job = batcher->spare_jobs;

    if (job)
        batcher->spare_jobs = job->next_spare;
    else
        job = malloc(sizeof(*job));
    if (!job)
        return NULL;
    memset(job, 0, sizeof(*job));
    job->node = node;
    job->has_deadline = node->deadline_us != UINT64_MAX;
    job->accesses = job->inline_accesses;
    if (node->n_accesses > INLINE_ACCESSES)
        job->accesses = calloc(node->n_accesses, sizeof(*job->accesses));
    if (!job->accesses) {
        free_job(batcher, job);
        return NULL;
    }
    return job;
}

/* The job, neither ready nor in the deadlines any more, leaves for good; those behind it may become ready. */
static void end_job(struct srv_batcher *batcher, struct job *job)
{
    leave_lines(batcher, job);
    job->group->n_jobs--;
    drop_group_if_empty(batcher, job->group);
    memset(job->node->priv, 0, sizeof(job->node->priv));
    free_job(batcher, job);
}

static struct job *job_of(const struct srv_batch_node *node)
{
    return node->priv[0];
}

/* ---- push
 * --------------------------------------------------------------------------------------------------- */

static dsa_status check_push(const struct srv_batcher *batcher, const struct srv_batch_node *node,
                             struct srv_err *err)
{
    if (node->is_attend && node->n_rows == 0)
        return srv_fail(err, DSA_E_BAD_REQUEST, "n_rows", "%s", "0",
                        "nothing to compute: answer it directly");
    if (batcher->n_queued >= batcher->config.max_jobs) {
        (void)srv_fail(err, DSA_E_QUEUE_FULL, "", "%" PRIu32, batcher->n_queued,
                       "as many jobs wait as may (%" PRIu32 ")", batcher->config.max_jobs);
        if (err)
            err->retry_after_us = RETRY_AFTER_US;
        return DSA_E_QUEUE_FULL;
    }
    return DSA_OK;
}

dsa_status srv_batcher_push(struct srv_batcher *batcher, struct srv_batch_node *node, struct srv_err *err)
{
    struct job *job;
    dsa_status status = check_push(batcher, node, err);

    if (status != DSA_OK)
        return status;
    job = new_job(batcher, node);
    if (!job)
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory to queue the job");
    job->group = get_group(batcher, node);
    if (!job->group) {
        free_job(batcher, job);
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory to queue the job");
    }
    job->group->n_jobs++;
    for (uint32_t i = 0; i < node->n_accesses; i++) {
        status = join_line(batcher, job, &node->accesses[i], err);
        if (status != DSA_OK) {
            end_job(batcher, job);
            return status;
        }
    }
    job->arrival = ++batcher->n_arrivals;
    node->rows_done = 0;
    node->priv[0] = job;
    batcher->n_queued++;
    add_deadline(batcher, job);
    if (job->n_ungranted == 0)
        add_ready(batcher, job);
    return DSA_OK;
}

/* ---- next and done
 * ------------------------------------------------------------------------------------------ */

static uint32_t piece_rows(const struct srv_batcher *batcher, const struct srv_batch_node *node)
{
    uint32_t n_left = node->n_rows - node->rows_done;

    if (!node->is_attend)
        return 0;
    return n_left < batcher->config.chunk_rows ? n_left : batcher->config.chunk_rows;
}

static struct srv_batch_item hand_out(struct srv_batcher *batcher, struct job *job)
{
    struct srv_batch_node *node = job->node;
    struct srv_batch_item item = {
        .node = node,
        .row_begin = node->is_attend ? node->rows_done : 0,
        .n_rows = piece_rows(batcher, node),
    };

    srv_heap_remove(&job->group->ready, &job->by_rank);
    remove_deadline(batcher, job);
    node->rows_done += item.n_rows;
    item.is_last = !node->is_attend || node->rows_done == node->n_rows;
    job->state = STATE_OUT;
    job->is_last_out = item.is_last;
    batcher->n_out++;
    if (item.is_last)
        batcher->n_queued--;
    return item;
}

uint32_t srv_batcher_next(struct srv_batcher *batcher, struct srv_batch_item *items_p)
{
    uint32_t n_items = 0, n_rows = 0;
    struct group *group;

    if (!batcher->groups.root)
        return 0;
    group = SRV_CONTAINER_OF(batcher->groups.root, struct group, by_best);
    do {
        items_p[n_items] = hand_out(batcher, best_of(group));
        n_rows += items_p[n_items++].n_rows;
        /* Stops at the first that does not fit rather than look for smaller ones behind it: it is O(1), and
         * that one will be first next time. */
    } while (group->is_shared && group->ready.root && n_items < batcher->config.max_items
             && piece_rows(batcher, best_of(group)->node) <= batcher->config.max_rows - n_rows);
    rank_group(batcher, group);
    return n_items;
}

void srv_batcher_done(struct srv_batcher *batcher, const struct srv_batch_item *item, bool is_failed)
{
    struct job *job = job_of(item->node);

    SRV_ASSERT(job && job->state == STATE_OUT);
    batcher->n_out--;
    if (job->is_last_out) {
        end_job(batcher, job);
    } else if (is_failed) {
        batcher->n_queued--;
        end_job(batcher, job);
    } else {
        job->arrival = ++batcher->n_arrivals; /* behind its equals */
        add_deadline(batcher, job);
        add_ready(batcher, job);
    }
}

/* ---- leaving early
 * ------------------------------------------------------------------------------------------ */

static void take_out(struct srv_batcher *batcher, struct job *job)
{
    if (job->state == STATE_READY) {
        srv_heap_remove(&job->group->ready, &job->by_rank);
        rank_group(batcher, job->group);
    }
    remove_deadline(batcher, job);
    batcher->n_queued--;
    end_job(batcher, job);
}

bool srv_batcher_remove(struct srv_batcher *batcher, struct srv_batch_node *node)
{
    struct job *job = job_of(node);

    if (!job || job->state == STATE_OUT)
        return false;
    take_out(batcher, job);
    return true;
}

struct srv_batch_node *srv_batcher_next_expired(struct srv_batcher *batcher, uint64_t now_us)
{
    struct srv_heap_node *first = batcher->deadlines.root;
    struct srv_batch_node *node;
    struct job *job;

    if (!first || first->major > now_us)
        return NULL;
    job = SRV_CONTAINER_OF(first, struct job, by_deadline);
    node = job->node;
    take_out(batcher, job);
    return node;
}

uint64_t srv_batcher_next_deadline(const struct srv_batcher *batcher)
{
    return batcher->deadlines.root ? batcher->deadlines.root->major : UINT64_MAX;
}

uint32_t srv_batcher_count(const struct srv_batcher *batcher)
{
    return batcher->n_queued;
}
