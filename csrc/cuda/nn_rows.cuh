/*
 * Shared by the operators on rows: elements dealt out over blocks, a block's sums and maximum that all its threads get,
 * and sums over rows.
 */
#ifndef DSC_CUDA_NN_ROWS_CUH
#define DSC_CUDA_NN_ROWS_CUH

#include "cuda/common.cuh"
#include "cuda/nn_math.cuh"

namespace dsc_cuda {

/* Threads that share a column of a sum over rows, and columns of a block. */
constexpr int SUM_LANES = 8;
constexpr int SUM_COLUMNS = N_THREADS / SUM_LANES;

inline int32_t blocks_of(int64_t n, int64_t of_block)
{
    const int64_t n_blocks = n / of_block + (n % of_block != 0);

    return (int32_t)(n_blocks < MAX_BLOCKS ? n_blocks : MAX_BLOCKS);
}

/* Parameters that every kernel on rows has. Blocks take every n_blocks-th row, or run of N_THREADS elements. */
struct row_grid {
    int32_t n_blocks;
    int64_t n_rows;
    int64_t n_cols;
};

/* An optional operand's element; `missing` where there is none. */
__device__ inline float load_or(int dtype, const void *data, int64_t i, float missing)
{
    return data == nullptr ? missing : load(dtype, data, i);
}

/* Two sums over the block's threads, which all of them get. May be called again. */
__device__ inline void share_sums(double sums[2])
{
    __shared__ double lanes[2][N_THREADS];
    const int lane = (int)threadIdx.x;

    __syncthreads(); /* the last call's lanes have been read */
    lanes[0][lane] = sums[0];
    lanes[1][lane] = sums[1];
    for (int half = N_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half) {
            lanes[0][lane] += lanes[0][lane + half];
            lanes[1][lane] += lanes[1][lane + half];
        }
    }
    __syncthreads();
    sums[0] = lanes[0][0];
    sums[1] = lanes[1][0];
}

/* The largest of the threads' numbers; a NaN is passed over where the threads passed over it. */
__device__ inline float share_max(float max)
{
    __shared__ float largest[N_THREADS];
    const int lane = (int)threadIdx.x;

    __syncthreads();
    largest[lane] = max;
    for (int half = N_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half)
            largest[lane] = largest[lane + half] > largest[lane] ? largest[lane + half] : largest[lane];
    }
    __syncthreads();
    return largest[0];
}

/*
 * Sums Params::contribution(row, column, out) over rows, in f64, in an order that depends on sizes alone. Params has
 * grid, sum_dtype and two outputs in sums, which may be NULL.
 */
template <class Params>
static __global__ void __launch_bounds__(N_THREADS) column_sums_kernel(const __grid_constant__ Params a)
{
    __shared__ double lanes[2][N_THREADS];
    const int thread = (int)threadIdx.x;
    const int lane = thread / SUM_COLUMNS;

    for (int64_t first = (int64_t)blockIdx.x * SUM_COLUMNS; first < a.grid.n_cols;
         first += (int64_t)a.grid.n_blocks * SUM_COLUMNS) {
        const int64_t column = first + thread % SUM_COLUMNS;
        double sums[2] = {0.0, 0.0};

        for (int64_t row = lane; row < a.grid.n_rows && column < a.grid.n_cols; row += SUM_LANES) {
            float out[2] = {0.0f, 0.0f};

            a.contribution(row, column, out);
            sums[0] += (double)out[0];
            sums[1] += (double)out[1];
        }
        __syncthreads();
        lanes[0][thread] = sums[0];
        lanes[1][thread] = sums[1];
        __syncthreads();
        for (int which = 0; which < 2; which++) {
            if (lane != 0 || column >= a.grid.n_cols || a.sums[which] == nullptr)
                continue;
            double total = 0.0;

            for (int i = 0; i < SUM_LANES; i++)
                total += lanes[which][i * SUM_COLUMNS + thread];
            store(a.sum_dtype, a.sums[which], column, (float)total);
        }
    }
}

template <class Params>
dsc_status sum_columns(const char *what, Params params, void *stream)
{
    if (params.sums[0] == nullptr && params.sums[1] == nullptr)
        return DSC_OK;
    params.grid.n_blocks = blocks_of(params.grid.n_cols, SUM_COLUMNS);
    return launch(what, column_sums_kernel<Params>, params.grid.n_blocks, params, stream);
}

/* One block a row, or a run of N_THREADS elements. */
inline row_grid grid_of_rows(int64_t n_rows, int64_t n_cols)
{
    return {blocks_of(n_rows, 1), n_rows, n_cols};
}

inline row_grid grid_of_elements(int64_t n_rows, int64_t n_cols)
{
    return {blocks_of(n_rows * n_cols, N_THREADS), n_rows, n_cols};
}

/* Calls what(i) for this thread's elements of n. */
template <class What>
__device__ inline void each_element(const row_grid &grid, What what)
{
    const int64_t n = grid.n_rows * grid.n_cols;
    const int64_t step = (int64_t)grid.n_blocks * N_THREADS;

    for (int64_t i = (int64_t)blockIdx.x * N_THREADS + threadIdx.x; i < n; i += step)
        what(i);
}

}  // namespace dsc_cuda

#endif
