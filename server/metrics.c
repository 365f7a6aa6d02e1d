#include "server/metrics.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "server/clock.h"
#include "server/rpc.h"
#include "server/status.h"
#include "server/worker.h"

const uint64_t srv_bounds_us[SRV_HISTOGRAM_BUCKETS] = {
    10,    25,    50,     100,    250,    500,     1000,    2500,    5000,    10000,
    25000, 50000, 100000, 250000, 500000, 1000000, 2500000, 5000000, 10000000};
const uint64_t srv_bounds_rows[SRV_HISTOGRAM_BUCKETS] = {
    1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144};

static const char *const code_names[SRV_N_CODES] = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

const char *srv_metrics_code_name(int code)
{
    return code_names[code >= 0 && code < SRV_N_CODES ? code : 2];
}

/* ---- counting ----------------------------------------------------------------------------------------- */

void srv_metrics_request(struct srv_metrics *metrics, size_t method, int code, uint64_t took_us)
{
    if (method > metrics->n_methods)
        method = metrics->n_methods;
    if (code < 0 || code >= SRV_N_CODES)
        code = 2;
    srv_counter_add(&metrics->requests[method][code], 1);
    srv_histogram_add(&metrics->request_us[method], srv_bounds_us, took_us);
}

void srv_metrics_refused(struct srv_metrics *metrics, int status)
{
    if (status < 0 && -status < SRV_N_REASONS)
        srv_counter_add(&metrics->refused[-status], 1);
}

/* ---- writing ------------------------------------------------------------------------------------------ */

