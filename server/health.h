/* health.h - whether this process has started, wants work, and should be left alive. L writes, any thread asks.
 *
 *   startup  everything is open; stays so
 *   ready    started, not draining, device there, worker moving, service thread moving
 *   live     device there, service thread moving: what only a restart can mend turns it off */
#ifndef SERVER_HEALTH_H
#define SERVER_HEALTH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/meter.h"

enum srv_probe { SRV_PROBE_STARTUP, SRV_PROBE_READY, SRV_PROBE_LIVE };
#define SRV_N_PROBES 3

struct srv_health {
    atomic_bool is_started, is_draining, is_lost, is_stuck;
    srv_counter beat_us;     /* the service thread's last sign of life */
    srv_counter watchdog_us; /* longer without one, or in one launch, counts as stuck; 0: never */
};

/* [any] *why_p (NULL is fine) says why not, in a few words; "ok" if so. */
bool srv_health_ask(const struct srv_health *health, enum srv_probe probe, uint64_t now_us,
                    const char **why_p);
/* [L] The service thread moves; busy_since_us: since when the worker has been at one thing, 0 when it is not. */
void srv_health_beat(struct srv_health *health, uint64_t now_us, uint64_t busy_since_us);

#endif /* SERVER_HEALTH_H */
