/* replay_run.c - drives the slots: one trace request each, one operation in flight each, so that the server
 * sees `concurrency` sequences at once and batches them as it likes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/dsactl/content.h"
#include "client/dsactl/replay.h"

#define STATS_EVERY_US 100000
#define TTY_EVERY_US   200000
#define LINE_EVERY_US  5000000
#define MIN_RETRY_US   1000
#define POLL_US        20000
#define QUERY_STREAM   UINT64_C(0x9e4)

/* ---- contents -------------------------------------------------------------------------------- */

static uint64_t chain_at(const struct replay_slot *slot, uint64_t position)
{
    return position < slot->n_prompt ? slot->chains[position / slot->replay->block_tokens]
                                     : slot->output_chain;
}

/* Lengths after scaling, and the chain of every prompt block. False: no memory. */
static bool plan_request(struct replay_slot *slot)
{
    const struct replay *replay = slot->replay;
    const struct trace_request *request = slot->request;
    uint64_t scale = replay->config.scale_tokens, chain = replay->config.seed, n_blocks;

    slot->n_prompt = (request->n_prompt + scale - 1) / scale;
    slot->n_output = (request->n_output + scale - 1) / scale;
    slot->n_full = (uint32_t)(slot->n_prompt / replay->block_tokens);
    n_blocks = (slot->n_prompt + replay->block_tokens - 1) / replay->block_tokens;
    slot->chains = malloc(n_blocks * sizeof(*slot->chains));
    if (!slot->chains)
        return false;
    for (uint64_t b = 0; b < n_blocks; b++) {
        /* A block without a recorded hash is nobody else's. */
        chain = content_chain(chain, b < request->n_blocks ? request->blocks[b] : UINT64_MAX - slot->number);
        slot->chains[b] = chain;
    }
    slot->output_chain = content_chain(chain, UINT64_MAX / 2 - slot->number);
    return true;
}

/* ---- pages ----------------------------------------------------------------------------------- */

static void sample_pages(struct replay *replay)
{
    struct dsa_stats stats;

    if (dsa_stats(replay->client, &stats, NULL) != DSA_OK || stats.n_pools == 0)
        return;
    if (stats.pools[0].n_pages_used > replay->pages_peak)
        replay->pages_peak = stats.pools[0].n_pages_used;
    if (stats.pools[0].n_pages_shared > replay->shared_peak)
        replay->shared_peak = stats.pools[0].n_pages_shared;
    if (stats.pools[0].page_refs - stats.pools[0].n_pages_used > replay->saved_peak)
        replay->saved_peak = stats.pools[0].page_refs - stats.pools[0].n_pages_used;
}

static void note_error(struct replay *replay, const struct dsa_error *err)
{
    if (replay->first_error.code == DSA_OK)
        replay->first_error = *err;
}

static void release(struct replay *replay, uint64_t sequence)
{
    struct dsa_error err;

    if (dsa_sequence_release(replay->client, sequence, &err) != DSA_OK)
        note_error(replay, &err);
    for (uint64_t i = 0; i < replay->config.concurrency; i++)
        replay->slots[i].is_blocked = false; /* there may be room now */
}

/* The pool is full, which is an ordinary answer: give up the prefix that was not used for longest. Without
 * one the slot waits for another to finish. */
static void make_room(struct replay_slot *slot)
{
    struct replay *replay = slot->replay;
    uint64_t sequence;

    replay->n_retries++;
    if (prefix_evict(replay->prefixes, &sequence)) {
        replay->n_evicted++;
        release(replay, sequence);
    } else {
        slot->is_blocked = true;
    }
}

/* ---- slots ----------------------------------------------------------------------------------- */

static void slot_clear(struct replay_slot *slot)
{
    if (slot->sequence != 0)
        release(slot->replay, slot->sequence);
    slot->sequence = 0;
    free(slot->chains);
    slot->chains = NULL;
    slot->state = SLOT_FREE;
}

