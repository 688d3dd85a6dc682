/*
 * io_uring by its system calls: a ring of transfers that the kernel reads, and a ring of results that it writes.
 *
 * [Note: Transfers that are left lying]
 *
 * The kernel queues transfers that it cannot do at once for its own worker threads, and wakes a worker when it adds to
 * that queue. On Linux 6.18 a write was once left in the queue for good: the process waited for more than an hour,
 * every worker slept, and nothing was wrong with the file. So after STALL_SECONDS without a result, this backend asks
 * the kernel to cancel. Cancelling removes transfers from the queue, and this thread then makes them itself. Transfers
 * that the disk is working on continue. Transfers of a worker continue too, or end with EINTR on file systems that can
 * be interrupted; this thread then makes them as well. A transfer is interrupted at most once, however slow its file
 * system is.
 *
 * Kernels that cannot wait with a timeout (before 5.11) or cancel everything (before 5.19) wait for as long as it
 * takes.
 */
#include "aio/backend.h"

#if DSC_AIO_HAS_URING

#include "aio/transfer.h"
#include "base/fail.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STALL_SECONDS 2 /* long for a transfer, and short for a person who watches a stalled run */

/* A region shared with the kernel. */
struct mapping {
    char *at;
    size_t n_bytes;
};

struct state {
    int fd;
    struct mapping sq_ring;
    struct mapping cq_ring;
    struct mapping sqe_array;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    uint32_t *sq_tail; /* ours to write; the kernel reads it */
    uint32_t *sq_head; /* the kernel's */
    uint32_t *cq_head; /* ours */
    uint32_t *cq_tail; /* the kernel's */
    uint32_t *sq_array;
    uint32_t sq_mask;
    uint32_t cq_mask;
    uint32_t n_sqes;
    bool has_timeout; /* of waits */
};

/* Returns the number of entries that the kernel took, or -errno. */
static int enter(const struct state *state, uint32_t n_submit)
{
    long n = syscall(SYS_io_uring_enter, state->fd, n_submit, 0, 0, NULL, (size_t)0);

    return n < 0 ? -errno : (int)n;
}

/* 0 when there is a result, -ETIME after STALL_SECONDS without one, or another -errno. */
static int wait_for_result(const struct state *state)
{
    long n;

#ifdef IORING_ENTER_EXT_ARG
    if (state->has_timeout) {
        const long long limit[2] = {STALL_SECONDS, 0}; /* struct __kernel_timespec */
        struct io_uring_getevents_arg arg = {.ts = (uintptr_t)limit};

        n = syscall(SYS_io_uring_enter, state->fd, 0, 1, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &arg,
                    sizeof arg);
        return n < 0 ? -errno : 0;
    }
#endif
    n = syscall(SYS_io_uring_enter, state->fd, 0, 1, IORING_ENTER_GETEVENTS, NULL, (size_t)0);
    return n < 0 ? -errno : 0;
}

static bool map(const struct state *state, struct mapping *mapping, size_t n_bytes, off_t what)
{
    void *at = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, state->fd, what);

    if (at == MAP_FAILED)
        return false;
    (void)madvise(at, n_bytes, MADV_DONTFORK); /* not for children: a child that read results would take them from
                                                  its parent */
    *mapping = (struct mapping){at, n_bytes};
    return true;
}

static void unmap(struct mapping *mapping)
{
    if (mapping->at != NULL)
        munmap(mapping->at, mapping->n_bytes);
}

static void uring_close(void *opaque)
{
    struct state *state = opaque;

    unmap(&state->sqe_array);
    unmap(&state->cq_ring);
    unmap(&state->sq_ring);
    if (state->fd >= 0)
        close(state->fd);
    free(state);
}

/* IORING_OP_READ and WRITE came with Linux 5.6, as did the probe. */
static bool has_plain_transfers(const struct state *state)
{
    union { /* a header and a growing array, which the kernel wants zeroed */
        struct io_uring_probe probe;
        char room[sizeof(struct io_uring_probe) + 64 * sizeof(struct io_uring_probe_op)];
    } answer;

    memset(&answer, 0, sizeof answer);
    return syscall(SYS_io_uring_register, state->fd, IORING_REGISTER_PROBE, &answer, 64) == 0 &&
           answer.probe.last_op >= IORING_OP_WRITE;
}

static dsc_status set_up(struct state *state, const struct dsc_aio_config *config)
{
    struct io_uring_params params;
    char text[96];
    int err;

    memset(&params, 0, sizeof params);
    state->fd = (int)syscall(SYS_io_uring_setup, config->queue_depth, &params); /* close-on-exec by itself */
    if (state->fd < 0) {
        err = errno;
        return dsc_fail(DSC_ENOTSUP, "uring backend: io_uring_setup of depth %d: %s%s", (int)config->queue_depth,
                        strerror_r(err, text, sizeof text),
                        err == EPERM ? " (containers often forbid it, and so does /proc/sys/kernel/io_uring_disabled)"
                                     : "");
    }
    if (!has_plain_transfers(state))
        return dsc_fail(DSC_ENOTSUP, "uring backend: this kernel's io_uring is older than Linux 5.6");
    if (!map(state, &state->sq_ring, params.sq_off.array + params.sq_entries * sizeof(uint32_t), IORING_OFF_SQ_RING) ||
        !map(state, &state->cq_ring, params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe),
             IORING_OFF_CQ_RING) ||
        !map(state, &state->sqe_array, params.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES)) {
        err = errno;
        return dsc_fail(DSC_ENOTSUP, "uring backend: mapping the rings: %s", strerror_r(err, text, sizeof text));
    }
    state->sqes = (struct io_uring_sqe *)state->sqe_array.at;
    state->cqes = (struct io_uring_cqe *)(state->cq_ring.at + params.cq_off.cqes);
    state->sq_head = (uint32_t *)(state->sq_ring.at + params.sq_off.head);
    state->sq_tail = (uint32_t *)(state->sq_ring.at + params.sq_off.tail);
    state->sq_array = (uint32_t *)(state->sq_ring.at + params.sq_off.array);
    state->sq_mask = *(uint32_t *)(state->sq_ring.at + params.sq_off.ring_mask);
    state->cq_head = (uint32_t *)(state->cq_ring.at + params.cq_off.head);
    state->cq_tail = (uint32_t *)(state->cq_ring.at + params.cq_off.tail);
    state->cq_mask = *(uint32_t *)(state->cq_ring.at + params.cq_off.ring_mask);
