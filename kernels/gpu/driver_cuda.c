/* driver_cuda.c - the table of gpu_driver.h filled from libcuda.so.1. The few types of the driver's interface that
 * are needed are declared here, as its binary interface has them since CUDA 12.1, so no SDK is needed to build. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../dsk.h"
#include "gpu.h"

typedef int cu_result;
typedef unsigned long long cu_address;
typedef unsigned long long cu_handle;

struct cu_uuid {
    uint8_t bytes[16];
};

struct cu_attribute {
    int id;
    uint8_t pad[4];
    union {
        uint8_t bytes[64];
        uint32_t cluster[3];
        int is_dependent;
    } value;
};

struct cu_launch {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    void *stream;
    struct cu_attribute *attributes;
    unsigned n_attributes;
};

struct cu_node {
    void *function;
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    void **params;
    void **extra;
    void *kernel;
    void *context;
};

DSK_STATIC_ASSERT(sizeof(struct cu_node) == 72, "CUDA_KERNEL_NODE_PARAMS_v2");
DSK_STATIC_ASSERT(sizeof(struct cu_attribute) == 72, "CUlaunchAttribute");
DSK_STATIC_ASSERT(sizeof(struct cu_launch) == 56, "CUlaunchConfig");

struct cu_location {
    int type;
    int id;
};

struct cu_allocation {
    int type;
    int handle_types;
    struct cu_location location;
    void *win32;
    uint8_t flags[8];
};

struct cu_access {
    struct cu_location location;
    int flags;
};

DSK_STATIC_ASSERT(sizeof(struct cu_allocation) == 32, "CUmemAllocationProp");
DSK_STATIC_ASSERT(sizeof(struct cu_access) == 12, "CUmemAccessDesc");

#define CU_ATTRIBUTE_CLUSTER   4
#define CU_ATTRIBUTE_DEPENDENT 6

#define CU_DEVICE_WAVE          10
#define CU_DEVICE_UNITS         16
#define CU_DEVICE_CACHE         38
#define CU_DEVICE_ARCH_MAJOR    75
#define CU_DEVICE_ARCH_MINOR    76
#define CU_DEVICE_SHARED_MAX    97
#define CU_FUNCTION_SHARED_MAX  8
#define CU_CONTEXT_SLEEPS       4u /* waiting calls sleep instead of spinning */
#define CU_CONTEXT_MAPS_HOST    8u
#define CU_STREAM_NON_BLOCKING  1u
#define CU_EVENT_SLEEPS         1u
#define CU_EVENT_UNTIMED        2u
#define CU_HOST_PORTABLE        1u
#define CU_HOST_MAPPED          2u
#define CU_HOST_READ_ONLY       8u
#define CU_CAPTURE_THREAD_LOCAL 1
#define CU_ALLOCATION_PINNED    1
#define CU_LOCATION_DEVICE      1
#define CU_HANDLE_FD            1
#define CU_ACCESS_READ_WRITE    3
#define CU_GRANULARITY_LEAST    0

