/*
 * aio/engine.c over every backend that this kernel allows, and over the fault backend with faults from which the engine
 * has to recover. The test reads files by plain system calls to compare them.
 */
#include "aio/folder.h"

#include "aio/fault.c"

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

#define CAPACITY ((size_t)3 << 20)
#define CREATE (DSC_AIO_READ | DSC_AIO_WRITE | DSC_AIO_CREATE | DSC_AIO_TRUNCATE)
#define GUARD 0xa5

static void test_config(void)
{
    static const struct {
        const char *word;
        struct dsc_aio_config config;
    } bad[] = {
        {"config.size", {3, NULL, 4096, 1, 1, false, true, true}},
        {"block_bytes", {sizeof(struct dsc_aio_config), NULL, 0, 1, 1, false, true, true}},
        {"block_bytes", {sizeof(struct dsc_aio_config), NULL, ((size_t)1 << 30) + 1, 1, 1, false, true, true}},
        {"queue_depth", {sizeof(struct dsc_aio_config), NULL, 4096, 0, 1, false, true, true}},
        {"queue_depth", {sizeof(struct dsc_aio_config), NULL, 4096, 4097, 1, false, true, true}},
        {"n_threads", {sizeof(struct dsc_aio_config), NULL, 4096, 1, 0, false, true, true}},
        {"n_threads", {sizeof(struct dsc_aio_config), NULL, 4096, 1, 257, false, true, true}},
    };
    struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;
    dsc_aio *aio = NULL;

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK_ERROR(dsc_aio_create(&bad[i].config, &aio), DSC_EINVAL, bad[i].word);
    CHECK_ERROR(dsc_aio_create(NULL, &aio), DSC_EINVAL, "config");
    CHECK_ERROR(dsc_aio_create(&config, NULL), DSC_EINVAL, "out_aio");
    config.backend = "tape";
    CHECK_ERROR(dsc_aio_create(&config, &aio), DSC_ENOTFOUND, "tape");
    CHECK(strstr(dsc_last_error(), "sync") != NULL);
    CHECK(aio == NULL);
    config.backend = "auto";
    CHECK_STATUS(dsc_aio_create(&config, &aio), DSC_OK);
    CHECK(strcmp(dsc_aio_backend_name(aio), "auto") != 0);
    dsc_aio_destroy(aio);
    dsc_aio_destroy(NULL);
    CHECK(dsc_aio_backend_at(-1) == NULL);
    CHECK_STATUS(dsc_aio_backend_probe("sync"), DSC_OK);
    CHECK_ERROR(dsc_aio_backend_probe("tape"), DSC_ENOTFOUND, "tape");
    CHECK_ERROR(dsc_aio_backend_probe(NULL), DSC_EINVAL, "name");
}

static void write_and_check(dsc_aio *aio, dsc_aio_file *file, int64_t offset, unsigned char *buf, size_t n_bytes, unsigned char *wanted)
{
    static unsigned char got[CAPACITY];
    dsc_aio_id id = 0;
    int64_t res = -7;

    memcpy(wanted + offset, buf, n_bytes);
    CHECK_STATUS(dsc_aio_submit_write(aio, file, offset, buf, n_bytes, &id), DSC_OK);
    CHECK_STATUS(dsc_aio_wait(aio, id, &res), DSC_OK);
    CHECK_EQ(res, n_bytes);
    CHECK_BYTES(got, wanted, (size_t)folder_read(got, sizeof got));
    CHECK_ERROR(dsc_aio_wait(aio, id, &res), DSC_ENOTFOUND, "no I/O request");
    CHECK_EQ(res, -ENOENT);

    memset(buf, GUARD, n_bytes);
    CHECK_STATUS(dsc_aio_submit_read(aio, file, offset, buf, n_bytes, &id), DSC_OK);
    CHECK_STATUS(dsc_aio_wait(aio, id, &res), DSC_OK);
    CHECK_EQ(res, n_bytes);
    CHECK_BYTES(buf, wanted + offset, n_bytes);
    CHECK_EQ(buf[-1], GUARD);
    CHECK_EQ(buf[n_bytes], GUARD);

    /* The id of a finished request does not match the request that reuses its slot. */
    dsc_aio_id later = 0;

    CHECK_STATUS(dsc_aio_submit_read(aio, file, offset, buf, n_bytes, &later), DSC_OK);
    CHECK_ERROR(dsc_aio_wait(aio, id, &res), DSC_ENOTFOUND, "no I/O request");
    CHECK_STATUS(dsc_aio_wait(aio, later, &res), DSC_OK);
}

