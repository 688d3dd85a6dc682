/*
 * ckpt/block_writer.c and block_reader.c on every I/O backend, against a plain copy of the bytes in memory. Covers
 * sizes near block borders, parts in any order, damaged files and refused arguments.
 */
#include "test.h"

#include "dsc/aio.h"
#include "dsc/ckpt.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCK 4096
#define BUFFER 16384
#define MAX_BYTES (40 * BLOCK)
#define MAX_BLOCKS (MAX_BYTES + 1)
#define MAX_COPIES 40

static char folder[] = "/tmp/dsc-blocks-XXXXXX";
static char path[128];
static unsigned char bytes[MAX_BYTES];
static uint32_t crcs[MAX_BLOCKS]; /* checksums from the writer */

static struct dsc_block_config config_of(const char *backend, size_t block_bytes, size_t buffer_bytes, int32_t n_buffers)
{
    struct dsc_block_config config = DSC_BLOCK_CONFIG_INIT;

    config.backend = backend;
    config.block_bytes = block_bytes;
    config.buffer_bytes = buffer_bytes;
    config.n_buffers = n_buffers;
    return config;
}

static int64_t n_blocks_of(int64_t n_bytes, size_t block_bytes)
{
    return (n_bytes + (int64_t)block_bytes - 1) / (int64_t)block_bytes;
}

static void check_file_holds(int64_t n_bytes)
{
    static unsigned char got[MAX_BYTES + 1];
    int fd = open(path, O_RDONLY);

    if (!CHECK(fd >= 0))
        return;
    CHECK_EQ(read(fd, got, sizeof got), n_bytes);
    CHECK_BYTES(got, bytes, (size_t)n_bytes);
    CHECK_EQ(close(fd), 0);
}

/*
 * Writes the first n_bytes in random segments and checks the file and its checksums. The file stays for later checks.
 */
static void write_file(const struct dsc_block_config *config, int64_t n_bytes, uint64_t *random)
{
    dsc_block_writer *writer = NULL;
    const uint32_t *got = NULL;
    int64_t n_blocks = -1;
    int64_t at = 0;

    unlink(path);
    if (!CHECK_STATUS(dsc_block_writer_create(path, config, &writer), DSC_OK))
        return;
    while (at < n_bytes) {
        int64_t n = test_below(random, 2) == 0 ? test_below(random, 50) : test_below(random, 3 * BUFFER);

        n = n < n_bytes - at ? n : n_bytes - at;
        CHECK_STATUS(dsc_block_writer_write(writer, bytes + at, (size_t)n), DSC_OK);
        at += n;
        CHECK_EQ(dsc_block_writer_bytes(writer), at);
    }
    CHECK_STATUS(dsc_block_writer_finish(writer, &got, &n_blocks), DSC_OK);
    if (CHECK_EQ(n_blocks, n_blocks_of(n_bytes, config->block_bytes))) {
        for (int64_t i = 0; i < n_blocks; i++) {
            size_t begin = (size_t)i * config->block_bytes;
            size_t n = (size_t)n_bytes - begin < config->block_bytes ? (size_t)n_bytes - begin : config->block_bytes;

            TEST_AT(i);
            CHECK_EQ(got[i], dsc_crc32c(0, bytes + begin, n));
            crcs[i] = got[i];
        }
        TEST_AT(-1);
    }
    CHECK_ERROR(dsc_block_writer_write(writer, bytes, 1), DSC_ESTATE, "finished");
    CHECK_ERROR(dsc_block_writer_finish(writer, &got, &n_blocks), DSC_ESTATE, "finished");
    dsc_block_writer_destroy(writer);
    check_file_holds(n_bytes);
}

static struct dsc_block_file about(int64_t n_bytes, size_t block_bytes)
{
    return (struct dsc_block_file){path, n_bytes, crcs, n_blocks_of(n_bytes, block_bytes)};
}

/*
 * Reads random parts of the file, with gaps and overlaps. Bytes around each target stay as they are, and only the
 * needed blocks are read.
 */
