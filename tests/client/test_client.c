/* test_client.c - the parts of libdsa and dsactl that need no server, and connecting to where none is. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/dsa.h"
#include "client/lib/internal.h"
#include "suites.h"
#include "test_main.h"

/* ---- tensors --------------------------------------------------------------------------------- */

START_TEST(tensor_by_value_is_dense_and_whole)
{
    uint16_t values[2 * 3 * 4] = {0};
    struct dsa_tensor tensor = {.dtype = DSA_DTYPE_BF16, .rank = 3, .shape = {2, 3, 4}, .data = values};
    struct wire_tensor wire;

    ck_assert_int_eq(dsa__wire_tensor(&wire, &tensor, "q", NULL), DSA_OK);
    ck_assert_uint_eq(wire.tensor.inline_.len, sizeof(values));
    ck_assert_uint_eq(wire.tensor.n_shape, 3);
    ck_assert_uint_eq(wire.tensor.n_strides_bytes, 0);
}
END_TEST

START_TEST(tensor_needs_one_place)
{
    struct dsa_tensor tensor = {.dtype = DSA_DTYPE_I32, .rank = 1, .shape = {4}};
    struct wire_tensor wire;
    struct dsa_error err;

    ck_assert_int_eq(dsa__wire_tensor(&wire, &tensor, "attend.indices", &err), DSA_E_BAD_SHAPE);
    ck_assert_str_eq(err.field, "attend.indices");
}
END_TEST

START_TEST(tensor_that_overflows_is_refused)
{
    uint16_t value = 0;
    struct dsa_tensor tensor = {.dtype = DSA_DTYPE_BF16, .rank = 4, .data = &value};
    struct wire_tensor wire;

    for (int i = 0; i < 4; i++)
        tensor.shape[i] = UINT64_C(1) << 20;
    ck_assert_int_eq(dsa__wire_tensor(&wire, &tensor, "q", NULL), DSA_E_BAD_SHAPE);
    tensor.rank = 0;
    ck_assert_int_eq(dsa__wire_tensor(&wire, &tensor, "q", NULL), DSA_E_BAD_SHAPE);
    tensor.rank = 5;
    ck_assert_int_eq(dsa__wire_tensor(&wire, &tensor, "q", NULL), DSA_E_BAD_SHAPE);
}
END_TEST

TCase *case_tensor(void)
{
    TCase *tc = tcase_create("tensor");

    tcase_add_test(tc, tensor_by_value_is_dense_and_whole);
    tcase_add_test(tc, tensor_needs_one_place);
    tcase_add_test(tc, tensor_that_overflows_is_refused);
    return tc;
}

/* ---- connecting ------------------------------------------------------------------------------ */

static void expect_no_server(const char *target)
{
    struct dsa_options options = {.connect_timeout_us = 300000};
    struct dsa_client *client = NULL;
    struct dsa_error err;
    uint64_t begin = dsa__now_us(), took;

    ck_assert_int_eq(dsa_connect(target, &options, &client, &err), DSA_E_CONNECT);
    took = dsa__now_us() - begin;
    ck_assert_ptr_null(client);
    ck_assert_msg(strstr(err.message, target) != NULL, "the message does not name the target: %s",
                  err.message);
    ck_assert_msg(took >= 250000, "gave up after %llu us", (unsigned long long)took);
}

START_TEST(nobody_listens)
{
    expect_no_server("unix:/nonexistent/dsad.sock");
}
END_TEST

START_TEST(somebody_listens_and_never_speaks)
{
    char dir[] = "/tmp/dsa_test_XXXXXX", target[128];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    ck_assert_ptr_nonnull(mkdtemp(dir));
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/s", dir);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    ck_assert_int_eq(listen(fd, 4), 0);
    snprintf(target, sizeof(target), "unix:%s", address.sun_path);
    expect_no_server(target);
    close(fd);
    unlink(address.sun_path);
    rmdir(dir);
}
END_TEST

START_TEST(bad_options_are_refused_at_once)
{
    char name[80];
    struct dsa_options options = {.client_name = name};
    struct dsa_client *client;
    struct dsa_error err;

    memset(name, 'x', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    ck_assert_int_eq(dsa_connect("", NULL, &client, &err), DSA_E_BAD_REQUEST);
    ck_assert_int_eq(dsa_connect("unix:/nonexistent", &options, &client, &err), DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.field, "client_name");
}
END_TEST

START_TEST(bad_security_options_are_refused_at_once)
{
    char empty[] = "/tmp/dsa_test_XXXXXX";
    int fd = mkstemp(empty);
    const struct {
        const char *target, *token_file, *field;
        struct dsa_tls tls;
    } rows[] = {
        {"unix:/nonexistent", NULL, "tls", {0}},
        {"localhost:1", NULL, "tls.ca_file", {.ca_file = "/nonexistent"}},
        {"localhost:1", NULL, "tls.ca_file", {.ca_file = "/"}},
        {"localhost:1", NULL, "tls.ca_file", {.ca_file = empty}},
        {"localhost:1", NULL, "tls.key_file", {.cert_file = __FILE__, .key_file = "/nonexistent"}},
        {"localhost:1", NULL, "tls", {.cert_file = __FILE__}},
        {"localhost:1", NULL, "tls", {.key_file = __FILE__}},
        {"localhost:1", "/nonexistent", "token_file", {0}},
        {"localhost:1", empty, "token_file", {0}},
    };

    ck_assert_int_ge(fd, 0);
    close(fd);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct dsa_options options = {.tls = &rows[i].tls, .token_file = rows[i].token_file};
        struct dsa_client *client;
        struct dsa_error err;

        ck_assert_msg(dsa_connect(rows[i].target, &options, &client, &err) == DSA_E_BAD_REQUEST, "row %zu",
                      i);
        ck_assert_msg(strcmp(err.field, rows[i].field) == 0, "row %zu: %s: %s", i, err.field, err.message);
    }
    unlink(empty);
}
END_TEST

TCase *case_connect(void)
{
    TCase *tc = tcase_create("connect");

    tcase_set_timeout(tc, 20);
    tcase_add_test(tc, nobody_listens);
    tcase_add_test(tc, somebody_listens_and_never_speaks);
    tcase_add_test(tc, bad_options_are_refused_at_once);
    tcase_add_test(tc, bad_security_options_are_refused_at_once);
    return tc;
}

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("client");

    (void)max;
    suite_add_tcase(suite, case_args());
    suite_add_tcase(suite, case_content());
    suite_add_tcase(suite, case_error());
    suite_add_tcase(suite, case_histogram());
    suite_add_tcase(suite, case_prefix());
    suite_add_tcase(suite, case_tensor());
    suite_add_tcase(suite, case_trace());
    suite_add_tcase(suite, case_connect());
    suites_p[0] = suite;
    return 1;
}
