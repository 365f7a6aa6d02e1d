/* attend_plan.c - which attend kernel serves a shape on AMD, and how its lists are split. */
#include <stdio.h>
#include <string.h>

#include "../dsk.h"
#include "attend.h"

#define MIN_SPLIT_ENTRIES 64 /* two tiles */

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Blocks that a unit is sure to hold at once: registers leave room for two waves of a SIMD, one with 64 heads; LDS always
 * does. */
static int64_t blocks_of_unit(int32_t heads)
{
    return heads == ATTEND_HIP_MANY_HEADS ? 1 : 2;
}

/* As many splits as fill the device once, or, where bits may not depend on the batch, a length that depends on the list
 * alone. */
static void split(struct attend_hip_plan *plan, int64_t topk, uint32_t flags, int64_t n_blocks,
                  int64_t n_room)
{
    const int64_t most = INT32_MAX / 64 * 64;
    int64_t entries = ATTEND_HIP_INVARIANT_SPLIT;

    if ((flags & DSK_ATTEND_BATCH_INVARIANT) == 0) {
        int64_t n = smaller(smaller(n_room / n_blocks, ATTEND_HIP_MAX_SPLITS), topk / MIN_SPLIT_ENTRIES);

        n = n < 1 ? 1 : n;
        entries = ((topk + n - 1) / n + 63) / 64 * 64;
    }
    while (topk > ATTEND_HIP_MAX_SPLITS * entries)
        entries *= 2;
    plan->split_entries = (int32_t)smaller(entries, most);
    plan->n_splits = (int32_t)((topk + plan->split_entries - 1) / plan->split_entries);
}

void attend_hip_plan(uint32_t layout_id, int32_t n_rows, int32_t h_q, int64_t topk, uint32_t flags,
                     int32_t n_units, struct attend_hip_plan *plan)
{
    const struct dsk_layout *layout = dsk_layout_get(layout_id);
    const int32_t heads = h_q <= 2 * ATTEND_HIP_FEW_HEADS ? ATTEND_HIP_FEW_HEADS : ATTEND_HIP_MANY_HEADS;
    const uint32_t n_blocks = ((uint32_t)h_q + (uint32_t)heads - 1) / (uint32_t)heads;

    memset(plan, 0, sizeof(*plan));
    split(plan, topk, flags, (int64_t)n_rows * n_blocks, (int64_t)n_units * blocks_of_unit(heads));
    snprintf(plan->main.name, sizeof(plan->main.name), "attend_%s_h%d", layout->name, heads);
    memcpy(plan->main.grid, (const uint32_t[]){(uint32_t)n_rows, n_blocks, (uint32_t)plan->n_splits},
           sizeof(plan->main.grid));
    plan->main.block = ATTEND_HIP_THREADS;
    if (plan->n_splits == 1)
        return;
    snprintf(plan->combine.name, sizeof(plan->combine.name), "attend_combine");
    memcpy(plan->combine.grid, (const uint32_t[]){(uint32_t)n_rows, (uint32_t)h_q, 1},
           sizeof(plan->combine.grid));
    plan->combine.block = ATTEND_HIP_COMBINE_THREADS;
    plan->part_ref_bytes = 4 * (uint64_t)n_rows * (uint64_t)plan->n_splits;
    plan->part_lse_bytes = plan->part_ref_bytes * (uint64_t)h_q;
    plan->part_out_bytes = plan->part_lse_bytes * (uint64_t)layout->d_v;
}
