/* Checks a call of dsc/quant.h, and spreads its groups over threads. */
#include "dsc/quant.h"

#include "base/fail.h"
#include "base/par.h"
#include "quant/table.h"

#include <stdio.h>
#include <string.h>

#define TABLE_ENTRY(isa, is_runnable) &DSC_K_OF(quant_kernels, isa),
static const struct dsc_quant_kernels *const tables[] = {DSC_ISA_MAP(TABLE_ENTRY)};
#undef TABLE_ENTRY

const struct dsc_quant_kernels *dsc_quant_kernels_get(void)
{
    return tables[dsc_isa_index()];
}

const struct dsc_quant_numbers dsc_quant_numbers[DSC_QUANT_FORMAT_COUNT] = {
#define DSC_QUANT(name, code_bits, lowest, largest, span, exponent, mantissa_bits, least_exponent) \
    {lowest, largest, span, code_bits, exponent, mantissa_bits, least_exponent},
#include "dsc/quant_formats.inc"
#undef DSC_QUANT
};

static const char *const names[] = {
#define DSC_QUANT(name, code_bits, lowest, largest, span, exponent, mantissa_bits, least_exponent) #name,
#include "dsc/quant_formats.inc"
#undef DSC_QUANT
};

dsc_status dsc_quant_find(const char *name, dsc_quant_format *out_format)
{
    char known[64] = "";
    size_t used = 0;

    for (int32_t i = 0; i < DSC_QUANT_FORMAT_COUNT; i++) {
        if (strcmp(names[i], name) == 0) {
            *out_format = (dsc_quant_format)i;
            return DSC_OK;
        }
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i == 0 ? "" : ", ", names[i]);
    }
    return dsc_fail(DSC_ENOTFOUND, "there is no format \"%.63s\"; the formats are %s", name, known);
}

static bool is_format(dsc_quant_format format)
{
    return (int)format >= 0 && format < DSC_QUANT_FORMAT_COUNT;
}

int64_t dsc_quant_row_bytes(dsc_quant_format format, int64_t n_cols)
{
    if (!is_format(format) || n_cols < 0)
        return 0;
    return dsc_quant_numbers[format].code_bits == 4 ? 4 * (n_cols / 8 + (n_cols % 8 != 0)) : n_cols;
}

int64_t dsc_quant_n_groups(int64_t n_cols, int64_t group)
{
    return n_cols < 0 || group < 1 ? 0 : n_cols / group + (n_cols % group != 0);
}

static dsc_status check_sizes(const struct dsc_quant *call)
{
    int64_t n_elems;
    int64_t end;

    if (call->n_rows < 0 || call->n_cols < 0)
        return dsc_fail(DSC_EINVAL, "%lld rows of %lld elements: neither may be negative", (long long)call->n_rows,
                        (long long)call->n_cols);
    if (__builtin_mul_overflow(call->n_rows, call->n_cols, &n_elems) || n_elems > INT64_MAX / (int64_t)sizeof(float))
        return dsc_fail(DSC_EOVERFLOW, "%lld rows of %lld elements hold more bytes than int64_t counts",
                        (long long)call->n_rows, (long long)call->n_cols);
    if (call->group < 1)
        return dsc_fail(DSC_EINVAL, "group is %lld, must be positive", (long long)call->group);
    if (call->is_stochastic && (call->offset < 0 || __builtin_add_overflow(call->offset, n_elems, &end)))
        return dsc_fail(DSC_EINVAL, "offset is %lld, must not be negative, and the last position must fit int64_t",
                        (long long)call->offset);
    return DSC_OK;
}

static dsc_status check_kinds(const struct dsc_quant *call)
{
    if (dsc_dtype_bytes(call->dtype) == 0)
        return dsc_fail(DSC_EINVAL, "dtype is %d, which is no dsc_dtype", (int)call->dtype);
    if (!is_format(call->format))
        return dsc_fail(DSC_EINVAL, "format is %d, which is no dsc_quant_format", (int)call->format);
    if ((int)call->scale_type < 0 || call->scale_type >= DSC_QUANT_SCALE_COUNT)
        return dsc_fail(DSC_EINVAL, "scale_type is %d, which is no dsc_quant_scale", (int)call->scale_type);
    if (!call->is_symmetric && dsc_quant_numbers[call->format].mantissa_bits >= 0)
        return dsc_fail(DSC_EINVAL, "%s has no zero points: it is symmetric only", names[call->format]);
    if (!call->is_symmetric && call->scale_type == DSC_QUANT_SCALE_E8M0)
        return dsc_fail(DSC_EINVAL, "scales that are powers of two have no zero points: they are symmetric only");
    return DSC_OK;
}

