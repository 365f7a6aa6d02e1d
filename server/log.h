/* log.h - one line per event: a lower-case sentence, then key=value. Any thread.
 * error = someone must act; warn = look when there is time; a client's bad request is debug. Lines go to stderr whole, one write
 * each, as text or as one JSON object a line.
 *
 * What is sentence, key and value is read from the format, never from what the arguments print: no value can make a line, a
 * key or an end of a string (log_line.h). Of one format so many lines a second are written; how many more there were is
 * said once the second is over (log_limit.h). */
#ifndef SERVER_LOG_H
#define SERVER_LOG_H

#include <stdbool.h>

enum srv_log_level { SRV_LOG_ERROR, SRV_LOG_WARN, SRV_LOG_INFO, SRV_LOG_DEBUG, SRV_LOG_TRACE };
enum srv_log_format { SRV_LOG_TEXT, SRV_LOG_JSON };

/* name: "error" ... "trace"; "text" or "json". -1 for another word. */
int srv_log_level_by_name(const char *name);
int srv_log_format_by_name(const char *name);
/* At any time. A thread may write a few more lines the old way. */
void srv_log_set_level(enum srv_log_level level);
void srv_log_set_format(enum srv_log_format format);
enum srv_log_format srv_log_get_format(void);
int srv_log_is_on(enum srv_log_level level);

/* format: "a sentence key=%d other=\"%s\"", a literal that outlives the process's use of the log. An integer or a floating
 * conversion alone is a number, all else text. A %s whose argument is NULL leaves its field out. */
__attribute__((format(printf, 2, 3))) void srv_log_line(enum srv_log_level level, const char *format, ...);

/* Says what was suppressed in seconds that are over; with is_end, also in the one that runs. A few times a second, so that it is
 * said when nothing else is. */
void srv_log_flush(bool is_end);

#define srv_log(level, ...)                                                                                  \
    do {                                                                                                     \
        if (srv_log_is_on(level))                                                                            \
            srv_log_line(level, __VA_ARGS__);                                                                \
    } while (0)

#endif /* SERVER_LOG_H */
