/* svc_session.c - OpenSession: the lease and its heartbeats; and the descriptors offered for a session. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "server/clock.h"
#include "server/log.h"
#include "server/status.h"
#include "server/svc.h"

#define MIN_LEASE_US 100000 /* leases are looked at a few times a second */
#define MAX_TICKETS  64     /* descriptors of one session that wait for their RegisterRegion */

void svc_session_open(struct rpc_call *call)
{
    (void)call; /* the first message says what is wanted */
}

static dsa_status make_lease(struct svc *svc, const Dsa__V1__SessionOpen *open, struct rpc_call *call,
                             struct svc_lease **lease_p, struct srv_err *err)
{
    struct svc_lease *lease = calloc(1, sizeof(*lease));
    uint8_t token[SRV_TOKEN_BYTES];
    char name[65];
    dsa_status rc;

    if (!lease)
        return srv_fail(err, DSA_E_NO_MEMORY, "open", "%s", "", "no memory for a session");
    if (getrandom(token, sizeof(token), 0) != (ssize_t)sizeof(token)) {
        free(lease);
        return srv_fail(err, DSA_E_INTERNAL, "open", "%s", "", "no random bytes for a token");
    }
    rc = srv_session_open(svc->sessions, token, wire_text(name, sizeof(name), open->client_name),
                          open->lease_us, open->grace_us, srv_now_us(), &lease->session, err);
    if (rc != DSA_OK) {
        free(lease);
        return rc;
    }
    lease->svc = svc;
    lease->number = lease->session->number;
    lease->call = call;
    lease->session->stream = lease;
    lease->next = svc->leases;
    if (lease->next)
        lease->next->prev = lease;
    svc->leases = lease;
    *lease_p = lease;
    return DSA_OK;
}

static dsa_status reattach(struct svc *svc, const Dsa__V1__SessionOpen *open, struct rpc_call *call,
                           struct svc_lease **lease_p, struct srv_err *err)
{
    struct srv_session *session;
    dsa_status rc = srv_session_reattach(svc->sessions, open->reattach_token.data, open->reattach_token.len,
                                         srv_now_us(), &session, err);

    if (rc != DSA_OK) {
        if (err)
            strcpy(err->field, "reattach_token");
        return rc;
    }
    *lease_p = session->stream;
    (*lease_p)->call = call;
    return DSA_OK;
}

static bool send_opened(struct svc_lease *lease, bool reattached)
{
    Dsa__V1__SessionEvent event = DSA__V1__SESSION_EVENT__INIT;
    Dsa__V1__SessionOpened opened = DSA__V1__SESSION_OPENED__INIT;

    opened.token.data = lease->session->token;
    opened.token.len = SRV_TOKEN_BYTES;
    opened.lease_us = lease->session->lease_us;
    opened.grace_us = lease->session->grace_us;
    opened.fd_socket = (char *)(uintptr_t)lease->svc->fd_socket;
    opened.reattached = reattached;
    event.kind_case = DSA__V1__SESSION_EVENT__KIND_OPENED;
    event.opened = &opened;
    return wire_send(lease->call, &event.base);
}

static dsa_status begin_session(struct rpc_call *call, const Dsa__V1__SessionOpen *open, struct srv_err *err)
{
    struct svc *svc = rpc_call_service(call);
    bool is_reattach = open->reattach_token.len > 0;
    struct svc_lease *lease = NULL;
    char text[65];
    dsa_status rc;

    if (strlen(open->client_name) > 64)
        return srv_fail(err, DSA_E_BAD_REQUEST, "open.client_name", "%s",
                        wire_text(text, 24, open->client_name), "at most 64 bytes");
    if (open->lease_us > 0 && open->lease_us < MIN_LEASE_US)
        return srv_fail(err, DSA_E_BAD_RANGE, "open.lease_us", "%" PRIu64, open->lease_us, "at least %d",
                        MIN_LEASE_US);
    if (svc->is_draining)
        return srv_fail(err, DSA_E_DRAINING, "open", "%s", "", "the server is going down");
    rc = is_reattach ? reattach(svc, open, call, &lease, err) : make_lease(svc, open, call, &lease, err);
    if (rc != DSA_OK)
        srv_err_prefix(err, "open.");
    if (rc != DSA_OK)
        return rc;
    rpc_call_set_data(call, lease);
    srv_log(SRV_LOG_INFO,
            "session %s session=%" PRIu64 " client=\"%s\" lease_us=%" PRIu64 " grace_us=%" PRIu64
            " call_id=%" PRIu64 " trace_id=%s",
            is_reattach ? "reattached" : "opened", lease->number, lease->session->name,
            lease->session->lease_us, lease->session->grace_us, rpc_call_number(call),
            srv_trace_id(rpc_call_trace(call)));
    if (send_opened(lease, is_reattach))
        return DSA_OK;
    srv_fail(err, DSA_E_NO_MEMORY, "open", "%s", "", "no memory for the answer");
    svc_lease_close(lease, err);
    return DSA_OK; /* the close has answered */
}

