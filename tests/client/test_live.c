/* test_live.c - libdsa against a running dsad: what a client relies on beyond right numbers. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "client/dsactl/content.h"
#include "live.h"
#include "ref64.h"
#include "test_main.h"

static struct live live;
static struct dsa_error err;

static void set_up(void)
{
    live_start(&live);
}

static void tear_down(void)
{
    live_stop(&live, SIGKILL);
}

static void count_done(struct dsa_request *request, const struct dsa_result *result, void *arg)
{
    (void)result;
    ++*(unsigned *)arg;
    dsa_request_free(request);
}

/* ---- traces ---------------------------------------------------------------------------------- */

#define TRACEPARENT(digit) "00-" digit "af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

/* Lines of the log with both words. The server has written them before it answers. */
static int count_lines(const char *path, const char *word, const char *other)
{
    FILE *file = fopen(path, "r");
    char line[4097];
    int n = 0;

    ck_assert_ptr_nonnull(file);
    while (fgets(line, sizeof(line), file))
        n += strstr(line, word) != NULL && strstr(line, other) != NULL;
    fclose(file);
    return n;
}

START_TEST(traceparents_reach_the_servers_log)
{
    const char *log = live_start_logged(&live, "debug");
    struct dsa_client *client = live_connect(&live, NULL);
    struct dsa_append append = {.sequence = 99}; /* refused */
    uint16_t row[LIVE_D_QK] = {0};
    struct small small;
    uint64_t id;

    append.rows =
        (struct dsa_tensor){.dtype = DSA_DTYPE_BF16, .rank = 2, .shape = {1, LIVE_D_QK}, .data = row};
    EXPECT(dsa_set_traceparent(client, TRACEPARENT("0") "x", &err), DSA_E_BAD_REQUEST, &err);
    EXPECT(dsa_set_traceparent(client, "", &err), DSA_E_BAD_REQUEST, &err);
    ck_assert_str_eq(err.field, "traceparent");
    EXPECT(dsa_append(client, &append, NULL, &err), DSA_E_NOT_FOUND, &err);
    ck_assert_int_eq(count_lines(log, "request refused", "trace_id="), 0);
    EXPECT(dsa_set_traceparent(client, TRACEPARENT("0"), &err), DSA_OK, &err);
    EXPECT(dsa_append(client, &append, NULL, &err), DSA_E_NOT_FOUND, &err);
    ck_assert_int_eq(count_lines(log, "request refused", "trace_id=0af7651916cd43dd8448eb211c80319c"), 1);

    id = live_sequence(client, 10);
    small_init(&small, id, 16, 8);
    small.segment.sequence = 99;
    EXPECT(dsa_attend(client, &small.attend, NULL, &err), DSA_E_NOT_FOUND, &err);
    ck_assert_int_eq(count_lines(log, "attend refused", "trace_id=0af7651916cd43dd8448eb211c80319c"), 1);
    small.attend.traceparent = TRACEPARENT("1");
    EXPECT(dsa_attend(client, &small.attend, NULL, &err), DSA_E_NOT_FOUND, &err);
    ck_assert_int_eq(count_lines(log, "attend refused", "trace_id=1af7651916cd43dd8448eb211c80319c"), 1);
    small.attend.traceparent = "00-1";
    EXPECT(dsa_attend(client, &small.attend, NULL, &err), DSA_E_BAD_REQUEST, &err);
    small.attend.traceparent = NULL;
    EXPECT(dsa_set_traceparent(client, NULL, &err), DSA_OK, &err);
    EXPECT(dsa_attend(client, &small.attend, NULL, &err), DSA_E_NOT_FOUND, &err);
    ck_assert_int_eq(count_lines(log, "attend refused", "trace_id="), 2);
    small_fini(&small);
    dsa_close(client);
    live_stop(&live, SIGKILL);
}
END_TEST

/* ---- session --------------------------------------------------------------------------------- */

