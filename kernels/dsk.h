/* dsk.h - sparse attention over a quantised latent KV cache: the kernels, as a library.
 *
 * One table of operations per backend (CPU now; CUDA and HIP fill the same one), reached through the
 * functions below, which check every argument once and then call the backend. Byte maps and the
 * structs that devices share are in dsk_format.h.
 *
 * Threads: a device, its streams and its memory belong to one thread at a time; two devices may be used
 * from two threads. Nothing here keeps global state but the log callback.
 * Memory: a device address is a uint64_t. On the CPU device it is a host pointer. Operations allocate
 * nothing; all scratch memory is taken at dsk_device_open, and on GPUs at dsk_stream_create (70 MiB each).
 * Order: operations on one stream run in the order issued. The CPU device runs each operation to its end before
 * it returns, so its streams are always idle and its events always done.
 * Errors: 0 or a negative dsk_status. On failure nothing was launched and no output byte was written,
 * unless the status is DSK_E_DEVICE, after which the device is lost: close it. */
#ifndef DSK_H
#define DSK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dsk_format.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define DSK_MUST_CHECK __attribute__((warn_unused_result))
#else
#define DSK_MUST_CHECK
#endif

/* ---- status ------------------------------------------------------------------------------ */

/* name, value, text */
#define DSK_STATUS_MAP(X)                                                                                    \
    X(DSK_OK, 0, "ok")                                                                                       \
    X(DSK_E_BAD_ARGUMENT, -1, "an argument is outside its range")                                            \
    X(DSK_E_UNSUPPORTED, -2, "this device does not serve this combination")                                  \
    X(DSK_E_NO_MEMORY, -3, "out of memory")                                                                  \
    X(DSK_E_NO_DEVICE, -4, "no such device")                                                                 \
    X(DSK_E_SLOT_RANGE, -5, "a slot lies outside the pool")                                                  \
    X(DSK_E_NONFINITE, -6, "strict append met NaN or infinity")                                              \
    X(DSK_E_DEVICE, -7, "the device failed and is lost")                                                     \
    X(DSK_E_INTERNAL, -8, "internal error")

#define DSK_STATUS_ENUM(name, value, text) name = (value),
typedef enum { DSK_STATUS_MAP(DSK_STATUS_ENUM) } dsk_status;
#undef DSK_STATUS_ENUM

const char *dsk_status_name(dsk_status status); /* "DSK_E_BAD_ARGUMENT"; never NULL */
const char *dsk_status_text(dsk_status status);

/* What was wrong, filled by the first function that knows. Callers pass NULL if they do not care. */
struct dsk_err {
    dsk_status status;
    char field[48]; /* name of the argument, as in the structs below: "segs[3].topk" */
    char value[32]; /* its value as text */
    char text[160]; /* one sentence: what the rule is */
};

/* ---- layouts ----------------------------------------------------------------------------- */

struct dsk_layout {
    const char *name; /* "scaled_512_64" */
    uint32_t id;      /* DSK_LAYOUT_* */
    int32_t row_bytes;
    int32_t latent;   /* latent values: 512 or 256 */
    int32_t rope;     /* RoPE values: 64 or 0 */
    int32_t n_groups; /* fp32 scales in the row; 0 when the layout has none */
    int32_t d_qk;     /* latent + rope */
    int32_t d_v;      /* = latent */
};

const struct dsk_layout *dsk_layout_get(uint32_t id);          /* NULL if unknown */
const struct dsk_layout *dsk_layout_by_name(const char *name); /* NULL if unknown */

/* Address of a slot in a plane, in 64 bits; no range check. */
static inline uint64_t dsk_row_address(const struct dsk_kv_view *kv, int32_t row_bytes, int64_t slot)
{
    return kv->base
           + (uint64_t)((slot >> DSK_PAGE_SHIFT) * kv->page_pitch_bytes
                        + (slot & (DSK_PAGE_TOKENS - 1)) * (int64_t)row_bytes);
}

/* ---- numbers (pure; any thread) ------------------------------------------------------------ */

uint8_t dsk_e4m3_from_f32(float x);  /* nearest even, saturating at +-448; NaN gives 0x7f */
float dsk_e4m3_to_f32(uint8_t byte); /* OCP e4m3fn; 0x7f and 0xff are NaN */
uint16_t dsk_bf16_from_f32(float x); /* nearest even; NaN stays a quiet NaN */
float dsk_bf16_to_f32(uint16_t bits);

/* ---- devices ----------------------------------------------------------------------------- */

#define DSK_DEVICE_CPU  1
#define DSK_DEVICE_CUDA 2
#define DSK_DEVICE_HIP  3

