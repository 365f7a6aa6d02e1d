/* worker_attend.c - one launch for several requests. Each request's rows become segments that point straight at the
 * client's memory, so nothing is gathered first. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "server/status.h"
#include "server/worker_impl.h"

/* What one item contributed to the launch. */
struct item_span {
    uint32_t seg_begin, seg_end;
    uint32_t row_begin; /* in bad_counts */
};

static void fill_segment(struct worker_state *w, struct dsk_attend_seg *seg,
                         const struct srv_job_attend *attend, uint32_t row, uint32_t n_rows,
                         uint32_t count_row)
{
    int64_t r = (int64_t)row;

    memset(seg, 0, sizeof(*seg));
    seg->q = (uint64_t)((uintptr_t)attend->q + (uintptr_t)(r * attend->q_row_bytes));
    seg->out = (uint64_t)((uintptr_t)attend->out + (uintptr_t)(r * attend->out_row_bytes));
    if (attend->lse)
        seg->lse = (uint64_t)((uintptr_t)attend->lse + (uintptr_t)(r * attend->lse_row_bytes));
    seg->indices = (uint64_t)((uintptr_t)attend->indices + (uintptr_t)(r * attend->indices_row_bytes));
    if (attend->lengths)
        seg->lengths = (uint64_t)((uintptr_t)attend->lengths + (uintptr_t)(r * (int64_t)sizeof(int32_t)));
    seg->sink = (uint64_t)(uintptr_t)attend->sink;
    seg->n_bad = (uint64_t)(uintptr_t)(w->bad_counts + count_row);
    seg->q_row_bytes = attend->q_row_bytes;
    seg->q_head_bytes = attend->q_head_bytes;
    seg->out_row_bytes = attend->out_row_bytes;
    seg->out_head_bytes = attend->out_head_bytes;
    seg->lse_row_bytes = attend->lse_row_bytes;
    seg->indices_row_bytes = attend->indices_row_bytes;
    seg->n_rows = (int32_t)n_rows;
    seg->topk = (int32_t)attend->topk;
    seg->space = (int32_t)attend->space;
    seg->softmax_scale = attend->softmax_scale;
}

/* Point a segment at its sequence. */
static dsa_status bind_sequence(struct worker_state *w, const struct srv_job *job, uint32_t i_segment,
                                struct dsk_attend_seg *seg, struct srv_err *err)
{
    const struct srv_job_attend *attend = &job->u.attend;
    uint64_t id = attend->segments[i_segment].sequence;
    struct srv_seq_view view;
    dsa_status rc;

    if (id == 0)
        return DSA_OK; /* physical space over the whole pool; L allowed it */
    rc = srv_sequence_find(w->sequences, job->session, id, &view, NULL);
    if (rc != DSA_OK) {
        char field[48];

        snprintf(field, sizeof(field), "attend.segments[%" PRIu32 "].sequence_id", i_segment);
        return srv_fail(err, rc, field, "%" PRIu64, id, "no such sequence in this session");
    }
    if (attend->space == DSK_SPACE_LOGICAL) {
        seg->table = (uint64_t)(uintptr_t)view.table;
        seg->n_table = (int32_t)view.n_table;
        seg->seq_len = (int32_t)view.layer_tokens[attend->layer];
    }
    return DSA_OK;
}

/* Before anything is changed for it: a request that will be refused leaves no rows behind. */
static dsa_status check_sequences(struct worker_state *w, const struct srv_job *job, struct srv_err *err)
{
    struct dsk_attend_seg unused = {0};
    dsa_status rc = DSA_OK;

    for (uint32_t i = 0; i < job->u.attend.n_segments && rc == DSA_OK; i++)
        rc = bind_sequence(w, job, i, &unused, err);
    return rc;
}

/* The append that belongs to a request, once, before its first rows. */
static dsa_status append_first(struct worker_state *w, struct srv_job *job, struct srv_err *err)
{
    dsa_status rc;

    if (job->u.attend.append.sequence == 0 || job->append_done)
        return DSA_OK;
    if ((rc = check_sequences(w, job, err)) != DSA_OK)
        return rc;
    job->append_done = true;
    rc = worker_run_append(w, job->session, &job->u.attend.append, false, &job->n_tokens, &job->n_nonfinite,
                           err);
    if (rc != DSA_OK)
        srv_err_prefix(err, "attend.append.");
    return rc;
}

