#include "check_kit.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GUARD_BYTES 256
#define GUARD       0xa5
#define UNWRITTEN   0xee
#define MAX_SEGS    16

bool check_expect(struct check *c, bool is_ok, const char *name, const char *format, ...)
{
    va_list ap;

    if (is_ok) {
        c->n_passed++;
        return true;
    }
    c->n_failed++;
    printf("FAIL %s (seed %llu): ", name, (unsigned long long)c->seed);
    va_start(ap, format);
    vprintf(format, ap);
    va_end(ap);
    printf("\n");
    return false;
}

void *check_malloc(size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);

    if (!p) {
        fprintf(stderr, "dsk-check: out of memory for %zu bytes\n", bytes);
        exit(2);
    }
    return p;
}

static void must(dsk_status status, const char *what)
{
    if (status != DSK_OK) {
        fprintf(stderr, "dsk-check: %s: %s\n", what, dsk_status_text(status));
        exit(2);
    }
}

void check_buf_init(struct check *c, struct check_buf *buf, const void *data, int64_t bytes)
{
    buf->bytes = bytes;
    must(dsk_mem_alloc(c->dev, (uint64_t)bytes + 2 * GUARD_BYTES, &buf->raw), "device memory");
    buf->addr = buf->raw + GUARD_BYTES;
    must(dsk_mem_set(c->s, buf->raw, GUARD, GUARD_BYTES), "fill");
    must(dsk_mem_set(c->s, buf->addr + (uint64_t)bytes, GUARD, GUARD_BYTES), "fill");
    if (data)
        must(dsk_copy_in(c->s, buf->addr, data, (uint64_t)bytes), "copy in");
    else
        must(dsk_mem_set(c->s, buf->addr, UNWRITTEN, (uint64_t)bytes), "fill");
    must(dsk_stream_sync(c->s), "sync");
}

void check_buf_read(struct check *c, const struct check_buf *buf, void *data)
{
    must(dsk_copy_out(c->s, data, buf->addr, (uint64_t)buf->bytes), "copy out");
    must(dsk_stream_sync(c->s), "sync");
}

void check_buf_fini(struct check *c, struct check_buf *buf, const char *name, const char *what)
{
    uint8_t guards[2][GUARD_BYTES];
    int n_damaged = 0;

    must(dsk_copy_out(c->s, guards[0], buf->raw, GUARD_BYTES), "copy out");
    must(dsk_copy_out(c->s, guards[1], buf->addr + (uint64_t)buf->bytes, GUARD_BYTES), "copy out");
    must(dsk_stream_sync(c->s), "sync");
    for (int i = 0; i < GUARD_BYTES; i++)
        n_damaged += (guards[0][i] != GUARD) + (guards[1][i] != GUARD);
    if (n_damaged) /* silence is the normal case: guards are not counted as checks of their own */
        check_expect(c, false, name, "%d guard bytes around %s were written", n_damaged, what);
    dsk_mem_free(c->dev, buf->raw);
}

/* ---- attend -------------------------------------------------------------------------------- */

/* Element strides of the padded tensors. */
struct pitches {
    int64_t q_head, q_row, out_head, out_row, lse_row, index_row;
};

static struct pitches pitches_of(const struct check_attend *a)
{
    struct pitches p = {.q_head = a->layout->d_qk + a->q_pad, .out_head = a->layout->d_v + a->out_pad};

    p.q_row = p.q_head * a->h_q + a->q_pad;
    p.out_row = p.out_head * a->h_q + a->out_pad;
    p.lse_row = a->h_q + a->lse_pad;
    p.index_row = a->topk + a->index_pad;
    return p;
}

struct launch {
    struct pitches p;
    struct check_buf pool, q, out, lse, n_bad, indices, lengths, sink, table;
    struct dsk_attend_seg segs[MAX_SEGS];
    int n_segs;
};

