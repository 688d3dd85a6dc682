/*
 * Takes a gradient from autograd's hook into its bucket. The Python objects are the state that all parameters share,
 * and a callable for each parameter, which autograd calls.
 */
#include "handles.h"

#include "dsc/intake.h"
#include "dsc/pool.h"
#include "dsc/zero.h"
#include "status.h"

#include <structmember.h>

#include <array>
#include <cstddef>

namespace py = pybind11;

namespace {

using Place = std::tuple<int64_t, int64_t, int64_t>;

/*
 * A pass over more elements than this releases the GIL. For fewer elements, releasing the GIL would cost more than the
 * pass.
 */
constexpr int64_t ELEMS_WITH_GIL = 1 << 16;

/* A Python reference. It is dropped with the GIL held, like all references in this file. */
class Ref {
  public:
    explicit Ref(PyObject *object) : object_(object) {}
    Ref(const Ref &) = delete;
    Ref &operator=(const Ref &) = delete;
    ~Ref() { Py_XDECREF(object_); }

    PyObject *get() const { return object_; }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    PyObject *object_;
};

/* Names that are looked up for each gradient. They live as long as the process. */
struct Names {
    PyObject *grad = PyUnicode_InternFromString("grad");
    PyObject *dtype = PyUnicode_InternFromString("dtype");
    PyObject *layout = PyUnicode_InternFromString("layout");
    PyObject *is_cpu = PyUnicode_InternFromString("is_cpu");
    PyObject *is_neg = PyUnicode_InternFromString("is_neg");
    PyObject *is_contiguous = PyUnicode_InternFromString("is_contiguous");
    PyObject *numel = PyUnicode_InternFromString("numel");
    PyObject *data_ptr = PyUnicode_InternFromString("data_ptr");
};

const Names &names()
{
    static const Names found;

    return found;
}

bool is_true(PyObject *object, PyObject *name)
{
    const Ref found(PyObject_GetAttr(object, name));

    return found.get() == Py_True;
}

bool says_true(PyObject *object, PyObject *method)
{
    const Ref found(PyObject_CallMethodNoArgs(object, method));

    return found.get() == Py_True;
}

/* Calls the method and returns its number; -1 if the result is not a number or the call raises. */
int64_t number_of(PyObject *object, PyObject *method)
{
    const Ref found(PyObject_CallMethodNoArgs(object, method));

    return found ? PyLong_AsLongLong(found.get()) : -1;
}

/* Owns the arrays that the cores keep pointers into, so it can be neither copied nor moved. */
class GradientPath {
  public:
    GradientPath(const std::vector<Place> &places, int64_t n_buckets)
        : marks_(places.size()), is_written_(places.size())
    {
        if (n_buckets < 0)
            dsc::fail(DSC_EINVAL, "GradientPath: n_buckets is " + std::to_string(n_buckets) + ", must not be negative");
        for (const auto &[bucket, begin, n_elems] : places) {
            bucket_of_.push_back(bucket);
            places_.push_back({bucket, begin, n_elems});
        }
        pending_.resize(static_cast<size_t>(n_buckets));
        states_.resize(static_cast<size_t>(n_buckets));
        buckets_.resize(static_cast<size_t>(n_buckets));
        dsc::check(
            dsc_intake_init(&intake_, places_.data(), n_params(), buckets_.data(), n_buckets, is_written_.data()),
            "GradientPath");
        dsc::check(dsc_bucket_tracker_init(&tracker_, bucket_of_.data(), n_params(), n_buckets, pending_.data(),
                                           marks_.data(), states_.data()),
                   "GradientPath");
    }
    GradientPath(const GradientPath &) = delete;
    GradientPath &operator=(const GradientPath &) = delete;

    int64_t n_params() const { return static_cast<int64_t>(places_.size()); }

    void connect(const py::object &lock, py::object add, py::object open, py::object start)
    {
        const py::module_ torch = py::module_::import("torch");

        add_ = std::move(add);
        open_ = std::move(open);
        start_ = std::move(start);
        acquire_ = lock.attr("acquire");
        release_ = lock.attr("release");
        tensor_ = torch.attr("Tensor");
        grad_ = tensor_.attr("grad");
        strided_ = torch.attr("strided");
        dtypes_ = {torch.attr("float32"), torch.attr("bfloat16"), torch.attr("float16")};
    }

