/*
 * What checkpoints need below their format: checksums, the map from one arrangement's pieces of a tensor to another's, and an atomic swap of names.
 */
#ifndef DSC_CKPT_H
#define DSC_CKPT_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * CRC32C (Castagnoli; RFC 3720, appendix B.4) of n_bytes at data, going on from crc: 0 to begin with, the value of what lies before to
 * go on. "123456789" gives 0xe3069283. The processor's instruction where it has one, tables elsewhere: the same value.
 */
DSC_API uint32_t dsc_crc32c(uint32_t crc, const void *data, size_t n_bytes);

/* The same of from, which is copied to into on the way: memory is read once. The two do not overlap. */
DSC_API uint32_t dsc_crc32c_copy(uint32_t crc, void *into, const void *from, size_t n_bytes);

/* The most dimensions of a tensor, those that torch has. */
#define DSC_RESHAPE_MAX_DIMS 64

/* Elements [src_elem, src_elem + n_elems) of what a piece stores are elements [dst_elem, dst_elem + n_elems) of what is wanted. */
struct dsc_reshape_run {
    int64_t piece;
    int64_t src_elem;
    int64_t dst_elem;
    int64_t n_elems; /* > 0 */
};

/*
 * Plans how a part of a tensor of shape[n_dims] is put together from the pieces that it was saved in.
 *
 * A part is 2 * n_dims + 2 numbers: start[n_dims], size[n_dims], begin, n_elems. It means the box [start[d], start[d] + size[d]) along each
 * dimension d, and of its elements in row-major order those in [begin, begin + n_elems). pieces is n_pieces such parts, whose elements are
 * stored one after another; wanted is one. Where pieces overlap, the lower one is taken.
 *
 * Call with out_runs NULL: *out_n_runs is then how many entries the array needs (work space included, up to three times the runs of the
 * plan). Then with an array of capacity entries: *out_n_runs runs of the plan, as few as there can be, by piece and then by src_elem;
 * each wanted element lies in exactly one. The rest of the array is scratch.
 *
 * DSC_EINVAL names the part that does not fit the shape, or the first wanted element that no piece holds; DSC_EOVERFLOW when the tensor's
 * elements (or the entries needed) do not fit int64_t. *out_n_runs is untouched on failure. Time is O(pieces) for whole boxes and cuts
 * along the first dimension, O(runs log runs) otherwise.
 */
DSC_API dsc_status dsc_reshape_plan(const int64_t *shape, int32_t n_dims, const int64_t *pieces, int64_t n_pieces, const int64_t *wanted,
                                    int64_t capacity, struct dsc_reshape_run *out_runs, int64_t *out_n_runs);

/*
 * Swaps what two names stand for, atomically: whoever looks sees both before or both after. Returns 0, or -errno of the system;
 * -ENOSYS, -EINVAL and -ENOTSUP are a kernel or file system without it (-EINVAL also when one of them lies inside the other).
 */
DSC_API int dsc_exchange_paths(const char *a, const char *b);

#ifdef __cplusplus
}
#endif
#endif
