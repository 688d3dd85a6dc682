/* Sums of dsc/sums.h as operators on host tensors. Other devices compute them with torch's operators (ops/sums.py). */
#include "check.h"
#include "dsc_torch.h"

#include "dsc/sums.h"

#include <string>
#include <vector>

namespace {

using dsc::Tensor;
using dsc::TensorList;

/* Reads tensors of one call; all have as many elements as the first. Failures name operator and argument. */
class Vectors {
  public:
    explicit Vectors(const char *op) : op_(std::string("deepspeed_c::") + op + ": ") {}

    struct dsc_span read(AtenTensorHandle tensor, const std::string &name)
    {
        const dsc::View view = dsc::view_of(tensor);
        const int32_t dtype = dsc::to_dsc_dtype(view.dtype);

        if (!dsc::is_cpu(view.device_type) || !view.is_strided || !view.is_contiguous)
            dsc::fail(DSC_EINVAL, op_ + name + " must be a contiguous host tensor");
        if (dtype < 0)
            dsc::fail(DSC_EINVAL, op_ + name + " is of " + dsc::dtype_name(view.dtype) +
                                      "; float32, bfloat16 and float16 are supported");
        if (first_.empty()) {
            first_ = name;
            n_elems = view.n_elems;
        }
        if (view.n_elems != n_elems)
            dsc::fail(DSC_EINVAL, op_ + name + " has " + std::to_string(view.n_elems) + " elements, " + first_ +
                                      " has " + std::to_string(n_elems));
        return {view.data, view.n_elems, static_cast<dsc_dtype>(dtype)};
    }

    std::vector<struct dsc_span> read_all(const TensorList &list, const std::string &name)
    {
        std::vector<struct dsc_span> spans;

        for (int64_t i = 0; i < list.size(); i++)
            spans.push_back(read(list[i], name + "[" + std::to_string(i) + "]"));
        return spans;
    }

    std::vector<float *> read_levels(const TensorList &list)
    {
        std::vector<float *> levels;

        for (const struct dsc_span &span : read_all(list, "levels")) {
            if (span.dtype != DSC_DTYPE_F32)
                dsc::fail(DSC_EINVAL, op_ + "levels[" + std::to_string(levels.size()) + "] must be of float32");
            levels.push_back(static_cast<float *>(span.data));
        }
        return levels;
    }

    int64_t n_elems = 0;

  private:
    std::string op_;
    std::string first_;
};

void tree_push(const TensorList &levels, int64_t n_before, const TensorList &leaves)
{
    const char *const op = "tree_push_";
    Vectors vectors(op);
    const std::vector<float *> written = vectors.read_levels(levels);
    const std::vector<struct dsc_span> read = vectors.read_all(leaves, "leaves");
    const struct dsc_par par = dsc::pool_par();

    dsc::check(dsc_tree_push(written.data(), static_cast<int32_t>(written.size()), n_before, read.data(), leaves.size(),
                             vectors.n_elems, &par),
               op);
}

void tree_sum(const Tensor &out, const TensorList &levels, int64_t n_leaves, double scale)
{
    const char *const op = "tree_sum_";
    Vectors vectors(op);
    const struct dsc_span to = vectors.read(out.get(), "out");
    const std::vector<float *> read = vectors.read_levels(levels);
    const struct dsc_par par = dsc::pool_par();

    dsc::check(
        dsc_tree_sum(read.data(), static_cast<int32_t>(read.size()), n_leaves, static_cast<float>(scale), &to, &par),
        op);
}

/* int64 [DSC_EXACT_LIMBS + 1]: the limbs, then the number of non-finite elements. */
Tensor flat_exact_squares(const TensorList &tensors)
{
    const char *const op = "flat_exact_squares";
    dsc::Checker checker(op);
    const std::vector<struct dsc_span> spans = checker.read_free(tensors, "tensors", 0);
    const struct dsc_par par = dsc::pool_par();
    const Tensor result = dsc::new_i64(checker.like(), {DSC_EXACT_LIMBS + 1});
    auto *limbs = static_cast<int64_t *>(result.mutable_data_ptr());

    dsc::check(
        dsc_exact_squares(spans.data(), static_cast<int64_t>(spans.size()), &par, limbs, limbs + DSC_EXACT_LIMBS), op);
    return result;
}

}  // namespace

DSC_OPS(m)
{
    m.def("tree_push_(Tensor(a!)[] levels, int n_before, Tensor[] leaves) -> ()");
    m.def("tree_sum_(Tensor(a!) out, Tensor[] levels, int n_leaves, float scale) -> ()");
    m.def("flat_exact_squares(Tensor[] tensors) -> Tensor");
}

DSC_OPS_CPU(m)
{
    m.impl("tree_push_", DSC_BOX(&tree_push));
    m.impl("tree_sum_", DSC_BOX(&tree_sum));
    m.impl("flat_exact_squares", DSC_BOX(&flat_exact_squares));
}
