/* address.h - "host:port" settings. Any thread. */
#ifndef SERVER_ADDRESS_H
#define SERVER_ADDRESS_H

#include <stdbool.h>
#include <sys/socket.h>

#include "server/core/err.h"

/* Host: a number, a name that resolves, or [v6]. DSA_E_BAD_REQUEST with field = flag and value = text. */
SRV_MUST_CHECK dsa_status srv_address_parse(const char *flag, const char *text,
                                            struct sockaddr_storage *address_p, socklen_t *n_p,
                                            struct srv_err *err);
int srv_address_port(const struct sockaddr_storage *address);
bool srv_address_is_loopback(const struct sockaddr_storage *address);

#endif /* SERVER_ADDRESS_H */
