#include "server/core/handle.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/core/idmap.h"
#include "server/core/list.h"
#include "server/core/secret.h"

_Static_assert(SRV_REGION_ID_BYTES == SRV_SECRET_BYTES, "region ids are compared as secrets");

/* Which active regions a session has; made with its first one, freed with its last. */
struct owner {
    struct srv_idmap_node by_session;
    struct srv_list regions;
    uint32_t n_regions;
};

struct entry {
    struct srv_region region;
    struct srv_list in_owner; /* of its owner while active, of srv_regions.pending after that */
    struct srv_idmap_node by_id;
    struct owner *owner; /* NULL once pending: the session may be gone by then */
};

struct srv_regions {
    uint32_t max_per_session;
    uint64_t max_bytes;
    srv_region_release release;
    void *arg;
    struct srv_idmap owners;
    struct srv_idmap by_id; /* active ones */
    struct srv_list pending;
    uint32_t n_regions;
    uint64_t n_bytes;
};

void srv_regions_set_max(struct srv_regions *regions, uint32_t max_per_session)
{
    SRV_ASSERT(max_per_session > 0);
    regions->max_per_session = max_per_session;
}

dsa_status srv_regions_create(uint32_t max_per_session, uint64_t max_bytes, srv_region_release release,
                              void *arg, struct srv_regions **regions_p)
{
    struct srv_regions *regions;

    if (max_per_session == 0 || max_bytes == 0)
        return DSA_E_BAD_REQUEST;
    regions = calloc(1, sizeof(*regions));
    if (!regions)
        return DSA_E_NO_MEMORY;
    regions->max_per_session = max_per_session;
    regions->max_bytes = max_bytes;
    regions->release = release;
    regions->arg = arg;
    srv_idmap_init(&regions->owners);
    srv_idmap_init(&regions->by_id);
    srv_list_init(&regions->pending);
    *regions_p = regions;
    return DSA_OK;
}

static struct entry *entry_of(struct srv_region *region)
{
    return SRV_CONTAINER_OF(region, struct entry, region);
}

static struct owner *find_owner(const struct srv_regions *regions, uint64_t session)
{
    struct srv_idmap_node *node = srv_idmap_first(&regions->owners, session);

    return node ? SRV_CONTAINER_OF(node, struct owner, by_session) : NULL;
}

static struct owner *get_owner(struct srv_regions *regions, uint64_t session)
{
    struct owner *owner = find_owner(regions, session);

    if (owner)
        return owner;
    owner = calloc(1, sizeof(*owner));
    if (!owner)
        return NULL;
    srv_list_init(&owner->regions);
    srv_idmap_add(&regions->owners, &owner->by_session, session);
    return owner;
}

static struct entry *find_id(const struct srv_regions *regions, const uint8_t *id)
{
    struct srv_idmap_node *node = srv_idmap_first(&regions->by_id, srv_secret_key(id));
    struct entry *found = NULL;

    for (; node; node = srv_idmap_next(node)) {
        struct entry *entry = SRV_CONTAINER_OF(node, struct entry, by_id);

        if (srv_secret_is_equal(entry->region.id, id))
            found = entry;
    }
    return found;
}

static dsa_status get_entry(const struct srv_regions *regions, uint64_t session, const uint8_t *id,
                            size_t n_id, const char *field, struct entry **entry_p, struct srv_err *err)
{
    struct entry *entry = n_id == SRV_REGION_ID_BYTES ? find_id(regions, id) : NULL;

    if (!entry || entry->region.session != session)
        return srv_fail(err, DSA_E_NOT_FOUND, field, "%zu bytes", n_id, "this session has no such region");
    *entry_p = entry;
    return DSA_OK;
}

/* ---- coming
 * ------------------------------------------------------------------------------------------------- */

static dsa_status check_add(const struct srv_regions *regions, const struct srv_region *desc,
                            struct srv_err *err)
{
    const struct owner *owner = find_owner(regions, desc->session);

    if (desc->size == 0)
        return srv_fail(err, DSA_E_BAD_REQUEST, "size", "%s", "0", "a region has at least one byte");
    if (desc->size > regions->max_bytes)
        return srv_fail(err, DSA_E_TOO_LARGE, "size", "%" PRIu64, desc->size,
                        "all regions together may have %" PRIu64 " bytes", regions->max_bytes);
    if (desc->size > regions->max_bytes - regions->n_bytes)
        return srv_fail(err, DSA_E_LIMIT, "size", "%" PRIu64, desc->size,
                        "the regions registered now have %" PRIu64 " of %" PRIu64 " bytes", regions->n_bytes,
                        regions->max_bytes);
    if (owner && owner->n_regions >= regions->max_per_session)
        return srv_fail(err, DSA_E_LIMIT, "max_regions_per_session", "%" PRIu32, regions->max_per_session,
                        "this session holds as many regions as it may");
    if (find_id(regions, desc->id))
        return srv_fail(err, DSA_E_EXISTS, "region", "%s", "", "the id is in use; was it random?");
    return DSA_OK;
}

dsa_status srv_region_add(struct srv_regions *regions, const struct srv_region *desc,
                          struct srv_region **region_p, struct srv_err *err)
{
    struct entry *entry;
    dsa_status status = check_add(regions, desc, err);

