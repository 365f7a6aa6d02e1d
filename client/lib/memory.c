/* memory.c - shared memory: a sealed memfd, mapped here, sent over the fd socket and registered with the
 * server. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/lib/internal.h"
#include "dsa_fdsock.h"

static dsa_status fail_system(struct dsa_error *err, const char *what)
{
    return dsa__fail(err, DSA_E_SYSTEM, NULL, "%s: %s", what, strerror(errno));
}

/* ---- the fd socket --------------------------------------------------------------------------- */

static dsa_status fd_connect(struct dsa_client *client, struct dsa_error *err)
{
    const char *path = client->fd_socket ? client->fd_socket : client->session.fd_socket;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval timeout = {.tv_sec = (time_t)(client->rpc_timeout_us / 1000000),
                              .tv_usec = (suseconds_t)(client->rpc_timeout_us % 1000000)};
    int fd;

    if (!path || path[0] == '\0')
        return dsa__fail(err, DSA_E_UNSUPPORTED, NULL,
                         "the server takes no file descriptors; send tensors inline");
    if (strlen(path) >= sizeof(address.sun_path))
        return dsa__fail(err, DSA_E_BAD_REQUEST, "fd_socket", "%s is too long for a socket path", path);
    memcpy(address.sun_path, path, strlen(path) + 1);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return fail_system(err, "socket");
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)) != 0
        || setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) != 0
        || connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        dsa_status status = fail_system(err, path);

        close(fd);
        return status;
    }
    client->fd_conn = fd;
    return DSA_OK;
}

static bool send_offer(int conn, const struct dsa_fd_offer *offer, int fd)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec iov = {(void *)(uintptr_t)offer, sizeof(*offer)};
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
    struct cmsghdr *cmsg;
    ssize_t n;

    memset(&control, 0, sizeof(control));
    cmsg = CMSG_FIRSTHDR(&message);
    cmsg->cmsg_level = SOL_SOCKET;
    cmsg->cmsg_type = SCM_RIGHTS;
    cmsg->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(cmsg), &fd, sizeof(fd));
    do
        n = sendmsg(conn, &message, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof(*offer);
}

static dsa_status read_answer(struct dsa_client *client, uint64_t ticket, struct dsa_error *err)
{
    struct dsa_fd_answer answer;
    ssize_t n;

    do
        n = recv(client->fd_conn, &answer, sizeof(answer), 0);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return fail_system(err, "fd socket");
    if (n == 0)
        return dsa__fail(err, DSA_E_CONNECT, NULL, "the server closed the fd socket");
    if (n != (ssize_t)sizeof(answer) || answer.ticket != ticket)
        return dsa__fail(err, DSA_E_PROTOCOL, NULL, "the fd socket answered something else");
    if (answer.status != DSA_OK)
        return dsa__fail(err, (dsa_status)answer.status, "fd", "%.*s", (int)sizeof(answer.text), answer.text);
    return DSA_OK;
}

/* Hands `fd` to the server under a fresh ticket. A connection that failed is closed, so that the next try
 * starts clean. */
static dsa_status offer_fd(struct dsa_client *client, int fd, uint64_t *ticket_p, struct dsa_error *err)
{
    struct dsa_fd_offer offer = {
        .magic = DSA_FD_MAGIC, .version = DSA_FD_VERSION, .ticket = client->next_ticket};
    dsa_status status = client->fd_conn >= 0 ? DSA_OK : fd_connect(client, err);

    if (status != DSA_OK)
        return status;
    client->next_ticket++;
    memcpy(offer.session, client->session.info.token, sizeof(offer.session));
    status = send_offer(client->fd_conn, &offer, fd) ? read_answer(client, offer.ticket, err)
                                                     : fail_system(err, "fd socket");
    if (status != DSA_OK) {
        close(client->fd_conn);
        client->fd_conn = -1;
        return status;
    }
    *ticket_p = offer.ticket;
    return DSA_OK;
}

/* ---- regions --------------------------------------------------------------------------------- */

static dsa_status register_region(struct dsa_client *client, struct dsa_memory *memory, uint64_t ticket,
                                  uint64_t base_offset, enum dsa_access access, struct dsa_error *err)
{
    Dsa__V1__MemfdRegion memfd = DSA__V1__MEMFD_REGION__INIT;
    Dsa__V1__RegisterRegionRequest request = DSA__V1__REGISTER_REGION_REQUEST__INIT;
    Dsa__V1__Region *region;
    dsa_status status;

    memfd.fd_ticket = ticket;
    request.session = dsa__token(client);
    request.kind_case = DSA__V1__REGISTER_REGION_REQUEST__KIND_MEMFD;
    request.memfd = &memfd;
    request.access = (Dsa__V1__RegionAccess)access;
    request.base_offset = base_offset;
    request.size = memory->bytes;
    status = dsa__unary(client, DSA__SERVICE "RegisterRegion", &request.base, &dsa__v1__region__descriptor,
                        &region, err);
    if (status != DSA_OK)
        return status;
    if (region->id.len == sizeof(memory->id))
        memcpy(memory->id, region->id.data, sizeof(memory->id));
    else
        status = dsa__fail(err, DSA_E_PROTOCOL, NULL, "the region's id has %zu bytes", region->id.len);
    dsa__v1__region__free_unpacked(region, NULL);
    return status;
}

