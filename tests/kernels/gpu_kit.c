#include "gpu_kit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int32_t gpu_kit_kind(void)
{
    const char *kind = getenv("DSA_TEST_GPU");

    return kind != NULL && strcmp(kind, "hip") == 0 ? DSK_DEVICE_HIP : DSK_DEVICE_CUDA;
}

void gpu_kit_use_fake_hip(void)
{
    setenv("DSA_TEST_GPU", "hip", 1);
}

bool gpu_open(struct gpu *g, uint32_t flags)
{
    const struct dsk_device_config config = {.kind = gpu_kit_kind(), .flags = flags};
    dsk_status status;

    memset(g, 0, sizeof(*g));
    status = dsk_device_open(&config, &g->dev, &g->err);
    if (status != DSK_OK)
        return false;
    ck_assert_int_eq(dsk_stream_create(g->dev, &g->s), DSK_OK);
    ck_assert(kit_open(&g->kit, DSK_ISA_AUTO, 0));
    return true;
}

bool gpu_has_attend(struct gpu *g)
{
    const struct dsk_attend_shape shape = {
        .layout = DSK_LAYOUT_SCALED_512_64, .h_q = 16, .topk = 64, .out_dtype = DSK_DTYPE_BF16};

    return dsk_supports(g->dev, &shape, &g->err);
}

void gpu_close(struct gpu *g)
{
    for (int i = 0; i < g->n_blocks; i++)
        dsk_mem_free(g->dev, g->blocks[i]);
    dsk_stream_destroy(g->s);
    dsk_device_close(g->dev);
    kit_close(&g->kit);
}

void gpu_must(struct gpu *g, dsk_status status)
{
    KIT_EXPECT(status == DSK_OK, "%s: %s = %s: %s", dsk_status_name(status), g->err.field, g->err.value,
               g->err.text);
}

uint64_t gpu_alloc(struct gpu *g, int64_t bytes)
{
    ck_assert_int_lt(g->n_blocks, GPU_MAX_BLOCKS);
    gpu_must(g, dsk_mem_alloc(g->dev, (uint64_t)bytes + 64, &g->blocks[g->n_blocks]));
    return g->blocks[g->n_blocks++];
}

uint64_t gpu_upload_at(struct gpu *g, const void *host, int64_t bytes, int offset)
{
    uint64_t addr = gpu_alloc(g, bytes) + (uint64_t)offset;

    gpu_must(g, dsk_copy_in(g->s, addr, host, (uint64_t)bytes));
    gpu_must(g, dsk_stream_sync(g->s));
    return addr;
}

uint64_t gpu_upload(struct gpu *g, const void *host, int64_t bytes)
{
    return host == NULL ? 0 : gpu_upload_at(g, host, bytes, 0);
}

void gpu_download(struct gpu *g, void *host, uint64_t addr, int64_t bytes)
{
    gpu_must(g, dsk_copy_out(g->s, host, addr, (uint64_t)bytes));
    gpu_must(g, dsk_stream_sync(g->s));
}

int64_t gpu_pool_bytes(const struct kit_pool *pool)
{
    if (pool->kv.page_pitch_bytes == 64 * (int64_t)pool->layout->row_bytes)
        return pool->kv.n_slots * pool->layout->row_bytes;
    return (pool->kv.n_slots + 63) / 64 * pool->kv.page_pitch_bytes;
}

void gpu_expect_bytes(const void *got, const void *want, int64_t n, const char *what)
{
    for (int64_t i = 0; i < n; i++)
        KIT_EXPECT(((const uint8_t *)got)[i] == ((const uint8_t *)want)[i],
                   "%s: byte %lld of %lld is %02x, not %02x", what, (long long)i, (long long)n,
                   ((const uint8_t *)got)[i], ((const uint8_t *)want)[i]);
}

/* ---- an attend on the GPU ---------------------------------------------------------------------- */

