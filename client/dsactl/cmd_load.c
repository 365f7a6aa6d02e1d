/* cmd_load.c - closed-loop load: N requests in flight on one stream, each answered one replaced at once.
 * Latency is from submit to completion in this process; the server's own queue and device times are shown
 * beside it. */
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/dsactl/content.h"
#include "client/dsactl/dsactl.h"
#include "client/dsactl/histogram.h"

#define MAX_REASONS 16

struct reason {
    char word[32];
    uint64_t n;
};

struct config {
    uint64_t inflight, rows, heads, topk, layers, context, requests, seed;
    double seconds;
    const char *transport;
    bool want_lse, want_json, is_shared;
};

struct load;

struct slot {
    struct load *load;
    struct block block;
    struct dsa_attend attend;
    struct dsa_segment segment;
    struct dsa_request *request;
    bool is_idle; /* not in flight: refused, or the run is ending */
};

struct load {
    struct config config;
    struct dsa_client *client;
    const struct dsa_pool *pool;
    uint64_t sequence;
    struct slot *slots;
    uint64_t begin_us, end_us, last_us;
    uint64_t n_sent, n_good, n_failed, next_layer;
    struct histogram latency_us, queue_us, device_us;
    uint64_t batch_rows;
    struct reason reasons[MAX_REASONS];
    unsigned n_reasons;
};

static void count_reason(struct load *load, const struct dsa_error *err)
{
    unsigned i = 0;

    while (i < load->n_reasons && strcmp(load->reasons[i].word, err->reason) != 0)
        i++;
    if (i == MAX_REASONS)
        return;
    if (i == load->n_reasons) {
        snprintf(load->reasons[i].word, sizeof(load->reasons[i].word), "%s", err->reason);
        load->n_reasons++;
        print_error("first of its kind", err);
    }
    load->reasons[i].n++;
}

/* ---- the loop -------------------------------------------------------------------------------- */

static bool is_over(const struct load *load, uint64_t now)
{
    return load->config.requests ? load->n_sent >= load->config.requests : now >= load->end_us;
}

static void on_done(struct dsa_request *request, const struct dsa_result *result, void *arg);

static void send_one(struct slot *slot)
{
    struct load *load = slot->load;
    struct dsa_error err;

    slot->attend.layer = (uint32_t)(load->next_layer++ % load->config.layers);
    slot->is_idle = false;
    if (dsa_attend_submit(load->client, NULL, &slot->attend, on_done, slot, &slot->request, &err) == DSA_OK) {
        load->n_sent++;
        return;
    }
    slot->request = NULL;
    slot->is_idle = true;
    load->n_failed++;
    count_reason(load, &err);
}

static void on_done(struct dsa_request *request, const struct dsa_result *result, void *arg)
{
    struct slot *slot = arg;
    struct load *load = slot->load;
    bool is_good = result->error.code == DSA_OK;

    load->last_us = clock_us();
    if (is_good) {
        load->n_good++;
        histogram_add(&load->latency_us, result->elapsed_us);
        histogram_add(&load->queue_us, result->timings.queue_us);
        histogram_add(&load->device_us, result->timings.device_us);
        load->batch_rows += result->timings.batch_rows;
    } else {
        load->n_failed++;
        count_reason(load, &result->error);
    }
    dsa_request_free(request); /* and the result with it */
    slot->request = NULL;
    slot->is_idle = true;
    /* After a refusal the slot rests until the next poll: a full queue is not helped by asking at once. */
    if (is_good && !is_over(load, load->last_us))
        send_one(slot);
}

static uint32_t n_flying(const struct load *load)
{
    uint32_t n = 0;

    for (uint64_t i = 0; i < load->config.inflight; i++)
        n += !load->slots[i].is_idle;
    return n;
}

static int drive(struct load *load)
{
    struct dsa_session_info session;

    load->begin_us = clock_us();
    load->end_us = load->begin_us + (uint64_t)(load->config.seconds * 1e6);
    for (;;) {
        bool is_ending = is_over(load, clock_us());

        for (uint64_t i = 0; i < load->config.inflight && !is_ending; i++) {
            if (load->slots[i].is_idle) {
                send_one(&load->slots[i]);
                is_ending = is_over(load, 0);
            }
        }
        if (is_ending && n_flying(load) == 0)
            return EXIT_OK;
        dsa_poll(load->client, 100000);
        dsa_session_info(load->client, &session);
        if (!session.is_alive) {
            fprintf(stderr, "dsactl: load: the session is over\n");
            return EXIT_CONNECT;
        }
    }
}

/* ---- setting up ------------------------------------------------------------------------------ */

