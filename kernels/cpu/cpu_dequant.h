/* cpu_dequant.h - one cache row to fp32, given an instruction set's decode_scaled (false: cannot, see there)
 * and decode_bf16. Included by cpu_attend_avx2.c and cpu_attend_avx512.c. Loads are unaligned: a row may
 * start at any multiple of 8. */

static void dequant(const struct dsk_layout *layout, float raw_scale, const uint8_t *row, float *dst)
{
    const uint8_t *scales = row + layout->latent;
    bool ok = true;

    if (layout->id == DSK_LAYOUT_RAW_512_64) {
        ok = decode_scaled(dst, row, layout->d_qk, raw_scale);
    } else if (layout->n_groups == 0) {
        decode_bf16(dst, row, layout->d_qk);
    } else {
        for (int g = 0; g < layout->n_groups; g++) {
            float scale;

            memcpy(&scale, scales + sizeof(scale) * (size_t)g, sizeof(scale));
            ok &= decode_scaled(dst + g * DSK_GROUP_VALUES, row + g * DSK_GROUP_VALUES, DSK_GROUP_VALUES,
                                scale);
        }
        decode_bf16(dst + layout->latent, scales + sizeof(float) * (size_t)layout->n_groups, layout->rope);
    }
    if (!ok) /* rare: rows that no append of ours wrote */
        dsk_cpu_isa_generic.dequant(layout, raw_scale, row, dst);
}
