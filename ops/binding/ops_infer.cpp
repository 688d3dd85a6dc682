/* Keys and values in blocks (dsc/infer.h) as operators on host tensors. */
#include "operands.h"

#include "dsc/infer.h"

#include <string>

namespace {

using dsc::MaybeTensor;
using dsc::Operands;
using dsc::Tensor;

/* The blocks and the rows of one call. */
class Blocks {
  public:
    Blocks(const char *op, const Tensor &keys, const Tensor &values, const Tensor &n_new, const Tensor &n_keys,
           const Tensor &tables)
        : o(op, keys, "keys")
    {
        if (keys.dim() != 4 || keys.size(3) != DSC_KV_TOKENS)
            o.fail("keys", "must be [blocks, kv_heads, head_dim, " + std::to_string(DSC_KV_TOKENS) + "]");
        if (values.dim() != 4 || values.size(0) != keys.size(0) || values.size(1) != keys.size(1) ||
            values.size(2) != DSC_KV_TOKENS)
            o.fail("values", "must be [blocks, kv_heads, " + std::to_string(DSC_KV_TOKENS) +
                                 ", value_dim], with as many blocks and heads as keys");
        shape = {keys.size(0), keys.size(1), keys.size(2), values.size(3), o.dtype};
        this->keys = o.read(keys, "keys", keys.numel());
        this->values = o.read(values, "values", values.numel());
        if (tables.dim() != 2)
            o.fail("tables", "must be [rows, columns]");
        rows.n_rows = tables.size(0);
        rows.n_columns = tables.size(1);
        rows.tables = static_cast<const int32_t *>(o.read_words(tables, "tables", tables.numel()));
        rows.n_keys = lengths(n_keys, "n_keys");
        rows.n_new = lengths(n_new, "n_new");
        for (int64_t i = 0; i < rows.n_rows; i++)
            n_tokens += rows.n_new[i];
    }

    const int64_t *lengths(const Tensor &tensor, const char *name) const
    {
        if (tensor.numel() != rows.n_rows)
            o.fail(name, "has " + std::to_string(tensor.numel()) + " numbers for " + std::to_string(rows.n_rows) +
                             " rows of tables");
        return o.read_i64(tensor, name, 1);
    }

    /* [tokens, heads, dim], dense in dim. n_heads -1: any. */
    struct dsc_kv_tokens tokens_of(const Tensor &tensor, const char *name, int64_t n_heads, int64_t dim) const
    {
        if (tensor.dim() != 3 || tensor.size(0) != n_tokens || (n_heads >= 0 && tensor.size(1) != n_heads) ||
            tensor.size(2) != dim || (dim > 1 && tensor.stride(2) != 1))
            o.fail(name, "must be [" + std::to_string(n_tokens) + " tokens, " +
                             (n_heads < 0 ? std::string("heads") : std::to_string(n_heads)) + ", " +
                             std::to_string(dim) + "], dense in the last dimension");
        return {o.read_strided(tensor, name), {tensor.stride(0), tensor.stride(1)}};
    }

    Operands o;
    struct dsc_kv_shape shape {};
    struct dsc_kv_rows rows {};
    int64_t n_tokens = 0;
    void *keys;
    void *values;
};

void kv_write(const Tensor &k, const Tensor &v, const Tensor &keys, const Tensor &values, const Tensor &n_new,
              const Tensor &n_keys, const Tensor &tables)
{
    const Blocks blocks("kv_write", keys, values, n_new, n_keys, tables);
    const struct dsc_kv_tokens k_tokens = blocks.tokens_of(k, "k", blocks.shape.n_kv_heads, blocks.shape.head_dim);
    const struct dsc_kv_tokens v_tokens = blocks.tokens_of(v, "v", blocks.shape.n_kv_heads, blocks.shape.value_dim);
    const struct dsc_par par = dsc::pool_par();

    dsc::check(dsc_kv_write(&blocks.shape, &blocks.rows, &k_tokens, &v_tokens, blocks.keys, blocks.values, &par),
               "kv_write");
}

Tensor kv_attention(const Tensor &q, const Tensor &keys, const Tensor &values, const Tensor &n_new,
                    const Tensor &n_keys, const Tensor &tables, const MaybeTensor &first, const MaybeTensor &sinks,
                    const MaybeTensor &slopes, double scale, bool is_causal, int64_t window, double soft_cap)
{
    const Blocks blocks("kv_attention", keys, values, n_new, n_keys, tables);
    struct dsc_kv_attention call {};

    call.shape = blocks.shape;
    call.rows = blocks.rows;
    call.q = blocks.tokens_of(q, "q", -1, blocks.shape.head_dim);
    call.n_heads = q.size(1);
    call.is_causal = is_causal;
    call.window = window;
    call.scale = static_cast<float>(scale);
    call.soft_cap = static_cast<float>(soft_cap);
    call.first = first.has_value() ? blocks.lengths(*first, "first") : nullptr;
    call.sinks = sinks.has_value() ? blocks.o.read_f32(*sinks, "sinks", call.n_heads) : nullptr;
    call.slopes = slopes.has_value() ? blocks.o.read_f32(*slopes, "slopes", call.n_heads) : nullptr;
    call.keys = blocks.keys;
    call.values = blocks.values;

    const Tensor out = dsc::new_like(q, {blocks.n_tokens, call.n_heads, blocks.shape.value_dim});
    const size_t scratch_bytes = dsc_kv_attention_scratch_bytes(&call);
    const Tensor scratch = dsc::new_f32(q, {static_cast<int64_t>(scratch_bytes / sizeof(float))});

    call.out = blocks.tokens_of(out, "out", call.n_heads, blocks.shape.value_dim);
    call.scratch = scratch_bytes > 0 ? scratch.mutable_data_ptr() : nullptr;
    blocks.o.run(dsc_kv_attention, call);
    return out;
}

}  // namespace

DSC_OPS(m)
{
    m.def("kv_write(Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor n_new, Tensor n_keys, Tensor "
          "tables) -> ()");
    m.def("kv_attention(Tensor q, Tensor keys, Tensor values, Tensor n_new, Tensor n_keys, Tensor tables, Tensor? "
          "first, Tensor? sinks, Tensor? slopes, float scale, bool is_causal, int window, float soft_cap) -> Tensor");
}

DSC_OPS_CPU(m)
{
    m.impl("kv_write", DSC_BOX(&kv_write));
    m.impl("kv_attention", DSC_BOX(&kv_attention));
}
