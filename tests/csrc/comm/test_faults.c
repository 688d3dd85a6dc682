/*
 * Some rank makes a different call, makes no call, or closes its end. Every end of the group then fails with a message
 * that names the rank and both values. No end writes a result, and all later calls fail in the same way. Ranks are
 * threads.
 */
#include "comm/ranks.h"

#include "comm/segment.h"

#include <pthread.h>
#include <time.h>

enum { N_ELEMS = 40000, MAX_WHY = 512 };

/* Two ranks' calls, and words expected in rank 0's error message. */
struct mismatch {
    const char *name;
    struct dsc_comm_call calls[2];
    const char *words[3];
};

static float data[DSC_COMM_MAX_RANKS][N_ELEMS];
static float out[DSC_COMM_MAX_RANKS][N_ELEMS];

static const int64_t SENDS[2][2] = {{10, 20}, {30, 10}};
static const int64_t EXPECTS[2][2] = {{10, 31}, {20, 10}};

#define REDUCE .op = DSC_COMM_ALL_REDUCE, .scale = 1.0

/* 63 bytes of a label are shown. */
#define LONG_SHOWN "0123456789abcde0123456789abcdef0123456789abcdef0123456789abcdef"
#define LONG LONG_SHOWN "0123456789abcdef"

static const struct mismatch MISMATCHES[] = {
    {"operation", {{REDUCE, .n_elems = 6}, {.op = DSC_COMM_ALL_GATHER, .n_elems = 6}}, {"rank 1", "all_gather", "all_reduce"}},
    {"barrier", {{REDUCE, .n_elems = 8}, {.op = DSC_COMM_BARRIER}}, {"rank 1", "barrier", "all_reduce"}},
    {"length", {{REDUCE, .n_elems = 8}, {REDUCE, .n_elems = 9}}, {"rank 1", "passes 9 elements", "rank 0 8"}},
    {"small and large", {{REDUCE, .n_elems = 8}, {REDUCE, .n_elems = N_ELEMS}}, {"rank 1", "40000", "rank 0 8"}},
    {"large", {{REDUCE, .n_elems = N_ELEMS - 1}, {REDUCE, .n_elems = N_ELEMS}}, {"rank 1", "40000", "39999"}},
    {"nothing", {{REDUCE, .n_elems = 0}, {REDUCE, .n_elems = 1}}, {"rank 1", "passes 1 elements", "rank 0 0"}},
    {"type", {{REDUCE, .n_elems = 8}, {REDUCE, .n_elems = 8, .type = DSC_COMM_I32}}, {"rank 1", "int32", "float32"}},
    {"combine", {{REDUCE, .n_elems = 8}, {REDUCE, .n_elems = 8, .combine = DSC_COMM_MAX}}, {"rank 1", "max", "sum"}},
    {"scale", {{REDUCE, .n_elems = 8}, {.op = DSC_COMM_ALL_REDUCE, .n_elems = 8, .scale = 0.5}}, {"rank 1", "by 0.5", "by 1"}},
    {"source", {{.op = DSC_COMM_BROADCAST, .n_elems = 8}, {.op = DSC_COMM_BROADCAST, .n_elems = 8, .src = 1}}, {"rank 1", "takes rank 1", "rank 0 rank 0"}},
    {"label", {{REDUCE, .n_elems = 8, .label = "a"}, {REDUCE, .n_elems = 8, .label = "b"}}, {"rank 1", "all_reduce of \"b\"", "rank 0 of \"a\""}},
    {"large label", {{REDUCE, .n_elems = N_ELEMS, .label = ""}, {REDUCE, .n_elems = N_ELEMS, .label = "\xc3\xa9\n%s"}}, {"rank 1", "of \"???%s\"", "rank 0 of \"\""}},
    {"no label", {{REDUCE, .n_elems = 8}, {REDUCE, .n_elems = 8, .label = "b"}}, {"rank 1", "of \"b\"", "rank 0 of \"\""}},
    {"end of a label", {{REDUCE, .n_elems = 8, .label = LONG "0"}, {REDUCE, .n_elems = 8, .label = LONG "1"}}, {"rank 1", "differ further on", LONG_SHOWN}},
    {"splits",
     {{.op = DSC_COMM_ALL_TO_ALL, .in_splits = SENDS[0], .out_splits = EXPECTS[0]}, {.op = DSC_COMM_ALL_TO_ALL, .in_splits = SENDS[1], .out_splits = EXPECTS[1]}},
     {"rank 1", "sends 30", "expects 31"}},
};

