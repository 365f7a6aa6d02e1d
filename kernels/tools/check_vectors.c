/* Reference folders: each kind through every path that can give its result. */
#include "check_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

/* ---- quantize ------------------------------------------------------------------------------ */

static bool run_quantize(struct check *c, const struct vectors_case *v)
{
    const char *layout_name = vectors_key(v, "layout"), *rule_name = vectors_key(v, "rule");
    const struct ref64_layout *layout = layout_name ? ref64_layout_by_name(layout_name) : NULL;
    const struct vectors_array *input = vectors_find(v, "input", VECTORS_U16, 2);
    const struct vectors_array *rows = vectors_find(v, "rows", VECTORS_U8, 2);
    struct check_buf in, pool;
    struct dsk_append_args args;
    struct dsk_err err = {.status = DSK_OK};
    int32_t *slots;
    uint8_t *got;
    int64_t n, first_bad = -1;

    if (!layout || !input || !rows || !rule_name || rows->shape[1] != layout->row_bytes
        || input->shape[1] != layout->d_qk || input->shape[0] != rows->shape[0])
        return false;
    n = rows->shape[0];
    slots = check_malloc(4 * (size_t)n);
    got = check_malloc((size_t)rows->n_elems);
    for (int64_t i = 0; i < n; i++)
        slots[i] = (int32_t)i;
    check_buf_init(c, &in, input->data, 2 * input->n_elems);
    check_buf_init(c, &pool, NULL, rows->n_elems);
    args = (struct dsk_append_args){.kv = {.base = pool.addr,
                                           .page_pitch_bytes = DSK_PAGE_TOKENS * (int64_t)layout->row_bytes,
                                           .n_slots = n,
                                           .layout = layout->id,
                                           .raw_scale = 1},
                                    .rows = in.addr,
                                    .row_bytes = 2 * layout->d_qk,
                                    .slots = slots,
                                    .n_rows = (int32_t)n,
                                    .rule = (uint32_t)ref64_rule_by_name(rule_name)};
    if (check_expect(c, dsk_append(c->s, &args, &err) == DSK_OK, v->name, "refused: %s: %s", err.field,
                     err.text)) {
        check_buf_read(c, &pool, got);
        for (int64_t i = 0; i < rows->n_elems && first_bad < 0; i++)
            first_bad = got[i] == ((uint8_t *)rows->data)[i] ? -1 : i;
        check_expect(c, first_bad < 0, v->name, "row %lld byte %lld differs",
                     (long long)(first_bad / layout->row_bytes), (long long)(first_bad % layout->row_bytes));
    }
    check_buf_fini(c, &in, v->name, "the input");
    check_buf_fini(c, &pool, v->name, "the pool");
    free(slots);
    free(got);
    return true;
}

/* ---- attend -------------------------------------------------------------------------------- */

static double *widen(const struct vectors_array *a)
{
    double *values = check_malloc((size_t)a->n_elems * sizeof(*values));

    for (int64_t i = 0; i < a->n_elems; i++)
        values[i] = (double)((float *)a->data)[i];
    return values;
}

/* The same list as positions of a sequence whose pages are the pool's in another order. Entries outside the pool
 * stay outside the sequence. */
static void run_logical(struct check *c, const struct check_attend *a, bool is_permuted, const char *name)
{
    struct check_attend logical = *a;
    int n_pages = (int)((a->n_slots + 63) / 64), *table = check_malloc((size_t)n_pages * sizeof(*table));
    int32_t *list = check_malloc(4 * (size_t)a->n_rows * (size_t)a->topk);

    for (int i = 0; i < n_pages; i++)
        table[i] = is_permuted ? n_pages - 1 - i : i;
    for (int64_t i = 0; i < (int64_t)a->n_rows * a->topk; i++) {
        int32_t slot = a->indices[i];

        list[i] = slot;
        if (slot >= a->n_slots)
            list[i] = INT32_MAX; /* another page order may give the position a row */
        else if (slot >= 0 && is_permuted)
            list[i] = (n_pages - 1 - slot / 64) * 64 + slot % 64;
    }
    logical.indices = list;
    logical.table = table;
    logical.n_table = n_pages;
    logical.seq_len = n_pages * 64;
    check_attend_run(c, &logical, name);
    free(table);
    free(list);
}

/* Gathers the listed rows as bf16 and attends over the workspace with the rewritten list. Where the rows lose bits on
 * the way (scales that are no powers of two), the result is compared with float64 over the workspace instead. */
