/* Attend: values, holes, empty rows, poison, sinks, scales and batching. Memory geometry: test_memory.c. */
#include "kit.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t scaled_ids[] = {DSK_LAYOUT_SCALED_512_64, DSK_LAYOUT_SCALED_512_0,
                                      DSK_LAYOUT_SCALED_256_0};

/* An attend over f32 output, with one head and one row unless changed. */
static struct kit_attend attend_of(struct kit_pool *pool, uint16_t *q, int32_t *indices, int topk)
{
    return (struct kit_attend){.pool = pool,
                               .n_rows = 1,
                               .topk = topk,
                               .h_q = 1,
                               .q = q,
                               .indices = indices,
                               .scale = 1,
                               .out_dtype = DSK_DTYPE_F32};
}

/* ---- stored vectors ------------------------------------------------------------------------- */

static void widen(const float *from, double *to, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = (double)from[i];
}

static void run_vector(struct kit *k, const struct vectors_case *c, int out_dtype)
{
    const struct ref64_layout *layout = ref64_layout_by_name(vectors_key(c, "layout"));
    bool is_bf16 = layout->encoding == REF64_BF16;
    const struct vectors_array *kv = vectors_find(c, "kv", is_bf16 ? VECTORS_U16 : VECTORS_U8, 2);
    const struct vectors_array *q = vectors_find(c, "q", VECTORS_U16, 3);
    const struct vectors_array *indices = vectors_find(c, "indices", VECTORS_I32, 2);
    const struct vectors_array *lengths = vectors_find(c, "lengths", VECTORS_I32, 1);
    const struct vectors_array *sink = vectors_find(c, "sink", VECTORS_F32, 1);
    const struct vectors_array *out = vectors_find(c, "out", VECTORS_F32, 3);
    const struct vectors_array *lse = vectors_find(c, "lse", VECTORS_F32, 2);
    struct kit_pool pool = {.layout = layout,
                            .bytes = kv->data,
                            .kv = {.base = kit_addr(kv->data),
                                   .page_pitch_bytes = 64 * (int64_t)layout->row_bytes,
                                   .n_slots = kv->shape[0],
                                   .layout = layout->id}};
    struct kit_attend a = {.pool = &pool,
                           .n_rows = (int)q->shape[0],
                           .topk = (int)indices->shape[1],
                           .h_q = (int)q->shape[1],
                           .q = q->data,
                           .indices = indices->data,
                           .lengths = lengths ? lengths->data : NULL,
                           .sink = sink ? sink->data : NULL,
                           .scale = strtof(vectors_key(c, "softmax_scale"), NULL),
                           .out_dtype = out_dtype};
    double *ref = malloc((size_t)(out->n_elems + lse->n_elems) * sizeof(*ref));

    ck_assert_ptr_nonnull(ref);
    widen(out->data, ref, out->n_elems);
    widen(lse->data, ref + out->n_elems, lse->n_elems);
    kit_attend_run(k, &a);
    kit_expect_out(a.out_f32, ref, out->n_elems, c->name);
    kit_expect_lse(a.lse, ref + out->n_elems, lse->n_elems, c->name);
    free(ref);
}

START_TEST(stored_vectors_are_within_tolerance)
{
    char **names, text[200], path[4096];
    struct vectors_case c;
    int n, n_run = 0;
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    KIT_EXPECT(vectors_list(DSA_TEST_VECTORS, &names, &n, text, sizeof(text)) == 0, "%s", text);
    for (int i = 0; i < n; i++) {
        if (strncmp(names[i], "attend_", 7) != 0)
            continue;
        snprintf(path, sizeof(path), "%s/%s", DSA_TEST_VECTORS, names[i]);
        KIT_EXPECT(vectors_open(path, &c, text, sizeof(text)) == 0, "%s", text);
        run_vector(&k, &c, i % 2 ? DSK_DTYPE_F32 : DSK_DTYPE_BF16);
        vectors_close(&c);
        n_run++;
    }
    vectors_free_list(names, n);
    ck_assert_int_ge(n_run, 16);
    kit_close(&k);
}
END_TEST

/* ---- worked examples ------------------------------------------------------------------------ */

