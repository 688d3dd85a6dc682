/* The optimizer operators. One call is one step over all tensors of a group. */
#include "check.h"
#include "dsc_torch.h"

#include <string>
#include <vector>

namespace {

using dsc::Checker;
using dsc::Tensor;
using dsc::TensorList;

/* The lists that all step operators begin with, unpacked. */
class Operands {
  public:
    Operands(const char *op, const TensorList &params, const TensorList &grads, const TensorList &state0,
             const TensorList &state1, const TensorList &copies)
        : checker(op), tensors(static_cast<size_t>(params.size()))
    {
        args.param_dtype = checker.read(params, "params", 1, [this](int64_t i, void *data, int64_t n_elems) {
            at(i).n_elems = n_elems;
            at(i).param = data;
        });
        if (grads.size() > 0 || params.size() == 0)
            args.grad_dtype =
                checker.read(grads, "grads", 2, [this](int64_t i, void *data, int64_t) { at(i).grad = data; });
        if (state0.size() > 0)
            args.state_dtype =
                checker.read(state0, "state0", 3, [this](int64_t i, void *data, int64_t) { at(i).state[0] = data; });
        if (state1.size() > 0) {
            const dsc_dtype dtype =
                checker.read(state1, "state1", 4, [this](int64_t i, void *data, int64_t) { at(i).state[1] = data; });

            if (dtype != args.state_dtype)
                dsc::fail(DSC_EINVAL, std::string("deepspeed_c::") + op + ": state0 and state1 are of two dtypes");
        }
        if (copies.size() > 0)
            args.copy_dtype =
                checker.read(copies, "copies", 5, [this](int64_t i, void *data, int64_t) { at(i).copy = data; });
    }

    /* Reads the codes and scales of one slot of the optimizer. The lists of an unused slot are empty. */
    void read_codes(const struct dsc_optim_kind *kind, int32_t slot, const TensorList &codes, int codes_index,
                    const TensorList &scales, int scales_index)
    {
        const dsc_q8_code code = dsc_optim_q8_code(kind, slot);
        const std::string number = std::to_string(slot);
        const auto at_slot = static_cast<size_t>(slot);

        if (code == DSC_Q8_NONE && slot == 0)
            dsc::fail(DSC_ENOTSUP, std::string("deepspeed_c::optim_step_q8_: the states of ") + dsc_optim_name(kind) +
                                       " cannot be quantised to 8 bits");
        if (codes.size() == 0 && scales.size() == 0)
            return;
        if (code == DSC_Q8_NONE)
            dsc::fail(DSC_EINVAL,
                      std::string("deepspeed_c::optim_step_q8_: ") + dsc_optim_name(kind) + " has no state " + number);
        checker.read_codes(codes, ("codes" + number).c_str(), codes_index, code,
                           [this, at_slot](int64_t i, void *data) { at(i).state[at_slot] = data; });
        checker.read_scales(scales, ("scales" + number).c_str(), scales_index,
                            [this, at_slot](int64_t i, void *data) { at(i).state_scale[at_slot] = data; });
    }

    int64_t size() const { return static_cast<int64_t>(tensors.size()); }

    Checker checker;
    std::vector<struct dsc_optim_tensor> tensors;
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;

