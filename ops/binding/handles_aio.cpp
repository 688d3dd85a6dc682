/*
 * The I/O engine, its files and its buffers as Python objects. Calls take addresses and byte counts. Calls that can
 * wait release the GIL.
 */
#include "handles.h"

#include "dsc/aio.h"
#include "dsc/process.h"
#include "path.h"
#include "status.h"

#include <pybind11/stl.h>

#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

/*
 * [Note: Locks and fork]
 *
 * A lock here is taken only without the GIL, so that a thread that waits for a transfer cannot block the thread that
 * holds the GIL. In a forked process, a thread that does not exist there may hold the lock, and the guarded data may be
 * half written. So all code here first checks that it is not in a forked child, before it reads the lock or the data.
 * Destructors in a forked child do nothing.
 */

/* Calls that use the core's file take the lock in shared mode; close() takes it exclusively. */
class AioFile {
  public:
    AioFile(py::object given, int flags, bool uses_direct)
    {
        const dsc::Path path(std::move(given));
        dsc_status status = dsc_process_note(&process_);

        if (status == DSC_OK) {
            py::gil_scoped_release release;
            status = dsc_aio_open(path.c_str(), flags, uses_direct, &file_);
        }
        dsc::check(status, "AioFile");
    }
    AioFile(const AioFile &) = delete;
    AioFile &operator=(const AioFile &) = delete;
    /*
     * Engines hold a reference to a file that they still use, so no request is left here. An error of close cannot be
     * reported here.
     */
    ~AioFile()
    {
        if (dsc_process_is_this(&process_))
            (void)dsc_aio_close(file_);
    }

    /* Returns body(the core's file), or DSC_ESTATE if there is no file. Called without the GIL. */
    template <class Body>
    dsc_status use(Body body) const
    {
        dsc_status status = dsc_process_check(&process_, "this open file");

        if (status != DSC_OK)
            return status;
        std::shared_lock<std::shared_mutex> lock(mutex_);
        return file_ == nullptr ? DSC_ESTATE : body(file_);
    }

    /* As use, but throws on failure. Called with the GIL; body runs without it. */
    template <class Body>
    void call(const char *op, Body body) const
    {
        dsc_status status = DSC_OK;
        {
            py::gil_scoped_release release;
            status = use(body);
        }
        check(status, op);
    }

    void check(dsc_status status, const char *op) const
    {
        if (status == DSC_ESTATE && dsc_process_is_this(&process_) && is_closed())
            dsc::fail(DSC_ESTATE, std::string(op) + ": the file has been closed");
        dsc::check(status, op);
    }

    void close()
    {
        dsc_status status = DSC_OK;

        if (!dsc_process_is_this(&process_))
            return;
        {
            py::gil_scoped_release release;
            std::lock_guard<std::shared_mutex> lock(mutex_);

            status = dsc_aio_close(file_);
            if (status != DSC_ESTATE)
                file_ = nullptr;
        }
        dsc::check(status, "AioFile.close");
    }

    int64_t n_bytes() const
    {
        int64_t n_bytes = 0;

        call("AioFile.n_bytes", [&](dsc_aio_file *file) { return dsc_aio_file_bytes(file, &n_bytes); });
        return n_bytes;
    }

    bool is_direct() const
    {
        bool is_direct = false;

        call("AioFile.is_direct", [&](dsc_aio_file *file) {
            is_direct = dsc_aio_file_is_direct(file);
            return DSC_OK;
        });
        return is_direct;
    }

    std::string note() const
    {
        std::string note;

        call("AioFile.note", [&](dsc_aio_file *file) {
            note = dsc_aio_file_note(file);
            return DSC_OK;
        });
        return note;
    }

  private:
    bool is_closed() const
    {
        py::gil_scoped_release release;
        std::shared_lock<std::shared_mutex> lock(mutex_);

        return file_ == nullptr;
    }

    struct dsc_process process_ {};
    mutable std::shared_mutex mutex_;
    dsc_aio_file *file_ = nullptr; /* under the mutex */
};

