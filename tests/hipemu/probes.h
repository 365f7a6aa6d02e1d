/* probes.h - what the kernels of probes.cpp are given. Plain C. */
#ifndef TESTS_HIPEMU_PROBES_H
#define TESTS_HIPEMU_PROBES_H

#include <stdint.h>

struct probe_args {
    uint64_t in, out; /* addresses of uint32 per thread unless a kernel says otherwise */
    uint64_t b, c;    /* further operands */
};

#endif /* TESTS_HIPEMU_PROBES_H */
