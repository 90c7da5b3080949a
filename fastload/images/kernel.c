/* fastload.images.compiled: decoding and resizing without the GIL.
 *
 * resize.h resizes, jpeg.h decodes, write.h makes what caches keep of JPEGs; this file is their Python form. Between calls
 * each thread keeps Huffman tables, and nothing else, so the module needs no lock and is safe without a GIL. See kernel.py
 * for the meaning of the functions and fallback.py for the same in Python.
 * Only names of the limited API of Python 3.11 are used, so one build serves every later Python: see setup.py.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "write.h"

typedef struct {
    Py_buffer view, index; /* without an object: no index of rows is wanted */
    Py_ssize_t row;
    Box box;
    int flip;
    bool failed;
    char message[MESSAGE_SIZE];
} Task;

typedef struct {
    Py_ssize_t rows;
    int width, height;
    int channels_last, clamp;
    Limits limits;
    uint8_t *out;
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

static int get_task(PyObject *item, const Batch *batch, Task *task) {
    PyObject *source, *index = NULL;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "an item is a tuple (row, source, x0, y0, x1, y1, flip[, index])");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "nOddddp|O", &task->row, &source, &task->box.x0, &task->box.y0, &task->box.x1,
                          &task->box.y1, &task->flip, &index))
        return -1;
    if (task->row < 0 || task->row >= batch->rows) {
        PyErr_Format(PyExc_IndexError, "row %zd of an out of %zd", task->row, batch->rows);
        return -1;
    }
    if (get_source(source, &task->view) < 0) return -1;
    if (!index || PyObject_GetBuffer(index, &task->index, PyBUF_WRITABLE) == 0) return 0;
    PyBuffer_Release(&task->view);
    return -1;
}

static void release_task(Task *task) {
    PyBuffer_Release(&task->view);
    if (task->index.obj) PyBuffer_Release(&task->index);
}

/* ---------------------------------------------------------------- batch */

static bool resize_pixels(const Task *task, const Batch *batch, Target target, Scratch *s, char *message) {
    const Box box = task->box;
    const int width = (int)task->view.shape[1], height = (int)task->view.shape[0];
    if (!(box.x0 >= 0 && box.y0 >= 0 && box.x1 - box.x0 >= 1e-6 && box.y1 - box.y0 >= 1e-6 && box.x1 <= width &&
          box.y1 <= height)) {
        snprintf(message, MESSAGE_SIZE, "the box is not inside the image");
        return false;
    }
    if (!resizer_start(&s->resizer, box, width, height, batch->width, batch->height, batch->clamp, task->flip, target)) {
        snprintf(message, MESSAGE_SIZE, "out of memory");
        return false;
    }
    resizer_run(&s->resizer, task->view.buf, task->view.strides[0]);
    return true;
}

/* Runs without the GIL. */
static void run_batch(const Batch *batch, Task *tasks, Py_ssize_t n) {
    const ptrdiff_t plane = (ptrdiff_t)batch->width * batch->height;
    Scratch scratch;
    memset(&scratch, 0, sizeof scratch);
    for (Py_ssize_t i = 0; i < n; i++) {
        Task *task = tasks + i;
        uint8_t *base = batch->out + task->row * plane * 3;
        const Target target = {base, batch->channels_last ? batch->width * 3 : batch->width, batch->channels_last ? 1 : plane};
        const bool done =
            task->view.ndim == 3
                ? resize_pixels(task, batch, target, &scratch, task->message)
                : jpeg_crop_resize(task->view.buf, (size_t)task->view.len, &batch->limits, task->box, batch->width,
                                   batch->height, batch->clamp, task->flip, target,
                                   (IndexRoom){task->index.buf, (size_t)task->index.len}, &scratch, task->message);
        task->failed = !done;
    }
    scratch_free(&scratch);
}

static PyObject *failures(const Task *tasks, Py_ssize_t n) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < n; i++) {
        if (!tasks[i].failed) continue;
        PyObject *pair = Py_BuildValue("(ns)", tasks[i].row, tasks[i].message);
        if (!pair || PyList_Append(list, pair) < 0) Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

static PyObject *crop_resize(PyObject *self, PyObject *args) {
    PyObject *out, *sequence;
    Batch batch;
    unsigned long long max_pixels;
    int strict;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOppKp", &out, &sequence, &batch.channels_last, &batch.clamp, &max_pixels, &strict))
        return NULL;
    batch.limits = (Limits){max_pixels, strict};
    Py_buffer target;
    if (PyObject_GetBuffer(out, &target, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) return NULL;
    const int channel_axis = batch.channels_last ? 3 : 1;
    PyObject *result = NULL, *items = NULL;
    Task *tasks = NULL;
    Py_ssize_t n = 0, taken = 0;
    if (target.ndim != 4 || target.itemsize != 1 || target.shape[channel_axis] != 3) {
        PyErr_SetString(PyExc_ValueError, "out must be uint8 of shape (n, 3, H, W) or (n, H, W, 3)");
        goto end;
    }
    const Py_ssize_t height = target.shape[batch.channels_last ? 1 : 2], width = target.shape[batch.channels_last ? 2 : 3];
    if (height < 1 || width < 1 || height > 65535 || width > 65535) {
        PyErr_SetString(PyExc_ValueError, "height and width of out must be from 1 to 65,535");
        goto end;
    }
    batch.rows = target.shape[0];
    batch.height = (int)height;
    batch.width = (int)width;
    batch.out = target.buf;
    if (!(items = PySequence_Tuple(sequence))) goto end;
    if ((n = PyTuple_Size(items)) < 0) goto end;
    if (!(tasks = PyMem_Calloc(n ? (size_t)n : 1, sizeof *tasks))) {
        PyErr_NoMemory();
        goto end;
    }
    for (; taken < n; taken++)
        if (get_task(PyTuple_GetItem(items, taken), &batch, tasks + taken) < 0) goto end;
    Py_BEGIN_ALLOW_THREADS
    run_batch(&batch, tasks, n);
    Py_END_ALLOW_THREADS
    result = failures(tasks, n);
end:
    for (Py_ssize_t i = 0; i < taken; i++) release_task(tasks + i);
    PyMem_Free(tasks);
    Py_XDECREF(items);
    PyBuffer_Release(&target);
    return result;
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
