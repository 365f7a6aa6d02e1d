/* The HIP backend's host code against fake runtimes: which library and device it takes and which it refuses, how it says so,
 * what it gives back, graphs, memory between processes, and errors in the middle. What the kernels compute through it:
 * hip_gpu. Each test is a process of its own, since a runtime that was loaded stays. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake_hip.h"
#include "gpu_kit.h"

static const char *const LIBRARIES[] = {[5] = FAKE_HIP_5, [6] = FAKE_HIP_6, [7] = FAKE_HIP_7};

/* The runtime under the name that opening it by name looks for: one that is loaded is found by that. */
static struct fake_hip *load(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    fake_hip_get_func *get = NULL;

    KIT_EXPECT(library != NULL, "%s", dlerror());
    *(void **)&get = dlsym(library, "fake_hip_get");
    ck_assert_ptr_nonnull(get);
    return get();
}

static dsk_status open_hip(int32_t ordinal, struct dsk_device **dev_p, struct dsk_err *err)
{
    const struct dsk_device_config config = {.kind = DSK_DEVICE_HIP, .ordinal = ordinal};

    *dev_p = NULL;
    return dsk_device_open(&config, dev_p, err);
}

static void expect_refusal(dsk_status want, const char *field, const char *const *words)
{
    struct dsk_device *dev;
    struct dsk_err err = {.status = DSK_OK};

    ck_assert_int_eq(open_hip(0, &dev, &err), want);
    ck_assert_ptr_null(dev);
    ck_assert_int_eq(err.status, want);
    ck_assert_str_eq(err.field, field);
    for (int i = 0; words[i] != NULL; i++)
        KIT_EXPECT(strstr(err.text, words[i]) != NULL, "\"%s\" does not say %s", err.text, words[i]);
}

static void expect_nothing_left(const struct fake_hip *fake)
{
    ck_assert_int_eq(fake->n_blocks, 0);
    ck_assert_int_eq(fake->n_pinned, 0);
    ck_assert_int_eq(fake->n_streams, 0);
    ck_assert_int_eq(fake->n_events, 0);
    ck_assert_int_eq(fake->n_modules, 0);
    ck_assert_int_eq(fake->n_graphs, 0);
    ck_assert_int_eq(fake->n_execs, 0);
    ck_assert_int_eq(fake->n_externals, 0);
}

static void must(struct dsk_err *err, dsk_status status)
{
    KIT_EXPECT(status == DSK_OK, "%s: %s = %s: %s", dsk_status_name(status), err->field, err->value,
               err->text);
}

/* ---- the library -------------------------------------------------------------------------------- */

