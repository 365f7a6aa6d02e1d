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

#include <cuda_fp16.h>

#include "attend_sm90_ptx.cuh"
#include "attend_sm90_shared.h"
#include "attend_sm90_wgmma.cuh"

namespace attend_sm90 {

static_assert(ATTEND_SM90_TILE == 64 && DSK_GROUP_VALUES == 128, "fragment layout below");

constexpr int WARP = 32; /* lanes; every shuffle below counts on it */
constexpr int WARPGROUP = 128;
constexpr int TILE = ATTEND_SM90_TILE;
constexpr int QUARTER = TILE / 4; /* rows a loader warp brings, and a k-step of O^T uses */


enum barrier_id {
    BARRIER_QUERY = 1,  /* Q is in shared memory: warpgroups 0-2 */
    BARRIER_SCORE,      /* within warpgroup 2 */
    BARRIER_ISSUED,     /* loads of Q are under way: everyone */
    BARRIER_LOADER,     /* within warpgroup 3 */
    BARRIER_OUTPUT,     /* within warpgroup 0, and the next within warpgroup 1 */
};

constexpr int UNROLL_GROUPS = 4;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float P_TOP_LOG2 = 7.f;            /* log2 of the largest P after a raise */
constexpr float P_TOP_INVERSE = 1.f / 128.f; /* 2^-P_TOP_LOG2 */
constexpr float QUERY_FACTOR = 64.f;          /* of Q, if the largest |q| is in [2^-9, 2^9) ... */
constexpr uint32_t QUERY_TOO_LARGE = 0x4400u; /* ... in bf16 bits */
constexpr uint32_t QUERY_TOO_SMALL = 0x3b00u;
constexpr float SCALE_FLOOR = 0x1p-60f;      /* keeps scale ratios finite; a group this small adds nothing to a score */
constexpr float V_RATIO_MAX = 128.f;         /* 448 * 128 < 65504 */
constexpr float V_RATIO_MIN = 0x1p-14f;      /* normal f16 */
constexpr float V_SCALE_NOTHING = 0x1p-26f;  /* 448 times this is below 1e-5: may round to zero */
constexpr float EXACT_SCALE = 1.f;           /* values beyond 448 show the rounding of P wherever they cancel */
/* Few entries that cancel show every rounding: with scales that f16 rounds, a tile of up to so many, or a short row, is
 * exact. */
constexpr int SPARSE_ENTRIES = 8;
constexpr int NARROW_ENTRIES = 2 * TILE;

template <int LATENT_, int ROPE_, int HEADS_> struct Shape {
    static constexpr int LATENT = LATENT_;
    static constexpr int ROPE = ROPE_;
    static constexpr int HEADS = HEADS_;
    static constexpr int D_QK = LATENT + ROPE;
    static constexpr int GROUPS = LATENT / DSK_GROUP_VALUES;
    static constexpr int ROW_BYTES = attend_sm90_row_bytes(LATENT, ROPE);
    static constexpr int PITCH = attend_sm90_pitch(LATENT, ROPE);
    static constexpr int SCALES_AT = LATENT;
    static constexpr int ROPE_AT = LATENT + 4 * GROUPS;
    static constexpr bool IS_BULK = ROW_BYTES % 16 == 0; /* else rows are only 8-byte aligned */

    static constexpr int CHUNKS = LATENT / 64; /* of 64 values; RoPE is one more */
    static constexpr int CHUNK_BYTES = HEADS * 128;
    static constexpr int P_AT = attend_sm90_q_bytes(LATENT, ROPE, HEADS);
    static constexpr int P_BYTES = attend_sm90_p_bytes(HEADS);
    static constexpr int STAGES_AT = attend_sm90_stages_at(LATENT, ROPE, HEADS);
    static constexpr int STAGE_BYTES = attend_sm90_stage_bytes(LATENT, ROPE);
    static constexpr int STAGES = attend_sm90_n_stages(LATENT, ROPE, HEADS);
    static constexpr int CONTROL_AT = attend_sm90_control_at(LATENT, ROPE, HEADS);

    static constexpr int N_BLOCKS = HEADS / 8;     /* blocks of 8 heads in a fragment */
    static constexpr int THREAD_HEADS = HEADS / 4; /* heads of one thread in a fragment */
    static constexpr int WARP_VALUES = LATENT / 8; /* output values of one O^T warp */
    static constexpr int M_TILES = LATENT / 128;   /* 64-row tiles of an O^T warpgroup */
    /* Registers per thread after the roles part: twice output, score and loader are the 4 * 128 of the launch. Where O^T
     * takes 128 a thread there is no other choice that ptxas does not answer with serialised wgmmas. */
    static constexpr bool IS_LARGE = M_TILES * HEADS / 2 > 64;
    static constexpr int OUTPUT_REGISTERS = IS_LARGE ? 176 : 136;
    static constexpr int SCORE_REGISTERS = 136;
    static constexpr int LOADER_REGISTERS = IS_LARGE ? 24 : 104;

    static constexpr int QUERY_WARPS = 12;
    static constexpr int WARP_QUERIES = (HEADS + QUERY_WARPS - 1) / QUERY_WARPS;

    static_assert(2 * OUTPUT_REGISTERS + SCORE_REGISTERS + LOADER_REGISTERS == 4 * 128, "the launch's registers");
    static_assert(PITCH / 4 % 32 == 4, "bank shift of 4 a row");
    static_assert(STAGES >= 2, "a tile must load while another is used");
    static_assert(ROPE == 0 || ROPE == 64, "one chunk");
    static_assert(CONTROL_AT % 16 == 0 && P_AT % 1024 == 0 && P_BYTES % 1024 == 0, "alignment");
};

/* What one CTA does. Uniform over its threads. */
struct Work {
    const dsk_attend_row *row;
    int head_block;
    int head0;
    int n_heads;   /* real ones among HEADS */
    int first;     /* entries [first, end) of the list */
    int end;
    int n_tiles;
    bool is_narrow; /* a short row */
    int i_part;    /* row * n_splits + split */
    bool is_split;
};

/* This thread's place in a fragment: rows g and g + 8 of its warp's 16, columns 2 q and 2 q + 1 of each 8. */
struct Lane {
    int warp; /* within its warpgroup */
    int lane;
    int g;
    int q;
};

__device__ __forceinline__ Lane my_lane()
{
    const int lane = (int)threadIdx.x % WARP;
    return {(int)threadIdx.x / WARP % 4, lane, lane / 4, lane % 4};
}

/* ---- reductions over the tokens of a fragment -------------------------------------------------------- */

struct Maximum {
    __device__ static float apply(float a, float b) { return fmaxf(a, b); }
};
struct Sum {
    __device__ static float apply(float a, float b) { return a + b; }
};

/* One step: lanes that differ in bit MASK exchange halves of their 2 * HALF values, or share one value. Returns where the
 * half kept here starts. */
template <class Op, int HALF, int MASK, int N> __device__ __forceinline__ int reduce_step(float (&v)[N], int lane)
{
    if constexpr (HALF == 0) {
        v[0] = Op::apply(v[0], __shfl_xor_sync(~0u, v[0], MASK));
        return 0;
    } else {
        const bool is_upper = (lane & MASK) != 0;
#pragma unroll
        for (int i = 0; i < HALF; i++) {
            const float give = is_upper ? v[i] : v[i + HALF];
            const float keep = is_upper ? v[i + HALF] : v[i];
            v[i] = Op::apply(keep, __shfl_xor_sync(~0u, give, MASK));
        }
        return is_upper ? HALF : 0;
    }
}

/* Reduces every v[i] over the 8 lanes that share q, halving the list at each step while it can: 14 shuffles for 16 values,
 * not 48. Afterwards v[0 .. max(N / 8, 1)) belong to entries first + ... of the list; returns first. */
template <class Op, int N> __device__ __forceinline__ int reduce_tokens(float (&v)[N], int lane)
{
    int first = reduce_step<Op, N / 2, 16>(v, lane);
    first += reduce_step<Op, N / 4, 8>(v, lane);
    return first + reduce_step<Op, N / 8, 4>(v, lane);
}

/* Entry i of a thread's head list is head 8 * (i / 2) + 2 q + i % 2. */
__device__ __forceinline__ int head_of(int i, int q)
{
    return 8 * (i >> 1) + 2 * q + (i & 1);
}

/* Reduces over the warp's tokens and leaves the result of every head in ctl->head_part[warp]. */
template <class Op, class S>
__device__ __forceinline__ void publish_heads(attend_sm90_control *ctl, const Lane &me, float (&v)[S::THREAD_HEADS])
{
    const int first = reduce_tokens<Op>(v, me.lane);
#pragma unroll
    for (int i = 0; i < (S::THREAD_HEADS > 8 ? S::THREAD_HEADS / 8 : 1); i++)
        ctl->head_part[me.warp][head_of(first + i, me.q)] = v[i];
}

/* ---- query ------------------------------------------------------------------------------------------- */

/* One head's query, spread over a warp: 8 values a lane and step; RoPE in the first 8 lanes. */
template <class S> struct QueryRow {
    uint4 latent[S::LATENT / 256];
    uint4 rope;
};

template <class S>
__device__ __forceinline__ void load_query(QueryRow<S> &row, const Work &work, int head, int lane)
{
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const bool is_real = head < work.n_heads;
    const uint4 *src = (const uint4 *)(work.row->q + (uint64_t)((work.head0 + head) * work.row->q_head_bytes));
#pragma unroll
    for (int i = 0; i < S::LATENT / 256; i++)
        row.latent[i] = is_real ? __ldg(src + WARP * i + lane) : zero;
    if (S::ROPE > 0)
        row.rope = is_real && lane < S::ROPE / 8 ? __ldg(src + S::LATENT / 8 + lane) : zero;
}

__device__ __forceinline__ uint32_t max_magnitude(uint32_t sofar, const uint4 &v)
{
    const uint32_t mask = 0x7fff7fffu;
    sofar = __vmaxu2(sofar, v.x & mask);
    sofar = __vmaxu2(sofar, v.y & mask);
    sofar = __vmaxu2(sofar, v.z & mask);
    return __vmaxu2(sofar, v.w & mask);
}

/* Bits of the head's largest |q|; 0 if that is an infinity or a NaN: the head's results are lost anyway and must not take
 * the other heads' precision. */
template <class S> __device__ __forceinline__ uint32_t query_magnitude(const QueryRow<S> &row)
{
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < S::LATENT / 256; i++)
        m = max_magnitude(m, row.latent[i]);
    if (S::ROPE > 0)
        m = max_magnitude(m, row.rope);
    m = __reduce_max_sync(~0u, max(m & 0xffffu, m >> 16));
    return m < 0x7f80u ? m : 0;
}

