#include "server/core/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Fields and values may repeat what a client sent. They end up in log lines and in protobuf strings, which
 * must be UTF-8 even after a cut, so anything but printable ASCII becomes '?'. */
static void make_printable(char *text)
{
    for (; *text; text++)
        if (*text < 0x20 || *text > 0x7e)
            *text = '?';
}

int srv_err_value(struct srv_err *err, const char *format, ...)
{
    va_list ap;

    if (!err)
        return 0;
    va_start(ap, format);
    vsnprintf(err->value, sizeof(err->value), format, ap);
    va_end(ap);
    make_printable(err->value);
    return 1;
}

dsa_status srv_err_set(struct srv_err *err, dsa_status code, const char *field, const char *file, int line,
                       int value_is_set, const char *text, ...)
{
    va_list ap;

    if (!err)
        return code;
    err->code = code;
    snprintf(err->field, sizeof(err->field), "%s", field ? field : "");
    make_printable(err->field);
    if (!value_is_set)
        err->value[0] = '\0';
    va_start(ap, text);
    vsnprintf(err->text, sizeof(err->text), text, ap);
    va_end(ap);
    make_printable(err->text);
    err->rule[0] = '\0';
    err->retry_after_us = 0;
    err->file = file;
    err->line = line;
    return code;
}

void srv_err_clear(struct srv_err *err)
{
    if (err)
        memset(err, 0, sizeof(*err));
}

void srv_assert_failed(const char *cond, const char *file, int line)
{
    fprintf(stderr, "%s:%d: broken invariant: %s\n", file, line, cond);
    abort();
}

void srv_err_prefix(struct srv_err *err, const char *prefix)
{
    char field[sizeof(err->field)];

    if (!err || err->field[0] == '\0')
        return;
    snprintf(field, sizeof(field), "%s%s", prefix, err->field);
    memcpy(err->field, field, sizeof(field));
}
