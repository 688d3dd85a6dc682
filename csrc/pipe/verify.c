/* Proves a table complete, ordered, and free of deadlock even if a send waits for its receiver. */
#include "base/fail.h"
#include "pipe/pipe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct proof {
    const struct dsc_pipe_table *table;
    uint8_t *done;  /* n_stages * n_micro_batches: a bit a kind */
    int64_t *next;  /* n_ranks: index of the next action */
    int32_t *ready; /* n_ranks: a stack of ranks to look at */
    bool *is_ready; /* n_ranks: the rank is on the stack */
    int32_t n_ready;
};

static uint8_t *done_of(const struct proof *proof, int32_t stage, int32_t micro_batch)
{
    return &proof->done[(int64_t)stage * proof->table->n_micro_batches + micro_batch];
}

static bool has(const struct proof *proof, int32_t stage, int32_t micro_batch, int32_t kind)
{
    return *done_of(proof, stage, micro_batch) >> kind & 1;
}

static bool crosses(const struct dsc_pipe_table *table, int32_t stage, int32_t other)
{
    return other >= 0 && other < table->n_stages && table->rank_of[stage] != table->rank_of[other];
}

/*
 * Checks that stage has done everything for micro-batch k, by the bits of the kinds done. A split backward counts like
 * a whole one.
 */
static dsc_status check_complete(const struct proof *proof, int32_t stage, int32_t k)
{
    const struct dsc_pipe_table *table = proof->table;
    uint8_t done = *done_of(proof, stage, k);
    uint8_t wanted = 1u << DSC_PIPE_FORWARD;
    bool is_split = done >> DSC_PIPE_INPUT & 1;

    if (table->has_backward)
        wanted |= is_split ? 1u << DSC_PIPE_INPUT | 1u << DSC_PIPE_WEIGHT : 1u << DSC_PIPE_BACKWARD;
    if (crosses(table, stage, stage - 1))
        wanted |= 1u << DSC_PIPE_RECV_F | (table->has_backward ? 1u << DSC_PIPE_SEND_B : 0u);
    if (crosses(table, stage, stage + 1))
        wanted |= 1u << DSC_PIPE_SEND_F | (table->has_backward ? 1u << DSC_PIPE_RECV_B : 0u);
    for (int32_t kind = 0; !pipe_has_unit(kind); kind++) {
        char text[40] = "";

        if ((done ^ wanted) >> kind & 1) {
            dsc_pipe_format(&(struct dsc_pipe_action){kind, stage, k}, sizeof text, text);
            return dsc_fail(DSC_EINVAL, "rank %d %s %s", (int)table->rank_of[stage],
                            wanted >> kind & 1 ? "lacks" : "has no use for", text);
        }
    }
    return DSC_OK;
}

/* Checks that each action occurs once and that none is missing. */
static dsc_status check_counts(struct proof *proof)
{
    const struct dsc_pipe_table *table = proof->table;

    for (int32_t rank = 0; rank < table->n_ranks; rank++)
        for (int64_t i = table->begins[rank]; i < table->begins[rank + 1]; i++) {
            const struct dsc_pipe_action *action = &table->actions[i];
            char text[40] = "";

            if (pipe_has_unit(action->kind))
                continue;
            if (has(proof, action->stage, action->micro_batch, action->kind)) {
                dsc_pipe_format(action, sizeof text, text);
                return dsc_fail(DSC_EINVAL, "rank %d has %s twice", (int)rank, text);
            }
            *done_of(proof, action->stage, action->micro_batch) |= (uint8_t)(1u << action->kind);
        }
    for (int32_t stage = 0; stage < table->n_stages; stage++)
        for (int32_t k = 0; k < table->n_micro_batches; k++)
            DSC_TRY(check_complete(proof, stage, k));
    memset(proof->done, 0, (size_t)table->n_stages * (size_t)table->n_micro_batches);
    return DSC_OK;
}

static bool has_gradient(const struct proof *proof, int32_t stage, int32_t k)
{
    return has(proof, stage, k, DSC_PIPE_BACKWARD) || has(proof, stage, k, DSC_PIPE_INPUT);
}

/* Whether an action's inputs were made before it in the same list. Other ranks' results come by RECV. */
static bool is_in_order(const struct proof *proof, const struct dsc_pipe_action *action)
{
    const struct dsc_pipe_table *table = proof->table;
    int32_t stage = action->stage;
    int32_t k = action->micro_batch;

    switch (action->kind) {
    case DSC_PIPE_FORWARD:
        if (stage == 0)
            return true;
        return crosses(table, stage, stage - 1) ? has(proof, stage, k, DSC_PIPE_RECV_F)
                                                : has(proof, stage - 1, k, DSC_PIPE_FORWARD);
    case DSC_PIPE_BACKWARD:
    case DSC_PIPE_INPUT:
        if (!has(proof, stage, k, DSC_PIPE_FORWARD))
            return false;
        if (stage + 1 == table->n_stages)
            return true;
        return crosses(table, stage, stage + 1) ? has(proof, stage, k, DSC_PIPE_RECV_B)
                                                : has_gradient(proof, stage + 1, k);
    case DSC_PIPE_WEIGHT:
        return has(proof, stage, k, DSC_PIPE_INPUT);
    case DSC_PIPE_SEND_F:
        return has(proof, stage, k, DSC_PIPE_FORWARD);
    case DSC_PIPE_SEND_B:
        return has_gradient(proof, stage, k);
    default:
        return true;
    }
}

/* The action at the other end of a message. */
static struct dsc_pipe_action other_end(const struct dsc_pipe_action *action)
{
    struct dsc_pipe_action other = *action;