/* The core's engine belongs to one thread at a time; a mutex ensures this. */
class AioEngine {
  public:
    AioEngine(const std::optional<std::string> &backend, int64_t block_bytes, int32_t queue_depth, int32_t n_threads,
              bool single_submit, bool overlap_events, bool uses_direct)
    {
        struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;

        config.backend = backend.has_value() ? backend->c_str() : nullptr;
        config.block_bytes = block_bytes < 0 ? 0 : static_cast<size_t>(block_bytes);
        config.queue_depth = queue_depth;
        config.n_threads = n_threads;
        config.single_submit = single_submit;
        config.overlap_events = overlap_events;
        config.uses_direct = uses_direct;
        dsc::check(dsc_process_note(&process_), "AioEngine");
        dsc::check(dsc_aio_create(&config, &aio_), "AioEngine");
    }
    AioEngine(const AioEngine &) = delete;
    AioEngine &operator=(const AioEngine &) = delete;
    ~AioEngine() { close(); }

    /*
     * Buffers are released only after the last transfer has ended. In a forked process, and after an engine has given
     * up, they are never released.
     */
    void close()
    {
        Kept kept;

        if (!dsc_process_is_this(&process_)) {
            (void)kept_.release();
            return;
        }

        py::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(mutex_);
        if (aio_ != nullptr && dsc_aio_has_given_up(aio_))
            (void)kept_.release();
        dsc_aio_destroy(aio_);
        aio_ = nullptr;
        if (kept_ != nullptr)
            kept.swap(*kept_);
    }

    dsc_aio_id submit(bool is_write, const std::shared_ptr<AioFile> &file, int64_t offset, uint64_t address,
                      int64_t n_bytes, py::object keep)
    {
        const char *op = is_write ? "AioEngine.submit_write" : "AioEngine.submit_read";
        void *buf = reinterpret_cast<void *>(static_cast<uintptr_t>(address));
        dsc_aio_id id = 0;

        if (n_bytes < 0)
            dsc::fail(DSC_EINVAL,
                      std::string(op) + ": n_bytes is " + std::to_string(n_bytes) + ", must not be negative");
        const dsc_status status = locked(op, [&] {
            return file->use([&](dsc_aio_file *raw) {
                const size_t n = static_cast<size_t>(n_bytes);
                const dsc_status status = is_write ? dsc_aio_submit_write(aio_, raw, offset, buf, n, &id)
                                                   : dsc_aio_submit_read(aio_, raw, offset, buf, n, &id);

                if (status == DSC_OK)
                    kept_->emplace(id, std::make_pair(file, std::move(keep)));
                return status;
            });
        });
        file->check(status, op);
        return id;
    }

    int64_t wait(dsc_aio_id id)
    {
        Kept::node_type kept;
        int64_t res = 0;

        call("AioEngine.wait", [&] {
            const dsc_status status = dsc_aio_wait(aio_, id, &res);

            if ((status == DSC_OK || status == DSC_EIO) && !dsc_aio_has_given_up(aio_))
                kept = kept_->extract(id);
            return status;
        });
        return res;
    }

    bool poll(dsc_aio_id id)
    {
        bool is_done = false;

        call("AioEngine.poll", [&] { return dsc_aio_poll(aio_, id, &is_done); });
        return is_done;
    }

    void cancel(dsc_aio_id id)
    {
        call("AioEngine.cancel", [&] { return dsc_aio_cancel(aio_, id); });
    }

    int64_t pending()
    {
        int64_t n = 0;

        call("AioEngine.pending", [&] {
            n = dsc_aio_pending(aio_);
            return DSC_OK;
        });
        return n;
    }

    bool has_given_up()
    {
        bool has = false;

        call("AioEngine.has_given_up", [&] {
            has = dsc_aio_has_given_up(aio_);
            return DSC_OK;
        });
        return has;
    }

    void check_process() const { dsc::check(dsc_process_check(&process_, "this I/O engine"), "AioEngine"); }

    std::string backend()
    {
        std::string name;

        call("AioEngine.backend", [&] {
            name = dsc_aio_backend_name(aio_);
            return DSC_OK;
        });
        return name;
    }

  private:
    /*
     * The file and buffer of each request, by id. References are only moved into and out of the map, because making or
     * dropping one needs the GIL.
     */
    using Kept = std::unordered_map<dsc_aio_id, std::pair<std::shared_ptr<AioFile>, py::object>>;

    template <class Body>
    void call(const char *op, Body body)
    {
        dsc::check(locked(op, body), op);
    }

