/* Groups of communication ends for tests, with one end a rank. Ranks are threads of this process or processes. */
#ifndef DSC_TEST_COMM_RANKS_H
#define DSC_TEST_COMM_RANKS_H

#include "test.h"

#include "dsc/comm.h"
#include "dsc/pool.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define ARENA_BYTES ((int64_t)256 << 20)

enum { LIMIT_SECONDS = 500 };

static inline struct dsc_comm_config config_of(int32_t rank, int32_t n_ranks)
{
    struct dsc_comm_config config = DSC_COMM_CONFIG_INIT;

    config.rank = rank;
    config.n_ranks = n_ranks;
    config.timeout_ns = (int64_t)120 * 1000000000;
    config.arena_bytes = ARENA_BYTES;
    return config;
}

/* All ends of a group, made and attached in this thread. */
static inline void open_ends(dsc_comm **ends, int32_t n_ranks)
{
    const char *addresses[DSC_COMM_MAX_RANKS];

    for (int32_t rank = 0; rank < n_ranks; rank++) {
        struct dsc_comm_config config = config_of(rank, n_ranks);

        /* The number of threads of a rank must not change the results. */
        if (rank % 2 == 1 && !CHECK_STATUS(dsc_pool_par(&config.par), DSC_OK))
            exit(test_finish(__FILE__));
        if (!CHECK_STATUS(dsc_comm_create(&config, &ends[rank]), DSC_OK))
            exit(test_finish(__FILE__));
        addresses[rank] = dsc_comm_address(ends[rank]);
    }
    for (int32_t rank = 0; rank < n_ranks; rank++)
        if (!CHECK_STATUS(dsc_comm_attach(ends[rank], addresses), DSC_OK))
            exit(test_finish(__FILE__));
}

static inline void close_ends(dsc_comm **ends, int32_t n_ranks)
{
    for (int32_t rank = 0; rank < n_ranks; rank++)
        dsc_comm_destroy(ends[rank]);
}

/* Submits, waits and releases. */
static inline dsc_status run_call(dsc_comm *comm, const struct dsc_comm_call *call)
{
    dsc_comm_request *request = NULL;
    dsc_status status = dsc_comm_submit(comm, call, &request);

    if (status != DSC_OK)
        return status;
    status = dsc_comm_wait(request, NULL, NULL);
    if (dsc_comm_release(request) != DSC_OK)
        return DSC_ESTATE;
    return status;
}

static inline dsc_status barrier(dsc_comm *comm)
{
    struct dsc_comm_call call = {.op = DSC_COMM_BARRIER};

    return run_call(comm, &call);
}

/* Each rank runs a body in a separate thread. */
struct rank_thread {
    pthread_t thread;
    void (*body)(dsc_comm *comm, int32_t rank, int32_t n_ranks, void *arg);
    dsc_comm *comm;
    int32_t rank;
    int32_t n_ranks;
    void *arg;
};

static inline void *start_rank(void *opaque)
{
    struct rank_thread *self = opaque;

    self->body(self->comm, self->rank, self->n_ranks, self->arg);
    return NULL;
}

static inline void run_threads(int32_t n_ranks, void (*body)(dsc_comm *, int32_t, int32_t, void *), void *arg)
{
    struct rank_thread threads[DSC_COMM_MAX_RANKS];
    dsc_comm *ends[DSC_COMM_MAX_RANKS];

    open_ends(ends, n_ranks);
    for (int32_t rank = 0; rank < n_ranks; rank++) {
        threads[rank] = (struct rank_thread){.body = body, .comm = ends[rank], .rank = rank, .n_ranks = n_ranks, .arg = arg};
        if (pthread_create(&threads[rank].thread, NULL, start_rank, &threads[rank]) != 0) {
            fprintf(stderr, "cannot start thread %d\n", (int)rank);
            exit(1);
        }
    }
    for (int32_t rank = 0; rank < n_ranks; rank++)
        pthread_join(threads[rank].thread, NULL);
    close_ends(ends, n_ranks);
}

/*
 * Each rank runs the body in a separate process and exits with the body's return value. Ranks exchange their addresses
 * through shared memory.
 */
struct meeting {
    char addresses[DSC_COMM_MAX_RANKS][DSC_COMM_ADDRESS_BYTES];
    _Atomic int32_t n_there;
    _Atomic int64_t words[DSC_COMM_MAX_RANKS]; /* each test has its own use for these */
};

static inline struct meeting *new_meeting(void)
{
    void *memory = mmap(NULL, sizeof(struct meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (memory == MAP_FAILED) {
        fprintf(stderr, "no memory that processes share\n");
        exit(1);
    }
    return memory;
}

/* Attaches this rank's end to the others', in the process of the rank. Any failure ends the process. */
static inline dsc_comm *meet(struct meeting *meeting, int32_t rank, int32_t n_ranks, int64_t timeout_ns)
{
    struct dsc_comm_config config = config_of(rank, n_ranks);
    const char *addresses[DSC_COMM_MAX_RANKS];
    dsc_comm *comm = NULL;

    config.timeout_ns = timeout_ns;
    if (dsc_comm_create(&config, &comm) != DSC_OK) {
        fprintf(stderr, "%s\n", dsc_last_error());
        _exit(101);
    }
    strcpy(meeting->addresses[rank], dsc_comm_address(comm));
    meeting->n_there++;
    while (meeting->n_there < n_ranks)
        usleep(500);
    for (int32_t i = 0; i < n_ranks; i++)
        addresses[i] = meeting->addresses[i];
    if (dsc_comm_attach(comm, addresses) != DSC_OK) {
        fprintf(stderr, "%s\n", dsc_last_error());
        _exit(102);
    }
    if (barrier(comm) != DSC_OK) {
        fprintf(stderr, "%s\n", dsc_last_error());
        _exit(103);
    }
    return comm;
}

static inline pid_t fork_rank(int (*body)(struct meeting *, int32_t, int32_t, void *), struct meeting *meeting,
                              int32_t rank, int32_t n_ranks, void *arg)
{
    pid_t pid = fork();

    if (pid == 0) {
        alarm(LIMIT_SECONDS);
        _exit(body(meeting, rank, n_ranks, arg));
    }
    return pid;
}

/* How a process ended: its exit code, or 1000 plus the number of the signal. */
static inline int ending_of(pid_t pid)
{
    int status = 0;

    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        return 2000;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

#endif
