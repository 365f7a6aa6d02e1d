/* Every flag of dsad: its default, its bounds, its units, and what is said when it is wrong. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/config.h"
#include "test_main.h"

enum kind { TEXT, UINT, BYTES, US, OCTAL, REAL, BOOL };

/* One row per option. `shown` is the default as --print-config shows it. low and high are accepted, under
 * and over are not (NULL: there is none). TEXT: high is the longest length that fits, as a number. */
static const struct row {
    const char *name;
    enum kind kind;
    const char *shown, *low, *under, *high, *over;
} rows[] = {
    {"listen", TEXT, "unix:/run/dsad/dsad.sock", "", NULL, "107", NULL},
    {"tcp", TEXT, "", "", NULL, "63", NULL},
    {"fd-socket", TEXT, "", "", NULL, "107", NULL},
    {"socket-mode", OCTAL, "0660", "0", NULL, "777", "1000"},
    {"max-connections", UINT, "256", "1", "0", "65536", "65537"},
    {"http", TEXT, "", "", NULL, "63", NULL},
    {"health", TEXT, "", "", NULL, "63", NULL},
    {"socket-owner", TEXT, "", "", NULL, "63", NULL},
    {"tls-cert", TEXT, "", "", NULL, "255", NULL},
    {"tls-key", TEXT, "", "", NULL, "255", NULL},
    {"tls-client-ca", TEXT, "", "", NULL, "255", NULL},
    {"tls-reload", US, "60000000us", "0us", NULL, "86400000000us", "86400000001us"},
    {"tls-handshake-timeout", US, "10000000us", "1000us", "999us", "600000000us", "600000001us"},
    {"auth-token-file", TEXT, "", "", NULL, "255", NULL},
    {"admin", TEXT, "unix", "", NULL, "7", NULL},
    {"device", TEXT, "cpu", "", NULL, "15", NULL},
    {"device-ordinal", UINT, "0", "0", NULL, "63", "64"},
    {"layout", TEXT, "scaled_512_64", "", NULL, "31", NULL},
    {"decode-layout", TEXT, "", "", NULL, "31", NULL},
    {"layers", UINT, "1", "1", "0", "1024", "1025"},
    {"pool-pages", UINT, "0", "0", NULL, "33554431", "33554432"},
    {"pool-bytes", BYTES, "268435456", "1", "0", "9223372036854775807", "9223372036854775808"},
    {"write-rule", TEXT, "pow2", "", NULL, "15", NULL},
    {"raw-scale", REAL, "1", "1e-30", "0", "1e30", "inf"},
    {"context-parallel", UINT, "1", "1", "0", "1024", "1025"},
    {"host-tier", TEXT, "memfd", "", NULL, "15", NULL},
    {"physical-indices", BOOL, "false", "false", NULL, "true", NULL},
    {"cpu-threads", UINT, "0", "0", NULL, "1024", "1025"},
    {"cpu-isa", TEXT, "auto", "", NULL, "15", NULL},
    {"max-message-bytes", BYTES, "8388608", "65536", "65535", "1073741824", "1073741825"},
    {"max-inline-bytes", BYTES, "4194304", "1024", "1023", "1073741824", "1073741825"},
    {"max-stream-bytes", BYTES, "67108864", "65536", "65535", "68719476736", "68719476737"},
    {"max-rows", UINT, "16384", "1", "0", "1048576", "1048577"},
    {"max-segments", UINT, "256", "1", "0", "4096", "4097"},
    {"max-topk", UINT, "16384", "1", "0", "1048576", "1048577"},
    {"max-append-rows", UINT, "65536", "1", "0", "16777216", "16777217"},
    {"max-sessions", UINT, "64", "1", "0", "65536", "65537"},
    {"max-regions", UINT, "256", "1", "0", "65536", "65537"},
    {"max-region-bytes", BYTES, "68719476736", "4096", "4095", "17592186044416", "17592186044417"},
    {"max-sequences", UINT, "4096", "1", "0", "1048576", "1048577"},
    {"max-sequence-tokens", UINT, "1048576", "1", "0", "1073741824", "1073741825"},
    {"max-inflight", UINT, "256", "1", "0", "65536", "65537"},
    {"max-queue", UINT, "4096", "1", "0", "16384", "16385"},
    {"max-queue-bytes", BYTES, "1073741824", "1048576", "1048575", "1099511627776", "1099511627777"},
    {"max-streams", UINT, "256", "1", "0", "65536", "65537"},
    {"chunk-rows", UINT, "0", "0", NULL, "65536", "65537"},
    {"batch-rows", UINT, "0", "0", NULL, "65536", "65537"},
    {"lease", US, "10000000us", "1000us", "999us", "86400000000us", "86400000001us"},
    {"max-lease", US, "60000000us", "1000us", "999us", "86400000000us", "86400000001us"},
    {"max-grace", US, "60000000us", "0us", NULL, "86400000000us", "86400000001us"},
    {"stall-timeout", US, "30000000us", "1000us", "999us", "86400000000us", "86400000001us"},
    {"drain-grace", US, "25000000us", "0us", NULL, "86400000000us", "86400000001us"},
    {"watchdog", US, "10000000us", "0us", NULL, "86400000000us", "86400000001us"},
    {"spin", US, "0us", "0us", NULL, "1000000us", "1000001us"},
    {"worker-spin", US, "0us", "0us", NULL, "1000000us", "1000001us"},
    {"inline-flops", UINT, "4000000", "0", NULL, "1000000000", "1000000001"},
    {"log-level", TEXT, "info", "", NULL, "15", NULL},
    {"log-format", TEXT, "text", "", NULL, "7", NULL},
    {"slow-request", US, "1000000us", "0us", NULL, "86400000000us", "86400000001us"},
};

