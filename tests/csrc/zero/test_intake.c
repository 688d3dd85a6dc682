/*
 * zero/intake.c against sums kept by the test in f64, in every pair of dtypes. The first gradient is copied, and later
 * ones are added. Missing gradients are named.
 */
#include "test.h"

#include "base/half.h"
#include "dsc/intake.h"

#define MAX_PARAMS 12
#define MAX_BUCKETS 4
#define MAX_ELEMS 700
#define BUFFER_ELEMS (MAX_PARAMS * (MAX_ELEMS + 3))

/* Writes a small integer. Small integers and sums of a few of them are exact in every dtype. */
static void put(void *data, dsc_dtype dtype, int64_t i, float value)
{
    if (dtype == DSC_DTYPE_F32)
        ((float *)data)[i] = value;
    else
        ((uint16_t *)data)[i] = dtype == DSC_DTYPE_BF16 ? dsc_f32_to_bf16(value) : dsc_f32_to_f16(value);
}

static float get(const void *data, dsc_dtype dtype, int64_t i)
{
    if (dtype == DSC_DTYPE_F32)
        return ((const float *)data)[i];
    return dtype == DSC_DTYPE_BF16 ? dsc_bf16_to_f32(((const uint16_t *)data)[i]) : dsc_f16_to_f32(((const uint16_t *)data)[i]);
}

struct case_ {
    struct dsc_intake_place places[MAX_PARAMS];
    struct dsc_intake_bucket buckets[MAX_BUCKETS];
    uint8_t is_written[MAX_PARAMS];
    int64_t n_params;
    int64_t n_buckets;
    struct dsc_intake intake;
};

static void make_case(struct case_ *made, uint64_t *random)
{
    static const int64_t sizes[] = {0, 1, 7, 31, 64, 127, MAX_ELEMS};
    int64_t at = 0;

    made->n_params = test_below(random, MAX_PARAMS + 1);
    made->n_buckets = 1 + test_below(random, MAX_BUCKETS);
    for (int64_t i = 0, bucket = 0; i < made->n_params; i++) {
        while (bucket + 1 < made->n_buckets && test_below(random, 3) == 0) {
            bucket++; /* some buckets have no members */
            at = 0;
        }
        made->places[i] = (struct dsc_intake_place){bucket, at + test_below(random, 4), sizes[test_below(random, 7)]};
        at = made->places[i].begin_elems + made->places[i].n_elems;
    }
    memset(made->is_written, 0x5a, sizeof made->is_written);
    CHECK_STATUS(dsc_intake_init(&made->intake, made->places, made->n_params, made->buckets, made->n_buckets, made->is_written), DSC_OK);
}

static void check_missing(const struct case_ *of, int64_t bucket, const int *n_came)
{
    int64_t found = -7;

    for (int64_t i = 0; i < of->n_params; i++)
        if (of->places[i].bucket == bucket && n_came[i] == 0) {
            CHECK_STATUS(dsc_intake_next_missing(&of->intake, bucket, found < 0 ? 0 : found + 1, &found), DSC_OK);
            CHECK_EQ(found, i);
        }
    CHECK_STATUS(dsc_intake_next_missing(&of->intake, bucket, found < 0 ? 0 : found + 1, &found), DSC_OK);
    CHECK_EQ(found, -1);
}

static float gradient(int64_t i, int64_t element)
{
    return (float)((i * 5 + element * 3) % 11 - 5);
}

