/* Where the coefficients of an image come from: what is called in the place of libjpeg's decode_mcu.
 *
 * All else remains libjpeg's: inverse DCT, upsampling and colours. So the pixels are the same to the bit at each scale, in
 * each crop, with each version of the library.
 */
#ifndef FASTLOAD_SCAN_H
#define FASTLOAD_SCAN_H

#include <stdatomic.h>

#include "rows.h"

/* The first fields of libjpeg's private struct, the same from version 6b to libjpeg-turbo 3.1. kernel.c compares decodes
 * through them with a plain one when the module is imported, and does without if they differ. */
struct jpeg_entropy_decoder {
    void (*start_pass)(j_decompress_ptr);
    boolean (*decode_mcu)(j_decompress_ptr, JBLOCKROW *);
};

/* After jpeg_start_decompress. */
static void read_mcus_by(Decoder *d, boolean (*decode_mcu)(j_decompress_ptr, JBLOCKROW *)) {
    d->row = d->column = d->first_column = 0;
    d->last_column = d->jpeg.MCUs_per_row - 1;
    d->jpeg.entropy->decode_mcu = decode_mcu;
}

static bool wants_column(const Decoder *d) { return d->column >= d->first_column && d->column <= d->last_column; }

static void next_mcu(Decoder *d) {
    if (++d->column < d->jpeg.MCUs_per_row) return;
    d->column = 0;
    d->row++;
}

/* After jpeg_crop_scanline, which chose these columns of pixels: MCUs beside them are passed over. */
static void crop_mcus(Decoder *d, int denominator, JDIMENSION left, JDIMENSION width) {
    const int blocks = d->jpeg.num_components == 1 ? 1 : d->jpeg.max_h_samp_factor; /* side by side in an MCU */
    const JDIMENSION pixels = (JDIMENSION)(DCTSIZE / denominator * blocks);
    d->first_column = left / pixels;
    d->last_column = (left + width - 1) / pixels;
}

/* ---------------------------------------------------------------- Huffman codes */

static atomic_ulong by_libjpeg; /* images whose Huffman codes were libjpeg's to decode */

#ifdef HAVE_HUFFMAN

/* Tables to skip by take longer to make than a small photo takes to read: they are for tables that images share. */
static bool pass_blocks(Scan *scan) {
    if (!scan->has_new_tables) return skip_blocks(scan);
    JBLOCK unwanted[MOST_BLOCKS];
    JBLOCKROW blocks[MOST_BLOCKS];
    for (int i = 0; i < scan->blocks; i++) blocks[i] = unwanted + i;
    memset(unwanted, 0, sizeof(JBLOCK) * (size_t)scan->blocks);
    return read_blocks(scan, blocks);
}

/* Before the first MCU of a row. */
static void note_row(Decoder *d) {
    uint8_t *entry = d->noted_rows + (size_t)ROW_SIZE * d->row;
    const uint64_t place = tell(&d->scan);
    if (place > UINT32_MAX) decoder_fail(d, "more than 512 MB");
    put32(entry, (uint32_t)place);
    for (int c = 0; c < INDEXED_COMPONENTS; c++) put16(entry + 4 + 2 * c, (uint32_t)d->scan.last_dc[c]);
}

/* Goes to the next MCU of libjpeg's, from the one of the scan. With an index, unwanted MCUs have not been passed. */
static bool catch_up(Decoder *d) {
    Scan *scan = &d->scan;
    const size_t columns = d->jpeg.MCUs_per_row, first = d->row * columns, wanted = first + d->column;
    if (scan->mcu == wanted) return true;
    if (scan->mcu < first) {
        const uint8_t *entry = d->rows + (size_t)ROW_SIZE * d->row;
        int16_t last_dc[MOST_COMPONENTS] = {0};
        for (int c = 0; c < INDEXED_COMPONENTS; c++) last_dc[c] = (int16_t)get16(entry + 4 + 2 * c);
        if (!seek(scan, get32(entry), first, last_dc)) return false;
    }
    while (scan->mcu < wanted)
        if (!pass_blocks(scan)) return false;
    return true;
}

