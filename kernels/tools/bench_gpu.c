/* bench_gpu.c - every case as a median of event times, one call at a time, and as time per call of a queue of calls.
 *
 * The pool is larger than any cache, and calls rotate through index sets that together exceed twice the L2, so that
 * rows come from memory as they do in service. A row's 2048 entries are drawn from a window of 32,768 slots, and
 * each row of a call has a window of its own as long as there are enough. What is timed is the public call: argument
 * block, graph replay and all. */
#include "bench_gpu.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/gpu/gpu.h"
#include "ref64_rng.h"

#define WINDOW      32768
#define N_WINDOWS   128
#define N_TEMPLATES 8192
#define N_CALLS     60 /* single calls of a median */
#define N_QUEUES    7
#define MAX_RESULTS 64
#define MAX_EVENTS  (2 * N_CALLS)

struct gpu_case {
    const char *name; /* operation */
    const char *layout;
    int32_t heads, rows, width;
    double target_us; /* what is to be reached at least; 0: none */
    double target_tflops;
};

static const struct gpu_case ATTEND_CASES[] = {
    {"attend", "scaled_512_64", 64, 1, 2048, 10, 0},     {"attend", "scaled_512_64", 64, 8, 2048, 0, 0},
    {"attend", "scaled_512_64", 64, 32, 2048, 28, 0},    {"attend", "scaled_512_64", 64, 64, 2048, 48, 0},
    {"attend", "scaled_512_64", 64, 128, 2048, 72, 0},   {"attend", "scaled_512_64", 64, 256, 2048, 145, 0},
    {"attend", "scaled_512_64", 128, 128, 2048, 160, 0}, {"attend", "scaled_512_64", 16, 128, 2048, 58, 0},
    {"attend", "scaled_512_64", 8, 64, 2048, 32, 0},     {"attend", "scaled_512_0", 64, 128, 2048, 68, 0},
    {"attend", "scaled_256_0", 64, 128, 2048, 40, 0},    {"attend", "scaled_256_0", 64, 128, 2112, 40, 0},
    {"attend", "bf16_576", 128, 4096, 2048, 0, 550},     {"attend", "raw_512_64", 64, 128, 2048, 0, 0},
};

static const struct gpu_case ROW_CASES[] = {
    {"append", "scaled_512_64", 0, 8192, 0, 0, 0},
    {"append", "scaled_512_64", 0, 65536, 0, 0, 0},
    {"read full", "scaled_512_64", 0, 8192, 0, 0, 0},
    {"read full", "scaled_512_64", 0, 131072, 0, 0, 0},
    {"read selected", "scaled_512_64", 0, 8192, 0, 0, 0},
    {"read selected", "scaled_512_64", 0, 131072, 0, 0, 0},
    {"append", "scaled_256_0", 0, 8192, 0, 0, 0},
    {"read selected", "scaled_256_0", 0, 131072, 0, 0, 0},
    {"append", "bf16_576", 0, 8192, 0, 0, 0},
    {"read selected", "bf16_576", 0, 131072, 0, 0, 0},
};

struct result {
    const struct gpu_case *c;
    double us, us_low, us_high; /* one call: median, tenths from the ends */
    double us_queued;           /* per call of a queue */
    double tflops, gbs;         /* by us_queued */
    double roof_us;
};

struct bench {
    struct dsk_device *dev;
    struct dsk_stream *s;
    const struct dsk_device_info *info;
    struct dsk_event *events[MAX_EVENTS];
    double copy_tbs, peak_tflops;
    bool is_quick;
    int n_results;
    struct result results[MAX_RESULTS];
};

/* Device memory of one layout. */
struct data {
    const struct dsk_layout *layout;
    struct dsk_kv_view kv;
    int64_t n_windows;
    uint64_t rows;  /* bf16 templates */
    int32_t *slots; /* host: places to append to */
    uint64_t q, out, lse, indices;
};

static void must(dsk_status status, const struct dsk_err *err, const char *what)
{
    if (status != DSK_OK) {
        fprintf(stderr, "dsk-bench: %s: %s: %s %s\n", what, dsk_status_text(status),
                err == NULL ? "" : err->field, err == NULL ? "" : err->text);
        exit(2);
    }
}

static uint64_t take(struct bench *b, uint64_t bytes)
{
    uint64_t addr = 0;

    must(dsk_mem_alloc(b->dev, bytes, &addr), NULL, "device memory");
    return addr;
}

