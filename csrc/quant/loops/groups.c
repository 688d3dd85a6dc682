/* Compiled once per instruction set: groups of elements to numbers of a format, and to codes and back. */
#include "cpu/philox.h"
#include "cpu/wide.h"
#include "quant/table.h"

#define STEP static inline __attribute__((always_inline))

#define MAGNITUDE 0x7fffffff
#define EXPONENT 0x7f800000
#define SIGN (~MAGNITUDE)

/* Results from this size on do not fit into a core's share of the last cache, so nothing would find them there. */
#define STREAMED_BYTES (32 << 20)

/* The range of the lanes. */
struct wide_range {
    wide low;
    wide high;
    wide_ints largest_bits;
};

/* Symmetric groups need the largest magnitude only. */
STEP void extend(dsc_dtype dtype, bool is_symmetric, const void *x, struct wide_range *range, int64_t i, int64_t n)
{
    wide value = dsc_wide_load_as(dtype, x, i, n); /* missing lanes are 0, which extends no range */

    if (!is_symmetric) {
        range->low = dsc_wide_min(value, range->low);
        range->high = dsc_wide_max(value, range->high);
    }
    range->largest_bits = dsc_wide_max_ints((wide_ints)value & MAGNITUDE, range->largest_bits);
}

STEP struct dsc_quant_range range_of(dsc_dtype dtype, bool is_symmetric, int64_t n, const void *x)
{
    struct wide_range lanes = {{0}, {0}, {0}};
    struct dsc_quant_range range = {0.0f, 0.0f, 0};

    EACH_WIDE_AS(dtype, n, extend, is_symmetric, x, &lanes);
    if (!is_symmetric) {
        range.low = dsc_wide_least(lanes.low);
        range.high = -dsc_wide_least(-lanes.high);
    }
    range.largest_bits = dsc_wide_largest_int(lanes.largest_bits);
    return range;
}

#define RANGE(dtype, n, x, range) *(range) = range_of(dtype, false, n, x)

void DSC_K(quant_range)(int64_t n, dsc_dtype dtype, const void *x, struct dsc_quant_range *range)
{
    WITH_DTYPE(dtype, RANGE, n, x, range);
}

/* The nearest integer, ties to even, of |x| < 2^22. */
STEP wide nearest(wide x)
{
    return (x + ROUNDER) - ROUNDER;
}

STEP wide below(wide x)
{
    wide r = nearest(x);

    return dsc_wide_where_less(x, r, r - 1.0f, r);
}

/* Clamps to the format; a NaN stays. */
STEP wide clamp(const struct dsc_quant_numbers *numbers, wide x)
{
    return dsc_wide_max(dsc_wide_all(numbers->lowest), dsc_wide_min(dsc_wide_all(numbers->largest), x));
}

/* Rounds to an integer: to the nearest, or down after `random` is added. */
STEP wide integer_of(bool is_random, wide x, wide random)
{
    return is_random ? below(x + random) : nearest(x);
}

/* Rounds x, which is in the format's range, to a number of a floating-point format. */
STEP wide float_of(const struct dsc_quant_numbers *numbers, bool is_random, wide x, wide random)
{
    int32_t shift = numbers->mantissa_bits << 23;
    wide_ints least = (wide_ints){0} + ((127 + numbers->least_exponent) << 23);
    wide_ints exponent = dsc_wide_max_ints((wide_ints)x & EXPONENT, least);
    wide per_step = (wide)((254 << 23) - exponent + shift);
    wide step = (wide)(exponent - shift);
    wide r = integer_of(is_random, x * per_step, random) * step;

    return (wide)((wide_ints)r | ((wide_ints)x & SIGN));
}

/* The number of the format that stands for x. */
STEP wide number_of(const struct dsc_quant_numbers *numbers, bool is_integer, bool is_random,
                    struct dsc_quant_affine affine, wide x, wide random)
{
    wide quotient = x / dsc_wide_all(affine.scale);
    wide r = is_integer ? integer_of(is_random, clamp(numbers, quotient + affine.zero_point), random)
                        : float_of(numbers, is_random, clamp(numbers, quotient), random);

