/* base/half.h on raw bits: narrowing gives a neighbour that is at least as near as the next ones, widening and narrowing again changes nothing. */
#include "fuzz.h"

#include "base/half.h"

#include <math.h>

static void check(float value, uint16_t half, float (*widen)(uint16_t), uint16_t (*narrow)(float), uint32_t infinity)
{
    float wide = widen(half);
    uint16_t magnitude = half & 0x7fff;

    REQUIRE(isnan(value) == isnan(wide));
    REQUIRE(isnan(value) == (magnitude > infinity));
    REQUIRE((half >> 15) == (signbit(value) != 0));
    if (isnan(value))
        return;
    REQUIRE(narrow(wide) == half);
    if (isinf(value)) {
        REQUIRE(magnitude == infinity);
        return;
    }
    /* inf stands for the power of two above the largest number when distances are measured. */
    double exact = fabs((double)value);
    double largest = (double)widen((uint16_t)(infinity - 1));
    double beyond = ldexp(1.0, ilogb(largest) + 1);
    double got = magnitude == infinity ? beyond : fabs((double)wide);
    double above = magnitude >= infinity ? INFINITY : magnitude + 1u == infinity ? beyond : (double)widen((uint16_t)(magnitude + 1));
    double below = magnitude == 0 ? -INFINITY : (double)widen((uint16_t)(magnitude - 1));

    if (exact > beyond)
        return;
    REQUIRE(fabs(got - exact) <= fabs(above - exact) && fabs(got - exact) <= fabs(below - exact));
    if (fabs(got - exact) == fabs(above - exact) || fabs(got - exact) == fabs(below - exact))
        REQUIRE(magnitude % 2 == 0); /* ties to even */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    for (size_t i = 0; i + 4 <= n_bytes; i += 4) {
        uint32_t bits;

        memcpy(&bits, data + i, sizeof bits);

        float value = dsc_f32_from_bits(bits);

        check(value, dsc_f32_to_bf16(value), dsc_bf16_to_f32, dsc_f32_to_bf16, 0x7f80);
        check(value, dsc_f32_to_f16(value), dsc_f16_to_f32, dsc_f32_to_f16, 0x7c00);
    }
    return 0;
}
