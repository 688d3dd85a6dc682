/*
 * Splits a list of arrays into chunks and runs them through the caller's parallel-for.
 *
 * The list is seen as one long range of elements, the arrays one behind the other. A chunk is a piece of that range. It
 * may begin or end inside an array or hold many arrays, so 16,384 small arrays are divided as evenly as one large
 * array. Chunk borders depend only on the sizes. There are at most DSC_MAX_CHUNKS chunks, so that partial results fit
 * the caller's stack.
 */
#ifndef DSC_BASE_PAR_H
#define DSC_BASE_PAR_H

#include "dsc/status.h"
#include "dsc/types.h"

/*
 * Elements that a kernel takes at once: few enough that four f32 blocks stay in a 32 KiB first-level cache while memory
 * streams through it. Chunks hold whole blocks, so that only the last block of an array is short.
 */
#define DSC_BLOCK_ELEMS 1024
#define DSC_MIN_CHUNK_ELEMS (32 * DSC_BLOCK_ELEMS)
#define DSC_MAX_CHUNKS 1024
#define DSC_LIST_MARKS 256

struct dsc_list {
    const char *counts;  /* borrowed: address of the first array's int64_t element count */
    size_t stride_bytes; /* from one count to the next */
    int64_t n_arrays;
    int64_t n_elems; /* of all arrays */
    int64_t chunk_elems;
    int64_t n_chunks;
    /* Elements before array i * mark_arrays, so that a chunk finds its first array without a walk over all of them. */
    int64_t mark_arrays;
    int64_t mark_elems[DSC_LIST_MARKS];
};

/* A piece of one array that lies in one chunk. */
struct dsc_piece {
    int64_t array;
    int64_t begin;   /* first element within the array */
    int64_t n_elems; /* > 0 */
};

/* Walks the pieces of one chunk. */
struct dsc_cursor {
    const struct dsc_list *list;
    int64_t array;
    int64_t begin;
    int64_t n_left; /* remaining elements of the chunk */
};

/*
 * counts points at the element count inside the first of n_arrays structs of stride_bytes each; both are borrowed while
 * the list is in use. DSC_EOVERFLOW if the sum of the counts does not fit int64_t. Counts must be >= 0.
 */
dsc_status dsc_list_init(struct dsc_list *list, const int64_t *counts, size_t stride_bytes, int64_t n_arrays);

/* Elements of array i. */
int64_t dsc_list_count(const struct dsc_list *list, int64_t array);

struct dsc_cursor dsc_list_chunk(const struct dsc_list *list, int64_t chunk);

/* Gets the chunk's next piece; false after the last. Empty arrays are skipped. */
bool dsc_cursor_next(struct dsc_cursor *cursor, struct dsc_piece *out_piece);

/* Runs body over [0, n_chunks) through par, or in the calling thread if par is NULL or there is only one chunk. */
void dsc_par_run(const struct dsc_par *par, int64_t n_chunks, dsc_par_body body, void *arg);

#endif
