/* XXH3-64 without a seed, of Yann Collet's xxHash (BSD 2-clause): the sums that caches keep of their records.
 *
 * Only the lengths that are read here: the 56 bytes that a record's header sums, and payloads of more than 240 bytes. No
 * image that is worth a cache is smaller. The test compares it with the xxhash package.
 */
#ifndef FASTLOAD_CHECKSUM_H
#define FASTLOAD_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"

#define SUM_LEAST 241 /* bytes of the shortest payload */
#define SUM_STRIPE 64
#define SUM_STRIPES 16 /* of a block */

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u

static const uint8_t sum_secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

/* Little-endian, as all numbers of records. */
static uint64_t sum_read(const uint8_t *from) {
    uint64_t value;
    memcpy(&value, from, sizeof value);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static uint64_t sum_fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t sum_mixed(uint64_t sum) {
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9u;
    return sum ^ sum >> 32;
}

/* The sum of exactly 56 bytes. */
static uint64_t sum_header(const uint8_t *data) {
    enum { SIZE = 56 };
    static const int places[] = {16, SIZE - 32, 0, SIZE - 16}, secrets[] = {32, 48, 0, 16};
    uint64_t sum = SIZE * PRIME64_1;
    for (int i = 0; i < 4; i++) {
        const uint8_t *from = data + places[i], *secret = sum_secret + secrets[i];
        sum += sum_fold(sum_read(from) ^ sum_read(secret), sum_read(from + 8) ^ sum_read(secret + 8));
    }
    return sum_mixed(sum);
}

/* ---------------------------------------------------------------- stripes */

/* Adds `count` stripes, each with the secret 8 bytes further; `whole` says that they are a block, whose end stirs the sums. */
static void add_stripes(uint64_t *sums, const uint8_t *data, const uint8_t *secret, size_t count, bool whole) {
    for (size_t n = 0; n < count; n++, data += SUM_STRIPE, secret += 8)
        for (int i = 0; i < 8; i++) {
            const uint64_t value = sum_read(data + 8 * i), keyed = value ^ sum_read(secret + 8 * i);
            sums[i ^ 1] += value;
            sums[i] += (keyed & 0xffffffff) * (keyed >> 32);
        }
    for (int i = 0; i < 8 && whole; i++)
        sums[i] = (sums[i] ^ sums[i] >> 47 ^ sum_read(secret + 8 * i)) * PRIME32_1;
}

#ifdef HAVE_AVX2
__attribute__((target("avx2"))) static void add_stripes_avx2(uint64_t *sums, const uint8_t *data, const uint8_t *secret,
                                                             size_t count, bool whole) {
    __m256i half[2] = {_mm256_loadu_si256((const __m256i *)sums), _mm256_loadu_si256((const __m256i *)sums + 1)};
    for (size_t n = 0; n < count; n++, data += SUM_STRIPE, secret += 8)
        for (int i = 0; i < 2; i++) {
            const __m256i value = _mm256_loadu_si256((const __m256i *)data + i);
            const __m256i keyed = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)secret + i));
            const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
            half[i] = _mm256_add_epi64(half[i], _mm256_add_epi64(product, swapped));
        }
    const __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    for (int i = 0; i < 2; i++) {
        if (whole) {
            const __m256i keyed = _mm256_xor_si256(_mm256_xor_si256(half[i], _mm256_srli_epi64(half[i], 47)),
                                                   _mm256_loadu_si256((const __m256i *)secret + i));
            const __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(keyed, 32), prime), 32);
            half[i] = _mm256_add_epi64(_mm256_mul_epu32(keyed, prime), high);
        }
        _mm256_storeu_si256((__m256i *)sums + i, half[i]);
    }
}
#endif

static void add_some(uint64_t *sums, const uint8_t *data, const uint8_t *secret, size_t count, bool whole) {
#ifdef HAVE_AVX2
    if (use_simd) {
        add_stripes_avx2(sums, data, secret, count, whole);
        return;
    }
#endif
    add_stripes(sums, data, secret, count, whole);
}

/* The sum of at least SUM_LEAST bytes. */
static uint64_t sum_payload(const uint8_t *data, size_t size) {
    const ptrdiff_t block = SUM_STRIPE * SUM_STRIPES;
    uint64_t sums[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    const uint8_t *from = data, *end = data + size;
    for (; end - from > block; from += block) add_some(sums, from, sum_secret, SUM_STRIPES, true);
    add_some(sums, from, sum_secret, (size_t)(end - from - 1) / SUM_STRIPE, false);
    add_some(sums, end - SUM_STRIPE, sum_secret + sizeof sum_secret - SUM_STRIPE - 7, 1, false);
    uint64_t sum = size * PRIME64_1;
    for (int i = 0; i < 8; i += 2)
        sum += sum_fold(sums[i] ^ sum_read(sum_secret + 11 + 8 * i), sums[i + 1] ^ sum_read(sum_secret + 19 + 8 * i));
    return sum_mixed(sum);
}

#endif