/* Instruction sets of the CPU device. AUTO takes the best the processor has. */
#define DSK_ISA_AUTO        0
#define DSK_ISA_GENERIC     1 /* portable C */
#define DSK_ISA_AVX2        2 /* AVX2 + FMA + F16C */
#define DSK_ISA_AVX512      3 /* AVX-512 F, BW, DQ, VL */
#define DSK_ISA_AVX512_BF16 4 /* ... and BF16, VBMI */

/* Flags of a GPU. With the first two results stay within the same tolerances; they are for tests and for finding faults. */
#define DSK_DEVICE_PORTABLE  1u /* only kernels that run on every architecture */
#define DSK_DEVICE_NO_GRAPHS 2u /* launch directly instead of replaying recorded launches; same bits */
#define DSK_DEVICE_FP8                                                                                       \
    4u /* HIP alone: attend of raw_512_64 rounds q and weights to e4m3: faster, less exact */

struct dsk_device;
struct dsk_stream;
struct dsk_event;

struct dsk_device_config {
    int32_t kind;      /* DSK_DEVICE_* */
    int32_t ordinal;   /* which of its kind, from 0 */
    int32_t n_threads; /* CPU: threads that compute, the caller's included; 0 = all the process may run on */
    int32_t isa;       /* CPU: DSK_ISA_*; an instruction set that the processor lacks is refused */
    uint32_t
        flags; /* GPUs: DSK_DEVICE_PORTABLE, DSK_DEVICE_NO_GRAPHS, which the CPU ignores; DSK_DEVICE_FP8 */
};

struct dsk_device_info {
    int32_t kind;
    int32_t n_threads;
    char name[64];         /* "cpu avx512", "NVIDIA H200" */
    char uuid[48];         /* "CPU-0" or "GPU-xxxxxxxx-xxxx-..." */
    char arch[16];         /* "avx512", "sm_90a", "gfx950" */
    uint64_t memory_bytes; /* of the device (CPU: of the host) */
};

/* Opens a device and takes its scratch memory. *dev_p is written on success only; close it with
 * dsk_device_close, from the thread that uses it, after its streams, events and memory are gone.
 * DSK_E_NO_DEVICE, DSK_E_UNSUPPORTED (isa), DSK_E_NO_MEMORY, DSK_E_BAD_ARGUMENT. */
DSK_MUST_CHECK dsk_status dsk_device_open(const struct dsk_device_config *config, struct dsk_device **dev_p,
                                          struct dsk_err *err);
void dsk_device_close(struct dsk_device *dev); /* NULL is fine */
const struct dsk_device_info *dsk_device_get_info(const struct dsk_device *dev);

/* Device memory, 256-byte aligned. free takes 0. */
DSK_MUST_CHECK dsk_status dsk_mem_alloc(struct dsk_device *dev, uint64_t bytes, uint64_t *addr_p);
void dsk_mem_free(struct dsk_device *dev, uint64_t addr);

/* Memory of the device (CPU: of the host) that anyone uses, and the rest, in bytes. Asks the driver or the system. */
DSK_MUST_CHECK dsk_status dsk_mem_get_usage(struct dsk_device *dev, uint64_t *used_p, uint64_t *free_p);

/* Makes host memory usable by the device where it lies (CPU: the pointer itself; GPUs: pinned and mapped).
 * The memory must outlive the registration. Undo with dsk_host_unregister(dev, host). */
DSK_MUST_CHECK dsk_status dsk_host_register(struct dsk_device *dev, void *host, uint64_t bytes,
                                            uint64_t *addr_p);
void dsk_host_unregister(struct dsk_device *dev, void *host);

DSK_MUST_CHECK dsk_status dsk_stream_create(struct dsk_device *dev, struct dsk_stream **stream_p);
void dsk_stream_destroy(struct dsk_stream *stream);
DSK_MUST_CHECK dsk_status dsk_stream_sync(struct dsk_stream *stream); /* blocks; DSK_E_DEVICE */
/* Attend launches of the stream since it was made: by a recorded graph, and those whose graph was recorded first. Both 0 where
 * there are no graphs. */
void dsk_stream_get_graph_counts(const struct dsk_stream *stream, uint64_t *n_hits_p, uint64_t *n_misses_p);

/* An event marks a point in a stream. is_done never blocks; DSK_E_DEVICE goes to *done_p = true. */
DSK_MUST_CHECK dsk_status dsk_event_create(struct dsk_device *dev, struct dsk_event **event_p);
void dsk_event_destroy(struct dsk_event *event);
DSK_MUST_CHECK dsk_status dsk_event_record(struct dsk_event *event, struct dsk_stream *stream);
DSK_MUST_CHECK dsk_status dsk_event_is_done(struct dsk_event *event, bool *done_p);