/* E6, DSA-03: holes before, after and between; slot 0 is poison. */
START_TEST(holes_never_touch_the_poisoned_slot)
{
    struct kit k;

    KIT_OPEN(&k, _i, 1);
    for (int l = 0; l < 3; l++) {
        struct kit_pool pool;
        uint16_t *q = kit_bf16_normal(&k, 576, 0.01);
        int32_t *list = kit_alloc(&k, 4 * 2048);
        struct kit_attend a;
        float lse = 0;

        kit_pool_fill(&k, &pool, scaled_ids[l], 6, 0x48, 1);
        for (int d = 512; d < pool.layout->d_qk;
             d++) /* 0x4848 is a large bf16 number: keep the RoPE tail out */
            q[d] = 0;
        kit_poison_row(&pool, 0);
        for (int variant = 0; variant < 4; variant++) {
            static const int widths[] = {65, 65, 2048, 2048}, lanes[] = {64, -1, 0, 2047};

            memset(list, 0xff, 4 * 2048);
            if (lanes[variant] >= 0)
                list[lanes[variant]] = 5;
            a = attend_of(&pool, q, list, widths[variant]);
            kit_attend_run(&k, &a);
            for (int d = 0; d < pool.layout->d_v; d++)
                KIT_EXPECT(a.out_f32[d] == (lanes[variant] < 0 ? 0 : 4), "variant %d value %d is %g", variant,
                           d, (double)a.out_f32[d]);
            if (variant == 0)
                lse = a.lse[0];
            ck_assert(isfinite(lse) && a.lse[0] == (lanes[variant] < 0 ? -INFINITY : lse));
            ck_assert(!signbit(a.out_f32[0]));
        }
    }
    kit_close(&k);
}
END_TEST

/* E6: a pool of one row. */
START_TEST(a_pool_of_one_row_has_slot_zero_only)
{
    int32_t list[1];
    struct kit k;
    struct kit_pool pool;
    struct kit_attend a;
    uint16_t *q;

    KIT_OPEN(&k, _i, 1);
    kit_pool_fill(&k, &pool, DSK_LAYOUT_SCALED_512_0, 1, 0x48, 1);
    q = kit_bf16_normal(&k, 512, 0.1);
    for (int slot = 0; slot < 2; slot++) {
        list[0] = slot;
        a = attend_of(&pool, q, list, 1);
        kit_attend_run(&k, &a);
        ck_assert_float_eq(a.out_f32[511], slot == 0 ? 4 : 0);
        ck_assert_int_eq(isinf(a.lse[0]) != 0, slot == 1);
        ck_assert_uint_eq(a.n_bad[0], (unsigned)slot);
    }
    kit_close(&k);
}
END_TEST

static void expect_pair(const struct kit_attend *a, double o0, double o1, double lse)
{
    ck_assert_double_eq_tol((double)a->out_f32[0], o0, 1e-5);
    ck_assert_double_eq_tol((double)a->out_f32[1], o1, 1e-5);
    ck_assert_double_eq_tol((double)a->lse[0], lse, 1e-5);
}

/* E7 */
START_TEST(two_keys_in_either_order_and_duplicates_count)
{
    struct kit k;

    KIT_OPEN(&k, _i, 1);
    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        struct kit_pool pool;
        uint16_t *q = kit_alloc(&k, 2 * DSK_MAX_D_QK);
        int32_t list[3] = {1, 2, 2};
        struct kit_attend a;

        kit_pool_make(&k, &pool, ref64_layout_at(l)->id, 4, 1);
        pool.kv.raw_scale = 1;
        kit_set_row(&pool, 1, (float[]){0, 4}, 2);
        kit_set_row(&pool, 2, (float[]){1, 8}, 2);
        memset(q, 0, 2 * DSK_MAX_D_QK);
        q[0] = ref64_bf16_encode(1);
        a = attend_of(&pool, q, list, 2);
        a.scale = 1.0986123085f;
        kit_attend_run(&k, &a);
        expect_pair(&a, 0.75, 7, 1.38629436);
        list[0] = 2;
        list[1] = 1;
        kit_attend_run(&k, &a);
        expect_pair(&a, 0.75, 7, 1.38629436);
        kit_set_row(&pool, 1, (float[]){0, 3}, 2);
        kit_set_row(&pool, 2, (float[]){0, 6}, 2);
        list[1] = 2;
        list[2] = 1;
        q[0] = 0;
        a = attend_of(&pool, q, list, 3);
        kit_attend_run(&k, &a);
        expect_pair(&a, 0, 5, 1.09861229);
    }
    kit_close(&k);
}
END_TEST

