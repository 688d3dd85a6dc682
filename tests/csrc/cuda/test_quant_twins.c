/*
 * Compares the CUDA library's quantization by groups with the host's, on an emulated device and on a real device if
 * there is one: codes, scales, zero points and values must have equal bits, and nothing may be written outside of them.
 */
#include "twins.h"

#include "dsc/quant.h"

/* Bytes, on both sides, with a guard byte. */
struct bytes {
    unsigned char *host;
    void *device;
    size_t n;
};

static struct bytes bytes_create(const struct device *device, size_t n)
{
    struct bytes bytes = {test_alloc(n + 1), device_alloc(device, n + 1), n};

    memset(bytes.host, 0x55, n + 1);
    device_upload(device, bytes.device, bytes.host, n + 1);
    return bytes;
}

static void bytes_check(const struct device *device, const struct bytes *bytes)
{
    unsigned char *got = test_alloc(bytes->n + 1);

    device_download(device, got, bytes->device, bytes->n + 1);
    CHECK_BYTES(got, bytes->host, bytes->n + 1);
    free(got);
}

static void bytes_free(const struct device *device, struct bytes *bytes)
{
    free(bytes->host);
    device_free(device, bytes->device);
}

struct how {
    int64_t n_rows, n_cols, group, shift; /* shift: elements before the first one */
    dsc_dtype dtype;
    dsc_quant_format format;
    bool is_symmetric, is_stochastic, has_specials;
    dsc_quant_scale scale_type;
};

static void fill(struct bench *b, struct twin *x, bool has_specials)
{
    if (has_specials) {
        for (int64_t i = 0; i < x->host.n; i++)
            if (i % 97 == 0)
                array_set(&x->host, i, dsc_f32_from_bits((const uint32_t[]){0x7f800000, 0xff800000, 0x7fc00000, 0x7f7fffff, 0x00000001, 0x80000000}[i / 97 % 6]));
            else if (i % 37 < 18)
                array_set(&x->host, i, ldexpf(array_get(&x->host, i), (int)(i % 23) - 20));
    }
    device_upload(b->device, x->device, x->host.data, (size_t)x->host.n * dsc_dtype_bytes(x->host.dtype));
}

static void test_calls(struct bench *b, const struct how *how)
{
    const struct dsc_accel *accel = b->device->accel;
    int64_t n_groups = how->n_rows * dsc_quant_n_groups(how->n_cols, how->group);
    size_t shift = (size_t)how->shift * dsc_dtype_bytes(how->dtype);
    struct twin *x = bench_add(b, how->dtype, how->n_rows * how->n_cols + how->shift, 3);
    struct twin *y = bench_add(b, how->dtype, how->n_rows * how->n_cols + how->shift, 0), *scales = bench_add(b, DSC_DTYPE_F32, n_groups, 0);
    struct bytes codes = bytes_create(b->device, (size_t)(how->n_rows * dsc_quant_row_bytes(how->format, how->n_cols)));
    struct bytes zeros = bytes_create(b->device, (size_t)n_groups);
    double *scratch = device_alloc(b->device, DSC_ACCEL_SCRATCH_ELEMS * sizeof *scratch);
#define CALL(P, of_codes, of_zeros)                                                                                                          \
    {.n_rows = how->n_rows, .n_cols = how->n_cols, .dtype = how->dtype, .format = how->format, .group = how->group, .seed = 0x123456789abcdef0u, \
     .is_symmetric = how->is_symmetric, .is_stochastic = how->is_stochastic, .scale_type = how->scale_type, .offset = 5, .x = (char *)P(x) + shift, \
     .y = (char *)P(y) + shift, .codes = (of_codes), .scales = P(scales), .zero_points = (of_zeros)}
    struct dsc_quant host = CALL(H, codes.host, (int8_t *)zeros.host), device = CALL(D, codes.device, zeros.device);

    TEST_CASE("%s: [%d, %d] by %d of %s, format %d, scales %d, symmetric %d, stochastic %d", b->device->name, (int)how->n_rows, (int)how->n_cols,
              (int)how->group, dtype_names[how->dtype], (int)how->format, (int)how->scale_type, how->is_symmetric, how->is_stochastic);
    fill(b, x, how->has_specials);
    CHECK_STATUS(dsc_quant_fake(&host, NULL), DSC_OK);
    CHECK_STATUS(accel->quant_fake(&device, scratch, NULL), DSC_OK);
    bench_check(b, y, 0, 0, "fake");
    bytes_check(b->device, &zeros); /* fake writes none */
    CHECK_STATUS(dsc_quant_quantize(&host, NULL), DSC_OK);
    CHECK_STATUS(accel->quant_quantize(&device, scratch, NULL), DSC_OK);
    bench_check(b, scales, 0, 0, "scales");
    bytes_check(b->device, &codes);
    bytes_check(b->device, &zeros);
    CHECK_STATUS(dsc_quant_dequantize(&host, NULL), DSC_OK);
    CHECK_STATUS(accel->quant_dequantize(&device, scratch, NULL), DSC_OK);
    bench_check(b, y, 0, 0, "values of codes");
    /* The scales of other elements: some lie outside of the format's range. In place. */
    host.has_scales = device.has_scales = true;
    host.x = y->host.data + shift;
    device.x = (char *)y->device + shift;
    for (int64_t g = 0; g < n_groups; g++)
        array_set(&scales->host, g, 0.7f * array_get(&scales->host, g));
    device_upload(b->device, scales->device, scales->host.data, (size_t)n_groups * sizeof(float));
    CHECK_STATUS(dsc_quant_quantize(&host, NULL), DSC_OK);
    CHECK_STATUS(accel->quant_quantize(&device, scratch, NULL), DSC_OK);
    bytes_check(b->device, &codes);
    CHECK_STATUS(dsc_quant_fake(&host, NULL), DSC_OK);
    CHECK_STATUS(accel->quant_fake(&device, scratch, NULL), DSC_OK);
    bench_check(b, y, 0, 0, "fake in place with given scales");
    device_free(b->device, scratch);
    bytes_free(b->device, &codes);
    bytes_free(b->device, &zeros);
    bench_clear(b);
}

