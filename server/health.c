#include "server/health.h"

#include <stddef.h>

#include "server/log.h"

static bool is_silent(const struct srv_health *health, uint64_t now_us)
{
    uint64_t watchdog = srv_counter_get(&health->watchdog_us);
    uint64_t beat = srv_counter_get(&health->beat_us);

    return watchdog > 0 && beat > 0 && now_us > beat && now_us - beat > watchdog;
}

bool srv_health_ask(const struct srv_health *health, enum srv_probe probe, uint64_t now_us,
                    const char **why_p)
{
    const char *why = NULL;

    if (probe == SRV_PROBE_STARTUP) {
        why = atomic_load(&health->is_started) ? NULL : "starting";
    } else {
        if (atomic_load(&health->is_lost))
            why = "device lost";
        else if (is_silent(health, now_us))
            why = "service thread stuck";
        if (probe == SRV_PROBE_READY && !why) {
            if (!atomic_load(&health->is_started))
                why = "starting";
            else if (atomic_load(&health->is_draining))
                why = "draining";
            else if (atomic_load(&health->is_stuck))
                why = "worker stuck";
        }
    }
    if (why_p)
        *why_p = why ? why : "ok";
    return !why;
}

void srv_health_beat(struct srv_health *health, uint64_t now_us, uint64_t busy_since_us)
{
    uint64_t watchdog = srv_counter_get(&health->watchdog_us);
    bool is_stuck =
        watchdog > 0 && busy_since_us > 0 && now_us > busy_since_us && now_us - busy_since_us > watchdog;

    srv_counter_set(&health->beat_us, now_us);
    if (is_stuck == atomic_load(&health->is_stuck))
        return;
    atomic_store(&health->is_stuck, is_stuck);
    if (is_stuck)
        srv_log(SRV_LOG_ERROR, "the worker does not move, readiness is off until it does watchdog_us=%llu",
                (unsigned long long)watchdog);
    else
        srv_log(SRV_LOG_WARN, "the worker moves again");
}
