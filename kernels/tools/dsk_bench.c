/* dsk-bench - measures a device's kernels next to the peak of the machine they run on.
 *
 * The machine may be shared, and its clock may move, so each round measures the peak, then the kernel, for one
 * thread and for all; ratios and speed-ups are formed within a round, and what is printed is their median. Times
 * are wall times. The ratio to the peak takes processor time on one thread, where others then do not count, and
 * wall time on several, where waiting for each other is part of the result (and so is what others take). */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench_data.h"
#include "bench_gpu.h"
#include "bench_machine.h"

static const char help[] =
    "usage: dsk-bench --device cpu|cuda|hip [options]\n"
    "\n"
    "Measures attend, append, the three readers and merge: median time and spread, GFLOP/s, GB/s, and the\n"
    "ratio to the multiply-add peak, which is measured in the same rounds; on one thread and on all.\n"
    "The ratio on one thread is of processor time, so that other processes do not count; the rest is wall "
    "time.\n"
    "Attend reads 64 or 2048 rows a query, drawn at random from a pool larger than the last-level cache;\n"
    "its work counts as 2 * heads * rows * width * (d_qk + d_v) floating-point operations.\n"
    "\n"
    "  --device KIND     cpu, cuda or hip. On a GPU: times by its own clock, of one call and of a queue of "
    "calls, "
    "index\n"
    "                    sets larger than its cache in turn, next to a copy and a matrix product of the same "
    "run\n"
    "  --ordinal N       which device of that kind (default 0)\n"
    "  --portable        GPUs: only kernels that run on every architecture\n"
    "  --fp8             HIP: attend of raw_512_64 in e4m3, less exact\n"
    "  --no-graphs       GPUs: launch directly instead of replaying recorded launches\n"
    "  --isa NAME        auto, generic, avx2, avx512 or avx512bf16 (default auto: the best this processor "
    "has)\n"
    "  --threads N       what `all threads` means; 0 takes every processor this process may use (default 0)\n"
    "  --json FILE       also write the results to FILE\n"
    "  --quick           fewer shapes and rounds: some seconds instead of a minute or two\n"
    "  --help            this text\n"
    "\n"
    "Exit status: 0 measured, 2 wrong usage, no such device, or a file that cannot be written.\n";

#define MAX_ROUNDS   11
#define MAX_RESULTS  256
#define PEAK_SECONDS 0.003
#define MIN_SECONDS  0.004 /* of kernel time in one round: short launches are repeated */

struct result {
    const char *op;
    const char *layout;
    int heads, rows, width, n_threads; /* width 0: not an attend */
    double us_min, us_median, us_max;
    double gflops, gbs, peak_ratio, speed_up; /* 0 where it has no meaning */
};

struct side { /* a device with one thread, or with all */
    struct dsk_device *dev;
    struct dsk_stream *s;
    int n_threads;
};

struct bench {
    struct side sides[2];
    int n_sides;
    char isa[16];
    char cpu[128];
    int n_rounds;
    bool is_quick;
    double peak[2], memory[2]; /* GFLOP/s, GB/s: medians */
    uint64_t pool_bytes;
    int n_results;
    struct result results[MAX_RESULTS];
};

static void must(dsk_status status, const struct dsk_err *err)
{
    if (status != DSK_OK) {
        fprintf(stderr, "dsk-bench: %s: %s = %s: %s\n", dsk_status_text(status), err->field, err->value,
                err->text);
        exit(2);
    }
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof(*values), compare_doubles);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* ---- operations ---------------------------------------------------------------------------- */

struct work {
    const char *op;
    struct bench_data *data;
    int heads, rows, width;
    int mode; /* readers */
    double flop, bytes;
    void (*run)(struct side *side, const struct work *w, int i);
};

static uint64_t addr(const void *p)
{
    return (uint64_t)(uintptr_t)p;
}

