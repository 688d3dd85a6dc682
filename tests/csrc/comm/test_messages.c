/*
 * Ranks are threads, and send messages of all lengths and element types, at random, and more than notices and places.
 * Other tests: two ends that differ, closed ends, stopped waits.
 */
#include "comm/ranks.h"

#include "comm/segment.h"

#include <pthread.h>
#include <time.h>

enum { MAX_WHY = 512, LONG_BYTES = 9 << 20 };

#define CHECK_WORD(text, word) test_report(strstr((text), (word)) != NULL, __FILE__, __LINE__, "\"%s\" does not say \"%s\"", (text), (word))

static struct dsc_comm_message bytes(void *data, int64_t n_bytes, int32_t tag)
{
    return (struct dsc_comm_message){.tag = tag, .type = DSC_COMM_U8, .data = data, .n_dims = 1, .shape = {n_bytes}, .label = "data"};
}

static dsc_comm_request *start(dsc_comm *comm, int32_t peer, bool sends, const struct dsc_comm_message *message)
{
    dsc_comm_request *request = NULL;

    CHECK_STATUS(sends ? dsc_comm_send(comm, peer, message, &request) : dsc_comm_receive(comm, peer, message, &request), DSC_OK);
    return request;
}

static void finish(dsc_comm_request *request)
{
    CHECK_STATUS(dsc_comm_wait(request, NULL, NULL), DSC_OK);
    CHECK(dsc_comm_is_done(request));
    CHECK_STATUS(dsc_comm_release(request), DSC_OK);
}

static void fill(unsigned char *data, int64_t n_bytes, uint64_t seed)
{
    for (int64_t i = 0; i < n_bytes; i++)
        data[i] = (unsigned char)test_below(&seed, 256);
}

/* Both ranks send first and receive afterwards, from plain memory and from the arena. */
static const int64_t LENGTHS[] = {0, 1, 7, 4096, DSC_COMM_INLINE_BYTES - 1, DSC_COMM_INLINE_BYTES, DSC_COMM_INLINE_BYTES + 1, 1 << 20, LONG_BYTES};

static void exchange(dsc_comm *comm, int32_t rank, int32_t n_ranks, void *arg)
{
    unsigned char *plain = test_alloc(LONG_BYTES);
    unsigned char *got = test_alloc(LONG_BYTES + 1);
    unsigned char *wanted = test_alloc(LONG_BYTES);
    dsc_comm_block *block = NULL;

    (void)arg;
    CHECK_STATUS(dsc_comm_block_create(comm, LONG_BYTES, &block), DSC_OK);
    for (int32_t in_arena = 0; in_arena < 2; in_arena++)
        for (size_t i = 0; i < sizeof LENGTHS / sizeof *LENGTHS; i++) {
            int64_t n = LENGTHS[i];
            unsigned char *data = in_arena ? dsc_comm_block_data(block) : plain;
            struct dsc_comm_message sent = bytes(data, n, 3);
            struct dsc_comm_message expected = bytes(got, n, 3);

            fill(data, n, (uint64_t)(rank + 17 * n));
            for (int32_t other = 0; other < n_ranks; other++) {
                if (other == rank)
                    continue;
                memset(got, 0x5a, (size_t)n + 1);
                fill(wanted, n, (uint64_t)(other + 17 * n));

                dsc_comm_request *send = start(comm, other, true, &sent);

                dsc_comm_request *receive = start(comm, other, false, &expected);

                /* In any order. All ranks may wait for their sends, as long as they have started to receive. */
                finish(i % 2 == 0 ? send : receive);
                finish(i % 2 == 0 ? receive : send);
                CHECK_BYTES(got, wanted, (size_t)n);
                CHECK_EQ(got[n], 0x5a);
            }
        }
    dsc_comm_block_destroy(block);
    free(plain);
    free(got);
    free(wanted);
}

static void test_lengths(void)
{
    TEST_CASE("lengths, 2 ranks");
    run_threads(2, exchange, NULL);
    TEST_CASE("lengths, 4 ranks");
    run_threads(4, exchange, NULL);
}

