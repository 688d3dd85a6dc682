/* Cross-entropy over a vocabulary cut over ranks: csrc/tp/cross_entropy.c on a device. One block a row. */
#include "cuda/kinds.h"
#include "cuda/nn_rows.cuh"

namespace dsc_cuda {

struct entropy_rows_params {
    row_grid grid;
    int dtype;
    const void *logits;
    const int64_t *targets;
    struct dsc_tp_row *rows;
};

__global__ void __launch_bounds__(N_THREADS) entropy_rows_kernel(const __grid_constant__ entropy_rows_params a)
{
    for (int64_t row = blockIdx.x; row < a.grid.n_rows; row += a.grid.n_blocks) {
        const int64_t begin = row * a.grid.n_cols;
        const int64_t target = a.targets[row];
        float max = -INFINITY;
        double sums[2] = {0.0, 0.0}; /* of exponentials, of logits */

        for (int64_t c = threadIdx.x; c < a.grid.n_cols; c += N_THREADS) {
            const float logit = load(a.dtype, a.logits, begin + c);

            max = logit > max ? logit : max;
        }
        max = share_max(max);

        const float shift = max == -INFINITY ? 0.0f : max;

        for (int64_t c = threadIdx.x; c < a.grid.n_cols; c += N_THREADS) {
            const float logit = load(a.dtype, a.logits, begin + c);

            sums[0] += (double)exp_nonpositive(logit - shift);
            sums[1] += (double)logit;
        }
        share_sums(sums);
        if (threadIdx.x == 0) {
            a.rows[row].max = max;
            a.rows[row].sum_exp = (float)sums[0];
            a.rows[row].target = target >= 0 && target < a.grid.n_cols ? load(a.dtype, a.logits, begin + target) : 0.0f;
            a.rows[row].sum = (float)sums[1];
        }
    }
}

dsc_status cross_entropy_rows(const void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows,
                              int64_t vocab_size, struct dsc_tp_row *out_rows, void *stream)
{
    const entropy_rows_params params = {grid_of_rows(n_rows, vocab_size), (int)dtype, logits, targets, out_rows};

    if (n_rows == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(targets, "targets"));
    return launch("cross_entropy_rows", entropy_rows_kernel, params.grid.n_blocks, params, stream);
}

struct entropy_grad_params {
    row_grid grid;
    int dtype;
    void *logits;
    const int64_t *targets;
    const float *log_sum;
    const float *scale;
    float each;      /* subtracted from every token id's probability */
    float at_target; /* and from the target's besides */
};

__global__ void __launch_bounds__(N_THREADS) entropy_grad_kernel(const __grid_constant__ entropy_grad_params a)
{
    each_element(a.grid, [&](int64_t i) {
        const int64_t row = i / a.grid.n_cols;
        const float scale = a.scale[row];
        float p = 0.0f;

        if (scale != 0.0f) {
            p = exp_nonpositive(load(a.dtype, a.logits, i) - a.log_sum[row]);
            if (i % a.grid.n_cols == a.targets[row])
                p -= a.at_target;
            p = (p - a.each) * scale;
        }
        store(a.dtype, a.logits, i, p);
    });
}

dsc_status cross_entropy_grad(void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows, int64_t vocab_size,
                              const float *log_sum, const float *scale, double smoothing, int64_t full_vocab_size,
                              void *stream)
{
    const entropy_grad_params params = {grid_of_elements(n_rows, vocab_size),
                                        (int)dtype,
                                        logits,
                                        targets,
                                        log_sum,
                                        scale,
                                        (float)(smoothing / (double)full_vocab_size),
                                        (float)(1.0 - smoothing)};

    if (n_rows == 0 || vocab_size == 0)
        return DSC_OK;
    DSC_TRY(check_pointer(logits, "logits"));
    return launch("cross_entropy_grad", entropy_grad_kernel, params.grid.n_blocks, params, stream);
}

}  // namespace dsc_cuda