  private:
    struct dsc_optim_tensor &at(int64_t i) { return tensors[static_cast<size_t>(i)]; }
};

const struct dsc_optim_kind *find_kind(const std::string &kind, const char *op)
{
    const struct dsc_optim_kind *found = nullptr;

    dsc::check(dsc_optim_find(kind.c_str(), &found), op);
    return found;
}

/* The hyper-parameters, in the order of the schemas. */
#define HYPER_SCHEMA                                                                                                 \
    "int step, float lr, float beta1, float beta2, float eps, float weight_decay, float momentum, float dampening, " \
    "float lr_decay, float min_coeff, float max_coeff, float grad_scale, int flags"
#define HYPER_PARAMS                                                                                       \
    int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay, double momentum, \
        double dampening, double lr_decay, double min_coeff, double max_coeff, double grad_scale, int64_t flags
#define SET_HYPER(args)                              \
    do {                                             \
        (args).step = step;                          \
        (args).lr = lr;                              \
        (args).beta1 = beta1;                        \
        (args).beta2 = beta2;                        \
        (args).eps = eps;                            \
        (args).weight_decay = weight_decay;          \
        (args).momentum = momentum;                  \
        (args).dampening = dampening;                \
        (args).lr_decay = lr_decay;                  \
        (args).min_coeff = min_coeff;                \
        (args).max_coeff = max_coeff;                \
        (args).grad_scale = grad_scale;              \
        (args).flags = static_cast<uint32_t>(flags); \
    } while (0)

void optim_step(const std::string &kind, const TensorList &params, const TensorList &grads, const TensorList &state0,
                const TensorList &state1, const TensorList &copies, HYPER_PARAMS)
{
    const char *const op = "optim_step_";
    const struct dsc_optim_kind *found = find_kind(kind, op);
    Operands operands(op, params, grads, state0, state1, copies);

    SET_HYPER(operands.args);
    dsc::run(
        operands.checker, op,
        [&](const struct dsc_par *par) {
            return dsc_optim_step(found, &operands.args, operands.tensors.data(), operands.size(), par);
        },
        [&](const struct dsc_accel &accel, void *stream) {
            const bool needs_scratch = dsc_optim_needs_norms(found);
            const Tensor scratch =
                dsc::new_f64(operands.checker.like(), {needs_scratch ? DSC_ACCEL_SCRATCH_ELEMS : 0}, false);

            return accel.optim_step(kind.c_str(), &operands.args, operands.tensors.data(), operands.size(),
                                    needs_scratch ? dsc::f64_data(scratch) : nullptr, stream);
        });
}

void optim_step_q8(const std::string &kind, const TensorList &params, const TensorList &grads, const TensorList &codes0,
                   const TensorList &codes1, const TensorList &copies, const TensorList &scales0,
                   const TensorList &scales1, HYPER_PARAMS)
{
    const char *const op = "optim_step_q8_";
    const struct dsc_optim_kind *found = find_kind(kind, op);
    Operands operands(op, params, grads, TensorList(), TensorList(), copies);
    const struct dsc_par par = dsc::pool_par();

    operands.read_codes(found, 0, codes0, 3, scales0, 6);
    operands.read_codes(found, 1, codes1, 4, scales1, 7);
    SET_HYPER(operands.args);
    operands.args.flags |= DSC_OPTIM_STATE_Q8;
    dsc::check(dsc_optim_step(found, &operands.args, operands.tensors.data(), operands.size(), &par), op);
}

void q8_quantize(const Tensor &values, const Tensor &codes, const Tensor &scales)
{
    const char *const op = "q8_quantize_";
    Checker checker(op);
    dsc_q8_code code = DSC_Q8_NONE;
    const dsc::View to = checker.read_first_codes(codes, "codes", 1, &code);
    const dsc::View from = checker.read_f32(values, "values", 0, to.n_elems);
    const dsc::View scale = checker.read_f32(scales, "scales", 2, dsc_q8_n_scales(to.n_elems));
    const struct dsc_par par = dsc::pool_par();

    dsc::check(dsc_q8_quantize(code, to.n_elems, from.data, to.data, scale.data, &par), op);
}

void q8_dequantize(const Tensor &codes, const Tensor &scales, int64_t begin, const Tensor &out)
{
    const char *const op = "q8_dequantize_";
    Checker checker(op);
    dsc_q8_code code = DSC_Q8_NONE;
    const dsc::View from = checker.read_first_codes(codes, "codes", 0, &code);
    const dsc::View scale = checker.read_f32(scales, "scales", 1, dsc_q8_n_scales(from.n_elems));
    const int64_t n_elems = dsc::view_of(out.get()).n_elems;
    const dsc::View to = checker.read_f32(out, "out", 3, n_elems);
    const struct dsc_par par = dsc::pool_par();

    if (begin < 0 || begin > from.n_elems || n_elems > from.n_elems - begin)
        dsc::fail(DSC_EINVAL, std::string("deepspeed_c::") + op + ": argument 2 (begin) is " + std::to_string(begin) +
                                  " for " + std::to_string(n_elems) + " elements out of " +
                                  std::to_string(from.n_elems));
    dsc::check(dsc_q8_dequantize(code, from.data, scale.data, begin, n_elems, to.data, &par), op);
}

Tensor optim_norms(const std::string &kind, const TensorList &params, const TensorList &grads, const TensorList &state0,
                   const TensorList &state1, const TensorList &copies, HYPER_PARAMS)
{
    const char *const op = "optim_norms_";
    const struct dsc_optim_kind *found = find_kind(kind, op);
    Operands operands(op, params, grads, state0, state1, copies);
    const int64_t n = operands.size();
    const Tensor sumsq = dsc::new_f64(operands.checker.like(), {n, 2}, true);

    SET_HYPER(operands.args);
    dsc::run(
        operands.checker, op,
        [&](const struct dsc_par *par) {
            return dsc_optim_norms(found, &operands.args, operands.tensors.data(), n, par, dsc::f64_data(sumsq));
        },
        [&](const struct dsc_accel &accel, void *stream) {
            const Tensor scratch = dsc::new_f64(operands.checker.like(), {DSC_ACCEL_SCRATCH_ELEMS}, false);

            return accel.optim_norms(kind.c_str(), &operands.args, operands.tensors.data(), n, dsc::f64_data(sumsq),
                                     dsc::f64_data(scratch), stream);
        });
    return sumsq;
}

void optim_apply(const std::string &kind, const TensorList &params, const TensorList &grads, const TensorList &state0,
                 const TensorList &state1, const TensorList &copies, HYPER_PARAMS, const Tensor &ratios)
{
    const char *const op = "optim_apply_";
    const struct dsc_optim_kind *found = find_kind(kind, op);
    Operands operands(op, params, grads, state0, state1, copies);
    const int64_t n = operands.size();
    const dsc::View view = dsc::view_of(ratios.get());

    SET_HYPER(operands.args);
    if (view.dtype != aoti_torch_dtype_float64() || view.n_elems != n || !view.is_contiguous ||
        dsc::is_cpu(view.device_type) != operands.checker.is_on_cpu())
        dsc::fail(DSC_EINVAL, std::string("deepspeed_c::") + op + ": argument 19 (ratios) must be " +
                                  std::to_string(n) + " contiguous float64 elements on the device of params, not " +
                                  std::to_string(view.n_elems) + " elements of " + dsc::dtype_name(view.dtype) +
                                  " on " + dsc::device_name(view.device_type));
    const auto *data = static_cast<const double *>(view.data);
    dsc::run(
        operands.checker, op,
        [&](const struct dsc_par *par) {
            return dsc_optim_apply(found, &operands.args, operands.tensors.data(), n, par, data);
        },
        [&](const struct dsc_accel &accel, void *stream) {
            return accel.optim_apply(kind.c_str(), &operands.args, operands.tensors.data(), n, data, stream);
        });
}

void muon_momentum(const TensorList &grads, const TensorList &momentum_buffers, const TensorList &updates,
                   double momentum, double grad_scale, int64_t flags)
{
    const char *const op = "muon_momentum_";
    std::vector<struct dsc_optim_tensor> tensors(static_cast<size_t>(grads.size()));
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    Checker checker(op);

    args.grad_dtype = checker.read(grads, "grads", 0, [&](int64_t i, void *data, int64_t n_elems) {
        tensors[static_cast<size_t>(i)].n_elems = n_elems;
        tensors[static_cast<size_t>(i)].grad = data;
    });
    args.state_dtype = checker.read(momentum_buffers, "momentum_buffers", 1, [&](int64_t i, void *data, int64_t) {
        tensors[static_cast<size_t>(i)].state[0] = data;
    });
    args.copy_dtype = checker.read(
        updates, "updates", 2, [&](int64_t i, void *data, int64_t) { tensors[static_cast<size_t>(i)].copy = data; });
    args.momentum = momentum;
    args.grad_scale = grad_scale;
    args.flags = static_cast<uint32_t>(flags);
    dsc::run(
        checker, op,
        [&](const struct dsc_par *par) { return dsc_muon_momentum(&args, tensors.data(), grads.size(), par); },
        [&](const struct dsc_accel &accel, void *stream) {
            return accel.muon_momentum(&args, tensors.data(), grads.size(), stream);
        });
}

void muon_apply(const TensorList &params, const TensorList &updates, const TensorList &copies, double lr,
                double weight_decay)
{
    const char *const op = "muon_apply_";
    std::vector<struct dsc_optim_tensor> tensors(static_cast<size_t>(params.size()));
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    Checker checker(op);

    args.param_dtype = checker.read(params, "params", 0, [&](int64_t i, void *data, int64_t n_elems) {
        tensors[static_cast<size_t>(i)].n_elems = n_elems;
        tensors[static_cast<size_t>(i)].param = data;
    });
    args.grad_dtype = checker.read(
        updates, "updates", 1, [&](int64_t i, void *data, int64_t) { tensors[static_cast<size_t>(i)].grad = data; });
    if (copies.size() > 0)
        args.copy_dtype = checker.read(
            copies, "copies", 2, [&](int64_t i, void *data, int64_t) { tensors[static_cast<size_t>(i)].copy = data; });
    args.lr = lr;
    args.weight_decay = weight_decay;
    dsc::run(
        checker, op,
        [&](const struct dsc_par *par) { return dsc_muon_apply(&args, tensors.data(), params.size(), par); },
        [&](const struct dsc_accel &accel, void *stream) {
            return accel.muon_apply(&args, tensors.data(), params.size(), stream);
        });
}

}  // namespace

