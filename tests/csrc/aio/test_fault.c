/*
 * The engine over a backend whose transfers go wrong: a successful request is complete, a failed request has a reason,
 * and neither affects other requests.
 */
#include "aio/folder.h"

#include "aio/fault.c"

#include <sys/mman.h>

#define CREATE (DSC_AIO_READ | DSC_AIO_WRITE | DSC_AIO_CREATE | DSC_AIO_TRUNCATE)

enum { N = 60, BYTES = 20011, BLOCK = 4096 };

static unsigned char data[N * BYTES];
static unsigned char got[N * BYTES + 1];

static dsc_aio *make(const struct dsc_aio_fault_plan *plan)
{
    dsc_aio_fault_set(plan);
    return folder_engine("fault", BLOCK, 6);
}

/* Random failures: each request ends, and the data of the successful requests is on the disk. */
static void test_failures(uint64_t seed, bool uses_direct)
{
    const struct dsc_aio_fault_plan plan = {
        .seed = seed, .failure_chance = 8, .failure_err = ENOSPC, .short_chance = 60, .passing_chance = 20, .late_chance = 100, .reorders = true, .takes_part = true,
    };
    dsc_aio *aio = make(&plan);
    dsc_aio_file *file = folder_open(CREATE, uses_direct);
    dsc_aio_id ids[N];
    int64_t n_failed = 0;

    TEST_CASE("seed %d direct=%d", (int)seed, uses_direct);
    memset(got, 0, sizeof got);
    for (int i = 0; i < N; i++)
        CHECK_STATUS(dsc_aio_submit_write(aio, file, i * BYTES, data + i * BYTES, BYTES, &ids[i]), DSC_OK);
    for (int i = N; i-- > 0;) {
        int64_t res = 0;
        dsc_status status = dsc_aio_wait(aio, ids[i], &res);

        if (status == DSC_OK) {
            CHECK_EQ(res, BYTES);
            continue;
        }
        n_failed++;
        CHECK_EQ(status, DSC_EIO);
        CHECK_EQ(res, -ENOSPC);
        ids[i] = 0;
    }
    CHECK(n_failed > 0 && n_failed < N);
    CHECK(dsc_aio_fault_counts().n_failures >= n_failed);
    CHECK(folder_read(got, sizeof got) <= (int64_t)sizeof data);
    for (int i = 0; i < N; i++)
        if (ids[i] != 0)
            CHECK_BYTES(got + i * BYTES, data + i * BYTES, BYTES);
    CHECK_EQ(dsc_aio_pending(aio), 0);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    dsc_aio_destroy(aio);
}

/* Only the requests that touch a bad sector fail, and the message names the sector. */
static void test_bad_sector(bool is_write, bool uses_direct)
{
    const int64_t bad = 7 * BYTES + 9000;
    const struct dsc_aio_fault_plan plan = {.seed = 5, .bad_begin = bad, .bad_end = bad + 1, .reorders = true, .short_chance = is_write ? 0 : 30};
    dsc_aio *aio = make(&plan);
    dsc_aio_file *file;
    dsc_aio_id ids[N];
    int64_t n_done = 0;
    char sentence[300];

    TEST_CASE("write=%d direct=%d", is_write, uses_direct);
    folder_write(data, sizeof data);
    memset(got, 0, sizeof got);
    file = folder_open(DSC_AIO_READ | DSC_AIO_WRITE, uses_direct);
    for (int i = 0; i < N; i++)
        CHECK_STATUS(is_write ? dsc_aio_submit_write(aio, file, i * BYTES, data + i * BYTES, BYTES, &ids[i])
                              : dsc_aio_submit_read(aio, file, i * BYTES, got + i * BYTES, BYTES, &ids[i]),
                     DSC_OK);
    snprintf(sentence, sizeof sentence, "%s %d bytes at offset %d of %s: Input/output error", is_write ? "write" : "read", BYTES, 7 * BYTES, path);
    CHECK_ERROR(dsc_aio_wait_all(aio, &n_done), DSC_EIO, sentence);
    CHECK_EQ(n_done, N - 1);

    struct dsc_aio_failure failure;

    dsc_aio_last_failure(&failure);
    CHECK_EQ(failure.err, EIO);
    CHECK_EQ(failure.n_others, 0);
    CHECK(failure.at <= bad && failure.at > bad - BLOCK);
    for (int i = 0; i < N && !is_write; i++)
        if (i != 7)
            CHECK_BYTES(got + i * BYTES, data + i * BYTES, BYTES);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    dsc_aio_destroy(aio);
}

