/*
 * tp/runs.c: the heads and runs of every rank against an owner table that is filled element by element, and refused
 * arguments.
 */
#include "test.h"

#include "dsc/tp.h"

#define MAX_ELEMS 4096
#define MAX_RUNS 512

static void expect_heads(int64_t n_heads, int64_t n_key_heads, int32_t n_ranks, const int64_t (*expected)[4])
{
    for (int32_t rank = 0; rank < n_ranks; rank++) {
        struct dsc_tp_heads heads = {0};

        TEST_CASE("%d over %d heads, rank %d of %d", (int)n_heads, (int)n_key_heads, (int)rank, (int)n_ranks);
        CHECK_STATUS(dsc_tp_heads_of(n_heads, n_key_heads, n_ranks, rank, &heads), DSC_OK);
        CHECK_EQ(heads.query_begin, expected[rank][0]);
        CHECK_EQ(heads.query_end, expected[rank][1]);
        CHECK_EQ(heads.key_begin, expected[rank][2]);
        CHECK_EQ(heads.key_end, expected[rank][3]);
    }
}

static void test_heads(void)
{
    expect_heads(8, 4, 3, (const int64_t[][4]){{0, 4, 0, 2}, {4, 6, 2, 3}, {6, 8, 3, 4}});
    expect_heads(8, 2, 3, (const int64_t[][4]){{0, 2, 0, 1}, {2, 4, 0, 1}, {4, 8, 1, 2}});
    expect_heads(7, 1, 3, (const int64_t[][4]){{0, 3, 0, 1}, {3, 5, 0, 1}, {5, 7, 0, 1}});
    expect_heads(5, 5, 2, (const int64_t[][4]){{0, 3, 0, 3}, {3, 5, 3, 5}});
    expect_heads(3, 3, 1, (const int64_t[][4]){{0, 3, 0, 3}});
}

/*
 * Every query head lies on one rank, together with the key head that it attends to. All groups of a rank have the same
 * size.
 */
static void test_heads_of_many(void)
{
    for (int64_t n_key_heads = 1; n_key_heads <= 7; n_key_heads++)
        for (int64_t group = 1; group <= 9; group++)
            for (int32_t n_ranks = 1; n_ranks <= 11; n_ranks++) {
                int64_t next = 0;
                int64_t needed = (n_ranks + n_key_heads - 1) / n_key_heads; /* ranks that share one key head */
                bool is_possible = n_key_heads >= n_ranks || group >= needed;

                for (int32_t rank = 0; rank < n_ranks; rank++) {
                    struct dsc_tp_heads heads = {-1, -1, -1, -1, -1, -1};
                    dsc_status status = dsc_tp_heads_of(n_key_heads * group, n_key_heads, n_ranks, rank, &heads);

                    TEST_CASE("%d x %d heads, rank %d of %d", (int)n_key_heads, (int)group, (int)rank, (int)n_ranks);
                    CHECK_STATUS(status, is_possible ? DSC_OK : DSC_EINVAL);
                    if (status != DSC_OK) {
                        CHECK_EQ(heads.query_begin, -1);
                        continue;
                    }
                    CHECK_EQ(heads.query_begin, next);
                    CHECK(heads.query_end > heads.query_begin);
                    CHECK_EQ(heads.key_begin, heads.query_begin / group);
                    CHECK_EQ(heads.key_end, (heads.query_end - 1) / group + 1);
                    CHECK_EQ((heads.query_end - heads.query_begin) % (heads.key_end - heads.key_begin), 0);
                    CHECK(heads.n_copies == 1 || heads.key_end - heads.key_begin == 1);
                    CHECK(heads.first_copy <= rank && rank < heads.first_copy + heads.n_copies);
                    next = heads.query_end;
                }
                CHECK(!is_possible || next == n_key_heads * group);
            }
}

/* The number of ranks that hold each element, derived from the header only. */
static int expected_owners(const struct dsc_tp_dim *dim, int64_t i_part, int64_t grain, int32_t n_ranks, bool *holds)
{
    const struct dsc_tp_part *part = &dim->parts[i_part];
    int64_t per_block = (part->n_elems + part->grain_elems - 1) / part->grain_elems;
    int64_t n_grains = per_block * dim->n_blocks;
    int n = 0;

    for (int32_t rank = 0; rank < n_ranks; rank++) {
        struct dsc_tp_heads heads = {0};
        int64_t before = 0;
        bool is_held = true;

        if (part->kind == DSC_TP_COLUMNS) {
            for (int32_t r = 0; r < rank; r++)
                before += n_grains / n_ranks + (r < n_grains % n_ranks);
            is_held = grain >= before && grain < before + n_grains / n_ranks + (rank < n_grains % n_ranks);
        } else if (part->kind != DSC_TP_WHOLE) {
            CHECK_STATUS(dsc_tp_heads_of(dim->n_heads, dim->n_key_heads, n_ranks, rank, &heads), DSC_OK);
            is_held = part->kind == DSC_TP_QUERIES ? grain >= heads.query_begin && grain < heads.query_end
                                                   : grain >= heads.key_begin && grain < heads.key_end;
        }
        holds[rank] = is_held;
        n += is_held;
    }
    return n;
}

