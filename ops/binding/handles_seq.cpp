/* A rank's part of a sequence, as plain functions (dsc/seq.h). All arguments and results are integers. */
#include "handles.h"

#include "dsc/seq.h"
#include "status.h"

#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

namespace py = pybind11;

namespace {

using Run = std::tuple<int64_t, int64_t, int64_t>;
using Numbers = std::vector<int64_t>;
using Block = std::tuple<int32_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

std::vector<int32_t> seq_deal(const Numbers &document_ends, int32_t n_parts)
{
    /* The core checks n_parts and reports errors. Here n_parts only has to be a valid size. */
    Numbers order(document_ends.size());
    Numbers part_tokens(n_parts > 0 && n_parts <= DSC_SEQ_MAX_RANKS ? static_cast<size_t>(n_parts) : 1);
    std::vector<int32_t> parts(document_ends.size());

    dsc::check(dsc_seq_deal(document_ends.data(), static_cast<int64_t>(document_ends.size()), n_parts, order.data(),
                            part_tokens.data(), parts.data()),
               "seq_deal");
    return parts;
}

std::vector<Run> seq_runs(int64_t n_tokens, int32_t order, int32_t n_ranks, int32_t rank, int32_t n_inner,
                          const Numbers &document_ends, const std::vector<int32_t> &document_parts)
{
    std::vector<Run> result;
    int64_t n = 0;
    int64_t n_local = 0;

    if (order == DSC_SEQ_DOCUMENTS && document_parts.size() != document_ends.size())
        dsc::fail(DSC_EINVAL, "seq_runs: " + std::to_string(document_parts.size()) + " parts for " +
                                  std::to_string(document_ends.size()) + " documents");

    const struct dsc_seq_cut cut = {n_tokens,
                                    n_ranks,
                                    n_inner,
                                    order,
                                    document_ends.data(),
                                    document_parts.data(),
                                    static_cast<int64_t>(document_ends.size())};

    dsc::check(dsc_seq_runs_of(&cut, rank, 0, nullptr, &n, &n_local), "seq_runs");

    /* A NULL array asks for the count only, so an empty one must not look like that. */
    std::vector<struct dsc_seq_run> runs(static_cast<size_t>(n) + 1);

    dsc::check(dsc_seq_runs_of(&cut, rank, n + 1, runs.data(), &n, &n_local), "seq_runs");
    for (int64_t i = 0; i < n; i++) {
        const struct dsc_seq_run &run = runs[static_cast<size_t>(i)];

        result.emplace_back(run.local_begin, run.begin, run.n_tokens);
    }
    return result;
}

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, Numbers> seq_heads(int64_t n_heads, int64_t n_key_heads,
                                                                           int32_t n_ranks, int32_t rank)
{
    struct dsc_seq_heads heads;

    dsc::check(dsc_seq_heads_of(n_heads, n_key_heads, n_ranks, rank, &heads), "seq_heads");

    Numbers keys(static_cast<size_t>((heads.query_end - heads.query_begin) / heads.group));

    dsc::check(dsc_seq_keys_of(n_heads, n_key_heads, n_ranks, rank, static_cast<int64_t>(keys.size()), keys.data()),
               "seq_heads");
    return {heads.query_begin, heads.query_end, heads.key_begin, heads.key_end, heads.group, keys};
}

std::tuple<Numbers, Numbers, Numbers, Numbers> seq_exchange(int64_t n_heads, int64_t n_key_heads, int64_t query_width,
                                                            int64_t value_width, const Numbers &tokens, int32_t rank)
{
    const struct dsc_seq_widths widths = {query_width, value_width};
    Numbers sent(tokens.size());
    Numbers received(tokens.size());
    Numbers returned(tokens.size());
    Numbers got(tokens.size());

    dsc::check(dsc_seq_exchange_of(n_heads, n_key_heads, &widths, tokens.data(), static_cast<int32_t>(tokens.size()),
                                   rank, sent.data(), received.data(), returned.data(), got.data()),
               "seq_exchange");
    return {sent, received, returned, got};
}

std::vector<struct dsc_seq_run> to_runs(const std::vector<Run> &runs)
{
    std::vector<struct dsc_seq_run> result;

    for (const Run &run : runs)
        result.push_back({std::get<0>(run), std::get<1>(run), std::get<2>(run)});
    return result;
}

std::vector<Block> seq_blocks(bool is_causal, int64_t window, int64_t tile, const Numbers &document_ends,
                              int64_t n_tokens, const std::vector<Run> &queries, const std::vector<Run> &keys)
{
    const struct dsc_seq_mask mask = {is_causal, window, tile};
    const std::vector<struct dsc_seq_run> of_queries = to_runs(queries);
    const std::vector<struct dsc_seq_run> of_keys = to_runs(keys);
    std::vector<Block> result;
    int64_t n = 0;
    int64_t n_pairs = 0;
    const auto fill = [&](int64_t capacity, struct dsc_seq_block *blocks) {
        dsc::check(dsc_seq_blocks_of(&mask, document_ends.data(), static_cast<int64_t>(document_ends.size()), n_tokens,
                                     of_queries.data(), static_cast<int64_t>(of_queries.size()), of_keys.data(),
                                     static_cast<int64_t>(of_keys.size()), capacity, blocks, &n, &n_pairs),
                   "seq_blocks");
    };

    fill(0, nullptr);

    /* A NULL array asks for the count only, so an empty one must not look like that. */
    std::vector<struct dsc_seq_block> blocks(static_cast<size_t>(n) + 1);

    fill(n + 1, blocks.data());
    for (int64_t i = 0; i < n; i++) {
        const struct dsc_seq_block &block = blocks[static_cast<size_t>(i)];

        result.emplace_back(block.kind, block.query_begin, block.query_end, block.key_begin, block.key_end, block.shift,
                            block.n_pairs);
    }
    return result;
}

}  // namespace