static void read_parts(const struct dsc_block_config *config, int64_t n_bytes, uint64_t *random)
{
    static unsigned char into[MAX_COPIES][MAX_BYTES + 2];
    struct dsc_block_copy copies[MAX_COPIES];
    struct dsc_block_copy asked[MAX_COPIES];
    static bool is_needed[MAX_BLOCKS];
    struct dsc_block_file file = about(n_bytes, config->block_bytes);
    int64_t n_copies = test_below(random, MAX_COPIES + 1);
    int64_t n_needed = 0;
    int64_t n_read = -1;
    int64_t bad_block = -7;

    memset(is_needed, 0, sizeof is_needed);
    for (int64_t i = 0; i < n_copies; i++) {
        int64_t offset = test_below(random, n_bytes + 1);
        int64_t n = test_below(random, 3) == 0 ? test_below(random, n_bytes - offset + 1) : test_below(random, (n_bytes - offset < 99 ? n_bytes - offset : 99) + 1);

        into[i][0] = 0xa5;
        into[i][n + 1] = 0xa5;
        copies[i] = (struct dsc_block_copy){offset, n, into[i] + 1};
        for (int64_t b = offset / (int64_t)config->block_bytes; n > 0 && b * (int64_t)config->block_bytes < offset + n; b++)
            is_needed[b] = true;
    }
    memcpy(asked, copies, sizeof asked);
    for (int64_t b = 0; b < file.n_crcs; b++)
        if (is_needed[b])
            n_needed += (b + 1) * (int64_t)config->block_bytes < n_bytes ? (int64_t)config->block_bytes : n_bytes - b * (int64_t)config->block_bytes;
    if (test_below(random, 4) == 0) {
        file.crcs = NULL;
        file.n_crcs = 0;
    }
    CHECK_STATUS(dsc_blocks_read(&file, config, copies, n_copies, &n_read, &bad_block), DSC_OK);
    CHECK_EQ(n_read, n_needed);
    for (int64_t i = 0; i < n_copies; i++) {
        TEST_AT(i);
        CHECK_BYTES(into[i] + 1, bytes + asked[i].offset, (size_t)asked[i].n_bytes);
        CHECK_EQ(into[i][0], 0xa5);
        CHECK_EQ(into[i][asked[i].n_bytes + 1], 0xa5);
    }
    TEST_AT(-1);
}

static void flip(int64_t at, unsigned char mask)
{
    unsigned char byte = 0;
    int fd = open(path, O_RDWR);

    CHECK(fd >= 0 && pread(fd, &byte, 1, at) == 1);
    byte ^= mask;
    CHECK(pwrite(fd, &byte, 1, at) == 1 && close(fd) == 0);
}

/* One flipped bit anywhere is found: the damaged block is not returned, and the blocks before it are right. */
static void check_damage(const struct dsc_block_config *config, int64_t n_bytes, uint64_t *random)
{
    static unsigned char into[MAX_BYTES];
    struct dsc_block_file file = about(n_bytes, config->block_bytes);
    int64_t at = test_below(random, n_bytes);
    int64_t block = at / (int64_t)config->block_bytes;
    int64_t begin = block * (int64_t)config->block_bytes;
    int64_t end = begin + (int64_t)config->block_bytes < n_bytes ? begin + (int64_t)config->block_bytes : n_bytes;
    struct dsc_block_copy copy = {0, n_bytes, into};
    static int64_t bad[MAX_BLOCKS];
    int64_t n_bad = -1;
    int64_t n_read = -1;
    int64_t bad_block = -7;
    unsigned char mask = (unsigned char)(1u << test_below(random, 8));

    flip(at, mask);
    memset(into, 0x11, sizeof into);
    CHECK_ERROR(dsc_blocks_read(&file, config, &copy, 1, &n_read, &bad_block), DSC_ECORRUPT, "does not match");
    CHECK_EQ(bad_block, block);
    CHECK_EQ(n_read, -1);
    CHECK_BYTES(into, bytes, (size_t)begin);
    for (int64_t i = begin; i < end; i++)
        CHECK_EQ(into[i], 0x11);
    CHECK_STATUS(dsc_blocks_verify(&file, config, bad, &n_bad), DSC_OK);
    if (CHECK_EQ(n_bad, 1))
        CHECK_EQ(bad[0], block);

    /* The blocks before the damaged block can still be read. */
    if (begin > 0) {
        copy = (struct dsc_block_copy){0, begin, into};
        CHECK_STATUS(dsc_blocks_read(&file, config, &copy, 1, &n_read, &bad_block), DSC_OK);
        CHECK_EQ(n_read, begin);
    }
    flip(at, mask);
    CHECK_STATUS(dsc_blocks_verify(&file, config, bad, &n_bad), DSC_OK);
    CHECK_EQ(n_bad, 0);

    /* A file that is one byte too short or too long. */
    copy = (struct dsc_block_copy){0, 1, into};
    file.n_bytes = n_bytes;
    CHECK_EQ(truncate(path, n_bytes - 1), 0);
    bad_block = -7;
    CHECK_ERROR(dsc_blocks_read(&file, config, &copy, 1, NULL, &bad_block), DSC_ECORRUPT, "should have");
    CHECK_EQ(bad_block, -1);
    CHECK_ERROR(dsc_blocks_verify(&file, config, bad, &n_bad), DSC_ECORRUPT, "should have");
    CHECK_EQ(truncate(path, n_bytes + 1), 0);
    CHECK_ERROR(dsc_blocks_read(&file, config, &copy, 1, NULL, &bad_block), DSC_ECORRUPT, "should have");
    CHECK_EQ(truncate(path, n_bytes), 0);
}

