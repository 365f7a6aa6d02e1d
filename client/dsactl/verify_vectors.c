/* verify_vectors.c - reference vectors through a live server. Folders for other layouts, and those of
 * operations that the service does not offer by themselves, are skipped by name. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/dsactl/check.h"
#include "client/dsactl/verify.h"
#include "vectors.h"

static enum dsa_rule rule_of(const struct vectors_case *c)
{
    const char *name = vectors_key(c, "rule");
    int rule = name ? ref64_rule_by_name(name) : 0;

    return rule == REF64_RULE_PLAIN  ? DSA_RULE_PLAIN
           : rule == REF64_RULE_POW2 ? DSA_RULE_POW2
                                     : DSA_RULE_DEFAULT;
}

/* ---- quantize_* ------------------------------------------------------------------------------ */

static void run_quantize(struct verify *v, const struct vectors_case *c)
{
    const struct vectors_array *input = vectors_find(c, "input", VECTORS_U16, 2);
    const struct vectors_array *rows = vectors_find(c, "rows", VECTORS_U8, 2);
    struct dsa_append append = {.layer = v->pool->n_layers - 1, .rule = rule_of(c)};
    struct dsa_error err;
    uint64_t sequence;
    char text[512];

    if (!input || !rows || input->shape[1] != (int64_t)v->pool->d_qk
        || rows->shape[1] != (int64_t)v->pool->row_bytes || rows->shape[0] != input->shape[0]) {
        verify_fail(v, c->name, "input or rows are missing or have another shape");
        return;
    }
    if (dsa_sequence_create(v->client, NULL, &sequence, &err) != DSA_OK) {
        verify_error(v, c->name, "create", &err);
        return;
    }
    append.sequence = sequence;
    append.rows = (struct dsa_tensor){.dtype = DSA_DTYPE_BF16,
                                      .rank = 2,
                                      .shape = {(uint64_t)input->shape[0], (uint64_t)input->shape[1]},
                                      .data = input->data};
    if (dsa_append(v->client, &append, NULL, &err) != DSA_OK)
        verify_error(v, c->name, "append", &err);
    else if (!verify_export(v, sequence, append.layer, rows->data, (uint64_t)rows->shape[0], text,
                            sizeof(text)))
        verify_fail(v, c->name, "%s", text);
    else
        verify_pass(v, c->name, "%lld rows byte for byte", (long long)rows->shape[0]);
    if (dsa_sequence_release(v->client, sequence, &err) != DSA_OK)
        verify_error(v, c->name, "release", &err);
}

/* ---- attend_* -------------------------------------------------------------------------------- */

struct attend_case {
    const struct vectors_array *q, *kv, *indices, *lengths, *sink, *out, *lse;
    const int32_t *list; /* indices in the space that is asked for */
    double *ref, *ref_lse;
    uint64_t sequence;
    float softmax_scale;
};

/* NULL, or what does not fit. */
static const char *attend_open(struct verify *v, const struct vectors_case *c, struct attend_case *a)
{
    const char *scale = vectors_key(c, "softmax_scale");

    memset(a, 0, sizeof(*a));
    a->q = vectors_find(c, "q", VECTORS_U16, 3);
    a->kv = vectors_find(c, "kv", VECTORS_U8, 2);
    if (!a->kv) /* bf16 layouts come as values; the bytes are the same */
        a->kv = vectors_find(c, "kv", VECTORS_U16, 2);
    a->indices = vectors_find(c, "indices", VECTORS_I32, 2);
    a->lengths = vectors_find(c, "lengths", VECTORS_I32, 1);
    a->sink = vectors_find(c, "sink", VECTORS_F32, 1);
    a->out = vectors_find(c, "out", VECTORS_F32, 3);
    a->lse = vectors_find(c, "lse", VECTORS_F32, 2);
    if (!a->q || !a->kv || !a->indices || !a->out || !a->lse || !scale)
        return "an array or the scale is missing";
    if (a->q->shape[2] != (int64_t)v->pool->d_qk || a->out->shape[2] != (int64_t)v->pool->d_v
        || a->kv->shape[1] * (a->kv->dtype == VECTORS_U16 ? 2 : 1) != (int64_t)v->pool->row_bytes
        || a->indices->shape[0] != a->q->shape[0])
        return "an array has another shape than the layout";
    a->softmax_scale = strtof(scale, NULL);
    a->list = a->indices->data;
    a->ref = malloc((size_t)(a->out->n_elems + a->lse->n_elems) * sizeof(double));
    if (!a->ref)
        return "no memory";
    a->ref_lse = a->ref + a->out->n_elems;
    for (int64_t i = 0; i < a->out->n_elems; i++)
        a->ref[i] = (double)((const float *)a->out->data)[i];
    for (int64_t i = 0; i < a->lse->n_elems; i++)
        a->ref_lse[i] = (double)((const float *)a->lse->data)[i];
    return NULL;
}

