#include "client/dsactl/verify_model.h"

#include <stdlib.h>
#include <string.h>

#include "client/dsactl/content.h"

bool model_init(struct model *model, const struct verify *v)
{
    memset(model, 0, sizeof(*model));
    model->n_layers = v->pool->n_layers;
    model->n_tokens = calloc(model->n_layers, sizeof(*model->n_tokens));
    model->rows = malloc((size_t)model->n_layers * MODEL_MAX_TOKENS * v->pool->row_bytes);
    return model->n_tokens && model->rows;
}

void model_fini(struct model *model, struct verify *v)
{
    struct dsa_error err;

    if (model->id != 0 && dsa_sequence_release(v->client, model->id, &err) != DSA_OK)
        verify_error(v, "release", "sequence", &err);
    free(model->n_tokens);
    free(model->rows);
    memset(model, 0, sizeof(*model));
}

uint8_t *model_rows(const struct model *model, const struct verify *v, uint32_t layer)
{
    return model->rows + (size_t)layer * MODEL_MAX_TOKENS * v->pool->row_bytes;
}

bool model_create(struct model *model, struct verify *v, const char *name)
{
    struct dsa_error err;

    if (dsa_sequence_create(v->client, NULL, &model->id, &err) == DSA_OK)
        return true;
    verify_error(v, name, "create", &err);
    return false;
}

bool model_fork(struct model *model, const struct model *source, uint32_t n, struct verify *v,
                const char *name)
{
    struct dsa_error err;

    if (dsa_sequence_fork(v->client, source->id, n, &model->id, &err) != DSA_OK) {
        verify_error(v, name, "fork", &err);
        return false;
    }
    for (uint32_t l = 0; l < model->n_layers; l++) {
        model->n_tokens[l] = n;
        memcpy(model_rows(model, v, l), model_rows(source, v, l), (size_t)n * v->pool->row_bytes);
    }
    return true;
}

bool model_truncate(struct model *model, uint32_t n, struct verify *v, const char *name)
{
    struct dsa_error err;

    if (dsa_sequence_truncate(v->client, model->id, n, &err) != DSA_OK) {
        verify_error(v, name, "truncate", &err);
        return false;
    }
    for (uint32_t l = 0; l < model->n_layers; l++) {
        if (model->n_tokens[l] > n)
            model->n_tokens[l] = n;
    }
    return true;
}

uint64_t model_store(struct model *model, uint32_t layer, uint32_t n_layers, uint32_t n,
                     const uint16_t *values, enum dsa_rule rule, const struct verify *v)
{
    int oracle_rule = rule == DSA_RULE_DEFAULT ? pool_rule(v->pool)
                      : rule == DSA_RULE_PLAIN ? REF64_RULE_PLAIN
                                               : REF64_RULE_POW2;
    uint64_t n_nonfinite = 0;

    for (uint32_t l = layer; l < layer + n_layers; l++) {
        uint8_t *to = model_rows(model, v, l) + (size_t)model->n_tokens[l] * v->pool->row_bytes;

        for (uint32_t i = 0; i < n; i++) {
            n_nonfinite += ref64_quantise_row(v->layout, oracle_rule, v->pool->raw_scale, values, to);
            values += v->pool->d_qk;
            to += v->pool->row_bytes;
        }
        model->n_tokens[l] += n;
    }
    return n_nonfinite;
}

void model_fill(struct ref64_rng *rng, uint16_t *values, size_t n_rows, bool has_nonfinite,
                const struct verify *v)
{
    static const uint16_t odd[] = {0x7fc0, 0x7f80, 0xff80,
                                   0x0000, 0x8000, 0x0001}; /* NaN, infinities, zeros, tiny */
    size_t d_qk = v->pool->d_qk;
    int64_t span = v->layout->encoding == REF64_SCALED ? v->layout->latent : v->layout->d_qk;

    content_fill(rng, values, n_rows * d_qk);
    /* Rows that are stored as bf16 keep what they are given, so a NaN there is a NaN in every result. */
    if (!has_nonfinite || v->layout->encoding == REF64_BF16)
        return;
    for (size_t i = 0; i < n_rows; i++) {
        size_t at = i * d_qk + (size_t)ref64_rng_below(rng, span);

        values[at] = odd[ref64_rng_below(rng, sizeof(odd) / sizeof(odd[0]))];
    }
}

/* Tokens of one append that every limit allows. */
static uint32_t append_room(const struct verify *v)
{
    const struct dsa_limits *limits = &v->caps->limits;
    uint64_t per_token = (uint64_t)v->pool->n_layers * v->pool->d_qk * 2;
    uint64_t n = limits->max_inline_bytes / per_token, rows = limits->max_append_rows / v->pool->n_layers;

    n = rows < n ? rows : n;
    return n < 1 ? 1 : n > MODEL_MAX_TOKENS ? MODEL_MAX_TOKENS : (uint32_t)n;
}

static bool append_once(struct model *model, uint32_t n, uint16_t *values, struct ref64_rng *rng,
                        struct verify *v, const char *name)
{
    uint32_t n_layers = model->n_layers;
    struct dsa_append append = {.sequence = model->id,
                                .n_layers = n_layers,
                                .rule = (enum dsa_rule)ref64_rng_below(rng, 3),
                                .has_position = ref64_rng_below(rng, 2) == 0,
                                .position = model->n_tokens[0]};
    struct dsa_append_result result;
    struct dsa_error err;
    uint64_t n_nonfinite;

    model_fill(rng, values, (size_t)n * n_layers, ref64_rng_below(rng, 4) == 0, v);
    append.rows = (struct dsa_tensor){
        .dtype = DSA_DTYPE_BF16, .rank = 3, .shape = {n_layers, n, v->pool->d_qk}, .data = values};
    if (dsa_append(v->client, &append, &result, &err) != DSA_OK) {
        verify_error(v, name, "append", &err);
        return false;
    }
    n_nonfinite = model_store(model, 0, n_layers, n, values, append.rule, v);
    if (result.n_tokens != model->n_tokens[0] || result.n_nonfinite != n_nonfinite) {
        verify_fail(v, name, "append answered %llu tokens and %llu non-finite values, expected %u and %llu",
                    (unsigned long long)result.n_tokens, (unsigned long long)result.n_nonfinite,
                    model->n_tokens[0], (unsigned long long)n_nonfinite);
        return false;
    }
    return true;
}

bool model_append(struct model *model, uint32_t n, struct ref64_rng *rng, struct verify *v, const char *name)
{
    uint32_t room = append_room(v);
    uint16_t *values;
    bool is_good = true;

    if (n > MODEL_MAX_TOKENS - model->n_tokens[0])
        n = MODEL_MAX_TOKENS - model->n_tokens[0];
    values = malloc((size_t)room * model->n_layers * v->pool->d_qk * sizeof(*values));
    if (!values) {
        verify_fail(v, name, "no memory");
        return false;
    }
    while (n > 0 && is_good) {
        uint32_t step = n < room ? n : room;

        is_good = append_once(model, step, values, rng, v, name);
        n -= step;
    }
    free(values);
    return is_good;
}
