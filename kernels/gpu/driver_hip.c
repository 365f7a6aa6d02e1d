/* driver_hip.c - the table of gpu_driver.h filled from libamdhip64 (ROCm's HIP runtime, .so.7, .so.6 or .so.5). The few
 * types of its interface that are needed are declared here, as hip_runtime_api.h of the named releases has them, so no
 * SDK is needed to build.
 *
 * Two properties structures are in use: hipDeviceProp_tR0600, whose function has a name of its own in every library
 * since release 6, and the one before it, which libraries of release 5 have under the plain name. Later libraries keep
 * the plain name for programs of release 5, so it is asked for last.
 *
 * HIP has one context per device and process. A context here is the device's ordinal: bind makes that device current,
 * and nothing goes with it when it is destroyed; memory that a lost device holds stays until the process ends. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../dsk.h"
#include "gpu.h"

typedef int hip_result;

/* Where the fields lie that are read: uuid, totalGlobalMem, sharedMemPerBlock, warpSize, multiProcessorCount, l2CacheSize,
 * gcnArchName. */
struct hip_props_place {
    size_t uuid; /* 0: it has none */
    size_t memory, shared, wave, units, cache, arch;
};
static const struct hip_props_place PROPS_R0600 = {0x100, 0x120, 0x128, 0x134,
                                                   0x184, 0x268, 0x488}; /* ROCm 6.0 */
static const struct hip_props_place PROPS_R0000 = {0,     0x100, 0x108, 0x114,
                                                   0x150, 0x154, 0x18c}; /* ROCm 5.2 */

#define HIP_PROPS_BYTES 4096 /* room for what a later library may add */
#define HIP_ARCH_BYTES  256

struct hip_node { /* hipKernelNodeParams, ROCm 5.2 and later */
    uint32_t block[3];
    void **extra;
    void *function;
    uint32_t grid[3];
    void **params;
    uint32_t shared_bytes;
};
DSK_STATIC_ASSERT(sizeof(struct hip_node) == 64, "hipKernelNodeParams");
DSK_STATIC_ASSERT(offsetof(struct hip_node, params) == 48, "hipKernelNodeParams");

/* hipExternalMemoryHandleDesc and hipExternalMemoryBufferDesc. ROCm 5 has them without what is reserved. */
struct hip_external {
    int type;
    union {
        int fd;
        void *win32[2];
    } handle;
    unsigned long long bytes;
    unsigned flags;
    unsigned reserved[16];
};
struct hip_external_range {
    unsigned long long offset;
    unsigned long long bytes;
    unsigned flags;
    unsigned reserved[16];
};
DSK_STATIC_ASSERT(sizeof(struct hip_external) == 104, "hipExternalMemoryHandleDesc");
DSK_STATIC_ASSERT(sizeof(struct hip_external_range) == 88, "hipExternalMemoryBufferDesc");
DSK_STATIC_ASSERT(offsetof(struct hip_external, bytes) == 24, "hipExternalMemoryHandleDesc");
DSK_STATIC_ASSERT(offsetof(struct hip_external_range, flags) == 16, "hipExternalMemoryBufferDesc");

#define HIP_DEVICE_SLEEPS        4u /* waiting calls sleep instead of spinning */
#define HIP_STREAM_NON_BLOCKING  1u
#define HIP_EVENT_SLEEPS         1u
#define HIP_EVENT_UNTIMED        2u
#define HIP_HOST_PORTABLE        1u
#define HIP_HOST_MAPPED          2u
#define HIP_CAPTURE_THREAD_LOCAL 1
#define HIP_EXTERNAL_FD          1 /* hipExternalMemoryHandleTypeOpaqueFd; a dma-buf is one */
#define HIP_RANGE_DMABUF         1 /* hipMemRangeHandleTypeDmaBufFd */
#define HIP_NO_MEMORY            2
#define HIP_INVALID_VALUE        1
#define HIP_NOT_SUPPORTED        801

