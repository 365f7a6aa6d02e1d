/* gpu_graph.c - recorded launches, one for each full shape key, the least recently used given up for a new one.
 *
 * A recording runs nothing: it holds kernels, grids and the address of the stream's argument block, all functions of
 * the key and the stream; what changes between launches stands in the block. The block comes as the parameters
 * of a first node, which are set before each launch; a copy in front of the graph takes some microseconds longer, which only
 * launches of more rows than parameters hold have time for. */
#include <string.h>

#include "gpu.h"

static void drop(struct gpu_stream *stream, struct gpu_graph *graph)
{
    const struct gpu_driver *driver = &dsk_gpu_device(&stream->base)->driver;

    if (graph->exec != NULL)
        (void)driver->exec_destroy(driver, graph->exec); /* what still runs of it is kept by the driver */
    if (graph->graph != NULL)
        (void)driver->graph_destroy(driver, graph->graph);
    memset(graph, 0, sizeof(*graph));
}

void dsk_gpu_graph_drop(struct gpu_stream *stream)
{
    for (int i = 0; i < GPU_N_GRAPHS; i++)
        drop(stream, &stream->graphs[i]);
}

void dsk_gpu_graph_counts(const struct dsk_stream *base, uint64_t *n_hits_p, uint64_t *n_misses_p)
{
    const struct gpu_stream *stream = (const struct gpu_stream *)base;

    *n_misses_p = stream->n_captures;
    *n_hits_p = stream->n_replays > stream->n_captures ? stream->n_replays - stream->n_captures : 0;
}

static const struct gpu_launch_dims UPLOAD_DIMS = {.grid = {1, 1, 1}, .block = GPU_UPLOAD_BLOCK};

/* The upload kernel with the least parameters that hold n rows. */
static int32_t upload_of(int32_t n)
{
    return n <= 36 ? GPU_FN_UPLOAD_36 : n <= 144 ? GPU_FN_UPLOAD_144 : GPU_FN_UPLOAD_288;
}

static dsk_status launch_direct(struct gpu_stream *stream, const struct gpu_attend_plan *plan,
                                struct gpu_upload_args *upload, struct dsk_err *err)
{
    uint64_t block = stream->block;
    dsk_status status = DSK_OK;

    if (upload != NULL)
        status = dsk_gpu_launch(stream, upload_of(upload->n_rows), &UPLOAD_DIMS, upload, err);
    if (status == DSK_OK)
        status = dsk_gpu_launch(stream, plan->main.function, &plan->main.dims, &block, err);
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
                         const struct gpu_attend_plan *plan, struct gpu_upload_args *upload,
                         struct dsk_err *err)
{
    struct gpu_device *gpu = dsk_gpu_device(&stream->base);
    const struct gpu_driver *driver = &gpu->driver;
    int result;
    dsk_status status =
        dsk_gpu_work(gpu, driver->capture_begin(driver, stream->handle), "capture_begin", err);

    if (status != DSK_OK)
        return status;
    status = launch_direct(stream, plan, upload, err);
    result = driver->capture_end(driver, stream->handle, &graph->graph);
    if (status == DSK_OK && result == 0 && upload != NULL)
        result = driver->graph_root(driver, graph->graph, &graph->upload);
    if (status == DSK_OK && result == 0)
        result = driver->graph_instantiate(driver, graph->graph, &graph->exec);
    if (status == DSK_OK)
        status = dsk_gpu_work(gpu, result, "capture", err);
    stream->n_captures++;
    return status;
}

static dsk_status replay(struct gpu_stream *stream, struct gpu_graph *graph, struct gpu_upload_args *upload,
                         struct dsk_err *err)
{
    struct gpu_device *gpu = dsk_gpu_device(&stream->base);
    void *params[1] = {upload};
    int result = 0;

    if (graph->upload != NULL)
        result = gpu->driver.exec_set_params(&gpu->driver, graph->exec, graph->upload,
                                             gpu->functions[upload_of(upload->n_rows)], &UPLOAD_DIMS, params);
    if (result == 0)
        result = gpu->driver.exec_launch(&gpu->driver, graph->exec, stream->handle);
    stream->n_replays++;
    return dsk_gpu_work(gpu, result, "graph", err);
}

dsk_status dsk_gpu_graph_run(struct gpu_stream *stream, const struct gpu_attend_shape *key,
                             const struct gpu_attend_plan *plan, struct gpu_upload_args *upload,
                             struct dsk_err *err)
{
    struct gpu_graph *graph;
    bool is_hit;
    dsk_status status = DSK_OK;

    if ((dsk_gpu_device(&stream->base)->flags & DSK_DEVICE_NO_GRAPHS) != 0)
        return launch_direct(stream, plan, upload, err);
    graph = find(stream, key, &is_hit);
    if (!is_hit) {
        drop(stream, graph);
        graph->key = *key;
        status = record(stream, graph, plan, upload, err);
    }
    if (status != DSK_OK)
        return status;
    graph->used_at = ++stream->graph_clock;
    return replay(stream, graph, upload, err);
}
