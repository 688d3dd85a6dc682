/* Types that all headers share: element types, and the parallel-for that a caller provides. */
#ifndef DSC_TYPES_H
#define DSC_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define DSC_API __attribute__((visibility("default")))
#else
#define DSC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Element types of the buffers that cross this ABI. The values are part of the ABI. */
typedef enum dsc_dtype { DSC_DTYPE_F32 = 0, DSC_DTYPE_BF16 = 1, DSC_DTYPE_F16 = 2, DSC_DTYPE_COUNT = 3 } dsc_dtype;

/* Bytes of one element; 0 for a value that is no dsc_dtype. */
DSC_API size_t dsc_dtype_bytes(dsc_dtype dtype);

/* A body of work: processes the chunks first <= i < last. */
typedef void (*dsc_par_body)(void *arg, int64_t first, int64_t last);

/*
 * A parallel-for that the caller provides for the duration of one call.
 *
 * run() calls body over disjoint ranges that together cover [0, n_chunks), from any threads and in
 * any order, and returns when all are done. The bounds of a chunk depend on the sizes alone, and
 * partial results are combined in chunk order, so every result has the same bits for any number of
 * threads. A NULL dsc_par means: serially, in the calling thread.
 */
struct dsc_par {
    void *ctx;
    void (*run)(void *ctx, int64_t n_chunks, dsc_par_body body, void *arg);
};

#ifdef __cplusplus
}
#endif
#endif