static void check_dim(const struct dsc_tp_dim *dim, int32_t n_ranks)
{
    static bool is_owned[16][MAX_ELEMS];
    static struct dsc_tp_run runs[16][MAX_RUNS];
    int64_t block_elems = 0;
    int64_t n_runs[16];
    int32_t copies[16];
    int32_t first[16];

    for (int64_t i = 0; i < dim->n_parts; i++)
        block_elems += dim->parts[i].n_elems;
    for (int32_t rank = 0; rank < n_ranks; rank++) {
        int64_t local = 0;
        int64_t end = -1;

        CHECK_STATUS(dsc_tp_runs_of(dim, n_ranks, rank, MAX_RUNS, runs[rank], &n_runs[rank], &first[rank], &copies[rank]), DSC_OK);
        memset(is_owned[rank], 0, sizeof is_owned[rank]);
        for (int64_t i = 0; i < n_runs[rank]; i++) {
            const struct dsc_tp_run *run = &runs[rank][i];

            CHECK(run->n_elems > 0 && run->logical_begin_elems > end); /* neighbours would be one run */
            CHECK_EQ(run->local_begin_elems, local);
            for (int64_t e = 0; e < run->n_elems; e++)
                is_owned[rank][run->logical_begin_elems + e] = true;
            local += run->n_elems;
            end = run->logical_begin_elems + run->n_elems;
        }
        CHECK(end <= block_elems * dim->n_blocks);
    }

    int64_t logical = 0;
    int least[16];
    int most[16] = {0};

    for (int32_t rank = 0; rank < n_ranks; rank++)
        least[rank] = 99;
    for (int64_t block = 0; block < dim->n_blocks; block++)
        for (int64_t i = 0; i < dim->n_parts; i++) {
            const struct dsc_tp_part *part = &dim->parts[i];
            int64_t per_block = (part->n_elems + part->grain_elems - 1) / part->grain_elems;

            for (int64_t e = 0; e < part->n_elems; e++, logical++) {
                bool holds[16];
                int n = expected_owners(dim, i, block * per_block + e / part->grain_elems, n_ranks, holds);

                CHECK(n > 0);
                for (int32_t rank = 0; rank < n_ranks; rank++) {
                    CHECK_EQ(is_owned[rank][logical], holds[rank]);
                    if (holds[rank]) {
                        least[rank] = n < least[rank] ? n : least[rank];
                        most[rank] = n > most[rank] ? n : most[rank];
                    }
                }
            }
        }
    for (int32_t rank = 0; rank < n_ranks; rank++) {
        CHECK(copies[rank] == 0 || most[rank] == 0 || (copies[rank] == least[rank] && copies[rank] == most[rank]));
        CHECK(copies[rank] > 0 || least[rank] != most[rank] || dim->n_parts > 1);
        CHECK(copies[rank] == 0 || (first[rank] <= rank && rank < first[rank] + copies[rank]));
        for (int32_t other = first[rank]; other < first[rank] + copies[rank]; other++)
            CHECK(memcmp(is_owned[rank], is_owned[other], sizeof is_owned[rank]) == 0);
    }
}

static void test_runs(void)
{
    uint64_t random = 11;

    for (int round = 0; round < 400; round++) {
        int32_t n_ranks = (int32_t)(1 + test_below(&random, 5));
        int64_t n_key_heads = 1 + test_below(&random, 6);
        int64_t n_blocks = round % 2 ? n_key_heads : 1;
        int64_t group = 1 + test_below(&random, 3) + (n_ranks + n_key_heads - 1) / n_key_heads - 1;
        int64_t head = 1 + test_below(&random, 5);
        int64_t grain = 1 + test_below(&random, 4);
        const struct dsc_tp_part all[] = {
            {DSC_TP_QUERIES, n_key_heads * group / n_blocks * head, head},
            {DSC_TP_KEYS, n_key_heads / n_blocks * head, head},
            {DSC_TP_KEYS, n_key_heads / n_blocks * head, head},
            {DSC_TP_COLUMNS, test_below(&random, 23), grain},
            {DSC_TP_WHOLE, test_below(&random, 3), 1},
        };
        struct dsc_tp_part parts[3];
        int64_t n_parts = test_below(&random, 4);

        for (int64_t i = 0; i < n_parts; i++)
            parts[i] = all[test_below(&random, 5)];

        struct dsc_tp_dim dim = {parts, n_parts, n_blocks, n_key_heads * group, n_key_heads};

        TEST_CASE("round %d: %d ranks, %d key heads, %d blocks, %d parts", round, (int)n_ranks, (int)n_key_heads, (int)n_blocks, (int)n_parts);
        check_dim(&dim, n_ranks);
    }
}

