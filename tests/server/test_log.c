/* Log lines: what is sentence, key and value, whatever the values are; JSON that a parser takes; how many lines of a kind. */
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kit.h"
#include "server/log_limit.h"
#include "server/log_line.h"

/* ---- one line -------------------------------------------------------------------------------------- */

static char line[SRV_LOG_MAX_LINE + 1];
static size_t n_line;

__attribute__((format(printf, 2, 3))) static void render(enum srv_log_format as, const char *format, ...)
{
    struct srv_log_event event = {
        .as = as, .level = SRV_LOG_WARN, .now = {1796000000, 123456789}, .format = format};
    va_list args;

    va_start(args, format);
    n_line = srv_log_line_write(line, &event, args);
    va_end(args);
    ck_assert_uint_le(n_line, SRV_LOG_MAX_LINE);
    ck_assert_int_eq(line[n_line - 1], '\n');
    ck_assert_ptr_eq(memchr(line, '\n', n_line), line + n_line - 1);
    line[n_line - 1] = '\0';
    ck_assert_uint_eq(strlen(line), n_line - 1);
}

static json_t *parse(const char *text)
{
    json_error_t err;
    json_t *object = json_loads(text, JSON_REJECT_DUPLICATES, &err);

    ck_assert_msg(object != NULL, "no JSON: %s at %d: %s", err.text, err.position, text);
    ck_assert(json_is_object(object));
    return object;
}

static const char *string_of(const json_t *object, const char *key)
{
    const char *value = json_string_value(json_object_get(object, key));

    ck_assert_msg(value != NULL, "no string %s in %s", key, line);
    return value;
}

START_TEST(text_reads_as_before)
{
    render(SRV_LOG_TEXT, "session ends session=%" PRIu64 " client=\"%s\" path=%s", UINT64_C(7), "a b",
           "/x/y");
    ck_assert_str_eq(line,
                     "2026-11-30T00:53:20.123456Z warn  session ends session=7 client=\"a b\" path=/x/y");
    render(SRV_LOG_TEXT, "stopped");
    ck_assert_str_eq(line, "2026-11-30T00:53:20.123456Z warn  stopped");
    render(SRV_LOG_TEXT, "session %s session=%d", "opened", 3);
    ck_assert_str_eq(strstr(line, "session"), "session opened session=3");
}
END_TEST

START_TEST(json_has_types)
{
    json_t *o;

    render(
        SRV_LOG_JSON,
        "a line, with words i=%d u=%u l=%ld ll=%llu z=%zu r=%.2f s=%s q=\"%d\" x=%x mix=%d/%d c=%c p=100%%",
        -5, 7u, 1L << 40, 9007199254740992ull, (size_t)3, 2.5, "12", 4, 255u, 1, 2, 'z');
    o = parse(line);
    ck_assert_str_eq(string_of(o, "ts"), "2026-11-30T00:53:20.123456Z");
    ck_assert_str_eq(string_of(o, "level"), "warn");
    ck_assert_str_eq(string_of(o, "msg"), "a line, with words");
    ck_assert_int_eq(json_integer_value(json_object_get(o, "i")), -5);
    ck_assert_int_eq(json_integer_value(json_object_get(o, "u")), 7);
    ck_assert_int_eq(json_integer_value(json_object_get(o, "l")), 1LL << 40);
    ck_assert_int_eq(json_integer_value(json_object_get(o, "ll")), 9007199254740992);
    ck_assert_int_eq(json_integer_value(json_object_get(o, "z")), 3);
    ck_assert(json_is_real(json_object_get(o, "r")));
    ck_assert_str_eq(string_of(o, "s"), "12"); /* text stays text, whatever it looks like */
    ck_assert_str_eq(string_of(o, "x"), "ff");
    ck_assert_str_eq(string_of(o, "mix"), "1/2");
    ck_assert_str_eq(string_of(o, "c"), "z");
    ck_assert_str_eq(string_of(o, "p"), "100%");
    ck_assert_int_eq(json_integer_value(json_object_get(o, "q")), 4);
    json_decref(o);
}
END_TEST