START_TEST(a_busy_application_keeps_its_lease)
{
    enum { LEASE_US = 1000000 }; /* long enough for a keeper that waits for a processor */
    struct dsa_options options = {.connect_timeout_us = LIVE_PATIENCE_US, .lease_us = LEASE_US};
    struct dsa_client *client = live_connect(&live, &options);
    struct timespec span = {.tv_nsec = 50000000};
    uint64_t begin_us = live_now_us(), gone_us;
    struct dsa_session_info info;
    uint64_t id;

    do { /* leases in which the application asks the server for nothing: the time itself is what is tested */
        nanosleep(&span, NULL);
        dsa_session_info(client, &info);
        ck_assert(info.is_alive);
        gone_us = live_now_us() - begin_us;
        ck_assert_msg(gone_us < LIVE_PATIENCE_US, "%d heartbeats", (int)info.n_heartbeats);
    } while (gone_us < 2 * LEASE_US || info.n_heartbeats < 5);
    EXPECT(dsa_sequence_create(client, NULL, &id, &err), DSA_OK, &err);
    dsa_close(client);
}
END_TEST

static void count_lost(struct dsa_client *client, const struct dsa_error *why, void *arg)
{
    (void)client;
    ck_assert_int_ne(why->code, DSA_OK);
    ++*(unsigned *)arg;
}

START_TEST(a_dead_server_completes_everything)
{
    unsigned n_lost = 0, n_done = 0;
    struct dsa_options options = {
        .connect_timeout_us = LIVE_PATIENCE_US, .on_lost = count_lost, .on_lost_arg = &n_lost};
    struct dsa_client *client = live_connect(&live, &options);
    uint64_t id = live_sequence(client, 200);
    struct small small;
    struct dsa_request *request;
    struct dsa_stats stats;
    uint64_t late_us;

    small_init(&small, id, 16, 100);
    kill(live.server, SIGSTOP); /* so that nothing is answered before the end */
    for (int i = 0; i < 50; i++)
        EXPECT(dsa_attend_submit(client, NULL, &small.attend, count_done, &n_done, &request, &err), DSA_OK,
               &err);
    EXPECT(dsa_attend_submit(client, NULL, &small.attend, NULL, NULL, &request, &err), DSA_OK, &err);
    kill(live.server, SIGKILL);
    EXPECT(dsa_wait(request, LIVE_PATIENCE_US, &err), DSA_E_CONNECT, &err);
    dsa_request_free(request);
    EXPECT(dsa_wait_all(client, LIVE_PATIENCE_US, &err), DSA_OK, &err);
    ck_assert_uint_eq(n_done, 50);
    late_us = live_now_us() + LIVE_PATIENCE_US;
    while (n_lost == 0 && live_now_us() < late_us)
        dsa_poll(client, 50000);
    ck_assert_uint_eq(n_lost, 1);
    EXPECT(dsa_stats(client, &stats, &err), DSA_E_CONNECT, &err);
    small_fini(&small);
    dsa_close(client);
}
END_TEST

START_TEST(a_session_can_be_handed_over)
{
    struct dsa_options options = {.connect_timeout_us = LIVE_PATIENCE_US, .grace_us = LIVE_PATIENCE_US};
    struct dsa_client *client = live_connect(&live, &options);
    uint64_t id = live_sequence(client, 70);
    struct dsa_session_info info;
    struct dsa_sequence sequence;
    uint8_t token[DSA_TOKEN_BYTES];
    uint64_t late_us;

    dsa_session_info(client, &info);
    memcpy(token, info.token, sizeof(token));
    dsa_abandon(client);
    options.reattach_token = token;
    /* The server may see the loss of the old stream a moment later. */
    late_us = live_now_us() + LIVE_PATIENCE_US;
    while (dsa_connect(live.target, &options, &client, &err) != DSA_OK) {
        ck_assert_int_eq(err.code, DSA_E_PRECONDITION);
        ck_assert_msg(live_now_us() < late_us, "the old stream is never missed");
    }
    dsa_session_info(client, &info);
    ck_assert(info.reattached);
    EXPECT(dsa_sequence_get(client, id, &sequence, &err), DSA_OK, &err);
    ck_assert_uint_eq(sequence.n_tokens, 70);
    ck_assert_uint_eq(sequence.n_layer_tokens, LIVE_LAYERS);
    dsa_sequence_fini(&sequence);
    dsa_close(client);
    EXPECT(dsa_connect(live.target, &options, &client, &err), DSA_E_NO_SESSION, &err);
}
END_TEST