/* name here, exported symbol, parameters */
#define CU_ENTRIES(X)                                                                                        \
    X(init, "cuInit", (unsigned flags))                                                                      \
    X(error_string, "cuGetErrorString", (cu_result result, const char **text_p))                             \
    X(device_count, "cuDeviceGetCount", (int *n_p))                                                          \
    X(device_get, "cuDeviceGet", (int *device_p, int ordinal))                                               \
    X(device_name, "cuDeviceGetName", (char *name, int size, int device))                                    \
    X(device_uuid, "cuDeviceGetUuid_v2", (struct cu_uuid * uuid_p, int device))                              \
    X(device_memory, "cuDeviceTotalMem_v2", (size_t * bytes_p, int device))                                  \
    X(device_attribute, "cuDeviceGetAttribute", (int *value_p, int attribute, int device))                   \
    X(context_create, "cuCtxCreate_v2", (void **context_p, unsigned flags, int device))                      \
    X(context_destroy, "cuCtxDestroy_v2", (void *context))                                                   \
    X(context_bind, "cuCtxSetCurrent", (void *context))                                                      \
    X(mem_alloc, "cuMemAlloc_v2", (cu_address * addr_p, size_t bytes))                                       \
    X(mem_free, "cuMemFree_v2", (cu_address addr))                                                           \
    X(mem_info, "cuMemGetInfo_v2", (size_t * free_p, size_t * total_p))                                      \
    X(host_alloc, "cuMemHostAlloc", (void **host_p, size_t bytes, unsigned flags))                           \
    X(host_free, "cuMemFreeHost", (void *host))                                                              \
    X(host_register, "cuMemHostRegister_v2", (void *host, size_t bytes, unsigned flags))                     \
    X(host_unregister, "cuMemHostUnregister", (void *host))                                                  \
    X(host_address, "cuMemHostGetDevicePointer_v2", (cu_address * addr_p, void *host, unsigned flags))       \
    X(share_unit, "cuMemGetAllocationGranularity",                                                           \
      (size_t * bytes_p, const struct cu_allocation *what, int option))                                      \
    X(share_create, "cuMemCreate",                                                                           \
      (cu_handle * handle_p, size_t bytes, const struct cu_allocation *what, unsigned long long flags))      \
    X(share_release, "cuMemRelease", (cu_handle handle))                                                     \
    X(share_reserve, "cuMemAddressReserve",                                                                  \
      (cu_address * addr_p, size_t bytes, size_t alignment, cu_address addr, unsigned long long flags))      \
    X(share_return, "cuMemAddressFree", (cu_address addr, size_t bytes))                                     \
    X(share_map, "cuMemMap",                                                                                 \
      (cu_address addr, size_t bytes, size_t offset, cu_handle handle, unsigned long long flags))            \
    X(share_unmap, "cuMemUnmap", (cu_address addr, size_t bytes))                                            \
    X(share_permit, "cuMemSetAccess",                                                                        \
      (cu_address addr, size_t bytes, const struct cu_access *access, size_t n))                             \
    X(share_export, "cuMemExportToShareableHandle",                                                          \
      (void *fd_p, cu_handle handle, int type, unsigned long long flags))                                    \
    X(share_import, "cuMemImportFromShareableHandle", (cu_handle * handle_p, void *fd, int type))            \
    X(stream_create, "cuStreamCreate", (void **stream_p, unsigned flags))                                    \
    X(stream_destroy, "cuStreamDestroy_v2", (void *stream))                                                  \
    X(stream_query, "cuStreamQuery", (void *stream))                                                         \
    X(stream_sync, "cuStreamSynchronize", (void *stream))                                                    \
    X(event_create, "cuEventCreate", (void **event_p, unsigned flags))                                       \
    X(event_destroy, "cuEventDestroy_v2", (void *event))                                                     \
    X(event_record, "cuEventRecord", (void *event, void *stream))                                            \
    X(event_query, "cuEventQuery", (void *event))                                                            \
    X(event_sync, "cuEventSynchronize", (void *event))                                                       \
    X(event_elapsed, "cuEventElapsedTime", (float *ms_p, void *start, void *end))                            \
    X(copy_in, "cuMemcpyHtoDAsync_v2", (cu_address dst, const void *src, size_t bytes, void *stream))        \
    X(copy_out, "cuMemcpyDtoHAsync_v2", (void *dst, cu_address src, size_t bytes, void *stream))             \
    X(copy_device, "cuMemcpyDtoDAsync_v2", (cu_address dst, cu_address src, size_t bytes, void *stream))     \
    X(set, "cuMemsetD8Async", (cu_address dst, unsigned char byte, size_t bytes, void *stream))              \
    X(module_load, "cuModuleLoadData", (void **module_p, const void *image))                                 \
    X(module_unload, "cuModuleUnload", (void *module))                                                       \
    X(module_function, "cuModuleGetFunction", (void **function_p, void *module, const char *name))           \
    X(function_set, "cuFuncSetAttribute", (void *function, int attribute, int value))                        \
    X(launch, "cuLaunchKernelEx",                                                                            \
      (const struct cu_launch *config, void *function, void **params, void **extra))                         \
    X(capture_begin, "cuStreamBeginCapture_v2", (void *stream, int mode))                                    \
    X(capture_end, "cuStreamEndCapture", (void *stream, void **graph_p))                                     \
    X(graph_instantiate, "cuGraphInstantiateWithFlags",                                                      \
      (void **exec_p, void *graph, unsigned long long flags))                                                \
    X(graph_destroy, "cuGraphDestroy", (void *graph))                                                        \
    X(graph_roots, "cuGraphGetRootNodes", (void *graph, void **nodes, size_t *n_p))                          \
    X(exec_set_params, "cuGraphExecKernelNodeSetParams_v2",                                                  \
      (void *exec, void *node, const struct cu_node *params))                                                \
    X(exec_launch, "cuGraphLaunch", (void *exec, void *stream))                                              \
    X(exec_destroy, "cuGraphExecDestroy", (void *exec))

