/* dsk_check.c - the argument rules of dsk.h. Every size is computed in 64 bits with overflow checks, so a
 * count or pitch that wraps is refused like any other wrong one. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "dsk_backend.h"
#include "dsk_check.h"

#define N_THREADS_MAX 1024
#define N_SLOTS_MAX   ((int64_t)1 << 31) /* slots are int32 */

/* Where a field sits: in the arguments themselves, or in a segment ("segs[3]." goes in front of its name). */
#define NO_SEG (-1)
struct where {
    struct dsk_err *err;
    int32_t i_seg;
};

static dsk_status bad(const struct where *at, const char *field, long long value, const char *rule)
{
    char name[sizeof(((struct dsk_err *)0)->field)];

    if (at->i_seg == NO_SEG)
        snprintf(name, sizeof(name), "%s", field);
    else
        snprintf(name, sizeof(name), "segs[%d].%s", (int)at->i_seg, field);
    return dsk_fail(at->err, DSK_E_BAD_ARGUMENT, name, value, "%s", rule);
}

static dsk_status bad_float(const struct where *at, const char *field, float value, const char *rule)
{
    dsk_status status = bad(at, field, 0, rule);

    if (at->err != NULL)
        snprintf(at->err->value, sizeof(at->err->value), "%g", (double)value);
    return status;
}

/* Addresses print as the number they are. */
static dsk_status check_address(const struct where *at, const char *field, uint64_t addr, uint64_t align)
{
    if (addr == 0)
        return bad(at, field, 0, "the address must not be null");
    if (addr % align != 0)
        return bad(at, field, (long long)addr, "the address must be aligned to its elements");
    return DSK_OK;
}

static dsk_status check_pitch(const struct where *at, const char *field, int64_t pitch, int64_t row_bytes,
                              int64_t align)
{
    if (pitch < row_bytes)
        return bad(at, field, pitch, "the pitch is smaller than what it steps over");
    if (pitch % align != 0)
        return bad(at, field, pitch, "the pitch must be a multiple of the element size");
    return DSK_OK;
}

/* addr + (n - 1) * pitch + row_bytes must not pass the end of the address space. n >= 1. */
static dsk_status check_extent(const struct where *at, const char *field, uint64_t addr, int64_t n,
                               int64_t pitch, int64_t row_bytes)
{
    int64_t span, end;
    uint64_t past;

    if (__builtin_mul_overflow(n - 1, pitch, &span) || __builtin_add_overflow(span, row_bytes, &end)
        || __builtin_add_overflow(addr, (uint64_t)end, &past))
        return bad(at, field, pitch, "the rows wrap around the address space");
    return DSK_OK;
}

/* n dense 4-byte elements. */
static dsk_status check_array(const struct where *at, const char *field, uint64_t addr, int64_t n)
{
    dsk_status status = check_address(at, field, addr, 4);

    return status != DSK_OK ? status : check_extent(at, field, addr, n, 4, 4);
}

static dsk_status check_optional(const struct where *at, const char *field, uint64_t addr, int64_t n)
{
    return addr == 0 ? DSK_OK : check_array(at, field, addr, n);
}

/* Rows of row_bytes at addr, pitch apart: pitch, then end of the address space. */
static dsk_status check_rows(const struct where *at, const char *pitch_field, uint64_t addr, int64_t n,
                             int64_t pitch, int64_t row_bytes, int64_t align)
{
    dsk_status status = check_pitch(at, pitch_field, pitch, row_bytes, align);

    return status != DSK_OK ? status : check_extent(at, pitch_field, addr, n, pitch, row_bytes);
}

static dsk_status check_range(const struct where *at, const char *field, int64_t value, int64_t low,
                              int64_t high)
{
    char rule[96];

    if (value >= low && value <= high)
        return DSK_OK;
    snprintf(rule, sizeof(rule), "must lie in [%lld, %lld]", (long long)low, (long long)high);
    return bad(at, field, value, rule);
}