START_TEST(sessions_do_not_see_each_other)
{
    struct dsa_client *a = live_connect(&live, NULL), *b = live_connect(&live, NULL);
    uint64_t id = live_sequence(a, 5);
    struct small small;
    struct dsa_stats stats;

    small_init(&small, id, 4, 5);
    EXPECT(dsa_attend(b, &small.attend, NULL, &err), DSA_E_NOT_FOUND, &err);
    EXPECT(dsa_sequence_release(b, id, &err), DSA_E_NOT_FOUND, &err);
    EXPECT(dsa_attend(a, &small.attend, NULL, &err), DSA_OK, &err);
    small_check(&small, 5);
    dsa_close(a);
    EXPECT(dsa_stats(b, &stats, &err), DSA_OK, &err);
    ck_assert_uint_eq(stats.n_sessions, 1);
    ck_assert_uint_eq(stats.pools[0].n_pages_used, 0);
    small_fini(&small);
    dsa_close(b);
}
END_TEST

START_TEST(health_and_capabilities)
{
    struct dsa_options options = {.connect_timeout_us = LIVE_PATIENCE_US, .no_session = true};
    struct dsa_client *client = live_connect(&live, &options);
    bool is_serving = false;

    EXPECT(dsa_health(client, "", &is_serving, &err), DSA_OK, &err);
    ck_assert(is_serving);
    EXPECT(dsa_health(client, "no.such.Service", &is_serving, &err), DSA_E_NOT_FOUND, &err);
    ck_assert_uint_eq(dsa_capabilities(client)->pools[0].n_pages, 256);
    ck_assert_uint_eq(dsa_capabilities(client)->pools[0].d_qk, LIVE_D_QK);
    ck_assert_uint_ge(dsa_capabilities(client)->n_rules, 1);
    dsa_close(client);
}
END_TEST

/* ---- requests -------------------------------------------------------------------------------- */

START_TEST(a_bad_request_does_not_end_the_stream)
{
    struct dsa_client *client = live_connect(&live, NULL);
    uint64_t id = live_sequence(client, 100);
    struct small small;

    small_init(&small, id, 8, 64);
    small.attend.layer = 9;
    EXPECT(dsa_attend(client, &small.attend, NULL, &err), DSA_E_BAD_RANGE, &err);
    ck_assert_msg(strstr(err.field, "layer") != NULL, "field: %s", err.field);
    ck_assert_str_eq(err.value, "9");
    small.attend.layer = 1;
    small.attend.q.shape[2] = 500;
    ck_assert_int_ne(dsa_attend(client, &small.attend, NULL, &err), DSA_OK);
    small.attend.q.shape[2] = LIVE_D_QK;
    EXPECT(dsa_attend(client, &small.attend, NULL, &err), DSA_OK, &err);
    small_check(&small, 100);
    small_fini(&small);
    dsa_close(client);
}
END_TEST

struct chain {
    struct dsa_client *client;
    struct small *small;
    unsigned n;
};

static void next_link(struct dsa_request *request, const struct dsa_result *result, void *arg)
{
    struct chain *chain = arg;
    struct dsa_request *next;
    struct dsa_stats stats;

    ck_assert_int_eq(result->error.code, DSA_OK);
    dsa_request_free(request);
    if (chain->n % 10 == 0) /* blocking calls are fine in here */
        EXPECT(dsa_stats(chain->client, &stats, &err), DSA_OK, &err);
    if (++chain->n < 100)
        EXPECT(dsa_attend_submit(chain->client, NULL, &chain->small->attend, next_link, chain, &next, &err),
               DSA_OK, &err);
}

