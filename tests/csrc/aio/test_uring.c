/*
 * aio/uring.c when the kernel leaves transfers in the queue of its workers. In practice a rare race causes this. The
 * test causes it by giving this thread a single worker and letting that worker wait until a FIFO is opened.
 */
#include "aio/folder.h"

#include "aio/backend.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#if DSC_AIO_HAS_URING && defined(IORING_ENTER_EXT_ARG) && defined(IORING_ASYNC_CANCEL_ANY)

enum { N_WRITES = 5, WRITE_BYTES = 3000 };

struct ring {
    int fd;
    struct io_uring_params params;
    char *entries;
    char *transfers;
};

static bool ring_open(struct ring *ring)
{
    memset(ring, 0, sizeof *ring);
    ring->fd = (int)syscall(SYS_io_uring_setup, 4, &ring->params);
    if (ring->fd < 0)
        return false;
    ring->transfers = mmap(NULL, ring->params.sq_off.array + ring->params.sq_entries * sizeof(uint32_t), PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd,
                           IORING_OFF_SQ_RING);
    ring->entries = mmap(NULL, ring->params.sq_entries * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, IORING_OFF_SQES);
    return ring->transfers != MAP_FAILED && ring->entries != MAP_FAILED;
}

/* Makes the only worker open a FIFO, and so wait until somebody opens the other end. */
static bool occupy_the_worker(struct ring *ring, const char *fifo)
{
    unsigned limits[2] = {1, 0}; /* one worker for files; 0 keeps the limit for all others */
    struct io_uring_sqe *sqe = (struct io_uring_sqe *)ring->entries;

    if (syscall(SYS_io_uring_register, ring->fd, IORING_REGISTER_IOWQ_MAX_WORKERS, limits, 2) != 0)
        return false;
    *sqe = (struct io_uring_sqe){.opcode = IORING_OP_OPENAT, .flags = IOSQE_ASYNC, .fd = AT_FDCWD, .addr = (uintptr_t)fifo, .open_flags = O_RDONLY};
    *(uint32_t *)(ring->transfers + ring->params.sq_off.array) = 0;
    __atomic_fetch_add((uint32_t *)(ring->transfers + ring->params.sq_off.tail), 1, __ATOMIC_RELEASE);
    return syscall(SYS_io_uring_enter, ring->fd, 1, 0, 0, NULL, (size_t)0) == 1;
}

/*
 * Returns -1 when no worker has opened the FIFO within thirty seconds. The worker was then not occupied, and the test
 * has shown nothing.
 */
static int open_other_end(const char *fifo)
{
    for (int i = 0; i < 30000; i++) {
        int fd = open(fifo, O_WRONLY | O_NONBLOCK | O_CLOEXEC);

        if (fd >= 0 || errno != ENXIO)
            return fd;
        usleep(1000);
    }
    return -1;
}

/* Runs in a separate thread, because each thread has its own workers. */
static void *wait_for_stalled_writes(void *arg)
{
    static unsigned char data[N_WRITES * WRITE_BYTES];
    static unsigned char got[N_WRITES * WRITE_BYTES + 1];
    const char *fifo = arg;
    dsc_aio *aio = folder_engine("uring", 4096, N_WRITES);
    dsc_aio_file *file = folder_open(DSC_AIO_WRITE | DSC_AIO_CREATE | DSC_AIO_TRUNCATE, false);
    dsc_aio_id ids[N_WRITES];
    struct ring ring;
    int64_t res;
    int fd;

    folder_fill(data, sizeof data, 7);
    if (ring_open(&ring) && occupy_the_worker(&ring, fifo)) {
        for (int i = 0; i < N_WRITES; i++)
            CHECK_STATUS(dsc_aio_submit_write(aio, file, i * WRITE_BYTES, data + i * WRITE_BYTES, WRITE_BYTES, &ids[i]), DSC_OK);
        for (int i = 0; i < N_WRITES; i++) {
            CHECK_STATUS(dsc_aio_wait(aio, ids[i], &res), DSC_OK);
            CHECK_EQ(res, WRITE_BYTES);
        }
        CHECK_EQ(folder_read(got, sizeof got), sizeof data);
        CHECK_BYTES(got, data, sizeof data);
        fd = open_other_end(fifo);
        CHECK(fd >= 0);
        if (fd >= 0)
            close(fd);
    } else {
        printf("left out: this kernel has no limit of workers\n");
    }
    if (ring.fd >= 0)
        close(ring.fd);
    dsc_aio_destroy(aio);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    return NULL;
}

int main(void)
{
    char fifo[160];
    pthread_t thread;
    int err;

    if (dsc_aio_backend_probe("uring") != DSC_OK) {
        printf("left out: %s\n", dsc_last_error());
        return 0;
    }
    folder_make();
    snprintf(fifo, sizeof fifo, "%s/fifo", folder);
    CHECK_EQ(mkfifo(fifo, 0600), 0);
    TEST_CASE("the only worker is busy elsewhere");
    err = pthread_create(&thread, NULL, wait_for_stalled_writes, fifo);
    if (err == 0)
        pthread_join(thread, NULL); /* checks are counted by one thread at a time */
    CHECK_EQ(err, 0);
    unlink(fifo);
    folder_remove();
    return test_finish(__FILE__);
}

#else

int main(void)
{
    printf("left out: the headers of this kernel cannot cancel everything\n");
    return 0;
}

#endif