/* E9, DSA-07: the RoPE tail takes part in the score and not in the output. */
START_TEST(rope_tail_scores_and_the_scale_is_the_callers)
{
    static const uint32_t ids[] = {DSK_LAYOUT_SCALED_512_64, DSK_LAYOUT_BF16_576, DSK_LAYOUT_RAW_512_64};
    struct kit k;

    KIT_OPEN(&k, _i, 1);
    for (int l = 0; l < 3; l++) {
        float row[576] = {[0] = 1, [512] = 2};
        struct kit_pool pool;
        uint16_t *q = kit_alloc(&k, 2 * 576);
        int32_t list[2] = {0, 1};
        struct kit_attend a;

        kit_pool_make(&k, &pool, ids[l], 2, 1);
        pool.kv.raw_scale = 1;
        kit_set_row(&pool, 0, row, 576);
        memset(row, 0, sizeof(row));
        kit_set_row(&pool, 1, row, 576);
        memset(q, 0, 2 * 576);
        q[512] = ref64_bf16_encode(1);
        a = attend_of(&pool, q, list, 2);
        a.scale = 0.5f;
        kit_attend_run(&k, &a);
        expect_pair(&a, 0.7310585786, 0, 1.3132616875);
    }
    kit_close(&k);
}
END_TEST

/* DSA-07: scale s with q equals scale 2s with q / 2, bit for bit; 0 is the plain mean; negative is served. */
START_TEST(softmax_scale_multiplies_and_zero_is_the_mean)
{
    struct kit k;
    struct kit_pool pool;
    struct kit_attend a;
    int32_t *list;
    float *first;
    size_t bytes = 4 * 4 * 512;

    KIT_OPEN(&k, _i, 2);
    kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 100, 1);
    list = kit_indices(&k, 80, 100, 10);
    a = attend_of(&pool, kit_bf16_normal(&k, 4 * 576, 0.5), list, 80);
    a.h_q = 4;
    a.scale = 0.07f;
    kit_attend_check(&k, &a);
    first = kit_alloc(&k, (int64_t)bytes);
    memcpy(first, a.out_f32, bytes);
    for (int i = 0; i < 4 * 576; i++)
        a.q[i] = ref64_bf16_encode((float)ref64_bf16_decode(a.q[i]) / 2);
    a.scale *= 2;
    kit_attend_run(&k, &a);
    ck_assert_mem_eq(first, a.out_f32, bytes);
    a.scale = 0;
    kit_attend_check(&k, &a);
    ck_assert_double_eq_tol((double)a.lse[0], log((double)(80 - 0)), 0.3);
    a.scale = -0.07f;
    kit_attend_check(&k, &a);
    kit_close(&k);
}
END_TEST

/* Subnormal rope values next to a query so large that they count, in one block of heads of three. */
static void subnormals_times_large(const struct kit_pool *pool, uint16_t *q, int h_q)
{
    const int d_qk = pool->layout->d_qk;
    float row[576] = {0};

    for (int slot = 0; slot < 90; slot++) {
        row[0] = (float)(slot % 5);
        row[d_qk - 1] = ldexpf((float)(slot % 7), -129);
        kit_set_row(pool, slot, row, d_qk);
    }
    for (int h = 0; h < h_q; h++)
        q[h * d_qk + d_qk - 1] = ref64_bf16_encode(h == 17 ? 0x1p127f : 1);
}

/* One row in ten with a scale of 2^10, where the query is small. */
static void large_scales(const struct kit_pool *pool, uint16_t *q, int h_q)
{
    const struct ref64_layout *layout = pool->layout;
    const float scale = 1024;
    float row[576] = {0};

    for (int d = 0; d < 256; d++)
        row[d] = (float)(200 + d);
    for (int slot = 7; slot < 90; slot += 10) {
        kit_set_row(pool, slot, row, layout->d_qk);
        for (int g = 0; g < layout->n_groups; g++)
            memcpy(kit_pool_row(pool, slot) + layout->latent + 4 * g, &scale, sizeof(scale));
    }
    for (int i = 0; i < h_q * layout->d_qk; i++)
        q[i] = ref64_bf16_encode(1e-7f * (float)(i % 9));
}

/* What an instruction set's fast way cannot take is computed otherwise, block of heads by block and tile
 * by tile, and on any number of threads to the same bits. */
