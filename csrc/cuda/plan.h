/*
 * Cuts a list of tensors into kernel launches, in integers only, so that a test without a device can prove every
 * element covered once.
 *
 * [Note: Multi-tensor launches] A launch carries up to max_pieces *pieces* in its parameters, so that thousands of
 * small tensors do not cost a launch each. A piece is a run of one tensor; pieces are cut into chunks of chunk_elems,
 * one thread block a chunk, and a block finds its piece by bisecting first_block[]. A tensor with more chunks than a
 * launch may have blocks goes on in the next launch. Every piece begins at a multiple of chunk_elems, so that cutting
 * never costs a tensor its alignment. Zero-size tensors take no piece.
 */
#ifndef DSC_CUDA_PLAN_H
#define DSC_CUDA_PLAN_H

#include <stdint.h>

#ifdef __CUDACC__
#define DSC_HD __host__ __device__
#else
#define DSC_HD
#endif

struct dsc_cuda_piece {
    int64_t tensor;      /* index in the caller's list */
    int64_t begin_elems; /* first element within the tensor, a multiple of chunk_elems */
    int64_t n_elems;     /* > 0 */
    int32_t first_block; /* the piece's blocks are [first_block, first_block + ceil(n_elems / chunk_elems)) */
};

/* The limits of a kind of launch. All > 0. */
struct dsc_cuda_limits {
    int64_t chunk_elems;
    int32_t max_pieces;
    int32_t max_blocks;
};

/* Where planning stands: start from zeros. */
struct dsc_cuda_cursor {
    int64_t tensor;
    int64_t begin_elems;
};

/* Tensor i's length in elements, >= 0. */
typedef int64_t dsc_cuda_size_of(const void *ctx, int64_t i);

/*
 * Fills the pieces of the next launch (max_pieces entries are enough) and moves the cursor on. Returns the number of
 * pieces, 0 when all tensors are done; *out_n_blocks is the launch's grid.
 */
static inline int32_t dsc_cuda_plan_next(const struct dsc_cuda_limits *limits, int64_t n_tensors,
                                         dsc_cuda_size_of *size_of, const void *ctx, struct dsc_cuda_cursor *cursor,
                                         struct dsc_cuda_piece *out_pieces, int32_t *out_n_blocks)
{
    int32_t n_pieces = 0;
    int64_t n_blocks = 0;

    while (cursor->tensor < n_tensors && n_pieces < limits->max_pieces && n_blocks < limits->max_blocks) {
        const int64_t left_elems = size_of(ctx, cursor->tensor) - cursor->begin_elems;

        if (left_elems <= 0) {
            cursor->tensor += 1;
            cursor->begin_elems = 0;
            continue;
        }

        /* Not (left + chunk - 1) / chunk, which overflows near INT64_MAX. */
        const int64_t left_chunks = left_elems / limits->chunk_elems + (left_elems % limits->chunk_elems != 0);
        const int64_t room = limits->max_blocks - n_blocks;
        const int64_t n_chunks = left_chunks < room ? left_chunks : room;
        struct dsc_cuda_piece *piece = &out_pieces[n_pieces++];

        piece->tensor = cursor->tensor;
        piece->begin_elems = cursor->begin_elems;
        piece->n_elems = n_chunks == left_chunks ? left_elems : n_chunks * limits->chunk_elems;
        piece->first_block = (int32_t)n_blocks;
        n_blocks += n_chunks;
        cursor->begin_elems += piece->n_elems;
    }
    *out_n_blocks = (int32_t)n_blocks;
    return n_pieces;
}

/* The piece that block belongs to: the last piece with first_block <= block. n_pieces >= 1, first_block[0] == 0.
 */
DSC_HD static inline int32_t dsc_cuda_piece_of(const int32_t *first_block, int32_t n_pieces, int32_t block)
{
    int32_t low = 0, high = n_pieces - 1;

    while (low < high) {
        const int32_t middle = (low + high + 1) / 2;

        if (first_block[middle] <= block)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

#endif