static bool import_rows(struct verify *v, const struct vectors_case *c, struct attend_case *a)
{
    struct dsa_tensor rows = {.dtype = DSA_DTYPE_U8,
                              .rank = 2,
                              .shape = {(uint64_t)a->kv->shape[0], v->pool->row_bytes},
                              .data = a->kv->data};
    struct dsa_error err;

    if (dsa_sequence_create(v->client, NULL, &a->sequence, &err) != DSA_OK
        || dsa_import(v->client, a->sequence, 0, 1, v->pool->layout, &rows, NULL, &err) != DSA_OK) {
        verify_error(v, c->name, "import", &err);
        return false;
    }
    return true;
}

/* Copies into the block and cuts a tensor from it. */
static struct dsa_tensor place(struct block *block, const void *data, enum dsa_dtype dtype, uint32_t rank,
                               uint64_t n0, uint64_t n1, uint64_t n2)
{
    uint64_t bytes = n0 * (rank > 1 ? n1 : 1) * (rank > 2 ? n2 : 1) * dsa_dtype_bytes(dtype);
    void *at = block_take(block, bytes);

    memcpy(at, data, bytes);
    return block_tensor(block, at, dtype, rank, n0, n1, n2);
}

static void attend_once(struct verify *v, const char *name, const struct attend_case *a, enum dsa_space space,
                        struct block *block)
{
    uint64_t n = (uint64_t)a->q->shape[0], heads = (uint64_t)a->q->shape[1];
    uint16_t *out = block_take(block, (uint64_t)a->out->n_elems * 2);
    float *lse = block_take(block, (uint64_t)a->lse->n_elems * 4);
    struct dsa_segment segment = {space == DSA_SPACE_LOGICAL ? a->sequence : 0, (uint32_t)n};
    struct dsa_tensor lengths, sink;
    struct dsa_attend attend = {
        .n_segments = 1,
        .segments = &segment,
        .q = place(block, a->q->data, DSA_DTYPE_BF16, 3, n, heads, v->pool->d_qk),
        .indices = place(block, a->list, DSA_DTYPE_I32, 2, n, (uint64_t)a->indices->shape[1], 0),
        .space = space,
        .softmax_scale = a->softmax_scale,
        .out = block_output(block, out, DSA_DTYPE_BF16),
        .want_lse = true,
        .lse = block_output(block, lse, DSA_DTYPE_F32),
    };
    struct dsa_error err;
    char text[256] = "no memory";

    if (a->lengths) {
        lengths = place(block, a->lengths->data, DSA_DTYPE_I32, 1, n, 0, 0);
        attend.lengths = &lengths;
    }
    if (a->sink) {
        sink = place(block, a->sink->data, DSA_DTYPE_F32, 1, heads, 0, 0);
        attend.sink = &sink;
    }
    if (dsa_attend(v->client, &attend, NULL, &err) != DSA_OK)
        verify_error(v, name, "attend", &err);
    else if (check_values(out, DSA_DTYPE_BF16, a->ref, a->out->n_elems, lse, a->ref_lse, a->lse->n_elems,
                          text, sizeof(text))
             != 1)
        verify_fail(v, name, "%s", text);
    else
        verify_pass(v, name, "%llu rows, %llu heads", (unsigned long long)n, (unsigned long long)heads);
}

static void attend_by(struct verify *v, const struct vectors_case *c, const struct attend_case *a,
                      enum dsa_space space, bool is_shared)
{
    uint64_t bytes = 64 * 8
                     + (uint64_t)(a->q->n_elems * 2 + a->indices->n_elems * 4 + a->out->n_elems * 2
                                  + a->lse->n_elems * 4 + a->q->shape[0] * 4 + a->q->shape[1] * 4);
    struct block block;
    struct dsa_error err;
    char name[128];