START_TEST(numbers_that_json_has_not)
{
    json_t *o;

    render(SRV_LOG_JSON, "n big=%" PRIu64 " low=%" PRId64 " nan=%f inf=%g pad=%03d plus=%+d huge=%g",
           UINT64_MAX, INT64_MIN, (double)NAN, (double)INFINITY, 7, 7, 1e300);
    o = parse(line);
    ck_assert_str_eq(string_of(o, "big"), "18446744073709551615");
    ck_assert_str_eq(string_of(o, "low"), "-9223372036854775808");
    ck_assert_str_eq(string_of(o, "nan"), "nan");
    ck_assert_str_eq(string_of(o, "inf"), "inf");
    ck_assert_str_eq(string_of(o, "pad"), "007");
    ck_assert_str_eq(string_of(o, "plus"), "+7");
    ck_assert(json_is_real(json_object_get(o, "huge")));
    json_decref(o);
}
END_TEST

START_TEST(widths_and_stars)
{
    render(SRV_LOG_TEXT, "w a=%.*s b=%5d c=%-4dx d=%*d e=%.3s f=%hhu g=%hu h=%jd i=%c", 2, "abcd", 12, 7, 3,
           5, "wxyz", 255, 65535, (intmax_t)-1, 'k');
    ck_assert_str_eq(strstr(line, " w ") + 1,
                     "w a=ab b=\"   12\" c=\"7   x\" d=\"  5\" e=wxy f=255 g=65535 h=-1 i=k");
}
END_TEST

START_TEST(null_leaves_its_field_out)
{
    json_t *o;
    const char *volatile none = NULL;

    render(SRV_LOG_JSON, "x a=%d trace_id=%s b=%d", 1, none, 2);
    o = parse(line);
    ck_assert_ptr_null(json_object_get(o, "trace_id"));
    ck_assert_int_eq(json_integer_value(json_object_get(o, "b")), 2);
    json_decref(o);
    render(SRV_LOG_TEXT, "x a=%d trace_id=\"%s\" b=%d", 1, none, 2);
    ck_assert_str_eq(strstr(line, " x ") + 1, "x a=1 b=2");
    render(SRV_LOG_TEXT, "x a=%s b=%d", "", 2);
    ck_assert_str_eq(strstr(line, " x ") + 1, "x a=\"\" b=2");
}
END_TEST

/* Values that try to end their string, to begin a key or a line, to be no UTF-8, to move a terminal's cursor. */
static const char *const hostile[] = {
    "\" level=\"error",
    "a level=error",
    "\\",
    "\\\"",
    "x\",\"level\":\"error",
    "new\nline ts=1",
    "\r\n{\"ts\":\"1\"}",
    "\x1b[2J\x1b]0;title\x07",
    "tab\there",
    "\x80\xff\xfe",
    "\xc0\xaf",         /* overlong */
    "\xed\xa0\x80",     /* a surrogate */
    "\xf4\x90\x80\x80", /* beyond Unicode */
    "cut \xe2\x82",     /* ends in the middle */
    "\xe2\x80\xae"
    "drow",         /* right to left */
    "\xc2\x85next", /* C1 */
    "gr\xc3\xbc\xc3\x9f "
    "\xf0\x9f\x98\x80",
    "100%d%s%n",
    "\x7f",
    "' OR 1=1",
};
#define N_HOSTILE ((int)(sizeof(hostile) / sizeof(hostile[0])))

START_TEST(values_forge_nothing_in_json)
{
    const char *value = hostile[_i];
    json_t *o;

    for (int quoted = 0; quoted < 2; quoted++) {
        if (quoted)
            render(SRV_LOG_JSON, "named %s client=\"%s\" n=%d", value, value, 5);
        else
            render(SRV_LOG_JSON, "named %s client=%s n=%d", value, value, 5);
        o = parse(line);
        ck_assert_uint_eq(json_object_size(o), 5); /* ts, level, msg, client, n */
        ck_assert_str_eq(string_of(o, "level"), "warn");
        ck_assert_int_eq(json_integer_value(json_object_get(o, "n")), 5);
        if (_i < 9 || _i > 13) /* what is UTF-8 comes back as it was */
            ck_assert_str_eq(string_of(o, "client"), value);
        else
            ck_assert_ptr_nonnull(strstr(string_of(o, "client"), "\xef\xbf\xbd"));
        for (const char *at = line; *at; at++)
            ck_assert_msg((unsigned char)*at >= 0x20 && *at != 0x7f, "byte %d in a line", *at);
        json_decref(o);
    }
}
END_TEST

