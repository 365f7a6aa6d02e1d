/* handle: slices stay inside, only for their session, and memory lives until its last user. */
#include "server/core/handle.h"

#include <signal.h>
#include <string.h>

#include "kit.h"
#include "test_main.h"

#define SESSION  UINT64_C(3)
#define STRANGER UINT64_C(4)
#define BASE     4096u /* IPC-02: the region begins inside its mapping */
#define SIZE     8192u

static uint8_t mapping[BASE + SIZE + 1];

/* What release was called for. */
static struct {
    int n;
    uint8_t last_id[SRV_REGION_ID_BYTES];
    void *last_map;
} released;

static void on_release(struct srv_region *region, void *arg)
{
    ck_assert_ptr_eq(arg, &released);
    ck_assert_uint_eq(region->n_users, 0);
    released.n++;
    released.last_map = region->map;
    memcpy(released.last_id, region->id, sizeof(released.last_id));
}

static struct srv_regions *new_regions(uint32_t max_per_session, uint64_t max_bytes)
{
    struct srv_regions *regions;

    ck_assert_int_eq(srv_regions_create(max_per_session, max_bytes, on_release, &released, &regions), DSA_OK);
    released.n = 0;
    return regions;
}

/* Ids that differ in their last byte only. */
static struct srv_region desc_of(int i, uint64_t session)
{
    struct srv_region desc = {
        .session = session,
        .base = mapping + BASE,
        .size = SIZE,
        .writable = i % 2 == 0,
        .pending = true, /* add must not believe these two */
        .n_users = 17,
        .map = mapping,
        .map_size = sizeof(mapping),
    };

    desc.id[SRV_REGION_ID_BYTES - 1] = (uint8_t)i;
    return desc;
}

static struct srv_region *add(struct srv_regions *regions, int i)
{
    struct srv_region desc = desc_of(i, SESSION), *region;

    ck_assert_int_eq(srv_region_add(regions, &desc, &region, NULL), DSA_OK);
    return region;
}

static dsa_status get(struct srv_regions *regions, int i, uint64_t offset, uint64_t size, void **ptr_p,
                      struct srv_err *err)
{
    struct srv_region desc = desc_of(i, SESSION), *region;
    dsa_status status = srv_region_get(regions, SESSION, desc.id, sizeof(desc.id), offset, size, false,
                                       "attend.q.region", &region, ptr_p, err);

    if (status == DSA_OK)
        srv_region_put(regions, region);
    return status;
}

static dsa_status remove_region(struct srv_regions *regions, int i, bool *is_gone_p)
{
    struct srv_region desc = desc_of(i, SESSION);

    return srv_region_remove(regions, SESSION, desc.id, sizeof(desc.id), is_gone_p, NULL);
}

START_TEST(bad_limits_are_refused)
{
    struct srv_regions *regions = NULL;

    ck_assert_int_eq(srv_regions_create(0, 1, NULL, NULL, &regions), DSA_E_BAD_REQUEST);
    ck_assert_int_eq(srv_regions_create(1, 0, NULL, NULL, &regions), DSA_E_BAD_REQUEST);
    ck_assert_ptr_null(regions);
    srv_regions_destroy(NULL);
}
END_TEST