/* The sender's memory may be overwritten as soon as the request is done. */
static void test_types(void)
{
    dsc_comm *ends[2];
    unsigned char data[24 * 16];
    unsigned char got[24 * 16];

    open_ends(ends, 2);
    for (int32_t type = 0; type < DSC_COMM_N_TYPES; type++)
        for (int32_t n_dims = 0; n_dims <= DSC_COMM_MAX_DIMS; n_dims++) {
            static const int64_t DIMS[DSC_COMM_MAX_DIMS] = {2, 3, 1, 4, 1, 1, 1, 1};
            struct dsc_comm_message message = {.tag = -type, .type = (dsc_comm_type)type, .data = data, .n_dims = n_dims};
            size_t n_bytes = dsc_comm_type_bytes((dsc_comm_type)type);
            unsigned char kept[sizeof data];

            TEST_CASE("type %d, %d dimensions", (int)type, (int)n_dims);
            for (int32_t i = 0; i < n_dims; i++)
                n_bytes *= (size_t)(message.shape[i] = DIMS[i]);
            fill(data, sizeof data, (uint64_t)(type * 100 + n_dims));
            memcpy(kept, data, sizeof data);
            finish(start(ends[0], 1, true, &message));
            memset(data, 0, sizeof data);
            message.data = got;
            finish(start(ends[1], 0, false, &message));
            CHECK_BYTES(got, kept, n_bytes);
        }
    close_ends(ends, 2);
}

/*
 * Random traffic: each rank sends messages of random lengths and tags to random ranks. The seed tells receivers
 * all messages. Each tag is received in order, tags and ranks are mixed.
 */
enum { N_TRAFFIC = 150, N_TAGS = 3, MAX_TRAFFIC_BYTES = 40000 };

struct traffic {
    int32_t dst;
    int32_t tag;
    int64_t n_bytes;
};

static void plan_traffic(int32_t src, int32_t n_ranks, uint64_t seed, struct traffic *plan)
{
    uint64_t random = seed * 100 + (uint64_t)src;

    for (int32_t i = 0; i < N_TRAFFIC; i++) {
        plan[i].dst = (src + 1 + (int32_t)test_below(&random, n_ranks - 1)) % n_ranks;
        plan[i].tag = (int32_t)test_below(&random, N_TAGS);
        plan[i].n_bytes = (int64_t)test_below(&random, test_below(&random, 3) == 0 ? MAX_TRAFFIC_BYTES : 300);
    }
}

struct pending {
    dsc_comm_request *request;
    unsigned char *data;
    int32_t src;
    int32_t index;
    int64_t n_bytes;
};

static void check_pending(const struct pending *pending)
{
    unsigned char *wanted = test_alloc((size_t)pending->n_bytes + 1);

    fill(wanted, pending->n_bytes, (uint64_t)(pending->src * 1000 + pending->index));
    CHECK_BYTES(pending->data, wanted, (size_t)pending->n_bytes);
    free(wanted);
}

static void talk(dsc_comm *comm, int32_t rank, int32_t n_ranks, void *arg)
{
    uint64_t seed = *(uint64_t *)arg;
    uint64_t random = seed * 77 + (uint64_t)rank;
    static _Thread_local struct traffic plans[5][N_TRAFFIC];
    int32_t next[5][N_TAGS] = {{0}};
    struct pending *sends = calloc(N_TRAFFIC, sizeof *sends);
    struct pending *receives = calloc((size_t)N_TRAFFIC * 5, sizeof *receives);
    int32_t n_receives = 0;
    int32_t n_sends = 0;
    dsc_comm_block *blocks[N_TRAFFIC] = {NULL};

    for (int32_t src = 0; src < n_ranks; src++)
        plan_traffic(src, n_ranks, seed, plans[src]);
    for (;;) {
        int32_t n_left = 0;

        if (n_sends < N_TRAFFIC && test_below(&random, 2) == 0) {
            const struct traffic *one = &plans[rank][n_sends];
            struct pending *send = &sends[n_sends];

            if (test_below(&random, 3) == 0) {
                CHECK_STATUS(dsc_comm_block_create(comm, one->n_bytes, &blocks[n_sends]), DSC_OK);
                send->data = dsc_comm_block_data(blocks[n_sends]);
            } else
                send->data = test_alloc((size_t)one->n_bytes + 1);
            fill(send->data, one->n_bytes, (uint64_t)(rank * 1000 + n_sends));

            struct dsc_comm_message message = bytes(send->data, one->n_bytes, one->tag);

            send->request = start(comm, one->dst, true, &message);
            n_sends++;
        }
        /* The next message of a random rank and tag. */
        int32_t src = (int32_t)test_below(&random, n_ranks);
        int32_t tag = (int32_t)test_below(&random, N_TAGS);

        if (src != rank) {
            int32_t *i = &next[src][tag];

            while (*i < N_TRAFFIC && (plans[src][*i].dst != rank || plans[src][*i].tag != tag))
                ++*i;
            if (*i < N_TRAFFIC) {
                struct pending *receive = &receives[n_receives++];
                struct dsc_comm_message message;

                *receive = (struct pending){.src = src, .index = *i, .n_bytes = plans[src][*i].n_bytes};
                receive->data = test_alloc((size_t)receive->n_bytes + 1);
                message = bytes(receive->data, receive->n_bytes, tag);
                receive->request = start(comm, src, false, &message);
                ++*i;
                /* No rank waits while it has messages to send. */
                if (n_sends == N_TRAFFIC && test_below(&random, 2) == 0) {
                    finish(receive->request);
                    receive->request = NULL;
                    check_pending(receive);
                }
            }
        }
        for (src = 0; src < n_ranks; src++)
            for (tag = 0; tag < N_TAGS && src != rank; tag++)
                for (int32_t i = next[src][tag]; i < N_TRAFFIC; i++)
                    n_left += plans[src][i].dst == rank && plans[src][i].tag == tag;
        if (n_left == 0 && n_sends == N_TRAFFIC)
            break;
    }
    /* In a random order. */
    while (n_receives > 0) {
        struct pending *receive = &receives[test_below(&random, n_receives)];

        if (receive->request != NULL) {
            finish(receive->request);
            check_pending(receive);
        }
        free(receive->data);
        *receive = receives[--n_receives];
    }
    for (int32_t i = 0; i < N_TRAFFIC; i++) {
        finish(sends[i].request);
        if (blocks[i] == NULL)
            free(sends[i].data);
        dsc_comm_block_destroy(blocks[i]);
    }
    CHECK_STATUS(barrier(comm), DSC_OK); /* collectives go on beside messages */
    free(sends);
    free(receives);
}

