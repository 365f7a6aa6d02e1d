/* fence.h - the full barrier between a store and a later load of another word, for the two places where one thread says
 * "I sleep" and another "here is work" (worker.c). ThreadSanitizer does not know fences; there a read-modify-write of one
 * shared word stands in, which orders at least as much. Any thread. */
#ifndef SERVER_FENCE_H
#define SERVER_FENCE_H

#include <stdatomic.h>

#if defined(DSA_SANITIZE_thread)
extern atomic_int srv_fence_word;
#define srv_fence() ((void)atomic_fetch_add(&srv_fence_word, 1))
#else
#define srv_fence() atomic_thread_fence(memory_order_seq_cst)
#endif

#endif /* SERVER_FENCE_H */
