/*
 * nn: every operator against its formula in f64, in each dtype, on row lengths near every vector width and block size.
 * Any thread count and instruction set must give the same bits, and nothing may be written outside the results. Bad
 * arguments are refused.
 */
#include "arrays.h"

#include "dsc/nn.h"
#include "pool.h"

#define MAX_OUTPUTS 4
#define SQRT_HALF_F64 0.70710678118654752440
#define INV_SQRT_2PI_F64 0.39894228040143267794

/*
 * The error allowed in an element, in units of the last place of f32: the error of the sums plus one rounding to the
 * dtype.
 */
static double allowed(dsc_dtype dtype, double ulps)
{
    double of_rounding = dtype == DSC_DTYPE_F32 ? 0.0 : dtype == DSC_DTYPE_BF16 ? 0x1p15 : 0x1p12;

    return ulps + 1.01 * of_rounding;
}

/* One operator's outputs, compared with the formula and with the first variant's outputs. */
struct outputs {
    struct array arrays[MAX_OUTPUTS];
    int n;
};

static void keep_or_compare(struct outputs *first, struct outputs *got)
{
    for (int i = 0; i < got->n; i++) {
        if (first->n == 0)
            continue;
        CHECK_SAME(&got->arrays[i], &first->arrays[i]);
        array_destroy(&got->arrays[i]);
    }
    if (first->n == 0)
        *first = *got;
}

static void destroy_outputs(struct outputs *outputs)
{
    for (int i = 0; i < outputs->n; i++)
        array_destroy(&outputs->arrays[i]);
    outputs->n = 0;
}

/* The operands of a case. An operator reads only some of them. */
struct operands {
    dsc_dtype dtype;
    int64_t n_rows;
    int64_t n_cols;
    struct array x;
    struct array other; /* residual, up, mask */
    struct array weight;
    struct array bias;
    struct array dy;
    float *scratch;
};

static struct operands make_operands(dsc_dtype dtype, int64_t n_rows, int64_t n_cols, uint64_t *random)
{
    int64_t n = n_rows * n_cols;
    struct operands made = {
        .dtype = dtype,
        .n_rows = n_rows,
        .n_cols = n_cols,
        .x = array_create(dtype, n, 2),
        .other = array_create(dtype, n, 4),
        .weight = array_create(dtype, n_cols, 6),
        .bias = array_create(dtype, n_cols, 2),
        .dy = array_create(dtype, n, 0),
        .scratch = test_alloc((size_t)dsc_nn_scratch_elems(n_rows, n_cols, 2) * sizeof(float)),
    };

    array_fill(&made.x, 4, false, random);
    array_fill(&made.other, 2, false, random);
    array_fill(&made.weight, 2, false, random);
    array_fill(&made.bias, 1, false, random);
    array_fill(&made.dy, 1, false, random);
    return made;
}

static void destroy_operands(struct operands *o)
{
    array_destroy(&o->x);
    array_destroy(&o->other);
    array_destroy(&o->weight);
    array_destroy(&o->bias);
    array_destroy(&o->dy);
    free(o->scratch);
}

/*
 * Norms.
 */

static void check_norm_values(const struct operands *o, bool is_rms, const struct outputs *out)
{
    const struct array *sum = &out->arrays[0];

    for (int64_t row = 0; row < o->n_rows; row++) {
        double mean = 0;
        double square = 0;
        double g_mean = 0;
        double gh_mean = 0;

        for (int64_t c = 0; c < o->n_cols; c++) {
            int64_t i = row * o->n_cols + c;

            TEST_AT(i);
            CHECK_NEAR(array_get(sum, i), (double)array_get(&o->x, i) + array_get(&o->other, i), allowed(o->dtype, 1), 1e-3);
            mean += is_rms ? 0 : array_get(sum, i) / (double)o->n_cols;
        }
        for (int64_t c = 0; c < o->n_cols; c++)
            square += pow(array_get(sum, row * o->n_cols + c) - mean, 2) / (double)o->n_cols;

        double rstd = 1 / sqrt(square + 1e-5);

        for (int64_t c = 0; c < o->n_cols; c++) {
            double h = (array_get(sum, row * o->n_cols + c) - mean) * rstd;
            double g = (double)array_get(&o->dy, row * o->n_cols + c) * array_get(&o->weight, c);

            g_mean += is_rms ? 0 : g / (double)o->n_cols;
            gh_mean += g * h / (double)o->n_cols;
        }
        for (int64_t c = 0; c < o->n_cols; c++) {
            int64_t i = row * o->n_cols + c;
            double h = (array_get(sum, i) - mean) * rstd;
            double bias = is_rms ? 0 : array_get(&o->bias, c);
            double g = (double)array_get(&o->dy, i) * array_get(&o->weight, c);

            TEST_AT(i);
            CHECK_NEAR(array_get(&out->arrays[1], i), h * array_get(&o->weight, c) + bias, allowed(o->dtype, 64), 1);
            CHECK_NEAR(array_get(&out->arrays[2], i), rstd * (g - g_mean - h * gh_mean) + array_get(&o->other, i), allowed(o->dtype, 64),
                       rstd + 1);
        }
    }
}