    void set_mode(bool takes, bool launches)
    {
        takes_ = takes;
        launches_ = launches;
    }

    void open(int64_t bucket, int64_t data, int64_t n_elems, const py::object &dtype)
    {
        dsc::check(dsc_intake_open(&intake_, bucket, reinterpret_cast<void *>(data), n_elems,
                                   static_cast<dsc_dtype>(dtype_of(dtype.ptr()))),
                   "GradientPath.open");
    }

    void close(int64_t bucket) { dsc::check(dsc_intake_close(&intake_, bucket), "GradientPath.close"); }

    void clear_rest(int64_t bucket) { dsc::check(dsc_intake_clear_rest(&intake_, bucket), "GradientPath.clear_rest"); }

    void fill(int64_t bucket) { dsc::check(dsc_intake_fill(&intake_, bucket), "GradientPath.fill"); }

    std::vector<int64_t> missing(int64_t bucket) const
    {
        std::vector<int64_t> found;

        for (int64_t param = 0;; param++) {
            dsc::check(dsc_intake_next_missing(&intake_, bucket, param, &param), "GradientPath.missing");
            if (param < 0)
                return found;
            found.push_back(param);
        }
    }

    bool note(int64_t param)
    {
        bool is_first = false;

        dsc::check(dsc_intake_note(&intake_, param, &is_first), "GradientPath.note");
        return is_first;
    }

    void mark(int64_t param)
    {
        int32_t time = DSC_BUCKET_IN_TIME;

        dsc::check(dsc_bucket_tracker_mark(&tracker_, param, &time), "GradientPath.mark");
        if (!launches_ || time == DSC_BUCKET_LATE)
            return;
        for (int64_t bucket = 0; (bucket = next(DSC_BUCKET_READY)) >= 0;)
            start_(bucket);
    }

    int64_t next(int32_t due) { return dsc_bucket_tracker_next(&tracker_, due); }

    bool pass(int64_t bucket)
    {
        bool is_due = false;

        dsc::check(dsc_bucket_tracker_pass(&tracker_, bucket, &is_due), "GradientPath.pass_turn");
        return is_due;
    }

    void set_waiting(int64_t bucket, bool waits)
    {
        dsc::check(dsc_bucket_tracker_set_waiting(&tracker_, bucket, waits), "GradientPath.set_waiting");
    }

    void reset() { dsc_bucket_tracker_reset(&tracker_); }

    void begin_window() { dsc_bucket_tracker_begin_window(&tracker_); }

    py::bytes seen() const
    {
        std::vector<uint8_t> found(places_.size() + 1); /* data() of an empty vector is NULL */

        dsc::check(dsc_bucket_tracker_seen(&tracker_, found.data()), "GradientPath.seen");
        return py::bytes(reinterpret_cast<const char *>(found.data()), places_.size());
    }

    void see(int64_t param) { dsc::check(dsc_bucket_tracker_see(&tracker_, param), "GradientPath.see"); }

    void forget(int64_t param) { dsc::check(dsc_bucket_tracker_forget(&tracker_, param), "GradientPath.forget"); }

    void take_late() { dsc_bucket_tracker_take_late(&tracker_); }

    /* Called by autograd. */
    void on_gradient(int64_t param, PyObject *tensor)
    {
        if (!add_)
            dsc::fail(DSC_ESTATE, "GradientPath: a gradient came before connect");
        const Ref grad(grad_of(tensor));

        if (!grad)
            throw py::error_already_set();
        if (grad.get() == Py_None)
            return;
        const Locked locked(*this);

        if (takes_ && take(param, grad.get())) {
            clear_grad(tensor);
            mark(param);
        } else {
            add_(param, py::reinterpret_borrow<py::object>(tensor));
        }
    }

    int traverse(visitproc visit, void *arg) const
    {
        for (const py::object *held : {&add_, &open_, &start_, &acquire_, &release_, &tensor_, &grad_, &strided_})
            Py_VISIT(held->ptr());
        return 0;
    }

