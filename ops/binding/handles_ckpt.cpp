/*
 * The layer below the checkpoint format, as Python objects: checksums, reshape plans, an atomic swap of names, block
 * files.
 */
#include "handles.h"

#include "dsc/aio.h"
#include "dsc/ckpt.h"
#include "path.h"
#include "pool_par.h"
#include "status.h"

#include <pybind11/stl.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

/* Holds any contiguous object of the buffer protocol. */
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
        dsc::fail(DSC_EINVAL, std::string(op) + ": " + name + " has " + std::to_string(bytes.n_bytes()) +
                                  " bytes, which are no whole int64 numbers");
    if (!ints.empty())
        std::memcpy(ints.data(), bytes.data(), bytes.n_bytes());
    return ints;
}

using dsc::Path;

/* Raises the subclass of OSError for the error number: FileNotFoundError, PermissionError, ... */
[[noreturn]] void raise_os_error(int error, const std::string &message, const py::object &path,
                                 const py::object &other_path = py::none())
{
    const py::object exception =
        py::module_::import("builtins").attr("OSError")(error, message, path, py::none(), other_path);

    PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(exception.ptr())), exception.ptr());
    throw py::error_already_set();
}

/* _C.BlockError; lives as long as the process. */
PyObject *block_error = nullptr;

[[noreturn]] void raise_block_error(const std::string &message, const py::object &path, int64_t block)
{
    const py::object exception = py::reinterpret_borrow<py::object>(block_error)(message);

    exception.attr("path") = path;
    exception.attr("block") = block;
    PyErr_SetObject(block_error, exception.ptr());
    throw py::error_already_set();
}

/*
 * Raises the exception for a status; does nothing for DSC_OK. Must be called, with the GIL, in the thread that got the
 * status, because the details are kept for each thread.
 */
void check_file(dsc_status status, const char *op, const Path &path, int64_t bad_block = -1)
{
    if (status == DSC_EIO) {
        struct dsc_aio_failure failure {};
        std::string message;

        dsc_aio_last_failure(&failure);
        message = std::string(std::strerror(failure.err)) + " (" + failure.verb;
        if (failure.offset >= 0)
            message += " of " + std::to_string(failure.n_bytes) + " bytes at offset " + std::to_string(failure.offset);
        raise_os_error(failure.err, message + ")", path.given);
    }
    if (status == DSC_ECORRUPT && bad_block >= 0)
        raise_block_error(path.bytes + ": " + dsc_last_error(), path.given, bad_block);
    if (status == DSC_ECORRUPT)
        raise_os_error(EIO, dsc_last_error(), path.given);
    dsc::check(status, op);
}

uint32_t crc32c(const py::buffer &buffer, uint32_t crc)
{
    const Bytes bytes(buffer);
    const py::gil_scoped_release release;

    return dsc_crc32c(crc, bytes.data(), bytes.n_bytes());
}

std::vector<uint32_t> crc32c_parts(
    const std::vector<std::tuple<std::vector<int64_t>, std::vector<int64_t>, int64_t, py::buffer>> &parts)
{
    const char *op = "crc32c_parts";
    std::deque<Bytes> buffers;
    std::vector<struct dsc_crc32c_part> pieces;
    std::vector<uint32_t> sums;

    pieces.reserve(parts.size());
    for (const auto &[shape, part, elem_bytes, buffer] : parts) {
        const Bytes &bytes = buffers.emplace_back(buffer);
        const std::string where = std::string(op) + ": pieces[" + std::to_string(pieces.size()) + "]";

        if (part.size() != 2 * shape.size() + 2)
            dsc::fail(DSC_EINVAL, where + ": part has " + std::to_string(part.size()) + " numbers, must have " +
                                      std::to_string(2 * shape.size() + 2));
        if (elem_bytes <= 0 || bytes.n_bytes() % static_cast<size_t>(elem_bytes) != 0 ||
            static_cast<int64_t>(bytes.n_bytes()) / elem_bytes != part.back())
            dsc::fail(DSC_EINVAL, where + ": buffer has " + std::to_string(bytes.n_bytes()) + " bytes, part has " +
                                      std::to_string(part.back()) + " elements of " + std::to_string(elem_bytes));
        pieces.push_back(
            {shape.data(), part.data(), bytes.data(), elem_bytes, 0, static_cast<int32_t>(shape.size()), 0});
    }

    const struct dsc_par par = dsc::pool_par(); /* before the GIL is released: at the first pass it asks Python */
    dsc_status status;
    {
        const py::gil_scoped_release release;

        status = dsc_crc32c_parts(pieces.data(), static_cast<int64_t>(pieces.size()), &par);
    }
    dsc::check(status, op);
    sums.reserve(pieces.size());
    for (const struct dsc_crc32c_part &piece : pieces)
        sums.push_back(piece.sum);
    return sums;
}

