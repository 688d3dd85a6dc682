/* zero/shard.c against brute force: a table holds, for each element of the flat buffer, its parameter and its rank. */
#include "test.h"

#include "dsc/zero.h"

#define MAX_PARAMS 24
#define MAX_FLAT 4096

struct plan {
    int64_t sizes[MAX_PARAMS];
    int64_t n_params;
    int64_t bucket_of[MAX_PARAMS];
    int64_t offset[MAX_PARAMS];
    int64_t begin[MAX_PARAMS];
    int64_t slice[MAX_PARAMS];
    int64_t n_buckets;
    int64_t flat_elems;
    int32_t n_ranks;
};

static dsc_status fragments_of(const struct plan *plan, int32_t rank, int64_t capacity, struct dsc_fragment *out, int64_t *out_n)
{
    return dsc_shard_fragments(plan->sizes, plan->n_params, plan->bucket_of, plan->offset, plan->begin, plan->slice, plan->n_buckets,
                               plan->n_ranks, rank, capacity, out, out_n);
}

static void check_fragments(const struct plan *plan)
{
    static int64_t param_at[MAX_FLAT];   /* parameter of a flat element, -1 for padding */
    static int64_t n_covered[MAX_FLAT];  /* how many fragments of all ranks cover it */
    struct dsc_fragment fragments[MAX_PARAMS];

    for (int64_t e = 0; e < plan->flat_elems; e++) {
        param_at[e] = -1;
        n_covered[e] = 0;
    }
    for (int64_t i = 0; i < plan->n_params; i++)
        for (int64_t e = 0; e < plan->sizes[i]; e++)
            param_at[plan->offset[i] + e] = i;
    for (int32_t rank = 0; rank < plan->n_ranks; rank++) {
        int64_t n_counted = -1;
        int64_t n_fragments = -1;

        CHECK_STATUS(fragments_of(plan, rank, 0, NULL, &n_counted), DSC_OK);
        CHECK(n_counted >= 0 && n_counted <= plan->n_params);
        CHECK_STATUS(fragments_of(plan, rank, n_counted, fragments, &n_fragments), DSC_OK);
        CHECK_EQ(n_fragments, n_counted);
        if (n_counted > 0) {
            n_fragments = -1;
            CHECK_ERROR(fragments_of(plan, rank, n_counted - 1, fragments, &n_fragments), DSC_EINVAL, "capacity");
            CHECK_EQ(n_fragments, -1);
            n_fragments = n_counted;
        }
        for (int64_t f = 0; f < n_fragments; f++) {
            const struct dsc_fragment *fragment = &fragments[f];
            int64_t bucket = plan->bucket_of[fragment->param];
            int64_t shard_begin = 0; /* begin of the bucket's slice */

            CHECK(fragment->n_elems > 0);
            CHECK(f == 0 || fragments[f - 1].flat_begin_elems + fragments[f - 1].n_elems <= fragment->flat_begin_elems);
            for (int64_t b = 0; b < bucket; b++)
                shard_begin += plan->slice[b];
            for (int64_t e = 0; e < fragment->n_elems; e++) {
                int64_t flat = fragment->flat_begin_elems + e;
                int64_t in_bucket = flat - plan->begin[bucket];

                CHECK_EQ(param_at[flat], fragment->param);
                CHECK_EQ(flat - plan->offset[fragment->param], fragment->param_begin_elems + e);
                CHECK_EQ(in_bucket / plan->slice[bucket], rank);
                CHECK_EQ(shard_begin + in_bucket % plan->slice[bucket], fragment->shard_begin_elems + e);
                n_covered[flat]++;
            }
        }
    }
    for (int64_t e = 0; e < plan->flat_elems; e++)
        CHECK_EQ(n_covered[e], param_at[e] >= 0);
}

static struct plan random_plan(uint64_t *random, int64_t limit)
{
    struct plan plan = {.n_params = test_below(random, MAX_PARAMS + 1)};
    int64_t bucket_elems = 1 + test_below(random, 3 * limit);
    int64_t align = INT64_C(1) << test_below(random, 4);

    plan.n_ranks = (int32_t)(1 + test_below(random, 9));

    for (int64_t i = 0; i < plan.n_params; i++)
        plan.sizes[i] = test_below(random, 3) == 0 ? 0 : test_below(random, limit);
    CHECK_STATUS(dsc_layout_plan(plan.sizes, plan.n_params, plan.n_ranks, bucket_elems, align, MAX_PARAMS, plan.bucket_of, plan.offset,
                                 plan.begin, plan.slice, &plan.n_buckets, &plan.flat_elems),
                 DSC_OK);
    return plan;
}

static void test_fragments(void)
{
    uint64_t random = 5;

    for (int round = 0; round < 800; round++) {
        struct plan plan = random_plan(&random, round % 2 == 0 ? 6 : 60);

        TEST_CASE("round %d: %d parameters, %d ranks, %d buckets, %d elements", round, (int)plan.n_params, (int)plan.n_ranks,
                  (int)plan.n_buckets, (int)plan.flat_elems);
        if (CHECK(plan.flat_elems <= MAX_FLAT))
            check_fragments(&plan);
    }
}

