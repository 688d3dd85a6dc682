/*
 * Checks the operands of the operators of dsc/nn.h against the first operand, reads them, and begins the call of a
 * core.
 */
#ifndef DSC_OPERANDS_H
#define DSC_OPERANDS_H

#include "check.h"
#include "dsc_torch.h"

#include <optional>
#include <string>

namespace dsc {

using MaybeTensor = std::optional<Tensor>;

/* Checks the operands of one call against the first operand, and reads them. Failures name operator and argument. */
class Operands {
  public:
    /* The number of rows is the product of all dimensions of `first` but the last. */
    Operands(const char *op, const Tensor &first, const char *name) : op_(op), first_name_(name)
    {
        device_type_ = dsc::view_of(first.get()).device_type;
        device_index_ = dsc::view_of(first.get()).device_index;

        const View view = view_of(first, name);
        const auto sizes = first.sizes();

        if (sizes.size() == 0)
            fail(name, "has no dimension; rows of elements are needed");
        dtype = element_dtype(view, name);
        n_cols = sizes[sizes.size() - 1];
        n_rows = n_cols == 0 ? 0 : view.n_elems / n_cols;
        if (n_cols == 0)
            n_cols = 1; /* there are no rows to compute; a core would refuse 0 columns */
    }

    /* Reads a dense tensor of the first operand's dtype with n_elems elements. */
    void *read(const Tensor &tensor, const char *name, int64_t n_elems) const
    {
        read_strided(tensor, name);
        return dense(view_of(tensor, name), name, n_elems);
    }
    /* Reads a tensor of the first operand's dtype, of any strides. */
    void *read_strided(const Tensor &tensor, const char *name) const
    {
        const View view = view_of(tensor, name);

        if (element_dtype(view, name) != dtype)
            fail(name, std::string("is of ") + dtype_name(view.dtype) + ", unlike " + first_name_);
        return view.data;
    }
    void *read_all(const Tensor &tensor, const char *name) const { return read(tensor, name, n_rows * n_cols); }
    void *read_all(const MaybeTensor &tensor, const char *name) const
    {
        return tensor.has_value() ? read_all(*tensor, name) : nullptr;
    }
    void *read_cols(const MaybeTensor &tensor, const char *name) const
    {
        return tensor.has_value() ? read(*tensor, name, n_cols) : nullptr;
    }

    /* Reads a tensor [n_cols] of any dtype, and sets *out_dtype to its dtype. */
    void *read_weight(const MaybeTensor &tensor, const char *name, dsc_dtype *out_dtype) const
    {
        if (!tensor.has_value())
            return nullptr;
        return read_any(*tensor, name, n_cols, out_dtype);
    }

    /* Reads a dense tensor of n_elems elements of any dtype, and sets *out_dtype to its dtype. */
    void *read_any(const Tensor &tensor, const char *name, int64_t n_elems, dsc_dtype *out_dtype) const
    {
        const View view = view_of(tensor, name);

        *out_dtype = element_dtype(view, name);
        return dense(view, name, n_elems);
    }

    float *read_f32(const Tensor &tensor, const char *name, int64_t n_elems) const
    {
        return static_cast<float *>(read_as(tensor, name, aoti_torch_dtype_float32(), n_elems));
    }
    int8_t *read_int8(const Tensor &tensor, const char *name, int64_t n_elems) const
    {
        return static_cast<int8_t *>(read_as(tensor, name, aoti_torch_dtype_int8(), n_elems));
    }
    void *read_bytes(const Tensor &tensor, const char *name, int64_t n_elems) const
    {
        return read_as(tensor, name, aoti_torch_dtype_uint8(), n_elems);
    }

    void *read_words(const Tensor &tensor, const char *name, int64_t n_elems) const
    {
        return read_as(tensor, name, aoti_torch_dtype_int32(), n_elems);
    }

    /* Reads a dense int64 tensor of n_dims dimensions. */
    int64_t *read_i64(const Tensor &tensor, const char *name, size_t n_dims) const
    {
        const View view = view_of(tensor, name);

        if (view.dtype != aoti_torch_dtype_int64())
            fail(name, std::string("is of ") + dtype_name(view.dtype) + "; int64 is needed");
        if (tensor.sizes().size() != n_dims)
            fail(name,
                 "has " + std::to_string(tensor.sizes().size()) + " dimensions, must have " + std::to_string(n_dims));
        return static_cast<int64_t *>(dense(view, name, view.n_elems));
    }