static bool has_runtime(void)
{
    static const char *const names[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"};

    for (int i = 0; i < 3; i++) {
        if (dlopen(names[i], RTLD_LAZY | RTLD_LOCAL) != NULL)
            return true;
    }
    return false;
}

START_TEST(without_a_runtime_it_says_which)
{
    if (has_runtime())
        TEST_SKIP("this machine has a HIP runtime");
    expect_refusal(DSK_E_NO_DEVICE, "kind",
                   (const char *[]){"ROCm", "libamdhip64.so.7, .6 or .5", "cannot open", NULL});
}
END_TEST

START_TEST(without_a_device_it_says_so)
{
    struct fake_hip *fake = load(LIBRARIES[_i]);

    fake->n_devices = 0;
    expect_refusal(DSK_E_NO_DEVICE, "kind",
                   (const char *[]){"no ROCm-capable device", "libamdhip64.so", NULL});
    expect_nothing_left(fake);
}
END_TEST

START_TEST(a_missing_symbol_is_named)
{
    (void)load(FAKE_HIP_BROKEN);
    if (dlopen("libamdhip64.so.7", RTLD_LAZY | RTLD_LOCAL) != NULL)
        TEST_SKIP("this machine has a HIP runtime");
    expect_refusal(DSK_E_NO_DEVICE, "kind",
                   (const char *[]){"libamdhip64.so.6", "lacks hipStreamBeginCapture", NULL});
}
END_TEST

START_TEST(the_newest_runtime_is_taken)
{
    struct fake_hip *old = load(LIBRARIES[5]), *new = load(LIBRARIES[7]);
    struct dsk_device *dev;
    struct dsk_err err;

    old->n_devices = 0;
    must(&err, open_hip(0, &dev, &err));
    ck_assert_str_eq(((struct gpu_device *)dev)->driver.library_name, "libamdhip64.so.7");
    ck_assert_int_gt(new->n_modules, 0);
    dsk_device_close(dev);
    expect_nothing_left(new);
}
END_TEST

/* ---- the device --------------------------------------------------------------------------------- */

START_TEST(an_architecture_without_code_is_named_with_those_that_have)
{
    static const char *const archs[] = {
        "gfx90a:sramecc+:xnack-", "gfx9-4-generic", "gfx94", "gfx9421", "gfx1100", ""};
    struct fake_hip *fake = load(LIBRARIES[7]);
    char name[16];

    snprintf(fake->arch, sizeof(fake->arch), "%s", archs[_i]);
    snprintf(name, sizeof(name), "%.*s", (int)strcspn(archs[_i], ":"), archs[_i]);
    expect_refusal(DSK_E_UNSUPPORTED, "ordinal",
                   (const char *[]){"Fake Instinct 0", name, "gfx942, gfx950", NULL});
    expect_nothing_left(fake);
}
END_TEST

START_TEST(waves_of_another_width_are_refused)
{
    struct fake_hip *fake = load(LIBRARIES[7]);

    fake->wave = 32;
    expect_refusal(DSK_E_UNSUPPORTED, "ordinal", (const char *[]){"32", "64", NULL});
    expect_nothing_left(fake);
}
END_TEST

/* Both properties structures, by the name of the function that fills it, and features behind the architecture's name. */
START_TEST(a_device_is_known_by_its_properties)
{
    static const char *const archs[] = {"gfx942", "gfx942:sramecc+:xnack-", "gfx950:sramecc+:xnack+"};
    struct fake_hip *fake = load(LIBRARIES[5 + _i / 3]);
    const char *arch = archs[_i % 3];
    const bool is_950 = strncmp(arch, "gfx950", 6) == 0;
    struct dsk_device *devs[2], *none;
    struct dsk_err err;
    const struct dsk_device_info *info;
    const struct gpu_props *props;

    fake->n_devices = 2;
    snprintf(fake->arch, sizeof(fake->arch), "%s", arch);
    for (int32_t i = 0; i < 2; i++)
        must(&err, open_hip(i, &devs[i], &err));
    info = dsk_device_get_info(devs[1]);
    props = &((struct gpu_device *)devs[1])->props;
    ck_assert_int_eq(info->kind, DSK_DEVICE_HIP);
    ck_assert_str_eq(info->name, "Fake Instinct 1");
    ck_assert_str_eq(info->arch, is_950 ? "gfx950" : "gfx942");
    ck_assert_uint_eq(info->memory_bytes, (uint64_t)192 << 30);
    ck_assert_uint_eq(strlen(info->uuid), strlen("GPU-00000000-0000-0000-0000-000000000000"));
    ck_assert_str_ne(info->uuid, dsk_device_get_info(devs[0])->uuid);
    ck_assert_int_eq(props->arch_major, 9);
    ck_assert_int_eq(props->arch_minor, is_950 ? 0x50 : 0x42);
    ck_assert_int_eq(props->n_units, 304);
    ck_assert_int_eq(props->wave, 64);
    ck_assert_int_eq(props->cache_bytes, 4 << 20);
    ck_assert_int_eq(props->shared_bytes_max, is_950 ? 160 << 10 : 64 << 10);
    ck_assert_int_eq(open_hip(2, &none, &err), DSK_E_NO_DEVICE);
    ck_assert_str_eq(err.field, "ordinal");
    ck_assert_str_eq(err.text, "this machine has 2 devices of this kind");
    dsk_device_close(devs[0]);
    dsk_device_close(devs[1]);
    expect_nothing_left(fake);
}
END_TEST

/* Every kernel that the host names is in the code object of the device's architecture, and in no other device's. */
START_TEST(each_architecture_gets_its_own_code)
{
    const struct gpu_code *code = dsk_gpu_code_hip();
    struct fake_hip *fake = load(LIBRARIES[7]);
    struct dsk_device *dev;
    struct dsk_err err;
    int n_mine = 0;

    snprintf(fake->arch, sizeof(fake->arch), "%s", _i == 0 ? "gfx942" : "gfx950");
    must(&err, open_hip(0, &dev, &err));
    const struct gpu_device *gpu = (struct gpu_device *)dev;
    for (int32_t i = 0; i < code->n_kernels; i++)
        KIT_EXPECT((gpu->functions[i] != NULL) == (code->kernels[i].name != NULL), "kernel %d", i);
    for (int32_t i = 0; i < code->n_images; i++) {
        bool is_mine = strcmp(code->images[i].arch, fake->arch) == 0;
        void *module = NULL;
        int result = gpu->driver.module_load(&gpu->driver, code->images[i].bytes, &module);

        ck_assert_int_eq(result, is_mine ? 0 : 209);
        ck_assert_int_eq(gpu->driver.classify(result), is_mine ? GPU_OK : GPU_BAD_VALUE);
        if (is_mine)
            ck_assert_int_eq(gpu->driver.module_unload(&gpu->driver, module), 0);
        n_mine += is_mine;
    }
    ck_assert_int_gt(n_mine, 0);
    ck_assert_int_eq(n_mine, fake->n_modules);
    ck_assert_int_eq(2 * n_mine, code->n_images);
    dsk_device_close(dev);
    expect_nothing_left(fake);
}
END_TEST

/* ---- opening that fails ------------------------------------------------------------------------- */

START_TEST(what_fails_while_opening_leaves_nothing_behind)
{
    static const struct {
        const char *call;
        int after, result;
        dsk_status want;
        const char *field;
    } cases[] = {{"hipInit", 0, 3, DSK_E_NO_DEVICE, "kind"},
                 {"hipGetDeviceCount", 0, 999, DSK_E_NO_DEVICE, "ordinal"},
                 {"hipGetDevicePropertiesR0600", 0, 101, DSK_E_NO_DEVICE, "ordinal"},
                 {"hipDeviceGetName", 0, 101, DSK_E_NO_DEVICE, "ordinal"},
                 {"hipSetDevice", 0, 101, DSK_E_NO_DEVICE, "ordinal"},
                 {"hipSetDevice", 0, 2, DSK_E_NO_MEMORY, "ordinal"},
                 {"hipModuleLoadData", 0, 209, DSK_E_UNSUPPORTED, "image"},
                 {"hipModuleLoadData", 1, 2, DSK_E_NO_MEMORY, "image"},
                 {"hipModuleLoadData", 1, 719, DSK_E_UNSUPPORTED, "image"},
                 {"hipModuleGetFunction", 0, 500, DSK_E_UNSUPPORTED, "gpu_append"},
                 {"hipModuleGetFunction", 9, 500, DSK_E_UNSUPPORTED, "gpu_map"}};
    struct fake_hip *fake = load(LIBRARIES[7]);
    struct dsk_device *dev;
    struct dsk_err err;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        fake->fail_call = cases[i].call;
        fake->fail_after = cases[i].after;
        fake->fail_result = cases[i].result;
        expect_refusal(cases[i].want, cases[i].field, (const char *[]){NULL});
        KIT_EXPECT(fake->fail_after < 0, "%s was not called", cases[i].call);
        fake->lost = 0;
        fake->n_modules = cases[i].result == 719 ? 0 : fake->n_modules; /* a lost device keeps what it has */
        expect_nothing_left(fake);
    }
    fake->fail_call = "hipSetDeviceFlags"; /* the device is in use already, with flags of its own */
    fake->fail_after = 0;
    fake->fail_result = 708;
    must(&err, open_hip(0, &dev, &err));
    dsk_device_close(dev);
    expect_nothing_left(fake);
}
END_TEST