py::object reshape_plan(const std::vector<int64_t> &shape, const py::buffer &pieces, int64_t n_pieces,
                        const py::buffer &wanted)
{
    const char *const op = "reshape_plan";
    const std::vector<int64_t> piece_numbers = ints_of(pieces, "pieces", op);
    const std::vector<int64_t> wanted_numbers = ints_of(wanted, "wanted", op);
    const size_t part_size = 2 * shape.size() + 2;
    std::vector<struct dsc_reshape_run> runs;
    int64_t n_runs = 0;

    if (shape.size() > DSC_RESHAPE_MAX_DIMS)
        dsc::fail(DSC_EINVAL, std::string(op) + ": shape has " + std::to_string(shape.size()) +
                                  " dimensions, at most " + std::to_string(DSC_RESHAPE_MAX_DIMS) + " are possible");
    if (wanted_numbers.size() != part_size)
        dsc::fail(DSC_EINVAL, std::string(op) + ": wanted has " + std::to_string(wanted_numbers.size()) + " numbers, " +
                                  std::to_string(part_size) + " belong to " + std::to_string(shape.size()) +
                                  " dimensions");
    if (n_pieces < 0 || piece_numbers.size() % part_size != 0 ||
        piece_numbers.size() / part_size != static_cast<size_t>(n_pieces))
        dsc::fail(DSC_EINVAL, std::string(op) + ": pieces has " + std::to_string(piece_numbers.size()) +
                                  " numbers, not " + std::to_string(part_size) + " for each of " +
                                  std::to_string(n_pieces));
    {
        const py::gil_scoped_release release;
        const auto n_dims = static_cast<int32_t>(shape.size());

        dsc::check(dsc_reshape_plan(shape.data(), n_dims, piece_numbers.data(), n_pieces, wanted_numbers.data(), 0,
                                    nullptr, &n_runs),
                   op);
        runs.resize(static_cast<size_t>(n_runs) + 1); /* never empty, because NULL would ask for the count again */
        dsc::check(dsc_reshape_plan(shape.data(), n_dims, piece_numbers.data(), n_pieces, wanted_numbers.data(), n_runs,
                                    runs.data(), &n_runs),
                   op);
    }

    static_assert(sizeof(struct dsc_reshape_run) == 4 * sizeof(int64_t), "four numbers and no padding");
    const py::bytes packed(reinterpret_cast<const char *>(runs.data()), static_cast<size_t>(n_runs) * sizeof runs[0]);

    return py::module_::import("array").attr("array")("q", packed);
}

py::object read_part(int fd, int64_t offset, int64_t elem_bytes, const std::vector<int64_t> &shape,
                     const std::vector<int64_t> &wanted, uintptr_t address)
{
    const char *const op = "read_part";
    struct dsc_read_failure failure {};
    dsc_status status = DSC_OK;

    if (shape.size() > DSC_RESHAPE_MAX_DIMS)
        dsc::fail(DSC_EINVAL, std::string(op) + ": shape has " + std::to_string(shape.size()) +
                                  " dimensions, at most " + std::to_string(DSC_RESHAPE_MAX_DIMS) + " are possible");
    if (wanted.size() != 2 * shape.size() + 2)
        dsc::fail(DSC_EINVAL, std::string(op) + ": wanted has " + std::to_string(wanted.size()) + " numbers, " +
                                  std::to_string(2 * shape.size() + 2) + " belong to " + std::to_string(shape.size()) +
                                  " dimensions");
    {
        const py::gil_scoped_release release;

        status = dsc_part_read(fd, offset, elem_bytes, shape.data(), static_cast<int32_t>(shape.size()), wanted.data(),
                               reinterpret_cast<void *>(address), &failure);
    }
    if (status == DSC_EIO || status == DSC_ECORRUPT)
        return py::make_tuple(failure.begin, failure.end, failure.at, failure.err);
    dsc::check(status, op);
    return py::none();
}

bool exchange_paths(py::object a, py::object b)
{
    const Path path_a(std::move(a));
    const Path path_b(std::move(b));
    int result = 0;

    {
        const py::gil_scoped_release release;

        result = dsc_exchange_paths(path_a.c_str(), path_b.c_str());
    }
    if (result == 0)
        return true;
    if (result == -ENOSYS || result == -EINVAL || result == -ENOTSUP)
        return false;
    raise_os_error(-result, std::strerror(-result), path_a.given, path_b.given);
}

