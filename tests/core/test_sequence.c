/* sequence: pages are shared when they are full, copied before two could write them, and all come back.
 * Includes the modules themselves for the two tests that must reach into them: generations that run out, and the
 * last page of the largest pool. */
#include "server/core/kvpool.c"
#include "server/core/sequence.c"

#include "kit.h"
#include "test_main.h"
#include "world.h"

#define N_LAYERS 3u
#define ROWS     ((int)PAGE_TOKENS)
#define SESSION  UINT64_C(11)
#define STRANGER UINT64_C(12)
#define ANY      UINT64_MAX

static const struct srv_seqset_config roomy = {
    .n_layers = N_LAYERS, .max_sequences = 64, .max_per_session = 64, .max_tokens = 1000};

static uint64_t create(struct world *world)
{
    uint64_t id;

    ck_assert_int_eq(srv_sequence_create(world->set, SESSION, &id, NULL), DSA_OK);
    return id;
}

static struct srv_append append_of(uint64_t id, uint32_t layer, uint32_t n_layers, uint32_t n_tokens)
{
    return (struct srv_append){SESSION, id, layer, n_layers, n_tokens, ANY};
}

/* Appends to layers [layer, layer + n_layers) and returns how many page copies that took. */
static uint32_t append_layers(struct world *world, uint64_t id, uint32_t layer, uint32_t n_layers, uint32_t n)
{
    struct srv_append append = append_of(id, layer, n_layers, n);
    struct srv_page_copy copy;
    int32_t slots[1000];
    uint32_t n_copies;

    ck_assert_int_eq(srv_sequence_append_begin(world->set, &append, slots, &copy, &n_copies, NULL), DSA_OK);
    srv_sequence_append_commit(world->set, &append, NULL);
    return n_copies;
}

static uint32_t append_all(struct world *world, uint64_t id, uint32_t n)
{
    return append_layers(world, id, 0, N_LAYERS, n);
}

static dsa_status try_append(struct world *world, struct srv_append append, struct srv_err *err)
{
    struct srv_page_copy copy;
    int32_t slots[1000];
    uint32_t n_copies;
    dsa_status status = srv_sequence_append_begin(world->set, &append, slots, &copy, &n_copies, err);

    if (status == DSA_OK)
        srv_sequence_append_abort(world->set, &append);
    return status;
}

static uint64_t fork_at(struct world *world, uint64_t id, uint64_t n_tokens, uint32_t *n_copies_p)
{
    struct srv_page_copy copy;
    uint64_t fork;

    ck_assert_int_eq(srv_sequence_fork(world->set, SESSION, id, n_tokens, &fork, &copy, n_copies_p, NULL),
                     DSA_OK);
    return fork;
}

static struct srv_seq_view view_of(struct world *world, uint64_t id)
{
    struct srv_seq_view view;

    ck_assert_int_eq(srv_sequence_describe(world->set, SESSION, id, &view, NULL), DSA_OK);
    return view;
}

static void release(struct world *world, uint64_t id)
{
    ck_assert_int_eq(srv_sequence_release(world->set, SESSION, id, NULL), DSA_OK);
}

static void truncate_to(struct world *world, uint64_t id, uint64_t n_tokens)
{
    ck_assert_int_eq(srv_sequence_truncate(world->set, SESSION, id, n_tokens, NULL), DSA_OK);
}

/* ---- ids and owners
 * ----------------------------------------------------------------------------------------- */

START_TEST(bad_limits_are_refused)
{
    struct world world = new_world(4, &roomy);
    struct srv_seqset_config config;
    struct srv_seqset *set = NULL;

    for (int i = 0; i < 5; i++) {
        config = roomy;
        config.n_layers = i == 0 ? 0 : config.n_layers;
        config.max_sequences = i == 1 ? 0 : config.max_sequences;
        config.max_per_session = i == 2 ? 0 : config.max_per_session;
        config.max_tokens = i == 3 ? 0 : i == 4 ? (UINT64_C(1) << 31) + 1 : config.max_tokens;
        ck_assert_int_eq(srv_seqset_create(&config, world.pool, &set), DSA_E_BAD_REQUEST);
    }
    ck_assert_ptr_null(set);
    srv_seqset_destroy(NULL);
    end_world(&world);
}
END_TEST

