#include "kit.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Under the address sanitizer a guard also faults when it is read. */
#if defined(DSA_SANITIZE_address)
#include <sanitizer/asan_interface.h>
#define GUARD_CLOSE(p, bytes) ASAN_POISON_MEMORY_REGION(p, bytes)
#define GUARD_OPEN(p, bytes)  ASAN_UNPOISON_MEMORY_REGION(p, bytes)
#else
#define GUARD_CLOSE(p, bytes) ((void)(p), (void)(bytes))
#define GUARD_OPEN(p, bytes)  ((void)(p), (void)(bytes))
#endif

#define GUARD_BYTES 192
#define GUARD       0xa5

const char *kit_isa_name(int isa)
{
    static const char *const names[] = {"auto", "generic", "avx2", "avx512", "avx512bf16"};

    return names[isa];
}

bool kit_open(struct kit *k, int isa, int n_threads)
{
    struct dsk_device_config config = {.kind = DSK_DEVICE_CPU, .n_threads = n_threads, .isa = isa};
    dsk_status status;

    memset(k, 0, sizeof(*k));
    k->rng = ref64_rng_init(test_seed());
    status = dsk_device_open(&config, &k->dev, &k->err);
    if (status == DSK_E_UNSUPPORTED && isa > DSK_ISA_GENERIC)
        return false;
    KIT_EXPECT(status == DSK_OK, "open: %s %s", dsk_status_name(status), k->err.text);
    ck_assert_int_eq(dsk_stream_create(k->dev, &k->s), DSK_OK);
    return true;
}

static bool is_guard(const uint8_t *bytes)
{
    for (int i = 0; i < GUARD_BYTES; i++) {
        if (bytes[i] != GUARD)
            return false;
    }
    return true;
}

void kit_close(struct kit *k)
{
    for (int i = 0; i < k->n_bufs; i++) {
        uint8_t *mem = k->bufs[i].mem;

        GUARD_OPEN(mem, 2 * GUARD_BYTES + k->bufs[i].bytes);
        KIT_EXPECT(is_guard(mem), "buffer %d of %zu bytes: written before its start", i, k->bufs[i].bytes);
        KIT_EXPECT(is_guard(mem + GUARD_BYTES + k->bufs[i].bytes),
                   "buffer %d of %zu bytes: written past its end", i, k->bufs[i].bytes);
        free(mem);
    }
    dsk_stream_destroy(k->s);
    dsk_device_close(k->dev);
    k->n_bufs = 0;
}

void *kit_alloc(struct kit *k, int64_t bytes)
{
    size_t n = (size_t)bytes, total = (n + 2 * GUARD_BYTES + 63) / 64 * 64;
    uint8_t *mem = aligned_alloc(64, total);

    ck_assert_ptr_nonnull(mem);
    ck_assert_int_lt(k->n_bufs, KIT_MAX_BUFS);
    memset(mem, GUARD, total);
    memset(mem + GUARD_BYTES, 0xee, n);
    GUARD_CLOSE(mem, GUARD_BYTES);
    GUARD_CLOSE(mem + GUARD_BYTES + n, GUARD_BYTES);
    k->bufs[k->n_bufs].mem = mem;
    k->bufs[k->n_bufs].bytes = n;
    k->n_bufs++;
    return mem + GUARD_BYTES;
}

/* ---- data ---------------------------------------------------------------------------------- */

static void pool_init(struct kit *k, struct kit_pool *pool, uint32_t id, int64_t n_slots, int pitch_factor)
{
    const struct ref64_layout *layout = ref64_layout_get(id);
    int64_t page = 64 * (int64_t)layout->row_bytes, n_pages = (n_slots + 63) / 64;
    int64_t bytes = pitch_factor == 1 ? n_slots * layout->row_bytes : n_pages * page * pitch_factor;

    pool->layout = layout;
    pool->bytes = kit_alloc(k, bytes);
    memset(pool->bytes, 0x7f, (size_t)bytes);
    pool->kv = (struct dsk_kv_view){.base = kit_addr(pool->bytes),
                                    .page_pitch_bytes = page * pitch_factor,
                                    .n_slots = n_slots,
                                    .layout = id,
                                    .raw_scale = 0.03f};
}

uint8_t *kit_pool_row(const struct kit_pool *pool, int64_t slot)
{
    return pool->bytes + slot / 64 * pool->kv.page_pitch_bytes + slot % 64 * pool->layout->row_bytes;
}