    void clear()
    {
        for (py::object *held : {&add_, &open_, &start_, &acquire_, &release_})
            *held = py::object();
    }

  private:
    /* Autograd runs one thread per device, so gradients may come from several. */
    class Locked {
      public:
        explicit Locked(const GradientPath &path) : release_(path.release_) { path.acquire_(); }
        Locked(const Locked &) = delete;
        Locked &operator=(const Locked &) = delete;
        ~Locked()
        {
            /* Preserves a pending Python exception. */
            const py::error_scope raised;
            const Ref done(PyObject_CallNoArgs(release_.ptr()));

            if (!done)
                PyErr_WriteUnraisable(release_.ptr());
        }

      private:
        py::object release_;
    };

    /*
     * Reads through torch's own descriptor, because the class of a parameter may have a property of this name for its
     * users.
     */
    PyObject *grad_of(PyObject *tensor) const
    {
        if (!is_tensor(tensor))
            return PyObject_GetAttr(tensor, names().grad);
        return Py_TYPE(grad_.ptr())->tp_descr_get(grad_.ptr(), tensor, reinterpret_cast<PyObject *>(Py_TYPE(tensor)));
    }

    void clear_grad(PyObject *tensor) const
    {
        const bool is_clear = is_tensor(tensor) ? Py_TYPE(grad_.ptr())->tp_descr_set(grad_.ptr(), tensor, Py_None) == 0
                                                : PyObject_SetAttr(tensor, names().grad, Py_None) == 0;

        if (!is_clear)
            throw py::error_already_set();
    }

    bool is_tensor(PyObject *object) const
    {
        return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject *>(tensor_.ptr())) != 0;
    }

    /* Returns DSC_DTYPE_COUNT for a dtype that the cores do not know. */
    int dtype_of(PyObject *dtype) const
    {
        int found = 0;

        while (found < DSC_DTYPE_COUNT && dtypes_[static_cast<size_t>(found)].ptr() != dtype)
            found++;
        return found;
    }

    /*
     * True when the gradient is in its bucket. False, with nothing changed, for a gradient that only torch knows how to
     * read: sparse, of a subclass, of another dtype, with gaps, on a device, or without memory of its own.
     */
    bool take(int64_t param, PyObject *grad)
    {
        const struct dsc_intake_place &place = places_[static_cast<size_t>(param)];

        if (!buckets_[static_cast<size_t>(place.bucket)].is_open)
            open_(place.bucket);
        if (buckets_[static_cast<size_t>(place.bucket)].data == nullptr)
            return false;
        const bool is_here = is_plain(grad);
        const Ref dtype(is_here ? PyObject_GetAttr(grad, names().dtype) : nullptr);
        const struct dsc_span span {
            reinterpret_cast<void *>(is_here ? number_of(grad, names().data_ptr) : 0),
                is_here ? number_of(grad, names().numel) : -1, static_cast<dsc_dtype>(dtype_of(dtype.get()))
        };

        if (PyErr_Occurred() != nullptr) {
            PyErr_Clear(); /* if something is wrong with the gradient, torch's own functions will report it */
            return false;
        }
        if (span.dtype == DSC_DTYPE_COUNT || span.n_elems != place.n_elems ||
            (span.data == nullptr && span.n_elems > 0))
            return false;
        add(param, span);
        return true;
    }

    bool is_plain(PyObject *grad) const
    {
        if (reinterpret_cast<PyObject *>(Py_TYPE(grad)) != tensor_.ptr() || !is_true(grad, names().is_cpu))
            return false;
        const Ref layout(PyObject_GetAttr(grad, names().layout));

        return layout.get() == strided_.ptr() && says_true(grad, names().is_contiguous) &&
               !says_true(grad, names().is_neg);
    }

    void add(int64_t param, const struct dsc_span &grad)
    {
        struct dsc_par par {};
        dsc_status status;

        if (grad.n_elems <= ELEMS_WITH_GIL) {
            status = dsc_intake_add(&intake_, param, &grad, nullptr);
        } else {
            const py::gil_scoped_release other_threads_run;

            status = dsc_pool_par(&par);
            if (status == DSC_OK)
                status = dsc_intake_add(&intake_, param, &grad, &par);
        }
        dsc::check(status, "GradientPath");
    }

