/* dsc_part_read: a part that is accepted arrives element by element, from a file that may be cut short; wild numbers are refused or harmless. */
#include "fuzz.h"

#include "dsc/ckpt.h"

#include <sys/mman.h>
#include <unistd.h>

#define MAX_DIMS 4
#define MAX_BYTES (8 * 6 * 6 * 6 * 6)

static unsigned char content[MAX_BYTES];
static unsigned char into[MAX_BYTES];

static int open_file(void)
{
    static int fd = -1;

    if (fd < 0) {
        fd = memfd_create("fuzz_read_part", MFD_CLOEXEC);
        for (int i = 0; i < MAX_BYTES; i++)
            content[i] = (unsigned char)(i * 37 + i / 251);
    }
    REQUIRE(fd >= 0);
    return fd;
}

static void fuzz_small(struct input *input)
{
    int64_t shape[MAX_DIMS];
    int64_t wanted[2 * MAX_DIMS + 2];
    int32_t n_dims = (int32_t)take_below(input, MAX_DIMS + 1);
    int64_t elem_bytes = 1 + take_below(input, 8);
    int64_t n_elems = 1;
    int64_t box_elems = 1;
    int64_t n_needed = 0; /* bytes of the file */
    int fd = open_file();
    struct dsc_read_failure failure = {0};

    for (int32_t d = 0; d < n_dims; d++) {
        shape[d] = take_below(input, 7);
        wanted[d] = take_below(input, shape[d] + 1);
        wanted[n_dims + d] = take_below(input, shape[d] - wanted[d] + 1);
        n_elems *= shape[d];
        box_elems *= wanted[n_dims + d];
    }
    wanted[2 * n_dims] = take_below(input, box_elems + 1);
    wanted[2 * n_dims + 1] = take_below(input, box_elems - wanted[2 * n_dims] + 1);

    int64_t offset = take_below(input, MAX_BYTES - n_elems * elem_bytes + 1);
    int64_t n_bytes = take_below(input, 2) == 0 ? MAX_BYTES : take_below(input, MAX_BYTES + 1);

    REQUIRE(ftruncate(fd, 0) == 0 && pwrite(fd, content, (size_t)n_bytes, 0) == n_bytes);

    dsc_status status = dsc_part_read(fd, offset, elem_bytes, shape, n_dims, wanted, into, &failure);

    for (int64_t e = 0; e < wanted[2 * n_dims + 1]; e++) {
        int64_t rest = wanted[2 * n_dims] + e;
        int64_t place = 0;
        int64_t stride = 1;

        for (int32_t d = n_dims - 1; d >= 0; d--) {
            place += (wanted[d] + rest % wanted[n_dims + d]) * stride;
            rest /= wanted[n_dims + d];
            stride *= shape[d];
        }
        place = offset + place * elem_bytes;
        n_needed = place + elem_bytes;
        REQUIRE(status != DSC_OK || memcmp(into + e * elem_bytes, content + place, (size_t)elem_bytes) == 0);
    }
    REQUIRE((status == DSC_OK) == (n_needed <= n_bytes));
    REQUIRE(status == DSC_OK || (status == DSC_ECORRUPT && failure.at == n_bytes && failure.err == 0));
}

/* As a damaged header might have it. Only small parts are read. */
static void fuzz_wild(struct input *input)
{
    int64_t numbers[MAX_DIMS + 2 * MAX_DIMS + 2];
    int32_t n_dims = (int32_t)take_below(input, MAX_DIMS + 1);
    int64_t elem_bytes = take_wild(input);
    int64_t offset = take_wild(input);
    int64_t *wanted = numbers + MAX_DIMS;

    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        numbers[i] = take_wild(input);
    if (wanted[2 * n_dims + 1] > MAX_BYTES / 8)
        wanted[2 * n_dims + 1] = MAX_BYTES / 8;
    if (elem_bytes > 8)
        elem_bytes = 8;
    (void)dsc_part_read(open_file(), offset, elem_bytes, numbers, n_dims, wanted, into, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};

    if (take_byte(&input) % 3 == 2)
        fuzz_wild(&input);
    else
        fuzz_small(&input);
    return 0;
}
