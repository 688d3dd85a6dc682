/*
 * Collectives and messages between processes of one host, through shared memory.
 *
 * Each rank makes an *end*. An end owns one segment of shared memory that has no name: control words, a staging area
 * and an arena. Only its owner writes to it; the other ranks map it read-only. The segment is freed when the last
 * process that maps it ends, however it ends. Only processes of the same user, host and PID namespace can open it.
 *
 *   dsc_comm_create -> end, address       the caller sends the addresses to all ranks
 *   dsc_comm_attach(end, all addresses)
 *   dsc_comm_submit(end, call) -> request ... dsc_comm_wait(request), dsc_comm_release(request)
 *   dsc_comm_send(end, dst, message) -> request, dsc_comm_receive(end, src, message) -> request
 *   dsc_comm_close, dsc_comm_destroy
 *
 * All ranks submit the same calls in the same order. Before anything is moved, the ranks compare their calls: a
 * difference in operation, element type, length or label is DSC_EPEER, which names the rank and both values.
 *
 * Where the data lies. A call works on any memory. The other ranks read memory of the arena (dsc_comm_block_create) in
 * place, without a copy; all other memory goes through the staging area, chunk by chunk, or is copied once for a
 * message. The bits of a result do not
 * depend on the kind of memory, on timing or on threads: sums run in rank order.
 *
 * Failures. A wait for a peer ends when the peer makes progress, has failed, has closed its end or has died, or after
 * timeout_ns. All cases except progress break the end: every later call returns the same failure at once, and the other
 * ranks are notified. The death of a rank is detected within a second.
 *
 * Threads and processes. Any thread may call; requests run one after the other in the order of submission, in the
 * thread that waits or in a worker of the end, which is started when it is first needed. In a child of fork() calls
 * are DSC_ESTATE, and close and destroy do nothing. The parent sees a child's writes to the arena.
 */
#ifndef DSC_COMM_H
#define DSC_COMM_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DSC_COMM_MAX_RANKS 16
#define DSC_COMM_MAX_DIMS 8        /* of a message */
#define DSC_COMM_ADDRESS_BYTES 192 /* with the zero at the end */

typedef struct dsc_comm dsc_comm;
typedef struct dsc_comm_block dsc_comm_block;
typedef struct dsc_comm_request dsc_comm_request;

/* Operations: name, text. */
#define DSC_COMM_OPS(X)                 \
    X(ALL_REDUCE, "all_reduce")         \
    X(REDUCE_SCATTER, "reduce_scatter") \
    X(ALL_GATHER, "all_gather")         \
    X(ALL_TO_ALL, "all_to_all")         \
    X(BROADCAST, "broadcast")           \
    X(BARRIER, "barrier")

typedef enum dsc_comm_op {
#define DSC_COMM_OP_ENUM(name, text) DSC_COMM_##name,
    DSC_COMM_OPS(DSC_COMM_OP_ENUM)
#undef DSC_COMM_OP_ENUM
        DSC_COMM_N_OPS
} dsc_comm_op;

/*
 * Element types: name, text, bytes. The types after U8 can be moved, not reduced. BYTES_n are elements without a known
 * meaning.
 */
#define DSC_COMM_TYPES(X)                  \
    X(F32, "float32", 4)                   \
    X(BF16, "bfloat16", 2)                 \
    X(F16, "float16", 2)                   \
    X(F64, "float64", 8)                   \
    X(I8, "int8", 1)                       \
    X(I16, "int16", 2)                     \
    X(I32, "int32", 4)                     \
    X(I64, "int64", 8)                     \
    X(U8, "uint8", 1)                      \
    X(BOOL, "bool", 1)                     \
    X(U16, "uint16", 2)                    \
    X(U32, "uint32", 4)                    \
    X(U64, "uint64", 8)                    \
    X(C32, "complex32", 4)                 \
    X(C64, "complex64", 8)                 \
    X(C128, "complex128", 16)              \
    X(F8_E4M3FN, "float8_e4m3fn", 1)       \
    X(F8_E4M3FNUZ, "float8_e4m3fnuz", 1)   \
    X(F8_E5M2, "float8_e5m2", 1)           \
    X(F8_E5M2FNUZ, "float8_e5m2fnuz", 1)   \
    X(F8_E8M0FNU, "float8_e8m0fnu", 1)     \
    X(F4_E2M1FN_X2, "float4_e2m1fn_x2", 1) \
    X(BYTES_1, "1 byte", 1)                \
    X(BYTES_2, "2 bytes", 2)               \
    X(BYTES_4, "4 bytes", 4)               \
    X(BYTES_8, "8 bytes", 8)               \
    X(BYTES_16, "16 bytes", 16)

