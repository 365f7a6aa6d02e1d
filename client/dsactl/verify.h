/* verify.h - what the parts of `dsactl verify` share. One thread. */
#ifndef DSACTL_VERIFY_H
#define DSACTL_VERIFY_H

#include "client/dsactl/dsactl.h"

struct verify {
    struct dsa_client *client;
    const struct dsa_capabilities *caps;
    const struct dsa_pool *pool;
    const struct ref64_layout *layout;
    bool has_memfd; /* the server takes file descriptors */
    bool is_verbose;
    unsigned n_passed, n_failed, n_skipped;
};

__attribute__((format(printf, 3, 4))) void verify_pass(struct verify *v, const char *name, const char *format,
                                                       ...);
__attribute__((format(printf, 3, 4))) void verify_fail(struct verify *v, const char *name, const char *format,
                                                       ...);
__attribute__((format(printf, 3, 4))) void verify_skip(struct verify *v, const char *name, const char *format,
                                                       ...);
/* A failure with the server's reason. */
void verify_error(struct verify *v, const char *name, const char *what, const struct dsa_error *err);

/* Every vector folder of dir. False: the directory cannot be read (printed). */
bool verify_vectors(struct verify *v, const char *dir);
/* n random cases. False: no memory. */
bool verify_random(struct verify *v, uint64_t n, uint64_t seed);

/* The stored bytes of one layer of a sequence against n expected rows. True when equal; else text says
 * where. */
bool verify_export(struct verify *v, uint64_t sequence, uint32_t layer, const uint8_t *rows, uint64_t n,
                   char *text, size_t size);

#endif /* DSACTL_VERIFY_H */
