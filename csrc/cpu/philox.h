/*
 * Random numbers that depend only on a seed and a position: Philox4x32-7 (Salmon, Moraes, Dror, Shaw: Parallel random
 * numbers: as easy as 1, 2, 3, SC 2011; seven rounds pass every test of TestU01 there).
 */
#ifndef DSC_CPU_PHILOX_H
#define DSC_CPU_PHILOX_H

#include "cpu/lanes.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define PHILOX_ROUNDS 7
#define PHILOX_WORDS 4 /* numbers of one counter */
#define PHILOX_COUNTERS (2 * REGISTER_LANES)
#define PHILOX_DRAW (PHILOX_COUNTERS * PHILOX_WORDS) /* numbers that one call makes */

#define MULTIPLIER_0 0xD2511F53u
#define MULTIPLIER_1 0xCD9E8D57u
#define WEYL_0 0x9E3779B9u
#define WEYL_1 0xBB67AE85u
#define LOW_WORD 0xFFFFFFFFu

/* One word of each of several counters, in the low half of each lane; the high half may hold anything. */
typedef uint64_t words __attribute__((vector_size(8 * REGISTER_LANES)));

/* The full 64-bit products of words. Intrinsics, because the compiler would multiply 64-bit lanes in three steps. */
static inline words multiply(words a, uint32_t factor)
{
#if defined(__AVX512F__)
    return (words)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
    return (words)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(factor));
#elif defined(__SSE2__)
    return (words)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(factor));
#else
    return (a & LOW_WORD) * factor;
#endif
}

/* Writes a[0], b[0], a[1], b[1], ... With intrinsics, because the compiler would store each lane separately. */
static inline void interleave(words a, words b, words out[2])
{
#if defined(__AVX512F__)
    const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const __m512i high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);

    out[0] = (words)_mm512_permutex2var_epi64((__m512i)a, low, (__m512i)b);
    out[1] = (words)_mm512_permutex2var_epi64((__m512i)a, high, (__m512i)b);
#elif defined(__AVX2__)
    __m256i even = _mm256_unpacklo_epi64((__m256i)a, (__m256i)b); /* pairs 0 and 2 */
    __m256i odd = _mm256_unpackhi_epi64((__m256i)a, (__m256i)b);  /* pairs 1 and 3 */

    out[0] = (words)_mm256_permute2x128_si256(even, odd, 0x20);
    out[1] = (words)_mm256_permute2x128_si256(even, odd, 0x31);
#else
    for (int i = 0; i < 2 * REGISTER_LANES; i++)
        out[i / REGISTER_LANES][i % REGISTER_LANES] = i % 2 == 0 ? a[i / 2] : b[i / 2];
#endif
}

struct counters {
    words c0;
    words c1;
    words c2;
    words c3;
};

static inline void advance(struct counters *c, uint32_t key0, uint32_t key1)
{
    words product0 = multiply(c->c0, MULTIPLIER_0);
    words product1 = multiply(c->c2, MULTIPLIER_1);

    c->c0 = (product1 >> 32) ^ c->c1 ^ key0;
    c->c2 = (product0 >> 32) ^ c->c3 ^ key1;
    c->c1 = product1;
    c->c3 = product0;
}

/* The numbers of the counters first, first + 1, ...: number j of counter i is out[i * PHILOX_WORDS + j]. */
static inline void dsc_philox(uint64_t seed, uint64_t first, uint32_t out[PHILOX_DRAW])
{
    uint64_t starts[2][PHILOX_COUNTERS];
    struct counters c[2];
    uint32_t key0 = (uint32_t)seed;
    uint32_t key1 = (uint32_t)(seed >> 32);

    for (int i = 0; i < PHILOX_COUNTERS; i++) {
        starts[0][i] = first + (uint64_t)i;
        starts[1][i] = (first + (uint64_t)i) >> 32;
    }
    for (int r = 0; r < 2; r++) {
        memcpy(&c[r].c0, starts[0] + r * REGISTER_LANES, sizeof c[r].c0);
        memcpy(&c[r].c1, starts[1] + r * REGISTER_LANES, sizeof c[r].c1);
        c[r].c2 = (words){0};
        c[r].c3 = (words){0};
    }
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        advance(&c[0], key0, key1);
        advance(&c[1], key0, key1);
        key0 += WEYL_0;
        key1 += WEYL_1;
    }
    for (int r = 0; r < 2; r++) {
        words first_pairs = (c[r].c0 & LOW_WORD) | c[r].c1 << 32;
        words second_pairs = (c[r].c2 & LOW_WORD) | c[r].c3 << 32;
        words in_order[2];

        interleave(first_pairs, second_pairs, in_order);
        memcpy(out + r * REGISTER_LANES * PHILOX_WORDS, in_order, sizeof in_order);
    }
}

/*
 * Numbers of a buffer that holds what several calls make. A multiple of every PHILOX_DRAW.
 */
#define PHILOX_DRAWN 512

#endif