#ifdef IORING_ENTER_EXT_ARG
    state->has_timeout = (params.features & IORING_FEAT_EXT_ARG) != 0;
#endif
    state->n_sqes =
        params.sq_entries; /* at least queue_depth; there are twice as many results, so they cannot overflow */
    return DSC_OK;
}

static dsc_status uring_open(const struct dsc_aio_config *config, void **out_state)
{
    struct state *state = calloc(1, sizeof *state);
    dsc_status status;

    if (state == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for the uring backend");
    state->fd = -1;
    status = set_up(state, config);
    if (status != DSC_OK) {
        uring_close(state);
        return status;
    }
    *out_state = state;
    return DSC_OK;
}

static void fill(struct io_uring_sqe *sqe, struct dsc_aio_op *op)
{
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = op->is_write ? IORING_OP_WRITE : IORING_OP_READ;
    sqe->fd = op->fd;
    sqe->off = (uint64_t)op->offset;
    sqe->addr = (uintptr_t)op->buf;
    sqe->len = (uint32_t)op->n_bytes;
    sqe->user_data = (uintptr_t)op;
}

/* The i-th free entry of the ring of transfers, which is empty between calls. */
static struct io_uring_sqe *free_entry(struct state *state, uint32_t i)
{
    uint32_t at = (*state->sq_tail + i) & state->sq_mask;

    state->sq_array[at] = at;
    return &state->sqes[at];
}

/* Hands the first n free entries to the kernel. How many it took, or -errno. */
static int hand_over(struct state *state, uint32_t n)
{
    int taken;

    __atomic_store_n(state->sq_tail, *state->sq_tail + n, __ATOMIC_RELEASE);
    taken = enter(state, n);
    /*
     * The ring is left empty, because the engine submits ops that were not taken again, perhaps behind other ops. The
     * kernel reads the ring only inside enter.
     */
    __atomic_store_n(state->sq_tail, __atomic_load_n(state->sq_head, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
    return taken;
}

static int64_t uring_submit(void *opaque, struct dsc_aio_op *const *ops, int64_t n_ops)
{
    struct state *state = opaque;
    const uint32_t n = n_ops < (int64_t)state->n_sqes ? (uint32_t)n_ops : state->n_sqes;

    for (uint32_t i = 0; i < n; i++)
        fill(free_entry(state, i), ops[i]);
    return hand_over(state, n);
}

/*
 * See [Note: Transfers that are left lying]. The result of the cancel request belongs to no transfer; a kernel without
 * this request reports that in the result.
 */
static void cancel_all(struct state *state)
{
#ifdef IORING_ASYNC_CANCEL_ANY
    struct io_uring_sqe *sqe = free_entry(state, 0);

    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = IORING_OP_ASYNC_CANCEL;
    sqe->fd = -1;
    sqe->cancel_flags = IORING_ASYNC_CANCEL_ANY | IORING_ASYNC_CANCEL_ALL;
    (void)hand_over(state, 1); /* refused: the next wait tries again */
#else
    (void)state;
#endif
}

/* Takes the available results, of up to capacity transfers. */
static int64_t take_results(struct state *state, struct dsc_aio_op **out_ops, int64_t capacity)
{
    const uint32_t tail = __atomic_load_n(state->cq_tail, __ATOMIC_ACQUIRE);
    uint32_t head = *state->cq_head;
    int64_t n = 0;

    for (; n < capacity && head != tail; head++) {
        const struct io_uring_cqe *cqe = &state->cqes[head & state->cq_mask];
        struct dsc_aio_op *op = (struct dsc_aio_op *)(uintptr_t)cqe->user_data;

        if (op == NULL) /* of cancel_all */
            continue;
        op->res = cqe->res;
        out_ops[n++] = op;
    }
    __atomic_store_n(state->cq_head, head, __ATOMIC_RELEASE);
    return n;
}

static int64_t uring_reap(void *opaque, struct dsc_aio_op **out_ops, int64_t capacity, bool wait)
{
    struct state *state = opaque;
    int64_t n = take_results(state, out_ops, capacity);

    while (wait && n == 0) {
        int err = wait_for_result(state);

        if (err == -ETIME)
            cancel_all(state);
        else if (err < 0 && err != -EINTR && err != -EAGAIN && err != -EBUSY)
            return err;
        n = take_results(state, out_ops, capacity);
    }
    for (int64_t i = 0; i < n; i++)
        if (out_ops[i]->res == -ECANCELED ||
            out_ops[i]->res == -EINTR) /* cancelled by cancel_all, or because the submitting thread has ended */
            dsc_aio_transfer(out_ops[i]);
    return n;
}

const struct dsc_aio_backend dsc_aio_backend_uring = {
    .name = "uring",
    .open = uring_open,
    .close = uring_close,
    .submit = uring_submit,
    .reap = uring_reap,
};

#endif
