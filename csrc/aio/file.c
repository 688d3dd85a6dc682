/* Opens files with and without O_DIRECT, asks the file system for its alignment, and describes failures. */
#include "aio/file.h"

#include "base/fail.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#define MAX_PATH_BYTES 4096
#define LEAST_ALIGNMENT ((size_t)4096) /* suffices for disks and file systems; larger if pages are larger */

static _Thread_local char failed_path[MAX_PATH_BYTES];
static _Thread_local struct dsc_aio_failure last_failure;

void dsc_aio_last_failure(struct dsc_aio_failure *out_failure)
{
    *out_failure = last_failure;
    out_failure->path = failed_path;
    if (out_failure->verb == NULL)
        out_failure->verb = "";
}

static const char *text_of(int err, char *buf, size_t n_bytes)
{
    return err == ENODATA ? "the file ends there"
                          : strerror_r(err, buf, n_bytes); /* the GNU variant, which returns the text */
}

dsc_status dsc_aio_fail(const struct dsc_aio_failure *failure)
{
    char text[96];
    char where[128] = "";
    char others[64] = "";

    snprintf(failed_path, sizeof failed_path, "%s", failure->path);
    last_failure = *failure;
    last_failure.path = failed_path;
    if (failure->offset >= 0)
        snprintf(where, sizeof where, " %lld bytes at offset %lld of", (long long)failure->n_bytes,
                 (long long)failure->offset);
    if (failure->n_others > 0)
        snprintf(others, sizeof others, "; %lld other requests failed too", (long long)failure->n_others);
    return dsc_fail(DSC_EIO, "%s%s %.255s: %s (errno %d)%s", failure->verb, where, failure->path,
                    text_of(failure->err, text, sizeof text), (int)failure->err, others);
}

static dsc_status fail_file(const char *verb, const char *path, int err)
{
    return dsc_aio_fail(
        &(struct dsc_aio_failure){.path = path, .verb = verb, .offset = -1, .n_bytes = -1, .at = -1, .err = err});
}

size_t dsc_aio_alignment(void)
{
    const long page = sysconf(_SC_PAGESIZE);

    return page > (long)LEAST_ALIGNMENT ? (size_t)page : LEAST_ALIGNMENT;
}

static int open_again(const char *path, int flags)
{
    int fd;

    do
        fd = open(path, flags, 0666);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/*
 * [Note: Direct transfers and fork]
 *
 * After fork() parent and child share pages until either writes; the writer gets a copy. Before Linux 6.3 this was true
 * even while a disk was reading into the page: if the parent wrote to another byte of such a page, it continued with
 * the copy, and the disk's data went to the other page and was lost. (From 6.3 on the kernel holds such pages in a way
 * that fork() sees, and gives the child the copy.)
 *
 * Nothing is lost if nobody else writes to the pages of a transfer. A caller that waits for a transfer does not write
 * to the transfer's memory, but may write beside it. So before 6.3 direct transfers cover only whole pages of memory,
 * and other transfers go through the engine's ring. Children do not get the ring (MADV_DONTFORK): they have no use for
 * it, and the parent needs no copies.
 */
#ifdef STATX_DIOALIGN
static bool fork_minds_direct_transfers(void)
{
    struct utsname system;
    int major = 0;
    int minor = 0;

    return uname(&system) == 0 && sscanf(system.release, "%d.%d", &major, &minor) == 2 &&
           (major > 6 || (major == 6 && minor >= 3));
}
#endif

/* Asks which alignment O_DIRECT needs here for addresses and offsets; false when the file system has no O_DIRECT. */
static bool ask_direct(int fd, size_t *out_memory_align)
{
    const size_t page = dsc_aio_alignment();

    *out_memory_align = page;
#ifdef STATX_DIOALIGN
    struct statx answer;

    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &answer) == 0 && (answer.stx_mask & STATX_DIOALIGN) != 0) {
        size_t memory_align = answer.stx_dio_mem_align;

        if (memory_align == 0 || answer.stx_dio_offset_align == 0 || answer.stx_dio_offset_align > page)
            return false;
        if (memory_align < page && (memory_align & (memory_align - 1)) == 0 && fork_minds_direct_transfers())
            *out_memory_align = memory_align;
    }
