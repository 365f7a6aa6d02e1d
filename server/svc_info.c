/* svc_info.c - GetCapabilities, GetStats, Drain. */
#include <stdlib.h>
#include <string.h>

#include "server/clock.h"
#include "server/core/rules.h"
#include "server/status.h"
#include "server/svc.h"

#define MAX_RULES 64

/* ---- GetCapabilities ------------------------------------------------------------------------------ */

/* The parts of one reply; everything that messages point to lives here until it is sent. */
struct capabilities {
    Dsa__V1__Capabilities message;
    Dsa__V1__Device device, *devices[1];
    Dsa__V1__Pool pool, *pools[1];
    Dsa__V1__Limits limits;
    Dsa__V1__SupportRule rules[MAX_RULES], *rule_list[MAX_RULES];
    Dsa__V1__Layout layouts[MAX_RULES][DSK_LAYOUT_COUNT];
    Dsa__V1__DType dtypes[MAX_RULES][4];
    char *phases[MAX_RULES][2];
    char *tiers[MAX_RULES][2];
};

static char *text(const char *constant)
{
    return (char *)(uintptr_t)constant; /* protobuf-c's strings are not const; packing does not write */
}

static void fill_device(const struct svc *svc, struct capabilities *c)
{
    const struct dsk_device_info *info = srv_worker_device(svc->worker);

    dsa__v1__device__init(&c->device);
    c->device.uuid = text(info->uuid);
    c->device.kind = text(svc->config->device);
    c->device.name = text(info->name);
    c->device.arch = text(info->arch);
    c->device.memory_bytes = info->memory_bytes;
    c->device.healthy = !srv_worker_is_lost(svc->worker);
    c->devices[0] = &c->device;
    c->message.n_devices = 1;
    c->message.devices = c->devices;
}

static void fill_pool(const struct svc *svc, struct capabilities *c)
{
    dsa__v1__pool__init(&c->pool);
    c->pool.device_uuid = c->device.uuid;
    c->pool.layout = (Dsa__V1__Layout)svc->layout->id;
    c->pool.row_bytes = (uint32_t)svc->layout->row_bytes;
    c->pool.page_tokens = DSK_PAGE_TOKENS;
    c->pool.n_layers = (uint32_t)svc->config->layers;
    c->pool.n_pages = svc->n_pages;
    c->pool.d_qk = (uint32_t)svc->layout->d_qk;
    c->pool.d_v = (uint32_t)svc->layout->d_v;
    c->pool.raw_scale = svc->layout->id == DSK_LAYOUT_RAW_512_64 ? (float)svc->config->raw_scale : 0;
    c->pool.write_rule = svc->write_rule == DSK_RULE_PLAIN ? DSA__V1__WRITE_RULE__WRITE_RULE_PLAIN
                                                           : DSA__V1__WRITE_RULE__WRITE_RULE_POW2;
    c->pools[0] = &c->pool;
    c->message.n_pools = 1;
    c->message.pools = c->pools;
}

static void fill_limits(const struct srv_config *config, Dsa__V1__Limits *limits)
{
    dsa__v1__limits__init(limits);
    limits->max_message_bytes = config->max_message_bytes;
    limits->max_inline_bytes = config->max_inline_bytes;
    limits->max_rows = (uint32_t)config->max_rows;
    limits->max_segments = (uint32_t)config->max_segments;
    limits->max_heads = DSK_MAX_HEADS;
    limits->max_topk = (uint32_t)config->max_topk;
    limits->max_append_rows = (uint32_t)config->max_append_rows;
    limits->max_sessions = (uint32_t)config->max_sessions;
    limits->max_regions_per_session = (uint32_t)config->max_regions;
    limits->max_region_bytes = config->max_region_bytes;
    limits->max_sequences_per_session = (uint32_t)config->max_sequences;
    limits->max_sequence_tokens = config->max_sequence_tokens;
    limits->max_inflight_per_stream = (uint32_t)config->max_inflight;
    limits->max_queue = (uint32_t)config->max_queue;
    limits->chunk_rows = (uint32_t)config->chunk_rows;
    limits->max_lease_us = config->max_lease_us;
    limits->max_grace_us = config->max_grace_us;
    limits->max_streams = (uint32_t)config->max_streams;
    limits->stall_timeout_us = config->stall_timeout_us;
}

