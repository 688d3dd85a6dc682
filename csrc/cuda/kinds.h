/* The optimizers, their scalars, and the operators of this library's source files. */
#ifndef DSC_CUDA_KINDS_H
#define DSC_CUDA_KINDS_H

#include "dsc/moe.h"
#include "dsc/nn.h"
#include "dsc/optim.h"
#include "dsc/tp.h"

namespace dsc_cuda {

/* The factors of the formulas: csrc/optim/loops.h, same names, same rounding. */
struct scalars {
    float grad_scale;
    float lr;
    float weight_decay;
    float decay;
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float eps;
    float corrected_one;
    float corrected_lr;
    float corrected_eps;
    float momentum;
    float one_minus_dampening;
    float decayed_lr;
    bool is_nesterov;
    bool is_first_step;
    bool has_momentum;
};

scalars scalars_of(const struct dsc_optim_args *args);

/* The dsc_optim_args that an optimizer uses beyond lr, weight_decay and grad_scale. */
constexpr unsigned USES_BETAS = 1u << 0;
constexpr unsigned USES_EPS = 1u << 1;
constexpr unsigned USES_MOMENTUM = 1u << 2;
constexpr unsigned USES_LR_DECAY = 1u << 3;
constexpr unsigned USES_COEFFS = 1u << 4;

/* The operands of a tensor that a call needs. */
constexpr unsigned NEEDS_PARAM = 1u << 0;
constexpr unsigned NEEDS_GRAD = 1u << 1;
constexpr unsigned NEEDS_STATE = 1u << 2;
constexpr unsigned NEEDS_COPY = 1u << 3;

/* A launcher: its arguments have been checked. */
typedef dsc_status step_launcher(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors,
                                 int64_t n_tensors, void *stream);

struct kind {
    const char *name;
    int32_t n_states;
    unsigned uses;
    step_launcher *step; /* NULL for a kind with norms */
};

/* The checks of dsc_optim_step, with its sentences. */
dsc_status check_args(const kind &kind, const struct dsc_optim_args *args);
dsc_status check_tensors(const kind &kind, const struct dsc_optim_tensor *tensors, int64_t n_tensors, int32_t n_states,
                         unsigned needs);

step_launcher adam_step, adamw_step, lion_step, adagrad_step, sgd_step, muon_momentum, muon_apply;

dsc_status lamb_step(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                     double *scratch, void *stream);
dsc_status lamb_norms(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                      double *out_sumsq, double *scratch, void *stream);
dsc_status lamb_apply(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                      const double *ratios, void *stream);

dsc_status flat_sumsq(const struct dsc_span *spans, int64_t n_spans, double *out, double *scratch, void *stream);
dsc_status flat_reduce(const struct dsc_span *srcs, int64_t n_srcs, float scale, bool accumulate,
                       const struct dsc_span *acc, double *out, double *scratch, void *stream);
dsc_status flat_scale(const struct dsc_span *spans, int64_t n_spans, float scale, void *stream);
dsc_status flat_cast(const struct dsc_span *src, const struct dsc_span *dst, void *stream);

/* Launchers of the operators on rows: arguments have been checked, but for where the first operand lies. */
#define DSC_NN_CALL(name) dsc_status nn_##name(const struct dsc_nn_##name *call, void *stream);
#include "dsc/nn_calls.inc"
#undef DSC_NN_CALL
dsc_status cross_entropy_rows(const void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows,
                              int64_t vocab_size, struct dsc_tp_row *out_rows, void *stream);
dsc_status cross_entropy_grad(void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows, int64_t vocab_size,
                              const float *log_sum, const float *scale, double smoothing, int64_t full_vocab_size,
                              void *stream);
#define DSC_MOE_CALL(name) dsc_status moe_##name(const struct dsc_moe_##name *call, void *stream);
#include "dsc/moe_calls.inc"
#undef DSC_MOE_CALL
dsc_status moe_invert(const int64_t *order, int64_t n, int64_t *out_inverse, void *stream);
#define DSC_QUANT_CALL(name) dsc_status quant_##name(const struct dsc_quant *call, double *scratch, void *stream);
#include "dsc/quant_calls.inc"
#undef DSC_QUANT_CALL

}  // namespace dsc_cuda

#endif
