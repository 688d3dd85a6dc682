/*
 * Compares the CUDA library's rows of mixtures of experts with the host's, on an emulated device and on a real device
 * if there is one. Rows must have equal bits, gradients of weights differ in the order of a sum in f64 alone. Slots and
 * places that do not exist must show as NaN, and nothing may be written outside the results.
 */
#include "twins.h"

#include "dsc/moe.h"

#define MAX_SLOTS 128

/* The slots of a case: on the host, and copies on the device. */
struct slots {
    int64_t order[MAX_SLOTS], inverse[MAX_SLOTS], scratch[MAX_SLOTS];
    int64_t *on_device[3];
};

static int64_t *upload(const struct device *device, const int64_t *from, int64_t n)
{
    int64_t *to = device_alloc(device, (size_t)n * sizeof *to);

    device_upload(device, to, from, (size_t)n * sizeof *to);
    return to;
}

static void slots_upload(struct slots *slots, const struct device *device, int64_t n_rows, int64_t n)
{
    slots->on_device[0] = upload(device, slots->order, n_rows);
    slots->on_device[1] = upload(device, slots->inverse, n);
    slots->on_device[2] = upload(device, slots->scratch, n_rows); /* any contents will do */
}

static void slots_free(struct slots *slots, const struct device *device)
{
    for (int i = 0; i < 3; i++)
        device_free(device, slots->on_device[i]);
}

/* A random order of about three of four slots; every slot of the first token is without a row. */
static int64_t slots_fill(struct slots *slots, int64_t n, int64_t k, uint64_t *random)
{
    int64_t n_rows = 0;

    memset(slots, 0x11, sizeof *slots);
    for (int64_t slot = 0; slot < n; slot++) {
        slots->inverse[slot] = -1;
        if (n == 1 || (slot >= k && test_below(random, 4) > 0))
            slots->order[n_rows++] = slot;
    }
    for (int64_t i = n_rows - 1; i > 0; i--) {
        int64_t j = test_below(random, i + 1), other = slots->order[i];

        slots->order[i] = slots->order[j];
        slots->order[j] = other;
    }
    for (int64_t i = 0; i < n_rows; i++)
        slots->inverse[slots->order[i]] = i;
    return n_rows;
}

/* Pointers of an operand of elements that begins `shift` elements into its memory. */
#define HS(twin) ((void *)((char *)H(twin) + shift))
#define DS(twin) ((void *)((char *)D(twin) + shift))

#define GATHER(P, of_order, of_inverse) {n_tokens, n_rows, k, n_cols, dtype, P(x), of_order, of_inverse, P(rows)}
#define COMBINE(P, of_inverse, of_weights) {n_tokens, n_rows, k, n_cols, dtype, P(rows), of_inverse, of_weights, P(out)}
#define COMBINE_GRAD(P, of_inverse, of_weights, of_scratch, of_dweights) \
    {n_tokens, n_rows, k, n_cols, dtype, P(x), P(rows), of_inverse, of_weights, of_scratch, P(drows), of_dweights}

