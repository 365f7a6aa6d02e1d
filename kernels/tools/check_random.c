/* Random shapes against float64. Case i takes its layout, heads and width from a shuffled list of all
 * combinations, so that a run of n cases covers n different ones; everything else is drawn. A case is a pure function
 * of the seed and its number. */
#include "check_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int heads[] = {1, 2, 7, 8, 16, 24, 32, 48, 64, 96, 127, 128};
static const int widths[] = {1, 63, 64, 65, 2047, 2048, 2051, 2112};

enum {
    n_heads = sizeof(heads) / sizeof(heads[0]),
    n_widths = sizeof(widths) / sizeof(widths[0]),
    n_combinations = REF64_N_LAYOUTS * n_heads * n_widths,
    max_rows = 9
};

/* Products that float64 has to form for one case: keeps the run's time in bounds, by fewer query rows. */
#define MAX_PRODUCTS 90e6

/* ---- the pool ------------------------------------------------------------------------------ */

struct plane {
    const struct ref64_layout *layout;
    int64_t n_slots, pitch, bytes;
    float raw_scale;
    uint8_t *rows;
    uint16_t *values; /* what the rows were made of */
    uint32_t rule;
};

static void plane_init(struct plane *p, struct ref64_rng *rng, const struct ref64_layout *layout)
{
    int64_t page = 64 * (int64_t)layout->row_bytes, n_pages;

    p->layout = layout;
    p->n_slots = 1 + ref64_rng_below(rng, ref64_rng_below(rng, 4) == 0 ? 3 : 700);
    n_pages = (p->n_slots + 63) / 64;
    p->pitch = page + (ref64_rng_below(rng, 2) ? 8 * ref64_rng_below(rng, 200) : 0);
    p->bytes = (n_pages - 1) * p->pitch + page;
    p->raw_scale = (float)(0.01 + 0.05 * ref64_rng_unit(rng));
    p->rule = ref64_rng_below(rng, 2) ? DSK_RULE_PLAIN : DSK_RULE_POW2;
    p->rows = check_malloc((size_t)p->bytes);
    p->values = check_malloc(2 * (size_t)(p->n_slots * layout->d_qk));
    memset(p->rows, 0x7f, (size_t)p->bytes); /* NaN in page tails and gaps */
    for (int64_t slot = 0; slot < p->n_slots; slot++) {
        uint16_t *values = p->values + slot * layout->d_qk;
        double sigma = 0.2 + 2 * ref64_rng_unit(rng);

        for (int i = 0; i < layout->d_qk; i++)
            values[i] = ref64_bf16_encode((float)(sigma * ref64_rng_normal(rng)));
        ref64_quantise_row(layout, (int)p->rule, p->raw_scale, values,
                           p->rows + slot / 64 * p->pitch + slot % 64 * layout->row_bytes);
    }
}

static void plane_fini(struct plane *p)
{
    free(p->rows);
    free(p->values);
}

static struct dsk_kv_view plane_view(const struct plane *p, uint64_t base)
{
    return (struct dsk_kv_view){.base = base,
                                .page_pitch_bytes = p->pitch,
                                .n_slots = p->n_slots,
                                .layout = p->layout->id,
                                .raw_scale = p->raw_scale};
}

/* ---- append and read ------------------------------------------------------------------------ */

static void run_append(struct check *c, const struct plane *p, const char *name)
{
    int64_t n = p->n_slots < 100 ? p->n_slots : 100;
    struct check_buf in, pool;
    struct dsk_append_args args = {.row_bytes = 2 * p->layout->d_qk, .n_rows = (int32_t)n, .rule = p->rule};
    struct dsk_err err = {.status = DSK_OK};
    int32_t *slots = check_malloc(4 * (size_t)n);
    uint8_t *got = check_malloc((size_t)p->bytes);
    int64_t n_wrong = 0;

    for (int64_t i = 0; i < n; i++)
        slots[i] = (int32_t)i;
    check_buf_init(c, &in, p->values, 2 * n * p->layout->d_qk);
    check_buf_init(c, &pool, NULL, p->bytes);
    args.kv = plane_view(p, pool.addr);
    args.rows = in.addr;
    args.slots = slots;
    if (check_expect(c, dsk_append(c->s, &args, &err) == DSK_OK, name, "append refused: %s: %s", err.field,
                     err.text)) {
        check_buf_read(c, &pool, got);
        for (int64_t slot = 0; slot < n; slot++) {
            int64_t at = slot / 64 * p->pitch + slot % 64 * p->layout->row_bytes;

            n_wrong += memcmp(got + at, p->rows + at, (size_t)p->layout->row_bytes) != 0;
        }
        check_expect(c, n_wrong == 0, name, "append: %lld of %lld rows differ", (long long)n_wrong,
                     (long long)n);
    }
    check_buf_fini(c, &in, name, "append's rows");
    check_buf_fini(c, &pool, name, "append's pool");
    free(slots);
    free(got);
}

