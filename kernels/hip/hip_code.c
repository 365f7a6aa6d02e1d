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

static int32_t find_kernel(const char *name)
{
    for (int32_t i = GPU_N_FUNCTIONS; i < N_KERNELS; i++) {
        if (strcmp(KERNELS[i].name, name) == 0)
            return i;
    }
    return -1;
}

static struct gpu_attend_launch launch_of(const struct attend_hip_launch *from)
{
    const struct gpu_attend_launch launch = {
        .function = from->name[0] == '\0' ? -1 : find_kernel(from->name),
        .dims = {.grid = {from->grid[0], from->grid[1], from->grid[2]}, .block = from->block}};

    return launch;
}

/* Every kernel is for one architecture, so PORTABLE changes nothing. The kernels in e4m3 are launched as those that they
 * stand for. */
static dsk_status plan_attend(const struct gpu_props *props, const struct gpu_attend_shape *shape,
                              uint32_t flags, struct gpu_attend_plan *plan, struct dsk_err *err)
{
    const bool is_fp8 = (flags & DSK_DEVICE_FP8) != 0 && shape->layout == DSK_LAYOUT_RAW_512_64;
    struct attend_hip_plan from;
    char name[sizeof(from.main.name)];

    attend_hip_plan(shape->layout, shape->n_rows, shape->h_q, shape->topk, shape->flags, props->n_units,
                    &from);
    if (is_fp8) {
        snprintf(name, sizeof(name), "attend_fp8_%.28s", from.main.name + strlen("attend_"));
        memcpy(from.main.name, name, sizeof(name));
    }
    memset(plan, 0, sizeof(*plan));
    plan->main = launch_of(&from.main);
    plan->combine = launch_of(&from.combine);
    if (plan->main.function < 0 || (from.combine.name[0] != '\0' && plan->combine.function < 0))
        return dsk_fail(err, DSK_E_UNSUPPORTED, "layout", shape->layout,
                        "there is no attend kernel %s for %s", from.main.name, props->arch);
    plan->n_splits = from.n_splits;
    plan->split_entries = from.split_entries;
    plan->part_out_bytes = from.part_out_bytes;
    plan->part_lse_bytes = from.part_lse_bytes;
    plan->part_ref_bytes = from.part_ref_bytes;
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