/* Transfers each size at each offset in the file and in memory. Each case overwrites the data of the earlier cases. */
static void test_sizes(const char *backend, bool uses_direct)
{
    static const size_t sizes[] = {0, 1, 511, 512, 513, 4095, 4096, 4097, 8191, 65537, 1000003, ((size_t)2 << 20) + 1};
    static const int64_t shifts[] = {0, 1, 64, 511, 512, 4095, 4096, 5000};
    unsigned char *memory = mmap(NULL, CAPACITY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    unsigned char *wanted = calloc(1, CAPACITY);
    dsc_aio *aio = folder_engine(backend, 65536, 8);
    dsc_aio_file *file = folder_open(CREATE, uses_direct);

    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (size_t o = 0; o < 8; o++)
            for (size_t m = 0; m < 8; m++) {
                unsigned char *buf = memory + 4096 + shifts[m];

                if (sizes[s] > 65536 ? o != m && !(o == 0 && m < 3) : sizes[s] > 4096 && (o + m) % 2 != 0)
                    continue;
                TEST_CASE("%s direct=%d, %zu bytes at %d, memory at %d", backend, uses_direct, sizes[s], (int)shifts[o], (int)shifts[m]);
                buf[-1] = GUARD;
                buf[sizes[s]] = GUARD;
                folder_fill(buf, sizes[s], s * 64 + o * 8 + m);
                write_and_check(aio, file, shifts[o], buf, sizes[s], wanted);
            }
    CHECK_EQ(dsc_aio_pending(aio), 0);
    CHECK_STATUS(dsc_aio_sync(file), DSC_OK);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    dsc_aio_destroy(aio);
    munmap(memory, CAPACITY);
    free(wanted);
}

static void test_end_of_file(const char *backend, bool uses_direct)
{
    static const int64_t lengths[] = {0, 1, 4096, 70000, 131072};
    static unsigned char data[131072];
    static unsigned char buf[300000];
    static unsigned char other[300000];
    dsc_aio *aio = folder_engine(backend, 16384, 4);
    dsc_aio_id id;
    int64_t res;
    int64_t n_done;

    folder_fill(data, sizeof data, 5);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        const int64_t offsets[] = {0, 1, 4095, 4096, lengths[i] - 1, lengths[i], lengths[i] + 1, lengths[i] + 100000};
        dsc_aio_file *file;
        int64_t n_bytes = -1;

        folder_write(data, (size_t)lengths[i]);
        file = folder_open(DSC_AIO_READ, uses_direct);
        CHECK_STATUS(dsc_aio_file_bytes(file, &n_bytes), DSC_OK);
        CHECK_EQ(n_bytes, lengths[i]);
        for (size_t o = 0; o < 8; o++) {
            int64_t left = lengths[i] - offsets[o];

            if (offsets[o] < 0)
                continue;
            left = left < 0 ? 0 : left;
            TEST_CASE("%s direct=%d, %d bytes, read at %d", backend, uses_direct, (int)lengths[i], (int)offsets[o]);
            CHECK_STATUS(dsc_aio_submit_read(aio, file, offsets[o], buf, 200001, &id), DSC_OK);
            CHECK_STATUS(dsc_aio_wait(aio, id, &res), DSC_OK);
            CHECK_EQ(res, left);
            CHECK_BYTES(buf, data + offsets[o], (size_t)left);

            /* Even if the backend does not report lengths, a short read does not pass for a complete one. */
            CHECK_STATUS(dsc_aio_submit_read(aio, file, offsets[o], buf, (size_t)left, &id), DSC_OK);
            CHECK_STATUS(dsc_aio_submit_read(aio, file, offsets[o], other, (size_t)left + 1, &id), DSC_OK);
            CHECK_ERROR(dsc_aio_wait_all(aio, &n_done), DSC_EIO, "the file ends there");
            CHECK_EQ(n_done, 1);
        }
        CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    }
    dsc_aio_destroy(aio);
}

