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

  private:
    static void expect(const Sequences &sequences, size_t n, const char *where)
    {
        if (n != sequences.size())
            dsc::fail(DSC_EINVAL, std::string(where) + ": " + std::to_string(sequences.size()) + " sequences and " +
                                      std::to_string(n) + " numbers for them");
    }

    struct dsc_kv_pool *pool_ = nullptr;
};

}  // namespace

void dsc::bind_infer(py::module_ &m)
{
    m.attr("KV_TOKENS") = DSC_KV_TOKENS;
    py::class_<KvPool>(m, "KvPool", "Which blocks of a pool hold the tokens of which sequence (dsc/infer.h).")
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
}
