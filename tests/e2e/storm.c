/* storm.c - dsa-storm: more calls and more clients than a Python client can make. Started by test_scale.py, which gives it a
 * server and judges what it prints.
 *
 *   dsa-storm answers TARGET N_CLIENTS     each of N clients asks for 16 MiB and does not read; then all are read, and the first
 *                                          who were refused ask again until they have been served
 *   dsa-storm cancels TARGET N_CALLS SEED  calls with deadlines around the median of the service's time, cancelled at
 *                                          every moment
 *
 * Prints `name=value` words. Exit status 0: every call had exactly one outcome, and every result its right bits. */
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "client/dsa.h"

#define D_QK        576
#define D_V         512
#define LONG_US     UINT64_C(60000000)
#define ONE_BF16    0x3f80u
#define N_RECENT    64   /* requests in flight */
#define STREAM_LIFE 2000 /* calls on one stream */

static struct dsa_error err;

static void die(const char *what)
{
    char text[512] = "";

    if (err.code != DSA_OK)
        dsa_error_text(&err, text, sizeof(text));
    printf("failed: %s: %s\n", what, text);
    exit(1);
}

static void must(dsa_status status, const char *what)
{
    if (status != DSA_OK)
        die(what);
}

static uint64_t now_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static uint64_t rng_state;

static uint64_t draw(uint64_t below) /* xorshift64* */
{
    rng_state ^= rng_state >> 12;
    rng_state ^= rng_state << 25;
    rng_state ^= rng_state >> 27;
    return (rng_state * UINT64_C(2685821657736338717) >> 33) % below;
}

static struct dsa_client *connect_to(const char *target)
{
    struct dsa_options options = {.client_name = "storm",
                                  .connect_timeout_us = LONG_US,
                                  .rpc_timeout_us = 5 * LONG_US,
                                  .lease_us = 5 * LONG_US};
    struct dsa_client *client;

    must(dsa_connect(target, &options, &client, &err), "connect");
    return client;
}

/* A sequence of n rows that are all ones. */
static uint64_t make_sequence(struct dsa_client *client, uint32_t n)
{
    uint16_t *rows = malloc((size_t)n * D_QK * sizeof(*rows));
    struct dsa_append append = {0};
    uint64_t id;

    if (!rows)
        die("no memory");
    for (size_t i = 0; i < (size_t)n * D_QK; i++)
        rows[i] = ONE_BF16;
    must(dsa_sequence_create(client, NULL, &id, &err), "create");
    append.sequence = id;
    append.rows = (struct dsa_tensor){.dtype = DSA_DTYPE_BF16, .rank = 2, .shape = {n, D_QK}, .data = rows};
    must(dsa_append(client, &append, NULL, &err), "append");
    free(rows);
    return id;
}

/* ---- answers --------------------------------------------------------------------------------------- */

#define BIG_ROWS  128u
#define BIG_HEADS 128u
#define BIG_OUT   ((size_t)BIG_ROWS * BIG_HEADS * D_V)
#define MAX_AGAIN 150 /* requests repeated after a refusal, by all */

struct asker {
    struct dsa_client *client;
    struct dsa_segment segment;
    struct dsa_request *request;
    struct dsa_tensor q, indices;
};

/* All answers are equal, so one place is enough. It is not cleared in between: pieces of later answers may be there already.
 * That none is missing libdsa counts. */
static uint16_t *big_out, *big_right;

static int make_query_memory(uint64_t bytes)
{
    int fd = memfd_create("storm", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    uint8_t *at;

    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0)
        die("memfd");
    at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        die("mmap");
    memset(at, 0, bytes); /* touched here, so that it counts as this process's memory */
    munmap(at, bytes);
    return fd;
}

static void asker_open(struct asker *asker, const char *target, int fd, uint64_t bytes)
{
    struct dsa_memory *memory;

    asker->client = connect_to(target);
    asker->segment = (struct dsa_segment){make_sequence(asker->client, 1), BIG_ROWS};
    must(dsa_memory_import(asker->client, fd, 0, bytes, DSA_ACCESS_READ, &memory, &err), "import of memory");
    asker->q = (struct dsa_tensor){
        .dtype = DSA_DTYPE_BF16, .rank = 3, .shape = {BIG_ROWS, BIG_HEADS, D_QK}, .memory = memory};
    asker->indices = (struct dsa_tensor){.dtype = DSA_DTYPE_I32,
                                         .rank = 2,
                                         .shape = {BIG_ROWS, 1},
                                         .memory = memory,
                                         .offset = (uint64_t)BIG_ROWS * BIG_HEADS * D_QK * 2};
}

static void ask(struct asker *asker)
{
    struct dsa_attend attend = {.n_segments = 1,
                                .segments = &asker->segment,
                                .q = asker->q,
                                .indices = asker->indices,
                                .space = DSA_SPACE_LOGICAL,
                                .softmax_scale = 0.05f,
                                .out = {.data = big_out}};

    must(dsa_attend_submit(asker->client, NULL, &attend, NULL, NULL, &asker->request, &err), "submit");
}

