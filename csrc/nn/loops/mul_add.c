/*
 * Compiled once per instruction set: the product of small matrices. Every element is one chain of fused operations in
 * the order of k, so its bits do not depend on the width of registers. On processors without fused vector operations,
 * libm's fmaf computes them, slowly.
 */
#include "nn/table.h"

#include <math.h>
#include <string.h>

#if defined(__FMA__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define WIDTH 16
#define ROWS 8
#elif defined(__AVX2__)
#define WIDTH 8
#define ROWS 6
#else
#define WIDTH 4
#define ROWS 4
#endif

typedef float vector __attribute__((vector_size(4 * WIDTH)));

static inline vector fused(float a, vector b, vector c)
{
#if defined(__AVX512F__)
    return (vector)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vector)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)c);
#else
    for (int lane = 0; lane < WIDTH; lane++)
        c[lane] = fmaf(a, b[lane], c[lane]);
    return c;
#endif
}

static inline vector load(const dsc_f32 *from)
{
    vector x;

    memcpy(&x, from, sizeof x);
    return x;
}

static inline void store(vector x, dsc_f32 *to)
{
    memcpy(to, &x, sizeof x);
}

/* Computes one tile of c, in registers. n_rows and n_vectors are constants after inlining. */
static inline __attribute__((always_inline)) void tile(int n_rows, int n_vectors, int64_t k, const dsc_f32 *a,
                                                       int64_t a_row, int64_t a_col, const dsc_f32 *b, int64_t b_row,
                                                       dsc_f32 *c, int64_t c_row)
{
    vector sums[ROWS][2];

#pragma GCC unroll 8
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < n_vectors; v++)
            sums[r][v] = load(c + r * c_row + v * WIDTH);
    for (int64_t i = 0; i < k; i++) {
        vector columns[2];

#pragma GCC unroll 2
        for (int v = 0; v < n_vectors; v++)
            columns[v] = load(b + i * b_row + v * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < n_rows; r++) {
            float factor = a[r * a_row + i * a_col];

#pragma GCC unroll 2
            for (int v = 0; v < n_vectors; v++)
                sums[r][v] = fused(factor, columns[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < n_vectors; v++)
            store(sums[r][v], c + r * c_row + v * WIDTH);
}

static inline __attribute__((always_inline)) void panel(int n_vectors, int64_t m, int64_t k, const dsc_f32 *a,
                                                        int64_t a_row, int64_t a_col, const dsc_f32 *b, int64_t b_row,
                                                        dsc_f32 *c, int64_t c_row)
{
    int64_t row = 0;

    for (; row + ROWS <= m; row += ROWS)
        tile(ROWS, n_vectors, k, a + row * a_row, a_row, a_col, b, b_row, c + row * c_row, c_row);
    for (; row + 2 <= m; row += 2)
        tile(2, n_vectors, k, a + row * a_row, a_row, a_col, b, b_row, c + row * c_row, c_row);
    for (; row < m; row++)
        tile(1, n_vectors, k, a + row * a_row, a_row, a_col, b, b_row, c + row * c_row, c_row);
}

void DSC_K(nn_mul_add)(int64_t m, int64_t n, int64_t k, const dsc_f32 *a, int64_t a_row, int64_t a_col,
                       const dsc_f32 *b, int64_t b_row, dsc_f32 *c, int64_t c_row)
{
    int64_t column = 0;

    for (; column + 2 * WIDTH <= n; column += 2 * WIDTH)
        panel(2, m, k, a, a_row, a_col, b + column, b_row, c + column, c_row);
    for (; column < n; column += WIDTH)
        panel(1, m, k, a, a_row, a_col, b + column, b_row, c + column, c_row);
}