typedef enum dsc_comm_type {
#define DSC_COMM_TYPE_ENUM(name, text, bytes) DSC_COMM_##name,
    DSC_COMM_TYPES(DSC_COMM_TYPE_ENUM)
#undef DSC_COMM_TYPE_ENUM
        DSC_COMM_N_TYPES
} dsc_comm_type;

/*
 * How all_reduce combines elements. float32, bfloat16 and float16 are combined in f32 and rounded once. Other types are
 * combined in their own type, and integers wrap around. MAX and MIN are NaN if the element of any rank is NaN.
 */
#define DSC_COMM_COMBINES(X) \
    X(SUM, "sum")            \
    X(MAX, "max")            \
    X(MIN, "min")            \
    X(PROD, "prod")

typedef enum dsc_comm_combine {
#define DSC_COMM_COMBINE_ENUM(name, text) DSC_COMM_##name,
    DSC_COMM_COMBINES(DSC_COMM_COMBINE_ENUM)
#undef DSC_COMM_COMBINE_ENUM
        DSC_COMM_N_COMBINES
} dsc_comm_combine;

struct dsc_comm_config {
    uint32_t size; /* sizeof(struct dsc_comm_config) */
    int32_t rank;
    int32_t n_ranks;     /* 1 to DSC_COMM_MAX_RANKS */
    int64_t timeout_ns;  /* of one operation, from its start; > 0 */
    int64_t arena_bytes; /* address space for blocks, > 0; 0: twice the memory of the machine */
    struct dsc_par par;  /* borrowed for reductions as long as the end lives; run NULL: none */
};

#define DSC_COMM_CONFIG_INIT                                                 \
    {                                                                        \
        sizeof(struct dsc_comm_config), 0, 1, (int64_t)1800 * 1000000000, 0, \
        {                                                                    \
            NULL, NULL                                                       \
        }                                                                    \
    }

/*
 * Makes this rank's end. DSC_EINVAL names the field; DSC_ENOTSUP: the kernel lacks a feature, and the sentence names
 * it; DSC_ENOSPC, DSC_ENOMEM: with the bytes asked for and the bytes there are.
 */
DSC_API dsc_status dsc_comm_create(const struct dsc_comm_config *config, dsc_comm **out_comm);

/* The address by which other ranks attach: printable text without spaces. Lives as long as the end. */
DSC_API const char *dsc_comm_address(const dsc_comm *comm);

/*
 * Opens the segments of all ranks; addresses[i] is the address of rank i. Call it once. DSC_ENOTSUP: a rank cannot
 * share memory with this rank (another host, PID namespace, user or build), and the sentence says why. DSC_EPEER: a
 * rank is gone, or its segment does not match its address. DSC_EINVAL: no address. After a failure the end is
 * unchanged, and the caller may try again or close it. Keep ends open until all ranks have attached.
 */
DSC_API dsc_status dsc_comm_attach(dsc_comm *comm, const char *const *addresses);

/*
 * Ends all unfinished requests with DSC_ESTATE, tells the other ranks, and unmaps their memory. Waits for the running
 * request, at most 0.1 s and the time of one chunk. Blocks stay valid. A second call does nothing.
 */
DSC_API dsc_status dsc_comm_close(dsc_comm *comm);

/*
 * Closes and frees the end. All requests must have been released, and no other thread may be in a call. NULL is
 * allowed.
 */
DSC_API void dsc_comm_destroy(dsc_comm *comm);

/*
 * Allocates n_bytes of the arena, page-aligned and zero. The memory is committed here, so that a lack of memory is
 * reported here, with the bytes wanted and available (DSC_ENOMEM; DSC_ENOSPC if the arena's address space is used up).
 * Freed memory returns to the system, also after the end is gone. No other thread may use a block that is freed; NULL
 * is fine.
 */
DSC_API dsc_status dsc_comm_block_create(dsc_comm *comm, int64_t n_bytes, dsc_comm_block **out_block);
DSC_API void dsc_comm_block_destroy(dsc_comm_block *block);
DSC_API void *dsc_comm_block_data(const dsc_comm_block *block);

