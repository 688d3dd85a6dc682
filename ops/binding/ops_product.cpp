/* Products of dsc/nn.h, for processors whose own products of 16-bit elements are slow. */
#include "operands.h"

#include <string>
#include <vector>

namespace {

using dsc::dense_of;
using dsc::MaybeTensor;
using dsc::Operands;
using dsc::Tensor;

/* A matrix, or a batch of them, [rows, columns] or [batches, rows, columns], of any strides. */
class Matrices {
  public:
    explicit Matrices(const Tensor &tensor) : tensor_(tensor) {}

    size_t n_dims() const { return tensor_.sizes().size(); }
    const Tensor &tensor() const { return tensor_; }
    int64_t size(size_t from_last) const { return tensor_.sizes()[n_dims() - from_last]; }
    int64_t stride(size_t from_last) const { return tensor_.strides()[n_dims() - from_last]; }
    int64_t n_batches() const { return n_dims() == 3 ? size(3) : 1; }
    int64_t batch_stride() const { return n_dims() == 3 ? stride(3) : 0; }
    /* Whether the elements of this dimension lie one behind the other. */
    bool is_dense(size_t from_last) const { return size(from_last) <= 1 || stride(from_last) == 1; }
    void make_contiguous() { tensor_ = dsc::contiguous(tensor_); }

  private:
    Tensor tensor_;
};

constexpr size_t row = 2, column = 1;

/* Copies what has strides that the core doesn't take. */
void fit_strides(Matrices &a, Matrices &b)
{
    if (!a.is_dense(row) && !a.is_dense(column))
        a.make_contiguous();
    if (!b.is_dense(row) && !b.is_dense(column))
        b.make_contiguous();
    if (!a.is_dense(column) && !b.is_dense(column))
        a.make_contiguous();
}

Tensor nn_product(const Tensor &a_in, const Tensor &b_in, const MaybeTensor &bias_in)
{
    const Operands o("nn_product", a_in, "a");
    const MaybeTensor bias = dense_of(bias_in);
    Matrices a(a_in), b(b_in);

    if (a.n_dims() != 2 && a.n_dims() != 3)
        o.fail("a", "must have 2 or 3 dimensions");
    if (b.n_dims() != a.n_dims())
        o.fail("b", "must have as many dimensions as a");
    if (b.n_batches() != a.n_batches())
        o.fail("b", "has " + std::to_string(b.n_batches()) + " matrices, a has " + std::to_string(a.n_batches()));
    if (b.size(row) != a.size(column))
        o.fail("b",
               "has " + std::to_string(b.size(row)) + " rows, a has " + std::to_string(a.size(column)) + " columns");
    fit_strides(a, b);

    std::vector<int64_t> sizes = dsc::sizes_with(a.tensor(), b.size(column));
    const Tensor y = dsc::new_like(a.tensor(), sizes);
    struct dsc_nn_product call = {};

    call.n_batches = a.n_batches();
    call.n_rows = a.size(row);
    call.n_terms = a.size(column);
    call.n_cols = b.size(column);
    call.dtype = o.dtype;
    call.a = o.read_strided(a.tensor(), "a");
    call.a_batch = a.batch_stride();
    call.a_row = a.stride(row);
    call.a_term = a.stride(column);
    call.b = o.read_strided(b.tensor(), "b");
    call.b_batch = b.batch_stride();
    call.b_term = b.stride(row);
    call.b_col = b.stride(column);
    call.bias = bias.has_value() ? o.read(*bias, "bias", call.n_cols) : nullptr;
    call.y = y.mutable_data_ptr();
    o.run(dsc_nn_product, call);
    return y;
}

/* Layers that read the same rows: y[i] = x weights[i]' + biases[i], in one call of the core. */
std::vector<Tensor> nn_layers(const Tensor &x_in, const std::vector<Tensor> &weights,
                              const std::vector<MaybeTensor> &biases_in)
{
    const Operands o("nn_layers", x_in, "x");
    const Tensor x = dsc::contiguous(x_in);
    const size_t n = weights.size(), n_dims = x.sizes().size();
    const int64_t n_terms = x.sizes()[n_dims - 1];
    int64_t n_rows = 1;
    std::vector<struct dsc_nn_product> calls(n);
    std::vector<Matrices> dense(weights.begin(), weights.end());
    std::vector<MaybeTensor> biases(n);
    std::vector<Tensor> results;

    for (size_t i = 0; i + 1 < n_dims; i++)
        n_rows *= x.sizes()[i];
    if (biases_in.size() != n)
        o.fail("biases", "has " + std::to_string(biases_in.size()) + " entries, weights has " + std::to_string(n));
    for (size_t i = 0; i < n; i++) {
        const std::string name = "weights[" + std::to_string(i) + "]";
        Matrices &weight = dense[i];
        struct dsc_nn_product &call = calls[i];

        if (weight.n_dims() != 2)
            o.fail(name.c_str(), "must have 2 dimensions");
        if (weight.size(column) != n_terms)
            o.fail(name.c_str(),
                   "has " + std::to_string(weight.size(column)) + " columns, x has " + std::to_string(n_terms));
        if (!weight.is_dense(column))
            weight.make_contiguous();
        biases[i] = dense_of(biases_in[i]);
        results.push_back(dsc::new_like(x, dsc::sizes_with(x, weight.size(row))));
        call.n_batches = 1;
        call.n_rows = n_rows;
        call.n_terms = n_terms;
        call.n_cols = weight.size(row);
        call.dtype = o.dtype;
        call.a = o.read_strided(x, "x");
        call.a_row = n_terms;
        call.a_term = 1;
        call.b = o.read_strided(weight.tensor(), name.c_str());
        call.b_term = weight.stride(column);
        call.b_col = weight.stride(row);
        call.bias = biases[i].has_value() ? o.read(*biases[i], "biases", call.n_cols) : nullptr;
        call.y = results[i].mutable_data_ptr();
    }

    const struct dsc_par par = dsc::pool_par();

    dsc::check(dsc_nn_products(static_cast<int32_t>(n), calls.data(), &par), "nn_layers");
    return results;
}

}  // namespace

DSC_OPS(m)
{
    m.def("nn_product(Tensor a, Tensor b, Tensor? bias) -> Tensor");
    m.def("nn_layers(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]");
}

DSC_OPS_CPU(m)
{
    m.impl("nn_product", DSC_BOX(&nn_product));
    m.impl("nn_layers", DSC_BOX(&nn_layers));
}
