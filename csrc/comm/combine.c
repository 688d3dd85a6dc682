/*
 * Combines the ranks' values of the same elements, in rank order: float32, bfloat16 and float16 in f32, other types in
 * their own type.
 */
#include "comm/end.h"

#include "base/par.h"
#include "cpu/table.h"
#include "dsc/flat.h"

#include <string.h>

static void combine_f32(dsc_comm_combine combine, int64_t n, const dsc_f32 *restrict src, dsc_f32 *restrict acc)
{
    for (int64_t i = 0; i < n; i++) {
        float a = acc[i];
        float b = src[i];

        /* A NaN in the accumulator stays, because no comparison with a NaN is true. */
        if (combine == DSC_COMM_MAX)
            acc[i] = a != a || a > b ? a : b;
        else if (combine == DSC_COMM_MIN)
            acc[i] = a != a || a < b ? a : b;
        else
            acc[i] = a * b;
    }
}

/* All but sums. */
static void combine_floats(const struct dsc_comm *comm, const struct dsc_comm_call *call, const void *const *srcs,
                           int64_t n_elems, void *out)
{
    const struct dsc_kernels *kernels = dsc_kernels_get();
    size_t bytes = dsc_comm_type_bytes(call->type);
    dsc_dtype dtype = (dsc_dtype)call->type;
    DSC_ALIGNED dsc_f32 acc[DSC_BLOCK_ELEMS];
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];

    for (int64_t begin = 0; begin < n_elems; begin += DSC_BLOCK_ELEMS) {
        int64_t n = n_elems - begin < DSC_BLOCK_ELEMS ? n_elems - begin : DSC_BLOCK_ELEMS;
        size_t at = (size_t)begin * bytes;

        for (int32_t rank = 0; rank < comm->n_ranks; rank++) {
            const dsc_f32 *block = dsc_load_f32(kernels, dtype, (const char *)srcs[rank] + at, n, scratch);

            if (rank == 0)
                memcpy(acc, block, (size_t)n * sizeof *acc);
            else
                combine_f32(call->combine, n, block, acc);
        }
        if (call->scale != 1.0)
            kernels->scale_f32(n, (float)call->scale, acc);
        dsc_store_f32(kernels, dtype, acc, n, (char *)out + at);
    }
}

/* Sums and products of integers wrap around, as uint64_t does. */
#define SUM_INT(ctype, a, b) (ctype)((uint64_t)(a) + (uint64_t)(b))
#define PROD_INT(ctype, a, b) (ctype)((uint64_t)(a) * (uint64_t)(b))
#define SUM_FLOAT(ctype, a, b) ((a) + (b))
#define PROD_FLOAT(ctype, a, b) ((a) * (b))

#define DEFINE_COMBINE(name, ctype, SUM_OF, PROD_OF)                                                                   \
    static void combine_##name(const struct dsc_comm *comm, const struct dsc_comm_call *call, const void *const *srcs, \
                               int64_t n_elems, void *out)                                                             \
    {                                                                                                                  \
        ctype acc[DSC_BLOCK_ELEMS];                                                                                    \
        ctype src[DSC_BLOCK_ELEMS];                                                                                    \
                                                                                                                       \
        for (int64_t begin = 0; begin < n_elems; begin += DSC_BLOCK_ELEMS) {                                           \
            int64_t n = n_elems - begin < DSC_BLOCK_ELEMS ? n_elems - begin : DSC_BLOCK_ELEMS;                         \
            size_t at = (size_t)begin * sizeof *acc;                                                                   \
                                                                                                                       \
            memcpy(acc, (const char *)srcs[0] + at, (size_t)n * sizeof *acc);                                          \
            for (int32_t rank = 1; rank < comm->n_ranks; rank++) {                                                     \
                memcpy(src, (const char *)srcs[rank] + at, (size_t)n * sizeof *src);                                   \
                switch (call->combine) {                                                                               \
                case DSC_COMM_MAX:                                                                                     \
                    for (int64_t i = 0; i < n; i++)                                                                    \
                        acc[i] = acc[i] != acc[i] || acc[i] > src[i] ? acc[i] : src[i];                                \
                    break;                                                                                             \
                case DSC_COMM_MIN:                                                                                     \
                    for (int64_t i = 0; i < n; i++)                                                                    \
                        acc[i] = acc[i] != acc[i] || acc[i] < src[i] ? acc[i] : src[i];                                \
                    break;                                                                                             \
                case DSC_COMM_PROD:                                                                                    \
                    for (int64_t i = 0; i < n; i++)                                                                    \
                        acc[i] = PROD_OF(ctype, acc[i], src[i]);                                                       \
                    break;                                                                                             \
                default:                                                                                               \
                    for (int64_t i = 0; i < n; i++)                                                                    \
                        acc[i] = SUM_OF(ctype, acc[i], src[i]);                                                        \
                }                                                                                                      \
            }                                                                                                          \
            for (int64_t i = 0; call->scale != 1.0 && i < n; i++)                                                      \
                acc[i] = (ctype)((double)acc[i] * call->scale);                                                        \
            memcpy((char *)out + at, acc, (size_t)n * sizeof *acc);                                                    \
        }                                                                                                              \
    }