/* The runtime cuts allocations of up to 2 MiB out of larger ones, and a dma-buf is of what they were cut from: what is to
 * be exported is larger, so that it begins where its dma-buf begins. */
#define HIP_SHARE_UNIT ((uint64_t)2 << 20)

/* name here, exported symbol, parameters */
#define HIP_ENTRIES(X)                                                                                       \
    X(init, "hipInit", (unsigned flags))                                                                     \
    X(device_count, "hipGetDeviceCount", (int *n_p))                                                         \
    X(device_name, "hipDeviceGetName", (char *name, int size, int device))                                   \
    X(device_bus, "hipDeviceGetPCIBusId", (char *text, int size, int device))                                \
    X(device_bind, "hipSetDevice", (int device))                                                             \
    X(device_flags, "hipSetDeviceFlags", (unsigned flags))                                                   \
    X(mem_alloc, "hipMalloc", (void **addr_p, size_t bytes))                                                 \
    X(mem_free, "hipFree", (void *addr))                                                                     \
    X(mem_info, "hipMemGetInfo", (size_t * free_p, size_t * total_p))                                        \
    X(host_alloc, "hipHostMalloc", (void **host_p, size_t bytes, unsigned flags))                            \
    X(host_free, "hipHostFree", (void *host))                                                                \
    X(host_register, "hipHostRegister", (void *host, size_t bytes, unsigned flags))                          \
    X(host_unregister, "hipHostUnregister", (void *host))                                                    \
    X(host_address, "hipHostGetDevicePointer", (void **addr_p, void *host, unsigned flags))                  \
    X(stream_create, "hipStreamCreateWithFlags", (void **stream_p, unsigned flags))                          \
    X(stream_destroy, "hipStreamDestroy", (void *stream))                                                    \
    X(stream_query, "hipStreamQuery", (void *stream))                                                        \
    X(stream_sync, "hipStreamSynchronize", (void *stream))                                                   \
    X(event_create, "hipEventCreateWithFlags", (void **event_p, unsigned flags))                             \
    X(event_destroy, "hipEventDestroy", (void *event))                                                       \
    X(event_record, "hipEventRecord", (void *event, void *stream))                                           \
    X(event_query, "hipEventQuery", (void *event))                                                           \
    X(event_sync, "hipEventSynchronize", (void *event))                                                      \
    X(event_elapsed, "hipEventElapsedTime", (float *ms_p, void *start, void *end))                           \
    X(copy_in, "hipMemcpyHtoDAsync", (void *dst, void *src, size_t bytes, void *stream))                     \
    X(copy_out, "hipMemcpyDtoHAsync", (void *dst, void *src, size_t bytes, void *stream))                    \
    X(copy_device, "hipMemcpyDtoDAsync", (void *dst, void *src, size_t bytes, void *stream))                 \
    X(set, "hipMemsetD8Async", (void *dst, unsigned char byte, size_t bytes, void *stream))                  \
    X(module_load, "hipModuleLoadData", (void **module_p, const void *image))                                \
    X(module_unload, "hipModuleUnload", (void *module))                                                      \
    X(module_function, "hipModuleGetFunction", (void **function_p, void *module, const char *name))          \
    X(launch, "hipModuleLaunchKernel",                                                                       \
      (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,         \
       unsigned shared_bytes, void *stream, void **params, void **extra))                                    \
    X(capture_begin, "hipStreamBeginCapture", (void *stream, int mode))                                      \
    X(capture_end, "hipStreamEndCapture", (void *stream, void **graph_p))                                    \
    X(graph_instantiate, "hipGraphInstantiate",                                                              \
      (void **exec_p, void *graph, void **node_p, char *log, size_t log_bytes))                              \
    X(graph_destroy, "hipGraphDestroy", (void *graph))                                                       \
    X(graph_roots, "hipGraphGetRootNodes", (void *graph, void **nodes, size_t *n_p))                         \
    X(exec_set_params, "hipGraphExecKernelNodeSetParams",                                                    \
      (void *exec, void *node, const struct hip_node *params))                                               \
    X(exec_launch, "hipGraphLaunch", (void *exec, void *stream))                                             \
    X(exec_destroy, "hipGraphExecDestroy", (void *exec))

