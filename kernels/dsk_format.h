/* dsk_format.h - how one token of the latent KV cache lies in memory, and the constants that every
 * backend, reader and writer shares. Plain C11 that nvcc and clang's HIP mode also take: fixed-width
 * integers, no enum, no bool, no pointer. This file is the only place that spells a row's byte map.
 *
 *   scaled_512_64   byte 0        512          528          656
 *                   | latent      | 4 x scale  | rope       |
 *                   | e4m3fn x512 | fp32       | bf16 x 64  |
 *   scaled_512_0    | e4m3fn x512 | fp32 x 4   |            528
 *   scaled_256_0    | e4m3fn x256 | fp32 x 2   |            264  (multiple of 8, not of 16)
 *   bf16_576/512/256  bf16 values, latent then RoPE         1152 / 1024 / 512
 *   raw_512_64      | e4m3fn x512 | e4m3fn x64 |            576  (one scale for the whole pool)
 *
 * Scale i covers latent values [128 i, 128 i + 128) and multiplies: value = e4m3(byte) * scale.
 * K is the whole row (d_qk values), V its first d_v. Bytes are OCP e4m3fn on every device. */
#ifndef DSK_FORMAT_H
#define DSK_FORMAT_H

#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
#define DSK_STATIC_ASSERT(cond, text) static_assert(cond, text)
#else
#define DSK_STATIC_ASSERT(cond, text) _Static_assert(cond, text)
#endif

/* Layout ids. Stable: they travel in files and messages. 0 is never a layout. */
#define DSK_LAYOUT_NONE          0
#define DSK_LAYOUT_SCALED_512_64 1
#define DSK_LAYOUT_SCALED_512_0  2
#define DSK_LAYOUT_SCALED_256_0  3
#define DSK_LAYOUT_BF16_576      4
#define DSK_LAYOUT_BF16_512      5
#define DSK_LAYOUT_BF16_256      6
#define DSK_LAYOUT_RAW_512_64    7
#define DSK_LAYOUT_COUNT         8

#define DSK_GROUP_VALUES 128 /* latent values per scale */
#define DSK_PAGE_TOKENS  64  /* slot = page * DSK_PAGE_TOKENS + offset */
#define DSK_PAGE_SHIFT   6
#define DSK_MAX_HEADS    128
#define DSK_MAX_D_QK     576
#define DSK_MAX_D_V      512
#define DSK_E4M3_MAX     448.0f

/* Write rules: which scale a group gets. */
#define DSK_RULE_PLAIN 1 /* max(amax / 448, 2^-126) */
#define DSK_RULE_POW2  2 /* smallest power of two >= max(amax / 448, 1e-4); a zero group gets 2^-13 */

/* Index spaces. */
#define DSK_SPACE_PHYSICAL 1 /* slot in the pool */
#define DSK_SPACE_LOGICAL  2 /* position in the row's sequence, mapped through its page table */

/* Element types of outputs and partial results. */
#define DSK_DTYPE_BF16 1
#define DSK_DTYPE_F32  2

struct dsk_kv_row_512_64 {
    uint8_t latent[512];
    float scale[4];
    uint16_t rope[64];
};
struct dsk_kv_row_512_0 {
    uint8_t latent[512];
    float scale[4];
};
struct dsk_kv_row_256_0 {
    uint8_t latent[256];
    float scale[2];
};
struct dsk_kv_row_raw_512_64 {
    uint8_t latent[512];
    uint8_t rope[64];
};

DSK_STATIC_ASSERT(sizeof(struct dsk_kv_row_512_64) == 656, "656-byte row");
DSK_STATIC_ASSERT(offsetof(struct dsk_kv_row_512_64, scale) == 512, "scales follow the latent");
DSK_STATIC_ASSERT(offsetof(struct dsk_kv_row_512_64, rope) == 528, "rope follows the scales");
DSK_STATIC_ASSERT(sizeof(struct dsk_kv_row_512_0) == 528, "528-byte row");
DSK_STATIC_ASSERT(sizeof(struct dsk_kv_row_256_0) == 264, "264-byte row");
DSK_STATIC_ASSERT(offsetof(struct dsk_kv_row_256_0, scale) == 256, "scales follow the latent");
DSK_STATIC_ASSERT(sizeof(struct dsk_kv_row_raw_512_64) == 576, "576-byte row");
DSK_STATIC_ASSERT(1 << DSK_PAGE_SHIFT == DSK_PAGE_TOKENS, "page shift");

/* A plane of KV rows: one layer of a pool. Row address of slot s, in 64 bits throughout:
 *   base + (int64) (s / 64) * page_pitch_bytes + (s % 64) * row_bytes
 * page_pitch_bytes is 64 * row_bytes for a dense plane, larger where a pool interleaves layers. */
struct dsk_kv_view {
    uint64_t base;            /* device address */
    int64_t page_pitch_bytes; /* >= 64 * row_bytes, multiple of 8 */
    int64_t n_slots;          /* rows in the plane; need not fill the last page */
    uint32_t layout;          /* DSK_LAYOUT_* */
    float raw_scale;          /* raw_512_64: the pool's scale, finite and > 0; other layouts: ignored */
};
DSK_STATIC_ASSERT(sizeof(struct dsk_kv_view) == 32, "kv view");

/* Query rows of one sequence in one launch; a launch takes an array of these, so requests of many
 * clients share it without being copied together. Strides in bytes. All addresses are device
 * addresses; bytes behind `indices` and `lengths` may change while the kernel runs (client memory),
 * so each value is read once and checked where it is used. */
struct dsk_attend_seg {
    uint64_t q;       /* bf16 [n_rows, h_q, d_qk]; inner stride 2 */
    uint64_t out;     /* out_dtype [n_rows, h_q, d_v]; inner stride 1 element */
    uint64_t lse;     /* fp32 [n_rows, h_q] or 0 */
    uint64_t indices; /* int32 [n_rows, topk] */
    uint64_t lengths; /* int32 [n_rows]: valid lanes of each row, clamped to [0, topk]; or 0 */
    uint64_t sink;    /* fp32 [h_q], natural-log units, -inf = none; or 0 */
    uint64_t table;   /* logical space: int32 [n_table] page ids; physical: 0 */
    uint64_t n_bad;   /* uint32 [n_rows], written: live lanes that are invalid and not -1; or 0 */
    int64_t q_row_bytes;
    int64_t q_head_bytes;
    int64_t out_row_bytes;
    int64_t out_head_bytes;
    int64_t lse_row_bytes;
    int64_t indices_row_bytes;
    int32_t n_rows;
    int32_t topk;        /* width of the index list, >= 1 */
    int32_t space;       /* DSK_SPACE_* */
    int32_t n_table;     /* entries in table */
    int32_t seq_len;     /* logical space: positions >= seq_len are invalid */
    float softmax_scale; /* finite; 0 is a plain mean */
};
DSK_STATIC_ASSERT(sizeof(struct dsk_attend_seg) == 136, "attend segment");

#endif /* DSK_FORMAT_H */
