#include "client/dsactl/args.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HELP_COLUMN 30

static const struct arg *find(const struct arg *table, const char *name, size_t n)
{
    for (; table->name; table++) {
        if (strlen(table->name) == n && strncmp(table->name, name, n) == 0)
            return table;
    }
    return NULL;
}

static bool set_uint(const struct arg *arg, const char *text)
{
    char *end;
    unsigned long long n;

    errno = 0;
    n = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0) {
        fprintf(stderr, "dsactl: --%s: '%s' is not a whole number\n", arg->name, text);
        return false;
    }
    if (n < arg->min || (arg->max != 0 && n > arg->max)) {
        fprintf(stderr, "dsactl: --%s: %s is outside %" PRIu64 " to %" PRIu64 "\n", arg->name, text, arg->min,
                arg->max ? arg->max : UINT64_MAX);
        return false;
    }
    *(uint64_t *)arg->value = n;
    return true;
}

static bool set_real(const struct arg *arg, const char *text)
{
    char *end;
    double x = strtod(text, &end);

    if (end == text || *end != '\0' || !isfinite(x) || x < 0) {
        fprintf(stderr, "dsactl: --%s: '%s' is not a number from 0\n", arg->name, text);
        return false;
    }
    *(double *)arg->value = x;
    return true;
}

static bool set(const struct arg *arg, const char *text)
{
    switch (arg->type) {
    case ARG_TEXT:
        *(const char **)arg->value = text;
        return true;
    case ARG_UINT:
        return set_uint(arg, text);
    case ARG_REAL:
        return set_real(arg, text);
    case ARG_FLAG:
        break;
    }
    *(bool *)arg->value = true;
    return true;
}

/* One flag at argv[i]; *i_p moves past it and its value. */
static enum args_result parse_one(const struct arg *table, int argc, char **argv, int *i_p)
{
    const char *word = argv[*i_p], *name = word + 2, *equals;
    const struct arg *arg;

    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)
        return ARGS_HELP;
    if (strncmp(word, "--", 2) != 0) {
        fprintf(stderr, "dsactl: unexpected argument '%s'\n", word);
        return ARGS_BAD;
    }
    equals = strchr(name, '=');
    arg = find(table, name, equals ? (size_t)(equals - name) : strlen(name));
    if (!arg) {
        fprintf(stderr, "dsactl: unknown flag '%s' (see --help)\n", word);
        return ARGS_BAD;
    }
    *i_p += 1;
    if (arg->type == ARG_FLAG) {
        if (equals) {
            fprintf(stderr, "dsactl: --%s takes no value\n", arg->name);
            return ARGS_BAD;
        }
        return set(arg, "") ? ARGS_OK : ARGS_BAD;
    }
    if (equals)
        return set(arg, equals + 1) ? ARGS_OK : ARGS_BAD;
    if (*i_p >= argc) {
        fprintf(stderr, "dsactl: --%s needs a value\n", arg->name);
        return ARGS_BAD;
    }
    *i_p += 1;
    return set(arg, argv[*i_p - 1]) ? ARGS_OK : ARGS_BAD;
}

enum args_result args_parse(const struct arg *table, int argc, char **argv)
{
    enum args_result result = ARGS_OK;

    for (int i = 1; i < argc && result == ARGS_OK;)
        result = parse_one(table, argc, argv, &i);
    return result;
}

static void print_default(const struct arg *arg)
{
    switch (arg->type) {
    case ARG_TEXT:
        if (*(const char **)arg->value && **(const char **)arg->value)
            printf(" [%s]", *(const char **)arg->value);
        break;
    case ARG_UINT:
        printf(" [%" PRIu64 "]", *(uint64_t *)arg->value);
        break;
    case ARG_REAL:
        printf(" [%g]", *(double *)arg->value);
        break;
    case ARG_FLAG:
        break;
    }
}

void args_print(const struct arg *table)
{
    for (; table->name; table++) {
        int n = printf("  --%s%s%s", table->name, table->type == ARG_FLAG ? "" : " ",
                       table->type == ARG_FLAG ? "" : table->metavar);

        printf("%*s%s", n < HELP_COLUMN ? HELP_COLUMN - n : 1, "", table->help);
        print_default(table);
        putchar('\n');
    }
}
