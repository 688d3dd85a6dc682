/*
 * The optimizer step, one pass over memory: unscale, clip factor, decay, moments, update, 16-bit copy.
 *
 * A step works on a list of tensors (or slices of tensors) that share one set of hyper-parameters. Arithmetic is f32
 * for every storage type; conversion is round-to-nearest-even. Results have the same bits for any thread count and any
 * instruction set.
 */
#ifndef DSC_OPTIM_H
#define DSC_OPTIM_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DSC_OPTIM_MAX_STATES 2

/* One entry of the registry (optim/optimizers.inc). Static storage. */
struct dsc_optim_kind;

/* Finds an optimizer by name: "adam" "adamw" "lamb" "lion" "adagrad" "sgd". DSC_ENOTFOUND lists the names. */
DSC_API dsc_status dsc_optim_find(const char *name, const struct dsc_optim_kind **out_kind);

/* Walks the registry: the i-th entry, NULL past the end. */
DSC_API const struct dsc_optim_kind *dsc_optim_at(int32_t i);
DSC_API const char *dsc_optim_name(const struct dsc_optim_kind *kind);
DSC_API int32_t dsc_optim_n_states(const struct dsc_optim_kind *kind);
/*
 * True for an optimizer that scales each tensor's update by norms (lamb). dsc_optim_step needs whole tensors of it; for
 * shards use dsc_optim_norms and dsc_optim_apply.
 */
DSC_API bool dsc_optim_needs_norms(const struct dsc_optim_kind *kind);

/*
 * States of 8 bits (DSC_OPTIM_STATE_Q8): a code an element, and one f32 scale for each block of DSC_Q8_BLOCK_ELEMS
 * elements, counted from the tensor's start; the last block may be shorter. With s = the block's scale, its largest
 * magnitude, a code c stands for
 *
 *     signed, int8 in [-127, 127]:   sign(c) * (c / 127)^4 * s     (first moments)
 *     unsigned, uint8 in [0, 255]:   (c / 255)^8 * s               (second moments)
 *
 * and x becomes the code nearest to 127 (|x| / s)^(1/4), or to 255 (x / s)^(1/8); halves are rounded up. An unsigned x
 * > 0 never becomes 0. Zeros stay zeros, and a block of zeros has scale 0. A signed block below 2^-98 becomes zeros; an
 * unsigned block other than zeros has a scale of at least 2^-62. A block that holds NaN or inf has scale NaN, and reads
 * as NaN.
 *
 * Why: a scale for each block, and codes that lie closer together towards 0, are the ideas of Dettmers et al., arXiv
 * 2110.02861, section 2. Their codes are a table of seven decades. A power needs no table and suits an update m /
 * sqrt(v): with these exponents m and sqrt(v) have the same codes, down to 4e-9 and 2e-10 of the block's largest, and v
 * is never 0 unless m is 0. With linear codes (0 below s / 510), and with a table too, v can be 0 while m is not, and
 * the update explodes. Squares and fourth powers were as good while gradients of a block lay within two decades, and
 * lost 1 to 2 % of the loss at four. A block has 256 elements because scales are then 1.6 % of the codes, and an
 * outlier costs only few elements their precision.
 */
#define DSC_Q8_BLOCK_ELEMS 256

typedef enum dsc_q8_code { DSC_Q8_NONE = 0, DSC_Q8_SIGNED = 1, DSC_Q8_UNSIGNED = 2 } dsc_q8_code;

/* Number of scales of a tensor of n_elems >= 0 elements. */
DSC_API int64_t dsc_q8_n_scales(int64_t n_elems);

/* The codes of a state slot; DSC_Q8_NONE for an optimizer whose states cannot be quantised, and past its slots. */
DSC_API dsc_q8_code dsc_optim_q8_code(const struct dsc_optim_kind *kind, int32_t slot);

/*
 * dsc_q8_quantize converts n_elems f32 values to codes and scales; it starts at the first element of the tensor or of a
 * block. dsc_q8_dequantize converts the elements [begin, begin + n_elems) of a tensor back to f32; codes and scales are
 * those for the whole tensor. Dequantized values give the same codes and scales again, to the bit. par is borrowed, may
 * be NULL. DSC_EINVAL: no code, a NULL buffer for elements, a negative count, a value below 0 for unsigned codes;
 * nothing is written then.
 */
DSC_API dsc_status dsc_q8_quantize(dsc_q8_code code, int64_t n_elems, const void *values, void *codes, void *scales,
                                   const struct dsc_par *par);
DSC_API dsc_status dsc_q8_dequantize(dsc_q8_code code, const void *codes, const void *scales, int64_t begin,
                                     int64_t n_elems, void *out_values, const struct dsc_par *par);

