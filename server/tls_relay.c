#include "server/tls_relay.h"

#include <errno.h>
#include <inttypes.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include "server/clock.h"
#include "server/log.h"
#include "server/loop.h"
#include "server/tls.h"

#define FLOW_BYTES   16384 /* a TLS record */
#define TURN_MOVES   16    /* buffers moved for one connection before the others get their turn */
#define LINGER_MS    2000  /* what a peer gets to take the last bytes */
#define END_MS       500   /* the same when the process ends */
#define DRAIN_BYTES  65536 /* read and thrown away after a refusal at most */
#define LOG_EVERY_US 1000000

/* SHAKING:  TLS handshake, until it is done, fails, or its time is up
 * RELAYING: bytes both ways
 * PARTING:  nothing more to say; the peer's bytes are thrown away until it closes, for LINGER_MS at most. Closing at once would
 *           reset the connection, and the peer might lose what was sent last. */
enum conn_state { SHAKING, RELAYING, PARTING };

/* One direction. The source is read again when the buffer is empty. */
struct flow {
    uint8_t *bytes; /* [FLOW_BYTES] */
    size_t begin, n;
    bool is_over; /* the source has ended */
    bool is_shut; /* and the sink has been told */
};

struct conn {
    struct srv_tls_relay *relay;
    struct conn *prev, *next; /* all; on the way from L: next only */
    struct conn *next_again;
    uv_poll_t tcp, pair;
    uv_timer_t timer; /* the handshake's or parting's deadline */
    int tcp_fd, pair_fd;
    int tcp_events, pair_events; /* watched now */
    SSL *ssl;
    struct flow up, down;     /* up: from the client to gRPC */
    int up_wants, down_wants; /* UV_ events of the TCP socket that SSL_read and SSL_write wait for */
    size_t n_drained;
    unsigned n_handles; /* uv handles that are not closed yet */
    enum conn_state state;
    bool is_again; /* in the list of those with more to do */
    bool is_closing, has_pair, pair_gone, tcp_gone;
};

/* A socket on its way from T to L. */
struct handed {
    struct handed *next;
    int fd;
};

struct srv_tls_relay {
    struct srv_tls_relay_config config;
    struct srv_loop *loop;
    pthread_t thread;
    uv_async_t to_l;  /* on L's loop */
    bool is_draining; /* [L] */
    /* T's */
    uv_loop_t uv;
    uv_async_t to_t;
    uv_timer_t reload, end;
    uv_idle_t idle; /* runs while there is someone in `again` */
    struct conn *conns, *again;
    bool is_ending;
    uint64_t logged_us;
    uint64_t n_unlogged;
    /* between them */
    pthread_mutex_t lock; /* guards the next three; nothing is called while it is held */
    struct conn *incoming;
    struct handed *outgoing;
    bool ends;
    /* read by anyone; each is written by one thread and orders nothing */
    atomic_uint_fast64_t n_accepted, n_handshakes, n_refused, n_timeouts, n_gone, n_closed;
};

static void advance(struct conn *conn);