/*
 * The first backend runs half of all combinations and the others fewer, because backends differ only below the level
 * tested here.
 */
static void test_sizes(const char *backend, bool is_first)
{
    static const int64_t sizes[] = {0, 1, BLOCK - 1, BLOCK, BLOCK + 1, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER, 3 * BUFFER + 511, MAX_BYTES - 1, MAX_BYTES};
    static const struct {
        size_t block;
        size_t buffer;
        int32_t n_buffers;
    } shapes[] = {{BLOCK, BUFFER, 2}, {BLOCK, BUFFER, 5}, {BUFFER, BLOCK, 2}, {1000, BUFFER, 3}, {997, 5000, 2}, {1 << 20, 1 << 20, 2}, {16, 64, 2}};
    uint64_t random = 23;

    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        const struct dsc_block_config config = config_of(backend, shapes[s].block, shapes[s].buffer, shapes[s].n_buffers);

        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            if (shapes[s].block < 512 && sizes[i] > BUFFER) /* small blocks are many requests */
                continue;
            if ((s + i) % (is_first ? 2 : 6) != 0)
                continue;
            TEST_CASE("%s, %d bytes in blocks of %d, %d buffers of %d", backend, (int)sizes[i], (int)shapes[s].block, (int)shapes[s].n_buffers,
                      (int)shapes[s].buffer);
            write_file(&config, sizes[i], &random);
            for (int round = 0; round < 4; round++)
                read_parts(&config, sizes[i], &random);
            if (sizes[i] > 0 && (s + i) % 3 == 0)
                check_damage(&config, sizes[i], &random);
        }
    }
    unlink(path);
}

