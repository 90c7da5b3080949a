/* The 64 quantised coefficients of a JPEG block as bytes that SIMD instructions read.
 *
 * In zigzag order a block is 8 groups of 8 numbers. Neighbours there have similar sizes, so a group has one width for
 * all of its numbers: w bits each in two's complement, w bytes in all. Numbers of more than 8 bits are in two parts: 8
 * bytes with their lower 8 bits, then w - 8 bytes with the bits above. A packed block is
 *
 *     uint16   12 bits of the DC, 4 bits of the number n of groups; the groups behind them are 0
 *     n x 4 bits: the groups' widths, filled up to whole bytes
 *     the groups; the place of the DC in the first one is 0
 *
 * This takes 1.1 to 1.7 times the bytes of Huffman codes. Rejected: a bitmap of the numbers that are not 0 and a byte for
 * each of them, 1.5 to 2.4 times; rows of the block instead of the zigzag order, 1.3 to 2.4 times; half as large groups,
 * which are no smaller with their widths.
 */
#ifndef FASTLOAD_BLOCKS_H
#define FASTLOAD_BLOCKS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"

#define GROUPS 8
#define WIDEST 15
#define MOST_BYTES (2 + GROUPS / 2 + GROUPS * WIDEST) /* of a packed block */
#define SLACK 8                                       /* bytes behind a block that unpacking may read */

/* Natural position of each coefficient in zigzag order: ITU-T T.81, figure A.6. */
static const uint8_t ZIGZAG[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

static uint16_t get16(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }
static uint32_t get32(const uint8_t *at) { return get16(at) | (uint32_t)get16(at + 2) << 16; }
static void put16(uint8_t *to, uint32_t value) { to[0] = (uint8_t)value, to[1] = (uint8_t)(value >> 8); }
static void put32(uint8_t *to, uint32_t value) { put16(to, value & 0xffff), put16(to + 2, value >> 16); }

static int group_width(uint32_t widths, int group) { return widths >> (4 * group) & 15; }

/* Bytes of groups with these widths. */
static int groups_size(uint32_t widths) {
    const uint32_t pairs = (widths & 0x0F0F0F0F) + (widths >> 4 & 0x0F0F0F0F);
    return (int)((pairs * 0x01010101u) >> 24);
}

#ifdef HAVE_AVX2
#define AVX2 __attribute__((target("avx2"))) static inline

/* 8 numbers of 64, at the positions a..h: those of them that are in vector v of `from`, 0 in the place of the others. */
#define PLACE(v, k) (k) / 8 == (v) ? (k) % 8 * 2 : -1, (k) / 8 == (v) ? (k) % 8 * 2 + 1 : -1
#define PICK(v, a, b, c, d, e, f, g, h)                                                                               \
    _mm_shuffle_epi8(from[v], _mm_setr_epi8(PLACE(v, a), PLACE(v, b), PLACE(v, c), PLACE(v, d), PLACE(v, e),          \
                                            PLACE(v, f), PLACE(v, g), PLACE(v, h)))
#define PICK2(v, w, ...) _mm_or_si128(PICK(v, __VA_ARGS__), PICK(w, __VA_ARGS__))
#define PICK3(v, w, x, ...) _mm_or_si128(PICK2(v, w, __VA_ARGS__), PICK(x, __VA_ARGS__))
#define PICK4(v, w, x, y, ...) _mm_or_si128(PICK2(v, w, __VA_ARGS__), PICK2(x, y, __VA_ARGS__))
#define PICK5(v, w, x, y, z, ...) _mm_or_si128(PICK4(v, w, x, y, __VA_ARGS__), PICK(z, __VA_ARGS__))
#define PICK6(u, v, w, x, y, z, ...) _mm_or_si128(PICK4(u, v, w, x, __VA_ARGS__), PICK2(y, z, __VA_ARGS__))
#endif

/* ---------------------------------------------------------------- packing */

/* Bits that 8 numbers need in two's complement; 0 if all are 0. */
static int width_scalar(const int16_t *numbers) {
    uint32_t magnitude = 0, any = 0;
    for (int i = 0; i < 8; i++) {
        any |= (uint16_t)numbers[i];
        magnitude |= (uint16_t)(numbers[i] ^ (numbers[i] >> 15));
    }
    if (!any) return 0;
    return magnitude ? 33 - __builtin_clz(magnitude) : 1;
}

/* Writes the lower `width` bits, at most 8, of `numbers` >> shift. */
static void pack_bits(uint8_t *out, const int16_t *numbers, int shift, int width) {
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) bits |= (uint64_t)((numbers[i] >> shift) & ((1 << width) - 1)) << (i * width);
    for (int i = 0; i < width; i++) out[i] = (uint8_t)(bits >> (8 * i));
}

