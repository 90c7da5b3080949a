/* A JPEG to what caches keep in its place: a record without Huffman codes (dct.h), or the file with an index (rows.h). */
#ifndef FASTLOAD_WRITE_H
#define FASTLOAD_WRITE_H

#include "jpeg.h"

typedef struct {
    uint8_t *data;
    size_t size, room;
} Record;

/* How a picture is cut into MCUs when all of its components are in one scan. Of a single component each block is one. */
typedef struct {
    JDIMENSION rows, columns;
    int blocks; /* of an MCU */
    JDIMENSION height[MOST_COMPONENTS], width[MOST_COMPONENTS]; /* of an MCU in blocks, by component */
} Layout;

/* Makes room for `size` more bytes; returns where they begin. */
static uint8_t *record_reserve(Decoder *d, Record *record, size_t size) {
    if (record->room - record->size < size) {
        const size_t room = record->room * 2 > record->size + size ? record->room * 2 : record->size + size;
        uint8_t *data = realloc(record->data, room);
        if (!data) decoder_fail(d, "out of memory");
        record->data = data;
        record->room = room;
    }
    return record->data + record->size;
}

static Layout find_layout(Decoder *d) {
    const struct jpeg_decompress_struct *jpeg = &d->jpeg;
    if (jpeg->num_components > MOST_COMPONENTS) decoder_fail(d, "more than 4 components");
    const bool single = jpeg->num_components == 1;
    const JDIMENSION across = (JDIMENSION)(DCTSIZE * jpeg->max_h_samp_factor), down = (JDIMENSION)(DCTSIZE * jpeg->max_v_samp_factor);
    Layout layout = {(jpeg->image_height + down - 1) / down, (jpeg->image_width + across - 1) / across, 0, {0}, {0}};
    for (int c = 0; c < jpeg->num_components; c++) {
        const jpeg_component_info *component = jpeg->comp_info + c;
        layout.height[c] = single ? 1 : (JDIMENSION)component->v_samp_factor;
        layout.width[c] = single ? 1 : (JDIMENSION)component->h_samp_factor;
        layout.blocks += (int)(layout.height[c] * layout.width[c]);
    }
    if (layout.blocks > MOST_BLOCKS) decoder_fail(d, "more than 10 blocks an MCU");
    if (single) layout.rows = jpeg->comp_info->height_in_blocks, layout.columns = jpeg->comp_info->width_in_blocks;
    return layout;
}

static void write_head(Decoder *d, Record *record, int orientation) {
    const struct jpeg_decompress_struct *jpeg = &d->jpeg;
    const size_t size = RECORD_TABLES + (size_t)jpeg->num_components * 128;
    uint8_t *to = record_reserve(d, record, size);
    memset(to, 0, size);
    memcpy(to, RECORD_MAGIC, 4);
    to[4] = RECORD_VERSION;
    to[5] = (uint8_t)orientation;
    to[6] = (uint8_t)jpeg->jpeg_color_space;
    to[7] = (uint8_t)jpeg->num_components;
    put16(to + 8, jpeg->image_width);
    put16(to + 10, jpeg->image_height);
    for (int c = 0; c < jpeg->num_components; c++) {
        const jpeg_component_info *component = jpeg->comp_info + c;
        if (!component->quant_table) decoder_fail(d, "a component without a scan");
        to[12 + 2 * c] = (uint8_t)component->h_samp_factor;
        to[13 + 2 * c] = (uint8_t)component->v_samp_factor;
        for (int k = 0; k < 64; k++)
            put16(to + RECORD_TABLES + 128 * c + 2 * k, component->quant_table->quantval[ZIGZAG[k]]);
    }
    record->size += size;
}

/* ---------------------------------------------------------------- coefficients */

/* Points `blocks` at the coefficients of an MCU. Those of padding, which no pixel shows, may be NULL. */
typedef void FindBlocks(Decoder *d, const Layout *layout, void *source, JDIMENSION row, JDIMENSION column, JBLOCKROW *blocks);

