/* cmd_replay.c - replays a recorded production trace: flags, set-up and summary. The run is replay_run.c. */
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/dsactl/replay.h"

extern const unsigned char dsactl_trace_slice[];
extern const size_t dsactl_trace_slice_size;

/* ---- set-up ---------------------------------------------------------------------------------- */

static bool open_trace(struct replay *replay)
{
    const struct replay_config *c = &replay->config;
    char text[160];
    FILE *file = c->trace_path
                     ? fopen(c->trace_path, "re")
                     : fmemopen((void *)(uintptr_t)dsactl_trace_slice, dsactl_trace_slice_size, "r");
    int rc;

    if (!file) {
        fprintf(stderr, "dsactl: --trace: %s cannot be opened\n",
                c->trace_path ? c->trace_path : "the shipped slice");
        return false;
    }
    rc = trace_read(file, c->n_requests, &replay->trace, text, sizeof(text));
    fclose(file);
    if (rc != 0)
        fprintf(stderr, "dsactl: %s: %s\n", c->trace_path ? c->trace_path : "the shipped slice", text);
    return rc == 0;
}

/* Flags against the server's limits. */
static bool fit_limits(struct replay *replay)
{
    struct replay_config *c = &replay->config;
    const struct dsa_limits *limits = &dsa_capabilities(replay->client)->limits;
    uint64_t row_bytes = replay->pool->d_qk * 2;

    if (c->layers == 0)
        c->layers = replay->pool->n_layers;
    if (c->layers != replay->pool->n_layers) {
        /* Every layer of a page exists anyway, and a sequence counts the tokens present in all of them. */
        fprintf(stderr, "dsactl: --layers: the server has %u; start it with --layers %" PRIu64 "\n",
                replay->pool->n_layers, c->layers);
        return false;
    }
    if (c->heads > limits->max_heads || c->topk > limits->max_topk) {
        fprintf(stderr, "dsactl: the server takes at most %u heads and width %u\n", limits->max_heads,
                limits->max_topk);
        return false;
    }
    if (512 % c->scale_tokens != 0) {
        fprintf(stderr,
                "dsactl: --scale-tokens: %" PRIu64 " does not divide the trace's block of 512 tokens\n",
                c->scale_tokens);
        return false;
    }
    if (c->concurrency > limits->max_inflight_per_stream)
        c->concurrency = limits->max_inflight_per_stream;
    if (c->chunk_tokens > limits->max_append_rows / c->layers)
        c->chunk_tokens = limits->max_append_rows / c->layers;
    if (!c->is_shared && c->chunk_tokens > limits->max_inline_bytes / (row_bytes * c->layers))
        c->chunk_tokens = limits->max_inline_bytes / (row_bytes * c->layers);
    if (c->chunk_tokens == 0)
        c->chunk_tokens = 1;
    replay->block_tokens = TRACE_BLOCK_TOKENS / c->scale_tokens;
    return true;
}

static bool make_slots(struct replay *replay)
{
    const struct replay_config *c = &replay->config;
    uint64_t d_qk = replay->pool->d_qk, d_v = replay->pool->d_v;
    uint64_t rows = c->layers * c->chunk_tokens * d_qk * 2;
    uint64_t each = block_size(rows) + block_size(c->heads * d_qk * 2) + block_size(c->heads * d_v * 2)
                    + block_size(c->topk * 4) + block_size(4) + block_size(c->heads * 4);
    uint64_t longest = 0;
    struct dsa_error err;

    for (size_t i = 0; i < replay->trace.n; i++) {
        uint64_t n = replay->trace.requests[i].n_prompt + replay->trace.requests[i].n_output;

        longest = n > longest ? n : longest;
    }
    replay->slots = calloc(c->concurrency, sizeof(*replay->slots));
    replay->marks = calloc(longest / 64 + 2, sizeof(*replay->marks));
    replay->prefixes = prefix_create();
    if (!replay->slots || !replay->marks || !replay->prefixes) {
        fprintf(stderr, "dsactl: no memory\n");
        return false;
    }
    if (block_init(&replay->block, replay->client, c->is_shared, each * c->concurrency, &err) != DSA_OK) {
        print_error("memory", &err);
        return false;
    }
    for (uint64_t i = 0; i < c->concurrency; i++) {
        struct replay_slot *slot = &replay->slots[i];

        slot->replay = replay;
        slot->rows = block_take(&replay->block, rows);
        slot->q = block_take(&replay->block, c->heads * d_qk * 2);
        slot->out = block_take(&replay->block, c->heads * d_v * 2);
        slot->indices = block_take(&replay->block, c->topk * 4);
        slot->n_valid = block_take(&replay->block, 4);
        slot->lse = block_take(&replay->block, c->heads * 4);
    }
    return true;
}

