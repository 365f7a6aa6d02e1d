/* cpu.h - the CPU backend's private types: device, thread team, scratch, instruction sets.
 *
 * Threads: functions here run on the thread that uses the device, except team jobs, which run on every
 * thread of the team, and the entries of struct cpu_isa, which are pure.
 * A stream runs each operation to its end before it returns, so streams and events carry no state. */
#ifndef DSK_CPU_H
#define DSK_CPU_H

#include <stdint.h>

#include "../dsk_backend.h"

#define CPU_CACHE_LINE 64

/* ---- memory (cpu_device.c) ----------------------------------------------------------------- */

/* The only allocation of the backend (aligned_alloc): 256-byte aligned, not zeroed; large blocks ask for huge
 * pages, because rows are read in random order. NULL if there is none. free() gives it back. */
void *dsk_cpu_alloc(uint64_t bytes);

/* ---- team (cpu_team.c) ----------------------------------------------------------------------- */

/* The caller and n_threads - 1 helpers. One job at a time, from one thread. */
struct cpu_team;

/* A task of a job. worker: 0 is the caller, below n_threads; no two tasks run on one worker at once. */
typedef void (*cpu_task_func)(void *user, int worker, int64_t i_task);

/* DSK_E_NO_MEMORY if memory or threads are short. *team_p is written on success only. */
DSK_MUST_CHECK dsk_status dsk_cpu_team_create(int n_threads, struct cpu_team **team_p);
void dsk_cpu_team_destroy(struct cpu_team *team); /* joins the helpers; NULL is fine */
int dsk_cpu_team_size(const struct cpu_team *team);

/* Runs tasks 0..n_tasks-1, each once, in any order, and returns when all are done. Jobs that take less than
 * waking a helper would (cost_ns: a guess of the whole job on one thread) stay on the caller. */
void dsk_cpu_team_run(struct cpu_team *team, int64_t n_tasks, int64_t cost_ns, cpu_task_func func,
                      void *user);

/* ---- instruction sets (cpu_attend_*.c) ------------------------------------------------------- */

#define CPU_LANES       16  /* heads per block; one AVX-512 vector, two AVX2 vectors */
#define CPU_TILE        64  /* tokens dequantised at once when many heads share the work */
#define CPU_TILE_SMALL  16  /* ... when few do: the tile then stays in the first-level cache */
#define CPU_FEW_HEADS   8   /* up to this, scores are dot products along the row; packed scores waste lanes */
#define CPU_SMALL_HEADS 4   /* up to this, the small tile */
#define CPU_CHUNK       256 /* lanes of an index row per partial result; fixed, so the bits are too */
#define CPU_K_PITCH_MAX 576
#define CPU_HEAD_BLOCKS (DSK_MAX_HEADS / CPU_LANES)

/* Values between two dequantised rows. 512 would put every row of a column block into the same two sets of a
 * 32 KiB first-level cache, 576 and 320 spread them over all. */
static inline int dsk_cpu_k_pitch(int d_qk)
{
    return d_qk <= 256 ? 320 : CPU_K_PITCH_MAX;
}

/* Shapes: H = ceil(n_heads / 16) blocks.
 *   k      f32 [n_tokens][pitch]          dequantised rows; V is the first d_v values of each
 *   q      f32 [H][d_qk][16]              packed by block; lanes past n_heads are 0
 *   scores f32 [H][CPU_TILE][16]          q . k, then exp(scale * q . k - m)
 *   m, l   f32 [H * 16]                   running maximum and sum
 *   alpha  f32 [H * 16]                   what the sums so far are multiplied by
 *   o      f32 [n_heads][d_v]
 * Each head's arithmetic is the same sequence of operations whatever block, range of heads or thread
 * computes it. */
struct cpu_direct;

