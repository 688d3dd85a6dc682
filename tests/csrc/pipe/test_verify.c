/* Each table is wrong in one place, and is refused with a message that names the place. */
#include "test.h"

#include "dsc/pipe.h"

#define MAX_ACTIONS 64

static const char *const good[2] = {
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
};

/* Verifies a schedule of two ranks with one stage each, given as text. */
static dsc_status verify(const char *first, const char *second, bool has_backward)
{
    static const int32_t rank_of[2] = {0, 1};
    const char *texts[2] = {first, second};
    struct dsc_pipe_action actions[MAX_ACTIONS];
    int64_t begins[3] = {0};

    for (int rank = 0; rank < 2; rank++) {
        char copy[1024];

        begins[rank + 1] = begins[rank];
        snprintf(copy, sizeof copy, "%s", texts[rank]);
        for (char *word = strtok(copy, " "); word != NULL; word = strtok(NULL, " "))
            CHECK_STATUS(dsc_pipe_parse(word, &actions[begins[rank + 1]++]), DSC_OK);
    }

    struct dsc_pipe_table table = {actions, begins, rank_of, 2, 2, 2, has_backward, NULL, 0, -1};

    return dsc_pipe_verify(&table);
}

/*
 * A deadlock of blocking sends: rank 0 would send the output of 0F1 while rank 1 is still sending a gradient to rank 0.
 */
static void test_waits(void)
{
    TEST_CASE("waits");
    CHECK_STATUS(verify(good[0], good[1], true), DSC_OK);
    CHECK_ERROR(verify(good[0], "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1", true), DSC_EINVAL,
                "rank 0 at 0SEND_F1 for rank 1, rank 1 at 1SEND_B0 for rank 0");
    CHECK_ERROR(verify(good[0], "1RECV_F1 1F1 1B1 1RECV_F0 1SEND_B0 1F0 1B0 1SEND_B1", true), DSC_EINVAL,
                "rank 0 at 0SEND_F0 for rank 1, rank 1 at 1RECV_F1 for rank 0");
    CHECK_ERROR(verify("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0", good[1], true), DSC_EINVAL, "0RECV_B1");
}

static void test_missing_and_twice(void)
{
    TEST_CASE("missing and twice");
    CHECK_ERROR(verify("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1", good[1], true), DSC_EINVAL, "rank 0 lacks 0B1");
    CHECK_ERROR(verify("0F0 0SEND_F0 0F1 0RECV_B0 0B0 0RECV_B1 0B1", good[1], true), DSC_EINVAL, "rank 0 lacks 0SEND_F1");
    CHECK_ERROR(verify("0F0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", good[1], true), DSC_EINVAL, "rank 0 has 0F0 twice");
    CHECK_ERROR(verify("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0I1", good[1], true), DSC_EINVAL, "rank 0 lacks 0W1");
    CHECK_ERROR(verify("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0I0 0RECV_B1 0B1", good[1], true), DSC_EINVAL, "no use for 0B0");
    CHECK_ERROR(verify(good[0], good[1], false), DSC_EINVAL, "no use for 0B0");
    CHECK_ERROR(verify("0F0 0SEND_F0 0F1 0SEND_F1 1B1", good[1], true), DSC_EINVAL, "stage 1, which lies on rank 1");
    CHECK_ERROR(verify("", "", true), DSC_EINVAL, "rank 0 lacks 0F0");
}

static void test_order(void)
{
    TEST_CASE("order");
    CHECK_ERROR(verify("0SEND_F0 0F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", good[1], true), DSC_EINVAL, "0SEND_F0 before what it needs");
    CHECK_ERROR(verify("0F0 0SEND_F0 0F1 0SEND_F1 0B0 0RECV_B0 0RECV_B1 0B1", good[1], true), DSC_EINVAL, "0B0 before");
    CHECK_ERROR(verify("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0W0 0I0 0RECV_B1 0B1", good[1], true), DSC_EINVAL, "0W0 before");
    CHECK_ERROR(verify(good[0], "1RECV_F0 1B0 1F0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1", true), DSC_EINVAL, "1B0 before");
    CHECK_STATUS(verify("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0RECV_B1 0B1 0W0", good[1], true), DSC_OK);
}