static void upload_q(struct check *c, const struct check_attend *a, struct launch *l)
{
    int64_t n = l->p.q_row * a->n_rows;
    uint16_t *q = check_malloc(2 * (size_t)n);

    memset(q, 0xff, 2 * (size_t)n); /* NaN in the padding */
    for (int64_t i = 0; i < (int64_t)a->n_rows * a->h_q; i++)
        memcpy(q + i / a->h_q * l->p.q_row + i % a->h_q * l->p.q_head, a->q + i * a->layout->d_qk,
               2 * (size_t)a->layout->d_qk);
    check_buf_init(c, &l->q, q, 2 * n);
    free(q);
}

static void upload_indices(struct check *c, const struct check_attend *a, struct launch *l)
{
    int64_t n = l->p.index_row * a->n_rows;
    int32_t *indices = check_malloc(4 * (size_t)n);

    memset(indices, 0, 4 * (size_t)n); /* lanes past the width name slot 0 */
    for (int64_t t = 0; t < a->n_rows; t++)
        memcpy(indices + t * l->p.index_row, a->indices + t * a->topk, 4 * (size_t)a->topk);
    check_buf_init(c, &l->indices, indices, 4 * n);
    free(indices);
}

static void launch_init(struct check *c, const struct check_attend *a, struct launch *l)
{
    int elem = a->out_dtype == DSK_DTYPE_F32 ? 4 : 2;

    memset(l, 0, sizeof(*l));
    l->p = pitches_of(a);
    check_buf_init(c, &l->pool, a->pool, a->pool_bytes);
    upload_q(c, a, l);
    upload_indices(c, a, l);
    check_buf_init(c, &l->out, NULL, elem * l->p.out_row * a->n_rows);
    check_buf_init(c, &l->lse, NULL, 4 * l->p.lse_row * a->n_rows);
    check_buf_init(c, &l->n_bad, NULL, 4 * (int64_t)a->n_rows);
    if (a->lengths)
        check_buf_init(c, &l->lengths, a->lengths, 4 * (int64_t)a->n_rows);
    if (a->sink)
        check_buf_init(c, &l->sink, a->sink, 4 * (int64_t)a->h_q);
    if (a->table)
        check_buf_init(c, &l->table, a->table, 4 * (int64_t)a->n_table);
    l->n_segs = a->n_segs ? a->n_segs : 1;
    for (int i = 0; i < l->n_segs; i++) {
        int64_t first = (int64_t)a->n_rows * i / l->n_segs, end = (int64_t)a->n_rows * (i + 1) / l->n_segs;

        l->segs[i] = (struct dsk_attend_seg){
            .q = l->q.addr + (uint64_t)(2 * first * l->p.q_row),
            .out = l->out.addr + (uint64_t)(elem * first * l->p.out_row),
            .lse = l->lse.addr + (uint64_t)(4 * first * l->p.lse_row),
            .indices = l->indices.addr + (uint64_t)(4 * first * l->p.index_row),
            .lengths = a->lengths ? l->lengths.addr + (uint64_t)(4 * first) : 0,
            .sink = a->sink ? l->sink.addr : 0,
            .table = a->table ? l->table.addr : 0,
            .n_bad = l->n_bad.addr + (uint64_t)(4 * first),
            .q_row_bytes = 2 * l->p.q_row,
            .q_head_bytes = 2 * l->p.q_head,
            .out_row_bytes = elem * l->p.out_row,
            .out_head_bytes = elem * l->p.out_head,
            .lse_row_bytes = 4 * l->p.lse_row,
            .indices_row_bytes = 4 * l->p.index_row,
            .n_rows = (int32_t)(end - first),
            .topk = a->topk,
            .space = a->table ? DSK_SPACE_LOGICAL : DSK_SPACE_PHYSICAL,
            .n_table = a->n_table,
            .seq_len = a->seq_len,
            .softmax_scale = a->softmax_scale,
        };
    }
}

static void launch_fini(struct check *c, const struct check_attend *a, struct launch *l, const char *name)
{
    check_buf_fini(c, &l->pool, name, "the pool");
    check_buf_fini(c, &l->q, name, "q");
    check_buf_fini(c, &l->indices, name, "indices");
    check_buf_fini(c, &l->out, name, "out");
    check_buf_fini(c, &l->lse, name, "lse");
    check_buf_fini(c, &l->n_bad, name, "n_bad");
    if (a->lengths)
        check_buf_fini(c, &l->lengths, name, "lengths");
    if (a->sink)
        check_buf_fini(c, &l->sink, name, "sink");
    if (a->table)
        check_buf_fini(c, &l->table, name, "table");
}