/* The same for what a library may lack; then memory is not shared. */
#define HIP_SHARE_ENTRIES(X)                                                                                 \
    X(external_import, "hipImportExternalMemory", (void **external_p, const struct hip_external *what))      \
    X(external_map, "hipExternalMemoryGetMappedBuffer",                                                      \
      (void **addr_p, void *external, const struct hip_external_range *range))                               \
    X(external_destroy, "hipDestroyExternalMemory", (void *external))

struct hip_entries {
#define HIP_FIELD(name, symbol, params) hip_result(*name) params;
    HIP_ENTRIES(HIP_FIELD)
    HIP_SHARE_ENTRIES(HIP_FIELD)
#undef HIP_FIELD
    /* A dma-buf of memory: of the HIP runtime from release 7, else of the HSA runtime beneath it, which tells where in
     * the dma-buf the memory begins. */
    hip_result (*range_handle)(void *fd_p, void *addr, size_t bytes, int type, unsigned long long flags);
    int (*hsa_export)(const void *addr, size_t bytes, int *fd_p, uint64_t *offset_p);
    const char *(*error_string)(hip_result result);
    hip_result (*device_props)(void *props, int device);
    const struct hip_props_place *place; /* of what device_props fills */
    bool has_share;
};

static const struct hip_entries *hip(const struct gpu_driver *driver)
{
    return driver->entries;
}

static void *pointer(uint64_t addr)
{
    return (void *)(uintptr_t)addr; /* device addresses are pointers here */
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
    case 17:  /* invalid device pointer */
    case 98:  /* invalid device function */
    case 101: /* invalid device */
    case 200: /* invalid image */
    case 209: /* no binary for this device */
    case 218: /* invalid kernel file */
    case 500: /* not found */
    case 712: /* host memory registered already */
    case 713: /* host memory not registered */
    case 801: /* not supported */
        return GPU_BAD_VALUE;
    default: /* launch failure, illegal address, and whatever nobody expected */
        return GPU_LOST;
    }
}

static const char *result_text(const struct gpu_driver *driver, int result)
{
    const char *text = hip(driver)->error_string(result);

    return text == NULL ? "unknown error" : text;
}

/* ---- devices ----------------------------------------------------------------------------- */

static int device_count(const struct gpu_driver *driver, int *n_p)
{
    return hip(driver)->device_count(n_p);
}

static int32_t int_at(const uint8_t *props, size_t at)
{
    int32_t x;

    memcpy(&x, props + at, sizeof(x));
    return x;
}

static uint64_t size_at(const uint8_t *props, size_t at)
{
    uint64_t x;

    memcpy(&x, props + at, sizeof(x));
    return x;
}

/* "gfx942:sramecc+:xnack-" is major 9 and 0x42: the digit before the last two is the major, the rest are hexadecimal. */
static void read_arch(const uint8_t *name, struct gpu_props *props_p)
{
    char text[HIP_ARCH_BYTES + 1];
    size_t n;

    memcpy(text, name, HIP_ARCH_BYTES);
    text[HIP_ARCH_BYTES] = '\0';
    n = strcspn(text, ":");
    text[n] = '\0';
    snprintf(props_p->arch, sizeof(props_p->arch), "%.15s", text);
    if (n < 6 || strncmp(text, "gfx", 3) != 0)
        return;
    props_p->arch_minor = (int32_t)strtol(text + n - 2, NULL, 16);
    text[n - 2] = '\0';
    props_p->arch_major = (int32_t)strtol(text + 3, NULL, 10);
}

/* Libraries before release 6 give no id; the place on the bus is one within this machine. */
static int read_uuid(const struct gpu_driver *driver, int ordinal, const uint8_t *props,
                     struct gpu_props *props_p)
{
    char bus[32] = "";
    int result;

