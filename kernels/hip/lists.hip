// lists.hip - index mapping, merging of partial results, the way of an argument block, and the fault that tests inject.
#include "../gpu/gpu_args.h"
#include "rows.hiph"

static constexpr int MAP_BLOCK = 512, MERGE_BLOCK = 128;

// ---- map: a row per block ----------------------------------------------------------------------

KERNEL(MAP_BLOCK, 2, gpu_map, gpu_map_args, args)
{
    const int64_t i_row = block_x();
    const int32_t *logical = (const int32_t *)(args.logical + (uint64_t)(i_row * args.logical_row_bytes));
    const int32_t *table = (const int32_t *)(args.tables + (uint64_t)(i_row * args.table_row_bytes));
    int32_t *physical = (int32_t *)(args.physical + (uint64_t)(i_row * args.physical_row_bytes));
    const int64_t seq_len = load_once((const int32_t *)args.seq_lens + i_row);
    SHARED(uint32_t, total);
    uint32_t n_bad = 0;

    if (thread_x() == 0)
        total = 0;
    block_sync();
    for (int64_t i = thread_x(); i < args.topk; i += MAP_BLOCK) {
        const int32_t pos = load_once(logical + i);
        const int64_t slot = map_position(pos, seq_len, table, args.n_table, args.n_slots);

        n_bad += slot < 0 && pos != -1;
        physical[i] = (int32_t)slot;
    }
    if (args.n_bad == 0)
        return;
    n_bad = sum_of_half(n_bad);
    if (thread_x() % 32 == 0)
        __hip_atomic_fetch_add(&total, n_bad, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    block_sync();
    if (thread_x() == 0)
        ((uint32_t *)args.n_bad)[i_row] = total;
}

// ---- merge: a row and head per block -------------------------------------------------------------
//   lse = ln sum exp(lse_p);  out = sum exp(lse_p - lse) out_p, parts in their order

DEV float load_value(uint64_t at, int32_t dtype, int64_t i)
{
    return dtype == DSK_DTYPE_F32 ? ((const float *)at)[i] : bf16_to_f32(((const uint16_t *)at)[i]);
}

DEV void store_value(uint64_t at, int32_t dtype, int64_t i, float x)
{
    if (dtype == DSK_DTYPE_F32)
        ((float *)at)[i] = x;
    else
        ((uint16_t *)at)[i] = (uint16_t)bf16_from_f32(x);
}

KERNEL(MERGE_BLOCK, 4, gpu_merge, gpu_merge_args, args)
{
    const int64_t column = block_x() * grid_y() + block_y();
    const float *lse_parts = (const float *)args.lse_parts + column;
    const int64_t d_v = args.d_v;
    float most = -INF, sum = 0;
    int32_t n_full = 0, last = 0;

    for (int32_t p = 0; p < args.n_parts; p++) {
        const float lse = lse_parts[p * args.n_columns];

        if (lse == -INF)
            continue;
        most = lse > most ? lse : most;
        last = p;
        n_full++;
    }
    for (int32_t p = 0; p < args.n_parts && n_full > 1; p++) {
        const float lse = lse_parts[p * args.n_columns];

        if (lse != -INF)
            sum += exp_of(lse - most);
    }
    const float total = n_full == 0 ? -INF : n_full == 1 ? lse_parts[last * args.n_columns] : most + log_of(sum);
    const float part = 1.0f / sum;
    for (int64_t i = thread_x(); i < d_v; i += MERGE_BLOCK) {
        const int64_t to = column * d_v + i;

        if (n_full == 1 && args.part_dtype == args.out_dtype && args.out_dtype == DSK_DTYPE_BF16) {
            // bit for bit, NaN and all
            ((uint16_t *)args.out)[to] = ((const uint16_t *)args.out_parts)[last * args.n_columns * d_v + to];
            continue;
        }
        float x = n_full == 1 ? load_value(args.out_parts, args.part_dtype, last * args.n_columns * d_v + to) : 0;
        for (int32_t p = 0; p < args.n_parts && n_full > 1; p++) {
            const float lse = lse_parts[p * args.n_columns];

            if (lse != -INF)
                x += exp_of(lse - most) * part * load_value(args.out_parts, args.part_dtype, p * args.n_columns * d_v + to);
        }
        store_value(args.out, args.out_dtype, to, x);
    }
    if (args.lse != 0 && thread_x() == 0)
        ((float *)args.lse)[column] = total;
}

// ---- upload: the argument block --------------------------------------------------------------------

// The front of a gpu_upload_args: what a launch of N rows or fewer carries.
template <int N>
struct upload_front {
    uint64_t block;
    int32_t n_rows, reserved;
    dsk_attend_block head;
    dsk_attend_row rows[N];
};
static_assert(sizeof(upload_front<GPU_UPLOAD_ROWS>) == sizeof(gpu_upload_args), "the same layout");

template <int N>
DEV void upload(const upload_front<N> &args)
{
    constexpr int n_head = sizeof(args.head) / 8, n_row = sizeof(args.rows[0]) / 8;
    const uint64_t *head = (const uint64_t *)&args.head, *rows = (const uint64_t *)args.rows;

    if (thread_x() < n_head)
        ((uint64_t *)args.block)[thread_x()] = head[thread_x()];
    for (int i = thread_x(); i < args.n_rows * n_row; i += GPU_UPLOAD_BLOCK)
        ((uint64_t *)(args.block + GPU_BLOCK_BYTES))[i] = rows[i];
}

#define UPLOAD_KERNEL(n)                                                                                     \
    KERNEL(GPU_UPLOAD_BLOCK, 4, gpu_upload_##n, upload_front<n>, args)                                       \
    {                                                                                                        \
        upload(args);                                                                                        \
    }
UPLOAD_KERNEL(36) // within 4 KiB of parameters; the host launches no larger one on these chips
UPLOAD_KERNEL(144)
UPLOAD_KERNEL(288)

// ---- fault ---------------------------------------------------------------------------------------

KERNEL(64, 1, gpu_fault, uint64_t, unused)
{
    (void)unused;
    __builtin_trap();
}
