/* Forwards only: for a loop with any number of stages a rank, and for a V with two. */
#include "pipe/pipe.h"

/* Groups of n_ranks micro-batches go through all stages before the next group begins, so that no rank waits. */
static void fill(const struct dsc_pipe_shape *shape, int32_t rank, struct pipe_list *list, bool is_v)
{
    for (int32_t first = 0; first < shape->n_micro_batches; first += shape->n_ranks) {
        int32_t last = first + shape->n_ranks;

        if (last > shape->n_micro_batches)
            last = shape->n_micro_batches;
        for (int32_t chunk = 0; chunk < shape->n_virtual; chunk++)
            for (int32_t k = first; k < last; k++)
                dsc_pipe_push(list, DSC_PIPE_FORWARD,
                              is_v && chunk > 0 ? 2 * shape->n_ranks - 1 - rank : chunk * shape->n_ranks + rank, k);
    }
}

static void fill_loop(const struct dsc_pipe_shape *shape, int32_t rank, struct pipe_list *list)
{
    fill(shape, rank, list, false);
}

static void fill_v(const struct dsc_pipe_shape *shape, int32_t rank, struct pipe_list *list)
{
    fill(shape, rank, list, true);
}

const struct pipe_schedule dsc_pipe_schedule_inference = {
    .name = "inference",
    .traits = {.min_virtual = 1, .max_virtual = DSC_PIPE_MAX_VIRTUAL},
    .fill = fill_loop,
};

const struct pipe_schedule dsc_pipe_schedule_inference_v = {
    .name = "inference_v",
    .traits = {.min_virtual = 2, .max_virtual = 2, .is_v = true},
    .fill = fill_v,
};