DSC_OPS(m)
{
    m.def(
        "optim_step_(str kind, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state0, Tensor(c!)[] state1, Tensor(d!)[] copies, " HYPER_SCHEMA
        ") -> ()");
    m.def(
        "optim_step_q8_(str kind, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] codes0, Tensor(c!)[] codes1, Tensor(d!)[] copies, "
        "Tensor(e!)[] scales0, Tensor(f!)[] scales1, " HYPER_SCHEMA ") -> ()");
    m.def("q8_quantize_(Tensor values, Tensor(a!) codes, Tensor(b!) scales) -> ()");
    m.def("q8_dequantize_(Tensor codes, Tensor scales, int begin, Tensor(a!) out) -> ()");
    m.def(
        "optim_norms_(str kind, Tensor[] params, Tensor[] grads, Tensor(b!)[] state0, Tensor(c!)[] state1, Tensor[] copies, " HYPER_SCHEMA
        ") -> Tensor");
    m.def(
        "optim_apply_(str kind, Tensor(a!)[] params, Tensor[] grads, Tensor[] state0, Tensor[] state1, Tensor(d!)[] copies, " HYPER_SCHEMA
        ", Tensor ratios) -> ()");
    m.def(
        "muon_momentum_(Tensor[] grads, Tensor(a!)[] momentum_buffers, Tensor(b!)[] updates, float momentum, float grad_scale, "
        "int flags) -> ()");
    m.def(
        "muon_apply_(Tensor(a!)[] params, Tensor[] updates, Tensor(b!)[] copies, float lr, float weight_decay) -> ()");
}

#define IMPLEMENTATIONS(m)                             \
    m.impl("optim_step_", DSC_BOX(&optim_step));       \
    m.impl("optim_norms_", DSC_BOX(&optim_norms));     \
    m.impl("optim_apply_", DSC_BOX(&optim_apply));     \
    m.impl("muon_momentum_", DSC_BOX(&muon_momentum)); \
    m.impl("muon_apply_", DSC_BOX(&muon_apply))

DSC_OPS_CPU(m)
{
    IMPLEMENTATIONS(m);
    /* Only for the host: the dispatcher refuses tensors on devices with NotImplementedError. */
    m.impl("optim_step_q8_", DSC_BOX(&optim_step_q8));
    m.impl("q8_quantize_", DSC_BOX(&q8_quantize));
    m.impl("q8_dequantize_", DSC_BOX(&q8_dequantize));
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
