/* sums/exact.c: sums of squares against sums of single bits, in any order, cut anywhere, over the whole range of f32.
 */
#include "arrays.h"

#include "dsc/sums.h"
#include "pool.h"

#define N_BITS (32 * DSC_EXACT_LIMBS)

/* Counts of bits 2^(i - 298): the square of a mantissa is added bit by bit, and nothing is carried before the end. */
struct bits {
    int64_t counts[N_BITS];
    int64_t n_nonfinite;
};

static void bits_add(struct bits *bits, const struct array *array)
{
    for (int64_t i = 0; i < array->n; i++) {
        float value = array_get(array, i);
        int exponent = 0;

        if (!isfinite(value)) {
            bits->n_nonfinite++;
            continue;
        }
        int64_t mantissa =
            (int64_t)ldexp(fabs(frexp((double)value, &exponent)), 24); /* value = mantissa * 2^(exponent - 24) */
        int64_t square = mantissa * mantissa;

        for (int bit = 0; bit < 63; bit++)
            if ((square >> bit & 1) != 0)
                bits->counts[2 * (exponent - 24) + 298 + bit]++;
    }
}

static void bits_check(const struct bits *bits, const int64_t limbs[DSC_EXACT_LIMBS], int64_t n_nonfinite)
{
    int64_t wanted[DSC_EXACT_LIMBS] = {0};
    int64_t carry = 0;

    for (int i = 0; i < N_BITS; i++) {
        carry += bits->counts[i];
        wanted[i / 32] |= (carry & 1) << i % 32;
        carry >>= 1;
    }
    CHECK_EQ(carry, 0);
    CHECK_EQ(n_nonfinite, bits->n_nonfinite);
    for (int i = 0; i < DSC_EXACT_LIMBS; i++) {
        TEST_AT(i);
        CHECK_EQ(limbs[i], wanted[i]);
    }
}

static struct dsc_span span_of(const struct array *array, int64_t begin, int64_t n)
{
    return (struct dsc_span){array->data + (size_t)begin * dsc_dtype_bytes(array->dtype), n, array->dtype};
}

static void check_array(const struct array *array)
{
    struct bits bits = {0};
    struct dsc_span span = span_of(array, 0, array->n);
    int64_t limbs[DSC_EXACT_LIMBS];
    int64_t n_nonfinite = -1;

    bits_add(&bits, array);
    CHECK_STATUS(dsc_exact_squares(&span, 1, NULL, limbs, &n_nonfinite), DSC_OK);
    bits_check(&bits, limbs, n_nonfinite);
}

/* Elements with exponent fields in [first, first + n_fields), some of them zeros. */
static void fill_fields(struct array *array, int64_t first, int64_t n_fields, int64_t one_in_zero, uint64_t *random)
{
    for (int64_t i = 0; i < array->n; i++) {
        uint32_t field = (uint32_t)(first + test_below(random, n_fields));
        uint32_t bits = ((uint32_t)test_random(random) & 0x807fffffu) | field << 23;

        if (test_below(random, 8) == 0)
            bits |= 0x7fffffu; /* the longest squares */
        array_set_bits(array, i, test_below(random, one_in_zero) == 0 ? bits & 0x80000000u : bits);
    }
}

/* Windows of exponents of every width, at both ends of the range and between. */
static void test_fields(const char *isa)
{
    static const int64_t widths[] = {1, 2, 20, 21, 22, 23, 42, 43, 100, 254, 256};
    uint64_t random = 13;

    for (int w = 0; w < 11; w++)
        for (int64_t first = 0; first + widths[w] <= 256; first += 1 + (256 - widths[w]) / 9) {
            struct array array = array_create(DSC_DTYPE_F32, 1024 + test_below(&random, 100), 1);

            TEST_CASE("%s: fields %d to %d", isa, (int)first, (int)(first + widths[w] - 1));
            fill_fields(&array, first, widths[w], w % 3 == 0 ? 2 : 1000, &random);
            check_array(&array);
            array_destroy(&array);
        }
}

/* Blocks of one value, where sums of squares are as large as they can be for their exponent. */
static void test_extremes(const char *isa)
{
    static const uint32_t values[] = {0x00000000, 0x80000000, 0x00000001, 0x007fffff, 0x00800000, 0x00ffffff,
                                      0x0a7fffff, 0x0affffff, 0x3f800000, 0x3fffffff, 0x7f000000, 0x7f7fffff,
                                      0xff7fffff, 0x7f800000, 0xff800000, 0x7f800001, 0xffc00000};

    for (int v = 0; v < 17; v++)
        for (int64_t n = 1; n <= 4097; n = n * 4 + (n == 1 ? 11 : 0)) {
            struct array array = array_create(DSC_DTYPE_F32, n, 2);

            TEST_CASE("%s: %d times 0x%08x", isa, (int)n, values[v]);
            for (int64_t i = 0; i < n; i++)
                array_set_bits(&array, i, values[v]);
            check_array(&array);
            array_set_bits(&array, n / 2, 0x3f000001); /* beside another one */
            check_array(&array);
            array_set_bits(&array, n - 1, 0x7f7fffff);
            check_array(&array);
            array_destroy(&array);
        }
}