START_TEST(a_new_sequence_is_empty)
{
    struct world world = new_world(4, &roomy);
    uint64_t id = create(&world);
    struct srv_seq_view view = view_of(&world, id);

    ck_assert_uint_ne(id, 0);
    ck_assert_uint_eq(view.id, id);
    ck_assert_uint_eq(view.session, SESSION);
    ck_assert_uint_eq(view.n_table, 0);
    ck_assert_uint_eq(view.n_tokens, 0);
    ck_assert_uint_eq(srv_seqset_count(world.set), 1);
    end_world(&world);
}
END_TEST

/* POOL-01: a second release, and any other use of an id that is gone, finds nothing and changes nothing. */
START_TEST(a_released_id_is_not_found_again)
{
    struct world world = new_world(4, &roomy);
    uint64_t first = create(&world), second, fork = 77;
    struct srv_seq_view view;
    struct srv_page_copy copy;
    uint32_t n_copies;

    append_all(&world, first, 70);
    release(&world, first);
    ck_assert_int_eq(srv_sequence_release(world.set, SESSION, first, NULL), DSA_E_NOT_FOUND);
    second = create(&world); /* in the same place */
    ck_assert_uint_eq((uint32_t)second, (uint32_t)first);
    ck_assert_uint_ne(second, first);
    append_all(&world, second, 1);
    ck_assert_int_eq(srv_sequence_release(world.set, SESSION, first, NULL), DSA_E_NOT_FOUND);
    ck_assert_int_eq(srv_sequence_find(world.set, SESSION, first, &view, NULL), DSA_E_NOT_FOUND);
    ck_assert_int_eq(srv_sequence_describe(world.set, SESSION, first, &view, NULL), DSA_E_NOT_FOUND);
    ck_assert_int_eq(srv_sequence_truncate(world.set, SESSION, first, 0, NULL), DSA_E_NOT_FOUND);
    ck_assert_int_eq(try_append(&world, append_of(first, 0, 1, 1), NULL), DSA_E_NOT_FOUND);
    ck_assert_int_eq(srv_sequence_fork(world.set, SESSION, first, 0, &fork, &copy, &n_copies, NULL),
                     DSA_E_NOT_FOUND);
    ck_assert_uint_eq(fork, 77);
    ck_assert_uint_eq(view_of(&world, second).n_tokens, 1);
    ck_assert_uint_eq(n_used(&world), 1);
    end_world(&world);
}
END_TEST

/* POOL-01: after all of that, two sequences share no page. */
START_TEST(two_sequences_after_a_double_release_share_no_page)
{
    struct world world = new_world(4, &roomy);
    uint64_t a = create(&world), b, c;

    append_all(&world, a, 128);
    release(&world, a);
    ck_assert_int_eq(srv_sequence_release(world.set, SESSION, a, NULL), DSA_E_NOT_FOUND);
    b = create(&world);
    c = create(&world);
    append_all(&world, b, 128);
    append_all(&world, c, 128);
    for (uint32_t i = 0; i < 2; i++)
        for (uint32_t k = 0; k < 2; k++)
            ck_assert_int_ne(view_of(&world, b).table[i], view_of(&world, c).table[k]);
    end_world(&world);
}
END_TEST

START_TEST(another_sessions_id_is_not_found_just_as_none)
{
    struct world world = new_world(4, &roomy);
    uint64_t id = create(&world);
    struct srv_err foreign, unknown;
    struct srv_seq_view view;

    ck_assert_int_eq(srv_sequence_find(world.set, STRANGER, id, &view, &foreign), DSA_E_NOT_FOUND);
    ck_assert_int_eq(srv_sequence_find(world.set, STRANGER, UINT64_C(5) << 32, &view, &unknown),
                     DSA_E_NOT_FOUND);
    ck_assert_str_eq(foreign.text, unknown.text);
    ck_assert_str_eq(foreign.field, unknown.field);
    ck_assert_int_eq(srv_sequence_find(world.set, SESSION, 0, &view, NULL), DSA_E_NOT_FOUND);
    ck_assert_int_eq(srv_sequence_find(world.set, SESSION, UINT64_MAX, &view, NULL), DSA_E_NOT_FOUND);
    ck_assert_int_eq(srv_sequence_release(world.set, STRANGER, id, NULL), DSA_E_NOT_FOUND);
    ck_assert_uint_eq(srv_seqset_count(world.set), 1);
    end_world(&world);
}
END_TEST

START_TEST(ids_never_come_back)
{
    enum { N = 2000 };
    static uint64_t seen[N];
    struct world world = new_world(4, &roomy);
    uint64_t held = create(&world);

    for (int i = 0; i < N; i++) {
        seen[i] = create(&world);
        for (int k = 0; k < i; k++)
            if (seen[k] == seen[i])
                ck_abort_msg("id %d came back as %d", k, i);
        ck_assert_uint_ne(seen[i], held);
        release(&world, seen[i]);
    }
    end_world(&world);
}
END_TEST