static dsa_status import_locked(struct dsa_client *client, int fd, uint64_t base_offset, uint64_t bytes,
                                enum dsa_access access, struct dsa_memory **memory_p, struct dsa_error *err)
{
    struct dsa_memory *memory = calloc(1, sizeof(*memory));
    uint64_t ticket;
    dsa_status status;
    void *map;

    if (!memory)
        return dsa__fail(err, DSA_E_NO_MEMORY, NULL, "no memory for a handle");
    map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)base_offset);
    if (map == MAP_FAILED && access == DSA_ACCESS_READ && (errno == EACCES || errno == EPERM))
        map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, (off_t)base_offset); /* not ours to write either */
    if (map == MAP_FAILED) {
        free(memory);
        return fail_system(err, "mmap");
    }
    memory->client = client;
    memory->map = map;
    memory->bytes = bytes;
    status = offer_fd(client, fd, &ticket, err);
    if (status == DSA_OK)
        status = register_region(client, memory, ticket, base_offset, access, err);
    if (status != DSA_OK) {
        dsa__memory_free(memory);
        return status;
    }
    memory->next = client->memories;
    client->memories = memory;
    *memory_p = memory;
    return DSA_OK;
}

dsa_status dsa_memory_import(struct dsa_client *client, int fd, uint64_t base_offset, uint64_t bytes,
                             enum dsa_access access, struct dsa_memory **memory_p, struct dsa_error *err)
{
    struct stat info;
    dsa_status status;

    if (bytes == 0 || base_offset % 4096 != 0)
        return dsa__fail(err, DSA_E_BAD_REQUEST, bytes == 0 ? "bytes" : "base_offset",
                         "bytes must not be 0 and base_offset a multiple of 4096");
    if (fstat(fd, &info) != 0)
        return fail_system(err, "fstat");
    /* Touching a mapping past the end of its file would be a SIGBUS in this process. */
    if (base_offset > (uint64_t)info.st_size || bytes > (uint64_t)info.st_size - base_offset)
        return dsa__fail(err, DSA_E_BAD_RANGE, "bytes", "the file has %lld bytes", (long long)info.st_size);
    pthread_mutex_lock(&client->lock);
    status = import_locked(client, fd, base_offset, bytes, access, memory_p, err);
    pthread_mutex_unlock(&client->lock);
    return status;
}

dsa_status dsa_memory_create(struct dsa_client *client, uint64_t bytes, enum dsa_access access,
                             struct dsa_memory **memory_p, struct dsa_error *err)
{
    dsa_status status;
    int fd;

    if (bytes == 0 || bytes > INT64_MAX)
        return dsa__fail(err, DSA_E_BAD_REQUEST, "bytes", "%llu bytes cannot be mapped",
                         (unsigned long long)bytes);
    fd = memfd_create("dsa", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return fail_system(err, "memfd_create");
    if (ftruncate(fd, (off_t)bytes) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
        status = fail_system(err, "memfd");
    else
        status = dsa_memory_import(client, fd, 0, bytes, access, memory_p, err);
    close(fd); /* the mappings keep the memory */
    return status;
}

void *dsa_memory_data(const struct dsa_memory *memory)
{
    return memory->map;
}

uint64_t dsa_memory_bytes(const struct dsa_memory *memory)
{
    return memory->bytes;
}

void dsa__memory_free(struct dsa_memory *memory)
{
    munmap(memory->map, memory->bytes);
    free(memory);
}

static void unlink_memory(struct dsa_memory *memory)
{
    struct dsa_memory **at = &memory->client->memories;

    while (*at != memory)
        at = &(*at)->next;
    *at = memory->next;
}

dsa_status dsa_memory_destroy(struct dsa_memory *memory, struct dsa_error *err)
{
    Dsa__V1__UnregisterRegionRequest request = DSA__V1__UNREGISTER_REGION_REQUEST__INIT;
    Dsa__V1__UnregisterRegionReply *reply;
    struct dsa_client *client;
    dsa_status status;

    if (!memory)
        return DSA_OK;
    client = memory->client;
    pthread_mutex_lock(&client->lock);
    while (memory->n_users > 0) /* ends with the connection at the latest: then every request completes */
        dsa__pump(client, UINT64_MAX);
    request.session = dsa__token(client);
    request.region_id.len = sizeof(memory->id);
    request.region_id.data = memory->id;
    status = dsa__unary(client, DSA__SERVICE "UnregisterRegion", &request.base,
                        &dsa__v1__unregister_region_reply__descriptor, &reply, err);
    /* PENDING is fine too: the server has a mapping of its own, ours is not needed any more. */
    if (status == DSA_OK)
        dsa__v1__unregister_region_reply__free_unpacked(reply, NULL);
    unlink_memory(memory);
    dsa__memory_free(memory);
    pthread_mutex_unlock(&client->lock);
    return status;
}