static void check_norm_weights(const struct operands *o, bool is_rms, const struct array *sum, const float *mean, const float *rstd,
                               const struct array *dweight, const struct array *dbias)
{
    for (int64_t c = 0; c < o->n_cols; c++) {
        double weight = 0;
        double bias = 0;
        double size = 1;

        for (int64_t row = 0; row < o->n_rows; row++) {
            int64_t i = row * o->n_cols + c;
            double h = ((double)array_get(sum, i) - (is_rms ? 0 : mean[row])) * rstd[row];

            weight += array_get(&o->dy, i) * h;
            bias += array_get(&o->dy, i);
            size += fabs(array_get(&o->dy, i) * h);
        }
        TEST_AT(c);
        CHECK_NEAR(array_get(dweight, c), weight, allowed(o->dtype, 16), size);
        if (!is_rms)
            CHECK_NEAR(array_get(dbias, c), bias, allowed(o->dtype, 16), size);
    }
}

static void run_norm(const struct operands *o, bool is_rms, const struct dsc_par *par, struct outputs *first)
{
    int64_t n = o->n_rows * o->n_cols;
    struct outputs got = {.n = 4};
    struct array dbias = array_create(o->dtype, o->n_cols, 0);
    float *mean = test_alloc((size_t)o->n_rows * sizeof *mean);
    float *rstd = test_alloc((size_t)o->n_rows * sizeof *rstd);

    for (int i = 0; i < 3; i++)
        got.arrays[i] = array_create(o->dtype, n, 2);
    got.arrays[3] = array_create(o->dtype, o->n_cols, 2);

    struct dsc_nn_norm norm = {
        .n_rows = o->n_rows,
        .n_cols = o->n_cols,
        .dtype = o->dtype,
        .weight_dtype = o->dtype,
        .is_rms = is_rms,
        .eps = 1e-5f,
        .x = o->x.data,
        .residual = o->other.data,
        .weight = o->weight.data,
        .bias = is_rms ? NULL : o->bias.data,
        .sum = got.arrays[0].data,
        .y = got.arrays[1].data,
        .mean = is_rms ? NULL : mean,
        .rstd = rstd,
    };
    struct dsc_nn_norm_grad grad = {
        .n_rows = o->n_rows,
        .n_cols = o->n_cols,
        .dtype = o->dtype,
        .weight_dtype = o->dtype,
        .is_rms = is_rms,
        .sum = got.arrays[0].data,
        .weight = o->weight.data,
        .dy = o->dy.data,
        .dsum = o->other.data,
        .mean = is_rms ? NULL : mean,
        .rstd = rstd,
        .dx = got.arrays[2].data,
        .dweight = got.arrays[3].data,
        .dbias = is_rms ? NULL : dbias.data,
        .scratch = o->scratch,
    };

    CHECK_STATUS(dsc_nn_norm(&norm, par), DSC_OK);
    CHECK_STATUS(dsc_nn_norm_grad(&grad, par), DSC_OK);
    if (first->n == 0) {
        check_norm_values(o, is_rms, &got);
        check_norm_weights(o, is_rms, &got.arrays[0], mean, rstd, &got.arrays[3], &dbias);
    }
    array_destroy(&dbias);
    free(mean);
    free(rstd);
    keep_or_compare(first, &got);
}

static void run_layer_norm(const struct operands *o, const struct dsc_par *par, struct outputs *first)
{
    run_norm(o, false, par, first);
}

static void run_rms_norm(const struct operands *o, const struct dsc_par *par, struct outputs *first)
{
    run_norm(o, true, par, first);
}

/*
 * Activations.
 */