static void count(atomic_uint_fast64_t *counter)
{
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

/* ---- the end of a connection [T] -------------------------------------------------------------------- */

static void leave_again(struct conn *conn)
{
    struct conn **at = &conn->relay->again;

    if (!conn->is_again)
        return;
    while (*at != conn)
        at = &(*at)->next_again;
    *at = conn->next_again;
    conn->is_again = false;
}

static void conn_free(struct conn *conn)
{
    SSL_free(conn->ssl);
    close(conn->tcp_fd);
    if (conn->has_pair)
        close(conn->pair_fd);
    free(conn->up.bytes);
    free(conn);
}

static void end_if_last(struct srv_tls_relay *relay)
{
    if (!relay->is_ending || relay->conns || uv_is_closing((uv_handle_t *)&relay->end))
        return;
    uv_close((uv_handle_t *)&relay->end, NULL);
    uv_close((uv_handle_t *)&relay->reload, NULL);
    uv_close((uv_handle_t *)&relay->idle, NULL);
    uv_close((uv_handle_t *)&relay->to_t, NULL);
}

static void on_closed(uv_handle_t *handle)
{
    struct conn *conn = handle->data;
    struct srv_tls_relay *relay = conn->relay;

    if (--conn->n_handles > 0)
        return;
    if (conn->prev)
        conn->prev->next = conn->next;
    else
        relay->conns = conn->next;
    if (conn->next)
        conn->next->prev = conn->prev;
    conn_free(conn);
    count(&relay->n_closed);
    end_if_last(relay);
}

static void conn_close(struct conn *conn)
{
    if (conn->is_closing)
        return;
    conn->is_closing = true;
    leave_again(conn);
    uv_close((uv_handle_t *)&conn->timer, on_closed);
    uv_close((uv_handle_t *)&conn->tcp, on_closed);
    if (conn->has_pair)
        uv_close((uv_handle_t *)&conn->pair, on_closed);
}

/* ---- waiting [T] --------------------------------------------------------------------------------------- */

static void on_tcp(uv_poll_t *poll, int status, int events);
static void on_pair(uv_poll_t *poll, int status, int events);

static void watch(uv_poll_t *poll, int *current, int events, uv_poll_cb fn)
{
    if (events == *current)
        return;
    *current = events;
    if (events == 0)
        uv_poll_stop(poll);
    else
        uv_poll_start(poll, events, fn);
}

/* A side from which nothing is wanted is still asked for its end: a peer that neither reads nor lives must not be kept. */
static void watch_both(struct conn *conn)
{
    int tcp = conn->state == PARTING ? UV_READABLE : conn->up_wants | conn->down_wants;
    int pair = 0;

    if (!(tcp & UV_READABLE) && !conn->tcp_gone)
        tcp |= UV_DISCONNECT;
    watch(&conn->tcp, &conn->tcp_events, tcp, on_tcp);
    if (!conn->has_pair)
        return;
    if (conn->state == RELAYING && conn->up.n > 0)
        pair |= UV_WRITABLE;
    if (conn->state == RELAYING && conn->down.n == 0 && !conn->down.is_over)
        pair |= UV_READABLE;
    else if (conn->state == RELAYING && !conn->pair_gone)
        pair |= UV_DISCONNECT;
    watch(&conn->pair, &conn->pair_events, pair, on_pair);
}

static void on_deadline(uv_timer_t *timer)
{
    struct conn *conn = timer->data;

    if (conn->state == SHAKING) {
        count(&conn->relay->n_timeouts);
        srv_log(SRV_LOG_DEBUG, "TLS handshake took too long");
    }
    conn_close(conn);
}

static void limit_time(struct conn *conn, uint64_t ms)
{
    uv_timer_start(&conn->timer, on_deadline, ms, 0);
}

/* The rest of a connection's life is bounded from here on. */
static void limit_rest(struct conn *conn)
{
    if (!uv_is_active((uv_handle_t *)&conn->timer))
        limit_time(conn, LINGER_MS);
}

static void part(struct conn *conn)
{
    shutdown(conn->tcp_fd, SHUT_WR);
    conn->state = PARTING;
    uv_timer_stop(&conn->timer);
    limit_rest(conn);
}

static void drain(struct conn *conn)
{
    uint8_t waste[4096];
    ssize_t n;

    while ((n = recv(conn->tcp_fd, waste, sizeof(waste), 0)) > 0 && conn->n_drained <= DRAIN_BYTES)
        conn->n_drained += (size_t)n;
    /* At the process's end an empty queue is enough: closing resets nothing then. */
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR) || conn->n_drained > DRAIN_BYTES
        || conn->relay->is_ending)
        conn_close(conn);
}

/* ---- the handshake [T] ------------------------------------------------------------------------------------ */

/* One line a second tells of refusals; strangers must not fill the log. */
static void log_refusal(struct conn *conn, const char *why)
{
    struct srv_tls_relay *relay = conn->relay;
    struct sockaddr_storage peer;
    socklen_t n = sizeof(peer);
    char host[64] = "?";
    uint64_t now = srv_now_us();

    if (relay->logged_us != 0 && now < relay->logged_us + LOG_EVERY_US) {
        relay->n_unlogged++;
        return;
    }
    if (getpeername(conn->tcp_fd, (struct sockaddr *)&peer, &n) == 0)
        getnameinfo((struct sockaddr *)&peer, n, host, sizeof(host), NULL, 0, NI_NUMERICHOST);
    srv_log(SRV_LOG_INFO, "TLS client refused address=%s reason=\"%s\" others=%" PRIu64, host, why,
            relay->n_unlogged);
    relay->logged_us = now;
    relay->n_unlogged = 0;
}

