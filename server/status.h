/* status.h - the one place where status codes are translated: dsk -> dsa -> gRPC. Pure; any thread. */
#ifndef SERVER_STATUS_H
#define SERVER_STATUS_H

#include "kernels/dsk.h"
#include "server/core/err.h"

const char *srv_status_reason(dsa_status status); /* the stable word on the wire; "" for DSA_OK */
const char *srv_status_text(dsa_status status);
int srv_status_grpc_code(dsa_status status); /* google.rpc.Code */
int srv_status_scope(dsa_status status);     /* dsa.v1.Scope */
dsa_status srv_status_from_dsk(dsk_status status);

/* Fills err (NULL is fine) from what the kernels said and returns the translated code. `prefix` is put before
 * the field name; "" for none. */
dsa_status srv_fail_dsk(struct srv_err *err, const struct dsk_err *cause, const char *prefix);

#endif /* SERVER_STATUS_H */
