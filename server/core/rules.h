/* rules.h - the support rules: one table that says what is served. Pure; any thread.
 *
 * Start-up asks srv_rules_check_config, each attend srv_rules_check_attend; both refuse by name.
 * GetCapabilities lists the same rows. A new combination is served by adding a row here, never by an if
 * elsewhere. */
#ifndef SERVER_CORE_RULES_H
#define SERVER_CORE_RULES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/core/err.h"

#define SRV_PHASE_PREFILL 1u
#define SRV_PHASE_DECODE  2u
#define SRV_TIER_NONE     1u /* no host tier */
#define SRV_TIER_MEMFD    2u /* client tensors in shared host memory */

/* One row. A combination is served when a row with accepts = true matches it on every axis and no row with
 * accepts = false does. A mask, bound or string that is 0 or NULL matches anything. Of something asked for
 * as a set (host tiers, or both phases when a request gives none) an accepting row must have all, a refusing
 * row one. */
struct srv_rule {
    const char *name; /* stable, "cpu_scaled_512_64" */
    bool accepts;
    const char *device_kind; /* "cpu", "cuda", "hip" */
    uint32_t layouts;        /* mask of 1 << layout id */
    uint32_t q_dtypes;       /* mask of 1 << dtype (1 = bf16, 2 = f32) */
    uint32_t d_qk;           /* width of q */
    uint32_t min_heads, max_heads;
    uint32_t phases; /* mask of SRV_PHASE_* */
    uint32_t min_context_parallel, max_context_parallel;
    uint32_t host_tiers;      /* mask of SRV_TIER_* */
    bool when_layouts_differ; /* matches only a start-up whose prefill and decode layouts differ */
    const char *reason;
};

struct srv_rule_query {
    const char *device_kind;
    uint32_t layout;
    uint32_t q_dtype;
    uint32_t d_qk;
    uint32_t h_q;
    uint32_t phase; /* one SRV_PHASE_*, or 0 when the request gives none: then both must be served */
    uint32_t context_parallel; /* >= 1 */
    uint32_t host_tier;        /* one SRV_TIER_* */
};

/* What start-up wants to serve. */
struct srv_rule_config {
    const char *device_kind;
    uint32_t prefill_layout; /* prefill and decode of one pool must agree */
    uint32_t decode_layout;
    uint32_t context_parallel;
    uint32_t host_tiers; /* mask */
};

const struct srv_rule *srv_rules_table(size_t *n_rules_p);

/* DSA_OK, or DSA_E_UNSUPPORTED with err->rule = the rule that refused (the first refusing row that matches,
 * or the accepting row that came closest), err->field = the axis ("device", "layout", "q.dtype", "d_qk",
 * "heads", "phase", "context_parallel", "host_tier"), err->value = what was asked for, err->text = the row's
 * reason. DSA_E_BAD_LAYOUT for a layout id that is unknown; err->field is "layout", or at start-up
 * "prefill_layout" or "decode_layout". */
SRV_MUST_CHECK dsa_status srv_rules_check_attend(const struct srv_rule_query *query, struct srv_err *err);
SRV_MUST_CHECK dsa_status srv_rules_check_config(const struct srv_rule_config *config, struct srv_err *err);

#endif /* SERVER_CORE_RULES_H */
