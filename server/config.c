#include "server/config.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum option_type { OPT_TEXT, OPT_UINT, OPT_BYTES, OPT_US, OPT_OCTAL, OPT_REAL, OPT_BOOL };

/* Whether SIGHUP can change it: not at all; at once; at once, but not above its value at the start, which something has been
 * sized by. */
enum option_change { AT_START, LIVE, LIVE_TO_START };

struct option_row {
    const char *
        name; /* flag without dashes, key of a file; in upper case with '_' for '-' after DSAD_ the variable */
    enum option_type type;
    size_t offset;
    size_t size;          /* OPT_TEXT: room with the terminator */
    const char *fallback; /* default, as text */
    uint64_t min, max;    /* numbers, in the field's own unit */
    const char *section;  /* heading in --help; NULL = as the row before */
    const char *help;
    enum option_change change;
};

#define ROW(type, name, field, size, fallback, min, max, section, help, change)                              \
    {                                                                                                        \
        name, type, offsetof(struct srv_config, field), size, fallback, min, max, section, help, change      \
    }
#define ROOM(field) sizeof(((struct srv_config *)0)->field)
#define TEXT(name, field, fallback, section, help)                                                           \
    ROW(OPT_TEXT, name, field, ROOM(field), fallback, 0, 0, section, help, AT_START)
#define NUMBER(type, name, field, fallback, min, max, section, help)                                         \
    ROW(type, name, field, 0, fallback, min, max, section, help, AT_START)
#define LIVE_TEXT(name, field, fallback, section, help)                                                      \
    ROW(OPT_TEXT, name, field, ROOM(field), fallback, 0, 0, section, help, LIVE)
#define LIVE_NUMBER(type, name, field, fallback, min, max, section, help)                                    \
    ROW(type, name, field, 0, fallback, min, max, section, help, LIVE)
#define LIVE_BELOW(type, name, field, fallback, min, max, section, help)                                     \
    ROW(type, name, field, 0, fallback, min, max, section, help, LIVE_TO_START)

