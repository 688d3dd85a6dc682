/* The products of dsc/nn.h: rows with a weight, for processors whose own products of 16-bit elements are slow. */
#include "operands.h"

#include <string>
#include <tuple>

namespace {

using dsc::dense_of;
using dsc::MaybeTensor;
using dsc::Operands;
using dsc::Tensor;

/* The sizes of a product: x [..., n_cols], weight [n_outputs, n_cols]. */
struct Sizes {
    Sizes(const Operands &o, const Tensor &x, const Tensor &weight)
    {
        const auto sizes = x.sizes();

        if (weight.sizes().size() != 2)
            o.fail("weight", "must have 2 dimensions");
        n_cols = sizes[sizes.size() - 1];
        for (size_t i = 0; i + 1 < sizes.size(); i++)
            n_rows *= sizes[i];
        n_outputs = weight.sizes()[0];
        if (weight.sizes()[1] != n_cols)
            o.fail("weight", "has " + std::to_string(weight.sizes()[1]) + " columns, x has " + std::to_string(n_cols));
    }

    int64_t n_rows = 1;
    int64_t n_cols;
    int64_t n_outputs;
};

/* A call, or its gradient, with its sizes and operands. */
template <class Call>
Call begin(const Operands &o, const Sizes &sizes, const Tensor &x, const Tensor &weight)
{
    Call call{};

    call.n_rows = sizes.n_rows;
    call.n_cols = sizes.n_cols;
    call.n_outputs = sizes.n_outputs;
    call.dtype = o.dtype;
    call.x = o.read(x, "x", sizes.n_rows * sizes.n_cols);
    call.weight = o.read(weight, "weight", sizes.n_outputs * sizes.n_cols);
    return call;
}

Tensor nn_linear(const Tensor &x_in, const Tensor &weight_in, const MaybeTensor &bias_in)
{
    const Tensor x = dsc::contiguous(x_in), weight = dsc::contiguous(weight_in);
    const MaybeTensor bias = dense_of(bias_in);
    const Operands o("nn_linear", x, "x");
    const Sizes sizes(o, x, weight);
    const Tensor y = dsc::new_like(x, dsc::sizes_with(x, sizes.n_outputs));
    auto call = begin<struct dsc_nn_linear>(o, sizes, x, weight);

    call.bias = bias.has_value() ? o.read(*bias, "bias", sizes.n_outputs) : nullptr;
    call.y = y.mutable_data_ptr();
    o.run(dsc_nn_linear, call);
    return y;
}

std::tuple<Tensor, Tensor, Tensor> nn_linear_backward(const Tensor &dy_in, const Tensor &x_in, const Tensor &weight_in,
                                                      bool needs_x, bool needs_weight, bool needs_bias)
{
    const Tensor dy = dsc::contiguous(dy_in), x = dsc::contiguous(x_in), weight = dsc::contiguous(weight_in);
    const Operands o("nn_linear_backward", x, "x");
    const Sizes sizes(o, x, weight);
    const Tensor dx = needs_x ? dsc::empty_like(x) : dsc::new_like(x, {0});
    const Tensor dweight = needs_weight ? dsc::empty_like(weight) : dsc::new_like(x, {0});
    const Tensor dbias = dsc::new_like(x, {needs_bias ? sizes.n_outputs : 0});
    auto call = begin<struct dsc_nn_linear_grad>(o, sizes, x, weight);

    call.dy = o.read(dy, "dy", sizes.n_rows * sizes.n_outputs);
    call.dx = needs_x ? dx.mutable_data_ptr() : nullptr;
    call.dweight = needs_weight ? dweight.mutable_data_ptr() : nullptr;
    call.dbias = needs_bias ? dbias.mutable_data_ptr() : nullptr;
    o.run(dsc_nn_linear_grad, call);
    return {dx, dweight, dbias};
}

}  // namespace

DSC_OPS(m)
{
    m.def("nn_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    m.def("nn_linear_backward(Tensor dy, Tensor x, Tensor weight, bool needs_x, bool needs_weight, bool needs_bias) -> "
          "(Tensor dx, Tensor dweight, Tensor dbias)");
}

DSC_OPS_CPU(m)
{
    m.impl("nn_linear", DSC_BOX(&nn_linear));
    m.impl("nn_linear_backward", DSC_BOX(&nn_linear_backward));
}
