/* svc_region.c - RegisterRegion and UnregisterRegion: client memory mapped once, known by an unguessable id. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "server/log.h"
#include "server/status.h"
#include "server/svc.h"

#define REGION_ALIGN 4096u

void svc_region_release(struct srv_region *region, void *arg)
{
    (void)arg;
    if (munmap(region->map, region->map_size) != 0)
        srv_log(SRV_LOG_ERROR, "cannot unmap a region size=%" PRIu64 " error=\"%s\"", region->map_size,
                strerror(errno));
}

/* Takes the ticket out of the lease; the caller owns the descriptor then. -1: no such ticket. */
static int claim_ticket(struct svc_lease *lease, uint64_t number)
{
    struct svc_ticket **at, *ticket;
    int fd;

    for (at = &lease->tickets; *at; at = &(*at)->next) {
        ticket = *at;
        if (ticket->number != number)
            continue;
        *at = ticket->next;
        fd = ticket->fd;
        free(ticket);
        lease->n_tickets--;
        return fd;
    }
    return -1;
}

static dsa_status check_request(const struct svc *svc, const Dsa__V1__RegisterRegionRequest *request,
                                struct srv_err *err)
{
    uint64_t end;

    if (strlen(request->label) > 64)
        return srv_fail(err, DSA_E_BAD_REQUEST, "label", "%zu bytes", strlen(request->label),
                        "at most 64 bytes");
    if (request->access != DSA__V1__REGION_ACCESS__REGION_ACCESS_READ
        && request->access != DSA__V1__REGION_ACCESS__REGION_ACCESS_READ_WRITE)
        return srv_fail(err, DSA_E_BAD_REQUEST, "access", "%d", (int)request->access,
                        "give READ or READ_WRITE");
    if (request->base_offset % REGION_ALIGN != 0)
        return srv_fail(err, DSA_E_BAD_RANGE, "base_offset", "%" PRIu64, request->base_offset,
                        "must be a multiple of %u", REGION_ALIGN);
    if (request->size == 0)
        return srv_fail(err, DSA_E_BAD_RANGE, "size", "%d", 0, "a region has at least one byte");
    if (request->size > svc->config->max_region_bytes)
        return srv_fail(err, DSA_E_TOO_LARGE, "size", "%" PRIu64, request->size, "at most %" PRIu64 " bytes",
                        svc->config->max_region_bytes);
    if (__builtin_add_overflow(request->base_offset, request->size, &end) || end > INT64_MAX)
        return srv_fail(err, DSA_E_BAD_RANGE, "base_offset", "%" PRIu64, request->base_offset,
                        "base_offset + size wraps");
    return DSA_OK;
}

/* A file that its owner could shrink would turn a read of ours into SIGBUS, so the seal is a condition. */
static dsa_status check_memfd(int fd, uint64_t end, bool want_write, struct srv_err *err)
{
    struct statfs fs;
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS), mode = fcntl(fd, F_GETFL);

    if (fstatfs(fd, &fs) == 0 && fs.f_type == HUGETLBFS_MAGIC)
        return srv_fail(
            err, DSA_E_BAD_FD, "memfd.fd_ticket", "%s", "huge pages",
            "memfds of huge pages are not served: their pages can be taken away under the server");
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || seals < 0)
        return srv_fail(err, DSA_E_BAD_FD, "memfd.fd_ticket", "%s", "not a memfd",
                        "the descriptor must come from memfd_create with MFD_ALLOW_SEALING");
    if (!(seals & F_SEAL_SHRINK))
        return srv_fail(err, DSA_E_BAD_FD, "memfd.fd_ticket", "seals 0x%x", (unsigned)seals,
                        "seal the memfd against shrinking (F_SEAL_SHRINK) first");
    if (want_write && (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)))
        return srv_fail(err, DSA_E_BAD_FD, "access", "seals 0x%x", (unsigned)seals,
                        "READ_WRITE asked for, but the memfd is sealed against writing");
    if (mode < 0 || (mode & O_ACCMODE) == O_WRONLY || (want_write && (mode & O_ACCMODE) != O_RDWR))
        return srv_fail(err, DSA_E_BAD_FD, "access", "%s", "descriptor mode",
                        "the descriptor was not opened for this access");
    if ((uint64_t)st.st_size < end)
        return srv_fail(err, DSA_E_BAD_RANGE, "size", "%" PRIu64, end,
                        "base_offset + size is past the memfd's %" PRId64 " bytes", (int64_t)st.st_size);
    return DSA_OK;
}

static dsa_status map_region(const Dsa__V1__RegisterRegionRequest *request, int fd, struct srv_region *region,
                             struct srv_err *err)
{
    bool want_write = request->access == DSA__V1__REGION_ACCESS__REGION_ACCESS_READ_WRITE;
    dsa_status rc = check_memfd(fd, request->base_offset + request->size, want_write, err);
    void *map;

    if (rc != DSA_OK)
        return rc;
    map = mmap(NULL, request->size, want_write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd,
               (off_t)request->base_offset);
    if (map == MAP_FAILED)
        return srv_fail(err, DSA_E_NO_MEMORY, "size", "%" PRIu64, request->size, "cannot map: %s",
                        strerror(errno));
    region->base = map;
    region->size = request->size;
    region->writable = want_write;
    region->map = map;
    region->map_size = request->size;
    return DSA_OK;
}