#define N_ROWS ((int)(sizeof(rows) / sizeof(rows[0])))

/* ---- helpers ---------------------------------------------------------------------------------- */

struct outcome {
    struct srv_config config;
    struct srv_err err;
    enum srv_config_action action;
    dsa_status rc;
    char shown[8192]; /* --print-config */
};

static struct outcome result;

static void parse(char **argv, int argc)
{
    FILE *out;

    memset(&result, 0, sizeof(result));
    srv_config_defaults(&result.config);
    result.action = (enum srv_config_action)99;
    result.rc = srv_config_parse(&result.config, argc, argv, &result.action, &result.err);
    out = fmemopen(result.shown, sizeof(result.shown) - 1, "w");
    ck_assert_ptr_nonnull(out);
    srv_config_print(&result.config, out);
    fclose(out);
}

#define ARG(text) ((char *)(uintptr_t)(text))
#define PARSE(...)                                                                                           \
    do {                                                                                                     \
        char *argv_[] = {ARG("dsad"), __VA_ARGS__};                                                          \
        parse(argv_, (int)(sizeof(argv_) / sizeof(argv_[0])));                                               \
    } while (0)

static void parse_nothing(void)
{
    char *argv[] = {ARG("dsad")};

    parse(argv, 1);
}

/* The value that --print-config shows for an option; lives until the next call. */
static const char *shown(const char *name)
{
    static char value[300];
    char start[80], *at = result.shown, *end;
    size_t n = (size_t)snprintf(start, sizeof(start), "%s: ", name);

    for (; at && *at; at = *end ? end + 1 : end) {
        end = strchr(at, '\n');
        ck_assert_ptr_nonnull(end);
        if (strncmp(at, start, n) != 0)
            continue;
        memcpy(value, at + n, (size_t)(end - at) - n);
        value[(size_t)(end - at) - n] = '\0';
        if (strstr(value, "  # "))
            *strstr(value, "  # ") = '\0'; /* whence it comes */
        return value;
    }
    ck_abort_msg("--print-config shows no %s", name);
    return NULL;
}

static void set(const struct row *row, const char *value)
{
    char flag[600];

    snprintf(flag, sizeof(flag), "--%s=%s", row->name, value);
    PARSE(flag);
}

static const char *unpadded(const char *text)
{
    while (text[0] == '0' && text[1] >= '0' && text[1] <= '9')
        text++;
    return text;
}

static void expect_accepted(const struct row *row, const char *value)
{
    set(row, value);
    ck_assert_msg(result.rc == DSA_OK, "--%s=%s: %s", row->name, value, result.err.text);
    if (row->kind == REAL)
        ck_assert_double_eq_tol(strtod(shown(row->name), NULL) / strtod(value, NULL), 1.0, 1e-6);
    else
        ck_assert_str_eq(unpadded(shown(row->name)), value);
}

static void expect_refused(const struct row *row, const char *value)
{
    char before[256];

    parse_nothing();
    snprintf(before, sizeof(before), "%s", shown(row->name));
    set(row, value);
    ck_assert_msg(result.rc == DSA_E_BAD_REQUEST, "--%s=%s was accepted", row->name, value);
    ck_assert_str_eq(result.err.field, row->name);
    ck_assert_msg(strncmp(result.err.value, value, strlen(result.err.value)) == 0, "value is \"%s\"",
                  result.err.value);
    ck_assert_uint_gt(strlen(result.err.text), 0);
    ck_assert_str_eq(shown(row->name), before); /* a refused value leaves the setting as it was */
}