static void run_gathered(struct check *c, const struct check_attend *a, bool is_exact, int branch,
                         const char *name)
{
    static const char *const bf16_names[] = {"bf16_576", "bf16_512", "bf16_256"};
    const struct ref64_layout *layout = NULL;
    int64_t n_entries = (int64_t)a->n_rows * a->topk, n_workspace = 0;
    int64_t bytes = (branch == 1 ? n_entries : a->n_slots) * 2 * a->layout->d_qk;
    struct check_attend gathered = *a;
    struct check_buf pool, indices, new_indices, workspace;
    struct dsk_gather_args args;
    struct dsk_err err = {.status = DSK_OK};
    uint8_t *rows = check_malloc((size_t)bytes);
    int32_t *list = check_malloc(4 * (size_t)n_entries);

    for (int i = 0; i < 3; i++) {
        if (ref64_layout_by_name(bf16_names[i])->d_qk == a->layout->d_qk)
            layout = ref64_layout_by_name(bf16_names[i]);
    }
    check_buf_init(c, &pool, a->pool, a->pool_bytes);
    check_buf_init(c, &indices, a->indices, 4 * n_entries);
    check_buf_init(c, &new_indices, NULL, 4 * n_entries);
    check_buf_init(c, &workspace, NULL, bytes);
    args =
        (struct dsk_gather_args){.kv = {.base = pool.addr,
                                        .page_pitch_bytes = DSK_PAGE_TOKENS * (int64_t)a->layout->row_bytes,
                                        .n_slots = a->n_slots,
                                        .layout = a->layout->id,
                                        .raw_scale = a->raw_scale},
                                 .indices = indices.addr,
                                 .new_indices = new_indices.addr,
                                 .workspace = workspace.addr,
                                 .workspace_bytes = (uint64_t)bytes,
                                 .indices_row_bytes = 4 * (int64_t)a->topk,
                                 .n_rows = a->n_rows,
                                 .topk = a->topk,
                                 .branch = branch,
                                 .n_workspace_p = &n_workspace};
    if (check_expect(c, dsk_gather(c->s, &args, &err) == DSK_OK, name, "refused: %s: %s", err.field,
                     err.text)) {
        check_buf_read(c, &workspace, rows);
        check_buf_read(c, &new_indices, list);
        gathered.layout = layout;
        gathered.pool = rows;
        gathered.pool_bytes = bytes;
        gathered.n_slots = n_workspace;
        gathered.indices = list;
        if (!is_exact)
            gathered.ref_out = gathered.ref_lse = NULL;
        check_attend_run(c, &gathered, name);
    }
    check_buf_fini(c, &pool, name, "the pool");
    check_buf_fini(c, &indices, name, "indices");
    check_buf_fini(c, &new_indices, name, "new indices");
    check_buf_fini(c, &workspace, name, "the workspace");
    free(rows);
    free(list);
}

static void run_attend_paths(struct check *c, struct check_attend *a, bool is_exact, const char *case_name)
{
    static const char *const paths[] = {"physical bf16",  "physical f32", "identity table",
                                        "permuted table", "gathered",     "whole plane"};
    char name[128];

    for (int path = 0; path < 6; path++) {
        snprintf(name, sizeof(name), "%s, %s", case_name, paths[path]);
        a->out_dtype = path == 0 ? DSK_DTYPE_BF16 : DSK_DTYPE_F32;
        if (path < 2)
            check_attend_run(c, a, name);
        else if (path < 4)
            run_logical(c, a, path == 3, name);
        else
            run_gathered(c, a, is_exact, path == 4 ? 1 : 2, name);
    }
}

