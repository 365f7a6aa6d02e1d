#include "client/dsactl/trace.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TOKENS (UINT64_C(1) << 31)

/* A whole number in [0, max]; false otherwise. */
static bool read_uint(const json_t *value, uint64_t max, uint64_t *n_p)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0 || (uint64_t)json_integer_value(value) > max)
        return false;
    *n_p = (uint64_t)json_integer_value(value);
    return true;
}

static const char *read_blocks(const json_t *ids, struct trace_request *request)
{
    size_t n = json_array_size(ids);

    if (!json_is_array(ids))
        return "hash_ids is not a list";
    if (n > (request->n_prompt + TRACE_BLOCK_TOKENS - 1) / TRACE_BLOCK_TOKENS)
        return "hash_ids has more blocks than input_length fills";
    request->blocks = malloc((n ? n : 1) * sizeof(*request->blocks));
    if (!request->blocks)
        return "no memory";
    request->n_blocks = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        if (!read_uint(json_array_get(ids, i), INT64_MAX, &request->blocks[i]))
            return "a hash id is not a whole number";
    }
    return NULL;
}

/* NULL, or what is wrong. The blocks are allocated either way, possibly NULL. */
static const char *read_request(const json_t *object, struct trace_request *request)
{
    if (!json_is_object(object))
        return "not an object";
    if (json_object_size(object) != 4)
        return "needs exactly timestamp, input_length, output_length and hash_ids";
    if (!read_uint(json_object_get(object, "timestamp"), INT64_MAX, &request->arrival_ms))
        return "timestamp is not a whole number of ms";
    if (!read_uint(json_object_get(object, "input_length"), MAX_TOKENS, &request->n_prompt)
        || request->n_prompt == 0)
        return "input_length is not a number of tokens";
    if (!read_uint(json_object_get(object, "output_length"), MAX_TOKENS, &request->n_output))
        return "output_length is not a number of tokens";
    return read_blocks(json_object_get(object, "hash_ids"), request);
}

static const char *add_line(struct trace *trace, const char *line, size_t n, size_t *room_p)
{
    struct trace_request request = {0};
    json_error_t error;
    json_t *object;
    const char *wrong;

    if (trace->n == *room_p) {
        size_t room = *room_p ? *room_p * 2 : 64;
        struct trace_request *grown = realloc(trace->requests, room * sizeof(*grown));

        if (!grown)
            return "no memory";
        trace->requests = grown;
        *room_p = room;
    }
    object = json_loadb(line, n, JSON_REJECT_DUPLICATES, &error);
    wrong = object ? read_request(object, &request) : "not JSON";
    json_decref(object);
    if (!wrong && trace->n > 0 && request.arrival_ms < trace->requests[trace->n - 1].arrival_ms)
        wrong = "timestamp goes back";
    if (wrong) {
        free(request.blocks);
        return wrong;
    }
    trace->requests[trace->n++] = request;
    return NULL;
}

int trace_read(FILE *file, size_t max, struct trace *trace_p, char *text, size_t text_size)
{
    struct trace trace = {0};
    char *line = NULL;
    size_t room = 0, line_room = 0, line_no = 0;
    const char *wrong = NULL;
    ssize_t n;

    while (!wrong && (max == 0 || trace.n < max) && (n = getline(&line, &line_room, file)) >= 0) {
        line_no++;
        if (line[strspn(line, " \t\r\n")] != '\0')
            wrong = add_line(&trace, line, (size_t)n, &room);
    }
    free(line);
    if (!wrong && ferror(file))
        wrong = "cannot be read";
    if (!wrong && trace.n == 0)
        wrong = "no request in it";
    if (wrong) {
        snprintf(text, text_size, "line %zu: %s", line_no, wrong);
        trace_free(&trace);
        return -1;
    }
    *trace_p = trace;
    return 0;
}

void trace_free(struct trace *trace)
{
    for (size_t i = 0; i < trace->n; i++)
        free(trace->requests[i].blocks);
    free(trace->requests);
    memset(trace, 0, sizeof(*trace));
}
