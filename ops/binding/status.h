/* Turns a core's status into a Python exception with the core's message, in files that include no torch header. */
#ifndef DSC_STATUS_TO_EXCEPTION_H
#define DSC_STATUS_TO_EXCEPTION_H

#include "dsc/status.h"

#include <string>

namespace dsc {

/*
 * Throws an exception that Python sees as ValueError (EINVAL, EOVERFLOW, ENOTFOUND), MemoryError (ENOMEM, ENOSPC),
 * NotImplementedError (ENOTSUP) or RuntimeError (the rest). The GIL need not be held.
 */
[[noreturn]] void fail(dsc_status status, const std::string &message);

/* Does nothing for DSC_OK. Otherwise throws an exception with `op` and the core's message. */
void check(dsc_status status, const char *op);

}  // namespace dsc

#endif
