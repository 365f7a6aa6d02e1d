#include "bench_data.h"

#include <stdlib.h>
#include <string.h>

#include "ref64.h"
#include "ref64_rng.h"

#define N_TEMPLATES 256 /* different rows; the pool repeats them in random order */

static void *take(uint64_t bytes)
{
    return aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
}

static void fill_normal(struct ref64_rng *rng, uint16_t *values, int64_t n, double sigma)
{
    for (int64_t i = 0; i < n; i++)
        values[i] = ref64_bf16_encode((float)(sigma * ref64_rng_normal(rng)));
}

static void fill_pool(struct bench_data *d, struct ref64_rng *rng, uint8_t *templates)
{
    const struct ref64_layout *layout = ref64_layout_get(d->layout->id);
    size_t row_bytes = (size_t)layout->row_bytes;
    uint16_t values[DSK_MAX_D_QK];

    for (int i = 0; i < N_TEMPLATES; i++) {
        fill_normal(rng, values, layout->d_qk, 1);
        ref64_quantise_row(layout, REF64_RULE_POW2, d->kv.raw_scale, values,
                           templates + (size_t)i * row_bytes);
    }
    for (int64_t slot = 0; slot < d->kv.n_slots; slot++)
        memcpy((uint8_t *)(uintptr_t)d->kv.base + (size_t)slot * row_bytes,
               templates + (size_t)ref64_rng_below(rng, N_TEMPLATES) * row_bytes, row_bytes);
}

static void fill_lists(struct bench_data *d, struct ref64_rng *rng)
{
    for (int64_t i = 0; i < (int64_t)BENCH_N_LISTS * BENCH_N_ROWS; i++)
        d->lists[i] = (int32_t)ref64_rng_below(rng, d->kv.n_slots);
    for (int32_t i = 0; i < d->n_pages; i++)
        d->pages[i] = i;
    for (int32_t i = d->n_pages - 1; i > 0; i--) {
        int32_t j = (int32_t)ref64_rng_below(rng, i + 1), kept = d->pages[i];

        d->pages[i] = d->pages[j];
        d->pages[j] = kept;
    }
}

int bench_data_init(struct bench_data *d, const struct dsk_layout *layout, uint64_t pool_bytes)
{
    int64_t page_bytes = DSK_PAGE_TOKENS * (int64_t)layout->row_bytes;
    uint64_t n_heads = BENCH_MAX_ROWS * DSK_MAX_HEADS, d_qk = (uint64_t)layout->d_qk;
    struct ref64_rng rng = ref64_rng_init(layout->id);
    uint8_t *templates = malloc(N_TEMPLATES * (size_t)layout->row_bytes);

    memset(d, 0, sizeof(*d));
    d->layout = layout;
    d->n_pages = (int32_t)(pool_bytes / (uint64_t)page_bytes);
    d->pool_bytes = (uint64_t)d->n_pages * (uint64_t)page_bytes;
    d->kv = (struct dsk_kv_view){.base = (uint64_t)(uintptr_t)take(d->pool_bytes),
                                 .page_pitch_bytes = page_bytes,
                                 .n_slots = (int64_t)d->n_pages * DSK_PAGE_TOKENS,
                                 .layout = layout->id,
                                 .raw_scale = 0.02f};
    d->q = take(2 * n_heads * d_qk);
    d->out = take(4 * n_heads * DSK_MAX_D_V);
    d->lse = take(4 * n_heads);
    d->lists = take(4 * BENCH_N_LISTS * BENCH_N_ROWS);
    d->pages = take(4 * (uint64_t)d->n_pages);
    d->values = take(2 * BENCH_N_ROWS * d_qk);
    d->parts = take(4 * 8 * BENCH_MAX_ROWS * 64 * 512);
    d->lse_parts = take(4 * 8 * BENCH_MAX_ROWS * 64);
    if (!templates || !d->kv.base || !d->q || !d->out || !d->lse || !d->lists || !d->pages || !d->values
        || !d->parts || !d->lse_parts) {
        free(templates);
        bench_data_fini(d);
        return -1;
    }
    fill_pool(d, &rng, templates);
    fill_lists(d, &rng);
    fill_normal(&rng, d->q, (int64_t)(n_heads * d_qk), 0.3);
    fill_normal(&rng, d->values, (int64_t)(BENCH_N_ROWS * d_qk), 1);
    for (int i = 0; i < 8 * BENCH_MAX_ROWS * 64 * 512; i++)
        d->parts[i] = (float)ref64_rng_unit(&rng);
    for (int i = 0; i < 8 * BENCH_MAX_ROWS * 64; i++)
        d->lse_parts[i] = (float)ref64_rng_unit(&rng);
    free(templates);
    return 0;
}

void bench_data_fini(struct bench_data *d)
{
    free((void *)(uintptr_t)d->kv.base);
    free(d->q);
    free(d->out);
    free(d->lse);
    free(d->lists);
    free(d->pages);
    free(d->values);
    free(d->parts);
    free(d->lse_parts);
    memset(d, 0, sizeof(*d));
}
