/* access.h - the door: which calls are taken, by where they come from, what they ask for and the token that they carry.
 *
 *                    data plane              admin (Drain)                    health, reflection
 *   unix socket      taken                   taken                            taken
 *   TCP, TLS         token, if there is one  as data plane if admin is any    taken
 *   health port      refused                 refused                          health alone
 *
 * The unix socket needs no token: its file mode and owner say who may. All functions [L]. */
#ifndef SERVER_ACCESS_H
#define SERVER_ACCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/core/err.h"
#include "server/rpc.h"

struct srv_access;

enum srv_access_reason {
    SRV_ACCESS_OK,
    SRV_ACCESS_NO_TOKEN,
    SRV_ACCESS_BAD_TOKEN,
    SRV_ACCESS_ADMIN,       /* an admin method where none is taken */
    SRV_ACCESS_HEALTH_PORT, /* something else than health on the port for probes */
    SRV_ACCESS_N_REASONS
};
const char *srv_access_reason_name(enum srv_access_reason reason); /* "no_token"...; [any] */

struct srv_access_config {
    const char *token_file; /* one token a line; NULL or "": no token is wanted */
    bool admin_anywhere;    /* admin methods over TCP, too */
};

/* Reads the token file; its path is copied. DSA_E_BAD_REQUEST with field auth-token-file: cannot be read, others may read it, no
 * token in it, a token that is too short or has characters that no token has (the line is named). DSA_E_NO_MEMORY. */
SRV_MUST_CHECK dsa_status srv_access_create(const struct srv_access_config *config,
                                            struct srv_access **access_p, struct srv_err *err);
void srv_access_destroy(struct srv_access *access); /* NULL is fine */

/* Reads the token file again. Errors as above; the tokens in use stay then. */
SRV_MUST_CHECK dsa_status srv_access_reload(struct srv_access *access, struct srv_err *err);

/* authorization: the header's value, n bytes; NULL = there is none. Counts nothing. */
enum srv_access_reason srv_access_decide(const struct srv_access *access, enum rpc_origin origin,
                                         const char *path, const char *authorization, size_t n);

/* DSA_OK: go on. Otherwise the call has been answered with this status, DSA_E_UNAUTHENTICATED or DSA_E_ACCESS, and
 * counted. */
dsa_status srv_access_admit(struct srv_access *access, struct rpc_call *call);

uint64_t srv_access_refusals(const struct srv_access *access,
                             enum srv_access_reason reason); /* since start */

#endif /* SERVER_ACCESS_H */