static void test_traffic(void)
{
    for (uint64_t seed = 0; seed < 8; seed++) {
        TEST_CASE("traffic, seed %d", (int)seed);
        run_threads(2 + (int32_t)(seed % 4), talk, &seed);
    }
}

/* Sends more messages than notices and places before the first reception, which is of the last message. */
static void test_many(void)
{
    enum { N = 3 * DSC_COMM_N_NOTICES, N_LONG = DSC_COMM_N_PLACES + 40 };
    static const int64_t SIZES[2] = {100, 8000};
    dsc_comm *ends[2];

    for (int32_t is_long = 0; is_long < 2; is_long++) {
        int64_t n_bytes = SIZES[is_long];
        int32_t n = is_long ? N_LONG : N;
        dsc_comm_request **sends = calloc((size_t)n, sizeof(void *));
        unsigned char *data = test_alloc((size_t)n * (size_t)n_bytes);
        unsigned char *got = test_alloc((size_t)n_bytes);

        TEST_CASE("many, %d bytes", (int)n_bytes);
        open_ends(ends, 2);
        fill(data, n * n_bytes, 5);
        for (int32_t i = 0; i < n; i++) {
            struct dsc_comm_message message = bytes(data + i * n_bytes, n_bytes, i == DSC_COMM_N_PLACES - 1 ? 7 : 3);

            sends[i] = start(ends[0], 1, true, &message);
        }
        CHECK(dsc_comm_is_done(sends[0]) && !dsc_comm_is_done(sends[n - 1]));

        struct dsc_comm_message message = bytes(got, n_bytes, 7);
        dsc_comm_request *last = is_long ? start(ends[1], 0, false, &message) : NULL;

        while (is_long && !dsc_comm_is_done(last))
            (void)dsc_comm_is_done(sends[n - 1]); /* which sends on */
        if (is_long) {
            CHECK_BYTES(got, data + (DSC_COMM_N_PLACES - 1) * n_bytes, (size_t)n_bytes);
            finish(last);
        }
        for (int32_t i = 0; i < n; i++) {
            if (i == DSC_COMM_N_PLACES - 1)
                continue;
            message = bytes(got, n_bytes, 3);

            dsc_comm_request *receive = start(ends[1], 0, false, &message);

            while (!dsc_comm_is_done(receive))
                (void)dsc_comm_is_done(sends[n - 1]);
            finish(receive);
            CHECK_BYTES(got, data + i * n_bytes, (size_t)n_bytes);
        }
        for (int32_t i = 0; i < n; i++)
            finish(sends[i]);
        close_ends(ends, 2);
        free(sends);
        free(data);
        free(got);
    }
}

struct difference {
    const char *name;
    struct dsc_comm_message sent;
    struct dsc_comm_message expected;
    const char *words[3];
};