/* Copies between host and device memory on a stream. The host side must stay valid until the stream
 * has passed the copy. */
DSK_MUST_CHECK dsk_status dsk_copy_in(struct dsk_stream *s, uint64_t dst, const void *src, uint64_t bytes);
DSK_MUST_CHECK dsk_status dsk_copy_out(struct dsk_stream *s, void *dst, uint64_t src, uint64_t bytes);
DSK_MUST_CHECK dsk_status dsk_mem_set(struct dsk_stream *s, uint64_t dst, uint8_t byte, uint64_t bytes);

/* ---- operations -------------------------------------------------------------------------- */

#define DSK_APPEND_STRICT 1u /* NaN or infinity in a row that is written refuses the batch */

/* Quantise bf16 rows into slots (FORMATS: write). Bytes are identical on every backend.
 * Non-finite values: NaN writes 0, infinities write +-448; both are left out of amax and counted.
 * RoPE and the bf16 layouts copy bits verbatim; their non-finite values are counted, and refused by STRICT, too. Two equal slots in one batch: the later row wins. */
struct dsk_append_args {
    struct dsk_kv_view kv;
    uint64_t rows;     /* bf16 [n_rows, d_qk] */
    int64_t row_bytes; /* pitch of rows, >= 2 * d_qk, multiple of 2 */
    const int32_t
        *slots; /* HOST memory, [n_rows]: a slot, or -1 to skip the row. Anything else: DSK_E_SLOT_RANGE */
    uint64_t n_nonfinite; /* uint32 [n_rows], written; or 0 */
    int32_t n_rows;       /* >= 0 */
    uint32_t rule;        /* DSK_RULE_*; ignored by bf16 and raw layouts */
    uint32_t flags;       /* DSK_APPEND_* */
};
DSK_MUST_CHECK dsk_status dsk_append(struct dsk_stream *s, const struct dsk_append_args *args,
                                     struct dsk_err *err);

/* Dequantise rows to bf16 (FORMATS: read): value = e4m3 * scale in fp32, one rounding. Exact. */
#define DSK_READ_FULL  1 /* rows [0, n_rows) of the plane */
#define DSK_READ_PAGED 2 /* positions [first, first + n_rows) of a sequence, by its page table */
#define DSK_READ_SELECTED                                                                                    \
    3 /* n_rows listed slots; duplicates are gathered again; -1 leaves the output row as it was */
struct dsk_read_args {
    struct dsk_kv_view kv;
    uint64_t list; /* int32 device memory: page table (PAGED) or slots (SELECTED); FULL: 0.
                              * A page or slot outside the pool is treated as -1. */
    uint64_t out;  /* bf16 [n_rows, d_qk], dense */
    int64_t n_rows;
    int64_t first;  /* PAGED: first position; else 0 */
    int32_t n_list; /* entries in list: pages (PAGED), slots (SELECTED) */
    int32_t mode;   /* DSK_READ_* */
};
DSK_MUST_CHECK dsk_status dsk_read(struct dsk_stream *s, const struct dsk_read_args *args,
                                   struct dsk_err *err);

/* The selected reader for a consumer of bf16 rows: gathers what an index list names and rewrites the list.
 * If n_rows * topk < kv.n_slots: workspace row i holds the row of entry i and new_indices[i] = i.
 * Otherwise the whole plane is converted and new_indices keeps the slots. Invalid entries (negative or >= n_slots)
 * become -1 in both, and no new index names a workspace row that was not filled.
 * Workspace: dsk_gather_bytes() = min(n_slots, n_rows * topk) * 2 * d_qk. No deduplication, no host sync. */
struct dsk_gather_args {
    struct dsk_kv_view kv;
    uint64_t indices; /* int32 [n_rows, topk] physical slots */
    uint64_t
        new_indices;    /* int32 [n_rows, topk], dense; may be the same memory as indices if that is dense */
    uint64_t workspace; /* bf16 rows of d_qk values */
    uint64_t workspace_bytes;
    int64_t indices_row_bytes;
    int32_t n_rows;
    int32_t topk;
    int32_t branch;         /* 0 = by the rule above; 1 = force gathering; 2 = force whole plane (tests) */
    int64_t *n_workspace_p; /* HOST, may be NULL: rows the workspace then has, as a plane of bf16 rows */
};
uint64_t dsk_gather_bytes(const struct dsk_kv_view *kv, int32_t n_rows, int32_t topk);
DSK_MUST_CHECK dsk_status dsk_gather(struct dsk_stream *s, const struct dsk_gather_args *args,
                                     struct dsk_err *err);

