/*
 * Sums in f64 whose order is part of the function: element i is added to lane i % LANES, and the lanes are folded in
 * halves. Every instruction set gives the same bits, however many lanes its registers hold. Written with vector types
 * because the compiler, left alone, keeps the lanes in memory (five times slower).
 */
#ifndef DSC_CPU_LANES_H
#define DSC_CPU_LANES_H

#include "cpu/table.h"

#include <string.h>

#define LANES 16

#if defined(__AVX512F__)
#define REGISTER_LANES 8
#elif defined(__AVX__)
#define REGISTER_LANES 4
#else
#define REGISTER_LANES 2
#endif
#define REGISTERS (LANES / REGISTER_LANES)

typedef float floats __attribute__((vector_size(4 * REGISTER_LANES)));
typedef double doubles __attribute__((vector_size(8 * REGISTER_LANES)));

static inline doubles dsc_load_wide(const dsc_f32 *src)
{
    floats x;

    memcpy(&x, src, sizeof x);
    return __builtin_convertvector(x, doubles);
}

static inline double dsc_fold(double lanes[LANES])
{
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

#endif