START_TEST(extreme_values_match_float64_on_any_threads)
{
    static void (*const fills[])(const struct kit_pool *, uint16_t *, int) = {subnormals_times_large,
                                                                              large_scales};
    static const uint32_t ids[] = {DSK_LAYOUT_SCALED_512_64, DSK_LAYOUT_BF16_576, DSK_LAYOUT_SCALED_256_0};

    for (int i = 0; i < 6; i++) {
        uint64_t first = 0;

        for (int n_threads = 1; n_threads <= 3; n_threads++) {
            int h_q = 40, width = 150;
            struct kit k;
            struct kit_pool pool;
            struct kit_attend a;

            KIT_OPEN(&k, _i, n_threads);
            kit_pool_make(&k, &pool, ids[i / 2], 90, 1);
            a = attend_of(&pool, kit_bf16_normal(&k, h_q * pool.layout->d_qk, 0.1),
                          kit_indices(&k, width, 90, 10), width);
            a.h_q = h_q;
            a.scale = 0.5f;
            fills[i % 2](&pool, a.q, h_q);
            kit_attend_check(&k, &a);
            uint64_t hash = kit_hash(a.out, (size_t)(h_q * pool.layout->d_v) * 4);
            first = n_threads == 1 ? hash : first;
            KIT_EXPECT(hash == first, "case %d: %d threads give other bits than one", i, n_threads);
            kit_close(&k);
        }
    }
}
END_TEST

/* ---- holes, empty rows, poison -------------------------------------------------------------- */

/* Fills list with holes by pattern and compact with what remains; returns how many remain. */
static int hole_pattern(int pattern, int width, const int32_t *slots, int32_t *list, int32_t *compact)
{
    int n = 0;

    for (int i = 0; i < width; i++) {
        bool is_valid = false;

        switch (pattern) {
        case 0: /* a masked tile first */
            is_valid = i >= 64;
            break;
        case 1: /* only the last lane */
            is_valid = i == width - 1;
            break;
        case 2: /* every other run of 16 */
            is_valid = i / 16 % 2 == 1;
            break;
        case 3: /* nothing */
            break;
        default: /* a run of holes that straddles the tile edges of 32 and 64 */
            is_valid = (i + pattern * 8) % 48 >= 20;
            break;
        }
        list[i] = is_valid ? slots[i] : -1;
        if (is_valid)
            compact[n++] = slots[i];
    }
    return n;
}

/* DSA-01 */
START_TEST(holes_anywhere_give_the_compacted_result)
{
    struct kit k;

    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        int width = 128, h_q = 16;
        struct kit_pool pool;
        int32_t *slots, *list, *compact;
        uint16_t *q;

        KIT_OPEN(&k, _i, 2);
        slots = kit_indices(&k, width, 96, 0);
        list = kit_alloc(&k, 4 * width);
        compact = kit_alloc(&k, 4 * width);
        kit_pool_make(&k, &pool, ref64_layout_at(l)->id, 96, 1);
        q = kit_bf16_normal(&k, h_q * pool.layout->d_qk, 0.3);
        kit_poison_row(&pool, 0);
        for (int i = 0; i < width; i++)
            slots[i] = slots[i] ? slots[i] : 1;
        for (int pattern = 0; pattern < 8; pattern++) {
            int n = hole_pattern(pattern, width, slots, list, compact);
            struct kit_attend a = attend_of(&pool, q, list, width),
                              b = attend_of(&pool, q, compact, n ? n : 1);

            a.h_q = b.h_q = h_q;
            a.scale = b.scale = 0.06f;
            if (n == 0)
                compact[0] = -1;
            kit_attend_check(&k, &a);
            kit_attend_check(&k, &b);
            for (int i = 0; i < h_q * pool.layout->d_v; i++)
                KIT_EXPECT(fabsf(a.out_f32[i] - b.out_f32[i]) <= 2e-5f,
                           "%s pattern %d value %d: %g, compacted %g", pool.layout->name, pattern, i,
                           (double)a.out_f32[i], (double)b.out_f32[i]);
            for (int i = 0; n == 0 && i < h_q; i++)
                ck_assert(a.lse[i] == -INFINITY && a.out_f32[i] == 0 && !signbit(a.out_f32[i]));
        }
        kit_close(&k);
    }
}
END_TEST

