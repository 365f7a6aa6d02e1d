/* client.c - connecting, closing and polling. */
#include <grpc/grpc_security.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/lib/internal.h"

#define DEFAULT_CONNECT_US UINT64_C(5000000)
#define DEFAULT_RPC_US     UINT64_C(30000000)
#define REASON_US          UINT64_C(200000) /* for asking why there was no connection */
/* Receive limit of the first connection; a server with larger messages costs a second one. */
#define FIRST_RECEIVE_BYTES (16 << 20)
#define MESSAGE_SLACK       (64 << 10) /* a refusal of a maximum-size message still has to fit */

static bool channel_open(struct dsa_client *client, const char *target, int receive_bytes)
{
    grpc_arg args[] = {
        {.type = GRPC_ARG_INTEGER,
         .key = GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
         .value.integer = receive_bytes},
        {.type = GRPC_ARG_INTEGER, .key = GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, .value.integer = -1},
        /* Retries would send an append twice. */
        {.type = GRPC_ARG_INTEGER, .key = GRPC_ARG_ENABLE_RETRIES, .value.integer = 0},
        {.type = GRPC_ARG_INTEGER, .key = GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, .value.integer = 50},
        {.type = GRPC_ARG_INTEGER, .key = GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, .value.integer = 100},
        {.type = GRPC_ARG_INTEGER, .key = GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, .value.integer = 500},
        /* Two clients of one process must not share a connection: limits are per connection. */
        {.type = GRPC_ARG_INTEGER, .key = GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, .value.integer = 1},
        {.type = GRPC_ARG_INTEGER, .key = GRPC_ARG_ENABLE_HTTP_PROXY, .value.integer = 0},
        {.type = GRPC_ARG_STRING, /* last: without a name of its own it is left out */
         .key = GRPC_SSL_TARGET_NAME_OVERRIDE_ARG,
         .value.string = client->server_name},
    };
    grpc_channel_args list = {sizeof(args) / sizeof(args[0]) - (client->server_name ? 0 : 1), args};

    client->channel = grpc_channel_create(target, client->credentials, &list);
    return client->channel != NULL;
}

/* gRPC tells of the last address last. */
static const char *last_reason(const char *text)
{
    static const char *const before[] = {"last error: ", "Ssl handshake failed: "};

    for (size_t i = 0; i < sizeof(before) / sizeof(before[0]); i++) {
        const char *at = strstr(text, before[i]);

        if (at)
            text = at + strlen(before[i]);
    }
    return text;
}

static dsa_status get_capabilities(struct dsa_client *client, const char *target, uint64_t timeout_us,
                                   struct dsa_error *err)
{
    Dsa__V1__GetCapabilitiesRequest request = DSA__V1__GET_CAPABILITIES_REQUEST__INIT;
    Dsa__V1__Capabilities *reply;
    struct dsa_error why;
    dsa_status status;

    status = dsa__unary_wait_ready(client, DSA__SERVICE "GetCapabilities", &request.base,
                                   &dsa__v1__capabilities__descriptor, timeout_us, &reply, &why);
    if (client->has_tls && status == DSA_E_TIMEOUT) {
        status = dsa__unary_fail_fast(client, DSA__SERVICE "GetCapabilities", &request.base,
                                      &dsa__v1__capabilities__descriptor, REASON_US, &reply, &why);
        if (status == DSA_E_CONNECT)
            return dsa__fail(err, DSA_E_CONNECT, "target", "no server answers at %s within %llu ms: %s",
                             target, (unsigned long long)(timeout_us / 1000), last_reason(why.message));
    }
    if (status == DSA_E_TIMEOUT || status == DSA_E_CONNECT)
        return dsa__fail(err, DSA_E_CONNECT, "target", "no server answers at %s within %llu ms", target,
                         (unsigned long long)(timeout_us / 1000));
    if (status != DSA_OK) {
        if (err)
            *err = why;
        return status;
    }
    status = dsa__capabilities_from_wire(reply, &client->caps, err);
    dsa__v1__capabilities__free_unpacked(reply, NULL);
    return status;
}

/* Reaches the server and learns its limits; makes a second channel when its messages may be larger than the
 * first one takes. */
static dsa_status reach(struct dsa_client *client, const char *target, uint64_t timeout_us,
                        struct dsa_error *err)
{
    uint64_t needed;
    dsa_status status;

    if (!channel_open(client, target, FIRST_RECEIVE_BYTES))
        return dsa__fail(err, DSA_E_BAD_REQUEST, "target", "%s is not an address", target);
    status = get_capabilities(client, target, timeout_us, err);
    if (status != DSA_OK)
        return status;
    client->max_send_bytes = client->caps.limits.max_message_bytes;
    needed = client->max_send_bytes + MESSAGE_SLACK;
    if (client->max_send_bytes == 0 || needed <= FIRST_RECEIVE_BYTES)
        return DSA_OK;
    if (needed > INT32_MAX)
        needed = INT32_MAX;
    grpc_channel_destroy(client->channel);
    if (!channel_open(client, target, (int)needed))
        return dsa__fail(err, DSA_E_BAD_REQUEST, "target", "%s is not an address", target);
    return DSA_OK;
}