/* Where 16-bit pair `pair` of head `head` goes in its 128-byte row of a chunk: 16-byte units swizzled by the row. */
__device__ __forceinline__ uint32_t swizzled(int head, int unit, int byte)
{
    return (uint32_t)(head * 128 + ((unit ^ (head & 7)) << 4) + byte);
}

/* Writes the row as f16 (latent) and bf16 (RoPE), multiplied by the power of two `factor`. The order of k within a chunk
 * is free as long as K's fragments use the same: a thread of the score warpgroup reads 16 contiguous bytes of a row, values
 * 32 q + 16 (chunk % 2) + [0, 16) of a group, and takes four of them per instruction: pairs 2 q (k = 2q) and 2 q + 8. */
template <class S>
__device__ __forceinline__ void store_query(const QueryRow<S> &row, uint32_t query_at, int head, int lane, float factor)
{
    /* Lanes of different chunks would meet in one bank: each takes its four pairs in another order. */
    const int turn = ((lane >> 1) & 1) | ((lane >> 4) << 1);
#pragma unroll
    for (int i = 0; i < S::LATENT / 256; i++) {
        const int eight = WARP * i + lane; /* which 8 values */
        const int chunk = (eight >> 4) * 2 + ((eight >> 1) & 1);
        const int column = 4 * ((eight >> 2) & 3);
        const uint32_t at = query_at + chunk * S::CHUNK_BYTES;
        const uint4 v = row.latent[i];
        const uint32_t a0 = turn & 1 ? v.y : v.x, a1 = turn & 1 ? v.x : v.y;
        const uint32_t a2 = turn & 1 ? v.w : v.z, a3 = turn & 1 ? v.z : v.w;
        const uint32_t pairs[4] = {turn & 2 ? a2 : a0, turn & 2 ? a3 : a1, turn & 2 ? a0 : a2, turn & 2 ? a1 : a3};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float low = __uint_as_float(pairs[k] << 16), high = __uint_as_float(pairs[k] & 0xffff0000u);
            store_shared_4(at + swizzled(head, 4 * (eight & 1) + (k ^ turn), column), pack_f16(low * factor, high * factor));
        }
    }
    if (S::ROPE > 0 && lane < S::ROPE / 8) {
        const uint32_t at = query_at + S::CHUNKS * S::CHUNK_BYTES;
        const uint32_t pairs[4] = {row.rope.x, row.rope.y, row.rope.z, row.rope.w};
        const uint32_t factors = pack_bf16(factor, factor);
#pragma unroll
        for (int k = 0; k < 4; k++)
            store_shared_4(at + swizzled(head, 4 * (lane & 1) + k, 4 * (lane >> 1)), mul_bf16x2(pairs[k], factors));
    }
}

