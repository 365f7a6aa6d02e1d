/* gpu.h - private types of the GPU backends' host code: device, stream, event, and what a vendor brings.
 *
 * Threads: everything here runs on the thread that uses the device. Memory: a stream takes its scratch, pinned ring
 * and argument block when it is created; operations take none, except that the first launch of a shape records a
 * graph. Loss: a driver's answer that is neither success nor a plain refusal retires the device; from then on every
 * call returns DSK_E_DEVICE and touches the driver no more, until close destroys the context. */
#ifndef KERNELS_GPU_H
#define KERNELS_GPU_H

#include "../cuda/attend_args.h"
#include "../dsk_backend.h"
#include "gpu_args.h"
#include "gpu_driver.h"

/* ---- code: kernels, and which of them serves which shape ------------------------------------- */

/* The kernels that every vendor provides, under these positions of its list. */
enum gpu_function {
    GPU_FN_APPEND,        /* struct gpu_append_args; a row per wave */
    GPU_FN_APPEND_FEW_64, /* struct gpu_append_few, the front with that many slots */
    GPU_FN_APPEND_FEW_960,
    GPU_FN_APPEND_RUNS_24, /* struct gpu_append_runs, the front with that many runs */
    GPU_FN_APPEND_RUNS_150,
    GPU_FN_APPEND_RUNS_500,
    GPU_FN_APPEND_CHECK, /* struct gpu_append_args: lowers first_bad, writes nothing else */
    GPU_FN_READ,         /* struct gpu_read_args; two rows per wave */
    GPU_FN_CLEAN,        /* struct gpu_clean_args; an entry per thread */
    GPU_FN_MAP,          /* struct gpu_map_args; a row per block */
    GPU_FN_MERGE,        /* struct gpu_merge_args; a column per block */
    GPU_FN_UPLOAD_36,    /* struct gpu_upload_args, the front with that many rows; one block */
    GPU_FN_UPLOAD_144,
    GPU_FN_UPLOAD_288,
    GPU_FN_FAULT, /* no arguments: stops with an error that is sticky */
    GPU_FN_PEAK,  /* struct gpu_peak_args; the one that a vendor may lack */
    GPU_N_FUNCTIONS
};

#define GPU_MAX_FUNCTIONS 64
#define GPU_MAX_UNITS     8
#define GPU_BLOCK         256 /* threads of a block of the kernels above, but for map and merge */
#define GPU_MAP_BLOCK     512
#define GPU_MERGE_BLOCK   128

/* A device loads one image of each unit: the first that serves its architecture, if there is one. */
struct gpu_image {
    const void *bytes;
    const char *arch; /* the one architecture that it is for, as gpu_props has it; NULL: any */
    int32_t unit;     /* of source, below GPU_MAX_UNITS */
};

struct gpu_kernel {
    const char *name; /* NULL: this vendor has no such kernel */
    int32_t unit;
    bool is_large; /* asks for more shared memory than a launch may without permission */
};

/* What an attend launch depends on; the key of its graph. Zeroed before it is filled, compared as bytes. */
struct gpu_attend_shape {
    int64_t topk; /* the longest list, rounded up to 64 */
    uint32_t layout;
    int32_t n_rows; /* padded to a bucket */
    int32_t h_q;
    int32_t out_dtype;
    uint32_t flags;
    uint32_t is_aligned; /* q, out and the plane by 16 bytes throughout */
};

struct gpu_attend_launch {
    int32_t function; /* position in the vendor's list; < 0: none */
    struct gpu_launch_dims dims;
};

struct gpu_attend_plan {
    struct gpu_attend_launch main;
    struct gpu_attend_launch combine;
    int32_t n_splits;
    int32_t split_entries;
    uint64_t part_out_bytes; /* of the whole launch; 0 where n_splits is 1 */
    uint64_t part_lse_bytes;
    uint64_t part_ref_bytes;
};

struct gpu_code {
    const char *missing; /* why there is no device code in this build; NULL: there is */
    const struct gpu_image *images;
    const struct gpu_kernel *kernels; /* the first GPU_N_FUNCTIONS as in enum gpu_function */
    int32_t n_images;
    int32_t n_kernels;
    int32_t wave; /* threads of a wave that the kernels are written for */
    int32_t
        dependent_arch;  /* major on which the kernels of enum gpu_function wait for the stream themselves */
    int32_t upload_rows; /* of an attend's argument block that a launch may carry; 0 to GPU_UPLOAD_ROWS */
    /* DSK_E_UNSUPPORTED: not served. flags: of the device. Partial results of one row take at most GPU_PART_BYTES. */
    dsk_status (*plan_attend)(const struct gpu_props *props, const struct gpu_attend_shape *shape,
                              uint32_t flags, struct gpu_attend_plan *plan_p, struct dsk_err *err);
};

/* ---- device ---------------------------------------------------------------------------------- */

