/* worker_ops.c - sequence operations, appends, imports and exports on the worker's device. */
#include <inttypes.h>
#include <string.h>

#include "server/status.h"
#include "server/worker_impl.h"

struct dsk_kv_view worker_plane(const struct worker_state *w, uint32_t layer)
{
    struct dsk_kv_view kv = {
        .base = w->pool_addr + (uint64_t)layer * (uint64_t)w->layer_bytes,
        .page_pitch_bytes = (int64_t)w->layout->row_bytes * DSK_PAGE_TOKENS,
        .n_slots = (int64_t)w->config.n_pages * DSK_PAGE_TOKENS,
        .layout = w->layout->id,
        .raw_scale = w->config.raw_scale,
    };

    return kv;
}

/* The valid rows of a page, in every layer. */
static dsa_status copy_page(struct worker_state *w, const struct srv_page_copy *copy, struct srv_err *err)
{
    for (uint32_t layer = 0; layer < w->config.n_layers; layer++) {
        struct dsk_copy_rows_args args = {
            .kv = worker_plane(w, layer),
            .src_slot = (int64_t)copy->src * DSK_PAGE_TOKENS,
            .dst_slot = (int64_t)copy->dst * DSK_PAGE_TOKENS,
            .n_rows = copy->n_rows[layer],
        };
        struct dsk_err cause;

        if (args.n_rows > 0 && dsk_copy_rows(w->stream, &args, &cause) != DSK_OK)
            return srv_fail_dsk(err, &cause, "");
    }
    return DSA_OK;
}

/* The host side of a copy stays valid until the stream has passed it. */
static dsa_status wait_stream(struct worker_state *w, struct srv_err *err)
{
    if (dsk_stream_sync(w->stream) != DSK_OK)
        return srv_fail(err, DSA_E_DEVICE_LOST, "", "%s", "", "the device failed");
    return DSA_OK;
}

/* Stored rows go where the slots say; slots of one page are neighbours, so they move as one run. */
static dsa_status import_layer(struct worker_state *w, const struct srv_job_append *append, uint32_t layer,
                               const uint8_t *rows, struct srv_err *err)
{
    struct dsk_kv_view kv = worker_plane(w, layer);
    uint64_t row_bytes = (uint64_t)w->layout->row_bytes;

    for (uint32_t i = 0, n_run; i < append->n_tokens; i += n_run) {
        n_run = 1;
        while (i + n_run < append->n_tokens && w->slots[i + n_run] == w->slots[i] + (int32_t)n_run)
            n_run++;
        if (append->row_bytes != (int64_t)row_bytes)
            n_run = 1;
        if (dsk_copy_in(w->stream, dsk_row_address(&kv, w->layout->row_bytes, w->slots[i]),
                        rows + (int64_t)i * append->row_bytes, n_run * row_bytes)
            != DSK_OK)
            return srv_fail(err, DSA_E_DEVICE_LOST, "", "%s", "", "copying rows to the device failed");
    }
    return wait_stream(w, err);
}

/* Tokens [at, at + n) of one layer. */
static dsa_status append_run(struct worker_state *w, const struct srv_job_append *append, uint32_t layer,
                             const uint8_t *rows, uint32_t at, uint32_t n, struct srv_err *err)
{
    uint64_t row_bytes = (uint64_t)w->layout->d_qk * 2;
    struct stage_block in = {rows + (int64_t)at * append->row_bytes, n, 1, row_bytes, append->row_bytes, 0};
    struct stage_block counts = {w->append_counts + at, n, 1, sizeof(uint32_t), sizeof(uint32_t), 0};
    struct dsk_append_args args = {
        .kv = worker_plane(w, layer),
        .slots = w->slots + at,
        .n_rows = (int32_t)n,
        .rule = append->rule,
        .flags = append->strict ? DSK_APPEND_STRICT : 0,
    };
    struct stage_view in_view, count_view;
    struct dsk_err cause;
    dsa_status rc;

    stage_reset(&w->row_stage);
    if (!stage_in(&w->row_stage, &in, &in_view) || !stage_out(&w->row_stage, &counts, &count_view))
        return srv_fail(err, DSA_E_INTERNAL, "rows", "%" PRIu32, n, "the rows do not fit the stage");
    args.rows = in_view.addr;
    args.row_bytes = in_view.outer_bytes;
    args.n_nonfinite = count_view.addr;
    if ((rc = stage_push(&w->row_stage, err)) != DSA_OK)
        return rc;
    if (dsk_append(w->stream, &args, &cause) != DSK_OK)
        return srv_fail_dsk(err, &cause, "");
    return stage_pull(&w->row_stage, err);
}

