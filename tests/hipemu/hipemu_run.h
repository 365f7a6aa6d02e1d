/* hipemu_run.h - the emulator for tests in C: kernels by target and name, launched over host memory. */
#ifndef TESTS_HIPEMU_RUN_H
#define TESTS_HIPEMU_RUN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Runs the blocks of a grid and returns when all have run. Aborts, saying why, on a kernel that does not exist and on every
 * fault that hipemu.h lists. target: "gfx942" or "gfx950". */
void hipemu_run(const char *target, const char *kernel, uint32_t grid_x, uint32_t grid_y, uint32_t block,
                const void *param);

/* The same with all three extents of the grid. */
void hipemu_run_grid(const char *target, const char *kernel, const uint32_t grid[3], uint32_t block,
                     const void *param);

/* order: 1 first wave and lane first, 2 last first, 0 alternating from launch to launch. pattern: what LDS holds before a
 * block; -1 alternating. */
void hipemu_set(int order, int pattern);

/* What e4m3 codes mean to the emulated chip; is_fnuz: gfx942's own encoding. */
float hipemu_fp8(uint8_t byte, int is_fnuz);

#ifdef __cplusplus
}
#endif

#endif /* TESTS_HIPEMU_RUN_H */
