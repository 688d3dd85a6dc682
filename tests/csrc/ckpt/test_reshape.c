/* ckpt/reshape.c against brute force: each wanted element is looked for in each piece by its index in the tensor. */
#include "test.h"

#include "dsc/ckpt.h"

#define MAX_DIMS 4
#define MAX_PIECES 12
#define MAX_ELEMS 700 /* of a tensor */
#define NUMBERS (2 * MAX_DIMS + 2)
#define MAX_RUNS (3 * MAX_PIECES * MAX_ELEMS)
#define UNTOUCHED (-77)

struct task {
    int32_t n_dims;
    int64_t shape[MAX_DIMS];
    int64_t n_pieces;
    int64_t pieces[MAX_PIECES * NUMBERS]; /* 2 * n_dims + 2 numbers each */
    int64_t wanted[NUMBERS];
};

struct place {
    int64_t piece;
    int64_t src;
};

static struct dsc_reshape_run runs[MAX_RUNS];

static int64_t elems_of(const int64_t *size, int32_t n_dims)
{
    int64_t n = 1;

    for (int32_t d = 0; d < n_dims; d++)
        n *= size[d];
    return n;
}

/* The place of the element with this index (in the tensor) within a part's range; -1 if the part does not hold it. */
static int64_t position_of(const int64_t *part, int32_t n_dims, const int64_t *index)
{
    int64_t position = 0;

    for (int32_t d = 0; d < n_dims; d++) {
        int64_t in_box = index[d] - part[d];

        if (in_box < 0 || in_box >= part[n_dims + d])
            return -1;
        position = position * part[n_dims + d] + in_box;
    }
    position -= part[2 * n_dims];
    return position >= 0 && position < part[2 * n_dims + 1] ? position : -1;
}

static void index_of(const int64_t *part, int32_t n_dims, int64_t position, int64_t *out_index)
{
    position += part[2 * n_dims];
    for (int32_t d = n_dims - 1; d >= 0; d--) {
        out_index[d] = part[d] + position % part[n_dims + d];
        position /= part[n_dims + d];
    }
}

/* The lowest piece that holds a wanted element. */
static struct place find_brute(const struct task *task, int64_t element)
{
    int64_t index[MAX_DIMS];

    index_of(task->wanted, task->n_dims, element, index);
    for (int64_t i = 0; i < task->n_pieces; i++) {
        int64_t src = position_of(task->pieces + i * (2 * task->n_dims + 2), task->n_dims, index);

        if (src >= 0)
            return (struct place){i, src};
    }
    return (struct place){-1, -1};
}

static dsc_status make_plan(const struct task *task, int64_t capacity, struct dsc_reshape_run *out_runs, int64_t *out_n_runs)
{
    return dsc_reshape_plan(task->shape, task->n_dims, task->pieces, task->n_pieces, task->wanted, capacity, out_runs, out_n_runs);
}

