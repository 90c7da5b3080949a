/* Antialiased bilinear resize of RGB rows, one output row at a time.
 *
 * The filter is Pillow's: a triangle as wide as the scale (never narrower than two pixels), its weights normalised per
 * output pixel. Rows are mixed first, columns second; Pillow does it the other way round. This way the expensive
 * pass, along the row, runs once per output row rather than once per source row, and the caller that supplies
 * the rows needs to keep only as many as one output row mixes.
 *
 * Weights are integers that sum to a power of two exactly, and the scalar, AVX2 and NEON forms compute the same
 * integers: a resize has the same result on every machine. AVX-512 was tried, and rejected: 16 pixels at a time with
 * one pick of bytes made a resize of pixels 8 % faster and a crop of a JPEG not at all, since the picks are made per image.
 */
#ifndef FASTLOAD_RESIZE_H
#define FASTLOAD_RESIZE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "simd.h"

#define COLUMN_BITS 14 /* weights along a row are int16 */
#define MANY_TAPS 128  /* beyond it, 16-bit sums of rows lose too much */
#define BLOCK 8        /* output pixels per step of the AVX2 form */
#define LONGEST (1 << 28) /* side of an image or a result: more than any has pixels. Offsets along a row are ints */

/* ---------------------------------------------------------------- memory */

typedef struct {
    void *data;
    size_t size;
} Buffer;

/* Makes room for `size` bytes; what was there is lost. New memory is zeroed: vectors may read the slack behind a row. */
static bool buffer_reserve(Buffer *buffer, size_t size) {
    if (size <= buffer->size) return true;
    free(buffer->data);
    buffer->data = calloc(1, size);
    buffer->size = buffer->data ? size : 0;
    return buffer->data != NULL;
}

static void buffer_free(Buffer *buffer) {
    free(buffer->data);
    buffer->data = NULL;
    buffer->size = 0;
}

/* ---------------------------------------------------------------- filter */

/* Which source positions make up each output position along one axis, and how much of each. */
typedef struct {
    int outputs;
    int taps;       /* the most that any output has */
    int low, high;  /* source positions that are used: [low, high) */
    int *first;     /* [outputs rounded up to BLOCK] first position of each, relative to low */
    int *count;     /* [outputs] */
    uint32_t *weight; /* [outputs][taps], sum 1 << bits, zeros behind count */
    Buffer memory;
} Filter;

/* The box [from, to) of an axis becomes `outputs` positions; only positions in [low, high) count. */
static bool filter_build(Filter *f, double from, double to, int outputs, int low, int high, int bits, bool flip) {
    const double scale = (to - from) / outputs, support = scale > 1 ? scale : 1;
    const int padded = (outputs + BLOCK - 1) / BLOCK * BLOCK;
    const double most = ceil(2 * support) + 1;
    f->taps = most < high - low ? (int)most : high - low;
    f->outputs = outputs;
    if (!buffer_reserve(&f->memory, sizeof(int) * ((size_t)padded * 2 + (size_t)outputs * f->taps))) return false;
    f->first = f->memory.data;
    f->count = f->first + padded;
    f->weight = (uint32_t *)(f->count + padded);
    f->low = high;
    f->high = low;
    for (int i = 0; i < outputs; i++) {
        const int at = flip ? outputs - 1 - i : i;
        const double centre = from + (i + 0.5) * scale;
        double start = floor(centre - support + 0.5), stop = floor(centre + support + 0.5);
        if (start < low) start = low;
        if (start > high - 1) start = high - 1;
        if (stop > high) stop = high;
        if (stop < start + 1) stop = start + 1;
        int begin = (int)start, count = (int)stop - begin;
        if (count > f->taps) count = f->taps;
        double sum = 0, inverse = 1 / support;
        for (int k = 0; k < count; k++) {
            const double w = 1 - fabs((begin + k + 0.5 - centre) * inverse);
            sum += w > 0 ? w : 0;
        }
        /* The running total is what is rounded, so that the integers add up to exactly one. */
        uint32_t *weight = f->weight + (size_t)at * f->taps, before = 0;
        const double unit = sum > 0 ? (double)(1 << bits) / sum : 0;
        double total = 0;
        for (int k = 0; k < count; k++) {
            const double w = 1 - fabs((begin + k + 0.5 - centre) * inverse);
            total += w > 0 ? w : 0;
            const uint32_t now = k == count - 1 ? 1u << bits : (uint32_t)(total * unit + 0.5);
            weight[k] = now - before;
            before = now;
        }
        memset(weight + count, 0, sizeof(*weight) * (size_t)(f->taps - count));
        f->first[at] = begin;
        f->count[at] = count;
        if (begin < f->low) f->low = begin;
        if (begin + count > f->high) f->high = begin + count;
    }
    for (int i = 0; i < outputs; i++) f->first[i] -= f->low;
    for (int i = outputs; i < padded; i++) f->first[i] = 0;
    return true;
}

