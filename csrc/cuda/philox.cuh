/* csrc/cpu/philox.h on a device: random words that depend only on a seed and a position. */
#ifndef DSC_CUDA_PHILOX_CUH
#define DSC_CUDA_PHILOX_CUH

#include "cuda/common.cuh"

namespace dsc_cuda {

constexpr int PHILOX_ROUNDS = 7;
constexpr int PHILOX_WORDS = 4; /* of one counter */

/* The words of Philox4x32-7. */
__device__ inline void philox(uint64_t seed, uint64_t counter, uint32_t words[PHILOX_WORDS])
{
    uint32_t key0 = (uint32_t)seed;
    uint32_t key1 = (uint32_t)(seed >> 32);

    words[0] = (uint32_t)counter;
    words[1] = (uint32_t)(counter >> 32);
    words[2] = words[3] = 0u;
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        const uint64_t product0 = (uint64_t)0xD2511F53u * words[0];
        const uint64_t product1 = (uint64_t)0xCD9E8D57u * words[2];

        words[0] = (uint32_t)(product1 >> 32) ^ words[1] ^ key0;
        words[2] = (uint32_t)(product0 >> 32) ^ words[3] ^ key1;
        words[1] = (uint32_t)product1;
        words[3] = (uint32_t)product0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

}  // namespace dsc_cuda

#endif
