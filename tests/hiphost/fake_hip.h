/* fake_hip.h - a HIP runtime for tests: libamdhip64.so.N with the entry points that dsk takes from one, on the CPU.
 *
 * Device memory is host memory between pages that nobody may touch. Streams are queues that run when somebody asks:
 * hipStreamQuery and hipEventQuery run one piece of work, waiting runs all, so what a caller gives a stream is used late
 * and buffers that are reused too early are found out. Modules are the code objects themselves: they must be ELF for
 * the device's architecture, and a kernel must be among their symbols, with room for its arguments. Launches run the same
 * kernel's source in the emulator (tests/hipemu). Graphs record nodes and replay copies of them. Handles are checked; one
 * that is not alive ends the process.
 *
 * Release 7 has hipMemGetHandleForAddressRange, release 6 the HSA function beneath it, release 5 neither, and only the
 * older properties. Environment: FAKE_HIP_DEVICES (1), FAKE_HIP_ARCH ("gfx942:sramecc+:xnack-"). One lock around each call. */
#ifndef TESTS_HIPHOST_FAKE_HIP_H
#define TESTS_HIPHOST_FAKE_HIP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_HIP_API __attribute__((visibility("default")))

/* What tests set and read. By dlsym: fake_hip_get. */
struct fake_hip {
    int n_devices; /* 0: hipInit says that there is none */
    char arch[64];
    int wave;
    const char *fail_call; /* the entry that is to fail; NULL: none */
    int fail_after;        /* calls of it that still succeed */
    int fail_result;
    int lost; /* the sticky result of every call; 0: none */

    /* counted */
    int64_t n_launches; /* kernels that ran */
    int64_t n_recorded; /* nodes */
    int64_t n_replays;
    int64_t n_late; /* pieces of work that were still queued when their stream was asked whether it is done */
    int64_t n_unpinned; /* copies to or from memory that is not pinned: those wait */
    /* alive */
    int n_blocks, n_pinned, n_streams, n_events, n_modules, n_graphs, n_execs, n_externals;
    char last_kernel[64];
    uint32_t last_grid[3], last_block;
};
typedef struct fake_hip *fake_hip_get_func(void);
FAKE_HIP_API struct fake_hip *fake_hip_get(void);

/* fake_hip_object.c: a code object as it lies in memory. */
struct fake_object {
    const uint8_t *bytes;
    const char *arch; /* NULL: none that is known here */
};
/* False: not one that a HIP runtime loads; *why says what is wrong. */
bool fake_object_read(struct fake_object *object, const void *bytes, const char **why_p);
/* Bytes of arguments that the kernel's descriptor speaks of, implicit ones included; -1: no such kernel. */
int64_t fake_object_kernel(const struct fake_object *object, const char *name);

/* fake_hip_props.c: fills the structure of the release that the name of the entry stands for. */
void fake_props_r0600(void *props, const struct fake_hip *state, int ordinal);
void fake_props_r0000(void *props, const struct fake_hip *state, int ordinal);

/* fake_hip_run.cpp: the emulator. Bytes of a kernel's one parameter, -1 where it has no such kernel. */
#ifdef __cplusplus
extern "C" {
#endif
int64_t fake_run_param_bytes(const char *arch, const char *kernel);
void fake_run(const char *arch, const char *kernel, const uint32_t grid[3], uint32_t block,
              uint32_t shared_bytes, const void *param);
#ifdef __cplusplus
}
#endif

#endif /* TESTS_HIPHOST_FAKE_HIP_H */
