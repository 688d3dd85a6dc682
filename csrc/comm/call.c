/* Checks a call, compares it between ranks before any data moves, and runs the calls that fit one round. */
#include "comm/end.h"

#include "base/fail.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* Small enough that all ranks' splits add up, in bytes. */
#define MAX_SPLIT (INT64_MAX / 2 / DSC_COMM_MAX_RANKS)

size_t dsc_comm_type_bytes(dsc_comm_type type)
{
    static const size_t bytes[] = {
#define BYTES(name, text, n_bytes) n_bytes,
        DSC_COMM_TYPES(BYTES)
#undef BYTES
    };

    return (uint32_t)type < DSC_COMM_N_TYPES ? bytes[type] : 0;
}

const char *dsc_comm_type_text(dsc_comm_type type)
{
    static const char *const texts[] = {
#define TEXT(name, text, n_bytes) text,
        DSC_COMM_TYPES(TEXT)
#undef TEXT
    };

    return (uint32_t)type < DSC_COMM_N_TYPES ? texts[type] : "no type";
}

const char *dsc_comm_op_text(dsc_comm_op op)
{
    static const char *const texts[] = {
#define TEXT(name, text) text,
        DSC_COMM_OPS(TEXT)
#undef TEXT
    };

    return (uint32_t)op < DSC_COMM_N_OPS ? texts[op] : NULL;
}

static const char *combine_text(int32_t combine)
{
    static const char *const texts[] = {
#define TEXT(name, text) text,
        DSC_COMM_COMBINES(TEXT)
#undef TEXT
    };

    return (uint32_t)combine < DSC_COMM_N_COMBINES ? texts[combine] : "nothing";
}

static bool is_small_float(dsc_comm_type type)
{
    return type == DSC_COMM_F32 || type == DSC_COMM_BF16 || type == DSC_COMM_F16;
}

/* Whether [a, a + n_a) and [b, b + n_b) share a byte. */
static bool overlaps(const void *a, int64_t n_a, const void *b, int64_t n_b)
{
    uintptr_t at_a = (uintptr_t)a;
    uintptr_t at_b = (uintptr_t)b;

    return n_a > 0 && n_b > 0 && at_a < at_b + (uintptr_t)n_b && at_b < at_a + (uintptr_t)n_a;
}

static dsc_status check_array(const char *name, const void *data, int64_t n_elems, size_t bytes)
{
    if (n_elems < 0)
        return dsc_fail(DSC_EINVAL, "%s has %" PRId64 " elements, must not be negative", name, n_elems);
    if (n_elems > INT64_MAX / 2 / (int64_t)bytes)
        return dsc_fail(DSC_EINVAL, "%s has %" PRId64 " elements, more than memory can hold", name, n_elems);
    if (data == NULL && n_elems > 0)
        return dsc_fail(DSC_EINVAL, "%s is NULL for %" PRId64 " elements", name, n_elems);
    return DSC_OK;
}

static dsc_status check_scale(const struct dsc_comm_call *call)
{
    bool is_float = is_small_float(call->type) || call->type == DSC_COMM_F64;

    if (call->type > DSC_COMM_U8)
        return dsc_fail(DSC_EINVAL, "elements of %s can be moved, not reduced", dsc_comm_type_text(call->type));
    if (!is_float && call->scale != 1.0)
        return dsc_fail(DSC_EINVAL, "scale is %g for %s, must be 1 for integers", call->scale,
                        dsc_comm_type_text(call->type));
    if (!isfinite(call->scale) || (is_small_float(call->type) && !isfinite((float)call->scale)))
        return dsc_fail(DSC_EINVAL, "scale is %g, must be finite in %s", call->scale,
                        call->type == DSC_COMM_F64 ? "float64" : "float32");
    return DSC_OK;
}

static dsc_status check_slices(const struct dsc_comm *comm, const struct dsc_comm_call *call)
{
    if (call->n_elems % comm->n_ranks != 0)
        return dsc_fail(DSC_EINVAL, "data has %" PRId64 " elements, no multiple of %d ranks", call->n_elems,
                        (int)comm->n_ranks);
    return DSC_OK;
}

