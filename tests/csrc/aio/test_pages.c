/*
 * The I/O engine with pages of 64 KiB, and on kernels before and after fork() started to respect direct transfers. This
 * program replaces sysconf and uname, and the fault backend inspects every transfer.
 */
#include "aio/folder.h"

#include "aio/fault.c"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/utsname.h>

#define PAGE 65536
#define CAPACITY ((size_t)2 << 20)

static const char *release = "6.18.0";
static long page_bytes = PAGE;

/* Replaces sysconf for the library under test, which is linked into this program. */
long sysconf(int name)
{
    static long (*real)(int);

    if (name == _SC_PAGESIZE)
        return page_bytes;
    if (real == NULL)
        real = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
    return real(name);
}

int uname(struct utsname *out)
{
    memset(out, 0, sizeof *out);
    snprintf(out->release, sizeof out->release, "%s", release);
    return 0;
}

static int64_t memory_align = 1;
static int64_t n_direct;

/* Checks that direct operations are aligned, then transfers like the backend "fault". */
static int64_t watch_submit(void *state, struct dsc_aio_op *const *ops, int64_t n_ops)
{
    for (int64_t i = 0; i < n_ops; i++) {
        if ((fcntl(ops[i]->fd, F_GETFL) & O_DIRECT) == 0)
            continue;
        n_direct++;
        CHECK_EQ(ops[i]->offset % page_bytes, 0);
        CHECK_EQ(ops[i]->n_bytes % (size_t)page_bytes, 0);
        CHECK_EQ((uintptr_t)ops[i]->buf % (uintptr_t)memory_align, 0);
    }
    return fault_submit(state, ops, n_ops);
}

static const struct dsc_aio_backend watch = {
    .name = "watch",
    .open = fault_open,
    .close = fault_close,
    .submit = watch_submit,
    .reap = fault_reap,
};

/* Transfers each size at each place in the file and in memory. Neighbouring bytes must stay unchanged. */
static void test_transfers(void)
{
    static const size_t sizes[] = {1, 4096, 65535, 65536, 65537, 200000, 1000003};
    static const int64_t shifts[] = {0, 1, 512, 4096, 65535, 65536};
    static unsigned char got[CAPACITY];
    unsigned char *memory = mmap(NULL, CAPACITY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    unsigned char *wanted = calloc(1, CAPACITY);
    dsc_aio *aio = folder_engine("watch", 100000, 8);
    dsc_aio_file *file = folder_open(DSC_AIO_READ | DSC_AIO_WRITE | DSC_AIO_CREATE | DSC_AIO_TRUNCATE, true);
    dsc_aio_id id;
    int64_t res = 0;

    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (size_t o = 0; o < sizeof shifts / sizeof shifts[0]; o++)
            for (size_t m = 0; m < sizeof shifts / sizeof shifts[0]; m++) {
                unsigned char *buf = memory + PAGE + shifts[m];

                TEST_CASE("release %s, pages of %ld, %zu bytes at %d, memory at %d", release, page_bytes, sizes[s], (int)shifts[o], (int)shifts[m]);
                folder_fill(buf, sizes[s], s * 64 + o * 8 + m);
                memcpy(wanted + shifts[o], buf, sizes[s]);
                CHECK_STATUS(dsc_aio_submit_write(aio, file, shifts[o], buf, sizes[s], &id), DSC_OK);
                CHECK_STATUS(dsc_aio_wait(aio, id, &res), DSC_OK);
                CHECK_EQ(res, sizes[s]);
                CHECK_BYTES(got, wanted, (size_t)folder_read(got, sizeof got));
                memset(buf, 0, sizes[s]);
                CHECK_STATUS(dsc_aio_submit_read(aio, file, shifts[o], buf, sizes[s], &id), DSC_OK);
                CHECK_STATUS(dsc_aio_wait(aio, id, &res), DSC_OK);
                CHECK_EQ(res, sizes[s]);
                CHECK_BYTES(buf, wanted + shifts[o], sizes[s]);
            }
    CHECK(n_direct > 0 || !dsc_aio_file_is_direct(file));
    dsc_aio_destroy(aio);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    munmap(memory, CAPACITY);
    free(wanted);
}

static void test_pool(void)
{
    dsc_aio_pool *pool = NULL;
    int64_t used = 0;
    int64_t held = 0;
    void *buf = NULL;

    TEST_CASE("pool");
    CHECK_STATUS(dsc_aio_pool_create(2 * PAGE, &pool), DSC_OK);
    CHECK_STATUS(dsc_aio_pool_take(pool, 1, &buf, NULL), DSC_OK);
    dsc_aio_pool_bytes(pool, &used, &held);
    CHECK_EQ(used, PAGE);
    CHECK_EQ(held, PAGE);
    dsc_aio_pool_destroy(pool);
}

int main(void)
{
    const struct dsc_aio_fault_plan plan = {.seed = 1, .short_chance = 20};

    folder_make();
    dsc_aio_plug_backend(&watch, false);
    dsc_aio_fault_set(&plan);
    CHECK_EQ(dsc_aio_alignment(), PAGE);
    test_pool();
    test_transfers();
    page_bytes = 1024; /* smaller than disks require */
    CHECK_EQ(dsc_aio_alignment(), 4096);

    /* A page that a transfer shares with other memory may be lost to a child. */
    page_bytes = memory_align = 4096;
    for (size_t i = 0; i < 3; i++) {
        static const char *const old[] = {"6.2.16-generic", "5.15.0", "no number"};

        release = old[i];
        test_transfers();
    }
    memory_align = 1;
    release = "6.3.0";
    test_transfers();
    folder_remove();
    return test_finish(__FILE__);
}
