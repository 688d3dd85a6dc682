/* zero/layout.c against its contract: every property is checked for each parameter, on random and on chosen sizes. */
#include "test.h"

#include "dsc/zero.h"

#define MAX_PARAMS 64
#define UNTOUCHED (-77)

struct plan {
    int64_t bucket_of[MAX_PARAMS];
    int64_t offset[MAX_PARAMS];
    int64_t begin[MAX_PARAMS];
    int64_t slice[MAX_PARAMS];
    int64_t n_buckets;
    int64_t flat_elems;
};

static void fill_untouched(struct plan *plan)
{
    for (int64_t *word = (int64_t *)plan; word < (int64_t *)(plan + 1); word++)
        *word = UNTOUCHED;
}

static bool is_untouched(const struct plan *plan)
{
    for (const int64_t *word = (const int64_t *)plan; word < (const int64_t *)(plan + 1); word++)
        if (*word != UNTOUCHED)
            return false;
    return true;
}

static dsc_status make_plan(const int64_t *sizes, int64_t n_params, int32_t n_ranks, int64_t bucket_elems, int64_t align, int64_t capacity,
                            struct plan *plan)
{
    return dsc_layout_plan(sizes, n_params, n_ranks, bucket_elems, align, capacity, plan->bucket_of, plan->offset, plan->begin, plan->slice,
                           &plan->n_buckets, &plan->flat_elems);
}

static int64_t round_up(int64_t value, int64_t align)
{
    return (value + align - 1) / align * align;
}

/* The contract, bucket by bucket. */
static void check_plan(const int64_t *sizes, int64_t n_params, int32_t n_ranks, int64_t bucket_elems, int64_t align)
{
    struct plan plan;
    int64_t end = 0;       /* end of the last parameter */
    int64_t flat_end = 0;  /* end of the last bucket */
    int64_t i = 0;

    TEST_CASE("%d parameters (%d %d ...), %d ranks, bucket %d, align %d", (int)n_params, n_params > 0 ? (int)sizes[0] : -1,
              n_params > 1 ? (int)sizes[1] : -1, (int)n_ranks, (int)bucket_elems, (int)align);
    fill_untouched(&plan);
    if (CHECK_STATUS(make_plan(sizes, n_params, n_ranks, bucket_elems, align, MAX_PARAMS, &plan), DSC_OK) == false)
        return;
    CHECK(plan.n_buckets <= n_params);
    CHECK_EQ(plan.n_buckets == 0, n_params == 0);
    for (int64_t b = 0; b < plan.n_buckets; b++) {
        int64_t used = 0;       /* elements up to the end of the last parameter */
        int64_t n_nonempty = 0;

        CHECK_EQ(plan.begin[b], flat_end);
        CHECK_EQ(plan.slice[b] % align, 0);
        end = plan.begin[b];
        CHECK(i < n_params && plan.bucket_of[i] == b); /* no bucket without members */
        for (; i < n_params && plan.bucket_of[i] == b; i++) {
            CHECK_EQ(plan.offset[i], round_up(end, align));
            if (sizes[i] > 0) {
                end = plan.offset[i] + sizes[i];
                used = end - plan.begin[b];
                n_nonempty++;
            }
        }
        CHECK(used <= bucket_elems || n_nonempty == 1);
        CHECK_EQ(plan.slice[b], round_up((used + n_ranks - 1) / n_ranks, align));
        if (i < n_params) { /* the next one opened a bucket because it did not fit here */
            CHECK(sizes[i] > 0);
            CHECK(used > 0);
            CHECK(round_up(end, align) + sizes[i] - plan.begin[b] > bucket_elems);
        }
        flat_end = plan.begin[b] + n_ranks * plan.slice[b];
    }
    CHECK_EQ(i, n_params);
    CHECK_EQ(plan.flat_elems, flat_end);
    for (int64_t b = plan.n_buckets; b < MAX_PARAMS; b++)
        CHECK_EQ(plan.begin[b], UNTOUCHED);

    /* An array of exactly the needed size is accepted. One entry less is refused, and nothing is written. */
    if (plan.n_buckets > 0) {
        int64_t n_buckets = plan.n_buckets;

        fill_untouched(&plan);
        CHECK_ERROR(make_plan(sizes, n_params, n_ranks, bucket_elems, align, n_buckets - 1, &plan), DSC_EINVAL, "bucket_capacity");
        CHECK(is_untouched(&plan));
        CHECK_STATUS(make_plan(sizes, n_params, n_ranks, bucket_elems, align, n_buckets, &plan), DSC_OK);
    }
}

static void test_random_cases(void)
{
    uint64_t random = 3;
    static const int64_t limits[] = {1, 2, 5, 40, 1000};
    static const int64_t aligns[] = {1, 2, 4, 64};

    for (int round = 0; round < 4000; round++) {
        int64_t sizes[MAX_PARAMS];
        int64_t n_params = test_below(&random, MAX_PARAMS + 1);
        int64_t limit = limits[test_below(&random, 5)];

        for (int64_t i = 0; i < n_params; i++)
            sizes[i] = test_below(&random, limit);

        int32_t n_ranks = (int32_t)(1 + test_below(&random, 9));
        int64_t bucket_elems = 1 + test_below(&random, 2 * limit + 3);

        check_plan(sizes, n_params, n_ranks, bucket_elems, aligns[test_below(&random, 4)]);
    }
}

