/* cpu_merge.c - partial results of one row and head combined: lse = ln sum exp(lse_i),
 * out = sum exp(lse_i - lse) out_i. Parts with lse = -inf are skipped whatever their out holds.
 * The parts are added in their order, so the bits do not depend on threads or batch. */
#include <math.h>
#include <string.h>

#include "../dsk_number_inline.h"
#include "cpu.h"

static int64_t elem_bytes(int32_t dtype)
{
    return dtype == DSK_DTYPE_F32 ? 4 : 2;
}

static float load_value(const uint8_t *values, int32_t dtype, int i)
{
    float x;
    uint16_t bits;

    if (dtype == DSK_DTYPE_F32) {
        memcpy(&x, values + 4 * (size_t)i, sizeof(x));
        return x;
    }
    memcpy(&bits, values + 2 * (size_t)i, sizeof(bits));
    return num_bf16_to_f32(bits);
}

static void store_value(uint8_t *values, int32_t dtype, int i, float x)
{
    uint16_t bits;

    if (dtype == DSK_DTYPE_F32) {
        memcpy(values + 4 * (size_t)i, &x, sizeof(x));
        return;
    }
    bits = num_bf16_from_f32(x);
    memcpy(values + 2 * (size_t)i, &bits, sizeof(bits));
}

struct column {
    const struct dsk_merge_args *args;
    const float *lse;   /* part p at lse[p * stride] */
    const uint8_t *out; /* part p at out + p * stride * d_v elements */
    int64_t stride;     /* n_rows * h_q */
};

static const uint8_t *part_out(const struct column *c, int32_t p)
{
    return c->out + p * c->stride * c->args->d_v * elem_bytes(c->args->part_dtype);
}

/* ln of the sum over parts; *n_p parts are not empty, *last_p is the last of them. */
static double total_lse(const struct column *c, int32_t *n_p, int32_t *last_p)
{
    double max = -INFINITY, sum = 0;

    *n_p = 0;
    for (int32_t p = 0; p < c->args->n_parts; p++) {
        float lse = c->lse[p * c->stride];

        if (lse == -INFINITY)
            continue;
        max = lse > max ? (double)lse : max;
        *last_p = p;
        (*n_p)++;
    }
    for (int32_t p = 0; p < c->args->n_parts; p++) {
        float lse = c->lse[p * c->stride];

        if (lse != -INFINITY)
            sum += exp((double)lse - max);
    }
    return max + log(sum);
}

static void add_parts(const struct column *c, double lse, float *sum)
{
    const struct dsk_merge_args *args = c->args;

    memset(sum, 0, sizeof(*sum) * (size_t)args->d_v);
    for (int32_t p = 0; p < args->n_parts; p++) {
        float part_lse = c->lse[p * c->stride];
        const uint8_t *out = part_out(c, p);

        if (part_lse == -INFINITY)
            continue;
        float weight = (float)exp((double)part_lse - lse);
        for (int i = 0; i < args->d_v; i++)
            sum[i] += weight * load_value(out, args->part_dtype, i);
    }
}

/* One (row, head). */
static void merge_task(void *user, int worker, int64_t i_column)
{
    const struct dsk_merge_args *args = user;
    const struct column c = {args, (const float *)dsk_cpu_ptr(args->lse_parts) + i_column,
                             (const uint8_t *)dsk_cpu_ptr(args->out_parts)
                                 + i_column * args->d_v * elem_bytes(args->part_dtype),
                             (int64_t)args->n_rows * args->h_q};
    uint8_t *out = (uint8_t *)dsk_cpu_ptr(args->out) + i_column * args->d_v * elem_bytes(args->out_dtype);
    int32_t n_full = 0, last = 0;
    double lse = total_lse(&c, &n_full, &last);
    float sum[DSK_MAX_D_V];
    float lse_out = n_full == 0 ? -INFINITY : n_full == 1 ? c.lse[last * c.stride] : (float)lse;

    (void)worker;
    if (n_full == 0) {
        memset(out, 0, (size_t)(args->d_v * elem_bytes(args->out_dtype)));
    } else if (n_full == 1 && args->part_dtype == args->out_dtype) {
        memmove(out, part_out(&c, last), (size_t)(args->d_v * elem_bytes(args->out_dtype)));
    } else {
        if (n_full > 1)
            add_parts(&c, lse, sum);
        for (int i = 0; i < args->d_v; i++)
            store_value(out, args->out_dtype, i,
                        n_full > 1 ? sum[i] : load_value(part_out(&c, last), args->part_dtype, i));
    }
    if (args->lse != 0)
        ((float *)dsk_cpu_ptr(args->lse))[i_column] = lse_out;
}

dsk_status dsk_cpu_merge(struct dsk_stream *s, const struct dsk_merge_args *args, struct dsk_err *err)
{
    struct cpu_device *cpu = dsk_cpu_device(s);
    int64_t n_columns = (int64_t)args->n_rows * args->h_q;

    (void)err;
    dsk_cpu_team_run(cpu->team, n_columns, n_columns * args->n_parts * (args->d_v / 2 + 40), merge_task,
                     (void *)(uintptr_t)args);
    return DSK_OK;
}