static dsk_status check_dtype(const struct where *at, const char *field, int32_t dtype)
{
    if (dtype != DSK_DTYPE_BF16 && dtype != DSK_DTYPE_F32)
        return bad(at, field, dtype, "must be DSK_DTYPE_BF16 or DSK_DTYPE_F32");
    return DSK_OK;
}

static dsk_status check_flags(const struct where *at, uint32_t flags, uint32_t known)
{
    if ((flags & ~known) != 0)
        return bad(at, "flags", flags, "has a bit that this operation does not know");
    return DSK_OK;
}

static int64_t dtype_bytes(int32_t dtype)
{
    return dtype == DSK_DTYPE_F32 ? 4 : 2;
}

static dsk_status check_view(const struct where *at, const struct dsk_kv_view *kv)
{
    const struct dsk_layout *layout = dsk_layout_get(kv->layout);
    dsk_status status;

    if (layout == NULL)
        return bad(at, "kv.layout", kv->layout, "unknown layout id");
    if ((status = check_range(at, "kv.n_slots", kv->n_slots, 0, N_SLOTS_MAX)) != DSK_OK)
        return status;
    if ((status = check_pitch(at, "kv.page_pitch_bytes", kv->page_pitch_bytes,
                              (int64_t)DSK_PAGE_TOKENS * layout->row_bytes, 8))
        != DSK_OK)
        return status;
    if (kv->layout == DSK_LAYOUT_RAW_512_64 && !(kv->raw_scale > 0 && isfinite(kv->raw_scale)))
        return bad_float(at, "kv.raw_scale", kv->raw_scale, "must be finite and greater than 0");
    if (kv->n_slots == 0)
        return DSK_OK; /* a plane without rows needs no memory */
    if ((status = check_address(at, "kv.base", kv->base, 8)) != DSK_OK)
        return status;
    int64_t n_pages = (kv->n_slots + DSK_PAGE_TOKENS - 1) >> DSK_PAGE_SHIFT;
    return check_extent(at, "kv.page_pitch_bytes", kv->base, n_pages, kv->page_pitch_bytes,
                        (int64_t)DSK_PAGE_TOKENS * layout->row_bytes);
}

dsk_status dsk_check_config(const struct dsk_device_config *config, struct dsk_err *err)
{
    const struct where at = {err, NO_SEG};
    dsk_status status;

    if (config == NULL)
        return bad(&at, "config", 0, "must not be null");
    if ((status = check_range(&at, "kind", config->kind, DSK_DEVICE_CPU, DSK_DEVICE_HIP)) != DSK_OK)
        return status;
    if ((status = check_range(&at, "ordinal", config->ordinal, 0, INT32_MAX)) != DSK_OK)
        return status;
    if ((status = check_range(&at, "n_threads", config->n_threads, 0, N_THREADS_MAX)) != DSK_OK)
        return status;
    if ((status =
             check_flags(&at, config->flags, DSK_DEVICE_PORTABLE | DSK_DEVICE_NO_GRAPHS | DSK_DEVICE_FP8))
        != DSK_OK)
        return status;
    if ((config->flags & DSK_DEVICE_FP8) != 0 && config->kind != DSK_DEVICE_HIP)
        return bad(&at, "flags", config->flags, "only HIP has attend kernels in e4m3");
    return check_range(&at, "isa", config->isa, DSK_ISA_AUTO, DSK_ISA_AVX512_BF16);
}

/* All -1 or below n_slots? No branches: it vectorises. */
static bool are_slots_fine(const int32_t *slots, int32_t n, int64_t n_slots)
{
    uint32_t is_odd = 0;

    for (int32_t i = 0; i < n; i++)
        is_odd |= (uint32_t)slots[i] + 1u > (uint32_t)n_slots;
    return is_odd == 0;
}

