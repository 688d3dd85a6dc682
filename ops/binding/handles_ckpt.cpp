/* What checkpoints need below their format, as Python functions: checksums, reshape plans, an atomic swap of names. */
#include "handles.h"

#include "dsc/ckpt.h"
#include "status.h"

#include <pybind11/stl.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

/* Any contiguous object of the buffer protocol, held as long as this lives. */
class Bytes {
  public:
    explicit Bytes(const py::handle &object, int flags = PyBUF_SIMPLE)
    {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0)
            throw py::error_already_set();
    }
    ~Bytes() { PyBuffer_Release(&view_); }
    Bytes(const Bytes &) = delete;
    Bytes &operator=(const Bytes &) = delete;

    const void *data() const { return view_.buf; }
    size_t n_bytes() const { return static_cast<size_t>(view_.len); }

  private:
    Py_buffer view_{};
};

/* The int64 numbers of a buffer: an array('q'), a numpy array, or packed bytes. */
std::vector<int64_t> ints_of(const py::handle &object, const char *name, const char *op)
{
    const Bytes bytes(object);
    std::vector<int64_t> ints(bytes.n_bytes() / sizeof(int64_t));

    if (bytes.n_bytes() % sizeof(int64_t) != 0)
        dsc::fail(DSC_EINVAL, std::string(op) + ": " + name + " has " + std::to_string(bytes.n_bytes()) + " bytes, which are no whole int64 numbers");
    if (!ints.empty())
        std::memcpy(ints.data(), bytes.data(), bytes.n_bytes());
    return ints;
}

/* OSError in the class that Python has for the number (FileNotFoundError, PermissionError, ...). */
[[noreturn]] void raise_os_error(int error, const std::string &message, const std::string &path)
{
    const py::object exception = py::module_::import("builtins").attr("OSError")(error, message, path);

    PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
    throw py::error_already_set();
}

uint32_t crc32c(const py::buffer &buffer, uint32_t crc)
{
    const Bytes bytes(buffer);
    const py::gil_scoped_release release;

    return dsc_crc32c(crc, bytes.data(), bytes.n_bytes());
}

py::object reshape_plan(const std::vector<int64_t> &shape, const py::buffer &pieces, int64_t n_pieces, const py::buffer &wanted)
{
    const char *const op = "reshape_plan";
    const std::vector<int64_t> piece_numbers = ints_of(pieces, "pieces", op);
    const std::vector<int64_t> wanted_numbers = ints_of(wanted, "wanted", op);
    const size_t part_size = 2 * shape.size() + 2;
    std::vector<struct dsc_reshape_run> runs;
    int64_t n_runs = 0;

    if (shape.size() > DSC_RESHAPE_MAX_DIMS)
        dsc::fail(DSC_EINVAL, std::string(op) + ": shape has " + std::to_string(shape.size()) + " dimensions, at most " +
                                  std::to_string(DSC_RESHAPE_MAX_DIMS) + " are possible");
    if (wanted_numbers.size() != part_size)
        dsc::fail(DSC_EINVAL, std::string(op) + ": wanted has " + std::to_string(wanted_numbers.size()) + " numbers, " +
                                  std::to_string(part_size) + " belong to " + std::to_string(shape.size()) + " dimensions");
    if (n_pieces < 0 || piece_numbers.size() % part_size != 0 || piece_numbers.size() / part_size != static_cast<size_t>(n_pieces))
        dsc::fail(DSC_EINVAL, std::string(op) + ": pieces has " + std::to_string(piece_numbers.size()) + " numbers, not " +
                                  std::to_string(part_size) + " for each of " + std::to_string(n_pieces));
    {
        const py::gil_scoped_release release;
        const auto n_dims = static_cast<int32_t>(shape.size());

        dsc::check(dsc_reshape_plan(shape.data(), n_dims, piece_numbers.data(), n_pieces, wanted_numbers.data(), 0, nullptr, &n_runs), op);
        runs.resize(static_cast<size_t>(n_runs) + 1); /* never empty: NULL would ask for the number again */
        dsc::check(dsc_reshape_plan(shape.data(), n_dims, piece_numbers.data(), n_pieces, wanted_numbers.data(), n_runs, runs.data(), &n_runs), op);
    }

    static_assert(sizeof(struct dsc_reshape_run) == 4 * sizeof(int64_t), "four numbers and no padding");
    const py::bytes packed(reinterpret_cast<const char *>(runs.data()), static_cast<size_t>(n_runs) * sizeof runs[0]);

    return py::module_::import("array").attr("array")("q", packed);
}

bool exchange_paths(const std::string &a, const std::string &b)
{
    int result = 0;

    {
        const py::gil_scoped_release release;

        result = dsc_exchange_paths(a.c_str(), b.c_str());
    }
    if (result == 0)
        return true;
    if (result == -ENOSYS || result == -EINVAL || result == -ENOTSUP)
        return false;
    raise_os_error(-result, std::string(std::strerror(-result)) + ", exchanging it with " + b, a);
}

}  // namespace

void dsc::bind_ckpt(py::module_ &m)
{
    m.def("crc32c", &crc32c, py::arg("buffer"), py::arg("crc") = 0,
          "CRC32C (Castagnoli, RFC 3720) of the bytes of a contiguous object of the buffer protocol, going on from crc. BufferError when it is not "
          "contiguous. Other threads run meanwhile.");
    m.def("reshape_plan", &reshape_plan, py::arg("shape"), py::arg("pieces"), py::arg("n_pieces"), py::arg("wanted"),
          "How a part of a tensor of that shape is put together from the pieces that it was saved in (dsc/ckpt.h). A part is 2 * n_dims + 2 int64 "
          "numbers: start[n_dims], size[n_dims], begin, n_elems; elements [begin, begin + n_elems) of that box in row-major order. pieces: n_pieces of "
          "them in one buffer; wanted: one. Returns array('q') of four numbers a run: piece, first element in what the piece stores, first element in "
          "what is wanted, number of elements; by piece and then by position. Lower pieces come first where pieces overlap. ValueError names a part "
          "that does not fit, or the first element that no piece holds.");
    m.def("exchange_paths", &exchange_paths, py::arg("a"), py::arg("b"),
          "Swaps what two names stand for, atomically. False, and nothing done, where the kernel or file system cannot do it; OSError for all "
          "other reasons.");
}