/* Map logical positions to physical slots: table[p / 64] * 64 + p % 64 for 0 <= p < seq_len, else -1.
 * Lanes at or past `topk` in a padded row are untouched. Pages outside [0, n_pages) give -1 and count as bad. */
struct dsk_map_args {
    uint64_t logical;  /* int32 [n_rows, topk] */
    uint64_t physical; /* int32 [n_rows, topk], written */
    uint64_t tables;   /* int32 [n_rows, n_table] page ids */
    uint64_t seq_lens; /* int32 [n_rows] */
    uint64_t n_bad;    /* uint32 [n_rows], written: entries that are invalid and not -1; or 0 */
    int64_t logical_row_bytes;
    int64_t physical_row_bytes;
    int64_t table_row_bytes; /* 0: one table for all rows */
    int64_t n_pages;         /* pages in the pool */
    int32_t n_rows;
    int32_t topk;
    int32_t n_table; /* entries in a table; positions past it are invalid */
};
DSK_MUST_CHECK dsk_status dsk_map(struct dsk_stream *s, const struct dsk_map_args *args, struct dsk_err *err);

/* Sparse attention, straight from the cache rows:
 *   s_j = softmax_scale * q . k_j;  lse = ln sum_j exp(s_j);  out = sum_j exp(s_j - lse) * v_j
 *   with a sink: out *= 1 / (1 + exp(sink - lse)), lse unchanged.
 * A row without a valid entry gives out = +0 and lse = -inf. No byte of an invalid entry's row is used.
 * Valid: 0 <= i < n_slots (physical) or 0 <= i < seq_len with a mapped page (logical), in a lane below lengths[row]. */
#define DSK_ATTEND_BATCH_INVARIANT 1u /* a row's bits do not depend on what shares its launch */
struct dsk_attend_args {
    struct dsk_kv_view kv;
    const struct dsk_attend_seg *segs; /* HOST memory, [n_segs]; read before the call returns */
    int32_t n_segs;                    /* >= 0; segments of 0 rows are fine */
    int32_t h_q;                       /* 1..DSK_MAX_HEADS */
    int32_t out_dtype;                 /* DSK_DTYPE_* */
    uint32_t flags;                    /* DSK_ATTEND_* */
};
DSK_MUST_CHECK dsk_status dsk_attend(struct dsk_stream *s, const struct dsk_attend_args *args,
                                     struct dsk_err *err);

/* Combine partial results (split KV, context parallel): weights exp(lse_i - max). Parts with lse = -inf are
 * skipped whatever their out holds; all empty gives (+0, -inf); a single non-empty part passes bit for bit. */
struct dsk_merge_args {
    uint64_t out_parts; /* part_dtype [n_parts, n_rows, h_q, d_v], dense */
    uint64_t lse_parts; /* fp32 [n_parts, n_rows, h_q], dense */
    uint64_t out;       /* out_dtype [n_rows, h_q, d_v], dense */
    uint64_t lse;       /* fp32 [n_rows, h_q], dense; or 0 */
    int32_t n_parts;    /* >= 1 */
    int32_t n_rows;
    int32_t h_q;        /* 1..DSK_MAX_HEADS */
    int32_t d_v;        /* 1..DSK_MAX_D_V */
    int32_t part_dtype; /* DSK_DTYPE_* */
    int32_t out_dtype;
};
DSK_MUST_CHECK dsk_status dsk_merge(struct dsk_stream *s, const struct dsk_merge_args *args,
                                    struct dsk_err *err);

/* Copy n_rows rows between slots of one plane (fork's copy on write). The ranges must not overlap and each
 * must lie within one page. */
struct dsk_copy_rows_args {
    struct dsk_kv_view kv;
    int64_t src_slot;
    int64_t dst_slot;
    int32_t n_rows;
};
DSK_MUST_CHECK dsk_status dsk_copy_rows(struct dsk_stream *s, const struct dsk_copy_rows_args *args,
                                        struct dsk_err *err);

/* Would dsk_attend take this? Asked before scheduling; reads the same constants as the kernels.
 * false fills err with the rule that said no. */
struct dsk_attend_shape {
    uint32_t layout;
    int32_t h_q;
    int32_t topk;
    int32_t out_dtype;
};
bool dsk_supports(const struct dsk_device *dev, const struct dsk_attend_shape *shape, struct dsk_err *err);

/* Lines worth logging (device lost, an instruction set not taken). Set once, before the first device;
 * called on the thread that uses the device. */
typedef void (*dsk_log_func)(void *user, int level, const char *line); /* level: 0 error, 1 warn, 2 info */
void dsk_set_log(dsk_log_func func, void *user);

#ifdef __cplusplus
}
#endif

#endif /* DSK_H */