/* In the place of libjpeg's Huffman decoder. `blocks`: zeros; NULL where the MCU is skipped. */
static boolean huffman_mcu(j_decompress_ptr jpeg, JBLOCKROW *blocks) {
    Decoder *d = jpeg->client_data;
    const bool wanted = blocks && wants_column(d);
    if (d->noted_rows && d->column == 0) note_row(d);
    if (!(wanted ? catch_up(d) && read_blocks(&d->scan, blocks) : d->rows || pass_blocks(&d->scan))) {
        d->odd = true;
        longjmp(d->escape, 1);
    }
    next_mcu(d);
    return TRUE;
}

/* After jpeg_start_decompress, which has read nothing of a file with one scan. False: libjpeg is to decode it. */
static bool open_scan(Decoder *d) {
    struct jpeg_decompress_struct *jpeg = &d->jpeg;
    const bool baseline = !jpeg->progressive_mode && !jpeg->arith_code && jpeg->data_precision == 8;
    const bool one_scan = jpeg->comps_in_scan == jpeg->num_components && jpeg->num_components <= MOST_COMPONENTS;
    const bool all_numbers = jpeg->Ss == 0 && jpeg->Se == 63 && jpeg->Ah == 0 && jpeg->Al == 0;
    if (d->libjpeg_only || !baseline || !one_scan || !all_numbers || jpeg->blocks_in_MCU > MOST_BLOCKS) return false;
    Scan *scan = &d->scan;
    scan->begin = jpeg->src->next_input_byte;
    scan->bits = (Bits){.next = scan->begin, .end = scan->begin + jpeg->src->bytes_in_buffer};
    find_stop(&scan->bits);
    if (!find_tables(scan, jpeg)) return false;
    scan->blocks = jpeg->blocks_in_MCU;
    for (int i = 0; i < MOST_BLOCKS; i++) scan->component[i] = (uint8_t)jpeg->MCU_membership[i];
    scan->interval = scan->until_restart = jpeg->restart_interval;
    if (d->row_count != jpeg->MCU_rows_in_scan || jpeg->num_components > INDEXED_COMPONENTS) d->rows = NULL; /* see rows.h */
    return true;
}

#endif

/* After jpeg_start_decompress: the coefficients are decoded here, if they can be. Nobody may call jpeg_finish_decompress
 * then: libjpeg does not learn how far the data was read. False: libjpeg decodes them. */
static bool huffman_attach(Decoder *d) {
#ifdef HAVE_HUFFMAN
    if (use_huffman && open_scan(d)) {
        read_mcus_by(d, huffman_mcu);
        return true;
    }
#endif
    by_libjpeg++;
    return false;
}

/* ---------------------------------------------------------------- making an index of rows */

static size_t index_size(const Decoder *d) { return ROWS_HEAD + (size_t)ROW_SIZE * d->jpeg.MCU_rows_in_scan; }

/* Lets the index be made at `to` while MCUs are read by huffman_mcu. False: this file has none, or one already. */
static bool start_index(Decoder *d, uint8_t *to) {
    if (d->indexed || d->jpeg.num_components > INDEXED_COMPONENTS) return false;
    d->noted_rows = to + ROWS_HEAD;
    return true;
}

/* Passes over what is left of the scan. Only then the index is one. */
static void finish_index(Decoder *d) {
    while (d->row < d->jpeg.MCU_rows_in_scan)
        if (!d->jpeg.entropy->decode_mcu(&d->jpeg, NULL)) decoder_fail(d, "premature end");
    uint8_t *head = d->noted_rows - ROWS_HEAD;
    memcpy(head, ROWS_MAGIC "\1\0", ROWS_HEAD - 2);
    put16(head + 6, d->jpeg.MCU_rows_in_scan);
}

#endif
