// rows.cu - append (quantise), the readers (dequantise) and the gather, a row per warp.
//
//   append  rows bf16 [n_rows, d_qk] -> cache rows of slots[n_rows]
//   read    cache rows -> out bf16 [n_rows, d_qk], dense
// A lane takes eight values at a time: 16 bytes of bf16, 8 bytes of e4m3. A group of 128 values is then 16 lanes, so
// its largest magnitude takes four shuffles. All accesses of a warp are to neighbouring bytes.
// Bound by memory: 656 + 1152 bytes a row of scaled_512_64 in either direction.
#include "../gpu/gpu_args.h"
#include "rows.cuh"

static constexpr unsigned ALL = 0xffffffffu;
static constexpr int WARP = 32, WARPS = 8; // of a block

// ---- append ---------------------------------------------------------------------------------

// Two bf16 in a word: largest magnitudes of the low and of the high halves, as bits.
DEV uint32_t max_halves(uint4 x)
{
    return __vmaxu2(__vmaxu2(x.x & 0x7fff7fffu, x.y & 0x7fff7fffu), __vmaxu2(x.z & 0x7fff7fffu, x.w & 0x7fff7fffu));
}

// Eight values: their largest finite magnitude as bf16 bits, which order like the magnitudes; the count of those that
// are not finite goes to n_odd, and NaN becomes 0, which is what it writes.
DEV uint32_t survey(uint4 &x, uint32_t &n_odd)
{
    const uint32_t halves = max_halves(x);
    uint32_t most = max(halves & 0xffffu, halves >> 16);

    if (most < 0x7f80u)
        return most;
    uint32_t *w = &x.x;
    most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) { // rare
        const uint32_t shift = 16 * (i % 2), mag = w[i / 2] >> shift & 0x7fffu;

        n_odd += mag >= 0x7f80u;
        most = max(most, mag < 0x7f80u ? mag : 0u);
        if (mag > 0x7f80u)
            w[i / 2] &= ~(0xffffu << shift);
    }
    return most;
}

// What a group is divided by, and the same as a factor where that is exact.
struct divisor {
    float scale, factor;
    bool is_exact; // scale is a power of two, so x * factor rounds like x / scale
};

DEV float scale_pow2(uint32_t amax_bits)
{
    uint32_t bits = amax_bits << 16;

    if (__uint_as_float(bits) <= DSK_E4M3_MAX * 0x1p-13f)
        return 0x1p-13f;
    // amax = 1.m * 2^e, and 448 = 1.75 * 2^8
    uint32_t up = (bits & 0x7fffffu) > 0x600000u;
    return __uint_as_float(((bits >> 23) - 8u + up) << 23);
}

DEV divisor divisor_of(uint32_t amax_bits, uint32_t rule)
{
    divisor d;

    d.is_exact = rule == DSK_RULE_POW2;
    d.scale = d.is_exact ? scale_pow2(amax_bits)
                         : fmaxf(__fdiv_rn(__uint_as_float(amax_bits << 16), DSK_E4M3_MAX), 0x1p-126f);
    d.factor = d.is_exact ? __uint_as_float((254u << 23) - __float_as_uint(d.scale)) : 0;
    return d;
}

template <class QUOTIENT>
DEV uint2 quantise8_by(uint4 x, QUOTIENT quotient)
{
    const uint32_t w[4] = {x.x, x.y, x.z, x.w};
    float v[8];

#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = quotient(__uint_as_float(w[i] << 16));
        v[2 * i + 1] = quotient(__uint_as_float(w[i] & 0xffff0000u));
    }
    return make_uint2(pack_e4m3(v[0], v[1], v[2], v[3]), pack_e4m3(v[4], v[5], v[6], v[7]));
}

DEV uint2 quantise8(uint4 x, const divisor &d)
{
    if (d.is_exact)
        return quantise8_by(x, [&](float v) { return v * d.factor; });
    return quantise8_by(x, [&](float v) { return __fdiv_rn(v, d.scale); });
}

