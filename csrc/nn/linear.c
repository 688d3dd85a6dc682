/* Products of rows with a weight, and their gradients: checks, and tiles for threads. */
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
#define GRAIN_COLS 16

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t pieces(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

static dsc_status check_sizes(int64_t n_rows, int64_t n_cols, int64_t n_outputs, dsc_dtype dtype)
{
    DSC_TRY(dsc_check_product(n_rows, n_cols, n_outputs, "outputs"));
    if (dsc_dtype_bytes(dtype) == 0)
        return dsc_fail(DSC_EINVAL, "dtype is %d, which is no dsc_dtype", (int)dtype);
    return DSC_OK;
}

/* Tiles of a matrix, row after row. */
struct tiles {
    int64_t n_rows;
    int64_t n_cols;
    int64_t tile_rows;
    int64_t tile_cols;
    int64_t n_across; /* tiles beside one another */
    int64_t n_tiles;
};

struct tile {
    int64_t row;
    int64_t end_row;
    int64_t col;
    int64_t end_col;
};

/* n_terms: products that each element sums. */
static struct tiles tiles_of(int64_t n_rows, int64_t n_cols, int64_t n_terms)
{
    struct tiles tiles = {.n_rows = n_rows, .n_cols = n_cols, .tile_rows = least(n_rows, TILE_ROWS)};
    int64_t n_wanted = CHUNK_PRODUCTS / ((n_terms + 1) * tiles.tile_rows) + 1;

    tiles.tile_cols = least(pieces(n_wanted, GRAIN_COLS) * GRAIN_COLS, TILE_COLS);
    tiles.n_across = pieces(n_cols, tiles.tile_cols);
    tiles.n_tiles = pieces(n_rows, tiles.tile_rows) * tiles.n_across;
    return tiles;
}

static struct tile tile_at(const struct tiles *tiles, int64_t index)
{
    int64_t row = index / tiles->n_across * tiles->tile_rows, col = index % tiles->n_across * tiles->tile_cols;

    return (struct tile){row, least(row + tiles->tile_rows, tiles->n_rows), col,
                         least(col + tiles->tile_cols, tiles->n_cols)};
}

struct job {
    const struct dsc_nn_kernels *kernels;
    struct tiles tiles;
    const struct dsc_nn_linear *linear;
    const struct dsc_nn_linear_grad *grad;
    struct dsc_nn_outer_sum sum;
};

static void run_linear(void *arg, int64_t first, int64_t last)
{
    const struct job *job = arg;

    for (int64_t i = first; i < last; i++) {
        struct tile tile = tile_at(&job->tiles, i);

        job->kernels->linear(job->linear, tile.row, tile.end_row, tile.col, tile.end_col);
    }
}

static void run_outer_sum(void *arg, int64_t first, int64_t last)
{
    const struct job *job = arg;

    for (int64_t i = first; i < last; i++) {
        struct tile tile = tile_at(&job->tiles, i);

        job->kernels->outer_sum(&job->sum, tile.row, tile.end_row, tile.col, tile.end_col);
    }
}

static void run_column_sums(void *arg, int64_t first, int64_t last)
{
    const struct job *job = arg;
    const struct dsc_nn_linear_grad *grad = job->grad;

    for (int64_t i = first; i < last; i++) {
        struct tile tile = tile_at(&job->tiles, i);

        job->kernels->column_sums(grad->n_rows, grad->n_outputs, grad->dtype, grad->dy, tile.col, tile.end_col,
                                  grad->dbias);
    }
}

dsc_status dsc_nn_linear(const struct dsc_nn_linear *call, const struct dsc_par *par)
{
    struct job job = {.kernels = dsc_nn_kernels_get(), .linear = call};

    DSC_TRY(check_sizes(call->n_rows, call->n_cols, call->n_outputs, call->dtype));
    if (call->n_rows == 0 || call->n_outputs == 0)
        return DSC_OK;
    DSC_TRY(CHECK_PRESENT(1, NAMED(call, y)));
    DSC_TRY(CHECK_PRESENT(call->n_cols, NAMED(call, x), NAMED(call, weight)));
    job.tiles = tiles_of(call->n_rows, call->n_outputs, call->n_cols);
    dsc_par_run(par, job.tiles.n_tiles, run_linear, &job);
    return DSC_OK;
}

dsc_status dsc_nn_linear_grad(const struct dsc_nn_linear_grad *call, const struct dsc_par *par)
{
    struct job job = {.kernels = dsc_nn_kernels_get(), .grad = call};

    DSC_TRY(check_sizes(call->n_rows, call->n_cols, call->n_outputs, call->dtype));
    DSC_TRY(CHECK_PRESENT(least(call->n_rows, call->n_outputs), NAMED(call, dy)));
    if (call->dx != NULL && call->n_rows > 0 && call->n_cols > 0) {
        DSC_TRY(CHECK_PRESENT(call->n_outputs, NAMED(call, weight)));
        job.sum = (struct dsc_nn_outer_sum){.n_terms = call->n_outputs,
                                            .n_cols = call->n_cols,
                                            .dtype = call->dtype,
                                            .a = call->dy,
                                            .a_term = 1,
                                            .a_row = call->n_outputs,
                                            .b = call->weight,
                                            .y = call->dx};
        job.tiles = tiles_of(call->n_rows, call->n_cols, call->n_outputs);
        dsc_par_run(par, job.tiles.n_tiles, run_outer_sum, &job);
    }
    if (call->dweight != NULL && call->n_outputs > 0 && call->n_cols > 0) {
        DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, x)));
        job.sum = (struct dsc_nn_outer_sum){.n_terms = call->n_rows,
                                            .n_cols = call->n_cols,
                                            .dtype = call->dtype,
                                            .a = call->dy,
                                            .a_term = call->n_outputs,
                                            .a_row = 1,
                                            .b = call->x,
                                            .y = call->dweight};
        job.tiles = tiles_of(call->n_outputs, call->n_cols, call->n_rows);
        dsc_par_run(par, job.tiles.n_tiles, run_outer_sum, &job);
    }
    if (call->dbias != NULL && call->n_outputs > 0) {
        job.tiles = tiles_of(1, call->n_outputs, call->n_rows);
        dsc_par_run(par, job.tiles.n_tiles, run_column_sums, &job);
    }
    return DSC_OK;
}
