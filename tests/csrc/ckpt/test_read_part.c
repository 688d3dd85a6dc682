/*
 * ckpt/read_part.c against brute force: each element's place follows from its index. The program's own pread gives few
 * bytes at a time, is interrupted, and fails.
 */
#include "test.h"

#include "dsc/ckpt.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_DIMS 4
#define MAX_FILE_BYTES (1 << 20)
#define GUARD 16

static unsigned char content[MAX_FILE_BYTES];
static unsigned char expected[MAX_FILE_BYTES];
static unsigned char got[MAX_FILE_BYTES + 2 * GUARD];
static int fd;

/* The behaviour of pread. */
static int64_t n_calls;
static int64_t most_bytes; /* of one call; 0: no limit */
static int interrupt_every;
static int64_t fails_from = -1; /* the first byte of the file that gives EIO */

ssize_t pread(int file, void *into, size_t n_bytes, off_t offset)
{
    n_calls++;
    if (interrupt_every > 0 && n_calls % interrupt_every == 0) {
        errno = EINTR;
        return -1;
    }
    if (most_bytes > 0 && (int64_t)n_bytes > most_bytes)
        n_bytes = (size_t)most_bytes;
    if (fails_from >= 0 && offset >= fails_from) {
        errno = EIO;
        return -1;
    }
    if (fails_from >= 0 && (int64_t)n_bytes > fails_from - offset)
        n_bytes = (size_t)(fails_from - offset);
    return syscall(SYS_pread64, file, into, n_bytes, offset);
}

static void calm(void)
{
    n_calls = 0;
    most_bytes = 0;
    interrupt_every = 0;
    fails_from = -1;
}

struct task {
    int32_t n_dims;
    int64_t shape[MAX_DIMS];
    int64_t wanted[2 * MAX_DIMS + 2];
    int64_t elem_bytes;
    int64_t offset;
};

static int64_t elems_of(const int64_t *size, int32_t n_dims)
{
    int64_t n = 1;

    for (int32_t d = 0; d < n_dims; d++)
        n *= size[d];
    return n;
}

/* The place in the file of a wanted element. */
static int64_t place_of(const struct task *task, int64_t element)
{
    int64_t place = 0;
    int64_t stride = 1;

    element += task->wanted[2 * task->n_dims];
    for (int32_t d = task->n_dims - 1; d >= 0; d--) {
        place += (task->wanted[d] + element % task->wanted[task->n_dims + d]) * stride;
        element /= task->wanted[task->n_dims + d];
        stride *= task->shape[d];
    }
    return task->offset + place * task->elem_bytes;
}

static dsc_status read_task(const struct task *task, struct dsc_read_failure *failure)
{
    memset(got, 0xEE, sizeof got);
    return dsc_part_read(fd, task->offset, task->elem_bytes, task->shape, task->n_dims, task->wanted, got + GUARD,
                         failure);
}

static void check_task(const struct task *task)
{
    int64_t n_elems = task->wanted[2 * task->n_dims + 1];
    int64_t n_bytes = n_elems * task->elem_bytes;
    unsigned char guard[GUARD];

    memset(guard, 0xEE, sizeof guard);
    for (int64_t e = 0; e < n_elems; e++)
        memcpy(expected + e * task->elem_bytes, content + place_of(task, e), (size_t)task->elem_bytes);
    CHECK_STATUS(read_task(task, NULL), DSC_OK);
    CHECK_BYTES(got + GUARD, expected, (size_t)n_bytes);
    CHECK_BYTES(got, guard, GUARD);
    CHECK_BYTES(got + GUARD + n_bytes, guard, GUARD);
}

