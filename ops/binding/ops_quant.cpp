/*
 * The operators of dsc/quant.h. Rows are all dimensions but the last. Quantization runs on accelerators too, the
 * product on the host alone.
 */
#include "operands.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

namespace {

using dsc::MaybeTensor;
using dsc::Operands;
using dsc::Tensor;

/* How a tensor is quantized, as the operators' schemas have it. */
struct How {
    std::string format;
    int64_t group; /* 0: the whole row */
    bool is_symmetric;
    int64_t scale_type; /* dsc_quant_scale */
    std::optional<int64_t> seed;
    int64_t offset;
};

struct dsc_quant begin(const Operands &o, const How &how, const char *op)
{
    auto call = o.begin<struct dsc_quant>();

    dsc::check(dsc_quant_find(how.format.c_str(), &call.format), op);
    call.group = how.group == 0 ? call.n_cols : how.group;
    call.is_symmetric = how.is_symmetric;
    call.scale_type = static_cast<dsc_quant_scale>(how.scale_type);
    call.is_stochastic = how.seed.has_value();
    call.seed = static_cast<uint64_t>(how.seed.value_or(0));
    call.offset = how.offset;
    return call;
}

/* Sets scales and zero points that are given, or that make the call's format symmetric. */
void give(const Operands &o, const Tensor &scales, const MaybeTensor &zero_points, struct dsc_quant *call)
{
    const int64_t n_groups = call->n_rows * dsc_quant_n_groups(call->n_cols, call->group);

    call->has_scales = true;
    call->is_symmetric = !zero_points.has_value();
    call->scales = static_cast<float *>(o.read_f32(scales, "scales", n_groups));
    if (zero_points.has_value())
        call->zero_points = static_cast<int8_t *>(o.read_int8(*zero_points, "zero_points", n_groups));
}

using Core = dsc_status(const struct dsc_quant *, const struct dsc_par *);
using Check = dsc_status(const struct dsc_quant *);
using Twin = dsc_status (*dsc_accel::*)(const struct dsc_quant *, double *, void *);

/* Runs a call on the device of its operands, of which `like` is one. */
void run(const Operands &o, Core *core, Check *check, Twin twin, const struct dsc_quant &call, const Tensor &like)
{
    o.run_at([&](const struct dsc_par *par) { return core(&call, par); }, [&] { return check(&call); },
             [&](const struct dsc_accel &accel, void *stream) {
                 const Tensor scratch = dsc::new_f64(like.get(), {DSC_ACCEL_SCRATCH_ELEMS}, false);

                 return (accel.*twin)(&call, dsc::f64_data(scratch), stream);
             });
}

Tensor quant_fake(const Tensor &x_in, const std::string &format, int64_t group, bool is_symmetric, int64_t scale_type,
                  std::optional<int64_t> seed, int64_t offset)
{
    const Tensor x = dsc::contiguous(x_in);
    const Operands o("quant_fake", x, "x");
    const Tensor y = dsc::empty_like(x);
    auto call = begin(o, {format, group, is_symmetric, scale_type, seed, offset}, "quant_fake");

    call.x = o.read_all(x, "x");
    call.y = y.mutable_data_ptr();
    run(o, dsc_quant_fake, dsc_quant_fake_check, &dsc_accel::quant_fake, call, x);
    return y;
}

Tensor quant_fake_with(const Tensor &x_in, const Tensor &scales, const MaybeTensor &zero_points,
                       const std::string &format, int64_t group)
{
    const Tensor x = dsc::contiguous(x_in);
    const Operands o("quant_fake_with", x, "x");
    const Tensor y = dsc::empty_like(x);
    auto call = begin(o, {format, group, true, DSC_QUANT_SCALE_F32, std::nullopt, 0}, "quant_fake_with");

    give(o, scales, zero_points, &call);
    call.x = o.read_all(x, "x");
    call.y = y.mutable_data_ptr();
    run(o, dsc_quant_fake, dsc_quant_fake_check, &dsc_accel::quant_fake, call, x);
    return y;
}

std::tuple<Tensor, Tensor, Tensor> quant_quantize(const Tensor &x_in, const std::string &format, int64_t group,
                                                  bool is_symmetric, int64_t scale_type, std::optional<int64_t> seed,
                                                  int64_t offset)
{
    const Tensor x = dsc::contiguous(x_in);
    const Operands o("quant_quantize", x, "x");
    auto call = begin(o, {format, group, is_symmetric, scale_type, seed, offset}, "quant_quantize");
    const int64_t n_groups = o.n_rows == 0 ? 0 : dsc_quant_n_groups(call.n_cols, call.group);
    const int64_t row_bytes = o.n_rows == 0 ? 0 : dsc_quant_row_bytes(call.format, call.n_cols);
    const Tensor codes = dsc::new_bytes(x, dsc::sizes_with(x, row_bytes));
    const Tensor scales = dsc::new_f32(x, dsc::sizes_with(x, n_groups));
    const Tensor zero_points = dsc::new_int8(x, dsc::sizes_with(x, is_symmetric ? 0 : n_groups));

    call.x = o.read_all(x, "x");
    call.codes = codes.mutable_data_ptr();
    call.scales = static_cast<float *>(scales.mutable_data_ptr());
    call.zero_points = is_symmetric ? nullptr : static_cast<int8_t *>(zero_points.mutable_data_ptr());
    run(o, dsc_quant_quantize, dsc_quant_quantize_check, &dsc_accel::quant_quantize, call, x);
    return {codes, scales, zero_points};
}

/* The result is written to out, [..., n_cols]. */
void quant_dequantize(const Tensor &codes, const Tensor &scales, const MaybeTensor &zero_points,
                      const std::string &format, int64_t group, const Tensor &out)
{
    const Operands o("quant_dequantize_", out, "out");
    auto call = begin(o, {format, group, true, DSC_QUANT_SCALE_F32, std::nullopt, 0}, "quant_dequantize_");

    give(o, scales, zero_points, &call);
    call.codes = o.read_bytes(codes, "codes", call.n_rows * dsc_quant_row_bytes(call.format, call.n_cols));
    call.y = o.read_all(out, "out");
    run(o, dsc_quant_dequantize, dsc_quant_dequantize_check, &dsc_accel::quant_dequantize, call, out);
}

/* y [..., n_outputs]; packed [n_outputs, words of a row], scales [n_outputs, n_groups]. */
Tensor quant_packed_linear(const Tensor &x_in, const Tensor &packed, const Tensor &scales, const MaybeTensor &bias,
                           int64_t bits, int64_t group)
{
    const Tensor x = dsc::contiguous(x_in);
    const Operands o("quant_packed_linear", x, "x");
    const auto sizes = x.sizes();
    struct dsc_quant_product call {};

    if (packed.sizes().size() != 2)
        o.fail("packed", "must have 2 dimensions");
    if (bits != 8 && bits != 4)
        o.fail("bits", "is " + std::to_string(bits) + ", must be 8 or 4");
    call.n_cols = sizes[sizes.size() - 1];
    call.n_rows = 1;
    for (size_t i = 0; i + 1 < sizes.size(); i++)
        call.n_rows *= sizes[i];
    call.n_outputs = packed.sizes()[0];
    call.bits = static_cast<int32_t>(bits);
    call.group = group == 0 ? std::max<int64_t>(call.n_cols, 1) : group;
    call.dtype = o.dtype;
    call.x = o.read_any(x, "x", call.n_rows * call.n_cols, &call.dtype);
    call.codes = o.read_words(packed, "packed", call.n_outputs * ((call.n_cols * bits + 31) / 32));
    call.scales =
        o.read_any(scales, "scales", call.n_outputs * dsc_quant_n_groups(call.n_cols, call.group), &call.scale_dtype);
    if (bias.has_value())
        call.bias = o.read_any(*bias, "bias", call.n_outputs, &call.bias_dtype);

    const Tensor y = dsc::new_like(x, dsc::sizes_with(x, call.n_outputs));

    call.y = y.mutable_data_ptr();
    o.run(dsc_quant_product, call);
    return y;
}

}  // namespace