START_TEST(callbacks_may_submit)
{
    struct dsa_client *client = live_connect(&live, NULL);
    struct small small;
    struct chain chain = {client, &small, 0};
    struct dsa_request *request;

    small_init(&small, live_sequence(client, 64), 2, 8);
    EXPECT(dsa_attend_submit(client, NULL, &small.attend, next_link, &chain, &request, &err), DSA_OK, &err);
    EXPECT(dsa_wait_all(client, LIVE_PATIENCE_US, &err), DSA_OK, &err);
    ck_assert_uint_eq(chain.n, 100);
    small_fini(&small);
    dsa_close(client);
}
END_TEST

START_TEST(too_many_in_flight_is_said_here)
{
    struct dsa_client *client = live_connect(&live, NULL);
    uint32_t limit = dsa_capabilities(client)->limits.max_inflight_per_stream;
    struct dsa_request *request;
    struct small small;
    unsigned n_done = 0;

    small_init(&small, live_sequence(client, 64), 1, 1);
    kill(live.server, SIGSTOP);
    for (uint32_t i = 0; i < limit; i++)
        EXPECT(dsa_attend_submit(client, NULL, &small.attend, count_done, &n_done, &request, &err), DSA_OK,
               &err);
    EXPECT(dsa_attend_submit(client, NULL, &small.attend, count_done, &n_done, &request, &err),
           DSA_E_QUEUE_FULL, &err);
    kill(live.server, SIGCONT);
    EXPECT(dsa_wait_all(client, LIVE_PATIENCE_US, &err), DSA_OK, &err);
    ck_assert_uint_eq(n_done, limit);
    small_fini(&small);
    dsa_close(client);
}
END_TEST

START_TEST(a_freed_request_writes_no_more)
{
    struct dsa_client *client = live_connect(&live, NULL);
    struct dsa_request *request;
    struct small small;
    unsigned n_done = 0;

    small_init(&small, live_sequence(client, 64), 4, 8);
    memset(small.out, 0x5a, (size_t)4 * LIVE_D_V * 2);
    kill(live.server, SIGSTOP);
    EXPECT(dsa_attend_submit(client, NULL, &small.attend, count_done, &n_done, &request, &err), DSA_OK, &err);
    dsa_request_free(request);
    kill(live.server, SIGCONT);
    EXPECT(dsa_wait_all(client, LIVE_PATIENCE_US, &err), DSA_OK, &err);
    ck_assert_uint_eq(n_done, 0);
    for (size_t i = 0; i < 4 * LIVE_D_V; i++)
        ck_assert_uint_eq(small.out[i], 0x5a5a);
    small_fini(&small);
    dsa_close(client);
}
END_TEST

static void keep_code(struct dsa_request *request, const struct dsa_result *result, void *arg)
{
    *(dsa_status *)arg = result->error.code;
    dsa_request_free(request);
}

/* ThreadSanitizer slows launches tenfold: fewer of them take as long. */
#if defined(DSA_SANITIZE_thread) || defined(DSA_SANITIZE_address)
#define N_HEAVY 6
#else
#define N_HEAVY 40
#endif
#define HEAVY_ROWS      16
#define HEAVY_OUT_BYTES (HEAVY_ROWS * 128 * 512 * 2)

/* Keeps the device busy for a good while, with messages so small that what is sent after them arrives long
 * before it is their turn: requests that read the same memory and write each to a place of its own. */
static void submit_heavy(struct dsa_client *client, struct small *big, struct dsa_memory *memory, unsigned n,
                         unsigned *n_done)
{
    uint64_t rows = HEAVY_ROWS, q_bytes = rows * big->heads * LIVE_D_QK * 2,
             list_bytes = rows * big->topk * 4;
    struct dsa_request *request;

    big->segment.n_rows = (uint32_t)rows;
    big->attend.want_lse = false;
    big->attend.q.shape[0] = big->attend.indices.shape[0] = rows;
    big->attend.q.data = big->attend.indices.data = NULL;
    big->attend.q.memory = big->attend.indices.memory = memory;
    big->attend.indices.offset = q_bytes; /* zeros: the first token, again and again */
    for (unsigned i = 0; i < n; i++) {
        big->attend.out =
            (struct dsa_output){.memory = memory, .offset = q_bytes + list_bytes + i * HEAVY_OUT_BYTES};
        EXPECT(dsa_attend_submit(client, NULL, &big->attend, count_done, n_done, &request, &err), DSA_OK,
               &err);
    }
}

