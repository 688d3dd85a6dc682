/* cpu/reduce.c: sums and products are single f32 operations, so every instruction set must give the bits of the plain expression. */
#include "arrays.h"

#include "cpu/table.h"

int main(void)
{
    uint64_t random = 19;
    int32_t isa_index = 0;
    const char *isa;

    while (next_isa(&isa_index, &isa)) {
        const struct dsc_kernels *kernels = NULL;

        kernels = dsc_kernels_get();
        for (int l = 0; l < N_LENGTHS; l++) {
            struct array src = array_create(DSC_DTYPE_F32, awkward_lengths[l], (size_t)(l % 4));
            struct array dst = array_create(DSC_DTYPE_F32, src.n, 1);
            struct array sum = array_create(DSC_DTYPE_F32, src.n, 2);
            struct array wanted = array_create(DSC_DTYPE_F32, src.n, 0);
            float scale = (float)test_uniform(&random);

            TEST_CASE("%s: %d elements", isa, (int)src.n);
            array_fill_bits(&src, &random);
            array_fill_bits(&dst, &random);
            for (int64_t i = 0; i < src.n; i++)
                array_set(&wanted, i, array_get(&dst, i) + array_get(&src, i));
            kernels->add_f32(src.n, (const dsc_f32 *)src.data, (dsc_f32 *)dst.data);
            CHECK_SAME(&dst, &wanted);
            for (int64_t i = 0; i < src.n; i++)
                array_set(&wanted, i, array_get(&dst, i) + array_get(&src, i));
            kernels->sum_two_f32(src.n, (const dsc_f32 *)dst.data, (const dsc_f32 *)src.data, (dsc_f32 *)sum.data);
            CHECK_SAME(&sum, &wanted);
            kernels->sum_two_f32(src.n, (const dsc_f32 *)dst.data, (const dsc_f32 *)src.data, (dsc_f32 *)dst.data);
            CHECK_SAME(&dst, &wanted);
            for (int64_t i = 0; i < src.n; i++)
                array_set(&wanted, i, array_get(&src, i) + array_get(&dst, i));
            kernels->sum_two_f32(src.n, (const dsc_f32 *)src.data, (const dsc_f32 *)dst.data, (dsc_f32 *)dst.data);
            CHECK_SAME(&dst, &wanted);
            for (int64_t i = 0; i < src.n; i++)
                array_set(&wanted, i, array_get(&dst, i) * scale);
            kernels->scale_f32(src.n, scale, (dsc_f32 *)dst.data);
            CHECK_SAME(&dst, &wanted);
            array_destroy(&src);
            array_destroy(&dst);
            array_destroy(&sum);
            array_destroy(&wanted);
        }
    }
    return test_finish(__FILE__);
}
