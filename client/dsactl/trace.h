/* trace.h - a recorded production trace: one JSON object per line with the fields timestamp (arrival, ms from
 * start), input_length, output_length (tokens) and hash_ids (one per block of 512 prompt tokens; equal ids
 * mean equal content up to and including that block). Further fields are refused: a line that means something
 * else is not read halfway. */
#ifndef DSACTL_TRACE_H
#define DSACTL_TRACE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define TRACE_BLOCK_TOKENS 512

struct trace_request {
    uint64_t arrival_ms;
    uint64_t n_prompt, n_output; /* tokens; n_prompt >= 1 */
    uint32_t n_blocks;           /* <= ceil(n_prompt / 512) */
    uint64_t *blocks;
};

struct trace {
    size_t n;
    struct trace_request *requests; /* arrival never decreases */
};

/* Reads up to max requests (0 = all) from the file. Returns 0; -1 with one sentence in text that names the
 * line, *trace_p untouched. Blank lines are skipped. */
int trace_read(FILE *file, size_t max, struct trace *trace_p, char *text, size_t text_size);
void trace_free(struct trace *trace);

#endif /* DSACTL_TRACE_H */
