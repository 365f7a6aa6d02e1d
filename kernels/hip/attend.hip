// attend.hip - sparse attention for gfx942 and gfx950 by MFMA:
//   s[h][j] = scale * sum_d q[h][d] k_j[d];  out[h] = sum_j exp(s[h][j] - lse[h]) v_j;  lse[h] = ln sum_j exp(s[h][j])
//
// A block of four waves takes 16 or 64 heads of a row and one split of its list, in tiles of 16 or 32 tokens that lie in LDS once, by
// rows, as bf16: K is the row, V its front. With 64 heads each wave has 16 heads and all dims. With 16 the waves share the dims,
// add up their partial scores through LDS and each form the same P.
// Rows of the next tile are under way in registers while one is computed; tiles: attend_rows.hiph, products:
// attend_products.hiph, those in e4m3: attend_fp8.hiph, results: attend_results.hiph, geometry and LDS: attend_shape.hiph.
#include "attend_fp8.hiph"
#include "attend_results.hiph"
#include "attend_rows.hiph"

// ---- the block --------------------------------------------------------------------------------------------

DEV uint64_t row_at(const dsk_attend_block &block)
{
    return block.rows + (uint64_t)(block_x() * (int64_t)sizeof(dsk_attend_row));
}

DEV bool begin_work(const dsk_attend_block &block, int heads, work &w)
{
    w.row = load_struct<dsk_attend_row>(row_at(block));
    if (w.row.out == 0)
        return false; // padding
    w.kv = block.kv;
    int32_t live = w.row.topk;
    if (w.row.length != 0)
        live = greatest(0, least(live, load_index(w.row.length)));
    const int64_t begin = (int64_t)block_z() * block.split_entries, end = begin + block.split_entries;
    w.begin = (int32_t)least(begin, (int64_t)live);
    w.end = (int32_t)least(end, (int64_t)live);
    w.head0 = block_y() * heads;
    w.n_heads = least(heads, block.h_q - w.head0);
    w.wave = wave_x();
    return true;
}

template <class S, bool IS_FP8 = S::is_fp8>
struct query_of {
    typedef query<S> type;
};
template <class S>
struct query_of<S, true> {
    typedef query_fp8<S> type;
};

template <class S>
DEV void attend(uint64_t block_at, uint8_t *lds)
{
    const dsk_attend_block block = load_struct<dsk_attend_block>(block_at);
    uint32_t *total_bad = (uint32_t *)(lds + S::n_bad_at), n_bad = 0;
    state<S> st = {-INF, 0, 0, {}};
    entry next, later;
    fetched<S> f;
    typename query_of<S>::type q;
    work w;

    if (!begin_work(block, S::heads, w))
        return;
    const int k_wave = w.wave / S::head_waves, head = 16 * (w.wave % S::head_waves) + row_in_wave();
    const int n_tiles = (w.end - w.begin + S::tile - 1) / S::tile;
    if (thread_x() == 0)
        *total_bad = 0;

    // 1. The first tile is under way, the entries of the next ones too.
    ask_index<S>(w, 0, next);
    ask_page(w, next);
    f.row = find_row<S>(w, next, n_bad);
    fetch<S>(f);
    ask_index<S>(w, 1, next);
    ask_index<S>(w, 2, later);
    ask_page(w, next);
    const float unit = S::L::enc == RAW ? w.kv.raw_scale * CODE_UNIT : 1; // of all values
    const float scale2 = load_q(q, w, head, k_wave) * w.row.softmax_scale * LOG2E * unit;
    block_sync();
#pragma unroll 1
    for (int tile = 0; tile < n_tiles; tile++) {
        f32x4 s[S::n_sub];

        // 2. This tile into LDS; the next one under way, after the entries that are wanted sooner.
        if constexpr (S::is_fp8)
            store_codes<S>(lds, w, f);
        else
            store_tile<S>(lds, w, f);
        f.row = find_row<S>(w, next, n_bad);
        ask_page(w, later);
        next = later;
        ask_index<S>(w, tile + 3, later);
        fetch<S>(f);
        block_sync();
        // 3. Products.
#pragma unroll
        for (int sub = 0; sub < S::n_sub; sub++)
            s[sub] = form_scores(lds, q, sub, k_wave);
        if constexpr (S::k_waves > 1)
            share_scores<S>(lds, w.wave, s);
        softmax<S>(lds, s, scale2, st);
        if constexpr (S::is_fp8)
            add_codes<S>(lds, s, k_wave, st);
        else
            add_values<S>(lds, s, k_wave, st);
        block_sync(); // all are done with the tile
    }

    // 4. Results.
    finish<S>(block, w, head, k_wave, unit, st);
    count_bad(block, w, total_bad, n_bad);
}