/* True when the pieces cover the wanted elements. */
static bool check_task(const struct task *task)
{
    static struct place places[MAX_ELEMS];
    static struct place got[MAX_ELEMS];
    int64_t n_wanted = task->wanted[2 * task->n_dims + 1];
    int64_t n_needed = UNTOUCHED;
    int64_t n_runs = UNTOUCHED;
    int64_t missing = -1;

    for (int64_t e = 0; e < n_wanted; e++) {
        places[e] = find_brute(task, e);
        got[e] = (struct place){-1, -1};
        if (places[e].piece < 0 && missing < 0)
            missing = e;
    }
    if (!CHECK_STATUS(make_plan(task, 0, NULL, &n_needed), DSC_OK) || !CHECK(n_needed >= 0 && n_needed <= MAX_RUNS))
        return missing < 0;
    if (missing >= 0) {
        char text[64];

        snprintf(text, sizeof text, "(its number there is %d)", (int)missing);
        CHECK_ERROR(make_plan(task, n_needed, runs, &n_runs), DSC_EINVAL, text);
        CHECK_EQ(n_runs, UNTOUCHED);
        return false;
    }
    for (int64_t r = n_needed; r < n_needed + 3 && r < MAX_RUNS; r++)
        runs[r].piece = UNTOUCHED;
    if (!CHECK_STATUS(make_plan(task, n_needed, runs, &n_runs), DSC_OK) || !CHECK(n_runs >= 0 && n_runs <= n_needed))
        return true;
    for (int64_t r = n_needed; r < n_needed + 3 && r < MAX_RUNS; r++)
        CHECK_EQ(runs[r].piece, UNTOUCHED);
    for (int64_t r = 0; r < n_runs; r++) {
        struct dsc_reshape_run run = runs[r];

        if (!CHECK(run.n_elems > 0 && run.dst_elem >= 0 && run.dst_elem + run.n_elems <= n_wanted))
            return true;
        if (r > 0) {
            CHECK(run.piece > runs[r - 1].piece ||
                  (run.piece == runs[r - 1].piece && run.src_elem >= runs[r - 1].src_elem + runs[r - 1].n_elems));
            CHECK(run.piece != runs[r - 1].piece || run.src_elem > runs[r - 1].src_elem + runs[r - 1].n_elems ||
                  run.dst_elem != runs[r - 1].dst_elem + runs[r - 1].n_elems); /* the fewest possible runs */
        }
        for (int64_t k = 0; k < run.n_elems; k++) {
            CHECK_EQ(got[run.dst_elem + k].piece, -1); /* once */
            got[run.dst_elem + k] = (struct place){run.piece, run.src_elem + k};
        }
    }
    for (int64_t e = 0; e < n_wanted; e++) {
        TEST_AT(e);
        CHECK_EQ(got[e].piece, places[e].piece);
        CHECK_EQ(got[e].src, places[e].src);
    }
    TEST_AT(-1);
    return true;
}

static void random_shape(struct task *task, uint64_t *random)
{
    do {
        task->n_dims = (int32_t)test_below(random, MAX_DIMS + 1);
        for (int32_t d = 0; d < task->n_dims; d++)
            task->shape[d] = test_below(random, 8) == 0 ? test_below(random, 2) : 1 + test_below(random, 7);
    } while (elems_of(task->shape, task->n_dims) > MAX_ELEMS);
}

/* A random box and a random range of its elements. Whole dimensions and the whole range come up often. */
static void random_part(const struct task *task, int64_t *part, uint64_t *random)
{
    int32_t n_dims = task->n_dims;

    for (int32_t d = 0; d < n_dims; d++) {
        part[d] = test_below(random, 2) == 0 ? 0 : test_below(random, task->shape[d] + 1);
        part[n_dims + d] = test_below(random, 2) == 0 ? task->shape[d] - part[d] : test_below(random, task->shape[d] - part[d] + 1);
    }

    int64_t n_elems = elems_of(part + n_dims, n_dims);

    part[2 * n_dims] = test_below(random, 2) == 0 ? 0 : test_below(random, n_elems + 1);
    part[2 * n_dims + 1] = n_elems - part[2 * n_dims];
    if (test_below(random, 2) == 0)
        part[2 * n_dims + 1] = test_below(random, part[2 * n_dims + 1] + 1);
}

static void test_random_pieces(void)
{
    uint64_t random = 5;
    int n_covered = 0;

    for (int round = 0; round < 20000; round++) {
        struct task task = {0};

        TEST_CASE("random pieces, round %d", round);
        random_shape(&task, &random);
        task.n_pieces = test_below(&random, MAX_PIECES + 1);
        for (int64_t i = 0; i < task.n_pieces; i++)
            random_part(&task, task.pieces + i * (2 * task.n_dims + 2), &random);
        random_part(&task, task.wanted, &random);
        n_covered += check_task(&task);
    }
    CHECK(n_covered > 5000 && n_covered < 19000); /* covered and uncovered cases both occur */
}

