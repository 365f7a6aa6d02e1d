/* dsa_fdsock.h - the messages of the socket that takes file descriptors (SCM_RIGHTS), next to the gRPC one.
 *
 * AF_UNIX, SOCK_SEQPACKET. The client sends one dsa_fd_offer with exactly one descriptor attached; the server
 * answers each offer with one dsa_fd_answer, in order. An accepted descriptor waits, owned by the session, until
 * RegisterRegion names its ticket; then the ticket is used up. Descriptors that nobody claims are closed with the
 * session. Integers are in host order: both ends are on one host. */
#ifndef DSA_FDSOCK_H
#define DSA_FDSOCK_H

#include <stdint.h>

#define DSA_FD_MAGIC   0x44534146u /* "DSAF" */
#define DSA_FD_VERSION 1u

struct dsa_fd_offer {
    uint32_t magic;
    uint32_t version;
    uint8_t session[16]; /* token */
    uint64_t ticket;     /* the client's number for this descriptor; unique in its session, not 0 */
};

struct dsa_fd_answer {
    uint64_t ticket;
    int32_t status; /* dsa_status */
    uint32_t reserved;
    char text[112]; /* one sentence when status is not 0 */
};

_Static_assert(sizeof(struct dsa_fd_offer) == 32, "fd offer");
_Static_assert(sizeof(struct dsa_fd_answer) == 128, "fd answer");

#endif /* DSA_FDSOCK_H */
