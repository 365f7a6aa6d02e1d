#include "server/log_limit.h"

#include <stddef.h>

/* Open addressing; sites are never given up, so a search ends at the first free one. */
static struct srv_log_site *find(struct srv_log_limit *limit, const char *format)
{
    size_t at = ((uintptr_t)format * UINT64_C(0x9E3779B97F4A7C15)) >> 32;

    for (size_t i = 0; i < SRV_LOG_SITES; i++) {
        struct srv_log_site *site = &limit->sites[(at + i) % SRV_LOG_SITES];

        if (site->format == format || !site->format)
            return site;
    }
    return NULL;
}

bool srv_log_limit_take(struct srv_log_limit *limit, const char *format, enum srv_log_level level,
                        uint64_t now_us, uint32_t *n_before_p)
{
    struct srv_log_site *site = find(limit, format);

    *n_before_p = 0;
    if (!site)
        return true;
    if (!site->format || now_us - site->begin_us >= SRV_LOG_WINDOW_US) {
        *n_before_p = site->n_suppressed;
        *site = (struct srv_log_site){.format = format, .begin_us = now_us};
    }
    site->level = level;
    if (site->n_lines < (level >= SRV_LOG_DEBUG ? SRV_LOG_BURST_DEBUG : SRV_LOG_BURST)) {
        site->n_lines++;
        return true;
    }
    site->n_suppressed++;
    return false;
}

const struct srv_log_site *srv_log_limit_next(struct srv_log_limit *limit, uint64_t now_us,
                                              uint32_t *n_suppressed_p)
{
    for (size_t i = 0; i < SRV_LOG_SITES; i++) {
        struct srv_log_site *site = &limit->sites[i];

        if (site->n_suppressed == 0 || now_us - site->begin_us < SRV_LOG_WINDOW_US)
            continue;
        *n_suppressed_p = site->n_suppressed;
        site->n_suppressed = 0;
        return site;
    }
    return NULL;
}
