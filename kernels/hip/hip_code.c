/* hip_code.c - the HIP device code of this build: one code object for each source file and architecture, made with clang;
 * without clang there are none. hip_images.h is written when the build is configured. */
#include <stdio.h>
#include <string.h>

#include "../gpu/gpu.h"
#if DSK_HIP_HAS_ATTEND
#include "attend.h"
#endif

#if DSK_HIP_HAS_IMAGES

#include "hip_images.h"

/* The file's bytes as a symbol of this translation unit, at a page's boundary as a loader would have them. */
#define EMBED(file_name, arch_name, path)                                                                    \
    __asm__(".pushsection .rodata\n"                                                                         \
            ".balign 4096\ndsk_image_hip_" #file_name "_" #arch_name ":\n"                                   \
            ".incbin \"" path "\"\n"                                                                         \
            ".byte 0\n"                                                                                      \
            ".popsection\n");                                                                                \
    extern const unsigned char dsk_image_hip_##file_name##_##arch_name[]                                     \
        __attribute__((visibility("hidden")));
HIP_IMAGES(EMBED)

#define UNIT(file_name) UNIT_##file_name,
enum { HIP_UNITS(UNIT) N_UNITS };
DSK_STATIC_ASSERT(N_UNITS <= GPU_MAX_UNITS, "units");

