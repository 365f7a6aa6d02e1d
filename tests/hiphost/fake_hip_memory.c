/* fake_hip_memory.c - memory of the fake HIP runtime: of the device, pinned, registered, and shared between processes. */
#include <sys/mman.h>

#include "fake_hip_impl.h"

#define PAGE       ((size_t)4096)
#define POISON_MAX ((size_t)1 << 20) /* larger memory begins as zeros */
#define EXPORT_MIN ((size_t)4 << 20) /* what is smaller was cut out of something larger */

/* ---- memory ----------------------------------------------------------------------------------- */

static struct block *blocks;

/* The block that holds [p, p + bytes), or NULL. */
struct block *fake_find_block(const void *p, size_t bytes)
{
    const uint8_t *from = p;

    for (struct block *b = blocks; b != NULL; b = b->next) {
        if (from >= b->at && bytes <= b->bytes && from + bytes <= b->at + b->bytes)
            return b;
    }
    return NULL;
}

static struct block *add_block(uint8_t *at, size_t bytes, bool is_pinned)
{
    struct block *b = fake_new(sizeof(*b));

    *b = (struct block){.at = at, .bytes = bytes, .fd = -1, .is_pinned = is_pinned, .next = blocks};
    blocks = b;
    *(is_pinned ? &fake.n_pinned : &fake.n_blocks) += 1;
    return b;
}

/* Whole pages with one that may not be touched on either side; the end of the memory is the end of a page as near as its
 * alignment of 256 allows. fd: mapped from there. */
static struct block *map_block(size_t bytes, int fd, bool is_pinned)
{
    const size_t room = (bytes + PAGE - 1) / PAGE * PAGE, skip = fd >= 0 ? 0 : (room - bytes) / 256 * 256;
    uint8_t *at = mmap(NULL, room + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void *got;
    struct block *b;

    if (at == MAP_FAILED)
        return NULL;
    got = mmap(at + PAGE, room, PROT_READ | PROT_WRITE,
               MAP_FIXED | MAP_NORESERVE | (fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS), fd, 0);
    if (got == MAP_FAILED) {
        munmap(at, room + 2 * PAGE);
        return NULL;
    }
    b = add_block(at + PAGE + skip, bytes, is_pinned);
    b->mapped = room + 2 * PAGE;
    b->fd = fd;
    return b;
}

static void drop_block(struct block *b)
{
    struct block **from = &blocks;

    while (*from != b)
        from = &(*from)->next;
    *from = b->next;
    *(b->is_pinned ? &fake.n_pinned : &fake.n_blocks) -= 1;
    if (b->mapped != 0)
        munmap((uint8_t *)((uintptr_t)b->at / PAGE * PAGE - PAGE), b->mapped);
    if (b->fd >= 0)
        close(b->fd);
    fake_delete(b);
}

/* ---- memory: entries ---------------------------------------------------------------------------- */

CALL(hipMalloc, (void **addr_p, size_t bytes))
{
    struct block *b;
    int fd = -1;

    ENTER();
    if (fake_is_capturing)
        return fake_leave(CAPTURE_UNSUPPORTED);
    if (bytes > (size_t)192 << 30)
        return fake_leave(NO_MEMORY);
    if (bytes >= EXPORT_MIN && bytes < (size_t)1 << 30) {
        fd = memfd_create("device", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, (off_t)((bytes + PAGE - 1) / PAGE * PAGE)) != 0)
            fake_die("no memory");
    }
    b = map_block(bytes, fd, false);
    if (b == NULL)
        return fake_leave(NO_MEMORY);
    if (bytes <= POISON_MAX)
        memset(b->at, 0xbb, bytes);
    *addr_p = b->at;
    return fake_leave(0);
}

CALL(hipFree, (void *addr))
{
    struct block *b;

    ENTER();
    if (fake_is_capturing)
        return fake_leave(CAPTURE_UNSUPPORTED);
    b = fake_find_block(addr, 0);
    if (b == NULL || b->at != addr || b->is_pinned)
        return fake_leave(INVALID_VALUE);
    fake_run_everything();
    drop_block(b);
    return fake_leave(0);
}

CALL(hipMemGetInfo, (size_t * free_p, size_t *total_p))
{
    ENTER();
    *total_p = *free_p = (size_t)192 << 30;
    for (const struct block *b = blocks; b != NULL; b = b->next)
        *free_p -= b->is_pinned ? 0 : b->bytes;
    return fake_leave(0);
}

