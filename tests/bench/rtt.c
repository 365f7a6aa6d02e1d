/* rtt.c - dsa-rtt: the smallest round trip through dsad next to what it stands on, in one run.
 *
 *   raw     epoll (or spinning) ping-pong over a unix socket: the kernel
 *   grpc    bidi echo on bare gRPC core: the library
 *   work    the same, but the server is busy before each reply for as long as dsad's launch takes; taken off again
 *   dsad    attend of 1 row, 8 heads, width 64, tensors in shared memory, whose row has no valid entry: the service
 *           alone, with nothing to compute
 *   launch  the same with 64 valid entries; the time in the launch, as the server reports it, taken off. What a machine takes
 *           longer to wake a client that has slept longer stays in this figure: its fair peer is work
 *
 * Every round runs all cases in turn, so that a drift of the machine meets all of them; ratios are taken within a round.
 * usage: dsa-rtt --dsad PATH [--requests N] [--rounds N] */
#include <inttypes.h>
#include <signal.h>
#include <sched.h>
#include <spawn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/dsa.h"
#include "echo.h"

#define MAX_ROUNDS 32
#define HEADS      8
#define TOPK       64
#define INFLIGHT   64
#define INDICES_AT 65536 /* in the memory that holds everything; q is at 0 */
#define LENGTHS_AT 98304
#define OUT_AT     131072

extern char **environ;

enum what { RAW, GRPC, WORK, DSAD, LAUNCH, N_WHAT };
static const char *const what_names[] = {"raw", "grpc", "work", "dsad", "launch"};

struct figure {
    double p50, p99,
        rate; /* rate: 64 in flight; dsad: rows without entries, so that no time goes into a launch */
};

struct bench {
    const char *self, *dsad;
    char dir[64];
    int n_requests, n_rounds;
    uint64_t work_ns;                             /* what a launch takes */
    struct figure figures[N_WHAT][2][MAX_ROUNDS]; /* [what][spin][round] */
};

/* Latency is taken with one core for the client and one for the server: where the scheduler puts two sleeping threads decides
 * more than either program does (one core or two: 10 or 100 us), so it is taken out of the comparison. Children inherit. */
static void pin(int cpu)
{
    cpu_set_t set;

    if (cpu < 0) {
        memset(&set, 0xff, sizeof(set)); /* all there are */
    } else {
        CPU_ZERO(&set);
        CPU_SET((size_t)cpu, &set);
    }
    sched_setaffinity(0, sizeof(set), &set);
}

/* ---- servers ------------------------------------------------------------------------------------- */

static pid_t launch(const struct bench *bench, enum what what, int spin, char *path, size_t n_path)
{
    static int serial;
    char listen[160], spin_text[12], work_text[24];
    pid_t pid = -1;

    snprintf(path, n_path, "%s/%d.sock", bench->dir, serial++);
    snprintf(listen, sizeof(listen), "unix:%s", path);
    snprintf(spin_text, sizeof(spin_text), "%d", spin);
    snprintf(work_text, sizeof(work_text), "%" PRIu64, what == WORK ? bench->work_ns : 0);
    if (what >= DSAD) {
        char *argv[] = {(char *)(uintptr_t)bench->dsad,
                        "--listen",
                        listen,
                        "--pool-pages",
                        "64",
                        "--log-level",
                        "error",
                        "--spin",
                        spin ? "1s" : "0us",
                        NULL};

        posix_spawn(&pid, bench->dsad, NULL, NULL, argv, environ);
    } else {
        char *argv[] = {(char *)(uintptr_t)bench->self,
                        what == RAW ? "--serve-raw" : "--serve-grpc",
                        path,
                        spin_text,
                        work_text,
                        NULL};

        posix_spawn(&pid, "/proc/self/exe", NULL, NULL, argv, environ);
    }
    return pid;
}

static void end(pid_t pid)
{
    if (pid > 0) {
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
    }
}

/* ---- the dsad client ------------------------------------------------------------------------------- */

struct attend_case {
    struct dsa_client *client;
    struct dsa_memory *memory;
    struct dsa_segment segment;
    struct dsa_tensor lengths;
    struct dsa_attend args;
};