START_TEST(a_place_whose_generations_are_used_up_is_left_alone)
{
    struct world world = new_world(4, &roomy);
    uint64_t id = create(&world), last;

    release(&world, id);
    world.set->slots[0].generation = UINT32_MAX;
    last = create(&world);
    ck_assert_uint_eq(last, UINT64_C(0xffffffff00000000));
    release(&world, last);
    id = create(&world);
    ck_assert_uint_eq((uint32_t)id, 1);
    ck_assert_int_eq(srv_sequence_release(world.set, SESSION, last, NULL), DSA_E_NOT_FOUND);
    ck_assert_int_eq(srv_sequence_release(world.set, SESSION, 0, NULL), DSA_E_NOT_FOUND);
    end_world(&world);
}
END_TEST

START_TEST(limits_hold_for_the_server_and_for_each_session)
{
    struct srv_seqset_config config = {
        .n_layers = 1, .max_sequences = 3, .max_per_session = 2, .max_tokens = 100};
    struct world world = new_world(4, &config);
    struct srv_page_copy copy;
    uint64_t a = create(&world), id = 0;
    uint32_t n_copies;
    struct srv_err err;

    create(&world);
    ck_assert_int_eq(srv_sequence_create(world.set, SESSION, &id, &err), DSA_E_LIMIT);
    ck_assert_str_eq(err.field, "max_sequences_per_session");
    ck_assert_int_eq(srv_sequence_fork(world.set, SESSION, a, 0, &id, &copy, &n_copies, &err), DSA_E_LIMIT);
    ck_assert_uint_eq(id, 0);
    ck_assert_int_eq(srv_sequence_create(world.set, STRANGER, &id, &err), DSA_OK);
    ck_assert_int_eq(srv_sequence_create(world.set, STRANGER, &id, &err), DSA_E_LIMIT);
    ck_assert_str_eq(err.field, "max_sequences");
    release(&world, a);
    ck_assert_int_eq(srv_sequence_create(world.set, SESSION, &id, &err), DSA_OK);
    end_world(&world);
}
END_TEST

START_TEST(a_session_that_ends_takes_only_its_own)
{
    struct world world = new_world(16, &roomy);
    uint64_t a = create(&world), other;
    uint32_t n_copies;

    ck_assert_int_eq(srv_sequence_create(world.set, STRANGER, &other, NULL), DSA_OK);
    append_all(&world, a, 200);
    fork_at(&world, a, 130, &n_copies);
    create(&world);
    ck_assert_uint_eq(srv_seqset_release_session(world.set, SESSION), 3);
    ck_assert_uint_eq(srv_seqset_count(world.set), 1);
    ck_assert_uint_eq(n_used(&world), 0);
    ck_assert_uint_eq(srv_seqset_release_session(world.set, SESSION), 0);
    ck_assert_uint_eq(srv_seqset_release_session(world.set, 999), 0);
    ck_assert_int_eq(srv_sequence_release(world.set, STRANGER, other, NULL), DSA_OK);
    end_world(&world);
}
END_TEST

/* ---- append
 * ------------------------------------------------------------------------------------------------- */

START_TEST(slots_follow_the_table)
{
    struct world world = new_world(8, &roomy);
    uint64_t id = create(&world), n_tokens;
    struct srv_append append = append_of(id, 0, N_LAYERS, 150);
    struct srv_page_copy copy;
    int32_t slots[150];
    uint32_t n_copies = 9;

    append_all(&world, id, 10);
    ck_assert_int_eq(srv_sequence_append_begin(world.set, &append, slots, &copy, &n_copies, NULL), DSA_OK);
    ck_assert_uint_eq(n_copies, 0);
    ck_assert_uint_eq(view_of(&world, id).n_tokens, 10);
    srv_sequence_append_commit(world.set, &append, &n_tokens);
    ck_assert_uint_eq(n_tokens, 160);
    ck_assert_uint_eq(view_of(&world, id).n_table, 3);
    for (int i = 0; i < 150; i++)
        ck_assert_int_eq(slots[i], view_of(&world, id).table[(10 + i) / ROWS] * ROWS + (10 + i) % ROWS);
    end_world(&world);
}
END_TEST

