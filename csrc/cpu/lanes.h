/*
 * Sums in a fixed order: element i is added to lane i % DSC_LANES, and the lanes are folded in halves. The order is part of the
 * function's definition, so every instruction set gives the same bits, and the widest one still fills its registers.
 */
#ifndef DSC_CPU_LANES_H
#define DSC_CPU_LANES_H

#define DSC_LANES 16

static inline double dsc_lanes_sum(double sums[DSC_LANES])
{
    for (int half = DSC_LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            sums[lane] += sums[lane + half];
    return sums[0];
}

#endif
