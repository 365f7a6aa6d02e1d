/* vectors.h - reads reference cases from folders: `meta.txt` (lines `KEY VALUE` and `array NAME DTYPE DIM...`)
 * beside one raw little-endian NAME.bin per array (tests/vectors/README.md).
 *
 * Any thread. What open and list return is owned by the caller until close and free. Failures return -1 and
 * leave one sentence in `text` that names the file; outputs are then untouched. */
#ifndef REF64_VECTORS_H
#define REF64_VECTORS_H

#include <stddef.h>
#include <stdint.h>

#define VECTORS_MAX_KEYS   16
#define VECTORS_MAX_ARRAYS 16
#define VECTORS_MAX_RANK   6

enum vectors_dtype { VECTORS_U8 = 1, VECTORS_U16, VECTORS_I32, VECTORS_F32 };

struct vectors_array {
    char name[32];
    enum vectors_dtype dtype;
    int rank;
    int64_t shape[VECTORS_MAX_RANK];
    int64_t n_elems;
    void *data; /* malloc'ed, so aligned for its type */
};

struct vectors_case {
    char name[64]; /* the folder's own name */
    int n_keys;
    struct {
        char key[32];
        char value[96];
    } keys[VECTORS_MAX_KEYS];
    int n_arrays;
    struct vectors_array arrays[VECTORS_MAX_ARRAYS];
};

/* Reads one folder. A missing, short or long .bin file, an unknown dtype and a malformed line are errors. */
int vectors_open(const char *path, struct vectors_case *c_p, char *text, size_t text_size);
void vectors_close(struct vectors_case *c);

/* Value of a key, or NULL. */
const char *vectors_key(const struct vectors_case *c, const char *key);

/* The array of that name if it has this dtype and rank, else NULL. */
const struct vectors_array *vectors_find(const struct vectors_case *c, const char *name,
                                         enum vectors_dtype dtype, int rank);

/* Names of the folders in dir that hold a meta.txt, sorted. Free with vectors_free_list. An existing
 * directory without any case gives 0 names. */
int vectors_list(const char *dir, char ***names_p, int *n_p, char *text, size_t text_size);
void vectors_free_list(char **names, int n);

#endif /* REF64_VECTORS_H */