    if (hip(driver)->place->uuid != 0) {
        memcpy(props_p->uuid, props + hip(driver)->place->uuid, sizeof(props_p->uuid));
        return 0;
    }
    result = hip(driver)->device_bus(bus, (int)sizeof(bus), ordinal);
    memcpy(props_p->uuid, bus, sizeof(props_p->uuid));
    return result;
}

static int device_props(const struct gpu_driver *driver, int ordinal, struct gpu_props *props_p)
{
    const struct hip_props_place *place = hip(driver)->place;
    uint8_t *props = calloc(1, HIP_PROPS_BYTES);
    int result = props == NULL ? HIP_NO_MEMORY : hip(driver)->device_props(props, ordinal);

    memset(props_p, 0, sizeof(*props_p));
    if (result == 0)
        result = hip(driver)->device_name(props_p->name, (int)sizeof(props_p->name), ordinal);
    if (result == 0)
        result = read_uuid(driver, ordinal, props, props_p);
    if (result == 0) {
        props_p->memory_bytes = size_at(props, place->memory);
        props_p->shared_bytes_max = (int32_t)size_at(props, place->shared);
        props_p->wave = int_at(props, place->wave);
        props_p->n_units = int_at(props, place->units);
        props_p->cache_bytes = int_at(props, place->cache);
        read_arch(props + place->arch, props_p);
    }
    free(props);
    return result;
}

static int context_create(const struct gpu_driver *driver, int ordinal, void **context_p)
{
    int result = hip(driver)->device_bind(ordinal);

    if (result != 0)
        return result;
    *context_p = pointer((uint64_t)ordinal + 1);
    result = hip(driver)->device_flags(HIP_DEVICE_SLEEPS);
    return result == 708 ? 0 : result; /* the device is in use already, with flags of its own */
}

static void context_destroy(const struct gpu_driver *driver, void *context)
{
    (void)driver;
    (void)context;
}

static int context_bind(const struct gpu_driver *driver, void *context)
{
    return hip(driver)->device_bind((int)((uintptr_t)context - 1));
}

/* ---- memory ------------------------------------------------------------------------------ */

static int mem_alloc(const struct gpu_driver *driver, uint64_t bytes, uint64_t *addr_p)
{
    void *addr = NULL;
    int result = hip(driver)->mem_alloc(&addr, bytes);

    if (result == 0)
        *addr_p = (uint64_t)(uintptr_t)addr;
    return result;
}

static int mem_free(const struct gpu_driver *driver, uint64_t addr)
{
    return hip(driver)->mem_free(pointer(addr));
}

static int mem_info(const struct gpu_driver *driver, uint64_t *free_p, uint64_t *total_p)
{
    size_t n_free = 0, n_total = 0;
    int result = hip(driver)->mem_info(&n_free, &n_total);

    *free_p = n_free;
    *total_p = n_total;
    return result;
}

static int host_alloc(const struct gpu_driver *driver, uint64_t bytes, void **host_p)
{
    return hip(driver)->host_alloc(host_p, bytes, HIP_HOST_PORTABLE | HIP_HOST_MAPPED);
}

static int host_free(const struct gpu_driver *driver, void *host)
{
    return hip(driver)->host_free(host);
}

/* There is no flag for memory that this process may only read: the bit that CUDA has for it means another thing here. */
static int host_register(const struct gpu_driver *driver, void *host, uint64_t bytes, uint64_t *addr_p)
{
    void *addr = NULL;
    int result = hip(driver)->host_register(host, bytes, HIP_HOST_PORTABLE | HIP_HOST_MAPPED);

    if (result != 0)
        return result;
    result = hip(driver)->host_address(&addr, host, 0);
    if (result != 0) {
        (void)hip(driver)->host_unregister(host);
        return result;
    }
    *addr_p = (uint64_t)(uintptr_t)addr;
    return 0;
}

static int host_unregister(const struct gpu_driver *driver, void *host)
{
    return hip(driver)->host_unregister(host);
}

/* ---- memory between processes -------------------------------------------------------------- */