/* ---------------------------------------------------------------- rows: vertical mix */

/* out[i] = sum of weight[k] * rows[k][i]; `n` bytes; weights sum to 1 << 16. Products keep 8 bits of fraction. */
static void mix_rows(uint8_t *out, const uint8_t *const *rows, const uint32_t *weight, int count, int n) {
    enum { STEP = 64 };
    for (int i = 0; i < n; i += STEP) {
        const int m = n - i < STEP ? n - i : STEP;
        if (count > MANY_TAPS) {
            for (int j = i; j < i + m; j++) {
                uint32_t sum = 1 << 15;
                for (int k = 0; k < count; k++) sum += weight[k] * rows[k][j];
                out[j] = (uint8_t)(sum >> 16);
            }
            continue;
        }
        uint16_t sum[STEP];
        for (int j = 0; j < m; j++) sum[j] = (uint16_t)(128 + count / 2); /* each product is cut by half a unit */
        for (int k = 0; k < count; k++) {
            const uint32_t w = weight[k] > 65535 ? 65535 : weight[k];
            for (int j = 0; j < m; j++) sum[j] = (uint16_t)(sum[j] + (((uint32_t)rows[k][i + j] << 8) * w >> 16));
        }
        for (int j = 0; j < m; j++) out[i + j] = (uint8_t)(sum[j] >> 8);
    }
}

#ifdef HAVE_AVX2
__attribute__((target("avx2"))) static void mix_rows_avx2(uint8_t *out, const uint8_t *const *rows,
                                                           const uint32_t *weight, int count, int n) {
    enum { STEP = 64 };
    if (n < STEP || count > MANY_TAPS) {
        mix_rows(out, rows, weight, count, n);
        return;
    }
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi16((short)(128 + count / 2));
    __m256i w[MANY_TAPS];
    for (int k = 0; k < count; k++) w[k] = _mm256_set1_epi16((short)(weight[k] > 65535 ? 65535 : weight[k]));
    for (int i = 0;; i += STEP) {
        if (i + STEP > n) i = n - STEP; /* the last step overlaps the one before: no byte behind a row is touched */
        __m256i sum[4] = {half, half, half, half};
        for (int k = 0; k < count; k++) {
            const __m256i a = _mm256_loadu_si256((const __m256i *)(rows[k] + i));
            const __m256i b = _mm256_loadu_si256((const __m256i *)(rows[k] + i + 32));
            sum[0] = _mm256_add_epi16(sum[0], _mm256_mulhi_epu16(_mm256_unpacklo_epi8(zero, a), w[k]));
            sum[1] = _mm256_add_epi16(sum[1], _mm256_mulhi_epu16(_mm256_unpackhi_epi8(zero, a), w[k]));
            sum[2] = _mm256_add_epi16(sum[2], _mm256_mulhi_epu16(_mm256_unpacklo_epi8(zero, b), w[k]));
            sum[3] = _mm256_add_epi16(sum[3], _mm256_mulhi_epu16(_mm256_unpackhi_epi8(zero, b), w[k]));
        }
        for (int j = 0; j < 4; j++) sum[j] = _mm256_srli_epi16(sum[j], 8);
        _mm256_storeu_si256((__m256i *)(out + i), _mm256_packus_epi16(sum[0], sum[1]));
        _mm256_storeu_si256((__m256i *)(out + i + 32), _mm256_packus_epi16(sum[2], sum[3]));
        if (i + STEP == n) return;
    }
}
#endif

