// attend_mma.cu - sparse attention on any device since sm_80, by mma.sync:
//   s[h][j] = scale * sum_d q[h][d] k_j[d];  out[h] = sum_j exp(s[h][j] - lse[h]) v_j;  lse[h] = ln sum_j exp(s[h][j])
//
// A block takes 16 or 64 heads of a row and one split of its list, in tiles of 32 tokens. Cache rows come by cp.async, as
// they lie, into one or two stages; the warp that asked for a row turns it into bf16, exactly (e4m3 has fewer bits), and
// keeps its scales aside. Scores: bf16 products of a group of 128, summed in fp32, times the group's scale, so nothing
// is rounded but fp32 sums. V's scales go into P, which is then the sum of two bf16 (17 bits): a scale of any size
// and P of any size stay accurate, at the price of a second product.
// Invalid entries are not loaded: their K row is zero, their scale 0 and their score -inf, so no byte of theirs counts.
//
// Shared memory: Q [heads][pitch], K [32][pitch], S or P [k warps][heads][36] fp32, scales [5][32], factors [heads],
// 1/l [heads], flags [32], then the raw stages; how many of those, the launch's size tells.
#include "attend_mma.h"
#include "rows.cuh"

static constexpr unsigned ALL = 0xffffffffu;
static constexpr int T = ATTEND_MMA_TILE, SP = ATTEND_MMA_SCORE_PITCH;
static constexpr int DIM_WARPS = 8; // that share the dims of the output; the rest of the warps take other heads
static constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// ---- instructions -----------------------------------------------------------------------------

DEV uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

template <int BYTES>
DEV void copy_async(uint32_t to, const void *from)
{
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

DEV void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N>
DEV void copy_wait() // until all but the last N groups are there
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

DEV void load_matrices(uint32_t m[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at));
}

DEV void load_matrices_transposed(uint32_t m[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at));
}

