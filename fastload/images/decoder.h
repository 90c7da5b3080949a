/* What every use of libjpeg-turbo begins and ends with: the decompressor, and errors that jump out of it. */
#ifndef FASTLOAD_DECODER_H
#define FASTLOAD_DECODER_H

#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

#include <jerror.h>

#include "huffman.h"

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 1005000
#error "libjpeg-turbo 1.5 or newer is needed: jpeg_crop_scanline, jpeg_skip_scanlines"
#endif

#define MESSAGE_SIZE 256
#define MOST_SCANS 500    /* of a progressive file; each costs a pass over all pixels, and a few bytes make one */
#define HEADER_SIZE 700   /* 2 + 4 x 133 + 22 + 2 x 22 + 13 + 5 + 2, rounded up */

/* Where the coefficients come from when the data is a record instead of a JPEG: see dct.h. */
typedef struct {
    const uint8_t *data; /* NULL: it is a JPEG */
    size_t size;         /* without the slack behind it */
    const uint8_t *offsets;               /* of the rows of MCUs */
    const uint8_t *sizes, *next;          /* of the row's MCUs; the next of them */
    uint8_t header[HEADER_SIZE]; /* of the JPEG that libjpeg is told of */
} Reader;

typedef struct {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    struct jpeg_progress_mgr progress;
    jmp_buf escape;
    bool warnings_are_errors;
    char *message; /* MESSAGE_SIZE bytes of the caller's */
    Reader reader;
    Scan scan;
    const uint8_t *rows;                  /* the index of the rows of MCUs, or NULL: see rows.h */
    unsigned row_count;
    bool indexed;                         /* the data began with an index, whether it fits or not */
    uint8_t *noted_rows;                  /* where such an index is made while MCUs are read, or NULL */
    bool done;                            /* all pixels are made: what is odd from here on harms none */
    bool odd, libjpeg_only;               /* its Huffman codes are libjpeg's to decode; so they are now */
    JDIMENSION row, column;               /* of the next MCU, where libjpeg does not read them */
    JDIMENSION first_column, last_column; /* MCUs outside are not wanted */
} Decoder;

/* What the caller allows. */
typedef struct {
    uint64_t max_pixels;
    bool strict;
} Limits;

/* ---------------------------------------------------------------- errors */

static void decoder_fail(Decoder *d, const char *message) {
    snprintf(d->message, MESSAGE_SIZE, "%s", message);
    longjmp(d->escape, 1);
}

static void on_error(j_common_ptr jpeg) {
    Decoder *d = jpeg->client_data;
    char text[JMSG_LENGTH_MAX];
    jpeg->err->format_message(jpeg, text);
    decoder_fail(d, text);
}

static void on_message(j_common_ptr jpeg, int level) {
    Decoder *d = jpeg->client_data;
    if (level >= 0) return;
    jpeg->err->num_warnings++;
    /* An odd header, and padding between the last pixel and the end (some cameras write it), harm no pixel. */
    const int code = jpeg->err->msg_code;
    const bool padding = code == JWRN_EXTRANEOUS_DATA && jpeg->err->msg_parm.i[1] == JPEG_EOI;
    if (d->warnings_are_errors && !padding && code != JWRN_ADOBE_XFORM && code != JWRN_JFIF_MAJOR) on_error(jpeg);
}

static void on_output(j_common_ptr jpeg) { (void)jpeg; }

static void on_progress(j_common_ptr jpeg) {
    if (((j_decompress_ptr)jpeg)->input_scan_number > MOST_SCANS) decoder_fail(jpeg->client_data, "too many scans");
}

/* ---------------------------------------------------------------- life */

/* A decoder whose calls into libjpeg may jump: 
 * if (setjmp(d.escape))
 *     if (!decoder_again(&d)) return false; */
static void decoder_init(Decoder *d, char *message) {
    memset(d, 0, sizeof *d);
    d->message = message;
    d->jpeg.err = jpeg_std_error(&d->errors);
    d->errors.error_exit = on_error;
    d->errors.emit_message = on_message;
    d->errors.output_message = on_output;
    d->progress.progress_monitor = on_progress;
    d->jpeg.client_data = d;
}

static void decoder_close(Decoder *d) { jpeg_destroy_decompress(&d->jpeg); }

/* After a jump. False: it was an error. True: the file is odd, and now decoded again from its first byte. */
static bool decoder_again(Decoder *d) {
    decoder_close(d);
    if (!d->odd || d->libjpeg_only || d->done) return false;
    d->libjpeg_only = true;
    d->warnings_are_errors = false; /* of a header they are none: see decoder_open */
    return true;
}

#endif
