/* log.h - one line per event: a lower-case sentence, then key=value. Any thread.
 * error = someone must act; warn = look when there is time; a client's bad request is debug. Lines go to stderr
 * whole (one write). A line that repeats within a second is counted and reported once when it stops or changes. */
#ifndef SERVER_LOG_H
#define SERVER_LOG_H

enum srv_log_level { SRV_LOG_ERROR, SRV_LOG_WARN, SRV_LOG_INFO, SRV_LOG_DEBUG, SRV_LOG_TRACE };

/* name: "error" ... "trace". Returns -1 for another word. */
int srv_log_level_by_name(const char *name);
void srv_log_set_level(enum srv_log_level level);
int srv_log_is_on(enum srv_log_level level);

__attribute__((format(printf, 2, 3))) void srv_log_line(enum srv_log_level level, const char *format, ...);

#define srv_log(level, ...)                                                                                  \
    do {                                                                                                     \
        if (srv_log_is_on(level))                                                                            \
            srv_log_line(level, __VA_ARGS__);                                                                \
    } while (0)

#endif /* SERVER_LOG_H */