static void heartbeat(struct svc_lease *lease, const Dsa__V1__SessionHeartbeat *beat)
{
    Dsa__V1__SessionEvent event = DSA__V1__SESSION_EVENT__INIT;
    Dsa__V1__SessionHeartbeat echo = DSA__V1__SESSION_HEARTBEAT__INIT;

    srv_session_heartbeat(lease->svc->sessions, lease->session, srv_now_us());
    /* A client that beats but does not read would pile up echoes. */
    if (rpc_queued_bytes(lease->call) > 4096)
        return;
    echo.seq = beat->seq;
    event.kind_case = DSA__V1__SESSION_EVENT__KIND_HEARTBEAT;
    event.heartbeat = &echo;
    if (!wire_send(lease->call, &event.base))
        srv_log(SRV_LOG_WARN, "cannot echo a heartbeat session=%" PRIu64, lease->number);
}

void svc_session_message(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    struct svc_lease *lease = rpc_call_data(call);
    struct wire_arena *arena = NULL;
    ProtobufCMessage *message;
    const Dsa__V1__SessionRequest *request;
    struct srv_err err = {0};
    dsa_status rc = wire_unpack(&dsa__v1__session_request__descriptor, bytes, n, &arena, &message, &err);

    if (rc == DSA_OK) {
        request = (const Dsa__V1__SessionRequest *)message;
        if (request->kind_case == DSA__V1__SESSION_REQUEST__KIND_OPEN && !lease)
            rc = begin_session(call, request->open, &err);
        else if (request->kind_case == DSA__V1__SESSION_REQUEST__KIND_HEARTBEAT && lease)
            heartbeat(lease, request->heartbeat);
        else
            rc = srv_fail(
                &err, lease ? DSA_E_BAD_REQUEST : DSA_E_PRECONDITION, "kind", "%d", (int)request->kind_case,
                lease ? "after `open` only heartbeats are sent" : "the first message must be `open`");
    }
    if (rc != DSA_OK && !lease)
        svc_refuse(call, &err);
    else if (rc != DSA_OK)
        svc_lease_close(lease, &err);
    wire_arena_free(arena);
    rpc_read_next(call);
}

void svc_session_half_close(struct rpc_call *call)
{
    struct svc_lease *lease = rpc_call_data(call);
    struct srv_err err = {0};

    if (lease) {
        svc_lease_close(lease, NULL);
        return;
    }
    srv_fail(&err, DSA_E_PRECONDITION, "kind", "%s", "absent", "the stream ended without `open`");
    svc_refuse(call, &err);
}

void svc_session_closed(struct rpc_call *call, bool is_cancelled)
{
    struct svc_lease *lease = rpc_call_data(call);
    struct srv_err reason = {0};

    (void)is_cancelled;
    if (!lease)
        return;
    rpc_call_set_data(call, NULL);
    lease->call = NULL;
    if (lease->is_closing)
        return;
    if (srv_session_lost(lease->svc->sessions, lease->session, srv_now_us())) {
        srv_log(SRV_LOG_INFO, "session lost its stream and waits session=%" PRIu64 " grace_us=%" PRIu64,
                lease->number, lease->session->grace_us);
        return;
    }
    srv_fail(&reason, DSA_E_SESSION_EXPIRED, "", "%s", "", "the client is gone");
    svc_lease_close(lease, &reason);
}

/* ---- descriptors ---------------------------------------------------------------------------------- */

dsa_status svc_session_offer(void *arg, const uint8_t *token, uint64_t number, int fd, struct srv_err *err)
{
    struct svc *svc = arg;
    ProtobufCBinaryData bytes = {SRV_TOKEN_BYTES, (uint8_t *)(uintptr_t)token};
    struct svc_lease *lease;
    struct svc_ticket *ticket;
    dsa_status rc = svc_lease_find(svc, &bytes, &lease, err);

    if (rc != DSA_OK)
        return rc;
    if (lease->n_tickets >= MAX_TICKETS)
        return srv_fail(err, DSA_E_LIMIT, "fd", "%" PRIu32, lease->n_tickets,
                        "too many descriptors wait unclaimed");
    for (ticket = lease->tickets; ticket; ticket = ticket->next)
        if (ticket->number == number)
            return srv_fail(err, DSA_E_EXISTS, "ticket", "%" PRIu64, number, "this ticket waits already");
    ticket = calloc(1, sizeof(*ticket));
    if (!ticket)
        return srv_fail(err, DSA_E_NO_MEMORY, "fd", "%s", "", "no memory");
    ticket->number = number;
    ticket->fd = fd;
    ticket->next = lease->tickets;
    lease->tickets = ticket;
    lease->n_tickets++;
    return DSA_OK;
}
