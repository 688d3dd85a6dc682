/* Forwards alone, for any number of stages a rank: every stage takes a micro-batch before the next one comes. */
#include "pipe/pipe.h"

static void fill(const struct dsc_pipe_shape *shape, int32_t rank, struct pipe_list *list)
{
    /* As many micro-batches as ranks go through all stages before the next ones begin, so that no rank waits. */
    for (int32_t first = 0; first < shape->n_micro_batches; first += shape->n_ranks) {
        int32_t last = first + shape->n_ranks;

        if (last > shape->n_micro_batches)
            last = shape->n_micro_batches;
        for (int32_t chunk = 0; chunk < shape->n_virtual; chunk++)
            for (int32_t k = first; k < last; k++)
                dsc_pipe_push(list, DSC_PIPE_FORWARD, chunk * shape->n_ranks + rank, k);
    }
}

const struct pipe_schedule dsc_pipe_schedule_inference = {
    .name = "inference",
    .traits = {.min_virtual = 1, .max_virtual = DSC_PIPE_MAX_VIRTUAL},
    .fill = fill,
};
