/* sums/tree.c: trees against their recursive definition, however the leaves are divided into calls. */
#include "arrays.h"

#include "dsc/sums.h"
#include "pool.h"

#define MAX_LEAVES 200
#define N_LEVELS 8

/* Leaves of one length, the levels they are pushed to, and the wanted sum of any range of leaves. */
struct tree {
    int64_t n_elems;
    struct array leaves[MAX_LEAVES];
    struct dsc_span spans[MAX_LEAVES];
    struct array levels[N_LEVELS];
    float *pointers[N_LEVELS];
};

static struct tree *tree_create(int64_t n_leaves, int64_t n_elems, bool is_mixed, uint64_t *random)
{
    struct tree *tree = test_alloc(sizeof *tree);

    *tree = (struct tree){.n_elems = n_elems};
    for (int64_t i = 0; i < n_leaves; i++) {
        tree->leaves[i] =
            array_create(is_mixed ? (dsc_dtype)test_below(random, 3) : DSC_DTYPE_F32, n_elems, (size_t)(i % 3));
        array_fill(&tree->leaves[i], 100, false, random);
        tree->spans[i] = (struct dsc_span){tree->leaves[i].data, n_elems, tree->leaves[i].dtype};
    }
    for (int l = 0; l < N_LEVELS; l++) {
        tree->levels[l] = array_create(DSC_DTYPE_F32, n_elems, 0);
        memset(tree->levels[l].data, 0xff, (size_t)n_elems * sizeof(float)); /* NaN */
        tree->pointers[l] = (float *)(void *)tree->levels[l].data;
    }
    return tree;
}

static void tree_destroy(struct tree *tree, int64_t n_leaves)
{
    for (int64_t i = 0; i < n_leaves; i++)
        array_destroy(&tree->leaves[i]);
    for (int l = 0; l < N_LEVELS; l++)
        array_destroy(&tree->levels[l]);
    free(tree);
}

/* The sum of a power of two of leaves, element i, by halves. */
static float wanted_node(const struct tree *tree, int64_t first, int64_t n_leaves, int64_t i)
{
    if (n_leaves == 1)
        return array_get(&tree->leaves[first], i);
    return wanted_node(tree, first, n_leaves / 2, i) + wanted_node(tree, first + n_leaves / 2, n_leaves / 2, i);
}

/* The sum of the leaves from first on: the largest power of two of them, and the rest. */
static float wanted_sum(const struct tree *tree, int64_t first, int64_t n_leaves, int64_t i)
{
    int64_t oldest = 1;

    while (2 * oldest <= n_leaves)
        oldest *= 2;
    if (oldest == n_leaves)
        return wanted_node(tree, first, n_leaves, i);
    return wanted_node(tree, first, oldest, i) + wanted_sum(tree, first + oldest, n_leaves - oldest, i);
}

static void push_rounds(struct tree *tree, int64_t n_leaves, int64_t width, const struct dsc_par *par)
{
    for (int64_t done = 0; done < n_leaves; done += width) {
        int64_t n = n_leaves - done < width ? n_leaves - done : width;

        CHECK_STATUS(
            dsc_tree_push(tree->pointers, dsc_tree_n_levels(done + n), done, tree->spans + done, n, tree->n_elems, par),
            DSC_OK);
    }
}

static void check_levels(const struct tree *tree, int64_t n_leaves)
{
    int64_t first = 0;

    for (int l = N_LEVELS - 1; l >= 0; l--) {
        int64_t n_bad = 0;

        if ((n_leaves >> l & 1) == 0)
            continue;
        for (int64_t i = 0; i < tree->n_elems; i++)
            n_bad += dsc_f32_bits(array_get(&tree->levels[l], i)) !=
                     dsc_f32_bits(wanted_node(tree, first, (int64_t)1 << l, i));
        TEST_AT(l);
        CHECK_EQ(n_bad, 0);
        first += (int64_t)1 << l;
    }
}

static void check_sum(const struct tree *tree, int64_t n_leaves, float scale, dsc_dtype dtype)
{
    struct array out = array_create(dtype, tree->n_elems, 1);
    struct array wanted = array_create(dtype, tree->n_elems, 0);
    struct dsc_span span = {out.data, out.n, dtype};

    for (int64_t i = 0; i < out.n; i++)
        array_set(&wanted, i, wanted_sum(tree, 0, n_leaves, i) * scale);
    CHECK_STATUS(dsc_tree_sum((const float *const *)tree->pointers, N_LEVELS, n_leaves, scale, &span, NULL), DSC_OK);
    CHECK_SAME(&out, &wanted);
    array_destroy(&out);
    array_destroy(&wanted);
}

