/* worker_kit.h - a real worker on the CPU device, driven the way the service thread drives it, without
 * gRPC. The calling thread is L. */
#ifndef TESTS_SERVER_WORKER_KIT_H
#define TESTS_SERVER_WORKER_KIT_H

#include "kernels/dsk.h"
#include "kit.h"
#include "server/worker.h"

#define WK_SESSION  7
#define WK_MAX_ROWS 1024

struct wk {
    struct srv_worker *worker;
    struct srv_worker_config config;
    const struct dsk_layout *layout;
    sem_t woken; /* W called wake */
    atomic_int n_wakes;
    pthread_t last_waker; /* read after `woken` was taken */
    /* W stops inside wake until the gate opens */
    atomic_bool is_gated;
    sem_t gate;
};

/* A small one: scaled_512_64, 2 layers, 64 pages, chunks of 64 rows, launches of 256, one thread. */
struct srv_worker_config wk_config(void);
void wk_start(struct wk *wk, const struct srv_worker_config *config);
void wk_end(struct wk *wk); /* stops, frees, and expects that no piece was left */
/* Until the worker's thread sleeps: what is submitted after this waits for a kick. For programs linked
 * with --wrap=sem_wait. */
void wk_park(struct wk *wk);

/* A job with room for its answers. Zeroed by wk_job. */
struct wk_job {
    struct srv_job job; /* first: pieces lead back here */
    struct srv_batch_access accesses[8];
    struct srv_job_segment segments[8];
    struct srv_piece pieces[24];
    struct srv_err err; /* of the last piece */
    unsigned n_got;     /* pieces taken */
    bool is_done;
    uint32_t rows_got;
    unsigned order; /* how many jobs were done before this one */
};

void wk_job(struct wk_job *j, enum srv_op op);
void wk_access(struct wk_job *j, uint64_t sequence, bool is_write);
void wk_submit(struct wk *wk, struct wk_job *j); /* no kick */
void wk_poll(struct wk *wk);                     /* takes the pieces that are there */
/* Waits for the next piece as L does: looks, says that it sleeps, looks again, sleeps. */
struct srv_piece *wk_next(struct wk *wk);
void wk_finish(struct wk *wk, struct wk_job *j);    /* takes pieces until j is done */
dsa_status wk_run(struct wk *wk, struct wk_job *j); /* submit, kick, finish */

/* The common ones, run to their end. They fail the test unless the status is DSA_OK. */
uint64_t wk_create(struct wk *wk);
uint64_t wk_fork(struct wk *wk, uint64_t id, uint64_t n_tokens);
void wk_release(struct wk *wk, uint64_t id);
void wk_end_session(struct wk *wk, uint64_t session);
uint64_t wk_n_tokens(struct wk *wk, uint64_t id);
struct srv_job_stats wk_stats(struct wk *wk);

/* Jobs ready to submit. rows: bf16 [n, d_qk], dense, for `n_layers` layers one after the other. */
void wk_append_job(struct wk *wk, struct wk_job *j, uint64_t id, uint32_t layer, uint32_t n_layers,
                   const uint16_t *rows, uint32_t n);
void wk_append(struct wk *wk, uint64_t id, const uint16_t *rows,
               uint32_t n); /* the same rows in every layer */
/* The stored rows of a layer; returns how many. */
uint32_t wk_export(struct wk *wk, uint64_t id, uint32_t layer, uint8_t *rows, uint32_t max);

/* Query rows with what they need, over one sequence. */
struct wk_query {
    uint32_t n_rows, h_q, topk;
    uint16_t *q;
    int32_t *indices;
    float *out, *lse; /* f32 [n_rows, h_q, d_v], [n_rows, h_q] */
};
/* Random, indices within [0, n_tokens) with some -1. Free with wk_query_free. */
void wk_query_make(struct wk *wk, struct wk_query *query, uint32_t n_rows, uint32_t h_q, uint32_t topk,
                   uint32_t n_tokens);
void wk_query_free(struct wk_query *query);
void wk_attend_job(struct wk_job *j, struct wk *wk, uint64_t id, uint32_t layer, struct wk_query *query);

uint16_t *wk_rows(struct wk *wk, uint32_t n); /* random bf16 rows; malloc'ed */
unsigned wk_random(unsigned below);

#endif /* TESTS_SERVER_WORKER_KIT_H */