#else
    (void)fd;
#endif
    return true;
}

/* Adds the descriptor with O_DIRECT, or the note that says why not. */
static dsc_status add_direct(dsc_aio_file *file, int access)
{
    struct stat buffered;
    struct stat direct;
    size_t memory_align;
    int fd = open_again(file->path, access | O_DIRECT | O_CLOEXEC);

    if (fd < 0) {
        char text[96];

        snprintf(file->note, sizeof file->note, "O_DIRECT was refused: %s", strerror_r(errno, text, sizeof text));
        return DSC_OK;
    }
    if (fstat(file->fd, &buffered) != 0 || fstat(fd, &direct) != 0) {
        int err = errno;

        close(fd);
        return fail_file("stat", file->path, err);
    }
    if (buffered.st_dev != direct.st_dev ||
        buffered.st_ino != direct.st_ino) { /* the path was replaced by another file between the two calls */
        close(fd);
        return fail_file("open", file->path, ESTALE);
    }
    if (!ask_direct(fd, &memory_align)) {
        close(fd);
        snprintf(file->note, sizeof file->note, "this file system has no O_DIRECT on pages of %zu bytes",
                 dsc_aio_alignment());
        return DSC_OK;
    }
    file->direct_fd = fd;
    atomic_init(&file->memory_align, memory_align);
    atomic_init(&file->is_direct, true);
    /* Only heads and tails are read there; reading ahead would fetch bytes that are read directly anyway. */
    (void)posix_fadvise(file->fd, 0, 0, POSIX_FADV_RANDOM);
    return DSC_OK;
}

