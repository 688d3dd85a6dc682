/* Compiled once per instruction set: random numbers as fractions of 1. */
#include "cpu/math.h"
#include "cpu/philox.h"

void DSC_K(uniform_f32)(int64_t n, uint64_t seed, uint64_t first, dsc_f32 *y)
{
    for (int64_t done = 0; done < n;) {
        DSC_ALIGNED uint32_t drawn[PHILOX_DRAWN];
        uint64_t at = first + (uint64_t)done;
        int64_t n_skipped = (int64_t)(at % PHILOX_WORDS);
        int64_t n_here = n - done < PHILOX_DRAWN - n_skipped ? n - done : PHILOX_DRAWN - n_skipped;

        for (int64_t i = 0; i < n_skipped + n_here; i += PHILOX_DRAW)
            dsc_philox(seed, at / PHILOX_WORDS + (uint64_t)i / PHILOX_WORDS, drawn + i);
        EACH for (int64_t i = 0; i < n_here; i++) y[done + i] = (float)(int32_t)(drawn[n_skipped + i] >> 8) * 0x1p-24f;
        done += n_here;
    }
}