static void run_attend(struct side *side, const struct work *w, int i)
{
    const struct dsk_layout *layout = w->data->layout;
    struct dsk_attend_seg seg = {.q = addr(w->data->q),
                                 .out = addr(w->data->out),
                                 .lse = addr(w->data->lse),
                                 .indices = addr(w->data->lists + i % BENCH_N_LISTS * BENCH_N_ROWS),
                                 .q_row_bytes = 2 * (int64_t)w->heads * layout->d_qk,
                                 .q_head_bytes = 2 * layout->d_qk,
                                 .out_row_bytes = 2 * (int64_t)w->heads * layout->d_v,
                                 .out_head_bytes = 2 * layout->d_v,
                                 .lse_row_bytes = 4 * w->heads,
                                 .indices_row_bytes = 4 * BENCH_WIDTH,
                                 .n_rows = w->rows,
                                 .topk = w->width,
                                 .space = DSK_SPACE_PHYSICAL,
                                 .softmax_scale = 0.05f};
    struct dsk_attend_args args = {
        .kv = w->data->kv, .segs = &seg, .n_segs = 1, .h_q = w->heads, .out_dtype = DSK_DTYPE_BF16};
    struct dsk_err err = {.status = DSK_OK};

    must(dsk_attend(side->s, &args, &err), &err);
}

static void run_append(struct side *side, const struct work *w, int i)
{
    struct dsk_append_args args = {.kv = w->data->kv,
                                   .rows = addr(w->data->values),
                                   .row_bytes = 2 * w->data->layout->d_qk,
                                   .slots = w->data->lists + i % BENCH_N_LISTS * BENCH_N_ROWS,
                                   .n_rows = w->rows,
                                   .rule = DSK_RULE_POW2};
    struct dsk_err err = {.status = DSK_OK};

    must(dsk_append(side->s, &args, &err), &err);
}

static void run_read(struct side *side, const struct work *w, int i)
{
    struct dsk_read_args args = {
        .kv = w->data->kv, .out = addr(w->data->values), .n_rows = w->rows, .mode = w->mode};
    struct dsk_err err = {.status = DSK_OK};

    if (w->mode == DSK_READ_PAGED) {
        int32_t n_pages = w->rows / DSK_PAGE_TOKENS, n_starts = w->data->n_pages - n_pages;

        args.list = addr(w->data->pages + (n_starts > 0 ? (int64_t)i * n_pages % n_starts : 0));
        args.n_list = n_pages;
    } else if (w->mode == DSK_READ_SELECTED) {
        args.list = addr(w->data->lists + i % BENCH_N_LISTS * BENCH_N_ROWS);
        args.n_list = w->rows;
    } else { /* a window of the plane that moves on with each run */
        int32_t n_pages = w->rows / DSK_PAGE_TOKENS, n_starts = w->data->n_pages - n_pages;

        args.kv.base +=
            (uint64_t)((n_starts > 0 ? (int64_t)i * n_pages % n_starts : 0) * args.kv.page_pitch_bytes);
        args.kv.n_slots = w->rows;
    }
    must(dsk_read(side->s, &args, &err), &err);
}

static void run_merge(struct side *side, const struct work *w, int i)
{
    struct dsk_merge_args args = {.out_parts = addr(w->data->parts),
                                  .lse_parts = addr(w->data->lse_parts),
                                  .out = addr(w->data->out),
                                  .lse = addr(w->data->lse),
                                  .n_parts = 8,
                                  .n_rows = w->rows,
                                  .h_q = w->heads,
                                  .d_v = 512,
                                  .part_dtype = DSK_DTYPE_F32,
                                  .out_dtype = DSK_DTYPE_BF16};
    struct dsk_err err = {.status = DSK_OK};

    (void)i;
    must(dsk_merge(side->s, &args, &err), &err);
}

/* ---- rounds -------------------------------------------------------------------------------- */