static dsk_status check_slots(const struct dsk_append_args *args, struct dsk_err *err)
{
    if (are_slots_fine(args->slots, args->n_rows, args->kv.n_slots))
        return DSK_OK;
    for (int32_t i = 0; i < args->n_rows; i++) {
        char field[48];
        int32_t slot = args->slots[i];

        if (slot == -1 || (slot >= 0 && slot < args->kv.n_slots))
            continue;
        snprintf(field, sizeof(field), "slots[%d]", (int)i);
        return dsk_fail(err, DSK_E_SLOT_RANGE, field, slot, "must be -1 or lie in [0, %lld)",
                        (long long)args->kv.n_slots);
    }
    return DSK_OK;
}

dsk_status dsk_check_append(const struct dsk_append_args *args, struct dsk_err *err)
{
    const struct where at = {err, NO_SEG};
    dsk_status status;

    if (args == NULL)
        return bad(&at, "args", 0, "must not be null");
    if ((status = check_view(&at, &args->kv)) != DSK_OK)
        return status;
    if ((status = check_range(&at, "n_rows", args->n_rows, 0, INT32_MAX)) != DSK_OK
        || (status = check_flags(&at, args->flags, DSK_APPEND_STRICT)) != DSK_OK)
        return status;

    const struct dsk_layout *layout = dsk_layout_get(args->kv.layout);
    if (layout->n_groups > 0 && args->rule != DSK_RULE_PLAIN && args->rule != DSK_RULE_POW2)
        return bad(&at, "rule", args->rule, "must be DSK_RULE_PLAIN or DSK_RULE_POW2");
    if (args->n_rows == 0)
        return DSK_OK;
    if ((status = check_address(&at, "rows", args->rows, 2)) != DSK_OK
        || (status = check_rows(&at, "row_bytes", args->rows, args->n_rows, args->row_bytes,
                                2 * (int64_t)layout->d_qk, 2))
               != DSK_OK
        || (status = check_optional(&at, "n_nonfinite", args->n_nonfinite, args->n_rows)) != DSK_OK)
        return status;
    if (args->slots == NULL)
        return bad(&at, "slots", 0, "must not be null");
    return check_slots(args, err);
}

dsk_status dsk_check_read(const struct dsk_read_args *args, struct dsk_err *err)
{
    const struct where at = {err, NO_SEG};
    dsk_status status;

    if (args == NULL)
        return bad(&at, "args", 0, "must not be null");
    if ((status = check_view(&at, &args->kv)) != DSK_OK
        || (status = check_range(&at, "mode", args->mode, DSK_READ_FULL, DSK_READ_SELECTED)) != DSK_OK
        || (status = check_range(&at, "n_list", args->n_list, 0, INT32_MAX)) != DSK_OK)
        return status;

    const struct dsk_layout *layout = dsk_layout_get(args->kv.layout);
    int64_t n_max = args->mode == DSK_READ_FULL       ? args->kv.n_slots
                    : args->mode == DSK_READ_SELECTED ? args->n_list
                                                      : (int64_t)args->n_list * DSK_PAGE_TOKENS;
    if ((status = check_range(&at, "first", args->first, 0, args->mode == DSK_READ_PAGED ? n_max : 0))
            != DSK_OK
        || (status = check_range(&at, "n_rows", args->n_rows, 0, n_max - args->first)) != DSK_OK)
        return status;
    if (args->mode == DSK_READ_FULL && args->list != 0)
        return bad(&at, "list", (long long)args->list, "must be 0 when the whole plane is read");
    if (args->n_rows == 0)
        return DSK_OK;
    if (args->mode != DSK_READ_FULL
        && (status = check_array(&at, "list", args->list, args->n_list)) != DSK_OK)
        return status;
    int64_t out_bytes = 2 * (int64_t)layout->d_qk;
    if ((status = check_address(&at, "out", args->out, 2)) != DSK_OK)
        return status;
    return check_extent(&at, "n_rows", args->out, args->n_rows, out_bytes, out_bytes);
}

