/* rules: every row of the table both serves and refuses, by name. */
#include "server/core/rules.h"

#include <stdio.h>
#include <string.h>

#include "kernels/dsk.h"
#include "kit.h"
#include "test_main.h"

#define BF16     DSK_DTYPE_BF16
#define F32      DSK_DTYPE_F32
#define PREFILL  SRV_PHASE_PREFILL
#define DECODE   SRV_PHASE_DECODE
#define NO_TIER  SRV_TIER_NONE
#define MEMFD    SRV_TIER_MEMFD
#define L_512_64 DSK_LAYOUT_SCALED_512_64
#define L_512_0  DSK_LAYOUT_SCALED_512_0
#define L_256_0  DSK_LAYOUT_SCALED_256_0
#define L_B576   DSK_LAYOUT_BF16_576
#define L_B512   DSK_LAYOUT_BF16_512
#define L_B256   DSK_LAYOUT_BF16_256
#define L_RAW    DSK_LAYOUT_RAW_512_64

/* rule: the row that the case is about: it serves the query, or it refuses it. A refusing row "serves" by
 * letting the nearest query pass that it does not mean. */
struct attend_case {
    const char *rule;
    bool is_served;
    struct srv_rule_query query; /* device, layout, q dtype, d_qk, heads, phase, context parallel, tier */
    const char *field, *value;
};