static bool run_attend(struct check *c, const struct vectors_case *v)
{
    const char *layout_name = vectors_key(v, "layout"), *scale = vectors_key(v, "softmax_scale");
    const char *rule = vectors_key(v, "rule");
    const struct ref64_layout *layout = layout_name ? ref64_layout_by_name(layout_name) : NULL;
    bool is_bf16 = layout && layout->encoding == REF64_BF16;
    const struct vectors_array *kv = vectors_find(v, "kv", is_bf16 ? VECTORS_U16 : VECTORS_U8, 2);
    const struct vectors_array *q = vectors_find(v, "q", VECTORS_U16, 3);
    const struct vectors_array *indices = vectors_find(v, "indices", VECTORS_I32, 2);
    const struct vectors_array *lengths = vectors_find(v, "lengths", VECTORS_I32, 1);
    const struct vectors_array *sink = vectors_find(v, "sink", VECTORS_F32, 1);
    const struct vectors_array *out = vectors_find(v, "out", VECTORS_F32, 3);
    const struct vectors_array *lse = vectors_find(v, "lse", VECTORS_F32, 2);
    struct check_attend a;
    double *ref_out, *ref_lse;

    if (!layout || !kv || !q || !indices || !out || !lse || !scale || q->shape[2] != layout->d_qk
        || kv->shape[1] * (is_bf16 ? 2 : 1) != layout->row_bytes || indices->shape[0] != q->shape[0]
        || out->n_elems != q->shape[0] * q->shape[1] * layout->d_v
        || lse->n_elems != q->shape[0] * q->shape[1])
        return false;
    ref_out = widen(out);
    ref_lse = widen(lse);
    a = (struct check_attend){.layout = layout,
                              .pool = kv->data,
                              .pool_bytes = kv->shape[0] * layout->row_bytes,
                              .n_slots = kv->shape[0],
                              .raw_scale = 1,
                              .q = q->data,
                              .indices = indices->data,
                              .lengths = lengths ? lengths->data : NULL,
                              .sink = sink ? sink->data : NULL,
                              .n_rows = (int)q->shape[0],
                              .topk = (int)indices->shape[1],
                              .h_q = (int)q->shape[1],
                              .softmax_scale = strtof(scale, NULL),
                              .n_repeats = 2,
                              .ref_out = ref_out,
                              .ref_lse = ref_lse};
    run_attend_paths(c, &a, is_bf16 || (rule && strcmp(rule, "pow2") == 0), v->name);
    free(ref_out);
    free(ref_lse);
    return true;
}

/* ---- page tables and merge ------------------------------------------------------------------ */

static bool run_pagetable(struct check *c, const struct vectors_case *v)
{
    const struct vectors_array *logical = vectors_find(v, "logical", VECTORS_I32, 2);
    const struct vectors_array *physical = vectors_find(v, "physical", VECTORS_I32, 2);
    const struct vectors_array *table = vectors_find(v, "table", VECTORS_I32, 2);
    const struct vectors_array *lengths = vectors_find(v, "lengths", VECTORS_I32, 1);
    struct check_buf bufs[4];
    struct dsk_map_args args;
    struct dsk_err err = {.status = DSK_OK};
    int32_t *got;
    int64_t first_bad = -1;

    if (!logical || !physical || !table || !lengths || logical->n_elems != physical->n_elems)
        return false;
    got = check_malloc(4 * (size_t)physical->n_elems);
    check_buf_init(c, &bufs[0], logical->data, 4 * logical->n_elems);
    check_buf_init(c, &bufs[1], NULL, 4 * physical->n_elems);
    check_buf_init(c, &bufs[2], table->data, 4 * table->n_elems);
    check_buf_init(c, &bufs[3], lengths->data, 4 * lengths->n_elems);
    args = (struct dsk_map_args){.logical = bufs[0].addr,
                                 .physical = bufs[1].addr,
                                 .tables = bufs[2].addr,
                                 .seq_lens = bufs[3].addr,
                                 .logical_row_bytes = 4 * logical->shape[1],
                                 .physical_row_bytes = 4 * logical->shape[1],
                                 .table_row_bytes = 4 * table->shape[1],
                                 .n_pages = 1 << 20,
                                 .n_rows = (int32_t)logical->shape[0],
                                 .topk = (int32_t)logical->shape[1],
                                 .n_table = (int32_t)table->shape[1]};
    if (check_expect(c, dsk_map(c->s, &args, &err) == DSK_OK, v->name, "refused: %s: %s", err.field,
                     err.text)) {
        check_buf_read(c, &bufs[1], got);
        for (int64_t i = 0; i < physical->n_elems && first_bad < 0; i++)
            first_bad = got[i] == ((int32_t *)physical->data)[i] ? -1 : i;
        check_expect(c, first_bad < 0, v->name, "row %lld lane %lld differs",
                     (long long)(first_bad / args.topk), (long long)(first_bad % args.topk));
    }
    for (int i = 0; i < 4; i++)
        check_buf_fini(c, &bufs[i], v->name, "a list");
    free(got);
    return true;
}

