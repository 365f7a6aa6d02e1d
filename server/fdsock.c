#include "server/fdsock.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include "dsa_fdsock.h"
#include "server/listener.h"
#include "server/log.h"
#include "server/loop.h"

#define OFFERS_A_ROUND 16
#define CLOSING_ROOM   64 /* peers that were closed in this round and still hold their descriptor */

struct peer {
    uv_poll_t poll;
    struct srv_fdsock *fdsock;
    struct peer *prev, *next;
    int fd;
};

struct srv_fdsock {
    struct srv_fdsock_config config;
    struct srv_loop *loop;
    struct srv_listener *listener;
    struct peer *peers; /* most recently heard first */
    uint32_t n_peers;
    bool is_closing;
};

static void fdsock_free_if_last(struct srv_fdsock *fdsock)
{
    if (fdsock->is_closing && !fdsock->peers)
        free(fdsock);
}

static void link_peer(struct peer *peer)
{
    struct srv_fdsock *fdsock = peer->fdsock;

    peer->prev = NULL;
    peer->next = fdsock->peers;
    if (fdsock->peers)
        fdsock->peers->prev = peer;
    fdsock->peers = peer;
}

static void unlink_peer(struct peer *peer)
{
    if (peer->prev)
        peer->prev->next = peer->next;
    else
        peer->fdsock->peers = peer->next;
    if (peer->next)
        peer->next->prev = peer->prev;
}

static void on_peer_closed(uv_handle_t *handle)
{
    struct peer *peer = handle->data;
    struct srv_fdsock *fdsock = peer->fdsock;

    unlink_peer(peer);
    close(peer->fd);
    free(peer);
    fdsock_free_if_last(fdsock);
}

static void peer_close(struct peer *peer)
{
    if (uv_is_closing((uv_handle_t *)&peer->poll))
        return;
    peer->fdsock->n_peers--;
    uv_close((uv_handle_t *)&peer->poll, on_peer_closed);
}

/* Clients that connect and say nothing must not keep out those that have something to say. */
static void close_most_silent(struct srv_fdsock *fdsock)
{
    struct peer *peer = fdsock->peers, *last = NULL;

    for (; peer; peer = peer->next)
        if (!uv_is_closing((uv_handle_t *)&peer->poll))
            last = peer;
    if (last)
        peer_close(last);
}

/* One message with what came along. Descriptors beyond the first are closed. Returns the length, 0 at the end, -1
 * when there is nothing now or the socket failed (errno). */
static ssize_t receive(int socket, struct dsa_fd_offer *offer, int *fd_p, int *n_fds_p)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int) * 8)];
        struct cmsghdr align;
    } control;
    struct iovec iov = {offer, sizeof(*offer)};
    struct msghdr msg = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    ssize_t n = recvmsg(socket, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

    *fd_p = -1;
    *n_fds_p = 0;
    if (n < 0)
        return -1;
    for (struct cmsghdr *cmsg = CMSG_FIRSTHDR(&msg); cmsg; cmsg = CMSG_NXTHDR(&msg, cmsg)) {
        size_t n_here;

        if (cmsg->cmsg_level != SOL_SOCKET || cmsg->cmsg_type != SCM_RIGHTS)
            continue;
        n_here = (cmsg->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n_here; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(cmsg) + i * sizeof(int), sizeof(fd));
            if ((*n_fds_p)++ == 0)
                *fd_p = fd;
            else
                close(fd);
        }
    }
    return msg.msg_flags & MSG_TRUNC ? (ssize_t)sizeof(*offer) + 1 : n;
}

static dsa_status judge(struct srv_fdsock *fdsock, const struct dsa_fd_offer *offer, ssize_t n, int fd,
                        int n_fds, struct srv_err *err)
{
    if (n != (ssize_t)sizeof(*offer))
        return srv_fail(err, DSA_E_BAD_REQUEST, "offer", "%zd", n, "an offer has %zu bytes", sizeof(*offer));
    if (offer->magic != DSA_FD_MAGIC || offer->version != DSA_FD_VERSION)
        return srv_fail(err, DSA_E_BAD_REQUEST, "version", "%u", offer->version,
                        "this server speaks version %u", DSA_FD_VERSION);
    if (n_fds != 1)
        return srv_fail(err, DSA_E_BAD_FD, "fd", "%d", n_fds, "an offer carries exactly one descriptor");
    if (offer->ticket == 0)
        return srv_fail(err, DSA_E_BAD_REQUEST, "ticket", "%d", 0, "a ticket is not 0");
    return fdsock->config.offer(fdsock->config.arg, offer->session, offer->ticket, fd, err);
}