static void test_examples(void)
{
    struct plan plan;
    const int64_t sizes[] = {3, 4, 0, 20, 1};

    TEST_CASE("example");
    /* 3 + 4 fit 8, the zero-size one stays with them, 20 is alone, 1 opens a third. Slices over 2 ranks: 4 (7), 10 (20), 1 (1). */
    CHECK_STATUS(make_plan(sizes, 5, 2, 8, 1, 5, &plan), DSC_OK);
    CHECK_EQ(plan.n_buckets, 3);
    CHECK_EQ(plan.flat_elems, 8 + 20 + 2);
    static const int64_t wanted_bucket[] = {0, 0, 0, 1, 2};
    static const int64_t wanted_offset[] = {0, 3, 7, 8, 28};

    for (int i = 0; i < 5; i++) {
        CHECK_EQ(plan.bucket_of[i], wanted_bucket[i]);
        CHECK_EQ(plan.offset[i], wanted_offset[i]);
    }
    const int64_t zeros[] = {0, 0};

    CHECK_STATUS(make_plan(zeros, 2, 3, 8, 4, 2, &plan), DSC_OK);
    CHECK_EQ(plan.n_buckets, 1);
    CHECK_EQ(plan.slice[0], 0);
    CHECK_EQ(plan.flat_elems, 0);

    /* Nothing to place: no arrays are needed. */
    CHECK_STATUS(dsc_layout_plan(NULL, 0, 1, 1, 1, 0, NULL, NULL, NULL, NULL, &plan.n_buckets, &plan.flat_elems), DSC_OK);
    CHECK_EQ(plan.n_buckets, 0);
    CHECK_EQ(plan.flat_elems, 0);
}

static void test_errors(void)
{
    struct plan plan;
    const int64_t good[] = {3, 4};
    const int64_t negative[] = {3, -4};
    const int64_t huge[] = {INT64_MAX};
    const int64_t huge_sum[] = {INT64_MAX / 2, 7, INT64_MAX / 2};

    TEST_CASE("errors");
    fill_untouched(&plan);
    CHECK_ERROR(make_plan(good, -1, 1, 8, 1, 9, &plan), DSC_EINVAL, "n_params");
    CHECK_ERROR(make_plan(NULL, 2, 1, 8, 1, 9, &plan), DSC_EINVAL, "sizes");
    CHECK_ERROR(make_plan(negative, 2, 1, 8, 1, 9, &plan), DSC_EINVAL, "sizes[1] is -4");
    CHECK_ERROR(make_plan(good, 2, 0, 8, 1, 9, &plan), DSC_EINVAL, "n_ranks");
    CHECK_ERROR(make_plan(good, 2, 1, 0, 1, 9, &plan), DSC_EINVAL, "bucket_elems");
    CHECK_ERROR(make_plan(good, 2, 1, 8, 0, 9, &plan), DSC_EINVAL, "align_elems");
    CHECK_ERROR(make_plan(good, 2, 1, 8, 3, 9, &plan), DSC_EINVAL, "align_elems");
    CHECK_ERROR(make_plan(good, 2, 1, 8, INT64_MIN, 9, &plan), DSC_EINVAL, "align_elems");
    CHECK_ERROR(make_plan(good, 2, 1, 8, 1, -1, &plan), DSC_EINVAL, "bucket_capacity");
    CHECK_ERROR(dsc_layout_plan(good, 2, 1, 8, 1, 9, NULL, plan.offset, plan.begin, plan.slice, &plan.n_buckets, &plan.flat_elems),
                DSC_EINVAL, "NULL");
    CHECK_ERROR(dsc_layout_plan(good, 2, 1, 8, 1, 9, plan.bucket_of, plan.offset, plan.begin, plan.slice, NULL, &plan.flat_elems),
                DSC_EINVAL, "out_n_buckets");
    CHECK_ERROR(make_plan(huge, 1, 2, 8, 1, 9, &plan), DSC_EOVERFLOW, "int64_t");
    CHECK_ERROR(make_plan(huge, 1, 1, 8, 64, 9, &plan), DSC_EOVERFLOW, "int64_t");
    CHECK_ERROR(make_plan(huge_sum, 3, 1, INT64_MAX, 1, 9, &plan), DSC_EOVERFLOW, "parameter 2");
    CHECK_ERROR(make_plan(good, 2, 1 << 30, 1, INT64_C(1) << 62, 9, &plan), DSC_EOVERFLOW, "int64_t");
    CHECK(is_untouched(&plan));
    /* The largest that fits. */
    CHECK_STATUS(make_plan(huge, 1, 1, 8, 1, 9, &plan), DSC_OK);
    CHECK_EQ(plan.flat_elems, INT64_MAX);
}

int main(void)
{
    test_random_cases();
    test_examples();
    test_errors();
    return test_finish(__FILE__);
}
