/* test_main.h - one main for all Check programs: runs the suites, prints each failure with its place,
 * and closes with the line `N passed, N failed[, N skipped]` that tests/run adds up. */
#ifndef DSA_TEST_MAIN_H
#define DSA_TEST_MAIN_H

#include <check.h>

/* Ends the running test as skipped, with a reason that is printed and counted. Works in a forked test. */
#define TEST_SKIP(...)                                                                                       \
    do {                                                                                                     \
        test_skip(__func__, __VA_ARGS__);                                                                    \
        return;                                                                                              \
    } while (0)

__attribute__((format(printf, 2, 3))) void test_skip(const char *test, const char *format, ...);

/* The seed of this run: DSA_TEST_SEED, or a fixed default. Printed with every failure. */
unsigned test_seed(void);

/* What a test program defines: makes its suites, up to max, and returns how many. */
int test_suites(Suite **suites_p, int max);

#endif /* DSA_TEST_MAIN_H */
