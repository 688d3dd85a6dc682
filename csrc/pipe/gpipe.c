/* GPipe (arXiv 1811.06965): all forwards, then all backwards. */
#include "pipe/pipe.h"

static void fill(const struct dsc_pipe_shape *shape, int32_t rank, struct pipe_list *list)
{
    for (int32_t k = 0; k < shape->n_micro_batches; k++)
        dsc_pipe_push(list, DSC_PIPE_FORWARD, rank, k);
    for (int32_t k = 0; k < shape->n_micro_batches; k++)
        dsc_pipe_push(list, DSC_PIPE_BACKWARD, rank, k);
}

const struct pipe_schedule dsc_pipe_schedule_gpipe = {
    .name = "gpipe",
    .traits = {.min_virtual = 1, .max_virtual = 1, .has_backward = true},
    .fill = fill,
};
