/* Compiled once per instruction set: rotates pairs of elements, each pair by its angle. */
#include "cpu/math.h"
#include "nn/table.h"

void DSC_K(nn_rotate_halves)(int64_t n, const dsc_f32 *x0, const dsc_f32 *x1, const dsc_f32 *cos, const dsc_f32 *sin,
                             float sign, dsc_f32 *y0, dsc_f32 *y1)
{
    EACH for (int64_t i = 0; i < n; i++)
    {
        float s = sign * sin[i];
        float first = x0[i] * cos[i] - x1[i] * s;
        float second = x1[i] * cos[i] + x0[i] * s;

        y0[i] = first;
        y1[i] = second;
    }
}

void DSC_K(nn_rotate_pairs)(int64_t n, const dsc_f32 *x, const dsc_f32 *cos, const dsc_f32 *sin, float sign, dsc_f32 *y)
{
    EACH for (int64_t i = 0; i < n; i++)
    {
        float s = sign * sin[i];
        float first = x[2 * i] * cos[i] - x[2 * i + 1] * s;
        float second = x[2 * i + 1] * cos[i] + x[2 * i] * s;

        y[2 * i] = first;
        y[2 * i + 1] = second;
    }
}
