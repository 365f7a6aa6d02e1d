#include "server/security.h"

#include <errno.h>
#include <grp.h>
#include <inttypes.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/access.h"
#include "server/config.h"
#include "server/log.h"
#include "server/rpc.h"
#include "server/tls.h"
#include "server/tls_relay.h"

/* ---- socket-owner: user, user:group or :group, by name or number ------------------------------------ */

static bool parse_id(const char *text, uint32_t *id_p)
{
    char *end;
    unsigned long n;

    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    n = strtoul(text, &end, 10);
    if (errno != 0 || *end != '\0' || n >= UINT32_MAX) /* the last one means "leave it" */
        return false;
    *id_p = (uint32_t)n;
    return true;
}

static dsa_status parse_owner(struct srv_security *security, const char *text, struct srv_err *err)
{
    char user[64];
    const char *colon = strchr(text, ':'), *group = colon ? colon + 1 : "";
    size_t n = colon ? (size_t)(colon - text) : strlen(text);
    struct passwd *passwd;
    struct group *entry;

    snprintf(user, sizeof(user), "%.*s", (int)n, text);
    if ((colon && group[0] == '\0') || (n == 0 && !colon && text[0] != '\0'))
        return srv_fail(err, DSA_E_BAD_REQUEST, "socket-owner", "%s", text,
                        "write user, user:group or :group");
    if (n > 0 && !parse_id(user, &security->owner.uid)) {
        if (!(passwd = getpwnam(user)))
            return srv_fail(err, DSA_E_BAD_REQUEST, "socket-owner", "%s", text, "no such user");
        security->owner.uid = passwd->pw_uid;
    }
    if (group[0] != '\0' && !parse_id(group, &security->owner.gid)) {
        if (!(entry = getgrnam(group)))
            return srv_fail(err, DSA_E_BAD_REQUEST, "socket-owner", "%s", text, "no such group");
        security->owner.gid = entry->gr_gid;
    }
    return DSA_OK;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static dsa_status init_tls(struct srv_security *security, const struct srv_config *config,
                           struct srv_err *err)
{
    struct srv_tls_files files = {config->tls_cert, config->tls_key, config->tls_client_ca};

    if (config->tls_cert[0] == '\0' && config->tls_key[0] == '\0' && config->tls_client_ca[0] == '\0')
        return DSA_OK;
    if (config->tls_cert[0] == '\0')
        return srv_fail(err, DSA_E_BAD_REQUEST, "tls-cert", "%s", "", "%s needs it",
                        config->tls_key[0] != '\0' ? "tls-key" : "tls-client-ca");
    if (config->tls_key[0] == '\0')
        return srv_fail(err, DSA_E_BAD_REQUEST, "tls-key", "%s", "", "tls-cert needs it");
    return srv_tls_create(&files, &security->tls, err);
}

static dsa_status init_access(struct srv_security *security, const struct srv_config *config,
                              struct srv_err *err)
{
    struct srv_access_config access = {config->auth_token_file, strcmp(config->admin, "any") == 0};

    if (!access.admin_anywhere && strcmp(config->admin, "unix") != 0)
        return srv_fail(err, DSA_E_BAD_REQUEST, "admin", "%s", config->admin, "give unix or any");
    return srv_access_create(&access, &security->access, err);
}

dsa_status srv_security_init(struct srv_security *security, const struct srv_config *config,
                             struct srv_err *err)
{
    dsa_status rc;

    memset(security, 0, sizeof(*security));
    security->owner.uid = (uid_t)-1;
    security->owner.gid = (gid_t)-1;
    if ((rc = parse_owner(security, config->socket_owner, err)) != DSA_OK
        || (rc = init_access(security, config, err)) != DSA_OK
        || (rc = init_tls(security, config, err)) != DSA_OK)
        srv_security_fini(security);
    return rc;
}

static void add_encrypted(void *arg, int fd)
{
    rpc_add_fd(((struct srv_security *)arg)->rpc, fd, RPC_ORIGIN_TLS);
}

dsa_status srv_security_start(struct srv_security *security, const struct srv_config *config,
                              struct srv_loop *loop, struct rpc *rpc, struct srv_err *err)
{
    struct srv_tls_relay_config relay = {
        .tls = security->tls,
        .handshake_timeout_us = config->tls_handshake_timeout_us,
        .reload_us = config->tls_reload_us,
        .ready = add_encrypted,
        .arg = security,
    };

    security->rpc = rpc;
    return security->tls ? srv_tls_relay_start(loop, &relay, &security->relay, err) : DSA_OK;
}

void srv_security_accept(void *arg, int fd)
{
    struct srv_security *security = arg;

    if (security->relay)
        srv_tls_relay_accept(security->relay, fd);
    else
        rpc_add_fd(security->rpc, fd, RPC_ORIGIN_TCP);
}

dsa_status srv_security_admit(struct srv_security *security, struct rpc_call *call)
{
    return srv_access_admit(security->access, call);
}

static void log_failure(const char *what, const struct srv_err *err)
{
    srv_log(SRV_LOG_WARN, "%s not reloaded, what was in use stays setting=%s file=%s reason=\"%s\"", what,
            err->field, err->value, err->text);
}

unsigned srv_security_reload(struct srv_security *security, struct srv_err *err)
{
    struct srv_err tls_err = {0}, token_err = {0};
    unsigned n_failed = 0;

    if (security->tls && srv_tls_reload(security->tls, &tls_err) != DSA_OK) {
        log_failure("certificate", &tls_err);
        n_failed++;
    } else if (security->tls) {
        srv_log(SRV_LOG_INFO, "certificate reloaded expires_s=%" PRId64, srv_tls_expiry_s(security->tls));
    }
    if (srv_access_reload(security->access, &token_err) != DSA_OK) {
        log_failure("tokens", &token_err);
        n_failed++;
    }
    if (err && n_failed > 0)
        *err = tls_err.code != DSA_OK ? tls_err : token_err;
    return n_failed;
}

void srv_security_drain(struct srv_security *security)
{
    srv_tls_relay_drain(security->relay);
}

void srv_security_stop(struct srv_security *security)
{
    srv_tls_relay_stop(security->relay);
    security->relay = NULL;
}

void srv_security_fini(struct srv_security *security)
{
    srv_access_destroy(security->access);
    srv_tls_destroy(security->tls);
    security->access = NULL;
    security->tls = NULL;
}
