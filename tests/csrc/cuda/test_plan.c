/* Launch planning: every element is in exactly one block of one launch, for all sizes and limits. */
#include "test.h"

#include "cuda/plan.h"

#define MAX_TENSORS 400
#define MAX_PIECES 64

static int64_t size_at(const void *sizes, int64_t i)
{
    return ((const int64_t *)sizes)[i];
}

static int64_t chunks_of(int64_t n_elems, int64_t chunk_elems)
{
    return n_elems / chunk_elems + (n_elems % chunk_elems != 0);
}

/* Checks one launch against the description in plan.h. */
static void check_launch(const struct dsc_cuda_limits *limits, const struct dsc_cuda_piece *pieces, int32_t n_pieces, int32_t n_blocks)
{
    int32_t first_block[MAX_PIECES];
    int64_t next_block = 0;

    CHECK(n_pieces <= limits->max_pieces);
    CHECK(n_blocks > 0 && n_blocks <= limits->max_blocks);
    for (int32_t i = 0; i < n_pieces; i++) {
        CHECK_EQ(pieces[i].first_block, next_block);
        CHECK(pieces[i].n_elems > 0);
        CHECK_EQ(pieces[i].begin_elems % limits->chunk_elems, 0);
        first_block[i] = pieces[i].first_block;
        next_block += chunks_of(pieces[i].n_elems, limits->chunk_elems);
    }
    CHECK_EQ(next_block, n_blocks);

    /*
     * Checks the piece that each block finds. With many blocks, only the blocks at the borders of pieces are checked.
     */
    for (int32_t i = 0; i < n_pieces; i++) {
        int32_t last = i + 1 < n_pieces ? first_block[i + 1] - 1 : n_blocks - 1;

        CHECK_EQ(dsc_cuda_piece_of(first_block, n_pieces, first_block[i]), i);
        CHECK_EQ(dsc_cuda_piece_of(first_block, n_pieces, last), i);
        for (int32_t block = first_block[i]; block <= last && n_blocks < 4096; block++)
            if (!CHECK_EQ(dsc_cuda_piece_of(first_block, n_pieces, block), i))
                return;
    }
}

/* Returns the number of launches. */
static int64_t check_plan(const struct dsc_cuda_limits *limits, const int64_t *sizes, int64_t n_tensors)
{
    struct dsc_cuda_cursor cursor = {0, 0};
    struct dsc_cuda_piece pieces[MAX_PIECES];
    int64_t tensor = 0, begin_elems = 0; /* where the next piece has to begin */
    int64_t n_launches = 0;
    int32_t n_pieces, n_blocks;

    while ((n_pieces = dsc_cuda_plan_next(limits, n_tensors, size_at, sizes, &cursor, pieces, &n_blocks)) > 0) {
        n_launches++;
        check_launch(limits, pieces, n_pieces, n_blocks);
        for (int32_t i = 0; i < n_pieces; i++) {
            while (tensor < n_tensors && begin_elems == sizes[tensor]) {
                tensor++;
                begin_elems = 0;
            }
            if (!CHECK_EQ(pieces[i].tensor, tensor) || !CHECK_EQ(pieces[i].begin_elems, begin_elems))
                return n_launches;
            begin_elems += pieces[i].n_elems;
            CHECK(begin_elems <= sizes[tensor]);
        }
    }
    while (tensor < n_tensors && begin_elems == sizes[tensor]) {
        tensor++;
        begin_elems = 0;
    }
    CHECK_EQ(tensor, n_tensors);
    CHECK_EQ(n_blocks, 0);
    return n_launches;
}

static void test_hard_sizes(void)
{
    static const int64_t sizes[] = {0, 1, 0, 0, 7, 8, 9, 63, 64, 65, 127, 4099, 0, 64 * 5, 64 * 5 + 1, 0};
    const int64_t n = (int64_t)(sizeof sizes / sizeof sizes[0]);

    for (int64_t chunk = 1; chunk <= 64; chunk *= 4)
        for (int32_t max_pieces = 1; max_pieces <= 7; max_pieces += 3)
            for (int32_t max_blocks = 1; max_blocks <= 81; max_blocks *= 3) {
                const struct dsc_cuda_limits limits = {chunk, max_pieces, max_blocks};

                TEST_CASE("chunk %d, %d pieces, %d blocks", (int)chunk, (int)max_pieces, (int)max_blocks);
                check_plan(&limits, sizes, n);
            }
    TEST_CASE("%s", "");
}

static void test_nothing(void)
{
    const struct dsc_cuda_limits limits = {64, MAX_PIECES, 100};
    static const int64_t zeros[5];

    CHECK_EQ(check_plan(&limits, zeros, 0), 0);
    CHECK_EQ(check_plan(&limits, zeros, 5), 0);
}

static void test_many_small(void)
{
    const struct dsc_cuda_limits limits = {4096, MAX_PIECES, 1 << 30};
    int64_t sizes[MAX_TENSORS];

    for (int i = 0; i < MAX_TENSORS; i++)
        sizes[i] = 8192;
    CHECK_EQ(check_plan(&limits, sizes, MAX_TENSORS), (MAX_TENSORS + MAX_PIECES - 1) / MAX_PIECES);
}

/* More elements than an int can count, and more than the blocks of one launch cover. */
static void test_huge(void)
{
    const struct dsc_cuda_limits limits = {4096, MAX_PIECES, 1 << 20};
    static const int64_t sizes[] = {((int64_t)1 << 31) - 1, (int64_t)1 << 31, ((int64_t)1 << 31) + 1, 5, ((int64_t)1 << 40) + 3};
    const struct dsc_cuda_limits one_launch = {4096, MAX_PIECES, 1 << 30};
    static const int64_t largest[] = {INT64_MAX};
    struct dsc_cuda_cursor cursor = {0, 0};
    struct dsc_cuda_piece piece;
    int32_t n_blocks;

    check_plan(&limits, sizes, 5);
    CHECK_EQ(check_plan(&one_launch, sizes, 4), 1);

    /* Sizes near the largest int64_t do not overflow. */
    CHECK_EQ(dsc_cuda_plan_next(&one_launch, 1, size_at, largest, &cursor, &piece, &n_blocks), 1);
    CHECK_EQ(n_blocks, 1 << 30);
    CHECK_EQ(piece.n_elems, (int64_t)4096 << 30);
    cursor.begin_elems = INT64_MAX - 5;
    CHECK_EQ(dsc_cuda_plan_next(&one_launch, 1, size_at, largest, &cursor, &piece, &n_blocks), 1);
    CHECK_EQ(piece.n_elems, 5);
    CHECK_EQ(dsc_cuda_plan_next(&one_launch, 1, size_at, largest, &cursor, &piece, &n_blocks), 0);
}

static void test_any(void)
{
    uint64_t seed = 1;

    for (int round = 0; round < 300; round++) {
        const struct dsc_cuda_limits limits = {1 + test_below(&seed, 33), 1 + (int32_t)test_below(&seed, MAX_PIECES),
                                               1 + (int32_t)test_below(&seed, 50)};
        const int64_t n_tensors = test_below(&seed, 60);
        int64_t sizes[60];

        for (int64_t i = 0; i < n_tensors; i++)
            sizes[i] = test_below(&seed, 4) == 0 ? 0 : test_below(&seed, 400);
        TEST_CASE("round %d", round);
        check_plan(&limits, sizes, n_tensors);
    }
    TEST_CASE("%s", "");
}

int main(void)
{
    test_hard_sizes();
    test_nothing();
    test_many_small();
    test_huge();
    test_any();
    return test_finish(__FILE__);
}