/* One memory: q, indices, then a slot of output per request in flight. */
static bool prepare(struct attend_case *c, const char *path, int spin, int32_t length)
{
    struct dsa_options options = {.spin_us = spin ? 1000000 : 0};
    const struct dsa_pool *pool;
    struct dsa_append append = {0};
    struct dsa_error err;
    uint16_t *rows;
    char target[160];
    uint64_t q_bytes;
    bool ok;

    snprintf(target, sizeof(target), "unix:%s", path);
    if (dsa_connect(target, &options, &c->client, &err) != DSA_OK)
        return false;
    pool = &dsa_capabilities(c->client)->pools[0];
    rows = calloc(TOPK * (size_t)pool->d_qk, sizeof(*rows));
    if (!rows || dsa_sequence_create(c->client, NULL, &append.sequence, &err) != DSA_OK)
        return false;
    for (size_t i = 0; i < TOPK * (size_t)pool->d_qk; i++)
        rows[i] = (uint16_t)(0x3f00 + i % 97); /* values near 0.5 */
    append.rows =
        (struct dsa_tensor){.dtype = DSA_DTYPE_BF16, .rank = 2, .shape = {TOPK, pool->d_qk}, .data = rows};
    ok = dsa_append(c->client, &append, NULL, &err) == DSA_OK
         && dsa_memory_create(c->client, 1 << 20, DSA_ACCESS_READ_WRITE, &c->memory, &err) == DSA_OK;
    free(rows);
    if (!ok)
        return false;
    q_bytes = HEADS * (uint64_t)pool->d_qk * 2;
    for (int32_t i = 0; i < TOPK; i++)
        memcpy((char *)dsa_memory_data(c->memory) + INDICES_AT + i * 4, &i, sizeof(i));
    memset(dsa_memory_data(c->memory), 0x3c, q_bytes);
    c->segment = (struct dsa_segment){append.sequence, 1};
    c->lengths = (struct dsa_tensor){
        .dtype = DSA_DTYPE_I32, .rank = 1, .shape = {1}, .memory = c->memory, .offset = LENGTHS_AT};
    memcpy((char *)dsa_memory_data(c->memory) + LENGTHS_AT, &length, sizeof(length));
    c->args = (struct dsa_attend){
        .n_segments = 1,
        .segments = &c->segment,
        .q = {.dtype = DSA_DTYPE_BF16, .rank = 3, .shape = {1, HEADS, pool->d_qk}, .memory = c->memory},
        .indices = {.dtype = DSA_DTYPE_I32,
                    .rank = 2,
                    .shape = {1, TOPK},
                    .memory = c->memory,
                    .offset = INDICES_AT},
        .space = DSA_SPACE_LOGICAL,
        .lengths = &c->lengths,
        .softmax_scale = 0.04f,
        .out = {.memory = c->memory, .offset = OUT_AT},
    };
    return true;
}

/* One after the other; the launch's time, as the server reports it, is taken off each and told in launches (or NULL). */
static bool run_single(struct attend_case *c, int n_requests, uint64_t *times, uint64_t *launches)
{
    for (int i = 0; i < n_requests; i++) {
        struct dsa_result result;
        struct dsa_error err;
        uint64_t begin = bench_now_ns(), took, device;

        if (dsa_attend(c->client, &c->args, &result, &err) != DSA_OK) {
            fprintf(stderr, "attend: %s %s\n", err.reason, err.message);
            return false;
        }
        took = bench_now_ns() - begin;
        device = result.timings.device_us * 1000;
        times[i] = took > device ? took - device : 0;
        if (launches)
            launches[i] = device;
    }
    return true;
}

struct flood {
    struct attend_case *c;
    int n_left, n_done;
    bool failed;
};

static void on_done(struct dsa_request *request, const struct dsa_result *result, void *arg);

static void flood_one(struct flood *flood)
{
    struct dsa_request *request;

    if (flood->n_left == 0 || flood->failed)
        return;
    flood->n_left--;
    if (dsa_attend_submit(flood->c->client, NULL, &flood->c->args, on_done, flood, &request, NULL) != DSA_OK)
        flood->failed = true;
}

static void on_done(struct dsa_request *request, const struct dsa_result *result, void *arg)
{
    struct flood *flood = arg;

    flood->failed |= result->error.code != DSA_OK;
    flood->n_done++;
    dsa_request_free(request);
    flood_one(flood);
}

