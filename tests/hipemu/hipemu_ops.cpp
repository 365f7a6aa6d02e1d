/* hipemu_ops.cpp - number formats, exchanges between lanes, and the matrix instructions with AMD's lane layouts. */
#include <math.h>

#include "hipemu_wave.h"

/* ---- numbers -------------------------------------------------------------------------------- */

static float decode(uint8_t byte, bool is_fnuz)
{
    const int exponent = byte >> 3 & 15, mantissa = byte & 7, bias = is_fnuz ? 8 : 7;
    const float mag = exponent == 0 ? ldexpf((float)mantissa, -2 - bias) : ldexpf((float)(8 + mantissa), exponent - bias - 3);

    if (is_fnuz ? byte == 0x80 : (byte & 0x7f) == 0x7f)
        return NAN;
    return (byte & 0x80) != 0 ? -mag : mag;
}

struct tables {
    float value[2][256];
    tables()
    {
        for (int i = 0; i < 256; i++) {
            value[0][i] = decode((uint8_t)i, false);
            value[1][i] = decode((uint8_t)i, true);
        }
    }
};

static const float *table(bool is_fnuz)
{
    static const tables all;

    return all.value[is_fnuz];
}

float hipemu_fp8_to_f32(uint8_t byte, bool is_fnuz)
{
    return table(is_fnuz)[byte];
}

uint8_t hipemu_fp8_from_f32(float x, bool is_fnuz)
{
    const float *value = table(is_fnuz);
    const uint8_t top = is_fnuz ? 0x7f : 0x7e, sign = signbit(x) ? 0x80 : 0;
    const float mag = fabsf(x);
    int code = top;

    if (!(mag <= value[top] * (1 + 1 / 32.0f))) /* NaN, or past the halfway point of what would come next */
        return is_fnuz ? 0x80 : 0x7f;
    while (code > 0 && value[code] > mag)
        code--;
    if (code < top) {
        const float below = mag - value[code], above = value[code + 1] - mag;

        code += above < below || (above == below && (code & 1) != 0);
    }
    return (uint8_t)(code == 0 && is_fnuz ? 0 : sign | code);
}

