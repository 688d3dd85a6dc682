/* Reports a failure of a core: the status to return, and the sentence for dsc_last_error(). */
#ifndef DSC_BASE_FAIL_H
#define DSC_BASE_FAIL_H

#include "dsc/status.h"

/*
 * Stores the sentence for this thread (cut at 511 bytes) and returns status, so that a failing line reads: return
 * dsc_fail(DSC_EINVAL, ...).
 */
dsc_status dsc_fail(dsc_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
