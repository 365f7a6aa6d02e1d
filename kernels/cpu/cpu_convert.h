/* cpu_convert.h - the conversions that appends and readers run over whole rows, as plain loops: every
 * instruction set's file includes this and its flags vectorise them. The operations are exact or IEEE, so
 * the bytes are the same on all of them. */

/* e4m3(x / scale), NaN as 0: replaced before the division, since compilers do not vectorise a division whose
 * result they may skip. */
static void quantise(const uint16_t *x, int n, float scale, uint8_t *dst)
{
    for (int i = 0; i < n; i++) {
        uint16_t bits = (x[i] & 0x7fffu) <= 0x7f80u ? x[i] : 0;

        dst[i] = num_e4m3_from_number(num_bf16_to_f32(bits) / scale);
    }
}

static void round_bf16(const float *x, int n, uint16_t *dst)
{
    for (int i = 0; i < n; i++)
        dst[i] = num_bf16_from_f32(x[i]);
}

static void store_f32(const float *x, float factor, int n, float *dst)
{
    for (int i = 0; i < n; i++)
        dst[i] = x[i] * factor;
}

static void store_bf16(const float *x, float factor, int n, uint16_t *dst)
{
    for (int i = 0; i < n; i++)
        dst[i] = num_bf16_from_f32(x[i] * factor);
}

static uint16_t max_bits(const uint16_t *q, int n)
{
    int16_t max = 0; /* magnitudes fit, and every processor has a signed maximum */

    for (int i = 0; i < n; i++) {
        int16_t bits = (int16_t)(q[i] & 0x7fff);

        max = bits > max ? bits : max;
    }
    return (uint16_t)max;
}
