/* Compiled once per instruction set: this variant's table of optimizer loops. */
#include "optim/loops.h"

const struct dsc_optim_table DSC_K(optim_table) = {
    .kinds =
        {
#define DSC_OPTIMIZER(name, n_states, uses, q8) [DSC_OPTIM_ID_##name] = {.step = DSC_K(name##_step)},
#define DSC_OPTIMIZER_NORMS(name, n_states, uses, q8) \
    [DSC_OPTIM_ID_##                                  \
        name] = {.moments = DSC_K(name##_moments), .norms = DSC_K(name##_norms), .apply = DSC_K(name##_apply)},
#include "optim/optimizers.inc"
#undef DSC_OPTIMIZER
#undef DSC_OPTIMIZER_NORMS
        },
    .muon_momentum = DSC_K(muon_momentum),
    .muon_apply = DSC_K(muon_apply),
};
