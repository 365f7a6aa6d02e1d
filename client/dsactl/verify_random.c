/* verify_random.c - random cases: a few sequences with appends, forks and truncates, then several requests in
 * flight at once over them, inline and in shared memory, each compared with float64; then the stored bytes. A
 * case depends on the seed and its number alone. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/dsactl/check.h"
#include "client/dsactl/content.h"
#include "client/dsactl/verify_model.h"

#define MAX_MODELS   3
#define MAX_REQUESTS 6

struct part { /* a segment and what it read */
    uint32_t model, n_rows, n_tokens;
};

struct request {
    struct dsa_request *handle;
    struct block block;
    uint32_t layer, n_rows, heads, topk, n_parts;
    struct part parts[MAX_MODELS];
    enum dsa_dtype out_dtype;
    float softmax_scale;
    uint16_t *q, *append_rows;  /* append_rows NULL = none */
    int32_t *indices, *lengths; /* lengths NULL = none */
    float *sink, *lse;          /* NULL = none */
    void *out;
    uint64_t n_nonfinite;
};

struct scene {
    struct verify *v;
    struct ref64_rng rng;
    char name[64];
    unsigned n_models, n_requests;
    struct model models[MAX_MODELS];
    struct request requests[MAX_REQUESTS];
};

static bool chance(struct scene *s, int64_t one_in)
{
    return ref64_rng_below(&s->rng, one_in) == 0;
}

static uint32_t pick(struct scene *s, const uint32_t *list, size_t n)
{
    return list[ref64_rng_below(&s->rng, (int64_t)n)];
}
#define PICK(s, list) pick((s), (list), sizeof(list) / sizeof((list)[0]))

/* ---- sequences ------------------------------------------------------------------------------- */

static bool make_models(struct scene *s)
{
    static const uint32_t lengths[] = {1, 2, 63, 64, 65, 127, 128, 130, 200, 300};
    bool is_good = true;

    s->n_models = 1 + (unsigned)ref64_rng_below(&s->rng, MAX_MODELS);
    for (unsigned i = 0; i < s->n_models && is_good; i++) {
        struct model *model = &s->models[i], *source = i > 0 ? &s->models[i - 1] : NULL;

        if (source && chance(s, 2)) {
            uint32_t n = 1 + (uint32_t)ref64_rng_below(&s->rng, source->n_tokens[0]);

            /* Both write on afterwards: each must get its own copy of the last shared page. */
            is_good = model_fork(model, source, n, s->v, s->name)
                      && model_append(model, 5, &s->rng, s->v, s->name)
                      && model_append(source, 3, &s->rng, s->v, s->name);
            continue;
        }
        is_good = model_create(model, s->v, s->name)
                  && model_append(model, PICK(s, lengths), &s->rng, s->v, s->name);
        if (is_good && chance(s, 3)) {
            uint32_t n = (uint32_t)ref64_rng_below(&s->rng, model->n_tokens[0] + 1);

            is_good =
                model_truncate(model, n, s->v, s->name)
                && model_append(model, 1 + (uint32_t)ref64_rng_below(&s->rng, 70), &s->rng, s->v, s->name);
        }
    }
    return is_good;
}

/* ---- requests -------------------------------------------------------------------------------- */

static void choose_shape(struct scene *s, struct request *r, bool is_long)
{
    static const uint32_t heads[] = {1, 2, 3, 8, 16, 64, 128}, widths[] = {1, 3, 8, 64, 67, 192, 256};
    uint32_t left;

    r->layer = (uint32_t)ref64_rng_below(&s->rng, s->v->pool->n_layers);
    r->heads = is_long ? 2 : PICK(s, heads);
    r->topk = is_long ? 8 : PICK(s, widths);
    r->n_rows = is_long ? 2 * s->v->caps->limits.chunk_rows + 3 : 1 + (uint32_t)ref64_rng_below(&s->rng, 5);
    if (r->heads > s->v->caps->limits.max_heads)
        r->heads = s->v->caps->limits.max_heads;
    if (r->n_rows > s->v->caps->limits.max_rows)
        r->n_rows = s->v->caps->limits.max_rows;
    left = r->n_rows;
    while (left > 0) {
        struct part *part = &r->parts[r->n_parts++];

        part->model = (uint32_t)ref64_rng_below(&s->rng, s->n_models);
        part->n_rows = r->n_parts == MAX_MODELS ? left : 1 + (uint32_t)ref64_rng_below(&s->rng, left);
        left -= part->n_rows;
    }
    r->out_dtype = chance(s, 3) ? DSA_DTYPE_F32 : DSA_DTYPE_BF16;
    r->softmax_scale = chance(s, 8) ? 0 : (float)(ref64_rng_unit(&s->rng) * 2 / sqrt(s->v->pool->d_qk));
}

