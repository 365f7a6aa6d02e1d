#include "server/core/session.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/core/heap.h"
#include "server/core/idmap.h"
#include "server/core/list.h"
#include "server/core/secret.h"

#define MAX_SESSIONS (1u << 20)

_Static_assert(SRV_TOKEN_BYTES == SRV_SECRET_BYTES, "tokens are compared as secrets");

struct entry {
    struct srv_session session;
    struct srv_list in_all;
    struct srv_idmap_node by_token;
    struct srv_idmap_node by_number;
    struct srv_heap_node expiry; /* major = session.expires_us */
};

struct srv_sessions {
    struct srv_session_config config;
    struct srv_list all;
    struct srv_idmap by_token;
    struct srv_idmap by_number;
    struct srv_heap expiries;
    uint32_t n_sessions;
    uint64_t last_number;
};

static struct entry *entry_of(struct srv_session *session)
{
    return SRV_CONTAINER_OF(session, struct entry, session);
}

static bool is_sound(const struct srv_session_config *config)
{
    return config->max_sessions > 0 && config->max_sessions <= MAX_SESSIONS && config->default_lease_us > 0
           && config->default_lease_us <= config->max_lease_us;
}

dsa_status srv_sessions_set_limits(struct srv_sessions *sessions, const struct srv_session_config *config)
{
    if (!is_sound(config))
        return DSA_E_BAD_REQUEST;
    sessions->config = *config;
    return DSA_OK;
}

dsa_status srv_sessions_create(const struct srv_session_config *config, struct srv_sessions **sessions_p)
{
    struct srv_sessions *sessions;

    if (!is_sound(config))
        return DSA_E_BAD_REQUEST;
    sessions = calloc(1, sizeof(*sessions));
    if (!sessions)
        return DSA_E_NO_MEMORY;
    sessions->config = *config;
    srv_list_init(&sessions->all);
    srv_idmap_init(&sessions->by_token);
    srv_idmap_init(&sessions->by_number);
    *sessions_p = sessions;
    return DSA_OK;
}

void srv_sessions_destroy(struct srv_sessions *sessions)
{
    if (!sessions)
        return;
    while (!srv_list_is_empty(&sessions->all))
        srv_session_close(sessions, &SRV_CONTAINER_OF(sessions->all.next, struct entry, in_all)->session);
    srv_idmap_fini(&sessions->by_number);
    srv_idmap_fini(&sessions->by_token);
    free(sessions);
}

/* A time so far away that it wraps is never. */
static uint64_t add_us(uint64_t now_us, uint64_t span_us)
{
    return span_us > UINT64_MAX - now_us ? UINT64_MAX : now_us + span_us;
}

static void set_expiry(struct srv_sessions *sessions, struct srv_session *session, uint64_t expires_us)
{
    struct entry *entry = entry_of(session);

    if (session->expires_us == expires_us)
        return;
    srv_heap_remove(&sessions->expiries, &entry->expiry);
    session->expires_us = expires_us;
    srv_heap_add(&sessions->expiries, &entry->expiry, expires_us, session->number);
}

/* Looks at every session in the bucket, the right one or not, so that the time tells nothing of which it
 * was. */
static struct srv_session *find_token(const struct srv_sessions *sessions, const uint8_t *token)
{
    struct srv_idmap_node *node = srv_idmap_first(&sessions->by_token, srv_secret_key(token));
    struct srv_session *found = NULL;

    for (; node; node = srv_idmap_next(node)) {
        struct entry *entry = SRV_CONTAINER_OF(node, struct entry, by_token);

        if (srv_secret_is_equal(entry->session.token, token))
            found = &entry->session;
    }
    return found;
}

static dsa_status check_open(const struct srv_sessions *sessions, const uint8_t *token, uint64_t lease_us,
                             uint64_t grace_us, struct srv_err *err)
{
    const struct srv_session_config *config = &sessions->config;

    if (lease_us > config->max_lease_us)
        return srv_fail(err, DSA_E_BAD_RANGE, "lease_us", "%" PRIu64, lease_us,
                        "the longest lease (max_lease) is %" PRIu64 " us", config->max_lease_us);
    if (grace_us > config->max_grace_us)
        return srv_fail(err, DSA_E_BAD_RANGE, "grace_us", "%" PRIu64, grace_us,
                        "the longest grace (max_grace) is %" PRIu64 " us", config->max_grace_us);
    if (sessions->n_sessions >= config->max_sessions)
        return srv_fail(err, DSA_E_LIMIT, "max_sessions", "%" PRIu32, config->max_sessions,
                        "the server holds as many sessions as it may");
    if (find_token(sessions, token))
        return srv_fail(err, DSA_E_EXISTS, "token", "%s", "", "the token is in use; was it random?");
    return DSA_OK;
}