/* ---------------------------------------------------------------- columns: horizontal mix */

typedef struct {
    uint8_t *base;      /* first byte of the image */
    ptrdiff_t row;      /* bytes from row to row */
    ptrdiff_t channel;  /* bytes from channel to channel: 1 when channels are last */
} Target;

/* One output row from one mixed row of RGB pixels. */
static void mix_columns(const Target *target, int y, const uint8_t *pixels, const Filter *f) {
    uint8_t *out = target->base + y * target->row;
    const ptrdiff_t step = target->channel == 1 ? 3 : 1, channel = target->channel;
    for (int x = 0; x < f->outputs; x++) {
        const uint8_t *p = pixels + (size_t)f->first[x] * 3;
        const uint32_t *weight = f->weight + (size_t)x * f->taps;
#ifdef __aarch64__
        int32x4_t sum = vdupq_n_s32(1 << (COLUMN_BITS - 1));
        for (int k = 0; k < f->count[x]; k++, p += 3) {
            uint32_t four; /* a pixel and one byte of slack */
            memcpy(&four, p, 4);
            const uint16x8_t wide = vmovl_u8(vcreate_u8(four));
            sum = vmlal_n_s16(sum, vreinterpret_s16_u16(vget_low_u16(wide)), (int16_t)weight[k]);
        }
        const uint16x4_t mixed = vmovn_u32(vreinterpretq_u32_s32(vshrq_n_s32(sum, COLUMN_BITS)));
        out[x * step] = (uint8_t)vget_lane_u16(mixed, 0);
        out[x * step + channel] = (uint8_t)vget_lane_u16(mixed, 1);
        out[x * step + 2 * channel] = (uint8_t)vget_lane_u16(mixed, 2);
#else
        uint32_t r = 1 << (COLUMN_BITS - 1), g = r, b = r;
        for (int k = 0; k < f->count[x]; k++, p += 3) {
            r += weight[k] * p[0];
            g += weight[k] * p[1];
            b += weight[k] * p[2];
        }
        out[x * step] = (uint8_t)(r >> COLUMN_BITS);
        out[x * step + channel] = (uint8_t)(g >> COLUMN_BITS);
        out[x * step + 2 * channel] = (uint8_t)(b >> COLUMN_BITS);
#endif
    }
}

#ifdef HAVE_AVX2
/* Taps that one 16-byte load serves. */
#define GROUP 4

/* Weights in the order in which mix_columns_avx2 reads them. Of a block's pixels 0..7, one vector holds i and i + 4,
 * which is the order that the packing instructions restore. */
static bool weights_avx2(const Filter *f, Buffer *memory) {
    const int groups = (f->taps + GROUP - 1) / GROUP, blocks = (f->outputs + BLOCK - 1) / BLOCK;
    if (!buffer_reserve(memory, (size_t)blocks * groups * 256)) return false;
    int16_t *to = memory->data;
    for (int block = 0; block < blocks; block++)
        for (int group = 0; group < groups; group++)
            for (int i = 0; i < 4; i++)
                for (int pair = 0; pair < GROUP; pair += 2)
                    for (int half = 0; half < 2; half++, to += 8) {
                        const int x = block * BLOCK + i + 4 * half, k = group * GROUP + pair;
                        const uint32_t *weight = f->weight + (size_t)x * f->taps;
                        const int16_t even = x < f->outputs && k < f->taps ? (int16_t)weight[k] : 0;
                        const int16_t odd = x < f->outputs && k + 1 < f->taps ? (int16_t)weight[k + 1] : 0;
                        for (int j = 0; j < 8; j += 2) to[j] = even, to[j + 1] = odd;
                    }
    return true;
}