static const struct difference DIFFERENCES[] = {
    {"type", {.n_dims = 1, .shape = {4}, .type = DSC_COMM_F32}, {.n_dims = 1, .shape = {4}, .type = DSC_COMM_I32}, {"rank 0 (process", "sends float32", "rank 1 expects int32"}},
    {"longer", {.n_dims = 1, .shape = {5}}, {.n_dims = 1, .shape = {4}}, {"rank 0 (process", "sends shape [5]", "expects [4]"}},
    {"shorter", {.n_dims = 1, .shape = {3}}, {.n_dims = 1, .shape = {4}}, {"rank 0 (process", "sends shape [3]", "expects [4]"}},
    {"nothing", {.n_dims = 1, .shape = {0}}, {.n_dims = 1, .shape = {4}}, {"rank 0 (process", "sends shape [0]", "expects [4]"}},
    {"long", {.n_dims = 1, .shape = {20000}}, {.n_dims = 1, .shape = {20001}}, {"rank 0 (process", "sends shape [20000]", "expects [20001]"}},
    {"shape", {.n_dims = 2, .shape = {2, 6}}, {.n_dims = 2, .shape = {3, 4}}, {"rank 0 (process", "[2, 6]", "[3, 4]"}},
    {"dimensions", {.n_dims = 2, .shape = {1, 4}}, {.n_dims = 1, .shape = {4}}, {"rank 0 (process", "[1, 4]", "[4]"}},
    {"label", {.n_dims = 1, .shape = {4}, .label = "weights"}, {.n_dims = 1, .shape = {4}, .label = "keys"}, {"rank 0 (process", "\"weights\"", "\"keys\""}},
    {"no label", {.n_dims = 1, .shape = {4}}, {.n_dims = 1, .shape = {4}, .label = "keys"}, {"rank 0 (process", "\"\"", "\"keys\""}},
};

static void test_differences(void)
{
    static float data[20001];
    static float got[20001];
    char why[MAX_WHY];

    for (size_t i = 0; i < sizeof DIFFERENCES / sizeof *DIFFERENCES; i++)
        for (int32_t is_posted_first = 0; is_posted_first < 2; is_posted_first++) {
            struct dsc_comm_message sent = DIFFERENCES[i].sent;
            struct dsc_comm_message expected = DIFFERENCES[i].expected;
            dsc_comm *ends[3];
            dsc_comm_request *receive = NULL;
            dsc_comm_request *other = NULL;

            TEST_CASE("difference in %s, receiver first: %d", DIFFERENCES[i].name, (int)is_posted_first);
            memset(got, 0x5a, sizeof got);
            sent.data = data;
            expected.data = got;
            open_ends(ends, 3);
            if (is_posted_first)
                receive = start(ends[1], 0, false, &expected);
            finish(start(ends[0], 1, true, &sent));
            if (!is_posted_first)
                receive = start(ends[1], 0, false, &expected);
            CHECK_STATUS(dsc_comm_wait(receive, NULL, NULL), DSC_EPEER);
            snprintf(why, sizeof why, "%s", dsc_last_error());
            for (size_t k = 0; k < 3; k++)
                CHECK_WORD(why, DIFFERENCES[i].words[k]);
            CHECK_STATUS(dsc_comm_wait(receive, NULL, NULL), DSC_EPEER);
            CHECK_STR(dsc_last_error(), why);
            CHECK_STATUS(dsc_comm_release(receive), DSC_OK);
            CHECK_STATUS(barrier(ends[1]), DSC_EPEER);
            for (size_t k = 0; k < sizeof got; k++)
                if (((char *)got)[k] != 0x5a) {
                    CHECK_EQ(k, -1);
                    break;
                }
            /* The sender's next message fails, and so does a third rank that waits. */
            CHECK_ERROR(dsc_comm_send(ends[0], 1, &sent, &other), DSC_EPEER, "rank 1 (process");
            CHECK_WORD(dsc_last_error(), DIFFERENCES[i].words[1]);
            receive = start(ends[2], 0, false, &expected);
            CHECK_ERROR(dsc_comm_wait(receive, NULL, NULL), DSC_EPEER, "has failed");
            CHECK_STATUS(dsc_comm_release(receive), DSC_OK);
            close_ends(ends, 3);
        }
}

/* A rank's messages from before its close arrive. A wait for another message ends. */
static void test_closed(void)
{
    static const int64_t SIZES[] = {100, 8000, 1 << 20};
    unsigned char *data = test_alloc(1 << 20);
    unsigned char *got = test_alloc(1 << 20);

    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
        struct dsc_comm_message sent = bytes(data, SIZES[i], 1);
        struct dsc_comm_message expected = bytes(got, SIZES[i], 1);
        dsc_comm *ends[2];
        dsc_comm_request *request;

        TEST_CASE("closed, %d bytes", (int)SIZES[i]);
        fill(data, SIZES[i], i);
        open_ends(ends, 2);
        finish(start(ends[0], 1, true, &sent));
        CHECK_STATUS(dsc_comm_close(ends[0]), DSC_OK);
        finish(start(ends[1], 0, false, &expected));
        CHECK_BYTES(got, data, (size_t)SIZES[i]);
        request = start(ends[1], 0, false, &expected);
        CHECK_ERROR(dsc_comm_wait(request, NULL, NULL), DSC_EPEER, "rank 0 (process");
        CHECK_WORD(dsc_last_error(), "closed");
        CHECK_WORD(dsc_last_error(), "tag 1");
        CHECK_STATUS(dsc_comm_release(request), DSC_OK);
        close_ends(ends, 2);
    }
    free(data);
    free(got);
}