/* OpenSSL's words where they help, ours where they do not. */
static const char *reason_of(const SSL *ssl, unsigned long code)
{
    long verified = SSL_get_verify_result(ssl);

    if (verified != X509_V_OK)
        return X509_verify_cert_error_string(verified);
    switch (ERR_GET_REASON(code)) {
    case SSL_R_WRONG_VERSION_NUMBER:
    case SSL_R_HTTP_REQUEST:
        return "plain text where TLS is spoken";
    case SSL_R_CALLBACK_FAILED:
    case SSL_R_NO_APPLICATION_PROTOCOL:
        return "the client does not offer HTTP/2 (ALPN h2)";
    default:
        return ERR_reason_error_string(code) ? ERR_reason_error_string(code) : "not TLS";
    }
}

/* SSL_accept has failed; its alert is on the way. */
static void refuse(struct conn *conn, int ssl_error)
{
    unsigned long code = ERR_peek_last_error();

    if (ssl_error != SSL_ERROR_SSL || ERR_SYSTEM_ERROR(code)) {
        count(&conn->relay->n_gone);
        conn_close(conn);
        return;
    }
    count(&conn->relay->n_refused);
    log_refusal(conn, reason_of(conn->ssl, code));
    part(conn);
}

/* Gives one end of a pair to L, and keeps the other. */
static bool hand_over(struct conn *conn)
{
    struct srv_tls_relay *relay = conn->relay;
    struct handed *handed = malloc(sizeof(*handed));
    int fds[2];

    conn->up.bytes = malloc(2 * FLOW_BYTES);
    if (!handed || !conn->up.bytes
        || socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) {
        srv_log(SRV_LOG_ERROR, "no memory or descriptor for a TLS client error=\"%s\"", strerror(errno));
        free(handed);
        return false;
    }
    conn->down.bytes = conn->up.bytes + FLOW_BYTES;
    conn->pair_fd = fds[0];
    conn->has_pair = true;
    conn->n_handles++;
    SRV_ASSERT(uv_poll_init(&relay->uv, &conn->pair, fds[0]) == 0);
    conn->pair.data = conn;
    handed->fd = fds[1];
    pthread_mutex_lock(&relay->lock);
    handed->next = relay->outgoing;
    relay->outgoing = handed;
    pthread_mutex_unlock(&relay->lock);
    uv_async_send(&relay->to_l);
    return true;
}

static void shake(struct conn *conn)
{
    int rc, error;

    ERR_clear_error();
    rc = SSL_accept(conn->ssl);
    if (rc == 1) {
        uv_timer_stop(&conn->timer);
        conn->state = RELAYING;
        count(&conn->relay->n_handshakes);
        if (!hand_over(conn))
            conn_close(conn);
        return;
    }
    error = SSL_get_error(conn->ssl, rc);
    conn->up_wants = error == SSL_ERROR_WANT_WRITE ? UV_WRITABLE : UV_READABLE;
    if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE)
        refuse(conn, error);
}

/* ---- bytes [T] ----------------------------------------------------------------------------------------------- */

/* What a failed SSL_read or SSL_write waits for. False: the connection is broken. */
static bool wait_for_tls(const struct conn *conn, int rc, int *wants_p)
{
    int error = SSL_get_error(conn->ssl, rc);

    if (error == SSL_ERROR_WANT_READ)
        *wants_p = UV_READABLE;
    else if (error == SSL_ERROR_WANT_WRITE)
        *wants_p = UV_WRITABLE;
    return error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE;
}

static void empty(struct flow *flow, size_t n)
{
    flow->begin += n;
    flow->n -= n;
}

