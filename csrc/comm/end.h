/* The parts of an end, and the functions that its files share. */
#ifndef DSC_COMM_END_H
#define DSC_COMM_END_H

#include "comm/arena.h"
#include "comm/message.h"
#include "comm/segment.h"

#include <pthread.h>

struct dsc_comm_peer {
    struct dsc_comm_segment *segment; /* NULL: not attached */
    int pidfd;                        /* -1: this process */
};

struct dsc_comm_request {
    struct dsc_comm *comm;
    struct dsc_comm_call call;
    int64_t in_splits[DSC_COMM_MAX_RANKS];
    int64_t out_splits[DSC_COMM_MAX_RANKS];
    uint64_t label_hash;
    char label[DSC_COMM_SHOWN_BYTES]; /* as in a post */
    struct dsc_comm_request *next;
    dsc_status status;   /* before is_done */
    int64_t deadline_ns; /* 0: nobody has run it */
    _Atomic bool is_done;
    bool is_begun;   /* by whoever runs */
    bool is_message; /* the first member of a struct of message.c */
};

struct dsc_comm {
    struct dsc_process process;
    int32_t rank;
    int32_t n_ranks;
    int64_t timeout_ns;
    struct dsc_par par;
    char address[DSC_COMM_ADDRESS_BYTES];
    struct dsc_comm_segment *segment;
    struct dsc_comm_arena *arena;
    uintptr_t arena_begin; /* of this process's mapping */
    uintptr_t arena_end;
    struct dsc_comm_peer peers[DSC_COMM_MAX_RANKS]; /* by rank; this rank's holds its own segment */
    int64_t spin_ns;

    /* Owned by the thread that runs a request: it holds the mutex, or has set is_running. */
    uint32_t tick;     /* as published */
    uint32_t end_tick; /* the tick at which a rank has finished this call, and may close its end or exit */
    uint64_t n_calls;  /* begun */
    bool has_lanes;
    int64_t deadline_ns;
    const struct dsc_comm_call *running; /* for sentences */
    bool (*stops)(void *context);        /* whether to leave the call to somebody else; NULL: not now */
    void *stops_context;

    pthread_mutex_t failure_mutex; /* held to set a failure */
    _Atomic int32_t failure;       /* a dsc_status; if it is not DSC_OK, why is set and no request runs */
    char why[DSC_COMM_WHY_BYTES];
    _Atomic bool is_closing;

    _Atomic int64_t n_done[DSC_COMM_N_OPS];
    _Atomic int64_t n_bytes[DSC_COMM_N_OPS];
    _Atomic int64_t n_in_place[DSC_COMM_N_OPS];
    _Atomic int64_t n_staged[DSC_COMM_N_OPS];

    pthread_mutex_t mutex;
    pthread_cond_t has_work; /* for the worker */
    pthread_cond_t has_done; /* for threads that wait while another runs */
    /* Under mutex: */
    struct dsc_comm_request *first;
    struct dsc_comm_request **end;
    bool is_attached;
    bool is_running;
    bool wants_worker;
    bool has_worker;
    bool is_closed;
    pthread_t worker;

    struct dsc_comm_mail mail;
};

static inline struct dsc_comm_control *dsc_comm_control_at(const struct dsc_comm *comm, int32_t rank)
{
    return dsc_comm_control_of(comm->peers[rank].segment);
}

static inline const struct dsc_comm_post *dsc_comm_post_of(const struct dsc_comm *comm, int32_t rank)
{
    return &dsc_comm_control_at(comm, rank)->posts[(comm->n_calls - 1) % 2];
}

/* The small lane of a rank for the running call. */
static inline char *dsc_comm_small_of(const struct dsc_comm *comm, int32_t rank)
{
    return comm->peers[rank].segment->base + DSC_COMM_AT_SMALL +
           (int64_t)((comm->n_calls - 1) % 2) * DSC_COMM_SMALL_BYTES;
}

static inline char *dsc_comm_lane_of(const struct dsc_comm *comm, int32_t rank, int64_t lane)
{
    return comm->peers[rank].segment->base + DSC_COMM_AT_LANES + lane * DSC_COMM_LANE_BYTES;
}

/* wait.c */

/* Publishes this rank's progress to the other ranks. */
void dsc_comm_publish(struct dsc_comm *comm, uint32_t tick);

/* Returns when rank has reached tick. DSC_EAGAIN, with nothing changed, if the running thread is to stop. */
dsc_status dsc_comm_await(struct dsc_comm *comm, int32_t rank, uint32_t tick);

/*
 * Breaks the end: later calls fail the same way, and the other ranks are told why. Only the first reason is kept. For
 * the thread that runs a call, which the sentence names.
 */
dsc_status dsc_comm_break(struct dsc_comm *comm, dsc_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The same, for any thread. text is the whole sentence. */
dsc_status dsc_comm_break_with(struct dsc_comm *comm, dsc_status status, const char *text);

/* Whether the process of a rank has ended. Asks the kernel. */
bool dsc_comm_has_ended(const struct dsc_comm *comm, int32_t rank);

/* Between two looks at memory that another thread writes. */
void dsc_comm_relax(void);

/* Returns DSC_OK, or the failure that broke the end, with its sentence. */
dsc_status dsc_comm_check(const struct dsc_comm *comm);

/* Tells the other ranks not to wait for this rank any more. */
void dsc_comm_say_closed(struct dsc_comm *comm);

int64_t dsc_comm_now_ns(void);

/* requests.c: ends the worker and all requests. */
void dsc_comm_stop(struct dsc_comm *comm);

/* call.c */

dsc_status dsc_comm_call_check(const struct dsc_comm *comm, const struct dsc_comm_call *call);

/* Whether the call takes one round, with its data in a small lane. The same on all ranks. */
bool dsc_comm_is_small(const struct dsc_comm *comm, const struct dsc_comm_call *call);

/* Posts this rank's call, and puts small data into its lane. Does not wait. */
void dsc_comm_begin(struct dsc_comm *comm, struct dsc_comm_request *request);

/* Runs the rest of a begun call. DSC_EAGAIN: this thread stops, and another thread may continue the call from here. */
dsc_status dsc_comm_finish(struct dsc_comm *comm, struct dsc_comm_request *request);

/* pipeline.c: runs a call that is not small, after the ranks have compared it. */
dsc_status dsc_comm_pipeline(struct dsc_comm *comm, const struct dsc_comm_call *call);

/* combine.c: out = (accumulates ? out : 0) + scale * combined, with a call's types, for n_elems of each rank. */
void dsc_comm_combine_into(const struct dsc_comm *comm, const struct dsc_comm_call *call, const void *const *srcs,
                           int64_t n_elems, void *out, dsc_comm_type out_type);

#endif