static const struct attend_case attend_cases[] = {
    {"cpu_scaled_512_64", true, {"cpu", L_512_64, BF16, 576, 1, PREFILL, 1, NO_TIER}, NULL, NULL},
    {"cpu_scaled_512_64", true, {"cpu", L_512_64, BF16, 576, 128, DECODE, 1, MEMFD}, NULL, NULL},
    {"cpu_scaled_512_64", true, {"cpu", L_512_64, BF16, 576, 64, 0, 1, MEMFD}, NULL, NULL},
    {"cpu_scaled_512_64", false, {"cpu", L_512_64, F32, 576, 64, DECODE, 1, NO_TIER}, "q.dtype", "f32 (2)"},
    {"cpu_scaled_512_64", false, {"cpu", L_512_64, 0, 576, 64, DECODE, 1, NO_TIER}, "q.dtype", "unknown (0)"},
    {"cpu_scaled_512_64",
     false,
     {"cpu", L_512_64, 33, 576, 64, DECODE, 1, NO_TIER},
     "q.dtype",
     "unknown (33)"},
    {"cpu_scaled_512_64", false, {"cpu", L_512_64, BF16, 512, 64, DECODE, 1, NO_TIER}, "d_qk", "512"},
    {"cpu_scaled_512_64", false, {"cpu", L_512_64, BF16, 0, 64, DECODE, 1, NO_TIER}, "d_qk", "0"},
    {"cpu_scaled_512_64", false, {"cpu", L_512_64, BF16, 576, 0, DECODE, 1, NO_TIER}, "heads", "0"},
    {"cpu_scaled_512_64", false, {"cpu", L_512_64, BF16, 576, 129, DECODE, 1, NO_TIER}, "heads", "129"},
    {"cpu_scaled_512_64", false, {"cpu", L_512_64, BF16, 576, 64, 4, 1, NO_TIER}, "phase", "unknown (4)"},
    {"cpu_scaled_512_64",
     false,
     {"cpu", L_512_64, BF16, 576, 64, DECODE, 0, NO_TIER},
     "context_parallel",
     "0"},
    {"cpu_scaled_512_64", false, {"cpu", L_512_64, BF16, 576, 64, DECODE, 1, 0}, "host_tier", "unknown (0)"},
    {"cpu_scaled_512_64", false, {"cpu", L_512_64, BF16, 576, 64, DECODE, 1, 4}, "host_tier", "unknown (4)"},
    {"cpu_scaled_512_64", false, {"tpu", L_512_64, BF16, 576, 64, DECODE, 1, MEMFD}, "device", "tpu"},
    {"cpu_scaled_512_64", false, {NULL, L_512_64, BF16, 576, 64, DECODE, 1, MEMFD}, "device", ""},
    {"cpu_scaled_512_0", true, {"cpu", L_512_0, BF16, 512, 16, DECODE, 1, MEMFD}, NULL, NULL},
    {"cpu_scaled_512_0", false, {"cpu", L_512_0, BF16, 576, 16, DECODE, 1, MEMFD}, "d_qk", "576"},
    {"cpu_scaled_256_0", true, {"cpu", L_256_0, BF16, 256, 16, PREFILL, 1, MEMFD}, NULL, NULL},
    {"cpu_scaled_256_0", false, {"cpu", L_256_0, BF16, 264, 16, PREFILL, 1, MEMFD}, "d_qk", "264"},
    {"cpu_bf16_576", true, {"cpu", L_B576, BF16, 576, 128, PREFILL, 1, MEMFD}, NULL, NULL},
    {"cpu_bf16_576", false, {"cpu", L_B576, BF16, 576, 256, PREFILL, 1, MEMFD}, "heads", "256"},
    {"cpu_bf16_512", true, {"cpu", L_B512, BF16, 512, 8, PREFILL, 1, NO_TIER}, NULL, NULL},
    {"cpu_bf16_512", false, {"cpu", L_B512, F32, 512, 8, PREFILL, 1, NO_TIER}, "q.dtype", "f32 (2)"},
    {"cpu_bf16_256", true, {"cpu", L_B256, BF16, 256, 8, DECODE, 1, NO_TIER}, NULL, NULL},
    {"cpu_bf16_256", false, {"cpu", L_B256, BF16, 255, 8, DECODE, 1, NO_TIER}, "d_qk", "255"},
    {"cpu_raw_512_64", true, {"cpu", L_RAW, BF16, 576, 8, DECODE, 1, NO_TIER}, NULL, NULL},
    {"cpu_raw_512_64", false, {"cpu", L_RAW, BF16, 512, 8, DECODE, 1, NO_TIER}, "d_qk", "512"},
    {"cpu_no_context_parallel", true, {"cpu", L_RAW, BF16, 576, 8, DECODE, 1, NO_TIER}, NULL, NULL},
    {"cpu_no_context_parallel",
     false,
     {"cpu", L_RAW, BF16, 576, 8, DECODE, 2, NO_TIER},
     "context_parallel",
     "2"},
    {"cuda_scaled_512_64", true, {"cuda", L_512_64, BF16, 576, 64, DECODE, 1, MEMFD}, NULL, NULL},
    {"cuda_scaled_512_64", false, {"cuda", L_512_64, BF16, 512, 64, DECODE, 1, MEMFD}, "d_qk", "512"},
    {"cuda_scaled_512_0", true, {"cuda", L_512_0, BF16, 512, 16, DECODE, 1, MEMFD}, NULL, NULL},
    {"cuda_scaled_512_0", false, {"cuda", L_512_0, BF16, 576, 16, DECODE, 1, MEMFD}, "d_qk", "576"},
    {"cuda_scaled_256_0", true, {"cuda", L_256_0, BF16, 256, 8, PREFILL, 1, MEMFD}, NULL, NULL},
    {"cuda_scaled_256_0", false, {"cuda", L_256_0, BF16, 256, 129, PREFILL, 1, MEMFD}, "heads", "129"},
    {"cuda_bf16_576", true, {"cuda", L_B576, BF16, 576, 128, PREFILL, 1, MEMFD}, NULL, NULL},
    {"cuda_bf16_576", false, {"cuda", L_B576, F32, 576, 128, PREFILL, 1, MEMFD}, "q.dtype", "f32 (2)"},
    {"cuda_bf16_512", true, {"cuda", L_B512, BF16, 512, 8, PREFILL, 1, NO_TIER}, NULL, NULL},
    {"cuda_bf16_512", false, {"cuda", L_B512, BF16, 511, 8, PREFILL, 1, NO_TIER}, "d_qk", "511"},
    {"cuda_bf16_256", true, {"cuda", L_B256, BF16, 256, 8, DECODE, 1, NO_TIER}, NULL, NULL},
    {"cuda_bf16_256", false, {"cuda", L_B256, BF16, 255, 8, DECODE, 1, NO_TIER}, "d_qk", "255"},
    {"cuda_raw_512_64", true, {"cuda", L_RAW, BF16, 576, 8, DECODE, 1, NO_TIER}, NULL, NULL},
    {"cuda_raw_512_64", false, {"cuda", L_RAW, BF16, 512, 8, DECODE, 1, NO_TIER}, "d_qk", "512"},
    {"cuda_no_context_parallel", true, {"cuda", L_RAW, BF16, 576, 8, DECODE, 1, NO_TIER}, NULL, NULL},
    {"cuda_no_context_parallel",
     false,
     {"cuda", L_RAW, BF16, 576, 8, DECODE, 2, NO_TIER},
     "context_parallel",
     "2"},
    {"hip_scaled_512_64", true, {"hip", L_512_64, BF16, 576, 64, DECODE, 1, MEMFD}, NULL, NULL},
    {"hip_scaled_512_64", false, {"hip", L_512_64, BF16, 512, 64, DECODE, 1, MEMFD}, "d_qk", "512"},
    {"hip_scaled_512_0", true, {"hip", L_512_0, BF16, 512, 16, DECODE, 1, MEMFD}, NULL, NULL},
    {"hip_scaled_512_0", false, {"hip", L_512_0, BF16, 576, 16, DECODE, 1, MEMFD}, "d_qk", "576"},
    {"hip_scaled_256_0", true, {"hip", L_256_0, BF16, 256, 8, PREFILL, 1, MEMFD}, NULL, NULL},
    {"hip_scaled_256_0", false, {"hip", L_256_0, BF16, 256, 129, PREFILL, 1, MEMFD}, "heads", "129"},
    {"hip_bf16_576", true, {"hip", L_B576, BF16, 576, 128, PREFILL, 1, MEMFD}, NULL, NULL},
    {"hip_bf16_576", false, {"hip", L_B576, F32, 576, 128, PREFILL, 1, MEMFD}, "q.dtype", "f32 (2)"},
    {"hip_bf16_512", true, {"hip", L_B512, BF16, 512, 8, PREFILL, 1, NO_TIER}, NULL, NULL},
    {"hip_bf16_512", false, {"hip", L_B512, BF16, 511, 8, PREFILL, 1, NO_TIER}, "d_qk", "511"},
    {"hip_bf16_256", true, {"hip", L_B256, BF16, 256, 8, DECODE, 1, NO_TIER}, NULL, NULL},
    {"hip_bf16_256", false, {"hip", L_B256, BF16, 255, 8, DECODE, 1, NO_TIER}, "d_qk", "255"},
    {"hip_raw_512_64", true, {"hip", L_RAW, BF16, 576, 8, DECODE, 1, NO_TIER}, NULL, NULL},
    {"hip_raw_512_64", false, {"hip", L_RAW, BF16, 512, 8, DECODE, 1, NO_TIER}, "d_qk", "512"},
    {"hip_no_context_parallel", true, {"hip", L_RAW, BF16, 576, 8, DECODE, 1, NO_TIER}, NULL, NULL},
    {"hip_no_context_parallel",
     false,
     {"hip", L_RAW, BF16, 576, 8, DECODE, 2, NO_TIER},
     "context_parallel",
     "2"},
};
#define N_ATTEND_CASES (sizeof(attend_cases) / sizeof(attend_cases[0]))