/* Client to gRPC. False: broken. */
static bool move_up(struct conn *conn, bool *has_moved)
{
    struct flow *up = &conn->up;
    ssize_t sent;
    int got;

    conn->up_wants = 0;
    if (up->n == 0 && !up->is_over) {
        ERR_clear_error();
        got = SSL_read(conn->ssl, up->bytes, FLOW_BYTES);
        if (got > 0) {
            up->begin = 0;
            up->n = (size_t)got;
            *has_moved = true;
        } else if (SSL_get_error(conn->ssl, got) == SSL_ERROR_ZERO_RETURN) {
            up->is_over = true;
        } else if (!wait_for_tls(conn, got, &conn->up_wants)) {
            return false;
        }
    }
    if (up->n > 0) {
        sent = send(conn->pair_fd, up->bytes + up->begin, up->n, MSG_NOSIGNAL);
        if (sent > 0)
            *has_moved = true;
        else if (sent < 0 && errno != EAGAIN && errno != EINTR)
            sent = (ssize_t)up->n; /* gRPC has closed: nobody wants them */
        if (sent > 0)
            empty(up, (size_t)sent);
    }
    if (up->is_over && up->n == 0 && !up->is_shut) {
        shutdown(conn->pair_fd, SHUT_WR);
        up->is_shut = true;
    }
    return true;
}

/* gRPC to client. False: broken. */
static bool move_down(struct conn *conn, bool *has_moved)
{
    struct flow *down = &conn->down;
    ssize_t got;
    int sent;

    conn->down_wants = 0;
    if (down->n == 0 && !down->is_over) {
        got = recv(conn->pair_fd, down->bytes, FLOW_BYTES, 0);
        if (got > 0) {
            down->begin = 0;
            down->n = (size_t)got;
            *has_moved = true;
        } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
            down->is_over = true;
        }
    }
    if (down->n > 0) {
        ERR_clear_error();
        sent = SSL_write(conn->ssl, down->bytes + down->begin, (int)down->n);
        if (sent <= 0)
            return wait_for_tls(conn, sent, &conn->down_wants);
        empty(down, (size_t)sent);
        *has_moved = true;
    }
    if (down->is_over && down->n == 0 && !down->is_shut) {
        ERR_clear_error();
        sent = SSL_shutdown(conn->ssl); /* says goodbye; the peer's is not waited for */
        if (sent < 0 && wait_for_tls(conn, sent, &conn->down_wants)) {
            limit_rest(conn);
            return true;
        }
        down->is_shut = true;
    }
    return true;
}

static void relay_bytes(struct conn *conn)
{
    bool has_moved = true;

    for (int i = 0; i < TURN_MOVES && has_moved; i++) {
        has_moved = false;
        if (!move_up(conn, &has_moved) || !move_down(conn, &has_moved)) {
            conn_close(conn);
            return;
        }
        if (conn->down.is_shut) {
            part(conn);
            return;
        }
    }
    if (has_moved && !conn->is_again) { /* what OpenSSL holds already no descriptor tells of */
        conn->next_again = conn->relay->again;
        conn->relay->again = conn;
        conn->is_again = true;
    }
}

/* Does what can be done now, then waits for what is missing. */
static void advance(struct conn *conn)
{
    if (conn->is_closing)
        return;
    if (conn->state == SHAKING)
        shake(conn);
    if (conn->state == RELAYING && !conn->is_closing)
        relay_bytes(conn);
    if (conn->state == PARTING && !conn->is_closing)
        drain(conn);
    if (!conn->is_closing)
        watch_both(conn);
}

static void on_tcp(uv_poll_t *poll, int status, int events)
{
    struct conn *conn = poll->data;

    if (status < 0) { /* reset */
        if (conn->state == SHAKING)
            count(&conn->relay->n_gone);
        conn_close(conn);
        return;
    }
    if (events & UV_DISCONNECT) {
        conn->tcp_gone = true;
        limit_rest(conn);
    }
    advance(conn);
}

static void on_pair(uv_poll_t *poll, int status, int events)
{
    struct conn *conn = poll->data;

    if (status < 0 || (events & UV_DISCONNECT)) { /* gRPC has closed; what it wrote is still there to read */
        conn->pair_gone = true;
        conn->pair_events = status < 0 ? 0 : conn->pair_events; /* uv has stopped watching */
        limit_rest(conn);
    }
    advance(conn);
}

static void on_idle(uv_idle_t *idle);

