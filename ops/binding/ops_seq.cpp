/* Merges parts of attention, as an operator on host tensors. */
#include "check.h"
#include "dsc_torch.h"

#include "dsc/seq.h"

#include <string>

namespace {

using dsc::Tensor;

dsc::View read(const Tensor &tensor, const char *name)
{
    const dsc::View view = dsc::view_of(tensor.get());

    if (!dsc::is_cpu(view.device_type) || !view.is_strided || !view.is_contiguous)
        dsc::fail(DSC_EINVAL,
                  std::string("deepspeed_c::attention_merge_: ") + name + " must be a contiguous host tensor");
    return view;
}

dsc::View read_f32(const Tensor &tensor, const char *name)
{
    const dsc::View view = read(tensor, name);

    if (std::string(dsc::dtype_name(view.dtype)) != "float32")
        dsc::fail(DSC_EINVAL, std::string("deepspeed_c::attention_merge_: ") + name + " is " +
                                  dsc::dtype_name(view.dtype) + ", must be float32");
    return view;
}

[[noreturn]] void refuse_sizes(const std::string &out, int64_t n_out, int64_t n_expected)
{
    dsc::fail(DSC_EINVAL, "deepspeed_c::attention_merge_: " + out + " has " + std::to_string(n_out) +
                              " elements, must have " + std::to_string(n_expected));
}

void attention_merge(const Tensor &out, const Tensor &log_sum, const Tensor &part, const Tensor &part_log_sum,
                     int64_t n_groups, int64_t first_row)
{
    const char *const op = "deepspeed_c::attention_merge_";
    const dsc::View whole = read_f32(out, "out");
    const dsc::View sums = read_f32(log_sum, "log_sum");
    const dsc::View piece = read(part, "part");
    const dsc::View piece_sums = read_f32(part_log_sum, "part_log_sum");
    const int32_t dtype = dsc::to_dsc_dtype(piece.dtype);

    if (dtype < 0)
        dsc::fail(DSC_EINVAL, std::string(op) + ": part is " + dsc::dtype_name(piece.dtype) +
                                  ", must be float32, bfloat16 or float16");
    if (n_groups < 1 || sums.n_elems % n_groups != 0 || piece_sums.n_elems % n_groups != 0)
        dsc::fail(DSC_EINVAL, std::string(op) + ": " + std::to_string(sums.n_elems) + " and " +
                                  std::to_string(piece_sums.n_elems) + " rows are not those of " +
                                  std::to_string(n_groups) + " groups");

    const int64_t width = sums.n_elems == 0 ? 0 : whole.n_elems / sums.n_elems;

    if (whole.n_elems != sums.n_elems * width)
        refuse_sizes("out", whole.n_elems, sums.n_elems * width);
    if (piece.n_elems != piece_sums.n_elems * width)
        refuse_sizes("part", piece.n_elems, piece_sums.n_elems * width);

    const struct dsc_par par = dsc::pool_par();

    dsc::check(dsc_seq_merge(static_cast<float *>(whole.data), static_cast<float *>(sums.data), n_groups,
                             sums.n_elems / n_groups, width, piece.data, static_cast<dsc_dtype>(dtype),
                             static_cast<const float *>(piece_sums.data), first_row, piece_sums.n_elems / n_groups,
                             &par),
               op);
}

}  // namespace

DSC_OPS(m)
{
    m.def(
        "attention_merge_(Tensor(a!) out, Tensor(b!) log_sum, Tensor part, Tensor part_log_sum, int n_groups, int first_row) -> ()");
}

DSC_OPS_CPU(m)
{
    m.impl("attention_merge_", DSC_BOX(&attention_merge));
}
