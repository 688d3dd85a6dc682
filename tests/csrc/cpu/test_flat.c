/* cpu/flat.c: the passes against the plain expression per element, in every mix of dtypes, for any thread count and instruction set, with refused arguments. */
#include "arrays.h"

#include "dsc/flat.h"
#include "pool.h"

#define MAX_SRCS 5

static struct dsc_span span_of(const struct array *array)
{
    return (struct dsc_span){array->data, array->n, array->dtype};
}

/* Computes acc by the contract: in f32 throughout, rounded once. */
static void reference_reduce(const struct array *srcs, int n_srcs, float scale, bool accumulate, const struct array *acc, struct array *out)
{
    for (int64_t i = 0; i < acc->n; i++) {
        float sum = array_get(&srcs[0], i);

        for (int s = 1; s < n_srcs; s++)
            sum += array_get(&srcs[s], i);
        sum *= scale;
        array_set(out, i, accumulate ? sum + array_get(acc, i) : sum);
    }
}

static void check_sumsq(const struct array *array, double sumsq, int64_t n_nonfinite)
{
    long double wanted = 0;
    int64_t n_bad = 0;

    for (int64_t i = 0; i < array->n; i++) {
        if (isfinite(array_get(array, i)))
            wanted += (long double)array_get(array, i) * array_get(array, i);
        else
            n_bad++;
    }
    CHECK_EQ(n_nonfinite, n_bad);
    test_report(fabsl(sumsq - wanted) <= 1e-13L * wanted, __FILE__, __LINE__, "sumsq %.17g and %.17Lg", sumsq, wanted);
}

static void check_reduce(dsc_dtype src_dtype, dsc_dtype acc_dtype, int n_srcs, bool accumulate, bool is_in_place, int64_t n, float scale,
                         bool is_wild, uint64_t *random)
{
    struct array srcs[MAX_SRCS];
    struct dsc_span spans[MAX_SRCS];
    struct array acc = array_create(acc_dtype, n, 1);
    struct array wanted = array_create(acc_dtype, n, 0);
    double sumsq = -1;
    int64_t n_nonfinite = -1;

    for (int s = 0; s < n_srcs; s++) {
        srcs[s] = array_create(src_dtype, n, (size_t)s);
        if (is_wild)
            array_fill_bits(&srcs[s], random);
        else
            array_fill(&srcs[s], 10, false, random);
        spans[s] = span_of(&srcs[s]);
    }
    array_fill(&acc, 10, false, random);
    if (is_in_place) /* the last source is also the destination */
        memcpy(acc.data, srcs[n_srcs - 1].data, (size_t)n * dsc_dtype_bytes(src_dtype));
    if (is_in_place)
        spans[n_srcs - 1] = span_of(&acc);
    reference_reduce(srcs, n_srcs, scale, accumulate, &acc, &wanted);

    struct dsc_span acc_span = span_of(&acc);

    CHECK_STATUS(dsc_flat_reduce(spans, n_srcs, scale, accumulate, &acc_span, NULL, &sumsq, &n_nonfinite), DSC_OK);
    CHECK_SAME(&acc, &wanted);
    check_sumsq(&acc, sumsq, n_nonfinite);

    /* The norm that the fused pass returns equals the norm of the separate pass to the bit. */
    double own_sumsq = -1;
    int64_t own_n_nonfinite = -1;

    CHECK_STATUS(dsc_flat_sumsq(&acc_span, 1, NULL, &own_sumsq, &own_n_nonfinite), DSC_OK);
    CHECK(own_sumsq == sumsq);
    CHECK_EQ(own_n_nonfinite, n_nonfinite);
    for (int s = 0; s < n_srcs; s++)
        array_destroy(&srcs[s]);
    array_destroy(&acc);
    array_destroy(&wanted);
}

