/* The choice of tokens (dsc/sample.h) as operators on host tensors. */
#include "operands.h"

#include "dsc/sample.h"

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

namespace {

using dsc::MaybeTensor;
using dsc::Operands;
using dsc::Tensor;

/* The columns of a row of rules. */
enum Column { kTemperature, kTopK, kTopP, kMinP, kRepetitionPenalty, kColumns };

/* The rows of one call, and the memory that they point to. */
class Rows {
  public:
    Rows(const char *op, const Tensor &logits, const Tensor &rules, const MaybeTensor &n_earlier,
         const MaybeTensor &earlier)
        : o(op, logits, "logits"), dense_(dsc::contiguous(logits))
    {
        if (logits.dim() != 2)
            o.fail("logits", "must be [rows, words]");
        if (n_earlier.has_value() != earlier.has_value())
            o.fail("earlier", "and n_earlier come together");
        rows.n_rows = logits.size(0);
        rows.n_words = logits.size(1);
        rows.dtype = o.dtype;
        rows.logits = o.read(dense_, "logits", rows.n_rows * rows.n_words);
        read_rules(rules);
        rows.rules = rules_.data();
        if (n_earlier.has_value())
            read_earlier(*n_earlier, *earlier);
        scratch_ = dsc::new_i64(
            logits, {static_cast<int64_t>(dsc_sample_scratch_bytes(rows.n_rows, rows.n_words) / sizeof(int64_t))});
        rows.scratch = scratch_.mutable_data_ptr();
    }

    const int64_t *numbers(const Tensor &tensor, const char *name) const
    {
        if (tensor.numel() != rows.n_rows)
            o.fail(name, "has " + std::to_string(tensor.numel()) + " numbers for " + std::to_string(rows.n_rows) +
                             " rows of logits");
        return o.read_i64(tensor, name, 1);
    }

    Operands o;
    struct dsc_sample_rows rows {};

  private:
    void read_rules(const Tensor &rules)
    {
        const dsc::View view = o.view_of(rules, "rules");

        if (view.dtype != aoti_torch_dtype_float64() || rules.dim() != 2 || rules.size(0) != rows.n_rows ||
            rules.size(1) != kColumns || !view.is_contiguous)
            o.fail("rules", "must be contiguous float64 [" + std::to_string(rows.n_rows) + ", " +
                                std::to_string(kColumns) + "]");
        for (int64_t row = 0; row < rows.n_rows; row++) {
            const double *values = static_cast<const double *>(view.data) + row * kColumns;

            if (values[kTopK] != std::floor(values[kTopK]) || std::fabs(values[kTopK]) > 0x1p53)
                o.fail("rules", "has a top_k of " + std::to_string(values[kTopK]) + " in row " + std::to_string(row) +
                                    ", must be a whole number");
            rules_.push_back({values[kTemperature], values[kTopP], values[kMinP], values[kRepetitionPenalty],
                              static_cast<int64_t>(values[kTopK])});
        }
    }

    void read_earlier(const Tensor &n_earlier, const Tensor &earlier)
    {
        int64_t n = 0;

        rows.n_earlier = numbers(n_earlier, "n_earlier");
        for (int64_t row = 0; row < rows.n_rows; row++)
            n += rows.n_earlier[row] > 0 ? rows.n_earlier[row] : 0;
        if (earlier.numel() != n)
            o.fail("earlier",
                   "has " + std::to_string(earlier.numel()) + " words; n_earlier counts " + std::to_string(n));
        rows.earlier = o.read_i64(earlier, "earlier", 1);
    }

    Tensor dense_;
    std::vector<struct dsc_sample_rules> rules_;
    Tensor scratch_;
};

std::tuple<Tensor, Tensor> sample_tokens(const Tensor &logits, const Tensor &rules, const Tensor &seeds,
                                         const Tensor &positions, const MaybeTensor &n_earlier,
                                         const MaybeTensor &earlier)
{
    const Rows call("sample_tokens", logits, rules, n_earlier, earlier);
    const Tensor tokens = dsc::new_i64(logits, {call.rows.n_rows});
    const Tensor log_probs = dsc::new_f32(logits, {call.rows.n_rows});
    const int64_t *keys = call.numbers(seeds, "seeds");
    const int64_t *counters = call.numbers(positions, "positions");
    const struct dsc_par par = dsc::pool_par();

    dsc::check(dsc_sample_tokens(&call.rows, reinterpret_cast<const uint64_t *>(keys), counters,
                                 static_cast<int64_t *>(tokens.mutable_data_ptr()),
                                 static_cast<float *>(log_probs.mutable_data_ptr()), &par),
               "sample_tokens");
    return {tokens, log_probs};
}

Tensor sample_probabilities(const Tensor &logits, const Tensor &rules, const MaybeTensor &n_earlier,
                            const MaybeTensor &earlier)
{
    const Rows call("sample_probabilities", logits, rules, n_earlier, earlier);
    const Tensor out = dsc::new_f32(logits, {call.rows.n_rows, call.rows.n_words});
    const struct dsc_par par = dsc::pool_par();

    dsc::check(dsc_sample_probabilities(&call.rows, static_cast<float *>(out.mutable_data_ptr()), &par),
               "sample_probabilities");
    return out;
}

}  // namespace

DSC_OPS(m)
{
    m.def("sample_tokens(Tensor logits, Tensor rules, Tensor seeds, Tensor positions, Tensor? n_earlier, Tensor? "
          "earlier) -> (Tensor, Tensor)");
    m.def("sample_probabilities(Tensor logits, Tensor rules, Tensor? n_earlier, Tensor? earlier) -> Tensor");
}

DSC_OPS_CPU(m)
{
    m.impl("sample_tokens", DSC_BOX(&sample_tokens));
    m.impl("sample_probabilities", DSC_BOX(&sample_probabilities));
}