/* Each step of a stream's making that fails takes the others back. */
START_TEST(a_stream_that_cannot_be_made_leaves_nothing_behind)
{
    static const char *const calls[] = {"hipStreamCreateWithFlags", "hipMalloc", "hipHostMalloc",
                                        "hipEventCreateWithFlags", "hipEventCreateWithFlags"};
    struct fake_hip *fake = load(LIBRARIES[7]);
    struct dsk_device *dev;
    struct dsk_stream *stream;
    struct dsk_err err;

    must(&err, open_hip(0, &dev, &err));
    for (int i = 0; i < 5; i++) {
        fake->fail_call = calls[i];
        fake->fail_after = i == 4 ? 5 : 0;
        fake->fail_result = 2;
        ck_assert_int_eq(dsk_stream_create(dev, &stream), DSK_E_NO_MEMORY);
        ck_assert_int_eq(fake->n_streams + fake->n_blocks + fake->n_pinned + fake->n_events, 0);
    }
    must(&err, dsk_stream_create(dev, &stream));
    dsk_stream_destroy(stream);
    dsk_device_close(dev);
    expect_nothing_left(fake);
}
END_TEST

/* ---- errors in the middle ------------------------------------------------------------------------ */

enum {
    N_SLOTS = 1200,
    N_ROWS = 1000
}; /* more than parameters hold, in no order: slots go through the ring */

struct work {
    struct gpu g;
    struct kit_pool pool;
    struct dsk_append_args append;
    int32_t slots[N_ROWS];
};