/* DSA-03 (b, c): slot 0, the last slot, free pages and page tails full of NaN change no bit. */
START_TEST(poison_outside_the_list_changes_no_bit)
{
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        int n_rows = 3, width = 65, h_q = 9,
            seq_len = 64 + 30; /* pages 2 and 1 of 4; the second is half used */
        int32_t table[2] = {2, 1}, *lists = kit_indices(&k, n_rows * width, seq_len, 40);
        struct kit_pool pool;
        struct kit_attend a;
        size_t bytes;
        void *clean;

        kit_pool_make(&k, &pool, ref64_layout_at(l)->id, 256, 2);
        for (int i = 0; i < width - 1; i++)
            lists[i] = -1;
        lists[width - 1] = 5;
        lists[width] = seq_len; /* the first position that is not there: in the poisoned tail */
        a = attend_of(&pool, kit_bf16_normal(&k, n_rows * h_q * pool.layout->d_qk, 0.3), lists, width);
        a.n_rows = n_rows;
        a.h_q = h_q;
        a.scale = 0.06f;
        a.table = table;
        a.n_table = 2;
        a.seq_len = seq_len;
        for (int64_t slot = 0; slot < 256; slot++) {
            bool is_used = slot / 64 == 2 || (slot / 64 == 1 && slot % 64 < 30);

            if (!is_used)
                memset(kit_pool_row(&pool, slot), 0, (size_t)pool.layout->row_bytes);
        }
        kit_attend_check(&k, &a);
        bytes = (size_t)(n_rows * h_q * pool.layout->d_v) * 4;
        clean = kit_alloc(&k, (int64_t)bytes);
        memcpy(clean, a.out, bytes);
        for (int64_t slot = 0; slot < 256; slot++) {
            bool is_used = slot / 64 == 2 || (slot / 64 == 1 && slot % 64 < 30);

            if (!is_used)
                kit_poison_row(&pool, slot);
        }
        kit_attend_run(&k, &a);
        KIT_EXPECT(memcmp(clean, a.out, bytes) == 0, "%s: poison changed the result", pool.layout->name);
        kit_attend_check(&k, &a);
    }
    kit_close(&k);
}
END_TEST

/* A listed row that is NaN must show: positions of anomalies match float64. */
START_TEST(a_listed_nan_row_is_not_hidden)
{
    struct kit k;
    struct kit_pool pool;
    struct kit_attend a;
    int32_t list[4] = {1, 2, 3, -1};

    KIT_OPEN(&k, _i, 1);
    kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 4, 1);
    kit_poison_row(&pool, 2);
    a = attend_of(&pool, kit_bf16_normal(&k, 2 * 576, 0.3), list, 4);
    a.h_q = 2;
    a.scale = 0.06f;
    kit_attend_check(&k, &a);
    ck_assert(isnan(a.out_f32[0]) && isnan(a.lse[1]));
    kit_close(&k);
}
END_TEST

/* The same for lists that take several tiles and chunks, wherever the row stands in them. */
START_TEST(a_nan_row_spoils_its_own_query_row_wherever_it_stands)
{
    static const int lanes[] = {0, 63, 64, 511, 512, 1023, 1024, 1499};
    struct kit k;

    for (size_t i = 0; i < sizeof(lanes) / sizeof(lanes[0]); i++) {
        struct kit_pool pool;
        struct kit_attend a;
        int h_q = i % 2 ? 20 : 2;

        KIT_OPEN(&k, _i, 1 + (int)(i / 2 % 2));
        kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 100, 1);
        kit_poison_row(&pool, 99);
        a = attend_of(&pool, kit_bf16_normal(&k, 2 * h_q * 576, 0.3), kit_indices(&k, 2 * 1500, 99, 2), 1500);
        a.indices[lanes[i]] = 99;
        a.n_rows = 2;
        a.h_q = h_q;
        a.scale = 0.06f;
        kit_attend_check(&k, &a);
        ck_assert(isnan(a.lse[0]) && isnan(a.lse[h_q - 1]) && isfinite(a.lse[h_q]));
        kit_close(&k);
    }
}
END_TEST

