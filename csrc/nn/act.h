/* The activations of dsc/activations.inc as loops of the table in use. */
#ifndef DSC_NN_ACT_H
#define DSC_NN_ACT_H

#include "dsc/nn.h"
#include "nn/table.h"

struct dsc_act_loops {
    void (*act)(int64_t n, dsc_dtype dtype, const void *x, const void *bias, void *y);
    void (*grad)(int64_t n, dsc_dtype dtype, const void *x, const void *bias, const void *dy, void *dx, float *sum);
    void (*gated)(int64_t n, dsc_dtype dtype, const void *gate, const void *up, void *y);
    void (*gated_grad)(int64_t n, dsc_dtype dtype, const void *gate, const void *up, const void *dy, void *dgate,
                       void *dup);
};

/* DSC_EINVAL for a number that is not an activation. */
dsc_status dsc_act_loops_of(dsc_nn_act act, struct dsc_act_loops *out_loops);

#endif