static void begin_work(struct work *w)
{
    gpu_kit_use_fake_hip();
    KIT_EXPECT(gpu_open(&w->g, 0), "%s", w->g.err.text);
    kit_pool_fill(&w->g.kit, &w->pool, DSK_LAYOUT_SCALED_256_0, N_SLOTS, 0x11, 1);
    for (int i = 0; i < N_ROWS; i++)
        w->slots[i] = i * 7 % N_ROWS;
    w->append = (struct dsk_append_args){
        .kv = w->pool.kv, .row_bytes = 512, .slots = w->slots, .n_rows = N_ROWS, .rule = DSK_RULE_POW2};
    w->append.rows = gpu_upload(&w->g, kit_bf16_normal(&w->g.kit, N_ROWS * 256, 1), N_ROWS * 512);
    w->append.kv.base = gpu_upload(&w->g, w->pool.bytes, gpu_pool_bytes(&w->pool));
}

START_TEST(an_error_in_the_middle_loses_the_device_and_it_says_so)
{
    static const char *const calls[] = {"hipMemcpyHtoDAsync", "hipModuleLaunchKernel", "hipStreamQuery"};
    struct fake_hip *fake = load(LIBRARIES[7]);
    static struct work w;
    struct dsk_event *event;
    bool is_done = false;
    uint64_t addr;
    dsk_status status;

    begin_work(&w);
    must(&w.g.err, dsk_event_create(w.g.dev, &event));
    fake->fail_call = calls[_i];
    fake->fail_after = 0;
    fake->fail_result = 719;
    w.g.err.status = DSK_OK;
    status = dsk_append(w.g.s, &w.append, &w.g.err);
    ck_assert_int_eq(status, _i == 2 ? DSK_OK : DSK_E_DEVICE);
    if (status != DSK_OK) {
        ck_assert_int_eq(w.g.err.status, DSK_E_DEVICE);
        ck_assert_str_eq(w.g.err.text, "unspecified launch failure");
        ck_assert_str_eq(w.g.err.value, "719");
    }
    ck_assert_int_eq(dsk_stream_sync(w.g.s), DSK_E_DEVICE);
    fake->lost = 0; /* the runtime would serve again: the device must not ask it */
    fake->n_launches = 0;
    ck_assert_int_eq(dsk_append(w.g.s, &w.append, &w.g.err), DSK_E_DEVICE);
    ck_assert_int_eq(dsk_event_record(event, w.g.s), DSK_E_DEVICE);
    ck_assert_int_eq(dsk_event_is_done(event, &is_done), DSK_E_DEVICE);
    ck_assert(is_done);
    ck_assert_int_eq(dsk_mem_alloc(w.g.dev, 64, &addr), DSK_E_DEVICE);
    ck_assert_int_eq(dsk_stream_sync(w.g.s), DSK_E_DEVICE);
    ck_assert_int_eq(fake->n_launches, 0);
    dsk_event_destroy(event);
    gpu_close(&w.g);
}
END_TEST

/* Outside operations a plain refusal is one, and nothing else is. */
START_TEST(losses_and_refusals_are_told_apart)
{
    static const struct {
        int result;
        dsk_status want;
        bool is_lost;
    } cases[] = {{1, DSK_E_BAD_ARGUMENT, false},   {2, DSK_E_NO_MEMORY, false},
                 {801, DSK_E_BAD_ARGUMENT, false}, {700, DSK_E_DEVICE, true},
                 {719, DSK_E_DEVICE, true},        {999, DSK_E_DEVICE, true}};
    struct fake_hip *fake = load(LIBRARIES[7]);
    struct dsk_device *dev;
    struct dsk_err err;
    uint64_t addr;

    must(&err, open_hip(0, &dev, &err));
    fake->fail_call = "hipMalloc";
    fake->fail_after = 0;
    fake->fail_result = cases[_i].result;
    ck_assert_int_eq(dsk_mem_alloc(dev, 64, &addr), cases[_i].want);
    fake->lost = 0;
    ck_assert_int_eq(dsk_mem_alloc(dev, 64, &addr), cases[_i].is_lost ? DSK_E_DEVICE : DSK_OK);
    if (!cases[_i].is_lost)
        dsk_mem_free(dev, addr);
    dsk_device_close(dev);
}
END_TEST