struct result {
    void *out;
    float *out_dense, *lse, *lse_dense;
    uint32_t *n_bad;
    int64_t n_padding_written;
};

static void count_padding(struct result *r, const uint8_t *bytes, int64_t from, int64_t to)
{
    for (int64_t i = from; i < to; i++)
        r->n_padding_written += bytes[i] != UNWRITTEN;
}

/* Fetches the outputs, packs them densely as floats, and counts padding bytes that were written. */
static void result_init(struct check *c, const struct check_attend *a, const struct launch *l,
                        struct result *r)
{
    int elem = a->out_dtype == DSK_DTYPE_F32 ? 4 : 2, d_v = a->layout->d_v;
    int64_t n = (int64_t)a->n_rows * a->h_q;

    r->n_padding_written = 0;
    r->out = check_malloc((size_t)l->out.bytes);
    r->lse = check_malloc((size_t)l->lse.bytes);
    r->n_bad = check_malloc((size_t)l->n_bad.bytes);
    r->out_dense = check_malloc(4 * (size_t)(n * d_v));
    r->lse_dense = check_malloc(4 * (size_t)n);
    check_buf_read(c, &l->out, r->out);
    check_buf_read(c, &l->lse, r->lse);
    check_buf_read(c, &l->n_bad, r->n_bad);
    for (int64_t i = 0; i < n; i++) {
        int64_t t = i / a->h_q, h = i % a->h_q, at = t * l->p.out_row + h * l->p.out_head;
        int64_t end = h + 1 < a->h_q ? at + l->p.out_head : (t + 1) * l->p.out_row;

        if (elem == 4)
            memcpy(r->out_dense + i * d_v, (float *)r->out + at, 4 * (size_t)d_v);
        else
            ref64_bf16_to_f32((uint16_t *)r->out + at, r->out_dense + i * d_v, d_v);
        count_padding(r, r->out, (at + d_v) * elem, end * elem);
        r->lse_dense[i] = r->lse[t * l->p.lse_row + h];
        if (h == 0)
            count_padding(r, (const uint8_t *)r->lse, (t * l->p.lse_row + a->h_q) * 4,
                          (t + 1) * l->p.lse_row * 4);
    }
}

static void result_fini(struct result *r)
{
    free(r->out);
    free(r->out_dense);
    free(r->lse);
    free(r->lse_dense);
    free(r->n_bad);
}

static void where(const struct check_attend *a, const struct ref64_diff *diff, int per_head, char *text,
                  size_t size)
{
    if (diff->first_bad < 0)
        text[0] = '\0';
    else
        snprintf(text, size, " [row %lld, head %lld, value %lld]",
                 (long long)(diff->first_bad / per_head / a->h_q),
                 (long long)(diff->first_bad / per_head % a->h_q), (long long)(diff->first_bad % per_head));
}

static void compare(struct check *c, const struct check_attend *a, const struct result *r, const double *out,
                    const double *lse, const uint32_t *n_bad, const char *name)
{
    int64_t n = (int64_t)a->n_rows * a->h_q, n_out = n * a->layout->d_v;
    struct ref64_diff diff = ref64_compare_out(r->out_dense, out, n_out);
    char text[200], position[96];

    ref64_diff_text(&diff, n_out, text, sizeof(text));
    where(a, &diff, a->layout->d_v, position, sizeof(position));
    check_expect(c, diff.ok, name, "out: %s%s", text, position);
    diff = ref64_compare_lse(r->lse_dense, lse, n);
    ref64_diff_text(&diff, n, text, sizeof(text));
    where(a, &diff, 1, position, sizeof(position));
    check_expect(c, diff.ok, name, "lse: %s%s", text, position);
    check_expect(c, r->n_padding_written == 0, name, "%lld bytes between rows or heads were written",
                 (long long)r->n_padding_written);
    for (int t = 0; n_bad && t < a->n_rows; t++) {
        if (r->n_bad[t] != n_bad[t]) {
            check_expect(c, false, name, "n_bad of row %d is %u, not %u", t, r->n_bad[t], n_bad[t]);
            return;
        }
    }
}