/* Memory of the caller is read until the message has been taken. If the sender closes before, the receiver fails. */
static void test_closed_in_place(void)
{
    dsc_comm *ends[2];
    dsc_comm_block *block = NULL;
    unsigned char *got = test_alloc(1 << 20);
    dsc_comm_request *send;
    dsc_comm_request *receive;

    TEST_CASE("closed before it was taken");
    open_ends(ends, 2);
    CHECK_STATUS(dsc_comm_block_create(ends[0], 1 << 20, &block), DSC_OK);

    struct dsc_comm_message sent = bytes(dsc_comm_block_data(block), 1 << 20, 1);
    struct dsc_comm_message expected = bytes(got, 1 << 20, 1);

    send = start(ends[0], 1, true, &sent);
    CHECK(!dsc_comm_is_done(send));
    CHECK_ERROR(dsc_comm_release(send), DSC_ESTATE, "not done");
    CHECK_STATUS(dsc_comm_close(ends[0]), DSC_OK);
    CHECK_ERROR(dsc_comm_wait(send, NULL, NULL), DSC_ESTATE, "closed");
    CHECK_STATUS(dsc_comm_release(send), DSC_OK);
    receive = start(ends[1], 0, false, &expected);
    CHECK_ERROR(dsc_comm_wait(receive, NULL, NULL), DSC_EPEER, "rank 0 (process");
    CHECK_STATUS(dsc_comm_release(receive), DSC_OK);
    CHECK_ERROR(dsc_comm_send(ends[0], 1, &sent, &send), DSC_ESTATE, "closed");
    dsc_comm_block_destroy(block);
    close_ends(ends, 2);
    free(got);
}

static void *wait_for(void *opaque)
{
    return (void *)(intptr_t)dsc_comm_wait(opaque, NULL, NULL);
}

static void test_close_ends_requests(void)
{
    enum { N = DSC_COMM_N_NOTICES + 2 };
    dsc_comm *ends[2];
    dsc_comm_request *sends[N];
    pthread_t waiter;
    void *ending = NULL;
    static unsigned char data[100000];
    static unsigned char got[100];
    struct dsc_comm_message expected = bytes(got, sizeof got, 1);

    TEST_CASE("close ends requests");
    open_ends(ends, 2);

    dsc_comm_request *receive = start(ends[0], 1, false, &expected);

    for (int32_t i = 0; i < N; i++) {
        struct dsc_comm_message sent = bytes(data, i % 2 == 0 ? 10 : (int64_t)sizeof data, 1);

        sends[i] = start(ends[0], 1, true, &sent);
    }
    if (pthread_create(&waiter, NULL, wait_for, receive) != 0)
        exit(1);
    usleep(20000);
    CHECK_STATUS(dsc_comm_close(ends[0]), DSC_OK);
    pthread_join(waiter, &ending);
    CHECK_EQ((intptr_t)ending, DSC_ESTATE);
    CHECK_STATUS(dsc_comm_release(receive), DSC_OK);
    for (int32_t i = 0; i < N; i++) {
        CHECK(dsc_comm_is_done(sends[i]));
        CHECK_EQ(dsc_comm_wait(sends[i], NULL, NULL), i < DSC_COMM_N_NOTICES ? DSC_OK : DSC_ESTATE);
        CHECK_STATUS(dsc_comm_release(sends[i]), DSC_OK);
    }
    close_ends(ends, 2);
}

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Returns true after a given number of calls. */
static bool stops_later(void *context)
{
    int32_t *n_left = context;

    return --*n_left <= 0;
}

