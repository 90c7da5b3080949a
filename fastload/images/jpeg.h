/* JPEG to RGB rows with libjpeg-turbo: whole images, and crops that are resized while they are decoded.
 *
 * Of a crop only what it needs is decoded: at the smallest DCT scale that leaves enough pixels, only its columns
 * (jpeg_crop_scanline), without the work behind the Huffman codes for the rows above (jpeg_skip_scanlines), and
 * nothing at all of the rows below. A damaged stream ends in `false` and a message; by default that includes what
 * libjpeg calls warnings (bad codes, a premature end), because then pixels are missing or made up. And a file that was
 * cut is refused for every crop: otherwise a sample would fail in some epochs only, depending on their crops.
 */
#ifndef FASTLOAD_JPEG_H
#define FASTLOAD_JPEG_H

#include "boxes.h"
#include "dct.h"
#include "resize.h"

#define ROWS_PER_READ 4

/* ---------------------------------------------------------------- header */

/* Whether an end marker follows the header, which has just been read. Entropy-coded data cannot hold one by chance, so
 * a file without it was cut. Bytes after it (a camera's second picture, zeros) are ignored. */
static bool has_end(const struct jpeg_source_mgr *source) {
    const uint8_t *from = source->next_input_byte;
    for (size_t i = source->bytes_in_buffer; i >= 2; i--)
        if (from[i - 1] == JPEG_EOI && from[i - 2] == 0xFF) return true;
    return false;
}

/* Reads the header. A new decompressor for each image, though one could be kept: it would keep the tables of the image
 * before, and decode an image that lacks its own with them. Making one costs 0.1 % of a decode. */
static void decoder_open(Decoder *d, const uint8_t *data, size_t size, const Limits *limits) {
    const bool record = is_record(data, size);
    if (record)
        data = record_header(d, data, &size);
    else if (has_rows(data, size))
        data = rows_header(d, data, &size);
    jpeg_create_decompress(&d->jpeg);
    jpeg_mem_src(&d->jpeg, (unsigned char *)data, (unsigned long)size);
    jpeg_read_header(&d->jpeg, TRUE);
    if (record) d->jpeg.jpeg_color_space = (J_COLOR_SPACE)d->reader.data[6];
    const uint64_t width = d->jpeg.image_width, height = d->jpeg.image_height;
    if (width * height > limits->max_pixels) {
        snprintf(d->message, MESSAGE_SIZE, "%u x %u pixels are more than max_pixels=%llu: "
                 "resize the image before, or read it by a decode= of your own", (unsigned)width, (unsigned)height,
                 (unsigned long long)limits->max_pixels);
        longjmp(d->escape, 1);
    }
    if (limits->strict && !record && !has_end(d->jpeg.src)) decoder_fail(d, "premature end: the file was cut, it has no end marker");
    d->warnings_are_errors = limits->strict;
    switch (d->jpeg.jpeg_color_space) {
        case JCS_GRAYSCALE:
        case JCS_YCbCr:
        case JCS_RGB:
            d->jpeg.out_color_space = JCS_RGB;
            break;
        case JCS_CMYK:
        case JCS_YCCK:
            d->jpeg.out_color_space = JCS_CMYK;
            break;
        default:
            snprintf(d->message, MESSAGE_SIZE, "an unknown color space of %d components", d->jpeg.num_components);
            longjmp(d->escape, 1);
    }
    d->jpeg.dct_method = JDCT_ISLOW;
}

static bool jpeg_header(const uint8_t *data, size_t size, const Limits *limits, int *width, int *height, char *message) {
    Decoder d;
    decoder_init(&d, message);
    if (setjmp(d.escape))
        if (!decoder_again(&d)) return false;
    decoder_open(&d, data, size, limits);
    *width = (int)d.jpeg.image_width;
    *height = (int)d.jpeg.image_height;
    decoder_close(&d);
    return true;
}

/* ---------------------------------------------------------------- rows */

