/* cmd_info.c - capabilities, limits, support rules and pool counts, for people and as JSON. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/dsactl/dsactl.h"

static const char *rule_name(enum dsa_rule rule)
{
    return rule == DSA_RULE_PLAIN ? "plain" : rule == DSA_RULE_POW2 ? "pow2" : "default";
}

/* "16.0 MiB" into text. */
static const char *size_text(uint64_t bytes, char text[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double x = (double)bytes;
    unsigned i = 0;

    for (; x >= 1024 && i < 4; i++)
        x /= 1024;
    snprintf(text, 32, i == 0 ? "%.0f %s" : "%.1f %s", x, units[i]);
    return text;
}

/* One table for both forms of the limits. */
struct limit_row {
    const char *name;
    uint64_t value;
    enum { COUNT, BYTES, MICROS } unit;
};

static unsigned limit_rows(const struct dsa_limits *l, struct limit_row rows[24])
{
    const struct limit_row all[] = {
        {"max_message_bytes", l->max_message_bytes, BYTES},
        {"max_inline_bytes", l->max_inline_bytes, BYTES},
        {"max_region_bytes", l->max_region_bytes, BYTES},
        {"max_rows", l->max_rows, COUNT},
        {"max_segments", l->max_segments, COUNT},
        {"max_heads", l->max_heads, COUNT},
        {"max_topk", l->max_topk, COUNT},
        {"max_append_rows", l->max_append_rows, COUNT},
        {"chunk_rows", l->chunk_rows, COUNT},
        {"max_sequence_tokens", l->max_sequence_tokens, COUNT},
        {"max_sequences_per_session", l->max_sequences_per_session, COUNT},
        {"max_regions_per_session", l->max_regions_per_session, COUNT},
        {"max_sessions", l->max_sessions, COUNT},
        {"max_streams", l->max_streams, COUNT},
        {"max_inflight_per_stream", l->max_inflight_per_stream, COUNT},
        {"max_queue", l->max_queue, COUNT},
        {"max_lease_us", l->max_lease_us, MICROS},
        {"max_grace_us", l->max_grace_us, MICROS},
        {"stall_timeout_us", l->stall_timeout_us, MICROS},
    };

    memcpy(rows, all, sizeof(all));
    return sizeof(all) / sizeof(all[0]);
}

/* ---- text ------------------------------------------------------------------------------------ */

static void print_server(const struct dsa_capabilities *caps, const char *target)
{
    printf("server\n  %-26s %s\n  %-26s %s\n  %-26s %s\n", "target", target, "version", caps->version,
           "build", caps->build);
    printf("  %-26s %s\n", "fd socket", caps->fd_socket[0] ? caps->fd_socket : "none");
    printf("  %-26s %s\n  %-26s", "physical indices", caps->physical_indices ? "allowed" : "no", "features");
    for (uint32_t i = 0; i < caps->n_features; i++)
        printf(" %s", caps->features[i]);
    printf("\n");
    for (uint32_t i = 0; i < caps->n_devices; i++) {
        const struct dsa_device *d = &caps->devices[i];
        char text[32];

        printf("device %s\n  %-26s %s, %s, %s\n  %-26s %s\n  %-26s %s\n", d->uuid, "kind, arch, name",
               d->kind, d->arch, d->name, "memory", size_text(d->memory_bytes, text), "healthy",
               d->is_healthy ? "yes" : "no");
    }
}

static void print_pools(const struct dsa_capabilities *caps, const struct dsa_stats *stats)
{
    for (uint32_t i = 0; i < caps->n_pools; i++) {
        const struct dsa_pool *p = &caps->pools[i];
        char text[32];

        printf("pool on %s\n", p->device_uuid);
        printf("  %-26s %s, %u-byte rows, d_qk %u, d_v %u\n", "layout", dsa_layout_name(p->layout),
               p->row_bytes, p->d_qk, p->d_v);
        printf("  %-26s %s\n", "write rule", rule_name(p->write_rule));
        if (p->layout == DSA_LAYOUT_RAW_512_64)
            printf("  %-26s %g\n", "raw scale", (double)p->raw_scale);
        printf("  %-26s %u\n", "layers", p->n_layers);
        printf("  %-26s %" PRIu64 " of %u tokens (%s)\n", "pages", p->n_pages, p->page_tokens,
               size_text(p->n_pages * p->page_tokens * p->n_layers * p->row_bytes, text));
        if (i < stats->n_pools)
            printf("  %-26s %" PRIu64 " used, %" PRIu64 " free, %" PRIu64 " shared, %" PRIu64 " references\n"
                   "  %-26s %" PRIu64 "\n  %-26s %u\n",
                   "pages now", stats->pools[i].n_pages_used, stats->pools[i].n_pages_free,
                   stats->pools[i].n_pages_shared, stats->pools[i].page_refs, "sequences",
                   stats->pools[i].n_sequences, "queued jobs", stats->pools[i].queue_depth);
    }
}

static void print_limits(const struct dsa_limits *limits)
{
    struct limit_row rows[24];
    unsigned n = limit_rows(limits, rows);

    printf("limits\n");
    for (unsigned i = 0; i < n; i++) {
        char text[32];

        if (rows[i].unit == BYTES)
            printf("  %-26s %" PRIu64 " (%s)\n", rows[i].name, rows[i].value, size_text(rows[i].value, text));
        else if (rows[i].unit == MICROS)
            printf("  %-26s %" PRIu64 " (%.1f s)\n", rows[i].name, rows[i].value,
                   (double)rows[i].value / 1e6);
        else
            printf("  %-26s %" PRIu64 "\n", rows[i].name, rows[i].value);
    }
}

static void print_rule(const struct dsa_rule_row *rule)
{
    printf("  %-7s %-24s %-4s", rule->accepts ? "serves" : "refuses", rule->name,
           rule->device_kind[0] ? rule->device_kind : "any");
    if (rule->max_heads)
        printf(" heads %u-%u", rule->min_heads, rule->max_heads);
    if (rule->d_qk)
        printf(" d_qk %u", rule->d_qk);
    if (rule->min_context_parallel > 1)
        printf(" context-parallel >= %u", rule->min_context_parallel);
    if (rule->when_layouts_differ)
        printf(" prefill layout != decode layout");
    if (rule->max_context_parallel)
        printf(" context-parallel <= %u", rule->max_context_parallel);
    for (uint32_t i = 0; i < rule->n_layouts; i++)
        printf("%s%s", i ? "," : " ", dsa_layout_name(rule->layouts[i]));
    for (uint32_t i = 0; i < rule->n_q_dtypes; i++)
        printf("%s%s", i ? "," : " q ", dsa_dtype_name(rule->q_dtypes[i]));
    for (uint32_t i = 0; i < rule->n_phases; i++)
        printf("%s%s", i ? "," : " ", rule->phases[i]);
    for (uint32_t i = 0; i < rule->n_host_tiers; i++)
        printf("%s%s", i ? "," : " tier ", rule->host_tiers[i]);
    printf("%s%s\n", rule->reason[0] ? ": " : "", rule->reason);
}

static void print_text(const struct dsa_capabilities *caps, const struct dsa_stats *stats, const char *target)
{
    print_server(caps, target);
    print_pools(caps, stats);
    print_limits(&caps->limits);
    printf("support rules (served when a row that serves matches and none that refuses does)\n");
    for (uint32_t i = 0; i < caps->n_rules; i++)
        print_rule(&caps->rules[i]);
    printf("counts since start, %.0f s ago\n", (double)stats->uptime_us / 1e6);
    printf("  %-26s %u open, %" PRIu64 " reclaimed\n", "sessions", stats->n_sessions,
           stats->n_sessions_reclaimed);
    printf("  %-26s %u, %" PRIu64 " bytes\n", "regions", stats->n_regions, stats->region_bytes);
    printf("  %-26s %" PRIu64 " answered, %" PRIu64 " refused\n", "requests", stats->n_requests,
           stats->n_rejected);
    printf("  %-26s %" PRIu64 " in %" PRIu64 " launches (%.2f each)\n", "query rows", stats->n_rows,
           stats->n_batches, stats->n_batches ? (double)stats->n_rows / (double)stats->n_batches : 0.0);
    printf("  %-26s %" PRIu64 "\n  %-26s %" PRIu64 "\n", "invalid indices", stats->n_invalid_indices,
           "non-finite inputs", stats->n_nonfinite);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_t *json_u64(uint64_t n)
{
    return json_integer(n > INT64_MAX ? INT64_MAX : (json_int_t)n);
}

static json_t *json_names(uint32_t n, char *const *texts)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < n; i++)
        json_array_append_new(list, json_string(texts[i]));
    return list;
}

