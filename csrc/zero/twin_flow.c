/* Computes how much of an update the host does while the device does the rest (Twin-Flow). */
#include "dsc/tier.h"

#include "base/fail.h"

#include <math.h>

/* Up to this number of elements, rounding errors stay below one element, so that the kept part fits to the byte. */
#define MAX_ELEMS (INT64_C(1) << 50)

/* Limits far beyond any machine, chosen so that no quotient or product below leaves the range of a double. */
#define MIN_RATE 1e-60
#define MAX_RATE 1e60

static dsc_status check_rate(const char *name, double value, double least)
{
    if (!(value >= least && value <= MAX_RATE)) /* NaN compares false */
        return dsc_fail(DSC_EINVAL, "%s is %g, must be a number from %g to %g", name, value, least, MAX_RATE);
    return DSC_OK;
}

static dsc_status check_flow(const struct dsc_twin_flow *flow)
{
    if (flow->n_elems < 0 || flow->n_elems > MAX_ELEMS)
        return dsc_fail(DSC_EINVAL, "n_elems is %lld, must be 0 to 2^50", (long long)flow->n_elems);
    DSC_TRY(check_rate("device_elems_per_s", flow->device_elems_per_s, MIN_RATE));
    DSC_TRY(check_rate("host_elems_per_s", flow->host_elems_per_s, MIN_RATE));
    DSC_TRY(check_rate("link_bytes_per_s", flow->link_bytes_per_s, MIN_RATE));
    DSC_TRY(check_rate("link_bytes_per_elem", flow->link_bytes_per_elem, 0));
    if (flow->state_bytes_per_elem < 1)
        return dsc_fail(DSC_EINVAL, "state_bytes_per_elem is %lld, must be at least 1",
                        (long long)flow->state_bytes_per_elem);
    if (flow->device_bytes < 0)
        return dsc_fail(DSC_EINVAL, "device_bytes is %lld, must not be negative", (long long)flow->device_bytes);
    return DSC_OK;
}

dsc_status dsc_twin_flow_ratio(const struct dsc_twin_flow *flow, double *out_ratio, double *out_step_s)
{
    if (flow == NULL || out_ratio == NULL || out_step_s == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL",
                        flow == NULL        ? "flow"
                        : out_ratio == NULL ? "out_ratio"
                                            : "out_step_s");
    DSC_TRY(check_flow(flow));

    const double n = (double)flow->n_elems;
    const double host_s =
        1 / flow->host_elems_per_s + flow->link_bytes_per_elem / flow->link_bytes_per_s; /* an element */
    const double device_s = 1 / flow->device_elems_per_s;
    const int64_t room_elems = flow->device_bytes / flow->state_bytes_per_elem;
    double ratio = device_s / (device_s + host_s);

    if (room_elems < flow->n_elems)
        ratio = fmax(ratio, 1 - (double)room_elems / n);
    *out_ratio = ratio;
    *out_step_s = fmax(ratio * n * host_s, (1 - ratio) * n * device_s);
    return DSC_OK;
}