    return is_random ? clamp(numbers, r) : r; /* a sum with a random number may round up to one above the largest */
}

/* Numbers of a float8 format to its codes. */
STEP wide_ints float8_of(const struct dsc_quant_numbers *numbers, wide r)
{
    int32_t bits = numbers->mantissa_bits;
    wide_ints magnitude = (wide_ints)r & MAGNITUDE;
    wide_ints normal = (magnitude >> (23 - bits)) - ((126 + numbers->least_exponent) << bits);
    /* Below the normal numbers: an integer count of the smallest number, as the lowest bits of a sum. */
    wide count = (wide)magnitude * dsc_quant_power_of_two(bits - numbers->least_exponent);
    wide_ints subnormal = (wide_ints)(count + 0x1p23f) & 0x7f;
    wide_ints is_normal = magnitude >= ((127 + numbers->least_exponent) << 23);
    wide_ints code = (is_normal & normal) | (~is_normal & subnormal);
    wide_ints is_nan = magnitude > DSC_QUANT_INF_BITS;

    wide_ints sign = ((wide_ints)r >> 24) & 0x80;

    return (is_nan & 0x7f) | (~is_nan & (code | sign));
}

STEP wide float8_value(const struct dsc_quant_numbers *numbers, wide_ints code)
{
    int32_t bits = numbers->mantissa_bits;
    wide_ints magnitude = code & 0x7f;
    wide_ints normal = (magnitude << (23 - bits)) + ((126 + numbers->least_exponent) << 23);
    wide subnormal = __builtin_convertvector(magnitude, wide) * dsc_quant_power_of_two(numbers->least_exponent - bits);
    wide_ints is_normal = magnitude >= (1 << bits);
    wide_ints value = (is_normal & normal) | (~is_normal & (wide_ints)subnormal);
    /* e5m2 is IEEE 754's: the highest exponent is inf and NaN. e4m3 has one NaN. */
    int32_t inf = bits == 2 ? 0x7c : 0x7f;
    wide_ints is_inf = bits == 2 ? magnitude == inf : (wide_ints){0};
    wide_ints is_nan = bits == 2 ? magnitude > inf : magnitude == inf;

    value = (is_inf & DSC_QUANT_INF_BITS) | (is_nan & (int32_t)DSC_QUANT_NAN_BITS) | (~(is_inf | is_nan) & value);
    return (wide)(value | ((code & 0x80) << 24));
}

/* The operands of the steps of one group. Step 0 takes the element in `column`. */
struct group {
    const struct dsc_quant_numbers *numbers;
    struct dsc_quant_affine affine;
    const dsc_f32 *random;
    const void *x;
    void *y;
    uint8_t *codes; /* of the row */
    int64_t column;
    bool is_streamed; /* y is aligned to a register, and goes past the caches */
};

STEP wide random_of(bool is_random, const struct group *group, int64_t i, int64_t n)
{
    return is_random ? dsc_wide_load(group->random + i, n) : (wide){0};
}

STEP void fake_step(dsc_dtype dtype, bool is_integer, bool is_random, struct group group, int64_t i, int64_t n)
{
    wide x = dsc_wide_load_as(dtype, group.x, i, n);
    wide r = number_of(group.numbers, is_integer, is_random, group.affine, x, random_of(is_random, &group, i, n));
    wide value = (r - group.affine.zero_point) * group.affine.scale;

    if (dtype == DSC_DTYPE_F32 && n == WIDE_LANES && group.is_streamed)
        dsc_wide_stream(value, (dsc_f32 *)group.y + i);
    else
        dsc_wide_store_as(dtype, value, group.y, i, n);
}

/* Two codes in a byte. The codes of a row are written in order: the first of a byte clears it. */
static void put_halves(uint8_t *codes, int64_t column, const int8_t *numbers, int64_t n)
{
    for (int64_t i = 0; i < n; i++, column++) {
        uint8_t code = (uint8_t)(numbers[i] + 8);
        uint8_t *byte = codes + column / 2;

        *byte = (uint8_t)(column % 2 == 0 ? code : *byte | code << 4);
    }
}