static void advance_again(struct srv_tls_relay *relay)
{
    struct conn *list = relay->again, *next;

    relay->again = NULL;
    for (struct conn *conn = list; conn; conn = conn->next_again)
        conn->is_again = false;
    for (; list; list = next) {
        next = list->next_again;
        advance(list); /* closes no other, and frees nothing before uv's next round */
    }
}

static void on_idle(uv_idle_t *idle)
{
    struct srv_tls_relay *relay = idle->data;

    advance_again(relay);
}

/* An idle handle keeps uv from sleeping: only while somebody has more to do. */
static void on_prepare_sleep(struct srv_tls_relay *relay)
{
    if (relay->is_ending && uv_is_closing((uv_handle_t *)&relay->idle))
        return;
    if (relay->again)
        uv_idle_start(&relay->idle, on_idle);
    else
        uv_idle_stop(&relay->idle);
}

/* ---- from L [T] ------------------------------------------------------------------------------------------------ */

static void begin(struct srv_tls_relay *relay, struct conn *conn)
{
    SSL_CTX *context = srv_tls_take_context(relay->config.tls);

    conn->ssl = SSL_new(context);
    SSL_CTX_free(context);
    if (relay->is_ending || !conn->ssl || SSL_set_fd(conn->ssl, conn->tcp_fd) != 1
        || uv_poll_init(&relay->uv, &conn->tcp, conn->tcp_fd) != 0) {
        conn_free(conn);
        count(&relay->n_closed);
        return;
    }
    uv_timer_init(&relay->uv, &conn->timer);
    conn->n_handles = 2;
    conn->tcp.data = conn->timer.data = conn;
    conn->prev = NULL;
    conn->next = relay->conns;
    if (relay->conns)
        relay->conns->prev = conn;
    relay->conns = conn;
    limit_time(conn, relay->config.handshake_timeout_us / 1000 + 1);
    advance(conn);
}

static void on_end_deadline(uv_timer_t *timer)
{
    struct srv_tls_relay *relay = timer->data;

    for (struct conn *conn = relay->conns; conn; conn = conn->next)
        conn_close(conn);
}

static void begin_end(struct srv_tls_relay *relay)
{
    relay->is_ending = true;
    for (struct conn *conn = relay->conns; conn; conn = conn->next)
        if (conn->state != RELAYING)
            conn_close(conn);
    uv_timer_start(&relay->end, on_end_deadline, END_MS, 0);
    end_if_last(relay);
}

static void on_message(uv_async_t *async)
{
    struct srv_tls_relay *relay = async->data;
    struct conn *conn, *next;
    bool ends;

    pthread_mutex_lock(&relay->lock);
    conn = relay->incoming;
    relay->incoming = NULL;
    ends = relay->ends;
    pthread_mutex_unlock(&relay->lock);
    for (; conn; conn = next) {
        next = conn->next;
        begin(relay, conn);
    }
    if (ends && !relay->is_ending)
        begin_end(relay);
}

static void on_reload(uv_timer_t *timer)
{
    struct srv_tls_relay *relay = timer->data;
    struct srv_err err = {0};
    bool is_new;

    if (srv_tls_reload_if_changed(relay->config.tls, &is_new, &err) != DSA_OK)
        srv_log(SRV_LOG_WARN,
                "new certificate not taken, the old one serves on setting=%s file=%s reason=\"%s\"",
                err.field, err.value, err.text);
    else if (is_new)
        srv_log(SRV_LOG_INFO, "certificate replaced expires_s=%" PRId64, srv_tls_expiry_s(relay->config.tls));
}

static void *thread_main(void *arg)
{
    struct srv_tls_relay *relay = arg;

    do
        on_prepare_sleep(relay);
    while (uv_run(&relay->uv, UV_RUN_ONCE) != 0);
    SRV_ASSERT(uv_loop_close(&relay->uv) == 0);
    return NULL;
}

/* ---- L's side ----------------------------------------------------------------------------------------------------- */

static void on_handed(uv_async_t *async)
{
    struct srv_tls_relay *relay = async->data;
    struct handed *handed, *next;

    pthread_mutex_lock(&relay->lock);
    handed = relay->outgoing;
    relay->outgoing = NULL;
    pthread_mutex_unlock(&relay->lock);
    for (; handed; handed = next) {
        next = handed->next;
        if (relay->is_draining)
            close(handed->fd);
        else
            relay->config.ready(relay->config.arg, handed->fd);
        free(handed);
    }
}

