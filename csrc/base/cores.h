/* The processors of a process: its affinity mask, and the NUMA node of each. */
#ifndef DSC_BASE_CORES_H
#define DSC_BASE_CORES_H

#include "dsc/status.h"
#include "dsc/types.h"

#include <sched.h>

#define DSC_CORES_MAX 8192 /* the largest number that a Linux kernel can be built for */

struct dsc_cores {
    union {
        cpu_set_t set;
        unsigned char bytes[DSC_CORES_MAX / 8];
    } bits;
};

/* Processors on which the process, not only the thread, may run. If the kernel does not tell, all online processors. */
void dsc_cores_of(pid_t pid, struct dsc_cores *out_cores);

int32_t dsc_cores_count(const struct dsc_cores *cores);

/*
 * Computes where thread number `thread` of n_threads should run. Threads are spread in order over the processors of
 * `cores`, sorted by NUMA node; the result is all processors of `cores` in the thread's node. It is all of `cores` if
 * there is one node or the kernel does not tell. root is "", except in tests: there it is a folder with sys/devices in
 * it.
 */
void dsc_cores_near(const char *root, const struct dsc_cores *cores, int32_t thread, int32_t n_threads,
                    struct dsc_cores *out_near);

#endif