template <class L>
DEV uint32_t append_scaled(const uint16_t *x, uint8_t *dst, uint32_t rule, bool is_write, bool is_aligned, int lane)
{
    constexpr int n_steps = L::latent / (8 * WARP);
    uint4 latent[n_steps], rope = make_uint4(0, 0, 0, 0);
    uint32_t n_odd = 0;

#pragma unroll
    for (int i = 0; i < n_steps; i++)
        latent[i] = load_bf16x8(x + 8 * (WARP * i + lane), is_aligned);
    if (8 * lane < L::rope)
        rope = load_bf16x8(x + L::latent + 8 * lane, is_aligned);
#pragma unroll
    for (int i = 0; i < n_steps; i++) {
        uint32_t most = survey(latent[i], n_odd);

#pragma unroll
        for (int mask = 8; mask > 0; mask /= 2)
            most = max(most, __shfl_xor_sync(ALL, most, mask));
        const divisor d = divisor_of(most, rule);
        if (!is_write)
            continue;
        *(uint2 *)(dst + 8 * (WARP * i + lane)) = quantise8(latent[i], d);
        if (lane % 16 == 0)
            *(float *)(dst + L::scale_at + 4 * (2 * i + lane / 16)) = d.scale;
    }
    uint4 checked = rope; // the bits are copied as they are
    survey(checked, n_odd);
    if (is_write && 8 * lane < L::rope) {
        *(uint2 *)(dst + L::rope_at + 16 * lane) = make_uint2(rope.x, rope.y);
        *(uint2 *)(dst + L::rope_at + 16 * lane + 8) = make_uint2(rope.z, rope.w);
    }
    return n_odd;
}

template <class L>
DEV uint32_t append_raw(const uint16_t *x, uint8_t *dst, float scale, bool is_write, bool is_aligned, int lane)
{
    const divisor d = {scale, 0, false};
    uint32_t n_odd = 0;

    for (int at = 8 * lane; at < L::d_qk; at += 8 * WARP) {
        uint4 v = load_bf16x8(x + at, is_aligned);

        survey(v, n_odd);
        if (is_write)
            *(uint2 *)(dst + at) = quantise8(v, d);
    }
    return n_odd;
}

template <class L>
DEV uint32_t append_bf16(const uint16_t *x, uint8_t *dst, bool is_write, bool is_aligned, int lane)
{
    uint32_t n_odd = 0;

    for (int at = 8 * lane; at < L::d_qk; at += 8 * WARP) {
        const uint4 bits = load_bf16x8(x + at, is_aligned);
        uint4 checked = bits;

        survey(checked, n_odd);
        if (is_write) {
            *(uint2 *)(dst + 2 * at) = make_uint2(bits.x, bits.y);
            *(uint2 *)(dst + 2 * at + 8) = make_uint2(bits.z, bits.w);
        }
    }
    return n_odd;
}

// Returns this lane's count of values that are not finite.
template <class L>
DEV uint32_t append_row(const gpu_append_args &args, int64_t i, int64_t slot, bool is_write, int lane)
{
    const uint16_t *x = (const uint16_t *)(args.rows + (uint64_t)(i * args.row_bytes));
    uint8_t *dst = row_of(args.kv, L::row_bytes, slot);
    const bool is_aligned = ((args.rows | (uint64_t)args.row_bytes) & 15u) == 0;

    if (L::enc == BF16)
        return append_bf16<L>(x, dst, is_write, is_aligned, lane);
    if (L::enc == RAW)
        return append_raw<L>(x, dst, args.kv.raw_scale, is_write, is_aligned, lane);
    return append_scaled<L>(x, dst, args.rule, is_write, is_aligned, lane);
}

