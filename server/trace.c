#include "server/trace.h"

#include <string.h>

#define VERSION_AT 0
#define TRACE_AT   3
#define PARENT_AT  36
#define FLAGS_AT   53

static bool is_hex(const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!(text[i] >= '0' && text[i] <= '9') && !(text[i] >= 'a' && text[i] <= 'f'))
            return false;
    return true;
}

static bool is_zero(const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (text[i] != '0')
            return false;
    return true;
}

static bool is_sound(const char *text, size_t n)
{
    if (n < SRV_TRACEPARENT_BYTES || text[2] != '-' || text[PARENT_AT - 1] != '-'
        || text[FLAGS_AT - 1] != '-')
        return false;
    if (!is_hex(text, 2) || !is_hex(text + TRACE_AT, 32) || !is_hex(text + PARENT_AT, 16)
        || !is_hex(text + FLAGS_AT, 2))
        return false;
    if (is_zero(text + TRACE_AT, 32) || is_zero(text + PARENT_AT, 16) || memcmp(text, "ff", 2) == 0)
        return false;
    /* A later version may say more, behind a dash. */
    return n == SRV_TRACEPARENT_BYTES || (memcmp(text, "00", 2) != 0 && text[SRV_TRACEPARENT_BYTES] == '-');
}

bool srv_trace_parse(struct srv_trace *trace_p, const char *text, size_t n)
{
    memset(trace_p, 0, sizeof(*trace_p));
    if (!is_sound(text, n))
        return false;
    memcpy(trace_p->parent, text, SRV_TRACEPARENT_BYTES);
    if (memcmp(text, "00", 2)
        != 0) { /* of another version's flags only "sampled" is known to mean the same */
        memcpy(trace_p->parent + VERSION_AT, "00", 2);
        trace_p->parent[FLAGS_AT] = '0';
        trace_p->parent[FLAGS_AT + 1] = strchr("13579bdf", text[FLAGS_AT + 1]) ? '1' : '0';
    }
    memcpy(trace_p->id, text + TRACE_AT, 32);
    return true;
}