struct gpu_device {
    struct dsk_device base;
    struct gpu_driver driver;
    const struct gpu_code *code;
    struct gpu_props props;
    void *context;
    void *modules[GPU_MAX_UNITS];       /* NULL: no image of the unit serves this device */
    void *functions[GPU_MAX_FUNCTIONS]; /* NULL: not there, or its unit is not */
    int32_t ordinal;
    uint32_t flags; /* DSK_DEVICE_* */
    bool is_lost;
};

/* ---- stream ---------------------------------------------------------------------------------- */

#define GPU_RING_SEGMENTS      8
#define GPU_RING_SEGMENT_BYTES ((uint64_t)512 << 10)
#define GPU_LAUNCH_ROWS        4096        /* query rows of one launch; more take several */
#define GPU_LAUNCH_SLOTS       (128 << 10) /* rows of one append launch */
#define GPU_PART_BYTES         ((uint64_t)64 << 20)
#define GPU_N_GRAPHS           64

/* Pinned memory that is handed out in order and used again once the stream has passed its last use. */
struct gpu_ring {
    uint8_t *host;
    uint64_t used; /* of the segment */
    int32_t segment;
    void *events[GPU_RING_SEGMENTS];
    bool is_recorded[GPU_RING_SEGMENTS];
};

struct gpu_graph {
    struct gpu_attend_shape key;
    void *exec; /* NULL: the place is free */
    void *graph;
    void *upload; /* the node that brings the argument block; NULL: it is copied before */
    uint64_t used_at;
};

struct gpu_stream {
    struct dsk_stream base;
    void *handle;
    struct gpu_ring ring;
    uint64_t memory;      /* one allocation; the four below lie in it */
    uint64_t block;       /* GPU_BLOCK_BYTES, then struct dsk_attend_row [GPU_LAUNCH_ROWS] */
    uint64_t slots;       /* int32 [GPU_LAUNCH_SLOTS] */
    uint64_t flag;        /* int32 */
    uint64_t parts;       /* GPU_PART_BYTES */
    uint64_t *slot_table; /* host: finds equal slots of a batch */
    struct gpu_graph graphs[GPU_N_GRAPHS];
    uint64_t graph_clock;
    uint64_t n_captures; /* graphs recorded, and launched: those just recorded too */
    uint64_t n_replays;
};

struct gpu_event {
    struct dsk_event base;
    void *handle;
    bool is_recorded;
};

static inline struct gpu_device *dsk_gpu_device(const struct dsk_stream *s)
{
    return (struct gpu_device *)s->dev;
}

static inline struct gpu_stream *dsk_gpu_stream(struct dsk_stream *s)
{
    return (struct gpu_stream *)s;
}

static inline uint64_t dsk_gpu_round_up(uint64_t n, uint64_t step)
{
    return (n + step - 1) / step * step;
}

/* ---- opening (gpu_device.c; driver_*.c) -------------------------------------------------------- */

/* config->kind is DSK_DEVICE_CUDA or DSK_DEVICE_HIP. Errors as dsk_device_open's. */
dsk_status dsk_gpu_open(const struct dsk_device_config *config, struct dsk_device **dev_p,
                        struct dsk_err *err);

/* Opens the vendor's library and fills *driver. DSK_E_NO_DEVICE with the reason; DSK_E_NO_MEMORY. */
dsk_status dsk_gpu_load_cuda(struct gpu_driver *driver, struct dsk_err *err);
dsk_status dsk_gpu_load_hip(struct gpu_driver *driver, struct dsk_err *err);

/* The device code of this build. Never NULL. */
const struct gpu_code *dsk_gpu_code_cuda(void);
const struct gpu_code *dsk_gpu_code_hip(void);

/* Starts every operation: DSK_E_DEVICE if the device is lost, else its context is current. */
DSK_MUST_CHECK dsk_status dsk_gpu_enter(struct gpu_device *gpu);

/* A driver's result as a status: refusals stay what they are, anything else retires the device. */
DSK_MUST_CHECK dsk_status dsk_gpu_status(struct gpu_device *gpu, int result, const char *what);

/* The same within an operation, where some of its work may be under way: whatever it is, it retires the device. */
DSK_MUST_CHECK dsk_status dsk_gpu_work(struct gpu_device *gpu, int result, const char *what,
                                       struct dsk_err *err);

/* ---- memory between processes (gpu_share.c) ------------------------------------------------------ */

/* Memory of at least bytes that can be exported; bytes of an import: what the exporter says it shares. Errors:
 * DSK_E_BAD_ARGUMENT, DSK_E_DEVICE (it was lost before), DSK_E_NO_MEMORY, DSK_E_UNSUPPORTED with the driver's reason. A
 * refusal leaves the device as it was. */
DSK_MUST_CHECK dsk_status dsk_gpu_share_alloc(struct dsk_device *dev, uint64_t bytes,
                                              struct gpu_share *share_p, struct dsk_err *err);
DSK_MUST_CHECK dsk_status dsk_gpu_share_export(struct dsk_device *dev, const struct gpu_share *share,
                                               int *fd_p, struct dsk_err *err);
DSK_MUST_CHECK dsk_status dsk_gpu_share_import(struct dsk_device *dev, int fd, uint64_t bytes,
                                               struct gpu_share *share_p, struct dsk_err *err);