/* The power of two that brings a magnitude (bf16 bits) to [2^14, 2^15), as far as a factor's exponent allows. */
__device__ __forceinline__ float query_factor(uint32_t magnitude)
{
    return __uint_as_float((uint32_t)min(max(268 - (int)(magnitude >> 7), 1), 253) << 23);
}

/* Phase of warpgroups 0-2: Q into shared memory. Returns what turns a raw score into log2 units. Almost any query fits f16
 * with one fixed factor, which spares a round of reading before writing; the largest |q| decides afterwards whether it did:
 * f16 must neither overflow nor lose bits of all but the smallest values. */
template <class S>
__device__ __forceinline__ float bring_query(attend_sm90_control *ctl, uint32_t query_at, const Work &work)
{
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    const int n_threads = S::QUERY_WARPS * WARP;
    const float unit = work.row->softmax_scale * LOG2_E;
    float factor = QUERY_FACTOR;
    QueryRow<S> rows[S::WARP_QUERIES]; /* heads warp, warp + 12, ... */
    uint32_t largest = 0;

#pragma unroll
    for (int u = 0; u < S::WARP_QUERIES; u++)
        load_query<S>(rows[u], work, warp + S::QUERY_WARPS * u, lane);
    bar_arrive(BARRIER_ISSUED, ATTEND_SM90_THREADS);
#pragma unroll
    for (int u = 0; u < S::WARP_QUERIES; u++) {
        largest = max(largest, query_magnitude<S>(rows[u]));
        if (warp + S::QUERY_WARPS * u < S::HEADS)
            store_query<S>(rows[u], query_at, warp + S::QUERY_WARPS * u, lane, factor);
    }
    if (lane == 0)
        ctl->q_max[warp] = largest;
    fence_async_proxy();
    bar_sync(BARRIER_QUERY, n_threads);

    for (int i = 0; i < S::QUERY_WARPS; i++)
        largest = max(largest, ctl->q_max[i]);
    if (largest >= QUERY_TOO_LARGE || (largest < QUERY_TOO_SMALL && largest > 0)) {
        factor = query_factor(largest);
#pragma unroll 1
        for (int head = warp; head < S::HEADS; head += S::QUERY_WARPS) {
            load_query<S>(rows[0], work, head, lane);
            store_query<S>(rows[0], query_at, head, lane, factor);
        }
        fence_async_proxy();
        bar_sync(BARRIER_QUERY, n_threads);
    }
    return unit / factor;
}

/* ---- loader ------------------------------------------------------------------------------------------ */

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

/* ---- scores ------------------------------------------------------------------------------------------ */

/* V and K scale of a group in one of the thread's rows; never 0, so that ratios stay finite. */
template <class S> __device__ __forceinline__ float load_scale(uint32_t row_at, int group)
{
    return fmaxf(load_shared_f32(row_at + S::SCALES_AT + 4 * group), SCALE_FLOOR);
}

/* 16 bytes of each of the thread's rows: values of chunk c. */
struct KeyBytes {
    uint4 low;
    uint4 high; /* row + 8 */
};

template <class S> __device__ __forceinline__ void load_keys(KeyBytes &bytes, uint32_t row_at, int q, int chunk)
{
    const uint32_t at = row_at + 128 * (chunk >> 1) + 16 * (chunk & 1) + 32 * q;
    bytes.low = load_shared_16(at);
    bytes.high = load_shared_16(at + 8 * S::PITCH);
}

__device__ __forceinline__ void convert_keys(const KeyBytes &bytes, uint32_t (&a)[4][4])
{
    e4m3x4_to_f16(bytes.low.x, a[0][0], a[0][2]);
    e4m3x4_to_f16(bytes.high.x, a[0][1], a[0][3]);
    e4m3x4_to_f16(bytes.low.y, a[1][0], a[1][2]);
    e4m3x4_to_f16(bytes.high.y, a[1][1], a[1][3]);
    e4m3x4_to_f16(bytes.low.z, a[2][0], a[2][2]);
    e4m3x4_to_f16(bytes.high.z, a[2][1], a[2][3]);
    e4m3x4_to_f16(bytes.low.w, a[3][0], a[3][2]);
    e4m3x4_to_f16(bytes.high.w, a[3][1], a[3][3]);
}

template <class S>
__device__ __forceinline__ void issue_chunk(float (&scores)[S::HEADS / 2], const uint32_t (&a)[4][4], uint32_t chunk_desc,
                                            int is_sum)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_f16(scores, a[k], chunk_desc + 2 * k, k > 0 ? 1 : is_sum);
    wgmma_commit();
}

/* RoPE of both rows, bf16 as stored: 16 values a thread, in the order of convert_keys. */
template <class S> __device__ __forceinline__ void load_rope(uint32_t (&a)[4][4], uint32_t row_at, int q)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t at = row_at + S::ROPE_AT + 32 * q + 16 * half;
        const uint4 low = load_shared_16(at), high = load_shared_16(at + 8 * S::PITCH);
        a[2 * half][0] = low.x;
        a[2 * half][1] = high.x;
        a[2 * half][2] = low.y;
        a[2 * half][3] = high.y;
        a[2 * half + 1][0] = low.z;
        a[2 * half + 1][1] = high.z;
        a[2 * half + 1][2] = low.w;
        a[2 * half + 1][3] = high.w;
    }
}

template <class S>
__device__ __forceinline__ void issue_rope(float (&scores)[S::HEADS / 2], const uint32_t (&a)[4][4], uint32_t query_desc)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_bf16(scores, a[k], query_desc + S::CHUNKS * (S::CHUNK_BYTES >> 4) + 2 * k, 1);
    wgmma_commit();
}

__device__ __forceinline__ void release_output(attend_sm90_control *ctl, int lane)
{
    __syncwarp();
    if (lane == 0)
        mbar_arrive(&ctl->go);
}

template <int N> __device__ __forceinline__ void multiply_rows(float (&scores)[N], float low, float high)
{
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        scores[i] *= low;
        scores[i + 1] *= low;
        scores[i + 2] *= high;
        scores[i + 3] *= high;
    }
}

/* Issues the raw scores of a tile; the last instructions are still under way on return. Between groups the f32 sums pass
 * from the unit of one group's scale to the next. `bytes` holds chunk 0. (Unrolled: with a
 * rolled loop ptxas waits between the instructions, 115 us for 78.) */
