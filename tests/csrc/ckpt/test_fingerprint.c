/* ckpt/fingerprint.c: the CRC32C of whole tensors, against random cuts of them into ranges and boxes. */
#include "test.h"

#include "pool.h"
#include "dsc/ckpt.h"

#define MAX_DIMS 4
#define MAX_BYTES (1 << 20)

/* The contribution of one part. */
static dsc_status crc_of_part(const int64_t *shape, int32_t n_dims, const int64_t *part, int64_t elem_bytes,
                              const void *data, const struct dsc_par *par, uint32_t *sum)
{
    struct dsc_crc32c_part one = {
        .shape = shape, .part = part, .data = data, .elem_bytes = elem_bytes, .n_dims = n_dims, .sum = *sum};
    dsc_status status = dsc_crc32c_parts(&one, 1, par);

    *sum = one.sum;
    return status;
}

static int64_t product(const int64_t *sizes, int32_t n_dims)
{
    int64_t n = 1;

    for (int32_t d = 0; d < n_dims; d++)
        n *= sizes[d];
    return n;
}

/* Copies elements [begin, end) of the box into `into`, one at a time. */
static void take(const int64_t *shape, int32_t n_dims, const int64_t *part, int64_t elem_bytes,
                 const unsigned char *from, unsigned char *into)
{
    for (int64_t i = 0; i < part[2 * n_dims + 1]; i++) {
        int64_t rest = part[2 * n_dims] + i;
        int64_t at = 0;
        int64_t stride = 1;

        for (int32_t d = n_dims - 1; d >= 0; d--) {
            at += (part[d] + rest % part[n_dims + d]) * stride;
            rest /= part[n_dims + d];
            stride *= shape[d];
        }
        memcpy(into + i * elem_bytes, from + at * elem_bytes, (size_t)elem_bytes);
    }
}

/* The XOR over a tensor cut along two dimensions into four boxes, and each box into three ranges. */
static uint32_t sum_of_cuts(const int64_t *shape, int32_t n_dims, int64_t elem_bytes, const unsigned char *bytes,
                            unsigned char *scratch, uint64_t *random, const struct dsc_par *par)
{
    int32_t dims[2] = {n_dims > 0 ? (int32_t)test_below(random, (uint64_t)n_dims) : 0,
                       n_dims > 0 ? (int32_t)test_below(random, (uint64_t)n_dims) : 0};
    int64_t at[2] = {0, 0};
    uint32_t sum = 0;
    int n_boxes = n_dims == 0 ? 1 : dims[0] == dims[1] ? 2 : 4;

    for (int k = 0; k < 2 && n_dims > 0; k++)
        at[k] = (int64_t)test_below(random, (uint64_t)shape[dims[k]] + 1);
    for (int box = 0; box < n_boxes; box++) {
        int64_t part[2 * MAX_DIMS + 2] = {0};
        int64_t cuts[4] = {0};

        for (int32_t d = 0; d < n_dims; d++)
            part[n_dims + d] = shape[d];
        for (int k = 0; k < 2 && 1 << k < n_boxes; k++) {
            bool is_upper = (box >> k & 1) != 0;

            part[dims[k]] = is_upper ? at[k] : 0;
            part[n_dims + dims[k]] = is_upper ? shape[dims[k]] - at[k] : at[k];
        }
        cuts[3] = product(part + n_dims, n_dims);
        cuts[1] = (int64_t)test_below(random, (uint64_t)cuts[3] + 1);
        cuts[2] = cuts[1] + (int64_t)test_below(random, (uint64_t)(cuts[3] - cuts[1]) + 1);
        for (int i = 0; i < 3; i++) {
            uint32_t of_part = 0x5a5a5a5a;
            size_t shift = (size_t)test_below(random, 9);

            part[2 * n_dims] = cuts[i];
            part[2 * n_dims + 1] = cuts[i + 1] - cuts[i];
            take(shape, n_dims, part, elem_bytes, bytes, scratch + shift);
            CHECK_STATUS(crc_of_part(shape, n_dims, part, elem_bytes, scratch + shift, par, &of_part), DSC_OK);
            sum ^= of_part;
        }
    }
    return sum;
}