struct cu_entries {
#define CU_FIELD(name, symbol, params) cu_result(*name) params;
    CU_ENTRIES(CU_FIELD)
#undef CU_FIELD
};

static const struct cu_entries *cu(const struct gpu_driver *driver)
{
    return driver->entries;
}

/* ---- results ----------------------------------------------------------------------------- */

static enum gpu_class classify(int result)
{
    switch (result) {
    case 0:
        return GPU_OK;
    case 600:
        return GPU_NOT_READY;
    case 2:
        return GPU_NO_MEMORY;
    case 1:   /* invalid value */
    case 101: /* invalid device */
    case 200: /* invalid image */
    case 209: /* no binary for this device */
    case 218: /* invalid PTX */
    case 222: /* PTX newer than the driver */
    case 500: /* not found */
    case 712: /* host memory registered already */
    case 713: /* host memory not registered */
    case 801: /* not supported */
        return GPU_BAD_VALUE;
    default: /* the documented sticky ones, and whatever nobody expected */
        return GPU_LOST;
    }
}

static const char *result_text(const struct gpu_driver *driver, int result)
{
    const char *text = NULL;

    if (cu(driver)->error_string(result, &text) != 0 || text == NULL)
        return "unknown error";
    return text;
}

/* ---- devices ----------------------------------------------------------------------------- */

static int device_count(const struct gpu_driver *driver, int *n_p)
{
    return cu(driver)->device_count(n_p);
}

static int device_props(const struct gpu_driver *driver, int ordinal, struct gpu_props *props_p)
{
    const struct {
        int attribute;
        int32_t *value_p;
    } attributes[] = {
        {CU_DEVICE_ARCH_MAJOR, &props_p->arch_major}, {CU_DEVICE_ARCH_MINOR, &props_p->arch_minor},
        {CU_DEVICE_UNITS, &props_p->n_units},         {CU_DEVICE_WAVE, &props_p->wave},
        {CU_DEVICE_CACHE, &props_p->cache_bytes},     {CU_DEVICE_SHARED_MAX, &props_p->shared_bytes_max}};
    struct cu_uuid uuid;
    size_t bytes;
    int device, result;

    memset(props_p, 0, sizeof(*props_p));
    if ((result = cu(driver)->device_get(&device, ordinal)) != 0
        || (result = cu(driver)->device_name(props_p->name, (int)sizeof(props_p->name), device)) != 0
        || (result = cu(driver)->device_uuid(&uuid, device)) != 0
        || (result = cu(driver)->device_memory(&bytes, device)) != 0)
        return result;
    for (size_t i = 0; i < sizeof(attributes) / sizeof(attributes[0]); i++) {
        result = cu(driver)->device_attribute(attributes[i].value_p, attributes[i].attribute, device);
        if (result != 0)
            return result;
    }
    memcpy(props_p->uuid, uuid.bytes, sizeof(props_p->uuid));
    props_p->memory_bytes = bytes;
    snprintf(props_p->arch, sizeof(props_p->arch), "sm_%d%d", props_p->arch_major % 100,
             props_p->arch_minor % 100);
    return 0;
}

