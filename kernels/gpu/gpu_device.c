/* gpu_device.c - opening a GPU: driver, context, device code; its table of operations and memory; how a device that
 * failed is retired. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"

/* ---- loss -------------------------------------------------------------------------------- */

dsk_status dsk_gpu_enter(struct gpu_device *gpu)
{
    if (gpu->is_lost)
        return DSK_E_DEVICE;
    return dsk_gpu_status(gpu, gpu->driver.bind(&gpu->driver, gpu->context), "bind");
}

static dsk_status retire(struct gpu_device *gpu, int result, const char *what)
{
    gpu->is_lost = true;
    dsk_log(0, "device lost device=%s call=%s error=%d text=\"%s\"", gpu->base.info.uuid, what, result,
            gpu->driver.text(&gpu->driver, result));
    return DSK_E_DEVICE;
}

dsk_status dsk_gpu_status(struct gpu_device *gpu, int result, const char *what)
{
    switch (gpu->driver.classify(result)) {
    case GPU_OK:
        return DSK_OK;
    case GPU_NO_MEMORY:
        return DSK_E_NO_MEMORY;
    case GPU_BAD_VALUE:
        return DSK_E_BAD_ARGUMENT;
    case GPU_NOT_READY:
        return DSK_E_INTERNAL;
    case GPU_LOST:
        break;
    }
    return retire(gpu, result, what);
}

dsk_status dsk_gpu_work(struct gpu_device *gpu, int result, const char *what, struct dsk_err *err)
{
    if (result == 0)
        return DSK_OK;
    (void)retire(gpu, result, what);
    return dsk_fail(err, DSK_E_DEVICE, what, result, "%s", gpu->driver.text(&gpu->driver, result));
}

/* ---- memory ------------------------------------------------------------------------------ */

/* Drivers align allocations to 256 bytes at least. */
static dsk_status mem_alloc(struct dsk_device *dev, uint64_t bytes, uint64_t *addr_p)
{
    struct gpu_device *gpu = (struct gpu_device *)dev;
    dsk_status status = dsk_gpu_enter(gpu);

    if (status != DSK_OK)
        return status;
    return dsk_gpu_status(gpu, gpu->driver.mem_alloc(&gpu->driver, bytes == 0 ? 1 : bytes, addr_p),
                          "mem_alloc");
}

/* What a lost device still holds goes with its context. */
static void mem_free(struct dsk_device *dev, uint64_t addr)
{
    struct gpu_device *gpu = (struct gpu_device *)dev;

    if (dsk_gpu_enter(gpu) == DSK_OK
        && dsk_gpu_status(gpu, gpu->driver.mem_free(&gpu->driver, addr), "mem_free") == DSK_E_BAD_ARGUMENT)
        dsk_log(1, "free of an address that was not allocated addr=0x%llx", (unsigned long long)addr);
}

static dsk_status mem_usage(struct dsk_device *dev, uint64_t *used_p, uint64_t *free_p)
{
    struct gpu_device *gpu = (struct gpu_device *)dev;
    dsk_status status = dsk_gpu_enter(gpu);
    uint64_t free_bytes = 0, total = 0;

    if (status == DSK_OK)
        status = dsk_gpu_status(gpu, gpu->driver.mem_info(&gpu->driver, &free_bytes, &total), "mem_info");
    if (status != DSK_OK)
        return status;
    *free_p = free_bytes;
    *used_p = total > free_bytes ? total - free_bytes : 0;
    return DSK_OK;
}

static dsk_status host_register(struct dsk_device *dev, void *host, uint64_t bytes, uint64_t *addr_p)
{
    struct gpu_device *gpu = (struct gpu_device *)dev;
    dsk_status status = dsk_gpu_enter(gpu);

    if (status != DSK_OK)
        return status;
    return dsk_gpu_status(gpu, gpu->driver.host_register(&gpu->driver, host, bytes, addr_p), "host_register");
}

static void host_unregister(struct dsk_device *dev, void *host)
{
    struct gpu_device *gpu = (struct gpu_device *)dev;

    if (dsk_gpu_enter(gpu) == DSK_OK
        && dsk_gpu_status(gpu, gpu->driver.host_unregister(&gpu->driver, host), "host_unregister")
               == DSK_E_BAD_ARGUMENT)
        dsk_log(1, "unregister of memory that was not registered host=%p", host);
}

/* ---- close ------------------------------------------------------------------------------- */

/* A context takes what is left with it, where the driver has contexts of our own. Of a lost device nothing can be given
 * back piece by piece. */
