/*
 * optim/muon.c: the momentum half and the apply half against their formulas in f64, in every mix of dtypes. All other
 * memory stays untouched.
 */
#include "harness.h"

static double ulps_of(dsc_dtype dtype)
{
    return dtype == DSC_DTYPE_F32 ? 8 : dtype == DSC_DTYPE_F16 ? 0x1p13 : 0x1p16; /* one place of the 16-bit type, in places of f32 */
}

static void check_mix(struct dsc_optim_args args, int64_t n, uint64_t *random)
{
    struct model model = model_create(&args, n, 1);
    double mu = args.momentum;

    model_fill(&model, false, random);

    struct model before = model_copy(&model, 1);
    struct dsc_optim_tensor tensor = model_tensor(&model, 1);

    tensor.param = NULL; /* not read */
    CHECK_STATUS(dsc_muon_momentum(&args, &tensor, 1, NULL), DSC_OK);
    CHECK_SAME(&model.param, &before.param);
    CHECK_SAME(&model.grad, &before.grad);
    CHECK_SAME(&model.state[1], &before.state[1]);
    for (int64_t i = 0; i < n; i++) {
        double g = (double)array_get(&before.grad, i) * args.grad_scale * ((args.flags & DSC_OPTIM_MAXIMIZE) != 0 ? -1 : 1);
        double v = mu * (double)array_get(&before.state[0], i) + g;
        double update = (args.flags & DSC_OPTIM_NESTEROV) != 0 ? g + mu * v : v;
        double floor = fabs(g) + fabs(v);

        CHECK_NEAR((double)array_get(&model.state[0], i), v, ulps_of(args.state_dtype), floor);
        CHECK_NEAR((double)array_get(&model.copy, i), update, ulps_of(args.copy_dtype), floor);
    }

    struct model applied = model_copy(&model, 1);

    tensor = model_tensor(&applied, 0);
    CHECK_STATUS(dsc_muon_apply(&args, &tensor, 1, NULL), DSC_OK);
    CHECK_SAME(&applied.grad, &model.grad);
    CHECK_SAME(&applied.state[0], &model.state[0]);
    for (int64_t i = 0; i < n; i++) {
        double p = (double)array_get(&model.param, i);
        double wanted = p * (1 - args.lr * args.weight_decay) - args.lr * (double)array_get(&model.grad, i);

        CHECK_NEAR((double)array_get(&applied.param, i), wanted, ulps_of(args.param_dtype), fabs(p) + args.lr);
        CHECK_NEAR((double)array_get(&applied.copy, i), (double)array_get(&applied.param, i), ulps_of(args.copy_dtype),
                   (double)array_get(&applied.param, i));
    }
    model_destroy(&model);
    model_destroy(&before);
    model_destroy(&applied);
}

int main(void)
{
    uint64_t random = 59;
    int32_t isa_index = 0;
    const char *isa;

    while (next_isa(&isa_index, &isa)) {
        for (int mix = 0; mix < 81; mix++) {
            struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;

            args.param_dtype = (dsc_dtype)(mix % 3);
            args.grad_dtype = (dsc_dtype)(mix / 3 % 3);
            args.state_dtype = (dsc_dtype)(mix / 9 % 3);
            args.copy_dtype = (dsc_dtype)(mix / 27);
            args.lr = 0.02;
            args.weight_decay = 0.1;
            args.momentum = 0.95;
            args.grad_scale = 0.5;
            args.flags = (mix % 2 ? DSC_OPTIM_NESTEROV : 0) | (mix % 5 == 0 ? DSC_OPTIM_MAXIMIZE : 0);
            TEST_CASE("%s: mix %d", isa, mix);
            check_mix(args, mix % 7 == 0 ? 1500 : 37, &random);
        }
    }

    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    float x[4][2] = {{1, 2}, {3, 4}, {5, 6}, {7, 8}};
    float before[4][2];
    struct dsc_optim_tensor tensor = {.n_elems = 2, .param = x[0], .grad = x[1], .state = {x[2]}};

    TEST_CASE("errors");
    memcpy(before, x, sizeof x);
    CHECK_ERROR(dsc_muon_momentum(&args, &tensor, 1, NULL), DSC_EINVAL, "copy");
    tensor.copy = x[3];
    tensor.state[0] = NULL;
    CHECK_ERROR(dsc_muon_momentum(&args, &tensor, 1, NULL), DSC_EINVAL, "state[0]");
    tensor.param = NULL;
    CHECK_ERROR(dsc_muon_apply(&args, &tensor, 1, NULL), DSC_EINVAL, "param");
    args.momentum = -1;
    CHECK_ERROR(dsc_muon_momentum(&args, &tensor, 1, NULL), DSC_EINVAL, "momentum");
    CHECK_ERROR(dsc_muon_momentum(NULL, &tensor, 1, NULL), DSC_EINVAL, "args");
    CHECK_BYTES(x, before, sizeof x);
    return test_finish(__FILE__);
}
