/*
 * Asynchronous file I/O: requests of any size, offset and alignment, at the disk's speed, with every transfer's result
 * checked.
 *
 * A *file* is opened once and may serve any number of engines. An *engine* takes *requests* (read or write so many
 * bytes at an offset), cuts them into *blocks*, keeps up to queue_depth blocks in flight on its *backend* (io_uring,
 * Linux AIO, threads, or plain system calls), continues short transfers, and reports how each request ended. Nothing is
 * done behind the caller's back: blocks are started inside submit, poll and wait only.
 *
 *   dsc_aio_open -> file      dsc_aio_create -> engine      dsc_aio_submit_read(engine, file, ...) -> id ...
 * dsc_aio_wait(engine, id) -> bytes
 *
 * O_DIRECT. A file opened with uses_direct has two descriptors, one with O_DIRECT and one without. Blocks that are
 * aligned, in the file (dsc_aio_alignment) and in memory (as the file system asks for, often 4 or 512 bytes), go
 * directly and without a copy. Where memory is not aligned for the place in the file, blocks go directly through a
 * small ring of aligned buffers. The unaligned head and tail of a write go through the page cache, never through
 * read-modify-write: requests that share a page do not harm one another. A file system that refuses O_DIRECT is served
 * through the page cache, and dsc_aio_file_note says so.
 *
 * An engine belongs to one thread at a time. Files may be shared by engines in several threads; requests in flight must
 * not overlap unless all of them read.
 *
 * Engines and files belong to the process that made them (dsc/process.h). In a child of fork(), destroy and close do
 * nothing, and calls that submit, wait, poll or cancel are DSC_ESTATE. Requests that were in flight go on in the
 * parent, into the parent's memory; the contents of the child's copy of that memory are undefined.
 */
#ifndef DSC_AIO_H
#define DSC_AIO_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dsc_aio dsc_aio;
typedef struct dsc_aio_file dsc_aio_file;

/* Names a request of one engine from its submission until it has been waited for. Never 0. */
typedef uint64_t dsc_aio_id;

enum dsc_aio_flag {
    DSC_AIO_READ = 1,
    DSC_AIO_WRITE = 2,
    DSC_AIO_CREATE = 4,    /* create the file (mode 0666 less the umask) when it does not exist */
    DSC_AIO_TRUNCATE = 8,  /* to nothing */
    DSC_AIO_EXCLUSIVE = 16 /* with CREATE: fail when the file exists */
};

struct dsc_aio_config {
    uint32_t size;       /* sizeof(struct dsc_aio_config) */
    const char *backend; /* borrowed: "uring", "libaio", "threads", "sync"; NULL or "auto": the first of these that this
                            kernel allows */
    size_t block_bytes;  /* 1 to 1 GiB; the longest single transfer. Rounded up to a multiple of dsc_aio_alignment */
    int32_t queue_depth; /* 1 to 4096; blocks in flight */
    int32_t n_threads;  /* 1 to 256; "threads" runs up to eight workers for each, and never more than queue_depth. Other
                           backends start none */
    bool single_submit; /* hand blocks to the kernel one by one */
    bool overlap_events; /* false: a full batch of blocks is awaited before the next is started */
    bool uses_direct;    /* false: this engine goes through the page cache even if the file allows O_DIRECT */
};

#define DSC_AIO_CONFIG_INIT                                                            \
    {                                                                                  \
        sizeof(struct dsc_aio_config), NULL, (size_t)1 << 20, 32, 1, false, true, true \
    }

/*
 * DSC_EINVAL names the field that is out of range; DSC_ENOTFOUND: no backend of that name; DSC_ENOTSUP: the kernel does
 * not allow that one, and why. Costs tens of microseconds; the ring of buffers is allocated when a request first needs
 * it.
 */
DSC_API dsc_status dsc_aio_create(const struct dsc_aio_config *config, dsc_aio **out_aio);

/*
 * Cancels blocks that have not been started, waits for the others, and forgets all requests. NULL is fine. Does nothing
 * in a forked process.
 */
DSC_API void dsc_aio_destroy(dsc_aio *aio);

/* The backend in use, never "auto". Static storage. */
DSC_API const char *dsc_aio_backend_name(const dsc_aio *aio);

/*
 * The backends of this build, in the order that "auto" tries them; NULL from the first index past the end. Static
 * storage.
 */