static double act_of(dsc_nn_act act, double x, double *slope)
{
    double z;
    double s;

    switch (act) {
    case DSC_NN_ACT_gelu:
        z = 0.5 * erfc(-x * SQRT_HALF_F64);
        *slope = z + x * INV_SQRT_2PI_F64 * exp(-x * x / 2);
        return x * z;
    case DSC_NN_ACT_gelu_tanh:
        z = tanh(sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x));
        *slope = 0.5 * (1 + z) + 0.5 * x * (1 - z * z) * sqrt(2 / acos(-1.0)) * (1 + 3 * 0.044715 * x * x);
        return 0.5 * x * (1 + z);
    case DSC_NN_ACT_silu:
        s = 1 / (1 + exp(-x));
        *slope = s + x * s * (1 - s);
        return x * s;
    case DSC_NN_ACT_sigmoid:
        s = 1 / (1 + exp(-x));
        *slope = s * (1 - s);
        return s;
    default:
        *slope = x > 0;
        return x > 0 ? x : 0;
    }
}

static void run_bias_act(const struct operands *o, dsc_nn_act act, const struct dsc_par *par, struct outputs *first)
{
    int64_t n = o->n_rows * o->n_cols;
    struct outputs got = {.n = 3};

    got.arrays[0] = array_create(o->dtype, n, 2);
    got.arrays[1] = array_copy(&o->dy, 2); /* in place */
    got.arrays[2] = array_create(o->dtype, o->n_cols, 2);

    struct dsc_nn_bias_act call = {o->n_rows, o->n_cols, o->dtype, act, o->x.data, o->bias.data, got.arrays[0].data};
    struct dsc_nn_bias_act_grad grad = {
        .n_rows = o->n_rows,
        .n_cols = o->n_cols,
        .dtype = o->dtype,
        .act = act,
        .x = o->x.data,
        .bias = o->bias.data,
        .dy = got.arrays[1].data,
        .dx = got.arrays[1].data,
        .dbias = got.arrays[2].data,
        .scratch = o->scratch,
    };

    CHECK_STATUS(dsc_nn_bias_act(&call, par), DSC_OK);
    CHECK_STATUS(dsc_nn_bias_act_grad(&grad, par), DSC_OK);
    for (int64_t c = 0; c < o->n_cols && first->n == 0; c++) {
        double sum = 0;

        for (int64_t row = 0; row < o->n_rows; row++) {
            int64_t i = row * o->n_cols + c;
            double slope;
            double value = act_of(act, array_get(&o->x, i) + array_get(&o->bias, c), &slope);

            TEST_AT(i);
            CHECK_NEAR(array_get(&got.arrays[0], i), value, allowed(o->dtype, 8), 1);
            CHECK_NEAR(array_get(&got.arrays[1], i), array_get(&o->dy, i) * slope, allowed(o->dtype, 16), 1);
            sum += array_get(&o->dy, i) * slope;
        }
        CHECK_NEAR(array_get(&got.arrays[2], c), sum, allowed(o->dtype, 32), (double)o->n_rows + 1);
    }
    keep_or_compare(first, &got);
}

static void run_gated(const struct operands *o, dsc_nn_act act, const struct dsc_par *par, struct outputs *first)
{
    int64_t n = o->n_rows * o->n_cols;
    struct outputs got = {.n = 2};
    struct array both = array_create(o->dtype, 2 * n, 2);

    /* gate | up in each row; the gradients take their place. */
    for (int64_t i = 0; i < n; i++) {
        int64_t at = i / o->n_cols * 2 * o->n_cols + i % o->n_cols;

        array_set_bits(&both, at, array_bits(&o->x, i));
        array_set_bits(&both, at + o->n_cols, array_bits(&o->other, i));
    }
    got.arrays[0] = array_create(o->dtype, n, 2);

    unsigned char *up = both.data + (size_t)o->n_cols * dsc_dtype_bytes(o->dtype);
    struct dsc_nn_gated call = {o->n_rows, o->n_cols, 2 * o->n_cols, o->dtype, act, both.data, up, got.arrays[0].data};
    struct dsc_nn_gated_grad grad = {o->n_rows, o->n_cols, 2 * o->n_cols, o->dtype, act, both.data, up, o->dy.data, both.data, up};

    CHECK_STATUS(dsc_nn_gated(&call, par), DSC_OK);
    CHECK_STATUS(dsc_nn_gated_grad(&grad, par), DSC_OK);
    for (int64_t i = 0; i < n && first->n == 0; i++) {
        int64_t at = i / o->n_cols * 2 * o->n_cols + i % o->n_cols;
        double slope;
        double value = act_of(act, array_get(&o->x, i), &slope);
        double x_up = array_get(&o->other, i);
        double dy = array_get(&o->dy, i);

        TEST_AT(i);
        CHECK_NEAR(array_get(&got.arrays[0], i), value * x_up, allowed(o->dtype, 16), 2);
        CHECK_NEAR(array_get(&both, at), dy * x_up * slope, allowed(o->dtype, 32), 2);
        CHECK_NEAR(array_get(&both, at + o->n_cols), dy * value, allowed(o->dtype, 16), 2);
    }
    got.arrays[1] = both;
    keep_or_compare(first, &got);
}

