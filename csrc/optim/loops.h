/*
 * An optimizer's loops: f32 in, f32 out, over one block that lies in the first-level cache. Everything else (dtypes,
 * tensors, threads, scalars that depend on the step) is done once, in optim.c.
 */
#ifndef DSC_OPTIM_LOOPS_H
#define DSC_OPTIM_LOOPS_H

#include "cpu/table.h"
#include "dsc/optim.h"

/*
 * The factors of the loops, computed in double from dsc_optim_args and rounded once, as torch does with its Python
 * scalars.
 */
struct dsc_optim_scalars {
    float grad_scale; /* negative under DSC_OPTIM_MAXIMIZE */
    float lr;
    float weight_decay;
    float decay; /* 1 - lr * weight_decay */
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float eps;
    /* With c1 = 1 - beta1^step and c2 = 1 - beta2^step, both 1 without DSC_OPTIM_BIAS_CORRECTION: */
    float corrected_one; /* sqrt(c2) / c1 */
    float corrected_lr;  /* lr * sqrt(c2) / c1 */
    float corrected_eps; /* eps * sqrt(c2) */
    float momentum;
    float one_minus_dampening;
    float decayed_lr; /* lr / (1 + (step - 1) * lr_decay) */
    bool is_nesterov;
    bool is_first_step;
    bool has_momentum;
};

/*
 * The operands of a loop, n elements each. Operands that a pass does not list (see optim.c) are NULL. Operands do not
 * overlap.
 */
struct dsc_optim_block {
    dsc_f32 *param;
    const dsc_f32 *grad; /* as stored by the caller; the loop multiplies it by grad_scale */
    dsc_f32 *state[DSC_OPTIM_MAX_STATES];
    float ratio;   /* apply: the tensor's trust ratio */
    double *sumsq; /* norms: [0] += sum of param^2, [1] += sum of update^2 */
};

typedef void dsc_optim_loop(const struct dsc_optim_scalars *scalars, int64_t n, const struct dsc_optim_block *block);

/* Either step is set, or the three other loops. */
struct dsc_optim_loops {
    dsc_optim_loop *step;
    dsc_optim_loop *moments;
    dsc_optim_loop *norms;
    dsc_optim_loop *apply;
};

/* Indices into the tables below. */
enum dsc_optim_id {
#define DSC_OPTIMIZER(name, n_states, uses, q8) DSC_OPTIM_ID_##name,
#define DSC_OPTIMIZER_NORMS(name, n_states, uses, q8) DSC_OPTIM_ID_##name,
#include "optim/optimizers.inc"
#undef DSC_OPTIMIZER
#undef DSC_OPTIMIZER_NORMS
    DSC_OPTIM_N_KINDS
};

struct dsc_optim_table {
    struct dsc_optim_loops kinds[DSC_OPTIM_N_KINDS];
    dsc_optim_loop *muon_momentum; /* param receives the update */
    dsc_optim_loop *muon_apply;    /* grad is the orthogonalised update */
};

#ifdef DSC_ISA /* the variant that is being compiled */
#define DSC_OPTIMIZER(name, n_states, uses, q8) dsc_optim_loop DSC_K(name##_step);
#define DSC_OPTIMIZER_NORMS(name, n_states, uses, q8) \
    dsc_optim_loop DSC_K(name##_moments), DSC_K(name##_norms), DSC_K(name##_apply);
#include "optim/optimizers.inc"
#undef DSC_OPTIMIZER
#undef DSC_OPTIMIZER_NORMS
dsc_optim_loop DSC_K(muon_momentum), DSC_K(muon_apply);
#endif

#define DSC_DECLARE_TABLE(isa, is_runnable) extern const struct dsc_optim_table DSC_K_OF(optim_table, isa);
DSC_ISA_MAP(DSC_DECLARE_TABLE)
#undef DSC_DECLARE_TABLE

#endif
