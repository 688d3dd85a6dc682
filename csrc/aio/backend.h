/*
 * The interface of a backend of the I/O engine: a table of hooks that start single transfers and hand back their
 * results.
 */
#ifndef DSC_AIO_BACKEND_H
#define DSC_AIO_BACKEND_H

#include "dsc/aio.h"

/*
 * Kernel headers before 5.6 have no io_uring, or a version without needed features. Distributions and wheel builders
 * still ship such headers.
 */
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#ifdef IORING_FEAT_RW_CUR_POS
#define DSC_AIO_HAS_URING 1
#else
#define DSC_AIO_HAS_URING 0
#endif

/*
 * One transfer: the work of one preadv or pwrite. The engine owns the storage, which stays where it is until the engine
 * is destroyed.
 */
struct dsc_aio_op {
    int fd;
    bool is_write;
    int64_t offset;
    void *buf;
    size_t n_bytes;          /* > 0 */
    int64_t res;             /* written by the backend: bytes, fewer than n_bytes included, or -errno */
    struct dsc_aio_op *next; /* for the backend, from submit until the op is reaped */
};

struct dsc_aio_backend {
    const char *name;

    /*
     * Makes the state for up to config->queue_depth ops in flight; config has been checked. DSC_ENOTSUP with a sentence
     * when the kernel does not allow this backend, so that "auto" tries the next. Required.
     */
    dsc_status (*open)(const struct dsc_aio_config *config, void **out_state);

    /* Frees the state. No op is in flight. Required. */
    void (*close)(void *state);

    /*
     * Starts ops[0], ops[1], ... in that order and returns the number of ops taken, 1 to n_ops; the engine submits the
     * others again. A negative value means that none was taken. With -EAGAIN and -EBUSY the engine retries later, with
     * -EINTR at once; any other -errno is the result of ops[0]. The engine keeps no more than queue_depth ops in
     * flight. May block only as long as the system call does. Required.
     */
    int64_t (*submit)(void *state, struct dsc_aio_op *const *ops, int64_t n_ops);

    /*
     * Writes finished ops, with res set, to out_ops and returns their number, 0 to capacity. With wait it blocks until
     * an op has finished; at least one is in flight then. Goes on after EINTR. -errno means that the backend can give
     * no more results; the engine then fails for good. Required.
     */
    int64_t (*reap)(void *state, struct dsc_aio_op **out_ops, int64_t capacity, bool wait);
};

#endif
