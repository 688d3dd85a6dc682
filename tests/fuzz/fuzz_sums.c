/* dsc_tree_push, dsc_tree_sum and dsc_exact_squares on raw bytes as elements: rounds and cuts do not change a bit. */
#include "fuzz.h"

#include "base/half.h"
#include "dsc/sums.h"

#include <math.h>

#define MAX_LEAVES 40
#define N_LEVELS 6

static float get(const struct dsc_span *span, int64_t i)
{
    uint32_t word;
    uint16_t half;

    if (span->dtype == DSC_DTYPE_F32) {
        memcpy(&word, (const uint8_t *)span->data + 4 * i, sizeof word);
        return dsc_f32_from_bits(word);
    }
    memcpy(&half, (const uint8_t *)span->data + 2 * i, sizeof half);
    return span->dtype == DSC_DTYPE_BF16 ? dsc_bf16_to_f32(half) : dsc_f16_to_f32(half);
}

static bool is_same(float a, float b)
{
    return dsc_f32_bits(a) == dsc_f32_bits(b) || (isnan(a) && isnan(b));
}

/* The sum of all leaves: the largest power of two below their number, by halves, and the rest. */
static float wanted_sum(const struct dsc_span *leaves, int64_t n_leaves, int64_t i)
{
    int64_t oldest = 1;

    if (n_leaves == 1)
        return get(leaves, i);
    while (2 * oldest < n_leaves)
        oldest *= 2;
    return wanted_sum(leaves, oldest, i) + wanted_sum(leaves + oldest, n_leaves - oldest, i);
}

static void check_tree(struct input *input, const struct dsc_span *leaves, int64_t n_leaves, int64_t n)
{
    float *levels[N_LEVELS];
    float *sum = malloc((size_t)n * sizeof(float) + 1);
    struct dsc_span out = {sum, n, DSC_DTYPE_F32};

    REQUIRE(sum != NULL);
    for (int l = 0; l < N_LEVELS; l++) {
        levels[l] = malloc((size_t)n * sizeof(float) + 1);
        REQUIRE(levels[l] != NULL);
    }
    for (int64_t done = 0; done < n_leaves;) {
        int64_t width = take_below(input, n_leaves - done + 1);

        REQUIRE(dsc_tree_push(levels, N_LEVELS, done, leaves + done, width, n, NULL) == DSC_OK);
        done += width;
        if (width == 0 && input->n_left == 0) { /* the rest at once */
            REQUIRE(dsc_tree_push(levels, N_LEVELS, done, leaves + done, n_leaves - done, n, NULL) == DSC_OK);
            break;
        }
    }
    REQUIRE(dsc_tree_sum((const float *const *)levels, N_LEVELS, n_leaves, 1.0f, &out, NULL) == DSC_OK);
    for (int64_t i = 0; i < n; i++)
        REQUIRE(is_same(sum[i], wanted_sum(leaves, n_leaves, i)));
    for (int l = 0; l < N_LEVELS; l++)
        free(levels[l]);
    free(sum);
}

static void check_squares(const struct dsc_span *spans, int64_t n_spans)
{
    int64_t limbs[DSC_EXACT_LIMBS];
    int64_t sums[DSC_EXACT_LIMBS] = {0};
    int64_t n_nonfinite = 0;
    int64_t n_found = 0;
    double wanted = 0;
    double value = 0;

    REQUIRE(dsc_exact_squares(spans, n_spans, NULL, limbs, &n_nonfinite) == DSC_OK);
    for (int64_t s = n_spans - 1; s >= 0; s--)
        for (int64_t i = 0; i < spans[s].n_elems; i++) {
            float x = get(&spans[s], i);
            struct dsc_span one = {&x, 1, DSC_DTYPE_F32};
            int64_t single[DSC_EXACT_LIMBS];
            int64_t is_nonfinite = 0;

            REQUIRE(dsc_exact_squares(&one, 1, NULL, single, &is_nonfinite) == DSC_OK);
            for (int l = 0; l < DSC_EXACT_LIMBS; l++)
                sums[l] += single[l];
            n_found += is_nonfinite;
            if (isfinite(x))
                wanted += (double)x * (double)x;
        }
    dsc_exact_carry(sums);
    REQUIRE(memcmp(sums, limbs, sizeof limbs) == 0);
    REQUIRE(n_found == n_nonfinite);
    for (int l = 0; l < DSC_EXACT_LIMBS; l++)
        value += ldexp((double)limbs[l], 32 * l + DSC_EXACT_LOWEST);
    REQUIRE(fabs(value - wanted) <= 1e-12 * wanted);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    int64_t n_leaves = 1 + take_below(&input, MAX_LEAVES);
    struct dsc_span leaves[MAX_LEAVES];
    struct input choices = {data, n_bytes < 16 ? n_bytes : 16};
    int64_t n;

    for (int64_t s = 0; s < n_leaves; s++)
        leaves[s].dtype = (dsc_dtype)(take_byte(&input) % DSC_DTYPE_COUNT);
    n = (int64_t)(input.n_left / (size_t)(4 * n_leaves)) + 1;
    for (int64_t s = 0; s < n_leaves; s++) {
        size_t size = (size_t)n * dsc_dtype_bytes(leaves[s].dtype);
        uint8_t *elements = malloc(size);

        REQUIRE(elements != NULL);
        for (size_t i = 0; i < size; i++)
            elements[i] = take_byte(&input);
        leaves[s].data = elements;
        leaves[s].n_elems = n;
    }
    check_tree(&choices, leaves, n_leaves, n);
    check_squares(leaves, n_leaves);
    for (int64_t s = 0; s < n_leaves; s++)
        free(leaves[s].data);
    return 0;
}
