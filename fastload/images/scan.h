/* Where the coefficients of an image come from: what is called in the place of libjpeg's decode_mcu.
 *
 * All else remains libjpeg's: inverse DCT, upsampling and colours. So the pixels are the same to the bit at each scale, in
 * each crop, with each version of the library.
 */
#ifndef FASTLOAD_SCAN_H
#define FASTLOAD_SCAN_H

#include <stdatomic.h>

#include "decoder.h"

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

/* In the place of libjpeg's Huffman decoder. `blocks`: zeros; NULL where the MCU is skipped. */
static boolean huffman_mcu(j_decompress_ptr jpeg, JBLOCKROW *blocks) {
    Decoder *d = jpeg->client_data;
    if (!(blocks && wants_column(d) ? read_blocks(&d->scan, blocks) : pass_blocks(&d->scan))) {
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
    scan->bits = (Bits){.next = jpeg->src->next_input_byte, .end = jpeg->src->next_input_byte + jpeg->src->bytes_in_buffer};
    find_stop(&scan->bits);
    for (int c = 0; c < jpeg->comps_in_scan; c++)
        if (!find_tables(scan, c, jpeg)) return false;
    scan->blocks = jpeg->blocks_in_MCU;
    for (int i = 0; i < MOST_BLOCKS; i++) scan->component[i] = (uint8_t)jpeg->MCU_membership[i];
    scan->interval = scan->until_restart = jpeg->restart_interval;
    return true;
}

#endif

/* After jpeg_start_decompress: the coefficients are decoded here, if they can be. Nobody may call jpeg_finish_decompress
 * then: libjpeg does not learn how far the data was read. */
static void huffman_attach(Decoder *d) {
#ifdef HAVE_HUFFMAN
    if (use_huffman && open_scan(d)) {
        read_mcus_by(d, huffman_mcu);
        return;
    }
#endif
    by_libjpeg++;
}

#endif
