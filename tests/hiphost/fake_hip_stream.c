/* fake_hip_stream.c - streams, events and copies of the fake HIP runtime. */
#include "fake_hip_impl.h"

/* ---- streams ---------------------------------------------------------------------------------- */

static struct stream *streams;
_Thread_local bool fake_is_capturing;

struct node fake_copy_node(const struct node *from)
{
    struct node node = *from;

    if (from->function->param_bytes > 4096)
        fake_die("more arguments than a launch carries");
    node.next = NULL;
    node.param = fake_new(from->function->param_bytes);
    memcpy(node.param, from->param, from->function->param_bytes);
    return node;
}

void fake_add_work(struct stream *s, struct work work)
{
    struct work *w = fake_new(sizeof(*w));

    *w = work;
    w->next = NULL;
    *s->end = w;
    s->end = &w->next;
}

static void run_node(const struct node *node)
{
    const struct function *f = node->function;

    fake.n_launches++;
    snprintf(fake.last_kernel, sizeof(fake.last_kernel), "%s", f->name);
    memcpy(fake.last_grid, node->grid, sizeof(fake.last_grid));
    fake.last_block = node->block;
    if (strcmp(f->name, "gpu_fault") == 0) { /* the trap, which in the emulator ends the process */
        fake.lost = LAUNCH_FAILURE;
        return;
    }
    fake_run(f->arch, f->name, node->grid, node->block, node->shared_bytes, node->param);
}

/* The next piece of the stream's work; false: there is none. */
static bool run_one(struct stream *s)
{
    struct work *w = s->first;

    if (w == NULL || fake.lost != 0)
        return false;
    s->first = w->next;
    if (s->first == NULL)
        s->end = &s->first;
    switch (w->kind) {
    case COPY:
        memmove(w->dst, w->src, w->bytes);
        break;
    case SET:
        memset(w->dst, w->byte, w->bytes);
        break;
    case RUN:
        run_node(&w->node);
        fake_delete(w->node.param);
        break;
    case RECORD:
        w->event->n_pending--;
        clock_gettime(CLOCK_MONOTONIC, &w->event->at);
        break;
    }
    fake_delete(w->staged);
    fake_delete(w);
    return true;
}

static void run_all(struct stream *s)
{
    while (run_one(s)) {
    }
}

void fake_run_everything(void)
{
    for (struct stream *s = streams; s != NULL; s = s->next)
        run_all(s);
}

CALL(hipStreamCreateWithFlags, (void **stream_p, unsigned flags))
{
    struct stream *s;

    ENTER();
    s = fake_new(sizeof(*s));
    if (flags != 1)
        return fake_leave(INVALID_VALUE);
    s->magic = STREAM;
    s->device = fake_bound;
    s->end = &s->first;
    s->next = streams;
    streams = s;
    fake.n_streams++;
    *stream_p = s;
    return fake_leave(0);
}

CALL(hipStreamDestroy, (void *stream))
{
    struct stream *s = stream, **from = &streams;

    ENTER();
    ALIVE(s, STREAM);
    run_all(s);
    while (*from != s)
        from = &(*from)->next;
    *from = s->next;
    s->magic = 0;
    fake_delete(s);
    fake.n_streams--;
    return fake_leave(0);
}

CALL(hipStreamQuery, (void *stream))
{
    struct stream *s = stream;

    ENTER();
    ALIVE(s, STREAM);
    if (fake_is_capturing)
        return fake_leave(CAPTURE_UNSUPPORTED);
    if (run_one(s))
        fake.n_late++;
    return fake_leave(fake.lost != 0 ? fake.lost : s->first != NULL ? NOT_READY : 0);
}

CALL(hipStreamSynchronize, (void *stream))
{
    struct stream *s = stream;

    ENTER();
    ALIVE(s, STREAM);
    if (fake_is_capturing)
        return fake_leave(CAPTURE_UNSUPPORTED);
    run_all(s);
    return fake_leave(fake.lost);
}

/* ---- events ------------------------------------------------------------------------------------- */

CALL(hipEventCreateWithFlags, (void **event_p, unsigned flags))
{
    struct event *e;

    ENTER();
    e = fake_new(sizeof(*e));
    if ((flags & ~3u) != 0)
        return fake_leave(INVALID_VALUE);
    e->magic = EVENT;
    e->is_timed = (flags & 2u) == 0;
    fake.n_events++;
    *event_p = e;
    return fake_leave(0);
}