template <class S>
__device__ __forceinline__ void issue_scores(float (&scores)[S::HEADS / 2], KeyBytes &bytes, attend_sm90_control *ctl,
                                             uint32_t row_at, uint32_t query_desc, const Lane &me, bool is_go)
{
    uint32_t even[4][4], odd[4][4];
    uint32_t chunk_desc = query_desc;
    float low = load_scale<S>(row_at, 0), high = load_scale<S>(row_at + 8 * S::PITCH, 0);

    convert_keys(bytes, even);
    load_keys<S>(bytes, row_at, me.q, 1);
#pragma unroll UNROLL_GROUPS
    for (int group = 0; group < S::GROUPS; group++, chunk_desc += 2 * (S::CHUNK_BYTES >> 4)) {
        const bool is_last = group + 1 == S::GROUPS;
        issue_chunk<S>(scores, even, chunk_desc, group > 0);
        convert_keys(bytes, odd);
        if (!is_last)
            load_keys<S>(bytes, row_at, me.q, 2 * group + 2);
        else if (is_go)
            release_output(ctl, me.lane);
        issue_chunk<S>(scores, odd, chunk_desc + (S::CHUNK_BYTES >> 4), 1);
        wgmma_wait<1>();
        float factor_low = low, factor_high = high; /* after the last group: out of its unit */
        if (!is_last) {
            convert_keys(bytes, even);
            load_keys<S>(bytes, row_at, me.q, 2 * group + 3);
            low = load_scale<S>(row_at, group + 1);
            high = load_scale<S>(row_at + 8 * S::PITCH, group + 1);
            factor_low = __fdividef(factor_low, low);
            factor_high = __fdividef(factor_high, high);
        } else if constexpr (S::ROPE > 0) {
            load_rope<S>(even, row_at, me.q);
        }
        if (!is_last || S::ROPE > 0) {
            wgmma_wait<0>();
            wgmma_landed(scores);
            multiply_rows(scores, factor_low, factor_high);
        }
    }
    if constexpr (S::ROPE > 0)
        issue_rope<S>(scores, even, query_desc);
}

/* ---- softmax ----------------------------------------------------------------------------------------- */

/* Running state of the score warpgroup; the bases of the heads are in shared memory, for want of registers. */
template <class S> struct Softmax {
    float sum[S::THREAD_HEADS]; /* over this thread's tokens only */
    float inverse_ref;          /* of group q */
    float largest_fit;          /* V scales of group q up to here go on as they are; < 0: no valid entry so far ... */
    float smallest_fit;         /* ... and down to here */
    bool is_first;
};

/* Where a lane's row of the transposing store goes in a P tile: matrices 0 and 1 are 8 tokens each of one block of heads, 2
 * and 3 of the next. */
template <class S> __device__ __forceinline__ uint32_t store_lane(const Lane &me)
{
    const int matrix = me.lane >> 3, block = S::N_BLOCKS > 1 ? matrix >> 1 : 0;
    return swizzled(8 * block + (me.lane & 7), 2 * me.warp + (matrix & 1), 0);
}

/* P = 2^scores as f16 into its tile; adds up the thread's part of the row sums. Returns whether f16 overflowed: then what
 * was stored is of no use. */
template <class S>
__device__ __forceinline__ bool store_weights(const float (&scores)[S::HEADS / 2], float (&tile_sum)[S::THREAD_HEADS],
                                              uint32_t lane_at)
{
    uint32_t check = 0, m[4];

#pragma unroll
    for (int n = 0; n < S::N_BLOCKS; n++) {
        const float a = exp2_fast(scores[4 * n]), b = exp2_fast(scores[4 * n + 1]);
        const float c = exp2_fast(scores[4 * n + 2]), d = exp2_fast(scores[4 * n + 3]);
        tile_sum[2 * n] = a + c;
        tile_sum[2 * n + 1] = b + d;
        m[2 * (n & 1)] = pack_f16(a, b);
        m[2 * (n & 1) + 1] = pack_f16(c, d);
        check = add_f16x2(check, add_f16x2(m[2 * (n & 1)], m[2 * (n & 1) + 1]));
        if (n & 1)
            store_matrix_4t(lane_at + (n - 1) * 8 * 128, m[0], m[1], m[2], m[3]);
    }
    if (S::N_BLOCKS == 1)
        store_matrix_2t(lane_at, m[0], m[1]);
    return (check & 0x7c00u) == 0x7c00u || (check & 0x7c000000u) == 0x7c000000u;
}

/* The same in f32, [token][head], over both tiles. */
template <class S>
__device__ __forceinline__ void store_weights_f32(const float (&scores)[S::HEADS / 2], float (&tile_sum)[S::THREAD_HEADS],
                                                  uint32_t p_at, const Lane &me)
{
#pragma unroll
    for (int n = 0; n < S::N_BLOCKS; n++) {
        const float a = exp2_fast(scores[4 * n]), b = exp2_fast(scores[4 * n + 1]);
        const float c = exp2_fast(scores[4 * n + 2]), d = exp2_fast(scores[4 * n + 3]);
        const uint32_t at = p_at + ((16 * me.warp + me.g) * S::HEADS + 8 * n + 2 * me.q) * 4;
        tile_sum[2 * n] = a + c;
        tile_sum[2 * n + 1] = b + d;
        store_shared_f32x2(at, a, b);
        store_shared_f32x2(at + 8 * S::HEADS * 4, c, d);
    }
}

/* A V scale that its f16 ratio would misstate by more than the output can bear. */
template <class S> __device__ __forceinline__ bool is_too_small(const Softmax<S> &state, float scale)
{
    return scale < state.smallest_fit && scale > V_SCALE_NOTHING;
}

/* A tile that did not pass: moves base and ref where they must, rescales what was summed so far and shifts the tile's
 * scores. Returns whether the tile must be exact. `scale` are the V scales of the thread's two rows in group q. */