/* Seconds of one run, averaged over enough runs to be measurable. */
static double time_run(struct side *side, const struct work *w, int n_runs, int *next_p)
{
    struct dsk_err err = {.status = DSK_OK};
    double start = bench_now();

    for (int i = 0; i < n_runs; i++)
        w->run(side, w, (*next_p)++);
    must(dsk_stream_sync(side->s), &err);
    return (bench_now() - start) / n_runs;
}

static int runs_per_round(struct side *side, const struct work *w, int *next_p)
{
    double seconds = time_run(side, w, 1, next_p); /* the first run is warm-up as well */
    double wanted = MIN_SECONDS / (seconds > 1e-7 ? seconds : 1e-7);

    return wanted < 1 ? 1 : wanted > 1000 ? 1000 : (int)wanted + 1;
}

static void print_result(const struct result *r)
{
    char shape[64];

    if (strcmp(r->op, "attend") == 0)
        snprintf(shape, sizeof(shape), "%d heads x %d x %d", r->heads, r->rows, r->width);
    else
        snprintf(shape, sizeof(shape), "%d rows", r->rows);
    printf("%-13s %-14s %-20s %3d  %10.1f %10.1f %10.1f", r->op, r->layout, shape, r->n_threads, r->us_median,
           r->us_min, r->us_max);
    if (r->gflops > 0)
        printf(" %9.1f", r->gflops);
    else
        printf(" %9s", "-");
    printf(" %8.2f", r->gbs);
    if (r->peak_ratio > 0)
        printf(" %6.1f%%", 100 * r->peak_ratio);
    else
        printf(" %7s", "-");
    if (r->speed_up > 0)
        printf(" %6.2fx", r->speed_up);
    printf("\n");
    fflush(stdout);
}

static void measure(struct bench *b, const struct work *w)
{
    double seconds[2][MAX_ROUNDS], ratios[2][MAX_ROUNDS], speed_ups[MAX_ROUNDS];
    int n_runs[2], next = 0;

    for (int j = 0; j < b->n_sides; j++)
        n_runs[j] = runs_per_round(&b->sides[j], w, &next);
    for (int i = 0; i < b->n_rounds; i++) {
        for (int j = 0; j < b->n_sides; j++) {
            struct side *side = &b->sides[j];
            double peak = w->flop > 0 ? bench_peak_gflops(b->isa, side->n_threads, PEAK_SECONDS) : 0;
            double start = bench_thread_now(), busy;

            seconds[j][i] = time_run(side, w, n_runs[j], &next);
            busy = side->n_threads == 1 ? (bench_thread_now() - start) / n_runs[j] : seconds[j][i];
            ratios[j][i] = peak > 0 ? w->flop * 1e-9 / busy / peak : 0;
        }
        speed_ups[i] = seconds[0][i] / seconds[b->n_sides - 1][i];
    }
    for (int j = 0; j < b->n_sides && b->n_results < MAX_RESULTS; j++) {
        struct result *r = &b->results[b->n_results++];
        double time = median(seconds[j], b->n_rounds); /* sorts: the ends are the extremes */

        *r = (struct result){.op = w->op,
                             .layout = w->data->layout->name,
                             .heads = w->heads,
                             .rows = w->rows,
                             .width = w->width,
                             .n_threads = b->sides[j].n_threads,
                             .us_min = seconds[j][0] * 1e6,
                             .us_median = time * 1e6,
                             .us_max = seconds[j][b->n_rounds - 1] * 1e6,
                             .gflops = w->flop * 1e-9 / time,
                             .gbs = w->bytes * 1e-9 / time,
                             .peak_ratio = median(ratios[j], b->n_rounds),
                             .speed_up = j == 1 ? median(speed_ups, b->n_rounds) : 0};
        print_result(r);
    }
}

/* ---- what is measured ---------------------------------------------------------------------- */

static void measure_shape(struct bench *b, struct bench_data *d, int heads, int rows, int width)
{
    double n_q = (double)heads * rows;
    struct work w = {
        .op = "attend", .data = d, .heads = heads, .rows = rows, .width = width, .run = run_attend};

    w.flop = 2 * n_q * width * (d->layout->d_qk + d->layout->d_v);
    w.bytes = (double)rows * width * (d->layout->row_bytes + 4)
              + n_q * (2 * d->layout->d_qk + 2 * d->layout->d_v + 4);
    measure(b, &w);
}

