/* gpu_stream.c - streams with their scratch and pinned ring, events, copies, and the launch of one kernel. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpu.h"

#define SPIN_NS 50000 /* a sync looks this long before it sleeps: waking up costs about as much */

/* ---- ring -------------------------------------------------------------------------------- */

static dsk_status ring_init(struct gpu_device *gpu, struct gpu_ring *ring)
{
    const struct gpu_driver *driver = &gpu->driver;
    void *host = NULL;
    int result = driver->host_alloc(driver, GPU_RING_SEGMENTS * GPU_RING_SEGMENT_BYTES, &host);

    ring->host = host;
    for (int i = 0; i < GPU_RING_SEGMENTS && result == 0; i++)
        result = driver->event_create(driver, false, &ring->events[i]);
    return dsk_gpu_status(gpu, result, "ring");
}

static void ring_fini(struct gpu_device *gpu, struct gpu_ring *ring)
{
    const struct gpu_driver *driver = &gpu->driver;

    for (int i = 0; i < GPU_RING_SEGMENTS; i++) {
        if (ring->events[i] != NULL)
            (void)driver->event_destroy(driver, ring->events[i]);
    }
    if (ring->host != NULL)
        (void)driver->host_free(driver, ring->host);
}

/* The event of a segment is recorded when the ring leaves it: by then everything that reads it has been issued. */
dsk_status dsk_gpu_ring_take(struct gpu_stream *stream, uint64_t bytes, void **host_p)
{
    struct gpu_device *gpu = dsk_gpu_device(&stream->base);
    const struct gpu_driver *driver = &gpu->driver;
    struct gpu_ring *ring = &stream->ring;
    int result = 0;

    if (ring->used + bytes > GPU_RING_SEGMENT_BYTES) {
        result = driver->event_record(driver, ring->events[ring->segment], stream->handle);
        ring->is_recorded[ring->segment] = true;
        ring->segment = (ring->segment + 1) % GPU_RING_SEGMENTS;
        ring->used = 0;
        if (result == 0 && ring->is_recorded[ring->segment])
            result = driver->event_sync(driver, ring->events[ring->segment]);
    }
    *host_p = ring->host + (uint64_t)ring->segment * GPU_RING_SEGMENT_BYTES + ring->used;
    ring->used += dsk_gpu_round_up(bytes, 64);
    return dsk_gpu_work(gpu, result, "ring", NULL);
}

/* ---- streams ----------------------------------------------------------------------------- */

#define SLOT_TABLE_BYTES (2 * sizeof(uint64_t) * GPU_LAUNCH_SLOTS)

static dsk_status take_memory(struct gpu_device *gpu, struct gpu_stream *stream)
{
    const uint64_t block_bytes =
        dsk_gpu_round_up(GPU_BLOCK_BYTES + GPU_LAUNCH_ROWS * sizeof(struct dsk_attend_row), 256);
    const uint64_t slot_bytes = GPU_LAUNCH_SLOTS * sizeof(int32_t);
    dsk_status status = dsk_gpu_status(
        gpu,
        gpu->driver.mem_alloc(&gpu->driver, block_bytes + slot_bytes + 256 + GPU_PART_BYTES, &stream->memory),
        "stream memory");

    if (status != DSK_OK)
        return status;
    stream->block = stream->memory;
    stream->slots = stream->block + block_bytes;
    stream->flag = stream->slots + slot_bytes;
    stream->parts = stream->flag + 256;
    stream->slot_table = malloc(SLOT_TABLE_BYTES);
    return stream->slot_table == NULL ? DSK_E_NO_MEMORY : ring_init(gpu, &stream->ring);
}

dsk_status dsk_gpu_stream_create(struct dsk_device *dev, struct dsk_stream **stream_p)
{
    struct gpu_device *gpu = (struct gpu_device *)dev;
    struct gpu_stream *stream;
    dsk_status status = dsk_gpu_enter(gpu);

    if (status != DSK_OK)
        return status;
    stream = calloc(1, sizeof(*stream));
    if (stream == NULL)
        return DSK_E_NO_MEMORY;
    stream->base.dev = dev;
    status = dsk_gpu_status(gpu, gpu->driver.stream_create(&gpu->driver, &stream->handle), "stream_create");
    if (status == DSK_OK)
        status = take_memory(gpu, stream);
    if (status != DSK_OK) {
        dsk_gpu_stream_destroy(&stream->base); /* what is not there yet is 0 */
        return status;
    }
    *stream_p = &stream->base;
    return DSK_OK;
}

