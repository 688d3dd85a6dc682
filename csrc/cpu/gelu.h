/*
 * GELU(x) = x Phi(x) and its derivative, without a division or an exponential. Phi(-|x|) and the derivative at -|x| are
 * piecewise polynomials in 16 pieces, whose coefficients are looked up in a register. Positive x follow by symmetry:
 * Phi(x) + Phi(-x) = 1, and the derivatives at x and -x add up to 1. The error of GELU(x) is at most 3e-7 relative for
 * |x| < 4 and 3e-7 absolute elsewhere; the error of the derivative is at most 1e-7 absolute.
 */
#ifndef DSC_CPU_GELU_H
#define DSC_CPU_GELU_H

#include "cpu/math.h"
#include "cpu/wide.h"

#define DSC_GELU_DEGREE 7
#define DSC_GELU_WIDTH 0.4375f
#define DSC_GELU_PIECES_OF_1 2.28571429f /* 1 / DSC_GELU_WIDTH */
/* The last piece, whose coefficients are 0, starts below it and ends above. */
#define DSC_GELU_LIMIT 6.5625f

#define DSC_GELU_TABLE(name, ...) static const DSC_ALIGNED float name[DSC_GELU_DEGREE + 1][DSC_ENTRIES] = {__VA_ARGS__};
#include "cpu/gelu.inc"
#undef DSC_GELU_TABLE

/*
 * t is |x|, at most DSC_GELU_LIMIT; then the piece of t, and the distance r from the middle of the piece. A NaN in x is
 * a NaN in t and r.
 */
struct gelu_piece {
    wide t;
    wide r;
    wide_ints index;
};

static inline struct gelu_piece dsc_gelu_piece(wide x)
{
    wide t = dsc_wide_min(dsc_wide_all(DSC_GELU_LIMIT), dsc_wide_abs(x));
    wide shifted = dsc_wide_fma(t, dsc_wide_all(DSC_GELU_PIECES_OF_1), dsc_wide_all(ROUNDER));
    wide n = dsc_wide_all(ROUNDER) - shifted;

    return (struct gelu_piece){t, dsc_wide_fma(n, dsc_wide_all(DSC_GELU_WIDTH), t), (wide_ints)shifted};
}

static inline wide dsc_gelu_polynomial(const float table[DSC_GELU_DEGREE + 1][DSC_ENTRIES], struct gelu_piece piece)
{
    wide p = dsc_wide_lookup(table[DSC_GELU_DEGREE], piece.index);

#pragma GCC unroll 8
    for (int k = DSC_GELU_DEGREE - 1; k >= 0; k--)
        p = dsc_wide_fma(p, piece.r, dsc_wide_lookup(table[k], piece.index));
    return p;
}

/* As in torch, the result is inf for inf and NaN for -inf: an overflow is not hidden. */
static inline wide dsc_gelu_of(wide x, struct gelu_piece piece)
{
    wide tail = dsc_gelu_polynomial(dsc_gelu_tail, piece);

    return x * dsc_wide_where_less(x, (wide){0}, tail, 1.0f - tail);
}

static inline wide dsc_gelu_slope_of(wide x, struct gelu_piece piece)
{
    wide below = dsc_gelu_polynomial(dsc_gelu_slope, piece);

    return dsc_wide_where_less(x, (wide){0}, below, 1.0f - below);
}

#endif