static struct dsa_client *client_alloc(const struct dsa_options *options)
{
    struct dsa_client *client = calloc(1, sizeof(*client));

    if (!client)
        return NULL;
    if (options->fd_socket) {
        client->fd_socket = strdup(options->fd_socket);
        if (!client->fd_socket) {
            free(client);
            return NULL;
        }
    }
    pthread_mutex_init(&client->lock, NULL);
    grpc_init();
    client->cq = grpc_completion_queue_create_for_next(NULL);
    client->rpc_timeout_us = options->rpc_timeout_us ? options->rpc_timeout_us : DEFAULT_RPC_US;
    client->spin_us = options->spin_us;
    client->on_lost = options->on_lost;
    client->on_lost_arg = options->on_lost_arg;
    client->fd_conn = -1;
    client->next_ticket = 1;
    client->due_tail = &client->due_head;
    return client;
}

/* Everything of ours on the queue has completed by now; what may still come is an event nobody waits for. */
static void client_free(struct dsa_client *client)
{
    if (client->channel)
        grpc_channel_destroy(client->channel);
    grpc_completion_queue_shutdown(client->cq);
    while (grpc_completion_queue_next(client->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).type
           != GRPC_QUEUE_SHUTDOWN)
        ;
    grpc_completion_queue_destroy(client->cq);
    dsa__secure_fini(client);
    grpc_shutdown();
    if (client->fd_conn >= 0)
        close(client->fd_conn);
    free(client->fd_socket);
    free(client->session.fd_socket);
    dsa__capabilities_fini(&client->caps);
    pthread_mutex_destroy(&client->lock);
    free(client);
}

static void client_end(struct dsa_client *client, bool is_abandoned)
{
    dsa__keeper_stop(client);
    pthread_mutex_lock(&client->lock);
    dsa__streams_end(client);
    dsa__session_end(client, is_abandoned);
    while (client->memories) {
        struct dsa_memory *memory = client->memories;

        client->memories = memory->next;
        dsa__memory_free(memory);
    }
    pthread_mutex_unlock(&client->lock);
    client_free(client);
}

dsa_status dsa_connect(const char *target, const struct dsa_options *options, struct dsa_client **client_p,
                       struct dsa_error *err)
{
    static const struct dsa_options defaults;
    const struct dsa_options *o = options ? options : &defaults;
    uint64_t timeout_us = o->connect_timeout_us ? o->connect_timeout_us : DEFAULT_CONNECT_US;
    uint64_t until_us = dsa__now_us() + timeout_us;
    struct dsa_client *client;
    dsa_status status;

    if (!target || target[0] == '\0')
        return dsa__fail(err, DSA_E_BAD_REQUEST, "target", "no target given");
    if (o->client_name && strlen(o->client_name) > 64)
        return dsa__fail(err, DSA_E_BAD_REQUEST, "client_name", "longer than 64 bytes");
    client = client_alloc(o);
    if (!client)
        return dsa__fail(err, DSA_E_NO_MEMORY, NULL, "no memory for a client");
    pthread_mutex_lock(&client->lock);
    status = dsa__secure_init(client, target, o, err);
    if (status == DSA_OK)
        status = reach(client, target, timeout_us, err);
    if (status == DSA_OK && !o->no_session)
        status = dsa__session_open(client, o, until_us, err);
    pthread_mutex_unlock(&client->lock);
    if (status == DSA_OK && !o->no_session)
        status = dsa__keeper_start(client, err);
    if (status != DSA_OK) {
        client_end(client, false);
        return status;
    }
    *client_p = client;
    return DSA_OK;
}

void dsa_close(struct dsa_client *client)
{
    if (client)
        client_end(client, false);
}

void dsa_abandon(struct dsa_client *client)
{
    if (client)
        client_end(client, true);
}

/* Lock held. How many requests completed since the last report. */
static uint32_t take_completed(struct dsa_client *client)
{
    uint32_t n = (uint32_t)(client->n_completed - client->n_reported);

    client->n_reported = client->n_completed;
    return n;
}

uint32_t dsa_poll(struct dsa_client *client, uint64_t timeout_us)
{
    uint64_t now = timeout_us ? dsa__now_us() : 0;
    uint64_t until_us = timeout_us > UINT64_MAX - now ? UINT64_MAX : now + timeout_us;
    uint32_t n;

    pthread_mutex_lock(&client->lock);
    if (client->session.is_open && timeout_us == 0)
        dsa__heartbeat_if_due(client, dsa__now_us());
    dsa__pump_ready(client);
    while (timeout_us != 0 && client->n_completed == client->n_reported && !client->session.is_lost_due
           && dsa__now_us() < until_us) {
        if (dsa__pump(client, until_us))
            dsa__pump_ready(client);
    }
    n = take_completed(client);
    dsa__run_callbacks(client);
    pthread_mutex_unlock(&client->lock);
    return n;
}

const struct dsa_capabilities *dsa_capabilities(const struct dsa_client *client)
{
    return &client->caps;
}
