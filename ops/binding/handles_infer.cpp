/* The pool of blocks of keys and values as a Python class. All arguments and results are numbers. */
#include "handles.h"

#include "dsc/infer.h"
#include "status.h"

#include <cstdint>

namespace py = pybind11;

namespace {

using Sequences = std::vector<int32_t>;
using Lengths = std::vector<int64_t>;

int32_t size_of(const Sequences &sequences)
{
    return static_cast<int32_t>(sequences.size());
}

class KvPool {
  public:
    explicit KvPool(int32_t n_blocks) { dsc::check(dsc_kv_open(n_blocks, &pool_), "KvPool"); }
    ~KvPool() { dsc_kv_close(pool_); }
    KvPool(const KvPool &) = delete;
    KvPool &operator=(const KvPool &) = delete;

    struct dsc_kv_counts counts() const
    {
        struct dsc_kv_counts counts;

        dsc_kv_count(pool_, &counts);
        return counts;
    }

    Sequences add(int32_t n)
    {
        Sequences sequences(static_cast<size_t>(n < 0 ? 0 : n));

        dsc::check(dsc_kv_add(pool_, n, sequences.data()), "KvPool.add");
        return sequences;
    }

    void drop(const Sequences &sequences)
    {
        dsc::check(dsc_kv_drop(pool_, size_of(sequences), sequences.data()), "KvPool.drop");
    }

    std::vector<std::tuple<int32_t, int32_t>> grow(const Sequences &sequences, const Lengths &n_tokens)
    {
        std::vector<struct dsc_kv_copy> copies(sequences.size());
        std::vector<std::tuple<int32_t, int32_t>> found;
        int32_t n_copies = 0;

        expect(sequences, n_tokens.size(), "KvPool.grow");
        dsc::check(dsc_kv_grow(pool_, size_of(sequences), sequences.data(), n_tokens.data(), copies.data(), &n_copies),
                   "KvPool.grow");
        for (int32_t i = 0; i < n_copies; i++)
            found.emplace_back(copies[static_cast<size_t>(i)].from, copies[static_cast<size_t>(i)].to);
        return found;
    }

    void cut(const Sequences &sequences, const Lengths &n_tokens)
    {
        expect(sequences, n_tokens.size(), "KvPool.cut");
        dsc::check(dsc_kv_cut(pool_, size_of(sequences), sequences.data(), n_tokens.data()), "KvPool.cut");
    }

    void slide(const Sequences &sequences, const Lengths &first)
    {
        expect(sequences, first.size(), "KvPool.slide");
        dsc::check(dsc_kv_slide(pool_, size_of(sequences), sequences.data(), first.data()), "KvPool.slide");
    }

    void assign(const Sequences &sequences, const Sequences &sources)
    {
        expect(sequences, sources.size(), "KvPool.assign");
        dsc::check(dsc_kv_assign(pool_, size_of(sequences), sequences.data(), sources.data()), "KvPool.assign");
    }

    py::bytearray tables(const Sequences &sequences, int64_t n_columns) const
    {
        std::vector<int32_t> found(sequences.size() * static_cast<size_t>(n_columns < 0 ? 0 : n_columns));

        dsc::check(dsc_kv_tables(pool_, size_of(sequences), sequences.data(), n_columns, found.data()),
                   "KvPool.tables");
        return {reinterpret_cast<const char *>(found.data()), found.size() * sizeof found[0]};
    }

    struct dsc_kv_pool *get() { return pool_; }

  private:
    static void expect(const Sequences &sequences, size_t n, const char *where)
    {
        if (n != sequences.size())
            dsc::fail(DSC_EINVAL, std::string(where) + ": " + std::to_string(sequences.size()) + " sequences and " +
                                      std::to_string(n) + " numbers for them");
    }

    struct dsc_kv_pool *pool_ = nullptr;
};

/* Holds its pools, which must outlive the index. */
class KvPrefixes {
  public:
    KvPrefixes(std::vector<std::shared_ptr<KvPool>> pools, const Lengths &windows, uint64_t seed)
        : pools_(std::move(pools))
    {
        std::vector<struct dsc_kv_pool *> numbers;

        for (const auto &pool : pools_)
            numbers.push_back(pool->get());
        if (windows.size() != pools_.size())
            dsc::fail(DSC_EINVAL, "KvPrefixes: " + std::to_string(pools_.size()) + " pools and " +
                                      std::to_string(windows.size()) + " windows");
        dsc::check(
            dsc_kv_prefixes_open(static_cast<int32_t>(pools_.size()), numbers.data(), windows.data(), seed, &prefixes_),
            "KvPrefixes");
    }
    ~KvPrefixes() { dsc_kv_prefixes_close(prefixes_); }
    KvPrefixes(const KvPrefixes &) = delete;
    KvPrefixes &operator=(const KvPrefixes &) = delete;

