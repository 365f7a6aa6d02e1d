/* err: what a refusal says. */
#include "server/core/err.h"

#include <inttypes.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

#include "kit.h"
#include "test_main.h"

START_TEST(fills_every_part)
{
    struct srv_err err;

    memset(&err, 'x', sizeof(err));
    ck_assert_int_eq(srv_fail(&err, DSA_E_BAD_RANGE, "attend.q.offset", "%" PRIu64, UINT64_C(8191),
                              "the region has %d bytes", 8192),
                     DSA_E_BAD_RANGE);
    ck_assert_int_eq(err.code, DSA_E_BAD_RANGE);
    ck_assert_str_eq(err.field, "attend.q.offset");
    ck_assert_str_eq(err.value, "8191");
    ck_assert_str_eq(err.text, "the region has 8192 bytes");
    ck_assert_str_eq(err.rule, "");
    ck_assert_uint_eq(err.retry_after_us, 0);
    ck_assert_str_eq(strrchr(err.file, '/'), "/test_err.c");
    ck_assert_int_gt(err.line, 0);
}
END_TEST

START_TEST(no_err_is_fine)
{
    ck_assert_int_eq(srv_fail(NULL, DSA_E_LIMIT, "x", "%d", 1, "text"), DSA_E_LIMIT);
    srv_err_clear(NULL);
}
END_TEST

START_TEST(no_field_and_no_value_leave_them_empty)
{
    struct srv_err err;

    memset(&err, 'x', sizeof(err));
    ck_assert_int_eq(srv_fail(&err, DSA_E_INTERNAL, NULL, "%s", "", "text"), DSA_E_INTERNAL);
    ck_assert_str_eq(err.field, "");
    ck_assert_str_eq(err.value, "");
}
END_TEST

START_TEST(long_texts_are_cut_and_ended)
{
    struct srv_err err;
    char lengthy[512];

    memset(lengthy, 'a', sizeof(lengthy));
    lengthy[sizeof(lengthy) - 1] = '\0';
    ck_assert_int_eq(srv_fail(&err, DSA_E_BAD_REQUEST, lengthy, "%s", lengthy, "%s", lengthy),
                     DSA_E_BAD_REQUEST);
    ck_assert_uint_eq(strlen(err.field), sizeof(err.field) - 1);
    ck_assert_uint_eq(strlen(err.value), sizeof(err.value) - 1);
    ck_assert_uint_eq(strlen(err.text), sizeof(err.text) - 1);
}
END_TEST

/* A client's bytes must not break a log line or a UTF-8 string, also where they are cut. */
START_TEST(what_is_not_printable_becomes_a_question_mark)
{
    struct srv_err err;

    ck_assert_int_eq(srv_fail(&err, DSA_E_BAD_REQUEST, "a\nb", "%s", "\xff\xc3\xa4\x1b[0m", "one\rtwo\t\x7f"),
                     DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.field, "a?b");
    ck_assert_str_eq(err.value, "????[0m");
    ck_assert_str_eq(err.text, "one?two??");
}
END_TEST

START_TEST(clear_leaves_ok)
{
    struct srv_err err;

    memset(&err, 'x', sizeof(err));
    srv_err_clear(&err);
    ck_assert_int_eq(err.code, DSA_OK);
    ck_assert_str_eq(err.text, "");
}
END_TEST

START_TEST(a_broken_invariant_ends_the_process)
{
    int one = 1;

    SRV_ASSERT(one == 2);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("err");
    TCase *tc = tcase_create("err");

    (void)max;
    tcase_add_test(tc, fills_every_part);
    tcase_add_test(tc, no_err_is_fine);
    tcase_add_test(tc, no_field_and_no_value_leave_them_empty);
    tcase_add_test(tc, long_texts_are_cut_and_ended);
    tcase_add_test(tc, what_is_not_printable_becomes_a_question_mark);
    tcase_add_test(tc, clear_leaves_ok);
    tcase_add_test_raise_signal(tc, a_broken_invariant_ends_the_process, SIGABRT);
    suite_add_tcase(suite, tc);
    suites_p[0] = suite;
    return 1;
}
