/* attend_sm90_bench.cu - checks and times the attend_sm90 kernels by themselves, through the CUDA runtime. Not part of any
 * build; by hand, from this folder:
 *   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -o attend_sm90_bench attend_sm90_bench.cu ../attend_sm90_plan.c
 *   ./attend_sm90_bench check | small | time [filter]
 *
 * check: random cases against float64 over the dequantised rows, tolerances of the format page: out 1e-3 + 2.01/128 |ref|,
 * cosine distance 5e-6, lse 1e-6 + 8.01/65536 |ref|, infinities and bad counts exact, repeats bit-identical. Every slot that
 * no valid index names is poison (NaN scales, 0x7f bytes). small: a few of them, for compute-sanitizer.
 * time: medians of graph replays and of single launches; index sets rotate through more than L2 holds. */
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "../attend_sm90.cu"

#define OK(call)                                                                                             \
    do {                                                                                                     \
        cudaError_t e_ = (call);                                                                             \
        if (e_ != cudaSuccess) {                                                                             \
            printf("%s: %s (line %d)\n", #call, cudaGetErrorString(e_), __LINE__);                           \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

typedef void (*kernel_func)(const struct dsk_attend_block *);
struct named_kernel {
    const char *name;
    kernel_func func;
};
#define KERNEL(name) {#name, name}
static const named_kernel KERNELS[] = {
    KERNEL(attend_sm90_512_64_h64), KERNEL(attend_sm90_merge_512_w1), KERNEL(attend_sm90_merge_512_w8),
#if !ATTEND_SM90_ONLY_MAIN
    KERNEL(attend_sm90_512_64_h8),  KERNEL(attend_sm90_512_64_h16),   KERNEL(attend_sm90_512_64_h32),
    KERNEL(attend_sm90_512_0_h8),   KERNEL(attend_sm90_512_0_h16),    KERNEL(attend_sm90_512_0_h32),
    KERNEL(attend_sm90_512_0_h64),  KERNEL(attend_sm90_256_0_h8),     KERNEL(attend_sm90_256_0_h16),
    KERNEL(attend_sm90_256_0_h32),  KERNEL(attend_sm90_256_0_h64),    KERNEL(attend_sm90_merge_256_w1),
    KERNEL(attend_sm90_merge_256_w8),
#endif
};

struct layout {
    uint32_t id;
    const char *name;
    int latent, rope;
    int row_bytes() const { return latent + latent / 128 * 4 + rope * 2; }
    int d_qk() const { return latent + rope; }
};
static const layout LAYOUTS[3] = {{DSK_LAYOUT_SCALED_512_64, "512_64", 512, 64},
                                  {DSK_LAYOUT_SCALED_512_0, "512_0", 512, 0},
                                  {DSK_LAYOUT_SCALED_256_0, "256_0", 256, 0}};

static int n_sms;
static cudaStream_t stream;

/* ---- random data ---- */

__host__ __device__ static uint64_t mix(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
}
__device__ static float normal(uint64_t key)
{
    const float u = ((uint32_t)mix(2 * key) + 1.f) * 2.3283064e-10f, v = (uint32_t)mix(2 * key + 1) * 2.3283064e-10f;
    return sqrtf(-2.f * logf(fmaxf(u, 1e-9f))) * cospif(2.f * v);
}
static uint64_t random_state = 88172645463325252ull;
static uint32_t random_u32()
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 16);
}

enum { SCALES_POW2, SCALES_PLAIN, SCALES_WILD, SCALES_HUGE };
enum { POISON_EVERY = 7 }; /* slots 0, 7, 14, ... */

/* One warp a row. */
__global__ void fill_pool(uint8_t *pool, int64_t n_rows, int latent, int rope, int row_bytes, int mode, int has_poison)
{
    const int64_t r = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    const int lane = threadIdx.x & 31;
    if (r >= n_rows)
        return;
    uint8_t *row = pool + r * row_bytes;
    if (has_poison && r % POISON_EVERY == 0) {
        for (int i = lane; i < row_bytes; i += 32)
            row[i] = i >= latent && i < latent + latent / 32 ? 0xff : 0x7f;
        return;
    }
    for (int g = 0; g < latent / 128; g++) {
        float v[4], amax = 0, magnitude = 1;
        if (mode == SCALES_WILD)
            magnitude = exp2f(6.f * normal((uint64_t)r * 4 + g + (1ull << 50)));
        if (mode == SCALES_HUGE)
            magnitude = 1e5f;
        for (int i = 0; i < 4; i++) {
            v[i] = magnitude * normal((uint64_t)r * 1024 + g * 128 + lane * 4 + i);
            amax = fmaxf(amax, fabsf(v[i]));
        }
        for (int o = 16; o; o >>= 1)
            amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, o));
        float scale = amax / 448.f;
        if (mode == SCALES_POW2)
            scale = exp2f(ceilf(log2f(fmaxf(scale, 1e-4f))));
        for (int i = 0; i < 4; i++)
            row[g * 128 + lane * 4 + i] = __nv_cvt_float_to_fp8(v[i] / scale, __NV_SATFINITE, __NV_E4M3);
        if (lane == 0)
            ((float *)(row + latent))[g] = scale;
    }
    for (int i = lane; i < rope; i += 32)
        ((__nv_bfloat16 *)(row + row_bytes - 2 * rope))[i] = __float2bfloat16(normal((uint64_t)r * 1024 + 512 + i));
}
__global__ void fill_query(__nv_bfloat16 *q, int64_t n, float scale, uint64_t seed)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        q[i] = __float2bfloat16(scale * normal(seed + i));
}

