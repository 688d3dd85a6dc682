/*
 * The host as an accelerator: the table over the CPU loops, so that all code written against it runs without a device.
 * Calls work in the calling thread and are done when they return; stream and scratch are not looked at.
 */
#include "dsc/accel.h"

#include "base/fail.h"

const struct dsc_accel *dsc_accel_host_entry(dsc_accel_report *report);

static dsc_status device_count(int32_t *out_n_devices)
{
    *out_n_devices = 1;
    return DSC_OK;
}

static dsc_status optim_step(const char *kind, const struct dsc_optim_args *args,
                             const struct dsc_optim_tensor *tensors, int64_t n_tensors, double *scratch, void *stream)
{
    const struct dsc_optim_kind *found;

    (void)scratch;
    (void)stream;
    DSC_TRY(dsc_optim_find(kind, &found));
    return dsc_optim_step(found, args, tensors, n_tensors, NULL);
}

static dsc_status optim_norms(const char *kind, const struct dsc_optim_args *args,
                              const struct dsc_optim_tensor *tensors, int64_t n_tensors, double *out_sumsq,
                              double *scratch, void *stream)
{
    const struct dsc_optim_kind *found;

    (void)scratch;
    (void)stream;
    DSC_TRY(dsc_optim_find(kind, &found));
    return dsc_optim_norms(found, args, tensors, n_tensors, NULL, out_sumsq);
}

static dsc_status optim_apply(const char *kind, const struct dsc_optim_args *args,
                              const struct dsc_optim_tensor *tensors, int64_t n_tensors, const double *ratios,
                              void *stream)
{
    const struct dsc_optim_kind *found;

    (void)stream;
    DSC_TRY(dsc_optim_find(kind, &found));
    return dsc_optim_apply(found, args, tensors, n_tensors, NULL, ratios);
}

static dsc_status muon_momentum(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors,
                                int64_t n_tensors, void *stream)
{
    (void)stream;
    return dsc_muon_momentum(args, tensors, n_tensors, NULL);
}

static dsc_status muon_apply(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors,
                             int64_t n_tensors, void *stream)
{
    (void)stream;
    return dsc_muon_apply(args, tensors, n_tensors, NULL);
}

static void add_stats(double *out, double sumsq, int64_t n_nonfinite)
{
    out[0] += sumsq;
    out[1] += (double)n_nonfinite;
}

static dsc_status flat_sumsq(const struct dsc_span *spans, int64_t n_spans, double *out, double *scratch, void *stream)
{
    double sumsq;
    int64_t n_nonfinite;

    (void)scratch;
    (void)stream;
    if (out == NULL)
        return dsc_fail(DSC_EINVAL, "flat_sumsq: out is NULL");
    DSC_TRY(dsc_flat_sumsq(spans, n_spans, NULL, &sumsq, &n_nonfinite));
    add_stats(out, sumsq, n_nonfinite);
    return DSC_OK;
}

static dsc_status flat_reduce(const struct dsc_span *srcs, int64_t n_srcs, float scale, bool accumulate,
                              const struct dsc_span *acc, double *out, double *scratch, void *stream)
{
    double sumsq;
    int64_t n_nonfinite;

    (void)scratch;
    (void)stream;
    if (out == NULL)
        return dsc_flat_reduce(srcs, n_srcs, scale, accumulate, acc, NULL, NULL, NULL);
    DSC_TRY(dsc_flat_reduce(srcs, n_srcs, scale, accumulate, acc, NULL, &sumsq, &n_nonfinite));
    add_stats(out, sumsq, n_nonfinite);
    return DSC_OK;
}

static dsc_status flat_scale(const struct dsc_span *spans, int64_t n_spans, float scale, void *stream)
{
    (void)stream;
    return dsc_flat_scale(spans, n_spans, scale, NULL);
}

static dsc_status flat_cast(const struct dsc_span *src, const struct dsc_span *dst, void *stream)
{
    (void)stream;
    return dsc_flat_cast(src, dst, NULL);
}

#define DSC_NN_CALL(name)                                                       \
    static dsc_status nn_##name(const struct dsc_nn_##name *call, void *stream) \
    {                                                                           \
        (void)stream;                                                           \
        return dsc_nn_##name(call, NULL);                                       \
    }
#include "dsc/nn_calls.inc"
#undef DSC_NN_CALL

static dsc_status cross_entropy_rows(const void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows,
                                     int64_t vocab_size, struct dsc_tp_row *out_rows, void *stream)
{
    (void)stream;
    return dsc_tp_cross_entropy_rows(logits, dtype, targets, n_rows, vocab_size, NULL, out_rows);
}

static dsc_status cross_entropy_grad(void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows,
                                     int64_t vocab_size, const float *log_sum, const float *scale, double smoothing,
                                     int64_t full_vocab_size, void *stream)
{
    (void)stream;
    return dsc_tp_cross_entropy_grad(logits, dtype, targets, n_rows, vocab_size, log_sum, scale, smoothing,
                                     full_vocab_size, NULL);
}

#define DSC_MOE_CALL(name)                                                        \
    static dsc_status moe_##name(const struct dsc_moe_##name *call, void *stream) \
    {                                                                             \
        (void)stream;                                                             \
        return dsc_moe_##name(call, NULL);                                        \
    }
#include "dsc/moe_calls.inc"
#undef DSC_MOE_CALL

static dsc_status moe_invert(const int64_t *order, int64_t n, int64_t *out_inverse, void *stream)
{
    (void)stream;
    return dsc_moe_invert(order, n, out_inverse);
}

#define DSC_QUANT_CALL(name)                                                                    \
    static dsc_status quant_##name(const struct dsc_quant *call, double *scratch, void *stream) \
    {                                                                                           \
        (void)scratch;                                                                          \
        (void)stream;                                                                           \
        return dsc_quant_##name(call, NULL);                                                    \
    }
#include "dsc/quant_calls.inc"
#undef DSC_QUANT_CALL

static const struct dsc_accel table = {
    .abi = DSC_ACCEL_ABI,
    .size = sizeof(struct dsc_accel),
    .name = "host",
    .device_count = device_count,
    .optim_step = optim_step,
    .optim_norms = optim_norms,
    .optim_apply = optim_apply,
    .muon_momentum = muon_momentum,
    .muon_apply = muon_apply,
    .flat_sumsq = flat_sumsq,
    .flat_reduce = flat_reduce,
    .flat_scale = flat_scale,
    .flat_cast = flat_cast,
#define DSC_NN_CALL(name) .nn_##name = nn_##name,
#include "dsc/nn_calls.inc"
#undef DSC_NN_CALL
    .cross_entropy_rows = cross_entropy_rows,
    .cross_entropy_grad = cross_entropy_grad,
#define DSC_MOE_CALL(name) .moe_##name = moe_##name,
#include "dsc/moe_calls.inc"
#undef DSC_MOE_CALL
    .moe_invert = moe_invert,
#define DSC_QUANT_CALL(name) .quant_##name = quant_##name,
#include "dsc/quant_calls.inc"
#undef DSC_QUANT_CALL
};

const struct dsc_accel *dsc_accel_host_entry(dsc_accel_report *report)
{
    (void)report; /* the cores write dsc_last_error() themselves */
    return &table;
}
