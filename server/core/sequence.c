#include "server/core/sequence.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "server/core/idmap.h"
#include "server/core/list.h"

#define PAGE_TOKENS     64u
#define MAX_SEQUENCES   (1u << 24)
#define MAX_LAYERS      4096u
#define MAX_TOKENS      (UINT64_C(1) << 31) /* as many slots as the largest pool has */
#define FIRST_TABLE_CAP 8u
#define FIRST_SLOTS_CAP 16u
#define NO_SLOT         UINT32_MAX

/* Which sequences a session has; made with its first one, freed with its last. */
struct owner {
    struct srv_idmap_node by_session;
    struct srv_list sequences;
    uint32_t n_sequences;
};

/* An append between begin and commit or abort. */
struct begun {
    bool is_begun;
    bool has_copy; /* table[first_page] replaced old_page, which is still ours to put */
    uint32_t layer, n_layers, n_tokens;
    uint32_t n_table_before;
    uint32_t first_page;
    int32_t old_page;
};

struct sequence {
    struct srv_list in_owner;
    struct owner *owner;
    uint64_t id;
    uint64_t session;
    int32_t *table;
    uint32_t n_table;
    uint32_t cap_table;
    uint32_t n_tokens; /* smallest of layer_tokens */
    struct begun begun;
    uint32_t layer_tokens[];
};

struct slot {
    struct sequence *sequence; /* NULL = free */
    uint32_t generation;       /* of the present or the next sequence here; never 0 */
    uint32_t next_free;
};

struct srv_seqset {
    struct srv_seqset_config config;
    struct srv_kvpool *pool;
    struct srv_idmap owners;
    struct slot *slots;
    uint32_t n_slots;
    uint32_t cap_slots;
    uint32_t first_free;
    uint32_t n_sequences;
    uint8_t *copy_rows; /* [n_layers], what srv_page_copy.n_rows points to */
};

/* ---- the set
 * ------------------------------------------------------------------------------------------------ */

dsa_status srv_seqset_create(const struct srv_seqset_config *config, struct srv_kvpool *pool,
                             struct srv_seqset **set_p)
{
    struct srv_seqset *set;

    if (config->n_layers == 0 || config->n_layers > MAX_LAYERS || config->max_sequences == 0
        || config->max_sequences > MAX_SEQUENCES || config->max_per_session == 0 || config->max_tokens == 0
        || config->max_tokens > MAX_TOKENS)
        return DSA_E_BAD_REQUEST;
    set = calloc(1, sizeof(*set));
    if (!set)
        return DSA_E_NO_MEMORY;
    set->copy_rows = calloc(config->n_layers, sizeof(*set->copy_rows));
    if (!set->copy_rows) {
        free(set);
        return DSA_E_NO_MEMORY;
    }
    set->config = *config;
    set->pool = pool;
    set->first_free = NO_SLOT;
    srv_idmap_init(&set->owners);
    *set_p = set;
    return DSA_OK;
}

uint32_t srv_seqset_count(const struct srv_seqset *set)
{
    return set->n_sequences;
}

static struct owner *find_owner(const struct srv_seqset *set, uint64_t session)
{
    struct srv_idmap_node *node = srv_idmap_first(&set->owners, session);

    return node ? SRV_CONTAINER_OF(node, struct owner, by_session) : NULL;
}

static struct owner *get_owner(struct srv_seqset *set, uint64_t session)
{
    struct owner *owner = find_owner(set, session);

    if (owner)
        return owner;
    owner = calloc(1, sizeof(*owner));
    if (!owner)
        return NULL;
    srv_list_init(&owner->sequences);
    srv_idmap_add(&set->owners, &owner->by_session, session);
    return owner;
}

static void drop_owner_if_empty(struct srv_seqset *set, struct owner *owner)
{
    if (owner->n_sequences > 0)
        return;
    srv_idmap_remove(&set->owners, &owner->by_session);
    free(owner);
}