START_TEST(a_refusal_costs_nothing)
{
    struct fake_hip *fake = load(LIBRARIES[7]);
    static struct work w;
    uint64_t addr;

    begin_work(&w);
    ck_assert_int_eq(dsk_mem_alloc(w.g.dev, (uint64_t)1 << 40, &addr), DSK_E_NO_MEMORY);
    dsk_mem_free(w.g.dev, 4096);           /* was never allocated: a line in the log */
    dsk_host_unregister(w.g.dev, w.slots); /* was never registered: the same */
    must(&w.g.err, dsk_append(w.g.s, &w.append, &w.g.err));
    must(&w.g.err, dsk_stream_sync(w.g.s));
    ck_assert_str_eq(fake->last_kernel, "gpu_append");
    ck_assert_uint_eq(fake->last_block, GPU_BLOCK);
    ck_assert_uint_eq(fake->last_grid[0], (N_ROWS + 7) / 8);
    gpu_close(&w.g);
    expect_nothing_left(fake);
}
END_TEST

/* Work is issued and not waited for; what it reads must stay as it was until it has run. */
START_TEST(work_that_runs_late_reads_what_it_was_given)
{
    struct fake_hip *fake = load(LIBRARIES[7]);
    static struct work w;
    static uint8_t got[N_SLOTS * 264];
    struct dsk_event *event;
    bool is_done;

    begin_work(&w);
    struct dsk_append_args on_cpu = w.append;
    on_cpu.kv = w.pool.kv;
    on_cpu.rows = kit_addr(kit_alloc(&w.g.kit, N_ROWS * 512));
    gpu_download(&w.g, (void *)(uintptr_t)on_cpu.rows, w.append.rows, N_ROWS * 512);
    must(&w.g.err, dsk_event_create(w.g.dev, &event));
    fake->n_launches = 0;
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < N_ROWS; i++)
            w.slots[i] = (i * 7 + round * 131) % N_SLOTS;
        must(&w.g.err, dsk_append(w.g.s, &w.append, &w.g.err));
        must(&w.g.err, dsk_append(w.g.kit.s, &on_cpu, &w.g.err));
    }
    must(&w.g.err, dsk_event_record(event, w.g.s));
    memset(w.slots, 0xff, sizeof(w.slots));
    ck_assert_int_eq(fake->n_launches, 0);
    must(&w.g.err, dsk_event_is_done(event, &is_done));
    ck_assert(!is_done);
    gpu_download(&w.g, got, w.append.kv.base, gpu_pool_bytes(&w.pool));
    must(&w.g.err, dsk_event_is_done(event, &is_done));
    ck_assert(is_done);
    ck_assert_int_eq(fake->n_launches, 4);
    gpu_expect_bytes(got, w.pool.bytes, gpu_pool_bytes(&w.pool), "four appends in flight");
    dsk_event_destroy(event);
    gpu_close(&w.g);
    expect_nothing_left(fake);
}
END_TEST

/* Twice around the ring without a wait of the caller's: what is taken again has been read. */
START_TEST(ring_is_not_used_again_too_early)
{
    enum { N = 3 * GPU_RING_SEGMENTS, BYTES = 300000 }; /* one to a segment */
    struct fake_hip *fake = load(LIBRARIES[7]);
    struct gpu g;
    static uint8_t got[BYTES];

    gpu_kit_use_fake_hip();
    KIT_EXPECT(gpu_open(&g, 0), "%s", g.err.text);
    struct gpu_device *gpu = (struct gpu_device *)g.dev;
    struct gpu_stream *stream = dsk_gpu_stream(g.s);
    const uint64_t to = gpu_alloc(&g, (int64_t)N * BYTES);
    const int64_t n_unpinned = fake->n_unpinned;
    for (int i = 0; i < N; i++) {
        void *host = NULL;

        must(&g.err, dsk_gpu_ring_take(stream, BYTES, &host));
        memset(host, i + 1, BYTES);
        ck_assert_int_eq(
            gpu->driver.copy_in(&gpu->driver, to + (uint64_t)i * BYTES, host, BYTES, stream->handle), 0);
    }
    ck_assert_int_eq(fake->n_unpinned, n_unpinned);
    for (int i = 0; i < N; i++) {
        gpu_download(&g, got, to + (uint64_t)i * BYTES, BYTES);
        for (int at = 0; at < BYTES; at++)
            KIT_EXPECT(got[at] == i + 1, "copy %d: byte %d is of copy %d", i, at, got[at] - 1);
    }
    gpu_close(&g);
    expect_nothing_left(fake);
}
END_TEST

