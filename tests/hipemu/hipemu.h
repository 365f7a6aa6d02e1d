/* hipemu.h - runs the HIP kernels of kernels/hip on the CPU, for their numbers and for their mistakes.
 *
 * Included before a kernel source that is compiled as C++17, it provides what device.hiph otherwise takes from clang's
 * HIP mode: the kernel macro (which registers the kernel under its name and the emulated chip), LDS, and the AMD builtins
 * that the kernels use. Every work item is a fiber; the lanes of a wave of 64 meet at cross-lane operations and matrix
 * instructions, the waves of a block at barriers. Blocks run one after another.
 *
 * Found and reported, then abort(): lanes of one wave at different cross-lane operations, or at the same one a different
 * number of times; a matrix instruction without all 64 lanes; reading a lane that has left; a barrier that some threads of
 * the block never reach; LDS beyond the chip's; more threads than the kernel's bound; kernel parameters that the launch
 * does not give. LDS is filled with a pattern before each block, and the pattern, the order of the waves and that of the
 * lanes alternate from launch to launch (or are fixed by hipemu_configure), so that results which depend on LDS nobody
 * wrote, or on an order nobody asked for, differ between repeats. Asynchronous copies to LDS arrive at the wait, not
 * before; until then their place holds the pattern.
 *
 * Not modelled: races between waves within a barrier interval beyond those orders, other waits, denormal modes, the
 * hardware's order of additions inside a matrix instruction, time. Launches may come from any thread, one at a time. */
#ifndef TESTS_HIPEMU_H
#define TESTS_HIPEMU_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define HIPEMU      1
#define HIPEMU_WAVE 64

struct hipemu_kernel {
    const char *target; /* "gfx942" */
    const char *name;
    uint32_t max_threads;
    uint32_t param_bytes;
    void (*body)(const void *param);
    const struct hipemu_kernel *next;
};

struct hipemu_config {
    int order;   /* 0: alternate, 1: first wave and lane first, 2: last first */
    int pattern; /* of LDS; -1: alternate */
    uint64_t n_blocks, n_collectives, n_matrix; /* counted */
};

const struct hipemu_kernel *hipemu_find(const char *target, const char *name); /* NULL: none */
struct hipemu_config *hipemu_configure(void);

/* Runs the blocks of a grid. shared_bytes: what the launch asks for beside the kernel's own variables; LDS_BYTES: what the
 * chip has for a block. Returns when all have run. */
void hipemu_launch(const struct hipemu_kernel *kernel, const uint32_t grid[3], uint32_t block,
                   uint32_t shared_bytes, const void *param);

/* Numbers, for tests. is_fnuz: gfx942's e4m3. */
float hipemu_fp8_to_f32(uint8_t byte, bool is_fnuz);
uint8_t hipemu_fp8_from_f32(float x, bool is_fnuz); /* nearest even; out of range: NaN */

namespace hipemu
{

enum form { WAVE_ANY, WAVE_FULL, BLOCK };
struct wave;

struct operation {
    const char *name;
    const char *file;
    int line;
    form kind;
    void (*run)(wave &w, const int *imm);
    int imm[4];
};

struct registration {
    registration(hipemu_kernel *kernel);
};

/* One call site's operation by the calling lane: operands in, result out, once all lanes of the wave are there. */
void meet(const operation *op, const void *a, const void *b, const void *c, void *out);

unsigned thread();
unsigned block(int axis);
const void *implicit_arguments();
void *lds(const void *site, size_t bytes); /* the place of one variable in the block's LDS */
void copy_async(const void *from, void *to, unsigned bytes);
void wait_async();
[[noreturn]] void fail(const char *what);

/* operations */
void run_nothing(wave &w, const int *imm);
void run_index(wave &w, const int *imm);   /* out = a of lane b */
void run_swizzle(wave &w, const int *imm); /* imm: offset */
void run_dpp(wave &w,
             const int *imm); /* a: value, b: old; imm: control, row mask, bank mask, bound control */
void run_ballot(wave &w, const int *imm);
void run_matrix(wave &w, const int *imm); /* imm: rows, depth, kind */
enum matrix_kind { MATRIX_FP8, MATRIX_BF16, MATRIX_F8F6F4 };

/* conversions of the emulated chip; the chip is the translation unit's */
float from_fp8(uint8_t byte, bool is_fnuz);
uint32_t to_fp8_pair(float lo, float hi, uint32_t old, bool is_high, bool is_fnuz);
uint32_t to_bf16_pair(float lo, float hi); /* nearest even */

template <class T> struct bare_of {
    typedef T type;
};
template <class T> struct bare_of<const T> {
    typedef T type;
};

template <class T, class A> inline T meet_as(const operation *op, const A &a)
{
    T out{};
    meet(op, &a, nullptr, nullptr, &out);
    return out;
}

template <class T, class A, class B> inline T meet_as(const operation *op, const A &a, const B &b)
{
    T out{};
    meet(op, &a, &b, nullptr, &out);
    return out;
}

template <class T, class A, class B, class C>
inline T meet_as(const operation *op, const A &a, const B &b, const C &c)
{
    T out{};
    meet(op, &a, &b, &c, &out);
    return out;
}

template <class T> inline T fetch_add(T *p, T x)
{
    T old = *p;
    *p = (T)(old + x);
    return old;
}

template <class T> inline T fetch_min(T *p, T x)
{
    T old = *p;
    *p = x < old ? x : old;
    return old;
}

typedef float pair __attribute__((vector_size(8)));

} // namespace hipemu