static void head(FILE *out, const char *name, const char *type, const char *help)
{
    fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void single(FILE *out, const char *name, const char *type, const char *help, uint64_t value)
{
    head(out, name, type, help);
    fprintf(out, "%s %" PRIu64 "\n", name, value);
}

/* label="value" or "", value. Our own label values need no escapes. */
__attribute__((format(printf, 4, 5))) static void sample(FILE *out, const char *name, uint64_t value,
                                                         const char *labels, ...)
{
    va_list ap;

    fprintf(out, "%s{", name);
    va_start(ap, labels);
    vfprintf(out, labels, ap);
    va_end(ap);
    fprintf(out, "} %" PRIu64 "\n", value);
}

/* In microseconds inside, in seconds outside: scale 1e6; else 1. label is empty or ends in a comma. */
static void histogram(FILE *out, const char *name, const char *label, const struct srv_histogram *h,
                      const uint64_t *bounds, size_t n_bounds, double scale)
{
    uint64_t total = 0;

    for (size_t i = 0; i <= SRV_HISTOGRAM_BUCKETS; i++) {
        total += srv_counter_get(&h->counts[i]);
        if (i < n_bounds)
            fprintf(out, "%s_bucket{%sle=\"%g\"} %" PRIu64 "\n", name, label, (double)bounds[i] / scale,
                    total);
    }
    fprintf(out, "%s_bucket{%sle=\"+Inf\"} %" PRIu64 "\n", name, label, total);
    fprintf(out, "%s_sum%s%.*s%s %.9g\n", name, label[0] ? "{" : "", label[0] ? (int)strlen(label) - 1 : 0,
            label, label[0] ? "}" : "", (double)srv_counter_get(&h->sum) / scale);
    fprintf(out, "%s_count%s%.*s%s %" PRIu64 "\n", name, label[0] ? "{" : "",
            label[0] ? (int)strlen(label) - 1 : 0, label, label[0] ? "}" : "", total);
}

/* "Attend" for the service's own methods, "grpc.health.v1.Health/Check" for others. */
static const char *method_name(const struct srv_metrics *metrics, size_t i)
{
    static const char own[] = "/dsa.v1.SparseAttention/";
    const char *path;

    if (i == metrics->n_methods)
        return "other";
    path = metrics->methods[i].path;
    return strncmp(path, own, sizeof(own) - 1) == 0 ? path + sizeof(own) - 1 : path + 1;
}

static void write_requests(const struct srv_metrics *metrics, FILE *out)
{
    head(out, "dsad_requests_total", "counter", "Requests answered, by method and gRPC code.");
    for (size_t i = 0; i <= metrics->n_methods; i++)
        for (size_t code = 0; code < SRV_N_CODES; code++) {
            uint64_t n = srv_counter_get(&metrics->requests[i][code]);

            if (n > 0
                || (code == 0 && i < metrics->n_methods)) /* so that the first failure is a step up from 0 */
                sample(out, "dsad_requests_total", n, "method=\"%s\",code=\"%s\"", method_name(metrics, i),
                       code_names[code]);
        }
    head(out, "dsad_request_seconds", "histogram", "Time from a request's arrival to its last answer.");
    for (size_t i = 0; i <= metrics->n_methods; i++) {
        char label[96];

        snprintf(label, sizeof(label), "method=\"%s\",", method_name(metrics, i));
        histogram(out, "dsad_request_seconds", label, &metrics->request_us[i], srv_bounds_us,
                  SRV_HISTOGRAM_BUCKETS, 1e6);
    }
    head(out, "dsad_refused_total", "counter", "Requests refused or failed, by reason.");
#define WRITE_REASON(name, value, reason, code, scope, text)                                                 \
    if ((value) < 0 && (value) > -80)                                                                        \
        sample(out, "dsad_refused_total", srv_counter_get(&metrics->refused[-(value)]), "reason=\"%s\"",     \
               reason);
    DSA_STATUS_MAP(WRITE_REASON)
#undef WRITE_REASON
}

static void write_gauges(const struct srv_gauges *g, FILE *out)
{
    single(out, "dsad_queue_requests", "gauge", "Requests given to the worker and not yet answered.",
           srv_counter_get(&g->queue_requests));
    single(out, "dsad_queue_rows", "gauge", "Query rows of those requests.", srv_counter_get(&g->queue_rows));
    single(out, "dsad_queue_bytes", "gauge", "Memory of their messages and inline results.",
           srv_counter_get(&g->queue_bytes));
    single(out, "dsad_rows_total", "counter", "Query rows answered.", srv_counter_get(&g->rows));
    single(out, "dsad_invalid_indices_total", "counter", "Selected indices outside their sequence, skipped.",
           srv_counter_get(&g->invalid_indices));
    single(out, "dsad_nonfinite_inputs_total", "counter", "NaN or infinite values that were appended.",
           srv_counter_get(&g->nonfinite_inputs));
    single(out, "dsad_sessions", "gauge", "Open sessions, those in their grace included.",
           srv_counter_get(&g->sessions));
    single(out, "dsad_sessions_reclaimed_total", "counter", "Sessions ended by the server.",
           srv_counter_get(&g->sessions_reclaimed));
    head(out, "dsad_regions", "gauge", "Registered client memory, by kind, way in and state.");
    sample(out, "dsad_regions", srv_counter_get(&g->regions_live),
           "kind=\"%s\",transport=\"%s\",state=\"%s\"", "memfd", "fd_socket", "live");
    sample(out, "dsad_regions", srv_counter_get(&g->regions_draining),
           "kind=\"%s\",transport=\"%s\",state=\"%s\"", "memfd", "fd_socket", "draining");
    single(out, "dsad_region_bytes", "gauge", "Size of all regions.", srv_counter_get(&g->region_bytes));
    single(out, "dsad_connections", "gauge", "Open client connections.", srv_counter_get(&g->connections));
    single(out, "dsad_streams", "gauge", "Calls in progress.", srv_counter_get(&g->streams));
    if (srv_counter_get(&g->tls_expiry_s) > 0) {
        single(out, "dsad_tls_certificate_expiry_timestamp_seconds", "gauge",
               "End of the served certificate's validity, Unix time.", srv_counter_get(&g->tls_expiry_s));
        single(out, "dsad_tls_reload_failures_total", "counter",
               "Certificates that could not be loaded again.", srv_counter_get(&g->tls_reload_failures));
    }
}

static void write_stages(const struct srv_worker_meter *meter, FILE *out)
{
    static const char *const names[SRV_N_STAGES] = {"queue", "launch", "device", "copy"};

    head(out, "dsad_stage_seconds", "histogram",
         "Where time goes: queue (a request until its launch), launch (putting it together), device, copy.");
    for (size_t i = 0; i < SRV_N_STAGES; i++) {
        char label[32];

        snprintf(label, sizeof(label), "stage=\"%s\",", names[i]);
        histogram(out, "dsad_stage_seconds", label, &meter->stage_us[i], srv_bounds_us, SRV_HISTOGRAM_BUCKETS,
                  1e6);
    }
    head(out, "dsad_batch_rows", "histogram", "Query rows that shared a launch.");
    histogram(out, "dsad_batch_rows", "", &meter->batch_rows, srv_bounds_rows, SRV_HISTOGRAM_BUCKETS, 1);
}

static void write_worker(const struct srv_metrics *metrics, const struct srv_worker *worker, FILE *out)
{
    const struct srv_worker_meter *meter = srv_worker_get_meter(worker);
    uint64_t n_free = srv_counter_get(&meter->pages_free), n_shared = srv_counter_get(&meter->pages_shared);
    uint64_t n_used = metrics->n_pages > n_free ? metrics->n_pages - n_free : 0;
    uint64_t code = srv_counter_get(&meter->device_error_code);

    write_stages(meter, out);
    head(out, "dsad_pool_pages", "gauge", "Pages of the KV pool; shared: used by more than one sequence.");
    sample(out, "dsad_pool_pages", n_free, "state=\"%s\"", "free");
    sample(out, "dsad_pool_pages", n_used > n_shared ? n_used - n_shared : 0, "state=\"%s\"", "owned");
    sample(out, "dsad_pool_pages", n_shared, "state=\"%s\"", "shared");
    single(out, "dsad_sequences", "gauge", "Sequences in the pool.", srv_counter_get(&meter->sequences));
    head(out, "dsad_graph_lookups_total", "counter",
         "Launches by recorded graph (hit), or recorded first (miss).");
    sample(out, "dsad_graph_lookups_total", srv_counter_get(&meter->graph_hits), "result=\"%s\"", "hit");
    sample(out, "dsad_graph_lookups_total", srv_counter_get(&meter->graph_misses), "result=\"%s\"", "miss");
    head(out, "dsad_device_memory_bytes", "gauge",
         "Memory of the device: all that is in use there, and the rest.");
    sample(out, "dsad_device_memory_bytes", srv_counter_get(&meter->memory_used), "state=\"%s\"", "used");
    sample(out, "dsad_device_memory_bytes", srv_counter_get(&meter->memory_free), "state=\"%s\"", "free");
    head(out, "dsad_device_errors_total", "counter", "Errors that retired the device, by the driver's code.");
    if (srv_counter_get(&meter->n_device_errors) > 0)
        sample(out, "dsad_device_errors_total", srv_counter_get(&meter->n_device_errors),
               "code=\"%" PRIu64 "\"", code);
}

static void write_health(const struct srv_health *health, FILE *out)
{
    uint64_t now = srv_now_us();

    single(out, "dsad_ready", "gauge", "1 while dsad wants work.",
           srv_health_ask(health, SRV_PROBE_READY, now, NULL));
    single(out, "dsad_live", "gauge", "0 when only a restart can help.",
           srv_health_ask(health, SRV_PROBE_LIVE, now, NULL));
    single(out, "dsad_draining", "gauge", "1 from SIGTERM or Drain on.", atomic_load(&health->is_draining));
    single(out, "dsad_worker_stuck", "gauge", "1 while the worker is at one thing for longer than watchdog.",
           atomic_load(&health->is_stuck));
}

/* ---- the process ---------------------------------------------------------------------------------------- */

static uint64_t count_open_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    uint64_t n = 0;

    if (!dir)
        return 0;
    while (readdir(dir))
        n++;
    closedir(dir);
    return n > 3 ? n - 3 : 0; /* ".", ".." and the folder's own */
}