static void measure_attend(struct bench *b, struct bench_data *d)
{
    static const int heads[] = {8, 16, 64, 128}, rows[] = {1, 8};
    static const int small_heads[] = {1, 8, 16, 32};

    /* Small launches stay on the caller, so the two columns of threads are the same. */
    for (int h = 0; h < 4; h++) {
        if (!b->is_quick || small_heads[h] == 8)
            measure_shape(b, d, small_heads[h], 1, BENCH_WIDTH_SMALL);
    }
    for (int h = 0; h < 4; h++) {
        for (int r = 0; r < 2; r++) {
            if (b->is_quick && (heads[h] == 8 || heads[h] == 128 || rows[r] == 1))
                continue;
            measure_shape(b, d, heads[h], rows[r], BENCH_WIDTH);
        }
    }
}

static void measure_rows(struct bench *b, struct bench_data *d)
{
    static const char *const read_names[] = {"read full", "read paged", "read selected"};
    int n_rows = BENCH_N_ROWS / 4;
    double bytes = (double)n_rows * (d->layout->row_bytes + 2 * d->layout->d_qk);
    struct work append = {.op = "append", .data = d, .rows = n_rows, .bytes = bytes, .run = run_append};

    measure(b, &append);
    for (int mode = DSK_READ_FULL; mode <= DSK_READ_SELECTED; mode++) {
        struct work read = {.op = read_names[mode - DSK_READ_FULL],
                            .data = d,
                            .rows = n_rows,
                            .mode = mode,
                            .bytes = bytes,
                            .run = run_read};

        measure(b, &read);
    }
}

static void measure_merge(struct bench *b, struct bench_data *d)
{
    double n = (double)BENCH_MAX_ROWS * 64;
    struct work w = {.op = "merge x 8",
                     .data = d,
                     .heads = 64,
                     .rows = BENCH_MAX_ROWS,
                     .bytes = n * (8 * (512 * 4 + 4) + 512 * 2 + 4),
                     .run = run_merge};

    measure(b, &w);
}

/* Peak and bandwidth on their own, for the head of the report. */
static void measure_machine(struct bench *b, const struct bench_data *d)
{
    double peaks[MAX_ROUNDS], memory[MAX_ROUNDS];

    for (int j = 0; j < b->n_sides; j++) {
        for (int i = 0; i < b->n_rounds; i++) {
            peaks[i] = bench_peak_gflops(b->isa, b->sides[j].n_threads, PEAK_SECONDS);
            memory[i] = bench_read_gbs((void *)(uintptr_t)d->kv.base, d->pool_bytes, b->sides[j].n_threads);
        }
        b->peak[j] = median(peaks, b->n_rounds);
        b->memory[j] = median(memory, b->n_rounds);
        printf("%d thread%s: multiply-add peak %.1f GFLOP/s (%.1f to %.1f), memory read %.1f GB/s (%.1f to "
               "%.1f)\n",
               b->sides[j].n_threads, b->sides[j].n_threads == 1 ? "" : "s", b->peak[j], peaks[0],
               peaks[b->n_rounds - 1], b->memory[j], memory[0], memory[b->n_rounds - 1]);
    }
}