static void run_read(struct check *c, const struct plane *p, const char *name)
{
    struct check_buf pool, out;
    struct dsk_read_args args = {.n_rows = p->n_slots, .mode = DSK_READ_FULL};
    struct dsk_err err = {.status = DSK_OK};
    int64_t n_wrong = 0, row_bytes = 2 * p->layout->d_qk;
    uint16_t *got = check_malloc((size_t)(p->n_slots * row_bytes)), want[DSK_MAX_D_QK];

    check_buf_init(c, &pool, p->rows, p->bytes);
    check_buf_init(c, &out, NULL, p->n_slots * row_bytes);
    args.kv = plane_view(p, pool.addr);
    args.out = out.addr;
    if (check_expect(c, dsk_read(c->s, &args, &err) == DSK_OK, name, "read refused: %s: %s", err.field,
                     err.text)) {
        check_buf_read(c, &out, got);
        for (int64_t slot = 0; slot < p->n_slots; slot++) {
            ref64_dequant_row_bf16(p->layout, p->raw_scale,
                                   p->rows + slot / 64 * p->pitch + slot % 64 * p->layout->row_bytes, want);
            n_wrong += memcmp(want, got + slot * p->layout->d_qk, (size_t)row_bytes) != 0;
        }
        check_expect(c, n_wrong == 0, name, "read: %lld rows differ", (long long)n_wrong);
    }
    check_buf_fini(c, &pool, name, "read's pool");
    check_buf_fini(c, &out, name, "read's output");
    free(got);
}

/* ---- gather and map ------------------------------------------------------------------------- */

/* Counts entries whose new index is wrong, or whose workspace row is not the row of the entry. */
static int64_t gather_errors(const struct plane *p, const int32_t *list, const int32_t *new_list, int64_t n,
                             const uint16_t *workspace, int64_t n_workspace)
{
    int64_t n_wrong = 0, d_qk = p->layout->d_qk;
    uint16_t want[DSK_MAX_D_QK];

    for (int64_t i = 0; i < n; i++) {
        int64_t slot = list[i], at = new_list[i];

        if (slot < 0 || slot >= p->n_slots || at < 0 || at >= n_workspace) {
            n_wrong += at != -1 || (slot >= 0 && slot < p->n_slots);
            continue;
        }
        ref64_dequant_row_bf16(p->layout, p->raw_scale,
                               p->rows + slot / 64 * p->pitch + slot % 64 * p->layout->row_bytes, want);
        n_wrong += memcmp(want, workspace + at * d_qk, 2 * (size_t)d_qk) != 0;
    }
    return n_wrong;
}

static void run_gather(struct check *c, const struct plane *p, struct ref64_rng *rng, const char *name)
{
    int n_rows = 1 + (int)ref64_rng_below(rng, 4), topk = 1 + (int)ref64_rng_below(rng, 200);
    int64_t n = (int64_t)n_rows * topk, n_workspace = -1;
    struct check_buf pool, list_buf, new_buf, space_buf;
    struct dsk_gather_args args = {.kv = plane_view(p, 0),
                                   .indices_row_bytes = 4 * topk,
                                   .n_rows = n_rows,
                                   .topk = topk,
                                   .n_workspace_p = &n_workspace};
    struct dsk_err err = {.status = DSK_OK};
    uint64_t bytes = dsk_gather_bytes(&args.kv, n_rows, topk);
    int32_t *list = check_malloc(4 * (size_t)n), *new_list = check_malloc(4 * (size_t)n);
    uint16_t *workspace = check_malloc(bytes);

    for (int64_t i = 0; i < n; i++)
        list[i] = (int32_t)(ref64_rng_below(rng, p->n_slots + 4) - 2);
    check_buf_init(c, &pool, p->rows, p->bytes);
    check_buf_init(c, &list_buf, list, 4 * n);
    check_buf_init(c, &new_buf, NULL, 4 * n);
    check_buf_init(c, &space_buf, NULL, (int64_t)bytes);
    args.kv.base = pool.addr;
    args.indices = list_buf.addr;
    args.new_indices = new_buf.addr;
    args.workspace = space_buf.addr;
    args.workspace_bytes = bytes;
    if (check_expect(c, dsk_gather(c->s, &args, &err) == DSK_OK, name, "gather refused: %s: %s", err.field,
                     err.text)) {
        int64_t n_wrong;

        check_buf_read(c, &new_buf, new_list);
        check_buf_read(c, &space_buf, workspace);
        n_wrong = gather_errors(p, list, new_list, n, workspace, n_workspace);
        check_expect(c, n_wrong == 0, name, "gather: %lld of %d x %d entries are wrong", (long long)n_wrong,
                     n_rows, topk);
    }
    check_buf_fini(c, &pool, name, "gather's pool");
    check_buf_fini(c, &list_buf, name, "gather's list");
    check_buf_fini(c, &new_buf, name, "gather's new list");
    check_buf_fini(c, &space_buf, name, "gather's workspace");
    free(list);
    free(new_list);
    free(workspace);
}

