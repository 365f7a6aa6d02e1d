/* cmd_attend.c - the smallest complete use of the library, made visible: a sequence, some rows, one attend,
 * and the same numbers in float64. Start reading here to learn dsa.h. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/dsactl/check.h"
#include "client/dsactl/content.h"
#include "client/dsactl/dsactl.h"

struct example {
    struct dsa_client *client;
    const struct dsa_pool *pool;
    const struct ref64_layout *layout;
    uint32_t n_tokens, heads, topk;
    uint64_t sequence;
    uint16_t *rows, *q, *out; /* bf16 */
    int32_t *indices;
    float *lse;
    float softmax_scale;
};

static bool alloc_tensors(struct example *e)
{
    size_t d_qk = e->pool->d_qk, d_v = e->pool->d_v;

    e->rows = malloc(e->n_tokens * d_qk * sizeof(*e->rows));
    e->q = malloc(e->heads * d_qk * sizeof(*e->q));
    e->out = malloc(e->heads * d_v * sizeof(*e->out));
    e->indices = malloc(e->topk * sizeof(*e->indices));
    e->lse = malloc(e->heads * sizeof(*e->lse));
    return e->rows && e->q && e->out && e->indices && e->lse;
}

static void fill_tensors(struct example *e, uint64_t seed)
{
    struct ref64_rng rng = ref64_rng_init(seed);

    content_fill(&rng, e->rows, (size_t)e->n_tokens * e->pool->d_qk);
    content_fill(&rng, e->q, (size_t)e->heads * e->pool->d_qk);
    for (uint32_t i = 0; i < e->topk; i++)
        e->indices[i] = (int32_t)ref64_rng_below(&rng, e->n_tokens);
    e->indices[e->topk - 1] = -1; /* a hole: ignored */
    e->softmax_scale = 1 / sqrtf((float)e->pool->d_qk);
}

/* Append and attend, tensors inline. */
static dsa_status serve(struct example *e, struct dsa_result *result_p, struct dsa_error *err)
{
    struct dsa_append append = {
        .rows = {.dtype = DSA_DTYPE_BF16, .rank = 2, .shape = {e->n_tokens, e->pool->d_qk}}};
    struct dsa_segment segment = {.n_rows = 1};
    struct dsa_attend attend = {
        .n_segments = 1,
        .segments = &segment,
        .q = {.dtype = DSA_DTYPE_BF16, .rank = 3, .shape = {1, e->heads, e->pool->d_qk}, .data = e->q},
        .indices = {.dtype = DSA_DTYPE_I32, .rank = 2, .shape = {1, e->topk}, .data = e->indices},
        .space = DSA_SPACE_LOGICAL,
        .softmax_scale = e->softmax_scale,
        .out = {.dtype = DSA_DTYPE_BF16, .data = e->out},
        .want_lse = true,
        .lse = {.dtype = DSA_DTYPE_F32, .data = e->lse},
    };
    dsa_status status = dsa_sequence_create(e->client, NULL, &e->sequence, err);

    if (status != DSA_OK)
        return status;
    append.sequence = segment.sequence = e->sequence;
    append.rows.data = e->rows;
    status = dsa_append(e->client, &append, NULL, err);
    if (status != DSA_OK)
        return status;
    return dsa_attend(e->client, &attend, result_p, err);
}

/* The same in float64: quantise the rows as the pool does, then attend over them. */
static bool compute(const struct example *e, double *out, double *lse)
{
    size_t row_bytes = (size_t)e->layout->row_bytes;
    uint8_t *packed = malloc(e->n_tokens * row_bytes);
    struct ref64_attend args = {.layout = e->layout,
                                .pool = packed,
                                .n_slots = e->n_tokens,
                                .raw_scale = e->pool->raw_scale,
                                .q = e->q,
                                .indices = e->indices,
                                .n_rows = 1,
                                .topk = (int)e->topk,
                                .h_q = (int)e->heads,
                                .softmax_scale = (double)e->softmax_scale};
    int rc;

    if (!packed)
        return false;
    for (uint32_t t = 0; t < e->n_tokens; t++)
        ref64_quantise_row(e->layout, pool_rule(e->pool), e->pool->raw_scale,
                           e->rows + (size_t)t * e->pool->d_qk, packed + t * row_bytes);
    rc = ref64_attend(&args, out, lse, NULL);
    free(packed);
    return rc == 0;
}