static json_t *json_rule(const struct dsa_rule_row *rule)
{
    json_t *object = json_object(), *layouts = json_array(), *dtypes = json_array();

    for (uint32_t i = 0; i < rule->n_layouts; i++)
        json_array_append_new(layouts, json_string(dsa_layout_name(rule->layouts[i])));
    for (uint32_t i = 0; i < rule->n_q_dtypes; i++)
        json_array_append_new(dtypes, json_string(dsa_dtype_name(rule->q_dtypes[i])));
    json_object_set_new(object, "name", json_string(rule->name));
    json_object_set_new(object, "device_kind", json_string(rule->device_kind));
    json_object_set_new(object, "layouts", layouts);
    json_object_set_new(object, "q_dtypes", dtypes);
    json_object_set_new(object, "d_qk", json_u64(rule->d_qk));
    json_object_set_new(object, "min_heads", json_u64(rule->min_heads));
    json_object_set_new(object, "max_heads", json_u64(rule->max_heads));
    json_object_set_new(object, "phases", json_names(rule->n_phases, rule->phases));
    json_object_set_new(object, "accepts", json_boolean(rule->accepts));
    json_object_set_new(object, "when_layouts_differ", json_boolean(rule->when_layouts_differ));
    json_object_set_new(object, "min_context_parallel", json_u64(rule->min_context_parallel));
    json_object_set_new(object, "max_context_parallel", json_u64(rule->max_context_parallel));
    json_object_set_new(object, "host_tiers", json_names(rule->n_host_tiers, rule->host_tiers));
    json_object_set_new(object, "reason", json_string(rule->reason));
    return object;
}