/* Every number of leaves up to 40 in rounds of 1, 2, 3, 4 and 6. */
static void test_rounds(const char *isa)
{
    static const int64_t widths[] = {1, 2, 3, 4, 6, 40};
    uint64_t random = 3;

    for (int64_t n_leaves = 1; n_leaves <= 40; n_leaves++)
        for (int w = 0; w < 6; w++) {
            struct tree *tree = tree_create(n_leaves, 37, w == 3, &random);

            TEST_CASE("%s: %d leaves in rounds of %d", isa, (int)n_leaves, (int)widths[w]);
            push_rounds(tree, n_leaves, widths[w], NULL);
            check_levels(tree, n_leaves);
            check_sum(tree, n_leaves, w % 2 == 0 ? 1.0f : 1.0f / (float)n_leaves, (dsc_dtype)(w % 3));
            tree_destroy(tree, n_leaves);
        }
}

/* Rounds of random widths, more leaves than one pass takes among them. */
static void test_random_rounds(void)
{
    uint64_t random = 5;

    for (int round = 0; round < 60; round++) {
        int64_t n_leaves = 1 + test_below(&random, MAX_LEAVES);
        struct tree *tree = tree_create(n_leaves, 5, true, &random);
        int64_t done = 0;

        TEST_CASE("%d leaves, round %d", (int)n_leaves, round);
        while (done < n_leaves) {
            int64_t n = test_below(&random, round % 2 == 0 ? 9 : n_leaves - done + 1);

            n = n < n_leaves - done ? n : n_leaves - done;
            CHECK_STATUS(dsc_tree_push(tree->pointers, N_LEVELS, done, tree->spans + done, n, 5, NULL), DSC_OK);
            done += n;
        }
        check_levels(tree, n_leaves);
        check_sum(tree, n_leaves, 0.3f, DSC_DTYPE_F32);
        tree_destroy(tree, n_leaves);
    }
}

static void test_lengths(const char *isa)
{
    static const int64_t lengths[] = {0, 1, 1023, 1024, 1025, 5000};
    uint64_t random = 7;

    for (int l = 0; l < 6; l++)
        for (int64_t width = 1; width <= 7; width += 3) {
            struct tree *tree = tree_create(7, lengths[l], width == 4, &random);

            TEST_CASE("%s: length %d, rounds of %d", isa, (int)lengths[l], (int)width);
            push_rounds(tree, 7, width, NULL);
            check_levels(tree, 7);
            check_sum(tree, 7, 1.0f / 7, DSC_DTYPE_F32);
            check_sum(tree, 4, 1.0f / 4, DSC_DTYPE_BF16); /* one node alone */
            check_sum(tree, 4, 1.0f, DSC_DTYPE_F32);
            tree_destroy(tree, 7);
        }
}

/* Levels that hold no node may be NULL where there are no elements, and a level keeps its node until it is merged. */
static void test_levels_stay(void)
{
    uint64_t random = 9;
    struct tree *tree = tree_create(6, 33, false, &random);

    TEST_CASE("levels stay");
    push_rounds(tree, 4, 4, NULL);

    struct array node = array_copy(&tree->levels[2], 0);
    struct array above = array_copy(&tree->levels[3], 0);

    CHECK_STATUS(dsc_tree_push(tree->pointers, 3, 4, tree->spans + 4, 2, 33, NULL), DSC_OK);
    check_sum(tree, 6, 1.0f, DSC_DTYPE_F16);
    CHECK_SAME(&tree->levels[2], &node);
    CHECK_BYTES(tree->levels[3].data, above.data, 33 * sizeof(float));
    array_destroy(&node);
    array_destroy(&above);
    tree_destroy(tree, 6);
}

static void test_threads(void)
{
    enum { N_LEAVES = 11 };
    uint64_t random = 11;
    struct tree *tree = tree_create(N_LEAVES, 150001, true, &random);
    struct array wanted[N_LEVELS];

    push_rounds(tree, N_LEAVES, 4, NULL);
    for (int l = 0; l < N_LEVELS; l++)
        wanted[l] = array_copy(&tree->levels[l], 0);
    for (int n_threads = 1; n_threads <= 4; n_threads++) {
        struct pool pool;
        struct array out = array_create(DSC_DTYPE_F32, tree->n_elems, 0);
        struct array sum = array_create(DSC_DTYPE_F32, tree->n_elems, 0);
        struct dsc_span span = {out.data, out.n, DSC_DTYPE_F32};
        struct dsc_span sum_span = {sum.data, sum.n, DSC_DTYPE_F32};

        TEST_CASE("%d threads", n_threads);
        pool_init(&pool, n_threads, 1);
        push_rounds(tree, N_LEAVES, 3, &pool.par);
        for (int l = 0; l < 4; l++)
            if ((N_LEAVES >> l & 1) != 0)
                CHECK_SAME(&tree->levels[l], &wanted[l]);
        CHECK_STATUS(dsc_tree_sum((const float *const *)tree->pointers, 4, N_LEAVES, 0.1f, &span, &pool.par), DSC_OK);
        CHECK_STATUS(dsc_tree_sum((const float *const *)tree->pointers, 4, N_LEAVES, 0.1f, &sum_span, NULL), DSC_OK);
        CHECK_SAME(&out, &sum);
        pool_clear(&pool);
        array_destroy(&out);
        array_destroy(&sum);
    }
    for (int l = 0; l < N_LEVELS; l++)
        array_destroy(&wanted[l]);
    tree_destroy(tree, N_LEAVES);
}