static int share_alloc(const struct gpu_driver *driver, int ordinal, uint64_t bytes,
                       struct gpu_share *share_p)
{
    int result;

    (void)ordinal; /* the one that is bound */
    if (!hip(driver)->has_share)
        return HIP_NOT_SUPPORTED;
    bytes = bytes <= HIP_SHARE_UNIT ? 2 * HIP_SHARE_UNIT : dsk_gpu_round_up(bytes, HIP_SHARE_UNIT);
    result = mem_alloc(driver, bytes, &share_p->addr);
    if (result == 0)
        share_p->bytes = bytes;
    return result;
}

static int share_export(const struct gpu_driver *driver, const struct gpu_share *share, int *fd_p)
{
    const struct hip_entries *entries = hip(driver);
    uint64_t offset = 0;

    if (share->handle != NULL)
        return HIP_INVALID_VALUE; /* it came from elsewhere */
    if (entries->range_handle != NULL)
        return entries->range_handle(fd_p, pointer(share->addr), share->bytes, HIP_RANGE_DMABUF, 0);
    if (entries->hsa_export(pointer(share->addr), share->bytes, fd_p, &offset) != 0)
        return HIP_NOT_SUPPORTED;
    if (offset == 0)
        return 0;
    close(*fd_p);
    *fd_p = -1;
    return HIP_NOT_SUPPORTED;
}

/* A dma-buf says its size when it is asked for its end; what lies beyond is nobody's to map. */
static int share_import(const struct gpu_driver *driver, int ordinal, int fd, uint64_t bytes,
                        struct gpu_share *share_p)
{
    const struct hip_external what = {.type = HIP_EXTERNAL_FD, .handle.fd = fd, .bytes = bytes};
    const struct hip_external_range range = {.bytes = bytes};
    const off_t end = lseek(fd, 0, SEEK_END);
    void *external = NULL, *addr = NULL;
    int result;

    (void)ordinal;
    if (!hip(driver)->has_share)
        return HIP_NOT_SUPPORTED;
    if (end < 0 || (uint64_t)end < bytes)
        return HIP_INVALID_VALUE;
    result = hip(driver)->external_import(&external, &what);
    if (result != 0)
        return result;
    result = hip(driver)->external_map(&addr, external, &range);
    if (result != 0)
        (void)hip(driver)->external_destroy(external);
    else
        *share_p = (struct gpu_share){(uint64_t)(uintptr_t)addr, bytes, external};
    return result;
}

static int share_free(const struct gpu_driver *driver, const struct gpu_share *share)
{
    int result = hip(driver)->mem_free(pointer(share->addr));

    if (share->handle != NULL)
        (void)hip(driver)->external_destroy(share->handle);
    return result;
}

/* ---- streams and events ------------------------------------------------------------------ */

static int stream_create(const struct gpu_driver *driver, void **stream_p)
{
    return hip(driver)->stream_create(stream_p, HIP_STREAM_NON_BLOCKING);
}

static int stream_destroy(const struct gpu_driver *driver, void *stream)
{
    return hip(driver)->stream_destroy(stream);
}

static int stream_query(const struct gpu_driver *driver, void *stream)
{
    return hip(driver)->stream_query(stream);
}

static int stream_sync(const struct gpu_driver *driver, void *stream)
{
    return hip(driver)->stream_sync(stream);
}

static int event_create(const struct gpu_driver *driver, bool is_timed, void **event_p)
{
    return hip(driver)->event_create(event_p,
                                     is_timed ? HIP_EVENT_SLEEPS : HIP_EVENT_SLEEPS | HIP_EVENT_UNTIMED);
}

static int event_destroy(const struct gpu_driver *driver, void *event)
{
    return hip(driver)->event_destroy(event);
}

static int event_record(const struct gpu_driver *driver, void *event, void *stream)
{
    return hip(driver)->event_record(event, stream);
}

static int event_query(const struct gpu_driver *driver, void *event)
{
    return hip(driver)->event_query(event);
}

static int event_sync(const struct gpu_driver *driver, void *event)
{
    return hip(driver)->event_sync(event);
}

