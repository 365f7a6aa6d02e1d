#include "server/listener.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <uv.h>

#include "server/address.h"
#include "server/inode.h"
#include "server/log.h"
#include "server/loop.h"

#define BACKLOG          4096 /* or what the system allows: a client that finds it full tries again after a second */
#define ACCEPTS_A_ROUND  64
#define RETRY_US         100000 /* after EMFILE and its kind */
#define UNIX_SEND_BUFFER (1 << 20)

/* An accepted socket, recognised by its inode: gRPC does not say when it closes one, so at the cap the list is swept. */
struct connection {
    int fd;
    uint64_t inode;
};

struct srv_listener {
    uv_poll_t poll;
    struct srv_loop *loop;
    struct srv_listener_config config;
    struct srv_timer *retry;
    struct connection *connections; /* [max_connections] */
    uint32_t n_connections;
    char path[sizeof(((struct sockaddr_un *)0)->sun_path)];
    int fd;
    int lock_fd;
    int port;
};

static dsa_status fail_system(struct srv_err *err, const char *field, const char *value, const char *what)
{
    return srv_fail(err, DSA_E_SYSTEM, field, "%s", value, "%s: %s", what, strerror(errno));
}

/* ---- opening --------------------------------------------------------------------------------- */

static dsa_status take_lock(struct srv_listener *listener, struct srv_err *err)
{
    char path[sizeof(listener->path) + 8];

    snprintf(path, sizeof(path), "%s.lock", listener->path);
    listener->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (listener->lock_fd < 0 && errno == ENOENT)
        return srv_fail(err, DSA_E_BAD_REQUEST, listener->config.flag, "%s", listener->path,
                        "its folder does not exist; make it, or give another path");
    if (listener->lock_fd < 0)
        return fail_system(err, listener->config.flag, path, "cannot open the lock file");
    if (flock(listener->lock_fd, LOCK_EX | LOCK_NB) == 0)
        return DSA_OK;
    if (errno == EWOULDBLOCK)
        return srv_fail(err, DSA_E_PRECONDITION, listener->config.flag, "%s", listener->path,
                        "another server holds this socket (its lock file is locked)");
    return fail_system(err, listener->config.flag, path, "cannot lock");
}

/* We hold the lock, so a socket file at the path is a dead server's. */
static dsa_status remove_stale(struct srv_listener *listener, struct srv_err *err)
{
    struct stat st;

    if (lstat(listener->path, &st) != 0)
        return errno == ENOENT
                   ? DSA_OK
                   : fail_system(err, listener->config.flag, listener->path, "cannot look at the path");
    if (!S_ISSOCK(st.st_mode))
        return srv_fail(err, DSA_E_BAD_REQUEST, listener->config.flag, "%s", listener->path,
                        "something that is not a socket lies there; it is left alone");
    if (unlink(listener->path) != 0)
        return fail_system(err, listener->config.flag, listener->path, "cannot remove the stale socket");
    srv_log(SRV_LOG_INFO, "replaced a socket that no server held path=%s", listener->path);
    return DSA_OK;
}

static dsa_status open_unix(struct srv_listener *listener, struct srv_err *err)
{
    const char *path = listener->config.unix_path;
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    mode_t old_mask;
    dsa_status rc;
    int bound;

    if (path[0] == '\0' || strlen(path) >= sizeof(addr.sun_path))
        return srv_fail(err, DSA_E_BAD_REQUEST, listener->config.flag, "%s", path,
                        "a socket path has 1 to %zu bytes", sizeof(addr.sun_path) - 1);
    strcpy(listener->path, path);
    strcpy(addr.sun_path, path);
    if ((rc = take_lock(listener, err)) != DSA_OK || (rc = remove_stale(listener, err)) != DSA_OK)
        return rc;
    listener->fd = socket(AF_UNIX, listener->config.socket_type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener->fd < 0)
        return fail_system(err, listener->config.flag, path, "cannot make a socket");
    old_mask = umask(0777 & ~listener->config.mode); /* never wider than asked for, not even for a moment */
    bound = bind(listener->fd, (struct sockaddr *)&addr, sizeof(addr));
    umask(old_mask);
    if (bound != 0)
        return fail_system(err, listener->config.flag, path, "cannot bind");
    if (listener->config.owner && chown(path, listener->config.owner->uid, listener->config.owner->gid) != 0)
        return fail_system(err, "socket-owner", path, "cannot change the owner");
    return listen(listener->fd, BACKLOG) == 0
               ? DSA_OK
               : fail_system(err, listener->config.flag, path, "cannot listen");
}

static dsa_status open_tcp(struct srv_listener *listener, struct srv_err *err)
{
    const char *text = listener->config.tcp, *flag = listener->config.flag;
    struct sockaddr_storage address;
    socklen_t n;
    int one = 1;
    dsa_status rc = srv_address_parse(flag, text, &address, &n, err);

    if (rc != DSA_OK)
        return rc;
    listener->fd = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener->fd < 0)
        return fail_system(err, flag, text, "cannot make a socket");
    setsockopt(listener->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(listener->fd, (struct sockaddr *)&address, n) != 0)
        return fail_system(err, flag, text, "cannot bind");
    if (listen(listener->fd, BACKLOG) != 0)
        return fail_system(err, flag, text, "cannot listen");
    if (getsockname(listener->fd, (struct sockaddr *)&address, &n) != 0)
        return fail_system(err, flag, text, "cannot read the bound address");
    listener->port = srv_address_port(&address);
    if (!srv_address_is_loopback(&address) && !listener->config.is_public && !listener->config.is_encrypted)
        srv_log(
            SRV_LOG_WARN,
            "plain-text gRPC leaves loopback: anyone on the way can read it; set tls-cert and tls-key, and "
            "tls-client-ca or auth-token-file address=%s",
            text);
    return DSA_OK;
}