static int32_t choose_index(struct scene *s, uint32_t n_tokens, bool has_holes, bool has_junk)
{
    static const int32_t junk[] = {-2, -7, INT32_MIN, INT32_MAX, 1 << 24};

    if (has_holes && chance(s, 4))
        return -1;
    if (has_junk && chance(s, 8)) {
        int64_t i = ref64_rng_below(&s->rng, 6);

        return i == 5 ? (int32_t)n_tokens : junk[i];
    }
    return n_tokens ? (int32_t)ref64_rng_below(&s->rng, n_tokens) : -1;
}

static void fill_indices(struct scene *s, struct request *r)
{
    bool has_holes = chance(s, 2), has_junk = chance(s, 4), has_twins = chance(s, 4);
    int32_t *at = r->indices;

    for (uint32_t p = 0; p < r->n_parts; p++) {
        for (uint32_t row = 0; row < r->parts[p].n_rows; row++) {
            bool is_empty = chance(s, 12);

            for (uint32_t j = 0; j < r->topk; j++, at++) {
                if (is_empty)
                    *at = -1;
                else if (has_twins && j % 2 == 1)
                    *at = at[-1];
                else
                    *at = choose_index(s, r->parts[p].n_tokens, has_holes, has_junk);
            }
        }
    }
    for (uint32_t i = 0; r->lengths && i < r->n_rows; i++)
        r->lengths[i] = (int32_t)ref64_rng_below(&s->rng, r->topk + 1);
}

static uint64_t block_bytes(const struct scene *s, const struct request *r)
{
    uint64_t d_qk = s->v->pool->d_qk, d_v = s->v->pool->d_v, n = (uint64_t)r->n_rows * r->heads;

    return 64 * 8 + n * d_qk * 2 + n * d_v * 4 + n * 4 + (uint64_t)r->n_rows * (r->topk + 1) * 4
           + r->heads * 4 + d_qk * 2;
}

/* Memory and contents. What is optional is there or not by chance. */
static bool fill_request(struct scene *s, struct request *r, bool is_shared)
{
    size_t n = (size_t)r->n_rows * r->heads;
    struct dsa_error err;

    if (block_init(&r->block, s->v->client, is_shared, block_bytes(s, r), &err) != DSA_OK) {
        verify_error(s->v, s->name, "memory", &err);
        return false;
    }
    r->q = block_take(&r->block, n * s->v->pool->d_qk * 2);
    r->indices = block_take(&r->block, (uint64_t)r->n_rows * r->topk * 4);
    r->out = block_take(&r->block, n * s->v->pool->d_v * dsa_dtype_bytes(r->out_dtype));
    r->lse = chance(s, 4) ? NULL : block_take(&r->block, n * 4);
    r->lengths = chance(s, 2) ? NULL : block_take(&r->block, r->n_rows * 4);
    r->sink = chance(s, 2) ? NULL : block_take(&r->block, r->heads * 4);
    content_fill(&s->rng, r->q, n * s->v->pool->d_qk);
    for (uint32_t h = 0; r->sink && h < r->heads; h++)
        r->sink[h] = chance(s, 4) ? -INFINITY : (float)(4 * ref64_rng_normal(&s->rng));
    memset(r->out, 0xee,
           n * s->v->pool->d_v * dsa_dtype_bytes(r->out_dtype)); /* so that nothing passes unwritten */
    return true;
}