START_TEST(deadline_and_cancel)
{
    struct dsa_client *client = live_connect(&live, NULL);
    dsa_status late = DSA_OK, cancelled = DSA_OK;
    struct dsa_memory *memory;
    struct dsa_request *request;
    struct small big, small;
    unsigned n_done = 0;

    small_init(&big, live_sequence(client, 200), 128, 200);
    small_init(&small, big.segment.sequence, 3,
               8); /* other heads: it cannot share a launch with the big ones */
    EXPECT(dsa_memory_create(client, (4 << 20) + N_HEAVY * HEAVY_OUT_BYTES, DSA_ACCESS_READ_WRITE, &memory,
                             &err),
           DSA_OK, &err);
    /* The server is stopped until all of it lies in its socket: a client that has to wait for a processor
     * between two messages must not let the device get ahead of the last one. */
    kill(live.server, SIGSTOP);
    submit_heavy(client, &big, memory, N_HEAVY, &n_done);
    small.attend.priority = -100;
    small.attend.deadline_us = 1;
    EXPECT(dsa_attend_submit(client, NULL, &small.attend, keep_code, &late, &request, &err), DSA_OK, &err);
    small.attend.deadline_us = 0;
    EXPECT(dsa_attend_submit(client, NULL, &small.attend, keep_code, &cancelled, &request, &err), DSA_OK,
           &err);
    dsa_request_cancel(request);
    ck_assert_uint_eq(dsa_poll(client, 200000), 0); /* sends what is left; nothing can be answered */
    kill(live.server, SIGCONT);
    EXPECT(dsa_wait_all(client, 2 * LIVE_PATIENCE_US, &err), DSA_OK, &err);
    ck_assert_uint_eq(n_done, N_HEAVY);
    ck_assert_int_eq(late, DSA_E_DEADLINE);
    ck_assert_int_eq(cancelled, DSA_E_CANCELLED);
    EXPECT(dsa_memory_destroy(memory, &err), DSA_OK, &err);
    small_fini(&big);
    small_fini(&small);
    dsa_close(client);
}
END_TEST

START_TEST(closing_a_stream_cancels_what_is_pending)
{
    struct dsa_client *client = live_connect(&live, NULL);
    dsa_status code = DSA_OK;
    struct dsa_stream *stream;
    struct dsa_request *request;
    struct small small;

    small_init(&small, live_sequence(client, 64), 4, 8);
    EXPECT(dsa_stream_open(client, &stream, &err), DSA_OK, &err);
    kill(live.server, SIGSTOP);
    EXPECT(dsa_attend_submit(client, stream, &small.attend, keep_code, &code, &request, &err), DSA_OK, &err);
    dsa_stream_close(stream);
    EXPECT(dsa_wait_all(client, LIVE_PATIENCE_US, &err), DSA_OK, &err);
    ck_assert_int_eq(code, DSA_E_CANCELLED);
    kill(live.server, SIGCONT);
    EXPECT(dsa_attend(client, &small.attend, NULL, &err), DSA_OK,
           &err); /* the client's own stream is another one */
    small_check(&small, 64);
    small_fini(&small);
    dsa_close(client);
}
END_TEST

START_TEST(waiting_has_a_limit)
{
    struct dsa_client *client = live_connect(&live, NULL);
    struct dsa_request *request;
    struct small small;

    small_init(&small, live_sequence(client, 64), 4, 8);
    kill(live.server, SIGSTOP);
    EXPECT(dsa_attend_submit(client, NULL, &small.attend, NULL, NULL, &request, &err), DSA_OK, &err);
    EXPECT(dsa_wait(request, 50000, &err), DSA_E_TIMEOUT, &err);
    ck_assert(!dsa_request_is_done(request));
    kill(live.server, SIGCONT);
    EXPECT(dsa_wait(request, LIVE_PATIENCE_US, &err), DSA_OK, &err);
    ck_assert(dsa_request_is_done(request));
    ck_assert_uint_eq(dsa_request_result(request)->n_rows, 1);
    dsa_request_free(request);
    small_fini(&small);
    dsa_close(client);
}
END_TEST