dsk_status dsk_check_gather(const struct dsk_gather_args *args, struct dsk_err *err)
{
    const struct where at = {err, NO_SEG};
    dsk_status status;

    if (args == NULL)
        return bad(&at, "args", 0, "must not be null");
    if ((status = check_view(&at, &args->kv)) != DSK_OK
        || (status = check_range(&at, "n_rows", args->n_rows, 0, INT32_MAX)) != DSK_OK
        || (status = check_range(&at, "topk", args->topk, 1, INT32_MAX)) != DSK_OK
        || (status = check_range(&at, "branch", args->branch, 0, 2)) != DSK_OK)
        return status;
    if (args->n_rows == 0)
        return DSK_OK;

    int64_t n_entries = (int64_t)args->n_rows * args->topk;
    int64_t list_bytes = 4 * (int64_t)args->topk;
    bool by_entry = dsk_gather_is_by_entry(args);
    /* Workspace positions are int32 like every index. */
    if (by_entry && n_entries > N_SLOTS_MAX)
        return bad(&at, "topk", args->topk, "n_rows * topk is more than an int32 index can name");
    if ((status = check_address(&at, "indices", args->indices, 4)) != DSK_OK
        || (status = check_rows(&at, "indices_row_bytes", args->indices, args->n_rows,
                                args->indices_row_bytes, list_bytes, 4))
               != DSK_OK
        || (status = check_address(&at, "new_indices", args->new_indices, 4)) != DSK_OK
        || (status = check_extent(&at, "n_rows", args->new_indices, args->n_rows, list_bytes, list_bytes))
               != DSK_OK)
        return status;
    if (args->new_indices == args->indices && args->indices_row_bytes != list_bytes)
        return bad(&at, "new_indices", (long long)args->new_indices,
                   "may only share the memory of indices if that is dense");

    int64_t row_bytes = 2 * (int64_t)dsk_layout_get(args->kv.layout)->d_qk;
    int64_t n_filled = by_entry ? n_entries : args->kv.n_slots;
    if (n_filled == 0)
        return DSK_OK;
    if (args->workspace_bytes < (uint64_t)n_filled * (uint64_t)row_bytes)
        return bad(&at, "workspace_bytes", (long long)args->workspace_bytes,
                   "the workspace is smaller than the rows this branch writes");
    if ((status = check_address(&at, "workspace", args->workspace, 2)) != DSK_OK)
        return status;
    return check_extent(&at, "workspace", args->workspace, n_filled, row_bytes, row_bytes);
}

dsk_status dsk_check_map(const struct dsk_map_args *args, struct dsk_err *err)
{
    const struct where at = {err, NO_SEG};
    dsk_status status;

    if (args == NULL)
        return bad(&at, "args", 0, "must not be null");
    if ((status = check_range(&at, "n_rows", args->n_rows, 0, INT32_MAX)) != DSK_OK
        || (status = check_range(&at, "topk", args->topk, 1, INT32_MAX)) != DSK_OK
        || (status = check_range(&at, "n_table", args->n_table, 0, INT32_MAX)) != DSK_OK
        || (status = check_range(&at, "n_pages", args->n_pages, 0, N_SLOTS_MAX >> DSK_PAGE_SHIFT)) != DSK_OK)
        return status;
    if (args->n_rows == 0)
        return DSK_OK;

    int64_t list_bytes = 4 * (int64_t)args->topk;
    int64_t table_bytes = 4 * (int64_t)args->n_table;
    if ((status = check_address(&at, "logical", args->logical, 4)) != DSK_OK
        || (status = check_rows(&at, "logical_row_bytes", args->logical, args->n_rows,
                                args->logical_row_bytes, list_bytes, 4))
               != DSK_OK
        || (status = check_address(&at, "physical", args->physical, 4)) != DSK_OK
        || (status = check_rows(&at, "physical_row_bytes", args->physical, args->n_rows,
                                args->physical_row_bytes, list_bytes, 4))
               != DSK_OK
        || (status = check_array(&at, "seq_lens", args->seq_lens, args->n_rows)) != DSK_OK
        || (status = check_optional(&at, "n_bad", args->n_bad, args->n_rows)) != DSK_OK)
        return status;
    if (args->n_table == 0)
        return DSK_OK;
    if ((status = check_array(&at, "tables", args->tables, args->n_table)) != DSK_OK
        || args->table_row_bytes == 0)
        return status;
    return check_rows(&at, "table_row_bytes", args->tables, args->n_rows, args->table_row_bytes, table_bytes,
                      4);
}