#define ACT_RUNS(name, act)                                                                                   \
    static void run_##name(const struct operands *o, const struct dsc_par *par, struct outputs *first)       \
    {                                                                                                         \
        run_bias_act(o, act, par, first);                                                                     \
    }                                                                                                         \
    static void run_gated_##name(const struct operands *o, const struct dsc_par *par, struct outputs *first) \
    {                                                                                                         \
        run_gated(o, act, par, first);                                                                        \
    }
#define DSC_NN_ACT(name) ACT_RUNS(name, DSC_NN_ACT_##name)
#include "dsc/activations.inc"
#undef DSC_NN_ACT

/*
 * Dropout, against a second implementation of Philox that handles one counter at a time.
 */

static uint32_t dropout_number(uint64_t seed, uint64_t i)
{
    uint32_t c[4] = {(uint32_t)(i / 8), (uint32_t)(i / 8 >> 32), 0, 0};
    uint32_t k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};

    for (int round = 0; round < 7; round++) {
        uint64_t a = 0xD2511F53u * (uint64_t)c[0];
        uint64_t b = 0xCD9E8D57u * (uint64_t)c[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a};

        memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return c[i % 8 / 2] >> 16 * (i % 2) & 0xffff;
}

static void run_dropout_with(const struct operands *o, float p, const struct dsc_par *par, struct outputs *first)
{
    int64_t n = o->n_rows * o->n_cols;
    uint64_t seed = 0x123456789abcdef0u;
    struct outputs got = {.n = 3};

    got.arrays[0] = array_create(o->dtype, n, 2);
    got.arrays[1] = array_create(o->dtype, n, 2);
    got.arrays[2] = array_create(o->dtype, o->n_cols, 2);

    struct dsc_nn_dropout call = {o->n_rows, o->n_cols,    o->dtype,      p,
                                  seed,      o->x.data, o->bias.data, o->other.data, got.arrays[0].data};
    struct dsc_nn_dropout_grad grad = {o->n_rows,  o->n_cols,          o->dtype,           p, seed,
                                       o->dy.data, got.arrays[1].data, got.arrays[2].data, o->scratch};

    CHECK_STATUS(dsc_nn_dropout(&call, par), DSC_OK);
    CHECK_STATUS(dsc_nn_dropout_grad(&grad, par), DSC_OK);
    for (int64_t c = 0; c < o->n_cols && first->n == 0; c++) {
        double sum = 0;

        for (int64_t row = 0; row < o->n_rows; row++) {
            int64_t i = row * o->n_cols + c;
            bool is_kept = dropout_number(seed, (uint64_t)i) >= nearbyint((double)p * 0x1p16);
            double factor = is_kept ? 1 / (1 - nearbyint((double)p * 0x1p16) * 0x1p-16) : 0;
            double x = array_get(&o->x, i) + array_get(&o->bias, c);

            TEST_AT(i);
            CHECK_NEAR(array_get(&got.arrays[0], i), array_get(&o->other, i) + factor * x, allowed(o->dtype, 8), 4);
            CHECK_NEAR(array_get(&got.arrays[1], i), factor * array_get(&o->dy, i), allowed(o->dtype, 2), 1e-3);
            sum += factor * array_get(&o->dy, i);
        }
        CHECK_NEAR(array_get(&got.arrays[2], c), sum, allowed(o->dtype, 32), (double)o->n_rows + 1);
    }
    keep_or_compare(first, &got);
}

static void run_dropout(const struct operands *o, const struct dsc_par *par, struct outputs *first)
{
    run_dropout_with(o, 0.3f, par, first);
}

static void run_drop_all(const struct operands *o, const struct dsc_par *par, struct outputs *first)
{
    run_dropout_with(o, 1.0f, par, first);
}

static void run_drop_none(const struct operands *o, const struct dsc_par *par, struct outputs *first)
{
    run_dropout_with(o, 0.0f, par, first);
}

/*
 * Rotary positions: each row is a head of n_cols elements. The rotation leaves out the last element if n_cols is odd,
 * and two more elements if n_cols is above 4.
 */

