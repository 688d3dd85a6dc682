/*
 * Compares the CUDA library's operators on rows with the host's, on an emulated device and on a real device if there is
 * one. Elementwise operators must give equal bits. Results that depend on sums may differ by a few units in the last
 * place. Nothing may be written outside the results.
 */
#include "twins.h"

#include "dsc/nn.h"
#include "dsc/tp.h"

static void test_norm(struct bench *b, dsc_dtype dtype, int64_t rows, int64_t cols, bool is_rms, bool is_full)
{
    struct twin *x = bench_add(b, dtype, rows * cols, 3), *residual = is_full ? bench_add(b, dtype, rows * cols, 2) : NULL;
    struct twin *weight = is_full ? bench_add(b, DSC_DTYPE_F32, cols, 2) : NULL, *bias = is_full && !is_rms ? bench_add(b, DSC_DTYPE_F32, cols, 2) : NULL;
    struct twin *sum = bench_add(b, dtype, rows * cols, 0), *y = bench_add(b, dtype, rows * cols, 0), *dy = bench_add(b, dtype, rows * cols, 1);
    struct twin *mean = bench_add(b, DSC_DTYPE_F32, rows, 0), *rstd = bench_add(b, DSC_DTYPE_F32, rows, 0), *dx = bench_add(b, dtype, rows * cols, 0);
    struct twin *dweight = is_full ? bench_add(b, DSC_DTYPE_F32, cols, 0) : NULL, *dbias = is_full ? bench_add(b, DSC_DTYPE_F32, cols, 0) : NULL;
    float *scratch = test_alloc((size_t)dsc_nn_scratch_elems(rows, cols, 2) * sizeof(float));
    struct twin *normed = residual != NULL ? sum : x;
#define NORM(P)                                                                                                                                 \
    {rows, cols, dtype, DSC_DTYPE_F32, is_rms, 1e-5f, P(x), P(residual), P(weight), P(bias), P(sum), P(y), is_rms ? NULL : (float *)P(mean), (float *)P(rstd)}
#define NORM_GRAD(P)                                                                                                                             \
    {rows, cols, dtype, DSC_DTYPE_F32, is_rms, P(normed), P(weight), P(dy), P(residual), (float *)P(mean), (float *)P(rstd), P(dx), P(dweight), P(dbias), scratch}
    struct dsc_nn_norm host = NORM(H), device = NORM(D);
    struct dsc_nn_norm_grad host_grad = NORM_GRAD(H), device_grad = NORM_GRAD(D);

    TEST_CASE("%s: %s norm of [%d, %d] %s", b->device->name, is_rms ? "rms" : "layer", (int)rows, (int)cols, dtype_names[dtype]);
    CHECK_STATUS(dsc_nn_norm(&host, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->nn_norm(&device, NULL), DSC_OK);
    CHECK_STATUS(dsc_nn_norm_grad(&host_grad, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->nn_norm_grad(&device_grad, NULL), DSC_OK);
    if (residual != NULL)
        bench_check(b, sum, 0, 0, "sum");
    bench_check(b, rstd, 4, 1e-3, "rstd");
    bench_check(b, y, 8, 1, "y");
    bench_check(b, dx, 8, 1, "dx");
    if (is_full) {
        bench_check(b, dweight, 64, (double)rows + 1, "dweight");
        bench_check(b, dbias, 64, (double)rows + 1, "dbias");
    }
    free(scratch);
    bench_clear(b);
}

static void test_act(struct bench *b, dsc_dtype dtype, int64_t rows, int64_t cols, dsc_nn_act act)
{
    struct twin *x = bench_add(b, dtype, rows * cols, 5), *bias = act % 2 == 0 ? bench_add(b, dtype, cols, 1) : NULL, *dy = bench_add(b, dtype, rows * cols, 1);
    struct twin *y = bench_add(b, dtype, rows * cols, 0), *dx = bench_add(b, dtype, rows * cols, 0), *dbias = bias != NULL ? bench_add(b, dtype, cols, 0) : NULL;
    struct twin *both = bench_add(b, dtype, rows * 2 * cols, 5), *dboth = bench_add(b, dtype, rows * 2 * cols, 0), *gated = bench_add(b, dtype, rows * cols, 0);
    float *scratch = test_alloc((size_t)dsc_nn_scratch_elems(rows, cols, 1) * sizeof(float));
    size_t half = (size_t)cols * dsc_dtype_bytes(dtype);
#define ACT(P) {rows, cols, dtype, act, P(x), P(bias), P(y)}
#define ACT_GRAD(P) {rows, cols, dtype, act, P(x), P(bias), P(dy), P(dx), P(dbias), scratch}
#define GATED(P) {rows, cols, 2 * cols, dtype, act, P(both), (char *)P(both) + half, P(gated)}
#define GATED_GRAD(P) {rows, cols, 2 * cols, dtype, act, P(both), (char *)P(both) + half, P(dy), P(dboth), (char *)P(dboth) + half}
    struct dsc_nn_bias_act host = ACT(H), device = ACT(D);
    struct dsc_nn_bias_act_grad host_grad = ACT_GRAD(H), device_grad = ACT_GRAD(D);
    struct dsc_nn_gated host_gated = GATED(H), device_gated = GATED(D);
    struct dsc_nn_gated_grad host_gates = GATED_GRAD(H), device_gates = GATED_GRAD(D);

    TEST_CASE("%s: act %d of [%d, %d] %s", b->device->name, (int)act, (int)rows, (int)cols, dtype_names[dtype]);
    CHECK_STATUS(dsc_nn_bias_act(&host, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->nn_bias_act(&device, NULL), DSC_OK);
    CHECK_STATUS(dsc_nn_bias_act_grad(&host_grad, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->nn_bias_act_grad(&device_grad, NULL), DSC_OK);
    CHECK_STATUS(dsc_nn_gated(&host_gated, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->nn_gated(&device_gated, NULL), DSC_OK);
    CHECK_STATUS(dsc_nn_gated_grad(&host_gates, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->nn_gated_grad(&device_gates, NULL), DSC_OK);
    bench_check(b, y, 0, 0, "y");
    bench_check(b, dx, 0, 0, "dx");
    bench_check(b, gated, 0, 0, "gated");
    bench_check(b, dboth, 0, 0, "dgate and dup");
    if (dbias != NULL)
        bench_check(b, dbias, 64, (double)rows + 1, "dbias");
    free(scratch);
    bench_clear(b);
}

static void test_dropout(struct bench *b, dsc_dtype dtype, int64_t rows, int64_t cols, float p)
{
    struct twin *x = bench_add(b, dtype, rows * cols, 2), *bias = bench_add(b, dtype, cols, 1), *residual = bench_add(b, dtype, rows * cols, 1);
    struct twin *y = bench_add(b, dtype, rows * cols, 0), *dx = bench_add(b, dtype, rows * cols, 0), *dbias = bench_add(b, dtype, cols, 0);
    float *scratch = test_alloc((size_t)dsc_nn_scratch_elems(rows, cols, 1) * sizeof(float));
    uint64_t seed = 0x123456789abcdef0u;
#define DROPOUT(P) {rows, cols, dtype, p, seed, P(x), P(bias), P(residual), P(y)}
#define DROPOUT_GRAD(P) {rows, cols, dtype, p, seed, P(x), P(dx), P(dbias), scratch}
    struct dsc_nn_dropout host = DROPOUT(H), device = DROPOUT(D);
    struct dsc_nn_dropout_grad host_grad = DROPOUT_GRAD(H), device_grad = DROPOUT_GRAD(D);

    TEST_CASE("%s: dropout of [%d, %d] %s, p %g", b->device->name, (int)rows, (int)cols, dtype_names[dtype], (double)p);
    CHECK_STATUS(dsc_nn_dropout(&host, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->nn_dropout(&device, NULL), DSC_OK);
    CHECK_STATUS(dsc_nn_dropout_grad(&host_grad, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->nn_dropout_grad(&device_grad, NULL), DSC_OK);
    bench_check(b, y, 0, 0, "y");
    bench_check(b, dx, 0, 0, "dx");
    bench_check(b, dbias, 64, (double)rows + 1, "dbias");
    free(scratch);
    bench_clear(b);
}

static void test_rotary(struct bench *b, dsc_dtype dtype, bool is_interleaved, int64_t head_dim, int64_t rotary_dim)
{
    int64_t n_batch = 2, n_tokens = 7, n_heads = 3, n = n_batch * n_tokens * n_heads * head_dim;
    struct twin *x = bench_add(b, dtype, n, 2), *y = bench_add(b, dtype, n, 0), *cos = bench_add(b, DSC_DTYPE_F32, n_tokens * rotary_dim / 2, 1);
    struct twin *sin = bench_add(b, DSC_DTYPE_F32, n_tokens * rotary_dim / 2, 1);
#define ROTARY(P)                                                                                                                                \
    {n_batch, n_tokens, n_heads, head_dim, rotary_dim, dtype, is_interleaved, is_interleaved, P(x), {n_tokens * n_heads * head_dim, n_heads * head_dim, head_dim}, \
     (float *)P(cos), (float *)P(sin), {0, rotary_dim / 2}, P(y), {n_tokens * n_heads * head_dim, head_dim, n_tokens * head_dim}}
    struct dsc_nn_rotary host = ROTARY(H), device = ROTARY(D);

    TEST_CASE("%s: rotary of %d of %d %s", b->device->name, (int)rotary_dim, (int)head_dim, dtype_names[dtype]);
    CHECK_STATUS(dsc_nn_rotary(&host, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->nn_rotary(&device, NULL), DSC_OK);
    bench_check(b, y, 0, 0, "y");
    bench_clear(b);
}

static void test_softmax(struct bench *b, dsc_dtype dtype, int64_t queries, int64_t keys, dsc_nn_mask kind, bool is_causal)
{
    struct twin *x = bench_add(b, dtype, 6 * queries * keys, 4), *y = bench_add(b, dtype, 6 * queries * keys, 0), *dy = bench_add(b, dtype, 6 * queries * keys, 1);
    struct twin *mask = bench_add(b, kind == DSC_NN_MASK_ADD ? dtype : DSC_DTYPE_F32, 3 * queries * keys, 1), *dx = bench_add(b, dtype, 6 * queries * keys, 0);
#define SOFTMAX(P) {2, 3, queries, keys, dtype, 0.5f, is_causal, kind, P(mask), {0, queries * keys, keys}, P(x), P(y)}
#define SOFTMAX_GRAD(P) {6 * queries, keys, dtype, 0.5f, P(y), P(dy), P(dx)}
    struct dsc_nn_softmax host = SOFTMAX(H), device = SOFTMAX(D);
    struct dsc_nn_softmax_grad host_grad = SOFTMAX_GRAD(H), device_grad = SOFTMAX_GRAD(D);

    if (kind == DSC_NN_MASK_KEEP) { /* bytes; the first row's are 0 */
        for (int64_t i = 0; i < 3 * queries * keys; i++)
            mask->host.data[i] = i >= keys && i % 3 != 0;
        device_upload(b->device, mask->device, mask->host.data, (size_t)(3 * queries * keys));
    }
    TEST_CASE("%s: softmax of [%d, %d] %s, mask %d", b->device->name, (int)queries, (int)keys, dtype_names[dtype], (int)kind);
    CHECK_STATUS(dsc_nn_softmax(&host, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->nn_softmax(&device, NULL), DSC_OK);
    CHECK_STATUS(dsc_nn_softmax_grad(&host_grad, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->nn_softmax_grad(&device_grad, NULL), DSC_OK);
    bench_check(b, y, 2, 1e-3, "y");
    bench_check(b, dx, 8, 1e-1, "dx");
    bench_clear(b);
}

static void test_cross_entropy(struct bench *b, dsc_dtype dtype, int64_t rows, int64_t vocab_size)
{
    struct twin *logits = bench_add(b, dtype, rows * vocab_size, 5), *log_sum = bench_add(b, DSC_DTYPE_F32, rows, 0), *scale = bench_add(b, DSC_DTYPE_F32, rows, 1);
    struct twin *out = bench_add(b, DSC_DTYPE_F32, 4 * rows, 0);
    int64_t *targets = test_alloc((size_t)rows * sizeof *targets), *on_device = device_alloc(b->device, (size_t)(rows + 1) * sizeof *targets);

    for (int64_t row = 0; row < rows; row++) {
        targets[row] = row % 3 == 0 ? -1 : row % (vocab_size + 1);
        array_set(&log_sum->host, row, 9);
        if (row % 5 == 0)
            array_set(&scale->host, row, 0);
    }
    device_upload(b->device, on_device, targets, (size_t)rows * sizeof *targets);
    device_upload(b->device, log_sum->device, log_sum->host.data, (size_t)rows * 4);
    device_upload(b->device, scale->device, scale->host.data, (size_t)rows * 4);
    TEST_CASE("%s: cross-entropy of [%d, %d] %s", b->device->name, (int)rows, (int)vocab_size, dtype_names[dtype]);
    CHECK_STATUS(dsc_tp_cross_entropy_rows(H(logits), dtype, targets, rows, vocab_size, NULL, H(out)), DSC_OK);
    CHECK_STATUS(b->device->accel->cross_entropy_rows(D(logits), dtype, on_device, rows, vocab_size, D(out), NULL), DSC_OK);
    bench_check(b, out, 4, 1, "rows");
    CHECK_STATUS(dsc_tp_cross_entropy_grad(H(logits), dtype, targets, rows, vocab_size, H(log_sum), H(scale), 0.1, vocab_size + 3, NULL), DSC_OK);
    CHECK_STATUS(b->device->accel->cross_entropy_grad(D(logits), dtype, on_device, rows, vocab_size, D(log_sum), D(scale), 0.1, vocab_size + 3, NULL), DSC_OK);
    bench_check(b, logits, 0, 0, "gradient");
    device_free(b->device, on_device);
    free(targets);
    bench_clear(b);
}

/* No rows, one element, odd numbers, and more columns and rows than a launch of the emulated device has threads. */
static const int64_t shapes[][2] = {{0, 5}, {1, 1}, {2, 300}, {11, 33}};

static void test_device(const struct device *device)
{
    struct bench bench = {.device = device, .random = 3};

    for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            int64_t rows = shapes[s][0], cols = shapes[s][1];

            for (int kind = 0; kind < 4; kind++)
                test_norm(&bench, (dsc_dtype)dtype, rows, cols, kind % 2 == 1, kind / 2 == 1);
            for (int act = 0; act < DSC_NN_ACT_COUNT; act++)
                test_act(&bench, (dsc_dtype)dtype, rows, cols, (dsc_nn_act)act);
            for (int p = 1; p < 3; p++)
                test_dropout(&bench, (dsc_dtype)dtype, rows, cols, 0.5f * (float)p);
            for (int kind = 0; kind < 6; kind++)
                test_softmax(&bench, (dsc_dtype)dtype, rows, cols, (dsc_nn_mask)(kind % 3), kind / 3 == 1);
            test_cross_entropy(&bench, (dsc_dtype)dtype, rows, cols);
        }
        test_rotary(&bench, (dsc_dtype)dtype, false, 8, 8);
        test_rotary(&bench, (dsc_dtype)dtype, true, 9, 6);
        test_rotary(&bench, (dsc_dtype)dtype, false, 66, 0);
    }
}

/* A host pointer in a kernel would destroy the CUDA context of the process, so it is refused before the launch. */
static void test_host_memory(const struct device *device)
{
    float on_stack[4] = {0};
    struct dsc_nn_bias_act call = {1, 4, DSC_DTYPE_F32, DSC_NN_ACT_relu, on_stack, NULL, on_stack};

    TEST_CASE("%s: refused", device->name);
    if (device->emulator != NULL)
        device->emulator->host_pointer = on_stack;
    CHECK_ERROR(device->accel->nn_bias_act(&call, NULL), DSC_EINVAL, "host memory");
}

static void test_all(const struct device *device)
{
    test_device(device);
    test_host_memory(device);
}

int main(void)
{
    return device_run_tests(__FILE__, test_all);
}