/* Of a file with one scan: the next MCU, by libjpeg's Huffman decoder. */
static void next_blocks(Decoder *d, const Layout *layout, void *source, JDIMENSION row, JDIMENSION column, JBLOCKROW *blocks) {
    JBLOCK *buffer = source;
    (void)row, (void)column;
    memset(buffer, 0, sizeof(JBLOCK) * (size_t)layout->blocks);
    for (int i = 0; i < layout->blocks; i++) blocks[i] = buffer + i;
    if (!d->jpeg.entropy->decode_mcu(&d->jpeg, blocks)) decoder_fail(d, "premature end");
}

/* Of a file with several scans, from the arrays that hold all of them. */
static void stored_blocks(Decoder *d, const Layout *layout, void *source, JDIMENSION row, JDIMENSION column, JBLOCKROW *blocks) {
    struct jpeg_decompress_struct *jpeg = &d->jpeg;
    jvirt_barray_ptr *arrays = source;
    for (int c = 0; c < jpeg->num_components; c++) {
        const jpeg_component_info *component = jpeg->comp_info + c;
        const JDIMENSION height = layout->height[c], width = layout->width[c];
        JBLOCKARRAY rows = jpeg->mem->access_virt_barray((j_common_ptr)jpeg, arrays[c], row * height, height, FALSE);
        for (JDIMENSION i = 0; i < height * width; i++) {
            const JDIMENSION x = column * width + i % width, y = row * height + i / width;
            *blocks++ = x < component->width_in_blocks && y < component->height_in_blocks ? rows[i / width] + x : NULL;
        }
    }
}

static void write_row(Decoder *d, Record *record, const Layout *layout, FindBlocks *find, void *source, JDIMENSION row) {
    const size_t columns = layout->columns;
    uint8_t *sizes = record_reserve(d, record, columns * (2 + (size_t)layout->blocks * MOST_BYTES) + SLACK), *to = sizes + 2 * columns;
    for (JDIMENSION column = 0; column < layout->columns; column++) {
        static const JBLOCK padding;
        JBLOCKROW blocks[MOST_BLOCKS];
        const uint8_t *from = to;
        find(d, layout, source, row, column, blocks);
        for (int i = 0; i < layout->blocks; i++) {
            const int size = pack_block(blocks[i] ? *blocks[i] : padding, to);
            if (!size) decoder_fail(d, "a coefficient of more bits than an encoder writes");
            to += size;
        }
        put16(sizes + 2 * (size_t)column, (uint32_t)(to - from));
    }
    record->size = (size_t)(to - record->data);
}

/* ---------------------------------------------------------------- record */

/* Whether this is a frame of DCT coefficients: libjpeg-turbo 3 also reads lossless files, which have none. */
static bool has_coefficients(const uint8_t *data, size_t size) {
    for (size_t at = 2; at + 4 <= size && data[at] == 0xff;) {
        const uint8_t marker = data[at + 1];
        if (marker <= 0x01 || (marker >= 0xd0 && marker <= 0xd7)) return false; /* without a length; rare in a header */
        const bool table = marker == 0xc4 || marker == 0xc8 || marker == 0xcc;
        if (marker >= 0xc0 && marker <= 0xcf && !table) return marker <= 0xc2 || marker == 0xc9 || marker == 0xca;
        at += marker == 0xff ? 1 : 2 + ((size_t)data[at + 2] << 8 | data[at + 3]);
    }
    return false;
}

/* Refuses what libjpeg decodes with more than its coefficients: of a progressive file that ends before its last bits it
 * smooths the blocks. */
static void check_scans(Decoder *d) {
    for (int c = 0; d->jpeg.progressive_mode && c < d->jpeg.num_components; c++)
        for (int k = 0; k < 64; k++)
            if (d->jpeg.coef_bits[c][k] != 0) decoder_fail(d, "a progressive file without its last scans");
}