static void run_rotary_with(const struct operands *o, bool is_interleaved, const struct dsc_par *par, struct outputs *first)
{
    int64_t rotary = o->n_cols > 4 ? (o->n_cols - 2) / 2 * 2 : o->n_cols / 2 * 2;
    int64_t half = rotary / 2;
    float *cos_sin = test_alloc((size_t)(2 * half * o->n_rows) * sizeof *cos_sin);
    float *sins = cos_sin + half * o->n_rows;
    struct outputs got = {.n = 2};

    for (int64_t i = 0; i < half * o->n_rows; i++) {
        cos_sin[i] = cosf((float)(i % 97));
        sins[i] = sinf((float)(i % 97));
    }
    got.arrays[0] = array_create(o->dtype, o->n_rows * o->n_cols, 2);

    struct dsc_nn_rotary call = {
        .n_batch = 1,
        .n_tokens = o->n_rows,
        .n_heads = 1,
        .head_dim = o->n_cols,
        .rotary_dim = rotary,
        .dtype = o->dtype,
        .is_interleaved = is_interleaved,
        .x = o->x.data,
        .x_strides = {0, o->n_cols, 0},
        .cos = cos_sin,
        .sin = sins,
        .table_strides = {0, half},
        .y = got.arrays[0].data,
        .y_strides = {0, o->n_cols, 0},
    };

    CHECK_STATUS(dsc_nn_rotary(&call, par), DSC_OK);
    for (int64_t row = 0; row < o->n_rows && first->n == 0; row++) {
        for (int64_t c = 0; c < o->n_cols; c++) {
            int64_t base = row * o->n_cols;
            int64_t pair = is_interleaved ? c / 2 : c % (half > 0 ? half : 1);
            bool is_second = is_interleaved ? c % 2 == 1 : c >= half;
            int64_t i0 = is_interleaved ? 2 * pair : pair;
            int64_t i1 = is_interleaved ? 2 * pair + 1 : pair + half;
            double wanted = array_get(&o->x, base + c);

            if (c < rotary) {
                double cosine = cos_sin[row * half + pair];
                double sine = sins[row * half + pair];
                double x0 = array_get(&o->x, base + i0);
                double x1 = array_get(&o->x, base + i1);

                wanted = is_second ? x1 * cosine + x0 * sine : x0 * cosine - x1 * sine;
            }
            TEST_AT(base + c);
            CHECK_NEAR(array_get(&got.arrays[0], base + c), wanted, allowed(o->dtype, 2), 4);
        }
    }
    /* The inverse rotation, in place. */
    got.arrays[1] = array_copy(&got.arrays[0], 2);
    call.x = got.arrays[1].data;
    call.y = got.arrays[1].data;
    call.is_inverse = true;
    CHECK_STATUS(dsc_nn_rotary(&call, par), DSC_OK);
    for (int64_t i = 0; i < o->n_rows * o->n_cols && first->n == 0; i++) {
        TEST_AT(i);
        CHECK_NEAR(array_get(&got.arrays[1], i), array_get(&o->x, i), 3 * allowed(o->dtype, 2), 4);
    }
    free(cos_sin);
    keep_or_compare(first, &got);
}

static void run_rotary(const struct operands *o, const struct dsc_par *par, struct outputs *first)
{
    run_rotary_with(o, false, par, first);
}

static void run_rotary_pairs(const struct operands *o, const struct dsc_par *par, struct outputs *first)
{
    run_rotary_with(o, true, par, first);
}

/*
 * Softmax.
 */

/* The mask's addend for query `row` and key k: -inf hides the key. */
static double mask_of(const struct operands *o, dsc_nn_mask kind, bool is_causal, const uint8_t *keep, int64_t row, int64_t k)
{
    if (is_causal && k > row + o->n_cols - o->n_rows)
        return -INFINITY;
    if (kind == DSC_NN_MASK_ADD)
        return array_get(&o->other, row * o->n_cols + k);
    if (kind == DSC_NN_MASK_KEEP && keep[k] == 0)
        return -INFINITY;
    return 0;
}

static void check_softmax_row(const struct operands *o, dsc_nn_mask kind, bool is_causal, const uint8_t *keep, int64_t row,
                              const struct outputs *got)
{
    double max = -INFINITY;
    double sum = 0;
    double dot = 0;

    for (int64_t k = 0; k < o->n_cols; k++)
        max = fmax(max, 0.5 * array_get(&o->x, row * o->n_cols + k) + mask_of(o, kind, is_causal, keep, row, k));
    for (int64_t k = 0; k < o->n_cols && max > -INFINITY; k++)
        sum += exp(0.5 * array_get(&o->x, row * o->n_cols + k) + mask_of(o, kind, is_causal, keep, row, k) - max);
    for (int64_t k = 0; k < o->n_cols; k++) {
        int64_t i = row * o->n_cols + k;
        double wanted = sum == 0 ? 0 : exp(0.5 * array_get(&o->x, i) + mask_of(o, kind, is_causal, keep, row, k) - max) / sum;

        TEST_AT(i);
        CHECK_NEAR(array_get(&got->arrays[0], i), wanted, allowed(o->dtype, 16), 0x1p-13);
        dot += (double)array_get(&got->arrays[0], i) * array_get(&o->dy, i);
    }
    for (int64_t k = 0; k < o->n_cols; k++) {
        int64_t i = row * o->n_cols + k;

        TEST_AT(i);
        CHECK_NEAR(array_get(&got->arrays[1], i), 0.5 * array_get(&got->arrays[0], i) * (array_get(&o->dy, i) - dot),
                   allowed(o->dtype, 16), fmax(0.5 * array_get(&got->arrays[0], i), 0x1p-12));
    }
}