static void test_cuts(const struct dsc_par *par)
{
    static const struct {
        int32_t n_dims;
        int64_t shape[MAX_DIMS];
    } tensors[] = {
        {0, {0}},        {1, {0}},        {1, {1}},        {1, {2}},          {1, {7}},          {1, {1009}},
        {1, {50021}},    {2, {0, 5}},     {2, {5, 0}},     {2, {1, 1}},       {2, {13, 17}},     {2, {64, 32}},
        {3, {5, 7, 11}}, {3, {1, 1, 31}}, {3, {31, 1, 1}}, {4, {3, 1, 5, 7}}, {4, {2, 3, 5, 4}},
    };
    static const int64_t sizes[] = {1, 2, 3, 4, 8};
    unsigned char *bytes = test_alloc(MAX_BYTES);
    unsigned char *scratch = test_alloc(MAX_BYTES + 16);
    uint64_t random = 76;

    for (size_t i = 0; i < MAX_BYTES; i++)
        bytes[i] = (unsigned char)test_random(&random);
    for (size_t t = 0; t < sizeof tensors / sizeof tensors[0]; t++) {
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            int64_t n_bytes = product(tensors[t].shape, tensors[t].n_dims) * sizes[s];
            uint32_t wanted = dsc_crc32c(0, bytes, (size_t)n_bytes);

            for (int round = 0; round < (n_bytes > 10000 ? 4 : 20); round++) {
                TEST_CASE("tensor %d, %d bytes an element, round %d", (int)t, (int)sizes[s], round);
                uint32_t sum = sum_of_cuts(tensors[t].shape, tensors[t].n_dims, sizes[s], bytes, scratch, &random, par);

                CHECK_EQ(dsc_crc32c_of_parts(sum, (uint64_t)n_bytes), wanted);
            }
        }
    }
    free(bytes);
    free(scratch);
}

/* Long parts, which are shared out. */
static void test_long(const struct dsc_par *par)
{
    const int64_t n = 9 * (INT64_C(1) << 20) + 5;
    const int64_t shape[1] = {n};
    unsigned char *bytes = test_alloc((size_t)(2 * n));
    uint64_t random = 67;

    for (int64_t i = 0; i < 2 * n; i++)
        bytes[i] = (unsigned char)test_random(&random);
    for (int round = 0; round < 3; round++) {
        int64_t cut = (int64_t)test_below(&random, (uint64_t)n + 1);
        const int64_t parts[2][4] = {{0, n, 0, cut}, {0, n, cut, n - cut}};
        uint32_t sums[2] = {0};

        TEST_CASE("%d and %d elements", (int)cut, (int)(n - cut));
        for (int i = 0; i < 2; i++)
            CHECK_STATUS(crc_of_part(shape, 1, parts[i], 2, bytes + 2 * parts[i][2], par, &sums[i]), DSC_OK);
        CHECK_EQ(dsc_crc32c_of_parts(sums[0] ^ sums[1], (uint64_t)(2 * n)), dsc_crc32c(0, bytes, (size_t)(2 * n)));
    }
    free(bytes);
}