static void fill_rule(const struct srv_rule *rule, struct capabilities *c, size_t i)
{
    Dsa__V1__SupportRule *out = &c->rules[i];

    dsa__v1__support_rule__init(out);
    out->name = text(rule->name);
    out->accept = rule->accepts;
    out->device_kind = text(rule->device_kind ? rule->device_kind : "");
    out->layouts = c->layouts[i];
    for (uint32_t id = 1; id < DSK_LAYOUT_COUNT; id++)
        if (rule->layouts & (1u << id))
            c->layouts[i][out->n_layouts++] = (Dsa__V1__Layout)id;
    out->q_dtypes = c->dtypes[i];
    for (uint32_t dtype = 1; dtype <= 4; dtype++)
        if (rule->q_dtypes & (1u << dtype))
            c->dtypes[i][out->n_q_dtypes++] = (Dsa__V1__DType)dtype;
    out->d_qk = rule->d_qk;
    out->min_heads = rule->min_heads;
    out->max_heads = rule->max_heads;
    out->phases = c->phases[i];
    if (rule->phases & SRV_PHASE_PREFILL)
        c->phases[i][out->n_phases++] = text("prefill");
    if (rule->phases & SRV_PHASE_DECODE)
        c->phases[i][out->n_phases++] = text("decode");
    out->min_context_parallel = rule->min_context_parallel;
    out->max_context_parallel = rule->max_context_parallel;
    out->when_layouts_differ = rule->when_layouts_differ;
    out->host_tiers = c->tiers[i];
    if (rule->host_tiers & SRV_TIER_NONE)
        c->tiers[i][out->n_host_tiers++] = text("none");
    if (rule->host_tiers & SRV_TIER_MEMFD)
        c->tiers[i][out->n_host_tiers++] = text("memfd");
    out->reason = text(rule->reason ? rule->reason : "");
}

static void fill_rules(struct capabilities *c)
{
    size_t n_rules;
    const struct srv_rule *table = srv_rules_table(&n_rules);

    SRV_ASSERT(n_rules <= MAX_RULES);
    for (size_t i = 0; i < n_rules; i++) {
        fill_rule(&table[i], c, i);
        c->rule_list[i] = &c->rules[i];
    }
    c->message.n_rules = n_rules;
    c->message.rules = c->rule_list;
}