enum { map_rows = 3, map_table = 30, map_pages = 40 };

static void run_map(struct check *c, struct ref64_rng *rng, int topk, const char *name)
{
    int32_t tables[map_rows * map_table], seq_lens[map_rows];
    int64_t n = (int64_t)map_rows * topk, n_wrong = 0;
    int32_t *list = check_malloc(4 * (size_t)n), *got = check_malloc(4 * (size_t)n);
    struct check_buf bufs[4];
    struct dsk_map_args args = {.logical_row_bytes = 4 * topk,
                                .physical_row_bytes = 4 * topk,
                                .table_row_bytes = 4 * map_table,
                                .n_pages = map_pages,
                                .n_rows = map_rows,
                                .topk = topk,
                                .n_table = map_table};
    struct dsk_err err = {.status = DSK_OK};

    for (int i = 0; i < map_rows * map_table; i++)
        tables[i] = (int32_t)(ref64_rng_below(rng, map_pages + 4) - 2);
    for (int t = 0; t < map_rows; t++)
        seq_lens[t] = (int32_t)ref64_rng_below(rng, map_table * 64 + 100);
    for (int64_t i = 0; i < n; i++)
        list[i] = (int32_t)(ref64_rng_below(rng, map_table * 64 + 200) - 20);
    check_buf_init(c, &bufs[0], list, 4 * n);
    check_buf_init(c, &bufs[1], NULL, 4 * n);
    check_buf_init(c, &bufs[2], tables, sizeof(tables));
    check_buf_init(c, &bufs[3], seq_lens, sizeof(seq_lens));
    args.logical = bufs[0].addr;
    args.physical = bufs[1].addr;
    args.tables = bufs[2].addr;
    args.seq_lens = bufs[3].addr;
    if (check_expect(c, dsk_map(c->s, &args, &err) == DSK_OK, name, "map refused: %s: %s", err.field,
                     err.text)) {
        check_buf_read(c, &bufs[1], got);
        for (int64_t i = 0; i < n; i++) {
            const int32_t *table = tables + i / topk * map_table;

            n_wrong += got[i] != ref64_map(list[i], seq_lens[i / topk], table, map_table, map_pages);
        }
        check_expect(c, n_wrong == 0, name, "map: %lld positions are wrong", (long long)n_wrong);
    }
    for (int i = 0; i < 4; i++)
        check_buf_fini(c, &bufs[i], name, "map's lists");
    free(list);
    free(got);
}

/* ---- merge --------------------------------------------------------------------------------- */

