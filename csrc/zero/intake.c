/* Copies the first gradient of a parameter into the buffer of its bucket, and adds later ones. */
#include "dsc/intake.h"

#include "base/fail.h"

#include <string.h>

dsc_status dsc_intake_init(struct dsc_intake *intake, const struct dsc_intake_place *places, int64_t n_params,
                           struct dsc_intake_bucket *buckets, int64_t n_buckets, uint8_t *is_written)
{
    if (intake == NULL)
        return dsc_fail(DSC_EINVAL, "intake is NULL");
    if (n_params < 0 || n_buckets < 0)
        return dsc_fail(DSC_EINVAL, "n_params is %lld and n_buckets is %lld, neither may be negative",
                        (long long)n_params, (long long)n_buckets);
    if (n_params > 0 && (places == NULL || is_written == NULL))
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld parameters", places == NULL ? "places" : "is_written",
                        (long long)n_params);
    if (n_buckets > 0 && buckets == NULL)
        return dsc_fail(DSC_EINVAL, "buckets is NULL for %lld buckets", (long long)n_buckets);
    for (int64_t i = 0; i < n_params; i++) {
        int64_t lowest = i == 0 ? 0 : places[i - 1].bucket;

        if (places[i].bucket < lowest || places[i].bucket >= n_buckets)
            return dsc_fail(DSC_EINVAL, "places[%lld].bucket is %lld, must be %lld to %lld", (long long)i,
                            (long long)places[i].bucket, (long long)lowest, (long long)n_buckets - 1);
        lowest =
            i > 0 && places[i].bucket == places[i - 1].bucket ? places[i - 1].begin_elems + places[i - 1].n_elems : 0;
        if (places[i].begin_elems < lowest || places[i].n_elems < 0)
            return dsc_fail(
                DSC_EINVAL, "places[%lld] begins at %lld and has %lld elements, must begin at %lld or later",
                (long long)i, (long long)places[i].begin_elems, (long long)places[i].n_elems, (long long)lowest);
    }
    *intake = (struct dsc_intake){
        .places = places,
        .n_params = n_params,
        .buckets = buckets,
        .n_buckets = n_buckets,
        .is_written = is_written,
    };
    for (int64_t b = 0, param = 0; b < n_buckets; b++) {
        buckets[b] = (struct dsc_intake_bucket){.first_param = param};
        while (param < n_params && places[param].bucket == b)
            is_written[param++] = 0;
        buckets[b].end_param = param;
    }
    return DSC_OK;
}

static dsc_status find_bucket(const struct dsc_intake *intake, int64_t bucket, struct dsc_intake_bucket **out_bucket)
{
    if (intake == NULL)
        return dsc_fail(DSC_EINVAL, "intake is NULL");
    if (bucket < 0 || bucket >= intake->n_buckets)
        return dsc_fail(DSC_EINVAL, "bucket is %lld, must be 0 to %lld", (long long)bucket,
                        (long long)intake->n_buckets - 1);
    *out_bucket = &intake->buckets[bucket];
    return DSC_OK;
}

static dsc_status find_open(const struct dsc_intake *intake, int64_t bucket, struct dsc_intake_bucket **out_bucket)
{
    DSC_TRY(find_bucket(intake, bucket, out_bucket));
    if (!(*out_bucket)->is_open)
        return dsc_fail(DSC_ESTATE, "bucket %lld is not open", (long long)bucket);
    return DSC_OK;
}

static dsc_status find_param(const struct dsc_intake *intake, int64_t param, struct dsc_intake_bucket **out_bucket)
{
    if (intake == NULL)
        return dsc_fail(DSC_EINVAL, "intake is NULL");
    if (param < 0 || param >= intake->n_params)
        return dsc_fail(DSC_EINVAL, "param is %lld, must be 0 to %lld", (long long)param,
                        (long long)intake->n_params - 1);
    return find_open(intake, intake->places[param].bucket, out_bucket);
}

/* The end of a bucket's last place, in elements. */
static int64_t end_of(const struct dsc_intake *intake, const struct dsc_intake_bucket *bucket)
{
    const struct dsc_intake_place *last;

    if (bucket->end_param == bucket->first_param)
        return 0;
    last = &intake->places[bucket->end_param - 1];
    return last->begin_elems + last->n_elems;
}

dsc_status dsc_intake_open(struct dsc_intake *intake, int64_t bucket, void *data, int64_t n_elems, dsc_dtype dtype)
{
    struct dsc_intake_bucket *opened = NULL;

    DSC_TRY(find_bucket(intake, bucket, &opened));
    if (data != NULL && dsc_dtype_bytes(dtype) == 0)
        return dsc_fail(DSC_EINVAL, "dtype is %d, which is no dsc_dtype", (int)dtype);
    if (end_of(intake, opened) > n_elems)
        return dsc_fail(DSC_EINVAL, "bucket %lld has %lld elements, its places reach to %lld", (long long)bucket,
                        (long long)n_elems, (long long)end_of(intake, opened));
    opened->n_elems = n_elems;
    opened->data = data;
    opened->dtype = dtype;
    opened->is_open = true;
    opened->n_written = 0;
    for (int64_t i = opened->first_param; i < opened->end_param; i++)
        intake->is_written[i] = 0;
    return DSC_OK;
}

