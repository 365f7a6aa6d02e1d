/* info.c - capabilities, stats, health and drain: what can be asked without a session. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/lib/internal.h"
#include "grpc/health/v1/health.pb-c.h"

/* ---- capabilities ---------------------------------------------------------------------------- */

static char *copy_string(const char *text, bool *is_short_p)
{
    char *copy = strdup(text);

    *is_short_p = *is_short_p || !copy;
    return copy;
}

/* n zeroed elements of `size` bytes; NULL for none. */
static void *copy_array(size_t n, size_t size, bool *is_short_p)
{
    void *array = n ? calloc(n, size) : NULL;

    *is_short_p = *is_short_p || (n && !array);
    return array;
}

static char **copy_strings(char *const *texts, size_t n, uint32_t *n_p, bool *is_short_p)
{
    char **copies = copy_array(n, sizeof(*copies), is_short_p);

    if (!copies)
        return NULL;
    *n_p = (uint32_t)n;
    for (size_t i = 0; i < n; i++)
        copies[i] = copy_string(texts[i], is_short_p);
    return copies;
}

static void copy_limits(const Dsa__V1__Limits *from, struct dsa_limits *to)
{
    *to = (struct dsa_limits){
        .max_message_bytes = from->max_message_bytes,
        .max_inline_bytes = from->max_inline_bytes,
        .max_region_bytes = from->max_region_bytes,
        .max_sequence_tokens = from->max_sequence_tokens,
        .max_lease_us = from->max_lease_us,
        .max_grace_us = from->max_grace_us,
        .stall_timeout_us = from->stall_timeout_us,
        .max_rows = from->max_rows,
        .max_segments = from->max_segments,
        .max_heads = from->max_heads,
        .max_topk = from->max_topk,
        .max_append_rows = from->max_append_rows,
        .max_sessions = from->max_sessions,
        .max_regions_per_session = from->max_regions_per_session,
        .max_sequences_per_session = from->max_sequences_per_session,
        .max_inflight_per_stream = from->max_inflight_per_stream,
        .max_queue = from->max_queue,
        .chunk_rows = from->chunk_rows,
        .max_streams = from->max_streams,
    };
}

static void copy_devices(const Dsa__V1__Capabilities *wire, struct dsa_capabilities *caps, bool *is_short_p)
{
    caps->devices = copy_array(wire->n_devices, sizeof(*caps->devices), is_short_p);
    if (!caps->devices)
        return;
    caps->n_devices = (uint32_t)wire->n_devices;
    for (uint32_t i = 0; i < caps->n_devices; i++) {
        const Dsa__V1__Device *from = wire->devices[i];

        caps->devices[i] = (struct dsa_device){.uuid = copy_string(from->uuid, is_short_p),
                                               .kind = copy_string(from->kind, is_short_p),
                                               .name = copy_string(from->name, is_short_p),
                                               .arch = copy_string(from->arch, is_short_p),
                                               .memory_bytes = from->memory_bytes,
                                               .is_healthy = from->healthy};
    }
}

static void copy_pools(const Dsa__V1__Capabilities *wire, struct dsa_capabilities *caps, bool *is_short_p)
{
    caps->pools = copy_array(wire->n_pools, sizeof(*caps->pools), is_short_p);
    if (!caps->pools)
        return;
    caps->n_pools = (uint32_t)wire->n_pools;
    for (uint32_t i = 0; i < caps->n_pools; i++) {
        const Dsa__V1__Pool *from = wire->pools[i];

        caps->pools[i] = (struct dsa_pool){.device_uuid = copy_string(from->device_uuid, is_short_p),
                                           .layout = (enum dsa_layout)from->layout,
                                           .row_bytes = from->row_bytes,
                                           .page_tokens = from->page_tokens,
                                           .n_layers = from->n_layers,
                                           .n_pages = from->n_pages,
                                           .d_qk = from->d_qk,
                                           .d_v = from->d_v,
                                           .raw_scale = from->raw_scale,
                                           .write_rule = (enum dsa_rule)from->write_rule};
    }
}

