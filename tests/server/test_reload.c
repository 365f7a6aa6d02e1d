/* A new configuration for a server that runs: what is taken over, what keeps its value, and what the log says of each. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kit.h"
#include "server/config_file.h"
#include "server/log.h"
#include "server/reload.h"

static struct srv_config config, started, fresh;

static void set(struct srv_config *into, const char *name, const char *value)
{
    struct srv_err err = {0};

    KIT_OK(srv_config_set(into, name, strlen(name), value, SRV_SOURCE_FILE, &err), &err);
}

static void start(void)
{
    srv_config_defaults(&config);
    set(&config, "max-rows", "100");
    set(&config, "max-inflight", "10");
    started = fresh = config;
}

/* What --print-config shows of one option. */
static char *shown(const struct srv_config *of, const char *name)
{
    static char text[16384];
    char key[64], *at;
    FILE *out = fmemopen(text, sizeof(text), "w");

    ck_assert_ptr_nonnull(out);
    srv_config_print(of, out);
    fclose(out);
    snprintf(key, sizeof(key), "\n%s: ", name);
    at = strstr(text, key);
    ck_assert_msg(at != NULL, "%s is not shown", name);
    at += strlen(key);
    *strchr(at, '\n') = '\0';
    return at;
}

START_TEST(nothing_new)
{
    struct srv_reload_counts counts = srv_reload_apply(&config, &started, &fresh);

    ck_assert_uint_eq(counts.n_changed, 0);
    ck_assert_uint_eq(counts.n_kept, 0);
    ck_assert_int_eq(memcmp(&config, &started, sizeof(config)), 0);
}
END_TEST

START_TEST(live_settings_change_both_ways)
{
    struct srv_reload_counts counts;

    set(&fresh, "max-inflight", "20");
    set(&fresh, "log-level", "debug");
    set(&fresh, "drain-grace", "3s");
    kit_log_begin();
    counts = srv_reload_apply(&config, &started, &fresh);
    kit_log_expect("setting changed name=max-inflight old=10 new=20\n");
    kit_log_expect("setting changed name=drain-grace old=25000000us new=3000000us\n");
    kit_log_expect("setting changed name=log-level old=info new=debug\n");
    kit_log_expect("configuration read again changed=3 kept=0\n");
    ck_assert_uint_eq(counts.n_changed, 3);
    ck_assert_uint_eq(config.max_inflight, 20);
    ck_assert_uint_eq(config.drain_grace_us, 3000000);
    ck_assert_str_eq(config.log_level, "debug");
    set(&fresh, "max-inflight", "5");
    counts = srv_reload_apply(&config, &started, &fresh);
    kit_log_end();
    ck_assert_uint_eq(counts.n_changed, 1);
    ck_assert_uint_eq(config.max_inflight, 5);
}
END_TEST

START_TEST(what_was_sized_at_the_start_goes_down_and_up_to_there)
{
    struct srv_reload_counts counts;

    kit_log_begin();
    set(&fresh, "max-rows", "101");
    counts = srv_reload_apply(&config, &started, &fresh);
    kit_log_expect(
        "above its value at the start only a restart sets it name=max-rows value=100 wanted=101\n");
    ck_assert_uint_eq(counts.n_kept, 1);
    ck_assert_uint_eq(config.max_rows, 100);
    set(&fresh, "max-rows", "50");
    counts = srv_reload_apply(&config, &started, &fresh);
    ck_assert_uint_eq(counts.n_changed, 1);
    ck_assert_uint_eq(config.max_rows, 50);
    set(&fresh, "max-rows", "100"); /* more than it is now, not more than it was */
    counts = srv_reload_apply(&config, &started, &fresh);
    kit_log_end();
    ck_assert_uint_eq(counts.n_changed, 1);
    ck_assert_uint_eq(config.max_rows, 100);
}
END_TEST

