/* The variants behind dsc_crc32c, for its tests: all give the same value. */
#ifndef DSC_CKPT_CRC32C_H
#define DSC_CKPT_CRC32C_H

#include "dsc/types.h"

/* Eight table look-ups for eight bytes; runs everywhere. */
uint32_t dsc_crc32c_by_table(uint32_t crc, const void *data, size_t n_bytes);

/* The processor's instruction on three streams at a time. Only where dsc_crc32c_has_instruction(). */
uint32_t dsc_crc32c_by_instruction(uint32_t crc, const void *data, size_t n_bytes);

bool dsc_crc32c_has_instruction(void);

#endif