size_t size_of(int64_t value, const char *name, const char *op)
{
    if (value < 0)
        dsc::fail(DSC_EINVAL,
                  std::string(op) + ": " + name + " is " + std::to_string(value) + ", must not be negative");
    return static_cast<size_t>(value);
}

/* backend is borrowed. */
struct dsc_block_config config_of(int64_t block_bytes, const std::string &backend, int64_t buffer_bytes,
                                  int32_t n_buffers, const char *op)
{
    struct dsc_block_config config = DSC_BLOCK_CONFIG_INIT;

    config.block_bytes = size_of(block_bytes, "block_bytes", op);
    config.backend = backend.c_str();
    config.buffer_bytes = size_of(buffer_bytes, "buffer_bytes", op);
    config.n_buffers = n_buffers;
    return config;
}

/* Checksums are kept as little-endian numbers of 32 bits on every machine. */
std::string pack_crcs(const uint32_t *crcs, int64_t n_crcs)
{
    std::string packed;

    packed.reserve(4 * static_cast<size_t>(n_crcs));
    for (int64_t i = 0; i < n_crcs; i++)
        for (int shift = 0; shift < 32; shift += 8)
            packed.push_back(static_cast<char>(crcs[i] >> shift & 0xff));
    return packed;
}

std::vector<uint32_t> unpack_crcs(const py::buffer &packed, const char *op)
{
    const Bytes bytes(packed);
    const auto *p = static_cast<const unsigned char *>(bytes.data());
    std::vector<uint32_t> crcs(bytes.n_bytes() / 4);

    if (bytes.n_bytes() % 4 != 0)
        dsc::fail(DSC_EINVAL, std::string(op) + ": crcs has " + std::to_string(bytes.n_bytes()) +
                                  " bytes, which are no whole uint32 numbers");
    for (size_t i = 0; i < crcs.size(); i++, p += 4)
        crcs[i] = p[0] | static_cast<uint32_t>(p[1]) << 8 | static_cast<uint32_t>(p[2]) << 16 |
                  static_cast<uint32_t>(p[3]) << 24;
    return crcs;
}

class BlockWriter {
  public:
    BlockWriter(py::object path, int64_t block_bytes, const std::string &backend, int64_t buffer_bytes,
                int32_t n_buffers)
        : path_(std::move(path))
    {
        const struct dsc_block_config config = config_of(block_bytes, backend, buffer_bytes, n_buffers, "BlockWriter");
        dsc_status status = DSC_OK;

        {
            const py::gil_scoped_release release;

            status = dsc_block_writer_create(path_.c_str(), &config, &writer_);
        }
        check_file(status, "BlockWriter", path_);
    }
    ~BlockWriter() { close(); }
    BlockWriter(const BlockWriter &) = delete;
    BlockWriter &operator=(const BlockWriter &) = delete;

    void write(uintptr_t address, int64_t n_bytes)
    {
        append(reinterpret_cast<const void *>(address), size_of(n_bytes, "n_bytes", "BlockWriter.write"),
               "BlockWriter.write");
    }

    void write_bytes(const py::buffer &buffer)
    {
        const Bytes bytes(buffer);

        append(bytes.data(), bytes.n_bytes(), "BlockWriter.write_bytes");
    }

    int64_t n_bytes() const { return n_bytes_; }

    py::bytes finish()
    {
        const std::unique_lock<std::mutex> lock = use("BlockWriter.finish");
        const uint32_t *crcs = nullptr;
        int64_t n_blocks = 0;
        dsc_status status = DSC_OK;

        {
            const py::gil_scoped_release release;

            status = dsc_block_writer_finish(writer_, &crcs, &n_blocks);
        }
        check_file(status, "BlockWriter.finish", path_);
        return pack_crcs(crcs, n_blocks);
    }

    void abort()
    {
        if (writer_ == nullptr)
            return;

        const std::unique_lock<std::mutex> lock = use("BlockWriter.abort");

        close();
    }

  private:
    /* Does not wait for the lock, because in a forked child the thread that holds the lock does not exist. */
    std::unique_lock<std::mutex> use(const char *op)
    {
        std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);

