/* moe/rows.c: gathered and combined rows and their gradients against f64, with equal bits everywhere. */
#include "arrays.h"
#include "pool.h"
#include "test.h"

#include "dsc/moe.h"

#define MAX_SLOTS 1024

static int64_t order[MAX_SLOTS];
static int64_t inverse[MAX_SLOTS];
static float weights[MAX_SLOTS];
static float dweights[MAX_SLOTS];
static float first_dweights[MAX_SLOTS];
static int64_t scratch[MAX_SLOTS];

/* One rounding to the dtype, and some in f32. */
static void check_value(dsc_dtype dtype, double got, double wanted, double size, int64_t n_terms)
{
    const double units[] = {0x1p-24, 0x1p-8, 0x1p-11};
    double limit = units[dtype] * fabs(wanted) + (double)n_terms * 0x1p-24 * size + 0x1p-25;

    if (!CHECK(fabs(got - wanted) <= limit))
        fprintf(stderr, "%.9g and %.9g, limit %g\n", got, wanted, limit);
}

/* A random order of the slots that have a row: about three of four. */
static int64_t make_order(int64_t n, uint64_t *random)
{
    int64_t n_slots = 0;

    for (int64_t slot = 0; slot < n; slot++) {
        inverse[slot] = -1;
        if (test_below(random, 4) > 0)
            order[n_slots++] = slot;
    }
    for (int64_t i = n_slots - 1; i > 0; i--) {
        int64_t j = test_below(random, i + 1);
        int64_t other = order[i];

        order[i] = order[j];
        order[j] = other;
    }
    for (int64_t i = 0; i < n_slots; i++)
        inverse[order[i]] = i;
    return n_slots;
}

static void check_rows(int64_t n_tokens, int64_t k, int64_t n_cols, dsc_dtype dtype, const struct dsc_par *par)
{
    uint64_t random = (uint64_t)(n_tokens + 7 * n_cols);
    int64_t n_slots = make_order(n_tokens * k, &random);
    struct array x = array_create(dtype, n_tokens * n_cols, 0);
    struct array rows = array_create(dtype, n_slots * n_cols, 2);
    struct array out = array_create(dtype, n_tokens * n_cols, 0);
    struct array drows = array_create(dtype, n_slots * n_cols, 0);
    struct array first[3] = {0};
    int32_t isa_index = 0;
    const char *isa;

    array_fill(&x, 3, false, &random);
    for (int64_t i = 0; i < n_tokens * k; i++)
        weights[i] = (float)test_uniform(&random);
    while (next_isa(&isa_index, &isa))
        for (int threads = 0; threads < 2; threads++) {
            const struct dsc_par *lent = threads ? par : NULL;
            struct dsc_moe_gather gather = {n_tokens, n_slots, k, n_cols, dtype, x.data, order, inverse, rows.data};
            struct dsc_moe_combine combine = {n_tokens, n_slots, k,       n_cols, dtype,
                                              rows.data, inverse, weights, out.data};
            struct dsc_moe_combine_grad grad = {n_tokens, n_slots, k,       n_cols,  dtype,      x.data,
                                                rows.data, inverse, weights, scratch, drows.data, dweights};

            TEST_CASE("[%d, %d] k %d of %s on %s, threads %d", (int)n_tokens, (int)n_cols, (int)k, dtype_names[dtype],
                      isa, threads);
            CHECK_STATUS(dsc_moe_gather(&gather, lent), DSC_OK);
            for (int64_t i = 0; i < n_slots * n_cols; i++)
                CHECK(array_bits(&rows, i) == array_bits(&x, order[i / n_cols] / k * n_cols + i % n_cols));
            CHECK_STATUS(dsc_moe_combine(&combine, lent), DSC_OK);
            CHECK_STATUS(dsc_moe_combine_grad(&grad, lent), DSC_OK);
            if (first[0].data == NULL) {
                first[0] = array_copy(&out, 0);
                first[1] = array_copy(&drows, 0);
                memcpy(first_dweights, dweights, sizeof dweights);
            }
            CHECK_SAME(&out, &first[0]);
            CHECK_SAME(&drows, &first[1]);
            CHECK_BYTES(dweights, first_dweights, (size_t)(n_tokens * k) * sizeof *dweights);
        }
    for (int64_t t = 0; t < n_tokens; t++)
        for (int64_t c = 0; c < n_cols; c++) {
            double sum = 0;
            double size = 0;

            TEST_AT(t * n_cols + c);
            for (int64_t j = 0; j < k; j++) {
                int64_t place = inverse[t * k + j];
                double weight = (double)weights[t * k + j];

                if (place < 0)
                    continue;
                sum += weight * (double)array_get(&rows, place * n_cols + c);
                size += fabs(weight * (double)array_get(&rows, place * n_cols + c));
                check_value(dtype, (double)array_get(&drows, place * n_cols + c),
                            weight * (double)array_get(&x, t * n_cols + c), 3, 1);
            }
            check_value(dtype, (double)array_get(&out, t * n_cols + c), sum, size, 2 * k);
        }
    for (int64_t slot = 0; slot < n_tokens * k; slot++) {
        double sum = 0;

        for (int64_t c = 0; inverse[slot] >= 0 && c < n_cols; c++)
            sum += (double)array_get(&x, slot / k * n_cols + c) * (double)array_get(&rows, inverse[slot] * n_cols + c);
        CHECK_NEAR((double)dweights[slot], sum, 1, 1e-3);
    }
    array_destroy(&x);
    array_destroy(&rows);
    array_destroy(&out);
    array_destroy(&drows);
    array_destroy(&first[0]);
    array_destroy(&first[1]);
}

