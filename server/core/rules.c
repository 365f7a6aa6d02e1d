#include "server/core/rules.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kernels/dsk_format.h"

#define BF16_ONLY   (1u << DSK_DTYPE_BF16)
#define BOTH_PHASES (SRV_PHASE_PREFILL | SRV_PHASE_DECODE)
#define BOTH_TIERS  (SRV_TIER_NONE | SRV_TIER_MEMFD)

/* ---- the table
 * ---------------------------------------------------------------------------------------------- */

#define ROW(kind, layout_name, layout_id, width, why)                                                        \
    {                                                                                                        \
        .name = kind "_" layout_name, .accepts = true, .device_kind = kind, .layouts = 1u << (layout_id),    \
        .q_dtypes = BF16_ONLY, .d_qk = (width), .min_heads = 1, .max_heads = DSK_MAX_HEADS,                  \
        .phases = BOTH_PHASES, .min_context_parallel = 1, .max_context_parallel = 1,                         \
        .host_tiers = BOTH_TIERS, .reason = why                                                              \
    }

/* A kind that serves every layout, with q as wide as the layout's rows. */
#define ALL_LAYOUTS(kind, why)                                                                               \
    ROW(kind, "scaled_512_64", DSK_LAYOUT_SCALED_512_64, 576, why),                                          \
        ROW(kind, "scaled_512_0", DSK_LAYOUT_SCALED_512_0, 512, why),                                        \
        ROW(kind, "scaled_256_0", DSK_LAYOUT_SCALED_256_0, 256, why),                                        \
        ROW(kind, "bf16_576", DSK_LAYOUT_BF16_576, 576, why),                                                \
        ROW(kind, "bf16_512", DSK_LAYOUT_BF16_512, 512, why),                                                \
        ROW(kind, "bf16_256", DSK_LAYOUT_BF16_256, 256, why),                                                \
        ROW(kind, "raw_512_64", DSK_LAYOUT_RAW_512_64, 576, why)

static const struct srv_rule table[] = {
    ALL_LAYOUTS("cpu", "served on the CPU: bf16 q as wide as the layout's rows, 1 to 128 heads"),
    ALL_LAYOUTS("cuda", "served on NVIDIA GPUs: bf16 q as wide as the layout's rows, 1 to 128 heads"),
    ALL_LAYOUTS("hip", "served on AMD GPUs: bf16 q as wide as the layout's rows, 1 to 128 heads"),
    {
        .name = "pool_layout_agrees",
        .when_layouts_differ = true,
        .reason = "prefill and decode share one pool, so their layouts must be the same",
    },
    {
        .name = "cpu_no_context_parallel",
        .device_kind = "cpu",
        .min_context_parallel = 2,
        .reason = "a sequence that is sharded over ranks is not served on the CPU",
    },
    {
        .name = "cuda_no_context_parallel",
        .device_kind = "cuda",
        .min_context_parallel = 2,
        .reason = "a sequence that is sharded over ranks is not served on GPUs yet",
    },
    {
        .name = "hip_no_context_parallel",
        .device_kind = "hip",
        .min_context_parallel = 2,
        .reason = "a sequence that is sharded over ranks is not served on GPUs yet",
    },
};

#define N_RULES (sizeof(table) / sizeof(table[0]))

static const char *const layout_names[] = {
    [DSK_LAYOUT_NONE] = "none",
    [DSK_LAYOUT_SCALED_512_64] = "scaled_512_64",
    [DSK_LAYOUT_SCALED_512_0] = "scaled_512_0",
    [DSK_LAYOUT_SCALED_256_0] = "scaled_256_0",
    [DSK_LAYOUT_BF16_576] = "bf16_576",
    [DSK_LAYOUT_BF16_512] = "bf16_512",
    [DSK_LAYOUT_BF16_256] = "bf16_256",
    [DSK_LAYOUT_RAW_512_64] = "raw_512_64",
};
_Static_assert(sizeof(layout_names) / sizeof(layout_names[0]) == DSK_LAYOUT_COUNT, "a name for every layout");

const struct srv_rule *srv_rules_table(size_t *n_rules_p)
{
    *n_rules_p = N_RULES;
    return table;
}

/* ---- matching
 * ----------------------------------------------------------------------------------------------- */

/* In the order in which they are looked at; the row that gets furthest came closest. */
enum axis {
    AXIS_DEVICE,
    AXIS_LAYOUTS_DIFFER,
    AXIS_LAYOUT,
    AXIS_Q_DTYPE,
    AXIS_D_QK,
    AXIS_HEADS,
    AXIS_PHASE,
    AXIS_CONTEXT_PARALLEL,
    AXIS_HOST_TIER,
    N_AXES
};