START_TEST(the_last_slot_of_the_largest_pool_fits)
{
    struct srv_seqset_config config = roomy;
    struct world world;
    struct srv_append append;
    struct srv_page_copy copy;
    int32_t slots[64];
    uint32_t n_copies;

    config.max_tokens = UINT64_C(1) << 31;
    world = new_world(1u << 25, &config);
    append = append_of(create(&world), 0, 1, 64);
    world.pool->n_fresh = world.pool->n_pages - 1; /* as if all others were handed out */
    ck_assert_int_eq(srv_sequence_append_begin(world.set, &append, slots, &copy, &n_copies, NULL), DSA_OK);
    ck_assert_int_eq(slots[63], INT32_MAX);
    srv_sequence_append_commit(world.set, &append, NULL);
    srv_seqset_destroy(world.set);
    srv_kvpool_destroy(world.pool);
}
END_TEST

START_TEST(layers_fill_one_after_the_other_into_the_same_pages)
{
    struct world world = new_world(8, &roomy);
    uint64_t id = create(&world);

    append_layers(&world, id, 0, 1, 100);
    ck_assert_uint_eq(n_used(&world), 2);
    ck_assert_uint_eq(view_of(&world, id).n_tokens, 0);
    append_layers(&world, id, 1, 2, 70);
    ck_assert_uint_eq(n_used(&world), 2);
    ck_assert_uint_eq(view_of(&world, id).n_tokens, 70);
    ck_assert_uint_eq(view_of(&world, id).layer_tokens[0], 100);
    append_layers(&world, id, 1, 1, 100); /* the longest now */
    ck_assert_uint_eq(n_used(&world), 3);
    end_world(&world);
}
END_TEST

START_TEST(bad_appends_are_refused_and_change_nothing)
{
    struct world world = new_world(4, &roomy);
    uint64_t id = create(&world);
    struct srv_append append;
    struct srv_err err;
    static const struct {
        uint32_t layer, n_layers, n_tokens;
        uint64_t position;
        dsa_status status;
        const char *field;
    } cases[] = {
        {N_LAYERS, 1, 1, ANY, DSA_E_BAD_RANGE, "layer"},
        {UINT32_MAX, 1, 1, ANY, DSA_E_BAD_RANGE, "layer"},
        {0, 0, 1, ANY, DSA_E_BAD_RANGE, "n_layers"},
        {1, N_LAYERS, 1, ANY, DSA_E_BAD_RANGE, "n_layers"},
        {1, UINT32_MAX, 1, ANY, DSA_E_BAD_RANGE, "n_layers"},
        {0, 2, 1, ANY, DSA_E_PRECONDITION, "n_layers"},
        {0, 1, 0, ANY, DSA_E_BAD_REQUEST, "n_tokens"}, /* GRAPH-02: no rows */
        {0, 1, 1, 9, DSA_E_PRECONDITION, "position"},
        {0, 1, 1, 0, DSA_E_PRECONDITION, "position"},
        {0, 1, 991, ANY, DSA_E_BAD_RANGE, "n_tokens"},
        {0, 1, UINT32_MAX, ANY, DSA_E_BAD_RANGE, "n_tokens"},
        {0, 1, 247, ANY, DSA_E_NO_PAGES, ""},
        {0, 1, 246, 10, DSA_OK, NULL},
        {1, 2, 1, 0, DSA_OK, NULL},
    };

    append_layers(&world, id, 0, 1, 10);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        append = append_of(id, cases[i].layer, cases[i].n_layers, cases[i].n_tokens);
        append.expected_position = cases[i].position;
        ck_assert_msg(try_append(&world, append, &err) == cases[i].status, "case %zu: %d", i, err.code);
        if (cases[i].field)
            ck_assert_str_eq(err.field, cases[i].field);
        ck_assert_uint_eq(n_used(&world), 1);
        ck_assert_uint_eq(view_of(&world, id).layer_tokens[0], 10);
    }
    end_world(&world);
}
END_TEST

START_TEST(the_length_limit_itself_is_allowed)
{
    struct world world = new_world(16, &roomy);
    uint64_t id = create(&world);

    append_all(&world, id, 999);
    append_all(&world, id, 1);
    ck_assert_int_eq(try_append(&world, append_of(id, 0, 1, 1), NULL), DSA_E_BAD_RANGE);
    end_world(&world);
}
END_TEST