/* Whether all n_bytes at data lie in this end's arena. False after the end is closed. */
DSC_API bool dsc_comm_owns(const dsc_comm *comm, const void *data, int64_t n_bytes);

/*
 * One collective. Fields that an operation does not name are ignored.
 *
 * ALL_REDUCE      data[n_elems] = scale * combined, in place. Integers: scale 1.
 * REDUCE_SCATTER  out[n_elems / n_ranks] = (accumulates ? out : 0) + scale * (sum of this rank's slices). type and
 *                 out_type: both of F32, BF16, F16, or one type of F64 and integers, which neither scale nor
 *                 accumulate. out: this rank's own slice of data, of the same type, or memory apart from data.
 * ALL_GATHER      slice i of data[n_elems] comes from rank i, in place.
 * ALL_TO_ALL      block i of data (in_splits[i] elements) goes to rank i; block i of out comes from it. The arrays of
 *                 n_ranks numbers are copied. data and out lie apart.
 * BROADCAST       data[n_elems] of rank src goes to all.
 * BARRIER         returns when all ranks have come.
 */
struct dsc_comm_call {
    dsc_comm_op op;
    dsc_comm_type type;
    void *data; /* borrowed until the request is done; NULL only without elements. Any alignment */
    int64_t n_elems;
    double scale;
    dsc_comm_combine combine;
    int32_t src;
    bool accumulates;
    bool is_waited; /* the caller waits at once, so no worker needs to be woken; may differ between ranks */
    dsc_comm_type out_type;
    void *out; /* as data */
    const int64_t *in_splits;
    const int64_t *out_splits;
    const char *label; /* names the data in errors, the same on all ranks; copied. NULL is as "" */
};

/*
 * Submits a call; *out_request is to be released. DSC_EINVAL names the field, and nothing has been submitted. A broken
 * or closed end returns its failure. Takes no longer than a copy of 64 KiB.
 */
DSC_API dsc_status dsc_comm_submit(dsc_comm *comm, const struct dsc_comm_call *call, dsc_comm_request **out_request);

/*
 * One message from one rank to another. Rank src sends it, rank dst receives it into memory of its own. The messages
 * of one tag from one rank to another arrive in the order of sending, and are received in the order of submission; the
 * order of messages of several tags is free. Messages take no part in the order of collectives.
 *
 * The receiver compares element type, shape and label with its own before data moves. A difference is
 * DSC_EPEER with both values: it breaks the receiver's end, and thereby the sender's.
 *
 * A submission never waits for the other rank. Up to 7680 bytes go through the mailbox, and longer data of memory
 * outside the arena is copied into the arena by the submission: such a send is done at once. Longer data of the arena
 * is read there, and the send is done when the receiver has it. Messages stay with the sender while 16 of them have not
 * been noticed by the receiver, or 512 longer ones not been received; later calls for any message send them on.
 * Messages that a closed or dead rank has sent still arrive.
 */
struct dsc_comm_message {
    int32_t tag; /* any number */
    dsc_comm_type type;
    void
        *data; /* borrowed until the request is done; NULL only without elements. Any alignment. A send only reads it */
    int32_t n_dims;
    int64_t shape[DSC_COMM_MAX_DIMS]; /* no dimension: one element */
    const char *label;                /* names the data in errors; copied. NULL is as "" */
};

/*
 * Submit a message; *out_request is to be waited for and released as that of a collective. DSC_EINVAL names the field;
 * DSC_ENOMEM, DSC_ENOSPC: the data cannot be kept. Then nothing has been submitted. A broken or closed end returns its
 * failure. The data of a received message is copied by a thread that waits for a message or in a collective, or asks
 * whether a message is done.
 */
DSC_API dsc_status dsc_comm_send(dsc_comm *comm, int32_t dst, const struct dsc_comm_message *message,
                                 dsc_comm_request **out_request);
DSC_API dsc_status dsc_comm_receive(dsc_comm *comm, int32_t src, const struct dsc_comm_message *message,
                                    dsc_comm_request **out_request);

/*
 * Whether a message of this tag from rank src has arrived that no request has received. Never waits. A broken or closed
 * end returns its failure.
 */
DSC_API dsc_status dsc_comm_has_message(dsc_comm *comm, int32_t src, int32_t tag, bool *out_has);

