/* The emulator itself: exchanges, LDS, barriers and matrix layouts against what AMD's manuals say, restated here; and broken
 * kernels, each of which must end the process with its reason. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "hipemu_run.h"
#include "kernels/dsk.h"
#include "probes.h"
#include "test_main.h"

static uint64_t address(const void *p)
{
    return (uint64_t)(uintptr_t)p;
}

static const char *const targets[] = {"gfx942", "gfx950"};

START_TEST(lanes_exchange_as_on_the_chip)
{
    uint32_t in[64], out[9][64];
    struct probe_args args = {.in = address(in), .out = address(out)};

    for (uint32_t i = 0; i < 64; i++)
        in[i] = i * 2654435761u;
    hipemu_run(targets[_i], "probe_exchanges", 1, 1, 64, &args);
    for (uint32_t i = 0; i < 64; i++) {
        uint32_t sum = 0, most = 0, votes = 0;

        for (uint32_t j = i & 32; j < (i & 32) + 32; j++)
            sum += in[j];
        for (uint32_t j = i & 48; j < (i & 48) + 16; j++)
            most = in[j] > most ? in[j] : most;
        for (uint32_t j = 0; j < 32; j++)
            votes |= (in[j] & 1u) << j;
        ck_assert_uint_eq(out[0][i], in[(i * 7 + 3) & 63]);
        ck_assert_uint_eq(out[1][i], in[i ^ 1]);
        ck_assert_uint_eq(out[2][i], in[i ^ 16]);
        ck_assert_uint_eq(out[3][i], in[i ^ 32]);
        ck_assert_uint_eq(out[4][i], sum);
        ck_assert_uint_eq(out[5][i], most);
        ck_assert_uint_eq(out[6][i], in[9]);
        ck_assert_uint_eq(out[7][i], votes);
        ck_assert_uint_eq(out[8][i], i % 16 == 0 ? 77 : in[i - 1]);
    }
}
END_TEST

/* Two blocks of four waves, in either order of waves and lanes. */
START_TEST(barriers_order_what_goes_through_lds)
{
    uint32_t in[512], out[512];
    struct probe_args args = {.in = address(in), .out = address(out)};

    for (uint32_t i = 0; i < 512; i++)
        in[i] = i * i + 1;
    for (int order = 1; order <= 2; order++) {
        hipemu_set(order, -1);
        memset(out, 0, sizeof(out));
        hipemu_run(targets[_i], "probe_shared", 2, 1, 256, &args);
        for (uint32_t i = 0; i < 512; i++)
            ck_assert_uint_eq(out[i], in[(i & 256) + 255 - (i & 255)]);
    }
}
END_TEST

START_TEST(a_missing_barrier_shows_between_orders)
{
    uint32_t in[256], first[256], last[256];
    struct probe_args args = {.in = address(in)};

    for (uint32_t i = 0; i < 256; i++)
        in[i] = i + 1;
    hipemu_set(1, 0);
    args.out = address(first);
    hipemu_run("gfx942", "probe_race", 1, 1, 256, &args);
    hipemu_set(2, 0);
    args.out = address(last);
    hipemu_run("gfx942", "probe_race", 1, 1, 256, &args);
    ck_assert_int_ne(memcmp(first, last, sizeof(first)), 0);
}
END_TEST

START_TEST(unwritten_lds_differs_between_launches)
{
    uint32_t first[64], second[64];
    struct probe_args args = {.out = address(first)};

    hipemu_set(0, -1);
    hipemu_run("gfx950", "probe_unwritten", 1, 1, 64, &args);
    args.out = address(second);
    hipemu_run("gfx950", "probe_unwritten", 1, 1, 64, &args);
    ck_assert_uint_ne(first[0], second[0]);
}
END_TEST

/* ---- matrices --------------------------------------------------------------------------------- */

/* D = A B + C with A [m][k] and B [k][m]. Lane l holds row (column) l % m of A (B), depths n (l / m) and on, n = k m / 64, or
 * (f8f6f4) half of them, and the same of the second half of the depths; of C and D column l % m, in groups of four rows that the blocks of lanes take in turn. */
struct shape {
    const char *kernel;
    int m, k, bytes; /* of an element */
    int n_runs;      /* of depths, a lane's */
};
static const struct shape shapes[] = {{"probe_mfma_16x16x16_bf16", 16, 16, 2, 1},
                                      {"probe_mfma_32x32x8_bf16", 32, 8, 2, 1},
                                      {"probe_mfma_16x16x32_fp8", 16, 32, 1, 1},
                                      {"probe_mfma_16x16x32_bf16", 16, 32, 2, 1},
                                      {"probe_mfma_16x16x128_f8f6f4", 16, 128, 1, 2}};

static float element(const struct shape *s, const uint8_t *operand, int row, int depth, int is_fnuz)
{
    const int all = s->k / s->n_runs, n = all * s->m / 64, run = depth / all;
    const int lane = row + s->m * (depth % all / n);
    const uint8_t *at = operand + ((lane * s->n_runs + run) * n + depth % n) * s->bytes;
    uint16_t bits;

    if (s->bytes == 1)
        return hipemu_fp8(*at, is_fnuz);
    memcpy(&bits, at, sizeof(bits));
    return dsk_bf16_to_f32(bits);
}

