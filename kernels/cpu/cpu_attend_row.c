/* cpu_attend_row.c - the steps of one query row: which cache rows it names, its packed query, one chunk of
 * the online softmax, folding chunks, and the row's output. Which thread does what is cpu_attend.c's
 * business.
 *
 *   chunk:  for each tile of valid rows:  K = dequant(rows);  S = K q;  m' = max(m, S);  P = exp(S - m')
 *           l = l exp(m - m') + sum P;    o = o exp(m - m') + P V
 *   row:    the chunks' (m, l, o) folded in list order;  out = o / l, lse = m + ln l
 * The list holds valid rows only, so a tile has no masked lane and its maximum is the maximum of real
 * scores. */
#include <math.h>
#include <string.h>

#include "../dsk_number_inline.h"
#include "cpu.h"

#define LEAD_ROWS 16 /* cache rows asked for ahead of the one being dequantised, at least */

/* ---- the list ---------------------------------------------------------------------------- */

/* Live lanes of a row. `lengths` may be changing: read once. */
int32_t dsk_cpu_row_lanes(const struct dsk_attend_seg *seg, int32_t i_row)
{
    if (seg->lengths == 0)
        return seg->topk;
    int32_t length = dsk_cpu_load_i32(seg->lengths, i_row);
    if (length < 0)
        return 0;
    return length < seg->topk ? length : seg->topk;
}

/* Lanes [lane, end), at most CPU_CHUNK of them. */
void dsk_cpu_scan(const struct dsk_attend_args *args, const struct dsk_attend_seg *seg, int32_t i_row,
                  int64_t lane, int64_t end, struct cpu_list *list)
{
    const struct dsk_kv_view *kv = &args->kv;
    const int32_t row_bytes = dsk_layout_get(kv->layout)->row_bytes;
    const uint64_t indices = seg->indices + (uint64_t)(i_row * seg->indices_row_bytes);
    const bool is_logical = seg->space == DSK_SPACE_LOGICAL;
    int32_t n_valid = 0;
    uint32_t n_bad = 0;

    for (; lane < end; lane++) {
        int64_t index = dsk_cpu_load_i32(indices, lane);
        int64_t slot = index;

        if (is_logical)
            slot = dsk_cpu_map_position(index, seg->seq_len, seg->table, seg->n_table, kv->n_slots);
        if (slot < 0 || slot >= kv->n_slots) {
            n_bad += index != -1;
            continue;
        }
        list->rows[n_valid++] = dsk_cpu_ptr(dsk_row_address(kv, row_bytes, slot));
    }
    list->n_valid = n_valid;
    list->n_bad = n_bad;
}

/* ---- the query --------------------------------------------------------------------------- */

static const uint8_t *q_head(const struct dsk_attend_seg *seg, int32_t i_row, int head)
{
    return (const uint8_t *)dsk_cpu_ptr(seg->q
                                        + (uint64_t)(i_row * seg->q_row_bytes + head * seg->q_head_bytes));
}

static void unpack_bf16(float *dst, const uint8_t *src, int n)
{
    uint16_t bits[DSK_MAX_D_QK];

    memcpy(bits, src, sizeof(*bits) * (size_t)n);
    for (int i = 0; i < n; i++)
        dst[i] = num_bf16_to_f32(bits[i]);
}

/* Blocks of 16 heads, [d_qk][16]; absent heads are 0, so what their lanes compute stays out of everyone's
 * way. */
static void pack_block(float *dst, const struct dsk_attend_seg *seg, int32_t i_row, int head0, int n_heads,
                       int d_qk)
{
    float head[DSK_MAX_D_QK];

    for (int lane = 0; lane < CPU_LANES; lane++) {
        if (lane < n_heads)
            unpack_bf16(head, q_head(seg, i_row, head0 + lane), d_qk);
        else
            memset(head, 0, sizeof(*head) * (size_t)d_qk);
        for (int d = 0; d < d_qk; d++)
            dst[d * CPU_LANES + lane] = head[d];
    }
}

void dsk_cpu_pack_q(struct cpu_worker *w, const struct dsk_attend_args *args,
                    const struct dsk_attend_seg *seg, int32_t i_row, int head0, int n_heads)
{
    const int d_qk = dsk_layout_get(args->kv.layout)->d_qk;

    if (args->h_q <= CPU_FEW_HEADS) {
        for (int h = 0; h < n_heads; h++)
            unpack_bf16(w->q + h * d_qk, q_head(seg, i_row, head0 + h), d_qk);
        return;
    }
    for (int h = 0; h < n_heads; h += CPU_LANES)
        pack_block(w->q + h * d_qk, seg, i_row, head0 + h, n_heads - h, d_qk);
}

/* ---- one chunk --------------------------------------------------------------------------- */

/* Which rows of a list were asked for: [0, next). */
struct fetch {
    const struct cpu_list *list;
    int32_t row_bytes;
    int32_t next;
};

static inline void fetch_until(struct fetch *f, int end)
{
    end = end < f->list->n_valid ? end : f->list->n_valid;
    for (; f->next < end; f->next++)
        dsk_cpu_fetch(f->list->rows[f->next], f->row_bytes);
}

static void load_tile(struct cpu_worker *w, const struct cpu_isa *isa, const struct dsk_kv_view *kv,
                      struct fetch *f, int first, int n_tokens)
{
    const struct dsk_layout *layout = dsk_layout_get(kv->layout);
    const int pitch = dsk_cpu_k_pitch(layout->d_qk);