/* Many requests at once: some are polled, some waited for, and the rest waited for together. */
static void test_many(const char *backend, bool uses_direct, bool single_submit, bool overlap_events)
{
    enum { N = 200, BYTES = 9001 };
    static unsigned char data[N * BYTES];
    static unsigned char got[N * BYTES + 1];
    struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;
    dsc_aio_file *file = folder_open(CREATE, uses_direct);
    dsc_aio *aio = NULL;
    dsc_aio_id ids[N];
    int64_t n_done = -1;
    bool is_done = false;
    int64_t n_fds;

    TEST_CASE("%s direct=%d single_submit=%d overlap_events=%d", backend, uses_direct, single_submit, overlap_events);
    config.backend = backend;
    config.queue_depth = 7;
    config.block_bytes = 4000; /* rounded up */
    config.single_submit = single_submit;
    config.overlap_events = overlap_events;
    CHECK_STATUS(dsc_aio_create(&config, &aio), DSC_OK);
    CHECK_STATUS(dsc_aio_wait_all(aio, &n_done), DSC_OK);
    CHECK_EQ(n_done, 0);
    folder_fill(data, sizeof data, 9);
    n_fds = folder_count_fds();
    for (int64_t i = 0; i < N; i++) { /* neighbours share pages */
        int64_t at = i * 77 % N;

        CHECK_STATUS(dsc_aio_submit_write(aio, file, at * BYTES, data + at * BYTES, BYTES, &ids[at]), DSC_OK);
    }
    CHECK_EQ(dsc_aio_pending(aio), N);
    CHECK_ERROR(dsc_aio_close(file), DSC_ESTATE, "200 requests");
    for (int i = 0; i < N / 4; i++) {
        int64_t res = -7;

        CHECK_STATUS(dsc_aio_wait(aio, ids[i], &res), DSC_OK);
        CHECK_EQ(res, BYTES);
    }
    while (!is_done)
        if (!CHECK_STATUS(dsc_aio_poll(aio, ids[N - 1], &is_done), DSC_OK))
            break;
    CHECK_EQ(dsc_aio_pending(aio), N - N / 4);
    CHECK_STATUS(dsc_aio_wait_all(aio, &n_done), DSC_OK);
    CHECK_EQ(n_done, N - N / 4);
    CHECK_EQ(dsc_aio_pending(aio), 0);
    CHECK_ERROR(dsc_aio_poll(aio, ids[N - 1], &is_done), DSC_ENOTFOUND, "waited for");
    CHECK_EQ(folder_read(got, sizeof got), sizeof data);
    CHECK_BYTES(got, data, sizeof data);
    CHECK_EQ(folder_count_fds(), n_fds);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    dsc_aio_destroy(aio);
}

static void test_cancel(const char *backend)
{
    static unsigned char data[1 << 20];
    static unsigned char got[(1 << 20) + 1];
    dsc_aio_file *file = folder_open(CREATE, true);
    dsc_aio *aio = folder_engine(backend, 4096, 2);
    dsc_aio_id ids[3];
    int64_t res[3];
    dsc_status status;

    TEST_CASE("%s", backend);
    folder_fill(data, sizeof data, 3);
    for (int i = 0; i < 3; i++)
        CHECK_STATUS(dsc_aio_submit_write(aio, file, i * 300000, data + i * 300000, 300000, &ids[i]), DSC_OK);
    CHECK_STATUS(dsc_aio_cancel(aio, ids[1]), DSC_OK);
    for (int i = 0; i < 3; i++) {
        status = dsc_aio_wait(aio, ids[i], &res[i]);
        CHECK(status == (res[i] < 0 ? DSC_EIO : DSC_OK));
    }
    CHECK_EQ(res[0], 300000);
    CHECK_EQ(res[2], 300000);
    CHECK(res[1] == -ECANCELED || res[1] == 300000); /* a fast request may have finished already */
    CHECK_EQ(folder_read(got, sizeof got), 900000);
    CHECK_BYTES(got, data, 300000);
    CHECK_BYTES(got + 600000, data + 600000, 300000);
    CHECK_ERROR(dsc_aio_cancel(aio, ids[1]), DSC_ENOTFOUND, "waited for");

    /* Destroying the engine cancels the remaining requests; then the file may be closed. */
    for (int i = 0; i < 3; i++)
        CHECK_STATUS(dsc_aio_submit_read(aio, file, 0, got + i * 300000, 300000, &ids[i]), DSC_OK);
    dsc_aio_destroy(aio);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
}

