/*
 * Places states when the device's memory does not suffice: the tier plan, and the share of an update that the host
 * should do.
 *
 * A *tier* is a memory: the device's, the host's, NVMe. A *kind* is a set of states that moves between tiers as one
 * (masters, moments, ...). Everything here works on numbers only: it does not allocate, touches no tensor and measures
 * nothing, and the same numbers give the same plan on every rank.
 */
#ifndef DSC_TIER_H
#define DSC_TIER_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* From the fastest to the slowest. The values are part of the ABI. */
#define DSC_TIER_DEVICE 0
#define DSC_TIER_HOST 1
#define DSC_TIER_NVME 2
#define DSC_N_TIERS 3

/*
 * Limits the search: it looks at every placement that the limits allow, at most 3^16, and discards most of them early.
 */
#define DSC_TIER_MAX_KINDS 16

struct dsc_tier_kind {
    /*
     * held_bytes[t][m]: bytes that the kind takes in the memory of tier m while it lives in tier t. Entries off the
     * diagonal are buffers (in host memory, for a kind on NVMe) and parts that stay on the device when the kind lives
     * elsewhere.
     */
    int64_t held_bytes[DSC_N_TIERS][DSC_N_TIERS];
    int64_t link_bytes; /* a step moves these between device and host unless it lives on the device */
    int64_t disk_bytes; /* a step reads and writes these while it lives on NVMe */
    int32_t lowest;     /* the slowest tier that it may live in: DSC_TIER_DEVICE if it may not leave the device */
    int32_t follows;    /* index of an earlier kind, whose tier this kind shares, unless its own lowest tier is faster:
                           then it lives there; -1: free */
};

struct dsc_tier_plan {
    int32_t tiers[DSC_TIER_MAX_KINDS]; /* of each kind */
    int64_t held_bytes[DSC_N_TIERS];   /* of each memory */
    int64_t missing_bytes[DSC_N_TIERS];
    int64_t link_bytes; /* of one step, of all kinds */
    int64_t disk_bytes;
};

/*
 * Decides where each of n_kinds (0..DSC_TIER_MAX_KINDS) kinds lives.
 *
 * budget_bytes[m] >= 0 is the limit for memory m; INT64_MAX: no limit. Of the placements that fit, the plan is the
 * placement that moves the fewest bytes over the disk in a step. Ties are decided, in this order, by the fewest bytes
 * over the link, the fewest bytes in NVMe, the fewest bytes in host memory, and the faster tier for the first kind that
 * differs. So the kinds with the most traffic per byte stay nearest to the device, as far as whole kinds can be packed.
 *
 * DSC_EINVAL names the first bad argument. DSC_EOVERFLOW: the sum over all kinds does not fit int64_t. *out is
 * untouched after both. DSC_ENOSPC: no placement fits; *out is then the placement that lacks the fewest bytes, and
 * missing_bytes and the sentence give the bytes that each memory lacks.
 */
DSC_API dsc_status dsc_tier_plan(const struct dsc_tier_kind *kinds, int32_t n_kinds,
                                 const int64_t budget_bytes[DSC_N_TIERS], struct dsc_tier_plan *out);

/* An update that host and device share and run at the same time (Twin-Flow: DeepSpeed ZeRO-Offload++, 2023). */
struct dsc_twin_flow {
    int64_t n_elems;           /* this rank's shard; at most 2^50 */
    double device_elems_per_s; /* updates; rates are 1e-60 to 1e60 */
    double host_elems_per_s;
    double link_bytes_per_s;
    double link_bytes_per_elem;   /* 0 to 1e60: gradients down and weights up, for each element that the host updates */
    int64_t state_bytes_per_elem; /* > 0: size of an element's states on the device */
    int64_t device_bytes;         /* >= 0: memory for states on the device */
};

/*
 * Computes the fraction of the states, 0..1, that the host should hold and update so that host and device finish at the
 * same time:
 *
 *   t_host(r) = r * n_elems * (1 / host_elems_per_s + link_bytes_per_elem / link_bytes_per_s)    grows with r
 *   t_device(r) = (1 - r) * n_elems / device_elems_per_s                                         falls with r
 *   max(t_host, t_device) is least where they meet
 *
 * or, if the rest, floor((1 - r) * n_elems) elements, does not fit device_bytes, the smallest larger fraction for which
 * it fits. *out_step_s is max(t_host, t_device) there. DSC_EINVAL names the argument that is out of range or not a
 * number.
 */
DSC_API dsc_status dsc_twin_flow_ratio(const struct dsc_twin_flow *flow, double *out_ratio, double *out_step_s);

#ifdef __cplusplus
}
#endif
#endif