struct outcome {
    dsc_status status;
    dsc_status again;
    char why[MAX_WHY];
    char why_again[MAX_WHY];
};

static struct outcome outcomes[DSC_COMM_MAX_RANKS];

static void keep(int32_t rank, dsc_comm *comm, dsc_status status)
{
    struct outcome *outcome = &outcomes[rank];

    outcome->status = status;
    snprintf(outcome->why, sizeof outcome->why, "%s", dsc_last_error());
    outcome->again = barrier(comm);
    snprintf(outcome->why_again, sizeof outcome->why_again, "%s", dsc_last_error());
}

/* Rank 1 makes the second call, all others make rank 0's call. */
static void call_differently(dsc_comm *comm, int32_t rank, int32_t n_ranks, void *arg)
{
    const struct mismatch *mismatch = arg;
    struct dsc_comm_call call = mismatch->calls[rank == 1];

    (void)n_ranks;
    call.data = data[rank];
    call.out = out[rank];
    keep(rank, comm, run_call(comm, &call));
}

static void check_outcome(int32_t rank, dsc_status status)
{
    CHECK_EQ(outcomes[rank].status, status);
    CHECK_EQ(outcomes[rank].again, status);
    CHECK_STR(outcomes[rank].why_again, outcomes[rank].why);
}

#define CHECK_WORD(rank, word) test_report(strstr(outcomes[rank].why, (word)) != NULL, __FILE__, __LINE__, "\"%s\" does not say \"%s\"", outcomes[rank].why, (word))

static void test_mismatches(void)
{
    for (size_t i = 0; i < sizeof MISMATCHES / sizeof *MISMATCHES; i++)
        for (int32_t n_ranks = 2; n_ranks <= 3; n_ranks++) {
            if (MISMATCHES[i].calls[0].in_splits != NULL && n_ranks > 2)
                continue;
            memset(data, 0x3f, sizeof data);
            memset(out, 0x5a, sizeof out);
            run_threads(n_ranks, call_differently, (void *)(uintptr_t)&MISMATCHES[i]);
            for (int32_t rank = 0; rank < n_ranks; rank++) {
                TEST_CASE("%s, rank %d of %d", MISMATCHES[i].name, (int)rank, (int)n_ranks);
                check_outcome(rank, DSC_EPEER);
                for (size_t k = 0; k < N_ELEMS; k++)
                    if (memcmp(&data[rank][k], "\x3f\x3f\x3f\x3f", 4) != 0 || memcmp(&out[rank][k], "\x5a\x5a\x5a\x5a", 4) != 0) {
                        CHECK_EQ(k, -1);
                        break;
                    }
            }
            TEST_CASE("%s of %d", MISMATCHES[i].name, (int)n_ranks);
            for (size_t k = 0; k < 3; k++)
                CHECK_WORD(0, MISMATCHES[i].words[k]);
        }
}

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void test_timeout(void)
{
    const char *addresses[2];
    dsc_comm *ends[2];
    struct dsc_comm_call large = {REDUCE, .n_elems = N_ELEMS, .data = data[0]};

    for (int32_t is_large = 0; is_large < 2; is_large++) {
        TEST_CASE("timeout, large %d", (int)is_large);
        for (int32_t rank = 0; rank < 2; rank++) {
            struct dsc_comm_config config = config_of(rank, 2);

            config.timeout_ns = 250000000;
            CHECK_STATUS(dsc_comm_create(&config, &ends[rank]), DSC_OK);
            addresses[rank] = dsc_comm_address(ends[rank]);
        }
        CHECK_STATUS(dsc_comm_attach(ends[0], addresses), DSC_OK);
        CHECK_STATUS(dsc_comm_attach(ends[1], addresses), DSC_OK);

        int64_t begin = now_ns();

        keep(0, ends[0], is_large ? run_call(ends[0], &large) : barrier(ends[0]));
        CHECK(now_ns() - begin >= 250000000);
        check_outcome(0, DSC_ETIMEDOUT);
        CHECK_WORD(0, "rank 1 (process");
        CHECK_WORD(0, "0.25 s");
        CHECK_WORD(0, is_large ? "all_reduce number 1" : "barrier number 1");
        /*
         * Rank 1 learns that rank 0 has failed even after rank 0 has called, because a small call leaves nothing to
         * wait for.
         */
        keep(1, ends[1], is_large ? run_call(ends[1], &large) : barrier(ends[1]));
        CHECK_EQ(outcomes[1].status, is_large ? DSC_EPEER : DSC_OK);
        CHECK_EQ(outcomes[1].again, DSC_EPEER);
        CHECK(strstr(outcomes[1].why_again, "rank 0 (process") != NULL && strstr(outcomes[1].why_again, "has failed") != NULL);
        close_ends(ends, 2);
    }
}

