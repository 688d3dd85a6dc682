/*
 * Linux AIO by its system calls. Asynchronous for O_DIRECT only: through the page cache, io_submit makes the transfer
 * before it returns.
 */
#include "aio/backend.h"

#include "aio/transfer.h"
#include "base/fail.h"

#include <errno.h>
#include <linux/aio_abi.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SUBMIT_BATCH 64
#define REAP_BATCH 64

struct state {
    aio_context_t context;
    struct dsc_aio_op *plain; /* ops done by a plain system call and not reaped yet */
};

static dsc_status libaio_open(const struct dsc_aio_config *config, void **out_state)
{
    struct state *state = calloc(1, sizeof *state);

    if (state == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for the libaio backend");
    if (syscall(SYS_io_setup, config->queue_depth, &state->context) != 0) {
        int err = errno;
        char text[96];

        free(state);
        return dsc_fail(DSC_ENOTSUP, "libaio backend: io_setup of depth %d: %s%s", (int)config->queue_depth,
                        strerror_r(err, text, sizeof text),
                        err == EAGAIN ? " (the kernel's limit is in /proc/sys/fs/aio-max-nr)" : "");
    }
    *out_state = state;
    return DSC_OK;
}

static void libaio_close(void *opaque)
{
    struct state *state = opaque;

    (void)syscall(SYS_io_destroy, state->context);
    free(state);
}

static int64_t libaio_submit(void *opaque, struct dsc_aio_op *const *ops, int64_t n_ops)
{
    struct state *state = opaque;
    struct iocb iocbs[SUBMIT_BATCH]; /* the kernel copies them */
    struct iocb *pointers[SUBMIT_BATCH];
    int64_t n = n_ops < SUBMIT_BATCH ? n_ops : SUBMIT_BATCH;
    long taken;

    for (int64_t i = 0; i < n; i++) {
        iocbs[i] = (struct iocb){
            .aio_data = (uintptr_t)ops[i],
            .aio_lio_opcode = ops[i]->is_write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD,
            .aio_fildes = (uint32_t)ops[i]->fd,
            .aio_buf = (uintptr_t)ops[i]->buf,
            .aio_nbytes = ops[i]->n_bytes,
            .aio_offset = ops[i]->offset,
        };
        pointers[i] = &iocbs[i];
    }
    taken = syscall(SYS_io_submit, state->context, n, pointers);
    if (taken < 0 && errno == EINVAL) { /* some files, devices mostly, have no asynchronous transfers */
        dsc_aio_transfer(ops[0]);
        ops[0]->next = state->plain;
        state->plain = ops[0];
        return 1;
    }
    return taken < 0 ? -errno : taken;
}

static int64_t libaio_reap(void *opaque, struct dsc_aio_op **out_ops, int64_t capacity, bool wait)
{
    struct state *state = opaque;
    struct io_event events[REAP_BATCH];
    struct timespec now = {0, 0};
    int64_t most = capacity < REAP_BATCH ? capacity : REAP_BATCH;
    long n = 0;

    for (; state->plain != NULL && n < most; n++) {
        out_ops[n] = state->plain;
        state->plain = state->plain->next;
    }
    if (n > 0)
        return n;
    do
        n = syscall(SYS_io_getevents, state->context, wait ? 1L : 0L, most, events, wait ? NULL : &now);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return -errno;
    for (long i = 0; i < n; i++) {
        out_ops[i] = (struct dsc_aio_op *)(uintptr_t)events[i].data;
        out_ops[i]->res = events[i].res;
    }
    return n;
}

const struct dsc_aio_backend dsc_aio_backend_libaio = {
    .name = "libaio",
    .open = libaio_open,
    .close = libaio_close,
    .submit = libaio_submit,
    .reap = libaio_reap,
};