static dsa_status append_layer(struct worker_state *w, const struct srv_job_append *append, uint32_t layer,
                               const uint8_t *rows, uint64_t *n_nonfinite_p, struct srv_err *err)
{
    uint32_t n_max = w->row_stage.is_direct ? append->n_tokens : WORKER_STAGE_ROWS;
    dsa_status rc = DSA_OK;

    for (uint32_t at = 0, n; at < append->n_tokens && rc == DSA_OK; at += n) {
        n = append->n_tokens - at < n_max ? append->n_tokens - at : n_max;
        rc = append_run(w, append, layer, rows, at, n, err);
    }
    for (uint32_t i = 0; i < append->n_tokens && rc == DSA_OK; i++)
        *n_nonfinite_p += w->append_counts[i];
    return rc;
}

dsa_status worker_run_append(struct worker_state *w, uint64_t session, const struct srv_job_append *append,
                             bool is_import, uint64_t *n_tokens_p, uint64_t *n_nonfinite_p,
                             struct srv_err *err)
{
    struct srv_append plan = {
        .session = session,
        .id = append->sequence,
        .layer = append->layer,
        .n_layers = append->n_layers,
        .n_tokens = append->n_tokens,
        .expected_position = append->position,
    };
    struct srv_page_copy copy;
    uint32_t n_copies = 0;
    uint64_t n_nonfinite = 0;
    dsa_status rc = srv_sequence_append_begin(w->sequences, &plan, w->slots, &copy, &n_copies, err);

    if (rc != DSA_OK)
        return rc;
    if (n_copies > 0)
        rc = copy_page(w, &copy, err);
    for (uint32_t i = 0; i < append->n_layers && rc == DSA_OK; i++) {
        const uint8_t *rows = (const uint8_t *)append->rows + (int64_t)i * append->layer_bytes;

        rc = is_import ? import_layer(w, append, append->layer + i, rows, err)
                       : append_layer(w, append, append->layer + i, rows, &n_nonfinite, err);
    }
    if (rc != DSA_OK) {
        srv_sequence_append_abort(w->sequences, &plan);
        return rc;
    }
    srv_sequence_append_commit(w->sequences, &plan, n_tokens_p);
    *n_nonfinite_p = n_nonfinite;
    return DSA_OK;
}

static dsa_status run_fork(struct worker_state *w, struct srv_job *job, struct srv_err *err)
{
    struct srv_job_sequence *sequence = &job->u.sequence;
    struct srv_page_copy copy;
    uint32_t n_copies = 0;
    uint64_t id;
    dsa_status rc = srv_sequence_fork(w->sequences, job->session, sequence->id, sequence->n_tokens, &id,
                                      &copy, &n_copies, err);

    if (rc != DSA_OK)
        return rc;
    if (n_copies > 0 && (rc = copy_page(w, &copy, err)) != DSA_OK) {
        SRV_ASSERT(srv_sequence_release(w->sequences, job->session, id, NULL) == DSA_OK);
        return rc;
    }
    sequence->id = id;
    return DSA_OK;
}

/* What a reply about a sequence shows. */
static dsa_status describe(struct worker_state *w, struct srv_job *job, struct srv_err *err)
{
    struct srv_job_sequence *sequence = &job->u.sequence;
    struct srv_seq_view view;
    dsa_status rc = srv_sequence_describe(w->sequences, job->session, sequence->id, &view, err);

    if (rc != DSA_OK)
        return rc;
    sequence->n_tokens = view.n_tokens;
    sequence->n_pages = view.n_table;
    sequence->n_shared = view.n_shared;
    for (uint32_t i = 0; sequence->layer_tokens && i < w->config.n_layers; i++)
        sequence->layer_tokens[i] = view.layer_tokens[i];
    for (uint32_t i = 0; sequence->pages && i < view.n_table && i < sequence->max_pages; i++)
        sequence->pages[i] = view.table[i];
    return DSA_OK;
}

static dsa_status run_sequence(struct worker_state *w, struct srv_job *job, struct srv_err *err)
{
    struct srv_job_sequence *sequence = &job->u.sequence;
    dsa_status rc = DSA_OK;

    switch (job->op) {
    case SRV_OP_CREATE:
        rc = srv_sequence_create(w->sequences, job->session, &sequence->id, err);
        break;
    case SRV_OP_FORK:
        rc = run_fork(w, job, err);
        break;
    case SRV_OP_TRUNCATE:
        rc = srv_sequence_truncate(w->sequences, job->session, sequence->id, sequence->n_tokens, err);
        break;
    default:
        break;
    }
    return rc == DSA_OK ? describe(w, job, err) : rc;
}

static dsa_status export_bf16(struct worker_state *w, const struct srv_seq_view *view,
                              struct srv_job_export *export, struct srv_err *err)
{
    uint64_t row_bytes = (uint64_t)w->layout->d_qk * 2;
    struct stage_block table = {view->table, 1, 1, view->n_table * sizeof(int32_t), 0, 0};
    struct stage_block rows = {export->out, export->n_tokens, 1, row_bytes, (int64_t)row_bytes, 0};
    struct stage_view table_view, row_view;
    struct dsk_read_args args = {
        .kv = worker_plane(w, export->layer),
        .n_rows = export->n_tokens,
        .first = (int64_t) export->first,
        .n_list = (int32_t)view->n_table,
        .mode = DSK_READ_PAGED,
    };
    struct dsk_err cause;
    dsa_status rc;