/* C2, C9: what is invalid is ignored and counted. */
START_TEST(invalid_entries_are_ignored_and_counted)
{
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int space = DSK_SPACE_PHYSICAL; space <= DSK_SPACE_LOGICAL; space++) {
        int width = 70, n_rows = 4;
        int32_t table[] = {1, -1, 0, 7, INT32_MAX, INT32_MIN}, lengths[] = {70, 33, 0, -5};
        int32_t *lists = kit_indices(&k, n_rows * width, 150, 20);
        struct kit_pool pool;
        struct kit_attend a;

        kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_256_0, 150, 1);
        a = attend_of(&pool, kit_bf16_normal(&k, n_rows * 3 * 256, 0.3), lists, width);
        for (int i = 0; i < n_rows * width; i += 9)
            lists[i] =
                (int32_t[]){150, -2, INT32_MIN, INT32_MAX, 149, 128, 127, 64, 300, 383, 384}[i / 9 % 11];
        a.n_rows = n_rows;
        a.h_q = 3;
        a.scale = 0.06f;
        a.lengths = lengths;
        if (space == DSK_SPACE_LOGICAL) {
            a.table = table;
            a.n_table = 6;
            a.seq_len = 400;
        }
        kit_attend_check(&k, &a);
        ck_assert_uint_gt(a.n_bad[0], 0);
        ck_assert_uint_eq(a.n_bad[2] + a.n_bad[3], 0);
        lengths[0] = INT32_MAX; /* clamped to the width */
        kit_attend_check(&k, &a);
    }
    kit_close(&k);
}
END_TEST

/* DSA-05: positions past the table of the sequence, and a padded query row without a single entry. */
START_TEST(positions_past_the_table_and_padded_rows_are_empty)
{
    struct kit k;
    struct kit_pool pool;
    int32_t table[4] = {3, 2, 1, 0}, lists[4 * 8];
    struct kit_attend a;

    KIT_OPEN(&k, _i, 2);
    kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 256, 1);
    for (int i = 0; i < 32; i++)
        lists[i] = i < 24 ? 250 + i % 10 : -1;
    a = attend_of(&pool, kit_bf16_normal(&k, 4 * 2 * 576, 0.3), lists, 8);
    a.n_rows = 4;
    a.h_q = 2;
    a.scale = 0.06f;
    a.table = table;
    a.n_table = 4;
    for (a.seq_len = 252; a.seq_len <= 260; a.seq_len++)
        kit_attend_check(&k, &a);
    ck_assert(a.lse[6] == -INFINITY && a.lse[7] == -INFINITY && a.out_f32[3 * 2 * 512] == 0);
    kit_close(&k);
}
END_TEST

/* FORMATS 5: the sink scales the output and leaves lse alone. */
START_TEST(sinks_scale_the_output_and_leave_lse)
{
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        float sink[8] = {-INFINITY, 0, 1.5f, -3, 80, -80, 700, -1e30f};
        struct kit_pool pool;
        int32_t *lists = kit_indices(&k, 2 * 50, 60, 10);
        struct kit_attend a;

        kit_pool_make(&k, &pool, ref64_layout_at(l)->id, 60, 1);
        memset(lists + 50, 0xff, 200); /* an empty row with a sink is still +0 and -inf */
        a = attend_of(&pool, kit_bf16_normal(&k, 2 * 8 * pool.layout->d_qk, 0.3), lists, 50);
        a.n_rows = 2;
        a.h_q = 8;
        a.scale = 0.06f;
        a.sink = sink;
        kit_attend_check(&k, &a);
        for (int i = 8 * pool.layout->d_v; i < 2 * 8 * pool.layout->d_v; i++)
            KIT_EXPECT(a.out_f32[i] == 0 && !signbit(a.out_f32[i]), "value %d of an empty row", i);
    }
    kit_close(&k);
}
END_TEST

/* Scores far beyond the range of exp must not overflow, also when they come in rising order. */
START_TEST(large_scores_do_not_overflow)
{
    struct kit k;
    struct kit_pool pool;
    uint16_t *q;
    int32_t list[70];
    struct kit_attend a;

    KIT_OPEN(&k, _i, 1);
    kit_pool_make(&k, &pool, DSK_LAYOUT_BF16_512, 70, 1);
    q = kit_alloc(&k, 2 * 2 * 512);
    memset(q, 0, 2 * 2 * 512);
    q[0] = ref64_bf16_encode(1);
    q[512] = ref64_bf16_encode(-1);
    for (int i = 0; i < 70; i++) {
        kit_set_row(&pool, i, (float[]){(float)((i - 35) * 256), (float)i, 1}, 3);
        list[i] = i;
    }
    a = attend_of(&pool, q, list, 70);
    a.h_q = 2;
    kit_attend_check(&k, &a);
    ck_assert_float_eq(a.out_f32[1], 69);
    ck_assert_float_eq(a.out_f32[512 + 1], 0);
    ck_assert_float_eq(a.lse[0], 34 * 256);
    kit_close(&k);
}
END_TEST

