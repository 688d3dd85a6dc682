/* The operators of dsc/nn.h. They are functional, and each backward is a separate operator. */
#include "operands.h"

#include <string>
#include <tuple>
#include <vector>

namespace {

using dsc::dense_of;
using dsc::MaybeTensor;
using dsc::Operands;
using dsc::Tensor;

/* The tensor of a sum over rows and the scratch of its chunks; empty if the sum is not wanted. */
struct RowSum {
    RowSum(const Tensor &like, const Operands &rows, bool is_wanted)
        : tensor(dsc::new_like(like, {is_wanted ? rows.n_cols : 0})),
          data(is_wanted ? tensor.mutable_data_ptr() : nullptr),
          scratch(static_cast<size_t>(dsc_nn_scratch_elems(rows.n_rows, rows.n_cols, is_wanted ? 1 : 0)))
    {
    }

    Tensor tensor;
    void *data;
    std::vector<float> scratch;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> nn_norm(const Tensor &x_in, const MaybeTensor &residual_in,
                                                   const MaybeTensor &weight, const MaybeTensor &bias, double eps,
                                                   bool is_rms)
{
    const Tensor x = dsc::contiguous(x_in);
    const MaybeTensor residual = dense_of(residual_in);
    const Operands o("nn_norm", x, "x");
    auto norm = o.begin<struct dsc_nn_norm>();

    norm.weight_dtype = o.dtype;
    norm.is_rms = is_rms;
    norm.eps = static_cast<float>(eps);
    norm.x = o.read_all(x, "x");
    norm.residual = o.read_all(residual, "residual");
    norm.weight = o.read_weight(weight, "weight", &norm.weight_dtype);
    dsc_dtype bias_dtype = norm.weight_dtype;
    norm.bias = o.read_weight(bias, "bias", &bias_dtype);
    if (bias_dtype != norm.weight_dtype) {
        if (weight.has_value())
            o.fail("bias", "must have weight's dtype");
        norm.weight_dtype = bias_dtype;
    }
    const Tensor y = dsc::empty_like(x);
    const Tensor sum = residual.has_value() ? dsc::empty_like(x) : dsc::new_like(x, {0});
    const Tensor mean = dsc::new_f32(x, {is_rms ? 0 : o.n_rows});
    const Tensor rstd = dsc::new_f32(x, {o.n_rows});

    norm.y = y.mutable_data_ptr();
    norm.sum = residual.has_value() ? sum.mutable_data_ptr() : nullptr;
    norm.mean = is_rms ? nullptr : static_cast<float *>(mean.mutable_data_ptr());
    norm.rstd = static_cast<float *>(rstd.mutable_data_ptr());
    o.run(dsc_nn_norm, dsc_nn_norm_check, &dsc_accel::nn_norm, norm);
    return {y, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> nn_norm_backward(const Tensor &dy_in, const MaybeTensor &dsum_in, const Tensor &sum,
                                                    const MaybeTensor &weight, const Tensor &mean, const Tensor &rstd,
                                                    bool is_rms, bool needs_weight, bool needs_bias,
                                                    const MaybeTensor &bias)
{
    const Tensor dy = dsc::contiguous(dy_in);
    const MaybeTensor dsum = dense_of(dsum_in);
    const Operands o("nn_norm_backward", sum, "sum");
    auto grad = o.begin<struct dsc_nn_norm_grad>();

    grad.weight_dtype = o.dtype;
    grad.is_rms = is_rms;
    grad.sum = o.read_all(sum, "sum");
    grad.weight = o.read_weight(weight, "weight", &grad.weight_dtype);
    if (!weight.has_value())
        o.read_weight(bias, "bias", &grad.weight_dtype);
    grad.dy = o.read_all(dy, "dy");
    grad.dsum = o.read_all(dsum, "dsum");
    grad.mean = is_rms ? nullptr : o.read_f32(mean, "mean", o.n_rows);
    grad.rstd = o.read_f32(rstd, "rstd", o.n_rows);
    const Tensor dx = dsc::empty_like(sum);
    const Tensor &like = weight.has_value() ? *weight : bias.has_value() ? *bias : sum;
    const Tensor dweight = dsc::new_like(like, {needs_weight ? o.n_cols : 0});
    const Tensor dbias = dsc::new_like(like, {needs_bias ? o.n_cols : 0});
    std::vector<float> scratch(
        static_cast<size_t>(dsc_nn_scratch_elems(o.n_rows, o.n_cols, int{needs_weight} + int{needs_bias})));

    grad.dx = dx.mutable_data_ptr();
    grad.dweight = needs_weight ? dweight.mutable_data_ptr() : nullptr;
    grad.dbias = needs_bias ? dbias.mutable_data_ptr() : nullptr;
    grad.scratch = scratch.data();
    o.run(dsc_nn_norm_grad, dsc_nn_norm_grad_check, &dsc_accel::nn_norm_grad, grad);
    return {dx, dweight, dbias};
}

Tensor nn_bias_act(const Tensor &x_in, const MaybeTensor &bias, const std::string &act)
{
    const Tensor x = dsc::contiguous(x_in);
    const Operands o("nn_bias_act", x, "x");
    const Tensor y = dsc::empty_like(x);
    auto call = o.begin<struct dsc_nn_bias_act>();

    call.act = o.act_named(act);
    call.x = o.read_all(x, "x");
    call.bias = o.read_cols(bias, "bias");
    call.y = y.mutable_data_ptr();
    o.run(dsc_nn_bias_act, dsc_nn_bias_act_check, &dsc_accel::nn_bias_act, call);
    return y;
}

std::tuple<Tensor, Tensor> nn_bias_act_backward(const Tensor &dy_in, const Tensor &x_in, const MaybeTensor &bias,
                                                const std::string &act, bool needs_bias)
{
    const Tensor x = dsc::contiguous(x_in);
    const Tensor dy = dsc::contiguous(dy_in);
    const Operands o("nn_bias_act_backward", x, "x");
    const Tensor dx = dsc::empty_like(x);
    RowSum sum(x, o, needs_bias);
    auto call = o.begin<struct dsc_nn_bias_act_grad>();

    call.act = o.act_named(act);
    call.x = o.read_all(x, "x");
    call.bias = o.read_cols(bias, "bias");
    call.dy = o.read_all(dy, "dy");
    call.dx = dx.mutable_data_ptr();
    call.dbias = sum.data;
    call.scratch = sum.scratch.data();
    o.run(dsc_nn_bias_act_grad, dsc_nn_bias_act_grad_check, &dsc_accel::nn_bias_act_grad, call);
    return {dx, sum.tensor};
}

/* Gate and up: two tensors, or, without up, the two halves of each row of one tensor. */
struct Gates {
    Gates(const Operands &o, const Tensor &x, const MaybeTensor &up_in) : stride(o.n_cols), n_cols(o.n_cols)
    {
        gate = o.read_all(x, "x");
        if (up_in.has_value()) {
            up = o.read_all(*up_in, "up");
            return;
        }
        if (o.n_cols % 2 != 0 && o.n_rows > 0)
            o.fail("x", "has rows of " + std::to_string(o.n_cols) + " elements, which are no two halves");
        n_cols = o.n_rows > 0 ? o.n_cols / 2 : 1;
        up = half_of(gate, o);
    }

    void *half_of(void *data, const Operands &o) const
    {
        return static_cast<char *>(data) + static_cast<size_t>(n_cols) * dsc_dtype_bytes(o.dtype);
    }

    int64_t stride;
    int64_t n_cols;
    void *gate;
    void *up;
};

Tensor nn_gated(const Tensor &x_in, const MaybeTensor &up_in, const std::string &act)
{
    const Tensor x = dsc::contiguous(x_in);
    const MaybeTensor up = dense_of(up_in);
    const Operands o("nn_gated", x, "x");
    const Gates gates(o, x, up);
    const Tensor y = dsc::new_like(x, dsc::sizes_with(x, up.has_value() ? x.sizes().back() : x.sizes().back() / 2));
    auto call = o.begin<struct dsc_nn_gated>();

    call.n_cols = gates.n_cols;
    call.in_stride = gates.stride;
    call.act = o.act_named(act);
    call.gate = gates.gate;
    call.up = gates.up;
    call.y = y.mutable_data_ptr();
    o.run(dsc_nn_gated, dsc_nn_gated_check, &dsc_accel::nn_gated, call);
    return y;
}

std::tuple<Tensor, Tensor> nn_gated_backward(const Tensor &dy_in, const Tensor &x_in, const MaybeTensor &up_in,
                                             const std::string &act)
{
    const Tensor x = dsc::contiguous(x_in);
    const Tensor dy = dsc::contiguous(dy_in);
    const MaybeTensor up = dense_of(up_in);
    const Operands o("nn_gated_backward", x, "x");
    const Gates gates(o, x, up);
    const Tensor dx = dsc::empty_like(x);
    const Tensor dup = up.has_value() ? dsc::empty_like(*up) : dsc::new_like(x, {0});
    auto call = o.begin<struct dsc_nn_gated_grad>();

    call.n_cols = gates.n_cols;
    call.in_stride = gates.stride;
    call.act = o.act_named(act);
    call.gate = gates.gate;
    call.up = gates.up;
    call.dy = o.read(dy, "dy", o.n_rows * gates.n_cols);
    call.dgate = dx.mutable_data_ptr();
    call.dup = up.has_value() ? dup.mutable_data_ptr() : gates.half_of(call.dgate, o);
    o.run(dsc_nn_gated_grad, dsc_nn_gated_grad_check, &dsc_accel::nn_gated_grad, call);
    return {dx, dup};
}

Tensor nn_dropout(const Tensor &x_in, const MaybeTensor &bias, const MaybeTensor &residual_in, double p, int64_t seed)
{
    const Tensor x = dsc::contiguous(x_in);
    const MaybeTensor residual = dense_of(residual_in);
    const Operands o("nn_dropout", x, "x");
    const Tensor y = dsc::empty_like(x);
    auto call = o.begin<struct dsc_nn_dropout>();

    call.p = static_cast<float>(p);
    call.seed = static_cast<uint64_t>(seed);
    call.x = o.read_all(x, "x");
    call.bias = o.read_cols(bias, "bias");
    call.residual = o.read_all(residual, "residual");
    call.y = y.mutable_data_ptr();
    o.run(dsc_nn_dropout, dsc_nn_dropout_check, &dsc_accel::nn_dropout, call);
    return y;
}

std::tuple<Tensor, Tensor> nn_dropout_backward(const Tensor &dy_in, double p, int64_t seed, bool needs_bias)
{
    const Tensor dy = dsc::contiguous(dy_in);
    const Operands o("nn_dropout_backward", dy, "dy");
    const Tensor dx = dsc::empty_like(dy);
    RowSum sum(dy, o, needs_bias);
    auto call = o.begin<struct dsc_nn_dropout_grad>();

    call.p = static_cast<float>(p);
    call.seed = static_cast<uint64_t>(seed);
    call.dy = o.read_all(dy, "dy");
    call.dx = dx.mutable_data_ptr();
    call.dbias = sum.data;
    call.scratch = sum.scratch.data();
    o.run(dsc_nn_dropout_grad, dsc_nn_dropout_grad_check, &dsc_accel::nn_dropout_grad, call);
    return {dx, sum.tensor};
}

/* [batch, tokens, heads, head_dim] with any strides but the last, and tables [1 or batch, tokens, pairs]. */
Tensor nn_rotary(const Tensor &x, const Tensor &cos, const Tensor &sin, bool is_interleaved, bool is_inverse)
{
    const Operands o("nn_rotary", x, "x");
    const auto sizes = x.sizes();
    const auto strides = x.strides();

    if (sizes.size() != 4 || (sizes[3] > 1 && strides[3] != 1))
        o.fail("x", "must be [batch, tokens, heads, head_dim] with dense heads");
    const auto table = cos.sizes();

    if (table.size() != 3 || (table[0] != 1 && table[0] != sizes[0]) || table[1] != sizes[1])
        o.fail("cos",
               "must be [1 or " + std::to_string(sizes[0]) + ", " + std::to_string(sizes[1]) + ", rotary_dim / 2]");
    const Tensor y = dsc::empty_like(x); /* the strides of x, if x is dense in some order */
    const auto y_strides = y.strides();
    struct dsc_nn_rotary call {};

    call.n_batch = sizes[0];
    call.n_tokens = sizes[1];
    call.n_heads = sizes[2];
    call.head_dim = o.n_cols;
    call.rotary_dim = 2 * table[2];
    call.dtype = o.dtype;
    call.is_interleaved = is_interleaved;
    call.is_inverse = is_inverse;
    call.x = dsc::view_of(x.get()).data;
    call.cos = o.read_f32(cos, "cos", table[0] * table[1] * table[2]);
    call.sin = o.read_f32(sin, "sin", table[0] * table[1] * table[2]);
    call.table_strides[0] = table[0] == 1 ? 0 : table[1] * table[2];
    call.table_strides[1] = table[2];
    call.y = y.mutable_data_ptr();
    for (size_t i = 0; i < 3; i++) {
        call.x_strides[i] = strides[i];
        call.y_strides[i] = y_strides[i];
    }
    o.run(dsc_nn_rotary, dsc_nn_rotary_check, &dsc_accel::nn_rotary, call);
    return y;
}

/* Reads the mask [batch, heads, queries, keys]; any stride but the last may be 0. */
void read_mask(const Operands &o, const Tensor &x, const Tensor &mask, struct dsc_nn_softmax *call)
{
    const dsc::View view = o.view_of(mask, "mask");
    const auto sizes = mask.sizes();
    const auto strides = mask.strides();

    for (size_t i = 0; i < 4; i++)
        if (sizes.size() != 4 || sizes[i] != x.sizes()[i])
            o.fail("mask", "must have x's shape (expanded, which takes no memory)");
    if (sizes[3] > 1 && strides[3] != 1)
        o.fail("mask", "must be dense in its last dimension");
    call->mask_kind = view.dtype == aoti_torch_dtype_bool() ? DSC_NN_MASK_KEEP : DSC_NN_MASK_ADD;
    if (call->mask_kind == DSC_NN_MASK_ADD && o.element_dtype(view, "mask") != o.dtype)
        o.fail("mask", "must be of bool or of x's dtype");
    call->mask = view.data;
    for (size_t i = 0; i < 3; i++)
        call->mask_strides[i] = sizes[i] == 1 ? 0 : strides[i];
}

Tensor nn_softmax(const Tensor &x_in, const MaybeTensor &mask, double scale, bool is_causal)
{
    const Tensor x = dsc::contiguous(x_in);
    const Operands o("nn_softmax", x, "x");
    const auto sizes = x.sizes();

    if (sizes.size() != 4)
        o.fail("x", "must be [batch, heads, queries, keys]");
    const Tensor y = dsc::empty_like(x);
    struct dsc_nn_softmax call {};

    call.n_batch = sizes[0];
    call.n_heads = sizes[1];
    call.n_queries = o.n_rows > 0 ? sizes[2] : 0;
    call.n_keys = o.n_cols;
    call.dtype = o.dtype;
    call.scale = static_cast<float>(scale);
    call.is_causal = is_causal;
    if (mask.has_value())
        read_mask(o, x, *mask, &call);
    call.x = o.read_all(x, "x");
    call.y = y.mutable_data_ptr();
    o.run(dsc_nn_softmax, dsc_nn_softmax_check, &dsc_accel::nn_softmax, call);
    return y;
}

Tensor nn_softmax_backward(const Tensor &dy_in, const Tensor &y, double scale)
{
    const Tensor dy = dsc::contiguous(dy_in);
    const Operands o("nn_softmax_backward", y, "y");
    const Tensor dx = dsc::empty_like(y);
    auto call = o.begin<struct dsc_nn_softmax_grad>();

    call.scale = static_cast<float>(scale);
    call.y = o.read_all(y, "y");
    call.dy = o.read_all(dy, "dy");
    call.dx = dx.mutable_data_ptr();
    o.run(dsc_nn_softmax_grad, dsc_nn_softmax_grad_check, &dsc_accel::nn_softmax_grad, call);
    return dx;
}

/* The arguments that a divergence and its gradient share. */
template <class Call>
Call begin_divergence(const Operands &o, const Tensor &student, const Tensor &teacher, const MaybeTensor &is_counted,
                      double beta, double scale)
{
    auto call = o.begin<Call>();

    call.beta = static_cast<float>(beta);
    call.scale = static_cast<float>(scale);
    call.student = o.read_all(student, "student");
    call.teacher = o.read_any(teacher, "teacher", student.numel(), &call.teacher_dtype);
    if (is_counted.has_value())
        call.is_counted = static_cast<const uint8_t *>(o.read_bytes(*is_counted, "is_counted", o.n_rows));
    return call;
}

constexpr int64_t ROW_FLOATS = sizeof(struct dsc_nn_divergence_row) / sizeof(float);

std::tuple<Tensor, Tensor> nn_divergence(const Tensor &student_in, const Tensor &teacher_in,
                                         const MaybeTensor &is_counted, double beta, double scale)
{
    const Tensor student = dsc::contiguous(student_in);
    const Tensor teacher = dsc::contiguous(teacher_in);
    const Operands o("nn_divergence", student, "student");
    const Tensor losses = dsc::new_f32(student, {o.n_rows});
    const Tensor rows = dsc::new_f32(student, {o.n_rows, ROW_FLOATS});
    auto call = begin_divergence<struct dsc_nn_divergence>(o, student, teacher, is_counted, beta, scale);

    call.losses = static_cast<float *>(losses.mutable_data_ptr());
    call.rows = static_cast<struct dsc_nn_divergence_row *>(rows.mutable_data_ptr());
    o.run(dsc_nn_divergence, call);
    return {losses, rows};
}

Tensor nn_divergence_backward(const Tensor &dlosses_in, const Tensor &student_in, const Tensor &teacher_in,
                              const MaybeTensor &is_counted, const Tensor &rows, double beta, double scale)
{
    const Tensor student = dsc::contiguous(student_in);
    const Tensor teacher = dsc::contiguous(teacher_in);
    const Tensor dlosses = dsc::contiguous(dlosses_in);
    const Operands o("nn_divergence_backward", student, "student");
    const Tensor dstudent = dsc::empty_like(student);
    auto call = begin_divergence<struct dsc_nn_divergence_grad>(o, student, teacher, is_counted, beta, scale);

    call.rows = reinterpret_cast<const struct dsc_nn_divergence_row *>(o.read_f32(rows, "rows", o.n_rows * ROW_FLOATS));
    call.dlosses = o.read_f32(dlosses, "dlosses", o.n_rows);
    call.dstudent = dstudent.mutable_data_ptr();
    o.run(dsc_nn_divergence_grad, call);
    return dstudent;
}

}  // namespace

DSC_OPS(m)
{
    m.def(
        "nn_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool is_rms) -> (Tensor y, Tensor sum, "
        "Tensor mean, Tensor rstd)");
    m.def(
        "nn_norm_backward(Tensor dy, Tensor? dsum, Tensor sum, Tensor? weight, Tensor mean, Tensor rstd, bool is_rms, "
        "bool needs_weight, bool needs_bias, Tensor? bias) -> (Tensor dx, Tensor dweight, Tensor dbias)");
    m.def("nn_bias_act(Tensor x, Tensor? bias, str act) -> Tensor");
    m.def(
        "nn_bias_act_backward(Tensor dy, Tensor x, Tensor? bias, str act, bool needs_bias) -> (Tensor dx, Tensor dbias)");
    m.def("nn_gated(Tensor x, Tensor? up, str act) -> Tensor");
    m.def("nn_gated_backward(Tensor dy, Tensor x, Tensor? up, str act) -> (Tensor dx, Tensor dup)");
    m.def("nn_dropout(Tensor x, Tensor? bias, Tensor? residual, float p, int seed) -> Tensor");
    m.def("nn_dropout_backward(Tensor dy, float p, int seed, bool needs_bias) -> (Tensor dx, Tensor dbias)");
    m.def("nn_rotary(Tensor x, Tensor cos, Tensor sin, bool is_interleaved, bool is_inverse) -> Tensor");
    m.def("nn_softmax(Tensor x, Tensor? mask, float scale, bool is_causal) -> Tensor");
    m.def("nn_softmax_backward(Tensor dy, Tensor y, float scale) -> Tensor");
    m.def(
        "nn_divergence(Tensor student, Tensor teacher, Tensor? is_counted, float beta, float scale) -> (Tensor losses, Tensor rows)");
    m.def(
        "nn_divergence_backward(Tensor dlosses, Tensor student, Tensor teacher, Tensor? is_counted, Tensor rows, float beta, "
        "float scale) -> Tensor");
}

#define IMPLEMENTATIONS(m)                                          \
    m.impl("nn_norm", DSC_BOX(&nn_norm));                           \
    m.impl("nn_norm_backward", DSC_BOX(&nn_norm_backward));         \
    m.impl("nn_bias_act", DSC_BOX(&nn_bias_act));                   \
    m.impl("nn_bias_act_backward", DSC_BOX(&nn_bias_act_backward)); \
    m.impl("nn_gated", DSC_BOX(&nn_gated));                         \
    m.impl("nn_gated_backward", DSC_BOX(&nn_gated_backward));       \
    m.impl("nn_dropout", DSC_BOX(&nn_dropout));                     \
    m.impl("nn_dropout_backward", DSC_BOX(&nn_dropout_backward));   \
    m.impl("nn_rotary", DSC_BOX(&nn_rotary));                       \
    m.impl("nn_softmax", DSC_BOX(&nn_softmax));                     \
    m.impl("nn_softmax_backward", DSC_BOX(&nn_softmax_backward))

DSC_OPS_CPU(m)
{
    IMPLEMENTATIONS(m);
    /* Other devices compute the formula of ops/divergence.py with torch. */
    m.impl("nn_divergence", DSC_BOX(&nn_divergence));
    m.impl("nn_divergence_backward", DSC_BOX(&nn_divergence_backward));
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