static void slot_fail(struct replay_slot *slot, const struct dsa_error *err)
{
    char what[64];

    snprintf(what, sizeof(what), "request %llu", (unsigned long long)slot->number);
    if (slot->replay->n_failed++ < 5)
        print_error(what, err);
    note_error(slot->replay, err);
    slot_clear(slot);
}

/* What a failed operation means for the slot. */
static void slot_error(struct replay_slot *slot, const struct dsa_error *err)
{
    slot->last_error = *err;
    switch (err->code) {
    case DSA_E_NO_PAGES:
        make_room(slot);
        break;
    case DSA_E_QUEUE_FULL:
    case DSA_E_LIMIT:
        slot->replay->n_retries++;
        slot->retry_at_us =
            clock_us() + (err->retry_after_us > MIN_RETRY_US ? err->retry_after_us : MIN_RETRY_US);
        break;
    default:
        slot_fail(slot, err);
        break;
    }
}

static void on_done(struct dsa_request *request, const struct dsa_result *result, void *arg)
{
    struct replay_slot *slot = arg;

    slot->result = *result;
    slot->has_result = true;
    slot->is_flying = false;
    slot->handle = NULL;
    dsa_request_free(request);
}

static void slot_start(struct replay_slot *slot)
{
    struct replay *replay = slot->replay;
    struct dsa_error err;
    uint64_t source;
    uint32_t n_blocks;
    dsa_status status;

    if (prefix_find(replay->prefixes, slot->chains, slot->n_full, &source, &n_blocks)) {
        status =
            dsa_sequence_fork(replay->client, source, n_blocks * replay->block_tokens, &slot->sequence, &err);
    } else {
        n_blocks = 0;
        status = dsa_sequence_create(replay->client, NULL, &slot->sequence, &err);
    }
    if (status != DSA_OK) {
        slot->sequence = 0;
        slot_error(slot, &err);
        return;
    }
    slot->n_reused = n_blocks;
    slot->n_done = n_blocks * replay->block_tokens;
    replay->n_reused += slot->n_done;
    slot->state = SLOT_PREFILL;
}

static void send_chunk(struct replay_slot *slot)
{
    struct replay *replay = slot->replay;
    uint64_t n = slot->n_prompt - slot->n_done, d_qk = replay->pool->d_qk;
    uint32_t n_layers = (uint32_t)replay->config.layers;
    struct dsa_append append = {
        .sequence = slot->sequence, .n_layers = n_layers, .has_position = true, .position = slot->n_done};
    struct dsa_error err;

    if (n > replay->config.chunk_tokens)
        n = replay->config.chunk_tokens;
    for (uint32_t l = 0; l < n_layers; l++) {
        for (uint64_t i = 0; i < n; i++)
            content_row(chain_at(slot, slot->n_done + i), slot->n_done + i, l,
                        slot->rows + (l * n + i) * d_qk, d_qk);
    }
    append.rows = block_tensor(&replay->block, slot->rows, DSA_DTYPE_BF16, 3, n_layers, n, d_qk);
    if (dsa_append_submit(replay->client, NULL, &append, on_done, slot, &slot->handle, &err) != DSA_OK) {
        slot_error(slot, &err);
        return;
    }
    slot->n_sent = n;
    slot->is_flying = true;
}

/* Keeps the prompt's full blocks for later requests. Not being able to is no failure: there is less to reuse
 * then. */
static void retain_prefix(struct replay_slot *slot)
{
    struct replay *replay = slot->replay;
    uint64_t copy;

    if (slot->n_full == 0 || slot->n_full == slot->n_reused)
        return;
    if (dsa_sequence_fork(replay->client, slot->sequence, slot->n_full * replay->block_tokens, &copy, NULL)
        != DSA_OK)
        return;
    if (!prefix_insert(replay->prefixes, slot->chains, slot->n_full, copy))
        release(replay, copy);
}