DEV void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEV float power2(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- a block's view of its work -----------------------------------------------------------------

template <int LATENT, int ROPE, int HEADS>
struct shape {
    static constexpr int latent = LATENT, rope = ROPE, heads = HEADS, d_qk = LATENT + ROPE, d_v = LATENT;
    static constexpr int pitch = ATTEND_MMA_PITCH(LATENT + ROPE); // bytes
    static constexpr int k_warps = ATTEND_MMA_K_WARPS(HEADS);
    static constexpr int n_groups = LATENT / DSK_GROUP_VALUES;
    static constexpr int threads = ATTEND_MMA_THREADS(HEADS), warps = threads / 32;
    static constexpr int rows_per_warp = T / warps;      // of K
    static constexpr int heads_per_warp = HEADS / warps; // of the softmax
    static constexpr int dims = LATENT / DIM_WARPS;      // of V, a warp's
    static constexpr int m_all = HEADS / 16;             // tiles of 16 heads
    static constexpr int m_tiles = m_all / (warps / DIM_WARPS); // ... a warp's, of the output
    static constexpr int n_tiles = dims / 8;             // of 8 dims
    static_assert(m_all * (T / 16) * k_warps == warps, "a warp forms the scores of 16 tokens with 16 heads");
};

struct work {
    dsk_attend_row row;
    dsk_kv_view kv;
    int32_t begin, end; // entries of this split, live lanes only
    int32_t head0, n_heads;
    int32_t n_stages;
    uint32_t stage_bytes, raw_pitch;
};

struct memory { // shared, as addresses of bytes
    uint8_t *q, *k, *raw;
    float *scores, *scales, *factors, *l_inverse;
    int32_t *is_valid;
    uint32_t *n_bad;
};

template <class S>
DEV memory carve(uint8_t *base)
{
    memory m;

    m.q = base;
    m.k = m.q + S::heads * S::pitch;
    m.scores = (float *)(m.k + T * S::pitch);
    m.scales = m.scores + S::k_warps * S::heads * SP;
    m.factors = m.scales + ATTEND_MMA_SCALES * T;
    m.l_inverse = m.factors + S::heads;
    m.is_valid = (int32_t *)(m.l_inverse + S::heads);
    m.n_bad = (uint32_t *)(m.is_valid + T);
    m.raw = base + ATTEND_MMA_FIXED_BYTES(S::d_qk, S::heads);
    return m;
}

// ---- Q -----------------------------------------------------------------------------------------

template <class S>
DEV void load_q(const work &w, const memory &m)
{
    const bool is_aligned = ((w.row.q | (uint64_t)w.row.q_head_bytes) & 15u) == 0;

    for (int i = threadIdx.x; i < S::heads * (S::d_qk / 8); i += S::threads) {
        const int head = i / (S::d_qk / 8), at = i % (S::d_qk / 8);
        const uint16_t *from = (const uint16_t *)(w.row.q + (uint64_t)((w.head0 + head) * w.row.q_head_bytes)) + 8 * at;
        uint4 *to = (uint4 *)(m.q + head * S::pitch + 16 * at);

        if (head >= w.n_heads)
            *to = make_uint4(0, 0, 0, 0);
        else if (is_aligned)
            copy_async<16>(shared_address(to), from);
        else
            *to = load_bf16x8(from, false);
    }
}

// ---- K: list, raw rows, bf16 ----------------------------------------------------------------------

// The cache row of an entry or NULL. Each index is read once, here.
DEV const uint8_t *find_row(const work &w, int32_t entry, int row_bytes, uint32_t &n_bad)
{
    if (entry >= w.end)
        return NULL;
    const int64_t index = load_once((const int32_t *)w.row.indices + entry);
    int64_t slot = index;

    if (w.row.space == DSK_SPACE_LOGICAL)
        slot = map_position(index, w.row.seq_len, (const int32_t *)w.row.table, w.row.n_table, w.kv.n_slots);
    if (slot < 0 || slot >= w.kv.n_slots) {
        n_bad += index != -1;
        return NULL;
    }
    return row_of(w.kv, row_bytes, slot);
}

// A warp's rows of a tile: lane r holds the address of its row r, NULL where there is none.
template <class S>
DEV void ask_rows(const work &w, uint8_t *stage, const uint8_t *row, int row_bytes, bool by_16)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

#pragma unroll
    for (int r = 0; r < S::rows_per_warp; r++) {
        const uint8_t *from = (const uint8_t *)__shfl_sync(ALL, (unsigned long long)row, r);
        const uint32_t to = shared_address(stage) + (warp * S::rows_per_warp + r) * w.raw_pitch;

        if (from == NULL)
            continue;
        if (by_16) {
            for (int at = 16 * lane; at < row_bytes; at += 16 * 32)
                copy_async<16>(to + at, from + at);
        } else {
            for (int at = 8 * lane; at < row_bytes; at += 8 * 32)
                copy_async<8>(to + at, from + at);
        }
    }
}

DEV uint4 widen8(uint2 bytes) // e4m3 to bf16, exact
{
    float v[8];

    unpack_e4m3(bytes.x, v);
    unpack_e4m3(bytes.y, v + 4);
    return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

// One raw row to bf16, and its scales.
template <class L>
DEV void convert_row(const uint8_t *raw, uint8_t *k, float *scales, float raw_scale, int lane)
{
    constexpr int n_coded = L::enc == BF16 ? 0 : L::enc == RAW ? L::d_qk : L::latent; // values in e4m3

    for (int at = 8 * lane; at < n_coded; at += 8 * 32)
        *(uint4 *)(k + 2 * at) = widen8(*(const uint2 *)(raw + at));
    for (int at = n_coded + 8 * lane; at < L::d_qk; at += 8 * 32) {
        const uint8_t *from = raw + (L::enc == BF16 ? 0 : L::rope_at - 2 * L::latent) + 2 * at;
        const uint2 lo = *(const uint2 *)from, hi = *(const uint2 *)(from + 8);

        *(uint4 *)(k + 2 * at) = make_uint4(lo.x, lo.y, hi.x, hi.y);
    }
    if (lane < ATTEND_MMA_SCALES) {
        float scale = L::enc == RAW ? raw_scale : 1.0f;

        if (L::enc == SCALED && lane < L::n_groups)
            scale = *(const float *)(raw + L::scale_at + 4 * lane);
        scales[lane * T] = scale;
    }
}

template <class S>
DEV void clear_row(uint8_t *k, float *scales, int lane)
{
    for (int at = 16 * lane; at < 2 * S::d_qk; at += 16 * 32)
        *(uint4 *)(k + at) = make_uint4(0, 0, 0, 0);
    if (lane < ATTEND_MMA_SCALES)
        scales[lane * T] = 0;
}

template <class S, class L>
DEV void convert_rows(const work &w, const memory &m, const uint8_t *stage, const uint8_t *row)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

#pragma unroll
    for (int r = 0; r < S::rows_per_warp; r++) {
        const int token = warp * S::rows_per_warp + r;
        const bool is_valid = __shfl_sync(ALL, (unsigned long long)row, r) != 0;

        if (is_valid)
            convert_row<L>(stage + token * w.raw_pitch, m.k + token * S::pitch, m.scales + token, w.kv.raw_scale, lane);
        else
            clear_row<S>(m.k + token * S::pitch, m.scales + token, lane);
        if (lane == 0)
            m.is_valid[token] = is_valid;
    }
}

