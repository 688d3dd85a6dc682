/* Names and texts of statuses, and the thread's last error sentence. */
#include "base/fail.h"

#include <stdarg.h>
#include <stdio.h>

#define LAST_ERROR_BYTES 512

static _Thread_local char last_error[LAST_ERROR_BYTES];

const char *dsc_status_name(dsc_status status)
{
    switch (status) {
#define CASE(name, value, text) \
    case DSC_##name:            \
        return "DSC_" #name;
        DSC_STATUS_MAP(CASE)
#undef CASE
    }
    return "DSC_UNKNOWN"; /* no default case, so that the compiler reports an enumerator that is missing in the map */
}

const char *dsc_status_text(dsc_status status)
{
    switch (status) {
#define CASE(name, value, text) \
    case DSC_##name:            \
        return text;
        DSC_STATUS_MAP(CASE)
#undef CASE
    }
    return "not a dsc_status";
}

const char *dsc_last_error(void)
{
    return last_error;
}

dsc_status dsc_fail(dsc_status status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    int n_bytes = vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    if (n_bytes < 0) /* after an encoding error in the format; the caller still gets the status */
        last_error[0] = '\0';
    return status;
}
