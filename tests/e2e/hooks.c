/* hooks.c - linked into dsad-hooked, a dsad for tests: launches can be held, slowed and failed, start-up can be held, and the n-th
 * allocation of our own code can fail, all from outside through the file that DSA_TEST_HOOKS names (hooks.h). Without
 * the variable it is an ordinary dsad. Waiting here polls: the other side of the file is another process. */
#include "hooks.h"

#define GATE_ATTENDS 2

#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernels/dsk.h"

static _Atomic(uint64_t) none[HOOK_N_WORDS];
static _Atomic(uint64_t) *words = none;

__attribute__((constructor)) static void map_words(void)
{
    const char *path = getenv("DSA_TEST_HOOKS");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *at;

    if (fd < 0)
        return;
    at = mmap(NULL, sizeof(none), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED)
        words = at;
}

static void rest(uint64_t ns)
{
    struct timespec span = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};

    if (ns > 0)
        nanosleep(&span, NULL); /* the time itself: a kernel that takes longer, or the interval of a poll */
}

static void pass(enum hook_word gate, enum hook_word counter)
{
    atomic_fetch_add(&words[counter], 1);
    while (atomic_load(&words[gate]) != 0)
        rest(200000);
}

/* ---- launches ---- */

dsk_status __real_dsk_attend(struct dsk_stream *s, const struct dsk_attend_args *args, struct dsk_err *err);
dsk_status __wrap_dsk_attend(struct dsk_stream *s, const struct dsk_attend_args *args, struct dsk_err *err);
dsk_status __real_dsk_append(struct dsk_stream *s, const struct dsk_append_args *args, struct dsk_err *err);
dsk_status __wrap_dsk_append(struct dsk_stream *s, const struct dsk_append_args *args, struct dsk_err *err);
dsk_status __real_dsk_device_open(const struct dsk_device_config *config, struct dsk_device **dev_p,
                                  struct dsk_err *err);
dsk_status __wrap_dsk_device_open(const struct dsk_device_config *config, struct dsk_device **dev_p,
                                  struct dsk_err *err);

dsk_status __wrap_dsk_attend(struct dsk_stream *s, const struct dsk_attend_args *args, struct dsk_err *err)
{
    dsk_status status;

    pass(HOOK_GATE, HOOK_N_ENTERED);
    rest(atomic_load(&words[HOOK_DELAY_NS]));
    status = (dsk_status)atomic_load(&words[HOOK_LAUNCH_FAIL]);
    if (status != DSK_OK)
        *err = (struct dsk_err){.status = status};
    else
        status = __real_dsk_attend(s, args, err);
    atomic_fetch_add(&words[HOOK_N_LEFT], 1);
    return status;
}

dsk_status __wrap_dsk_append(struct dsk_stream *s, const struct dsk_append_args *args, struct dsk_err *err)
{
    dsk_status status;

    if (atomic_load(&words[HOOK_GATE]) != GATE_ATTENDS)
        pass(HOOK_GATE, HOOK_N_ENTERED);
    status = __real_dsk_append(s, args, err);
    atomic_fetch_add(&words[HOOK_N_LEFT], 1);
    return status;
}

dsk_status __wrap_dsk_device_open(const struct dsk_device_config *config, struct dsk_device **dev_p,
                                  struct dsk_err *err)
{
    pass(HOOK_OPEN_GATE, HOOK_N_OPENING);
    return __real_dsk_device_open(config, dev_p, err);
}

/* ---- memory ---- */

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *ptr, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *ptr, size_t size);

static bool must_fail(void)
{
    uint64_t at = atomic_load(&words[HOOK_ALLOC_FAIL]);

    return at != 0 && atomic_fetch_add(&words[HOOK_N_ALLOCS], 1) + 1 == at;
}

void *__wrap_malloc(size_t size)
{
    return must_fail() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return must_fail() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *ptr, size_t size)
{
    return must_fail() ? NULL : __real_realloc(ptr, size);
}
