/* bench_machine.h - what the machine itself can do: multiply-add peak and memory bandwidth, measured by plain threads of
 * our own, and a few facts for the report. One thread calls; functions that measure start and join their threads, and
 * end the program if they get none. */
#ifndef DSK_TOOLS_BENCH_MACHINE_H
#define DSK_TOOLS_BENCH_MACHINE_H

#include <stddef.h>
#include <stdint.h>

/* bench_peak.c, once per instruction set. Returns the floating-point operations done. */
double bench_peak_generic(uint64_t n_steps, const float *values, float *sink);
double bench_peak_avx2(uint64_t n_steps, const float *values, float *sink);
double bench_peak_avx512(uint64_t n_steps, const float *values, float *sink);

double bench_now(void);        /* seconds, monotonic */
double bench_thread_now(void); /* seconds that the calling thread has had a processor */

/* GFLOP/s of n_threads that all run the peak loop of that instruction set (a DSK_ISA_* name: "avx2") for about
 * `seconds`. Each thread's rate is over its own processor time, so that what other processes take does not lower it.
 * A negative number if there is no such loop in this build. */
double bench_peak_gflops(const char *isa, int n_threads, double seconds);

/* GB/s at which n_threads read `bytes` bytes of `data` once, in shares of equal size. */
double bench_read_gbs(const void *data, size_t bytes, int n_threads);

void bench_cpu_model(char *text, size_t size);
size_t bench_cache_bytes(void); /* of the last level; 32 MiB if unknown */

#endif /* DSK_TOOLS_BENCH_MACHINE_H */