/* ---- tests ------------------------------------------------------------------------------------- */

START_TEST(default_is_as_documented)
{
    parse_nothing();
    ck_assert_int_eq(result.rc, DSA_OK);
    ck_assert_int_eq(result.action, SRV_CONFIG_RUN);
    ck_assert_str_eq(shown(rows[_i].name), rows[_i].shown);
}
END_TEST

START_TEST(control_characters_are_refused)
{
    PARSE(ARG("--listen=unix:/a\nb"));
    ck_assert_int_eq(result.rc, DSA_E_BAD_REQUEST);
    ck_assert_str_eq(result.err.field, "listen");
    ck_assert_ptr_nonnull(strstr(result.err.text, "control character, at byte 7"));
    PARSE(ARG("--layout=\x7f"));
    ck_assert_int_eq(result.rc, DSA_E_BAD_REQUEST);
}
END_TEST

/* An option that is added without a row above fails here. */
START_TEST(every_option_has_a_row)
{
    int n = 0;

    parse_nothing();
    for (const char *at = result.shown; (at = strchr(at, '\n')) != NULL; at++)
        n++;
    ck_assert_int_eq(n, N_ROWS);
}
END_TEST

START_TEST(bounds_hold)
{
    const struct row *row = &rows[_i];
    char longest[600];

    if (row->kind == TEXT) {
        size_t n = (size_t)atoi(row->high);

        memset(longest, 'x', sizeof(longest));
        longest[n] = '\0';
        expect_accepted(row, longest);
        longest[n] = 'x';
        longest[n + 1] = '\0';
        expect_refused(row, longest);
        return;
    }
    expect_accepted(row, row->low);
    expect_accepted(row, row->high);
    if (row->under)
        expect_refused(row, row->under);
    if (row->over)
        expect_refused(row, row->over);
}
END_TEST

START_TEST(malformed_values_are_refused)
{
    static const char *const bad[] = {"",
                                      "x",
                                      "-1",
                                      "+1",
                                      " 1",
                                      "1 ",
                                      "1x",
                                      "0x10",
                                      "1.5.",
                                      "nan",
                                      "99999999999999999999999",
                                      "18446744073709551616"};
    const struct row *row = &rows[_i];

    if (row->kind == TEXT)
        return;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        /* a real number takes more forms: sign, space, hexadecimal and size do no harm there */
        if (row->kind == REAL && strtod(bad[i], NULL) > 0 && strcmp(bad[i], "1x") != 0
            && strcmp(bad[i], "1 ") != 0 && strcmp(bad[i], "1.5.") != 0)
            continue;
        expect_refused(row, bad[i]);
    }
}
END_TEST

START_TEST(value_is_a_word_of_its_own_too)
{
    PARSE(ARG("--layers"), ARG("7"), ARG("--layout"), ARG("bf16_576"), ARG("--lease=5s"));
    ck_assert_int_eq(result.rc, DSA_OK);
    ck_assert_uint_eq(result.config.layers, 7);
    ck_assert_str_eq(result.config.layout, "bf16_576");
    ck_assert_uint_eq(result.config.lease_us, 5000000);
}
END_TEST

START_TEST(the_last_one_wins)
{
    PARSE(ARG("--layers=7"), ARG("--layers=9"));
    ck_assert_int_eq(result.rc, DSA_OK);
    ck_assert_uint_eq(result.config.layers, 9);
}
END_TEST

START_TEST(missing_value_is_named)
{
    char flag[80];

    if (rows[_i].kind == BOOL)
        return;
    snprintf(flag, sizeof(flag), "--%s", rows[_i].name);
    PARSE(flag);
    ck_assert_int_eq(result.rc, DSA_E_BAD_REQUEST);
    ck_assert_str_eq(result.err.field, rows[_i].name);
    ck_assert_ptr_nonnull(strstr(result.err.text, "value"));
}
END_TEST

static const struct {
    const char *text;
    uint64_t value;
} sizes[] = {{"1B", 1},
             {"100000", 100000},
             {"1K", 1u << 10},
             {"1KiB", 1u << 10},
             {"64M", 64u << 20},
             {"64MiB", 64u << 20},
             {"3G", UINT64_C(3) << 30},
             {"3GiB", UINT64_C(3) << 30},
             {"8589934591G", UINT64_C(8589934591) << 30}};
