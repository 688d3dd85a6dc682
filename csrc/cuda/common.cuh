/*
 * Shared by every CUDA source of this library: the error channel, checked launches, and elements of any dtype seen as
 * f32.
 *
 * [Note: Same bits as the host] Kernels do the host loops' operations in the host loops' order (csrc/optim, csrc/cpu),
 * compiled with -fmad=false and with IEEE division and square root, and convert 16-bit floats to the same bits. An
 * elementwise result on a device is the host's result; sums differ in their order only. The kernels use nothing that a
 * C++ compiler with a small stand-in for cuda_runtime.h cannot run (tests/csrc/cuda/emulator), so they are tested
 * without a device.
 */
#ifndef DSC_CUDA_COMMON_CUH
#define DSC_CUDA_COMMON_CUH

#include "cuda/plan.h"
#include "dsc/accel.h"

#include <cuda_runtime.h>

namespace dsc_cuda {

/* Threads of a block, in every kernel. */
constexpr int N_THREADS = 256;
/* A kernel's parameters may take this much on every architecture and toolkit. */
constexpr int MAX_PARAM_BYTES = 4096;

/* The emulated build sets these to a few, so that tests of a bearable size cross them. */
#ifndef DSC_CUDA_MAX_BLOCKS
#define DSC_CUDA_MAX_BLOCKS (1 << 30)
#define DSC_CUDA_MAX_PARTIALS 6656
#endif
/* Blocks of a launch that leaves nothing behind; the hardware's limit is 2^31 - 1. */
constexpr int32_t MAX_BLOCKS = DSC_CUDA_MAX_BLOCKS;
/* Blocks of a launch that leaves two sums a block in scratch. The rest of scratch is lamb's. */
constexpr int32_t MAX_PARTIALS = DSC_CUDA_MAX_PARTIALS;

/* Hands the sentence to the host library and returns status. */
dsc_status fail(dsc_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* DSC_EDEVICE with the message of CUDA's runtime, unless error is cudaSuccess. */
dsc_status check_cuda(cudaError_t error, const char *what);

/*
 * DSC_EINVAL when data (the first operand of a call that is not empty) is memory that no device sees. A host pointer in
 * a kernel would end the process' context, and with it everything that lives on the device. The current device is not
 * compared: this library's own runtime need not know the device set by another copy of it, torch's; the driver does,
 * and launches follow the driver.
 */
dsc_status check_pointer(const void *data, const char *what);

/* The list checks that the host's functions make, with their sentences. */
dsc_status check_spans(const struct dsc_span *spans, int64_t n_spans, const char *list);

/* dsc_cuda_size_of over the two kinds of lists. */
inline int64_t size_of_tensor(const void *tensors, int64_t i)
{
    return ((const struct dsc_optim_tensor *)tensors)[i].n_elems;
}

inline int64_t size_of_span(const void *spans, int64_t i)
{
    return ((const struct dsc_span *)spans)[i].n_elems;
}

template <class Params>
dsc_status launch(const char *what, void (*kernel)(Params), int32_t n_blocks, const Params &params, void *stream)
{
    static_assert(sizeof(Params) <= MAX_PARAM_BYTES, "kernel parameters are limited");
    Params copy = params;
    void *argv[] = {&copy};

    return check_cuda(
        cudaLaunchKernel(kernel, dim3((unsigned)n_blocks), dim3(N_THREADS), argv, 0, (cudaStream_t)stream), what);
}

/* A template argument in a dtype's place: known at run time only. */
constexpr int ANY_DTYPE = -1;

__host__ __device__ constexpr int bytes_of(int dtype)
{
    return dtype == DSC_DTYPE_F32 ? 4 : 2;
}

__device__ inline float bf16_to_f32(uint32_t half)
{
    return __uint_as_float(half << 16);
}

__device__ inline uint32_t f32_to_bf16(float value)
{
    const uint32_t bits = __float_as_uint(value);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const uint32_t quiet = bits | 0x400000u; /* a NaN whose payload lies in the low bits alone would become inf */

    return (value != value ? quiet : rounded) >> 16;
}

/* The processor's conversions, but with a NaN's payload kept as the host keeps it. */
__device__ inline float f16_to_f32(uint32_t half)
{
#ifdef __CUDACC__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)half));
#else
    float value = dsc_emulated_f16_to_f32(half);
#endif
    const uint32_t nan = (half & 0x8000u) << 16 | 0x7fc00000u | (half & 0x7fffu) << 13;

    return (half & 0x7fffu) > 0x7c00u ? __uint_as_float(nan) : value;
}

__device__ inline uint32_t f32_to_f16(float value)
{
#ifdef __CUDACC__
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
#else
    const uint32_t half = dsc_emulated_f32_to_f16(value);
#endif
    const uint32_t bits = __float_as_uint(value);
    const uint32_t nan = ((bits >> 16) & 0x8000u) | 0x7e00u | ((bits >> 13) & 0x01ffu);

    return value != value ? nan : half;
}

__device__ inline float widen(int dtype, uint32_t half)
{
    return dtype == DSC_DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

__device__ inline uint32_t narrow(int dtype, float value)
{
    return dtype == DSC_DTYPE_BF16 ? f32_to_bf16(value) : f32_to_f16(value);
}

/* The value after it has been stored and read again. */
__device__ inline float rounded_to(int dtype, float value)
{
    return dtype == DSC_DTYPE_F32 ? value : widen(dtype, narrow(dtype, value));
}

__device__ inline float load(int dtype, const void *data, int64_t i)
{
    return dtype == DSC_DTYPE_F32 ? ((const float *)data)[i] : widen(dtype, ((const uint16_t *)data)[i]);
}

__device__ inline void store(int dtype, void *data, int64_t i, float value)
{
    if (dtype == DSC_DTYPE_F32)
        ((float *)data)[i] = value;
    else
        ((uint16_t *)data)[i] = (uint16_t)narrow(dtype, value);
}

/* Elements that a thread takes at a time where buffers are aligned: 16 bytes of f32. */
constexpr int VEC = 4;

__device__ inline bool is_vec_aligned(int dtype, const void *data)
{
    return (uintptr_t)data % (size_t)(VEC * bytes_of(dtype)) == 0;
}

/*
 * VEC elements as they lie in memory. Loaded apart from their conversion, so that the loads of all operands are under
 * way before the first one is needed.
 */
__device__ inline uint4 load_vec(int dtype, const void *data, int64_t i)
{
    if (dtype == DSC_DTYPE_F32)
        return ((const uint4 *)data)[i / VEC];

    const uint2 halves = ((const uint2 *)data)[i / VEC];

    return make_uint4(halves.x, halves.y, 0u, 0u);
}

__device__ inline void widen_vec(int dtype, uint4 raw, float out[VEC])
{
    if (dtype == DSC_DTYPE_F32) {
        out[0] = __uint_as_float(raw.x);
        out[1] = __uint_as_float(raw.y);
        out[2] = __uint_as_float(raw.z);
        out[3] = __uint_as_float(raw.w);
    } else {
        out[0] = widen(dtype, raw.x & 0xffffu);
        out[1] = widen(dtype, raw.x >> 16);
        out[2] = widen(dtype, raw.y & 0xffffu);
        out[3] = widen(dtype, raw.y >> 16);
    }
}

__device__ inline void store_vec(int dtype, void *data, int64_t i, const float in[VEC])
{
    if (dtype == DSC_DTYPE_F32)
        ((uint4 *)data)[i / VEC] =
            make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]), __float_as_uint(in[3]));
    else
        ((uint2 *)data)[i / VEC] = make_uint2(narrow(dtype, in[0]) | narrow(dtype, in[1]) << 16,
                                              narrow(dtype, in[2]) | narrow(dtype, in[3]) << 16);
}

