/* fastload.images.compiled: decoding and resizing without the GIL.
 *
 * resize.h resizes, jpeg.h decodes, write.h makes what caches keep of JPEGs, segment.h reads that, boxes.h chooses the part of
 * an image, batch.h makes rows by the threads of pool.h; this file is their Python form.
 * Between calls a thread keeps Huffman tables, one of the pool's scratch memory too, and all else is behind the pool's lock: the
 * module is safe without a GIL. See kernel.py for the meaning of the functions and fallback.py for the same in Python.
 * Only names of the limited API of Python 3.11 are used, so one build serves every later Python: see setup.py.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "batch.h"
#include "write.h"

/* The rows that one call makes, and what it borrows of Python. */
typedef struct {
    Batch batch; /* first: a pointer to it is one to the rows */
    Py_buffer target;
    Py_buffer *views; /* of each task: its source, and the memory for an index of its rows */
    Py_ssize_t taken; /* of the views */
    PyObject *owner;  /* keeps the file descriptors open */
    bool begun;
} Rows;

/* ---------------------------------------------------------------- arguments */

static int get_file(PyObject *object, Py_buffer *view) { return PyObject_GetBuffer(object, view, PyBUF_SIMPLE); }

/* Bytes of a file, or (H, W, 3) uint8 pixels with any distance between rows. */
static int get_source(PyObject *object, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_STRIDES) < 0) return -1;
    const bool file = view->ndim == 1 && view->itemsize == 1 && (view->strides[0] == 1 || view->len < 2);
    const bool pixels = view->ndim == 3 && view->itemsize == 1 && view->shape[2] == 3 && view->strides[2] == 1 &&
                        view->strides[1] == 3 && view->shape[0] > 0 && view->shape[1] > 0 &&
                        view->shape[0] <= LONGEST && view->shape[1] <= LONGEST;
    if (file || pixels) return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "an image is the bytes of a file or (H, W, 3) uint8 with contiguous rows");
    return -1;
}

/* One item of crop_resize. */
static int get_task(PyObject *item, Rows *rows, Task *task) {
    PyObject *source, *index = NULL;
    int flip;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "an item is a tuple (row, source, x0, y0, x1, y1, flip[, index])");
        return -1;
    }
    Box *box = &task->cut.box;
    if (!PyArg_ParseTuple(item, "nOddddp|O", &task->row, &source, &box->x0, &box->y0, &box->x1, &box->y1, &flip, &index)) return -1;
    if (task->row < 0 || task->row >= rows->batch.rows) {
        PyErr_Format(PyExc_IndexError, "row %zd of an out of %zd", task->row, rows->batch.rows);
        return -1;
    }
    task->cut.flip = flip;
    Py_buffer *view = rows->views + rows->taken;
    if (get_source(source, view) < 0) return -1;
    rows->taken++;
    task->size = (size_t)view->len;
    if (view->ndim == 3)
        task->pixels = (Kept){view->buf, (int)view->shape[1], (int)view->shape[0], view->strides[0]};
    else
        task->file = view->buf ? view->buf : (const uint8_t *)"";
    if (!index) return 0;
    if (PyObject_GetBuffer(index, ++view, PyBUF_WRITABLE) < 0) return -1;
    rows->taken++;
    task->room = (IndexRoom){view->buf, (size_t)view->len};
    return 0;
}

/* The items of crop_resize. */
static int get_tasks(PyObject *sequence, Rows *rows) {
    PyObject *items = PySequence_Tuple(sequence);
    const Py_ssize_t n = items ? PyTuple_Size(items) : -1;
    bool good = n >= 0 && batch_reserve(&rows->batch, (size_t)n);
    if (n >= 0 && (!good || !(rows->views = PyMem_Calloc(2 * (size_t)n + 1, sizeof *rows->views)))) {
        PyErr_NoMemory();
        good = false;
    }
    for (Py_ssize_t i = 0; good && i < n; i++) good = get_task(PyTuple_GetItem(items, i), rows, rows->batch.tasks + i) == 0;
    Py_XDECREF(items);
    return good ? 0 : -1;
}

/* The records of begin_rows: of each its place, the row of the batch and the seed. */
static int get_records(PyObject *places, PyObject *numbers, PyObject *seeds, Rows *rows) {
    Py_buffer views[3];
    PyObject *const objects[] = {places, numbers, seeds};
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
    if (!batch_reserve(&rows->batch, (size_t)n)) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        Task *task = rows->batch.tasks + i;
        int64_t row;
        memcpy(&row, (char *)views[1].buf + i * 8, sizeof row);
        if (row < 0 || row >= rows->batch.rows) {
            PyErr_Format(PyExc_IndexError, "row %zd of an out of %zd", (Py_ssize_t)row, rows->batch.rows);
            goto end;
        }
        task->row = (ptrdiff_t)row;
        task->place = place_from((uint8_t *)views[0].buf + i * PLACE_SIZE);
        task->size = (size_t)task->place.length;
        memcpy(&task->cut.seed, (char *)views[2].buf + i * 8, sizeof task->cut.seed);
    }
    result = 0;
end:
    while (taken > 0) PyBuffer_Release(views + --taken);
    return result;
}

/* How boxes are chosen: ("random", scale, scale, ratio, ratio, flip) or ("centre", height, width), see Crop._box_law. */
static int get_law(PyObject *object, Law *law) {
    const char *name;
    double numbers[5] = {0, 0, 0, 0, 0};
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "a law is a tuple of its name and its numbers");
        return -1;
    }
    if (!PyArg_ParseTuple(object, "s|ddddd", &name, numbers, numbers + 1, numbers + 2, numbers + 3, numbers + 4)) return -1;
    if (!strcmp(name, "random")) {
        *law = random_law(numbers, numbers + 2, numbers[4]);
        return 0;
    }
    if (!strcmp(name, "centre")) {
        *law = (Law){.kind = CENTRE_BOX, .resize = {numbers[0], numbers[1]}};
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "a law is 'random' or 'centre', not '%s'", name);
    return -1;
}