static int place(const struct shape *s, int row, int column)
{
    const int n_blocks = 64 / s->m, group = row / 4, lane = column + s->m * (group % n_blocks);

    return lane * (s->m * s->m / 64) + group / n_blocks * 4 + row % 4;
}

START_TEST(matrices_multiply_in_the_chips_layout)
{
    const struct shape *s = &shapes[_i % 5];
    const char *target = targets[_i / 5];
    const int is_fnuz = _i / 5 == 0 && s->n_runs == 1; /* f8f6f4 is OCP's */
    _Alignas(64) uint8_t a[64 * 32], b[64 * 32];
    _Alignas(64) float c[64 * 16], d[64 * 16];
    struct probe_args args = {address(a), address(d), address(b), address(c)};

    for (int i = 0; i < 64 * 32; i++) {
        /* small integers: sums are exact in any order */
        uint16_t x = dsk_bf16_from_f32((float)(i * 7 % 13 - 6)),
                 y = dsk_bf16_from_f32((float)(i * 5 % 11 - 5));

        if (s->bytes == 2 && i < 512) {
            memcpy(a + 2 * i, &x, 2);
            memcpy(b + 2 * i, &y, 2);
        } else if (s->bytes == 1) {
            a[i] = (uint8_t)(0x30 + i * 7 % 24);
            b[i] = (uint8_t)(0xb0 + i * 5 % 24);
        }
        if (i < 64 * 16)
            c[i] = (float)(i % 17);
    }
    hipemu_run(target, s->kernel, 1, 1, 64, &args);
    for (int row = 0; row < s->m; row++)
        for (int column = 0; column < s->m; column++) {
            float want = c[place(s, row, column)];

            for (int k = 0; k < s->k; k++)
                want += element(s, a, row, k, is_fnuz) * element(s, b, column, k, is_fnuz);
            ck_assert_msg(d[place(s, row, column)] == want, "%s: D[%d][%d] is %g, not %g", s->kernel, row,
                          column, (double)d[place(s, row, column)], (double)want);
        }
}
END_TEST

/* The two encodings of a byte: gfx942's own has half the value, its 0x80 is NaN, and 0x7f is a number. */
START_TEST(encodings_differ_as_stated)
{
    ck_assert(hipemu_fp8(0x38, 0) == 1 && hipemu_fp8(0x38, 1) == 0.5f);
    ck_assert(hipemu_fp8(0x7e, 0) == 448 && hipemu_fp8(0x7e, 1) == 224 && hipemu_fp8(0x7f, 1) == 240);
    ck_assert(hipemu_fp8(0x01, 0) == 0x1p-9f && hipemu_fp8(0x01, 1) == 0x1p-10f);
    ck_assert(hipemu_fp8(0x80, 0) == 0 && hipemu_fp8(0x80, 1) != hipemu_fp8(0x80, 1));
    ck_assert(hipemu_fp8(0x7f, 0) != hipemu_fp8(0x7f, 0) && hipemu_fp8(0xff, 0) != hipemu_fp8(0xff, 0));
}
END_TEST

/* ---- kernels that are broken -------------------------------------------------------------------- */

static const struct {
    const char *kernel;
    uint32_t block;
} broken[] = {
    {"probe_divergent", 64},       {"probe_one_more", 64},           {"probe_reads_a_lane_that_left", 64},
    {"probe_lonely_barrier", 128}, {"probe_too_much_lds", 64},       {"probe_half_a_matrix", 64},
    {"probe_shared", 257},         {"probe_that_does_not_exist", 64}};

START_TEST(broken_kernels_are_caught)
{
    static uint32_t in[512], out[512];
    struct probe_args args = {.in = address(in), .out = address(out)};

    hipemu_run("gfx942", broken[_i].kernel, 1, 1, broken[_i].block, &args);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("hip emulator");
    TCase *good = tcase_create("chip"), *bad = tcase_create("broken");

    (void)max;
    tcase_set_timeout(good, 60);
    tcase_add_loop_test(good, lanes_exchange_as_on_the_chip, 0, 2);
    tcase_add_loop_test(good, barriers_order_what_goes_through_lds, 0, 2);
    tcase_add_test(good, a_missing_barrier_shows_between_orders);
    tcase_add_test(good, unwritten_lds_differs_between_launches);
    tcase_add_loop_test(good, matrices_multiply_in_the_chips_layout, 0, 10);
    tcase_add_test(good, encodings_differ_as_stated);
    tcase_add_loop_test_raise_signal(bad, broken_kernels_are_caught, SIGABRT, 0,
                                     (int)(sizeof(broken) / sizeof(broken[0])));
    suite_add_tcase(suite, good);
    suite_add_tcase(suite, bad);
    suites_p[0] = suite;
    return 1;
}