/* OPS-03: an append that failed leaks no page, also the pages that another one would have filled further. */
START_TEST(abort_gives_every_page_back)
{
    struct world world = new_world(8, &roomy);
    uint64_t id = create(&world);
    struct srv_append append = append_of(id, 0, N_LAYERS, 200);
    struct srv_page_copy copy;
    int32_t slots[200];
    uint32_t n_copies;

    append_all(&world, id, 30);
    for (int i = 0; i < 100; i++) {
        int32_t page = view_of(&world, id).table[0];

        ck_assert_int_eq(srv_sequence_append_begin(world.set, &append, slots, &copy, &n_copies, NULL),
                         DSA_OK);
        ck_assert_uint_eq(n_used(&world), 4);
        srv_sequence_append_abort(world.set, &append);
        ck_assert_uint_eq(n_used(&world), 1);
        ck_assert_uint_eq(view_of(&world, id).n_table, 1);
        ck_assert_int_eq(view_of(&world, id).table[0], page);
        ck_assert_uint_eq(view_of(&world, id).n_tokens, 30);
    }
    end_world(&world);
}
END_TEST

START_TEST(abort_undoes_a_copy_on_write)
{
    struct world world = new_world(8, &roomy);
    uint64_t a = create(&world), b;
    struct srv_append append;
    struct srv_page_copy copy;
    int32_t slots[100], page;
    uint32_t n_copies;

    append_all(&world, a, 128);
    b = fork_at(&world, a, 128, &n_copies);
    truncate_to(&world, a, 70);
    page = view_of(&world, a).table[1];
    append = append_of(a, 0, 1, 100);
    ck_assert_int_eq(srv_sequence_append_begin(world.set, &append, slots, &copy, &n_copies, NULL), DSA_OK);
    ck_assert_uint_eq(n_copies, 1);
    ck_assert_int_eq(copy.src, page);
    ck_assert_int_ne(copy.dst, page);
    ck_assert_int_eq(slots[0], copy.dst * ROWS + 6);
    for (uint32_t i = 0; i < N_LAYERS; i++)
        ck_assert_uint_eq(copy.n_rows[i], 6);
    ck_assert_uint_eq(n_used(&world), 4);
    srv_sequence_append_abort(world.set, &append);
    ck_assert_int_eq(view_of(&world, a).table[1], page);
    ck_assert_int_eq(view_of(&world, b).table[1], page);
    ck_assert_uint_eq(srv_kvpool_refs(world.pool, page), 2);
    ck_assert_uint_eq(n_used(&world), 2);
    end_world(&world);
}
END_TEST

START_TEST(while_an_append_is_begun_the_sequence_stands_still)
{
    struct world world = new_world(8, &roomy);
    uint64_t id = create(&world), fork = 5;
    struct srv_append append = append_of(id, 0, 1, 100);
    struct srv_page_copy copy;
    int32_t slots[100];
    uint32_t n_copies;

    append_all(&world, id, 10);
    ck_assert_int_eq(srv_sequence_append_begin(world.set, &append, slots, &copy, &n_copies, NULL), DSA_OK);
    ck_assert_int_eq(try_append(&world, append_of(id, 1, 1, 1), NULL), DSA_E_PRECONDITION);
    ck_assert_int_eq(srv_sequence_truncate(world.set, SESSION, id, 0, NULL), DSA_E_PRECONDITION);
    ck_assert_int_eq(srv_sequence_fork(world.set, SESSION, id, 0, &fork, &copy, &n_copies, NULL),
                     DSA_E_PRECONDITION);
    srv_sequence_append_commit(world.set, &append, NULL);
    ck_assert_int_eq(try_append(&world, append_of(id, 1, 1, 1), NULL), DSA_OK);
    end_world(&world);
}
END_TEST

/* A client that dies while its append is under way: nothing is left, and commit or abort find nothing to do.
 * */
START_TEST(a_sequence_released_under_its_append_leaves_nothing)
{
    for (int is_commit = 0; is_commit < 2; is_commit++) {
        struct world world = new_world(8, &roomy);
        uint64_t a = create(&world), b, n_tokens = 99;
        struct srv_append append = append_of(a, 0, 1, 100);
        struct srv_page_copy copy;
        int32_t slots[100];
        uint32_t n_copies;

        append_all(&world, a, 128);
        b = fork_at(&world, a, 128, &n_copies);
        truncate_to(&world, a, 70);
        ck_assert_int_eq(srv_sequence_append_begin(world.set, &append, slots, &copy, &n_copies, NULL),
                         DSA_OK);
        release(&world, a);
        if (is_commit)
            srv_sequence_append_commit(world.set, &append, &n_tokens);
        else
            srv_sequence_append_abort(world.set, &append);
        ck_assert_uint_eq(n_tokens, is_commit ? 0 : 99);
        ck_assert_uint_eq(n_used(&world), 2);
        ck_assert_uint_eq(stats_of(&world).n_shared, 0);
        release(&world, b);
        end_world(&world);
    }
}
END_TEST

