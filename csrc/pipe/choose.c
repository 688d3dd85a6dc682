/* Chooses the fastest of several schedules within a memory limit. */
#include "base/fail.h"
#include "pipe/pipe.h"

#include <stdlib.h>

/* *Simulates a candidate. If the schedule refuses the shape, out stays unchanged; any other failure is returned. */
static dsc_status try_one(const struct dsc_pipe_candidate *candidate, int64_t transfer_ns, struct dsc_pipe_outcome *out)
{
    struct pipe_own_table own;
    struct dsc_pipe_usage *usage = NULL;
    int64_t makespan_ns;
    dsc_status status = dsc_pipe_make_table(candidate->schedule, &candidate->shape, &own);

    if (status == DSC_OK) {
        usage = calloc((size_t)own.table.n_ranks, sizeof *usage);
        status = usage == NULL
                     ? dsc_fail(DSC_ENOMEM, "no memory for %d ranks", (int)own.table.n_ranks)
                     : dsc_pipe_simulate(&own.table, candidate->costs, transfer_ns, NULL, usage, &makespan_ns);
    }
    if (status == DSC_OK) {
        out->makespan_ns = makespan_ns;
        out->peak_bytes = 0;
        for (int32_t rank = 0; rank < own.table.n_ranks; rank++)
            if (usage[rank].peak_bytes > out->peak_bytes)
                out->peak_bytes = usage[rank].peak_bytes;
    }
    free(usage);
    dsc_pipe_clear_table(&own);
    return status;
}

static dsc_status pick(const struct dsc_pipe_candidate *candidates, int32_t n, int64_t limit_bytes,
                       const struct dsc_pipe_outcome *outcomes, int32_t *out_index)
{
    int32_t best = -1;
    int32_t smallest = -1;

    for (int32_t i = 0; i < n; i++) {
        if (outcomes[i].makespan_ns < 0)
            continue;
        if (smallest < 0 || outcomes[i].peak_bytes < outcomes[smallest].peak_bytes)
            smallest = i;
        if (outcomes[i].peak_bytes <= limit_bytes && (best < 0 || outcomes[i].makespan_ns < outcomes[best].makespan_ns))
            best = i;
    }
    if (best < 0)
        return dsc_fail(DSC_ENOSPC, "no schedule holds at most %lld bytes of activations; %s holds least, %lld",
                        (long long)limit_bytes, candidates[smallest].schedule,
                        (long long)outcomes[smallest].peak_bytes);
    *out_index = best;
    return DSC_OK;
}

dsc_status dsc_pipe_choose(const struct dsc_pipe_candidate *candidates, int32_t n_candidates, int64_t transfer_ns,
                           int64_t limit_bytes, struct dsc_pipe_outcome *out_outcomes, int32_t *out_index)
{
    dsc_status refused = DSC_OK;
    int32_t n_tried = 0;

    if (candidates == NULL || out_outcomes == NULL || out_index == NULL || n_candidates < 1)
        return dsc_fail(DSC_EINVAL, "%d candidates, or a pointer is NULL", (int)n_candidates);

    struct dsc_pipe_outcome *outcomes = calloc((size_t)n_candidates, sizeof *outcomes);
    dsc_status status = DSC_OK;

    if (outcomes == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for %d candidates", (int)n_candidates);
    for (int32_t i = 0; status == DSC_OK && i < n_candidates; i++) {
        outcomes[i] = (struct dsc_pipe_outcome){-1, 0};

        dsc_status checked = dsc_pipe_check(candidates[i].schedule, &candidates[i].shape);

        if (checked != DSC_OK) {
            refused = checked;
            continue;
        }
        n_tried++;
        status = try_one(&candidates[i], transfer_ns, &outcomes[i]);
    }
    if (status == DSC_OK && n_tried == 0) {
        status = refused; /* keeps the sentence of the last check */
    } else if (status == DSC_OK) {
        for (int32_t i = 0; i < n_candidates; i++)
            out_outcomes[i] = outcomes[i];
        status = pick(candidates, n_candidates, limit_bytes, outcomes, out_index);
    }
    free(outcomes);
    return status;
}