/* The last rank closes at once, and the calls of the other ranks fail. */
static void close_early(dsc_comm *comm, int32_t rank, int32_t n_ranks, void *arg)
{
    (void)arg;
    if (barrier(comm) != DSC_OK)
        exit(1);
    if (rank == n_ranks - 1)
        (void)dsc_comm_close(comm);
    keep(rank, comm, barrier(comm));
}

static void test_closed(void)
{
    TEST_CASE("closed");
    run_threads(3, close_early, NULL);
    check_outcome(2, DSC_ESTATE);
    for (int32_t rank = 0; rank < 2; rank++) {
        check_outcome(rank, DSC_EPEER);
        CHECK_WORD(rank, "rank 2 (process");
        CHECK_WORD(rank, "closed");
    }
}

/* Each rank closes as soon as its own last call is done. The calls of the other ranks must still succeed. */
static void close_after_last(dsc_comm *comm, int32_t rank, int32_t n_ranks, void *arg)
{
    int64_t n_elems = *(int64_t *)arg;
    struct dsc_comm_call call = {REDUCE, .n_elems = n_elems, .data = data[rank]};

    (void)n_ranks;
    for (int64_t i = 0; i < n_elems; i++)
        data[rank][i] = 1.0f;
    if (rank == 0)
        usleep(1000);
    keep(rank, comm, run_call(comm, &call));
    (void)dsc_comm_close(comm);
}

static void test_orderly_close(void)
{
    for (int32_t i = 0; i < 20; i++) {
        int64_t n_elems = i % 2 == 0 ? 10 : N_ELEMS;

        run_threads(3, close_after_last, &n_elems);
        for (int32_t rank = 0; rank < 3; rank++) {
            TEST_CASE("orderly close, run %d, rank %d", (int)i, (int)rank);
            CHECK_EQ(outcomes[rank].status, DSC_OK);
            CHECK(data[rank][0] == 3.0f && data[rank][n_elems - 1] == 3.0f);
        }
    }
}

/* Closing ends unfinished requests, also while another thread waits for them. */
static void *wait_for(void *opaque)
{
    return (void *)(intptr_t)dsc_comm_wait(opaque, NULL, NULL);
}

static void test_close_ends_requests(void)
{
    dsc_comm *ends[2];
    dsc_comm_request *requests[3];
    pthread_t waiter;
    void *ending = NULL;
    struct dsc_comm_call large = {REDUCE, .n_elems = N_ELEMS, .data = data[0]};
    struct dsc_comm_call small = {REDUCE, .n_elems = 3, .data = data[1]};

    TEST_CASE("close ends requests");
    open_ends(ends, 2);
    CHECK_STATUS(dsc_comm_submit(ends[0], &small, &requests[0]), DSC_OK);
    CHECK_STATUS(dsc_comm_submit(ends[0], &large, &requests[1]), DSC_OK);
    CHECK_STATUS(dsc_comm_submit(ends[0], &small, &requests[2]), DSC_OK);
    CHECK(!dsc_comm_is_done(requests[0]) && !dsc_comm_is_done(requests[2]));
    CHECK_ERROR(dsc_comm_release(requests[1]), DSC_ESTATE, "not done");
    if (pthread_create(&waiter, NULL, wait_for, requests[1]) != 0)
        exit(1);
    CHECK_STATUS(dsc_comm_close(ends[0]), DSC_OK);
    pthread_join(waiter, &ending);
    CHECK_EQ((intptr_t)ending, DSC_ESTATE);
    for (int32_t i = 0; i < 3; i++) {
        CHECK_ERROR(dsc_comm_wait(requests[i], NULL, NULL), DSC_ESTATE, "closed");
        CHECK(dsc_comm_is_done(requests[i]));
        CHECK_STATUS(dsc_comm_release(requests[i]), DSC_OK);
    }
    CHECK_ERROR(dsc_comm_submit(ends[0], &small, &requests[0]), DSC_ESTATE, "closed");
    CHECK_STATUS(dsc_comm_close(ends[0]), DSC_OK);
    close_ends(ends, 2);
}

