/*
 * The operators of dsc/moe.h. They are functional, and the gradient is a separate operator. Those on rows run on
 * accelerators too, the others on the host alone.
 */
#include "operands.h"

#include <string>
#include <tuple>

namespace {

using dsc::MaybeTensor;
using dsc::Operands;
using dsc::Tensor;

[[noreturn]] void fail(const char *op, const std::string &what)
{
    dsc::fail(DSC_EINVAL, std::string("deepspeed_c::") + op + ": argument " + what);
}

/* Checks dtype, contiguity and number of dimensions of a tensor of the host, and gives its data. */
template <class T>
T *read(const Tensor &tensor, const char *op, const char *name, const char *dtype, size_t n_dims)
{
    const dsc::View view = dsc::view_of(tensor.get());

    if (!view.is_strided || !dsc::is_cpu(view.device_type) || !view.is_contiguous)
        fail(op, std::string(name) + " must be a contiguous tensor of the host");
    if (std::string(dsc::dtype_name(view.dtype)) != dtype)
        fail(op, std::string(name) + " is " + dsc::dtype_name(view.dtype) + ", must be " + dtype);
    if (tensor.sizes().size() != n_dims)
        fail(op, std::string(name) + " has " + std::to_string(tensor.sizes().size()) + " dimensions, must have " +
                     std::to_string(n_dims));
    return static_cast<T *>(view.data);
}

template <class T>
T *data_of(const Tensor &tensor)
{
    return static_cast<T *>(tensor.mutable_data_ptr());
}

void check_elems(const Tensor &tensor, const char *op, const char *name, int64_t n_elems)
{
    const int64_t n = dsc::view_of(tensor.get()).n_elems;

    if (n != n_elems)
        fail(op, std::string(name) + " has " + std::to_string(n) + " elements, must have " + std::to_string(n_elems));
}

void moe_route(const Tensor &logits, const MaybeTensor &bias, bool is_sigmoid, int64_t n_groups,
               int64_t n_limited_groups, const Tensor &out, const Tensor &bad)
{
    const char *const op = "moe_route_";
    struct dsc_moe_route call = {};
    const struct dsc_par par = dsc::pool_par();
    auto *const out_bad = read<int64_t>(bad, op, "bad", "int64", 1);

    check_elems(bad, op, "bad", 1);
    call.logits = read<const float>(logits, op, "logits", "float32", 2);
    call.indices = read<int32_t>(out, op, "out", "int32", 2);
    call.n_tokens = logits.sizes()[0];
    call.n_experts = logits.sizes()[1];
    call.k = out.sizes()[1];
    check_elems(out, op, "out", call.n_tokens * call.k);
    if (bias.has_value()) {
        call.bias = read<const float>(*bias, op, "bias", "float32", 1);
        check_elems(*bias, op, "bias", call.n_experts);
    }
    call.score = is_sigmoid ? DSC_MOE_SIGMOID : DSC_MOE_SOFTMAX;
    call.n_groups = n_groups;
    call.n_limited_groups = n_limited_groups;
    const Tensor scratch = dsc::new_f32(logits, {dsc_moe_route_scratch_elems(call.n_tokens, call.n_experts)});

    call.scratch = data_of<float>(scratch);
    dsc::check(dsc_moe_route(&call, &par, out_bad), op);
}

void moe_uniform(const Tensor &out, int64_t seed, int64_t offset)
{
    const char *const op = "moe_uniform_";
    auto *const data = read<float>(out, op, "out", "float32", 1);
    const struct dsc_par par = dsc::pool_par();

    dsc::check(dsc_moe_uniform(out.sizes()[0], static_cast<uint64_t>(seed), offset, &par, data), op);
}

std::tuple<Tensor, Tensor, Tensor> moe_place(const Tensor &indices, int64_t n_experts, int64_t capacity,
                                             const std::string &order, const MaybeTensor &priority)
{
    const char *const op = "moe_place";
    struct dsc_moe_place call = {};

    call.indices = read<const int32_t>(indices, op, "indices", "int32", 2);
    call.n_tokens = indices.sizes()[0];
    call.k = indices.sizes()[1];
    call.n_experts = n_experts;
    call.capacity = capacity;
    if (n_experts < 0 || (order != "choice" && order != "token" && order != "priority"))
        fail(op, "order is \"" + order + "\" for " + std::to_string(n_experts) + " experts");
    call.order = order == "choice" ? DSC_MOE_BY_CHOICE : order == "token" ? DSC_MOE_BY_TOKEN : DSC_MOE_BY_PRIORITY;
    if (priority.has_value() != (call.order == DSC_MOE_BY_PRIORITY))
        fail(op, "priority belongs to the order \"priority\", and order is \"" + order + "\"");
    const int64_t n_slots = call.n_tokens * call.k;

    if (priority.has_value()) {
        call.priority = read<const float>(*priority, op, "priority", "float32", 2);
        check_elems(*priority, op, "priority", n_slots);
    }
    const Tensor kept = dsc::empty_like(indices);
    const Tensor locations = dsc::empty_like(indices);
    const Tensor counts = dsc::new_i64(indices, {n_experts});
    const Tensor scratch = dsc::new_i64(indices, {n_experts + (priority.has_value() ? n_slots : 0)});

    call.kept = data_of<int32_t>(kept);
    call.locations = data_of<int32_t>(locations);
    call.counts = data_of<int64_t>(counts);
    call.scratch = data_of<int64_t>(scratch);
    dsc::check(dsc_moe_place(&call), op);
    return {kept, locations, counts};
}

std::tuple<Tensor, Tensor, Tensor> moe_sort(const Tensor &indices, int64_t n_experts)
{
    const char *const op = "moe_sort";
    const auto *const experts = read<const int32_t>(indices, op, "indices", "int32", 2);
    const int64_t n_tokens = indices.sizes()[0];
    const int64_t k = indices.sizes()[1];

    if (n_experts < 0)
        fail(op, "n_experts is " + std::to_string(n_experts) + ", must not be negative");
    const Tensor counts = dsc::new_i64(indices, {n_experts});
    const Tensor scratch = dsc::new_i64(indices, {n_experts});
    const Tensor inverse = dsc::new_i64(indices, {n_tokens, k});
    int64_t n_kept = 0;

    dsc::check(dsc_moe_count(experts, n_tokens, k, n_experts, data_of<int64_t>(counts)), op);
    for (int64_t e = 0; e < n_experts; e++)
        n_kept += data_of<int64_t>(counts)[e];
    const Tensor order = dsc::new_i64(indices, {n_kept});

    dsc::check(dsc_moe_sort(experts, n_tokens, k, n_experts, data_of<int64_t>(counts), data_of<int64_t>(scratch),
                            data_of<int64_t>(order), data_of<int64_t>(inverse)),
               op);
    return {order, inverse, counts};
}

Tensor moe_gather(const Tensor &x_in, const Tensor &order, int64_t k, const Tensor &inverse)
{
    const char *const op = "moe_gather";
    const Tensor x = dsc::contiguous(x_in);
    const Operands o(op, x, "x");
    struct dsc_moe_gather call = {};

    call.order = o.read_i64(order, "order", 1);
    call.inverse = o.read_i64(inverse, "inverse", 2);
    call.n_tokens = x.sizes()[0];
    call.n_slots = order.sizes()[0];
    call.k = k;
    call.n_cols = o.n_cols;
    call.dtype = o.dtype;
    call.x = o.read_all(x, "x");
    check_elems(inverse, op, "inverse", call.n_tokens * k);
    const Tensor rows = dsc::new_like(x, {call.n_slots, call.n_cols});

    call.rows = rows.mutable_data_ptr();
    o.run(dsc_moe_gather, dsc_moe_gather_check, &dsc_accel::moe_gather, call);
    return rows;
}

std::tuple<Tensor, Tensor> moe_permute(const Tensor &rows_in, const Tensor &order)
{
    const char *const op = "moe_permute";
    const Tensor rows = dsc::contiguous(rows_in);
    const Operands o(op, rows, "rows");
    struct dsc_moe_gather call = {};

    call.order = o.read_i64(order, "order", 1);
    call.n_tokens = call.n_slots = rows.sizes()[0];
    call.k = 1;
    call.n_cols = o.n_cols;
    call.dtype = o.dtype;
    call.x = o.read_all(rows, "rows");
    check_elems(order, op, "order", call.n_slots);
    const Tensor inverse = dsc::new_i64(order, {call.n_slots});
    const Tensor out = dsc::empty_like(rows);
    auto *const out_inverse = data_of<int64_t>(inverse);

    call.inverse = out_inverse;
    call.rows = out.mutable_data_ptr();
    o.run_at([&](const struct dsc_par *) { return dsc_moe_invert(call.order, call.n_slots, out_inverse); },
             [&] { return dsc_moe_invert_check(call.order, call.n_slots, out_inverse); },
             [&](const struct dsc_accel &accel, void *stream) {
                 return accel.moe_invert(call.order, call.n_slots, out_inverse, stream);
             });
    o.run(dsc_moe_gather, dsc_moe_gather_check, &dsc_accel::moe_gather, call);
    return {out, inverse};
}

/* Begins the call of combine or of its gradient: sizes, rows, inverse and weights, all of them dense. */
template <class Call>
Call begin_combine(const Operands &o, const Tensor &rows, const Tensor &inverse, const MaybeTensor &weights)
{
    Call call = {};

    call.inverse = o.read_i64(inverse, "inverse", 2);
    call.n_tokens = inverse.sizes()[0];
    call.k = inverse.sizes()[1];
    call.n_slots = rows.sizes()[0];
    call.n_cols = o.n_cols;
    call.dtype = o.dtype;
    call.rows = o.read_all(rows, "rows");
    call.weights = weights.has_value() ? o.read_f32(*weights, "weights", call.n_tokens * call.k) : nullptr;
    return call;
}

Tensor moe_combine(const Tensor &rows_in, const Tensor &inverse, const MaybeTensor &weights_in)
{
    const Tensor rows = dsc::contiguous(rows_in);
    const MaybeTensor weights = dsc::dense_of(weights_in);
    const Operands o("moe_combine", rows, "rows");
    auto call = begin_combine<struct dsc_moe_combine>(o, rows, inverse, weights);
    const Tensor out = dsc::new_like(rows, {call.n_tokens, call.n_cols});

    call.out = out.mutable_data_ptr();
    o.run(dsc_moe_combine, dsc_moe_combine_check, &dsc_accel::moe_combine, call);
    return out;
}

std::tuple<Tensor, Tensor> moe_combine_backward(const Tensor &dout_in, const Tensor &rows_in, const Tensor &inverse,
                                                const MaybeTensor &weights_in, bool needs_weights)
{
    const Tensor dout = dsc::contiguous(dout_in);
    const Tensor rows = dsc::contiguous(rows_in);
    const MaybeTensor weights = dsc::dense_of(weights_in);
    const Operands o("moe_combine_backward", rows, "rows");
    auto call = begin_combine<struct dsc_moe_combine_grad>(o, rows, inverse, weights);

    call.dout = o.read(dout, "dout", call.n_tokens * call.n_cols);
    const Tensor drows = dsc::empty_like(rows);
    const Tensor dweights = dsc::new_f32(rows, {needs_weights ? call.n_tokens : 0, call.k});
    const Tensor scratch = dsc::new_i64(rows, {call.n_slots});

    call.drows = drows.mutable_data_ptr();
    call.dweights = needs_weights ? data_of<float>(dweights) : nullptr;
    call.scratch = data_of<int64_t>(scratch);
    o.run(dsc_moe_combine_grad, dsc_moe_combine_grad_check, &dsc_accel::moe_combine_grad, call);
    return {drows, dweights};
}

}  // namespace