/* The numbers in zigzag order; the DC's place is 0. */
static void order_scalar(const int16_t *block, int16_t *ordered) {
    for (int k = 1; k < 64; k++) ordered[k] = block[ZIGZAG[k]];
    ordered[0] = 0;
}

static int pack_group_scalar(const int16_t *numbers, int width, uint8_t *out) {
    pack_bits(out, numbers, 0, width < 8 ? width : 8);
    if (width > 8) pack_bits(out + 8, numbers, 8, width - 8);
    return width;
}

#ifdef HAVE_AVX2
AVX2 void order_avx2(const int16_t *block, int16_t *ordered) {
    __m128i from[8]; /* rows of the block */
    for (int row = 0; row < 8; row++) from[row] = _mm_loadu_si128((const __m128i *)(block + 8 * row));
    from[0] = _mm_insert_epi16(from[0], 0, 0);
    __m128i *group = (__m128i *)ordered;
    _mm_storeu_si128(group + 0, PICK3(0, 1, 2, 0, 1, 8, 16, 9, 2, 3, 10));
    _mm_storeu_si128(group + 1, PICK5(0, 1, 2, 3, 4, 17, 24, 32, 25, 18, 11, 4, 5));
    _mm_storeu_si128(group + 2, PICK6(1, 2, 3, 4, 5, 6, 12, 19, 26, 33, 40, 48, 41, 34));
    _mm_storeu_si128(group + 3, PICK4(0, 1, 2, 3, 27, 20, 13, 6, 7, 14, 21, 28));
    _mm_storeu_si128(group + 4, PICK4(4, 5, 6, 7, 35, 42, 49, 56, 57, 50, 43, 36));
    _mm_storeu_si128(group + 5, PICK6(1, 2, 3, 4, 5, 6, 29, 22, 15, 23, 30, 37, 44, 51));
    _mm_storeu_si128(group + 6, PICK5(3, 4, 5, 6, 7, 58, 59, 52, 45, 38, 31, 39, 46));
    _mm_storeu_si128(group + 7, PICK3(5, 6, 7, 53, 60, 61, 54, 47, 55, 62, 63));
}

AVX2 int width_avx2(const int16_t *numbers) {
    const __m128i v = _mm_loadu_si128((const __m128i *)numbers);
    if (_mm_testz_si128(v, v)) return 0;
    const __m128i magnitude = _mm_xor_si128(v, _mm_srai_epi16(v, 15)); /* the largest is the smallest complement */
    const uint16_t least = (uint16_t)_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(magnitude, _mm_set1_epi16(-1))));
    return least == 0xffff ? 1 : 33 - __builtin_clz((uint16_t)~least);
}

/* Joins neighbours: 8 numbers of w bits, 4 of 2w, 2 of 4w, 1 of 8w. Writes 8 bytes, of which `width` count. */
AVX2 int pack_group_avx2(const int16_t *numbers, int width, uint8_t *out) {
    if (width > 8) return pack_group_scalar(numbers, width, out);
    const __m128i mask = _mm_set1_epi16((short)((1 << width) - 1)), join = _mm_set1_epi32(1 | 1 << (16 + width));
    const __m128i four = _mm_madd_epi16(_mm_and_si128(_mm_loadu_si128((const __m128i *)numbers), mask), join);
    const __m128i odd = _mm_sll_epi64(_mm_srli_epi64(four, 32), _mm_cvtsi32_si128(2 * width));
    const __m128i two = _mm_or_si128(_mm_and_si128(four, _mm_set1_epi64x(0xffffffff)), odd);
    const uint64_t bits = (uint64_t)_mm_cvtsi128_si64(two) | (uint64_t)_mm_extract_epi64(two, 1) << (4 * width);
    memcpy(out, &bits, 8);
    return width;
}
#endif

#ifdef HAVE_AVX2
#define PACK(step) (simd ? step##_avx2 : step##_scalar)
#else
#define PACK(step) step##_scalar
#endif

/* Inlined into one function for each instruction set: the compiler inlines nothing from one set into another, and 17
 * calls a block took as long as the rest. */
__attribute__((always_inline)) static inline int pack_steps(const int16_t *block, uint8_t *out, const bool simd) {
    (void)simd;
    int16_t ordered[64];
    PACK(order)(block, ordered);
    int width[GROUPS], groups = 0;
    for (int group = 0; group < GROUPS; group++) {
        width[group] = PACK(width)(ordered + 8 * group);
        if (width[group] > WIDEST) return 0;
        if (width[group]) groups = group + 1;
    }
    if (block[0] < -2048 || block[0] > 2047) return 0;
    put16(out, (block[0] & 0xfff) | (uint32_t)groups << 12);
    uint8_t *to = out + 2;
    for (int group = 0; group < groups; group += 2)
        *to++ = (uint8_t)(width[group] | (group + 1 < groups ? width[group + 1] << 4 : 0));
    for (int group = 0; group < groups; group++) to += PACK(pack_group)(ordered + 8 * group, width[group], to);
    return (int)(to - out);
}