DSC_OPS(m)
{
    m.def(
        "quant_fake(Tensor x, str format, int group, bool is_symmetric, int scale_type, int? seed, int offset) -> Tensor");
    m.def("quant_fake_with(Tensor x, Tensor scales, Tensor? zero_points, str format, int group) -> Tensor");
    m.def(
        "quant_quantize(Tensor x, str format, int group, bool is_symmetric, int scale_type, int? seed, int offset) -> (Tensor codes, Tensor scales, Tensor zero_points)");
    m.def(
        "quant_dequantize_(Tensor codes, Tensor scales, Tensor? zero_points, str format, int group, Tensor(a!) out) -> ()");
    m.def("quant_packed_linear(Tensor x, Tensor packed, Tensor scales, Tensor? bias, int bits, int group) -> Tensor");
}

/* The operators on groups. */
#define GROUP_IMPLEMENTATIONS(m)                          \
    m.impl("quant_fake", DSC_BOX(&quant_fake));           \
    m.impl("quant_fake_with", DSC_BOX(&quant_fake_with)); \
    m.impl("quant_quantize", DSC_BOX(&quant_quantize));   \
    m.impl("quant_dequantize_", DSC_BOX(&quant_dequantize))

DSC_OPS_CPU(m)
{
    GROUP_IMPLEMENTATIONS(m);
    m.impl("quant_packed_linear", DSC_BOX(&quant_packed_linear));
}

#define DSC_ACCEL_BUILTIN(name, entry)
#define DSC_ACCEL_LIBRARY(name, file, key) \
    DSC_OPS_ON(key, m)                     \
    {                                      \
        GROUP_IMPLEMENTATIONS(m);          \
    }
#include "dsc/accelerators.inc"
#undef DSC_ACCEL_BUILTIN
#undef DSC_ACCEL_LIBRARY