void kit_pool_make(struct kit *k, struct kit_pool *pool, uint32_t id, int64_t n_slots, int pitch_factor)
{
    static const double sizes[] = {0.1, 1, 1, 3};
    uint16_t values[DSK_MAX_D_QK];

    pool_init(k, pool, id, n_slots, pitch_factor);
    for (int64_t slot = 0; slot < n_slots; slot++) {
        int rule = slot % 2 ? REF64_RULE_PLAIN : REF64_RULE_POW2;

        for (int i = 0; i < pool->layout->d_qk; i++) {
            double sigma = sizes[(i / 128 + slot) % 4];

            values[i] = ref64_bf16_encode((float)(sigma * ref64_rng_normal(&k->rng)));
        }
        ref64_quantise_row(pool->layout, rule, pool->kv.raw_scale, values, kit_pool_row(pool, slot));
    }
}

static void fill_row(const struct kit_pool *pool, int64_t slot, uint8_t code, float scale)
{
    const struct ref64_layout *layout = pool->layout;
    uint8_t *row = kit_pool_row(pool, slot);

    memset(row, code, (size_t)layout->row_bytes);
    for (int g = 0; g < layout->n_groups; g++)
        memcpy(row + layout->latent + 4 * g, &scale, sizeof(scale));
}

void kit_pool_fill(struct kit *k, struct kit_pool *pool, uint32_t id, int64_t n_slots, uint8_t code,
                   float scale)
{
    pool_init(k, pool, id, n_slots, 1);
    for (int64_t slot = 0; slot < n_slots; slot++)
        fill_row(pool, slot, code, scale);
}

void kit_poison_row(const struct kit_pool *pool, int64_t slot)
{
    fill_row(pool, slot, 0x7f, NAN);
    if (pool->layout->encoding == REF64_BF16)
        memset(kit_pool_row(pool, slot), 0xff,
               (size_t)pool->layout->row_bytes); /* 0x7f7f is finite in bf16 */
}

void kit_set_row(const struct kit_pool *pool, int64_t slot, const float *values, int n)
{
    const struct ref64_layout *layout = pool->layout;
    uint8_t *row = kit_pool_row(pool, slot);
    uint16_t bits[DSK_MAX_D_QK] = {0};
    float one = 1;

    for (int i = 0; i < n; i++)
        bits[i] = ref64_bf16_encode(values[i]);
    ref64_quantise_row(layout, REF64_RULE_POW2, 1, bits, row);
    for (int g = 0; g < layout->n_groups; g++)
        memcpy(row + layout->latent + 4 * g, &one, sizeof(one));
    for (int i = 0; layout->n_groups && i < layout->latent; i++)
        row[i] = ref64_e4m3_encode(i < n ? (double)values[i] : 0);
}

uint16_t *kit_bf16_normal(struct kit *k, int64_t n, double sigma)
{
    uint16_t *bits = kit_alloc(k, n * 2);

    for (int64_t i = 0; i < n; i++)
        bits[i] = ref64_bf16_encode((float)(sigma * ref64_rng_normal(&k->rng)));
    return bits;
}

int32_t *kit_indices(struct kit *k, int64_t n, int64_t n_slots, int hole_percent)
{
    int32_t *indices = kit_alloc(k, n * 4);

    for (int64_t i = 0; i < n; i++) {
        indices[i] = (int32_t)ref64_rng_below(&k->rng, n_slots);
        if (ref64_rng_below(&k->rng, 100) < hole_percent)
            indices[i] = -1;
    }
    return indices;
}

/* ---- attend -------------------------------------------------------------------------------- */

struct dsk_attend_seg kit_attend_seg(struct kit *k, struct kit_attend *a)
{
    const struct ref64_layout *layout = a->pool->layout;
    int elem = a->out_dtype == DSK_DTYPE_F32 ? 4 : 2;
    int64_t n = (int64_t)a->n_rows * a->h_q;