/* kind: 0 with weights, 1 with weights and special values, 2 without weights and their gradients. */
static void test_rows(struct bench *b, dsc_dtype dtype, int64_t n_tokens, int64_t k, int64_t n_cols, int64_t n_shift, int kind)
{
    struct slots slots;
    int64_t n = n_tokens * k, n_rows = slots_fill(&slots, n, k, &b->random);
    size_t shift = (size_t)n_shift * dsc_dtype_bytes(dtype);
    struct twin *x = bench_add(b, dtype, n_tokens * n_cols + n_shift, 3), *rows = bench_add(b, dtype, (n_rows + 1) * n_cols + n_shift, 0);
    struct twin *out = bench_add(b, dtype, n_tokens * n_cols + n_shift, 0), *drows = bench_add(b, dtype, (n_rows + 1) * n_cols + n_shift, 0);
    struct twin *weights = bench_add(b, DSC_DTYPE_F32, n, 1), *dweights = bench_add(b, DSC_DTYPE_F32, n, 0);
    bool is_plain = kind == 2;

    if (kind == 1) {
        array_fill_bits(&x->host, &b->random);
        device_upload(b->device, x->device, x->host.data, (size_t)x->host.n * dsc_dtype_bytes(dtype));
    }
    slots_upload(&slots, b->device, n_rows, n);

    struct dsc_moe_gather host = GATHER(HS, slots.order, slots.inverse), device = GATHER(DS, slots.on_device[0], kind == 0 ? NULL : slots.on_device[1]);
    struct dsc_moe_combine host_out = COMBINE(HS, slots.inverse, is_plain ? NULL : H(weights));
    struct dsc_moe_combine device_out = COMBINE(DS, slots.on_device[1], is_plain ? NULL : D(weights));
    struct dsc_moe_combine_grad host_grad = COMBINE_GRAD(HS, slots.inverse, is_plain ? NULL : H(weights), slots.scratch, is_plain ? NULL : H(dweights));
    struct dsc_moe_combine_grad device_grad =
        COMBINE_GRAD(DS, slots.on_device[1], is_plain ? NULL : D(weights), slots.on_device[2], is_plain ? NULL : D(dweights));

    TEST_CASE("%s: [%d, %d] k %d of %s, shift %d, kind %d", b->device->name, (int)n_tokens, (int)n_cols, (int)k, dtype_names[dtype], (int)n_shift, kind);
    CHECK_STATUS(dsc_moe_gather(&host, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->moe_gather(&device, NULL), DSC_OK);
    bench_check(b, rows, 0, 0, "rows");
    CHECK_STATUS(dsc_moe_combine(&host_out, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->moe_combine(&device_out, NULL), DSC_OK);
    bench_check(b, out, 0, 0, "out");
    /* One row more than there are slots: its gradient is 0. */
    host_grad.n_slots = device_grad.n_slots = n_rows + 1;
    device_free(b->device, slots.on_device[2]);
    device_grad.scratch = slots.on_device[2] = upload(b->device, slots.scratch, n_rows + 1);
    CHECK_STATUS(dsc_moe_combine_grad(&host_grad, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->moe_combine_grad(&device_grad, NULL), DSC_OK);
    bench_check(b, drows, 0, 0, "drows");
    if (!is_plain)
        bench_check(b, dweights, 1, 1e-6, "dweights");
    slots_free(&slots, b->device);
    bench_clear(b);
}

static void test_invert(struct bench *b, int64_t n)
{
    struct slots slots;
    int64_t got[MAX_SLOTS];

    (void)slots_fill(&slots, n, 0, &b->random);
    for (int64_t i = 0; i < n; i++)
        slots.order[i] = (i * 5 + 3) % n;
    slots_upload(&slots, b->device, n, n);
    TEST_CASE("%s: inverse of %d", b->device->name, (int)n);
    CHECK_STATUS(dsc_moe_invert(slots.order, n, slots.inverse), DSC_OK);
    CHECK_STATUS(b->device->accel->moe_invert(slots.on_device[0], n, slots.on_device[1], NULL), DSC_OK);
    device_download(b->device, got, slots.on_device[1], (size_t)n * sizeof *got);
    CHECK_BYTES(got, slots.inverse, (size_t)n * sizeof *got);
    slots_free(&slots, b->device);
}

/* Downloads n floats of which `expected` are expected: NaN equals NaN. */
static void check_floats(const struct device *device, const void *from, const float *expected, int64_t n, const char *what)
{
    float got[16];

    device_download(device, got, from, (size_t)n * sizeof *got);
    TEST_CASE("%s: %s", device->name, what);
    for (int64_t i = 0; i < n; i++) {
        TEST_AT(i);
        if (!CHECK(got[i] == expected[i] || (isnan(got[i]) && isnan(expected[i]))))
            fprintf(stderr, "%s: %g, expected %g\n", what, (double)got[i], (double)expected[i]);
    }
}

/* Two tokens with two choices, three rows of one element (and then of four), and slots that are wrong in each way. */
static void test_wrong_slots(struct bench *b)
{
    static const float values[] = {2, 3, 5};
    dsc_dtype dtype = DSC_DTYPE_F32;
    int64_t n_tokens = 2, n_rows = 3, k = 2, n_cols = 1;
    size_t shift = 0;
    struct slots slots = {.order = {4, 0, 2}, .inverse = {1, -1, 0, 2}};
    struct twin *x = bench_add(b, dtype, 3, 0), *rows = bench_add(b, dtype, 3, 0), *out = bench_add(b, dtype, 2, 0), *drows = bench_add(b, dtype, 3, 0);
    struct twin *dweights = bench_add(b, dtype, 4, 0);

    slots_upload(&slots, b->device, n_rows, n_tokens * k);
    device_upload(b->device, x->device, values, sizeof values);

    struct dsc_moe_gather gather = GATHER(DS, slots.on_device[0], NULL);
    struct dsc_moe_combine combine = COMBINE(DS, slots.on_device[1], NULL);
    struct dsc_moe_combine_grad grad = COMBINE_GRAD(DS, slots.on_device[1], NULL, slots.on_device[2], D(dweights));
    const struct dsc_accel *accel = b->device->accel;

    TEST_CASE("%s: wrong slots", b->device->name);
    CHECK_STATUS(accel->moe_gather(&gather, NULL), DSC_OK);
    check_floats(b->device, D(rows), (const float[]){NAN, 2, 3}, 3, "a slot that does not exist");
    slots.order[0] = -1;
    device_upload(b->device, slots.on_device[0], slots.order, sizeof(int64_t) * 3);
    gather.inverse = slots.on_device[1];
    CHECK_STATUS(accel->moe_gather(&gather, NULL), DSC_OK);
    check_floats(b->device, D(rows), (const float[]){NAN, 2, NAN}, 3, "a slot whose inverse is another row");

    device_upload(b->device, rows->device, values, sizeof values);
    CHECK_STATUS(accel->moe_combine(&combine, NULL), DSC_OK);
    check_floats(b->device, D(out), (const float[]){3, 7}, 2, "right places");
    slots.inverse[3] = 3;
    device_upload(b->device, slots.on_device[1], slots.inverse, sizeof(int64_t) * 4);
    CHECK_STATUS(accel->moe_combine(&combine, NULL), DSC_OK);
    check_floats(b->device, D(out), (const float[]){3, NAN}, 2, "a place that does not exist");
    CHECK_STATUS(accel->moe_combine_grad(&grad, NULL), DSC_OK);
    check_floats(b->device, D(drows), (const float[]){3, 2, 0}, 3, "its gradient, and a row without a slot");
    check_floats(b->device, D(dweights), (const float[]){6, 0, 6, NAN}, 4, "its weight's gradient");
    slots.inverse[1] = -7;
    slots.inverse[3] = 0;
    device_upload(b->device, slots.on_device[1], slots.inverse, sizeof(int64_t) * 4);
    CHECK_STATUS(accel->moe_combine(&combine, NULL), DSC_OK);
    check_floats(b->device, D(out), (const float[]){NAN, 4}, 2, "a place below -1");
    CHECK_STATUS(accel->moe_combine_grad(&grad, NULL), DSC_OK);
    check_floats(b->device, D(drows), (const float[]){NAN, 2, 0}, 3, "a row of two slots");
    check_floats(b->device, D(dweights), (const float[]){6, NAN, NAN, NAN}, 4, "the gradients of their weights");

    slots.order[0] = 2;
    slots.order[1] = 3;
    device_upload(b->device, slots.on_device[0], slots.order, sizeof(int64_t) * 3);
    CHECK_STATUS(accel->moe_invert(slots.on_device[0], 3, slots.on_device[1], NULL), DSC_OK);
    device_download(b->device, slots.inverse, slots.on_device[1], sizeof(int64_t) * 3);
    TEST_CASE("%s: no permutation", b->device->name);
    CHECK_EQ(slots.inverse[0], -1);
    CHECK_EQ(slots.inverse[1], -1);
    CHECK(slots.inverse[2] == 0 || slots.inverse[2] == 2);
    slots_free(&slots, b->device);
    bench_clear(b);
}

/* A host pointer in a kernel would destroy the CUDA context of the process, so it is refused before the launch. */
static void test_host_memory(const struct device *device)
{
    static float on_stack[4];
    static int64_t places[4], inverse[4];
    struct dsc_moe_gather gather = {2, 2, 1, 2, DSC_DTYPE_F32, on_stack, places, NULL, on_stack};
    struct dsc_moe_combine combine = {2, 2, 1, 2, DSC_DTYPE_F32, on_stack, places, NULL, on_stack};
    struct dsc_moe_combine_grad grad = {2, 2, 1, 2, DSC_DTYPE_F32, on_stack, on_stack, places, NULL, places, on_stack, NULL};

    TEST_CASE("%s: refused", device->name);
    if (device->emulator != NULL)
        device->emulator->host_pointer = on_stack;
    CHECK_ERROR(device->accel->moe_gather(&gather, NULL), DSC_EINVAL, "host memory");
    CHECK_ERROR(device->accel->moe_combine(&combine, NULL), DSC_EINVAL, "host memory");
    CHECK_ERROR(device->accel->moe_combine_grad(&grad, NULL), DSC_EINVAL, "host memory");
    if (device->emulator != NULL)
        device->emulator->host_pointer = places;
    CHECK_ERROR(device->accel->moe_invert(places, 4, inverse, NULL), DSC_EINVAL, "host memory");
}

/* Tokens, choices, columns: nothing, one of each, no choice, more rows and columns than a launch of the emulated device has. */
static const int64_t sizes[][3] = {{0, 2, 5}, {1, 1, 1}, {5, 0, 3}, {13, 2, 7}, {31, 3, 8}, {7, 4, 260}, {3, 2, 1029}, {2, 1, 1032}};

static void test_device(const struct device *device)
{
    struct bench bench = {.device = device, .random = 5};

    for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++)
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
            for (int kind = 0; kind < 6; kind++)
                test_rows(&bench, (dsc_dtype)dtype, sizes[s][0], sizes[s][1], sizes[s][2], kind / 3, kind % 3);
    for (int64_t n = 0; n < MAX_SLOTS; n += 1 + n / 2)
        if (n % 5 != 0 || n == 0)
            test_invert(&bench, n);
    test_wrong_slots(&bench);
    test_host_memory(device);
}

int main(void)
{
    return device_run_tests(__FILE__, test_device);
}
