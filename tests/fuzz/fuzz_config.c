/* fuzz_config.c - any bytes as a settings file: it is refused with a field and a text, or taken, and then what is printed of it is
 * taken again and means the same. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "server/config_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

static dsa_status read_bytes(struct srv_config *config, const void *bytes, size_t n, struct srv_err *err)
{
    char path[64];
    int fd = memfd_create("settings", MFD_CLOEXEC);
    dsa_status rc;

    if (fd < 0 || write(fd, bytes, n) != (ssize_t)n)
        abort();
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    srv_config_defaults(config);
    rc = srv_config_read_file(config, path, err);
    close(fd);
    return rc;
}

static char *print(const struct srv_config *config, size_t *n_p)
{
    char *text = NULL;
    FILE *out = open_memstream(&text, n_p);

    if (!out)
        abort();
    srv_config_print(config, out);
    if (fclose(out) != 0)
        abort();
    return text;
}

/* Values without the comments on where they come from. */
static void strip(char *text)
{
    char *to = text;

    for (const char *at = text; *at; at++) {
        if (strncmp(at, "  # ", 4) == 0)
            while (at[1] && at[1] != '\n')
                at++;
        else
            *to++ = *at;
    }
    *to = '\0';
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    struct srv_config config, again;
    struct srv_err err = {0};
    size_t n_first, n_second;
    char *first, *second;

    if (read_bytes(&config, bytes, n, &err) != DSA_OK) {
        if (err.text[0] == '\0')
            abort();
        return 0;
    }
    first = print(&config, &n_first);
    if (read_bytes(&again, first, n_first, &err) != DSA_OK) {
        fprintf(stderr, "printed, and refused: %s=%s: %s\n%s", err.field, err.value, err.text, first);
        abort();
    }
    second = print(&again, &n_second);
    strip(first);
    strip(second);
    if (strcmp(first, second) != 0) {
        fprintf(stderr, "printed:\n%s\nread again:\n%s", first, second);
        abort();
    }
    free(first);
    free(second);
    return 0;
}