/* The memory to write into. */
static int get_target(PyObject *out, Rows *rows) {
    Batch *batch = &rows->batch;
    if (PyObject_GetBuffer(out, &rows->target, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) return -1;
    const Py_buffer *target = &rows->target;
    if (target->ndim != 4 || target->itemsize != 1 || target->shape[batch->channels_last ? 3 : 1] != 3) {
        PyErr_SetString(PyExc_ValueError, "out must be uint8 of shape (n, 3, H, W) or (n, H, W, 3)");
        return -1;
    }
    const Py_ssize_t height = target->shape[batch->channels_last ? 1 : 2], width = target->shape[batch->channels_last ? 2 : 3];
    if (height < 1 || width < 1 || height > LONGEST || width > LONGEST) {
        PyErr_SetString(PyExc_ValueError, "height and width of out must be from 1 to 268,435,456");
        return -1;
    }
    batch->out = target->buf;
    batch->rows = target->shape[0];
    batch->height = (int)height;
    batch->width = (int)width;
    return 0;
}

/* ---------------------------------------------------------------- rows */

static void rows_begin(Rows *rows) {
    rows->begun = true;
    batch_begin(&rows->batch);
}

static void free_rows(Rows *rows) {
    if (rows->begun && pool_knows(&rows->batch.job)) {
        Py_BEGIN_ALLOW_THREADS
        pool_cancel(&rows->batch.job);
        Py_END_ALLOW_THREADS
    }
    while (rows->taken > 0) PyBuffer_Release(rows->views + --rows->taken);
    if (rows->target.obj) PyBuffer_Release(&rows->target);
    Py_XDECREF(rows->owner);
    batch_free(&rows->batch);
    PyMem_Free(rows->views);
    PyMem_Free(rows);
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
    Rows *rows = PyMem_Calloc(1, sizeof *rows);
    if (!rows) return PyErr_NoMemory();
    Batch *batch = &rows->batch;
    unsigned long long max_pixels;
    int strict;
    if (PyArg_ParseTuple(args, "OOppKp", &out, &items, &batch->channels_last, &batch->clamp, &max_pixels, &strict)) {
        batch->limits = (Limits){max_pixels, strict};
        if (get_target(out, rows) == 0 && get_tasks(items, rows) == 0) {
            rows_begin(rows);
            Py_BEGIN_ALLOW_THREADS
            pool_wait(&batch->job);
            Py_END_ALLOW_THREADS
            result = failures(batch);
        }
    }
    free_rows(rows);
    return result;
}

#define JOB "fastload rows"

static void free_job(PyObject *capsule) { free_rows(PyCapsule_GetPointer(capsule, JOB)); }

static PyObject *begin_rows(PyObject *self, PyObject *args) {
    PyObject *out, *places, *numbers, *seeds, *law, *owner;
    (void)self;
    Rows *rows = PyMem_Calloc(1, sizeof *rows);
    if (!rows) return PyErr_NoMemory();
    Batch *batch = &rows->batch;
    unsigned long long max_pixels;
    int strict;
    if (PyArg_ParseTuple(args, "OOOOOpppKpO", &out, &places, &numbers, &seeds, &law, &batch->pixels, &batch->channels_last,
                         &batch->clamp, &max_pixels, &strict, &owner)) {
        batch->limits = (Limits){max_pixels, strict};
        Py_INCREF(owner);
        rows->owner = owner;
        if (get_law(law, &batch->law) == 0 && get_target(out, rows) == 0 && get_records(places, numbers, seeds, rows) == 0) {
            rows_begin(rows);
            PyObject *capsule = PyCapsule_New(rows, JOB, free_job);
            if (capsule) return capsule;
        }
    }
    free_rows(rows);
    return NULL;
}

static PyObject *finish_rows(PyObject *self, PyObject *capsule) {
    (void)self;
    Rows *rows = PyCapsule_GetPointer(capsule, JOB);
    if (!rows) return NULL;
    Batch *batch = &rows->batch;
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

/* A record of a JPEG, or the index of its rows. */
static PyObject *made_of(PyObject *data, bool rows, int orientation, unsigned long long max_pixels) {
    Py_buffer view;
    if (get_file(data, &view) < 0) return NULL;
    Record record = {NULL, 0, 0};
    char message[MESSAGE_SIZE];
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = rows ? jpeg_to_rows(view.buf, (size_t)view.len, max_pixels, &record, message)
                : jpeg_to_record(view.buf, (size_t)view.len, max_pixels, orientation, &record, message);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    PyObject *result = done ? PyBytes_FromStringAndSize((char *)record.data, (Py_ssize_t)record.size) : NULL;
    free(record.data);
    if (!done) PyErr_SetString(PyExc_ValueError, message);
    return result;
}

static PyObject *dct_record(PyObject *self, PyObject *args) {
    PyObject *data;
    int orientation;
    unsigned long long max_pixels;
    (void)self;
    if (!PyArg_ParseTuple(args, "OiK", &data, &orientation, &max_pixels)) return NULL;
    return made_of(data, false, orientation, max_pixels);
}

static PyObject *row_index(PyObject *self, PyObject *args) {
    PyObject *data;
    unsigned long long max_pixels;
    (void)self;
    if (!PyArg_ParseTuple(args, "OK", &data, &max_pixels)) return NULL;
    return made_of(data, true, 0, max_pixels);
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
