#include "mirror.h"

#include <stdlib.h>
#include <string.h>

#include "ref64.h"

void mirror_open(struct mirror *m, const struct wk *wk, const uint16_t *rows, uint32_t n)
{
    int32_t *slots = malloc(n * sizeof(*slots));
    struct dsk_append_args args = {.rows = (uint64_t)(uintptr_t)rows, .slots = slots, .n_rows = (int32_t)n};

    ck_assert_ptr_nonnull(slots);
    ck_assert_int_eq(dsk_device_open(&wk->config.device, &m->dev, NULL), DSK_OK);
    ck_assert_int_eq(dsk_stream_create(m->dev, &m->stream), DSK_OK);
    ck_assert_int_eq(dsk_mem_alloc(m->dev, (n + 64) * (size_t)wk->layout->row_bytes, &m->pool), DSK_OK);
    m->wk = wk;
    m->kv = (struct dsk_kv_view){.base = m->pool,
                                 .page_pitch_bytes = (int64_t)(64 * (size_t)wk->layout->row_bytes),
                                 .n_slots = n,
                                 .layout = wk->layout->id,
                                 .raw_scale = 1.0f};
    for (uint32_t i = 0; i < n; i++)
        slots[i] = (int32_t)i;
    args.kv = m->kv;
    args.row_bytes = wk->layout->d_qk * 2;
    args.rule = DSK_RULE_POW2;
    ck_assert_int_eq(dsk_append(m->stream, &args, NULL), DSK_OK);
    free(slots);
}

void mirror_close(struct mirror *m)
{
    dsk_mem_free(m->dev, m->pool);
    dsk_stream_destroy(m->stream);
    dsk_device_close(m->dev);
}

void mirror_compare(struct mirror *m, const struct wk_query *query)
{
    size_t n_out = (size_t)query->n_rows * query->h_q * (size_t)m->wk->layout->d_v,
           n_lse = query->n_rows * query->h_q;
    float *out = malloc(n_out * 4), *lse = malloc(n_lse * 4);
    struct dsk_attend_seg seg = {
        .q = (uint64_t)(uintptr_t)query->q,
        .out = (uint64_t)(uintptr_t)out,
        .lse = (uint64_t)(uintptr_t)lse,
        .indices = (uint64_t)(uintptr_t)query->indices,
        .q_row_bytes = (int64_t)query->h_q * m->wk->layout->d_qk * 2,
        .q_head_bytes = m->wk->layout->d_qk * 2,
        .out_row_bytes = (int64_t)query->h_q * m->wk->layout->d_v * 4,
        .out_head_bytes = m->wk->layout->d_v * 4,
        .lse_row_bytes = (int64_t)query->h_q * 4,
        .indices_row_bytes = (int64_t)query->topk * 4,
        .n_rows = (int32_t)query->n_rows,
        .topk = (int32_t)query->topk,
        .space = DSK_SPACE_PHYSICAL,
        .softmax_scale = 0.05f,
    };
    struct dsk_attend_args args = {.kv = m->kv,
                                   .segs = &seg,
                                   .n_segs = 1,
                                   .h_q = (int32_t)query->h_q,
                                   .out_dtype = DSK_DTYPE_F32,
                                   .flags = DSK_ATTEND_BATCH_INVARIANT};

    ck_assert(out && lse);
    ck_assert_int_eq(dsk_attend(m->stream, &args, NULL), DSK_OK);
    ck_assert_int_eq(memcmp(out, query->out, n_out * 4), 0);
    ck_assert_int_eq(memcmp(lse, query->lse, n_lse * 4), 0);
    free(out);
    free(lse);
}

void mirror_oracle(const struct wk *wk, const uint16_t *rows, uint32_t n, const struct wk_query *query)
{
    const struct ref64_layout *layout = ref64_layout_get(wk->layout->id);
    size_t n_out = (size_t)query->n_rows * query->h_q * (size_t)layout->d_v;
    uint8_t *pool = calloc((n + 63) / 64 * 64, (size_t)layout->row_bytes);
    double *out = malloc(n_out * sizeof(*out)), *lse = malloc(query->n_rows * query->h_q * sizeof(*lse));
    struct ref64_attend args = {.layout = layout,
                                .pool = pool,
                                .n_slots = n,
                                .raw_scale = 1.0f,
                                .q = query->q,
                                .indices = query->indices,
                                .n_rows = (int)query->n_rows,
                                .topk = (int)query->topk,
                                .h_q = (int)query->h_q,
                                .softmax_scale = 0.05f};

    ck_assert(pool && out && lse);
    for (uint32_t i = 0; i < n; i++)
        ref64_quantise_row(layout, REF64_RULE_POW2, 1.0f, rows + (size_t)i * (size_t)layout->d_qk,
                           pool + (size_t)i * (size_t)layout->row_bytes);
    ck_assert_int_eq(ref64_attend(&args, out, lse, NULL), 0);
    ck_assert(ref64_compare_out(query->out, out, (int64_t)n_out).ok);
    ck_assert(ref64_compare_lse(query->lse, lse, query->n_rows * query->h_q).ok);
    free(pool);
    free(out);
    free(lse);
}

void mirror_rows(struct wk *wk, uint64_t id, uint32_t layer, const uint16_t *rows, uint32_t n)
{
    struct mirror m;
    uint8_t *got = malloc((n + 1) * (size_t)wk->layout->row_bytes);

    ck_assert_ptr_nonnull(got);
    ck_assert_uint_eq(wk_export(wk, id, layer, got, n + 1), n);
    if (n > 0) {
        mirror_open(&m, wk, rows, n);
        ck_assert_int_eq(memcmp(got, (const void *)(uintptr_t)m.pool, n * (size_t)wk->layout->row_bytes), 0);
        mirror_close(&m);
    }
    free(got);
}
