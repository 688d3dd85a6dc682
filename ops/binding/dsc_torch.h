/*
 * The only file that names PyTorch: tensors, lists of tensors and operator registration, over the LibTorch stable ABI.
 */
#ifndef DSC_TORCH_H
#define DSC_TORCH_H

#include "dsc/dsc.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

namespace dsc {

using Tensor = torch::stable::Tensor;

/* A tensor's properties for the cores, read in one go. */
struct View {
    void *data;
    int64_t n_elems;
    int32_t dtype; /* as torch numbers it; see to_dsc_dtype */
    int32_t device_type;
    int32_t device_index;
    bool is_contiguous;
    bool is_strided; /* false: sparse and other layouts without a data pointer */
};

View view_of(AtenTensorHandle tensor);

/* Bytes of an element, of any dtype that torch has. */
int64_t elem_bytes_of(int32_t torch_dtype);

/*
 * True if both tensors have the same strides, without gap and overlap. Elementwise operators may then go through memory
 * in order.
 */
bool has_same_dense_layout(AtenTensorHandle a, AtenTensorHandle b);

/* -1 for a dtype that the cores have no number for. */
int32_t to_dsc_dtype(int32_t torch_dtype);
const char *dtype_name(int32_t torch_dtype);
const char *device_name(int32_t device_type);
bool is_cpu(int32_t device_type);

/*
 * A list argument. Like std::vector<Tensor>, it holds a reference to each tensor for the call, but without a shared_ptr
 * for each: the cost of a tensor here limits a step over many small tensors.
 */
class TensorList {
  public:
    TensorList() = default;
    explicit TensorList(StableListHandle list);
    TensorList(TensorList &&other) noexcept : handles_(std::exchange(other.handles_, {})) {}
    TensorList &operator=(TensorList &&) = delete;
    TensorList(const TensorList &) = delete;
    TensorList &operator=(const TensorList &) = delete;
    ~TensorList() { release(); }

    int64_t size() const { return static_cast<int64_t>(handles_.size()); }
    AtenTensorHandle operator[](int64_t i) const { return handles_[static_cast<size_t>(i)]; }

  private:
    void release() noexcept;

    std::vector<AtenTensorHandle> handles_;
};

/* The index of the accelerator of dsc/accelerators.inc with this device type of torch; -1 if there is none. */
int32_t accelerator_of(int32_t device_type);

/*
 * The table of an accelerator. Its library lies beside this module and is opened once. Throws NotImplementedError if
 * there is no library or no device.
 */
const struct dsc_accel &open_accel(int32_t accelerator);

/* Makes a device current for the lifetime of this object, and gives torch's current stream. */
class DeviceScope {
  public:
    DeviceScope(int32_t accelerator, int32_t device_index);

    void *stream() const { return stream_; }

  private:
    torch::stable::accelerator::DeviceGuard guard_;
    void *stream_ = nullptr;
};

/* f64 tensors for results, on the device of `like`. */
Tensor new_f64(AtenTensorHandle like, std::initializer_list<int64_t> sizes, bool is_zeroed);
double *f64_data(const Tensor &tensor);

/* Uninitialised tensors on the device of `like`: of its dtype, of f32, int64, uint8 or int8. */
Tensor new_like(const Tensor &like, const std::vector<int64_t> &sizes);

/* The sizes of x with another last dimension. */
inline std::vector<int64_t> sizes_with(const Tensor &x, int64_t last)
{
    const auto sizes = x.sizes();
    std::vector<int64_t> found(sizes.begin(), sizes.end());

    found.back() = last;
    return found;
}

Tensor new_f32(const Tensor &like, const std::vector<int64_t> &sizes);
Tensor new_i64(const Tensor &like, const std::vector<int64_t> &sizes);
Tensor new_i64(AtenTensorHandle like, const std::vector<int64_t> &sizes);
Tensor new_bytes(const Tensor &like, const std::vector<int64_t> &sizes);
Tensor new_int8(const Tensor &like, const std::vector<int64_t> &sizes);
using torch::stable::contiguous;
using torch::stable::empty_like;

}  // namespace dsc

template <>
struct torch::stable::detail::ToImpl<dsc::TensorList> {
    static dsc::TensorList call(StableIValue value, uint64_t, bool)
    {
        return dsc::TensorList(torch::stable::detail::to<StableListHandle>(value));
    }
};

/*
 * Operators of the namespace deepspeed_c: schemas, and one implementation that serves tensors of the host and of every
 * accelerator.
 */
#define DSC_OPS(m) STABLE_TORCH_LIBRARY_FRAGMENT(deepspeed_c, m)
#define DSC_OPS_CPU(m) STABLE_TORCH_LIBRARY_IMPL(deepspeed_c, CPU, m)
#define DSC_OPS_ON(key, m) STABLE_TORCH_LIBRARY_IMPL(deepspeed_c, key, m)
#define DSC_BOX(function) TORCH_BOX(function)

#endif
