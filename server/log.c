#include "server/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "server/clock.h"
#include "server/log_limit.h"
#include "server/log_line.h"

static const char *const format_names[] = {"text", "json"};

/* Relaxed: a change may be seen a few lines late. */
static atomic_int log_level = SRV_LOG_INFO;
static atomic_int log_format = SRV_LOG_TEXT;

/* Guards the limit. Held while a line is written, so lines keep their order. */
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static struct srv_log_limit log_limit;

int srv_log_level_by_name(const char *name)
{
    for (int i = 0; i <= SRV_LOG_TRACE; i++)
        if (strcmp(name, srv_log_level_names[i]) == 0)
            return i;
    return -1;
}

int srv_log_format_by_name(const char *name)
{
    for (int i = 0; i <= SRV_LOG_JSON; i++)
        if (strcmp(name, format_names[i]) == 0)
            return i;
    return -1;
}

void srv_log_set_level(enum srv_log_level level)
{
    atomic_store_explicit(&log_level, (int)level, memory_order_relaxed);
}

void srv_log_set_format(enum srv_log_format format)
{
    atomic_store_explicit(&log_format, (int)format, memory_order_relaxed);
}

enum srv_log_format srv_log_get_format(void)
{
    return (enum srv_log_format)atomic_load_explicit(&log_format, memory_order_relaxed);
}

int srv_log_is_on(enum srv_log_level level)
{
    return (int)level <= atomic_load_explicit(&log_level, memory_order_relaxed);
}

static void write_list(enum srv_log_level level, const char *format, va_list args)
{
    struct srv_log_event event = {.as = srv_log_get_format(), .level = level, .format = format};
    char line[SRV_LOG_MAX_LINE];
    size_t n;

    clock_gettime(CLOCK_REALTIME, &event.now);
    n = srv_log_line_write(line, &event, args);
    /* stderr gone is not a reason to stop serving */
    if (write(STDERR_FILENO, line, n) < 0)
        return;
}

__attribute__((format(printf, 2, 3))) static void write_line(enum srv_log_level level, const char *format,
                                                             ...)
{
    va_list args;

    va_start(args, format);
    write_list(level, format, args);
    va_end(args);
}

static void write_suppressed(enum srv_log_level level, const char *format, uint32_t n)
{
    char sentence[128];

    srv_log_line_sentence(format, sentence, sizeof(sentence));
    write_line(level, "%s suppressed times=%u", sentence, (unsigned)n);
}

void srv_log_line(enum srv_log_level level, const char *format, ...)
{
    uint32_t n_before;
    va_list args;
    bool is_written;

    pthread_mutex_lock(&log_lock);
    is_written = srv_log_limit_take(&log_limit, format, level, srv_now_us(), &n_before);
    if (n_before > 0)
        write_suppressed(level, format, n_before);
    if (is_written) {
        va_start(args, format);
        write_list(level, format, args);
        va_end(args);
    }
    pthread_mutex_unlock(&log_lock);
}

void srv_log_flush(bool is_end)
{
    uint64_t now_us = srv_now_us() + (is_end ? SRV_LOG_WINDOW_US : 0);
    const struct srv_log_site *site;
    uint32_t n;

    pthread_mutex_lock(&log_lock);
    while ((site = srv_log_limit_next(&log_limit, now_us, &n)) != NULL)
        write_suppressed(site->level, site->format, n);
    pthread_mutex_unlock(&log_lock);
}
