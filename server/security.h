/* security.h - what stands between the network and the service, put together from the settings: the certificate (tls), the thread
 * that speaks TLS (tls_relay), the door (access), the sockets' owner. All functions [L]. */
#ifndef SERVER_SECURITY_H
#define SERVER_SECURITY_H

#include <stdbool.h>

#include "server/core/err.h"
#include "server/listener.h"

struct rpc;
struct rpc_call;
struct srv_access;
struct srv_config;
struct srv_loop;
struct srv_tls;
struct srv_tls_relay;

struct srv_security {
    struct rpc *rpc;             /* from srv_security_start on */
    struct srv_access *access;   /* never NULL */
    struct srv_tls *tls;         /* NULL: TCP is plain text */
    struct srv_tls_relay *relay; /* NULL: as above, or not started */
    struct srv_owner owner;      /* of the unix sockets */
};

/* Reads and checks all files that the settings name; opens no socket and starts no thread. DSA_E_BAD_REQUEST with the setting's
 * name: one that needs another, a file that will not do, an unknown user. DSA_E_NO_MEMORY. On failure security is as after fini. */
SRV_MUST_CHECK dsa_status srv_security_init(struct srv_security *security, const struct srv_config *config,
                                            struct srv_err *err);
/* Starts TLS if there is a certificate. Errors as srv_tls_relay_start. */
SRV_MUST_CHECK dsa_status srv_security_start(struct srv_security *security, const struct srv_config *config,
                                             struct srv_loop *loop, struct rpc *rpc, struct srv_err *err);

/* A connection that came in over TCP goes to gRPC, through TLS where that is on. security is a struct srv_security: for
 * srv_listener_config.accept. Takes the socket. */
void srv_security_accept(void *security, int fd);

/* As srv_access_admit. */
dsa_status srv_security_admit(struct srv_security *security, struct rpc_call *call);

/* Reads certificate, key, authorities and tokens again, and logs what came of it. What will not do stays as it was. Returns how
 * many of the two, certificate and tokens, could not be reloaded; err (may be NULL) tells of the first. */
unsigned srv_security_reload(struct srv_security *security, struct srv_err *err);

void srv_security_drain(struct srv_security *security); /* connections go on, none is added */
/* After gRPC has ended its connections and before the loop is destroyed; takes up to half a second. */
void srv_security_stop(struct srv_security *security);
void srv_security_fini(struct srv_security *security);

#endif /* SERVER_SECURITY_H */