/* IPC-02: one table, no sum of client numbers that could wrap. */
START_TEST(slices_stay_inside)
{
    static const struct {
        uint64_t offset, size;
        dsa_status status;
    } cases[] = {
        {0, 8192, DSA_OK},
        {0, 1, DSA_OK},
        {8191, 1, DSA_OK},
        {4096, 4096, DSA_OK},
        {0, 0, DSA_OK},
        {8192, 0, DSA_OK}, /* nothing to touch */
        {8193, 0, DSA_E_BAD_RANGE},
        {0, 8193, DSA_E_BAD_RANGE},
        {8191, 2, DSA_E_BAD_RANGE},
        {8192, 1, DSA_E_BAD_RANGE},
        {1, 8192, DSA_E_BAD_RANGE},
        {UINT64_MAX, 2, DSA_E_BAD_RANGE},
        {UINT64_MAX, 1, DSA_E_BAD_RANGE},
        {UINT64_MAX, 0, DSA_E_BAD_RANGE},
        {UINT64_C(1) << 63, UINT64_C(1) << 63, DSA_E_BAD_RANGE},
        {1, UINT64_MAX, DSA_E_BAD_RANGE},
        {8192, UINT64_MAX - 8191, DSA_E_BAD_RANGE},
        {UINT64_MAX - 8191, 8192, DSA_E_BAD_RANGE},
        {(uint64_t)INT64_C(-1), 8192, DSA_E_BAD_RANGE}, /* a negative int64 as it arrives */
        {(uint64_t)INT64_C(-4096), 4096, DSA_E_BAD_RANGE},
        {(uint64_t)INT64_MIN, 1, DSA_E_BAD_RANGE},
        {0, (uint64_t)INT64_C(-8192), DSA_E_BAD_RANGE},
    };
    struct srv_regions *regions = new_regions(4, 1 << 20);
    struct srv_region *region = add(regions, 1);

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        void *ptr = NULL;
        struct srv_err err;

        ck_assert_msg(get(regions, 1, cases[i].offset, cases[i].size, &ptr, &err) == cases[i].status,
                      "case %zu", i);
        if (cases[i].status == DSA_OK) {
            ck_assert_ptr_eq(ptr, mapping + BASE + cases[i].offset);
        } else {
            ck_assert_ptr_null(ptr);
            ck_assert_str_eq(err.field, "attend.q.region");
            ck_assert_uint_gt(strlen(err.value), 0);
        }
        ck_assert_uint_eq(region->n_users, 0);
    }
    srv_regions_destroy(regions);
}
END_TEST

START_TEST(read_only_is_not_written)
{
    struct srv_regions *regions = new_regions(4, 1 << 20);
    struct srv_region *ro = add(regions, 1), *rw = add(regions, 2), *region = NULL;
    struct srv_err err;
    void *ptr;

    ck_assert_int_eq(srv_region_get(regions, SESSION, ro->id, 16, 0, 1, true, "out", &region, &ptr, &err),
                     DSA_E_ACCESS);
    ck_assert_str_eq(err.field, "out");
    ck_assert_ptr_null(region);
    ck_assert_int_eq(srv_region_get(regions, SESSION, rw->id, 16, 0, 1, true, "out", &region, &ptr, &err),
                     DSA_OK);
    srv_region_put(regions, region);
    srv_regions_destroy(regions);
}
END_TEST

