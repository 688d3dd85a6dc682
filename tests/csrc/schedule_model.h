/*
 * A naive model of infer/schedule.c, for its test and its fuzz target: it follows the rules of dsc/schedule.h one after
 * the other, and counts everything anew.
 */
#ifndef DSC_TEST_SCHEDULE_MODEL_H
#define DSC_TEST_SCHEDULE_MODEL_H

#include "dsc/infer.h"
#include "dsc/types.h"

#include <string.h>

#define MODEL_MAX_LIVE 64

struct model_request {
    int32_t number;
    bool is_running;
    int64_t n_known;
    int64_t n_computed;
    int64_t n_found;
    int64_t most;
    int64_t n_reserved; /* in tokens: it holds their blocks */
    int64_t n_planned;
    int64_t deadline; /* of the caller */
    int32_t sequence; /* likewise */
};

struct schedule_model {
    int32_t n_blocks;
    int32_t most_rows;
    struct model_request requests[MODEL_MAX_LIVE]; /* by arrival */
    int32_t n;
    int64_t n_put_back;
};

static inline int64_t model_blocks_of(int64_t n_tokens)
{
    return (n_tokens + DSC_KV_TOKENS - 1) / DSC_KV_TOKENS;
}

static inline int64_t model_smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t model_held(const struct model_request *request)
{
    return request->is_running ? model_blocks_of(request->n_reserved) : 0;
}

static inline int64_t model_n_held(const struct schedule_model *model)
{
    int64_t n_held = 0;

    for (int32_t i = 0; i < model->n; i++)
        n_held += model_held(&model->requests[i]);
    return n_held;
}

static inline int32_t model_n_running(const struct schedule_model *model)
{
    int32_t n = 0;

    for (int32_t i = 0; i < model->n; i++)
        n += model->requests[i].is_running;
    return n;
}

/* Whether request i may hold blocks for so many tokens: all blocks that are held stay held, and the first request's are
 * reserved to its end. */
static inline bool model_may_hold(const struct schedule_model *model, int32_t i, int64_t n_tokens)
{
    const struct model_request *first = &model->requests[0];
    int64_t n_used = model_n_held(model) + model_blocks_of(n_tokens) - model_held(&model->requests[i]);

    if (i > 0)
        n_used += model_blocks_of(first->most - 1) - model_held(first);
    return n_used <= model->n_blocks;
}

/* Running requests that do not hold blocks to their ends, without the first one. */
static inline int64_t model_n_growing(const struct schedule_model *model)
{
    int64_t n = 0;

    for (int32_t i = 1; i < model->n; i++)
        n += model->requests[i].is_running &&
             model_held(&model->requests[i]) < model_blocks_of(model->requests[i].most - 1);
    return n;
}

/* The youngest running request goes back. Returns its number. */
static inline int32_t model_put_back(struct schedule_model *model)
{
    int32_t youngest = model->n - 1;

    while (!model->requests[youngest].is_running)
        youngest--;
    model->requests[youngest].is_running = false;
    model->requests[youngest].n_computed = model->requests[youngest].n_found = 0;
    model->n_put_back++;
    return model->requests[youngest].number;
}

/* Plans n_planned of each request. Returns how many requests went back, the youngest first. */
static inline int32_t model_plan(struct schedule_model *model, int64_t budget, int32_t *put_back)
{
    int32_t n_put_back = 0;

    for (int32_t i = 0; i < model->n; i++)
        model->requests[i].n_planned = 0;
    for (int pass = 0; pass < 3; pass++) { /* decoding requests, begun prompts, waiting requests */
        for (int32_t i = 0; i < model->n && budget > 0; i++) {
            struct model_request *request = &model->requests[i];
            bool is_decoding = request->n_computed > 0 && request->n_known - request->n_computed == 1;
            int64_t n_found = request->n_computed == 0 ? request->n_found : 0;
            int64_t n_paid = model_smaller(request->n_known - request->n_computed - n_found, budget);

            if (request->n_planned > 0 || (pass == 0 && !is_decoding) || (pass < 2 && !request->is_running))
                continue;
            if (pass == 0) {
                while (request->is_running && model_blocks_of(request->n_known) > model_held(request) &&
                       !model_may_hold(model, i, request->n_known))
                    put_back[n_put_back++] = model_put_back(model);
                if (!request->is_running)
                    continue;
                if (request->n_known > request->n_reserved)
                    request->n_reserved = request->n_known;
            }
            if (pass == 2) {
                int64_t n_wanted = model_smaller(request->n_known + 1, request->most - 1);

                if (n_put_back > 0 || model_n_running(model) == model->most_rows ||
                    !model_may_hold(model, i, n_wanted + model_n_growing(model) * DSC_KV_TOKENS))
                    break;
                request->is_running = true;
                request->n_reserved = n_wanted;
            }
            request->n_planned = n_found + n_paid;
            budget -= n_paid;
        }
    }
    return n_put_back;
}

/* The planned tokens are computed. Writes the numbers of the requests that get one more, and returns how many. */
static inline int32_t model_commit(struct schedule_model *model, int32_t *ready)
{
    int32_t n = 0;

    for (int32_t i = 0; i < model->n; i++) {
        struct model_request *request = &model->requests[i];

        request->n_computed += request->n_planned;
        if (request->n_planned > 0 && request->n_computed == request->n_known) {
            request->n_known++;
            ready[n++] = request->number;
        }
    }
    return n;
}

static inline void model_remove(struct schedule_model *model, int32_t i)
{
    memmove(model->requests + i, model->requests + i + 1, (size_t)(--model->n - i) * sizeof *model->requests);
}

/* -1: there is none. */
static inline int32_t model_find(const struct schedule_model *model, int32_t number)
{
    int32_t i = model->n - 1;

    while (i >= 0 && model->requests[i].number != number)
        i--;
    return i;
}

#endif
