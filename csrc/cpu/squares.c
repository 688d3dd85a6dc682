/* Compiled once per instruction set: exact sums of squares of blocks of f32, by two sums in f64 without rounding. */
#include "base/half.h"
#include "cpu/lanes.h"

typedef int64_t longs __attribute__((vector_size(8 * REGISTER_LANES)));

void DSC_K(square_range_f32)(int64_t n, const dsc_f32 *restrict src, int32_t *least, int32_t *most)
{
    uint32_t low = UINT32_MAX;
    uint32_t high = 0;

    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = dsc_f32_bits(src[i]) & 0x7fffffffu;
        uint32_t less = bits - 1; /* a zero becomes the largest number */

        low = less < low ? less : low;
        high = bits > high ? bits : high;
    }
    *least = low < INT32_MAX ? (int32_t)low + 1 : INT32_MAX;
    *most = (int32_t)high;
}

void DSC_K(split_f32)(int64_t n, const dsc_f32 *src, int32_t floor, dsc_f32 *restrict high, dsc_f32 *low)
{
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = dsc_f32_bits(src[i]);
        uint32_t is_high = (int32_t)(bits & 0x7fffffffu) >= floor ? UINT32_MAX : 0;

        high[i] = dsc_f32_from_bits(bits & is_high);
        low[i] = dsc_f32_from_bits(bits & ~is_high);
    }
}

/*
 * A sum in f64 that begins at 1.5 * 2^52 units stays between 2^52 and 2^53 units, where it can hold exactly the whole
 * numbers of units. So an addition splits a square: the sum takes the part in whole units, and the rest, which is at
 * most a unit, is exact too.
 */
struct squares {
    doubles coarse[REGISTERS];
    doubles fine[REGISTERS];
};

static inline void add_squares(struct squares *squares, int r, doubles x)
{
    doubles before = squares->coarse[r];
    doubles after = dsc_add_product(before, x, x);

    squares->coarse[r] = after;
    squares->fine[r] += dsc_add_product(before - after, x, x);
}

/* Sum over all lanes of a sum that began at `begin`, in its units. */
static int64_t units_of(const doubles sums[REGISTERS], double begin)
{
    longs total = {0};
    int64_t units = 0;
    int64_t begin_bits;

    memcpy(&begin_bits, &begin, sizeof begin_bits);
    for (int r = 0; r < REGISTERS; r++)
        total += (longs)sums[r] - begin_bits;
    for (int lane = 0; lane < REGISTER_LANES; lane++)
        units += total[lane];
    return units;
}

/* 2^exponent, a normal number. */
static double power_of_two(int exponent)
{
    uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double power;

    memcpy(&power, &bits, sizeof power);
    return power;
}

void DSC_K(square_sums_f32)(int64_t n, const dsc_f32 *restrict src, int32_t top, int64_t sums[2])
{
    double coarse = 1.5 * power_of_two(52 + 2 * top + DSC_SQUARES_COARSE);
    double fine = 1.5 * power_of_two(52 + 2 * top + DSC_SQUARES_FINE);
    struct squares squares;
    int64_t i = 0;

    for (int r = 0; r < REGISTERS; r++) {
        squares.coarse[r] = coarse - (doubles){0};
        squares.fine[r] = fine - (doubles){0};
    }
    for (; i + LANES <= n; i += LANES)
        for (int r = 0; r < REGISTERS; r++)
            add_squares(&squares, r, dsc_load_wide(src + i + r * REGISTER_LANES));
    if (i < n) {
        dsc_f32 rest[LANES] = {0};

        memcpy(rest, src + i, (size_t)(n - i) * sizeof *rest);
        for (int r = 0; r < REGISTERS; r++)
            add_squares(&squares, r, dsc_load_wide(rest + r * REGISTER_LANES));
    }
    sums[0] = units_of(squares.coarse, coarse);
    sums[1] = units_of(squares.fine, fine);
}