/* A context of our own and not the shared one: after a sticky error it can be destroyed and another made. */
static int context_create(const struct gpu_driver *driver, int ordinal, void **context_p)
{
    int device, result = cu(driver)->device_get(&device, ordinal);

    if (result != 0)
        return result;
    return cu(driver)->context_create(context_p, CU_CONTEXT_SLEEPS | CU_CONTEXT_MAPS_HOST, device);
}

static void context_destroy(const struct gpu_driver *driver, void *context)
{
    (void)cu(driver)->context_destroy(context); /* after a sticky error it reports that error and destroys */
}

static int context_bind(const struct gpu_driver *driver, void *context)
{
    return cu(driver)->context_bind(context);
}

/* ---- memory ------------------------------------------------------------------------------ */

static int mem_alloc(const struct gpu_driver *driver, uint64_t bytes, uint64_t *addr_p)
{
    cu_address addr = 0;
    int result = cu(driver)->mem_alloc(&addr, bytes);

    if (result == 0)
        *addr_p = addr;
    return result;
}

static int mem_free(const struct gpu_driver *driver, uint64_t addr)
{
    return cu(driver)->mem_free(addr);
}

static int mem_info(const struct gpu_driver *driver, uint64_t *free_p, uint64_t *total_p)
{
    size_t n_free = 0, n_total = 0;
    int result = cu(driver)->mem_info(&n_free, &n_total);

    *free_p = n_free;
    *total_p = n_total;
    return result;
}

static int host_alloc(const struct gpu_driver *driver, uint64_t bytes, void **host_p)
{
    return cu(driver)->host_alloc(host_p, bytes, CU_HOST_PORTABLE | CU_HOST_MAPPED);
}

static int host_free(const struct gpu_driver *driver, void *host)
{
    return cu(driver)->host_free(host);
}

/* Memory that this process may only read (a client's sealed file) registers with the read-only flag alone. */
static int host_register(const struct gpu_driver *driver, void *host, uint64_t bytes, uint64_t *addr_p)
{
    const unsigned flags = CU_HOST_PORTABLE | CU_HOST_MAPPED;
    cu_address addr = 0;
    int result = cu(driver)->host_register(host, bytes, flags);

    if (classify(result) == GPU_BAD_VALUE)
        result = cu(driver)->host_register(host, bytes, flags | CU_HOST_READ_ONLY);
    if (result != 0)
        return result;
    result = cu(driver)->host_address(&addr, host, 0);
    if (result != 0) {
        (void)cu(driver)->host_unregister(host);
        return result;
    }
    *addr_p = addr;
    return 0;
}

static int host_unregister(const struct gpu_driver *driver, void *host)
{
    return cu(driver)->host_unregister(host);
}

/* ---- memory between processes -------------------------------------------------------------- */

static struct cu_allocation shared_memory(int ordinal)
{
    const struct cu_allocation what = {.type = CU_ALLOCATION_PINNED,
                                       .handle_types = CU_HANDLE_FD,
                                       .location = {CU_LOCATION_DEVICE, ordinal}};

    return what;
}

/* Gives the memory an address. On failure the handle is let go too. */
static int share_map(const struct gpu_driver *driver, int ordinal, cu_handle handle, uint64_t bytes,
                     struct gpu_share *share_p)
{
    const struct cu_access access = {{CU_LOCATION_DEVICE, ordinal}, CU_ACCESS_READ_WRITE};
    cu_address addr = 0;
    bool is_mapped = false;
    int result = cu(driver)->share_reserve(&addr, bytes, 0, 0, 0);