static int set_up(struct replay *replay)
{
    struct replay_config *c = &replay->config;

    if (!pool_pick(replay->client, &replay->pool, &replay->layout))
        return EXIT_MISMATCH;
    if (!transport_pick(replay->client, c->transport, &c->is_shared) || !fit_limits(replay))
        return EXIT_USAGE;
    if (!make_slots(replay))
        return EXIT_MISMATCH;
    replay->softmax_scale = 1 / sqrtf((float)replay->pool->d_qk);
    if (c->check_every != 0) {
        replay->checker = checker_create(replay->pool, replay->layout, (uint32_t)c->heads, (uint32_t)c->topk,
                                         replay->softmax_scale);
        if (!replay->checker) {
            fprintf(stderr, "dsactl: the checker thread cannot start\n");
            return EXIT_MISMATCH;
        }
    }
    return EXIT_OK;
}

static void tear_down(struct replay *replay)
{
    uint64_t sequence;

    for (uint64_t i = 0; replay->slots && i < replay->config.concurrency; i++) {
        dsa_request_free(replay->slots[i].handle);
        free(replay->slots[i].chains);
    }
    while (replay->prefixes && prefix_evict(replay->prefixes, &sequence))
        ; /* the session's end gives all sequences back at once */
    prefix_destroy(replay->prefixes);
    free(replay->slots);
    free(replay->marks);
    block_fini(&replay->block);
    trace_free(&replay->trace);
}

/* ---- summary --------------------------------------------------------------------------------- */

struct verdict {
    double seconds;
    uint64_t n_checked, n_mismatches;
};

static void print_latency(const char *name, const struct histogram *h)
{
    printf("  %-22s %9.3f %9.3f %9.3f %9.3f\n", name, (double)histogram_at(h, 50) / 1e3,
           (double)histogram_at(h, 90) / 1e3, (double)histogram_at(h, 99) / 1e3, (double)h->max / 1e3);
}