static uint64_t run_flood(struct attend_case *c, int n_requests)
{
    struct flood flood = {.c = c, .n_left = n_requests};
    uint64_t begin;

    begin = bench_now_ns();
    for (int i = 0; i < INFLIGHT; i++)
        flood_one(&flood);
    while (flood.n_done < n_requests && !flood.failed)
        dsa_poll(c->client, 1000000);
    return flood.failed ? 0 : bench_now_ns() - begin;
}

/* ---- figures --------------------------------------------------------------------------------------- */

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static int compare_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof(*values), compare_double);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

static bool measure_latency(const struct bench *bench, enum what what, const char *path, int spin,
                            uint64_t *times)
{
    int n = bench->n_requests, n_warm = n / 10 + 1;
    struct attend_case c = {0};
    bool ok;

    switch (what) {
    case RAW:
        return bench_raw_client(path, spin, n_warm, NULL) > 0 && bench_raw_client(path, spin, n, times) > 0;
    case GRPC:
    case WORK:
        ok = bench_grpc_client(path, spin, n_warm, 1, NULL) > 0
             && bench_grpc_client(path, spin, n, 1, times) > 0;
        for (int i = 0; what == WORK && i < n; i++)
            times[i] -= times[i] > bench->work_ns ? bench->work_ns : times[i];
        return ok;
    default:
        ok = prepare(&c, path, spin, what == LAUNCH ? TOPK : 0) && run_single(&c, n_warm, times, NULL)
             && run_single(&c, n, times, NULL);
        dsa_close(c.client);
        return ok;
    }
}

static double rate_of(int n, uint64_t ns)
{
    return ns > 0 ? n / ((double)ns / 1e9) : 0;
}

static bool measure_rate(const struct bench *bench, enum what what, const char *path, int spin,
                         struct figure *figure)
{
    int n = bench->n_requests * 4;
    struct attend_case c = {0};

    if (what == GRPC || what == WORK) {
        bench_grpc_client(path, spin, n / 4, INFLIGHT, NULL); /* warm */
        figure->rate = rate_of(n, bench_grpc_client(path, spin, n, INFLIGHT, NULL));
        return figure->rate > 0;
    }
    if (what >= DSAD && prepare(&c, path, spin, what == LAUNCH ? TOPK : 0))
        figure->rate = run_flood(&c, n / 4) > 0 ? rate_of(n, run_flood(&c, n)) : 0;
    dsa_close(c.client);
    return what == RAW || figure->rate > 0;
}

/* A server of its own for each: pinned for latency, free for the rate. */
static bool measure(struct bench *bench, enum what what, int spin, struct figure *figure)
{
    int n = bench->n_requests;
    uint64_t *times = calloc((size_t)n + 1, sizeof(*times));
    bool ok = times != NULL;

    for (int pass = 0; pass < 2 && ok; pass++) {
        char path[128];
        pid_t pid;
        int probe;

        pin(pass == 0 ? 1 : -1);
        pid = launch(bench, what, spin, path, sizeof(path));
        pin(pass == 0 ? 0 : -1);
        probe = bench_connect(path); /* the socket is there: no client has to back off */
        close(probe);
        ok = pid > 0 && probe >= 0
             && (pass == 0 ? measure_latency(bench, what, path, spin, times)
                           : measure_rate(bench, what, path, spin, figure));
        end(pid);
    }
    if (ok) {
        qsort(times, (size_t)n, sizeof(*times), compare_u64);
        figure->p50 = (double)times[n / 2] / 1e3;
        figure->p99 = (double)times[n * 99 / 100] / 1e3;
    }
    free(times);
    return ok;
}

/* What a launch takes, pinned as in the latency runs. */
static bool learn_work(struct bench *bench)
{
    int n = bench->n_requests;
    uint64_t *times = calloc((size_t)n * 2 + 1, sizeof(*times));
    struct attend_case c = {0};
    char path[128];
    pid_t pid;
    int probe;
    bool ok;

    pin(1);
    pid = launch(bench, LAUNCH, 1, path, sizeof(path));
    pin(0);
    probe = bench_connect(path);
    close(probe);
    ok = times && pid > 0 && probe >= 0 && prepare(&c, path, 1, TOPK) && run_single(&c, n, times, times + n);
    dsa_close(c.client);
    end(pid);
    if (ok) {
        qsort(times + n, (size_t)n, sizeof(*times), compare_u64);
        bench->work_ns = times[n + n / 2];
    }
    free(times);
    return ok;
}

