/* worker_attend.c - one launch for several requests. Each request's rows become segments that point straight at the
 * client's memory, so nothing is gathered first. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "server/clock.h"
#include "server/status.h"
#include "server/worker_impl.h"

/* What one item contributed to the launch. */
struct item_span {
    uint32_t seg_begin, seg_end;
    uint32_t row_begin; /* in bad_counts */
};

/* Rows [row, row + n_rows) of a tensor of the request. */
static struct stage_block rows_of(const void *base, uint32_t row, uint32_t n_rows, int64_t row_bytes,
                                  uint32_t n_inner, int64_t inner_bytes, uint64_t n_bytes)
{
    struct stage_block block = {NULL, n_rows, n_inner, n_bytes, row_bytes, inner_bytes};

    if (base)
        block.host = (const uint8_t *)base + (int64_t)row * row_bytes;
    return block;
}

static bool stage_inputs(struct worker_state *w, const struct srv_job_attend *attend, uint32_t row,
                         uint32_t n_rows, struct dsk_attend_seg *seg)
{
    struct stage_block q = rows_of(attend->q, row, n_rows, attend->q_row_bytes, attend->h_q,
                                   attend->q_head_bytes, (uint64_t)w->layout->d_qk * 2);
    struct stage_block indices = rows_of(attend->indices, row, n_rows, attend->indices_row_bytes, 1,
                                         attend->indices_row_bytes, attend->topk * sizeof(int32_t));
    struct stage_block lengths =
        rows_of(attend->lengths, row, n_rows, sizeof(int32_t), 1, sizeof(int32_t), sizeof(int32_t));
    struct stage_block sink = rows_of(attend->sink, 0, 1, 0, 1, 0, attend->h_q * sizeof(float));
    struct stage_view q_view, index_view, length_view, sink_view;

    if (!stage_in(&w->stage, &q, &q_view) || !stage_in(&w->stage, &indices, &index_view)
        || !stage_in(&w->stage, &lengths, &length_view) || !stage_in(&w->stage, &sink, &sink_view))
        return false;
    seg->q = q_view.addr;
    seg->q_row_bytes = q_view.outer_bytes;
    seg->q_head_bytes = q_view.inner_bytes;
    seg->indices = index_view.addr;
    seg->indices_row_bytes = index_view.outer_bytes;
    seg->lengths = length_view.addr;
    seg->sink = sink_view.addr;
    return true;
}

static bool stage_outputs(struct worker_state *w, const struct srv_job_attend *attend, uint32_t row,
                          uint32_t n_rows, uint32_t count_row, struct dsk_attend_seg *seg)
{
    uint64_t value_bytes = attend->out_dtype == DSK_DTYPE_F32 ? 4 : 2;
    struct stage_block out = rows_of(attend->out, row, n_rows, attend->out_row_bytes, attend->h_q,
                                     attend->out_head_bytes, (uint64_t)w->layout->d_v * value_bytes);
    struct stage_block lse = rows_of(attend->lse, row, n_rows, attend->lse_row_bytes, 1,
                                     attend->lse_row_bytes, attend->h_q * sizeof(float));
    struct stage_block bad =
        rows_of(w->bad_counts, count_row, n_rows, sizeof(uint32_t), 1, sizeof(uint32_t), sizeof(uint32_t));
    struct stage_view out_view, lse_view, bad_view;

    if (!stage_out(&w->stage, &out, &out_view) || !stage_out(&w->stage, &lse, &lse_view)
        || !stage_out(&w->stage, &bad, &bad_view))
        return false;
    seg->out = out_view.addr;
    seg->out_row_bytes = out_view.outer_bytes;
    seg->out_head_bytes = out_view.inner_bytes;
    seg->lse = lse_view.addr;
    seg->lse_row_bytes = lse_view.outer_bytes;
    seg->n_bad = bad_view.addr;
    return true;
}

static dsa_status fail_no_room(struct srv_err *err)
{
    return srv_fail(err, DSA_E_NO_MEMORY, "attend", "%s", "",
                    "the launch needs more staging memory than there is");
}

static dsa_status fill_segment(struct worker_state *w, struct dsk_attend_seg *seg,
                               const struct srv_job_attend *attend, uint32_t row, uint32_t n_rows,
                               uint32_t count_row, struct srv_err *err)
{
    memset(seg, 0, sizeof(*seg));
    seg->n_rows = (int32_t)n_rows;
    seg->topk = (int32_t)attend->topk;
    seg->space = (int32_t)attend->space;
    seg->softmax_scale = attend->softmax_scale;
    if (!stage_inputs(w, attend, row, n_rows, seg) || !stage_outputs(w, attend, row, n_rows, count_row, seg))
        return fail_no_room(err);
    return DSA_OK;
}

/* Point a segment at its sequence; without a segment, only see that the sequence is there. */
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
    if (attend->space == DSK_SPACE_LOGICAL && seg) {
        struct stage_block table = rows_of(view.table, 0, 1, 0, 1, 0, view.n_table * sizeof(int32_t));
        struct stage_view table_view;

        if (!stage_in(&w->stage, &table, &table_view))
            return fail_no_room(err);
        seg->table = table_view.addr;
        seg->n_table = (int32_t)view.n_table;
        seg->seq_len = (int32_t)view.layer_tokens[attend->layer];
    }
    return DSA_OK;
}

/* Before anything is changed for it: a request that will be refused leaves no rows behind. */
static dsa_status check_sequences(struct worker_state *w, const struct srv_job *job, struct srv_err *err)
{
    dsa_status rc = DSA_OK;

    for (uint32_t i = 0; i < job->u.attend.n_segments && rc == DSA_OK; i++)
        rc = bind_sequence(w, job, i, NULL, err);
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
        rc = fill_segment(w, &w->segs[*n_segs], attend, begin, end - begin,
                          count_row + begin - item->row_begin, err);
        if (rc == DSA_OK)
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
    dsa_status rc = stage_push(&w->stage, err);

    if (rc != DSA_OK)
        return rc;
    w->n_batches++;
    w->launched_us = w->landed_us = srv_now_us();
    if (dsk_attend(w->stream, &args, &cause) != DSK_OK)
        return srv_fail_dsk(err, &cause, "attend.");
    if ((rc = stage_sync(&w->stage, err)) != DSA_OK)
        return rc;
    w->landed_us = srv_now_us();
    stage_return(&w->stage);
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

    stage_reset(&w->stage);
    for (uint32_t i = 0; i < n; i++) {
        struct worker_stage before = w->stage;

        spans[i] = (struct item_span){n_segs, n_segs, n_rows};
        if (pieces[i]->err.code != DSA_OK)
            continue; /* cancelled before the launch */
        if (add_item(w, &items[i], &n_segs, n_rows, &pieces[i]->err) != DSA_OK) {
            n_segs = spans[i].seg_begin;
            w->stage = before; /* its tensors are not part of the launch */
            continue;
        }
        spans[i].seg_end = n_segs;
        n_rows += items[i].n_rows;
        n_live++;
    }
    if (n_live == 0)
        return DSA_OK;
    srv_histogram_add(&w->meter.batch_rows, srv_bounds_rows, n_rows);
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
