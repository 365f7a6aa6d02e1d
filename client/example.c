/* example.c - a whole client: makes a sequence, appends rows, attends, prints a value.
 *
 *   cc example.c $(pkg-config --cflags --libs dsa) -o example && ./example unix:/tmp/dsad.sock */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "dsa.h"

#define N_ROWS 100
#define HEADS  8
#define TOPK   64

static int complain(const char *what, const struct dsa_error *err)
{
    char text[512];

    dsa_error_text(err, text, sizeof(text));
    fprintf(stderr, "%s: %s\n", what, text);
    return 1;
}

/* A bf16 number is the upper half of a float. Small values around 1. */
static void fill(uint16_t *values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        values[i] = (uint16_t)(0x3f80 + i % 64);
}

static int attend(struct dsa_client *client)
{
    const struct dsa_pool *pool = &dsa_capabilities(client)->pools[0];
    uint16_t *rows = malloc(sizeof(*rows) * N_ROWS * pool->d_qk),
             *q = malloc(sizeof(*q) * HEADS * pool->d_qk);
    uint16_t *out = malloc(sizeof(*out) * HEADS * pool->d_v);
    int32_t positions[TOPK];
    struct dsa_append append = {0};
    struct dsa_segment segment = {.n_rows = 1};
    struct dsa_attend args = {0};
    struct dsa_error err;
    int rc = 0;

    if (!rows || !q || !out)
        return 1;
    fill(rows, N_ROWS * pool->d_qk);
    fill(q, HEADS * pool->d_qk);
    for (int i = 0; i < TOPK; i++)
        positions[i] = i; /* which rows of the sequence the query reads */
    append.rows =
        (struct dsa_tensor){.dtype = DSA_DTYPE_BF16, .rank = 2, .shape = {N_ROWS, pool->d_qk}, .data = rows};
    args.n_segments = 1;
    args.segments = &segment;
    args.q =
        (struct dsa_tensor){.dtype = DSA_DTYPE_BF16, .rank = 3, .shape = {1, HEADS, pool->d_qk}, .data = q};
    args.indices =
        (struct dsa_tensor){.dtype = DSA_DTYPE_I32, .rank = 2, .shape = {1, TOPK}, .data = positions};
    args.space = DSA_SPACE_LOGICAL;
    args.softmax_scale = 0.04f;
    args.out.data = out;
    if (dsa_sequence_create(client, NULL, &append.sequence, &err) != DSA_OK)
        rc = complain("create", &err);
    else if (dsa_append(client, &append, NULL, &err) != DSA_OK)
        rc = complain("append", &err);
    segment.sequence = append.sequence;
    if (rc == 0 && dsa_attend(client, &args, NULL, &err) != DSA_OK)
        rc = complain("attend", &err);
    if (rc == 0)
        printf("out[0][0] as bf16 bits: 0x%04x\n", out[0]);
    free(rows);
    free(q);
    free(out);
    return rc;
}

int main(int argc, char **argv)
{
    struct dsa_client *client;
    struct dsa_error err;
    int rc;

    if (dsa_connect(argc > 1 ? argv[1] : "unix:/run/dsad/dsad.sock", NULL, &client, &err) != DSA_OK)
        return complain("connect", &err);
    rc = attend(client);
    dsa_close(client);
    return rc;
}