/* Fills the sequence that everyone reads: `context` tokens in each layer used. */
static dsa_status fill_sequence(struct load *load, struct dsa_error *err)
{
    const struct dsa_limits *limits = &dsa_capabilities(load->client)->limits;
    uint64_t d_qk = load->pool->d_qk, room = limits->max_inline_bytes / (d_qk * 2);
    struct ref64_rng rng = ref64_rng_init(load->config.seed);
    dsa_status status = dsa_sequence_create(load->client, NULL, &load->sequence, err);
    uint16_t *rows;

    if (room > limits->max_append_rows)
        room = limits->max_append_rows;
    if (room > 512)
        room = 512;
    rows = malloc(room * d_qk * 2);
    if (!rows)
        abort();
    for (uint32_t layer = 0; layer < load->config.layers && status == DSA_OK; layer++) {
        for (uint64_t at = 0; at < load->config.context && status == DSA_OK; at += room) {
            uint64_t n = load->config.context - at < room ? load->config.context - at : room;
            struct dsa_append append = {
                .sequence = load->sequence,
                .layer = layer,
                .rows = {.dtype = DSA_DTYPE_BF16, .rank = 2, .shape = {n, d_qk}, .data = rows},
            };

            content_fill(&rng, rows, n * d_qk);
            status = dsa_append(load->client, &append, NULL, err);
        }
    }
    free(rows);
    return status;
}

static dsa_status slot_init(struct load *load, struct slot *slot, uint64_t number, struct dsa_error *err)
{
    const struct config *c = &load->config;
    uint64_t d_qk = load->pool->d_qk, d_v = load->pool->d_v, n = c->rows * c->heads;
    struct ref64_rng rng = content_rng(c->seed, number, 1);
    uint16_t *q, *out;
    int32_t *indices;
    float *lse;
    dsa_status status = block_init(&slot->block, load->client, c->is_shared,
                                   64 * 4 + n * d_qk * 2 + n * d_v * 2 + n * 4 + c->rows * c->topk * 4, err);

    if (status != DSA_OK)
        return status;
    q = block_take(&slot->block, n * d_qk * 2);
    indices = block_take(&slot->block, c->rows * c->topk * 4);
    out = block_take(&slot->block, n * d_v * 2);
    lse = block_take(&slot->block, n * 4);
    content_fill(&rng, q, n * d_qk);
    for (uint64_t i = 0; i < c->rows * c->topk; i++)
        indices[i] = (int32_t)ref64_rng_below(&rng, (int64_t)c->context);
    slot->load = load;
    slot->is_idle = true;
    slot->segment = (struct dsa_segment){load->sequence, (uint32_t)c->rows};
    slot->attend = (struct dsa_attend){
        .n_segments = 1,
        .segments = &slot->segment,
        .q = block_tensor(&slot->block, q, DSA_DTYPE_BF16, 3, c->rows, c->heads, d_qk),
        .indices = block_tensor(&slot->block, indices, DSA_DTYPE_I32, 2, c->rows, c->topk, 0),
        .space = DSA_SPACE_LOGICAL,
        .softmax_scale = 1 / sqrtf((float)d_qk),
        .out = block_output(&slot->block, out, DSA_DTYPE_BF16),
        .want_lse = c->want_lse,
        .lse = block_output(&slot->block, lse, DSA_DTYPE_F32),
    };
    return DSA_OK;
}

/* ---- the report ------------------------------------------------------------------------------ */

static void print_line(const char *name, const struct histogram *h)
{
    printf("%-16s %10" PRIu64 " %10" PRIu64 " %10" PRIu64 " %10" PRIu64 " %10.0f\n", name,
           histogram_at(h, 50), histogram_at(h, 90), histogram_at(h, 99), h->max, histogram_mean(h));
}

static void report_text(const struct load *load, double seconds)
{
    const struct config *c = &load->config;

    printf("%" PRIu64 " in flight, %" PRIu64 " rows, %" PRIu64 " heads, width %" PRIu64 " of %" PRIu64
           " tokens, %" PRIu64 " layers, %s\n",
           c->inflight, c->rows, c->heads, c->topk, c->context, c->layers, c->is_shared ? "memfd" : "inline");
    printf("requests         %" PRIu64 " answered, %" PRIu64 " failed in %.2f s\n", load->n_good,
           load->n_failed, seconds);
    printf("throughput       %.0f requests/s, %.0f rows/s, %.2f GFLOP/s\n", (double)load->n_good / seconds,
           (double)(load->n_good * c->rows) / seconds,
           2e-9 * (double)(load->n_good * c->rows * c->heads * c->topk) * (load->pool->d_qk + load->pool->d_v)
               / seconds);
    printf("batch            %.1f rows a launch\n",
           load->n_good ? (double)load->batch_rows / (double)load->n_good : 0.0);
    printf("%-16s %10s %10s %10s %10s %10s\n", "us", "p50", "p90", "p99", "max", "mean");
    print_line("latency", &load->latency_us);
    print_line("server queue", &load->queue_us);
    print_line("server device", &load->device_us);
    for (unsigned i = 0; i < load->n_reasons; i++)
        printf("error            %s x %" PRIu64 "\n", load->reasons[i].word, load->reasons[i].n);
}

static json_t *json_histogram(const struct histogram *h)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:f}", "p50", (json_int_t)histogram_at(h, 50), "p90",
                     (json_int_t)histogram_at(h, 90), "p99", (json_int_t)histogram_at(h, 99), "max",
                     (json_int_t)h->max, "mean", histogram_mean(h));
}