static void send_step(struct replay_slot *slot)
{
    struct replay *replay = slot->replay;
    uint64_t position = slot->n_prompt + slot->n_generated, d_qk = replay->pool->d_qk;
    uint32_t heads = (uint32_t)replay->config.heads, topk = (uint32_t)replay->config.topk;
    struct ref64_rng rng = content_rng(slot->output_chain, position, QUERY_STREAM + slot->layer);
    struct dsa_segment segment = {slot->sequence, 1};
    struct dsa_tensor lengths = block_tensor(&replay->block, slot->n_valid, DSA_DTYPE_I32, 1, 1, 0, 0);
    struct dsa_append append = {
        .sequence = slot->sequence,
        .layer = slot->layer,
        .rows = block_tensor(&replay->block, slot->rows, DSA_DTYPE_BF16, 2, 1, d_qk, 0),
        .has_position = true,
        .position = position,
    };
    struct dsa_attend attend = {
        .layer = slot->layer,
        .n_segments = 1,
        .segments = &segment,
        .q = block_tensor(&replay->block, slot->q, DSA_DTYPE_BF16, 3, 1, heads, d_qk),
        .indices = block_tensor(&replay->block, slot->indices, DSA_DTYPE_I32, 2, 1, topk, 0),
        .space = DSA_SPACE_LOGICAL,
        .lengths = &lengths,
        .softmax_scale = replay->softmax_scale,
        .out = block_output(&replay->block, slot->out, DSA_DTYPE_BF16),
        .want_lse = true,
        .lse = block_output(&replay->block, slot->lse, DSA_DTYPE_F32),
        .append = &append,
        .phase = "decode",
    };
    struct dsa_error err;

    content_row(slot->output_chain, position, slot->layer, slot->rows, d_qk);
    content_fill(&rng, slot->q, heads * d_qk);
    *slot->n_valid = (int32_t)content_select(slot->output_chain, position + 1, topk, slot->layer,
                                             replay->marks, slot->indices);
    if (slot->layer == 0)
        slot->token_begin_us = clock_us();
    if (dsa_attend_submit(replay->client, NULL, &attend, on_done, slot, &slot->handle, &err) != DSA_OK)
        slot_error(slot, &err);
    else
        slot->is_flying = true;
}

/* Hands a copy of this reply to the checker. */
static void give_sample(struct replay_slot *slot)
{
    struct replay *replay = slot->replay;
    size_t heads = replay->config.heads;
    struct check_job *job = checker_job(replay->checker);

    if (!job)
        return; /* it is busy: the next reply will do */
    job->request = slot->number;
    job->token = slot->n_generated;
    job->layer = slot->layer;
    job->n = (uint32_t)*slot->n_valid;
    for (uint32_t i = 0; i < job->n; i++) {
        job->positions[i] = (uint64_t)slot->indices[i];
        job->chains[i] = chain_at(slot, job->positions[i]);
    }
    memcpy(job->q, slot->q, heads * replay->pool->d_qk * sizeof(*job->q));
    memcpy(job->out, slot->out, heads * replay->pool->d_v * sizeof(*job->out));
    memcpy(job->lse, slot->lse, heads * sizeof(*job->lse));
    checker_give(replay->checker, job);
    replay->is_check_due = false;
}

static void take_step(struct replay_slot *slot)
{
    struct replay *replay = slot->replay;

    replay->n_attends++;
    histogram_add(&replay->attend_us, slot->result.elapsed_us);
    histogram_add(&replay->batch_rows, slot->result.timings.batch_rows);
    if (replay->config.check_every && replay->n_attends % replay->config.check_every == 0)
        replay->is_check_due = true;
    if (replay->is_check_due)
        give_sample(slot);
    if (++slot->layer < replay->config.layers)
        return;
    slot->layer = 0;
    slot->n_generated++;
    replay->n_output++;
    histogram_add(&replay->token_us, clock_us() - slot->token_begin_us);
}