static void check_bucket(struct case_ *of, int64_t bucket, dsc_dtype dtype, uint64_t *random)
{
    static float buffer[BUFFER_ELEMS];
    static float grad[MAX_ELEMS];
    int n_came[MAX_PARAMS] = {0};

    for (int64_t i = 0; i < BUFFER_ELEMS; i++)
        put(buffer, dtype, i, -99);
    CHECK_STATUS(dsc_intake_open(&of->intake, bucket, buffer, BUFFER_ELEMS, dtype), DSC_OK);
    for (int64_t step = 0; step < 2 * of->n_params; step++) {
        int64_t param = test_below(random, of->n_params);
        dsc_dtype sent = (dsc_dtype)test_below(random, DSC_DTYPE_COUNT);
        struct dsc_span span = {grad, of->places[param].n_elems, sent};

        if (of->places[param].bucket != bucket)
            continue;
        for (int64_t i = 0; i < span.n_elems; i++)
            put(grad, sent, i, gradient(param, i));
        CHECK_STATUS(dsc_intake_add(&of->intake, param, &span, NULL), DSC_OK);
        n_came[param]++;
    }
    check_missing(of, bucket, n_came);
    for (int64_t param = 0; param < of->n_params; param++)
        if (of->places[param].bucket == bucket)
            for (int64_t i = 0; i < of->places[param].n_elems; i++) {
                float want = n_came[param] == 0 ? -99 : (float)n_came[param] * gradient(param, i);

                TEST_AT(i);
                CHECK(get(buffer, dtype, of->places[param].begin_elems + i) == want);
            }
    /* Elements between places stay untouched. */
    for (int64_t i = 0; i < BUFFER_ELEMS; i++) {
        bool is_inside = false;

        for (int64_t param = 0; param < of->n_params; param++)
            is_inside |= of->places[param].bucket == bucket && i >= of->places[param].begin_elems &&
                         i < of->places[param].begin_elems + of->places[param].n_elems;
        TEST_AT(i);
        CHECK(is_inside || get(buffer, dtype, i) == -99);
    }
    CHECK_STATUS(dsc_intake_clear_rest(&of->intake, bucket), DSC_OK);
    for (int64_t i = 0; i < BUFFER_ELEMS; i++) {
        float want = 0;

        for (int64_t param = 0; param < of->n_params; param++)
            if (of->places[param].bucket == bucket && i >= of->places[param].begin_elems &&
                i < of->places[param].begin_elems + of->places[param].n_elems)
                want = (float)n_came[param] * gradient(param, i - of->places[param].begin_elems);
        TEST_AT(i);
        CHECK(get(buffer, dtype, i) == want);
    }
    CHECK_STATUS(dsc_intake_fill(&of->intake, bucket), DSC_OK);
    for (int64_t param = 0; param < of->n_params; param++)
        n_came[param] = 1;
    check_missing(of, bucket, n_came);
    CHECK_STATUS(dsc_intake_close(&of->intake, bucket), DSC_OK);
    CHECK_STATUS(dsc_intake_close(&of->intake, bucket), DSC_OK);
}

static void test_random_cases(void)
{
    uint64_t random = 23;
    static struct case_ made;

    for (int round = 0; round < 200; round++) {
        TEST_CASE("round %d", round);
        make_case(&made, &random);
        for (int window = 0; window < 2; window++)
            for (int64_t bucket = 0; bucket < made.n_buckets; bucket++)
                check_bucket(&made, bucket, (dsc_dtype)test_below(&random, DSC_DTYPE_COUNT), &random);
    }
}

static void test_sums_are_rounded_once(void)
{
    const struct dsc_intake_place place = {0, 0, 1};
    struct dsc_intake_bucket bucket;
    uint8_t is_written;
    struct dsc_intake intake;
    uint16_t sum = 0;
    float one = 1, ulp = 0x1p-9f;
    struct dsc_span first = {&one, 1, DSC_DTYPE_F32}, second = {&ulp, 1, DSC_DTYPE_F32};

    TEST_CASE("bf16 sums of f32 gradients");
    CHECK_STATUS(dsc_intake_init(&intake, &place, 1, &bucket, 1, &is_written), DSC_OK);
    CHECK_STATUS(dsc_intake_open(&intake, 0, &sum, 1, DSC_DTYPE_BF16), DSC_OK);
    CHECK_STATUS(dsc_intake_add(&intake, 0, &first, NULL), DSC_OK);
    for (int i = 0; i < 3; i++)
        CHECK_STATUS(dsc_intake_add(&intake, 0, &second, NULL), DSC_OK);
    CHECK(dsc_bf16_to_f32(sum) == 1.0f); /* each is a quarter of bf16's resolution at 1 */
    ulp = NAN;
    CHECK_STATUS(dsc_intake_add(&intake, 0, &second, NULL), DSC_OK);
    CHECK(isnan(dsc_bf16_to_f32(sum)));
}

