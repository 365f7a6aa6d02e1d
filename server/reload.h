/* reload.h - a new configuration for a server that runs: takes over what can change, and says in the log what changed, from what
 * to what, and what keeps its value and why. All functions [L]. */
#ifndef SERVER_RELOAD_H
#define SERVER_RELOAD_H

#include "server/config.h"

struct srv_reload_counts {
    unsigned n_changed, n_kept;
};

/* config: in use. start: as it was at the start. fresh: read again and found sound. */
struct srv_reload_counts srv_reload_apply(struct srv_config *config, const struct srv_config *start,
                                          const struct srv_config *fresh);
/* The configuration that was read is wrong: says so, and that everything stays as it is. */
void srv_reload_refuse(const struct srv_err *err);

#endif /* SERVER_RELOAD_H */