static void test_refusals(const char *backend)
{
    struct dsc_block_config config = config_of(backend, BLOCK, BUFFER, 2);
    dsc_block_writer *writer = NULL;
    struct dsc_aio_failure failure;
    const uint32_t *got;
    int64_t n_blocks;
    int64_t bad_block;
    int64_t n_bad;
    unsigned char byte;
    uint64_t random = 3;

    TEST_CASE("refusals, %s", backend);
    write_file(&config, 10, &random);
    CHECK_STATUS(dsc_block_writer_create(path, &config, &writer), DSC_EIO);
    dsc_aio_last_failure(&failure);
    CHECK_EQ(failure.err, EEXIST);
    CHECK_STR(failure.path, path);
    check_file_holds(10);

    struct dsc_block_copy copy = {0, 10, &byte};
    struct dsc_block_file file = {"/nowhere/at/all", 10, NULL, 0};

    CHECK_STATUS(dsc_blocks_read(&file, &config, &copy, 1, NULL, &bad_block), DSC_EIO);
    dsc_aio_last_failure(&failure);
    CHECK_EQ(failure.err, ENOENT);
    CHECK_STATUS(dsc_blocks_verify(&(struct dsc_block_file){"/nowhere", 0, NULL, 0}, &config, NULL, &n_bad), DSC_EIO);
    CHECK_STATUS(dsc_block_writer_create("/nowhere/at/all", &config, &writer), DSC_EIO);

    /* With nothing to read, the file is not even opened. */
    copy.n_bytes = 0;
    n_blocks = -1;
    CHECK_STATUS(dsc_blocks_read(&file, &config, &copy, 1, &n_blocks, &bad_block), DSC_OK);
    CHECK_EQ(n_blocks, 0);
    CHECK_STATUS(dsc_blocks_read(&file, &config, NULL, 0, &n_blocks, &bad_block), DSC_OK);

    copy.n_bytes = 11;
    CHECK_ERROR(dsc_blocks_read(&file, &config, &copy, 1, NULL, &bad_block), DSC_EINVAL, "copies[0]");
    copy = (struct dsc_block_copy){-1, 1, &byte};
    CHECK_ERROR(dsc_blocks_read(&file, &config, &copy, 1, NULL, &bad_block), DSC_EINVAL, "copies[0]");
    copy = (struct dsc_block_copy){INT64_MAX, 1, &byte};
    CHECK_ERROR(dsc_blocks_read(&file, &config, &copy, 1, NULL, &bad_block), DSC_EINVAL, "copies[0]");
    copy = (struct dsc_block_copy){0, 1, NULL};
    CHECK_ERROR(dsc_blocks_read(&file, &config, &copy, 1, NULL, &bad_block), DSC_EINVAL, "into");
    CHECK_ERROR(dsc_blocks_read(&file, &config, NULL, 1, NULL, &bad_block), DSC_EINVAL, "copies");
    CHECK_ERROR(dsc_blocks_read(NULL, &config, NULL, 0, NULL, &bad_block), DSC_EINVAL, "NULL");
    file.n_crcs = 1;
    CHECK_ERROR(dsc_blocks_read(&file, &config, NULL, 0, NULL, &bad_block), DSC_EINVAL, "n_crcs");
    file.crcs = crcs;
    file.n_crcs = 2;
    CHECK_ERROR(dsc_blocks_read(&file, &config, NULL, 0, NULL, &bad_block), DSC_EINVAL, "n_crcs");
    file.n_bytes = -1;
    CHECK_ERROR(dsc_blocks_read(&file, &config, NULL, 0, NULL, &bad_block), DSC_EINVAL, "n_bytes");
    file = (struct dsc_block_file){path, 10, NULL, 0};
    CHECK_ERROR(dsc_blocks_verify(&file, &config, &bad_block, &n_bad), DSC_EINVAL, "crcs");

    CHECK_ERROR(dsc_block_writer_create(NULL, &config, &writer), DSC_EINVAL, "path");
    CHECK_ERROR(dsc_block_writer_create(path, NULL, &writer), DSC_EINVAL, "config");
    config.size = 4;
    CHECK_ERROR(dsc_block_writer_create(path, &config, &writer), DSC_EINVAL, "config.size");
    config = config_of(backend, 0, BUFFER, 2);
    CHECK_ERROR(dsc_block_writer_create(path, &config, &writer), DSC_EINVAL, "block_bytes");
    config = config_of(backend, BLOCK, 0, 2);
    CHECK_ERROR(dsc_block_writer_create(path, &config, &writer), DSC_EINVAL, "buffer_bytes");
    config = config_of(backend, BLOCK, BUFFER, 1);
    CHECK_ERROR(dsc_block_writer_create(path, &config, &writer), DSC_EINVAL, "n_buffers");
    unlink(path);
    config = config_of("no such backend", BLOCK, BUFFER, 2);
    CHECK_STATUS(dsc_block_writer_create(path, &config, &writer), DSC_ENOTFOUND);
    CHECK_EQ(access(path, F_OK), -1); /* and no file is left behind */
    CHECK(writer == NULL);
    CHECK_ERROR(dsc_block_writer_write(NULL, bytes, 1), DSC_EINVAL, "writer");
    CHECK_ERROR(dsc_block_writer_finish(NULL, &got, &n_blocks), DSC_EINVAL, "writer");
    dsc_block_writer_destroy(NULL);
}

/*
 * A limit on the file's size stands for a full disk. The failure is reported once, with its errno, and the writer
 * refuses further calls.
 */