/* Reads a text line as its readers do: words with '=' outside quotes are fields. */
static int count_fields(const char *text, const char *key)
{
    bool in_quotes = false;
    int n = 0;
    char start[80];

    snprintf(start, sizeof(start), "%s=", key);
    for (const char *at = text; *at; at++) {
        if (in_quotes && *at == '\\' && at[1])
            at++;
        else if (*at == '"')
            in_quotes = !in_quotes;
        else if (!in_quotes && (at == text || at[-1] == ' ') && strncmp(at, start, strlen(start)) == 0)
            n++;
    }
    ck_assert_msg(!in_quotes, "a quote is open: %s", text);
    return n;
}

START_TEST(values_forge_nothing_in_text)
{
    const char *value = hostile[_i];

    for (int quoted = 0; quoted < 2; quoted++) {
        if (quoted)
            render(SRV_LOG_TEXT, "named %s client=\"%s\" n=%d", value, value, 5);
        else
            render(SRV_LOG_TEXT, "named %s client=%s n=%d", value, value, 5);
        ck_assert_int_eq(count_fields(line, "client"), 1);
        ck_assert_int_eq(count_fields(line, "n"), 1);
        ck_assert_int_eq(count_fields(line, "level"), 0);
        ck_assert_int_eq(count_fields(line, "ts"), 0);
        ck_assert_ptr_nonnull(strstr(line, " n=5"));
        for (const char *at = line; *at; at++)
            ck_assert_msg((unsigned char)*at >= 0x20 && *at != 0x7f, "byte %d in a line", *at);
    }
}
END_TEST

START_TEST(random_bytes_stay_json)
{
    char value[SRV_LOG_MAX_VALUE * 2];
    unsigned seed = 20261201;

    for (int i = 0; i < KIT_TIMES(20000, 2000); i++) {
        size_t n = (size_t)rand_r(&seed) % sizeof(value);
        json_t *o;

        for (size_t k = 0; k < n; k++)
            value[k] = (char)(rand_r(&seed) % 255 + 1);
        value[n ? n - 1 : 0] = '\0';
        render(SRV_LOG_JSON, "r v=%s n=%d", value, i);
        o = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
        KIT_EXPECT(o && json_object_size(o) == 5 && json_integer_value(json_object_get(o, "n")) == i, "%s",
                   line);
        json_decref(o);
    }
}
END_TEST

START_TEST(long_values_and_long_lines_are_cut)
{
    static char big[100000];
    json_t *o;

    for (int unit = 0; unit < 3; unit++) { /* one byte, an escape of six, a character of four */
        const char *piece = unit == 0 ? "x" : unit == 1 ? "\x01" : "\xf0\x9f\x98\x80";

        big[0] = '\0';
        for (size_t n = 0; n + 5 < sizeof(big); n += strlen(piece))
            strcpy(big + n, piece);
        render(SRV_LOG_JSON, "long a=%s b=%d", big, 7);
        o = parse(line);
        ck_assert_uint_le(strlen(string_of(o, "a")), SRV_LOG_MAX_VALUE);
        ck_assert_str_eq(strchr(string_of(o, "a"), '\0') - 3, "...");
        ck_assert_int_eq(json_integer_value(json_object_get(o, "b")), 7);
        json_decref(o);
        for (int as = SRV_LOG_TEXT; as <= SRV_LOG_JSON; as++) {
            render((enum srv_log_format)as, "%s a=%s b=%s c=%s d=%s e=%s f=%s g=%s h=%s i=%s n=%d", big, big,
                   big, big, big, big, big, big, big, big, 5);
            ck_assert_ptr_nonnull(strstr(line, as == SRV_LOG_JSON ? ",\"cut\":true}" : " cut=true"));
            if (as == SRV_LOG_JSON)
                json_decref(parse(line));
            else
                ck_assert_int_eq(count_fields(line, "cut"), 1);
        }
    }
}
END_TEST

START_TEST(a_word_that_is_no_field_takes_its_argument)
{
    render(SRV_LOG_TEXT, "odd a=%d and %s b=%d", 1, "two", 3);
    ck_assert_str_eq(strstr(line, " odd ") + 1, "odd a=1 b=3");
}
END_TEST

START_TEST(sentences)
{
    char text[64], little[8];

    srv_log_line_sentence("session %s session=%d client=\"%s\"", text, sizeof(text));
    ck_assert_str_eq(text, "session ...");
    srv_log_line_sentence("n %" PRIu64 " of %.*s, all", text, sizeof(text));
    ck_assert_str_eq(text, "n ... of ..., all");
    srv_log_line_sentence("stopped", text, sizeof(text));
    ck_assert_str_eq(text, "stopped");
    srv_log_line_sentence("a long sentence %d", little, sizeof(little));
    ck_assert_uint_lt(strlen(little), sizeof(little));
}
END_TEST

