/*
 * A stand-in for the CUDA runtime's header: the sources of csrc/cuda compile with it as C++ and run on the host. A
 * launch runs its blocks one after another and the threads of a block as coroutines that change at __syncthreads().
 * Memory is host memory. Streams are ignored. The order of threads alternates between upwards and downwards, so that a
 * missing barrier shows. A barrier that only some threads of a block reach ends the program.
 */
#ifndef DSC_EMULATED_CUDA_RUNTIME_H
#define DSC_EMULATED_CUDA_RUNTIME_H

#include "base/half.h"
#include "control.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

#define CUDART_VERSION 12000

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(n_threads)
#define __shared__ static

struct dim3 {
    unsigned x, y, z;
    explicit dim3(unsigned n) : x(n), y(1), z(1) {}
};

/* Aligned as on a device, where a misaligned access is a fault. */
struct alignas(8) uint2 {
    uint32_t x, y;
};

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

static inline uint2 make_uint2(uint32_t x, uint32_t y)
{
    return {x, y};
}

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

static inline uint32_t __float_as_uint(float value)
{
    return dsc_f32_bits(value);
}

static inline float __uint_as_float(uint32_t bits)
{
    return dsc_f32_from_bits(bits);
}

static inline double __longlong_as_double(long long bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float dsc_emulated_f16_to_f32(uint32_t half)
{
    return dsc_f16_to_f32((uint16_t)half);
}

static inline uint32_t dsc_emulated_f32_to_f16(float value)
{
    return dsc_f32_to_f16(value);
}

typedef enum {
    cudaSuccess = 0,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorLaunchFailure = 719,
} cudaError_t;

typedef void *cudaStream_t;
typedef enum { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged } cudaMemoryType;
typedef enum { cudaMemcpyDeviceToDevice = 3 } cudaMemcpyKind;

struct cudaPointerAttributes {
    cudaMemoryType type;
};

extern "C" __attribute__((visibility("default"))) struct dsc_emulator dsc_emulator;
struct dsc_emulator dsc_emulator = {12000, 1, 0, nullptr, 0, 0, 0};

static inline cudaError_t cudaGetLastError()
{
    return cudaSuccess;
}

static inline const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorLaunchFailure ? "unspecified launch failure" : "some error";
}

static inline const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorLaunchFailure ? "cudaErrorLaunchFailure" : "cudaError";
}

static inline cudaError_t cudaDriverGetVersion(int *version)
{
    *version = dsc_emulator.driver_version;
    return cudaSuccess;
}

static inline cudaError_t cudaGetDeviceCount(int *n_devices)
{
    if (dsc_emulator.driver_version < CUDART_VERSION)
        return cudaErrorInsufficientDriver;
    *n_devices = dsc_emulator.n_devices;
    return dsc_emulator.n_devices > 0 ? cudaSuccess : cudaErrorNoDevice;
}

static inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *data)
{
    attributes->type = data == dsc_emulator.host_pointer ? cudaMemoryTypeUnregistered : cudaMemoryTypeDevice;
    return cudaSuccess;
}

static inline cudaError_t cudaMemsetAsync(void *data, int value, size_t n_bytes, cudaStream_t)
{
    memset(data, value, n_bytes);
    return cudaSuccess;
}

static inline cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n_bytes, cudaMemcpyKind, cudaStream_t)
{
    memcpy(dst, src, n_bytes);
    return cudaSuccess;
}

/* The coroutines of one block. */
struct dsc_emulated_index {
    unsigned x;
};

static dsc_emulated_index threadIdx, blockIdx;

namespace dsc_emulated {

constexpr unsigned MAX_THREADS = 256;
constexpr size_t STACK_BYTES = 64 * 1024;

enum thread_state { RUNNING, AT_BARRIER, DONE };

static ucontext_t scheduler, contexts[MAX_THREADS];
static thread_state states[MAX_THREADS];
static char *stacks;
static void (*body)(void *);
static void *body_arg;

static inline void yield(thread_state state)
{
    const unsigned thread = threadIdx.x;

    states[thread] = state;
    swapcontext(&contexts[thread], &scheduler);
}

static inline void run_thread()
{
    body(body_arg);
    yield(DONE);
}

static inline void start_thread(unsigned thread)
{
    getcontext(&contexts[thread]);
    contexts[thread].uc_stack.ss_sp = stacks + thread * STACK_BYTES;
    contexts[thread].uc_stack.ss_size = STACK_BYTES;
    contexts[thread].uc_link = nullptr;
    states[thread] = RUNNING;
    makecontext(&contexts[thread], run_thread, 0);
}

/* Runs all threads up to their next barrier or their end; true when they have ended. */
static inline bool run_round(unsigned n_threads, bool is_upwards)
{
    unsigned n_done = 0;

    for (unsigned i = 0; i < n_threads; i++) {
        threadIdx.x = is_upwards ? i : n_threads - 1 - i;
        swapcontext(&scheduler, &contexts[threadIdx.x]);
    }
    for (unsigned i = 0; i < n_threads; i++)
        n_done += states[i] == DONE;
    if (n_done != 0 && n_done != n_threads) {
        fprintf(stderr, "block %u: %u of %u threads ended while the others wait at a barrier\n", blockIdx.x, n_done, n_threads);
        abort();
    }
    return n_done == n_threads;
}

static inline void run_block(unsigned block, unsigned n_threads)
{
    blockIdx.x = block;
    for (unsigned thread = 0; thread < n_threads; thread++)
        start_thread(thread);
    for (unsigned round = block; !run_round(n_threads, round % 2 == 0); round++)
        ;
}

}  // namespace dsc_emulated

static inline void __syncthreads()
{
    dsc_emulated::yield(dsc_emulated::AT_BARRIER);
}

template <class Params>
cudaError_t cudaLaunchKernel(void (*kernel)(Params), dim3 grid, dim3 block, void **argv, size_t, cudaStream_t)
{
    struct call {
        void (*kernel)(Params);
        const Params *params;
    } call = {kernel, (const Params *)argv[0]};

    dsc_emulator.n_launches++;
    dsc_emulator.n_blocks += grid.x;
    if (dsc_emulator.max_param_bytes < (int32_t)sizeof(Params))
        dsc_emulator.max_param_bytes = (int32_t)sizeof(Params);
    if (dsc_emulator.n_launches == dsc_emulator.fail_at_launch)
        return cudaErrorLaunchFailure;
    if (dsc_emulated::stacks == nullptr)
        dsc_emulated::stacks = (char *)malloc(dsc_emulated::MAX_THREADS * dsc_emulated::STACK_BYTES);
    if (dsc_emulated::stacks == nullptr || block.x > dsc_emulated::MAX_THREADS || grid.x == 0) {
        fprintf(stderr, "the emulator cannot run %u blocks of %u threads\n", grid.x, block.x);
        abort();
    }
    dsc_emulated::body = [](void *arg) {
        const struct call *c = (const struct call *)arg;
        c->kernel(*c->params);
    };
    dsc_emulated::body_arg = &call;
    for (unsigned i = 0; i < grid.x; i++)
        dsc_emulated::run_block(i, block.x);
    dsc_emulated::body_arg = nullptr;
    return cudaSuccess;
}

#endif
