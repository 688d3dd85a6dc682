/*
 * Collectives through shared memory as Python objects (dsc/comm.h). Tensors come as torch's Python objects, and their
 * properties are read through Python: handles see no torch header.
 */
#include "handles.h"

#include "dsc/comm.h"
#include "dsc/pool.h"
#include "dsc/process.h"
#include "status.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

/* The name as an object that lives as long as the process. */
PyObject *name_of(const char *text)
{
    PyObject *name = PyUnicode_InternFromString(text);

    if (name == nullptr)
        throw py::error_already_set();
    return name;
}

py::object call_method(const py::handle &tensor, PyObject *name)
{
    PyObject *args[] = {tensor.ptr()};
    PyObject *result = PyObject_VectorcallMethod(name, args, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);

    if (result == nullptr)
        throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

py::object get_attr(const py::handle &tensor, PyObject *name)
{
    PyObject *result = PyObject_GetAttr(tensor.ptr(), name);

    if (result == nullptr)
        throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

/* torch's dtype objects live as long as torch, so their addresses identify them. */
dsc_comm_type type_of(const py::handle &dtype)
{
    static const std::vector<std::pair<PyObject *, dsc_comm_type>> known = [] {
        const py::module_ torch = py::module_::import("torch");
        std::vector<std::pair<PyObject *, dsc_comm_type>> types;

        for (int32_t i = DSC_COMM_F32; i < DSC_COMM_BYTES_1; i++) {
            const auto type = static_cast<dsc_comm_type>(i);
            const char *name = dsc_comm_type_text(type);

            if (py::hasattr(torch, name)) /* each version of torch has added some */
                types.emplace_back(torch.attr(name).ptr(), type);
        }
        return types;
    }();

    for (const auto &[address, type] : known)
        if (address == dtype.ptr())
            return type;
    switch (dtype.attr("itemsize").cast<int64_t>()) {
    case 1:
        return DSC_COMM_BYTES_1;
    case 2:
        return DSC_COMM_BYTES_2;
    case 4:
        return DSC_COMM_BYTES_4;
    case 8:
        return DSC_COMM_BYTES_8;
    case 16:
        return DSC_COMM_BYTES_16;
    default:
        dsc::fail(DSC_EINVAL, "tensors of " + py::str(dtype).cast<std::string>() + " cannot be sent");
    }
}

struct Flat {
    void *data;
    int64_t n_elems;
    dsc_comm_type type;
};

/* Reads a tensor's address, length and type. Throws ValueError if its elements are not contiguous in host memory. */
Flat read(const py::handle &tensor, const char *op, const char *name)
{
    static PyObject *const IS_CPU = name_of("is_cpu");
    static PyObject *const IS_CONTIGUOUS = name_of("is_contiguous");
    static PyObject *const DATA_PTR = name_of("data_ptr");
    static PyObject *const NUMEL = name_of("numel");
    static PyObject *const DTYPE = name_of("dtype");

    if (get_attr(tensor, IS_CPU).ptr() != Py_True)
        dsc::fail(DSC_EINVAL, std::string("ShmGroup.") + op + ": " + name + " is not in host memory");
    if (call_method(tensor, IS_CONTIGUOUS).ptr() != Py_True)
        dsc::fail(DSC_EINVAL, std::string("ShmGroup.") + op + ": " + name + " is not contiguous");
    Flat flat;

    flat.data = reinterpret_cast<void *>(call_method(tensor, DATA_PTR).cast<uintptr_t>());
    flat.n_elems = call_method(tensor, NUMEL).cast<int64_t>();
    flat.type = type_of(get_attr(tensor, DTYPE));
    return flat;
}

/* A request, and the tensors that it uses until it is done. */
struct Sent {
    dsc_comm_request *request = nullptr;
    py::object flat;
    py::object out;
};

/* The core's end of a group. Both the group and its pending works keep it alive. */
class End {
  public:
    explicit End(const struct dsc_comm_config &config)
    {
        dsc::check(dsc_process_note(&process_), "ShmGroup");
        dsc::check(dsc_comm_create(&config, &comm_), "ShmGroup");
    }
    End(const End &) = delete;
    End &operator=(const End &) = delete;
    /* In a forked process the core changes nothing. */
    ~End()
    {
        {
            py::gil_scoped_release release;
            (void)dsc_comm_close(comm_);
        }
        reap();
        dsc_comm_destroy(comm_);
    }

    dsc_comm *get() const { return comm_; }

    /* Takes over a request that no caller will wait for. Needs the interpreter's lock, like reap. */
    void adopt(Sent sent) { left_.push_back(std::move(sent)); }

    void reap()
    {
        std::vector<Sent> kept;

        for (Sent &sent : left_)
            if (dsc_process_is_this(&process_) && !dsc_comm_is_done(sent.request))
                kept.push_back(std::move(sent));
            else
                (void)dsc_comm_release(sent.request);
        /* Tensors are dropped here, and their destructors may call this object again. */
        left_.swap(kept);
    }

    bool has_left() const { return !left_.empty(); }

  private:
    struct dsc_process process_ {};
    dsc_comm *comm_ = nullptr;
    std::vector<Sent> left_;
};

class ShmWork {
  public:
    ShmWork(std::shared_ptr<End> end, const char *op, Sent sent) : end_(std::move(end)), op_(op), sent_(std::move(sent))
    {
    }
    ShmWork(const ShmWork &) = delete;
    ShmWork &operator=(const ShmWork &) = delete;
    ~ShmWork()
    {
        if (dsc_comm_is_done(sent_.request))
            (void)dsc_comm_release(sent_.request);
        else
            end_->adopt(std::move(sent_));
    }

    /* A signal's handler may run during the wait. A handler's exception ends the wait, but the collective goes on. */
    void wait()
    {
        PyThreadState *state = PyEval_SaveThread();
        const dsc_status status = dsc_comm_wait(
            sent_.request,
            [](void *context) {
                auto **saved = static_cast<PyThreadState **>(context);

                PyEval_RestoreThread(*saved);
                const bool has_raised = PyErr_CheckSignals() != 0;
                *saved = PyEval_SaveThread();
                return has_raised;
            },
            &state);
        PyEval_RestoreThread(state);
        if (status == DSC_EAGAIN)
            throw py::error_already_set();
        if (dsc_comm_is_done(sent_.request)) {
            sent_.flat = py::object();
            sent_.out = py::object();
        }
        dsc::check(status, op_);
    }

    bool is_done() const { return dsc_comm_is_done(sent_.request); }

  private:
    std::shared_ptr<End> end_;
    const char *op_;
    Sent sent_;
};

class ShmBuffer {
  public:
    ShmBuffer(const End &end, int64_t n_bytes) : n_bytes(n_bytes)
    {
        dsc_status status = dsc_process_note(&process_);

        dsc::check(status, "ShmGroup.empty");
        {
            py::gil_scoped_release release; /* committing pages takes time */
            status = dsc_comm_block_create(end.get(), n_bytes, &block_);
        }
        dsc::check(status, "ShmGroup.empty");
    }
    ShmBuffer(const ShmBuffer &) = delete;
    ShmBuffer &operator=(const ShmBuffer &) = delete;
    ~ShmBuffer() { dsc_comm_block_destroy(block_); }

    uint8_t *data() const { return static_cast<uint8_t *>(dsc_comm_block_data(block_)); }

    /* Discards whole pages. This is safe because a block is page-aligned and shares no page with another block. */
    void discard()
    {
        if (!dsc_process_is_this(&process_))
            dsc::fail(DSC_ESTATE, "ShmBuffer.discard: the memory belongs to the process that this one was forked from");
        if (n_bytes > 0 && madvise(data(), static_cast<size_t>(n_bytes), MADV_REMOVE) != 0)
            dsc::fail(DSC_EIO, "ShmBuffer.discard: madvise failed (errno " + std::to_string(errno) + ")");
    }

    int64_t n_bytes;

  private:
    struct dsc_process process_ {};
    dsc_comm_block *block_ = nullptr;
};

/* The core's joint memory. Tensors that lie in it keep it alive. */
class Joint {
  public:
    explicit Joint(const char *address, int64_t n_bytes)
    {
        dsc_status status = DSC_OK;
        {
            py::gil_scoped_release release;
            status =
                address == nullptr ? dsc_comm_joint_create(n_bytes, &joint_) : dsc_comm_joint_open(address, &joint_);
        }
        dsc::check(status, "ShmJoint");
    }
    Joint(const Joint &) = delete;
    Joint &operator=(const Joint &) = delete;
    ~Joint() { dsc_comm_joint_destroy(joint_); }

    dsc_comm_joint *get() const { return joint_; }

  private:
    dsc_comm_joint *joint_ = nullptr;
};

/* A part of joint memory, by the buffer protocol. */
class ShmPart {
  public:
    ShmPart(std::shared_ptr<Joint> joint, int64_t offset, int64_t n_bytes, bool is_view)
        : n_bytes(n_bytes), joint_(std::move(joint)), offset_(offset), is_view_(is_view)
    {
        if (offset < 0 || n_bytes < 0 || offset > dsc_comm_joint_bytes(joint_->get()) - n_bytes)
            dsc::fail(DSC_EINVAL, "ShmJoint: a part of " + std::to_string(n_bytes) + " bytes from " +
                                      std::to_string(offset) + " on, the memory has " +
                                      std::to_string(dsc_comm_joint_bytes(joint_->get())));
    }

    uint8_t *data() const
    {
        void *base = is_view_ ? dsc_comm_joint_view(joint_->get()) : dsc_comm_joint_data(joint_->get());

        return static_cast<uint8_t *>(base) + offset_;
    }

    void discard()
    {
        if (is_view_)
            dsc::fail(DSC_EINVAL, "ShmPart.discard: a view has no memory of its own");
        dsc::check(dsc_comm_joint_discard(joint_->get(), offset_, n_bytes), "ShmPart.discard");
    }

    int64_t n_bytes;

  private:
    std::shared_ptr<Joint> joint_;
    int64_t offset_;
    bool is_view_;
};

class ShmJoint {
  public:
    ShmJoint(int64_t n_bytes, const std::optional<std::string> &address)
        : joint_(std::make_shared<Joint>(address ? address->c_str() : nullptr, n_bytes))
    {
    }

    std::string address() const { return dsc_comm_joint_address(joint_->get()); }

    std::unique_ptr<ShmPart> part(int64_t offset, int64_t n_bytes) const
    {
        return std::make_unique<ShmPart>(joint_, offset, n_bytes, false);
    }

    std::unique_ptr<ShmPart> view(int64_t offset, int64_t n_bytes) const
    {
        return std::make_unique<ShmPart>(joint_, offset, n_bytes, true);
    }

    void commit(int64_t offset, int64_t n_bytes)
    {
        dsc_status status = DSC_OK;
        {
            py::gil_scoped_release release;
            status = dsc_comm_joint_commit(joint_->get(), offset, n_bytes);
        }
        dsc::check(status, "ShmJoint.commit");
    }

    void forget()
    {
        dsc_status status = DSC_OK;
        {
            py::gil_scoped_release release;
            status = dsc_comm_joint_forget(joint_->get());
        }
        dsc::check(status, "ShmJoint.forget");
    }

    std::optional<int64_t> find_write() const
    {
        int64_t at = -1;
        dsc_status status = DSC_OK;
        {
            py::gil_scoped_release release;
            status = dsc_comm_joint_find_write(joint_->get(), &at);
        }
        dsc::check(status, "ShmJoint.find_write");
        return at < 0 ? std::nullopt : std::optional<int64_t>(at);
    }

  private:
    std::shared_ptr<Joint> joint_;
};

class ShmGroup {
  public:
    ShmGroup(int32_t rank, int32_t n_ranks, double timeout_s, int64_t arena_bytes) : n_ranks_(n_ranks)
    {
        struct dsc_comm_config config = DSC_COMM_CONFIG_INIT;

        config.rank = rank;
        config.n_ranks = n_ranks;
        config.arena_bytes = arena_bytes;
        if (std::isnan(timeout_s))
            dsc::fail(DSC_EINVAL, "ShmGroup: timeout_s is NaN");
        config.timeout_ns = timeout_s > 4e9 ? INT64_C(4000000000000000000) : static_cast<int64_t>(timeout_s * 1e9);
        dsc::check(dsc_pool_par(&config.par), "ShmGroup");
        end_ = std::make_shared<End>(config);
    }

    std::string address() const { return dsc_comm_address(end_->get()); }

    void attach(const std::vector<std::string> &addresses)
    {
        std::vector<const char *> texts;
        dsc_status status = DSC_OK;

        if (addresses.size() != static_cast<size_t>(n_ranks_))
            dsc::fail(DSC_EINVAL, "ShmGroup.attach: " + std::to_string(addresses.size()) + " addresses for " +
                                      std::to_string(n_ranks_) + " ranks");
        for (const std::string &address : addresses)
            texts.push_back(address.c_str());
        {
            py::gil_scoped_release release;
            status = dsc_comm_attach(end_->get(), texts.data());
        }
        dsc::check(status, "ShmGroup.attach");
    }

    std::unique_ptr<ShmBuffer> empty(int64_t n_bytes) const { return std::make_unique<ShmBuffer>(*end_, n_bytes); }

    bool owns(const py::object &tensor) const
    {
        const Flat flat = read(tensor, "owns", "tensor");

        return dsc_comm_owns(end_->get(), flat.data,
                             flat.n_elems * static_cast<int64_t>(dsc_comm_type_bytes(flat.type)));
    }

    std::unique_ptr<ShmWork> reduce_scatter(py::object flat, py::object out, double scale, bool accumulate,
                                            const std::string &label)
    {
        struct dsc_comm_call call = call_of(DSC_COMM_REDUCE_SCATTER, read(flat, "reduce_scatter", "flat"));
        const Flat to = read(out, "reduce_scatter", "out");

        if (call.n_elems != n_ranks_ * to.n_elems)
            dsc::fail(DSC_EINVAL, "ShmGroup.reduce_scatter: flat has " + std::to_string(call.n_elems) +
                                      " elements, out " + std::to_string(to.n_elems) + "; " + std::to_string(n_ranks_) +
                                      " times as many are needed");
        call.scale = scale;
        call.accumulates = accumulate;
        call.out = to.data;
        call.out_type = to.type;
        call.label = label.c_str();
        return submit(call, "ShmGroup.reduce_scatter", std::move(flat), std::move(out));
    }

    std::unique_ptr<ShmWork> all_gather(py::object flat, const std::string &label)
    {
        struct dsc_comm_call call = call_of(DSC_COMM_ALL_GATHER, read(flat, "all_gather", "flat"));

        call.label = label.c_str();
        return submit(call, "ShmGroup.all_gather", std::move(flat), py::object());
    }

    std::unique_ptr<ShmWork> all_reduce(py::object flat, const std::string &op, double scale, bool is_waited,
                                        const std::string &label)
    {
        struct dsc_comm_call call = call_of(DSC_COMM_ALL_REDUCE, read(flat, "all_reduce", "flat"));

        call.combine = combine_of(op);
        call.scale = scale;
        call.is_waited = is_waited;
        call.label = label.c_str();
        return submit(call, "ShmGroup.all_reduce", std::move(flat), py::object());
    }

    std::unique_ptr<ShmWork> all_to_all(py::object flat, py::object out, const std::vector<int64_t> &in_splits,
                                        const std::vector<int64_t> &out_splits, const std::string &label)
    {
        struct dsc_comm_call call = call_of(DSC_COMM_ALL_TO_ALL, read(flat, "all_to_all", "flat"));
        const Flat to = read(out, "all_to_all", "out");

        check_splits(in_splits, "in_splits", call.n_elems, "flat");
        check_splits(out_splits, "out_splits", to.n_elems, "out");
        if (to.type != call.type)
            dsc::fail(DSC_EINVAL, std::string("ShmGroup.all_to_all: flat is of ") + dsc_comm_type_text(call.type) +
                                      ", out of " + dsc_comm_type_text(to.type));
        call.out = to.data;
        call.in_splits = in_splits.data();
        call.out_splits = out_splits.data();
        call.label = label.c_str();
        return submit(call, "ShmGroup.all_to_all", std::move(flat), std::move(out));
    }

    std::unique_ptr<ShmWork> broadcast(py::object flat, int32_t src, bool is_waited, const std::string &label)
    {
        struct dsc_comm_call call = call_of(DSC_COMM_BROADCAST, read(flat, "broadcast", "flat"));

        call.src = src;
        call.is_waited = is_waited;
        call.label = label.c_str();
        return submit(call, "ShmGroup.broadcast", std::move(flat), py::object());
    }

    std::unique_ptr<ShmWork> send(py::object tensor, int32_t dst, int32_t tag, const std::string &label)
    {
        return message(dsc_comm_send, "ShmGroup.send", "send", std::move(tensor), dst, tag, label);
    }

    std::unique_ptr<ShmWork> receive(py::object tensor, int32_t src, int32_t tag, const std::string &label)
    {
        return message(dsc_comm_receive, "ShmGroup.receive", "receive", std::move(tensor), src, tag, label);
    }

    bool has_message(int32_t src, int32_t tag) const
    {
        bool has = false;

        dsc::check(dsc_comm_has_message(end_->get(), src, tag, &has), "ShmGroup.has_message");
        return has;
    }

    void barrier()
    {
        submit(call_of(DSC_COMM_BARRIER, Flat{}), "ShmGroup.barrier", py::object(), py::object())->wait();
    }

    py::dict counts() const
    {
        py::dict counts;

        for (int32_t i = 0; i < DSC_COMM_N_OPS; i++) {
            const auto op = static_cast<dsc_comm_op>(i);
            struct dsc_comm_count count = {};
            py::dict fields;

            dsc::check(dsc_comm_count_of(end_->get(), op, &count), "ShmGroup.counts");
            fields["calls"] = count.n_calls;
            fields["bytes"] = count.n_bytes;
            fields["in_place"] = count.n_in_place;
            fields["staged"] = count.n_staged;
            counts[dsc_comm_op_text(op)] = fields;
        }
        return counts;
    }

    void close()
    {
        {
            py::gil_scoped_release release;
            (void)dsc_comm_close(end_->get());
        }
        end_->reap();
    }

  private:
    static struct dsc_comm_call call_of(dsc_comm_op op, const Flat &flat)
    {
        struct dsc_comm_call call = {};

        call.op = op;
        call.type = flat.type;
        call.data = flat.data;
        call.n_elems = flat.n_elems;
        call.scale = 1.0;
        return call;
    }

    static dsc_comm_combine combine_of(const std::string &op)
    {
#define COMBINE(name, text) \
    if (op == text)         \
        return DSC_COMM_##name;
        DSC_COMM_COMBINES(COMBINE)
#undef COMBINE
        dsc::fail(DSC_EINVAL, "ShmGroup.all_reduce: op is \"" + op + R"(", must be "sum", "max", "min" or "prod")");
    }

    void check_splits(const std::vector<int64_t> &splits, const char *name, int64_t n_elems, const char *tensor) const
    {
        int64_t sum = 0;

        if (splits.size() != static_cast<size_t>(n_ranks_))
            dsc::fail(DSC_EINVAL, std::string("ShmGroup.all_to_all: ") + name + " has " +
                                      std::to_string(splits.size()) + " entries for " + std::to_string(n_ranks_) +
                                      " ranks");
        for (const int64_t split : splits)
            if (split < 0 || __builtin_add_overflow(sum, split, &sum))
                dsc::fail(DSC_EINVAL,
                          std::string("ShmGroup.all_to_all: ") + name + " has an entry of " + std::to_string(split));
        if (sum != n_elems)
            dsc::fail(DSC_EINVAL, std::string("ShmGroup.all_to_all: ") + name + " adds up to " + std::to_string(sum) +
                                      ", " + tensor + " has " + std::to_string(n_elems) + " elements");
    }

    std::unique_ptr<ShmWork> submit(const struct dsc_comm_call &call, const char *op, py::object flat, py::object out)
    {
        Sent sent{nullptr, std::move(flat), std::move(out)};

        if (end_->has_left())
            end_->reap();
        /* With the interpreter's lock: it waits for nobody, and another thread would keep the lock for longer. */
        dsc::check(dsc_comm_submit(end_->get(), &call, &sent.request), op);
        return std::make_unique<ShmWork>(end_, op, std::move(sent));
    }

    std::unique_ptr<ShmWork> message(decltype(dsc_comm_send) *start, const char *op, const char *name,
                                     py::object tensor, int32_t peer, int32_t tag, const std::string &label)
    {
        static PyObject *const SHAPE = name_of("shape");
        const Flat flat = read(tensor, name, "tensor");
        const auto shape = py::reinterpret_borrow<py::tuple>(get_attr(tensor, SHAPE));
        const bool is_long = flat.n_elems * static_cast<int64_t>(dsc_comm_type_bytes(flat.type)) > MAX_HELD_BYTES;
        struct dsc_comm_message message = {};
        Sent sent{nullptr, std::move(tensor), py::object()};
        dsc_status status = DSC_OK;

        message.tag = tag;
        message.type = flat.type;
        message.data = flat.data;
        message.label = label.c_str();
        /* The first of more dimensions than the core compares are compared as one. */
        for (const py::handle size : shape) {
            if (message.n_dims == DSC_COMM_MAX_DIMS) {
                message.shape[0] *= message.shape[1];
                std::copy(message.shape + 2, message.shape + DSC_COMM_MAX_DIMS, message.shape + 1);
                message.n_dims--;
            }
            message.shape[message.n_dims++] = size.cast<int64_t>();
        }
        if (end_->has_left())
            end_->reap();
        if (is_long) { /* it may be copied */
            py::gil_scoped_release release;
            status = start(end_->get(), peer, &message, &sent.request);
        } else
            status = start(end_->get(), peer, &message, &sent.request);
        dsc::check(status, op);
        return std::make_unique<ShmWork>(end_, op, std::move(sent));
    }

    static constexpr int64_t MAX_HELD_BYTES = 64 << 10; /* of a copy that keeps the interpreter's lock */

    int32_t n_ranks_;
    std::shared_ptr<End> end_;
};

}  // namespace

void dsc::bind_comm(py::module_ &m)
{
    py::class_<ShmWork>(m, "ShmWork",
                        "A collective or message of a ShmGroup. Its tensors are referenced until it is done.")
        .def("wait", &ShmWork::wait,
             "Returns when it is done; RuntimeError says which rank has died, failed, closed or called something else. "
             "Other threads run meanwhile. Where a signal's handler raises (KeyboardInterrupt), so does this; the "
             "collective goes on, and may be waited for again.")
        .def("is_done", &ShmWork::is_done, "Whether wait would return at once.");
    py::class_<ShmBuffer>(m, "ShmBuffer", py::buffer_protocol(),
                          "Memory of a ShmGroup's arena, by the buffer protocol; it may outlive the group.")
        .def_buffer(
            [](ShmBuffer &self) { return py::buffer_info(self.data(), static_cast<py::ssize_t>(self.n_bytes)); })
        .def("discard", &ShmBuffer::discard,
             "Returns its pages to the system. It stays, zero, and takes memory again where it is touched.")
        .def_readonly("n_bytes", &ShmBuffer::n_bytes);
    py::class_<ShmPart>(m, "ShmPart", py::buffer_protocol(),
                        "A part of a ShmJoint, by the buffer protocol; it may outlive the object that gave it.")
        .def_buffer([](ShmPart &self) { return py::buffer_info(self.data(), static_cast<py::ssize_t>(self.n_bytes)); })
        .def("discard", &ShmPart::discard,
             "Returns its whole pages to the system. They stay, zero, and take memory again where they are touched.")
        .def_readonly("n_bytes", &ShmPart::n_bytes);
    py::class_<ShmJoint>(m, "ShmJoint",
                         "Memory that several processes of one host write, each its own part (dsc/comm.h).")
        .def(py::init<int64_t, std::optional<std::string>>(), py::arg("n_bytes"), py::arg("address") = std::nullopt,
             "Makes n_bytes of it, or opens what address names.")
        .def_property_readonly("address", &ShmJoint::address, "What the other processes need to open it.")
        .def("part", &ShmJoint::part, py::arg("offset"), py::arg("n_bytes"),
             "The memory itself: what is written there, all processes see.")
        .def("view", &ShmJoint::view, py::arg("offset"), py::arg("n_bytes"),
             "Shows the same bytes; what is written there stays this process's own until forget().")
        .def("commit", &ShmJoint::commit, py::arg("offset"), py::arg("n_bytes"), "MemoryError has both numbers.")
        .def("forget", &ShmJoint::forget, "Views show what all processes have written.")
        .def(
            "find_write", &ShmJoint::find_write,
            "Offset of the first byte that this process has written to a view, and that differs there; None: no such byte.");
    py::class_<ShmGroup>(
        m, "ShmGroup",
        "This rank's end of collectives between the processes of one host (dsc/comm.h). Any thread may call it.")
        .def(py::init<int32_t, int32_t, double, int64_t>(), py::arg("rank"), py::arg("n_ranks"), py::arg("timeout_s"),
             py::arg("arena_bytes") = 0)
        .def_property_readonly("address", &ShmGroup::address, "What the other ranks need to attach.")
        .def("attach", &ShmGroup::attach, py::arg("addresses"),
             "Opens the memory of all ranks, whose addresses these are. NotImplementedError says why memory cannot be "
             "shared with one of them, RuntimeError that one is gone or not what its address says.")
        .def("empty", &ShmGroup::empty, py::arg("n_bytes"),
             "Memory that other ranks read without a copy, page-aligned and zero. MemoryError has both numbers.")
        .def("owns", &ShmGroup::owns, py::arg("tensor"), "Whether a tensor lies in such memory of this group.")
        .def("reduce_scatter", &ShmGroup::reduce_scatter, py::arg("flat"), py::arg("out"), py::arg("scale"),
             py::arg("accumulate"), py::arg("label") = "")
        .def("all_gather", &ShmGroup::all_gather, py::arg("flat"), py::arg("label") = "",
             "In place; slice i comes from rank i.")
        .def(
            "all_reduce", &ShmGroup::all_reduce, py::arg("flat"), py::arg("op") = "sum", py::arg("scale") = 1.0,
            py::arg("is_waited") = false, py::arg("label") = "",
            "In place; op: \"sum\", \"max\", \"min\" or \"prod\". is_waited: the caller waits at once, so that no thread is woken for it.")
        .def("all_to_all", &ShmGroup::all_to_all, py::arg("flat"), py::arg("out"), py::arg("in_splits"),
             py::arg("out_splits"), py::arg("label") = "", "Splits are numbers of elements by rank.")
        .def("broadcast", &ShmGroup::broadcast, py::arg("flat"), py::arg("src"), py::arg("is_waited") = false,
             py::arg("label") = "")
        .def(
            "send", &ShmGroup::send, py::arg("tensor"), py::arg("dst"), py::arg("tag") = 0, py::arg("label") = "",
            "A message to rank dst, of any contiguous tensor. Messages of one tag arrive in order. The receiver compares "
            "dtype, shape and label before data moves.")
        .def("receive", &ShmGroup::receive, py::arg("tensor"), py::arg("src"), py::arg("tag") = 0,
             py::arg("label") = "", "The next message of a tag from rank src, into tensor.")
        .def("has_message", &ShmGroup::has_message, py::arg("src"), py::arg("tag") = 0,
             "Whether a message of a tag from rank src has arrived that nobody has received. Never waits.")
        .def("barrier", &ShmGroup::barrier)
        .def_property_readonly("counts", &ShmGroup::counts,
                               "What this rank has done, by operation: calls, bytes, and how many calls showed their "
                               "data in_place or staged.")
        .def("close", &ShmGroup::close,
             "Ends what is not done with RuntimeError, and tells the other ranks. Memory that empty gave lives on.");
}
