/* Compiled once per instruction set: the moments of a row, and the norms computed from them. */
#include "cpu/lanes.h"
#include "cpu/math.h"
#include "nn/table.h"

void DSC_K(nn_moments)(int64_t n, const dsc_f32 *x, double *sum, double *sumsq)
{
    doubles sums[REGISTERS] = {0};
    doubles squares[REGISTERS] = {0};
    double sum_lanes[LANES];
    double square_lanes[LANES];
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        for (int r = 0; r < REGISTERS; r++) {
            doubles wide = dsc_load_wide(x + i + r * REGISTER_LANES);

            sums[r] += wide;
            squares[r] = dsc_add_product(squares[r], wide, wide);
        }
    }
    memcpy(sum_lanes, sums, sizeof sum_lanes);
    memcpy(square_lanes, squares, sizeof square_lanes);
    for (int lane = 0; i < n; i++, lane++) {
        sum_lanes[lane] += (double)x[i];
        square_lanes[lane] += (double)x[i] * (double)x[i];
    }
    *sum += dsc_fold(sum_lanes);
    *sumsq += dsc_fold(square_lanes);
}

void DSC_K(nn_dot)(int64_t n, const dsc_f32 *a, const dsc_f32 *b, double *sum)
{
    doubles sums[REGISTERS] = {0};
    double lanes[LANES];
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES)
        for (int r = 0; r < REGISTERS; r++)
            sums[r] = dsc_add_product(sums[r], dsc_load_wide(a + i + r * REGISTER_LANES),
                                      dsc_load_wide(b + i + r * REGISTER_LANES));
    memcpy(lanes, sums, sizeof lanes);
    for (int lane = 0; i < n; i++, lane++)
        lanes[lane] += (double)a[i] * (double)b[i];
    *sum += dsc_fold(lanes);
}

void DSC_K(nn_add)(int64_t n, const dsc_f32 *a, const dsc_f32 *b, dsc_f32 *y)
{
    EACH for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];
}

void DSC_K(nn_norm)(int64_t n, const dsc_f32 *x, float mean, float rstd, const dsc_f32 *weight, const dsc_f32 *bias,
                    dsc_f32 *y)
{
    if (weight == NULL && bias == NULL) {
        EACH for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * rstd;
    } else if (bias == NULL) {
        EACH for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * rstd * weight[i];
    } else if (weight == NULL) {
        EACH for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * rstd + bias[i];
    } else {
        EACH for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
    }
}

static inline floats load(const dsc_f32 *src)
{
    floats x;

    memcpy(&x, src, sizeof x);
    return x;
}

static inline void add_to(floats x, dsc_f32 *dst)
{
    x = load(dst) + x;
    memcpy(dst, &x, sizeof x);
}

/* Whether weight, dweight and dbias are NULL is constant after inlining, so that each case has its own loop. */
static inline __attribute__((always_inline)) void sum_row(int64_t n, const dsc_f32 *dy, const dsc_f32 *x, float mean,
                                                          float rstd, const dsc_f32 *weight, dsc_f32 *dweight,
                                                          dsc_f32 *dbias, double *sum_g, double *sum_gh)
{
    doubles g_sums[REGISTERS] = {0};
    doubles gh_sums[REGISTERS] = {0};
    double g_lanes[LANES];
    double gh_lanes[LANES];
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        for (int r = 0; r < REGISTERS; r++) {
            int64_t at = i + r * REGISTER_LANES;
            floats gradient = load(dy + at);
            floats h = (load(x + at) - mean) * rstd;
            floats g = weight == NULL ? gradient : gradient * load(weight + at);

            g_sums[r] += dsc_widen(g);
            gh_sums[r] += dsc_widen(g * h);
            if (dweight != NULL)
                add_to(gradient * h, dweight + at);
            if (dbias != NULL)
                add_to(gradient, dbias + at);
        }
    }
    memcpy(g_lanes, g_sums, sizeof g_lanes);
    memcpy(gh_lanes, gh_sums, sizeof gh_lanes);
    for (int lane = 0; i < n; i++, lane++) {
        float h = (x[i] - mean) * rstd;
        float g = weight == NULL ? dy[i] : dy[i] * weight[i];

        g_lanes[lane] += (double)g;
        gh_lanes[lane] += (double)(g * h);
        if (dweight != NULL)
            dweight[i] += dy[i] * h;
        if (dbias != NULL)
            dbias[i] += dy[i];
    }
    *sum_g += dsc_fold(g_lanes);
    *sum_gh += dsc_fold(gh_lanes);
}

void DSC_K(nn_norm_sums)(int64_t n, const dsc_f32 *dy, const dsc_f32 *x, float mean, float rstd, const dsc_f32 *weight,
                         dsc_f32 *dweight, dsc_f32 *dbias, double *sum_g, double *sum_gh)
{
    if (weight != NULL && dweight != NULL && dbias != NULL)
        sum_row(n, dy, x, mean, rstd, weight, dweight, dbias, sum_g, sum_gh);
    else if (weight != NULL && dweight != NULL)
        sum_row(n, dy, x, mean, rstd, weight, dweight, NULL, sum_g, sum_gh);
    else if (dweight == NULL && dbias == NULL)
        sum_row(n, dy, x, mean, rstd, weight, NULL, NULL, sum_g, sum_gh);
    else
        sum_row(n, dy, x, mean, rstd, weight, dweight, dbias, sum_g, sum_gh);
}

void DSC_K(nn_norm_grad)(int64_t n, const dsc_f32 *dy, const dsc_f32 *x, float mean, float rstd, const dsc_f32 *weight,
                         float mean_g, float mean_gh, dsc_f32 *dx)
{
    if (weight == NULL) {
        EACH for (int64_t i = 0; i < n; i++) dx[i] = rstd * (dy[i] - mean_g - (x[i] - mean) * rstd * mean_gh);
    } else {
        EACH for (int64_t i = 0; i < n; i++) dx[i] =
            rstd * (dy[i] * weight[i] - mean_g - (x[i] - mean) * rstd * mean_gh);
    }
}