static const struct {
    const char *text;
    uint64_t value;
} times[] = {
    {"1500us", 1500}, {"20ms", 20000}, {"3s", 3000000}, {"2m", 120000000}, {"1440m", UINT64_C(86400000000)}};

START_TEST(units_of_size_and_time)
{
    static const char *const bad_sizes[] = {"1KB", "1kib", "1 MiB", "1T", "1s", "KiB", "17179869184G"};
    static const char *const bad_times[] = {
        "10", "1h", "1 s", "s", "5S", "1MiB", "99999999999999999999s", "307445734561825861m"};

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        PARSE(ARG("--pool-bytes"), ARG(sizes[i].text));
        ck_assert_msg(result.rc == DSA_OK && result.config.pool_bytes == sizes[i].value, "%s", sizes[i].text);
    }
    for (size_t i = 0; i < sizeof(times) / sizeof(times[0]); i++) {
        PARSE(ARG("--max-grace"), ARG(times[i].text));
        ck_assert_msg(result.rc == DSA_OK && result.config.max_grace_us == times[i].value, "%s",
                      times[i].text);
    }
    for (size_t i = 0; i < sizeof(bad_sizes) / sizeof(bad_sizes[0]); i++) {
        PARSE(ARG("--pool-bytes"), ARG(bad_sizes[i]));
        ck_assert_msg(result.rc == DSA_E_BAD_REQUEST, "%s", bad_sizes[i]);
        ck_assert_ptr_nonnull(strstr(result.err.text, "MiB")); /* shows how to write one */
    }
    for (size_t i = 0; i < sizeof(bad_times) / sizeof(bad_times[0]); i++) {
        PARSE(ARG("--max-grace"), ARG(bad_times[i]));
        ck_assert_msg(result.rc == DSA_E_BAD_REQUEST, "%s", bad_times[i]);
        ck_assert_ptr_nonnull(strstr(result.err.text, "ms"));
    }
}
END_TEST

START_TEST(socket_mode_is_octal)
{
    PARSE(ARG("--socket-mode=0640"));
    ck_assert_uint_eq(result.config.socket_mode, 0640);
    PARSE(ARG("--socket-mode=600"));
    ck_assert_uint_eq(result.config.socket_mode, 0600);
    PARSE(ARG("--socket-mode=0680"));
    ck_assert_int_eq(result.rc, DSA_E_BAD_REQUEST);
}
END_TEST

START_TEST(booleans)
{
    PARSE(ARG("--physical-indices"));
    ck_assert_int_eq(result.rc, DSA_OK);
    ck_assert(result.config.physical_indices);
    PARSE(ARG("--physical-indices"), ARG("--no-physical-indices"));
    ck_assert_int_eq(result.rc, DSA_OK);
    ck_assert(!result.config.physical_indices);
    PARSE(ARG("--physical-indices=yes"));
    ck_assert_int_eq(result.rc, DSA_E_BAD_REQUEST);
    ck_assert_str_eq(result.err.field, "physical-indices");
}
END_TEST

START_TEST(no_belongs_to_booleans_without_a_value)
{
    PARSE(ARG("--no-layers"));
    ck_assert_int_eq(result.rc, DSA_E_BAD_REQUEST);
    PARSE(ARG("--no-nothing"));
    ck_assert_int_eq(result.rc, DSA_E_BAD_REQUEST);
    PARSE(ARG("--no-physical-indices=true"));
    ck_assert_int_eq(result.rc, DSA_E_BAD_REQUEST);
}
END_TEST

START_TEST(unknown_flags_name_the_nearest)
{
    static const struct {
        const char *given, *nearest;
    } typos[] = {{"--layer=3", "--layers"},
                 {"--pool-byte=1G", "--pool-bytes"},
                 {"--layuot=x", "--layout"},
                 {"--maxqueue", "--max-queue"},
                 {"--hlep", "--help"},
                 {"--physical-indexes", "--physical-indices"},
                 {"--drain_grace=1s", "--drain-grace"}};

    for (size_t i = 0; i < sizeof(typos) / sizeof(typos[0]); i++) {
        PARSE(ARG(typos[i].given));
        ck_assert_int_eq(result.rc, DSA_E_BAD_REQUEST);
        ck_assert_str_eq(result.err.field, "flag");
        ck_assert_str_eq(result.err.value, typos[i].given);
        ck_assert_msg(strstr(result.err.text, typos[i].nearest) != NULL, "%s: %s", typos[i].given,
                      result.err.text);
    }
}
END_TEST