DEFINE_COMBINE(f64, double, SUM_FLOAT, PROD_FLOAT)
DEFINE_COMBINE(i8, int8_t, SUM_INT, PROD_INT)
DEFINE_COMBINE(i16, int16_t, SUM_INT, PROD_INT)
DEFINE_COMBINE(i32, int32_t, SUM_INT, PROD_INT)
DEFINE_COMBINE(i64, int64_t, SUM_INT, PROD_INT)
DEFINE_COMBINE(u8, uint8_t, SUM_INT, PROD_INT)

_Static_assert((int)DSC_COMM_F32 == (int)DSC_DTYPE_F32 && (int)DSC_COMM_BF16 == (int)DSC_DTYPE_BF16 &&
                   (int)DSC_COMM_F16 == (int)DSC_DTYPE_F16,
               "the first types are dsc_dtype's");

static void sum_floats(const struct dsc_comm *comm, const struct dsc_comm_call *call, const void *const *srcs,
                       int64_t n_elems, void *out, dsc_comm_type out_type)
{
    struct dsc_span spans[DSC_COMM_MAX_RANKS];
    struct dsc_span acc = {.data = out, .n_elems = n_elems, .dtype = (dsc_dtype)out_type};

    for (int32_t rank = 0; rank < comm->n_ranks; rank++)
        spans[rank] = (struct dsc_span){
            .data = (void *)(uintptr_t)srcs[rank], .n_elems = n_elems, .dtype = (dsc_dtype)call->type};
    /* Checked when the call was submitted: it cannot fail. */
    (void)dsc_flat_reduce(spans, comm->n_ranks, (float)call->scale, call->accumulates, &acc,
                          comm->par.run != NULL ? &comm->par : NULL, NULL, NULL);
}

void dsc_comm_combine_into(const struct dsc_comm *comm, const struct dsc_comm_call *call, const void *const *srcs,
                           int64_t n_elems, void *out, dsc_comm_type out_type)
{
    if (n_elems <= 0)
        return;
    switch (call->type) {
    case DSC_COMM_F64:
        combine_f64(comm, call, srcs, n_elems, out);
        return;
    case DSC_COMM_I8:
        combine_i8(comm, call, srcs, n_elems, out);
        return;
    case DSC_COMM_I16:
        combine_i16(comm, call, srcs, n_elems, out);
        return;
    case DSC_COMM_I32:
        combine_i32(comm, call, srcs, n_elems, out);
        return;
    case DSC_COMM_I64:
        combine_i64(comm, call, srcs, n_elems, out);
        return;
    case DSC_COMM_U8:
        combine_u8(comm, call, srcs, n_elems, out);
        return;
    default:
        break;
    }
    if (call->combine == DSC_COMM_SUM)
        sum_floats(comm, call, srcs, n_elems, out, out_type);
    else
        combine_floats(comm, call, srcs, n_elems, out);
}
