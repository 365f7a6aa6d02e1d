#include "ref64.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GROUP       128
#define PAGE_TOKENS 64

/* ---- numbers ------------------------------------------------------------------------------- */

/* sign, 4 exponent bits with bias 7, 3 mantissa bits; no infinities; all ones is NaN. */
double ref64_e4m3_decode(uint8_t byte)
{
    int exponent = (byte >> 3) & 15, mantissa = byte & 7;
    double magnitude;

    if (exponent == 15 && mantissa == 7)
        return NAN;
    if (exponent == 0)
        magnitude = ldexp(mantissa, -6 - 3);
    else
        magnitude = ldexp(8 + mantissa, exponent - 7 - 3);
    return (byte & 0x80) ? -magnitude : magnitude;
}

/* Nearest integer of a small non-negative number, ties to even, whatever the rounding mode. */
static int round_even(double x)
{
    double below = floor(x), rest = x - below;
    int n = (int)below;

    if (rest > 0.5 || (rest == 0.5 && (n & 1)))
        n++;
    return n;
}

uint8_t ref64_e4m3_encode(double x)
{
    double a = fabs(x);
    int sign = signbit(x) ? 0x80 : 0;
    int exponent, n;

    if (isnan(x))
        return 0x7f;
    if (a >= 448)
        return (uint8_t)(sign | 0x7e);
    if (a == 0)
        return (uint8_t)sign;
    frexp(a, &exponent);
    exponent -= 1; /* a = 1.m * 2^exponent */
    if (exponent < -6)
        exponent = -6; /* subnormals keep the step of the smallest normals */
    n = round_even(ldexp(a, 3 - exponent));
    /* n counts steps of 2^(exponent - 3): below 8 it is a subnormal, 16 carries into the next exponent,
     * and both fall out of the same sum. */
    n += (exponent + 6) * 8;
    return (uint8_t)(sign | (n > 0x7e ? 0x7e : n));
}

static float f32_of_bits(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof(x));
    return x;
}

double ref64_bf16_decode(uint16_t bits)
{
    return (double)f32_of_bits((uint32_t)bits << 16);
}

uint16_t ref64_bf16_encode(float x)
{
    uint32_t bits, low;

    memcpy(&bits, &x, sizeof(bits));
    if (isnan(x))
        return (uint16_t)((bits >> 16) | 0x40);
    low = bits & 0xffff;
    bits >>= 16;
    if (low > 0x8000 || (low == 0x8000 && (bits & 1)))
        bits++; /* a carry out of the mantissa lands in the exponent, as it should */
    return (uint16_t)bits;
}

void ref64_bf16_to_f32(const uint16_t *bits, float *values, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        values[i] = (float)ref64_bf16_decode(bits[i]);
}

/* ---- cache rows ---------------------------------------------------------------------------- */

static const struct ref64_layout layouts[REF64_N_LAYOUTS] = {
    {"scaled_512_64", 1, REF64_SCALED, 656, 512, 64, 4, 576, 512},
    {"scaled_512_0", 2, REF64_SCALED, 528, 512, 0, 4, 512, 512},
    {"scaled_256_0", 3, REF64_SCALED, 264, 256, 0, 2, 256, 256},
    {"bf16_576", 4, REF64_BF16, 1152, 512, 64, 0, 576, 512},
    {"bf16_512", 5, REF64_BF16, 1024, 512, 0, 0, 512, 512},
    {"bf16_256", 6, REF64_BF16, 512, 256, 0, 0, 256, 256},
    {"raw_512_64", 7, REF64_RAW, 576, 512, 64, 0, 576, 512},
};

const struct ref64_layout *ref64_layout_at(int i)
{
    return i >= 0 && i < REF64_N_LAYOUTS ? &layouts[i] : NULL;
}

const struct ref64_layout *ref64_layout_get(uint32_t id)
{
    for (int i = 0; i < REF64_N_LAYOUTS; i++) {
        if (layouts[i].id == id)
            return &layouts[i];
    }
    return NULL;
}

const struct ref64_layout *ref64_layout_by_name(const char *name)
{
    for (int i = 0; i < REF64_N_LAYOUTS; i++) {
        if (strcmp(layouts[i].name, name) == 0)
            return &layouts[i];
    }
    return NULL;
}

int ref64_rule_by_name(const char *name)
{
    if (strcmp(name, "plain") == 0)
        return REF64_RULE_PLAIN;
    return strcmp(name, "pow2") == 0 ? REF64_RULE_POW2 : 0;
}