STEP void code_step(dsc_dtype dtype, bool is_integer, bool is_random, struct group group, int64_t i, int64_t n)
{
    wide x = dsc_wide_load_as(dtype, group.x, i, n);
    wide r = number_of(group.numbers, is_integer, is_random, group.affine, x, random_of(is_random, &group, i, n));
    wide_ints is_number = r == r;
    wide_ints codes =
        is_integer ? __builtin_convertvector((wide)(is_number & (wide_ints)r), wide_ints) : float8_of(group.numbers, r);
    int8_t bytes[WIDE_LANES];

    dsc_wide_to_bytes(codes, bytes);
    if (group.numbers->code_bits == 4)
        put_halves(group.codes, group.column + i, bytes, n);
    else
        memcpy(group.codes + group.column + i, bytes, (size_t)n);
}

STEP void decode_step(dsc_dtype dtype, bool is_integer, bool is_random, struct group group, int64_t i, int64_t n)
{
    int8_t bytes[WIDE_LANES] = {0};

    (void)is_random;
    if (group.numbers->code_bits == 4)
        for (int64_t lane = 0, column = group.column + i; lane < n; lane++, column++)
            bytes[lane] = (int8_t)((group.codes[column / 2] >> (column % 2 * 4) & 15) - 8);
    else
        memcpy(bytes, group.codes + group.column + i, (size_t)n);

    wide_ints codes = dsc_wide_of_bytes(bytes);
    wide r = is_integer ? __builtin_convertvector(codes, wide) : float8_value(group.numbers, codes);

    dsc_wide_store_as(dtype, (r - group.affine.zero_point) * group.affine.scale, group.y, i, n);
}

typedef void step_of_group(dsc_dtype dtype, bool is_integer, bool is_random, struct group group, int64_t i, int64_t n);

static void *at(const void *data, dsc_dtype dtype, int64_t i)
{
    return data == NULL ? NULL : (char *)data + i * (dtype == DSC_DTYPE_F32 ? 4 : 2);
}

/* Columns [begin, end) of a row, all of one group. dtype, is_integer, is_random and step are constants. */
STEP void columns(dsc_dtype dtype, bool is_integer, bool is_random, step_of_group *step, const struct dsc_quant *call,
                  struct dsc_quant_affine affine, int64_t row, int64_t begin, int64_t end)
{
    int64_t row_bytes = call->codes == NULL ? 0 : dsc_quant_row_bytes(call->format, call->n_cols);
    int64_t longest = is_random ? PHILOX_DRAWN : end - begin;
    bool is_large = call->n_rows * call->n_cols >= STREAMED_BYTES / (int64_t)sizeof(dsc_f32);
    DSC_ALIGNED dsc_f32 drawn[PHILOX_DRAWN];
    struct group group = {.numbers = &dsc_quant_numbers[call->format], .affine = affine, .random = drawn};

    for (int64_t column = begin; column < end; column += longest) {
        int64_t n = end - column < longest ? end - column : longest;
        int64_t first = row * call->n_cols + column;

        group.x = at(call->x, dtype, first);
        group.y = at(call->y, dtype, first);
        group.codes = (uint8_t *)call->codes + row * row_bytes;
        group.column = column;
        group.is_streamed = is_large && (uintptr_t)group.y % sizeof(wide) == 0;
        if (is_random)
            DSC_K(uniform_f32)(n, call->seed, (uint64_t)(call->offset + first), drawn);
        EACH_WIDE_AS(dtype, n, step, is_integer, is_random, group);
    }
}

STEP void fake_columns(dsc_dtype dtype, bool is_integer, bool is_random, const struct dsc_quant *call,
                       struct dsc_quant_affine affine, int64_t row, int64_t begin, int64_t end)
{
    columns(dtype, is_integer, is_random, fake_step, call, affine, row, begin, end);
}

STEP void code_columns(dsc_dtype dtype, bool is_integer, bool is_random, const struct dsc_quant *call,
                       struct dsc_quant_affine affine, int64_t row, int64_t begin, int64_t end)
{
    columns(dtype, is_integer, is_random, code_step, call, affine, row, begin, end);
    if (dsc_quant_numbers[call->format].code_bits == 4 && end == call->n_cols) {
        int64_t row_bytes = dsc_quant_row_bytes(call->format, call->n_cols);

        memset((char *)call->codes + row * row_bytes + (end + 1) / 2, 0, (size_t)(row_bytes - (end + 1) / 2));
    }
}