/* The record of a whole, undamaged JPEG. The caller frees record->data, also after a failure. */
static bool jpeg_to_record(const uint8_t *data, size_t size, uint64_t max_pixels, int orientation, Record *record,
                           char *message) {
    const Limits limits = {max_pixels, true};
    Decoder d;
    decoder_init(&d, message);
    if (setjmp(d.escape))
        if (!decoder_again(&d)) return false;
    record->size = 0;
    if (is_record(data, size)) decoder_fail(&d, "this is a record already");
    decoder_open(&d, data, size, &limits);
    if (!has_coefficients(data, size) || d.jpeg.data_precision != 8) decoder_fail(&d, "not a DCT of 8 bits");
    d.jpeg.progress = &d.progress;
    JBLOCK buffer[MOST_BLOCKS];
    void *source = buffer;
    const bool one_scan = !jpeg_has_multiple_scans(&d.jpeg);
    if (one_scan) {
        jpeg_start_decompress(&d.jpeg);
        huffman_attach(&d);
    } else {
        source = jpeg_read_coefficients(&d.jpeg);
        by_libjpeg++;
        check_scans(&d);
    }
    const Layout layout = find_layout(&d);
    record_reserve(&d, record, size + size / 4); /* as large as most records */
    write_head(&d, record, orientation);
    const size_t offsets = record->size, offsets_size = 4 * ((size_t)layout.rows + 1);
    record_reserve(&d, record, offsets_size);
    record->size += offsets_size;
    for (JDIMENSION row = 0; row <= layout.rows; row++) {
        if (record->size > UINT32_MAX) decoder_fail(&d, "a record of more than 4 GB");
        put32(record->data + offsets + 4 * (size_t)row, (uint32_t)record->size);
        if (row < layout.rows) write_row(&d, record, &layout, one_scan ? next_blocks : stored_blocks, source, row);
    }
    memset(record_reserve(&d, record, SLACK), 0, SLACK);
    record->size += SLACK;
    decoder_close(&d);
    return true;
}

/* ---------------------------------------------------------------- index of rows */

/* The index of an undamaged JPEG, which stands in front of it. The caller frees record->data, also after a failure. */
static bool jpeg_to_rows(const uint8_t *data, size_t size, uint64_t max_pixels, Record *record, char *message) {
    const Limits limits = {max_pixels, true};
    Decoder d;
    decoder_init(&d, message);
    if (setjmp(d.escape)) {
        decoder_close(&d);
        if (d.odd) snprintf(message, MESSAGE_SIZE, "an odd file");
        return false;
    }
    decoder_open(&d, data, size, &limits);
    if (d.rows || d.reader.data) decoder_fail(&d, "this is a record already");
    if (jpeg_has_multiple_scans(&d.jpeg) || !decoder_start(&d, 8)) decoder_fail(&d, "not one scan of common Huffman codes");
    uint8_t *to = record_reserve(&d, record, index_size(&d));
    if (!start_index(&d, to)) decoder_fail(&d, "more than 3 components");
    finish_index(&d);
    record->size = index_size(&d);
    decoder_close(&d);
    return true;
}

/* ---------------------------------------------------------------- self-test */

