/* hipemu_wave.h - lanes and waves as the scheduler and the operations see them. Private to the emulator. */
#ifndef TESTS_HIPEMU_WAVE_H
#define TESTS_HIPEMU_WAVE_H

#include "hipemu.h"
#undef __builtin_trap

namespace hipemu
{

enum lane_state { LANE_READY, LANE_WAITS, LANE_AT_BARRIER, LANE_GONE };

struct copy {
    const void *from;
    void *to;
    unsigned bytes;
};

struct lane {
    unsigned id;
    lane_state state;
    const operation *op;
    uint64_t n_meetings;
    const void *in[3];
    void *out;
    copy copies[64];
    int n_copies;
};

struct wave {
    lane *lanes[HIPEMU_WAVE];
    int n;
};

[[noreturn]] void fail_at(const char *what, const lane *a, const lane *b);

} // namespace hipemu

#endif /* TESTS_HIPEMU_WAVE_H */