        if (!lock.owns_lock())
            dsc::fail(DSC_ESTATE, std::string(op) + ": another thread is using the writer of " + path_.bytes);
        if (writer_ == nullptr)
            dsc::fail(DSC_ESTATE, std::string(op) + ": the writer of " + path_.bytes + " has been aborted");
        return lock;
    }

    void append(const void *data, size_t n_bytes, const char *op)
    {
        const std::unique_lock<std::mutex> lock = use(op);
        dsc_status status = DSC_OK;

        {
            const py::gil_scoped_release release;

            status = dsc_block_writer_write(writer_, data, n_bytes);
        }
        n_bytes_ = dsc_block_writer_bytes(writer_);
        check_file(status, op, path_);
    }

    void close()
    {
        const py::gil_scoped_release release;

        dsc_block_writer_destroy(std::exchange(writer_, nullptr));
    }

    Path path_;
    std::mutex mutex_;
    dsc_block_writer *writer_ = nullptr;
    int64_t n_bytes_ = 0;
};

int64_t read_blocks(py::object path, int64_t n_bytes, int64_t block_bytes, const py::buffer &crcs,
                    const py::buffer &copies, int64_t buffer_bytes, int32_t n_buffers, const std::string &backend)
{
    const char *const op = "read_blocks";
    const Path file_path(std::move(path));
    const struct dsc_block_config config = config_of(block_bytes, backend, buffer_bytes, n_buffers, op);
    const std::vector<uint32_t> numbers = unpack_crcs(crcs, op);
    const std::vector<int64_t> triples = ints_of(copies, "copies", op);
    const struct dsc_block_file file = {file_path.c_str(), n_bytes, numbers.empty() ? nullptr : numbers.data(),
                                        static_cast<int64_t>(numbers.size())};
    std::vector<struct dsc_block_copy> list(triples.size() / 3);
    int64_t n_bytes_read = 0;
    int64_t bad_block = -1;
    dsc_status status = DSC_OK;

    if (triples.size() % 3 != 0)
        dsc::fail(DSC_EINVAL, std::string(op) + ": copies has " + std::to_string(triples.size()) +
                                  " numbers, three belong to each");
    for (size_t i = 0; i < list.size(); i++)
        list[i] = {triples[3 * i], triples[3 * i + 1],
                   reinterpret_cast<void *>(static_cast<uintptr_t>(triples[3 * i + 2]))};
    {
        const py::gil_scoped_release release;

        status =
            dsc_blocks_read(&file, &config, list.data(), static_cast<int64_t>(list.size()), &n_bytes_read, &bad_block);
    }
    check_file(status, op, file_path, bad_block);
    return n_bytes_read;
}

std::vector<int64_t> verify_blocks(py::object path, int64_t n_bytes, int64_t block_bytes, const py::buffer &crcs,
                                   int64_t buffer_bytes, int32_t n_buffers, const std::string &backend)
{
    const char *const op = "verify_blocks";
    const Path file_path(std::move(path));
    const struct dsc_block_config config = config_of(block_bytes, backend, buffer_bytes, n_buffers, op);
    const std::vector<uint32_t> numbers = unpack_crcs(crcs, op);
    const struct dsc_block_file file = {file_path.c_str(), n_bytes, numbers.empty() ? nullptr : numbers.data(),
                                        static_cast<int64_t>(numbers.size())};
    std::vector<int64_t> bad(numbers.size());
    int64_t n_bad = 0;
    dsc_status status = DSC_OK;

    {
        const py::gil_scoped_release release;

        status = dsc_blocks_verify(&file, &config, bad.data(), &n_bad);
    }
    check_file(status, op, file_path);
    bad.resize(static_cast<size_t>(n_bad));
    return bad;
}

}  // namespace

