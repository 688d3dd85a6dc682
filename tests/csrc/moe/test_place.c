/* moe/place.c: capacity, the counting sort and permutations against their definitions by brute force. */
#include "test.h"

#include "dsc/moe.h"

#define MAX_SLOTS 4096
#define MAX_EXPERTS 64

static int32_t indices[MAX_SLOTS];
static int32_t kept[MAX_SLOTS];
static int32_t locations[MAX_SLOTS];
static float priority[MAX_SLOTS];
static int64_t counts[MAX_EXPERTS];
static int64_t scratch[MAX_EXPERTS + MAX_SLOTS];
static int64_t order[MAX_SLOTS];
static int64_t inverse[MAX_SLOTS];

/* Whether slot a comes before slot b at the gate of their expert. */
static bool is_before(int how, int64_t k, int64_t a, int64_t b)
{
    if (how == DSC_MOE_BY_CHOICE && a % k != b % k)
        return a % k < b % k;
    if (how == DSC_MOE_BY_PRIORITY && priority[a] != priority[b])
        return priority[a] > priority[b];
    return a < b;
}

static void check_place(int64_t n_tokens, int64_t k, int64_t n_experts, int64_t capacity, int how)
{
    const struct dsc_moe_place call = {n_tokens, k, n_experts, capacity, how, indices,
                                       how == DSC_MOE_BY_PRIORITY ? priority : NULL, scratch, kept, locations, counts};
    int64_t n = n_tokens * k;

    TEST_CASE("%d tokens, k %d, %d experts, capacity %d, order %d", (int)n_tokens, (int)k, (int)n_experts,
              (int)capacity, how);
    CHECK_STATUS(dsc_moe_place(&call), DSC_OK);
    for (int64_t e = 0; e < n_experts; e++) {
        int64_t wanted = 0;

        for (int64_t i = 0; i < n; i++)
            wanted += indices[i] == e;
        CHECK_EQ(counts[e], wanted);
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t n_before = 0;
        int64_t n_kept_before = 0;

        TEST_AT(i);
        for (int64_t other = 0; other < n; other++) {
            n_before += indices[other] == indices[i] && is_before(how, k, other, i);
            n_kept_before += kept[other] == indices[i] && other < i;
        }
        if (indices[i] < 0 || (capacity >= 0 && n_before >= capacity)) {
            CHECK_EQ(kept[i], -1);
            CHECK_EQ(locations[i], 0);
        } else {
            CHECK_EQ(kept[i], indices[i]);
            CHECK_EQ(locations[i], how == DSC_MOE_BY_PRIORITY ? n_kept_before : n_before);
        }
    }
}

static void check_sort(int64_t n_tokens, int64_t k, int64_t n_experts)
{
    int64_t n = n_tokens * k;
    int64_t n_kept = 0;

    CHECK_STATUS(dsc_moe_count(indices, n_tokens, k, n_experts, counts), DSC_OK);
    CHECK_STATUS(dsc_moe_sort(indices, n_tokens, k, n_experts, counts, scratch, order, inverse), DSC_OK);
    for (int64_t e = 0; e < n_experts; e++)
        for (int64_t i = 0; i < n; i++)
            if (indices[i] == e) {
                CHECK_EQ(order[n_kept], i);
                CHECK_EQ(inverse[i], n_kept++);
            }
    for (int64_t i = 0; i < n; i++)
        if (indices[i] < 0)
            CHECK_EQ(inverse[i], -1);
}

static void test_bad_input(void)
{
    struct dsc_moe_place call = {2, 2, 3, 1, 0, indices, NULL, scratch, kept, locations, counts};

    TEST_CASE("bad input");
    memcpy(indices, (int32_t[]){0, 1, 3, -1}, 4 * sizeof *indices);
    memset(kept, 7, sizeof kept);
    memset(counts, 7, sizeof counts);
    CHECK_ERROR(dsc_moe_place(&call), DSC_EINVAL, "indices[1, 0] is 3");
    CHECK_ERROR(dsc_moe_count(indices, 2, 2, 3, counts), DSC_EINVAL, "indices[1, 0] is 3");
    CHECK_ERROR(dsc_moe_sort(indices, 2, 2, 3, counts, scratch, order, inverse), DSC_EINVAL, "indices[1, 0] is 3");
    indices[2] = -2;
    CHECK_ERROR(dsc_moe_place(&call), DSC_EINVAL, "indices[1, 0] is -2");
    indices[2] = 2;
    call.capacity = -2;
    CHECK_ERROR(dsc_moe_place(&call), DSC_EINVAL, "capacity is -2");
    call.capacity = 1;
    call.order = 3;
    CHECK_ERROR(dsc_moe_place(&call), DSC_EINVAL, "order is 3");
    call.order = DSC_MOE_BY_PRIORITY;
    CHECK_ERROR(dsc_moe_place(&call), DSC_EINVAL, "priority is NULL");
    call.priority = priority;
    priority[3] = NAN;
    CHECK_ERROR(dsc_moe_place(&call), DSC_EINVAL, "priority[1, 1] is nan");
    call.n_tokens = INT64_MAX / 2;
    CHECK_ERROR(dsc_moe_place(&call), DSC_EOVERFLOW, "int64_t");
    CHECK_EQ(kept[0], 0x07070707);
    CHECK(counts[0] == INT64_C(0x0707070707070707));
    memcpy(order, (int64_t[]){0, 2, 2}, 3 * sizeof *order);
    CHECK_ERROR(dsc_moe_invert(order, 3, inverse), DSC_EINVAL, "order[2] is 2");
    order[2] = 3;
    CHECK_ERROR(dsc_moe_invert(order, 3, inverse), DSC_EINVAL, "order[2] is 3");
    order[2] = 1;
    CHECK_STATUS(dsc_moe_invert(order, 3, inverse), DSC_OK);
    CHECK(inverse[0] == 0 && inverse[1] == 2 && inverse[2] == 1);
}

int main(void)
{
    static const int64_t sizes[][3] = {{0, 2, 8}, {1, 1, 1}, {3, 0, 2}, {5, 1, 1}, {31, 2, 8}, {127, 3, 13}, {257, 6, 64}};
    static const int64_t capacities[] = {-1, 0, 1, 4, 5000};
    static const float levels[] = {-INFINITY, -1, -0.0f, 0.0f, 0.5f, INFINITY};
    uint64_t random = 3;

    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (int64_t i = 0; i < sizes[s][0] * sizes[s][1]; i++) {
            indices[i] = (int32_t)test_below(&random, sizes[s][2] + 1) - 1;
            priority[i] = levels[test_below(&random, 6)]; /* few values: ties are frequent */
        }
        for (size_t c = 0; c < sizeof capacities / sizeof *capacities; c++)
            for (int how = 0; how < 3; how++)
                check_place(sizes[s][0], sizes[s][1], sizes[s][2], capacities[c], how);
        check_sort(sizes[s][0], sizes[s][1], sizes[s][2]);
    }
    test_bad_input();
    return test_finish(__FILE__);
}
