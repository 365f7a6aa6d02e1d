/* common.c - connecting, errors and tensor memory for the commands. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/dsactl/dsactl.h"

#define ALIGN 64

const char *default_target(void)
{
    const char *target = getenv("DSA_TARGET");

    return target && target[0] ? target : "unix:/run/dsad/dsad.sock";
}

bool command_args(const char *name, const char *text, const struct arg *table, int argc, char **argv,
                  int *exit_p)
{
    switch (args_parse(table, argc, argv)) {
    case ARGS_OK:
        return true;
    case ARGS_HELP:
        printf("usage: dsactl %s [flags]\n\n%s\n\nFlags, with [defaults]:\n", name, text);
        args_print(table);
        *exit_p = EXIT_OK;
        return false;
    case ARGS_BAD:
        break;
    }
    *exit_p = EXIT_USAGE;
    return false;
}

void print_error(const char *what, const struct dsa_error *err)
{
    char text[512];

    dsa_error_text(err, text, sizeof(text));
    fprintf(stderr, "dsactl: %s: %s\n", what, text);
}

static const char *given(const char *text)
{
    return text[0] != '\0' ? text : NULL;
}

struct dsa_options common_options(const struct common *common, struct dsa_tls *tls_p)
{
    struct dsa_options options = {.client_name = "dsactl",
                                  .connect_timeout_us = common->timeout_ms * 1000,
                                  .spin_us = (uint32_t)common->spin_us,
                                  .token_file = given(common->token_file)};

    *tls_p = (struct dsa_tls){given(common->tls_ca), given(common->tls_cert), given(common->tls_key),
                              given(common->tls_name)};
    if (common->is_tls || tls_p->ca_file || tls_p->cert_file || tls_p->key_file || tls_p->server_name)
        options.tls = tls_p;
    return options;
}

struct dsa_client *command_connect(const struct common *common, bool want_session)
{
    struct dsa_tls tls;
    struct dsa_options options = common_options(common, &tls);
    struct dsa_client *client;
    struct dsa_error err;

    options.no_session = !want_session;
    if (dsa_connect(common->target, &options, &client, &err) == DSA_OK)
        return client;
    print_error("cannot connect", &err);
    return NULL;
}

/* ---- memory for tensors ---------------------------------------------------------------------- */

bool transport_pick(const struct dsa_client *client, const char *transport, bool *is_shared_p)
{
    const struct dsa_capabilities *caps = dsa_capabilities(client);
    bool takes_fds = caps->fd_socket[0] != '\0';

    if (strcmp(transport, "auto") == 0) {
        *is_shared_p = takes_fds;
    } else if (strcmp(transport, "inline") == 0) {
        *is_shared_p = false;
    } else if (strcmp(transport, "memfd") == 0) {
        if (!takes_fds) {
            fprintf(stderr, "dsactl: --transport memfd: the server takes no file descriptors\n");
            return false;
        }
        *is_shared_p = true;
    } else {
        fprintf(stderr, "dsactl: --transport: '%s' is not memfd, inline or auto\n", transport);
        return false;
    }
    return true;
}

uint64_t block_size(uint64_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

dsa_status block_init(struct block *block, struct dsa_client *client, bool is_shared, uint64_t bytes,
                      struct dsa_error *err)
{
    memset(block, 0, sizeof(*block));
    block->bytes = bytes ? block_size(bytes) : ALIGN;
    if (is_shared) {
        dsa_status status =
            dsa_memory_create(client, block->bytes, DSA_ACCESS_READ_WRITE, &block->memory, err);

        if (status != DSA_OK)
            return status;
        block->data = dsa_memory_data(block->memory);
        return DSA_OK;
    }
    block->data = aligned_alloc(ALIGN, block->bytes);
    if (!block->data) {
        if (err) {
            memset(err, 0, sizeof(*err));
            err->code = DSA_E_NO_MEMORY;
            snprintf(err->reason, sizeof(err->reason), "%s", dsa_status_reason(DSA_E_NO_MEMORY));
            snprintf(err->message, sizeof(err->message), "no memory for tensors");
        }
        return DSA_E_NO_MEMORY;
    }
    memset(block->data, 0, block->bytes);
    return DSA_OK;
}

void block_fini(struct block *block)
{
    struct dsa_error err;

    if (block->memory) {
        if (dsa_memory_destroy(block->memory, &err) != DSA_OK && err.code != DSA_E_CONNECT)
            print_error("giving shared memory back", &err);
    } else {
        free(block->data);
    }
    memset(block, 0, sizeof(*block));
}

void *block_take(struct block *block, uint64_t bytes)
{
    void *at = block->data + block->used;

    if (block_size(bytes) > block->bytes - block->used)
        abort();
    block->used += block_size(bytes);
    return at;
}

struct dsa_tensor block_tensor(const struct block *block, const void *at, enum dsa_dtype dtype, uint32_t rank,
                               uint64_t n0, uint64_t n1, uint64_t n2)
{
    struct dsa_tensor tensor = {.dtype = dtype, .rank = rank, .shape = {n0, n1, n2}};

    for (uint32_t i = rank; i < DSA_MAX_RANK; i++)
        tensor.shape[i] = 0;
    if (block->memory) {
        tensor.memory = block->memory;
        tensor.offset = (uint64_t)((const uint8_t *)at - block->data);
    } else {
        tensor.data = at;
    }
    return tensor;
}

struct dsa_output block_output(const struct block *block, void *at, enum dsa_dtype dtype)
{
    struct dsa_output output = {.dtype = dtype};

    if (block->memory) {
        output.memory = block->memory;
        output.offset = (uint64_t)((uint8_t *)at - block->data);
    } else {
        output.data = at;
    }
    return output;
}

/* ---- the first pool -------------------------------------------------------------------------- */

bool pool_pick(const struct dsa_client *client, const struct dsa_pool **pool_p,
               const struct ref64_layout **layout_p)
{
    const struct dsa_capabilities *caps = dsa_capabilities(client);
    const struct ref64_layout *layout;

    if (caps->n_pools == 0) {
        fprintf(stderr, "dsactl: the server has no pool\n");
        return false;
    }
    layout = ref64_layout_get((uint32_t)caps->pools[0].layout);
    if (!layout || (uint32_t)layout->row_bytes != caps->pools[0].row_bytes) {
        fprintf(stderr, "dsactl: the pool's layout %d with %u-byte rows is unknown here\n",
                (int)caps->pools[0].layout, caps->pools[0].row_bytes);
        return false;
    }
    *pool_p = &caps->pools[0];
    *layout_p = layout;
    return true;
}

int pool_rule(const struct dsa_pool *pool)
{
    return pool->write_rule == DSA_RULE_PLAIN ? REF64_RULE_PLAIN : REF64_RULE_POW2;
}

uint64_t clock_us(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000 + (uint64_t)ts.tv_nsec / 1000;
}
