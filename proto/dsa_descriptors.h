/* dsa_descriptors.h - the serialised FileDescriptorSet of every service that dsad serves. */
#ifndef DSA_DESCRIPTORS_H
#define DSA_DESCRIPTORS_H

#include <stddef.h>

extern const unsigned char dsa_descriptors[];
extern const size_t dsa_descriptors_size;

#endif /* DSA_DESCRIPTORS_H */
