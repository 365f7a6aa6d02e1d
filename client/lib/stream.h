/* stream.h - Attend streams and the requests on them, as libdsa's parts see them. client->lock is held
 * throughout.
 *
 * A request id is (serial << 20 | slot + 1): the slot finds the request, the serial tells a late reply for an
 * earlier user of the slot apart. A request lives until both the server has answered (or the stream is gone)
 * and the caller has freed it.
 *
 *   submit --> PENDING --last piece, stream over--> DONE, due --callback--> DONE --free--> gone
 *                 '--free--> PENDING, detached --------------last piece------------------> gone */
#ifndef DSA_CLIENT_LIB_STREAM_H
#define DSA_CLIENT_LIB_STREAM_H

#include "client/lib/internal.h"

#define DSA__SLOT_BITS 20
#define DSA__SLOT_MASK ((UINT64_C(1) << DSA__SLOT_BITS) - 1)
#define DSA__MAX_USES  8

/* A result that comes inline: where its rows go. */
struct sink {
    uint8_t *data;
    size_t row_bytes;
};

struct callback {
    dsa_done_fn fn; /* may be NULL */
    void *arg;
};

struct dsa_request {
    struct dsa_client *client;
    struct dsa_stream *stream;       /* NULL once done */
    struct dsa_request *prev, *next; /* all requests of the client */
    struct dsa_request *due_next;
    uint64_t id;
    uint64_t submit_us;
    bool is_done, is_due, is_detached;
    uint32_t n_rows; /* asked for; 0 for an append alone */
    struct sink out, lse;
    struct callback callback;
    struct dsa_result result;
    unsigned n_uses;
    struct dsa_memory *uses[DSA__MAX_USES];
};

struct dsa_stream {
    struct bidi bidi; /* first */
    struct dsa_client *client;
    struct dsa_stream *next;
    bool is_named;       /* the session token went out */
    bool is_closed;      /* by the caller: what is pending counts as cancelled */
    bool free_when_over; /* nobody holds it any more */
    struct dsa_request **slots;
    uint32_t *free_slots;
    uint32_t n_slots, n_free;
    uint64_t serial;
};

/* The stream to send on: *stream_p as given, or the client's own, made afresh when its last one has ended. */
dsa_status dsa__stream_pick(struct dsa_client *client, struct dsa_stream **stream_p, struct dsa_error *err);

/* A request with an id, not yet pending: dsa__request_send takes it over, also on failure; else free it.
 * DSA_E_QUEUE_FULL, DSA_E_NO_MEMORY. */
dsa_status dsa__request_alloc(struct dsa_stream *stream, struct callback callback,
                              struct dsa_request **request_p, struct dsa_error *err);
/* The request reads or writes this memory (may be NULL) until it completes. At most DSA__MAX_USES. */
void dsa__request_use(struct dsa_request *request, const struct dsa_memory *memory);
/* Sends it and makes it pending. Frees it on failure. is_small: as in dsa__bidi_send. */
dsa_status dsa__request_send(struct dsa_request *request, Dsa__V1__AttendRequest *message, bool is_small,
                             struct dsa_error *err);
/* What dsa_request_free does. */
void dsa__request_free(struct dsa_request *request);
/* Runs what is due (see dsa__run_callbacks) and forgets what was counted for dsa_poll: it has been seen. */
void dsa__settle_completed(struct dsa_client *client);

#endif /* DSA_CLIENT_LIB_STREAM_H */
