/*
 * Interleaved 1F1B (arXiv 2104.04473): a rank has several stages, so that the first result comes back sooner. Forwards
 * go in groups of micro-batches: a group goes through the rank's first stage, then its second, and so on; backwards
 * take the same groups through the stages in reverse.
 *
 * Megatron requires a multiple of n_ranks micro-batches. Here any number is divided into groups that are as equal as
 * possible and have at least n_ranks micro-batches each, if there are so many. With smaller groups in between, the
 * lists of ranks would wait for one another for ever.
 */
#include "pipe/pipe.h"

/* The stage and micro-batch at one position in the order of forwards or of backwards. */
struct place {
    int32_t first; /* of the group */
    int32_t group;
    int32_t n_in_group;
    int32_t chunk;
    int32_t in_group;
};

/* Smaller groups come first. */
static int32_t group_size(const struct dsc_pipe_shape *shape, int32_t group)
{
    int32_t n = shape->n_micro_batches / shape->n_ranks;

    n = n > 0 ? n : 1;
    return shape->n_micro_batches / n + (group >= n - shape->n_micro_batches % n);
}

static void advance(const struct dsc_pipe_shape *shape, struct place *place)
{
    if (++place->in_group < place->n_in_group)
        return;
    place->in_group = 0;
    if (++place->chunk < shape->n_virtual)
        return;
    place->chunk = 0;
    place->first += place->n_in_group;
    place->group++;
    place->n_in_group = group_size(shape, place->group);
}

static void fill(const struct dsc_pipe_shape *shape, int32_t rank, struct pipe_list *list)
{
    int64_t n = (int64_t)shape->n_micro_batches * shape->n_virtual;
    int32_t n_groups = shape->n_micro_batches / shape->n_ranks;
    int32_t largest = group_size(shape, n_groups > 0 ? n_groups - 1 : 0);
    int64_t ahead = 2 * (int64_t)(shape->n_ranks - 1 - rank) + (int64_t)(shape->n_virtual - 1) * largest;
    struct place forward = {.n_in_group = group_size(shape, 0)};
    struct place backward = forward;
    int64_t i_forward = 0;

    for (int64_t i = -ahead; i < n; i++) {
        if (i_forward < n) {
            dsc_pipe_push(list, DSC_PIPE_FORWARD, forward.chunk * shape->n_ranks + rank,
                          forward.first + forward.in_group);
            advance(shape, &forward);
            i_forward++;
        }
        if (i < 0)
            continue;
        dsc_pipe_push(list, DSC_PIPE_BACKWARD, (shape->n_virtual - 1 - backward.chunk) * shape->n_ranks + rank,
                      backward.first + backward.in_group);
        advance(shape, &backward);
    }
}

const struct pipe_schedule dsc_pipe_schedule_interleaved = {
    .name = "interleaved",
    .traits = {.min_virtual = 1, .max_virtual = DSC_PIPE_MAX_VIRTUAL, .has_backward = true},
    .fill = fill,
};
