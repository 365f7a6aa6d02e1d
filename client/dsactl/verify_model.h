/* verify_model.h - sequences as the checker knows them: the packed rows of every layer, kept beside the
 * server's. One thread. */
#ifndef DSACTL_VERIFY_MODEL_H
#define DSACTL_VERIFY_MODEL_H

#include "client/dsactl/verify.h"
#include "ref64_rng.h"

#define MODEL_MAX_TOKENS 512

struct model {
    uint64_t id; /* 0 = not there */
    uint32_t n_layers;
    uint32_t *n_tokens; /* per layer */
    uint8_t *rows;      /* [n_layers, MODEL_MAX_TOKENS, row_bytes] */
};

bool model_init(struct model *model, const struct verify *v); /* false: no memory */
void model_fini(struct model *model, struct verify *v);       /* releases the sequence too */
uint8_t *model_rows(const struct model *model, const struct verify *v, uint32_t layer);

/* These call the server and follow it. Failure is reported under `name` and returns false. */
bool model_create(struct model *model, struct verify *v, const char *name);
bool model_fork(struct model *model, const struct model *source, uint32_t n, struct verify *v,
                const char *name);
bool model_truncate(struct model *model, uint32_t n, struct verify *v, const char *name);
/* Appends n random tokens to every layer, by several appends when one would be too large; sometimes with
 * values that are not finite. */
bool model_append(struct model *model, uint32_t n, struct ref64_rng *rng, struct verify *v, const char *name);

/* Quantises [n_layers, n, d_qk] values behind what the model holds, from `layer` on; returns how many were
 * not finite. */
uint64_t model_store(struct model *model, uint32_t layer, uint32_t n_layers, uint32_t n,
                     const uint16_t *values, enum dsa_rule rule, const struct verify *v);

/* Random rows as above. */
void model_fill(struct ref64_rng *rng, uint16_t *values, size_t n_rows, bool has_nonfinite,
                const struct verify *v);

#endif /* DSACTL_VERIFY_MODEL_H */
