/* A JPEG with an index of its rows, as caches keep it: a crop begins at its own first row.
 *
 * Huffman codes must be read one after the other. But where a row of MCUs begins, all that is known of what came before are
 * its bit position and the last DC coefficients, and these are 10 bytes. With them the rows above a crop are not read, and
 * neither are the MCUs beside it that come after the last wanted one.
 *
 * Little-endian:
 *      0   ROWS_MAGIC, version, 0, uint16 number of rows of MCUs
 *      8   per row: uint32 bits of the scan's data before it; 3 x int16: DC predictors of the components
 *      .   the JPEG
 *
 * An index that does not fit is not used, and no memory is read by it. One that fits and is wrong cannot be told from a right
 * one: so it stands in front of the JPEG, where no file of a user has one by chance, and under the checksum of the cache.
 */
#ifndef FASTLOAD_ROWS_H
#define FASTLOAD_ROWS_H

#include "decoder.h"

#define ROWS_MAGIC "\x89" "ROW"
#define ROWS_VERSION 1
#define ROWS_HEAD 8
#define ROW_SIZE 10
#define INDEXED_COMPONENTS 3

static bool has_rows(const uint8_t *data, size_t size) {
    return size >= ROWS_HEAD && !memcmp(data, ROWS_MAGIC, sizeof ROWS_MAGIC - 1);
}

/* Notes the index; returns where the JPEG begins. */
static const uint8_t *rows_header(Decoder *d, const uint8_t *data, size_t *size) {
    const unsigned count = get16(data + 6);
    const size_t head = ROWS_HEAD + (size_t)ROW_SIZE * count;
    if (data[4] != ROWS_VERSION || *size < head) decoder_fail(d, "a damaged index of the rows of a JPEG");
    d->rows = data + ROWS_HEAD;
    d->row_count = count;
    d->indexed = true;
    *size -= head;
    return data + head;
}

#endif