static void test_reduce(const char *isa)
{
    uint64_t random = 29;

    for (int src = 0; src < DSC_DTYPE_COUNT; src++) {
        for (int acc = 0; acc < DSC_DTYPE_COUNT; acc++) {
            for (int l = 0; l < N_LENGTHS; l++) {
                int n_srcs = 1 + l % MAX_SRCS;
                bool accumulate = l % 2 == 1;
                bool is_wild = l % 3 == 2;

                TEST_CASE("%s: reduce %d x %d %s into %s%s", isa, n_srcs, (int)awkward_lengths[l], dtype_names[src], dtype_names[acc],
                          accumulate ? ", accumulating" : "");
                check_reduce((dsc_dtype)src, (dsc_dtype)acc, n_srcs, accumulate, false, awkward_lengths[l], l % 4 == 0 ? 1.0f : 0.3f, is_wild, &random);
                if (src == acc)
                    check_reduce((dsc_dtype)src, (dsc_dtype)acc, n_srcs, accumulate, true, awkward_lengths[l], 0.3f, is_wild, &random);
            }
        }
    }
}

static void test_scale(const char *isa)
{
    uint64_t random = 31;

    for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
        for (int l = 0; l < N_LENGTHS; l++) {
            struct array array = array_create((dsc_dtype)dtype, awkward_lengths[l], 1);
            struct array wanted = array_create((dsc_dtype)dtype, array.n, 0);
            float scale = (float)(3 * test_uniform(&random));

            TEST_CASE("%s: scale %d %s", isa, (int)array.n, dtype_names[dtype]);
            array_fill_bits(&array, &random);
            for (int64_t i = 0; i < array.n; i++)
                array_set(&wanted, i, array_get(&array, i) * scale);
            CHECK_STATUS(dsc_flat_scale(&(struct dsc_span){array.data, array.n, array.dtype}, 1, scale, NULL), DSC_OK);
            CHECK_SAME(&array, &wanted);
            array_destroy(&array);
            array_destroy(&wanted);
        }
    }
}

/*
 * Many spans over several chunks. Any number of threads and any instruction set give the bits of a serial run on the
 * first instruction set.
 */
static void test_threads(void)
{
    enum { N_SPANS = 40 };
    struct array arrays[N_SPANS];
    struct dsc_span spans[N_SPANS];
    uint64_t random = 37;
    double first_sumsq = 0;
    bool is_first = true;
    struct array src[2] = {array_create(DSC_DTYPE_F32, 150001, 0), array_create(DSC_DTYPE_F32, 150001, 4)};
    struct array wanted = array_create(DSC_DTYPE_BF16, 150001, 0);

    array_fill(&src[0], 1, false, &random);
    array_fill(&src[1], 1, false, &random);
    reference_reduce(src, 2, 0.5f, false, &wanted, &wanted);
    for (int s = 0; s < N_SPANS; s++) {
        arrays[s] = array_create((dsc_dtype)(s % 3), s % 7 == 3 ? 0 : test_below(&random, s % 9 == 0 ? 60000 : 900), 0);
        array_fill(&arrays[s], 1, false, &random);
        spans[s] = span_of(&arrays[s]);
    }
    for (int n_threads = 1; n_threads <= 8; n_threads += n_threads < 4 ? 1 : 4) {
        struct pool pool;
        int32_t isa_index = 0;
        const char *isa;

        pool_init(&pool, n_threads, 1);
        while (next_isa(&isa_index, &isa)) {
            double sumsq = -1;
            int64_t n_nonfinite = -1;
            struct array acc = array_create(DSC_DTYPE_BF16, 150001, 0);
            struct array cast = array_create(DSC_DTYPE_F16, 150001, 0);
            struct dsc_span src_spans[2] = {span_of(&src[0]), span_of(&src[1])};
            struct dsc_span acc_span = span_of(&acc);
            struct dsc_span cast_span = span_of(&cast);

            TEST_CASE("%d threads, %s", n_threads, isa);
            CHECK_STATUS(dsc_flat_sumsq(spans, N_SPANS, &pool.par, &sumsq, &n_nonfinite), DSC_OK);
            CHECK_EQ(n_nonfinite, 0);
            if (is_first)
                first_sumsq = sumsq;
            is_first = false;
            CHECK_BYTES(&sumsq, &first_sumsq, sizeof sumsq);
            CHECK_STATUS(dsc_flat_reduce(src_spans, 2, 0.5f, false, &acc_span, &pool.par, NULL, NULL), DSC_OK);
            CHECK_SAME(&acc, &wanted);
            CHECK_STATUS(dsc_flat_cast(&acc_span, &cast_span, &pool.par), DSC_OK);
            CHECK_STATUS(dsc_flat_scale(&cast_span, 1, 2.0f, &pool.par), DSC_OK);
            for (int64_t i = 0; i < cast.n; i += 997)
                CHECK(array_get(&cast, i) == dsc_f16_to_f32(dsc_f32_to_f16(2 * dsc_f16_to_f32(dsc_f32_to_f16(array_get(&acc, i))))));
            array_destroy(&acc);
            array_destroy(&cast);
        }
        pool_clear(&pool);
    }
    for (int s = 0; s < N_SPANS; s++)
        array_destroy(&arrays[s]);
    array_destroy(&src[0]);
    array_destroy(&src[1]);
    array_destroy(&wanted);
}