static struct sequence *find_sequence(const struct srv_seqset *set, uint64_t session, uint64_t id)
{
    uint32_t index = (uint32_t)id;
    struct sequence *seq = index < set->n_slots ? set->slots[index].sequence : NULL;

    return seq && seq->id == id && seq->session == session ? seq : NULL;
}

/* One text for an id that never was, one that is gone and one of another session: a client learns nothing. */
static dsa_status get_sequence(const struct srv_seqset *set, uint64_t session, uint64_t id,
                               struct sequence **seq_p, struct srv_err *err)
{
    struct sequence *seq = find_sequence(set, session, id);

    if (!seq)
        return srv_fail(err, DSA_E_NOT_FOUND, "sequence_id", "%" PRIu64, id,
                        "this session has no such sequence");
    *seq_p = seq;
    return DSA_OK;
}

/* ---- making and ending a sequence
 * --------------------------------------------------------------------------- */

static uint32_t pages_of(uint64_t n_tokens)
{
    return (uint32_t)((n_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS);
}

/* Rows of page i_page that are in use when n_tokens tokens are. */
static uint8_t rows_in_page(uint64_t n_tokens, uint32_t i_page)
{
    uint64_t begin = (uint64_t)i_page * PAGE_TOKENS;

    if (n_tokens <= begin)
        return 0;
    return (uint8_t)(n_tokens - begin < PAGE_TOKENS ? n_tokens - begin : PAGE_TOKENS);
}

static bool reserve_table(struct sequence *seq, uint32_t n_pages)
{
    uint32_t cap = seq->cap_table ? seq->cap_table : FIRST_TABLE_CAP;
    int32_t *table;

    if (n_pages <= seq->cap_table)
        return true;
    while (cap < n_pages)
        cap *= 2;
    table = realloc(seq->table, cap * sizeof(*table));
    if (!table)
        return false;
    seq->table = table;
    seq->cap_table = cap;
    return true;
}

static bool reserve_slot(struct srv_seqset *set)
{
    uint32_t cap = set->cap_slots ? set->cap_slots * 2 : FIRST_SLOTS_CAP;
    struct slot *slots;

    if (set->first_free != NO_SLOT || set->n_slots < set->cap_slots)
        return true;
    slots = realloc(set->slots, cap * sizeof(*slots));
    if (!slots)
        return false;
    set->slots = slots;
    set->cap_slots = cap;
    return true;
}

static uint32_t take_slot(struct srv_seqset *set)
{
    uint32_t index = set->first_free;

    if (index != NO_SLOT) {
        set->first_free = set->slots[index].next_free;
        return index;
    }
    index = set->n_slots++;
    set->slots[index] = (struct slot){.generation = 1};
    return index;
}

/* A slot whose generations are used up is left out of the list for good, so that no id ever comes back. */
static void give_slot(struct srv_seqset *set, uint32_t index)
{
    struct slot *slot = &set->slots[index];

    slot->sequence = NULL;
    if (++slot->generation == 0)
        return;
    slot->next_free = set->first_free;
    set->first_free = index;
}

/* Everything about a new sequence that can fail for want of room or memory; nothing is visible yet. */
static dsa_status prepare(struct srv_seqset *set, uint64_t session, uint32_t n_pages, struct sequence **seq_p,
                          struct srv_err *err)
{
    const struct owner *owner = find_owner(set, session);
    struct sequence *seq;

    if (set->n_sequences >= set->config.max_sequences)
        return srv_fail(err, DSA_E_LIMIT, "max_sequences", "%" PRIu32, set->config.max_sequences,
                        "the server holds as many sequences as it may");
    if (owner && owner->n_sequences >= set->config.max_per_session)
        return srv_fail(err, DSA_E_LIMIT, "max_sequences_per_session", "%" PRIu32,
                        set->config.max_per_session, "this session holds as many sequences as it may");
    seq = calloc(1, sizeof(*seq) + set->config.n_layers * sizeof(seq->layer_tokens[0]));
    if (!seq)
        goto no_memory;
    seq->session = session;
    if (!reserve_table(seq, n_pages) || !reserve_slot(set))
        goto free_sequence;
    seq->owner = get_owner(set, session);
    if (!seq->owner)
        goto free_sequence;
    *seq_p = seq;
    return DSA_OK;

free_sequence:
    free(seq->table);
    free(seq);
no_memory:
    return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for another sequence");
}

static void undo_prepare(struct srv_seqset *set, struct sequence *seq)
{
    drop_owner_if_empty(set, seq->owner);
    free(seq->table);
    free(seq);
}

static uint64_t link_sequence(struct srv_seqset *set, struct sequence *seq)
{
    uint32_t index = take_slot(set);

    seq->id = (uint64_t)set->slots[index].generation << 32 | index;
    set->slots[index].sequence = seq;
    srv_list_add_tail(&seq->owner->sequences, &seq->in_owner);
    seq->owner->n_sequences++;
    set->n_sequences++;
    return seq->id;
}

static void put_pages(struct srv_seqset *set, struct sequence *seq, uint32_t n_keep)
{
    while (seq->n_table > n_keep)
        srv_kvpool_put(set->pool, seq->table[--seq->n_table]);
}

/* Also with an append begun: its pages go the same way. */
static void end_sequence(struct srv_seqset *set, struct sequence *seq)
{
    if (seq->begun.is_begun && seq->begun.has_copy)
        srv_kvpool_put(set->pool, seq->begun.old_page);
    put_pages(set, seq, 0);
    give_slot(set, (uint32_t)seq->id);
    srv_list_remove(&seq->in_owner);
    seq->owner->n_sequences--;
    set->n_sequences--;
    drop_owner_if_empty(set, seq->owner);
    free(seq->table);
    free(seq);
}

dsa_status srv_sequence_create(struct srv_seqset *set, uint64_t session, uint64_t *id_p, struct srv_err *err)
{
    struct sequence *seq;
    dsa_status status = prepare(set, session, 0, &seq, err);

    if (status != DSA_OK)
        return status;
    *id_p = link_sequence(set, seq);
    return DSA_OK;
}

dsa_status srv_sequence_release(struct srv_seqset *set, uint64_t session, uint64_t id, struct srv_err *err)
{
    struct sequence *seq;
    dsa_status status = get_sequence(set, session, id, &seq, err);

    if (status != DSA_OK)
        return status;
    end_sequence(set, seq);
    return DSA_OK;
}

uint32_t srv_seqset_release_session(struct srv_seqset *set, uint64_t session)
{
    struct owner *owner = find_owner(set, session);
    uint32_t n = owner ? owner->n_sequences : 0;

    /* Counted, not until empty: the last one takes the owner with it. */
    for (uint32_t i = 0; i < n; i++)
        end_sequence(set, SRV_CONTAINER_OF(owner->sequences.next, struct sequence, in_owner));
    return n;
}

void srv_seqset_destroy(struct srv_seqset *set)
{
    struct srv_idmap_node *node;

    if (!set)
        return;
    while ((node = srv_idmap_any(&set->owners)) != NULL)
        (void)srv_seqset_release_session(set, node->key);
    SRV_ASSERT(set->n_sequences == 0);
    srv_idmap_fini(&set->owners);
    free(set->slots);
    free(set->copy_rows);
    free(set);
}

/* ---- looking
 * ------------------------------------------------------------------------------------------------ */

dsa_status srv_sequence_find(const struct srv_seqset *set, uint64_t session, uint64_t id,
                             struct srv_seq_view *view_p, struct srv_err *err)
{
    struct sequence *seq;
    dsa_status status = get_sequence(set, session, id, &seq, err);

    if (status != DSA_OK)
        return status;
    *view_p = (struct srv_seq_view){
        .id = seq->id,
        .session = seq->session,
        .table = seq->table,
        .n_table = seq->n_table,
        .layer_tokens = seq->layer_tokens,
        .n_tokens = seq->n_tokens,
    };
    return DSA_OK;
}

dsa_status srv_sequence_describe(const struct srv_seqset *set, uint64_t session, uint64_t id,
                                 struct srv_seq_view *view_p, struct srv_err *err)
{
    dsa_status status = srv_sequence_find(set, session, id, view_p, err);

    if (status != DSA_OK)
        return status;
    for (uint32_t i = 0; i < view_p->n_table; i++)
        view_p->n_shared += srv_kvpool_refs(set->pool, view_p->table[i]) > 1;
    return DSA_OK;
}

static uint32_t shortest_layer(const struct srv_seqset *set, const struct sequence *seq)
{
    uint32_t n = seq->layer_tokens[0];

    for (uint32_t i = 1; i < set->config.n_layers; i++)
        n = seq->layer_tokens[i] < n ? seq->layer_tokens[i] : n;
    return n;
}

static uint32_t longest_layer(const struct srv_seqset *set, const struct sequence *seq)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < set->config.n_layers; i++)
        n = seq->layer_tokens[i] > n ? seq->layer_tokens[i] : n;
    return n;
}

