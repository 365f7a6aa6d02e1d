// rows.hip - append (quantise), the readers (dequantise) and the gather, a row per half wave of 32 lanes.
//
//   append  rows bf16 [n_rows, d_qk] -> cache rows of slots[n_rows]
//   read    cache rows -> out bf16 [n_rows, d_qk], dense
// A lane takes eight values at a time: 16 bytes of bf16, 8 bytes of e4m3. A group of 128 values is then one row of 16
// lanes, so its largest magnitude takes four DPP rotations. Half waves and not waves, because the host counts eight rows
// to a block on every vendor. Exchanges between lanes stand where both halves of a wave pass, whatever their rows are.
// Bound by memory: 656 + 1152 bytes a row of scaled_512_64 in either direction.
#include "../gpu/gpu_args.h"
#include "rows.hiph"

static constexpr int LANES = 32, THREADS = 256, ROWS = THREADS / LANES; // of a block

// ---- append ---------------------------------------------------------------------------------

// Eight values: their largest finite magnitude as bf16 bits, which order like the magnitudes; the count of those that
// are not finite goes to n_odd, and NaN becomes 0, which is what it writes.
DEV uint32_t survey(u32x4 &x, uint32_t &n_odd)
{
    uint32_t most = 0;

#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t shift = 16 * (i % 2), mag = x[i / 2] >> shift & 0x7fffu;

        n_odd += mag >= 0x7f80u;
        most = greatest(most, mag < 0x7f80u ? mag : 0u);
        if (mag > 0x7f80u)
            x[i / 2] &= ~(0xffffu << shift);
    }
    return most;
}

// amax = 1.m * 2^e, and 448 = 1.75 * 2^8.
DEV float scale_pow2(uint32_t amax_bits)
{
    const uint32_t bits = amax_bits << 16;

    if (float_of(bits) <= DSK_E4M3_MAX * 0x1p-13f)
        return 0x1p-13f;
    return float_of(((bits >> 23) - 8u + ((bits & 0x7fffffu) > 0x600000u)) << 23);
}

DEV float scale_of(uint32_t amax_bits, uint32_t rule)
{
    if (rule == DSK_RULE_POW2)
        return scale_pow2(amax_bits);
    return greatest(float_of(amax_bits << 16) / DSK_E4M3_MAX, 0x1p-126f);
}

// x / scale, IEEE. The reciprocal of a power of two is exact, so there the product rounds like the quotient.
DEV u32x2 quantise8(u32x4 x, float scale, bool is_pow2)
{
    const float factor = is_pow2 ? float_of((254u << 23) - bits_of(scale)) : 0;
    u32x2 out;

#pragma unroll
    for (int half = 0; half < 2; half++) {
        float v[4];

#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t word = x[2 * half + i / 2];

            v[i] = float_of(i % 2 ? word & 0xffff0000u : word << 16);
            v[i] = is_pow2 ? v[i] * factor : v[i] / scale;
        }
        out[half] = pack_e4m3(v);
    }
    return out;
}

// What a half wave has to do with its row.
struct target {
    const uint16_t *x;
    uint8_t *dst;
    bool is_read;  // the row is looked at: written, or counted only
    bool is_write;
    bool is_aligned;
};

DEV u32x4 load_values(const target &t, int at)
{
    return t.is_read ? load_bf16x8(t.x + at, t.is_aligned) : u32x4{0, 0, 0, 0};
}

DEV void store_plain(uint8_t *to, u32x4 bits)
{
    *(u32x2 *)to = u32x2{bits[0], bits[1]};
    *(u32x2 *)(to + 8) = u32x2{bits[2], bits[3]};
}