/* ---- memory ---------------------------------------------------------------------------------- */

START_TEST(memory_is_destroyed_after_its_requests)
{
    struct dsa_client *client = live_connect(&live, NULL);
    struct dsa_memory *memory;
    struct dsa_request *request;
    struct small small;
    struct dsa_stats stats;

    small_init(&small, live_sequence(client, 64), 4, 8);
    EXPECT(dsa_memory_create(client, 1 << 16, DSA_ACCESS_READ_WRITE, &memory, &err), DSA_OK, &err);
    small.attend.out = (struct dsa_output){.memory = memory};
    EXPECT(dsa_attend_submit(client, NULL, &small.attend, NULL, NULL, &request, &err), DSA_OK, &err);
    EXPECT(dsa_memory_destroy(memory, &err), DSA_OK, &err);
    ck_assert(dsa_request_is_done(request));
    EXPECT(dsa_wait(request, 0, &err), DSA_OK, &err);
    dsa_request_free(request);
    EXPECT(dsa_stats(client, &stats, &err), DSA_OK, &err);
    ck_assert_uint_eq(stats.n_regions, 0);
    small_fini(&small);
    dsa_close(client);
}
END_TEST

START_TEST(own_memfd_must_be_sealed)
{
    struct dsa_client *client = live_connect(&live, NULL);
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    struct dsa_memory *memory;

    ck_assert_int_eq(ftruncate(fd, 16384), 0);
    EXPECT(dsa_memory_import(client, fd, 0, 16385, DSA_ACCESS_READ, &memory, &err), DSA_E_BAD_RANGE, &err);
    EXPECT(dsa_memory_import(client, fd, 100, 4096, DSA_ACCESS_READ, &memory, &err), DSA_E_BAD_REQUEST, &err);
    EXPECT(dsa_memory_import(client, fd, 0, 16384, DSA_ACCESS_READ, &memory, &err), DSA_E_BAD_FD, &err);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    EXPECT(dsa_memory_import(client, fd, 4096, 8192, DSA_ACCESS_READ, &memory, &err), DSA_OK, &err);
    ck_assert_uint_eq(dsa_memory_bytes(memory), 8192);
    close(fd);
    memset(dsa_memory_data(memory), 1, 8192);
    EXPECT(dsa_memory_destroy(memory, &err), DSA_OK, &err);
    dsa_close(client);
}
END_TEST

/* q and out as every second row of wider arrays; what lies between must stay as it is. */
START_TEST(strided_tensors_in_memory)
{
    enum { HEADS = 4, Q_PITCH = HEADS * LIVE_D_QK * 2 + 64, OUT_PITCH = 2 * LIVE_D_V * 2 };
    struct dsa_client *client = live_connect(&live, NULL);
    struct dsa_memory *memory;
    struct small small;
    uint8_t *data;

    small_init(&small, live_sequence(client, 64), HEADS, 8);
    EXPECT(dsa_memory_create(client, 1 << 18, DSA_ACCESS_READ_WRITE, &memory, &err), DSA_OK, &err);
    data = dsa_memory_data(memory);
    memset(data, 0x77, 1 << 18);
    memcpy(data + 4096, small.q, HEADS * LIVE_D_QK * 2);
    small.attend.q = (struct dsa_tensor){.dtype = DSA_DTYPE_BF16,
                                         .rank = 3,
                                         .shape = {1, HEADS, LIVE_D_QK},
                                         .strides_bytes = {Q_PITCH, LIVE_D_QK * 2, 2},
                                         .memory = memory,
                                         .offset = 4096};
    small.attend.out = (struct dsa_output){
        .memory = memory, .offset = 65536, .strides_bytes = {HEADS * OUT_PITCH, OUT_PITCH, 2}};
    EXPECT(dsa_attend(client, &small.attend, NULL, &err), DSA_OK, &err);
    for (size_t h = 0; h < HEADS; h++) {
        memcpy(small.out + h * LIVE_D_V, data + 65536 + h * OUT_PITCH, LIVE_D_V * 2);
        for (size_t i = LIVE_D_V * 2; i < OUT_PITCH; i++)
            ck_assert_uint_eq(data[65536 + h * OUT_PITCH + i], 0x77);
    }
    small_check(&small, 64);
    EXPECT(dsa_memory_destroy(memory, &err), DSA_OK, &err);
    small_fini(&small);
    dsa_close(client);
}
END_TEST