static dsc_status check_out(const struct dsc_comm *comm, const struct dsc_comm_call *call)
{
    int64_t n_elems = call->n_elems / comm->n_ranks;
    int64_t bytes = (int64_t)dsc_comm_type_bytes(call->type);
    int64_t out_bytes = (int64_t)dsc_comm_type_bytes(call->out_type);
    const char *own = (const char *)call->data + comm->rank * n_elems * bytes;

    if (is_small_float(call->type) ? !is_small_float(call->out_type)
                                   : call->out_type != call->type || call->scale != 1.0 || call->accumulates)
        return dsc_fail(DSC_EINVAL,
                        "%s cannot be summed into %s: float32, bfloat16 and float16 can, in any pair; other types into "
                        "themselves, with neither scale nor accumulation",
                        dsc_comm_type_text(call->type), dsc_comm_type_text(call->out_type));
    DSC_TRY(check_array("out", call->out, n_elems, (size_t)out_bytes));
    if (overlaps(call->data, call->n_elems * bytes, call->out, n_elems * out_bytes) &&
        (call->out != own || call->out_type != call->type))
        return dsc_fail(DSC_EINVAL, "out overlaps data, and is not this rank's slice of it");
    return DSC_OK;
}

static dsc_status check_splits(const struct dsc_comm *comm, const int64_t *splits, const char *name, size_t bytes,
                               int64_t *out_sum)
{
    int64_t sum = 0;

    if (splits == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", name);
    for (int32_t rank = 0; rank < comm->n_ranks; rank++)
        if (splits[rank] < 0 || splits[rank] > MAX_SPLIT / (int64_t)bytes)
            return dsc_fail(DSC_EINVAL, "%s[%d] is %" PRId64 ", must be a number of elements", name, (int)rank,
                            splits[rank]);
        else
            sum += splits[rank];
    *out_sum = sum;
    return DSC_OK;
}

static dsc_status check_all_to_all(const struct dsc_comm *comm, const struct dsc_comm_call *call)
{
    size_t bytes = dsc_comm_type_bytes(call->type);
    int64_t n_in = 0;
    int64_t n_out = 0;

    DSC_TRY(check_splits(comm, call->in_splits, "in_splits", bytes, &n_in));
    DSC_TRY(check_splits(comm, call->out_splits, "out_splits", bytes, &n_out));
    DSC_TRY(check_array("data", call->data, n_in, bytes));
    DSC_TRY(check_array("out", call->out, n_out, bytes));
    if (overlaps(call->data, n_in * (int64_t)bytes, call->out, n_out * (int64_t)bytes))
        return dsc_fail(DSC_EINVAL, "out overlaps data");
    if (call->in_splits[comm->rank] != call->out_splits[comm->rank])
        return dsc_fail(DSC_EINVAL,
                        "in_splits[%d] is %" PRId64 " and out_splits[%d] %" PRId64
                        ": a rank sends itself what it receives from itself",
                        (int)comm->rank, call->in_splits[comm->rank], (int)comm->rank, call->out_splits[comm->rank]);
    return DSC_OK;
}

dsc_status dsc_comm_call_check(const struct dsc_comm *comm, const struct dsc_comm_call *call)
{
    size_t bytes = dsc_comm_type_bytes(call->type);

    if (dsc_comm_op_text(call->op) == NULL)
        return dsc_fail(DSC_EINVAL, "op is %d, which is no operation", (int)call->op);
    if (call->op == DSC_COMM_BARRIER)
        return DSC_OK;
    if (bytes == 0)
        return dsc_fail(DSC_EINVAL, "type is %d, which is no element type", (int)call->type);
    if (call->op == DSC_COMM_ALL_TO_ALL)
        return check_all_to_all(comm, call);
    DSC_TRY(check_array("data", call->data, call->n_elems, bytes));
    switch (call->op) {
    case DSC_COMM_ALL_REDUCE:
        if ((uint32_t)call->combine >= DSC_COMM_N_COMBINES)
            return dsc_fail(DSC_EINVAL, "combine is %d, which is no way to combine", (int)call->combine);
        return check_scale(call);
    case DSC_COMM_REDUCE_SCATTER:
        DSC_TRY(check_slices(comm, call));
        DSC_TRY(check_scale(call));
        return check_out(comm, call);
    case DSC_COMM_ALL_GATHER:
        return check_slices(comm, call);
    default:
        if (call->src < 0 || call->src >= comm->n_ranks)
            return dsc_fail(DSC_EINVAL, "src is %d, of %d ranks", (int)call->src, (int)comm->n_ranks);
        return DSC_OK;
    }
}

/* Bytes that this rank shows the others. */
static int64_t shown_bytes(const struct dsc_comm *comm, const struct dsc_comm_call *call)
{
    int64_t n_bytes = call->n_elems * (int64_t)dsc_comm_type_bytes(call->type);

    return call->op == DSC_COMM_ALL_GATHER ? n_bytes / comm->n_ranks : n_bytes;
}

bool dsc_comm_is_small(const struct dsc_comm *comm, const struct dsc_comm_call *call)
{
    return call->op != DSC_COMM_ALL_TO_ALL && shown_bytes(comm, call) <= DSC_COMM_SMALL_BYTES;
}

static void show_small(struct dsc_comm *comm, const struct dsc_comm_call *call)
{
    size_t n_bytes = (size_t)shown_bytes(comm, call);
    const char *data = call->data;

    if (n_bytes == 0 || (call->op == DSC_COMM_BROADCAST && call->src != comm->rank))
        return;
    memcpy(dsc_comm_small_of(comm, comm->rank),
           data + (call->op == DSC_COMM_ALL_GATHER ? (size_t)comm->rank * n_bytes : 0), n_bytes);
}

/* The data's offset in this rank's segment; -1 if the data is not in the segment. */
static int64_t offset_of(const struct dsc_comm *comm, const struct dsc_comm_call *call)
{
    int64_t n_bytes = call->n_elems * (int64_t)dsc_comm_type_bytes(call->type);

    if (!dsc_comm_owns(comm, call->data, n_bytes))
        return -1;
    return (int64_t)((uintptr_t)call->data - comm->arena_begin) + DSC_COMM_AT_ARENA;
}

/*
 * [Note: Two of each] A rank that has begun call n has ended call n - 1. So it has seen all ranks begin call n - 1,
 * which they do only after they have ended call n - 2. Therefore no rank still reads the post and lane of call n - 2:
 * two posts and two small lanes, used in turn, need no barrier.
 */
void dsc_comm_begin(struct dsc_comm *comm, struct dsc_comm_request *request)
{
    const struct dsc_comm_call *call = &request->call;
    struct dsc_comm_post *post = &dsc_comm_control_of(comm->segment)->posts[comm->n_calls % 2];
    bool is_shown = call->op != DSC_COMM_BROADCAST || call->src == comm->rank;

    comm->n_calls++;
    post->op = (int32_t)call->op;
    post->type = (int32_t)call->type;
    post->combine = (int32_t)call->combine;
    post->src = call->src;
    post->n_elems = call->n_elems;
    post->scale = call->scale;
    post->offset = -1;
    if (dsc_comm_is_small(comm, call))
        show_small(comm, call);
    else if (is_shown)
        post->offset = offset_of(comm, call);
    post->is_in_place = post->offset >= 0;
    post->label_hash = request->label_hash;
    memcpy(post->label, request->label, sizeof post->label);
    if (call->op == DSC_COMM_ALL_TO_ALL)
        memcpy(post->in_splits, request->in_splits, (size_t)comm->n_ranks * sizeof *post->in_splits);
    request->is_begun = true;
    dsc_comm_publish(comm, comm->tick + 1);
}

#define BREAK_BY(comm, rank, format, ...)                                        \
    dsc_comm_break(comm, DSC_EPEER, "rank %d (process %d) " format, (int)(rank), \
                   (int)(comm)->peers[rank].segment->pid, __VA_ARGS__)

/* Sum of the splits; -1 if one of them is not a valid length. */
static int64_t sum_of(const int64_t *splits, int32_t n_ranks)
{
    int64_t sum = 0;

    for (int32_t rank = 0; rank < n_ranks; rank++)
        if (splits[rank] < 0 || splits[rank] > MAX_SPLIT || __builtin_add_overflow(sum, splits[rank], &sum))
            return -1;
    return sum;
}

static dsc_status compare_lengths(struct dsc_comm *comm, const struct dsc_comm_post *own,
                                  const struct dsc_comm_post *other, int32_t rank, const struct dsc_comm_call *call)
{
    if (own->op != DSC_COMM_ALL_TO_ALL && own->n_elems != other->n_elems)
        return BREAK_BY(comm, rank, "passes %" PRId64 " elements, rank %d %" PRId64, other->n_elems, (int)comm->rank,
                        own->n_elems);
    if (own->op == DSC_COMM_ALL_TO_ALL && sum_of(other->in_splits, comm->n_ranks) != other->n_elems)
        return BREAK_BY(comm, rank, "sends blocks that do not add up to its %" PRId64 " elements", other->n_elems);
    if (own->op == DSC_COMM_ALL_TO_ALL && other->in_splits[comm->rank] != call->out_splits[rank])
        return BREAK_BY(comm, rank, "sends %" PRId64 " elements to rank %d, which expects %" PRId64,
                        other->in_splits[comm->rank], (int)comm->rank, call->out_splits[rank]);
    return DSC_OK;
}

/* Calls of one length in another order are told apart by their labels alone. */
static dsc_status compare_labels(struct dsc_comm *comm, const struct dsc_comm_post *own,
                                 const struct dsc_comm_post *other, int32_t rank)
{
    char theirs[DSC_COMM_SHOWN_BYTES];

    if (own->label_hash == other->label_hash)
        return DSC_OK;
    memcpy(theirs, other->label, sizeof theirs);
    theirs[sizeof theirs - 1] = '\0';
    return BREAK_BY(comm, rank, "calls %s of \"%s\", rank %d of \"%s\"%s", dsc_comm_op_text((dsc_comm_op)own->op),
                    theirs, (int)comm->rank, own->label,
                    strcmp(theirs, own->label) == 0 ? ", which differ further on" : "");
}

static dsc_status compare(struct dsc_comm *comm, int32_t rank, const struct dsc_comm_call *call)
{
    const struct dsc_comm_post *own = dsc_comm_post_of(comm, comm->rank);
    const struct dsc_comm_post *other = dsc_comm_post_of(comm, rank);
    const char *op = dsc_comm_op_text((dsc_comm_op)other->op);

    if (own->op != other->op)
        return BREAK_BY(comm, rank, "calls %s, rank %d %s", op != NULL ? op : "nothing known", (int)comm->rank,
                        dsc_comm_op_text((dsc_comm_op)own->op));
    if (own->op == DSC_COMM_BARRIER)
        return DSC_OK;
    if (own->type != other->type)
        return BREAK_BY(comm, rank, "passes %s, rank %d %s", dsc_comm_type_text((dsc_comm_type)other->type),
                        (int)comm->rank, dsc_comm_type_text((dsc_comm_type)own->type));
    if (own->combine != other->combine)
        return BREAK_BY(comm, rank, "asks for %s, rank %d for %s", combine_text(other->combine), (int)comm->rank,
                        combine_text(own->combine));
    if (own->op == DSC_COMM_BROADCAST && own->src != other->src)
        return BREAK_BY(comm, rank, "takes rank %d for the source, rank %d rank %d", (int)other->src, (int)comm->rank,
                        (int)own->src);
    if (own->op == DSC_COMM_ALL_REDUCE && own->scale != other->scale)
        return BREAK_BY(comm, rank, "scales by %.17g, rank %d by %.17g", other->scale, (int)comm->rank, own->scale);
    DSC_TRY(compare_lengths(comm, own, other, rank, call));
    DSC_TRY(compare_labels(comm, own, other, rank));

    int64_t room = comm->peers[rank].segment->n_bytes - other->offset;

    if (other->is_in_place && (other->offset < DSC_COMM_AT_ARENA || room < 0 || other->n_elems < 0 ||
                               other->n_elems > room / (int64_t)dsc_comm_type_bytes(call->type)))
        return BREAK_BY(comm, rank, "says that its data lies at %" PRId64 ", outside of its arena", other->offset);
    return DSC_OK;
}

static void take_slices(struct dsc_comm *comm, const struct dsc_comm_call *call)
{
    size_t n_bytes = (size_t)shown_bytes(comm, call);

    for (int32_t rank = 0; rank < comm->n_ranks && n_bytes > 0; rank++)
        if (rank != comm->rank)
            memcpy((char *)call->data + (size_t)rank * n_bytes, dsc_comm_small_of(comm, rank), n_bytes);
}

/* Computes this rank's result from all ranks' small lanes. */
static void take_small(struct dsc_comm *comm, const struct dsc_comm_call *call)
{
    int64_t n_slice = call->n_elems / comm->n_ranks;
    int64_t own_slice =
        call->op == DSC_COMM_REDUCE_SCATTER ? comm->rank * n_slice * (int64_t)dsc_comm_type_bytes(call->type) : 0;
    const void *srcs[DSC_COMM_MAX_RANKS];

    for (int32_t rank = 0; rank < comm->n_ranks; rank++)
        srcs[rank] = dsc_comm_small_of(comm, rank) + own_slice;
    switch (call->op) {
    case DSC_COMM_ALL_REDUCE:
        dsc_comm_combine_into(comm, call, srcs, call->n_elems, call->data, call->type);
        return;
    case DSC_COMM_REDUCE_SCATTER:
        dsc_comm_combine_into(comm, call, srcs, n_slice, call->out, call->out_type);
        return;
    case DSC_COMM_ALL_GATHER:
        take_slices(comm, call);
        return;
    case DSC_COMM_BROADCAST:
        if (call->src != comm->rank && call->n_elems > 0)
            memcpy(call->data, dsc_comm_small_of(comm, call->src), (size_t)shown_bytes(comm, call));
        return;
    default:
        return;
    }
}

static void count(struct dsc_comm *comm, const struct dsc_comm_call *call)
{
    bool has_shown = call->n_elems > 0 && (call->op != DSC_COMM_BROADCAST || call->src == comm->rank);
    bool is_in_place = dsc_comm_post_of(comm, comm->rank)->is_in_place;

    atomic_fetch_add_explicit(&comm->n_done[call->op], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&comm->n_bytes[call->op], call->n_elems * (int64_t)dsc_comm_type_bytes(call->type),
                              memory_order_relaxed);
    if (has_shown)
        atomic_fetch_add_explicit(is_in_place ? &comm->n_in_place[call->op] : &comm->n_staged[call->op], 1,
                                  memory_order_relaxed);
}

static dsc_status run_call(struct dsc_comm *comm, const struct dsc_comm_call *call)
{
    for (int32_t i = 1; i < comm->n_ranks; i++) {
        int32_t rank = (comm->rank + i) % comm->n_ranks;

        DSC_TRY(dsc_comm_await(comm, rank, comm->tick));
        DSC_TRY(compare(comm, rank, call));
    }
    comm->stops = NULL; /* from here on the call cannot be restarted */
    if (!dsc_comm_is_small(comm, call))
        return dsc_comm_pipeline(comm, call);
    take_small(comm, call);
    return DSC_OK;
}

dsc_status dsc_comm_finish(struct dsc_comm *comm, struct dsc_comm_request *request)
{
    comm->running = &request->call;
    comm->end_tick = comm->tick;
    if (request->deadline_ns == 0)
        request->deadline_ns = dsc_comm_now_ns() + comm->timeout_ns;
    comm->deadline_ns = request->deadline_ns;

    dsc_status status = run_call(comm, &request->call);

    if (status == DSC_OK)
        count(comm, &request->call);
    comm->running = NULL;
    return status;
}
