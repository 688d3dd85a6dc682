/* The folder of the libraries that a test loads: they lie beside the test program. */
#ifndef DSC_TEST_FOLDER_H
#define DSC_TEST_FOLDER_H

#include "test.h"

#include <limits.h>
#include <unistd.h>

/* The folder of the running program followed by tail, in static storage. */
static inline const char *test_beside(const char *tail)
{
    static char path[PATH_MAX];
    ssize_t n_bytes = readlink("/proc/self/exe", path, sizeof path - 1);

    if (n_bytes < 0) {
        fprintf(stderr, "/proc/self/exe cannot be read\n");
        exit(1);
    }
    path[n_bytes] = '\0';

    char *slash = strrchr(path, '/') + 1;

    snprintf(slash, sizeof path - (size_t)(slash - path), "%s", tail);
    return path;
}

#endif