static void *take_host(uint64_t bytes)
{
    void *p = malloc(bytes);

    if (p == NULL) {
        fprintf(stderr, "dsk-bench: no memory\n");
        exit(2);
    }
    return p;
}

static void sync(struct bench *b)
{
    must(dsk_stream_sync(b->s), NULL, "sync");
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* ---- timing ------------------------------------------------------------------------------ */

typedef void (*call_func)(struct bench *b, void *user, int i);

static double between(struct bench *b, int first, int second)
{
    double us;

    must(dsk_gpu_event_elapsed_us(b->events[first], b->events[second], &us), NULL, "elapsed");
    return us;
}

static void record(struct bench *b, int i)
{
    must(dsk_event_record(b->events[i], b->s), NULL, "record");
}

/* Calls one at a time: issued in a row, each between two events. */
static void time_calls(struct bench *b, call_func call, void *user, struct result *r, int n)
{
    double us[N_CALLS];

    for (int i = 0; i < n; i++) {
        record(b, 2 * i);
        call(b, user, i);
        record(b, 2 * i + 1);
    }
    sync(b);
    for (int i = 0; i < n; i++)
        us[i] = between(b, 2 * i, 2 * i + 1);
    qsort(us, (size_t)n, sizeof(*us), compare_doubles);
    r->us = us[n / 2];
    r->us_low = us[n / 10];
    r->us_high = us[n - 1 - n / 10];
}

static double time_queue(struct bench *b, call_func call, void *user, int n)
{
    double us[N_QUEUES];

    for (int q = 0; q < N_QUEUES; q++) {
        record(b, 0);
        for (int i = 0; i < n; i++)
            call(b, user, q * n + i);
        record(b, 1);
        sync(b);
        us[q] = between(b, 0, 1) / n;
    }
    qsort(us, N_QUEUES, sizeof(*us), compare_doubles);
    return us[N_QUEUES / 2];
}

static struct result measure(struct bench *b, call_func call, void *user, double flop, double bytes)
{
    struct result r = {.c = NULL};
    int n = N_CALLS;

    for (int i = 0; i < 3; i++)
        call(b, user, i);
    sync(b);
    time_calls(b, call, user, &r, 3);
    if (r.us > 1000)
        n = 6;
    time_calls(b, call, user, &r, n);
    r.us_queued = time_queue(b, call, user, n);
    r.tflops = flop / r.us_queued * 1e-6;
    r.gbs = bytes / r.us_queued * 1e-3;
    r.roof_us = bytes / b->copy_tbs * 1e-6;
    if (flop / b->peak_tflops * 1e-6 > r.roof_us)
        r.roof_us = flop / b->peak_tflops * 1e-6;
    return r;
}

/* ---- the machine ------------------------------------------------------------------------- */

struct machine {
    uint64_t a, b, bytes, sink;
    double flop;
};

static void call_copy(struct bench *b, void *user, int i)
{
    const struct machine *m = user;

    (void)i;
    must(dsk_gpu_copy_device(b->s, m->a, m->b, m->bytes), NULL, "copy");
}

static void call_peak(struct bench *b, void *user, int i)
{
    struct machine *m = user;

    (void)i;
    must(dsk_gpu_peak(b->s, m->sink, 4000, &m->flop), NULL, "peak");
}

/* bf16 products of a device whose code has no kernel that measures them, TFLOP/s, as its maker publishes them. */
static double published_peak(const char *arch)
{
    return strcmp(arch, "gfx942") == 0 ? 1307 : strcmp(arch, "gfx950") == 0 ? 2500 : 1;
}

static void measure_peak(struct bench *b, struct machine *m)
{
    struct result r;
    const dsk_status status = dsk_gpu_peak(b->s, m->sink, 1, &m->flop);

    if (status == DSK_E_UNSUPPORTED) {
        b->peak_tflops = published_peak(b->info->arch);
        printf(
            "device copy %.2f TB/s (read + written), bf16 products %.0f TFLOP/s as published, not measured\n",
            b->copy_tbs, b->peak_tflops);
        return;
    }
    must(status, NULL, "peak");
    r = measure(b, call_peak, m, 0, 0);
    b->peak_tflops = m->flop / r.us * 1e-6;
    printf("device copy %.2f TB/s (read + written), bf16 products from shared memory %.0f TFLOP/s\n",
           b->copy_tbs, b->peak_tflops);
}

static void measure_machine(struct bench *b)
{
    struct machine m = {.bytes = (uint64_t)1 << 30};
    struct result r;

    m.a = take(b, m.bytes);
    m.b = take(b, m.bytes);
    m.sink = take(b, 1 << 20);
    b->copy_tbs = b->peak_tflops = 1;
    must(dsk_mem_set(b->s, m.b, 0x5a, m.bytes), NULL, "fill");
    r = measure(b, call_copy, &m, 0, 0);
    b->copy_tbs = 2 * (double)m.bytes / r.us * 1e-6;
    measure_peak(b, &m);
    dsk_mem_free(b->dev, m.a);
    dsk_mem_free(b->dev, m.b);
    dsk_mem_free(b->dev, m.sink);
}

/* ---- data -------------------------------------------------------------------------------- */

/* Bits of two bf16 of a rough normal: the sum of four uniforms. */
static uint16_t rough_normal(struct ref64_rng *rng, float sigma)
{
    uint64_t u = ref64_rng_u64(rng);
    float sum = -2.0f;

    for (int i = 0; i < 4; i++)
        sum += (float)((u >> (16 * i)) & 0xffff) * 0x1p-16f;
    return dsk_bf16_from_f32(sum * 1.7f * sigma);
}

static uint64_t upload_normal(struct bench *b, int64_t n, float sigma)
{
    const int64_t n_unique = n < (1 << 22) ? n : 1 << 22; /* then it repeats */
    struct ref64_rng rng = ref64_rng_init((uint64_t)n);
    uint16_t *host = take_host(2 * (uint64_t)n_unique);
    uint64_t addr = take(b, 2 * (uint64_t)n);

    for (int64_t i = 0; i < n_unique; i++)
        host[i] = rough_normal(&rng, sigma);
    for (int64_t at = 0; at < n; at += n_unique)
        must(dsk_copy_in(b->s, addr + 2 * (uint64_t)at, host,
                         2 * (uint64_t)(n - at < n_unique ? n - at : n_unique)),
             NULL, "copy in");
    sync(b);
    free(host);
    return addr;
}

static void append_templates(struct bench *b, struct data *d, const int32_t *slots, int32_t n_rows)
{
    struct dsk_append_args args = {.kv = d->kv,
                                   .rows = d->rows,
                                   .row_bytes = 2 * d->layout->d_qk,
                                   .slots = slots,
                                   .n_rows = n_rows,
                                   .rule = DSK_RULE_POW2};
    struct dsk_err err = {.status = DSK_OK};

    must(dsk_append(b->s, &args, &err), &err, "append");
}

/* Every slot once: pages in random order, as a pool hands them out, each from its first slot to its last. */
static void fill_slots(int32_t *slots, int64_t n_slots)
{
    struct ref64_rng rng = ref64_rng_init(5);

    for (int64_t page = 0; page < n_slots / DSK_PAGE_TOKENS; page++) {
        int64_t other = ref64_rng_below(&rng, page + 1);

        slots[page * DSK_PAGE_TOKENS] = slots[other * DSK_PAGE_TOKENS];
        slots[other * DSK_PAGE_TOKENS] = (int32_t)(page * DSK_PAGE_TOKENS);
    }
    for (int64_t i = 0; i < n_slots; i++)
        slots[i] = slots[i / DSK_PAGE_TOKENS * DSK_PAGE_TOKENS] + (int32_t)(i % DSK_PAGE_TOKENS);
}

/* n_templates rows of bf16, then the pool filled with them over and over. */
static void data_init(struct bench *b, struct data *d, const char *layout, int32_t n_templates)
{
    int64_t n_slots;

    memset(d, 0, sizeof(*d));
    d->layout = dsk_layout_by_name(layout);
    d->n_windows = b->is_quick ? 32 : N_WINDOWS;
    n_slots = d->n_windows * WINDOW;
    d->kv = (struct dsk_kv_view){.page_pitch_bytes = DSK_PAGE_TOKENS * (int64_t)d->layout->row_bytes,
                                 .n_slots = n_slots,
                                 .layout = d->layout->id,
                                 .raw_scale = 0.02f};
    d->kv.base = take(b, (uint64_t)n_slots * (uint64_t)d->layout->row_bytes);
    d->rows = upload_normal(b, (int64_t)n_templates * d->layout->d_qk, 1);
    d->slots = take_host(4 * (uint64_t)n_slots);
    fill_slots(d->slots, n_slots);
    for (int64_t i = 0; i < n_slots; i += N_TEMPLATES)
        append_templates(b, d, d->slots + i, N_TEMPLATES);
    sync(b);
}

static void data_fini(struct bench *b, struct data *d)
{
    dsk_mem_free(b->dev, d->kv.base);
    dsk_mem_free(b->dev, d->rows);
    free(d->slots);
}

/* ---- attend ------------------------------------------------------------------------------ */

struct attend {
    const struct gpu_case *c;
    struct data *d;
    int32_t n_sets;
};

static void call_attend(struct bench *b, void *user, int i)
{
    const struct attend *a = user;
    const struct dsk_layout *layout = a->d->layout;
    const int64_t set_bytes = 4 * (int64_t)a->c->rows * a->c->width;
    struct dsk_attend_seg seg = {.q = a->d->q,
                                 .out = a->d->out,
                                 .lse = a->d->lse,
                                 .indices = a->d->indices + (uint64_t)(i % a->n_sets * set_bytes),
                                 .q_row_bytes = 2 * (int64_t)a->c->heads * layout->d_qk,
                                 .q_head_bytes = 2 * layout->d_qk,
                                 .out_row_bytes = 2 * (int64_t)a->c->heads * layout->d_v,
                                 .out_head_bytes = 2 * layout->d_v,
                                 .lse_row_bytes = 4 * a->c->heads,
                                 .indices_row_bytes = 4 * a->c->width,
                                 .n_rows = a->c->rows,
                                 .topk = a->c->width,
                                 .space = DSK_SPACE_PHYSICAL,
                                 .softmax_scale = 0.0417f};
    struct dsk_attend_args args = {
        .kv = a->d->kv, .segs = &seg, .n_segs = 1, .h_q = a->c->heads, .out_dtype = DSK_DTYPE_BF16};
    struct dsk_err err = {.status = DSK_OK};

    must(dsk_attend(b->s, &args, &err), &err, "attend");
}

/* Sets of n_rows lists; the rows of all sets walk through the windows. A prefill's rows are one sequence's. */
static void upload_indices(struct bench *b, struct attend *a)
{
    const int64_t n_rows = (int64_t)a->n_sets * a->c->rows;
    struct ref64_rng rng = ref64_rng_init(7);
    int32_t *list = take_host(4 * (uint64_t)n_rows * (uint64_t)a->c->width);

    for (int64_t row = 0; row < n_rows; row++) {
        int64_t window = (a->c->rows > 1000 ? row / a->c->rows : row) % a->d->n_windows;

        for (int32_t i = 0; i < a->c->width; i++)
            list[row * a->c->width + i] = (int32_t)(window * WINDOW + ref64_rng_below(&rng, WINDOW));
    }
    a->d->indices = take(b, 4 * (uint64_t)n_rows * (uint64_t)a->c->width);
    must(dsk_copy_in(b->s, a->d->indices, list, 4 * (uint64_t)n_rows * (uint64_t)a->c->width), NULL,
         "copy in");
    sync(b);
    free(list);
}

static void print_result(struct bench *b, const struct result *r)
{
    char shape[48];

    if (r->c->heads > 0)
        snprintf(shape, sizeof(shape), "%d heads x %d rows x %d", r->c->heads, r->c->rows, r->c->width);
    else
        snprintf(shape, sizeof(shape), "%d rows", r->c->rows);
    printf("%-13s %-14s %-24s %8.1f %8.1f %8.1f %8.1f %8.1f %8.0f %8.1f %6.2f", r->c->name, r->c->layout,
           shape, r->us, r->us_low, r->us_high, r->us_queued, r->tflops, r->gbs, r->roof_us,
           r->us_queued / r->roof_us);
    if (r->c->target_us > 0)
        printf("  <= %.0f us: %s", r->c->target_us, r->us_queued <= r->c->target_us ? "yes" : "no");
    if (r->c->target_tflops > 0)
        printf("  >= %.0f TFLOP/s: %s", r->c->target_tflops, r->tflops >= r->c->target_tflops ? "yes" : "no");
    printf("\n");
    fflush(stdout);
    if (b->n_results < MAX_RESULTS)
        b->results[b->n_results++] = *r;
}

static void measure_attend(struct bench *b, struct data *d, const struct gpu_case *c)
{
    const struct dsk_layout *layout = d->layout;
    const double n_q = (double)c->heads * c->rows;
    const double set_bytes = (double)c->rows * c->width * layout->row_bytes;
    const double wanted = 2 * (double)((struct gpu_device *)b->dev)->props.cache_bytes;
    const double cached = c->rows > 1000 ? (double)WINDOW * layout->row_bytes : set_bytes;
    struct attend a = {.c = c, .d = d, .n_sets = (int32_t)(wanted / cached) + 2};
    struct result r;

    d->q = upload_normal(b, (int64_t)n_q * layout->d_qk, 0.5f);
    d->out = take(b, (uint64_t)n_q * 2 * (uint64_t)layout->d_v);
    d->lse = take(b, (uint64_t)n_q * 4);
    a.n_sets = a.n_sets > 128 ? 128 : a.n_sets;
    upload_indices(b, &a);
    /* Bytes that must move: a prefill's rows share their window. */
    r = measure(b, call_attend, &a, 2 * n_q * c->width * (layout->d_qk + layout->d_v),
                cached + 4.0 * c->rows * c->width + n_q * (2 * layout->d_qk + 2 * layout->d_v + 4));
    r.c = c;
    print_result(b, &r);
    dsk_mem_free(b->dev, d->q);
    dsk_mem_free(b->dev, d->out);
    dsk_mem_free(b->dev, d->lse);
    dsk_mem_free(b->dev, d->indices);
}

/* ---- appends and readers ----------------------------------------------------------------- */

struct rows {
    const struct gpu_case *c;
    struct data *d;
};

static void call_append(struct bench *b, void *user, int i)
{
    const struct rows *r = user;
    const int64_t n_places = r->d->kv.n_slots / r->c->rows;

    append_templates(b, r->d, r->d->slots + i % n_places * r->c->rows, r->c->rows);
}

static void call_read(struct bench *b, void *user, int i)
{
    const struct rows *r = user;
    const int64_t n_places = r->d->kv.n_slots / r->c->rows, first = i % n_places * r->c->rows;
    struct dsk_read_args args = {
        .kv = r->d->kv, .out = r->d->out, .n_rows = r->c->rows, .mode = DSK_READ_FULL};
    struct dsk_err err = {.status = DSK_OK};

    if (strcmp(r->c->name, "read full") == 0) { /* a stretch of the plane that moves on with each call */
        args.kv.base += (uint64_t)(first / DSK_PAGE_TOKENS * args.kv.page_pitch_bytes);
        args.kv.n_slots = r->c->rows;
    } else {
        args.mode = DSK_READ_SELECTED;
        args.list = r->d->indices + 4 * (uint64_t)first;
        args.n_list = r->c->rows;
    }
    must(dsk_read(b->s, &args, &err), &err, "read");
}

/* Every slot once, shuffled. */
static void upload_shuffled(struct bench *b, struct data *d)
{
    struct ref64_rng rng = ref64_rng_init(9);
    int32_t *list = take_host(4 * (uint64_t)d->kv.n_slots);

    for (int64_t i = 0; i < d->kv.n_slots; i++) {
        int64_t j = ref64_rng_below(&rng, i + 1);

        list[i] = list[j];
        list[j] = (int32_t)i;
    }
    d->indices = take(b, 4 * (uint64_t)d->kv.n_slots);
    must(dsk_copy_in(b->s, d->indices, list, 4 * (uint64_t)d->kv.n_slots), NULL, "copy in");
    sync(b);
    free(list);
}

static void measure_rows(struct bench *b, struct data *d, const struct gpu_case *c)
{
    struct rows rows = {.c = c, .d = d};
    const double bytes = (double)c->rows * (d->layout->row_bytes + 2 * d->layout->d_qk);
    struct result r;

    d->out = take(b, (uint64_t)c->rows * 2 * (uint64_t)d->layout->d_qk);
    r = measure(b, strcmp(c->name, "append") == 0 ? call_append : call_read, &rows, 0, bytes);
    r.c = c;
    print_result(b, &r);
    dsk_mem_free(b->dev, d->out);
}

/* ---- all --------------------------------------------------------------------------------- */

static void run_layout(struct bench *b, const char *layout)
{
    struct data d;

    data_init(b, &d, layout, 65536);
    for (size_t i = 0; i < sizeof(ATTEND_CASES) / sizeof(ATTEND_CASES[0]); i++) {
        if (strcmp(ATTEND_CASES[i].layout, layout) == 0)
            measure_attend(b, &d, &ATTEND_CASES[i]);
    }
    upload_shuffled(b, &d);
    for (size_t i = 0; i < sizeof(ROW_CASES) / sizeof(ROW_CASES[0]); i++) {
        if (strcmp(ROW_CASES[i].layout, layout) == 0)
            measure_rows(b, &d, &ROW_CASES[i]);
    }
    dsk_mem_free(b->dev, d.indices);
    data_fini(b, &d);
}

static int write_json(const struct bench *b, const char *path)
{
    char date[32];
    time_t now = time(NULL);
    struct tm tm;
    FILE *f = fopen(path, "w");

    if (f == NULL) {
        fprintf(stderr, "dsk-bench: %s: %s\n", path, strerror(errno));
        return 2;
    }
    strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    fprintf(f,
            "{\n  \"program\": \"dsk-bench\",\n  \"version\": \"%s\",\n  \"date\": \"%s\",\n  \"device\": "
            "\"%s\",\n"
            "  \"arch\": \"%s\",\n  \"copy_tbs\": %.3f,\n  \"peak_tflops\": %.1f,\n  \"results\": [\n",
            DSA_VERSION_STRING, date, b->info->name, b->info->arch, b->copy_tbs, b->peak_tflops);
    for (int i = 0; i < b->n_results; i++) {
        const struct result *r = &b->results[i];

        fprintf(f,
                "    {\"op\": \"%s\", \"layout\": \"%s\", \"heads\": %d, \"rows\": %d, \"width\": %d, "
                "\"us_median\": %.2f, \"us_low\": %.2f, \"us_high\": %.2f, \"us_queued\": %.2f, \"tflops\": "
                "%.2f, "
                "\"gbs\": %.1f, \"roof_us\": %.2f}%s\n",
                r->c->name, r->c->layout, r->c->heads, r->c->rows, r->c->width, r->us, r->us_low, r->us_high,
                r->us_queued, r->tflops, r->gbs, r->roof_us, i + 1 < b->n_results ? "," : "");
    }
    fprintf(f, "  ]\n}\n");
    return fclose(f) == 0 ? 0 : 2;
}

int bench_gpu(const struct dsk_device_config *config, const char *json, bool is_quick)
{
    static const char *const layouts[] = {"scaled_512_64", "scaled_512_0", "scaled_256_0", "bf16_576",
                                          "raw_512_64"};
    static struct bench b;
    struct dsk_err err = {.status = DSK_OK};

    b.is_quick = is_quick;
    must(dsk_device_open(config, &b.dev, &err), &err, "open");
    must(dsk_stream_create(b.dev, &b.s), NULL, "stream");
    for (int i = 0; i < MAX_EVENTS; i++)
        must(dsk_gpu_event_create_timed(b.dev, &b.events[i]), NULL, "event");
    b.info = dsk_device_get_info(b.dev);
    printf("dsk-bench %s on %s, %s%s%s%s\n", DSA_VERSION_STRING, b.info->name, b.info->arch,
           (config->flags & DSK_DEVICE_PORTABLE) != 0 ? ", portable kernels" : "",
           (config->flags & DSK_DEVICE_FP8) != 0 ? ", raw_512_64 in e4m3" : "",
           (config->flags & DSK_DEVICE_NO_GRAPHS) != 0 ? ", no graphs" : "");
    measure_machine(&b);
    printf("\n%-13s %-14s %-24s %8s %8s %8s %8s %8s %8s %8s %6s\n", "operation", "layout", "shape", "call us",
           "p10", "p90", "queued", "TFLOP/s", "GB/s", "roof us", "ratio");
    for (size_t i = 0; i < sizeof(layouts) / sizeof(layouts[0]); i++)
        run_layout(&b, layouts[i]);
    for (int i = 0; i < MAX_EVENTS; i++)
        dsk_event_destroy(b.events[i]);
    dsk_stream_destroy(b.s);
    dsk_device_close(b.dev);
    return json == NULL ? 0 : write_json(&b, json);
}