// ---- scores --------------------------------------------------------------------------------------

// 16 heads x 16 tokens of this warp, over its share of the dims.
template <class S>
DEV void form_scores(const memory &m)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int half = warp % 2, m_tile = warp / 2 % S::m_all, k_warp = warp / 2 / S::m_all;
    const uint32_t q = shared_address(m.q) + (16 * m_tile + lane % 16) * S::pitch + 16 * (lane / 16);
    const uint32_t k = shared_address(m.k) + (16 * half + lane % 8 + 8 * (lane / 16)) * S::pitch + 16 * (lane / 8 % 2);
    constexpr int share = S::latent / S::k_warps, per_group = share < DSK_GROUP_VALUES ? share : DSK_GROUP_VALUES;
    constexpr int rope_share = S::rope / S::k_warps;
    float sum[2][4] = {};

    auto add = [&](int first, int n_values, int group) {
        float part[2][4] = {};

#pragma unroll 4
        for (int at = 0; at < n_values; at += 16) {
            uint32_t a[4], b[4];

            load_matrices(a, q + 2 * (first + at));
            load_matrices(b, k + 2 * (first + at));
            mma(part[0], a, b[0], b[1]);
            mma(part[1], a, b[2], b[3]);
        }
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const float2 s = *(const float2 *)(m.scales + group * T + 16 * half + 8 * t + 2 * c);

            sum[t][0] = fmaf(part[t][0], s.x, sum[t][0]);
            sum[t][1] = fmaf(part[t][1], s.y, sum[t][1]);
            sum[t][2] = fmaf(part[t][2], s.x, sum[t][2]);
            sum[t][3] = fmaf(part[t][3], s.y, sum[t][3]);
        }
    };
#pragma unroll 1 // or the loop over tiles outgrows the instruction cache
    for (int i = 0; i < share / per_group; i++) {
        const int first = k_warp * share + i * per_group;

        add(first, per_group, first / DSK_GROUP_VALUES);
    }
    if (S::rope > 0)
        add(S::latent + k_warp * rope_share, rope_share, ATTEND_MMA_SCALES - 1);

    float *to = m.scores + (k_warp * S::heads + 16 * m_tile + g) * SP + 16 * half + 2 * c;
#pragma unroll
    for (int t = 0; t < 2; t++) {
        *(float2 *)(to + 8 * t) = make_float2(sum[t][0], sum[t][1]);
        *(float2 *)(to + 8 * t + 8 * SP) = make_float2(sum[t][2], sum[t][3]);
    }
}

// A warp's heads, a lane a token. m and l are base 2; l is the lane's own part of the sum. True if a maximum rose.
template <class S>
DEV bool softmax(const memory &mem, float scale2, float m[S::heads_per_warp], float l[S::heads_per_warp])
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool is_valid = mem.is_valid[lane];
    bool has_risen = false;

#pragma unroll
    for (int i = 0; i < S::heads_per_warp; i++) {
        const int head = warp * S::heads_per_warp + i;
        float x = 0, top, base, factor, p;

#pragma unroll
        for (int part = 0; part < S::k_warps; part++)
            x += mem.scores[(part * S::heads + head) * SP + lane];
        x = is_valid ? x * scale2 : -INFINITY;
        top = x;
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2)
            top = fmaxf(top, __shfl_xor_sync(ALL, top, mask));
        top = fmaxf(top, m[i]);
        base = top == -INFINITY ? 0 : top; // no real score yet: exp(-inf - 0) is the 0 that is wanted
        factor = power2(m[i] - base);
        p = is_valid ? power2(x - base) : 0;
        has_risen |= top != m[i];
        m[i] = top;
        l[i] = l[i] * factor + p;
        mem.scores[head * SP + lane] = p; // over part 0, which this lane has read
        if (lane == 0)
            mem.factors[head] = factor;
    }
    return has_risen;
}

