/*
 * dsc/quant.h on any bit patterns: codes read back as what the single pass gives, scales are normal numbers or NaN, and
 * wild sizes are refused.
 */
#include "fuzz.h"

#include "base/half.h"
#include "dsc/quant.h"

#include <math.h>

#define MAX_ROWS 4
#define MAX_COLS 80
#define MAX_ELEMS (MAX_ROWS * MAX_COLS)

static float value_at(const void *data, dsc_dtype dtype, int64_t i)
{
    uint16_t half;
    float value;

    if (dtype == DSC_DTYPE_F32) {
        memcpy(&value, (const char *)data + 4 * i, sizeof value);
        return value;
    }
    memcpy(&half, (const char *)data + 2 * i, sizeof half);
    return dtype == DSC_DTYPE_BF16 ? dsc_bf16_to_f32(half) : dsc_f16_to_f32(half);
}

static void fuzz_rows(struct input *input)
{
    uint8_t x[4 * MAX_ELEMS], y[4 * MAX_ELEMS], back[4 * MAX_ELEMS], codes[MAX_ROWS * (MAX_COLS + 8)];
    float scales[MAX_ELEMS];
    int8_t zeros[MAX_ELEMS];
    uint8_t flags = take_byte(input);
    struct dsc_quant call = {.n_rows = take_below(input, MAX_ROWS + 1),
                             .n_cols = take_below(input, MAX_COLS + 1),
                             .dtype = (dsc_dtype)take_below(input, DSC_DTYPE_COUNT),
                             .format = (dsc_quant_format)take_below(input, DSC_QUANT_FORMAT_COUNT),
                             .group = 1 + take_below(input, MAX_COLS + 8),
                             .is_symmetric = flags & 1,
                             .is_stochastic = flags & 2,
                             .scale_type = (dsc_quant_scale)(flags >> 2 & 3),
                             .seed = flags,
                             .offset = take_below(input, 100),
                             .x = x,
                             .y = y,
                             .codes = codes,
                             .scales = scales,
                             .zero_points = zeros};
    int64_t n_groups = call.n_rows * dsc_quant_n_groups(call.n_cols, call.group);

    for (size_t i = 0; i < sizeof x; i++)
        x[i] = take_byte(input);
    if (dsc_quant_quantize(&call, NULL) != DSC_OK) {
        REQUIRE(!call.is_symmetric);
        return;
    }
    REQUIRE(dsc_quant_fake(&call, NULL) == DSC_OK);
    for (int64_t g = 0; g < n_groups; g++)
        REQUIRE(isnan(scales[g]) || (scales[g] >= 0x1p-100f && isfinite(scales[g])));
    call.y = back;
    REQUIRE(dsc_quant_dequantize(&call, NULL) == DSC_OK);
    for (int64_t i = 0; i < call.n_rows * call.n_cols; i++) {
        float once = value_at(y, call.dtype, i), twice = value_at(back, call.dtype, i);

        REQUIRE(once == twice || (isnan(once) && isnan(twice)));
    }
}

static void fuzz_wild(struct input *input)
{
    float number = 0.0f;
    int64_t n_rows = take_wild(input), n_cols = take_wild(input), group = take_wild(input);
    struct dsc_quant call = {.n_rows = n_rows, .n_cols = n_cols, .group = group, .is_symmetric = true, .x = &number, .y = &number,
                             .codes = &number, .scales = &number};

    REQUIRE(dsc_quant_n_groups(n_cols, group) >= 0);
    REQUIRE(dsc_quant_row_bytes(DSC_QUANT_FORMAT_int8, n_cols) >= 0);
    /* More elements than memory: only calls that are refused by their sizes. */
    if (n_rows >= 0 && n_cols >= 0 && group > 0 && (n_cols == 0 || n_rows <= INT64_MAX / 4 / n_cols))
        return;
    REQUIRE(dsc_quant_fake(&call, NULL) != DSC_OK);
    REQUIRE(dsc_quant_quantize(&call, NULL) != DSC_OK);
    REQUIRE(dsc_quant_dequantize(&call, NULL) != DSC_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};

    if (take_byte(&input) % 4 == 0)
        fuzz_wild(&input);
    else
        fuzz_rows(&input);
    return 0;
}
