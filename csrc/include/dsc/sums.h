/*
 * Sums whose bits do not depend on how many ranks computed them: sums of vectors in a binary tree, and exact sums of
 * squares. Same bits for any thread count and any ISA.
 */
#ifndef DSC_SUMS_H
#define DSC_SUMS_H

#include "dsc/flat.h"
#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * The tree of a binary counter. Leaves, vectors of n_elems elements, are pushed one after another. While the two newest
 * nodes cover as many leaves as each other, they are merged: older + newer, in f32. So after n leaves there is one node
 * for each bit of n, and level l holds the node of 2^l leaves if bit l of n is set. The additions depend on the number
 * of leaves alone, not on how they are divided into calls.
 */

/* Levels that n_leaves (>= 0) leaves occupy: the bits of the number. */
DSC_API int32_t dsc_tree_n_levels(int64_t n_leaves);

/*
 * Pushes n_leaves leaves onto the tree of n_before leaves. levels[l] is the memory of level l, n_elems f32; its content
 * counts only if bit l of n_before is set. Leaves may have any dtypes, which are converted to f32 exactly. Leaves and
 * levels are read once, and only nodes that remain are written.
 *
 * levels must be at least dsc_tree_n_levels(n_before + n_leaves). Levels overlap neither leaves nor one another.
 * DSC_EINVAL names the argument that does not fit, with nothing written.
 */
DSC_API dsc_status dsc_tree_push(float *const *levels, int32_t n_levels, int64_t n_before,
                                 const struct dsc_span *leaves, int64_t n_leaves, int64_t n_elems,
                                 const struct dsc_par *par);

/*
 * out = scale * (the sum of all n_leaves (>= 1) leaves). The sum goes from the newest node to the oldest: sum = newest;
 * sum = older + sum. It is multiplied once, and not at all by 1, then rounded to out's dtype. Levels are only read; out
 * overlaps none of them. scale must be finite.
 */
DSC_API dsc_status dsc_tree_sum(const float *const *levels, int32_t n_levels, int64_t n_leaves, float scale,
                                const struct dsc_span *out, const struct dsc_par *par);

/*
 * An exact sum of squares of f32 as a number in base 2^32: the value is the sum over i of limbs[i] * 2^(32 i - 298).
 * The square of the least f32 is 2^-298, and the squares of INT64_MAX elements have a sum below 2^319. Limbs of several
 * sums may be added one by one; dsc_exact_carry makes them the limbs of one sum again.
 */
#define DSC_EXACT_LIMBS 20
#define DSC_EXACT_LOWEST (-298)

/*
 * The sum of the squares of the finite elements of all spans, and the number of the others. No rounding: elements may
 * be divided among calls, and ordered, in any way. Limbs are in [0, 2^32).
 */
DSC_API dsc_status dsc_exact_squares(const struct dsc_span *spans, int64_t n_spans, const struct dsc_par *par,
                                     int64_t out_limbs[DSC_EXACT_LIMBS], int64_t *out_n_nonfinite);

/* Carries from limb to limb, so that all limbs but the last are in [0, 2^32). The value stays. */
DSC_API void dsc_exact_carry(int64_t limbs[DSC_EXACT_LIMBS]);

#ifdef __cplusplus
}
#endif
#endif