/* The runtime acts on the device that the thread bound last: each call has to bind its own. */
START_TEST(two_devices_in_one_thread)
{
    struct fake_hip *fake = load(LIBRARIES[7]);
    struct dsk_device *devs[2];
    struct dsk_stream *streams[2];
    struct dsk_err err;
    uint64_t addrs[2];
    uint32_t got[2] = {0, 0};

    fake->n_devices = 2;
    for (int i = 0; i < 2; i++) {
        must(&err, open_hip(i, &devs[i], &err));
        must(&err, dsk_stream_create(devs[i], &streams[i]));
        must(&err, dsk_mem_alloc(devs[i], 64, &addrs[i]));
    }
    for (int i = 0; i < 2; i++)
        must(&err, dsk_mem_set(streams[i], addrs[i], (uint8_t)(0x11 * (i + 1)), 64));
    for (int i = 0; i < 2; i++)
        must(&err, dsk_copy_out(streams[i], &got[i], addrs[i] + 60, 4));
    for (int i = 0; i < 2; i++)
        must(&err, dsk_stream_sync(streams[i]));
    ck_assert_uint_eq(got[0], 0x11111111);
    ck_assert_uint_eq(got[1], 0x22222222);
    for (int i = 0; i < 2; i++) {
        dsk_mem_free(devs[i], addrs[i]);
        dsk_stream_destroy(streams[i]);
        dsk_device_close(devs[i]);
    }
    expect_nothing_left(fake);
}
END_TEST

/* ---- graphs ------------------------------------------------------------------------------------- */

enum { N_ENTRIES = 300 };

struct recording {
    struct gpu g;
    struct gpu_upload_args upload;
    struct gpu_clean_args clean;
    int32_t list[N_ENTRIES], got[N_ENTRIES];
    uint64_t block;
    void *graph, *exec, *root;
};

static void launch_both(struct recording *r)
{
    struct gpu_stream *stream = dsk_gpu_stream(r->g.s);
    const struct gpu_launch_dims one = {.grid = {1, 1, 1}, .block = GPU_UPLOAD_BLOCK},
                                 two = {.grid = {2, 1, 1}, .block = GPU_BLOCK};

    must(&r->g.err, dsk_gpu_launch(stream, GPU_FN_UPLOAD_36, &one, &r->upload, &r->g.err));
    must(&r->g.err, dsk_gpu_launch(stream, GPU_FN_CLEAN, &two, &r->clean, &r->g.err));
}

static void record(struct recording *r)
{
    const struct gpu_driver *driver = &((struct gpu_device *)r->g.dev)->driver;
    void *handle = dsk_gpu_stream(r->g.s)->handle;

    for (int i = 0; i < N_ENTRIES; i++)
        r->list[i] = i % 20 - 5;
    r->block = gpu_alloc(&r->g, GPU_BLOCK_BYTES + 36 * sizeof(struct dsk_attend_row));
    r->clean = (struct gpu_clean_args){.indices = gpu_upload(&r->g, r->list, sizeof(r->list)),
                                       .new_indices = gpu_alloc(&r->g, sizeof(r->list)),
                                       .indices_row_bytes = 4 * N_ENTRIES,
                                       .n_entries = N_ENTRIES,
                                       .n_slots = 10,
                                       .topk = N_ENTRIES};
    memset(&r->upload, 0x21, sizeof(r->upload));
    r->upload.block = r->block;
    r->upload.n_rows = 3;
    ck_assert_int_eq(driver->capture_begin(driver, handle), 0);
    launch_both(r);
    ck_assert_int_eq(driver->capture_end(driver, handle, &r->graph), 0);
    ck_assert_int_eq(driver->graph_root(driver, r->graph, &r->root), 0);
    ck_assert_ptr_nonnull(r->root);
    ck_assert_int_eq(driver->graph_instantiate(driver, r->graph, &r->exec), 0);
}