static int show(const struct example *e, const struct dsa_result *result)
{
    size_t n = (size_t)e->heads * e->pool->d_v;
    double *out = malloc(n * sizeof(*out)), *lse = malloc(e->heads * sizeof(*lse));
    char text[200] = "no memory";
    int agrees = -1;

    if (out && lse && compute(e, out, lse)) {
        printf("%u tokens appended to sequence %llu, %s rows of %u bytes\n", e->n_tokens,
               (unsigned long long)e->sequence, dsa_layout_name(e->pool->layout), e->pool->row_bytes);
        printf("1 query row, %u heads, %u of them selected: %d %d %d ... %d\n\n", e->heads, e->topk,
               e->indices[0], e->topk > 1 ? e->indices[1] : 0, e->topk > 2 ? e->indices[2] : 0,
               e->indices[e->topk - 1]);
        printf("  %-12s %12s %12s\n", "value", "server", "float64");
        for (uint32_t h = 0; h < e->heads && h < 2; h++) {
            for (uint32_t d = 0; d < 4; d++)
                printf("  out[%u][%u]    %12.6f %12.6f\n", h, d,
                       ref64_bf16_decode(e->out[(size_t)h * e->pool->d_v + d]),
                       out[(size_t)h * e->pool->d_v + d]);
            printf("  lse[%u]       %12.6f %12.6f\n", h, (double)e->lse[h], lse[h]);
        }
        agrees =
            check_values(e->out, DSA_DTYPE_BF16, out, (int64_t)n, e->lse, lse, e->heads, text, sizeof(text));
        printf("\nround trip %llu us, of it %llu us waiting and %llu us on the device\n",
               (unsigned long long)result->elapsed_us, (unsigned long long)result->timings.queue_us,
               (unsigned long long)result->timings.device_us);
    }
    if (agrees == 1)
        printf("all %zu values agree with float64\n", n + e->heads);
    else
        fprintf(stderr, "dsactl: attend: %s\n", text);
    free(out);
    free(lse);
    return agrees == 1 ? EXIT_OK : EXIT_MISMATCH;
}

static int run(struct example *e, uint64_t seed)
{
    struct dsa_result result;
    struct dsa_error err;

    if (!pool_pick(e->client, &e->pool, &e->layout))
        return EXIT_MISMATCH;
    if (!alloc_tensors(e)) {
        fprintf(stderr, "dsactl: no memory for tensors\n");
        return EXIT_MISMATCH;
    }
    fill_tensors(e, seed);
    if (serve(e, &result, &err) != DSA_OK) {
        print_error("attend", &err);
        return EXIT_MISMATCH;
    }
    return show(e, &result);
}

int cmd_attend(int argc, char **argv)
{
    struct common common = COMMON_DEFAULTS;
    uint64_t tokens = 200, heads = 8, topk = 32, seed = 1;
    const struct arg table[] = {
        {"tokens", ARG_UINT, &tokens, "N", "rows to append", 1, 2048},
        {"heads", ARG_UINT, &heads, "N", "query heads", 1, 128},
        {"topk", ARG_UINT, &topk, "N", "positions to select; the last one is a hole", 2, 2048},
        {"seed", ARG_UINT, &seed, "N", "of the random rows", 0, 0},
        COMMON_ARGS(common),
        {0},
    };
    struct example e = {0};
    int code;

    if (!command_args("attend",
                      "Makes a sequence, appends random rows, attends with one query row and prints a few\n"
                      "values beside the same computation in float64.",
                      table, argc, argv, &code))
        return code;
    e.n_tokens = (uint32_t)tokens;
    e.heads = (uint32_t)heads;
    e.topk = (uint32_t)topk;
    e.client = command_connect(&common, true);
    if (!e.client)
        return EXIT_CONNECT;
    code = run(&e, seed);
    dsa_close(e.client);
    free(e.rows);
    free(e.q);
    free(e.out);
    free(e.indices);
    free(e.lse);
    return code;
}
