/* Compiled once per instruction set: groups of elements to numbers of a format, and to codes and back. */
#include "cpu/philox.h"
#include "cpu/wide.h"
#include "quant/table.h"

#define STEP static inline __attribute__((always_inline))

#define MAGNITUDE 0x7fffffff
#define EXPONENT 0x7f800000
#define SIGN (~MAGNITUDE)

/* The range of the lanes. */
struct wide_range {
    wide low;
    wide high;
    wide_ints largest_bits;
};

STEP void extend(dsc_dtype dtype, const void *x, struct wide_range *range, int64_t i, int64_t n)
{
    wide value = dsc_wide_load_as(dtype, x, i, n); /* missing lanes are 0, which extends no range */

    range->low = dsc_wide_min(value, range->low);
    range->high = dsc_wide_max(value, range->high);
    range->largest_bits = dsc_wide_max_ints((wide_ints)value & MAGNITUDE, range->largest_bits);
}

void DSC_K(quant_range)(int64_t n, dsc_dtype dtype, const void *x, struct dsc_quant_range *range)
{
    struct wide_range lanes = {{0}, {0}, {0}};

    WITH_DTYPE(dtype, EACH_WIDE_AS, n, extend, x, &lanes);
    for (int lane = 0; lane < WIDE_LANES; lane++) {
        range->low = lanes.low[lane] < range->low ? lanes.low[lane] : range->low;
        range->high = lanes.high[lane] > range->high ? lanes.high[lane] : range->high;
    }

    int32_t largest = dsc_wide_largest_int(lanes.largest_bits);

    range->largest_bits = largest > range->largest_bits ? largest : range->largest_bits;
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
};

STEP wide random_of(bool is_random, const struct group *group, int64_t i, int64_t n)
{
    return is_random ? dsc_wide_load(group->random + i, n) : (wide){0};
}