template <class S>
__device__ __forceinline__ bool settle_tile(float (&scores)[S::HEADS / 2], Softmax<S> &state, attend_sm90_control *ctl,
                                            const Lane &me, float scale0, float scale1, int buffer, bool *is_rescaled_p)
{
    const int i_thread = (int)threadIdx.x % WARPGROUP;
    float list[S::THREAD_HEADS];

    /* 1. over the warp: largest score of every head, largest and smallest V scale of every group */
#pragma unroll
    for (int n = 0; n < S::N_BLOCKS; n++) {
        list[2 * n] = fmaxf(scores[4 * n], scores[4 * n + 2]);
        list[2 * n + 1] = fmaxf(scores[4 * n + 1], scores[4 * n + 3]);
    }
    publish_heads<Maximum, S>(ctl, me, list);
    float largest = fmaxf(scale0, scale1);
    float smallest = fminf(scale0 > V_SCALE_NOTHING ? scale0 : INFINITY, scale1 > V_SCALE_NOTHING ? scale1 : INFINITY);
#pragma unroll
    for (int mask = 4; mask < WARP; mask <<= 1) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
        smallest = fminf(smallest, __shfl_xor_sync(~0u, smallest, mask));
    }
    if (me.g == 0) {
        ctl->group_largest[me.warp][me.q] = largest;
        ctl->group_smallest[me.warp][me.q] = smallest;
    }
    bar_sync(BARRIER_SCORE, WARPGROUP);

    /* 2. ref: the largest scale is 8 to 16 times it after a raise, which leaves a factor of 8 before the next */
    largest = fmaxf(fmaxf(ctl->group_largest[0][me.q], ctl->group_largest[1][me.q]),
                    fmaxf(ctl->group_largest[2][me.q], ctl->group_largest[3][me.q]));
    const float before = state.inverse_ref;
    if (largest > 0.f && (state.is_first || largest * before > V_RATIO_MAX)) {
        const int exponent = (int)(__float_as_uint(largest) >> 23);
        state.inverse_ref = __uint_as_float((uint32_t)min(max(257 - exponent, 1), 253) << 23);
    }
    if (i_thread < 4) {
        ctl->group_rescale[buffer][me.q] = state.inverse_ref / before;
        ctl->inv_ref[buffer][me.q] = state.inverse_ref;
        ctl->ref[me.q] = 1.f / state.inverse_ref;
    }

    /* 3. base of every head. Every head sees the same entries: one tells whether there are any. */
    const bool is_any = fmaxf(fmaxf(ctl->head_part[0][0], ctl->head_part[1][0]),
                              fmaxf(ctl->head_part[2][0], ctl->head_part[3][0])) > -INFINITY;
    if (i_thread < S::HEADS) {
        float delta = fmaxf(fmaxf(ctl->head_part[0][i_thread], ctl->head_part[1][i_thread]),
                            fmaxf(ctl->head_part[2][i_thread], ctl->head_part[3][i_thread]))
                      - P_TOP_LOG2;
        delta = !is_any ? 0.f : state.is_first ? delta : fmaxf(delta, 0.f);
        ctl->head_delta[i_thread] = delta;
        ctl->head_base[i_thread] += delta;
        ctl->rescale[buffer][i_thread] = state.is_first ? 0.f : exp2_fast(-delta);
    }
    bar_sync(BARRIER_SCORE, WARPGROUP);
#pragma unroll
    for (int i = 0; i < S::THREAD_HEADS; i++) {
        const float delta = ctl->head_delta[head_of(i, me.q)];
        state.sum[i] *= ctl->rescale[buffer][head_of(i, me.q)];
        scores[4 * (i >> 1) + (i & 1)] -= delta;
        scores[4 * (i >> 1) + (i & 1) + 2] -= delta;
    }
    *is_rescaled_p = !state.is_first;
    state.is_first = state.is_first && !is_any;
    state.largest_fit = state.is_first ? -1.f : fminf(V_RATIO_MAX / state.inverse_ref, EXACT_SCALE);
    state.smallest_fit = V_RATIO_MIN / state.inverse_ref;

    /* 4. does f16 hold what is left? */
    bool is_exact = false;
    for (int i = me.lane; i < 4 * S::GROUPS; i += WARP)
        is_exact = ctl->group_smallest[i / S::GROUPS][i % S::GROUPS] * ctl->inv_ref[buffer][i % S::GROUPS] < V_RATIO_MIN
                   || ctl->group_largest[i / S::GROUPS][i % S::GROUPS] > EXACT_SCALE;
    return __any_sync(~0u, is_exact);
}

/* Final sums and log-sums; scores' warpgroup. */
template <class S>
__device__ __forceinline__ void finish_sums(Softmax<S> &state, attend_sm90_control *ctl, const dsk_attend_block *block,
                                            const Work &work, const Lane &me)
{
    const int head = (int)threadIdx.x % WARPGROUP;

    bar_sync(BARRIER_SCORE, WARPGROUP);
    publish_heads<Sum, S>(ctl, me, state.sum);
    bar_sync(BARRIER_SCORE, WARPGROUP);
    if (head < S::HEADS) {
        const float sum = ctl->head_part[0][head] + ctl->head_part[1][head] + ctl->head_part[2][head] + ctl->head_part[3][head];
        /* Back from P's units first: near lse = 0 the roundings of base and of log2(sum) would show. */
        const float lse2 = sum == 0.f ? -INFINITY : ctl->head_base[head] + P_TOP_LOG2 + log2f(sum * P_TOP_INVERSE);
        float factor = sum == 0.f ? 0.f : 1.f / sum;

        if (head < work.n_heads) {
            const int i_head = work.head0 + head;
            if (work.is_split) {
                ((float *)block->part_lse)[(int64_t)work.i_part * block->h_q + i_head] = lse2;
            } else {
                if (work.row->lse != 0)
                    ((float *)work.row->lse)[i_head] = lse2 * LN_2;
                if (work.row->sink != 0 && sum != 0.f)
                    factor /= 1.f + exp2f(((const float *)work.row->sink)[i_head] * LOG2_E - lse2);
            }
        }
        ctl->inv_sum[head] = factor;
    }
    __syncwarp();
    if (me.lane == 0)
        mbar_arrive(&ctl->sums);
}

/* Whether f16 cannot hold a V scale: bits below its mantissa. (ref is a power of two.) */
__device__ __forceinline__ bool has_rest(float scale)
{
    return (__float_as_uint(scale) & 0x1fffu) != 0;
}

