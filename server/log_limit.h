/* log_limit.h - how many lines of one format are written in a second. Pure: the time comes in as an argument. The caller
 * locks.
 * A window of a format begins with its first line and lasts a second; lines beyond the burst are counted instead. */
#ifndef SERVER_LOG_LIMIT_H
#define SERVER_LOG_LIMIT_H

#include <stdbool.h>
#include <stdint.h>

#include "server/log.h"

#define SRV_LOG_WINDOW_US UINT64_C(1000000)
/* Debug and trace are asked for, and still must not fill a disk. */
#define SRV_LOG_BURST       50
#define SRV_LOG_BURST_DEBUG 1000
#define SRV_LOG_SITES       256 /* formats; further ones are not limited */

struct srv_log_site {
    const char *format; /* NULL: free. Told apart by address: a format is a literal */
    enum srv_log_level level;
    uint64_t begin_us;
    uint32_t n_lines, n_suppressed;
};

struct srv_log_limit {
    struct srv_log_site sites[SRV_LOG_SITES];
};

/* True: write the line. *n_before_p: lines of the format that were suppressed in a window that is now over; say so first. */
bool srv_log_limit_take(struct srv_log_limit *limit, const char *format, enum srv_log_level level,
                        uint64_t now_us, uint32_t *n_before_p);

/* The next format with suppressed lines whose window is over, and how many; NULL when there is none. Its count is 0 again. */
const struct srv_log_site *srv_log_limit_next(struct srv_log_limit *limit, uint64_t now_us,
                                              uint32_t *n_suppressed_p);

#endif /* SERVER_LOG_LIMIT_H */