/* Writes at most BLOCK pixels: 24 bytes in HWC order, or 8 bytes per channel. */
__attribute__((target("avx2"))) static inline void store_block(const Target *target, uint8_t *out, int x, int left,
                                                               __m256i bytes) {
    const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
    if (left < BLOCK) {
        uint8_t copy[32];
        _mm256_storeu_si256((__m256i *)copy, bytes);
        if (target->channel == 1) memcpy(out + x * 3, copy, (size_t)left * 3);
        for (int c = 0; c < 3 && target->channel != 1; c++)
            memcpy(out + x + c * target->channel, copy + c * BLOCK, (size_t)left);
    } else if (target->channel == 1) {
        _mm_storeu_si128((__m128i *)(out + x * 3), low);
        _mm_storel_epi64((__m128i *)(out + x * 3 + 16), high);
    } else {
        _mm_storel_epi64((__m128i *)(out + x), low);
        _mm_storel_epi64((__m128i *)(out + x + target->channel), _mm_unpackhi_epi64(low, low));
        _mm_storel_epi64((__m128i *)(out + x + 2 * target->channel), high);
    }
}

/* Reads up to 3 * (taps + GROUP) + 16 bytes from each output's first pixel: `pixels` has that much slack. */
__attribute__((target("avx2"), always_inline)) static inline void mix_groups_avx2(const Target *target, int y,
                                                                                  const uint8_t *pixels,
                                                                                  const Filter *f, const __m256i *w,
                                                                                  const int groups) {
    const __m256i even = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1, 0, -1, 3, -1, 1, -1,
                                          4, -1, 2, -1, 5, -1, -1, -1, -1, -1);
    const __m256i odd = _mm256_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1, 6, -1, 9, -1, 7,
                                         -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
    const __m256i planes = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9,
                                            13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i packed = _mm256_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1, 0, 1, 2, 4, 5, 6, 8,
                                            9, 10, 12, 13, 14, -1, -1, -1, -1);
    const __m256i by_channel = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), by_pixel = _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 3, 7);
    const __m256i round = _mm256_set1_epi32(1 << (COLUMN_BITS - 1));
    uint8_t *out = target->base + y * target->row;
    for (int x = 0; x < f->outputs; x += BLOCK) {
        __m256i sum[4] = {round, round, round, round};
        for (int group = 0; group < groups; group++)
            for (int i = 0; i < 4; i++, w += 2) {
                const uint8_t *near = pixels + (size_t)f->first[x + i] * 3 + group * GROUP * 3;
                const uint8_t *far = pixels + (size_t)f->first[x + i + 4] * 3 + group * GROUP * 3;
                const __m256i four = _mm256_inserti128_si256(
                    _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)near)), _mm_loadu_si128((const __m128i *)far), 1);
                const __m256i a = _mm256_madd_epi16(_mm256_shuffle_epi8(four, even), _mm256_loadu_si256(w));
                const __m256i b = _mm256_madd_epi16(_mm256_shuffle_epi8(four, odd), _mm256_loadu_si256(w + 1));
                sum[i] = _mm256_add_epi32(sum[i], _mm256_add_epi32(a, b));
            }
        for (int i = 0; i < 4; i++) sum[i] = _mm256_srai_epi32(sum[i], COLUMN_BITS);
        const __m256i rgbx =
            _mm256_packus_epi16(_mm256_packs_epi32(sum[0], sum[1]), _mm256_packs_epi32(sum[2], sum[3]));
        const __m256i bytes = target->channel == 1
                                  ? _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(rgbx, packed), by_pixel)
                                  : _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(rgbx, planes), by_channel);
        store_block(target, out, x, f->outputs - x, bytes);
    }
}

