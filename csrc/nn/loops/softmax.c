/*
 * Compiled once per instruction set: the steps of a softmax over one row, and its gradient. The maximum ignores a NaN,
 * but the sum then is NaN.
 */
#include "nn/loops/sums.h"
#include "nn/table.h"

#define INLINE static inline __attribute__((always_inline))

/* The terms of a row's scores. After inlining, all fields but data are constants. */
struct scored {
    dsc_dtype dtype;
    const void *x;
    float scale;
    const void *mask; /* NULL: none */
    const uint8_t *keep;
};

/* Returns n scores from element i on, and stores them too. */
INLINE wide score(const struct scored *from, dsc_f32 *y, int64_t i, int64_t n)
{
    wide scores = from->scale * dsc_wide_load_as(from->dtype, from->x, i, n);

    if (from->mask != NULL)
        scores += dsc_wide_load_as(from->dtype, from->mask, i, n);
    if (from->keep != NULL && n == WIDE_LANES)
        scores = dsc_wide_where_kept(from->keep + i, scores, dsc_wide_all(-INFINITY));
    dsc_wide_store(scores, y + i, n);
    return scores;
}

/* Number of independent maxima: an operation takes four cycles, and two operations can start in each cycle. */
#define CHAINS 4

INLINE void score_row(int64_t n, struct scored from, dsc_f32 *y, float *max)
{
    wide most[CHAINS];
    int64_t i = 0;

    for (int chain = 0; chain < CHAINS; chain++)
        most[chain] = dsc_wide_all(*max);
    for (; i + CHAINS * WIDE_LANES <= n; i += CHAINS * WIDE_LANES) {
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++)
            most[chain] = dsc_wide_max(score(&from, y, i + chain * WIDE_LANES, WIDE_LANES), most[chain]);
    }
    for (; i + WIDE_LANES <= n; i += WIDE_LANES)
        most[0] = dsc_wide_max(score(&from, y, i, WIDE_LANES), most[0]);
    if (i < n)
        score(&from, y, i, n - i);
    for (; i < n; i++) {
        if (from.keep != NULL && from.keep[i] == 0)
            y[i] = -INFINITY;
        *max = y[i] > *max ? y[i] : *max;
    }
    most[0] = dsc_wide_max(dsc_wide_max(most[0], most[1]), dsc_wide_max(most[2], most[3]));
    for (int lane = 0; lane < WIDE_LANES; lane++)
        *max = most[0][lane] > *max ? most[0][lane] : *max;
}

/* With a NULL mask or keep, the corresponding term is removed. */
#define SCORE(dtype, mask, keep) score_row(n, (struct scored){dtype, x, scale, mask, keep}, y, max)

void DSC_K(nn_scores)(int64_t n, dsc_dtype dtype, const void *x, float scale, const void *mask, dsc_f32 *y, float *max)
{
    if (mask == NULL)
        WITH_DTYPE(dtype, SCORE, NULL, NULL);
    else
        WITH_DTYPE(dtype, SCORE, mask, NULL);
}

void DSC_K(nn_scores_kept)(int64_t n, dsc_dtype dtype, const void *x, float scale, const uint8_t *keep, dsc_f32 *y,
                           float *max)
{
    WITH_DTYPE(dtype, SCORE, NULL, keep);
}

void DSC_K(nn_exps)(int64_t n, const dsc_f32 *x, float max, dsc_f32 *y, dsc_dtype dtype, const void *out, double *sum)
{
    double lanes[LANES];
    doubles sums[REGISTERS] = {0};
    int64_t i = 0;

    for (; i + SUMMED * LANES <= n; i += SUMMED * LANES) {
#pragma GCC unroll 4
        for (int r = 0; r < LANE_REGISTERS; r++) {
            wide found[SUMMED];

#pragma GCC unroll 4
            for (int k = 0; k < SUMMED; k++) {
                int64_t at = i + k * LANES + r * WIDE_LANES;

                if (r == 0)
                    dsc_wide_expect_store(dtype, out, at);
                found[k] = dsc_wide_exp_nonpositive(dsc_wide_load(x + at, WIDE_LANES) - max);
                dsc_wide_store(found[k], y + at, WIDE_LANES);
            }
            dsc_add_lanes((found[0] + found[1]) + (found[2] + found[3]), r, sums);
        }
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

INLINE void scaled_step(dsc_dtype dtype, const dsc_f32 *x, float factor, void *y, int64_t i, int64_t n)
{
    dsc_wide_store_as(dtype, factor * dsc_wide_load(x + i, n), y, i, n);
}

void DSC_K(nn_scaled)(int64_t n, const dsc_f32 *x, float factor, dsc_dtype dtype, void *y)
{
    WITH_DTYPE(dtype, EACH_WIDE_AS, n, scaled_step, x, factor, y);
}

/* Products (exact for 16-bit elements) and sums of SUMMED products are in f32, as in nn_exps. */
INLINE void dot_row(dsc_dtype dtype, int64_t n, const void *y, const void *dy, double *sum)
{
    double lanes[LANES];
    doubles sums[REGISTERS] = {0};
    int64_t i = 0;

    for (; i + SUMMED * LANES <= n; i += SUMMED * LANES) {
#pragma GCC unroll 4
        for (int r = 0; r < LANE_REGISTERS; r++) {
            wide found[SUMMED];

#pragma GCC unroll 4
            for (int k = 0; k < SUMMED; k++) {
                int64_t at = i + k * LANES + r * WIDE_LANES;

                found[k] = dsc_wide_load_as(dtype, y, at, WIDE_LANES) * dsc_wide_load_as(dtype, dy, at, WIDE_LANES);
            }
            dsc_add_lanes((found[0] + found[1]) + (found[2] + found[3]), r, sums);
        }
    }
    memcpy(lanes, sums, sizeof lanes);
    for (; i < n; i += WIDE_LANES) {
        int64_t n_here = n - i < WIDE_LANES ? n - i : WIDE_LANES;
        wide found = dsc_wide_load_as(dtype, y, i, n_here) * dsc_wide_load_as(dtype, dy, i, n_here);

        for (int64_t lane = 0; lane < n_here; lane++)
            lanes[(i + lane) % LANES] += (double)found[lane];
    }
    *sum += dsc_fold(lanes);
}

void DSC_K(nn_softmax_dot)(int64_t n, dsc_dtype dtype, const void *y, const void *dy, double *sum)
{
    WITH_DTYPE(dtype, dot_row, n, y, dy, sum);
}

INLINE void grad_step(dsc_dtype dtype, const void *y, const void *dy, float sum, float scale, void *dx, int64_t i,
                      int64_t n)
{
    wide gradient = dsc_wide_load_as(dtype, dy, i, n) - sum;

    dsc_wide_store_as(dtype, scale * (dsc_wide_load_as(dtype, y, i, n) * gradient), dx, i, n);
}

void DSC_K(nn_softmax_grad)(int64_t n, dsc_dtype dtype, const void *y, const void *dy, float sum, float scale, void *dx)
{
    WITH_DTYPE(dtype, EACH_WIDE_AS, n, grad_step, y, dy, sum, scale, dx);
}
