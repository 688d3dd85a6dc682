/* Attention of dsc/nn.h on host tensors, and its gradients. */
#include "operands.h"

#include <string>
#include <tuple>
#include <vector>

namespace {

using dsc::MaybeTensor;
using dsc::Operands;
using dsc::Tensor;

/* The rules of a mask and of scores, as the operators take them. */
struct Rules {
    double scale;
    bool is_causal;
    int64_t window;
    double soft_cap;
};

/* One call: the operands of a forward, checked against q. */
class Attention {
  public:
    Attention(const char *op, const Tensor &q, const Tensor &k, const Tensor &v, const MaybeTensor &sinks,
              const MaybeTensor &slopes, const MaybeTensor &documents, const Rules &rules)
        : o(op, q, "q")
    {
        call.q = heads_of(q, "q");
        call.n_batch = q.size(0);
        call.n_heads = q.size(1);
        call.n_queries = q.size(2);
        call.head_dim = q.size(3);
        call.k = heads_of(k, "k");
        call.n_kv_heads = k.size(1);
        call.n_keys = k.size(2);
        call.v = heads_of(v, "v");
        call.value_dim = v.size(3);
        expect(k, "k", {call.n_batch, call.n_kv_heads, call.n_keys, call.head_dim});
        expect(v, "v", {call.n_batch, call.n_kv_heads, call.n_keys, call.value_dim});
        call.dtype = o.dtype;
        call.scale = static_cast<float>(rules.scale);
        call.is_causal = rules.is_causal;
        call.window = rules.window;
        call.soft_cap = static_cast<float>(rules.soft_cap);
        if (sinks.has_value())
            call.sinks = o.read_f32(*sinks, "sinks", call.n_heads);
        if (slopes.has_value()) {
            call.slopes_stride = slopes->dim() == 2 && slopes->size(0) != 1 ? call.n_heads : 0;
            call.slopes = o.read_f32(*slopes, "alibi_slopes",
                                     call.slopes_stride == 0 ? call.n_heads : call.n_batch * call.n_heads);
        }
        if (documents.has_value())
            call.documents = read_documents(*documents);
    }

    /* [batch, heads, tokens, dim] with dense dim, of q's dtype. */
    struct dsc_nn_heads heads_of(const Tensor &tensor, const char *name) const
    {
        const dsc::View view = o.view_of(tensor, name);

