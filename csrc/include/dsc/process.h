/*
 * Records which process made an object. A child of fork() gets a copy of the object, but not its threads. Its requests,
 * queues and descriptors in the kernel still belong to the parent.
 *
 * An object with threads or kernel queues notes its process when it is made. In another process its calls are refused
 * and its destructor does nothing: a thread that the child does not have may hold a lock, or may have written memory
 * only in part. The child's copies are freed when the child ends.
 */
#ifndef DSC_PROCESS_H
#define DSC_PROCESS_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct dsc_process {
    int64_t pid;     /* for messages only: process ids are reused, and differ between PID namespaces */
    int64_t n_forks; /* between the program's start, or the loading of this library, and this process */
};

/* Writes down the calling process. DSC_ENOMEM. Any thread. */
DSC_API dsc_status dsc_process_note(struct dsc_process *out_process);

/*
 * Whether the calling process is the recorded process. Costs a memory access and takes no lock. Does not recognise
 * children of clone() or vfork(), which run without the handlers of fork().
 */
DSC_API bool dsc_process_is_this(const struct dsc_process *process);

/*
 * DSC_OK in the recorded process. DSC_ESTATE in a process forked from it; the sentence says that `what` ("this I/O
 * engine") belongs to process N, and that the caller should make another.
 */
DSC_API dsc_status dsc_process_check(const struct dsc_process *process, const char *what);

#ifdef __cplusplus
}
#endif
#endif