/* ---- fork and truncate
 * -------------------------------------------------------------------------------------- */

/* POOL-02, page counts by hand: A holds 70 tokens in 2 pages. */
START_TEST(fork_shares_full_pages_and_copies_the_partial_one)
{
    static const struct {
        uint64_t n;
        uint32_t n_copies, n_pages_more, n_shared, rows;
    } cases[] = {
        {70, 1, 1, 1, 6}, {0, 1, 1, 1, 6},   {65, 1, 1, 1, 1},
        {64, 0, 0, 1, 0}, {63, 1, 1, 0, 63}, {1, 1, 1, 0, 1},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct world world = new_world(8, &roomy);
        uint64_t a = create(&world), b;
        struct srv_page_copy copy = {-1, -1, NULL};
        uint32_t n_copies;
        struct srv_seq_view view;

        append_all(&world, a, 70);
        ck_assert_int_eq(srv_sequence_fork(world.set, SESSION, a, cases[i].n, &b, &copy, &n_copies, NULL),
                         DSA_OK);
        view = view_of(&world, b);
        ck_assert_uint_eq(n_copies, cases[i].n_copies);
        ck_assert_uint_eq(n_used(&world), 2 + cases[i].n_pages_more);
        ck_assert_uint_eq(view.n_tokens, cases[i].n ? cases[i].n : 70);
        ck_assert_uint_eq(view.n_shared, cases[i].n_shared);
        ck_assert_uint_eq(view_of(&world, a).n_shared, cases[i].n_shared);
        if (n_copies) {
            ck_assert_int_eq(copy.src, view_of(&world, a).table[view.n_table - 1]);
            ck_assert_int_eq(copy.dst, view.table[view.n_table - 1]);
            for (uint32_t l = 0; l < N_LAYERS; l++)
                ck_assert_uint_eq(copy.n_rows[l], cases[i].rows);
        }
        /* Both go on writing without a further copy, in any order. */
        ck_assert_uint_eq(append_all(&world, i % 2 ? a : b, 1), 0);
        ck_assert_uint_eq(append_all(&world, i % 2 ? b : a, 1), 0);
        release(&world, i % 2 ? a : b);
        end_world(&world);
    }
}
END_TEST

START_TEST(fork_of_an_empty_sequence_is_empty)
{
    struct world world = new_world(1, &roomy);
    uint64_t a = create(&world), b;
    uint32_t n_copies = 9;

    b = fork_at(&world, a, 0, &n_copies);
    ck_assert_uint_eq(n_copies, 0);
    ck_assert_uint_eq(view_of(&world, b).n_tokens, 0);
    end_world(&world);
}
END_TEST

START_TEST(fork_takes_what_every_layer_has)
{
    struct world world = new_world(8, &roomy);
    uint64_t a = create(&world), b;
    struct srv_page_copy copy;
    uint32_t n_copies;
    struct srv_err err;

    append_layers(&world, a, 0, 1, 200);
    append_layers(&world, a, 1, 2, 80);
    b = fork_at(&world, a, 0, &n_copies);
    ck_assert_uint_eq(view_of(&world, b).layer_tokens[0], 80);
    ck_assert_uint_eq(view_of(&world, b).n_table, 2);
    ck_assert_uint_eq(n_used(&world), 5);
    ck_assert_int_eq(srv_sequence_fork(world.set, SESSION, a, 81, &b, &copy, &n_copies, &err),
                     DSA_E_BAD_RANGE);
    ck_assert_str_eq(err.field, "n_tokens");
    ck_assert_int_eq(srv_sequence_fork(world.set, SESSION, a, UINT64_MAX, &b, &copy, &n_copies, &err),
                     DSA_E_BAD_RANGE);
    end_world(&world);
}
END_TEST

/* POOL-02: a fork under a full pool fails cleanly and leaves its source all the room that it had. */
START_TEST(fork_under_a_full_pool_leaves_the_source_usable)
{
    struct world world = new_world(2, &roomy);
    uint64_t a = create(&world), b = 7;
    struct srv_page_copy copy;
    uint32_t n_copies;

    append_all(&world, a, 70);
    ck_assert_int_eq(srv_sequence_fork(world.set, SESSION, a, 70, &b, &copy, &n_copies, NULL),
                     DSA_E_NO_PAGES);
    ck_assert_uint_eq(b, 7);
    ck_assert_uint_eq(srv_seqset_count(world.set), 1);
    ck_assert_uint_eq(view_of(&world, a).n_shared, 0);
    append_all(&world, a, 58);
    /* On the page edge a fork needs no page, and the source none of the fork's. */
    b = fork_at(&world, a, 128, &n_copies);
    ck_assert_uint_eq(view_of(&world, b).n_shared, 2);
    end_world(&world);
}
END_TEST