static int event_elapsed(const struct gpu_driver *driver, void *start, void *end, float *ms_p)
{
    return hip(driver)->event_elapsed(ms_p, start, end);
}

/* ---- copies ------------------------------------------------------------------------------ */

static void *not_const(const void *p) /* HIP's copies take their source without const, and leave it alone */
{
    return (void *)(uintptr_t)p;
}

static int copy_in(const struct gpu_driver *driver, uint64_t dst, const void *src, uint64_t bytes,
                   void *stream)
{
    return hip(driver)->copy_in(pointer(dst), not_const(src), bytes, stream);
}

static int copy_out(const struct gpu_driver *driver, void *dst, uint64_t src, uint64_t bytes, void *stream)
{
    return hip(driver)->copy_out(dst, pointer(src), bytes, stream);
}

static int copy_device(const struct gpu_driver *driver, uint64_t dst, uint64_t src, uint64_t bytes,
                       void *stream)
{
    return hip(driver)->copy_device(pointer(dst), pointer(src), bytes, stream);
}

static int set_bytes(const struct gpu_driver *driver, uint64_t dst, uint8_t byte, uint64_t bytes,
                     void *stream)
{
    return hip(driver)->set(pointer(dst), byte, bytes, stream);
}

/* ---- code -------------------------------------------------------------------------------- */

static int module_load(const struct gpu_driver *driver, const void *image, void **module_p)
{
    return hip(driver)->module_load(module_p, image);
}

static int module_unload(const struct gpu_driver *driver, void *module)
{
    return hip(driver)->module_unload(module);
}

static int module_function(const struct gpu_driver *driver, void *module, const char *name, void **function_p)
{
    return hip(driver)->module_function(function_p, module, name);
}

/* The kernels' LDS is part of their code: there is nothing to permit. */
static int function_set_shared(const struct gpu_driver *driver, void *function, uint32_t bytes)
{
    (void)driver;
    (void)function;
    (void)bytes;
    return 0;
}

/* No clusters and no dependent launches here; plans for HIP name neither. Every kernel has one parameter; the fault's
 * is of no meaning. */
static int launch(const struct gpu_driver *driver, void *function, const struct gpu_launch_dims *dims,
                  void *stream, void **params)
{
    uint64_t none = 0;
    void *list[1] = {&none};

    return hip(driver)->launch(function, dims->grid[0], dims->grid[1], dims->grid[2], dims->block, 1, 1,
                               dims->shared_bytes, stream, params == NULL ? list : params, NULL);
}

/* ---- graphs ------------------------------------------------------------------------------ */

static int capture_begin(const struct gpu_driver *driver, void *stream)
{
    return hip(driver)->capture_begin(stream, HIP_CAPTURE_THREAD_LOCAL);
}

static int capture_end(const struct gpu_driver *driver, void *stream, void **graph_p)
{
    *graph_p = NULL;
    return hip(driver)->capture_end(stream, graph_p);
}

static int graph_instantiate(const struct gpu_driver *driver, void *graph, void **exec_p)
{
    return hip(driver)->graph_instantiate(exec_p, graph, NULL, NULL, 0);
}

static int graph_root(const struct gpu_driver *driver, void *graph, void **node_p)
{
    size_t n = 1;

    *node_p = NULL;
    return hip(driver)->graph_roots(graph, node_p, &n);
}

static int exec_set_params(const struct gpu_driver *driver, void *exec, void *node, void *function,
                           const struct gpu_launch_dims *dims, void **params)
{
    const struct hip_node config = {.function = function,
                                    .grid = {dims->grid[0], dims->grid[1], dims->grid[2]},
                                    .block = {dims->block, 1, 1},
                                    .shared_bytes = dims->shared_bytes,
                                    .params = params};

    return hip(driver)->exec_set_params(exec, node, &config);
}

static int graph_destroy(const struct gpu_driver *driver, void *graph)
{
    return hip(driver)->graph_destroy(graph);
}

