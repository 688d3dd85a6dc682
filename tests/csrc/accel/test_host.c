/*
 * The host accelerator: every hook gives the bits of the function that it wraps, accumulates where the table says so,
 * and passes errors on.
 */
#include "test.h"

#include "dsc/accel.h"

#define N 1009

struct state {
    float param[N], grad[N], first[N], second[N], copy[N];
};

static void fill(struct state *state)
{
    uint64_t seed = 1;

    for (int i = 0; i < N; i++) {
        state->param[i] = (float)test_uniform(&seed);
        state->grad[i] = (float)test_uniform(&seed);
        state->first[i] = 0.1f * (float)test_uniform(&seed);
        state->second[i] = 0.01f + 0.01f * (float)test_uniform(&seed);
        state->copy[i] = 7.0f;
    }
}

static struct dsc_optim_tensor tensor_of(struct state *state)
{
    return (struct dsc_optim_tensor){
        .n_elems = N,
        .param = state->param,
        .grad = state->grad,
        .state = {state->first, state->second},
        .copy = state->copy,
    };
}

static void test_steps(const struct dsc_accel *host)
{
    static struct state ours, theirs;
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    const struct dsc_optim_kind *kind;

    for (int32_t i = 0; (kind = dsc_optim_at(i)) != NULL; i++) {
        TEST_CASE("%s", dsc_optim_name(kind));
        fill(&ours);
        fill(&theirs);

        const struct dsc_optim_tensor tensor = tensor_of(&ours), twin = tensor_of(&theirs);

        CHECK_STATUS(host->optim_step(dsc_optim_name(kind), &args, &tensor, 1, NULL, NULL), DSC_OK);
        CHECK_STATUS(dsc_optim_step(kind, &args, &twin, 1, NULL), DSC_OK);
        CHECK_BYTES(&ours, &theirs, sizeof ours);
        CHECK(ours.copy[0] == ours.param[0]);
    }
    TEST_CASE("%s", "");
}

static void test_norms(const struct dsc_accel *host)
{
    static struct state ours, theirs;
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    const struct dsc_optim_kind *lamb;
    double sumsq[2], wanted[2], ratio = 0.5;

    fill(&ours);
    fill(&theirs);

    const struct dsc_optim_tensor tensor = tensor_of(&ours), twin = tensor_of(&theirs);

    CHECK_STATUS(dsc_optim_find("lamb", &lamb), DSC_OK);
    CHECK_STATUS(host->optim_norms("lamb", &args, &tensor, 1, sumsq, NULL, NULL), DSC_OK);
    CHECK_STATUS(dsc_optim_norms(lamb, &args, &twin, 1, NULL, wanted), DSC_OK);
    CHECK_BYTES(sumsq, wanted, sizeof sumsq);
    CHECK_STATUS(host->optim_apply("lamb", &args, &tensor, 1, &ratio, NULL), DSC_OK);
    CHECK_STATUS(dsc_optim_apply(lamb, &args, &twin, 1, NULL, &ratio), DSC_OK);
    CHECK_BYTES(&ours, &theirs, sizeof ours);
}

static void test_muon(const struct dsc_accel *host)
{
    static struct state ours, theirs;
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;

    args.momentum = 0.9;
    fill(&ours);
    fill(&theirs);

    const struct dsc_optim_tensor tensor = tensor_of(&ours), twin = tensor_of(&theirs);

    CHECK_STATUS(host->muon_momentum(&args, &tensor, 1, NULL), DSC_OK);
    CHECK_STATUS(dsc_muon_momentum(&args, &twin, 1, NULL), DSC_OK);
    CHECK_BYTES(&ours, &theirs, sizeof ours);
    CHECK_STATUS(host->muon_apply(&args, &tensor, 1, NULL), DSC_OK);
    CHECK_STATUS(dsc_muon_apply(&args, &twin, 1, NULL), DSC_OK);
    CHECK_BYTES(&ours, &theirs, sizeof ours);
}

