/* hooks.h - words of a file that a test shares with dsad-hooked: what the test asks for, and what it can watch. The Python
 * side (dsatest.Hooks) has the same order. All are 64-bit, all begin as 0. */
#ifndef TESTS_E2E_HOOKS_H
#define TESTS_E2E_HOOKS_H

enum hook_word {
    HOOK_GATE,        /* test: while not 0, a launch waits before it begins; 2: launches of attend alone */
    HOOK_N_ENTERED,   /* launches that have come to the gate */
    HOOK_N_LEFT,      /* launches that have ended */
    HOOK_DELAY_NS,    /* test: what each launch takes longer */
    HOOK_LAUNCH_FAIL, /* test: dsk_status that launches of attend end with, without running; 0 = run */
    HOOK_OPEN_GATE,   /* test: while not 0, opening the device waits */
    HOOK_N_OPENING,   /* devices that have come to that gate */
    HOOK_ALLOC_FAIL,  /* test: the allocation with this number fails, from 1; 0 = none */
    HOOK_N_ALLOCS,    /* allocations since the test wrote 0 here; counted while HOOK_ALLOC_FAIL is not 0 */
    HOOK_N_WORDS = 16
};

#endif /* TESTS_E2E_HOOKS_H */