    switch (action->kind) {
    case DSC_PIPE_SEND_F:
        other.kind = DSC_PIPE_RECV_F;
        other.stage++;
        break;
    case DSC_PIPE_RECV_F:
        other.kind = DSC_PIPE_SEND_F;
        other.stage--;
        break;
    case DSC_PIPE_SEND_B:
        other.kind = DSC_PIPE_RECV_B;
        other.stage--;
        break;
    default:
        other.kind = DSC_PIPE_SEND_B;
        other.stage++;
        break;
    }
    return other;
}

static void wake(struct proof *proof, int32_t rank)
{
    if (proof->is_ready[rank])
        return;
    proof->is_ready[rank] = true;
    proof->ready[proof->n_ready++] = rank;
}

/* Does the next action of rank, if it need not wait for another rank. */
static dsc_status step(struct proof *proof, int32_t rank, bool *out_went_on)
{
    const struct dsc_pipe_table *table = proof->table;
    const struct dsc_pipe_action *action = &table->actions[proof->next[rank]];
    char text[40] = "";

    if (pipe_has_unit(action->kind)) { /* waits for no other stage: its data-parallel peers are at the same place */
        proof->next[rank]++;
        *out_went_on = true;
        return DSC_OK;
    }
    *out_went_on = false;
    if (!is_in_order(proof, action)) {
        dsc_pipe_format(action, sizeof text, text);
        return dsc_fail(DSC_EINVAL, "rank %d has %s before what it needs, action %lld of its list", (int)rank, text,
                        (long long)(proof->next[rank] - table->begins[rank]));
    }
    if (!pipe_computes(action->kind)) {
        struct dsc_pipe_action other = other_end(action);
        int32_t peer = table->rank_of[other.stage];
        int64_t next = proof->next[peer];

        if (next == table->begins[peer + 1] || memcmp(&table->actions[next], &other, sizeof other) != 0)
            return DSC_OK;
        /* If the peer sends, the peer's own order is also checked before the message counts. */
        if (!is_in_order(proof, &other))
            return DSC_OK;
        *done_of(proof, other.stage, other.micro_batch) |= (uint8_t)(1u << other.kind);
        proof->next[peer]++;
        wake(proof, peer);
    }
    *done_of(proof, action->stage, action->micro_batch) |= (uint8_t)(1u << action->kind);
    proof->next[rank]++;
    *out_went_on = true;
    return DSC_OK;
}

/*
 * Every unfinished rank waits for another rank. So some ranks wait for one another in a cycle, or wait for a finished
 * rank.
 */
static dsc_status fail_with_circle(struct proof *proof)
{
    const struct dsc_pipe_table *table = proof->table;
    char sentence[400] = "";
    size_t n = 0;
    int32_t rank = 0;

    while (proof->next[rank] == table->begins[rank + 1])
        rank++;
    /* The stack is empty now: from here on is_ready marks the ranks that the sentence names. */
    while (n < sizeof sentence && proof->next[rank] < table->begins[rank + 1] && !proof->is_ready[rank]) {
        const struct dsc_pipe_action *action = &table->actions[proof->next[rank]];
        int32_t peer = table->rank_of[other_end(action).stage];
        char text[40] = "";

        dsc_pipe_format(action, sizeof text, text);
        n += (size_t)snprintf(sentence + n, sizeof sentence - n, "%srank %d at %s for rank %d", n > 0 ? ", " : "",
                              (int)rank, text, (int)peer);
        proof->is_ready[rank] = true;
        rank = peer;
    }
    return dsc_fail(DSC_EINVAL, "ranks wait for one another: %s", sentence);
}

static dsc_status run_all(struct proof *proof)
{
    const struct dsc_pipe_table *table = proof->table;

    for (int32_t rank = table->n_ranks - 1; rank >= 0; rank--) {
        proof->next[rank] = table->begins[rank];
        wake(proof, rank);
    }
    while (proof->n_ready > 0) {
        int32_t rank = proof->ready[--proof->n_ready];
        bool went_on = true;

        proof->is_ready[rank] = false;
        while (went_on && proof->next[rank] < table->begins[rank + 1])
            DSC_TRY(step(proof, rank, &went_on));
    }
    for (int32_t rank = 0; rank < table->n_ranks; rank++)
        if (proof->next[rank] < table->begins[rank + 1])
            return fail_with_circle(proof);
    return DSC_OK;
}

dsc_status dsc_pipe_verify(const struct dsc_pipe_table *table)
{
    DSC_TRY(dsc_pipe_check_table(table));

    size_t n_ranks = (size_t)table->n_ranks;
    struct proof proof = {.table = table};
    dsc_status status = DSC_OK;

    proof.done = calloc((size_t)table->n_stages * (size_t)table->n_micro_batches, sizeof *proof.done);
    proof.next = calloc(n_ranks, sizeof *proof.next);
    proof.ready = calloc(n_ranks, sizeof *proof.ready);
    proof.is_ready = calloc(n_ranks, sizeof *proof.is_ready);
    if (proof.done == NULL || proof.next == NULL || proof.ready == NULL || proof.is_ready == NULL)
        status = dsc_fail(DSC_ENOMEM, "no memory for %d stages and %d micro-batches", (int)table->n_stages,
                          (int)table->n_micro_batches);
    if (status == DSC_OK)
        status = check_counts(&proof);
    if (status == DSC_OK)
        status = run_all(&proof);
    if (status == DSC_OK)
        status = dsc_pipe_check_gathers(table);
    free(proof.done);
    free(proof.next);
    free(proof.ready);
    free(proof.is_ready);
    return status;
}