/* The index side of a segment: what is selected, and how it is found. */
static dsk_status check_seg_indices(const struct where *at, const struct dsk_attend_seg *seg)
{
    dsk_status status;

    if ((status = check_range(at, "topk", seg->topk, 1, INT32_MAX)) != DSK_OK
        || (status = check_address(at, "indices", seg->indices, 4)) != DSK_OK
        || (status = check_rows(at, "indices_row_bytes", seg->indices, seg->n_rows, seg->indices_row_bytes,
                                4 * (int64_t)seg->topk, 4))
               != DSK_OK
        || (status = check_optional(at, "lengths", seg->lengths, seg->n_rows)) != DSK_OK
        || (status = check_optional(at, "n_bad", seg->n_bad, seg->n_rows)) != DSK_OK
        || (status = check_range(at, "space", seg->space, DSK_SPACE_PHYSICAL, DSK_SPACE_LOGICAL)) != DSK_OK)
        return status;
    if (seg->space == DSK_SPACE_PHYSICAL) {
        if (seg->table != 0)
            return bad(at, "table", (long long)seg->table, "must be 0 when the indices are physical");
        return DSK_OK;
    }
    if ((status = check_range(at, "n_table", seg->n_table, 0, INT32_MAX)) != DSK_OK
        || (status = check_range(at, "seq_len", seg->seq_len, 0, INT32_MAX)) != DSK_OK)
        return status;
    return seg->n_table == 0 ? DSK_OK : check_array(at, "table", seg->table, seg->n_table);
}

/* A [n_rows, h_q, values] tensor whose rows and heads may lie in either order, padded. */
struct heads {
    const char *row_field;
    const char *head_field;
    uint64_t addr;
    int64_t row_bytes;
    int64_t head_bytes;
    int64_t values_bytes;
    int64_t align;
};

/* Rows and heads must not overlap: one of the two pitches steps over all that the other spans. */
static dsk_status check_heads(const struct where *at, const struct heads *t, int64_t n_rows, int64_t h_q)
{
    int64_t head_span, row_span;
    dsk_status status;

    if ((status = check_pitch(at, t->head_field, t->head_bytes, t->values_bytes, t->align)) != DSK_OK
        || (status = check_pitch(at, t->row_field, t->row_bytes, t->values_bytes, t->align)) != DSK_OK)
        return status;
    if (__builtin_mul_overflow(h_q - 1, t->head_bytes, &head_span)
        || __builtin_add_overflow(head_span, t->values_bytes, &head_span))
        return bad(at, t->head_field, t->head_bytes, "the heads wrap around the address space");
    if ((status = check_extent(at, t->row_field, t->addr, n_rows, t->row_bytes, head_span)) != DSK_OK)
        return status;
    row_span = (n_rows - 1) * t->row_bytes + t->values_bytes; /* the extent above did not wrap */
    if (t->row_bytes < head_span && t->head_bytes < row_span)
        return bad(at, t->row_field, t->row_bytes, "the rows overlap");
    return DSK_OK;
}

