#include "test_main.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

/* Skips are counted in shared memory because Check runs each test in a child of its own. */
static atomic_int *n_skipped;

void test_skip(const char *test, const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    printf("SKIP %s: ", test);
    vprintf(format, ap);
    printf("\n");
    va_end(ap);
    fflush(stdout);
    atomic_fetch_add(n_skipped, 1);
}

unsigned test_seed(void)
{
    const char *text = getenv("DSA_TEST_SEED");

    return text ? (unsigned)strtoul(text, NULL, 0) : 20261130u;
}

int main(void)
{
    Suite *suites[16];
    int n_suites, n_run, n_failed, n_skip;
    SRunner *runner;

    n_skipped = mmap(NULL, sizeof(*n_skipped), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (n_skipped == MAP_FAILED) {
        perror("mmap");
        return 2;
    }
    n_suites = test_suites(suites, 16);
    runner = srunner_create(n_suites > 0 ? suites[0] : NULL);
    for (int i = 1; i < n_suites; i++)
        srunner_add_suite(runner, suites[i]);
    srunner_run_all(runner, CK_ENV);
    n_run = srunner_ntests_run(runner);
    n_failed = srunner_ntests_failed(runner);
    n_skip = atomic_load(n_skipped);
    srunner_free(runner);
    if (n_failed > 0)
        printf("seed %u (set DSA_TEST_SEED to repeat)\n", test_seed());
    printf("%d passed, %d failed, %d skipped\n", n_run - n_failed - n_skip, n_failed, n_skip);
    return n_failed == 0 && n_run > 0 ? 0 : 1;
}