    /* Returns body's status; throws if there is no engine. */
    template <class Body>
    dsc_status locked(const char *op, Body body)
    {
        bool is_closed = false;
        dsc_status status = dsc_process_check(&process_, "this I/O engine");

        dsc::check(status, op);
        {
            py::gil_scoped_release release;
            std::lock_guard<std::mutex> lock(mutex_);

            is_closed = aio_ == nullptr;
            if (!is_closed)
                status = body();
        }
        if (is_closed)
            dsc::fail(DSC_ESTATE, std::string(op) + ": the engine has been closed");
        return status;
    }

    struct dsc_process process_ {};
    dsc_aio *aio_ = nullptr;
    std::mutex mutex_;
    std::unique_ptr<Kept> kept_ =
        std::make_unique<Kept>(); /* guarded by the mutex; a pointer, so that the map can be leaked on purpose */
};

class PinnedPool {
  public:
    explicit PinnedPool(int64_t budget_bytes) { dsc::check(dsc_aio_pool_create(budget_bytes, &pool_), "PinnedPool"); }
    PinnedPool(const PinnedPool &) = delete;
    PinnedPool &operator=(const PinnedPool &) = delete;
    ~PinnedPool() { dsc_aio_pool_destroy(pool_); }

    dsc_aio_pool *get() const { return pool_; }

    int64_t used_bytes() const { return bytes().first; }
    int64_t held_bytes() const { return bytes().second; }

  private:
    std::pair<int64_t, int64_t> bytes() const
    {
        std::pair<int64_t, int64_t> both;

        dsc_aio_pool_bytes(pool_, &both.first, &both.second);
        return both;
    }

    dsc_aio_pool *pool_ = nullptr;
};

/* One buffer of a pool. It returns to the pool when the last tensor over it is destroyed. */
class PinnedBuffer {
  public:
    PinnedBuffer(std::shared_ptr<PinnedPool> pool, int64_t n_bytes) : n_bytes(n_bytes), pool_(std::move(pool))
    {
        dsc::check(dsc_aio_pool_take(pool_->get(), n_bytes < 0 ? 0 : static_cast<size_t>(n_bytes), &at, &is_locked),
                   "PinnedPool.take");
    }
    PinnedBuffer(const PinnedBuffer &) = delete;
    PinnedBuffer &operator=(const PinnedBuffer &) = delete;
    ~PinnedBuffer() { (void)dsc_aio_pool_give(pool_->get(), at); }

    void *at = nullptr;
    int64_t n_bytes;
    bool is_locked = false;

  private:
    std::shared_ptr<PinnedPool> pool_;
};

std::vector<std::tuple<std::string, bool, std::string>> backends()
{
    std::vector<std::tuple<std::string, bool, std::string>> found;

    for (int32_t i = 0;; i++) {
        const char *name = dsc_aio_backend_at(i);

        if (name == nullptr)
            return found;
        const bool is_usable = dsc_aio_backend_probe(name) == DSC_OK;
        found.emplace_back(name, is_usable, is_usable ? "" : dsc_last_error());
    }
}

py::dict last_failure()
{
    struct dsc_aio_failure failure = {};
    py::dict fields;

    dsc_aio_last_failure(&failure);
    fields["path"] = py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(failure.path));
    fields["verb"] = failure.verb;
    fields["offset"] = failure.offset;
    fields["n_bytes"] = failure.n_bytes;
    fields["at"] = failure.at;
    fields["errno"] = failure.err;
    return fields;
}

}  // namespace