template <class S>
__device__ __forceinline__ void run_scores(const dsk_attend_block *block, attend_sm90_control *ctl, uint32_t shared_at,
                                           const Work &work, float score_unit)
{
    const Lane me = my_lane();
    const int my_row = 16 * me.warp + me.g;
    const int v_group = me.q % S::GROUPS;
    const uint32_t query_desc = wgmma_desc(shared_at);
    const uint32_t bases_at = shared_address(&ctl->head_base[2 * me.q]);
    const uint32_t rows_at = shared_at + S::STAGES_AT + my_row * S::PITCH;
    const uint32_t lane_at = shared_at + S::P_AT + store_lane<S>(me);
    float scores[S::HEADS / 2];
    KeyBytes bytes;
    Softmax<S> state;
    bool was_exact = false;

#pragma unroll
    for (int i = 0; i < S::THREAD_HEADS; i++)
        state.sum[i] = 0.f;
    state.inverse_ref = 1.f;
    state.largest_fit = -1.f;
    state.smallest_fit = 0.f;
    state.is_first = true;
    mbar_wait(&ctl->full[0], 0);
    load_keys<S>(bytes, rows_at, me.q, 0);

    int stage = 0, phase = 0; /* of this tile; phase flips when the stages have been gone through */
    for (int tile = 0; tile < work.n_tiles; tile++) {
        const int buffer = tile & 1;
        const uint32_t row_at = rows_at + stage * S::STAGE_BYTES;
        const uint32_t p_at = lane_at + buffer * S::P_BYTES;
        bool is_rescaled = false, is_exact = false;

        /* 1. raw scores; what the next steps need is fetched while the last of them are computed */
        issue_scores<S>(scores, bytes, ctl, row_at, query_desc, me, tile > 0);
        float2 base[S::N_BLOCKS];
#pragma unroll
        for (int n = 0; n < S::N_BLOCKS; n++)
            base[n] = load_shared_f32x2(bases_at + 32 * n);
        const float scale0 = load_shared_f32(row_at + S::SCALES_AT + 4 * v_group);
        const float scale1 = load_shared_f32(row_at + 8 * S::PITCH + S::SCALES_AT + 4 * v_group);
        const uint2 masks = load_shared_8(shared_address(ctl->valid[stage]));
        mbar_wait(&ctl->p_empty[buffer], ((tile >> 1) & 1) ^ 1);
        if (was_exact) /* the tile before lies in both buffers */
            mbar_wait(&ctl->p_empty[buffer ^ 1], ((tile - 1) >> 1) & 1);
        bool is_unfit = fmaxf(scale0, scale1) > state.largest_fit || is_too_small(state, scale0) || is_too_small(state, scale1);
        bool is_sparse = work.is_narrow;
        if (threadIdx.x % WARPGROUP == 0)
            ctl->p_flags[buffer] = 0;
        float unit0 = score_unit, unit1 = score_unit;
        if (S::ROPE == 0) { /* the sums are still in the unit of the last group */
            unit0 *= load_scale<S>(row_at, S::GROUPS - 1);
            unit1 *= load_scale<S>(row_at + 8 * S::PITCH, S::GROUPS - 1);
        }
        wgmma_wait<0>();
        wgmma_landed(scores);

        /* 2. in log2 units above base; nothing where there is no entry */
#pragma unroll
        for (int n = 0; n < S::N_BLOCKS; n++) {
            scores[4 * n] = fmaf(scores[4 * n], unit0, -base[n].x);
            scores[4 * n + 1] = fmaf(scores[4 * n + 1], unit0, -base[n].y);
            scores[4 * n + 2] = fmaf(scores[4 * n + 2], unit1, -base[n].x);
            scores[4 * n + 3] = fmaf(scores[4 * n + 3], unit1, -base[n].y);
        }
        if ((masks.x & masks.y) != ~0u) {
            const uint32_t valid = ((me.warp & 2) != 0 ? masks.y : masks.x) >> (16 * (me.warp & 1) + me.g);
#pragma unroll
            for (int i = 0; i < S::HEADS / 2; i++)
                scores[i] = (valid >> (i & 2 ? 8 : 0) & 1) != 0 ? scores[i] : -INFINITY;
            is_sparse |= __popc(masks.x) + __popc(masks.y) <= SPARSE_ENTRIES;
        }
        if (is_sparse)
            is_unfit |= has_rest(scale0) || has_rest(scale1);

        /* 3. weights, as if nothing had to move; then the vote on whether that held */
        float tile_sum[S::THREAD_HEADS];
        is_unfit |= store_weights<S>(scores, tile_sum, p_at);
        if (bar_any(BARRIER_SCORE, WARPGROUP, is_unfit)) {
            is_exact = settle_tile<S>(scores, state, ctl, me, scale0, scale1, buffer, &is_rescaled);
            if (is_sparse)
                is_exact |= bar_any(BARRIER_SCORE, WARPGROUP, has_rest(scale0) || has_rest(scale1));
            if (threadIdx.x % WARPGROUP == 0)
                ctl->p_flags[buffer] = ATTEND_SM90_P_SETTLED | (is_rescaled ? ATTEND_SM90_P_RESCALE : 0u)
                                       | (is_exact ? ATTEND_SM90_P_EXACT : 0u);
            if (is_exact) {
                if (tile > 0)
                    mbar_wait(&ctl->p_empty[buffer ^ 1], ((tile - 1) >> 1) & 1);
                store_weights_f32<S>(scores, tile_sum, shared_at + S::P_AT, me);
            } else {
                store_weights<S>(scores, tile_sum, p_at);
            }
        }
        fence_async_proxy();
        __syncwarp();
        if (me.lane == 0)
            mbar_arrive(&ctl->p_full[buffer]);
        was_exact = is_exact;

        /* 4. the next tile's first bytes */
#pragma unroll
        for (int i = 0; i < S::THREAD_HEADS; i++)
            state.sum[i] += tile_sum[i];
        if (++stage == S::STAGES) {
            stage = 0;
            phase ^= 1;
        }
        if (tile + 1 < work.n_tiles) {
            mbar_wait(&ctl->full[stage], phase);
            load_keys<S>(bytes, rows_at + stage * S::STAGE_BYTES, me.q, 0);
        } else {
            release_output(ctl, me.lane);
        }
    }
    finish_sums<S>(state, ctl, block, work, me);
}

/* ---- output ------------------------------------------------------------------------------------------ */

/* O^T of one thread: values d0 + [0, 4) (m-tiles 0, 1) and, with 512 values, d0 + 32 + [0, 4) (2, 3); m-tile m of a half
 * holds value 2 m in entries 4 n + e and 2 m + 1 in 4 n + 2 + e, for head 8 n + 2 q + e. */
template <class S> using Output = float[S::M_TILES][S::HEADS / 2];

template <class S> __device__ __forceinline__ void rescale_output(Output<S> &o, attend_sm90_control *ctl, int buffer, int group, int q)
{
    const float of_group = ctl->group_rescale[buffer][group];
#pragma unroll
    for (int i = 0; i < S::THREAD_HEADS; i++) {
        const float factor = of_group * ctl->rescale[buffer][head_of(i, q)];
#pragma unroll
        for (int m = 0; m < S::M_TILES; m++) {
            o[m][4 * (i >> 1) + (i & 1)] *= factor;
            o[m][4 * (i >> 1) + (i & 1) + 2] *= factor;
        }
    }
}

/* Bytes of four values of tokens 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of a quarter. */
template <class S> __device__ __forceinline__ void load_values(uint32_t (&bytes)[4], uint32_t at)
{
    bytes[0] = load_shared_4(at);
    bytes[1] = load_shared_4(at + S::PITCH);
    bytes[2] = load_shared_4(at + 8 * S::PITCH);
    bytes[3] = load_shared_4(at + 9 * S::PITCH);
}

/* scale / ref as f16 of the tokens of a fragment: pairs 2 q, 2 q + 1 and 2 q + 8, 2 q + 9 of each quarter. */
struct ScalePairs {
    uint32_t low, high;
};

