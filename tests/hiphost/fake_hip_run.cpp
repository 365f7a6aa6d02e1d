/* fake_hip_run.cpp - launches of the fake HIP runtime, in the emulator. */
#include "fake_hip.h"
#include "hipemu.h"

int64_t fake_run_param_bytes(const char *arch, const char *kernel)
{
    const hipemu_kernel *found = hipemu_find(arch, kernel);

    return found == nullptr ? -1 : (int64_t)found->param_bytes;
}

void fake_run(const char *arch, const char *kernel, const uint32_t grid[3], uint32_t block, uint32_t shared_bytes,
              const void *param)
{
    hipemu_launch(hipemu_find(arch, kernel), grid, block, shared_bytes, param);
}