/* A recording runs nothing; replays run it all, the first node with the arguments that were set last before. */
START_TEST(recorded_launches_replay_with_new_arguments)
{
    struct fake_hip *fake = load(LIBRARIES[7]);
    static struct recording r;
    static uint8_t got[GPU_BLOCK_BYTES + 36 * sizeof(struct dsk_attend_row)];
    void *params[1] = {&r.upload};
    const struct gpu_launch_dims one = {.grid = {1, 1, 1}, .block = GPU_UPLOAD_BLOCK};

    gpu_kit_use_fake_hip();
    KIT_EXPECT(gpu_open(&r.g, 0), "%s", r.g.err.text);
    const struct gpu_device *gpu = (struct gpu_device *)r.g.dev;
    const struct gpu_driver *driver = &gpu->driver;
    void *handle = dsk_gpu_stream(r.g.s)->handle;
    record(&r);
    must(&r.g.err, dsk_stream_sync(r.g.s));
    ck_assert_int_eq(fake->n_recorded, 2);
    ck_assert_int_eq(fake->n_launches, 0);
    for (int round = 0; round < 3; round++) {
        memset(r.upload.rows, 0x30 + round, sizeof(r.upload.rows));
        r.upload.n_rows = 10 * round + 5;
        ck_assert_int_eq(
            driver->exec_set_params(driver, r.exec, r.root, gpu->functions[GPU_FN_UPLOAD_36], &one, params),
            0);
        memset(r.upload.rows, 0xdd, sizeof(r.upload.rows)); /* they were taken when they were set */
        must(&r.g.err, dsk_mem_set(r.g.s, r.block, 0, sizeof(got)));
        must(&r.g.err, dsk_mem_set(r.g.s, r.clean.new_indices, 0x55, sizeof(r.got)));
        ck_assert_int_eq(driver->exec_launch(driver, r.exec, handle), 0);
        gpu_download(&r.g, got, r.block, sizeof(got));
        gpu_download(&r.g, r.got, r.clean.new_indices, sizeof(r.got));
        for (size_t i = 0; i < sizeof(got) - GPU_BLOCK_BYTES; i++)
            ck_assert_uint_eq(
                got[GPU_BLOCK_BYTES + i],
                i < (size_t)(10 * round + 5) * sizeof(struct dsk_attend_row) ? 0x30u + (unsigned)round : 0u);
        for (int i = 0; i < N_ENTRIES; i++)
            ck_assert_int_eq(r.got[i], r.list[i] < 0 || r.list[i] >= 10 ? -1 : r.list[i]);
    }
    ck_assert_int_eq(fake->n_launches, 6);
    ck_assert_int_eq(fake->n_replays, 3);
    ck_assert_int_ne(
        driver->exec_set_params(driver, r.exec, &r, gpu->functions[GPU_FN_UPLOAD_36], &one, params), 0);
    ck_assert_int_eq(driver->exec_destroy(driver, r.exec), 0);
    ck_assert_int_eq(driver->graph_destroy(driver, r.graph), 0);
    gpu_close(&r.g);
    expect_nothing_left(fake);
}
END_TEST

/* ---- memory between processes ------------------------------------------------------------------- */

/* Release 7 exports by HIP's function, 6 by HSA's: what one writes the other reads, and it outlives the exporter. */
START_TEST(shared_memory_is_one_memory)
{
    struct fake_hip *fake = load(LIBRARIES[6 + _i]);
    struct gpu g;
    struct gpu_share mine, theirs;
    uint32_t got = 0;
    int fd;

    gpu_kit_use_fake_hip();
    KIT_EXPECT(gpu_open(&g, 0), "%s", g.err.text);
    must(&g.err, dsk_gpu_share_alloc(g.dev, 100000, &mine, &g.err));
    ck_assert_uint_eq(mine.bytes,
                      4 << 20); /* small ones are cut from larger, which must not be shared with them */
    must(&g.err, dsk_gpu_share_export(g.dev, &mine, &fd, &g.err));
    ck_assert_int_ge(fd, 0);
    must(&g.err, dsk_gpu_share_import(g.dev, fd, mine.bytes, &theirs, &g.err));
    close(fd);
    ck_assert_uint_ne(theirs.addr, mine.addr);
    must(&g.err, dsk_mem_set(g.s, mine.addr + 99996, 0x5a, 4));
    gpu_download(&g, &got, theirs.addr + 99996, 4);
    ck_assert_uint_eq(got, 0x5a5a5a5a);
    ck_assert_int_eq(dsk_gpu_share_export(g.dev, &theirs, &fd, &g.err), DSK_E_UNSUPPORTED);
    ck_assert_int_eq(fd, -1);
    dsk_gpu_share_free(g.dev, &mine);
    ck_assert_uint_eq(mine.addr, 0);
    must(&g.err, dsk_mem_set(g.s, theirs.addr, 0x66, 4));
    gpu_download(&g, &got, theirs.addr, 4);
    ck_assert_uint_eq(got, 0x66666666);
    dsk_gpu_share_free(g.dev, &theirs);
    dsk_gpu_share_free(g.dev, &theirs); /* twice is fine */
    gpu_close(&g);
    expect_nothing_left(fake);
}
END_TEST

