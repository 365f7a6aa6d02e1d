/* dsk.c - the public functions: check, then call the backend's table. Also status texts, errors, the log.
 * No operation is implemented here. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "dsk_backend.h"
#include "dsk_check.h"

/* ---- status and errors ------------------------------------------------------------------- */

const char *dsk_status_name(dsk_status status)
{
#define STATUS_NAME(name, value, text)                                                                       \
    case name:                                                                                               \
        return #name;
    switch (status) {
        DSK_STATUS_MAP(STATUS_NAME)
    }
#undef STATUS_NAME
    return "DSK_E_UNKNOWN";
}

const char *dsk_status_text(dsk_status status)
{
#define STATUS_TEXT(name, value, text)                                                                       \
    case name:                                                                                               \
        return text;
    switch (status) {
        DSK_STATUS_MAP(STATUS_TEXT)
    }
#undef STATUS_TEXT
    return "unknown status";
}

dsk_status dsk_fail(struct dsk_err *err, dsk_status status, const char *field, long long value,
                    const char *format, ...)
{
    va_list list;

    if (err == NULL)
        return status;
    err->status = status;
    snprintf(err->field, sizeof(err->field), "%s", field);
    snprintf(err->value, sizeof(err->value), "%lld", value);
    va_start(list, format);
    vsnprintf(err->text, sizeof(err->text), format, list);
    va_end(list);
    return status;
}

/* ---- log --------------------------------------------------------------------------------- */

/* The one piece of global state: set once, before the first device, so no lock. */
static dsk_log_func log_func;
static void *log_user;

void dsk_set_log(dsk_log_func func, void *user)
{
    log_func = func;
    log_user = user;
}

void dsk_log(int level, const char *format, ...)
{
    char line[256];
    va_list list;

    if (log_func == NULL)
        return;
    va_start(list, format);
    vsnprintf(line, sizeof(line), format, list);
    va_end(list);
    log_func(log_user, level, line);
}

/* ---- devices ----------------------------------------------------------------------------- */

dsk_status dsk_device_open(const struct dsk_device_config *config, struct dsk_device **dev_p,
                           struct dsk_err *err)
{
    dsk_status status = dsk_check_config(config, err);

    if (status != DSK_OK)
        return status;
    if (dev_p == NULL)
        return dsk_fail(err, DSK_E_BAD_ARGUMENT, "dev_p", 0, "must not be null");
    if (config->kind == DSK_DEVICE_CPU)
        return dsk_cpu_open(config, dev_p, err);
    return dsk_gpu_open(config, dev_p, err); /* CUDA or HIP: the check knows no other */
}

void dsk_device_close(struct dsk_device *dev)
{
    if (dev != NULL)
        dev->ops->close(dev);
}

const struct dsk_device_info *dsk_device_get_info(const struct dsk_device *dev)
{
    return dev == NULL ? NULL : &dev->info;
}

dsk_status dsk_mem_alloc(struct dsk_device *dev, uint64_t bytes, uint64_t *addr_p)
{
    if (dev == NULL || addr_p == NULL)
        return DSK_E_BAD_ARGUMENT;
    return dev->ops->mem_alloc(dev, bytes, addr_p);
}

void dsk_mem_free(struct dsk_device *dev, uint64_t addr)
{
    if (dev != NULL && addr != 0)
        dev->ops->mem_free(dev, addr);
}

dsk_status dsk_mem_get_usage(struct dsk_device *dev, uint64_t *used_p, uint64_t *free_p)
{
    if (dev == NULL || used_p == NULL || free_p == NULL)
        return DSK_E_BAD_ARGUMENT;
    return dev->ops->mem_usage(dev, used_p, free_p);
}

dsk_status dsk_host_register(struct dsk_device *dev, void *host, uint64_t bytes, uint64_t *addr_p)
{
    if (dev == NULL || host == NULL || addr_p == NULL || bytes == 0
        || (uint64_t)(uintptr_t)host + bytes < bytes)
        return DSK_E_BAD_ARGUMENT;
    return dev->ops->host_register(dev, host, bytes, addr_p);
}

void dsk_host_unregister(struct dsk_device *dev, void *host)
{
    if (dev != NULL && host != NULL)
        dev->ops->host_unregister(dev, host);
}

/* ---- streams, events, copies ------------------------------------------------------------- */

dsk_status dsk_stream_create(struct dsk_device *dev, struct dsk_stream **stream_p)
{
    if (dev == NULL || stream_p == NULL)
        return DSK_E_BAD_ARGUMENT;
    return dev->ops->stream_create(dev, stream_p);
}

void dsk_stream_destroy(struct dsk_stream *stream)
{
    if (stream != NULL)
        stream->dev->ops->stream_destroy(stream);
}

dsk_status dsk_stream_sync(struct dsk_stream *stream)
{
    if (stream == NULL)
        return DSK_E_BAD_ARGUMENT;
    return stream->dev->ops->stream_sync(stream);
}

void dsk_stream_get_graph_counts(const struct dsk_stream *stream, uint64_t *n_hits_p, uint64_t *n_misses_p)
{
    stream->dev->ops->graph_counts(stream, n_hits_p, n_misses_p);
}

dsk_status dsk_event_create(struct dsk_device *dev, struct dsk_event **event_p)
{
    if (dev == NULL || event_p == NULL)
        return DSK_E_BAD_ARGUMENT;
    return dev->ops->event_create(dev, event_p);
}

void dsk_event_destroy(struct dsk_event *event)
{
    if (event != NULL)
        event->dev->ops->event_destroy(event);
}