static dsc_status check_present(const struct dsc_quant *call, bool needs_scales, const void *from,
                                const char *from_name, const void *to, const char *to_name)
{
    const char *missing = from == NULL                                                              ? from_name
                          : to == NULL                                                              ? to_name
                          : needs_scales && call->scales == NULL                                    ? "scales"
                          : call->scales == NULL || call->is_symmetric || call->zero_points != NULL ? NULL
                                                                                                    : "zero_points";

    if (missing != NULL && call->n_rows > 0 && call->n_cols > 0)
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld rows of %lld elements", missing, (long long)call->n_rows,
                        (long long)call->n_cols);
    return DSC_OK;
}

static dsc_status check(const struct dsc_quant *call, bool needs_scales, const void *from, const char *from_name,
                        const void *to, const char *to_name)
{
    DSC_TRY(check_sizes(call));
    DSC_TRY(check_kinds(call));
    return check_present(call, needs_scales, from, from_name, to, to_name);
}

/* Larger groups are cut into pieces, which threads share. */
#define WHOLE_ELEMS (2 * DSC_MIN_CHUNK_ELEMS)

typedef void (*groups_loop)(const struct dsc_quant *call, int64_t first, int64_t last);
typedef void (*columns_loop)(const struct dsc_quant *call, struct dsc_quant_affine affine, int64_t row, int64_t begin,
                             int64_t end);

struct job {
    const struct dsc_quant *call;
    const struct dsc_quant_kernels *kernels;
    groups_loop groups; /* NULL: columns, with scales that are given */
    columns_loop columns;
    int64_t n_groups; /* of all rows */
    int64_t chunk_groups;
};

static void run_chunks(void *arg, int64_t first, int64_t last)
{
    const struct job *job = arg;
    const struct dsc_quant *call = job->call;
    int64_t begin = first * job->chunk_groups;
    int64_t end = last * job->chunk_groups < job->n_groups ? last * job->chunk_groups : job->n_groups;
    int64_t of_row = dsc_quant_n_groups(call->n_cols, call->group);

    if (job->groups != NULL) {
        job->groups(call, begin, end);
        return;
    }
    for (int64_t g = begin; g < end; g++) {
        int64_t column = g % of_row * call->group;
        int64_t column_end = column + call->group < call->n_cols ? column + call->group : call->n_cols;

        job->columns(call, dsc_quant_given(call, g), g / of_row, column, column_end);
    }
}

/* One large group, in pieces that begin at multiples of piece_elems, so that no two share a byte. */
struct pieces {
    const struct job *job;
    int64_t row;
    int64_t begin;
    int64_t end;
    int64_t piece_elems;
    struct dsc_quant_affine affine;
    struct dsc_quant_range ranges[DSC_MAX_CHUNKS + 2];
};

static int64_t piece_begin(const struct pieces *pieces, int64_t i)
{
    int64_t at = (pieces->begin / pieces->piece_elems + i) * pieces->piece_elems;

    return at < pieces->begin ? pieces->begin : at > pieces->end ? pieces->end : at;
}

static void find_ranges(void *arg, int64_t first, int64_t last)
{
    struct pieces *pieces = arg;
    const struct dsc_quant *call = pieces->job->call;

    for (int64_t i = first; i < last; i++) {
        int64_t at = piece_begin(pieces, i);
        size_t byte = (size_t)(pieces->row * call->n_cols + at) * dsc_dtype_bytes(call->dtype);

        pieces->job->kernels->range(piece_begin(pieces, i + 1) - at, call->dtype, (const char *)call->x + byte,
                                    &pieces->ranges[i]);
    }
}

static void run_pieces(void *arg, int64_t first, int64_t last)
{
    const struct pieces *pieces = arg;

    for (int64_t i = first; i < last; i++)
        pieces->job->columns(pieces->job->call, pieces->affine, pieces->row, piece_begin(pieces, i),
                             piece_begin(pieces, i + 1));
}

