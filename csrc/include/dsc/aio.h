/*
 * Asynchronous file I/O: requests of any size, offset and alignment, at the disk's speed, with every transfer's result
 * checked.
 *
 * A *file* is opened once and may serve any number of engines. An *engine* takes *requests* (read or write so many
 * bytes at an offset), cuts them into *blocks*, keeps up to queue_depth blocks in flight on its *backend* (io_uring,
 * Linux AIO, threads, or plain system calls), continues short transfers, and reports how each request ended. Blocks are
 * started inside submit, poll and wait only.
 *
 *   dsc_aio_open -> file      dsc_aio_create -> engine      dsc_aio_submit_read(engine, file, ...) -> id ...
 * dsc_aio_wait(engine, id) -> bytes
 *
 * O_DIRECT. A file opened with uses_direct has two descriptors, one with O_DIRECT and one without. A block goes
 * directly and without a copy if it is aligned both in the file (dsc_aio_alignment) and in memory (as the file system
 * requires, often 4 or 512 bytes). A block that is aligned in the file but not in memory goes directly through a small
 * ring of aligned buffers. The unaligned head and tail of a write go through the page cache, never through
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
 * DSC_EINVAL names the field that is out of range. DSC_ENOTFOUND: no backend of that name. DSC_ENOTSUP: the kernel does
 * not allow the backend, and the sentence says why. Takes tens of microseconds; the ring of buffers is allocated when a
 * request first needs it.
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
 * For tests: adds a backend that is not in the library. Engines made from now on find the backend by its name; with
 * is_auto, "auto" tries it before all others. NULL removes it. csrc/aio/backend.h defines a backend. The backend is
 * borrowed, also by the engines that use it. Any thread may call this, but only one at a time.
 */
struct dsc_aio_backend;
DSC_API void dsc_aio_plug_backend(const struct dsc_aio_backend *backend, bool is_auto);

/*
 * Alignment in bytes that always allows direct transfers, for offsets and buffers. It is a power of two, at least 4096,
 * and at least the page size of this system, so that no page of a file is reached both directly and through the page
 * cache.
 */
DSC_API size_t dsc_aio_alignment(void);

/*
 * Opens path; flags are DSC_AIO_* and include READ or WRITE. uses_direct asks for O_DIRECT; if the file system refuses
 * O_DIRECT, the file is opened without it. Neither descriptor is inherited across exec. Failures are DSC_EIO with the
 * text of errno; a file without offsets, such as a pipe, fails with ESPIPE.
 */
DSC_API dsc_status dsc_aio_open(const char *path, int flags, bool uses_direct, dsc_aio_file **out_file);

/*
 * Closes and frees the file. DSC_EIO is an error of earlier writes that the kernel reports only now; the file is closed
 * all the same. DSC_ESTATE, with nothing closed, while a request on the file has not been waited for. NULL is fine.
 * Does not sync. Does nothing in a forked process, whose descriptors stay open until it ends.
 */
DSC_API dsc_status dsc_aio_close(dsc_aio_file *file);

/* Bytes that the file holds now (a block device: its capacity). */
DSC_API dsc_status dsc_aio_file_bytes(const dsc_aio_file *file, int64_t *out_n_bytes);

/* fsync: all requests that have been waited for are on the medium when this returns DSC_OK. Blocks. */
DSC_API dsc_status dsc_aio_sync(dsc_aio_file *file);

/*
 * Whether aligned blocks go directly. May turn from true to false when the file system refuses the first aligned block.
 */
DSC_API bool dsc_aio_file_is_direct(const dsc_aio_file *file);

/*
 * A sentence that says why a file opened with uses_direct is not direct. "" if the file is direct, or was opened
 * without uses_direct. The string lives as long as the file.
 */
DSC_API const char *dsc_aio_file_note(const dsc_aio_file *file);

/*
 * Starts a transfer of n_bytes (0 is fine) between buf and the file at offset.
 *
 * file and buf are kept until the request has been waited for. Returns without waiting for the transfer, unless the
 * kernel transfers at once: "libaio" does so through the page cache, "sync" always. Any number of requests may be
 * pending. A write past the end of a direct file reserves its space first. So a lack of space is found early, and the
 * file may have its new length before it has the data.
 *
 * Nothing was started if the call returns DSC_EINVAL (the file is not open for this transfer, negative offset, NULL),
 * DSC_EOVERFLOW (offset + n_bytes), DSC_ENOMEM or DSC_ESTATE (the engine has given up, or the engine or the file
 * belongs to another process). dsc_aio_wait reports failures of the transfer itself.
 */
DSC_API dsc_status dsc_aio_submit_read(dsc_aio *aio, dsc_aio_file *file, int64_t offset, void *buf, size_t n_bytes,
                                       dsc_aio_id *out_id);
DSC_API dsc_status dsc_aio_submit_write(dsc_aio *aio, dsc_aio_file *file, int64_t offset, const void *buf,
                                        size_t n_bytes, dsc_aio_id *out_id);