float ref64_scale(float amax, int rule)
{
    float wanted = amax / 448.0f;
    float scale = 0x1p-13f; /* the smallest power of two that is not below 1e-4 */

    if (rule == REF64_RULE_PLAIN)
        return wanted > 0x1p-126f ? wanted : 0x1p-126f;
    while (scale < wanted)
        scale *= 2;
    return scale;
}

/* What the format writes for x / scale: NaN as 0, infinities saturated. Counts both. */
static uint8_t quantise(float x, float scale, uint32_t *n_nonfinite_p)
{
    float quotient;

    if (!isfinite(x))
        ++*n_nonfinite_p;
    if (isnan(x))
        return 0;
    if (isinf(x))
        return x < 0 ? 0xfe : 0x7e;
    quotient = x / scale; /* IEEE single division: part of the contract */
    return ref64_e4m3_encode((double)quotient);
}

static uint32_t quantise_group(int rule, const uint16_t *values, uint8_t *codes, uint8_t *scale_bytes)
{
    uint32_t n_nonfinite = 0;
    float amax = 0, scale;

    for (int i = 0; i < GROUP; i++) {
        float x = (float)ref64_bf16_decode(values[i]);

        if (isfinite(x) && fabsf(x) > amax)
            amax = fabsf(x);
    }
    scale = ref64_scale(amax, rule);
    for (int i = 0; i < GROUP; i++)
        codes[i] = quantise((float)ref64_bf16_decode(values[i]), scale, &n_nonfinite);
    memcpy(scale_bytes, &scale, sizeof(scale));
    return n_nonfinite;
}

uint32_t ref64_quantise_row(const struct ref64_layout *layout, int rule, float raw_scale,
                            const uint16_t *values, uint8_t *row)
{
    uint32_t n_nonfinite = 0;

    if (layout->encoding == REF64_BF16) {
        memcpy(row, values, (size_t)layout->row_bytes);
        return 0;
    }
    if (layout->encoding == REF64_RAW) {
        for (int i = 0; i < layout->d_qk; i++)
            row[i] = quantise((float)ref64_bf16_decode(values[i]), raw_scale, &n_nonfinite);
        return n_nonfinite;
    }
    for (int g = 0; g < layout->n_groups; g++)
        n_nonfinite +=
            quantise_group(rule, values + g * GROUP, row + g * GROUP, row + layout->latent + g * 4);
    memcpy(row + layout->latent + 4 * layout->n_groups, values + layout->latent, (size_t)layout->rope * 2);
    return n_nonfinite;
}

static uint16_t load_u16(const uint8_t *bytes)
{
    return (uint16_t)(bytes[0] | bytes[1] << 8);
}

static float load_f32(const uint8_t *bytes)
{
    return f32_of_bits((uint32_t)load_u16(bytes) | (uint32_t)load_u16(bytes + 2) << 16);
}

/* The two factors of value i, or the value and 1. */
static void row_factors(const struct ref64_layout *layout, float raw_scale, const uint8_t *row, int i,
                        double *value_p, float *scale_p)
{
    *scale_p = 1;
    if (layout->encoding == REF64_BF16) {
        *value_p = ref64_bf16_decode(load_u16(row + 2 * i));
    } else if (layout->encoding == REF64_RAW) {
        *value_p = ref64_e4m3_decode(row[i]);
        *scale_p = raw_scale;
    } else if (i < layout->latent) {
        *value_p = ref64_e4m3_decode(row[i]);
        *scale_p = load_f32(row + layout->latent + i / GROUP * 4);
    } else {
        const uint8_t *rope = row + layout->latent + 4 * layout->n_groups;

        *value_p = ref64_bf16_decode(load_u16(rope + 2 * (i - layout->latent)));
    }
}

void ref64_dequant_row(const struct ref64_layout *layout, float raw_scale, const uint8_t *row, double *values)
{
    for (int i = 0; i < layout->d_qk; i++) {
        double value;
        float scale;

        row_factors(layout, raw_scale, row, i, &value, &scale);
        values[i] = value * (double)scale;
    }
}

void ref64_dequant_row_bf16(const struct ref64_layout *layout, float raw_scale, const uint8_t *row,
                            uint16_t *values)
{
    const uint8_t *bits = row + (layout->encoding == REF64_BF16 ? 0 : layout->latent + 4 * layout->n_groups);

    for (int i = 0; i < layout->d_qk; i++) {
        double value;
        float scale;

        row_factors(layout, raw_scale, row, i, &value, &scale);
        values[i] = ref64_bf16_encode((float)value * scale);
        /* bf16 parts are copied, not converted: a NaN keeps its payload. */
        if (layout->encoding == REF64_BF16)
            values[i] = load_u16(bits + 2 * i);
        else if (layout->encoding == REF64_SCALED && i >= layout->latent)
            values[i] = load_u16(bits + 2 * (i - layout->latent));
    }
}