static void test_failed_write(const char *backend)
{
    const struct dsc_block_config config = config_of(backend, BLOCK, BUFFER, 2);
    struct rlimit before;
    struct rlimit limit;
    struct dsc_aio_failure failure = {.err = 0};

    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before);
    for (int64_t n_allowed = 0; n_allowed <= 3 * BUFFER; n_allowed += BUFFER - 1000) {
        dsc_block_writer *writer = NULL;
        const uint32_t *got = NULL;
        int64_t n_blocks = -1;

        TEST_CASE("%s, %d bytes allowed", backend, (int)n_allowed);
        unlink(path);
        limit = before;
        limit.rlim_cur = (rlim_t)n_allowed;
        setrlimit(RLIMIT_FSIZE, &limit);

        dsc_status status = dsc_block_writer_create(path, &config, &writer);

        CHECK_EQ(status, DSC_OK);
        for (int64_t at = 0; status == DSC_OK && at < MAX_BYTES; at += 1000)
            status = dsc_block_writer_write(writer, bytes + at, at + 1000 < MAX_BYTES ? 1000 : (size_t)(MAX_BYTES - at));
        if (status == DSC_OK)
            status = dsc_block_writer_finish(writer, &got, &n_blocks);
        CHECK_EQ(status, DSC_EIO);
        dsc_aio_last_failure(&failure);
        CHECK_EQ(failure.err, EFBIG);
        CHECK_STR(failure.path, path);
        setrlimit(RLIMIT_FSIZE, &before);
        CHECK_ERROR(dsc_block_writer_write(writer, bytes, 1), DSC_ESTATE, "failed before");
        CHECK_ERROR(dsc_block_writer_finish(writer, &got, &n_blocks), DSC_ESTATE, "failed before");
        CHECK(got == NULL && n_blocks == -1);
        dsc_block_writer_destroy(writer);
    }
    unlink(path);
}

/* A forked child destroys its copy of a writer without waiting and without harm. The parent's writer goes on. */
static void test_fork(const char *backend)
{
    const struct dsc_block_config config = config_of(backend, BLOCK, BUFFER, 4);
    dsc_block_writer *writer = NULL;
    const uint32_t *got = NULL;
    int64_t n_blocks = -1;
    int status = -1;

    TEST_CASE("fork, %s", backend);
    unlink(path);
    CHECK_STATUS(dsc_block_writer_create(path, &config, &writer), DSC_OK);
    CHECK_STATUS(dsc_block_writer_write(writer, bytes, MAX_BYTES / 2), DSC_OK);
    fflush(NULL);

    pid_t child = fork();

    if (child == 0) {
        bool is_refused = dsc_block_writer_write(writer, bytes, 1) == DSC_ESTATE && dsc_block_writer_finish(writer, &got, &n_blocks) == DSC_ESTATE;

        alarm(200); /* ends a child that hangs; the parent sees the signal */
        dsc_block_writer_destroy(writer);
        _exit(is_refused ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
    CHECK_STATUS(dsc_block_writer_write(writer, bytes + MAX_BYTES / 2, MAX_BYTES - MAX_BYTES / 2), DSC_OK);
    CHECK_STATUS(dsc_block_writer_finish(writer, &got, &n_blocks), DSC_OK);
    check_file_holds(MAX_BYTES);
    dsc_block_writer_destroy(writer);

    /* Destroying a writer half-way does no harm, and the file stays. */
    unlink(path);
    CHECK_STATUS(dsc_block_writer_create(path, &config, &writer), DSC_OK);
    CHECK_STATUS(dsc_block_writer_write(writer, bytes, MAX_BYTES), DSC_OK);
    dsc_block_writer_destroy(writer);
    CHECK_EQ(access(path, F_OK), 0);
    unlink(path);
}

int main(void)
{
    uint64_t random = 1;

    if (mkdtemp(folder) == NULL) {
        printf("no temporary folder: %s\n", strerror(errno));
        return TEST_SKIPPED;
    }
    snprintf(path, sizeof path, "%s/file", folder);
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)test_random(&random);
    for (int32_t i = 0; dsc_aio_backend_at(i) != NULL; i++) {
        const char *backend = dsc_aio_backend_at(i);

        if (dsc_aio_backend_probe(backend) != DSC_OK) {
            printf("no %s here: %s\n", backend, dsc_last_error());
            continue;
        }
        test_sizes(backend, i == 0);
        test_refusals(backend);
        test_failed_write(backend);
        test_fork(backend);
    }
    CHECK_EQ(rmdir(folder), 0);
    return test_finish(__FILE__);
}
