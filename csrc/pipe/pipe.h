/* Shared by the files of this folder: a schedule as a table, and lists that grow up to a capacity. */
#ifndef DSC_PIPE_PIPE_H
#define DSC_PIPE_PIPE_H

#include "dsc/pipe.h"

/* A list of actions. Beyond its capacity, actions are counted but not stored. */
struct pipe_list {
    struct dsc_pipe_action *actions;
    int64_t capacity;
    int64_t n;
};

void dsc_pipe_push(struct pipe_list *list, enum dsc_pipe_kind kind, int32_t stage, int32_t micro_batch);

/*
 * A schedule is a file of this folder and a line of schedules.inc. fill appends the computations of rank; shape has
 * been checked.
 */
struct pipe_schedule {
    const char *name;
    struct dsc_pipe_traits traits;
    void (*fill)(const struct dsc_pipe_shape *shape, int32_t rank, struct pipe_list *list);
};

/* A table that owns its arrays. */
struct pipe_own_table {
    struct dsc_pipe_table table;
    struct dsc_pipe_action *actions;
    int64_t *begins;
    int32_t *rank_of;
};

/* Makes the lists of all ranks, without sends and receives. The caller must clear the table, also after a failure. */
dsc_status dsc_pipe_make_table(const char *schedule, const struct dsc_pipe_shape *shape, struct pipe_own_table *out);
void dsc_pipe_clear_table(struct pipe_own_table *own);

/* DSC_EINVAL names the first entry that is not an action on a stage of its rank. */
dsc_status dsc_pipe_check_table(const struct dsc_pipe_table *table);

/* DSC_EINVAL names the first action of a rank that breaks a rule for gathers and releases. table has been checked. */
dsc_status dsc_pipe_check_gathers(const struct dsc_pipe_table *table);

/* The index in table->units of a stage's first unit. For stage n_stages it is n_units. */
static inline int32_t pipe_first_unit(const struct dsc_pipe_table *table, int32_t stage)
{
    int32_t low = 0;
    int32_t high = table->n_units;

    while (low < high) {
        int32_t middle = low + (high - low) / 2;

        if (table->units[middle].stage < stage)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/*
 * Whether an action of this kind computes a result, and whether it moves one: an output (F) or a gradient of an input.
 */
static inline bool pipe_computes(int32_t kind)
{
    return kind <= DSC_PIPE_WEIGHT;
}

/* Whether an action of this kind acts on a unit of weights. */
static inline bool pipe_has_unit(int32_t kind)
{
    return kind == DSC_PIPE_GATHER || kind == DSC_PIPE_RELEASE;
}

static inline bool pipe_sends(int32_t kind)
{
    return kind == DSC_PIPE_SEND_F || kind == DSC_PIPE_SEND_B;
}

/* BACKWARD and INPUT make the gradient that the stage before needs. */
static inline bool pipe_makes_gradient(int32_t kind)
{
    return kind == DSC_PIPE_BACKWARD || kind == DSC_PIPE_INPUT;
}

/* The stage that gets the result of this action: stage + 1, stage - 1, or -1 for none. */
static inline int32_t pipe_next_stage(const struct dsc_pipe_table *table, const struct dsc_pipe_action *action)
{
    if (action->kind == DSC_PIPE_FORWARD)
        return action->stage + 1 < table->n_stages ? action->stage + 1 : -1;
    return pipe_makes_gradient(action->kind) ? action->stage - 1 : -1;
}

#endif