static void run_softmax_with(const struct operands *o, dsc_nn_mask kind, bool is_causal, const struct dsc_par *par, struct outputs *first)
{
    int64_t n = o->n_rows * o->n_cols;
    uint8_t *keep = test_alloc((size_t)o->n_cols);
    struct outputs got = {.n = 2};

    for (int64_t k = 0; k < o->n_cols; k++)
        keep[k] = k % 3 == 1;
    got.arrays[0] = array_copy(&o->x, 2);
    got.arrays[1] = array_create(o->dtype, n, 2);

    struct dsc_nn_softmax call = {
        .n_batch = 1,
        .n_heads = 1,
        .n_queries = o->n_rows,
        .n_keys = o->n_cols,
        .dtype = o->dtype,
        .scale = 0.5f,
        .is_causal = is_causal,
        .mask_kind = kind,
        .mask = kind == DSC_NN_MASK_ADD ? (const void *)o->other.data : keep,
        .mask_strides = {0, 0, kind == DSC_NN_MASK_ADD ? o->n_cols : 0},
        .x = got.arrays[0].data, /* in place */
        .y = got.arrays[0].data,
    };
    struct dsc_nn_softmax_grad grad = {o->n_rows, o->n_cols, o->dtype, 0.5f, got.arrays[0].data, o->dy.data, got.arrays[1].data};

    CHECK_STATUS(dsc_nn_softmax(&call, par), DSC_OK);
    CHECK_STATUS(dsc_nn_softmax_grad(&grad, par), DSC_OK);
    for (int64_t row = 0; row < o->n_rows && first->n == 0; row++)
        check_softmax_row(o, kind, is_causal, keep, row, &got);
    free(keep);
    keep_or_compare(first, &got);
}

#define SOFTMAX_RUN(name, kind, is_causal)                                                              \
    static void run_##name(const struct operands *o, const struct dsc_par *par, struct outputs *first) \
    {                                                                                                   \
        run_softmax_with(o, kind, is_causal, par, first);                                               \
    }
SOFTMAX_RUN(softmax, DSC_NN_MASK_NONE, false)
SOFTMAX_RUN(softmax_causal, DSC_NN_MASK_NONE, true)
SOFTMAX_RUN(softmax_added, DSC_NN_MASK_ADD, true)
SOFTMAX_RUN(softmax_kept, DSC_NN_MASK_KEEP, false)

static const struct {
    const char *name;
    void (*run)(const struct operands *o, const struct dsc_par *par, struct outputs *first);
} operators[] = {
#define OPERATOR(name) {#name, run_##name}
    OPERATOR(layer_norm),
    OPERATOR(rms_norm),
#define DSC_NN_ACT(name) OPERATOR(name), OPERATOR(gated_##name),
#include "dsc/activations.inc"
#undef DSC_NN_ACT
    OPERATOR(dropout),
    OPERATOR(drop_all),
    OPERATOR(drop_none),
    OPERATOR(rotary),
    OPERATOR(rotary_pairs),
    OPERATOR(softmax),
    OPERATOR(softmax_causal),
    OPERATOR(softmax_added),
    OPERATOR(softmax_kept),
#undef OPERATOR
};
#define N_OPERATORS ((int)(sizeof operators / sizeof operators[0]))

/* Rows x columns: no row, one element, odd numbers, one long row, many chunks of rows, columns over several blocks. */
static const int64_t shapes[][2] = {{0, 5}, {1, 1}, {3, 17}, {2, 2049}, {1, 40001}, {1301, 63}, {67, 1024}};
#define N_SHAPES ((int)(sizeof shapes / sizeof shapes[0]))

