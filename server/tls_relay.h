/* tls_relay.h - TLS ends here: a thread T shakes hands with clients and carries bytes between their sockets and gRPC.
 *
 *   client ══ TLS ══ T ── socket pair ── gRPC on L
 *
 * T has a loop of its own; accepted sockets go from L to T, and one end of a socket pair comes back for each client whose
 * handshake was good. A connection holds two buffers of 16 KiB, one a direction, filled again only when it is empty: a peer that does
 * not read stops gRPC's writes, and nothing piles up here. Ends are carried over each way. T also looks at the certificate's files
 * from time to time. */
#ifndef SERVER_TLS_RELAY_H
#define SERVER_TLS_RELAY_H

#include <stdint.h>

#include "server/core/err.h"

struct srv_loop;
struct srv_tls;
struct srv_tls_relay;

struct srv_tls_relay_config {
    struct srv_tls *tls;           /* outlives the relay */
    uint64_t handshake_timeout_us; /* from accept to the end of the handshake */
    uint64_t reload_us;            /* between two looks at the files; 0 = never */
    void (*ready)(void *arg,
                  int fd); /* [L] plain bytes of a client whose handshake was good; takes the socket */
    void *arg;
};

/* [L] Starts T. DSA_E_NO_MEMORY, DSA_E_SYSTEM. */
SRV_MUST_CHECK dsa_status srv_tls_relay_start(struct srv_loop *loop,
                                              const struct srv_tls_relay_config *config,
                                              struct srv_tls_relay **relay_p, struct srv_err *err);

/* [L] An accepted, non-blocking TCP socket; takes it. */
void srv_tls_relay_accept(struct srv_tls_relay *relay, int fd);

/* [L] No further call of `ready`: what shakes hands later is closed. Connections go on. */
void srv_tls_relay_drain(struct srv_tls_relay *relay);

/* [L] When gRPC has closed its ends: what it wrote last is carried to the clients, for half a second at most; then everything is
 * closed and T joined. Memory goes with the loop's next rounds. NULL is fine. */
void srv_tls_relay_stop(struct srv_tls_relay *relay);

/* Since the start, but for n_open. [any] */
struct srv_tls_counts {
    uint64_t n_accepted;
    uint64_t n_handshakes; /* good ones */
    uint64_t n_refused;    /* no TLS, wrong version, no h2, no or wrong client certificate, and their kind */
    uint64_t n_timeouts;   /* handshakes that took too long */
    uint64_t n_gone;       /* clients that left before they were through */
    uint64_t n_open;       /* connections now */
};
struct srv_tls_counts srv_tls_relay_counts(const struct srv_tls_relay *relay);

#endif /* SERVER_TLS_RELAY_H */