dsa_status srv_session_open(struct srv_sessions *sessions, const uint8_t *token, const char *name,
                            uint64_t lease_us, uint64_t grace_us, uint64_t now_us,
                            struct srv_session **session_p, struct srv_err *err)
{
    struct srv_session *session;
    struct entry *entry;
    dsa_status status = check_open(sessions, token, lease_us, grace_us, err);

    if (status != DSA_OK)
        return status;
    entry = calloc(1, sizeof(*entry));
    if (!entry)
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for another session");
    session = &entry->session;
    session->number = ++sessions->last_number;
    memcpy(session->token, token, SRV_TOKEN_BYTES);
    snprintf(session->name, sizeof(session->name), "%s", name ? name : "");
    session->lease_us = lease_us ? lease_us : sessions->config.default_lease_us;
    session->grace_us = grace_us;
    session->expires_us = add_us(now_us, session->lease_us);

    srv_list_add_tail(&sessions->all, &entry->in_all);
    srv_idmap_add(&sessions->by_token, &entry->by_token, srv_secret_key(token));
    srv_idmap_add(&sessions->by_number, &entry->by_number, session->number);
    srv_heap_add(&sessions->expiries, &entry->expiry, session->expires_us, session->number);
    sessions->n_sessions++;
    *session_p = session;
    return DSA_OK;
}

dsa_status srv_session_find(struct srv_sessions *sessions, const uint8_t *token, size_t n_token,
                            struct srv_session **session_p, struct srv_err *err)
{
    struct srv_session *session = n_token == SRV_TOKEN_BYTES ? find_token(sessions, token) : NULL;

    /* The token itself is a secret and stays out of the message. */
    if (!session)
        return srv_fail(err, DSA_E_NO_SESSION, "session", "%zu bytes", n_token, "no session has this token");
    *session_p = session;
    return DSA_OK;
}

struct srv_session *srv_session_by_number(struct srv_sessions *sessions, uint64_t number)
{
    struct srv_idmap_node *node = srv_idmap_first(&sessions->by_number, number);

    return node ? &SRV_CONTAINER_OF(node, struct entry, by_number)->session : NULL;
}

void srv_session_heartbeat(struct srv_sessions *sessions, struct srv_session *session, uint64_t now_us)
{
    /* Heartbeats come on the stream; one that was still under way when the stream broke does not end the
     * grace. */
    if (!session->in_grace)
        set_expiry(sessions, session, add_us(now_us, session->lease_us));
}

bool srv_session_lost(struct srv_sessions *sessions, struct srv_session *session, uint64_t now_us)
{
    if (session->grace_us == 0)
        return false;
    if (!session->in_grace) {
        session->in_grace = true;
        set_expiry(sessions, session, add_us(now_us, session->grace_us));
    }
    return true;
}

dsa_status srv_session_reattach(struct srv_sessions *sessions, const uint8_t *token, size_t n_token,
                                uint64_t now_us, struct srv_session **session_p, struct srv_err *err)
{
    struct srv_session *session;
    dsa_status status = srv_session_find(sessions, token, n_token, &session, err);

    if (status != DSA_OK)
        return status;
    if (!session->in_grace)
        return srv_fail(err, DSA_E_PRECONDITION, "session", "%s", "", "the session's stream is still open");
    /* Over, though nobody has swept yet: the answer must not depend on when the sweep runs. */
    if (session->expires_us <= now_us)
        return srv_fail(err, DSA_E_NO_SESSION, "session", "%zu bytes", n_token, "no session has this token");
    session->in_grace = false;
    set_expiry(sessions, session, add_us(now_us, session->lease_us));
    *session_p = session;
    return DSA_OK;
}

void srv_session_close(struct srv_sessions *sessions, struct srv_session *session)
{
    struct entry *entry = entry_of(session);

    srv_heap_remove(&sessions->expiries, &entry->expiry);
    srv_idmap_remove(&sessions->by_number, &entry->by_number);
    srv_idmap_remove(&sessions->by_token, &entry->by_token);
    srv_list_remove(&entry->in_all);
    sessions->n_sessions--;
    free(entry);
}

struct srv_session *srv_session_next_expired(struct srv_sessions *sessions, uint64_t now_us)
{
    struct srv_heap_node *first = sessions->expiries.root;

    return first && first->major <= now_us ? &SRV_CONTAINER_OF(first, struct entry, expiry)->session : NULL;
}

uint64_t srv_sessions_next_expiry(const struct srv_sessions *sessions)
{
    return sessions->expiries.root ? sessions->expiries.root->major : UINT64_MAX;
}

uint32_t srv_sessions_count(const struct srv_sessions *sessions)
{
    return sessions->n_sessions;
}

void srv_sessions_each(struct srv_sessions *sessions, void (*fn)(struct srv_session *, void *), void *arg)
{
    for (struct srv_list *node = sessions->all.next; node != &sessions->all; node = node->next)
        fn(&SRV_CONTAINER_OF(node, struct entry, in_all)->session, arg);
}