static void copy_rule(const Dsa__V1__SupportRule *from, struct dsa_rule_row *to, bool *is_short_p)
{
    to->name = copy_string(from->name, is_short_p);
    to->device_kind = copy_string(from->device_kind, is_short_p);
    to->reason = copy_string(from->reason, is_short_p);
    to->layouts = copy_array(from->n_layouts, sizeof(*to->layouts), is_short_p);
    for (size_t i = 0; to->layouts && i < from->n_layouts; i++)
        to->layouts[to->n_layouts++] = (enum dsa_layout)from->layouts[i];
    to->q_dtypes = copy_array(from->n_q_dtypes, sizeof(*to->q_dtypes), is_short_p);
    for (size_t i = 0; to->q_dtypes && i < from->n_q_dtypes; i++)
        to->q_dtypes[to->n_q_dtypes++] = (enum dsa_dtype)from->q_dtypes[i];
    to->phases = copy_strings(from->phases, from->n_phases, &to->n_phases, is_short_p);
    to->host_tiers = copy_strings(from->host_tiers, from->n_host_tiers, &to->n_host_tiers, is_short_p);
    to->d_qk = from->d_qk;
    to->min_heads = from->min_heads;
    to->max_heads = from->max_heads;
    to->min_context_parallel = from->min_context_parallel;
    to->max_context_parallel = from->max_context_parallel;
    to->accepts = from->accept;
    to->when_layouts_differ = from->when_layouts_differ;
}

dsa_status dsa__capabilities_from_wire(const Dsa__V1__Capabilities *wire, struct dsa_capabilities *caps_p,
                                       struct dsa_error *err)
{
    struct dsa_capabilities caps = {.physical_indices = wire->physical_indices};
    bool is_short = false;

    if (!wire->limits)
        return dsa__fail(err, DSA_E_PROTOCOL, NULL, "the capabilities carry no limits");
    caps.version = copy_string(wire->version, &is_short);
    caps.build = copy_string(wire->build, &is_short);
    caps.fd_socket = copy_string(wire->fd_socket, &is_short);
    copy_limits(wire->limits, &caps.limits);
    copy_devices(wire, &caps, &is_short);
    copy_pools(wire, &caps, &is_short);
    caps.features = copy_strings(wire->features, wire->n_features, &caps.n_features, &is_short);
    caps.rules = copy_array(wire->n_rules, sizeof(*caps.rules), &is_short);
    for (size_t i = 0; caps.rules && i < wire->n_rules; i++)
        copy_rule(wire->rules[i], &caps.rules[caps.n_rules++], &is_short);
    if (is_short) {
        dsa__capabilities_fini(&caps);
        return dsa__fail(err, DSA_E_NO_MEMORY, NULL, "no memory for the capabilities");
    }
    *caps_p = caps;
    return DSA_OK;
}

static void free_strings(char **texts, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        free(texts[i]);
    free(texts);
}

void dsa__capabilities_fini(struct dsa_capabilities *caps)
{
    for (uint32_t i = 0; i < caps->n_devices; i++) {
        free(caps->devices[i].uuid);
        free(caps->devices[i].kind);
        free(caps->devices[i].name);
        free(caps->devices[i].arch);
    }
    for (uint32_t i = 0; i < caps->n_pools; i++)
        free(caps->pools[i].device_uuid);
    for (uint32_t i = 0; i < caps->n_rules; i++) {
        struct dsa_rule_row *rule = &caps->rules[i];

        free(rule->name);
        free(rule->device_kind);
        free(rule->reason);
        free(rule->layouts);
        free(rule->q_dtypes);
        free_strings(rule->phases, rule->n_phases);
        free_strings(rule->host_tiers, rule->n_host_tiers);
    }
    free(caps->devices);
    free(caps->pools);
    free(caps->rules);
    free_strings(caps->features, caps->n_features);
    free(caps->version);
    free(caps->build);
    free(caps->fd_socket);
    memset(caps, 0, sizeof(*caps));
}

