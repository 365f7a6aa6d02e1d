/* sequence: a long random life against a model.
 *
 * The model knows tokens and whole pages with a count of holders, no ids and no tables: what a page count
 * must be follows from FORMATS and the header's promises alone. The shadow pool holds one byte a token and
 * layer. */
#include "server/core/sequence.h"

#include <string.h>

#include "kit.h"
#include "test_main.h"
#include "world.h"

#define N_LAYERS 3u
#define ANY      UINT64_MAX

enum { POOL_PAGES = 14, MAX_SEQS = 10, MAX_LEN = 400, STEPS = 6000, POISON = 0xee };

struct model_page {
    uint32_t n_holders;
};

struct model_seq {
    bool is_live;
    uint64_t session;
    uint64_t id;
    uint32_t n_pages;
    struct model_page *pages[MAX_LEN / 64 + 1];
    uint32_t n_tokens[N_LAYERS];
    uint8_t tokens[N_LAYERS][MAX_LEN];
};

struct model {
    struct kit_rng rng;
    struct world world;
    struct model_page pages[POOL_PAGES];
    struct model_seq seqs[MAX_SEQS];
    uint8_t shadow[POOL_PAGES][N_LAYERS][64];
    uint64_t n_copies_seen, n_refused_seen, n_aborted_seen;
};

static uint32_t model_free(const struct model *model)
{
    uint32_t n = 0;

    for (int i = 0; i < POOL_PAGES; i++)
        n += model->pages[i].n_holders == 0;
    return n;
}

static struct model_page *model_take(struct model *model)
{
    for (int i = 0; i < POOL_PAGES; i++)
        if (model->pages[i].n_holders == 0) {
            model->pages[i].n_holders = 1;
            return &model->pages[i];
        }
    ck_abort_msg("the model has no page left");
    return NULL;
}

static uint32_t model_min(const struct model_seq *seq)
{
    uint32_t n = UINT32_MAX;

    for (uint32_t l = 0; l < N_LAYERS; l++)
        n = seq->n_tokens[l] < n ? seq->n_tokens[l] : n;
    return n;
}

static uint32_t model_max(const struct model_seq *seq)
{
    uint32_t n = 0;

    for (uint32_t l = 0; l < N_LAYERS; l++)
        n = seq->n_tokens[l] > n ? seq->n_tokens[l] : n;
    return n;
}

static void model_drop_pages(struct model_seq *seq, uint32_t n_keep)
{
    while (seq->n_pages > n_keep)
        seq->pages[--seq->n_pages]->n_holders--;
}

static struct model_seq *model_pick(struct model *model, bool is_live)
{
    for (int i = 0; i < 30; i++) {
        struct model_seq *seq = &model->seqs[kit_below(&model->rng, MAX_SEQS)];

        if (seq->is_live == is_live)
            return seq;
    }
    return NULL;
}

/* Only the rows listed are copied; the rest of the new page is poison that nobody may read. */
static void run_copy(struct model *model, const struct srv_page_copy *copy)
{
    memset(model->shadow[copy->dst], POISON, sizeof(model->shadow[0]));
    for (uint32_t l = 0; l < N_LAYERS; l++)
        memcpy(model->shadow[copy->dst][l], model->shadow[copy->src][l], copy->n_rows[l]);
    model->n_copies_seen++;
}

static void step_create(struct model *model)
{
    struct model_seq *seq = model_pick(model, false);

    if (!seq)
        return;
    memset(seq, 0, sizeof(*seq));
    seq->is_live = true;
    seq->session = 1 + kit_below(&model->rng, 2);
    ck_assert_int_eq(srv_sequence_create(model->world.set, seq->session, &seq->id, NULL), DSA_OK);
}

static void step_fork(struct model *model)
{
    struct model_seq *source = model_pick(model, true), *fork = model_pick(model, false);
    uint32_t n, n_full, n_copies = 9;
    uint64_t asked, id;
    struct srv_page_copy copy;
    dsa_status status;

    if (!source || !fork)
        return;
    asked = kit_below(&model->rng, model_min(source) + 3);
    n = asked ? (uint32_t)asked : model_min(source);
    n_full = n / 64;
    status =
        srv_sequence_fork(model->world.set, source->session, source->id, asked, &id, &copy, &n_copies, NULL);
    if (n > model_min(source)) {
        ck_assert_int_eq(status, DSA_E_BAD_RANGE);
        return;
    }
    if (n % 64 && model_free(model) == 0) {
        ck_assert_int_eq(status, DSA_E_NO_PAGES);
        model->n_refused_seen++;
        return;
    }
    ck_assert_int_eq(status, DSA_OK);
    ck_assert_uint_eq(n_copies, n % 64 ? 1 : 0);
    if (n_copies)
        run_copy(model, &copy);
    memset(fork, 0, sizeof(*fork));
    fork->is_live = true;
    fork->session = source->session;
    fork->id = id;
    for (; fork->n_pages < n_full; fork->n_pages++) {
        fork->pages[fork->n_pages] = source->pages[fork->n_pages];
        fork->pages[fork->n_pages]->n_holders++;
    }
    if (n % 64)
        fork->pages[fork->n_pages++] = model_take(model);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        fork->n_tokens[l] = n;
        memcpy(fork->tokens[l], source->tokens[l], n);
    }
}