    std::vector<struct dsc_intake_place> places_;
    std::vector<struct dsc_intake_bucket> buckets_;
    std::vector<int64_t> bucket_of_;
    std::vector<int64_t> pending_;
    std::vector<uint8_t> marks_;
    std::vector<uint8_t> is_written_;
    std::vector<uint8_t> states_;
    struct dsc_intake intake_ {};
    struct dsc_bucket_tracker tracker_ {};
    bool takes_ = false;
    bool launches_ = false;
    py::object add_;
    py::object open_;
    py::object start_;
    py::object acquire_;
    py::object release_;
    py::object tensor_;
    py::object grad_;
    py::object strided_;
    std::array<py::object, DSC_DTYPE_COUNT> dtypes_;
};

/* The callable of one parameter, for autograd. Called through vectorcall: no tuple of arguments, no look-up. */
struct Hook {
    PyObject_HEAD vectorcallfunc call;
    PyObject *owner; /* the Python object of the path */
    GradientPath *path;
    int64_t param;
};

PyObject *call_hook(PyObject *self, PyObject *const *args, size_t n_args, PyObject *keywords)
{
    Hook *hook = reinterpret_cast<Hook *>(self);

    if (PyVectorcall_NARGS(n_args) != 1 || keywords != nullptr) {
        PyErr_SetString(PyExc_TypeError, "a gradient's hook takes the parameter and nothing else");
        return nullptr;
    }
    try {
        hook->path->on_gradient(hook->param, args[0]);
    } catch (py::error_already_set &error) {
        error.restore();
        return nullptr;
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    Py_RETURN_NONE;
}

int traverse_hook(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(reinterpret_cast<Hook *>(self)->owner);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

int clear_hook(PyObject *self)
{
    Py_CLEAR(reinterpret_cast<Hook *>(self)->owner);
    return 0;
}

void free_hook(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    clear_hook(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject *hook_type()
{
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(Hook, call), READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr},
    };
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void *>(free_hook)},
        {Py_tp_traverse, reinterpret_cast<void *>(traverse_hook)},
        {Py_tp_clear, reinterpret_cast<void *>(clear_hook)},
        {Py_tp_call, reinterpret_cast<void *>(PyVectorcall_Call)},
        {Py_tp_members, members},
        {0, nullptr},
    };
    static PyType_Spec spec = {
        "deepspeed_c._C.GradientHook",
        sizeof(Hook),
        0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        slots,
    };
    static PyObject *type = PyType_FromSpec(&spec);

    if (type == nullptr)
        throw py::error_already_set();
    return type;
}

py::object hook_of(const py::object &self, int64_t param)
{
    auto &path = self.cast<GradientPath &>();

    if (param < 0 || param >= path.n_params())
        dsc::fail(DSC_EINVAL, "GradientPath.hook: param is " + std::to_string(param) + ", must be 0 to " +
                                  std::to_string(path.n_params() - 1));
    PyTypeObject *type = reinterpret_cast<PyTypeObject *>(hook_type());
    Hook *hook = PyObject_GC_New(Hook, type);

    if (hook == nullptr)
        throw py::error_already_set();
    hook->call = call_hook;
    hook->owner = py::object(self).release().ptr();
    hook->path = &path;
    hook->param = param;
    PyObject_GC_Track(reinterpret_cast<PyObject *>(hook));
    return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject *>(hook));
}

/*
 * The path holds methods of its owner, and the owner holds the path. Only a garbage collector that sees both can free
 * them.
 */
void let_collect(PyHeapTypeObject *heap_type)
{
    PyTypeObject *type = &heap_type->ht_type;

    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = [](PyObject *self, visitproc visit, void *arg) {
        Py_VISIT(Py_TYPE(self));
        if (!py::detail::is_holder_constructed(self))
            return 0;
        return py::handle(self).cast<GradientPath &>().traverse(visit, arg);
    };
    type->tp_clear = [](PyObject *self) {
        if (py::detail::is_holder_constructed(self))
            py::handle(self).cast<GradientPath &>().clear();
        return 0;
    };
}

}  // namespace