static void test_refused(void)
{
    float data[4][3] = {{1, 2, 3}, {4, 5, 6}, {7, 8, 9}, {0}};
    float *levels[] = {data[0], data[1]};
    float *holes[] = {data[0], NULL};
    const float *const *reading = (const float *const *)levels;
    struct dsc_span leaf = {data[2], 3, DSC_DTYPE_F32};
    struct dsc_span shorter = {data[2], 2, DSC_DTYPE_F32};
    struct dsc_span strange = {data[2], 3, (dsc_dtype)9};
    struct dsc_span out = {data[3], 3, DSC_DTYPE_F32};

    TEST_CASE("refused");
    CHECK_EQ(dsc_tree_n_levels(0), 0);
    CHECK_EQ(dsc_tree_n_levels(1), 1);
    CHECK_EQ(dsc_tree_n_levels(4), 3);
    CHECK_EQ(dsc_tree_n_levels(INT64_MAX), 63);
    CHECK_ERROR(dsc_tree_push(levels, 2, 3, &leaf, 1, 3, NULL), DSC_EINVAL, "4 leaves need 3");
    CHECK_ERROR(dsc_tree_push(levels, 2, -1, &leaf, 1, 3, NULL), DSC_EINVAL, "n_before is -1");
    CHECK_ERROR(dsc_tree_push(levels, 2, 1, &leaf, 1, -3, NULL), DSC_EINVAL, "n_elems is -3");
    CHECK_ERROR(dsc_tree_push(levels, 2, 1, &shorter, 1, 3, NULL), DSC_EINVAL,
                "leaves[0] has 2 elements, levels have 3");
    CHECK_ERROR(dsc_tree_push(levels, 2, 1, &strange, 1, 3, NULL), DSC_EINVAL, "leaves[0].dtype is 9");
    CHECK_ERROR(dsc_tree_push(levels, 2, 1, &leaf, -1, 3, NULL), DSC_EINVAL, "leaves is -1");
    CHECK_ERROR(dsc_tree_push(levels, 2, 1, NULL, 1, 3, NULL), DSC_EINVAL, "leaves is NULL");
    CHECK_ERROR(dsc_tree_push(NULL, 2, 1, &leaf, 1, 3, NULL), DSC_EINVAL, "levels is NULL");
    CHECK_ERROR(dsc_tree_push(holes, 2, 1, &leaf, 1, 3, NULL), DSC_EINVAL, "levels[1] is NULL");
    CHECK_ERROR(dsc_tree_push(levels, 2, INT64_MAX, &leaf, 1, 3, NULL), DSC_EOVERFLOW, "int64_t");
    CHECK_ERROR(dsc_tree_sum(reading, 2, 0, 1.0f, &out, NULL), DSC_EINVAL, "n_leaves is 0");
    CHECK_ERROR(dsc_tree_sum(reading, 2, 4, 1.0f, &out, NULL), DSC_EINVAL, "4 leaves need 3");
    CHECK_ERROR(dsc_tree_sum(reading, 2, 1, INFINITY, &out, NULL), DSC_EINVAL, "scale is inf");
    CHECK_ERROR(dsc_tree_sum(reading, 2, 1, 1.0f, NULL, NULL), DSC_EINVAL, "out is NULL");
    CHECK_EQ(data[0][0] == 1 && data[1][2] == 6 && data[3][0] == 0, true);
    CHECK_STATUS(dsc_tree_push(NULL, 0, 0, NULL, 0, 3, NULL), DSC_OK);
}

int main(void)
{
    const char *isa = NULL;

    for (int32_t i = 0; next_isa(&i, &isa);) {
        test_rounds(isa);
        test_lengths(isa);
    }
    test_random_rounds();
    test_levels_stay();
    test_threads();
    test_refused();
    return test_finish(__FILE__);
}