/* Pages the model says an append takes: new ones, and one for a shared page that would be written. */
static uint32_t model_cost(const struct model_seq *seq, uint32_t position, uint32_t n, bool *has_copy_p)
{
    uint32_t n_needed = (position + n + 63) / 64;

    *has_copy_p = position / 64 < seq->n_pages && seq->pages[position / 64]->n_holders > 1;
    return (n_needed > seq->n_pages ? n_needed - seq->n_pages : 0) + (*has_copy_p ? 1 : 0);
}

static void model_append(struct model *model, struct model_seq *seq, const struct srv_append *append,
                         bool has_copy, const uint8_t *bytes)
{
    uint32_t position = seq->n_tokens[append->layer];

    if (has_copy) {
        seq->pages[position / 64]->n_holders--;
        seq->pages[position / 64] = model_take(model);
    }
    while (seq->n_pages < (position + append->n_tokens + 63) / 64)
        seq->pages[seq->n_pages++] = model_take(model);
    for (uint32_t l = append->layer; l < append->layer + append->n_layers; l++) {
        memcpy(seq->tokens[l] + position, bytes + (l - append->layer) * append->n_tokens, append->n_tokens);
        seq->n_tokens[l] += append->n_tokens;
    }
}

/* Writes as the device would: each layer's bytes to the slots. Also before an abort, as a launch may have
 * begun. */
static void write_slots(struct model *model, const struct srv_append *append, const int32_t *slots,
                        const uint8_t *bytes)
{
    for (uint32_t l = 0; l < append->n_layers; l++)
        for (uint32_t i = 0; i < append->n_tokens; i++)
            model->shadow[slots[i] / 64][append->layer + l][slots[i] % 64] = bytes[l * append->n_tokens + i];
}

static bool has_equal_layers(const struct model_seq *seq, const struct srv_append *append)
{
    for (uint32_t l = append->layer; l < append->layer + append->n_layers; l++)
        if (seq->n_tokens[l] != seq->n_tokens[append->layer])
            return false;
    return true;
}

static void step_append(struct model *model)
{
    struct model_seq *seq = model_pick(model, true);
    static uint8_t bytes[N_LAYERS * MAX_LEN];
    static int32_t slots[MAX_LEN];
    struct srv_page_copy copy;
    struct srv_append append;
    uint32_t n_copies = 9, cost;
    uint64_t n_tokens;
    bool has_copy;
    dsa_status status;

    if (!seq)
        return;
    append.session = seq->session;
    append.id = seq->id;
    append.layer = kit_chance(&model->rng, 500) ? 0 : kit_below(&model->rng, N_LAYERS);
    append.n_layers = 1 + kit_below(&model->rng, N_LAYERS - append.layer);
    append.n_tokens = 1 + kit_below(&model->rng, kit_chance(&model->rng, 500) ? 4 : 130);
    append.expected_position = kit_chance(&model->rng, 500) ? ANY : seq->n_tokens[append.layer];
    for (uint32_t i = 0; i < append.n_layers * append.n_tokens; i++)
        bytes[i] = (uint8_t)kit_below(&model->rng, POISON);
    cost = model_cost(seq, seq->n_tokens[append.layer], append.n_tokens, &has_copy);
    status = srv_sequence_append_begin(model->world.set, &append, slots, &copy, &n_copies, NULL);
    if (!has_equal_layers(seq, &append)) {
        ck_assert_int_eq(status, DSA_E_PRECONDITION);
    } else if (seq->n_tokens[append.layer] + append.n_tokens > MAX_LEN) {
        ck_assert_int_eq(status, DSA_E_BAD_RANGE);
    } else if (cost > model_free(model)) {
        ck_assert_int_eq(status, DSA_E_NO_PAGES);
        model->n_refused_seen++;
    } else {
        ck_assert_int_eq(status, DSA_OK);
        ck_assert_uint_eq(n_copies, has_copy ? 1 : 0);
        if (n_copies)
            run_copy(model, &copy);
        write_slots(model, &append, slots, bytes);
        if (kit_chance(&model->rng, 150)) {
            srv_sequence_append_abort(model->world.set, &append);
            model->n_aborted_seen++;
            return;
        }
        srv_sequence_append_commit(model->world.set, &append, &n_tokens);
        model_append(model, seq, &append, has_copy, bytes);
        ck_assert_uint_eq(n_tokens, seq->n_tokens[append.layer]);
    }
}

static void step_truncate(struct model *model)
{
    struct model_seq *seq = model_pick(model, true);
    uint32_t n;
    dsa_status status;

    if (!seq)
        return;
    n = kit_below(&model->rng, model_max(seq) + 2);
    status = srv_sequence_truncate(model->world.set, seq->session, seq->id, n, NULL);
    ck_assert_int_eq(status, n > model_max(seq) ? DSA_E_BAD_RANGE : DSA_OK);
    if (status != DSA_OK)
        return;
    for (uint32_t l = 0; l < N_LAYERS; l++)
        seq->n_tokens[l] = seq->n_tokens[l] > n ? n : seq->n_tokens[l];
    model_drop_pages(seq, (n + 63) / 64);
}

