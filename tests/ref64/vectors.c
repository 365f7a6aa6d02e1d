#include "vectors.h"

#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_BYTES (INT64_C(1) << 32) /* a case is small; more is a damaged meta.txt */

__attribute__((format(printf, 3, 4))) static int fail(char *text, size_t size, const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    vsnprintf(text, size, format, ap);
    va_end(ap);
    return -1;
}

static int64_t dtype_bytes(enum vectors_dtype dtype)
{
    switch (dtype) {
    case VECTORS_U8:
        return 1;
    case VECTORS_U16:
        return 2;
    case VECTORS_I32:
    case VECTORS_F32:
        return 4;
    }
    return 0;
}

static int parse_dtype(const char *word, enum vectors_dtype *dtype_p)
{
    static const struct {
        const char *name;
        enum vectors_dtype dtype;
    } table[] = {
        {"uint8", VECTORS_U8}, {"uint16", VECTORS_U16}, {"int32", VECTORS_I32}, {"float32", VECTORS_F32}};

    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        if (strcmp(word, table[i].name) == 0) {
            *dtype_p = table[i].dtype;
            return 0;
        }
    }
    return -1;
}

/* The rest of an `array` line: NAME DTYPE DIM... */
static int parse_array(char *rest, struct vectors_array *array)
{
    char *save = NULL, *name = strtok_r(rest, " ", &save), *dtype = strtok_r(NULL, " ", &save), *word;

    memset(array, 0, sizeof(*array));
    if (!name || !dtype || strlen(name) >= sizeof(array->name) || strchr(name, '/')
        || parse_dtype(dtype, &array->dtype) != 0)
        return -1;
    strcpy(array->name, name);
    array->n_elems = 1;
    while ((word = strtok_r(NULL, " ", &save)) != NULL) {
        char *end;
        long long dim = strtoll(word, &end, 10);

        if (*end != '\0' || dim < 0 || array->rank == VECTORS_MAX_RANK
            || (dim > 0 && array->n_elems > MAX_BYTES / dim))
            return -1;
        array->shape[array->rank++] = dim;
        array->n_elems *= dim;
    }
    return array->rank > 0 ? 0 : -1;
}

static int parse_line(char *line, struct vectors_case *c)
{
    char *space = strchr(line, ' ');

    if (!space || space == line)
        return -1;
    *space++ = '\0';
    if (strcmp(line, "array") == 0) {
        if (c->n_arrays == VECTORS_MAX_ARRAYS || parse_array(space, &c->arrays[c->n_arrays]) != 0)
            return -1;
        c->n_arrays++;
        return 0;
    }
    if (c->n_keys == VECTORS_MAX_KEYS || strlen(line) >= sizeof(c->keys[0].key)
        || strlen(space) >= sizeof(c->keys[0].value))
        return -1;
    strcpy(c->keys[c->n_keys].key, line);
    strcpy(c->keys[c->n_keys].value, space);
    c->n_keys++;
    return 0;
}

static int read_meta(const char *path, struct vectors_case *c, char *text, size_t text_size)
{
    char file[4096], line[512];
    int n_line = 0, rc = 0;
    FILE *f;

    snprintf(file, sizeof(file), "%s/meta.txt", path);
    f = fopen(file, "r");
    if (!f)
        return fail(text, text_size, "%s: %s", file, strerror(errno));
    while (rc == 0 && fgets(line, sizeof(line), f)) {
        line[strcspn(line, "\r\n")] = '\0';
        n_line++;
        if (line[0] != '\0' && parse_line(line, c) != 0)
            rc = fail(text, text_size, "%s line %d: neither KEY VALUE nor array NAME DTYPE DIM...", file,
                      n_line);
    }
    fclose(f);
    return rc;
}