START_TEST(large_messages_are_refused_and_large_memory_works)
{
    enum { ROWS = 456, HEADS = 128 }; /* q of 64 MiB */
    struct dsa_client *client = live_connect(&live, NULL);
    uint64_t q_bytes = (uint64_t)ROWS * HEADS * LIVE_D_QK * 2,
             out_bytes = (uint64_t)ROWS * HEADS * LIVE_D_V * 2;
    struct dsa_memory *memory;
    struct dsa_result result;
    struct small small;

    small_init(&small, live_sequence(client, 64), HEADS, 2);
    EXPECT(dsa_memory_create(client, q_bytes + out_bytes + ROWS * 8, DSA_ACCESS_READ_WRITE, &memory, &err),
           DSA_OK, &err);
    small.segment.n_rows = ROWS;
    small.attend.want_lse = false;
    small.attend.q.shape[0] = small.attend.indices.shape[0] = ROWS;
    small.attend.q.data = dsa_memory_data(memory); /* by value: 64 MiB in one message */
    small.attend.out = (struct dsa_output){.memory = memory, .offset = q_bytes};
    small.attend.indices.data = NULL;
    small.attend.indices.memory = memory;
    small.attend.indices.offset = q_bytes + out_bytes;
    EXPECT(dsa_attend(client, &small.attend, NULL, &err), DSA_E_TOO_LARGE, &err);
    small.attend.q.data = NULL;
    small.attend.q.memory = memory;
    EXPECT(dsa_attend(client, &small.attend, &result, &err), DSA_OK, &err);
    ck_assert_uint_eq(result.n_rows, ROWS);
    EXPECT(dsa_memory_destroy(memory, &err), DSA_OK, &err);
    small_fini(&small);
    dsa_close(client);
}
END_TEST

/* ---- rows ------------------------------------------------------------------------------------ */

struct rows {
    uint64_t n;
    unsigned n_calls, stop_after;
    uint16_t *values;
};

static dsa_status take_rows(uint64_t first, uint32_t n_tokens, const void *rows, size_t n_bytes, void *arg)
{
    struct rows *all = arg;

    ck_assert_uint_eq(first, all->n + 3);
    ck_assert_uint_eq(n_bytes, (size_t)n_tokens * LIVE_D_QK * 2);
    memcpy(all->values + all->n * LIVE_D_QK, rows, n_bytes);
    all->n += n_tokens;
    return ++all->n_calls == all->stop_after ? DSA_E_CANCELLED : DSA_OK;
}

START_TEST(rows_come_back_dequantised)
{
    const struct ref64_layout *layout = ref64_layout_by_name("scaled_512_64");
    struct dsa_client *client = live_connect(&live, NULL);
    uint64_t id = live_sequence(client, 200);
    uint16_t values[LIVE_D_QK], want[LIVE_D_QK];
    uint8_t packed[656];
    struct rows all = {.values = malloc(200 * sizeof(values))};

    EXPECT(dsa_export(client, id, 1, 3, 150, DSA_DTYPE_BF16, take_rows, &all, &err), DSA_OK, &err);
    ck_assert_uint_eq(all.n, 150);
    for (uint64_t i = 0; i < 150; i++) {
        content_row(1, i + 3, 1, values, LIVE_D_QK);
        ref64_quantise_row(layout, REF64_RULE_POW2, 1, values, packed);
        ref64_dequant_row_bf16(layout, 1, packed, want);
        ck_assert_mem_eq(all.values + i * LIVE_D_QK, want, sizeof(want));
    }
    EXPECT(dsa_export(client, id, 1, 190, 50, DSA_DTYPE_BF16, take_rows, &all, &err), DSA_E_BAD_RANGE, &err);
    all = (struct rows){.stop_after = 1, .values = all.values};
    EXPECT(dsa_export(client, id, 0, 3, 0, DSA_DTYPE_BF16, take_rows, &all, &err), DSA_E_CANCELLED, &err);
    EXPECT(dsa_sequence_release(client, id, &err), DSA_OK,
           &err); /* the client goes on after a stopped export */
    free(all.values);
    dsa_close(client);
}
END_TEST