/* ---- shapes --------------------------------------------------------------------------------- */

/* Every head count takes the remainder paths of some tile; widths likewise. */
START_TEST(every_head_count_matches_float64)
{
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int h_q = 1; h_q <= DSK_MAX_HEADS; h_q += KIT_SIZE(1, 9)) {
        static const int widths[] = {1, 2, 3, 15, 16, 17, 31, 33};
        struct kit sub;
        struct kit_pool pool;
        int width = widths[h_q % 8];
        struct kit_attend a;

        ck_assert(kit_open(&sub, _i, 1 + h_q % 2));
        kit_pool_make(&sub, &pool, ref64_layout_at(h_q % REF64_N_LAYOUTS)->id, 40, 1);
        a = attend_of(&pool, kit_bf16_normal(&sub, 2 * h_q * pool.layout->d_qk, 0.3),
                      kit_indices(&sub, 2 * width, 40, 10), width);
        a.n_rows = 2;
        a.h_q = h_q;
        a.scale = 0.06f;
        a.out_dtype = h_q % 3 ? DSK_DTYPE_BF16 : DSK_DTYPE_F32;
        kit_attend_check(&sub, &a);
        kit_close(&sub);
    }
    kit_close(&k);
}
END_TEST

/* DSA-04: widths that are no multiple of anything, for all layouts. */
START_TEST(odd_widths_match_float64)
{
    static const int widths[] = {63, 64, 65, 127, 513, 2051};
    struct kit k;

    KIT_OPEN(&k, _i, 2);
    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        struct kit_pool pool;

        kit_pool_make(&k, &pool, ref64_layout_at(l)->id, 300, 1);
        for (int w = 0; w < KIT_SIZE(6, 4); w++) {
            struct kit_attend a = attend_of(&pool, kit_bf16_normal(&k, 3 * pool.layout->d_qk, 0.3),
                                            kit_indices(&k, widths[w], 300, 5), widths[w]);

            a.h_q = 3;
            a.scale = 0.06f;
            kit_attend_check(&k, &a);
            if (k.n_bufs > KIT_MAX_BUFS - 10) { /* start again: one kit holds a limited number of buffers */
                kit_close(&k);
                ck_assert(kit_open(&k, _i, 2));
                kit_pool_make(&k, &pool, ref64_layout_at(l)->id, 300, 1);
            }
        }
    }
    kit_close(&k);
}
END_TEST

enum { n_segs = 5 };

/* Five requests of different shapes in one launch, each alone and together; with the flag, bit for bit. */
static void check_batch(struct kit *k, uint32_t id, uint32_t flags)
{
    static const int rows[n_segs] = {1, 0, 4, 2, 1}, widths[n_segs] = {65, 8, 33, 200, 1};
    struct kit_pool pool;
    struct kit_attend a[n_segs];
    struct dsk_attend_seg segs[n_segs];
    struct dsk_attend_args args = {
        .segs = segs, .n_segs = n_segs, .h_q = 6, .out_dtype = DSK_DTYPE_F32, .flags = flags};
    int32_t table[3] = {2, 0, 1};
    uint64_t alone[n_segs] = {0};

    kit_pool_make(k, &pool, id, 192, 1);
    args.kv = pool.kv;
    for (int i = 0; i < n_segs; i++) {
        a[i] = attend_of(&pool, kit_bf16_normal(k, (rows[i] + 1) * 6 * pool.layout->d_qk, 0.3),
                         kit_indices(k, (rows[i] + 1) * widths[i], 192, 10), widths[i]);
        a[i].n_rows = rows[i];
        a[i].h_q = 6;
        a[i].scale = 0.01f * (float)(i + 1);
        a[i].flags = flags;
        if (i % 2 == 0) {
            a[i].table = table;
            a[i].n_table = 3;
            a[i].seq_len = 100 + i;
        }
        if (rows[i] > 0)
            kit_attend_check(k, &a[i]);
        segs[i] = kit_attend_seg(k, &a[i]);
        alone[i] = kit_hash(a[i].out, (size_t)(rows[i] * 6 * pool.layout->d_v) * 4);
        memset(a[i].out, 0xee, (size_t)(rows[i] * 6 * pool.layout->d_v) * 4);
    }
    ck_assert_int_eq(dsk_attend(k->s, &args, &k->err), DSK_OK);
    for (int i = 0; i < n_segs; i++) {
        size_t bytes = (size_t)(rows[i] * 6 * pool.layout->d_v) * 4;

        if (flags & DSK_ATTEND_BATCH_INVARIANT) {
            KIT_EXPECT(kit_hash(a[i].out, bytes) == alone[i], "segment %d depends on its neighbours", i);
        } else {
            float *together = kit_alloc(k, (int64_t)bytes + 4);

            memcpy(together, a[i].out, bytes);
            if (rows[i] > 0)
                kit_attend_run(k, &a[i]);
            for (size_t j = 0; j < bytes / 4; j++)
                KIT_EXPECT(fabsf(together[j] - a[i].out_f32[j]) <= 2e-5f, "segment %d value %zu", i, j);
        }
    }
}

