/*
 * Where states live when the device's memory does not suffice: the tier plan, and how much of an update the host should
 * take.
 *
 * A *tier* is a memory: the device's, the host's, NVMe. A *kind* is a set of states that moves between them as one
 * (masters, moments, ...). Only numbers: nothing here allocates, touches a tensor or measures anything, and the same
 * numbers give the same plan on every rank.
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

/* The plan looks at every placement that the limits leave, at most 3^16, and most are cut off early. */
#define DSC_TIER_MAX_KINDS 16

struct dsc_tier_kind {
    /*
     * held_bytes[t][m]: bytes it takes in the memory of tier m while it lives in tier t. Off the diagonal stand buffers
     * (in host memory, for a kind on NVMe) and the parts that stay on the device when the kind lives elsewhere.
     */
    int64_t held_bytes[DSC_N_TIERS][DSC_N_TIERS];
    int64_t link_bytes; /* a step moves these between device and host unless it lives on the device */
    int64_t disk_bytes; /* a step reads and writes these while it lives on NVMe */
    int32_t lowest;     /* the slowest tier that it may live in: DSC_TIER_DEVICE if it may not leave the device */
    int32_t follows; /* index of an earlier kind: it lives where that one does, or in its lowest where that is faster;
                        -1: free */
};

struct dsc_tier_plan {
    int32_t tiers[DSC_TIER_MAX_KINDS]; /* of each kind */
    int64_t held_bytes[DSC_N_TIERS];   /* of each memory */
    int64_t missing_bytes[DSC_N_TIERS];
    int64_t link_bytes; /* a step's, of all kinds */
    int64_t disk_bytes;
};

/*
 * Decides where each of n_kinds (0..DSC_TIER_MAX_KINDS) kinds lives.
 *
 * budget_bytes[m] >= 0 is the limit for memory m; INT64_MAX: no limit. The plan is the placement that fits and moves
 * least over the disk in a step; of equals, least over the link; then with the fewest bytes in NVMe, then in host
 * memory; then the placement whose first differing kind lives in the faster tier. The kinds touched most per byte so
 * stay nearest, as far as whole kinds can be packed.
 *
 * DSC_EINVAL names the first bad argument, DSC_EOVERFLOW says that all kinds together do not add up in int64_t; *out is
 * then untouched. DSC_ENOSPC when no placement fits: *out is the placement that lacks the fewest bytes, and
 * missing_bytes and the sentence give their number in each memory.
 */
DSC_API dsc_status dsc_tier_plan(const struct dsc_tier_kind *kinds, int32_t n_kinds,
                                 const int64_t budget_bytes[DSC_N_TIERS], struct dsc_tier_plan *out);

/* An update that host and device share, both at once (Twin-Flow: DeepSpeed ZeRO-Offload++, 2023).
 */
struct dsc_twin_flow {
    int64_t n_elems;           /* this rank's shard; at most 2^50 */
    double device_elems_per_s; /* updates; rates are 1e-60 to 1e60 */
    double host_elems_per_s;
    double link_bytes_per_s;
    double link_bytes_per_elem;   /* 0 to 1e60: gradients down and weights up, for each element that the host updates */
    int64_t state_bytes_per_elem; /* > 0: size of an element's states on the device */
    int64_t device_bytes;         /* >= 0: room for states there */
};

/*
 * Computes the part of the states, 0..1, that the host should hold and update so that both are done at the same time:
 *
 *   t_host(r) = r * n_elems * (1 / host_elems_per_s + link_bytes_per_elem / link_bytes_per_s)    grows with r
 *   t_device(r) = (1 - r) * n_elems / device_elems_per_s                                         falls with r
 *   max(t_host, t_device) is least where they meet
 *
 * or the smallest larger part that lets the rest, floor((1 - r) * n_elems) elements, fit device_bytes. *out_step_s is
 * max(t_host, t_device) there. DSC_EINVAL names the argument that is out of range or not a number.
 */
DSC_API dsc_status dsc_twin_flow_ratio(const struct dsc_twin_flow *flow, double *out_ratio, double *out_step_s);

#ifdef __cplusplus
}
#endif
#endif
