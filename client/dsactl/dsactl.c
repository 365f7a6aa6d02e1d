/* dsactl - the command-line client of dsad: looks at a server, checks it, loads it, replays a trace against
 * it. */
#include "client/dsactl/dsactl.h"

#include <stdio.h>
#include <string.h>

static const struct command commands[] = {
    {"info", "what the server is, what it serves and how full it is", cmd_info},
    {"wait", "wait until the server is ready", cmd_wait},
    {"attend", "a small visible example: append rows, attend, compare", cmd_attend},
    {"verify", "check a server against reference vectors and random cases in float64", cmd_verify},
    {"load", "closed-loop load: throughput and latency", cmd_load},
    {"replay", "replay a recorded production trace and check samples of it", cmd_replay},
    {"drain", "ask the server to finish its work and end", cmd_drain},
};

#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

static void print_usage(FILE *to)
{
    fprintf(to, "usage: dsactl COMMAND [flags]\n\n");
    for (size_t i = 0; i < N_COMMANDS; i++)
        fprintf(to, "  %-8s %s\n", commands[i].name, commands[i].summary);
    fprintf(
        to,
        "\n`dsactl COMMAND --help` lists a command's flags with their defaults.\n"
        "Exit codes: 0 good, 1 a mismatch or a failed request, 2 usage, 3 the server cannot be reached.\n");
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        print_usage(stderr);
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        print_usage(stdout);
        return EXIT_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("dsactl %s\n", DSACTL_VERSION);
        return EXIT_OK;
    }
    for (size_t i = 0; i < N_COMMANDS; i++) {
        if (strcmp(argv[1], commands[i].name) == 0)
            return commands[i].run(argc - 1, argv + 1);
    }
    fprintf(stderr, "dsactl: unknown command '%s'\n", argv[1]);
    print_usage(stderr);
    return EXIT_USAGE;
}