static dsa_status register_memfd(struct svc_lease *lease, const Dsa__V1__RegisterRegionRequest *request,
                                 struct srv_region **region_p, struct srv_err *err)
{
    struct srv_region region = {.session = lease->number};
    dsa_status rc = check_request(lease->svc, request, err);
    int fd;

    if (rc != DSA_OK)
        return rc;
    if (strcmp(lease->svc->config->host_tier, "memfd") != 0)
        return srv_fail(err, DSA_E_UNSUPPORTED, "memfd", "%s", lease->svc->config->host_tier,
                        "this server was started without shared host memory (host-tier)");
    fd = claim_ticket(lease, request->memfd->fd_ticket);
    if (fd < 0)
        return srv_fail(err, DSA_E_BAD_FD, "memfd.fd_ticket", "%" PRIu64, request->memfd->fd_ticket,
                        "no descriptor with this ticket came over the fd socket");
    rc = map_region(request, fd, &region, err);
    close(fd); /* the mapping holds the memory */
    if (rc != DSA_OK)
        return rc;
    if (getrandom(region.id, sizeof(region.id), 0) != (ssize_t)sizeof(region.id))
        rc = srv_fail(err, DSA_E_INTERNAL, "", "%s", "", "no random bytes for an id");
    else
        rc = srv_region_add(lease->svc->regions, &region, region_p, err);
    if (rc != DSA_OK)
        munmap(region.map, region.map_size);
    return rc;
}

static const ProtobufCBinaryData *session_of_register(const ProtobufCMessage *message)
{
    return &((const Dsa__V1__RegisterRegionRequest *)message)->session;
}

void svc_register_region(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    struct svc *svc = rpc_call_service(call);
    Dsa__V1__Region reply = DSA__V1__REGION__INIT;
    const Dsa__V1__RegisterRegionRequest *request;
    struct wire_arena *arena;
    ProtobufCMessage *message;
    struct svc_lease *lease;
    struct srv_region *region;
    struct srv_err err = {0};
    char label[65];
    dsa_status rc;

    if (!svc_begin_in_session(call, &dsa__v1__register_region_request__descriptor, bytes, n,
                              session_of_register, &arena, &message, &lease))
        return;
    request = (const Dsa__V1__RegisterRegionRequest *)message;
    switch (request->kind_case) {
    case DSA__V1__REGISTER_REGION_REQUEST__KIND_MEMFD:
        rc = register_memfd(lease, request, &region, &err);
        break;
    case DSA__V1__REGISTER_REGION_REQUEST__KIND_DEVICE_FD:
        rc = srv_fail(&err, DSA_E_UNIMPLEMENTED, "device_fd", "%s", srv_worker_device(svc->worker)->uuid,
                      "device memory needs a GPU device, and this server has none");
        break;
    case DSA__V1__REGISTER_REGION_REQUEST__KIND_DEVICE_IPC:
        rc = srv_fail(&err, DSA_E_UNIMPLEMENTED, "device_ipc", "%s", srv_worker_device(svc->worker)->uuid,
                      "device memory needs a GPU device, and this server has none");
        break;
    default:
        rc = srv_fail(&err, DSA_E_BAD_REQUEST, "kind", "%s", "absent", "say which kind of memory it is");
    }
    if (rc == DSA_OK) {
        srv_log(SRV_LOG_DEBUG,
                "region registered session=%" PRIu64 " size=%" PRIu64 " label=\"%s\" call_id=%" PRIu64
                " trace_id=%s",
                lease->number, region->size, wire_text(label, sizeof(label), request->label),
                rpc_call_number(call), srv_trace_id(rpc_call_trace(call)));
        reply.id.data = region->id;
        reply.id.len = SRV_REGION_ID_BYTES;
        reply.size = region->size;
        reply.state = DSA__V1__REGION_STATE__REGION_STATE_ACTIVE;
        wire_reply(call, &reply.base);
    } else {
        svc_refuse(call, &err);
    }
    wire_arena_free(arena);
}

static const ProtobufCBinaryData *session_of_unregister(const ProtobufCMessage *message)
{
    return &((const Dsa__V1__UnregisterRegionRequest *)message)->session;
}

void svc_unregister_region(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    struct svc *svc = rpc_call_service(call);
    Dsa__V1__UnregisterRegionReply reply = DSA__V1__UNREGISTER_REGION_REPLY__INIT;
    const Dsa__V1__UnregisterRegionRequest *request;
    struct wire_arena *arena;
    ProtobufCMessage *message;
    struct svc_lease *lease;
    struct srv_err err = {0};
    bool is_gone;

    if (!svc_begin_in_session(call, &dsa__v1__unregister_region_request__descriptor, bytes, n,
                              session_of_unregister, &arena, &message, &lease))
        return;
    request = (const Dsa__V1__UnregisterRegionRequest *)message;
    if (srv_region_remove(svc->regions, lease->number, request->region_id.data, request->region_id.len,
                          &is_gone, &err)
        == DSA_OK) {
        reply.state =
            is_gone ? DSA__V1__REGION_STATE__REGION_STATE_GONE : DSA__V1__REGION_STATE__REGION_STATE_PENDING;
        wire_reply(call, &reply.base);
    } else {
        svc_refuse(call, &err);
    }
    wire_arena_free(arena);
}
