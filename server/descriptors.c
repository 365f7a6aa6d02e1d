#include "server/descriptors.h"

#include <stdlib.h>
#include <string.h>

#include "dsa_descriptors.h"
#include "google/protobuf/descriptor.pb-c.h"
#include "server/wire.h"

struct file {
    struct srv_proto_file raw;
    Google__Protobuf__FileDescriptorProto *parsed;
};

static struct file files[SRV_MAX_FILES];
static size_t n_files;

/* A FileDescriptorSet is a run of field 1, length, bytes. */
bool srv_descriptors_load(void)
{
    const uint8_t *at = dsa_descriptors, *end = dsa_descriptors + dsa_descriptors_size;

    if (n_files > 0)
        return true;
    while (at < end && n_files < SRV_MAX_FILES) {
        struct file *file = &files[n_files];
        uint64_t tag, n;

        if (!wire_varint(&at, end, &tag) || tag != 0x0a || !wire_varint(&at, end, &n)
            || n > (uint64_t)(end - at))
            return false;
        file->raw.bytes = at;
        file->raw.n = (size_t)n;
        file->parsed = google__protobuf__file_descriptor_proto__unpack(NULL, file->raw.n, at);
        if (!file->parsed)
            return false;
        at += n;
        n_files++;
    }
    return at == end && n_files > 0;
}

void srv_descriptors_unload(void)
{
    while (n_files > 0)
        google__protobuf__file_descriptor_proto__free_unpacked(files[--n_files].parsed, NULL);
}

size_t srv_descriptors_services(const char **names_p, size_t max)
{
    static char names[SRV_MAX_FILES][128];
    size_t n = 0;

    for (size_t i = 0; i < n_files; i++) {
        const Google__Protobuf__FileDescriptorProto *file = files[i].parsed;

        for (size_t j = 0; j < file->n_service && n < max && n < SRV_MAX_FILES; j++) {
            char *name = names[n];

            /* Package and service names of ours are short; anything longer would be cut, not overrun. */
            name[0] = '\0';
            strncat(name, file->package, 60);
            strncat(name, ".", 2);
            strncat(name, file->service[j]->name, 60);
            names_p[n++] = name;
        }
    }
    return n;
}

static const struct file *find_file(const char *name)
{
    for (size_t i = 0; i < n_files; i++)
        if (strcmp(files[i].parsed->name, name) == 0)
            return &files[i];
    return NULL;
}

static size_t add_closure(const struct file *file, struct srv_proto_file *files_p, size_t n, size_t max)
{
    for (size_t i = 0; i < n; i++)
        if (files_p[i].bytes == file->raw.bytes)
            return n;
    if (n == max)
        return n;
    files_p[n++] = file->raw;
    for (size_t i = 0; i < file->parsed->n_dependency; i++) {
        const struct file *dependency = find_file(file->parsed->dependency[i]);

        if (dependency)
            n = add_closure(dependency, files_p, n, max);
    }
    return n;
}

/* `name` is `rest`'s first component; returns what follows it, NULL if it is not. */
static const char *after(const char *rest, const char *name)
{
    size_t n = strlen(name);

    if (strncmp(rest, name, n) != 0 || (rest[n] != '\0' && rest[n] != '.'))
        return NULL;
    return rest[n] == '.' ? rest + n + 1 : rest + n;
}

static bool message_has(const Google__Protobuf__DescriptorProto *message, const char *rest)
{
    const char *inner = after(rest, message->name);

    if (!inner)
        return false;
    if (*inner == '\0')
        return true;
    for (size_t i = 0; i < message->n_nested_type; i++)
        if (message_has(message->nested_type[i], inner))
            return true;
    for (size_t i = 0; i < message->n_enum_type; i++)
        if (strcmp(message->enum_type[i]->name, inner) == 0)
            return true;
    for (size_t i = 0; i < message->n_field; i++)
        if (strcmp(message->field[i]->name, inner) == 0)
            return true;
    return false;
}

static bool service_has(const Google__Protobuf__ServiceDescriptorProto *service, const char *rest)
{
    const char *method = after(rest, service->name);

    if (!method)
        return false;
    if (*method == '\0')
        return true;
    for (size_t i = 0; i < service->n_method; i++)
        if (strcmp(service->method[i]->name, method) == 0)
            return true;
    return false;
}

static bool file_has(const Google__Protobuf__FileDescriptorProto *file, const char *symbol)
{
    const char *rest = file->package[0] != '\0' ? after(symbol, file->package) : symbol;

    if (!rest || *rest == '\0')
        return false;
    for (size_t i = 0; i < file->n_message_type; i++)
        if (message_has(file->message_type[i], rest))
            return true;
    for (size_t i = 0; i < file->n_enum_type; i++)
        if (strcmp(file->enum_type[i]->name, rest) == 0)
            return true;
    for (size_t i = 0; i < file->n_service; i++)
        if (service_has(file->service[i], rest))
            return true;
    return false;
}

size_t srv_descriptors_by_name(const char *name, struct srv_proto_file *files_p, size_t max)
{
    const struct file *file = find_file(name);

    return file ? add_closure(file, files_p, 0, max) : 0;
}

size_t srv_descriptors_by_symbol(const char *symbol, struct srv_proto_file *files_p, size_t max)
{
    for (size_t i = 0; i < n_files; i++)
        if (file_has(files[i].parsed, symbol))
            return add_closure(&files[i], files_p, 0, max);
    return 0;
}