START_TEST(a_shared_page_made_partial_is_copied_before_it_is_written)
{
    struct world world = new_world(8, &roomy);
    uint64_t a = create(&world), b;
    uint32_t n_copies;
    int32_t shared;

    append_all(&world, a, 128);
    b = fork_at(&world, a, 0, &n_copies);
    shared = view_of(&world, b).table[1];
    truncate_to(&world, a, 70);
    ck_assert_uint_eq(append_layers(&world, a, 0, 1, 1), 1);
    ck_assert_int_ne(view_of(&world, a).table[1], shared);
    ck_assert_int_eq(view_of(&world, b).table[1], shared);
    ck_assert_uint_eq(append_layers(&world, a, 1, 2, 1), 0); /* the page is a's own by now */
    ck_assert_uint_eq(n_used(&world), 3);
    end_world(&world);
}
END_TEST

START_TEST(a_page_that_the_other_holder_left_is_written_in_place)
{
    struct world world = new_world(8, &roomy);
    uint64_t a = create(&world), b;
    uint32_t n_copies;
    int32_t page;

    append_all(&world, a, 128);
    b = fork_at(&world, a, 0, &n_copies);
    truncate_to(&world, a, 70);
    page = view_of(&world, a).table[1];
    release(&world, b);
    ck_assert_uint_eq(append_all(&world, a, 1), 0);
    ck_assert_int_eq(view_of(&world, a).table[1], page);
    ck_assert_uint_eq(n_used(&world), 2);
    end_world(&world);
}
END_TEST

START_TEST(copy_on_write_under_a_full_pool_changes_nothing)
{
    struct world world = new_world(2, &roomy);
    uint64_t a = create(&world);
    uint32_t n_copies;

    append_all(&world, a, 128);
    fork_at(&world, a, 0, &n_copies);
    truncate_to(&world, a, 70);
    ck_assert_int_eq(try_append(&world, append_of(a, 0, 1, 1), NULL), DSA_E_NO_PAGES);
    ck_assert_uint_eq(view_of(&world, a).n_shared, 2);
    ck_assert_uint_eq(view_of(&world, a).n_tokens, 70);
    end_world(&world);
}
END_TEST

START_TEST(truncate_frees_pages_behind_the_longest_layer)
{
    struct world world = new_world(8, &roomy);
    uint64_t id = create(&world);
    struct srv_err err;

    append_layers(&world, id, 0, 1, 300);
    append_layers(&world, id, 1, 1, 100);
    ck_assert_uint_eq(n_used(&world), 5);
    ck_assert_int_eq(srv_sequence_truncate(world.set, SESSION, id, 301, &err), DSA_E_BAD_RANGE);
    truncate_to(&world, id, 300);
    ck_assert_uint_eq(n_used(&world), 5);
    truncate_to(&world, id, 129);
    ck_assert_uint_eq(n_used(&world), 3);
    ck_assert_uint_eq(view_of(&world, id).layer_tokens[0], 129);
    ck_assert_uint_eq(view_of(&world, id).layer_tokens[1], 100);
    ck_assert_uint_eq(view_of(&world, id).layer_tokens[2], 0);
    truncate_to(&world, id, 64);
    ck_assert_uint_eq(n_used(&world), 1);
    truncate_to(&world, id, 0);
    ck_assert_uint_eq(n_used(&world), 0);
    append_all(&world, id, 1);
    end_world(&world);
}
END_TEST

/* ---- failing allocations
 * ------------------------------------------------------------------------------------ */

static bool is_state(const struct srv_kvpool *pool, const struct srv_seqset *set, uint64_t n_used_pages,
                     uint32_t n_sequences)
{
    struct srv_kvpool_stats stats;

    srv_kvpool_stats(pool, &stats);
    return stats.n_pages - stats.n_free == n_used_pages && stats.n_shared == 0
           && set->n_sequences == n_sequences;
}

