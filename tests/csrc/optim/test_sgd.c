/* optim/sgd.c against the formula of torch.optim.SGD in f64: plain, momentum, dampening, Nesterov, and a first step that does not read the velocity. */
#include "harness.h"

static void sgd_formula(const struct dsc_optim_args *args, struct element *e)
{
    double g = e->grad + args->weight_decay * e->param;
    double g_floor = fabs(e->grad) + fabs(args->weight_decay * e->param);
    double step = g;

    e->state_floor[0] = fabs(e->state[0]) + g_floor;
    if (args->momentum != 0) {
        e->state[0] = args->step == 1 ? g : args->momentum * e->state[0] + (1 - args->dampening) * g;
        step = (args->flags & DSC_OPTIM_NESTEROV) != 0 ? g + args->momentum * e->state[0] : e->state[0];
    }
    e->param_floor = fabs(e->param) + args->lr * (2 * e->state_floor[0]);
    e->param -= args->lr * step;
}

static void test_first_step(void)
{
    float param[3] = {1, 2, 3};
    const float grad[3] = {0.5f, 0.25f, -1};
    float velocity[3] = {NAN, INFINITY, 7}; /* as uninitialised memory may be */
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    struct dsc_optim_tensor tensor = {.n_elems = 3, .param = param, .grad = grad, .state = {velocity}};

    TEST_CASE("first step");
    args.lr = 1;
    args.momentum = 0.9;
    args.dampening = 0.5;
    CHECK_STATUS(dsc_optim_step(find_kind("sgd"), &args, &tensor, 1, NULL), DSC_OK);
    for (int i = 0; i < 3; i++) {
        CHECK(velocity[i] == grad[i]);
        CHECK(param[i] == (float)(i + 1) - grad[i]);
    }
}

static void test_without_momentum(void)
{
    float param[2] = {1, 2};
    const float grad[2] = {0.5f, 0.25f};
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    struct dsc_optim_tensor tensor = {.n_elems = 2, .param = param, .grad = grad};

    TEST_CASE("no state");
    args.lr = 1;
    CHECK_STATUS(dsc_optim_step(find_kind("sgd"), &args, &tensor, 1, NULL), DSC_OK);
    CHECK(param[0] == 0.5f && param[1] == 1.75f);
}

int main(void)
{
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;

    args.lr = 0.1;
    check_formula("sgd", &args, sgd_formula, false);
    args.momentum = 0.9;
    args.weight_decay = 0.05;
    check_formula("sgd", &args, sgd_formula, false);
    args.flags = DSC_OPTIM_NESTEROV | DSC_OPTIM_MAXIMIZE;
    check_formula("sgd", &args, sgd_formula, false);
    args.flags = 0;
    args.dampening = 0.3;
    args.step = 5;
    args.grad_scale = 0.5;
    check_formula("sgd", &args, sgd_formula, false);
    test_first_step();
    test_without_momentum();
    return test_finish(__FILE__);
}