static int read_array(const char *path, struct vectors_array *array, char *text, size_t text_size)
{
    size_t bytes = (size_t)(array->n_elems * dtype_bytes(array->dtype)), got;
    char file[4096];
    FILE *f;

    snprintf(file, sizeof(file), "%s/%s.bin", path, array->name);
    f = fopen(file, "rb");
    if (!f)
        return fail(text, text_size, "%s: %s", file, strerror(errno));
    array->data = malloc(bytes + 1);
    if (!array->data) {
        fclose(f);
        return fail(text, text_size, "%s: out of memory for %zu bytes", file, bytes);
    }
    got = fread(array->data, 1, bytes + 1, f); /* one more than wanted, to see a file that is too long */
    fclose(f);
    if (got != bytes)
        return fail(text, text_size, "%s: %s than the %zu bytes that meta.txt says", file,
                    got < bytes ? "shorter" : "longer", bytes);
    return 0;
}

int vectors_open(const char *path, struct vectors_case *c_p, char *text, size_t text_size)
{
    struct vectors_case *c = calloc(1, sizeof(*c));
    const char *name = strrchr(path, '/');
    int rc;

    if (!c)
        return fail(text, text_size, "%s: out of memory", path);
    snprintf(c->name, sizeof(c->name), "%s", name ? name + 1 : path);
    rc = read_meta(path, c, text, text_size);
    for (int i = 0; rc == 0 && i < c->n_arrays; i++)
        rc = read_array(path, &c->arrays[i], text, text_size);
    if (rc == 0)
        *c_p = *c;
    else
        vectors_close(c);
    free(c);
    return rc;
}

void vectors_close(struct vectors_case *c)
{
    for (int i = 0; i < c->n_arrays; i++) {
        free(c->arrays[i].data);
        c->arrays[i].data = NULL;
    }
    c->n_arrays = 0;
}

const char *vectors_key(const struct vectors_case *c, const char *key)
{
    for (int i = 0; i < c->n_keys; i++) {
        if (strcmp(c->keys[i].key, key) == 0)
            return c->keys[i].value;
    }
    return NULL;
}

const struct vectors_array *vectors_find(const struct vectors_case *c, const char *name,
                                         enum vectors_dtype dtype, int rank)
{
    for (int i = 0; i < c->n_arrays; i++) {
        const struct vectors_array *array = &c->arrays[i];

        if (strcmp(array->name, name) == 0)
            return array->dtype == dtype && array->rank == rank ? array : NULL;
    }
    return NULL;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* 1 if dir/name holds a meta.txt. */
static int is_case(const char *dir, const char *name)
{
    char file[4096];
    struct stat st;

    snprintf(file, sizeof(file), "%s/%s/meta.txt", dir, name);
    return name[0] != '.' && stat(file, &st) == 0 && S_ISREG(st.st_mode);
}

static int push_name(char ***names_p, int *n_p, const char *name)
{
    char **names = realloc(*names_p, ((size_t)*n_p + 1) * sizeof(*names));

    if (!names)
        return -1;
    *names_p = names;
    names[*n_p] = strdup(name);
    if (!names[*n_p])
        return -1;
    ++*n_p;
    return 0;
}

int vectors_list(const char *dir, char ***names_p, int *n_p, char *text, size_t text_size)
{
    char **names = NULL;
    int n = 0, rc = 0;
    struct dirent *entry;
    DIR *d = opendir(dir);

    if (!d)
        return fail(text, text_size, "%s: %s", dir, strerror(errno));
    while (rc == 0 && (entry = readdir(d)) != NULL) {
        if (is_case(dir, entry->d_name))
            rc = push_name(&names, &n, entry->d_name);
    }
    closedir(d);
    if (rc != 0) {
        vectors_free_list(names, n);
        return fail(text, text_size, "%s: out of memory", dir);
    }
    if (n > 0)
        qsort(names, (size_t)n, sizeof(*names), compare_names);
    *names_p = names;
    *n_p = n;
    return 0;
}

void vectors_free_list(char **names, int n)
{
    for (int i = 0; i < n; i++)
        free(names[i]);
    free(names);
}