static const char *const axis_fields[N_AXES] = {
    [AXIS_DEVICE] = "device",       [AXIS_LAYOUTS_DIFFER] = "layout",
    [AXIS_LAYOUT] = "layout",       [AXIS_Q_DTYPE] = "q.dtype",
    [AXIS_D_QK] = "d_qk",           [AXIS_HEADS] = "heads",
    [AXIS_PHASE] = "phase",         [AXIS_CONTEXT_PARALLEL] = "context_parallel",
    [AXIS_HOST_TIER] = "host_tier",
};

/* A query or a configuration, in one form. */
struct ask {
    const char *device_kind;
    uint32_t layout;
    uint32_t decode_layout; /* = layout for a query */
    bool has_q;             /* a configuration knows no dtype, width and heads yet */
    uint32_t q_dtype;
    uint32_t d_qk;
    uint32_t h_q;
    uint32_t phases;
    uint32_t context_parallel;
    uint32_t host_tiers;
};

/* Dtypes and layouts come from clients: no shift by 32 or more. */
static uint32_t bit(uint32_t n)
{
    return n < 32 ? 1u << n : 0;
}

static bool bits_match(const struct srv_rule *rule, uint32_t row, uint32_t asked)
{
    if (row == 0)
        return true;
    return rule->accepts ? asked != 0 && (asked & ~row) == 0 : (asked & row) != 0;
}

static bool is_between(uint32_t value, uint32_t min, uint32_t max)
{
    return value >= min && (max == 0 || value <= max);
}

static bool q_matches(const struct srv_rule *rule, enum axis axis, const struct ask *ask)
{
    switch (axis) {
    case AXIS_Q_DTYPE:
        return bits_match(rule, rule->q_dtypes, bit(ask->q_dtype));
    case AXIS_D_QK:
        return rule->d_qk == 0 || rule->d_qk == ask->d_qk;
    default:
        return is_between(ask->h_q, rule->min_heads, rule->max_heads);
    }
}

/* Whether the row says anything about this axis. */
static bool names_axis(const struct srv_rule *rule, enum axis axis)
{
    switch (axis) {
    case AXIS_DEVICE:
        return rule->device_kind != NULL;
    case AXIS_LAYOUTS_DIFFER:
        return rule->when_layouts_differ;
    case AXIS_LAYOUT:
        return rule->layouts != 0;
    case AXIS_Q_DTYPE:
        return rule->q_dtypes != 0;
    case AXIS_D_QK:
        return rule->d_qk != 0;
    case AXIS_HEADS:
        return rule->min_heads != 0 || rule->max_heads != 0;
    case AXIS_PHASE:
        return rule->phases != 0;
    case AXIS_CONTEXT_PARALLEL:
        return rule->min_context_parallel != 0 || rule->max_context_parallel != 0;
    case AXIS_HOST_TIER:
        return rule->host_tiers != 0;
    case N_AXES:
        break;
    }
    return false;
}

static bool axis_matches(const struct srv_rule *rule, enum axis axis, const struct ask *ask)
{
    if (!names_axis(rule, axis))
        return true;
    switch (axis) {
    case AXIS_DEVICE:
        return strcmp(rule->device_kind, ask->device_kind) == 0;
    case AXIS_LAYOUTS_DIFFER:
        return ask->layout != ask->decode_layout;
    case AXIS_LAYOUT:
        return bits_match(rule, rule->layouts, bit(ask->layout) | bit(ask->decode_layout));
    case AXIS_Q_DTYPE:
    case AXIS_D_QK:
    case AXIS_HEADS:
        /* Without a q an accepting row may still serve; a refusing one has nothing to refuse. */
        return ask->has_q ? q_matches(rule, axis, ask) : rule->accepts;
    case AXIS_PHASE:
        return bits_match(rule, rule->phases, ask->phases);
    case AXIS_CONTEXT_PARALLEL:
        return is_between(ask->context_parallel, rule->min_context_parallel, rule->max_context_parallel);
    case AXIS_HOST_TIER:
        return bits_match(rule, rule->host_tiers, ask->host_tiers);
    case N_AXES:
        break;
    }
    return false;
}

/* N_AXES when all match. */
static enum axis first_mismatch(const struct srv_rule *rule, const struct ask *ask)
{
    enum axis axis = AXIS_DEVICE;

    while (axis < N_AXES && axis_matches(rule, axis, ask))
        axis++;
    return axis;
}

/* ---- refusing
 * ----------------------------------------------------------------------------------------------- */

static const char *phase_text(uint32_t phases)
{
    switch (phases) {
    case SRV_PHASE_PREFILL:
        return "prefill";
    case SRV_PHASE_DECODE:
        return "decode";
    case BOTH_PHASES:
        return "prefill+decode";
    default:
        return "unknown";
    }
}

static const char *dtype_text(uint32_t dtype)
{
    switch (dtype) {
    case DSK_DTYPE_BF16:
        return "bf16";
    case DSK_DTYPE_F32:
        return "f32";
    default:
        return "unknown";
    }
}