    if (!a->out) {
        a->out = kit_alloc(k, n * layout->d_v * elem);
        a->out_f32 = kit_alloc(k, n * layout->d_v * 4);
        a->lse = kit_alloc(k, n * 4);
        a->n_bad = kit_alloc(k, a->n_rows * 4);
    }
    return (struct dsk_attend_seg){
        .q = kit_addr(a->q),
        .out = kit_addr(a->out),
        .lse = kit_addr(a->lse),
        .indices = kit_addr(a->indices),
        .lengths = kit_addr(a->lengths),
        .sink = kit_addr(a->sink),
        .table = kit_addr(a->table),
        .n_bad = kit_addr(a->n_bad),
        .q_row_bytes = 2 * (int64_t)a->h_q * layout->d_qk,
        .q_head_bytes = 2 * layout->d_qk,
        .out_row_bytes = elem * (int64_t)a->h_q * layout->d_v,
        .out_head_bytes = elem * layout->d_v,
        .lse_row_bytes = 4 * a->h_q,
        .indices_row_bytes = 4 * (int64_t)a->topk,
        .n_rows = a->n_rows,
        .topk = a->topk,
        .space = a->table ? DSK_SPACE_LOGICAL : DSK_SPACE_PHYSICAL,
        .n_table = a->n_table,
        .seq_len = a->seq_len,
        .softmax_scale = a->scale,
    };
}

void kit_attend_run(struct kit *k, struct kit_attend *a)
{
    struct dsk_attend_seg seg = kit_attend_seg(k, a);
    struct dsk_attend_args args = {.kv = a->pool->kv,
                                   .segs = &seg,
                                   .n_segs = 1,
                                   .h_q = a->h_q,
                                   .out_dtype = a->out_dtype,
                                   .flags = a->flags};
    int64_t n = (int64_t)a->n_rows * a->h_q * a->pool->layout->d_v;
    dsk_status status = dsk_attend(k->s, &args, &k->err);

    KIT_EXPECT(status == DSK_OK, "attend: %s: %s = %s: %s", dsk_status_name(status), k->err.field,
               k->err.value, k->err.text);
    ck_assert_int_eq(dsk_stream_sync(k->s), DSK_OK);
    if (a->out_dtype == DSK_DTYPE_F32)
        memcpy(a->out_f32, a->out, (size_t)n * 4);
    else
        ref64_bf16_to_f32(a->out, a->out_f32, n);
}

void kit_expect_out(const float *got, const double *ref, int64_t n, const char *what)
{
    struct ref64_diff diff = ref64_compare_out(got, ref, n);
    char text[200];

    ref64_diff_text(&diff, n, text, sizeof(text));
    KIT_EXPECT(diff.ok, "%s: out: %s", what, text);
}

void kit_expect_lse(const float *got, const double *ref, int64_t n, const char *what)
{
    struct ref64_diff diff = ref64_compare_lse(got, ref, n);
    char text[200];

    ref64_diff_text(&diff, n, text, sizeof(text));
    KIT_EXPECT(diff.ok, "%s: lse: %s", what, text);
}

struct ref64_attend kit_ref64(const struct kit_attend *a)
{
    return (struct ref64_attend){.layout = a->pool->layout,
                                 .pool = a->pool->bytes,
                                 .page_pitch_bytes = a->pool->kv.page_pitch_bytes,
                                 .n_slots = a->pool->kv.n_slots,
                                 .raw_scale = a->pool->kv.raw_scale,
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
                                 .softmax_scale = (double)a->scale};
}

void kit_attend_check(struct kit *k, struct kit_attend *a)
{
    const struct ref64_attend ref = kit_ref64(a);
    int64_t n = (int64_t)a->n_rows * a->h_q, n_out = n * a->pool->layout->d_v;
    double *out = malloc((size_t)n_out * sizeof(*out)), *lse = malloc((size_t)n * sizeof(*lse));
    uint32_t *n_bad = malloc((size_t)a->n_rows * sizeof(*n_bad));
    char what[160];

    ck_assert(out && lse && n_bad && ref64_attend(&ref, out, lse, n_bad) == 0);
    kit_attend_run(k, a);
    snprintf(what, sizeof(what), "%s h_q=%d n_rows=%d topk=%d", a->pool->layout->name, a->h_q, a->n_rows,
             a->topk);
    kit_expect_out(a->out_f32, out, n_out, what);
    kit_expect_lse(a->lse, lse, n, what);
    for (int t = 0; t < a->n_rows; t++)
        KIT_EXPECT(a->n_bad[t] == n_bad[t], "%s: n_bad[%d] is %u, not %u", what, t, a->n_bad[t], n_bad[t]);
    free(out);
    free(lse);
    free(n_bad);
}

uint64_t kit_hash(const void *data, size_t bytes)
{
    const uint8_t *p = data;
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
    return hash;
}
