/*
 * Records which process made an object. A child of fork() gets a copy of the object, but neither its threads nor a
 * right to its place in the kernel: requests, queues and descriptors there stay the parent's.
 *
 * An object with threads or kernel queues notes its process when it is made. In another one its calls are refused, and
 * its destructor does nothing: a lock may be held by a thread that the child does not have, and memory may be half
 * written by one. The child's copies are freed when it ends.
 */
#ifndef DSC_PROCESS_H
#define DSC_PROCESS_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct dsc_process {
    int64_t pid;     /* for people: numbers are used again, and are others in another namespace */
    int64_t n_forks; /* between the program's start, or the loading of this library, and this process */
};

/* Writes down the calling process. DSC_ENOMEM. Any thread. */
DSC_API dsc_status dsc_process_note(struct dsc_process *out_process);

/*
 * Whether the calling process is that one. A memory access; takes no lock. Children of clone() or vfork() that go on
 * without fork()'s handlers are not told apart.
 */
DSC_API bool dsc_process_is_this(const struct dsc_process *process);

/*
 * DSC_OK in that process. DSC_ESTATE in a process forked from it, with a sentence: `what` ("this I/O engine") belongs
 * to process N, make another.
 */
DSC_API dsc_status dsc_process_check(const struct dsc_process *process, const char *what);

#ifdef __cplusplus
}
#endif
#endif
