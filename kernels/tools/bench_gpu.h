/* bench_gpu.h - dsk-bench on a GPU: times by the device's own clock, next to a copy and a matrix product measured in
 * the same run. One thread. */
#ifndef DSK_TOOLS_BENCH_GPU_H
#define DSK_TOOLS_BENCH_GPU_H

#include <stdbool.h>

#include "kernels/dsk.h"

/* Prints the table; json may be NULL. Returns dsk-bench's exit status. */
int bench_gpu(const struct dsk_device_config *config, const char *json, bool is_quick);

#endif /* DSK_TOOLS_BENCH_GPU_H */
