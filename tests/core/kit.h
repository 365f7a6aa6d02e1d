/* kit.h - for the core's tests: allocations that fail on demand and are counted, and repeatable random
 * numbers. A program that includes this is linked with --wrap for malloc, calloc, realloc and free. */
#ifndef TESTS_CORE_KIT_H
#define TESTS_CORE_KIT_H

#include <stdbool.h>
#include <stdint.h>

#include <check.h>

/* A scenario must not use Check's assertions, whose own allocations would be counted. It returns what went
 * wrong, or NULL, and copes with any one allocation failing: it looks that nothing changed, and tries again.
 * */
typedef const char *(*kit_scenario)(void);

#define KIT_TEXT_(x) #x
#define KIT_TEXT(x)  KIT_TEXT_(x)
#define NEED(cond)                                                                                           \
    do {                                                                                                     \
        if (!(cond))                                                                                         \
            return __FILE__ ":" KIT_TEXT(__LINE__) ": " #cond;                                               \
    } while (0)

/* An operation in a scenario: when it meets the failing allocation, `is_unchanged` must hold, and the second
 * try must succeed. */
#define TRY(operation, is_unchanged)                                                                         \
    do {                                                                                                     \
        dsa_status try_status = (operation);                                                                 \
        if (try_status == DSA_E_NO_MEMORY) {                                                                 \
            NEED(kit_alloc_has_failed());                                                                    \
            NEED(is_unchanged);                                                                              \
            try_status = (operation);                                                                        \
        }                                                                                                    \
        NEED(try_status == DSA_OK);                                                                          \
    } while (0)

/* Runs the scenario once to count its allocations, then once for each, failing that one; every run must end
 * with as many blocks as it began with. */
void kit_sweep(kit_scenario scenario);
bool kit_alloc_has_failed(void); /* in this run */

struct kit_rng {
    uint64_t state;
};
uint64_t kit_random(struct kit_rng *rng);
uint32_t kit_below(struct kit_rng *rng, uint32_t n); /* 0..n-1 */
bool kit_chance(struct kit_rng *rng, uint32_t n_in_thousand);

#endif /* TESTS_CORE_KIT_H */