__attribute__((target("avx2"))) static void mix_columns_avx2(const Target *target, int y, const uint8_t *pixels,
                                                              const Filter *f, const __m256i *weights) {
    const int groups = (f->taps + GROUP - 1) / GROUP;
    if (groups == 1) /* the usual case, unrolled: up to twice smaller, or larger */
        mix_groups_avx2(target, y, pixels, f, weights, 1);
    else
        mix_groups_avx2(target, y, pixels, f, weights, groups);
}
#endif

/* ---------------------------------------------------------------- resizer */

/* One thread's filters and scratch rows; reused from image to image, freed after a batch. */
typedef struct {
    Filter rows, columns;
    Buffer column_weights, mixed, source_rows;
    Target target;
    int next; /* output row to be written next */
} Resizer;

typedef struct {
    double x0, y0, x1, y1;
} Box;

/* Prepares to resize `box` of an image to width x height. clamp: pixels outside of the box do not count. */
static bool resizer_start(Resizer *r, Box box, int image_width, int image_height, int width, int height, bool clamp,
                          bool flip, Target target) {
    int left = 0, top = 0, right = image_width, bottom = image_height;
    if (clamp) {
        left = (int)floor(box.x0);
        top = (int)floor(box.y0);
        if (ceil(box.x1) < right) right = (int)ceil(box.x1);
        if (ceil(box.y1) < bottom) bottom = (int)ceil(box.y1);
    }
    r->target = target;
    r->next = 0;
    if (!filter_build(&r->rows, box.y0, box.y1, height, top, bottom, 16, false)) return false;
    if (!filter_build(&r->columns, box.x0, box.x1, width, left, right, COLUMN_BITS, flip)) return false;
#ifdef HAVE_AVX2
    if (use_simd && !weights_avx2(&r->columns, &r->column_weights)) return false;
#endif
    const size_t pixels = (size_t)(r->columns.high - r->columns.low) + r->columns.taps + 4;
    return buffer_reserve(&r->mixed, pixels * 3 + 64) &&
           buffer_reserve(&r->source_rows, sizeof(uint8_t *) * (size_t)r->rows.taps);
}

/* First source row of the next output row, and one past its last. */
static int resizer_first(const Resizer *r) { return r->rows.low + r->rows.first[r->next]; }
static int resizer_last(const Resizer *r) { return resizer_first(r) + r->rows.count[r->next]; }
static bool resizer_done(const Resizer *r) { return r->next == r->rows.outputs; }

/* Writes the next output row. source_rows: its source rows, each at column columns.low. */
static void resizer_write(Resizer *r) {
    const int n = (r->columns.high - r->columns.low) * 3;
    const uint8_t *const *rows = r->source_rows.data;
    const uint32_t *weight = r->rows.weight + (size_t)r->next * r->rows.taps;
    const int count = r->rows.count[r->next];
#ifdef HAVE_AVX2
    if (use_simd) {
        mix_rows_avx2(r->mixed.data, rows, weight, count, n);
        mix_columns_avx2(&r->target, r->next++, r->mixed.data, &r->columns, r->column_weights.data);
        return;
    }
#endif
    mix_rows(r->mixed.data, rows, weight, count, n);
    mix_columns(&r->target, r->next++, r->mixed.data, &r->columns);
}

/* Resizes from pixels in memory; `stride` bytes from row to row. */
static void resizer_run(Resizer *r, const uint8_t *pixels, ptrdiff_t stride) {
    const uint8_t **rows = r->source_rows.data;
    while (!resizer_done(r)) {
        const uint8_t *first = pixels + resizer_first(r) * stride + (ptrdiff_t)r->columns.low * 3;
        for (int k = 0; k < r->rows.count[r->next]; k++) rows[k] = first + k * stride;
        resizer_write(r);
    }
}

static void resizer_free(Resizer *r) {
    buffer_free(&r->rows.memory);
    buffer_free(&r->columns.memory);
    buffer_free(&r->column_weights);
    buffer_free(&r->mixed);
    buffer_free(&r->source_rows);
}

#endif