/* ---- accepting ------------------------------------------------------------------------------- */

static void sweep(struct srv_listener *listener)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < listener->n_connections; i++)
        if (srv_socket_inode(listener->connections[i].fd) == listener->connections[i].inode)
            listener->connections[n++] = listener->connections[i];
    listener->n_connections = n;
}

static void log_peer(const struct srv_listener *listener, int fd)
{
    struct ucred peer;
    socklen_t n = sizeof(peer);

    if (listener->config.unix_path && getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) == 0)
        srv_log(SRV_LOG_DEBUG, "connection accepted pid=%d uid=%d", (int)peer.pid, (int)peer.uid);
    else
        srv_log(SRV_LOG_DEBUG, "connection accepted address=%s", listener->config.tcp);
}

/* Keepalive: a peer that vanished without a word is noticed after two minutes, and its place is free again. */
static void prepare_tcp(int fd)
{
    int one = 1, idle_s = 60, every_s = 15, times = 4;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every_s, sizeof(every_s));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof(times));
}

static void take_connection(struct srv_listener *listener, int fd)
{
    int send_buffer = UNIX_SEND_BUFFER;

    if (listener->n_connections == listener->config.max_connections)
        sweep(listener);
    if (listener->n_connections == listener->config.max_connections) {
        srv_log(SRV_LOG_WARN, "connection refused, max-connections reached max=%u",
                listener->config.max_connections);
        close(fd);
        return;
    }
    listener->connections[listener->n_connections++] = (struct connection){fd, srv_socket_inode(fd)};
    if (listener->config.unix_path)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof(send_buffer));
    else
        prepare_tcp(fd);
    log_peer(listener, fd);
    listener->config.accept(listener->config.arg, fd);
}

static void on_readable(uv_poll_t *poll, int status, int events);

static void on_retry(void *arg)
{
    struct srv_listener *listener = arg;
    struct srv_timer *timer = listener->retry;

    listener->retry = NULL;
    uv_poll_start(&listener->poll, UV_READABLE, on_readable);
    srv_timer_close(timer);
}

static void on_readable(uv_poll_t *poll, int status, int events)
{
    struct srv_listener *listener = poll->data;

    (void)events;
    if (status < 0)
        return;
    for (int i = 0; i < ACCEPTS_A_ROUND; i++) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

        if (fd >= 0) {
            take_connection(listener, fd);
            continue;
        }
        if (errno == EINTR || errno == ECONNABORTED)
            continue;
        if (errno == EAGAIN)
            return;
        /* Out of descriptors or memory: the backlog keeps the clients; look again in a moment. */
        srv_log(SRV_LOG_ERROR, "cannot accept, trying again error=\"%s\"", strerror(errno));
        uv_poll_stop(poll);
        if (srv_timer_start(listener->loop, RETRY_US, 0, on_retry, listener, &listener->retry) != DSA_OK)
            uv_poll_start(poll, UV_READABLE, on_readable);
        return;
    }
}

/* ---- life ------------------------------------------------------------------------------------ */

static void listener_free(struct srv_listener *listener)
{
    if (listener->fd >= 0)
        close(listener->fd);
    if (listener->lock_fd >= 0)
        close(listener->lock_fd); /* unlocks; the file stays, so that no one locks a file that is gone */
    free(listener->connections);
    free(listener);
}

dsa_status srv_listener_open(struct srv_loop *loop, const struct srv_listener_config *config,
                             struct srv_listener **listener_p, struct srv_err *err)
{
    struct srv_listener *listener = calloc(1, sizeof(*listener));
    dsa_status rc;

    if (!listener)
        return srv_fail(err, DSA_E_NO_MEMORY, "listen", "%s", "", "no memory for a listener");
    listener->loop = loop;
    listener->config = *config;
    listener->fd = -1;
    listener->lock_fd = -1;
    listener->connections = calloc(config->max_connections, sizeof(*listener->connections));
    if (!listener->connections) {
        listener_free(listener);
        return srv_fail(err, DSA_E_NO_MEMORY, "max-connections", "%u", config->max_connections, "no memory");
    }
    rc = config->unix_path ? open_unix(listener, err) : open_tcp(listener, err);
    if (rc == DSA_OK && uv_poll_init(srv_loop_uv(loop), &listener->poll, listener->fd) != 0)
        rc = srv_fail(err, DSA_E_SYSTEM, listener->config.flag, "%s", listener->path,
                      "cannot watch the socket");
    if (rc != DSA_OK) {
        listener_free(listener);
        return rc;
    }
    listener->poll.data = listener;
    uv_poll_start(&listener->poll, UV_READABLE, on_readable);
    srv_loop_touch(loop);
    *listener_p = listener;
    return DSA_OK;
}

static void on_closed(uv_handle_t *handle)
{
    listener_free(handle->data);
}

void srv_listener_close(struct srv_listener *listener)
{
    if (!listener)
        return;
    srv_timer_close(listener->retry);
    if (listener->path[0] != '\0')
        unlink(listener->path);
    uv_close((uv_handle_t *)&listener->poll, on_closed);
    srv_loop_touch(listener->loop);
}

uint32_t srv_listener_count(struct srv_listener *listener)
{
    if (!listener)
        return 0;
    sweep(listener);
    return listener->n_connections;
}

int srv_listener_port(const struct srv_listener *listener)
{
    return listener->port;
}
