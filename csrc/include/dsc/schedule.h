/*
 * The schedule of a server: which requests compute how many tokens in the next step, with the blocks of one pool
 * (dsc/infer.h). It works on numbers only, and touches neither the pool nor tokens.
 *
 * A request has n_tokens *known* tokens, at first its prompt. A step computes some that are known and not computed yet;
 * a request whose known tokens are all computed gets one more (it *decodes*), until it has most_tokens. The last
 * token is never computed, so a request needs blocks for most_tokens - 1 tokens at most.
 *
 * The caller repeats: dsc_schedule_plan, the step itself, and dsc_schedule_commit or, where the step
 * has failed, dsc_schedule_abort. It adds and ends requests in between.
 *
 * Rules:
 *   - Requests stand in the order of their arrival. The first ones *run* and hold blocks, all others wait. Nobody
 *     overtakes: rows of a plan come in this order, until the budget of tokens is used up.
 *   - The oldest request is *protected*: younger ones never take a block that it may still need.
 *   - The next request starts to run when fewer than most_rows run, budget is left, and the blocks of its known tokens
 *     and one more are there. It holds these blocks from then on. One further block must be there for each
 *     running request that may still need more than it holds, except the protected one: else requests start
 *     only to go back a few steps later.
 *   - A running request that needs one block more than there are makes the youngest running request go back: this one
 *     waits again in its place, holds no block, and later computes all of its known tokens once more. The request may
 *     itself be the youngest. The protected one never goes back: all blocks but its own are there for it.
 *
 * All requests that run are decoding, except the youngest ones: of these the oldest may have computed a part of its
 * prompt, and the others nothing. For a younger request computes only where the rest of the budget has
 * computed all prompts before it, and requests go back youngest first. So decoding rows come before pieces of prompts.
 *
 * Bound: a request ends within the sum of
 *   ceil(n_tokens / budget) + most_tokens - n_tokens - 1
 * committed steps over itself and the unfinished requests that arrived before it, with their n_tokens of
 * dsc_schedule_add and the smallest budget >= 1 of these steps. Proof: the oldest request has the first row of each
 * plan, with all the tokens that the budget allows. Once oldest it never goes back. It needs ceil(k / budget) steps for
 * the k >= n_tokens tokens that it knows by then, and one for each of the other most_tokens - 1 - k. The sum of both
 * does not grow with k. No request ever arrives before another one, so each of them is the oldest once at most.
 *
 * Calls on one schedule must not overlap in time. A call that fails changes nothing. The time of a call
 * does not depend on the number of waiting requests, and only dsc_schedule_add allocates.
 */
#ifndef DSC_SCHEDULE_H
#define DSC_SCHEDULE_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct dsc_schedule;

/* Makes a schedule without requests, of n_blocks >= 0 blocks and at most most_rows >= 1 requests that run. */
DSC_API dsc_status dsc_schedule_open(int32_t n_blocks, int32_t most_rows, struct dsc_schedule **out);

/* Frees the schedule. NULL is allowed. */
DSC_API void dsc_schedule_close(struct dsc_schedule *schedule);

/* Numbers of a schedule. */
struct dsc_schedule_counts {
    int32_t n_waiting;
    int32_t n_running;
    int32_t n_free_blocks; /* blocks that no running request holds */
    int64_t n_put_back;    /* since the start: how often a request went back */
};

DSC_API void dsc_schedule_count(const struct dsc_schedule *schedule, struct dsc_schedule_counts *out);

/*
 * Adds a request behind all others, and writes its number. Numbers of ended requests are used again.
 *
 * 1 <= n_tokens < most_tokens. 0 <= n_found < n_tokens: the step will find the keys and values of so many tokens at the
 * front. They take blocks as others do, but no budget in the first piece. A request that has gone back finds nothing.
 *
 * DSC_ENOSPC: even alone the request would not fit; the sentence has both numbers of blocks.
 */
DSC_API dsc_status dsc_schedule_add(struct dsc_schedule *schedule, int64_t n_tokens, int64_t most_tokens,
                                    int64_t n_found, int32_t *out_number);

/*
 * Removes a request, which has all its tokens, or was cancelled or failed, running or waiting. DSC_EINVAL for the
 * number of no request. DSC_ESTATE between a plan with rows and its commit.
 */
DSC_API dsc_status dsc_schedule_end(struct dsc_schedule *schedule, int32_t number);

/* A request computes n_tokens of its known tokens, from token begin on. */
struct dsc_schedule_row {
    int32_t number;
    int64_t begin;
    int64_t n_tokens;
};

/* Borrowed: both arrays live until the next call of dsc_schedule_add, _plan or _close. */
struct dsc_schedule_step {
    int32_t n_rows;
    const struct dsc_schedule_row *rows; /* oldest first, of different requests */
    int32_t n_put_back;
    const int32_t *put_back; /* numbers, youngest first; none has a row */
};

/*
 * Plans a step of at most budget >= 0 tokens, without found ones. The caller frees the blocks of the requests that went
 * back before it runs the step. A plan without rows needs no commit.
 *
 * DSC_ESTATE: the last plan has rows, and was neither committed nor aborted; or a request has all its most_tokens, and
 * was not ended.
 */
DSC_API dsc_status dsc_schedule_plan(struct dsc_schedule *schedule, int64_t budget, struct dsc_schedule_step *out);

/*
 * The step has run: its tokens are computed. Each request that has computed all its known tokens now gets
 * one more. Writes the numbers of these requests, in the order of the plan. *out_numbers is borrowed as a plan's arrays
 * are. DSC_ESTATE: there is no plan.
 */
DSC_API dsc_status dsc_schedule_commit(struct dsc_schedule *schedule, int32_t *out_n, const int32_t **out_numbers);

/* The step has failed: nothing was computed. Requests that went back stay there. DSC_ESTATE: there is no plan. */
DSC_API dsc_status dsc_schedule_abort(struct dsc_schedule *schedule);

#ifdef __cplusplus
}
#endif
#endif
