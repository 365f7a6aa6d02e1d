#include "live.h"

#include <math.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/dsactl/check.h"
#include "client/dsactl/content.h"
#include "ref64.h"

static void start(struct live *live, const char *level, bool is_logged)
{
    char path[96], listen_flag[128], level_flag[32];
    pid_t parent = getpid();

    snprintf(live->dir, sizeof(live->dir), "/tmp/dsa_live_XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(live->dir));
    snprintf(path, sizeof(path), "%s/s", live->dir);
    snprintf(live->target, sizeof(live->target), "unix:%s", path);
    snprintf(live->log, sizeof(live->log), "%s/log", live->dir);
    snprintf(level_flag, sizeof(level_flag), "--log-level=%s", level);
    snprintf(listen_flag, sizeof(listen_flag), "--listen=unix:%s", path);
    live->server = fork(); /* nothing of gRPC has started in this process yet */
    ck_assert_int_ge(live->server, 0);
    if (live->server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that fails half-way leaves no server behind */
        if (getppid() != parent)
            _exit(127);
        if (is_logged && !freopen(live->log, "w", stderr))
            _exit(127);
        execl(DSAD_PATH, "dsad", listen_flag, "--device=cpu", "--layout=scaled_512_64", "--layers=2",
              "--pool-pages=256", level_flag, (char *)NULL);
        _exit(127);
    }
}

void live_start(struct live *live)
{
    start(live, "error", false);
}

const char *live_start_logged(struct live *live, const char *level)
{
    start(live, level, true);
    return live->log;
}

void live_stop(struct live *live, int signal)
{
    char path[96];

    kill(live->server, signal);
    waitpid(live->server, NULL, 0);
    static const char *const names[] = {"s", "s.fd", "s.lock", "log"};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", live->dir, names[i]);
        unlink(path);
    }
    rmdir(live->dir);
}

void live_expect(dsa_status status, dsa_status wanted, const struct dsa_error *err, const char *file,
                 int line)
{
    char text[512] = "";

    if (status == wanted)
        return;
    if (status != DSA_OK)
        dsa_error_text(err, text, sizeof(text));
    ck_abort_msg("%s:%d: %s, wanted %s: %s", file, line, status == DSA_OK ? "OK" : dsa_status_reason(status),
                 wanted == DSA_OK ? "OK" : dsa_status_reason(wanted), text);
}

uint64_t live_now_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

struct dsa_client *live_connect(const struct live *live, const struct dsa_options *options)
{
    struct dsa_options defaults = {.client_name = "test", .connect_timeout_us = LIVE_PATIENCE_US};
    struct dsa_client *client;
    struct dsa_error err;

    EXPECT(dsa_connect(live->target, options ? options : &defaults, &client, &err), DSA_OK, &err);
    return client;
}

uint64_t live_sequence(struct dsa_client *client, uint32_t n)
{
    uint16_t *rows = malloc((size_t)LIVE_LAYERS * n * LIVE_D_QK * sizeof(*rows));
    struct dsa_append append = {.n_layers = LIVE_LAYERS};
    struct dsa_error err;
    uint64_t id;

    for (uint32_t l = 0; l < LIVE_LAYERS; l++) {
        for (uint32_t i = 0; i < n; i++)
            content_row(1, i, l, rows + ((size_t)l * n + i) * LIVE_D_QK, LIVE_D_QK);
    }
    EXPECT(dsa_sequence_create(client, NULL, &id, &err), DSA_OK, &err);
    append.sequence = id;
    append.rows = (struct dsa_tensor){
        .dtype = DSA_DTYPE_BF16, .rank = 3, .shape = {LIVE_LAYERS, n, LIVE_D_QK}, .data = rows};
    EXPECT(dsa_append(client, &append, NULL, &err), DSA_OK, &err);
    free(rows);
    return id;
}

void small_init(struct small *small, uint64_t sequence, uint32_t heads, uint32_t topk)
{
    struct ref64_rng rng = ref64_rng_init(2);

    memset(small, 0, sizeof(*small));
    small->heads = heads;
    small->topk = topk;
    small->q = malloc((size_t)heads * LIVE_D_QK * 2);
    small->out = calloc((size_t)heads * LIVE_D_V, 2);
    small->indices = malloc(topk * sizeof(int32_t));
    small->lse = calloc(heads, sizeof(float));
    content_fill(&rng, small->q, (size_t)heads * LIVE_D_QK);
    for (uint32_t i = 0; i < topk; i++)
        small->indices[i] = (int32_t)i;
    small->segment = (struct dsa_segment){sequence, 1};
    small->attend = (struct dsa_attend){
        .n_segments = 1,
        .segments = &small->segment,
        .q = {.dtype = DSA_DTYPE_BF16, .rank = 3, .shape = {1, heads, LIVE_D_QK}, .data = small->q},
        .indices = {.dtype = DSA_DTYPE_I32, .rank = 2, .shape = {1, topk}, .data = small->indices},
        .space = DSA_SPACE_LOGICAL,
        .softmax_scale = 1 / sqrtf(LIVE_D_QK),
        .out = {.data = small->out},
        .want_lse = true,
        .lse = {.data = small->lse},
    };
}

void small_fini(struct small *small)
{
    free(small->q);
    free(small->out);
    free(small->indices);
    free(small->lse);
}

void small_check(const struct small *small, uint32_t n_tokens)
{
    const struct ref64_layout *layout = ref64_layout_by_name("scaled_512_64");
    uint8_t *rows = malloc((size_t)n_tokens * (size_t)layout->row_bytes);
    uint16_t values[LIVE_D_QK];
    struct check_rows check = {
        .layout = layout,
        .rows = rows,
        .n_tokens = n_tokens,
        .n_rows = 1,
        .heads = small->heads,
        .topk = small->topk,
        .q = small->q,
        .indices = small->indices,
        .softmax_scale = small->attend.softmax_scale,
        .out = small->out,
        .out_dtype = DSA_DTYPE_BF16,
        .lse = small->lse,
    };
    uint64_t n_invalid = 0;
    char text[256] = "no memory";

    for (uint32_t i = 0; i < n_tokens; i++) {
        content_row(1, i, small->attend.layer, values, LIVE_D_QK);
        ref64_quantise_row(layout, REF64_RULE_POW2, 1, values, rows + (size_t)i * (size_t)layout->row_bytes);
    }
    ck_assert_msg(check_attend(&check, &n_invalid, text, sizeof(text)) == 1, "%s", text);
    free(rows);
}
