/*
 * Compiled once per instruction set: dropout by random numbers that depend only on seed and position: the halves of
 * Philox's words. Ten rounds and whole words took three times as long, and are no better here.
 */
#include "cpu/math.h"
#include "cpu/philox.h"
#include "nn/table.h"

#define HALVES (2 * PHILOX_WORDS) /* of one counter */

void DSC_K(nn_drop)(int64_t n, uint64_t seed, uint64_t first, uint32_t threshold, float scale, const dsc_f32 *x,
                    dsc_f32 *y)
{
    for (int64_t done = 0; done < n;) {
        DSC_ALIGNED uint32_t drawn[PHILOX_DRAWN];
        const dsc_half *numbers = (const dsc_half *)drawn; /* the low half of a word comes first */
        uint64_t at = first + (uint64_t)done;
        int64_t n_skipped = (int64_t)(at % HALVES);
        int64_t n_here = n - done < 2 * PHILOX_DRAWN - n_skipped ? n - done : 2 * PHILOX_DRAWN - n_skipped;

        for (int64_t i = 0; 2 * i < n_skipped + n_here; i += PHILOX_DRAW)
            dsc_philox(seed, at / HALVES + (uint64_t)i / PHILOX_WORDS, drawn + i);
        EACH for (int64_t i = 0; i < n_here; i++) y[done + i] =
            numbers[n_skipped + i] >= threshold ? scale * x[done + i] : 0.0f;
        done += n_here;
    }
}
