/* test_parts.c - flags, percentiles and made-up contents of dsactl. */
#include <stdlib.h>
#include <string.h>

#include "client/dsactl/args.h"
#include "client/dsactl/content.h"
#include "client/dsactl/histogram.h"
#include "ref64.h"
#include "suites.h"

/* ---- flags ----------------------------------------------------------------------------------- */

struct flags {
    const char *name;
    uint64_t n;
    double x;
    bool is_on;
};

static enum args_result parse(struct flags *flags, int argc, char **argv)
{
    const struct arg table[] = {
        {"name", ARG_TEXT, &flags->name, "TEXT", "", 0, 0},
        {"n", ARG_UINT, &flags->n, "N", "", 2, 9},
        {"x", ARG_REAL, &flags->x, "X", "", 0, 0},
        {"on", ARG_FLAG, &flags->is_on, NULL, "", 0, 0},
        {0},
    };

    return args_parse(table, argc, argv);
}

START_TEST(flags_in_both_forms)
{
    char *argv[] = {"cmd", "--name", "a", "--n=7", "--x", "0.5", "--on"};
    struct flags flags = {0};

    ck_assert_int_eq(parse(&flags, 7, argv), ARGS_OK);
    ck_assert_str_eq(flags.name, "a");
    ck_assert_uint_eq(flags.n, 7);
    ck_assert(flags.x > 0.49 && flags.x < 0.51);
    ck_assert(flags.is_on);
}
END_TEST

START_TEST(bad_flags_are_refused)
{
    static char *const bad[][2] = {{"--nam", "a"},
                                   {"--n", "1"},
                                   {"--n", "10"},
                                   {"--n", "5x"},
                                   {"--n", "-5"},
                                   {"--n=", NULL},
                                   {"--n", NULL},
                                   {"--x", "y"},
                                   {"--on=1", NULL},
                                   {"word", NULL},
                                   {"-n", "5"},
                                   {"--x", "-0.1"},
                                   {"--n", "99999999999999999999"}};

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char *argv[] = {"cmd", bad[i][0], bad[i][1]};
        struct flags flags = {.n = 5};

        ck_assert_msg(parse(&flags, bad[i][1] ? 3 : 2, argv) == ARGS_BAD, "accepted: %s %s", bad[i][0],
                      bad[i][1] ? bad[i][1] : "");
        ck_assert_uint_eq(flags.n, 5);
    }
}
END_TEST

START_TEST(help_is_seen)
{
    char *argv[] = {"cmd", "--on", "--help", "--bogus"};
    struct flags flags = {0};

    ck_assert_int_eq(parse(&flags, 4, argv), ARGS_HELP);
}
END_TEST

TCase *case_args(void)
{
    TCase *tc = tcase_create("args");

    tcase_add_test(tc, flags_in_both_forms);
    tcase_add_test(tc, bad_flags_are_refused);
    tcase_add_test(tc, help_is_seen);
    return tc;
}

/* ---- percentiles ----------------------------------------------------------------------------- */

START_TEST(small_values_are_exact)
{
    struct histogram h = {0};

    for (uint64_t i = 1; i <= 100; i++)
        histogram_add(&h, i);
    ck_assert_uint_eq(histogram_at(&h, 50), 50);
    ck_assert_uint_eq(histogram_at(&h, 99), 99);
    ck_assert_uint_eq(histogram_at(&h, 100), 100);
    ck_assert_uint_eq(histogram_at(&h, 0), 1);
    ck_assert_uint_eq(h.max, 100);
    ck_assert(histogram_mean(&h) > 50.49 && histogram_mean(&h) < 50.51);
}
END_TEST

/* Against sorting: never below the true percentile, at most 0.8 % above. */
START_TEST(large_values_are_close)
{
    enum { N = 5000 };
    static struct histogram h;
    static uint64_t values[N];
    struct ref64_rng rng = ref64_rng_init(3);

    memset(&h, 0, sizeof(h));
    for (int i = 0; i < N; i++) {
        values[i] = ref64_rng_u64(&rng) >> ref64_rng_below(&rng, 64);
        histogram_add(&h, values[i]);
    }
    for (int i = 1; i < N; i++) { /* insertion keeps the test free of a comparator */
        for (int j = i; j > 0 && values[j - 1] > values[j]; j--) {
            uint64_t swap = values[j];

            values[j] = values[j - 1];
            values[j - 1] = swap;
        }
    }
    for (int percent = 1; percent <= 100; percent++) {
        uint64_t want = values[(N * percent + 99) / 100 - 1], got = histogram_at(&h, percent);

        ck_assert_msg(got >= want && (double)got <= (double)want * 1.008 + 1, "p%d: %llu, sorted %llu",
                      percent, (unsigned long long)got, (unsigned long long)want);
    }
}
END_TEST

