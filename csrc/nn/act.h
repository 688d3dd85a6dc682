/* The activations of dsc/activations.inc as loops of the table in use. */
#ifndef DSC_NN_ACT_H
#define DSC_NN_ACT_H

#include "dsc/nn.h"
#include "nn/table.h"

struct dsc_act_loops {
    void (*act)(int64_t n, const dsc_f32 *x, dsc_f32 *y);
    void (*grad)(int64_t n, const dsc_f32 *x, const dsc_f32 *dy, dsc_f32 *dx);
    void (*gated)(int64_t n, const dsc_f32 *gate, const dsc_f32 *up, dsc_f32 *y);
    void (*gated_grad)(int64_t n, const dsc_f32 *gate, const dsc_f32 *up, const dsc_f32 *dy, dsc_f32 *dgate,
                       dsc_f32 *dup);
};

/* DSC_EINVAL for a number that is no activation's. */
dsc_status dsc_act_loops_of(dsc_nn_act act, struct dsc_act_loops *out_loops);

#endif
