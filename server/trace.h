/* trace.h - the W3C header traceparent: who asked, across services. Pure; any thread.
 *   00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01     version - trace id - parent id - flags
 * What is malformed counts as absent, as the recommendation has it. dsad makes no spans of its own, so the parent id that it
 * answers with is the one it was given. */
#ifndef SERVER_TRACE_H
#define SERVER_TRACE_H

#include <stdbool.h>
#include <stddef.h>

#define SRV_TRACEPARENT_BYTES 55

struct srv_trace {
    char parent[SRV_TRACEPARENT_BYTES + 1]; /* in version 00; "" = there is none */
    char id[33];                            /* the trace id */
};

/* False, and *trace_p is empty: not exactly what version 00 has, all zero ids, version ff; of a later version, what
 * does not begin like version 00. */
bool srv_trace_parse(struct srv_trace *trace_p, const char *text, size_t n);

/* For log lines: NULL leaves the field out. */
static inline const char *srv_trace_id(const struct srv_trace *trace)
{
    return trace && trace->id[0] != '\0' ? trace->id : NULL;
}

#endif /* SERVER_TRACE_H */
