/* Shared by the writer and the reader of block files: checked settings, and the engine for them. */
#ifndef DSC_CKPT_BLOCKS_H
#define DSC_CKPT_BLOCKS_H

#include "dsc/aio.h"
#include "dsc/ckpt.h"

/* DSC_EINVAL names the field that is out of range. */
dsc_status dsc_block_config_check(const struct dsc_block_config *config);

/* An engine that keeps n_bytes in flight, and a ring of that many bytes, aligned. Neither is left behind on failure. */
dsc_status dsc_block_ring_create(const char *backend, size_t n_bytes, dsc_aio **out_aio, unsigned char **out_memory);

/*
 * Waits for transfers in flight, and frees both. If the engine has given up, memory that the kernel may still write to
 * is not freed. NULL is fine.
 */
void dsc_block_ring_destroy(dsc_aio *aio, unsigned char *memory);

#endif