/*
 * Returns when the request is done, with its outcome: DSC_OK, DSC_EPEER, DSC_ETIMEDOUT, DSC_ENOMEM or DSC_ESTATE. May
 * be called again. stops (may be NULL) is called in this thread, about ten times a second and after a signal, while
 * another thread runs the request or other ranks have not reached it. If stops returns true, the wait returns
 * DSC_EAGAIN; the request goes on, uses its memory, and may be waited for again.
 */
DSC_API dsc_status dsc_comm_wait(dsc_comm_request *request, bool (*stops)(void *context), void *context);

/*
 * Whether dsc_comm_wait would return at once. A request makes progress without calls to this function, except for a
 * message. False in a child of fork().
 */
DSC_API bool dsc_comm_is_done(dsc_comm_request *request);

/* Frees a request that is done; DSC_ESTATE if it is not done. NULL is fine. Does nothing in a child of fork(). */
DSC_API dsc_status dsc_comm_release(dsc_comm_request *request);

/*
 * Joint memory: all ranks write it, each rank in its own part. One rank creates the memory and the others open it. It
 * needs no end, and is freed when the last process that maps it ends. Each process maps it twice, as data and as view.
 * data is the memory itself. view shows the same bytes, but writes to view stay private to this process: once a page of
 * view has been written, it hides later writes of other ranks, until dsc_comm_joint_forget. The ranks agree among
 * themselves when each writes and reads.
 *
 * Ends may be created and destroyed meanwhile. Any thread may call; in a child of fork() calls are DSC_ESTATE, and
 * destroy does nothing.
 */
typedef struct dsc_comm_joint dsc_comm_joint;

/* n_bytes, page-aligned and zero, none of them committed. Errors as dsc_comm_create. */
DSC_API dsc_status dsc_comm_joint_create(int64_t n_bytes, dsc_comm_joint **out_joint);

/*
 * The address by which other ranks open the memory, as dsc_comm_address. "" if this process did not create the memory.
 */
DSC_API const char *dsc_comm_joint_address(const dsc_comm_joint *joint);

/* Errors as dsc_comm_attach. The creator must keep the memory until all ranks have opened it. */
DSC_API dsc_status dsc_comm_joint_open(const char *address, dsc_comm_joint **out_joint);

/*
 * Commits the memory of a part, so that a lack of memory is reported here: DSC_ENOMEM with the bytes wanted and
 * available.
 */
DSC_API dsc_status dsc_comm_joint_commit(dsc_comm_joint *joint, int64_t offset, int64_t n_bytes);

/*
 * Returns the whole pages of a part to the system. The pages then hold zeros, and take memory again when they are
 * touched.
 */
DSC_API dsc_status dsc_comm_joint_discard(dsc_comm_joint *joint, int64_t offset, int64_t n_bytes);

/*
 * Drops this process's writes to view, so that view shows the memory of all ranks again. DSC_ENOTSUP if the process has
 * locked its memory (mlockall).
 */
DSC_API dsc_status dsc_comm_joint_forget(dsc_comm_joint *joint);

/*
 * *out_at: offset of the first byte that this process has written to view so that it differs from data; -1 if there is
 * none. Takes about 10 ns for each page that has not been written.
 */
DSC_API dsc_status dsc_comm_joint_find_write(const dsc_comm_joint *joint, int64_t *out_at);

DSC_API void *dsc_comm_joint_data(const dsc_comm_joint *joint);
DSC_API void *dsc_comm_joint_view(const dsc_comm_joint *joint);
DSC_API int64_t dsc_comm_joint_bytes(const dsc_comm_joint *joint);

/* Unmaps the memory: no thread may use data or view any more. NULL is allowed. */
DSC_API void dsc_comm_joint_destroy(dsc_comm_joint *joint);

struct dsc_comm_count {
    int64_t n_calls;
    int64_t n_bytes;    /* of data */
    int64_t n_in_place; /* calls in which other ranks read this rank's data in the arena */
    int64_t n_staged;   /* calls in which it went through the staging area. Calls that send no data count in neither */
};

/* This rank's counts for one operation. */
DSC_API dsc_status dsc_comm_count_of(const dsc_comm *comm, dsc_comm_op op, struct dsc_comm_count *out_count);

/* Static storage; NULL for other values. */
DSC_API const char *dsc_comm_op_text(dsc_comm_op op);

/* Static storage; "no type" and 0 for other values. */
DSC_API const char *dsc_comm_type_text(dsc_comm_type type);
DSC_API size_t dsc_comm_type_bytes(dsc_comm_type type);

#ifdef __cplusplus
}
#endif
#endif
