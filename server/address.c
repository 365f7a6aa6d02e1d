#include "server/address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

dsa_status srv_address_parse(const char *flag, const char *text, struct sockaddr_storage *address_p,
                             socklen_t *n_p, struct srv_err *err)
{
    const char *colon = strrchr(text, ':');
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *info;
    char host[64], *end;
    unsigned long port;
    size_t n;

    if (!colon || colon == text || colon[1] == '\0' || (n = (size_t)(colon - text)) >= sizeof(host))
        return srv_fail(err, DSA_E_BAD_REQUEST, flag, "%s", text, "write host:port");
    port = strtoul(colon + 1, &end, 10);
    if (colon[1] < '0' || colon[1] > '9' || *end != '\0' || port > 65535)
        return srv_fail(err, DSA_E_BAD_REQUEST, flag, "%s", text, "a port is 0 to 65535");
    memcpy(host, text, n);
    host[n] = '\0';
    if (host[0] == '[' && host[n - 1] == ']') { /* [::1]:port */
        memmove(host, host + 1, n - 2);
        host[n - 2] = '\0';
    }
    if (getaddrinfo(host, colon + 1, &hints, &info) != 0)
        return srv_fail(err, DSA_E_BAD_REQUEST, flag, "%s", text, "no such address");
    memset(address_p, 0, sizeof(*address_p));
    memcpy(address_p, info->ai_addr, info->ai_addrlen);
    *n_p = info->ai_addrlen;
    freeaddrinfo(info);
    return DSA_OK;
}

int srv_address_port(const struct sockaddr_storage *address)
{
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;

    if (address->ss_family == AF_INET) {
        memcpy(&v4, address, sizeof(v4));
        return ntohs(v4.sin_port);
    }
    memcpy(&v6, address, sizeof(v6));
    return ntohs(v6.sin6_port);
}

bool srv_address_is_loopback(const struct sockaddr_storage *address)
{
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;

    if (address->ss_family == AF_INET) {
        memcpy(&v4, address, sizeof(v4));
        return (ntohl(v4.sin_addr.s_addr) >> 24) == 127;
    }
    memcpy(&v6, address, sizeof(v6));
    return address->ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
}