/* Zeroes regions with elements of any size. One byte on each side must stay. */
static void test_zero(void)
{
    static const struct {
        int64_t n_elems, elem_bytes;
    } cases[] = {{0, 4}, {1, 1}, {100003, 4}, {7, 16}, {33000, 1}, {40000, 2}};
    enum { N = sizeof cases / sizeof cases[0] };
    struct dsc_region regions[N];
    unsigned char *memory[N];

    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        struct pool pool;

        pool_init(&pool, n_threads, 1);
        for (int i = 0; i < N; i++) {
            size_t n_bytes = (size_t)(cases[i].n_elems * cases[i].elem_bytes);

            memory[i] = test_alloc(n_bytes + 2);
            memset(memory[i], 0x5a, n_bytes + 2);
            regions[i] = (struct dsc_region){memory[i] + 1, cases[i].n_elems, cases[i].elem_bytes};
        }
        CHECK_STATUS(dsc_flat_zero(regions, N, &pool.par), DSC_OK);
        for (int i = 0; i < N; i++) {
            size_t n_bytes = (size_t)(cases[i].n_elems * cases[i].elem_bytes);
            size_t n_zeros = 0;

            TEST_CASE("zero, %d threads, region %d", n_threads, i);
            for (size_t b = 0; b < n_bytes; b++)
                n_zeros += memory[i][b + 1] == 0;
            CHECK_EQ(n_zeros, n_bytes);
            CHECK(memory[i][0] == 0x5a && memory[i][n_bytes + 1] == 0x5a);
            free(memory[i]);
        }
        pool_clear(&pool);
    }
}

