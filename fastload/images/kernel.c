/* fastload.images.compiled: decoding and resizing without the GIL.
 *
 * resize.h resizes, jpeg.h decodes, write.h makes what caches keep of JPEGs, segment.h reads that, boxes.h chooses the part of
 * an image; this file is their Python form. The threads of pool.h make the rows of a batch, or the caller where there are none.
 * Between calls a thread keeps Huffman tables, one of the pool's scratch memory too, and all else is behind the pool's lock: the
 * module is safe without a GIL. See kernel.py for the meaning of the functions and fallback.py for the same in Python.
 * Only names of the limited API of Python 3.11 are used, so one build serves every later Python: see setup.py.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <time.h>

#include "pool.h"
#include "segment.h"
#include "write.h"

typedef struct {
    Py_buffer view, index; /* without an object: the source is a record of a cache; no index of rows is wanted */
    Place place;
    Py_ssize_t row;
    Cut cut;
    double reading, making; /* seconds */
    bool failed;
    char message[MESSAGE_SIZE];
} Task;

/* The heavier tasks come first, so that the threads end at about the same time. */
typedef struct {
    uint64_t size;
    size_t task;
} Turn;

/* The rows that one call makes. */
typedef struct {
    Job job; /* first: a pointer to it is one to the batch */
    Task *tasks;
    Turn *turns;
    Py_buffer target;
    PyObject *owner; /* keeps the file descriptors open */
    Law law;
    Py_ssize_t rows;
    int width, height;
    int channels_last, clamp, pixels;
    Limits limits;
    bool begun;
} Batch;

/* ---------------------------------------------------------------- arguments */

static int get_file(PyObject *object, Py_buffer *view) { return PyObject_GetBuffer(object, view, PyBUF_SIMPLE); }

/* Bytes of a file, or (H, W, 3) uint8 pixels with any distance between rows. */
static int get_source(PyObject *object, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_STRIDES) < 0) return -1;
    const bool file = view->ndim == 1 && view->itemsize == 1 && (view->strides[0] == 1 || view->len < 2);
    const bool pixels = view->ndim == 3 && view->itemsize == 1 && view->shape[2] == 3 && view->strides[2] == 1 &&
                        view->strides[1] == 3 && view->shape[0] > 0 && view->shape[1] > 0 &&
                        view->shape[0] < (1 << 26) && view->shape[1] < (1 << 26);
    if (file || pixels) return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "an image is the bytes of a file or (H, W, 3) uint8 with contiguous rows");
    return -1;
}

/* One item of crop_resize. */
static int get_task(PyObject *item, const Batch *batch, Task *task) {
    PyObject *source, *index = NULL;
    int flip;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "an item is a tuple (row, source, x0, y0, x1, y1, flip[, index])");
        return -1;
    }
    Box *box = &task->cut.box;
    if (!PyArg_ParseTuple(item, "nOddddp|O", &task->row, &source, &box->x0, &box->y0, &box->x1, &box->y1, &flip, &index)) return -1;
    if (task->row < 0 || task->row >= batch->rows) {
        PyErr_Format(PyExc_IndexError, "row %zd of an out of %zd", task->row, batch->rows);
        return -1;
    }
    task->cut.flip = flip;
    if (get_source(source, &task->view) < 0) return -1;
    if (!index || PyObject_GetBuffer(index, &task->index, PyBUF_WRITABLE) == 0) return 0;
    PyBuffer_Release(&task->view);
    return -1;
}

/* The items of crop_resize. */
static int get_tasks(PyObject *sequence, Batch *batch) {
    PyObject *items = PySequence_Tuple(sequence);
    const Py_ssize_t n = items ? PyTuple_Size(items) : -1;
    if (n >= 0 && !(batch->tasks = PyMem_Calloc(n ? (size_t)n : 1, sizeof *batch->tasks))) PyErr_NoMemory();
    bool good = batch->tasks != NULL;
    for (Py_ssize_t i = 0; good && i < n; i++) {
        batch->tasks[i].cut.law = &batch->law;
        good = get_task(PyTuple_GetItem(items, i), batch, batch->tasks + i) == 0;
        batch->job.tasks += good;
    }
    Py_XDECREF(items);
    return good ? 0 : -1;
}

