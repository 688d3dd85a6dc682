/* The state of the emulated library that a test sets and reads, exported as dsc_emulator. */
#ifndef DSC_EMULATOR_CONTROL_H
#define DSC_EMULATOR_CONTROL_H

#include <stdint.h>

struct dsc_emulator {
    int32_t driver_version;   /* 0: no driver */
    int32_t n_devices;
    int32_t fail_at_launch;   /* the launch that fails, counted from 1; 0: none */
    const void *host_pointer; /* memory that no device sees */
    int64_t n_launches;       /* so far */
    int64_t n_blocks;         /* so far */
    int32_t max_param_bytes;  /* of any launch so far */
};

#endif