/* One more token for the first part's sequence, in this layer alone, before the request attends. */
static void add_append(struct scene *s, struct request *r, struct dsa_append *append)
{
    struct model *model = &s->models[r->parts[0].model];

    if (!chance(s, 3) || model->n_tokens[r->layer] == MODEL_MAX_TOKENS)
        return;
    r->append_rows = block_take(&r->block, (uint64_t)s->v->pool->d_qk * 2);
    model_fill(&s->rng, r->append_rows, 1, chance(s, 4), s->v);
    *append = (struct dsa_append){
        .sequence = model->id,
        .layer = r->layer,
        .rows = block_tensor(&r->block, r->append_rows, DSA_DTYPE_BF16, 2, 1, s->v->pool->d_qk, 0),
        .rule = (enum dsa_rule)ref64_rng_below(&s->rng, 3),
    };
    r->n_nonfinite = model_store(model, r->layer, 1, 1, r->append_rows, append->rule, s->v);
}

static bool submit(struct scene *s, struct request *r)
{
    struct dsa_segment segments[MAX_MODELS];
    struct dsa_append append;
    struct dsa_tensor lengths, sink;
    struct dsa_attend attend = {.layer = r->layer,
                                .n_segments = r->n_parts,
                                .segments = segments,
                                .space = DSA_SPACE_LOGICAL,
                                .softmax_scale = r->softmax_scale,
                                .batch_invariant = chance(s, 4),
                                .priority = (int32_t)ref64_rng_below(&s->rng, 3) - 1};
    struct dsa_error err;

    add_append(s, r, &append);
    for (uint32_t p = 0; p < r->n_parts; p++) {
        const struct model *model = &s->models[r->parts[p].model];

        segments[p] = (struct dsa_segment){model->id, r->parts[p].n_rows};
        r->parts[p].n_tokens = model->n_tokens[r->layer];
    }
    fill_indices(s, r);
    attend.q = block_tensor(&r->block, r->q, DSA_DTYPE_BF16, 3, r->n_rows, r->heads, s->v->pool->d_qk);
    attend.indices = block_tensor(&r->block, r->indices, DSA_DTYPE_I32, 2, r->n_rows, r->topk, 0);
    attend.out = block_output(&r->block, r->out, r->out_dtype);
    attend.append = r->append_rows ? &append : NULL;
    if (r->lengths) {
        lengths = block_tensor(&r->block, r->lengths, DSA_DTYPE_I32, 1, r->n_rows, 0, 0);
        attend.lengths = &lengths;
    }
    if (r->sink) {
        sink = block_tensor(&r->block, r->sink, DSA_DTYPE_F32, 1, r->heads, 0, 0);
        attend.sink = &sink;
    }
    if (r->lse) {
        attend.want_lse = true;
        attend.lse = block_output(&r->block, r->lse, DSA_DTYPE_F32);
    }
    if (dsa_attend_submit(s->v->client, NULL, &attend, NULL, NULL, &r->handle, &err) == DSA_OK)
        return true;
    verify_error(s->v, s->name, "submit", &err);
    return false;
}

/* ---- comparison ------------------------------------------------------------------------------ */

static void describe(const struct request *r, char *text, size_t size)
{
    snprintf(text, size, "layer %u, %u rows in %u segments, %u heads, width %u%s%s%s%s%s, %s", r->layer,
             r->n_rows, r->n_parts, r->heads, r->topk, r->lengths ? ", lengths" : "", r->sink ? ", sink" : "",
             r->lse ? ", lse" : "", r->append_rows ? ", append" : "",
             r->out_dtype == DSA_DTYPE_F32 ? ", f32" : "", r->block.memory ? "memfd" : "inline");
}

/* Sums the invalid entries it met; false with text when a part disagrees. */
static bool compare_parts(struct scene *s, const struct request *r, uint64_t *n_invalid_p, char *text,
                          size_t size)
{
    size_t row = 0, d_qk = s->v->pool->d_qk, d_v = s->v->pool->d_v;

    for (uint32_t p = 0; p < r->n_parts; p++) {
        const struct part *part = &r->parts[p];
        size_t head = row * r->heads;
        struct check_rows check = {
            .layout = s->v->layout,
            .raw_scale = s->v->pool->raw_scale,
            .rows = model_rows(&s->models[part->model], s->v, r->layer),
            .n_tokens = part->n_tokens,
            .n_rows = part->n_rows,
            .heads = r->heads,
            .topk = r->topk,
            .q = r->q + head * d_qk,
            .indices = r->indices + row * r->topk,
            .lengths = r->lengths ? r->lengths + row : NULL,
            .sink = r->sink,
            .softmax_scale = r->softmax_scale,
            .out = (const uint8_t *)r->out + head * d_v * dsa_dtype_bytes(r->out_dtype),
            .out_dtype = r->out_dtype,
            .lse = r->lse ? r->lse + head : NULL,
        };

        if (check_attend(&check, n_invalid_p, text, size) != 1)
            return false;
        row += part->n_rows;
    }
    return true;
}

