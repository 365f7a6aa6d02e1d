/* cpu_attend.c - which thread computes what in an attend launch.
 *
 * A row's list is cut into chunks of CPU_CHUNK lanes, always at the same lanes, and the chunks' results are
 * folded in list order. So a row's bits depend neither on the number of threads nor on its company, and the
 * two ways below give the same ones:
 *   by row:   many rows; a task is a row, folded as it goes
 *   by wave:  few rows; the chunks of a wave are computed by all threads, then folded; a row that does not
 *   end in the
 *             wave is carried into the next as its chunk 0 */
#include <string.h>

#include "cpu.h"

#define ROWS_PER_THREAD 4 /* from here on whole rows keep all threads busy to the end */
#define FOLDS_PER_NS    2 /* values folded: they come from another core's cache */

struct attend_job {
    const struct dsk_attend_args *args;
    const struct dsk_layout *layout;
    struct cpu_device *cpu;
    int32_t n_chunks; /* by wave: chunks in this wave */
    int32_t n_splits; /* by wave: head ranges that a chunk's work is cut into */
    int32_t first;    /* by wave: chunks before this one are computed already */
};

/* ---- cost, to decide whether helpers are worth waking ------------------------------------ */

#define ENOUGH_NS 1000000 /* helpers are worth waking: no need to add up further */

/* Nanoseconds on one thread, roughly: multiply-adds at 32 per ns, dequantisation at 4 values per ns. */
static int64_t list_cost_ns(const struct dsk_layout *layout, int32_t h_q, int64_t n_lanes)
{
    return n_lanes * ((int64_t)h_q * (layout->d_qk + layout->d_v) / 32 + layout->d_qk / 4);
}

/* Lengths are client memory: what is read here decides who computes, never what. */
static int64_t launch_cost_ns(const struct attend_job *job)
{
    int64_t cost = 0;

    for (int32_t i = 0; i < job->args->n_segs; i++) {
        const struct dsk_attend_seg *seg = &job->args->segs[i];

        for (int32_t i_row = 0; i_row < seg->n_rows && cost < ENOUGH_NS; i_row++)
            cost += list_cost_ns(job->layout, job->args->h_q, dsk_cpu_row_lanes(seg, i_row));
    }
    return cost;
}

static int64_t count_rows(const struct dsk_attend_args *args)
{
    int64_t n_rows = 0;

    for (int32_t i = 0; i < args->n_segs; i++)
        n_rows += args->segs[i].n_rows;
    return n_rows;
}

static void store_n_bad(const struct dsk_attend_seg *seg, int32_t i_row, uint32_t n_bad)
{
    if (seg->n_bad != 0)
        ((uint32_t *)dsk_cpu_ptr(seg->n_bad))[i_row] = n_bad;
}

/* ---- by row ------------------------------------------------------------------------------ */

static void attend_row(const struct attend_job *job, struct cpu_worker *w, const struct dsk_attend_seg *seg,
                       int32_t i_row)
{
    const struct dsk_attend_args *args = job->args;
    const struct cpu_isa *isa = job->cpu->isa;
    const int32_t n_lanes = dsk_cpu_row_lanes(seg, i_row);
    struct cpu_state *total = &w->total;
    struct cpu_state *part = &w->part;
    bool is_packed = false;
    uint32_t n_bad = 0;

    total->n_valid = 0;
    for (int64_t lane = 0; lane < n_lanes; lane += CPU_CHUNK) {
        int64_t end = lane + CPU_CHUNK < n_lanes ? lane + CPU_CHUNK : n_lanes;
        bool is_first = total->n_valid == 0;

        dsk_cpu_scan(args, seg, i_row, lane, end, &w->list);
        n_bad += w->list.n_bad;
        if (w->list.n_valid == 0)
            continue;
        if (!is_packed)
            dsk_cpu_pack_q(w, isa, args, seg, i_row, 0, args->h_q);
        is_packed = true;
        dsk_cpu_attend_list(w, isa, args, seg->softmax_scale, &w->list, is_first ? total : part, 0,
                            args->h_q);
        if (!is_first)
            dsk_cpu_fold(isa, total, part, job->layout->d_v, 0, args->h_q);
        total->n_valid = 1;
    }
    dsk_cpu_store_row(job->cpu->isa, args, seg, i_row, total, 0, args->h_q);
    store_n_bad(seg, i_row, n_bad);
}

static void row_task(void *user, int worker, int64_t i_task)
{
    const struct attend_job *job = user;
    const struct dsk_attend_seg *seg = job->args->segs;

    while (i_task >= seg->n_rows) {
        i_task -= seg->n_rows;
        seg++;
    }
    attend_row(job, &job->cpu->workers[worker], seg, (int32_t)i_task);
}

