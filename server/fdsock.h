/* fdsock.h - the socket that takes file descriptors from clients (proto/dsa_fdsock.h). All functions [L]. */
#ifndef SERVER_FDSOCK_H
#define SERVER_FDSOCK_H

#include <stdint.h>

#include "server/core/err.h"

struct srv_loop;
struct srv_owner;
struct srv_fdsock;

/* A client offers a descriptor for a session. Takes fd when it returns DSA_OK; otherwise fdsock closes it. */
typedef dsa_status (*srv_fdsock_offer)(void *arg, const uint8_t *token, uint64_t ticket, int fd,
                                       struct srv_err *err);

struct srv_fdsock_config {
    const char *path;
    unsigned mode;
    uint32_t max_connections;
    srv_fdsock_offer offer;
    void *arg;
    const struct srv_owner *owner; /* as srv_listener_config's */
};

/* Errors as srv_listener_open. */
SRV_MUST_CHECK dsa_status srv_fdsock_open(struct srv_loop *loop, const struct srv_fdsock_config *config,
                                          struct srv_fdsock **fdsock_p, struct srv_err *err);
void srv_fdsock_close(struct srv_fdsock *fdsock); /* memory goes with the loop's next rounds; NULL is fine */

#endif /* SERVER_FDSOCK_H */
