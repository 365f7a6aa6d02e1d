/* attend_sm90.cuh - sparse attention straight from scaled FP8 cache rows, for sm_90a (wgmma, bulk copies, setmaxnreg).
 *
 *   s[j] = softmax_scale * q . k[j];  lse = ln sum_j exp(s[j]);  out = sum_j exp(s[j] - lse) v[j]
 *   q bf16 [h_q, d_qk]; rows of the pool as dsk_format.h has them; out bf16 or f32 [h_q, d_v]; lse f32 [h_q]
 *
 * One CTA takes one query row, up to HEADS heads and one split of the row's list, in tiles of 64 entries. Everything is
 * transposed: S^T = K Q^T and O^T = V^T P^T. So K and V are the A operands, which wgmma takes from registers: the cache
 * bytes lie in shared memory as they came and each reader converts them straight into its fragments (e4m3 is exact in f16).
 * The heads are the N of the instruction, so 8 or 16 heads cost no padding to 64.
 *
 *   warpgroups 0, 1   O^T: half of d_v each                      (wait for P, V bytes)
 *   warpgroup 2       S^T and softmax                            (waits for K bytes, a free P tile)
 *   warpgroup 3       loader: indices, page table, row copies    (waits for a free quarter stage)
 *
 * Numbers. Q is scaled by one power of two per CTA into f16, exactly. K's group scales stay f32: the sums are multiplied in
 * place by scale[g - 1] / scale[g] between groups of 128 values.
 * P = 2^(score - base) with base such that the largest is 2^7: f16 then reaches from 2^-31 to 2^8 of it. base moves only
 * when a tile overflows (a raise; the tile is then redone). V is multiplied by scale / ref, one power of two ref per group of
 * values: one f16 where the scales are powers of two, else a sum of two, so that P and V are rounded once each.
 * A tile whose scales or weights do not fit f16 that way is exact: P in f32, products by FFMA. It is slow and rare.
 *
 * Order of sums depends only on the row's list, split_entries and HEADS: repeats give the same bits. */
#ifndef KERNELS_CUDA_ATTEND_SM90_CUH
#define KERNELS_CUDA_ATTEND_SM90_CUH
#include "attend_sm90_loader.cuh"
#include "attend_sm90_output.cuh"
#include "attend_sm90_query.cuh"
#include "attend_sm90_scores.cuh"

namespace attend_sm90 {

__device__ __forceinline__ int live_entries(const dsk_attend_row *row)
{
    if (row->length == 0)
        return row->topk;
    return min(max(*(const volatile int *)row->length, 0), row->topk);
}

template <class S> __device__ __forceinline__ void init_control(attend_sm90_control *ctl)
{
    for (int s = 0; s < S::STAGES; s++) {
        mbar_init(&ctl->full[s], S::IS_BULK ? 4 : WARPGROUP + 4);
        for (int quarter = 0; quarter < 4; quarter++)
            mbar_init(&ctl->empty[s][quarter], 8);
    }
    for (int buffer = 0; buffer < 2; buffer++) {
        mbar_init(&ctl->p_full[buffer], 4);
        mbar_init(&ctl->p_empty[buffer], 8);
    }
    mbar_init(&ctl->go, 4);
    mbar_init(&ctl->sums, 4);
    mbar_init_done();
}

/* A CTA whose part of the list is empty. */
template <class S> __device__ __forceinline__ void write_empty(const dsk_attend_block *block, const Work &work)
{
    const float zero[4] = {0.f, 0.f, 0.f, 0.f};
    const int head = (int)threadIdx.x;

    if (work.is_split) {
        if (head < work.n_heads)
            ((float *)block->part_lse)[(int64_t)work.i_part * block->h_q + work.head0 + head] = -INFINITY;
        return;
    }
    if (head < work.n_heads && work.row->lse != 0)
        ((float *)work.row->lse)[work.head0 + head] = -INFINITY;
    const Destination to = destination<S>(block, work);
    for (int i = (int)threadIdx.x; i < work.n_heads * (S::LATENT / 4); i += ATTEND_SM90_THREADS)
        store_values(to.at + (uint64_t)(i / (S::LATENT / 4) * to.head_bytes)
                         + (uint64_t)(i % (S::LATENT / 4) * 4 * value_bytes(to.dtype)),
                     to.dtype, zero);
}

/* One thread. Splits leave their count and their units for the merge. */
template <class S>
__device__ __forceinline__ void write_side(const dsk_attend_block *block, const attend_sm90_control *ctl, const Work &work,
                                           int n_head_blocks, uint32_t n_bad)
{
    if (work.is_split) {
        attend_sm90_side *side = (attend_sm90_side *)block->part_ref + (int64_t)work.i_part * n_head_blocks + work.head_block;
        side->n_bad = n_bad;
    } else if (work.head_block == 0 && work.row->n_bad != 0) {
        *(uint32_t *)work.row->n_bad = n_bad;
    }
}

template <class S> __device__ __forceinline__ void attend(const dsk_attend_block *block)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    attend_sm90_control *ctl = (attend_sm90_control *)(shared + S::CONTROL_AT);
    const uint32_t shared_at = shared_address(shared);
    const int n_splits = block->n_splits;
    const int n_head_blocks = (int)gridDim.x / n_splits;
    const int warpgroup = (int)threadIdx.x / WARPGROUP;
    const int split = (int)blockIdx.x / n_head_blocks;
    Work work;