START_TEST(the_rest_waits_for_a_restart)
{
    static const char *const names[][2] = {{"layers", "2"},        {"listen", "unix:/x"},
                                           {"raw-scale", "2"},     {"physical-indices", "true"},
                                           {"socket-mode", "600"}, {"spin", "5us"}};
    struct srv_reload_counts counts;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        set(&fresh, names[i][0], names[i][1]);
    kit_log_begin();
    counts = srv_reload_apply(&config, &started, &fresh);
    kit_log_expect("only a restart changes it name=socket-mode value=0660 wanted=0600\n");
    kit_log_expect("only a restart changes it name=layers value=1 wanted=2\n");
    kit_log_end();
    ck_assert_uint_eq(counts.n_changed, 0);
    ck_assert_uint_eq(counts.n_kept, 6);
    ck_assert_int_eq(memcmp(&config, &started, sizeof(config)), 0);
}
END_TEST

/* Where a value comes from goes along with it. */
START_TEST(sources_follow)
{
    ck_assert_ptr_nonnull(strstr(shown(&config, "max-rows"), "# file"));
    srv_config_defaults(&fresh);
    srv_reload_apply(&config, &started, &fresh); /* the file is empty now */
    ck_assert_str_eq(shown(&config, "max-inflight"), "256");
    ck_assert_ptr_nonnull(strstr(shown(&config, "max-rows"), "100  # file")); /* above the start: kept */
}
END_TEST

/* What --help marks is what changes, for every option there is. */
START_TEST(help_marks_what_can_change)
{
    static char text[32768], *line, *next;
    FILE *out = fmemopen(text, sizeof(text), "w");
    int n_live = 0, n_below = 0;

    ck_assert_ptr_nonnull(out);
    srv_config_help(out);
    fclose(out);
    for (line = text; (next = strchr(line, '\n')) != NULL; line = next + 1) {
        *next = '\0';
        if (strstr(line, " ** ["))
            n_below++;
        else if (strstr(line, " * ["))
            n_live++;
        if (strncmp(line, "  --layers ", 11) == 0)
            ck_assert_ptr_null(strchr(line, '*'));
        if (strncmp(line, "  --log-level ", 14) == 0)
            ck_assert_ptr_nonnull(strstr(line, " * ["));
    }
    ck_assert_int_ge(n_live, 16);
    ck_assert_int_ge(n_below, 6);
}
END_TEST

START_TEST(flags_win_again)
{
    char *argv[] = {(char *)(uintptr_t) "dsad", (char *)(uintptr_t) "--max-inflight=7", NULL};
    char *environment[] = {(char *)(uintptr_t) "DSAD_MAX_INFLIGHT=8", (char *)(uintptr_t) "DSAD_MAX_ROWS=9",
                           NULL};
    enum srv_config_action action;
    struct srv_err err = {0};

    KIT_OK(srv_config_read(&fresh, 2, argv, environment, &action, &err), &err);
    ck_assert_uint_eq(fresh.max_inflight, 7);
    ck_assert_uint_eq(fresh.max_rows, 9);
    srv_reload_apply(&config, &started, &fresh);
    ck_assert_uint_eq(config.max_inflight, 7);
    ck_assert_uint_eq(config.max_rows, 9);
}
END_TEST

START_TEST(a_refusal_says_why)
{
    struct srv_err err = {0};

    (void)srv_fail(&err, DSA_E_BAD_REQUEST, "max-rowz", "%s", "5\" x=1", "d.yaml line 3: unknown");
    kit_log_begin();
    srv_reload_refuse(&err);
    kit_log_expect("configuration refused, everything stays as it is reason=BAD_REQUEST field=max-rowz "
                   "value=\"5\\\" x=1\" text=\"d.yaml line 3: unknown\"\n");
    kit_log_end();
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *tc = tcase_create("reload");

    (void)max;
    tcase_add_checked_fixture(tc, start, NULL);
    tcase_add_test(tc, nothing_new);
    tcase_add_test(tc, live_settings_change_both_ways);
    tcase_add_test(tc, what_was_sized_at_the_start_goes_down_and_up_to_there);
    tcase_add_test(tc, the_rest_waits_for_a_restart);
    tcase_add_test(tc, sources_follow);
    tcase_add_test(tc, help_marks_what_can_change);
    tcase_add_test(tc, flags_win_again);
    tcase_add_test(tc, a_refusal_says_why);
    suites_p[0] = suite_create("reload");
    suite_add_tcase(suites_p[0], tc);
    return 1;
}