static void run(struct bench *b)
{
    b->pool_bytes = (b->is_quick ? 2 : 4) * (uint64_t)bench_cache_bytes();
    for (uint32_t id = 1; id < DSK_LAYOUT_COUNT; id++) {
        struct bench_data d;

        if (b->is_quick && id > DSK_LAYOUT_SCALED_256_0)
            break;
        if (bench_data_init(&d, dsk_layout_get(id), b->pool_bytes) != 0) {
            fprintf(stderr, "dsk-bench: out of memory for a pool of %llu bytes\n",
                    (unsigned long long)b->pool_bytes);
            exit(2);
        }
        if (id == 1) {
            measure_machine(b, &d);
            printf("\n%-13s %-14s %-20s %3s  %10s %10s %10s %9s %8s %7s %7s\n", "operation", "layout",
                   "shape", "thr", "median us", "min us", "max us", "GFLOP/s", "GB/s", "of peak", "vs 1");
        }
        measure_attend(b, &d);
        measure_rows(b, &d);
        if (id == 1)
            measure_merge(b, &d);
        bench_data_fini(&d);
    }
}

/* ---- report -------------------------------------------------------------------------------- */

static int write_json(const struct bench *b, const char *path)
{
    char date[32];
    time_t now = time(NULL);
    struct tm tm;
    FILE *f = fopen(path, "w");

    if (!f) {
        fprintf(stderr, "dsk-bench: %s: %s\n", path, strerror(errno));
        return -1;
    }
    strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    fprintf(f,
            "{\n  \"program\": \"dsk-bench\",\n  \"version\": \"%s\",\n  \"date\": \"%s\",\n  \"device\": "
            "\"cpu\",\n"
            "  \"cpu\": \"%s\",\n  \"isa\": \"%s\",\n  \"threads\": %d,\n  \"rounds\": %d,\n  "
            "\"pool_bytes\": %llu,\n"
            "  \"cache_bytes\": %llu,\n  \"machine\": [\n",
            DSA_VERSION_STRING, date, b->cpu, b->isa, b->sides[b->n_sides - 1].n_threads, b->n_rounds,
            (unsigned long long)b->pool_bytes, (unsigned long long)bench_cache_bytes());
    for (int j = 0; j < b->n_sides; j++)
        fprintf(f, "    {\"threads\": %d, \"peak_gflops\": %.2f, \"memory_read_gbs\": %.2f}%s\n",
                b->sides[j].n_threads, b->peak[j], b->memory[j], j + 1 < b->n_sides ? "," : "");
    fprintf(f, "  ],\n  \"results\": [\n");
    for (int i = 0; i < b->n_results; i++) {
        const struct result *r = &b->results[i];

        fprintf(f,
                "    {\"op\": \"%s\", \"layout\": \"%s\", \"heads\": %d, \"rows\": %d, \"width\": %d, "
                "\"threads\": %d, "
                "\"us_median\": %.2f, \"us_min\": %.2f, \"us_max\": %.2f, \"gflops\": %.2f, \"gbs\": %.3f, "
                "\"peak_ratio\": %.4f, \"speed_up\": %.3f}%s\n",
                r->op, r->layout, r->heads, r->rows, r->width, r->n_threads, r->us_median, r->us_min,
                r->us_max, r->gflops, r->gbs, r->peak_ratio, r->speed_up, i + 1 < b->n_results ? "," : "");
    }
    fprintf(f, "  ]\n}\n");
    if (fclose(f) != 0) {
        fprintf(stderr, "dsk-bench: %s: %s\n", path, strerror(errno));
        return -1;
    }
    return 0;
}

/* ---- start --------------------------------------------------------------------------------- */

struct options {
    struct dsk_device_config config;
    const char *json;
    bool is_quick;
};

static int bad_value(const char *flag, const char *text)
{
    fprintf(stderr, "dsk-bench: --%s %s: not a value that --help lists\n", flag, text);
    return 3;
}

