/* Tensors, lists and the current stream of a device, in terms of torch's C shim. */
#include "dsc_torch.h"

#include "check.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <string>

namespace dsc {

namespace {

void check_shim(AOTITorchError error, const char *call)
{
    if (error != AOTI_TORCH_SUCCESS)
        throw std::runtime_error(std::string("deepspeed_c: torch's ") + call + " failed");
}

}  // namespace

View view_of(AtenTensorHandle tensor)
{
    View view{};
    int32_t layout = 0;

    check_shim(aoti_torch_get_layout(tensor, &layout), "get_layout");
    check_shim(aoti_torch_get_dtype(tensor, &view.dtype), "get_dtype");
    check_shim(aoti_torch_get_device_type(tensor, &view.device_type), "get_device_type");
    check_shim(aoti_torch_get_device_index(tensor, &view.device_index), "get_device_index");
    check_shim(aoti_torch_get_numel(tensor, &view.n_elems), "get_numel");
    view.is_strided = layout == aoti_torch_layout_strided();
    if (view.is_strided) {
        check_shim(aoti_torch_is_contiguous(tensor, &view.is_contiguous), "is_contiguous");
        check_shim(aoti_torch_get_data_ptr(tensor, &view.data), "get_data_ptr");
    }
    return view;
}

bool has_same_dense_layout(AtenTensorHandle a, AtenTensorHandle b)
{
    int64_t n_dims = 0;
    int64_t other_dims = 0;
    int64_t *sizes = nullptr;
    int64_t *strides = nullptr;
    int64_t *other_sizes = nullptr;
    int64_t *other_strides = nullptr;

    check_shim(aoti_torch_get_dim(a, &n_dims), "get_dim");
    check_shim(aoti_torch_get_dim(b, &other_dims), "get_dim");
    check_shim(aoti_torch_get_sizes(a, &sizes), "get_sizes");
    check_shim(aoti_torch_get_strides(a, &strides), "get_strides");
    check_shim(aoti_torch_get_sizes(b, &other_sizes), "get_sizes");
    check_shim(aoti_torch_get_strides(b, &other_strides), "get_strides");
    if (n_dims != other_dims || !std::equal(sizes, sizes + n_dims, other_sizes))
        return false;

    std::vector<std::pair<int64_t, int64_t>>
        dims; /* (stride, size), of the dimensions that have more than one element */
    for (int64_t i = 0; i < n_dims; i++) {
        if (sizes[i] == 1)
            continue;
        if (strides[i] != other_strides[i])
            return false;
        dims.emplace_back(strides[i], sizes[i]);
    }
    std::sort(dims.begin(), dims.end());
    int64_t expected = 1;
    for (const auto &[stride, size] : dims) {
        if (stride != expected)
            return false;
        expected *= size;
    }
    return true;
}

namespace {

using CurrentStream = AOTITorchError (*)(int32_t, void **);

struct Accelerator {
    const char *name;
    int32_t (*device_type)();
    const char *library; /* torch's own for this device */
    const char *current_stream;
    std::atomic<CurrentStream> found{nullptr};
    std::atomic<const struct dsc_accel *> table{nullptr};
};

Accelerator accelerators[] = {
#define DSC_ACCEL_BUILTIN(name, entry)
#define DSC_ACCEL_LIBRARY(name, file, key) \
    {#name, aoti_torch_device_type_##name, "libtorch_" #name ".so", "aoti_torch_get_current_" #name "_stream"},
#include "dsc/accelerators.inc"
#undef DSC_ACCEL_BUILTIN
#undef DSC_ACCEL_LIBRARY
};

/*
 * A CPU build of torch lacks the symbol, so this file does not link to it. The symbol is looked up after tensors of the
 * device exist.
 */
CurrentStream find_current_stream(Accelerator &accelerator)
{
    CurrentStream found = accelerator.found;

    if (found != nullptr)
        return found;
    void *library = dlopen(accelerator.library, RTLD_NOW | RTLD_NOLOAD);
    void *symbol = library == nullptr ? nullptr : dlsym(library, accelerator.current_stream);

    if (symbol == nullptr)
        fail(DSC_ENOTSUP, std::string(accelerator.name) + " tensors need torch's " + accelerator.library +
                              ", which is not loaded in this process");
    found = reinterpret_cast<CurrentStream>(symbol);
    accelerator.found = found;
    return found;
}

}  // namespace

int32_t accelerator_of(int32_t device_type)
{
    int32_t i = 0;

    for (const Accelerator &accelerator : accelerators) {
        if (accelerator.device_type() == device_type)
            return i;
        i++;
    }
    return -1;
}

const struct dsc_accel &open_accel(int32_t accelerator)
{
    Accelerator &entry = accelerators[accelerator];
    const struct dsc_accel *table = entry.table;

    if (table == nullptr) {
        check(dsc_accel_open(entry.name, module_dir().c_str(), &table),
              (std::string("deepspeed_c on ") + entry.name + " tensors").c_str());
        entry.table = table; /* the same table, whichever thread opened it first */
    }
    return *table;
}

DeviceScope::DeviceScope(int32_t accelerator, int32_t device_index) : guard_(device_index)
{
    check_shim(find_current_stream(accelerators[accelerator])(device_index, &stream_), "get_current_stream");
}

int64_t elem_bytes_of(int32_t torch_dtype)
{
    return static_cast<int64_t>(aoti_torch_dtype_element_size(torch_dtype));
}

int32_t to_dsc_dtype(int32_t torch_dtype)
{
    if (torch_dtype == aoti_torch_dtype_float32())
        return DSC_DTYPE_F32;
    if (torch_dtype == aoti_torch_dtype_bfloat16())
        return DSC_DTYPE_BF16;
    if (torch_dtype == aoti_torch_dtype_float16())
        return DSC_DTYPE_F16;
    return -1;
}

const char *dtype_name(int32_t torch_dtype)
{
    static const struct {
        int32_t (*code)();
        const char *name;
    } names[] = {
        {aoti_torch_dtype_float32, "float32"}, {aoti_torch_dtype_bfloat16, "bfloat16"},
        {aoti_torch_dtype_float16, "float16"}, {aoti_torch_dtype_float64, "float64"},
        {aoti_torch_dtype_int64, "int64"},     {aoti_torch_dtype_int32, "int32"},
        {aoti_torch_dtype_int16, "int16"},     {aoti_torch_dtype_int8, "int8"},
        {aoti_torch_dtype_uint8, "uint8"},     {aoti_torch_dtype_bool, "bool"},
    };

    for (const auto &entry : names)
        if (entry.code() == torch_dtype)
            return entry.name;
    return "a dtype";
}

const char *device_name(int32_t device_type)
{
    if (device_type == aoti_torch_device_type_cpu())
        return "cpu";
    if (accelerator_of(device_type) >= 0)
        return accelerators[accelerator_of(device_type)].name;
    if (device_type == aoti_torch_device_type_meta())
        return "meta";
    return "another device";
}

bool is_cpu(int32_t device_type)
{
    return device_type == aoti_torch_device_type_cpu();
}

TensorList::TensorList(StableListHandle list)
{
    size_t n = 0;
    AOTITorchError error = torch_list_size(list, &n);

    if (error == AOTI_TORCH_SUCCESS) {
        handles_.resize(n);
        for (size_t i = 0; i < n; i++) {
            StableIValue item = 0;

            error = torch_list_get_item(list, i, &item);
            if (error != AOTI_TORCH_SUCCESS)
                break;
            handles_[i] = torch::stable::detail::to<AtenTensorHandle>(item);
        }
    }
    /* The caller's list must be deleted here; its items are held by this object now. */
    const AOTITorchError delete_error = torch_delete_list(list);
    if (error != AOTI_TORCH_SUCCESS || delete_error != AOTI_TORCH_SUCCESS) {
        release();
        throw std::runtime_error("deepspeed_c: torch could not hand over a list of tensors");
    }
}

void TensorList::release() noexcept
{
    for (AtenTensorHandle handle : handles_)
        if (handle != nullptr)
            (void)aoti_torch_delete_tensor_object(handle); /* fails only on an invalid handle */
    handles_.clear();
}

namespace {

/* Another reference to the caller's tensor. */
Tensor reference_to(AtenTensorHandle tensor)
{
    AtenTensorHandle owned = nullptr;

    check_shim(aoti_torch_new_tensor_handle(tensor, &owned), "new_tensor_handle");
    return Tensor(owned);
}

}  // namespace

Tensor new_f64(AtenTensorHandle like, std::initializer_list<int64_t> sizes, bool is_zeroed)
{
    const Tensor reference = reference_to(like);
    const torch::headeronly::IntHeaderOnlyArrayRef shape(sizes.begin(), sizes.size());
    constexpr auto f64 = torch::headeronly::ScalarType::Double;

    return is_zeroed ? torch::stable::new_zeros(reference, shape, f64)
                     : torch::stable::new_empty(reference, shape, f64);
}

Tensor new_like(const Tensor &like, const std::vector<int64_t> &sizes)
{
    return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
}

Tensor new_f32(const Tensor &like, const std::vector<int64_t> &sizes)
{
    return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()),
                                    torch::headeronly::ScalarType::Float);
}

Tensor new_i64(const Tensor &like, const std::vector<int64_t> &sizes)
{
    return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()),
                                    torch::headeronly::ScalarType::Long);
}

Tensor new_i64(AtenTensorHandle like, const std::vector<int64_t> &sizes)
{
    return new_i64(reference_to(like), sizes);
}

Tensor new_bytes(const Tensor &like, const std::vector<int64_t> &sizes)
{
    return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()),
                                    torch::headeronly::ScalarType::Byte);
}

Tensor new_int8(const Tensor &like, const std::vector<int64_t> &sizes)
{
    return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()),
                                    torch::headeronly::ScalarType::Char);
}

double *f64_data(const Tensor &tensor)
{
    return static_cast<double *>(tensor.mutable_data_ptr());
}

}  // namespace dsc