static void set_box(int64_t *part, const int64_t *shape, int32_t n_dims)
{
    for (int32_t d = 0; d < n_dims; d++) {
        part[d] = 0;
        part[n_dims + d] = shape[d];
    }
    part[2 * n_dims] = 0;
    part[2 * n_dims + 1] = elems_of(shape, n_dims);
}

/*
 * Cuts the tensor into n boxes along dimension d, and each box into n_ranks flat ranges, as ZeRO over tensor
 * parallelism does. Appends all ranges as pieces.
 */
static void append_cut(struct task *task, int32_t d, int64_t n, int64_t n_ranks)
{
    int32_t n_dims = task->n_dims;

    for (int64_t i = 0; i < n; i++) {
        for (int64_t rank = 0; rank < n_ranks && task->n_pieces < MAX_PIECES; rank++) {
            int64_t *piece = task->pieces + task->n_pieces++ * (2 * n_dims + 2);

            set_box(piece, task->shape, n_dims);
            if (n_dims > 0) {
                int64_t first = task->shape[d] * i / n;

                piece[d] = first;
                piece[n_dims + d] = task->shape[d] * (i + 1) / n - first;
            }

            int64_t n_elems = elems_of(piece + n_dims, n_dims);

            piece[2 * n_dims] = n_elems * rank / n_ranks;
            piece[2 * n_dims + 1] = n_elems * (rank + 1) / n_ranks - piece[2 * n_dims];
        }
    }
}

/*
 * The pieces of one arrangement cover every rank of another arrangement, along any axes. A replica of all pieces
 * appended behind them changes nothing.
 */
static void test_arrangements(void)
{
    uint64_t random = 9;

    for (int round = 0; round < 4000; round++) {
        struct task task = {0};
        struct task target = {0};

        random_shape(&task, &random);

        int32_t src_dim = task.n_dims > 0 ? (int32_t)test_below(&random, task.n_dims) : 0;
        int32_t dst_dim = task.n_dims > 0 ? (int32_t)test_below(&random, task.n_dims) : 0;
        int64_t src_cuts = task.n_dims > 0 ? 1 + test_below(&random, 3) : 1;
        int64_t src_ranks = 1 + test_below(&random, 4);
        int64_t dst_cuts = task.n_dims > 0 ? 1 + test_below(&random, 3) : 1;
        int64_t dst_ranks = 1 + test_below(&random, 4);

        TEST_CASE("arrangement %d: %d dims, axis %d in %d, %d ranks, to axis %d in %d, %d ranks", round, (int)task.n_dims, (int)src_dim,
                  (int)src_cuts, (int)src_ranks, (int)dst_dim, (int)dst_cuts, (int)dst_ranks);
        append_cut(&task, src_dim, src_cuts, src_ranks);

        int64_t n_distinct = task.n_pieces;

        if (test_below(&random, 2) == 0)
            append_cut(&task, dst_dim, dst_cuts, 1);
        target.n_dims = task.n_dims;
        memcpy(target.shape, task.shape, sizeof task.shape);
        append_cut(&target, dst_dim, dst_cuts, dst_ranks);
        for (int64_t i = 0; i < target.n_pieces; i++) {
            int64_t n_runs = 0;

            memcpy(task.wanted, target.pieces + i * (2 * task.n_dims + 2), sizeof(int64_t) * (size_t)(2 * task.n_dims + 2));
            CHECK(check_task(&task));
            CHECK_STATUS(make_plan(&task, MAX_RUNS, runs, &n_runs), DSC_OK);
            for (int64_t r = 0; r < n_runs; r++)
                CHECK(runs[r].piece < n_distinct);
        }
    }
}

/*
 * Whole boxes: the plan has one run for each pair of overlapping ranges, and its time does not depend on the number of
 * elements.
 */
