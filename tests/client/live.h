/* live.h - a dsad process for one test: started on a socket of its own, ended with the test. */
#ifndef TESTS_CLIENT_LIVE_H
#define TESTS_CLIENT_LIVE_H

#include <check.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/dsa.h"

#define LIVE_LAYERS 2
#define LIVE_D_QK   576
#define LIVE_D_V    512

/* How long a test waits for what must happen before it gives up: a machine may be busy with other things,
 * and sanitized builds are slow and have more time. */
#if defined(DSA_SANITIZE_thread) || defined(DSA_SANITIZE_address) || defined(DSA_SANITIZE_undefined)
#define LIVE_PATIENCE_US UINT64_C(60000000)
#else
#define LIVE_PATIENCE_US UINT64_C(20000000)
#endif

struct live {
    pid_t server;
    char dir[64], target[128], log[96];
};

void live_start(struct live *live); /* scaled_512_64, 2 layers, 256 pages */
/* The same; the server writes what it has to say, from the given level on, to a file whose path lives until live_stop. */
const char *live_start_logged(struct live *live, const char *level);
void live_stop(struct live *live, int signal); /* sends it and reaps the process */

uint64_t live_now_us(void); /* monotonic */

/* Connects, or fails the test. options may be NULL. */
struct dsa_client *live_connect(const struct live *live, const struct dsa_options *options);

/* A sequence with n tokens of made-up rows in both layers (content_row of chain 1). */
uint64_t live_sequence(struct dsa_client *client, uint32_t n);

/* Fails the test with the error's text when status is not wanted. */
void live_expect(dsa_status status, dsa_status wanted, const struct dsa_error *err, const char *file,
                 int line);
#define EXPECT(call, wanted, err) live_expect((call), (wanted), (err), __FILE__, __LINE__)

/* One query row of `heads` heads over the first `topk` positions, inline, into the given buffers. */
struct small {
    uint32_t heads, topk;
    uint16_t *q, *out;
    int32_t *indices;
    float *lse;
    struct dsa_segment segment;
    struct dsa_attend attend;
};
void small_init(struct small *small, uint64_t sequence, uint32_t heads, uint32_t topk);
void small_fini(struct small *small);
void small_check(const struct small *small, uint32_t n_tokens); /* against float64 */

#endif /* TESTS_CLIENT_LIVE_H */