/* ---- by wave ----------------------------------------------------------------------------- */

/* Where the next chunk starts. */
struct cursor {
    int32_t i_seg;
    int32_t i_row;
    int32_t n_lanes; /* of the row, read when its first chunk is cut; -1 before */
    int64_t lane;
};

/* Cuts the next chunk. false: no row is left. A row without live lanes is one chunk without entries. */
static bool next_chunk(const struct dsk_attend_args *args, struct cursor *at, struct cpu_chunk *chunk)
{
    while (at->i_seg < args->n_segs && at->i_row >= args->segs[at->i_seg].n_rows) {
        at->i_seg++;
        at->i_row = 0;
    }
    if (at->i_seg >= args->n_segs)
        return false;

    const struct dsk_attend_seg *seg = &args->segs[at->i_seg];
    if (at->n_lanes < 0)
        at->n_lanes = dsk_cpu_row_lanes(seg, at->i_row);
    int64_t end = at->lane + CPU_CHUNK < at->n_lanes ? at->lane + CPU_CHUNK : at->n_lanes;
    chunk->i_seg = at->i_seg;
    chunk->i_row = at->i_row;
    chunk->is_last = end >= at->n_lanes;
    dsk_cpu_scan(args, seg, at->i_row, at->lane, end, &chunk->list);
    chunk->state.n_valid = chunk->list.n_valid;
    at->lane = end;
    if (chunk->is_last) {
        at->i_row++;
        at->lane = 0;
        at->n_lanes = -1;
    }
    return true;
}

/* Heads of split i: whole blocks of 16. */
static void split_heads(const struct attend_job *job, int64_t i_split, int *head0, int *n_heads)
{
    int n_blocks = (job->args->h_q + CPU_LANES - 1) / CPU_LANES;
    int begin = (int)(n_blocks * i_split / job->n_splits) * CPU_LANES;
    int end = (int)(n_blocks * (i_split + 1) / job->n_splits) * CPU_LANES;

    *head0 = begin;
    *n_heads = (end < job->args->h_q ? end : job->args->h_q) - begin;
}

static void chunk_task(void *user, int worker, int64_t i_task)
{
    const struct attend_job *job = user;
    struct cpu_chunk *chunk = &job->cpu->chunks[job->first + i_task / job->n_splits];
    const struct dsk_attend_seg *seg = &job->args->segs[chunk->i_seg];
    struct cpu_worker *w = &job->cpu->workers[worker];
    int head0, n_heads;

    if (chunk->list.n_valid == 0)
        return;
    split_heads(job, i_task % job->n_splits, &head0, &n_heads);
    const struct cpu_q_key key = {chunk->i_seg, chunk->i_row, head0, n_heads};
    if (memcmp(&w->q_key, &key, sizeof(key)) != 0)
        dsk_cpu_pack_q(w, job->cpu->isa, job->args, seg, chunk->i_row, head0, n_heads);
    w->q_key = key;
    dsk_cpu_attend_list(w, job->cpu->isa, job->args, seg->softmax_scale, &chunk->list, &chunk->state, head0,
                        n_heads);
}

/* Chunks of one row in the wave: [first, end). `at` is the first with a valid entry (else the last): the
 * others are folded into it. Without is_whole the row goes on in the next wave. */
struct group {
    int32_t first;
    int32_t end;
    int32_t at;
    bool is_whole;
};

/* The group that starts at `first`. */
static struct group find_group(const struct attend_job *job, int32_t first)
{
    const struct cpu_chunk *chunks = job->cpu->chunks;
    struct group g = {first, first, first, false};

    while (g.end < job->n_chunks && !g.is_whole)
        g.is_whole = chunks[g.end++].is_last;
    while (g.at + 1 < g.end && chunks[g.at].state.n_valid == 0)
        g.at++;
    return g;
}

/* A row that goes on is carried as chunk 0; usually it lies there already. */
static void carry_heads(const struct attend_job *job, int32_t at, int head0, int n_heads)
{
    const struct cpu_state *src = &job->cpu->chunks[at].state;
    struct cpu_state *dst = &job->cpu->chunks[0].state;
    const int d_v = job->layout->d_v;

    if (at == 0)
        return;
    memcpy(dst->m + head0, src->m + head0, sizeof(*dst->m) * (size_t)n_heads);
    memcpy(dst->l + head0, src->l + head0, sizeof(*dst->l) * (size_t)n_heads);
    memcpy(dst->o + head0 * d_v, src->o + head0 * d_v, sizeof(*dst->o) * (size_t)(n_heads * d_v));
}