#define IMAGE(file_name, arch_name, path)                                                                    \
    {dsk_image_hip_##file_name##_##arch_name, #arch_name, UNIT_##file_name},
static const struct gpu_image IMAGES[] = {HIP_IMAGES(IMAGE)};

static const struct gpu_kernel KERNELS[] = {
    [GPU_FN_APPEND] = {"gpu_append", UNIT_rows, false},
    [GPU_FN_APPEND_FEW_64] = {"gpu_append_few_64", UNIT_rows, false},
    [GPU_FN_APPEND_FEW_960] = {"gpu_append_few_960", UNIT_rows, false},
    [GPU_FN_APPEND_RUNS_24] = {"gpu_append_runs_24", UNIT_rows, false},
    [GPU_FN_APPEND_RUNS_150] = {"gpu_append_runs_150", UNIT_rows, false},
    [GPU_FN_APPEND_RUNS_500] = {"gpu_append_runs_500", UNIT_rows, false},
    [GPU_FN_APPEND_CHECK] = {"gpu_append_check", UNIT_rows, false},
    [GPU_FN_READ] = {"gpu_read", UNIT_rows, false},
    [GPU_FN_CLEAN] = {"gpu_clean", UNIT_rows, false},
    [GPU_FN_MAP] = {"gpu_map", UNIT_lists, false},
    [GPU_FN_MERGE] = {"gpu_merge", UNIT_lists, false},
    [GPU_FN_UPLOAD_36] = {"gpu_upload_36", UNIT_lists, false},
    [GPU_FN_UPLOAD_144] = {"gpu_upload_144", UNIT_lists, false},
    [GPU_FN_UPLOAD_288] = {"gpu_upload_288", UNIT_lists, false},
    [GPU_FN_FAULT] = {"gpu_fault", UNIT_lists, false},
    [GPU_FN_PEAK] = {NULL, 0, false},
#if DSK_HIP_HAS_ATTEND
    {"attend_scaled_512_64_h16", UNIT_attend, false},
    {"attend_scaled_512_64_h64", UNIT_attend, false},
    {"attend_scaled_512_0_h16", UNIT_attend, false},
    {"attend_scaled_512_0_h64", UNIT_attend, false},
    {"attend_scaled_256_0_h16", UNIT_attend, false},
    {"attend_scaled_256_0_h64", UNIT_attend, false},
    {"attend_bf16_576_h16", UNIT_attend, false},
    {"attend_bf16_576_h64", UNIT_attend, false},
    {"attend_bf16_512_h16", UNIT_attend, false},
    {"attend_bf16_512_h64", UNIT_attend, false},
    {"attend_bf16_256_h16", UNIT_attend, false},
    {"attend_bf16_256_h64", UNIT_attend, false},
    {"attend_raw_512_64_h16", UNIT_attend, false},
    {"attend_raw_512_64_h64", UNIT_attend, false},
    {"attend_fp8_raw_512_64_h16", UNIT_attend, false},
    {"attend_fp8_raw_512_64_h64", UNIT_attend, false},
    {"attend_combine", UNIT_attend, false},
#endif
};

#define N_KERNELS ((int32_t)(sizeof(KERNELS) / sizeof(KERNELS[0])))
DSK_STATIC_ASSERT(sizeof(KERNELS) / sizeof(KERNELS[0]) <= GPU_MAX_FUNCTIONS, "kernels");

/* ---- plans ------------------------------------------------------------------------------- */

#if DSK_HIP_HAS_ATTEND

static const struct gpu_split_rule SPLITS = {ATTEND_HIP_MAX_SPLITS, 64, ATTEND_HIP_INVARIANT_SPLIT};

static int32_t find_kernel(const char *name)
{
    for (int32_t i = GPU_N_FUNCTIONS; i < N_KERNELS; i++) {
        if (strcmp(KERNELS[i].name, name) == 0)
            return i;
    }
    return -1;
}

/* The kernels' LDS is part of their code: launches ask for none. Every kernel is for one architecture, so PORTABLE changes
 * nothing. */
static dsk_status plan_attend(const struct gpu_props *props, const struct gpu_attend_shape *shape,
                              uint32_t flags, struct gpu_attend_plan *plan, struct dsk_err *err)
{
    const struct dsk_layout *layout = dsk_layout_get(shape->layout);
    const uint32_t heads =
        shape->h_q <= 2 * ATTEND_HIP_FEW_HEADS ? ATTEND_HIP_FEW_HEADS : ATTEND_HIP_MANY_HEADS;
    const uint32_t n_blocks = ((uint32_t)shape->h_q + heads - 1) / heads;
    const bool is_fp8 = (flags & DSK_DEVICE_FP8) != 0 && shape->layout == DSK_LAYOUT_RAW_512_64;
    char name[48];

    memset(plan, 0, sizeof(*plan));
    snprintf(name, sizeof(name), "attend_%s%s_h%u", is_fp8 ? "fp8_" : "", layout->name, heads);
    plan->main.function = find_kernel(name);
    plan->combine.function = -1;
    if (plan->main.function < 0)
        return dsk_fail(err, DSK_E_UNSUPPORTED, "layout", shape->layout,
                        "there is no attend kernel %s for %s", name, props->arch);
    dsk_gpu_split(plan, shape, &SPLITS, (int64_t)shape->n_rows * n_blocks,
                  (int64_t)props->n_units * ATTEND_HIP_BLOCKS(heads));
    plan->main.dims = (struct gpu_launch_dims){
        .grid = {(uint32_t)shape->n_rows, n_blocks, (uint32_t)plan->n_splits}, .block = ATTEND_HIP_THREADS};
    if (plan->n_splits == 1)
        return DSK_OK;
    plan->combine.function = find_kernel("attend_combine");
    plan->combine.dims = (struct gpu_launch_dims){.grid = {(uint32_t)shape->n_rows, (uint32_t)shape->h_q, 1},
                                                  .block = ATTEND_HIP_COMBINE_THREADS};
    plan->part_ref_bytes = 4 * (uint64_t)shape->n_rows * (uint64_t)plan->n_splits;
    plan->part_lse_bytes = plan->part_ref_bytes * (uint64_t)shape->h_q;
    plan->part_out_bytes = plan->part_lse_bytes * (uint64_t)layout->d_v;
    return DSK_OK;
}

#else

static dsk_status plan_attend(const struct gpu_props *props, const struct gpu_attend_shape *shape,
                              uint32_t flags, struct gpu_attend_plan *plan_p, struct dsk_err *err)
{
    (void)flags;
    (void)plan_p;
    return dsk_fail(err, DSK_E_UNSUPPORTED, "layout", shape->layout, "this build has no attend kernel for %s",
                    props->arch);
}

#endif

static const struct gpu_code CODE = {.images = IMAGES,
                                     .kernels = KERNELS,
                                     .n_images = (int32_t)(sizeof(IMAGES) / sizeof(IMAGES[0])),
                                     .n_kernels = N_KERNELS,
                                     .wave = 64,
                                     .upload_rows = 36, /* 4 KiB of parameters */
                                     .plan_attend = plan_attend};

#else

static const struct gpu_code CODE = {
    .missing = "this build has no HIP device code: clang-22 and lld-22 were not found when it was made"};

#endif

const struct gpu_code *dsk_gpu_code_hip(void)
{
    return &CODE;
}
