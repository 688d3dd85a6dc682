/* The total of a launch's partial sums, added to two f64 on the device. */
#ifndef DSC_CUDA_TOTAL_CUH
#define DSC_CUDA_TOTAL_CUH

#include "cuda/common.cuh"

namespace dsc_cuda {

struct total_params {
    const double *partials;
    int32_t n_partials;
    double *out;
};

static __global__ void __launch_bounds__(N_THREADS) total_kernel(const __grid_constant__ total_params a)
{
    double sums[2];

    sum_partials(a.partials, 0, a.n_partials, sums);
    if (threadIdx.x == 0) {
        a.out[0] += sums[0];
        a.out[1] += sums[1];
    }
}

inline dsc_status add_total(const double *partials, int32_t n_partials, double *out, void *stream)
{
    return launch("total of sums", total_kernel, 1, total_params{partials, n_partials, out}, stream);
}

}  // namespace dsc_cuda

#endif
