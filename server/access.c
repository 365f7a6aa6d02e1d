#include "server/access.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/log.h"
#include "server/wire.h"

#define MAX_TOKENS     64
#define MIN_TOKEN      16 /* bytes; shorter ones can be guessed */
#define MAX_TOKEN      512
#define MAX_FILE_BYTES (MAX_TOKENS * (MAX_TOKEN + 2))
#define SCHEME         "bearer "
#define TOKEN_CHARS    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~+/="

static const char flag[] = "auth-token-file";

/* Digests: all have one length, and comparing them tells nothing of a token, neither by time nor from memory. */
struct tokens {
    uint8_t digests[MAX_TOKENS][SHA256_DIGEST_LENGTH];
    size_t n;
};

struct srv_access {
    char *token_file; /* NULL: no token is wanted */
    bool admin_anywhere;
    struct tokens tokens;
    uint64_t n_refused[SRV_ACCESS_N_REASONS];
};

/* ---- the file ------------------------------------------------------------------------------------- */

static dsa_status add_token(struct tokens *tokens, const char *line, size_t n, unsigned number,
                            const char *path, struct srv_err *err)
{
    if (strspn(line, TOKEN_CHARS) < n)
        return srv_fail(err, DSA_E_BAD_REQUEST, flag, "%s", path,
                        "line %u: a token has letters, digits and -._~+/= alone", number);
    if (n < MIN_TOKEN || n > MAX_TOKEN)
        return srv_fail(err, DSA_E_BAD_REQUEST, flag, "%s", path, "line %u: a token has %d to %d characters",
                        number, MIN_TOKEN, MAX_TOKEN);
    if (tokens->n == MAX_TOKENS)
        return srv_fail(err, DSA_E_BAD_REQUEST, flag, "%s", path, "more than %d tokens", MAX_TOKENS);
    SHA256((const unsigned char *)line, n, tokens->digests[tokens->n++]);
    return DSA_OK;
}

static dsa_status parse(struct tokens *tokens, char *text, const char *path, struct srv_err *err)
{
    unsigned number = 1;
    dsa_status rc = DSA_OK;

    for (char *line = text, *end; *line && rc == DSA_OK; line = end, number++) {
        size_t n = strcspn(line, "\n");

        end = line + n + (line[n] == '\n');
        while (n > 0 && strchr(" \t\r", line[n - 1]))
            n--;
        line[n] = '\0';
        if (n > 0)
            rc = add_token(tokens, line, n, number, path, err);
    }
    if (rc == DSA_OK && tokens->n == 0)
        rc = srv_fail(err, DSA_E_BAD_REQUEST, flag, "%s", path, "no token in it; write one a line");
    return rc;
}

static dsa_status read_text(const char *path, char *text, struct srv_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    size_t n = 0;
    ssize_t got;
    struct stat st;

    if (fd < 0 || fstat(fd, &st) != 0) {
        srv_fail(err, DSA_E_BAD_REQUEST, flag, "%s", path, "cannot be read: %s", strerror(errno));
        if (fd >= 0)
            close(fd);
        return DSA_E_BAD_REQUEST;
    }
    if (!S_ISREG(st.st_mode) || (st.st_mode & S_IROTH) != 0 || (st.st_mode & S_IWOTH) != 0) {
        close(fd);
        return srv_fail(err, DSA_E_BAD_REQUEST, flag, "%s", path,
                        S_ISREG(st.st_mode)
                            ? "every user can read or write it (mode %03o); take that right away"
                            : "not a file (mode %03o)",
                        (unsigned)st.st_mode & 0777);
    }
    while (n <= MAX_FILE_BYTES && (got = read(fd, text + n, MAX_FILE_BYTES + 1 - n)) > 0)
        n += (size_t)got;
    close(fd);
    text[n <= MAX_FILE_BYTES ? n : 0] = '\0';
    return n <= MAX_FILE_BYTES
               ? DSA_OK
               : srv_fail(err, DSA_E_BAD_REQUEST, flag, "%s", path, "more than %d bytes", MAX_FILE_BYTES);
}

dsa_status srv_access_reload(struct srv_access *access, struct srv_err *err)
{
    struct tokens tokens = {.n = 0};
    char *text;
    dsa_status rc;

    if (!access->token_file)
        return DSA_OK;
    text = malloc(MAX_FILE_BYTES + 2);
    if (!text)
        return srv_fail(err, DSA_E_NO_MEMORY, flag, "%s", access->token_file, "no memory");
    rc = read_text(access->token_file, text, err);
    if (rc == DSA_OK)
        rc = parse(&tokens, text, access->token_file, err);
    OPENSSL_cleanse(text, MAX_FILE_BYTES + 2);
    free(text);
    if (rc == DSA_OK)
        access->tokens = tokens;
    return rc;
}

/* ---- deciding --------------------------------------------------------------------------------------- */

static bool starts_with(const char *text, const char *start)
{
    return strncmp(text, start, strlen(start)) == 0;
}

/* Looks at every token, whichever fits. */
static bool is_known(const struct tokens *tokens, const char *token, size_t n)
{
    uint8_t digest[SHA256_DIGEST_LENGTH];
    int n_equal = 0;

    SHA256((const unsigned char *)token, n, digest);
    for (size_t i = 0; i < tokens->n; i++)
        n_equal += CRYPTO_memcmp(digest, tokens->digests[i], sizeof(digest)) == 0;
    return n_equal > 0;
}

