/*
 * An accelerator as a table of functions. The host is an accelerator too (accel/host.c), so that code written against
 * this table is tested without a device. The kernels of another accelerator live in a separate library
 * (libdsc_cuda.so), which is opened at run time if a device is present.
 */
#ifndef DSC_ACCEL_H
#define DSC_ACCEL_H

#include "dsc/flat.h"
#include "dsc/moe.h"
#include "dsc/nn.h"
#include "dsc/optim.h"
#include "dsc/quant.h"
#include "dsc/status.h"
#include "dsc/tp.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DSC_ACCEL_ABI 5u

/* Number of f64 elements of scratch for hooks that sum over many thread blocks. */
#define DSC_ACCEL_SCRATCH_ELEMS 16384

/*
 * Pointers in spans and tensors are device pointers; the lists themselves are host memory, borrowed for the call only.
 * Every call enqueues on stream (NULL: the default stream) of the current device, and returns without waiting, unless
 * its comment says otherwise. All arguments are checked before anything is enqueued. No hook allocates device memory or
 * keeps any between calls. So calls on different streams share no memory, and a graph may capture calls.
 *
 * scratch: DSC_ACCEL_SCRATCH_ELEMS f64 of device memory with any contents, borrowed until stream has finished the call.
 * Calls that may run at the same time need separate scratch; memory that torch's allocator gives for the same stream
 * fulfils this. Sums have the same bits in every run.
 *
 * A failing hook sets dsc_last_error() of the calling thread, like the rest of the ABI. DSC_EDEVICE may come late: it
 * may report the failure of an earlier call on the device.
 */
struct dsc_accel {
    uint32_t abi;  /* DSC_ACCEL_ABI of the library */
    uint32_t size; /* sizeof(struct dsc_accel) of the library */
    const char *name;

    /* Number of devices that can be used now; 0 and DSC_OK if there is a driver but no device. Required. */
    dsc_status (*device_count)(int32_t *out_n_devices);

    /*
     * As dsc_optim_step. Kinds are named, so that a library need not share the host's registry. scratch may be
     * NULL for a kind without norms. Required.
     */
    dsc_status (*optim_step)(const char *kind, const struct dsc_optim_args *args,
                             const struct dsc_optim_tensor *tensors, int64_t n_tensors, double *scratch, void *stream);

    /*
     * As dsc_optim_norms / dsc_optim_apply; out_sumsq and ratios are device memory, 2 * n_tensors and n_tensors f64.
     * Required.
     */
    dsc_status (*optim_norms)(const char *kind, const struct dsc_optim_args *args,
                              const struct dsc_optim_tensor *tensors, int64_t n_tensors, double *out_sumsq,
                              double *scratch, void *stream);
    dsc_status (*optim_apply)(const char *kind, const struct dsc_optim_args *args,
                              const struct dsc_optim_tensor *tensors, int64_t n_tensors, const double *ratios,
                              void *stream);

    /* As dsc_muon_momentum / dsc_muon_apply. Required. */
    dsc_status (*muon_momentum)(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors,
                                int64_t n_tensors, void *stream);
    dsc_status (*muon_apply)(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors,
                             int64_t n_tensors, void *stream);

    /*
     * As dsc_flat_sumsq; out is device memory: out[0] = sum of squares, out[1] = number of non-finite elements; both
     * are ADDED to the values in out. Required.
     */
    dsc_status (*flat_sumsq)(const struct dsc_span *spans, int64_t n_spans, double *out, double *scratch, void *stream);

    /*
     * As dsc_flat_reduce. out is as in flat_sumsq: two f64 of device memory that are added to. out may be NULL, and
     * scratch too in that case. Required.
     */
    dsc_status (*flat_reduce)(const struct dsc_span *srcs, int64_t n_srcs, float scale, bool accumulate,
                              const struct dsc_span *acc, double *out, double *scratch, void *stream);

    /* As dsc_flat_scale / dsc_flat_cast. Required. */
    dsc_status (*flat_scale)(const struct dsc_span *spans, int64_t n_spans, float scale, void *stream);
    dsc_status (*flat_cast)(const struct dsc_span *src, const struct dsc_span *dst, void *stream);

    /*
     * The calls of dsc/nn_calls.inc, for arguments that have passed dsc_nn_<name>_check: an accelerator's library does
     * not repeat the check. Pointers are device pointers. The calls need no scratch, and ignore the scratch fields of
     * the host. Required.
     */
#define DSC_NN_CALL(name) dsc_status (*nn_##name)(const struct dsc_nn_##name *call, void *stream);
#include "dsc/nn_calls.inc"
#undef DSC_NN_CALL

    /* As dsc_tp_cross_entropy_*, for arguments that their checks have passed. Required. */
    dsc_status (*cross_entropy_rows)(const void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows,
                                     int64_t vocab_size, struct dsc_tp_row *out_rows, void *stream);
    dsc_status (*cross_entropy_grad)(void *logits, dsc_dtype dtype, const int64_t *targets, int64_t n_rows,
                                     int64_t vocab_size, const float *log_sum, const float *scale, double smoothing,
                                     int64_t full_vocab_size, void *stream);

    /*
     * The calls of dsc/moe_calls.inc, for arguments that have passed dsc_moe_<name>_check, and dsc_moe_invert after
     * its check. All pointers, scratch too, are device pointers. A launch cannot wait for the contents of order and
     * inverse. Wrong numbers in them read and write nothing outside of the arrays, and give NaN: in the gathered row of
     * a missing slot, in a sum with a missing row, and in both gradients of slots with one row in common. Numbers
     * missing in order have the inverse -1. Required.
     */
#define DSC_MOE_CALL(name) dsc_status (*moe_##name)(const struct dsc_moe_##name *call, void *stream);
#include "dsc/moe_calls.inc"
#undef DSC_MOE_CALL
    dsc_status (*moe_invert)(const int64_t *order, int64_t n, int64_t *out_inverse, void *stream);

    /*
     * The calls of dsc/quant_calls.inc, for arguments that have passed dsc_quant_<name>_check, with the host's bits.
     * Required.
     */
#define DSC_QUANT_CALL(name) dsc_status (*quant_##name)(const struct dsc_quant *call, double *scratch, void *stream);
#include "dsc/quant_calls.inc"
#undef DSC_QUANT_CALL
};

/* Keeps a sentence for dsc_last_error() of the calling thread. */
typedef void dsc_accel_report(const char *sentence);

/*
 * The only symbol that an accelerator's library exports; its name is DSC_ACCEL_ENTRY. The library keeps report and
 * passes the sentences of errors to it, because no part of libdsc is linked into the library. The table is static.
 */
typedef const struct dsc_accel *(*dsc_accel_entry)(dsc_accel_report *report);
#define DSC_ACCEL_ENTRY "dsc_accel_entry_point"

/*
 * Opens an accelerator by its registry name ("host", "cuda"). library_dir is the folder of the accelerator's library
 * (NULL: the loader's search path). DSC_ENOTFOUND: no such name. DSC_ENOTSUP: no library in that folder, an ABI that
 * does not match, or no device; dsc_last_error() says which. The table is static and is never closed; opening twice
 * gives the same pointer. Any thread may call this.
 */
DSC_API dsc_status dsc_accel_open(const char *name, const char *library_dir, const struct dsc_accel **out_accel);

#ifdef __cplusplus
}
#endif
#endif