void dsc::bind_gradients(py::module_ &m)
{
    auto path = py::class_<GradientPath>(
        m, "GradientPath", py::custom_type_setup(&let_collect),
        "The way of gradients into the buckets of a pass (dsc/intake.h), and which bucket may be reduced next "
        "(dsc/zero.h). places: (bucket, first element within it, elements) of each parameter, bucket by bucket.");
    path.def(py::init<const std::vector<Place> &, int64_t>(), py::arg("places"), py::arg("n_buckets"))
        .def("connect", &GradientPath::connect, py::kw_only(), py::arg("lock"), py::arg("add"), py::arg("open"),
             py::arg("start"),
             "Says what is called, with lock held: add(param, tensor) with each gradient that a hook leaves to torch, "
             "open(bucket) before a gradient of a closed one is taken, start(bucket) with one that is due.")
        .def("hook", &hook_of, py::arg("param"),
             "What autograd is to call when the gradient of a parameter has come: it copies or adds it and sets .grad "
             "to None.")
        .def("set_mode", &GradientPath::set_mode, py::kw_only(), py::arg("takes"), py::arg("launches"),
             "takes: hooks take gradients as they are; otherwise all go to add. launches: buckets are started when "
             "their turn comes.")
        .def("open", &GradientPath::open, py::arg("bucket"), py::arg("data"), py::arg("n_elems"), py::arg("dtype"),
             "A bucket's gradients gather at an address of host memory, or where add puts them if it is 0; none has "
             "come.")
        .def("close", &GradientPath::close, py::arg("bucket"), "The bucket has no buffer any more.")
        .def("clear_rest", &GradientPath::clear_rest, py::arg("bucket"),
             "Sets to zero what no gradient has come to in an open bucket of host memory.")
        .def("fill", &GradientPath::fill, py::arg("bucket"), "All members of an open bucket count as come.")
        .def("missing", &GradientPath::missing, py::arg("bucket"),
             "The members of an open bucket whose gradients have not come.")
        .def("note", &GradientPath::note, py::arg("param"),
             "The caller writes a gradient itself: whether none has come to its place before.")
        .def("mark", &GradientPath::mark, py::arg("param"),
             "A parameter's gradient has come; starts the buckets that are due by it.")
        .def("next", &GradientPath::next, py::arg("due"),
             "The next bucket of those that due (READY, PROMPT or ALL) names, counted as launched from now on; -1 when "
             "there is none.")
        .def("pass_turn", &GradientPath::pass, py::arg("bucket"),
             "The bucket's turn has come, whatever its members: whether it is to be launched, and counts as launched "
             "from now on.")
        .def("set_waiting", &GradientPath::set_waiting, py::arg("bucket"), py::arg("waits"),
             "Whether the bucket lets its turn pass and is due after all others; kept by reset.")
        .def("reset", &GradientPath::reset, "Begins a pass: nothing marked, nothing launched.")
        .def("begin_window", &GradientPath::begin_window, "As reset, and nothing has been seen.")
        .def("seen", &GradientPath::seen,
             "What has come of each parameter in this window: a sum of SEEN, SEEN_AFTER "
             "its bucket's turn and SEEN_LATE.")
        .def("see", &GradientPath::see, py::arg("param"), "The parameter counts as SEEN, and in time.")
        .def("forget", &GradientPath::forget, py::arg("param"),
             "The parameter's gradient was dropped: nothing of it counts as seen.")
        .def("take_late", &GradientPath::take_late, "Nothing is SEEN_LATE any more.");
    path.attr("SEEN") = static_cast<int>(DSC_BUCKET_SEEN);
    path.attr("SEEN_AFTER") = static_cast<int>(DSC_BUCKET_SEEN_AFTER);
    path.attr("SEEN_LATE") = static_cast<int>(DSC_BUCKET_SEEN_LATE);
    path.attr("READY") = static_cast<int>(DSC_BUCKET_READY);
    path.attr("PROMPT") = static_cast<int>(DSC_BUCKET_PROMPT);
    path.attr("ALL") = static_cast<int>(DSC_BUCKET_ALL);
}