/* Plans that dsc_layout_plan cannot make are refused, whatever their fault, and no output is touched. */
static void test_bad_plans(void)
{
    const struct plan good = {
        .sizes = {5, 3},
        .n_params = 2,
        .bucket_of = {0, 1},
        .offset = {0, 6},
        .begin = {0, 6},
        .slice = {3, 2},
        .n_buckets = 2,
        .n_ranks = 2,
    };
    struct plan plan = good;
    struct dsc_fragment fragments[2];
    int64_t n = -1;

    TEST_CASE("bad plans");
    CHECK_STATUS(fragments_of(&good, 0, 2, fragments, &n), DSC_OK);
    n = -1;
#define REFUSED(change, status, word)                                         \
    do {                                                                      \
        plan = good;                                                          \
        change;                                                               \
        CHECK_ERROR(fragments_of(&plan, 0, 2, fragments, &n), status, word);  \
        CHECK_EQ(n, -1);                                                      \
    } while (0)
    REFUSED(plan.n_params = -1, DSC_EINVAL, "n_params");
    REFUSED(plan.n_buckets = -1, DSC_EINVAL, "n_buckets");
    REFUSED(plan.n_buckets = 1, DSC_EINVAL, "bucket_of[1]");
    REFUSED(plan.n_ranks = 0, DSC_EINVAL, "n_ranks");
    REFUSED(plan.sizes[1] = -1, DSC_EINVAL, "sizes[1]");
    REFUSED(plan.sizes[0] = 7, DSC_EINVAL, "parameter 0");
    REFUSED(plan.sizes[1] = INT64_MAX, DSC_EINVAL, "parameter 1");
    REFUSED(plan.bucket_of[0] = 1, DSC_EINVAL, "parameter 0");
    REFUSED((plan.bucket_of[0] = 1, plan.bucket_of[1] = 0, plan.offset[0] = 6, plan.sizes[0] = 1), DSC_EINVAL, "bucket_of[1]");
    REFUSED(plan.offset[1] = 5, DSC_EINVAL, "parameter 1");
    REFUSED(plan.offset[0] = -1, DSC_EINVAL, "parameter 0");
    REFUSED(plan.begin[1] = 5, DSC_EINVAL, "bucket_begin_elems[1]");
    REFUSED(plan.begin[0] = -1, DSC_EINVAL, "bucket_begin_elems[0]");
    REFUSED(plan.slice[0] = -3, DSC_EINVAL, "slice_elems[0]");
    REFUSED(plan.slice[1] = INT64_MAX, DSC_EOVERFLOW, "bucket 1");
    REFUSED(plan.begin[1] = INT64_MAX, DSC_EOVERFLOW, "bucket 1");
#undef REFUSED
    CHECK_ERROR(fragments_of(&good, 2, 2, fragments, &n), DSC_EINVAL, "rank is 2");
    CHECK_ERROR(fragments_of(&good, -1, 2, fragments, &n), DSC_EINVAL, "rank is -1");
    CHECK_ERROR(fragments_of(&good, 0, 2, fragments, NULL), DSC_EINVAL, "out_n_fragments");
    CHECK_EQ(n, -1);
}

/* Assigns the elements to ranks as the contract says, one rank's run after another. */
static void test_range(void)
{
    for (int32_t n_ranks = 1; n_ranks <= 9; n_ranks++) {
        for (int64_t n_elems = 0; n_elems <= 40; n_elems++) {
            int64_t next = 0;

            for (int32_t rank = 0; rank < n_ranks; rank++) {
                int64_t begin = -1;
                int64_t end = -1;

                TEST_CASE("%d elements, rank %d of %d", (int)n_elems, (int)rank, (int)n_ranks);
                CHECK_STATUS(dsc_shard_range_of(n_elems, n_ranks, rank, &begin, &end), DSC_OK);
                CHECK_EQ(begin, next);
                CHECK_EQ(end - begin, n_elems / n_ranks + (rank < n_elems % n_ranks));
                next = end;
            }
            CHECK_EQ(next, n_elems);
        }
    }

    int64_t begin;
    int64_t end;

    TEST_CASE("limits");
    CHECK_STATUS(dsc_shard_range_of(INT64_MAX, INT32_MAX, INT32_MAX - 1, &begin, &end), DSC_OK);
    CHECK_EQ(end, INT64_MAX);
    CHECK_ERROR(dsc_shard_range_of(-1, 1, 0, &begin, &end), DSC_EINVAL, "n_elems");
    CHECK_ERROR(dsc_shard_range_of(1, 0, 0, &begin, &end), DSC_EINVAL, "n_ranks");
    CHECK_ERROR(dsc_shard_range_of(1, 2, 2, &begin, &end), DSC_EINVAL, "rank");
    CHECK_ERROR(dsc_shard_range_of(1, 2, 0, NULL, &end), DSC_EINVAL, "out_begin_elems");
}

int main(void)
{
    test_fragments();
    test_bad_plans();
    test_range();
    return test_finish(__FILE__);
}