CALL(hipHostMalloc, (void **host_p, size_t bytes, unsigned flags))
{
    struct block *b;

    ENTER();
    b = flags != 3 ? NULL : map_block(bytes, -1, true);
    if (b == NULL)
        return fake_leave(INVALID_VALUE);
    *host_p = b->at;
    return fake_leave(0);
}

CALL(hipHostFree, (void *host))
{
    struct block *b;

    ENTER();
    b = fake_find_block(host, 0);
    if (b == NULL || b->at != host || !b->is_pinned || b->mapped == 0)
        return fake_leave(INVALID_VALUE);
    fake_run_everything();
    drop_block(b);
    return fake_leave(0);
}

CALL(hipHostRegister, (void *host, size_t bytes, unsigned flags))
{
    ENTER();
    if (flags != 3 || bytes == 0)
        return fake_leave(INVALID_VALUE);
    (void)add_block(host, bytes, true);
    return fake_leave(0);
}

CALL(hipHostUnregister, (void *host))
{
    struct block *b;

    ENTER();
    b = fake_find_block(host, 0);
    if (b == NULL || b->at != host || !b->is_pinned || b->mapped != 0)
        return fake_leave(NOT_REGISTERED);
    fake_run_everything();
    drop_block(b);
    return fake_leave(0);
}

CALL(hipHostGetDevicePointer, (void **addr_p, void *host, unsigned flags))
{
    ENTER();
    if (flags != 0 || fake_find_block(host, 1) == NULL)
        return fake_leave(INVALID_VALUE);
    *addr_p = host;
    return fake_leave(0);
}

/* ---- memory between processes ------------------------------------------------------------------- */

struct external {
    int magic;
    int fd;
    unsigned long long bytes;
};

struct external_what {
    int type;
    union {
        int fd;
        void *win32[2];
    } handle;
    unsigned long long bytes;
    unsigned flags;
};

struct external_range {
    unsigned long long offset, bytes;
    unsigned flags;
};

#if FAKE_HIP_RELEASE >= 6
static int export_block(void *addr, size_t bytes, int *fd_p)
{
    struct block *b = fake_find_block(addr, bytes);

    if (b == NULL || b->fd < 0 || b->at != addr)
        return INVALID_VALUE;
    *fd_p = dup(b->fd);
    return *fd_p < 0 ? INVALID_VALUE : 0;
}
#endif

#if FAKE_HIP_RELEASE >= 7
CALL(hipMemGetHandleForAddressRange,
     (void *fd_p, void *addr, size_t bytes, int type, unsigned long long flags))
{
    ENTER();
    return fake_leave(type != 1 || flags != 0 ? INVALID_VALUE : export_block(addr, bytes, fd_p));
}
#elif FAKE_HIP_RELEASE == 6
CALL(hsa_amd_portable_export_dmabuf, (const void *addr, size_t bytes, int *fd_p, uint64_t *offset_p))
{
    ENTER();
    *offset_p = 0;
    return fake_leave(export_block((void *)(uintptr_t)addr, bytes, fd_p) == 0 ? 0 : 0x1001);
}
#endif

CALL(hipImportExternalMemory, (void **external_p, const struct external_what *what))
{
    struct external *x;

    ENTER();
    if (what->type != 1 || what->flags != 0 || what->bytes == 0)
        return fake_leave(INVALID_VALUE);
    x = fake_new(sizeof(*x));
    *x = (struct external){EXTERNAL, dup(what->handle.fd), what->bytes};
    fake.n_externals++;
    *external_p = x;
    return fake_leave(0);
}

CALL(hipExternalMemoryGetMappedBuffer, (void **addr_p, void *external, const struct external_range *range))
{
    struct external *x = external;
    struct block *b;

    ENTER();
    ALIVE(x, EXTERNAL);
    if (range->offset != 0 || range->flags != 0 || range->bytes > x->bytes)
        return fake_leave(INVALID_VALUE);
    b = map_block(range->bytes, dup(x->fd), false);
    if (b == NULL)
        return fake_leave(INVALID_VALUE);
    *addr_p = b->at;
    return fake_leave(0);
}

CALL(hipDestroyExternalMemory, (void *external))
{
    struct external *x = external;

    ENTER();
    ALIVE(x, EXTERNAL);
    x->magic = 0;
    close(x->fd);
    fake_delete(x);
    fake.n_externals--;
    return fake_leave(0);
}