    /* 1. what this CTA is for */
    work.row = (const dsk_attend_row *)block->rows + blockIdx.y;
    work.is_split = block->part_out != 0;
    if (work.is_split)
        let_dependents_start();
    if (work.row->out == 0)
        return;
    work.head_block = (int)blockIdx.x % n_head_blocks;
    work.head0 = work.head_block * S::HEADS;
    work.n_heads = min(block->h_q - work.head0, S::HEADS);
    work.i_part = (int)blockIdx.y * n_splits + split;
    work.first = split * block->split_entries;
    work.end = min(work.row->topk, work.first + block->split_entries);
    int first_index = 0; /* the loader's first entries: asked for before it is known how many count */
    if (warpgroup == 3)
        first_index = load_index(work, work.first + lane_position(my_lane()));
    if (threadIdx.x == 0)
        ctl->n_live = live_entries(work.row); /* read once: another process may be writing it */
    if (threadIdx.x == ATTEND_SM90_THREADS - WARP)
        init_control<S>(ctl);
    if (threadIdx.x < S::HEADS)
        ctl->head_base[threadIdx.x] = 0.f;
    if (threadIdx.x < ATTEND_SM90_MAX_GROUPS)
        ctl->ref[threadIdx.x] = 1.f;
    __syncthreads();
    work.end = min(work.end, ctl->n_live);
    work.is_narrow = ctl->n_live <= NARROW_ENTRIES;
    work.n_tiles = work.end > work.first ? (work.end - work.first + TILE - 1) / TILE : 0;
    if (work.n_tiles == 0) {
        write_empty<S>(block, work);
        if (threadIdx.x == 0)
            write_side<S>(block, ctl, work, n_head_blocks, 0);
        return;
    }

    /* 2. the query, by everyone but the loader */
    float score_unit = 0.f;
    if (warpgroup < 3)
        score_unit = bring_query<S>(ctl, shared_at, work);

    /* 3. the roles part; each pair of braces has its own registers */
    if (warpgroup == 3) {
        uint32_t n_bad;
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::LOADER_REGISTERS));
        run_loader<S>(&block->kv, ctl, shared_at + S::STAGES_AT, work, first_index, &n_bad);
        if (threadIdx.x % WARPGROUP == 0)
            write_side<S>(block, ctl, work, n_head_blocks, n_bad);
    } else if (warpgroup == 2) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::SCORE_REGISTERS));
        run_scores<S>(block, ctl, shared_at, work, score_unit);
        if (work.is_split && threadIdx.x % WARPGROUP < ATTEND_SM90_MAX_GROUPS) {
            attend_sm90_side *side = (attend_sm90_side *)block->part_ref + (int64_t)work.i_part * n_head_blocks + work.head_block;
            side->ref[threadIdx.x % WARPGROUP] = ctl->ref[threadIdx.x % WARPGROUP];
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::OUTPUT_REGISTERS));
        run_output<S>(block, ctl, shared_at, work);
    }
}

} /* namespace attend_sm90 */

#endif /* KERNELS_CUDA_ATTEND_SM90_CUH */