/* False: refused, ask again. */
static bool take(struct asker *asker)
{
    dsa_status status = dsa_wait(asker->request, 2 * LONG_US, &err);

    if (status != DSA_OK && (status != DSA_E_QUEUE_FULL || err.retry_after_us == 0))
        die("an answer");
    dsa_request_free(asker->request);
    if (status != DSA_OK)
        return false;
    if (memcmp(big_out, big_right, BIG_OUT * sizeof(*big_out)) != 0)
        die("a wrong result");
    return true;
}

static void wait_until_decided(struct dsa_client *control, uint64_t n)
{
    uint64_t end = now_us() + 2 * LONG_US;
    struct dsa_stats stats;

    do {
        must(dsa_stats(control, &stats, &err), "stats");
        if (now_us() > end)
            die("a request is neither served nor refused");
    } while (stats.n_requests + stats.n_rejected < n || stats.pools[0].queue_depth > 0);
}

static uint64_t count_decided(struct dsa_client *control)
{
    struct dsa_stats stats;

    must(dsa_stats(control, &stats, &err), "stats");
    return stats.n_requests + stats.n_rejected;
}

static int run_answers(const char *target, unsigned n_clients)
{
    uint64_t bytes = (uint64_t)BIG_ROWS * BIG_HEADS * D_QK * 2 + BIG_ROWS * 4;
    struct asker *askers = calloc(n_clients, sizeof(*askers));
    struct dsa_client *control = connect_to(target);
    unsigned n_refused = 0, n_again = 0, n_served = 0;
    int fd = make_query_memory((bytes + 4095) / 4096 * 4096);
    uint64_t decided;

    big_out = calloc(BIG_OUT, sizeof(*big_out));
    big_right = malloc(BIG_OUT * sizeof(*big_right));
    if (!askers || !big_out || !big_right)
        die("no memory");
    for (size_t i = 0; i < BIG_OUT; i++)
        big_right[i] = ONE_BF16;
    for (unsigned i = 0; i < n_clients; i++)
        asker_open(&askers[i], target, fd, bytes);
    decided = count_decided(control);
    for (unsigned i = 0; i < n_clients; i++) {
        ask(&askers[i]);
        dsa_poll(askers[i].client, 0); /* sends; what comes back is not waited for */
        wait_until_decided(control, decided + i + 1);
    }
    for (unsigned i = 0; i < n_clients; i++) {
        bool is_served = take(&askers[i]);

        n_refused += !is_served;
        while (!is_served && n_again < MAX_AGAIN) {
            n_again++;
            ask(&askers[i]);
            is_served = take(&askers[i]);
        }
        n_served += is_served;
    }
    printf("clients=%u refused=%u again=%u served=%u\n", n_clients, n_refused, n_again, n_served);
    for (unsigned i = 0; i < n_clients; i++)
        dsa_close(askers[i].client);
    dsa_close(control);
    close(fd);
    free(askers);
    free(big_out);
    free(big_right);
    return 0;
}

/* ---- cancels --------------------------------------------------------------------------------------- */

enum outcome { DONE_OK, DONE_LATE, DONE_CANCELLED, N_OUTCOMES };

struct call {
    struct dsa_request *request;
    unsigned n_done;    /* callbacks */
    unsigned cancel_at; /* cancelled after so many further calls; 0 = not */
    uint16_t out[D_V];
};

static struct {
    struct dsa_client *client;
    struct dsa_stream *stream;
    struct dsa_segment segment;
    uint16_t q[D_QK];
    int32_t indices[64];
    struct call calls[N_RECENT];
    unsigned long outcomes[N_OUTCOMES];
    unsigned long n_pending, n_cancels;
    uint64_t last_us; /* what the server spent on the call that was answered last */
} storm;

static void on_done(struct dsa_request *request, const struct dsa_result *result, void *arg)
{
    struct call *call = arg;

    storm.last_us = result->timings.total_us;
    if (++call->n_done != 1)
        die("a call was answered twice");
    switch (result->error.code) {
    case DSA_OK:
        for (int i = 0; i < D_V; i++) {
            if (call->out[i] != ONE_BF16)
                die("a wrong result");
        }
        storm.outcomes[DONE_OK]++;
        break;
    case DSA_E_DEADLINE:
        storm.outcomes[DONE_LATE]++;
        break;
    case DSA_E_CANCELLED:
        storm.outcomes[DONE_CANCELLED]++;
        break;
    default:
        err = result->error;
        die("an outcome that nothing explains");
    }
    storm.n_pending--;
    call->request = NULL;
    dsa_request_free(request);
}