static int exec_launch(const struct gpu_driver *driver, void *exec, void *stream)
{
    return hip(driver)->exec_launch(exec, stream);
}

static int exec_destroy(const struct gpu_driver *driver, void *exec)
{
    return hip(driver)->exec_destroy(exec);
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
static const char *find_entries(void *library, struct hip_entries *entries)
{
#define HIP_FIND(name, symbol, params)                                                                       \
    *(void **)&entries->name = dlsym(library, symbol); /* as POSIX has it */                                 \
    if (*(void **)&entries->name == NULL)                                                                    \
        return symbol;
    HIP_ENTRIES(HIP_FIND)
#undef HIP_FIND
#define HIP_TRY(name, symbol, params)                                                                        \
    *(void **)&entries->name = dlsym(library, symbol);                                                       \
    entries->has_share = entries->has_share && *(void **)&entries->name != NULL;
    *(void **)&entries->range_handle = dlsym(library, "hipMemGetHandleForAddressRange");
    *(void **)&entries->hsa_export =
        dlsym(library, "hsa_amd_portable_export_dmabuf"); /* in what it depends on */
    entries->has_share = entries->range_handle != NULL || entries->hsa_export != NULL;
    HIP_SHARE_ENTRIES(HIP_TRY)
#undef HIP_TRY
    *(void **)&entries->error_string = dlsym(library, "hipGetErrorString");
    if (entries->error_string == NULL)
        return "hipGetErrorString";
    entries->place = &PROPS_R0600;
    *(void **)&entries->device_props = dlsym(library, "hipGetDevicePropertiesR0600");
    if (entries->device_props != NULL)
        return NULL;
    entries->place = &PROPS_R0000;
    *(void **)&entries->device_props = dlsym(library, "hipGetDeviceProperties");
    return entries->device_props == NULL ? "hipGetDeviceProperties" : NULL;
}

static const struct gpu_driver TABLE = {
    .library_name = "libamdhip64.so",
    .kind = DSK_DEVICE_HIP,
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

/* The newest that loads. why: of those that did not, one that is there but lacks something is worth more than one that is
 * not there. The runtime has threads of its own, so it stays loaded once it was. */
static void *open_library(const char **name_p, char *why, size_t size)
{
    static const char *const names[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"};
    bool is_there = false;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
        const char *text;

        *name_p = names[i];
        if (library != NULL)
            return library;
        text = dlerror();
        if (text == NULL || is_there)
            continue;
        is_there = strncmp(text, names[i], strlen(names[i])) != 0;
        snprintf(why, size, "%s", text);
    }
    return NULL;
}

dsk_status dsk_gpu_load_hip(struct gpu_driver *driver, struct dsk_err *err)
{
    const char *missing;
    char why[160] = "";
    int result;

    *driver = TABLE;
    driver->library = open_library(&driver->library_name, why, sizeof(why));
    if (driver->library == NULL)
        return dsk_fail(err, DSK_E_NO_DEVICE, "kind", driver->kind,
                        "no ROCm runtime (libamdhip64.so.7, .6 or .5): %s", why);
    driver->entries = calloc(1, sizeof(struct hip_entries));
    if (driver->entries == NULL) {
        unload(driver);
        return dsk_fail(err, DSK_E_NO_MEMORY, "kind", DSK_DEVICE_HIP, "no memory for the driver's table");
    }
    missing = find_entries(driver->library, driver->entries);
    if (missing != NULL) {
        unload(driver);
        return dsk_fail(err, DSK_E_NO_DEVICE, "kind", DSK_DEVICE_HIP, "the ROCm runtime (%s) lacks %s",
                        driver->library_name, missing);
    }
    result = hip(driver)->init(0);
    if (result != 0) {
        (void)dsk_fail(err, DSK_E_NO_DEVICE, "kind", DSK_DEVICE_HIP,
                       "the ROCm runtime (%s) does not start: %s", driver->library_name,
                       result_text(driver, result));
        unload(driver);
        return DSK_E_NO_DEVICE;
    }
    return DSK_OK;
}