static void test_errors(void)
{
    float a[4] = {1, 2, 3, 4};
    float b[4] = {5, 6, 7, 8};
    const float before[4] = {1, 2, 3, 4};
    struct dsc_span acc = {a, 4, DSC_DTYPE_F32};
    struct dsc_span src = {b, 4, DSC_DTYPE_F32};
    struct dsc_span bad;
    struct dsc_span two[2];
    double sumsq = -7;
    int64_t n_nonfinite = -7;

    TEST_CASE("errors");
#define REFUSED_SPAN(change, word)                                                                             \
    do {                                                                                                       \
        bad = acc;                                                                                             \
        change;                                                                                                \
        CHECK_ERROR(dsc_flat_sumsq(&bad, 1, NULL, &sumsq, &n_nonfinite), DSC_EINVAL, word);                    \
        CHECK_ERROR(dsc_flat_scale(&bad, 1, 2.0f, NULL), DSC_EINVAL, word);                                    \
        CHECK_ERROR(dsc_flat_cast(&src, &bad, NULL), DSC_EINVAL, word);                                        \
        CHECK_ERROR(dsc_flat_cast(&bad, &src, NULL), DSC_EINVAL, word);                                        \
        CHECK_ERROR(dsc_flat_reduce(&src, 1, 1, true, &bad, NULL, &sumsq, &n_nonfinite), DSC_EINVAL, word);    \
        two[0] = src;                                                                                          \
        two[1] = bad;                                                                                          \
        CHECK_ERROR(dsc_flat_reduce(two, 2, 1, true, &acc, NULL, &sumsq, &n_nonfinite), DSC_EINVAL, word);     \
        CHECK_ERROR(dsc_flat_scale(two, 2, 2.0f, NULL), DSC_EINVAL, "spans[1]");                               \
    } while (0)
    REFUSED_SPAN(bad.data = NULL, "data is NULL");
    REFUSED_SPAN(bad.n_elems = -1, "n_elems is -1");
    REFUSED_SPAN(bad.dtype = DSC_DTYPE_COUNT, "dtype is 3");
#undef REFUSED_SPAN
    bad = src;
    bad.n_elems = 3;
    CHECK_ERROR(dsc_flat_cast(&bad, &acc, NULL), DSC_EINVAL, "3 elements");
    CHECK_ERROR(dsc_flat_reduce(&bad, 1, 1, true, &acc, NULL, NULL, NULL), DSC_EINVAL, "3 elements");
    two[0] = src;
    two[1] = src;
    two[1].dtype = DSC_DTYPE_BF16;
    CHECK_ERROR(dsc_flat_reduce(two, 2, 1, true, &acc, NULL, NULL, NULL), DSC_EINVAL, "srcs[1].dtype");
    CHECK_ERROR(dsc_flat_reduce(&src, 0, 1, true, &acc, NULL, NULL, NULL), DSC_EINVAL, "n_srcs");
    CHECK_ERROR(dsc_flat_reduce(NULL, 1, 1, true, &acc, NULL, NULL, NULL), DSC_EINVAL, "srcs");
    CHECK_ERROR(dsc_flat_reduce(&src, 1, 1, true, NULL, NULL, NULL, NULL), DSC_EINVAL, "acc");
    CHECK_ERROR(dsc_flat_reduce(&src, 1, INFINITY, true, &acc, NULL, NULL, NULL), DSC_EINVAL, "scale");
    CHECK_ERROR(dsc_flat_scale(&acc, 1, NAN, NULL), DSC_EINVAL, "scale");
    CHECK_ERROR(dsc_flat_scale(NULL, 1, 1, NULL), DSC_EINVAL, "spans");
    CHECK_ERROR(dsc_flat_scale(&acc, -1, 1, NULL), DSC_EINVAL, "spans");
    CHECK_ERROR(dsc_flat_cast(NULL, &acc, NULL), DSC_EINVAL, "src");
    CHECK_ERROR(dsc_flat_cast(&src, NULL, NULL), DSC_EINVAL, "dst");
    CHECK_ERROR(dsc_flat_sumsq(&acc, 1, NULL, NULL, &n_nonfinite), DSC_EINVAL, "out_sumsq");
    CHECK_ERROR(dsc_flat_sumsq(&acc, 1, NULL, &sumsq, NULL), DSC_EINVAL, "out_n_nonfinite");
    for (int i = 0; i < 4; i++) { /* the good region before the bad one stays as it was */
        static const struct {
            struct dsc_region region;
            const char *word;
        } bad_regions[] = {{{NULL, 1, 4}, "1 elements"}, {{NULL, -2, 4}, "-2 elements"}, {{NULL, 0, 0}, "of 0 bytes"}, {{NULL, INT64_MAX / 2, 4}, "regions[1]"}};
        struct dsc_region regions[2] = {{a, 4, 4}, bad_regions[i].region};

        CHECK_ERROR(dsc_flat_zero(regions, 2, NULL), DSC_EINVAL, bad_regions[i].word);
    }
    CHECK_ERROR(dsc_flat_zero(NULL, 1, NULL), DSC_EINVAL, "1 regions");
    CHECK_BYTES(a, before, sizeof a);
    CHECK(sumsq == -7 && n_nonfinite == -7);

    /* An empty list is valid. */
    CHECK_STATUS(dsc_flat_sumsq(NULL, 0, NULL, &sumsq, &n_nonfinite), DSC_OK);
    CHECK(sumsq == 0 && n_nonfinite == 0);
    CHECK_STATUS(dsc_flat_scale(NULL, 0, 1, NULL), DSC_OK);
    CHECK_STATUS(dsc_flat_zero(NULL, 0, NULL), DSC_OK);
}

int main(void)
{
    int32_t isa_index = 0;
    const char *isa;

    while (next_isa(&isa_index, &isa)) {
        test_reduce(isa);
        test_scale(isa);
    }
    test_threads();
    test_zero();
    test_errors();
    return test_finish(__FILE__);
}