/* A small request completes as soon as the other ranks call, even if nobody waits for it. */
static void test_nobody_waits(void)
{
    dsc_comm *ends[2];
    dsc_comm_request *request = NULL;
    dsc_comm_request *other = NULL;
    struct dsc_comm_call call = {REDUCE, .n_elems = 3, .data = data[0]};
    struct dsc_comm_call its = {REDUCE, .n_elems = 3, .data = data[1]};

    TEST_CASE("nobody waits");
    for (int32_t i = 0; i < 3; i++)
        data[0][i] = data[1][i] = 2.0f;
    open_ends(ends, 2);
    CHECK_STATUS(dsc_comm_submit(ends[0], &call, &request), DSC_OK);
    CHECK_STATUS(run_call(ends[1], &its), DSC_OK); /* rank 0 has posted everything */
    CHECK(data[1][2] == 4.0f);
    while (!dsc_comm_is_done(request))
        usleep(100);
    CHECK(data[0][2] == 4.0f);
    CHECK_STATUS(dsc_comm_release(request), DSC_OK);
    /* Large requests make progress without a wait. */
    its.n_elems = call.n_elems = N_ELEMS;
    CHECK_STATUS(dsc_comm_submit(ends[0], &call, &request), DSC_OK);
    CHECK_STATUS(dsc_comm_submit(ends[1], &its, &other), DSC_OK);
    while (!dsc_comm_is_done(request) || !dsc_comm_is_done(other))
        usleep(100);
    CHECK_STATUS(dsc_comm_release(request), DSC_OK);
    CHECK_STATUS(dsc_comm_release(other), DSC_OK);
    close_ends(ends, 2);
}

/* Returns true after a given number of calls. */
static bool stops_later(void *context)
{
    int32_t *n_left = context;

    return --*n_left <= 0;
}

/*
 * A stopped wait leaves its request running. Covers small and large requests, requests that announce a wait, and
 * requests that the worker runs.
 */