static bool run_merge(struct check *c, const struct vectors_case *v)
{
    const struct vectors_array *out_parts = vectors_find(v, "out_parts", VECTORS_F32, 4);
    const struct vectors_array *lse_parts = vectors_find(v, "lse_parts", VECTORS_F32, 3);
    const struct vectors_array *out = vectors_find(v, "out", VECTORS_F32, 3);
    const struct vectors_array *lse = vectors_find(v, "lse", VECTORS_F32, 2);
    struct check_buf bufs[4];
    struct dsk_merge_args args;
    struct dsk_err err = {.status = DSK_OK};
    double *ref_out, *ref_lse;
    float *got, *got_lse;

    if (!out_parts || !lse_parts || !out || !lse || out_parts->n_elems != out->n_elems * out_parts->shape[0])
        return false;
    ref_out = widen(out);
    ref_lse = widen(lse);
    got = check_malloc(4 * (size_t)out->n_elems);
    got_lse = check_malloc(4 * (size_t)lse->n_elems);
    check_buf_init(c, &bufs[0], out_parts->data, 4 * out_parts->n_elems);
    check_buf_init(c, &bufs[1], lse_parts->data, 4 * lse_parts->n_elems);
    check_buf_init(c, &bufs[2], NULL, 4 * out->n_elems);
    check_buf_init(c, &bufs[3], NULL, 4 * lse->n_elems);
    args = (struct dsk_merge_args){.out_parts = bufs[0].addr,
                                   .lse_parts = bufs[1].addr,
                                   .out = bufs[2].addr,
                                   .lse = bufs[3].addr,
                                   .n_parts = (int32_t)out_parts->shape[0],
                                   .n_rows = (int32_t)out->shape[0],
                                   .h_q = (int32_t)out->shape[1],
                                   .d_v = (int32_t)out->shape[2],
                                   .part_dtype = DSK_DTYPE_F32,
                                   .out_dtype = DSK_DTYPE_F32};
    if (check_expect(c, dsk_merge(c->s, &args, &err) == DSK_OK, v->name, "refused: %s: %s", err.field,
                     err.text)) {
        struct ref64_diff diff;
        char text[200];

        check_buf_read(c, &bufs[2], got);
        check_buf_read(c, &bufs[3], got_lse);
        diff = ref64_compare_out(got, ref_out, out->n_elems);
        ref64_diff_text(&diff, out->n_elems, text, sizeof(text));
        check_expect(c, diff.ok, v->name, "out: %s", text);
        diff = ref64_compare_lse(got_lse, ref_lse, lse->n_elems);
        ref64_diff_text(&diff, lse->n_elems, text, sizeof(text));
        check_expect(c, diff.ok, v->name, "lse: %s", text);
    }
    for (int i = 0; i < 4; i++)
        check_buf_fini(c, &bufs[i], v->name, "a part");
    free(ref_out);
    free(ref_lse);
    free(got);
    free(got_lse);
    return true;
}

/* ---- all ----------------------------------------------------------------------------------- */

static void run_folder(struct check *c, const char *dir, const char *name)
{
    static const struct {
        const char *prefix;
        bool (*run)(struct check *c,
                    const struct vectors_case *v); /* false: arrays missing or of odd shapes */
    } kinds[] = {{"quantize_", run_quantize},
                 {"attend_", run_attend},
                 {"pagetable_", run_pagetable},
                 {"merge_", run_merge}};
    char path[4096], text[4300] = "";
    struct vectors_case v;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    if (!check_expect(c, vectors_open(path, &v, text, sizeof(text)) == 0, name, "%s", text))
        return;
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (strncmp(name, kinds[i].prefix, strlen(kinds[i].prefix)) == 0) {
            check_expect(c, kinds[i].run(c, &v), name, "its arrays are missing or do not fit each other");
            vectors_close(&v);
            return;
        }
    }
    check_expect(c, false, name, "no kind of case is named like that");
    vectors_close(&v);
}

int check_vectors(struct check *c, const char *dir)
{
    char **names, text[4300];
    int n, n_passed = c->n_passed, n_failed = c->n_failed;

    if (vectors_list(dir, &names, &n, text, sizeof(text)) != 0) {
        fprintf(stderr, "dsk-check: %s\n", text);
        return -1;
    }
    for (int i = 0; i < n; i++)
        run_folder(c, dir, names[i]);
    vectors_free_list(names, n);
    printf("vectors: %d folders of %s, %d checks passed, %d failed\n", n, dir, c->n_passed - n_passed,
           c->n_failed - n_failed);
    return n > 0 ? 0 : -1;
}
