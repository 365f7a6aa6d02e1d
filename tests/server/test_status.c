/* The one table of statuses, and its translations. */
#include <ctype.h>
#include <string.h>

#include "server/status.h"
#include "test_main.h"

#define STATUS_VALUE(name, value, reason, grpc_code, scope, text) name,
static const dsa_status all[] = {DSA_STATUS_MAP(STATUS_VALUE)};
#define N_STATUSES (sizeof(all) / sizeof(all[0]))

static void check_reason(dsa_status status)
{
    const char *reason = srv_status_reason(status);

    ck_assert_uint_ge(strlen(reason), 3);
    for (const char *at = reason; *at; at++)
        ck_assert_msg(isupper((unsigned char)*at) || *at == '_', "reason \"%s\" of %d", reason, status);
}

START_TEST(each_code_has_reason_code_scope_and_text)
{
    for (size_t i = 0; i < N_STATUSES; i++) {
        ck_assert_uint_gt(strlen(srv_status_text(all[i])), 1);
        if (all[i] == DSA_OK)
            continue;
        ck_assert_int_lt(all[i], 0);
        check_reason(all[i]);
        ck_assert_int_ge(srv_status_grpc_code(all[i]), 1);
        ck_assert_int_le(srv_status_grpc_code(all[i]), 16);
        ck_assert_int_ge(srv_status_scope(all[i]), 1);
        ck_assert_int_le(srv_status_scope(all[i]), 4);
        for (size_t j = 0; j < i; j++) {
            ck_assert_int_ne(all[i], all[j]);
            ck_assert_str_ne(srv_status_reason(all[i]), srv_status_reason(all[j]));
        }
    }
}
END_TEST

START_TEST(ok_is_plain)
{
    ck_assert_str_eq(srv_status_reason(DSA_OK), "");
    ck_assert_int_eq(srv_status_grpc_code(DSA_OK), 0);
    ck_assert_int_eq(srv_status_scope(DSA_OK), 0);
}
END_TEST

/* What clients program against: a few that must never change. */
START_TEST(contract_words)
{
    static const struct {
        dsa_status status;
        const char *reason;
        int grpc_code, scope;
    } rows[] = {
        {DSA_E_NO_PAGES, "NO_PAGES", 8, 1},
        {DSA_E_BAD_SHAPE, "BAD_SHAPE", 3, 1},
        {DSA_E_NO_SESSION, "NO_SESSION", 16, 2},
        {DSA_E_DEVICE_LOST, "DEVICE_LOST", 14, 3},
        {DSA_E_DRAINING, "DRAINING", 14, 4},
        {DSA_E_UNSUPPORTED, "UNSUPPORTED", 9, 1},
        {DSA_E_CANCELLED, "CANCELLED", 1, 1},
        {DSA_E_DEADLINE, "DEADLINE", 4, 1},
        {DSA_E_UNIMPLEMENTED, "UNIMPLEMENTED", 12, 1},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        ck_assert_str_eq(srv_status_reason(rows[i].status), rows[i].reason);
        ck_assert_int_eq(srv_status_grpc_code(rows[i].status), rows[i].grpc_code);
        ck_assert_int_eq(srv_status_scope(rows[i].status), rows[i].scope);
    }
}
END_TEST

START_TEST(unknown_codes_are_internal_errors)
{
    ck_assert_str_eq(srv_status_reason((dsa_status)-999), "INTERNAL");
    ck_assert_int_eq(srv_status_grpc_code((dsa_status)-999), 13);
    ck_assert_int_eq(srv_status_scope((dsa_status)-999), 1);
    ck_assert_int_eq(srv_status_from_dsk((dsk_status)-999), DSA_E_INTERNAL);
}
END_TEST

#define DSK_VALUE(name, value, text) name,
START_TEST(kernel_codes_translate)
{
    static const dsk_status kernel[] = {DSK_STATUS_MAP(DSK_VALUE)};

    for (size_t i = 0; i < sizeof(kernel) / sizeof(kernel[0]); i++)
        ck_assert_int_eq(srv_status_from_dsk(kernel[i]) == DSA_OK, kernel[i] == DSK_OK);
    ck_assert_int_eq(srv_status_from_dsk(DSK_E_NONFINITE), DSA_E_NONFINITE);
    ck_assert_int_eq(srv_status_from_dsk(DSK_E_DEVICE), DSA_E_DEVICE_LOST);
    ck_assert_int_eq(srv_status_from_dsk(DSK_E_NO_MEMORY), DSA_E_NO_MEMORY);
}
END_TEST

START_TEST(kernel_errors_keep_field_and_value)
{
    struct dsk_err cause = {DSK_E_BAD_ARGUMENT, "segs[3].topk", "-7", "must be at least 1"};
    struct srv_err err = {0};

    ck_assert_int_eq(srv_fail_dsk(&err, &cause, "attend."), DSA_E_BAD_REQUEST);
    ck_assert_int_eq(err.code, DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.field, "attend.segs[3].topk");
    ck_assert_str_eq(err.value, "-7");
    ck_assert_str_eq(err.text, "must be at least 1");
    cause.text[0] = '\0';
    ck_assert_int_eq(srv_fail_dsk(&err, &cause, ""), DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.field, "segs[3].topk");
    ck_assert_str_eq(err.text, dsk_status_text(DSK_E_BAD_ARGUMENT));
    ck_assert_int_eq(srv_fail_dsk(NULL, &cause, "x."), DSA_E_BAD_REQUEST);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *tc = tcase_create("status");

    (void)max;
    tcase_add_test(tc, each_code_has_reason_code_scope_and_text);
    tcase_add_test(tc, ok_is_plain);
    tcase_add_test(tc, contract_words);
    tcase_add_test(tc, unknown_codes_are_internal_errors);
    tcase_add_test(tc, kernel_codes_translate);
    tcase_add_test(tc, kernel_errors_keep_field_and_value);
    suites_p[0] = suite_create("status");
    suite_add_tcase(suites_p[0], tc);
    return 1;
}
