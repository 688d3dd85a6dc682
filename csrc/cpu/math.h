/*
 * Elementary functions of f32, without branches, so that a loop around one vectorises on every instruction set with the
 * same bits. The polynomials are Chebyshev fits of our own; errors are bounds over the whole range. Fused operations
 * are written out explicitly: on a processor without them libm computes them, slowly.
 */
#ifndef DSC_CPU_MATH_H
#define DSC_CPU_MATH_H

#include "base/half.h"

#include <math.h>

/* Two arrays of one loop are identical or do not overlap, so no element depends on an earlier one. */
#define EACH _Pragma("GCC ivdep")

#define LOG2_E 1.44269504f
/* ln 2 in two parts. The first part has 15 bits, so that its products with small integers are exact. */
#define LN2_HIGH 0.693145752f
#define LN2_LOW 1.42860677e-6f
/* If it is added to a number below 2^22, the low bits of the sum are the nearest integer. */
#define ROUNDER 12582912.0f
/* ROUNDER plus the bias of the exponent: the low bits of the sum, shifted into place, are the exponent of a float. */
#define EXPONENT_ROUNDER (ROUNDER + 127.0f)
/* For smaller arguments, exp is not a normal f32. */
#define MIN_EXPONENT (-87.3f)

/*
 * exp(x) for x <= 0, within 2 units in the last place; 0 instead of a subnormal result; NaN for NaN. The polynomial is
 * within 4e-9 of exp(r), a sixteenth of the rounding error. Below MIN_EXPONENT the computed value is meaningless and is
 * discarded.
 */
static inline float dsc_exp_nonpositive(float x)
{
    float shifted = fmaf(x, LOG2_E, EXPONENT_ROUNDER);
    float n = EXPONENT_ROUNDER - shifted;
    float r = fmaf(n, LN2_LOW, fmaf(n, LN2_HIGH, x));
    float p = 1.38145406e-3f;

    p = fmaf(p, r, 8.36874545e-3f);
    p = fmaf(p, r, 4.1668389e-2f);
    p = fmaf(p, r, 1.66665211e-1f);
    p = fmaf(p, r, 0.49999994f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);

    float power = dsc_f32_from_bits(dsc_f32_bits(shifted) << 23);

    return x < MIN_EXPONENT ? 0.0f : p * power;
}

#endif