static const struct option_row options[] = {
    TEXT("listen", listen, "unix:/run/dsad/dsad.sock", "Listening", "gRPC socket: unix:/path, or none"),
    TEXT("tcp", tcp, "", NULL, "gRPC on host:port as well; without tls-cert plain text: keep it on loopback"),
    TEXT("fd-socket", fd_socket, "", NULL,
         "socket that takes file descriptors (default: the unix path + .fd)"),
    NUMBER(OPT_OCTAL, "socket-mode", socket_mode, "0660", 0, 0777, NULL,
           "permission bits of both sockets, octal"),
    NUMBER(OPT_UINT, "max-connections", max_connections, "256", 1, 65536, NULL, "connections at a time"),
    TEXT("http", http, "", NULL, "plain HTTP on host:port: /startupz, /readyz, /livez, /metrics"),
    TEXT("health", health, "", NULL, "plain gRPC on host:port that answers grpc.health.v1 alone, for probes"),
    TEXT("socket-owner", socket_owner, "", NULL, "user:group of both sockets, names or numbers"),

    TEXT("tls-cert", tls_cert, "", "Security", "TLS on the TCP address: certificate and its chain, PEM"),
    TEXT("tls-key", tls_key, "", NULL, "its key, PEM without a password"),
    TEXT("tls-client-ca", tls_client_ca, "", NULL,
         "authorities of client certificates, PEM; when given, every client needs one"),
    NUMBER(OPT_US, "tls-reload", tls_reload_us, "60s", 0, UINT64_C(86400000000), NULL,
           "look at these files this often and use what is new (0: only on SIGHUP)"),
    NUMBER(OPT_US, "tls-handshake-timeout", tls_handshake_timeout_us, "10s", 1000, 600000000, NULL,
           "a client that has not finished its TLS handshake after this is dropped"),
    TEXT("auth-token-file", auth_token_file, "", NULL,
         "tokens, one a line: calls over TCP need `authorization: Bearer TOKEN` then"),
    TEXT("admin", admin, "unix", NULL, "where Drain is taken: unix, any"),

    TEXT("device", device, "cpu", "Serving", "device kind that holds the KV pool: cpu, cuda, hip"),
    NUMBER(OPT_UINT, "device-ordinal", device_ordinal, "0", 0, 63, NULL, "which device of its kind"),
    TEXT("layout", layout, "scaled_512_64", NULL,
         "row layout: scaled_512_64, scaled_512_0, scaled_256_0, bf16_576, bf16_512, bf16_256, raw_512_64"),
    TEXT("decode-layout", decode_layout, "", NULL,
         "row layout that decode expects (default: layout; must agree)"),
    NUMBER(OPT_UINT, "layers", layers, "1", 1, 1024, NULL, "layers of the model"),
    NUMBER(OPT_UINT, "pool-pages", pool_pages, "0", 0, 33554431, NULL,
           "pages of 64 tokens, each for every layer (0: from pool-bytes)"),
    NUMBER(OPT_BYTES, "pool-bytes", pool_bytes, "256MiB", 1, UINT64_MAX / 2, NULL, "size of the KV pool"),
    TEXT("write-rule", write_rule, "pow2", NULL, "scale rule when a request gives none: pow2, plain"),
    NUMBER(OPT_REAL, "raw-scale", raw_scale, "1", 0, 0, NULL, "raw_512_64: the pool's scale, > 0"),
    NUMBER(OPT_UINT, "context-parallel", context_parallel, "1", 1, 1024, NULL,
           "ranks a sequence is sharded over"),
    TEXT("host-tier", host_tier, "memfd", NULL, "client tensors in shared memory: memfd, none"),
    NUMBER(OPT_BOOL, "physical-indices", physical_indices, "false", 0, 1, NULL,
           "allow indices that are pool slots; clients must trust each other then"),
    NUMBER(OPT_UINT, "cpu-threads", cpu_threads, "0", 0, 1024, NULL, "threads of the CPU device (0: all)"),
    TEXT("cpu-isa", cpu_isa, "auto", NULL, "instruction set: auto, generic, avx2, avx512, avx512bf16"),

    LIVE_BELOW(OPT_BYTES, "max-message-bytes", max_message_bytes, "8MiB", 65536, 1u << 30, "Limits",
               "one gRPC message"),
    LIVE_NUMBER(OPT_BYTES, "max-inline-bytes", max_inline_bytes, "4MiB", 1024, 1u << 30, NULL,
                "one inline tensor"),
    LIVE_NUMBER(OPT_BYTES, "max-stream-bytes", max_stream_bytes, "64MiB", 65536, UINT64_C(1) << 36, NULL,
                "inline results not yet read by one stream's client"),
    LIVE_BELOW(OPT_UINT, "max-rows", max_rows, "16384", 1, 1u << 20, NULL, "query rows of one request"),
    LIVE_BELOW(OPT_UINT, "max-segments", max_segments, "256", 1, 4096, NULL, "segments of one request"),
    LIVE_BELOW(OPT_UINT, "max-topk", max_topk, "16384", 1, 1u << 20, NULL, "index width"),
    LIVE_BELOW(OPT_UINT, "max-append-rows", max_append_rows, "65536", 1, 1u << 24, NULL,
               "tokens times layers of one append"),
    LIVE_NUMBER(OPT_UINT, "max-sessions", max_sessions, "64", 1, 65536, NULL, "open sessions"),
    LIVE_NUMBER(OPT_UINT, "max-regions", max_regions, "256", 1, 65536, NULL, "regions of one session"),
    LIVE_NUMBER(OPT_BYTES, "max-region-bytes", max_region_bytes, "64GiB", 4096, UINT64_C(1) << 44, NULL,
                "one region"),
    NUMBER(OPT_UINT, "max-sequences", max_sequences, "4096", 1, 1u << 20, NULL, "sequences of one session"),
    NUMBER(OPT_UINT, "max-sequence-tokens", max_sequence_tokens, "1048576", 1, 1u << 30, NULL,
           "tokens of one sequence"),
    LIVE_NUMBER(OPT_UINT, "max-inflight", max_inflight, "256", 1, 65536, NULL,
                "unanswered requests of one stream"),
    LIVE_BELOW(OPT_UINT, "max-queue", max_queue, "4096", 1, 16384, NULL, "jobs waiting for one device"),
    LIVE_NUMBER(OPT_BYTES, "max-queue-bytes", max_queue_bytes, "1GiB", 1048576, UINT64_C(1) << 40, NULL,
                "memory of requests: their messages, and inline results until they are read"),
    NUMBER(OPT_UINT, "max-streams", max_streams, "256", 1, 65536, NULL, "concurrent calls of one connection"),
    NUMBER(OPT_UINT, "chunk-rows", chunk_rows, "0", 0, 65536, NULL,
           "rows of one piece of a long answer (0: 16 on the CPU, 64 on a GPU)"),
    NUMBER(OPT_UINT, "batch-rows", batch_rows, "0", 0, 65536, NULL,
           "rows that share one launch (0: 64 on the CPU, 256 on a GPU)"),

    LIVE_NUMBER(OPT_US, "lease", lease_us, "10s", 1000, UINT64_C(86400000000), "Times",
                "heartbeat interval granted when a client asks for none"),
    LIVE_NUMBER(OPT_US, "max-lease", max_lease_us, "60s", 1000, UINT64_C(86400000000), NULL,
                "longest lease granted"),
    LIVE_NUMBER(OPT_US, "max-grace", max_grace_us, "60s", 0, UINT64_C(86400000000), NULL,
                "longest time a session outlives its stream"),
    LIVE_NUMBER(OPT_US, "stall-timeout", stall_timeout_us, "30s", 1000, UINT64_C(86400000000), NULL,
                "a stream whose client does not read is ended after this"),
    LIVE_NUMBER(OPT_US, "drain-grace", drain_grace_us, "25s", 0, UINT64_C(86400000000), NULL,
                "time that running work gets after SIGTERM"),
    LIVE_NUMBER(
        OPT_US, "watchdog", watchdog_us, "10s", 0, UINT64_C(86400000000), NULL,
        "a worker that is at one launch for longer counts as stuck, and dsad as not ready (0: never)"),
    NUMBER(OPT_US, "spin", spin_us, "0us", 0, 1000000, NULL,
           "the service thread polls this long after the last event before it sleeps"),
    NUMBER(OPT_US, "worker-spin", worker_spin_us, "0us", 0, 1000000, NULL, "the same for a worker"),
    LIVE_NUMBER(OPT_UINT, "inline-flops", inline_flops, "4000000", 0, UINT64_C(1000000000), NULL,
                "largest job that the service thread runs itself while the worker sleeps (CPU device)"),

    LIVE_TEXT("log-level", log_level, "info", "Process", "error, warn, info, debug, trace"),
    LIVE_TEXT("log-format", log_format, "text", NULL, "lines for people or for a collector: text, json"),
    LIVE_NUMBER(OPT_US, "slow-request", slow_request_us, "1s", 0, UINT64_C(86400000000), NULL,
                "a request that takes longer leaves a line in the log (0: none does)"),
};

