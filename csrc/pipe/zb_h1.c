/*
 * ZB-H1 (arXiv 2401.10241): 1F1B with delayed gradients of weights, which fill times in which a rank would wait. Rank r
 * delays them by r micro-batches, so that every rank holds as many micro-batches as the first rank of 1F1B.
 */
#include "pipe/pipe.h"

static void fill(const struct dsc_pipe_shape *shape, int32_t rank, struct pipe_list *list)
{
    int32_t next = 0;
    int32_t n_weight = 0;

    while (next < shape->n_ranks - rank && next < shape->n_micro_batches)
        dsc_pipe_push(list, DSC_PIPE_FORWARD, rank, next++);
    for (int32_t k = 0; k < shape->n_micro_batches; k++) {
        dsc_pipe_push(list, DSC_PIPE_INPUT, rank, k);
        if (k >= rank)
            dsc_pipe_push(list, DSC_PIPE_WEIGHT, rank, n_weight++);
        if (next < shape->n_micro_batches)
            dsc_pipe_push(list, DSC_PIPE_FORWARD, rank, next++);
    }
    while (n_weight < shape->n_micro_batches)
        dsc_pipe_push(list, DSC_PIPE_WEIGHT, rank, n_weight++);
}

const struct pipe_schedule dsc_pipe_schedule_zb_h1 = {
    .name = "zb_h1",
    .traits = {.min_virtual = 1, .max_virtual = 1, .splits_backward = true, .has_backward = true},
    .fill = fill,
};
