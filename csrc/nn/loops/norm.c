/*
 * Compiled once per instruction set: the moments of a row, the norms computed from them, and their gradients. Elements
 * are converted in registers: rows that are widened into memory first do not fit the first-level cache.
 */
#include "nn/loops/sums.h"
#include "nn/table.h"

#define INLINE static inline __attribute__((always_inline))

/* Returns n elements of x + residual from element i on, after they are rounded and written to total. */
INLINE wide enter(dsc_dtype dtype, const void *x, const void *residual, void *total, int64_t i, int64_t n)
{
    wide loaded = dsc_wide_load_as(dtype, x, i, n);

    if (residual == NULL)
        return loaded;
    dsc_wide_store_as(dtype, loaded + dsc_wide_load_as(dtype, residual, i, n), total, i, n);
    return dsc_wide_load_as(dtype, total, i, n);
}

/* Elements past n are 0 and add nothing. */
INLINE void moments_step(dsc_dtype dtype, const void *x, const void *residual, void *total, const void *y,
                         doubles sums[REGISTERS], doubles squares[REGISTERS], int64_t i, int64_t n)
{
    if (residual == NULL) /* otherwise this pass writes, too, and has enough lines to wait for */
        dsc_wide_expect_store(dtype, y, i);
#pragma GCC unroll 4
    for (int r = 0; r < LANE_REGISTERS; r++) {
        doubles halves[2];

        dsc_widen_halves(enter(dtype, x, residual, total, i + r * WIDE_LANES, dsc_lanes_left(n, r * WIDE_LANES)),
                         halves);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            sums[2 * r + half] += halves[half];
            squares[2 * r + half] = dsc_add_product(squares[2 * r + half], halves[half], halves[half]);
        }
    }
}

INLINE void moments_row(dsc_dtype dtype, int64_t n, const void *x, const void *residual, void *total, const void *y,
                        double *sum, double *sumsq)
{
    doubles sums[REGISTERS] = {0};
    doubles squares[REGISTERS] = {0};
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES)
        moments_step(dtype, x, residual, total, y, sums, squares, i, LANES);
    if (i < n)
        moments_step(dtype, x, residual, total, y, sums, squares, i, n - i);
    dsc_add_sum(sums, sum);
    dsc_add_sum(squares, sumsq);
}