    if (result == 0) {
        result = cu(driver)->share_map(addr, bytes, 0, handle, 0);
        is_mapped = result == 0;
    }
    if (result == 0)
        result = cu(driver)->share_permit(addr, bytes, &access, 1);
    if (result == 0) {
        *share_p = (struct gpu_share){addr, bytes, (void *)(uintptr_t)handle};
        return 0;
    }
    if (is_mapped)
        (void)cu(driver)->share_unmap(addr, bytes);
    if (addr != 0)
        (void)cu(driver)->share_return(addr, bytes);
    (void)cu(driver)->share_release(handle);
    return result;
}

static int share_alloc(const struct gpu_driver *driver, int ordinal, uint64_t bytes,
                       struct gpu_share *share_p)
{
    const struct cu_allocation what = shared_memory(ordinal);
    size_t unit = 1;
    cu_handle handle = 0;
    int result = cu(driver)->share_unit(&unit, &what, CU_GRANULARITY_LEAST);

    if (result == 0 && bytes > UINT64_MAX - unit)
        return 2;
    bytes = dsk_gpu_round_up(bytes, unit);
    if (result == 0)
        result = cu(driver)->share_create(&handle, bytes, &what, 0);
    return result != 0 ? result : share_map(driver, ordinal, handle, bytes, share_p);
}

static int share_export(const struct gpu_driver *driver, const struct gpu_share *share, int *fd_p)
{
    return cu(driver)->share_export(fd_p, (uintptr_t)share->handle, CU_HANDLE_FD, 0);
}

/* More bytes than the memory has: the driver refuses to map them. */
static int share_import(const struct gpu_driver *driver, int ordinal, int fd, uint64_t bytes,
                        struct gpu_share *share_p)
{
    cu_handle handle = 0;
    int result = cu(driver)->share_import(&handle, (void *)(intptr_t)fd, CU_HANDLE_FD);

    return result != 0 ? result : share_map(driver, ordinal, handle, bytes, share_p);
}

static int share_free(const struct gpu_driver *driver, const struct gpu_share *share)
{
    int result = cu(driver)->share_unmap(share->addr, share->bytes);

    (void)cu(driver)->share_return(share->addr, share->bytes);
    (void)cu(driver)->share_release((uintptr_t)share->handle);
    return result;
}

/* ---- streams and events ------------------------------------------------------------------ */

static int stream_create(const struct gpu_driver *driver, void **stream_p)
{
    return cu(driver)->stream_create(stream_p, CU_STREAM_NON_BLOCKING);
}

static int stream_destroy(const struct gpu_driver *driver, void *stream)
{
    return cu(driver)->stream_destroy(stream);
}

static int stream_query(const struct gpu_driver *driver, void *stream)
{
    return cu(driver)->stream_query(stream);
}

static int stream_sync(const struct gpu_driver *driver, void *stream)
{
    return cu(driver)->stream_sync(stream);
}

static int event_create(const struct gpu_driver *driver, bool is_timed, void **event_p)
{
    return cu(driver)->event_create(event_p, is_timed ? CU_EVENT_SLEEPS : CU_EVENT_SLEEPS | CU_EVENT_UNTIMED);
}

static int event_destroy(const struct gpu_driver *driver, void *event)
{
    return cu(driver)->event_destroy(event);
}

static int event_record(const struct gpu_driver *driver, void *event, void *stream)
{
    return cu(driver)->event_record(event, stream);
}

static int event_query(const struct gpu_driver *driver, void *event)
{
    return cu(driver)->event_query(event);
}

static int event_sync(const struct gpu_driver *driver, void *event)
{
    return cu(driver)->event_sync(event);
}

static int event_elapsed(const struct gpu_driver *driver, void *start, void *end, float *ms_p)
{
    return cu(driver)->event_elapsed(ms_p, start, end);
}

