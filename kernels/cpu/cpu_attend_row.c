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

/* Blocks of 16 heads, [d_qk][16]; absent heads are 0, so what their lanes compute stays out of everyone's
 * way. */
static void unpack_block(float *dst, const uint16_t *q, int n_heads, int d_qk)
{
    for (int lane = 0; lane < CPU_LANES; lane++) {
        for (int d = 0; d < d_qk; d++)
            dst[d * CPU_LANES + lane] = lane < n_heads ? num_bf16_to_f32(q[lane * d_qk + d]) : 0;
    }
}

/* q from q_bf16, for the heads that the latter holds. */
static void unpack_q(struct cpu_worker *w, int d_qk, int h_q, int n_heads)
{
    if (w->is_q_unpacked)
        return;
    w->is_q_unpacked = true;
    if (h_q <= CPU_FEW_HEADS) {
        for (int i = 0; i < n_heads * d_qk; i++)
            w->q[i] = num_bf16_to_f32(w->q_bf16[i]);
        return;
    }
    for (int h = 0; h < n_heads; h += CPU_LANES)
        unpack_block(w->q + h * d_qk, w->q_bf16 + h * d_qk, n_heads - h, d_qk);
}

/* Client memory is read once, here. */
void dsk_cpu_pack_q(struct cpu_worker *w, const struct cpu_isa *isa, const struct dsk_attend_args *args,
                    const struct dsk_attend_seg *seg, int32_t i_row, int head0, int n_heads)
{
    const int d_qk = dsk_layout_get(args->kv.layout)->d_qk;

    for (int h = 0; h < n_heads; h++)
        memcpy(w->q_bf16 + h * d_qk, q_head(seg, i_row, head0 + h), sizeof(*w->q_bf16) * (size_t)d_qk);
    for (int h = 0; h < n_heads; h += CPU_LANES) {
        int n = n_heads - h < CPU_LANES ? n_heads - h : CPU_LANES;

        w->q_max[h / CPU_LANES] = isa->max_bits(w->q_bf16 + h * d_qk, n * d_qk);
    }
    w->is_q_unpacked = false;
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

/* What a tile is computed with and from. */
struct tile {
    const struct cpu_isa *isa;
    const struct dsk_attend_args *args;
    const struct dsk_layout *layout;
    float scale;
    int first; /* of the list */
    int n_tokens;
    int n_tile; /* tokens of a full one */
    struct cpu_state *state;
    int head0;
    int n_heads;
};

/* Heads [h, h + n_heads) of the range by way of the dequantised rows in k; h a multiple of 16. */
static void attend_tile_heads(struct cpu_worker *w, const struct tile *c, struct fetch *f, int h, int n_heads)
{
    const int d_qk = c->layout->d_qk;
    const int ahead = c->first + c->n_tokens + LEAD_ROWS;
    float *s = w->scores + h * CPU_TILE;

    fetch_until(f, ahead + c->n_tile / 2); /* the next tile's rows arrive while this one is computed */
    if (c->args->h_q <= CPU_FEW_HEADS)
        c->isa->scores_few(s, w->q, w->k, c->n_tokens, d_qk, n_heads);
    else
        c->isa->scores(s, w->q + h * d_qk, w->k, c->n_tokens, d_qk, n_heads);
    c->isa->softmax(s, c->state->m + c->head0 + h, c->state->l + c->head0 + h, w->alpha + h, c->scale,
                    c->n_tokens, n_heads);
    fetch_until(f, ahead + c->n_tile);
    c->isa->accumulate(c->state->o + (c->head0 + h) * c->layout->d_v, s, w->k,
                       c->first == 0 ? NULL : w->alpha + h, c->n_tokens, dsk_cpu_k_pitch(d_qk),
                       c->layout->d_v, n_heads);
}

/* The blocks of heads that direct left, all at once if it left all: a head's bits are the same. */
static void attend_tile_rest(struct cpu_worker *w, const struct tile *c, struct fetch *f, uint32_t done)
{
    load_tile(w, c->isa, &c->args->kv, f, c->first, c->n_tokens);
    unpack_q(w, c->layout->d_qk, c->args->h_q, c->n_heads);
    if (done == 0) {
        attend_tile_heads(w, c, f, 0, c->n_heads);
        return;
    }
    for (int h = 0; h < c->n_heads; h += CPU_LANES) {
        if ((done >> (h / CPU_LANES) & 1u) == 0)
            attend_tile_heads(w, c, f, h, c->n_heads - h < CPU_LANES ? c->n_heads - h : CPU_LANES);
    }
}

static void attend_tile(struct cpu_worker *w, const struct tile *c, struct fetch *f)
{
    const uint32_t all = (1u << ((c->n_heads + CPU_LANES - 1) / CPU_LANES)) - 1;
    const int end = c->first + c->n_tokens;
    const struct cpu_direct direct = {
        .layout = c->layout,
        .raw_scale = c->args->kv.raw_scale,
        .softmax_scale = c->scale,
        .rows = f->list->rows + c->first,
        .n_tokens = c->n_tokens,
        .n_ahead = f->list->n_valid - end < c->n_tokens ? f->list->n_valid - end : c->n_tokens,
        .n_heads = c->n_heads,
        .is_first = c->first == 0,
        .q = w->q_bf16,
        .q_max = w->q_max,
        .scores = w->scores,
        .m = c->state->m + c->head0,
        .l = c->state->l + c->head0,
        .alpha = w->alpha,
        .o = c->state->o + c->head0 * c->layout->d_v,
    };
    uint32_t done = c->isa->direct(&direct);

    if (done != all)
        attend_tile_rest(w, c, f, done);
    else
        f->next = end + direct.n_ahead;
}

/* The list's (m, l, o) for these heads into state. The worker's q must hold them. */
void dsk_cpu_attend_list(struct cpu_worker *w, const struct cpu_isa *isa, const struct dsk_attend_args *args,
                         float scale, const struct cpu_list *list, struct cpu_state *state, int head0,
                         int n_heads)
{
    const struct dsk_layout *layout = dsk_layout_get(args->kv.layout);
    const int n_tile = args->h_q <= CPU_SMALL_HEADS ? isa->tile_small : CPU_TILE;
    struct fetch f = {list, layout->row_bytes, 0};

    for (int h = head0; h < head0 + n_heads; h++) {
        state->m[h] = -INFINITY;
        state->l[h] = 0;
    }
    for (int first = 0; first < list->n_valid; first += n_tile) {
        int n_tokens = list->n_valid - first < n_tile ? list->n_valid - first : n_tile;
        struct tile c = {isa, args, layout, scale, first, n_tokens, n_tile, state, head0, n_heads};

        attend_tile(w, &c, &f);
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

/* 1 / (1 + exp(sink - lse)): -inf leaves out as it is, +inf takes all of it. */
static double sink_factor(const struct dsk_attend_seg *seg, int head, double lse)
{
    float sink;

    if (seg->sink == 0)
        return 1;
    memcpy(&sink, (const float *)dsk_cpu_ptr(seg->sink) + head, sizeof(sink));
    return sink == -INFINITY ? 1 : 1 / (1 + exp((double)sink - lse));
}

void dsk_cpu_store_row(const struct cpu_isa *isa, const struct dsk_attend_args *args,
                       const struct dsk_attend_seg *seg, int32_t i_row, const struct cpu_state *total,
                       int head0, int n_heads)
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
            float factor = (float)(sink_factor(seg, h, exact) / (double)total->l[h]);
            if (args->out_dtype == DSK_DTYPE_F32)
                isa->store_f32(total->o + h * d_v, factor, d_v, dst);
            else
                isa->store_bf16(total->o + h * d_v, factor, d_v, dst);
        }
        if (seg->lse != 0)
            ((float *)dsk_cpu_ptr(lse_row))[h] = lse;
    }
}
