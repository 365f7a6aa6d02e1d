/* cmd_drain.c - asks the server to end. */
#include <stdio.h>

#include "client/dsactl/dsactl.h"

int cmd_drain(int argc, char **argv)
{
    struct common common = COMMON_DEFAULTS;
    uint64_t grace_ms = 0;
    const struct arg table[] = {
        {"grace-ms", ARG_UINT, &grace_ms, "N", "time for running work; 0 = the server's own", 0, 86400000},
        COMMON_ARGS(common),
        {0},
    };
    struct dsa_client *client;
    struct dsa_error err;
    int code;

    if (!command_args("drain",
                      "Tells the server to take no new work, finish what runs and end. Over the unix socket "
                      "only, unless the server says otherwise.",
                      table, argc, argv, &code))
        return code;
    client = command_connect(&common, false);
    if (!client)
        return EXIT_CONNECT;
    code = EXIT_OK;
    if (dsa_drain(client, grace_ms * 1000, &err) != DSA_OK) {
        print_error("drain", &err);
        code = EXIT_MISMATCH;
    } else {
        printf("draining\n");
    }
    dsa_close(client);
    return code;
}
