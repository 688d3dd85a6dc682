/*
 * Quantization by groups: a code of 8 or 4 bits for each element, and a scale for each group of elements of a row.
 *
 * A row of n_cols elements is cut into groups of `group` elements; the last group of a row may be shorter. With the
 * number q of an element's code:
 *
 *   symmetric    element = q * scale                    scale = largest magnitude of the group / span of the format
 *   asymmetric   element = (q - zero point) * scale     scale = (high - low) / (largest - lowest), integers only
 *
 * where low = min(0, smallest element), high = max(0, largest element), and the zero point is lowest - low / scale,
 * rounded and clamped to the format. q is element / scale + zero point, clamped to the format and rounded to its
 * nearest number, ties to even. With is_stochastic it is rounded down after a random number in [0, 1) steps is added,
 * so that its mean is the quotient: Philox4x32-7 of the seed and of the position offset + row * n_cols + column.
 *
 * Scales are rounded to scale_type before they are used; DSC_QUANT_SCALE_E8M0 is 2^(e - exponent of the format), 2^e
 * being the power of two at or below the largest magnitude (OCP Microscaling Formats 1.0, 6.3). A group whose scale
 * would be less than 2^-100 has the scale 1, and reads as zeros. A group with NaN or inf has the scale NaN, and reads
 * as NaN.
 *
 * Everything is computed in f32. Results have the same bits for any thread count and any instruction set.
 */
#ifndef DSC_QUANT_H
#define DSC_QUANT_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dsc_quant_format {
#define DSC_QUANT(name, code_bits, lowest, largest, span, exponent, mantissa_bits, least_exponent) \
    DSC_QUANT_FORMAT_##name,
#include "dsc/quant_formats.inc"
#undef DSC_QUANT
    DSC_QUANT_FORMAT_COUNT
} dsc_quant_format;

typedef enum dsc_quant_scale {
    DSC_QUANT_SCALE_F32 = 0,
    DSC_QUANT_SCALE_BF16 = 1,
    DSC_QUANT_SCALE_F16 = 2,
    DSC_QUANT_SCALE_E8M0 = 3, /* a power of two; symmetric only */
    DSC_QUANT_SCALE_COUNT = 4
} dsc_quant_scale;

/* Finds a format by its name. DSC_ENOTFOUND lists the known names. */
DSC_API dsc_status dsc_quant_find(const char *name, dsc_quant_format *out_format);

/*
 * Bytes of the codes of a row: one for each element, or for int4 4 * ceil(n_cols / 8): two codes + 8 in a byte, the
 * first one in the low half, and zeros up to the end of the row. Groups of a row. Both 0 for negative or unknown
 * arguments.
 */
DSC_API int64_t dsc_quant_row_bytes(dsc_quant_format format, int64_t n_cols);
DSC_API int64_t dsc_quant_n_groups(int64_t n_cols, int64_t group);

struct dsc_quant {
    int64_t n_rows;
    int64_t n_cols;
    dsc_dtype dtype; /* of x and y */
    dsc_quant_format format;
    int64_t group; /* > 0 */
    bool is_symmetric;
    bool has_scales; /* scales and zero_points are given */
    bool is_stochastic;
    dsc_quant_scale scale_type;
    uint64_t seed;
    int64_t offset;
    const void *x;
    void *y;             /* may be x */
    void *codes;         /* int8_t, or bytes; [n_rows, dsc_quant_row_bytes] */
    float *scales;       /* [n_rows, n_groups] */
    int8_t *zero_points; /* [n_rows, n_groups]; NULL if symmetric */
};

/* x -> codes, and scales and zero_points unless they are given. A NaN gets the code 0, or NaN in a float8 format. */
DSC_API dsc_status dsc_quant_quantize(const struct dsc_quant *call, const struct dsc_par *par);

/* codes, scales, zero_points -> y. */
DSC_API dsc_status dsc_quant_dequantize(const struct dsc_quant *call, const struct dsc_par *par);

/* x -> y: both in one pass, without codes. scales and zero_points are only read, with has_scales. */
DSC_API dsc_status dsc_quant_fake(const struct dsc_quant *call, const struct dsc_par *par);

/* The argument checks of the three calls, for callers that run the call on a device: dsc_quant_fake_check and so on. */
#define DSC_QUANT_CALL(name) DSC_API dsc_status dsc_quant_##name##_check(const struct dsc_quant *call);
#include "dsc/quant_calls.inc"
#undef DSC_QUANT_CALL

/*
 * The product of rows with a weight that is held as packed codes:
 *
 *   y[i][j] = sum of x[i][column] * (code[j][column] - 2^(bits - 1)) * scale[j][column / group], + bias[j]
 *
 * A row of codes is compressed-tensors' int32 words, 4 * ceil(n_cols * bits / 32) bytes: code 0 in the lowest bits of
 * byte 0. Bits after the last code are not used.
 *
 * Everything is computed in f32, in one order: within a group, column i adds to sum i % 16 of 16 (one rounding for
 * product and sum); the sums of each group, times its scale, add up over the groups; the 16 totals are folded in
 * halves. So an element has the same bits for any n_rows, any thread count and any instruction set.
 */
struct dsc_quant_product {
    int64_t n_rows;    /* of x and y */
    int64_t n_cols;    /* of x and of the weight */
    int64_t n_outputs; /* rows of the weight, columns of y */
    int64_t group;     /* > 0 */
    int32_t bits;      /* 8 or 4 */
    dsc_dtype dtype;   /* of x and y */
    dsc_dtype scale_dtype;
    dsc_dtype bias_dtype;
    const void *x;
    const void *codes;
    const void *scales; /* [n_outputs, n_groups] */
    const void *bias;   /* [n_outputs], or NULL */
    void *y;            /* overlaps no operand */
};

DSC_API dsc_status dsc_quant_product(const struct dsc_quant_product *call, const struct dsc_par *par);

#ifdef __cplusplus
}
#endif
#endif