static const char *tier_text(uint32_t tiers)
{
    switch (tiers) {
    case SRV_TIER_NONE:
        return "none";
    case SRV_TIER_MEMFD:
        return "memfd";
    case BOTH_TIERS:
        return "none+memfd";
    default:
        return "unknown";
    }
}

static void write_value(enum axis axis, const struct ask *ask, char *value_p, size_t size)
{
    switch (axis) {
    case AXIS_DEVICE:
        snprintf(value_p, size, "%s", ask->device_kind);
        break;
    case AXIS_LAYOUTS_DIFFER:
        snprintf(value_p, size, "%s and %s", layout_names[ask->layout], layout_names[ask->decode_layout]);
        break;
    case AXIS_LAYOUT:
        snprintf(value_p, size, "%s", layout_names[ask->layout]);
        break;
    case AXIS_Q_DTYPE:
        snprintf(value_p, size, "%s (%" PRIu32 ")", dtype_text(ask->q_dtype), ask->q_dtype);
        break;
    case AXIS_D_QK:
        snprintf(value_p, size, "%" PRIu32, ask->d_qk);
        break;
    case AXIS_HEADS:
        snprintf(value_p, size, "%" PRIu32, ask->h_q);
        break;
    case AXIS_PHASE:
        snprintf(value_p, size, "%s (%" PRIu32 ")", phase_text(ask->phases), ask->phases);
        break;
    case AXIS_CONTEXT_PARALLEL:
        snprintf(value_p, size, "%" PRIu32, ask->context_parallel);
        break;
    case AXIS_HOST_TIER:
        snprintf(value_p, size, "%s (%" PRIu32 ")", tier_text(ask->host_tiers), ask->host_tiers);
        break;
    case N_AXES:
        break;
    }
}

static dsa_status refuse(const struct srv_rule *rule, enum axis axis, const struct ask *ask,
                         struct srv_err *err)
{
    char value[64] = "";

    if (!err)
        return DSA_E_UNSUPPORTED;
    write_value(axis, ask, value, sizeof(value));
    (void)srv_fail(err, DSA_E_UNSUPPORTED, axis_fields[axis], "%s", value, "%s", rule->reason);
    snprintf(err->rule, sizeof(err->rule), "%s", rule->name);
    return DSA_E_UNSUPPORTED;
}

/* A refusing row is about the last axis that it names: the ones before say where it applies. */
static enum axis last_axis(const struct srv_rule *rule)
{
    enum axis last = AXIS_DEVICE;

    for (enum axis axis = AXIS_DEVICE; axis < N_AXES; axis++)
        if (names_axis(rule, axis))
            last = axis;
    return last;
}

static dsa_status check(const struct ask *ask, struct srv_err *err)
{
    const struct srv_rule *closest = NULL;
    enum axis closest_axis = AXIS_DEVICE;
    bool is_served = false;

    for (size_t i = 0; i < N_RULES; i++) {
        const struct srv_rule *rule = &table[i];
        enum axis axis = first_mismatch(rule, ask);

        if (!rule->accepts) {
            if (axis == N_AXES)
                return refuse(rule, last_axis(rule), ask, err);
        } else if (axis == N_AXES) {
            is_served = true;
        } else if (!closest || axis > closest_axis) {
            closest = rule;
            closest_axis = axis;
        }
    }
    return is_served ? DSA_OK : refuse(closest, closest_axis, ask, err);
}

static dsa_status check_layout(const char *field, uint32_t layout, struct srv_err *err)
{
    if (layout != DSK_LAYOUT_NONE && layout < DSK_LAYOUT_COUNT)
        return DSA_OK;
    return srv_fail(err, DSA_E_BAD_LAYOUT, field, "%" PRIu32, layout, "no layout has this id");
}

dsa_status srv_rules_check_attend(const struct srv_rule_query *query, struct srv_err *err)
{
    struct ask ask = {
        .device_kind = query->device_kind ? query->device_kind : "",
        .layout = query->layout,
        .decode_layout = query->layout,
        .has_q = true,
        .q_dtype = query->q_dtype,
        .d_qk = query->d_qk,
        .h_q = query->h_q,
        .phases = query->phase ? query->phase : BOTH_PHASES,
        .context_parallel = query->context_parallel,
        .host_tiers = query->host_tier,
    };
    dsa_status status = check_layout("layout", query->layout, err);

    return status != DSA_OK ? status : check(&ask, err);
}

dsa_status srv_rules_check_config(const struct srv_rule_config *config, struct srv_err *err)
{
    struct ask ask = {
        .device_kind = config->device_kind ? config->device_kind : "",
        .layout = config->prefill_layout,
        .decode_layout = config->decode_layout,
        .phases = BOTH_PHASES,
        .context_parallel = config->context_parallel,
        .host_tiers = config->host_tiers,
    };
    dsa_status status = check_layout("prefill_layout", config->prefill_layout, err);

    if (status == DSA_OK)
        status = check_layout("decode_layout", config->decode_layout, err);
    return status != DSA_OK ? status : check(&ask, err);
}
