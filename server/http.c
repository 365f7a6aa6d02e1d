#include "server/http.h"

#include <errno.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/address.h"
#include "server/clock.h"
#include "server/log.h"

#define MAX_CONNECTIONS 64
#define TIMEOUT_S       10
#define BACKLOG         64

struct srv_http {
    struct srv_http_config config;
    struct MHD_Daemon *daemon;
    int port;
};

/* ---- answers, on the thread of libmicrohttpd ------------------------------------------------------------ */

static enum MHD_Result answer(struct MHD_Connection *connection, unsigned code, const char *type, char *text,
                              size_t n, enum MHD_ResponseMemoryMode mode)
{
    struct MHD_Response *response = MHD_create_response_from_buffer(n, text, mode);
    enum MHD_Result rc;

    if (!response) {
        if (mode == MHD_RESPMEM_MUST_FREE)
            free(text);
        return MHD_NO;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    if (code == MHD_HTTP_METHOD_NOT_ALLOWED)
        MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    rc = MHD_queue_response(connection, code, response);
    MHD_destroy_response(response);
    return rc;
}

static enum MHD_Result answer_text(struct MHD_Connection *connection, unsigned code, const char *text)
{
    char line[128];
    int n = snprintf(line, sizeof(line), "%s\n", text);

    return answer(connection, code, "text/plain; charset=utf-8", line, (size_t)n, MHD_RESPMEM_MUST_COPY);
}

static enum MHD_Result answer_probe(const struct srv_http *http, struct MHD_Connection *connection,
                                    enum srv_probe probe)
{
    const char *why;
    bool is_well = srv_health_ask(http->config.health, probe, srv_now_us(), &why);

    return answer_text(connection, is_well ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE, why);
}

static enum MHD_Result answer_metrics(const struct srv_http *http, struct MHD_Connection *connection)
{
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);

    if (out)
        srv_metrics_write(http->config.metrics, http->config.health, out);
    if (!out || fclose(out) != 0) {
        free(text);
        return answer_text(connection, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory");
    }
    return answer(connection, MHD_HTTP_OK, SRV_METRICS_TYPE, text, n, MHD_RESPMEM_MUST_FREE);
}

static enum MHD_Result on_request(void *arg, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *n_upload, void **state)
{
    static const struct {
        const char *path;
        enum srv_probe probe;
    } probes[] = {{"/startupz", SRV_PROBE_STARTUP}, {"/readyz", SRV_PROBE_READY}, {"/livez", SRV_PROBE_LIVE}};
    const struct srv_http *http = arg;

    (void)version;
    (void)upload;
    (void)state;
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0) {
        *n_upload = 0;
        return answer_text(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD");
    }
    for (size_t i = 0; i < sizeof(probes) / sizeof(probes[0]); i++)
        if (strcmp(url, probes[i].path) == 0)
            return answer_probe(http, connection, probes[i].probe);
    if (strcmp(url, "/metrics") == 0)
        return answer_metrics(http, connection);
    return answer_text(connection, MHD_HTTP_NOT_FOUND,
                       "not here; there are /startupz, /readyz, /livez and /metrics");
}

/* A peer can cause these lines. */
__attribute__((format(printf, 2, 0))) static void log_line(void *arg, const char *format, va_list ap)
{
    char line[256];
    size_t n;

    (void)arg;
    vsnprintf(line, sizeof(line), format, ap);
    for (n = strlen(line); n > 0 && line[n - 1] == '\n'; n--)
        line[n - 1] = '\0';
    srv_log(SRV_LOG_DEBUG, "libmicrohttpd says text=\"%s\"", line);
}

/* ---- life ------------------------------------------------------------------------------------------------- */

static dsa_status open_socket(const char *text, int *fd_p, int *port_p, struct srv_err *err)
{
    struct sockaddr_storage address;
    socklen_t n;
    int one = 1, fd;
    dsa_status rc = srv_address_parse("http", text, &address, &n, err);

    if (rc != DSA_OK)
        return rc;
    fd = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return srv_fail(err, DSA_E_SYSTEM, "http", "%s", text, "cannot make a socket: %s", strerror(errno));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    n = address.ss_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    if (bind(fd, (struct sockaddr *)&address, n) != 0 || listen(fd, BACKLOG) != 0
        || getsockname(fd, (struct sockaddr *)&address, &n) != 0) {
        srv_fail(err, DSA_E_SYSTEM, "http", "%s", text, "cannot listen: %s", strerror(errno));
        close(fd);
        return DSA_E_SYSTEM;
    }
    *fd_p = fd;
    *port_p = srv_address_port(&address);
    return DSA_OK;
}

dsa_status srv_http_start(const struct srv_http_config *config, struct srv_http **http_p, struct srv_err *err)
{
    struct srv_http *http = calloc(1, sizeof(*http));
    int fd;
    dsa_status rc;

    if (!http)
        return srv_fail(err, DSA_E_NO_MEMORY, "http", "%s", config->address, "no memory");
    http->config = *config;
    if ((rc = open_socket(config->address, &fd, &http->port, err)) != DSA_OK) {
        free(http);
        return rc;
    }
    http->daemon = MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_USE_ERROR_LOG, 0, NULL, NULL, on_request, http,
        MHD_OPTION_EXTERNAL_LOGGER, log_line, NULL, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)MAX_CONNECTIONS, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)TIMEOUT_S, MHD_OPTION_END);
    if (!http->daemon) {
        close(fd);
        free(http);
        return srv_fail(err, DSA_E_SYSTEM, "http", "%s", config->address, "cannot start the HTTP thread");
    }
    *http_p = http;
    return DSA_OK;
}

void srv_http_stop(struct srv_http *http)
{
    if (!http)
        return;
    MHD_stop_daemon(http->daemon);
    free(http);
}

int srv_http_port(const struct srv_http *http)
{
    return http->port;
}
