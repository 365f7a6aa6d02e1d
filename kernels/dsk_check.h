/* dsk_check.h - the argument rules of dsk.h, one function per operation. Private to kernels/.
 * Pure: reads the argument structs and host arrays they name, never device memory. Any thread.
 * Each returns DSK_OK or fills err (NULL is fine) and returns DSK_E_BAD_ARGUMENT or DSK_E_SLOT_RANGE. */
#ifndef DSK_CHECK_H
#define DSK_CHECK_H

#include "dsk.h"

DSK_MUST_CHECK dsk_status dsk_check_config(const struct dsk_device_config *config, struct dsk_err *err);
DSK_MUST_CHECK dsk_status dsk_check_append(const struct dsk_append_args *args, struct dsk_err *err);
DSK_MUST_CHECK dsk_status dsk_check_read(const struct dsk_read_args *args, struct dsk_err *err);
DSK_MUST_CHECK dsk_status dsk_check_gather(const struct dsk_gather_args *args, struct dsk_err *err);
DSK_MUST_CHECK dsk_status dsk_check_map(const struct dsk_map_args *args, struct dsk_err *err);
DSK_MUST_CHECK dsk_status dsk_check_attend(const struct dsk_attend_args *args, struct dsk_err *err);
DSK_MUST_CHECK dsk_status dsk_check_merge(const struct dsk_merge_args *args, struct dsk_err *err);
DSK_MUST_CHECK dsk_status dsk_check_copy_rows(const struct dsk_copy_rows_args *args, struct dsk_err *err);
DSK_MUST_CHECK dsk_status dsk_check_shape(const struct dsk_attend_shape *shape, struct dsk_err *err);

/* Does the gather branch of this call fill the workspace by entry (true) or take the whole plane (false)? */
static inline bool dsk_gather_is_by_entry(const struct dsk_gather_args *args)
{
    if (args->branch != 0)
        return args->branch == 1;
    return (int64_t)args->n_rows * args->topk < args->kv.n_slots;
}

#endif /* DSK_CHECK_H */
