/* The record of cache mode "dct": a JPEG without its Huffman codes. Lossless.
 *
 * Three quarters of the time of a JPEG decode go into Huffman codes, which must be read one after the other, from the
 * first row on. A record keeps the same quantised coefficients in a form that SIMD instructions read (blocks.h), with
 * the offset of each row of MCUs. All else remains libjpeg's: see scan.h. (An own inverse DCT and upsampling were rejected:
 * they would have to follow every version, for perhaps a fifth of the time.)
 *
 * A record, little-endian:
 *      0   RECORD_MAGIC, version, EXIF orientation, colour space (J_COLOR_SPACE of jpeglib.h), number of components
 *      8   uint16 width, height
 *     12   4 x (horizontal, vertical) sampling factor, zeros behind the last component
 *     20   per component 64 x uint16: its quantisation table, in zigzag order
 *      .   per row of MCUs, and once more for the end: uint32 offset of the row from the record's first byte
 *      .   rows: per MCU uint16 its size, then the packed blocks
 *      .   SLACK zero bytes
 * Blocks are in the order of one interleaved scan.
 */
#ifndef FASTLOAD_DCT_H
#define FASTLOAD_DCT_H

#include "scan.h"

#define RECORD_MAGIC "\x89" "DCT"
#define RECORD_VERSION 1
#define RECORD_TABLES 20 /* offset of the quantisation tables */

static bool is_record(const uint8_t *data, size_t size) {
    return size >= sizeof RECORD_MAGIC && !memcmp(data, RECORD_MAGIC, sizeof RECORD_MAGIC - 1);
}

/* ---------------------------------------------------------------- header */

static uint8_t *put(uint8_t *to, const void *from, size_t size) {
    memcpy(to, from, size);
    return to + size;
}

static void record_damaged(Decoder *d) { decoder_fail(d, "a damaged record of cache mode 'dct'"); }

/* Makes of a record's head that of a JPEG with one scan, by which libjpeg sets itself up. The Huffman tables hold one code
 * each: libjpeg wants some, and reads nothing by them. */
static const uint8_t *record_header(Decoder *d, const uint8_t *data, size_t *size) {
    Reader *reader = &d->reader;
    const int components = *size < RECORD_TABLES ? 0 : data[7];
    const size_t head = RECORD_TABLES + (size_t)components * 128;
    if (components < 1 || components > MOST_COMPONENTS || *size < head + SLACK || data[4] != RECORD_VERSION)
        record_damaged(d);
    reader->data = data;
    reader->size = *size - SLACK;
    reader->offsets = data + head;
    uint8_t *to = put(reader->header, "\xff\xd8", 2);
    for (int c = 0; c < components; c++) {
        const uint8_t marker[] = {0xff, 0xdb, 0, 131, (uint8_t)(16 | c)}, *table = data + RECORD_TABLES + c * 128;
        to = put(to, marker, sizeof marker);
        for (int k = 0; k < 64; k++) *to++ = table[2 * k + 1], *to++ = table[2 * k];
    }
    const uint8_t frame[] = {0xff, 0xc1, 0, (uint8_t)(8 + 3 * components), 8, data[11], data[10], data[9], data[8], data[7]};
    to = put(to, frame, sizeof frame);
    for (int c = 0; c < components; c++) {
        const uint8_t *factors = data + 12 + 2 * c;
        const uint8_t component[] = {(uint8_t)(c + 1), (uint8_t)(factors[0] << 4 | (factors[1] & 15)), (uint8_t)c};
        to = put(to, component, sizeof component);
    }
    for (int kind = 0; kind < 2; kind++) {
        const uint8_t table[22] = {0xff, 0xc4, 0, 20, (uint8_t)(kind << 4), 1};
        to = put(to, table, sizeof table);
    }
    const uint8_t scan[] = {0xff, 0xda, 0, (uint8_t)(6 + 2 * components), (uint8_t)components};
    to = put(to, scan, sizeof scan);
    for (int c = 0; c < components; c++) *to++ = (uint8_t)(c + 1), *to++ = 0;
    to = put(to, "\0\x3f\0\xff\xd9", 5);
    *size = (size_t)(to - reader->header);
    return reader->header;
}

/* ---------------------------------------------------------------- coefficients */

/* Finds the first wanted MCU of the row, and checks that the row's MCUs end where the next row begins. */
static bool start_row(Decoder *d) {
    Reader *reader = &d->reader;
    const JDIMENSION columns = d->jpeg.MCUs_per_row;
    const uint8_t *offset = reader->offsets + 4 * (size_t)d->row;
    const size_t from = get32(offset), to = get32(offset + 4);
    if (from > to || to > reader->size || to - from < 2 * (size_t)columns) return false;
    reader->sizes = reader->data + from;
    size_t size = 2 * (size_t)columns;
    for (JDIMENSION i = 0; i < columns; i++) {
        if (i == d->first_column) reader->next = reader->sizes + size;
        size += get16(reader->sizes + 2 * (size_t)i);
    }
    return size == to - from;
}

/* In the place of libjpeg's Huffman decoder. `blocks`: of the next MCU; NULL where it is skipped. */
static boolean read_mcu(j_decompress_ptr jpeg, JBLOCKROW *blocks) {
    Decoder *d = jpeg->client_data;
    Reader *reader = &d->reader;
    if (blocks && wants_column(d)) {
        if (d->column == d->first_column && !start_row(d)) record_damaged(d);
        const uint8_t *next = reader->next, *end = next + get16(reader->sizes + 2 * (size_t)d->column);
        for (int i = 0; i < jpeg->blocks_in_MCU && next; i++) next = unpack_block(next, end, blocks[i][0]);
        if (next != end) record_damaged(d);
        reader->next = end;
    }
    next_mcu(d);
    return TRUE;
}

/* After jpeg_start_decompress: the coefficients come from the record. */
static void record_attach(Decoder *d) {
    Reader *reader = &d->reader;
    const size_t rows = d->jpeg.MCU_rows_in_scan, head = (size_t)(reader->offsets - reader->data) + 4 * (rows + 1);
    if (head > reader->size || get32(reader->offsets) != head || get32(reader->offsets + 4 * rows) != reader->size)
        record_damaged(d);
    read_mcus_by(d, read_mcu);
}

#endif