/* At the end of the disk the kernel shortens one write and refuses the following writes. */
static void test_full_disk(void)
{
    const struct dsc_aio_fault_plan plan = {.seed = 6, .full_at = 3 * BYTES + 100};
    dsc_aio *aio = make(&plan);
    dsc_aio_file *file = folder_open(CREATE, false);
    dsc_aio_id id;
    int64_t res;

    TEST_CASE("full disk");
    for (int i = 0; i < 5; i++) {
        CHECK_STATUS(dsc_aio_submit_write(aio, file, i * BYTES, data + i * BYTES, BYTES, &id), DSC_OK);
        CHECK_STATUS(dsc_aio_wait(aio, id, &res), i < 3 ? DSC_OK : DSC_EIO);
        CHECK_EQ(res, i < 3 ? BYTES : -ENOSPC);
    }
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    dsc_aio_destroy(aio);
}

/* A backend that always answers "later" ends in a failure, not in a hang. */
static void test_never(void)
{
    const struct dsc_aio_fault_plan plans[] = {{.seed = 7, .passing_chance = 256}, {.seed = 8, .refusal_chance = 256}};
    dsc_aio_file *file = folder_open(CREATE, false);

    for (int i = 0; i < 2; i++) {
        dsc_aio *aio = make(&plans[i]);
        dsc_aio_id id;
        int64_t res = 0;

        TEST_CASE("never, plan %d", i);
        CHECK_STATUS(dsc_aio_submit_write(aio, file, 0, data, 10, &id), DSC_OK);
        CHECK_STATUS(dsc_aio_wait(aio, id, &res), DSC_EIO);
        CHECK(res == -EINTR || res == -EAGAIN || res == -EBUSY);
        dsc_aio_destroy(aio);
    }
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
}

/* After a backend has died, all pending requests fail, nothing hangs, and new requests are refused. */
static void test_death(void)
{
    const struct dsc_aio_fault_plan plan = {.seed = 9, .dies_after = 7, .late_chance = 256};
    dsc_aio *aio = make(&plan);
    dsc_aio_file *file = folder_open(CREATE, false);
    dsc_aio_id ids[4];
    int64_t n_done = -7;

    TEST_CASE("death");
    for (int i = 0; i < 4; i++)
        (void)dsc_aio_submit_write(aio, file, i * BYTES, data + i * BYTES, BYTES, &ids[i]);
    CHECK(!dsc_aio_has_given_up(aio));
    CHECK_ERROR(dsc_aio_wait_all(aio, &n_done), DSC_EIO, "Bad file descriptor");
    CHECK(dsc_aio_has_given_up(aio));
    CHECK_EQ(dsc_aio_pending(aio), 0);
    CHECK_ERROR(dsc_aio_submit_write(aio, file, 0, data, 1, &ids[0]), DSC_ESTATE, "given up");
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    dsc_aio_destroy(aio);
}

/*
 * A request of 5 GiB, whose pieces are counted. The memory of the request is only reserved address space without pages.
 */