static void test_stopped_and_timeout(void)
{
    dsc_comm *ends[2];
    const char *addresses[2];
    static unsigned char data[20000];
    static unsigned char got[20000];
    struct dsc_comm_message sent = bytes(data, sizeof data, 1);
    struct dsc_comm_message expected = bytes(got, sizeof got, 1);
    int32_t n_left = 2;

    TEST_CASE("stopped");
    fill(data, sizeof data, 1);
    open_ends(ends, 2);

    dsc_comm_request *receive = start(ends[1], 0, false, &expected);

    CHECK_ERROR(dsc_comm_wait(receive, stops_later, &n_left), DSC_EAGAIN, "stopped");
    CHECK_EQ(n_left, 0);
    finish(start(ends[0], 1, true, &sent));
    n_left = 1 << 20;
    CHECK_STATUS(dsc_comm_wait(receive, stops_later, &n_left), DSC_OK);
    finish(receive);
    CHECK_BYTES(got, data, sizeof data);
    close_ends(ends, 2);

    TEST_CASE("timeout");
    for (int32_t rank = 0; rank < 2; rank++) {
        struct dsc_comm_config config = config_of(rank, 2);

        config.timeout_ns = 250000000;
        CHECK_STATUS(dsc_comm_create(&config, &ends[rank]), DSC_OK);
        addresses[rank] = dsc_comm_address(ends[rank]);
    }
    CHECK_ERROR(dsc_comm_send(ends[0], 1, &sent, &receive), DSC_ESTATE, "not attached");
    CHECK_STATUS(dsc_comm_attach(ends[0], addresses), DSC_OK);
    CHECK_STATUS(dsc_comm_attach(ends[1], addresses), DSC_OK);
    receive = start(ends[1], 0, false, &expected);

    int64_t begin = now_ns();

    CHECK_ERROR(dsc_comm_wait(receive, NULL, NULL), DSC_ETIMEDOUT, "rank 0 (process");
    CHECK(now_ns() - begin >= 250000000);
    CHECK_WORD(dsc_last_error(), "0.25 s");
    CHECK_WORD(dsc_last_error(), "\"data\"");
    CHECK_STATUS(dsc_comm_release(receive), DSC_OK);
    CHECK_STATUS(barrier(ends[1]), DSC_ETIMEDOUT);
    close_ends(ends, 2);
}

/* Several threads of a rank wait for messages while another runs collectives. */
enum { N_ROUNDS = 200 };

struct lane {
    dsc_comm *comm;
    int32_t rank;
    int32_t tag;
};

static void *ping(void *opaque)
{
    const struct lane *lane = opaque;
    int32_t other = 1 - lane->rank;
    int64_t n = lane->tag % 2 == 0 ? 100 : 3000;
    int64_t sent_values[3000];
    int64_t got_values[3000];
    struct dsc_comm_message sent = {.tag = lane->tag, .type = DSC_COMM_I64, .data = sent_values, .n_dims = 1, .shape = {n}};
    struct dsc_comm_message expected = sent;

    expected.data = got_values;
    for (int64_t i = 0; i < N_ROUNDS; i++) {
        for (int64_t k = 0; k < n; k++)
            sent_values[k] = i * 1000000 + k * 10 + lane->rank + lane->tag;

        dsc_comm_request *receive = start(lane->comm, other, false, &expected);

        finish(start(lane->comm, other, true, &sent));
        finish(receive);
        for (int64_t k = 0; k < n; k++)
            if (got_values[k] != i * 1000000 + k * 10 + other + lane->tag) {
                CHECK_EQ(got_values[k], -1);
                return NULL;
            }
    }
    return NULL;
}

static void run_beside(dsc_comm *comm, int32_t rank, int32_t n_ranks, void *arg)
{
    pthread_t threads[3];
    struct lane lanes[3];

    (void)n_ranks;
    (void)arg;
    for (int32_t i = 0; i < 3; i++) {
        lanes[i] = (struct lane){comm, rank, i};
        if (pthread_create(&threads[i], NULL, ping, &lanes[i]) != 0)
            exit(1);
    }
    for (int32_t i = 0; i < N_ROUNDS; i++)
        CHECK_STATUS(barrier(comm), DSC_OK);
    for (int32_t i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
}

static void test_threads(void)
{
    TEST_CASE("threads");
    run_threads(2, run_beside, NULL);
}

/*
 * Each rank sends from its arena and waits for that before it comes to the collective, in which the next rank waits
 * already with its reception started.
 */
static void meet_after_send(dsc_comm *comm, int32_t rank, int32_t n_ranks, void *arg)
{
    int32_t next = (rank + 1) % n_ranks;
    int32_t last = (rank + n_ranks - 1) % n_ranks;
    int64_t n_bytes = *(int64_t *)arg;
    unsigned char *got = test_alloc(LONG_BYTES);
    unsigned char *wanted = test_alloc(LONG_BYTES);
    float sums[3] = {1.0f, 2.0f, 3.0f};
    struct dsc_comm_call sum = {.op = DSC_COMM_ALL_REDUCE, .scale = 1.0, .data = sums, .n_elems = 3, .is_waited = true};
    dsc_comm_block *block = NULL;

    CHECK_STATUS(dsc_comm_block_create(comm, LONG_BYTES, &block), DSC_OK);
    for (int32_t sender = 0; sender < n_ranks; sender++) {
        struct dsc_comm_message sent = bytes(dsc_comm_block_data(block), n_bytes, sender);
        struct dsc_comm_message expected = bytes(got, n_bytes, sender);
        dsc_comm_request *receive = last == sender ? start(comm, last, false, &expected) : NULL;

        if (rank == sender) {
            fill(sent.data, n_bytes, (uint64_t)(7 + sender));
            usleep(20000); /* the others sleep in the collective */
            finish(start(comm, next, true, &sent));
        }
        CHECK_STATUS(sender % 2 == 0 ? barrier(comm) : run_call(comm, &sum), DSC_OK);
        if (receive == NULL)
            continue;
        CHECK(dsc_comm_is_done(receive));
        finish(receive);
        fill(wanted, n_bytes, (uint64_t)(7 + sender));
        CHECK_BYTES(got, wanted, (size_t)n_bytes);
    }
    dsc_comm_block_destroy(block);
    free(got);
    free(wanted);
}

static void test_messages_in_collectives(void)
{
    static const int64_t SIZES[] = {DSC_COMM_INLINE_BYTES + 1, LONG_BYTES};

    for (int32_t n_ranks = 2; n_ranks <= 5; n_ranks++)
        for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
            int64_t n_bytes = SIZES[i];

            TEST_CASE("messages in collectives, %d ranks, %d bytes", (int)n_ranks, (int)n_bytes);
            run_threads(n_ranks, meet_after_send, &n_bytes);
        }
}

