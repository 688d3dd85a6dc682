/*
 * base/par.c: for any list of sizes, the chunks' pieces cover every element once and in order, and depend only on the
 * sizes.
 */
#include "test.h"

#include "base/par.h"
#include "pool.h"

struct array {
    char before[24]; /* so that the count is not first, and the stride is not its size */
    int64_t n_elems;
};

static void check_list(const int64_t *counts, int64_t n_arrays)
{
    struct array *arrays = test_alloc((size_t)n_arrays * sizeof *arrays);
    static struct dsc_list list;
    int64_t total = 0;
    int64_t array = 0;
    int64_t begin = 0;
    int64_t n_seen = 0;

    for (int64_t i = 0; i < n_arrays; i++) {
        arrays[i].n_elems = counts[i];
        total += counts[i];
    }
    CHECK_STATUS(dsc_list_init(&list, n_arrays > 0 ? &arrays->n_elems : NULL, sizeof *arrays, n_arrays), DSC_OK);
    CHECK_EQ(list.n_elems, total);
    CHECK(list.n_chunks <= DSC_MAX_CHUNKS);
    CHECK_EQ(list.chunk_elems % DSC_BLOCK_ELEMS, 0);
    CHECK(list.chunk_elems >= DSC_MIN_CHUNK_ELEMS);
    for (int64_t chunk = 0; chunk < list.n_chunks; chunk++) {
        struct dsc_cursor cursor = dsc_list_chunk(&list, chunk);
        struct dsc_piece piece;
        int64_t n_in_chunk = 0;

        while (dsc_cursor_next(&cursor, &piece)) {
            while (array < n_arrays && begin == counts[array]) {
                array++;
                begin = 0;
            }
            CHECK_EQ(piece.array, array);
            CHECK_EQ(piece.begin, begin);
            CHECK(piece.n_elems > 0);
            begin += piece.n_elems;
            n_in_chunk += piece.n_elems;
        }
        CHECK_EQ(n_in_chunk, chunk + 1 < list.n_chunks ? list.chunk_elems : total - n_seen);
        n_seen += n_in_chunk;
    }
    CHECK_EQ(n_seen, total);
    free(arrays);
}

static void test_lists(void)
{
    static int64_t counts[5000];
    static const int64_t limits[] = {1, 2, 3, 100, DSC_BLOCK_ELEMS, DSC_MIN_CHUNK_ELEMS + 2, 3 * DSC_MIN_CHUNK_ELEMS};
    static const int64_t n_arrays[] = {0, 1, 2, 7, 255, 256, 257, 511, 512, 513, 5000};
    uint64_t random = 1;

    for (size_t l = 0; l < sizeof limits / sizeof limits[0]; l++) {
        for (size_t a = 0; a < sizeof n_arrays / sizeof n_arrays[0]; a++) {
            for (int64_t i = 0; i < n_arrays[a]; i++) /* every third one is empty */
                counts[i] = test_below(&random, 3) == 0 ? 0 : test_below(&random, limits[l]);
            TEST_CASE("%d arrays below %d", (int)n_arrays[a], (int)limits[l]);
            check_list(counts, n_arrays[a]);
        }
    }
    static const int64_t large[] = {INT64_C(1) << 40, 0, DSC_MIN_CHUNK_ELEMS, 1, (INT64_C(1) << 41) + 12345, 0};

    TEST_CASE("large");
    check_list(large, 6);
    static const int64_t edges[] = {DSC_MIN_CHUNK_ELEMS * INT64_C(1024) - 1, DSC_MIN_CHUNK_ELEMS * INT64_C(1024),
                                    DSC_MIN_CHUNK_ELEMS * INT64_C(1024) + 1, DSC_MIN_CHUNK_ELEMS, DSC_MIN_CHUNK_ELEMS - 1, 1};

    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++) {
        TEST_CASE("one array of %lld", (long long)edges[i]);
        check_list(&edges[i], 1);
    }
}

static void test_overflow(void)
{
    static struct dsc_list list;
    int64_t counts[] = {INT64_MAX, 0, 1};

    TEST_CASE("overflow");
    CHECK_ERROR(dsc_list_init(&list, counts, sizeof counts[0], 3), DSC_EOVERFLOW, "3");
    CHECK_STATUS(dsc_list_init(&list, counts, sizeof counts[0], 2), DSC_OK);
}

static void count_chunks(void *arg, int64_t first, int64_t last)
{
    int *counts = arg;

    for (int64_t i = first; i < last; i++)
        counts[i]++;
}

/* Tests the helper pool of tests/csrc/pool.h, because other tests depend on it. */
static void test_pools(void)
{
    for (int n_threads = 1; n_threads <= 8; n_threads++) {
        for (int64_t grain = 0; grain <= 3; grain++) {
            struct pool pool;

            pool_init(&pool, n_threads, grain);
            for (int64_t n_chunks = 0; n_chunks < 20; n_chunks++) {
                int counts[20] = {0};

                TEST_CASE("%d threads, grain %d, %d chunks", n_threads, (int)grain, (int)n_chunks);
                dsc_par_run(n_threads == 1 ? NULL : &pool.par, n_chunks, count_chunks, counts);
                for (int64_t i = 0; i < 20; i++)
                    CHECK_EQ(counts[i], i < n_chunks);
            }
            pool_clear(&pool);
        }
    }
}

int main(void)
{
    test_lists();
    test_overflow();
    test_pools();
    return test_finish(__FILE__);
}
