/* handle.h - registered regions: client memory known by an unguessable id. All functions [L]. Pure: mapping
 * and unmapping happen elsewhere, through the release callback.
 *
 *   ACTIVE ──unregister, users == 0──► gone (release called)
 *      └────unregister, users > 0────► PENDING ──last put──► gone (release called) */
#ifndef SERVER_CORE_HANDLE_H
#define SERVER_CORE_HANDLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/core/err.h"

#define SRV_REGION_ID_BYTES 16

struct srv_regions;

struct srv_region {
    uint8_t id[SRV_REGION_ID_BYTES];
    uint64_t session; /* session number */
    void *base;       /* first byte of the region in this process */
    uint64_t size;
    bool writable;
    bool pending;     /* unregistered, still used */
    uint32_t n_users; /* requests that hold it */
    void *map;        /* what release needs: start and length of the mapping */
    uint64_t map_size;
};

/* Called once per region when nothing uses it any more, before its memory is freed. [L] */
typedef void (*srv_region_release)(struct srv_region *region, void *arg);

/* max_bytes: of all regions, pending ones included; max_per_session counts active ones (a pending one is
 * held by a request, and those are bounded). release may be NULL. DSA_E_NO_MEMORY; DSA_E_BAD_REQUEST if a
 * limit is 0. */
SRV_MUST_CHECK dsa_status srv_regions_create(uint32_t max_per_session, uint64_t max_bytes,
                                             srv_region_release release, void *arg,
                                             struct srv_regions **regions_p);
/* Releases every region; none may be in use. NULL is fine. */
/* Another limit from now on, not 0; what is registered stays. */
void srv_regions_set_max(struct srv_regions *regions, uint32_t max_per_session);
void srv_regions_destroy(struct srv_regions *regions);

/* Adds a region; `id` is fresh random bytes. Copies *desc (n_users and pending are set to 0).
 * DSA_E_LIMIT (regions of the session, bytes in use now), DSA_E_TOO_LARGE (more than max_bytes alone),
 * DSA_E_BAD_REQUEST (size 0), DSA_E_EXISTS (id in use), DSA_E_NO_MEMORY: release is not called, the mapping
 * stays the caller's. */
SRV_MUST_CHECK dsa_status srv_region_add(struct srv_regions *regions, const struct srv_region *desc,
                                         struct srv_region **region_p, struct srv_err *err);

/* A slice for one request: checks session, id, access, and that [offset, offset + size) lies inside without
 * wrapping; takes a use, to be given back with srv_region_put. `field` is the path for errors
 * ("attend.q.region"). A slice of size 0 is fine anywhere up to the end.
 * DSA_E_NOT_FOUND (unknown, pending or another session's), DSA_E_ACCESS, DSA_E_BAD_RANGE. */
SRV_MUST_CHECK dsa_status srv_region_get(struct srv_regions *regions, uint64_t session, const uint8_t *id,
                                         size_t n_id, uint64_t offset, uint64_t size, bool want_write,
                                         const char *field, struct srv_region **region_p, void **ptr_p,
                                         struct srv_err *err);
void srv_region_put(struct srv_regions *regions, struct srv_region *region);

/* *is_gone_p: released at once; otherwise pending. DSA_E_NOT_FOUND. */
SRV_MUST_CHECK dsa_status srv_region_remove(struct srv_regions *regions, uint64_t session, const uint8_t *id,
                                            size_t n_id, bool *is_gone_p, struct srv_err *err);
/* Unregisters all of a session, in time proportional to what it owned. Returns how many. */
uint32_t srv_regions_drop_session(struct srv_regions *regions, uint64_t session);
uint32_t srv_regions_count(const struct srv_regions *regions);   /* pending ones included */
uint32_t srv_regions_pending(const struct srv_regions *regions); /* in time proportional to them */
uint64_t srv_regions_bytes(const struct srv_regions *regions);

#endif /* SERVER_CORE_HANDLE_H */
