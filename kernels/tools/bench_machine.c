#include "bench_machine.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256

static double read_clock(clockid_t clock)
{
    struct timespec ts;

    clock_gettime(clock, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

double bench_now(void)
{
    return read_clock(CLOCK_MONOTONIC);
}

double bench_thread_now(void)
{
    return read_clock(CLOCK_THREAD_CPUTIME_ID);
}

typedef double (*peak_func)(uint64_t n_steps, const float *values, float *sink);

static peak_func peak_of(const char *isa)
{
#if defined(BENCH_HAS_X86)
    if (strncmp(isa, "avx512", 6) == 0)
        return bench_peak_avx512;
    if (strcmp(isa, "avx2") == 0)
        return bench_peak_avx2;
#endif
    return strcmp(isa, "generic") == 0 ? bench_peak_generic : NULL;
}

/* One thread's share of a measurement. */
struct share {
    pthread_t thread;
    pthread_barrier_t *together;
    peak_func peak; /* or NULL: read */
    const uint64_t *data;
    size_t n_words;
    double seconds; /* to run */
    double done;    /* operations or bytes */
    double start, end;
    float sink;
};

static void share_peak(struct share *share)
{
    const float values[2] = {0.999999f, 1e-7f};

    share->start = bench_thread_now();
    do { /* some 0.1 ms a call: reading this clock is a system call */
        share->done += share->peak(40000, values, &share->sink);
        share->end = bench_thread_now();
    } while (share->end - share->start < share->seconds);
}

static void share_read(struct share *share)
{
    uint64_t sums[8] = {0};

    share->start = bench_now();
    for (size_t i = 0; i + 8 <= share->n_words; i += 8) {
        for (int j = 0; j < 8; j++)
            sums[j] ^= share->data[i + (size_t)j];
    }
    share->end = bench_now();
    share->done = 8 * (double)share->n_words;
    for (int j = 0; j < 8; j++)
        share->sink += (float)(sums[j] & 1);
}

static void *share_main(void *arg)
{
    struct share *share = arg;

    pthread_barrier_wait(share->together);
    if (share->peak)
        share_peak(share);
    else
        share_read(share);
    return NULL;
}

/* Thread i of n starts on a processor of its own, where there are n: left alone, a thread of some milliseconds may
 * share its creator's to the end. */
static void pin(pthread_attr_t *attr, int i, int n)
{
    cpu_set_t allowed, one;
    size_t cpu = 0;

    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < n)
        return;
    for (int n_seen = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed) && n_seen++ == i)
            break;
    }
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_attr_setaffinity_np(attr, sizeof(one), &one); /* best effort */
}

static int share_start(struct share *share, int i, int n)
{
    pthread_attr_t attr;
    int rc;

    if (pthread_attr_init(&attr) != 0)
        return -1;
    pin(&attr, i, n);
    rc = pthread_create(&share->thread, &attr, share_main, share);
    pthread_attr_destroy(&attr);
    return rc;
}

/* Runs all shares at once, each in a thread of its own; a single one runs here. */
static void run_shares(struct share *shares, int n)
{
    pthread_barrier_t together;

    if (pthread_barrier_init(&together, NULL, (unsigned)n) != 0)
        exit(2);
    for (int i = 0; i < n; i++)
        shares[i].together = &together;
    for (int i = 0; n > 1 && i < n; i++) {
        if (share_start(&shares[i], i, n) != 0) {
            fprintf(stderr, "dsk-bench: no thread %d of %d\n", i + 1, n);
            exit(2); /* the others wait at the barrier for good */
        }
    }
    if (n == 1)
        share_main(&shares[0]);
    for (int i = 0; n > 1 && i < n; i++)
        pthread_join(shares[i].thread, NULL);
    pthread_barrier_destroy(&together);
}

/* Results that nobody may drop as unused. */
static void keep(const struct share *shares, int n)
{
    static volatile float kept;

    for (int i = 0; i < n; i++)
        kept = shares[i].sink;
    (void)kept;
}

double bench_peak_gflops(const char *isa, int n_threads, double seconds)
{
    struct share shares[MAX_THREADS];
    peak_func peak = peak_of(isa);
    double gflops = 0;

    if (!peak || n_threads < 1 || n_threads > MAX_THREADS)
        return -1;
    memset(shares, 0, sizeof(shares));
    for (int i = 0; i < n_threads; i++) {
        shares[i].peak = peak;
        shares[i].seconds = seconds;
    }
    run_shares(shares, n_threads);
    keep(shares, n_threads);
    for (int i = 0; i < n_threads; i++)
        gflops += shares[i].done * 1e-9 / (shares[i].end - shares[i].start);
    return gflops;
}

double bench_read_gbs(const void *data, size_t bytes, int n_threads)
{
    struct share shares[MAX_THREADS];
    double start = INFINITY, end = 0, done = 0;
    size_t words = bytes / 8 / (size_t)n_threads;

    if (n_threads < 1 || n_threads > MAX_THREADS)
        return -1;
    memset(shares, 0, sizeof(shares));
    for (int i = 0; i < n_threads; i++) {
        shares[i].data = (const uint64_t *)data + (size_t)i * words;
        shares[i].n_words = words;
    }
    run_shares(shares, n_threads);
    keep(shares, n_threads);
    for (int i = 0; i < n_threads; i++) {
        start = shares[i].start < start ? shares[i].start : start;
        end = shares[i].end > end ? shares[i].end : end;
        done += shares[i].done;
    }
    return done * 1e-9 / (end - start);
}

void bench_cpu_model(char *text, size_t size)
{
    FILE *f = fopen("/proc/cpuinfo", "r");
    char line[256];

    snprintf(text, size, "unknown");
    while (f && fgets(line, sizeof(line), f)) {
        const char *colon = strchr(line, ':');

        if (strncmp(line, "model name", 10) == 0 && colon) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(text, size, "%s", colon + 2);
            break;
        }
    }
    if (f)
        fclose(f);
}

/* The kernel's figure first: the C library's may be the sum over all caches of the package. */
size_t bench_cache_bytes(void)
{
    FILE *f = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r");
    unsigned long kib = 0;
    long bytes = 0;

    if (f) {
        if (fscanf(f, "%luK", &kib) != 1)
            kib = 0;
        fclose(f);
    }
    if (kib > 0)
        return (size_t)kib << 10;
#if defined(_SC_LEVEL3_CACHE_SIZE)
    bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return bytes > 0 ? (size_t)bytes : (size_t)32 << 20;
}