void gpu_case_init(struct gpu *g, struct gpu_case *r, int offset)
{
    struct kit_attend *a = &r->a;
    const struct ref64_layout *layout = a->pool->layout;
    const int elem = a->out_dtype == DSK_DTYPE_F32 ? 4 : 2;
    const int64_t n = (int64_t)a->n_rows * a->h_q;

    r->out_bytes = n * layout->d_v * elem;
    r->lse_bytes = 4 * n;
    r->out = kit_alloc(&g->kit, r->out_bytes);
    r->lse = kit_alloc(&g->kit, r->lse_bytes);
    r->n_bad = kit_alloc(&g->kit, 4 * a->n_rows);
    r->seg = kit_attend_seg(&g->kit, a);
    r->seg.q = gpu_upload_at(g, a->q, 2 * n * layout->d_qk, offset);
    r->seg.indices = gpu_upload(g, a->indices, 4 * (int64_t)a->n_rows * a->topk);
    r->seg.lengths = gpu_upload(g, a->lengths, 4 * (int64_t)a->n_rows);
    r->seg.sink = gpu_upload(g, a->sink, 4 * (int64_t)a->h_q);
    r->seg.table = gpu_upload(g, a->table, 4 * (int64_t)a->n_table);
    r->seg.out = gpu_alloc(g, r->out_bytes) + (uint64_t)(offset == 0 ? 0 : elem);
    r->seg.lse = gpu_alloc(g, r->lse_bytes);
    r->seg.n_bad = gpu_alloc(g, 4 * (int64_t)a->n_rows);
    r->args = (struct dsk_attend_args){.kv = a->pool->kv,
                                       .segs = &r->seg,
                                       .n_segs = 1,
                                       .h_q = a->h_q,
                                       .out_dtype = a->out_dtype,
                                       .flags = a->flags};
    r->args.kv.base = gpu_upload(g, a->pool->bytes, gpu_pool_bytes(a->pool));
}

void gpu_case_launch(struct gpu *g, struct gpu_case *r)
{
    gpu_must(g, dsk_mem_set(g->s, r->seg.out, 0xee, (uint64_t)r->out_bytes));
    gpu_must(g, dsk_mem_set(g->s, r->seg.lse, 0xee, (uint64_t)r->lse_bytes));
    gpu_must(g, dsk_attend(g->s, &r->args, &g->err));
}

void gpu_case_fetch(struct gpu *g, struct gpu_case *r)
{
    gpu_download(g, r->out, r->seg.out, r->out_bytes);
    gpu_download(g, r->lse, r->seg.lse, r->lse_bytes);
    gpu_download(g, r->n_bad, r->seg.n_bad, 4 * (int64_t)r->a.n_rows);
}

void gpu_case_compare(struct gpu *g, struct gpu_case *r, const char *extra)
{
    const struct kit_attend *a = &r->a;
    const struct ref64_attend ref = kit_ref64(a);
    const int64_t n = (int64_t)a->n_rows * a->h_q, n_out = n * a->pool->layout->d_v;
    double *out = malloc((size_t)n_out * sizeof(*out)), *lse = malloc((size_t)n * sizeof(*lse));
    uint32_t *n_bad = malloc((size_t)a->n_rows * sizeof(*n_bad));
    float *got = malloc((size_t)n_out * sizeof(*got));
    char what[160];

    (void)g;
    ck_assert(out && lse && n_bad && got && ref64_attend(&ref, out, lse, n_bad) == 0);
    if (a->out_dtype == DSK_DTYPE_F32)
        memcpy(got, r->out, (size_t)n_out * 4);
    else
        ref64_bf16_to_f32((uint16_t *)(void *)r->out, got, n_out);
    snprintf(what, sizeof(what), "%s heads %d rows %d width %d %s", a->pool->layout->name, a->h_q, a->n_rows,
             a->topk, extra);
    kit_expect_out(got, out, n_out, what);
    kit_expect_lse(r->lse, lse, n, what);
    for (int t = 0; t < a->n_rows; t++)
        KIT_EXPECT(r->n_bad[t] == n_bad[t], "%s: n_bad[%d] is %u, not %u", what, t, r->n_bad[t], n_bad[t]);
    free(out);
    free(lse);
    free(n_bad);
    free(got);
}

struct kit_attend gpu_shape(struct gpu *g, struct kit_pool *pool, int n_rows, int h_q, int topk)
{
    return (struct kit_attend){.pool = pool,
                               .n_rows = n_rows,
                               .topk = topk,
                               .h_q = h_q,
                               .q = kit_bf16_normal(&g->kit, (int64_t)n_rows * h_q * pool->layout->d_qk, 0.5),
                               .indices = kit_indices(&g->kit, (int64_t)n_rows * topk, pool->kv.n_slots, 20),
                               .scale = 0.05f,
                               .out_dtype = DSK_DTYPE_BF16};
}