static dsk_status launch_run(struct check *c, const struct check_attend *a, const struct launch *l,
                             struct dsk_err *err)
{
    struct dsk_attend_args args = {.kv = {.base = l->pool.addr,
                                          .page_pitch_bytes = a->page_pitch_bytes,
                                          .n_slots = a->n_slots,
                                          .layout = a->layout->id,
                                          .raw_scale = a->raw_scale},
                                   .segs = l->segs,
                                   .n_segs = l->n_segs,
                                   .h_q = a->h_q,
                                   .out_dtype = a->out_dtype,
                                   .flags = a->flags};
    dsk_status status;

    if (args.kv.page_pitch_bytes == 0)
        args.kv.page_pitch_bytes = DSK_PAGE_TOKENS * (int64_t)a->layout->row_bytes;
    status = dsk_attend(c->s, &args, err);
    return status == DSK_OK ? dsk_stream_sync(c->s) : status;
}

static void repeat(struct check *c, const struct check_attend *a, const struct launch *l,
                   const struct result *first, const char *name)
{
    void *again = check_malloc((size_t)l->out.bytes);
    struct dsk_err err = {.status = DSK_OK};
    bool is_same = true;

    for (int i = 0; i < a->n_repeats && is_same; i++) {
        must(dsk_mem_set(c->s, l->out.addr, UNWRITTEN, (uint64_t)l->out.bytes), "fill");
        is_same = launch_run(c, a, l, &err) == DSK_OK;
        check_buf_read(c, &l->out, again);
        is_same = is_same && memcmp(again, first->out, (size_t)l->out.bytes) == 0;
        check_expect(c, is_same, name, "repeat %d gives other bits", i + 1);
    }
    free(again);
}

void check_attend_run(struct check *c, const struct check_attend *a, const char *name)
{
    int64_t n = (int64_t)a->n_rows * a->h_q;
    struct ref64_attend ref = {.layout = a->layout,
                               .pool = a->pool,
                               .page_pitch_bytes = a->page_pitch_bytes,
                               .n_slots = a->n_slots,
                               .raw_scale = a->raw_scale,
                               .q = a->q,
                               .indices = a->indices,
                               .lengths = a->lengths,
                               .sink = a->sink,
                               .table = a->table,
                               .n_table = a->n_table,
                               .seq_len = a->seq_len,
                               .n_rows = a->n_rows,
                               .topk = a->topk,
                               .h_q = a->h_q,
                               .softmax_scale = (double)a->softmax_scale};
    double *out = NULL, *lse = NULL;
    uint32_t *n_bad = NULL;
    struct dsk_err err = {.status = DSK_OK};
    struct launch l;
    struct result r;

    launch_init(c, a, &l);
    if (!check_expect(c, launch_run(c, a, &l, &err) == DSK_OK, name, "refused: %s = %s: %s", err.field,
                      err.value, err.text)) {
        launch_fini(c, a, &l, name);
        return;
    }
    if (!a->ref_out) {
        out = check_malloc((size_t)(n * a->layout->d_v) * sizeof(*out));
        lse = check_malloc((size_t)n * sizeof(*lse));
        n_bad = check_malloc((size_t)a->n_rows * sizeof(*n_bad));
        if (ref64_attend(&ref, out, lse, n_bad) != 0)
            must(DSK_E_NO_MEMORY, "float64 reference");
    }
    result_init(c, a, &l, &r);
    compare(c, a, &r, a->ref_out ? a->ref_out : out, a->ref_out ? a->ref_lse : lse, n_bad, name);
    repeat(c, a, &l, &r, name);
    result_fini(&r);
    launch_fini(c, a, &l, name);
    free(out);
    free(lse);
    free(n_bad);
}