namespace hipemu {

static float bf16(uint16_t bits)
{
    const uint32_t word = (uint32_t)bits << 16;
    float x;

    memcpy(&x, &word, sizeof(x));
    return x;
}

float from_fp8(uint8_t byte, bool is_fnuz)
{
    return table(is_fnuz)[byte];
}

uint32_t to_fp8_pair(float lo, float hi, uint32_t old, bool is_high, bool is_fnuz)
{
    const uint32_t both = hipemu_fp8_from_f32(lo, is_fnuz) | (uint32_t)hipemu_fp8_from_f32(hi, is_fnuz) << 8;

    return is_high ? (old & 0xffffu) | both << 16 : (old & 0xffff0000u) | both;
}

static uint32_t to_bf16(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

uint32_t to_bf16_pair(float lo, float hi)
{
    return to_bf16(lo) | to_bf16(hi) << 16;
}

/* ---- exchanges ------------------------------------------------------------------------------ */

void run_nothing(wave &w, const int *imm)
{
    (void)w;
    (void)imm;
}

static uint32_t word(const void *p)
{
    uint32_t x;

    memcpy(&x, p, sizeof(x));
    return x;
}

/* out of lane i = first operand of lane source(i), or what otherwise(i) says where that is negative. */
template <class SOURCE, class OTHERWISE>
static void exchange(wave &w, SOURCE source, OTHERWISE otherwise)
{
    uint32_t in[HIPEMU_WAVE];

    for (int i = 0; i < w.n; i++)
        in[i] = w.lanes[i]->state == LANE_GONE ? 0 : word(w.lanes[i]->in[0]);
    for (int i = 0; i < w.n; i++) {
        lane *l = w.lanes[i];
        int from;
        uint32_t x;

        if (l->state == LANE_GONE)
            continue;
        from = source(i);
        if (from >= w.n || (from >= 0 && w.lanes[from]->state == LANE_GONE))
            fail_at("a lane reads one that is not there", l, from < w.n ? w.lanes[from] : nullptr);
        x = from >= 0 ? in[from] : otherwise(i);
        memcpy(l->out, &x, sizeof(x));
    }
}

static uint32_t nothing(int)
{
    return 0;
}

void run_index(wave &w, const int *)
{
    int first = 0;

    while (first < w.n && w.lanes[first]->state == LANE_GONE)
        first++;
    exchange(
        w,
        [&](int i) {
            const int from = (int)word(w.lanes[i]->in[1]);

            return from < 0 ? first : from;
        },
        nothing);
}

/* Bit 15: any permutation within quads; else and, or, xor within 32 lanes. */
void run_swizzle(wave &w, const int *imm)
{
    const int offset = imm[0];

    exchange(
        w,
        [&](int i) {
            if ((offset & 0x8000) != 0)
                return (i & ~3) | (offset >> (2 * (i & 3)) & 3);
            return (i & 32) | ((((i & 31) & (offset & 31)) | (offset >> 5 & 31)) ^ (offset >> 10 & 31));
        },
        nothing);
}

static int dpp_source(int i, int control)
{
    const int row = i & ~15, at = i & 15, n = control & 15;

    if (control < 0x100) /* quad_perm */
        return (i & ~3) | (control >> (2 * (i & 3)) & 3);
    switch (control & ~15) {
    case 0x100: /* row_shl */
        return at + n < 16 ? i + n : -1;
    case 0x110: /* row_shr */
        return at - n >= 0 ? i - n : -1;
    case 0x120: /* row_ror */
        return row | ((at - n) & 15);
    default:
        break;
    }
    switch (control) {
    case 0x140: /* row_mirror */
        return row | (15 - at);
    case 0x141: /* row_half_mirror */
        return (i & ~7) | (7 - (i & 7));
    case 0x142: /* row_bcast:15 */
        return i >= 16 ? row - 1 : -1;
    case 0x143: /* row_bcast:31 */
        return i >= 32 ? 31 : -1;
    default:
        fail("DPP control that is not emulated");
    }
}

void run_dpp(wave &w, const int *imm)
{
    const int control = imm[0], rows = imm[1], banks = imm[2];
    const bool is_zero = imm[3] != 0;
    auto is_on = [&](int i) { return (rows >> (i / 16) & 1) != 0 && (banks >> (i / 4 % 4) & 1) != 0; };

    exchange(
        w, [&](int i) { return is_on(i) ? dpp_source(i, control) : -1; },
        [&](int i) { return is_zero && is_on(i) ? 0 : word(w.lanes[i]->in[1]); });
}

void run_ballot(wave &w, const int *)
{
    uint64_t mask = 0;

    for (int i = 0; i < w.n; i++) {
        if (w.lanes[i]->state != LANE_GONE && word(w.lanes[i]->in[0]) != 0)
            mask |= UINT64_C(1) << i;
    }
    for (int i = 0; i < w.n; i++) {
        if (w.lanes[i]->state != LANE_GONE)
            memcpy(w.lanes[i]->out, &mask, sizeof(mask));
    }
}

/* ---- matrices: D += A B, A [M][K], B [K][M], M 16 or 32 --------------------------------------- */

/* Depth k of an operand's element: consecutive within a lane, or (f8f6f4) two runs of 16 bytes, half the depth apart. */
static int depth_of(int kind, int k_all, int n_elements, int group, int e)
{
    return kind == MATRIX_F8F6F4 ? e / 16 * (k_all / 2) + 16 * group + e % 16 : group * n_elements + e;
}

void run_matrix(wave &w, const int *imm)
{
    const int m = imm[0], k_all = imm[1], kind = imm[2], n_elements = k_all * m / HIPEMU_WAVE;
    const bool is_fnuz = kind == MATRIX_FP8 && w.lanes[0]->op->imm[3] != 0;
    const float *value = table(is_fnuz);
    static float a[128][32], b[128][32], d[32][32];

    for (int l = 0; l < HIPEMU_WAVE; l++) {
        for (int e = 0; e < n_elements; e++) {
            const int k = depth_of(kind, k_all, n_elements, l / m, e);

            for (int which = 0; which < 2; which++) {
                const uint8_t *in = (const uint8_t *)w.lanes[l]->in[which];
                uint16_t half;

                if (kind == MATRIX_BF16)
                    memcpy(&half, in + 2 * e, sizeof(half));
                (which == 0 ? a : b)[k][l % m] = kind == MATRIX_BF16 ? bf16(half) : value[in[e]];
            }
        }
    }
    for (int l = 0; l < HIPEMU_WAVE; l++) {
        for (int r = 0; r < m * m / HIPEMU_WAVE; r++) {
            const int i = m == 16 ? 4 * (l / 16) + r : 8 * (r / 4) + 4 * (l / 32) + r % 4;

            memcpy(&d[i][l % m], (const float *)w.lanes[l]->in[2] + r, sizeof(float));
        }
    }
    for (int k = 0; k < k_all; k++) {
        for (int i = 0; i < m; i++) {
            const float x = a[k][i];

            for (int j = 0; j < m; j++)
                d[i][j] += x * b[k][j];
        }
    }
    for (int l = 0; l < HIPEMU_WAVE; l++) {
        for (int r = 0; r < m * m / HIPEMU_WAVE; r++) {
            const int i = m == 16 ? 4 * (l / 16) + r : 8 * (r / 4) + 4 * (l / 32) + r % 4;

            memcpy((float *)w.lanes[l]->out + r, &d[i][l % m], sizeof(float));
        }
    }
}

} // namespace hipemu