/* Borrowed for the call. Buffers may have any alignment, and may not overlap one another. */
struct dsc_optim_tensor {
    int64_t n_elems;                         /* >= 0 */
    void *param;                             /* param_dtype: the master weights */
    const void *grad;                        /* grad_dtype */
    void *state[DSC_OPTIM_MAX_STATES];       /* state_dtype, or codes; unused ones NULL */
    void *state_scale[DSC_OPTIM_MAX_STATES]; /* f32: the states' scales, only with DSC_OPTIM_STATE_Q8 */
    void *copy;                              /* copy_dtype: receives the updated weights; NULL for none */
};

/* Bits of dsc_optim_args.flags. */
#define DSC_OPTIM_BIAS_CORRECTION (1u << 0) /* adam adamw lamb */
#define DSC_OPTIM_NESTEROV (1u << 1)        /* sgd */
#define DSC_OPTIM_MAXIMIZE (1u << 2)        /* all: the sign of the gradient is inverted */
#define DSC_OPTIM_STATE_Q8 \
    (1u << 3) /* adam adamw lion sgd: states are codes, state_dtype is ignored; DSC_ENOTSUP for other kinds */

struct dsc_optim_args {
    uint32_t size; /* sizeof(struct dsc_optim_args), set by DSC_OPTIM_ARGS_INIT */
    uint32_t flags;
    dsc_dtype param_dtype;
    dsc_dtype grad_dtype;
    dsc_dtype state_dtype;
    dsc_dtype copy_dtype;
    int64_t step; /* 1 for the first step: Adam's t */
    double lr;
    double beta1; /* adam, lamb, lion */
    double beta2;
    double eps;          /* adam, lamb, adagrad */
    double weight_decay; /* adam: L2 into the gradient; adamw, lion, lamb: decoupled; sgd, adagrad: L2 */
    double momentum;     /* sgd; 0 means no momentum, and state[0] may be NULL */
    double dampening;    /* sgd */
    double lr_decay;     /* adagrad: lr / (1 + (step - 1) * lr_decay) */
    double min_coeff;    /* lamb: bounds of the trust ratio */
    double max_coeff;
    double grad_scale; /* gradients are multiplied by this as they are read: 1 / loss scale, averaging and clip factor
                          in one */
};

#define DSC_OPTIM_ARGS_INIT                                                                                    \
    {                                                                                                          \
        sizeof(struct dsc_optim_args), DSC_OPTIM_BIAS_CORRECTION, DSC_DTYPE_F32, DSC_DTYPE_F32, DSC_DTYPE_F32, \
            DSC_DTYPE_F32, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, 0.0, 0.0, 0.0, 0.01, 10.0, 1.0                      \
    }

/*
 * One step over tensors. par is borrowed, may be NULL. All arguments are checked before anything is written:
 * DSC_EINVAL names the field or the tensor; then nothing has changed. DSC_EOVERFLOW: the elements do not add up in
 * int64_t.
 *
 * Fields that a kind does not use need only be finite. sgd's first step (step == 1) sets its state to the gradient and
 * does not read it.
 */
DSC_API dsc_status dsc_optim_step(const struct dsc_optim_kind *kind, const struct dsc_optim_args *args,
                                  const struct dsc_optim_tensor *tensors, int64_t n_tensors, const struct dsc_par *par);

/*
 * The two halves of a step that needs norms, for tensors that are cut over ranks. dsc_optim_norms updates the moments
 * and writes out_sumsq[2 * i] = sum of param^2 and out_sumsq[2 * i + 1] = sum of update^2 of tensor i (f64). The caller
 * sums these over the ranks that hold pieces of the same parameter. dsc_optim_apply applies lr * ratio[i] * update,
 * where ratio is dsc_optim_trust_ratio of the summed pair. DSC_ENOTSUP for a kind without norms.
 */
DSC_API dsc_status dsc_optim_norms(const struct dsc_optim_kind *kind, const struct dsc_optim_args *args,
                                   const struct dsc_optim_tensor *tensors, int64_t n_tensors, const struct dsc_par *par,
                                   double *out_sumsq);
DSC_API double dsc_optim_trust_ratio(const struct dsc_optim_args *args, double param_sumsq, double update_sumsq);
DSC_API dsc_status dsc_optim_apply(const struct dsc_optim_kind *kind, const struct dsc_optim_args *args,
                                   const struct dsc_optim_tensor *tensors, int64_t n_tensors, const struct dsc_par *par,
                                   const double *ratios);

/*
 * Muon's elementwise halves (Jordan 2024); the orthogonalisation between them is a few matrix products and belongs to
 * the caller. dsc_muon_momentum, with mu = args->momentum: momentum = mu * momentum + grad, then update = nesterov ?
 * grad + mu * momentum : momentum. The update is written to tensors[i].copy, in copy_dtype. param is not read.
 * dsc_muon_apply: param = param * (1 - lr * weight_decay) - lr * update. The update is read from tensors[i].grad, in
 * grad_dtype.
 */
DSC_API dsc_status dsc_muon_momentum(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors,
                                     int64_t n_tensors, const struct dsc_par *par);
DSC_API dsc_status dsc_muon_apply(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors,
                                  int64_t n_tensors, const struct dsc_par *par);

#ifdef __cplusplus
}
#endif
#endif
