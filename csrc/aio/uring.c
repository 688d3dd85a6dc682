/* io_uring by its system calls: a ring of transfers that the kernel reads, and a ring of results that it writes. */
#include "aio/backend.h"

#if DSC_AIO_HAS_URING

#include "base/fail.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

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
};

static int enter(const struct state *state, uint32_t n_submit, uint32_t n_wait)
{
    long n = syscall(SYS_io_uring_enter, state->fd, n_submit, n_wait, n_wait > 0 ? IORING_ENTER_GETEVENTS : 0, NULL, (size_t)0);

    return n < 0 ? -errno : (int)n;
}

static bool map(const struct state *state, struct mapping *mapping, size_t n_bytes, off_t what)
{
    void *at = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, state->fd, what);

    if (at == MAP_FAILED)
        return false;
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

/* IORING_OP_READ and WRITE came with Linux 5.6, as did the question. */
static bool has_plain_transfers(const struct state *state)
{
    union { /* a header and a growing array, which the kernel wants zeroed */
        struct io_uring_probe probe;
        char room[sizeof(struct io_uring_probe) + 64 * sizeof(struct io_uring_probe_op)];
    } answer;

    memset(&answer, 0, sizeof answer);
    return syscall(SYS_io_uring_register, state->fd, IORING_REGISTER_PROBE, &answer, 64) == 0 && answer.probe.last_op >= IORING_OP_WRITE;
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
        return dsc_fail(DSC_ENOTSUP, "uring backend: io_uring_setup of depth %d: %s%s", (int)config->queue_depth, strerror_r(err, text, sizeof text),
                        err == EPERM ? " (containers often forbid it, and so does /proc/sys/kernel/io_uring_disabled)" : "");
    }
    if (!has_plain_transfers(state))
        return dsc_fail(DSC_ENOTSUP, "uring backend: this kernel's io_uring is older than Linux 5.6");
    if (!map(state, &state->sq_ring, params.sq_off.array + params.sq_entries * sizeof(uint32_t), IORING_OFF_SQ_RING) ||
        !map(state, &state->cq_ring, params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING) ||
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
    state->n_sqes = params.sq_entries; /* at least queue_depth; there are twice as many results, so they cannot overflow */
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

static int64_t uring_submit(void *opaque, struct dsc_aio_op *const *ops, int64_t n_ops)
{
    struct state *state = opaque;
    const uint32_t tail = *state->sq_tail;
    const uint32_t n = n_ops < (int64_t)state->n_sqes ? (uint32_t)n_ops : state->n_sqes;
    int taken;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = (tail + i) & state->sq_mask;

        fill(&state->sqes[at], ops[i]);
        state->sq_array[at] = at;
    }
    __atomic_store_n(state->sq_tail, tail + n, __ATOMIC_RELEASE);
    taken = enter(state, n, 0);
    /* What was not taken comes again, perhaps behind others: the ring is left empty. The kernel reads it inside enter only. */
    __atomic_store_n(state->sq_tail, __atomic_load_n(state->sq_head, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
    return taken;
}

static int64_t uring_reap(void *opaque, struct dsc_aio_op **out_ops, int64_t capacity, bool wait)
{
    struct state *state = opaque;
    uint32_t head = *state->cq_head;
    uint32_t tail = __atomic_load_n(state->cq_tail, __ATOMIC_ACQUIRE);
    int64_t n = 0;

    while (wait && head == tail) {
        int err = enter(state, 0, 1);

        if (err < 0 && err != -EINTR && err != -EAGAIN && err != -EBUSY)
            return err;
        tail = __atomic_load_n(state->cq_tail, __ATOMIC_ACQUIRE);
    }
    for (; n < capacity && head != tail; n++, head++) {
        const struct io_uring_cqe *cqe = &state->cqes[head & state->cq_mask];

        out_ops[n] = (struct dsc_aio_op *)(uintptr_t)cqe->user_data;
        out_ops[n]->res = cqe->res;
    }
    __atomic_store_n(state->cq_head, head, __ATOMIC_RELEASE);
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