/* A rank finds a difference while it waits in a collective: that ends, with both values, and no other rank comes. */
static void *wait_in_collective(void *opaque)
{
    CHECK_ERROR(barrier(opaque), DSC_EPEER, "sends float8_e4m3fn, rank 1 expects float8_e5m2");
    return NULL;
}

static void test_difference_in_collective(void)
{
    unsigned char data[16] = {0};
    unsigned char got[16] = {0};
    struct dsc_comm_message sent = {.type = DSC_COMM_F8_E4M3FN, .data = data, .n_dims = 1, .shape = {16}};
    struct dsc_comm_message expected = {.type = DSC_COMM_F8_E5M2, .data = got, .n_dims = 1, .shape = {16}};
    dsc_comm_request *next = NULL;
    dsc_comm *ends[2];
    pthread_t thread;

    TEST_CASE("difference in a collective");
    open_ends(ends, 2);

    dsc_comm_request *receive = start(ends[1], 0, false, &expected);

    if (pthread_create(&thread, NULL, wait_in_collective, ends[1]) != 0)
        exit(1);
    usleep(20000);
    finish(start(ends[0], 1, true, &sent));
    pthread_join(thread, NULL);
    CHECK_ERROR(dsc_comm_send(ends[0], 1, &sent, &next), DSC_EPEER, "sends float8_e4m3fn, rank 1 expects float8_e5m2");
    CHECK_STATUS(dsc_comm_wait(receive, NULL, NULL), DSC_EPEER);
    CHECK_STATUS(dsc_comm_release(receive), DSC_OK);
    close_ends(ends, 2);
}

/* Impossible notices are refused, and nothing outside of the sender's segment is read. */
static void test_lies(void)
{
    const struct dsc_comm_note LIES[] = {
        {.number = 2, .offset = -1, .n_dims = 1, .shape = {4}},
        {.number = 1, .offset = -1, .n_dims = 9, .shape = {4}},
        {.number = 1, .offset = -1, .n_dims = -1, .shape = {4}},
        {.number = 1, .offset = -1, .n_dims = 1, .shape = {-4}},
        {.number = 1, .offset = -1, .n_dims = 1, .shape = {4}, .type = 99},
        {.number = 1, .offset = -1, .n_dims = 1, .shape = {DSC_COMM_INLINE_BYTES}, .type = DSC_COMM_F32},
        {.number = 1, .offset = -1, .n_dims = 2, .shape = {INT64_MAX, 8}},
        {.number = 1, .offset = DSC_COMM_AT_ARENA - 1, .n_dims = 1, .shape = {4}},
        {.number = 1, .offset = DSC_COMM_AT_ARENA + ARENA_BYTES - 15, .n_dims = 1, .shape = {4}},
        {.number = 1, .offset = INT64_MAX, .n_dims = 1, .shape = {4}},
        {.number = 1, .offset = INT64_MIN, .n_dims = 1, .shape = {4}},
        {.number = 1, .offset = DSC_COMM_AT_ARENA, .n_dims = 1, .shape = {4}, .place = DSC_COMM_N_PLACES},
        {.number = 1, .offset = DSC_COMM_AT_ARENA, .n_dims = 1, .shape = {4}, .place = -1},
    };

    for (size_t i = 0; i < sizeof LIES / sizeof *LIES; i++) {
        float got[4];
        struct dsc_comm_message expected = {.data = got, .n_dims = 1, .shape = {4}};
        dsc_comm *ends[2];
        dsc_comm_block *block = NULL;

        TEST_CASE("lie %zu", i);
        open_ends(ends, 2);
        CHECK_STATUS(dsc_comm_block_create(ends[1], 1, &block), DSC_OK);

        char *base = (char *)dsc_comm_block_data(block) - DSC_COMM_AT_ARENA;
        struct dsc_comm_mailbox *boxes = (void *)(base + DSC_COMM_AT_MAILBOXES);
        struct dsc_comm_control *control = (void *)(base + DSC_COMM_AT_CONTROL);

        boxes[0].notices[0].note = LIES[i];
        atomic_store(&control->n_posted[0], 1);

        dsc_comm_request *receive = start(ends[0], 1, false, &expected);

        CHECK_ERROR(dsc_comm_wait(receive, NULL, NULL), DSC_EPEER, "describes no message");
        CHECK_STATUS(dsc_comm_release(receive), DSC_OK);
        dsc_comm_block_destroy(block);
        close_ends(ends, 2);
    }
}