static void test_lengths(const char *isa)
{
    uint64_t random = 15;

    for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++)
        for (int l = 0; l < N_LENGTHS; l++) {
            struct array array = array_create((dsc_dtype)dtype, awkward_lengths[l], 1);

            TEST_CASE("%s: %d %s", isa, (int)array.n, dtype_names[dtype]);
            array_fill(&array, 1e-3, false, &random);
            check_array(&array);
            array_fill_bits(&array, &random);
            check_array(&array);
            array_destroy(&array);
        }
}

/* Any order, any cut into spans, and sums of the limbs of parts give the same limbs, on any number of threads. */
static void test_cuts(void)
{
    enum { N = 70001 };
    uint64_t random = 17;
    struct array array = array_create(DSC_DTYPE_F32, N, 0);
    struct dsc_span whole = span_of(&array, 0, N);
    int64_t wanted[DSC_EXACT_LIMBS];
    int64_t wanted_nonfinite = 0;

    array_fill_bits(&array, &random);
    CHECK_STATUS(dsc_exact_squares(&whole, 1, NULL, wanted, &wanted_nonfinite), DSC_OK);
    for (int round = 0; round < 8; round++) {
        struct dsc_span spans[40];
        int64_t limbs[DSC_EXACT_LIMBS];
        int64_t n_nonfinite = 0;
        int64_t begin = 0;
        struct pool pool;

        TEST_CASE("round %d", round);
        for (int64_t i = N - 1; i > 0; i--) { /* shuffles */
            int64_t j = test_below(&random, i + 1);
            uint32_t bits = array_bits(&array, i);

            array_set_bits(&array, i, array_bits(&array, j));
            array_set_bits(&array, j, bits);
        }
        for (int s = 0; s < 40; s++) {
            int64_t n = s == 39 ? N - begin : test_below(&random, s % 5 == 0 ? 3 : (N - begin) / 8);

            spans[s] = span_of(&array, begin, n);
            begin += n;
        }
        pool_init(&pool, 1 + round % 4, 1);
        CHECK_STATUS(dsc_exact_squares(spans, 40, &pool.par, limbs, &n_nonfinite), DSC_OK);
        CHECK_BYTES(limbs, wanted, sizeof limbs);
        CHECK_EQ(n_nonfinite, wanted_nonfinite);
        pool_clear(&pool);

        int64_t half[DSC_EXACT_LIMBS];
        int64_t half_nonfinite = 0;

        CHECK_STATUS(dsc_exact_squares(spans, 17, NULL, limbs, &n_nonfinite), DSC_OK);
        CHECK_STATUS(dsc_exact_squares(spans + 17, 23, NULL, half, &half_nonfinite), DSC_OK);
        for (int i = 0; i < DSC_EXACT_LIMBS; i++)
            limbs[i] += half[i];
        dsc_exact_carry(limbs);
        CHECK_BYTES(limbs, wanted, sizeof limbs);
        CHECK_EQ(n_nonfinite + half_nonfinite, wanted_nonfinite);
    }
    array_destroy(&array);
}

static void test_carry(void)
{
    int64_t limbs[DSC_EXACT_LIMBS] = {-1, (int64_t)7 << 32, 5};

    TEST_CASE("carry");
    dsc_exact_carry(limbs);
    CHECK_EQ(limbs[0], 0xffffffff);
    CHECK_EQ(limbs[1], 0xffffffff);
    CHECK_EQ(limbs[2], 11);
    CHECK_EQ(limbs[3], 0);
}

static void test_refused(void)
{
    float data[3] = {1, 2, 3};
    struct dsc_span span = {data, 3, DSC_DTYPE_F32};
    struct dsc_span strange = {data, 3, (dsc_dtype)3};
    int64_t limbs[DSC_EXACT_LIMBS] = {42};
    int64_t n_nonfinite = 43;

    TEST_CASE("refused");
    CHECK_ERROR(dsc_exact_squares(&span, 1, NULL, NULL, &n_nonfinite), DSC_EINVAL, "out_limbs is NULL");
    CHECK_ERROR(dsc_exact_squares(&span, 1, NULL, limbs, NULL), DSC_EINVAL, "out_n_nonfinite is NULL");
    CHECK_ERROR(dsc_exact_squares(&strange, 1, NULL, limbs, &n_nonfinite), DSC_EINVAL, "spans[0].dtype is 3");
    CHECK_ERROR(dsc_exact_squares(NULL, 1, NULL, limbs, &n_nonfinite), DSC_EINVAL, "spans is NULL");
    CHECK_EQ(limbs[0], 42);
    CHECK_EQ(n_nonfinite, 43);
    CHECK_STATUS(dsc_exact_squares(NULL, 0, NULL, limbs, &n_nonfinite), DSC_OK);
    CHECK_EQ(limbs[0], 0);
    CHECK_EQ(n_nonfinite, 0);
}

int main(void)
{
    const char *isa = NULL;

    for (int32_t i = 0; next_isa(&i, &isa);) {
        test_fields(isa);
        test_extremes(isa);
        test_lengths(isa);
    }
    test_cuts();
    test_carry();
    test_refused();
    return test_finish(__FILE__);
}