static void close_device(struct dsk_device *dev)
{
    struct gpu_device *gpu = (struct gpu_device *)dev;

    if (gpu->context != NULL && dsk_gpu_enter(gpu) == DSK_OK) {
        for (int i = 0; i < GPU_MAX_UNITS; i++) {
            if (gpu->modules[i] != NULL)
                (void)gpu->driver.module_unload(&gpu->driver, gpu->modules[i]);
        }
    }
    if (gpu->context != NULL)
        gpu->driver.context_destroy(&gpu->driver, gpu->context);
    if (gpu->driver.unload != NULL)
        gpu->driver.unload(&gpu->driver);
    free(gpu);
}

static const struct dsk_op_table GPU_OPS = {
    .close = close_device,
    .mem_alloc = mem_alloc,
    .mem_free = mem_free,
    .mem_usage = mem_usage,
    .host_register = host_register,
    .host_unregister = host_unregister,
    .stream_create = dsk_gpu_stream_create,
    .stream_destroy = dsk_gpu_stream_destroy,
    .stream_sync = dsk_gpu_stream_sync,
    .graph_counts = dsk_gpu_graph_counts,
    .event_create = dsk_gpu_event_create,
    .event_destroy = dsk_gpu_event_destroy,
    .event_record = dsk_gpu_event_record,
    .event_is_done = dsk_gpu_event_is_done,
    .copy_in = dsk_gpu_copy_in,
    .copy_out = dsk_gpu_copy_out,
    .mem_set = dsk_gpu_mem_set,
    .append = dsk_gpu_append,
    .read = dsk_gpu_read,
    .gather = dsk_gpu_gather,
    .map = dsk_gpu_map,
    .attend = dsk_gpu_attend,
    .merge = dsk_gpu_merge,
    .copy_rows = dsk_gpu_copy_rows,
    .supports = dsk_gpu_supports,
};

/* ---- open -------------------------------------------------------------------------------- */

static void fill_info(struct gpu_device *gpu)
{
    struct dsk_device_info *info = &gpu->base.info;
    const uint8_t *u = gpu->props.uuid;

    memset(info, 0, sizeof(*info));
    info->kind = gpu->driver.kind;
    snprintf(info->name, sizeof(info->name), "%s", gpu->props.name);
    snprintf(info->arch, sizeof(info->arch), "%s", gpu->props.arch);
    snprintf(info->uuid, sizeof(info->uuid),
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2],
             u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
    info->memory_bytes = gpu->props.memory_bytes;
}

static dsk_status find_device(struct gpu_device *gpu, struct dsk_err *err)
{
    const struct gpu_driver *driver = &gpu->driver;
    int n = 0, result = driver->device_count(driver, &n);

    if (result != 0)
        return dsk_fail(err, DSK_E_NO_DEVICE, "ordinal", gpu->ordinal, "the driver lists no devices: %s",
                        driver->text(driver, result));
    if (gpu->ordinal >= n)
        return dsk_fail(err, DSK_E_NO_DEVICE, "ordinal", gpu->ordinal,
                        "this machine has %d devices of this kind", n);
    result = driver->device_props(driver, gpu->ordinal, &gpu->props);
    if (result != 0)
        return dsk_fail(err, DSK_E_NO_DEVICE, "ordinal", gpu->ordinal,
                        "the device does not tell what it is: %s", driver->text(driver, result));
    fill_info(gpu);
    return DSK_OK;
}

/* The image of a unit for this device, or NULL. */
static const struct gpu_image *find_image(const struct gpu_device *gpu, int32_t unit)
{
    const struct gpu_code *code = gpu->code;

    for (int32_t i = 0; i < code->n_images; i++) {
        const struct gpu_image *image = &code->images[i];

        if (image->unit == unit && (image->arch == NULL || strcmp(image->arch, gpu->props.arch) == 0))
            return image;
    }
    return NULL;
}

/* The architectures that the code is for, "gfx942, gfx950". */
static void list_archs(const struct gpu_code *code, char *text, size_t size)
{
    size_t n = 0;

    text[0] = '\0';
    for (int32_t i = 0; i < code->n_images; i++) {
        const char *arch = code->images[i].arch;

        if (arch != NULL && strstr(text, arch) == NULL && n < size)
            n += (size_t)snprintf(text + n, size - n, "%s%s", n == 0 ? "" : ", ", arch);
    }
}

