/*
 * base/half.h against a reference that rounds in f64 with ldexp and nearbyint. Covers every half, and the floats at,
 * just below and just above every rounding border.
 */
#include "test.h"

#include "base/half.h"

#include <fenv.h>

struct format {
    const char *name;
    int fraction_bits;
    int min_exponent; /* the smallest normal number is 2^min_exponent */
    uint32_t infinity;
    uint16_t (*narrow)(float);
    float (*widen)(uint16_t);
};

static const struct format formats[] = {
    {"bf16", 7, -126, 0x7f80, dsc_f32_to_bf16, dsc_bf16_to_f32},
    {"f16", 10, -14, 0x7c00, dsc_f32_to_f16, dsc_f16_to_f32},
};

static double reference_widen(const struct format *format, uint16_t half)
{
    uint32_t magnitude = half & 0x7fffu;
    int exponent = (int)(magnitude >> format->fraction_bits);
    double fraction = (double)(magnitude & ((1u << format->fraction_bits) - 1));
    double value;

    if (magnitude > format->infinity)
        return (double)NAN;
    if (magnitude == format->infinity)
        value = INFINITY;
    else if (exponent == 0)
        value = ldexp(fraction, format->min_exponent - format->fraction_bits);
    else
        value = ldexp(ldexp(1.0, format->fraction_bits) + fraction, format->min_exponent - format->fraction_bits + exponent - 1);
    return (half & 0x8000u) != 0 ? -value : value;
}

/* The nearest half, ties to even, for a value that is no NaN. */
static uint16_t reference_narrow(const struct format *format, float value)
{
    double magnitude = fabs((double)value);
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    int exponent;
    double quantum;
    double count; /* in units of the last place */

    if (isinf(value))
        return (uint16_t)(format->infinity | sign);
    frexp(magnitude, &exponent);
    exponent = magnitude == 0.0 || exponent - 1 < format->min_exponent ? format->min_exponent : exponent - 1;
    quantum = ldexp(1.0, exponent - format->fraction_bits);
    count = nearbyint(magnitude / quantum);
    /*
     * The count is added to the exponent field, so that a carry gives the next power of two, and inf after the largest.
     */
    uint32_t bits = ((uint32_t)(exponent - format->min_exponent) << format->fraction_bits) + (uint32_t)count;

    return (uint16_t)((bits > format->infinity ? format->infinity : bits) | sign);
}

static void check_narrow(const struct format *format, uint32_t bits)
{
    float value = dsc_f32_from_bits(bits);
    uint16_t got = format->narrow(value);

    TEST_AT(bits);
    if (isnan(value)) {
        CHECK((got & 0x7fffu) > format->infinity);
        CHECK_EQ(got >> 15, bits >> 31);
    } else {
        CHECK_EQ(got, reference_narrow(format, value));
    }
}

static void check_format(const struct format *format)
{
    TEST_CASE("%s", format->name);
    for (uint32_t half = 0; half < 0x10000; half++) {
        float wide = format->widen((uint16_t)half);
        double wanted = reference_widen(format, (uint16_t)half);

        TEST_AT(half);
        if (isnan(wanted))
            CHECK(isnan(wide));
        else
            CHECK(dsc_f32_bits(wide) == dsc_f32_bits((float)wanted));
        if (isnan(wanted)) {
            CHECK((format->narrow(wide) & 0x7fffu) > format->infinity);
            continue;
        }
        CHECK_EQ(format->narrow(wide), half);

        /* The rounding border between this half and the next one away from zero, and the floats beside the border. */
        uint32_t next = (half & 0x7fffu) + 1;

        if (next > format->infinity)
            continue;

        double upper = next == format->infinity ? ldexp(2.0, format->infinity == 0x7c00 ? 15 : 127) : fabs(reference_widen(format, (uint16_t)next));
        double border = (fabs(wanted) + upper) / 2;
        uint32_t border_bits = dsc_f32_bits((float)border) | (half & 0x8000u) << 16;

        for (int step = -2; step <= 2; step++)
            check_narrow(format, border_bits + (uint32_t)step);
    }
    for (uint64_t bits = 0; bits < UINT64_C(1) << 32; bits += 7919)
        check_narrow(format, (uint32_t)bits);
    static const uint32_t specials[] = {0, 0x80000000, 1, 0x80000001, 0x007fffff, 0x00800000, 0x7f7fffff, 0x7f800000, 0xff800000,
                                        0x7f800001, 0xff800001, 0x7fc00000, 0x7fffffff, 0xffffffff, 0x477fefff, 0x477ff000, 0x477fffff,
                                        0x47800000, 0x33000000, 0x33000001, 0x32ffffff};

    for (size_t i = 0; i < sizeof specials / sizeof specials[0]; i++)
        check_narrow(format, specials[i]);
}

int main(void)
{
    CHECK_EQ(fegetround(), FE_TONEAREST);
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        check_format(&formats[i]);
    return test_finish(__FILE__);
}