static json_t *json_pool(const struct dsa_pool *pool, const struct dsa_pool_stats *now)
{
    json_t *object = json_object();

    json_object_set_new(object, "device_uuid", json_string(pool->device_uuid));
    json_object_set_new(object, "layout", json_string(dsa_layout_name(pool->layout)));
    json_object_set_new(object, "row_bytes", json_u64(pool->row_bytes));
    json_object_set_new(object, "page_tokens", json_u64(pool->page_tokens));
    json_object_set_new(object, "n_layers", json_u64(pool->n_layers));
    json_object_set_new(object, "n_pages", json_u64(pool->n_pages));
    json_object_set_new(object, "d_qk", json_u64(pool->d_qk));
    json_object_set_new(object, "d_v", json_u64(pool->d_v));
    json_object_set_new(object, "write_rule", json_string(rule_name(pool->write_rule)));
    if (!now)
        return object;
    json_object_set_new(object, "n_pages_used", json_u64(now->n_pages_used));
    json_object_set_new(object, "n_pages_free", json_u64(now->n_pages_free));
    json_object_set_new(object, "n_pages_shared", json_u64(now->n_pages_shared));
    json_object_set_new(object, "page_refs", json_u64(now->page_refs));
    json_object_set_new(object, "n_sequences", json_u64(now->n_sequences));
    json_object_set_new(object, "queue_depth", json_u64(now->queue_depth));
    return object;
}