/* The records of begin_rows: of each its place, the row of the batch and the seed. */
static int get_records(PyObject *places, PyObject *rows, PyObject *seeds, Batch *batch) {
    Py_buffer views[3];
    PyObject *const objects[] = {places, rows, seeds};
    const Py_ssize_t sizes[] = {PLACE_SIZE, sizeof(int64_t), sizeof(uint64_t)};
    int taken = 0, result = -1;
    for (; taken < 3; taken++)
        if (PyObject_GetBuffer(objects[taken], views + taken, PyBUF_SIMPLE) < 0) goto end;
    const Py_ssize_t n = views[0].len / PLACE_SIZE;
    for (int i = 0; i < 3; i++)
        if (views[i].len != n * sizes[i]) {
            PyErr_SetString(PyExc_ValueError, "places, rows and seeds must be as many, of 60, 8 and 8 bytes each");
            goto end;
        }
    if (!(batch->tasks = PyMem_Calloc(n ? (size_t)n : 1, sizeof *batch->tasks))) {
        PyErr_NoMemory();
        goto end;
    }
    batch->job.tasks = (size_t)n;
    for (Py_ssize_t i = 0; i < n; i++) {
        Task *task = batch->tasks + i;
        int64_t row;
        memcpy(&row, (char *)views[1].buf + i * 8, sizeof row);
        if (row < 0 || row >= batch->rows) {
            PyErr_Format(PyExc_IndexError, "row %zd of an out of %zd", (Py_ssize_t)row, batch->rows);
            goto end;
        }
        task->row = (Py_ssize_t)row;
        task->place = place_from((uint8_t *)views[0].buf + i * PLACE_SIZE);
        task->cut.law = &batch->law;
        memcpy(&task->cut.seed, (char *)views[2].buf + i * 8, sizeof task->cut.seed);
    }
    result = 0;
end:
    while (taken > 0) PyBuffer_Release(views + --taken);
    return result;
}

/* How boxes are chosen: ("random", scale, scale, ratio, ratio, flip) or ("centre", height, width), see Crop.box_law. */
static int get_law(PyObject *object, Law *law) {
    const char *name;
    double numbers[5] = {0, 0, 0, 0, 0};
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "a law is a tuple of its name and its numbers");
        return -1;
    }
    if (!PyArg_ParseTuple(object, "s|ddddd", &name, numbers, numbers + 1, numbers + 2, numbers + 3, numbers + 4)) return -1;
    law->kind = !strcmp(name, "random") ? RANDOM_BOX : !strcmp(name, "centre") ? CENTRE_BOX : GIVEN_BOX;
    if (law->kind == RANDOM_BOX) {
        for (int i = 0; i < 2; i++) {
            law->scale[i] = numbers[i];
            law->ratio[i] = numbers[2 + i];
            law->log_ratio[i] = log(law->ratio[i]);
        }
        law->flip = numbers[4];
    }
    memcpy(law->resize, numbers, sizeof law->resize);
    if (law->kind != GIVEN_BOX) return 0;
    PyErr_Format(PyExc_ValueError, "a law is 'random' or 'centre', not '%s'", name);
    return -1;
}