struct cpu_isa {
    const char *name;
    int32_t tile_small; /* tokens of a tile for up to CPU_SMALL_HEADS heads */
    /* A tile straight from its rows: scores, softmax and accumulate without a dequantised copy. Returns which
     * blocks of heads are done (bit i: heads 16 i ..); of the others nothing was written. 0: cannot, or a scale
     * is beyond what this way gets right. Depends on the rows and the block's query alone. */
    uint32_t (*direct)(const struct cpu_direct *job);
    /* One cache row as fp32: e4m3 * scale, exactly as the readers give it before they round. */
    void (*dequant)(const struct dsk_layout *layout, float raw_scale, const uint8_t *row, float *dst);
    void (*scores)(float *scores, const float *q, const float *k, int n_tokens, int d_qk, int n_heads);
    /* Few heads: q is f32 [n_heads][d_qk]; writes lanes 0..n_heads-1 of block 0. */
    void (*scores_few)(float *scores, const float *q, const float *k, int n_tokens, int d_qk, int n_heads);
    void (*softmax)(float *scores, float *m, float *l, float *alpha, float scale, int n_tokens, int n_heads);
    /* o = alpha * o + scores . v; alpha NULL: o = scores . v, whatever o held. */
    void (*accumulate)(float *o, const float *scores, const float *v, const float *alpha, int n_tokens,
                       int pitch, int d_v, int n_heads);
    /* o[i] = a * o[i] + b * part[i] */
    void (*fold)(float *o, const float *part, float a, float b, int n);
    /* cpu_convert.h: the same bytes on every instruction set */
    void (*quantise)(const uint16_t *x, int n, float scale, uint8_t *dst);
    void (*round_bf16)(const float *x, int n, uint16_t *dst);
    uint16_t (*max_bits)(const uint16_t *x, int n); /* the largest magnitude's bits; NaN is larger than all */
    /* dst[i] = x[i] * factor, as fp32 or rounded to bf16; dst may start at any multiple of its element. */
    void (*store_f32)(const float *x, float factor, int n, float *dst);
    void (*store_bf16)(const float *x, float factor, int n, uint16_t *dst);
};

/* One tile for struct cpu_isa's direct; shapes as above, head 0 is the first of the range. */
struct cpu_direct {
    const struct dsk_layout *layout;
    float raw_scale;
    float softmax_scale;
    const uint8_t *const
        *rows; /* [n_tokens], then n_ahead that the next tile will use: asked for meanwhile */
    int32_t n_tokens;
    int32_t n_ahead;
    int32_t n_heads;
    bool is_first;         /* o is written, not added to */
    const uint16_t *q;     /* bf16 [n_heads rounded up to 8][d_qk] */
    const uint16_t *q_max; /* [H] largest bits of a block's |q|: infinities and NaN are the largest */
    float *scores;
    float *m, *l, *alpha;
    float *o; /* [n_heads rounded up to 8][d_v]: rows past the last head are scratch */
};

extern const struct cpu_isa dsk_cpu_isa_generic;
#if defined(__x86_64__)
extern const struct cpu_isa dsk_cpu_isa_avx2;
extern const struct cpu_isa dsk_cpu_isa_avx512;
extern const struct cpu_isa dsk_cpu_isa_avx512_bf16; /* the same, but for direct */
uint32_t dsk_cpu_direct_avx512_bf16(const struct cpu_direct *job);
#endif

/* ---- attention scratch (cpu_attend_row.c works on it) ---------------------------------------- */

/* A partial result: out = o / l, lse = m + ln l. Nothing valid in it: n_valid is 0 and the rest is not read.
 * */
struct cpu_state {
    _Alignas(CPU_CACHE_LINE) float m[DSK_MAX_HEADS];
    float l[DSK_MAX_HEADS];
    float o[DSK_MAX_HEADS * DSK_MAX_D_V];
    int32_t n_valid;
};

/* Valid entries of a chunk as row addresses: each index is read once, here, and never again. */
struct cpu_list {
    const uint8_t *rows[CPU_CHUNK];
    int32_t n_valid;
    uint32_t n_bad;
};

/* What a worker's q holds, so that chunks of one row pack it once. n_heads 0: nothing of this launch. */
struct cpu_q_key {
    int32_t i_seg;
    int32_t i_row;
    int32_t head0;
    int32_t n_heads;
};

/* Scratch of one thread. q is filled from q_bf16 when first needed. */
struct cpu_worker {
    _Alignas(CPU_CACHE_LINE) float q[CPU_HEAD_BLOCKS * CPU_LANES * DSK_MAX_D_QK];
    uint16_t q_bf16[DSK_MAX_HEADS * DSK_MAX_D_QK]; /* [n_heads][d_qk], as the client gave it */
    uint16_t q_max[CPU_HEAD_BLOCKS];               /* see struct cpu_direct */
    float k[CPU_TILE * CPU_K_PITCH_MAX];
    float scores[CPU_HEAD_BLOCKS * CPU_TILE * CPU_LANES];
    float alpha[DSK_MAX_HEADS];
    struct cpu_state part;
    struct cpu_state total;
    struct cpu_list list;
    struct cpu_q_key q_key;
    bool is_q_unpacked; /* q holds what q_bf16 does */
};

/* Scratch of a wave: chunks of few rows, computed by all threads and folded in order. */
struct cpu_chunk {
    int32_t i_seg;
    int32_t i_row;
    bool is_last; /* of its row */
    struct cpu_list list;
    struct cpu_state state;
};

/* ---- device ---------------------------------------------------------------------------------- */