dsc_status dsc_aio_open(const char *path, int flags, bool uses_direct, dsc_aio_file **out_file)
{
    const int all = DSC_AIO_READ | DSC_AIO_WRITE | DSC_AIO_CREATE | DSC_AIO_TRUNCATE | DSC_AIO_EXCLUSIVE;
    const int direction = flags & (DSC_AIO_READ | DSC_AIO_WRITE);
    const int access = direction == DSC_AIO_READ ? O_RDONLY : direction == DSC_AIO_WRITE ? O_WRONLY : O_RDWR;
    struct dsc_process process;
    dsc_aio_file *file;
    dsc_status status;

    if (path == NULL || out_file == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", path == NULL ? "path" : "out_file");
    if (direction == 0 || (flags & ~all) != 0)
        return dsc_fail(DSC_EINVAL,
                        "flags are %d, must include DSC_AIO_READ or DSC_AIO_WRITE and nothing that is no DSC_AIO_ flag",
                        flags);
    if ((flags & DSC_AIO_EXCLUSIVE) != 0 && (flags & DSC_AIO_CREATE) == 0)
        return dsc_fail(DSC_EINVAL, "DSC_AIO_EXCLUSIVE needs DSC_AIO_CREATE");
    if ((flags & DSC_AIO_TRUNCATE) != 0 && (flags & DSC_AIO_WRITE) == 0)
        return dsc_fail(DSC_EINVAL, "DSC_AIO_TRUNCATE needs DSC_AIO_WRITE");
    if (strlen(path) >= MAX_PATH_BYTES)
        return dsc_fail(DSC_EINVAL, "path has %zu bytes, must have less than %d", strlen(path), MAX_PATH_BYTES);

    DSC_TRY(dsc_process_note(&process));
    file = calloc(1, sizeof *file);
    if (file == NULL || (file->path = strdup(path)) == NULL) {
        free(file);
        return dsc_fail(DSC_ENOMEM, "no memory to open %.255s", path);
    }
    file->process = process;
    file->flags = flags;
    file->direct_fd = -1;
    atomic_init(&file->memory_align, 1);
    file->fd =
        open_again(path, access | O_CLOEXEC | (flags & DSC_AIO_CREATE ? O_CREAT : 0) |
                             (flags & DSC_AIO_TRUNCATE ? O_TRUNC : 0) | (flags & DSC_AIO_EXCLUSIVE ? O_EXCL : 0));
    status = file->fd < 0 ? fail_file("open", path, errno) : DSC_OK;
    if (status == DSC_OK &&
        lseek(file->fd, 0, SEEK_CUR) < 0) /* a pipe has no offsets, and some backends would wait for ever on a pipe */
        status = fail_file("open", path, errno);
    if (status == DSC_OK && uses_direct)
        status = add_direct(file, access);
    if (status != DSC_OK) {
        if (file->fd >= 0)
            close(file->fd);
        free(file->path);
        free(file);
        return status;
    }
    *out_file = file;
    return DSC_OK;
}

dsc_status dsc_aio_close(dsc_aio_file *file)
{
    dsc_status status = DSC_OK;
    int64_t n_requests;

    if (file == NULL || !dsc_process_is_this(&file->process))
        return DSC_OK;
    n_requests = atomic_load(&file->n_requests);
    if (n_requests > 0)
        return dsc_fail(DSC_ESTATE, "close %.255s: %lld requests on it have not been waited for", file->path,
                        (long long)n_requests);
    /* On Linux the descriptor is closed after EINTR too, and EINTR is not a failure of a write. */
    if (file->direct_fd >= 0 && close(file->direct_fd) != 0 && errno != EINTR)
        status = fail_file("close", file->path, errno);
    if (close(file->fd) != 0 && errno != EINTR)
        status = fail_file("close", file->path, errno);
    free(file->path);
    free(file);
    return status;
}

dsc_status dsc_aio_file_bytes(const dsc_aio_file *file, int64_t *out_n_bytes)
{
    struct stat found;

    if (file == NULL || out_n_bytes == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", file == NULL ? "file" : "out_n_bytes");
    if (fstat(file->fd, &found) != 0)
        return fail_file("stat", file->path, errno);
    if (S_ISBLK(found.st_mode)) {                 /* stat would give the size of the device node */
        off_t end = lseek(file->fd, 0, SEEK_END); /* no transfer of ours uses the file position */

        if (end < 0)
            return fail_file("seek", file->path, errno);
        *out_n_bytes = end;
        return DSC_OK;
    }
    *out_n_bytes = found.st_size;
    return DSC_OK;
}

dsc_status dsc_aio_sync(dsc_aio_file *file)
{
    int failed;

    if (file == NULL)
        return dsc_fail(DSC_EINVAL, "file is NULL");
    do
        failed = fsync(file->fd);
    while (failed != 0 && errno == EINTR);
    return failed != 0 ? fail_file("sync", file->path, errno) : DSC_OK;
}

bool dsc_aio_file_is_direct(const dsc_aio_file *file)
{
    return atomic_load(&file->is_direct);
}

const char *dsc_aio_file_note(const dsc_aio_file *file)
{
    return file->direct_fd >= 0 && !atomic_load(&file->is_direct)
               ? "O_DIRECT was refused: the file system took an aligned transfer for invalid"
               : file->note;
}

/* fallocate without a mode never takes bytes away, even while others write; ftruncate could. */
int dsc_aio_file_reserve(dsc_aio_file *file, int64_t offset, int64_t n_bytes)
{
    int64_t known = atomic_load(&file->n_bytes_known);
    struct stat found;

    if (offset + n_bytes <= known)
        return 0;
    if (fstat(file->fd, &found) != 0 || !S_ISREG(found.st_mode))
        return 0;
    if (offset + n_bytes > found.st_size) {
        int64_t begin = offset > found.st_size ? offset : found.st_size;

        if (fallocate(file->fd, 0, begin, offset + n_bytes - begin) != 0)
            return errno == ENOSPC || errno == EDQUOT || errno == EFBIG ? errno : 0;
        found.st_size = offset + n_bytes;
    }
    while (known < found.st_size && !atomic_compare_exchange_weak(&file->n_bytes_known, &known, found.st_size))
        ;
    return 0;
}

void dsc_aio_file_refused(dsc_aio_file *file, bool was_page_aligned)
{
    if (was_page_aligned)
        atomic_store(&file->is_direct, false);
    else
        atomic_store(&file->memory_align, dsc_aio_alignment());
}