static void start_handles(struct srv_tls_relay *relay)
{
    uint64_t reload_ms = relay->config.reload_us / 1000;

    uv_timer_init(&relay->uv, &relay->reload);
    uv_timer_init(&relay->uv, &relay->end);
    uv_idle_init(&relay->uv, &relay->idle);
    relay->reload.data = relay->end.data = relay->idle.data = relay->to_t.data = relay->to_l.data = relay;
    if (relay->config.reload_us > 0)
        uv_timer_start(&relay->reload, on_reload, reload_ms + 1, reload_ms + 1);
}

dsa_status srv_tls_relay_start(struct srv_loop *loop, const struct srv_tls_relay_config *config,
                               struct srv_tls_relay **relay_p, struct srv_err *err)
{
    struct srv_tls_relay *relay = calloc(1, sizeof(*relay));

    if (!relay)
        return srv_fail(err, DSA_E_NO_MEMORY, "tls-cert", "%s", "", "no memory for TLS connections");
    relay->config = *config;
    relay->loop = loop;
    pthread_mutex_init(&relay->lock, NULL);
    if (uv_loop_init(&relay->uv) != 0 || uv_async_init(&relay->uv, &relay->to_t, on_message) != 0
        || uv_async_init(srv_loop_uv(loop), &relay->to_l, on_handed) != 0)
        return srv_fail(err, DSA_E_SYSTEM, "tls-cert", "%s", "",
                        "cannot start a loop for TLS"); /* process ends */
    start_handles(relay);
    if (pthread_create(&relay->thread, NULL, thread_main, relay) != 0)
        return srv_fail(err, DSA_E_SYSTEM, "tls-cert", "%s", "",
                        "cannot start a thread for TLS"); /* process ends */
    srv_loop_touch(loop);
    *relay_p = relay;
    return DSA_OK;
}

void srv_tls_relay_accept(struct srv_tls_relay *relay, int fd)
{
    struct conn *conn = calloc(1, sizeof(*conn));

    if (!conn) {
        close(fd);
        return;
    }
    conn->relay = relay;
    conn->tcp_fd = fd;
    count(&relay->n_accepted);
    pthread_mutex_lock(&relay->lock);
    conn->next = relay->incoming;
    relay->incoming = conn;
    pthread_mutex_unlock(&relay->lock);
    uv_async_send(&relay->to_t);
}

void srv_tls_relay_drain(struct srv_tls_relay *relay)
{
    if (relay)
        relay->is_draining = true;
}

static void on_async_closed(uv_handle_t *handle)
{
    struct srv_tls_relay *relay = handle->data;

    pthread_mutex_destroy(&relay->lock);
    free(relay);
}

void srv_tls_relay_stop(struct srv_tls_relay *relay)
{
    if (!relay)
        return;
    relay->is_draining = true;
    pthread_mutex_lock(&relay->lock);
    relay->ends = true;
    pthread_mutex_unlock(&relay->lock);
    on_handed(&relay->to_l); /* so that their other ends end, too */
    uv_async_send(&relay->to_t);
    pthread_join(relay->thread, NULL);
    on_handed(&relay->to_l);
    uv_close((uv_handle_t *)&relay->to_l, on_async_closed);
    srv_loop_touch(relay->loop);
}

struct srv_tls_counts srv_tls_relay_counts(const struct srv_tls_relay *relay)
{
    struct srv_tls_counts counts = {
        .n_handshakes = atomic_load_explicit(&relay->n_handshakes, memory_order_relaxed),
        .n_refused = atomic_load_explicit(&relay->n_refused, memory_order_relaxed),
        .n_timeouts = atomic_load_explicit(&relay->n_timeouts, memory_order_relaxed),
        .n_gone = atomic_load_explicit(&relay->n_gone, memory_order_relaxed),
    };
    uint64_t n_closed = atomic_load_explicit(&relay->n_closed, memory_order_relaxed);

    counts.n_accepted = atomic_load_explicit(&relay->n_accepted, memory_order_relaxed);
    counts.n_open = counts.n_accepted > n_closed ? counts.n_accepted - n_closed : 0;
    return counts;
}
