/* dsk-check and dsk-bench as programs: what they print, refuse and return. */
#include "kit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

/* Runs a command line; returns its exit status and what it wrote to both streams. */
static int run(const char *program, const char *args, char *text, size_t size)
{
    char command[4096];
    size_t n;
    FILE *f;
    int status;

    snprintf(command, sizeof(command), "'%s' %s 2>&1", program, args);
    f = popen(command, "r");
    ck_assert_ptr_nonnull(f);
    n = fread(text, 1, size - 1, f);
    text[n] = '\0';
    while (n > 0 && fgetc(f) != EOF) {
    }
    status = pclose(f);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

START_TEST(check_passes_and_closes_with_its_count)
{
    char text[16384], args[4096], again[16384];

    snprintf(args, sizeof(args), "--device cpu --cases %d --seed 5 --vectors '%s'", KIT_SIZE(40, 6),
             DSA_TEST_VECTORS);
    KIT_EXPECT(run(DSK_CHECK, args, text, sizeof(text)) == 0, "%s", text);
    ck_assert_ptr_nonnull(strstr(text, "vectors: 28 folders"));
    ck_assert_ptr_nonnull(strstr(text, " passed, 0 failed\n"));
    ck_assert_int_eq(run(DSK_CHECK, args, again, sizeof(again)), 0);
    ck_assert_str_eq(text, again);
}
END_TEST

START_TEST(check_fails_on_a_damaged_folder)
{
    char dir[] = "/tmp/dsa-check-XXXXXX", sub[64], path[256], args[128], text[16384];
    FILE *f;

    ck_assert_ptr_nonnull(mkdtemp(dir));
    snprintf(sub, sizeof(sub), "%s/merge_x", dir);
    snprintf(path, sizeof(path), "mkdir %s && echo 'array out float32 4' > %s/meta.txt", sub, sub);
    ck_assert_int_eq(system(path), 0);
    snprintf(args, sizeof(args), "--device cpu --cases 0 --vectors %s", dir);
    ck_assert_int_eq(run(DSK_CHECK, args, text, sizeof(text)), 1);
    ck_assert_ptr_nonnull(strstr(text, "out.bin"));
    ck_assert_ptr_nonnull(strstr(text, "\n0 passed, 1 failed\n"));
    snprintf(path, sizeof(path), "%s/out.bin", sub);
    f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    fwrite("0123456789abcdef", 1, 16, f);
    fclose(f);
    ck_assert_int_eq(run(DSK_CHECK, args, text, sizeof(text)), 1);
    ck_assert_ptr_nonnull(strstr(text, "do not fit"));
    snprintf(path, sizeof(path), "rm -r %s", dir);
    ck_assert_int_eq(system(path), 0);
}
END_TEST

START_TEST(wrong_usage_is_refused_by_name)
{
    static const struct {
        const char *args, *must_say;
    } cases[] = {{"", "--device"},
                 {"--device cpu --frobnicate", "frobnicate"},
                 {"--device tpu", "tpu"},
                 {"--device cpu --isa sse9", "sse9"},
                 {"--device cpu --threads -1", "-1"},
                 {"--device cpu --threads many", "many"},
                 {"--device cpu stray", "stray"}};
    static const char *const programs[] = {DSK_CHECK, DSK_BENCH};
    char text[8192];

    for (int p = 0; p < 2; p++) {
        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
            KIT_EXPECT(run(programs[p], cases[i].args, text, sizeof(text)) == 2, "%s", cases[i].args);
            KIT_EXPECT(strstr(text, cases[i].must_say) != NULL, "%s: %s", cases[i].args, text);
        }
        ck_assert_int_eq(run(programs[p], "--help", text, sizeof(text)), 0);
        ck_assert_ptr_nonnull(strstr(text, "--threads N"));
    }
    ck_assert_int_eq(run(DSK_CHECK, "--device cpu --cases 1e9", text, sizeof(text)), 2);
    ck_assert_ptr_nonnull(strstr(text, "--cases 1e9"));
    ck_assert_int_eq(run(DSK_CHECK, "--device cpu --seed x", text, sizeof(text)), 2);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("tools");
    TCase *tcase = tcase_create("tools");

    (void)max;
    tcase_set_timeout(tcase, 180);
    tcase_add_test(tcase, check_passes_and_closes_with_its_count);
    tcase_add_test(tcase, check_fails_on_a_damaged_folder);
    tcase_add_test(tcase, wrong_usage_is_refused_by_name);
    suite_add_tcase(suite, tcase);
    suites_p[0] = suite;
    return 1;
}