    snprintf(name, sizeof(name), "%s (%s, %s)", c->name, space == DSA_SPACE_LOGICAL ? "logical" : "physical",
             is_shared ? "memfd" : "inline");
    if (block_init(&block, v->client, is_shared, bytes, &err) != DSA_OK) {
        verify_error(v, name, "memory", &err);
        return;
    }
    attend_once(v, name, a, space, &block);
    block_fini(&block);
}

/* The same positions as slots of the pool; what is invalid stays invalid. NULL: failed (counted). */
static int32_t *physical_list(struct verify *v, const struct vectors_case *c, const struct attend_case *a)
{
    const int32_t *positions = a->indices->data;
    struct dsa_sequence info;
    struct dsa_error err;
    int32_t *slots;

    if (dsa_sequence_get(v->client, a->sequence, &info, &err) != DSA_OK) {
        verify_error(v, c->name, "get", &err);
        return NULL;
    }
    slots = malloc((size_t)a->indices->n_elems * sizeof(*slots));
    for (int64_t i = 0; slots && i < a->indices->n_elems; i++) {
        int64_t p = positions[i], page = p / 64;

        if (p < 0 || p >= a->kv->shape[0])
            slots[i] = p < 0 ? positions[i] : INT32_MAX;
        else if (page < (int64_t)info.n_page_ids)
            slots[i] = info.page_ids[page] * 64 + (int32_t)(p % 64);
        else
            slots[i] = -1; /* the comparison will tell */
    }
    dsa_sequence_fini(&info);
    if (!slots)
        verify_fail(v, c->name, "no memory");
    return slots;
}

static void run_attend(struct verify *v, const struct vectors_case *c)
{
    struct attend_case a;
    const char *wrong = attend_open(v, c, &a);
    struct dsa_error err;
    int32_t *slots;

    if (wrong) {
        verify_fail(v, c->name, "%s", wrong);
        return;
    }
    if (import_rows(v, c, &a)) {
        attend_by(v, c, &a, DSA_SPACE_LOGICAL, false);
        if (v->has_memfd)
            attend_by(v, c, &a, DSA_SPACE_LOGICAL, true);
        if (v->caps->physical_indices) {
            slots = physical_list(v, c, &a);
            a.list = slots;
            if (slots)
                attend_by(v, c, &a, DSA_SPACE_PHYSICAL, v->has_memfd);
            free(slots);
        }
    }
    if (a.sequence != 0 && dsa_sequence_release(v->client, a.sequence, &err) != DSA_OK)
        verify_error(v, c->name, "release", &err);
    free(a.ref);
}

/* ---- folders --------------------------------------------------------------------------------- */

static void run_case(struct verify *v, const struct vectors_case *c)
{
    const char *layout = vectors_key(c, "layout");
    bool is_quantize = strncmp(c->name, "quantize_", 9) == 0, is_attend = strncmp(c->name, "attend_", 7) == 0;

    if (!is_quantize && !is_attend)
        verify_skip(v, c->name, "%s has no call of its own; dsk-check runs it",
                    layout ? layout : "this operation");
    else if (!layout || !ref64_layout_by_name(layout))
        verify_fail(v, c->name, "unknown layout '%s'", layout ? layout : "");
    else if (strcmp(layout, v->layout->name) != 0)
        verify_skip(v, c->name, "layout %s, the pool has %s", layout, v->layout->name);
    else
        (is_quantize ? run_quantize : run_attend)(v, c);
}

bool verify_vectors(struct verify *v, const char *dir)
{
    char text[256], path[4096];
    char **names;
    int n;

    if (vectors_list(dir, &names, &n, text, sizeof(text)) != 0) {
        fprintf(stderr, "dsactl: --vectors: %s\n", text);
        return false;
    }
    if (n == 0) {
        fprintf(stderr, "dsactl: --vectors: %s holds no vector folder\n", dir);
        vectors_free_list(names, n);
        return false;
    }
    for (int i = 0; i < n; i++) {
        struct vectors_case c;

        snprintf(path, sizeof(path), "%s/%s", dir, names[i]);
        if (vectors_open(path, &c, text, sizeof(text)) != 0) {
            verify_fail(v, names[i], "%s", text);
            continue;
        }
        run_case(v, &c);
        vectors_close(&c);
    }
    vectors_free_list(names, n);
    return true;
}
