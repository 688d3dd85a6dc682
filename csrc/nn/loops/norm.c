/* Compiled once per instruction set: the moments of a row, and what norms make of them. */
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
            squares[r] += wide * wide;
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
            sums[r] += dsc_load_wide(a + i + r * REGISTER_LANES) * dsc_load_wide(b + i + r * REGISTER_LANES);
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

/* The sums of one row, and what it adds to those of the columns, where they are wanted. */
void DSC_K(nn_norm_sums)(int64_t n, const dsc_f32 *restrict dy, const dsc_f32 *restrict x, float mean, float rstd,
                         const dsc_f32 *restrict weight, dsc_f32 *restrict dweight, dsc_f32 *restrict dbias,
                         double *sum_g, double *sum_gh)
{
    doubles g_sums[REGISTERS] = {0};
    doubles gh_sums[REGISTERS] = {0};
    double g_lanes[LANES];
    double gh_lanes[LANES];
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        dsc_f32 g[LANES];
        dsc_f32 gh[LANES];

        for (int lane = 0; lane < LANES; lane++) {
            g[lane] = weight == NULL ? dy[i + lane] : dy[i + lane] * weight[i + lane];
            gh[lane] = g[lane] * ((x[i + lane] - mean) * rstd);
        }
        for (int r = 0; r < REGISTERS; r++) {
            g_sums[r] += dsc_load_wide(g + r * REGISTER_LANES);
            gh_sums[r] += dsc_load_wide(gh + r * REGISTER_LANES);
        }
    }
    memcpy(g_lanes, g_sums, sizeof g_lanes);
    memcpy(gh_lanes, gh_sums, sizeof gh_lanes);
    for (int lane = 0; i < n; i++, lane++) {
        float g = weight == NULL ? dy[i] : dy[i] * weight[i];

        g_lanes[lane] += (double)g;
        gh_lanes[lane] += (double)(g * ((x[i] - mean) * rstd));
    }
    *sum_g += dsc_fold(g_lanes);
    *sum_gh += dsc_fold(gh_lanes);
    if (dweight != NULL)
        for (i = 0; i < n; i++)
            dweight[i] += dy[i] * ((x[i] - mean) * rstd);
    if (dbias != NULL)
        for (i = 0; i < n; i++)
            dbias[i] += dy[i];
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