/* Of the quarter whose token 2 q has its scale at `at`. Returns the union of the bits of the scales. */
template <class S> __device__ __forceinline__ uint32_t load_pairs(ScalePairs &pairs, uint32_t at, float inverse_ref)
{
    const float s0 = load_shared_f32(at), s1 = load_shared_f32(at + S::PITCH);
    const float s8 = load_shared_f32(at + 8 * S::PITCH), s9 = load_shared_f32(at + 9 * S::PITCH);
    pairs.low = pack_f16(s0 * inverse_ref, s1 * inverse_ref);
    pairs.high = pack_f16(s8 * inverse_ref, s9 * inverse_ref);
    return __float_as_uint(s0) | __float_as_uint(s1) | __float_as_uint(s8) | __float_as_uint(s9);
}

/* What f16 leaves of two ratios, as f16. */
__device__ __forceinline__ uint32_t rest_of(float ratio0, float ratio1, uint32_t rounded)
{
    const float2 f = __half22float2(*(const __half2 *)&rounded);
    return pack_f16(ratio0 - f.x, ratio1 - f.y);
}

template <class S>
__device__ __forceinline__ ScalePairs load_rests(const ScalePairs &pairs, uint32_t at, float inverse_ref)
{
    return {rest_of(load_shared_f32(at) * inverse_ref, load_shared_f32(at + S::PITCH) * inverse_ref, pairs.low),
            rest_of(load_shared_f32(at + 8 * S::PITCH) * inverse_ref, load_shared_f32(at + 9 * S::PITCH) * inverse_ref,
                    pairs.high)};
}

template <class S>
__device__ __forceinline__ uint32_t load_tile_pairs(ScalePairs (&pairs)[4], uint32_t at, float inverse_ref)
{
    uint32_t bits = 0;
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++)
        bits |= load_pairs<S>(pairs[quarter], at + QUARTER * quarter * S::PITCH, inverse_ref);
    return bits;
}

/* The fragment of m-tile m % 2: pairs of tokens by byte permutation, which is the transpose, then e4m3 -> f16, then scales.
 * With HAS_REST the scales are sums of two f16, and the products are rounded once, not twice. */
template <bool HAS_REST>
__device__ __forceinline__ void convert_values(uint32_t (&a)[4], const uint32_t (&bytes)[4], int odd, const ScalePairs &scale,
                                               const ScalePairs &rest)
{
    const uint32_t select = odd ? 0x7362u : 0x5140u;
    uint32_t v0, v1, v2, v3;
    e4m3x4_to_f16(__byte_perm(bytes[0], bytes[1], select), v0, v1);
    e4m3x4_to_f16(__byte_perm(bytes[2], bytes[3], select), v2, v3);
    if (HAS_REST) {
        a[0] = fma_f16x2(v0, scale.low, mul_f16x2(v0, rest.low));
        a[1] = fma_f16x2(v1, scale.low, mul_f16x2(v1, rest.low));
        a[2] = fma_f16x2(v2, scale.high, mul_f16x2(v2, rest.high));
        a[3] = fma_f16x2(v3, scale.high, mul_f16x2(v3, rest.high));
    } else {
        a[0] = mul_f16x2(v0, scale.low);
        a[1] = mul_f16x2(v1, scale.low);
        a[2] = mul_f16x2(v2, scale.high);
        a[3] = mul_f16x2(v3, scale.high);
    }
}

/* O += V^T P^T of a tile. Each quarter of the stage is handed back when its bytes are in registers. `bytes` holds the first. */
template <class S, bool HAS_REST>
__device__ __forceinline__ void multiply_tile(Output<S> &o, uint32_t (&bytes)[4], uint32_t values_at, uint32_t p_at,
                                              const ScalePairs (&scales)[4], uint32_t scales_at, float inverse_ref,
                                              uint64_t *empty, int lane)
{
    constexpr int IN_FLIGHT = 4;
    constexpr int STEPS = 4 * S::M_TILES;
    const uint32_t p_desc = wgmma_desc(p_at);
    uint32_t a[IN_FLIGHT][4];
    ScalePairs rest = {0, 0};

#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int quarter = step / S::M_TILES, m = step % S::M_TILES;
        if (HAS_REST && m == 0)
            rest = load_rests<S>(scales[quarter], scales_at + QUARTER * quarter * S::PITCH, inverse_ref);
        convert_values<HAS_REST>(a[step % IN_FLIGHT], bytes, m & 1, scales[quarter], rest);
        if ((m & 1) == 1 && step + 1 < STEPS) {
            const int next_quarter = (step + 1) / S::M_TILES, next_m = (step + 1) % S::M_TILES;
            load_values<S>(bytes, values_at + QUARTER * next_quarter * S::PITCH + 32 * (next_m / 2));
        }
        if (m == S::M_TILES - 1) {
            __syncwarp();
            if (lane == 0)
                mbar_arrive(&empty[quarter]);
        }
        wgmma_fence();
        wgmma_f16(o[m], a[step % IN_FLIGHT], p_desc + 2 * quarter, 1);
        wgmma_commit();
        if (step + 1 == STEPS)
            wgmma_wait<0>();
        else
            wgmma_wait<IN_FLIGHT - 1>();
    }
#pragma unroll
    for (int m = 0; m < S::M_TILES; m++)
        wgmma_landed(o[m]);
}

/* The same in f32 by FFMA, from P [token][head]: no range is too wide for it. */
template <class S>
__device__ __forceinline__ void multiply_tile_exact(Output<S> &o, const uint16_t *valid, uint32_t rows_at, int d0,
                                                    uint32_t p_at, int group, float inverse_ref, int q)
{
#pragma unroll 1
    for (int token = 0; token < TILE; token++) {
        if ((valid[token / QUARTER] >> (token % QUARTER) & 1) == 0)
            continue;
        const uint32_t row_at = rows_at + token * S::PITCH;
        const float scale = load_shared_f32(row_at + S::SCALES_AT + 4 * group) * inverse_ref;
#pragma unroll
        for (int half = 0; half < S::M_TILES / 2; half++) {
            uint32_t pair[2];
            float v[4];
            e4m3x4_to_f16(load_shared_4(row_at + d0 + 32 * half), pair[0], pair[1]);
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i] = __half2float(__ushort_as_half((unsigned short)(pair[i >> 1] >> (16 * (i & 1))))) * scale;
#pragma unroll
            for (int i = 0; i < S::THREAD_HEADS; i++) {
                const float p = load_shared_f32(p_at + (token * S::HEADS + head_of(i, q)) * 4);
                float *low = &o[2 * half][4 * (i >> 1) + (i & 1)], *high = &o[2 * half + 1][4 * (i >> 1) + (i & 1)];
                low[0] = fmaf(p, v[0], low[0]);
                low[2] = fmaf(p, v[1], low[2]);
                high[0] = fmaf(p, v[2], high[0]);
                high[2] = fmaf(p, v[3], high[2]);
            }
        }
    }
}

constexpr int DTYPE_PART = 0; /* f16 in units of ref */

