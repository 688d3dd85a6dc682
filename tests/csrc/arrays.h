/*
 * Arrays of elements for kernel tests. Guard bytes lie on both sides. An array may begin at any byte address, and holds
 * random or special values.
 */
#ifndef DSC_TEST_ARRAYS_H
#define DSC_TEST_ARRAYS_H

#include "test.h"

#include "base/half.h"

#define GUARD_BYTES 64
#define GUARD_BYTE 0xa5

struct array {
    unsigned char *memory;
    unsigned char *data; /* memory + GUARD_BYTES + shift */
    int64_t n;
    dsc_dtype dtype;
    size_t n_bytes; /* of memory */
};

/* shift_bytes moves the elements off their natural alignment. */
static inline struct array array_create(dsc_dtype dtype, int64_t n, size_t shift_bytes)
{
    struct array array = {.n = n, .dtype = dtype, .n_bytes = (size_t)n * dsc_dtype_bytes(dtype) + 2 * GUARD_BYTES + shift_bytes};

    array.memory = test_alloc(array.n_bytes);
    memset(array.memory, GUARD_BYTE, array.n_bytes);
    array.data = array.memory + GUARD_BYTES + shift_bytes;
    return array;
}

static inline struct array array_copy(const struct array *from, size_t shift_bytes)
{
    struct array array = array_create(from->dtype, from->n, shift_bytes);

    memcpy(array.data, from->data, (size_t)from->n * dsc_dtype_bytes(from->dtype));
    return array;
}

/* Frees the array, and checks that nothing was written outside of it. */
static inline void array_destroy(struct array *array)
{
    size_t begin = (size_t)(array->data - array->memory);
    size_t end = begin + (size_t)array->n * dsc_dtype_bytes(array->dtype);
    size_t n_changed = 0;

    for (size_t i = 0; i < array->n_bytes; i++)
        if (i < begin || i >= end)
            n_changed += array->memory[i] != GUARD_BYTE;
    CHECK_EQ(n_changed, 0);
    free(array->memory);
    array->memory = NULL;
}

static inline uint32_t array_bits(const struct array *array, int64_t i)
{
    uint32_t word;
    uint16_t half;

    if (array->dtype == DSC_DTYPE_F32) {
        memcpy(&word, array->data + 4 * i, sizeof word);
        return word;
    }
    memcpy(&half, array->data + 2 * i, sizeof half);
    return half;
}

static inline void array_set_bits(struct array *array, int64_t i, uint32_t bits)
{
    uint16_t half = (uint16_t)bits;

    if (array->dtype == DSC_DTYPE_F32)
        memcpy(array->data + 4 * i, &bits, sizeof bits);
    else
        memcpy(array->data + 2 * i, &half, sizeof half);
}

static inline float array_get(const struct array *array, int64_t i)
{
    uint32_t bits = array_bits(array, i);

    if (array->dtype == DSC_DTYPE_F32)
        return dsc_f32_from_bits(bits);
    return array->dtype == DSC_DTYPE_BF16 ? dsc_bf16_to_f32((uint16_t)bits) : dsc_f16_to_f32((uint16_t)bits);
}

static inline void array_set(struct array *array, int64_t i, float value)
{
    if (array->dtype == DSC_DTYPE_F32)
        array_set_bits(array, i, dsc_f32_bits(value));
    else
        array_set_bits(array, i, array->dtype == DSC_DTYPE_BF16 ? dsc_f32_to_bf16(value) : dsc_f32_to_f16(value));
}

/* Uniform in [-scale, scale), or in [0, scale) if is_positive. */
static inline void array_fill(struct array *array, double scale, bool is_positive, uint64_t *random)
{
    for (int64_t i = 0; i < array->n; i++) {
        double value = scale * test_uniform(random);

        array_set(array, i, (float)(is_positive ? fabs(value) : value));
    }
}

/* Fills the array with any bit patterns. NaNs, infinities and subnormals are frequent. */
static inline void array_fill_bits(struct array *array, uint64_t *random)
{
    static const uint32_t specials[] = {0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f812345, 0x00000001,
                                        0x807fffff, 0x00800000, 0x7f7fffff, 0x477fe000, 0x33800000, 0x3f800000};

    for (int64_t i = 0; i < array->n; i++) {
        if (test_below(random, 4) == 0)
            array_set(array, i, dsc_f32_from_bits(specials[test_below(random, sizeof specials / sizeof specials[0])]));
        else
            array_set_bits(array, i, (uint32_t)test_random(random));
    }
}

/*
 * Checks for equal bits. A NaN equals any NaN: its payload depends on the order of operands, and the compiler chooses
 * that order.
 */
static inline void check_same(const struct array *a, const struct array *b, const char *what, const char *file, int line)
{
    int64_t n_different = a->n == b->n ? 0 : -1;
    int64_t first = -1;

    for (int64_t i = 0; i < a->n && n_different >= 0; i++) {
        if (array_bits(a, i) == array_bits(b, i) || (isnan(array_get(a, i)) && isnan(array_get(b, i))))
            continue;
        if (n_different++ == 0)
            first = i;
    }
    test_report(n_different == 0, file, line, "%s: %" PRId64 " of %" PRId64 " elements differ, the first is [%" PRId64 "]: %a and %a", what,
                n_different, a->n, first, first < 0 ? 0.0 : (double)array_get(a, first), first < 0 ? 0.0 : (double)array_get(b, first));
}

#define CHECK_SAME(a, b) check_same((a), (b), #a " and " #b, __FILE__, __LINE__)

static const char *const dtype_names[] = {"f32", "bf16", "f16"};

/* Lengths just below, at and above every vector width and block size. */
static const int64_t awkward_lengths[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1021, 1023, 1024, 1025, 2049, 5003};
#define N_LENGTHS ((int)(sizeof awkward_lengths / sizeof awkward_lengths[0]))

/*
 * Forces the next instruction set that this processor runs. After the last one it returns false and restores the
 * automatic choice. Start with *i = 0.
 */
static inline bool next_isa(int32_t *i, const char **out_name)
{
    bool is_runnable = false;

    while ((*out_name = dsc_cpu_isa_at((*i)++, &is_runnable)) != NULL) {
        if (is_runnable) {
            CHECK_STATUS(dsc_cpu_isa_force(*out_name), DSC_OK);
            return true;
        }
    }
    CHECK_STATUS(dsc_cpu_isa_force(NULL), DSC_OK);
    return false;
}

#endif