template <class L>
DEV uint32_t append_scaled(const target &t, uint32_t rule, int lane)
{
    constexpr int n_steps = L::latent / (8 * LANES);
    u32x4 latent[n_steps], rope = {0, 0, 0, 0};
    uint32_t n_odd = 0;

#pragma unroll
    for (int i = 0; i < n_steps; i++)
        latent[i] = load_values(t, 8 * (LANES * i + lane));
    if (8 * lane < L::rope)
        rope = load_values(t, L::latent + 8 * lane);
#pragma unroll
    for (int i = 0; i < n_steps; i++) {
        const float scale = scale_of(max_of_row(survey(latent[i], n_odd)), rule);

        if (!t.is_write)
            continue;
        *(u32x2 *)(t.dst + 8 * (LANES * i + lane)) = quantise8(latent[i], scale, rule == DSK_RULE_POW2);
        if (lane % 16 == 0)
            *(float *)(t.dst + L::scale_at + 4 * (2 * i + lane / 16)) = scale;
    }
    u32x4 checked = rope; // the bits are copied as they are
    survey(checked, n_odd);
    if (t.is_write && 8 * lane < L::rope)
        store_plain(t.dst + L::rope_at + 16 * lane, rope);
    return n_odd;
}

template <class L>
DEV uint32_t append_raw(const target &t, float scale, int lane)
{
    uint32_t n_odd = 0;

    for (int at = 8 * lane; at < L::d_qk; at += 8 * LANES) {
        u32x4 v = load_values(t, at);

        survey(v, n_odd);
        if (t.is_write)
            *(u32x2 *)(t.dst + at) = quantise8(v, scale, false);
    }
    return n_odd;
}

template <class L>
DEV uint32_t append_bf16(const target &t, int lane)
{
    uint32_t n_odd = 0;

    for (int at = 8 * lane; at < L::d_qk; at += 8 * LANES) {
        const u32x4 bits = load_values(t, at);
        u32x4 checked = bits;

        survey(checked, n_odd);
        if (t.is_write)
            store_plain(t.dst + 2 * at, bits);
    }
    return n_odd;
}

// Returns this lane's count of values that are not finite. Both halves of a wave come here.
template <class L>
DEV uint32_t append_row(const gpu_append_args &args, int64_t i, int64_t slot, bool is_read, bool is_write, int lane)
{
    target t;

    t.x = (const uint16_t *)(args.rows + (uint64_t)(i * args.row_bytes));
    t.dst = row_of(args.kv, L::row_bytes, is_write ? slot : 0);
    t.is_read = is_read;
    t.is_write = is_write;
    t.is_aligned = ((args.rows | (uint64_t)args.row_bytes) & 15u) == 0;
    if constexpr (L::enc == BF16)
        return append_bf16<L>(t, lane);
    else if constexpr (L::enc == RAW)
        return append_raw<L>(t, args.kv.raw_scale, lane);
    else
        return append_scaled<L>(t, args.rule, lane);
}

DEV int64_t row_of_half()
{
    return block_x() * ROWS + thread_x() / LANES;
}

// The host has checked the slots; they are bounded again because they came through memory.
DEV void append(const gpu_append_args &args, int64_t i, int32_t slot)
{
    const int lane = thread_x() % LANES;
    const bool is_live = i < args.n_rows, is_write = is_live && slot >= 0 && slot < args.kv.n_slots;
    const bool is_read = is_write || (is_live && slot == GPU_SLOT_SUPERSEDED);
    uint32_t n_odd = 0;

    FOR_LAYOUT(args.kv.layout, n_odd = append_row<L>(args, i, slot, is_read, is_write, lane))
    n_odd = sum_of_half(n_odd);
    if (args.n_nonfinite != 0 && is_live && lane == 0)
        ((uint32_t *)args.n_nonfinite)[i] = n_odd;
}

KERNEL(THREADS, 4, gpu_append, gpu_append_args, args)
{
    const int64_t i = row_of_half();

    append(args, i, i < args.n_rows ? ((const int32_t *)args.slots)[i] : GPU_SLOT_SKIP);
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
    const int64_t i = row_of_half();

    append(few.args, i, i < few.args.n_rows ? few.slots[i] : GPU_SLOT_SKIP);
}

