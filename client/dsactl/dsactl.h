/* dsactl.h - what the commands of dsactl share: the command table, exit codes, connecting, and tensors that
 * live in shared memory or in this process, as --transport says. One thread. */
#ifndef DSACTL_DSACTL_H
#define DSACTL_DSACTL_H

#include "client/dsa.h"
#include "client/dsactl/args.h"
#include "ref64.h"

enum exit_code {
    EXIT_OK = 0,
    EXIT_MISMATCH = 1, /* a comparison, a request or the command itself failed */
    EXIT_USAGE = 2,
    EXIT_CONNECT = 3,
};

struct command {
    const char *name;
    const char *summary;
    int (*run)(int argc, char **argv); /* argv[0] is the command's name; returns an exit code */
};

int cmd_attend(int argc, char **argv);
int cmd_drain(int argc, char **argv);
int cmd_info(int argc, char **argv);
int cmd_load(int argc, char **argv);
int cmd_replay(int argc, char **argv);
int cmd_verify(int argc, char **argv);
int cmd_wait(int argc, char **argv);

/* Flags that every command has. */
struct common {
    const char *target;
    uint64_t spin_us;
    uint64_t timeout_ms; /* to connect */
    bool is_tls;         /* also when one of the next four is given */
    const char *tls_ca, *tls_cert, *tls_key, *tls_name;
    const char *token_file;
};
#define COMMON_DEFAULTS                                                                                      \
    {                                                                                                        \
        default_target(), 0, 5000, false, "", "", "", "", ""                                                 \
    }
#define COMMON_ARGS(common)                                                                                   \
    {"target", ARG_TEXT, &(common).target, "ADDRESS", "server, unix:/path or host:port (or $DSA_TARGET)",     \
     0,        0},                                                                                            \
        {"spin-us", ARG_UINT, &(common).spin_us, "N", "poll this long before sleeping, for latency",          \
         0,         1000000},                                                                                 \
        {"tls", ARG_FLAG, &(common).is_tls, NULL, "speak TLS to host:port (implied by the next four)", 0, 0}, \
        {"tls-ca",                                                                                            \
         ARG_TEXT,                                                                                            \
         &(common).tls_ca,                                                                                    \
         "FILE",                                                                                              \
         "who signs the server's certificate; empty: the system's",                                           \
         0,                                                                                                   \
         0},                                                                                                  \
        {"tls-cert", ARG_TEXT, &(common).tls_cert, "FILE", "this client's certificate", 0, 0},                \
        {"tls-key", ARG_TEXT, &(common).tls_key, "FILE", "its key", 0, 0},                                    \
        {"tls-name",                                                                                          \
         ARG_TEXT,                                                                                            \
         &(common).tls_name,                                                                                  \
         "NAME",                                                                                              \
         "name in the server's certificate; empty: the host",                                                 \
         0,                                                                                                   \
         0},                                                                                                  \
        {"token-file",                                                                                        \
         ARG_TEXT,                                                                                            \
         &(common).token_file,                                                                                \
         "FILE",                                                                                              \
         "bearer token for every call: its first line",                                                       \
         0,                                                                                                   \
         0},                                                                                                  \
    {                                                                                                         \
        "connect-timeout-ms", ARG_UINT, &(common).timeout_ms, "N", "give up connecting after this", 1,        \
            3600000                                                                                           \
    }
const char *default_target(void);

/* Parses; on --help prints usage, text and flags. True: go on. False: return *exit_p. */
bool command_args(const char *name, const char *text, const struct arg *table, int argc, char **argv,
                  int *exit_p);

/* What dsa_connect gets of the common flags; tls_p is where options.tls points when TLS is wanted. */
struct dsa_options common_options(const struct common *common, struct dsa_tls *tls_p);

/* Connects with the common flags; prints why not. NULL on failure. */
struct dsa_client *command_connect(const struct common *common, bool want_session);

/* "dsactl: WHAT: REASON: message" to stderr. */
void print_error(const char *what, const struct dsa_error *err);

/* ---- memory for tensors ---------------------------------------------------------------------- */

/* A piece of memory that tensors are cut from: registered shared memory, or plain memory that travels
 * inline. */
struct block {
    uint8_t *data;
    uint64_t bytes, used;
    struct dsa_memory *memory; /* NULL = inline */
};

/* "memfd", "inline", or "auto": memfd where the server takes descriptors. False: printed why. */
bool transport_pick(const struct dsa_client *client, const char *transport, bool *is_shared_p);

dsa_status block_init(struct block *block, struct dsa_client *client, bool is_shared, uint64_t bytes,
                      struct dsa_error *err);
void block_fini(struct block *block);
/* The next `bytes`, 64-byte aligned. The block was made large enough: running out is a bug and aborts. */
void *block_take(struct block *block, uint64_t bytes);
/* Bytes that block_take uses up for `bytes`. */
uint64_t block_size(uint64_t bytes);

/* A dense tensor over memory that came from block_take. */
struct dsa_tensor block_tensor(const struct block *block, const void *at, enum dsa_dtype dtype, uint32_t rank,
                               uint64_t n0, uint64_t n1, uint64_t n2);
struct dsa_output block_output(const struct block *block, void *at, enum dsa_dtype dtype);

/* ---- the first pool -------------------------------------------------------------------------- */

/* The server's pool and its layout as the oracle knows it; prints why not. */
bool pool_pick(const struct dsa_client *client, const struct dsa_pool **pool_p,
               const struct ref64_layout **layout_p);
/* The oracle's number of the pool's write rule. */
int pool_rule(const struct dsa_pool *pool);

uint64_t clock_us(void); /* monotonic */

#endif /* DSACTL_DSACTL_H */