/* One row of CMYK, stored inverted as Adobe does and as Pillow assumes of every JPEG, to RGB; Pillow's rounding. */
static void cmyk_to_rgb(uint8_t *out, const uint8_t *in, int n) {
    for (int i = 0; i < n; i++, in += 4, out += 3) {
        const int black = in[3];
        for (int c = 0; c < 3; c++) {
            const int product = (255 - in[c]) * black + 128;
            const int value = black - (((product >> 8) + product) >> 8);
            out[c] = (uint8_t)(value < 0 ? 0 : value);
        }
    }
}

/* Reads up to ROWS_PER_READ rows as RGB into `rows`; returns how many, never 0. `line`: room for as many in CMYK. */
static int read_rows(Decoder *d, uint8_t **rows, int most, uint8_t *line) {
    const bool cmyk = d->jpeg.out_color_space == JCS_CMYK;
    uint8_t *lines[ROWS_PER_READ];
    for (int i = 0; i < most && cmyk; i++) lines[i] = line + (size_t)i * d->jpeg.output_width * 4;
    const int got = (int)jpeg_read_scanlines(&d->jpeg, cmyk ? lines : rows, (JDIMENSION)most);
    if (got == 0) decoder_fail(d, "no more rows");
    for (int i = 0; i < got && cmyk; i++) cmyk_to_rgb(rows[i], lines[i], (int)d->jpeg.output_width);
    return got;
}

/* Room for the CMYK rows of read_rows; NULL when the image has none. */
static uint8_t *cmyk_lines(Decoder *d, Buffer *memory) {
    if (d->jpeg.out_color_space != JCS_CMYK) return NULL;
    if (!buffer_reserve(memory, (size_t)ROWS_PER_READ * d->jpeg.output_width * 4)) decoder_fail(d, "out of memory");
    return memory->data;
}

/* Whether the Huffman codes are decoded by huffman.h. */
static bool decoder_start(Decoder *d, int denominator) {
    d->jpeg.scale_num = 1;
    d->jpeg.scale_denom = (unsigned)denominator;
    d->jpeg.progress = &d->progress;
    jpeg_start_decompress(&d->jpeg);
    if (!d->reader.data) return huffman_attach(d);
    record_attach(d);
    return false;
}

/* Decodes a whole image at 1/denominator of its size to out, which is width x height pixels. */
static bool jpeg_decode(const uint8_t *data, size_t size, const Limits *limits, int denominator, uint8_t *out, int width,
                        int height, Buffer *cmyk, char *message) {
    Decoder d;
    decoder_init(&d, message);
    if (setjmp(d.escape))
        if (!decoder_again(&d)) return false;
    decoder_open(&d, data, size, limits);
    decoder_start(&d, denominator);
    if ((int)d.jpeg.output_width != width || (int)d.jpeg.output_height != height)
        decoder_fail(&d, "out has another size than the image");
    uint8_t *line = cmyk_lines(&d, cmyk);
    for (int y = 0; y < height;) {
        uint8_t *rows[ROWS_PER_READ];
        const int most = height - y < ROWS_PER_READ ? height - y : ROWS_PER_READ;
        for (int i = 0; i < most; i++) rows[i] = out + (size_t)(y + i) * width * 3;
        y += read_rows(&d, rows, most, line);
    }
    decoder_close(&d);
    return true;
}

/* ---------------------------------------------------------------- crop and resize */

/* One thread's scratch memory. */
typedef struct {
    Resizer resizer;
    Buffer ring, cmyk;
    Buffer record; /* as it was read from a cache */
} Scratch;

static void scratch_free(Scratch *s) {
    resizer_free(&s->resizer);
    buffer_free(&s->ring);
    buffer_free(&s->cmyk);
    buffer_free(&s->record);
}

static size_t scratch_size(const Scratch *s) {
    const Resizer *r = &s->resizer;
    return r->rows.memory.size + r->columns.memory.size + r->column_weights.size + r->mixed.size + r->source_rows.size +
           s->ring.size + s->cmyk.size + s->record.size;
}