static void test_errors(const char *backend)
{
    static unsigned char data[100000];
    dsc_aio *aio = folder_engine(backend, 16384, 4);
    struct dsc_aio_failure failure;
    dsc_aio_file *full = NULL;
    dsc_aio_file *file;
    dsc_aio_id id = 77;
    dsc_aio_id good;
    int64_t res = -7;
    int64_t n_done = -7;

    TEST_CASE("%s", backend);
    folder_write(data, sizeof data);
    file = folder_open(DSC_AIO_READ, true);
    CHECK_ERROR(dsc_aio_submit_write(aio, file, 0, data, 1, &id), DSC_EINVAL, "not open");
    CHECK_ERROR(dsc_aio_submit_read(aio, file, -1, data, 1, &id), DSC_EINVAL, "offset is -1");
    CHECK_ERROR(dsc_aio_submit_read(aio, file, 1, data, INT64_MAX, &id), DSC_EOVERFLOW, "past the end");
    CHECK_ERROR(dsc_aio_submit_read(aio, file, 0, NULL, 1, &id), DSC_EINVAL, "buf");
    CHECK_ERROR(dsc_aio_submit_read(aio, NULL, 0, data, 1, &id), DSC_EINVAL, "file");
    CHECK_ERROR(dsc_aio_submit_read(NULL, file, 0, data, 1, &id), DSC_EINVAL, "aio");
    CHECK_ERROR(dsc_aio_submit_read(aio, file, 0, data, 1, NULL), DSC_EINVAL, "out_id");
    CHECK_EQ(id, 77);
    CHECK_EQ(dsc_aio_pending(aio), 0);
    CHECK_STATUS(dsc_aio_submit_read(aio, file, INT64_MAX - 1, data, 1, &id), DSC_OK); /* beyond the end of any disk */
    if (dsc_aio_wait(aio, id, &res) == DSC_OK)
        CHECK_EQ(res, 0);
    else
        CHECK_EQ(res, -EINVAL);

    /* One request that fails leaves its neighbours alone. */
    if (dsc_aio_open("/dev/full", DSC_AIO_WRITE, false, &full) == DSC_OK) {
        CHECK_STATUS(dsc_aio_submit_write(aio, full, 4096, data, sizeof data, &id), DSC_OK);
        CHECK_STATUS(dsc_aio_submit_read(aio, file, 0, data, sizeof data, &good), DSC_OK);
        CHECK_ERROR(dsc_aio_wait(aio, id, &res), DSC_EIO, "write 100000 bytes at offset 4096 of /dev/full: No space left on device");
        CHECK_EQ(res, -ENOSPC);
        CHECK_STATUS(dsc_aio_wait(aio, good, &res), DSC_OK);
        CHECK_EQ(res, sizeof data);
        for (int i = 0; i < 3; i++)
            CHECK_STATUS(dsc_aio_submit_write(aio, full, 10 * i, data, 1, &id), DSC_OK);
        CHECK_STATUS(dsc_aio_submit_read(aio, file, 0, data, sizeof data, &good), DSC_OK);
        CHECK_ERROR(dsc_aio_wait_all(aio, &n_done), DSC_EIO, "2 other requests");
        CHECK_EQ(n_done, 1);
        dsc_aio_last_failure(&failure);
        CHECK_STR(failure.path, "/dev/full");
        CHECK_STR(failure.verb, "write");
        CHECK_EQ(failure.offset, 0);
        CHECK_EQ(failure.n_bytes, 1);
        CHECK_EQ(failure.err, ENOSPC);
        CHECK_EQ(failure.n_others, 2);
        CHECK_STATUS(dsc_aio_close(full), DSC_OK);
    }
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);

    /*
     * A limit on file sizes stands for a full disk. The lack of space shows when space is reserved or when it is
     * written.
     */
    for (int uses_direct = 0; uses_direct < 2; uses_direct++) {
        struct rlimit before;
        struct rlimit small = {65536, 65536};

        getrlimit(RLIMIT_FSIZE, &before);
        small.rlim_max = before.rlim_max;
        setrlimit(RLIMIT_FSIZE, &small);
        file = folder_open(CREATE, uses_direct != 0);
        CHECK_STATUS(dsc_aio_submit_write(aio, file, 0, data, 65536, &good), DSC_OK);
        CHECK_STATUS(dsc_aio_submit_write(aio, file, 60000, data, 6000, &id), DSC_OK);
        CHECK_ERROR(dsc_aio_wait(aio, id, &res), DSC_EIO, "File too large");
        CHECK_EQ(res, -EFBIG);
        CHECK_STATUS(dsc_aio_wait(aio, good, &res), DSC_OK);
        CHECK_EQ(res, 65536);
        CHECK_STATUS(dsc_aio_close(file), DSC_OK);
        setrlimit(RLIMIT_FSIZE, &before);
    }
    dsc_aio_destroy(aio);
}

