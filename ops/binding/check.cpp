/* The checks of check.h, and the search for the accelerator's library. */
#include "check.h"

#include <atomic>
#include <dlfcn.h>

namespace dsc {

std::string Checker::where(const char *name, int index, int64_t i) const
{
    std::string text = std::string("deepspeed_c::") + op_ + ": argument " + std::to_string(index) + " (" + name;

    if (i >= 0)
        text += "[" + std::to_string(i) + "]";
    return text + ")";
}

void Checker::begin(const TensorList &list, const char *name, int index)
{
    if (!has_lengths_) {
        first_name_ = name;
        references_.reserve(static_cast<size_t>(list.size()));
        n_elems_.reserve(static_cast<size_t>(list.size()));
        is_contiguous_.reserve(static_cast<size_t>(list.size()));
        return;
    }
    if (!is_free_ && static_cast<size_t>(list.size()) != references_.size())
        fail(DSC_EINVAL, where(name, index, -1) + " has " + std::to_string(list.size()) + " tensors, but " +
                             first_name_ + " has " + std::to_string(references_.size()));
}

View Checker::read_one(AtenTensorHandle tensor, const char *name, int index, int64_t i, int32_t *dtype)
{
    const View view = view_of(tensor);

    if (!view.is_strided)
        fail(DSC_EINVAL, where(name, index, i) + " is sparse; a dense tensor is needed");
    if (*dtype < 0) {
        if (to_dsc_dtype(view.dtype) < 0)
            fail(DSC_EINVAL, where(name, index, i) + " is of " + dtype_name(view.dtype) +
                                 "; float32, bfloat16 and float16 are supported");
        *dtype = view.dtype;
    }
    if (view.dtype != *dtype)
        fail(DSC_EINVAL, where(name, index, i) + " is of " + dtype_name(view.dtype) + ", the tensors before it of " +
                             dtype_name(*dtype));
    check_device(tensor, view, name, index, i);
    check_length(tensor, view, name, index, i);
    return view;
}

void Checker::check_device(AtenTensorHandle tensor, const View &view, const char *name, int index, int64_t i)
{
    if (like_ == nullptr) {
        like_ = tensor;
        device_type_ = view.device_type;
        device_index_ = view.device_index;
    }
    if (view.device_type != device_type_ || view.device_index != device_index_)
        fail(DSC_EINVAL, where(name, index, i) + " is on " + device_name(view.device_type) + ":" +
                             std::to_string(view.device_index) + ", the tensors before it on " +
                             device_name(device_type_) + ":" + std::to_string(device_index_));
}

View Checker::read_code_tensor(AtenTensorHandle tensor, const char *name, int index, int64_t i, dsc_q8_code code)
{
    const int32_t wanted = code == DSC_Q8_SIGNED ? aoti_torch_dtype_int8() : aoti_torch_dtype_uint8();
    const View view = view_of(tensor);

    if (!view.is_strided || view.dtype != wanted)
        fail(DSC_EINVAL, where(name, index, i) + " is " + (view.is_strided ? "of " : "sparse, of ") +
                             dtype_name(view.dtype) + "; dense codes of " + dtype_name(wanted) + " are needed");
    check_device(tensor, view, name, index, i);
    check_length(tensor, view, name, index, i);
    return view;
}

View Checker::read_f32_tensor(AtenTensorHandle tensor, const char *name, int index, int64_t i, int64_t n_elems)
{
    const View view = view_of(tensor);

    if (!view.is_strided || !view.is_contiguous || view.dtype != aoti_torch_dtype_float32() || view.n_elems != n_elems)
        fail(DSC_EINVAL, where(name, index, i) + " has " + std::to_string(view.n_elems) + " elements of " +
                             dtype_name(view.dtype) + "; " + std::to_string(n_elems) +
                             " contiguous ones of float32 are needed");
    check_device(tensor, view, name, index, i);
    return view;
}

View Checker::read_first_codes(const Tensor &tensor, const char *name, int index, dsc_q8_code *out_code)
{
    const dsc_q8_code code = view_of(tensor.get()).dtype == aoti_torch_dtype_uint8() ? DSC_Q8_UNSIGNED : DSC_Q8_SIGNED;
    const View view = read_code_tensor(tensor.get(), name, index, 0, code);

    if (!view.is_contiguous)
        fail(DSC_EINVAL, where(name, index, -1) + " is not contiguous");
    *out_code = code;
    return view;
}

View Checker::read_f32(const Tensor &tensor, const char *name, int index, int64_t n_elems)
{
    return read_f32_tensor(tensor.get(), name, index, 0, n_elems);
}

void Checker::check_length(AtenTensorHandle tensor, const View &view, const char *name, int index, int64_t i)
{
    if (is_free_) {
        if (!view.is_contiguous && !has_same_dense_layout(tensor, tensor))
            fail(DSC_EINVAL, where(name, index, i) + " has gaps or overlaps in memory; a dense tensor is needed");
        return;
    }
    if (!has_lengths_) {
        if (!view.is_contiguous && !has_same_dense_layout(tensor, tensor))
            fail(DSC_EINVAL, where(name, index, i) + " has gaps or overlaps in memory; a dense tensor is needed");
        references_.push_back(tensor);
        n_elems_.push_back(view.n_elems);
        is_contiguous_.push_back(view.is_contiguous);
        return;
    }
    const auto at = static_cast<size_t>(i);
    if (view.n_elems != n_elems_[at])
        fail(DSC_EINVAL, where(name, index, i) + " has " + std::to_string(view.n_elems) + " elements, but " +
                             first_name_ + "[" + std::to_string(i) + "] has " + std::to_string(n_elems_[at]));
    /*
     * Elementwise operators need the same memory order in all tensors, not a particular order: channels_last weights
     * are accepted.
     */
    if (view.is_contiguous && is_contiguous_[at])
        return;
    if (!has_same_dense_layout(references_[at], tensor))
        fail(DSC_EINVAL,
             where(name, index, i) + " has other strides than " + first_name_ + "[" + std::to_string(i) + "]");
}

struct dsc_span Checker::read_first(const Tensor &tensor, const char *name, int index)
{
    first_name_ = name;
    const struct dsc_span span = read_like_first(tensor, name, index);
    has_lengths_ = true;
    return span;
}

struct dsc_span Checker::read_like_first(const Tensor &tensor, const char *name, int index)
{
    int32_t dtype = -1;
    const View view = read_one(tensor.get(), name, index, 0, &dtype);