/* ---- reference: one block per (row, head); slots [n_rows, topk], -1 = no entry ---- */

__global__ void reference(const __nv_bfloat16 *q, const uint8_t *pool, const int *slots, const float *sink, double scale,
                          int topk, int latent, int rope, int row_bytes, int h_q, double *out, double *magnitude, double *lse)
{
    extern __shared__ double weight[];
    __shared__ double red[8], qs[576];
    const int th = blockIdx.x, t = th / h_q, h = th % h_q, tid = threadIdx.x, d_qk = latent + rope;
    for (int i = tid; i < d_qk; i += 256)
        qs[i] = (double)__bfloat162float(q[(int64_t)th * d_qk + i]);
    __syncthreads();
    double m = -1e300, l = 0;
    for (int k = tid; k < topk; k += 256) {
        const int slot = slots[(int64_t)t * topk + k];
        double s = -1e300;
        if (slot >= 0) {
            const uint8_t *row = pool + (int64_t)slot * row_bytes;
            s = 0;
            for (int g = 0; g < latent / 128; g++) {
                double a = 0;
                for (int i = 0; i < 128; i++)
                    a += qs[g * 128 + i] * (double)__half2float(__half(__nv_cvt_fp8_to_halfraw(row[g * 128 + i], __NV_E4M3)));
                s += a * ((const float *)(row + latent))[g];
            }
            for (int i = 0; i < rope; i++)
                s += qs[latent + i] * (double)__bfloat162float(((const __nv_bfloat16 *)(row + row_bytes - 2 * rope))[i]);
            s *= scale;
        }
        weight[k] = s;
        m = fmax(m, s);
    }
    for (int o = 16; o; o >>= 1)
        m = fmax(m, __shfl_xor_sync(~0u, m, o));
    if ((tid & 31) == 0)
        red[tid >> 5] = m;
    __syncthreads();
    for (int i = 0; i < 8; i++)
        m = fmax(m, red[i]);
    __syncthreads();
    for (int k = tid; k < topk; k += 256) {
        weight[k] = weight[k] > -1e299 ? exp(weight[k] - m) : 0;
        l += weight[k];
    }
    for (int o = 16; o; o >>= 1)
        l += __shfl_xor_sync(~0u, l, o);
    if ((tid & 31) == 0)
        red[tid >> 5] = l;
    __syncthreads();
    l = 0;
    for (int i = 0; i < 8; i++)
        l += red[i];
    if (tid == 0)
        lse[th] = l > 0 ? m + log(l) : -INFINITY;
    double share = 1;
    if (sink != nullptr && l > 0)
        share = 1 / (1 + exp((double)sink[h] - (m + log(l))));
    for (int d = tid; d < latent; d += 256) {
        double a = 0, sum = 0;
        for (int k = 0; k < topk; k++) {
            const int slot = slots[(int64_t)t * topk + k];
            if (slot < 0)
                continue;
            const uint8_t *row = pool + (int64_t)slot * row_bytes;
            const double v = (double)__half2float(__half(__nv_cvt_fp8_to_halfraw(row[d], __NV_E4M3)))
                             * (double)((const float *)(row + latent))[d >> 7];
            a += weight[k] * v;
            sum += weight[k] * fabs(v);
        }
        out[(int64_t)th * latent + d] = l > 0 ? a / l * share : 0;
        magnitude[(int64_t)th * latent + d] = l > 0 ? sum / l * share : 0;
    }
}