static void test_stopped(void)
{
    static const struct {
        int64_t n_elems;
        bool is_waited;
        bool is_second;
    } CASES[] = {{3, false, false}, {N_ELEMS, false, false}, {N_ELEMS, true, false}, {3, true, true}, {N_ELEMS, true, true}};

    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++)
        for (int32_t waits_again = 0; waits_again < 2; waits_again++) {
            int64_t n = CASES[i].n_elems;
            struct dsc_comm_call call = {REDUCE, .n_elems = n, .data = data[0], .is_waited = CASES[i].is_waited};
            struct dsc_comm_call its = {REDUCE, .n_elems = n, .data = data[1]};
            struct dsc_comm_call barrier_call = {.op = DSC_COMM_BARRIER};
            dsc_comm *ends[2];
            dsc_comm_request *before = NULL;
            dsc_comm_request *request = NULL;
            int32_t n_left = 2;

            TEST_CASE("stopped, case %zu, waits again: %d", i, (int)waits_again);
            for (int64_t j = 0; j < n; j++)
                data[0][j] = data[1][j] = 1.0f;
            open_ends(ends, 2);
            if (CASES[i].is_second)
                CHECK_STATUS(dsc_comm_submit(ends[0], &barrier_call, &before), DSC_OK);
            CHECK_STATUS(dsc_comm_submit(ends[0], &call, &request), DSC_OK);
            CHECK_ERROR(dsc_comm_wait(request, stops_later, &n_left), DSC_EAGAIN, "stopped");
            CHECK_EQ(n_left, 0);
            n_left = 1;
            CHECK_ERROR(dsc_comm_wait(request, stops_later, &n_left), DSC_EAGAIN, "stopped");
            CHECK(data[0][0] == 1.0f);
            if (CASES[i].is_second)
                CHECK_STATUS(barrier(ends[1]), DSC_OK);
            CHECK_STATUS(run_call(ends[1], &its), DSC_OK); /* rank 0's worker does its part */
            CHECK(data[1][n - 1] == 2.0f);
            n_left = 1 << 20;
            if (waits_again)
                CHECK_STATUS(dsc_comm_wait(request, stops_later, &n_left), DSC_OK);
            while (!dsc_comm_is_done(request))
                usleep(100);
            CHECK_STATUS(dsc_comm_wait(request, NULL, NULL), DSC_OK);
            CHECK(data[0][0] == 2.0f && data[0][n - 1] == 2.0f);
            CHECK_STATUS(dsc_comm_release(request), DSC_OK);
            CHECK_STATUS(dsc_comm_release(before), DSC_OK);
            close_ends(ends, 2);
        }
}

/* Impossible values that a rank posts are rejected, and nothing outside of its segment is read. */
static void test_lies(void)
{
    const struct {
        const char *word;
        struct dsc_comm_post post;
    } LIES[] = {
        {"outside of its arena", {.op = DSC_COMM_ALL_REDUCE, .scale = 1.0, .n_elems = N_ELEMS, .is_in_place = 1, .offset = DSC_COMM_AT_ARENA - 1}},
        {"outside of its arena", {.op = DSC_COMM_ALL_REDUCE, .scale = 1.0, .n_elems = N_ELEMS, .is_in_place = 1, .offset = DSC_COMM_AT_ARENA + ARENA_BYTES - 4 * N_ELEMS + 1}},
        {"outside of its arena", {.op = DSC_COMM_ALL_REDUCE, .scale = 1.0, .n_elems = N_ELEMS, .is_in_place = 1, .offset = INT64_MAX}},
        {"nothing known", {.op = 1234}},
        {"no type", {.op = DSC_COMM_ALL_REDUCE, .type = -5}},
        {"for nothing", {.op = DSC_COMM_ALL_REDUCE, .combine = 1234}},
        {"do not add up", {.op = DSC_COMM_ALL_TO_ALL, .n_elems = 20, .in_splits = {20, INT64_MAX}}},
        {"do not add up", {.op = DSC_COMM_ALL_TO_ALL, .n_elems = 20, .in_splits = {20, -1}}},
        {"do not add up", {.op = DSC_COMM_ALL_TO_ALL, .n_elems = INT64_MAX, .in_splits = {20, INT64_MAX - 20}}},
        {"outside of its arena", {.op = DSC_COMM_ALL_TO_ALL, .n_elems = INT64_MAX / 64, .in_splits = {20, INT64_MAX / 64 - 20}, .is_in_place = 1, .offset = DSC_COMM_AT_ARENA}},
    };
    static const int64_t SPLITS[2] = {5, 20};
    static const int64_t EXPECTED[2] = {5, 20};

    for (size_t i = 0; i < sizeof LIES / sizeof *LIES; i++) {
        struct dsc_comm_call call = {.op = DSC_COMM_ALL_REDUCE, .scale = 1.0, .n_elems = N_ELEMS, .data = data[0], .out = out[0]};
        dsc_comm *ends[2];
        dsc_comm_block *block = NULL;

        TEST_CASE("lie %zu", i);
        if (LIES[i].post.op == DSC_COMM_ALL_TO_ALL) {
            call.op = DSC_COMM_ALL_TO_ALL;
            call.in_splits = SPLITS;
            call.out_splits = EXPECTED;
        }
        open_ends(ends, 2);
        CHECK_STATUS(dsc_comm_block_create(ends[1], 1, &block), DSC_OK);

        struct dsc_comm_control *control = (void *)((char *)dsc_comm_block_data(block) - DSC_COMM_AT_ARENA + DSC_COMM_AT_CONTROL);

        control->posts[0] = LIES[i].post;
        atomic_store(&control->tick, 1);
        CHECK_ERROR(run_call(ends[0], &call), DSC_EPEER, LIES[i].word);
        CHECK(strstr(dsc_last_error(), "rank 1 (process") != NULL);
        dsc_comm_block_destroy(block);
        close_ends(ends, 2);
    }
}