START_TEST(words_that_are_no_flags)
{
    static const char *const words[] = {"", "-", "x", "layers", "-layers", "-h"};
    char huge[400];

    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        PARSE(ARG(words[i]));
        ck_assert_int_eq(result.rc, DSA_E_BAD_REQUEST);
        ck_assert_str_eq(result.err.field, "argument");
    }
    PARSE(ARG("--"));
    ck_assert_int_eq(result.rc, DSA_E_BAD_REQUEST);
    PARSE(ARG("--="));
    ck_assert_int_eq(result.rc, DSA_E_BAD_REQUEST);
    memset(huge, 'y', sizeof(huge));
    memcpy(huge, "--", 2);
    huge[sizeof(huge) - 1] = '\0';
    PARSE(huge);
    ck_assert_int_eq(result.rc, DSA_E_BAD_REQUEST);
}
END_TEST

START_TEST(actions)
{
    PARSE(ARG("--help"));
    ck_assert_int_eq(result.action, SRV_CONFIG_HELP);
    PARSE(ARG("--version"));
    ck_assert_int_eq(result.action, SRV_CONFIG_VERSION);
    PARSE(ARG("--layers=3"), ARG("--print-config"));
    ck_assert_int_eq(result.action, SRV_CONFIG_PRINT);
    ck_assert_str_eq(shown("layers"), "3");
    ck_assert_ptr_nonnull(strstr(result.shown, "layers: 3  # flag\n"));
    PARSE(ARG("--check-config"));
    ck_assert_int_eq(result.action, SRV_CONFIG_CHECK);
}
END_TEST

START_TEST(help_lists_every_option)
{
    char text[16384] = "", flag[80], fallback[80];
    FILE *out = fmemopen(text, sizeof(text) - 1, "w");
    const char *line, *end;

    ck_assert_ptr_nonnull(out);
    srv_config_help(out);
    fclose(out);
    for (int i = 0; i < N_ROWS; i++) {
        snprintf(flag, sizeof(flag), "\n  --%s ", rows[i].name);
        line = strstr(text, flag);
        ck_assert_msg(line != NULL, "--help has no --%s", rows[i].name);
        end = strchr(line + 1, '\n');
        ck_assert_ptr_nonnull(end);
        ck_assert_msg(end[-1] == ']', "--%s shows no default", rows[i].name);
        snprintf(fallback, sizeof(fallback), "[%s]", rows[i].shown[0] != '\0' ? rows[i].shown : "none");
        if (rows[i].kind != BYTES && rows[i].kind != US)
            ck_assert_msg(strncmp(end - strlen(fallback), fallback, strlen(fallback)) == 0, "--%s: %s",
                          rows[i].name, fallback);
    }
    ck_assert_ptr_nonnull(strstr(text, "--help"));
    ck_assert_ptr_nonnull(strstr(text, "--version"));
    ck_assert_ptr_nonnull(strstr(text, "--print-config"));
    ck_assert_ptr_nonnull(strstr(text, "--check-config"));
    ck_assert_ptr_nonnull(strstr(text, "--config FILE"));
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *tc = tcase_create("config");

    (void)max;
    tcase_add_loop_test(tc, default_is_as_documented, 0, N_ROWS);
    tcase_add_test(tc, every_option_has_a_row);
    tcase_add_test(tc, control_characters_are_refused);
    tcase_add_loop_test(tc, bounds_hold, 0, N_ROWS);
    tcase_add_loop_test(tc, malformed_values_are_refused, 0, N_ROWS);
    tcase_add_test(tc, value_is_a_word_of_its_own_too);
    tcase_add_test(tc, the_last_one_wins);
    tcase_add_loop_test(tc, missing_value_is_named, 0, N_ROWS);
    tcase_add_test(tc, units_of_size_and_time);
    tcase_add_test(tc, socket_mode_is_octal);
    tcase_add_test(tc, booleans);
    tcase_add_test(tc, no_belongs_to_booleans_without_a_value);
    tcase_add_test(tc, unknown_flags_name_the_nearest);
    tcase_add_test(tc, words_that_are_no_flags);
    tcase_add_test(tc, actions);
    tcase_add_test(tc, help_lists_every_option);
    suites_p[0] = suite_create("config");
    suite_add_tcase(suites_p[0], tc);
    return 1;
}