/* ---- copies ------------------------------------------------------------------------------ */

static int copy_in(const struct gpu_driver *driver, uint64_t dst, const void *src, uint64_t bytes,
                   void *stream)
{
    return cu(driver)->copy_in(dst, src, bytes, stream);
}

static int copy_out(const struct gpu_driver *driver, void *dst, uint64_t src, uint64_t bytes, void *stream)
{
    return cu(driver)->copy_out(dst, src, bytes, stream);
}

static int copy_device(const struct gpu_driver *driver, uint64_t dst, uint64_t src, uint64_t bytes,
                       void *stream)
{
    return cu(driver)->copy_device(dst, src, bytes, stream);
}

static int set_bytes(const struct gpu_driver *driver, uint64_t dst, uint8_t byte, uint64_t bytes,
                     void *stream)
{
    return cu(driver)->set(dst, byte, bytes, stream);
}

/* ---- code and graphs --------------------------------------------------------------------- */

static int module_load(const struct gpu_driver *driver, const void *image, void **module_p)
{
    return cu(driver)->module_load(module_p, image);
}

static int module_unload(const struct gpu_driver *driver, void *module)
{
    return cu(driver)->module_unload(module);
}

static int module_function(const struct gpu_driver *driver, void *module, const char *name, void **function_p)
{
    return cu(driver)->module_function(function_p, module, name);
}

static int function_set_shared(const struct gpu_driver *driver, void *function, uint32_t bytes)
{
    return cu(driver)->function_set(function, CU_FUNCTION_SHARED_MAX, (int)bytes);
}

static int launch(const struct gpu_driver *driver, void *function, const struct gpu_launch_dims *dims,
                  void *stream, void **params)
{
    struct cu_attribute attributes[2];
    struct cu_launch config = {.grid = {dims->grid[0], dims->grid[1], dims->grid[2]},
                               .block = {dims->block, 1, 1},
                               .shared_bytes = dims->shared_bytes,
                               .stream = stream,
                               .attributes = attributes};

    memset(attributes, 0, sizeof(attributes));
    if (dims->is_dependent) {
        attributes[config.n_attributes].id = CU_ATTRIBUTE_DEPENDENT;
        attributes[config.n_attributes++].value.is_dependent = 1;
    }
    if (dims->cluster > 1) {
        attributes[config.n_attributes].id = CU_ATTRIBUTE_CLUSTER;
        attributes[config.n_attributes].value.cluster[0] = dims->cluster;
        attributes[config.n_attributes].value.cluster[1] = 1;
        attributes[config.n_attributes++].value.cluster[2] = 1;
    }
    return cu(driver)->launch(&config, function, params, NULL);
}

static int capture_begin(const struct gpu_driver *driver, void *stream)
{
    return cu(driver)->capture_begin(stream, CU_CAPTURE_THREAD_LOCAL);
}

static int capture_end(const struct gpu_driver *driver, void *stream, void **graph_p)
{
    *graph_p = NULL;
    return cu(driver)->capture_end(stream, graph_p);
}

static int graph_instantiate(const struct gpu_driver *driver, void *graph, void **exec_p)
{
    return cu(driver)->graph_instantiate(exec_p, graph, 0);
}

static int graph_root(const struct gpu_driver *driver, void *graph, void **node_p)
{
    size_t n = 1;

    *node_p = NULL;
    return cu(driver)->graph_roots(graph, node_p, &n);
}

static int exec_set_params(const struct gpu_driver *driver, void *exec, void *node, void *function,
                           const struct gpu_launch_dims *dims, void **params)
{
    const struct cu_node config = {.function = function,
                                   .grid = {dims->grid[0], dims->grid[1], dims->grid[2]},
                                   .block = {dims->block, 1, 1},
                                   .shared_bytes = dims->shared_bytes,
                                   .params = params};

    return cu(driver)->exec_set_params(exec, node, &config);
}