STEP void fake_step(dsc_dtype dtype, bool is_integer, bool is_random, struct group group, int64_t i, int64_t n)
{
    wide x = dsc_wide_load_as(dtype, group.x, i, n);
    wide r = number_of(group.numbers, is_integer, is_random, group.affine, x, random_of(is_random, &group, i, n));

    dsc_wide_store_as(dtype, (r - group.affine.zero_point) * group.affine.scale, group.y, i, n);
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

STEP void decode_step(dsc_dtype dtype, bool is_integer, struct group group, int64_t i, int64_t n)
{
    int8_t bytes[WIDE_LANES] = {0};

    if (group.numbers->code_bits == 4)
        for (int64_t lane = 0, column = group.column + i; lane < n; lane++, column++)
            bytes[lane] = (int8_t)((group.codes[column / 2] >> (column % 2 * 4) & 15) - 8);
    else
        memcpy(bytes, group.codes + group.column + i, (size_t)n);

    wide_ints codes = dsc_wide_of_bytes(bytes);
    wide r = is_integer ? __builtin_convertvector(codes, wide) : float8_value(group.numbers, codes);

    dsc_wide_store_as(dtype, (r - group.affine.zero_point) * group.affine.scale, group.y, i, n);
}

#define EACH_OF(dtype, n, step, is_integer, is_random, group) EACH_WIDE_AS(dtype, n, step, is_integer, is_random, group)
#define EACH_DECODED(dtype, n, step, is_integer, group) EACH_WIDE_AS(dtype, n, step, is_integer, group)

/* Runs step over n elements, with constants for the dtype, the kind of format, and whether it is random. */
#define RUN(step, is_random, dtype, n, group)                             \
    do {                                                                  \
        if ((group).numbers->mantissa_bits < 0)                           \
            WITH_DTYPE(dtype, EACH_OF, n, step, true, is_random, group);  \
        else                                                              \
            WITH_DTYPE(dtype, EACH_OF, n, step, false, is_random, group); \
    } while (0)

static void *at(const void *data, dsc_dtype dtype, int64_t i)
{
    return data == NULL ? NULL : (char *)data + i * (dtype == DSC_DTYPE_F32 ? 4 : 2);
}

static struct group group_of(const struct dsc_quant *call, struct dsc_quant_affine affine, int64_t row, int64_t column)
{
    int64_t first = row * call->n_cols + column;
    uint8_t *codes = call->codes;

    return (struct group){
        .numbers = &dsc_quant_numbers[call->format],
        .affine = affine,
        .x = at(call->x, call->dtype, first),
        .y = at(call->y, call->dtype, first),
        .codes = codes == NULL ? NULL : codes + row * dsc_quant_row_bytes(call->format, call->n_cols),
        .column = column,
    };
}

/* Random numbers of a piece of a row, at most PHILOX_DRAWN. */
static const dsc_f32 *draw(const struct dsc_quant *call, int64_t row, int64_t column, int64_t n, dsc_f32 *drawn)
{
    DSC_K(uniform_f32)(n, call->seed, (uint64_t)(call->offset + row * call->n_cols + column), drawn);
    return drawn;
}

#define PIECES(step, call, affine, row, begin, end)                                \
    do {                                                                           \
        DSC_ALIGNED dsc_f32 drawn[PHILOX_DRAWN];                                   \
                                                                                   \
        for (int64_t column = (begin); column < (end); column += PHILOX_DRAWN) {   \
            int64_t n = (end)-column < PHILOX_DRAWN ? (end)-column : PHILOX_DRAWN; \
            struct group group = group_of(call, affine, row, column);              \
                                                                                   \
            group.random = draw(call, row, column, n, drawn);                      \
            RUN(step, true, (call)->dtype, n, group);                              \
        }                                                                          \
    } while (0)

void DSC_K(quant_fake)(const struct dsc_quant *call, struct dsc_quant_affine affine, int64_t row, int64_t begin,
                       int64_t end)
{
    if (call->is_stochastic)
        PIECES(fake_step, call, affine, row, begin, end);
    else
        RUN(fake_step, false, call->dtype, end - begin, group_of(call, affine, row, begin));
}

void DSC_K(quant_code)(const struct dsc_quant *call, struct dsc_quant_affine affine, int64_t row, int64_t begin,
                       int64_t end)
{
    if (call->is_stochastic)
        PIECES(code_step, call, affine, row, begin, end);
    else
        RUN(code_step, false, call->dtype, end - begin, group_of(call, affine, row, begin));
    if (call->format == DSC_QUANT_FORMAT_int4 && end == call->n_cols) {
        int64_t n_bytes = dsc_quant_row_bytes(call->format, call->n_cols);

        memset((char *)call->codes + row * n_bytes + (end + 1) / 2, 0, (size_t)(n_bytes - (end + 1) / 2));
    }
}

void DSC_K(quant_decode)(const struct dsc_quant *call, struct dsc_quant_affine affine, int64_t row, int64_t begin,
                         int64_t end)
{
    struct group group = group_of(call, affine, row, begin);

    if (group.numbers->mantissa_bits < 0)
        WITH_DTYPE(call->dtype, EACH_DECODED, end - begin, decode_step, true, group);
    else
        WITH_DTYPE(call->dtype, EACH_DECODED, end - begin, decode_step, false, group);
}

typedef void group_loop(const struct dsc_quant *call, struct dsc_quant_affine affine, int64_t row, int64_t begin,
                        int64_t end);

STEP void each_group(const struct dsc_quant *call, int64_t first, int64_t last, group_loop *loop)
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
            struct dsc_quant_range range = {0.0f, 0.0f, 0};

            DSC_K(quant_range)(end - begin, call->dtype, at(call->x, call->dtype, row * call->n_cols + begin), &range);
            affine = dsc_quant_affine_of(call, range);
            dsc_quant_note(call, g, affine);
        }
        loop(call, affine, row, begin, end);
        begin = end;
        if (begin == call->n_cols) {
            begin = 0;
            row++;
        }
    }
}

void DSC_K(quant_fake_groups)(const struct dsc_quant *call, int64_t first, int64_t last)
{
    each_group(call, first, last, DSC_K(quant_fake));
}

void DSC_K(quant_code_groups)(const struct dsc_quant *call, int64_t first, int64_t last)
{
    each_group(call, first, last, DSC_K(quant_code));
}
