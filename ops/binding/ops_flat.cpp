/* Passes over flat buffers as operators: norm and finite check, reduction, scale, cast, zero. */
#include "check.h"
#include "dsc_torch.h"

#include <vector>

namespace {

using dsc::Checker;
using dsc::Tensor;
using dsc::TensorList;

int64_t size_of(const std::vector<struct dsc_span> &spans)
{
    return static_cast<int64_t>(spans.size());
}

/* [sum of squares, non-finite elements] as the f64 tensor that the operators return. */
Tensor stats_tensor(AtenTensorHandle like, double sumsq, int64_t n_nonfinite)
{
    const Tensor stats = dsc::new_f64(like, {2}, false);
    double *data = dsc::f64_data(stats);

    data[0] = sumsq;
    data[1] = static_cast<double>(n_nonfinite);
    return stats;
}

Tensor flat_sumsq(const TensorList &spans)
{
    const char *const op = "flat_sumsq";
    Checker checker(op);
    const std::vector<struct dsc_span> read = checker.read_free(spans, "spans", 0);

    Tensor stats;

    dsc::run(
        checker, op,
        [&](const struct dsc_par *par) {
            double sumsq = 0.0;
            int64_t n_nonfinite = 0;
            const dsc_status status = dsc_flat_sumsq(read.data(), size_of(read), par, &sumsq, &n_nonfinite);

            stats = stats_tensor(checker.like(), sumsq, n_nonfinite);
            return status;
        },
        [&](const struct dsc_accel &accel, void *stream) {
            const Tensor scratch = dsc::new_f64(checker.like(), {DSC_ACCEL_SCRATCH_ELEMS}, false);

            stats = dsc::new_f64(checker.like(), {2}, true);
            return accel.flat_sumsq(read.data(), size_of(read), dsc::f64_data(stats), dsc::f64_data(scratch), stream);
        });
    return stats;
}

Tensor flat_reduce(const TensorList &srcs, double scale, bool accumulate, const Tensor &acc)
{
    const char *const op = "flat_reduce_";
    Checker checker(op);
    std::vector<struct dsc_span> read(static_cast<size_t>(srcs.size()));
    struct dsc_span to {};
    int64_t n_elems = -1;

    const dsc_dtype dtype = checker.read(srcs, "srcs", 0, [&](int64_t i, void *data, int64_t n) {
        if (n_elems >= 0 && n != n_elems)
            dsc::fail(DSC_EINVAL, "deepspeed_c::flat_reduce_: argument 0 (srcs[" + std::to_string(i) + "]) has " +
                                      std::to_string(n) + " elements, but srcs[0] has " + std::to_string(n_elems));
        n_elems = n;
        read[static_cast<size_t>(i)] = {data, n, DSC_DTYPE_F32};
    });
    for (struct dsc_span &span : read)
        span.dtype = dtype;
    to = checker.read_like_first(acc, "acc", 3);
    Tensor stats;

    dsc::run(
        checker, op,
        [&](const struct dsc_par *par) {
            double sumsq = 0.0;
            int64_t n_nonfinite = 0;
            const dsc_status status = dsc_flat_reduce(read.data(), size_of(read), static_cast<float>(scale), accumulate,
                                                      &to, par, &sumsq, &n_nonfinite);

            stats = stats_tensor(checker.like(), sumsq, n_nonfinite);
            return status;
        },
        [&](const struct dsc_accel &accel, void *stream) {
            const Tensor scratch = dsc::new_f64(checker.like(), {DSC_ACCEL_SCRATCH_ELEMS}, false);

            stats = dsc::new_f64(checker.like(), {2}, true);
            return accel.flat_reduce(read.data(), size_of(read), static_cast<float>(scale), accumulate, &to,
                                     dsc::f64_data(stats), dsc::f64_data(scratch), stream);
        });
    return stats;
}

void flat_scale(const TensorList &spans, double scale)
{
    const char *const op = "flat_scale_";
    Checker checker(op);
    const std::vector<struct dsc_span> read = checker.read_free(spans, "spans", 0);

    const auto factor = static_cast<float>(scale);

    dsc::run(
        checker, op, [&](const struct dsc_par *par) { return dsc_flat_scale(read.data(), size_of(read), factor, par); },
        [&](const struct dsc_accel &accel, void *stream) {
            return accel.flat_scale(read.data(), size_of(read), factor, stream);
        });
}

void flat_cast(const Tensor &src, const Tensor &dst)
{
    const char *const op = "flat_cast_";
    Checker checker(op);
    const struct dsc_span from = checker.read_first(src, "src", 0);
    const struct dsc_span to = checker.read_like_first(dst, "dst", 1);

    dsc::run(
        checker, op, [&](const struct dsc_par *par) { return dsc_flat_cast(&from, &to, par); },
        [&](const struct dsc_accel &accel, void *stream) { return accel.flat_cast(&from, &to, stream); });
}

void flat_zero(const TensorList &tensors)
{
    const char *const op = "flat_zero_";
    std::vector<struct dsc_region> regions(static_cast<size_t>(tensors.size()));

    for (int64_t i = 0; i < tensors.size(); i++) {
        const dsc::View view = dsc::view_of(tensors[i]);

        if (!dsc::is_cpu(view.device_type) || !view.is_strided || !dsc::has_same_dense_layout(tensors[i], tensors[i]))
            dsc::fail(DSC_EINVAL, std::string("deepspeed_c::") + op + ": argument 0 (tensors[" + std::to_string(i) +
                                      "]) must be a host tensor without gaps between its elements");
        regions[static_cast<size_t>(i)] = {view.data, view.n_elems, dsc::elem_bytes_of(view.dtype)};
    }
    const struct dsc_par par = dsc::pool_par();

    dsc::check(dsc_flat_zero(regions.data(), tensors.size(), &par), op);
}

}  // namespace

DSC_OPS(m)
{
    m.def("flat_sumsq(Tensor[] spans) -> Tensor");
    m.def("flat_reduce_(Tensor[] srcs, float scale, bool accumulate, Tensor(a!) acc) -> Tensor");
    m.def("flat_scale_(Tensor(a!)[] spans, float scale) -> ()");
    m.def("flat_cast_(Tensor src, Tensor(a!) dst) -> ()");
    m.def("flat_zero_(Tensor(a!)[] tensors) -> ()");
}

#define IMPLEMENTATIONS(m)                         \
    m.impl("flat_sumsq", DSC_BOX(&flat_sumsq));    \
    m.impl("flat_reduce_", DSC_BOX(&flat_reduce)); \
    m.impl("flat_scale_", DSC_BOX(&flat_scale));   \
    m.impl("flat_cast_", DSC_BOX(&flat_cast))

DSC_OPS_CPU(m)
{
    IMPLEMENTATIONS(m);
    /* First touch matters only on the host. The dispatcher refuses tensors on devices with NotImplementedError. */
    m.impl("flat_zero_", DSC_BOX(&flat_zero));
}

#define DSC_ACCEL_BUILTIN(name, entry)
#define DSC_ACCEL_LIBRARY(name, file, key) \
    DSC_OPS_ON(key, m)                     \
    {                                      \
        IMPLEMENTATIONS(m);                \
    }
#include "dsc/accelerators.inc"
#undef DSC_ACCEL_BUILTIN
#undef DSC_ACCEL_LIBRARY
