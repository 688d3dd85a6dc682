/*
 * ZB-V (arXiv 2401.10241, 2405.15362): two stages a rank in a V, so that the first and the last stage lie on the same
 * rank, and backward begins as soon as a micro-batch has gone down and up. With F = I = W no rank waits between its
 * first and its last action, and no rank holds more than the first rank of 1F1B.
 */
#include "pipe/pipe.h"

/* A rank's progress on its two stages: 0 on the way down, 1 on the way up. */
struct state {
    struct pipe_list *list;
    int32_t stages[2];
    int32_t n_micro_batches;
    int32_t n_forward[2];
    int32_t n_input[2];
    int32_t n_weight[2];
};

/*
 * Each of these functions returns whether it had something to do: in a run with few micro-batches there may be nothing.
 */
static bool forward(struct state *state, int way)
{
    if (state->n_forward[way] == (way == 0 ? state->n_micro_batches : state->n_forward[0]))
        return false;
    dsc_pipe_push(state->list, DSC_PIPE_FORWARD, state->stages[way], state->n_forward[way]++);
    return true;
}

static bool input(struct state *state, int way)
{
    if (state->n_input[way] == state->n_forward[way])
        return false;
    dsc_pipe_push(state->list, DSC_PIPE_INPUT, state->stages[way], state->n_input[way]++);
    return true;
}

static bool weight(struct state *state, int way)
{
    if (state->n_weight[way] == state->n_input[way])
        return false;
    dsc_pipe_push(state->list, DSC_PIPE_WEIGHT, state->stages[way], state->n_weight[way]++);
    return true;
}

static void fill(const struct dsc_pipe_shape *shape, int32_t rank, struct pipe_list *list)
{
    int32_t m = shape->n_micro_batches;
    int32_t p = shape->n_ranks;
    struct state state = {.list = list, .stages = {rank, 2 * p - 1 - rank}, .n_micro_batches = m};

    /* Forwards on the way down until the first micro-batch comes back; then one down for each one up. */
    for (int32_t i = 0; i < 2 * (p - rank) - 1; i++)
        forward(&state, 0);
    for (int32_t i = 0; i < rank; i++) {
        forward(&state, 1);
        forward(&state, 0);
    }
    for (int32_t i = 0; i < p - rank; i++) {
        forward(&state, 1);
        input(&state, 1);
        weight(&state, 1);
    }
    while (state.n_forward[1] < m)
        for (int way = 0; way < 2; way++) {
            forward(&state, way);
            input(&state, way);
            weight(&state, way);
        }

    /* Gradients of inputs first, since other ranks wait for them; gradients of weights fill the rest. */
    for (int32_t i = 0; i < rank; i++) {
        input(&state, 0);
        input(&state, 1);
    }
    for (int32_t i = 0; i < p - rank; i++) {
        input(&state, 0);
        if (!weight(&state, 0))
            weight(&state, 1);
    }
    while (state.n_input[0] < m || state.n_input[1] < m) {
        input(&state, 0);
        input(&state, 1);
    }
    for (int way = 0; way < 2; way++)
        while (weight(&state, way))
            continue;
}

const struct pipe_schedule dsc_pipe_schedule_zb_v = {
    .name = "zb_v",
    .traits = {.min_virtual = 2, .max_virtual = 2, .is_v = true, .splits_backward = true, .has_backward = true},
    .fill = fill,
};
