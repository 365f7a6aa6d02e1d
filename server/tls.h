/* tls.h - what dsad shows of itself to TLS clients, and what it wants of them: a certificate with its key, and the authorities
 * whose client certificates it takes. The files can be replaced while it serves: connections that are made afterwards use the
 * new ones, the others go on. All functions [any]: one lock guards what changes.
 *
 * TLS 1.2 and 1.3, forward secret suites with AEAD only, ALPN "h2" required. No tickets and no sessions: a resumed session would
 * skip the check of its client's certificate. */
#ifndef SERVER_TLS_H
#define SERVER_TLS_H

#include <stdbool.h>
#include <stdint.h>

#include "server/core/err.h"

struct srv_tls;
struct ssl_ctx_st;

struct srv_tls_files {
    const char *cert;      /* PEM: the certificate, then what leads to its authority */
    const char *key;       /* PEM, without a password */
    const char *client_ca; /* PEM: who signs client certificates; NULL or "" = clients need none */
};

/* Reads the files; the paths are copied. DSA_E_BAD_REQUEST with field = the setting (tls-cert, tls-key, tls-client-ca) and
 * value = the path: it cannot be read, is no PEM, does not belong to the other, has expired. DSA_E_NO_MEMORY. */
SRV_MUST_CHECK dsa_status srv_tls_create(const struct srv_tls_files *files, struct srv_tls **tls_p,
                                         struct srv_err *err);
void srv_tls_destroy(struct srv_tls *tls); /* NULL is fine; contexts that were taken live on */

/* Reads the files again. Errors as srv_tls_create; what was in use stays so then, and the failure is counted. */
SRV_MUST_CHECK dsa_status srv_tls_reload(struct srv_tls *tls, struct srv_err *err);
/* The same if a file's contents differ from those in use; *is_new_p tells. Costs three reads when nothing has changed. */
SRV_MUST_CHECK dsa_status srv_tls_reload_if_changed(struct srv_tls *tls, bool *is_new_p, struct srv_err *err);

/* For one handshake: a reference, given back by SSL_CTX_free (an SSL made from it holds its own). */
struct ssl_ctx_st *srv_tls_take_context(struct srv_tls *tls);

int64_t srv_tls_expiry_s(struct srv_tls *tls); /* of the certificate in use, in seconds since 1970 */
uint64_t srv_tls_reloads(struct srv_tls *tls); /* that changed what is in use */
uint64_t srv_tls_reload_failures(struct srv_tls *tls);

#endif /* SERVER_TLS_H */
