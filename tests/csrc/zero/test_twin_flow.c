/*
 * zero/twin_flow.c: the split of an update between host and device against a fine grid of splits, and the limits of the
 * split.
 */
#include "test.h"

#include "dsc/tier.h"

static double step_s(const struct dsc_twin_flow *f, double ratio)
{
    double n = (double)f->n_elems;
    double host = ratio * n / f->host_elems_per_s + ratio * n * f->link_bytes_per_elem / f->link_bytes_per_s;
    double device = (1 - ratio) * n / f->device_elems_per_s;

    return host > device ? host : device;
}

static void test_twin_flow(void)
{
    const int n_grid = 2000;
    uint64_t random = 3;

    for (int round = 0; round < 300; round++) {
        struct dsc_twin_flow flow = {
            .n_elems = 1 + test_below(&random, round % 3 ? 5000 : 40),
            .device_elems_per_s = (double)(1 + test_below(&random, 1000)),
            .host_elems_per_s = (double)(1 + test_below(&random, 1000)),
            .link_bytes_per_s = (double)(1 + test_below(&random, 1000)),
            .link_bytes_per_elem = (double)test_below(&random, 7),
            .state_bytes_per_elem = 1 + test_below(&random, 16),
            .device_bytes = test_below(&random, 80000),
        };
        double ratio = -1;
        double seconds = -1;
        double least = INFINITY;

        TEST_CASE("twin flow %d", round);
        CHECK_STATUS(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_OK);
        CHECK(ratio >= 0 && ratio <= 1);
        CHECK(floor((1 - ratio) * (double)flow.n_elems) * (double)flow.state_bytes_per_elem <= (double)flow.device_bytes);
        CHECK(fabs(seconds - step_s(&flow, ratio)) <= 1e-12 * seconds);
        for (int i = 0; i <= n_grid; i++) { /* no part that fits is faster */
            double r = (double)i / n_grid;
            bool fits = floor((1 - r) * (double)flow.n_elems) * (double)flow.state_bytes_per_elem <= (double)flow.device_bytes;

            if (fits && (r >= ratio || r < ratio - 1.0 / (double)flow.n_elems)) /* others keep equally many elements */
                least = fmin(least, step_s(&flow, r));
        }
        CHECK(seconds <= least * (1 + 1e-12));
    }
}

static void test_twin_flow_limits(void)
{
    const struct dsc_twin_flow good = {1000, 3e9, 1e9, 1e9, 0, 14, INT64_MAX};
    struct dsc_twin_flow flow = good;
    double ratio = -1;
    double seconds = -1;

    TEST_CASE("equal times");
    CHECK_STATUS(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_OK);
    CHECK(ratio == 0.25 && fabs(seconds - 250e-9) < 1e-18);
    flow.link_bytes_per_elem = 2; /* 3 ns an element on the host, 1/3 on the device */
    CHECK_STATUS(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_OK);
    CHECK(fabs(ratio - 0.1) < 1e-15);
    flow.device_bytes = 14 * 250 + 13;
    CHECK_STATUS(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_OK);
    CHECK(ratio == 0.75);
    flow.device_bytes = 13;
    CHECK_STATUS(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_OK);
    CHECK(ratio == 1 && fabs(seconds - 3e-6) < 1e-18);
    flow.n_elems = 0;
    CHECK_STATUS(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_OK);
    CHECK(fabs(ratio - 0.1) < 1e-15 && seconds == 0);

    TEST_CASE("rounding at the largest counts");
    flow = good;
    flow.host_elems_per_s = 1e60;
    flow.device_elems_per_s = 1e60;
    flow.n_elems = (INT64_C(1) << 50) - 1;
    flow.state_bytes_per_elem = 1;
    for (int64_t room = 1; room < flow.n_elems / 2; room = 3 * room + 1) { /* equal times lie at a half */
        flow.device_bytes = room;
        CHECK_STATUS(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_OK);
        CHECK(floor((1 - ratio) * (double)flow.n_elems) <= (double)room);
        CHECK(floor((1 - ratio) * (double)flow.n_elems) >= (double)room - 1);
    }

    TEST_CASE("extremes");
    flow = good;
    flow.n_elems = INT64_C(1) << 50;
    flow.device_elems_per_s = 1e-60;
    flow.host_elems_per_s = 1e60;
    CHECK_STATUS(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_OK);
    CHECK(ratio == 1 && isfinite(seconds));
    flow.link_bytes_per_s = 1e-60;
    flow.link_bytes_per_elem = 1e60;
    flow.device_elems_per_s = 1e60;
    CHECK_STATUS(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_OK);
    CHECK(ratio >= 0 && ratio < 1e-100 && isfinite(seconds));

    ratio = seconds = -7;
    CHECK_ERROR(dsc_twin_flow_ratio(NULL, &ratio, &seconds), DSC_EINVAL, "flow is NULL");
    CHECK_ERROR(dsc_twin_flow_ratio(&good, NULL, &seconds), DSC_EINVAL, "out_ratio is NULL");
    CHECK_ERROR(dsc_twin_flow_ratio(&good, &ratio, NULL), DSC_EINVAL, "out_step_s is NULL");

    const double bad[] = {NAN, INFINITY, -INFINITY, -1, 0, 5e-324};

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        TEST_CASE("a rate of %g", bad[i]);
        flow = good, flow.device_elems_per_s = bad[i];
        CHECK_ERROR(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_EINVAL, "device_elems_per_s");
        flow = good, flow.host_elems_per_s = bad[i];
        CHECK_ERROR(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_EINVAL, "host_elems_per_s");
        flow = good, flow.link_bytes_per_s = bad[i];
        CHECK_ERROR(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_EINVAL, "link_bytes_per_s");
        flow = good, flow.link_bytes_per_elem = bad[i];
        if (!(bad[i] >= 0) || isinf(bad[i]))
            CHECK_ERROR(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_EINVAL, "link_bytes_per_elem");
    }
    TEST_CASE("bad counts");
    flow = good, flow.n_elems = -1;
    CHECK_ERROR(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_EINVAL, "n_elems is -1");
    flow = good, flow.n_elems = (INT64_C(1) << 50) + 1;
    CHECK_ERROR(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_EINVAL, "n_elems");
    flow = good, flow.state_bytes_per_elem = 0;
    CHECK_ERROR(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_EINVAL, "state_bytes_per_elem");
    flow = good, flow.device_bytes = -1;
    CHECK_ERROR(dsc_twin_flow_ratio(&flow, &ratio, &seconds), DSC_EINVAL, "device_bytes");
    CHECK(ratio == -7 && seconds == -7);
}

int main(void)
{
    test_twin_flow();
    test_twin_flow_limits();
    return test_finish(__FILE__);
}
