/* svc_slow.c - the slow-request log: one line for each request that took longer than slow-request. A request of an Attend
 * stream is timed by itself; of the other calls, those that end by themselves. */
#include <inttypes.h>

#include "server/log.h"
#include "server/status.h"
#include "server/svc.h"

static bool is_slow(const struct svc *svc, uint64_t took_us)
{
    uint64_t limit_us = svc->config->slow_request_us;

    return limit_us > 0 && took_us >= limit_us;
}

/* How long it waited, how long it was put together. */
static uint64_t queue_us(const struct srv_job_stamps *stamps)
{
    return (stamps->begun_us ? stamps->begun_us : stamps->done_us) - stamps->submitted_us;
}

static uint64_t launch_us(const struct srv_job_stamps *stamps)
{
    return stamps->launched_us > stamps->begun_us ? stamps->launched_us - stamps->begun_us : 0;
}

static uint64_t count_rows(const struct srv_job *job)
{
    switch (job->op) {
    case SRV_OP_ATTEND:
        return job->u.attend.n_rows;
    case SRV_OP_APPEND:
    case SRV_OP_IMPORT:
        return (uint64_t)job->u.append.n_tokens * job->u.append.n_layers;
    case SRV_OP_EXPORT:
        return job->u.export.n_tokens;
    case SRV_OP_CREATE:
    case SRV_OP_FORK:
    case SRV_OP_TRUNCATE:
    case SRV_OP_RELEASE:
    case SRV_OP_GET:
    case SRV_OP_STATS:
    case SRV_OP_END_SESSION:
        break;
    }
    return 0;
}

void svc_log_slow_request(const struct svc_request *request, const struct svc_about *about, dsa_status status,
                          uint64_t took_us)
{
    const struct srv_job *job = &request->job;
    const struct srv_job_stamps *stamps = &job->stamps;

    if (!is_slow(request->svc, took_us))
        return;
    srv_log(SRV_LOG_WARN,
            "slow request method=/dsa.v1.SparseAttention/Attend session=%" PRIu64 " sequences=%" PRIu32
            " rows=%" PRIu64 " queue_us=%" PRIu64 " launch_us=%" PRIu64 " device_us=%" PRIu64
            " copy_us=%" PRIu64 " launches=%" PRIu32 " total_us=%" PRIu64
            " code=%s reason=%s call_id=%" PRIu64 " request_id=%" PRIu64 " trace_id=%s",
            job->session, job->node.n_accesses, count_rows(job), queue_us(stamps), launch_us(stamps),
            stamps->device_us, stamps->copy_us, stamps->n_launches, took_us,
            srv_metrics_code_name(srv_status_grpc_code(status)),
            status == DSA_OK ? NULL : srv_status_reason(status), about->call_id, about->request_id,
            srv_trace_id(about->trace));
}

void svc_note_job(struct rpc_call *call, const struct srv_job *job)
{
    uint64_t *notes = rpc_call_notes(call);

    notes[SVC_NOTE_SESSION] = job->session;
    notes[SVC_NOTE_SEQUENCES] = job->node.n_accesses;
    notes[SVC_NOTE_ROWS] += count_rows(job);
    notes[SVC_NOTE_QUEUE_US] += queue_us(&job->stamps);
    notes[SVC_NOTE_LAUNCH_US] += launch_us(&job->stamps);
    notes[SVC_NOTE_DEVICE_US] += job->stamps.device_us;
    notes[SVC_NOTE_COPY_US] += job->stamps.copy_us;
}

void svc_call_ended_log(struct rpc_call *call, int code, uint64_t took_us)
{
    const uint64_t *notes = rpc_call_notes(call);

    if (rpc_call_is_stream(call) || !is_slow(rpc_call_service(call), took_us))
        return;
    srv_log(SRV_LOG_WARN,
            "slow request method=%s session=%" PRIu64 " sequences=%" PRIu64 " rows=%" PRIu64
            " queue_us=%" PRIu64 " launch_us=%" PRIu64 " device_us=%" PRIu64 " copy_us=%" PRIu64
            " total_us=%" PRIu64 " code=%s call_id=%" PRIu64 " trace_id=%s",
            rpc_call_path(call), notes[SVC_NOTE_SESSION], notes[SVC_NOTE_SEQUENCES], notes[SVC_NOTE_ROWS],
            notes[SVC_NOTE_QUEUE_US], notes[SVC_NOTE_LAUNCH_US], notes[SVC_NOTE_DEVICE_US],
            notes[SVC_NOTE_COPY_US], took_us, srv_metrics_code_name(code), rpc_call_number(call),
            srv_trace_id(rpc_call_trace(call)));
}
