#include "server/worker_stage.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "server/clock.h"

#define ALIGN      256u
#define PAGE_BYTES 4096u

static dsa_status open_side(struct worker_stage *stage, struct stage_side *side, uint64_t bytes,
                            struct srv_err *err)
{
    uint64_t pinned;

    side->size = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    if (posix_memalign((void **)&side->host, PAGE_BYTES, side->size) != 0)
        side->host = NULL;
    /* Pinned, so that copies run at the bus's speed and without the driver's own staging. */
    if (!side->host || dsk_host_register(stage->device, side->host, side->size, &pinned) != DSK_OK
        || dsk_mem_alloc(stage->device, side->size, &side->device) != DSK_OK)
        return srv_fail(err, DSA_E_NO_MEMORY, "batch-rows", "%" PRIu64 " bytes", side->size,
                        "no memory to stage the tensors of a launch");
    return DSA_OK;
}

static void close_side(struct worker_stage *stage, struct stage_side *side)
{
    if (!side->host)
        return;
    dsk_mem_free(stage->device, side->device);
    dsk_host_unregister(stage->device, side->host);
    free(side->host);
}

dsa_status stage_open(struct worker_stage *stage, struct dsk_device *device, struct dsk_stream *stream,
                      bool is_direct, uint64_t in_bytes, uint64_t out_bytes, uint32_t max_returns,
                      struct srv_err *err)
{
    dsa_status rc;

    memset(stage, 0, sizeof(*stage));
    stage->device = device;
    stage->stream = stream;
    stage->is_direct = is_direct;
    if (is_direct)
        return DSA_OK;
    stage->max_returns = max_returns;
    stage->returns = calloc(max_returns, sizeof(*stage->returns));
    if (!stage->returns)
        return srv_fail(err, DSA_E_NO_MEMORY, "worker", "%s", "", "no memory for the stage");
    rc = open_side(stage, &stage->in, in_bytes, err);
    return rc == DSA_OK ? open_side(stage, &stage->out, out_bytes, err) : rc;
}

void stage_close(struct worker_stage *stage)
{
    close_side(stage, &stage->in);
    close_side(stage, &stage->out);
    free(stage->returns);
    memset(stage, 0, sizeof(*stage));
}

void stage_reset(struct worker_stage *stage)
{
    stage->in.used = stage->out.used = 0;
    stage->n_returns = 0;
}

static struct stage_view direct_view(const struct stage_block *block)
{
    return (struct stage_view){(uint64_t)(uintptr_t)block->host, block->outer_bytes, block->inner_bytes};
}

/* Dense room on one side. Extents were checked against limits, so the product is small. */
static bool reserve(struct stage_side *side, const struct stage_block *block, uint64_t *offset_p,
                    struct stage_view *view_p)
{
    uint64_t bytes = block->n_outer * block->n_inner * block->n_bytes;
    uint64_t offset = (side->used + ALIGN - 1) / ALIGN * ALIGN;

    if (offset > side->size || bytes > side->size - offset)
        return false;
    side->used = offset + bytes;
    *offset_p = offset;
    *view_p = (struct stage_view){side->device + offset, (int64_t)(block->n_inner * block->n_bytes),
                                  (int64_t)block->n_bytes};
    return true;
}

/* Between a strided block in client memory and its dense image. */
static void move(const struct stage_block *block, uint8_t *dense, bool to_dense)
{
    uint8_t *base = (uint8_t *)(uintptr_t)block->host;

    for (uint64_t i = 0; i < block->n_outer; i++) {
        for (uint64_t j = 0; j < block->n_inner; j++) {
            uint8_t *strided = base + (int64_t)i * block->outer_bytes + (int64_t)j * block->inner_bytes;

            memcpy(to_dense ? dense : strided, to_dense ? strided : dense, block->n_bytes);
            dense += block->n_bytes;
        }
    }
}

bool stage_in(struct worker_stage *stage, const struct stage_block *block, struct stage_view *view_p)
{
    uint64_t offset;

    if (!block->host) {
        *view_p = (struct stage_view){0};
        return true;
    }
    if (stage->is_direct) {
        *view_p = direct_view(block);
        return true;
    }
    if (!reserve(&stage->in, block, &offset, view_p))
        return false;
    move(block, stage->in.host + offset, true);
    return true;
}

bool stage_out(struct worker_stage *stage, const struct stage_block *block, struct stage_view *view_p)
{
    struct stage_return *back;

    if (!block->host) {
        *view_p = (struct stage_view){0};
        return true;
    }
    if (stage->is_direct) {
        *view_p = direct_view(block);
        return true;
    }
    if (stage->n_returns == stage->max_returns)
        return false;
    back = &stage->returns[stage->n_returns];
    if (!reserve(&stage->out, block, &back->offset, view_p))
        return false;
    back->block = *block;
    stage->n_returns++;
    return true;
}

dsa_status stage_push(struct worker_stage *stage, struct srv_err *err)
{
    if (stage->is_direct || stage->in.used == 0)
        return DSA_OK;
    if (dsk_copy_in(stage->stream, stage->in.device, stage->in.host, stage->in.used) != DSK_OK)
        return srv_fail(err, DSA_E_DEVICE_LOST, "", "%s", "", "copying inputs to the device failed");
    return DSA_OK;
}

dsa_status stage_sync(struct worker_stage *stage, struct srv_err *err)
{
    if (stage->is_direct)
        return DSA_OK;
    if ((stage->out.used > 0
         && dsk_copy_out(stage->stream, stage->out.host, stage->out.device, stage->out.used) != DSK_OK)
        || dsk_stream_sync(stage->stream) != DSK_OK)
        return srv_fail(err, DSA_E_DEVICE_LOST, "", "%s", "", "the device failed");
    return DSA_OK;
}

void stage_return(struct worker_stage *stage)
{
    for (uint32_t i = 0; i < stage->n_returns; i++)
        move(&stage->returns[i].block, stage->out.host + stage->returns[i].offset, false);
}

dsa_status stage_pull(struct worker_stage *stage, struct srv_err *err)
{
    dsa_status rc = stage_sync(stage, err);

    if (rc == DSA_OK)
        stage_return(stage);
    return rc;
}
