/*
 * Block files: for any division into writes, the checksums are the blocks'. For any later damage or truncation, exactly
 * the damaged blocks are listed, and reads return the written bytes or name the bad block.
 */
#include "fuzz.h"

#include "dsc/aio.h"
#include "dsc/ckpt.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_BYTES 40000
#define MAX_COPIES 8

static uint8_t content[MAX_BYTES];
static uint8_t into[MAX_COPIES][MAX_BYTES];
static char path[64];

static void name_file(void)
{
    struct stat info;

    /* In memory where that can be: a run makes thousands of files. */
    snprintf(path, sizeof path, "%s/dsc_fuzz_blocks_%ld", stat("/dev/shm", &info) == 0 ? "/dev/shm" : "/tmp", (long)getpid());
    unlink(path);
}

static void write_all(struct input *input, const struct dsc_block_config *config, int64_t n_bytes, uint32_t *crcs, int64_t n_blocks)
{
    dsc_block_writer *writer = NULL;
    const uint32_t *found = NULL;
    int64_t n_found = -1;
    int64_t at = 0;

    REQUIRE(dsc_block_writer_create(path, config, &writer) == DSC_OK);
    while (at < n_bytes) {
        int64_t n = 1 + take_below(input, 9000);

        n = n < n_bytes - at ? n : n_bytes - at;
        REQUIRE(dsc_block_writer_write(writer, content + at, (size_t)n) == DSC_OK);
        at += n;
        REQUIRE(dsc_block_writer_bytes(writer) == at);
    }
    REQUIRE(dsc_block_writer_finish(writer, &found, &n_found) == DSC_OK);
    REQUIRE(n_found == n_blocks);
    for (int64_t b = 0; b < n_blocks; b++) {
        int64_t begin = b * (int64_t)config->block_bytes;
        int64_t end = begin + (int64_t)config->block_bytes < n_bytes ? begin + (int64_t)config->block_bytes : n_bytes;

        REQUIRE(found[b] == dsc_crc32c(0, content + begin, (size_t)(end - begin)));
        crcs[b] = found[b];
    }
    REQUIRE(dsc_block_writer_write(writer, content, 1) == DSC_ESTATE);
    dsc_block_writer_destroy(writer);
}

/* Flips a bit, or cuts the file off. Returns the block that is bad now; -1: none, -2: the length is another one. */
static int64_t damage(struct input *input, int64_t n_bytes, int64_t block_bytes)
{
    uint8_t kind = take_byte(input);
    int64_t at = n_bytes > 0 ? take_below(input, n_bytes) : 0;
    uint8_t byte;
    int fd;

    if (n_bytes == 0 || kind % 3 == 0)
        return -1;
    fd = open(path, O_RDWR | O_CLOEXEC);
    REQUIRE(fd >= 0);
    if (kind % 3 == 1) {
        REQUIRE(ftruncate(fd, at) == 0);
    } else {
        REQUIRE(pread(fd, &byte, 1, at) == 1);
        byte ^= (uint8_t)(1u << (kind >> 5));
        REQUIRE(pwrite(fd, &byte, 1, at) == 1);
    }
    close(fd);
    return kind % 3 == 1 ? -2 : at / block_bytes;
}

static void check_list(const struct dsc_block_file *file, const struct dsc_block_config *config, int64_t bad)
{
    int64_t *listed = malloc(((size_t)file->n_crcs + 1) * sizeof *listed);
    int64_t n_listed = -7;
    dsc_status status;

    REQUIRE(listed != NULL);
    status = dsc_blocks_verify(file, config, listed, &n_listed);
    REQUIRE(status == (bad == -2 ? DSC_ECORRUPT : DSC_OK));
    if (status == DSC_OK) {
        REQUIRE(n_listed == (bad >= 0));
        REQUIRE(bad < 0 || listed[0] == bad);
    }
    free(listed);
}