#define N_OPTIONS (sizeof(options) / sizeof(options[0]))
_Static_assert(N_OPTIONS <= SRV_MAX_OPTIONS, "room for each option's source");

struct unit {
    const char *suffix;
    uint64_t factor;
};
static const struct unit byte_units[] = {{"KiB", 1u << 10}, {"MiB", 1u << 20}, {"GiB", 1u << 30},
                                         {"K", 1u << 10},   {"M", 1u << 20},   {"G", 1u << 30},
                                         {"B", 1},          {"", 1},           {NULL, 0}};
static const struct unit time_units[] = {{"us", 1}, {"ms", 1000}, {"s", 1000000}, {"m", 60000000}, {NULL, 0}};
static const struct unit no_units[] = {{"", 1}, {NULL, 0}};

/* "12MiB" with the units of the type. False: not a number, unknown unit, or beyond 64 bits. */
static bool parse_uint(const char *text, const struct unit *units, int base, uint64_t *value_p)
{
    char *end;
    unsigned long long n;

    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    n = strtoull(text, &end, base);
    if (errno != 0)
        return false;
    for (; units->suffix; units++) {
        if (strcmp(end, units->suffix) != 0)
            continue;
        if (n > UINT64_MAX / units->factor)
            return false;
        *value_p = n * units->factor;
        return true;
    }
    return false;
}

static dsa_status set_number(struct srv_config *config, const struct option_row *row, const char *text,
                             struct srv_err *err)
{
    const struct unit *units = row->type == OPT_BYTES ? byte_units
                               : row->type == OPT_US  ? time_units
                                                      : no_units;
    uint64_t value;