/*
 * Rows, columns, group, shift: nothing, tails, groups of odd length, more groups than a launch of the emulated device
 * has teams, a group that is cut in two, and one in three.
 */
static const int64_t sizes[][4] = {{0, 5, 2, 0},   {3, 0, 4, 0},      {1, 1, 1, 0},      {3, 7, 3, 1},      {5, 17, 16, 0}, {2, 64, 64, 0},
                                   {7, 33, 1, 0},  {3, 132, 64, 0},   {3, 130, 64, 1},   {2, 129, 1000, 1}, {29, 60, 4, 0}, {2, 2100, 1030, 0},
                                   {2, 2100, 513, 0}};
static const int64_t large_sizes[][4] = {{1, 33001, 33001, 0}, {1, 50003, 60000, 1}, {1, 40000, 2001, 0}};

/*
 * Every third of the pairs of a format and a kind, other ones for the next size: with and without zero points, each type
 * of scale, both ways of rounding.
 */
static void test_formats(struct bench *b, const int64_t size[4], int s, bool has_specials)
{
    for (int format = 0; format < DSC_QUANT_FORMAT_COUNT; format++)
        for (int kind = (s + format) % 3; kind < 2 * (DSC_QUANT_SCALE_COUNT + 3); kind += 3) {
            dsc_dtype dtype = (dsc_dtype)((s / 3 + kind) % DSC_DTYPE_COUNT);
            int scale_type = kind / 2 % DSC_QUANT_SCALE_COUNT;
            struct how how = {size[0], size[1], size[2], size[3], dtype, (dsc_quant_format)format, kind / 2 < DSC_QUANT_SCALE_COUNT, kind % 2 == 1,
                              has_specials, (dsc_quant_scale)scale_type};
            struct dsc_quant call = {.n_rows = 0, .group = 1, .dtype = dtype, .format = how.format, .is_symmetric = how.is_symmetric, .scale_type = how.scale_type};

            if (dsc_quant_fake_check(&call) == DSC_OK) /* some formats are symmetric only */
                test_calls(b, &how);
        }
}

/* A host pointer in a kernel would destroy the CUDA context of the process, so it is refused before the launch. */
static void test_host_memory(const struct device *device)
{
    static float on_stack[4], scales[2];
    struct dsc_quant call = {.n_rows = 1, .n_cols = 4, .group = 2, .is_symmetric = true, .x = on_stack, .y = on_stack, .codes = on_stack, .scales = scales};

    TEST_CASE("%s: refused", device->name);
    if (device->emulator != NULL)
        device->emulator->host_pointer = on_stack;
    CHECK_ERROR(device->accel->quant_quantize(&call, NULL, NULL), DSC_EINVAL, "host memory");
    CHECK_ERROR(device->accel->quant_dequantize(&call, NULL, NULL), DSC_EINVAL, "host memory");
    CHECK_ERROR(device->accel->quant_fake(&call, NULL, NULL), DSC_EINVAL, "host memory");
}

static void test_device(const struct device *device)
{
    struct bench bench = {.device = device, .random = 6};

    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        test_formats(&bench, sizes[s], (int)s, s % 2 == 1);
    for (size_t s = 0; s < sizeof large_sizes / sizeof *large_sizes; s++)
        test_formats(&bench, large_sizes[s], (int)s, false);
    test_host_memory(device);
}

int main(void)
{
    return device_run_tests(__FILE__, test_device);
}
