/*
 * Sums in f64 of registers of f32, with the lanes of cpu/lanes.h. A few elements of a lane are summed in f32 before the
 * sum is widened, because a widening costs as much as four additions.
 */
#ifndef DSC_NN_LOOPS_SUMS_H
#define DSC_NN_LOOPS_SUMS_H

#include "cpu/lanes.h"
#include "cpu/wide.h"

#define SUMMED 4
/* Registers of f32 that hold one element of each lane. Each of them widens to two registers of f64. */
#define LANE_REGISTERS (LANES / WIDE_LANES)

/* Elements of the register at element `at` of the n that are left, for dsc_wide_load: at most WIDE_LANES. */
static inline int64_t dsc_lanes_left(int64_t n, int64_t at)
{
    int64_t left = n - at;

    return left < 0 ? 0 : left < WIDE_LANES ? left : WIDE_LANES;
}

/* The two halves of a register, widened. */
static inline void dsc_widen_halves(wide x, doubles out[2])
{
    floats halves[2];

    memcpy(halves, &x, sizeof halves);
    out[0] = dsc_widen(halves[0]);
    out[1] = dsc_widen(halves[1]);
}

/* Adds register r of the lanes. */
static inline void dsc_add_lanes(wide x, int r, doubles sums[REGISTERS])
{
    doubles halves[2];

    dsc_widen_halves(x, halves);
    sums[2 * r] += halves[0];
    sums[2 * r + 1] += halves[1];
}

/* Adds the sum of all lanes. */
static inline void dsc_add_sum(const doubles sums[REGISTERS], double *sum)
{
    double lanes[LANES];

    memcpy(lanes, sums, sizeof lanes);
    *sum += dsc_fold(lanes);
}

#endif
