/* The rows of a batch, each made from one image: a file or pixels in memory, or a record of a cache. Without Python. */
#ifndef FASTLOAD_BATCH_H
#define FASTLOAD_BATCH_H

#include <time.h>

#include "pool.h"
#include "segment.h"

typedef struct {
    const uint8_t *file; /* or NULL */
    Kept pixels;         /* or without data */
    Place place;         /* where neither is given */
    size_t size;         /* of the source: what it costs, about */
    IndexRoom room;
    ptrdiff_t row;
    Cut cut;
    double reading, making; /* seconds */
    bool failed;
    char message[MESSAGE_SIZE];
} Task;

typedef struct {
    size_t size, task;
} Turn;

typedef struct {
    Job job; /* first: a pointer to it is one to the batch */
    Task *tasks;
    Turn *turns; /* the heavier tasks come first, so that the threads end at about the same time */
    Law law;
    uint8_t *out;
    ptrdiff_t rows;
    int width, height;
    int channels_last, clamp;
    int pixels; /* the records hold those of cache mode "decoded", not files */
    Limits limits;
} Batch;

/* ---------------------------------------------------------------- one row */

static bool resize_pixels(const Task *task, const Batch *batch, Kept kept, Target target, Scratch *s, char *message) {
    Box box;
    bool flip;
    const char *reason = choose_box(&task->cut, kept.width, kept.height, batch->width, batch->height, &box, &flip);
    if (!reason && !resizer_start(&s->resizer, box, kept.width, kept.height, batch->width, batch->height, batch->clamp, flip,
                                  target))
        reason = "out of memory";
    if (reason) {
        snprintf(message, MESSAGE_SIZE, "%s", reason);
        return false;
    }
    resizer_run(&s->resizer, kept.data, kept.stride);
    return true;
}

static bool make_from_file(Task *task, const Batch *batch, const uint8_t *file, Target target, Scratch *s) {
    return jpeg_crop_resize(file, task->size, &batch->limits, &task->cut, batch->width, batch->height, batch->clamp, target,
                            task->room, s, task->message);
}

static bool make_from_payload(Task *task, const Batch *batch, const uint8_t *payload, Target target, Scratch *s) {
    if (!payload) {
        snprintf(task->message, MESSAGE_SIZE, "not the record that the index promises");
        return false;
    }
    if (batch->pixels) {
        const Kept kept = kept_pixels(payload, task->size);
        if (kept.data) return resize_pixels(task, batch, kept, target, s, task->message);
    } else if (is_record(payload, task->size) || has_rows(payload, task->size) || !memcmp(payload, "\xff\xd8\xff", 3)) {
        return make_from_file(task, batch, payload, target, s);
    }
    snprintf(task->message, MESSAGE_SIZE, "an image of a format that Python opens");
    return false;
}

static double seconds_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void run_task(Job *job, size_t number, Scratch *scratch) {
    const Batch *batch = (Batch *)job;
    Task *task = batch->tasks + batch->turns[number].task;
    const ptrdiff_t plane = (ptrdiff_t)batch->width * batch->height;
    const Target target = {batch->out + task->row * plane * 3, batch->channels_last ? batch->width * 3 : batch->width,
                           batch->channels_last ? 1 : plane};
    const double start = seconds_now();
    double read = start;
    bool done;
    if (task->file) {
        done = make_from_file(task, batch, task->file, target, scratch);
    } else if (task->pixels.data) {
        done = resize_pixels(task, batch, task->pixels, target, scratch, task->message);
    } else {
        const uint8_t *payload = read_payload(&task->place, &scratch->record);
        read = seconds_now();
        done = make_from_payload(task, batch, payload, target, scratch);
    }
    task->failed = !done;
    task->reading = read - start;
    task->making = seconds_now() - read;
}

/* ---------------------------------------------------------------- all rows */

/* Room for so many tasks, which are zero but for the law of their boxes. */
static bool batch_reserve(Batch *batch, size_t count) {
    batch->tasks = calloc(count + 1, sizeof *batch->tasks);
    batch->turns = calloc(count + 1, sizeof *batch->turns);
    if (!batch->tasks || !batch->turns) return false;
    batch->job.tasks = count;
    for (size_t i = 0; i < count; i++) batch->tasks[i].cut.law = &batch->law;
    return true;
}

static int by_size(const void *a, const void *b) {
    const size_t left = ((const Turn *)a)->size, right = ((const Turn *)b)->size;
    return left < right ? 1 : left > right ? -1 : 0;
}

static void batch_begin(Batch *batch) {
    for (size_t i = 0; i < batch->job.tasks; i++) batch->turns[i] = (Turn){batch->tasks[i].size, i};
    qsort(batch->turns, batch->job.tasks, sizeof *batch->turns, by_size);
    batch->job.run = run_task;
    pool_begin(&batch->job);
}

static void batch_free(Batch *batch) {
    free(batch->tasks);
    free(batch->turns);
}

#endif