    stage_reset(&w->row_stage);
    if (!stage_in(&w->row_stage, &table, &table_view) || !stage_out(&w->row_stage, &rows, &row_view))
        return srv_fail(err, DSA_E_INTERNAL, "rows", "%" PRIu32, export->n_tokens,
                        "the rows do not fit the stage");
    args.list = table_view.addr;
    args.out = row_view.addr;
    if ((rc = stage_push(&w->row_stage, err)) != DSA_OK)
        return rc;
    if (dsk_read(w->stream, &args, &cause) != DSK_OK)
        return srv_fail_dsk(err, &cause, "");
    return stage_pull(&w->row_stage, err);
}

static dsa_status export_bytes(struct worker_state *w, const struct srv_seq_view *view,
                               struct srv_job_export *export, struct srv_err *err)
{
    struct dsk_kv_view kv = worker_plane(w, export->layer);
    uint64_t row_bytes = (uint64_t)w->layout->row_bytes;

    for (uint32_t i = 0, n_run; i < export->n_tokens; i += n_run) {
        uint64_t token = export->first + i;
        uint32_t offset = (uint32_t)(token % DSK_PAGE_TOKENS);
        int64_t slot = (int64_t)view->table[token / DSK_PAGE_TOKENS] * DSK_PAGE_TOKENS + offset;

        n_run = DSK_PAGE_TOKENS - offset;
        n_run = n_run < export->n_tokens - i ? n_run : export->n_tokens - i;
        if (dsk_copy_out(w->stream, export->out + i * row_bytes,
                         dsk_row_address(&kv, w->layout->row_bytes, slot), n_run * row_bytes)
            != DSK_OK)
            return srv_fail(err, DSA_E_DEVICE_LOST, "", "%s", "", "copying rows from the device failed");
    }
    return wait_stream(w, err);
}

static dsa_status run_export(struct worker_state *w, struct srv_job *job, struct srv_err *err)
{
    struct srv_job_export *export = &job->u.export;
    struct srv_seq_view view;
    dsa_status rc = srv_sequence_find(w->sequences, job->session, export->sequence, &view, err);

    if (rc != DSA_OK)
        return rc;
    export->layer_tokens = view.layer_tokens[export->layer];
    if (export->first > export->layer_tokens)
        return srv_fail(err, DSA_E_BAD_RANGE, "first", "%" PRIu64, export->first,
                        "the layer has %" PRIu64 " tokens", export->layer_tokens);
    if (export->end != UINT64_MAX && export->end > export->layer_tokens)
        return srv_fail(err, DSA_E_BAD_RANGE, "n_tokens", "%" PRIu64, export->end - export->first,
                        "the layer has %" PRIu64 " tokens from there on",
                        export->layer_tokens - export->first);
    if (export->n_tokens > export->layer_tokens - export->first)
        export->n_tokens = (uint32_t)(export->layer_tokens - export->first);
    if (export->n_tokens == 0)
        return DSA_OK;
    return export->as_bf16 ? export_bf16(w, &view, export, err) : export_bytes(w, &view, export, err);
}

static void run_stats(struct worker_state *w, struct srv_job_stats *stats)
{
    srv_kvpool_stats(w->pool, &stats->pool);
    stats->n_sequences = srv_seqset_count(w->sequences);
    stats->n_batches = w->n_batches;
    stats->queue_depth = srv_batcher_count(w->batcher);
}

dsa_status worker_run_op(struct worker_state *w, struct srv_job *job, struct srv_piece *piece)
{
    struct srv_err *err = &piece->err;
    dsa_status rc;

    switch (job->op) {
    case SRV_OP_CREATE:
    case SRV_OP_FORK:
    case SRV_OP_TRUNCATE:
    case SRV_OP_GET:
        return run_sequence(w, job, err);
    case SRV_OP_RELEASE:
        return srv_sequence_release(w->sequences, job->session, job->u.sequence.id, err);
    case SRV_OP_APPEND:
    case SRV_OP_IMPORT:
        rc = worker_run_append(w, job->session, &job->u.append, job->op == SRV_OP_IMPORT, &piece->n_tokens,
                               &piece->n_nonfinite, err);
        if (rc != DSA_OK && job->op == SRV_OP_APPEND)
            srv_err_prefix(err, "append.");
        return rc;
    case SRV_OP_EXPORT:
        return run_export(w, job, err);
    case SRV_OP_STATS:
        run_stats(w, &job->u.stats);
        return DSA_OK;
    case SRV_OP_END_SESSION:
        srv_seqset_release_session(w->sequences, job->session);
        return DSA_OK;
    case SRV_OP_ATTEND:
        break;
    }
    srv_assert_failed("attend goes through worker_run_attend", __FILE__, __LINE__);
}
