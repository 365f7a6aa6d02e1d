/* descriptors.h - the embedded descriptor set, split into the files that reflection serves. The very bytes that protoc
 * wrote are served; each is unpacked once, for the index of names. [L] */
#ifndef SERVER_DESCRIPTORS_H
#define SERVER_DESCRIPTORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SRV_MAX_FILES 16

struct srv_proto_file {
    const uint8_t *bytes; /* a FileDescriptorProto */
    size_t n;
};

/* Reads the set on first use. False: the set cannot be read (a build fault). */
bool srv_descriptors_load(void);
void srv_descriptors_unload(void);

/* Full names of the services, as many as max; returns how many there are. */
size_t srv_descriptors_services(const char **names_p, size_t max);

/* A file by its name ("dsa/v1/dsa.proto"), or the one that defines a symbol ("dsa.v1.Tensor",
 * "dsa.v1.SparseAttention.Attend"), with everything that it imports, itself first. Returns how many; 0 = unknown. */
size_t srv_descriptors_by_name(const char *name, struct srv_proto_file *files_p, size_t max);
size_t srv_descriptors_by_symbol(const char *symbol, struct srv_proto_file *files_p, size_t max);

#endif /* SERVER_DESCRIPTORS_H */