static dsa_status refuse_begun(const struct sequence *seq, struct srv_err *err)
{
    if (!seq->begun.is_begun)
        return DSA_OK;
    return srv_fail(err, DSA_E_PRECONDITION, "sequence_id", "%" PRIu64, seq->id,
                    "an append to this sequence is under way");
}

/* ---- append
 * ------------------------------------------------------------------------------------------------- */

static dsa_status check_layers(const struct srv_seqset *set, const struct sequence *seq,
                               const struct srv_append *append, struct srv_err *err)
{
    uint32_t n_layers = set->config.n_layers;

    if (append->layer >= n_layers)
        return srv_fail(err, DSA_E_BAD_RANGE, "layer", "%" PRIu32, append->layer,
                        "the pool has %" PRIu32 " layers", n_layers);
    if (append->n_layers == 0 || append->n_layers > n_layers - append->layer)
        return srv_fail(err, DSA_E_BAD_RANGE, "n_layers", "%" PRIu32, append->n_layers,
                        "from layer %" PRIu32 " on the pool has %" PRIu32, append->layer,
                        n_layers - append->layer);
    for (uint32_t i = append->layer; i < append->layer + append->n_layers; i++)
        if (seq->layer_tokens[i] != seq->layer_tokens[append->layer])
            return srv_fail(err, DSA_E_PRECONDITION, "n_layers", "%" PRIu32, append->n_layers,
                            "layer %" PRIu32 " has %" PRIu32 " tokens and layer %" PRIu32 " has %" PRIu32
                            ": append to them one by one",
                            append->layer, seq->layer_tokens[append->layer], i, seq->layer_tokens[i]);
    return DSA_OK;
}