static void print_summary(const struct replay *r, const struct verdict *verdict)
{
    const struct replay_config *c = &r->config;
    uint64_t prompt = r->n_appended + r->n_reused;

    printf("replayed in %.1f s: lengths / %" PRIu64 ", %" PRIu64 " layers, %" PRIu64 " heads, width %" PRIu64
           ", %" PRIu64 " at a time, %s, %s\n",
           verdict->seconds, c->scale_tokens, c->layers, c->heads, c->topk, c->concurrency,
           c->is_shared ? "memfd" : "inline", dsa_layout_name(r->pool->layout));
    printf("  %-22s %" PRIu64 " finished, %" PRIu64 " failed, %" PRIu64 " too long for the pool\n",
           "requests", r->n_finished, r->n_failed, r->n_too_long);
    printf("  %-22s %" PRIu64 " appended, %" PRIu64 " reused by forks (%.1f %%)\n", "prompt tokens",
           r->n_appended, r->n_reused, prompt ? 100.0 * (double)r->n_reused / (double)prompt : 0.0);
    printf("  %-22s %" PRIu64 " (%" PRIu64 " attends, %.1f rows a launch)\n", "output tokens", r->n_output,
           r->n_attends, histogram_mean(&r->batch_rows));
    printf("  %-22s %.0f output/s, %.0f prompt/s\n", "throughput", (double)r->n_output / verdict->seconds,
           (double)r->n_appended / verdict->seconds);
    printf("  %-22s %9s %9s %9s %9s\n", "latency, ms", "p50", "p90", "p99", "max");
    print_latency("attend", &r->attend_us);
    print_latency("output token", &r->token_us);
    print_latency("append of a chunk", &r->append_us);
    printf("  %-22s %" PRIu64 " of %" PRIu64 " used at peak, %" PRIu64 " shared, %" PRIu64
           " saved by sharing\n",
           "pages", r->pages_peak, r->pool->n_pages, r->shared_peak, r->saved_peak);
    printf("  %-22s %" PRIu64 " prefixes evicted, %" PRIu64 " requests preempted, %" PRIu64 " retries\n",
           "pool pressure", r->n_evicted, r->n_preempted, r->n_retries);
    printf("  %-22s %" PRIu64 " replies against float64, %" PRIu64 " mismatches\n", "checked",
           verdict->n_checked, verdict->n_mismatches);
}

static json_t *json_latency(const struct histogram *h)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:f}", "p50", (json_int_t)histogram_at(h, 50), "p90",
                     (json_int_t)histogram_at(h, 90), "p99", (json_int_t)histogram_at(h, 99), "max",
                     (json_int_t)h->max, "mean", histogram_mean(h));
}

static void set_count(json_t *object, const char *name, uint64_t n)
{
    json_object_set_new(object, name, json_integer((json_int_t)n));
}

