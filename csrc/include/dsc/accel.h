/*
 * An accelerator as a table of functions. The host is one too (accel/host.c), so that everything written against this
 * table is tested without a device. An accelerator's kernels live in a library of their own (libdsc_cuda.so), opened at
 * run time when a device is there.
 */
#ifndef DSC_ACCEL_H
#define DSC_ACCEL_H

#include "dsc/flat.h"
#include "dsc/nn.h"
#include "dsc/optim.h"
#include "dsc/status.h"
#include "dsc/tp.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DSC_ACCEL_ABI 3u

/* Elements (f64) of the scratch that hooks which add up over many thread blocks ask for. */
#define DSC_ACCEL_SCRATCH_ELEMS 16384

/*
 * Pointers in spans and tensors are device pointers; the lists themselves are host memory, borrowed for the call only.
 * Every call enqueues on stream (NULL: the default stream) of the current device and returns without waiting, unless it
 * says otherwise. All arguments are checked before anything is enqueued. No hook allocates device memory and none keeps
 * any between calls, so calls on different streams do not meet and calls may be captured in a graph.
 *
 * scratch: DSC_ACCEL_SCRATCH_ELEMS f64 of device memory with any contents, borrowed until stream has come past the
 * call. Calls that may run at the same time need one each; torch's allocator, asked on the same stream, gives just
 * that. Sums have the same bits in every run.
 *
 * A failing hook leaves its sentence in dsc_last_error() of the calling thread, as the rest of the ABI does.
 * DSC_EDEVICE may come late: the device reports the failure of an earlier call.
 */
struct dsc_accel {
    uint32_t abi;  /* DSC_ACCEL_ABI of the library */
    uint32_t size; /* sizeof(struct dsc_accel) of the library */
    const char *name;

    /* Devices that can be used now; 0 and DSC_OK when there is a driver but no device. Required. */
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

    /* As the dsc_muon_* halves. Required. */
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
     * As dsc_flat_reduce; out (device, two f64, added to, may be NULL, and so may scratch then) as in flat_sumsq.
     * Required.
     */
    dsc_status (*flat_reduce)(const struct dsc_span *srcs, int64_t n_srcs, float scale, bool accumulate,
                              const struct dsc_span *acc, double *out, double *scratch, void *stream);

    /* As dsc_flat_scale / dsc_flat_cast. Required. */
    dsc_status (*flat_scale)(const struct dsc_span *spans, int64_t n_spans, float scale, void *stream);
    dsc_status (*flat_cast)(const struct dsc_span *src, const struct dsc_span *dst, void *stream);

    /*
     * The calls of dsc/nn_calls.inc, for arguments that dsc_nn_<name>_check has passed: an accelerator's library does
     * not repeat it. Pointers are device pointers; no scratch is asked for, the host's is not looked at. Required.
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
};

/* Keeps a sentence for dsc_last_error() of the calling thread. */
typedef void dsc_accel_report(const char *sentence);

/*
 * The one symbol that an accelerator's library exports, under this name. report is kept: the library, which has no part
 * of libdsc in it, hands its sentences to it. The table is static.
 */
typedef const struct dsc_accel *(*dsc_accel_entry)(dsc_accel_report *report);
#define DSC_ACCEL_ENTRY "dsc_accel_entry_point"

/*
 * Opens an accelerator by its registry name ("host", "cuda"). library_dir is where its library lies (NULL: the loader's
 * search path). DSC_ENOTFOUND: no such name; DSC_ENOTSUP: no library there, an ABI that does not match, or no device;
 * dsc_last_error() says which. The table is static and is never closed; opening twice gives the same pointer. Any
 * thread may call this.
 */
DSC_API dsc_status dsc_accel_open(const char *name, const char *library_dir, const struct dsc_accel **out_accel);

#ifdef __cplusplus
}
#endif
#endif