static dsa_status check_append(const struct srv_seqset *set, const struct srv_append *append,
                               struct sequence **seq_p, struct srv_err *err)
{
    struct sequence *seq;
    uint64_t length;
    dsa_status status = get_sequence(set, append->session, append->id, &seq, err);

    if (status == DSA_OK)
        status = check_layers(set, seq, append, err);
    if (status == DSA_OK)
        status = refuse_begun(seq, err);
    if (status != DSA_OK)
        return status;
    length = seq->layer_tokens[append->layer];
    if (append->n_tokens == 0)
        return srv_fail(err, DSA_E_BAD_REQUEST, "n_tokens", "%s", "0", "an append has at least one token");
    if (append->expected_position != UINT64_MAX && append->expected_position != length)
        return srv_fail(err, DSA_E_PRECONDITION, "position", "%" PRIu64, append->expected_position,
                        "the layer has %" PRIu64 " tokens", length);
    if (length > set->config.max_tokens || append->n_tokens > set->config.max_tokens - length)
        return srv_fail(err, DSA_E_BAD_RANGE, "n_tokens", "%" PRIu32, append->n_tokens,
                        "the layer has %" PRIu64 " tokens and may have %" PRIu64, length,
                        set->config.max_tokens);
    *seq_p = seq;
    return DSA_OK;
}

/* Whether an append at `position` must copy the page that it begins in. Shared pages are full in every layer, save
 * the last one after a truncate; so of the pages it writes, up to i_end, the later ones are ours alone. */