static void test_bad_messages(void)
{
    float data[4];
    const struct {
        const char *word;
        int32_t peer;
        struct dsc_comm_message message;
    } BAD[] = {
        {"is 0, must be another", 0, {.data = data}},
        {"is 2, must be another", 2, {.data = data}},
        {"is -1, must be another", -1, {.data = data}},
        {"type is 99", 1, {.data = data, .type = (dsc_comm_type)99}},
        {"n_dims is 9", 1, {.data = data, .n_dims = 9}},
        {"n_dims is -1", 1, {.data = data, .n_dims = -1}},
        {"shape[1] is -3", 1, {.data = data, .n_dims = 2, .shape = {2, -3}}},
        {"more elements", 1, {.data = data, .n_dims = 2, .shape = {INT64_MAX, 2}}},
        {"data is NULL", 1, {.n_dims = 1, .shape = {2}}},
    };
    dsc_comm *ends[2];
    dsc_comm_request *request = NULL;

    open_ends(ends, 2);
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        TEST_CASE("bad message %zu", i);
        CHECK_ERROR(dsc_comm_send(ends[0], BAD[i].peer, &BAD[i].message, &request), DSC_EINVAL, BAD[i].word);
        CHECK_ERROR(dsc_comm_receive(ends[0], BAD[i].peer, &BAD[i].message, &request), DSC_EINVAL, BAD[i].word);
        CHECK(request == NULL);
    }
    close_ends(ends, 2);
}

/* A rank that looks for messages of anyone. */
static void test_has_message(void)
{
    unsigned char data[2] = {7, 8};
    unsigned char got[2] = {0, 0};
    struct dsc_comm_message sent = bytes(data, 2, 5);
    struct dsc_comm_message expected = bytes(got, 2, 5);
    dsc_comm *ends[2];
    dsc_comm_request *receive;
    bool has = true;

    TEST_CASE("has message");
    open_ends(ends, 2);
    CHECK_STATUS(dsc_comm_has_message(ends[1], 0, 5, &has), DSC_OK);
    CHECK_EQ(has, false);
    finish(start(ends[0], 1, true, &sent));
    CHECK_STATUS(dsc_comm_has_message(ends[1], 0, 4, &has), DSC_OK);
    CHECK_EQ(has, false);
    for (int32_t i = 0; i < 2; i++) {
        CHECK_STATUS(dsc_comm_has_message(ends[1], 0, 5, &has), DSC_OK);
        CHECK_EQ(has, true);
    }
    receive = start(ends[1], 0, false, &expected);
    CHECK_STATUS(dsc_comm_has_message(ends[1], 0, 5, &has), DSC_OK);
    CHECK_EQ(has, false);
    finish(receive);
    CHECK_BYTES(got, data, 2);
    CHECK_ERROR(dsc_comm_has_message(ends[1], 1, 5, &has), DSC_EINVAL, "src is 1, must be another");
    CHECK_ERROR(dsc_comm_has_message(ends[1], 2, 5, &has), DSC_EINVAL, "src is 2, must be another");
    CHECK_ERROR(dsc_comm_has_message(NULL, 0, 5, &has), DSC_EINVAL, "comm is NULL");
    CHECK_ERROR(dsc_comm_has_message(ends[1], 0, 5, NULL), DSC_EINVAL, "out_has is NULL");
    finish(start(ends[0], 1, true, &sent));
    dsc_comm_close(ends[1]);
    CHECK_ERROR(dsc_comm_has_message(ends[1], 0, 5, &has), DSC_ESTATE, "has been closed");
    close_ends(ends, 2);
}

int main(void)
{
    alarm(LIMIT_SECONDS);
    test_lengths();
    test_types();
    test_traffic();
    test_many();
    test_differences();
    test_closed();
    test_closed_in_place();
    test_close_ends_requests();
    test_stopped_and_timeout();
    test_threads();
    test_messages_in_collectives();
    test_difference_in_collective();
    test_lies();
    test_bad_messages();
    test_has_message();
    return test_finish(__FILE__);
}
