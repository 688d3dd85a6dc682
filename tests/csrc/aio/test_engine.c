/* aio/engine.c over every backend that this kernel allows: compared with plain pread and pwrite. */
#include "test.h"

#include "dsc/aio.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_BYTES (3 * 1024 * 1024 + 12345)

static char folder[64];
static char path[128];

static dsc_aio *make(const char *backend, size_t block_bytes, int32_t depth)
{
    struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;
    dsc_aio *aio = NULL;

    config.backend = backend;
    config.block_bytes = block_bytes;
    config.queue_depth = depth;
    if (!CHECK_STATUS(dsc_aio_create(&config, &aio), DSC_OK))
        exit(test_finish(__FILE__));
    return aio;
}

static void fill(unsigned char *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (unsigned char)(test_random(&seed) >> 40);
}

static void test_sizes(const char *backend, bool uses_direct)
{
    static const int64_t sizes[] = {0, 1, 511, 512, 513, 4095, 4096, 4097, 65537, 1000003, 2 * 1024 * 1024 + 1};
    static const int64_t shifts[] = {0, 1, 64, 511, 512, 4095, 4096, 5000};
    unsigned char *memory = test_alloc(FILE_BYTES + 8192);
    unsigned char *wanted = test_alloc(FILE_BYTES);
    unsigned char *got = test_alloc(FILE_BYTES);
    dsc_aio *aio = make(backend, 65536, 8);
    dsc_aio_file *file = NULL;

    CHECK_STATUS(dsc_aio_open(path, DSC_AIO_READ | DSC_AIO_WRITE | DSC_AIO_CREATE | DSC_AIO_TRUNCATE, uses_direct, &file), DSC_OK);
    memset(wanted, 0, FILE_BYTES);
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (size_t o = 0; o < 8; o++)
            for (size_t m = 0; m < 8; m++) {
                int64_t res = -7;
                dsc_aio_id id;
                unsigned char *buf = memory + shifts[m];
                struct stat st;
                int fd;

                TEST_CASE("%s direct=%d size=%d offset=%d memory=%d", backend, uses_direct, (int)sizes[s], (int)shifts[o], (int)shifts[m]);
                fill(buf, (size_t)sizes[s], s * 64 + o * 8 + m);
                memcpy(wanted + shifts[o], buf, (size_t)sizes[s]);
                CHECK_STATUS(dsc_aio_submit_write(aio, file, shifts[o], buf, (size_t)sizes[s], &id), DSC_OK);
                CHECK_STATUS(dsc_aio_wait(aio, id, &res), DSC_OK);
                CHECK_EQ(res, sizes[s]);
                fd = open(path, O_RDONLY);
                fstat(fd, &st);
                CHECK_EQ(pread(fd, got, FILE_BYTES, 0), st.st_size);
                close(fd);
                CHECK_BYTES(got, wanted, (size_t)st.st_size);
                memset(memory, 0xa5, FILE_BYTES + 8192);
                CHECK_STATUS(dsc_aio_submit_read(aio, file, shifts[o], buf, (size_t)sizes[s], &id), DSC_OK);
                CHECK_STATUS(dsc_aio_wait(aio, id, &res), DSC_OK);
                CHECK_EQ(res, sizes[s]);
                CHECK_BYTES(buf, wanted + shifts[o], (size_t)sizes[s]);
                CHECK(shifts[m] == 0 || buf[-1] == 0xa5);
                CHECK_EQ(buf[sizes[s]], 0xa5);
            }
    CHECK_EQ(dsc_aio_pending(aio), 0);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    dsc_aio_destroy(aio);
    free(memory);
    free(wanted);
    free(got);
}

int main(void)
{
    const char *name;

    snprintf(folder, sizeof folder, "aio_test_XXXXXX");
    if (mkdtemp(folder) == NULL) {
        perror(folder);
        return 1;
    }
    snprintf(path, sizeof path, "%s/data", folder);
    for (int32_t i = 0; (name = dsc_aio_backend_at(i)) != NULL; i++) {
        if (dsc_aio_backend_probe(name) != DSC_OK) {
            printf("%s: %s\n", name, dsc_last_error());
            continue;
        }
        test_sizes(name, false);
        test_sizes(name, true);
    }
    unlink(path);
    rmdir(folder);
    return test_finish(__FILE__);
}