static bool must_copy(const struct srv_seqset *set, const struct sequence *seq, uint64_t position,
                      uint32_t i_end)
{
    uint32_t first = (uint32_t)(position / PAGE_TOKENS);

    for (uint32_t i = first + 1; i < seq->n_table && i < i_end; i++)
        SRV_ASSERT(srv_kvpool_refs(set->pool, seq->table[i]) == 1);
    return first < seq->n_table && srv_kvpool_refs(set->pool, seq->table[first]) > 1;
}

/* The new page stood behind the table; the old one is put by commit, or comes back with abort. */
static void replace_first_page(struct srv_seqset *set, struct sequence *seq, int32_t new_page,
                               struct srv_page_copy *copy_p)
{
    uint32_t i_page = seq->begun.first_page;

    seq->begun.has_copy = true;
    seq->begun.old_page = seq->table[i_page];
    seq->table[i_page] = new_page;
    for (uint32_t i = 0; i < set->config.n_layers; i++)
        set->copy_rows[i] = rows_in_page(seq->layer_tokens[i], i_page);
    *copy_p = (struct srv_page_copy){seq->begun.old_page, new_page, set->copy_rows};
}

dsa_status srv_sequence_append_begin(struct srv_seqset *set, const struct srv_append *append,
                                     int32_t *slots_p, struct srv_page_copy *copy_p, uint32_t *n_copies_p,
                                     struct srv_err *err)
{
    struct sequence *seq;
    uint64_t position;
    uint32_t n_needed, n_new, n_copies;
    dsa_status status = check_append(set, append, &seq, err);

    if (status != DSA_OK)
        return status;
    position = seq->layer_tokens[append->layer];
    n_needed = pages_of(position + append->n_tokens);
    n_new = n_needed > seq->n_table ? n_needed - seq->n_table : 0;
    n_copies = must_copy(set, seq, position, n_needed) ? 1 : 0;
    if (!reserve_table(seq, seq->n_table + n_new + n_copies))
        return srv_fail(err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for a longer page table");
    status = srv_kvpool_get(set->pool, n_new + n_copies, seq->table + seq->n_table, err);
    if (status != DSA_OK)
        return status;

    seq->begun = (struct begun){
        .is_begun = true,
        .layer = append->layer,
        .n_layers = append->n_layers,
        .n_tokens = append->n_tokens,
        .n_table_before = seq->n_table,
        .first_page = (uint32_t)(position / PAGE_TOKENS),
    };
    seq->n_table += n_new;
    if (n_copies)
        replace_first_page(set, seq, seq->table[seq->n_table], copy_p);
    *n_copies_p = n_copies;
    for (uint32_t i = 0; i < append->n_tokens; i++) {
        uint64_t p = position + i;

        slots_p[i] = seq->table[p / PAGE_TOKENS] * (int32_t)PAGE_TOKENS + (int32_t)(p % PAGE_TOKENS);
    }
    return DSA_OK;
}

/* NULL when the sequence was released in between, which has returned its pages. */
static struct sequence *begun_sequence(const struct srv_seqset *set, const struct srv_append *append)
{
    struct sequence *seq = find_sequence(set, append->session, append->id);

