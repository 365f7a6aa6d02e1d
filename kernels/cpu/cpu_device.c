/* cpu_device.c - opening a CPU device, its table of operations, memory, streams and events.
 * Streams run everything to its end at once, so sync has nothing to wait for and events are always done. */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cpu.h"

#define ALIGNMENT      256u
#define HUGE_PAGE      ((uint64_t)2 << 20)
#define WAVE_CHUNKS    16 /* at least; two for each thread where there are more */
#define N_THREADS_AUTO 1024

/* ---- memory ------------------------------------------------------------------------------ */

void *dsk_cpu_alloc(uint64_t bytes)
{
    uint64_t align = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : ALIGNMENT;

    if (bytes > (uint64_t)PTRDIFF_MAX - align)
        return NULL;
    bytes = bytes == 0 ? align : (bytes + align - 1) / align * align;
    void *block = aligned_alloc(align, bytes);
    if (block != NULL && align == HUGE_PAGE)
        (void)madvise(block, bytes, MADV_HUGEPAGE); /* a wish: kernels without huge pages refuse it */
    return block;
}

static dsk_status mem_alloc(struct dsk_device *dev, uint64_t bytes, uint64_t *addr_p)
{
    void *block = dsk_cpu_alloc(bytes);

    (void)dev;
    if (block == NULL)
        return DSK_E_NO_MEMORY;
    *addr_p = (uint64_t)(uintptr_t)block;
    return DSK_OK;
}

static void mem_free(struct dsk_device *dev, uint64_t addr)
{
    (void)dev;
    free(dsk_cpu_ptr(addr));
}

/* What the kernel could still give, page cache included. */
static dsk_status mem_usage(struct dsk_device *dev, uint64_t *used_p, uint64_t *free_p)
{
    unsigned long long total = 0, available = 0, n;
    FILE *file = fopen("/proc/meminfo", "r");
    char line[128];

    (void)dev;
    if (file == NULL)
        return DSK_E_UNSUPPORTED;
    while (fgets(line, sizeof(line), file) != NULL) {
        if (sscanf(line, "MemTotal: %llu kB", &n) == 1)
            total = n;
        else if (sscanf(line, "MemAvailable: %llu kB", &n) == 1)
            available = n;
    }
    (void)fclose(file);
    if (total == 0 || available > total)
        return DSK_E_UNSUPPORTED;
    *used_p = (uint64_t)(total - available) * 1024;
    *free_p = (uint64_t)available * 1024;
    return DSK_OK;
}

static dsk_status host_register(struct dsk_device *dev, void *host, uint64_t bytes, uint64_t *addr_p)
{
    (void)dev;
    (void)bytes;
    *addr_p = (uint64_t)(uintptr_t)host;
    return DSK_OK;
}

static void host_unregister(struct dsk_device *dev, void *host)
{
    (void)dev;
    (void)host;
}

/* ---- streams and events ------------------------------------------------------------------ */

static dsk_status stream_create(struct dsk_device *dev, struct dsk_stream **stream_p)
{
    struct dsk_stream *stream = dsk_cpu_alloc(sizeof(*stream));

    if (stream == NULL)
        return DSK_E_NO_MEMORY;
    stream->dev = dev;
    *stream_p = stream;
    return DSK_OK;
}

static void stream_destroy(struct dsk_stream *stream)
{
    free(stream);
}

static dsk_status stream_sync(struct dsk_stream *stream)
{
    (void)stream;
    return DSK_OK;
}

static dsk_status event_create(struct dsk_device *dev, struct dsk_event **event_p)
{
    struct dsk_event *event = dsk_cpu_alloc(sizeof(*event));

    if (event == NULL)
        return DSK_E_NO_MEMORY;
    event->dev = dev;
    *event_p = event;
    return DSK_OK;
}

static void event_destroy(struct dsk_event *event)
{
    free(event);
}

static dsk_status event_record(struct dsk_event *event, struct dsk_stream *stream)
{
    (void)event;
    (void)stream;
    return DSK_OK;
}

static dsk_status event_is_done(struct dsk_event *event, bool *done_p)
{
    (void)event;
    *done_p = true;
    return DSK_OK;
}

static dsk_status copy_in(struct dsk_stream *s, uint64_t dst, const void *src, uint64_t bytes)
{
    (void)s;
    memmove(dsk_cpu_ptr(dst), src, bytes);
    return DSK_OK;
}

static dsk_status copy_out(struct dsk_stream *s, void *dst, uint64_t src, uint64_t bytes)
{
    (void)s;
    memmove(dst, dsk_cpu_ptr(src), bytes);
    return DSK_OK;
}

static dsk_status mem_set(struct dsk_stream *s, uint64_t dst, uint8_t byte, uint64_t bytes)
{
    (void)s;
    memset(dsk_cpu_ptr(dst), byte, bytes);
    return DSK_OK;
}

/* ---- open and close ---------------------------------------------------------------------- */

/* Every layout and every shape that passes the argument checks is served. */
static bool supports(const struct dsk_device *dev, const struct dsk_attend_shape *shape, struct dsk_err *err)
{
    (void)dev;
    (void)shape;
    (void)err;
    return true;
}

static void close_device(struct dsk_device *dev)
{
    struct cpu_device *cpu = (struct cpu_device *)dev;

    dsk_cpu_team_destroy(cpu->team);
    free(cpu->chunks);
    free(cpu->workers);
    free(cpu);
}

