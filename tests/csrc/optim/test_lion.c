/* optim/lion.c against the formula of Lion (arXiv 2302.06675, algorithm 2) in f64, and its sign at zero and at NaN. */
#include "harness.h"

static void lion_formula(const struct dsc_optim_args *args, struct element *e)
{
    double update = args->beta1 * e->state[0] + (1 - args->beta1) * e->grad;
    double sign = (update > 0) - (update < 0);

    e->is_ambiguous = fabs(update) < 8 * test_ulp_of(fabs(e->state[0]) + fabs(e->grad));
    e->state_floor[0] = fabs(e->state[0]) + fabs(e->grad);
    e->param_floor = fabs(e->param) + args->lr;
    e->param = e->param * (1 - args->lr * args->weight_decay) - args->lr * sign;
    e->state[0] = args->beta2 * e->state[0] + (1 - args->beta2) * e->grad;
}

static void test_sign(void)
{
    float param[5] = {1, 1, 1, 1, 1};
    const float grad[5] = {0, -0.0f, NAN, INFINITY, -1e-45f};
    float state[5] = {0, 0, 0, 0, 0};
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    struct dsc_optim_tensor tensor = {.n_elems = 5, .param = param, .grad = grad, .state = {state}};

    TEST_CASE("sign");
    args.lr = 0.5;
    args.beta1 = 0;
    CHECK_STATUS(dsc_optim_step(find_kind("lion"), &args, &tensor, 1, NULL), DSC_OK);
    CHECK(param[0] == 1);
    CHECK(param[1] == 1);
    CHECK(isnan(param[2]));
    CHECK(param[3] == 0.5f);
    CHECK(param[4] == 1.5f);
}

int main(void)
{
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;

    args.beta2 = 0.99;
    check_formula("lion", &args, lion_formula, false);
    args.lr = 0.02;
    args.beta1 = 0.95;
    args.weight_decay = 0.5;
    args.grad_scale = 0.125;
    args.flags = DSC_OPTIM_MAXIMIZE;
    check_formula("lion", &args, lion_formula, false);
    test_sign();
    return test_finish(__FILE__);
}