struct config_case {
    const char *rule;
    bool is_served;
    struct srv_rule_config config; /* device, prefill layout, decode layout, context parallel, tiers */
    const char *field, *value;
};

static const struct config_case config_cases[] = {
    {"cpu_scaled_512_64", true, {"cpu", L_512_64, L_512_64, 1, NO_TIER | MEMFD}, NULL, NULL},
    {"cpu_scaled_512_64", false, {"cpu", L_512_64, L_512_64, 1, 0}, "host_tier", "unknown (0)"},
    {"cpu_scaled_512_64", false, {"cpu", L_512_64, L_512_64, 1, MEMFD | 8}, "host_tier", "unknown (10)"},
    {"cpu_scaled_512_64", false, {"cpu", L_512_64, L_512_64, 0, MEMFD}, "context_parallel", "0"},
    {"cpu_scaled_512_64", false, {"tpu", L_512_64, L_512_64, 1, MEMFD}, "device", "tpu"},
    {"cpu_raw_512_64", true, {"cpu", L_RAW, L_RAW, 1, MEMFD}, NULL, NULL},
    {"pool_layout_agrees", true, {"cpu", L_256_0, L_256_0, 1, MEMFD}, NULL, NULL},
    {"pool_layout_agrees",
     false,
     {"cpu", L_512_64, L_512_0, 1, MEMFD},
     "layout",
     "scaled_512_64 and scaled_512_0"},
    {"pool_layout_agrees", false, {"cpu", L_B576, L_RAW, 1, MEMFD}, "layout", "bf16_576 and raw_512_64"},
    {"cpu_no_context_parallel", true, {"cpu", L_512_64, L_512_64, 1, MEMFD}, NULL, NULL},
    {"cpu_no_context_parallel", false, {"cpu", L_512_64, L_512_64, 8, MEMFD}, "context_parallel", "8"},
    {"cuda_scaled_512_64", true, {"cuda", L_512_64, L_512_64, 1, MEMFD}, NULL, NULL},
    {"cuda_no_context_parallel", false, {"cuda", L_512_64, L_512_64, 4, MEMFD}, "context_parallel", "4"},
    {"hip_scaled_512_64", true, {"hip", L_512_64, L_512_64, 1, MEMFD}, NULL, NULL},
    {"hip_no_context_parallel", false, {"hip", L_512_64, L_512_64, 2, MEMFD}, "context_parallel", "2"},
};
#define N_CONFIG_CASES (sizeof(config_cases) / sizeof(config_cases[0]))

