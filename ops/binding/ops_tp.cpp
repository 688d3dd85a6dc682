/* Cross-entropy over words that are cut over ranks, as two operators on host tensors. */
#include "check.h"
#include "dsc_torch.h"

#include <string>

namespace {

using dsc::Tensor;

dsc::View read(const Tensor &tensor, const char *op, const char *name, const char *dtype)
{
    const dsc::View view = dsc::view_of(tensor.get());

    if (!dsc::is_cpu(view.device_type) || !view.is_strided || !view.is_contiguous)
        dsc::fail(DSC_EINVAL, std::string(op) + ": " + name + " must be a contiguous host tensor");
    if (dtype != nullptr && std::string(dsc::dtype_name(view.dtype)) != dtype)
        dsc::fail(DSC_EINVAL,
                  std::string(op) + ": " + name + " is " + dsc::dtype_name(view.dtype) + ", must be " + dtype);
    return view;
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
    const dsc::View wanted = read(targets, op, "targets", "int64");
    const dsc::View rows = read(out, op, "out", "float32");

    if (rows.n_elems != 4 * wanted.n_elems)
        dsc::fail(DSC_EINVAL, std::string(op) + ": out has " + std::to_string(rows.n_elems) +
                                  " elements, 4 a target are needed (" + std::to_string(4 * wanted.n_elems) + ")");
    const struct dsc_par par = dsc::pool_par();

    dsc::check(dsc_tp_cross_entropy_rows(values.data, dtype_of(values, op), static_cast<const int64_t *>(wanted.data),
                                         wanted.n_elems, words_of(values, wanted.n_elems, op), &par,
                                         static_cast<struct dsc_tp_row *>(rows.data)),
               op);
}

void cross_entropy_grad(const Tensor &logits, const Tensor &targets, const Tensor &log_sum, const Tensor &scale,
                        double smoothing, int64_t n_all_words)
{
    const char *const op = "deepspeed_c::cross_entropy_grad_";
    const dsc::View values = read(logits, op, "logits", nullptr);
    const dsc::View wanted = read(targets, op, "targets", "int64");
    const dsc::View sums = read(log_sum, op, "log_sum", "float32");
    const dsc::View scales = read(scale, op, "scale", "float32");

    if (sums.n_elems != wanted.n_elems || scales.n_elems != wanted.n_elems)
        dsc::fail(DSC_EINVAL, std::string(op) + ": " + std::to_string(sums.n_elems) + " log_sum and " +
                                  std::to_string(scales.n_elems) + " scale for " + std::to_string(wanted.n_elems) +
                                  " targets");
    const struct dsc_par par = dsc::pool_par();

    dsc::check(dsc_tp_cross_entropy_grad(values.data, dtype_of(values, op), static_cast<const int64_t *>(wanted.data),
                                         wanted.n_elems, words_of(values, wanted.n_elems, op),
                                         static_cast<const float *>(sums.data), static_cast<const float *>(scales.data),
                                         smoothing, n_all_words, &par),
               op);
}

}  // namespace

DSC_OPS(m)
{
    m.def("cross_entropy_rows_(Tensor logits, Tensor targets, Tensor(a!) out) -> ()");
    m.def(
        "cross_entropy_grad_(Tensor(a!) logits, Tensor targets, Tensor log_sum, Tensor scale, float smoothing, int n_all_words) -> ()");
}

DSC_OPS_CPU(m)
{
    m.impl("cross_entropy_rows_", DSC_BOX(&cross_entropy_rows));
    m.impl("cross_entropy_grad_", DSC_BOX(&cross_entropy_grad));
}