/* Before a context is made: is there code for this device, and is the device what the code is for? */
static dsk_status check_code(const struct gpu_device *gpu, struct dsk_err *err)
{
    const struct gpu_code *code = gpu->code;
    char archs[80];

    if (code->missing != NULL)
        return dsk_fail(err, DSK_E_UNSUPPORTED, "kind", gpu->driver.kind, "%s", code->missing);
    for (int32_t i = 0; i < GPU_N_FUNCTIONS; i++) {
        if (code->kernels[i].name == NULL || find_image(gpu, code->kernels[i].unit) != NULL)
            continue;
        list_archs(code, archs, sizeof(archs));
        return dsk_fail(err, DSK_E_UNSUPPORTED, "ordinal", gpu->ordinal,
                        "the device (%s) is %s; this build has code for %s", gpu->props.name, gpu->props.arch,
                        archs);
    }
    if (gpu->props.wave != code->wave)
        return dsk_fail(err, DSK_E_UNSUPPORTED, "ordinal", gpu->ordinal,
                        "the device has waves of %d threads, the kernels are for %d", gpu->props.wave,
                        code->wave);
    return DSK_OK;
}

static dsk_status load_function(struct gpu_device *gpu, int32_t i, struct dsk_err *err)
{
    const struct gpu_driver *driver = &gpu->driver;
    const struct gpu_kernel *kernel = &gpu->code->kernels[i];
    int result;

    if (kernel->name == NULL || gpu->modules[kernel->unit] == NULL)
        return DSK_OK; /* for another architecture: no plan names it on this one */
    result = driver->module_function(driver, gpu->modules[kernel->unit], kernel->name, &gpu->functions[i]);
    if (result == 0 && kernel->is_large)
        result =
            driver->function_set_shared(driver, gpu->functions[i], (uint32_t)gpu->props.shared_bytes_max);
    if (result != 0)
        return dsk_fail(err, DSK_E_UNSUPPORTED, kernel->name, result, "the device code does not load: %s",
                        driver->text(driver, result));
    return DSK_OK;
}

static dsk_status load_code(struct gpu_device *gpu, struct dsk_err *err)
{
    const struct gpu_driver *driver = &gpu->driver;
    const struct gpu_code *code = gpu->code;
    dsk_status status = DSK_OK;

    for (int32_t unit = 0; unit < GPU_MAX_UNITS; unit++) {
        const struct gpu_image *image = find_image(gpu, unit);
        int result;

        if (image == NULL)
            continue;
        result = driver->module_load(driver, image->bytes, &gpu->modules[unit]);
        if (driver->classify(result) == GPU_NO_MEMORY)
            return dsk_fail(err, DSK_E_NO_MEMORY, "image", unit, "no device memory for the device code");
        if (result != 0)
            return dsk_fail(err, DSK_E_UNSUPPORTED, "image", unit, "the device code does not load on %s: %s",
                            gpu->props.arch, driver->text(driver, result));
    }
    for (int32_t i = 0; i < code->n_kernels && status == DSK_OK; i++)
        status = load_function(gpu, i, err);
    return status;
}

static dsk_status open_steps(struct gpu_device *gpu, int32_t kind, struct dsk_err *err)
{
    const bool is_hip = kind == DSK_DEVICE_HIP;
    const struct gpu_driver *driver = &gpu->driver;
    dsk_status status = is_hip ? dsk_gpu_load_hip(&gpu->driver, err) : dsk_gpu_load_cuda(&gpu->driver, err);
    int result;

    if (status != DSK_OK || (status = find_device(gpu, err)) != DSK_OK)
        return status;
    gpu->code = is_hip ? dsk_gpu_code_hip() : dsk_gpu_code_cuda();
    status = check_code(gpu, err);
    if (status != DSK_OK)
        return status;
    result = driver->context_create(driver, gpu->ordinal, &gpu->context);
    if (driver->classify(result) == GPU_NO_MEMORY)
        return dsk_fail(err, DSK_E_NO_MEMORY, "ordinal", gpu->ordinal, "no device memory for a context");
    if (result != 0)
        return dsk_fail(err, DSK_E_NO_DEVICE, "ordinal", gpu->ordinal, "the device gives no context: %s",
                        driver->text(driver, result));
    return load_code(gpu, err);
}

dsk_status dsk_gpu_open(const struct dsk_device_config *config, struct dsk_device **dev_p,
                        struct dsk_err *err)
{
    struct gpu_device *gpu = calloc(1, sizeof(*gpu));
    dsk_status status;

    if (gpu == NULL)
        return dsk_fail(err, DSK_E_NO_MEMORY, "kind", config->kind, "no memory for the device");
    gpu->base.ops = &GPU_OPS;
    gpu->ordinal = config->ordinal;
    gpu->flags = config->flags;
    status = open_steps(gpu, config->kind, err);
    if (status != DSK_OK) {
        close_device(&gpu->base); /* what is not there yet is NULL */
        return status;
    }
    *dev_p = &gpu->base;
    return DSK_OK;
}
