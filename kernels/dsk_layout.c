/* dsk_layout.c - the table of row layouts: byte counts and widths of every id in dsk_format.h. Pure. */
#include <string.h>

#include "dsk.h"

#define BF16_ROW(values) ((values)*2)

/* Indexed by id; entry 0 is never a layout. */
static const struct dsk_layout LAYOUTS[DSK_LAYOUT_COUNT] = {
    [DSK_LAYOUT_SCALED_512_64] = {"scaled_512_64", DSK_LAYOUT_SCALED_512_64, sizeof(struct dsk_kv_row_512_64),
                                  512, 64, 4, 576, 512},
    [DSK_LAYOUT_SCALED_512_0] = {"scaled_512_0", DSK_LAYOUT_SCALED_512_0, sizeof(struct dsk_kv_row_512_0),
                                 512, 0, 4, 512, 512},
    [DSK_LAYOUT_SCALED_256_0] = {"scaled_256_0", DSK_LAYOUT_SCALED_256_0, sizeof(struct dsk_kv_row_256_0),
                                 256, 0, 2, 256, 256},
    [DSK_LAYOUT_BF16_576] = {"bf16_576", DSK_LAYOUT_BF16_576, BF16_ROW(576), 512, 64, 0, 576, 512},
    [DSK_LAYOUT_BF16_512] = {"bf16_512", DSK_LAYOUT_BF16_512, BF16_ROW(512), 512, 0, 0, 512, 512},
    [DSK_LAYOUT_BF16_256] = {"bf16_256", DSK_LAYOUT_BF16_256, BF16_ROW(256), 256, 0, 0, 256, 256},
    [DSK_LAYOUT_RAW_512_64] = {"raw_512_64", DSK_LAYOUT_RAW_512_64, sizeof(struct dsk_kv_row_raw_512_64), 512,
                               64, 0, 576, 512},
};

const struct dsk_layout *dsk_layout_get(uint32_t id)
{
    if (id == DSK_LAYOUT_NONE || id >= DSK_LAYOUT_COUNT)
        return NULL;
    return &LAYOUTS[id];
}

const struct dsk_layout *dsk_layout_by_name(const char *name)
{
    if (name == NULL)
        return NULL;
    for (uint32_t id = 1; id < DSK_LAYOUT_COUNT; id++) {
        if (strcmp(LAYOUTS[id].name, name) == 0)
            return &LAYOUTS[id];
    }
    return NULL;
}