    int32_t begin(const Sequences &sequences, const std::string &salt)
    {
        int32_t chain = 0;

        if (sequences.size() != pools_.size())
            dsc::fail(DSC_EINVAL, "KvPrefixes.begin: " + std::to_string(sequences.size()) + " sequences in " +
                                      std::to_string(pools_.size()) + " pools");
        dsc::check(dsc_kv_prefixes_begin(prefixes_, sequences.data(), salt.data(), salt.size(), &chain),
                   "KvPrefixes.begin");
        return chain;
    }

    void end(int32_t chain) { dsc::check(dsc_kv_prefixes_end(prefixes_, chain), "KvPrefixes.end"); }

    int64_t find(const std::string &salt, const Lengths &tokens) const
    {
        int64_t found = 0;

        dsc::check(dsc_kv_prefixes_find(prefixes_, salt.data(), salt.size(), static_cast<int64_t>(tokens.size()),
                                        tokens.data(), &found),
                   "KvPrefixes.find");
        return found;
    }

    int64_t take(int32_t chain, const Lengths &tokens)
    {
        int64_t found = 0;

        dsc::check(dsc_kv_prefixes_take(prefixes_, chain, static_cast<int64_t>(tokens.size()), tokens.data(), &found),
                   "KvPrefixes.take");
        return found;
    }

    void note(int32_t chain, const Lengths &tokens)
    {
        dsc::check(dsc_kv_prefixes_note(prefixes_, chain, static_cast<int64_t>(tokens.size()), tokens.data()),
                   "KvPrefixes.note");
    }

    int64_t n_nodes() const
    {
        struct dsc_kv_prefix_counts counts;

        dsc_kv_prefixes_count(prefixes_, &counts);
        return counts.n_nodes;
    }

  private:
    std::vector<std::shared_ptr<KvPool>> pools_;
    struct dsc_kv_prefixes *prefixes_ = nullptr;
};

}  // namespace

void dsc::bind_infer(py::module_ &m)
{
    m.attr("KV_TOKENS") = DSC_KV_TOKENS;
    py::class_<KvPool, std::shared_ptr<KvPool>>(
        m, "KvPool", "Which blocks of a pool hold the tokens of which sequence (dsc/infer.h).")
        .def(py::init<int32_t>(), py::arg("n_blocks"))
        .def("add", &KvPool::add, py::arg("n"), "Numbers of n new, empty sequences.")
        .def("drop", &KvPool::drop, py::arg("sequences"), "Ends sequences, and gives their blocks back.")
        .def("grow", &KvPool::grow, py::arg("sequences"), py::arg("n_tokens"),
             "Makes room for more tokens of each sequence. Returns the blocks (from, to) to copy before a token is "
             "written.")
        .def("cut", &KvPool::cut, py::arg("sequences"), py::arg("n_tokens"), "Ends each sequence at so many tokens.")
        .def("slide", &KvPool::slide, py::arg("sequences"), py::arg("first"),
             "Gives back the blocks whose tokens all lie before each sequence's first one.")
        .def("assign", &KvPool::assign, py::arg("sequences"), py::arg("sources"),
             "Each sequence becomes what its source was before the call, with shared blocks.")
        .def("tables", &KvPool::tables, py::arg("sequences"), py::arg("n_columns"),
             "The blocks of each sequence as int32 [sequences, n_columns].")
        .def_property_readonly("n_blocks", [](const KvPool &pool) { return pool.counts().n_blocks; })
        .def_property_readonly("n_free", [](const KvPool &pool) { return pool.counts().n_free; });
    py::class_<KvPrefixes>(m, "KvPrefixes", "Finds full blocks that were computed for the same tokens (dsc/infer.h).")
        .def(py::init<std::vector<std::shared_ptr<KvPool>>, const Lengths &, uint64_t>(), py::arg("pools"),
             py::arg("windows"), py::arg("seed"))
        .def("begin", &KvPrefixes::begin, py::arg("sequences"), py::arg("salt"),
             "The chain of an empty sequence, which has one number in each pool.")
        .def("end", &KvPrefixes::end, py::arg("chain"))
        .def("find", &KvPrefixes::find, py::arg("salt"), py::arg("tokens"),
             "How many of the tokens a new sequence would find.")
        .def("take", &KvPrefixes::take, py::arg("chain"), py::arg("tokens"),
             "Puts the blocks of found tokens behind the chain's sequences. Returns how many tokens they have.")
        .def("note", &KvPrefixes::note, py::arg("chain"), py::arg("tokens"),
             "Tells the chain its next tokens, whose keys and values are written.")
        .def_property_readonly("n_nodes", &KvPrefixes::n_nodes);
}