    if (!parse_uint(text, units, row->type == OPT_OCTAL ? 8 : 10, &value))
        return srv_fail(err, DSA_E_BAD_REQUEST, row->name, "%s", text, "%s",
                        row->type == OPT_BYTES ? "not a size; write 64MiB, 1GiB or plain bytes"
                        : row->type == OPT_US  ? "not a time; write 500us, 20ms, 10s or 2m"
                                               : "not a whole number");
    if (value < row->min || value > row->max)
        return srv_fail(err, DSA_E_BAD_REQUEST, row->name, "%s", text, "must be %" PRIu64 " to %" PRIu64,
                        row->min, row->max);
    memcpy((char *)config + row->offset, &value, sizeof(value));
    return DSA_OK;
}

static dsa_status set_option(struct srv_config *config, const struct option_row *row, const char *text,
                             struct srv_err *err)
{
    char *field = (char *)config + row->offset;
    char *end;
    double real;
    bool flag;

    switch (row->type) {
    case OPT_TEXT:
        if (strlen(text) >= row->size)
            return srv_fail(err, DSA_E_BAD_REQUEST, row->name, "%s", text, "longer than %zu bytes",
                            row->size - 1);
        for (const char *at = text; *at; at++)
            if ((unsigned char)*at < ' ' || *at == 0x7f)
                return srv_fail(err, DSA_E_BAD_REQUEST, row->name, "%s", text,
                                "has a control character, at byte %zu", (size_t)(at - text));
        strcpy(field, text);
        return DSA_OK;
    case OPT_REAL:
        real = strtod(text, &end);
        if (end == text || *end != '\0' || !isfinite(real) || real <= 0)
            return srv_fail(err, DSA_E_BAD_REQUEST, row->name, "%s", text, "must be a number above 0");
        memcpy(field, &real, sizeof(real));
        return DSA_OK;
    case OPT_BOOL:
        flag = strcmp(text, "true") == 0;
        if (!flag && strcmp(text, "false") != 0)
            return srv_fail(err, DSA_E_BAD_REQUEST, row->name, "%s", text, "must be true or false");
        memcpy(field, &flag, sizeof(flag));
        return DSA_OK;
    case OPT_UINT:
    case OPT_BYTES:
    case OPT_US:
    case OPT_OCTAL:
        return set_number(config, row, text, err);
    }
    return DSA_E_INTERNAL;
}

void srv_config_defaults(struct srv_config *config)
{
    memset(config, 0, sizeof(*config));
    for (size_t i = 0; i < N_OPTIONS; i++)
        SRV_ASSERT(set_option(config, &options[i], options[i].fallback, NULL) == DSA_OK);
}

static const struct option_row *find_option(const char *name, size_t n)
{
    for (size_t i = 0; i < N_OPTIONS; i++)
        if (strlen(options[i].name) == n && strncmp(options[i].name, name, n) == 0)
            return &options[i];
    return NULL;
}

/* Edit distance, for "did you mean". Names are short. */
static size_t distance(const char *a, size_t n_a, const char *b)
{
    size_t n_b = strlen(b), row[64];

    if (n_b >= 63 || n_a >= 63)
        return 64;
    for (size_t j = 0; j <= n_b; j++)
        row[j] = j;
    for (size_t i = 1; i <= n_a; i++) {
        size_t diagonal = row[0];

        row[0] = i;
        for (size_t j = 1; j <= n_b; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);

            diagonal = row[j];
            best = row[j] + 1 < best ? row[j] + 1 : best;
            row[j] = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
        }
    }
    return row[n_b];
}

static const char *nearest_option(const char *name, size_t n)
{
    const char *best = "help";
    size_t best_distance = distance(name, n, best);

    for (size_t i = 0; i < N_OPTIONS; i++) {
        size_t d = distance(name, n, options[i].name);

        if (d < best_distance) {
            best_distance = d;
            best = options[i].name;
        }
    }
    return best;
}

static bool find_action(const char *name, enum srv_config_action *action_p)
{
    static const struct {
        const char *name;
        enum srv_config_action action;
    } actions[] = {{"help", SRV_CONFIG_HELP},
                   {"version", SRV_CONFIG_VERSION},
                   {"print-config", SRV_CONFIG_PRINT},
                   {"check-config", SRV_CONFIG_CHECK}};

    for (size_t i = 0; i < sizeof(actions) / sizeof(actions[0]); i++)
        if (strcmp(name, actions[i].name) == 0) {
            *action_p = actions[i].action;
            return true;
        }
    return false;
}