START_TEST(only_the_owner_finds_a_region)
{
    struct srv_regions *regions = new_regions(4, 1 << 20);
    struct srv_region *own = add(regions, 1), *region = NULL;
    struct srv_err foreign, unknown;
    uint8_t id[SRV_REGION_ID_BYTES];
    bool is_gone;
    void *ptr;

    memcpy(id, own->id, sizeof(id));
    ck_assert_int_eq(srv_region_get(regions, STRANGER, id, 16, 0, 1, false, "q", &region, &ptr, &foreign),
                     DSA_E_NOT_FOUND);
    ck_assert_int_eq(srv_region_remove(regions, STRANGER, id, 16, &is_gone, NULL), DSA_E_NOT_FOUND);
    for (int bit = 0; bit < SRV_REGION_ID_BYTES * 8; bit++) {
        id[bit / 8] ^= (uint8_t)(1 << bit % 8);
        ck_assert_int_eq(srv_region_get(regions, SESSION, id, 16, 0, 1, false, "q", &region, &ptr, &unknown),
                         DSA_E_NOT_FOUND);
        id[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    ck_assert_str_eq(foreign.text, unknown.text);
    ck_assert_int_eq(srv_region_get(regions, SESSION, id, 15, 0, 1, false, "q", &region, &ptr, NULL),
                     DSA_E_NOT_FOUND);
    ck_assert_int_eq(srv_region_get(regions, SESSION, NULL, 0, 0, 1, false, "q", &region, &ptr, NULL),
                     DSA_E_NOT_FOUND);
    ck_assert_ptr_null(region);
    srv_regions_destroy(regions);
}
END_TEST

START_TEST(the_limit_of_a_session_can_change)
{
    struct srv_regions *regions = new_regions(2, 9 * SIZE);
    struct srv_region desc = desc_of(3, SESSION), *region = NULL;
    bool is_gone;
    struct srv_err err;

    add(regions, 1);
    add(regions, 2);
    ck_assert_int_eq(srv_region_add(regions, &desc, &region, &err), DSA_E_LIMIT);
    srv_regions_set_max(regions, 3);
    add(regions, 3);
    srv_regions_set_max(regions, 1); /* those that are there stay */
    desc = desc_of(4, SESSION);
    ck_assert_int_eq(srv_region_add(regions, &desc, &region, &err), DSA_E_LIMIT);
    ck_assert_str_eq(err.value, "1");
    ck_assert_uint_eq(srv_regions_count(regions), 3);
    for (int i = 1; i <= 3; i++)
        ck_assert_int_eq(remove_region(regions, i, &is_gone), DSA_OK);
    add(regions, 4);
    srv_regions_destroy(regions);
}
END_TEST

START_TEST(limits_hold)
{
    struct srv_regions *regions = new_regions(2, 3 * SIZE);
    struct srv_region desc = desc_of(9, SESSION), *region = NULL;
    struct srv_err err;
    bool is_gone;

    desc.size = 3 * SIZE + 1;
    ck_assert_int_eq(srv_region_add(regions, &desc, &region, &err), DSA_E_TOO_LARGE);
    desc.size = UINT64_MAX;
    ck_assert_int_eq(srv_region_add(regions, &desc, &region, &err), DSA_E_TOO_LARGE);
    desc.size = 0;
    ck_assert_int_eq(srv_region_add(regions, &desc, &region, &err), DSA_E_BAD_REQUEST);
    add(regions, 1);
    add(regions, 2);
    desc = desc_of(3, SESSION);
    ck_assert_int_eq(srv_region_add(regions, &desc, &region, &err), DSA_E_LIMIT);
    ck_assert_str_eq(err.field, "max_regions_per_session");
    desc = desc_of(2, STRANGER);
    ck_assert_int_eq(srv_region_add(regions, &desc, &region, &err), DSA_E_EXISTS);
    desc = desc_of(3, STRANGER);
    desc.size = SIZE + 1; /* fits alone, not beside the others */
    ck_assert_int_eq(srv_region_add(regions, &desc, &region, &err), DSA_E_LIMIT);
    ck_assert_str_eq(err.field, "size");
    ck_assert_ptr_null(region);
    ck_assert_int_eq(released.n, 0); /* a mapping that was refused stays the caller's */
    ck_assert_uint_eq(srv_regions_bytes(regions), 2 * SIZE);
    ck_assert_int_eq(remove_region(regions, 1, &is_gone), DSA_OK);
    add(regions, 4);
    srv_regions_destroy(regions);
    ck_assert_int_eq(released.n, 3);
}
END_TEST

START_TEST(unregister_unused_releases_at_once)
{
    struct srv_regions *regions = new_regions(4, 1 << 20);
    bool is_gone = false;

    add(regions, 1);
    ck_assert_int_eq(remove_region(regions, 1, &is_gone), DSA_OK);
    ck_assert(is_gone);
    ck_assert_int_eq(released.n, 1);
    ck_assert_int_eq(released.last_id[SRV_REGION_ID_BYTES - 1], 1);
    ck_assert_ptr_eq(released.last_map, mapping);
    ck_assert_int_eq(remove_region(regions, 1, &is_gone), DSA_E_NOT_FOUND);
    ck_assert_int_eq(released.n, 1);
    srv_regions_destroy(regions);
    ck_assert_int_eq(released.n, 1);
}
END_TEST

/* IPC-01: accepted at once, the request finishes on the old mapping, the id is free at once. */
START_TEST(unregister_while_used_waits_for_the_last_user)
{
    struct srv_regions *regions = new_regions(1, 1 << 20);
    struct srv_region *own = add(regions, 2), *one, *two;
    uint8_t id[SRV_REGION_ID_BYTES];
    bool is_gone = true;
    void *ptr;

    memcpy(id, own->id, sizeof(id));
    ck_assert_int_eq(srv_region_get(regions, SESSION, id, 16, 0, SIZE, true, "q", &one, &ptr, NULL), DSA_OK);
    ck_assert_int_eq(srv_region_get(regions, SESSION, id, 16, 0, SIZE, true, "out", &two, &ptr, NULL),
                     DSA_OK);
    ck_assert_int_eq(remove_region(regions, 2, &is_gone), DSA_OK);
    ck_assert(!is_gone);
    ck_assert(own->pending);
    ck_assert_int_eq(get(regions, 2, 0, 1, &ptr, NULL), DSA_E_NOT_FOUND);
    ck_assert_int_eq(remove_region(regions, 2, &is_gone), DSA_E_NOT_FOUND);
    ck_assert_uint_eq(srv_regions_count(regions), 1);
    ck_assert_uint_eq(srv_regions_bytes(regions), SIZE);
    add(regions, 2); /* the same id, and room for the session, at once */
    memset(ptr, 1, SIZE);
    srv_region_put(regions, one);
    ck_assert_int_eq(released.n, 0);
    srv_region_put(regions, two);
    ck_assert_int_eq(released.n, 1);
    ck_assert_uint_eq(srv_regions_count(regions), 1);
    srv_regions_destroy(regions);
    ck_assert_int_eq(released.n, 2);
}
END_TEST

/* IPC-01: register, use, unregister at once, answer; the count is flat afterwards. */
START_TEST(ten_thousand_uses_leave_nothing)
{
    struct srv_regions *regions = new_regions(1, SIZE);
    struct srv_region *region;
    bool is_gone;
    void *ptr;

    for (int i = 0; i < 10000; i++) {
        struct srv_region *own = add(regions, i % 256);

        ck_assert_int_eq(srv_region_get(regions, SESSION, own->id, 16, 0, 1, false, "q", &region, &ptr, NULL),
                         DSA_OK);
        ck_assert_int_eq(remove_region(regions, i % 256, &is_gone), DSA_OK);
        ck_assert(!is_gone);
        srv_region_put(regions, region);
        ck_assert_uint_eq(srv_regions_bytes(regions), 0);
    }
    ck_assert_int_eq(released.n, 10000);
    srv_regions_destroy(regions);
}
END_TEST

/* IPC-01: a client that is killed in the middle of a request. */
START_TEST(a_session_that_ends_drops_its_regions)
{
    struct srv_regions *regions = new_regions(8, 1 << 20);
    struct srv_region *used = add(regions, 1), desc = desc_of(9, STRANGER), *other, *region;
    void *ptr;

    add(regions, 2);
    add(regions, 3);
    ck_assert_int_eq(srv_region_add(regions, &desc, &other, NULL), DSA_OK);
    ck_assert_int_eq(srv_region_get(regions, SESSION, used->id, 16, 0, 1, false, "q", &region, &ptr, NULL),
                     DSA_OK);
    ck_assert_uint_eq(srv_regions_drop_session(regions, SESSION), 3);
    ck_assert_int_eq(released.n, 2);
    ck_assert_uint_eq(srv_regions_drop_session(regions, SESSION), 0);
    ck_assert_uint_eq(srv_regions_count(regions), 2);
    srv_region_put(regions, region);
    ck_assert_int_eq(released.n, 3);
    ck_assert_uint_eq(srv_regions_count(regions), 1);
    srv_regions_destroy(regions);
    ck_assert_int_eq(released.n, 4);
}
END_TEST

START_TEST(a_use_given_back_twice_ends_the_process)
{
    struct srv_regions *regions = new_regions(8, 1 << 20);

    srv_region_put(regions, add(regions, 1));
}
END_TEST

static const char *scenario(void)
{
    struct srv_regions *regions = NULL;
    struct srv_region *region = NULL;

    TRY(srv_regions_create(40, 1 << 20, NULL, NULL, &regions), regions == NULL);
    for (int i = 0; i < 40; i++) {
        struct srv_region desc = desc_of(i, (uint64_t)i / 2);

        region = NULL;
        TRY(srv_region_add(regions, &desc, &region, NULL),
            region == NULL && srv_regions_count(regions) == (uint32_t)i
                && srv_regions_bytes(regions) == (uint64_t)i * SIZE);
    }
    NEED(srv_regions_drop_session(regions, 3) == 2);
    srv_regions_destroy(regions);
    return NULL;
}

START_TEST(any_allocation_may_fail)
{
    kit_sweep(scenario);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("handle");
    TCase *tc = tcase_create("handle");

    (void)max;
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, bad_limits_are_refused);
    tcase_add_test(tc, slices_stay_inside);
    tcase_add_test(tc, read_only_is_not_written);
    tcase_add_test(tc, only_the_owner_finds_a_region);
    tcase_add_test(tc, limits_hold);
    tcase_add_test(tc, the_limit_of_a_session_can_change);
    tcase_add_test(tc, unregister_unused_releases_at_once);
    tcase_add_test(tc, unregister_while_used_waits_for_the_last_user);
    tcase_add_test(tc, ten_thousand_uses_leave_nothing);
    tcase_add_test(tc, a_session_that_ends_drops_its_regions);
    tcase_add_test_raise_signal(tc, a_use_given_back_twice_ends_the_process, SIGABRT);
    tcase_add_test(tc, any_allocation_may_fail);
    suite_add_tcase(suite, tc);
    suites_p[0] = suite;
    return 1;
}
