/* args.h - command-line flags of one command, from one table: the table is parsed against and printed as
 * help. Pure; any thread. */
#ifndef DSACTL_ARGS_H
#define DSACTL_ARGS_H

#include <stdbool.h>
#include <stdint.h>

enum arg_type { ARG_TEXT, ARG_UINT, ARG_REAL, ARG_FLAG };

/* `value` points at a const char *, uint64_t, double or bool that holds the default. Texts stay in argv. */
struct arg {
    const char *name; /* without dashes; NULL ends the table */
    enum arg_type type;
    void *value;
    const char *metavar; /* "N", "DIR"; unused for flags */
    const char *help;
    uint64_t min, max; /* ARG_UINT; max 0 = no bound */
};

enum args_result { ARGS_OK, ARGS_HELP, ARGS_BAD };

/* Reads argv[1..argc) as --name value, --name=value or --flag. On ARGS_BAD one sentence naming the flag went
 * to stderr; on ARGS_HELP (--help, -h) nothing was printed. */
enum args_result args_parse(const struct arg *table, int argc, char **argv);

/* The table with defaults, to stdout. Call before args_parse has changed the values. */
void args_print(const struct arg *table);

#endif /* DSACTL_ARGS_H */
