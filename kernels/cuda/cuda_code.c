/* cuda_code.c - the device code of this build, and which attend kernel serves which shape: attend_sm90 where it can,
 * else the portable attend_mma. The images are fatbins that the build made with nvcc; without nvcc there are none. */
#include <stdio.h>
#include <string.h>

#include "../gpu/gpu.h"
#include "attend_mma.h"
#if DSK_CUDA_HAS_SM90
#include "attend_sm90.h"
#endif

#define DEPENDENT_ARCH 9 /* all images have code for sm_90, which waits for the stream by itself */

/* ---- images ------------------------------------------------------------------------------ */

#if DSK_CUDA_HAS_IMAGES

/* The file's bytes, 16-byte aligned, as a symbol of this translation unit. */
#define EMBED(symbol, file)                                                                                  \
    __asm__(".pushsection .rodata\n"                                                                         \
            ".balign 16\n" #symbol ":\n"                                                                     \
            ".incbin \"" file "\"\n"                                                                         \
            ".byte 0\n"                                                                                      \
            ".popsection\n");                                                                                \
    extern const unsigned char symbol[] __attribute__((visibility("hidden")))

EMBED(dsk_image_rows, DSK_CUDA_ROWS);
EMBED(dsk_image_lists, DSK_CUDA_LISTS);
EMBED(dsk_image_attend_mma, DSK_CUDA_ATTEND_MMA);
EMBED(dsk_image_peak, DSK_CUDA_PEAK);
#if DSK_CUDA_HAS_SM90
EMBED(dsk_image_attend_sm90, DSK_CUDA_ATTEND_SM90);
#endif

enum { UNIT_ROWS, UNIT_LISTS, UNIT_ATTEND_MMA, UNIT_PEAK, UNIT_ATTEND_SM90, N_UNITS };
DSK_STATIC_ASSERT(N_UNITS <= GPU_MAX_UNITS, "units");

static const struct gpu_image IMAGES[] = {
    {dsk_image_rows, NULL, UNIT_ROWS},
    {dsk_image_lists, NULL, UNIT_LISTS},
    {dsk_image_attend_mma, NULL, UNIT_ATTEND_MMA},
    {dsk_image_peak, NULL, UNIT_PEAK},
#if DSK_CUDA_HAS_SM90
    {dsk_image_attend_sm90, "sm_90", UNIT_ATTEND_SM90},
#endif
};

static const struct gpu_kernel KERNELS[] = {
    [GPU_FN_APPEND] = {"gpu_append", UNIT_ROWS, false},
    [GPU_FN_APPEND_FEW_64] = {"gpu_append_few_64", UNIT_ROWS, false},
    [GPU_FN_APPEND_FEW_960] = {"gpu_append_few_960", UNIT_ROWS, false},
    [GPU_FN_APPEND_RUNS_24] = {"gpu_append_runs_24", UNIT_ROWS, false},
    [GPU_FN_APPEND_RUNS_150] = {"gpu_append_runs_150", UNIT_ROWS, false},
    [GPU_FN_APPEND_RUNS_500] = {"gpu_append_runs_500", UNIT_ROWS, false},
    [GPU_FN_APPEND_CHECK] = {"gpu_append_check", UNIT_ROWS, false},
    [GPU_FN_READ] = {"gpu_read", UNIT_ROWS, false},
    [GPU_FN_CLEAN] = {"gpu_clean", UNIT_ROWS, false},
    [GPU_FN_MAP] = {"gpu_map", UNIT_LISTS, false},
    [GPU_FN_MERGE] = {"gpu_merge", UNIT_LISTS, false},
    [GPU_FN_UPLOAD_36] = {"gpu_upload_36", UNIT_LISTS, false},
    [GPU_FN_UPLOAD_144] = {"gpu_upload_144", UNIT_LISTS, false},
    [GPU_FN_UPLOAD_288] = {"gpu_upload_288", UNIT_LISTS, false},
    [GPU_FN_FAULT] = {"gpu_fault", UNIT_LISTS, false},
    [GPU_FN_PEAK] = {"gpu_peak", UNIT_PEAK, true},
    {"attend_mma_512_64_h16", UNIT_ATTEND_MMA, true},
    {"attend_mma_512_64_h64", UNIT_ATTEND_MMA, true},
    {"attend_mma_512_0_h16", UNIT_ATTEND_MMA, true},
    {"attend_mma_512_0_h64", UNIT_ATTEND_MMA, true},
    {"attend_mma_256_0_h16", UNIT_ATTEND_MMA, true},
    {"attend_mma_256_0_h64", UNIT_ATTEND_MMA, true},
    {"attend_mma_combine", UNIT_ATTEND_MMA, false},
#if DSK_CUDA_HAS_SM90
    {"attend_sm90_512_64_h8", UNIT_ATTEND_SM90, true},
    {"attend_sm90_512_64_h16", UNIT_ATTEND_SM90, true},
    {"attend_sm90_512_64_h32", UNIT_ATTEND_SM90, true},
    {"attend_sm90_512_64_h64", UNIT_ATTEND_SM90, true},
    {"attend_sm90_512_0_h8", UNIT_ATTEND_SM90, true},
    {"attend_sm90_512_0_h16", UNIT_ATTEND_SM90, true},
    {"attend_sm90_512_0_h32", UNIT_ATTEND_SM90, true},
    {"attend_sm90_512_0_h64", UNIT_ATTEND_SM90, true},
    {"attend_sm90_256_0_h8", UNIT_ATTEND_SM90, true},
    {"attend_sm90_256_0_h16", UNIT_ATTEND_SM90, true},
    {"attend_sm90_256_0_h32", UNIT_ATTEND_SM90, true},
    {"attend_sm90_256_0_h64", UNIT_ATTEND_SM90, true},
    {"attend_sm90_merge_512_w1", UNIT_ATTEND_SM90, false},
    {"attend_sm90_merge_512_w8", UNIT_ATTEND_SM90, false},
    {"attend_sm90_merge_256_w1", UNIT_ATTEND_SM90, false},
    {"attend_sm90_merge_256_w8", UNIT_ATTEND_SM90, false},
#endif
};