/* ---- how many -------------------------------------------------------------------------------------- */

START_TEST(a_burst_passes_and_the_rest_is_counted)
{
    static struct srv_log_limit limit;
    static const char *const a = "a", *const b = "b";
    const struct srv_log_site *site;
    uint64_t now = 5000000;
    uint32_t n;

    memset(&limit, 0, sizeof(limit));
    for (unsigned i = 0; i < SRV_LOG_BURST + 20; i++)
        ck_assert_int_eq(srv_log_limit_take(&limit, a, SRV_LOG_WARN, now + i, &n), i < SRV_LOG_BURST);
    ck_assert(srv_log_limit_take(&limit, b, SRV_LOG_WARN, now + 90, &n)); /* another format has its own */
    ck_assert_ptr_null(srv_log_limit_next(&limit, now + SRV_LOG_WINDOW_US - 1, &n));
    site = srv_log_limit_next(&limit, now + SRV_LOG_WINDOW_US, &n); /* nothing else was logged */
    ck_assert_ptr_nonnull(site);
    ck_assert_ptr_eq(site->format, a);
    ck_assert_uint_eq(n, 20);
    ck_assert_ptr_null(srv_log_limit_next(&limit, now + SRV_LOG_WINDOW_US, &n));

    now += 2 * SRV_LOG_WINDOW_US;
    for (unsigned i = 0; i < SRV_LOG_BURST + 3; i++)
        srv_log_limit_take(&limit, a, SRV_LOG_WARN, now, &n);
    ck_assert(srv_log_limit_take(&limit, a, SRV_LOG_WARN, now + SRV_LOG_WINDOW_US, &n)); /* a new second */
    ck_assert_uint_eq(n, 3);
    ck_assert(srv_log_limit_take(&limit, a, SRV_LOG_WARN, now + SRV_LOG_WINDOW_US, &n));
    ck_assert_uint_eq(n, 0);
}
END_TEST

START_TEST(debug_has_a_larger_burst_and_sites_have_an_end)
{
    static struct srv_log_limit limit;
    static char formats[SRV_LOG_SITES + 10];
    unsigned n_written = 0;
    uint32_t n;

    memset(&limit, 0, sizeof(limit));
    for (int i = 0; i < 3000; i++)
        n_written += srv_log_limit_take(&limit, "d", SRV_LOG_DEBUG, 1, &n);
    ck_assert_uint_eq(n_written, SRV_LOG_BURST_DEBUG);
    for (size_t i = 0; i < sizeof(formats); i++)
        for (int k = 0; k < SRV_LOG_BURST; k++)
            KIT_EXPECT(srv_log_limit_take(&limit, &formats[i], SRV_LOG_INFO, 1, &n), "format %zu", i);
    ck_assert(!srv_log_limit_take(&limit, &formats[0], SRV_LOG_INFO, 1, &n));
    ck_assert(
        srv_log_limit_take(&limit, &formats[sizeof(formats) - 1], SRV_LOG_INFO, 1, &n)); /* not limited */
}
END_TEST

/* ---- the whole log ----------------------------------------------------------------------------------- */

static char *log_path;

/* stderr goes to a file from here on. */
static void to_file(void)
{
    int fd;

    kit_dir_make();
    log_path = kit_path("log");
    fd = open(log_path, O_CREAT | O_RDWR | O_APPEND, 0600);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_ge(dup2(fd, STDERR_FILENO), 0);
    close(fd);
}

static FILE *reading(void)
{
    FILE *file = fopen(log_path, "r");

    ck_assert_ptr_nonnull(file);
    return file;
}

static void end_file(void)
{
    unlink(log_path);
    free(log_path);
    kit_dir_remove();
}

START_TEST(names_of_levels_and_formats)
{
    ck_assert_int_eq(srv_log_level_by_name("error"), SRV_LOG_ERROR);
    ck_assert_int_eq(srv_log_level_by_name("trace"), SRV_LOG_TRACE);
    ck_assert_int_eq(srv_log_level_by_name("Error"), -1);
    ck_assert_int_eq(srv_log_level_by_name(""), -1);
    ck_assert_int_eq(srv_log_format_by_name("text"), SRV_LOG_TEXT);
    ck_assert_int_eq(srv_log_format_by_name("json"), SRV_LOG_JSON);
    ck_assert_int_eq(srv_log_format_by_name("xml"), -1);
}
END_TEST

