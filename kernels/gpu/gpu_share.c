/* gpu_share.c - device memory between processes, by file descriptor. What a driver says against it is a refusal: a
 * stranger's descriptor must not cost the device. */
#include <string.h>

#include "gpu.h"

static dsk_status refuse(struct gpu_device *gpu, int result, const char *field, long long value,
                         struct dsk_err *err)
{
    if (result == 0)
        return DSK_OK;
    if (gpu->driver.classify(result) == GPU_NO_MEMORY)
        return dsk_fail(err, DSK_E_NO_MEMORY, field, value, "no device memory: %s",
                        gpu->driver.text(&gpu->driver, result));
    return dsk_fail(err, DSK_E_UNSUPPORTED, field, value, "the driver refuses: %s",
                    gpu->driver.text(&gpu->driver, result));
}

static dsk_status enter(struct dsk_device *dev, struct dsk_err *err)
{
    dsk_status status = dsk_gpu_enter((struct gpu_device *)dev);

    return status == DSK_OK ? status : dsk_fail(err, status, "device", 0, "%s", dsk_status_text(status));
}

dsk_status dsk_gpu_share_alloc(struct dsk_device *dev, uint64_t bytes, struct gpu_share *share_p,
                               struct dsk_err *err)
{
    struct gpu_device *gpu = (struct gpu_device *)dev;
    dsk_status status;

    memset(share_p, 0, sizeof(*share_p));
    if (bytes == 0 || bytes > INT64_MAX)
        return dsk_fail(err, DSK_E_BAD_ARGUMENT, "bytes", (long long)bytes, "must be 1 to 2^63 - 1");
    status = enter(dev, err);
    if (status != DSK_OK)
        return status;
    return refuse(gpu, gpu->driver.share_alloc(&gpu->driver, gpu->ordinal, bytes, share_p), "bytes",
                  (long long)bytes, err);
}

dsk_status dsk_gpu_share_export(struct dsk_device *dev, const struct gpu_share *share, int *fd_p,
                                struct dsk_err *err)
{
    struct gpu_device *gpu = (struct gpu_device *)dev;
    dsk_status status = enter(dev, err);

    *fd_p = -1;
    if (status != DSK_OK)
        return status;
    return refuse(gpu, gpu->driver.share_export(&gpu->driver, share, fd_p), "share", (long long)share->bytes,
                  err);
}

dsk_status dsk_gpu_share_import(struct dsk_device *dev, int fd, uint64_t bytes, struct gpu_share *share_p,
                                struct dsk_err *err)
{
    struct gpu_device *gpu = (struct gpu_device *)dev;
    dsk_status status;

    memset(share_p, 0, sizeof(*share_p));
    if (fd < 0)
        return dsk_fail(err, DSK_E_BAD_ARGUMENT, "fd", fd, "is no descriptor");
    if (bytes == 0 || bytes > INT64_MAX)
        return dsk_fail(err, DSK_E_BAD_ARGUMENT, "bytes", (long long)bytes, "must be 1 to 2^63 - 1");
    status = enter(dev, err);
    if (status != DSK_OK)
        return status;
    return refuse(gpu, gpu->driver.share_import(&gpu->driver, gpu->ordinal, fd, bytes, share_p), "fd", fd,
                  err);
}

/* Of a lost device it goes with the context. */
void dsk_gpu_share_free(struct dsk_device *dev, struct gpu_share *share)
{
    struct gpu_device *gpu = (struct gpu_device *)dev;

    if (share->addr != 0 && dsk_gpu_enter(gpu) == DSK_OK)
        (void)gpu->driver.share_free(&gpu->driver, share);
    memset(share, 0, sizeof(*share));
}