static void report_json(const struct load *load, double seconds)
{
    const struct config *c = &load->config;
    json_t *errors = json_object(), *root;

    for (unsigned i = 0; i < load->n_reasons; i++)
        json_object_set_new(errors, load->reasons[i].word, json_integer((json_int_t)load->reasons[i].n));
    root = json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:f, s:I, s:I, s:f, s:f, s:o, s:o, s:o, s:o}", "inflight",
        (json_int_t)c->inflight, "rows", (json_int_t)c->rows, "heads", (json_int_t)c->heads, "topk",
        (json_int_t)c->topk, "layers", (json_int_t)c->layers, "context", (json_int_t)c->context, "transport",
        c->is_shared ? "memfd" : "inline", "seconds", seconds, "answered", (json_int_t)load->n_good, "failed",
        (json_int_t)load->n_failed, "requests_per_s", (double)load->n_good / seconds, "mean_batch_rows",
        load->n_good ? (double)load->batch_rows / (double)load->n_good : 0.0, "latency_us",
        json_histogram(&load->latency_us), "server_queue_us", json_histogram(&load->queue_us),
        "server_device_us", json_histogram(&load->device_us), "errors", errors);
    json_dumpf(root, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(root);
}

/* ---- the command ----------------------------------------------------------------------------- */

static int set_up(struct load *load)
{
    struct config *c = &load->config;
    const struct ref64_layout *layout;
    struct dsa_error err;

    if (!pool_pick(load->client, &load->pool, &layout)
        || !transport_pick(load->client, c->transport, &c->is_shared))
        return EXIT_USAGE;
    if (c->layers == 0 || c->layers > load->pool->n_layers)
        c->layers = load->pool->n_layers;
    load->slots = calloc(c->inflight, sizeof(*load->slots));
    if (!load->slots)
        return EXIT_MISMATCH;
    if (fill_sequence(load, &err) != DSA_OK) {
        print_error("filling the sequence", &err);
        return EXIT_MISMATCH;
    }
    for (uint64_t i = 0; i < c->inflight; i++) {
        if (slot_init(load, &load->slots[i], i, &err) != DSA_OK) {
            print_error("memory", &err);
            return EXIT_MISMATCH;
        }
    }
    return EXIT_OK;
}

static int run(struct load *load)
{
    int code = set_up(load);
    double seconds;

    if (code == EXIT_OK)
        code = drive(load);
    if (load->n_sent > 0) {
        seconds = (double)((load->last_us ? load->last_us : clock_us()) - load->begin_us) / 1e6;
        (load->config.want_json ? report_json : report_text)(load, seconds > 0 ? seconds : 1e-6);
    }
    if (code == EXIT_OK && load->n_failed > 0)
        code = EXIT_MISMATCH;
    return code;
}

int cmd_load(int argc, char **argv)
{
    struct common common = COMMON_DEFAULTS;
    struct load *load = calloc(1, sizeof(*load)); /* the histograms are large for a stack */
    struct config *c = load ? &load->config : NULL;
    int code;

    if (!load)
        return EXIT_MISMATCH;
    *c = (struct config){.inflight = 16,
                         .rows = 1,
                         .heads = 16,
                         .topk = 512,
                         .context = 4096,
                         .seconds = 5,
                         .seed = 1,
                         .transport = "auto"};
    {
        const struct arg table[] = {
            {"inflight", ARG_UINT, &c->inflight, "N", "requests in flight", 1, 65536},
            {"rows", ARG_UINT, &c->rows, "N", "query rows of a request", 1, 65536},
            {"heads", ARG_UINT, &c->heads, "N", "query heads", 1, 128},
            {"topk", ARG_UINT, &c->topk, "N", "index width", 1, 65536},
            {"layers", ARG_UINT, &c->layers, "N", "layers to go round over; 0 = all", 0, 4096},
            {"context", ARG_UINT, &c->context, "N", "tokens of the sequence that is read", 1, 1 << 24},
            {"seconds", ARG_REAL, &c->seconds, "S", "how long", 0, 0},
            {"requests", ARG_UINT, &c->requests, "N", "stop after this many instead; 0 = by time", 0, 0},
            {"transport", ARG_TEXT, &c->transport, "KIND", "tensors: memfd, inline or auto", 0, 0},
            {"lse", ARG_FLAG, &c->want_lse, NULL, "ask for lse as well", 0, 0},
            {"seed", ARG_UINT, &c->seed, "N", "of the contents", 0, 0},
            {"json", ARG_FLAG, &c->want_json, NULL, "one JSON object instead of text", 0, 0},
            COMMON_ARGS(common),
            {0},
        };

        if (!command_args("load",
                          "Keeps N attend requests in flight and prints throughput and latency percentiles.\n"
                          "Exit code 1 when a request failed.",
                          table, argc, argv, &code)) {
            free(load);
            return code;
        }
    }
    load->client = command_connect(&common, true);
    if (!load->client) {
        free(load);
        return EXIT_CONNECT;
    }
    code = run(load);
    for (uint64_t i = 0; load->slots && i < c->inflight; i++) {
        dsa_request_free(load->slots[i].request);
        block_fini(&load->slots[i].block);
    }
    dsa_close(load->client);
    free(load->slots);
    free(load);
    return code;
}
