/* Finds how much more memory this process could get. */
#ifndef DSC_COMM_MEMORY_H
#define DSC_COMM_MEMORY_H

#include "dsc/types.h"

/*
 * Bytes that this process could still allocate: the least of the bytes available on the machine and in each control
 * group of this process (of both versions). Pages of files count as free, because the system can reclaim them.
 * INT64_MAX if the system gives no number. root is "", except in tests: there it is a folder with proc and sys in it.
 */
int64_t dsc_comm_available_bytes(const char *root);

#endif
