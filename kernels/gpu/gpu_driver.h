/* gpu_driver.h - the driver of a GPU as a table of entry points under neutral names. One file per vendor fills it
 * from a library opened at run time, so nothing here links a vendor's SDK and a machine without one still starts.
 *
 * Threads: an entry acts on the context that bind() made current on the calling thread.
 * Results: 0 or the driver's own number, which classify() sorts; text() is for people. Handles are opaque pointers,
 * device addresses uint64_t. Entries allocate only where their name says so. */
#ifndef KERNELS_GPU_DRIVER_H
#define KERNELS_GPU_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum gpu_class {
    GPU_OK,
    GPU_NOT_READY, /* a query found work still running */
    GPU_NO_MEMORY,
    GPU_BAD_VALUE, /* refused without harm */
    GPU_LOST       /* the context is of no further use */
};

struct gpu_props {
    char name[64];
    char arch[16]; /* "sm_90", "gfx942" */
    uint8_t uuid[16];
    uint64_t memory_bytes;
    int32_t arch_major, arch_minor;
    int32_t n_units; /* multiprocessors or compute units */
    int32_t wave;    /* threads of one wave */
    int32_t cache_bytes;
    int32_t shared_bytes_max; /* a block may ask for */
};

struct gpu_launch_dims {
    uint32_t grid[3];
    uint32_t block;
    uint32_t shared_bytes;
    uint32_t cluster;  /* blocks that share memory, along x; 0 or 1: none */
    bool is_dependent; /* may start while the launch before it drains; the kernel itself waits for its data */
};

/* Device memory that another process can map, by a file descriptor. Filled by share_alloc and share_import. */
struct gpu_share {
    uint64_t addr;
    uint64_t bytes; /* at least what was asked for */
    void *handle;   /* the driver's own */
};

struct gpu_driver {
    void *library;
    const char *library_name;
    int32_t kind;  /* DSK_DEVICE_* */
    void *entries; /* the vendor's own function pointers */

    void (*unload)(struct gpu_driver *driver);
    enum gpu_class (*classify)(int result);
    const char *(*text)(const struct gpu_driver *driver, int result); /* never NULL */

    /* devices */
    int (*device_count)(const struct gpu_driver *driver, int *n_p);
    int (*device_props)(const struct gpu_driver *driver, int ordinal, struct gpu_props *props_p);
    int (*context_create)(const struct gpu_driver *driver, int ordinal, void **context_p);
    void (*context_destroy)(const struct gpu_driver *driver, void *context);
    int (*bind)(const struct gpu_driver *driver, void *context);

    /* memory */
    int (*mem_alloc)(const struct gpu_driver *driver, uint64_t bytes, uint64_t *addr_p);
    int (*mem_free)(const struct gpu_driver *driver, uint64_t addr);
    int (*mem_info)(const struct gpu_driver *driver, uint64_t *free_p, uint64_t *total_p); /* bytes */
    int (*host_alloc)(const struct gpu_driver *driver, uint64_t bytes, void **host_p); /* pinned, mapped */
    int (*host_free)(const struct gpu_driver *driver, void *host);
    int (*host_register)(const struct gpu_driver *driver, void *host, uint64_t bytes, uint64_t *addr_p);
    int (*host_unregister)(const struct gpu_driver *driver, void *host);

    /* Memory between processes. Refused, without harm, where the driver cannot. A descriptor that is exported is the
     * caller's to close, as is one that was imported; memory lives until the last of those who have it frees it. */
    int (*share_alloc)(const struct gpu_driver *driver, int ordinal, uint64_t bytes,
                       struct gpu_share *share_p);
    int (*share_export)(const struct gpu_driver *driver, const struct gpu_share *share, int *fd_p);
    int (*share_import)(const struct gpu_driver *driver, int ordinal, int fd, uint64_t bytes,
                        struct gpu_share *share_p);
    int (*share_free)(const struct gpu_driver *driver, const struct gpu_share *share);

    /* streams and events */
    int (*stream_create)(const struct gpu_driver *driver, void **stream_p);
    int (*stream_destroy)(const struct gpu_driver *driver, void *stream);
    int (*stream_query)(const struct gpu_driver *driver, void *stream);
    int (*stream_sync)(const struct gpu_driver *driver, void *stream); /* sleeps */
    int (*event_create)(const struct gpu_driver *driver, bool is_timed, void **event_p);
    int (*event_destroy)(const struct gpu_driver *driver, void *event);
    int (*event_record)(const struct gpu_driver *driver, void *event, void *stream);
    int (*event_query)(const struct gpu_driver *driver, void *event);
    int (*event_sync)(const struct gpu_driver *driver, void *event); /* sleeps */
    int (*event_elapsed)(const struct gpu_driver *driver, void *start, void *end, float *ms_p);

    /* copies, in the order of the stream */
    int (*copy_in)(const struct gpu_driver *driver, uint64_t dst, const void *src, uint64_t bytes,
                   void *stream);
    int (*copy_out)(const struct gpu_driver *driver, void *dst, uint64_t src, uint64_t bytes, void *stream);
    int (*copy_device)(const struct gpu_driver *driver, uint64_t dst, uint64_t src, uint64_t bytes,
                       void *stream);
    int (*set)(const struct gpu_driver *driver, uint64_t dst, uint8_t byte, uint64_t bytes, void *stream);

    /* code */
    int (*module_load)(const struct gpu_driver *driver, const void *image, void **module_p);
    int (*module_unload)(const struct gpu_driver *driver, void *module);
    int (*module_function)(const struct gpu_driver *driver, void *module, const char *name,
                           void **function_p);
    int (*function_set_shared)(const struct gpu_driver *driver, void *function, uint32_t bytes);
    int (*launch)(const struct gpu_driver *driver, void *function, const struct gpu_launch_dims *dims,
                  void *stream, void **params);

    /* graphs: what a stream is given between begin and end is recorded instead of run */
    int (*capture_begin)(const struct gpu_driver *driver, void *stream);
    int (*capture_end)(const struct gpu_driver *driver, void *stream,
                       void **graph_p); /* *graph_p may be NULL on failure */
    int (*graph_instantiate)(const struct gpu_driver *driver, void *graph, void **exec_p);
    int (*graph_root)(const struct gpu_driver *driver, void *graph,
                      void **node_p); /* the first, where there is one */
    int (*graph_destroy)(const struct gpu_driver *driver, void *graph);
    /* Other parameters for a kernel node of the graph that exec was made of; for launches from now on. */
    int (*exec_set_params)(const struct gpu_driver *driver, void *exec, void *node, void *function,
                           const struct gpu_launch_dims *dims, void **params);
    int (*exec_launch)(const struct gpu_driver *driver, void *exec, void *stream);
    int (*exec_destroy)(const struct gpu_driver *driver, void *exec);
};

#endif /* KERNELS_GPU_DRIVER_H */