struct bad_call {
    const char *word;
    struct dsc_comm_call call;
};

static void test_bad_calls(void)
{
    static const int64_t NEGATIVE[2] = {1, -1};
    static const int64_t FINE[2] = {1, 1};
    static const int64_t OTHER[2] = {2, 2};
    const struct bad_call calls[] = {
        {"op is 77", {.op = (dsc_comm_op)77}},
        {"type is 99", {REDUCE, .type = (dsc_comm_type)99}},
        {"combine is 9", {REDUCE, .combine = (dsc_comm_combine)9}},
        {"negative", {REDUCE, .n_elems = -1, .data = data[0]}},
        {"NULL", {REDUCE, .n_elems = 1}},
        {"more than memory", {REDUCE, .n_elems = INT64_MAX, .data = data[0]}},
        {"finite", {.op = DSC_COMM_ALL_REDUCE, .scale = 1e300, .data = data[0]}},
        {"must be 1", {.op = DSC_COMM_ALL_REDUCE, .scale = 2.0, .type = DSC_COMM_I32, .data = data[0]}},
        {"not reduced", {REDUCE, .type = DSC_COMM_BYTES_4, .data = data[0]}},
        {"no multiple", {.op = DSC_COMM_ALL_GATHER, .n_elems = 3, .data = data[0]}},
        {"no multiple", {.op = DSC_COMM_REDUCE_SCATTER, .scale = 1.0, .n_elems = 3, .data = data[0], .out = out[0]}},
        {"overlaps", {.op = DSC_COMM_REDUCE_SCATTER, .scale = 1.0, .n_elems = 4, .data = data[0], .out = data[0] + 1}},
        {"overlaps", {.op = DSC_COMM_REDUCE_SCATTER, .scale = 1.0, .n_elems = 4, .data = data[0], .out = data[0], .out_type = DSC_COMM_BF16}},
        {"summed into", {.op = DSC_COMM_REDUCE_SCATTER, .scale = 1.0, .n_elems = 4, .data = data[0], .out = out[0], .out_type = DSC_COMM_F64}},
        {"src is 2", {.op = DSC_COMM_BROADCAST, .src = 2, .data = data[0]}},
        {"src is -1", {.op = DSC_COMM_BROADCAST, .src = -1, .data = data[0]}},
        {"in_splits is NULL", {.op = DSC_COMM_ALL_TO_ALL}},
        {"in_splits[1] is -1", {.op = DSC_COMM_ALL_TO_ALL, .in_splits = NEGATIVE, .out_splits = FINE, .data = data[0], .out = out[0]}},
        {"overlaps", {.op = DSC_COMM_ALL_TO_ALL, .in_splits = FINE, .out_splits = FINE, .data = data[0], .out = data[0] + 1}},
        {"itself", {.op = DSC_COMM_ALL_TO_ALL, .in_splits = FINE, .out_splits = OTHER, .data = data[0], .out = out[0]}},
    };
    dsc_comm *ends[2];
    dsc_comm_request *request = NULL;

    open_ends(ends, 2);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        TEST_CASE("bad call %zu", i);
        CHECK_ERROR(dsc_comm_submit(ends[0], &calls[i].call, &request), DSC_EINVAL, calls[i].word);
        CHECK(request == NULL);
    }
    close_ends(ends, 2);
}

int main(void)
{
    alarm(LIMIT_SECONDS);
    test_mismatches();
    test_timeout();
    test_closed();
    test_orderly_close();
    test_close_ends_requests();
    test_nobody_waits();
    test_stopped();
    test_lies();
    test_bad_calls();
    return test_finish(__FILE__);
}
