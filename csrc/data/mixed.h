/* The hash function of this folder: the finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom
 * number generators, OOPSLA 2014). */
#ifndef DSC_DATA_MIXED_H
#define DSC_DATA_MIXED_H

#include <stdint.h>

#define DSC_GOLDEN 0x9e3779b97f4a7c15u

static inline uint64_t dsc_mixed(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

#endif
