/* Calls of more than one round: their data moves chunk by chunk, in two or three stages that overlap. */
#include "comm/end.h"

#include <string.h>

/*
 * [Note: Ticks] A rank's tick counts the steps that it has published: each call that it has begun, and each stage of
 * each turn of a pipeline. In turn i, stage s works on chunk i - s. All ranks go through the same turns, so each rank
 * can compute the tick at which another rank is done with stage s of chunk c: see tick_of. A stage waits for the
 * previous stage of the same chunk. A stage that fills a lane also waits for the ranks that read chunk c - 2 from that
 * lane. Both lie in an earlier turn, so ranks never wait for one another in a cycle.
 *
 * Data of the arena needs no lane: other ranks can read it as soon as the call is posted.
 */
enum { MAX_STAGES = 3, N_LANES_A_STAGE = 2 };

struct run {
    struct dsc_comm *comm;
    const struct dsc_comm_call *call;
    const struct dsc_comm_post *posts[DSC_COMM_MAX_RANKS];
    int64_t elem_bytes;
    int64_t chunk_elems; /* elements of a rank's data, slice or block, depending on the operation */
    int64_t n_chunks;
    int32_t n_stages;
    uint32_t begin; /* the tick of every rank before the first turn */
};

typedef void (*stage)(const struct run *run, int64_t chunk);

