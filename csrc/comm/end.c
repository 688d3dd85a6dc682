/* Makes, attaches and closes ends. */
#include "comm/end.h"

#include "base/cores.h"
#include "base/fail.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS 30000 /* about the cost of a sleep and a wake together */

static dsc_status check_config(const struct dsc_comm_config *config)
{
    if (config->size != sizeof *config)
        return dsc_fail(DSC_EINVAL, "size is %u, must be %zu", config->size, sizeof *config);
    if (config->n_ranks < 1 || config->n_ranks > DSC_COMM_MAX_RANKS)
        return dsc_fail(DSC_EINVAL, "n_ranks is %d, must be 1 to %d", (int)config->n_ranks, DSC_COMM_MAX_RANKS);
    if (config->rank < 0 || config->rank >= config->n_ranks)
        return dsc_fail(DSC_EINVAL, "rank is %d, of %d ranks", (int)config->rank, (int)config->n_ranks);
    if (config->timeout_ns <= 0)
        return dsc_fail(DSC_EINVAL, "timeout_ns is %" PRId64 ", must be positive", config->timeout_ns);
    if (config->arena_bytes < 0)
        return dsc_fail(DSC_EINVAL, "arena_bytes is %" PRId64 ", must not be negative", config->arena_bytes);
    return DSC_OK;
}

static void init_fields(struct dsc_comm *comm, const struct dsc_comm_config *config)
{
    pthread_condattr_t clock;

    comm->rank = config->rank;
    comm->n_ranks = config->n_ranks;
    /* At most half of INT64_MAX, so that a deadline fits int64_t too. */
    comm->timeout_ns = config->timeout_ns < INT64_MAX / 2 ? config->timeout_ns : INT64_MAX / 2;
    comm->par = config->par;
    comm->end = &comm->first;
    for (int32_t rank = 0; rank < DSC_COMM_MAX_RANKS; rank++)
        comm->peers[rank].pidfd = -1;
    pthread_mutex_init(&comm->mutex, NULL); /* these cannot fail on Linux */
    pthread_mutex_init(&comm->failure_mutex, NULL);
    dsc_comm_mail_init(&comm->mail);
    pthread_cond_init(&comm->has_work, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&comm->has_done, &clock);
    pthread_condattr_destroy(&clock);
}

