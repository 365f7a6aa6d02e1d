/* attend_sm90_loader.cuh - warpgroup 3: indices, page table, row copies. */
#ifndef KERNELS_CUDA_ATTEND_SM90_LOADER_CUH
#define KERNELS_CUDA_ATTEND_SM90_LOADER_CUH

#include "attend_sm90_shape.cuh"

namespace attend_sm90 {

/* What an entry that names no row loads instead: finite bytes, scale 0. Several copies, because many lanes of many CTAs
 * may want one at once and a line of L2 serves only so many. */
constexpr int ZERO_COPIES = 32;
constexpr int ZERO_BYTES = 768;
__device__ uint4 zero_rows[ZERO_COPIES * ZERO_BYTES / 16];

/* One lane's way through its entries: index, then page, then address, each a tile ahead of the next. */
struct Entry {
    int index; /* as listed; -1 past the end */
    int page;  /* logical: of the page table; -1 if unmapped */
};

__device__ __forceinline__ int load_index(const Work &work, int position)
{
    return position < work.end ? __ldcs((const int *)work.row->indices + position) : -1;
}

__device__ __forceinline__ int load_page(const Work &work, int index)
{
    const dsk_attend_row *row = work.row;
    if (row->space != DSK_SPACE_LOGICAL)
        return index >> DSK_PAGE_SHIFT;
    const int i_page = index >> DSK_PAGE_SHIFT;
    return index >= 0 && index < row->seq_len && i_page < row->n_table ? __ldg((const int *)row->table + i_page) : -1;
}

/* Address of the entry's row; 0 if it names none. */
__device__ __forceinline__ uint64_t row_address(const dsk_kv_view *kv, const Entry &entry, int row_bytes)
{
    const int offset = entry.index & (DSK_PAGE_TOKENS - 1);
    const int64_t slot = (int64_t)entry.page * DSK_PAGE_TOKENS + offset;
    if (entry.page < 0 || slot >= kv->n_slots)
        return 0;
    return kv->base + (uint64_t)(entry.page * kv->page_pitch_bytes) + (uint32_t)(offset * row_bytes);
}

/* 16 rows, one lane each: those of lanes 16 * half + [0, 16). */
template <class S>
__device__ __forceinline__ void copy_rows_bulk(uint32_t stage_at, uint64_t *full, const Lane &me, int half, uint64_t address,
                                               uint64_t policy)
{
    if (me.lane == 0)
        mbar_arrive_expect(full, QUARTER * S::ROW_BYTES);
    __syncwarp();
    if (me.lane / QUARTER == half) {
        const int row = me.warp * QUARTER + me.lane % QUARTER;
        const uint64_t zero = (uint64_t)zero_rows + (uint64_t)(((int)blockIdx.y * 7 + row) % ZERO_COPIES * ZERO_BYTES);
        bulk_copy(stage_at + row * S::PITCH, address != 0 ? address : zero, S::ROW_BYTES, full, policy);
    }
}

/* The same in steps of 8 bytes: a warp covers 256 bytes of one row at a time, then the tails of all. */
template <class S>
__device__ __forceinline__ void copy_rows_small(uint32_t stage_at, uint64_t *full, const Lane &me, int half, uint64_t address,
                                                uint64_t somewhere)
{
    constexpr int STEP = WARP * 8;
    constexpr int TAIL = S::ROW_BYTES % STEP;
    static_assert(TAIL == 8, "one step a row for the tail");
    const uint32_t rows_at = stage_at + me.warp * QUARTER * S::PITCH;

#pragma unroll
    for (int r = 0; r < QUARTER; r++) {
        const uint64_t row = __shfl_sync(~0u, address, half * QUARTER + r);
        const uint64_t src = row != 0 ? row + me.lane * 8 : somewhere;
#pragma unroll
        for (int at = 0; at + STEP <= S::ROW_BYTES; at += STEP)
            async_copy_8(rows_at + r * S::PITCH + at + me.lane * 8, src + at, row != 0 ? 8 : 0);
    }
    if (me.lane / QUARTER == half)
        async_copy_8(rows_at + me.lane % QUARTER * S::PITCH + S::ROW_BYTES - TAIL,
                     address != 0 ? address + (S::ROW_BYTES - TAIL) : somewhere, address != 0 ? 8 : 0);
    async_copy_arrive(full);
    if (me.lane == 0)
        mbar_arrive(full); /* orders the mask of valid rows */
}

/* Which entry of the split's first two tiles is a loader lane's. */
__device__ __forceinline__ int lane_position(const Lane &me)
{
    return me.lane / QUARTER * TILE + me.warp * QUARTER + me.lane % QUARTER;
}

/* Each warp brings a quarter of every tile. Its lanes hold the entries of two tiles at once, so that an index is asked for
 * two to four tiles before its row. */
template <class S>
__device__ __forceinline__ void run_loader(const dsk_kv_view *kv, attend_sm90_control *ctl, uint32_t stages_at,
                                           const Work &work, int first_index, uint32_t *n_bad_p)
{
    const Lane me = my_lane();
    const uint64_t policy = policy_evict_first();
    int position = work.first + lane_position(me);
    uint32_t n_bad = 0;
    if (position >= work.end)
        first_index = -1;
    Entry entry = {first_index, load_page(work, first_index)};
    int next_index = load_index(work, position + 2 * TILE);

    for (int pair = 0; pair < work.n_tiles; pair += 2, position += 2 * TILE) {
        const uint64_t address = row_address(kv, entry, S::ROW_BYTES);
        const uint32_t valid = __ballot_sync(~0u, address != 0);
        n_bad += address == 0 && entry.index != -1;
#pragma unroll 1
        for (int half = 0; half < 2 && pair + half < work.n_tiles; half++) {
            const int stage = (pair + half) % S::STAGES, use = (pair + half) / S::STAGES;
            if (use > 0)
                mbar_wait(&ctl->empty[stage][me.warp], (use - 1) & 1);
            if (me.lane == 0)
                ctl->valid[stage][me.warp] = (uint16_t)(valid >> (half * QUARTER));
            if constexpr (S::IS_BULK)
                copy_rows_bulk<S>(stages_at + stage * S::STAGE_BYTES, &ctl->full[stage], me, half, address, policy);
            else
                copy_rows_small<S>(stages_at + stage * S::STAGE_BYTES, &ctl->full[stage], me, half, address, kv->base);
            if (pair + half == 0)
                bar_sync(BARRIER_ISSUED, ATTEND_SM90_THREADS); /* the query goes before more rows */
        }
        /* Only now: an index that has not come yet must not hold up rows that are known. */
        entry = {next_index, load_page(work, next_index)};
        next_index = load_index(work, position + 4 * TILE);
    }
    ctl->n_bad[me.warp] = __reduce_add_sync(~0u, n_bad);
    bar_sync(BARRIER_LOADER, WARPGROUP);
    *n_bad_p = ctl->n_bad[0] + ctl->n_bad[1] + ctl->n_bad[2] + ctl->n_bad[3];
}

} /* namespace attend_sm90 */

#endif /* KERNELS_CUDA_ATTEND_SM90_LOADER_CUH */