// WAVES of each SIMD: what LDS leaves room for, as far as registers do without spills.
#define ATTEND_KERNEL(layout, n, waves)                                                                      \
    KERNEL(ATTEND_HIP_THREADS, waves, attend_##layout##_h##n, uint64_t, block)                               \
    {                                                                                                        \
        typedef shape<layout, n> S;                                                                          \
        SHARED_BYTES(lds, S::lds_bytes);                                                                     \
        attend<S>(block, lds);                                                                                               \
    }
ATTEND_KERNEL(scaled_512_64, 16, 2)
ATTEND_KERNEL(scaled_512_64, 64, 1)
ATTEND_KERNEL(scaled_512_0, 16, 2)
ATTEND_KERNEL(scaled_512_0, 64, 1)
ATTEND_KERNEL(scaled_256_0, 16, 2)
ATTEND_KERNEL(scaled_256_0, 64, 1)
ATTEND_KERNEL(bf16_576, 16, 2)
ATTEND_KERNEL(bf16_576, 64, 1)
ATTEND_KERNEL(bf16_512, 16, 2)
ATTEND_KERNEL(bf16_512, 64, 1)
ATTEND_KERNEL(bf16_256, 16, 2)
ATTEND_KERNEL(bf16_256, 64, 1)
ATTEND_KERNEL(raw_512_64, 16, 2)
ATTEND_KERNEL(raw_512_64, 64, 1)

#define ATTEND_FP8_KERNEL(n, waves)                                                                          \
    KERNEL(ATTEND_HIP_THREADS, waves, attend_fp8_raw_512_64_h##n, uint64_t, block)                           \
    {                                                                                                        \
        typedef shape_fp8<n> S;                                                                              \
        SHARED_BYTES(lds, S::lds_bytes);                                                                     \
        attend<S>(block, lds);                                                                               \
    }
ATTEND_FP8_KERNEL(16, 2)
ATTEND_FP8_KERNEL(64, 1)

// ---- combine ----------------------------------------------------------------------------------------------

// Splits in their order; those with lse = -inf are skipped whatever their out holds.
KERNEL(ATTEND_HIP_COMBINE_THREADS, 4, attend_combine, uint64_t, block_at)
{
    const dsk_attend_block block = load_struct<dsk_attend_block>(block_at);
    const dsk_attend_row row = load_struct<dsk_attend_row>(row_at(block));
    const int head = block_y(), n_splits = block.n_splits;
    const int64_t first = block_x() * n_splits;
    const int d_v = block.kv.layout == DSK_LAYOUT_SCALED_256_0 || block.kv.layout == DSK_LAYOUT_BF16_256 ? 256 : 512;
    float most = -INF, sum = 0;

    if (row.out == 0)
        return;
    auto lse_of = [&](int i) { return load_at<float>(block.part_lse + 4 * (uint64_t)((first + i) * block.h_q + head)); };
    for (int i = 0; i < n_splits; i++)
        most = greatest(most, lse_of(i));
    for (int i = 0; i < n_splits; i++)
        sum += most == -INF ? 0 : exp_of(lse_of(i) - most);
    const float lse = sum == 0 ? -INF : most + log_of(sum);
    const float factor = sum == 0 ? 0 : sink_factor(row, head, lse) / sum;
    const uint64_t out = row.out + (uint64_t)(head * row.out_head_bytes);
    for (int dim = 4 * thread_x(); dim < d_v; dim += 4 * ATTEND_HIP_COMBINE_THREADS) {
        f32x4 x = {0, 0, 0, 0};

        for (int i = 0; i < n_splits && sum != 0; i++) {
            const float part_lse = lse_of(i);

            if (part_lse == -INF)
                continue;
            x += exp_of(part_lse - most) * factor
                 * load_at<f32x4>(block.part_out + 4 * (uint64_t)(((first + i) * block.h_q + head) * d_v + dim));
        }
        store4(out + (uint64_t)((block.out_dtype == DSK_DTYPE_F32 ? 4 : 2) * dim), block.out_dtype, x);
    }
    if (thread_x() != 0)
        return;
    if (row.lse != 0)
        store_at(row.lse + 4 * (uint64_t)head, lse);
    if (head == 0 && row.n_bad != 0) {
        uint32_t n_bad = 0;

        for (int i = 0; i < n_splits; i++)
            n_bad += load_at<uint32_t>(block.part_ref + 4 * (uint64_t)(first + i));
        store_at(row.n_bad, n_bad);
    }
}
