/* Compiled once per instruction set: one block of the divergence of two distributions, and its gradient. */
#include "nn/loops/sums.h"
#include "nn/table.h"

#define INLINE static inline __attribute__((always_inline))

/* Logarithms are not below this one, so that their differences are numbers. */
#define LEAST_LOG (-1e30f)

/* The kinds of divergence. After inlining this is a constant. */
enum kind { MIXTURE, FORWARD, REVERSE };

/* Runs call(kind, ...), with a constant for the kind. */
#define WITH_KIND(beta, call, ...)      \
    do {                                \
        if ((beta) == 0.0f)             \
            call(FORWARD, __VA_ARGS__); \
        else if ((beta) == 1.0f)        \
            call(REVERSE, __VA_ARGS__); \
        else                            \
            call(MIXTURE, __VA_ARGS__); \
    } while (0)

/* Both probabilities of some elements, and the logarithms of their ratios to the mixture (or to one another). */
struct terms {
    wide p;
    wide q;
    wide log_p;
    wide log_q;
};

/*
 * With d = log(p / q) and e = exp(-|d|), the mixture is in proportion to the larger of p and q, so nothing overflows:
 *   m / q = (1 - beta) + beta e  where p < q,   m / p = beta + (1 - beta) e  elsewhere
 */
INLINE struct terms terms_of(enum kind kind, const dsc_f32 *student, const dsc_f32 *teacher,
                             const struct dsc_nn_divergence_row *row, float beta, int64_t i, int64_t n)
{
    wide b = (dsc_wide_load(student + i, n) - row->student_max) - row->student_log_sum;
    wide a = (dsc_wide_load(teacher + i, n) - row->teacher_max) - row->teacher_log_sum;
    struct terms found = {dsc_wide_exp_nonpositive(a), dsc_wide_exp_nonpositive(b), a - b, b - a};

    if (kind == MIXTURE) {
        const wide zero = {0};
        wide d = dsc_wide_max(dsc_wide_all(LEAST_LOG), a) - dsc_wide_max(dsc_wide_all(LEAST_LOG), b);
        wide e = dsc_wide_exp_nonpositive(-dsc_wide_abs(d));
        wide of_less = dsc_wide_where_less(d, zero, dsc_wide_all(beta), dsc_wide_all(1.0f - beta));
        wide of_more = dsc_wide_where_less(d, zero, dsc_wide_all(1.0f - beta), dsc_wide_all(beta));
        /* The second form is exactly 1 where p is q; the first is exact to a unit where e is small. */
        wide ratio = dsc_wide_where_less(e, dsc_wide_all(0.5f), dsc_wide_fma(of_less, e, of_more),
                                         dsc_wide_fma(of_less, e - 1.0f, dsc_wide_all(1.0f)));
        wide log = dsc_wide_log(ratio);

        found.log_p = dsc_wide_where_less(d, zero, d - log, -log);
        found.log_q = dsc_wide_where_less(d, zero, -log, -log - d);
    }
    return found;
}

/* weight * log; the weight itself (0 or NaN) where it is not positive, even if the logarithm is infinite. */
INLINE wide weighted(wide weight, wide log)
{
    return dsc_wide_where_less((wide){0}, weight, weight * log, weight);
}

INLINE void divergence_row(enum kind kind, int64_t n, const dsc_f32 *student, const dsc_f32 *teacher,
                           const struct dsc_nn_divergence_row *row, float beta, double *of_teacher, double *of_student)
{
    double p_lanes[LANES];
    double q_lanes[LANES];
    doubles p_sums[REGISTERS] = {0};
    doubles q_sums[REGISTERS] = {0};
    int64_t i = 0;

    for (; i + SUMMED * LANES <= n; i += SUMMED * LANES) {
#pragma GCC unroll 4
        for (int r = 0; r < LANE_REGISTERS; r++) {
            wide p[SUMMED];
            wide q[SUMMED];

#pragma GCC unroll 4
            for (int k = 0; k < SUMMED; k++) {
                struct terms found =
                    terms_of(kind, student, teacher, row, beta, i + k * LANES + r * WIDE_LANES, WIDE_LANES);

                p[k] = weighted(found.p, found.log_p);
                q[k] = weighted(found.q, found.log_q);
            }
            if (kind != REVERSE)
                dsc_add_lanes((p[0] + p[1]) + (p[2] + p[3]), r, p_sums);
            if (kind != FORWARD)
                dsc_add_lanes((q[0] + q[1]) + (q[2] + q[3]), r, q_sums);
        }
    }
    memcpy(p_lanes, p_sums, sizeof p_lanes);
    memcpy(q_lanes, q_sums, sizeof q_lanes);
    for (; i < n; i += WIDE_LANES) {
        int64_t n_here = n - i < WIDE_LANES ? n - i : WIDE_LANES;
        struct terms found = terms_of(kind, student, teacher, row, beta, i, n_here);
        wide p = weighted(found.p, found.log_p);
        wide q = weighted(found.q, found.log_q);

        for (int64_t lane = 0; lane < n_here; lane++) {
            p_lanes[(i + lane) % LANES] += kind == REVERSE ? 0.0 : (double)p[lane];
            q_lanes[(i + lane) % LANES] += kind == FORWARD ? 0.0 : (double)q[lane];
        }
    }
    *of_teacher += dsc_fold(p_lanes);
    *of_student += dsc_fold(q_lanes);
}

void DSC_K(nn_divergence)(int64_t n, const dsc_f32 *student, const dsc_f32 *teacher,
                          const struct dsc_nn_divergence_row *row, float beta, double *of_teacher, double *of_student)
{
    WITH_KIND(beta, divergence_row, n, student, teacher, row, beta, of_teacher, of_student);
}

/* The derivative of the loss with respect to q is log(q / m) but for a constant, times 1 - beta for a mixture. */
INLINE void grad_step(enum kind kind, const dsc_f32 *student, const dsc_f32 *teacher,
                      const struct dsc_nn_divergence_row *row, float beta, float factor, dsc_f32 *dx, int64_t i,
                      int64_t n)
{
    struct terms found = terms_of(kind, student, teacher, row, beta, i, n);
    wide gradient = kind == FORWARD ? found.q - found.p : weighted(found.q, found.log_q - row->of_student);

    dsc_wide_store(factor * gradient, dx + i, n);
}

#define GRAD(kind, n, ...) EACH_WIDE(n, grad_step, kind, __VA_ARGS__)

void DSC_K(nn_divergence_grad)(int64_t n, const dsc_f32 *student, const dsc_f32 *teacher,
                               const struct dsc_nn_divergence_row *row, float beta, float factor, dsc_f32 *dx)
{
    WITH_KIND(beta, GRAD, n, student, teacher, row, beta,
              beta == 0.0f || beta == 1.0f ? factor : (1.0f - beta) * factor, dx);
}