START_TEST(strange_descriptors_are_refused_and_cost_nothing)
{
    struct fake_hip *fake = load(LIBRARIES[7]);
    struct gpu g;
    struct gpu_share share;
    int pipes[2], small = memfd_create("small", 0), null = open("/dev/null", O_RDWR);

    gpu_kit_use_fake_hip();
    KIT_EXPECT(gpu_open(&g, 0), "%s", g.err.text);
    ck_assert_int_eq(pipe(pipes), 0);
    ck_assert_int_eq(ftruncate(small, 8192), 0);
    const int fds[] = {pipes[0], null, small, 1000};
    for (int i = 0; i < 4; i++) {
        ck_assert_int_eq(dsk_gpu_share_import(g.dev, fds[i], 8193, &share, &g.err), DSK_E_UNSUPPORTED);
        ck_assert_str_eq(g.err.field, "fd");
        ck_assert_uint_eq(share.addr, 0);
    }
    ck_assert_int_eq(dsk_gpu_share_import(g.dev, -1, 4096, &share, &g.err), DSK_E_BAD_ARGUMENT);
    ck_assert_int_eq(dsk_gpu_share_import(g.dev, small, 0, &share, &g.err), DSK_E_BAD_ARGUMENT);
    ck_assert_int_eq(dsk_gpu_share_import(g.dev, small, UINT64_MAX, &share, &g.err), DSK_E_BAD_ARGUMENT);
    ck_assert_int_eq(dsk_gpu_share_alloc(g.dev, 0, &share, &g.err), DSK_E_BAD_ARGUMENT);
    ck_assert_int_eq(dsk_gpu_share_alloc(g.dev, INT64_MAX, &share, &g.err), DSK_E_NO_MEMORY);
    fake->fail_call = "hipExternalMemoryGetMappedBuffer";
    fake->fail_after = 0;
    fake->fail_result = 1;
    ck_assert_int_eq(dsk_gpu_share_import(g.dev, small, 8192, &share, &g.err), DSK_E_UNSUPPORTED);
    ck_assert_int_eq(fake->n_externals, 0);
    must(&g.err, dsk_stream_sync(g.s));
    gpu_close(&g);
    expect_nothing_left(fake);
}
END_TEST

START_TEST(a_runtime_that_cannot_share_says_so)
{
    struct fake_hip *fake = load(LIBRARIES[5]);
    struct gpu g;
    struct gpu_share share;
    int fd = memfd_create("m", 0);

    gpu_kit_use_fake_hip();
    KIT_EXPECT(gpu_open(&g, 0), "%s", g.err.text);
    ck_assert_int_eq(ftruncate(fd, 8192), 0);
    ck_assert_int_eq(dsk_gpu_share_alloc(g.dev, 4096, &share, &g.err), DSK_E_UNSUPPORTED);
    ck_assert_int_eq(dsk_gpu_share_import(g.dev, fd, 4096, &share, &g.err), DSK_E_UNSUPPORTED);
    must(&g.err, dsk_stream_sync(g.s));
    gpu_close(&g);
    expect_nothing_left(fake);
}
END_TEST

/* ---- all ----------------------------------------------------------------------------------------- */

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("hip host");
    TCase *c = tcase_create("hip host");

    (void)max;
    setenv("CK_FORK", "yes", 1);
    tcase_set_timeout(c, 120);
    tcase_add_test(c, without_a_runtime_it_says_which);
    tcase_add_loop_test(c, without_a_device_it_says_so, 5, 8);
    tcase_add_test(c, a_missing_symbol_is_named);
    tcase_add_test(c, the_newest_runtime_is_taken);
    tcase_add_loop_test(c, an_architecture_without_code_is_named_with_those_that_have, 0, 6);
    tcase_add_test(c, waves_of_another_width_are_refused);
    tcase_add_loop_test(c, a_device_is_known_by_its_properties, 0, 9);
    tcase_add_loop_test(c, each_architecture_gets_its_own_code, 0, 2);
    tcase_add_test(c, what_fails_while_opening_leaves_nothing_behind);
    tcase_add_test(c, a_stream_that_cannot_be_made_leaves_nothing_behind);
    tcase_add_loop_test(c, an_error_in_the_middle_loses_the_device_and_it_says_so, 0, 3);
    tcase_add_loop_test(c, losses_and_refusals_are_told_apart, 0, 6);
    tcase_add_test(c, a_refusal_costs_nothing);
    tcase_add_test(c, work_that_runs_late_reads_what_it_was_given);
    tcase_add_test(c, ring_is_not_used_again_too_early);
    tcase_add_test(c, two_devices_in_one_thread);
    tcase_add_test(c, recorded_launches_replay_with_new_arguments);
    tcase_add_loop_test(c, shared_memory_is_one_memory, 0, 2);
    tcase_add_test(c, strange_descriptors_are_refused_and_cost_nothing);
    tcase_add_test(c, a_runtime_that_cannot_share_says_so);
    suite_add_tcase(suite, c);
    suites_p[0] = suite;
    return 1;
}