static enum srv_access_reason check_token(const struct srv_access *access, const char *authorization,
                                          size_t n)
{
    size_t n_scheme = strlen(SCHEME);

    if (!access->token_file)
        return SRV_ACCESS_OK;
    if (!authorization)
        return SRV_ACCESS_NO_TOKEN;
    if (n < n_scheme || strncasecmp(authorization, SCHEME, n_scheme) != 0)
        return SRV_ACCESS_BAD_TOKEN;
    return is_known(&access->tokens, authorization + n_scheme, n - n_scheme) ? SRV_ACCESS_OK
                                                                             : SRV_ACCESS_BAD_TOKEN;
}

enum srv_access_reason srv_access_decide(const struct srv_access *access, enum rpc_origin origin,
                                         const char *path, const char *authorization, size_t n)
{
    bool is_health = starts_with(path, "/grpc.health.v1.");
    bool is_admin = strcmp(path, "/dsa.v1.SparseAttention/Drain") == 0;
    enum srv_access_reason reason;

    if (origin == RPC_ORIGIN_HEALTH)
        return is_health ? SRV_ACCESS_OK : SRV_ACCESS_HEALTH_PORT;
    if (origin == RPC_ORIGIN_UNIX || is_health || starts_with(path, "/grpc.reflection."))
        return SRV_ACCESS_OK;
    reason = check_token(access, authorization, n);
    if (reason == SRV_ACCESS_OK && is_admin && !access->admin_anywhere)
        return SRV_ACCESS_ADMIN;
    return reason;
}

static dsa_status describe(enum srv_access_reason reason, struct srv_err *err)
{
    switch (reason) {
    case SRV_ACCESS_NO_TOKEN:
        return srv_fail(err, DSA_E_UNAUTHENTICATED, "authorization", "%s", "",
                        "this connection needs a token: authorization: Bearer TOKEN");
    case SRV_ACCESS_BAD_TOKEN: /* the value is not repeated: it may be a token for somebody else */
        return srv_fail(err, DSA_E_UNAUTHENTICATED, "authorization", "%s", "", "the token is not known here");
    case SRV_ACCESS_ADMIN:
        return srv_fail(err, DSA_E_ACCESS, "", "%s", "",
                        "only the unix socket takes admin methods (admin is unix)");
    case SRV_ACCESS_HEALTH_PORT:
        return srv_fail(err, DSA_E_ACCESS, "", "%s", "", "this port answers grpc.health.v1 alone");
    case SRV_ACCESS_OK:
    case SRV_ACCESS_N_REASONS:
        break;
    }
    return DSA_OK;
}

dsa_status srv_access_admit(struct srv_access *access, struct rpc_call *call)
{
    size_t n = 0;
    const char *authorization = rpc_call_header(call, "authorization", &n);
    struct srv_err err = {0};
    enum srv_access_reason reason =
        srv_access_decide(access, rpc_call_origin(call), rpc_call_path(call), authorization, n);

    if (describe(reason, &err) == DSA_OK)
        return DSA_OK;
    access->n_refused[reason]++;
    srv_log(SRV_LOG_DEBUG, "call refused at the door method=%s reason=%s call_id=%" PRIu64 " trace_id=%s",
            rpc_call_path(call), srv_access_reason_name(reason), rpc_call_number(call),
            srv_trace_id(rpc_call_trace(call)));
    wire_fail(call, &err);
    return err.code;
}

/* ---- life --------------------------------------------------------------------------------------------- */

dsa_status srv_access_create(const struct srv_access_config *config, struct srv_access **access_p,
                             struct srv_err *err)
{
    struct srv_access *access = calloc(1, sizeof(*access));
    bool has_file = config->token_file && config->token_file[0] != '\0';
    dsa_status rc;

    if (access && has_file)
        access->token_file = strdup(config->token_file);
    if (!access || (has_file && !access->token_file)) {
        free(access);
        return srv_fail(err, DSA_E_NO_MEMORY, flag, "%s", "", "no memory");
    }
    access->admin_anywhere = config->admin_anywhere;
    rc = srv_access_reload(access, err);
    if (rc == DSA_OK)
        *access_p = access;
    else
        srv_access_destroy(access);
    return rc;
}

void srv_access_destroy(struct srv_access *access)
{
    if (!access)
        return;
    free(access->token_file);
    free(access);
}

const char *srv_access_reason_name(enum srv_access_reason reason)
{
    switch (reason) {
    case SRV_ACCESS_NO_TOKEN:
        return "no_token";
    case SRV_ACCESS_BAD_TOKEN:
        return "bad_token";
    case SRV_ACCESS_ADMIN:
        return "admin";
    case SRV_ACCESS_HEALTH_PORT:
        return "health_port";
    case SRV_ACCESS_OK:
    case SRV_ACCESS_N_REASONS:
        break;
    }
    return "ok";
}

uint64_t srv_access_refusals(const struct srv_access *access, enum srv_access_reason reason)
{
    return access->n_refused[reason];
}
