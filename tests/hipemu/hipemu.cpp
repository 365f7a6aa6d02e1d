/* hipemu.cpp - the emulator's scheduler: fibers, waves, blocks; LDS. The operations are in hipemu_ops.cpp. */
#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "hipemu_run.h"
#include "hipemu_wave.h"
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(DSA_SANITIZE_address)
#include <sanitizer/common_interface_defs.h>
#endif

namespace hipemu {

static const size_t STACK_BYTES = (size_t)256 << 10;
static const unsigned MAX_THREADS = 1024;
static const unsigned MAX_LDS = 160 << 10;

/* ---- fibers -------------------------------------------------------------------------------- */

struct fiber {
#if defined(__x86_64__)
    void *sp;
#else
    ucontext_t context;
#endif
    char *stack;
    void *fake_stack; /* AddressSanitizer's, while the fiber rests */
};

struct variable {
    const void *site;
    uint32_t at, bytes;
};

static struct {
    std::mutex mutex;
    hipemu_config config = {0, -1, 0, 0, 0};
    const hipemu_kernel *kernels;
    const hipemu_kernel *kernel;
    const void *param;
    lane lanes[MAX_THREADS];
    fiber fibers[MAX_THREADS];
    fiber scheduler;
    const void *scheduler_stack;
    size_t scheduler_stack_bytes;
    wave waves[MAX_THREADS / HIPEMU_WAVE];
    lane *current;
    uint32_t grid[3], at[3], n_threads, shared_bytes, max_lds;
    variable variables[16];
    int n_variables;
    uint32_t lds_used;
    uint8_t pattern;
    bool is_reversed;
    uint64_t n_launches;
    alignas(256) uint8_t lds[MAX_LDS];
} emu;

#if defined(__x86_64__)
extern "C" void hipemu_switch(void **save, void *to);
/* Callee-saved registers and the floating point control words on the stack, then the other stack. */
asm(".text\n"
    ".globl hipemu_switch\n"
    ".hidden hipemu_switch\n"
    ".type hipemu_switch,@function\n"
    "hipemu_switch:\n"
    "  push %rbp\n  push %rbx\n  push %r12\n  push %r13\n  push %r14\n  push %r15\n"
    "  sub $8, %rsp\n  stmxcsr (%rsp)\n  fnstcw 4(%rsp)\n"
    "  mov %rsp, (%rdi)\n"
    "  mov %rsi, %rsp\n"
    "  ldmxcsr (%rsp)\n  fldcw 4(%rsp)\n  add $8, %rsp\n"
    "  pop %r15\n  pop %r14\n  pop %r13\n  pop %r12\n  pop %rbx\n  pop %rbp\n"
    "  ret\n"
    ".size hipemu_switch, .-hipemu_switch\n");
#endif

static void switch_to(fiber *from, fiber *to)
{
#if defined(__x86_64__)
    hipemu_switch(&from->sp, to->sp);
#else
    swapcontext(&from->context, &to->context);
#endif
}

/* A fiber that never comes back gives its fake stack up. */
static void before_switch(fiber *from, const void *stack, size_t bytes, bool is_last)
{
#if defined(DSA_SANITIZE_address)
    __sanitizer_start_switch_fiber(is_last ? nullptr : &from->fake_stack, stack, bytes);
#else
    (void)from;
    (void)stack;
    (void)bytes;
    (void)is_last;
#endif
}

static void after_switch(fiber *self)
{
#if defined(DSA_SANITIZE_address)
    const void *stack;
    size_t bytes;

    __sanitizer_finish_switch_fiber(self->fake_stack, &stack, &bytes);
    if (self != &emu.scheduler) {
        emu.scheduler_stack = stack;
        emu.scheduler_stack_bytes = bytes;
    }
#else
    (void)self;
#endif
}

static fiber *fiber_of(const lane *l)
{
    return &emu.fibers[l - emu.lanes];
}

static void rest(lane *l, bool is_last)
{
    before_switch(fiber_of(l), emu.scheduler_stack, emu.scheduler_stack_bytes, is_last);
    switch_to(fiber_of(l), &emu.scheduler);
    after_switch(fiber_of(l));
}

static void resume(lane *l)
{
    emu.current = l;
    before_switch(&emu.scheduler, fiber_of(l)->stack, STACK_BYTES, false);
    switch_to(&emu.scheduler, fiber_of(l));
    after_switch(&emu.scheduler);
}

static void enter()
{
    lane *l = emu.current;

    fiber_of(l)->fake_stack = nullptr;
    after_switch(fiber_of(l));
    emu.kernel->body(emu.param);
    wait_async();
    l->state = LANE_GONE;
    rest(l, true);
    abort(); /* a lane that is gone is not resumed */
}

static void start(lane *l)
{
    fiber *f = fiber_of(l);

    if (f->stack == nullptr) {
        void *p = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (p == MAP_FAILED) {
            perror("hipemu: stacks");
            abort();
        }
        f->stack = (char *)p;
    }
#if defined(__x86_64__)
    void **top = (void **)(f->stack + STACK_BYTES - 64);

    *--top = nullptr; /* enter's return address, and its alignment */
    *--top = (void *)enter;
    top -= 6; /* registers */
    *--top = nullptr;
    asm volatile("stmxcsr (%0)\n fnstcw 4(%0)" ::"r"(top) : "memory");
    f->sp = top;
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = STACK_BYTES;
    f->context.uc_link = nullptr;
    makecontext(&f->context, enter, 0);
#endif
}

/* ---- faults -------------------------------------------------------------------------------- */

static void print_lane(const lane *l)
{
    if (l == nullptr)
        return;
    if (l->state == LANE_GONE)
        fprintf(stderr, " [thread %u has left]", l->id);
    else if (l->op != nullptr)
        fprintf(stderr, " [thread %u at %s, %s:%d, its %llu.]", l->id, l->op->name, l->op->file, l->op->line,
                (unsigned long long)l->n_meetings);
    else
        fprintf(stderr, " [thread %u]", l->id);
}

void fail_at(const char *what, const lane *a, const lane *b)
{
    fprintf(stderr, "hipemu: %s %s: %s", emu.kernel->target, emu.kernel->name, what);
    print_lane(a);
    print_lane(b);
    fprintf(stderr, " block %u,%u,%u\n", emu.at[0], emu.at[1], emu.at[2]);
    abort();
}

void fail(const char *what)
{
    fail_at(what, emu.current, nullptr);
}

/* ---- the lane's side ----------------------------------------------------------------------- */

void meet(const operation *op, const void *a, const void *b, const void *c, void *out)
{
    lane *l = emu.current;

    l->op = op;
    l->in[0] = a;
    l->in[1] = b;
    l->in[2] = c;
    l->out = out;
    l->n_meetings++;
    l->state = op->kind == BLOCK ? LANE_AT_BARRIER : LANE_WAITS;
    rest(l, false);
}

unsigned thread()
{
    return emu.current->id;
}

unsigned block(int axis)
{
    return emu.at[axis];
}

const void *implicit_arguments()
{
    return emu.grid;
}

/* Variables get their places in the order in which the block first comes by; size 0: the launch's own bytes. */
void *lds(const void *site, size_t bytes)
{
    variable *v;

    for (int i = 0; i < emu.n_variables; i++) {
        if (emu.variables[i].site == site)
            return emu.lds + emu.variables[i].at;
    }
    if (emu.n_variables == (int)(sizeof(emu.variables) / sizeof(emu.variables[0])))
        fail("too many LDS variables");
    v = &emu.variables[emu.n_variables++];
    v->site = site;
    v->at = (emu.lds_used + 15) / 16 * 16;
    v->bytes = (uint32_t)bytes;
    emu.lds_used = v->at + v->bytes;
    if (emu.lds_used + emu.shared_bytes > emu.max_lds)
        fail("more LDS than the chip has");
    return emu.lds + v->at;
}

void copy_async(const void *from, void *to, unsigned bytes)
{
    lane *l = emu.current;
    uint8_t *place = (uint8_t *)to + (l->id % HIPEMU_WAVE) * bytes;

    if (place < emu.lds || place + bytes > emu.lds + emu.lds_used)
        fail("asynchronous copy past the LDS");
    if (l->n_copies == (int)(sizeof(l->copies) / sizeof(l->copies[0])))
        fail("too many asynchronous copies under way");
    l->copies[l->n_copies++] = {from, place, bytes};
    memset(place, emu.pattern, bytes);
}

void wait_async()
{
    lane *l = emu.current;

    for (int i = 0; i < l->n_copies; i++)
        memcpy(l->copies[i].to, l->copies[i].from, l->copies[i].bytes);
    l->n_copies = 0;
}

/* ---- waves and blocks ---------------------------------------------------------------------- */

static void resume_ready(wave &w)
{
    for (int i = 0; i < w.n; i++) {
        lane *l = w.lanes[emu.is_reversed ? w.n - 1 - i : i];

        if (l->state == LANE_READY)
            resume(l);
    }
}

/* Lanes that are there must mean the same, also by how many times they have met before. */
static lane *agree(wave &w)
{
    lane *first = nullptr;

    for (int i = 0; i < w.n; i++) {
        lane *l = w.lanes[i];

        if (l->state == LANE_GONE)
            continue;
        if (first == nullptr)
            first = l;
        if (l->op != first->op)
            fail_at("lanes of a wave at different operations", first, l);
        if (l->n_meetings != first->n_meetings)
            fail_at("lanes of a wave came here a different number of times", first, l);
    }
    return first;
}

/* Until all lanes are gone or at a barrier of the block. */
static void run_wave(wave &w)
{
    for (;;) {
        lane *first;

        resume_ready(w);
        first = agree(w);
        if (first == nullptr || first->state == LANE_AT_BARRIER)
            return;
        if (first->op->kind == WAVE_FULL) {
            for (int i = 0; i < HIPEMU_WAVE; i++) {
                if (i >= w.n || w.lanes[i]->state == LANE_GONE)
                    fail_at("matrix instruction without all lanes", first, i < w.n ? w.lanes[i] : nullptr);
            }
            emu.config.n_matrix++;
        }
        emu.config.n_collectives++;
        first->op->run(w, first->op->imm);
        for (int i = 0; i < w.n; i++) {
            if (w.lanes[i]->state == LANE_WAITS)
                w.lanes[i]->state = LANE_READY;
        }
    }
}

/* All waves to the next barrier; false: all have left. Waves may meet at different barriers of the source. */
static bool run_interval(int n_waves)
{
    uint32_t n_live = 0;
    lane *first = nullptr, *gone = nullptr;

    for (int i = 0; i < n_waves; i++)
        run_wave(emu.waves[emu.is_reversed ? n_waves - 1 - i : i]);
    for (uint32_t i = 0; i < emu.n_threads; i++) {
        lane *l = &emu.lanes[i];

        if (l->state == LANE_GONE) {
            gone = l;
            continue;
        }
        n_live++;
        first = first == nullptr ? l : first;
        l->state = LANE_READY;
    }
    if (n_live != 0 && gone != nullptr)
        fail_at("barrier that some threads never reach", first, gone);
    return n_live != 0;
}

static void run_block()
{
    const int n_waves = (int)((emu.n_threads + HIPEMU_WAVE - 1) / HIPEMU_WAVE);

    memset(emu.lds, emu.pattern, sizeof(emu.lds));
    emu.n_variables = 0;
    emu.lds_used = 0;
    for (int i = 0; i < n_waves; i++)
        emu.waves[i].n = 0;
    for (uint32_t i = 0; i < emu.n_threads; i++) {
        lane *l = &emu.lanes[i];
        wave &w = emu.waves[i / HIPEMU_WAVE];

        l->id = i;
        l->state = LANE_READY;
        l->op = nullptr;
        l->n_meetings = 0;
        l->n_copies = 0;
        w.lanes[w.n++] = l;
        start(l);
    }
    while (run_interval(n_waves)) {
    }
    emu.config.n_blocks++;
}

registration::registration(hipemu_kernel *kernel)
{
    kernel->next = emu.kernels;
    emu.kernels = kernel;
}

} // namespace hipemu

