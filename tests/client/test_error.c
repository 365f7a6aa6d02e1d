/* test_error.c - from wire statuses and ends of calls to dsa_error. */
#include <stdlib.h>
#include <string.h>

#include "client/lib/internal.h"
#include "google/rpc/status.pb-c.h"
#include "suites.h"

/* A google.rpc.Status with one detail, packed. Free it. */
static uint8_t *pack_details(const char *type, const Dsa__V1__Status *inner, size_t *n_p)
{
    Google__Rpc__Status outer = GOOGLE__RPC__STATUS__INIT;
    Google__Protobuf__Any any = GOOGLE__PROTOBUF__ANY__INIT, *details = &any;
    uint8_t *bytes;

    any.type_url = (char *)(uintptr_t)type;
    any.value.len = dsa__v1__status__get_packed_size(inner);
    any.value.data = malloc(any.value.len);
    dsa__v1__status__pack(inner, any.value.data);
    outer.code = inner->code;
    outer.n_details = 1;
    outer.details = &details;
    *n_p = google__rpc__status__get_packed_size(&outer);
    bytes = malloc(*n_p);
    google__rpc__status__pack(&outer, bytes);
    free(any.value.data);
    return bytes;
}

static Dsa__V1__Status no_pages(void)
{
    Dsa__V1__Status status = DSA__V1__STATUS__INIT;

    status.code = 8;
    status.reason = (char *)(uintptr_t) "NO_PAGES";
    status.message = (char *)(uintptr_t) "the pool has 3 free pages";
    status.field = (char *)(uintptr_t) "append.rows";
    status.value = (char *)(uintptr_t) "400";
    status.scope = DSA__V1__SCOPE__SCOPE_REQUEST;
    status.retry_after_us = 1500;
    return status;
}

START_TEST(details_give_every_field)
{
    Dsa__V1__Status inner = no_pages();
    struct dsa_error err;
    size_t n;
    uint8_t *bytes = pack_details("type.googleapis.com/dsa.v1.Status", &inner, &n);
    char text[256];

    ck_assert_int_eq(dsa__error_from_grpc(8, "short", 5, bytes, n, &err), DSA_E_NO_PAGES);
    ck_assert_int_eq(err.code, DSA_E_NO_PAGES);
    ck_assert_int_eq(err.grpc_code, 8);
    ck_assert_int_eq(err.scope, DSA_SCOPE_REQUEST);
    ck_assert_str_eq(err.reason, "NO_PAGES");
    ck_assert_str_eq(err.field, "append.rows");
    ck_assert_str_eq(err.value, "400");
    ck_assert_uint_eq(err.retry_after_us, 1500);
    dsa_error_text(&err, text, sizeof(text));
    ck_assert_str_eq(text, "NO_PAGES: the pool has 3 free pages (append.rows = 400)");
    free(bytes);
}
END_TEST

START_TEST(foreign_details_fall_back_to_the_code)
{
    Dsa__V1__Status inner = no_pages();
    struct dsa_error err;
    size_t n;
    uint8_t *bytes = pack_details("type.googleapis.com/google.rpc.RetryInfo", &inner, &n);

    ck_assert_int_eq(dsa__error_from_grpc(14, "gone", 4, bytes, n, &err), DSA_E_CONNECT);
    ck_assert_str_eq(err.message, "gone");
    free(bytes);
}
END_TEST

START_TEST(broken_details_fall_back_to_the_code)
{
    Dsa__V1__Status inner = no_pages();
    size_t n;
    uint8_t *bytes = pack_details("type.googleapis.com/dsa.v1.Status", &inner, &n);

    for (size_t cut = 1; cut < n; cut++) /* cut short anywhere: an error of some kind, no crash */
        ck_assert_int_ne(dsa__error_from_grpc(13, "", 0, bytes, cut, NULL), DSA_OK);
    free(bytes);
}
END_TEST

/* Each row of the table must come back from its reason word. */
START_TEST(every_reason_is_known)
{
    static const dsa_status all[] = {
#define STATUS_NAME(name, value, reason, grpc_code, scope, text) name,
        DSA_STATUS_MAP(STATUS_NAME)
#undef STATUS_NAME
    };

    for (size_t i = 1; i < sizeof(all) / sizeof(all[0]); i++) {
        Dsa__V1__Status wire = DSA__V1__STATUS__INIT;

        wire.code = 2; /* UNKNOWN: only the word can tell */
        wire.reason = (char *)(uintptr_t)dsa_status_reason(all[i]);
        ck_assert_int_eq(dsa__error_from_wire(&wire, NULL), all[i]);
    }
}
END_TEST

START_TEST(absent_status_is_ok)
{
    Dsa__V1__Status wire = DSA__V1__STATUS__INIT;
    struct dsa_error err = {.code = DSA_E_LIMIT};

    ck_assert_int_eq(dsa__error_from_wire(NULL, &err), DSA_OK);
    ck_assert_int_eq(dsa__error_from_wire(&wire, &err), DSA_OK);
    ck_assert_int_eq(err.code, DSA_E_LIMIT); /* untouched */
}
END_TEST

START_TEST(a_newer_reason_is_placed_by_its_code)
{
    Dsa__V1__Status wire = DSA__V1__STATUS__INIT;
    struct dsa_error err;

    wire.code = 5;
    wire.reason = (char *)(uintptr_t) "NO_SUCH_WORD_YET";
    ck_assert_int_eq(dsa__error_from_wire(&wire, &err), DSA_E_NOT_FOUND);
    ck_assert_str_eq(err.reason, "NO_SUCH_WORD_YET");
}
END_TEST

TCase *case_error(void)
{
    TCase *tc = tcase_create("error");

    tcase_add_test(tc, details_give_every_field);
    tcase_add_test(tc, foreign_details_fall_back_to_the_code);
    tcase_add_test(tc, broken_details_fall_back_to_the_code);
    tcase_add_test(tc, every_reason_is_known);
    tcase_add_test(tc, absent_status_is_ok);
    tcase_add_test(tc, a_newer_reason_is_placed_by_its_code);
    return tc;
}
