/* Records of a cache's segments, read and verified without Python: fastload/cache/segment.py says what they look like.
 *
 * What is not exactly the record that the index promises is refused, and so are records too short for an image. The caller
 * then reads it by the cache's own code, which says what is wrong, counts it and forgets the entry.
 */
#ifndef FASTLOAD_SEGMENT_H
#define FASTLOAD_SEGMENT_H

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "checksum.h"
#include "resize.h"

#define PLACE_SIZE 60      /* bytes of a Place in the memory of `Places`: fastload/cache/segment.py */
#define RECORD_HEAD 64
#define RECORD_MOST ((uint64_t)1 << 30) /* bytes of a payload */

/* Where a record lies, and what its header must say. */
typedef struct {
    int fd;
    uint64_t offset, length;
    uint8_t head[RECORD_HEAD - 8]; /* without its sum */
} Place;

/* From little-endian: int32 file descriptor, 16 bytes segment id, 16 bytes key, uint64 length, checksum and offset. */
static Place place_from(const uint8_t *from) {
    static const uint8_t begin[8] = {'F', 'L', 'R', '1', 1, 0, 0, 0};
    Place place = {.fd = (int32_t)(sum_read(from) & 0xffffffff), .offset = sum_read(from + 52), .length = sum_read(from + 36)};
    memcpy(place.head, begin, sizeof begin);
    memcpy(place.head + sizeof begin, from + 4, sizeof place.head - sizeof begin);
    return place;
}

/* The payload in `memory`; NULL where the record is not as promised. */
static const uint8_t *read_payload(const Place *place, Buffer *memory) {
    if (place->length < SUM_LEAST || place->length > RECORD_MOST || place->offset > INT64_MAX - 2 * RECORD_MOST) return NULL;
    const size_t size = RECORD_HEAD + (size_t)place->length;
    if (!buffer_reserve(memory, size)) return NULL;
    if (pread(place->fd, memory->data, size, (off_t)place->offset) != (ssize_t)size) return NULL;
    const uint8_t *head = memory->data, *payload = head + RECORD_HEAD;
    if (memcmp(head, place->head, sizeof place->head) || sum_read(head + sizeof place->head) != sum_header(place->head)) return NULL;
    return sum_payload(payload, (size_t)place->length) == sum_read(head + 48) ? payload : NULL;
}

/* Lets the system read a record ahead, where its last byte is not in memory. The advice alone looks at every page. */
static void will_need(const Place *place) {
    const uint64_t size = RECORD_HEAD + place->length;
    if (place->length > RECORD_MOST || place->offset > INT64_MAX - 2 * RECORD_MOST) return;
#ifdef RWF_NOWAIT
    uint8_t last;
    const struct iovec one = {&last, 1};
    if (preadv2(place->fd, &one, 1, (off_t)(place->offset + size - 1), RWF_NOWAIT) == 1) return;
#endif
#ifdef POSIX_FADV_WILLNEED
    posix_fadvise(place->fd, (off_t)place->offset, (off_t)size, POSIX_FADV_WILLNEED);
#endif
}

/* ---------------------------------------------------------------- pixels */

typedef struct {
    const uint8_t *data; /* NULL: it is no kept image */
    int width, height;
    ptrdiff_t stride; /* bytes from row to row */
} Kept;

/* The image in a payload of cache mode "decoded": an array of pixels, or a tuple of one and an orientation, as
 * fastload/formats/sample.py writes them. */
static Kept kept_pixels(const uint8_t *payload, size_t size) {
    static const uint8_t pair[] = {'t', 2, 0, 0, 0}, array[] = {'a', 3, 3, '|', 'u', '1'};
    const Kept none = {NULL, 0, 0, 0};
    const size_t begin = memcmp(payload, pair, sizeof pair) ? 0 : sizeof pair, shape = begin + sizeof array;
    const size_t pixels = (shape + 24 + 63) / 64 * 64, behind = begin ? 9 : 0; /* the orientation: a tag and 8 bytes */
    if (size < SUM_LEAST || memcmp(payload + begin, array, sizeof array)) return none;
    const uint64_t height = sum_read(payload + shape), width = sum_read(payload + shape + 8);
    if (height < 1 || width < 1 || height > LONGEST || width > LONGEST || sum_read(payload + shape + 16) != 3) return none;
    if (pixels + height * width * 3 + behind != size || (behind && payload[size - behind] != 'i')) return none;
    return (Kept){payload + pixels, (int)width, (int)height, (ptrdiff_t)width * 3};
}

#endif