#define N_IMAGES  ((int32_t)(sizeof(IMAGES) / sizeof(IMAGES[0])))
#define N_KERNELS ((int32_t)(sizeof(KERNELS) / sizeof(KERNELS[0])))
DSK_STATIC_ASSERT(sizeof(KERNELS) / sizeof(KERNELS[0]) <= GPU_MAX_FUNCTIONS, "kernels");

static int32_t find_kernel(const char *name)
{
    for (int32_t i = GPU_N_FUNCTIONS; i < N_KERNELS; i++) {
        if (strcmp(KERNELS[i].name, name) == 0)
            return i;
    }
    return -1;
}

/* ---- plans: portable --------------------------------------------------------------------- */

static uint32_t mma_shared_bytes(const struct dsk_layout *layout, uint32_t heads, uint32_t n_stages)
{
    return ATTEND_MMA_FIXED_BYTES(layout->d_qk, heads) + n_stages * ATTEND_MMA_STAGE_BYTES(layout->row_bytes);
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t round_up_64(int64_t n)
{
    return (n + 63) / 64 * 64;
}

/* As many splits as fill the device once, none shorter than two tiles; or, where bits may not depend on the batch, a
 * length that depends on the list alone. */
static void split(struct gpu_attend_plan *plan, const struct gpu_attend_shape *shape, int64_t n_blocks,
                  int64_t n_room)
{
    const int64_t most = INT32_MAX / 64 * 64;
    int64_t entries = ATTEND_MMA_INVARIANT_SPLIT;

    if ((shape->flags & DSK_ATTEND_BATCH_INVARIANT) == 0) {
        int64_t n =
            smaller(smaller(n_room / n_blocks, ATTEND_MMA_MAX_SPLITS), shape->topk / (2 * ATTEND_MMA_TILE));

        entries = round_up_64((shape->topk + (n < 1 ? 0 : n - 1)) / (n < 1 ? 1 : n));
    }
    while (shape->topk > ATTEND_MMA_MAX_SPLITS * entries)
        entries *= 2;
    plan->split_entries = (int32_t)smaller(entries, most);
    plan->n_splits = (int32_t)((shape->topk + plan->split_entries - 1) / plan->split_entries);
}

static uint32_t mma_heads(const struct gpu_props *props, const struct dsk_layout *layout, int32_t h_q)
{
    if (h_q <= 2 * ATTEND_MMA_FEW_HEADS
        || mma_shared_bytes(layout, ATTEND_MMA_MANY_HEADS, 1) > (uint32_t)props->shared_bytes_max)
        return ATTEND_MMA_FEW_HEADS;
    return ATTEND_MMA_MANY_HEADS;
}

static dsk_status plan_mma(const struct gpu_props *props, const struct gpu_attend_shape *shape,
                           struct gpu_attend_plan *plan, struct dsk_err *err)
{
    const struct dsk_layout *layout = dsk_layout_get(shape->layout);
    const uint32_t room = (uint32_t)props->shared_bytes_max, heads = mma_heads(props, layout, shape->h_q);
    const uint32_t n_stages = mma_shared_bytes(layout, heads, 2) <= room ? 2 : 1;
    const uint32_t bytes = mma_shared_bytes(layout, heads, n_stages);
    const uint32_t n_blocks = ((uint32_t)shape->h_q + heads - 1) / heads;
    const bool has_two = heads == ATTEND_MMA_FEW_HEADS && 2 * (bytes + 1024) <= room + 1024;
    char name[40];

    if (props->arch_major < 8)
        return dsk_fail(err, DSK_E_UNSUPPORTED, "device", props->arch_major * 10 + props->arch_minor,
                        "attend needs compute capability 8.0 or newer");
    if (bytes > room)
        return dsk_fail(err, DSK_E_UNSUPPORTED, "layout", shape->layout,
                        "attend needs %u bytes of shared memory, the device gives a block %u", bytes, room);
    split(plan, shape, (int64_t)shape->n_rows * n_blocks, (int64_t)props->n_units * (has_two ? 2 : 1));
    snprintf(name, sizeof(name), "attend_mma_%d_%d_h%u", layout->latent, layout->rope, heads);
    plan->main.function = find_kernel(name);
    plan->main.dims =
        (struct gpu_launch_dims){.grid = {(uint32_t)shape->n_rows, n_blocks, (uint32_t)plan->n_splits},
                                 .block = ATTEND_MMA_THREADS(heads),
                                 .shared_bytes = bytes,
                                 .is_dependent = props->arch_major == DEPENDENT_ARCH};
    plan->combine.function = -1;
    if (plan->n_splits == 1)
        return DSK_OK;
    plan->combine.function = find_kernel("attend_mma_combine");
    plan->combine.dims = (struct gpu_launch_dims){.grid = {(uint32_t)shape->n_rows, (uint32_t)shape->h_q, 1},
                                                  .block = ATTEND_MMA_COMBINE_THREADS};
    plan->part_ref_bytes = 4 * (uint64_t)shape->n_rows * (uint64_t)plan->n_splits;
    plan->part_lse_bytes = plan->part_ref_bytes * (uint64_t)shape->h_q;
    plan->part_out_bytes = plan->part_lse_bytes * (uint64_t)layout->d_v;
    return DSK_OK;
}

/* ---- plans: sm_90a ----------------------------------------------------------------------- */

#if DSK_CUDA_HAS_SM90

static struct gpu_attend_launch launch_of(const struct attend_sm90_launch *from)
{
    struct gpu_attend_launch launch = {.function = -1};

    if (from->name == NULL)
        return launch;
    launch.function = find_kernel(from->name);
    launch.dims = (struct gpu_launch_dims){.grid = {from->grid_x, from->grid_y, from->grid_z},
                                           .block = from->block,
                                           .shared_bytes = from->shared_bytes,
                                           .cluster = from->cluster,
                                           .is_dependent = from->is_dependent != 0};
    return launch;
}

static bool plan_sm90(const struct gpu_props *props, const struct gpu_attend_shape *shape,
                      struct gpu_attend_plan *plan)
{
    struct attend_sm90_plan from;

    if (props->arch_major != 9 || props->arch_minor != 0 || shape->topk > INT32_MAX
        || !attend_sm90_plan(shape->layout, shape->n_rows, shape->h_q, (int32_t)shape->topk, shape->out_dtype,
                             shape->flags, props->n_units, &from)
        || ((from.needs_aligned != 0 || from.kv_align > 8) && !shape->is_aligned))
        return false;
    plan->main = launch_of(&from.main);
    plan->combine = launch_of(&from.combine);
    if (plan->main.function < 0 || (from.combine.name != NULL && plan->combine.function < 0)
        || plan->main.dims.shared_bytes > (uint32_t)props->shared_bytes_max)
        return false;
    plan->n_splits = from.n_splits;
    plan->split_entries = from.split_entries;
    plan->part_out_bytes = from.part_out_bytes;
    plan->part_lse_bytes = from.part_lse_bytes;
    plan->part_ref_bytes = from.part_ref_bytes;
    return true;
}

#else

static bool plan_sm90(const struct gpu_props *props, const struct gpu_attend_shape *shape,
                      struct gpu_attend_plan *plan)
{
    (void)props;
    (void)shape;
    (void)plan;
    return false;
}

#endif

static dsk_status plan_attend(const struct gpu_props *props, const struct gpu_attend_shape *shape,
                              uint32_t flags, struct gpu_attend_plan *plan_p, struct dsk_err *err)
{
    memset(plan_p, 0, sizeof(*plan_p));
    if ((flags & DSK_DEVICE_PORTABLE) == 0 && plan_sm90(props, shape, plan_p))
        return DSK_OK;
    return plan_mma(props, shape, plan_p, err);
}

static const struct gpu_code CODE = {.images = IMAGES,
                                     .kernels = KERNELS,
                                     .n_images = N_IMAGES,
                                     .n_kernels = N_KERNELS,
                                     .wave = 32,
                                     .dependent_arch = DEPENDENT_ARCH,
                                     .upload_rows = GPU_UPLOAD_ROWS,
                                     .plan_attend = plan_attend};

#else

static const struct gpu_code CODE = {
    .missing = "this build has no CUDA device code: nvcc was not found when it was made"};

#endif

const struct gpu_code *dsk_gpu_code_cuda(void)
{
    return &CODE;
}