static double column(const struct bench *bench, enum what what, int spin, size_t offset, enum what under)
{
    double values[MAX_ROUNDS];

    for (int r = 0; r < bench->n_rounds; r++) {
        const char *mine = (const char *)&bench->figures[what][spin][r];
        const char *other = (const char *)&bench->figures[under][spin][r];

        values[r] = *(const double *)(const void *)(mine + offset);
        if (under != N_WHAT)
            values[r] /= *(const double *)(const void *)(other + offset);
    }
    return median(values, bench->n_rounds);
}

#define COLUMN(bench, what, spin, name, under)                                                               \
    column(bench, (enum what)(what), spin, offsetof(struct figure, name), under)

static void report_ratios(const struct bench *bench, int what, int spin, enum what under)
{
    printf(" %9.2f %9.2f %9.2f", COLUMN(bench, what, spin, p50, under), COLUMN(bench, what, spin, p99, under),
           COLUMN(bench, what, spin, rate, under));
}

static void report(const struct bench *bench)
{
    printf("median of %d rounds, %d round trips each; dsad and launch: 1 row, %d heads, width %d, memfd; "
           "a launch takes %.1f us\n",
           bench->n_rounds, bench->n_requests, HEADS, TOPK, (double)bench->work_ns / 1e3);
    printf("%-6s %-4s %8s %8s %13s %9s %9s %9s %9s %9s %9s\n", "what", "spin", "p50 us", "p99 us",
           "msg/s, 64 out", "p50/grpc", "p99/grpc", "rate/grpc", "p50/work", "p99/work", "rate/work");
    for (int spin = 0; spin < 2; spin++) {
        for (int what = 0; what < N_WHAT; what++) {
            printf("%-6s %-4s %8.1f %8.1f %13.0f", what_names[what], spin ? "yes" : "no",
                   COLUMN(bench, what, spin, p50, N_WHAT), COLUMN(bench, what, spin, p99, N_WHAT),
                   COLUMN(bench, what, spin, rate, N_WHAT));
            report_ratios(bench, what, spin, GRPC);
            if (what == LAUNCH)
                report_ratios(bench, what, spin, WORK);
            printf("\n");
        }
    }
}

static int run(struct bench *bench)
{
    snprintf(bench->dir, sizeof(bench->dir), "/tmp/dsa-rtt.XXXXXX");
    if (!mkdtemp(bench->dir) || !learn_work(bench)) {
        fprintf(stderr, "dsa-rtt: cannot start\n");
        return 1;
    }
    for (int round = 0; round < bench->n_rounds; round++)
        for (int spin = 0; spin < 2; spin++)
            for (int i = 0; i < N_WHAT; i++) {
                enum what what = (enum what)((i + round) % N_WHAT);

                if (!measure(bench, what, spin, &bench->figures[what][spin][round])) {
                    fprintf(stderr, "dsa-rtt: measuring %s failed\n", what_names[what]);
                    return 1;
                }
            }
    report(bench);
    return 0;
}

int main(int argc, char **argv)
{
    struct bench bench = {.self = argv[0], .n_requests = 3000, .n_rounds = 5};

    if (argc == 5 && strcmp(argv[1], "--serve-raw") == 0)
        return bench_raw_server(argv[2], atoi(argv[3]));
    if (argc == 5 && strcmp(argv[1], "--serve-grpc") == 0)
        return bench_grpc_server(argv[2], atoi(argv[3]), strtoull(argv[4], NULL, 10));
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--dsad") == 0)
            bench.dsad = argv[i + 1];
        else if (strcmp(argv[i], "--requests") == 0)
            bench.n_requests = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--rounds") == 0)
            bench.n_rounds = atoi(argv[i + 1]);
    }
    if (!bench.dsad || bench.n_requests < 100 || bench.n_rounds < 1 || bench.n_rounds > MAX_ROUNDS) {
        fprintf(stderr, "usage: dsa-rtt --dsad PATH [--requests N >= 100] [--rounds 1..%d]\n", MAX_ROUNDS);
        return 2;
    }
    return run(&bench);
}