dsc_status dsc_intake_close(struct dsc_intake *intake, int64_t bucket)
{
    struct dsc_intake_bucket *closed = NULL;

    DSC_TRY(find_bucket(intake, bucket, &closed));
    closed->data = NULL;
    closed->is_open = false;
    return DSC_OK;
}

dsc_status dsc_intake_fill(struct dsc_intake *intake, int64_t bucket)
{
    struct dsc_intake_bucket *filled = NULL;

    DSC_TRY(find_open(intake, bucket, &filled));
    for (int64_t i = filled->first_param; i < filled->end_param; i++)
        intake->is_written[i] = 1;
    filled->n_written = filled->end_param - filled->first_param;
    return DSC_OK;
}

dsc_status dsc_intake_next_missing(const struct dsc_intake *intake, int64_t bucket, int64_t param, int64_t *out_param)
{
    struct dsc_intake_bucket *asked = NULL;

    DSC_TRY(find_open(intake, bucket, &asked));
    if (out_param == NULL)
        return dsc_fail(DSC_EINVAL, "out_param is NULL");
    *out_param = -1;
    if (asked->n_written == asked->end_param - asked->first_param)
        return DSC_OK;
    for (int64_t i = param < asked->first_param ? asked->first_param : param; i < asked->end_param; i++)
        if (!intake->is_written[i]) {
            *out_param = i;
            return DSC_OK;
        }
    return DSC_OK;
}

static void clear(const struct dsc_intake_bucket *bucket, int64_t begin_elems, int64_t end_elems)
{
    size_t bytes = dsc_dtype_bytes(bucket->dtype);

    if (end_elems > begin_elems)
        memset((char *)bucket->data + (size_t)begin_elems * bytes, 0, (size_t)(end_elems - begin_elems) * bytes);
}

dsc_status dsc_intake_clear_rest(struct dsc_intake *intake, int64_t bucket)
{
    struct dsc_intake_bucket *cleared = NULL;
    int64_t end = 0;

    DSC_TRY(find_open(intake, bucket, &cleared));
    if (cleared->data == NULL && cleared->n_elems > 0)
        return dsc_fail(DSC_ESTATE, "bucket %lld has no memory of the host", (long long)bucket);
    for (int64_t i = cleared->first_param; i < cleared->end_param; i++)
        if (intake->is_written[i]) {
            clear(cleared, end, intake->places[i].begin_elems);
            end = intake->places[i].begin_elems + intake->places[i].n_elems;
        }
    clear(cleared, end, cleared->n_elems);
    return DSC_OK;
}

/* True for the first gradient of param. */
static bool count(struct dsc_intake *intake, struct dsc_intake_bucket *bucket, int64_t param)
{
    bool is_first = !intake->is_written[param];

    bucket->n_written += is_first;
    intake->is_written[param] = 1;
    return is_first;
}

dsc_status dsc_intake_note(struct dsc_intake *intake, int64_t param, bool *out_is_first)
{
    struct dsc_intake_bucket *bucket = NULL;

    DSC_TRY(find_param(intake, param, &bucket));
    if (out_is_first == NULL)
        return dsc_fail(DSC_EINVAL, "out_is_first is NULL");
    *out_is_first = count(intake, bucket, param);
    return DSC_OK;
}

dsc_status dsc_intake_add(struct dsc_intake *intake, int64_t param, const struct dsc_span *grad,
                          const struct dsc_par *par)
{
    const struct dsc_intake_place *place;
    struct dsc_intake_bucket *bucket = NULL;
    struct dsc_span at;

    DSC_TRY(find_param(intake, param, &bucket));
    if (grad == NULL)
        return dsc_fail(DSC_EINVAL, "grad is NULL");
    if (bucket->data == NULL)
        return dsc_fail(DSC_ESTATE, "bucket %lld has no memory of the host", (long long)intake->places[param].bucket);
    place = &intake->places[param];
    if (grad->n_elems != place->n_elems)
        return dsc_fail(DSC_EINVAL, "the gradient of parameter %lld has %lld elements, its place %lld",
                        (long long)param, (long long)grad->n_elems, (long long)place->n_elems);
    at.data = (char *)bucket->data + (size_t)place->begin_elems * dsc_dtype_bytes(bucket->dtype);
    at.n_elems = place->n_elems;
    at.dtype = bucket->dtype;
    if (intake->is_written[param])
        DSC_TRY(dsc_flat_reduce(grad, 1, 1.0f, true, &at, par, NULL, NULL));
    else
        DSC_TRY(dsc_flat_cast(grad, &at, par));
    (void)count(intake, bucket, param);
    return DSC_OK;
}