static void graph_counts(const struct dsk_stream *stream, uint64_t *n_hits_p, uint64_t *n_misses_p)
{
    (void)stream;
    *n_hits_p = *n_misses_p = 0;
}

static const struct dsk_op_table CPU_OPS = {
    .close = close_device,
    .mem_alloc = mem_alloc,
    .mem_free = mem_free,
    .mem_usage = mem_usage,
    .host_register = host_register,
    .host_unregister = host_unregister,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_sync = stream_sync,
    .graph_counts = graph_counts,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_is_done = event_is_done,
    .copy_in = copy_in,
    .copy_out = copy_out,
    .mem_set = mem_set,
    .append = dsk_cpu_append,
    .read = dsk_cpu_read,
    .gather = dsk_cpu_gather,
    .map = dsk_cpu_map,
    .attend = dsk_cpu_attend,
    .merge = dsk_cpu_merge,
    .copy_rows = dsk_cpu_copy_rows,
    .supports = supports,
};

/* NULL if the processor or the build lacks it. */
static const struct cpu_isa *find_isa(int32_t isa)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                      && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    bool has_bf16 =
        has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");

    if (has_bf16 && (isa == DSK_ISA_AUTO || isa == DSK_ISA_AVX512_BF16))
        return &dsk_cpu_isa_avx512_bf16;
    if (has_avx512 && (isa == DSK_ISA_AUTO || isa == DSK_ISA_AVX512))
        return &dsk_cpu_isa_avx512;
    if (has_avx2 && (isa == DSK_ISA_AUTO || isa == DSK_ISA_AVX2))
        return &dsk_cpu_isa_avx2;
#endif
    return isa == DSK_ISA_AUTO || isa == DSK_ISA_GENERIC ? &dsk_cpu_isa_generic : NULL;
}

static int count_processors(void)
{
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof(set), &set) == 0)
        return CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN); /* more processors than cpu_set_t has room for */
    return n < 1 ? 1 : (int)(n > N_THREADS_AUTO ? N_THREADS_AUTO : n);
}

static void fill_info(struct cpu_device *cpu, int32_t n_threads)
{
    struct dsk_device_info *info = &cpu->base.info;
    long n_pages = sysconf(_SC_PHYS_PAGES);
    long page_bytes = sysconf(_SC_PAGESIZE);

    memset(info, 0, sizeof(*info));
    info->kind = DSK_DEVICE_CPU;
    info->n_threads = n_threads;
    snprintf(info->name, sizeof(info->name), "cpu %s", cpu->isa->name);
    snprintf(info->uuid, sizeof(info->uuid), "CPU-0");
    snprintf(info->arch, sizeof(info->arch), "%s", cpu->isa->name);
    info->memory_bytes = n_pages > 0 && page_bytes > 0 ? (uint64_t)n_pages * (uint64_t)page_bytes : 0;
}

/* Scratch is zeroed: lanes past the last head are computed along and must not hold signalling junk. */
static void *alloc_zeroed(uint64_t bytes)
{
    void *block = dsk_cpu_alloc(bytes);

    if (block != NULL)
        memset(block, 0, bytes);
    return block;
}

dsk_status dsk_cpu_open(const struct dsk_device_config *config, struct dsk_device **dev_p,
                        struct dsk_err *err)
{
    if (config->ordinal != 0)
        return dsk_fail(err, DSK_E_NO_DEVICE, "ordinal", config->ordinal, "there is one CPU device: 0");
    const struct cpu_isa *isa = find_isa(config->isa);
    if (isa == NULL)
        return dsk_fail(err, DSK_E_UNSUPPORTED, "isa", config->isa,
                        "the processor lacks this instruction set");
    if (config->isa == DSK_ISA_AUTO && isa == &dsk_cpu_isa_generic)
        dsk_log(1, "cpu device runs portable code: the processor has no AVX2");

    int32_t n_threads = config->n_threads > 0 ? config->n_threads : count_processors();
    struct cpu_device *cpu = dsk_cpu_alloc(sizeof(*cpu));
    if (cpu == NULL)
        return dsk_fail(err, DSK_E_NO_MEMORY, "n_threads", n_threads, "no memory for the device");
    memset(cpu, 0, sizeof(*cpu));
    cpu->base.ops = &CPU_OPS;
    cpu->isa = isa;
    cpu->n_chunks = 2 * n_threads > WAVE_CHUNKS ? 2 * n_threads : WAVE_CHUNKS;
    fill_info(cpu, n_threads);

    cpu->workers = alloc_zeroed((uint64_t)n_threads * sizeof(*cpu->workers));
    if (cpu->workers == NULL)
        goto free_device;
    cpu->chunks = alloc_zeroed((uint64_t)cpu->n_chunks * sizeof(*cpu->chunks));
    if (cpu->chunks == NULL)
        goto free_device;
    if (dsk_cpu_team_create(n_threads, &cpu->team) != DSK_OK)
        goto free_device;
    *dev_p = &cpu->base;
    return DSK_OK;

free_device: /* what is not there yet is NULL */
    close_device(&cpu->base);
    return dsk_fail(err, DSK_E_NO_MEMORY, "n_threads", n_threads, "no memory for scratch or threads");
}
