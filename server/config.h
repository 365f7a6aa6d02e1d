/* config.h - every setting of dsad, in one table: name, type, default, bounds, unit, help. The table is what parses
 * flags and prints --help; other sources of the same keys read it too.
 * Flags: --name value or --name=value; booleans also --name and --no-name. */
#ifndef SERVER_CONFIG_H
#define SERVER_CONFIG_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "server/core/err.h"

#define SRV_MAX_OPTIONS 96

struct srv_config {
    /* where it listens */
    char listen[108];     /* "unix:/path", or "none" */
    char tcp[64];         /* "host:port", or "" */
    char fd_socket[108];  /* path; "" = the unix path with ".fd" appended */
    uint64_t socket_mode; /* octal permission bits of both sockets */
    uint64_t max_connections;
    char http[64];         /* "host:port" of probes and metrics over HTTP, or "" */
    char health[64];       /* "host:port" of gRPC health alone, or "" */
    char socket_owner[64]; /* "user", "user:group", ":group", names or numbers; "" = as they are made */
    /* security */
    char tls_cert[256]; /* paths; "" = TCP is plain text */
    char tls_key[256];
    char tls_client_ca[256]; /* "" = clients need no certificate */
    uint64_t tls_reload_us;  /* 0 = never */
    uint64_t tls_handshake_timeout_us;
    char auth_token_file[256]; /* "" = no token is wanted */
    char admin[8];             /* "unix" or "any" */
    /* what it serves */
    char device[16]; /* "cpu", "cuda" or "hip" */
    uint64_t device_ordinal;
    char layout[32];        /* name of the pool's layout */
    char decode_layout[32]; /* "" = layout; a pool has one layout, so another one is refused */
    uint64_t layers;
    uint64_t pool_pages; /* 0: from pool_bytes */
    uint64_t pool_bytes;
    char write_rule[16]; /* "pow2" or "plain" */
    double raw_scale;
    uint64_t context_parallel;
    char host_tier[16]; /* "memfd" or "none" */
    bool physical_indices;
    /* CPU device */
    uint64_t cpu_threads; /* 0 = all */
    char cpu_isa[16];     /* "auto", "generic", "avx2", "avx512", "avx512bf16" */
    /* limits */
    uint64_t max_message_bytes;
    uint64_t max_inline_bytes;
    uint64_t max_stream_bytes;
    uint64_t max_rows;
    uint64_t max_segments;
    uint64_t max_topk;
    uint64_t max_append_rows;
    uint64_t max_sessions;
    uint64_t max_regions;
    uint64_t max_region_bytes;
    uint64_t max_sequences;
    uint64_t max_sequence_tokens;
    uint64_t max_inflight;
    uint64_t max_queue;
    uint64_t max_queue_bytes;
    uint64_t max_streams;
    uint64_t chunk_rows;
    uint64_t batch_rows;
    /* times */
    uint64_t lease_us;
    uint64_t max_lease_us;
    uint64_t max_grace_us;
    uint64_t stall_timeout_us;
    uint64_t drain_grace_us;
    uint64_t watchdog_us; /* 0 = off */
    uint64_t spin_us;     /* the service thread polls this long after the last event before it sleeps */
    uint64_t worker_spin_us;
    uint64_t
        inline_flops; /* jobs up to this size may run on the service thread when the worker sleeps; 0 = never */
    /* process */
    char log_level[16];
    char log_format[8];       /* "text" or "json" */
    uint64_t slow_request_us; /* 0 = off */

    unsigned char sources[SRV_MAX_OPTIONS]; /* enum srv_config_source, in the table's order */
};

/* Where an option's value comes from. Later ones win: default, file, environment, flag. */
enum srv_config_source { SRV_SOURCE_DEFAULT, SRV_SOURCE_FILE, SRV_SOURCE_ENVIRONMENT, SRV_SOURCE_FLAG };

void srv_config_defaults(struct srv_config *config);

/* One option by its name (a flag without dashes, also the key in a file). DSA_E_BAD_REQUEST with field = the name and value =
 * what was given: unknown (the nearest is named), malformed, out of bounds. n: bytes of the name. */
SRV_MUST_CHECK dsa_status srv_config_set(struct srv_config *config, const char *name, size_t n,
                                         const char *value, enum srv_config_source source,
                                         struct srv_err *err);

/* Applies argv[1..argc). DSA_E_BAD_REQUEST with field = the flag and value = what was given: unknown flag (with the
 * nearest known one named), missing or malformed value, out of bounds. On success *action_p tells what main does. */
enum srv_config_action {
    SRV_CONFIG_RUN,
    SRV_CONFIG_HELP,
    SRV_CONFIG_VERSION,
    SRV_CONFIG_PRINT,
    SRV_CONFIG_CHECK
};
SRV_MUST_CHECK dsa_status srv_config_parse(struct srv_config *config, int argc, char **argv,
                                           enum srv_config_action *action_p, struct srv_err *err);

void srv_config_help(FILE *out);
/* name: value, one a line, as a file for --config has them; where a value is not the default a comment says whence. */
void srv_config_print(const struct srv_config *config, FILE *out);

/* An option whose value differs, and what becomes of it. The texts are the callee's during the call only. */
struct srv_config_change {
    const char *name, *old, *wanted;
    enum {
        SRV_CHANGE_MADE,
        SRV_CHANGE_AT_START,   /* only a restart changes it */
        SRV_CHANGE_ABOVE_START /* it can be changed, but not to more than it was at the start */
    } verdict;
};

/* Takes over from `fresh`, which has been checked like any configuration, what may change while dsad runs. start: what it
 * started with. Calls fn for each option whose value differs, before it is changed. */
void srv_config_take_over(struct srv_config *config, const struct srv_config *start,
                          const struct srv_config *fresh,
                          void (*fn)(void *arg, const struct srv_config_change *change), void *arg);

#endif /* SERVER_CONFIG_H */
