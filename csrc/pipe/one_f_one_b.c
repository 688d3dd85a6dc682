/*
 * 1F1B (PipeDream-Flush, arXiv 2006.09503): a rank first runs one forward for each stage that follows it, and then
 * alternates one forward and one backward. It holds one micro-batch more than the number of following stages.
 */
#include "pipe/pipe.h"

static void fill(const struct dsc_pipe_shape *shape, int32_t rank, struct pipe_list *list)
{
    int32_t ahead = shape->n_ranks - 1 - rank;
    int32_t next = 0;

    while (next < ahead && next < shape->n_micro_batches)
        dsc_pipe_push(list, DSC_PIPE_FORWARD, rank, next++);
    for (int32_t k = 0; k < shape->n_micro_batches; k++) {
        if (next < shape->n_micro_batches)
            dsc_pipe_push(list, DSC_PIPE_FORWARD, rank, next++);
        dsc_pipe_push(list, DSC_PIPE_BACKWARD, rank, k);
    }
}

const struct pipe_schedule dsc_pipe_schedule_one_f_one_b = {
    .name = "1f1b",
    .traits = {.min_virtual = 1, .max_virtual = 1, .has_backward = true},
    .fill = fill,
};
