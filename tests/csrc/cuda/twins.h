/* Operands that lie on the host and on a device, for tests that compare an operator's results on both. */
#ifndef DSC_TEST_TWINS_H
#define DSC_TEST_TWINS_H

#include "arrays.h"
#include "device.h"

#define MAX_OPERANDS 12

/* One operand, once in host memory and once in device memory. Guards surround the host's copy. */
struct twin {
    struct array host;
    void *device;
};

/* All operands of a case, so that they are uploaded, compared and freed together. */
struct bench {
    const struct device *device;
    uint64_t random;
    int n;
    struct twin twins[MAX_OPERANDS];
};

static inline struct twin *bench_add(struct bench *bench, dsc_dtype dtype, int64_t n, double scale)
{
    struct twin *twin = &bench->twins[bench->n++];

    twin->host = array_create(dtype, n, 0);
    array_fill(&twin->host, scale, false, &bench->random);
    twin->device = device_alloc(bench->device, (size_t)(n + 1) * dsc_dtype_bytes(dtype));
    device_upload(bench->device, twin->device, twin->host.data, (size_t)n * dsc_dtype_bytes(dtype));
    return twin;
}

/* n_ulps 0: the same bits. */
static inline void bench_check(struct bench *bench, const struct twin *twin, double n_ulps, double floor, const char *what)
{
    static const double steps[] = {1, 65536, 8192};
    struct array got = array_create(twin->host.dtype, twin->host.n, 0);

    device_download(bench->device, got.data, twin->device, (size_t)got.n * dsc_dtype_bytes(got.dtype));
    if (n_ulps == 0) {
        check_same(&got, &twin->host, what, __FILE__, __LINE__);
    } else {
        for (int64_t i = 0; i < got.n; i++) {
            float a = array_get(&got, i), b = array_get(&twin->host, i);

            TEST_AT(i);
            if (!(isnan(a) && isnan(b)) && a != b)
                test_check_near(a, b, n_ulps * steps[got.dtype], floor, what, what, __FILE__, __LINE__);
        }
    }
    array_destroy(&got);
}

static inline void bench_clear(struct bench *bench)
{
    for (int i = 0; i < bench->n; i++) {
        array_destroy(&bench->twins[i].host);
        device_free(bench->device, bench->twins[i].device);
    }
    bench->n = 0;
}

/* The host (H) and device (D) pointers of an operand, or NULL. */
#define H(twin) ((twin) == NULL ? NULL : (void *)(twin)->host.data)
#define D(twin) ((twin) == NULL ? NULL : (twin)->device)

#endif
