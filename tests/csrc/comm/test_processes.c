/*
 * Ranks are processes. One is killed at a random moment, and the others name it in time. Stopped ranks continue. A
 * child of fork() is refused. Nothing stays behind in the system.
 */
#include "comm/ranks.h"

#include <dirent.h>
#include <sys/stat.h>
#include <time.h>

enum { N_ELEMS = 60000, NAMED = 42, NOT_NAMED = 43, LATE = 44, WRONG = 45, BROKEN = 46 };

#ifdef __SANITIZE_THREAD__
__attribute__((visibility("default"))) const char *__tsan_default_options(void);

/* A child of fork() has one thread only. The thread sanitizer stops such a child unless this option allows it. */
const char *__tsan_default_options(void)
{
    return "die_after_fork=0";
}
#endif

/*
 * Ranks notice a death within one second. The limit is larger to allow for a busy machine, and far below the timeout
 * that would also end the call.
 */
#define NOTICED_NS INT64_C(30000000000)

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

struct plan {
    int32_t victim;
    int64_t n_calls; /* 0: until something fails */
};

/*
 * Sums the numbers of ranks, small and large, inside and outside the arena, until a call fails. The exit code says how
 * it failed.
 */
static int reduce_again_and_again(struct meeting *meeting, int32_t rank, int32_t n_ranks, void *arg)
{
    const struct plan *plan = arg;
    dsc_comm *comm = meet(meeting, rank, n_ranks, (int64_t)100 * 1000000000);
    static const int64_t LENGTHS[] = {1, 1000, N_ELEMS};
    uint64_t random = 5;
    dsc_comm_block *block = NULL;
    float *plain = test_alloc(N_ELEMS * sizeof *plain);
    char words[2][64];

    if (dsc_comm_block_create(comm, N_ELEMS * (int64_t)sizeof(float), &block) != DSC_OK)
        return BROKEN;
    meeting->words[rank] = 1;
    for (int64_t i = 0; plan->n_calls == 0 || i < plan->n_calls; i++) {
        float *data = test_below(&random, 2) == 0 ? dsc_comm_block_data(block) : plain;
        struct dsc_comm_call call = {.op = DSC_COMM_ALL_REDUCE, .scale = 1.0, .data = data};

        call.n_elems = LENGTHS[test_below(&random, 3)];
        for (int64_t k = 0; k < call.n_elems; k++)
            data[k] = (float)(rank + i % 7 + k % 5);
        if (run_call(comm, &call) != DSC_OK) {
            int64_t late = now_ns() - meeting->words[DSC_COMM_MAX_RANKS - 1];

            snprintf(words[0], sizeof words[0], "rank %d (process", (int)plan->victim);
            if (strstr(dsc_last_error(), words[0]) == NULL || strstr(dsc_last_error(), "has ended") == NULL) {
                fprintf(stderr, "rank %d: %s\n", (int)rank, dsc_last_error());
                return NOT_NAMED;
            }
            if (late > NOTICED_NS)
                fprintf(stderr, "rank %d noticed after %lld ns\n", (int)rank, (long long)late);
            dsc_comm_block_destroy(block);
            dsc_comm_destroy(comm);
            return late > NOTICED_NS ? LATE : NAMED;
        }
        for (int64_t k = 0; k < call.n_elems; k++)
            if (data[k] != (float)(n_ranks * (n_ranks - 1) / 2 + n_ranks * (i % 7 + k % 5)))
                return WRONG;
    }
    dsc_comm_destroy(comm); /* before its last block */
    dsc_comm_block_destroy(block);
    free(plain);
    return 0;
}

/*
 * Sends messages around the ranks, short and long, inside and outside the arena, until one fails. The exit code says
 * how it failed. A neighbour of the victim names it; the others name a rank that has failed, or the victim.
 */
