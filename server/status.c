#include "server/status.h"

#include <stdio.h>

struct status_row {
    const char *reason;
    const char *text;
    int grpc_code;
    int scope;
};

static struct status_row status_row(dsa_status status)
{
    switch (status) {
#define STATUS_CASE(name, value, reason, grpc_code, scope, text)                                             \
    case name:                                                                                               \
        return (struct status_row){reason, text, grpc_code, scope};
        DSA_STATUS_MAP(STATUS_CASE)
#undef STATUS_CASE
    }
    return (struct status_row){"INTERNAL", "unknown status", 13, 1};
}

const char *srv_status_reason(dsa_status status)
{
    return status_row(status).reason;
}

const char *srv_status_text(dsa_status status)
{
    return status_row(status).text;
}

int srv_status_grpc_code(dsa_status status)
{
    return status_row(status).grpc_code;
}

int srv_status_scope(dsa_status status)
{
    return status_row(status).scope;
}

/* No default: a new dsk code must be placed here before this compiles. */
dsa_status srv_status_from_dsk(dsk_status status)
{
    switch (status) {
    case DSK_OK:
        return DSA_OK;
    case DSK_E_BAD_ARGUMENT:
        return DSA_E_BAD_REQUEST;
    case DSK_E_UNSUPPORTED:
        return DSA_E_UNSUPPORTED;
    case DSK_E_NO_MEMORY:
        return DSA_E_NO_MEMORY;
    case DSK_E_NO_DEVICE:
        return DSA_E_PRECONDITION;
    case DSK_E_SLOT_RANGE:
        return DSA_E_BAD_RANGE;
    case DSK_E_NONFINITE:
        return DSA_E_NONFINITE;
    case DSK_E_DEVICE:
        return DSA_E_DEVICE_LOST;
    case DSK_E_INTERNAL:
        return DSA_E_INTERNAL;
    }
    return DSA_E_INTERNAL;
}

dsa_status srv_fail_dsk(struct srv_err *err, const struct dsk_err *cause, const char *prefix)
{
    dsa_status code = srv_status_from_dsk(cause->status);
    char field[sizeof(((struct srv_err *)0)->field)];

    snprintf(field, sizeof(field), "%s%s", prefix, cause->field);
    return srv_fail(err, code, field, "%s", cause->value, "%s",
                    cause->text[0] != '\0' ? cause->text : dsk_status_text(cause->status));
}