        if (tensor.dim() != 4 || (tensor.size(3) > 1 && tensor.stride(3) != 1))
            o.fail(name, "must be [batch, heads, tokens, dim] with dense dim");
        if (o.element_dtype(view, name) != o.dtype)
            o.fail(name, std::string("is of ") + dsc::dtype_name(view.dtype) + ", unlike q");
        return {view.data, {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
    }

    void expect(const Tensor &tensor, const char *name, const std::vector<int64_t> &sizes) const
    {
        std::string found;
        std::string wanted;
        bool is_same = true;

        for (size_t i = 0; i < sizes.size(); i++) {
            is_same = is_same && tensor.size(static_cast<int64_t>(i)) == sizes[i];
            found += (i == 0 ? "" : ", ") + std::to_string(tensor.size(static_cast<int64_t>(i)));
            wanted += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
        }
        if (!is_same)
            o.fail(name, "is [" + found + "]; [" + wanted + "] fits the others");
    }

    Operands o;
    struct dsc_nn_attention call {};

  private:
    const int32_t *read_documents(const Tensor &documents) const
    {
        const dsc::View view = o.view_of(documents, "documents");

        if (view.dtype != aoti_torch_dtype_int32())
            o.fail("documents", std::string("is of ") + dsc::dtype_name(view.dtype) + "; int32 is needed");
        if (view.n_elems != call.n_batch * call.n_keys || !view.is_contiguous)
            o.fail("documents", "must be contiguous and [" + std::to_string(call.n_batch) + ", " +
                                    std::to_string(call.n_keys) + "], one number a key; it has " +
                                    std::to_string(view.n_elems) + " elements");
        return static_cast<const int32_t *>(view.data);
    }
};

std::tuple<Tensor, Tensor> nn_attention(const Tensor &q, const Tensor &k, const Tensor &v, const MaybeTensor &sinks,
                                        const MaybeTensor &slopes, const MaybeTensor &documents, double scale,
                                        bool is_causal, int64_t window, double soft_cap)
{
    Attention attention("nn_attention", q, k, v, sinks, slopes, documents, {scale, is_causal, window, soft_cap});
    struct dsc_nn_attention &call = attention.call;
    const Tensor out = call.value_dim == call.head_dim
                           ? dsc::empty_like(q)
                           : dsc::new_like(q, {call.n_batch, call.n_heads, call.n_queries, call.value_dim});
    const Tensor lse = dsc::new_f32(q, {call.n_batch, call.n_heads, call.n_queries});

    call.out = attention.heads_of(out, "out");
    call.lse = static_cast<float *>(lse.mutable_data_ptr());
    attention.o.run(dsc_nn_attention, call);
    return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> nn_attention_backward(const Tensor &dout, const MaybeTensor &dlse,
                                                                 const Tensor &q, const Tensor &k, const Tensor &v,
                                                                 const Tensor &out, const Tensor &lse,
                                                                 const MaybeTensor &sinks, const MaybeTensor &slopes,
                                                                 const MaybeTensor &documents, double scale,
                                                                 bool is_causal, int64_t window, double soft_cap)
{
    Attention attention("nn_attention_backward", q, k, v, sinks, slopes, documents,
                        {scale, is_causal, window, soft_cap});
    struct dsc_nn_attention &forward = attention.call;
    const std::vector<int64_t> sizes = {forward.n_batch, forward.n_heads, forward.n_queries, forward.value_dim};
    const int64_t n_rows = forward.n_batch * forward.n_heads * forward.n_queries;

    forward.out = attention.heads_of(out, "out");
    attention.expect(out, "out", sizes);
    forward.lse = attention.o.read_f32(lse, "lse", n_rows);

    const Tensor dq = dsc::empty_like(q);
    const Tensor dk = dsc::empty_like(k);
    const Tensor dv = dsc::empty_like(v);
    const Tensor dsinks = dsc::new_f32(q, {sinks.has_value() ? forward.n_heads : 0});
    const Tensor scratch = dsc::new_f32(q, {dsc_nn_attention_scratch_elems(&forward)});
    struct dsc_nn_attention_grad grad {};

    grad.forward = forward;
    grad.dout = attention.heads_of(dout, "dout");
    attention.expect(dout, "dout", sizes);
    grad.dlse = dlse.has_value() ? attention.o.read_f32(*dlse, "dlse", n_rows) : nullptr;
    grad.dq = attention.heads_of(dq, "dq");
    grad.dk = attention.heads_of(dk, "dk");
    grad.dv = attention.heads_of(dv, "dv");
    grad.dsinks = sinks.has_value() ? static_cast<float *>(dsinks.mutable_data_ptr()) : nullptr;
    grad.scratch = static_cast<float *>(scratch.mutable_data_ptr());
    attention.o.run(dsc_nn_attention_grad, grad);
    return {dq, dk, dv, dsinks};
}

}  // namespace

DSC_OPS(m)
{
    m.def(
        "nn_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes, Tensor? documents, float scale, "
        "bool is_causal, int window, float soft_cap) -> (Tensor out, Tensor lse)");
    m.def("nn_attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
          "Tensor? sinks, Tensor? alibi_slopes, Tensor? documents, float scale, bool is_causal, int window, float "
          "soft_cap) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
}

DSC_OPS_CPU(m)
{
    m.impl("nn_attention", DSC_BOX(&nn_attention));
    m.impl("nn_attention_backward", DSC_BOX(&nn_attention_backward));
}
