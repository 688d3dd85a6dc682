/*
 * The reference backend: each transfer is one system call, made when it is submitted. Tests compare the other backends
 * with it.
 */
#include "aio/backend.h"

#include "aio/transfer.h"
#include "base/fail.h"

#include <stdlib.h>

struct state {
    struct dsc_aio_op *first; /* done and not reaped, in order */
    struct dsc_aio_op **end;
};

static dsc_status sync_open(const struct dsc_aio_config *config, void **out_state)
{
    struct state *state = malloc(sizeof *state);

    (void)config;
    if (state == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for the sync backend");
    *state = (struct state){.end = &state->first};
    *out_state = state;
    return DSC_OK;
}

static void sync_close(void *state)
{
    free(state);
}

static int64_t sync_submit(void *opaque, struct dsc_aio_op *const *ops, int64_t n_ops)
{
    struct state *state = opaque;

    for (int64_t i = 0; i < n_ops; i++) {
        dsc_aio_transfer(ops[i]);
        ops[i]->next = NULL;
        *state->end = ops[i];
        state->end = &ops[i]->next;
    }
    return n_ops;
}

static int64_t sync_reap(void *opaque, struct dsc_aio_op **out_ops, int64_t capacity, bool wait)
{
    struct state *state = opaque;
    int64_t n = 0;

    (void)wait; /* everything in flight is done */
    for (; n < capacity && state->first != NULL; n++) {
        out_ops[n] = state->first;
        state->first = state->first->next;
    }
    if (state->first == NULL)
        state->end = &state->first;
    return n;
}

const struct dsc_aio_backend dsc_aio_backend_sync = {
    .name = "sync",
    .open = sync_open,
    .close = sync_close,
    .submit = sync_submit,
    .reap = sync_reap,
};