/* The memory to write into. */
static int get_target(PyObject *out, Batch *batch) {
    if (PyObject_GetBuffer(out, &batch->target, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) return -1;
    const Py_buffer *target = &batch->target;
    if (target->ndim != 4 || target->itemsize != 1 || target->shape[batch->channels_last ? 3 : 1] != 3) {
        PyErr_SetString(PyExc_ValueError, "out must be uint8 of shape (n, 3, H, W) or (n, H, W, 3)");
        return -1;
    }
    const Py_ssize_t height = target->shape[batch->channels_last ? 1 : 2], width = target->shape[batch->channels_last ? 2 : 3];
    if (height < 1 || width < 1 || height > 65535 || width > 65535) {
        PyErr_SetString(PyExc_ValueError, "height and width of out must be from 1 to 65,535");
        return -1;
    }
    batch->rows = target->shape[0];
    batch->height = (int)height;
    batch->width = (int)width;
    return 0;
}

/* ---------------------------------------------------------------- batch */

static bool resize_pixels(const Task *task, const Batch *batch, Kept kept, ptrdiff_t stride, Target target, Scratch *s,
                          char *message) {
    Box box;
    bool flip;
    if (!choose_box(&task->cut, kept.width, kept.height, batch->width, batch->height, &box, &flip)) {
        snprintf(message, MESSAGE_SIZE, FRAMED);
        return false;
    }
    if (!(box.x0 >= 0 && box.y0 >= 0 && box.x1 - box.x0 >= 1e-6 && box.y1 - box.y0 >= 1e-6 && box.x1 <= kept.width &&
          box.y1 <= kept.height)) {
        snprintf(message, MESSAGE_SIZE, "the box is not inside the image");
        return false;
    }
    if (!resizer_start(&s->resizer, box, kept.width, kept.height, batch->width, batch->height, batch->clamp, flip, target)) {
        snprintf(message, MESSAGE_SIZE, "out of memory");
        return false;
    }
    resizer_run(&s->resizer, kept.data, stride);
    return true;
}

/* The result of a task from its record in a cache. */
static bool make_from_record(Task *task, const Batch *batch, const uint8_t *payload, Target target, Scratch *s) {
    const size_t size = (size_t)task->place.length;
    if (!payload) {
        snprintf(task->message, MESSAGE_SIZE, "not the record that the index promises");
        return false;
    }
    if (batch->pixels) {
        const Kept kept = kept_pixels(payload, size);
        if (kept.data) return resize_pixels(task, batch, kept, (ptrdiff_t)kept.width * 3, target, s, task->message);
    } else if (is_record(payload, size) || has_rows(payload, size) || !memcmp(payload, "\xff\xd8\xff", 3)) {
        return jpeg_crop_resize(payload, size, &batch->limits, &task->cut, batch->width, batch->height, batch->clamp, target,
                                (IndexRoom){NULL, 0}, s, task->message);
    }
    snprintf(task->message, MESSAGE_SIZE, "an image of a format that Python opens");
    return false;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Makes one row; runs without the GIL, in any thread. */
static void run_task(Job *job, size_t number, Scratch *scratch) {
    const Batch *batch = (Batch *)job;
    Task *task = batch->tasks + batch->turns[number].task;
    const ptrdiff_t plane = (ptrdiff_t)batch->width * batch->height;
    uint8_t *base = (uint8_t *)batch->target.buf + task->row * plane * 3;
    const Target target = {base, batch->channels_last ? batch->width * 3 : batch->width, batch->channels_last ? 1 : plane};
    const Py_buffer *view = &task->view;
    bool done;
    const double start = now();
    double read = start;
    if (!view->obj) {
        const uint8_t *payload = read_payload(&task->place, &scratch->record);
        read = now();
        done = make_from_record(task, batch, payload, target, scratch);
    } else if (view->ndim == 3) {
        const Kept pixels = {view->buf, (int)view->shape[1], (int)view->shape[0]};
        done = resize_pixels(task, batch, pixels, view->strides[0], target, scratch, task->message);
    } else {
        done = jpeg_crop_resize(view->buf, (size_t)view->len, &batch->limits, &task->cut, batch->width, batch->height,
                                batch->clamp, target, (IndexRoom){task->index.buf, (size_t)task->index.len}, scratch,
                                task->message);
    }
    task->failed = !done;
    task->reading = read - start;
    task->making = now() - read;
}

static int by_size(const void *a, const void *b) {
    const uint64_t left = ((const Turn *)a)->size, right = ((const Turn *)b)->size;
    return left < right ? 1 : left > right ? -1 : 0;
}

static int begin_batch(Batch *batch) {
    const size_t n = batch->job.tasks;
    if (!(batch->turns = PyMem_Calloc(n ? n : 1, sizeof *batch->turns))) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < n; i++) {
        const Task *task = batch->tasks + i;
        batch->turns[i] = (Turn){task->view.obj ? (uint64_t)task->view.len : task->place.length, i};
    }
    qsort(batch->turns, n, sizeof *batch->turns, by_size);
    batch->job.run = run_task;
    batch->begun = true;
    pool_begin(&batch->job);
    return 0;
}

static void free_batch(Batch *batch) {
    if (batch->begun && pool_knows(&batch->job)) {
        Py_BEGIN_ALLOW_THREADS
        pool_cancel(&batch->job);
        Py_END_ALLOW_THREADS
    }
    for (size_t i = 0; i < batch->job.tasks; i++) {
        if (batch->tasks[i].view.obj) PyBuffer_Release(&batch->tasks[i].view);
        if (batch->tasks[i].index.obj) PyBuffer_Release(&batch->tasks[i].index);
    }
    if (batch->target.obj) PyBuffer_Release(&batch->target);
    Py_XDECREF(batch->owner);
    PyMem_Free(batch->tasks);
    PyMem_Free(batch->turns);
    PyMem_Free(batch);
}

static PyObject *failures(const Batch *batch) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < batch->job.tasks; i++) {
        if (!batch->tasks[i].failed) continue;
        PyObject *pair = Py_BuildValue("(ns)", batch->tasks[i].row, batch->tasks[i].message);
        if (!pair || PyList_Append(list, pair) < 0) Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

static PyObject *crop_resize(PyObject *self, PyObject *args) {
    PyObject *out, *items, *result = NULL;
    (void)self;
    Batch *batch = PyMem_Calloc(1, sizeof *batch);
    if (!batch) return PyErr_NoMemory();
    unsigned long long max_pixels;
    int strict;
    if (PyArg_ParseTuple(args, "OOppKp", &out, &items, &batch->channels_last, &batch->clamp, &max_pixels, &strict)) {
        batch->limits = (Limits){max_pixels, strict};
        if (get_target(out, batch) == 0 && get_tasks(items, batch) == 0 && begin_batch(batch) == 0) {
            Py_BEGIN_ALLOW_THREADS
            pool_wait(&batch->job);
            Py_END_ALLOW_THREADS
            result = failures(batch);
        }
    }
    free_batch(batch);
    return result;
}

/* ---------------------------------------------------------------- rows that threads make meanwhile */

#define JOB "fastload rows"

static void free_job(PyObject *capsule) { free_batch(PyCapsule_GetPointer(capsule, JOB)); }

static PyObject *begin_rows(PyObject *self, PyObject *args) {
    PyObject *out, *places, *rows, *seeds, *law, *owner;
    (void)self;
    Batch *batch = PyMem_Calloc(1, sizeof *batch);
    if (!batch) return PyErr_NoMemory();
    unsigned long long max_pixels;
    int strict;
    if (PyArg_ParseTuple(args, "OOOOOpppKpO", &out, &places, &rows, &seeds, &law, &batch->pixels, &batch->channels_last,
                         &batch->clamp, &max_pixels, &strict, &owner)) {
        batch->limits = (Limits){max_pixels, strict};
        Py_INCREF(owner);
        batch->owner = owner;
        if (get_law(law, &batch->law) == 0 && get_target(out, batch) == 0 && get_records(places, rows, seeds, batch) == 0 &&
            begin_batch(batch) == 0) {
            PyObject *capsule = PyCapsule_New(batch, JOB, free_job);
            if (capsule) return capsule;
        }
    }
    free_batch(batch);
    return NULL;
}

static PyObject *finish_rows(PyObject *self, PyObject *capsule) {
    (void)self;
    Batch *batch = PyCapsule_GetPointer(capsule, JOB);
    if (!batch) return NULL;
    if (!pool_knows(&batch->job)) {
        PyErr_SetString(PyExc_RuntimeError, "rows that were begun before a fork are the parent's to finish");
        return NULL;
    }
    double reading = 0, making = 0;
    Py_BEGIN_ALLOW_THREADS
    pool_wait(&batch->job);
    Py_END_ALLOW_THREADS
    for (size_t i = 0; i < batch->job.tasks; i++) reading += batch->tasks[i].reading, making += batch->tasks[i].making;
    PyObject *list = failures(batch);
    return list ? Py_BuildValue("(Ndd)", list, reading, making) : NULL;
}

static PyObject *set_threads(PyObject *self, PyObject *args) {
    Py_ssize_t count;
    (void)self;
    if (!PyArg_ParseTuple(args, "n", &count)) return NULL;
    if (count < 0 || count > MOST_THREADS) {
        PyErr_Format(PyExc_ValueError, "threads must be from 0 to %d, not %zd", MOST_THREADS, count);
        return NULL;
    }
    size_t made;
    Py_BEGIN_ALLOW_THREADS
    made = pool_resize((size_t)count);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(made);
}

static PyObject *read_ahead(PyObject *self, PyObject *places) {
    (void)self;
    Py_buffer view;
    if (PyObject_GetBuffer(places, &view, PyBUF_SIMPLE) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i + PLACE_SIZE <= view.len; i += PLACE_SIZE) {
        const Place place = place_from((uint8_t *)view.buf + i);
        will_need(&place);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- one image */

static PyObject *jpeg_size(PyObject *self, PyObject *args) {
    PyObject *data;
    unsigned long long max_pixels;
    int strict;
    (void)self;
    if (!PyArg_ParseTuple(args, "OKp", &data, &max_pixels, &strict)) return NULL;
    Py_buffer view;
    if (get_file(data, &view) < 0) return NULL;
    const Limits limits = {max_pixels, strict};
    char message[MESSAGE_SIZE];
    int width, height;
    /* With the GIL: a header takes less time than giving it up. */
    const bool done = jpeg_header(view.buf, (size_t)view.len, &limits, &width, &height, message);
    PyBuffer_Release(&view);
    if (done) return Py_BuildValue("(ii)", width, height);
    PyErr_SetString(PyExc_ValueError, message);
    return NULL;
}

static PyObject *decode(PyObject *self, PyObject *args) {
    PyObject *data, *out;
    int denominator, strict;
    unsigned long long max_pixels;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOiKp", &data, &out, &denominator, &max_pixels, &strict)) return NULL;
    Py_buffer view, target;
    if (get_file(data, &view) < 0) return NULL;
    if (PyObject_GetBuffer(out, &target, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&view);
        return NULL;
    }
    const bool fits = target.ndim == 3 && target.itemsize == 1 && target.shape[2] == 3 && target.shape[0] <= 65535 &&
                      target.shape[1] <= 65535;
    bool done = false;
    char message[MESSAGE_SIZE] = "out must be uint8 of shape (H, W, 3), denominator 1, 2, 4 or 8";
    if (fits && (denominator == 1 || denominator == 2 || denominator == 4 || denominator == 8)) {
        const Limits limits = {max_pixels, strict};
        Py_BEGIN_ALLOW_THREADS
        Buffer cmyk = {NULL, 0};
        done = jpeg_decode(view.buf, (size_t)view.len, &limits, denominator, target.buf, (int)target.shape[1],
                           (int)target.shape[0], &cmyk, message);
        buffer_free(&cmyk);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&view);
    if (done) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, message);
    return NULL;
}

static PyObject *take_record(Record *record, bool done, const char *message) {
    PyObject *result = done ? PyBytes_FromStringAndSize((char *)record->data, (Py_ssize_t)record->size) : NULL;
    free(record->data);
    if (!done) PyErr_SetString(PyExc_ValueError, message);
    return result;
}

static PyObject *dct_record(PyObject *self, PyObject *args) {
    PyObject *data;
    int orientation;
    unsigned long long max_pixels;
    (void)self;
    if (!PyArg_ParseTuple(args, "OiK", &data, &orientation, &max_pixels)) return NULL;
    Py_buffer view;
    if (get_file(data, &view) < 0) return NULL;
    Record record = {NULL, 0, 0};
    char message[MESSAGE_SIZE];
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = jpeg_to_record(view.buf, (size_t)view.len, max_pixels, orientation, &record, message);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return take_record(&record, done, message);
}

static PyObject *row_index(PyObject *self, PyObject *args) {
    PyObject *data;
    unsigned long long max_pixels;
    (void)self;
    if (!PyArg_ParseTuple(args, "OK", &data, &max_pixels)) return NULL;
    Py_buffer view;
    if (get_file(data, &view) < 0) return NULL;
    Record record = {NULL, 0, 0};
    char message[MESSAGE_SIZE];
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = jpeg_to_rows(view.buf, (size_t)view.len, max_pixels, &record, message);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return take_record(&record, done, message);
}

/* ---------------------------------------------------------------- module */

static PyObject *set_simd(PyObject *self, PyObject *on) {
    (void)self;
    const int wanted = PyObject_IsTrue(on);
    if (wanted < 0) return NULL;
    use_simd = wanted && cpu_has_simd();
    return PyBool_FromLong(use_simd);
}

static PyObject *take_by_libjpeg(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyLong_FromUnsignedLong(atomic_exchange(&by_libjpeg, 0));
}

static PyObject *set_huffman(PyObject *self, PyObject *on) {
    (void)self;
    const int wanted = PyObject_IsTrue(on);
    if (wanted < 0) return NULL;
    use_huffman = wanted;
    small_scan = 0;
    return PyBool_FromLong(use_huffman);
}

static PyMethodDef methods[] = {
    {"jpeg_size", jpeg_size, METH_VARARGS, "jpeg_size(data, max_pixels, strict) -> (width, height)"},
    {"decode", decode, METH_VARARGS, "decode(data, out, denominator, max_pixels, strict)"},
    {"crop_resize", crop_resize, METH_VARARGS,
     "crop_resize(out, items, channels_last, clamp, max_pixels, strict) -> [(row, reason)]"},
    {"begin_rows", begin_rows, METH_VARARGS,
     "begin_rows(out, places, rows, seeds, law, pixels, channels_last, clamp, max_pixels, strict, owner) -> job"},
    {"finish_rows", finish_rows, METH_O, "finish_rows(job) -> ([(row, reason)], seconds of reading, seconds of decoding)"},
    {"read_ahead", read_ahead, METH_O, "read_ahead(places)"},
    {"set_threads", set_threads, METH_VARARGS, "set_threads(count) -> how many there are now"},
    {"dct_record", dct_record, METH_VARARGS, "dct_record(jpeg, orientation, max_pixels) -> bytes"},
    {"row_index", row_index, METH_VARARGS, "row_index(jpeg, max_pixels) -> bytes"},
    {"take_by_libjpeg", take_by_libjpeg, METH_NOARGS,
     "take_by_libjpeg() -> images since the last call whose Huffman codes libjpeg decoded"},
    {"_set_simd", set_simd, METH_O, "_set_simd(on) -> whether SIMD is now in use; for tests"},
    {"_set_huffman", set_huffman, METH_O, "_set_huffman(on) -> whether JPEGs, small ones too, are now decoded by huffman.h; for tests"},
    {NULL, NULL, 0, NULL},
};

#define STRING_OF(x) #x
#define STRING(x) STRING_OF(x)

static int execute(PyObject *module) {
    static atomic_flag started = ATOMIC_FLAG_INIT; /* this code is loaded once, however many interpreters there are */
    if (!atomic_flag_test_and_set(&started) && !pool_start()) {
        PyErr_NoMemory();
        return -1;
    }
    use_simd = cpu_has_simd();
#ifdef HAVE_AVX2
    const char *simd = use_simd ? "avx2" : "scalar";
#else
    const char *simd = use_simd ? "neon" : "scalar";
#endif
    if (PyModule_AddStringConstant(module, "SIMD", simd) < 0) return -1;
    if (PyModule_AddIntConstant(module, "RECORDS", records_work()) < 0) return -1;
    use_huffman = huffman_works();
    if (PyModule_AddIntConstant(module, "HUFFMAN", use_huffman) < 0) return -1;
    return PyModule_AddStringConstant(module, "LIBJPEG_TURBO", STRING(LIBJPEG_TURBO_VERSION));
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "fastload.images.compiled", .m_doc = "JPEG crop, resize and flip; see kernel.py.",
    .m_size = 0, .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit_compiled(void) { return PyModuleDef_Init(&definition); }