static uint32_t tick_of(const struct run *run, int32_t stage, int64_t chunk)
{
    return run->begin + (uint32_t)((chunk + stage) * run->n_stages + stage + 1);
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Number of elements of a chunk, out of n_elems; never negative. */
static int64_t n_in_chunk(const struct run *run, int64_t n_elems, int64_t chunk)
{
    int64_t n = smaller(n_elems - chunk * run->chunk_elems, run->chunk_elems);

    return n > 0 ? n : 0;
}

static bool is_own(const struct run *run, int32_t rank)
{
    return rank == run->comm->rank;
}

/* Whether the others read this rank's data in its lanes. */
static bool is_staged(const struct run *run)
{
    return !run->posts[run->comm->rank]->is_in_place &&
           (run->call->op != DSC_COMM_BROADCAST || is_own(run, run->call->src));
}

/* The i-th rank after this rank, so that not all ranks read the same rank first. */
static int32_t rank_after(const struct run *run, int32_t i)
{
    return (run->comm->rank + i) % run->comm->n_ranks;
}

static char *own_data(const struct run *run, int64_t elem)
{
    return (char *)run->call->data + elem * run->elem_bytes;
}

/*
 * Where other ranks read an element of rank: in the arena, or in the lane of the stage and chunk, staged elements after
 * the lane's begin.
 */
static const char *shown(const struct run *run, int32_t rank, int32_t stage, int64_t chunk, int64_t elem,
                         int64_t staged)
{
    const struct dsc_comm *comm = run->comm;

    if (is_own(run, rank))
        return own_data(run, elem);
    if (run->posts[rank]->is_in_place)
        return comm->peers[rank].segment->base + run->posts[rank]->offset + elem * run->elem_bytes;
    return dsc_comm_lane_of(comm, rank, stage * N_LANES_A_STAGE + chunk % 2) + staged * run->elem_bytes;
}

static void show(const struct run *run, int32_t stage, int64_t chunk, int64_t elem, int64_t staged, int64_t n_elems)
{
    if (n_elems > 0)
        memcpy(dsc_comm_lane_of(run->comm, run->comm->rank, stage * N_LANES_A_STAGE + chunk % 2) +
                   staged * run->elem_bytes,
               own_data(run, elem), (size_t)(n_elems * run->elem_bytes));
}

/* all_reduce: each rank reduces its part of each chunk, and copies the parts of other ranks. */

static int64_t part_begin(const struct run *run, int64_t n_elems, int32_t rank)
{
    int64_t line = DSC_COMM_LINE / run->elem_bytes;
    int64_t lines = (n_elems + line - 1) / line;

    return smaller(lines * rank / run->comm->n_ranks * line, n_elems);
}

static int64_t part_elems(const struct run *run, int64_t n_elems, int32_t rank)
{
    int64_t end = rank + 1 < run->comm->n_ranks ? part_begin(run, n_elems, rank + 1) : n_elems;

    return end - part_begin(run, n_elems, rank);
}

static void all_reduce_show(const struct run *run, int64_t chunk)
{
    int64_t n = n_in_chunk(run, run->call->n_elems, chunk);

    for (int32_t i = 1; is_staged(run) && i < run->comm->n_ranks; i++) {
        int32_t rank = rank_after(run, i);
        int64_t begin = part_begin(run, n, rank);

        show(run, 0, chunk, chunk * run->chunk_elems + begin, begin, part_elems(run, n, rank));
    }
}

static void all_reduce_combine(const struct run *run, int64_t chunk)
{
    const struct dsc_comm *comm = run->comm;
    int64_t n = n_in_chunk(run, run->call->n_elems, chunk);
    int64_t begin = part_begin(run, n, comm->rank);
    int64_t elem = chunk * run->chunk_elems + begin;
    int64_t n_part = part_elems(run, n, comm->rank);
    const void *srcs[DSC_COMM_MAX_RANKS];

    for (int32_t rank = 0; rank < comm->n_ranks; rank++)
        srcs[rank] = shown(run, rank, 0, chunk, elem, begin);
    dsc_comm_combine_into(comm, run->call, srcs, n_part, own_data(run, elem), run->call->type);
    if (is_staged(run))
        show(run, 1, chunk, elem, 0, n_part);
}

static void all_reduce_take(const struct run *run, int64_t chunk)
{
    int64_t n = n_in_chunk(run, run->call->n_elems, chunk);

    for (int32_t i = 1; i < run->comm->n_ranks; i++) {
        int32_t rank = rank_after(run, i);
        int64_t elem = chunk * run->chunk_elems + part_begin(run, n, rank);
        int64_t n_part = part_elems(run, n, rank);

        if (n_part > 0)
            memcpy(own_data(run, elem), shown(run, rank, 1, chunk, elem, 0), (size_t)(n_part * run->elem_bytes));
    }
}

/* reduce_scatter: a chunk is as many elements of each slice. */

static void reduce_scatter_show(const struct run *run, int64_t chunk)
{
    int64_t n_slice = run->call->n_elems / run->comm->n_ranks;
    int64_t n = n_in_chunk(run, n_slice, chunk);

    for (int32_t i = 1; is_staged(run) && i < run->comm->n_ranks; i++) {
        int32_t rank = rank_after(run, i);

        show(run, 0, chunk, rank * n_slice + chunk * run->chunk_elems, rank * run->chunk_elems, n);
    }
}

static void reduce_scatter_combine(const struct run *run, int64_t chunk)
{
    const struct dsc_comm *comm = run->comm;
    int64_t n_slice = run->call->n_elems / comm->n_ranks;
    int64_t begin = chunk * run->chunk_elems;
    char *out = (char *)run->call->out + begin * (int64_t)dsc_comm_type_bytes(run->call->out_type);
    const void *srcs[DSC_COMM_MAX_RANKS];

    for (int32_t rank = 0; rank < comm->n_ranks; rank++)
        srcs[rank] = shown(run, rank, 0, chunk, comm->rank * n_slice + begin, comm->rank * run->chunk_elems);
    dsc_comm_combine_into(comm, run->call, srcs, n_in_chunk(run, n_slice, chunk), out, run->call->out_type);
}

/* all_gather */

static void all_gather_show(const struct run *run, int64_t chunk)
{
    int64_t n_slice = run->call->n_elems / run->comm->n_ranks;

    if (is_staged(run))
        show(run, 0, chunk, run->comm->rank * n_slice + chunk * run->chunk_elems, 0, n_in_chunk(run, n_slice, chunk));
}

static void all_gather_take(const struct run *run, int64_t chunk)
{
    int64_t n_slice = run->call->n_elems / run->comm->n_ranks;
    size_t n_bytes = (size_t)(n_in_chunk(run, n_slice, chunk) * run->elem_bytes);

    for (int32_t i = 1; i < run->comm->n_ranks; i++) {
        int32_t rank = rank_after(run, i);
        int64_t elem = rank * n_slice + chunk * run->chunk_elems;

        memcpy(own_data(run, elem), shown(run, rank, 0, chunk, elem, 0), n_bytes);
    }
}

/* all_to_all: a chunk is as many elements of each block; shorter blocks end earlier. */

static int64_t sum_before(const int64_t *splits, int32_t rank)
{
    int64_t sum = 0;

    for (int32_t i = 0; i < rank; i++)
        sum += splits[i];
    return sum;
}

static void all_to_all_show(const struct run *run, int64_t chunk)
{
    const int64_t *splits = run->call->in_splits;

    for (int32_t i = 1; is_staged(run) && i < run->comm->n_ranks; i++) {
        int32_t rank = rank_after(run, i);

        show(run, 0, chunk, sum_before(splits, rank) + chunk * run->chunk_elems, rank * run->chunk_elems,
             n_in_chunk(run, splits[rank], chunk));
    }
}

static void all_to_all_take(const struct run *run, int64_t chunk)
{
    int32_t own = run->comm->rank;

    for (int32_t i = 0; i < run->comm->n_ranks; i++) {
        int32_t rank = rank_after(run, i);
        int64_t n = n_in_chunk(run, run->call->out_splits[rank], chunk);
        int64_t from = sum_before(run->posts[rank]->in_splits, own) + chunk * run->chunk_elems;
        int64_t to = sum_before(run->call->out_splits, rank) + chunk * run->chunk_elems;

        if (n > 0)
            memcpy((char *)run->call->out + to * run->elem_bytes,
                   shown(run, rank, 0, chunk, from, own * run->chunk_elems), (size_t)(n * run->elem_bytes));
    }
}

/* broadcast */

static void broadcast_show(const struct run *run, int64_t chunk)
{
    if (is_staged(run))
        show(run, 0, chunk, chunk * run->chunk_elems, 0, n_in_chunk(run, run->call->n_elems, chunk));
}

static void broadcast_take(const struct run *run, int64_t chunk)
{
    int64_t elem = chunk * run->chunk_elems;

    if (!is_own(run, run->call->src))
        memcpy(own_data(run, elem), shown(run, run->call->src, 0, chunk, elem, 0),
               (size_t)(n_in_chunk(run, run->call->n_elems, chunk) * run->elem_bytes));
}

static const struct {
    int32_t n_stages;
    stage stages[MAX_STAGES];
} OPS[DSC_COMM_N_OPS] = {
    [DSC_COMM_ALL_REDUCE] = {3, {all_reduce_show, all_reduce_combine, all_reduce_take}},
    [DSC_COMM_REDUCE_SCATTER] = {2, {reduce_scatter_show, reduce_scatter_combine}},
    [DSC_COMM_ALL_GATHER] = {2, {all_gather_show, all_gather_take}},
    [DSC_COMM_ALL_TO_ALL] = {2, {all_to_all_show, all_to_all_take}},
    [DSC_COMM_BROADCAST] = {2, {broadcast_show, broadcast_take}},
};

/* Computes how many elements are cut into chunks, and how many elements a chunk has. The same on all ranks. */
static void cut(struct run *run)
{
    int32_t n_ranks = run->comm->n_ranks;
    int64_t lane_elems = DSC_COMM_LANE_BYTES / run->elem_bytes;
    int64_t n_elems = run->call->n_elems;

    run->chunk_elems = lane_elems;
    switch (run->call->op) {
    case DSC_COMM_REDUCE_SCATTER:
        run->chunk_elems = lane_elems / n_ranks;
        n_elems /= n_ranks;
        break;
    case DSC_COMM_ALL_GATHER:
        n_elems /= n_ranks;
        break;
    case DSC_COMM_ALL_TO_ALL:
        run->chunk_elems = lane_elems / n_ranks;
        n_elems = 0;
        for (int32_t from = 0; from < n_ranks; from++)
            for (int32_t to = 0; to < n_ranks; to++)
                if (run->posts[from]->in_splits[to] > n_elems)
                    n_elems = run->posts[from]->in_splits[to];
        break;
    default:
        break;
    }
    run->n_chunks = (n_elems + run->chunk_elems - 1) / run->chunk_elems;
}

static dsc_status await_others(const struct run *run, uint32_t tick)
{
    for (int32_t i = 1; i < run->comm->n_ranks; i++)
        DSC_TRY(dsc_comm_await(run->comm, rank_after(run, i), tick));
    return DSC_OK;
}

/* Waits for the data that a stage reads, and for the ranks that read the lane it fills. See [Note: Ticks]. */
static dsc_status await_stage(const struct run *run, int32_t stage, int64_t chunk)
{
    for (int32_t i = 1; stage > 0 && i < run->comm->n_ranks; i++) {
        int32_t rank = rank_after(run, i);

        if (run->call->op == DSC_COMM_BROADCAST && rank != run->call->src)
            continue;
        if (stage > 1 || !run->posts[rank]->is_in_place)
            DSC_TRY(dsc_comm_await(run->comm, rank, tick_of(run, stage - 1, chunk)));
    }
    if (is_staged(run) && stage + 1 < run->n_stages && chunk >= N_LANES_A_STAGE)
        return await_others(run, tick_of(run, stage + 1, chunk - N_LANES_A_STAGE));
    return DSC_OK;
}

static dsc_status run_turns(const struct run *run)
{
    for (int64_t turn = 0; run->n_chunks > 0 && turn < run->n_chunks + run->n_stages - 1; turn++)
        for (int32_t stage = 0; stage < run->n_stages; stage++) {
            int64_t chunk = turn - stage;

            if (chunk >= 0 && chunk < run->n_chunks) {
                DSC_TRY(await_stage(run, stage, chunk));
                OPS[run->call->op].stages[stage](run, chunk);
            }
            dsc_comm_publish(run->comm, run->comm->tick + 1);
        }
    return DSC_OK;
}

static dsc_status commit_lanes(struct dsc_comm *comm)
{
    if (comm->has_lanes)
        return DSC_OK;
    if (dsc_comm_segment_commit(comm->segment, DSC_COMM_AT_LANES, DSC_COMM_N_LANES * DSC_COMM_LANE_BYTES,
                                "the staging area") != DSC_OK)
        return dsc_comm_break(comm, DSC_ENOMEM, "%s", dsc_last_error());
    comm->has_lanes = true;
    return DSC_OK;
}

dsc_status dsc_comm_pipeline(struct dsc_comm *comm, const struct dsc_comm_call *call)
{
    struct run run = {.comm = comm, .call = call, .begin = comm->tick, .n_stages = OPS[call->op].n_stages};

    for (int32_t rank = 0; rank < comm->n_ranks; rank++)
        run.posts[rank] = dsc_comm_post_of(comm, rank);
    run.elem_bytes = (int64_t)dsc_comm_type_bytes(call->type);
    cut(&run);
    if (run.n_chunks == 0)
        return DSC_OK;
    comm->end_tick = run.begin + (uint32_t)(run.n_stages * (run.n_chunks + run.n_stages - 1));
    if (is_staged(&run))
        DSC_TRY(commit_lanes(comm));
    DSC_TRY(run_turns(&run));
    /* The caller may write to its memory from now on. Lanes are kept until all ranks have begun the next call. */
    return run.posts[comm->rank]->is_in_place ? await_others(&run, comm->end_tick) : DSC_OK;
}
