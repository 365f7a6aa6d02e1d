/* secret.h - comparing ids that must not be guessed. Pure; any thread. */
#ifndef SERVER_CORE_SECRET_H
#define SERVER_CORE_SECRET_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define SRV_SECRET_BYTES 16

/* In time that does not depend on the bytes: no early exit, and volatile so that the compiler adds none. */
static inline bool srv_secret_is_equal(const uint8_t *a, const uint8_t *b)
{
    const volatile uint8_t *x = a, *y = b;
    unsigned diff = 0;

    for (int i = 0; i < SRV_SECRET_BYTES; i++)
        diff |= (unsigned)(x[i] ^ y[i]);
    return diff == 0;
}

/* The key under which a secret lies in an idmap. Both halves go in, so that equal beginnings do not share a
 * bucket; what the time of a look-up tells is at most which buckets are empty, a few bits of a hash of 128.
 * */
static inline uint64_t srv_secret_key(const uint8_t *secret)
{
    uint64_t low, high;

    memcpy(&low, secret, sizeof(low));
    memcpy(&high, secret + sizeof(low), sizeof(high));
    return low ^ (high << 32 | high >> 32);
}

#endif /* SERVER_CORE_SECRET_H */