void DSC_K(nn_moments)(int64_t n, dsc_dtype dtype, const void *x, const void *residual, void *total, const void *y,
                       double *sum, double *sumsq)
{
    if (residual == NULL)
        WITH_DTYPE(dtype, moments_row, n, x, NULL, NULL, y, sum, sumsq);
    else
        WITH_DTYPE(dtype, moments_row, n, x, residual, total, y, sum, sumsq);
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

INLINE void norm_step(dsc_dtype weight_dtype, dsc_dtype dtype, const void *x, float mean, float rstd,
                      const void *weight, const void *bias, void *y, int64_t i, int64_t n)
{
    wide found = (dsc_wide_load_as(dtype, x, i, n) - mean) * rstd;

    if (weight != NULL)
        found *= dsc_wide_load_as(weight_dtype, weight, i, n);
    if (bias != NULL)
        found += dsc_wide_load_as(weight_dtype, bias, i, n);
    dsc_wide_store_as(dtype, found, y, i, n);
}

INLINE void norm_row(dsc_dtype dtype, int64_t n, const void *x, float mean, float rstd, dsc_dtype weight_dtype,
                     const void *weight, const void *bias, void *y)
{
    WITH_DTYPE(weight_dtype, EACH_WIDE_AS, n, norm_step, dtype, x, mean, rstd, weight, bias, y);
}

void DSC_K(nn_norm)(int64_t n, dsc_dtype dtype, const void *x, float mean, float rstd, dsc_dtype weight_dtype,
                    const void *weight, const void *bias, void *y)
{
    WITH_DTYPE(dtype, norm_row, n, x, mean, rstd, weight_dtype, weight, bias, y);
}

/* The terms of a row's gradients. After inlining, the dtypes are constants. */
struct terms {
    dsc_dtype dtype;
    dsc_dtype weight_dtype;
    const void *dy;
    const void *x;
    float mean;
    float rstd;
    const void *weight;
};

struct term {
    wide dy;
    wide h;
    wide g;
};

INLINE struct term term_of(const struct terms *from, int64_t i, int64_t n)
{
    wide dy = dsc_wide_load_as(from->dtype, from->dy, i, n);

    return (struct term){
        .dy = dy,
        .h = (dsc_wide_load_as(from->dtype, from->x, i, n) - from->mean) * from->rstd,
        .g = from->weight == NULL ? dy : dy * dsc_wide_load_as(from->weight_dtype, from->weight, i, n),
    };
}

INLINE void add_to(wide x, float *dst, int64_t i, int64_t n)
{
    dsc_f32 *at = (dsc_f32 *)dst + i;

    dsc_wide_store(dsc_wide_load(at, n) + x, at, n);
}

/* The sums of a row: g and g * h. Elements past n are 0 and add nothing. */
struct row_sums {
    doubles g[REGISTERS];
    doubles gh[REGISTERS];
};

/* n_summed is 1 or SUMMED, n is n_summed * LANES or, with 1, the rest of the row. */
INLINE void sums_step(const struct terms *from, int n_summed, float *dweight, float *dbias, const void *dx,
                      struct row_sums *sums, int64_t i, int64_t n)
{
#pragma GCC unroll 4
    for (int r = 0; r < LANE_REGISTERS; r++) {
        wide g[SUMMED];
        wide gh[SUMMED];

#pragma GCC unroll 4
        for (int k = 0; k < n_summed; k++) {
            int64_t offset = k * LANES + r * WIDE_LANES;
            int64_t n_here = dsc_lanes_left(n, offset);
            struct term found = term_of(from, i + offset, n_here);

            if (r == 0)
                dsc_wide_expect_store(from->dtype, dx, i + offset);
            g[k] = found.g;
            gh[k] = found.g * found.h;
            if (dweight != NULL)
                add_to(found.dy * found.h, dweight, i + offset, n_here);
            if (dbias != NULL)
                add_to(found.dy, dbias, i + offset, n_here);
        }
        dsc_add_lanes(n_summed == 1 ? g[0] : (g[0] + g[1]) + (g[2] + g[3]), r, sums->g);
        dsc_add_lanes(n_summed == 1 ? gh[0] : (gh[0] + gh[1]) + (gh[2] + gh[3]), r, sums->gh);
    }
}

INLINE void sums_row(dsc_dtype weight_dtype, int64_t n, struct terms from, float *dweight, float *dbias, const void *dx,
                     double *sum_g, double *sum_gh)
{
    struct row_sums sums = {{{0}}, {{0}}};
    int64_t i = 0;

    from.weight_dtype = weight_dtype;
    for (; i + SUMMED * LANES <= n; i += SUMMED * LANES)
        sums_step(&from, SUMMED, dweight, dbias, dx, &sums, i, SUMMED * LANES);
    for (; i + LANES <= n; i += LANES)
        sums_step(&from, 1, dweight, dbias, dx, &sums, i, LANES);
    if (i < n)
        sums_step(&from, 1, dweight, dbias, dx, &sums, i, n - i);
    dsc_add_sum(sums.g, sum_g);
    dsc_add_sum(sums.gh, sum_gh);
}

INLINE void sums_row_as(dsc_dtype dtype, int64_t n, struct terms from, float *dweight, float *dbias, const void *dx,
                        double *sum_g, double *sum_gh)
{
    dsc_dtype weight_dtype = from.weight_dtype;

    from.dtype = dtype;
    WITH_DTYPE(weight_dtype, sums_row, n, from, dweight, dbias, dx, sum_g, sum_gh);
}

void DSC_K(nn_norm_sums)(int64_t n, dsc_dtype dtype, const void *dy, const void *x, float mean, float rstd,
                         dsc_dtype weight_dtype, const void *weight, float *dweight, float *dbias, const void *dx,
                         double *sum_g, double *sum_gh)
{
    struct terms from = {dtype, weight_dtype, dy, x, mean, rstd, weight};

    WITH_DTYPE(dtype, sums_row_as, n, from, dweight, dbias, dx, sum_g, sum_gh);
}

INLINE void grad_step(dsc_dtype weight_dtype, dsc_dtype dtype, const struct terms *given, float mean_g, float mean_gh,
                      const void *dsum, void *dx, int64_t i, int64_t n)
{
    struct terms from = *given;

    from.dtype = dtype;
    from.weight_dtype = weight_dtype;

    struct term term = term_of(&from, i, n);
    wide found = from.rstd * (term.g - mean_g - term.h * mean_gh);

    if (dsum != NULL)
        found += dsc_wide_load_as(dtype, dsum, i, n);
    dsc_wide_store_as(dtype, found, dx, i, n);
}

INLINE void grad_row(dsc_dtype dtype, int64_t n, const struct terms *from, float mean_g, float mean_gh,
                     const void *dsum, void *dx)
{
    WITH_DTYPE(from->weight_dtype, EACH_WIDE_AS, n, grad_step, dtype, from, mean_g, mean_gh, dsum, dx);
}

void DSC_K(nn_norm_grad)(int64_t n, dsc_dtype dtype, const void *dy, const void *x, float mean, float rstd,
                         dsc_dtype weight_dtype, const void *weight, float mean_g, float mean_gh, const void *dsum,
                         void *dx)
{
    struct terms from = {dtype, weight_dtype, dy, x, mean, rstd, weight};

    WITH_DTYPE(dtype, grad_row, n, &from, mean_g, mean_gh, dsum, dx);
}
