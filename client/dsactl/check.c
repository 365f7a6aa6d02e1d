#include "client/dsactl/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int check_values(const void *out, enum dsa_dtype dtype, const double *ref, int64_t n, const float *lse,
                 const double *lse_ref, int64_t n_lse, char *text, size_t size)
{
    float *wide = NULL;
    const float *got = out;
    struct ref64_diff diff;
    char detail[160];

    if (dtype == DSA_DTYPE_BF16) {
        wide = malloc((size_t)n * sizeof(*wide));
        if (!wide)
            return -1;
        ref64_bf16_to_f32(out, wide, n);
        got = wide;
    }
    diff = ref64_compare_out(got, ref, n);
    free(wide);
    if (!diff.ok) {
        ref64_diff_text(&diff, n, detail, sizeof(detail));
        snprintf(text, size, "out: %s", detail);
        return 0;
    }
    if (!lse)
        return 1;
    diff = ref64_compare_lse(lse, lse_ref, n_lse);
    if (!diff.ok) {
        ref64_diff_text(&diff, n_lse, detail, sizeof(detail));
        snprintf(text, size, "lse: %s", detail);
        return 0;
    }
    return 1;
}

int check_attend(const struct check_rows *c, uint64_t *n_invalid_p, char *text, size_t size)
{
    int64_t n_lse = (int64_t)c->n_rows * c->heads, n = n_lse * c->layout->d_v;
    struct ref64_attend args = {.layout = c->layout,
                                .pool = c->rows,
                                .n_slots = c->n_tokens,
                                .raw_scale = c->raw_scale,
                                .q = c->q,
                                .indices = c->indices,
                                .lengths = c->lengths,
                                .sink = c->sink,
                                .n_rows = (int)c->n_rows,
                                .topk = (int)c->topk,
                                .h_q = (int)c->heads,
                                .softmax_scale = (double)c->softmax_scale};
    double *ref = malloc((size_t)(n + n_lse) * sizeof(*ref));
    uint32_t *n_bad = calloc(c->n_rows, sizeof(*n_bad));
    int result = -1;

    if (ref && n_bad && ref64_attend(&args, ref, ref + n, n_bad) == 0) {
        for (uint32_t i = 0; i < c->n_rows; i++)
            *n_invalid_p += n_bad[i];
        result = check_values(c->out, c->out_dtype, ref, n, c->lse, ref + n, n_lse, text, size);
    }
    free(ref);
    free(n_bad);
    return result;
}