START_TEST(level_and_format_change_at_run_time)
{
    char text[SRV_LOG_MAX_LINE];
    FILE *file;

    to_file();
    srv_log(SRV_LOG_DEBUG, "not seen");
    srv_log_set_level(SRV_LOG_DEBUG);
    srv_log(SRV_LOG_DEBUG, "seen n=%d", 1);
    srv_log_set_format(SRV_LOG_JSON);
    srv_log(SRV_LOG_DEBUG, "seen too n=%d", 2);
    srv_log_set_level(SRV_LOG_ERROR);
    srv_log(SRV_LOG_WARN, "not seen either");
    file = reading();
    ck_assert_ptr_nonnull(fgets(text, sizeof(text), file));
    ck_assert_ptr_nonnull(strstr(text, "Z debug seen n=1\n"));
    ck_assert_ptr_nonnull(fgets(text, sizeof(text), file));
    json_decref(parse(text));
    ck_assert_ptr_null(fgets(text, sizeof(text), file));
    fclose(file);
    end_file();
}
END_TEST

#define N_THREADS 4
#define N_LINES   KIT_TIMES(5000, 1000)

static void *write_lines(void *arg)
{
    for (int i = 0; i < N_LINES; i++) {
        srv_log(SRV_LOG_INFO, "a thread writes thread=%d i=%d text=\"%s\"", *(int *)arg, i,
                hostile[i % N_HOSTILE]);
        if (i % 100 == 0)
            srv_log_flush(false);
    }
    return NULL;
}

/* Whatever the clock does meanwhile: every line is written or counted. */
START_TEST(threads_lose_no_line)
{
    pthread_t threads[N_THREADS];
    int numbers[N_THREADS];
    char text[SRV_LOG_MAX_LINE + 1];
    long n_written = 0, n_suppressed = 0;
    FILE *file;

    to_file();
    srv_log_set_format(SRV_LOG_JSON);
    for (int i = 0; i < N_THREADS; i++) {
        numbers[i] = i;
        ck_assert_int_eq(pthread_create(&threads[i], NULL, write_lines, &numbers[i]), 0);
    }
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(threads[i], NULL);
    srv_log_flush(true);
    file = reading();
    while (fgets(text, sizeof(text), file)) {
        json_t *o = parse(text);

        if (strcmp(string_of(o, "msg"), "a thread writes") == 0)
            n_written++;
        else if (strcmp(string_of(o, "msg"), "a thread writes suppressed") == 0)
            n_suppressed += json_integer_value(json_object_get(o, "times"));
        else
            ck_abort_msg("another line: %s", text);
        json_decref(o);
    }
    ck_assert_int_ge(n_written, SRV_LOG_BURST);
    ck_assert_int_gt(n_suppressed, 0);
    ck_assert_int_eq(n_written + n_suppressed, N_THREADS * N_LINES);
    fclose(file);
    end_file();
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("log");
    TCase *lines = tcase_create("lines"), *limit = tcase_create("limit"), *all = tcase_create("all");

    tcase_add_test(lines, text_reads_as_before);
    tcase_add_test(lines, json_has_types);
    tcase_add_test(lines, numbers_that_json_has_not);
    tcase_add_test(lines, widths_and_stars);
    tcase_add_test(lines, null_leaves_its_field_out);
    tcase_add_loop_test(lines, values_forge_nothing_in_json, 0, N_HOSTILE);
    tcase_add_loop_test(lines, values_forge_nothing_in_text, 0, N_HOSTILE);
    tcase_add_test(lines, random_bytes_stay_json);
    tcase_add_test(lines, long_values_and_long_lines_are_cut);
    tcase_add_test(lines, a_word_that_is_no_field_takes_its_argument);
    tcase_add_test(lines, sentences);
    tcase_add_test(limit, a_burst_passes_and_the_rest_is_counted);
    tcase_add_test(limit, debug_has_a_larger_burst_and_sites_have_an_end);
    tcase_add_test(all, names_of_levels_and_formats);
    tcase_add_test(all, level_and_format_change_at_run_time);
    tcase_add_test(all, threads_lose_no_line);
    suite_add_tcase(suite, lines);
    suite_add_tcase(suite, limit);
    suite_add_tcase(suite, all);
    tcase_set_timeout(lines, 60);
    tcase_set_timeout(all, 60);
    (void)max;
    suites_p[0] = suite;
    return 1;
}