/* Fields 22 to 24 of /proc/self/stat: start in ticks after boot, virtual bytes, resident pages. */
static bool read_stat(uint64_t *start_ticks_p, uint64_t *virtual_p, uint64_t *pages_p)
{
    char text[1024];
    FILE *file = fopen("/proc/self/stat", "r");
    size_t n = file ? fread(text, 1, sizeof(text) - 1, file) : 0;
    const char *at;

    if (file)
        fclose(file);
    text[n] = '\0';
    at = strrchr(text, ')'); /* the name before it may hold anything */
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    return at && sscanf(at, "%" SCNu64 "%" SCNu64 "%" SCNu64, start_ticks_p, virtual_p, pages_p) == 3;
}

static void write_process(FILE *out)
{
    struct rlimit limit = {0, 0};
    struct rusage usage;
    struct timespec now, up;
    uint64_t start_ticks, virtual_bytes, pages;

    single(out, "process_open_fds", "gauge", "Open file descriptors.", count_open_fds());
    getrlimit(RLIMIT_NOFILE, &limit);
    single(out, "process_max_fds", "gauge", "Limit on open file descriptors.", limit.rlim_cur);
    if (getrusage(RUSAGE_SELF, &usage) == 0) {
        head(out, "process_cpu_seconds_total", "counter", "CPU time, user and system.");
        fprintf(out, "process_cpu_seconds_total %.6f\n",
                (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec)
                    + (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6);
    }
    if (!read_stat(&start_ticks, &virtual_bytes, &pages))
        return;
    single(out, "process_resident_memory_bytes", "gauge", "Resident memory.",
           pages * (uint64_t)sysconf(_SC_PAGESIZE));
    single(out, "process_virtual_memory_bytes", "gauge", "Virtual memory.", virtual_bytes);
    clock_gettime(CLOCK_REALTIME, &now);
    clock_gettime(CLOCK_BOOTTIME, &up);
    head(out, "process_start_time_seconds", "gauge", "Start of the process, Unix time.");
    fprintf(out, "process_start_time_seconds %.2f\n",
            (double)(now.tv_sec - up.tv_sec) + (double)(now.tv_nsec - up.tv_nsec) * 1e-9
                + (double)start_ticks / (double)sysconf(_SC_CLK_TCK));
}

void srv_metrics_write(const struct srv_metrics *metrics, const struct srv_health *health, FILE *out)
{
    const struct srv_worker *worker = atomic_load(&metrics->worker);

    head(out, "dsad_build_info", "gauge", "1; which build this is and what it serves.");
    sample(out, "dsad_build_info", 1, "version=\"%s\",commit=\"%s\",device=\"%s\",layout=\"%s\"",
           DSA_VERSION_STRING, DSA_COMMIT, metrics->device, metrics->layout);
    write_health(health, out);
    write_requests(metrics, out);
    write_gauges(&metrics->gauges, out);
    if (worker)
        write_worker(metrics, worker, out);
    write_process(out);
}
