/* inode.h - which socket a descriptor is. Any thread.
 * gRPC closes sockets without a word, and a number may be another's socket by the time it is looked at: the inode tells. statx and not fstat, since
 * asking about a descriptor that another thread may just be opening or closing is meant, and no mistake for a sanitizer to find. */
#ifndef SERVER_INODE_H
#define SERVER_INODE_H

#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>

/* 0: no socket. */
static inline uint64_t srv_socket_inode(int fd)
{
    struct statx st;

    return statx(fd, "", AT_EMPTY_PATH, STATX_INO | STATX_TYPE, &st) == 0 && S_ISSOCK(st.stx_mode)
               ? st.stx_ino
               : 0;
}

#endif /* SERVER_INODE_H */
