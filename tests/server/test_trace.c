/* The traceparent header: what is one, and that all else counts as none. */
#include <stdlib.h>
#include <string.h>

#include "kit.h"
#include "server/trace.h"

#define TRACE  "0af7651916cd43dd8448eb211c80319c"
#define PARENT "b7ad6b7169203331"
#define GOOD   "00-" TRACE "-" PARENT "-01"

static struct srv_trace trace;

static bool parse(const char *text)
{
    memset(&trace, 'x', sizeof(trace));
    return srv_trace_parse(&trace, text, strlen(text));
}

START_TEST(version_00)
{
    ck_assert(parse(GOOD));
    ck_assert_str_eq(trace.parent, GOOD);
    ck_assert_str_eq(trace.id, TRACE);
    ck_assert_str_eq(srv_trace_id(&trace), TRACE);
    ck_assert(parse("00-" TRACE "-" PARENT "-00"));
    ck_assert(parse("00-" TRACE "-" PARENT "-ff")); /* flags that nobody knows yet */
    ck_assert_str_eq(trace.parent, "00-" TRACE "-" PARENT "-ff");
}
END_TEST

START_TEST(later_versions_begin_like_this_one)
{
    ck_assert(parse("cc-" TRACE "-" PARENT "-03"));
    ck_assert_str_eq(trace.parent, "00-" TRACE "-" PARENT "-01"); /* what we know of it, in our version */
    ck_assert(parse("01-" TRACE "-" PARENT "-02-what-the-future-brings"));
    ck_assert_str_eq(trace.parent, "00-" TRACE "-" PARENT "-00");
    ck_assert_str_eq(trace.id, TRACE);
    ck_assert(!parse("01-" TRACE "-" PARENT "-01.what"));
}
END_TEST

static const char *const bad[] = {
    "",
    "00",
    "ff-" TRACE "-" PARENT "-01",
    "0-" TRACE "-" PARENT "-01",
    "0G-" TRACE "-" PARENT "-01",
    "00-" TRACE "-" PARENT,
    "00-" TRACE "-" PARENT "-",
    "00-" TRACE "-" PARENT "-0",
    "00-" TRACE "-" PARENT "-0x",
    "00-" TRACE "-" PARENT "-01-",
    "00-" TRACE "-" PARENT "-01-more",
    "00-" TRACE "-" PARENT "-01 ",
    " 00-" TRACE "-" PARENT "-01",
    "00_" TRACE "-" PARENT "-01",
    "00-" TRACE "_" PARENT "-01",
    "00-" TRACE "-" PARENT "_01",
    "00-00000000000000000000000000000000-" PARENT "-01",
    "00-" TRACE "-0000000000000000-01",
    "00-0AF7651916CD43DD8448EB211C80319C-" PARENT "-01",
    "00-0af7651916cd43dd8448eb211c80319-" PARENT "-01",
    "00-0af7651916cd43dd8448eb211c80319\"-" PARENT "-01",
};
#define N_BAD ((int)(sizeof(bad) / sizeof(bad[0])))

START_TEST(all_else_is_none)
{
    ck_assert_msg(!parse(bad[_i]), "taken: %s", bad[_i]);
    ck_assert_str_eq(trace.parent, "");
    ck_assert_str_eq(trace.id, "");
    ck_assert_ptr_null(srv_trace_id(&trace));
    ck_assert_ptr_null(srv_trace_id(NULL));
}
END_TEST

/* Every byte that differs makes it another one or none, and never one with other than hex digits. */
START_TEST(every_byte_counts)
{
    char text[sizeof(GOOD)];

    for (size_t at = 0; at < sizeof(GOOD) - 1; at++) {
        for (int c = 0; c < 256; c++) {
            strcpy(text, GOOD);
            text[at] = (char)c;
            if (!srv_trace_parse(&trace, text, sizeof(GOOD) - 1))
                continue;
            for (size_t i = 0; i < sizeof(GOOD) - 1; i++)
                KIT_EXPECT(i == 2 || i == 35 || i == 52 ? trace.parent[i] == '-'
                                                        : strchr("0123456789abcdef", trace.parent[i]) != NULL,
                           "byte %zu = %d was taken", at, c);
        }
    }
}
END_TEST

/* The text is a header's: it ends where its length says. */
START_TEST(nothing_behind_the_end_is_read)
{
    for (size_t n = 0; n < sizeof(GOOD) - 1; n++) {
        char *copy = malloc(n ? n : 1);

        ck_assert_ptr_nonnull(copy);
        memcpy(copy, GOOD, n);
        ck_assert(!srv_trace_parse(&trace, copy, n));
        free(copy);
    }
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *tc = tcase_create("trace");

    (void)max;
    tcase_add_test(tc, version_00);
    tcase_add_test(tc, later_versions_begin_like_this_one);
    tcase_add_loop_test(tc, all_else_is_none, 0, N_BAD);
    tcase_add_test(tc, every_byte_counts);
    tcase_add_test(tc, nothing_behind_the_end_is_read);
    suites_p[0] = suite_create("trace");
    suite_add_tcase(suites_p[0], tc);
    return 1;
}
