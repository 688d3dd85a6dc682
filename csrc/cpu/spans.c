/* The checks of lists of spans that several cores share. */
#include "cpu/spans.h"

#include "base/fail.h"

dsc_status dsc_check_span(const struct dsc_span *span, const char *list, int64_t i)
{
    if (dsc_dtype_bytes(span->dtype) == 0)
        return dsc_fail(DSC_EINVAL, "%s[%lld].dtype is %d, which is no dsc_dtype", list, (long long)i,
                        (int)span->dtype);
    if (span->n_elems < 0)
        return dsc_fail(DSC_EINVAL, "%s[%lld].n_elems is %lld, must not be negative", list, (long long)i,
                        (long long)span->n_elems);
    if (span->data == NULL && span->n_elems > 0)
        return dsc_fail(DSC_EINVAL, "%s[%lld].data is NULL for %lld elements", list, (long long)i,
                        (long long)span->n_elems);
    return DSC_OK;
}

dsc_status dsc_check_spans(const struct dsc_span *spans, int64_t n_spans, const char *list)
{
    if (n_spans < 0)
        return dsc_fail(DSC_EINVAL, "the number of %s is %lld, must not be negative", list, (long long)n_spans);
    if (spans == NULL && n_spans > 0)
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld entries", list, (long long)n_spans);
    for (int64_t i = 0; i < n_spans; i++)
        DSC_TRY(dsc_check_span(&spans[i], list, i));
    return DSC_OK;
}

dsc_status dsc_list_of_spans(struct dsc_list *list, const struct dsc_span *spans, int64_t n_spans)
{
    return dsc_list_init(list, n_spans > 0 ? &spans->n_elems : NULL, sizeof *spans, n_spans);
}