static dsk_status check_seg(const struct where *at, const struct dsk_attend_args *args,
                            const struct dsk_attend_seg *seg)
{
    const struct dsk_layout *layout = dsk_layout_get(args->kv.layout);
    const int64_t out_elem = dtype_bytes(args->out_dtype);
    dsk_status status;

    if ((status = check_range(at, "n_rows", seg->n_rows, 0, INT32_MAX)) != DSK_OK || seg->n_rows == 0)
        return status;
    const struct heads q = {.row_field = "q_row_bytes",
                            .head_field = "q_head_bytes",
                            .addr = seg->q,
                            .row_bytes = seg->q_row_bytes,
                            .head_bytes = seg->q_head_bytes,
                            .values_bytes = 2 * (int64_t)layout->d_qk,
                            .align = 2};
    const struct heads out = {.row_field = "out_row_bytes",
                              .head_field = "out_head_bytes",
                              .addr = seg->out,
                              .row_bytes = seg->out_row_bytes,
                              .head_bytes = seg->out_head_bytes,
                              .values_bytes = out_elem * layout->d_v,
                              .align = out_elem};
    if ((status = check_address(at, "q", seg->q, 2)) != DSK_OK
        || (status = check_heads(at, &q, seg->n_rows, args->h_q)) != DSK_OK
        || (status = check_address(at, "out", seg->out, (uint64_t)out_elem)) != DSK_OK
        || (status = check_heads(at, &out, seg->n_rows, args->h_q)) != DSK_OK
        || (status = check_optional(at, "sink", seg->sink, args->h_q)) != DSK_OK
        || (status = check_optional(at, "lse", seg->lse, args->h_q)) != DSK_OK)
        return status;
    if (seg->lse != 0
        && (status = check_rows(at, "lse_row_bytes", seg->lse, seg->n_rows, seg->lse_row_bytes,
                                4 * (int64_t)args->h_q, 4))
               != DSK_OK)
        return status;
    if (!isfinite(seg->softmax_scale))
        return bad_float(at, "softmax_scale", seg->softmax_scale, "must be given and finite");
    return check_seg_indices(at, seg);
}

dsk_status dsk_check_attend(const struct dsk_attend_args *args, struct dsk_err *err)
{
    const struct where at = {err, NO_SEG};
    dsk_status status;

    if (args == NULL)
        return bad(&at, "args", 0, "must not be null");
    if ((status = check_view(&at, &args->kv)) != DSK_OK
        || (status = check_range(&at, "h_q", args->h_q, 1, DSK_MAX_HEADS)) != DSK_OK
        || (status = check_dtype(&at, "out_dtype", args->out_dtype)) != DSK_OK
        || (status = check_flags(&at, args->flags, DSK_ATTEND_BATCH_INVARIANT)) != DSK_OK
        || (status = check_range(&at, "n_segs", args->n_segs, 0, INT32_MAX)) != DSK_OK)
        return status;
    if (args->segs == NULL && args->n_segs > 0)
        return bad(&at, "segs", 0, "must not be null");
    for (int32_t i = 0; i < args->n_segs; i++) {
        const struct where in_seg = {err, i};

        if ((status = check_seg(&in_seg, args, &args->segs[i])) != DSK_OK)
            return status;
    }
    return DSK_OK;
}

/* Bytes of a dense [n_parts, n_rows, h_q, values] tensor must fit the address space from addr. */
static dsk_status check_dense(const struct where *at, const char *field, uint64_t addr, int64_t n_parts,
                              const struct dsk_merge_args *args, int64_t values_bytes)
{
    int64_t row_bytes = (int64_t)args->h_q * values_bytes;
    int64_t part_bytes;

    if (__builtin_mul_overflow((int64_t)args->n_rows, row_bytes, &part_bytes))
        return bad(at, field, (long long)addr, "the rows wrap around the address space");
    return check_extent(at, field, addr, n_parts, part_bytes, part_bytes);
}