/* ---- stats ----------------------------------------------------------------------------------- */

static void copy_stats(const Dsa__V1__Stats *from, struct dsa_stats *to)
{
    size_t max = sizeof(to->pools) / sizeof(to->pools[0]);

    *to = (struct dsa_stats){
        .n_pools = (uint32_t)(from->n_pools < max ? from->n_pools : max),
        .n_sessions = from->n_sessions,
        .n_regions = from->n_regions,
        .region_bytes = from->region_bytes,
        .n_requests = from->n_requests,
        .n_rows = from->n_rows,
        .n_invalid_indices = from->n_invalid_indices,
        .n_nonfinite = from->n_nonfinite,
        .n_rejected = from->n_rejected,
        .n_batches = from->n_batches,
        .uptime_us = from->uptime_us,
        .n_sessions_reclaimed = from->n_sessions_reclaimed,
    };
    for (uint32_t i = 0; i < to->n_pools; i++) {
        const Dsa__V1__PoolStats *pool = from->pools[i];

        to->pools[i] = (struct dsa_pool_stats){
            .n_pages = pool->n_pages,
            .n_pages_free = pool->n_pages_free,
            .n_pages_used = pool->n_pages_used,
            .n_pages_shared = pool->n_pages_shared,
            .n_sequences = pool->n_sequences,
            .page_refs = pool->page_refs,
            .queue_depth = pool->queue_depth,
        };
        snprintf(to->pools[i].device_uuid, sizeof(to->pools[i].device_uuid), "%s", pool->device_uuid);
    }
}

dsa_status dsa_stats(struct dsa_client *client, struct dsa_stats *stats_p, struct dsa_error *err)
{
    Dsa__V1__GetStatsRequest request = DSA__V1__GET_STATS_REQUEST__INIT;
    Dsa__V1__Stats *reply;
    dsa_status status;

    pthread_mutex_lock(&client->lock);
    status =
        dsa__unary(client, DSA__SERVICE "GetStats", &request.base, &dsa__v1__stats__descriptor, &reply, err);
    if (status == DSA_OK) {
        copy_stats(reply, stats_p);
        dsa__v1__stats__free_unpacked(reply, NULL);
    }
    pthread_mutex_unlock(&client->lock);
    return status;
}

/* ---- health and drain ------------------------------------------------------------------------ */

dsa_status dsa_health(struct dsa_client *client, const char *service, bool *is_serving_p,
                      struct dsa_error *err)
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    Grpc__Health__V1__HealthCheckResponse *reply;
    dsa_status status;

    pthread_mutex_lock(&client->lock);
    request.service = (char *)(uintptr_t)service; /* packing only reads it */
    status = dsa__unary(client, "/grpc.health.v1.Health/Check", &request.base,
                        &grpc__health__v1__health_check_response__descriptor, &reply, err);
    if (status == DSA_OK) {
        *is_serving_p = reply->status == GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
        grpc__health__v1__health_check_response__free_unpacked(reply, NULL);
    }
    pthread_mutex_unlock(&client->lock);
    return status;
}

dsa_status dsa_drain(struct dsa_client *client, uint64_t grace_us, struct dsa_error *err)
{
    Dsa__V1__DrainRequest request = DSA__V1__DRAIN_REQUEST__INIT;
    Dsa__V1__DrainReply *reply;
    dsa_status status;

    pthread_mutex_lock(&client->lock);
    request.grace_us = grace_us;
    status = dsa__unary(client, DSA__SERVICE "Drain", &request.base, &dsa__v1__drain_reply__descriptor,
                        &reply, err);
    if (status == DSA_OK)
        dsa__v1__drain_reply__free_unpacked(reply, NULL);
    pthread_mutex_unlock(&client->lock);
    return status;
}
