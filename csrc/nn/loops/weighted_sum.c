/*
 * Compiled once per instruction set: a weighted sum of rows. The sums of a few registers stay in registers while the
 * rows go by, and elements are converted there, so that each element is read once and written once.
 */
#include "cpu/wide.h"
#include "nn/table.h"

#define INLINE static inline __attribute__((always_inline))

/* Registers of sums: enough independent additions to hide the latency of one. */
#define SUMS 4

/* The rows of a sum. After inlining, dtype and whether there are weights are constants. */
struct summed {
    dsc_dtype dtype;
    const void *rows;
    int64_t stride;
    int64_t k;
    const int64_t *places;
    const float *weights;
};

/* n_registers registers from element i on; the last has n_last elements. */
INLINE void sum_some(const struct summed *from, void *y, int64_t i, int n_registers, int64_t n_last)
{
    wide totals[SUMS] = {{0}};
    bool is_first = true;

    for (int64_t j = 0; j < from->k; j++) {
        if (from->places[j] < 0)
            continue;

        int64_t begin = from->places[j] * from->stride + i;
        float weight = from->weights == NULL ? 1.0f : from->weights[j];

#pragma GCC unroll 4
        for (int r = 0; r < n_registers; r++) {
            int64_t n = r + 1 < n_registers ? WIDE_LANES : n_last;
            wide term = weight * dsc_wide_load_as(from->dtype, from->rows, begin + r * WIDE_LANES, n);

            totals[r] = is_first ? term : totals[r] + term; /* 0 + -0 would be 0 */
        }
        is_first = false;
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_registers; r++)
        dsc_wide_store_as(from->dtype, totals[r], y, i + r * WIDE_LANES, r + 1 < n_registers ? WIDE_LANES : n_last);
}

INLINE void sum_row(int64_t n, struct summed from, void *y)
{
    int64_t i = 0;

    for (; i + SUMS * WIDE_LANES <= n; i += SUMS * WIDE_LANES)
        sum_some(&from, y, i, SUMS, WIDE_LANES);
    for (; i + WIDE_LANES <= n; i += WIDE_LANES)
        sum_some(&from, y, i, 1, WIDE_LANES);
    if (i < n)
        sum_some(&from, y, i, 1, n - i);
}

#define SUM(dtype, weights) sum_row(n, (struct summed){dtype, rows, stride, k, places, weights}, y)

void DSC_K(nn_weighted_sum)(int64_t n, dsc_dtype dtype, const void *rows, int64_t stride, int64_t k,
                            const int64_t *places, const float *weights, void *y)
{
    if (weights == NULL)
        WITH_DTYPE(dtype, SUM, NULL);
    else
        WITH_DTYPE(dtype, SUM, weights);
}
