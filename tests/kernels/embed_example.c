/* The kernels library on its own: three rows into a cache, one query, one answer. Includes dsk.h and
 * nothing else of this project, and links libdsk alone; built with the tests so that it stays true. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "dsk.h"

enum { n_rows = 3, h_q = 1, d = 256 };

static uint16_t rows[n_rows][d], q[h_q][d];
static float out[h_q][d], lse[h_q];

static dsk_status run(struct dsk_device *dev, struct dsk_stream *s, struct dsk_err *err)
{
    const struct dsk_layout *layout = dsk_layout_get(DSK_LAYOUT_SCALED_256_0);
    const int32_t slots[n_rows] = {0, 1, 2}, indices[n_rows] = {2, 0, -1};
    struct dsk_kv_view kv = {.page_pitch_bytes = (int64_t)DSK_PAGE_TOKENS * layout->row_bytes,
                             .n_slots = DSK_PAGE_TOKENS,
                             .layout = layout->id};
    struct dsk_append_args append = {.rows = (uint64_t)(uintptr_t)rows,
                                     .row_bytes = sizeof(rows[0]),
                                     .slots = slots,
                                     .n_rows = n_rows,
                                     .rule = DSK_RULE_POW2};
    struct dsk_attend_seg seg = {.q = (uint64_t)(uintptr_t)q,
                                 .out = (uint64_t)(uintptr_t)out,
                                 .lse = (uint64_t)(uintptr_t)lse,
                                 .indices = (uint64_t)(uintptr_t)indices,
                                 .q_row_bytes = sizeof(q),
                                 .q_head_bytes = sizeof(q[0]),
                                 .out_row_bytes = sizeof(out),
                                 .out_head_bytes = sizeof(out[0]),
                                 .lse_row_bytes = sizeof(lse),
                                 .indices_row_bytes = sizeof(indices),
                                 .n_rows = 1,
                                 .topk = n_rows,
                                 .space = DSK_SPACE_PHYSICAL,
                                 .softmax_scale = 1};
    struct dsk_attend_args attend = {.segs = &seg, .n_segs = 1, .h_q = h_q, .out_dtype = DSK_DTYPE_F32};
    dsk_status status = dsk_mem_alloc(dev, (uint64_t)kv.page_pitch_bytes, &kv.base);

    if (status != DSK_OK)
        return status;
    append.kv = attend.kv = kv;
    status = dsk_append(s, &append, err);
    if (status == DSK_OK)
        status = dsk_attend(s, &attend, err);
    if (status == DSK_OK)
        status = dsk_stream_sync(s);
    dsk_mem_free(dev, kv.base);
    return status;
}

int main(void)
{
    struct dsk_device_config config = {.kind = DSK_DEVICE_CPU};
    struct dsk_err err = {.status = DSK_OK};
    struct dsk_device *dev;
    struct dsk_stream *s;
    dsk_status status = dsk_device_open(&config, &dev, &err);
    int is_right;

    if (status != DSK_OK) {
        fprintf(stderr, "open: %s %s\n", dsk_status_text(status), err.text);
        return 1;
    }
    for (int i = 0; i < n_rows; i++)
        rows[i][7] = dsk_bf16_from_f32((float)i);
    status = dsk_stream_create(dev, &s);
    if (status == DSK_OK) {
        status = run(dev, s, &err);
        dsk_stream_destroy(s);
    }
    printf("%s: out[7] = %g, lse = %g on %s\n", dsk_status_text(status), (double)out[0][7], (double)lse[0],
           dsk_device_get_info(dev)->name);
    dsk_device_close(dev);
    /* q is 0, so that both listed rows weigh the same: the mean of 2 and 0, and ln 2. */
    is_right = status == DSK_OK && out[0][7] == 1 && fabsf(lse[0] - 0.6931472f) < 1e-6f;
    printf("%d passed, %d failed\n", is_right, !is_right);
    return is_right ? 0 : 1;
}