/* The largest of 1, 2, 4, 8 that leaves the box at least as large as the result. */
static int choose_denominator(Box box, int width, int height) {
    int denominator = 8;
    while (denominator > 1 && (box.x1 - box.x0 < (double)denominator * width || box.y1 - box.y0 < (double)denominator * height))
        denominator /= 2;
    return denominator;
}

/* Decodes the rows that the resizer wants through a ring of as many as one output row mixes. */
static void resize_rows(Decoder *d, int denominator, Scratch *s) {
    Resizer *r = &s->resizer;
    const Filter *columns = &r->columns;
    /* One pixel more on each side: the upsampling of chroma looks at its neighbours. */
    JDIMENSION left = columns->low > 0 ? (JDIMENSION)columns->low - 1 : 0;
    JDIMENSION width = (JDIMENSION)columns->high + 1 - left;
    if (width > d->jpeg.output_width - left) width = d->jpeg.output_width - left;
    jpeg_crop_scanline(&d->jpeg, &left, &width);
    crop_mcus(d, denominator, left, width);

    const int ring_rows = r->rows.taps + ROWS_PER_READ, offset = (columns->low - (int)left) * 3;
    const size_t stride = ((size_t)d->jpeg.output_width * 3 + 63) / 64 * 64;
    if (!buffer_reserve(&s->ring, stride * (size_t)ring_rows)) decoder_fail(d, "out of memory");
    uint8_t *ring = s->ring.data, *line = cmyk_lines(d, &s->cmyk);

    int y = resizer_first(r);
    if (y > 0) jpeg_skip_scanlines(&d->jpeg, (JDIMENSION)y);
    while (!resizer_done(r)) {
        const int last = resizer_last(r);
        while (y < last) {
            uint8_t *rows[ROWS_PER_READ];
            const int most = r->rows.high - y < ROWS_PER_READ ? r->rows.high - y : ROWS_PER_READ;
            for (int i = 0; i < most; i++) rows[i] = ring + (size_t)((y + i) % ring_rows) * stride;
            y += read_rows(d, rows, most, line);
        }
        const uint8_t **sources = r->source_rows.data;
        for (int k = 0, from = resizer_first(r); from + k < last; k++)
            sources[k] = ring + (size_t)((from + k) % ring_rows) * stride + offset;
        resizer_write(r);
    }
}

/* Memory for the index of a file's rows. */
typedef struct {
    uint8_t *data; /* NULL: none is wanted */
    size_t size;
} IndexRoom;

/* Resizes the box of a JPEG to width x height pixels at target. */
static bool jpeg_crop_resize(const uint8_t *data, size_t size, const Limits *limits, const Cut *cut, int width, int height,
                             bool clamp, Target target, IndexRoom room, Scratch *s, char *message) {
    Box box;
    bool flip;
    Decoder d;
    decoder_init(&d, message);
    if (setjmp(d.escape))
        if (!decoder_again(&d)) return d.done;
    decoder_open(&d, data, size, limits);
    const char *reason = choose_box(cut, d.jpeg.image_width, d.jpeg.image_height, width, height, &box, &flip);
    if (reason) decoder_fail(&d, reason);
    /* Scaled regions of rare kinds (chroma 8 times smaller) have wrong pixels in libjpeg-turbo 2.1.5: full size then. */
    const bool rare = d.jpeg.max_h_samp_factor * d.jpeg.max_v_samp_factor > 4;
    const int denominator = rare ? 1 : choose_denominator(box, width, height);
    const bool own = decoder_start(&d, denominator);
    const bool indexes = own && room.data && index_size(&d) <= room.size && start_index(&d, room.data);
    const Box scaled = {box.x0 / denominator, box.y0 / denominator, box.x1 / denominator, box.y1 / denominator};
    if (!resizer_start(&s->resizer, scaled, (int)d.jpeg.output_width, (int)d.jpeg.output_height, width, height, clamp,
                       flip, target))
        decoder_fail(&d, "out of memory");
    resize_rows(&d, denominator, s);
    d.done = true; /* of the rows below the box no pixel is made */
    if (indexes) finish_index(&d);
    decoder_close(&d);
    return true;
}

#endif
