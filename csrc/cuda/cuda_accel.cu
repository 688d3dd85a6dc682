/* The accelerator's table: names to launchers, checks first. And the library's one exported symbol. */
#include "cuda/common.cuh"
#include "cuda/kinds.h"

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace dsc_cuda {

/* The registry: name, state slots, arguments used, launcher. */
static const kind kinds[] = {
    {"adam", 2, USES_BETAS | USES_EPS, adam_step},
    {"adamw", 2, USES_BETAS | USES_EPS, adamw_step},
    {"lamb", 2, USES_BETAS | USES_EPS | USES_COEFFS, nullptr},
    {"lion", 1, USES_BETAS, lion_step},
    {"adagrad", 1, USES_EPS | USES_LR_DECAY, adagrad_step},
    {"sgd", 1, USES_MOMENTUM, sgd_step},
};
static const kind muon = {"muon", 1, USES_MOMENTUM, nullptr};

static dsc_accel_report *host_report;

dsc_status fail(dsc_status status, const char *format, ...)
{
    char sentence[512];
    va_list args;

    va_start(args, format);
    const int n_bytes = vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    host_report(n_bytes < 0 ? "" : sentence);
    return status;
}

dsc_status check_cuda(cudaError_t error, const char *what)
{
    /*
     * May also be an earlier kernel's error; reading it clears it, if it can be cleared, so that the next call does not
     * report it again.
     */
    const cudaError_t last = cudaGetLastError();

    if (error == cudaSuccess)
        error = last;
    if (error == cudaSuccess)
        return DSC_OK;
    return fail(DSC_EDEVICE, "cuda: %s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

dsc_status check_pointer(const void *data, const char *what)
{
    cudaPointerAttributes attributes;

    DSC_TRY(check_cuda(cudaPointerGetAttributes(&attributes, data), what));
    if (attributes.type == cudaMemoryTypeUnregistered)
        return fail(DSC_EINVAL, "%s: %p is host memory that no CUDA device sees", what, data);
    return DSC_OK;
}

static dsc_status find(const char *name, const kind **out_kind)
{
    char names[160] = "";
    size_t used = 0;

    if (name == nullptr)
        return fail(DSC_EINVAL, "kind is NULL");
    for (const kind &candidate : kinds) {
        if (strcmp(candidate.name, name) == 0) {
            *out_kind = &candidate;
            return DSC_OK;
        }
        if (used < sizeof names)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used == 0 ? "" : ", ", candidate.name);
    }
    return fail(DSC_ENOTFOUND, "no optimizer \"%.63s\" on CUDA devices; there are: %s", name, names);
}

static bool needs_norms(const kind &kind)
{
    return kind.step == nullptr;
}

static dsc_status check_result(const char *name, const char *field, const void *data, int64_t n_tensors)
{
    if (data == nullptr && n_tensors > 0)
        return fail(DSC_EINVAL, "%s: %s is NULL for %lld tensors", name, field, (long long)n_tensors);
    return DSC_OK;
}

static dsc_status device_count(int32_t *out_n_devices)
{
    int driver = 0, n_devices = 0;
    cudaError_t error = cudaDriverGetVersion(&driver);

    if (error != cudaSuccess || driver == 0)
        return fail(DSC_ENOTSUP, "cuda: no device: this machine has no NVIDIA driver");
    error = cudaGetDeviceCount(&n_devices);
    (void)cudaGetLastError(); /* an error reported below is not reported again */
    if (error == cudaErrorNoDevice)
        n_devices = 0;
    else if (error == cudaErrorInsufficientDriver)
        return fail(DSC_ENOTSUP,
                    "cuda: no device: the driver (for CUDA %d.%d) is too old for this library (CUDA %d.%d)",
                    driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    else if (error != cudaSuccess)
        return fail(DSC_EDEVICE, "cuda: the devices cannot be counted: %s (%s)", cudaGetErrorString(error),
                    cudaGetErrorName(error));
    *out_n_devices = n_devices;
    return DSC_OK;
}

static dsc_status optim_step(const char *name, const struct dsc_optim_args *args,
                             const struct dsc_optim_tensor *tensors, int64_t n_tensors, double *scratch, void *stream)
{
    const kind *kind;

    DSC_TRY(find(name, &kind));
    DSC_TRY(check_args(*kind, args));

    const bool is_stateless = (kind->uses & USES_MOMENTUM) != 0 && args->momentum == 0.0;

    DSC_TRY(check_tensors(*kind, tensors, n_tensors, is_stateless ? 0 : kind->n_states,
                          NEEDS_PARAM | NEEDS_GRAD | NEEDS_STATE));
    if (!needs_norms(*kind))
        return kind->step(args, tensors, n_tensors, stream);
    DSC_TRY(check_result(name, "scratch", scratch, n_tensors));
    return lamb_step(args, tensors, n_tensors, scratch, stream);
}

static dsc_status check_norms_kind(const kind &kind)
{
    if (!needs_norms(kind))
        return fail(DSC_ENOTSUP, "%s needs no norms: use optim_step on the pieces", kind.name);
    return DSC_OK;
}

static dsc_status optim_norms(const char *name, const struct dsc_optim_args *args,
                              const struct dsc_optim_tensor *tensors, int64_t n_tensors, double *out_sumsq,
                              double *scratch, void *stream)
{
    const kind *kind;

    DSC_TRY(find(name, &kind));
    DSC_TRY(check_norms_kind(*kind));
    DSC_TRY(check_args(*kind, args));
    DSC_TRY(check_tensors(*kind, tensors, n_tensors, kind->n_states, NEEDS_PARAM | NEEDS_GRAD | NEEDS_STATE));
    DSC_TRY(check_result(name, "out_sumsq", out_sumsq, n_tensors));
    DSC_TRY(check_result(name, "scratch", scratch, n_tensors));
    return lamb_norms(args, tensors, n_tensors, out_sumsq, scratch, stream);
}

static dsc_status optim_apply(const char *name, const struct dsc_optim_args *args,
                              const struct dsc_optim_tensor *tensors, int64_t n_tensors, const double *ratios,
                              void *stream)
{
    const kind *kind;

    DSC_TRY(find(name, &kind));
    DSC_TRY(check_norms_kind(*kind));
    DSC_TRY(check_args(*kind, args));
    DSC_TRY(check_tensors(*kind, tensors, n_tensors, kind->n_states, NEEDS_PARAM | NEEDS_STATE));
    DSC_TRY(check_result(name, "ratios", ratios, n_tensors));
    return lamb_apply(args, tensors, n_tensors, ratios, stream);
}

static dsc_status momentum_hook(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors,
                                int64_t n_tensors, void *stream)
{
    DSC_TRY(check_args(muon, args));
    DSC_TRY(check_tensors(muon, tensors, n_tensors, muon.n_states, NEEDS_GRAD | NEEDS_STATE | NEEDS_COPY));
    return muon_momentum(args, tensors, n_tensors, stream);
}

static dsc_status apply_hook(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors,
                             int64_t n_tensors, void *stream)
{
    DSC_TRY(check_args(muon, args));
    DSC_TRY(check_tensors(muon, tensors, n_tensors, 0, NEEDS_PARAM | NEEDS_GRAD));
    return muon_apply(args, tensors, n_tensors, stream);
}

static dsc_status sumsq_hook(const struct dsc_span *spans, int64_t n_spans, double *out, double *scratch, void *stream)
{
    if (out == nullptr || scratch == nullptr)
        return fail(DSC_EINVAL, "flat_sumsq: %s is NULL", out == nullptr ? "out" : "scratch");
    DSC_TRY(check_spans(spans, n_spans, "spans"));
    return flat_sumsq(spans, n_spans, out, scratch, stream);
}

static dsc_status reduce_hook(const struct dsc_span *srcs, int64_t n_srcs, float scale, bool accumulate,
                              const struct dsc_span *acc, double *out, double *scratch, void *stream)
{
    if (acc == nullptr)
        return fail(DSC_EINVAL, "acc is NULL");
    if (n_srcs < 1)
        return fail(DSC_EINVAL, "n_srcs is %lld, must be at least 1", (long long)n_srcs);
    if (!std::isfinite(scale))
        return fail(DSC_EINVAL, "scale is %g, must be finite", (double)scale);
    if (out != nullptr && scratch == nullptr)
        return fail(DSC_EINVAL, "flat_reduce: scratch is NULL");
    DSC_TRY(check_spans(acc, 1, "acc"));
    DSC_TRY(check_spans(srcs, n_srcs, "srcs"));
    return flat_reduce(srcs, n_srcs, scale, accumulate, acc, out, scratch, stream);
}

static dsc_status scale_hook(const struct dsc_span *spans, int64_t n_spans, float scale, void *stream)
{
    if (!std::isfinite(scale))
        return fail(DSC_EINVAL, "scale is %g, must be finite", (double)scale);
    DSC_TRY(check_spans(spans, n_spans, "spans"));
    return flat_scale(spans, n_spans, scale, stream);
}

static dsc_status cast_hook(const struct dsc_span *src, const struct dsc_span *dst, void *stream)
{
    if (src == nullptr || dst == nullptr)
        return fail(DSC_EINVAL, "%s is NULL", src == nullptr ? "src" : "dst");
    DSC_TRY(check_spans(src, 1, "src"));
    DSC_TRY(check_spans(dst, 1, "dst"));
    if (src->n_elems != dst->n_elems)
        return fail(DSC_EINVAL, "src has %lld elements, dst has %lld", (long long)src->n_elems,
                    (long long)dst->n_elems);
    return flat_cast(src, dst, stream);
}

/* In the order of struct dsc_accel. */
static const struct dsc_accel table = {
    DSC_ACCEL_ABI,
    sizeof(struct dsc_accel),
    "cuda",
    device_count,
    optim_step,
    optim_norms,
    optim_apply,
    momentum_hook,
    apply_hook,
    sumsq_hook,
    reduce_hook,
    scale_hook,
    cast_hook,
#define DSC_NN_CALL(name) nn_##name,
#include "dsc/nn_calls.inc"
#undef DSC_NN_CALL
    cross_entropy_rows,
    cross_entropy_grad,
#define DSC_MOE_CALL(name) moe_##name,
#include "dsc/moe_calls.inc"
#undef DSC_MOE_CALL
    moe_invert,
#define DSC_QUANT_CALL(name) quant_##name,
#include "dsc/quant_calls.inc"
#undef DSC_QUANT_CALL
};

}  // namespace dsc_cuda

extern "C" DSC_API const struct dsc_accel *dsc_accel_entry_point(dsc_accel_report *report)
{
    dsc_cuda::host_report = report;
    return &dsc_cuda::table;
}
