/* Batches of sequences of any lengths as a Python class: numbers in, arrays of int64 out. */
#include "handles.h"

#include "dsc/infer.h"
#include "status.h"

#include <cstdint>

namespace py = pybind11;

namespace {

using Lengths = std::vector<int64_t>;

struct dsc_kv_batch batch_of(const Lengths &n_seen, const Lengths &n_new, const char *where)
{
    if (n_seen.size() != n_new.size() || n_new.size() > INT32_MAX)
        dsc::fail(DSC_EINVAL, std::string(where) + ": " + std::to_string(n_seen.size()) + " numbers in n_seen and " +
                                  std::to_string(n_new.size()) + " in n_new");
    return {static_cast<int32_t>(n_new.size()), n_seen.data(), n_new.data()};
}

struct dsc_kv_batch_counts count(const struct dsc_kv_batch &batch, int64_t max_tokens, const char *where)
{
    struct dsc_kv_batch_counts counts;

    dsc::check(dsc_kv_batch_count(&batch, max_tokens, &counts), where);
    return counts;
}

std::tuple<int64_t, int32_t> batch_count(const Lengths &n_seen, const Lengths &n_new, int64_t max_tokens)
{
    const char *const where = "kv_batch_count";
    const struct dsc_kv_batch_counts counts = count(batch_of(n_seen, n_new, where), max_tokens, where);

    return {counts.n_blocks, counts.long_row};
}

/* An array of n int64 numbers, which are not set. */
py::bytearray array_of(int64_t n)
{
    PyObject *found = PyByteArray_FromStringAndSize(nullptr, n * static_cast<int64_t>(sizeof(int64_t)));

    if (found == nullptr)
        throw py::error_already_set();
    return py::reinterpret_steal<py::bytearray>(found);
}

int64_t *numbers_in(const py::bytearray &array)
{
    return reinterpret_cast<int64_t *>(PyByteArray_AS_STRING(array.ptr()));
}

class KvBatch {
  public:
    KvBatch(const Lengths &n_seen, const Lengths &n_new, const py::buffer &tokens, int64_t n_words)
    {
        const struct dsc_kv_batch batch = batch_of(n_seen, n_new, "KvBatch");
        const py::buffer_info given = tokens.request();

        counts = count(batch, INT32_MAX, "KvBatch");
        if (counts.long_row >= 0)
            dsc::fail(DSC_EOVERFLOW, "KvBatch: row " + std::to_string(counts.long_row) + " has more than " +
                                         std::to_string(INT32_MAX) + " tokens");
        if (given.ndim != 1 || given.itemsize != sizeof(int64_t) || given.size != counts.n_tokens ||
            (given.size > 1 && given.strides[0] != sizeof(int64_t)))
            dsc::fail(DSC_EINVAL, "KvBatch: the tokens are " + std::to_string(given.size) + " items of " +
                                      std::to_string(given.itemsize) + " bytes; " + std::to_string(counts.n_tokens) +
                                      " int64 numbers behind one another are expected");
        positions = array_of(counts.n_tokens);
        last = array_of(batch.n_rows);
        n_keys = array_of(batch.n_rows);
        const struct dsc_kv_batch_places places = {numbers_in(positions), numbers_in(last), numbers_in(n_keys)};
        dsc_kv_batch_place(&batch, static_cast<const int64_t *>(given.ptr), n_words, &places, &wrong);
    }

    struct dsc_kv_batch_counts counts {};
    struct dsc_kv_wrong_token wrong {};
    py::bytearray positions;
    py::bytearray last;
    py::bytearray n_keys;
};

}  // namespace

void dsc::bind_batch(py::module_ &m)
{
    m.def(
        "kv_batch_count", &batch_count, py::arg("n_seen"), py::arg("n_new"), py::arg("max_tokens"),
        "(blocks of one pool that the new tokens take, the first row with more than max_tokens tokens or -1: no row).");
    py::class_<KvBatch>(m, "KvBatch", "New tokens of sequences, behind one another (dsc/infer.h).")
        .def(py::init<const Lengths &, const Lengths &, const py::buffer &, int64_t>(), py::arg("n_seen"),
             py::arg("n_new"), py::arg("tokens"), py::arg("n_words"))
        .def_property_readonly(
            "n_columns", [](const KvBatch &batch) { return batch.counts.n_columns; },
            "Columns of a table with room for all rows.")
        .def_property_readonly(
            "wrong", [](const KvBatch &batch) { return std::make_tuple(batch.wrong.index, batch.wrong.row); },
            "(index in the batch, row) of the first token that is none of n_words words; -1: all are words.")
        .def_readonly("positions", &KvBatch::positions, "int64 [tokens]: of each token in its sequence.")
        .def_readonly("last", &KvBatch::last, "int64 [rows]: of each row's last token in the batch.")
        .def_readonly("n_keys", &KvBatch::n_keys, "int64 [rows]: tokens of each row, the new ones too.");
}
