/*
 * The dynamic loss scale of fp16 training (mixed precision training, arXiv 1710.03740; DeepSpeed's fp16 keys): halve on
 * overflow once the hysteresis is used up, double after a window of good steps, never below a floor.
 */
#ifndef DSC_SCALER_H
#define DSC_SCALER_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct dsc_scaler_config {
    uint32_t size;               /* sizeof(struct dsc_scaler_config) */
    bool is_dynamic;             /* false: scale never changes */
    bool consecutive_hysteresis; /* true: a good step refills the hysteresis; false: only growth does */
    double initial_scale;        /* finite, > 0 */
    double factor;               /* > 1; 2 */
    double min_scale;            /* finite, > 0 */
    int64_t window_steps;        /* >= 1 good steps between growths */
    int32_t hysteresis;          /* >= 1 overflows until the scale is cut */
};

#define DSC_SCALER_CONFIG_INIT                                                    \
    {                                                                             \
        sizeof(struct dsc_scaler_config), true, false, 65536.0, 2.0, 1.0, 1000, 2 \
    }

/* Plain data: a checkpoint saves exactly these fields. The caller owns the storage. */
struct dsc_scaler {
    struct dsc_scaler_config config;
    double scale;
    int64_t step;               /* updates so far */
    int64_t last_overflow_step; /* -1 before any */
    int32_t hysteresis_left;
};

DSC_API dsc_status dsc_scaler_init(struct dsc_scaler *scaler, const struct dsc_scaler_config *config);

/*
 * Counts one attempted step. *out_at_floor is true if the step overflowed, the hysteresis was used up and a dynamic
 * scale could not be cut any further: a smaller scale cannot save the run. It is always false for a static scale. As in
 * DeepSpeed, the window counts the good steps after the first good step since an overflow (or the start). Once used up,
 * the hysteresis stays used up until the scale grows (with consecutive_hysteresis: until a good step).
 */
DSC_API dsc_status dsc_scaler_update(struct dsc_scaler *scaler, bool has_overflow, bool *out_at_floor);

/* Puts back a saved state; DSC_EINVAL (and no change) when a field is out of range. */
DSC_API dsc_status dsc_scaler_restore(struct dsc_scaler *scaler, double scale, int64_t step, int64_t last_overflow_step,
                                      int32_t hysteresis_left);

#ifdef __cplusplus
}
#endif
#endif