static void check_reads(struct input *input, const struct dsc_block_file *file, const struct dsc_block_config *config, int64_t bad)
{
    const int64_t block_bytes = (int64_t)config->block_bytes;
    struct dsc_block_copy copies[MAX_COPIES];
    int64_t n_copies = take_below(input, MAX_COPIES + 1);
    int64_t n_read = -7;
    int64_t bad_block = -7;
    bool is_inside = true;
    bool meets_bad = false;
    dsc_status status;

    for (int64_t c = 0; c < n_copies; c++) {
        int64_t offset = take_below(input, file->n_bytes + 1);
        int64_t n = take_below(input, file->n_bytes - offset + 1);

        if (take_byte(input) == 255)
            offset = take_wild(input);
        memset(into[c], 0xa5, sizeof into[c]);
        copies[c] = (struct dsc_block_copy){.offset = offset, .n_bytes = n, .into = into[c]};
        is_inside = is_inside && offset >= 0 && offset <= file->n_bytes - n;
        meets_bad = meets_bad || (bad >= 0 && n > 0 && offset / block_bytes <= bad && (offset + n - 1) / block_bytes >= bad);
    }
    status = dsc_blocks_read(file, config, copies, n_copies, &n_read, &bad_block);
    if (!is_inside) {
        REQUIRE(status == DSC_EINVAL);
        return;
    }
    if (bad == -2 && n_copies > 0 && status == DSC_OK) /* with nothing to copy the file is not opened */
        for (int64_t c = 0; c < n_copies; c++)
            REQUIRE(copies[c].n_bytes == 0);
    if (bad == -2)
        return;
    REQUIRE(status == (meets_bad ? DSC_ECORRUPT : DSC_OK));
    REQUIRE(status == DSC_OK || bad_block == bad);
    for (int64_t c = 0; c < n_copies && status == DSC_OK; c++) {
        REQUIRE(memcmp(copies[c].into, content + copies[c].offset, (size_t)copies[c].n_bytes) == 0);
        for (int64_t i = copies[c].n_bytes; i < MAX_BYTES; i += 97) /* and nothing behind */
            REQUIRE(((const uint8_t *)copies[c].into)[i] == 0xa5);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static uint32_t crcs[MAX_BYTES];
    struct input input = {data, n_bytes};
    struct dsc_block_config config = DSC_BLOCK_CONFIG_INIT;
    bool is_wild = take_byte(&input) == 255;
    int64_t length = take_below(&input, MAX_BYTES + 1);
    int64_t n_blocks;

    name_file();
    config.backend = "sync";
    config.block_bytes = is_wild ? (size_t)take_wild(&input) : 1 + (size_t)take_below(&input, 9000);
    config.buffer_bytes = is_wild ? (size_t)take_wild(&input) : 1 + (size_t)take_below(&input, 20000);
    config.n_buffers = is_wild ? (int32_t)take_wild(&input) : 2 + (int32_t)take_below(&input, 3);
    if (is_wild) { /* no ring of gigabytes: only refusals are of interest */
        dsc_block_writer *writer = NULL;
        bool is_good = config.block_bytes >= 1 && config.block_bytes <= (size_t)1 << 30 && config.buffer_bytes >= 1 &&
                       config.buffer_bytes <= (size_t)1 << 30 && config.n_buffers >= 2 && config.n_buffers <= 1024;

        if (is_good)
            return 0;
        REQUIRE(dsc_block_writer_create(path, &config, &writer) == DSC_EINVAL);
        REQUIRE(writer == NULL && access(path, F_OK) != 0);
        return 0;
    }
    for (int64_t i = 0; i < length; i++)
        content[i] = (uint8_t)(i * 131 + take_byte(&input));
    n_blocks = (length + (int64_t)config.block_bytes - 1) / (int64_t)config.block_bytes;
    write_all(&input, &config, length, crcs, n_blocks);

    const struct dsc_block_file file = {.path = path, .n_bytes = length, .crcs = crcs, .n_crcs = n_blocks};
    int64_t bad = damage(&input, length, (int64_t)config.block_bytes);

    config.buffer_bytes = 1 + (size_t)take_below(&input, 20000);
    check_list(&file, &config, bad);
    check_reads(&input, &file, &config, bad);
    unlink(path);
    return 0;
}