/* data + i elements; NULL stays NULL. */
__host__ __device__ inline char *at(const void *data, int dtype, int64_t i)
{
    return data == nullptr ? nullptr : (char *)data + i * bytes_of(dtype);
}

/*
 * Two f64 sums over a block's threads, in an order that depends on nothing. The result is thread 0's. Every thread of
 * the block calls it, once a kernel.
 */
__device__ inline void block_sum(double sums[2])
{
    __shared__ double lanes[2][N_THREADS];
    const int lane = (int)threadIdx.x;

    lanes[0][lane] = sums[0];
    lanes[1][lane] = sums[1];
    for (int half = N_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half) {
            lanes[0][lane] += lanes[0][lane + half];
            lanes[1][lane] += lanes[1][lane + half];
        }
    }
    sums[0] = lanes[0][0]; /* thread 0 wrote it itself */
    sums[1] = lanes[1][0];
}

/* Writes a block's two sums; a second kernel makes the total of all. */
__device__ inline void put_partial(double *partials, double sums[2])
{
    block_sum(sums);
    if (threadIdx.x == 0) {
        partials[2 * blockIdx.x] = sums[0];
        partials[2 * blockIdx.x + 1] = sums[1];
    }
}

/* The two sums over the partials [first, last), on one block; the result is thread 0's. */
__device__ inline void sum_partials(const double *partials, int32_t first, int32_t last, double sums[2])
{
    sums[0] = sums[1] = 0.0;
    for (int32_t i = first + (int32_t)threadIdx.x; i < last; i += N_THREADS) {
        sums[0] += partials[2 * i];
        sums[1] += partials[2 * i + 1];
    }
    block_sum(sums);
}

/* A square of two 24-bit numbers is exact in f64, so the fused operation rounds as the separate ones do. */
__device__ inline double add_square(double sum, float value)
{
    return fma((double)value, (double)value, sum);
}

/* Counts inf and NaN, and leaves them out of the sum. */
__device__ inline void add_finite_square(double sums[2], float value)
{
    const bool is_finite = (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;

    sums[0] = add_square(sums[0], is_finite ? value : 0.0f);
    sums[1] += is_finite ? 0.0 : 1.0;
}

}  // namespace dsc_cuda

#endif