    return {view.data, view.n_elems, static_cast<dsc_dtype>(to_dsc_dtype(view.dtype))};
}

std::vector<struct dsc_span> Checker::read_free(const TensorList &list, const char *name, int index)
{
    std::vector<struct dsc_span> spans;

    is_free_ = true;
    spans.reserve(static_cast<size_t>(list.size()));
    for (int64_t i = 0; i < list.size(); i++) {
        int32_t dtype = -1; /* each span has its own dtype */
        const View view = read_one(list[i], name, index, i, &dtype);

        spans.push_back({view.data, view.n_elems, static_cast<dsc_dtype>(to_dsc_dtype(view.dtype))});
    }
    return spans;
}

const std::string &module_dir()
{
    static const std::string dir = [] {
        Dl_info info{};

        if (dladdr(reinterpret_cast<void *>(&module_dir), &info) == 0 || info.dli_fname == nullptr)
            return std::string(".");
        const std::string file = info.dli_fname;
        const size_t slash = file.rfind('/');
        return slash == std::string::npos ? std::string(".") : file.substr(0, slash);
    }();

    return dir;
}

namespace {

std::atomic<void (*)()> size_pool{nullptr};

}  // namespace

void on_unsized_pool(void (*size)())
{
    size_pool = size;
}

struct dsc_par pool_par()
{
    struct dsc_par par;

    if (dsc_pool_n_threads() == 0 && size_pool != nullptr)
        size_pool.load()();
    check(dsc_pool_par(&par), "deepspeed_c");
    return par;
}

}  // namespace dsc
