/* Which vector instructions the kernel uses. */
#ifndef FASTLOAD_SIMD_H
#define FASTLOAD_SIMD_H

#include <stdbool.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX2 1
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

static bool use_simd; /* set once, at import; tests switch it */

static bool cpu_has_simd(void) {
#ifdef HAVE_AVX2
    return __builtin_cpu_supports("avx2");
#elif defined(__aarch64__)
    return true;
#else
    return false;
#endif
}

#endif
