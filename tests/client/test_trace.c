/* test_trace.c - the trace reader, on lines made for it and on the shipped slice. */
#include <stdio.h>
#include <string.h>

#include "client/dsactl/trace.h"
#include "suites.h"

static int read_text(const char *text, size_t max, struct trace *trace, char *why, size_t size)
{
    FILE *file = fmemopen((void *)(uintptr_t)text, strlen(text), "r");
    int rc = trace_read(file, max, trace, why, size);

    fclose(file);
    return rc;
}

#define GOOD "{\"timestamp\": 5, \"input_length\": 600, \"output_length\": 3, \"hash_ids\": [0, 7]}\n"

START_TEST(good_lines_are_read)
{
    struct trace trace;
    char why[160] = "";

    ck_assert_msg(read_text(GOOD "\n" GOOD, 0, &trace, why, sizeof(why)) == 0, "%s", why);
    ck_assert_uint_eq(trace.n, 2);
    ck_assert_uint_eq(trace.requests[1].arrival_ms, 5);
    ck_assert_uint_eq(trace.requests[1].n_prompt, 600);
    ck_assert_uint_eq(trace.requests[1].n_output, 3);
    ck_assert_uint_eq(trace.requests[1].n_blocks, 2);
    ck_assert_uint_eq(trace.requests[1].blocks[1], 7);
    trace_free(&trace);
    ck_assert_int_eq(read_text(GOOD GOOD "broken", 2, &trace, why, sizeof(why)),
                     0); /* stops before the third */
    trace_free(&trace);
}
END_TEST

START_TEST(bad_lines_are_refused_by_number)
{
    static const char *const bad[] = {
        "{\"timestamp\": 5, \"input_length\": 600",
        "[]",
        "7",
        "{\"timestamp\": 5, \"input_length\": 600, \"output_length\": 3}",
        "{\"timestamp\": 5, \"input_length\": 600, \"output_length\": 3, \"hash_ids\": 7}",
        "{\"timestamp\": 5, \"input_length\": 600, \"output_length\": 3, \"hash_ids\": [-1]}",
        "{\"timestamp\": 5, \"input_length\": 600, \"output_length\": 3, \"hash_ids\": [1, 2, 3]}",
        "{\"timestamp\": 5, \"input_length\": 0, \"output_length\": 3, \"hash_ids\": []}",
        "{\"timestamp\": 5, \"input_length\": 1.5, \"output_length\": 3, \"hash_ids\": [1]}",
        "{\"timestamp\": -5, \"input_length\": 6, \"output_length\": 3, \"hash_ids\": [1]}",
        "{\"timestamp\": 4, \"input_length\": 6, \"output_length\": 3, \"hash_ids\": [1]}",
        "{\"timestamp\": 5, \"input_length\": 6, \"output_length\": 3, \"hash_ids\": [1], \"more\": 1}",
        "{\"timestamp\": 5, \"input_length\": 6, \"output_length\": 99999999999999, \"hash_ids\": [1]}",
        "{\"timestamp\": 5, \"timestamp\": 6, \"input_length\": 6, \"output_length\": 3, \"hash_ids\": [1]}",
    };

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct trace trace = {.n = 77};
        char text[512], why[160] = "";

        snprintf(text, sizeof(text), "%s%s\n", GOOD, bad[i]);
        ck_assert_msg(read_text(text, 0, &trace, why, sizeof(why)) == -1, "accepted: %s", bad[i]);
        ck_assert_msg(strncmp(why, "line 2: ", 8) == 0, "%s: %s", bad[i], why);
        ck_assert_uint_eq(trace.n, 77);
    }
}
END_TEST

START_TEST(an_empty_file_is_refused)
{
    struct trace trace;
    char why[160];

    ck_assert_int_eq(read_text("\n", 0, &trace, why, sizeof(why)), -1);
}
END_TEST

START_TEST(the_shipped_slice_is_good)
{
    FILE *file = fopen(DSA_SOURCE_DIR "/client/data/mooncake_conversation_slice.jsonl", "r");
    struct trace trace;
    char why[160] = "";

    ck_assert_ptr_nonnull(file);
    ck_assert_msg(trace_read(file, 0, &trace, why, sizeof(why)) == 0, "%s", why);
    ck_assert_uint_eq(trace.n, 200);
    ck_assert_uint_eq(trace.requests[0].n_prompt, 6758);
    ck_assert_uint_eq(trace.requests[0].n_blocks, 14);
    trace_free(&trace);
    fclose(file);
}
END_TEST

TCase *case_trace(void)
{
    TCase *tc = tcase_create("trace");

    tcase_add_test(tc, good_lines_are_read);
    tcase_add_test(tc, bad_lines_are_refused_by_number);
    tcase_add_test(tc, an_empty_file_is_refused);
    tcase_add_test(tc, the_shipped_slice_is_good);
    return tc;
}