static void take_result(struct replay_slot *slot)
{
    struct replay *replay = slot->replay;

    slot->has_result = false;
    if (slot->result.error.code != DSA_OK) {
        slot_error(slot, &slot->result.error);
    } else if (slot->state == SLOT_PREFILL) {
        slot->n_done += slot->n_sent;
        replay->n_appended += slot->n_sent;
        histogram_add(&replay->append_us, slot->result.elapsed_us);
    } else {
        take_step(slot);
    }
}

/* Lets the oldest parked request run again. */
static void unpark_one(struct replay *replay)
{
    struct replay_slot *oldest = NULL;

    for (uint64_t i = 0; i < replay->config.concurrency; i++) {
        struct replay_slot *slot = &replay->slots[i];

        if (slot->is_parked && (!oldest || slot->number < oldest->number))
            oldest = slot;
    }
    if (!oldest)
        return;
    oldest->is_parked = oldest->is_blocked = false;
    replay->n_parked--;
}

/* Does what the slot can do next, until something is in flight, or it must wait, or it is done. */
static void slot_advance(struct replay_slot *slot)
{
    if (slot->has_result)
        take_result(slot);
    while (slot->state != SLOT_FREE && !slot->is_flying && !slot->is_blocked && !slot->is_parked
           && slot->retry_at_us <= clock_us()) {
        if (slot->state == SLOT_START) {
            slot_start(slot);
        } else if (slot->state == SLOT_PREFILL && slot->n_done < slot->n_prompt) {
            send_chunk(slot);
        } else if (slot->state == SLOT_PREFILL) {
            retain_prefix(slot);
            slot->state = SLOT_DECODE;
        } else if (slot->n_generated < slot->n_output) {
            send_step(slot);
        } else {
            sample_pages(slot->replay); /* before its pages go back: this is where use is highest */
            slot->replay->n_finished++;
            slot_clear(slot);
            unpark_one(slot->replay);
        }
    }
}

/* ---- the run --------------------------------------------------------------------------------- */

/* When the request of the trace may start. */
static uint64_t arrival_us(const struct replay *replay, size_t i)
{
    double ms = (double)(replay->trace.requests[i].arrival_ms - replay->trace.requests[0].arrival_ms);

    return replay->begin_us
           + (replay->config.scale_time > 0 ? (uint64_t)(ms * 1000 / replay->config.scale_time) : 0);
}

/* Longer than the whole pool or than the server takes: skipped, and said so in the summary. */
static bool is_too_long(const struct replay *replay, const struct trace_request *request)
{
    uint64_t scale = replay->config.scale_tokens;
    uint64_t n = (request->n_prompt + scale - 1) / scale + (request->n_output + scale - 1) / scale;
    uint64_t max = dsa_capabilities(replay->client)->limits.max_sequence_tokens;

    return n > (replay->pool->n_pages - 1) * replay->pool->page_tokens || (max && n > max);
}

static void start_due(struct replay *replay, uint64_t now)
{
    if (replay->n_parked > 0)
        return; /* those come first */
    for (uint64_t i = 0; i < replay->config.concurrency; i++) {
        struct replay_slot *slot = &replay->slots[i];

        while (replay->next < replay->trace.n && is_too_long(replay, &replay->trace.requests[replay->next])) {
            replay->n_too_long++;
            replay->next++;
        }
        if (replay->next == replay->trace.n || arrival_us(replay, replay->next) > now)
            return;
        if (slot->state != SLOT_FREE)
            continue;
        slot->number = replay->next;
        slot->request = &replay->trace.requests[replay->next++];
        slot->n_generated = slot->n_done = slot->retry_at_us = 0;
        slot->layer = 0;
        slot->is_blocked = slot->is_parked = slot->has_result = false;
        if (plan_request(slot)) {
            slot->state = SLOT_START;
        } else {
            replay->n_failed++;
            fprintf(stderr, "dsactl: no memory for request %llu\n", (unsigned long long)slot->number);
        }
    }
}

