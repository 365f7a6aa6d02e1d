/* listener.h - the sockets that clients connect to. All functions [L].
 *
 * dsad accepts itself and hands the connected sockets to gRPC: a listener of gRPC's never accepts again after it
 * ran out of descriptors once, takes over a live server's socket, and knows neither the peer nor a limit.
 * A lock file beside the unix socket (path + ".lock") keeps a second server out; a socket file that no server holds
 * is replaced; anything else at that path is refused. */
#ifndef SERVER_LISTENER_H
#define SERVER_LISTENER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "server/core/err.h"

struct srv_loop;
struct srv_listener;

/* Called with an accepted, non-blocking, close-on-exec socket, which it takes. */
typedef void (*srv_listener_accept)(void *arg, int fd);

struct srv_owner {
    uid_t uid; /* -1: as it is */
    gid_t gid;
};

struct srv_listener_config {
    const char *flag;              /* the setting it comes from, for errors */
    const char *unix_path;         /* NULL or a path; one of the two is given */
    const char *tcp;               /* "host:port"; numeric host or "localhost" */
    int socket_type;               /* SOCK_STREAM or SOCK_SEQPACKET (unix only) */
    unsigned mode;                 /* permission bits of the unix socket */
    const struct srv_owner *owner; /* of the unix socket; NULL = as it is made */
    bool is_encrypted;             /* TCP: accept speaks TLS, so it may leave loopback */
    bool is_public; /* meant to be reached from elsewhere: no warning when TCP leaves loopback */
    uint32_t max_connections;
    srv_listener_accept accept;
    void *arg;
};

/* DSA_E_PRECONDITION: another server holds the path. DSA_E_BAD_REQUEST: the address is malformed, or something that is no
 * socket lies at the path. DSA_E_SYSTEM: a system call failed; the text names it. */
SRV_MUST_CHECK dsa_status srv_listener_open(struct srv_loop *loop, const struct srv_listener_config *config,
                                            struct srv_listener **listener_p, struct srv_err *err);
/* Stops accepting and removes the socket file. Memory goes with the loop's next rounds. NULL is fine. */
void srv_listener_close(struct srv_listener *listener);

/* Connections that are open now; a system call for each. NULL is fine. */
uint32_t srv_listener_count(struct srv_listener *listener);
int srv_listener_port(const struct srv_listener *listener); /* TCP: the bound port; unix: 0 */

#endif /* SERVER_LISTENER_H */