static void test_flat_ranges(void)
{
    const int64_t shape[] = {INT64_C(1) << 30, 1, INT64_C(1) << 30};
    int64_t pieces[4 * 8];
    const int64_t wanted[] = {0, 0, 0, shape[0], 1, shape[2], 5, (INT64_C(1) << 60) - 10};
    struct dsc_reshape_run plan[12];
    int64_t n_runs = -1;

    TEST_CASE("flat ranges");
    for (int64_t i = 0; i < 4; i++) {
        set_box(pieces + i * 8, shape, 3);
        pieces[i * 8 + 6] = (3 - i) * (INT64_C(1) << 58);
        pieces[i * 8 + 7] = INT64_C(1) << 58;
    }
    CHECK_STATUS(dsc_reshape_plan(shape, 3, pieces, 4, wanted, 0, NULL, &n_runs), DSC_OK);
    CHECK_EQ(n_runs, 12);
    CHECK_STATUS(dsc_reshape_plan(shape, 3, pieces, 4, wanted, 12, plan, &n_runs), DSC_OK);
    CHECK_EQ(n_runs, 4);
    for (int64_t i = 0; i < 4; i++) {
        int64_t begin = (3 - i) * (INT64_C(1) << 58);

        CHECK_EQ(plan[i].piece, i);
        CHECK_EQ(plan[i].src_elem, i == 3 ? 5 : 0);
        CHECK_EQ(plan[i].dst_elem, i == 3 ? 0 : begin - 5);
        CHECK_EQ(plan[i].n_elems, (INT64_C(1) << 58) - (i == 3 || i == 0 ? 5 : 0));
    }
}

/* Rows that no range touches are skipped, so a tensor of 2^40 rows is planned at once. */
static void test_rows_beyond_the_ranges(void)
{
    const int64_t shape[] = {INT64_C(1) << 40, 4};
    const int64_t pieces[] = {0, 0, INT64_C(1) << 40, 2, (INT64_C(1) << 40) + 3, 4, /* columns 0 and 1, four elements from the middle */
                              0, 2, INT64_C(1) << 40, 2, (INT64_C(1) << 40) + 2, 9};
    const int64_t wanted[] = {0, 0, INT64_C(1) << 40, 4, (INT64_C(1) << 41) + 5, 7};
    struct dsc_reshape_run plan[3 * 12];
    int64_t n_runs = -1;

    TEST_CASE("rows beyond the ranges");
    CHECK_STATUS(dsc_reshape_plan(shape, 2, pieces, 2, wanted, 0, NULL, &n_runs), DSC_OK);
    CHECK(n_runs <= 36);
    /*
     * With m = 2^39, the wanted elements are columns 1 to 3 of row m + 1 and columns 0 to 3 of row m + 2. Piece 0 holds
     * (m + 1, 1), (m + 2, 0), (m + 2, 1) and (m + 3, 0) as (row, column).
     */
    CHECK_STATUS(dsc_reshape_plan(shape, 2, pieces, 2, wanted, 36, plan, &n_runs), DSC_OK);
    CHECK_EQ(n_runs, 4);
    static const int64_t expected[4][4] = {{0, 0, 0, 1}, {0, 1, 3, 2}, {1, 0, 1, 2}, {1, 2, 5, 2}};

    for (int64_t i = 0; i < n_runs && i < 4; i++) {
        TEST_AT(i);
        CHECK_EQ(plan[i].piece, expected[i][0]);
        CHECK_EQ(plan[i].src_elem, expected[i][1]);
        CHECK_EQ(plan[i].dst_elem, expected[i][2]);
        CHECK_EQ(plan[i].n_elems, expected[i][3]);
    }
}

static void test_nothing(void)
{
    const int64_t shape[] = {3, 0, INT64_MAX};
    const int64_t part[] = {1, 0, 5, 2, 0, INT64_MAX - 5, 0, 0};
    const int64_t scalar[] = {0, 1};
    struct dsc_reshape_run plan[3];
    int64_t n_runs = -1;

    TEST_CASE("nothing");
    CHECK_STATUS(dsc_reshape_plan(shape, 3, NULL, 0, part, 3, plan, &n_runs), DSC_OK);
    CHECK_EQ(n_runs, 0);
    CHECK_STATUS(dsc_reshape_plan(shape, 3, part, 1, part, 3, plan, &n_runs), DSC_OK);
    CHECK_EQ(n_runs, 0);
    CHECK_STATUS(dsc_reshape_plan(NULL, 0, scalar, 1, scalar, 3, plan, &n_runs), DSC_OK);
    CHECK_EQ(n_runs, 1);
    CHECK_EQ(plan[0].n_elems, 1);
    CHECK_ERROR(dsc_reshape_plan(NULL, 0, NULL, 0, scalar, 3, plan, &n_runs), DSC_EINVAL, "element []");
}