void dsk_gpu_stream_destroy(struct dsk_stream *s)
{
    struct gpu_device *gpu = dsk_gpu_device(s);
    struct gpu_stream *stream = dsk_gpu_stream(s);
    const struct gpu_driver *driver = &gpu->driver;

    if (dsk_gpu_enter(gpu) == DSK_OK) { /* the rest of a lost device goes with its context */
        if (stream->handle != NULL)
            (void)driver->stream_sync(driver, stream->handle);
        dsk_gpu_graph_drop(stream);
        ring_fini(gpu, &stream->ring);
        if (stream->memory != 0)
            (void)driver->mem_free(driver, stream->memory);
        if (stream->handle != NULL)
            (void)driver->stream_destroy(driver, stream->handle);
    }
    free(stream->slot_table);
    free(stream);
}

static int64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

dsk_status dsk_gpu_stream_sync(struct dsk_stream *s)
{
    struct gpu_device *gpu = dsk_gpu_device(s);
    const struct gpu_driver *driver = &gpu->driver;
    void *handle = dsk_gpu_stream(s)->handle;
    dsk_status status = dsk_gpu_enter(gpu);
    int64_t end;
    int result;

    if (status != DSK_OK)
        return status;
    end = now_ns() + SPIN_NS;
    do
        result = driver->stream_query(driver, handle);
    while (driver->classify(result) == GPU_NOT_READY && now_ns() < end);
    if (driver->classify(result) == GPU_NOT_READY)
        result = driver->stream_sync(driver, handle);
    return dsk_gpu_work(gpu, result, "stream_sync", NULL);
}

/* ---- events ------------------------------------------------------------------------------ */

static dsk_status create_event(struct dsk_device *dev, bool is_timed, struct dsk_event **event_p)
{
    struct gpu_device *gpu = (struct gpu_device *)dev;
    struct gpu_event *event;
    dsk_status status = dsk_gpu_enter(gpu);

    if (status != DSK_OK)
        return status;
    event = calloc(1, sizeof(*event));
    if (event == NULL)
        return DSK_E_NO_MEMORY;
    event->base.dev = dev;
    status =
        dsk_gpu_status(gpu, gpu->driver.event_create(&gpu->driver, is_timed, &event->handle), "event_create");
    if (status != DSK_OK) {
        free(event);
        return status;
    }
    *event_p = &event->base;
    return DSK_OK;
}

dsk_status dsk_gpu_event_create(struct dsk_device *dev, struct dsk_event **event_p)
{
    return create_event(dev, false, event_p);
}

dsk_status dsk_gpu_event_create_timed(struct dsk_device *dev, struct dsk_event **event_p)
{
    return create_event(dev, true, event_p);
}

void dsk_gpu_event_destroy(struct dsk_event *event)
{
    struct gpu_device *gpu = (struct gpu_device *)event->dev;

    if (dsk_gpu_enter(gpu) == DSK_OK)
        (void)gpu->driver.event_destroy(&gpu->driver, ((struct gpu_event *)event)->handle);
    free(event);
}

dsk_status dsk_gpu_event_record(struct dsk_event *event, struct dsk_stream *s)
{
    struct gpu_device *gpu = dsk_gpu_device(s);
    struct gpu_event *e = (struct gpu_event *)event;
    dsk_status status = dsk_gpu_enter(gpu);

    if (status != DSK_OK)
        return status;
    e->is_recorded = true;
    return dsk_gpu_work(gpu, gpu->driver.event_record(&gpu->driver, e->handle, dsk_gpu_stream(s)->handle),
                        "event_record", NULL);
}

/* On a lost device nothing will run any more, so every event counts as done. */
dsk_status dsk_gpu_event_is_done(struct dsk_event *event, bool *done_p)
{
    struct gpu_device *gpu = (struct gpu_device *)event->dev;
    dsk_status status = dsk_gpu_enter(gpu);
    int result;

    *done_p = true;
    if (status != DSK_OK)
        return status;
    result = gpu->driver.event_query(&gpu->driver, ((struct gpu_event *)event)->handle);
    if (gpu->driver.classify(result) == GPU_NOT_READY) {
        *done_p = false;
        return DSK_OK;
    }
    return dsk_gpu_work(gpu, result, "event_query", NULL);
}