void dsk_gpu_share_free(struct dsk_device *dev, struct gpu_share *share); /* allocated or imported */

/* ---- streams (gpu_stream.c) -------------------------------------------------------------------- */

dsk_status dsk_gpu_stream_create(struct dsk_device *dev, struct dsk_stream **stream_p);
void dsk_gpu_stream_destroy(struct dsk_stream *stream);
dsk_status dsk_gpu_stream_sync(struct dsk_stream *stream);
dsk_status dsk_gpu_event_create(struct dsk_device *dev, struct dsk_event **event_p);
void dsk_gpu_event_destroy(struct dsk_event *event);
dsk_status dsk_gpu_event_record(struct dsk_event *event, struct dsk_stream *stream);
dsk_status dsk_gpu_event_is_done(struct dsk_event *event, bool *done_p);
dsk_status dsk_gpu_copy_in(struct dsk_stream *s, uint64_t dst, const void *src, uint64_t bytes);
dsk_status dsk_gpu_copy_out(struct dsk_stream *s, void *dst, uint64_t src, uint64_t bytes);
dsk_status dsk_gpu_mem_set(struct dsk_stream *s, uint64_t dst, uint8_t byte, uint64_t bytes);

/* Pinned memory of at most GPU_RING_SEGMENT_BYTES that stays untouched until the stream has passed whatever is
 * issued next on it. Waits if the ring is full of work that is not done. */
DSK_MUST_CHECK dsk_status dsk_gpu_ring_take(struct gpu_stream *stream, uint64_t bytes, void **host_p);

/* Launches one kernel whose only parameter is *params. */
DSK_MUST_CHECK dsk_status dsk_gpu_launch(struct gpu_stream *stream, int32_t function,
                                         const struct gpu_launch_dims *dims, void *params,
                                         struct dsk_err *err);

/* For measuring: events with a clock, and the time between two that are done. */
DSK_MUST_CHECK dsk_status dsk_gpu_event_create_timed(struct dsk_device *dev, struct dsk_event **event_p);
DSK_MUST_CHECK dsk_status dsk_gpu_event_elapsed_us(struct dsk_event *start, struct dsk_event *end,
                                                   double *us_p);

/* For measuring: bytes between two places of device memory. */
DSK_MUST_CHECK dsk_status dsk_gpu_copy_device(struct dsk_stream *s, uint64_t dst, uint64_t src,
                                              uint64_t bytes);

/* For measuring: rounds of matrix products at the device's full rate; *flop_p: how many operations. sink: device
 * memory, fp32 [info's multiprocessors * GPU_PEAK_BLOCK]. DSK_E_UNSUPPORTED: the vendor's code has no such kernel. */
DSK_MUST_CHECK dsk_status dsk_gpu_peak(struct dsk_stream *s, uint64_t sink, int32_t n_steps, double *flop_p);

/* For tests: work that fails like an address out of range, so that the device is lost. */
DSK_MUST_CHECK dsk_status dsk_gpu_inject_fault(struct dsk_stream *s);

/* ---- graphs (gpu_graph.c) ---------------------------------------------------------------------- */

/* Launches the plan: by the graph of its key, recorded now if there is none yet, or directly if graphs are off. upload
 * brings the argument block along; NULL: it is on its way already. */
DSK_MUST_CHECK dsk_status dsk_gpu_graph_run(struct gpu_stream *stream, const struct gpu_attend_shape *key,
                                            const struct gpu_attend_plan *plan,
                                            struct gpu_upload_args *upload, struct dsk_err *err);
void dsk_gpu_graph_drop(struct gpu_stream *stream); /* all of them */
void dsk_gpu_graph_counts(const struct dsk_stream *stream, uint64_t *n_hits_p, uint64_t *n_misses_p);

/* ---- operations (gpu_ops.c, gpu_attend.c) ------------------------------------------------------- */

dsk_status dsk_gpu_append(struct dsk_stream *s, const struct dsk_append_args *args, struct dsk_err *err);
dsk_status dsk_gpu_read(struct dsk_stream *s, const struct dsk_read_args *args, struct dsk_err *err);
dsk_status dsk_gpu_gather(struct dsk_stream *s, const struct dsk_gather_args *args, struct dsk_err *err);
dsk_status dsk_gpu_map(struct dsk_stream *s, const struct dsk_map_args *args, struct dsk_err *err);
dsk_status dsk_gpu_attend(struct dsk_stream *s, const struct dsk_attend_args *args, struct dsk_err *err);
dsk_status dsk_gpu_merge(struct dsk_stream *s, const struct dsk_merge_args *args, struct dsk_err *err);
dsk_status dsk_gpu_copy_rows(struct dsk_stream *s, const struct dsk_copy_rows_args *args,
                             struct dsk_err *err);
bool dsk_gpu_supports(const struct dsk_device *dev, const struct dsk_attend_shape *shape,
                      struct dsk_err *err);

#endif /* KERNELS_GPU_H */
