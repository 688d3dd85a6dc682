/* cpu/cast.c on every instruction set against base/half.h one element at a time: all halves, floats at the rounding borders, all lengths, odd addresses. */
#include "arrays.h"

#include "dsc/flat.h"

static void check_cast(const struct array *src, dsc_dtype dtype, size_t shift_bytes)
{
    struct array got = array_create(dtype, src->n, shift_bytes);
    struct array wanted = array_create(dtype, src->n, 0);

    for (int64_t i = 0; i < src->n; i++) {
        if (dtype == src->dtype)
            array_set_bits(&wanted, i, array_bits(src, i)); /* a copy, to the bit */
        else
            array_set(&wanted, i, array_get(src, i));
    }
    CHECK_STATUS(dsc_flat_cast(&(struct dsc_span){src->data, src->n, src->dtype}, &(struct dsc_span){got.data, got.n, dtype}, NULL), DSC_OK);
    /* The payloads of NaNs are also equal on every instruction set. */
    CHECK_BYTES(got.data, wanted.data, (size_t)src->n * dsc_dtype_bytes(dtype));
    array_destroy(&got);
    array_destroy(&wanted);
}

static void test_all_halves(const char *isa)
{
    for (int dtype = DSC_DTYPE_BF16; dtype <= DSC_DTYPE_F16; dtype++) {
        struct array halves = array_create((dsc_dtype)dtype, 0x10000, 0);

        for (uint32_t bits = 0; bits < 0x10000; bits++)
            array_set_bits(&halves, bits, bits);
        for (int to = 0; to < DSC_DTYPE_COUNT; to++) {
            TEST_CASE("%s: every %s to %s", isa, dtype_names[dtype], dtype_names[to]);
            check_cast(&halves, (dsc_dtype)to, 0);
        }
        array_destroy(&halves);
    }
}

/* Floats with all values of the upper 20 bits, and lower bits at and near a rounding border of f16 or bf16. */
static void test_floats(const char *isa)
{
    static const uint32_t tails[] = {0x000, 0x001, 0xfff, 0x800, 0x7ff};
    struct array floats = array_create(DSC_DTYPE_F32, 1 << 20, 0);

    for (size_t t = 0; t < sizeof tails / sizeof tails[0]; t++) {
        for (uint32_t i = 0; i < 1u << 20; i++)
            array_set_bits(&floats, i, i << 12 | tails[t]);
        for (int to = DSC_DTYPE_BF16; to <= DSC_DTYPE_F16; to++) {
            TEST_CASE("%s: floats 0x.....%03x to %s", isa, tails[t], dtype_names[to]);
            check_cast(&floats, (dsc_dtype)to, 0);
        }
    }
    array_destroy(&floats);
}

static void test_lengths(const char *isa)
{
    uint64_t random = 7;

    for (int from = 0; from < DSC_DTYPE_COUNT; from++) {
        for (int to = 0; to < DSC_DTYPE_COUNT; to++) {
            for (int l = 0; l < N_LENGTHS; l++) {
                struct array src = array_create((dsc_dtype)from, awkward_lengths[l], (size_t)(l % 4));

                array_fill_bits(&src, &random);
                TEST_CASE("%s: %d %s to %s", isa, (int)src.n, dtype_names[from], dtype_names[to]);
                check_cast(&src, (dsc_dtype)to, (size_t)(3 - l % 4));
                array_destroy(&src);
            }
        }
    }
}

int main(void)
{
    int32_t i = 0;
    const char *isa;

    while (next_isa(&i, &isa)) {
        test_all_halves(isa);
        test_floats(isa);
        test_lengths(isa);
    }
    return test_finish(__FILE__);
}
