/* dsk-check - compares a device's kernels with float64: stored vectors and random shapes. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check_parts.h"

static const char help[] =
    "usage: dsk-check --device cpu|cuda|hip [options]\n"
    "\n"
    "Runs the kernels on a device and compares every result with float64: attend, append (byte for byte),\n"
    "read, gather, map and merge; repeats must give the same bits, and guard bytes around every buffer must\n"
    "survive. Ends in a line `N passed, N failed`.\n"
    "\n"
    "  --device KIND     cpu, cuda or hip\n"
    "  --ordinal N       which device of that kind (default 0)\n"
    "  --portable        GPUs: only kernels that run on every architecture\n"
    "  --no-graphs       GPUs: launch directly instead of replaying recorded launches\n"
    "  --isa NAME        auto, generic, avx2, avx512 or avx512bf16 (default auto: the best this processor "
    "has)\n"
    "  --threads N       threads that compute; 0 takes every processor this process may use (default 0)\n"
    "  --vectors DIR     also run every reference folder in DIR (none by default)\n"
    "  --seed N          seed of the random cases (default 1); a failure prints it\n"
    "  --cases N         random cases, at most 100000 (default 800: about 20 seconds)\n"
    "  --help            this text\n"
    "\n"
    "Exit status: 0 all passed, 1 something failed, 2 wrong usage or no such device.\n";

struct options {
    struct dsk_device_config config;
    const char *vectors;
    unsigned long long seed;
    int n_cases;
};

static bool parse_number(const char *flag, const char *text, unsigned long long max,
                         unsigned long long *value_p)
{
    char *end;
    unsigned long long value;

    errno = 0;
    value = strtoull(text, &end, 0);
    if (*text == '\0' || *text == '-' || *end != '\0' || errno != 0 || value > max) {
        fprintf(stderr, "dsk-check: --%s %s: a whole number from 0 to %llu is needed\n", flag, text, max);
        return false;
    }
    *value_p = value;
    return true;
}

static bool parse_name(const char *flag, const char *text, const char *const *names, int first,
                       int32_t *value_p)
{
    for (int i = 0; names[i]; i++) {
        if (strcmp(text, names[i]) == 0) {
            *value_p = first + i;
            return true;
        }
    }
    fprintf(stderr, "dsk-check: --%s %s: unknown name; see --help\n", flag, text);
    return false;
}

/* 0: go on; else exit with the status - 1. */
static int parse(int argc, char **argv, struct options *o)
{
    static const struct option table[] = {
        {"device", 1, NULL, 'd'},  {"isa", 1, NULL, 'i'},      {"threads", 1, NULL, 't'},
        {"vectors", 1, NULL, 'v'}, {"seed", 1, NULL, 's'},     {"cases", 1, NULL, 'c'},
        {"ordinal", 1, NULL, 'o'}, {"portable", 0, NULL, 'p'}, {"no-graphs", 0, NULL, 'g'},
        {"help", 0, NULL, 'h'},    {NULL, 0, NULL, 0}};
    static const char *const devices[] = {"cpu", "cuda", "hip", NULL};
    static const char *const isas[] = {"auto", "generic", "avx2", "avx512", "avx512bf16", NULL};
    unsigned long long n;
    bool is_ok = true;
    int opt;

    while (is_ok && (opt = getopt_long(argc, argv, "", table, NULL)) != -1) {
        switch (opt) {
        case 'd':
            is_ok = parse_name("device", optarg, devices, DSK_DEVICE_CPU, &o->config.kind);
            break;
        case 'i':
            is_ok = parse_name("isa", optarg, isas, DSK_ISA_AUTO, &o->config.isa);
            break;
        case 't':
            is_ok = parse_number("threads", optarg, 1024, &n);
            o->config.n_threads = is_ok ? (int32_t)n : 0;
            break;
        case 'v':
            o->vectors = optarg;
            break;
        case 's':
            is_ok = parse_number("seed", optarg, UINT64_MAX, &o->seed);
            break;
        case 'c':
            is_ok = parse_number("cases", optarg, 100000, &n);
            o->n_cases = is_ok ? (int)n : 0;
            break;
        case 'o':
            is_ok = parse_number("ordinal", optarg, 1024, &n);
            o->config.ordinal = is_ok ? (int32_t)n : 0;
            break;
        case 'p':
            o->config.flags |= DSK_DEVICE_PORTABLE;
            break;
        case 'g':
            o->config.flags |= DSK_DEVICE_NO_GRAPHS;
            break;
        case 'h':
            fputs(help, stdout);
            return 1;
        default: /* getopt has named the flag */
            is_ok = false;
            break;
        }
    }
    if (is_ok && optind < argc) {
        fprintf(stderr, "dsk-check: unexpected argument %s\n", argv[optind]);
        is_ok = false;
    }
    if (is_ok && o->config.kind == 0) {
        fprintf(stderr, "dsk-check: --device is needed; see --help\n");
        is_ok = false;
    }
    return is_ok ? 0 : 3;
}

static int run(struct check *c, const struct options *o)
{
    const struct dsk_device_info *info = dsk_device_get_info(c->dev);

    if (info->kind == DSK_DEVICE_CPU)
        printf("device: %s, %d threads\n", info->name, info->n_threads);
    else
        printf("device: %s, %s, %s\n", info->name, info->arch, info->uuid);
    if (!o->vectors)
        printf("vectors: none, because no --vectors was given\n");
    else if (check_vectors(c, o->vectors) != 0)
        check_expect(c, false, "vectors", "no case found in %s", o->vectors);
    check_random(c, o->n_cases);
    printf("%d passed, %d failed\n", c->n_passed, c->n_failed);
    return c->n_failed == 0 && c->n_passed > 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct options o = {.seed = 1, .n_cases = 800};
    struct check c = {0};
    struct dsk_err err = {.status = DSK_OK};
    dsk_status status;
    int rc = parse(argc, argv, &o);

    if (rc != 0)
        return rc - 1;
    status = dsk_device_open(&o.config, &c.dev, &err);
    if (status != DSK_OK) {
        fprintf(stderr, "dsk-check: %s: %s = %s: %s\n", dsk_status_text(status), err.field, err.value,
                err.text);
        return 2;
    }
    status = dsk_stream_create(c.dev, &c.s);
    if (status != DSK_OK) {
        fprintf(stderr, "dsk-check: %s\n", dsk_status_text(status));
        dsk_device_close(c.dev);
        return 2;
    }
    c.seed = o.seed;
    rc = run(&c, &o);
    dsk_stream_destroy(c.s);
    dsk_device_close(c.dev);
    return rc;
}