DSC_API const char *dsc_aio_backend_at(int32_t index);

/* DSC_OK when this kernel lets the backend work now; else as dsc_aio_create. */
DSC_API dsc_status dsc_aio_backend_probe(const char *name);

/*
 * For tests. Engines that are made from now on find this backend, which is none of the library's, by its name, and with
 * is_auto "auto" takes it before all others; NULL: no longer. csrc/aio/backend.h defines a backend. Borrowed, also by
 * the engines that use it. Any thread may call this; no two may do so at a time.
 */
struct dsc_aio_backend;
DSC_API void dsc_aio_plug_backend(const struct dsc_aio_backend *backend, bool is_auto);

/*
 * Bytes. Offsets and buffers that are multiples of it always go directly: a page of this system, so that no page of a
 * file is reached both directly and through the page cache, and at least 4096. A power of two.
 */
DSC_API size_t dsc_aio_alignment(void);

/*
 * Opens path; flags are DSC_AIO_* and include READ or WRITE. uses_direct asks for O_DIRECT; where that is refused the
 * file is open all the same. Neither descriptor is inherited across exec. DSC_EIO with the errno's text; a file without
 * offsets, as a pipe, is ESPIPE.
 */
DSC_API dsc_status dsc_aio_open(const char *path, int flags, bool uses_direct, dsc_aio_file **out_file);

/*
 * Closes and frees the file, also when it reports DSC_EIO (an error of earlier writes that the kernel reports now).
 * DSC_ESTATE, with nothing closed, while a request on it has not been waited for. NULL is fine. Does not sync. Nothing
 * in a forked process, where descriptors stay until it ends.
 */
DSC_API dsc_status dsc_aio_close(dsc_aio_file *file);

/* Bytes that the file holds now (a block device: its capacity). */
DSC_API dsc_status dsc_aio_file_bytes(const dsc_aio_file *file, int64_t *out_n_bytes);

/* fsync: all requests that have been waited for are on the medium when this returns DSC_OK. Blocks. */
DSC_API dsc_status dsc_aio_sync(dsc_aio_file *file);

/* Whether aligned blocks go directly. May turn from true to false when the file system refuses the first of them. */
DSC_API bool dsc_aio_file_is_direct(const dsc_aio_file *file);

/*
 * Why a file that was opened with uses_direct is not direct, as a sentence; "" when it is, or was not to be. Borrowed:
 * lives as long as the file.
 */
DSC_API const char *dsc_aio_file_note(const dsc_aio_file *file);

/*
 * Starts a transfer of n_bytes (0 is fine) between buf and the file at offset.
 *
 * file and buf are kept until the request has been waited for. Returns without waiting for the transfer, unless the
 * kernel transfers at once: through the page cache under "libaio", always under "sync". Any number of requests may be
 * pending. A write past the end of a direct file reserves its space first, so the file may come to have its new length
 * before the data, and a lack of space shows early.
 *
 * DSC_EINVAL (the file is not open for that, negative offset, NULL), DSC_EOVERFLOW (offset + n_bytes), DSC_ENOMEM,
 * DSC_ESTATE (the engine has given up, or engine or file are another process's): nothing was started. Failures of the
 * transfer itself are reported by wait.
 */
DSC_API dsc_status dsc_aio_submit_read(dsc_aio *aio, dsc_aio_file *file, int64_t offset, void *buf, size_t n_bytes,
                                       dsc_aio_id *out_id);
DSC_API dsc_status dsc_aio_submit_write(dsc_aio *aio, dsc_aio_file *file, int64_t offset, const void *buf,
                                        size_t n_bytes, dsc_aio_id *out_id);

/*
 * Waits for one request and forgets it. *out_res (may be NULL) is always written: the bytes transferred, or -errno. A
 * write that is not complete is a failure; a read that meets the end of the file succeeds with fewer bytes, those up to
 * the first that the file did not have, and the caller decides.
 *
 * DSC_EIO: it failed; dsc_last_error says which file, offset, length and errno, dsc_aio_last_failure the same in
 * fields. After a failed read the contents of buf are undefined. A cancelled request fails with ECANCELED. Other
 * requests are not affected. DSC_ENOTFOUND: no such request (waited for already), *out_res is -ENOENT then, as with
 * DSC_ESTATE in a forked process.
 */
