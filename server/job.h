/* job.h - one piece of work for a device, as a message from L to W and back.
 *
 * L fills a job and submits it; from then on W owns it, until the piece with is_last comes back. Pieces of the same
 * job may be in L's hands while W works on later ones: of a submitted job L reads only what it wrote itself, and of a
 * piece what that piece carries. The one thing both touch is `cancelled`.
 * Pointers into client memory were checked by L and stay valid until the last piece is back. What they point to
 * can change at any time (shared memory), so W and the kernels check what they read where they use it. */
#ifndef SERVER_JOB_H
#define SERVER_JOB_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/core/batcher.h"
#include "server/core/err.h"
#include "server/core/kvpool.h"

enum srv_op {
    SRV_OP_CREATE,
    SRV_OP_FORK,
    SRV_OP_TRUNCATE,
    SRV_OP_RELEASE,
    SRV_OP_GET,
    SRV_OP_APPEND,
    SRV_OP_IMPORT,
    SRV_OP_EXPORT,
    SRV_OP_ATTEND,
    SRV_OP_STATS,
    SRV_OP_END_SESSION,
};

/* Rows to add: bf16 to quantise, or stored bytes (IMPORT). Also the `append` of an attend. */
struct srv_job_append {
    uint64_t sequence; /* 0 = none */
    uint32_t layer;
    uint32_t n_layers;
    uint32_t n_tokens;
    uint32_t rule; /* DSK_RULE_* */
    bool strict;
    uint64_t position; /* UINT64_MAX = not given */
    const void *rows;
    int64_t row_bytes;   /* pitch of tokens */
    int64_t layer_bytes; /* pitch of layers */
};

struct srv_job_segment {
    uint64_t sequence; /* 0: the whole pool (physical) */
    uint32_t n_rows;
    uint32_t row_begin; /* sum of n_rows before */
};

struct srv_job_attend {
    uint32_t layer;
    uint32_t h_q;
    uint32_t topk;
    uint32_t space;
    uint32_t out_dtype;
    uint32_t flags;
    float softmax_scale;
    uint32_t n_rows;
    uint32_t n_segments;
    struct srv_job_segment *segments;
    const void *q, *indices, *lengths, *sink; /* lengths and sink may be NULL */
    void *out, *lse;                          /* lse may be NULL */
    int64_t q_row_bytes, q_head_bytes;
    int64_t indices_row_bytes;
    int64_t out_row_bytes, out_head_bytes, lse_row_bytes;
    struct srv_job_append append;
};

/* What CREATE, FORK, TRUNCATE and GET report. layer_tokens and pages are L's arrays, filled for GET when not NULL. */
struct srv_job_sequence {
    uint64_t id;       /* in; CREATE and FORK: out */
    uint64_t n_tokens; /* in (FORK, TRUNCATE); out: tokens that every layer has */
    uint64_t n_pages;
    uint64_t n_shared;
    uint64_t *layer_tokens; /* [n_layers] */
    int32_t *pages;         /* [max_pages] */
    uint64_t max_pages;
};

struct srv_job_export {
    uint64_t sequence;
    uint32_t layer;
    bool as_bf16;
    uint64_t first;
    uint32_t n_tokens; /* in: at most; out: exported */
    uint64_t end;      /* the layer must reach this far; UINT64_MAX: no matter */
    uint8_t *out;
    uint64_t layer_tokens; /* out */
};

struct srv_job_stats {
    struct srv_kvpool_stats pool;
    uint64_t n_sequences;
    uint64_t n_batches;
    uint32_t queue_depth;
};

/* One answer. A job that fails gets one piece, with its error. */
struct srv_piece {
    struct srv_job *job;
    uint32_t row_begin;
    uint32_t n_rows;
    uint32_t batch_rows;
    bool is_last;
    uint64_t n_invalid;
    uint64_t n_nonfinite;
    uint64_t n_tokens;
    uint64_t launch_us; /* clock at the launch */
    uint64_t done_us;
    struct srv_err err; /* err.code DSA_OK when fine */
};

/* When things happened to a job: monotonic us, 0 = they did not. L may read them once the last piece is back.
 *   submitted ── waits ──► begun ── binding, packing, copies over ──► launched ── device, copies back ──► done
 * A request of several launches has the first one's begun and launched; device_us and copy_us are sums over all of them. */
struct srv_job_stamps {
    uint64_t submitted_us; /* L put it into the ring */
    uint64_t begun_us;     /* W took its first rows out of the queue; 0: it ended while it waited */
    uint64_t launched_us;  /* the first launch was given to the device; begun_us for what is not an attend */
    uint64_t done_us;      /* its last piece was filled */
    uint64_t device_us;    /* from launches to their ends, the copies back included */
    uint64_t copy_us;      /* packing and copies over, and unpacking; 0 where tensors are used in place */
    uint32_t n_launches;
};

struct srv_job {
    struct srv_batch_node node; /* first: the batcher hands nodes back */
    enum srv_op op;
    uint64_t session; /* number */
    uint64_t arrival_us;
    struct srv_job_stamps stamps; /* W, but for submitted_us */
    void *owner;                  /* L's */
    atomic_bool
        cancelled; /* set by L at any time, read by W before each launch. Relaxed: a cancel may lose the race */
    struct srv_batch_access *accesses;
    uint32_t n_pieces; /* room in pieces: 1, or ceil(n_rows / chunk_rows) */
    uint32_t i_piece;  /* W: next to use */
    struct srv_piece *pieces;
    uint64_t n_nonfinite;            /* W: of the append, reported with the first piece */
    uint64_t n_tokens;               /* W */
    bool append_done;                /* W */
    struct srv_job *w_prev, *w_next; /* W: all jobs it holds */
    union {
        struct srv_job_sequence sequence;
        struct srv_job_append append;
        struct srv_job_export export;
        struct srv_job_attend attend;
        struct srv_job_stats stats;
    } u;
};

#endif /* SERVER_JOB_H */