/* Folds a block of 16 heads of every row in the wave, and stores those of the rows that end in it. */
static void finish_task(void *user, int worker, int64_t i_block)
{
    const struct attend_job *job = user;
    const struct dsk_attend_args *args = job->args;
    struct cpu_chunk *chunks = job->cpu->chunks;
    const int head0 = (int)i_block * CPU_LANES;
    const int n_heads = args->h_q - head0 < CPU_LANES ? args->h_q - head0 : CPU_LANES;
    struct group g;

    (void)worker;
    for (int32_t first = 0; first < job->n_chunks; first = g.end) {
        g = find_group(job, first);
        struct cpu_state *row = &chunks[g.at].state;

        for (int32_t i = g.at + 1; i < g.end; i++) {
            if (chunks[i].state.n_valid != 0)
                dsk_cpu_fold(job->cpu->isa, row, &chunks[i].state, job->layout->d_v, head0, n_heads);
        }
        if (g.is_whole)
            dsk_cpu_store_row(job->cpu->isa, args, &args->segs[chunks[first].i_seg], chunks[first].i_row, row,
                              head0, n_heads);
        else
            carry_heads(job, g.at, head0, n_heads);
    }
}

/* Folds and stores the wave. Returns 1 if a row goes on and now lies in chunk 0, else 0. */
static int32_t finish_wave(struct attend_job *job)
{
    struct cpu_chunk *chunks = job->cpu->chunks;
    const int64_t n_values = (int64_t)job->n_chunks * job->args->h_q * job->layout->d_v;
    struct group g;

    dsk_cpu_team_run(job->cpu->team, (job->args->h_q + CPU_LANES - 1) / CPU_LANES, n_values / FOLDS_PER_NS,
                     finish_task, job);
    for (int32_t first = 0; first < job->n_chunks; first = g.end) {
        uint32_t n_bad = 0;

        g = find_group(job, first);
        for (int32_t i = first; i < g.end; i++)
            n_bad += chunks[i].list.n_bad;
        if (g.is_whole) {
            store_n_bad(&job->args->segs[chunks[first].i_seg], chunks[first].i_row, n_bad);
            continue;
        }
        chunks[0].i_seg = chunks[first].i_seg;
        chunks[0].i_row = chunks[first].i_row;
        chunks[0].is_last = false;
        chunks[0].state.n_valid = chunks[g.at].state.n_valid;
        chunks[0].list.n_bad = n_bad;
        return 1;
    }
    return 0;
}

static void attend_by_wave(struct attend_job *job)
{
    struct cpu_device *cpu = job->cpu;
    const int n_threads = dsk_cpu_team_size(cpu->team);
    const int n_blocks = (job->args->h_q + CPU_LANES - 1) / CPU_LANES;
    struct cursor at = {0, 0, -1, 0};

    for (int i = 0; i < n_threads; i++)
        cpu->workers[i].q_key.n_heads = 0;
    job->first = 0;
    for (;;) {
        int64_t n_valid = 0;

        job->n_chunks = job->first;
        while (job->n_chunks < cpu->n_chunks && next_chunk(job->args, &at, &cpu->chunks[job->n_chunks]))
            n_valid += cpu->chunks[job->n_chunks++].list.n_valid;
        int32_t n_new = job->n_chunks - job->first;
        if (n_new == 0)
            return;
        /* Cutting heads repeats the dequantisation, so only as far as threads would idle. */
        job->n_splits = n_new >= n_threads ? 1 : (n_threads + n_new - 1) / n_new;
        job->n_splits = job->n_splits < n_blocks ? job->n_splits : n_blocks;
        dsk_cpu_team_run(cpu->team, (int64_t)n_new * job->n_splits,
                         list_cost_ns(job->layout, job->args->h_q, n_valid), chunk_task, job);
        job->first = finish_wave(job);
    }
}

/* ---- launch ------------------------------------------------------------------------------ */

dsk_status dsk_cpu_attend(struct dsk_stream *s, const struct dsk_attend_args *args, struct dsk_err *err)
{
    struct cpu_device *cpu = dsk_cpu_device(s);
    struct attend_job job = {args, dsk_layout_get(args->kv.layout), cpu, 0, 0, 0};
    const int n_threads = dsk_cpu_team_size(cpu->team);
    const int64_t n_rows = count_rows(args);

    (void)err; /* every shape that passed the checks is served, and nothing here can fail */
    if (n_threads == 1 || n_rows >= (int64_t)n_threads * ROWS_PER_THREAD)
        dsk_cpu_team_run(cpu->team, n_rows, launch_cost_ns(&job), row_task, &job);
    else
        attend_by_wave(&job);
    return DSK_OK;
}
