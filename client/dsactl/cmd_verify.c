/* cmd_verify.c - checks a running server: reference vectors byte for byte and against their tolerances, then
 * random cases against float64. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "client/dsactl/verify.h"

static void report(const char *verdict, const char *name, const char *format, va_list args)
{
    printf("%s %s", verdict, name);
    if (format[0] != '\0') {
        printf(": ");
        vprintf(format, args);
    }
    putchar('\n');
}

void verify_pass(struct verify *v, const char *name, const char *format, ...)
{
    va_list args;

    v->n_passed++;
    if (!v->is_verbose)
        return;
    va_start(args, format);
    report("ok  ", name, format, args);
    va_end(args);
}

void verify_fail(struct verify *v, const char *name, const char *format, ...)
{
    va_list args;

    v->n_failed++;
    va_start(args, format);
    report("FAIL", name, format, args);
    va_end(args);
}

void verify_skip(struct verify *v, const char *name, const char *format, ...)
{
    va_list args;

    v->n_skipped++;
    va_start(args, format);
    report("skip", name, format, args);
    va_end(args);
}

void verify_error(struct verify *v, const char *name, const char *what, const struct dsa_error *err)
{
    char text[512];

    dsa_error_text(err, text, sizeof(text));
    verify_fail(v, name, "%s: %s", what, text);
}

/* ---- stored bytes ---------------------------------------------------------------------------- */

struct export_check {
    const uint8_t *rows;
    uint64_t n, seen, row_bytes;
    char *text;
    size_t size;
};

static dsa_status check_chunk(uint64_t first, uint32_t n_tokens, const void *rows, size_t n_bytes, void *arg)
{
    struct export_check *check = arg;
    const uint8_t *got = rows, *want = check->rows + first * check->row_bytes;

    if (first != check->seen || n_tokens > check->n - first || n_bytes != n_tokens * check->row_bytes) {
        snprintf(check->text, check->size, "a chunk of %u rows from %llu does not follow row %llu of %llu",
                 n_tokens, (unsigned long long)first, (unsigned long long)check->seen,
                 (unsigned long long)check->n);
        return DSA_E_PROTOCOL;
    }
    for (size_t i = 0; i < n_bytes; i++) {
        if (got[i] == want[i])
            continue;
        snprintf(check->text, check->size, "row %llu byte %llu is %02x, expected %02x",
                 (unsigned long long)(first + i / check->row_bytes),
                 (unsigned long long)(i % check->row_bytes), got[i], want[i]);
        return DSA_E_PROTOCOL;
    }
    check->seen += n_tokens;
    return DSA_OK;
}

bool verify_export(struct verify *v, uint64_t sequence, uint32_t layer, const uint8_t *rows, uint64_t n,
                   char *text, size_t size)
{
    struct export_check check = {rows, n, 0, v->pool->row_bytes, text, size};
    struct dsa_error err;

    text[0] = '\0';
    if (dsa_export(v->client, sequence, layer, 0, 0, DSA_DTYPE_U8, check_chunk, &check, &err) != DSA_OK) {
        if (text[0] == '\0')
            dsa_error_text(&err, text, size);
        return false;
    }
    if (check.seen != n) {
        snprintf(text, size, "%llu of %llu rows came back", (unsigned long long)check.seen,
                 (unsigned long long)n);
        return false;
    }
    return true;
}

/* ---- the command ----------------------------------------------------------------------------- */

static int run(struct verify *v, const char *dir, uint64_t n_cases, uint64_t seed)
{
    uint64_t begin = clock_us();

    v->caps = dsa_capabilities(v->client);
    v->has_memfd = v->caps->fd_socket[0] != '\0';
    if (!pool_pick(v->client, &v->pool, &v->layout))
        return EXIT_MISMATCH;
    printf("server %s, %s, %u layers; seed %llu\n", v->caps->version, dsa_layout_name(v->pool->layout),
           v->pool->n_layers, (unsigned long long)seed);
    if (dir && !verify_vectors(v, dir))
        return EXIT_USAGE;
    if (!verify_random(v, n_cases, seed)) {
        fprintf(stderr, "dsactl: verify: no memory\n");
        return EXIT_MISMATCH;
    }
    printf("%.1f s\n%u passed, %u failed, %u skipped\n", (double)(clock_us() - begin) / 1e6, v->n_passed,
           v->n_failed, v->n_skipped);
    return v->n_failed == 0 ? EXIT_OK : EXIT_MISMATCH;
}

int cmd_verify(int argc, char **argv)
{
    struct common common = COMMON_DEFAULTS;
    struct verify v = {0};
    const char *dir = NULL;
    uint64_t cases = 40, seed = 1;
    const struct arg table[] = {
        {"vectors", ARG_TEXT, &dir, "DIR", "folder of reference vectors", 0, 0},
        {"cases", ARG_UINT, &cases, "N", "random cases, each with several requests", 0, 1000000},
        {"seed", ARG_UINT, &seed, "N", "of the random cases", 0, 0},
        {"verbose", ARG_FLAG, &v.is_verbose, NULL, "print passed checks too", 0, 0},
        COMMON_ARGS(common),
        {0},
    };
    int code;

    if (!command_args(
            "verify",
            "Runs every vector folder in DIR that fits the server's layout, and random cases, through the\n"
            "server and compares: stored rows byte for byte, results with float64. Ends in the line\n"
            "`N passed, N failed, N skipped`; exit code 1 when something failed.",
            table, argc, argv, &code))
        return code;
    v.client = command_connect(&common, true);
    if (!v.client)
        return EXIT_CONNECT;
    code = run(&v, dir, cases, seed);
    dsa_close(v.client);
    return code;
}
