/* kit.h - what the server's tests share: a service thread with a real loop, scratch directories, sockets,
 * captured log lines, and allocations that fail on demand.
 *
 * The functions fail the running Check test themselves. Nothing here may be called before Check has
 * forked. */
#ifndef TESTS_SERVER_KIT_H
#define TESTS_SERVER_KIT_H

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/core/err.h"
#include "test_main.h"

struct rpc;
struct rpc_bell;
struct srv_loop;

/* Sanitized builds repeat less, to stay within their time. */
#if defined(DSA_SANITIZE_thread) || defined(DSA_SANITIZE_address) || defined(DSA_SANITIZE_undefined)
#define KIT_TIMES(normal, slow) (slow)
#else
#define KIT_TIMES(normal, slow) (normal)
#endif

/* How long a test waits for what must happen before it gives up: a machine may be busy with other things,
 * and the limit of a whole test, 60 s, is stretched fourfold for sanitized builds (tests/run). */
#define KIT_PATIENCE_S KIT_TIMES(20, 60)

/* ck_assert_msg writes to a pipe each time it is passed; this one is for loops. */
#define KIT_EXPECT(cond, ...)                                                                                \
    do {                                                                                                     \
        if (!(cond))                                                                                         \
            ck_abort_msg(__VA_ARGS__);                                                                       \
    } while (0)

/* The status must be OK; prints what the error says otherwise. */
#define KIT_OK(call, err)                                                                                    \
    do {                                                                                                     \
        dsa_status kit_rc = (call);                                                                          \
        ck_assert_msg(kit_rc == DSA_OK, "%s: status %d, %s=%s: %s", #call, kit_rc, (err)->field,             \
                      (err)->value, (err)->text);                                                            \
    } while (0)

/* Waits for a semaphore; false when patience runs out. */
bool kit_wait(sem_t *sem);

/* ---- files and descriptors ------------------------------------------------------------------- */

/* Makes a fresh directory; the path lives until the next call. kit_dir_remove deletes it and what is in
 * it. */
const char *kit_dir_make(void);
void kit_dir_remove(void);
/* "<dir>/<name>"; malloc'ed. */
char *kit_path(const char *name);

int kit_n_fds(void); /* descriptors open in this process */

/* Connects to a unix socket. type: SOCK_STREAM or SOCK_SEQPACKET. -1 with errno on failure. */
int kit_connect(const char *path, int type);

/* ---- log lines --------------------------------------------------------------------------------- */

/* stderr goes to a pipe from here on, until kit_log_end. */
void kit_log_begin(void);
/* Reads lines until one contains the text; fails the test when patience runs out. */
void kit_log_expect(const char *text);
void kit_log_end(void);

/* ---- a service thread --------------------------------------------------------------------------- */

struct kit_loop {
    struct rpc *rpc;
    struct srv_loop *loop;
    struct rpc_bell *bell;
    pthread_t thread;
    bool is_running;
    atomic_int n_sleeps; /* how often L went to sleep */
    atomic_bool must_stop;
    atomic_bool has_call;
    void (*call)(void *arg);
    void *call_arg;
    sem_t called;
    bool (*settle)(void *arg); /* the test's own; may be NULL */
    void *settle_arg;
};

/* gRPC, a server without methods and the loop; the calling thread is L until kit_loop_start. */
void kit_loop_open(struct kit_loop *k, uint64_t spin_us);
void kit_loop_start(struct kit_loop *k); /* L is a thread of its own now */
/* Runs fn on L and waits for it. Before kit_loop_start: calls it. */
void kit_loop_call(struct kit_loop *k, void (*fn)(void *arg), void *arg);
void kit_loop_stop(struct kit_loop *k);  /* joins; the calling thread is L again */
void kit_loop_close(struct kit_loop *k); /* every handle on the loop has been closed */

/* ---- failing allocations ------------------------------------------------------------------------- */

/* For programs linked with --wrap for malloc, calloc, realloc and free (see CMakeLists.txt). The n-th
 * allocation from now fails, n from 1; 0 = none. Counts what code of ours allocates; shared libraries are
 * not seen. */
void kit_alloc_begin(long fail_at);
/* Ends it. Returns how many allocations were made; *n_live_p: blocks allocated since and not freed. */
long kit_alloc_end(long *n_live_p);
size_t kit_alloc_bytes(void); /* allocated since kit_alloc_begin */

#endif /* TESTS_SERVER_KIT_H */
