/* optim/adagrad.c against the formula of Adagrad (Duchi, Hazan and Singer 2011) with torch's decays, in f64. */
#include "harness.h"

static void adagrad_formula(const struct dsc_optim_args *args, struct element *e)
{
    double g = e->grad + args->weight_decay * e->param;
    double g_floor = fabs(e->grad) + fabs(args->weight_decay * e->param);
    double lr = args->lr / (1 + (double)(args->step - 1) * args->lr_decay);

    e->state_floor[0] = e->state[0] + g_floor * g_floor;
    e->state[0] += g * g;
    e->param_floor = fabs(e->param) + lr * g_floor / (sqrt(e->state[0]) + args->eps);
    e->param -= lr * g / (sqrt(e->state[0]) + args->eps);
}

int main(void)
{
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;

    args.lr = 0.01;
    args.eps = 1e-10;
    check_formula("adagrad", &args, adagrad_formula, true);
    args.lr_decay = 0.1;
    args.weight_decay = 0.2;
    args.grad_scale = 4;
    args.step = 7;
    args.flags = DSC_OPTIM_MAXIMIZE;
    check_formula("adagrad", &args, adagrad_formula, true);
    return test_finish(__FILE__);
}
