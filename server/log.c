#include "server/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *const level_names[] = {"error", "warn", "info", "debug", "trace"};

/* Relaxed: a level change may be seen a few lines late. */
static atomic_int log_level = SRV_LOG_INFO;

/* Guards what the repeat limit remembers. Held while a line is written, so lines keep their order. */
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char last_text[512];
static unsigned n_repeats;
static time_t last_second;

int srv_log_level_by_name(const char *name)
{
    for (int i = 0; i <= SRV_LOG_TRACE; i++)
        if (strcmp(name, level_names[i]) == 0)
            return i;
    return -1;
}

void srv_log_set_level(enum srv_log_level level)
{
    atomic_store_explicit(&log_level, (int)level, memory_order_relaxed);
}

int srv_log_is_on(enum srv_log_level level)
{
    return (int)level <= atomic_load_explicit(&log_level, memory_order_relaxed);
}

static void write_line(enum srv_log_level level, const struct timespec *now, const char *text)
{
    char line[640];
    struct tm tm;
    int n;

    gmtime_r(&now->tv_sec, &tm);
    n = snprintf(line, sizeof(line), "%04d-%02d-%02dT%02d:%02d:%02d.%03ldZ %-5s %s\n", tm.tm_year + 1900,
                 tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec, now->tv_nsec / 1000000,
                 level_names[level], text);
    if (n >= (int)sizeof(line))
        n = (int)sizeof(line) - 1;
    /* stderr gone is not a reason to stop serving */
    if (write(STDERR_FILENO, line, (size_t)n) < 0)
        return;
}

void srv_log_line(enum srv_log_level level, const char *format, ...)
{
    char text[sizeof(last_text)], again[64];
    struct timespec now;
    va_list ap;

    va_start(ap, format);
    vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    clock_gettime(CLOCK_REALTIME, &now);
    pthread_mutex_lock(&log_lock);
    if (now.tv_sec == last_second && strcmp(text, last_text) == 0) {
        n_repeats++;
    } else {
        if (n_repeats > 0) {
            snprintf(again, sizeof(again), "last line repeated times=%u", n_repeats);
            write_line(level, &now, again);
        }
        n_repeats = 0;
        last_second = now.tv_sec;
        memcpy(last_text, text, sizeof(text));
        write_line(level, &now, text);
    }
    pthread_mutex_unlock(&log_lock);
}
