/* The exceptions behind status.h. */
#include "status.h"

/* For builtin_exception only, because all of pybind11 takes seconds to compile. */
#include <pybind11/detail/common.h>

#include <new>
#include <stdexcept>
#include <utility>

namespace dsc {

namespace {

/* std::bad_alloc with a message. torch and pybind11 convert it to MemoryError. */
class OutOfMemory : public std::bad_alloc {
  public:
    explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
    const char *what() const noexcept override { return message_.c_str(); }

  private:
    std::string message_;
};

/*
 * Both torch's and our pybind11 translate a builtin_exception by calling its set_error. A pybind11 that did not know
 * the class would still raise RuntimeError.
 */
class NotSupported : public pybind11::builtin_exception {
  public:
    using pybind11::builtin_exception::builtin_exception;
    void set_error() const override { PyErr_SetString(PyExc_NotImplementedError, what()); }
};

/* A transfer that failed: OSError, which callers of file functions expect. */
class TransferFailed : public pybind11::builtin_exception {
  public:
    using pybind11::builtin_exception::builtin_exception;
    void set_error() const override { PyErr_SetString(PyExc_OSError, what()); }
};

}  // namespace

void fail(dsc_status status, const std::string &message)
{
    switch (status) {
    case DSC_EINVAL:
    case DSC_EOVERFLOW:
    case DSC_ENOTFOUND:
        throw std::invalid_argument(message);
    case DSC_ENOMEM:
    case DSC_ENOSPC:
        throw OutOfMemory(message);
    case DSC_ENOTSUP:
        throw NotSupported(message);
    case DSC_EIO:
        throw TransferFailed(message);
    default:
        throw std::runtime_error(message);
    }
}

void check(dsc_status status, const char *op)
{
    if (status == DSC_OK)
        return;
    const char *sentence = dsc_last_error();
    fail(status, std::string(op) + ": " + (sentence[0] != '\0' ? sentence : dsc_status_text(status)));
}

}  // namespace dsc
