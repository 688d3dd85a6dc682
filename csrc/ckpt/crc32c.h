/* The variants behind dsc_crc32c, for its tests: all give the same value. Beside them its arithmetic. */
#ifndef DSC_CKPT_CRC32C_H
#define DSC_CKPT_CRC32C_H

#include "dsc/types.h"

/* Eight table look-ups for eight bytes; runs everywhere. */
uint32_t dsc_crc32c_by_table(uint32_t crc, const void *data, size_t n_bytes);

/* The processor's instruction on three streams at a time. Only where dsc_crc32c_has_instruction(). */
uint32_t dsc_crc32c_by_instruction(uint32_t crc, const void *data, size_t n_bytes);

bool dsc_crc32c_has_instruction(void);

/* a(x) * b(x) mod P(x); bit 31 of a value is the coefficient of x^0. */
uint32_t dsc_crc32c_multiply(uint32_t a, uint32_t b);

/* x^(8 * n_bytes) mod P(x): a register times it is the register after n_bytes zero bytes. O(log n_bytes). */
uint32_t dsc_crc32c_power(uint64_t n_bytes);

#endif
