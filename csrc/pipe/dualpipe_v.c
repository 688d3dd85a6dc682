/*
 * DualPipeV: DeepSeek-V3's DualPipe (arXiv 2412.19437) folded into a V, so that weights are stored only once. In the
 * middle, every forward is paired with a backward of another micro-batch, and each hides the messages of the other. Its
 * bubble follows the published formula, (p - 1)(F + B - 3W), if a forward and a backward side by side take as long as
 * one by one.
 */
#include "pipe/pipe.h"

struct state {
    struct pipe_list *list;
    int32_t stages[2]; /* on the way down, on the way up */
    int32_t n_forward[2];
    int32_t n_backward[2];
    /*
     * A FIFO queue of WEIGHT actions that are still to come, each by way and micro-batch. Whole backwards come in
     * between.
     */
    int32_t waiting[2 * DSC_PIPE_MAX_RANKS][2];
    int32_t n_put;
    int32_t n_taken;
};

static void forward(struct state *state, int way)
{
    dsc_pipe_push(state->list, DSC_PIPE_FORWARD, state->stages[way], state->n_forward[way]++);
}

static void backward(struct state *state, int way, bool is_split)
{
    if (is_split) {
        state->waiting[state->n_put][0] = state->stages[way];
        state->waiting[state->n_put++][1] = state->n_backward[way];
    }
    dsc_pipe_push(state->list, is_split ? DSC_PIPE_INPUT : DSC_PIPE_BACKWARD, state->stages[way],
                  state->n_backward[way]++);
}

static void weight(struct state *state)
{
    int32_t *place = state->waiting[state->n_taken++];

    dsc_pipe_push(state->list, DSC_PIPE_WEIGHT, place[0], place[1]);
}

static void fill(const struct dsc_pipe_shape *shape, int32_t rank, struct pipe_list *list)
{
    int32_t after = shape->n_ranks - 1 - rank;
    int32_t middle = shape->n_micro_batches - 2 * shape->n_ranks + rank + 1;
    struct state state = {.list = list, .stages = {rank, 2 * shape->n_ranks - 1 - rank}};

    for (int32_t i = 0; i < 2 * after; i++)
        forward(&state, 0);
    for (int32_t i = 0; i <= rank; i++) {
        forward(&state, 0);
        forward(&state, 1);
    }
    for (int32_t i = 0; i < after; i++) {
        backward(&state, 1, true);
        weight(&state);
        forward(&state, 1);
    }
    for (int32_t i = 0; i < middle; i++) {
        forward(&state, 0);
        backward(&state, 1, false);
        forward(&state, 1);
        backward(&state, 0, false);
    }
    for (int32_t i = 0; i < after; i++) {
        backward(&state, 1, false);
        forward(&state, 1);
        backward(&state, 0, false);
    }

    /* From the middle on, the ranks before this one wait only for gradients of inputs. */
    for (int32_t i = 0; i <= rank; i++) {
        bool is_late = i >= (rank + 1) / 2;

        backward(&state, 1, is_late);
        backward(&state, 0, is_late);
    }
    for (int32_t i = 0; i < after; i++) {
        weight(&state);
        backward(&state, 0, true);
    }
    while (state.n_taken < state.n_put)
        weight(&state);
}

const struct pipe_schedule dsc_pipe_schedule_dualpipe_v = {
    .name = "dualpipe_v",
    .traits = {.min_virtual = 2,
               .max_virtual = 2,
               .min_micro_batches_per_rank = 2,
               .is_v = true,
               .splits_backward = true,
               .has_backward = true},
    .fill = fill,
};