static void test_bad_input(void)
{
    const float x[4] = {1, 2, 3, 4};
    float rows[6] = {9, 9, 9, 9, 9, 9};
    float out[4] = {9, 9, 9, 9};
    int64_t of_slots[4] = {2, 0, -1, 1};
    int64_t slots[3] = {1, 3, 0};
    struct dsc_moe_gather gather = {2, 3, 2, 2, DSC_DTYPE_F32, x, slots, of_slots, rows};
    struct dsc_moe_combine combine = {2, 3, 2, 2, DSC_DTYPE_F32, rows, of_slots, NULL, out};
    struct dsc_moe_combine_grad grad = {2, 3, 2, 2, DSC_DTYPE_F32, x, rows, of_slots, NULL, scratch, rows, NULL};

    TEST_CASE("bad input");
    slots[2] = 4;
    CHECK_ERROR(dsc_moe_gather(&gather, NULL), DSC_EINVAL, "order[2] is 4");
    slots[2] = 2;
    CHECK_ERROR(dsc_moe_gather(&gather, NULL), DSC_EINVAL, "inverse has -1");
    slots[2] = 0;
    gather.n_slots = 2;
    CHECK_ERROR(dsc_moe_gather(&gather, NULL), DSC_EINVAL, "places 3 slots");
    of_slots[3] = 3;
    CHECK_ERROR(dsc_moe_combine(&combine, NULL), DSC_EINVAL, "inverse[1, 1] is 3");
    CHECK_ERROR(dsc_moe_combine_grad(&grad, NULL), DSC_EINVAL, "inverse[1, 1] is 3");
    of_slots[3] = 2;
    CHECK_ERROR(dsc_moe_combine_grad(&grad, NULL), DSC_EINVAL, "another slot");
    of_slots[3] = -1;
    combine.n_cols = 0;
    CHECK_STATUS(dsc_moe_combine(&combine, NULL), DSC_EINVAL);
    combine.n_cols = 2;
    combine.k = -1;
    CHECK_ERROR(dsc_moe_combine(&combine, NULL), DSC_EINVAL, "k is -1");
    combine.k = 2;
    combine.inverse = NULL;
    CHECK_ERROR(dsc_moe_combine_check(&combine), DSC_EINVAL, "inverse is NULL");
    combine.inverse = of_slots;
    CHECK_STATUS(dsc_moe_combine_check(&combine), DSC_OK);
    grad.scratch = NULL;
    CHECK_ERROR(dsc_moe_combine_grad_check(&grad), DSC_EINVAL, "scratch is NULL");
    grad.scratch = scratch;
    gather.k = 0;
    CHECK_ERROR(dsc_moe_gather_check(&gather), DSC_EINVAL, "k is 0 for 2 rows");
    gather.k = 2;
    CHECK_STATUS(dsc_moe_gather_check(&gather), DSC_OK);
    CHECK_ERROR(dsc_moe_invert_check(slots, -1, slots), DSC_EINVAL, "n is -1");
    combine.out = NULL;
    CHECK_ERROR(dsc_moe_combine(&combine, NULL), DSC_EINVAL, "out");
    CHECK(rows[0] == 9 && out[0] == 9);
    TEST_CASE("a row without a slot has no gradient");
    grad.drows = rows;
    grad.rows = (const float[6]){0};
    CHECK_STATUS(dsc_moe_combine_grad(&grad, NULL), DSC_OK);
    CHECK(rows[0] == 1 && rows[2] == 0 && rows[3] == 0 && rows[4] == 1);
}

int main(void)
{
    static const int64_t sizes[][3] = {{0, 2, 5}, {1, 1, 1}, {5, 0, 3}, {31, 2, 17}, {127, 3, 64}, {13, 6, 1025}, {3, 1, 2049}};
    struct pool pool;

    pool_init(&pool, 3, 1);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++)
            check_rows(sizes[s][0], sizes[s][1], sizes[s][2], (dsc_dtype)dtype, &pool.par);
    test_bad_input();
    pool_clear(&pool);
    return test_finish(__FILE__);
}
