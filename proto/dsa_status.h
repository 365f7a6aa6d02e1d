/* dsa_status.h - the status codes of the contract between client and server: one table from which the enum,
 * the stable reason words, the gRPC codes, the scopes and the texts all come. Plain C, no dependencies. */
#ifndef DSA_STATUS_H
#define DSA_STATUS_H

/* name, value, reason word on the wire, google.rpc.Code, scope (dsa.v1.Scope), text */
#define DSA_STATUS_MAP(X)                                                                                    \
    X(DSA_OK, 0, "", 0, 0, "ok")                                                                             \
    /* the request is wrong: sending it again will not help */                                               \
    X(DSA_E_BAD_REQUEST, -1, "BAD_REQUEST", 3, 1, "a field is missing, malformed or outside its range")      \
    X(DSA_E_BAD_SHAPE, -2, "BAD_SHAPE", 3, 1, "a tensor's shape, dtype or strides do not fit")               \
    X(DSA_E_BAD_RANGE, -3, "BAD_RANGE", 11, 1, "an offset, position or count reaches past its end")          \
    X(DSA_E_BAD_LAYOUT, -4, "BAD_LAYOUT", 3, 1, "the layout is unknown or not the pool's")                   \
    X(DSA_E_UNSUPPORTED, -5, "UNSUPPORTED", 9, 1, "no support rule serves this combination")                 \
    X(DSA_E_UNIMPLEMENTED, -6, "UNIMPLEMENTED", 12, 1, "this build does not have that part")                 \
    X(DSA_E_NONFINITE, -7, "NONFINITE", 3, 1, "a strict append met NaN or infinity")                         \
    X(DSA_E_NOT_FOUND, -8, "NOT_FOUND", 5, 1, "no such object in this session")                              \
    X(DSA_E_EXISTS, -9, "ALREADY_EXISTS", 6, 1, "the id is in use")                                          \
    X(DSA_E_ACCESS, -10, "ACCESS_DENIED", 7, 1, "the region or method does not grant this access")           \
    X(DSA_E_PRECONDITION, -11, "FAILED_PRECONDITION", 9, 1, "the object is not in a state that allows this") \
    X(DSA_E_BAD_FD, -12, "BAD_FD", 9, 1, "the file descriptor is missing or cannot be used")                 \
    X(DSA_E_UNAUTHENTICATED, -13, "UNAUTHENTICATED", 16, 1, "the call carries no token that is known")       \
    /* the request is fine: later it may succeed */                                                          \
    X(DSA_E_NO_PAGES, -20, "NO_PAGES", 8, 1, "the KV pool has not enough free pages")                        \
    X(DSA_E_QUEUE_FULL, -21, "QUEUE_FULL", 8, 1, "too many requests wait already")                           \
    X(DSA_E_LIMIT, -22, "LIMIT", 8, 1, "a limit of the server is reached")                                   \
    X(DSA_E_TOO_LARGE, -23, "TOO_LARGE", 8, 1, "the message or tensor is larger than the server takes")      \
    X(DSA_E_NO_MEMORY, -24, "NO_MEMORY", 8, 1, "the server is out of memory")                                \
    X(DSA_E_CANCELLED, -25, "CANCELLED", 1, 1, "cancelled by the client")                                    \
    X(DSA_E_DEADLINE, -26, "DEADLINE", 4, 1, "the deadline passed before the work was launched")             \
    X(DSA_E_STALLED, -27, "STALLED", 8, 1, "the client did not read its replies in time")                    \
    /* the session, the device or the process is the matter */                                               \
    X(DSA_E_NO_SESSION, -40, "NO_SESSION", 16, 2, "no session has this token")                               \
    X(DSA_E_SESSION_EXPIRED, -41, "SESSION_EXPIRED", 10, 2, "the session's lease ran out")                   \
    X(DSA_E_DEVICE_LOST, -50, "DEVICE_LOST", 14, 3, "the device failed; its jobs fail until a restart")      \
    X(DSA_E_DRAINING, -60, "DRAINING", 14, 4, "the server is going down")                                    \
    X(DSA_E_INTERNAL, -61, "INTERNAL", 13, 1, "an error inside the server")                                  \
    /* client side only */                                                                                   \
    X(DSA_E_CONNECT, -80, "CONNECT", 14, 2, "the server cannot be reached")                                  \
    X(DSA_E_TIMEOUT, -81, "TIMEOUT", 4, 1, "no answer in the time given")                                    \
    X(DSA_E_PROTOCOL, -82, "PROTOCOL", 13, 2, "the server's answer cannot be understood")                    \
    X(DSA_E_SYSTEM, -83, "SYSTEM", 13, 1, "a system call failed")

#define DSA_STATUS_ENUM(name, value, reason, grpc_code, scope, text) name = (value),
typedef enum { DSA_STATUS_MAP(DSA_STATUS_ENUM) } dsa_status;
#undef DSA_STATUS_ENUM

#endif /* DSA_STATUS_H */
