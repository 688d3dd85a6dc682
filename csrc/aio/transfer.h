/* Makes one transfer by one system call, for backends without a kernel queue. */
#ifndef DSC_AIO_TRANSFER_H
#define DSC_AIO_TRANSFER_H

#include "aio/backend.h"

#include <errno.h>
#include <unistd.h>

static inline void dsc_aio_transfer(struct dsc_aio_op *op)
{
    ssize_t n;

    do
        n = op->is_write ? pwrite(op->fd, op->buf, op->n_bytes, op->offset)
                         : pread(op->fd, op->buf, op->n_bytes, op->offset);
    while (n < 0 && errno == EINTR);
    op->res = n < 0 ? -errno : n;
}

#endif