static void random_task(struct task *task, uint64_t *random)
{
    static const int64_t longest[] = {3, 7, 40, 1300};
    int32_t n_dims = (int32_t)test_below(random, MAX_DIMS + 1);

    task->n_dims = n_dims;
    task->elem_bytes = INT64_C(1) << test_below(random, 4);
    task->offset = test_below(random, 2) * test_below(random, 1000);
    do {
        for (int32_t d = 0; d < n_dims; d++)
            task->shape[d] = test_below(random, 12) == 0 ? test_below(random, 2)
                                                         : 1 + test_below(random, longest[test_below(random, 4)]);
    } while (task->offset + elems_of(task->shape, n_dims) * task->elem_bytes > MAX_FILE_BYTES);
    for (int32_t d = 0; d < n_dims; d++) {
        int64_t *start = &task->wanted[d];
        int64_t *size = &task->wanted[n_dims + d];

        *start = test_below(random, 2) == 0 ? 0 : test_below(random, task->shape[d] + 1);
        *size = task->shape[d] - *start;
        if (test_below(random, 3) == 0)
            *size = test_below(random, *size + 1);
    }

    int64_t n_elems = elems_of(task->wanted + n_dims, n_dims);

    task->wanted[2 * n_dims] = test_below(random, 2) == 0 ? 0 : test_below(random, n_elems + 1);
    task->wanted[2 * n_dims + 1] = n_elems - task->wanted[2 * n_dims];
    if (test_below(random, 2) == 0)
        task->wanted[2 * n_dims + 1] = test_below(random, task->wanted[2 * n_dims + 1] + 1);
}

static void test_random_parts(void)
{
    uint64_t random = 11;

    for (int round = 0; round < 2000; round++) {
        struct task task = {0};

        random_task(&task, &random);
        calm();
        if (round % 4 == 1)
            most_bytes = 1 + test_below(&random, 5000);
        if (round % 4 == 2)
            interrupt_every = 2;
        TEST_CASE("random parts, round %d: %d dims", round, (int)task.n_dims);
        check_task(&task);
    }
    calm();
}

/* Runs and gaps about as long as the limits of what is read at once; each limit from below and from above. */
static void test_limits(void)
{
    static const int64_t lengths[] = {1, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 65535, 65536, 65537, 100003};
    enum { N_LENGTHS = sizeof lengths / sizeof lengths[0] };

    for (int i = 0; i < N_LENGTHS; i++) {
        for (int j = 0; j < N_LENGTHS; j++) {
            int64_t row = lengths[i] + lengths[j];
            struct task task = {.n_dims = 2, .shape = {MAX_FILE_BYTES / row, row}, .elem_bytes = 1};

            if (task.shape[0] > 100)
                task.shape[0] = 100;
            memcpy(task.wanted, (int64_t[]){0, 0, task.shape[0], lengths[i], 0, task.shape[0] * lengths[i]},
                   6 * sizeof(int64_t));
            TEST_CASE("runs of %d with gaps of %d", (int)lengths[i], (int)lengths[j]);
            check_task(&task);
            task.wanted[1] = lengths[j];
            check_task(&task);
        }
    }
}

/* A half of each short row takes a call for 64 KiB, and a half of each long row takes a call and no other bytes. */
static void test_number_of_calls(void)
{
    struct task task = {.n_dims = 2, .shape = {512, 1024}, .wanted = {0, 512, 512, 512, 0, 512 * 512}, .elem_bytes = 2};

    TEST_CASE("short halves");
    calm();
    check_task(&task);
    CHECK(n_calls <= 17);
    TEST_CASE("long halves");
    task = (struct task){
        .n_dims = 2, .shape = {100, 10000}, .wanted = {0, 0, 100, 5000, 0, 100 * 5000}, .elem_bytes = 1};
    calm();
    check_task(&task);
    CHECK_EQ(n_calls, 100);
    TEST_CASE("whole rows are one run");
    task = (struct task){
        .n_dims = 3, .shape = {5, 100, 1000}, .wanted = {2, 0, 0, 2, 100, 1000, 7, 150000}, .elem_bytes = 2};
    calm();
    check_task(&task);
    CHECK_EQ(n_calls, 1);
}

/* The file ends, or cannot be read, at any byte of runs that are read one by one or at once. */
static void check_failures(const struct task *task)
{
    int64_t last = place_of(task, task->wanted[2 * task->n_dims + 1] - 1) + task->elem_bytes;
    struct dsc_read_failure failure;

    for (int64_t at = 0; at < last; at += 1 + last / 97) {
        TEST_AT(at);
        calm();
        fails_from = at;
        failure = (struct dsc_read_failure){0};
        CHECK_ERROR(read_task(task, &failure), DSC_EIO, "cannot be read: ");
        CHECK_EQ(failure.err, EIO);
        CHECK(failure.begin < failure.end && failure.at < failure.end && failure.end <= last);
        CHECK_EQ(failure.at, failure.begin > at ? failure.begin : at); /* a gap that is not read cannot fail */
        CHECK_STATUS(read_task(task, NULL), DSC_EIO);
        calm();
        CHECK_EQ(ftruncate(fd, at), 0);
        CHECK_ERROR(read_task(task, &failure), DSC_ECORRUPT, "the file ends at byte ");
        CHECK_EQ(failure.err, 0);
        CHECK_EQ(failure.at, at);
        CHECK(failure.end > at && failure.end <= last);
        CHECK_EQ(pwrite(fd, content + at, (size_t)(MAX_FILE_BYTES - at), at), MAX_FILE_BYTES - at);
    }
}

