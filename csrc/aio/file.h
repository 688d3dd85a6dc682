/* An open file as the engine sees it, and how the I/O module reports an errno. */
#ifndef DSC_AIO_FILE_H
#define DSC_AIO_FILE_H

#include "dsc/aio.h"
#include "dsc/process.h"

#include <stdatomic.h>

struct dsc_aio_file {
    struct dsc_process process;
    char *path;
    int flags;      /* DSC_AIO_* */
    int fd;         /* through the page cache */
    int direct_fd;  /* with O_DIRECT; -1: there is none */
    char note[192]; /* why there is no such descriptor; complete before the file is handed out */
    atomic_bool is_direct;
    atomic_size_t memory_align;         /* of addresses, for O_DIRECT; a power of two */
    atomic_int_least64_t n_bytes_known; /* the file is at least as long */
    atomic_int_least64_t n_requests;    /* that have not been waited for */
};

/*
 * Reserves space for a range. Returns 0, or the errno of a lack of space. Block devices, pipes and some file systems
 * cannot reserve space; that is not a failure.
 */
int dsc_aio_file_reserve(dsc_aio_file *file, int64_t offset, int64_t n_bytes);

/*
 * Notes that a direct transfer failed with EINVAL. First requires stricter alignment of memory; if memory was
 * page-aligned already, gives up O_DIRECT.
 */
void dsc_aio_file_refused(dsc_aio_file *file, bool was_page_aligned);

/*
 * Records the failure for dsc_aio_last_failure and dsc_last_error. failure->path need not outlive the call. Returns
 * DSC_EIO.
 */
dsc_status dsc_aio_fail(const struct dsc_aio_failure *failure);

#endif
