/*
 * cpu/norm.c: the sum of squares against a long double sum, the same bits on every instruction set, and the count of
 * infinities and NaNs.
 */
#include "arrays.h"

#include "cpu/table.h"

struct result {
    double sumsq;
    int64_t n_nonfinite;
};

static struct result run(const struct array *array)
{
    const struct dsc_kernels *kernels = NULL;
    struct result result = {0};

    kernels = dsc_kernels_get();
    kernels->sumsq_f32(array->n, (const dsc_f32 *)array->data, &result.sumsq, &result.n_nonfinite);
    return result;
}

static void check_array(const struct array *array)
{
    long double wanted = 0;
    int64_t n_nonfinite = 0;
    struct result first = {0};
    int32_t i = 0;
    const char *isa;

    for (int64_t e = 0; e < array->n; e++) {
        long double x = array_get(array, e);

        if (isfinite(array_get(array, e)))
            wanted += x * x;
        else
            n_nonfinite++;
    }
    for (int n_runs = 0; next_isa(&i, &isa); n_runs++) {
        struct result got = run(array);

        CHECK_EQ(got.n_nonfinite, n_nonfinite);
        /* Each lane rounds n / 32 times, each time by half of 2^-52 at most. The fold of the lanes rounds 5 times. */
        test_report(fabsl(got.sumsq - wanted) <= ((double)array->n / 32 + 5) * 0x1p-53L * wanted, __FILE__, __LINE__, "%s: sum %.17g and %.17Lg",
                    isa, got.sumsq, wanted);
        if (n_runs == 0)
            first = got;
        CHECK_BYTES(&got.sumsq, &first.sumsq, sizeof got.sumsq);
    }
}

int main(void)
{
    static const double scales[] = {1.0, 1e-30, 1e-44, 3e38}; /* their squares overflow or underflow in f32 */
    uint64_t random = 13;

    for (int l = 0; l < N_LENGTHS; l++) {
        for (size_t s = 0; s < sizeof scales / sizeof scales[0]; s++) {
            struct array array = array_create(DSC_DTYPE_F32, awkward_lengths[l], s);

            TEST_CASE("%d elements of %g", (int)array.n, scales[s]);
            array_fill(&array, scales[s], false, &random);
            check_array(&array);
            if (array.n > 0) { /* one bad element, anywhere */
                static const uint32_t bad[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x7f800001};

                array_set_bits(&array, test_below(&random, array.n), bad[test_below(&random, 5)]);
                check_array(&array);
            }
            array_fill_bits(&array, &random);
            check_array(&array);
            array_destroy(&array);
        }
    }
    return test_finish(__FILE__);
}