static void test_huge(void)
{
    const struct dsc_aio_fault_plan plan = {.seed = 10, .pretends = true, .reorders = true};
    const size_t n_bytes = ((size_t)5 << 30) + 1;
    char *memory = mmap(NULL, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;
    dsc_aio_file *file = folder_open(CREATE, false);
    dsc_aio *aio = NULL;
    dsc_aio_id id;
    int64_t res = 0;

    TEST_CASE("huge");
    if (memory == MAP_FAILED) { /* a limit on address space */
        CHECK_STATUS(dsc_aio_close(file), DSC_OK);
        return;
    }
    dsc_aio_fault_set(&plan);
    config.backend = "fault";
    config.block_bytes = (size_t)1 << 24;
    CHECK_STATUS(dsc_aio_create(&config, &aio), DSC_OK);
    CHECK_STATUS(dsc_aio_submit_write(aio, file, ((int64_t)3 << 30) + 17, memory, n_bytes, &id), DSC_OK);
    CHECK_STATUS(dsc_aio_wait(aio, id, &res), DSC_OK);
    CHECK_EQ(res, n_bytes);
    CHECK_EQ(dsc_aio_fault_counts().n_transfers, 5 * 64 + 1);
    dsc_aio_destroy(aio);
    munmap(memory, n_bytes);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
}

/*
 * A file system that accepts O_DIRECT on open and refuses the first transfer. The engine falls back to the page cache,
 * and the file's note says so.
 */
static void test_late_refusal(void)
{
    const struct dsc_aio_fault_plan plan = {.seed = 11, .refuses_direct = true};
    dsc_aio *aio = make(&plan);
    dsc_aio_file *file = folder_open(CREATE, true);
    bool was_direct = dsc_aio_file_is_direct(file);
    dsc_aio_id id;
    int64_t res;

    TEST_CASE("late refusal");
    if (!was_direct)
        CHECK(dsc_aio_file_note(file)[0] != '\0');
    for (int i = 0; i < 3; i++) { /* stricter alignment is tried first, and then the page cache */
        CHECK_STATUS(dsc_aio_submit_write(aio, file, 0, data + i, BYTES, &id), DSC_OK);
        CHECK_STATUS(dsc_aio_wait(aio, id, &res), DSC_OK);
        CHECK_EQ(res, BYTES);
    }
    CHECK(!dsc_aio_file_is_direct(file));
    CHECK(!was_direct || strstr(dsc_aio_file_note(file), "aligned transfer") != NULL);
    CHECK_EQ(folder_read(got, sizeof got), BYTES);
    CHECK_BYTES(got, data + 2, BYTES);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    dsc_aio_destroy(aio);
}

static const char *backend_of(const char *name)
{
    struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;
    dsc_aio *aio = NULL;
    const char *found;

    config.backend = name;
    if (dsc_aio_create(&config, &aio) != DSC_OK)
        return "none";
    found = dsc_aio_backend_name(aio);
    dsc_aio_destroy(aio);
    return found;
}

static void test_plug(void)
{
    const char *usual = backend_of("auto");

    CHECK_STR(backend_of("fault"), "none");
    dsc_aio_plug_backend(&dsc_aio_backend_fault, true);
    CHECK_STR(backend_of("auto"), "fault");
    CHECK_STR(backend_of("fault"), "fault");
    CHECK_STR(backend_of("sync"), "sync");
    dsc_aio_plug_backend(NULL, true);
    CHECK_STR(backend_of("auto"), usual);
    CHECK_STR(backend_of("fault"), "none");
    dsc_aio_plug_backend(&dsc_aio_backend_fault, false);
    CHECK_STR(backend_of("auto"), usual);
}

/* The engine does not detect flipped bits. A caller detects them by checksums. */
static void test_flips(void)
{
    const struct dsc_aio_fault_plan plan = {.seed = 12, .flip_chance = 256, .delay_us = 10};
    dsc_aio *aio = make(&plan);
    dsc_aio_file *file = folder_open(CREATE, true);
    dsc_aio_id id;
    int64_t res = 0;
    int64_t n_wrong = 0;

    CHECK_STATUS(dsc_aio_submit_write(aio, file, 0, data, BLOCK, &id), DSC_OK);
    CHECK_STATUS(dsc_aio_wait(aio, id, &res), DSC_OK);
    CHECK_EQ(dsc_aio_fault_counts().n_flipped, 0);
    CHECK_STATUS(dsc_aio_submit_read(aio, file, 0, got, BLOCK, &id), DSC_OK);
    CHECK_STATUS(dsc_aio_wait(aio, id, &res), DSC_OK);
    CHECK_EQ(res, BLOCK);
    for (size_t i = 0; i < BLOCK; i++)
        n_wrong += got[i] != data[i];
    CHECK_EQ(n_wrong, dsc_aio_fault_counts().n_flipped);
    CHECK(n_wrong > 0);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    dsc_aio_destroy(aio);
}

int main(void)
{
    folder_make();
    test_plug();
    folder_fill(data, sizeof data, 1);
    for (int i = 0; i < 8; i++)
        test_failures((uint64_t)i, i % 2 != 0);
    for (int i = 0; i < 4; i++)
        test_bad_sector(i % 2 != 0, i < 2);
    test_full_disk();
    test_never();
    test_death();
    test_huge();
    test_late_refusal();
    test_flips();
    folder_remove();
    return test_finish(__FILE__);
}