#ifdef HAVE_AVX2
__attribute__((flatten)) AVX2 int pack_block_avx2(const int16_t *block, uint8_t *out) {
    return pack_steps(block, out, true);
}
#endif

/* Packs a block in natural order to `out`, which has MOST_BYTES + SLACK; returns its size, or 0 if a number is larger than
 * any encoder makes it. */
static int pack_block(const int16_t *block, uint8_t *out) {
#ifdef HAVE_AVX2
    if (use_simd) return pack_block_avx2(block, out);
#endif
    return pack_steps(block, out, false);
}

/* ---------------------------------------------------------------- unpacking */

static uint64_t load_bits(const uint8_t *data, int bytes) {
    uint64_t bits = 0;
    for (int i = 0; i < bytes; i++) bits |= (uint64_t)data[i] << (8 * i);
    return bits;
}

static void unpack_groups_scalar(const uint8_t *data, uint32_t widths, int16_t dc, int16_t *block) {
    for (int group = 0; group < GROUPS; group++) {
        const int width = group_width(widths, group), lower = width < 8 ? width : 8, upper = width - lower;
        const uint64_t low = load_bits(data, lower), high = load_bits(data + lower, upper);
        for (int i = 0; i < 8; i++) {
            const uint32_t bits = (uint32_t)(low >> (i * lower) & ((1u << lower) - 1)) |
                                  (uint32_t)(high >> (i * upper) & ((1u << upper) - 1)) << 8;
            const uint32_t sign = width ? 1u << (width - 1) : 0;
            block[ZIGZAG[8 * group + i]] = (int16_t)((int32_t)(bits ^ sign) - (int32_t)sign);
        }
        data += width;
    }
    block[0] = dc;
}

#if defined(HAVE_AVX2) || defined(__aarch64__)
/* How a vector of 8 x 16 bits is made of the bytes of a group: each number's two bytes are moved into its place, where a
 * product with a power of two moves its highest bit to the top, and the upper half of another product moves it down
 * again, with its sign. */
typedef struct {
    uint8_t bytes[16];
    int16_t up[8];
    int16_t down[8];
} Spread;

#define SPREAD_BYTES(w, i) (w) ? (i) * (w) / 8 : 128, (w) ? (i) * (w) / 8 + 1 : 128
#define SPREAD_UP(w, i) (w) ? (int16_t)(1 << (16 - (w) - (i) * (w) % 8)) : 0
#define EACH(F, w) F(w, 0), F(w, 1), F(w, 2), F(w, 3), F(w, 4), F(w, 5), F(w, 6), F(w, 7)
#define SPREAD_DOWN(w, i) 1 << (w)
#define SPREAD(w) {{EACH(SPREAD_BYTES, w)}, {EACH(SPREAD_UP, w)}, {EACH(SPREAD_DOWN, w)}}

static const Spread SPREADS[9] = {SPREAD(0), SPREAD(1), SPREAD(2), SPREAD(3), SPREAD(4),
                                  SPREAD(5), SPREAD(6), SPREAD(7), SPREAD(8)};
#endif

#ifdef HAVE_AVX2
AVX2 __m128i spread_avx2(const uint8_t *data, int width) {
    const Spread *spread = SPREADS + width;
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)data);
    const __m128i placed = _mm_shuffle_epi8(bytes, _mm_loadu_si128((const __m128i *)spread->bytes));
    const __m128i up = _mm_mullo_epi16(placed, _mm_loadu_si128((const __m128i *)spread->up));
    return _mm_mulhi_epi16(up, _mm_loadu_si128((const __m128i *)spread->down));
}

AVX2 __m128i unpack_group_avx2(const uint8_t *data, int width) {
    if (__builtin_expect(width <= 8, 1)) return spread_avx2(data, width);
    const __m128i low = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)data));
    return _mm_or_si128(low, _mm_slli_epi16(spread_avx2(data + 8, width - 8), 8));
}

