/*
 * Compiled once per instruction set: the steps of a softmax over one row, and its gradient. A NaN is passed over by the
 * maximum, and comes back in the sum.
 */
#include "cpu/lanes.h"
#include "cpu/math.h"
#include "cpu/wide.h"
#include "nn/table.h"

/* One register of scores, which are also stored. mask and keep may be NULL, a constant where this is inlined. */
static inline __attribute__((always_inline)) wide score(const dsc_f32 *x, float scale, const dsc_f32 *mask,
                                                        const uint8_t *keep, dsc_f32 *y, int64_t i)
{
    wide scores = scale * dsc_wide_load(x + i, WIDE_LANES);

    if (mask != NULL)
        scores += dsc_wide_load(mask + i, WIDE_LANES);
    if (keep != NULL)
        scores = dsc_wide_where_kept(keep + i, scores, dsc_wide_all(-INFINITY));
    dsc_wide_store(scores, y + i, WIDE_LANES);
    return scores;
}

/* Maxima that do not wait for one another: an operation takes four cycles, and two start in each. */
#define CHAINS 4

static inline __attribute__((always_inline)) void score_row(int64_t n, const dsc_f32 *x, float scale,
                                                            const dsc_f32 *mask, const uint8_t *keep, dsc_f32 *y,
                                                            float *max)
{
    wide most[CHAINS];
    int64_t i = 0;

    for (int chain = 0; chain < CHAINS; chain++)
        most[chain] = dsc_wide_all(*max);
    for (; i + CHAINS * WIDE_LANES <= n; i += CHAINS * WIDE_LANES) {
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++)
            most[chain] = dsc_wide_max(score(x, scale, mask, keep, y, i + chain * WIDE_LANES), most[chain]);
    }
    for (; i + WIDE_LANES <= n; i += WIDE_LANES)
        most[0] = dsc_wide_max(score(x, scale, mask, keep, y, i), most[0]);
    for (; i < n; i++) {
        float scaled = scale * x[i];

        if (mask != NULL)
            scaled += mask[i];
        y[i] = keep != NULL && keep[i] == 0 ? -INFINITY : scaled;
        *max = y[i] > *max ? y[i] : *max;
    }
    most[0] = dsc_wide_max(dsc_wide_max(most[0], most[1]), dsc_wide_max(most[2], most[3]));
    for (int lane = 0; lane < WIDE_LANES; lane++)
        *max = most[0][lane] > *max ? most[0][lane] : *max;
}

void DSC_K(nn_scores)(int64_t n, const dsc_f32 *x, float scale, const dsc_f32 *mask, dsc_f32 *y, float *max)
{
    if (mask == NULL)
        score_row(n, x, scale, NULL, NULL, y, max);
    else
        score_row(n, x, scale, mask, NULL, y, max);
}

void DSC_K(nn_scores_kept)(int64_t n, const dsc_f32 *x, float scale, const uint8_t *keep, dsc_f32 *y, float *max)
{
    score_row(n, x, scale, NULL, keep, y, max);
}

/* Elements whose sum is one of f32 before it is widened, lane by lane: a widening costs as much as four additions. */
#define SUMMED 4
#define SUM_REGISTERS (LANES / WIDE_LANES)

void DSC_K(nn_exps)(int64_t n, const dsc_f32 *x, float max, dsc_f32 *y, double *sum)
{
    double lanes[LANES];
    doubles sums[REGISTERS] = {0};
    int64_t i = 0;

    for (; i + SUMMED * LANES <= n; i += SUMMED * LANES) {
        wide totals[SUM_REGISTERS];
        floats halves[REGISTERS];

#pragma GCC unroll 4
        for (int r = 0; r < SUM_REGISTERS; r++) {
            wide found[SUMMED];

#pragma GCC unroll 4
            for (int k = 0; k < SUMMED; k++) {
                int64_t at = i + k * LANES + r * WIDE_LANES;

                found[k] = dsc_wide_exp_nonpositive(dsc_wide_load(x + at, WIDE_LANES) - max);
                dsc_wide_store(found[k], y + at, WIDE_LANES);
            }
            totals[r] = (found[0] + found[1]) + (found[2] + found[3]);
        }
        memcpy(halves, totals, sizeof halves);
        for (int r = 0; r < REGISTERS; r++)
            sums[r] += dsc_widen(halves[r]);
    }
    memcpy(lanes, sums, sizeof lanes);
    for (; i < n; i += WIDE_LANES) {
        int64_t n_here = n - i < WIDE_LANES ? n - i : WIDE_LANES;

        dsc_wide_store(dsc_wide_exp_nonpositive(dsc_wide_load(x + i, n_here) - max), y + i, n_here);
        for (int64_t lane = 0; lane < n_here; lane++)
            lanes[(i + lane) % LANES] += (double)y[i + lane];
    }
    *sum += dsc_fold(lanes);
}

void DSC_K(nn_softmax_grad)(int64_t n, const dsc_f32 *y, const dsc_f32 *dy, float sum, float scale, dsc_f32 *dx)
{
    EACH for (int64_t i = 0; i < n; i++) dx[i] = scale * (y[i] * (dy[i] - sum));
}
