/* optim/adam.c against the formulas of Adam (arXiv 1412.6980, algorithm 1) and AdamW (arXiv 1711.05101, algorithm 2) in f64. */
#include "harness.h"

static void adam(const struct dsc_optim_args *args, struct element *e, bool is_decoupled)
{
    double g = e->grad;
    double g_floor = fabs(g);
    double correction1 = 1;
    double correction2 = 1;

    e->param_floor = fabs(e->param);
    if (is_decoupled) {
        e->param -= args->lr * args->weight_decay * e->param;
    } else {
        g += args->weight_decay * e->param;
        g_floor += fabs(args->weight_decay * e->param);
    }
    e->state_floor[0] = fabs(e->state[0]) + g_floor;
    e->state[0] = args->beta1 * e->state[0] + (1 - args->beta1) * g;
    e->state_floor[1] = e->state[1] + g_floor * g_floor;
    e->state[1] = args->beta2 * e->state[1] + (1 - args->beta2) * g * g;
    if ((args->flags & DSC_OPTIM_BIAS_CORRECTION) != 0) {
        correction1 -= pow(args->beta1, (double)args->step);
        correction2 -= pow(args->beta2, (double)args->step);
    }

    double denom = sqrt(e->state[1] / correction2) + args->eps;

    e->param -= args->lr * (e->state[0] / correction1) / denom;
    e->param_floor += args->lr * (e->state_floor[0] / correction1) / denom;
}

static void adam_formula(const struct dsc_optim_args *args, struct element *e)
{
    adam(args, e, false);
}

static void adamw_formula(const struct dsc_optim_args *args, struct element *e)
{
    adam(args, e, true);
}

int main(void)
{
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;

    check_formula("adam", &args, adam_formula, false);
    check_formula("adamw", &args, adamw_formula, false);
    args.lr = 0.05;
    args.beta1 = 0.8;
    args.beta2 = 0.95;
    args.eps = 1e-3;
    args.weight_decay = 0.3;
    args.grad_scale = 1.0 / 1024;
    args.step = 1000;
    args.flags |= DSC_OPTIM_MAXIMIZE;
    check_formula("adam", &args, adam_formula, false);
    check_formula("adamw", &args, adamw_formula, false);
    args.flags = 0;
    args.beta1 = 0;
    check_formula("adam", &args, adam_formula, false);
    check_formula("adamw", &args, adamw_formula, false);
    return test_finish(__FILE__);
}