static void print_json(const struct replay *r, const struct verdict *verdict)
{
    const struct replay_config *c = &r->config;
    json_t *root = json_object();

    json_object_set_new(root, "seconds", json_real(verdict->seconds));
    json_object_set_new(root, "layout", json_string(dsa_layout_name(r->pool->layout)));
    json_object_set_new(root, "transport", json_string(c->is_shared ? "memfd" : "inline"));
    set_count(root, "scale_tokens", c->scale_tokens);
    set_count(root, "layers", c->layers);
    set_count(root, "heads", c->heads);
    set_count(root, "topk", c->topk);
    set_count(root, "concurrency", c->concurrency);
    set_count(root, "requests_finished", r->n_finished);
    set_count(root, "requests_failed", r->n_failed);
    set_count(root, "requests_too_long", r->n_too_long);
    set_count(root, "prompt_tokens_appended", r->n_appended);
    set_count(root, "prompt_tokens_reused", r->n_reused);
    set_count(root, "output_tokens", r->n_output);
    set_count(root, "attends", r->n_attends);
    json_object_set_new(root, "output_tokens_per_s", json_real((double)r->n_output / verdict->seconds));
    json_object_set_new(root, "mean_batch_rows", json_real(histogram_mean(&r->batch_rows)));
    json_object_set_new(root, "attend_us", json_latency(&r->attend_us));
    json_object_set_new(root, "output_token_us", json_latency(&r->token_us));
    json_object_set_new(root, "append_us", json_latency(&r->append_us));
    set_count(root, "pages_peak", r->pages_peak);
    set_count(root, "pages_shared_peak", r->shared_peak);
    set_count(root, "pages_saved_peak", r->saved_peak);
    set_count(root, "prefixes_evicted", r->n_evicted);
    set_count(root, "requests_preempted", r->n_preempted);
    set_count(root, "checked", verdict->n_checked);
    set_count(root, "mismatches", verdict->n_mismatches);
    json_dumpf(root, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(root);
}

/* ---- the command ----------------------------------------------------------------------------- */

static int run(struct replay *replay)
{
    struct verdict verdict = {0};
    int code = set_up(replay);
    bool is_ready = code == EXIT_OK;

    if (is_ready)
        code = replay_run(replay);
    if (replay->checker)
        checker_finish(replay->checker, &verdict.n_checked, &verdict.n_mismatches);
    if (!is_ready)
        return code;
    verdict.seconds = (double)(replay->end_us - replay->begin_us) / 1e6;
    (replay->config.want_json ? print_json : print_summary)(replay, &verdict);
    if (code == EXIT_OK && (verdict.n_mismatches > 0 || replay->n_failed > 0))
        code = EXIT_MISMATCH;
    return code;
}

static bool parse(struct replay_config *c, struct common *common, int argc, char **argv, int *code_p)
{
    const struct arg table[] = {
        {"trace", ARG_TEXT, &c->trace_path, "FILE", "JSON lines; without it a shipped slice of 200 requests",
         0, 0},
        {"requests", ARG_UINT, &c->n_requests, "N", "from the start of the trace; 0 = all", 0, 0},
        {"scale-time", ARG_REAL, &c->scale_time, "X",
         "arrivals come X times as fast; 0 = as fast as they are served", 0, 0},
        {"scale-tokens", ARG_UINT, &c->scale_tokens, "N",
         "lengths and prefix blocks divided by N (divides 512)", 1, 512},
        {"layers", ARG_UINT, &c->layers, "N", "must be the server's; 0 = take those", 0, 4096},
        {"heads", ARG_UINT, &c->heads, "N", "query heads", 1, 128},
        {"topk", ARG_UINT, &c->topk, "N", "positions that a token attends to", 1, 65536},
        {"concurrency", ARG_UINT, &c->concurrency, "N", "requests at a time", 1, 4096},
        {"chunk", ARG_UINT, &c->chunk_tokens, "N", "prompt tokens of one append", 1, 65536},
        {"check-every", ARG_UINT, &c->check_every, "N", "compare each N-th reply with float64; 0 = none", 0,
         0},
        {"transport", ARG_TEXT, &c->transport, "KIND", "tensors: memfd, inline or auto", 0, 0},
        {"seed", ARG_UINT, &c->seed, "N", "of the contents", 0, 0},
        {"json", ARG_FLAG, &c->want_json, NULL, "summary as one JSON object", 0, 0},
        {"quiet", ARG_FLAG, &c->is_quiet, NULL, "no progress on stderr", 0, 0},
        COMMON_ARGS(*common),
        {0},
    };

    return command_args(
        "replay",
        "Replays a recorded trace: each request is a sequence, a prompt whose first blocks were seen\n"
        "before is a fork, prompts are appended in chunks over all layers, and every output token\n"
        "appends a row and attends in each layer to a recent window, heavy hitters and random\n"
        "positions. When the pool is full, retained prefixes are evicted, oldest first. Samples of the\n"
        "replies are compared with float64. Exit code 1 on a mismatch or a failed request.",
        table, argc, argv, code_p);
}

int cmd_replay(int argc, char **argv)
{
    struct common common = COMMON_DEFAULTS;
    struct replay *replay = calloc(1, sizeof(*replay)); /* the histograms are large for a stack */
    int code;

    if (!replay)
        return EXIT_MISMATCH;
    replay->config = (struct replay_config){.n_requests = 0,
                                            .scale_tokens = 8,
                                            .heads = 16,
                                            .topk = 2048,
                                            .concurrency = 16,
                                            .check_every = 400,
                                            .chunk_tokens = 256,
                                            .seed = 1,
                                            .scale_time = 0,
                                            .transport = "auto"};
    if (!parse(&replay->config, &common, argc, argv, &code)) {
        free(replay);
        return code;
    }
    if (!open_trace(replay)) {
        free(replay);
        return EXIT_USAGE;
    }
    replay->client = command_connect(&common, true);
    code = replay->client ? run(replay) : EXIT_CONNECT;
    tear_down(replay);
    dsa_close(replay->client);
    free(replay);
    return code;
}
