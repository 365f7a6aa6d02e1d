/* The embedded descriptor set: what reflection finds in it. */
#include <string.h>

#include "google/protobuf/descriptor.pb-c.h"
#include "server/descriptors.h"
#include "test_main.h"

static void load(void)
{
    ck_assert(srv_descriptors_load());
}

static void unload(void)
{
    srv_descriptors_unload();
}

/* The file's own name, from the very bytes that would be served. */
static void check_name(const struct srv_proto_file *file, const char *name)
{
    Google__Protobuf__FileDescriptorProto *parsed =
        google__protobuf__file_descriptor_proto__unpack(NULL, file->n, file->bytes);

    ck_assert_ptr_nonnull(parsed);
    ck_assert_str_eq(parsed->name, name);
    google__protobuf__file_descriptor_proto__free_unpacked(parsed, NULL);
}

START_TEST(services_are_listed)
{
    static const char *const expected[] = {"dsa.v1.SparseAttention", "grpc.health.v1.Health",
                                           "grpc.reflection.v1.ServerReflection",
                                           "grpc.reflection.v1alpha.ServerReflection"};
    const char *names[SRV_MAX_FILES];
    size_t n = srv_descriptors_services(names, SRV_MAX_FILES);

    ck_assert_uint_eq(n, 4);
    for (size_t i = 0; i < 4; i++) {
        size_t n_found = 0;

        for (size_t j = 0; j < n; j++)
            n_found += strcmp(names[j], expected[i]) == 0;
        ck_assert_msg(n_found == 1, "%s is listed %zu times", expected[i], n_found);
    }
    ck_assert_uint_le(srv_descriptors_services(names, 1), 4);
}
END_TEST

START_TEST(files_are_found_by_name)
{
    static const char *const names[] = {"dsa/v1/dsa.proto",
                                        "google/rpc/status.proto",
                                        "google/protobuf/any.proto",
                                        "grpc/health/v1/health.proto",
                                        "grpc/reflection/v1/reflection.proto",
                                        "grpc/reflection/v1alpha/reflection.proto"};
    struct srv_proto_file files[SRV_MAX_FILES];

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        ck_assert_msg(srv_descriptors_by_name(names[i], files, SRV_MAX_FILES) >= 1, "%s", names[i]);
        check_name(&files[0], names[i]);
    }
}
END_TEST

START_TEST(a_file_brings_its_imports_once)
{
    struct srv_proto_file files[SRV_MAX_FILES];
    size_t n = srv_descriptors_by_name("google/rpc/status.proto", files, SRV_MAX_FILES);

    ck_assert_uint_eq(n, 2);
    check_name(&files[0], "google/rpc/status.proto");
    check_name(&files[1], "google/protobuf/any.proto");
    ck_assert_uint_eq(srv_descriptors_by_name("google/rpc/status.proto", files, 1), 1); /* never past max */
    ck_assert_uint_eq(srv_descriptors_by_name("google/rpc/status.proto", files, 0), 0);
}
END_TEST

START_TEST(symbols_of_every_kind_are_found)
{
    static const struct {
        const char *symbol, *file;
    } rows[] = {
        {"dsa.v1.SparseAttention", "dsa/v1/dsa.proto"},
        {"dsa.v1.SparseAttention.Attend", "dsa/v1/dsa.proto"},
        {"dsa.v1.Tensor", "dsa/v1/dsa.proto"},
        {"dsa.v1.Tensor.shape", "dsa/v1/dsa.proto"},
        {"dsa.v1.DType", "dsa/v1/dsa.proto"},
        {"google.rpc.Status", "google/rpc/status.proto"},
        {"google.protobuf.Any", "google/protobuf/any.proto"},
        {"grpc.health.v1.Health.Watch", "grpc/health/v1/health.proto"},
        {"grpc.health.v1.HealthCheckResponse.ServingStatus", "grpc/health/v1/health.proto"},
        {"grpc.reflection.v1alpha.ServerReflection", "grpc/reflection/v1alpha/reflection.proto"},
        {"grpc.reflection.v1.ServerReflection.ServerReflectionInfo", "grpc/reflection/v1/reflection.proto"},
    };
    struct srv_proto_file files[SRV_MAX_FILES];

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        ck_assert_msg(srv_descriptors_by_symbol(rows[i].symbol, files, SRV_MAX_FILES) >= 1, "%s",
                      rows[i].symbol);
        check_name(&files[0], rows[i].file);
    }
}
END_TEST

START_TEST(other_words_find_nothing)
{
    static const char *const words[] = {"",
                                        ".",
                                        "dsa",
                                        "dsa.v1",
                                        "dsa.v1.",
                                        "dsa.v1.Tens",
                                        "dsa.v1.Tensorx",
                                        "dsa.v1.Tensorshape",
                                        "dsa.v1Tensor",
                                        "dsa.v1.SparseAttentionAttend",
                                        "dsa.v1.Tensor.nothing",
                                        "dsa.v1.Tensor.shape.deeper",
                                        "dsa.v1.SparseAttention.Att",
                                        "dsa.v1.SparseAttention.Attend.x",
                                        ".dsa.v1.Tensor",
                                        "Tensor",
                                        "dsa/v1/dsa.proto",
                                        "dsa.v1..Tensor"};
    struct srv_proto_file files[SRV_MAX_FILES];

    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        ck_assert_msg(srv_descriptors_by_symbol(words[i], files, SRV_MAX_FILES) == 0, "\"%s\"", words[i]);
    ck_assert_uint_eq(srv_descriptors_by_name("dsa.proto", files, SRV_MAX_FILES), 0);
    ck_assert_uint_eq(srv_descriptors_by_name("", files, SRV_MAX_FILES), 0);
    ck_assert_uint_eq(srv_descriptors_by_name("dsa.v1.Tensor", files, SRV_MAX_FILES), 0);
}
END_TEST

START_TEST(loading_is_repeatable)
{
    struct srv_proto_file before, after;

    ck_assert(srv_descriptors_load()); /* again: nothing happens */
    ck_assert_uint_eq(srv_descriptors_by_name("dsa/v1/dsa.proto", &before, 1), 1);
    srv_descriptors_unload();
    ck_assert_uint_eq(srv_descriptors_by_name("dsa/v1/dsa.proto", &after, 1), 0);
    srv_descriptors_unload();
    ck_assert(srv_descriptors_load());
    ck_assert_uint_eq(srv_descriptors_by_name("dsa/v1/dsa.proto", &after, 1), 1);
    ck_assert_ptr_eq(before.bytes, after.bytes);
    ck_assert_uint_eq(before.n, after.n);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *tc = tcase_create("descriptors");

    (void)max;
    tcase_add_checked_fixture(tc, load, unload);
    tcase_add_test(tc, services_are_listed);
    tcase_add_test(tc, files_are_found_by_name);
    tcase_add_test(tc, a_file_brings_its_imports_once);
    tcase_add_test(tc, symbols_of_every_kind_are_found);
    tcase_add_test(tc, other_words_find_nothing);
    tcase_add_test(tc, loading_is_repeatable);
    suites_p[0] = suite_create("descriptors");
    suite_add_tcase(suites_p[0], tc);
    return 1;
}