    if (status != DSA_OK)
        return status;
    entry = calloc(1, sizeof(*entry));
    if (entry)
        entry->owner = get_owner(regions, desc->session);
    if (!entry || !entry->owner) {
        free(entry);
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for another region");
    }
    entry->region = *desc;
    entry->region.n_users = 0;
    entry->region.pending = false;
    srv_list_add_tail(&entry->owner->regions, &entry->in_owner);
    entry->owner->n_regions++;
    srv_idmap_add(&regions->by_id, &entry->by_id, srv_secret_key(desc->id));
    regions->n_regions++;
    regions->n_bytes += desc->size;
    *region_p = &entry->region;
    return DSA_OK;
}

/* ---- use
 * ---------------------------------------------------------------------------------------------------- */

/* No sum of client numbers, so none that wraps. base already is the first byte of the region. */
static bool is_inside(const struct srv_region *region, uint64_t offset, uint64_t size)
{
    return offset <= region->size && size <= region->size - offset;
}

dsa_status srv_region_get(struct srv_regions *regions, uint64_t session, const uint8_t *id, size_t n_id,
                          uint64_t offset, uint64_t size, bool want_write, const char *field,
                          struct srv_region **region_p, void **ptr_p, struct srv_err *err)
{
    struct srv_region *region;
    struct entry *entry;
    dsa_status status = get_entry(regions, session, id, n_id, field, &entry, err);

    if (status != DSA_OK)
        return status;
    region = &entry->region;
    if (want_write && !region->writable)
        return srv_fail(err, DSA_E_ACCESS, field, "%s", "read-only", "the region was registered read-only");
    if (!is_inside(region, offset, size)) {
        char range[44];

        snprintf(range, sizeof(range), "%" PRIu64 "+%" PRIu64, offset, size);
        return srv_fail(err, DSA_E_BAD_RANGE, field, "%s", range,
                        "offset plus size reach past the region's %" PRIu64 " bytes", region->size);
    }
    SRV_ASSERT(region->n_users < UINT32_MAX);
    region->n_users++;
    *region_p = region;
    *ptr_p = (char *)region->base + offset;
    return DSA_OK;
}

/* ---- going
 * -------------------------------------------------------------------------------------------------- */

/* Out of every structure before release is called, so that the callback finds the table consistent. */
static void end_entry(struct srv_regions *regions, struct entry *entry)
{
    srv_list_remove(&entry->in_owner);
    regions->n_regions--;
    regions->n_bytes -= entry->region.size;
    if (regions->release)
        regions->release(&entry->region, regions->arg);
    free(entry);
}

/* True: gone; false: pending. */
static bool unregister(struct srv_regions *regions, struct entry *entry)
{
    struct owner *owner = entry->owner;

    srv_idmap_remove(&regions->by_id, &entry->by_id);
    srv_list_remove(&entry->in_owner);
    entry->owner = NULL;
    if (--owner->n_regions == 0) {
        srv_idmap_remove(&regions->owners, &owner->by_session);
        free(owner);
    }
    if (entry->region.n_users > 0) {
        entry->region.pending = true;
        srv_list_add_tail(&regions->pending, &entry->in_owner);
        return false;
    }
    end_entry(regions, entry);
    return true;
}

void srv_region_put(struct srv_regions *regions, struct srv_region *region)
{
    SRV_ASSERT(region->n_users > 0);
    if (--region->n_users == 0 && region->pending)
        end_entry(regions, entry_of(region));
}

dsa_status srv_region_remove(struct srv_regions *regions, uint64_t session, const uint8_t *id, size_t n_id,
                             bool *is_gone_p, struct srv_err *err)
{
    struct entry *entry;
    dsa_status status = get_entry(regions, session, id, n_id, "region_id", &entry, err);

    if (status != DSA_OK)
        return status;
    *is_gone_p = unregister(regions, entry);
    return DSA_OK;
}

uint32_t srv_regions_drop_session(struct srv_regions *regions, uint64_t session)
{
    struct owner *owner = find_owner(regions, session);
    uint32_t n = owner ? owner->n_regions : 0;

    /* Counted, not until empty: the last one takes the owner with it. */
    for (uint32_t i = 0; i < n; i++)
        (void)unregister(regions, SRV_CONTAINER_OF(owner->regions.next, struct entry, in_owner));
    return n;
}

void srv_regions_destroy(struct srv_regions *regions)
{
    struct srv_idmap_node *node;

    if (!regions)
        return;
    while ((node = srv_idmap_any(&regions->owners)) != NULL)
        (void)srv_regions_drop_session(regions, node->key);
    SRV_ASSERT(srv_list_is_empty(&regions->pending) && regions->n_regions == 0 && regions->n_bytes == 0);
    srv_idmap_fini(&regions->by_id);
    srv_idmap_fini(&regions->owners);
    free(regions);
}

uint32_t srv_regions_count(const struct srv_regions *regions)
{
    return regions->n_regions;
}

uint32_t srv_regions_pending(const struct srv_regions *regions)
{
    const struct srv_list *node;
    uint32_t n = 0;

    for (node = regions->pending.next; node != &regions->pending; node = node->next)
        n++;
    return n;
}

uint64_t srv_regions_bytes(const struct srv_regions *regions)
{
    return regions->n_bytes;
}
