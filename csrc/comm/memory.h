/* How much memory this process could still be given. */
#ifndef DSC_COMM_MEMORY_H
#define DSC_COMM_MEMORY_H

#include "dsc/types.h"

/*
 * Bytes that the system would still give out: the least of the machine's and of each control group's (of both versions)
 * that this process is in; pages of files can be taken back and count as free. INT64_MAX when nothing is told. root is
 * "" but in tests, where it is a folder with proc and sys in it.
 */
int64_t dsc_comm_available_bytes(const char *root);

#endif
