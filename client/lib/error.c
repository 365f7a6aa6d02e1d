/* error.c - from what the wire says to a dsa_error: by reason word where there is one, by gRPC code
 * otherwise. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "client/lib/internal.h"
#include "google/rpc/status.pb-c.h"

#define DETAIL_TYPE "type.googleapis.com/dsa.v1.Status"

struct status_row {
    dsa_status status;
    const char *reason;
    int grpc_code;
    int scope;
    const char *text;
};

#define STATUS_ROW(name, value, reason, grpc_code, scope, text) {name, reason, grpc_code, scope, text},
static const struct status_row rows[] = {DSA_STATUS_MAP(STATUS_ROW)};
#undef STATUS_ROW

#define N_ROWS (sizeof(rows) / sizeof(rows[0]))

static const struct status_row *row_of(dsa_status status)
{
    for (size_t i = 0; i < N_ROWS; i++) {
        if (rows[i].status == status)
            return &rows[i];
    }
    return row_of(DSA_E_INTERNAL);
}

const char *dsa_status_reason(dsa_status status)
{
    return row_of(status)->reason;
}

const char *dsa_status_text(dsa_status status)
{
    return row_of(status)->text;
}

/* What a bare gRPC code means when no reason came with it: the transport made it, not the service. */
static dsa_status status_of_grpc(int code)
{
    switch (code) {
    case 1:
        return DSA_E_CANCELLED;
    case 3:
        return DSA_E_BAD_REQUEST;
    case 4:
        return DSA_E_TIMEOUT;
    case 5:
        return DSA_E_NOT_FOUND;
    case 6:
        return DSA_E_EXISTS;
    case 7:
        return DSA_E_ACCESS;
    case 8:
        return DSA_E_LIMIT;
    case 9:
        return DSA_E_PRECONDITION;
    case 10:
        return DSA_E_SESSION_EXPIRED;
    case 11:
        return DSA_E_BAD_RANGE;
    case 12:
        return DSA_E_UNIMPLEMENTED;
    case 14:
        return DSA_E_CONNECT;
    case 16:
        return DSA_E_NO_SESSION;
    default:
        return DSA_E_INTERNAL;
    }
}

static void copy_text(char *to, size_t size, const char *from)
{
    snprintf(to, size, "%s", from ? from : "");
}

static void fill_from_row(struct dsa_error *err, const struct status_row *row)
{
    memset(err, 0, sizeof(*err));
    err->code = row->status;
    err->grpc_code = row->grpc_code;
    err->scope = (enum dsa_scope)row->scope;
    copy_text(err->reason, sizeof(err->reason), row->reason);
}

dsa_status dsa__fail(struct dsa_error *err, dsa_status code, const char *field, const char *format, ...)
{
    va_list args;

    if (!err)
        return code;
    fill_from_row(err, row_of(code));
    copy_text(err->field, sizeof(err->field), field);
    va_start(args, format);
    vsnprintf(err->message, sizeof(err->message), format, args);
    va_end(args);
    return code;
}

dsa_status dsa__error_from_wire(const Dsa__V1__Status *wire, struct dsa_error *err)
{
    const struct status_row *row = NULL;

    if (!wire || (wire->code == 0 && wire->reason[0] == '\0'))
        return DSA_OK;
    for (size_t i = 0; i < N_ROWS && wire->reason[0] != '\0'; i++) {
        if (strcmp(rows[i].reason, wire->reason) == 0)
            row = &rows[i];
    }
    if (!row) /* a newer server's word: its code still places it */
        row = row_of(status_of_grpc(wire->code));
    if (!err)
        return row->status;
    fill_from_row(err, row);
    err->grpc_code = wire->code;
    if (wire->scope != DSA__V1__SCOPE__SCOPE_UNSPECIFIED)
        err->scope = (enum dsa_scope)wire->scope;
    err->retry_after_us = wire->retry_after_us;
    if (wire->reason[0] != '\0')
        copy_text(err->reason, sizeof(err->reason), wire->reason);
    copy_text(err->message, sizeof(err->message), wire->message[0] != '\0' ? wire->message : row->text);
    copy_text(err->field, sizeof(err->field), wire->field);
    copy_text(err->value, sizeof(err->value), wire->value);
    copy_text(err->rule, sizeof(err->rule), wire->rule);
    return row->status;
}

/* The dsa.v1.Status inside a google.rpc.Status; DSA_OK when there is none. */
static dsa_status error_from_details(const uint8_t *details, size_t n_details, struct dsa_error *err)
{
    Google__Rpc__Status *outer = google__rpc__status__unpack(NULL, n_details, details);
    dsa_status status = DSA_OK;

    if (!outer)
        return DSA_OK;
    for (size_t i = 0; i < outer->n_details && status == DSA_OK; i++) {
        const Google__Protobuf__Any *any = outer->details[i];
        Dsa__V1__Status *inner;

        if (strcmp(any->type_url, DETAIL_TYPE) != 0)
            continue;
        inner = dsa__v1__status__unpack(NULL, any->value.len, any->value.data);
        if (!inner)
            continue;
        status = dsa__error_from_wire(inner, err);
        dsa__v1__status__free_unpacked(inner, NULL);
    }
    google__rpc__status__free_unpacked(outer, NULL);
    return status;
}

dsa_status dsa__error_from_grpc(int grpc_code, const char *text, size_t n_text, const uint8_t *details,
                                size_t n_details, struct dsa_error *err)
{
    dsa_status status = DSA_OK;

    if (n_details > 0)
        status = error_from_details(details, n_details, err);
    if (status != DSA_OK)
        return status;
    status =
        dsa__fail(err, status_of_grpc(grpc_code), NULL, "%.*s", (int)(n_text < 1024 ? n_text : 1024), text);
    if (err) {
        err->grpc_code = grpc_code;
        if (err->message[0] == '\0')
            copy_text(err->message, sizeof(err->message), row_of(status)->text);
    }
    return status;
}

void dsa_error_text(const struct dsa_error *err, char *text, size_t size)
{
    size_t n;

    snprintf(text, size, "%s: %s", err->reason, err->message);
    n = strlen(text);
    /* The server's sentence often names the field already; once is enough. */
    if (err->field[0] != '\0' && !strstr(err->message, err->field))
        snprintf(text + n, size - n, " (%s%s%s)", err->field, err->value[0] ? " = " : "", err->value);
    n = strlen(text);
    if (err->rule[0] != '\0' && !strstr(err->message, err->rule))
        snprintf(text + n, size - n, " [rule %s]", err->rule);
}