/* 0: go on; else exit with the status - 1. */
static int parse(int argc, char **argv, struct options *o)
{
    static const struct option table[] = {
        {"device", 1, NULL, 'd'},  {"isa", 1, NULL, 'i'},      {"threads", 1, NULL, 't'},
        {"json", 1, NULL, 'j'},    {"quick", 0, NULL, 'q'},    {"help", 0, NULL, 'h'},
        {"ordinal", 1, NULL, 'o'}, {"portable", 0, NULL, 'p'}, {"no-graphs", 0, NULL, 'g'},
        {"fp8", 0, NULL, '8'},     {NULL, 0, NULL, 0}};
    static const char *const isas[] = {"auto", "generic", "avx2", "avx512", "avx512bf16"};
    char *end;
    int opt;

    while ((opt = getopt_long(argc, argv, "", table, NULL)) != -1) {
        switch (opt) {
        case 'd':
            o->config.kind = strcmp(optarg, "cpu") == 0    ? DSK_DEVICE_CPU
                             : strcmp(optarg, "cuda") == 0 ? DSK_DEVICE_CUDA
                             : strcmp(optarg, "hip") == 0  ? DSK_DEVICE_HIP
                                                           : 0;
            if (o->config.kind == 0)
                return bad_value("device", optarg);
            break;
        case 'o':
            o->config.ordinal = (int32_t)strtol(optarg, &end, 10);
            if (*optarg == '\0' || *end != '\0' || o->config.ordinal < 0)
                return bad_value("ordinal", optarg);
            break;
        case 'p':
            o->config.flags |= DSK_DEVICE_PORTABLE;
            break;
        case '8':
            o->config.flags |= DSK_DEVICE_FP8;
            break;
        case 'g':
            o->config.flags |= DSK_DEVICE_NO_GRAPHS;
            break;
        case 'i':
            o->config.isa = -1;
            for (int i = 0; i <= DSK_ISA_AVX512_BF16; i++)
                o->config.isa = strcmp(optarg, isas[i]) == 0 ? i : o->config.isa;
            if (o->config.isa < 0)
                return bad_value("isa", optarg);
            break;
        case 't':
            o->config.n_threads = (int32_t)strtol(optarg, &end, 10);
            if (*optarg == '\0' || *end != '\0' || o->config.n_threads < 0 || o->config.n_threads > 256)
                return bad_value("threads", optarg);
            break;
        case 'j':
            o->json = optarg;
            break;
        case 'q':
            o->is_quick = true;
            break;
        case 'h':
            fputs(help, stdout);
            return 1;
        default: /* getopt has named the flag */
            return 3;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "dsk-bench: unexpected argument %s\n", argv[optind]);
        return 3;
    }
    if (o->config.kind == 0) {
        fprintf(stderr, "dsk-bench: --device is needed; see --help\n");
        return 3;
    }
    return 0;
}

static void side_open(struct side *side, struct dsk_device_config config, int n_threads)
{
    struct dsk_err err = {.status = DSK_OK};

    config.n_threads = n_threads;
    must(dsk_device_open(&config, &side->dev, &err), &err);
    must(dsk_stream_create(side->dev, &side->s), &err);
    side->n_threads = dsk_device_get_info(side->dev)->n_threads;
}

static void side_close(struct side *side)
{
    dsk_stream_destroy(side->s);
    dsk_device_close(side->dev);
}

int main(int argc, char **argv)
{
    static struct bench b;
    struct options o = {.json = NULL};
    int rc = parse(argc, argv, &o);

    if (rc != 0)
        return rc - 1;
    if (o.config.kind != DSK_DEVICE_CPU)
        return bench_gpu(&o.config, o.json, o.is_quick);
    side_open(&b.sides[0], o.config, 1);
    side_open(&b.sides[1], o.config, o.config.n_threads);
    b.n_sides = b.sides[1].n_threads > 1 ? 2 : 1;
    b.is_quick = o.is_quick;
    b.n_rounds = o.is_quick ? 5 : 9;
    snprintf(b.isa, sizeof(b.isa), "%s", dsk_device_get_info(b.sides[0].dev)->arch);
    bench_cpu_model(b.cpu, sizeof(b.cpu));
    printf("dsk-bench %s on %s, %s, %d rounds each\n", DSA_VERSION_STRING, b.cpu, b.isa, b.n_rounds);
    run(&b);
    side_close(&b.sides[0]);
    side_close(&b.sides[1]);
    return o.json && write_json(&b, o.json) != 0 ? 2 : 0;
}
