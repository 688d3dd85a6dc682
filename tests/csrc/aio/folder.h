/*
 * A temporary folder for each test program, on the disk where the system puts temporary files, and helpers for the
 * files in it.
 */
#ifndef DSC_TEST_AIO_FOLDER_H
#define DSC_TEST_AIO_FOLDER_H

#include "test.h"

#include "dsc/aio.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[128];
static char path[160]; /* path of the file used by most tests */

static inline void folder_make(void)
{
    const char *parent = getenv("TMPDIR");

    snprintf(folder, sizeof folder, "%.90s/dsc_aio_XXXXXX", parent != NULL && strlen(parent) <= 90 ? parent : "/tmp");
    if (mkdtemp(folder) == NULL) {
        perror(folder);
        exit(1);
    }
    snprintf(path, sizeof path, "%s/data", folder);
}

static inline void folder_remove(void)
{
    unlink(path);
    if (rmdir(folder) != 0)
        perror(folder);
}

/* The number of file descriptors that this process has open. */
static inline int64_t folder_count_fds(void)
{
    DIR *fds = opendir("/proc/self/fd");
    int64_t n = 0;

    while (fds != NULL && readdir(fds) != NULL)
        n++;
    if (fds != NULL)
        closedir(fds);
    return n;
}

static inline void folder_fill(void *memory, size_t n_bytes, uint64_t seed)
{
    unsigned char *bytes = memory;

    for (size_t i = 0; i < n_bytes; i++) {
        if (i % 8 == 0)
            (void)test_random(&seed);
        bytes[i] = (unsigned char)(seed >> (i % 8 * 8)) ^ (unsigned char)(i * 31);
    }
}

/* Reads the whole file by plain system calls. Returns -1 when the file does not fit. */
static inline int64_t folder_read(void *memory, size_t capacity)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int64_t n_bytes = 0;

    for (ssize_t n = 1; fd >= 0 && n > 0 && n_bytes < (int64_t)capacity; n_bytes += n > 0 ? n : 0)
        n = pread(fd, (char *)memory + n_bytes, capacity - (size_t)n_bytes, n_bytes);
    if (fd < 0 || n_bytes == (int64_t)capacity)
        n_bytes = -1;
    if (fd >= 0)
        close(fd);
    return n_bytes;
}

static inline void folder_write(const void *memory, size_t n_bytes)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

    if (fd < 0 || pwrite(fd, memory, n_bytes, 0) != (ssize_t)n_bytes || close(fd) != 0) {
        perror(path);
        exit(1);
    }
}

static inline dsc_aio_file *folder_open(int flags, bool uses_direct)
{
    dsc_aio_file *file = NULL;

    if (!CHECK_STATUS(dsc_aio_open(path, flags, uses_direct, &file), DSC_OK))
        exit(test_finish(__FILE__));
    return file;
}

static inline dsc_aio *folder_engine(const char *backend, size_t block_bytes, int32_t queue_depth)
{
    struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;
    dsc_aio *aio = NULL;

    config.backend = backend;
    config.block_bytes = block_bytes;
    config.queue_depth = queue_depth;
    if (!CHECK_STATUS(dsc_aio_create(&config, &aio), DSC_OK))
        exit(test_finish(__FILE__));
    return aio;
}

#endif
