/* hip_code.c - the HIP device code of this build: one code object for each source file and architecture, made with clang;
 * without clang there are none. hip_images.h is written when the build is configured. */
#include "../gpu/gpu.h"

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
};

static dsk_status plan_attend(const struct gpu_props *props, const struct gpu_attend_shape *shape,
                              bool is_portable, struct gpu_attend_plan *plan_p, struct dsk_err *err)
{
    (void)is_portable;
    (void)plan_p;
    return dsk_fail(err, DSK_E_UNSUPPORTED, "layout", shape->layout, "this build has no attend kernel for %s",
                    props->arch);
}

static const struct gpu_code CODE = {.images = IMAGES,
                                     .kernels = KERNELS,
                                     .n_images = (int32_t)(sizeof(IMAGES) / sizeof(IMAGES[0])),
                                     .n_kernels = (int32_t)(sizeof(KERNELS) / sizeof(KERNELS[0])),
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