#if defined(__gfx950__)
#define HIPEMU_TARGET "gfx950"
#define HIPEMU_FNUZ   false
#elif defined(__gfx942__)
#define HIPEMU_TARGET "gfx942"
#define HIPEMU_FNUZ   true
#else
#define HIPEMU_TARGET ""
#define HIPEMU_FNUZ   false
#endif

/* ---- what device.hiph takes from clang's HIP mode ------------------------------------------- */

#define DEV static inline __attribute__((always_inline, unused))
#define GLOBAL
#define SHARED(type, name)                                                                                   \
    static char hipemu_site_##name;                                                                          \
    type &name = *(type *)hipemu::lds(&hipemu_site_##name, sizeof(type))
#define SHARED_BYTES(name, bytes)                                                                            \
    static char hipemu_site_##name;                                                                          \
    uint8_t *const name = (uint8_t *)hipemu::lds(&hipemu_site_##name, bytes)

#define KERNEL(threads, waves, kernel_name, type, param)                                                     \
    static void hipemu_body_##kernel_name(type param);                                                       \
    static hipemu_kernel hipemu_kernel_##kernel_name = {HIPEMU_TARGET,                                       \
                                                        #kernel_name,                                        \
                                                        threads,                                             \
                                                        sizeof(type),                                        \
                                                        [](const void *from) {                               \
                                                            type value;                                      \
                                                            memcpy((void *)&value, from, sizeof(value));     \
                                                            hipemu_body_##kernel_name(value);                \
                                                        },                                                   \
                                                        nullptr};                                            \
    static hipemu::registration hipemu_registration_##kernel_name(&hipemu_kernel_##kernel_name);             \
    static void hipemu_body_##kernel_name(type param)

/* A call site: its operation is one object, so lanes that meet can be asked whether they mean the same one. */
#define HIPEMU_OP(name, kind, run, ...)                                                                      \
    ([](const char *hipemu_file) -> const hipemu::operation * {                                              \
        static const hipemu::operation op = {name,         hipemu_file, __LINE__,                            \
                                             hipemu::kind, hipemu::run, {__VA_ARGS__}};                      \
        return &op;                                                                                          \
    }(__FILE__))

#define __builtin_amdgcn_workitem_id_x()     hipemu::thread()
#define __builtin_amdgcn_workgroup_id_x()    hipemu::block(0)
#define __builtin_amdgcn_workgroup_id_y()    hipemu::block(1)
#define __builtin_amdgcn_workgroup_id_z()    hipemu::block(2)
#define __builtin_amdgcn_implicitarg_ptr()   hipemu::implicit_arguments()
#define __builtin_amdgcn_fence(order, scope) ((void)0)
#define __builtin_amdgcn_s_setprio(n)        ((void)0)
#define __builtin_amdgcn_sched_barrier(n)    ((void)0)
#define __builtin_amdgcn_s_waitcnt(n)        hipemu::wait_async()
#define __builtin_amdgcn_s_barrier()                                                                         \
    hipemu::meet(HIPEMU_OP("s_barrier", BLOCK, run_nothing, 0), nullptr, nullptr, nullptr, nullptr)
#define __builtin_amdgcn_wave_barrier()                                                                      \
    hipemu::meet(HIPEMU_OP("wave_barrier", WAVE_ANY, run_nothing, 0), nullptr, nullptr, nullptr, nullptr)
#define __builtin_trap() hipemu::fail("trap")

#define __builtin_amdgcn_ds_bpermute(byte, value)                                                            \
    hipemu::meet_as<int>(HIPEMU_OP("ds_bpermute", WAVE_ANY, run_index, 0), (int)(value), (int)(byte) / 4 & 63)
#define __builtin_amdgcn_readlane(value, from)                                                               \
    hipemu::meet_as<int>(HIPEMU_OP("readlane", WAVE_ANY, run_index, 0), (int)(value), (int)(from)&63)
#define __builtin_amdgcn_readfirstlane(value)                                                                \
    hipemu::meet_as<int>(HIPEMU_OP("readfirstlane", WAVE_ANY, run_index, 0), (int)(value), -1)
#define __builtin_amdgcn_ds_swizzle(value, offset)                                                           \
    hipemu::meet_as<int>(HIPEMU_OP("ds_swizzle", WAVE_ANY, run_swizzle, offset), (int)(value))
#define __builtin_amdgcn_update_dpp(old, value, control, rows, banks, bound)                                 \
    hipemu::meet_as<int>(HIPEMU_OP("dpp", WAVE_ANY, run_dpp, control, rows, banks, bound), (int)(value),     \
                         (int)(old))
#define __builtin_amdgcn_ballot_w64(is)                                                                      \
    hipemu::meet_as<uint64_t>(HIPEMU_OP("ballot", WAVE_ANY, run_ballot, 0), (int)!!(is))

#define HIPEMU_MATRIX(name, rows, depth, kind, a, b, c)                                                      \
    hipemu::meet_as<hipemu::bare_of<__typeof__(c)>::type>(                                                   \
        HIPEMU_OP(name, WAVE_FULL, run_matrix, rows, depth, hipemu::kind, HIPEMU_FNUZ), a, b, c)
#define __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, x, y, z)                                          \
    HIPEMU_MATRIX("mfma_16x16x16bf16_1k", 16, 16, MATRIX_BF16, a, b, c)
#define __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, b, c, x, y, z)                                           \
    HIPEMU_MATRIX("mfma_32x32x8bf16_1k", 32, 8, MATRIX_BF16, a, b, c)
#define __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(a, b, c, x, y, z)                                         \
    HIPEMU_MATRIX("mfma_16x16x32_fp8_fp8", 16, 32, MATRIX_FP8, a, b, c)
#define __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(a, b, c, x, y, z)                                         \
    HIPEMU_MATRIX("mfma_32x32x16_fp8_fp8", 32, 16, MATRIX_FP8, a, b, c)
#define __builtin_amdgcn_mfma_f32_16x16x32_bf16(a, b, c, x, y, z)                                            \
    HIPEMU_MATRIX("mfma_16x16x32_bf16", 16, 32, MATRIX_BF16, a, b, c)
#define __builtin_amdgcn_mfma_f32_32x32x16_bf16(a, b, c, x, y, z)                                            \
    HIPEMU_MATRIX("mfma_32x32x16_bf16", 32, 16, MATRIX_BF16, a, b, c)
/* Unscaled form alone: both formats e4m3 (0), both scales constant 0, which makes it the instruction without scales. */
#define __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, c, fa, fb, oa, sa, ob, sb)                    \
    HIPEMU_MATRIX("mfma_scale_16x16x128_f8f6f4", 16, 128, MATRIX_F8F6F4, a, b, c)
#define __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, b, c, fa, fb, oa, sa, ob, sb)                     \
    HIPEMU_MATRIX("mfma_scale_32x32x64_f8f6f4", 32, 64, MATRIX_F8F6F4, a, b, c)

#define __builtin_amdgcn_cvt_pk_f32_fp8(word, is_high)                                                       \
    (hipemu::pair{hipemu::from_fp8((uint8_t)((uint32_t)(word) >> ((is_high) ? 16 : 0)), HIPEMU_FNUZ),        \
                  hipemu::from_fp8((uint8_t)((uint32_t)(word) >> ((is_high) ? 24 : 8)), HIPEMU_FNUZ)})
/* Two bf16 in a word; the scale is a power of two. gfx950 alone has it. */
#define __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(word, scale, is_high)                                      \
    hipemu::to_bf16_pair(                                                                                    \
        hipemu::from_fp8((uint8_t)((uint32_t)(word) >> ((is_high) ? 16 : 0)), false) * (scale),              \
        hipemu::from_fp8((uint8_t)((uint32_t)(word) >> ((is_high) ? 24 : 8)), false) * (scale))
#define __builtin_amdgcn_cvt_pk_fp8_f32(lo, hi, old, is_high)                                                \
    ((int)hipemu::to_fp8_pair(lo, hi, (uint32_t)(old), is_high, HIPEMU_FNUZ))
#define __builtin_amdgcn_global_load_lds(from, to, bytes, offset, aux) hipemu::copy_async(from, to, bytes)

static inline float hipemu_exp2f(float x)
{
    return __builtin_exp2f(x);
}
static inline float hipemu_log2f(float x)
{
    return __builtin_log2f(x);
}
#define __builtin_amdgcn_exp2f(x) hipemu_exp2f(x)
#define __builtin_amdgcn_logf(x)  hipemu_log2f(x)
static inline uint32_t hipemu_perm(uint32_t hi, uint32_t lo, uint32_t select)
{
    uint32_t out = 0;
    const uint64_t both = (uint64_t)hi << 32 | lo;

    for (int i = 0; i < 4; i++) {
        const uint32_t from = select >> (8 * i) & 0xffu;

        if (from > 7) /* sign and constant selectors are not used here */
            hipemu::fail("v_perm selector");
        out |= (uint32_t)(both >> (8 * from) & 0xffu) << (8 * i);
    }
    return out;
}
#define __builtin_amdgcn_perm(hi, lo, select) hipemu_perm(hi, lo, select)

#define __HIP_MEMORY_SCOPE_WORKGROUP               3
#define __HIP_MEMORY_SCOPE_AGENT                   4
#define __hip_atomic_load(p, order, scope)         (*(p))
#define __hip_atomic_fetch_add(p, x, order, scope) hipemu::fetch_add(p, x)
#define __hip_atomic_fetch_min(p, x, order, scope) hipemu::fetch_min(p, x)

#endif /* TESTS_HIPEMU_H */
