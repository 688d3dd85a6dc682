/* The processors of a process: its affinity mask, and the NUMA node of each. */
#ifndef DSC_BASE_CORES_H
#define DSC_BASE_CORES_H

#include "dsc/status.h"
#include "dsc/types.h"

#include <sched.h>

#define DSC_CORES_MAX 8192 /* as many as any Linux kernel can be built for */

struct dsc_cores {
    union {
        cpu_set_t set;
        unsigned char bytes[DSC_CORES_MAX / 8];
    } bits;
};

/* Processors that the process, not the thread alone, may run on. Where the kernel does not tell, all that are online.
 */
void dsc_cores_of(pid_t pid, struct dsc_cores *out_cores);

int32_t dsc_cores_count(const struct dsc_cores *cores);

/*
 * Where thread number `thread` of n_threads should run: the processors of `cores` that lie in one NUMA node with its
 * own when the threads are dealt out over the nodes in order; all of `cores` where there is one node or the kernel does
 * not tell. root is "" but in tests, where it is a folder with sys/devices in it.
 */
void dsc_cores_near(const char *root, const struct dsc_cores *cores, int32_t thread, int32_t n_threads,
                    struct dsc_cores *out_near);

#endif
