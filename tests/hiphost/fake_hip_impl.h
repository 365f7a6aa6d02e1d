/* fake_hip_impl.h - what the files of the fake HIP runtime share; see fake_hip.h. Numbers of results and flags are HIP's. */
#ifndef TESTS_HIPHOST_FAKE_HIP_IMPL_H
#define TESTS_HIPHOST_FAKE_HIP_IMPL_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fake_hip.h"

enum {
    INVALID_VALUE = 1,
    NO_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    NO_BINARY = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_REGISTERED = 713,
    LAUNCH_FAILURE = 719,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_UNMATCHED = 903
};

/* ---- calls (fake_hip.c) ------------------------------------------------------------------------- */

extern struct fake_hip fake;
extern _Thread_local int fake_bound; /* device */

__attribute__((noreturn)) void fake_die(const char *what);
void *fake_new(size_t bytes);     /* zeroed; ends the process where there is no memory */
void fake_delete(void *p);        /* NULL is fine */
int fake_enter(const char *call); /* what it returns, unless 0, is what the call returns through fake_leave */
int fake_leave(int result);

#define CALL(name, params)                                                                                   \
    FAKE_HIP_API int name params;                                                                            \
    int name params

#define ENTER()                                                                                              \
    do {                                                                                                     \
        int result_ = fake_enter(__func__);                                                                  \
        if (result_ != 0)                                                                                    \
            return fake_leave(result_);                                                                      \
    } while (0)

/* ---- memory (fake_hip_memory.c) ------------------------------------------------------------------ */

struct block {
    uint8_t *at;
    size_t bytes;
    size_t mapped; /* whole pages, and the two that nobody may touch; 0: somebody else's memory, registered */
    int fd;        /* the memory's own; -1: none */
    bool is_pinned;
    struct block *next;
};

/* The block that holds [p, p + bytes), or NULL. */
struct block *fake_find_block(const void *p, size_t bytes);

/* ---- streams (fake_hip_stream.c) ------------------------------------------------------------------- */

enum { STREAM = 0x5354524d, EVENT, MODULE, FUNCTION, GRAPH, EXEC, EXTERNAL };

struct module {
    int magic;
    struct fake_object object;
    struct function *functions;
};

struct function {
    int magic;
    char name[64];
    const char *arch;
    size_t param_bytes;
    struct function *next;
};

struct node { /* a kernel with its arguments */
    const struct function *function;
    uint32_t grid[3], block, shared_bytes;
    uint8_t *param;
    struct node *next;
};

struct graph { /* and what is made of one */
    int magic;
    struct node *nodes;
    struct node *ids[64]; /* of an exec: the graph's nodes, by which its own are named */
    int n_nodes;
};

struct event {
    int magic;
    int n_pending;
    bool is_timed;
    struct timespec at;
};

enum kind { COPY, SET, RUN, RECORD };
struct work {
    enum kind kind;
    void *dst;
    const void *src;
    uint8_t *staged; /* what src points into, if it is ours */
    size_t bytes;
    uint8_t byte;
    struct node node;
    struct event *event;
    struct work *next;
};

struct stream {
    int magic;
    int device;
    struct work *first, **end;
    struct graph *capture; /* being recorded */
    struct stream *next;
};
#define ALIVE(p, what)                                                                                       \
    do {                                                                                                     \
        if ((p) == NULL || (p)->magic != (what))                                                             \
            fake_die("a handle that is not alive");                                                          \
    } while (0)

extern _Thread_local bool fake_is_capturing;

struct node fake_copy_node(const struct node *from);
void fake_add_work(struct stream *s, struct work work);
void fake_run_everything(void);

#endif /* TESTS_HIPHOST_FAKE_HIP_IMPL_H */