/*
 * Waits for one request and forgets it. *out_res (may be NULL) is always written: the bytes transferred, or -errno. An
 * incomplete write is a failure. A read that meets the end of the file succeeds with the bytes before that end, and the
 * caller decides whether they are enough.
 *
 * DSC_EIO: the request failed; dsc_last_error has the file, offset, length and errno, and dsc_aio_last_failure has the
 * same in fields. After a failed read the contents of buf are undefined. A cancelled request fails with ECANCELED.
 * Other requests are not affected. DSC_ENOTFOUND: no such request, or it has been waited for already. *out_res is
 * -ENOENT for DSC_ENOTFOUND, and for DSC_ESTATE in a forked process.
 */
DSC_API dsc_status dsc_aio_wait(dsc_aio *aio, dsc_aio_id id, int64_t *out_res);

/*
 * Waits for all pending requests and forgets them. *out_n_done (may be NULL) is always written: the number of requests
 * that were transferred whole. DSC_EIO if a request failed; the sentence describes the first failed request, in order
 * of submission, and gives the number of other failures. A read that met the end of its file counts as a failure with
 * ENODATA, because lengths are not reported here. Cancelled requests count neither as done nor as failed.
 */
DSC_API dsc_status dsc_aio_wait_all(dsc_aio *aio, int64_t *out_n_done);

/*
 * Starts and finishes blocks as far as is possible without blocking. *out_is_done: dsc_aio_wait(id) would return at
 * once. DSC_ENOTFOUND: no such request.
 */
DSC_API dsc_status dsc_aio_poll(dsc_aio *aio, dsc_aio_id id, bool *out_is_done);

/*
 * Cancels a request: its blocks that have not been started never will be. The caller must still wait for the request,
 * and buf is in use until then. The request ends with ECANCELED, or as usual if all its blocks had been started.
 * DSC_ENOTFOUND: no such request.
 */
DSC_API dsc_status dsc_aio_cancel(dsc_aio *aio, dsc_aio_id id);

/*
 * Whether the backend itself has failed, because its descriptor was closed or the kernel refuses to wait. All requests
 * have then failed, and new requests return DSC_ESTATE. The kernel may still use the memory of requests that were in
 * flight, so that memory must stay allocated until the process ends, also after destroy.
 */
DSC_API bool dsc_aio_has_given_up(const dsc_aio *aio);

/* Number of requests that have not been waited for, finished or not. */
DSC_API int64_t dsc_aio_pending(const dsc_aio *aio);

/* The last DSC_EIO of this module in this thread, in fields. */
struct dsc_aio_failure {
    const char *path; /* borrowed: until the next failure in this thread; "" before any */
    const char *verb; /* "read", "write", "open", "sync", ...; static */
    int64_t offset;   /* of the request; -1 for a failure without a request, as in open */
    int64_t n_bytes;  /* of the request; -1 without a request */
    int64_t at;       /* the offset of the block that failed; -1 if no block failed */
    int32_t err;      /* errno; ENODATA for the end of the file */
    int64_t n_others; /* failed requests of the same dsc_aio_wait_all that are not described */
};

DSC_API void dsc_aio_last_failure(struct dsc_aio_failure *out_failure);

/*
 * A pool of page-aligned buffers that are locked in memory: they meet every file system's alignment for O_DIRECT, and a
 * device can read and write them. The size of a buffer is rounded up to whole pages, not to a power of two. A pool
 * belongs to one thread at a time. A forked process has a copy of the pool and its buffers, as of all memory; the
 * copies are not locked.
 */
typedef struct dsc_aio_pool dsc_aio_pool;

/* budget_bytes >= 0: the most bytes that the pool holds at once, with buffers that were given back. */
DSC_API dsc_status dsc_aio_pool_create(int64_t budget_bytes, dsc_aio_pool **out_pool);

/* Frees all buffers, also buffers that were not given back. NULL is fine. */
DSC_API void dsc_aio_pool_destroy(dsc_aio_pool *pool);

/*
 * Hands out a buffer of n_bytes (> 0). A new buffer is zeroed; a buffer that was in use before has its old contents.
 * *out_is_locked (may be NULL): false if the kernel refused to lock the buffer (RLIMIT_MEMLOCK); the buffer can be used
 * all the same. DSC_ENOMEM, with the numbers, if the buffer and the buffers in use exceed the budget.
 */
DSC_API dsc_status dsc_aio_pool_take(dsc_aio_pool *pool, size_t n_bytes, void **out_buf, bool *out_is_locked);

/*
 * Takes a buffer back and keeps it for the next request of its size. DSC_EINVAL if buf is not of this pool or not in
 * use.
 */
DSC_API dsc_status dsc_aio_pool_give(dsc_aio_pool *pool, void *buf);

/* Bytes in use, and bytes held (in use or kept), both in whole pages. */
DSC_API void dsc_aio_pool_bytes(const dsc_aio_pool *pool, int64_t *out_used_bytes, int64_t *out_held_bytes);

#ifdef __cplusplus
}
#endif
#endif