void dsc::bind_ckpt(py::module_ &m)
{
    block_error = PyErr_NewExceptionWithDoc(
        "deepspeed_c._C.BlockError",
        "A block of a file does not match its checksum. path: the file; block: index of the block.", PyExc_ValueError,
        nullptr);
    if (block_error == nullptr)
        throw py::error_already_set();
    m.attr("BlockError") = py::reinterpret_borrow<py::object>(block_error);

    m.def(
        "crc32c", &crc32c, py::arg("buffer"), py::arg("crc") = 0,
        "CRC32C (Castagnoli, RFC 3720) of the bytes of a contiguous object of the buffer protocol, going on from crc. BufferError when it is not "
        "contiguous. Other threads run meanwhile.");
    m.def(
        "crc32c_parts", &crc32c_parts, py::arg("parts"),
        "What parts of tensors contribute to the CRC32C of the whole tensors: the XOR over parts of a tensor that hold each element once goes to "
        "crc32c_of_parts. Each of parts is (shape of the tensor, part, bytes of an element, buffer). part: 2 * n_dims + 2 numbers, as for "
        "reshape_plan; buffer: its elements, contiguous. ValueError names a part that does not fit. Other threads run meanwhile.");
    m.def("crc32c_of_parts", &dsc_crc32c_of_parts, py::arg("sum"), py::arg("n_bytes"),
          "The CRC32C of n_bytes whose parts contribute `sum` together, by XOR (crc32c_parts).");
    m.def(
        "reshape_plan", &reshape_plan, py::arg("shape"), py::arg("pieces"), py::arg("n_pieces"), py::arg("wanted"),
        "How a part of a tensor of that shape is put together from the pieces that it was saved in (dsc/ckpt.h). A part is 2 * n_dims + 2 int64 "
        "numbers: start[n_dims], size[n_dims], begin, n_elems; elements [begin, begin + n_elems) of that box in row-major order. pieces: n_pieces of "
        "them in one buffer; wanted: one. Returns array('q') of four numbers a run: piece, first element in what the piece stores, first element in "
        "what is wanted, number of elements; by piece and then by position. Lower pieces come first where pieces overlap. ValueError names a part "
        "that does not fit, or the first element that no piece holds.");
    m.def(
        "read_part", &read_part, py::arg("fd"), py::arg("offset"), py::arg("elem_bytes"), py::arg("shape"),
        py::arg("wanted"), py::arg("address"),
        "Reads a part of a tensor of that shape from an open file that has the whole tensor from byte offset on (dsc/ckpt.h) to memory at an address. "
        "wanted: a part, as in reshape_plan. Returns None, or (begin, end, at, errno) of the read that failed: bytes begin to end of the file, the "
        "first byte that could not be read, and errno 0 if the file ends there. ValueError for a part that does not lie in the shape.");
    m.def(
        "exchange_paths", &exchange_paths, py::arg("a"), py::arg("b"),
        "Swaps what two names stand for, atomically. False, and nothing done, where the kernel or file system cannot do it (or one lies inside "
        "the other); OSError for all other reasons.");
    py::class_<BlockWriter>(
        m, "BlockWriter",
        "Writes a new file from its beginning to its end at the disk's speed, and gives the CRC32C of each block_bytes of it (dsc/ckpt.h). "
        "The ring takes n_buffers * buffer_bytes of memory; backend is one of dsc/aio.h. For one thread at a time, any thread; others run "
        "meanwhile. What the system refuses is an OSError with errno and filename, once: from then on, and after finish, every call is a "
        "RuntimeError. A writer that goes away unfinished leaves its file behind, incomplete. FileExistsError when the file exists.")
        .def(py::init<py::object, int64_t, const std::string &, int64_t, int32_t>(), py::arg("path"),
             py::arg("block_bytes"), py::arg("backend") = "auto", py::arg("buffer_bytes") = 2 << 20,
             py::arg("n_buffers") = 8)
        .def("write", &BlockWriter::write, py::arg("address"), py::arg("n_bytes"),
             "Appends n_bytes of memory from an address, borrowed for the call.")
        .def("write_bytes", &BlockWriter::write_bytes, py::arg("buffer"),
             "Appends the bytes of a contiguous object of the buffer protocol.")
        .def_property_readonly("n_bytes", &BlockWriter::n_bytes, "Bytes given so far.")
        .def(
            "finish", &BlockWriter::finish,
            "Writes what is left, syncs and closes the file. The CRC32C of each block in order, packed as little-endian uint32. The folder is not synced.")
        .def("abort", &BlockWriter::abort, "Closes the file and leaves it as it is. Nothing when that has been done.");
    m.def(
        "read_blocks", &read_blocks, py::arg("path"), py::arg("n_bytes"), py::arg("block_bytes"), py::arg("crcs"),
        py::arg("copies"), py::arg("buffer_bytes") = 2 << 20, py::arg("n_buffers") = 8, py::arg("backend") = "auto",
        "Reads parts of a file of n_bytes to memory at the disk's speed. copies: int64 triples (offset in the file, bytes, address) in any order. Each block that one of "
        "them touches is read once and whole, checked against its CRC32C (crcs: little-endian uint32 of all blocks of the file; empty: no check) and then "
        "copied from. Returns the bytes read from the file. BlockError for a block that does not match, of which nothing has been copied; OSError with errno and "
        "filename for what the system reports, and EIO for a file of another length; ValueError names a copy that does not lie in the file.");
    m.def(
        "verify_blocks", &verify_blocks, py::arg("path"), py::arg("n_bytes"), py::arg("block_bytes"), py::arg("crcs"),
        py::arg("buffer_bytes") = 2 << 20, py::arg("n_buffers") = 8, py::arg("backend") = "auto",
        "Reads a whole file and lists the indices of the blocks that do not match their CRC32C. Errors as for read_blocks, except that a bad block is a result.");
}