dsk_status dsk_event_record(struct dsk_event *event, struct dsk_stream *stream)
{
    if (event == NULL || stream == NULL || event->dev != stream->dev)
        return DSK_E_BAD_ARGUMENT;
    return event->dev->ops->event_record(event, stream);
}

dsk_status dsk_event_is_done(struct dsk_event *event, bool *done_p)
{
    if (event == NULL || done_p == NULL)
        return DSK_E_BAD_ARGUMENT;
    return event->dev->ops->event_is_done(event, done_p);
}

/* Copies of 0 bytes are fine and look at no address. */
static dsk_status check_copy(const struct dsk_stream *s, uint64_t addr, bool is_host_null, uint64_t bytes)
{
    uint64_t end;

    if (s == NULL)
        return DSK_E_BAD_ARGUMENT;
    if (bytes != 0 && (addr == 0 || is_host_null || __builtin_add_overflow(addr, bytes, &end)))
        return DSK_E_BAD_ARGUMENT;
    return DSK_OK;
}

dsk_status dsk_copy_in(struct dsk_stream *s, uint64_t dst, const void *src, uint64_t bytes)
{
    dsk_status status = check_copy(s, dst, src == NULL, bytes);

    return status != DSK_OK || bytes == 0 ? status : s->dev->ops->copy_in(s, dst, src, bytes);
}

dsk_status dsk_copy_out(struct dsk_stream *s, void *dst, uint64_t src, uint64_t bytes)
{
    dsk_status status = check_copy(s, src, dst == NULL, bytes);

    return status != DSK_OK || bytes == 0 ? status : s->dev->ops->copy_out(s, dst, src, bytes);
}

dsk_status dsk_mem_set(struct dsk_stream *s, uint64_t dst, uint8_t byte, uint64_t bytes)
{
    dsk_status status = check_copy(s, dst, false, bytes);

    return status != DSK_OK || bytes == 0 ? status : s->dev->ops->mem_set(s, dst, byte, bytes);
}

/* ---- operations -------------------------------------------------------------------------- */

static dsk_status check_stream(const struct dsk_stream *s, struct dsk_err *err)
{
    return s != NULL ? DSK_OK : dsk_fail(err, DSK_E_BAD_ARGUMENT, "stream", 0, "must not be null");
}

dsk_status dsk_append(struct dsk_stream *s, const struct dsk_append_args *args, struct dsk_err *err)
{
    dsk_status status = check_stream(s, err);

    if (status != DSK_OK || (status = dsk_check_append(args, err)) != DSK_OK || args->n_rows == 0)
        return status;
    return s->dev->ops->append(s, args, err);
}

dsk_status dsk_read(struct dsk_stream *s, const struct dsk_read_args *args, struct dsk_err *err)
{
    dsk_status status = check_stream(s, err);

    if (status != DSK_OK || (status = dsk_check_read(args, err)) != DSK_OK || args->n_rows == 0)
        return status;
    return s->dev->ops->read(s, args, err);
}

uint64_t dsk_gather_bytes(const struct dsk_kv_view *kv, int32_t n_rows, int32_t topk)
{
    const struct dsk_layout *layout = kv == NULL ? NULL : dsk_layout_get(kv->layout);

    if (layout == NULL || n_rows < 0 || topk < 0 || kv->n_slots < 0)
        return 0;
    int64_t n_entries = (int64_t)n_rows * topk;
    int64_t n_filled = n_entries < kv->n_slots ? n_entries : kv->n_slots;
    return (uint64_t)n_filled * 2u * (uint64_t)layout->d_qk;
}

dsk_status dsk_gather(struct dsk_stream *s, const struct dsk_gather_args *args, struct dsk_err *err)
{
    dsk_status status = check_stream(s, err);

    if (status != DSK_OK || (status = dsk_check_gather(args, err)) != DSK_OK)
        return status;
    return s->dev->ops->gather(s, args, err);
}

dsk_status dsk_map(struct dsk_stream *s, const struct dsk_map_args *args, struct dsk_err *err)
{
    dsk_status status = check_stream(s, err);

    if (status != DSK_OK || (status = dsk_check_map(args, err)) != DSK_OK || args->n_rows == 0)
        return status;
    return s->dev->ops->map(s, args, err);
}

dsk_status dsk_attend(struct dsk_stream *s, const struct dsk_attend_args *args, struct dsk_err *err)
{
    dsk_status status = check_stream(s, err);

    if (status != DSK_OK || (status = dsk_check_attend(args, err)) != DSK_OK)
        return status;
    return s->dev->ops->attend(s, args, err);
}

dsk_status dsk_merge(struct dsk_stream *s, const struct dsk_merge_args *args, struct dsk_err *err)
{
    dsk_status status = check_stream(s, err);

    if (status != DSK_OK || (status = dsk_check_merge(args, err)) != DSK_OK || args->n_rows == 0)
        return status;
    return s->dev->ops->merge(s, args, err);
}

dsk_status dsk_copy_rows(struct dsk_stream *s, const struct dsk_copy_rows_args *args, struct dsk_err *err)
{
    dsk_status status = check_stream(s, err);

    if (status != DSK_OK || (status = dsk_check_copy_rows(args, err)) != DSK_OK || args->n_rows == 0)
        return status;
    return s->dev->ops->copy_rows(s, args, err);
}

bool dsk_supports(const struct dsk_device *dev, const struct dsk_attend_shape *shape, struct dsk_err *err)
{
    if (dev == NULL) {
        (void)dsk_fail(err, DSK_E_BAD_ARGUMENT, "dev", 0, "must not be null");
        return false;
    }
    if (dsk_check_shape(shape, err) != DSK_OK)
        return false;
    return dev->ops->supports(dev, shape, err);
}