struct cpu_device {
    struct dsk_device base;
    const struct cpu_isa *isa;
    struct cpu_team *team;
    struct cpu_worker *workers; /* [n_threads] */
    struct cpu_chunk *chunks;   /* [n_chunks]: one wave, plus the row that the wave before left unfinished */
    int32_t n_chunks;
};

static inline struct cpu_device *dsk_cpu_device(const struct dsk_stream *s)
{
    return (struct cpu_device *)s->dev;
}

static inline void *dsk_cpu_ptr(uint64_t addr)
{
    return (void *)(uintptr_t)addr;
}

/* An int32 in memory that a client may be writing: one load, whose value is then checked and used. */
static inline int32_t dsk_cpu_load_i32(uint64_t addr, int64_t i)
{
    return __atomic_load_n((const int32_t *)dsk_cpu_ptr(addr) + i, __ATOMIC_RELAXED);
}

/* Position -> slot through a page table; -1 if it has none. n_slots bounds what a page id may name. */
static inline int64_t dsk_cpu_map_position(int64_t pos, int64_t seq_len, uint64_t table, int64_t n_table,
                                           int64_t n_slots)
{
    if (pos < 0 || pos >= seq_len || (pos >> DSK_PAGE_SHIFT) >= n_table)
        return -1;
    int64_t page = dsk_cpu_load_i32(table, pos >> DSK_PAGE_SHIFT);
    int64_t slot = page * DSK_PAGE_TOKENS + (pos & (DSK_PAGE_TOKENS - 1));
    return page < 0 || slot >= n_slots ? -1 : slot;
}

/* Asks for a row's memory. Rows lie anywhere in a pool larger than the caches, so each must be asked for
 * well before it is used. Into the second-level cache, which has more requests in flight than the first and
 * room for a tile. */
static inline void dsk_cpu_fetch(const void *row, int32_t row_bytes)
{
    for (int32_t at = 0; at < row_bytes; at += CPU_CACHE_LINE)
        __builtin_prefetch((const uint8_t *)row + at, 0, 2);
    __builtin_prefetch((const uint8_t *)row + row_bytes - 1, 0, 2);
}

/* ---- operations ------------------------------------------------------------------------------ */

dsk_status dsk_cpu_append(struct dsk_stream *s, const struct dsk_append_args *args, struct dsk_err *err);
dsk_status dsk_cpu_read(struct dsk_stream *s, const struct dsk_read_args *args, struct dsk_err *err);
dsk_status dsk_cpu_gather(struct dsk_stream *s, const struct dsk_gather_args *args, struct dsk_err *err);
dsk_status dsk_cpu_map(struct dsk_stream *s, const struct dsk_map_args *args, struct dsk_err *err);
dsk_status dsk_cpu_attend(struct dsk_stream *s, const struct dsk_attend_args *args, struct dsk_err *err);
dsk_status dsk_cpu_merge(struct dsk_stream *s, const struct dsk_merge_args *args, struct dsk_err *err);
dsk_status dsk_cpu_copy_rows(struct dsk_stream *s, const struct dsk_copy_rows_args *args,
                             struct dsk_err *err);

/* One cache row as bf16, d_qk values: the readers' conversion (cpu_read.c). */
void dsk_cpu_row_to_bf16(const struct cpu_isa *isa, const struct dsk_layout *layout, float raw_scale,
                         const uint8_t *row, uint16_t *dst);

/* Steps of an attention row (cpu_attend_row.c). Heads [head0, head0 + n_heads), head0 a multiple of 16. */
void dsk_cpu_scan(const struct dsk_attend_args *args, const struct dsk_attend_seg *seg, int32_t i_row,
                  int64_t lane, int64_t end, struct cpu_list *list);
int32_t dsk_cpu_row_lanes(const struct dsk_attend_seg *seg, int32_t i_row);
void dsk_cpu_pack_q(struct cpu_worker *w, const struct cpu_isa *isa, const struct dsk_attend_args *args,
                    const struct dsk_attend_seg *seg, int32_t i_row, int head0, int n_heads);
void dsk_cpu_attend_list(struct cpu_worker *w, const struct cpu_isa *isa, const struct dsk_attend_args *args,
                         float scale, const struct cpu_list *list, struct cpu_state *state, int head0,
                         int n_heads);
void dsk_cpu_fold(const struct cpu_isa *isa, struct cpu_state *total, const struct cpu_state *part, int d_v,
                  int head0, int n_heads);
void dsk_cpu_store_row(const struct cpu_isa *isa, const struct dsk_attend_args *args,
                       const struct dsk_attend_seg *seg, int32_t i_row, const struct cpu_state *total,
                       int head0, int n_heads);

#endif /* DSK_CPU_H */
