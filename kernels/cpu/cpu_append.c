/* cpu_append.c - quantise bf16 rows into slots. Byte exact on every backend: IEEE division by the very scale
 * that is stored, round to nearest even, saturate at 448.
 *
 *   scaled: scale = rule(max |x| of 128 values); byte = e4m3(x / scale); RoPE bits copied
 *   raw:    byte = e4m3(x / raw_scale) for all 576 values
 *   bf16:   bits copied
 * NaN writes 0, infinities +-448 with x's sign; both stay out of the maximum and are counted. */
#include <math.h>
#include <string.h>

#include "../dsk_number_inline.h"
#include "cpu.h"

#define ROWS_PER_BATCH 16  /* asked for before they are written */
#define ROW_COST_NS    300 /* one row on one thread, roughly */

struct append_job {
    const struct dsk_append_args *args;
    const struct dsk_layout *layout;
    const struct cpu_isa *isa;
    int32_t n_shards;
};

static inline bool is_nonfinite(uint16_t bits)
{
    return (bits & 0x7f80u) == 0x7f80u;
}

static uint32_t count_nonfinite(const uint16_t *x, int n)
{
    uint32_t count = 0;

    for (int i = 0; i < n; i++)
        count += is_nonfinite(x[i]);
    return count;
}

/* Largest finite magnitude. bf16 magnitudes order like their bits, and fit a signed word, whose maximum SSE2
 * has. */
static float max_magnitude(const uint16_t *x, int n)
{
    int16_t max = 0;

    for (int i = 0; i < n; i++) {
        int16_t mag = (int16_t)(x[i] & 0x7fffu);

        mag = mag < 0x7f80 ? mag : 0;
        max = mag > max ? mag : max;
    }
    return num_bf16_to_f32((uint16_t)max);
}

/* Smallest power of two >= max(amax / 448, 1e-4), without rounding a quotient: amax <= 448 * 2^k is compared
 * through 448 = 0.875 * 2^9. The smallest power of two >= 1e-4 is 2^-13, which also serves a zero group. */
static float scale_pow2(float amax)
{
    int exponent;

    if (amax <= DSK_E4M3_MAX * 0x1p-13f)
        return 0x1p-13f;
    float fraction = frexpf(amax, &exponent); /* amax = fraction * 2^exponent, fraction in [0.5, 1) */
    return ldexpf(1.0f, fraction <= 0.875f ? exponent - 9 : exponent - 8);
}

static float scale_plain(float amax)
{
    float scale = amax / DSK_E4M3_MAX;

    return scale > 0x1p-126f ? scale : 0x1p-126f;
}

static void write_row(const struct append_job *job, const uint16_t *x, uint8_t *dst)
{
    const struct dsk_layout *layout = job->layout;
    const size_t scales_at = (size_t)layout->latent;
    const size_t rope_at = scales_at + sizeof(float) * (size_t)layout->n_groups;

    if (layout->id == DSK_LAYOUT_RAW_512_64) {
        job->isa->quantise(x, layout->d_qk, job->args->kv.raw_scale, dst);
        return;
    }
    if (layout->n_groups == 0) {
        memcpy(dst, x, sizeof(*x) * (size_t)layout->d_qk);
        return;
    }
    for (int g = 0; g < layout->n_groups; g++) {
        const uint16_t *group = x + g * DSK_GROUP_VALUES;
        float amax = max_magnitude(group, DSK_GROUP_VALUES);
        float scale = job->args->rule == DSK_RULE_POW2 ? scale_pow2(amax) : scale_plain(amax);

        job->isa->quantise(group, DSK_GROUP_VALUES, scale, dst + g * DSK_GROUP_VALUES);
        memcpy(dst + scales_at + sizeof(scale) * (size_t)g, &scale, sizeof(scale));
    }
    memcpy(dst + rope_at, x + layout->latent, sizeof(*x) * (size_t)layout->rope);
}

/* One row of the batch. The input is copied first, so that a client who changes it meanwhile cannot make
 * count, scale and bytes disagree. */
static void append_row(const struct append_job *job, int32_t i)
{
    const struct dsk_append_args *args = job->args;
    const struct dsk_layout *layout = job->layout;
    uint16_t x[DSK_MAX_D_QK];
    int32_t slot = args->slots[i];
    uint32_t count = 0;

    if (slot >= 0) {
        memcpy(x, dsk_cpu_ptr(args->rows + (uint64_t)(i * args->row_bytes)),
               sizeof(*x) * (size_t)layout->d_qk);
        count = count_nonfinite(x, layout->d_qk);
        write_row(job, x, dsk_cpu_ptr(dsk_row_address(&args->kv, layout->row_bytes, slot)));
    }
    if (args->n_nonfinite != 0)
        memcpy((uint32_t *)dsk_cpu_ptr(args->n_nonfinite) + i, &count, sizeof(count));
}

/* Takes the next rows of a shard, at most ROWS_PER_BATCH, from *i_p on, and asks for the slots they go to. */
static int take_batch(const struct append_job *job, int64_t i_shard, int32_t *i_p, int32_t *batch)
{
    const struct dsk_append_args *args = job->args;
    int n = 0;

    for (; *i_p < args->n_rows && n < ROWS_PER_BATCH; (*i_p)++) {
        int32_t slot = args->slots[*i_p];

        if ((uint32_t)slot % (uint32_t)job->n_shards != (uint32_t)i_shard)
            continue;
        batch[n++] = *i_p;
        if (slot >= 0)
            dsk_cpu_fetch(dsk_cpu_ptr(dsk_row_address(&args->kv, job->layout->row_bytes, slot)),
                          job->layout->row_bytes);
    }
    return n;
}

/* A shard is every row whose slot falls into it, in batch order: equal slots meet in one shard, so the later
 * row wins on any number of threads. */
static void append_task(void *user, int worker, int64_t i_shard)
{
    const struct append_job *job = user;
    int32_t batch[ROWS_PER_BATCH];
    int32_t next = 0;
    int n;

    (void)worker;
    while ((n = take_batch(job, i_shard, &next, batch)) > 0) {
        for (int i = 0; i < n; i++)
            append_row(job, batch[i]);
    }
}

static dsk_status check_finite(const struct append_job *job, struct dsk_err *err)
{
    const struct dsk_append_args *args = job->args;
    const int n = job->layout->d_qk;

    for (int32_t i = 0; i < args->n_rows; i++) {
        uint16_t x[DSK_MAX_D_QK];

        if (args->slots[i] < 0)
            continue;
        memcpy(x, dsk_cpu_ptr(args->rows + (uint64_t)(i * args->row_bytes)), sizeof(*x) * (size_t)n);
        if (count_nonfinite(x, n) != 0)
            return dsk_fail(err, DSK_E_NONFINITE, "rows", i,
                            "this row holds NaN or infinity; nothing was written");
    }
    return DSK_OK;
}

dsk_status dsk_cpu_append(struct dsk_stream *s, const struct dsk_append_args *args, struct dsk_err *err)
{
    struct cpu_device *cpu = dsk_cpu_device(s);
    struct append_job job = {args, dsk_layout_get(args->kv.layout), cpu->isa, dsk_cpu_team_size(cpu->team)};

    if ((args->flags & DSK_APPEND_STRICT) != 0) {
        dsk_status status = check_finite(&job, err);

        if (status != DSK_OK)
            return status;
    }
    dsk_cpu_team_run(cpu->team, job.n_shards, (int64_t)args->n_rows * ROW_COST_NS, append_task, &job);
    return DSK_OK;
}
