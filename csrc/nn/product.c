/* Products of matrices: checks, and tiles for threads. */
#include "base/check.h"
#include "base/fail.h"
#include "base/par.h"
#include "nn/rows.h"
#include "nn/table.h"

/* A chunk is a tile of results, of at least this many products. */
#define CHUNK_PRODUCTS (1 << 20)
/* Sides of tiles: multiples of the steps of the loops. */
#define TILE_ROWS 192
#define TILE_COLS 256
#define GRAIN_ROWS 6
#define GRAIN_COLS 16
/* Each tile widens its rows again, which takes as long as some 3 columns: with many rows, tiles are not narrower. */
#define LEAST_COLS 48
/* With a few rows, memory sets the time: short tiles, so that threads end together. */
#define FEW_COLS 96

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t pieces(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

struct job {
    struct dsc_nn_product call;
    void (*run)(const struct dsc_nn_product *call, int64_t batch, int64_t row, int64_t end_row, int64_t col,
                int64_t end_col);
    int64_t tile_rows;
    int64_t tile_cols;
    int64_t n_across; /* tiles beside one another */
    int64_t n_tiles;  /* of a batch */
    int64_t end;      /* behind the number of its last tile, counted over all jobs */
};

static void find_tiles(struct job *job)
{
    const struct dsc_nn_product *call = &job->call;
    int64_t n_wanted;

    /* Tiles of equal heights, so that threads with as many tiles end together. */
    job->tile_rows = pieces(call->n_rows, pieces(call->n_rows, TILE_ROWS));
    job->tile_rows = pieces(job->tile_rows, GRAIN_ROWS) * GRAIN_ROWS;
    n_wanted = CHUNK_PRODUCTS / ((call->n_terms + 1) * job->tile_rows) + 1;
    if (call->n_rows > DSC_NN_FEW_ROWS && n_wanted < LEAST_COLS)
        n_wanted = LEAST_COLS;
    job->tile_cols =
        least(pieces(n_wanted, GRAIN_COLS) * GRAIN_COLS, call->n_rows <= DSC_NN_FEW_ROWS ? FEW_COLS : TILE_COLS);
    job->n_across = pieces(call->n_cols, job->tile_cols);
    job->n_tiles = pieces(call->n_rows, job->tile_rows) * job->n_across;
}

/* Runs tiles from number i on, at most n, and returns how many: those beside one another share the work on their rows.
 */
static int64_t run_some(const struct job *job, int64_t i, int64_t n)
{
    const struct dsc_nn_product *call = &job->call;
    int64_t tile = i % job->n_tiles, across = tile % job->n_across;
    int64_t row = tile / job->n_across * job->tile_rows;

    n = least(n, job->n_across - across);
    job->run(call, i / job->n_tiles, row, least(row + job->tile_rows, call->n_rows), across * job->tile_cols,
             least((across + n) * job->tile_cols, call->n_cols));
    return n;
}

/* arg: the jobs; their tiles are numbered one after the other. */
static void run_tiles(void *arg, int64_t first, int64_t last)
{
    const struct job *job = arg;
    int64_t begin = 0;

    for (int64_t i = first; i < last;) {
        for (; i >= job->end; job++)
            begin = job->end;
        i += run_some(job, i - begin, least(last, job->end) - i);
    }
}

static dsc_status check_sizes(const struct dsc_nn_product *call)
{
    int64_t n_elems;

    DSC_TRY(dsc_check_product(call->n_rows, call->n_terms, call->n_cols, "columns"));
    if (call->n_batches < 0)
        return dsc_fail(DSC_EINVAL, "%lld batches: may not be negative", (long long)call->n_batches);
    if (__builtin_mul_overflow(call->n_rows * call->n_cols, call->n_batches, &n_elems))
        return dsc_fail(DSC_EOVERFLOW, "%lld batches of %lld rows, %lld columns: more elements than int64_t counts",
                        (long long)call->n_batches, (long long)call->n_rows, (long long)call->n_cols);
    if (dsc_dtype_bytes(call->dtype) == 0)
        return dsc_fail(DSC_EINVAL, "dtype is %d, which is no dsc_dtype", (int)call->dtype);
    return DSC_OK;
}

static void set_lone_stride(int64_t size, int64_t *stride)
{
    if (size <= 1)
        *stride = 1;
}

/* Checks a product, and cuts it into tiles. A product without elements has none. */
static dsc_status plan(const struct dsc_nn_product *given, struct job *job)
{
    struct dsc_nn_product *call = &job->call;

    *job = (struct job){.call = *given};
    DSC_TRY(check_sizes(call));
    if (call->n_batches == 0 || call->n_rows == 0 || call->n_cols == 0)
        return DSC_OK;
    DSC_TRY(CHECK_PRESENT(1, NAMED(call, y)));
    DSC_TRY(CHECK_PRESENT(call->n_terms, NAMED(call, a), NAMED(call, b)));
    set_lone_stride(call->n_rows, &call->a_row);
    set_lone_stride(call->n_terms, &call->a_term);
    set_lone_stride(call->n_terms, &call->b_term);
    set_lone_stride(call->n_cols, &call->b_col);
    if (call->a_term == 1 && call->b_term == 1)
        job->run = dsc_nn_kernels_get()->dot_product;
    else if (call->b_col == 1 && (call->a_term == 1 || call->a_row == 1))
        job->run = dsc_nn_kernels_get()->outer_product;
    else
        return dsc_fail(
            DSC_EINVAL, "strides are %lld, %lld of a and %lld, %lld of b: neither terms nor columns are dense",
            (long long)call->a_row, (long long)call->a_term, (long long)call->b_term, (long long)call->b_col);
    find_tiles(job);
    return DSC_OK;
}

dsc_status dsc_nn_products(int32_t n, const struct dsc_nn_product *calls, const struct dsc_par *par)
{
    struct job jobs[DSC_NN_MAX_PRODUCTS];
    int64_t n_tiles = 0;
    double work = 0; /* in terms; a double, because many products may have more than int64_t counts */

    if (n < 0 || n > DSC_NN_MAX_PRODUCTS)
        return dsc_fail(DSC_EINVAL, "%d products: a call takes 0 to %d", (int)n, DSC_NN_MAX_PRODUCTS);
    for (int32_t i = 0; i < n; i++) {
        const struct dsc_nn_product *call = &calls[i];

        DSC_TRY(plan(call, &jobs[i]));
        n_tiles += call->n_batches * jobs[i].n_tiles;
        jobs[i].end = n_tiles;
        work += (double)call->n_batches * (double)call->n_rows * (double)call->n_cols * ((double)call->n_terms + 1);
    }
    if (work < CHUNK_PRODUCTS)
        par = NULL; /* less work than it takes to wake a thread */
    dsc_par_run(par, n_tiles, run_tiles, jobs);
    return DSC_OK;
}

dsc_status dsc_nn_product(const struct dsc_nn_product *call, const struct dsc_par *par)
{
    return dsc_nn_products(1, call, par);
}