DEV int64_t row_of_warp()
{
    return (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;
}

// The host has checked the slots; they are bounded again because they came through memory.
DEV void append(const gpu_append_args &args, int64_t i, int32_t slot)
{
    const int lane = threadIdx.x % WARP;
    uint32_t n_odd = 0;
    const bool is_write = slot >= 0 && slot < args.kv.n_slots;
    if (is_write || slot == GPU_SLOT_SUPERSEDED)
        FOR_LAYOUT(args.kv.layout, n_odd = append_row<L>(args, i, is_write ? slot : 0, is_write, lane))
    if (args.n_nonfinite != 0) {
        n_odd = __reduce_add_sync(ALL, n_odd);
        if (lane == 0)
            ((uint32_t *)args.n_nonfinite)[i] = n_odd;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP) gpu_append(const gpu_append_args args)
{
    const int64_t i = row_of_warp();

    wait_for_stream();
    if (i < args.n_rows)
        append(args, i, ((const int32_t *)args.slots)[i]);
}

// The fronts of gpu_append_few and gpu_append_runs.
template <int N>
struct few_front {
    gpu_append_args args;
    int32_t slots[N];
};
template <int N>
struct runs_front {
    gpu_append_args args;
    int32_t n_runs, reserved;
    gpu_run runs[N];
};
static_assert(sizeof(few_front<GPU_FEW_SLOTS>) == sizeof(gpu_append_few), "the same layout");
static_assert(sizeof(runs_front<GPU_MAX_RUNS>) == sizeof(gpu_append_runs), "the same layout");

template <int N>
DEV void append_few(const few_front<N> &few)
{
    const int64_t i = row_of_warp();

    wait_for_stream();
    if (i < few.args.n_rows)
        append(few.args, i, few.slots[i]);
}

template <int N>
DEV void append_runs(const runs_front<N> &list)
{
    const int64_t i = row_of_warp();
    int low = 0, high = list.n_runs - 1; // the last run that starts at or before i

    while (low < high) {
        const int mid = (low + high + 1) / 2;

        if (list.runs[mid].row <= i)
            low = mid;
        else
            high = mid - 1;
    }
    wait_for_stream();
    if (i < list.args.n_rows)
        append(list.args, i, list.runs[low].slot < 0 ? GPU_SLOT_SKIP
                                                     : (int32_t)(list.runs[low].slot + (i - list.runs[low].row)));
}

#define APPEND_KERNEL(kind, n)                                                                               \
    extern "C" __global__ void __launch_bounds__(WARPS *WARP)                                                \
        gpu_append_##kind##_##n(const __grid_constant__ kind##_front<n> front)                               \
    {                                                                                                        \
        append_##kind(front);                                                                                \
    }
APPEND_KERNEL(few, 64)
APPEND_KERNEL(few, 960)
APPEND_KERNEL(runs, 24)
APPEND_KERNEL(runs, 150)
APPEND_KERNEL(runs, 500)

extern "C" __global__ void __launch_bounds__(WARPS *WARP) gpu_append_check(const gpu_append_args args)
{
    const int lane = threadIdx.x % WARP;
    const int64_t i = row_of_warp();
    uint32_t n_odd = 0;

    wait_for_stream();
    if (i >= args.n_rows || ((const int32_t *)args.slots)[i] < 0)
        return;
    FOR_LAYOUT(args.kv.layout, n_odd = append_row<L>(args, i, 0, false, lane))
    if (__any_sync(ALL, n_odd != 0) && lane == 0)
        atomicMin((int32_t *)args.first_bad, (int32_t)i);
}

// ---- read -----------------------------------------------------------------------------------

// A product that is NaN, with the bits of the CPU's: a NaN code before a NaN scale before 0 * inf.
DEV uint32_t nan_bits(uint32_t byte, float scale)
{
    if ((byte & 0x7fu) == 0x7fu)
        return (byte & 0x80u) << 8 | 0x7fc0u;
    return scale != scale ? __float_as_uint(scale) >> 16 | 0x40u : 0xffc0u;
}

DEV uint4 dequant8(uint2 bytes, float scale)
{
    const uint32_t in[2] = {bytes.x, bytes.y};
    uint32_t out[4];
    // 0x7f and 0xff are the NaN codes: adding 1 to the magnitude reaches the top bit
    const uint32_t codes = ((in[0] & 0x7f7f7f7fu) + 0x01010101u) | ((in[1] & 0x7f7f7f7fu) + 0x01010101u);
    float v[8];

    unpack_e4m3(in[0], v);
    unpack_e4m3(in[1], v + 4);
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] *= scale;
#pragma unroll
    for (int i = 0; i < 4; i++)
        out[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
    if ((codes & 0x80808080u) != 0 || !(fabsf(scale) < INFINITY)) { // one may be NaN
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t byte = in[i / 4] >> (8 * (i % 4)) & 0xffu, shift = 16 * (i % 2);

            if (v[i] != v[i])
                out[i / 2] = (out[i / 2] & ~(0xffffu << shift)) | nan_bits(byte, scale) << shift;
        }
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

DEV uint4 load_row16(const uint8_t *p) // rows start at a multiple of 8
{
    const uint2 lo = *(const uint2 *)p, hi = *(const uint2 *)(p + 8);

    return make_uint4(lo.x, lo.y, hi.x, hi.y);
}

// What a lane holds of a row between its loads and its stores.
template <class L>
struct held {
    static constexpr int n_values = L::enc == RAW ? L::d_qk : L::latent; // in e4m3
    static constexpr int n_steps = L::enc == BF16 ? 0 : (n_values + 8 * WARP - 1) / (8 * WARP);
    static constexpr int n_plain = L::enc == BF16 ? (L::d_qk + 8 * WARP - 1) / (8 * WARP) : L::enc == SCALED && L::rope > 0;
    static constexpr int plain_at = L::enc == BF16 ? 0 : L::latent; // first value that is bf16 already
    uint2 bytes[n_steps + 1];
    float scale[n_steps + 1];
    uint4 plain[n_plain + 1];
};

template <class L>
DEV void load_held(held<L> &h, const dsk_kv_view &kv, int64_t slot, int lane)
{
    const uint8_t *row = row_of(kv, L::row_bytes, slot);

#pragma unroll
    for (int i = 0; i < h.n_steps; i++) {
        const int at = 8 * (WARP * i + lane);

        h.bytes[i] = at < h.n_values ? *(const uint2 *)(row + at) : make_uint2(0, 0);
        h.scale[i] = L::enc == RAW ? kv.raw_scale : *(const float *)(row + L::scale_at + 4 * (at / DSK_GROUP_VALUES));
    }
#pragma unroll
    for (int i = 0; i < h.n_plain; i++) {
        const int at = 8 * (WARP * i + lane);

        if (h.plain_at + at < L::d_qk)
            h.plain[i] = load_row16(row + (L::enc == BF16 ? 0 : L::rope_at) + 2 * at);
    }
}

template <class L>
DEV void store_held(const held<L> &h, uint16_t *out, bool is_aligned, int lane)
{
#pragma unroll
    for (int i = 0; i < h.n_steps; i++) {
        const int at = 8 * (WARP * i + lane);

        if (at < h.n_values)
            store_bf16x8(out + at, dequant8(h.bytes[i], h.scale[i]), is_aligned);
    }
#pragma unroll
    for (int i = 0; i < h.n_plain; i++) {
        const int at = h.plain_at + 8 * (WARP * i + lane);

        if (at < L::d_qk)
            store_bf16x8(out + at, h.plain[i], is_aligned);
    }
}

// Slot of output row i, or -1. An entry of a gather is rewritten on the way: its place in new_indices may be the very
// word just read.
DEV int64_t source_slot(const gpu_read_args &args, int64_t i, int lane)
{
    int64_t slot;

    if (args.mode == GPU_READ_FULL)
        return i;
    if (args.mode == GPU_READ_PAGED)
        return map_position(args.first + i, INT64_MAX, (const int32_t *)args.list, args.n_list, args.kv.n_slots);
    if (args.mode == GPU_READ_SELECTED) {
        slot = load_once((const int32_t *)args.list + i);
        return slot < args.kv.n_slots ? slot : -1;
    }
    int64_t i_row = i / args.topk;
    slot = 0;
    if (lane == 0) {
        slot = load_once((const int32_t *)(args.list + (uint64_t)(i_row * args.list_row_bytes)) + (i - i_row * args.topk));
        slot = slot >= 0 && slot < args.kv.n_slots ? slot : -1;
        ((int32_t *)args.new_indices)[i] = slot < 0 ? -1 : (int32_t)i;
    }
    return __shfl_sync(ALL, slot, 0);
}

// Short rows leave a warp idle: it takes two of them together, i and i + step.
template <class L>
DEV void read_rows(const gpu_read_args &args, int64_t i, int64_t step, int lane)
{
    constexpr int n = GPU_ROWS_PER_WAVE(L::row_bytes);
    const bool is_aligned = (args.out & 15u) == 0;
    int64_t slot[n];
    held<L> h[n];

#pragma unroll
    for (int r = 0; r < n; r++) { // one lane's load decides for the warp: the list may be changing
        slot[r] = __shfl_sync(ALL, i + r * step < args.n_rows ? source_slot(args, i + r * step, lane) : -1, 0);
        if (slot[r] >= 0)
            load_held(h[r], args.kv, slot[r], lane);
    }
#pragma unroll
    for (int r = 0; r < n; r++) {
        if (slot[r] >= 0)
            store_held(h[r], (uint16_t *)args.out + (i + r * step) * L::d_qk, is_aligned, lane);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP, 8) gpu_read(const gpu_read_args args)
{
    const int lane = threadIdx.x % WARP;
    const int64_t i = row_of_warp(), step = (int64_t)gridDim.x * WARPS;

    wait_for_stream();
    FOR_LAYOUT(args.kv.layout, read_rows<L>(args, i, step, lane))
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP, 8) gpu_clean(const gpu_clean_args args)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;

    wait_for_stream();
    if (i >= args.n_entries)
        return;
    int64_t i_row = i / args.topk;
    const int32_t *row = (const int32_t *)(args.indices + (uint64_t)(i_row * args.indices_row_bytes));
    int64_t slot = load_once(row + (i - i_row * args.topk));
    ((int32_t *)args.new_indices)[i] = slot >= 0 && slot < args.n_slots ? (int32_t)slot : -1;
}