/* Offsets beyond 4 GiB, in a sparse file. */
static void test_large_offsets(const char *backend)
{
    static unsigned char data[50000];
    static unsigned char got[50000];
    const int64_t offset = ((int64_t)5 << 30) + 123;
    dsc_aio *aio = folder_engine(backend, 16384, 4);
    dsc_aio_file *file = folder_open(CREATE, true);
    dsc_aio_id id;
    int64_t res = 0;

    TEST_CASE("%s", backend);
    folder_fill(data, sizeof data, 11);
    CHECK_STATUS(dsc_aio_submit_write(aio, file, offset, data, sizeof data, &id), DSC_OK);
    if (dsc_aio_wait(aio, id, &res) != DSC_OK) {
        CHECK_EQ(res, -EFBIG); /* a file system without large files */
    } else {
        struct stat found;

        CHECK_STATUS(dsc_aio_submit_read(aio, file, offset, got, sizeof got, &id), DSC_OK);
        CHECK_STATUS(dsc_aio_wait(aio, id, &res), DSC_OK);
        CHECK_BYTES(got, data, sizeof data);
        CHECK_EQ(stat(path, &found), 0);
        CHECK_EQ(found.st_size, offset + (int64_t)sizeof data);
        CHECK(found.st_blocks * 512 < (1 << 20)); /* the file is still sparse */
    }
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    dsc_aio_destroy(aio);
}

static void test_no_leak(const char *backend)
{
    int64_t n_fds = folder_count_fds();

    TEST_CASE("%s", backend);
    for (int i = 0; i < 50; i++) {
        dsc_aio *aio = folder_engine(backend, 4096, 4);
        dsc_aio_file *file = folder_open(CREATE, true);
        dsc_aio_id id;

        CHECK_STATUS(dsc_aio_submit_write(aio, file, 0, &i, sizeof i, &id), DSC_OK);
        dsc_aio_destroy(aio);
        CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    }
    CHECK_EQ(folder_count_fds(), n_fds);
}

static void test_backend(const char *name)
{
    for (int uses_direct = 0; uses_direct < 2; uses_direct++) {
        test_sizes(name, uses_direct != 0);
        test_end_of_file(name, uses_direct != 0);
        for (int i = 0; i < 4; i++)
            test_many(name, uses_direct != 0, i % 2 != 0, i < 2);
    }
    test_cancel(name);
    test_errors(name);
    test_large_offsets(name);
    test_no_leak(name);
}

int main(void)
{
    static const struct dsc_aio_fault_plan mendable[] = {
        {.seed = 1},
        {.seed = 2, .short_chance = 128, .reorders = true, .late_chance = 128, .takes_part = true},
        {.seed = 3, .passing_chance = 64, .refusal_chance = 8, .reorders = true},
        {.seed = 4, .refuses_direct = true, .short_chance = 30},
    };
    const char *name;

    signal(SIGXFSZ, SIG_IGN); /* so that EFBIG comes back, as in Python */
    folder_make();
    test_config();
    for (int32_t i = 0; (name = dsc_aio_backend_at(i)) != NULL; i++) {
        if (dsc_aio_backend_probe(name) != DSC_OK) {
            printf("%s is left out: %s\n", name, dsc_last_error());
            continue;
        }
        test_backend(name);
    }
    dsc_aio_plug_backend(&dsc_aio_backend_fault, false);
    for (size_t i = 0; i < sizeof mendable / sizeof mendable[0]; i++) {
        dsc_aio_fault_set(&mendable[i]);
        test_backend("fault");
    }
    folder_remove();
    return test_finish(__FILE__);
}