static void run_merge(struct check *c, struct ref64_rng *rng, const char *name)
{
    int n_parts = 1 + (int)ref64_rng_below(rng, 9), n_rows = 1 + (int)ref64_rng_below(rng, 3);
    int h_q = heads[ref64_rng_below(rng, n_heads)], d_v = 1 + (int)ref64_rng_below(rng, 130);
    int64_t n = (int64_t)n_rows * h_q, n_out = n * d_v;
    float *out_parts = check_malloc(4 * (size_t)(n_parts * n_out)),
          *lse_parts = check_malloc(4 * (size_t)(n_parts * n));
    float *out = check_malloc(4 * (size_t)n_out), *lse = check_malloc(4 * (size_t)n);
    double *ref_out = check_malloc(8 * (size_t)n_out), *ref_lse = check_malloc(8 * (size_t)n);
    struct check_buf bufs[4];
    struct dsk_merge_args args = {.n_parts = n_parts,
                                  .n_rows = n_rows,
                                  .h_q = h_q,
                                  .d_v = d_v,
                                  .part_dtype = DSK_DTYPE_F32,
                                  .out_dtype = DSK_DTYPE_F32};
    struct dsk_err err = {.status = DSK_OK};

    for (int64_t i = 0; i < n_parts * n_out; i++)
        out_parts[i] = (float)ref64_rng_normal(rng);
    for (int64_t i = 0; i < n_parts * n; i++) {
        lse_parts[i] = (float)(4 * ref64_rng_normal(rng));
        if (ref64_rng_below(rng, 3) == 0) { /* an empty part, whose output is not to be looked at */
            lse_parts[i] = -INFINITY;
            memset(out_parts + i * d_v, 0xff, 4 * (size_t)d_v);
        }
    }
    ref64_merge(out_parts, lse_parts, n_parts, n, d_v, ref_out, ref_lse);
    check_buf_init(c, &bufs[0], out_parts, 4 * n_parts * n_out);
    check_buf_init(c, &bufs[1], lse_parts, 4 * n_parts * n);
    check_buf_init(c, &bufs[2], NULL, 4 * n_out);
    check_buf_init(c, &bufs[3], NULL, 4 * n);
    args.out_parts = bufs[0].addr;
    args.lse_parts = bufs[1].addr;
    args.out = bufs[2].addr;
    args.lse = bufs[3].addr;
    if (check_expect(c, dsk_merge(c->s, &args, &err) == DSK_OK, name, "merge refused: %s: %s", err.field,
                     err.text)) {
        struct ref64_diff diff;
        char text[200];

        check_buf_read(c, &bufs[2], out);
        check_buf_read(c, &bufs[3], lse);
        diff = ref64_compare_out(out, ref_out, n_out);
        ref64_diff_text(&diff, n_out, text, sizeof(text));
        check_expect(c, diff.ok, name, "merge of %d parts, %d heads, d_v %d: %s", n_parts, h_q, d_v, text);
        diff = ref64_compare_lse(lse, ref_lse, n);
        ref64_diff_text(&diff, n, text, sizeof(text));
        check_expect(c, diff.ok, name, "merge lse: %s", text);
    }
    for (int i = 0; i < 4; i++)
        check_buf_fini(c, &bufs[i], name, "merge's parts");
    free(out_parts);
    free(lse_parts);
    free(out);
    free(lse);
    free(ref_out);
    free(ref_lse);
}

/* ---- attend -------------------------------------------------------------------------------- */

struct draw {
    struct check_attend a;
    uint16_t *q;
    int32_t *indices, lengths[max_rows], *table;
    float sink[DSK_MAX_HEADS];
};

static void draw_indices(struct draw *d, struct ref64_rng *rng)
{
    struct check_attend *a = &d->a;
    int64_t limit = a->table ? a->seq_len : a->n_slots;
    int holes = (int)ref64_rng_below(rng, 5) * 25; /* per cent: none to all */

    d->indices = check_malloc(4 * (size_t)a->n_rows * (size_t)a->topk);
    for (int64_t i = 0; i < (int64_t)a->n_rows * a->topk; i++) {
        d->indices[i] = (int32_t)ref64_rng_below(rng, limit ? limit : 1);
        if (ref64_rng_below(rng, 100) < holes)
            d->indices[i] = -1;
        else if (ref64_rng_below(rng, 50) == 0)
            d->indices[i] = (int32_t[]){INT32_MIN, INT32_MAX, (int32_t)limit, -2}[ref64_rng_below(rng, 4)];
    }
    for (int j = 0; ref64_rng_below(rng, 8) == 0 && j < a->topk; j++)
        d->indices[j] = -1; /* an empty first row */
    a->indices = d->indices;
}

static void draw_table(struct draw *d, struct ref64_rng *rng)
{
    struct check_attend *a = &d->a;
    int64_t n_pages = (a->n_slots + 63) / 64;

    a->n_table = (int)(1 + ref64_rng_below(rng, n_pages + 2));
    d->table = check_malloc(4 * (size_t)a->n_table);
    for (int i = 0; i < a->n_table; i++)
        d->table[i] =
            ref64_rng_below(rng, 12) == 0 ? -1 : (int32_t)ref64_rng_below(rng, n_pages + (i % 9 == 8));
    a->seq_len = (int)ref64_rng_below(rng, a->n_table * 64 + 20);
    a->table = d->table;
}