dsa_status srv_config_set(struct srv_config *config, const char *name, size_t n, const char *value,
                          enum srv_config_source source, struct srv_err *err)
{
    const struct option_row *row = find_option(name, n);
    dsa_status rc;
    char text[64];

    if (!row) {
        snprintf(text, sizeof(text), "%.*s", (int)n, name);
        return srv_fail(err, DSA_E_BAD_REQUEST, text, "%s", value, "unknown; the nearest is %s",
                        nearest_option(name, n));
    }
    rc = set_option(config, row, value, err);
    if (rc == DSA_OK)
        config->sources[row - options] = (unsigned char)source;
    return rc;
}

dsa_status srv_config_parse(struct srv_config *config, int argc, char **argv,
                            enum srv_config_action *action_p, struct srv_err *err)
{
    enum srv_config_action action = SRV_CONFIG_RUN;

    for (int i = 1; i < argc; i++) {
        const char *name = argv[i] + 2, *value;
        const struct option_row *row;
        bool is_no;
        dsa_status rc;
        size_t n;

        if (strncmp(argv[i], "--", 2) != 0)
            return srv_fail(err, DSA_E_BAD_REQUEST, "argument", "%s", argv[i],
                            "flags start with --; see --help");
        n = strcspn(name, "=");
        if (find_action(name, &action))
            continue;
        if (n == strlen("config")
            && strncmp(name, "config", n) == 0) { /* srv_config_file_name has taken it */
            i += name[n] != '=';
            continue;
        }
        row = find_option(name, n);
        is_no = !row && strncmp(name, "no-", 3) == 0 && (row = find_option(name + 3, n - 3)) != NULL
                && row->type == OPT_BOOL;
        if (!row || (strncmp(name, "no-", 3) == 0 && !is_no))
            return srv_fail(err, DSA_E_BAD_REQUEST, "flag", "%s", argv[i], "unknown; the nearest is --%s",
                            nearest_option(name, n));
        if (is_no && name[n] == '=')
            return srv_fail(err, DSA_E_BAD_REQUEST, row->name, "%s", name + n + 1, "--no-%s takes no value",
                            row->name);
        if (is_no)
            value = "false";
        else if (name[n] == '=')
            value = name + n + 1;
        else if (row->type == OPT_BOOL)
            value = "true";
        else if (i + 1 < argc)
            value = argv[++i];
        else
            return srv_fail(err, DSA_E_BAD_REQUEST, row->name, "%s", "", "needs a value");
        rc = srv_config_set(config, row->name, strlen(row->name), value, SRV_SOURCE_FLAG, err);
        if (rc != DSA_OK)
            return rc;
    }
    *action_p = action;
    return DSA_OK;
}

void srv_config_help(FILE *out)
{
    fprintf(out,
            "dsad - sparse attention over a quantised KV pool, served by gRPC\n\n"
            "usage: dsad [--config FILE] [--flag value]...\n\n"
            "Each option is a flag, a variable (DSAD_LOG_LEVEL for --log-level) and a key of a YAML "
            "file (log-level: info).\n"
            "Flags win over variables, variables over the file, which --config or DSAD_CONFIG names.\n"
            "SIGHUP reads everything again: * takes effect at once, ** too, up to its value at the start.\n\n"
            "  --help, --version\n"
            "  --check-config        say whether the configuration is sound, and end\n"
            "  --print-config        print it with where each value comes from, and end\n");
    for (size_t i = 0; i < N_OPTIONS; i++) {
        if (options[i].section)
            fprintf(out, "\n%s\n", options[i].section);
        fprintf(out, "  --%-21s %s%s [%s]\n", options[i].name, options[i].help,
                options[i].change == LIVE            ? " *"
                : options[i].change == LIVE_TO_START ? " **"
                                                     : "",
                options[i].fallback[0] != '\0' ? options[i].fallback : "none");
    }
}

#define MAX_SHOWN                                                                                            \
    (2 * sizeof(((struct srv_config *)0)->tls_cert)                                                          \
     + 8) /* the longest text, every byte of it doubled, and quotes */