// ---- output ---------------------------------------------------------------------------------------

// P times the scales of the warp's group, for 16 heads and 16 tokens, as hi + lo.
template <class S>
DEV void make_p(const memory &m, int m_tile, int step, int group, uint32_t hi[4], uint32_t lo[4])
{
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const float *p = m.scores + (16 * m_tile + g) * SP + 16 * step + 2 * c;
    const float *scales = m.scales + group * T + 16 * step + 2 * c;

#pragma unroll
    for (int i = 0; i < 4; i++) { // rows g, g + 8; then columns + 8
        const float2 x = *(const float2 *)(p + (i % 2) * 8 * SP + (i / 2) * 8);
        const float2 s = *(const float2 *)(scales + (i / 2) * 8);
        const float a = x.x * s.x, b = x.y * s.y;

        hi[i] = pack_bf16(a, b);
        lo[i] = pack_bf16(a - bf16_to_f32(hi[i] & 0xffffu), b - bf16_to_f32(hi[i] >> 16));
    }
}

template <class S>
DEV void add_values(const memory &m, float o[S::m_tiles][S::n_tiles][4])
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int dim0 = warp % DIM_WARPS * S::dims, m0 = warp / DIM_WARPS * S::m_tiles;
    const int group = dim0 / DSK_GROUP_VALUES;
    const uint32_t v = shared_address(m.k) + (lane % 16) * S::pitch + 2 * dim0 + 16 * (lane / 16);

#pragma unroll 1
    for (int step = 0; step < T / 16; step++) {
        uint32_t hi[S::m_tiles][4], lo[S::m_tiles][4];

#pragma unroll
        for (int t = 0; t < S::m_tiles; t++)
            make_p<S>(m, m0 + t, step, group, hi[t], lo[t]);
#pragma unroll
        for (int n = 0; n < S::n_tiles / 2; n++) {
            uint32_t b[4];

            load_matrices_transposed(b, v + 16 * step * S::pitch + 32 * n);
#pragma unroll
            for (int t = 0; t < S::m_tiles; t++) {
                mma(o[t][2 * n], hi[t], b[0], b[1]);
                mma(o[t][2 * n + 1], hi[t], b[2], b[3]);
                mma(o[t][2 * n], lo[t], b[0], b[1]);
                mma(o[t][2 * n + 1], lo[t], b[2], b[3]);
            }
        }
    }
}

template <class S>
DEV void rescale(const memory &m, float o[S::m_tiles][S::n_tiles][4])
{
    const int first = 16 * (threadIdx.x / 32 / DIM_WARPS * S::m_tiles) + threadIdx.x % 32 / 4;

#pragma unroll
    for (int t = 0; t < S::m_tiles; t++) {
        const float a = m.factors[first + 16 * t], b = m.factors[first + 16 * t + 8];

#pragma unroll
        for (int n = 0; n < S::n_tiles; n++) {
            o[t][n][0] *= a;
            o[t][n][1] *= a;
            o[t][n][2] *= b;
            o[t][n][3] *= b;
        }
    }
}

// 1 / (1 + exp(sink - lse)): -inf leaves out as it is, +inf takes all of it.
DEV float sink_factor(const dsk_attend_row &row, int head, float lse)
{
    if (row.sink == 0)
        return 1;
    const float sink = ((const float *)row.sink)[head];
    return sink == -INFINITY ? 1 : 1 / (1 + expf(sink - lse));
}

DEV void store_pair(uint64_t at, int32_t dtype, float x, float y)
{
    if (dtype == DSK_DTYPE_F32) {
        ((float *)at)[0] = x;
        ((float *)at)[1] = y;
        return;
    }
    const uint32_t pair = pack_bf16(x, y);
    if ((at & 3u) == 0) {
        *(uint32_t *)at = pair;
    } else {
        ((uint16_t *)at)[0] = (uint16_t)pair;
        ((uint16_t *)at)[1] = (uint16_t)(pair >> 16);
    }
}