    /* Begins a call of a core on these rows; the other fields of the call are zero. */
    template <class Call>
    Call begin() const
    {
        Call call{};

        call.n_rows = n_rows;
        call.n_cols = n_cols;
        call.dtype = dtype;
        return call;
    }

    /* Runs a core on the pool. */
    template <class Call>
    void run(dsc_status (*core)(const Call *, const struct dsc_par *), const Call &call) const
    {
        const struct dsc_par par = pool_par();

        dsc::check(core(&call, &par), op_);
    }

    /* Runs a call on the device of its tensors: a core on the pool, or the accelerator's hook on torch's stream. */
    template <class Call>
    void run(dsc_status (*core)(const Call *, const struct dsc_par *), dsc_status (*check)(const Call *),
             dsc_status (*dsc_accel::*twin)(const Call *, void *), const Call &call) const
    {
        run_at([&](const struct dsc_par *par) { return core(&call, par); }, [&] { return check(&call); },
               [&](const struct dsc_accel &accel, void *stream) { return (accel.*twin)(&call, stream); });
    }

    /* The same for functions that take their arguments otherwise. All return a status. */
    template <class Host, class Check, class Device>
    void run_at(Host host, Check check, Device device) const
    {
        if (is_cpu(device_type_)) {
            const struct dsc_par par = pool_par();

            dsc::check(host(&par), op_);
            return;
        }
        const int32_t accelerator = accelerator_of(device_type_);
        const DeviceScope scope(accelerator, device_index_);

        dsc::check(check(), op_);
        dsc::check(device(open_accel(accelerator), scope.stream()), op_);
    }

    dsc_nn_act act_named(const std::string &name) const
    {
        dsc_nn_act act{};

        dsc::check(dsc_nn_act_find(name.c_str(), &act), op_);
        return act;
    }

    [[noreturn]] void fail(const char *name, const std::string &what) const
    {
        dsc::fail(DSC_EINVAL, std::string("deepspeed_c::") + op_ + ": argument " + name + " " + what);
    }

    View view_of(const Tensor &tensor, const char *name) const
    {
        const View view = dsc::view_of(tensor.get());

        if (!view.is_strided || (!is_cpu(view.device_type) && accelerator_of(view.device_type) < 0))
            fail(name, "must be a dense tensor of the host or of an accelerator");
        if (view.device_type != device_type_ || view.device_index != device_index_)
            fail(name, std::string("is on ") + device_name(view.device_type) + ", " + first_name_ + " is on " +
                           device_name(device_type_));
        return view;
    }

    dsc_dtype element_dtype(const View &view, const char *name) const
    {
        if (to_dsc_dtype(view.dtype) < 0)
            fail(name,
                 std::string("is of ") + dtype_name(view.dtype) + "; float32, bfloat16 and float16 are supported");
        return static_cast<dsc_dtype>(to_dsc_dtype(view.dtype));
    }

    int64_t n_rows;
    int64_t n_cols;
    dsc_dtype dtype;

  private:
    void *read_as(const Tensor &tensor, const char *name, int32_t torch_dtype, int64_t n_elems) const
    {
        const View view = view_of(tensor, name);

        if (view.dtype != torch_dtype)
            fail(name, std::string("is of ") + dtype_name(view.dtype) + "; " + dtype_name(torch_dtype) + " is needed");
        return dense(view, name, n_elems);
    }

    void *dense(const View &view, const char *name, int64_t n_elems) const
    {
        if (view.n_elems != n_elems)
            fail(name, "has " + std::to_string(view.n_elems) + " elements; " + std::to_string(n_elems) + " belong to " +
                           first_name_);
        if (!view.is_contiguous)
            fail(name, "is not contiguous");
        return view.data;
    }

    const char *op_;
    const char *first_name_;
    int32_t device_type_;
    int32_t device_index_;
};

inline MaybeTensor dense_of(const MaybeTensor &tensor)
{
    return tensor.has_value() ? MaybeTensor(contiguous(*tensor)) : std::nullopt;
}

}  // namespace dsc

#endif