DSC_API dsc_status dsc_aio_wait(dsc_aio *aio, dsc_aio_id id, int64_t *out_res);

/*
 * Waits for all pending requests and forgets them. *out_n_done (may be NULL) is always written: how many of them were
 * transferred whole; 0 when nothing was pending. DSC_EIO when one or more failed, with the sentence of the first that
 * was submitted and the number of others. As lengths are not reported here, a read that met the end of its file is a
 * failure too, with ENODATA. Cancelled requests count neither as done nor as failed.
 */
DSC_API dsc_status dsc_aio_wait_all(dsc_aio *aio, int64_t *out_n_done);

/*
 * Starts and finishes blocks as far as that goes without blocking. *out_is_done: dsc_aio_wait(id) would return at once.
 * DSC_ENOTFOUND: no such request.
 */
DSC_API dsc_status dsc_aio_poll(dsc_aio *aio, dsc_aio_id id, bool *out_is_done);

/*
 * Asks that a request be given up: blocks that have not been started never will be. It still has to be waited for (buf
 * is in use until then) and ends with ECANCELED, or as if nothing had been asked when all its blocks had been started.
 * DSC_ENOTFOUND: no such request.
 */
DSC_API dsc_status dsc_aio_cancel(dsc_aio *aio, dsc_aio_id id);

/*
 * Whether the backend has failed as such (its descriptor was closed by somebody, the kernel refuses to wait): all
 * requests have failed then, more are DSC_ESTATE, and the kernel may still use the memory of requests that were in
 * flight. That memory must stay as it is until the process ends, also after destroy.
 */
DSC_API bool dsc_aio_has_given_up(const dsc_aio *aio);

/* Requests that have not been waited for, finished ones among them. */
DSC_API int64_t dsc_aio_pending(const dsc_aio *aio);

/* The last DSC_EIO of this module in this thread, in fields. */
struct dsc_aio_failure {
    const char *path; /* borrowed: until the next failure in this thread; "" before any */
    const char *verb; /* "read", "write", "open", "sync", ...; static */
    int64_t offset;   /* the request's; -1 for a failure without a request, as in open */
    int64_t n_bytes;  /* the request's; -1 likewise */
    int64_t at;       /* the offset of the block that failed; -1 where there is none */
    int32_t err;      /* errno; ENODATA for the end of the file */
    int64_t n_others; /* failed requests of the same dsc_aio_wait_all that are not described */
};

DSC_API void dsc_aio_last_failure(struct dsc_aio_failure *out_failure);

/*
 * A pool of page-aligned buffers that are locked in memory: they meet every file system's alignment for O_DIRECT, and a
 * device can read and write them. Buffers have the size asked for, rounded up to pages and not to a power of two. A
 * pool belongs to one thread at a time. A forked process has a copy of the pool and its buffers, as of other memory;
 * its copies are not locked.
 */
typedef struct dsc_aio_pool dsc_aio_pool;

/* budget_bytes >= 0: the most that the pool holds at once, buffers that were given back among them. */
DSC_API dsc_status dsc_aio_pool_create(int64_t budget_bytes, dsc_aio_pool **out_pool);

/* Frees all buffers, also buffers that were not given back. NULL is fine. */
DSC_API void dsc_aio_pool_destroy(dsc_aio_pool *pool);

/*
 * Hands out n_bytes (> 0), zeroed the first time and as they were left when the buffer has been in use before.
 * *out_is_locked (may be NULL): false when the kernel did not let it be locked (RLIMIT_MEMLOCK), which costs nothing
 * but the promise. DSC_ENOMEM, with the numbers, when it does not fit the budget beside the buffers in use.
 */
DSC_API dsc_status dsc_aio_pool_take(dsc_aio_pool *pool, size_t n_bytes, void **out_buf, bool *out_is_locked);

/* Takes a buffer back, and keeps it for the next of its size. DSC_EINVAL when buf is not the pool's, or not in use. */
DSC_API dsc_status dsc_aio_pool_give(dsc_aio_pool *pool, void *buf);

/* Bytes in use, and bytes held (in use or kept), both in whole pages. */
DSC_API void dsc_aio_pool_bytes(const dsc_aio_pool *pool, int64_t *out_used_bytes, int64_t *out_held_bytes);

#ifdef __cplusplus
}
#endif
#endif