static void check_everywhere(struct pool *pool)
{
    uint64_t random = 7;

    for (int op = 0; op < N_OPERATORS; op++) {
        for (int s = 0; s < N_SHAPES; s++) {
            for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
                struct operands o = make_operands((dsc_dtype)dtype, shapes[s][0], shapes[s][1], &random);
                struct outputs first = {.n = 0};
                int32_t isa_index = 0;
                const char *isa;

                while (next_isa(&isa_index, &isa)) {
                    TEST_CASE("%s of [%d, %d] %s on %s", operators[op].name, (int)shapes[s][0], (int)shapes[s][1], dtype_names[dtype], isa);
                    operators[op].run(&o, NULL, &first);
                    operators[op].run(&o, &pool->par, &first);
                }
                destroy_outputs(&first);
                destroy_operands(&o);
            }
        }
    }
}

/* inf and NaN propagate as in the formulas, and rows whose every key is hidden are zero. */
static void check_special_values(void)
{
    float x[4] = {-INFINITY, INFINITY, NAN, -200.0f};
    float y[4];
    struct dsc_nn_bias_act act = {1, 4, DSC_DTYPE_F32, DSC_NN_ACT_silu, x, NULL, y};

    TEST_CASE("special values");
    CHECK_STATUS(dsc_nn_bias_act(&act, NULL), DSC_OK);
    CHECK(isnan(y[0]) && y[1] == INFINITY && isnan(y[2]) && y[3] == 0.0f); /* -inf * 0 */

    struct dsc_nn_softmax softmax = {.n_batch = 1, .n_heads = 1, .n_queries = 1, .n_keys = 4, .scale = 1, .x = x, .y = y};

    CHECK_STATUS(dsc_nn_softmax(&softmax, NULL), DSC_OK);
    for (int i = 0; i < 4; i++)
        CHECK(isnan(y[i]));

    float hidden[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};

    softmax.x = hidden;
    CHECK_STATUS(dsc_nn_softmax(&softmax, NULL), DSC_OK);
    for (int i = 0; i < 4; i++)
        CHECK(y[i] == 0.0f);

    /* A row without variance. */
    float same[4] = {3, 3, 3, 3};
    float mean;
    float rstd;
    struct dsc_nn_norm norm = {.n_rows = 1, .n_cols = 4, .eps = 1e-6f, .x = same, .y = y, .mean = &mean, .rstd = &rstd};

    CHECK_STATUS(dsc_nn_norm(&norm, NULL), DSC_OK);
    CHECK_NEAR(rstd, 1e3, 2, 1);
    for (int i = 0; i < 4; i++)
        CHECK(y[i] == 0.0f);
}

static void check_refusals(void)
{
    float x[4] = {0};
    float y[4] = {0};
    struct dsc_nn_norm norm = {.n_rows = 1, .n_cols = 4, .x = x, .y = y, .mean = y, .rstd = y};
    struct dsc_nn_norm_grad norm_grad = {.n_rows = 1, .n_cols = 4, .sum = x, .dy = x, .mean = y, .rstd = y, .dx = y, .dweight = y};
    struct dsc_nn_bias_act act = {1, 4, DSC_DTYPE_F32, DSC_NN_ACT_COUNT, x, NULL, y};
    struct dsc_nn_gated gated = {1, 4, 3, DSC_DTYPE_F32, DSC_NN_ACT_silu, x, x, y};
    struct dsc_nn_dropout dropout = {.n_rows = 1, .n_cols = 4, .p = 1.5f, .x = x, .y = y};
    struct dsc_nn_rotary rotary = {.n_batch = 1, .n_tokens = 1, .n_heads = 1, .head_dim = 4, .rotary_dim = 3, .x = x, .y = y, .cos = x, .sin = x};
    struct dsc_nn_softmax softmax = {.n_batch = 1, .n_heads = 1, .n_queries = 1, .n_keys = 4, .mask_kind = DSC_NN_MASK_ADD, .x = x, .y = y};

    dsc_nn_act found = DSC_NN_ACT_COUNT;

    TEST_CASE("refusals");
    CHECK_STATUS(dsc_nn_act_find("silu", &found), DSC_OK);
    CHECK_EQ(found, DSC_NN_ACT_silu);
    CHECK_ERROR(dsc_nn_act_find("swish", &found), DSC_EINVAL, "no activation \"swish\"; there are: gelu gelu_tanh silu relu sigmoid");
    CHECK_EQ(found, DSC_NN_ACT_silu);
    CHECK_ERROR(dsc_nn_norm_grad(&norm_grad, NULL), DSC_EINVAL, "scratch");
    CHECK_ERROR(dsc_nn_bias_act(&act, NULL), DSC_EINVAL, "act is ");
    CHECK_ERROR(dsc_nn_gated(&gated, NULL), DSC_EINVAL, "in_stride is 3");
    CHECK_ERROR(dsc_nn_dropout(&dropout, NULL), DSC_EINVAL, "p is 1.5");
    dropout.p = NAN;
    CHECK_ERROR(dsc_nn_dropout(&dropout, NULL), DSC_EINVAL, "p is nan");
    CHECK_ERROR(dsc_nn_rotary(&rotary, NULL), DSC_EINVAL, "rotary_dim is 3");
    CHECK_ERROR(dsc_nn_softmax(&softmax, NULL), DSC_EINVAL, "mask is NULL");
    norm.eps = -1;
    CHECK_ERROR(dsc_nn_norm(&norm, NULL), DSC_EINVAL, "eps is -1");
    norm.eps = 0;
    norm.y = NULL;
    CHECK_ERROR(dsc_nn_norm(&norm, NULL), DSC_EINVAL, "y is NULL for 1 rows");
    norm.n_rows = INT64_MAX / 8;
    CHECK_ERROR(dsc_nn_norm(&norm, NULL), DSC_EOVERFLOW, "rows of 4");
    norm.n_cols = 0;
    CHECK_ERROR(dsc_nn_norm(&norm, NULL), DSC_EINVAL, "n_cols is 0");
    norm.n_rows = -1;
    CHECK_ERROR(dsc_nn_norm(&norm, NULL), DSC_EINVAL, "n_rows is -1");
    for (int i = 0; i < 4; i++)
        CHECK(y[i] == 0.0f);
}