static void test_errors(void)
{
    const int64_t shape[] = {4, 6};
    const int64_t negative[] = {4, -6};
    const int64_t huge[] = {INT64_MAX, 2};
    const int64_t good[] = {0, 0, 4, 6, 0, 24};
    int64_t bad[6];
    struct dsc_reshape_run plan[3];
    int64_t n_runs = UNTOUCHED;

    TEST_CASE("errors");
    CHECK_ERROR(dsc_reshape_plan(shape, -1, good, 1, good, 3, plan, &n_runs), DSC_EINVAL, "n_dims");
    CHECK_ERROR(dsc_reshape_plan(shape, 65, good, 1, good, 3, plan, &n_runs), DSC_EINVAL, "n_dims");
    CHECK_ERROR(dsc_reshape_plan(shape, 2, good, -1, good, 3, plan, &n_runs), DSC_EINVAL, "n_pieces");
    CHECK_ERROR(dsc_reshape_plan(NULL, 2, good, 1, good, 3, plan, &n_runs), DSC_EINVAL, "NULL");
    CHECK_ERROR(dsc_reshape_plan(shape, 2, NULL, 1, good, 3, plan, &n_runs), DSC_EINVAL, "NULL");
    CHECK_ERROR(dsc_reshape_plan(shape, 2, good, 1, NULL, 3, plan, &n_runs), DSC_EINVAL, "NULL");
    CHECK_ERROR(dsc_reshape_plan(shape, 2, good, 1, good, 3, plan, NULL), DSC_EINVAL, "out_n_runs");
    CHECK_ERROR(dsc_reshape_plan(negative, 2, good, 1, good, 3, plan, &n_runs), DSC_EINVAL, "shape[1] is -6");
    CHECK_ERROR(dsc_reshape_plan(huge, 2, good, 1, good, 3, plan, &n_runs), DSC_EOVERFLOW, "int64_t");
    CHECK_ERROR(dsc_reshape_plan(shape, 2, good, 1, good, 2, plan, &n_runs), DSC_EINVAL, "capacity is 2, 3");
    static const int64_t wrong[][2] = {{0, -1}, {0, 1}, {0, INT64_MAX}, {2, -1}, {3, 7}, {3, INT64_MAX}, {4, -1}, {4, 1}, {5, -1}, {5, 25}, {5, INT64_MAX}};

    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        TEST_AT((int64_t)i);
        memcpy(bad, good, sizeof bad);
        bad[wrong[i][0]] = wrong[i][1];
        CHECK_ERROR(dsc_reshape_plan(shape, 2, good, 1, bad, 3, plan, &n_runs), DSC_EINVAL, "wanted");
        CHECK_ERROR(dsc_reshape_plan(shape, 2, bad, 1, good, 3, plan, &n_runs), DSC_EINVAL, "pieces[0]");
    }
    TEST_AT(-1);
    memcpy(bad, good, sizeof bad);
    bad[3] = 5; /* the last column is missing */
    bad[5] = 20;
    CHECK_ERROR(dsc_reshape_plan(shape, 2, bad, 1, good, 12, (struct dsc_reshape_run[12]){{0}}, &n_runs), DSC_EINVAL, "element [0, 5]");
    CHECK_EQ(n_runs, UNTOUCHED);
}

int main(void)
{
    test_random_pieces();
    test_arrangements();
    test_flat_ranges();
    test_rows_beyond_the_ranges();
    test_nothing();
    test_errors();
    return test_finish(__FILE__);
}