AVX2 void unpack_groups_avx2(const uint8_t *data, uint32_t widths, int16_t dc, int16_t *block) {
    __m128i from[GROUPS]; /* in zigzag order */
    for (int i = 0; i < GROUPS; i++) {
        const int width = group_width(widths, i);
        from[i] = unpack_group_avx2(data, width);
        data += width;
    }
    from[0] = _mm_insert_epi16(from[0], dc, 0);
    __m128i *row = (__m128i *)block;
    _mm_storeu_si128(row + 0, PICK3(0, 1, 3, 0, 1, 5, 6, 14, 15, 27, 28));
    _mm_storeu_si128(row + 1, PICK5(0, 1, 2, 3, 5, 2, 4, 7, 13, 16, 26, 29, 42));
    _mm_storeu_si128(row + 2, PICK5(0, 1, 2, 3, 5, 3, 8, 12, 17, 25, 30, 41, 43));
    _mm_storeu_si128(row + 3, PICK5(1, 2, 3, 5, 6, 9, 11, 18, 24, 31, 40, 44, 53));
    _mm_storeu_si128(row + 4, PICK5(1, 2, 4, 5, 6, 10, 19, 23, 32, 39, 45, 52, 54));
    _mm_storeu_si128(row + 5, PICK5(2, 4, 5, 6, 7, 20, 22, 33, 38, 46, 51, 55, 60));
    _mm_storeu_si128(row + 6, PICK5(2, 4, 5, 6, 7, 21, 34, 37, 47, 50, 56, 59, 61));
    _mm_storeu_si128(row + 7, PICK3(4, 6, 7, 35, 36, 48, 49, 57, 58, 62, 63));
}
#endif

#ifdef __aarch64__
static int16x8_t spread_neon(const uint8_t *data, int width) {
    const Spread *spread = SPREADS + width;
    const uint8x16_t bytes = vcombine_u8(vld1_u8(data), vdup_n_u8(0));
    const int16x8_t placed = vreinterpretq_s16_u8(vqtbl1q_u8(bytes, vld1q_u8(spread->bytes)));
    return vshlq_s16(vmulq_s16(placed, vld1q_s16(spread->up)), vdupq_n_s16((int16_t)(width - 16)));
}

/* Where the bytes of each row of a block lie in zigzag order. */
#define BYTES(a, b, c, d, e, f, g, h)                                                                                 \
    {2 * a, 2 * a + 1, 2 * b, 2 * b + 1, 2 * c, 2 * c + 1, 2 * d, 2 * d + 1,                                          \
     2 * e, 2 * e + 1, 2 * f, 2 * f + 1, 2 * g, 2 * g + 1, 2 * h, 2 * h + 1}
static const uint8_t ROW_BYTES[8][16] = {
    BYTES(0, 1, 5, 6, 14, 15, 27, 28),      BYTES(2, 4, 7, 13, 16, 26, 29, 42),     BYTES(3, 8, 12, 17, 25, 30, 41, 43),
    BYTES(9, 11, 18, 24, 31, 40, 44, 53),   BYTES(10, 19, 23, 32, 39, 45, 52, 54),  BYTES(20, 22, 33, 38, 46, 51, 55, 60),
    BYTES(21, 34, 37, 47, 50, 56, 59, 61),  BYTES(35, 36, 48, 49, 57, 58, 62, 63)};

static void unpack_groups_neon(const uint8_t *data, uint32_t widths, int16_t dc, int16_t *block) {
    uint8x16x4_t half[2];
    for (int i = 0; i < GROUPS; i++) {
        const int width = group_width(widths, i);
        int16x8_t group;
        if (width <= 8)
            group = spread_neon(data, width);
        else
            group = vorrq_s16(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(data))),
                              vshlq_n_s16(spread_neon(data + 8, width - 8), 8));
        if (i == 0) group = vsetq_lane_s16(dc, group, 0);
        half[i / 4].val[i % 4] = vreinterpretq_u8_s16(group);
        data += width;
    }
    for (int row = 0; row < 8; row++) {
        const uint8x16_t at = vld1q_u8(ROW_BYTES[row]);
        const uint8x16_t low = vqtbl4q_u8(half[0], at);
        vst1q_s16(block + 8 * row, vreinterpretq_s16_u8(vqtbx4q_u8(low, half[1], vsubq_u8(at, vdupq_n_u8(64)))));
    }
}
#endif

/* Writes a packed block in natural order; returns the end of its bytes, or NULL where that is behind `end`. Reads up to
 * SLACK bytes behind it. */
static const uint8_t *unpack_block(const uint8_t *data, const uint8_t *end, int16_t *block) {
    const uint16_t first = get16(data);
    const int groups = first >> 12;
    const uint32_t widths = get32(data + 2) & (uint32_t)((1ull << (4 * groups)) - 1);
    const uint8_t *from = data + 2 + (groups + 1) / 2;
    const int size = groups_size(widths);
    if (groups > GROUPS || size > end - from) return NULL;
    const int16_t dc = (int16_t)(((first & 0xfff) ^ 0x800) - 0x800);
#ifdef HAVE_AVX2
    if (use_simd) {
        unpack_groups_avx2(from, widths, dc, block);
        return from + size;
    }
#elif defined(__aarch64__)
    if (use_simd) {
        unpack_groups_neon(from, widths, dc, block);
        return from + size;
    }
#endif
    unpack_groups_scalar(from, widths, dc, block);
    return from + size;
}

#endif