static void refuse(struct dsc_tp_dim dim, int32_t n_ranks, int32_t rank, int64_t capacity, dsc_status expected)
{
    struct dsc_tp_run runs[4] = {{-7, -7, -7}};
    int64_t n = -7;
    int32_t first = -7;
    int32_t copies = -7;

    CHECK_STATUS(dsc_tp_runs_of(&dim, n_ranks, rank, capacity, runs, &n, &first, &copies), expected);
    CHECK_EQ(n, -7);
    CHECK_EQ(first, -7);
    CHECK_EQ(copies, -7);
    CHECK_EQ(runs[0].n_elems, -7);
}

static void test_bad_input(void)
{
    const struct dsc_tp_part columns = {DSC_TP_COLUMNS, 10, 1};
    const struct dsc_tp_part keys = {DSC_TP_KEYS, 12, 4};
    const struct dsc_tp_part ragged = {DSC_TP_KEYS, 13, 4};
    const struct dsc_tp_part huge[] = {{DSC_TP_WHOLE, INT64_MAX, 1}, {DSC_TP_WHOLE, 1, 1}};
    const struct dsc_tp_part no_kind = {4, 1, 1};
    const struct dsc_tp_part negative = {DSC_TP_COLUMNS, -1, 1};
    const struct dsc_tp_part no_grain = {DSC_TP_COLUMNS, 1, 0};
    struct dsc_tp_heads heads = {-1, -1, -1, -1, -1, -1};

    TEST_CASE("ranks");
    refuse((struct dsc_tp_dim){&columns, 1, 1, 0, 0}, 0, 0, 4, DSC_EINVAL);
    refuse((struct dsc_tp_dim){&columns, 1, 1, 0, 0}, 2, 2, 4, DSC_EINVAL);
    refuse((struct dsc_tp_dim){&columns, 1, 1, 0, 0}, 2, -1, 4, DSC_EINVAL);
    TEST_CASE("room");
    refuse((struct dsc_tp_dim){&columns, 1, 1, 0, 0}, 2, 0, 0, DSC_EINVAL);
    TEST_CASE("parts");
    refuse((struct dsc_tp_dim){NULL, 1, 1, 0, 0}, 2, 0, 4, DSC_EINVAL);
    refuse((struct dsc_tp_dim){&columns, -1, 1, 0, 0}, 2, 0, 4, DSC_EINVAL);
    refuse((struct dsc_tp_dim){&columns, 1, -1, 0, 0}, 2, 0, 4, DSC_EINVAL);
    refuse((struct dsc_tp_dim){&columns, 1, DSC_TP_MAX_BLOCKS + INT64_C(1), 0, 0}, 2, 0, 4, DSC_EINVAL);
    refuse((struct dsc_tp_dim){&no_kind, 1, 1, 0, 0}, 2, 0, 4, DSC_EINVAL);
    refuse((struct dsc_tp_dim){&negative, 1, 1, 0, 0}, 2, 0, 4, DSC_EINVAL);
    refuse((struct dsc_tp_dim){&no_grain, 1, 1, 0, 0}, 2, 0, 4, DSC_EINVAL);
    TEST_CASE("heads");
    refuse((struct dsc_tp_dim){&keys, 1, 1, 4, 4}, 2, 0, 4, DSC_EINVAL);
    refuse((struct dsc_tp_dim){&ragged, 1, 1, 3, 3}, 2, 0, 4, DSC_EINVAL);
    refuse((struct dsc_tp_dim){&keys, 1, 1, 7, 3}, 2, 0, 4, DSC_EINVAL);
    refuse((struct dsc_tp_dim){&keys, 1, 1, 3, 3}, 4, 0, 4, DSC_EINVAL);
    CHECK_STATUS(dsc_tp_heads_of(0, 1, 1, 0, &heads), DSC_EINVAL);
    CHECK_STATUS(dsc_tp_heads_of(4, 0, 1, 0, &heads), DSC_EINVAL);
    CHECK_STATUS(dsc_tp_heads_of(4, 2, 1, 0, NULL), DSC_EINVAL);
    CHECK_EQ(heads.query_begin, -1);
    TEST_CASE("overflow");
    refuse((struct dsc_tp_dim){huge, 2, 1, 0, 0}, 2, 0, 4, DSC_EOVERFLOW);
    refuse((struct dsc_tp_dim){huge, 1, 2, 0, 0}, 2, 0, 4, DSC_EOVERFLOW);
}

int main(void)
{
    test_heads();
    test_heads_of_many();
    test_runs();
    test_bad_input();
    return test_finish(__FILE__);
}