static json_t *json_counts(const struct dsa_stats *stats)
{
    json_t *object = json_object();

    json_object_set_new(object, "uptime_us", json_u64(stats->uptime_us));
    json_object_set_new(object, "n_sessions", json_u64(stats->n_sessions));
    json_object_set_new(object, "n_sessions_reclaimed", json_u64(stats->n_sessions_reclaimed));
    json_object_set_new(object, "n_regions", json_u64(stats->n_regions));
    json_object_set_new(object, "region_bytes", json_u64(stats->region_bytes));
    json_object_set_new(object, "n_requests", json_u64(stats->n_requests));
    json_object_set_new(object, "n_rejected", json_u64(stats->n_rejected));
    json_object_set_new(object, "n_rows", json_u64(stats->n_rows));
    json_object_set_new(object, "n_batches", json_u64(stats->n_batches));
    json_object_set_new(object, "n_invalid_indices", json_u64(stats->n_invalid_indices));
    json_object_set_new(object, "n_nonfinite", json_u64(stats->n_nonfinite));
    return object;
}

static void print_json(const struct dsa_capabilities *caps, const struct dsa_stats *stats, const char *target)
{
    json_t *root = json_object(), *devices = json_array(), *pools = json_array(), *limits = json_object(),
           *rules = json_array();
    struct limit_row rows[24];
    unsigned n = limit_rows(&caps->limits, rows);

    for (uint32_t i = 0; i < caps->n_devices; i++) {
        const struct dsa_device *d = &caps->devices[i];

        json_array_append_new(devices, json_pack("{s:s, s:s, s:s, s:s, s:o, s:b}", "uuid", d->uuid, "kind",
                                                 d->kind, "name", d->name, "arch", d->arch, "memory_bytes",
                                                 json_u64(d->memory_bytes), "healthy", (int)d->is_healthy));
    }
    for (uint32_t i = 0; i < caps->n_pools; i++)
        json_array_append_new(pools,
                              json_pool(&caps->pools[i], i < stats->n_pools ? &stats->pools[i] : NULL));
    for (unsigned i = 0; i < n; i++)
        json_object_set_new(limits, rows[i].name, json_u64(rows[i].value));
    for (uint32_t i = 0; i < caps->n_rules; i++)
        json_array_append_new(rules, json_rule(&caps->rules[i]));
    json_object_set_new(root, "target", json_string(target));
    json_object_set_new(root, "version", json_string(caps->version));
    json_object_set_new(root, "build", json_string(caps->build));
    json_object_set_new(root, "fd_socket", json_string(caps->fd_socket));
    json_object_set_new(root, "physical_indices", json_boolean(caps->physical_indices));
    json_object_set_new(root, "features", json_names(caps->n_features, caps->features));
    json_object_set_new(root, "devices", devices);
    json_object_set_new(root, "pools", pools);
    json_object_set_new(root, "limits", limits);
    json_object_set_new(root, "rules", rules);
    json_object_set_new(root, "stats", json_counts(stats));
    json_dumpf(root, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(root);
}

int cmd_info(int argc, char **argv)
{
    struct common common = COMMON_DEFAULTS;
    bool want_json = false;
    const struct arg table[] = {
        {"json", ARG_FLAG, &want_json, NULL, "one JSON object instead of text", 0, 0},
        COMMON_ARGS(common),
        {0},
    };
    struct dsa_client *client;
    struct dsa_stats stats;
    struct dsa_error err;
    int code;

    if (!command_args("info",
                      "Prints what the server is, every limit it enforces, the rules that decide what it\n"
                      "serves, and how full its pools are. Needs no session.",
                      table, argc, argv, &code))
        return code;
    client = command_connect(&common, false);
    if (!client)
        return EXIT_CONNECT;
    if (dsa_stats(client, &stats, &err) != DSA_OK) {
        print_error("stats", &err);
        code = EXIT_MISMATCH;
    } else {
        (want_json ? print_json : print_text)(dsa_capabilities(client), &stats, common.target);
        code = EXIT_OK;
    }
    dsa_close(client);
    return code;
}