static int pass_on(struct meeting *meeting, int32_t rank, int32_t n_ranks, void *arg)
{
    const struct plan *plan = arg;
    dsc_comm *comm = meet(meeting, rank, n_ranks, (int64_t)100 * 1000000000);
    static const int64_t LENGTHS[] = {0, 1, 1000, 3000, N_ELEMS};
    uint64_t random = 5;
    dsc_comm_block *block = NULL;
    int32_t *plain = test_alloc(N_ELEMS * sizeof *plain);
    int32_t *got = test_alloc(N_ELEMS * sizeof *got);
    char words[64];

    if (dsc_comm_block_create(comm, N_ELEMS * (int64_t)sizeof(int32_t), &block) != DSC_OK)
        return BROKEN;
    snprintf(words, sizeof words, "rank %d (process", (int)plan->victim);
    meeting->words[rank] = 1;
    for (int32_t i = 0; plan->n_calls == 0 || i < plan->n_calls; i++) {
        struct dsc_comm_message sent = {.type = DSC_COMM_I32, .n_dims = 1, .shape = {LENGTHS[test_below(&random, 5)]}};
        struct dsc_comm_message expected = sent;
        dsc_comm_request *requests[2] = {NULL, NULL};
        int32_t *data = test_below(&random, 2) == 0 ? dsc_comm_block_data(block) : plain;
        int32_t src = (rank + n_ranks - 1) % n_ranks;

        for (int32_t k = 0; k < (int32_t)sent.shape[0]; k++)
            data[k] = rank + i * 7 + k % 5;
        sent.data = data;
        expected.data = got;

        dsc_status status = dsc_comm_send(comm, (rank + 1) % n_ranks, &sent, &requests[0]);

        if (status == DSC_OK)
            status = dsc_comm_receive(comm, src, &expected, &requests[1]);
        for (int32_t k = 1; k >= 0 && status == DSC_OK; k--)
            status = dsc_comm_wait(requests[k], NULL, NULL);
        if (status != DSC_OK) {
            int64_t late = now_ns() - meeting->words[DSC_COMM_MAX_RANKS - 1];

            if (strstr(dsc_last_error(), words) == NULL || strstr(dsc_last_error(), "has ended") == NULL) {
                fprintf(stderr, "rank %d: %s\n", (int)rank, dsc_last_error());
                return NOT_NAMED;
            }
            return late > NOTICED_NS ? LATE : NAMED;
        }
        for (int32_t k = 0; k < (int32_t)expected.shape[0]; k++)
            if (got[k] != src + i * 7 + k % 5)
                return WRONG;
        for (int32_t k = 0; k < 2; k++)
            if (dsc_comm_release(requests[k]) != DSC_OK)
                return BROKEN;
    }
    dsc_comm_destroy(comm);
    dsc_comm_block_destroy(block);
    free(plain);
    free(got);
    return 0;
}

typedef int (*traffic)(struct meeting *, int32_t, int32_t, void *);

static void start_all(traffic body, pid_t *pids, struct meeting *meeting, int32_t n_ranks, struct plan *plan)
{
    for (int32_t rank = 0; rank < n_ranks; rank++)
        pids[rank] = fork_rank(body, meeting, rank, n_ranks, plan);
    for (int32_t rank = 0; rank < n_ranks; rank++)
        while (meeting->words[rank] == 0)
            usleep(500);
}

static void test_killed(traffic body)
{
    uint64_t random = (uint64_t)now_ns(); /* no fixed seed: it would not fix the moment */

    for (int32_t i = 0; i < 12; i++) {
        struct meeting *meeting = new_meeting();
        pid_t pids[DSC_COMM_MAX_RANKS];
        int32_t n_ranks = 2 + i % 3;
        struct plan plan = {.victim = i % n_ranks};

        start_all(body, pids, meeting, n_ranks, &plan);
        usleep((useconds_t)test_below(&random, 30000));
        meeting->words[DSC_COMM_MAX_RANKS - 1] = now_ns();
        kill(pids[plan.victim], SIGKILL);
        for (int32_t rank = 0; rank < n_ranks; rank++) {
            TEST_CASE("killed, run %d, rank %d of %d, victim %d", (int)i, (int)rank, (int)n_ranks, (int)plan.victim);
            CHECK_EQ(ending_of(pids[rank]), rank == plan.victim ? 1000 + SIGKILL : NAMED);
        }
        munmap(meeting, sizeof *meeting);
    }
}