void dsc::bind_seq(py::module_ &m)
{
    m.attr("SEQ_CONTIGUOUS") = static_cast<int>(DSC_SEQ_CONTIGUOUS);
    m.attr("SEQ_ZIGZAG") = static_cast<int>(DSC_SEQ_ZIGZAG);
    m.attr("SEQ_DOCUMENTS") = static_cast<int>(DSC_SEQ_DOCUMENTS);
    m.attr("SEQ_WHOLE") = static_cast<int>(DSC_SEQ_WHOLE);
    m.attr("SEQ_CAUSAL") = static_cast<int>(DSC_SEQ_CAUSAL);
    m.attr("SEQ_BAND") = static_cast<int>(DSC_SEQ_BAND);
    m.def("seq_deal", &seq_deal, py::arg("document_ends"), py::arg("n_parts"),
          "The part that each document goes to, the longest first, each to the part with the fewest tokens.");
    m.def("seq_runs", &seq_runs, py::arg("n_tokens"), py::arg("order"), py::arg("n_ranks"), py::arg("rank"),
          py::arg("n_inner"), py::arg("document_ends"), py::arg("document_parts"),
          "[(local begin, begin, tokens)] of a rank. Raises ValueError with the number that does not fit.");
    m.def(
        "seq_heads", &seq_heads, py::arg("n_heads"), py::arg("n_key_heads"), py::arg("n_ranks"), py::arg("rank"),
        "(query begin, query end, key begin, key end, group, [key head of each group]) of a rank. Raises ValueError.");
    m.def("seq_exchange", &seq_exchange, py::arg("n_heads"), py::arg("n_key_heads"), py::arg("query_width"),
          py::arg("value_width"), py::arg("tokens"), py::arg("rank"),
          "(sent, received, returned, got): elements by peer, of queries, keys and values there and of outputs back.");
    m.def("seq_blocks", &seq_blocks, py::arg("is_causal"), py::arg("window"), py::arg("tile"), py::arg("document_ends"),
          py::arg("n_tokens"), py::arg("queries"), py::arg("keys"),
          "[(kind, query begin, query end, key begin, key end, shift, pairs)]: what is left of the runs queries times\n"
          "the runs keys. Raises ValueError with the number that does not fit.");
}
