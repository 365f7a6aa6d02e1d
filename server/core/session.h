/* session.h - leases: who is connected, until when, and who may come back. All functions [L]. Pure: time and
 * random bytes come in as arguments.
 *
 *   OPEN ──stream lost──► GRACE ──reattach──► OPEN        OPEN ──half-close / lease over──► gone
 *                           └──grace over──► gone */
#ifndef SERVER_CORE_SESSION_H
#define SERVER_CORE_SESSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/core/err.h"

#define SRV_TOKEN_BYTES 16

struct srv_sessions;

struct srv_session_config {
    uint32_t max_sessions;
    uint64_t default_lease_us;
    uint64_t max_lease_us;
    uint64_t max_grace_us;
};

struct srv_session {
    uint64_t number; /* never 0, never reused; what the worker knows the session by */
    uint8_t token[SRV_TOKEN_BYTES];
    char name[65]; /* client_name, for logs */
    uint64_t lease_us;
    uint64_t grace_us;
    uint64_t expires_us; /* lease or grace, whichever runs */
    bool in_grace;
    void *stream;         /* L's OpenSession call while OPEN; not touched here */
    uint32_t n_sequences; /* L's counters, kept here so that limits hold at the door */
    uint32_t n_regions;
};

/* DSA_E_NO_MEMORY; DSA_E_BAD_REQUEST for no sessions, more than 2^20, or a default lease of 0 or above the
 * longest. */
SRV_MUST_CHECK dsa_status srv_sessions_create(const struct srv_session_config *config,
                                              struct srv_sessions **sessions_p);
/* Other limits from now on; what is open stays as it is. DSA_E_BAD_REQUEST as above, nothing changes then. */
SRV_MUST_CHECK dsa_status srv_sessions_set_limits(struct srv_sessions *sessions,
                                                  const struct srv_session_config *config);
void srv_sessions_destroy(struct srv_sessions *sessions); /* closes all; NULL is fine */

/* A new session. token: fresh random bytes (the caller's duty). lease 0 = default; a lease or grace larger
 * than the limit is refused naming the limit (DSA_E_BAD_RANGE); DSA_E_LIMIT; DSA_E_EXISTS (token in use);
 * DSA_E_NO_MEMORY. name is copied, cut at 64 bytes, and may be NULL. The session stays owned by the table. */
SRV_MUST_CHECK dsa_status srv_session_open(struct srv_sessions *sessions, const uint8_t *token,
                                           const char *name, uint64_t lease_us, uint64_t grace_us,
                                           uint64_t now_us, struct srv_session **session_p,
                                           struct srv_err *err);

/* By token, in time that does not depend on how much of it matches. n_token must be SRV_TOKEN_BYTES.
 * DSA_E_NO_SESSION. A session in grace is found too. */
SRV_MUST_CHECK dsa_status srv_session_find(struct srv_sessions *sessions, const uint8_t *token,
                                           size_t n_token, struct srv_session **session_p,
                                           struct srv_err *err);
struct srv_session *srv_session_by_number(struct srv_sessions *sessions, uint64_t number); /* NULL if gone */

/* The lease runs anew from now_us. Without effect in grace: only reattach ends that. */
void srv_session_heartbeat(struct srv_sessions *sessions, struct srv_session *session, uint64_t now_us);

/* The stream broke. True: the session waits in grace (again: the grace that runs goes on); false: no grace
 * was granted, close it now. */
bool srv_session_lost(struct srv_sessions *sessions, struct srv_session *session, uint64_t now_us);

/* DSA_E_NO_SESSION (also when the grace is over and nobody closed it yet); DSA_E_PRECONDITION when the
 * session is not in grace. The lease runs anew from now_us. */
SRV_MUST_CHECK dsa_status srv_session_reattach(struct srv_sessions *sessions, const uint8_t *token,
                                               size_t n_token, uint64_t now_us,
                                               struct srv_session **session_p, struct srv_err *err);

void srv_session_close(struct srv_sessions *sessions, struct srv_session *session); /* frees it */

/* The next session whose lease or grace is over at now_us, or NULL. The caller closes it. */
struct srv_session *srv_session_next_expired(struct srv_sessions *sessions, uint64_t now_us);
/* When to look again; UINT64_MAX if never. */
uint64_t srv_sessions_next_expiry(const struct srv_sessions *sessions);
uint32_t srv_sessions_count(const struct srv_sessions *sessions);
/* Calls fn for each session, in no order; fn must not open or close one. */
void srv_sessions_each(struct srv_sessions *sessions, void (*fn)(struct srv_session *, void *), void *arg);

#endif /* SERVER_CORE_SESSION_H */
