/* session.c - the lease: the OpenSession stream, its heartbeats, and the keeper thread that sends them while
 * the application computes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/lib/internal.h"

#define END_US           UINT64_C(2000000) /* how long dsa_close waits for the server's goodbye */
#define KEEPER_PUMP_US   2000
#define MIN_HEARTBEAT_US 1000

#define SESSION_OF(bidi_p) (&(bidi_p)->client->session)

ProtobufCBinaryData dsa__token(struct dsa_client *client)
{
    ProtobufCBinaryData token = {DSA_TOKEN_BYTES, client->session.info.token};

    return token;
}

/* ---- events ---------------------------------------------------------------------------------- */

static void on_opened(struct session *session, const Dsa__V1__SessionOpened *opened)
{
    if (opened->token.len != DSA_TOKEN_BYTES) {
        dsa__fail(&session->opening, DSA_E_PROTOCOL, NULL, "the server's token has %zu bytes",
                  opened->token.len);
        return;
    }
    memcpy(session->info.token, opened->token.data, DSA_TOKEN_BYTES);
    session->info.lease_us = opened->lease_us;
    session->info.grace_us = opened->grace_us;
    session->info.reattached = opened->reattached;
    session->info.is_alive = true;
    free(session->fd_socket);
    session->fd_socket = strdup(opened->fd_socket); /* NULL reads as "takes none" */
    session->heartbeat_every_us =
        opened->lease_us / 3 > MIN_HEARTBEAT_US ? opened->lease_us / 3 : MIN_HEARTBEAT_US;
    session->heartbeat_due_us = dsa__now_us() + session->heartbeat_every_us;
    session->is_open = true;
}

static void on_event(struct bidi *bidi, const uint8_t *data, size_t n)
{
    struct session *session = SESSION_OF(bidi);
    Dsa__V1__SessionEvent *event = dsa__v1__session_event__unpack(NULL, n, data);

    if (!event)
        return;
    switch (event->kind_case) {
    case DSA__V1__SESSION_EVENT__KIND_OPENED:
        on_opened(session, event->opened);
        break;
    case DSA__V1__SESSION_EVENT__KIND_HEARTBEAT:
        session->info.n_heartbeats++;
        break;
    case DSA__V1__SESSION_EVENT__KIND_CLOSING:
        dsa__error_from_wire(event->closing->status, &session->closing);
        break;
    default: /* a newer server's event */
        break;
    }
    dsa__v1__session_event__free_unpacked(event, NULL);
}

static void on_over(struct bidi *bidi)
{
    struct session *session = SESSION_OF(bidi);
    struct dsa_error end;

    if (dsa__bidi_status(bidi, &end) == DSA_OK)
        dsa__fail(&end, DSA_E_CONNECT, NULL, "the server ended the session");
    if (session->closing.code != DSA_OK)
        end = session->closing;
    session->closing = end;
    if (session->is_open && !session->is_closing)
        session->is_lost_due = true;
    session->is_open = false;
    session->info.is_alive = false;
}

/* ---- open and end ---------------------------------------------------------------------------- */

dsa_status dsa__session_open(struct dsa_client *client, const struct dsa_options *options, uint64_t until_us,
                             struct dsa_error *err)
{
    struct session *session = &client->session;
    Dsa__V1__SessionOpen open = DSA__V1__SESSION_OPEN__INIT;
    Dsa__V1__SessionRequest request = DSA__V1__SESSION_REQUEST__INIT;
    char name[65];
    dsa_status status;

    snprintf(name, sizeof(name), "%s", options->client_name ? options->client_name : "libdsa");
    open.client_name = name;
    open.lease_us = options->lease_us;
    open.grace_us = options->grace_us;
    if (options->reattach_token) {
        memcpy(session->info.token, options->reattach_token, DSA_TOKEN_BYTES);
        open.reattach_token = dsa__token(client);
    }
    request.kind_case = DSA__V1__SESSION_REQUEST__KIND_OPEN;
    request.open = &open;
    status = dsa__bidi_open(&session->bidi, client, DSA__SERVICE "OpenSession", 0, on_event, on_over, err);
    if (status != DSA_OK)
        return status;
    session->is_started = true;
    status = dsa__bidi_send(&session->bidi, &request.base, false, err);
    if (status != DSA_OK)
        return status;
    while (!session->is_open && !session->bidi.is_over && session->opening.code == DSA_OK) {
        if (dsa__now_us() >= until_us)
            return dsa__fail(err, DSA_E_CONNECT, NULL, "the server did not open a session in time");
        dsa__pump(client, until_us);
    }
    if (session->is_open)
        return DSA_OK;
    if (err)
        *err = session->opening.code != DSA_OK ? session->opening : session->closing;
    return session->opening.code != DSA_OK ? session->opening.code : session->closing.code;
}

