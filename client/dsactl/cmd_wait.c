/* cmd_wait.c - waits until the health service says SERVING. */
#include <stdio.h>
#include <time.h>

#include "client/dsactl/dsactl.h"

#define STEP_US 50000

/* One try: connected and serving? Connecting already waits, so a server that is not there costs no busy
 * loop. */
static bool is_ready(const struct common *common, const char *service, uint64_t until_us,
                     struct dsa_error *err)
{
    uint64_t now = clock_us();
    uint64_t left = until_us > now + 1000 ? until_us - now : 1000;
    struct dsa_tls tls;
    struct dsa_options options = common_options(common, &tls);
    struct dsa_client *client;
    bool is_serving = false;

    options.client_name = "dsactl wait";
    options.connect_timeout_us = left;
    options.no_session = true;
    if (dsa_connect(common->target, &options, &client, err) != DSA_OK)
        return false;
    while (dsa_health(client, service, &is_serving, err) == DSA_OK && !is_serving) {
        snprintf(err->reason, sizeof(err->reason), "NOT_SERVING");
        snprintf(err->message, sizeof(err->message), "the server answers, but is not serving");
        err->field[0] = err->rule[0] = '\0';
        if (clock_us() >= until_us)
            break;
        nanosleep(&(struct timespec){.tv_nsec = STEP_US * 1000},
                  NULL); /* a poll interval between two questions */
    }
    dsa_close(client);
    return is_serving;
}

int cmd_wait(int argc, char **argv)
{
    struct common common = COMMON_DEFAULTS;
    uint64_t timeout_ms = 30000, until_us;
    const char *service = "";
    bool is_quiet = false;
    const struct arg table[] = {
        {"timeout-ms", ARG_UINT, &timeout_ms, "N", "give up after this", 0, 86400000},
        {"service", ARG_TEXT, &service, "NAME", "service to ask for; empty = the whole server", 0, 0},
        {"quiet", ARG_FLAG, &is_quiet, NULL, "print nothing when ready", 0, 0},
        COMMON_ARGS(common),
        {0},
    };
    struct dsa_error err = {0};
    int code;

    if (!command_args(
            "wait",
            "Waits until the server's health service says SERVING. Exit code 3 when it does not in time.",
            table, argc, argv, &code))
        return code;
    until_us = clock_us() + timeout_ms * 1000;
    do {
        if (is_ready(&common, service, until_us, &err)) {
            if (!is_quiet)
                printf("serving at %s\n", common.target);
            return EXIT_OK;
        }
    } while (clock_us() < until_us && err.code != DSA_E_BAD_REQUEST && err.code != DSA_E_NOT_FOUND
             && err.code != DSA_E_UNAUTHENTICATED);
    print_error("not ready", &err);
    return EXIT_CONNECT;
}