// Finishes l, then lse and the factor that O is multiplied with. An empty split has l = 0: out is 0, lse -inf.
template <class S>
DEV void finish_sums(const dsk_attend_block &block, const work &w, const memory &mem, int64_t i_part, float m[],
                     float l[])
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

#pragma unroll
    for (int i = 0; i < S::heads_per_warp; i++) {
        const int head = warp * S::heads_per_warp + i;
        float sum = l[i], lse;

#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2)
            sum += __shfl_xor_sync(ALL, sum, mask);
        lse = sum == 0 ? -INFINITY : (m[i] == -INFINITY ? 0 : m[i]) * LN2 + logf(sum);
        if (lane != 0)
            continue;
        mem.l_inverse[head] = sum == 0 ? 0 : 1 / sum;
        if (head >= w.n_heads)
            continue;
        if (block.n_splits > 1) {
            ((float *)block.part_lse)[i_part * block.h_q + w.head0 + head] = lse;
            continue;
        }
        mem.l_inverse[head] *= sum == 0 ? 1 : sink_factor(w.row, w.head0 + head, lse);
        if (w.row.lse != 0)
            ((float *)w.row.lse)[w.head0 + head] = lse;
    }
}

template <class S>
DEV void store_out(const dsk_attend_block &block, const work &w, const memory &m, int64_t i_part,
                   const float o[S::m_tiles][S::n_tiles][4])
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const bool is_part = block.n_splits > 1;
    const int32_t dtype = is_part ? DSK_DTYPE_F32 : block.out_dtype;
    const int64_t head_bytes = is_part ? 4 * S::d_v : w.row.out_head_bytes;
    const uint64_t out = is_part ? block.part_out + (uint64_t)(i_part * block.h_q * head_bytes) : w.row.out;

#pragma unroll
    for (int t = 0; t < S::m_tiles; t++) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int head = 16 * (warp / DIM_WARPS * S::m_tiles + t) + g + 8 * side;
            const float factor = m.l_inverse[head];

            if (head >= w.n_heads)
                continue;
#pragma unroll
            for (int n = 0; n < S::n_tiles; n++) {
                const int dim = warp % DIM_WARPS * S::dims + 8 * n + 2 * c;
                // A head without a valid entry is +0 whatever the sums of zeros are.
                const float x = factor == 0 ? 0 : o[t][n][2 * side] * factor;
                const float y = factor == 0 ? 0 : o[t][n][2 * side + 1] * factor;

                store_pair(out + (uint64_t)((w.head0 + head) * head_bytes) + (dtype == DSK_DTYPE_F32 ? 4 : 2) * dim,
                           dtype, x, y);
            }
        }
    }
}

// ---- the block --------------------------------------------------------------------------------------