DSC_OPS(m)
{
    m.def(
        "moe_route_(Tensor logits, Tensor? bias, bool is_sigmoid, int n_groups, int n_limited_groups, Tensor(a!) out, Tensor(b!) bad) -> ()");
    m.def("moe_uniform_(Tensor(a!) out, int seed, int offset) -> ()");
    m.def(
        "moe_place(Tensor indices, int n_experts, int capacity, str order, Tensor? priority) -> (Tensor kept, Tensor locations, Tensor counts)");
    m.def("moe_sort(Tensor indices, int n_experts) -> (Tensor order, Tensor inverse, Tensor counts)");
    m.def("moe_gather(Tensor x, Tensor order, int k, Tensor inverse) -> Tensor");
    m.def("moe_permute(Tensor rows, Tensor order) -> (Tensor out, Tensor inverse)");
    m.def("moe_combine(Tensor rows, Tensor inverse, Tensor? weights) -> Tensor");
    m.def(
        "moe_combine_backward(Tensor dout, Tensor rows, Tensor inverse, Tensor? weights, bool needs_weights) -> (Tensor drows, Tensor dweights)");
}

/* The operators on rows. */
#define ROW_IMPLEMENTATIONS(m)                    \
    m.impl("moe_gather", DSC_BOX(&moe_gather));   \
    m.impl("moe_permute", DSC_BOX(&moe_permute)); \
    m.impl("moe_combine", DSC_BOX(&moe_combine)); \
    m.impl("moe_combine_backward", DSC_BOX(&moe_combine_backward))

DSC_OPS_CPU(m)
{
    m.impl("moe_route_", DSC_BOX(&moe_route));
    m.impl("moe_uniform_", DSC_BOX(&moe_uniform));
    m.impl("moe_place", DSC_BOX(&moe_place));
    m.impl("moe_sort", DSC_BOX(&moe_sort));
    ROW_IMPLEMENTATIONS(m);
}

#define DSC_ACCEL_BUILTIN(name, entry)
#define DSC_ACCEL_LIBRARY(name, file, key) \
    DSC_OPS_ON(key, m)                     \
    {                                      \
        ROW_IMPLEMENTATIONS(m);            \
    }
#include "dsc/accelerators.inc"
#undef DSC_ACCEL_BUILTIN
#undef DSC_ACCEL_LIBRARY