template <int N>
DEV void append_runs(const runs_front<N> &list)
{
    const int64_t i = row_of_half();
    int low = 0, high = list.n_runs - 1; // the last run that starts at or before i

    while (low < high) {
        const int mid = (low + high + 1) / 2;

        if (list.runs[mid].row <= i)
            low = mid;
        else
            high = mid - 1;
    }
    const gpu_run run = list.runs[low];
    append(list.args, i, i >= list.args.n_rows || run.slot < 0 ? GPU_SLOT_SKIP : (int32_t)(run.slot + (i - run.row)));
}

#define APPEND_KERNEL(kind, n)                                                                               \
    KERNEL(THREADS, 4, gpu_append_##kind##_##n, kind##_front<n>, front)                                      \
    {                                                                                                        \
        append_##kind(front);                                                                                \
    }
APPEND_KERNEL(few, 64)
APPEND_KERNEL(few, 960)
APPEND_KERNEL(runs, 24)
APPEND_KERNEL(runs, 150)
APPEND_KERNEL(runs, 500)

KERNEL(THREADS, 4, gpu_append_check, gpu_append_args, args)
{
    const int lane = thread_x() % LANES;
    const int64_t i = row_of_half();
    const bool is_read = i < args.n_rows && ((const int32_t *)args.slots)[i] >= 0;
    uint32_t n_odd = 0;

    FOR_LAYOUT(args.kv.layout, n_odd = append_row<L>(args, i, 0, is_read, false, lane))
    n_odd = sum_of_half(n_odd);
    if (n_odd != 0 && lane == 0)
        __hip_atomic_fetch_min((int32_t *)args.first_bad, (int32_t)i, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// ---- read -----------------------------------------------------------------------------------

// A product that is NaN, with the bits of the CPU's: a NaN code before a NaN scale before 0 * inf.
DEV uint32_t nan_bits(uint32_t byte, float scale)
{
    if ((byte & 0x7fu) == 0x7fu)
        return (byte & 0x80u) << 8 | 0x7fc0u;
    return scale != scale ? bits_of(scale) >> 16 | 0x40u : 0xffc0u;
}

DEV u32x4 dequant8(u32x2 bytes, float scale)
{
    const bool is_odd = (nan_codes(bytes[0]) | nan_codes(bytes[1])) != 0 || !(__builtin_fabsf(scale) < INF);
    u32x4 out;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t pair = bytes[i / 2] >> (16 * (i % 2));

        out[i] = pack_bf16(e4m3_to_f32(pair & 0xffu) * scale, e4m3_to_f32(pair >> 8 & 0xffu) * scale);
    }
    if (is_odd) { // rare: one may be NaN
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t byte = bytes[i / 4] >> (8 * (i % 4)) & 0xffu, shift = 16 * (i % 2);
            const float v = e4m3_to_f32(byte) * scale;

            if ((byte & 0x7fu) == 0x7fu || v != v)
                out[i / 2] = (out[i / 2] & ~(0xffffu << shift)) | nan_bits(byte, scale) << shift;
        }
    }
    return out;
}

DEV u32x4 load_row16(const uint8_t *p) // rows start at a multiple of 8
{
    return *(const u32x4_by8 *)p;
}

// What a lane holds of a row between its loads and its stores.
template <class L>
struct held {
    static constexpr int n_values = L::enc == RAW ? L::d_qk : L::latent; // in e4m3
    static constexpr int n_steps = L::enc == BF16 ? 0 : (n_values + 8 * LANES - 1) / (8 * LANES);
    static constexpr int n_plain =
        L::enc == BF16 ? (L::d_qk + 8 * LANES - 1) / (8 * LANES) : L::enc == SCALED && L::rope > 0;
    static constexpr int plain_at = L::enc == BF16 ? 0 : L::latent; // first value that is bf16 already
    u32x2 bytes[n_steps + 1];
    float scale[n_steps + 1];
    u32x4 plain[n_plain + 1];
};

template <class L>
DEV void load_held(held<L> &h, const dsk_kv_view &kv, int64_t slot, int lane)
{
    const uint8_t *row = row_of(kv, L::row_bytes, slot);

#pragma unroll
    for (int i = 0; i < h.n_steps; i++) {
        const int at = 8 * (LANES * i + lane);

        h.bytes[i] = at < h.n_values ? *(const u32x2 *)(row + at) : u32x2{0, 0};
        h.scale[i] = L::enc == RAW ? kv.raw_scale : *(const float *)(row + L::scale_at + 4 * (at / DSK_GROUP_VALUES));
    }
#pragma unroll
    for (int i = 0; i < h.n_plain; i++) {
        const int at = 8 * (LANES * i + lane);

        if (h.plain_at + at < L::d_qk)
            h.plain[i] = load_row16(row + (L::enc == BF16 ? 0 : L::rope_at) + 2 * at);
    }
}

template <class L>
DEV void store_held(const held<L> &h, uint16_t *out, bool is_aligned, int lane)
{
#pragma unroll
    for (int i = 0; i < h.n_steps; i++) {
        const int at = 8 * (LANES * i + lane);

        if (at < h.n_values)
            store_bf16x8(out + at, dequant8(h.bytes[i], h.scale[i]), is_aligned);
    }
#pragma unroll
    for (int i = 0; i < h.n_plain; i++) {
        const int at = h.plain_at + 8 * (LANES * i + lane);

        if (at < L::d_qk)
            store_bf16x8(out + at, h.plain[i], is_aligned);
    }
}

// Slot of output row i, or -1. The first lane of a half wave reads for all: the list may be changing. An entry of a gather is
// rewritten on the way: its place in new_indices may be the very word just read.
DEV int64_t source_slot(const gpu_read_args &args, int64_t i, int lane)
{
    int64_t slot = -1;

    if (i >= args.n_rows || lane != 0)
        return -1;
    if (args.mode == GPU_READ_FULL)
        return i;
    if (args.mode == GPU_READ_PAGED)
        return map_position(args.first + i, INT64_MAX, (const int32_t *)args.list, args.n_list, args.kv.n_slots);
    if (args.mode == GPU_READ_SELECTED) {
        slot = load_once((const int32_t *)args.list + i);
        return slot < args.kv.n_slots ? slot : -1;
    }
    const int64_t i_row = i / args.topk;
    slot = load_once((const int32_t *)(args.list + (uint64_t)(i_row * args.list_row_bytes)) + (i - i_row * args.topk));
    slot = slot >= 0 && slot < args.kv.n_slots ? slot : -1;
    ((int32_t *)args.new_indices)[i] = slot < 0 ? -1 : (int32_t)i;
    return slot;
}

// Short rows leave lanes idle: a half wave takes two of them together, i and i + step.
template <class L>
DEV void read_rows(const gpu_read_args &args, int64_t i, int64_t step, int lane)
{
    constexpr int n = GPU_ROWS_PER_WAVE(L::row_bytes);
    const bool is_aligned = (args.out & 15u) == 0;
    int64_t slot[n];
    held<L> h[n];

#pragma unroll
    for (int r = 0; r < n; r++) {
        slot[r] = from_lane64(source_slot(args, i + r * step, lane), thread_x() & LANES);
        if (slot[r] >= 0)
            load_held(h[r], args.kv, slot[r], lane);
    }
#pragma unroll
    for (int r = 0; r < n; r++) {
        if (slot[r] >= 0)
            store_held(h[r], (uint16_t *)args.out + (i + r * step) * L::d_qk, is_aligned, lane);
    }
}

KERNEL(THREADS, 4, gpu_read, gpu_read_args, args)
{
    const int64_t i = row_of_half(), step = grid_x() * ROWS;

    FOR_LAYOUT(args.kv.layout, read_rows<L>(args, i, step, thread_x() % LANES))
}

KERNEL(THREADS, 4, gpu_clean, gpu_clean_args, args)
{
    const int64_t i = block_x() * THREADS + thread_x();

    if (i >= args.n_entries)
        return;
    const int64_t i_row = i / args.topk;
    const int32_t *row = (const int32_t *)(args.indices + (uint64_t)(i_row * args.indices_row_bytes));
    const int64_t slot = load_once(row + (i - i_row * args.topk));

    ((int32_t *)args.new_indices)[i] = slot >= 0 && slot < args.n_slots ? (int32_t)slot : -1;
}
