/* Makes plain transfers go wrong in every way that a kernel or a disk may, repeatably. See aio/fault.h. */
#include "aio/fault.h"

#include "aio/transfer.h"
#include "base/fail.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>

struct state {
    struct dsc_aio_fault_plan plan;
    uint64_t random;
    int64_t n_results;
    int64_t n_held;
    struct dsc_aio_op *held[]; /* queue_depth entries; in order of submission */
};

static _Thread_local struct dsc_aio_fault_plan next_plan;
static _Thread_local struct dsc_aio_fault_counts counts;

void dsc_aio_fault_set(const struct dsc_aio_fault_plan *plan)
{
    next_plan = *plan;
    counts = (struct dsc_aio_fault_counts){0};
}

struct dsc_aio_fault_counts dsc_aio_fault_counts(void)
{
    return counts;
}

/* splitmix64 */
static uint64_t draw(struct state *state)
{
    uint64_t z = (state->random += 0x9e3779b97f4a7c15u);

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static bool happens(struct state *state, int32_t chance)
{
    return (int32_t)(draw(state) % 256) < chance;
}

static dsc_status fault_open(const struct dsc_aio_config *config, void **out_state)
{
    struct state *state = calloc(1, sizeof *state + (size_t)config->queue_depth * sizeof state->held[0]);

    if (state == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for the fault backend");
    state->plan = next_plan;
    state->random = next_plan.seed;
    *out_state = state;
    return DSC_OK;
}

static void fault_close(void *state)
{
    free(state);
}

static int64_t fault_submit(void *opaque, struct dsc_aio_op *const *ops, int64_t n_ops)
{
    struct state *state = opaque;
    int64_t n = state->plan.takes_part ? 1 + (int64_t)(draw(state) % (uint64_t)n_ops) : n_ops;

    if (happens(state, state->plan.refusal_chance))
        return draw(state) % 2 == 0 ? -EAGAIN : -EINTR;
    for (int64_t i = 0; i < n; i++)
        state->held[state->n_held++] = ops[i];
    return n;
}

/*
 * O_DIRECT takes only whole sectors, so a part of a direct transfer is whole sectors too, as in the kernel's short
 * transfers.
 */
static void move_part(struct state *state, struct dsc_aio_op *op, size_t n_bytes)
{
    const size_t sector = 512;
    struct dsc_aio_op part = *op;

    part.n_bytes = n_bytes;
    if (n_bytes < op->n_bytes && op->n_bytes % sector == 0)
        part.n_bytes = n_bytes < sector ? sector : n_bytes - n_bytes % sector;
    if (state->plan.pretends)
        part.res = (int64_t)part.n_bytes;
    else
        dsc_aio_transfer(&part);
    op->res = part.res;
}

static void transfer(struct state *state, struct dsc_aio_op *op)
{
    static const int passing[] = {EINTR, EAGAIN, EBUSY};
    const struct dsc_aio_fault_plan *plan = &state->plan;
    const int64_t end = op->offset + (int64_t)op->n_bytes;

    counts.n_transfers++;
    if (plan->refuses_direct && (fcntl(op->fd, F_GETFL) & O_DIRECT) != 0) {
        op->res = -EINVAL;
    } else if (happens(state, plan->passing_chance)) {
        counts.n_passing++;
        op->res = -passing[draw(state) % 3];
    } else if (op->offset < plan->bad_end && end > plan->bad_begin) {
        counts.n_failures++;
        op->res = -(plan->bad_err != 0 ? plan->bad_err : EIO);
    } else if (happens(state, plan->failure_chance)) {
        counts.n_failures++;
        if (draw(state) % 2 == 0)
            move_part(state, op, 1 + (size_t)(draw(state) % op->n_bytes));
        op->res = -(plan->failure_err != 0 ? plan->failure_err : EIO);
    } else if (op->is_write && plan->full_at > 0 && end > plan->full_at) {
        if (op->offset < plan->full_at) {
            move_part(state, op, (size_t)(plan->full_at - op->offset));
        } else {
            counts.n_failures++;
            op->res = -ENOSPC;
        }
    } else if (happens(state, plan->short_chance)) {
        counts.n_short++;
        move_part(state, op, 1 + (size_t)(draw(state) % op->n_bytes));
    } else {
        move_part(state, op, op->n_bytes);
    }
    if (plan->flip_chance > 0 && !op->is_write && op->res > 0 && happens(state, plan->flip_chance)) {
        counts.n_flipped++;
        ((unsigned char *)op->buf)[draw(state) % (uint64_t)op->res] ^= (unsigned char)(1u << draw(state) % 8);
    }
}

static int64_t fault_reap(void *opaque, struct dsc_aio_op **out_ops, int64_t capacity, bool wait)
{
    struct state *state = opaque;
    bool is_late = happens(state, state->plan.late_chance);
    int64_t most = !is_late ? capacity : wait ? 1 : 0;
    int64_t n = 0;

    if (state->plan.dies_after > 0 && state->n_results >= state->plan.dies_after)
        return -EBADF;
    if (wait && state->plan.delay_us > 0)
        nanosleep(&(struct timespec){state->plan.delay_us / 1000000, state->plan.delay_us % 1000000 * 1000L}, NULL);
    while (n < most && state->n_held > 0) {
        int64_t at = state->plan.reorders ? (int64_t)(draw(state) % (uint64_t)state->n_held) : 0;

        out_ops[n] = state->held[at];
        state->n_held--;
        for (int64_t i = at; i < state->n_held; i++)
            state->held[i] = state->held[i + 1];
        transfer(state, out_ops[n++]);
        state->n_results++;
    }
    return n;
}

const struct dsc_aio_backend dsc_aio_backend_fault = {
    .name = "fault",
    .open = fault_open,
    .close = fault_close,
    .submit = fault_submit,
    .reap = fault_reap,
};