/* ---- launching ---- */

static kernel_func find_kernel(const char *name)
{
    for (const named_kernel &k : KERNELS)
        if (strcmp(k.name, name) == 0)
            return k.func;
    return nullptr;
}

static bool is_built(const struct attend_sm90_plan &plan)
{
    return find_kernel(plan.main.name) != nullptr && (plan.combine.name == nullptr || find_kernel(plan.combine.name) != nullptr);
}

static void launch_one(const attend_sm90_launch &l, const dsk_attend_block *block)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute[1];
    kernel_func func = find_kernel(l.name);
    config.gridDim = dim3(l.grid_x, l.grid_y, l.grid_z);
    config.blockDim = dim3(l.block);
    config.dynamicSmemBytes = l.shared_bytes;
    config.stream = stream;
    attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[0].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attribute;
    config.numAttrs = l.is_dependent ? 1 : 0;
    OK(cudaLaunchKernelEx(&config, func, block));
}
static void launch(const struct attend_sm90_plan &plan, const dsk_attend_block *block)
{
    launch_one(plan.main, block);
    if (plan.combine.name != nullptr)
        launch_one(plan.combine, block);
}

template <class T> struct device_array {
    T *p = nullptr;
    size_t n = 0;
    explicit device_array(size_t count) : n(count) { OK(cudaMalloc(&p, (count + 1) * sizeof(T))); }
    explicit device_array(const std::vector<T> &v) : device_array(v.size())
    {
        OK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~device_array() { cudaFree(p); }
    device_array(const device_array &) = delete;
    uint64_t at(size_t i) const { return (uint64_t)(p + i); }
    std::vector<T> host() const
    {
        std::vector<T> v(n);
        OK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
    void poison() { OK(cudaMemset(p, 0xff, n * sizeof(T))); }
};

/* ---- checks ---- */

enum { LIST_PLAIN, LIST_HOLES, LIST_LENGTHS, LIST_JUNK, LIST_SPARSE };

struct check_case {
    const char *name;
    int i_layout, h_q, n_rows, topk;
    int scales = SCALES_POW2, list = LIST_PLAIN, space = DSK_SPACE_PHYSICAL, out_dtype = DSK_DTYPE_BF16;
    float q_scale = 1.f;
    bool has_sink = false, is_invariant = false, is_strided = false;
    int64_t first_slot = 0; /* lists draw from 32768 slots from here on */
};

static int n_failed, n_passed;

/* A slot of the pool that is not poison. */
static int good_slot(int64_t first, int64_t n)
{
    int64_t s;
    do
        s = first + random_u32() % n;
    while (s % POISON_EVERY == 0);
    return (int)s;
}

struct pool {
    device_array<uint8_t> bytes;
    int64_t n_slots;
    int i_layout, scales;
    pool(int i_layout_, int64_t n, int scales_, bool has_poison)
        : bytes((size_t)n * LAYOUTS[i_layout_].row_bytes()), n_slots(n), i_layout(i_layout_), scales(scales_)
    {
        const layout &l = LAYOUTS[i_layout];
        fill_pool<<<(unsigned)((n + 7) / 8), 256>>>(bytes.p, n, l.latent, l.rope, l.row_bytes(), scales, has_poison);
        OK(cudaGetLastError());
        OK(cudaDeviceSynchronize());
    }
    dsk_kv_view view() const
    {
        const layout &l = LAYOUTS[i_layout];
        return {(uint64_t)bytes.p, (int64_t)64 * l.row_bytes(), n_slots, l.id, 0.f};
    }
};

/* Index lists, what they resolve to, and how many entries are bad. */
struct lists {
    std::vector<int> indices, slots, lengths, table;
    std::vector<uint32_t> n_bad;
    int seq_len = 0;
};

static int junk_index(int64_t n)
{
    const int values[6] = {-1, -2, INT32_MIN, INT32_MAX, (int)n, (int)n + 7};
    return values[random_u32() % 6];
}

static lists make_lists(const check_case &c, int64_t n_slots)
{
    lists r;
    const int64_t window = std::min<int64_t>(n_slots - c.first_slot, 32768);
    const bool is_logical = c.space == DSK_SPACE_LOGICAL;
    const int n_pages = (int)(n_slots / 64);
    if (is_logical) {
        r.table.resize(300);
        for (int &page : r.table)
            page = (int)(random_u32() % n_pages);
        r.table[5] = -1;       /* unmapped */
        r.table[6] = n_pages + 3; /* outside the pool */
        r.seq_len = 290 * 64 + 17;
    }
    for (int t = 0; t < c.n_rows; t++) {
        int live = c.topk;
        if (c.list == LIST_LENGTHS)
            live = (int)(t % 5 == 0 ? -3 : t % 5 == 1 ? c.topk + 9 : random_u32() % (c.topk + 1));
        r.lengths.push_back(live);
        live = std::min(std::max(live, 0), c.topk);
        uint32_t n_bad = 0;
        for (int k = 0; k < c.topk; k++) {
            int index, slot;
            bool is_hole = (c.list == LIST_HOLES && random_u32() % 4 == 0) || (c.list == LIST_JUNK && random_u32() % 3 == 0)
                           || (c.list == LIST_SPARSE && (t % 3 == 1 || random_u32() % 150 != 0));
            if (is_hole) {
                index = c.list == LIST_JUNK ? junk_index(is_logical ? r.seq_len : n_slots) : -1;
            } else if (is_logical) {
                do
                    index = (int)(random_u32() % r.seq_len);
                while (r.table[index / 64] >= 0 && r.table[index / 64] < n_pages
                       && (r.table[index / 64] * 64 + index % 64) % POISON_EVERY == 0);
            } else {
                index = good_slot(c.first_slot, window);
            }
            slot = index;
            if (is_logical) {
                slot = -1;
                if (index >= 0 && index < r.seq_len && r.table[index / 64] >= 0)
                    slot = r.table[index / 64] * 64 + index % 64;
            }
            if (slot < 0 || slot >= n_slots)
                slot = -1;
            n_bad += k < live && slot < 0 && index != -1;
            r.indices.push_back(k < live || c.list == LIST_LENGTHS ? index : -1);
            r.slots.push_back(k < live ? slot : -1);
        }
        r.n_bad.push_back(n_bad);
    }
    return r;
}

struct tally {
    double dot = 0, norm = 0, worst_out = 0, worst_lse = 0;
    int n_wrong = 0;
};

static void compare(tally &y, const check_case &c, const std::vector<double> &out, const std::vector<double> &magnitude,
                    const std::vector<double> &lse,
                    const std::vector<uint8_t> &got, const std::vector<float> &got_lse, int d_v, int64_t head_bytes)
{
    for (size_t th = 0; th < lse.size(); th++) {
        const bool is_empty = std::isinf(lse[th]);
        const double lse_error = fabs(got_lse[th] - lse[th]) / (1e-6 + 8.01 / 65536 * fabs(lse[th]));
        if (is_empty ? got_lse[th] != -INFINITY : !(lse_error <= 1))
            y.n_wrong++;
        if (!is_empty)
            y.worst_lse = fmax(y.worst_lse, lse_error);
        for (int d = 0; d < d_v; d++) {
            const uint8_t *at = got.data() + th * head_bytes + d * (c.out_dtype == DSK_DTYPE_F32 ? 4 : 2);
            uint32_t bits = 0;
            memcpy(&bits, at, c.out_dtype == DSK_DTYPE_F32 ? 4 : 2);
            if (c.out_dtype == DSK_DTYPE_BF16)
                bits <<= 16;
            float a;
            memcpy(&a, &bits, 4);
            /* Where values are wild or huge, 1e-3 would ask for more than f32 products of such values can give: there a
             * thousandth of sum |p v| is allowed too. */
            const double slack = c.scales >= SCALES_WILD ? 1e-3 * magnitude[th * d_v + d] : 0;
            const double b = out[th * d_v + d], error = fabs(a - b) / (1e-3 + 2.01 / 128 * fabs(b) + slack);
            if (is_empty ? bits != 0 : !(error <= 1))
                y.n_wrong++;
            if (!(error <= y.worst_out))
                y.worst_out = error;
            y.dot += a * b;
            y.norm += a * a + b * b;
        }
    }
}

static void check(const check_case &c, const pool &p)
{
    const layout &l = LAYOUTS[c.i_layout];
    struct attend_sm90_plan plan;
    const uint32_t flags = c.is_invariant ? ATTEND_SM90_BATCH_INVARIANT : 0;
    if (!attend_sm90_plan(l.id, c.n_rows, c.h_q, c.topk, c.out_dtype, flags, n_sms, &plan)) {
        printf("FAIL %s: not planned\n", c.name);
        n_failed++;
        return;
    }
    if (!is_built(plan))
        return;
    const lists in = make_lists(c, p.n_slots);
    const int64_t q_head = l.d_qk() * 2, elem = c.out_dtype == DSK_DTYPE_F32 ? 4 : 2;
    const int64_t out_head = l.latent * elem + (c.is_strided ? 48 : 0);
    const float scale = 1.f / sqrtf(192.f);
    const size_t n_th = (size_t)c.n_rows * c.h_q;
    device_array<__nv_bfloat16> q(n_th * l.d_qk());
    device_array<int> indices(in.indices), slots(in.slots), lengths(in.lengths), table(in.table);
    std::vector<float> sinks(c.h_q);
    for (int h = 0; h < c.h_q; h++)
        sinks[h] = h % 4 == 3 ? -INFINITY : (int)(random_u32() % 200) * 0.1f - 5.f;
    device_array<float> sink(sinks);
    device_array<uint8_t> out(n_th * out_head);
    device_array<float> lse(n_th);
    device_array<uint32_t> n_bad(c.n_rows);
    device_array<uint8_t> part_out(plan.part_out_bytes), part_lse(plan.part_lse_bytes), part_ref(plan.part_ref_bytes);
    fill_query<<<(unsigned)((n_th * l.d_qk() + 255) / 256), 256>>>(q.p, n_th * l.d_qk(), c.q_scale, mix(random_u32()));

    const int n_padding = 2; /* rows that must stay untouched */
    std::vector<dsk_attend_row> rows(c.n_rows + n_padding);
    for (int t = 0; t < c.n_rows; t++) {
        dsk_attend_row &r = rows[t];
        r = {};
        r.q = q.at((size_t)t * c.h_q * l.d_qk());
        r.out = out.at((size_t)t * c.h_q * out_head);
        r.lse = lse.at((size_t)t * c.h_q);
        r.indices = indices.at((size_t)t * c.topk);
        r.length = c.list == LIST_LENGTHS ? lengths.at(t) : 0;
        r.sink = c.has_sink ? sink.at(0) : 0;
        r.table = c.space == DSK_SPACE_LOGICAL ? table.at(0) : 0;
        r.n_bad = n_bad.at(t);
        r.q_head_bytes = q_head;
        r.out_head_bytes = out_head;
        r.topk = c.topk;
        r.space = c.space;
        r.n_table = (int)in.table.size();
        r.seq_len = in.seq_len;
        r.softmax_scale = scale;
    }
    device_array<dsk_attend_row> rows_d(rows);
    dsk_attend_block b = {};
    b.kv = p.view();
    b.rows = rows_d.at(0);
    b.part_out = plan.n_splits > 1 ? part_out.at(0) : 0;
    b.part_lse = part_lse.at(0);
    b.part_ref = part_ref.at(0);
    b.n_rows = c.n_rows;
    b.h_q = c.h_q;
    b.out_dtype = c.out_dtype;
    b.flags = flags;
    b.n_splits = plan.n_splits;
    b.split_entries = plan.split_entries;
    device_array<dsk_attend_block> block(std::vector<dsk_attend_block>(1, b));

    std::vector<uint8_t> got;
    std::vector<float> got_lse;
    bool is_same = true;
    for (int repeat = 0; repeat < 3; repeat++) {
        out.poison(), lse.poison(), n_bad.poison(), part_out.poison(), part_lse.poison(), part_ref.poison();
        launch(plan, block.p);
        OK(cudaStreamSynchronize(stream));
        std::vector<uint8_t> again = out.host();
        std::vector<float> again_lse = lse.host();
        if (repeat > 0)
            is_same = is_same && again == got && memcmp(again_lse.data(), got_lse.data(), got_lse.size() * 4) == 0;
        got = again, got_lse = again_lse;
    }
    device_array<double> ref(n_th * l.latent), magnitude(n_th * l.latent), ref_lse(n_th);
    reference<<<(unsigned)n_th, 256, c.topk * 8>>>(q.p, p.bytes.p, slots.p, c.has_sink ? sink.p : nullptr, (double)scale, c.topk,
                                                   l.latent, l.rope, l.row_bytes(), c.h_q, ref.p, magnitude.p, ref_lse.p);
    OK(cudaGetLastError());
    OK(cudaDeviceSynchronize());
    tally y;
    compare(y, c, ref.host(), magnitude.host(), ref_lse.host(), got, got_lse, l.latent, out_head);
    const double cosine = y.norm > 0 ? 1 - 2 * y.dot / y.norm : 0;
    const bool is_counted = n_bad.host() == in.n_bad;
    const bool ok = y.n_wrong == 0 && !(cosine > 5e-6) && is_same && is_counted;
    if (!ok || c.name[0] != ' ')
        printf("%s %-22s %-6s %s h %3d rows %3d width %4d splits %2d: out %.3f lse %.3f of tolerance, cos %.1e, wrong %d%s%s\n",
               ok ? "ok  " : "FAIL", c.name, l.name, c.scales == SCALES_POW2 ? "pow2" : "any ", c.h_q, c.n_rows, c.topk, plan.n_splits, y.worst_out, y.worst_lse, cosine,
               y.n_wrong, is_same ? "" : ", repeats differ", is_counted ? "" : ", bad count");
    ok ? n_passed++ : n_failed++;
    fflush(stdout);
}

static void check_layout(int i_layout, bool is_small)
{
    const int64_t n_slots = 40009; /* odd: the last page is not full */
    const pool pow2(i_layout, n_slots, SCALES_POW2, true), plain(i_layout, n_slots, SCALES_PLAIN, true);
    auto with = [&](const char *name, int h_q, int n_rows, int topk, auto change) {
        check_case c = {name, i_layout, h_q, n_rows, topk};
        change(c);
        check(c, c.scales == SCALES_PLAIN ? plain : pow2);
    };
    auto nothing = [](check_case &) {};
    if (is_small) {
        with("small", 64, 1, 200, nothing);
        with("small plain", 16, 2, 130, [](check_case &c) { c.scales = SCALES_PLAIN; });
        with("small junk", 64, 135, 130, [](check_case &c) { c.list = LIST_JUNK, c.has_sink = true; });
        with("small logical", 8, 3, 65, [](check_case &c) { c.space = DSK_SPACE_LOGICAL, c.list = LIST_LENGTHS; });
        return;
    }
    with("pow2", 64, 4, 2048, nothing);
    with("pow2 unsplit", 64, 132, 2048, nothing);
    with("plain", 64, 4, 2048, [](check_case &c) { c.scales = SCALES_PLAIN; });
    with("plain unsplit", 64, 132, 1000, [](check_case &c) { c.scales = SCALES_PLAIN; });
    for (int space = 1; space <= 2; space++) {
        with(space == 1 ? "holes" : "holes logical", 64, 9, 2048, [&](check_case &c) { c.list = LIST_HOLES, c.space = space; });
        with(space == 1 ? "junk" : "junk logical", 64, 140, 600, [&](check_case &c) { c.list = LIST_JUNK, c.space = space; });
        with(space == 1 ? "lengths" : "lengths logical", 64, 33, 2048,
             [&](check_case &c) { c.list = LIST_LENGTHS, c.space = space, c.scales = SCALES_PLAIN; });
    }
    with("lengths unsplit", 64, 140, 515, [](check_case &c) { c.list = LIST_LENGTHS; });
    with("nearly empty", 64, 12, 2048, [](check_case &c) { c.list = LIST_SPARSE; });
    with("nearly empty unsplit", 64, 140, 700, [](check_case &c) { c.list = LIST_SPARSE, c.scales = SCALES_PLAIN; });
    with("sink f32 strided", 64, 5, 777, [](check_case &c) { c.has_sink = c.is_strided = true, c.out_dtype = DSK_DTYPE_F32; });
    with("sink unsplit strided", 40, 133, 300, [](check_case &c) { c.has_sink = c.is_strided = true; });
    with("peaky q x 4", 64, 8, 2048, [](check_case &c) { c.q_scale = 4; });
    with("peaky q x 4 unsplit", 64, 132, 2048, [](check_case &c) { c.q_scale = 4, c.scales = SCALES_PLAIN; });
    with("peaky q x 40", 64, 132, 1024, [](check_case &c) { c.q_scale = 40, c.list = LIST_HOLES; });
    with("flat q x 0.01", 64, 4, 2048, [](check_case &c) { c.q_scale = 0.01f; });
    with("invariant", 64, 3, 2048, [](check_case &c) { c.is_invariant = true; });
    with("invariant short", 64, 3, 100, [](check_case &c) { c.is_invariant = true; });
    const int heads[12] = {1, 2, 7, 8, 16, 24, 32, 48, 64, 96, 127, 128}, widths[8] = {1, 63, 64, 65, 2047, 2048, 2051, 2112};
    for (int h : heads)
        for (int w : widths)
            with(" shapes", h, 1 + (int)(random_u32() % (w > 100 ? 5 : 300)), w, [&](check_case &c) {
                c.scales = random_u32() % 2 ? SCALES_PLAIN : SCALES_POW2;
                c.list = (int)(random_u32() % 5);
                c.space = 1 + (int)(random_u32() % 2);
                c.has_sink = random_u32() % 3 == 0;
                c.q_scale = random_u32() % 2 ? 1.f : 3.f;
            });
    for (int scales : {SCALES_WILD, SCALES_HUGE}) {
        const pool odd(i_layout, n_slots, scales, true);
        for (int h : {64, 8})
            for (int n_rows : {3, 140}) {
                const float q_scale = scales == SCALES_WILD ? 1e-4f : 1e-5f;
                check_case c = {scales == SCALES_WILD ? "wild scales" : "huge scales", i_layout, h, n_rows, n_rows == 3 ? 2048 : 1024};
                c.scales = scales;
                c.q_scale = q_scale;
                check(c, odd);
                c.q_scale = q_scale * 10, c.list = LIST_HOLES;
                check(c, odd);
            }
    }
}

/* ---- timing ---- */

static float median(std::vector<float> v)
{
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

static void time_case(const pool &p, int h_q, int n_rows, int topk)
{
    const layout &l = LAYOUTS[p.i_layout];
    const int64_t window = 32768, n_windows = p.n_slots / window;
    const int n_sets = n_rows >= 96 ? 4 : std::max(4, 256 / n_rows), n_nodes = std::max(20, std::min(n_sets, 64));
    struct attend_sm90_plan plan;
    if (!attend_sm90_plan(l.id, n_rows, h_q, topk, DSK_DTYPE_BF16, 0, n_sms, &plan) || !is_built(plan))
        return;
    const size_t n_th = (size_t)n_rows * h_q;
    std::vector<int> list((size_t)n_sets * n_rows * topk);
    for (size_t i = 0; i < list.size(); i++)
        list[i] = (int)((int64_t)(i / topk % n_windows) * window + random_u32() % window);
    device_array<int> indices(list);
    device_array<__nv_bfloat16> q(n_th * l.d_qk());
    device_array<uint16_t> out(n_th * l.latent);
    device_array<float> lse(n_th);
    device_array<uint32_t> n_bad(n_rows);
    device_array<uint8_t> part_out(plan.part_out_bytes), part_lse(plan.part_lse_bytes), part_ref(plan.part_ref_bytes);
    fill_query<<<(unsigned)((n_th * l.d_qk() + 255) / 256), 256>>>(q.p, n_th * l.d_qk(), 1.f, 99);
    std::vector<dsk_attend_row> rows;
    std::vector<dsk_attend_block> blocks;
    for (int s = 0; s < n_sets; s++)
        for (int t = 0; t < n_rows; t++) {
            dsk_attend_row r = {};
            r.q = q.at((size_t)t * h_q * l.d_qk());
            r.out = out.at((size_t)t * h_q * l.latent);
            r.lse = lse.at((size_t)t * h_q);
            r.indices = indices.at(((size_t)s * n_rows + t) * topk);
            r.n_bad = n_bad.at(t);
            r.q_head_bytes = l.d_qk() * 2;
            r.out_head_bytes = l.latent * 2;
            r.topk = topk;
            r.space = DSK_SPACE_PHYSICAL;
            r.softmax_scale = 1.f / sqrtf(192.f);
            rows.push_back(r);
        }
    device_array<dsk_attend_row> rows_d(rows);
    for (int s = 0; s < n_sets; s++) {
        dsk_attend_block b = {};
        b.kv = p.view();
        b.rows = rows_d.at((size_t)s * n_rows);
        b.part_out = plan.n_splits > 1 ? part_out.at(0) : 0;
        b.part_lse = part_lse.at(0);
        b.part_ref = part_ref.at(0);
        b.n_rows = n_rows;
        b.h_q = h_q;
        b.out_dtype = DSK_DTYPE_BF16;
        b.n_splits = plan.n_splits;
        b.split_entries = plan.split_entries;
        blocks.push_back(b);
    }
    device_array<dsk_attend_block> blocks_d(blocks);
    cudaEvent_t start, stop;
    OK(cudaEventCreate(&start));
    OK(cudaEventCreate(&stop));
    for (int i = 0; i < 6; i++)
        launch(plan, blocks_d.p + i % n_sets);
    OK(cudaStreamSynchronize(stream));
    std::vector<float> single, replay;
    float ms;
    for (int i = 0; i < 40; i++) {
        OK(cudaEventRecord(start, stream));
        launch(plan, blocks_d.p + i % n_sets);
        OK(cudaEventRecord(stop, stream));
        OK(cudaEventSynchronize(stop));
        OK(cudaEventElapsedTime(&ms, start, stop));
        single.push_back(ms * 1e3f);
    }
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < n_nodes; i++)
        launch(plan, blocks_d.p + i % n_sets);
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 22; i++) {
        OK(cudaEventRecord(start, stream));
        OK(cudaGraphLaunch(exec, stream));
        OK(cudaEventRecord(stop, stream));
        OK(cudaEventSynchronize(stop));
        OK(cudaEventElapsedTime(&ms, start, stop));
        if (i > 1)
            replay.push_back(ms * 1e3f / n_nodes);
    }
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    const double flop = 2.0 * h_q * n_rows * topk * (l.d_qk() + l.latent), bytes = (double)n_rows * topk * l.row_bytes();
    std::sort(replay.begin(), replay.end());
    const float us = median(replay);
    printf("TIME %-6s %-5s h %3d rows %3d width %d splits %2d: graph %6.1f us (%.1f..%.1f) single %6.1f us | %4.0f TFLOP/s %.2f TB/s\n",
           l.name, p.scales == SCALES_POW2 ? "pow2" : "plain", h_q, n_rows, topk, plan.n_splits, us, replay[1],
           replay[replay.size() - 2], median(single), flop / us * 1e-6, bytes / us * 1e-6);
    fflush(stdout);
}

static void time_layout(int i_layout, bool is_short)
{
    const int64_t n_windows = i_layout == 0 ? 208 : 128; /* 656-byte rows: 4.5 GB, beyond 32-bit offsets */
    const pool pow2(i_layout, n_windows * 32768, SCALES_POW2, false);
    if (i_layout == 0 && !is_short) {
        check_case far = {"beyond 4 GiB", 0, 64, 4, 2048};
        far.first_slot = pow2.n_slots - 32768;
        check(far, pow2);
    }
    time_case(pow2, 64, 128, 2048);
    if (is_short && ATTEND_SM90_ONLY_MAIN) {
        for (int n_rows : {64, 32, 8, 1})
            time_case(pow2, 64, n_rows, 2048);
        return;
    }
    if (i_layout == 2)
        time_case(pow2, 64, 128, 2112);
    if (i_layout == 0) {
        for (int n_rows : {256, 64, 32, 8, 1})
            time_case(pow2, 64, n_rows, 2048);
        if (!is_short)
            for (int n_rows : {17, 100, 150})
                time_case(pow2, 64, n_rows, 2048);
        time_case(pow2, 128, 128, 2048);
        time_case(pow2, 128, 1, 2048);
    }
    for (int h : {8, 16, 32})
        for (int n_rows : {1, 64, 128})
            if (!is_short || n_rows > 1)
                time_case(pow2, h, n_rows, 2048);
    const pool plain(i_layout, 128 * 32768, SCALES_PLAIN, false);
    time_case(plain, 64, 128, 2048);
    if (i_layout == 0) {
        time_case(plain, 64, 64, 2048);
        time_case(plain, 64, 1, 2048);
    }
}

int main(int argc, char **argv)
{
    const std::string mode = argc > 1 ? argv[1] : "check", filter = argc > 2 ? argv[2] : "";
    cudaDeviceProp properties;
    OK(cudaSetDevice(0));
    OK(cudaGetDeviceProperties(&properties, 0));
    OK(cudaStreamCreate(&stream));
    n_sms = properties.multiProcessorCount;
    OK(cudaFuncSetAttribute(reference, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
    for (const named_kernel &k : KERNELS)
        if (strstr(k.name, "merge") == nullptr)
            OK(cudaFuncSetAttribute(k.func, cudaFuncAttributeMaxDynamicSharedMemorySize, ATTEND_SM90_MAX_SHARED));
    for (int i = 0; i < 3; i++) {
        if (!filter.empty() && filter != LAYOUTS[i].name && filter != "quick")
            continue;
        if (mode == "time")
            time_layout(i, filter == "quick");
        else
            check_layout(i, mode == "small");
    }
    printf("%s: %d passed, %d failed\n", properties.name, n_passed, n_failed);
    return n_failed != 0;
}
