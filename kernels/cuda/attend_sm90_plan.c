/* attend_sm90_plan.c - from the shape of a launch to kernel names, grid, splits and scratch. No device calls.
 *
 * Cost model, in tiles of 64 tokens: a CTA pays its tiles plus PROLOGUE_TILES; CTAs run in waves of one per SM; a split
 * launch pays for the merge, once and per split. The count of splits with the least cost wins, the smaller one on a tie. */
#include "attend_sm90.h"

#include <stddef.h>

#include "attend_sm90_shared.h"

#define PROLOGUE_TILES  6 /* query load, first maximum, epilogue */
#define MERGE_TILES     2 /* the second launch */
#define MERGE_PART_COST 8 /* this many partial rows per SM cost one tile */
#define INVARIANT_TILES 8 /* fixed split of batch-invariant launches: 512 entries */
#define MAX_GRID_Y      65535

struct geometry {
    uint32_t layout;
    int32_t latent;
    int32_t rope;
    uint32_t kv_align;
    const char *main_names[4];
    const char *merge_names[2];
};

static const int32_t HEAD_TILES[4] = {8, 16, 32, 64};

static const struct geometry GEOMETRIES[] = {
    {DSK_LAYOUT_SCALED_512_64,
     512,
     64,
     16,
     {"attend_sm90_512_64_h8", "attend_sm90_512_64_h16", "attend_sm90_512_64_h32", "attend_sm90_512_64_h64"},
     {"attend_sm90_merge_512_w1", "attend_sm90_merge_512_w8"}},
    {DSK_LAYOUT_SCALED_512_0,
     512,
     0,
     16,
     {"attend_sm90_512_0_h8", "attend_sm90_512_0_h16", "attend_sm90_512_0_h32", "attend_sm90_512_0_h64"},
     {"attend_sm90_merge_512_w1", "attend_sm90_merge_512_w8"}},
    {DSK_LAYOUT_SCALED_256_0,
     256,
     0,
     8,
     {"attend_sm90_256_0_h8", "attend_sm90_256_0_h16", "attend_sm90_256_0_h32", "attend_sm90_256_0_h64"},
     {"attend_sm90_merge_256_w1", "attend_sm90_merge_256_w8"}},
};

static const struct geometry *find_geometry(uint32_t layout)
{
    for (size_t i = 0; i < sizeof(GEOMETRIES) / sizeof(GEOMETRIES[0]); i++)
        if (GEOMETRIES[i].layout == layout)
            return &GEOMETRIES[i];
    return NULL;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t cost_of(int64_t n_ctas, int64_t n_tiles, int64_t n_splits, int64_t n_sms)
{
    const int64_t waves = ceil_div(n_ctas * n_splits, n_sms);
    const int64_t cost = waves * (ceil_div(n_tiles, n_splits) + PROLOGUE_TILES);

    if (n_splits == 1)
        return cost;
    return cost + MERGE_TILES + n_ctas * n_splits / (n_sms * MERGE_PART_COST);
}

static int32_t pick_splits(int64_t n_ctas, int64_t n_tiles, int64_t n_sms)
{
    const int64_t most = n_tiles < ATTEND_SM90_MAX_SPLITS ? n_tiles : ATTEND_SM90_MAX_SPLITS;
    int64_t best = 1;

    for (int64_t n = 2; n <= most; n++)
        if (cost_of(n_ctas, n_tiles, n, n_sms) < cost_of(n_ctas, n_tiles, best, n_sms))
            best = n;
    return (int32_t)best;
}

/* Fixed boundaries, and the partial path even for a single split: its rounding is then the same for every row. */
static void split_fixed(int32_t n_tiles, struct attend_sm90_plan *plan)
{
    plan->split_entries = INVARIANT_TILES * ATTEND_SM90_TILE;
    plan->n_splits = (int32_t)ceil_div(n_tiles, INVARIANT_TILES);
    if (plan->n_splits < 2)
        plan->n_splits = 2;
}

static void split_planned(int32_t n_ctas, int32_t n_tiles, int32_t n_sms, struct attend_sm90_plan *plan)
{
    const int32_t n_splits = pick_splits(n_ctas, n_tiles, n_sms);
    const int32_t tiles = (int32_t)ceil_div(n_tiles, n_splits);

    plan->split_entries = tiles * ATTEND_SM90_TILE;
    plan->n_splits = (int32_t)ceil_div(n_tiles, tiles); /* no split without an entry */
}

static void plan_merge(const struct geometry *g, int32_t n_rows, int32_t h_q, int32_t n_head_blocks,
                       uint32_t flags, struct attend_sm90_plan *plan)
{
    /* One order of sums for every count of splits where bits must not depend on it. */
    const bool is_wide = plan->n_splits > 8 || (flags & ATTEND_SM90_BATCH_INVARIANT) != 0;
    const int32_t warps = is_wide ? 8 : 1;
    const uint64_t n_parts = (uint64_t)n_rows * (uint64_t)plan->n_splits;

    plan->combine.name = g->merge_names[is_wide];
    plan->combine.grid_x = (uint32_t)ceil_div((int64_t)n_rows * h_q * warps, ATTEND_SM90_MERGE_THREADS / 32);
    plan->combine.grid_y = 1;
    plan->combine.grid_z = 1;
    plan->combine.block = ATTEND_SM90_MERGE_THREADS;
    plan->combine.is_dependent = 1;
    plan->part_out_bytes = n_parts * (uint64_t)h_q * (uint64_t)g->latent * 2;
    plan->part_lse_bytes = n_parts * (uint64_t)h_q * 4;
    plan->part_ref_bytes = n_parts * (uint64_t)n_head_blocks * sizeof(struct attend_sm90_side);
}

bool attend_sm90_plan(uint32_t layout, int32_t n_rows, int32_t h_q, int32_t topk, int32_t out_dtype,
                      uint32_t flags, int32_t n_sms, struct attend_sm90_plan *plan_p)
{
    const struct geometry *g = find_geometry(layout);
    struct attend_sm90_plan plan = {0};
    int variant = 0;

    if (g == NULL || n_rows < 1 || n_rows > MAX_GRID_Y || h_q < 1 || h_q > DSK_MAX_HEADS || topk < 1
        || n_sms < 1)
        return false;
    if (out_dtype != DSK_DTYPE_BF16 && out_dtype != DSK_DTYPE_F32)
        return false;
    while (variant < 3 && HEAD_TILES[variant] < h_q)
        variant++;

    const int32_t n_head_blocks = (int32_t)ceil_div(h_q, HEAD_TILES[variant]);
    const int32_t n_tiles = (int32_t)ceil_div(topk, ATTEND_SM90_TILE);

    if (flags & ATTEND_SM90_BATCH_INVARIANT)
        split_fixed(n_tiles, &plan);
    else
        split_planned(n_rows * n_head_blocks, n_tiles, n_sms, &plan);
    if ((int64_t)plan.n_splits * n_head_blocks > INT32_MAX)
        return false;

    plan.main.name = g->main_names[variant];
    plan.main.grid_x = (uint32_t)(plan.n_splits * n_head_blocks);
    plan.main.grid_y = (uint32_t)n_rows;
    plan.main.grid_z = 1;
    plan.main.block = ATTEND_SM90_THREADS;
    plan.main.shared_bytes = attend_sm90_shared_bytes(g->latent, g->rope, HEAD_TILES[variant]);
    plan.needs_aligned = 1;
    plan.kv_align = g->kv_align;
    if (plan.n_splits > 1)
        plan_merge(g, n_rows, h_q, n_head_blocks, flags, &plan);
    *plan_p = plan;
    return true;
}
