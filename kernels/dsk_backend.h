/* dsk_backend.h - what a backend fills in: one complete table of operations. Private to kernels/.
 *
 * dsk.c has checked every argument against dsk.h before it calls an entry, so entries check nothing again but
 * what only they can know. What a backend lacks is an entry that returns DSK_E_UNSUPPORTED, never NULL. */
#ifndef DSK_BACKEND_H
#define DSK_BACKEND_H

#include "dsk.h"

struct dsk_op_table {
    /* life */
    void (*close)(struct dsk_device *dev);
    dsk_status (*mem_alloc)(struct dsk_device *dev, uint64_t bytes, uint64_t *addr_p);
    void (*mem_free)(struct dsk_device *dev, uint64_t addr);
    dsk_status (*mem_usage)(struct dsk_device *dev, uint64_t *used_p, uint64_t *free_p);
    dsk_status (*host_register)(struct dsk_device *dev, void *host, uint64_t bytes, uint64_t *addr_p);
    void (*host_unregister)(struct dsk_device *dev, void *host);
    dsk_status (*stream_create)(struct dsk_device *dev, struct dsk_stream **stream_p);
    void (*stream_destroy)(struct dsk_stream *stream);
    dsk_status (*stream_sync)(struct dsk_stream *stream);
    void (*graph_counts)(const struct dsk_stream *stream, uint64_t *n_hits_p, uint64_t *n_misses_p);
    dsk_status (*event_create)(struct dsk_device *dev, struct dsk_event **event_p);
    void (*event_destroy)(struct dsk_event *event);
    dsk_status (*event_record)(struct dsk_event *event, struct dsk_stream *stream);
    dsk_status (*event_is_done)(struct dsk_event *event, bool *done_p);
    dsk_status (*copy_in)(struct dsk_stream *s, uint64_t dst, const void *src, uint64_t bytes);
    dsk_status (*copy_out)(struct dsk_stream *s, void *dst, uint64_t src, uint64_t bytes);
    dsk_status (*mem_set)(struct dsk_stream *s, uint64_t dst, uint8_t byte, uint64_t bytes);
    /* operations */
    dsk_status (*append)(struct dsk_stream *s, const struct dsk_append_args *args, struct dsk_err *err);
    dsk_status (*read)(struct dsk_stream *s, const struct dsk_read_args *args, struct dsk_err *err);
    dsk_status (*gather)(struct dsk_stream *s, const struct dsk_gather_args *args, struct dsk_err *err);
    dsk_status (*map)(struct dsk_stream *s, const struct dsk_map_args *args, struct dsk_err *err);
    dsk_status (*attend)(struct dsk_stream *s, const struct dsk_attend_args *args, struct dsk_err *err);
    dsk_status (*merge)(struct dsk_stream *s, const struct dsk_merge_args *args, struct dsk_err *err);
    dsk_status (*copy_rows)(struct dsk_stream *s, const struct dsk_copy_rows_args *args, struct dsk_err *err);
    bool (*supports)(const struct dsk_device *dev, const struct dsk_attend_shape *shape, struct dsk_err *err);
};

/* First member of every backend's device, stream and event. */
struct dsk_device {
    const struct dsk_op_table *ops;
    struct dsk_device_info info;
};
struct dsk_stream {
    struct dsk_device *dev;
};
struct dsk_event {
    struct dsk_device *dev;
};

dsk_status dsk_cpu_open(const struct dsk_device_config *config, struct dsk_device **dev_p,
                        struct dsk_err *err);
dsk_status dsk_gpu_open(const struct dsk_device_config *config, struct dsk_device **dev_p,
                        struct dsk_err *err);

/* Fill err (NULL is fine) and return status, so that a check reads `return dsk_fail(err, ...)`. */
__attribute__((format(printf, 5, 6))) dsk_status
dsk_fail(struct dsk_err *err, dsk_status status, const char *field, long long value, const char *format, ...);

/* One line to the callback of dsk_set_log, if there is one. Levels as there. */
__attribute__((format(printf, 2, 3))) void dsk_log(int level, const char *format, ...);

#endif /* DSK_BACKEND_H */