static void test_bad_calls(void)
{
    const struct dsc_intake_place places[] = {{0, 0, 2}, {1, 0, 3}};
    struct dsc_intake_place bad[2];
    struct dsc_intake_bucket buckets[2];
    uint8_t is_written[2];
    struct dsc_intake intake;
    float buffer[4] = {7, 7, 7, 7};
    struct dsc_span grad = {buffer, 2, DSC_DTYPE_F32};
    bool is_first = false;
    int64_t param = -7;

    TEST_CASE("bad calls");
    CHECK_STATUS(dsc_intake_init(NULL, places, 2, buckets, 2, is_written), DSC_EINVAL);
    CHECK_STATUS(dsc_intake_init(&intake, NULL, 2, buckets, 2, is_written), DSC_EINVAL);
    CHECK_STATUS(dsc_intake_init(&intake, places, 2, NULL, 2, is_written), DSC_EINVAL);
    CHECK_STATUS(dsc_intake_init(&intake, places, -1, buckets, 2, is_written), DSC_EINVAL);
    CHECK_STATUS(dsc_intake_init(&intake, places, 2, buckets, 1, is_written), DSC_EINVAL);
    CHECK_STR(dsc_last_error(), "places[1].bucket is 1, must be 0 to 0");
    memcpy(bad, places, sizeof bad);
    bad[0].bucket = 1;
    bad[1].bucket = 0;
    CHECK_STATUS(dsc_intake_init(&intake, bad, 2, buckets, 2, is_written), DSC_EINVAL);
    CHECK_STR(dsc_last_error(), "places[1].bucket is 0, must be 1 to 1");
    CHECK_STATUS(dsc_intake_init(&intake, NULL, 0, NULL, 0, NULL), DSC_OK);
    bad[1] = (struct dsc_intake_place){1, 1, 2};
    bad[0] = (struct dsc_intake_place){1, 0, 2};
    CHECK_STATUS(dsc_intake_init(&intake, bad, 2, buckets, 2, is_written), DSC_EINVAL);
    CHECK_STR(dsc_last_error(), "places[1] begins at 1 and has 2 elements, must begin at 2 or later");
    bad[1] = (struct dsc_intake_place){1, -1, 2};
    CHECK_STATUS(dsc_intake_init(&intake, bad, 2, buckets, 2, is_written), DSC_EINVAL);
    CHECK_STATUS(dsc_intake_init(&intake, NULL, 0, NULL, 0, NULL), DSC_OK);
    CHECK_STATUS(dsc_intake_init(&intake, places, 2, buckets, 2, is_written), DSC_OK);
    CHECK_STATUS(dsc_intake_add(&intake, 0, &grad, NULL), DSC_ESTATE);
    CHECK_STATUS(dsc_intake_fill(&intake, 0), DSC_ESTATE);
    CHECK_STATUS(dsc_intake_next_missing(&intake, 0, 0, &param), DSC_ESTATE);
    CHECK_STATUS(dsc_intake_note(&intake, 0, &is_first), DSC_ESTATE);
    CHECK_STATUS(dsc_intake_open(&intake, 2, buffer, 4, DSC_DTYPE_F32), DSC_EINVAL);
    CHECK_STATUS(dsc_intake_open(&intake, 0, buffer, 4, DSC_DTYPE_COUNT), DSC_EINVAL);
    CHECK_STATUS(dsc_intake_open(&intake, 0, buffer, 1, DSC_DTYPE_F32), DSC_EINVAL);
    CHECK_STR(dsc_last_error(), "bucket 0 has 1 elements, its places reach to 2");
    CHECK_STATUS(dsc_intake_clear_rest(&intake, 0), DSC_ESTATE);
    CHECK_STATUS(dsc_intake_close(&intake, -1), DSC_EINVAL);
    /* A dtype that the cores cannot write. */
    CHECK_STATUS(dsc_intake_open(&intake, 0, NULL, 2, DSC_DTYPE_COUNT), DSC_OK);
    CHECK_STATUS(dsc_intake_add(&intake, 0, &grad, NULL), DSC_ESTATE);
    CHECK_STATUS(dsc_intake_clear_rest(&intake, 0), DSC_ESTATE);
    CHECK_STATUS(dsc_intake_note(&intake, 0, &is_first), DSC_OK);
    CHECK(is_first);
    CHECK_STATUS(dsc_intake_note(&intake, 0, &is_first), DSC_OK);
    CHECK(!is_first);
    CHECK_STATUS(dsc_intake_note(&intake, 0, NULL), DSC_EINVAL);
    /* A gradient of a wrong length is refused and changes nothing. */
    CHECK_STATUS(dsc_intake_open(&intake, 1, buffer, 4, DSC_DTYPE_F32), DSC_OK);
    CHECK_STATUS(dsc_intake_add(&intake, 1, &grad, NULL), DSC_EINVAL);
    CHECK_STR(dsc_last_error(), "the gradient of parameter 1 has 2 elements, its place 3");
    CHECK_STATUS(dsc_intake_add(&intake, 1, NULL, NULL), DSC_EINVAL);
    CHECK_STATUS(dsc_intake_add(&intake, 2, &grad, NULL), DSC_EINVAL);
    CHECK_STATUS(dsc_intake_next_missing(&intake, 1, 0, NULL), DSC_EINVAL);
    CHECK_STATUS(dsc_intake_next_missing(&intake, 1, 0, &param), DSC_OK);
    CHECK_EQ(param, 1);
    CHECK(buffer[0] == 7 && buffer[3] == 7);
    /* A place without elements needs no memory. */
    bad[0] = (struct dsc_intake_place){0, 0, 0};
    CHECK_STATUS(dsc_intake_init(&intake, bad, 1, buckets, 1, is_written), DSC_OK);
    CHECK_STATUS(dsc_intake_open(&intake, 0, NULL, 0, DSC_DTYPE_F32), DSC_OK);
    CHECK_STATUS(dsc_intake_clear_rest(&intake, 0), DSC_OK);
}

int main(void)
{
    test_random_cases();
    test_sums_are_rounded_once();
    test_bad_calls();
    return test_finish(__FILE__);
}