template <class S, class L>
DEV void attend_row(const dsk_attend_block &block, work &w, uint8_t *shared)
{
    const memory mem = carve<S>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int n_tiles = (w.end - w.begin + T - 1) / T;
    const bool by_16 = ((w.kv.base | (uint64_t)w.kv.page_pitch_bytes) & 15u) == 0 && L::row_bytes % 16 == 0;
    const int64_t i_part = (int64_t)blockIdx.x * block.n_splits + blockIdx.z;
    const uint8_t *row[2] = {NULL, NULL}, *ahead;
    float o[S::m_tiles][S::n_tiles][4] = {}, m[S::heads_per_warp], l[S::heads_per_warp];
    uint32_t n_bad = 0;

    w.raw_pitch = ATTEND_MMA_RAW_PITCH(L::row_bytes);
    w.stage_bytes = ATTEND_MMA_STAGE_BYTES(L::row_bytes);
#pragma unroll
    for (int i = 0; i < S::heads_per_warp; i++) {
        m[i] = -INFINITY;
        l[i] = 0;
    }
    if (threadIdx.x == 0)
        *mem.n_bad = 0;
    auto find = [&](int tile) {
        return lane < S::rows_per_warp && tile < n_tiles
                   ? find_row(w, w.begin + tile * T + warp * S::rows_per_warp + lane, L::row_bytes, n_bad)
                   : NULL;
    };
    load_q<S>(w, mem); // arrives with tile 0
    // Tiles 0 .. n_stages - 1 are asked for, the rows of the next one are known.
    for (int i = 0; i < w.n_stages; i++) {
        row[i] = find(i);
        ask_rows<S>(w, mem.raw + i * w.stage_bytes, row[i], L::row_bytes, by_16);
        copy_commit();
    }
    ahead = find(w.n_stages);
    for (int tile = 0; tile < n_tiles; tile++) {
        const int i = w.n_stages == 2 ? tile % 2 : 0;
        uint8_t *stage = mem.raw + i * w.stage_bytes;
        const uint8_t *current = i == 0 ? row[0] : row[1];

        if (w.n_stages == 2)
            copy_wait<1>();
        else
            copy_wait<0>();
        __syncthreads(); // the tile before is done with K and P; Q is there
        convert_rows<S, L>(w, mem, stage, current);
        __syncthreads(); // a stage is asked for again by the warp that read it, but the fence covers all
        ask_rows<S>(w, stage, ahead, L::row_bytes, by_16);
        copy_commit();
        if (i == 0)
            row[0] = ahead;
        else
            row[1] = ahead;
        ahead = find(tile + w.n_stages + 1);
        form_scores<S>(mem);
        __syncthreads();
        if (__syncthreads_or(softmax<S>(mem, w.row.softmax_scale * LOG2E, m, l)) && tile > 0)
            rescale<S>(mem, o);
        add_values<S>(mem, o);
    }
    copy_wait<0>();
    finish_sums<S>(block, w, mem, i_part, m, l);
    n_bad = __reduce_add_sync(ALL, n_bad);
    __syncthreads();
    store_out<S>(block, w, mem, i_part, o);
    if (blockIdx.y != 0)
        return;
    if (lane == 0)
        atomicAdd(mem.n_bad, n_bad);
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    if (block.n_splits > 1)
        ((uint32_t *)block.part_ref)[i_part] = *mem.n_bad;
    else if (w.row.n_bad != 0)
        *(uint32_t *)w.row.n_bad = *mem.n_bad;
}

