/* Threads that work through jobs. A job is a number of tasks of unequal cost: a thread takes the next one until none is left, so
 * one heavy task does not hold up the others, and the next job begins while the last tasks of this one are at work.
 *
 * The threads are made and ended by pool_resize alone. Without any, whoever waits for a job does its tasks. They belong to one
 * process: a forked child has none, and jobs of its parent cannot be waited for there.
 */
#ifndef FASTLOAD_POOL_H
#define FASTLOAD_POOL_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>

#include "jpeg.h"

#define MOST_THREADS 256
#define SCRATCH_KEPT (8u << 20) /* bytes that a thread keeps from task to task */

typedef struct Job {
    void (*run)(struct Job *, size_t task, Scratch *);
    size_t tasks, begun, ended;
    unsigned forks; /* as in the pool, when it was begun */
    struct Job *after;
} Job;

typedef struct {
    pthread_mutex_t resizing; /* held by who makes and ends threads; taken before `lock` */
    pthread_mutex_t lock;     /* of all below, and of the jobs */
    pthread_cond_t work, ended;
    Job *first, *last; /* the jobs with tasks that nobody has begun */
    size_t wanted, made;
    pthread_t threads[MOST_THREADS];
    unsigned forks; /* from the process that loaded this code to this one */
} Pool;

static Pool pool = {
    .resizing = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .work = PTHREAD_COND_INITIALIZER,
    .ended = PTHREAD_COND_INITIALIZER,
};

/* In a forked child: the threads stayed behind, perhaps with the locks. */
static void pool_forked(void) {
    const Pool fresh = {
        .resizing = PTHREAD_MUTEX_INITIALIZER,
        .lock = PTHREAD_MUTEX_INITIALIZER,
        .work = PTHREAD_COND_INITIALIZER,
        .ended = PTHREAD_COND_INITIALIZER,
        .forks = pool.forks + 1,
    };
    pool = fresh;
}

/* Once in a process, before all else. */
static bool pool_start(void) { return pthread_atfork(NULL, NULL, pool_forked) == 0; }

static void pool_remove(Job *job) {
    Job **place = &pool.first;
    while (*place && *place != job) place = &(*place)->after;
    if (!*place) return;
    *place = job->after;
    pool.last = NULL;
    for (Job *left = pool.first; left; left = left->after) pool.last = left;
}

/* Does the next task of a job. The lock is held, but not meanwhile. */
static void pool_work(Job *job, Scratch *scratch) {
    const size_t task = job->begun++;
    if (job->begun == job->tasks) pool_remove(job);
    pthread_mutex_unlock(&pool.lock);
    job->run(job, task, scratch);
    if (scratch_size(scratch) > SCRATCH_KEPT) scratch_free(scratch);
    pthread_mutex_lock(&pool.lock);
    if (++job->ended == job->tasks) pthread_cond_broadcast(&pool.ended); /* from here on its owner may free it */
}

static void *pool_thread(void *number) {
    Scratch scratch;
    memset(&scratch, 0, sizeof scratch);
#if defined(__linux__) && defined(_GNU_SOURCE)
    pthread_setname_np(pthread_self(), "fastload-kernel");
#endif
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while ((size_t)number < pool.wanted && !pool.first) pthread_cond_wait(&pool.work, &pool.lock);
        if ((size_t)number >= pool.wanted) break;
        pool_work(pool.first, &scratch);
    }
    pthread_mutex_unlock(&pool.lock);
    scratch_free(&scratch);
    return NULL;
}

/* Has so many threads from now on; waits for those that end. Returns how many there are: fewer where the system gives no more. */
static size_t pool_resize(size_t count) {
    sigset_t all, before;
    sigfillset(&all); /* signals are for other threads, but for those of a fault in this one */
    const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
    pthread_mutex_lock(&pool.resizing);
    pthread_mutex_lock(&pool.lock);
    pool.wanted = count;
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);
    for (; pool.made > count; pool.made--) pthread_join(pool.threads[pool.made - 1], NULL);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    while (pool.made < count && !pthread_create(pool.threads + pool.made, NULL, pool_thread, (void *)pool.made)) pool.made++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_lock(&pool.lock);
    pool.wanted = count = pool.made;
    pthread_cond_broadcast(&pool.ended); /* who waits may have to do the rest alone */
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.resizing);
    return count;
}

static void pool_begin(Job *job) {
    pthread_mutex_lock(&pool.lock);
    job->forks = pool.forks;
    job->begun = job->ended = 0;
    job->after = NULL;
    if (job->tasks) {
        if (pool.first)
            pool.last->after = job;
        else
            pool.first = job;
        pool.last = job;
        pthread_cond_broadcast(&pool.work);
    }
    pthread_mutex_unlock(&pool.lock);
}

/* Whether a job was begun in this process. */
static bool pool_knows(const Job *job) { return job->forks == pool.forks; }

/* Waits until all tasks have ended. */
static void pool_wait(Job *job) {
    Scratch scratch;
    memset(&scratch, 0, sizeof scratch);
    pthread_mutex_lock(&pool.lock);
    while (job->ended < job->tasks)
        if (pool.wanted == 0 && job->begun < job->tasks)
            pool_work(job, &scratch);
        else
            pthread_cond_wait(&pool.ended, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    scratch_free(&scratch);
}

/* Begins no more tasks of a job, and waits for those at work. */
static void pool_cancel(Job *job) {
    pthread_mutex_lock(&pool.lock);
    pool_remove(job);
    job->ended += job->tasks - job->begun;
    job->begun = job->tasks;
    pthread_mutex_unlock(&pool.lock);
    pool_wait(job);
}

#endif
