/* Activations by name and number: y = act(x + bias), and its gradient. */
#include "nn/act.h"

#include "nn/rows.h"

#include <string.h>

dsc_status dsc_nn_act_find(const char *name, dsc_nn_act *out_act)
{
    static const char *const names[] = {
#define DSC_NN_ACT(name) #name,
#include "dsc/activations.inc"
#undef DSC_NN_ACT
    };
    static const char known[] = ""
#define DSC_NN_ACT(name) " " #name
#include "dsc/activations.inc"
#undef DSC_NN_ACT
        ;

    for (int i = 0; i < DSC_NN_ACT_COUNT; i++) {
        if (name != NULL && strcmp(name, names[i]) == 0) {
            *out_act = (dsc_nn_act)i;
            return DSC_OK;
        }
    }
    return dsc_fail(DSC_EINVAL, "no activation \"%.63s\"; there are:%s", name == NULL ? "" : name, known);
}

#define LOOPS(name)                                                          \
    {                                                                        \
        nn->name, nn->name##_grad, nn->gated_##name, nn->gated_##name##_grad \
    }

dsc_status dsc_act_loops_of(dsc_nn_act act, struct dsc_act_loops *out_loops)
{
    const struct dsc_nn_kernels *nn = dsc_nn_kernels_get();
    const struct dsc_act_loops loops[DSC_NN_ACT_COUNT] = {
#define DSC_NN_ACT(name) [DSC_NN_ACT_##name] = LOOPS(name),
#include "dsc/activations.inc"
#undef DSC_NN_ACT
    };

    if ((int)act < 0 || (int)act >= DSC_NN_ACT_COUNT)
        return dsc_fail(DSC_EINVAL, "act is %d, which is no dsc_nn_act", (int)act);
    *out_loops = loops[act];
    return DSC_OK;
}

struct act_job {
    struct dsc_rows rows;
    struct dsc_act_loops loops;
    const struct dsc_nn_bias_act *call;
};

static void act_row(const void *arg, int64_t row, float *const *sums)
{
    const struct act_job *job = arg;
    const struct dsc_nn_bias_act *call = job->call;
    int64_t i = row * call->n_cols;

    (void)sums;
    job->loops.act(call->n_cols, call->dtype, dsc_at(call->x, call->dtype, i), call->bias,
                   dsc_at_out(call->y, call->dtype, i));
}

dsc_status dsc_nn_bias_act_check(const struct dsc_nn_bias_act *call)
{
    struct dsc_act_loops ignored;

    DSC_TRY(dsc_check_rows(call->n_rows, call->n_cols, call->dtype));
    DSC_TRY(dsc_act_loops_of(call->act, &ignored));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, x), NAMED(call, y)));
    return DSC_OK;
}

dsc_status dsc_nn_bias_act(const struct dsc_nn_bias_act *call, const struct dsc_par *par)
{
    struct act_job job = {.call = call};

    DSC_TRY(dsc_nn_bias_act_check(call));
    DSC_TRY(dsc_act_loops_of(call->act, &job.loops));
    job.rows = dsc_rows_of(call->n_rows, call->n_cols);
    dsc_rows_run(&job.rows, NULL, act_row, &job, par);
    return DSC_OK;
}

struct act_grad_job {
    struct dsc_rows rows;
    struct dsc_act_loops loops;
    const struct dsc_nn_bias_act_grad *call;
};

static void act_grad_row(const void *arg, int64_t row, float *const *sums)
{
    const struct act_grad_job *job = arg;
    const struct dsc_nn_bias_act_grad *call = job->call;
    int64_t i = row * call->n_cols;

    job->loops.grad(call->n_cols, call->dtype, dsc_at(call->x, call->dtype, i), call->bias,
                    dsc_at(call->dy, call->dtype, i), dsc_at_out(call->dx, call->dtype, i), sums[0]);
}

dsc_status dsc_nn_bias_act_grad_check(const struct dsc_nn_bias_act_grad *call)
{
    struct dsc_act_loops ignored;

    DSC_TRY(dsc_check_rows(call->n_rows, call->n_cols, call->dtype));
    DSC_TRY(dsc_act_loops_of(call->act, &ignored));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, x), NAMED(call, dy), NAMED(call, dx)));
    if (call->dbias != NULL)
        DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, scratch)));
    return DSC_OK;
}

dsc_status dsc_nn_bias_act_grad(const struct dsc_nn_bias_act_grad *call, const struct dsc_par *par)
{
    struct act_grad_job job = {.call = call};
    struct dsc_row_sums sums = {call->dtype, {call->dbias}, call->scratch};

    DSC_TRY(dsc_nn_bias_act_grad_check(call));
    DSC_TRY(dsc_act_loops_of(call->act, &job.loops));
    job.rows = dsc_rows_of(call->n_rows, call->n_cols);
    dsc_rows_run(&job.rows, &sums, act_grad_row, &job, par);
    return DSC_OK;
}