/* Adds the segments of one item's rows. */
static dsa_status add_item(struct worker_state *w, const struct srv_batch_item *item, uint32_t *n_segs,
                           uint32_t count_row, struct srv_err *err)
{
    struct srv_job *job = worker_job(item->node);
    const struct srv_job_attend *attend = &job->u.attend;
    uint32_t row_end = item->row_begin + item->n_rows;
    dsa_status rc = append_first(w, job, err);

    for (uint32_t i = 0; i < attend->n_segments && rc == DSA_OK; i++) {
        const struct srv_job_segment *segment = &attend->segments[i];
        uint32_t begin = segment->row_begin > item->row_begin ? segment->row_begin : item->row_begin;
        uint32_t end =
            segment->row_begin + segment->n_rows < row_end ? segment->row_begin + segment->n_rows : row_end;

        if (begin >= end)
            continue;
        SRV_ASSERT(*n_segs < w->max_segs);
        fill_segment(w, &w->segs[*n_segs], attend, begin, end - begin, count_row + begin - item->row_begin);
        rc = bind_sequence(w, job, i, &w->segs[*n_segs], err);
        (*n_segs)++;
    }
    return rc;
}

static dsa_status launch(struct worker_state *w, const struct srv_job_attend *first, uint32_t n_segs,
                         struct srv_err *err)
{
    struct dsk_attend_args args = {
        .kv = worker_plane(w, first->layer),
        .segs = w->segs,
        .n_segs = (int32_t)n_segs,
        .h_q = (int32_t)first->h_q,
        .out_dtype = (int32_t)first->out_dtype,
        .flags = first->flags,
    };
    struct dsk_err cause;

    w->n_batches++;
    if (dsk_attend(w->stream, &args, &cause) != DSK_OK)
        return srv_fail_dsk(err, &cause, "attend.");
    return DSA_OK;
}

static void fill_piece(const struct worker_state *w, const struct srv_batch_item *item,
                       struct srv_piece *piece, uint32_t count_row)
{
    const struct srv_job *job = worker_job(item->node);

    for (uint32_t r = 0; r < item->n_rows; r++)
        piece->n_invalid += w->bad_counts[count_row + r];
    piece->n_tokens = job->n_tokens;
    piece->n_nonfinite = item->row_begin == 0 ? job->n_nonfinite : 0;
}

/* A launch of several requests was refused, with nothing written. L checks all that it knows, so this should not happen; when it
 * does, only the request that is at fault fails. */
static dsa_status run_one_by_one(struct worker_state *w, const struct srv_batch_item *items, uint32_t n,
                                 struct srv_piece **pieces)
{
    dsa_status rc = DSA_OK;

    for (uint32_t i = 0; i < n && rc != DSA_E_DEVICE_LOST; i++)
        if (pieces[i]->err.code == DSA_OK)
            rc = worker_run_attend(w, &items[i], 1, &pieces[i]);
    return rc == DSA_E_DEVICE_LOST ? rc : DSA_OK;
}

dsa_status worker_run_attend(struct worker_state *w, const struct srv_batch_item *items, uint32_t n,
                             struct srv_piece **pieces)
{
    struct item_span spans[WORKER_MAX_ITEMS];
    uint32_t n_segs = 0, n_rows = 0, n_live = 0;
    struct srv_err err = {0};
    dsa_status rc;

    for (uint32_t i = 0; i < n; i++) {
        spans[i] = (struct item_span){n_segs, n_segs, n_rows};
        if (pieces[i]->err.code != DSA_OK)
            continue; /* cancelled before the launch */
        if (add_item(w, &items[i], &n_segs, n_rows, &pieces[i]->err) != DSA_OK) {
            n_segs = spans[i].seg_begin;
            continue;
        }
        spans[i].seg_end = n_segs;
        n_rows += items[i].n_rows;
        n_live++;
    }
    if (n_live == 0)
        return DSA_OK;
    rc = launch(w, &worker_job(items[0].node)->u.attend, n_segs, &err);
    if (rc != DSA_OK && rc != DSA_E_DEVICE_LOST && n_live > 1)
        return run_one_by_one(w, items, n, pieces);
    for (uint32_t i = 0; i < n; i++) {
        if (pieces[i]->err.code != DSA_OK)
            continue;
        pieces[i]->batch_rows = n_rows;
        if (rc != DSA_OK)
            pieces[i]->err = err;
        else
            fill_piece(w, &items[i], pieces[i], spans[i].row_begin);
    }
    return rc;
}