DEV uint32_t dynamic_shared_bytes()
{
    uint32_t bytes;

    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

template <class S>
DEV bool begin_work(const dsk_attend_block &block, work &w)
{
    w.row = ((const dsk_attend_row *)block.rows)[blockIdx.x];
    if (w.row.out == 0)
        return false; // padding
    w.kv = block.kv;
    int32_t live = w.row.topk;
    if (w.row.length != 0)
        live = max(0, min(live, load_once((const int32_t *)w.row.length)));
    const int64_t begin = (int64_t)blockIdx.z * block.split_entries, end = begin + block.split_entries;
    w.begin = (int32_t)min(begin, (int64_t)live);
    w.end = (int32_t)min(end, (int64_t)live);
    w.head0 = blockIdx.y * S::heads;
    w.n_heads = min(S::heads, block.h_q - w.head0);
    return true;
}

template <class S, class SCALED_L, class BF16_L, class RAW_L>
DEV void attend(const dsk_attend_block *block)
{
    extern __shared__ __align__(16) uint8_t shared[];
    const uint32_t left = dynamic_shared_bytes() - ATTEND_MMA_FIXED_BYTES(S::d_qk, S::heads);
    work w;

    wait_for_stream();
    if (!begin_work<S>(*block, w))
        return;
    switch (w.kv.layout) {
    case DSK_LAYOUT_SCALED_512_64:
    case DSK_LAYOUT_SCALED_512_0:
    case DSK_LAYOUT_SCALED_256_0:
        w.n_stages = left >= 2 * ATTEND_MMA_STAGE_BYTES(SCALED_L::row_bytes) ? 2 : 1;
        attend_row<S, SCALED_L>(*block, w, shared);
        break;
    case DSK_LAYOUT_RAW_512_64:
        w.n_stages = left >= 2 * ATTEND_MMA_STAGE_BYTES(RAW_L::row_bytes) ? 2 : 1;
        attend_row<S, RAW_L>(*block, w, shared);
        break;
    default:
        w.n_stages = left >= 2 * ATTEND_MMA_STAGE_BYTES(BF16_L::row_bytes) ? 2 : 1;
        attend_row<S, BF16_L>(*block, w, shared);
        break;
    }
}

#define ATTEND_MMA_KERNEL(latent, rope, heads, SCALED_L, BF16_L, RAW_L)                                      \
    extern "C" __global__ void __launch_bounds__(ATTEND_MMA_THREADS(heads), heads == 16 ? 2 : 1)             \
        attend_mma_##latent##_##rope##_h##heads(const dsk_attend_block *block)                               \
    {                                                                                                        \
        attend<shape<latent, rope, heads>, SCALED_L, BF16_L, RAW_L>(block);                                  \
    }

ATTEND_MMA_KERNEL(512, 64, 16, scaled_512_64, bf16_576, raw_512_64)
ATTEND_MMA_KERNEL(512, 64, 64, scaled_512_64, bf16_576, raw_512_64)
ATTEND_MMA_KERNEL(512, 0, 16, scaled_512_0, bf16_512, scaled_512_0)
ATTEND_MMA_KERNEL(512, 0, 64, scaled_512_0, bf16_512, scaled_512_0)
ATTEND_MMA_KERNEL(256, 0, 16, scaled_256_0, bf16_256, scaled_256_0)
ATTEND_MMA_KERNEL(256, 0, 64, scaled_256_0, bf16_256, scaled_256_0)

// ---- combine -----------------------------------------------------------------------------------------

// Splits in their order; those with lse = -inf are skipped whatever their out holds.
extern "C" __global__ void __launch_bounds__(ATTEND_MMA_COMBINE_THREADS)
    attend_mma_combine(const dsk_attend_block *block)
{
    const dsk_attend_row *row = (const dsk_attend_row *)block->rows + blockIdx.x;
    const int head = blockIdx.y, n_splits = block->n_splits, h_q = block->h_q;
    const int64_t first = (int64_t)blockIdx.x * n_splits;
    const float *lse_parts = (const float *)block->part_lse + first * h_q + head;
    const int d_v = block->kv.layout == DSK_LAYOUT_SCALED_256_0 || block->kv.layout == DSK_LAYOUT_BF16_256 ? 256 : 512;
    float most = -INFINITY, sum = 0;

    if (row->out == 0)
        return;
    for (int i = 0; i < n_splits; i++)
        most = fmaxf(most, lse_parts[i * h_q]);
    for (int i = 0; i < n_splits; i++)
        sum += most == -INFINITY ? 0 : expf(lse_parts[i * h_q] - most);
    const float lse = sum == 0 ? -INFINITY : most + logf(sum);
    const float factor = sum == 0 ? 0 : sink_factor(*row, head, lse) / sum;
    const uint64_t out = row->out + (uint64_t)(head * row->out_head_bytes);
    for (int dim = 4 * threadIdx.x; dim < d_v; dim += 4 * ATTEND_MMA_COMBINE_THREADS) {
        float4 x = make_float4(0, 0, 0, 0);

        for (int i = 0; i < n_splits && sum != 0; i++) {
            const float part_lse = lse_parts[i * h_q];

            if (part_lse == -INFINITY)
                continue;
            const float weight = expf(part_lse - most) * factor;
            const float4 v = *(const float4 *)((const float *)block->part_out + ((first + i) * h_q + head) * d_v + dim);
            x.x = fmaf(weight, v.x, x.x);
            x.y = fmaf(weight, v.y, x.y);
            x.z = fmaf(weight, v.z, x.z);
            x.w = fmaf(weight, v.w, x.w);
        }
        const int elem = block->out_dtype == DSK_DTYPE_F32 ? 4 : 2;
        store_pair(out + elem * dim, block->out_dtype, x.x, x.y);
        store_pair(out + elem * (dim + 2), block->out_dtype, x.z, x.w);
    }
    if (threadIdx.x != 0)
        return;
    if (row->lse != 0)
        ((float *)row->lse)[head] = lse;
    if (head == 0 && row->n_bad != 0) {
        uint32_t n_bad = 0;

        for (int i = 0; i < n_splits; i++)
            n_bad += ((const uint32_t *)block->part_ref)[first + i];
        *(uint32_t *)row->n_bad = n_bad;
    }
}