dsk_status dsk_gpu_event_elapsed_us(struct dsk_event *start, struct dsk_event *end, double *us_p)
{
    struct gpu_device *gpu = (struct gpu_device *)start->dev;
    dsk_status status = dsk_gpu_enter(gpu);
    float ms = 0;

    if (status != DSK_OK)
        return status;
    status = dsk_gpu_status(gpu,
                            gpu->driver.event_elapsed(&gpu->driver, ((struct gpu_event *)start)->handle,
                                                      ((struct gpu_event *)end)->handle, &ms),
                            "event_elapsed");
    *us_p = (double)ms * 1000;
    return status;
}

/* ---- copies ------------------------------------------------------------------------------ */

dsk_status dsk_gpu_copy_in(struct dsk_stream *s, uint64_t dst, const void *src, uint64_t bytes)
{
    struct gpu_device *gpu = dsk_gpu_device(s);
    dsk_status status = dsk_gpu_enter(gpu);

    if (status != DSK_OK)
        return status;
    return dsk_gpu_work(gpu, gpu->driver.copy_in(&gpu->driver, dst, src, bytes, dsk_gpu_stream(s)->handle),
                        "copy_in", NULL);
}

dsk_status dsk_gpu_copy_out(struct dsk_stream *s, void *dst, uint64_t src, uint64_t bytes)
{
    struct gpu_device *gpu = dsk_gpu_device(s);
    dsk_status status = dsk_gpu_enter(gpu);

    if (status != DSK_OK)
        return status;
    return dsk_gpu_work(gpu, gpu->driver.copy_out(&gpu->driver, dst, src, bytes, dsk_gpu_stream(s)->handle),
                        "copy_out", NULL);
}

dsk_status dsk_gpu_copy_device(struct dsk_stream *s, uint64_t dst, uint64_t src, uint64_t bytes)
{
    struct gpu_device *gpu = dsk_gpu_device(s);
    dsk_status status = dsk_gpu_enter(gpu);

    if (status != DSK_OK)
        return status;
    return dsk_gpu_work(gpu,
                        gpu->driver.copy_device(&gpu->driver, dst, src, bytes, dsk_gpu_stream(s)->handle),
                        "copy_device", NULL);
}

dsk_status dsk_gpu_mem_set(struct dsk_stream *s, uint64_t dst, uint8_t byte, uint64_t bytes)
{
    struct gpu_device *gpu = dsk_gpu_device(s);
    dsk_status status = dsk_gpu_enter(gpu);

    if (status != DSK_OK)
        return status;
    return dsk_gpu_work(gpu, gpu->driver.set(&gpu->driver, dst, byte, bytes, dsk_gpu_stream(s)->handle),
                        "mem_set", NULL);
}

/* ---- launch ------------------------------------------------------------------------------ */

dsk_status dsk_gpu_launch(struct gpu_stream *stream, int32_t function, const struct gpu_launch_dims *dims,
                          void *params, struct dsk_err *err)
{
    struct gpu_device *gpu = dsk_gpu_device(&stream->base);
    void *list[1] = {params};

    return dsk_gpu_work(gpu,
                        gpu->driver.launch(&gpu->driver, gpu->functions[function], dims, stream->handle,
                                           params == NULL ? NULL : list),
                        gpu->code->kernels[function].name, err);
}

dsk_status dsk_gpu_inject_fault(struct dsk_stream *s)
{
    const struct gpu_launch_dims dims = {.grid = {1, 1, 1}, .block = 1};
    dsk_status status = dsk_gpu_enter(dsk_gpu_device(s));

    return status != DSK_OK ? status : dsk_gpu_launch(dsk_gpu_stream(s), GPU_FN_FAULT, &dims, NULL, NULL);
}

dsk_status dsk_gpu_peak(struct dsk_stream *s, uint64_t sink, int32_t n_steps, double *flop_p)
{
    const struct gpu_device *gpu = dsk_gpu_device(s);
    const struct gpu_launch_dims dims = {
        .grid = {(uint32_t)gpu->props.n_units, 1, 1},
        .block = GPU_PEAK_BLOCK,
        /* only the kernel for sm_90a works from shared memory */
        .shared_bytes = gpu->props.shared_bytes_max >= GPU_PEAK_SHARED ? GPU_PEAK_SHARED : 0};
    struct gpu_peak_args args = {.sink = sink, .n_steps = n_steps};
    dsk_status status = dsk_gpu_enter(dsk_gpu_device(s));

    if (status == DSK_OK && gpu->functions[GPU_FN_PEAK] == NULL)
        return DSK_E_UNSUPPORTED;
    *flop_p = GPU_PEAK_FLOP * n_steps * gpu->props.n_units;
    return status != DSK_OK ? status : dsk_gpu_launch(dsk_gpu_stream(s), GPU_FN_PEAK, &dims, &args, NULL);
}