static void test_stopped(traffic body)
{
    struct meeting *meeting = new_meeting();
    pid_t pids[3];
    struct plan plan = {.n_calls = 8000};
    uint64_t random = 3;

    start_all(body, pids, meeting, 3, &plan);
    for (int32_t i = 0; i < 12; i++) {
        pid_t pid = pids[test_below(&random, 3)];

        kill(pid, SIGSTOP);
        usleep(30000);
        kill(pid, SIGCONT);
        usleep(10000);
    }
    for (int32_t rank = 0; rank < 3; rank++) {
        TEST_CASE("stopped, rank %d", (int)rank);
        CHECK_EQ(ending_of(pids[rank]), 0);
    }
    munmap(meeting, sizeof *meeting);
}

/* Uses everything inherited from the parent. Returns 0 or the number of the failed step. */
static int child_of_fork(dsc_comm *comm, dsc_comm_request *request, dsc_comm_request *receive, dsc_comm_block *block)
{
    struct dsc_comm_call call = {.op = DSC_COMM_BARRIER};
    dsc_comm_request *other = NULL;
    dsc_comm_block *taken = NULL;
    struct dsc_comm_config config = config_of(0, 1);
    dsc_comm *own = NULL;
    const char *address = dsc_comm_address(comm);

    alarm(LIMIT_SECONDS);
    if (dsc_comm_submit(comm, &call, &other) != DSC_ESTATE || strstr(dsc_last_error(), "belongs to process") == NULL)
        return 1;
    if (dsc_comm_wait(request, NULL, NULL) != DSC_ESTATE || dsc_comm_is_done(request))
        return 2;
    if (dsc_comm_wait(receive, NULL, NULL) != DSC_ESTATE || dsc_comm_is_done(receive) || dsc_comm_release(receive) != DSC_OK)
        return 7;
    if (dsc_comm_send(comm, 1, &(struct dsc_comm_message){.n_dims = 1}, &other) != DSC_ESTATE)
        return 8;
    if (dsc_comm_block_create(comm, 1, &taken) != DSC_ESTATE || dsc_comm_attach(comm, &address) != DSC_ESTATE)
        return 3;
    ((volatile char *)dsc_comm_block_data(block))[1] = 'c'; /* memory stays shared with the parent */
    if (dsc_comm_release(request) != DSC_OK || dsc_comm_close(comm) != DSC_OK)
        return 4;
    dsc_comm_block_destroy(block);
    dsc_comm_destroy(comm);
    if (dsc_comm_create(&config, &own) != DSC_OK)
        return 5;
    address = dsc_comm_address(own);
    if (dsc_comm_attach(own, &address) != DSC_OK || barrier(own) != DSC_OK)
        return 6;
    dsc_comm_destroy(own);
    return 0;
}