START_TEST(appends_are_ordered_and_refused_whole)
{
    struct dsa_client *client = live_connect(&live, NULL);
    uint64_t id = live_sequence(client, 10);
    uint16_t row[LIVE_D_QK];
    struct dsa_append append = {
        .sequence = id,
        .rows = {.dtype = DSA_DTYPE_BF16, .rank = 2, .shape = {1, LIVE_D_QK}, .data = row},
        .has_position = true,
    };
    struct dsa_append_result result;
    struct dsa_request *requests[20];

    for (uint64_t i = 0; i < 20;
         i++) { /* all in flight at once: each finds the length that the one before left */
        content_row(1, 10 + i, 0, row, LIVE_D_QK);
        append.position = 10 + i;
        EXPECT(dsa_append_submit(client, NULL, &append, NULL, NULL, &requests[i], &err), DSA_OK, &err);
    }
    for (uint64_t i = 0; i < 20; i++) {
        EXPECT(dsa_wait(requests[i], 0, &err), DSA_OK, &err);
        ck_assert_uint_eq(dsa_request_result(requests[i])->n_tokens, 11 + i);
        dsa_request_free(requests[i]);
    }
    EXPECT(dsa_append(client, &append, NULL, &err), DSA_E_PRECONDITION, &err); /* position 29 is taken */
    append.has_position = false;
    append.strict = true;
    row[5] = 0x7fc0;
    EXPECT(dsa_append(client, &append, NULL, &err), DSA_E_NONFINITE, &err);
    append.strict = false;
    EXPECT(dsa_append(client, &append, &result, &err), DSA_OK, &err);
    ck_assert_uint_eq(result.n_tokens, 31);
    ck_assert_uint_eq(result.n_nonfinite, 1);
    dsa_close(client);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("client against dsad");
    TCase *traces = tcase_create("traces"); /* starts servers of its own */
    TCase *session = tcase_create("session"), *request = tcase_create("request"),
          *memory = tcase_create("memory"), *rows = tcase_create("rows"),
          *all[] = {session, request, memory, rows};

    (void)max;
    tcase_add_test(traces, traceparents_reach_the_servers_log);
    tcase_set_timeout(traces, 60);
    suite_add_tcase(suite, traces);
    tcase_add_test(session, a_busy_application_keeps_its_lease);
    tcase_add_test(session, a_dead_server_completes_everything);
    tcase_add_test(session, a_session_can_be_handed_over);
    tcase_add_test(session, sessions_do_not_see_each_other);
    tcase_add_test(session, health_and_capabilities);
    tcase_add_test(request, a_bad_request_does_not_end_the_stream);
    tcase_add_test(request, callbacks_may_submit);
    tcase_add_test(request, too_many_in_flight_is_said_here);
    tcase_add_test(request, a_freed_request_writes_no_more);
    tcase_add_test(request, deadline_and_cancel);
    tcase_add_test(request, closing_a_stream_cancels_what_is_pending);
    tcase_add_test(request, waiting_has_a_limit);
    tcase_add_test(memory, memory_is_destroyed_after_its_requests);
    tcase_add_test(memory, own_memfd_must_be_sealed);
    tcase_add_test(memory, strided_tensors_in_memory);
    tcase_add_test(memory, large_messages_are_refused_and_large_memory_works);
    tcase_add_test(rows, rows_come_back_dequantised);
    tcase_add_test(rows, appends_are_ordered_and_refused_whole);
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        tcase_add_checked_fixture(all[i], set_up, tear_down);
        tcase_set_timeout(all[i], 60);
        suite_add_tcase(suite, all[i]);
    }
    suites_p[0] = suite;
    return 1;
}
