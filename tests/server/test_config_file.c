/* Settings from a YAML file and from the environment: who wins, and what is said of each mistake, with its line. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kit.h"
#include "server/config_file.h"
#include "test_main.h"

static struct srv_config config;
static struct srv_err err;

static void start(void)
{
    kit_dir_make();
    srv_config_defaults(&config);
    memset(&err, 0, sizeof(err));
}

static void end(void)
{
    kit_dir_remove();
}

static dsa_status read_bytes(const char *text, size_t n)
{
    char *path = kit_path("dsad.yaml");
    FILE *file = fopen(path, "w");
    dsa_status rc;

    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(text, 1, n, file), n);
    fclose(file);
    rc = srv_config_read_file(&config, path, &err);
    free(path);
    return rc;
}

static dsa_status read_text(const char *text)
{
    return read_bytes(text, strlen(text));
}

#define ENVIRONMENT(...) ((char *[]){__VA_ARGS__, NULL})
#define VAR(text)        ((char *)(uintptr_t)(text))

START_TEST(a_file_sets_what_it_names)
{
    KIT_OK(read_text("# what the model needs\n"
                     "layers: 61\n"
                     "pool-bytes: 4GiB # enough for two\n"
                     "layout: \"scaled_512_0\"\n"
                     "physical-indices: true\n"
                     "tcp: 127.0.0.1:50051\n"
                     "decode-layout:\n"),
           &err);
    ck_assert_uint_eq(config.layers, 61);
    ck_assert_uint_eq(config.pool_bytes, UINT64_C(4) << 30);
    ck_assert_str_eq(config.layout, "scaled_512_0");
    ck_assert(config.physical_indices);
    ck_assert_str_eq(config.tcp, "127.0.0.1:50051");
    ck_assert_str_eq(config.decode_layout, "");
    ck_assert_uint_eq(config.max_rows, 16384); /* not named: the default */
}
END_TEST

START_TEST(nothing_in_a_file_is_fine)
{
    static const char *const texts[] = {"", "# nothing\n", "---\n{}\n", "{}"};

    KIT_OK(read_text(texts[_i]), &err);
    ck_assert_uint_eq(config.layers, 1);
}
END_TEST

static const struct {
    const char *text, *field, *words[3];
} mistakes[] = {
    {"layers: 3\nlayer: 4\n", "layer", {"line 2", "unknown", "layers"}},
    {"layers: many\n", "layers", {"line 1", "whole number", NULL}},
    {"\n\nlayers: 0\n", "layers", {"line 3", "1 to 1024", NULL}},
    {"layers: 3\nlayers: 3\n", "layers", {"line 2", "twice", NULL}},
    {"layers: [3]\n", "layers", {"line 1", "single value", NULL}},
    {"server:\n  layers: 3\n", "server", {"line 2", "single value", NULL}},
    {"- layers\n", "config", {"line 1", "mapping", NULL}},
    {"layers\n", "config", {"line 1", "mapping", NULL}},
    {"layers: 3\n---\nlayers: 4\n", "config", {"line 2", "second document", NULL}},
    {"layers: \"3\n", "config", {"line", "not YAML", NULL}},
    {"layers: &a 3\nmax-rows: *a\n", "max-rows", {"line 2", "single value", NULL}},
    {"[a]: 3\n", "config", {"line 1", "name", NULL}},
    {"physical-indices: yes\n", "physical-indices", {"line 1", "true or false", NULL}},
    {"a-key-that-is-longer-than-any-that-dsad-has-or-ever-will-have-in-its-table: 1\n",
     "config",
     {"line 1", "long", NULL}},
    {"layers: \"3\\0\"\n", "layers", {"line 1", "zero byte", NULL}},
};

START_TEST(mistakes_in_a_file_are_named_with_their_line)
{
    ck_assert_int_eq(read_text(mistakes[_i].text), DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.field, mistakes[_i].field);
    for (int i = 0; i < 3 && mistakes[_i].words[i]; i++)
        ck_assert_msg(strstr(err.text, mistakes[_i].words[i]) != NULL, "\"%s\" says nothing of \"%s\"",
                      err.text, mistakes[_i].words[i]);
}
END_TEST

START_TEST(damaged_files_end_in_an_error)
{
    static const char good[] = "layers: 61\nlayout: \"scaled_512_0\"\npool-bytes: 4GiB\n";
    char text[sizeof(good)];
    int n_refused = 0;

    for (size_t i = 0; i + 1 < sizeof(good); i++)
        for (int bit = 0; bit < 8; bit++) {
            memcpy(text, good, sizeof(good));
            text[i] = (char)(text[i] ^ (1 << bit));
            n_refused += read_bytes(text, sizeof(good) - 1) != DSA_OK;
        }
    ck_assert_int_gt(n_refused,
                     200); /* some damage leaves a sound file: another number, another layout's name */
}
END_TEST

START_TEST(a_file_that_is_not_there_is_named)
{
    ck_assert_int_eq(srv_config_read_file(&config, "/nonexistent/dsad.yaml", &err), DSA_E_SYSTEM);
    ck_assert_str_eq(err.field, "config");
    ck_assert_str_eq(err.value, "/nonexistent/dsad.yaml");
}
END_TEST