static void test_tables(void)
{
    static const struct dsc_pipe_action action = {DSC_PIPE_FORWARD, 0, 0};
    static const int32_t rank_of[2] = {0, 5};
    int64_t begins[2] = {0, 1};
    struct dsc_pipe_table table = {&action, begins, rank_of, 1, 1, 1, false, NULL, 0, -1};

    TEST_CASE("tables");
    CHECK_STATUS(dsc_pipe_verify(&table), DSC_OK);
    CHECK_ERROR(dsc_pipe_verify(NULL), DSC_EINVAL, "NULL");
    table.n_stages = 2;
    CHECK_ERROR(dsc_pipe_verify(&table), DSC_EINVAL, "stage 1 lies on rank 5 of 1");
    table.n_stages = 1;
    begins[1] = -1;
    CHECK_ERROR(dsc_pipe_verify(&table), DSC_EINVAL, "[0, -1)");
    begins[1] = 1;
    table.actions = NULL;
    CHECK_ERROR(dsc_pipe_verify(&table), DSC_EINVAL, "NULL");
}

static void test_simulate(void)
{
    static const struct dsc_pipe_action actions[2] = {{DSC_PIPE_BACKWARD, 0, 0}, {DSC_PIPE_FORWARD, 0, 0}};
    static const int32_t rank_of[1] = {0};
    static const int64_t begins[2] = {0, 2};
    struct dsc_pipe_table table = {actions, begins, rank_of, 1, 1, 1, true, NULL, 0, -1};
    struct dsc_pipe_cost cost = {1, 1, 1, 1, 1};
    struct dsc_pipe_usage usage = {.busy_ns = -7};
    struct dsc_pipe_action out[8];
    int64_t out_begins[2] = {-7, -7};
    int64_t makespan = -7;

    TEST_CASE("simulate");
    CHECK_ERROR(dsc_pipe_simulate(&table, &cost, 0, NULL, &usage, &makespan), DSC_EINVAL, "waits for ever at 0B0");
    CHECK_ERROR(dsc_pipe_add_comm(&table, 8, out, out_begins), DSC_EINVAL, "waits for ever at 0B0");
    cost.weight_ns = -1;
    CHECK_ERROR(dsc_pipe_simulate(&table, &cost, 0, NULL, &usage, &makespan), DSC_EINVAL, "-1");
    cost.weight_ns = INT64_MAX / 3;
    CHECK_ERROR(dsc_pipe_simulate(&table, &cost, 0, NULL, &usage, &makespan), DSC_EOVERFLOW, "stage 0");
    CHECK_EQ(makespan, -7);
    CHECK_EQ(usage.busy_ns, -7);
    CHECK_EQ(out_begins[0], -7);
}

static void test_text(void)
{
    static const char *const texts[] = {"0F0", "2B13", "1I3", "1W3", "0SEND_F5", "7RECV_F0", "2G0", "0R11", "3SEND_B2147483647", "2147483647RECV_B1"};
    static const char *const wrong[] = {"", "F", "F0", "0F", "0X0", "00F0", "0F01", "-1F0", "0F0 ", " 0F0", "0SEND0", "2147483648F0", "0f0", "0G", "R1", "0GR0", "0F99999999999999999999"};
    struct dsc_pipe_action action = {-7, -7, -7};
    char text[40];

    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        TEST_CASE("%s", texts[i]);
        CHECK_STATUS(dsc_pipe_parse(texts[i], &action), DSC_OK);
        CHECK_STATUS(dsc_pipe_format(&action, sizeof text, text), DSC_OK);
        CHECK_STR(text, texts[i]);
    }
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        TEST_CASE("\"%s\"", wrong[i]);
        CHECK_STATUS(dsc_pipe_parse(wrong[i], &action), DSC_EINVAL);
    }
    CHECK_ERROR(dsc_pipe_format(&action, 5, text), DSC_ENOSPC, "5 bytes");
    CHECK_STATUS(dsc_pipe_format(&(struct dsc_pipe_action){99, 0, 0}, sizeof text, text), DSC_EINVAL);
}

int main(void)
{
    test_waits();
    test_missing_and_twice();
    test_order();
    test_tables();
    test_simulate();
    test_text();
    return test_finish(__FILE__);
}
