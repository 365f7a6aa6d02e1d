/* worker_stage.h - gets client memory to the device and results back. Private to server/worker*.c; everything is [W].
 *
 * Direct (CPU): the device reads host memory where it lies; nothing is copied and strides stay as they are.
 * Staged (GPU): inputs are packed densely into one pinned buffer and go over in one copy; results come back in one copy
 * and are spread to where they belong. Use: reset, in/out for each tensor, push, launch, pull. */
#ifndef SERVER_WORKER_STAGE_H
#define SERVER_WORKER_STAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/dsk.h"
#include "server/core/err.h"

/* A block of [n_outer, n_inner] runs of n_bytes. */
struct stage_block {
    const void *host;
    uint64_t n_outer, n_inner, n_bytes;
    int64_t outer_bytes, inner_bytes; /* pitches in host memory */
};

/* The same block as the device sees it. */
struct stage_view {
    uint64_t addr;
    int64_t outer_bytes, inner_bytes;
};

struct stage_side {
    uint8_t *host;
    uint64_t device;
    uint64_t size, used;
};

struct stage_return {
    struct stage_block block;
    uint64_t offset;
};

struct worker_stage {
    struct dsk_device *device;
    struct dsk_stream *stream;
    bool is_direct;
    struct stage_side in, out;
    struct stage_return *returns; /* [max_returns] */
    uint32_t n_returns, max_returns;
};

/* Direct stages take no memory. DSA_E_NO_MEMORY names the size. */
SRV_MUST_CHECK dsa_status stage_open(struct worker_stage *stage, struct dsk_device *device,
                                     struct dsk_stream *stream, bool is_direct, uint64_t in_bytes,
                                     uint64_t out_bytes, uint32_t max_returns, struct srv_err *err);
void stage_close(struct worker_stage *stage);

void stage_reset(struct worker_stage *stage);
/* False: no room. A NULL host gives an all-zero view. */
SRV_MUST_CHECK bool stage_in(struct worker_stage *stage, const struct stage_block *block,
                             struct stage_view *view_p);
SRV_MUST_CHECK bool stage_out(struct worker_stage *stage, const struct stage_block *block,
                              struct stage_view *view_p);
/* Starts the inputs on their way. */
SRV_MUST_CHECK dsa_status stage_push(struct worker_stage *stage, struct srv_err *err);
/* Waits for the stream; then stage_return puts results where they belong. */
SRV_MUST_CHECK dsa_status stage_sync(struct worker_stage *stage, struct srv_err *err);
void stage_return(struct worker_stage *stage);
/* Both. */
SRV_MUST_CHECK dsa_status stage_pull(struct worker_stage *stage, struct srv_err *err);

#endif /* SERVER_WORKER_STAGE_H */