START_TEST(the_environment_sets_what_it_names)
{
    KIT_OK(srv_config_read_environment(
               &config,
               ENVIRONMENT(VAR("PATH=/bin"), VAR("DSAD_LAYERS=7"), VAR("DSAD_POOL_BYTES=1GiB"),
                           VAR("DSAD_LOG_LEVEL=warn"), VAR("DSAD_CONFIG=/etc/dsad.yaml"),
                           VAR("DSAD_SERVICE_HOST=10.0.0.1"), VAR("DSAD_SERVICE_PORT=1"),
                           VAR("DSAD_PORT=tcp://10.0.0.1:1"), VAR("DSAD_PORT_1_TCP=x"), VAR("DSADX=1")),
               &err),
           &err);
    ck_assert_uint_eq(config.layers, 7);
    ck_assert_uint_eq(config.pool_bytes, 1 << 30);
    ck_assert_str_eq(config.log_level, "warn");
}
END_TEST

START_TEST(mistakes_in_the_environment_are_named)
{
    static const struct {
        const char *variable, *field, *word;
    } cases[] = {{"DSAD_LAYER=3", "DSAD_LAYER", "layers"},
                 {"DSAD_LAYERS=many", "DSAD_LAYERS", "whole number"},
                 {"DSAD_LAYERS", "DSAD_LAYERS", "whole number"},
                 {"DSAD_=3", "DSAD_", "unknown"},
                 {"DSAD_PORTAL=3", "DSAD_PORTAL", "unknown"}};

    ck_assert_int_eq(srv_config_read_environment(&config, ENVIRONMENT(VAR(cases[_i].variable)), &err),
                     DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.field, cases[_i].field);
    ck_assert_ptr_nonnull(strstr(err.text, cases[_i].word));
}
END_TEST

START_TEST(the_file_is_named_by_flag_or_variable)
{
    char *variable[] = {VAR("DSAD_CONFIG=/a"), NULL}, *nothing[] = {NULL};
    char *none[] = {VAR("dsad"), VAR("--layers"), VAR("3")};
    char *flag[] = {VAR("dsad"), VAR("--config=/b")}, *word[] = {VAR("dsad"), VAR("--config"), VAR("/c")};
    char *missing[] = {VAR("dsad"), VAR("--config")};
    enum srv_config_action action;
    const char *path;

    KIT_OK(srv_config_file_name(3, none, nothing, &path, &err), &err);
    ck_assert_ptr_null(path);
    KIT_OK(srv_config_file_name(3, none, variable, &path, &err), &err);
    ck_assert_str_eq(path, "/a");
    KIT_OK(srv_config_file_name(2, flag, variable, &path, &err), &err);
    ck_assert_str_eq(path, "/b");
    KIT_OK(srv_config_file_name(3, word, variable, &path, &err), &err);
    ck_assert_str_eq(path, "/c");
    KIT_OK(srv_config_parse(&config, 3, word, &action, &err), &err); /* the flags' parser passes over it */
    KIT_OK(srv_config_parse(&config, 2, flag, &action, &err), &err);
    ck_assert_int_eq(srv_config_file_name(2, missing, nothing, &path, &err), DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.field, "config");
}
END_TEST

/* What --print-config shows is a file that gives the same settings again. */
START_TEST(what_is_printed_can_be_read)
{
    static char text[16384], again[16384];
    struct srv_config first;
    char *argv[] = {VAR("dsad"), VAR("--tcp=127.0.0.1:1"), VAR("--listen=unix:/tmp/a b: #c'd")};
    enum srv_config_action action;
    FILE *out;

    KIT_OK(read_text("layers: 9\nspin: 20us\nsocket-mode: 0600\n"), &err);
    KIT_OK(srv_config_read_environment(&config, ENVIRONMENT(VAR("DSAD_RAW_SCALE=0.25")), &err), &err);
    KIT_OK(srv_config_parse(&config, 3, argv, &action, &err), &err);
    first = config;
    out = fmemopen(text, sizeof(text) - 1, "w");
    srv_config_print(&config, out);
    fclose(out);
    ck_assert_ptr_nonnull(strstr(text, "layers: 9  # file\n"));
    ck_assert_ptr_nonnull(strstr(text, "raw-scale: 0.25  # environment\n"));
    ck_assert_ptr_nonnull(strstr(text, "# flag\n"));
    srv_config_defaults(&config);
    KIT_OK(read_text(text), &err);
    memset(first.sources, 0, sizeof(first.sources));
    memset(config.sources, 0, sizeof(config.sources));
    ck_assert_str_eq(config.listen, first.listen);
    out = fmemopen(text, sizeof(text) - 1, "w");
    srv_config_print(&first, out);
    fclose(out);
    out = fmemopen(again, sizeof(again) - 1, "w");
    srv_config_print(&config, out);
    fclose(out);
    ck_assert_str_eq(text, again);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *tc = tcase_create("config file");

    (void)max;
    tcase_add_checked_fixture(tc, start, end);
    tcase_add_test(tc, a_file_sets_what_it_names);
    tcase_add_loop_test(tc, nothing_in_a_file_is_fine, 0, 4);
    tcase_add_loop_test(tc, mistakes_in_a_file_are_named_with_their_line, 0,
                        (int)(sizeof(mistakes) / sizeof(mistakes[0])));
    tcase_add_test(tc, damaged_files_end_in_an_error);
    tcase_add_test(tc, a_file_that_is_not_there_is_named);
    tcase_add_test(tc, the_environment_sets_what_it_names);
    tcase_add_loop_test(tc, mistakes_in_the_environment_are_named, 0, 5);
    tcase_add_test(tc, the_file_is_named_by_flag_or_variable);
    tcase_add_test(tc, what_is_printed_can_be_read);
    suites_p[0] = suite_create("config file");
    suite_add_tcase(suites_p[0], tc);
    return 1;
}