static void test_forked(void)
{
    dsc_comm *ends[2];
    dsc_comm_block *block = NULL;
    dsc_comm_request *request = NULL;
    dsc_comm_request *receive = NULL;
    dsc_comm_request *send = NULL;
    int32_t got = 0;
    int32_t sent = 9;
    struct dsc_comm_message message = {.type = DSC_COMM_I32, .data = &got};
    struct dsc_comm_call call = {.op = DSC_COMM_ALL_REDUCE, .scale = 1.0, .n_elems = N_ELEMS};
    float *other = test_alloc(N_ELEMS * sizeof *other);

    TEST_CASE("forked");
    open_ends(ends, 2);
    CHECK_STATUS(dsc_comm_block_create(ends[0], N_ELEMS * (int64_t)sizeof(float), &block), DSC_OK);
    memset(other, 0, N_ELEMS * sizeof *other);
    call.data = dsc_comm_block_data(block);
    CHECK_STATUS(dsc_comm_submit(ends[0], &call, &request), DSC_OK); /* a worker is at it */
    CHECK_STATUS(dsc_comm_receive(ends[0], 1, &message, &receive), DSC_OK);

    pid_t child = fork();

    if (child == 0)
        _exit(child_of_fork(ends[0], request, receive, block));
    CHECK_EQ(ending_of(child), 0);
    CHECK_EQ(((char *)dsc_comm_block_data(block))[1], 'c');
    message.data = &sent;
    CHECK_STATUS(dsc_comm_send(ends[1], 0, &message, &send), DSC_OK);
    CHECK_STATUS(dsc_comm_release(send), DSC_OK);
    CHECK_STATUS(dsc_comm_wait(receive, NULL, NULL), DSC_OK);
    CHECK_STATUS(dsc_comm_release(receive), DSC_OK);
    CHECK_EQ(got, 9);
    call.data = other;
    CHECK_STATUS(run_call(ends[1], &call), DSC_OK);
    CHECK_STATUS(dsc_comm_wait(request, NULL, NULL), DSC_OK);
    CHECK_STATUS(dsc_comm_release(request), DSC_OK);
    CHECK_BYTES(dsc_comm_block_data(block), other, N_ELEMS * sizeof *other);
    dsc_comm_block_destroy(block);
    close_ends(ends, 2);
    free(other);
}

static int32_t n_open(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int32_t n = 0;

    while (folder != NULL && readdir(folder) != NULL)
        n++;
    if (folder != NULL)
        closedir(folder);
    return n;
}

static int32_t n_mapped(void)
{
    FILE *file = fopen("/proc/self/maps", "re");
    char line[512];
    int32_t n = 0;

    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        n += strstr(line, "memfd:deepspeed_c") != NULL && strstr(line, " 00000000 ") != NULL; /* from its begin */
    if (file != NULL)
        fclose(file);
    return n;
}

static int32_t n_names(void)
{
    DIR *folder = opendir("/dev/shm");
    const struct dirent *entry;
    int32_t n = 0;

    while (folder != NULL && (entry = readdir(folder)) != NULL)
        n += strstr(entry->d_name, "deepspeed_c") != NULL;
    if (folder != NULL)
        closedir(folder);
    return n;
}

static void test_nothing_stays(void)
{
    dsc_comm *ends[4];
    dsc_comm_block *block = NULL;
    int32_t n_before = n_open();

    TEST_CASE("nothing stays");
    CHECK_EQ(n_mapped(), 0);
    open_ends(ends, 4);
    CHECK_STATUS(dsc_comm_block_create(ends[0], 1 << 20, &block), DSC_OK);
    memset(dsc_comm_block_data(block), 7, 1 << 20);
    CHECK_EQ(n_names(), 0);
    CHECK_EQ(n_mapped(), 4); /* threads of one process share the mappings */
    close_ends(ends, 4);
    CHECK_EQ(((unsigned char *)dsc_comm_block_data(block))[(1 << 20) - 1], 7); /* it lives on */
    CHECK_EQ(n_mapped(), 1);
    dsc_comm_block_destroy(block);
    CHECK_EQ(n_mapped(), 0);
    CHECK_EQ(n_open(), n_before);
}

int main(void)
{
    alarm(LIMIT_SECONDS);
    test_forked(); /* first, before other tests leave threads behind */
    test_killed(reduce_again_and_again);
    test_killed(pass_on);
    test_stopped(reduce_again_and_again);
    test_stopped(pass_on);
    test_nothing_stays();
    return test_finish(__FILE__);
}