static void start_call(struct call *call, uint64_t deadline_us)
{
    struct dsa_attend attend = {
        .n_segments = 1,
        .segments = &storm.segment,
        .q = {.dtype = DSA_DTYPE_BF16, .rank = 3, .shape = {1, 1, D_QK}, .data = storm.q},
        .indices = {.dtype = DSA_DTYPE_I32, .rank = 2, .shape = {1, 64}, .data = storm.indices},
        .space = DSA_SPACE_LOGICAL,
        .softmax_scale = 0.05f,
        .out = {.data = call->out},
        .deadline_us = deadline_us,
    };

    memset(call->out, 0, sizeof(call->out));
    call->n_done = 0;
    must(dsa_attend_submit(storm.client, storm.stream, &attend, on_done, call, &call->request, &err),
         "submit");
    storm.n_pending++;
}

static void cancel_call(struct call *call)
{
    call->cancel_at = 0;
    if (!call->request)
        return;
    storm.n_cancels++;
    dsa_request_cancel(call->request);
}

static int compare_us(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

/* What the server spends on a call with as many in flight as later, without deadlines. */
static uint64_t median_us(void)
{
    enum { N = 2000 };
    static uint64_t times[N];

    for (unsigned i = 0; i < N; i++) {
        struct call *call = &storm.calls[i % N_RECENT];

        while (call->request)
            dsa_poll(storm.client, LONG_US);
        times[i] = storm.last_us;
        start_call(call, 0);
    }
    must(dsa_wait_all(storm.client, LONG_US, &err), "the first calls");
    qsort(times + N_RECENT, N - N_RECENT, sizeof(times[0]), compare_us);
    return times[N_RECENT + (N - N_RECENT) / 2] + 1;
}

static void renew_stream(void)
{
    dsa_stream_close(storm.stream); /* with whatever is in flight */
    while (storm.n_pending > 0) {
        unsigned long before = storm.n_pending;

        dsa_poll(storm.client, LONG_US);
        if (storm.n_pending == before)
            die("calls of a closed stream never end");
    }
    must(dsa_stream_open(storm.client, &storm.stream, &err), "open a stream");
}

static int run_cancels(const char *target, unsigned long n_calls, uint64_t seed)
{
    unsigned long total;
    uint64_t median;

    rng_state = seed * 2 + 1;
    storm.client = connect_to(target);
    storm.segment = (struct dsa_segment){make_sequence(storm.client, 64), 1};
    for (int32_t i = 0; i < 64; i++)
        storm.indices[i] = i;
    must(dsa_stream_open(storm.client, &storm.stream, &err), "open a stream");
    median = median_us();
    memset(storm.outcomes, 0, sizeof(storm.outcomes));
    for (unsigned long i = 0; i < n_calls; i++) {
        struct call *call = &storm.calls[i % N_RECENT], *other;

        if (i % STREAM_LIFE == STREAM_LIFE - 1)
            renew_stream();
        while (call->request)
            dsa_poll(storm.client, LONG_US);
        start_call(call, median / 2 + 1 + draw(median + 1));
        call->cancel_at = 0;
        if (draw(8) == 0)
            cancel_call(call); /* right behind the call itself */
        else if (draw(4) == 0)
            call->cancel_at = 1 + (unsigned)draw(N_RECENT - 1);
        other = &storm.calls[draw(N_RECENT)];
        if (other->cancel_at > 0 && --other->cancel_at == 0)
            cancel_call(other); /* waiting, at the device, on its way back, or over */
        if (draw(4) == 0)
            dsa_poll(storm.client, 0);
    }
    must(dsa_wait_all(storm.client, 2 * LONG_US, &err), "the rest");
    total = storm.outcomes[DONE_OK] + storm.outcomes[DONE_LATE] + storm.outcomes[DONE_CANCELLED];
    printf("calls=%lu ok=%lu late=%lu cancelled=%lu cancels=%lu median_us=%lu\n", n_calls,
           storm.outcomes[DONE_OK], storm.outcomes[DONE_LATE], storm.outcomes[DONE_CANCELLED],
           storm.n_cancels, (unsigned long)median);
    if (total != n_calls || storm.n_pending != 0)
        die("calls without an outcome, or with two");
    start_call(&storm.calls[0], 0); /* and the stream is still good */
    must(dsa_wait_all(storm.client, 2 * LONG_US, &err), "the last call");
    if (storm.outcomes[DONE_OK] + storm.outcomes[DONE_LATE] + storm.outcomes[DONE_CANCELLED] != total + 1)
        die("the last call");
    dsa_close(storm.client);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "answers") == 0)
        return run_answers(argv[2], (unsigned)strtoul(argv[3], NULL, 10));
    if (argc == 5 && strcmp(argv[1], "cancels") == 0)
        return run_cancels(argv[2], strtoul(argv[3], NULL, 10), strtoull(argv[4], NULL, 10));
    fprintf(stderr, "usage: dsa-storm answers TARGET N_CLIENTS | cancels TARGET N_CALLS SEED\n");
    return 2;
}