static const char *scenario(void)
{
    struct srv_kvpool *pool = NULL;
    struct srv_seqset *set = NULL;
    uint64_t ids[40] = {0}, fork = 0;
    struct srv_page_copy copy;
    struct srv_append append;
    static int32_t slots[1000];
    uint32_t n_copies;
    dsa_status status;

    TRY(srv_kvpool_create(16, &pool), pool == NULL);
    TRY(srv_seqset_create(&roomy, pool, &set), set == NULL);
    for (uint32_t i = 0; i < 40; i++) /* many sessions and slots: both tables grow */
        TRY(srv_sequence_create(set, i / 2, &ids[i], NULL), ids[i] == 0 && is_state(pool, set, 0, i));
    append = (struct srv_append){0, ids[0], 0, N_LAYERS, 100, ANY};
    TRY(srv_sequence_append_begin(set, &append, slots, &copy, &n_copies, NULL), is_state(pool, set, 0, 40));
    srv_sequence_append_commit(set, &append, NULL);
    append.n_tokens = 800; /* a longer table */
    TRY(srv_sequence_append_begin(set, &append, slots, &copy, &n_copies, NULL), is_state(pool, set, 2, 40));
    srv_sequence_append_commit(set, &append, NULL);
    TRY(srv_sequence_fork(set, 0, ids[0], 0, &fork, &copy, &n_copies, NULL),
        fork == 0 && is_state(pool, set, 15, 40));
    status = srv_sequence_fork(set, 0, ids[0], 0, &ids[1], &copy, &n_copies, NULL); /* the pool is full now */
    if (status == DSA_E_NO_MEMORY)
        status = srv_sequence_fork(set, 0, ids[0], 0, &ids[1], &copy, &n_copies, NULL);
    NEED(status == DSA_E_NO_PAGES && set->n_sequences == 41);
    NEED(srv_sequence_release(set, 0, fork, NULL) == DSA_OK);
    NEED(srv_seqset_release_session(set, 0) == 2);
    NEED(is_state(pool, set, 0, 38));
    srv_seqset_destroy(set);
    srv_kvpool_destroy(pool);
    return NULL;
}

START_TEST(any_allocation_may_fail)
{
    kit_sweep(scenario);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("sequence");
    TCase *ids = tcase_create("ids"), *appends = tcase_create("append"), *forks = tcase_create("fork");
    TCase *memory = tcase_create("memory");

    (void)max;
    tcase_set_timeout(appends, 60);
    tcase_add_test(ids, bad_limits_are_refused);
    tcase_add_test(ids, a_new_sequence_is_empty);
    tcase_add_test(ids, a_released_id_is_not_found_again);
    tcase_add_test(ids, two_sequences_after_a_double_release_share_no_page);
    tcase_add_test(ids, another_sessions_id_is_not_found_just_as_none);
    tcase_add_test(ids, ids_never_come_back);
    tcase_add_test(ids, a_place_whose_generations_are_used_up_is_left_alone);
    tcase_add_test(ids, limits_hold_for_the_server_and_for_each_session);
    tcase_add_test(ids, a_session_that_ends_takes_only_its_own);
    tcase_add_test(appends, slots_follow_the_table);
    tcase_add_test(appends, the_last_slot_of_the_largest_pool_fits);
    tcase_add_test(appends, layers_fill_one_after_the_other_into_the_same_pages);
    tcase_add_test(appends, bad_appends_are_refused_and_change_nothing);
    tcase_add_test(appends, the_length_limit_itself_is_allowed);
    tcase_add_test(appends, abort_gives_every_page_back);
    tcase_add_test(appends, abort_undoes_a_copy_on_write);
    tcase_add_test(appends, while_an_append_is_begun_the_sequence_stands_still);
    tcase_add_test(appends, a_sequence_released_under_its_append_leaves_nothing);
    tcase_add_test(forks, fork_shares_full_pages_and_copies_the_partial_one);
    tcase_add_test(forks, fork_of_an_empty_sequence_is_empty);
    tcase_add_test(forks, fork_takes_what_every_layer_has);
    tcase_add_test(forks, fork_under_a_full_pool_leaves_the_source_usable);
    tcase_add_test(forks, a_shared_page_made_partial_is_copied_before_it_is_written);
    tcase_add_test(forks, a_page_that_the_other_holder_left_is_written_in_place);
    tcase_add_test(forks, copy_on_write_under_a_full_pool_changes_nothing);
    tcase_add_test(forks, truncate_frees_pages_behind_the_longest_layer);
    tcase_add_test(memory, any_allocation_may_fail);
    suite_add_tcase(suite, ids);
    suite_add_tcase(suite, appends);
    suite_add_tcase(suite, forks);
    suite_add_tcase(suite, memory);
    suites_p[0] = suite;
    return 1;
}