static void test_flat(const struct dsc_accel *host)
{
    static struct state ours, theirs;
    static uint16_t half[N], half_twin[N];
    double out[2] = {2.0, 3.0}, sumsq;
    int64_t n_nonfinite;

    fill(&ours);
    fill(&theirs);
    ours.grad[5] = theirs.grad[5] = INFINITY;

    const struct dsc_span grad = {ours.grad, N, DSC_DTYPE_F32}, param = {ours.param, N, DSC_DTYPE_F32}, to = {half, N, DSC_DTYPE_BF16};
    const struct dsc_span twin_grad = {theirs.grad, N, DSC_DTYPE_F32}, twin_param = {theirs.param, N, DSC_DTYPE_F32},
                          twin_to = {half_twin, N, DSC_DTYPE_BF16};

    CHECK_STATUS(dsc_flat_sumsq(&twin_grad, 1, NULL, &sumsq, &n_nonfinite), DSC_OK);
    CHECK_STATUS(host->flat_sumsq(&grad, 1, out, NULL, NULL), DSC_OK);
    CHECK(out[0] == 2.0 + sumsq && out[1] == 3.0 + 1.0);

    CHECK_STATUS(dsc_flat_reduce(&twin_grad, 1, 0.5f, true, &twin_param, NULL, &sumsq, &n_nonfinite), DSC_OK);
    CHECK_STATUS(host->flat_reduce(&grad, 1, 0.5f, true, &param, NULL, NULL, NULL), DSC_OK);
    CHECK_BYTES(&ours, &theirs, sizeof ours);
    CHECK_STATUS(dsc_flat_reduce(&twin_grad, 1, 0.5f, false, &twin_param, NULL, &sumsq, &n_nonfinite), DSC_OK);
    out[0] = out[1] = 1.0;
    CHECK_STATUS(host->flat_reduce(&grad, 1, 0.5f, false, &param, out, NULL, NULL), DSC_OK);
    CHECK_BYTES(&ours, &theirs, sizeof ours);
    CHECK(out[0] == 1.0 + sumsq && out[1] == 1.0 + 1.0);

    CHECK_STATUS(dsc_flat_scale(&twin_grad, 1, 0.3f, NULL), DSC_OK);
    CHECK_STATUS(host->flat_scale(&grad, 1, 0.3f, NULL), DSC_OK);
    CHECK_STATUS(dsc_flat_cast(&twin_grad, &twin_to, NULL), DSC_OK);
    CHECK_STATUS(host->flat_cast(&grad, &to, NULL), DSC_OK);
    CHECK_BYTES(&ours, &theirs, sizeof ours);
    CHECK_BYTES(half, half_twin, sizeof half);
}

static void test_moe(const struct dsc_accel *host)
{
    static float x[6] = {1, 2, 3, 4, 5, 6}, rows[8], out[6], drows[8], dweights[4];
    static const float weights[4] = {2, 3, 5, 7};
    static const int64_t order[4] = {3, 0, 2, 1};
    int64_t inverse[4], scratch[4];
    const struct dsc_moe_gather gather = {2, 4, 2, 2, DSC_DTYPE_F32, x, order, inverse, rows};
    const struct dsc_moe_combine combine = {2, 4, 2, 2, DSC_DTYPE_F32, rows, inverse, weights, out};
    const struct dsc_moe_combine_grad grad = {2,       4,       2,       2,     DSC_DTYPE_F32, x,
                                              rows, inverse, weights, scratch, drows,         dweights};

    CHECK_STATUS(host->moe_invert(order, 4, inverse, NULL), DSC_OK);
    CHECK(inverse[0] == 1 && inverse[1] == 3 && inverse[2] == 2 && inverse[3] == 0);
    CHECK_STATUS(host->moe_gather(&gather, NULL), DSC_OK);
    CHECK_BYTES(rows, ((const float[8]){3, 4, 1, 2, 3, 4, 1, 2}), sizeof rows);
    CHECK_STATUS(host->moe_combine(&combine, NULL), DSC_OK);
    CHECK_BYTES(out, ((const float[6]){5, 10, 36, 48}), sizeof out);
    CHECK_STATUS(host->moe_combine_grad(&grad, NULL), DSC_OK);
    CHECK_BYTES(drows, ((const float[8]){21, 28, 2, 4, 15, 20, 3, 6}), sizeof drows);
    CHECK_BYTES(dweights, ((const float[4]){5, 5, 25, 25}), sizeof dweights);
    CHECK_ERROR(host->moe_invert(NULL, 4, inverse, NULL), DSC_EINVAL, "order is NULL");
}

static void test_refusals(const struct dsc_accel *host)
{
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    const struct dsc_span null = {NULL, 4, DSC_DTYPE_F32};
    double out[2] = {1.0, 2.0};

    CHECK_ERROR(host->optim_step("adam9", &args, NULL, 0, NULL, NULL), DSC_ENOTFOUND, "adam9");
    CHECK_ERROR(host->optim_norms("adam9", &args, NULL, 0, out, NULL, NULL), DSC_ENOTFOUND, "adam9");
    CHECK_ERROR(host->optim_apply("adam", &args, NULL, 0, out, NULL), DSC_ENOTSUP, "adam needs no norms");
    CHECK_ERROR(host->flat_sumsq(&null, 1, out, NULL, NULL), DSC_EINVAL, "data is NULL");
    CHECK_ERROR(host->flat_sumsq(&null, 0, NULL, NULL, NULL), DSC_EINVAL, "out");
    CHECK_ERROR(host->flat_reduce(&null, 1, 1.0f, false, &null, out, NULL, NULL), DSC_EINVAL, "data is NULL");
    CHECK(out[0] == 1.0 && out[1] == 2.0);
}

int main(void)
{
    const struct dsc_accel *host = NULL;

    if (!CHECK_STATUS(dsc_accel_open("host", NULL, &host), DSC_OK))
        return test_finish(__FILE__);
    test_steps(host);
    test_norms(host);
    test_muon(host);
    test_flat(host);
    test_moe(host);
    test_refusals(host);
    return test_finish(__FILE__);
}