    if (seq)
        SRV_ASSERT(seq->begun.is_begun && seq->begun.layer == append->layer
                   && seq->begun.n_layers == append->n_layers && seq->begun.n_tokens == append->n_tokens);
    return seq;
}

void srv_sequence_append_commit(struct srv_seqset *set, const struct srv_append *append, uint64_t *n_tokens_p)
{
    struct sequence *seq = begun_sequence(set, append);

    if (seq) {
        for (uint32_t i = append->layer; i < append->layer + append->n_layers; i++)
            seq->layer_tokens[i] += append->n_tokens;
        seq->n_tokens = shortest_layer(set, seq);
        if (seq->begun.has_copy)
            srv_kvpool_put(set->pool, seq->begun.old_page);
        seq->begun.is_begun = false;
    }
    if (n_tokens_p)
        *n_tokens_p = seq ? seq->layer_tokens[append->layer] : 0;
}

void srv_sequence_append_abort(struct srv_seqset *set, const struct srv_append *append)
{
    struct sequence *seq = begun_sequence(set, append);

    if (!seq)
        return;
    put_pages(set, seq, seq->begun.n_table_before);
    if (seq->begun.has_copy) {
        srv_kvpool_put(set->pool, seq->table[seq->begun.first_page]);
        seq->table[seq->begun.first_page] = seq->begun.old_page;
    }
    seq->begun.is_begun = false;
}

/* ---- fork and truncate
 * -------------------------------------------------------------------------------------- */

/* The first n_full pages are shared, the page behind them (already taken, if there is one) is a copy. */
static void fill_fork(struct srv_seqset *set, const struct sequence *source, struct sequence *fork,
                      uint32_t n_tokens)
{
    uint32_t n_full = n_tokens / PAGE_TOKENS;

    for (uint32_t i = 0; i < n_full; i++) {
        fork->table[i] = source->table[i];
        srv_kvpool_ref(set->pool, fork->table[i]);
    }
    fork->n_table = pages_of(n_tokens);
    fork->n_tokens = n_tokens;
    for (uint32_t i = 0; i < set->config.n_layers; i++)
        fork->layer_tokens[i] = n_tokens;
}

dsa_status srv_sequence_fork(struct srv_seqset *set, uint64_t session, uint64_t id, uint64_t n_tokens,
                             uint64_t *new_id_p, struct srv_page_copy *copy_p, uint32_t *n_copies_p,
                             struct srv_err *err)
{
    struct sequence *source, *fork;
    uint32_t n, n_full, n_copies;
    dsa_status status = get_sequence(set, session, id, &source, err);

    if (status == DSA_OK)
        status = refuse_begun(source, err);
    if (status != DSA_OK)
        return status;
    if (n_tokens > source->n_tokens)
        return srv_fail(err, DSA_E_BAD_RANGE, "n_tokens", "%" PRIu64, n_tokens,
                        "every layer of the source has %" PRIu32 " tokens", source->n_tokens);
    n = n_tokens ? (uint32_t)n_tokens : source->n_tokens;
    n_full = n / PAGE_TOKENS;
    n_copies = pages_of(n) - n_full;
    status = prepare(set, session, pages_of(n), &fork, err);
    if (status != DSA_OK)
        return status;
    status = srv_kvpool_get(set->pool, n_copies, fork->table ? fork->table + n_full : NULL, err);
    if (status != DSA_OK) {
        undo_prepare(set, fork);
        return status;
    }

    fill_fork(set, source, fork, n);
    if (n_copies) {
        memset(set->copy_rows, (int)(n % PAGE_TOKENS), set->config.n_layers);
        *copy_p = (struct srv_page_copy){source->table[n_full], fork->table[n_full], set->copy_rows};
    }
    *n_copies_p = n_copies;
    *new_id_p = link_sequence(set, fork);
    return DSA_OK;
}

dsa_status srv_sequence_truncate(struct srv_seqset *set, uint64_t session, uint64_t id, uint64_t n_tokens,
                                 struct srv_err *err)
{
    struct sequence *seq;
    uint32_t longest;
    dsa_status status = get_sequence(set, session, id, &seq, err);

    if (status == DSA_OK)
        status = refuse_begun(seq, err);
    if (status != DSA_OK)
        return status;
    longest = longest_layer(set, seq);
    if (n_tokens > longest)
        return srv_fail(err, DSA_E_BAD_RANGE, "n_tokens", "%" PRIu64, n_tokens,
                        "the longest layer has %" PRIu32 " tokens", longest);
    for (uint32_t i = 0; i < set->config.n_layers; i++)
        if (seq->layer_tokens[i] > n_tokens)
            seq->layer_tokens[i] = (uint32_t)n_tokens;
    seq->n_tokens = shortest_layer(set, seq);
    put_pages(set, seq, pages_of(n_tokens));
    return DSA_OK;
}