/* False: the peer is done for. */
static bool serve_offer(struct peer *peer)
{
    struct dsa_fd_offer offer;
    struct dsa_fd_answer answer = {0};
    struct srv_err err = {0};
    int fd, n_fds;
    ssize_t n;
    dsa_status rc;

    memset(&offer, 0, sizeof(offer));
    n = receive(peer->fd, &offer, &fd, &n_fds);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR;
    if (n == 0 && n_fds == 0)
        return false;
    rc = judge(peer->fdsock, &offer, n, fd, n_fds, &err);
    if (rc != DSA_OK && fd >= 0)
        close(fd);
    answer.ticket = offer.ticket;
    answer.status = rc;
    if (rc != DSA_OK)
        snprintf(answer.text, sizeof(answer.text), "%.40s=%.20s: %.48s", err.field, err.value, err.text);
    /* A client that does not read its answers loses the connection, not our time. */
    return send(peer->fd, &answer, sizeof(answer), MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)sizeof(answer);
}

static void on_readable(uv_poll_t *poll, int status, int events)
{
    struct peer *peer = poll->data;

    (void)events;
    if (status < 0) {
        peer_close(peer);
        return;
    }
    unlink_peer(peer);
    link_peer(peer);
    for (int i = 0; i < OFFERS_A_ROUND; i++) {
        errno = 0;
        if (!serve_offer(peer)) {
            peer_close(peer);
            return;
        }
        if (errno == EAGAIN)
            return;
    }
}

static void on_accept(void *arg, int fd)
{
    struct srv_fdsock *fdsock = arg;
    struct peer *peer = calloc(1, sizeof(*peer));

    if (!peer || uv_poll_init(srv_loop_uv(fdsock->loop), &peer->poll, fd) != 0) {
        srv_log(SRV_LOG_ERROR, "cannot serve a descriptor connection");
        free(peer);
        close(fd);
        return;
    }
    peer->fdsock = fdsock;
    peer->fd = fd;
    peer->poll.data = peer;
    if (fdsock->n_peers == fdsock->config.max_connections)
        close_most_silent(fdsock);
    fdsock->n_peers++;
    link_peer(peer);
    uv_poll_start(&peer->poll, UV_READABLE, on_readable);
}

dsa_status srv_fdsock_open(struct srv_loop *loop, const struct srv_fdsock_config *config,
                           struct srv_fdsock **fdsock_p, struct srv_err *err)
{
    struct srv_fdsock *fdsock = calloc(1, sizeof(*fdsock));
    struct srv_listener_config listener = {
        .flag = "fd-socket",
        .unix_path = config->path,
        .socket_type = SOCK_SEQPACKET,
        .mode = config->mode,
        .owner = config->owner,
        .max_connections = config->max_connections + CLOSING_ROOM, /* on_accept keeps the cap */
        .accept = on_accept,
        .arg = fdsock,
    };
    dsa_status rc;

    if (!fdsock)
        return srv_fail(err, DSA_E_NO_MEMORY, "fd-socket", "%s", config->path, "no memory");
    fdsock->config = *config;
    fdsock->loop = loop;
    rc = srv_listener_open(loop, &listener, &fdsock->listener, err);
    if (rc != DSA_OK) {
        free(fdsock);
        return rc;
    }
    *fdsock_p = fdsock;
    return DSA_OK;
}

void srv_fdsock_close(struct srv_fdsock *fdsock)
{
    if (!fdsock)
        return;
    srv_listener_close(fdsock->listener);
    fdsock->is_closing = true;
    for (struct peer *peer = fdsock->peers; peer; peer = peer->next)
        peer_close(peer);
    srv_loop_touch(fdsock->loop);
    fdsock_free_if_last(fdsock);
}
