/* gpu_kit.h - a GPU beside the kit's CPU, for tests. Without a device GPU_OPEN skips the test and says
 * why. Every failure aborts the test. Nothing forks: a driver does not survive that (test programs set
 * CK_FORK=no). */
#ifndef TESTS_KERNELS_GPU_KIT_H
#define TESTS_KERNELS_GPU_KIT_H

#include "kernels/gpu/gpu.h"
#include "kit.h"

#define GPU_MAX_BLOCKS 512

/* Programs on the fake HIP runtime, whose kernels an emulator runs, do the same with less. */
#ifdef GPU_KIT_FAKE_HIP
#define GPU_SIZE(real, emulated) (emulated)
#else
#define GPU_SIZE(real, emulated) (real)
#endif

struct gpu {
    struct kit kit;
    struct dsk_device *dev;
    struct dsk_stream *s;
    struct dsk_err err;
    int n_blocks;
    uint64_t blocks[GPU_MAX_BLOCKS];
};

/* Which devices the tests are for: by the environment variable DSA_TEST_GPU, cuda (also without it) or hip. */
int32_t gpu_kit_kind(void);

/* For programs that are linked with a fake HIP runtime: the tests are for its device. */
void gpu_kit_use_fake_hip(void);

/* flags: of the device. False: no device; g->err says why. */
bool gpu_open(struct gpu *g, uint32_t flags);
void gpu_close(struct gpu *g); /* and everything allocated */

#define GPU_OPEN(g, flags)                                                                                   \
    do {                                                                                                     \
        if (!gpu_open(g, flags))                                                                             \
            TEST_SKIP("%s", (g)->err.text);                                                                  \
    } while (0)

/* The same for tests of attend, which this build may have no kernel for. */
#define GPU_OPEN_ATTEND(g, flags)                                                                            \
    do {                                                                                                     \
        GPU_OPEN(g, flags);                                                                                  \
        if (!gpu_has_attend(g)) {                                                                            \
            gpu_close(g);                                                                                    \
            TEST_SKIP("%s", (g)->err.text);                                                                  \
        }                                                                                                    \
    } while (0)
bool gpu_has_attend(struct gpu *g);

void gpu_must(struct gpu *g, dsk_status status);

/* Device memory, freed by gpu_close. offset: bytes past an aligned address. Copies are over when the call
 * returns. */
uint64_t gpu_alloc(struct gpu *g, int64_t bytes);
uint64_t gpu_upload_at(struct gpu *g, const void *host, int64_t bytes, int offset);
uint64_t gpu_upload(struct gpu *g, const void *host, int64_t bytes); /* NULL gives 0 */
void gpu_download(struct gpu *g, void *host, uint64_t addr, int64_t bytes);

int64_t gpu_pool_bytes(const struct kit_pool *pool);
void gpu_expect_bytes(const void *got, const void *want, int64_t n, const char *what);

/* A kit_attend on the GPU. Addresses of what was uploaded stay in seg, so that a test can change one. */
struct gpu_case {
    struct kit_attend a;
    struct dsk_attend_seg seg;
    struct dsk_attend_args args;
    int64_t out_bytes, lse_bytes;
    uint8_t *out;
    float *lse;
    uint32_t *n_bad;
};

/* Uploads what r->a names; q starts offset bytes past an aligned address. */
void gpu_case_init(struct gpu *g, struct gpu_case *r, int offset);
void gpu_case_launch(struct gpu *g, struct gpu_case *r); /* over outputs filled with junk; does not wait */
void gpu_case_fetch(struct gpu *g, struct gpu_case *r);
/* The fetched results against float64 over what r->a says. */
void gpu_case_compare(struct gpu *g, struct gpu_case *r, const char *extra);

/* Random queries and indices (some of them -1) over the pool. */
struct kit_attend gpu_shape(struct gpu *g, struct kit_pool *pool, int n_rows, int h_q, int topk);

#endif /* TESTS_KERNELS_GPU_KIT_H */