static void test_failures(void)
{
    TEST_CASE("runs at once");
    check_failures(&(struct task){
        .n_dims = 2, .shape = {300, 200}, .wanted = {3, 10, 290, 77, 5, 290 * 77 - 9}, .elem_bytes = 2, .offset = 13});
    TEST_CASE("runs one by one");
    check_failures(&(struct task){
        .n_dims = 2, .shape = {60, 9000}, .wanted = {1, 4000, 58, 5000, 0, 58 * 5000}, .elem_bytes = 1});

    struct task task = {.n_dims = 1, .shape = {4}, .wanted = {0, 4, 0, 4}, .elem_bytes = 1};
    struct dsc_read_failure failure = {0};
    int good = fd;

    TEST_CASE("no file");
    fd = -1;
    CHECK_ERROR(read_task(&task, &failure), DSC_EIO, "bytes 0 to 4 cannot be read");
    CHECK_EQ(failure.err, EBADF);
    fd = good;
}

static void test_arguments(void)
{
    const int64_t shape[] = {3, 4};
    const int64_t good[] = {0, 0, 3, 4, 0, 12};
    const int64_t beyond[] = {0, 1, 3, 4, 0, 12};
    const int64_t many[] = {0, 0, 3, 4, 1, 12};
    const int64_t none[] = {0, 0, 3, 4, 12, 0};
    const int64_t large[] = {INT64_C(1) << 40, INT64_C(1) << 22};

    TEST_CASE("arguments");
    calm();
    CHECK_ERROR(dsc_part_read(fd, 0, 1, shape, 2, beyond, got, NULL), DSC_EINVAL, "along dimension 1");
    CHECK_ERROR(dsc_part_read(fd, 0, 1, shape, 2, many, got, NULL), DSC_EINVAL, "12 elements from 1 of a box of 12");
    CHECK_ERROR(dsc_part_read(fd, 0, 0, shape, 2, good, got, NULL), DSC_EINVAL, "elem_bytes is 0");
    CHECK_ERROR(dsc_part_read(fd, -1, 1, shape, 2, good, got, NULL), DSC_EINVAL, "offset -1");
    CHECK_ERROR(dsc_part_read(fd, 0, 1, shape, -1, good, got, NULL), DSC_EINVAL, "n_dims is -1");
    CHECK_ERROR(dsc_part_read(fd, 0, 1, NULL, 2, good, got, NULL), DSC_EINVAL, "shape is NULL");
    CHECK_ERROR(dsc_part_read(fd, 0, 1, shape, 2, NULL, got, NULL), DSC_EINVAL, "wanted is NULL");
    CHECK_ERROR(dsc_part_read(fd, 0, 1, shape, 2, good, NULL, NULL), DSC_EINVAL, "into is NULL");
    CHECK_ERROR(dsc_part_read(fd, 0, 4, large, 2, good, got, NULL), DSC_EOVERFLOW, "do not fit");
    CHECK_ERROR(dsc_part_read(fd, INT64_MAX - 11, 1, shape, 2, good, got, NULL), DSC_EOVERFLOW, "do not fit");
    CHECK_STATUS(dsc_part_read(fd, INT64_MAX - 12, 1, shape, 2, none, NULL, NULL), DSC_OK);
    CHECK_EQ(n_calls, 0);
}

int main(void)
{
    char path[] = "/tmp/dsc-read-part-XXXXXX";
    uint64_t random = 3;

    fd = mkstemp(path);
    if (fd < 0) {
        printf("no temporary file: %s\n", strerror(errno));
        return TEST_SKIPPED;
    }
    for (size_t i = 0; i < sizeof content; i++)
        content[i] = (unsigned char)test_below(&random, 256);
    CHECK_EQ(pwrite(fd, content, sizeof content, 0), (int64_t)sizeof content);
    test_random_parts();
    test_limits();
    test_number_of_calls();
    test_failures();
    test_arguments();
    CHECK_EQ(close(fd), 0);
    CHECK_EQ(unlink(path), 0);
    return test_finish(__FILE__);
}