STEP void decode_columns(dsc_dtype dtype, bool is_integer, bool is_random, const struct dsc_quant *call,
                         struct dsc_quant_affine affine, int64_t row, int64_t begin, int64_t end)
{
    columns(dtype, is_integer, is_random, decode_step, call, affine, row, begin, end);
}

typedef void of_columns(dsc_dtype dtype, bool is_integer, bool is_random, const struct dsc_quant *call,
                        struct dsc_quant_affine affine, int64_t row, int64_t begin, int64_t end);

/* Groups first <= g < last, with the constants of `columns`. */
STEP void groups(dsc_dtype dtype, bool is_integer, bool is_random, of_columns *run, const struct dsc_quant *call,
                 int64_t first, int64_t last)
{
    int64_t n_groups = dsc_quant_n_groups(call->n_cols, call->group);
    int64_t row = first / n_groups;
    int64_t begin = first % n_groups * call->group;

    for (int64_t g = first; g < last; g++) {
        int64_t end = begin + call->group < call->n_cols ? begin + call->group : call->n_cols;
        struct dsc_quant_affine affine;

        if (call->has_scales) {
            affine = dsc_quant_given(call, g);
        } else {
            const void *x = at(call->x, dtype, row * call->n_cols + begin);

            affine = dsc_quant_affine_of(call, &dsc_quant_numbers[call->format],
                                         call->is_symmetric ? range_of(dtype, true, end - begin, x)
                                                            : range_of(dtype, false, end - begin, x));
            dsc_quant_note(call, g, affine);
        }
        run(dtype, is_integer, is_random, call, affine, row, begin, end);
        begin = end;
        if (begin == call->n_cols) {
            begin = 0;
            row++;
        }
    }
}

/* Calls run(dtype, is_integer, is_random, ...) with constants for the three: a loop for each kind of call. */
#define WITH_CONSTANTS(run, call, ...)                                         \
    do {                                                                       \
        bool is_integer = dsc_quant_numbers[(call)->format].mantissa_bits < 0; \
                                                                               \
        if (is_integer && (call)->is_stochastic)                               \
            WITH_DTYPE((call)->dtype, run, true, true, __VA_ARGS__);           \
        else if (is_integer)                                                   \
            WITH_DTYPE((call)->dtype, run, true, false, __VA_ARGS__);          \
        else if ((call)->is_stochastic)                                        \
            WITH_DTYPE((call)->dtype, run, false, true, __VA_ARGS__);          \
        else                                                                   \
            WITH_DTYPE((call)->dtype, run, false, false, __VA_ARGS__);         \
    } while (0)

void DSC_K(quant_fake)(const struct dsc_quant *call, struct dsc_quant_affine affine, int64_t row, int64_t begin,
                       int64_t end)
{
    WITH_CONSTANTS(fake_columns, call, call, affine, row, begin, end);
    dsc_wide_stream_end();
}

void DSC_K(quant_code)(const struct dsc_quant *call, struct dsc_quant_affine affine, int64_t row, int64_t begin,
                       int64_t end)
{
    WITH_CONSTANTS(code_columns, call, call, affine, row, begin, end);
}

void DSC_K(quant_decode)(const struct dsc_quant *call, struct dsc_quant_affine affine, int64_t row, int64_t begin,
                         int64_t end)
{
    struct dsc_quant read = *call;

    read.is_stochastic = false;
    WITH_CONSTANTS(decode_columns, &read, call, affine, row, begin, end);
}

void DSC_K(quant_fake_groups)(const struct dsc_quant *call, int64_t first, int64_t last)
{
    WITH_CONSTANTS(groups, call, fake_columns, call, first, last);
    dsc_wide_stream_end();
}

void DSC_K(quant_code_groups)(const struct dsc_quant *call, int64_t first, int64_t last)
{
    WITH_CONSTANTS(groups, call, code_columns, call, first, last);
}
