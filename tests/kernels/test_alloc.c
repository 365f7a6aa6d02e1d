/* Failing allocations: each function that allocates is run once per allocation with that one failing. The
 * linker routes the library's calls through the wrappers below. */
#include "kit.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

static atomic_int n_calls; /* allocations since the last reset */
static atomic_int fail_at; /* which of them fails, from 1; 0: none */

static bool must_fail(void)
{
    return atomic_fetch_add(&n_calls, 1) + 1 == atomic_load(&fail_at);
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
int __real_posix_memalign(void **p, size_t alignment, size_t size);
void *__real_mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
int __wrap_posix_memalign(void **p, size_t alignment, size_t size);
void *__wrap_mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg);

void *__wrap_malloc(size_t size)
{
    return must_fail() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return must_fail() ? NULL : __real_calloc(n, size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return must_fail() ? NULL : __real_aligned_alloc(alignment, size);
}

int __wrap_posix_memalign(void **p, size_t alignment, size_t size)
{
    return must_fail() ? ENOMEM : __real_posix_memalign(p, alignment, size);
}

void *__wrap_mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset)
{
    return must_fail() ? MAP_FAILED : __real_mmap(addr, length, prot, flags, fd, offset);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg)
{
    return must_fail() ? EAGAIN : __real_pthread_create(thread, attr, main, arg);
}

static void arm(int at)
{
    atomic_store(&n_calls, 0);
    atomic_store(&fail_at, at);
}

/* Returns how many allocations were made since arm(). */
static int disarm(void)
{
    int n = atomic_load(&n_calls);

    atomic_store(&fail_at, 0);
    return n;
}

static struct dsk_device *open_device(void)
{
    struct dsk_device_config config = {.kind = DSK_DEVICE_CPU, .n_threads = 4};
    struct dsk_device *dev = NULL;

    ck_assert_int_eq(dsk_device_open(&config, &dev, NULL), DSK_OK);
    return dev;
}

/* Leaks are found by the address sanitizer's build of this very test. */
START_TEST(opening_a_device_survives_any_failing_allocation)
{
    struct dsk_device_config config = {.kind = DSK_DEVICE_CPU, .n_threads = 4};
    int n, n_refused = 0;

    arm(0);
    dsk_device_close(open_device());
    n = disarm();
    ck_assert_int_ge(n, 2);
    for (int at = 1; at <= n; at++) {
        struct dsk_device *const untouched = (struct dsk_device *)(uintptr_t)0x10;
        struct dsk_device *dev = untouched;
        struct dsk_err err = {0};
        dsk_status status;

        arm(at);
        status = dsk_device_open(&config, &dev, &err);
        disarm();
        if (status == DSK_OK) { /* that one was made after open, or open can do without it */
            dsk_device_close(dev);
            continue;
        }
        n_refused++;
        ck_assert_int_eq(status, DSK_E_NO_MEMORY);
        ck_assert_int_eq(err.status, DSK_E_NO_MEMORY);
        ck_assert_ptr_eq(dev, untouched);
    }
    ck_assert_int_ge(n_refused, 2);
}
END_TEST

START_TEST(streams_events_and_memory_say_that_memory_is_out)
{
    struct dsk_device *dev = open_device();
    struct dsk_stream *stream = NULL;
    struct dsk_event *event = NULL;
    uint64_t addr = 77;

    arm(1);
    ck_assert_int_eq(dsk_stream_create(dev, &stream), DSK_E_NO_MEMORY);
    ck_assert_ptr_null(stream);
    arm(1);
    ck_assert_int_eq(dsk_event_create(dev, &event), DSK_E_NO_MEMORY);
    ck_assert_ptr_null(event);
    arm(1);
    ck_assert_int_eq(dsk_mem_alloc(dev, 1 << 20, &addr), DSK_E_NO_MEMORY);
    ck_assert_uint_eq(addr, 77);
    disarm();
    ck_assert_int_eq(dsk_stream_create(dev, &stream), DSK_OK);
    ck_assert_int_eq(dsk_event_create(dev, &event), DSK_OK);
    ck_assert_int_eq(dsk_mem_alloc(dev, 1 << 20, &addr), DSK_OK);
    dsk_mem_free(dev, addr);
    dsk_event_destroy(event);
    dsk_stream_destroy(stream);
    dsk_device_close(dev);
}
END_TEST

/* dsk.h: operations allocate nothing, whatever their shape. */
START_TEST(operations_allocate_nothing)
{
    struct kit k;
    struct kit_pool pool;
    struct kit_attend a;
    struct dsk_attend_seg seg;
    struct dsk_attend_args args = {.segs = &seg, .n_segs = 1, .h_q = 128, .out_dtype = DSK_DTYPE_BF16};
    int32_t slots[64];
    uint16_t *values, *plain;
    int32_t *new_indices;

    KIT_OPEN(&k, _i, 3);
    kit_pool_make(&k, &pool, DSK_LAYOUT_SCALED_512_64, 64, 1);
    a = (struct kit_attend){.pool = &pool,
                            .n_rows = 2,
                            .topk = 2112,
                            .h_q = 128,
                            .q = kit_bf16_normal(&k, 2 * 128 * 576, 0.1),
                            .indices = kit_indices(&k, 2 * 2112, 64, 1),
                            .scale = 0.05f,
                            .out_dtype = DSK_DTYPE_BF16};
    values = kit_bf16_normal(&k, 64 * 576, 1);
    plain = kit_alloc(&k, 64 * 2 * 576);
    new_indices = kit_alloc(&k, 2 * 2112 * 4);
    seg = kit_attend_seg(&k, &a);
    args.kv = pool.kv;
    for (int i = 0; i < 64; i++)
        slots[i] = i;
    {
        struct dsk_append_args append = {.kv = pool.kv,
                                         .rows = kit_addr(values),
                                         .row_bytes = 1152,
                                         .slots = slots,
                                         .n_rows = 64,
                                         .rule = DSK_RULE_POW2};
        struct dsk_read_args read = {
            .kv = pool.kv, .out = kit_addr(plain), .n_rows = 64, .mode = DSK_READ_FULL};
        struct dsk_gather_args gather = {.kv = pool.kv,
                                         .indices = kit_addr(a.indices),
                                         .new_indices = kit_addr(new_indices),
                                         .workspace = kit_addr(plain),
                                         .workspace_bytes = 64 * 2 * 576,
                                         .indices_row_bytes = 4 * 2112,
                                         .n_rows = 2,
                                         .topk = 2112};

        dsk_status statuses[5];
        int n;

        arm(1); /* nothing of Check in between: it allocates, too */
        statuses[0] = dsk_append(k.s, &append, NULL);
        statuses[1] = dsk_attend(k.s, &args, NULL);
        args.flags = DSK_ATTEND_BATCH_INVARIANT;
        statuses[2] = dsk_attend(k.s, &args, NULL);
        statuses[3] = dsk_read(k.s, &read, NULL);
        statuses[4] = dsk_gather(k.s, &gather, NULL);
        n = disarm();
        for (int i = 0; i < 5; i++)
            ck_assert_int_eq(statuses[i], DSK_OK);
        ck_assert_int_eq(n, 0);
    }
    kit_close(&k);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("alloc");
    TCase *tcase = tcase_create("alloc");

    (void)max;
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, opening_a_device_survives_any_failing_allocation);
    tcase_add_test(tcase, streams_events_and_memory_say_that_memory_is_out);
    tcase_add_loop_test(tcase, operations_allocate_nothing, KIT_FIRST_ISA, KIT_END_ISA);
    suite_add_tcase(suite, tcase);
    suites_p[0] = suite;
    return 1;
}