dsk_status dsk_check_merge(const struct dsk_merge_args *args, struct dsk_err *err)
{
    const struct where at = {err, NO_SEG};
    dsk_status status;

    if (args == NULL)
        return bad(&at, "args", 0, "must not be null");
    if ((status = check_range(&at, "n_parts", args->n_parts, 1, INT32_MAX)) != DSK_OK
        || (status = check_range(&at, "n_rows", args->n_rows, 0, INT32_MAX)) != DSK_OK
        || (status = check_range(&at, "h_q", args->h_q, 1, DSK_MAX_HEADS)) != DSK_OK
        || (status = check_range(&at, "d_v", args->d_v, 1, DSK_MAX_D_V)) != DSK_OK
        || (status = check_dtype(&at, "part_dtype", args->part_dtype)) != DSK_OK
        || (status = check_dtype(&at, "out_dtype", args->out_dtype)) != DSK_OK || args->n_rows == 0)
        return status;

    int64_t part_elem = dtype_bytes(args->part_dtype);
    int64_t out_elem = dtype_bytes(args->out_dtype);
    if ((status = check_address(&at, "out_parts", args->out_parts, (uint64_t)part_elem)) != DSK_OK
        || (status =
                check_dense(&at, "out_parts", args->out_parts, args->n_parts, args, part_elem * args->d_v))
               != DSK_OK
        || (status = check_address(&at, "lse_parts", args->lse_parts, 4)) != DSK_OK
        || (status = check_dense(&at, "lse_parts", args->lse_parts, args->n_parts, args, 4)) != DSK_OK
        || (status = check_address(&at, "out", args->out, (uint64_t)out_elem)) != DSK_OK
        || (status = check_dense(&at, "out", args->out, 1, args, out_elem * args->d_v)) != DSK_OK)
        return status;
    if (args->lse == 0)
        return DSK_OK;
    if ((status = check_address(&at, "lse", args->lse, 4)) != DSK_OK)
        return status;
    return check_dense(&at, "lse", args->lse, 1, args, 4);
}

dsk_status dsk_check_copy_rows(const struct dsk_copy_rows_args *args, struct dsk_err *err)
{
    const struct where at = {err, NO_SEG};
    dsk_status status;

    if (args == NULL)
        return bad(&at, "args", 0, "must not be null");
    if ((status = check_view(&at, &args->kv)) != DSK_OK
        || (status = check_range(&at, "n_rows", args->n_rows, 0, DSK_PAGE_TOKENS)) != DSK_OK
        || args->n_rows == 0)
        return status;

    const int64_t last = args->kv.n_slots - args->n_rows;
    const int64_t in_page = DSK_PAGE_TOKENS - args->n_rows;
    if ((status = check_range(&at, "src_slot", args->src_slot, 0, last)) != DSK_OK
        || (status = check_range(&at, "dst_slot", args->dst_slot, 0, last)) != DSK_OK)
        return status;
    if (args->src_slot % DSK_PAGE_TOKENS > in_page)
        return bad(&at, "src_slot", args->src_slot, "the rows must lie within one page");
    if (args->dst_slot % DSK_PAGE_TOKENS > in_page)
        return bad(&at, "dst_slot", args->dst_slot, "the rows must lie within one page");
    if (args->src_slot < args->dst_slot + args->n_rows && args->dst_slot < args->src_slot + args->n_rows)
        return bad(&at, "dst_slot", args->dst_slot, "the ranges must not overlap");
    return DSK_OK;
}

dsk_status dsk_check_shape(const struct dsk_attend_shape *shape, struct dsk_err *err)
{
    const struct where at = {err, NO_SEG};
    dsk_status status;

    if (shape == NULL)
        return bad(&at, "shape", 0, "must not be null");
    if (dsk_layout_get(shape->layout) == NULL)
        return bad(&at, "layout", shape->layout, "unknown layout id");
    if ((status = check_range(&at, "h_q", shape->h_q, 1, DSK_MAX_HEADS)) != DSK_OK
        || (status = check_range(&at, "topk", shape->topk, 1, INT32_MAX)) != DSK_OK)
        return status;
    return check_dtype(&at, "out_dtype", shape->out_dtype);
}