/*
 * GELU and its derivative at every bf16 number but NaN, in f32 and in bf16. In bf16 each input has exactly one right
 * result.
 */
static void check_gelu_of_all(void)
{
    enum { N = 0x10000 };
    struct array wide_x = array_create(DSC_DTYPE_F32, N, 0);
    struct array half_x = array_create(DSC_DTYPE_BF16, N, 0);

    for (uint32_t i = 0; i < N; i++) {
        float x;
        uint32_t bits = (i & 0x7fffu) > 0x7f80u ? 0 : i << 16;

        memcpy(&x, &bits, sizeof x);
        memcpy(wide_x.data + i * sizeof x, &x, sizeof x);
        array_set_bits(&half_x, i, bits >> 16);
    }
    for (int is_half = 0; is_half < 2; is_half++) {
        dsc_dtype dtype = is_half ? DSC_DTYPE_BF16 : DSC_DTYPE_F32;
        const struct array *x = is_half ? &half_x : &wide_x;
        struct array y = array_create(dtype, N, 0);
        struct array dx = array_create(dtype, N, 0);
        struct array ones = array_create(dtype, N, 0);

        for (int64_t i = 0; i < N; i++)
            array_set_bits(&ones, i, is_half ? 0x3f80u : 0x3f800000u);

        struct dsc_nn_bias_act call = {1, N, dtype, DSC_NN_ACT_gelu, x->data, NULL, y.data};
        struct dsc_nn_bias_act_grad grad = {
            .n_rows = 1, .n_cols = N, .dtype = dtype, .act = DSC_NN_ACT_gelu, .x = x->data, .dy = ones.data, .dx = dx.data};

        TEST_CASE("gelu of all bf16 numbers in %s", is_half ? "bf16" : "f32");
        CHECK_STATUS(dsc_nn_bias_act(&call, NULL), DSC_OK);
        CHECK_STATUS(dsc_nn_bias_act_grad(&grad, NULL), DSC_OK);
        for (int64_t i = 0; i < N; i++) {
            double at = array_get(x, i);
            double slope;
            double value = act_of(DSC_NN_ACT_gelu, at, &slope);

            TEST_AT(i);
            if (isinf(at)) {
                CHECK_EQ(array_get(&y, i) == (double)INFINITY, at > 0);
                CHECK_EQ(isnan(array_get(&y, i)), at < 0);
                continue;
            }
            CHECK_NEAR(array_get(&y, i), value, allowed(dtype, 5), fabs(at) < 4 ? 1e-36 : 1.0);
            CHECK_NEAR(array_get(&dx, i), slope, allowed(dtype, 2), 1);
        }
        array_destroy(&y);
        array_destroy(&dx);
        array_destroy(&ones);
    }
    array_destroy(&wide_x);
    array_destroy(&half_x);
}

int main(void)
{
    struct pool pool;

    pool_init(&pool, 3, 1);
    check_everywhere(&pool);
    check_special_values();
    check_gelu_of_all();
    check_refusals();
    pool_clear(&pool);
    return test_finish(__FILE__);
}
