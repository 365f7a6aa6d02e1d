/* world.h - a pool and its sequences, for tests that need both. */
#ifndef TESTS_CORE_WORLD_H
#define TESTS_CORE_WORLD_H

#include <check.h>

#include "server/core/sequence.h"

struct world {
    struct srv_kvpool *pool;
    struct srv_seqset *set;
};

static inline struct world new_world(uint32_t n_pages, const struct srv_seqset_config *config)
{
    struct world world;

    ck_assert_int_eq(srv_kvpool_create(n_pages, &world.pool), DSA_OK);
    ck_assert_int_eq(srv_seqset_create(config, world.pool, &world.set), DSA_OK);
    return world;
}

static inline struct srv_kvpool_stats stats_of(const struct world *world)
{
    struct srv_kvpool_stats stats;

    srv_kvpool_stats(world->pool, &stats);
    return stats;
}

static inline uint64_t n_used(const struct world *world)
{
    return stats_of(world).n_pages - stats_of(world).n_free;
}

static inline void end_world(struct world *world)
{
    srv_seqset_destroy(world->set);
    ck_assert_uint_eq(n_used(world), 0);
    ck_assert_uint_eq(stats_of(world).n_refs, 0);
    srv_kvpool_destroy(world->pool);
}

#endif /* TESTS_CORE_WORLD_H */