dsc_status dsc_comm_create(const struct dsc_comm_config *config, dsc_comm **out_comm)
{
    DSC_TRY(check_config(config));

    struct dsc_comm *comm = calloc(1, sizeof *comm);

    if (comm == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for an end");

    dsc_status status = dsc_process_note(&comm->process);

    if (status == DSC_OK)
        status =
            dsc_comm_segment_create(config->rank, config->n_ranks, config->arena_bytes, comm->address, &comm->segment);
    if (status != DSC_OK)
        goto free_comm;
    if ((status = dsc_comm_arena_create(comm->segment, &comm->arena)) != DSC_OK)
        goto drop_segment;
    init_fields(comm, config);
    comm->arena_begin = (uintptr_t)comm->segment->base + DSC_COMM_AT_ARENA;
    comm->arena_end = (uintptr_t)comm->segment->base + (uintptr_t)comm->segment->n_bytes;
    *out_comm = comm;
    return DSC_OK;

drop_segment:
    dsc_comm_segment_drop(comm->segment);
free_comm:
    free(comm);
    return status;
}

const char *dsc_comm_address(const dsc_comm *comm)
{
    return comm->address;
}

static void detach(struct dsc_comm *comm)
{
    for (int32_t rank = 0; rank < comm->n_ranks; rank++) {
        struct dsc_comm_peer *peer = &comm->peers[rank];

        dsc_comm_segment_drop(peer->segment);
        peer->segment = NULL;
        if (peer->pidfd >= 0)
            close(peer->pidfd);
        peer->pidfd = -1;
    }
}

/*
 * Spinning pays if each rank has a processor, so if together the ranks may use at least as many processors as there are
 * ranks.
 */
static int64_t choose_spin(const struct dsc_comm *comm)
{
    struct dsc_cores cores;
    struct dsc_cores all = {0};

    for (int32_t rank = 0; rank < comm->n_ranks; rank++) {
        dsc_cores_of(comm->peers[rank].segment->pid, &cores);
        for (size_t i = 0; i < sizeof all.bits.bytes; i++)
            all.bits.bytes[i] |= cores.bits.bytes[i];
    }
    return dsc_cores_count(&all) >= comm->n_ranks ? SPIN_NS : 0;
}

/* With the mutex. */
static dsc_status attach(struct dsc_comm *comm, const char *const *addresses)
{
    if (comm->is_closed)
        return dsc_fail(DSC_ESTATE, "the end has been closed");
    if (comm->is_attached)
        return dsc_fail(DSC_ESTATE, "the end is attached already");
    for (int32_t rank = 0; rank < comm->n_ranks; rank++) {
        struct dsc_comm_peer *peer = &comm->peers[rank];
        const char *address = rank == comm->rank ? comm->address : addresses[rank];
        dsc_status status = dsc_comm_segment_open(address, rank, comm->n_ranks, false, &peer->segment, &peer->pidfd);

        if (status != DSC_OK) {
            detach(comm);
            return status;
        }
    }
    comm->spin_ns = choose_spin(comm);
    dsc_comm_mail_open(comm);
    comm->is_attached = true;
    return DSC_OK;
}

dsc_status dsc_comm_attach(dsc_comm *comm, const char *const *addresses)
{
    DSC_TRY(dsc_process_check(&comm->process, "this end of shared memory"));
    if (addresses == NULL)
        return dsc_fail(DSC_EINVAL, "addresses is NULL");
    pthread_mutex_lock(&comm->mutex);
    dsc_status status = attach(comm, addresses);
    pthread_mutex_unlock(&comm->mutex);
    return status;
}

dsc_status dsc_comm_close(dsc_comm *comm)
{
    if (!dsc_process_is_this(&comm->process))
        return DSC_OK;
    pthread_mutex_lock(&comm->mutex);
    bool was_closed = comm->is_closed;
    comm->is_closed = true;
    pthread_mutex_unlock(&comm->mutex);
    if (was_closed)
        return DSC_OK;
    dsc_comm_stop(comm);
    dsc_comm_say_closed(comm);
    dsc_comm_mail_stop(comm);
    detach(comm);
    dsc_comm_arena_drop(comm->arena);
    dsc_comm_segment_drop(comm->segment);
    comm->segment = NULL;
    return DSC_OK;
}

void dsc_comm_destroy(dsc_comm *comm)
{
    if (comm == NULL || !dsc_process_is_this(&comm->process))
        return;
    (void)dsc_comm_close(comm);
    pthread_cond_destroy(&comm->has_done);
    pthread_cond_destroy(&comm->has_work);
    dsc_comm_mail_destroy(&comm->mail);
    pthread_mutex_destroy(&comm->failure_mutex);
    pthread_mutex_destroy(&comm->mutex);
    free(comm);
}

dsc_status dsc_comm_block_create(dsc_comm *comm, int64_t n_bytes, dsc_comm_block **out_block)
{
    DSC_TRY(dsc_process_check(&comm->process, "this end of shared memory"));
    pthread_mutex_lock(&comm->mutex);
    bool is_closed = comm->is_closed;
    if (!is_closed)
        dsc_comm_arena_hold(comm->arena);
    pthread_mutex_unlock(&comm->mutex);
    if (is_closed)
        return dsc_fail(DSC_ESTATE, "the end has been closed");

    /* Called without the mutex: committing pages takes long, and requests go on meanwhile. */
    dsc_status status = dsc_comm_arena_take(comm->arena, n_bytes, out_block);

    dsc_comm_arena_drop(comm->arena);
    return status;
}

bool dsc_comm_owns(const dsc_comm *comm, const void *data, int64_t n_bytes)
{
    uintptr_t at = (uintptr_t)data;

    /* Takes no lock, because a child of fork() could not take it. The bounds never change, so none is needed. */
    return !atomic_load_explicit(&comm->is_closing, memory_order_acquire) && n_bytes >= 0 && at >= comm->arena_begin &&
           at < comm->arena_end && (uint64_t)n_bytes <= comm->arena_end - at;
}

dsc_status dsc_comm_count_of(const dsc_comm *comm, dsc_comm_op op, struct dsc_comm_count *out_count)
{
    if (dsc_comm_op_text(op) == NULL)
        return dsc_fail(DSC_EINVAL, "op is %d, which is no operation", (int)op);
    out_count->n_calls = atomic_load_explicit(&comm->n_done[op], memory_order_relaxed);
    out_count->n_bytes = atomic_load_explicit(&comm->n_bytes[op], memory_order_relaxed);
    out_count->n_in_place = atomic_load_explicit(&comm->n_in_place[op], memory_order_relaxed);
    out_count->n_staged = atomic_load_explicit(&comm->n_staged[op], memory_order_relaxed);
    return DSC_OK;
}