START_TEST(segments_in_one_launch_are_what_they_are_alone)
{
    struct kit k;

    for (int l = 0; l < REF64_N_LAYOUTS; l++) {
        KIT_OPEN(&k, _i, 2);
        check_batch(&k, ref64_layout_at(l)->id, 0);
        check_batch(&k, ref64_layout_at(l)->id, DSK_ATTEND_BATCH_INVARIANT);
        kit_close(&k);
    }
}
END_TEST

START_TEST(a_launch_of_nothing_is_ok)
{
    struct kit k;
    struct kit_pool pool;
    struct dsk_attend_args args = {.n_segs = 0, .h_q = 1, .out_dtype = DSK_DTYPE_BF16};

    KIT_OPEN(&k, _i, 2);
    kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 1, 1);
    args.kv = pool.kv;
    ck_assert_int_eq(dsk_attend(k.s, &args, &k.err), DSK_OK);
    kit_close(&k);
}
END_TEST

/* Batch invariance across thread counts too: splitting work differently may not show in the bits. */
START_TEST(batch_invariant_bits_do_not_depend_on_threads)
{
    uint64_t first = 0;

    for (int n_threads = 1; n_threads <= 4; n_threads++) {
        struct kit k;
        struct kit_pool pool;
        struct kit_attend a;
        uint64_t hash;

        KIT_OPEN(&k, _i, n_threads);
        kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 500, 1);
        a = attend_of(&pool, kit_bf16_normal(&k, 16 * 576, 0.3), kit_indices(&k, 700, 500, 5), 700);
        a.h_q = 16;
        a.scale = 0.06f;
        a.flags = DSK_ATTEND_BATCH_INVARIANT;
        kit_attend_check(&k, &a);
        hash = kit_hash(a.out, 16 * 512 * 4);
        if (n_threads == 1)
            first = hash;
        KIT_EXPECT(hash == first, "%d threads give other bits than one", n_threads);
        kit_close(&k);
    }
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    const TTest *const tests[] = {stored_vectors_are_within_tolerance,
                                  holes_never_touch_the_poisoned_slot,
                                  a_pool_of_one_row_has_slot_zero_only,
                                  two_keys_in_either_order_and_duplicates_count,
                                  rope_tail_scores_and_the_scale_is_the_callers,
                                  softmax_scale_multiplies_and_zero_is_the_mean,
                                  holes_anywhere_give_the_compacted_result,
                                  poison_outside_the_list_changes_no_bit,
                                  a_listed_nan_row_is_not_hidden,
                                  a_nan_row_spoils_its_own_query_row_wherever_it_stands,
                                  invalid_entries_are_ignored_and_counted,
                                  positions_past_the_table_and_padded_rows_are_empty,
                                  sinks_scale_the_output_and_leave_lse,
                                  large_scores_do_not_overflow,
                                  extreme_values_match_float64_on_any_threads,
                                  every_head_count_matches_float64,
                                  odd_widths_match_float64,
                                  segments_in_one_launch_are_what_they_are_alone,
                                  a_launch_of_nothing_is_ok,
                                  batch_invariant_bits_do_not_depend_on_threads};
    Suite *suite = suite_create("attend");
    TCase *tcase = tcase_create("attend");

    (void)max;
    tcase_set_timeout(tcase, 180);
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++)
        tcase_add_loop_test(tcase, tests[i], KIT_FIRST_ISA, KIT_END_ISA);
    suite_add_tcase(suite, tcase);
    suites_p[0] = suite;
    return 1;
}