static void run_large(const struct job *job, int64_t g, const struct dsc_par *par)
{
    const struct dsc_quant *call = job->call;
    int64_t of_row = dsc_quant_n_groups(call->n_cols, call->group);
    int64_t begin = g % of_row * call->group;
    int64_t end = call->n_cols - begin < call->group ? call->n_cols : begin + call->group;
    int64_t share = (end - begin) / DSC_MAX_CHUNKS / DSC_BLOCK_ELEMS + 1;
    int64_t piece_elems = share * DSC_BLOCK_ELEMS < DSC_MIN_CHUNK_ELEMS ? DSC_MIN_CHUNK_ELEMS : share * DSC_BLOCK_ELEMS;
    struct pieces pieces = {.job = job, .row = g / of_row, .begin = begin, .end = end, .piece_elems = piece_elems};
    int64_t n_pieces = (end - 1) / piece_elems - begin / piece_elems + 1;
    struct dsc_quant_range whole = {0.0f, 0.0f, 0};

    if (call->has_scales || job->groups == NULL) {
        pieces.affine = dsc_quant_given(call, g);
    } else {
        dsc_par_run(par, n_pieces, find_ranges, &pieces);
        for (int64_t i = 0; i < n_pieces; i++) {
            const struct dsc_quant_range *range = &pieces.ranges[i];

            whole.low = range->low < whole.low ? range->low : whole.low;
            whole.high = range->high > whole.high ? range->high : whole.high;
            whole.largest_bits = range->largest_bits > whole.largest_bits ? range->largest_bits : whole.largest_bits;
        }
        pieces.affine = dsc_quant_affine_of(call, &dsc_quant_numbers[call->format], whole);
        dsc_quant_note(call, g, pieces.affine);
    }
    dsc_par_run(par, n_pieces, run_pieces, &pieces);
}

static void run(struct job *job, const struct dsc_par *par)
{
    const struct dsc_quant *call = job->call;
    int64_t of_row = dsc_quant_n_groups(call->n_cols, call->group);
    int64_t group = call->group < call->n_cols ? call->group : call->n_cols;

    job->n_groups = call->n_rows * of_row;
    if (job->n_groups == 0)
        return;
    if (group > WHOLE_ELEMS) {
        for (int64_t g = 0; g < job->n_groups; g++)
            run_large(job, g, par);
        return;
    }
    job->chunk_groups = DSC_MIN_CHUNK_ELEMS / group + 1;
    /* Two groups of odd length share a byte of halves: then a chunk is whole rows. */
    if (dsc_quant_numbers[call->format].code_bits == 4 && group % 2 != 0)
        job->chunk_groups = (job->chunk_groups / of_row + 1) * of_row;
    dsc_par_run(par, (job->n_groups - 1) / job->chunk_groups + 1, run_chunks, job);
}

dsc_status dsc_quant_quantize_check(const struct dsc_quant *call)
{
    return check(call, true, call->x, "x", call->codes, "codes");
}

dsc_status dsc_quant_quantize(const struct dsc_quant *call, const struct dsc_par *par)
{
    const struct dsc_quant_kernels *kernels = dsc_quant_kernels_get();
    struct job job = {.call = call, .kernels = kernels, .groups = kernels->code_groups, .columns = kernels->code};

    DSC_TRY(dsc_quant_quantize_check(call));
    run(&job, par);
    return DSC_OK;
}

dsc_status dsc_quant_dequantize_check(const struct dsc_quant *call)
{
    return check(call, true, call->codes, "codes", call->y, "y");
}

dsc_status dsc_quant_dequantize(const struct dsc_quant *call, const struct dsc_par *par)
{
    const struct dsc_quant_kernels *kernels = dsc_quant_kernels_get();
    struct job job = {.call = call, .kernels = kernels, .columns = kernels->decode};

    DSC_TRY(dsc_quant_dequantize_check(call));
    run(&job, par);
    return DSC_OK;
}

dsc_status dsc_quant_fake_check(const struct dsc_quant *call)
{
    return check(call, call->has_scales, call->x, "x", call->y, "y");
}

dsc_status dsc_quant_fake(const struct dsc_quant *call, const struct dsc_par *par)
{
    const struct dsc_quant_kernels *kernels = dsc_quant_kernels_get();
    struct dsc_quant only_read = *call;
    struct job job = {.call = &only_read, .kernels = kernels, .groups = kernels->fake_groups, .columns = kernels->fake};

    DSC_TRY(dsc_quant_fake_check(call));
    if (!call->has_scales)
        only_read.scales = NULL;
    run(&job, par);
    return DSC_OK;
}
