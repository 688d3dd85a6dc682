/*
 * Shared by all operators on rows: checks of operands, one block of a row in any dtype, and the run over all rows, with
 * sums over rows where needed.
 */
#ifndef DSC_NN_ROWS_H
#define DSC_NN_ROWS_H

#include "base/fail.h"
#include "base/par.h"
#include "nn/table.h"

/* The shared arguments of a run's body. */
struct dsc_rows {
    const struct dsc_kernels *kernels;
    const struct dsc_nn_kernels *nn;
    int64_t n_rows;
    int64_t n_cols;
};

struct dsc_rows dsc_rows_of(int64_t n_rows, int64_t n_cols);

#define DSC_ROW_SUMS 2

/* Sums over rows. An entry of `out` is NULL if that sum is not wanted. */
struct dsc_row_sums {
    dsc_dtype dtype; /* of out */
    void *out[DSC_ROW_SUMS];
    float *scratch; /* dsc_nn_scratch_elems(n_rows, n_cols, number of wanted sums) */
};

/*
 * Does one row. sums[i] is partial sum i of the chunk, [n_cols], to which the body adds the row; NULL if the sum is not
 * wanted.
 */
typedef void (*dsc_row_body)(const void *job, int64_t row, float *const *sums);

/*
 * Runs body once for each row, in chunks that depend only on sizes. Each chunk has its own partial sums; these are
 * folded in the order of the chunks and written to sums->out. sums may be NULL.
 */
void dsc_rows_run(const struct dsc_rows *rows, const struct dsc_row_sums *sums, dsc_row_body body, const void *job,
                  const struct dsc_par *par);

/*
 * Checks. Failures name the field of the call.
 */

struct dsc_named {
    const char *name;
    const void *data;
};

dsc_status dsc_check_rows(int64_t n_rows, int64_t n_cols, dsc_dtype dtype);
dsc_status dsc_check_present(int64_t n_rows, const struct dsc_named *arrays, size_t n_arrays);
/* **out_n_rows = a * b * c; `names` lists the three dimensions for the error. */
dsc_status dsc_check_dims(const char *names, int64_t a, int64_t b, int64_t c, int64_t *out_n_rows);

#define CHECK_PRESENT(n_rows, ...)                                     \
    dsc_check_present(n_rows, (const struct dsc_named[]){__VA_ARGS__}, \
                      sizeof((const struct dsc_named[]){__VA_ARGS__}) / sizeof(struct dsc_named))
#define NAMED(call, field)    \
    {                         \
#field, (call)->field \
    }

/*
 * Blocks: at most DSC_BLOCK_ELEMS elements of one row.
 */

static inline int64_t dsc_block_of(int64_t n_left)
{
    return n_left < DSC_BLOCK_ELEMS ? n_left : DSC_BLOCK_ELEMS;
}

/* Element i of data, NULL for NULL. */
static inline const void *dsc_at(const void *data, dsc_dtype dtype, int64_t i)
{
    return data == NULL ? NULL : (const char *)data + (size_t)i * dsc_dtype_bytes(dtype);
}

static inline void *dsc_at_out(void *data, dsc_dtype dtype, int64_t i)
{
    return data == NULL ? NULL : (char *)data + (size_t)i * dsc_dtype_bytes(dtype);
}

/* As dsc_load_f32; NULL for NULL. */
static inline const dsc_f32 *dsc_load(const struct dsc_rows *rows, dsc_dtype dtype, const void *data, int64_t n,
                                      dsc_f32 *scratch)
{
    return data == NULL ? NULL : dsc_load_f32(rows->kernels, dtype, data, n, scratch);
}

/* The buffer that a loop writes and dsc_store then copies into data. */
static inline dsc_f32 *dsc_target(dsc_dtype dtype, void *data, dsc_f32 *scratch)
{
    return dtype == DSC_DTYPE_F32 ? data : scratch;
}

static inline void dsc_store(const struct dsc_rows *rows, dsc_dtype dtype, const dsc_f32 *src, int64_t n, void *data)
{
    dsc_store_f32(rows->kernels, dtype, src, n, data);
}

/* One block of x with the bias added, in scratch where there is one. */
const dsc_f32 *dsc_load_biased(const struct dsc_rows *rows, dsc_dtype dtype, const void *x, const void *bias, int64_t n,
                               dsc_f32 (*scratch)[DSC_BLOCK_ELEMS]);

#endif