void svc_get_capabilities(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    static char *features[] = {"inline",  "memfd",     "append_in_attend", "fork",   "export",  "import",
                               "chunked", "deadlines", "priorities",       "cancel", "reattach"};
    struct svc *svc = rpc_call_service(call);
    struct capabilities *c;
    struct wire_arena *arena;
    ProtobufCMessage *message;

    if (!svc_begin(call, &dsa__v1__get_capabilities_request__descriptor, bytes, n, &arena, &message))
        return;
    c = wire_arena_get(arena, sizeof(*c));
    if (!c) {
        struct srv_err err = {0};

        srv_fail(&err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for the reply");
        svc_refuse(call, &err);
        wire_arena_free(arena);
        return;
    }
    dsa__v1__capabilities__init(&c->message);
    fill_device(svc, c);
    fill_pool(svc, c);
    fill_limits(svc->config, &c->limits);
    fill_rules(c);
    c->message.limits = &c->limits;
    c->message.version = text(svc->version);
    c->message.build = text("cpu, cuda, hip; " __VERSION__);
    c->message.n_features = sizeof(features) / sizeof(features[0]);
    c->message.features = features;
    c->message.physical_indices = svc->config->physical_indices;
    c->message.fd_socket = text(svc->fd_socket);
    wire_reply(call, &c->message.base);
    wire_arena_free(arena);
}

/* ---- GetStats --------------------------------------------------------------------------------------- */

static void count_session(struct srv_session *session, void *arg)
{
    (void)session;
    ++*(uint32_t *)arg;
}

static void on_stats(struct svc_request *request, const struct srv_piece *piece)
{
    struct svc *svc = request->svc;
    const struct srv_job_stats *job = &request->job.u.stats;
    Dsa__V1__Stats reply = DSA__V1__STATS__INIT;
    Dsa__V1__PoolStats pool = DSA__V1__POOL_STATS__INIT, *pools[1] = {&pool};

    if (!request->call)
        return;
    rpc_call_set_data(request->call, NULL);
    if (piece->err.code != DSA_OK) {
        svc_refuse(request->call, &piece->err);
        return;
    }
    pool.device_uuid = text(srv_worker_device(svc->worker)->uuid);
    pool.n_pages = job->pool.n_pages;
    pool.n_pages_free = job->pool.n_free;
    pool.n_pages_used = job->pool.n_pages - job->pool.n_free;
    pool.n_pages_shared = job->pool.n_shared;
    pool.page_refs = job->pool.n_refs;
    pool.n_sequences = job->n_sequences;
    pool.queue_depth = job->queue_depth;
    reply.n_pools = 1;
    reply.pools = pools;
    srv_sessions_each(svc->sessions, count_session, &reply.n_sessions);
    reply.n_regions = srv_regions_count(svc->regions);
    reply.region_bytes = srv_regions_bytes(svc->regions);
    reply.n_requests = svc->counters.n_requests;
    reply.n_rows = svc->counters.n_rows;
    reply.n_invalid_indices = svc->counters.n_invalid;
    reply.n_nonfinite = svc->counters.n_nonfinite;
    reply.n_rejected = svc->counters.n_rejected;
    reply.n_batches = job->n_batches;
    reply.uptime_us = srv_now_us() - svc->start_us;
    reply.n_sessions_reclaimed = svc->counters.n_reclaimed;
    wire_reply(request->call, &reply.base);
}

void svc_get_stats(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    struct svc *svc = rpc_call_service(call);
    struct svc_request *request;
    struct wire_arena *arena;
    ProtobufCMessage *message;
    struct srv_err err = {0};

    if (!svc_begin(call, &dsa__v1__get_stats_request__descriptor, bytes, n, &arena, &message))
        return;
    request = svc_request_create(&svc->own, arena, call, SRV_OP_STATS);
    if (!request) {
        srv_fail(&err, DSA_E_NO_MEMORY, "", "%s", "", "no memory for the request");
        svc_refuse(call, &err);
        return;
    }
    request->on_piece = on_stats;
    request->job.node.priority = 101; /* ahead of every client's: a look at the queue must not wait in it */
    if (svc_request_submit(request, 0, 1, &err) == DSA_OK) {
        rpc_call_set_data(call, request);
        return;
    }
    svc_refuse(call, &err);
    svc_request_free(request);
}

/* ---- Drain: access.c says from where ---------------------------------------------------------------- */

void svc_drain(struct rpc_call *call, const uint8_t *bytes, size_t n)
{
    struct svc *svc = rpc_call_service(call);
    Dsa__V1__DrainReply reply = DSA__V1__DRAIN_REPLY__INIT;
    struct wire_arena *arena;
    ProtobufCMessage *message;
    uint64_t grace_us;

    if (!svc_begin(call, &dsa__v1__drain_request__descriptor, bytes, n, &arena, &message))
        return;
    grace_us = ((const Dsa__V1__DrainRequest *)message)->grace_us;
    wire_arena_free(arena);
    wire_reply(call, &reply.base);
    svc->on_drain(svc->on_drain_arg, grace_us > 0 ? grace_us : svc->config->drain_grace_us);
}