START_TEST(empty_and_extreme)
{
    struct histogram h = {0};

    ck_assert_uint_eq(histogram_at(&h, 50), 0);
    histogram_add(&h, UINT64_MAX);
    histogram_add(&h, 0);
    ck_assert_uint_eq(histogram_at(&h, 100), UINT64_MAX);
    ck_assert_uint_eq(histogram_at(&h, 50), 0);
}
END_TEST

TCase *case_histogram(void)
{
    TCase *tc = tcase_create("histogram");

    tcase_add_test(tc, small_values_are_exact);
    tcase_add_test(tc, large_values_are_close);
    tcase_add_test(tc, empty_and_extreme);
    return tc;
}

/* ---- contents -------------------------------------------------------------------------------- */

START_TEST(rows_are_functions_of_chain_position_and_layer)
{
    uint16_t a[576], b[576];
    uint64_t chain = content_chain(content_chain(1, 7), 8);

    content_row(chain, 100, 1, a, 576);
    content_row(content_chain(content_chain(1, 7), 8), 100, 1, b, 576);
    ck_assert_mem_eq(a, b, sizeof(a));
    content_row(chain, 101, 1, b, 576);
    ck_assert_mem_ne(a, b, sizeof(a));
    content_row(chain, 100, 0, b, 576);
    ck_assert_mem_ne(a, b, sizeof(a));
    content_row(content_chain(content_chain(1, 8), 7), 100, 1, b, 576);
    ck_assert_mem_ne(a, b, sizeof(a));
}
END_TEST

START_TEST(values_stay_in_range)
{
    uint16_t values[1003];
    struct ref64_rng rng = content_rng(1, 2, 3);

    content_fill(&rng, values, 1003);
    for (int i = 0; i < 1003; i++) {
        double x = ref64_bf16_decode(values[i]);

        ck_assert_msg((x >= 0.125 && x < 2) || (x <= -0.125 && x > -2), "value %d is %g", i, x);
    }
}
END_TEST

START_TEST(selection_is_distinct_and_in_range)
{
    static const uint64_t lengths[] = {1, 5, 63, 64, 65, 66, 100, 1000, 5000};
    uint64_t marks[80] = {0}, seen[80];
    int32_t indices[64], again[64];

    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        uint32_t n = content_select(9, lengths[i], 64, 1, marks, indices);

        ck_assert_uint_eq(n, lengths[i] < 64 ? lengths[i] : 64);
        memset(seen, 0, sizeof(seen));
        for (uint32_t j = 0; j < n; j++) {
            ck_assert_int_ge(indices[j], 0);
            ck_assert_uint_lt((uint64_t)indices[j], lengths[i]);
            ck_assert_msg(!(seen[indices[j] / 64] >> (indices[j] % 64) & 1), "position %d twice", indices[j]);
            seen[indices[j] / 64] |= UINT64_C(1) << (indices[j] % 64);
        }
        ck_assert((seen[(lengths[i] - 1) / 64] >> ((lengths[i] - 1) % 64))
                  & 1); /* the newest token is always there */
        for (uint32_t j = n; j < 64; j++)
            ck_assert_int_eq(indices[j], -1);
        for (int j = 0; j < 80; j++)
            ck_assert_uint_eq(marks[j], 0);
        content_select(9, lengths[i], 64, 1, marks, again);
        ck_assert_mem_eq(indices, again, sizeof(indices));
    }
}
END_TEST

TCase *case_content(void)
{
    TCase *tc = tcase_create("content");

    tcase_add_test(tc, rows_are_functions_of_chain_position_and_layer);
    tcase_add_test(tc, values_stay_in_range);
    tcase_add_test(tc, selection_is_distinct_and_in_range);
    return tc;
}