/* ---- operations ---------------------------------------------------------------------------- */

int64_t ref64_map(int32_t logical, int64_t seq_len, const int32_t *table, int64_t n_table, int64_t n_pages)
{
    int64_t page;

    if (logical < 0 || logical >= seq_len || logical / PAGE_TOKENS >= n_table)
        return -1;
    page = table[logical / PAGE_TOKENS];
    if (page < 0 || page >= n_pages)
        return -1;
    return page * PAGE_TOKENS + logical % PAGE_TOKENS;
}

/* Dequantises the valid entries of row t, in list order; returns how many there are. */
static int gather_row(const struct ref64_attend *args, int t, double *rows, uint32_t *n_bad_p)
{
    const struct ref64_layout *layout = args->layout;
    int64_t pitch =
        args->page_pitch_bytes ? args->page_pitch_bytes : PAGE_TOKENS * (int64_t)layout->row_bytes;
    int64_t list_pitch = args->indices_row_elems ? args->indices_row_elems : args->topk;
    const int32_t *list = args->indices + t * list_pitch;
    int n_live = args->topk, n = 0;

    if (args->lengths && args->lengths[t] < n_live)
        n_live = args->lengths[t] < 0 ? 0 : args->lengths[t];
    for (int j = 0; j < n_live; j++) {
        int64_t slot = list[j];

        if (args->table)
            slot = ref64_map(list[j], args->seq_len, args->table, args->n_table, INT64_MAX);
        if (slot < 0 || slot >= args->n_slots) {
            *n_bad_p += list[j] != -1;
            continue;
        }
        ref64_dequant_row(layout, args->raw_scale,
                          args->pool + slot / PAGE_TOKENS * pitch + slot % PAGE_TOKENS * layout->row_bytes,
                          rows + (int64_t)n * layout->d_qk);
        n++;
    }
    return n;
}

