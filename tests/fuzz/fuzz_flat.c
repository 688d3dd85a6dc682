/* dsc_flat_reduce, dsc_flat_sumsq and dsc_flat_cast on raw bytes as elements: the plain expression per element, any dtypes, lengths, aliases and addresses. */
#include "fuzz.h"

#include "base/half.h"
#include "dsc/flat.h"

#include <math.h>

#define MAX_SRCS 4

static float get(dsc_dtype dtype, const uint8_t *data, int64_t i)
{
    uint32_t word;
    uint16_t half;

    if (dtype == DSC_DTYPE_F32) {
        memcpy(&word, data + 4 * i, sizeof word);
        return dsc_f32_from_bits(word);
    }
    memcpy(&half, data + 2 * i, sizeof half);
    return dtype == DSC_DTYPE_BF16 ? dsc_bf16_to_f32(half) : dsc_f16_to_f32(half);
}

static float rounded(dsc_dtype dtype, float value)
{
    if (dtype == DSC_DTYPE_BF16)
        return dsc_bf16_to_f32(dsc_f32_to_bf16(value));
    return dtype == DSC_DTYPE_F16 ? dsc_f16_to_f32(dsc_f32_to_f16(value)) : value;
}

static bool is_same(float a, float b)
{
    return dsc_f32_bits(a) == dsc_f32_bits(b) || (isnan(a) && isnan(b));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    dsc_dtype src_dtype = (dsc_dtype)(take_byte(&input) % DSC_DTYPE_COUNT);
    dsc_dtype acc_dtype = (dsc_dtype)(take_byte(&input) % DSC_DTYPE_COUNT);
    int64_t n_srcs = 1 + take_byte(&input) % MAX_SRCS;
    bool accumulate = take_byte(&input) % 2 == 1;
    bool is_aliased = take_byte(&input) % 2 == 1 && src_dtype == acc_dtype;
    float scale = ldexpf(1.0f, take_byte(&input) % 5 - 2);
    int64_t n = (int64_t)(input.n_left / (size_t)(4 * (n_srcs + 1)));
    struct dsc_span srcs[MAX_SRCS];
    uint8_t *blocks[MAX_SRCS + 1];
    uint8_t *before = malloc((size_t)n * 4 + 1);
    uint8_t *wide = malloc((size_t)n * 4 + 1);
    double sumsq = -1;
    double wanted_sumsq = 0;
    int64_t n_nonfinite = -1;
    int64_t wanted_nonfinite = 0;

    REQUIRE(before != NULL && wide != NULL);
    for (int64_t s = 0; s <= n_srcs; s++) { /* the last one is acc; each at an odd address */
        blocks[s] = malloc((size_t)n * 4 + 1);
        REQUIRE(blocks[s] != NULL);
        for (int64_t i = 0; i < 4 * n; i++)
            blocks[s][1 + i] = take_byte(&input);
        if (s < n_srcs)
            srcs[s] = (struct dsc_span){blocks[s] + 1, n, src_dtype};
    }

    struct dsc_span acc = {blocks[n_srcs] + 1, n, acc_dtype};
    struct dsc_span wide_span = {wide + 1, n, DSC_DTYPE_F32};

    if (is_aliased)
        srcs[n_srcs - 1].data = acc.data;
    memcpy(before + 1, acc.data, (size_t)n * 4);
    REQUIRE(dsc_flat_reduce(srcs, n_srcs, scale, accumulate, &acc, NULL, &sumsq, &n_nonfinite) == DSC_OK);
    REQUIRE(dsc_flat_cast(&acc, &wide_span, NULL) == DSC_OK);
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;

        for (int64_t s = 0; s < n_srcs; s++) {
            float x = get(src_dtype, is_aliased && s == n_srcs - 1 ? before + 1 : blocks[s] + 1, i);

            sum = s == 0 ? x : sum + x;
        }
        sum *= scale;
        if (accumulate)
            sum += get(acc_dtype, before + 1, i);

        float got = get(acc_dtype, acc.data, i);

        REQUIRE(is_same(got, rounded(acc_dtype, sum)));
        REQUIRE(is_same(get(DSC_DTYPE_F32, wide + 1, i), got));
        if (isfinite(got))
            wanted_sumsq += (double)got * (double)got;
        else
            wanted_nonfinite++;
    }
    REQUIRE(n_nonfinite == wanted_nonfinite);
    REQUIRE(fabs(sumsq - wanted_sumsq) <= 1e-12 * wanted_sumsq);
    for (int64_t s = 0; s <= n_srcs; s++)
        free(blocks[s]);
    free(before);
    free(wide);
    return 0;
}