    for (int t = 0; t < n_tokens; t++) {
        fetch_until(f, first + t + LEAD_ROWS);
        isa->dequant(layout, kv->raw_scale, f->list->rows[first + t], w->k + t * pitch);
    }
}

/* The list's (m, l, o) for these heads into state. The worker's q must hold them. */
void dsk_cpu_attend_list(struct cpu_worker *w, const struct cpu_isa *isa, const struct dsk_attend_args *args,
                         float scale, const struct cpu_list *list, struct cpu_state *state, int head0,
                         int n_heads)
{
    const struct dsk_layout *layout = dsk_layout_get(args->kv.layout);
    const int tile = args->h_q <= CPU_SMALL_HEADS ? CPU_TILE_SMALL : CPU_TILE;
    const int pitch = dsk_cpu_k_pitch(layout->d_qk);
    float *o = state->o + head0 * layout->d_v;
    struct fetch f = {list, layout->row_bytes, 0};

    for (int h = head0; h < head0 + n_heads; h++) {
        state->m[h] = -INFINITY;
        state->l[h] = 0;
    }
    fetch_until(&f, LEAD_ROWS);
    for (int first = 0; first < list->n_valid; first += tile) {
        int n_tokens = list->n_valid - first < tile ? list->n_valid - first : tile;
        int ahead = first + n_tokens + LEAD_ROWS;

        load_tile(w, isa, &args->kv, &f, first, n_tokens);
        fetch_until(&f, ahead + tile / 2); /* the next tile's rows arrive while this one is computed */
        if (args->h_q <= CPU_FEW_HEADS)
            isa->scores_few(w->scores, w->q, w->k, n_tokens, layout->d_qk, n_heads);
        else
            isa->scores(w->scores, w->q, w->k, n_tokens, layout->d_qk, n_heads);
        isa->softmax(w->scores, state->m + head0, state->l + head0, w->alpha, scale, n_tokens, n_heads);
        fetch_until(&f, ahead + tile);
        isa->accumulate(o, w->scores, w->k, first == 0 ? NULL : w->alpha, n_tokens, pitch, layout->d_v,
                        n_heads);
    }
}

/* ---- folding and output ------------------------------------------------------------------ */

/* total = total (+) part, for heads [head0, head0 + n_heads); both hold something valid. The weights are
 * exp(m - max), and a maximum of -inf (every score was) takes no part. */
void dsk_cpu_fold(const struct cpu_isa *isa, struct cpu_state *total, const struct cpu_state *part, int d_v,
                  int head0, int n_heads)
{
    for (int h = head0; h < head0 + n_heads; h++) {
        float max = part->m[h] > total->m[h] ? part->m[h] : total->m[h];
        float base = max == -INFINITY ? 0.0f : max;
        float a = expf(total->m[h] - base);
        float b = expf(part->m[h] - base);

        isa->fold(total->o + h * d_v, part->o + h * d_v, a, b, d_v);
        total->l[h] = a * total->l[h] + b * part->l[h];
        total->m[h] = max;
    }
}

static void store_values(void *dst, int32_t dtype, const float *o, float factor, int n)
{
    float values[DSK_MAX_D_V];
    uint16_t rounded[DSK_MAX_D_V];

    for (int i = 0; i < n; i++)
        values[i] = o[i] * factor;
    if (dtype == DSK_DTYPE_F32) {
        memcpy(dst, values, sizeof(*values) * (size_t)n);
        return;
    }
    for (int i = 0; i < n; i++)
        rounded[i] = num_bf16_from_f32(values[i]);
    memcpy(dst, rounded, sizeof(*rounded) * (size_t)n);
}

/* 1 / (1 + exp(sink - lse)): -inf leaves out as it is, +inf takes all of it. */
static double sink_factor(const struct dsk_attend_seg *seg, int head, double lse)
{
    float sink;

    if (seg->sink == 0)
        return 1;
    memcpy(&sink, (const float *)dsk_cpu_ptr(seg->sink) + head, sizeof(sink));
    return sink == -INFINITY ? 1 : 1 / (1 + exp((double)sink - lse));
}

void dsk_cpu_store_row(const struct dsk_attend_args *args, const struct dsk_attend_seg *seg, int32_t i_row,
                       const struct cpu_state *total, int head0, int n_heads)
{
    const int d_v = dsk_layout_get(args->kv.layout)->d_v;
    const size_t elem = args->out_dtype == DSK_DTYPE_F32 ? 4 : 2;
    const uint64_t out = seg->out + (uint64_t)(i_row * seg->out_row_bytes);
    const uint64_t lse_row = seg->lse + (uint64_t)(i_row * seg->lse_row_bytes);

    for (int h = head0; h < head0 + n_heads; h++) {
        void *dst = dsk_cpu_ptr(out + (uint64_t)(h * seg->out_head_bytes));
        float lse = -INFINITY;

        if (total->n_valid == 0) { /* +0, also with a sink */
            memset(dst, 0, elem * (size_t)d_v);
        } else {
            double exact = (double)total->m[h] + log((double)total->l[h]);

            lse = (float)exact;
            store_values(dst, args->out_dtype, total->o + h * d_v,
                         (float)(sink_factor(seg, h, exact) / (double)total->l[h]), d_v);
        }
        if (seg->lse != 0)
            ((float *)dsk_cpu_ptr(lse_row))[h] = lse;
    }
}
