/* log_line.h - an event as one line of text or JSON. Pure: no clock, no lock, no I/O; any thread.
 *
 *   format   "session ends session=%llu client=\"%s\""
 *             sentence     key     value, with conversions
 *   text     2026-12-01T10:00:00.000000Z info  session ends session=7 client="a \"b\""
 *   json     {"ts":"2026-12-01T10:00:00.000000Z","level":"info","msg":"session ends","session":7,"client":"a \"b\""}
 *
 * In text a value that is not a plain word goes between quotes. Between quotes both formats escape the same way: control
 * characters, and those that turn the direction of text, as \u; bytes that are no UTF-8 become U+FFFD. */
#ifndef SERVER_LOG_LINE_H
#define SERVER_LOG_LINE_H

#include <stdarg.h>
#include <stddef.h>
#include <time.h>

#include "server/log.h"

#define SRV_LOG_MAX_LINE  4096 /* with the newline: what a pipe takes in one piece */
#define SRV_LOG_MAX_VALUE 512  /* bytes of one value as written; a longer one ends in "..." */

struct srv_log_event {
    enum srv_log_format as;
    enum srv_log_level level;
    struct timespec now; /* CLOCK_REALTIME */
    const char *format;
};

/* Writes the line with its newline, no terminator, and returns its length. Fields that find no room are left out, and the field
 * cut=true says so. line: SRV_LOG_MAX_LINE bytes. */
size_t srv_log_line_write(char *line, const struct srv_log_event *event, va_list args);

/* The words of a format before its first key, with "..." for conversions. Cut where it does not fit. */
void srv_log_line_sentence(const char *format, char *text, size_t size);

extern const char *const srv_log_level_names[];

#endif /* SERVER_LOG_LINE_H */