static void check_outcome(const char *what, size_t i, const char *rule, bool is_served, const char *field,
                          const char *value, dsa_status status, const struct srv_err *err)
{
    if (is_served) {
        ck_assert_msg(status == DSA_OK, "%s %zu: refused by %s: %s", what, i, err->rule, err->text);
        return;
    }
    ck_assert_msg(status == DSA_E_UNSUPPORTED, "%s %zu: status %d", what, i, status);
    ck_assert_msg(strcmp(err->rule, rule) == 0, "%s %zu: rule %s", what, i, err->rule);
    ck_assert_msg(strcmp(err->field, field) == 0, "%s %zu: field %s", what, i, err->field);
    ck_assert_msg(strcmp(err->value, value) == 0, "%s %zu: value %s", what, i, err->value);
    ck_assert_uint_gt(strlen(err->text), strlen(rule));
}

START_TEST(attends_are_served_or_refused_by_name)
{
    for (size_t i = 0; i < N_ATTEND_CASES; i++) {
        const struct attend_case *c = &attend_cases[i];
        struct srv_err err = {0};
        dsa_status status = srv_rules_check_attend(&c->query, &err);

        check_outcome("attend", i, c->rule, c->is_served, c->field, c->value, status, &err);
        ck_assert_int_eq(srv_rules_check_attend(&c->query, NULL), status);
    }
}
END_TEST

START_TEST(configurations_are_served_or_refused_by_name)
{
    for (size_t i = 0; i < N_CONFIG_CASES; i++) {
        const struct config_case *c = &config_cases[i];
        struct srv_err err = {0};
        dsa_status status = srv_rules_check_config(&c->config, &err);

        check_outcome("config", i, c->rule, c->is_served, c->field, c->value, status, &err);
        ck_assert_int_eq(srv_rules_check_config(&c->config, NULL), status);
    }
}
END_TEST

static int n_cases(const char *rule, bool is_served)
{
    int n = 0;

    for (size_t i = 0; i < N_ATTEND_CASES; i++)
        n += attend_cases[i].is_served == is_served && strcmp(attend_cases[i].rule, rule) == 0;
    for (size_t i = 0; i < N_CONFIG_CASES; i++)
        n += config_cases[i].is_served == is_served && strcmp(config_cases[i].rule, rule) == 0;
    return n;
}