/* A JPEG of 24 x 16 pixels. */
static const uint8_t SAMPLE[] = {
    0xff, 0xd8, 0xff, 0xdb, 0x00, 0x43, 0x00, 0x20, 0x16, 0x18, 0x1c, 0x18, 0x14, 0x20, 0x1c, 0x1a, 0x1c, 0x24, 0x22, 0x20,
    0x26, 0x30, 0x50, 0x34, 0x30, 0x2c, 0x2c, 0x30, 0x62, 0x46, 0x4a, 0x3a, 0x50, 0x74, 0x66, 0x7a, 0x78, 0x72, 0x66, 0x70,
    0x6e, 0x80, 0x90, 0xb8, 0x9c, 0x80, 0x88, 0xae, 0x8a, 0x6e, 0x70, 0xa0, 0xda, 0xa2, 0xae, 0xbe, 0xc4, 0xce, 0xd0, 0xce,
    0x7c, 0x9a, 0xe2, 0xf2, 0xe0, 0xc8, 0xf0, 0xb8, 0xca, 0xce, 0xc6, 0xff, 0xdb, 0x00, 0x43, 0x01, 0x22, 0x24, 0x24, 0x30,
    0x2a, 0x30, 0x5e, 0x34, 0x34, 0x5e, 0xc6, 0x84, 0x70, 0x84, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6,
    0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6,
    0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6, 0xc6,
    0xff, 0xc0, 0x00, 0x11, 0x08, 0x00, 0x10, 0x00, 0x18, 0x03, 0x01, 0x22, 0x00, 0x02, 0x11, 0x01, 0x03, 0x11, 0x01, 0xff,
    0xc4, 0x00, 0x17, 0x00, 0x00, 0x03, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x03, 0x04, 0x02, 0xff, 0xc4, 0x00, 0x16, 0x10, 0x01, 0x01, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01, 0x02, 0xff, 0xc4, 0x00, 0x16, 0x01, 0x01, 0x01, 0x01, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, 0x04, 0x05, 0xff, 0xc4, 0x00, 0x19, 0x11, 0x00, 0x03, 0x00,
    0x03, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01, 0x04, 0x02, 0x03, 0x22, 0xff,
    0xda, 0x00, 0x0c, 0x03, 0x01, 0x00, 0x02, 0x11, 0x03, 0x11, 0x00, 0x3f, 0x00, 0x66, 0xa1, 0x5a, 0x8a, 0x75, 0x09, 0xd4,
    0x1e, 0x33, 0x92, 0x4c, 0xc9, 0xb5, 0x03, 0x7a, 0x80, 0xaa, 0x73, 0x7b, 0x5b, 0xe4, 0xff, 0xd9,};

enum { SAMPLE_WIDTH = 24, SAMPLE_HEIGHT = 16 };

static bool sample_decodes(const uint8_t *data, size_t size, uint8_t *pixels) {
    const Limits limits = {SAMPLE_WIDTH * SAMPLE_HEIGHT, true};
    char message[MESSAGE_SIZE];
    Buffer cmyk = {NULL, 0};
    return jpeg_decode(data, size, &limits, 1, pixels, SAMPLE_WIDTH, SAMPLE_HEIGHT, &cmyk, message);
}

/* Whether this libjpeg decodes by a record as it decodes the JPEG: libjpeg's private struct may have another form. */
static bool records_work(void) {
    uint8_t pixels[2][SAMPLE_WIDTH * SAMPLE_HEIGHT * 3];
    char message[MESSAGE_SIZE];
    Record record = {NULL, 0, 0};
    const bool same = sample_decodes(SAMPLE, sizeof SAMPLE, pixels[0]) &&
                      jpeg_to_record(SAMPLE, sizeof SAMPLE, SAMPLE_WIDTH * SAMPLE_HEIGHT, 1, &record, message) &&
                      sample_decodes(record.data, record.size, pixels[1]) && !memcmp(pixels[0], pixels[1], sizeof pixels[0]);
    free(record.data);
    return same;
}

/* Whether our Huffman decoder decodes the sample, and as libjpeg's does; then it is used. */
static bool huffman_works(void) {
    uint8_t pixels[2][SAMPLE_WIDTH * SAMPLE_HEIGHT * 3];
    const size_t small = small_scan;
    use_huffman = false;
    bool same = sample_decodes(SAMPLE, sizeof SAMPLE, pixels[0]);
    use_huffman = true;
    small_scan = 0;
    const unsigned long before = by_libjpeg;
    same = sample_decodes(SAMPLE, sizeof SAMPLE, pixels[1]) && same && by_libjpeg == before &&
           !memcmp(pixels[0], pixels[1], sizeof pixels[0]);
    small_scan = small;
    by_libjpeg = 0;
    return same;
}

#endif