static double dot(const double *a, const double *b, int n)
{
    double sum[4] = {0, 0, 0, 0};

    for (int i = 0; i < n; i += 4) { /* every width here is a multiple of 4 */
        for (int j = 0; j < 4; j++)
            sum[j] += a[i + j] * b[i + j];
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* One head of one row: scores holds n numbers of scratch. */
static double attend_head(const struct ref64_attend *args, const double *q, const double *rows, int n,
                          const float *sink, double *scores, double *out)
{
    int d_qk = args->layout->d_qk, d_v = args->layout->d_v;
    double max = -INFINITY, sum = 0, lse, factor;

    memset(out, 0, (size_t)d_v * sizeof(*out));
    if (n == 0)
        return -INFINITY;
    for (int j = 0; j < n; j++) {
        scores[j] = args->softmax_scale * dot(q, rows + (int64_t)j * d_qk, d_qk);
        if (!(scores[j] <= max)) /* a NaN becomes the maximum and spreads, as it should */
            max = scores[j];
    }
    for (int j = 0; j < n; j++)
        sum += exp(scores[j] - max);
    lse = max + log(sum);
    for (int j = 0; j < n; j++) {
        const double *v = rows + (int64_t)j * d_qk;
        double p = exp(scores[j] - lse);

        for (int d = 0; d < d_v; d++)
            out[d] += p * v[d];
    }
    factor = sink ? 1 / (1 + exp((double)*sink - lse)) : 1;
    for (int d = 0; d < d_v; d++)
        out[d] *= factor;
    return lse;
}

int ref64_attend(const struct ref64_attend *args, double *out, double *lse, uint32_t *n_bad)
{
    int d_qk = args->layout->d_qk, d_v = args->layout->d_v;
    int64_t head_pitch = args->q_head_elems ? args->q_head_elems : d_qk;
    int64_t row_pitch = args->q_row_elems ? args->q_row_elems : head_pitch * args->h_q;
    double *rows = malloc((size_t)args->topk * (size_t)d_qk * sizeof(double));
    double *scores = malloc((size_t)args->topk * sizeof(double));
    double *q = malloc((size_t)(d_qk + d_v) * sizeof(double)), *o = q + d_qk;
    int rc = rows && scores && q ? 0 : -1;

    for (int t = 0; rc == 0 && t < args->n_rows; t++) {
        uint32_t n_out_of_range = 0;
        int n = gather_row(args, t, rows, &n_out_of_range);

        if (n_bad)
            n_bad[t] = n_out_of_range;
        for (int h = 0; h < args->h_q; h++) {
            const uint16_t *bits = args->q + t * row_pitch + h * head_pitch;
            int64_t at = (int64_t)t * args->h_q + h;
            double l;

            for (int d = 0; d < d_qk; d++)
                q[d] = ref64_bf16_decode(bits[d]);
            l = attend_head(args, q, rows, n, args->sink ? args->sink + h : NULL, scores, o);
            if (lse)
                lse[at] = l;
            if (out)
                memcpy(out + at * d_v, o, (size_t)d_v * sizeof(*o));
        }
    }
    free(rows);
    free(scores);
    free(q);
    return rc;
}

void ref64_merge(const float *out_parts, const float *lse_parts, int n_parts, int64_t n, int d_v, double *out,
                 double *lse)
{
    for (int64_t i = 0; i < n; i++) {
        double max = -INFINITY, sum = 0;

        for (int p = 0; p < n_parts; p++)
            max = fmax(max, (double)lse_parts[p * n + i]);
        memset(out + i * d_v, 0, (size_t)d_v * sizeof(*out));
        for (int p = 0; p < n_parts; p++) {
            double l = (double)lse_parts[p * n + i];

            if (l != -INFINITY)
                sum += exp(l - max);
        }
        lse[i] = sum > 0 ? max + log(sum) : -INFINITY;
        for (int p = 0; p < n_parts; p++) {
            double l = (double)lse_parts[p * n + i];

            if (l == -INFINITY)
                continue;
            for (int d = 0; d < d_v; d++)
                out[i * d_v + d] += exp(l - lse[i]) * (double)out_parts[(p * n + i) * d_v + d];
        }
    }
}

/* ---- comparison ---------------------------------------------------------------------------- */

static void diff_mark(struct ref64_diff *diff, const char *rule, int64_t i, double got, double ref)
{
    diff->n_bad++;
    if (!diff->ok)
        return;
    diff->ok = false;
    diff->rule = rule;
    diff->first_bad = i;
    diff->got = got;
    diff->ref = ref;
}

static bool is_same_anomaly(double got, double ref)
{
    if (isnan(ref))
        return isnan(got);
    return !isnan(got) && got == ref;
}

struct ref64_diff ref64_compare(const float *got, const double *ref, int64_t n, double abs_tol,
                                double rel_tol, double cosine_limit)
{
    struct ref64_diff diff = {.ok = true, .rule = "", .first_bad = -1};
    double xy = 0, xx = 0, yy = 0;

    for (int64_t i = 0; i < n; i++) {
        double g = (double)got[i];

        if ((!isfinite(ref[i]) || !isfinite(g)) && !is_same_anomaly(g, ref[i]))
            diff_mark(&diff, "anomaly", i, g, ref[i]);
    }
    if (!diff.ok)
        return diff;
    for (int64_t i = 0; i < n; i++) {
        double g = (double)got[i], err, allowed;

        if (!isfinite(ref[i]))
            continue;
        err = fabs(g - ref[i]);
        allowed = abs_tol + rel_tol * fabs(ref[i]);
        diff.worst_err = fmax(diff.worst_err, err);
        diff.worst_part = fmax(diff.worst_part, allowed > 0 ? err / allowed : (err > 0 ? INFINITY : 0));
        if (err > allowed)
            diff_mark(&diff, "element", i, g, ref[i]);
        xy += g * ref[i];
        xx += g * g;
        yy += ref[i] * ref[i];
    }
    diff.cosine = xx + yy > 0 ? 1 - 2 * xy / (xx + yy) : 0;
    if (diff.ok && cosine_limit >= 0 && diff.cosine > cosine_limit) {
        diff.ok = false;
        diff.rule = "cosine";
    }
    return diff;
}

struct ref64_diff ref64_compare_out(const float *got, const double *ref, int64_t n)
{
    return ref64_compare(got, ref, n, 1e-3, 2.01 / 128, 5e-6);
}

struct ref64_diff ref64_compare_lse(const float *got, const double *ref, int64_t n)
{
    return ref64_compare(got, ref, n, 1e-6, 8.01 / 65536, -1);
}

void ref64_diff_text(const struct ref64_diff *diff, int64_t n, char *text, size_t size)
{
    if (diff->ok)
        snprintf(text, size, "equal within tolerance (worst error %.3g)", diff->worst_err);
    else if (diff->first_bad < 0)
        snprintf(text, size, "%s distance %.3g is too large (worst error %.3g)", diff->rule, diff->cosine,
                 diff->worst_err);
    else
        snprintf(text, size, "%s at %lld of %lld: got %.9g, expected %.9g (%lld bad, worst error %.3g)",
                 diff->rule, (long long)diff->first_bad, (long long)n, diff->got, diff->ref,
                 (long long)diff->n_bad, diff->worst_err);
}
