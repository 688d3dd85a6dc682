/*
 * The checks before anything is enqueued, and the scalars. The checks repeat the host's (csrc/optim/optim.c) with the
 * same sentences, since this library has no part of the host's.
 */
#include "cuda/common.cuh"
#include "cuda/kinds.h"

#include <cfloat>
#include <cmath>
#include <cstdarg>
#include <cstdio>

namespace dsc_cuda {

static dsc_status check_field(const char *kind, const char *field, double value, bool is_used, double low, double high)
{
    if (!(std::fabs(value) <= (double)FLT_MAX))
        return fail(DSC_EINVAL, "%s: args.%s is %g, must be finite in f32", kind, field, value);
    if (is_used && !(value >= low && value < high))
        return fail(DSC_EINVAL, "%s: args.%s is %g, must be in [%g, %g)", kind, field, value, low, high);
    return DSC_OK;
}

static bool is_dtype(int dtype)
{
    return dtype >= 0 && dtype < DSC_DTYPE_COUNT;
}

static dsc_status check_dtype(const char *kind, const char *field, dsc_dtype dtype)
{
    if (!is_dtype((int)dtype))
        return fail(DSC_EINVAL, "%s: args.%s is %d, which is no dsc_dtype", kind, field, (int)dtype);
    return DSC_OK;
}

static dsc_status check_flags(const kind &kind, const struct dsc_optim_args *args)
{
    const unsigned known = DSC_OPTIM_BIAS_CORRECTION | DSC_OPTIM_NESTEROV | DSC_OPTIM_MAXIMIZE;
    /* Muon's halves have momentum, but are no step: they come without a launcher of one. */
    const bool is_muon = kind.step == nullptr && (kind.uses & USES_MOMENTUM) != 0;

    if ((args->flags & DSC_OPTIM_STATE_Q8) != 0)
        return fail(DSC_ENOTSUP, "%s: states of 8 bits are for the host; on CUDA they are f32, bf16 or f16", kind.name);
    if ((args->flags & ~known) != 0)
        return fail(DSC_EINVAL, "%s: args.flags is 0x%x, has unknown bits", kind.name, (unsigned)args->flags);
    if ((args->flags & DSC_OPTIM_NESTEROV) == 0)
        return DSC_OK;
    if ((kind.uses & USES_MOMENTUM) == 0)
        return fail(DSC_EINVAL, "%s: args.flags has DSC_OPTIM_NESTEROV, which it has no use for", kind.name);
    if (!is_muon && (args->momentum == 0.0 || args->dampening != 0.0))
        return fail(DSC_EINVAL, "%s: DSC_OPTIM_NESTEROV needs momentum > 0 and dampening 0, not %g and %g", kind.name,
                    args->momentum, args->dampening);
    return DSC_OK;
}

dsc_status check_args(const kind &kind, const struct dsc_optim_args *args)
{
    const char *name = kind.name;
    const bool has_betas = (kind.uses & USES_BETAS) != 0;
    const bool has_coeffs = (kind.uses & USES_COEFFS) != 0;
    const double infinity = HUGE_VAL;

    if (args == nullptr)
        return fail(DSC_EINVAL, "args is NULL");
    if (args->size != sizeof *args)
        return fail(DSC_EINVAL, "%s: args.size is %u, this library expects %u; start from DSC_OPTIM_ARGS_INIT", name,
                    (unsigned)args->size, (unsigned)sizeof *args);
    DSC_TRY(check_dtype(name, "param_dtype", args->param_dtype));
    DSC_TRY(check_dtype(name, "grad_dtype", args->grad_dtype));
    DSC_TRY(check_dtype(name, "state_dtype", args->state_dtype));
    DSC_TRY(check_dtype(name, "copy_dtype", args->copy_dtype));
    if (args->step < 1)
        return fail(DSC_EINVAL, "%s: args.step is %lld, must be at least 1", name, (long long)args->step);
    DSC_TRY(check_field(name, "lr", args->lr, true, 0.0, infinity));
    DSC_TRY(check_field(name, "beta1", args->beta1, has_betas, 0.0, 1.0));
    DSC_TRY(check_field(name, "beta2", args->beta2, has_betas, 0.0, 1.0));
    DSC_TRY(check_field(name, "eps", args->eps, (kind.uses & USES_EPS) != 0, 0.0, infinity));
    DSC_TRY(check_field(name, "weight_decay", args->weight_decay, true, 0.0, infinity));
    DSC_TRY(check_field(name, "momentum", args->momentum, (kind.uses & USES_MOMENTUM) != 0, 0.0, infinity));
    DSC_TRY(check_field(name, "dampening", args->dampening, false, 0.0, 0.0));
    DSC_TRY(check_field(name, "lr_decay", args->lr_decay, (kind.uses & USES_LR_DECAY) != 0, 0.0, infinity));
    DSC_TRY(check_field(name, "min_coeff", args->min_coeff, has_coeffs, 0.0, infinity));
    DSC_TRY(check_field(name, "max_coeff", args->max_coeff, has_coeffs, args->min_coeff, infinity));
    DSC_TRY(check_field(name, "grad_scale", args->grad_scale, false, 0.0, 0.0));
    return check_flags(kind, args);
}

/* The name of the first operand that a tensor lacks; NULL when it has them all. */
static const char *missing_operand(const struct dsc_optim_tensor &tensor, int32_t n_states, unsigned needs)
{
    static const char *const states[DSC_OPTIM_MAX_STATES] = {"state[0]", "state[1]"};

    if (tensor.param == nullptr && (needs & NEEDS_PARAM) != 0)
        return "param";
    if (tensor.grad == nullptr && (needs & NEEDS_GRAD) != 0)
        return "grad";
    if (tensor.copy == nullptr && (needs & NEEDS_COPY) != 0)
        return "copy";
    for (int32_t slot = 0; slot < n_states && (needs & NEEDS_STATE) != 0; slot++)
        if (tensor.state[slot] == nullptr)
            return states[slot];
    return nullptr;
}

dsc_status check_tensors(const kind &kind, const struct dsc_optim_tensor *tensors, int64_t n_tensors, int32_t n_states,
                         unsigned needs)
{
    bool is_first = true;

    if (n_tensors < 0)
        return fail(DSC_EINVAL, "%s: n_tensors is %lld, must not be negative", kind.name, (long long)n_tensors);
    if (tensors == nullptr && n_tensors > 0)
        return fail(DSC_EINVAL, "%s: tensors is NULL for %lld entries", kind.name, (long long)n_tensors);
    for (int64_t i = 0; i < n_tensors; i++) {
        const struct dsc_optim_tensor &tensor = tensors[i];

        if (tensor.n_elems < 0)
            return fail(DSC_EINVAL, "%s: tensors[%lld].n_elems is %lld, must not be negative", kind.name, (long long)i,
                        (long long)tensor.n_elems);
        if (tensor.n_elems == 0)
            continue;

        const char *missing = missing_operand(tensor, n_states, needs);

        if (missing != nullptr)
            return fail(DSC_EINVAL, "%s: tensors[%lld].%s is NULL for %lld elements", kind.name, (long long)i, missing,
                        (long long)tensor.n_elems);
        if (is_first) {
            DSC_TRY(check_pointer((needs & NEEDS_PARAM) != 0 ? tensor.param : tensor.grad, kind.name));
            is_first = false;
        }
    }
    return DSC_OK;
}

dsc_status check_spans(const struct dsc_span *spans, int64_t n_spans, const char *list)
{
    bool is_first = true;

    if (n_spans < 0)
        return fail(DSC_EINVAL, "the number of %s is %lld, must not be negative", list, (long long)n_spans);
    if (spans == nullptr && n_spans > 0)
        return fail(DSC_EINVAL, "%s is NULL for %lld entries", list, (long long)n_spans);
    for (int64_t i = 0; i < n_spans; i++) {
        const struct dsc_span &span = spans[i];

        if (!is_dtype((int)span.dtype))
            return fail(DSC_EINVAL, "%s[%lld].dtype is %d, which is no dsc_dtype", list, (long long)i, (int)span.dtype);
        if (span.n_elems < 0)
            return fail(DSC_EINVAL, "%s[%lld].n_elems is %lld, must not be negative", list, (long long)i,
                        (long long)span.n_elems);
        if (span.data == nullptr && span.n_elems > 0)
            return fail(DSC_EINVAL, "%s[%lld].data is NULL for %lld elements", list, (long long)i,
                        (long long)span.n_elems);
        if (is_first && span.n_elems > 0) {
            DSC_TRY(check_pointer(span.data, list));
            is_first = false;
        }
    }
    return DSC_OK;
}

scalars scalars_of(const struct dsc_optim_args *args)
{
    const bool has_correction = (args->flags & DSC_OPTIM_BIAS_CORRECTION) != 0;
    const double correction1 = has_correction ? 1.0 - std::pow(args->beta1, (double)args->step) : 1.0;
    const double correction2 = has_correction ? 1.0 - std::pow(args->beta2, (double)args->step) : 1.0;
    scalars s;

    s.grad_scale = (float)((args->flags & DSC_OPTIM_MAXIMIZE) != 0 ? -args->grad_scale : args->grad_scale);
    s.lr = (float)args->lr;
    s.weight_decay = (float)args->weight_decay;
    s.decay = (float)(1.0 - args->lr * args->weight_decay);
    s.beta1 = (float)args->beta1;
    s.one_minus_beta1 = (float)(1.0 - args->beta1);
    s.beta2 = (float)args->beta2;
    s.one_minus_beta2 = (float)(1.0 - args->beta2);
    s.eps = (float)args->eps;
    s.corrected_one = (float)(std::sqrt(correction2) / correction1);
    s.corrected_lr = (float)(args->lr * std::sqrt(correction2) / correction1);
    s.corrected_eps = (float)(args->eps * std::sqrt(correction2));
    s.momentum = (float)args->momentum;
    s.one_minus_dampening = (float)(1.0 - args->dampening);
    s.decayed_lr = (float)(args->lr / (1.0 + (double)(args->step - 1) * args->lr_decay));
    s.is_nesterov = (args->flags & DSC_OPTIM_NESTEROV) != 0;
    s.is_first_step = args->step == 1;
    s.has_momentum = args->momentum != 0.0;
    return s;
}

}  // namespace dsc_cuda
