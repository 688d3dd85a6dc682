/* Cross-entropy over a vocabulary cut over ranks, as two operators. */
#include "check.h"
#include "dsc_torch.h"

#include <string>

namespace {

using dsc::Tensor;

dsc::View read(const Tensor &tensor, const char *op, const char *name, const char *dtype)
{
    const dsc::View view = dsc::view_of(tensor.get());

    if ((!dsc::is_cpu(view.device_type) && dsc::accelerator_of(view.device_type) < 0) || !view.is_strided ||
        !view.is_contiguous)
        dsc::fail(DSC_EINVAL,
                  std::string(op) + ": " + name + " must be a contiguous tensor of the host or of an accelerator");
    if (dtype != nullptr && std::string(dsc::dtype_name(view.dtype)) != dtype)
        dsc::fail(DSC_EINVAL,
                  std::string(op) + ": " + name + " is " + dsc::dtype_name(view.dtype) + ", must be " + dtype);
    return view;
}

/* Like read(), for a tensor that must be on the device of the logits. */
dsc::View read_beside(const dsc::View &logits, const Tensor &tensor, const char *op, const char *name,
                      const char *dtype)
{
    const dsc::View view = read(tensor, op, name, dtype);

    if (view.device_type != logits.device_type || view.device_index != logits.device_index)
        dsc::fail(DSC_EINVAL, std::string(op) + ": " + name + " is on " + dsc::device_name(view.device_type) +
                                  ", logits are on " + dsc::device_name(logits.device_type));
    return view;
}

/* Runs a call on the device of the logits. On an accelerator check(), which also returns a status, runs first. */
template <class Host, class Check, class Device>
void run_at(const dsc::View &logits, const char *op, Host host, Check check, Device device)
{
    if (dsc::is_cpu(logits.device_type)) {
        const struct dsc_par par = dsc::pool_par();

        dsc::check(host(&par), op);
        return;
    }
    const int32_t accelerator = dsc::accelerator_of(logits.device_type);
    const dsc::DeviceScope scope(accelerator, logits.device_index);

    dsc::check(check(), op);
    dsc::check(device(dsc::open_accel(accelerator), scope.stream()), op);
}

dsc_dtype dtype_of(const dsc::View &logits, const char *op)
{
    const int32_t dtype = dsc::to_dsc_dtype(logits.dtype);

    if (dtype < 0)
        dsc::fail(DSC_EINVAL, std::string(op) + ": logits is " + dsc::dtype_name(logits.dtype) +
                                  ", must be float32, bfloat16 or float16");
    return static_cast<dsc_dtype>(dtype);
}

int64_t words_of(const dsc::View &logits, int64_t n_rows, const char *op)
{
    if (n_rows == 0 ? logits.n_elems != 0 : logits.n_elems % n_rows != 0)
        dsc::fail(DSC_EINVAL, std::string(op) + ": logits has " + std::to_string(logits.n_elems) + " elements for " +
                                  std::to_string(n_rows) + " targets");
    return n_rows == 0 ? 0 : logits.n_elems / n_rows;
}

void cross_entropy_rows(const Tensor &logits, const Tensor &targets, const Tensor &out)
{
    const char *const op = "deepspeed_c::cross_entropy_rows_";
    const dsc::View values = read(logits, op, "logits", nullptr);
    const dsc::View wanted = read_beside(values, targets, op, "targets", "int64");
    const dsc::View rows = read_beside(values, out, op, "out", "float32");

    if (rows.n_elems != 4 * wanted.n_elems)
        dsc::fail(DSC_EINVAL, std::string(op) + ": out has " + std::to_string(rows.n_elems) +
                                  " elements, 4 a target are needed (" + std::to_string(4 * wanted.n_elems) + ")");
    const dsc_dtype dtype = dtype_of(values, op);
    const int64_t vocab_size = words_of(values, wanted.n_elems, op);
    const auto *const token_ids = static_cast<const int64_t *>(wanted.data);
    auto *const found = static_cast<struct dsc_tp_row *>(rows.data);

    run_at(
        values, op,
        [&](const struct dsc_par *par) {
            return dsc_tp_cross_entropy_rows(values.data, dtype, token_ids, wanted.n_elems, vocab_size, par, found);
        },
        [&] {
            return dsc_tp_cross_entropy_rows_check(values.data, dtype, token_ids, wanted.n_elems, vocab_size, found);
        },
        [&](const struct dsc_accel &accel, void *stream) {
            return accel.cross_entropy_rows(values.data, dtype, token_ids, wanted.n_elems, vocab_size, found, stream);
        });
}

void cross_entropy_grad(const Tensor &logits, const Tensor &targets, const Tensor &log_sum, const Tensor &scale,
                        double smoothing, int64_t full_vocab_size)
{
    const char *const op = "deepspeed_c::cross_entropy_grad_";
    const dsc::View values = read(logits, op, "logits", nullptr);
    const dsc::View wanted = read_beside(values, targets, op, "targets", "int64");
    const dsc::View sums = read_beside(values, log_sum, op, "log_sum", "float32");
    const dsc::View scales = read_beside(values, scale, op, "scale", "float32");

    if (sums.n_elems != wanted.n_elems || scales.n_elems != wanted.n_elems)
        dsc::fail(DSC_EINVAL, std::string(op) + ": " + std::to_string(sums.n_elems) + " log_sum and " +
                                  std::to_string(scales.n_elems) + " scale for " + std::to_string(wanted.n_elems) +
                                  " targets");
    const dsc_dtype dtype = dtype_of(values, op);
    const int64_t vocab_size = words_of(values, wanted.n_elems, op);
    const auto *const token_ids = static_cast<const int64_t *>(wanted.data);
    const auto *const sum = static_cast<const float *>(sums.data);
    const auto *const factor = static_cast<const float *>(scales.data);

    run_at(
        values, op,
        [&](const struct dsc_par *par) {
            return dsc_tp_cross_entropy_grad(values.data, dtype, token_ids, wanted.n_elems, vocab_size, sum, factor,
                                             smoothing, full_vocab_size, par);
        },
        [&] {
            return dsc_tp_cross_entropy_grad_check(values.data, dtype, token_ids, wanted.n_elems, vocab_size, sum,
                                                   factor, smoothing, full_vocab_size);
        },
        [&](const struct dsc_accel &accel, void *stream) {
            return accel.cross_entropy_grad(values.data, dtype, token_ids, wanted.n_elems, vocab_size, sum, factor,
                                            smoothing, full_vocab_size, stream);
        });
}

}  // namespace

DSC_OPS(m)
{
    m.def("cross_entropy_rows_(Tensor logits, Tensor targets, Tensor(a!) out) -> ()");
    m.def(
        "cross_entropy_grad_(Tensor(a!) logits, Tensor targets, Tensor log_sum, Tensor scale, float smoothing, int full_vocab_size) -> ()");
}

#define IMPLEMENTATIONS(m)                                       \
    m.impl("cross_entropy_rows_", DSC_BOX(&cross_entropy_rows)); \
    m.impl("cross_entropy_grad_", DSC_BOX(&cross_entropy_grad))

DSC_OPS_CPU(m)
{
    IMPLEMENTATIONS(m);
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