/* ---- launch --------------------------------------------------------------------------------- */

using namespace hipemu;

const struct hipemu_kernel *hipemu_find(const char *target, const char *name)
{
    for (const hipemu_kernel *k = emu.kernels; k != nullptr; k = k->next) {
        if (strcmp(k->target, target) == 0 && strcmp(k->name, name) == 0)
            return k;
    }
    return nullptr;
}

struct hipemu_config *hipemu_configure(void)
{
    return &emu.config;
}

void hipemu_launch(const struct hipemu_kernel *kernel, const uint32_t grid[3], uint32_t block, uint32_t shared_bytes,
                   const void *param)
{
    const std::lock_guard<std::mutex> guard(emu.mutex);

    emu.kernel = kernel;
    emu.param = param;
    emu.current = nullptr;
    memset(emu.at, 0, sizeof(emu.at));
    if (block == 0 || block > kernel->max_threads)
        fail("block larger than the kernel's bound");
    emu.n_threads = block;
    emu.shared_bytes = shared_bytes;
    emu.max_lds = strcmp(kernel->target, "gfx942") == 0 ? 64 << 10 : MAX_LDS;
    emu.is_reversed = emu.config.order == 2 || (emu.config.order == 0 && emu.n_launches % 2 == 1);
    emu.pattern = (uint8_t)(emu.config.pattern >= 0 ? emu.config.pattern : emu.n_launches % 2 == 1 ? 0x3c : 0xff);
    emu.n_launches++;
    memcpy(emu.grid, grid, sizeof(emu.grid));
    for (emu.at[2] = 0; emu.at[2] < grid[2]; emu.at[2]++) {
        for (emu.at[1] = 0; emu.at[1] < grid[1]; emu.at[1]++) {
            for (emu.at[0] = 0; emu.at[0] < grid[0]; emu.at[0]++)
                run_block();
        }
    }
    emu.current = nullptr;
}

/* ---- for C ------------------------------------------------------------------------------------ */

void hipemu_run_grid(const char *target, const char *name, const uint32_t grid[3], uint32_t block, const void *param)
{
    const hipemu_kernel *kernel = hipemu_find(target, name);

    if (kernel == nullptr) {
        fprintf(stderr, "hipemu: %s has no kernel %s\n", target, name);
        abort();
    }
    hipemu_launch(kernel, grid, block, 0, param);
}

void hipemu_run(const char *target, const char *name, uint32_t grid_x, uint32_t grid_y, uint32_t block, const void *param)
{
    const uint32_t grid[3] = {grid_x, grid_y, 1};

    hipemu_run_grid(target, name, grid, block, param);
}

void hipemu_set(int order, int pattern)
{
    hipemu_configure()->order = order;
    hipemu_configure()->pattern = pattern;
}

float hipemu_fp8(uint8_t byte, int is_fnuz)
{
    return hipemu_fp8_to_f32(byte, is_fnuz != 0);
}