CALL(hipEventDestroy, (void *event))
{
    struct event *e = event;

    ENTER();
    ALIVE(e, EVENT);
    while (e->n_pending > 0)
        fake_run_everything();
    e->magic = 0;
    fake_delete(e);
    fake.n_events--;
    return fake_leave(0);
}

CALL(hipEventRecord, (void *event, void *stream))
{
    struct event *e = event;
    struct stream *s = stream;

    ENTER();
    ALIVE(e, EVENT);
    ALIVE(s, STREAM);
    if (s->capture != NULL)
        return fake_leave(CAPTURE_UNSUPPORTED);
    e->n_pending++;
    fake_add_work(s, (struct work){.kind = RECORD, .event = e});
    return fake_leave(0);
}

CALL(hipEventQuery, (void *event))
{
    struct event *e = event;

    ENTER();
    ALIVE(e, EVENT);
    if (fake_is_capturing)
        return fake_leave(CAPTURE_UNSUPPORTED);
    for (struct stream *s = streams; s != NULL && e->n_pending > 0; s = s->next)
        (void)run_one(s);
    return fake_leave(fake.lost != 0 ? fake.lost : e->n_pending > 0 ? NOT_READY : 0);
}

CALL(hipEventSynchronize, (void *event))
{
    struct event *e = event;

    ENTER();
    ALIVE(e, EVENT);
    while (e->n_pending > 0 && fake.lost == 0) {
        for (struct stream *s = streams; s != NULL; s = s->next)
            (void)run_one(s);
    }
    return fake_leave(fake.lost);
}

CALL(hipEventElapsedTime, (float *ms_p, void *start, void *end))
{
    struct event *a = start, *b = end;

    ENTER();
    ALIVE(a, EVENT);
    ALIVE(b, EVENT);
    if (!a->is_timed || !b->is_timed)
        return fake_leave(INVALID_HANDLE);
    if (a->n_pending + b->n_pending > 0)
        return fake_leave(NOT_READY);
    *ms_p =
        (float)((double)(b->at.tv_sec - a->at.tv_sec) * 1e3 + (double)(b->at.tv_nsec - a->at.tv_nsec) * 1e-6);
    return fake_leave(0);
}

/* ---- copies: from or to memory that is not pinned they are over, or staged, when the call returns ---- */

static int add_copy(struct stream *s, struct work work)
{
    ALIVE(s, STREAM);
    if (s->capture != NULL)
        return CAPTURE_UNSUPPORTED;
    if (s->device != fake_bound)
        return INVALID_HANDLE;
    fake_add_work(s, work);
    return 0;
}

CALL(hipMemcpyHtoDAsync, (void *dst, void *src, size_t bytes, void *stream))
{
    struct work work = {.kind = COPY, .dst = dst, .src = src, .bytes = bytes};

    ENTER();
    if (fake_find_block(dst, bytes) == NULL)
        return fake_leave(INVALID_VALUE);
    if (fake_find_block(src, bytes) == NULL) {
        fake.n_unpinned++;
        work.staged = fake_new(bytes);
        memcpy(work.staged, src, bytes);
        work.src = work.staged;
    }
    return fake_leave(add_copy(stream, work));
}

CALL(hipMemcpyDtoHAsync, (void *dst, void *src, size_t bytes, void *stream))
{
    int result;

    ENTER();
    if (fake_find_block(src, bytes) == NULL)
        return fake_leave(INVALID_VALUE);
    result = add_copy(stream, (struct work){.kind = COPY, .dst = dst, .src = src, .bytes = bytes});
    if (result == 0 && fake_find_block(dst, bytes) == NULL) {
        fake.n_unpinned++;
        run_all(stream);
        result = fake.lost;
    }
    return fake_leave(result);
}

CALL(hipMemcpyDtoDAsync, (void *dst, void *src, size_t bytes, void *stream))
{
    ENTER();
    if (fake_find_block(dst, bytes) == NULL || fake_find_block(src, bytes) == NULL)
        return fake_leave(INVALID_VALUE);
    return fake_leave(add_copy(stream, (struct work){.kind = COPY, .dst = dst, .src = src, .bytes = bytes}));
}

CALL(hipMemsetD8Async, (void *dst, unsigned char byte, size_t bytes, void *stream))
{
    ENTER();
    if (fake_find_block(dst, bytes) == NULL)
        return fake_leave(INVALID_VALUE);
    return fake_leave(add_copy(stream, (struct work){.kind = SET, .dst = dst, .byte = byte, .bytes = bytes}));
}
