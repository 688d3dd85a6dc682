/* The result of a call: a status, and a sentence with the numbers in it. */
#ifndef DSC_STATUS_H
#define DSC_STATUS_H

#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* name, value, text. The values are part of the ABI. */
#define DSC_STATUS_MAP(X)                                       \
    X(OK, 0, "success")                                         \
    X(EINVAL, 1, "invalid argument")                            \
    X(ENOMEM, 2, "out of memory")                               \
    X(EOVERFLOW, 3, "a size does not fit its type")             \
    X(ENOTFOUND, 4, "no entry of that name")                    \
    X(ENOTSUP, 5, "not supported by this build or device")      \
    X(ESTATE, 6, "not allowed in the object's present state")   \
    X(EDEVICE, 7, "the accelerator reported an error")          \
    X(EAGAIN, 8, "try again")                                   \
    X(EIO, 9, "a transfer failed")                              \
    X(ECORRUPT, 10, "stored data is not what was written")      \
    X(ENOSPC, 11, "not enough room")                            \
    X(EPEER, 12, "another rank is gone, or does another thing") \
    X(ETIMEDOUT, 13, "nothing came in time")

typedef enum dsc_status {
#define DSC_STATUS_ENUM(name, value, text) DSC_##name = value,
    DSC_STATUS_MAP(DSC_STATUS_ENUM)
#undef DSC_STATUS_ENUM
} dsc_status;

/* "DSC_EINVAL"; "DSC_UNKNOWN" for a value that is not in the map. Static storage. */
DSC_API const char *dsc_status_name(dsc_status status);

/* The map's text. Static storage. */
DSC_API const char *dsc_status_text(dsc_status status);

/*
 * The sentence of the last failure in this thread ("" before any). Borrowed: it lives until the next failing call
 * of the same thread. A call that succeeds leaves it as it was.
 */
DSC_API const char *dsc_last_error(void);

/* Returns a failing status to the caller. For functions that have nothing to undo. */
#define DSC_TRY(call)                       \
    do {                                    \
        dsc_status dsc_try_status = (call); \
        if (dsc_try_status != DSC_OK)       \
            return dsc_try_status;          \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
