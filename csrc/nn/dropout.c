/*
 * Compiled once per instruction set: dropout by numbers that depend on seed and place alone, Philox4x32-10 (Salmon,
 * Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011).
 */
#include "nn/math.h"
#include "nn/table.h"

#define ROUNDS 10
#define WORDS 4  /* numbers of one counter */
#define GROUP 16 /* counters that are worked on together: the lanes of a loop that vectorises */

#define MULTIPLIER_0 0xD2511F53u
#define MULTIPLIER_1 0xCD9E8D57u
#define WEYL_0 0x9E3779B9u
#define WEYL_1 0xBB67AE85u

/* The numbers of the counters first, first + 1, ...: number j of counter i is out[i * WORDS + j]. */
static inline void philox(uint64_t seed, uint64_t first, uint32_t out[GROUP * WORDS])
{
    uint32_t c0[GROUP];
    uint32_t c1[GROUP];
    uint32_t c2[GROUP];
    uint32_t c3[GROUP];
    uint32_t key0 = (uint32_t)seed;
    uint32_t key1 = (uint32_t)(seed >> 32);

    for (int i = 0; i < GROUP; i++) {
        c0[i] = (uint32_t)(first + (uint64_t)i);
        c1[i] = (uint32_t)((first + (uint64_t)i) >> 32);
        c2[i] = 0;
        c3[i] = 0;
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < GROUP; i++) {
            uint64_t product0 = (uint64_t)MULTIPLIER_0 * c0[i];
            uint64_t product1 = (uint64_t)MULTIPLIER_1 * c2[i];

            c0[i] = (uint32_t)(product1 >> 32) ^ c1[i] ^ key0;
            c2[i] = (uint32_t)(product0 >> 32) ^ c3[i] ^ key1;
            c1[i] = (uint32_t)product1;
            c3[i] = (uint32_t)product0;
        }
        key0 += WEYL_0;
        key1 += WEYL_1;
    }
    for (int i = 0; i < GROUP; i++) {
        out[i * WORDS] = c0[i];
        out[i * WORDS + 1] = c1[i];
        out[i * WORDS + 2] = c2[i];
        out[i * WORDS + 3] = c3[i];
    }
}

void DSC_K(nn_drop)(int64_t n, uint64_t seed, uint64_t first, uint32_t threshold, float scale, const dsc_f32 *x,
                    dsc_f32 *y)
{
    for (int64_t done = 0; done < n;) {
        uint32_t numbers[GROUP * WORDS];
        uint64_t at = first + (uint64_t)done;
        int64_t n_skipped = (int64_t)(at % WORDS);
        int64_t n_here = n - done < GROUP * WORDS - n_skipped ? n - done : GROUP * WORDS - n_skipped;

        philox(seed, at / WORDS, numbers);
        EACH for (int64_t i = 0; i < n_here; i++) y[done + i] =
            numbers[n_skipped + i] >= threshold ? scale * x[done + i] : 0.0f;
        done += n_here;
    }
}