static int graph_destroy(const struct gpu_driver *driver, void *graph)
{
    return cu(driver)->graph_destroy(graph);
}

static int exec_launch(const struct gpu_driver *driver, void *exec, void *stream)
{
    return cu(driver)->exec_launch(exec, stream);
}

static int exec_destroy(const struct gpu_driver *driver, void *exec)
{
    return cu(driver)->exec_destroy(exec);
}

/* ---- loading ----------------------------------------------------------------------------- */

static void unload(struct gpu_driver *driver)
{
    free(driver->entries);
    if (driver->library != NULL)
        dlclose(driver->library);
    driver->entries = NULL;
    driver->library = NULL;
}

/* NULL, or the first symbol that the library lacks. */
static const char *find_entries(void *library, struct cu_entries *entries)
{
#define CU_FIND(name, symbol, params)                                                                        \
    *(void **)&entries->name = dlsym(library, symbol); /* as POSIX has it */                                 \
    if (*(void **)&entries->name == NULL)                                                                    \
        return symbol;
    CU_ENTRIES(CU_FIND)
#undef CU_FIND
    return NULL;
}

static const struct gpu_driver TABLE = {
    .library_name = "libcuda.so.1",
    .kind = DSK_DEVICE_CUDA,
    .unload = unload,
    .classify = classify,
    .text = result_text,
    .device_count = device_count,
    .device_props = device_props,
    .context_create = context_create,
    .context_destroy = context_destroy,
    .bind = context_bind,
    .mem_alloc = mem_alloc,
    .mem_free = mem_free,
    .mem_info = mem_info,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .host_register = host_register,
    .host_unregister = host_unregister,
    .share_alloc = share_alloc,
    .share_export = share_export,
    .share_import = share_import,
    .share_free = share_free,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_query = stream_query,
    .stream_sync = stream_sync,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_query = event_query,
    .event_sync = event_sync,
    .event_elapsed = event_elapsed,
    .copy_in = copy_in,
    .copy_out = copy_out,
    .copy_device = copy_device,
    .set = set_bytes,
    .module_load = module_load,
    .module_unload = module_unload,
    .module_function = module_function,
    .function_set_shared = function_set_shared,
    .launch = launch,
    .capture_begin = capture_begin,
    .capture_end = capture_end,
    .graph_instantiate = graph_instantiate,
    .graph_root = graph_root,
    .graph_destroy = graph_destroy,
    .exec_set_params = exec_set_params,
    .exec_launch = exec_launch,
    .exec_destroy = exec_destroy,
};

dsk_status dsk_gpu_load_cuda(struct gpu_driver *driver, struct dsk_err *err)
{
    const char *missing;
    int result;

    *driver = TABLE;
    driver->library = dlopen(driver->library_name, RTLD_NOW | RTLD_LOCAL);
    if (driver->library == NULL)
        return dsk_fail(err, DSK_E_NO_DEVICE, "kind", driver->kind, "no NVIDIA driver: %s", dlerror());
    driver->entries = calloc(1, sizeof(struct cu_entries));
    if (driver->entries == NULL) {
        unload(driver);
        return dsk_fail(err, DSK_E_NO_MEMORY, "kind", DSK_DEVICE_CUDA, "no memory for the driver's table");
    }
    missing = find_entries(driver->library, driver->entries);
    if (missing != NULL) {
        unload(driver);
        return dsk_fail(err, DSK_E_NO_DEVICE, "kind", DSK_DEVICE_CUDA,
                        "the NVIDIA driver is too old: it lacks %s (CUDA 12.1 or newer is needed)", missing);
    }
    result = cu(driver)->init(0);
    if (result != 0) {
        (void)dsk_fail(err, DSK_E_NO_DEVICE, "kind", DSK_DEVICE_CUDA, "the NVIDIA driver does not start: %s",
                       result_text(driver, result));
        unload(driver);
        return DSK_E_NO_DEVICE;
    }
    return DSK_OK;
}