/* Text that a YAML reader would take for something else goes between quotes. text: room for the longest, doubled. */
static const char *quoted(const char *field, char *text)
{
    char *at = text;

    if (field[0] == '\0' || (!strpbrk(field, ":#'\"{}[],&*!|>%@` ") && field[0] != '-' && field[0] != '?'))
        return field;
    if (!strstr(field, ": ") && !strstr(field, " #") && !strpbrk(field, "'\"{}[],&*!|>%@` ")
        && field[0] != ':' && field[0] != '#' && field[strlen(field) - 1] != ':')
        return field;
    *at++ = '\'';
    for (; *field; field++) {
        if (*field == '\'')
            *at++ = '\'';
        *at++ = *field;
    }
    *at++ = '\'';
    *at = '\0';
    return text;
}

/* The value as a file would have it. text: MAX_SHOWN bytes. */
static const char *show(const struct srv_config *config, const struct option_row *row, char *text)
{
    const char *field = (const char *)config + row->offset;
    uint64_t number;
    double real;

    switch (row->type) {
    case OPT_TEXT:
        return quoted(field, text);
    case OPT_REAL:
        memcpy(&real, field, sizeof(real));
        snprintf(text, MAX_SHOWN, "%.9g", real);
        break;
    case OPT_BOOL:
        return *(const bool *)field ? "true" : "false";
    case OPT_UINT:
    case OPT_BYTES:
    case OPT_US:
    case OPT_OCTAL:
        memcpy(&number, field, sizeof(number));
        snprintf(text, MAX_SHOWN, row->type == OPT_OCTAL ? "%04" PRIo64 : "%" PRIu64 "%s", number,
                 row->type == OPT_US ? "us" : "");
        break;
    }
    return text;
}

void srv_config_print(const struct srv_config *config, FILE *out)
{
    static const char *const origins[] = {"", "  # file", "  # environment", "  # flag"};
    char text[MAX_SHOWN];

    for (size_t i = 0; i < N_OPTIONS; i++)
        fprintf(out, "%s: %s%s\n", options[i].name, show(config, &options[i], text),
                origins[config->sources[i]]);
}

/* ---- a new configuration for a server that runs ---------------------------------------------------- */

static size_t option_bytes(const struct option_row *row)
{
    switch (row->type) {
    case OPT_TEXT:
        return row->size;
    case OPT_REAL:
        return sizeof(double);
    case OPT_BOOL:
        return sizeof(bool);
    case OPT_UINT:
    case OPT_BYTES:
    case OPT_US:
    case OPT_OCTAL:
        break;
    }
    return sizeof(uint64_t);
}

static bool is_same(const struct srv_config *a, const struct srv_config *b, const struct option_row *row)
{
    const char *x = (const char *)a + row->offset, *y = (const char *)b + row->offset;

    return row->type == OPT_TEXT ? strcmp(x, y) == 0 : memcmp(x, y, option_bytes(row)) == 0;
}

static bool is_above(const struct srv_config *config, const struct srv_config *start,
                     const struct option_row *row)
{
    uint64_t value, limit;

    memcpy(&value, (const char *)config + row->offset, sizeof(value));
    memcpy(&limit, (const char *)start + row->offset, sizeof(limit));
    return value > limit;
}

void srv_config_take_over(struct srv_config *config, const struct srv_config *start,
                          const struct srv_config *fresh,
                          void (*fn)(void *arg, const struct srv_config_change *change), void *arg)
{
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const struct option_row *row = &options[i];
        char old[MAX_SHOWN], wanted[MAX_SHOWN];
        struct srv_config_change change = {.name = row->name};

        if (is_same(config, fresh, row)) {
            config->sources[i] = fresh->sources[i];
            continue;
        }
        change.old = show(config, row, old);
        change.wanted = show(fresh, row, wanted);
        if (row->change == AT_START)
            change.verdict = SRV_CHANGE_AT_START;
        else if (row->change == LIVE_TO_START && is_above(fresh, start, row))
            change.verdict = SRV_CHANGE_ABOVE_START;
        else
            change.verdict = SRV_CHANGE_MADE;
        fn(arg, &change); /* while the old value is there to be shown */
        if (change.verdict != SRV_CHANGE_MADE)
            continue;
        memcpy((char *)config + row->offset, (const char *)fresh + row->offset, option_bytes(row));
        config->sources[i] = fresh->sources[i];
    }
}