/* Where a CTA's results go. In registers: the stores below might change the argument block for all the compiler knows. */
struct Destination {
    uint64_t at; /* of the CTA's first head */
    int64_t head_bytes;
    int dtype; /* DSK_DTYPE_* or DTYPE_PART */
};

template <class S> __device__ __forceinline__ Destination destination(const dsk_attend_block *block, const Work &work)
{
    if (work.is_split)
        return {block->part_out + 2 * (((uint64_t)work.i_part * block->h_q + work.head0) * S::LATENT), 2 * S::LATENT, DTYPE_PART};
    return {work.row->out + (uint64_t)(work.head0 * work.row->out_head_bytes), work.row->out_head_bytes, block->out_dtype};
}

/* Four values in a row, at the element type's width. */
__device__ __forceinline__ void store_values(uint64_t at, int dtype, const float (&v)[4])
{
    if (dtype == DSK_DTYPE_F32)
        *(float4 *)at = make_float4(v[0], v[1], v[2], v[3]);
    else
        *(uint2 *)at = dtype == DSK_DTYPE_BF16 ? make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]))
                                               : make_uint2(pack_f16(v[0], v[1]), pack_f16(v[2], v[3]));
}

__device__ __forceinline__ int value_bytes(int dtype)
{
    return dtype == DSK_DTYPE_F32 ? 4 : 2;
}

/* One copy of the code per element type: it runs once and comes cold, so its length is its time. */
template <class S, int DTYPE>
__device__ __forceinline__ void store_output(const Output<S> &o, const attend_sm90_control *ctl, const Destination &to,
                                             int n_heads, int d0, int group, int q)
{
    const float ref = DTYPE == DTYPE_PART ? 1.f : ctl->ref[group];
    const int64_t head_bytes = DTYPE == DTYPE_PART ? 2 * S::LATENT : to.head_bytes;
    uint64_t at = to.at + (uint64_t)(2 * q * head_bytes) + (uint64_t)(d0 * value_bytes(DTYPE));

#pragma unroll
    for (int i = 0; i < S::THREAD_HEADS; i++) {
        const int entry = 4 * (i >> 1) + (i & 1);
        const float factor = ctl->inv_sum[head_of(i, q)] * ref;
        if (head_of(i, q) < n_heads) {
#pragma unroll
            for (int half = 0; half < S::M_TILES / 2; half++) {
                /* + 0 makes +0 of -0: a row without an entry is +0, whatever the sign of what was summed */
                const float v[4] = {fmaf(o[2 * half][entry], factor, 0.f), fmaf(o[2 * half][entry + 2], factor, 0.f),
                                    fmaf(o[2 * half + 1][entry], factor, 0.f),
                                    fmaf(o[2 * half + 1][entry + 2], factor, 0.f)};
                store_values(at + (uint64_t)(32 * half * value_bytes(DTYPE)), DTYPE, v);
            }
        }
        at += (uint64_t)((i & 1 ? 7 : 1) * head_bytes);
    }
}

template <class S>
__device__ __forceinline__ void run_output(const dsk_attend_block *block, attend_sm90_control *ctl, uint32_t shared_at,
                                           const Work &work)
{
    const Lane me = my_lane();
    const int warp = (int)threadIdx.x / WARP; /* 0..7 */
    const int d0 = warp * S::WARP_VALUES + 4 * me.g;
    const int group = warp * S::WARP_VALUES / DSK_GROUP_VALUES;
    const uint32_t stages_at = shared_at + S::STAGES_AT;
    float inverse_ref = 1.f;
    Output<S> o;

#pragma unroll
    for (int m = 0; m < S::M_TILES; m++)
#pragma unroll
        for (int i = 0; i < S::HEADS / 2; i++)
            o[m][i] = 0.f;

    int stage = 0, phase = 0;
    for (int tile = 0; tile < work.n_tiles; tile++) {
        const int buffer = tile & 1;
        const uint32_t rows_at = stages_at + stage * S::STAGE_BYTES;
        const uint32_t values_at = rows_at + 2 * me.q * S::PITCH + d0;
        const uint32_t scales_at = rows_at + 2 * me.q * S::PITCH + S::SCALES_AT + 4 * group;
        const uint32_t p_at = shared_at + S::P_AT + buffer * S::P_BYTES;
        uint32_t bytes[4];
        ScalePairs scales[4];

        /* 1. ahead of P: first bytes and, unless ref moves, scales */
        mbar_wait(&ctl->full[stage], phase);
        load_values<S>(bytes, values_at);
        const uint32_t bits = load_tile_pairs<S>(scales, scales_at, inverse_ref);
        const bool is_rounded = bar_any(BARRIER_OUTPUT + warp / 4, WARPGROUP, (bits & 0x1fffu) != 0);

        /* 2. P is there, and its turn has come */
        mbar_wait(&ctl->p_full[buffer], (tile >> 1) & 1);
        mbar_wait(&ctl->go, tile & 1);
        const uint32_t flags = ctl->p_flags[buffer];
        if (flags & ATTEND_SM90_P_SETTLED) {
            inverse_ref = ctl->inv_ref[buffer][group];
            load_tile_pairs<S>(scales, scales_at, inverse_ref);
            if (flags & ATTEND_SM90_P_RESCALE)
                rescale_output<S>(o, ctl, buffer, group, me.q);
        }
        if (flags & ATTEND_SM90_P_EXACT) {
            multiply_tile_exact<S>(o, ctl->valid[stage], rows_at, d0, shared_at + S::P_AT, group, inverse_ref, me.q);
            __syncwarp();
            if (me.lane < 4)
                mbar_arrive(&ctl->empty[stage][me.lane]);
        } else if (is_rounded) {
            multiply_tile<S, true>(o, bytes, values_at, p_at, scales, scales_at, inverse_ref, ctl->empty[stage], me.lane);
        } else {
            multiply_tile<S, false>(o, bytes, values_at, p_at, scales, scales_at, inverse_ref, ctl->empty[stage], me.lane);
        }
        __syncwarp();
        if (me.lane == 0)
            mbar_arrive(&ctl->p_empty[buffer]);
        if (++stage == S::STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    const Destination to = destination<S>(block, work);
    mbar_wait(&ctl->sums, 0);
    if (to.dtype == DTYPE_PART)
        store_output<S, DTYPE_PART>(o, ctl, to, work.n_heads, d0, group, me.q);
    else if (to.dtype == DSK_DTYPE_BF16)
        store_output<S, DSK_DTYPE_BF16>(o, ctl, to, work.n_heads, d0, group, me.q);
    else
        store_output<S, DSK_DTYPE_F32>(o, ctl, to, work.n_heads, d0, group, me.q);
}

/* ---- the CTA ----------------------------------------------------------------------------------------- */

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
