// rows.cuh - layouts as compile-time constants, addresses of slots, and memory accesses of the widths that a row's
// alignment allows: rows start at a multiple of 8 bytes.
#ifndef KERNELS_CUDA_ROWS_CUH
#define KERNELS_CUDA_ROWS_CUH

#include "../dsk_format.h"
#include "number.cuh"

enum encoding { SCALED, BF16, RAW };

template <int LATENT, int ROPE, encoding ENC>
struct layout_of {
    static constexpr int latent = LATENT, rope = ROPE, d_qk = LATENT + ROPE;
    static constexpr encoding enc = ENC;
    static constexpr int n_groups = ENC == SCALED ? LATENT / DSK_GROUP_VALUES : 0;
    static constexpr int scale_at = LATENT; // bytes, where there are scales
    static constexpr int rope_at = ENC == SCALED ? LATENT + 4 * n_groups : ENC == RAW ? LATENT : 2 * LATENT;
    static constexpr int row_bytes = rope_at + (ENC == RAW ? ROPE : 2 * ROPE);
};

typedef layout_of<512, 64, SCALED> scaled_512_64;
typedef layout_of<512, 0, SCALED> scaled_512_0;
typedef layout_of<256, 0, SCALED> scaled_256_0;
typedef layout_of<512, 64, BF16> bf16_576;
typedef layout_of<512, 0, BF16> bf16_512;
typedef layout_of<256, 0, BF16> bf16_256;
typedef layout_of<512, 64, RAW> raw_512_64;

static_assert(scaled_512_64::row_bytes == sizeof(dsk_kv_row_512_64), "row");
static_assert(scaled_512_0::row_bytes == sizeof(dsk_kv_row_512_0), "row");
static_assert(scaled_256_0::row_bytes == sizeof(dsk_kv_row_256_0), "row");
static_assert(raw_512_64::row_bytes == sizeof(dsk_kv_row_raw_512_64), "row");

// BODY with L as the type of the layout id.
#define FOR_LAYOUT(id, BODY)                                                                                 \
    switch (id) {                                                                                            \
    case DSK_LAYOUT_SCALED_512_64: { typedef scaled_512_64 L; BODY; } break;                                 \
    case DSK_LAYOUT_SCALED_512_0: { typedef scaled_512_0 L; BODY; } break;                                   \
    case DSK_LAYOUT_SCALED_256_0: { typedef scaled_256_0 L; BODY; } break;                                   \
    case DSK_LAYOUT_BF16_576: { typedef bf16_576 L; BODY; } break;                                           \
    case DSK_LAYOUT_BF16_512: { typedef bf16_512 L; BODY; } break;                                           \
    case DSK_LAYOUT_BF16_256: { typedef bf16_256 L; BODY; } break;                                           \
    case DSK_LAYOUT_RAW_512_64: { typedef raw_512_64 L; BODY; } break;                                       \
    }

DEV uint8_t *row_of(const dsk_kv_view &kv, int row_bytes, int64_t slot)
{
    return (uint8_t *)(kv.base + (uint64_t)((slot >> DSK_PAGE_SHIFT) * kv.page_pitch_bytes
                                            + (slot & (DSK_PAGE_TOKENS - 1)) * (int64_t)row_bytes));
}

// An int32 that a client may be writing: read once, then checked and used as read.
DEV int32_t load_once(const int32_t *p)
{
    return *(const volatile int32_t *)p;
}

// Position -> slot through a page table, or -1. n_slots bounds what a page id may name.
DEV int64_t map_position(int64_t pos, int64_t seq_len, const int32_t *table, int64_t n_table, int64_t n_slots)
{
    if (pos < 0 || pos >= seq_len || (pos >> DSK_PAGE_SHIFT) >= n_table)
        return -1;
    int64_t page = load_once(table + (pos >> DSK_PAGE_SHIFT));
    int64_t slot = page * DSK_PAGE_TOKENS + (pos & (DSK_PAGE_TOKENS - 1));
    return page < 0 || slot >= n_slots ? -1 : slot;
}

// Eight bf16 values at a multiple of 2 bytes, or of 16 where ALIGNED.
DEV uint4 load_bf16x8(const uint16_t *p, bool is_aligned)
{
    uint4 v;

    if (is_aligned)
        return *(const uint4 *)p;
    v.x = p[0] | (uint32_t)p[1] << 16;
    v.y = p[2] | (uint32_t)p[3] << 16;
    v.z = p[4] | (uint32_t)p[5] << 16;
    v.w = p[6] | (uint32_t)p[7] << 16;
    return v;
}

DEV void store_bf16x8(uint16_t *p, uint4 v, bool is_aligned)
{
    if (is_aligned) {
        *(uint4 *)p = v;
        return;
    }
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        p[2 * i] = (uint16_t)w[i];
        p[2 * i + 1] = (uint16_t)(w[i] >> 16);
    }
}

#endif // KERNELS_CUDA_ROWS_CUH