/* A row without both is a row that nobody has tried. */
START_TEST(every_row_has_an_accepting_and_a_refusing_case)
{
    size_t n_rules;
    const struct srv_rule *table = srv_rules_table(&n_rules);

    ck_assert_uint_gt(n_rules, 0);
    for (size_t i = 0; i < n_rules; i++) {
        ck_assert_msg(n_cases(table[i].name, true) > 0, "no accepting case for %s", table[i].name);
        ck_assert_msg(n_cases(table[i].name, false) > 0, "no refusing case for %s", table[i].name);
    }
}
END_TEST

/* A case says it is about a row: the query must be one that this row alone could serve. */
START_TEST(accepting_cases_are_served_by_the_row_they_name)
{
    size_t n_rules;
    const struct srv_rule *table = srv_rules_table(&n_rules);

    for (size_t i = 0; i < N_ATTEND_CASES; i++)
        for (size_t k = 0; k < n_rules && attend_cases[i].is_served; k++)
            if (table[k].accepts && strcmp(table[k].name, attend_cases[i].rule) == 0)
                ck_assert_msg(table[k].layouts == 1u << attend_cases[i].query.layout,
                              "case %zu: not of row %s", i, table[k].name);
}
END_TEST

START_TEST(rows_have_names_of_their_own_and_reasons)
{
    size_t n_rules;
    const struct srv_rule *table = srv_rules_table(&n_rules);

    for (size_t i = 0; i < n_rules; i++) {
        ck_assert_uint_gt(strlen(table[i].name), 0);
        ck_assert_uint_lt(strlen(table[i].name), sizeof(((struct srv_err *)0)->rule));
        ck_assert_uint_gt(strlen(table[i].reason), 0);
        for (size_t k = 0; k < i; k++)
            ck_assert_str_ne(table[i].name, table[k].name);
    }
}
END_TEST

START_TEST(every_layout_is_served_on_the_cpu)
{
    for (uint32_t layout = 1; layout < DSK_LAYOUT_COUNT; layout++) {
        struct srv_rule_config config = {"cpu", layout, layout, 1, NO_TIER | MEMFD};

        ck_assert_int_eq(srv_rules_check_config(&config, NULL), DSA_OK);
    }
}
END_TEST

START_TEST(unknown_layouts_are_refused_before_anything_else)
{
    static const uint32_t unknown[] = {0, DSK_LAYOUT_COUNT, 31, 32, 33, 64, UINT32_MAX};

    for (size_t i = 0; i < sizeof(unknown) / sizeof(unknown[0]); i++) {
        struct srv_rule_query query = {"cuda", unknown[i], BF16, 576, 1, DECODE, 1, NO_TIER};
        struct srv_rule_config config = {"cpu", L_RAW, unknown[i], 1, NO_TIER};
        struct srv_err err;
        char value[16];

        snprintf(value, sizeof(value), "%u", unknown[i]);
        ck_assert_int_eq(srv_rules_check_attend(&query, &err), DSA_E_BAD_LAYOUT);
        ck_assert_str_eq(err.field, "layout");
        ck_assert_str_eq(err.value, value);
        ck_assert_int_eq(srv_rules_check_config(&config, &err), DSA_E_BAD_LAYOUT);
        ck_assert_str_eq(err.field, "decode_layout");
        config.decode_layout = L_RAW;
        config.prefill_layout = unknown[i];
        ck_assert_int_eq(srv_rules_check_config(&config, &err), DSA_E_BAD_LAYOUT);
        ck_assert_str_eq(err.field, "prefill_layout");
    }
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("rules");
    TCase *tc = tcase_create("rules");

    (void)max;
    tcase_add_test(tc, attends_are_served_or_refused_by_name);
    tcase_add_test(tc, configurations_are_served_or_refused_by_name);
    tcase_add_test(tc, every_row_has_an_accepting_and_a_refusing_case);
    tcase_add_test(tc, accepting_cases_are_served_by_the_row_they_name);
    tcase_add_test(tc, rows_have_names_of_their_own_and_reasons);
    tcase_add_test(tc, every_layout_is_served_on_the_cpu);
    tcase_add_test(tc, unknown_layouts_are_refused_before_anything_else);
    suite_add_tcase(suite, tc);
    suites_p[0] = suite;
    return 1;
}