static void compare(struct scene *s, const struct request *r)
{
    const struct dsa_result *result = dsa_request_result(r->handle);
    uint64_t n_invalid = 0;
    char shape[200], text[256] = "no memory";

    describe(r, shape, sizeof(shape));
    if (result->error.code != DSA_OK)
        verify_error(s->v, s->name, shape, &result->error);
    else if (!compare_parts(s, r, &n_invalid, text, sizeof(text)))
        verify_fail(s->v, s->name, "%s: %s", shape, text);
    else if (result->n_invalid != n_invalid || result->n_nonfinite != r->n_nonfinite)
        verify_fail(s->v, s->name, "%s: counted %llu invalid and %llu non-finite, expected %llu and %llu",
                    shape, (unsigned long long)result->n_invalid, (unsigned long long)result->n_nonfinite,
                    (unsigned long long)n_invalid, (unsigned long long)r->n_nonfinite);
    else
        verify_pass(s->v, s->name, "%s", shape);
}

static void compare_stored(struct scene *s)
{
    const struct model *model = &s->models[ref64_rng_below(&s->rng, s->n_models)];
    uint32_t layer = (uint32_t)ref64_rng_below(&s->rng, model->n_layers);
    char text[512];

    if (model->n_tokens[layer] == 0)
        return;
    if (verify_export(s->v, model->id, layer, model_rows(model, s->v, layer), model->n_tokens[layer], text,
                      sizeof(text)))
        verify_pass(s->v, s->name, "%u stored rows byte for byte", model->n_tokens[layer]);
    else
        verify_fail(s->v, s->name, "stored rows of layer %u: %s", layer, text);
}

/* ---- one case -------------------------------------------------------------------------------- */

static void run_requests(struct scene *s, bool is_long)
{
    unsigned n = is_long ? 1 : 1 + (unsigned)ref64_rng_below(&s->rng, MAX_REQUESTS);
    struct dsa_error err;

    for (unsigned i = 0; i < n; i++) {
        struct request *r = &s->requests[s->n_requests++];

        choose_shape(s, r, is_long);
        if (!fill_request(s, r, s->v->has_memfd && chance(s, 2)) || !submit(s, r))
            break;
    }
    if (dsa_wait_all(s->v->client, 0, &err) != DSA_OK)
        verify_error(s->v, s->name, "wait", &err);
    for (unsigned i = 0; i < s->n_requests; i++) {
        if (s->requests[i].handle)
            compare(s, &s->requests[i]);
    }
}

static bool run_case(struct verify *v, uint64_t number, uint64_t seed)
{
    struct scene s = {.v = v, .rng = content_rng(seed, number, UINT64_C(0x5ce2e))};
    bool has_memory = true;

    snprintf(s.name, sizeof(s.name), "case %llu (seed %llu)", (unsigned long long)number,
             (unsigned long long)seed);
    for (unsigned i = 0; i < MAX_MODELS; i++)
        has_memory = model_init(&s.models[i], v) && has_memory;
    if (has_memory && make_models(&s)) {
        run_requests(&s, number % 8 == 7);
        compare_stored(&s);
    }
    for (unsigned i = 0; i < s.n_requests; i++) {
        dsa_request_free(s.requests[i].handle);
        block_fini(&s.requests[i].block);
    }
    for (unsigned i = 0; i < MAX_MODELS; i++)
        model_fini(&s.models[i], v);
    return has_memory;
}

bool verify_random(struct verify *v, uint64_t n, uint64_t seed)
{
    for (uint64_t i = 0; i < n; i++) {
        struct dsa_session_info session;

        if (!run_case(v, i, seed))
            return false;
        dsa_session_info(v->client, &session);
        if (!session.is_alive) {
            verify_fail(v, "session", "the server is gone; the remaining cases were not run");
            break;
        }
    }
    return true;
}