void dsc::bind_aio(py::module_ &m)
{
    py::class_<AioFile, std::shared_ptr<AioFile>>(
        m, "AioFile", "An open file that engines transfer from and to (dsc/aio.h). OSError where the system says no.")
        .def(py::init<py::object, int, bool>(), py::arg("path"), py::arg("flags"), py::arg("uses_direct") = true)
        .def("close", &AioFile::close,
             "Closes it; RuntimeError while requests on it have not been waited for. Nothing in a forked process.")
        .def_property_readonly("n_bytes", &AioFile::n_bytes)
        .def_property_readonly("is_direct", &AioFile::is_direct, "Whether aligned transfers go past the page cache.")
        .def_property_readonly("note", &AioFile::note,
                               "Why it is not direct though that was asked for; empty otherwise.");
    py::class_<AioEngine>(
        m, "AioEngine",
        "Asynchronous transfers between files and memory given by address (dsc/aio.h). Any thread may call it; one is served at a time.")
        .def(py::init<const std::optional<std::string> &, int64_t, int32_t, int32_t, bool, bool, bool>(),
             py::arg("backend") = py::none(), py::arg("block_bytes") = 1 << 20, py::arg("queue_depth") = 32,
             py::arg("n_threads") = 1, py::arg("single_submit") = false, py::arg("overlap_events") = true,
             py::arg("uses_direct") = true)
        .def(
            "submit_read",
            [](AioEngine &self, const std::shared_ptr<AioFile> &file, int64_t offset, uint64_t address, int64_t n_bytes,
               py::object keep) { return self.submit(false, file, offset, address, n_bytes, std::move(keep)); },
            py::arg("file"), py::arg("offset"), py::arg("address"), py::arg("n_bytes"), py::arg("keep"),
            "Starts a read and returns its id. keep: the owner of the memory, referenced until the request has been waited for.")
        .def(
            "submit_write",
            [](AioEngine &self, const std::shared_ptr<AioFile> &file, int64_t offset, uint64_t address, int64_t n_bytes,
               py::object keep) { return self.submit(true, file, offset, address, n_bytes, std::move(keep)); },
            py::arg("file"), py::arg("offset"), py::arg("address"), py::arg("n_bytes"), py::arg("keep"),
            "As submit_read.")
        .def("wait", &AioEngine::wait, py::arg("id"),
             "Bytes transferred, fewer for a read that meets the end of the file; OSError when it failed.")
        .def("poll", &AioEngine::poll, py::arg("id"), "Whether wait(id) would return at once.")
        .def("cancel", &AioEngine::cancel, py::arg("id"),
             "Gives up what has not been started of a request, which is still to be waited for.")
        .def("close", &AioEngine::close,
             "Cancels what has not been started, and waits for the rest. Nothing in a forked process.")
        .def("check_process", &AioEngine::check_process,
             "RuntimeError in a process that was forked from the one that made the engine; as all that transfers.")
        .def_property_readonly(
            "has_given_up", &AioEngine::has_given_up,
            "Whether the backend has failed as such. What was in flight may still write to its memory, which is kept until the process ends.")
        .def_property_readonly("pending", &AioEngine::pending, "Requests that have not been waited for.")
        .def_property_readonly("backend", &AioEngine::backend, "The backend in use.");
    py::class_<PinnedPool, std::shared_ptr<PinnedPool>>(
        m, "PinnedPool", "Page-aligned buffers locked in memory, of exact sizes, under a budget in bytes.")
        .def(py::init<int64_t>(), py::arg("budget_bytes"))
        .def(
            "take",
            [](const std::shared_ptr<PinnedPool> &self, int64_t n_bytes) {
                return std::make_unique<PinnedBuffer>(self, n_bytes);
            },
            py::arg("n_bytes"),
            "A buffer; MemoryError when it does not fit the budget. It goes back when nothing refers to it.")
        .def_property_readonly("used_bytes", &PinnedPool::used_bytes)
        .def_property_readonly("held_bytes", &PinnedPool::held_bytes, "In use, or kept for the next of its size.");
    py::class_<PinnedBuffer>(m, "PinnedBuffer", py::buffer_protocol(),
                             "Memory of a PinnedPool, by the buffer protocol.")
        .def_buffer([](PinnedBuffer &self) {
            return py::buffer_info(static_cast<uint8_t *>(self.at), static_cast<py::ssize_t>(self.n_bytes));
        })
        .def_readonly("n_bytes", &PinnedBuffer::n_bytes)
        .def_readonly("is_locked", &PinnedBuffer::is_locked, "False when RLIMIT_MEMLOCK did not allow it.");
    m.def(
        "aio_backends", &backends,
        "[(name, whether this kernel allows it, why not)] of the I/O backends, in the order that \"auto\" tries them.");
    m.def("aio_alignment", &dsc_aio_alignment,
          "Bytes: file offsets and addresses that are multiples of it always go directly.");
    m.def("aio_last_failure", &last_failure, "The fields of this thread's last OSError from an AioFile or AioEngine.");
    m.attr("AIO_READ") = static_cast<int>(DSC_AIO_READ);
    m.attr("AIO_WRITE") = static_cast<int>(DSC_AIO_WRITE);
    m.attr("AIO_CREATE") = static_cast<int>(DSC_AIO_CREATE);
}
