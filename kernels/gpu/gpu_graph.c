/* gpu_graph.c - recorded launches, one for each full shape key, the least recently used given up for a new one.
 *
 * A recording runs nothing: it holds kernels, grids and the address of the stream's argument block, all functions of
 * the key and the stream; what changes between launches stands in the block. */
#include <string.h>

#include "gpu.h"

static void drop(struct gpu_stream *stream, struct gpu_graph *graph)
{
    const struct gpu_driver *driver = &dsk_gpu_device(&stream->base)->driver;

    if (graph->exec != NULL)
        (void)driver->exec_destroy(driver, graph->exec); /* what still runs of it is kept by the driver */
    graph->exec = NULL;
}

void dsk_gpu_graph_drop(struct gpu_stream *stream)
{
    for (int i = 0; i < GPU_N_GRAPHS; i++)
        drop(stream, &stream->graphs[i]);
}

static dsk_status launch_direct(struct gpu_stream *stream, const struct gpu_attend_plan *plan,
                                struct dsk_err *err)
{
    uint64_t block = stream->block;
    dsk_status status = dsk_gpu_launch(stream, plan->main.function, &plan->main.dims, &block, err);

    if (status == DSK_OK && plan->combine.function >= 0)
        status = dsk_gpu_launch(stream, plan->combine.function, &plan->combine.dims, &block, err);
    return status;
}

/* The place of this key, or the one to give up: a free one, else the one unused for longest. */
static struct gpu_graph *find(struct gpu_stream *stream, const struct gpu_attend_shape *key, bool *is_hit_p)
{
    struct gpu_graph *oldest = &stream->graphs[0];

    for (int i = 0; i < GPU_N_GRAPHS; i++) {
        struct gpu_graph *graph = &stream->graphs[i];

        *is_hit_p = graph->exec != NULL && memcmp(&graph->key, key, sizeof(*key)) == 0;
        if (*is_hit_p)
            return graph;
        if (graph->exec == NULL ? oldest->exec != NULL
                                : oldest->exec != NULL && graph->used_at < oldest->used_at)
            oldest = graph;
    }
    return oldest;
}

static dsk_status record(struct gpu_stream *stream, struct gpu_graph *graph,
                         const struct gpu_attend_shape *key, const struct gpu_attend_plan *plan,
                         struct dsk_err *err)
{
    struct gpu_device *gpu = dsk_gpu_device(&stream->base);
    const struct gpu_driver *driver = &gpu->driver;
    void *recorded = NULL;
    int result;
    dsk_status status =
        dsk_gpu_work(gpu, driver->capture_begin(driver, stream->handle), "capture_begin", err);

    if (status != DSK_OK)
        return status;
    status = launch_direct(stream, plan, err);
    result = driver->capture_end(driver, stream->handle, &recorded);
    if (status == DSK_OK)
        status = dsk_gpu_work(gpu, result, "capture_end", err);
    if (status == DSK_OK)
        status = dsk_gpu_work(gpu, driver->graph_instantiate(driver, recorded, &graph->exec),
                              "graph_instantiate", err);
    if (recorded != NULL)
        (void)driver->graph_destroy(driver, recorded);
    graph->key = *key;
    stream->n_captures++;
    return status;
}

dsk_status dsk_gpu_graph_run(struct gpu_stream *stream, const struct gpu_attend_shape *key,
                             const struct gpu_attend_plan *plan, struct dsk_err *err)
{
    struct gpu_device *gpu = dsk_gpu_device(&stream->base);
    struct gpu_graph *graph;
    bool is_hit;
    dsk_status status = DSK_OK;

    if ((gpu->flags & DSK_DEVICE_NO_GRAPHS) != 0)
        return launch_direct(stream, plan, err);
    graph = find(stream, key, &is_hit);
    if (!is_hit) {
        drop(stream, graph);
        status = record(stream, graph, key, plan, err);
    }
    if (status != DSK_OK)
        return status;
    graph->used_at = ++stream->graph_clock;
    stream->n_replays++;
    return dsk_gpu_work(gpu, gpu->driver.exec_launch(&gpu->driver, graph->exec, stream->handle), "graph",
                        err);
}