void dsa__session_end(struct dsa_client *client, bool is_abandoned)
{
    struct session *session = &client->session;
    uint64_t until_us = dsa__now_us() + END_US;

    if (!session->is_started)
        return;
    session->is_closing = true;
    if (!session->bidi.is_over && session->is_open && !is_abandoned) {
        dsa__bidi_half_close(&session->bidi);
        while (!session->bidi.is_over && dsa__now_us() < until_us)
            dsa__pump(client, until_us);
    }
    dsa__bidi_cancel(&session->bidi);
    while (!session->bidi.is_over) /* a cancelled call completes at once, whatever the server does */
        dsa__pump(client, UINT64_MAX);
    dsa__bidi_fini(&session->bidi);
    session->is_started = false;
}

void dsa_session_info(struct dsa_client *client, struct dsa_session_info *info_p)
{
    pthread_mutex_lock(&client->lock);
    *info_p = client->session.info;
    pthread_mutex_unlock(&client->lock);
}

/* ---- heartbeats ------------------------------------------------------------------------------ */

void dsa__heartbeat_if_due(struct dsa_client *client, uint64_t now_us)
{
    struct session *session = &client->session;
    Dsa__V1__SessionHeartbeat beat = DSA__V1__SESSION_HEARTBEAT__INIT;
    Dsa__V1__SessionRequest request = DSA__V1__SESSION_REQUEST__INIT;

    if (!session->is_open || session->is_closing || now_us < session->heartbeat_due_us)
        return;
    session->heartbeat_due_us = now_us + session->heartbeat_every_us;
    beat.seq = ++session->heartbeat_seq;
    request.kind_case = DSA__V1__SESSION_REQUEST__KIND_HEARTBEAT;
    request.heartbeat = &beat;
    /* A failure means that the stream is over, which on_over reports. */
    (void)dsa__bidi_send(&session->bidi, &request.base, false, NULL);
}

/* Only tries the lock: whoever holds it pumps and sends heartbeats by itself. True when it had its turn. */
static bool keeper_turn(struct dsa_client *client)
{
    uint64_t now;

    if (pthread_mutex_trylock(&client->lock) != 0)
        return false;
    now = dsa__now_us();
    dsa__heartbeat_if_due(client, now);
    dsa__pump_ready(client);
    for (uint64_t until = now + KEEPER_PUMP_US; client->session.bidi.is_sending && dsa__now_us() < until;) {
        if (!dsa__pump_ready(client))
            break;
    }
    pthread_mutex_unlock(&client->lock);
    return true;
}

static void *keeper_main(void *arg)
{
    struct dsa_client *client = arg;
    struct keeper *keeper = &client->keeper;
    uint64_t every_us = client->session.heartbeat_every_us; /* set before the thread starts, then constant */
    uint64_t sleep_us = every_us;
    struct timespec at;

    pthread_mutex_lock(&keeper->mutex);
    while (!keeper->stop) {
        clock_gettime(CLOCK_MONOTONIC, &at);
        at.tv_sec += (time_t)(sleep_us / 1000000);
        at.tv_nsec += (long)(sleep_us % 1000000) * 1000;
        if (at.tv_nsec >= 1000000000) {
            at.tv_sec++;
            at.tv_nsec -= 1000000000;
        }
        if (pthread_cond_timedwait(&keeper->wake, &keeper->mutex, &at) == 0)
            continue; /* stop, or a spurious wake-up */
        pthread_mutex_unlock(&keeper->mutex);
        sleep_us = keeper_turn(client) ? every_us : every_us / 10;
        pthread_mutex_lock(&keeper->mutex);
    }
    pthread_mutex_unlock(&keeper->mutex);
    return NULL;
}

dsa_status dsa__keeper_start(struct dsa_client *client, struct dsa_error *err)
{
    struct keeper *keeper = &client->keeper;
    pthread_condattr_t attr;

    pthread_mutex_init(&keeper->mutex, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&keeper->wake, &attr);
    pthread_condattr_destroy(&attr);
    if (pthread_create(&keeper->thread, NULL, keeper_main, client) != 0) {
        pthread_cond_destroy(&keeper->wake);
        pthread_mutex_destroy(&keeper->mutex);
        return dsa__fail(err, DSA_E_SYSTEM, NULL, "the keeper thread cannot start");
    }
    keeper->is_running = true;
    return DSA_OK;
}

void dsa__keeper_stop(struct dsa_client *client)
{
    struct keeper *keeper = &client->keeper;

    if (!keeper->is_running)
        return;
    pthread_mutex_lock(&keeper->mutex);
    keeper->stop = true;
    pthread_cond_signal(&keeper->wake);
    pthread_mutex_unlock(&keeper->mutex);
    pthread_join(keeper->thread, NULL);
    pthread_cond_destroy(&keeper->wake);
    pthread_mutex_destroy(&keeper->mutex);
    keeper->is_running = false;
}
