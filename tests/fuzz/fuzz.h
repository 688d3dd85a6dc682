/*
 * Reads fuzz input as numbers, and stops the program with a sentence when a property does not hold. A target defines LLVMFuzzerTestOneInput; it is
 * linked with driver.c, or under clang with -fsanitize=fuzzer instead.
 */
#ifndef DSC_FUZZ_H
#define DSC_FUZZ_H

#include "dsc/status.h"
#include "dsc/types.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

#define REQUIRE(condition)                                                                                      \
    do {                                                                                                        \
        if (!(condition)) {                                                                                     \
            fprintf(stderr, "%s:%d: %s is false (%s)\n", __FILE__, __LINE__, #condition, dsc_last_error());     \
            abort();                                                                                            \
        }                                                                                                       \
    } while (0)

struct input {
    const uint8_t *data;
    size_t n_left;
};

/* Zero past the end, so that every input is a whole one. */
static inline uint8_t take_byte(struct input *input)
{
    if (input->n_left == 0)
        return 0;
    input->n_left--;
    return *input->data++;
}

/* In [0, n). */
static inline int64_t take_below(struct input *input, int64_t n)
{
    int64_t low = take_byte(input); /* one after the other: the order of operands is the compiler's */

    return (low | (int64_t)take_byte(input) << 8) % n;
}

/* Any bits; one time in eight near an end of the type, where sums overflow. */
static inline int64_t take_wild(struct input *input)
{
    static const int64_t ends[] = {INT64_MAX, INT64_MIN, INT64_MAX - 1, INT64_MAX / 2, INT64_C(1) << 62, -1, 0, 1};
    uint8_t kind = take_byte(input);
    uint64_t bits = 0;

    if (kind % 8 == 7)
        return ends[kind / 8 % 8];
    for (int i = 0; i < kind % 8; i++) /* short numbers are as frequent as long ones */
        bits = bits << 8 | take_byte(input);
    return (int64_t)bits;
}

#endif