static void step_release(struct model *model)
{
    struct model_seq *seq = model_pick(model, true);

    if (!seq)
        return;
    ck_assert_int_eq(srv_sequence_release(model->world.set, seq->session, seq->id, NULL), DSA_OK);
    ck_assert_int_eq(srv_sequence_release(model->world.set, seq->session, seq->id, NULL), DSA_E_NOT_FOUND);
    model_drop_pages(seq, 0);
    seq->is_live = false;
}

static void step_end_session(struct model *model)
{
    uint64_t session = 1 + kit_below(&model->rng, 2);
    uint32_t n = 0;

    for (int i = 0; i < MAX_SEQS; i++)
        if (model->seqs[i].is_live && model->seqs[i].session == session) {
            model_drop_pages(&model->seqs[i], 0);
            model->seqs[i].is_live = false;
            n++;
        }
    ck_assert_uint_eq(srv_seqset_release_session(model->world.set, session), n);
}

static void check_contents(const struct model *model, const struct model_seq *seq, const int32_t *table,
                           int step)
{
    for (uint32_t l = 0; l < N_LAYERS; l++)
        for (uint32_t p = 0; p < seq->n_tokens[l]; p++)
            if (model->shadow[table[p / 64]][l][p % 64] != seq->tokens[l][p])
                ck_abort_msg("step %d: sequence %llx layer %u token %u is not what was appended", step,
                             (unsigned long long)seq->id, l, p);
}

/* POOL-01: holders of each page, their sum, what is free and what is shared, all counted from the tables. */
static void check_model(struct model *model, int step)
{
    uint32_t holders[POOL_PAGES] = {0}, n_live = 0, n_shared = 0;
    uint64_t n_refs = 0;
    struct srv_kvpool_stats stats = stats_of(&model->world);

    for (int i = 0; i < MAX_SEQS; i++) {
        struct model_seq *seq = &model->seqs[i];
        struct srv_seq_view view;

        if (!seq->is_live)
            continue;
        n_live++;
        ck_assert_int_eq(srv_sequence_find(model->world.set, seq->session, seq->id, &view, NULL), DSA_OK);
        ck_assert_uint_eq(view.n_table, seq->n_pages);
        ck_assert_uint_eq(view.n_tokens, model_min(seq));
        ck_assert_int_eq(memcmp(view.layer_tokens, seq->n_tokens, sizeof(seq->n_tokens)), 0);
        check_contents(model, seq, view.table, step);
        for (uint32_t k = 0; k < view.n_table; k++) {
            holders[view.table[k]]++;
            ck_assert_uint_eq(srv_kvpool_refs(model->world.pool, view.table[k]), seq->pages[k]->n_holders);
        }
    }
    for (int i = 0; i < POOL_PAGES; i++) {
        if (srv_kvpool_refs(model->world.pool, i) != holders[i])
            ck_abort_msg("step %d: page %d has %u refs and %u holders", step, i,
                         srv_kvpool_refs(model->world.pool, i), holders[i]);
        n_refs += holders[i];
        n_shared += holders[i] > 1;
    }
    ck_assert_uint_eq(srv_seqset_count(model->world.set), n_live);
    ck_assert_uint_eq(stats.n_free, model_free(model));
    ck_assert_uint_eq(stats.n_refs, n_refs);
    ck_assert_uint_eq(stats.n_shared, n_shared);
}

/* POOL-01, POOL-02, POOL-03 */
START_TEST(random_life_matches_the_model)
{
    static struct model model;
    struct srv_seqset_config config = {
        .n_layers = N_LAYERS, .max_sequences = 64, .max_per_session = 64, .max_tokens = MAX_LEN};

    memset(&model, 0, sizeof(model));
    model.rng.state = test_seed() + (unsigned)_i;
    model.world = new_world(POOL_PAGES, &config);
    memset(model.shadow, POISON, sizeof(model.shadow));
    for (int step = 0; step < STEPS; step++) {
        uint32_t dice = kit_below(&model.rng, 1000);

        if (dice < 100)
            step_create(&model);
        else if (dice < 250)
            step_fork(&model);
        else if (dice < 840)
            step_append(&model);
        else if (dice < 930)
            step_truncate(&model);
        else if (dice < 997)
            step_release(&model);
        else
            step_end_session(&model);
        check_model(&model, step);
    }
    /* The run met what it is for. */
    ck_assert_uint_gt(model.n_copies_seen, 100);
    ck_assert_uint_gt(model.n_refused_seen, 100);
    ck_assert_uint_gt(model.n_aborted_seen, 100);
    end_world(&model.world);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("sequence_life");
    TCase *tc = tcase_create("life");

    (void)max;
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, random_life_matches_the_model, 0, 3);
    suite_add_tcase(suite, tc);
    suites_p[0] = suite;
    return 1;
}