static void draw_init(struct draw *d, struct ref64_rng *rng, const struct plane *p, int h_q, int topk)
{
    struct check_attend *a = &d->a;
    double products = (double)h_q * topk * (p->layout->d_qk + p->layout->d_v);
    int64_t n_q, most = (int64_t)(MAX_PRODUCTS / products);

    memset(d, 0, sizeof(*d));
    *a = (struct check_attend){.layout = p->layout,
                               .pool = p->rows,
                               .pool_bytes = p->bytes,
                               .page_pitch_bytes = p->pitch,
                               .n_slots = p->n_slots,
                               .raw_scale = p->raw_scale,
                               .topk = topk,
                               .h_q = h_q,
                               .softmax_scale = (float)(0.1 * ref64_rng_unit(rng)),
                               .out_dtype = ref64_rng_below(rng, 2) ? DSK_DTYPE_F32 : DSK_DTYPE_BF16,
                               .flags = ref64_rng_below(rng, 2) ? DSK_ATTEND_BATCH_INVARIANT : 0,
                               .n_repeats = 2};
    a->n_rows = (int)(1 + ref64_rng_below(rng, most < 1 ? 1 : most > max_rows ? max_rows : most));
    a->n_segs = 1 + (int)ref64_rng_below(rng, 4); /* more than rows: some are empty */
    if (ref64_rng_below(rng, 2)) {
        a->q_pad = (int)ref64_rng_below(rng, 9);
        a->out_pad = (int)ref64_rng_below(rng, 9);
        a->lse_pad = (int)ref64_rng_below(rng, 9);
        a->index_pad = (int)ref64_rng_below(rng, 70);
    }
    if (ref64_rng_below(rng, 2))
        draw_table(d, rng);
    draw_indices(d, rng);
    if (ref64_rng_below(rng, 3) == 0) {
        for (int t = 0; t < a->n_rows; t++)
            d->lengths[t] = (int32_t)(ref64_rng_below(rng, topk + 20) - 5);
        a->lengths = d->lengths;
    }
    if (ref64_rng_below(rng, 3) == 0) {
        for (int h = 0; h < h_q; h++)
            d->sink[h] = ref64_rng_below(rng, 4) == 0 ? -INFINITY : (float)(4 * ref64_rng_normal(rng));
        a->sink = d->sink;
    }
    n_q = (int64_t)a->n_rows * h_q * p->layout->d_qk;
    d->q = check_malloc(2 * (size_t)n_q);
    for (int64_t i = 0; i < n_q; i++)
        d->q[i] = ref64_bf16_encode((float)(0.5 * ref64_rng_normal(rng)));
    a->q = d->q;
}

static void draw_fini(struct draw *d)
{
    free(d->q);
    free(d->indices);
    free(d->table);
}

/* ---- all ----------------------------------------------------------------------------------- */

static void run_case(struct check *c, int i, int combination)
{
    struct ref64_rng rng = ref64_rng_init(c->seed * UINT64_C(1000003) + (uint64_t)i);
    const struct ref64_layout *layout = ref64_layout_at(combination % REF64_N_LAYOUTS);
    int h_q = heads[combination / REF64_N_LAYOUTS % n_heads];
    int topk = widths[combination / REF64_N_LAYOUTS / n_heads];
    struct plane p;
    struct draw d;
    char name[200];

    plane_init(&p, &rng, layout);
    draw_init(&d, &rng, &p, h_q, topk);
    snprintf(name, sizeof(name), "case %d: %s heads %d rows %d width %d slots %lld%s%s%s%s segs %d", i,
             layout->name, h_q, d.a.n_rows, topk, (long long)p.n_slots, d.a.table ? " logical" : "",
             d.a.lengths ? " lengths" : "", d.a.sink ? " sink" : "", d.a.q_pad + d.a.out_pad ? " padded" : "",
             d.a.n_segs);
    check_attend_run(c, &d.a, name);
    run_append(c, &p, name);
    run_read(c, &p, name);
    run_gather(c, &p, &rng, name);
    run_map(c, &rng, topk, name);
    run_merge(c, &rng, name);
    draw_fini(&d);
    plane_fini(&p);
}

void check_random(struct check *c, int n_cases)
{
    struct ref64_rng rng = ref64_rng_init(c->seed);
    int order[n_combinations], n_passed = c->n_passed, n_failed = c->n_failed;

    for (int i = 0; i < n_combinations; i++)
        order[i] = i;
    for (int i = n_combinations - 1; i > 0; i--) {
        int j = (int)ref64_rng_below(&rng, i + 1), kept = order[i];

        order[i] = order[j];
        order[j] = kept;
    }
    for (int i = 0; i < n_cases; i++)
        run_case(c, i, order[i % n_combinations]);
    printf("random: %d cases of seed %llu, %d checks passed, %d failed\n", n_cases,
           (unsigned long long)c->seed, c->n_passed - n_passed, c->n_failed - n_failed);
}
