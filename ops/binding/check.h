/* Turns the tensors of an operator call into checked pointers and counts, and runs the call on their device. */
#ifndef DSC_CHECK_H
#define DSC_CHECK_H

#include "dsc/dsc.h"
#include "dsc_torch.h"
#include "pool_par.h"
#include "status.h"

#include <cstdint>
#include <string>
#include <vector>

namespace dsc {

/*
 * Checks the tensors of one operator call against one another. The first list (or tensor) that is read fixes the device
 * and the lengths, and each later list must match it. Nothing has been written if a list does not match. A mismatch is
 * a ValueError that names the operator, the argument and both values.
 */
class Checker {
  public:
    explicit Checker(const char *op) : op_(op) {}

    /*
     * Reads argument number `index` of the schema. Calls visit(i, data, n_elems) for each tensor, and returns the
     * common dtype of the tensors, or DSC_DTYPE_F32 for an empty list.
     */
    template <class Visit>
    dsc_dtype read(const TensorList &list, const char *name, int index, Visit visit)
    {
        int32_t dtype = -1;

        begin(list, name, index);
        for (int64_t i = 0; i < list.size(); i++) {
            const View view = read_one(list[i], name, index, i, &dtype);

            visit(i, view.data, view.n_elems);
        }
        has_lengths_ = has_lengths_ || list.size() > 0;
        return dtype < 0 ? DSC_DTYPE_F32 : static_cast<dsc_dtype>(to_dsc_dtype(dtype));
    }

    /*
     * Reads 8-bit codes of optimizer states (signed: int8, unsigned: uint8), and the f32 scales of their blocks, one
     * tensor of dsc_q8_n_scales(elements) each. Both belong to the tensors of the first list.
     */
    template <class Visit>
    void read_codes(const TensorList &list, const char *name, int index, dsc_q8_code code, Visit visit)
    {
        begin(list, name, index);
        for (int64_t i = 0; i < list.size(); i++)
            visit(i, read_code_tensor(list[i], name, index, i, code).data);
    }
    template <class Visit>
    void read_scales(const TensorList &list, const char *name, int index, Visit visit)
    {
        begin(list, name, index);
        for (int64_t i = 0; i < list.size(); i++)
            visit(i, read_f32_tensor(list[i], name, index, i, dsc_q8_n_scales(n_elems_[static_cast<size_t>(i)])).data);
    }

    /*
     * Read single contiguous host tensors: the codes first, whose dtype determines the kind, then f32 elements on the
     * same device.
     */
    View read_first_codes(const Tensor &tensor, const char *name, int index, dsc_q8_code *out_code);
    View read_f32(const Tensor &tensor, const char *name, int index, int64_t n_elems);

    /* Reads a single tensor. The first tensor that is read fixes device and length; later tensors have to match it. */
    struct dsc_span read_first(const Tensor &tensor, const char *name, int index);
    struct dsc_span read_like_first(const Tensor &tensor, const char *name, int index);

    /*
     * Reads all tensors of the list as spans. The lengths may differ, and later arguments are not compared with these
     * tensors.
     */
    std::vector<struct dsc_span> read_free(const TensorList &list, const char *name, int index);

    /* The first tensor that was read. Only valid after a non-empty read. */
    AtenTensorHandle like() const { return like_; }
    bool is_empty() const { return like_ == nullptr; }
    bool is_on_cpu() const { return is_cpu(device_type_); }
    int32_t device_type() const { return device_type_; }
    int32_t device_index() const { return device_index_; }

  private:
    std::string where(const char *name, int index, int64_t i) const;
    void begin(const TensorList &list, const char *name, int index);
    View read_one(AtenTensorHandle tensor, const char *name, int index, int64_t i, int32_t *dtype);
    View read_code_tensor(AtenTensorHandle tensor, const char *name, int index, int64_t i, dsc_q8_code code);
    View read_f32_tensor(AtenTensorHandle tensor, const char *name, int index, int64_t i, int64_t n_elems);
    void check_device(AtenTensorHandle tensor, const View &view, const char *name, int index, int64_t i);
    void check_length(AtenTensorHandle tensor, const View &view, const char *name, int index, int64_t i);

    const char *op_;
    AtenTensorHandle like_ = nullptr;
    int32_t device_type_ = 0;
    int32_t device_index_ = 0;
    const char *first_name_ = nullptr;
    bool has_lengths_ = false; /* the first list has been read to its end */
    bool is_free_ = false;     /* lengths do not matter */
    std::vector<AtenTensorHandle>
        references_; /* the tensors of the first list; kept alive by the caller's TensorList */
    std::vector<int64_t> n_elems_;
    std::vector<bool> is_contiguous_;
};

/*
 * Runs a checked call on the device of its tensors. On the host it calls host(par) with the pool's parallel-for. On an
 * accelerator it makes the device current and calls device(accel, stream) with the accelerator's table and torch's
 * current stream. Both functions return a status. device() itself must allocate results and scratch on the device.
 */
template <class Host, class Device>
void run(const Checker &checker, const char *op, Host host, Device device)
{
    if (checker.is_on_cpu()) {
        const struct dsc_par par = pool_par();

        check(host(&par), op);
        return;
    }
    const int32_t accelerator = accelerator_of(checker.device_type());

    if (accelerator < 0)
        fail(DSC_ENOTSUP, std::string(op) + ": the tensors are on no device that this build has operators for");
    const DeviceScope scope(accelerator, checker.device_index());

    check(device(open_accel(accelerator), scope.stream()), op);
}

/* The folder of this module. */
const std::string &module_dir();

}  // namespace dsc

#endif