/* Parts of many lengths in one call, some without elements, against a call for each. */
static void test_many(const struct dsc_par *par)
{
    enum { N_PARTS = 97 };
    const int64_t n = INT64_C(3) << 20;
    const int64_t shape[1] = {n};
    unsigned char *bytes = test_alloc((size_t)n);
    struct dsc_crc32c_part parts[N_PARTS];
    int64_t numbers[N_PARTS][4];
    uint64_t random = 97;

    for (int64_t i = 0; i < n; i++)
        bytes[i] = (unsigned char)test_random(&random);
    for (int i = 0; i < N_PARTS; i++) {
        int64_t n_elems = i % 5 == 0 ? 0 : i % 7 == 0 ? 1 << 20 : (int64_t)test_below(&random, 1000);
        int64_t begin = (int64_t)test_below(&random, (uint64_t)(n - n_elems));

        memcpy(numbers[i], (int64_t[4]){0, n, begin, n_elems}, sizeof numbers[i]);
        parts[i] = (struct dsc_crc32c_part){
            .shape = shape, .part = numbers[i], .data = bytes + begin, .elem_bytes = 1, .n_dims = 1, .sum = 5};
    }
    TEST_CASE("many");
    CHECK_STATUS(dsc_crc32c_parts(parts, N_PARTS, par), DSC_OK);
    for (int i = 0; i < N_PARTS; i++) {
        uint32_t alone = 7;

        TEST_CASE("part %d of %d elements", i, (int)numbers[i][3]);
        CHECK_STATUS(crc_of_part(shape, 1, numbers[i], 1, parts[i].data, NULL, &alone), DSC_OK);
        CHECK_EQ(parts[i].sum, alone);
    }
    TEST_CASE("the last of many does not fit");
    numbers[N_PARTS - 1][1] = n + 1;
    parts[0].sum = 11;
    CHECK_ERROR(dsc_crc32c_parts(parts, N_PARTS, par), DSC_EINVAL, "pieces[96]");
    CHECK_EQ(parts[0].sum, 11);
    CHECK_ERROR(dsc_crc32c_parts(parts, -1, par), DSC_EINVAL, "n_parts");
    CHECK_ERROR(dsc_crc32c_parts(NULL, 1, par), DSC_EINVAL, "NULL");
    CHECK_STATUS(dsc_crc32c_parts(NULL, 0, par), DSC_OK);
    free(bytes);
}

static void test_known_values(void)
{
    const int64_t shape[1] = {9};
    const int64_t first[4] = {0, 9, 0, 4};
    const int64_t second[4] = {0, 9, 4, 5};
    uint32_t a = 0;
    uint32_t b = 0;

    TEST_CASE("known values");
    CHECK_STATUS(crc_of_part(shape, 1, first, 1, "1234", NULL, &a), DSC_OK);
    CHECK_STATUS(crc_of_part(shape, 1, second, 1, "56789", NULL, &b), DSC_OK);
    CHECK_EQ(dsc_crc32c_of_parts(a ^ b, 9), 0xe3069283u); /* RFC 3720 */
    CHECK_EQ(dsc_crc32c_of_parts(0, 0), 0);
    CHECK_EQ(dsc_crc32c_of_parts(0, 32), 0x8a9136aau); /* zeros */
}

static void test_errors(void)
{
    const int64_t shape[2] = {3, 4};
    const int64_t huge[2] = {INT64_C(1) << 40, INT64_C(1) << 22};
    const int64_t none[6] = {0, 0, 3, 4, 2, 0};
    const int64_t fits[6] = {0, 0, 3, 4, 2, 3};
    const int64_t outside[6] = {1, 0, 3, 4, 0, 1};
    const int64_t too_many[6] = {0, 0, 3, 4, 2, 11};
    uint32_t out = 17;

    TEST_CASE("errors");
    CHECK_ERROR(crc_of_part(shape, 2, fits, 4, NULL, NULL, &out), DSC_EINVAL, "data");
    CHECK_ERROR(crc_of_part(shape, 2, fits, 0, "", NULL, &out), DSC_EINVAL, "elem_bytes");
    CHECK_ERROR(crc_of_part(shape, 2, outside, 4, "", NULL, &out), DSC_EINVAL, "dimension 0");
    CHECK_ERROR(crc_of_part(shape, 2, too_many, 4, "", NULL, &out), DSC_EINVAL, "11 elements");
    CHECK_ERROR(crc_of_part(shape, 65, fits, 4, "", NULL, &out), DSC_EINVAL, "n_dims");
    CHECK_ERROR(crc_of_part(huge, 2, none, 4, "", NULL, &out), DSC_EOVERFLOW, "bytes");
    CHECK_EQ(out, 17);
    CHECK_STATUS(crc_of_part(shape, 2, none, 4, NULL, NULL, &out), DSC_OK);
    CHECK_EQ(out, 0);
}

int main(void)
{
    struct pool pool;

    pool_init(&pool, 3, 1);
    test_known_values();
    test_cuts(NULL);
    test_cuts(&pool.par);
    test_long(NULL);
    test_long(&pool.par);
    test_many(NULL);
    test_many(&pool.par);
    test_errors();
    pool_clear(&pool);
    return test_finish(__FILE__);
}
