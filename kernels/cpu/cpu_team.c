/* cpu_team.c - a job's tasks spread over the caller and its helpers.
 *
 * Helpers take tasks from one counter, so uneven tasks balance themselves. Waking a parked helper costs tens
 * of microseconds; so small jobs stay on the caller, helpers look around for a moment before they park, and
 * the caller never waits for a helper that has not joined: it closes the job and waits only for those inside.
 *
 *   helper:  look, park -> lock: is a job open? n_inside++ -> tasks -> lock: n_inside-- -> look, park
 *   caller:  lock: open the job, wake -> tasks -> lock: close it, wait for n_inside == 0 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpu.h"

#define WAKE_COST_NS  80000 /* below twice a wake-up of 40 us, a second thread comes too late to help */
#define LOOK_NS       20000 /* how long an idle helper looks before it parks */
#define LOOKS_PER_NOW 64    /* looks between two readings of the clock */

struct job {
    cpu_task_func func;
    void *user;
    int64_t n_tasks;
};

struct helper {
    struct cpu_team *team;
    pthread_t thread;
    int worker;
};

struct cpu_team {
    pthread_mutex_t lock;
    pthread_cond_t opened; /* a job was opened, or stop */
    pthread_cond_t left;   /* n_inside fell to 0 */
    struct job job;        /* guarded by lock; read without it only by threads inside */
    bool is_open;          /* guarded by lock */
    bool stop;             /* guarded by lock */
    int n_inside;          /* guarded by lock */
    int n_parked;          /* guarded by lock */
    /* Counts jobs and the stop: a hint to look at the guarded fields. Relaxed, the lock orders those. */
    atomic_uint generation;
    /* Next task. Relaxed: only uniqueness matters, the data of a task is ordered by the lock. */
    _Alignas(CPU_CACHE_LINE) atomic_llong next;
    _Alignas(CPU_CACHE_LINE) int n_threads;
    int n_started; /* helpers that run */
    struct helper *helpers;
};

static int64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void run_tasks(struct cpu_team *team, const struct job *job, int worker)
{
    for (;;) {
        int64_t i = atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed);

        if (i >= job->n_tasks)
            return;
        job->func(job->user, worker, i);
    }
}

/* Returns when the generation is no longer `seen`, or after LOOK_NS. */
static void look(struct cpu_team *team, unsigned seen)
{
    int64_t deadline = now_ns() + LOOK_NS;

    do {
        for (int i = 0; i < LOOKS_PER_NOW; i++) {
            if (atomic_load_explicit(&team->generation, memory_order_relaxed) != seen)
                return;
            relax();
        }
    } while (now_ns() < deadline);
}

static void *helper_main(void *user)
{
    struct helper *helper = user;
    struct cpu_team *team = helper->team;
    unsigned seen = 0;

    for (;;) {
        look(team, seen);
        pthread_mutex_lock(&team->lock);
        while (!team->stop && seen == atomic_load_explicit(&team->generation, memory_order_relaxed)) {
            team->n_parked++;
            pthread_cond_wait(&team->opened, &team->lock);
            team->n_parked--;
        }
        if (team->stop)
            break;
        seen = atomic_load_explicit(&team->generation, memory_order_relaxed);
        if (team->is_open) {
            team->n_inside++;
            pthread_mutex_unlock(&team->lock);
            run_tasks(team, &team->job, helper->worker);
            pthread_mutex_lock(&team->lock);
            if (--team->n_inside == 0)
                pthread_cond_signal(&team->left);
        }
        pthread_mutex_unlock(&team->lock);
    }
    pthread_mutex_unlock(&team->lock);
    return NULL;
}

/* Signals are for the threads of the program, not for ours. */
static int start_helper(struct helper *helper)
{
    sigset_t all, before;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&helper->thread, NULL, helper_main, helper);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

dsk_status dsk_cpu_team_create(int n_threads, struct cpu_team **team_p)
{
    struct cpu_team *team = dsk_cpu_alloc(sizeof(*team));

    if (team == NULL)
        return DSK_E_NO_MEMORY;
    memset(team, 0, sizeof(*team));
    team->n_threads = n_threads;
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->opened, NULL);
    pthread_cond_init(&team->left, NULL);
    team->helpers = dsk_cpu_alloc((uint64_t)n_threads * sizeof(*team->helpers));
    if (team->helpers == NULL)
        goto destroy_team;
    for (int i = 1; i < n_threads; i++) {
        struct helper *helper = &team->helpers[team->n_started];

        helper->team = team;
        helper->worker = i;
        if (start_helper(helper) != 0)
            goto destroy_team;
        team->n_started++;
    }
    *team_p = team;
    return DSK_OK;

destroy_team:
    dsk_cpu_team_destroy(team);
    return DSK_E_NO_MEMORY;
}

void dsk_cpu_team_destroy(struct cpu_team *team)
{
    if (team == NULL)
        return;
    pthread_mutex_lock(&team->lock);
    team->stop = true;
    atomic_fetch_add_explicit(&team->generation, 1, memory_order_relaxed);
    pthread_cond_broadcast(&team->opened);
    pthread_mutex_unlock(&team->lock);
    for (int i = 0; i < team->n_started; i++)
        pthread_join(team->helpers[i].thread, NULL);
    pthread_cond_destroy(&team->left);
    pthread_cond_destroy(&team->opened);
    pthread_mutex_destroy(&team->lock);
    free(team->helpers);
    free(team);
}

int dsk_cpu_team_size(const struct cpu_team *team)
{
    return team->n_threads;
}

static void open_job(struct cpu_team *team, const struct job *job)
{
    pthread_mutex_lock(&team->lock);
    team->job = *job;
    team->is_open = true;
    atomic_store_explicit(&team->next, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&team->generation, 1, memory_order_relaxed);
    if (team->n_parked > 0)
        pthread_cond_broadcast(&team->opened);
    pthread_mutex_unlock(&team->lock);
}

static void close_job(struct cpu_team *team)
{
    pthread_mutex_lock(&team->lock);
    team->is_open = false;
    while (team->n_inside > 0)
        pthread_cond_wait(&team->left, &team->lock);
    pthread_mutex_unlock(&team->lock);
}

void dsk_cpu_team_run(struct cpu_team *team, int64_t n_tasks, int64_t cost_ns, cpu_task_func func, void *user)
{
    const struct job job = {func, user, n_tasks};

    if (team->n_threads == 1 || n_tasks <= 1 || cost_ns < WAKE_COST_NS) {
        for (int64_t i = 0; i < n_tasks; i++)
            func(user, 0, i);
        return;
    }
    open_job(team, &job);
    run_tasks(team, &job, 0);
    close_job(team);
}