/* Gives up what the request has so far; it starts again when another one has finished. */
static void park(struct replay_slot *slot)
{
    uint64_t sequence = slot->sequence;

    slot->sequence = 0;
    slot->state = SLOT_START;
    slot->n_generated = slot->n_done = 0;
    slot->layer = 0;
    slot->is_parked = true;
    slot->replay->n_parked++;
    slot->replay->n_preempted++;
    if (sequence != 0)
        release(slot->replay, sequence);
}

/* When every running request waits for pages and no prefix is left to evict, the youngest is parked. One that
 * runs alone and is still short cannot be served by this pool. True: something can go on now. */
static bool break_deadlock(struct replay *replay)
{
    struct replay_slot *youngest = NULL;
    unsigned n_running = 0;

    for (uint64_t i = 0; i < replay->config.concurrency; i++) {
        struct replay_slot *slot = &replay->slots[i];

        if (slot->state == SLOT_FREE || slot->is_parked)
            continue;
        n_running++;
        if (!slot->is_blocked)
            return false;
        if (!youngest || slot->number > youngest->number)
            youngest = slot;
    }
    if (n_running > 1)
        park(youngest);
    else if (n_running == 1)
        slot_fail(youngest, &youngest->last_error);
    else
        unpark_one(replay);
    return true;
}

static unsigned count_active(const struct replay *replay)
{
    unsigned n = 0;

    for (uint64_t i = 0; i < replay->config.concurrency; i++)
        n += replay->slots[i].state != SLOT_FREE;
    return n;
}

static void show_progress(struct replay *replay, uint64_t now, bool is_tty)
{
    uint64_t n_checked = 0, n_mismatches = 0;
    double seconds = (double)(now - replay->begin_us) / 1e6;

    replay->next_progress_us = now + (is_tty ? TTY_EVERY_US : LINE_EVERY_US);
    if (replay->checker)
        checker_counts(replay->checker, &n_checked, &n_mismatches);
    fprintf(stderr,
            "%s%5.1f s  %llu of %zu requests done, %u active  %llu prompt + %llu output tokens (%.0f/s)  "
            "%llu checked, "
            "%llu mismatches%s",
            is_tty ? "\r\033[K" : "", seconds, (unsigned long long)replay->n_finished, replay->trace.n,
            count_active(replay), (unsigned long long)replay->n_appended,
            (unsigned long long)replay->n_output, seconds > 0 ? (double)replay->n_output / seconds : 0,
            (unsigned long long)n_checked, (unsigned long long)n_mismatches, is_tty ? "" : "\n");
    fflush(stderr);
}

static bool is_alive(struct replay *replay)
{
    struct dsa_session_info session;

    dsa_session_info(replay->client, &session);
    return session.is_alive;
}

int replay_run(struct replay *replay)
{
    bool is_tty = isatty(STDERR_FILENO) != 0;
    int code = EXIT_OK;

    replay->begin_us = clock_us();
    replay->next_progress_us = replay->begin_us + (is_tty ? TTY_EVERY_US : LINE_EVERY_US);
    for (;;) {
        uint64_t now = clock_us();
        bool has_moved;

        start_due(replay, now);
        for (uint64_t i = 0; i < replay->config.concurrency; i++)
            slot_advance(&replay->slots[i]);
        if (replay->next == replay->trace.n && count_active(replay) == 0)
            break;
        if (!is_alive(replay)) {
            fprintf(stderr, "%sdsactl: replay: the session is over\n", is_tty ? "\n" : "");
            code = EXIT_CONNECT;
            break;
        }
        has_moved = break_deadlock(replay);
        if (now >= replay->next_stats_us) {
            sample_pages(replay);
            replay->next_stats_us = now + STATS_EVERY_US;
        }
        if (!replay->config.is_quiet && now >= replay->next_progress_us)
            show_progress(replay, now, is_tty);
        dsa_poll(replay->client, has_moved ? 0 : POLL_US);
    }
    replay->end_us = clock_us();
    if (!replay->config.is_quiet && is_tty) {
        show_progress(replay, replay->end_us, is_tty);
        fputc('\n', stderr);
    }
    return code;
}
